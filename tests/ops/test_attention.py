"""Tests of attention over a split sequence. Each method, layout and number of ranks gives plain
torch's numbers, with the documented traffic and memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import example, given
from hypothesis import strategies as st
from support.everywhere import compare, full
from support.held import Held
from support.pool import run_on
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import globaltensor as flow
from globaltensor._base import torch_private
from globaltensor._ops.rules.attention import blocks, ring
from globaltensor._ops.rules.attention import sdpa as rule_of_attention
from globaltensor._ops.rules.attention.blocks import (
    _regions_of_stretches,
    _visible_regions,
    block,
    block_backward,
    members,
)
from globaltensor._ops.rules.attention.ring import zigzag_chunks
from globaltensor.boxing.moves import show_bytes
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import FallbackWarning, SbpError

A = F.scaled_dot_product_attention
B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
METHODS = ["ring", "heads", "gather", "auto"]
Layout = Sequence[Any]


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def qkv(
    lead: tuple[int, ...] = (2, 4), rows: int = 7, keys: int = 9, width: int = 5
) -> list[torch.Tensor]:
    return [x(*lead, rows, width), x(*lead, keys, width, seed=1), x(*lead, keys, width, seed=2)]


def placement(grid: Sequence[int]) -> Any:
    return flow.placement("cpu", torch.arange(math.prod(grid)).reshape(tuple(grid)).tolist())


def spread(t: torch.Tensor, where: Any, sbp: Layout) -> Any:
    return (
        t.to_global(where, [B] * where.axes)
        .to_global(sbp=list(sbp))
        .detach()
        .requires_grad_(t.is_floating_point())
    )


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Compute attention by ordinary operations, which can be differentiated twice."""
    blocks = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        blocks = blocks.masked_fill(torch.ones(blocks.shape[-2:]).tril() == 0, -math.inf)
    if mask is not None:
        blocks = blocks.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else blocks + mask
    return blocks.softmax(-1) @ v


def on_rank(
    tensors: list[torch.Tensor],
    layouts: Sequence[Layout],
    method: str,
    kwargs: Any,
    grid: Sequence[int],
    weight: torch.Tensor,
) -> Any:
    where = placement(grid)
    ours = [spread(t, where, s) for t, s in zip(tensors, layouts, strict=True)]
    with flow.context_parallel(method), record_collectives() as there:
        out = A(*ours, **kwargs)
    leaves = [t for t in ours if t.requires_grad]
    total = (out * weight.to_global(where, [B] * where.axes)).sum()
    with record_collectives() as back:
        found = torch.autograd.grad(total, leaves)
    traffic = [(t.kind, t.bytes) for t in there], [(t.kind, t.bytes) for t in back]
    return full(out), [full(g) for g in found], tuple(e.short for e in out.sbp), traffic


def checked(
    tensors: list[torch.Tensor],
    layouts: Sequence[Layout],
    method: str,
    grid: Sequence[int],
    **kwargs: Any,
) -> Any:
    """Run on simulated ranks and compare with plain torch. Return (sbp of the result, traffic) of
    rank 0."""
    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    want = A(*plain, **kwargs)
    weight = x(*want.shape, seed=3)
    slopes = torch.autograd.grad((want * weight).sum(), [t for t in plain if t.requires_grad])
    results = simulate(math.prod(grid), on_rank, tensors, layouts, method, kwargs, grid, weight)
    for out, found, _, _ in results:
        torch.testing.assert_close(out, want.detach(), rtol=1e-9, atol=1e-9)
        for got, slope in zip(found, slopes, strict=True):
            torch.testing.assert_close(got, slope, rtol=1e-9, atol=1e-9)
    return results[0][2:]


# ------------------------------------------------------------------------------------------ numbers

#: sbp of the queries, and sbp of the keys and values
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "both": (S(2), S(2)), "keys": (B, S(2)), "queries": (S(2), B), "partial queries": (P, S(2)),
    "queries by heads": (S(1), S(2)),
    "keys by heads": (S(2), S(1)), "queries by batch": (S(0), S(2)),
    "queries by width": (S(3), S(2)),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sweep(6)
def test_layouts(name: str, method: str) -> None:
    mine, other = LAYOUTS[name]
    for grid in ((2,), (3,)):
        for causal in (False, True):
            checked(qkv(), [[mine], [other], [other]], method, grid, is_causal=causal)
    checked(qkv(), [[mine], [other], [other]], method, (3,), scale=0.3)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("grid", [(2,), (3,), (4,)], ids=str)
@pytest.mark.sweep(12)
def test_lengths(grid: tuple[int, ...], method: str) -> None:
    """Lengths may be uneven, shorter than the number of ranks, or one row or one key. Queries and
    keys may have different lengths."""
    for rows, keys in ((7, 7), (2, 5), (9, 3), (1, 6), (6, 1), (3, 3)):
        for causal in (False, True):
            for mine in (S(2), B):
                checked(
                    qkv(rows=rows, keys=keys),
                    [[mine], [S(2)], [S(2)]],
                    method,
                    grid,
                    is_causal=causal,
                )


#: Each part has every third pair of layouts of the queries, and of keys and values.
PARTS = 3


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sweep(12)
def test_two_axes(method: str, part: int) -> None:
    pairs = [
        ([S(0), S(2)], [S(0), S(2)]), ([S(1), S(2)], [S(1), S(2)]), ([S(2), S(1)], [S(2), S(1)]),
        ([S(2), S(2)], [S(2), S(2)]), ([S(2), B], [S(2), S(2)]),
        ([B, S(2)], [S(2), S(2)]), ([S(2), S(2)], [S(2), B]), ([S(2), S(2)], [B, S(2)]),
        ([B, B], [S(2), S(2)]), ([S(0), B], [S(0), S(2)]),
    ]  # fmt: skip
    mask = x(2, 1, 7, 9)
    for mine, other in pairs[part::PARTS]:
        for grid in ((2, 2), (1, 3)):
            checked(qkv(), [mine, other, other], method, grid)
            checked(qkv(), [mine, other, other], method, grid, is_causal=True)
        checked([*qkv(), mask], [mine, other, other, [B, B]], method, (2, 2))


def masks() -> dict[str, tuple[torch.Tensor, list[Any]]]:
    see = torch.ones(7, 9).tril().bool()
    blind, infinite = see.clone(), x(7, 9)
    blind[2] = False
    infinite[1], infinite[3, 2:] = -math.inf, -math.inf
    padding = torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    return {
        "bool": (see, [B, S(0), S(1)]), "a row that sees nothing": (blind, [B, S(0)]),
        "added": (x(2, 1, 7, 9), [B, S(0), S(2), S(3)]),
        "added infinities": (infinite, [B]), "padding": (padding, [B, S(3)]),
        "by heads": (x(4, 1, 9), [B, S(0)]),
        "one for each row": (x(1, 4, 7, 1), [B, S(2)]), "whole": (x(2, 4, 7, 9), [B, S(1), P]),
    }  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", masks())
@pytest.mark.sweep(7)
def test_masks(name: str, method: str) -> None:
    """A bool or additive mask is broadcast in any dim, split or not. An additive mask receives its
    gradient."""
    mask, layouts = masks()[name]
    for layout in layouts:
        for mine, other in ((S(2), S(2)), (B, S(2)), (S(2), B)):
            checked([*qkv(), mask], [[mine], [other], [other], [layout]], method, (3,))


@pytest.mark.parametrize("heads", [3, 2, 1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sweep(12)
def test_groups_of_heads(method: str, heads: int) -> None:
    q, k, v = x(2, 6, 7, 4), x(2, heads, 7, 4, seed=1), x(2, heads, 7, 4, seed=2)
    for mine, other in ((S(2), S(2)), (B, S(2)), (S(1), S(2)), (S(2), B)):
        for causal in (False, True):
            checked(
                [q, k, v],
                [[mine], [other], [other]],
                method,
                (3,),
                is_causal=causal,
                enable_gqa=True,
            )
        for mask in (x(6, 7, 7), x(2, 1, 7, 7)):
            checked([q, k, v, mask], [[mine], [other], [other], [B]], method, (2,), enable_gqa=True)
    checked([q, k, v], [[S(1), S(2)]] * 3, method, (2, 2), enable_gqa=True)


@pytest.mark.parametrize(("heads", "n"), [(1, 3), (2, 3), (3, 2), (2, 6), (1, 4)])
@pytest.mark.sweep(5)
def test_fewer_heads_of_keys_than_ranks_can_share(heads: int, n: int) -> None:
    """A rank that has some query heads needs no other query heads. A rank that has the keys
    receives no message."""
    q, k, v = x(2, 6, 7, 4), x(2, heads, 7, 4, seed=1), x(2, heads, 7, 4, seed=2)
    for causal in (False, True):
        sbp, (there, back) = checked(
            [q, k, v], [[S(1)], [B], [B]], "auto", (n,), is_causal=causal, enable_gqa=True
        )
        assert (sbp, there, {kind for kind, _ in back}) == (("S(1)",), [], {"all_reduce"}), (
            "gradients of the keys are summed"
        )
        checked([q, k, v, x(1, 6, 7, 7)], [[S(1)], [B], [B], [S(1)]], "auto", (n,), enable_gqa=True)
    sbp, (there, _) = checked(
        [q, k, v], [[S(2)]] * 3, "heads", (n,), is_causal=True, enable_gqa=True
    )
    assert (sbp, [kind for kind, _ in there]) == (
        ("S(2)",),
        ["all_to_all", "all_gather", "all_gather", "all_to_all"],
    )
    checked([q, k, v], [[S(2), S(1)], [S(2), B], [S(2), B]], "auto", (2, n), enable_gqa=True)
    checked(
        [q, k, v],
        [[S(1), S(2)], [B, S(2)], [B, S(2)]],
        "ring",
        (n, 2),
        is_causal=True,
        enable_gqa=True,
    )
    checked(
        [q, k, v],
        [[S(1), S(2)], [S(1), S(2)], [S(1), S(2)]],
        "auto",
        (n, 2),
        is_causal=True,
        enable_gqa=True,
    )


def test_other_shapes() -> None:
    """Inputs may have no head dim, no batch dim, values of another width, or leading dims that
    broadcast."""
    for method in ("ring", "gather", "auto"):
        checked([x(5, 4), x(6, 4), x(6, 3)], [[S(0)]] * 3, method, (3,))
    for method in METHODS:
        checked(
            [x(2, 5, 4), x(2, 6, 4), x(2, 6, 4, seed=1)], [[S(1)]] * 3, method, (3,), is_causal=True
        )
        checked([x(1, 4, 5, 4), x(3, 4, 6, 4), x(3, 1, 6, 4)], [[S(2)]] * 3, method, (3,))
        checked(
            [x(2, 4, 5, 4), x(2, 4, 6, 4), x(2, 4, 6, 3)], [[S(2)], [S(2)], [S(3)]], method, (3,)
        )


@pytest.mark.long
@pytest.mark.parametrize("grid", [(2,), (3,), (4,), (2, 2)], ids=str)
@pytest.mark.sweep(4)
def test_rows_dealt_in_pairs(grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal work is balanced by dealing rows in pairs. The library does so for long sequences;
    this test forces it for short ones."""
    monkeypatch.setattr(rule_of_attention, "_BALANCED", 1)
    for length in (8, 7, 13, 16, 5):
        same = [S(2)] * len(grid)
        _, traffic = checked(
            qkv(rows=length, keys=length), [same] * 3, "ring", grid, is_causal=True
        )
        rounds = math.prod(grid) - 1
        assert len(traffic[0]) == (2 + rounds if length >= math.prod(grid) else rounds), (
            "queries, keys and values are dealt, the result is brought back"
        )
        checked(
            [x(2, 6, length, 4), *[x(2, 3, length, 4, seed=s) for s in (1, 2)]],
            [same] * 3,
            "ring",
            grid,
            is_causal=True,
            enable_gqa=True,
        )


@pytest.mark.long
@pytest.mark.parametrize("balanced", [512, 1], ids=["as they lie", "dealt"])
@pytest.mark.parametrize("grid", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.sweep(6)
def test_heads_in_turns(
    grid: tuple[int, ...], balanced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large blocks go round the ring a few heads (or samples) at a time, and are dealt one by one.
    This test sets small limits, so that small blocks do the same."""
    monkeypatch.setattr(rule_of_attention, "_BALANCED", balanced)
    same = [[S(2)] * len(grid)] * 3
    _, whole = checked(qkv(rows=13, keys=13), same, "ring", grid, is_causal=True)
    for limit in (1, 1000):
        monkeypatch.setattr(ring, "_BLOCK", limit)
        monkeypatch.setattr(ring, "_DEAL", limit)
        for lead in ((2, 4), (3, 1), (1, 3), (1, 1)):
            for causal in (False, True):
                _, traffic = checked(
                    qkv(lead, rows=13, keys=13), same, "ring", grid, is_causal=causal
                )
        for heads in (
            1,
            2,
            6,
        ):  # heads of keys: shared ones go round once per group of their query heads
            checked(
                [x(2, 6, 13, 4), *[x(2, heads, 13, 4, seed=s) for s in (1, 2)]],
                same,
                "ring",
                grid,
                is_causal=True,
                enable_gqa=True,
            )
        for mask in (x(7, 9), x(4, 7, 9), x(2, 1, 7, 9), x(2, 4, 1, 9) > 0, x(2, 4, 7, 1)):
            checked([*qkv(), mask], [*same, [B] * len(grid)], "ring", grid)
        checked(qkv(), [[S(2)] * len(grid), [B] * len(grid), [B] * len(grid)], "ring", grid)
        checked(qkv(), [[B] * len(grid), *same[1:]], "ring", grid)
        _, traffic = checked(qkv(rows=13, keys=13), same, "ring", grid, is_causal=True)
        assert [
            sum(n for _, n in log) >= sum(n for _, n in of)
            for log, of in zip(traffic, whole, strict=True)
        ] == [True, True]
        assert limit > 1 or len(traffic[0]) >= 4 * len([kind for kind, n in whole[0]]) > 0, (
            "each of four heads by itself"
        )


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draws", [2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.sweep(2, kind=lambda draws, method: draws)
def test_drawn_layouts(draws: int, method: str) -> None:
    with flow.context_parallel(method):
        compare(A, *qkv(), draws=draws)
        compare(partial(A, is_causal=True), *qkv(rows=8, keys=8), draws=draws)
        compare(A, *qkv(), x(7, 9), grids=((3,), (2, 2)), draws=draws)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(dtype: torch.dtype) -> None:
    """Results in narrow dtypes are as close to float64 as those of torch's own kernel."""
    wide = qkv(rows=70, keys=90, width=8)
    narrow = [t.to(dtype) for t in wide]
    for kwargs in ({}, {"is_causal": True}, {"attn_mask": torch.ones(70, 90).tril().bool()}):
        truth = A(*[t.double() for t in narrow], **kwargs)
        own = (A(*narrow, **kwargs).double() - truth).abs().max()

        def run(kwargs: Any = kwargs) -> torch.Tensor:
            with flow.context_parallel("ring"):
                return full(A(*[spread(t, placement((3,)), [S(2)]) for t in narrow], **kwargs))

        for out in simulate(3, run):
            assert out.dtype is dtype
            assert (out.double() - truth).abs().max() <= 4 * own


def test_autocast() -> None:
    narrow = [t.float() for t in qkv()]
    want = A(*[t.bfloat16() for t in narrow])

    def run() -> torch.Tensor:
        ours = [spread(t, placement((2,)), [S(2)]) for t in narrow]
        with torch.autocast("cpu", torch.bfloat16), flow.context_parallel("ring"):
            out = A(*ours)
        out.sum().backward()
        assert all(t.grad.dtype is torch.float32 for t in ours)
        return full(out)

    for out in simulate(2, run):
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


TWICE: list[tuple[str, Sequence[int], Layout, Layout, torch.Tensor | None, bool]] = [
    ("ring", (2,), [S(2)], [S(2)], None, False), ("causal ring", (3,), [S(2)], [S(2)], None, True),
    ("keys", (3,), [B], [S(2)], None, True),
    ("causal rows", (3,), [S(2)], [B], None, True),
    ("added mask", (2,), [S(2)], [S(2)], x(7, 9), False),
    ("bool mask", (2,), [S(2)], [S(2)], torch.ones(7, 9).tril().bool(), False),
    ("two axes", (2, 2), [S(0), S(2)], [S(0), S(2)], None, True),
    ("ring and merging", (2, 2), [S(2), B], [S(2), S(2)], None, True),
    ("rows and ring", (2, 2), [S(2), S(2)], [B, S(2)], None, True),
]  # fmt: skip


@pytest.mark.parametrize("row", TWICE, ids=lambda row: row[0])
@pytest.mark.sweep(2)
def test_gradient_of_the_gradient(row: Any) -> None:
    _, grid, mine, other, mask, causal = row
    for rows in (7, 2):
        tensors = [*qkv(rows=rows), *([] if mask is None else [mask[:rows]])]
        weight = x(2, 4, rows, 5, seed=4)

        def twice(
            function: Callable[..., torch.Tensor],
            leaves: list[Any],
            weight: Any,
            causal: bool = causal,
        ) -> Any:
            smooth = [t for t in leaves if t.requires_grad]
            first = torch.autograd.grad(
                (function(*leaves, is_causal=causal) * weight).sum(), smooth, create_graph=True
            )
            return torch.autograd.grad(
                sum(((t**2).sum() * (i + 1) for i, t in enumerate(first)), torch.zeros(())), smooth
            )

        want = twice(
            reference, [t.clone().requires_grad_(t.is_floating_point()) for t in tensors], weight
        )

        def run(tensors: Any = tensors, weight: Any = weight) -> Any:
            where = placement(grid)
            layouts = [mine, other, other, [B] * len(grid)][: len(tensors)]
            ours = [spread(t, where, s) for t, s in zip(tensors, layouts, strict=True)]
            with flow.context_parallel("ring"):
                return [full(g) for g in twice(A, ours, weight.to_global(where, [B] * len(grid)))]

        for found in simulate(math.prod(grid), run):
            for got, slope in zip(found, want, strict=True):
                torch.testing.assert_close(got, slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_dropout(method: str) -> None:
    """Values that are unit vectors expose the attention weights. Each weight is dropped or doubled,
    and weights of masked keys are zero. All ranks get the same result, and blocks on different
    ranks are dropped independently."""
    rows = 12
    q, k, v = (
        x(2, 4, rows, 5),
        x(2, 4, rows, 5, seed=1),
        torch.eye(rows, dtype=torch.float64).expand(2, 4, rows, rows).contiguous(),
    )
    for causal in (False, True):
        shares = A(q, k, v, is_causal=causal)
        for mine, other in ((S(2), S(2)), (B, S(2)), (S(2), B)):

            def run(mine: Any = mine, other: Any = other, causal: bool = causal) -> torch.Tensor:
                torch.manual_seed(0)
                ours = [
                    spread(t, placement((3,)), [s]) for t, s in ((q, mine), (k, other), (v, other))
                ]
                with flow.context_parallel(method):
                    out = A(*ours, None, 0.5, causal)
                out.sum().backward()
                return full(out)

            found = simulate(3, run)
            assert all(torch.equal(out, found[0]) for out in found)
            kept = found[0] != 0
            torch.testing.assert_close(found[0], torch.where(kept, shares * 2, 0.0))
            assert 0.3 < kept[shares != 0].double().mean() < 0.7
            assert not torch.equal(kept[..., :4, :4], kept[..., 8:, 8:])


# ---------------------------------------------------------------------------- work, traffic, memory


def seen(rows: tuple[int, int], keys: tuple[int, int], causal: bool) -> torch.Tensor:
    """Count how often `_visible_regions` covers each score of the whole block."""
    count = torch.zeros(rows[1], keys[1], dtype=torch.int64)
    for r, c, square in _visible_regions(rows, keys, causal):
        part = count[r, c]
        part += part.new_ones(part.shape).tril() if square else 1
        assert not square or part.shape[0] == part.shape[1]
    return count


def test_work_is_what_is_not_masked() -> None:
    """Each unmasked score is computed once, and no masked score is computed."""
    whole = torch.ones(9, 9, dtype=torch.int64)
    for a in range(6):
        for n in range(4):
            for b in range(6):
                for m in range(4):
                    assert torch.equal(seen((a, n), (b, m), False), whole[a : a + n, b : b + m])
                    assert torch.equal(
                        seen((a, n), (b, m), True), whole.tril()[a : a + n, b : b + m]
                    )


def taken_together(
    rows: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], causal: bool
) -> tuple[torch.Tensor, int]:
    """Return (counts, pieces). `counts` says how often `_regions_of_stretches` covers each score,
    on rows and keys in their order here; `pieces` is the number of pieces."""
    count = torch.zeros(sum(n for _, n in rows), sum(n for _, n in keys), dtype=torch.int64)
    found = _regions_of_stretches(tuple(rows), tuple(keys), causal)
    for r, c, square in found:
        assert not square or r.stop - r.start == c.stop - c.start
        count[r, c] += torch.ones_like(count[r, c]).tril() if square else 1
    return count, len(found)


STRETCHES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=3)


@given(STRETCHES, st.one_of(st.none(), STRETCHES), st.booleans())
@example([(4, 2), (0, 2)], None, True)
@example([(0, 3), (2, 3)], None, True)
def test_work_taken_together_is_the_same(
    rows: list[tuple[int, int]], keys: list[tuple[int, int]] | None, causal: bool
) -> None:
    keys = rows if keys is None else keys
    at, of = (
        torch.tensor([i for a, n in some for i in range(a, a + n)], dtype=torch.int64)
        for some in (rows, keys)
    )
    want = (of[None, :] <= at[:, None]) | (not causal)
    assert torch.equal(taken_together(rows, keys, causal)[0], want.long())


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_pairs_are_one_piece_a_round(parts: int) -> None:
    dealt = zigzag_chunks(16 * parts, parts)
    assert {taken_together(rows, keys, True)[1] for rows in dealt for keys in dealt} == {1}


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_pairs_have_equal_work_in_every_round(parts: int) -> None:
    dealt = zigzag_chunks(16 * parts, parts)
    rounds = [
        [sum(int(seen(r, k,
            True).sum()) for r in dealt[i] for k in dealt[(i - t) % parts]) for i in range(parts)] for t in range(parts)  # noqa: E501
    ]  # fmt: skip
    assert all(max(row) - min(row) <= 16 for row in rounds), rounds
    assert sum(map(sum, rounds)) == 16 * parts * (16 * parts + 1) // 2


BLOCK = 2 * 4 * 6 * 8 * 8  # bytes of the keys of one rank of 2 x 4 heads, 6 keys, width 8


@pytest.mark.parametrize("n", [2, 3, 4])
def test_traffic(n: int) -> None:
    """The collectives and bytes on rank 0 are exact, forward and backward into queries, keys and
    values."""
    tensors, split = qkv(rows=6 * n, keys=6 * n, width=8), [[S(2)]] * 3
    sbp, (there, back) = checked(tensors, split, "ring", (n,))
    assert sbp == ("S(2)",)
    assert there == [("exchange", 2 * BLOCK)] * (n - 1), "keys and values, to the next rank only"
    assert back == [("exchange", 2 * BLOCK)] * (2 * n - 1), (
        "in turn they and their gradients, which then go home"
    )

    _, (there, back) = checked(tensors, split, "ring", (n,), is_causal=True)
    assert there == [("exchange", 2 * BLOCK)] + [("exchange", 0)] * (n - 2), (
        "rank 0 sees its own keys alone and passes on no others"
    )
    assert sum(b for _, b in back) == 4 * BLOCK

    sbp, (there, back) = checked(qkv((2, 2 * n), 6 * n, 6 * n, 8), split, "heads", (n,))
    part = BLOCK * n // 2 * (n - 1) // n
    assert sbp == ("S(2)",)
    assert there == [("all_to_all", part)] * 4, "queries, keys, values; the result"
    assert back == [("all_to_all", part)] * 4

    sbp, (there, back) = checked(tensors, split, "gather", (n,))
    assert sbp == ("S(2)",)
    assert there == [("all_gather", BLOCK * (n - 1))] * 2
    assert back == [("reduce_scatter", BLOCK * (n - 1))] * 2

    sbp, (there, back) = checked(tensors, [[B], [S(2)], [S(2)]], "ring", (n,))
    assert sbp == ("B",)
    assert [kind for kind, _ in there] == ["all_reduce"] * 2, (
        "the largest score of each row; the sums"
    )
    assert [kind for kind, _ in back] == ["all_reduce"] * 2, (
        "the gradient of the result; that of the queries, asked for whole"
    )

    sbp, (there, back) = checked(tensors, [[S(2)], [B], [B]], "auto", (n,), is_causal=True)
    assert (sbp, there) == (("S(2)",), []), "rows know their place: whole keys need not move"


def test_one_new_row_moves_no_keys() -> None:
    """A generation step moves no keys: the previous keys are split, and every rank has the full
    query."""
    q, k, v = x(2, 4, 1, 8), x(2, 4, 4096, 8), x(2, 4, 4096, 8, seed=1)
    sbp, (there, back) = checked([q, k, v], [[B], [S(2)], [S(2)]], "auto", (2,))
    assert sbp == ("B",)
    assert [kind for kind, _ in (*there, *back)][:3] == ["all_reduce"] * 3
    assert sum(b for _, b in there) < 16 * 1024


def kinds(tensors: list[torch.Tensor], n: int, **kwargs: Any) -> set[str]:
    def run() -> set[str]:
        ours = [spread(t.float(), placement((n,)), [S(2)]) for t in tensors]
        with record_collectives() as log, torch.no_grad():
            A(*ours, **kwargs)
        return {t.kind for t in log}

    found = simulate(n, run)
    assert all(f == found[0] for f in found)
    return found[0]  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize(
    ("long", "width"), [(2048, 32), pytest.param(8192, 8, marks=pytest.mark.extended)]
)
def test_what_auto_takes(long: int, width: int) -> None:
    assert kinds(qkv((1, 4), long, long, width), 4) == {"all_to_all"}, "heads divide by the ranks"
    assert kinds(qkv((1, 3), long, long, width), 4) == {"exchange"}, "they do not"
    few = [x(1, 8, long, width), x(1, 1, long, width), x(1, 1, long, width)]
    assert kinds(few, 4, enable_gqa=True) == {"exchange"}, "few heads of keys"
    assert kinds(few, 4, enable_gqa=True, is_causal=True) == {"all_gather", "all_to_all"}, (
        "but a ring would deal the rows out"
    )
    assert kinds(qkv((1, 4), 6, 6, 8), 4) == {"all_gather"}, "short: one round"


class Largest(TorchDispatchMode):
    """A mode that records the size in bytes of the largest tensor that an operation makes while it
    is active."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                self.nbytes = max(self.nbytes, t.nbytes)
        return out


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_memory(n: int, causal: bool) -> None:
    """No tensor of the ring, forward or backward, is larger than a rank's keys and values with
    their gradients. The ring saves only its inputs and its result."""
    length, width = 256, 8
    q, k, v = qkv((1, 2), length, length, width)
    block = 2 * length // n * width * 8  # bytes of a rank's keys

    def run(method: str) -> tuple[int, int, int]:
        ours = [spread(t, placement((n,)), [S(2)]) for t in (q, k, v)]
        kept: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.nbytes) or t, lambda t: t
        )  # type: ignore[func-returns-value]
        with flow.context_parallel(method), Largest() as there, hooks:
            out = A(*ours, is_causal=causal)
        total = out.sum()
        with Largest() as back:
            total.backward()
        return there.nbytes, back.nbytes, sum(kept)

    for there, back, kept in simulate(n, run, "ring"):
        assert there <= 2 * block, "keys and values of one rank"
        assert back <= 4 * block, "the same with their gradients"
        assert kept <= 4 * block + block // width, (
            "queries, keys, values, the result, and a number for each row"
        )
    for there, _, _ in simulate(n, run, "gather"):
        assert there >= n * block, "which gathering does not promise"


def held_by_a_ring(n: int, heads: tuple[int, int], causal: bool) -> float:
    """Return the maximum memory that a rank holds in addition to its inputs, in units of its
    queries."""
    length, width, patch = 512, 16, pytest.MonkeyPatch()
    unit = heads[0] * length // n * width * 8
    ours = [
        spread(x(1, h, length, width), placement((n,)), [S(2)])
        for h in (heads[0], heads[1], heads[1])
    ]
    with patch.context() as patched:
        patched.setattr(rule_of_attention, "_BALANCED", 1)
        patched.setattr(ring, "_BLOCK", unit // 4)
        patched.setattr(torch, "get_num_threads", lambda: 1)
        with flow.context_parallel("ring"), Held() as held:
            A(*ours, is_causal=causal, enable_gqa=True).sum().backward()
    return held.most / unit


@pytest.mark.parametrize(
    ("heads", "most"),
    [((8, 8), 6.5), ((8, 4), 6.0), ((8, 1), 5.5)],
    ids=["as many", "half of keys", "one of keys"],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.sweep(6)
def test_memory_of_all_that_is_held(heads: tuple[int, int], most: float, causal: bool) -> None:
    """The result and the gradients take 4 units, or 2.25 with one head of keys. In addition, a ring
    holds few heads of some blocks, and no copies of shared key heads. Of the rows dealt for a
    causal mask (4 units) a ring holds few heads too."""
    assert max(run_on(4, held_by_a_ring, 4, heads, causal)) <= most


@pytest.mark.parametrize("common", [False, True])
def test_the_kernel_of_gpus_is_given_what_it_takes(
    common: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU kernel receives valid shapes and dtypes, tested on fake tensors.
    tests/end_to_end/test_gpu.py tests the numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(blocks, "_kernel_is_accurate", lambda *key: True)
    with torch_private.fake_tensors():
        q = torch.empty(2, 3, 4, 7, 16, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.empty(2, 3, 1 if common else 4, 12, 16, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        assert len(members(q, k, v, None)) == 1
        out, total = block(q, k, v, None, False, 0.25)
        assert (out.shape, out.dtype, total.shape, total.dtype) == (
            q.shape,
            q.dtype,
            (2, 3, 4, 7, 1),
            torch.float32,
        )
        *found, of_mask = block_backward(out, q, k, v, None, out, total, False, 0.25, False)
        assert [(g.shape, g.dtype) for g in found] == [(t.shape, t.dtype) for t in (q, k, v)]
        assert of_mask is None
        assert not torch_private.has_flash_attention(*(t.float() for t in (q, k, v))), (
            "which has no such kernel"
        )


def test_a_kernel_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    key, kernel, backward = (
        (torch.device("cpu"), torch.float32, 16),
        torch_private.flash_attention,
        torch_private.flash_attention_backward,
    )
    tried = blocks._kernel_is_accurate.__wrapped__
    assert tried(*key)
    with torch_private.fake_tensors():
        assert tried(*key), "while a graph is captured, too"
    for name, other in (
        ("flash_attention", lambda *args: (kernel(*args)[0], kernel(*args)[1] / math.log(2))),
        ("flash_attention", lambda q, k, v, causal, scale: kernel(q, k, v, False, scale)),
        ("flash_attention_backward", lambda *args: tuple(2 * g for g in backward(*args))),
        ("flash_attention_backward", lambda grad: grad),  # this one has other parameters
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch_private, name, other)
            with pytest.warns(
                UserWarning,
                match="flash attention for torch.float32 on cpu does not give the expected results",
            ):
                assert not tried(*key)


# -------------------------------------------------------------------------------------- the setting


def test_setting() -> None:
    with (
        pytest.raises(SbpError, match="no method 'rings'; there are auto, ring, heads, gather"),
        flow.context_parallel("rings"),
    ):
        pass
    with flow.context_parallel("heads"), flow.context_parallel("ring"):
        assert rule_of_attention._method.get() == "ring"
    assert rule_of_attention._method.get() == "auto"

    def run() -> None:
        ours = [spread(t, placement((2,)), [S(0)]) for t in (x(5, 4), x(6, 4), x(6, 4))]
        with flow.context_parallel("heads"):
            A(*ours)

    with pytest.raises(SbpError, match="no dim of heads"):
        simulate(2, run)


def test_a_ring_is_no_boxing() -> None:
    def run() -> list[str]:
        ours = [spread(t, placement((2,)), [S(2)]) for t in qkv()]
        with (
            flow.context_parallel("ring"),
            flow.no_boxing(),
            flow.boxing_log() as log,
        ):  # the user chose the ring explicitly
            A(*ours)
        with (
            pytest.raises(flow.errors.BoxingError),
            flow.context_parallel("heads"),
            flow.no_boxing(),
        ):
            A(*ours)
        return [str(r) for r in log if r.bytes]

    # Each rank sends its own keys and values.
    sent = [sum(half.numel() * half.itemsize for half in halves) for halves in zip(
        *(t.tensor_split(2, 2) for t in qkv()[1:]), strict=True
    )]  # fmt: skip
    what = "scaled_dot_product_attention: keys and values round the ring  exchange"
    assert simulate(2, run) == [[f"{what}  {show_bytes(n)}  ranks 0-1"] for n in sent]


def test_an_error_is_torchs() -> None:
    def run() -> None:
        ours = [
            spread(t, placement((2,)), [S(2)])
            for t in (x(2, 4, 6, 5), x(2, 4, 6, 5), x(2, 4, 5, 5))
        ]
        A(*ours)

    with pytest.raises(RuntimeError):
        simulate(2, run)


# ----------------------------------------------------------------------------------- real processes


def in_processes(n: int, method: str, causal: bool) -> tuple[float, list[str]]:
    tensors = qkv(rows=4 * n + 1, keys=4 * n + 1)
    plain = [t.clone().requires_grad_() for t in tensors]
    want = A(*plain, is_causal=causal)
    want.pow(2).sum().backward()
    ours = [spread(t, placement((n,)), [S(2)]) for t in tensors]
    with flow.context_parallel(method), record_collectives() as log:
        out = A(*ours, is_causal=causal)
    out.pow(2).sum().backward()
    errors = [(full(out) - want.detach()).abs().max()] + [
        (full(o.grad) - p.grad).abs().max() for o, p in zip(ours, plain, strict=True)
    ]  # type: ignore[operator]
    assert world().size == n
    return max(map(float, errors)), [t.kind for t in log]


@pytest.mark.parametrize("n", [2, 4])
def test_processes(n: int) -> None:
    for causal in (False, True):
        for method in METHODS:
            for error, log in run_on(n, in_processes, n, method, causal):
                assert error < 1e-9
                assert method != "ring" or log == ["exchange"] * (n - 1)


# ------------------------------------------------------------------------------------------ modules

SEE = nn.Transformer.generate_square_subsequent_mask(8).double()
PAD = torch.arange(8) >= torch.tensor([8, 6, 5, 8])[:, None]
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda m,
        v: m(v, v, v, need_weights=False)[0]),
    "attention, causal": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda m,
        v: m(v, v, v, need_weights=False, attn_mask=SEE, is_causal=True)[0]),
    "attention, padded": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda m,
        v: m(v, v, v, PAD, need_weights=False)[0]),
    "attention, with weights": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda m,
        v: m(v, v, v)),
    "attention, with the weights of each head": (
        lambda: nn.MultiheadAttention(8, 4, batch_first=True), lambda m,
        v: m(v, v, v, PAD, average_attn_weights=False, attn_mask=SEE)),
    "attention, appended keys": (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True,
        add_zero_attn=True), lambda m, v: m(v, v, v, attn_mask=x(4, 4))),
    "attention, a mask for each head": (lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, v: m(v, v, v, attn_mask=x(8, 8, 8))),
    "attention to another": (lambda: nn.MultiheadAttention(8, 2, batch_first=True, bias=False),
        lambda m, v: m(v[:, :5], v, v, need_weights=False)[0]),
    "attention, other widths": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True), lambda m,
        v: m(v, v[..., :4], v[..., :6], need_weights=False)[0]),
    "attention, no batch": (lambda: nn.MultiheadAttention(8, 2), lambda m, v: m(v[0], v[0], v[0])),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda m, v: m(v)),
    "encoder layer, causal": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), lambda m,
        v: m(v, src_mask=SEE, is_causal=True)),
    "encoder": (
        # torch's fast path of nested tensors gives zeros for the padding, so these rows don't
        # count.
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0,
            batch_first=True), 2),
        lambda m, v: m(v, src_key_padding_mask=PAD) * ~PAD[..., None]),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda m, v: m(v, v * 2)),
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sweep(10)
def test_modules(name: str, training: bool) -> None:
    """Modules work on a split batch, sequence and width. In eval mode torch's fast path is not
    used, because its kernels do not support global tensors."""
    make, call = MODULES[name]
    value = x(4, 8, 8)

    def run(grid: Sequence[int], sbp: Layout) -> None:
        where = placement(grid)
        model = _made(make, training).to_global(where, [B] * len(grid))
        ours = spread(value, where, sbp)
        with warnings.catch_warnings():
            # PyTorch warns of nested tensors and masks of two dtypes
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", FallbackWarning)
            with flow.context_parallel("ring"), torch.set_grad_enabled(training):
                got = call(model, ours)
        for g, w in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want)), strict=True):
            torch.testing.assert_close(full(g), w.detach(), rtol=1e-9, atol=1e-9)
        if training:
            _weighed(got).backward()
            found = [ours.grad, *[p.grad for p in model.parameters()]]
            for g, w in zip(found, [leaf.grad, *[p.grad for p in plain.parameters()]], strict=True):
                torch.testing.assert_close(full(g), w, rtol=1e-9, atol=1e-9)

    plain = _made(make, training)
    leaf = value.clone().requires_grad_()
    with torch.set_grad_enabled(training), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = call(plain, leaf)
    if training:
        _weighed(want).backward()
    for grid, sbp in (
        ((2,), [S(0)]),
        ((2,), [S(1)]),
        ((3,), [S(1)]),
        ((2,), [S(2)]),
        ((2, 2), [S(0), S(1)]),
    ):
        simulate(math.prod(grid), run, grid, sbp)


def _weighed(out: Any) -> torch.Tensor:
    return sum(
        ((t**2).sum() for t in (out if isinstance(out, tuple) else (out,))),
        start=torch.zeros((), dtype=torch.float64),
    )


def _made(make: Callable[[], nn.Module], training: bool) -> nn.Module:
    model = make().double().train(training)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(x(*p.shape, seed=i) / 3)
    return model


def test_traffic_of_a_layer() -> None:
    """A layer moves nothing for a split batch. For a split sequence it moves only keys and values,
    once."""

    def run(sbp: Any) -> list[str]:
        layer = (
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            .double()
            .to_global(placement((2,)), B)
        )
        value = spread(x(4, 8, 8), placement((2,)), [sbp])
        with flow.context_parallel("ring"), record_collectives() as log:
            layer(value)
        return [t.kind for t in log]

    assert simulate(2, run, S(0)) == [[]] * 2
    assert simulate(2, run, S(1)) == [["exchange"]] * 2


def test_some_gradients_only() -> None:
    """Only queries, only keys, only values or only a mask may need a gradient. All ranks take part
    in the same rounds in each case."""
    tensors = [*qkv(), x(7, 9)]
    for wanted in range(4):
        plain = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        A(*plain).pow(2).sum().backward()

        def run(wanted: int = wanted, plain: Any = plain) -> None:
            for mine in (S(2), B):
                layouts = [mine, S(2), S(2), B]
                ours = [
                    spread(t, placement((3,)), [s]).detach().requires_grad_(i == wanted)
                    for i, (t, s) in enumerate(zip(tensors, layouts, strict=True))
                ]
                with flow.context_parallel("ring"):
                    out = A(*ours)
                out.pow(2).sum().backward()
                torch.testing.assert_close(
                    full(ours[wanted].grad), plain[wanted].grad, rtol=1e-9, atol=1e-9
                )

        simulate(3, run)


def test_ranks_outside_the_placement() -> None:
    def run() -> torch.Tensor:
        where = flow.placement("cpu", [0, 2])
        ours = [t.to_global(where, B).to_global(sbp=S(2)).detach().requires_grad_() for t in qkv()]
        found = []
        for method in METHODS:
            with flow.context_parallel(method):
                out = A(*ours, is_causal=True)
            out.pow(2).sum().backward()
            found.append(out.detach().to_global(flow.placement("cpu", [0, 1, 2]), B).to_local())
        return torch.stack(found)

    want = A(*qkv(), is_causal=True)
    for found in simulate(3, run):
        torch.testing.assert_close(found, want.expand_as(found), rtol=1e-9, atol=1e-9)


def test_checkpoint() -> None:
    """A recomputed attention uses the same method again if the setting stands inside the recomputed
    function."""

    def attended(*tensors: torch.Tensor) -> torch.Tensor:
        with flow.context_parallel("ring"):
            return A(*tensors)

    def run() -> list[torch.Tensor]:
        found = []
        for call in (
            attended,
            partial(torch.utils.checkpoint.checkpoint, attended, use_reentrant=False),
        ):
            ours = [spread(t, placement((2,)), [S(2)]) for t in qkv()]
            call(*ours).pow(2).sum().backward()
            found += [full(t.grad) for t in ours]
        return found

    for found in simulate(2, run):
        for got, want in zip(found[3:], found[:3], strict=True):
            assert torch.equal(got, want)
