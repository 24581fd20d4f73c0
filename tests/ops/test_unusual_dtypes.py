"""Tests of dtypes that few functions take: bools that are shifted, integers and complex numbers in
logsumexp, elements of dtypes of which torch computes no sum, and conjugates that are resolved. The
numbers are those of one device in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.pool import run_on
from torch import Tensor

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
NUMBERS = torch.arange(12.0, dtype=torch.float64).view(4, 3)


ROWS = S(0)


def spread(value: Tensor, sbp: Any = ROWS) -> Any:
    """Return the global tensor of a value that every rank has."""
    everywhere = flow.placement.all("cpu")
    return value.to_global(everywhere, B).to_global(sbp=sbp)  # type: ignore[attr-defined]


# ------------------------------------------------------------------ bytes and bools among operands

BYTES = (NUMBERS * 20).to(torch.uint8)
TRUTHS = NUMBERS.remainder(2) == 0
CHOSEN: dict[str, tuple[Tensor, Callable[[Any], Any]]] = {
    "bytes where a mask holds": (BYTES, lambda x: x.where(x > 90, 2)),
    "bytes by name": (BYTES, lambda x: x.where(condition=x > 90, other=2)),
    "bytes and a negative number": (BYTES, lambda x: x.where(x > 90, -1)),
    "truths where a mask holds": (TRUTHS, lambda x: x.where(~x, True)),
    "numbers where bytes are even": (BYTES, lambda x: (x.double() + 1).where(x % 2 == 0, 0.5)),
    "the power of a truth": (TRUTHS, lambda x: x**True),
    "the power by name": (TRUTHS, lambda x: torch.pow(x, exponent=False)),
    "the power in place": (TRUTHS, lambda x: x.pow_(False)),
    "whole numbers shifted by truths in place": (
        BYTES.long(),
        lambda x: x.__ilshift__(torch.tensor(True)),
    ),
    "a view of bytes shifted in place": (BYTES, lambda x: [x[1:3].__irshift__(x[0] > 9), x][1]),
}


def chosen() -> None:
    for name, (value, call) in CHOSEN.items():
        want = call(value.clone())
        for sbp in (B, S(0), S(1), *([] if value.dtype is torch.bool else [P])):
            got = call(spread(value, sbp).clone())
            assert got.dtype is want.dtype, name
            assert torch.equal(gather_global_value(got), want), (name, sbp)


def test_bytes_and_bools_are_chosen_raised_and_shifted() -> None:
    run_on(2, chosen)


# ----------------------------------------------------------------- dtypes of which torch has no sum

NOT_SUMMED = (
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu,
)  # fmt: skip

PICKS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x[3, 1],
    lambda x: x[3],
    lambda x: x[:, 2],
    lambda x: x[0],
    lambda x: x.select(1, 0),
    lambda x: x[torch.tensor([3, 1])],
    lambda x: x[torch.tensor(2)],
)


def picked() -> None:
    for dtype in NOT_SUMMED:
        value = (NUMBERS + 1).to(torch.float32).to(dtype)
        for sbp in (S(0), S(1), B):
            x = spread(value, sbp)
            for i, pick in enumerate(PICKS):
                found, expected = gather_global_value(pick(x)), pick(value)
                assert found.dtype is dtype
                assert found.double().tolist() == expected.double().tolist(), (dtype, sbp, i)
        assert spread(value)[3, 1].item() == value[3, 1].item()
    smallest = torch.full((4, 3), 2.0**-127).to(torch.float8_e8m0fnu)
    assert spread(smallest)[3].float().tolist() == smallest[3].float().tolist()


def test_elements_of_dtypes_without_a_sum() -> None:
    run_on(2, picked)


def picked_in_a_graph() -> list[list[float]]:
    class Pick(flow.nn.Graph):
        def build(self, x: Any) -> Any:
            return x[3], x[:, 1], x[0, 0]

    value = NUMBERS.to(torch.uint16)
    return [gather_global_value(t).double().tolist() for t in Pick()(spread(value))]


def test_elements_of_dtypes_without_a_sum_in_a_graph() -> None:
    for found in run_on(2, picked_in_a_graph):
        assert found == [[9.0, 10.0, 11.0], [1.0, 4.0, 7.0, 10.0], 0.0]


# ------------------------------------------------------------------------------------ shifted bools

SHIFTS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda b, i: b << 1,
    lambda b, i: b >> 1,
    lambda b, i: 1 << b,
    lambda b, i: b << i,
    lambda b, i: i << b,
    lambda b, i: i.to(torch.int8) << b,
    lambda b, i: i.to(torch.int8) << True,
    lambda b, i: torch.bitwise_left_shift(b, 2),
    lambda b, i: torch.bitwise_right_shift(input=b, other=1),
    lambda b, i: b << torch.tensor(1),
)


#: Each part has every second shift, in every layout.
PARTS_OF_SHIFTS = 2


def shifted(part: int) -> None:
    bools, integers = NUMBERS % 2 == 1, NUMBERS.long()
    for sbp in (S(0), S(1), B):
        for i, shift in list(enumerate(SHIFTS))[part::PARTS_OF_SHIFTS]:
            found = gather_global_value(shift(spread(bools, sbp), spread(integers, sbp)))
            expected = shift(bools, integers)
            assert found.dtype is expected.dtype, (sbp, i)
            assert torch.equal(found, expected), (sbp, i)
        for refused in (lambda b: b << 1.5, lambda b: b << True, lambda b: b << b):
            with pytest.raises(NotImplementedError, match="lshift_cpu"):
                refused(bools)
            with pytest.raises(NotImplementedError, match="lshift_cpu"):
                refused(spread(bools, sbp))


@pytest.mark.parametrize("part", range(PARTS_OF_SHIFTS))
@pytest.mark.sweep(PARTS_OF_SHIFTS)
def test_bools_are_shifted_as_on_one_device(part: int) -> None:
    run_on(2, shifted, part)


# --------------------------------------------------------------------------------------- logsumexp


#: Each part has every fifth case, and so every dtype, layout and choice of dims.
PARTS = 5


def log_sums(part: int) -> None:
    values = [NUMBERS.to(dtype) for dtype in (torch.bool, torch.uint16, torch.uint32, torch.int64)]
    values += [((NUMBERS - 6) * 20).to(torch.int8)]  # their differences are no int8
    values += [torch.complex(-NUMBERS, NUMBERS).to(d) for d in (torch.complex64, torch.complex128)]
    cases = itertools.product(values, (S(0), S(1), B), (0, 1, (0, 1)), (False, True))
    for value, sbp, dims, keepdim in itertools.islice(cases, part, None, PARTS):
        found = torch.logsumexp(spread(value, sbp), dims, keepdim)
        expected = torch.logsumexp(value, dims, keepdim)
        assert found.dtype is expected.dtype
        torch.testing.assert_close(gather_global_value(found), expected)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_logsumexp_of_any_dtype(part: int) -> None:
    run_on(2, log_sums, part)


# --------------------------------------------------------------------------------------- conjugates


def resolved() -> None:
    value = torch.complex(NUMBERS, NUMBERS + 1)
    for sbp in (B, S(0), S(1), P):
        x = spread(value, sbp)
        for conjugate in (x.conj(), x.H.T):
            assert conjugate.is_conj()
            for done in (
                conjugate.resolve_conj(),
                torch.resolve_conj(conjugate),
                torch.resolve_conj(input=conjugate),
            ):
                assert not done.is_conj()
                assert done.sbp == x.sbp
                assert np.array_equal(done.numpy(), value.conj().resolve_conj().numpy())
            assert np.array_equal(conjugate.numpy(), value.conj().resolve_conj().numpy())
            assert np.array_equal(np.asarray(conjugate), value.conj().resolve_conj().numpy())
        negative = x.conj().imag
        assert negative.is_neg()
        for done in (negative.resolve_neg(), torch.resolve_neg(negative)):
            assert not done.is_neg()
            assert np.array_equal(done.numpy(), -value.imag.numpy())
        assert np.array_equal(negative.numpy(), -value.imag.numpy())
        assert x.resolve_conj() is x
        assert x.resolve_neg() is x
        before = x.conj()
        after = before.resolve_conj()
        after.zero_()
        assert np.array_equal(before.numpy(), value.conj().resolve_conj().numpy())  # a copy


def test_resolved_conjugates_have_no_bit() -> None:
    run_on(2, resolved)


def gradient_of_resolved(x: Any) -> Any:
    x.requires_grad_()
    (x.conj().resolve_conj() * (1 + 2j)).sum().abs().backward()
    return x.grad


def gradients_of_resolved() -> None:
    value = torch.complex(NUMBERS, NUMBERS + 1)
    expected = gradient_of_resolved(value.clone())
    for sbp in (B, S(0), S(1)):
        torch.testing.assert_close(
            gather_global_value(gradient_of_resolved(spread(value, sbp))), expected
        )


def test_gradients_pass_a_resolved_conjugate() -> None:
    run_on(2, gradients_of_resolved)


def resolved_in_a_graph() -> Any:
    class Resolve(flow.nn.Graph):
        def build(self, x: Any) -> Any:
            return x.conj().resolve_conj() * 2

    return Resolve()(spread(torch.complex(NUMBERS, NUMBERS + 1))).numpy()


def test_a_graph_resolves_conjugates() -> None:
    for found in run_on(2, resolved_in_a_graph):
        assert np.array_equal(found, 2 * (NUMBERS.numpy() - 1j * (NUMBERS.numpy() + 1)))
