"""Tests that calls which PyTorch rejects on one device are rejected for global tensors in every
layout: operands of dtypes and shapes that no kernel accepts.

Meta kernels, which plan the calls, accept more operands. So do functions that replace a kernel
where an operand is split.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.bodies import values
from support.opinfo import dtype_of, name_of, ops
from support.oracle import swapped, tensors_in
from support.pool import run_on
from torch import Tensor

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value
from globaltensor.distributed.simulate import simulate

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
PARTS = 24
#: PyTorch fails with an internal assertion, or has no values to check.
LEFT_OUT = ("empty", "new_empty", "to_sparse", "index_put")


def changed(operands: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the operands with one or all of them in another dtype, or one in another shape."""
    for dtype in (torch.int64, torch.complex64):
        yield [t.to(dtype) if t.is_floating_point() else t for t in operands]
    for i in range(min(len(operands), 3) if len(operands) > 1 else 0):
        yield [t.long() if k == i and t.is_floating_point() else t for k, t in enumerate(operands)]
    for i in range(min(len(operands), 3)):
        others = list(operands)
        t = others[i]
        for other in [
            t[None],
            *([torch.cat([t, t[..., :1]], -1)] if t.numel() and t.dim() else []),
        ]:
            yield [*others[:i], other, *others[i + 1 :]]


def called(call: Callable[..., Any], operands: Sequence[Any], sample: Any) -> Any:
    these = iter(operands)
    ins, named = swapped([sample.input, *sample.args], these), swapped(sample.kwargs, these)
    torch.manual_seed(0)
    return call(*ins, **named)


def on_ranks(call: Callable[..., Any], operands: Sequence[Tensor], sample: Any, sbp: Any) -> None:
    everywhere = flow.placement.all("cpu")
    ours = [
        t.clone().to_global(everywhere, B).to_global(sbp=sbp if t.dim() else B) for t in operands
    ]  # type: ignore[attr-defined]
    for result in tensors_in(called(call, ours, sample)):
        if result.is_global:
            gather_global_value(result.detach())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_what_torch_refuses(part: int) -> None:
    wrong = []
    for op in ops()[part::PARTS]:
        dtype = dtype_of(op)
        if dtype is None or op.name in LEFT_OUT:
            continue
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 1):
            given = tensors_in([sample.input, *sample.args, sample.kwargs])
            if not given or any(t.layout is not torch.strided or t.numel() > 3000 for t in given):
                continue
            for operands in changed([t.detach() for t in given]):
                try:
                    called(op.op, [t.clone() for t in operands], sample)
                    continue
                except Exception as error:
                    refused = (
                        f"{type(error).__name__}: {str(error).splitlines()[0]}"
                        if str(error)
                        else type(error).__name__
                    )
                for sbp in (S(0), S(-1)):
                    try:
                        simulate(2, on_ranks, op.op, operands, sample, sbp, timeout=5.0)
                    except Exception:
                        continue
                    wrong.append(
                        f"{name_of(op)} {[(t.dtype, tuple(t.shape)) for t in operands]} {sbp}: "
                        f"torch {refused}"
                    )
    assert not wrong, "\n".join(wrong)


INTEGERS = torch.arange(12).view(4, 3)
#: Calls by name, each with its global operand.
REFUSED: dict[str, tuple[Callable[[Any], Any], Tensor]] = {
    **{f"{name} of whole numbers": (lambda x, name=name: getattr(F, name)(x, 0),
        INTEGERS) for name in ("softmax", "log_softmax", "softmin")},
    "softmax as a method": (lambda x: x.softmax(0), INTEGERS),
    "log_softmax as a method": (lambda x: x.log_softmax(1), INTEGERS),
    "softmax of truths": (lambda x: torch.softmax(x, 1), INTEGERS > 3),
    "cross_entropy of whole numbers": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 0])),
        INTEGERS),
    "layer_norm with whole weights": (lambda x: F.layer_norm(x, (3,),
        torch.ones(3, dtype=torch.int64)), values(4, 3)),
    "group_norm of complex numbers": (lambda x: F.group_norm(x, 3),
        values(4, 3).to(torch.complex128)),
    "interpolation of whole numbers": (lambda x: F.interpolate(x[None], size=5), INTEGERS),
    "reflection of truths": (lambda x: F.pad(x, (1, 1), "reflect"), INTEGERS > 3),
    "a bias of two dims": (lambda x: F.conv_transpose1d(x, torch.ones(4, 2, 2, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float64)), values(4, 3)),
    "running means of two dims": (lambda x: F.batch_norm(x, torch.zeros(1, 3).double(),
        torch.ones(1, 3).double(), training=True), values(4, 3)),
    "values of more dims": (lambda x: x.index_put((torch.tensor(2),), torch.zeros(1, 3).double()),
        values(4, 3)),
    "values of more dims than several indices select": (lambda x: x.index_put((torch.arange(4),
        torch.zeros(1).long()), torch.zeros(2, 4).double(), accumulate=True), values(4, 3)),
    "values of more dims than a mask selects": (lambda x: x.index_put((torch.tensor([[True, False,
        True]] + 3 * [[False] * 3]),), torch.zeros(1, 2).double()), values(4, 3)),
    "the position of the first truth": (lambda x: x.argmax(0), INTEGERS > 3),
    "a copy of another shape": (lambda x: x.copy_(torch.ones(3, 4)), values(4, 3)),
    "a copy of more dims": (lambda x: x.copy_(torch.ones(2, 4, 3)), values(4, 3)),
    "einsum of truths": (lambda x: torch.einsum("ij,kj", x, x), INTEGERS > 3),
    "leaky_relu of whole numbers": (lambda x: F.leaky_relu(x), INTEGERS),
    "clamp without bounds": (lambda x: x.clamp(), values(4, 3)),
    "a negative deviation": (lambda x: torch.normal(x, -1.0), values(4, 3)),
    "a deviation that is no number": (lambda x: torch.normal(x, float("nan")), values(4, 3)),
    "negative deviations": (lambda x: torch.normal(0.0, -x.abs()), values(4, 3)),
    "a whole number in place of a truth": (lambda x: x.__ilshift__(torch.tensor(2)), INTEGERS > 3),
    "whole numbers for means": (lambda x: torch.normal(x, 1.0), INTEGERS),
    "a histogram of one dim": (lambda x: torch.histogramdd(x[:, 0], [2]), values(4, 3)),
}  # fmt: skip


#: Calls that the library refuses in a sentence of its own: torch's names no operand, or a shape
#: that is not computed.
OWN_WORDS = {
    "running means of two dims": "running_mean should have one dim of 3 elements, not the shape "
    "[1, 3]",
    "values of more dims than a mask selects": "shape mismatch: value tensor of shape [1, 2] "
    "cannot be broadcast to an indexing result of 1 dims",
}


def refusals() -> list[tuple[str, str]]:
    everywhere, told = flow.placement.all("cpu"), []
    for name, (call, operand) in REFUSED.items():
        with pytest.raises(Exception) as alone:
            call(operand.clone())
        for sbp in (B, S(0), S(1), *([] if operand.dtype is torch.bool else [P])):
            with pytest.raises(type(alone.value)) as error:
                call(operand.to_global(everywhere, B).to_global(sbp=sbp))  # type: ignore[attr-defined]
            sentence = OWN_WORDS.get(name, str(alone.value).splitlines()[0])
            assert str(error.value).startswith(sentence), (name, sbp, str(error.value), sentence)
            told.append((name, str(error.value)))
    return told


def test_refusals_by_name_are_the_same_on_all_ranks() -> None:
    simulate(2, refusals)
    first, other = run_on(2, refusals)
    assert first == other


def accepted() -> None:
    everywhere = flow.placement.all("cpu")
    for sbp in (B, S(0), S(1)):
        x = INTEGERS.to_global(everywhere, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
        calls: list[Callable[[Any], Any]] = [
            lambda x: F.softmax(x, 0, dtype=torch.float64),
            lambda x: x.roll(1, 0),
            lambda x: F.pad(x, (1, 1)),
        ]
        for call in (*calls, lambda x: x.cumsum(0), lambda x: x.sort(1)[0]):
            torch.testing.assert_close(gather_global_value(call(x)), call(INTEGERS))


def drawn() -> None:
    """Check that planning a call on narrow dtypes draws none of the call's random numbers."""
    everywhere = flow.placement.all("cpu")
    for call in (
        lambda x: F.dropout(x, 0.5),
        lambda x: F.gumbel_softmax(x, dim=0),
        lambda x: F.rrelu(x, training=True),
    ):
        x = values(4, 3).bfloat16()
        torch.manual_seed(3)
        call(x.to_global(everywhere, B).to_global(sbp=S(1)))  # type: ignore[attr-defined]
        after = torch.rand(3)
        torch.manual_seed(3)
        call(x.to_global(everywhere, B).to_global(sbp=S(1)))  # type: ignore[attr-defined]
        assert torch.equal(torch.rand(3), after)


class Refused(flow.nn.Graph):
    """A graph of one call that torch refuses."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.call = call

    def build(self, x: Tensor) -> Any:
        return self.call(x)


def test_a_graph_refuses_dtypes_too() -> None:
    """The kernels of split dims accept dtypes that torch's own kernels refuse."""

    def body() -> None:
        everywhere = flow.placement.all("cpu")
        for name in ("softmax of whole numbers", "the position of the first truth"):
            call, operand = REFUSED[name]
            with pytest.raises(Exception) as alone:
                call(operand.clone())
            for sbp in (B, S(0), S(1)):
                with pytest.raises(type(alone.value)) as error:
                    Refused(call)(operand.to_global(everywhere, B).to_global(sbp=sbp))  # type: ignore[attr-defined]
                assert str(alone.value).splitlines()[0] in str(error.value), (name, sbp)

    simulate(2, body)


def test_planning_draws_nothing() -> None:
    run_on(2, drawn)


def test_whole_numbers_are_taken_where_torch_takes_them() -> None:
    simulate(2, accepted)
    run_on(2, accepted)
