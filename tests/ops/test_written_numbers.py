"""Tests that a number or object that a tensor cannot hold is refused on every rank, also where one
rank alone would write it, and that nothing is written then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
NUMBERS = torch.arange(12.0, dtype=torch.float64).view(4, 3)
INF = float("inf")


def spread(dtype: torch.dtype, sbp: Any) -> Any:
    everywhere = flow.placement.all("cpu")
    return NUMBERS.to(dtype).to_global(everywhere, B).to_global(sbp=sbp)  # type: ignore[attr-defined]


def put(index: Any) -> Callable[[Any, Any], Any]:
    return lambda x, number: x.__setitem__(index, number)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "element": put((0, 0)),
    "last element": put((3, 2)),
    "row": put(0),
    "slice": put(slice(0, 1)),
    "column": put((slice(None), 1)),
    "list": put([0]),
    "index tensor": put(torch.tensor([3])),
    "number": put(torch.tensor(0)),
    "mask": put(NUMBERS == 0),
    "fill_ of a row": lambda x, number: x[0].fill_(number),
    "fill_": lambda x, number: x.fill_(number),
    "masked_fill_": lambda x, number: x.masked_fill_(NUMBERS == 0, number),
    "masked_fill_ of a row": lambda x, number: x[3].masked_fill_(torch.ones(3).bool(), number),
    "fill_diagonal_": lambda x, number: x.fill_diagonal_(number),
}
#: (dtype, a number that it cannot hold)
REFUSED = [
    (torch.float64, 1j), (torch.float32, 1e300), (torch.int8, 1000), (torch.uint8, 300),
    (torch.uint8, -INF), (torch.int64, float("nan")), (torch.int64, INF),
]  # fmt: skip


def refused(dtype: torch.dtype, number: Any) -> list[str]:
    texts = []
    for sbp in (S(0), S(1), B, P):
        for name, write in WRITES.items():
            if sbp is P and "tensor" in name:  # a partial sum takes no index tensor in place
                continue
            x = spread(dtype, sbp)
            with pytest.raises(RuntimeError, match="without overflow") as error:
                write(x, number)
            texts.append(f"{sbp} {name}: {error.value}")
            assert torch.equal(gather_global_value(x), NUMBERS.to(dtype)), (sbp, name)
    return texts


@pytest.mark.parametrize(("dtype", "number"), REFUSED)
@pytest.mark.sweep(3)
def test_a_number_out_of_range_is_refused_on_every_rank(dtype: torch.dtype, number: Any) -> None:
    first, second = run_on(2, refused, dtype, number)
    assert first == second


def written(dtype: torch.dtype, number: Any) -> None:
    for sbp in (S(0), S(1), B):
        for name, write in WRITES.items():
            x, expected = spread(dtype, sbp), NUMBERS.to(dtype)
            write(x, number)
            write(expected, number)
            assert torch.equal(gather_global_value(x), expected), (dtype, sbp, name)


@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.int64, 1.7), (torch.int8, True), (torch.complex64, 1j)]
)
@pytest.mark.sweep(2)
def test_other_numbers_are_written_as_on_one_device(dtype: torch.dtype, number: Any) -> None:
    run_on(2, written, dtype, number)


def objects() -> list[str]:
    texts = []
    for sbp in (S(0), B):
        for wrong in ([1, 2, 3], None, "a"):
            with pytest.raises(TypeError, match=r"a global torch\.DoubleTensor") as error:
                spread(torch.float64, sbp)[0] = wrong
            texts.append(str(error.value))
            assert "meta" not in texts[-1]
    return texts


def test_an_object_that_is_no_number_is_refused_by_the_name_of_the_target() -> None:
    first, second = run_on(2, objects)
    assert first == second


def captured() -> str:
    class Write(flow.nn.Graph):
        def build(self, x: Any) -> Any:
            y = x.clone()
            y[0, 0] = 1000
            return y

    with pytest.raises(RuntimeError, match="without overflow") as error:
        Write()(spread(torch.int8, S(0)))
    return str(error.value)


def test_a_graph_refuses_the_number_when_it_is_captured() -> None:
    first, second = run_on(2, captured)
    assert first == second
