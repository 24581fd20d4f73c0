"""Tests that slices, split and chunk of a split dim stay split. Ranks exchange only the missing
elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import values

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
LAYOUTS = {
    (2,): [[S(0)], [S(1)], [P]],
    (3,): [[S(0)], [S(1)]],
    (2, 2): [[S(0), S(1)], [S(1), S(1)], [S(1), P], [B, S(1)], [S(1), S(0)]],
}


def placement_of(shape: tuple[int, ...]) -> Any:
    return flow.placement("cpu", torch.arange(torch.Size(shape).numel()).view(shape).tolist())


def same(shape: tuple[int, ...], layout: list[Any], x: torch.Tensor, function: Any) -> None:
    """Compare a function that returns a list of tensors with one device, forward and gradients."""

    def weighed(results: list[Any]) -> Any:
        return sum((y * y).sum() * (i + 1) for i, y in enumerate(results))

    plain = x.clone().requires_grad_()
    want = function(plain)
    weighed(want).backward()

    def on_ranks() -> None:
        t = (
            x.to_global(placement_of(shape), [B] * len(shape))
            .to_global(sbp=layout)
            .requires_grad_()
        )
        got = function(t)
        weighed(got).backward()
        for mine, one in zip(got, want, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine.detach().numpy()), one.detach())
        torch.testing.assert_close(torch.from_numpy(t.grad.numpy()), plain.grad)

    simulate(torch.Size(shape).numel(), on_ranks)


bounds = st.one_of(st.none(), st.integers(-9, 9))
slices = st.builds(slice, bounds, bounds, st.one_of(st.none(), st.integers(1, 3)))


def check_slices(
    rows: slice, columns: slice, sizes: tuple[int, int], where: tuple[int, ...], data: Any
) -> None:
    same(
        where,
        data.draw(st.sampled_from(LAYOUTS[where])),
        values(*sizes),
        lambda x: [x[rows, columns], x[rows], x[..., columns]],
    )


sliced = given(
    rows=slices,
    columns=slices,
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 9)),
    where=st.sampled_from(sorted(LAYOUTS)),
    data=st.data(),
)


@pytest.mark.long
@sliced
@settings(max_examples=30)
def test_slices(**case: Any) -> None:
    check_slices(**case)


@pytest.mark.extended
@sliced
@settings(max_examples=300)
def test_many_slices(**case: Any) -> None:
    check_slices(**case)


def check_split(cuts: list[int], dim: int, where: tuple[int, ...], data: Any) -> None:
    shape = [3, 3]
    shape[dim] = sum(cuts)
    kind = data.draw(st.sampled_from(["sizes", "chunk", "tensor_split", "narrow"]))
    functions = {
        "sizes": lambda x: list(x.split(cuts, dim)),
        "chunk": lambda x: list(x.chunk(len(cuts), dim)),
        "tensor_split": lambda x: list(x.tensor_split(len(cuts), dim)),
        "narrow": lambda x: [x.narrow(dim, sum(cuts[:i]), n) for i, n in enumerate(cuts)],
    }
    same(where, data.draw(st.sampled_from(LAYOUTS[where])), values(*shape), functions[kind])


cut = given(
    cuts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    dim=st.integers(0, 1),
    where=st.sampled_from(sorted(LAYOUTS)),
    data=st.data(),
)


@pytest.mark.long
@cut
@settings(max_examples=25)
def test_split(**case: Any) -> None:
    check_split(**case)


@pytest.mark.extended
@cut
@settings(max_examples=300)
def test_many_splits(**case: Any) -> None:
    check_split(**case)


def check_cat(
    sizes: list[int], dim: int, whole: list[bool], where: tuple[int, ...], data: Any
) -> None:
    def joined(x: Any) -> list[Any]:
        parts = x.split(sizes, dim)
        if isinstance(x, flow.GlobalTensor):
            parts = [
                p.to_global(sbp=B if len(where) == 1 else [B, B]) if alike else p
                for p, alike in zip(parts, whole, strict=False)
            ]
        return [torch.cat([parts[0], *reversed(parts), *parts], dim)]

    shape = [3, 3]
    shape[dim] = sum(sizes)
    same(where, data.draw(st.sampled_from(LAYOUTS[where])), values(*shape), joined)


parts = given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    dim=st.integers(0, 1),
    whole=st.lists(st.booleans(), min_size=4, max_size=4),
    where=st.sampled_from(sorted(LAYOUTS)),
    data=st.data(),
)


@pytest.mark.long
@parts
@settings(max_examples=40)
def test_cat(**case: Any) -> None:
    check_cat(**case)


@pytest.mark.extended
@parts
@settings(max_examples=150)
def test_many_cats(**case: Any) -> None:
    check_cat(**case)


@pytest.mark.parametrize(
    ("function", "bytes_moved"),
    [
        (lambda x: x[:, 1:], 6 * 8),  # one column crosses the boundary
        (lambda x: x[:, :-1], 0),  # 4 and 3 columns: each rank already has its columns
        (lambda x: x.chunk(2, 1)[0], 6 * 2 * 8),  # half of the left half
        (lambda x: x.split(8, 1)[0], 0),
    ],
)
def test_what_moves(function: Any, bytes_moved: int) -> None:
    def on_ranks() -> int:
        x = values(6, 8).to_global(placement_of((2,)), B).to_global(sbp=S(1))
        with flow.boxing_log() as log:
            assert function(x).sbp == (S(1),)
        return sum(entry.bytes for entry in log)

    assert max(simulate(2, on_ranks)) == bytes_moved


def test_what_is_put_before_a_split_sequence_moves_little_of_it() -> None:
    def on_ranks() -> int:
        x = values(2, 64, 8).to_global(placement_of((4,)), B).to_global(sbp=S(1))
        first = values(2, 2, 8).to_global(placement_of((4,)), B)
        with flow.boxing_log() as log:
            assert torch.cat([first, x], 1).sbp == (S(1),)
        return sum(entry.bytes for entry in log)

    # one row: 66 rows are split into 17, 17, 16 and 16
    assert max(simulate(4, on_ranks)) == 2 * 8 * 8


def test_a_run_too_short_for_all_ranks_is_taken_from_the_whole() -> None:
    def on_ranks() -> None:
        x = values(6, 8).to_global(placement_of((2,)), B).to_global(sbp=S(1))
        assert x[:, -1:].sbp != (S(1),)
        assert x.split([1, 7], 1)[1].sbp != (S(1),)

    simulate(2, on_ranks)
