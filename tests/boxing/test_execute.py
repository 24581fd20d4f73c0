"""Tests of the values, gradients and traffic of boxing on simulated ranks. The oracle only slices
and adds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from globaltensor.boxing import box, boxing_log, no_boxing, plan_boxing
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import BoxingError
from globaltensor.sbp import (
    Sbp,
    broadcast,
    partial_max,
    partial_min,
    partial_norm,
    partial_sum,
    split,
)
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

B, P, S = broadcast, partial_sum, split
GRID = Placement("cpu", [[0, 1], [2, 3]])


def share(full: torch.Tensor, spec: Spec, rank: int) -> torch.Tensor:
    """Return the local tensor of ``full`` on ``rank``. Partial local tensors differ from rank to
    rank."""
    if spec.placement.coordinate(rank) is None:
        return torch.empty(0, dtype=full.dtype)
    offsets, lengths = spec.box(rank)
    part = full[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].clone()
    where = spec.placement.coordinate(rank)
    assert where is not None
    for axis, entry in enumerate(spec.layout):
        n, c = spec.placement.shape[axis], where[axis]
        if entry.reduce == "sum":
            part = part * (1 - (n - 1) * n if c == 0 else 2 * c)
        elif entry.reduce in ("max", "min"):
            part = part + (1 if entry.reduce == "min" else -1) * (
                torch.arange(part.numel()).reshape(part.shape) % n != c
            )
        elif entry.reduce == "norm2.0":
            part = part / math.sqrt(n)
    return part


def assemble(parts: Sequence[torch.Tensor], spec: Spec) -> torch.Tensor:
    """Assemble the global tensor from the local ones. Broadcast ranks must agree to the last
    bit."""
    coordinates = {r: spec.placement.coordinate(r) or () for r in spec.placement.flat}
    full = torch.zeros(spec.shape, dtype=spec.dtype)
    seen: dict[Any, torch.Tensor] = {}
    for rank, where in coordinates.items():
        assert tuple(parts[rank].shape) == spec.box(rank)[1]
        key = (
            spec.box(rank),
            tuple(c for c, e in zip(where, spec.layout, strict=True) if e.kind == "partial"),
        )
        assert torch.equal(seen.setdefault(key, parts[rank]), parts[rank])
    boxes: dict[Any, list[torch.Tensor]] = {}
    for (box_, _), part in seen.items():
        boxes.setdefault(box_, []).append(part)
    for (offsets, lengths), held in boxes.items():
        total = held[0]
        for part in held[1:]:
            total = total + part
        full[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = total
    return full


def move(full: torch.Tensor, pairs: Sequence[tuple[Spec, Spec]]) -> list[torch.Tensor]:
    return [box(share(full, src, world().rank), src, dst) for src, dst in pairs]


def agree(n: int, full: torch.Tensor, pairs: Sequence[tuple[Spec, Spec]]) -> None:
    results = simulate(n, move, full, pairs)
    for i, (src, dst) in enumerate(pairs):
        got = assemble([r[i] for r in results], dst)
        assert torch.allclose(got.to(torch.float64), full.to(torch.float64), rtol=1e-12), (
            f"{src} {src.placement} -> {dst} {dst.placement}\n{plan_boxing(src, dst)}"
        )
        for rank in range(n):
            if (
                dst.placement.coordinate(rank) is None
                and src.placement.coordinate(rank) is not None
            ):
                assert results[rank][i].shape == (0,)


def layouts(placement: Placement, entries: Sequence[Sbp]) -> list[tuple[Sbp, ...]]:
    return list(itertools.product(entries, repeat=placement.axes))


def value(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) % 97 + 1).reshape(tuple(shape)).to(dtype)


def pairs_of(
    full: torch.Tensor, a: Placement, b: Placement, entries: Sequence[Sbp]
) -> list[tuple[Spec, Spec]]:
    return [
        (Spec.make(full.shape, full.dtype, a, x), Spec.make(full.shape, full.dtype, b, y))
        for x in layouts(a, entries)
        for y in layouts(b, entries)
    ]


@pytest.mark.parametrize("shape", [(5, 3), (1, 7), (2, 2), (13, 4)])
def test_one_axis_all_pairs(shape: tuple[int, int]) -> None:
    full, line = value(shape), Placement("cpu", [0, 1, 2])
    entries = [B, P, S(0), S(1), S(0).with_unit(2), S(1).with_unit(3), S(0).with_unit(4)]
    agree(3, full, pairs_of(full, line, line, entries))


@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 7)])
def test_two_axes_all_pairs(shape: tuple[int, int]) -> None:
    full = value(shape)
    agree(4, full, pairs_of(full, GRID, GRID, [B, P, S(0), S(1)]))


def test_two_axes_with_units() -> None:
    full = value((11, 6))
    agree(4, full, pairs_of(full, GRID, GRID, [B, S(0), S(0).with_unit(3), S(0).with_unit(2), P]))


PLACEMENTS = [
    *(
        [
            Placement("cpu", ranks)
            for ranks in ([0, 1, 2, 3], [3, 2, 1, 0], [0], [3], [1, 2], [3, 0, 1])
        ]
    ),
    *(
        [
            Placement("cpu", ranks)
            for ranks in ([[0, 1], [2, 3]], [[3, 1], [0, 2]], [[0], [2]], [[1, 0]])
        ]
    ),
]


def drawn(
    draw: random.Random, times: int, dtype: torch.dtype = torch.float64
) -> list[tuple[torch.Tensor, Spec, Spec]]:
    out = []
    for _ in range(times):
        shape = draw.choice(
            [(4, 6), (5, 3), (1, 7), (7,), (2,), (0, 3), (3, 1, 5), (13, 2), (8, 8)]
        )
        a, b = draw.choice(PLACEMENTS), draw.choice(PLACEMENTS)
        entries = [B, P, *map(S, range(len(shape)))]
        x, y = draw.choice(layouts(a, entries)), draw.choice(layouts(b, entries))
        full = value(shape, dtype)
        out.append((full, Spec.make(shape, dtype, a, x), Spec.make(shape, dtype, b, y)))
    return out


def test_between_placements() -> None:
    for full, src, dst in drawn(random.Random(3), 150):
        agree(4, full, [(src, dst)])


@pytest.mark.parametrize("reduce", [partial_max, partial_min, partial_norm(2)])
def test_other_partials(reduce: Sbp) -> None:
    full, line = value((5, 4)), Placement("cpu", [0, 1, 2])
    from_partial = [
        (
            Spec.make(full.shape, full.dtype, line, reduce),
            Spec.make(full.shape, full.dtype, line, e),
        )
        for e in (B, S(0), S(1), P)
    ]
    agree(3, full, from_partial)
    two = [(reduce, P), (S(0), reduce), (reduce, B), (reduce, reduce)]
    if "norm" not in reduce.reduce:  # partial sums may be negative, local norms may not
        two.append((P, reduce))
    mixed = [
        (Spec.make(full.shape, full.dtype, GRID, x), Spec.make(full.shape, full.dtype, GRID, y))
        for x in two
        for y in ((B, B), (S(1), P))
    ]
    agree(4, full, mixed)
    there_and_back = Spec.make(full.shape, full.dtype, line, B)

    def back() -> torch.Tensor:
        odd = Spec.make(full.shape, full.dtype, line, reduce)
        return box(box(full.clone(), there_and_back, odd), odd, there_and_back)

    assert all(torch.allclose(r, full) for r in simulate(3, back))


def gradients(
    full: torch.Tensor, weight: torch.Tensor, src: Spec, dst: Spec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and second gradient of sum(w * x^3), computed on the placement of ``dst``.
    The gradients have the dual layout of ``src``."""
    here = world().rank
    x = share(full, src, here).requires_grad_()
    y = box(box(x, src, dst), dst, dst.replicated())
    # The seed of a broadcast scalar is partial: 1 on one rank.
    (g,) = torch.autograd.grad(
        (y**3 * (weight if y.shape == weight.shape else 1)).sum(), x, one(dst), create_graph=True
    )
    whole = box(g, src.dual(), src.replicated())
    if not whole.requires_grad:  # a rank outside both placements
        return g, g
    (h,) = torch.autograd.grad((whole * whole).sum(), x, one(src))
    return g.detach(), h


def one(spec: Spec) -> torch.Tensor:
    return torch.tensor(1.0 if world().rank == spec.placement.flat[0] else 0.0, dtype=torch.float64)


def differentiate(full: torch.Tensor, src: Spec, dst: Spec) -> None:
    weight = torch.cos(full) + 2
    ys = simulate(4, gradients, full, weight, src, dst)
    torch.testing.assert_close(
        assemble([y[0] for y in ys], src.dual()), 3 * full**2 * weight, rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(
        assemble([y[1] for y in ys], src.dual()), 36 * full**3 * weight**2, rtol=1e-9, atol=1e-9
    )


@pytest.mark.long
def test_gradients_on_a_grid() -> None:
    full = value((5, 3)) / 10
    for src, dst in pairs_of(full, GRID, GRID, [B, P, S(0), S(1)]):
        differentiate(full, src, dst)


@pytest.mark.long
def test_gradients_between_placements() -> None:
    for full, src, dst in drawn(random.Random(5), 100):
        differentiate(full / 10, src, dst)


def test_gradient_through_a_given_sbp() -> None:
    line, full = Placement("cpu", [0, 1]), value((4, 2))
    src, dst = (Spec.make(full.shape, full.dtype, line, e) for e in (S(0), B))

    def run() -> tuple[torch.Tensor, list[str]]:
        x = share(full, src, world().rank).requires_grad_()
        y = box(x, src, dst, grad=Spec.make(full.shape, full.dtype, line, B))
        with record_collectives() as log:
            (y * (1 if world().rank == 0 else 0)).sum().backward()
        assert x.grad is not None
        return x.grad, [t.kind for t in log]

    assert [(g.tolist(), kinds) for g, kinds in simulate(2, run)] == [
        ([[1.0, 1.0], [1.0, 1.0]], ["all_reduce"])
    ] * 2


@pytest.mark.parametrize("reduce", ["max", "norm2.0"])
def test_gradients_of_other_partials(reduce: str) -> None:
    line = Placement("cpu", [0, 1, 2])
    entry = Sbp("partial", reduce=reduce)
    parts = torch.tensor(
        [[1.0, 2.0, 0.0, 5.0], [3.0, 2.0, 0.0, 5.0], [2.0, 1.0, 0.0, 5.0]], dtype=torch.float64
    )
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    src, dst = (Spec.make((4,), torch.float64, line, e) for e in (entry, S(0)))

    def run() -> torch.Tensor:
        x = parts[world().rank].clone().requires_grad_()
        y = box(box(x, src, dst), dst, dst.replicated())
        ((y * weight).sum() * (1 if world().rank == 0 else 0)).backward()
        assert x.grad is not None
        return x.grad

    leaf = parts.clone().requires_grad_()
    total = leaf.amax(0) if reduce == "max" else torch.linalg.vector_norm(leaf, 2, 0)
    (total * weight).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(torch.stack(simulate(3, run)), torch.nan_to_num(leaf.grad))


def test_gradient_of_a_norm_twice() -> None:
    line = Placement("cpu", [0, 1])
    parts = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    src, dst = (Spec.make((2,), torch.float64, line, e) for e in (partial_norm(3), B))

    def run() -> torch.Tensor:
        x = parts[world().rank].clone().requires_grad_()
        first = 1.0 if world().rank == 0 else 0.0
        (g,) = torch.autograd.grad((box(x, src, dst) ** 2).sum() * first, x, create_graph=True)
        (h,) = torch.autograd.grad((g**2).sum(), x)
        return h

    def reference(leaf: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(((leaf**3).sum(0) ** (2 / 3)).sum(), leaf, create_graph=True)
        (h,) = torch.autograd.grad((g**2).sum(), leaf)
        return h

    torch.testing.assert_close(
        torch.stack(simulate(2, run)), reference(parts.clone().requires_grad_())
    )


def traffic(fn: Callable[[], object]) -> list[str]:
    with record_collectives() as log:
        fn()
    return [t.kind for t in log]


def test_traffic_is_what_the_plan_says() -> None:
    full = value((12, 8), torch.float32)

    def run() -> None:
        for src, dst in pairs_of(full, GRID, GRID, [B, P, S(0), S(1)]):
            local, wanted = (
                share(full, src, world().rank),
                [m.kind for m in plan_boxing(src, dst).moves if m.bytes],
            )
            with record_collectives() as log:
                box(local, src, dst)
            assert [t.kind for t in log] == wanted, plan_boxing(src, dst)
            assert sum(t.bytes for t in log) <= plan_boxing(src, dst).bytes

    simulate(4, run)


def test_log_and_ban() -> None:
    line = Placement("cpu", [0, 1])
    a, b, c = (Spec.make((4, 4), torch.float32, line, e) for e in (S(0), S(1), B))

    def run() -> list[str]:
        x = torch.ones(a.local_shape(world().rank), requires_grad=True)
        with boxing_log() as log, no_boxing():
            with pytest.raises(
                BoxingError,
                match=r"add: operand 1.*all_to_all, 16 B a rank.*to_global\(sbp=\[split\(1\)\]\)",
            ):
                box(x, a, b, why="add: operand 1")
            y = box(x, a, c)  # explicit
            box(y, c, b, why="add: operand 1")  # free
            y.sum().backward()
        assert x.grad is not None
        return [str(r) for r in log]

    for lines in simulate(2, run):
        assert [line_.split(":")[0] for line_ in lines] == [
            "to_global",
            "add",
            "backward of to_global",
        ]
        assert lines[0] == (
            "to_global: f32[4, 4] S(0) on cpu[0, 1] -> f32[4, 4] B on cpu[0, 1]  all_gather  32 B"
        )


@pytest.mark.long
@pytest.mark.parametrize("placement", [Placement("cpu", [0, 1]), GRID], ids=["line", "grid"])
@pytest.mark.sweep(2)
def test_results_can_be_written_to(placement: Placement) -> None:
    specs = [
        Spec.make((5, 3), torch.float64, placement, layout)
        for layout in itertools.product((B, S(0), S(1), P), repeat=placement.axes)
    ]

    def run() -> None:
        for src, dst, grad in itertools.product(specs, specs, (False, True)):
            if src is dst:
                continue
            x = torch.ones(src.local_shape(world().rank), dtype=torch.float64, requires_grad=grad)
            with torch.no_grad():
                boxed = box(x, src, dst, alias=False)
            y = box(x, src, dst, alias=False)
            y.add_(1).relu_()
            assert bool((x == 1).all())
            assert torch.equal(y, (boxed + 1).relu())
            assert y.requires_grad == grad
            if grad:
                (gradient,) = torch.autograd.grad((y * 2).sum(), x)
                (expected,) = torch.autograd.grad(((box(x, src, dst) + 1).relu() * 2).sum(), x)
                assert torch.equal(gradient, expected)

    simulate(placement.size, run)


def test_devices_of_another_type() -> None:
    here, there = Placement("cpu", [0, 1]), Placement("cuda", [1, 2])
    full = value((5, 3))
    pairs = pairs_of(full, here, there, [B, P, S(0), S(1)]) + pairs_of(
        full, here, here.with_type("cuda"), [B, P, S(0), S(1)]
    )
    results = simulate(3, move, full, pairs, devices={"cuda": "cpu"})
    for i, (_, dst) in enumerate(pairs):
        assert torch.equal(assemble([r[i] for r in results], dst), full)
