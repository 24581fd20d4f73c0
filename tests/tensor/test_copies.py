"""Tests of ``copy.copy`` and ``copy.deepcopy``: copies share memory with each other where the
originals do, and they have the attributes that users set."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on

import globaltensor as flow

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
LAYOUTS = (B, S(0), S(1), P)

VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "rows": lambda x: x[1:3],
    "row": lambda x: x[0],
    "column": lambda x: x[:, 1],
    "transposed": lambda x: x.t(),
    "row of rows": lambda x: x[1:][0],
    "number": lambda x: x[torch.tensor(2)],
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "a row of it detached": lambda x: x.detach()[3],
}


def copied(base: Any, name: str, base_first: bool) -> list[Any]:
    """Return the values of copies after writes into either, and those of the originals."""
    pair = {"base": base, "view": VIEWS[name](base)}
    copies = copy.deepcopy(pair if base_first else dict(reversed(pair.items())))
    copies["view"].add_(1)
    copies["base"].mul_(2)
    out = [copies["base"], copies["view"], base, pair["view"]]
    pair["view"].sub_(5)
    return [torch.from_numpy(t.numpy()).tolist() for t in (*out, base, copies["base"])]


def start() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3).clone()


def copied_on_ranks(name: str) -> list[list[Any]]:
    where = flow.placement.all("cpu")
    return [
        copied(start().to_global(where, B).to_global(sbp=sbp).detach(), name, base_first)  # type: ignore[attr-defined]
        for sbp in LAYOUTS
        for base_first in (True, False)
    ]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.sweep(3)
def test_copies_share_memory_as_the_originals_do(name: str) -> None:
    want = copied(start(), name, True)
    assert run_on(2, copied_on_ranks, name) == [[want] * 2 * len(LAYOUTS)] * 2


def attributes_on_ranks() -> list[Any]:
    where, out = flow.placement.all("cpu"), []
    for sbp in LAYOUTS:
        x: Any = start().to_global(where, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
        for t in (x, x[1:3], torch.nn.Parameter(x.detach()), x.detach().requires_grad_()):
            t.note, t.rows = "seen", [1, 2]
            shallow, deep = copy.copy(t), copy.deepcopy(t.detach() if not t.is_leaf else t)
            out.append(
                [
                    shallow.note,
                    shallow.rows is t.rows,
                    getattr(deep, "rows", None),
                    getattr(deep, "rows", None) is t.rows,
                    isinstance(shallow, torch.nn.Parameter) == isinstance(t, torch.nn.Parameter),
                    shallow.requires_grad == t.requires_grad,
                    deep.sbp == t.sbp,
                ]
            )
            with torch.no_grad():
                shallow.add_(1)
            out.append(bool((t == shallow).all()) and not bool((t == deep).any()))
    return out


def test_copies_have_the_attributes_and_a_shallow_copy_shares_memory() -> None:
    want = [["seen", True, [1, 2], False, True, True, True], True] * 4 * len(LAYOUTS)
    assert run_on(2, attributes_on_ranks) == [want, want]


def gradients_of_copies() -> list[bool]:
    where, out = flow.placement.all("cpu"), []
    for sbp in LAYOUTS:
        for parameter in (False, True):
            x: Any = start().to_global(where, B).to_global(sbp=sbp).detach().requires_grad_()  # type: ignore[attr-defined]
            x = torch.nn.Parameter(x.detach()) if parameter else x
            (x * x).sum().backward()
            out.append(copy.deepcopy(x).grad is None)
    return out


def test_the_copy_of_a_parameter_has_no_gradient_as_in_torch() -> None:
    want = [False, True] * len(LAYOUTS)
    assert run_on(2, gradients_of_copies) == [want, want]


def tied_copy_on_ranks() -> list[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    flow.parallelize(model, flow.placement.all("cpu"), "fsdp")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    return [float(twin[1].weight.abs().sum()), float(model[1].weight.abs().sum()) > 0]


def test_the_copy_of_a_module_keeps_its_shared_memory() -> None:
    assert run_on(2, tied_copy_on_ranks) == [[0.0, True]] * 2
