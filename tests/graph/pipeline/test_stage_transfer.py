"""Tests of transfers between stages: values and gradients for any two layouts, and edges of every
kind."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bodies import values
from support.pool import Pool, RanksFailed
from torch import Tensor

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.graph.pipeline import Action, Edge, Pipeline, Schedule, Stage, schedule
from globaltensor.graph.pipeline.split_backward import linear
from globaltensor.sbp import broadcast, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

F64, SHAPE = torch.float64, (5, 3)
SOURCES = [[0], [1, 0], [0, 1, 2], [[0, 1], [2, 3]]]
TARGETS = [[4], [4, 5], [[4, 5]], [[4], [5]], [0, 1], [3, 1, 5], [[2, 3], [4, 0]]]


def layouts(ranks: list[Any], shape: tuple[int, ...] = SHAPE) -> list[Spec]:
    where = Placement("cpu", ranks)
    return [
        Spec.make(shape, F64, where, row)
        for row in itertools.product([broadcast, split(0), split(1)], repeat=where.axes)
    ]


PAIRS = [
    (a, b)
    for left, right in itertools.product(SOURCES, TARGETS)
    for a, b in itertools.product(layouts(left), layouts(right))
]


def part(t: Tensor, spec: Spec, rank: int) -> Tensor:
    offsets, lengths = spec.box(rank)
    return t[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


def cross(src: Spec, dst: Spec) -> Tensor | None:
    """Send a leaf in the layout ``src`` to the next stage, which computes a weighted sum of it.
    Return this rank's local gradient of the leaf."""
    rank, c, placements = world().rank, values(*SHAPE, seed=1), [src.placement, dst.placement]
    leaf = (
        part(values(*SHAPE), src, rank).clone().requires_grad_()
        if src.placement.coordinate(rank) is not None
        else None
    )
    loss = Spec.make(
        (), F64, dst.placement, [partial_sum if e.is_split else broadcast for e in dst.layout]
    )

    def weigh(x: Tensor) -> tuple[Tensor, ...]:
        torch.testing.assert_close(x, part(values(*SHAPE), dst, rank), rtol=0, atol=0)
        return ((x * part(c, dst, rank)).sum(),)

    stages = {}
    if leaf is not None:
        stages[0] = Stage(lambda: (leaf * 1,))
    if dst.placement.coordinate(rank) is not None:
        stages[1] = Stage(weigh, [0], (0, loss))
    lanes = (0, 0) if set(src.placement.flat) & set(dst.placement.flat) else (0, 1)
    Pipeline(
        stages, placements, [Edge(0, 0, 1, 0, src, dst, True)], schedule("gpipe", lanes, 2)
    ).run()
    return None if leaf is None else leaf.grad


@pytest.mark.parametrize("chunk", range(8))
@pytest.mark.sweep(2)
def test_values_and_gradients_cross_between_any_layouts(chunk: int) -> None:
    pairs = random.Random(chunk).sample(PAIRS, 25)
    found = simulate(6, lambda: [cross(a, b) for a, b in pairs])
    for i, (src, dst) in enumerate(pairs):
        total = torch.zeros(SHAPE, dtype=F64)
        for rank in src.placement.flat:
            part(total, src, rank).add_(found[rank][i])
        torch.testing.assert_close(
            total, 2 * values(*SHAPE, seed=1), msg=lambda text, pair=(src, dst): f"{pair}: {text}"
        )


def on(rank: int, shape: tuple[int, ...], dtype: torch.dtype = F64) -> Spec:
    return Spec.make(shape, dtype, Placement("cpu", [rank]), broadcast)


def test_masks_numbers_and_weights_cross_too() -> None:
    """Masks, numbers and weights cross too. Stage 0 sends an integer mask, a 0-dim tensor, a shared
    weight and an input that the next stage does not use. Two stages have losses."""
    embedding, ids = values(7, 4), torch.tensor([0, 3, 3, 6])

    def model(weight: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = weight[ids], weight.mean()
        return (x * scale) @ weight.t() * (ids > 1).unsqueeze(1), x.square().sum()

    whole = embedding.clone().requires_grad_()
    out, first = model(whole)
    (0.5 * 2 * (out.square().sum() + first)).backward()  # two micro-batches, half of each

    def run() -> Any:
        rank = world().rank
        weight = embedding.clone().requires_grad_()
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((4, 4), F64),
            ((), F64),
            ((7, 4), F64),
            ((4,), torch.int64),
        ]
        edges = [Edge(-1, 0, 0, 0, on(0, (4,), torch.int64), on(0, (4,), torch.int64), False)]
        edges += [Edge(0, i, 1, i, on(0, *s), on(1, *s), s[1] is F64) for i, s in enumerate(shapes)]
        edges.append(
            Edge(0, 0, 1, 4, on(0, *shapes[0]), on(1, *shapes[0]), True)
        )  # the same output again, unused

        def start(ids: Tensor) -> tuple[Tensor, ...]:
            x = weight[ids]
            return x, weight.mean(), weight, ids, x.square().sum()

        def end(
            x: Tensor, scale: Tensor, weight: Tensor, ids: Tensor, unused: Tensor
        ) -> tuple[Tensor, ...]:
            return (((x * scale) @ weight.t() * (ids > 1).unsqueeze(1)).square().sum(),)

        stages = [Stage(start, [], (4, on(0, ()))), Stage(end, [0, 1, 2, 4], (0, on(1, ())))]
        pipeline = Pipeline(
            {rank: stages[rank]},
            [Placement("cpu", [r]) for r in (0, 1)],
            edges,
            schedule("1f1b", (0, 1), 2),
        )
        found = pipeline.run({0: [{0: ids}] * 2} if rank == 0 else None, 0.5)
        return [row[4 if rank == 0 else 0] for row in found[rank]], weight.grad

    (firsts, grad), (lasts, _) = simulate(2, run)
    torch.testing.assert_close(grad, whole.grad)
    assert [float(t) for t in firsts] == pytest.approx([float(first.detach())] * 2)
    assert [float(t) for t in lasts] == pytest.approx([float(out.detach().square().sum())] * 2)


def test_a_stage_whose_weights_are_frozen_lets_gradients_pass() -> None:
    w = values(3, 3)

    def run() -> Any:
        rank = world().rank
        leaf = torch.nn.Parameter(values(3, seed=1))
        functions: list[Callable[..., tuple[Tensor, ...]]] = [
            lambda: (leaf * 2,),
            lambda x: (x @ w,),
            lambda x: (x.sum(),),
        ]
        edges = [Edge(k, 0, k + 1, 0, on(k, (3,)), on(k + 1, (3,)), True) for k in (0, 1)]
        stage = Stage(
            functions[rank], [] if rank == 0 else [0], (0, on(2, ())) if rank == 2 else None
        )
        Pipeline(
            {rank: stage},
            [Placement("cpu", [r]) for r in range(3)],
            edges,
            schedule("zb-h1", (0, 1, 2), 3),
        ).run()
        return leaf.grad

    torch.testing.assert_close(simulate(3, run)[0], 3 * 2 * w.sum(1))


def hangs() -> None:
    rank = world().rank
    stage = (
        Stage(lambda: (torch.ones(3, dtype=F64, requires_grad=True) * 2,))
        if rank == 0
        else Stage(lambda x: (x.sum(),), [0], (0, on(1, ())))
    )
    edges = [Edge(0, 0, 1, 0, on(0, (3,)), on(1, (3,)), True)]
    pipeline = Pipeline(
        {rank: stage}, [Placement("cpu", [r]) for r in (0, 1)], edges, schedule("1f1b", (0, 1), 3)
    )
    if rank == 1:
        pipeline._transfer.begin()  # both ranks run together up to this point
        time.sleep(30)
    pipeline.run()


@pytest.mark.extended
def test_a_rank_that_hangs_is_named(
    fresh_pool: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOBALTENSOR_TIMEOUT", "3")
    with pytest.raises(
        RanksFailed,
        match="stage 0 waited for the gradient of output 0 of micro-batch 0 from stage 1 on rank 1",
    ):
        fresh_pool(2).run(hangs, timeout=25.0)


def test_gradients_of_global_parameters_are_summed_once_after_the_run() -> None:
    w = values(3, 3)

    def run() -> tuple[list[str], list[str], Any]:
        rank, where = world().rank, Placement("cpu", [0, 1])
        rows = Spec.make((5, 3), F64, where, split(0))
        weight = torch.nn.Parameter(
            flow.tensor(w.tolist(), dtype=F64, placement=where, sbp=broadcast)
        )

        def function(x: Tensor) -> tuple[Tensor, ...]:
            return (linear(x.tanh(), weight._local).square().sum(),)

        loss = Spec.make((), F64, where, partial_sum)
        edges = [Edge(-1, 0, 0, 0, rows, rows, False)]
        by_hand = Schedule(
            "by hand", 1, 2, (tuple(Action(kind, 0, m) for m in (0, 1) for kind in "FIW"),), (0,)
        )
        pipeline = Pipeline({0: Stage(function, [], (0, loss))}, [where], edges, by_hand)
        with record_collectives() as during:
            pipeline.run({0: [{0: part(values(5, 3, seed=m), rows, rank)} for m in (0, 1)]}, 0.5)
        with record_collectives() as after:
            grad = weight.grad.to_local()
        return [t.kind for t in during], [t.kind for t in after], grad.clone()

    leaf = w.clone().requires_grad_()
    sum(
        0.5 * torch.nn.functional.linear(values(5, 3, seed=m).tanh(), leaf).square().sum()
        for m in (0, 1)
    ).backward()  # type: ignore[union-attr]
    for during, after, grad in simulate(2, run):
        assert (during, after) == ([], ["all_reduce"])
        torch.testing.assert_close(grad, leaf.grad)
