"""Tests of functions that return their operand or a view of it: they do so on global tensors, and
other functions return new tensors.

In-place code and `retain_grad` depend on the difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.bodies import Bodies, values
from support.opinfo import dtype_of, name_of, ops
from support.oracle import swapped, tensors_in
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
BODIES = Bodies()
on = BODIES.on


#: Each part has every third body. All bodies also run on simulated ranks.
PARTS_ON_PROCESSES = 3


def on_processes(part: int) -> None:
    BODIES.run(part, PARTS_ON_PROCESSES)


@pytest.mark.parametrize("part", range(PARTS_ON_PROCESSES))
@pytest.mark.sweep(PARTS_ON_PROCESSES)
def test_on_processes(part: int) -> None:
    run_on(2, on_processes, part)


# --------------------------------------------------------------------------------- torch's database

PARTS = 24
SAMPLES = 7
#: Ops whose results have no defined values, or have another storage or layout.
LEFT_OUT = ("empty", "new_empty", "resize_", "resize_as_", "to_sparse")


def told(
    call: Callable[..., Any], operands: list[Any], sample: Any
) -> tuple[list[int | None], list[bool]]:
    """Return two lists. The first has the index of the operand that each result is, or None. The
    second says for each operand if a write into the results changes it."""
    these = iter(operands)
    ins, named = swapped([sample.input, *sample.args], these), swapped(sample.kwargs, these)
    torch.manual_seed(0)
    results = tensors_in(call(*ins, **named))
    before = [(gather_global_value(t) if t.is_global else t).clone() for t in operands]
    is_operand = [next((i for i, t in enumerate(operands) if t is r), None) for r in results]
    for r in results:
        try:
            r.fill_(True if r.dtype is torch.bool else 77)
        except RuntimeError:  # several elements share memory, so torch forbids writes
            return is_operand, []
    return is_operand, [
        not torch.equal((gather_global_value(t) if t.is_global else t).nan_to_num(), b.nan_to_num())
        for t, b in zip(operands, before, strict=True)
    ]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_every_function_returns_what_torch_returns(part: int) -> None:
    placement, wrong = flow.placement("cpu", [0]), []
    for op in ops()[part::PARTS]:
        dtype = dtype_of(op)
        if dtype is None or op.name in LEFT_OUT:
            continue
        torch.manual_seed(0)
        samples = list(
            itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), SAMPLES)
        )
        for call, (number, sample) in itertools.product(
            filter(None, (op.op, op.method_variant)), enumerate(samples)
        ):
            operands = tensors_in([sample.input, *sample.args, sample.kwargs])
            if not operands or any(
                t.layout is not torch.strided or t.numel() > 5000 for t in operands
            ):
                continue
            try:
                want = told(call, [t.detach().clone() for t in operands], sample)
            except Exception:
                continue
            try:
                got = told(
                    call, [t.detach().clone().to_global(placement, B) for t in operands], sample
                )
            except flow.errors.GlobalTensorError:
                continue
            if got != want:
                wrong.append(
                    f"{name_of(op)} {number} {[tuple(t.shape) for t in operands]}: torch {want}, "
                    f"ours {got}"
                )
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------ by name

DROPS = ("dropout", "alpha_dropout", "feature_alpha_dropout")
#: Functions that return their operand, a float tensor [4, 3].
ITSELF: dict[str, Callable[[Any], Any]] = {
    **{name: lambda x, name=name: getattr(F, name)(x, 0.5, False) for name in DROPS},
    **{f"{name} with p=0": lambda x, name=name: getattr(F, name)(x, 0.0, True) for name in DROPS},
    **{
        f"torch.{name}": lambda x, name=name: getattr(torch, name)(x, 0.5, False)
        for name in (*DROPS, "feature_dropout")
    },
    **{
        name: lambda x, name=name: getattr(nn, name)().eval()(x)
        for name in ("Dropout", "AlphaDropout", "FeatureAlphaDropout", "Identity")
    },
    **{
        f"torch.{name}": lambda x, name=name: getattr(torch, name)(x)
        for name in (
            "positive",
            "conj",
            "real",
            "resolve_conj",
            "resolve_neg",
            "conj_physical",
            "atleast_1d",
            "atleast_2d",
        )
    },
    **{
        f"x.{name}": lambda x, name=name: getattr(x, name)()
        for name in (
            "positive",
            "conj",
            "resolve_conj",
            "resolve_neg",
            "conj_physical",
            "contiguous",
            "double",
            "cpu",
            "to_dense",
            "requires_grad_",
        )
    },
    **{
        f"Tensor.{name}": lambda x, name=name: getattr(torch.Tensor, name)(x)
        for name in ("positive", "conj", "contiguous", "double", "cpu", "to_dense")
    },
    "plus": lambda x: +x,
    "real": lambda x: x.real,
    "flatten": lambda x: x.flatten(1),
    "to its dtype": lambda x: x.to(torch.float64),
    "to itself": lambda x: x.to(x),
    "to where it is": lambda x: x.to("cpu", torch.float64),
    "Tensor.to": lambda x: torch.Tensor.to(x, torch.float64),
    "type": lambda x: x.type(torch.float64),
    "type_as": lambda x: x.type_as(x),
    "Tensor.type_as": lambda x: torch.Tensor.type_as(x, x),
    "broadcast": lambda x: torch.broadcast_tensors(x)[0],
    "broadcast with less": lambda x: torch.broadcast_tensors(x[0], x)[1],
    "in a list": lambda x: torch.atleast_1d([x, x])[1],
    "sum to its size": lambda x: x.sum_to_size(4, 3),
    "as_tensor": lambda x: torch.as_tensor(x),
    "alias without autograd": lambda x: torch.ops.aten.lift_fresh(x),
}
#: Functions that return a new tensor with the same values.
COPIES: dict[str, Callable[[Any], Any]] = {
    "pad": lambda x: F.pad(x, (0, 0)),
    "pad round": lambda x: F.pad(x[None], (0, 0), "circular")[0],
    "roll": lambda x: x.roll(0, 0),
    "roll by the size": lambda x: x.roll(4, 0),
    "flip": lambda x: x.flip(()),
    "repeat": lambda x: x.repeat(1, 1),
    "clone": lambda x: x.clone(),
    "take": lambda x: torch.take(x, torch.tensor(0)),
    "copy asked for": lambda x: x.to(torch.float64, copy=True),
    "another order": lambda x: x.t().contiguous(),
    "edges": lambda x: (
        torch.histogram(x.flatten().detach(), x.flatten().detach().sort()[0].unique()).bin_edges
    ),
    "order of channels": lambda x: x.reshape(2, 2, 3, 1).double(memory_format=torch.channels_last),
}


def laid_out(sbp: Any) -> Any:
    everywhere = flow.placement.all("cpu")
    return values(4, 3).to_global(everywhere, B).to_global(sbp=sbp).detach().clone()  # type: ignore[attr-defined]


@on()
def test_the_tensor_itself() -> None:
    for name, function in ITSELF.items():
        plain = values(4, 3)
        assert function(plain) is plain, name
        for sbp in (B, S(0), S(1), P):
            x = laid_out(sbp)
            assert function(x) is x, (name, sbp)
            assert x.sbp == (sbp,)
            leaf = laid_out(sbp).requires_grad_()
            y = function(leaf * 2)
            y.retain_grad()
            y.mul_(3)
            y.square().sum().backward()
            torch.testing.assert_close(gather_global_value(leaf.grad), values(4, 3) * 72)


@on()
def test_copies() -> None:
    for name, function in COPIES.items():
        for sbp in (None, B, S(0), S(1), P):
            x = values(4, 3) if sbp is None else laid_out(sbp)
            y = function(x)
            y.zero_()
            assert torch.equal(gather_global_value(x) if x.is_global else x, values(4, 3)), (
                name,
                sbp,
            )


@on()
def test_flat_tensors_and_numbers() -> None:
    for sbp in (B, S(0), P):
        x = laid_out(B)[:, 0].to_global(sbp=sbp).clone()
        assert x.flatten() is x
        assert torch.flatten(x) is x
        assert torch.cartesian_prod(x) is x
        for n in (laid_out(B).sum(), laid_out(P).sum()):
            assert n.positive() is n
            assert F.dropout(n, 0.5, False) is n
    images = laid_out(S(0)).reshape(1, 2, 6)
    assert F.dropout2d(images[None], 0.5, False).shape == (1, 1, 2, 6)
    many = laid_out(S(0))[None, None]
    assert torch.atleast_3d(many) is many
    first, second = torch.broadcast_tensors(values(4, 3), laid_out(S(0)))
    assert type(first) is Tensor
    assert second.is_global
    mixed = torch.atleast_2d(laid_out(S(0))[0], many)
    assert mixed[1] is many
    assert mixed[0].shape == (1, 3)


class Kept(flow.nn.Graph):
    """A graph whose functions return their operand."""

    def build(self, x: Tensor) -> Tensor:
        return F.dropout((+x).flatten(1).contiguous(), 0.5, False) * 2 + F.pad(x, (0, 0)).roll(0, 0)


@on()
def test_in_a_graph() -> None:
    for sbp in (B, S(0), P):
        torch.testing.assert_close(gather_global_value(Kept()(laid_out(sbp))), values(4, 3) * 3)
