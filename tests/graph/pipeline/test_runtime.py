"""Tests of running pipelines: hand-written stages against the undivided model, on simulated ranks
and on real processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support.bodies import values
from support.mpi import needs_mpi, run_by_mpi
from support.pool import Pool, RanksFailed, run_on
from torch import Tensor

from globaltensor.boxing import box
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import ScheduleError, WorldError
from globaltensor.graph.pipeline import Action, Schedule, schedule
from globaltensor.graph.pipeline.runtime import Pipeline
from globaltensor.graph.pipeline.schedule import FAMILIES
from globaltensor.graph.pipeline.split_backward import matmul
from globaltensor.graph.pipeline.stage import Stage
from globaltensor.graph.pipeline.stage_transfer import Edge
from globaltensor.sbp import broadcast, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

WIDTH, HIDDEN, F64 = 6, 7, torch.float64


class Case(NamedTuple):
    """A model of one block for each stage, ``tanh(x @ w) @ v``. Stages of kind ``data`` split the
    batch, and stages of kind ``tensor`` split the hidden width."""

    placements: tuple[tuple[int, ...], ...]
    lanes: tuple[int, ...]
    kinds: tuple[str, ...]
    name: str = "gpipe"
    micros: int = 4
    batch: int = 5
    skips: tuple[
        tuple[int, int], ...
    ] = ()  # (from stage, to stage): added to the stage's other input
    credits: int = 2

    @property
    def stages(self) -> int:
        return len(self.placements)

    @property
    def ranks(self) -> int:
        return max(r for ranks in self.placements for r in ranks) + 1


def case(
    *placements: Sequence[int], lanes: Sequence[int] = (), kinds: str = "", **more: Any
) -> Case:
    where = tuple(tuple(p) for p in placements)
    return Case(
        where,
        tuple(lanes) or tuple(range(len(where))),
        tuple({"d": "data", "t": "tensor"}[k] for k in kinds or "d" * len(where)),
        **more,
    )


class Weights(NamedTuple):
    w: Tensor
    v: Tensor


def weights(stage: int) -> Weights:
    return Weights(values(WIDTH, HIDDEN, seed=10 + stage), values(HIDDEN, WIDTH, seed=30 + stage))


def data(c: Case, micro: int) -> tuple[Tensor, Tensor]:
    return values(c.batch, WIDTH, seed=50 + micro), values(c.batch, WIDTH, seed=80 + micro)


def whole(c: Case) -> tuple[list[float], list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Run the undivided model and return losses, gradients of their mean, and results."""
    all_weights = [Weights(*(t.requires_grad_() for t in weights(k))) for k in range(c.stages)]
    losses, results = [], []
    for micro in range(c.micros):
        x, target = data(c, micro)
        out: list[Tensor] = []
        for k, (w, v) in enumerate(all_weights):
            given = x if k == 0 else out[-1] + sum(out[a] for a, b in c.skips if b == k)
            out.append(torch.tanh(given @ w) @ v)
        losses.append((out[-1] - target).square().mean())
        results.append(out[-1].detach())
    (sum(losses) / c.micros).backward()  # type: ignore[union-attr]
    return (
        [float(loss.detach()) for loss in losses],
        [(w.grad, v.grad) for w, v in all_weights],
        results,
    )  # type: ignore[misc]


def spec(c: Case, stage: int, shape: Sequence[int] | None = None) -> Spec:
    where = Placement("cpu", list(c.placements[stage]))
    return Spec.make(
        shape or (c.batch, WIDTH), F64, where, split(0) if c.kinds[stage] == "data" else broadcast
    )


def local(t: Tensor, how: Spec) -> Tensor:
    offsets, lengths = how.box(world().rank)
    return t[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].clone()


def build(
    c: Case, timetable: Schedule, **options: Any
) -> tuple[Pipeline, dict[int, list[dict[int, Tensor]]], dict[int, Weights]]:
    """Build this rank's pipeline and return it with the inputs of its call and its weights."""
    rank, last = world().rank, c.stages - 1
    placements = [Placement("cpu", list(p)) for p in c.placements]
    edges, counts = [], [0] * c.stages

    def edge(a: int, b: int, differentiable: bool = True) -> None:
        edges.append(Edge(a, 0, b, counts[b], spec(c, max(a, 0)), spec(c, b), differentiable))
        counts[b] += 1

    edge(-1, 0, False)
    for k in range(last):
        edge(k, k + 1)
    for a, b in c.skips:
        edge(a, b)
    edge(-1, last, False)
    mine: dict[int, Weights] = {}
    stages: dict[int, Stage] = {}
    inputs: dict[int, list[dict[int, Tensor]]] = {}
    for k, where in enumerate(placements):
        if where.coordinate(rank) is None:
            continue
        mine[k] = Weights(*(t.requires_grad_() for t in shares(c, k, rank)))
        number = {e.input for e in edges if e.target == k and e.differentiable}
        scalar = Spec.make((), F64, where, partial_sum if c.kinds[k] == "data" else broadcast)
        stages[k] = Stage(
            function(c, k, mine[k]), number, (0, scalar) if k == last and timetable.trains else None
        )
        rows: list[dict[int, Tensor]] = [{} for _ in range(c.micros)]
        for micro, row in enumerate(rows):
            x, target = data(c, micro)
            for e in edges:
                if e.source < 0 and e.target == k:
                    row[e.input] = local(
                        target if k == last and e.input == counts[k] - 1 else x, spec(c, k)
                    )
        inputs[k] = rows
    return (
        Pipeline(stages, placements, edges, timetable, credits=c.credits, **options),
        inputs,
        mine,
    )


def shares(c: Case, stage: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a rank's weights: replicated, or columns of w and rows of v."""
    w, v = weights(stage)
    if c.kinds[stage] == "data":
        return w, v
    where = Placement("cpu", list(c.placements[stage]))
    return local(w, Spec.make(w.shape, F64, where, split(1))), local(
        v, Spec.make(v.shape, F64, where, split(0))
    )


def function(c: Case, stage: int, own: Weights) -> Callable[..., tuple[Tensor, ...]]:
    there = spec(c, stage)
    partial = there.replace(layout=[partial_sum])

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        taken = inputs[:-1] if stage == c.stages - 1 else inputs
        x = taken[0]
        for more in taken[1:]:
            x = x + more
        y = matmul(torch.tanh(matmul(x, own.w)), own.v)
        if c.kinds[stage] == "tensor":
            y = box(y, partial, there)
        if stage < c.stages - 1:
            return (y,)
        error = (y - inputs[-1]).square().sum() / (c.batch * WIDTH)
        return error, y

    return run


def trained(
    c: Case, runs: int = 1
) -> tuple[dict[int, list[float]], dict[int, list[Tensor]], dict[int, list[Tensor | None]]]:
    """Train one rank's stages and return losses, results of the last stage, and gradients by
    stage."""
    timetable = schedule(c.name, c.lanes, c.micros)
    pipeline, inputs, mine = build(c, timetable)
    for _ in range(runs):
        for own in mine.values():
            own.w.grad = own.v.grad = None
        found = pipeline.run(inputs, 1 / c.micros)
        assert all(stage.micros == () for stage in pipeline.stages.values())
    last = c.stages - 1
    losses = {k: [float(row[0]) for row in rows] for k, rows in found.items() if k == last}  # type: ignore[arg-type]
    results = {k: [row[1] for row in rows] for k, rows in found.items() if k == last}
    assert all(row == (None,) for k, rows in found.items() if k != last for row in rows)
    return losses, results, {k: [own.w.grad, own.v.grad] for k, own in mine.items()}  # type: ignore[return-value]


def compare(c: Case, answers: Sequence[Any]) -> None:
    """Compare every rank's answer with the undivided model."""
    losses, grads, results = whole(c)
    last = c.stages - 1
    said = [a[0][last] for a in answers if last in a[0]]
    total = [sum(s) if c.kinds[last] == "data" else s[0] for s in zip(*said, strict=True)]
    assert total == pytest.approx(losses, rel=1e-12)
    for rank in c.placements[last]:
        where = spec(c, last)
        for micro, result in enumerate(results):
            offsets, lengths = where.box(rank)
            torch.testing.assert_close(
                answers[rank][1][last][micro],
                result[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))],
            )
    for k in range(c.stages):
        parts = [answers[rank][2][k] for rank in c.placements[k]]
        if c.kinds[k] == "data":
            found = tuple(sum(p[i] for p in parts if p[i] is not None) for i in (0, 1))
        else:
            found = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 0)
        for got, want in zip(found, grads[k], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def every(*cases: Case) -> list[Any]:
    """Return each case with each schedule that accepts its lanes."""
    names = [
        (c, f.name)
        for c in cases
        for f in FAMILIES.values()
        if f.fits(c.lanes) and f.name != "forward"
    ]
    return [
        pytest.param(
            c._replace(name=name),
            id=f"{'|'.join(''.join(map(str, p)) for p in c.placements)}-{''.join(k[0] for k in c.kinds)}-{name}",  # noqa: E501
        )
        for c, name in names
    ]


@pytest.mark.parametrize(
    "c",
    every(
        case([0], [1]),
        case([0], [1, 2]),
        case([0, 1], [2], kinds="td"),
        case([0, 1], [2, 3], kinds="td"),
        case([0, 1], [2, 3], kinds="tt"),
        case([0, 1], [0, 1], lanes=(0, 0)),
        case([0], [1], [0], [1], lanes=(0, 1, 0, 1), skips=((0, 2), (0, 3))),
        case([0], [1], [1], [0], lanes=(0, 1, 1, 0), skips=((0, 3),)),
        case([0], [1], [2], [3], skips=((0, 2), (1, 3), (0, 3))),
        case([0], [1, 2], [3], [4, 5], kinds="dtdt", skips=((0, 3),), batch=3),
    ),
)
def test_equal_to_the_model_in_one_piece(c: Case) -> None:
    compare(c, simulate(c.ranks, trained, c, timeout=20.0))


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("micros", [1, 2, 5])
def test_uneven_batches_and_any_number_of_micro_batches(batch: int, micros: int) -> None:
    c = case([0, 1, 2], [3, 4], [5], name="1f1b", batch=batch, micros=micros, skips=((0, 2),))
    compare(c, simulate(c.ranks, trained, c, 2, timeout=20.0))


# ----------------------------------------------------------------------------------- real processes


def several() -> list[Case]:
    two = [case([0], [1], name=name) for name in ("gpipe", "1f1b")]
    lanes = case(
        [0], [1], [0], [1], lanes=(0, 1, 0, 1), name="1f1b", skips=((0, 2), (0, 3)), credits=1
    )
    split_up = [
        case([0], [1], name=f.name, micros=6)
        for f in FAMILIES.values()
        if f.name.startswith("zb") and f.fits((0, 1))
    ]
    both = case([0, 1], [0, 1], lanes=(0, 0), kinds="td", name="1f1b")
    return [*two, lanes, *split_up, both]


def train_several(cases: Sequence[Case]) -> list[Any]:
    return [trained(c, 2) for c in cases]


@pytest.mark.parametrize("run", [run_on, pytest.param(run_by_mpi, marks=needs_mpi)])
@pytest.mark.sweep(2)
def test_real_processes(run: Callable[..., list[Any]]) -> None:
    cases = several()
    for c, answers in zip(cases, zip(*run(2, train_several, cases), strict=True), strict=True):
        compare(c, answers)


def large(megabytes: int) -> list[list[float]]:
    """Send messages longer than any backend sends at once, two ahead in both directions."""
    n = megabytes << 17
    where = [Placement("cpu", [r]) for r in (0, 1)]
    there = [Spec.make((n,), F64, p, broadcast) for p in where]
    scalar = Spec.make((), F64, where[1], broadcast)
    given = torch.ones(n, dtype=F64, requires_grad=True)
    functions = [lambda x: (x * given,), lambda x: (x.sum(),)]
    edges = [
        Edge(-1, 0, 0, 0, there[0], there[0], False),
        Edge(0, 0, 1, 0, there[0], there[1], True),
    ]
    rank = world().rank
    stage = Stage(functions[rank], [[], [0]][rank], [None, (0, scalar)][rank])
    pipeline = Pipeline({rank: stage}, where, edges, schedule("gpipe", (0, 1), 4))
    found = pipeline.run({0: [{0: torch.full((n,), float(m), dtype=F64)} for m in range(4)]})
    return (
        [float(row[0]) / n for row in found[1]]
        if rank
        else [float(given.grad.min()), float(given.grad.max())]
    )  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("run", [simulate, run_on, pytest.param(run_by_mpi, marks=needs_mpi)])
def test_large_messages(run: Callable[..., list[Any]]) -> None:
    assert run(2, large, 4) == [[6.0, 6.0], [0.0, 1.0, 2.0, 3.0]]


def test_one_rank_and_two_on_real_processes() -> None:
    """The fourth rank of the world is in no stage."""
    cases = [
        case([0], [1, 2], kinds="dt", name="1f1b", skips=()),
        case([0, 1], [2], kinds="dd", name="gpipe", batch=3),
    ]
    for c, answers in zip(cases, zip(*run_on(4, train_several, cases), strict=True), strict=True):
        compare(c, answers)


# ----------------------------------------------------------- saved tensors, messages, errors, spans


def test_a_rank_outside_returns_at_once() -> None:
    c = case([1], [2])

    def run() -> object:
        if world().rank not in (0, 3):
            return trained(c)
        pipeline, inputs, mine = build(c, schedule("gpipe", (0, 1), c.micros))
        return pipeline.run(inputs), mine

    answers = simulate(4, run)
    assert answers[0] == answers[3] == ({}, {})


def test_evaluation_keeps_nothing() -> None:
    c = case([0], [1, 2], [3])

    def run() -> dict[int, list[Tensor | None]]:
        pipeline, inputs, mine = build(c, schedule("forward", c.lanes, c.micros))
        for _ in range(2):
            found = pipeline.run(inputs)
        assert all(stage.micros == () for stage in pipeline.stages.values())
        assert all(own.w.grad is None for own in mine.values())
        return {k: [row[-1] for row in rows] for k, rows in found.items()}

    answers = simulate(4, run)
    assert answers[1] == {1: [None] * c.micros}
    for got, want in zip(answers[3][2], whole(c)[2], strict=True):
        torch.testing.assert_close(got, want)


def test_pieces_and_no_more_are_sent() -> None:
    """Only the needed pieces are sent. A gradient that a broadcast output needs on one rank only is
    sent to that rank."""
    c = case([0, 1], [2, 3], kinds="tt", micros=2, name="1f1b")

    def run() -> list[tuple[str, tuple[int, ...], int]]:
        pipeline, inputs, _ = build(c, schedule(c.name, c.lanes, c.micros))
        with record_collectives() as log:
            pipeline.run(inputs)
        return [tuple(t) for t in log if t.kind == "send"]  # type: ignore[misc]

    nbytes, sent = c.batch * WIDTH * 8, simulate(4, run)
    assert sent[0] == [("send", (0, 2), nbytes)] * 2
    assert sent[1] == [("send", (1, 3), nbytes)] * 2
    assert sent[2] + sent[3] == [("send", (2, 0), nbytes)] * 2


def test_only_what_the_schedule_promises_is_kept() -> None:
    c = case([0], [1], name="1f1b", micros=8)

    def run() -> int:
        pipeline, inputs, _ = build(c, schedule(c.name, c.lanes, c.micros))
        (stage,) = pipeline.stages.values()
        most, forward = [0], stage.forward

        def counted(*args: Any) -> Any:
            outputs = forward(*args)
            most[0] = max(most[0], len(stage.micros))
            return outputs

        stage.forward = counted  # type: ignore[method-assign]
        pipeline.run(inputs)
        return most[0]

    assert simulate(2, run) == [2, 1]


def test_receives_are_posted_ahead_and_buffers_serve_again() -> None:
    c = case([0], [1], name="1f1b", micros=8)

    def run() -> tuple[int, int]:
        pipeline, inputs, _ = build(c, schedule(c.name, c.lanes, c.micros))
        asked: list[int] = []
        if world().rank == 1:
            mailbox: Any = world().channel(0, 1, torch.device("cpu"))
            work = pipeline.stages[1].function

            def seeing(*given: Tensor) -> Any:
                asked.append(mailbox.mailbox.asked)
                return work(*given)

            pipeline.stages[1].function = seeing
        pipeline.run(inputs)
        assert asked == ([min(m + 3, 8) for m in range(8)] if world().rank == 1 else []), (
            "two receives beyond the one at work"
        )
        return tuple(len(pool._all) for pool in pipeline._transfer._pools.values())  # type: ignore[return-value]

    assert all(n <= 2 for kept in simulate(2, run) for n in kept)


def test_what_does_not_lie_as_its_edge_says_is_refused() -> None:
    c = case([0], [1])

    def run(function: Callable[..., Any]) -> None:
        pipeline, inputs, _ = build(c, schedule("gpipe", (0, 1), c.micros))
        if world().rank == 0:
            pipeline.stages[0].function = function
        pipeline.run(inputs)

    with pytest.raises(
        ScheduleError,
        match=(
            r"rank 0: stage 0 returns output 0 of torch\.float64 \[4, 6\]; its edge expects "
            r"torch\.float64 \[5, 6\]"
        ),
    ):
        simulate(2, run, lambda x: (x[1:],))
    with pytest.raises(
        ScheduleError, match="stage 0 returns 0 outputs; an edge uses output number 0"
    ):
        simulate(2, run, lambda x: ())


def test_outputs_that_are_asked_for_come_back() -> None:
    c = case([0], [1], micros=2)

    def run() -> list[Any]:
        pipeline, inputs, _ = build(
            c, schedule(c.name, c.lanes, c.micros), outputs={0: [0], 1: [0]}
        )
        return next(iter(pipeline.run(inputs).values()))

    first, last = simulate(2, run)
    assert [row[0].shape for row in first] == [(c.batch, WIDTH)] * 2
    assert [row[1] for row in last] == [None, None]
    assert all(not t.requires_grad for row in first + last for t in row if t is not None)


def test_spans_are_in_order() -> None:
    c = case([0], [1], name="1f1b")

    def run() -> bool:
        timetable = schedule(c.name, c.lanes, c.micros)
        pipeline, inputs, _ = build(c, timetable, trace=True)
        for _ in range(2):
            pipeline.run(inputs)
        times = [t for span in pipeline.spans for t in (span.start, span.end)]
        rows = timetable.rows[world().rank]
        return (
            [s.action for s in pipeline.spans] == list(rows)
            and times == sorted(times)
            and {s.lane for s in pipeline.spans} == {world().rank}
        )

    assert simulate(2, run) == [True, True]


def test_between_spans_a_rank_waits_for_messages_and_does_nothing_else() -> None:
    """Between spans a rank only waits for messages. An action that needs no message begins at the
    end of the action before it."""
    c = case([0], [1], name="zb-h1")

    def run() -> list[tuple[str, bool]]:
        pipeline, inputs, _ = build(c, schedule(c.name, c.lanes, c.micros), trace=True)
        pipeline.run(inputs)
        return [
            (after.action.kind, after.start == before.end)
            for before, after in itertools.pairwise(pipeline.spans)
        ]

    for rank, found in enumerate(simulate(2, run)):
        alone = "FW" if rank == 0 else "IW"  # rank 0 receives gradients, the last activations
        assert all(at_once for kind, at_once in found if kind in alone)
        assert {kind for kind, _ in found} == {"F", "I", "W"}


def test_weights_wait_until_the_schedule_says() -> None:
    """Weight gradients wait until the schedule's W. Between I and W a stage saves the inputs of its
    weights' gradients, and W computes these gradients."""
    row = [Action(kind, 0, m) for kind in "FIW" for m in (0, 1)]
    timetable = Schedule("by hand", 1, 2, (tuple(row),), (0,))
    c = case([0], micros=2)
    pipeline, inputs, mine = build(c, timetable)
    stage = pipeline.stages[0]
    seen: list[tuple[str, bool, tuple[int, ...]]] = []

    def seeing(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found = work(*args)
            seen.append((name, mine[0].w.grad is not None, stage.micros))
            return found

        return run

    stage.backward_input = seeing("I", stage.backward_input)  # type: ignore[method-assign]
    stage.backward_weight = seeing("W", stage.backward_weight)  # type: ignore[method-assign]
    pipeline.run(inputs, 0.5)
    assert seen == [("I", False, (0, 1)), ("I", False, (0, 1)), ("W", True, (1,)), ("W", True, ())]
    _, ((w, v),), _ = whole(c)
    torch.testing.assert_close(mine[0].w.grad, w)
    torch.testing.assert_close(mine[0].v.grad, v)


# ----------------------------------------------------------------------------------------- failures


def test_a_lost_peer_is_named() -> None:
    c = case([0], [1], name="1f1b")

    def run() -> str:
        if world().rank == 1:
            return ""
        pipeline, inputs, _ = build(c, schedule(c.name, c.lanes, c.micros))
        with pytest.raises(WorldError) as error:
            pipeline.run(inputs)
        with pytest.raises(WorldError, match="this pipeline has failed"):
            pipeline.run(inputs)
        assert pipeline.stages[0].micros == ()
        return str(error.value)

    said = simulate(2, run, timeout=10.0)[0]
    assert said.startswith(
        "rank 0: stage 0 waited for the gradient of output 0 of micro-batch 0 from stage 1 on "
        "rank 1: "
    ), said
    assert "it has ended" in said


def test_a_stage_that_fails_ends_all() -> None:
    c = case([0], [1], [2], name="1f1b")

    def run() -> None:
        pipeline, inputs, _ = build(c, schedule(c.name, c.lanes, c.micros))
        if world().rank == 1:

            def fails(*inputs: Tensor) -> tuple[Tensor, ...]:
                raise ValueError("no such thing")

            pipeline.stages[1].function = fails
        pipeline.run(inputs)

    with pytest.raises(ValueError, match="no such thing"):
        simulate(3, run, timeout=10.0)


def lost(c: Case, connected: bool) -> None:
    pipeline, inputs, _ = build(c, schedule(c.name, c.lanes, c.micros))
    if world().rank == 1:
        if connected:
            pipeline._transfer.begin()
        os._exit(0)
    pipeline.run(inputs)


@pytest.mark.extended
def test_a_lost_process_is_named(fresh_pool: Callable[[int], Pool]) -> None:
    # Either event may come first: the send fails, or no message arrives.
    waited = "waited for the gradient of output 0 of micro-batch 0 from stage 1 on rank 1"
    sent = "could not send the output 0 of micro-batch [01] to stage 1 on rank 1"
    with pytest.raises(RanksFailed, match=f"rank 0: stage 0 ({waited}|{sent}): "):
        fresh_pool(2).run(lost, case([0], [1], name="1f1b"), True)
    with pytest.raises(
        RanksFailed,
        match=(
            r"pipeline.run\(inputs\)\n(.*\n)*.*"
            r"\(rank 0 cannot connect with rank 1, which has a stage next to one of its stages\)"
        ),
    ):
        fresh_pool(2).run(lost, case([0], [1], name="1f1b"), False)


A, B = Placement("cpu", [0]), Placement("cpu", [1])
ON_A, ON_B = Spec.make((2,), F64, A, broadcast), Spec.make((2,), F64, B, broadcast)


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        (
            [Edge(0, 0, 1, 1, ON_A, ON_B, True)],
            r"stage 1 gets inputs \[1\]: each input, counted from 0, needs one edge",
        ),
        ([Edge(1, 0, 0, 0, ON_B, ON_A, True)], "does not go forward"),
        ([Edge(0, 0, 1, 0, ON_B, ON_B, True)], "are not the placements of its stages"),
        (
            [Edge(0, 0, 1, 0, ON_A, ON_B.replace(shape=(3,)), True)],
            "changes the shape or dtype of its value",
        ),
        ([Edge(0, 0, 1, 0, ON_A, ON_B.dual(), True)], "is partial"),
        ([Edge(-1, 0, 0, 0, ON_A, ON_A, True)], "accepts no gradient"),
        (
            [
                Edge(0, 0, 1, 0, ON_A, ON_B, True),
                Edge(0, 0, 1, 1, ON_A.replace(layout=[split(0)]), ON_B, True),
            ],
            "has the layout .* for one edge and",
        ),
    ],
)
def test_edges_that_do_not_fit_are_refused(edges: list[Edge], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        simulate(
            1,
            lambda: Pipeline(
                {0: Stage(lambda x: (x,))}, [A, B], edges, schedule("gpipe", (0, 1), 2)
            ),
        )


def test_stages_that_do_not_fit_are_refused() -> None:
    edges, timetable, stage = (
        [Edge(0, 0, 1, 0, ON_A, ON_B, True)],
        schedule("gpipe", (0, 1), 2),
        Stage(lambda x: (x,)),
    )
    for stages, placements, said in (
        (
            {1: stage},
            [A, B],
            r"rank 0 is in the placements of stages \[0\], but was passed stages \[1\]",
        ),
        ({0: stage}, [A], "is for 2 stages, but there are 1 placements"),
        ({0: stage, 1: stage}, [A, A], "stages that share ranks belong on one lane"),
    ):
        lies = [Edge(0, 0, 1, 0, ON_A, ON_A, True)] if placements == [A, A] else edges
        able = {k: Stage(lambda x: (x,), [0]) for k in stages}
        with pytest.raises(ScheduleError, match=said):
            simulate(
                1,
                lambda able=able, placements=placements, lies=lies: Pipeline(
                    able, placements, lies, timetable
                ),
            )  # type: ignore[misc]
    with pytest.raises(
        ScheduleError,
        match=r"stage 0 needs its inputs \[0\] from the call for each of 2 micro-batches",
    ):
        simulate(
            1,
            lambda: Pipeline(
                {0: stage},
                [A],
                [Edge(-1, 0, 0, 0, ON_A, ON_A, False)],
                schedule("forward", (0,), 2),
            ).run(),
        )
