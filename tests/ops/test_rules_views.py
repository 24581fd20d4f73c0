"""Tests of views and rearrangements: every signature against plain torch, forward and gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.everywhere import compare, full
from support.oracle import check
from support.pool import run_on

import globaltensor as flow
from globaltensor._ops.rules.view import groups, own
from globaltensor.distributed.simulate import simulate

T = torch.Tensor
B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def x(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape))
    )


ROWS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("view divides", T.view, (x(12), 4, 3)),
    ("view divides unevenly", T.view, (x(5, 6), 5, 2, 3)),
    ("view infers", T.view, (x(5, 6), (-1,))),
    ("view size", T.view, (x(5, 6), torch.Size((5, 1, 6)))),
    ("view of nothing", T.view, (x(0, 4), 0, 2, 2)),
    ("view to nothing", T.reshape, (x(3, 0, 2), (0,))),
    ("view scalar", T.view, (x(), 1, 1)),
    ("view to scalar", T.view, (x(1, 1), ())),
    ("view ones", T.view, (x(1, 6), 1, 2, 3)),
    ("view as dtype", T.view, (torch.arange(10).view(5, 2), torch.int32)),
    ("view as wider dtype", T.view, (torch.arange(12, dtype=torch.int32).view(3, 4), torch.int64)),
    ("merge", torch.reshape, (x(5, 3, 2), (15, 2))),
    ("regroup", torch.reshape, (x(4, 6), (6, 4))),
    ("regroup coprime", torch.reshape, (x(3, 10), (5, 6))),
    ("heads", T.view, (x(3, 5, 12), 3, 5, 4, 3)),
    ("flatten", torch.flatten, (x(5, 2, 3),)),
    ("flatten some", T.flatten, (x(5, 2, 3, 2), 1, -2)),
    ("unflatten", torch.unflatten, (x(5, 12), 1, (3, -1))),
    ("transpose", torch.transpose, (x(5, 3, 2), 0, -1)),
    ("swapaxes", T.swapaxes, (x(5, 3), 0, 1)),
    ("t", T.t, (x(5, 3),)),
    ("t of a vector", torch.t, (x(5),)),
    ("permute", T.permute, (x(5, 3, 2), 2, 0, 1)),
    ("permute tuple", torch.permute, (x(5, 3, 2), (1, 2, 0))),
    ("movedim", torch.movedim, (x(5, 3, 2), 0, 2)),
    ("T", T.T.__get__, (x(5, 3),)),
    ("mT", T.mT.__get__, (x(2, 5, 3),)),
    ("mH", T.mH.__get__, (x(2, 5, 3),)),
    ("H", T.H.__get__, (x(5, 3),)),
    ("adjoint", torch.adjoint, (x(2, 5, 3),)),
    ("squeeze", torch.squeeze, (x(5, 1, 2, 1),)),
    ("squeeze dim", T.squeeze, (x(2, 1, 5), 0)),
    ("squeeze dims", T.squeeze, (x(1, 3, 1), (0, 1))),
    ("unsqueeze", torch.unsqueeze, (x(5, 3), -1)),
    ("expand", T.expand, (x(5, 1, 3), 2, -1, 4, 3)),
    ("expand scalar", T.expand, (x(), (3,))),
    ("broadcast_to", torch.broadcast_to, (x(5, 1), (2, 5, 4))),
    ("contiguous", T.contiguous, (x(5, 3),)),
    ("clone", torch.clone, (x(5, 3),)),
    ("repeat", T.repeat, (x(5, 3), 2, 1, 2)),
    ("tile", torch.tile, (x(5, 3), (2,))),
    ("tile more", T.tile, (x(3), 2, 1)),
    ("repeat_interleave", torch.repeat_interleave, (x(5, 3), 2, 0)),
    ("repeat_interleave of one dim", T.repeat_interleave, (x(5), 3)),
    ("cat", torch.cat, ([x(5, 3), x(2, 3)], 0)),
    ("cat last", torch.cat, ([x(5, 3), x(5, 1), x(5, 2)], -1)),
    ("cat with nothing", torch.cat, ([x(0), x(5, 3)], 1)),
    ("stack", torch.stack, ([x(5, 3), x(5, 3)], 1)),
    ("block_diag", torch.block_diag, (x(2, 3), x(3, 1))),
    ("split", torch.split, (x(5, 6), 2)),
    ("split list", T.split, (x(5, 6), [1, 5], 1)),
    ("split_with_sizes", torch.split_with_sizes, (x(5, 6), [1, 5], 1)),
    ("chunk", torch.chunk, (x(5, 6), 3, -1)),
    ("tensor_split", torch.tensor_split, (x(7, 3), 3)),
    ("unbind", torch.unbind, (x(3, 5), 1)),
    ("hsplit", torch.hsplit, (x(3, 6), 2)),
    ("narrow", torch.narrow, (x(5, 3), 0, 1, 3)),
    ("narrow all", T.narrow, (x(5, 3), 0, 0, 5)),
    ("select", torch.select, (x(5, 3), 0, -2)),
    ("select bool", T.select, (x(5, 3) > 0, 0, 3)),
    ("select one", T.select, (x(1, 3), 0, 0)),
    ("diagonal", torch.diagonal, (x(3, 4, 2), 1)),
    ("linalg.diagonal", torch.linalg.diagonal, (x(3, 4, 5),)),
    ("diag", torch.diag, (x(4),)),
    ("diag_embed", torch.diag_embed, (x(3, 4),)),
    ("tril", torch.tril, (x(5, 6), 1)),
    ("triu batch", T.triu, (x(2, 3, 3), -1)),
    ("flip", torch.flip, (x(5, 3), [0])),
    ("flip varargs", T.flip, (x(5, 3, 2), 0, 2)),
    ("fliplr", torch.fliplr, (x(5, 3),)),
    ("flipud", torch.flipud, (x(5, 3),)),
    ("roll", torch.roll, (x(5, 3), 2, 0)),
    ("roll flat", T.roll, (x(5, 3), 2)),
    ("rot90", torch.rot90, (x(5, 3, 2), 1, [0, 1])),
    ("rot90 none", torch.rot90, (x(5, 3), 4)),
    ("unfold", T.unfold, (x(5, 7), 1, 3, 2)),
    ("as_strided", torch.as_strided, (x(12), (3, 2), (4, 1))),
    ("pad", F.pad, (x(5, 3), (1, 2))),
    ("pad value", F.pad, (x(5, 3), (1, 2, 0, -1), "constant", 2.0)),
    ("pad reflect", F.pad, (x(5, 3, 4), (1, 2), "reflect")),
    ("pad circular", F.pad, (x(2, 3, 4, 4), (1, 2, 0, 1), "circular")),
    ("constant_pad_nd", torch.constant_pad_nd, (x(5, 3), (1, 0), 1.0)),
    ("pixel_shuffle", F.pixel_shuffle, (x(2, 8, 3, 2), 2)),
    ("pixel_unshuffle", F.pixel_unshuffle, (x(2, 2, 6, 4), 2)),
    ("float", T.float, (x(5, 3).round(),)),
    ("double", T.double, (x(5, 3),)),
    ("bool", T.bool, (x(5, 3),)),
    ("to", T.to, (x(5, 3), torch.float64)),
    ("to int", T.to, (x(5, 3), torch.int32)),
    ("type", T.type, (x(5, 3), torch.float64)),
]


@pytest.mark.parametrize(
    ("function", "args"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
@pytest.mark.sweep(8)
def test_every_signature(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert check(function, *args)


@pytest.mark.parametrize(
    ("function", "args", "signature"),
    [
        (T.view, (x(5, 6), 5, 2, 3), "S(1) -> S(1)"),
        (T.view, (x(5, 6), 30), "S(0) -> S(0)/6"),
        (T.reshape, (x(4, 6), (6, 4)), "S(0) -> S(0)"),
        (T.reshape, (x(8, 6), (12, 4)), "S(0) -> S(0)"),
        (T.select, (x(5, 3), 0, 1), "S(0) -> P"),
        (torch.cat, ([x(5, 3), x(5, 3)], 1), "S(0) S(0) -> S(0)"),
        (torch.stack, ([x(5, 3), x(5, 3)], 0), "P P -> P"),
        (torch.unbind, (x(2, 5), 0), "S(1) -> S(0) S(0)"),
        (T.tril, (x(5, 6),), "S(1) -> S(1)"),
        (F.pixel_shuffle, (x(2, 8, 3, 2), 2), "S(2) -> S(2)/2"),
    ],
)
def test_keeps_split(function: Callable[..., Any], args: tuple[Any, ...], signature: str) -> None:
    assert signature in check(function, *args, grids=[(2,)], most=100)


def test_groups() -> None:
    assert list(groups((2, 3, 4), (6, 4))) == [(0, 2, 0, 1), (2, 3, 1, 2)]
    assert list(groups((1, 4), (4, 1))) == [(1, 2, 0, 1)]
    assert list(groups((0, 4), (0, 2, 2))) == [(0, 1, 0, 1)]
    assert list(groups((), (1, 1))) == []


def test_own_is_zeros_elsewhere() -> None:
    assert own(torch.arange(6.0).view(2, 3), 0, 5).tolist() == [[0.0, 0.0, 0.0]]


def places_in_memory(x: T) -> list[T]:
    """Call functions that take memory strides, with the strides that the tensor reports."""
    turned, spread = x.transpose(0, 1), x[:, :1].expand(5, 3, 4)
    a, b, c = turned.stride()
    windows = turned.as_strided((2, 3, 2), (a, b, 2 * c))
    written = torch.as_strided_scatter(
        turned.detach(), windows.detach(), windows.shape, (a, b, 2 * c)
    )
    return [windows, spread.as_strided((5, 2, 4), spread.stride()), written]


def strided(plain: T, sbp: Any) -> None:
    line = flow.placement("cpu", [0, 1])
    x, y = (
        plain.clone().requires_grad_(),
        plain.to_global(line, B).to_global(sbp=sbp).requires_grad_(),
    )  # type: ignore[attr-defined]
    want, got = places_in_memory(x), places_in_memory(y)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(full(g), w.detach(), rtol=0, atol=0)
    for found in (want, got):
        sum((t * torch.arange(t.numel()).view(t.shape)).sum() for t in found[:2]).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(full(y.grad), x.grad, rtol=0, atol=0)
    base = torch.cat([plain, plain], 1)
    same = base.to_global(line, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
    first, second = (
        t.transpose(0, 1).as_strided((2, 3, 2), (t.stride(1), t.stride(0), 2 * t.stride(2)))
        for t in (base, same)
    )
    for t, windows in ((base, first), (same, second)):
        windows.add_(1)
        t[1:].mul_(2)
    torch.testing.assert_close(full(same), base, rtol=0, atol=0)
    torch.testing.assert_close(full(second), first, rtol=0, atol=0)


@pytest.mark.parametrize("sbp", [B, S(0), S(1), S(2)])
def test_as_strided_of_what_lies_in_another_order(sbp: Any) -> None:
    simulate(2, strided, x(5, 3, 4), sbp)


def counted() -> None:
    """Check integers that are global tensors in place of Python numbers."""
    line = flow.placement("cpu", [0, 1])
    n = torch.tensor([3, 5, 4]).to_global(line, B).to_global(sbp=S(0)).max()  # type: ignore[attr-defined]
    y = torch.arange(12.0).view(4, 3)
    for t in (y, y.to_global(line, B).to_global(sbp=S(0))):  # type: ignore[attr-defined]
        assert t.view(n - 1, -1).shape == (4, 3)
        assert t.narrow(0, n - 4, 2).tolist() == y[1:3].tolist()
        assert t.new_zeros(n, 2).shape == F.pad(t, (0, 2, 0, n - 4))[:, :2].shape == (5, 2)
        assert t[None, None].expand(n - 3, 1, 4, 3).shape == (2, 1, 4, 3)
    assert torch.arange(n).tolist() == [0, 1, 2, 3, 4]
    assert torch.zeros(n, 2).shape == torch.randn(n, 2).shape == (5, 2)
    assert torch.full((2,), n).tolist() == [5, 5]
    assert F.interpolate(y[None, None], size=(n, n - 1)).shape == (1, 1, 5, 4)


def test_numbers_that_are_tensors() -> None:
    simulate(2, counted)


def test_a_place_in_an_empty_dim_is_out_of_range() -> None:
    def on_ranks() -> None:
        torch.zeros(3, 0, 2).to_global(flow.placement("cpu", [0, 1]), B).select(1, -1)

    with pytest.raises(IndexError, match="out of range"):
        simulate(2, on_ranks)


ALONG: list[tuple[str, Callable[[T], T], int]] = [
    ("diff", lambda t: t.diff(dim=0), 40), ("second diff", lambda t: t.diff(n=2, dim=0), 40),
    ("unfold", lambda t: t.unfold(0, 3, 1), 40),
    ("unfold apart", lambda t: t.unfold(0, 2, 2), 0), ("repeat", lambda t: t.repeat(2, 1), 320),
    ("tile", lambda t: t.tile(2, 3), 320),
]  # fmt: skip


@pytest.mark.parametrize(("name", "run", "most"), ALONG, ids=[row[0] for row in ALONG])
@pytest.mark.sweep(6)
def test_a_split_dim_stays_split_where_neighbours_are_looked_at(
    name: str, run: Callable[[T], T], most: int
) -> None:
    for rows in (9, 5, 3, 2):
        if rows > 2 or name != "unfold":
            compare(run, x(rows, 4), draws=3)

    def traffic() -> None:
        whole = torch.arange(160.0).view(16, 10)
        given = whole.to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
        with flow.boxing_log() as moved:
            found = run(given)
        assert found.sbp == (S(0),)
        assert torch.equal(full(found), run(whole))
        assert sum(m.bytes for m in moved) <= most

    simulate(2, traffic)


@pytest.mark.long
@pytest.mark.parametrize("view", [
    *(pytest.param(lambda x, size=size, step=step: x.unfold(0, size, step),
        id=f"{size} {step}") for size, step in ((2, 1), (2, 2), (2, 3), (3, 1), (3, 2))),
    pytest.param(lambda x: x.as_strided((6, 4, 2), (4, 1, 4)), id="as_strided"),
])  # fmt: skip
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.sweep(12)
def test_what_is_written_into_windows_reaches_their_base(
    view: Callable[[Any], Any], world: int
) -> None:
    """Overlapping windows show an element several times. Only the position that was written may
    count, and the other positions show the written value."""

    def on_ranks() -> None:
        place = flow.placement("cpu", [0, 1] if world == 2 else [[0, 1], [2, 3]])
        for layout in (
            (S(0), S(0)),
            (S(1), S(1)),
            (S(0), S(1)),
            (B, S(0)),
            (B, B),
            (P, S(0)),
            (P, B),
        ):
            start = (torch.arange(28.0).view(7, 4) - 9).requires_grad_()
            start.data[2, 1] = torch.nan
            given = (
                start.detach()
                .to_global(place, [B] * place.axes)
                .to_global(sbp=layout[: place.axes])
                .requires_grad_()
            )  # type: ignore[attr-defined]
            for k in range(view(start).shape[-1]):
                found = []
                for leaf in (start, given):
                    leaf.grad = None
                    t = leaf * 1
                    windows = view(t)
                    windows[..., k].nan_to_num_(5.0).mul_(-3)
                    (t.nan_to_num().square().sum() + (windows.nan_to_num() * 2).sum()).backward()
                    found.append((t.detach(), windows.detach(), leaf.grad))
                plain, ours = found[0], [full(t) for t in found[1]]
                assert all(
                    torch.equal(a.isnan(), b.isnan())
                    and torch.equal(a.nan_to_num(), b.nan_to_num())
                    for a, b in zip(plain, ours, strict=True)
                )
                assert all(
                    torch.equal(a.signbit(), b.signbit())
                    for a, b in zip(plain[:2], ours, strict=False)
                )

    simulate(world, on_ranks)


def windows_on_processes() -> None:
    place = flow.placement("cpu", [0, 1])
    for layout in (S(0), S(1), B, P):
        for k in range(3):
            plain = torch.arange(28.0).view(7, 4)
            given = plain.to_global(place, B).to_global(sbp=layout) * 1  # type: ignore[attr-defined]
            plain = plain.clone()
            for t in (plain, given):
                t.unfold(0, 3, 1)[..., k].mul_(-3)
            assert torch.equal(full(given), plain)


def test_windows_that_overlap_on_processes() -> None:
    run_on(2, windows_on_processes)
