"""Tests of writes that only some ranks' local tensors hold: they count as writes on every rank, so
that autograd accepts or refuses the program on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split
LAYOUTS = (B, S(0), S(1))


def _without_grad(write: Callable[[Any], Any]) -> Callable[[Any], None]:
    def run(x: Any) -> None:
        with torch.no_grad():
            write(x)

    return run


def _add_to_row(x: Any) -> None:
    x[4] += 1


WRITES: dict[str, Callable[[Any], Any]] = {
    "first row": lambda x: x.__setitem__(0, 1.0),
    "last row": lambda x: x.__setitem__(4, 1.0),
    "row of values": lambda x: x.__setitem__(0, torch.ones(3)),
    "column": lambda x: x.__setitem__((slice(None), 0), 1.0),
    "element": lambda x: x.__setitem__((4, 2), 1.0),
    "rows": lambda x: x.__setitem__(slice(3, None), 1.0),
    "number": lambda x: x.__setitem__((0, torch.tensor(1)), 1.0),
    "numbers": lambda x: x.__setitem__(torch.tensor([4]), 1.0),
    "of flat": lambda x: x.view(-1).__setitem__(0, 1.0),
    "of transposed": lambda x: x.t().__setitem__(0, 1.0),
    "view of row": lambda x: x[0].mul_(2),
    "row of row": lambda x: x[0].__setitem__(1, 1.0),
    "augmented": _add_to_row,
}


def refusals(make: Callable[[], Any]) -> list[str]:
    """Return the errors for writes into a leaf."""
    out = []
    for write in WRITES.values():
        with pytest.raises(RuntimeError) as caught:
            write(make().requires_grad_())
        out.append(str(caught.value))
    return out


def start() -> torch.Tensor:
    return torch.arange(15.0).view(5, 3).clone()


def laid_out(sbp: Any) -> Any:
    return start().to_global(flow.placement.all("cpu"), B).to_global(sbp=sbp).detach()  # type: ignore[attr-defined]


def refusals_on_ranks() -> list[list[str]]:
    return [refusals(lambda sbp=sbp: laid_out(sbp)) for sbp in LAYOUTS]  # type: ignore[misc]


def test_a_write_into_a_leaf_is_refused_on_every_rank() -> None:
    of_leaf = "a leaf Variable that requires grad is being used in an in-place operation."
    for found in run_on(2, refusals_on_ranks):
        for errors, sbp in zip(found, LAYOUTS, strict=True):
            for name, got, want in zip(WRITES, errors, refusals(start), strict=True):
                assert got.endswith(of_leaf), (name, sbp)
                # a flat S(1) is written as a whole
                assert got == want or (name, sbp) == ("of flat", S(1)), (name, sbp)


def refused_outside() -> list[str]:
    """The writes that a rank outside the placement can tell from its own tensor."""
    placement, out = flow.placement("cpu", [1]), []
    for write in (lambda x: x.mul_(2), WRITES["first row"], lambda x: x.zero_()):
        x: Any = start().to_global(placement, B).detach().requires_grad_()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad") as caught:
            write(x)
        out.append(str(caught.value))
    return out


def test_a_write_into_a_leaf_is_refused_outside_its_placement() -> None:
    first, second = run_on(2, refused_outside)
    assert first == second


def after_forward(make: Callable[[], Any]) -> dict[str, tuple[str, int]]:
    """Return what a backward pass says after each write into a tensor that it saved."""
    out = {}
    for name, write in {
        **WRITES,
        **{f"{name} without grad": _without_grad(write) for name, write in WRITES.items()},
        "detached row": lambda x: x.detach()[0].mul_(2),
        "detached set": lambda x: x.detach().__setitem__(4, 1.0),
        "data": lambda x: x.data.__setitem__(4, 1.0),
    }.items():
        saved = make().requires_grad_() * 1
        loss = (saved * saved).sum()
        before = saved._version
        write(saved)
        try:
            loss.backward()
            said = ""
        except RuntimeError as error:
            said = str(error)
        out[name] = said, saved._version - before
    return out


def after_forward_on_ranks() -> list[Any]:
    return [after_forward(lambda sbp=sbp: laid_out(sbp)) for sbp in LAYOUTS]  # type: ignore[misc]


def test_a_write_counts_on_every_rank() -> None:
    want = after_forward(start)
    first, second = run_on(2, after_forward_on_ranks)
    assert first == second
    for found, sbp in zip(first, LAYOUTS, strict=True):
        for name, (said, writes) in found.items():
            refused = "modified by an inplace operation" in want[name][0]
            assert ("modified by an inplace operation: a tensor (each" in said) == refused, (
                name,
                sbp,
            )
            assert not said or said.startswith("test_writes_on_all_ranks.py:"), (name, sbp)
            assert bool(writes) == bool(want[name][1]), (name, sbp)


def gradient_refused() -> str:
    x = laid_out(S(0)).requires_grad_()
    saved = x * 1
    loss = (saved * saved).sum()
    saved[4] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        torch.autograd.grad(loss, x)
    return str(caught.value)


def test_grad_refuses_it_with_the_same_text_on_every_rank() -> None:
    first, second = run_on(2, gradient_refused)
    assert first == second
    assert first.startswith("test_writes_on_all_ranks.py:")
