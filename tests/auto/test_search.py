"""Tests of the search over everything: meshes, segments, stages, micro-batches, schedules,
recomputation, ZeRO. The simulator is tested too. All clusters are imagined."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from globaltensor.auto.cost.batch_scaling import Batches
from globaltensor.auto.cost.meshes import factorizations, mesh, meshes
from globaltensor.auto.gc_pause import gc_paused
from globaltensor.auto.inter_op import min_plus_elimination, segment_cost
from globaltensor.auto.inter_op.min_plus_elimination import TooWide, eliminate
from globaltensor.auto.inter_op.predict import predict
from globaltensor.auto.inter_op.range_cost import Table, join, runs
from globaltensor.auto.inter_op.search import PipelineSearch, SearchSpace, search_pipelines
from globaltensor.auto.inter_op.segment_cost import MeshContext
from globaltensor.auto.inter_op.stage_dp import StageCosts, StageOptions, divide_into_stages, total
from globaltensor.auto.inter_op.step_simulator import StageTimes, step
from globaltensor.auto.intra_op.formulate import formulate
from globaltensor.auto.intra_op.search import data_parallel, gradient_traffic_exposed, search
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.op_graph import Calls
from globaltensor.auto.ir.segments import cut
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.plan.plan import Plan
from globaltensor.auto.solver import solve
from globaltensor.cluster import Cluster
from globaltensor.errors import PlanError
from globaltensor.graph.pipeline.schedule_cost import modelled

DGX = Cluster.preset("dgx-h100")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, words: int, length: int, tied: bool
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    """A model of convolutions and a layer with very many classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(1024, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).logsumexp(1).mean()  # type: ignore[no-any-return]


def capture(
    model: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32, words: int = 1
) -> Callable[[int], Calls]:
    with torch.device("meta"):
        made = model().to(dtype)

    def of(rows: int) -> Calls:
        kind = torch.long if words > 1 else dtype
        return calls_of_model(
            made,
            tuple(
                torch.empty(rows, *shape, dtype=kind, device="meta")
                for _ in range(max(1, words - 1))
            ),
        )

    return of


def gpt(
    layers: int = 3,
    width: int = 256,
    heads: int = 8,
    words: int = 1000,
    length: int = 64,
    tied: bool = False,
) -> Callable[[int], Calls]:
    return capture(
        lambda: GPT(layers, width, heads, words, length, tied),
        length,
        dtype=torch.bfloat16,
        words=3,
    )


def only(shape: tuple[int, ...], stages: int = 1, micros: int = 1, **more: Any) -> SearchSpace:
    return SearchSpace(stages=[stages], micro_batches=[micros], meshes=[shape], **more)


# ------------------------------------------------------------------------------------------- meshes


def test_meshes_keep_to_nodes() -> None:
    cluster = Cluster.preset("dgx-h100", nodes=64)
    shapes = [m.shape for m in meshes(512, cluster)]
    assert {(512,), (64, 8), (128, 4), (64, 2, 4), (8, 8, 8)} <= set(shapes)
    assert (8, 64) not in shapes, (
        "groups of 64 neighbours take whole nodes, and of 8 every 64th: the inner ones mix links"
    )
    assert len(shapes) <= 40
    assert all(m.flat == tuple(range(512)) for m in meshes(512, cluster))
    assert sorted(factorizations(12, 2)) == [(2, 6), (3, 4), (4, 3), (6, 2)]


# ----------------------------------------------------------------------------------------- min-plus


@pytest.mark.parametrize("kept_whole", [0, 1 << 18])
def test_elimination_is_exhaustive_search(kept_whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(min_plus_elimination, "_LATER", kept_whole)
    rng = np.random.default_rng(1)
    for _ in range(60):
        sizes = {v: int(rng.integers(1, 4)) for v in range(6)}
        pairs = [p for p in itertools.combinations(range(6), 2) if rng.random() < 0.5]
        factors: list[Any] = [((i,), rng.random(sizes[i])) for i in range(6)]
        factors += [((j, i), rng.random((sizes[j], sizes[i]))) for i, j in pairs]
        found = eliminate(sizes, factors, keep=[0, 3])
        choice = found.choices()
        for ends in itertools.product(range(sizes[0]), range(sizes[3])):
            inside = itertools.product(*(range(sizes[v]) for v in (1, 2, 4, 5)))
            every = [
                dict(zip((1, 2, 4, 5), some, strict=True)) | {0: ends[0], 3: ends[1]}
                for some in inside
            ]
            costs = [sum(float(t[tuple(at[v] for v in vs)]) for vs, t in factors) for at in every]
            assert found.values[ends] == pytest.approx(min(costs))
            chosen = {v: int(choice[v][ends]) for v in range(6)}
            assert sum(
                float(t[tuple(chosen[v] for v in vs)]) for vs, t in factors
            ) == pytest.approx(min(costs))


def test_elimination_says_when_tables_are_too_wide() -> None:
    factors: list[Any] = [
        ((i, j), np.zeros((9, 9))) for i, j in itertools.combinations(range(6), 2)
    ]
    with pytest.raises(TooWide):
        eliminate(dict.fromkeys(range(6), 9), factors, [0], most=1000)


def test_joined_tables_add_up_and_keep_the_largest_of_what_passes() -> None:
    rng = np.random.default_rng(2)
    a, b = (Table(rng.random((2, 3, 3)), rng.random((8, 2, 3, 3))) for _ in range(2))
    both = join(a, b)
    for h, i, j in itertools.product(range(2), range(3), range(3)):
        middle = int(np.argmin(a.score[h, i] + b.score[h, :, j]))
        assert both.score[h, i, j] == pytest.approx((a.score[h, i] + b.score[h, :, j]).min())
        np.testing.assert_allclose(
            both.parts[:7, h, i, j], a.parts[:7, h, i, middle] + b.parts[:7, h, middle, j]
        )
        assert both.parts[7, h, i, j] == max(a.parts[7, h, i, middle], b.parts[7, h, middle, j])


# ------------------------------------------------------------------------------------------- stages


def test_cuts_are_those_of_exhaustive_search() -> None:
    rng = np.random.default_rng(3)
    fitting = 0
    for _ in range(120):
        n, m, faces = int(rng.integers(2, 8)), int(rng.integers(1, 9)), int(rng.integers(1, 4))
        p = int(rng.integers(1, min(n, 4) + 1))
        sizes = [1] + [faces] * (n - 1) + [1]
        offers: dict[tuple[int, int, int], StageOptions] = {}
        for i, a, b in itertools.product(range(p), range(n), range(1, n + 1)):
            time = rng.random((sizes[a], sizes[b])) * max(1, b - a)
            time[rng.random(time.shape) < 0.15] = np.inf
            offers[i, a, b] = StageOptions(
                time, rng.random(time.shape), np.zeros(time.shape), np.zeros(time.shape, int), ()
            )
        crossing = rng.random((p, n + 1, faces)) * 0.2
        found = divide_into_stages(
            n, p, m, lambda i, a, b, o=offers: o[i, a, b], lambda i, b, c=crossing: c[i, b]
        )
        best = np.inf
        for inner in itertools.combinations(range(1, n), p - 1):
            cuts = (0, *inner, n)
            for between in itertools.product(range(faces), repeat=p - 1):
                ends = (0, *between, 0)
                stages = [
                    (offers[i, cuts[i], cuts[i + 1]], (ends[i], ends[i + 1])) for i in range(p)
                ]
                times = [float(o.time[e]) for o, e in stages]
                if np.isfinite(times).all():
                    moved = [float(crossing[i, cuts[i + 1], ends[i + 1]]) for i in range(p - 1)]
                    best = min(best, total(times, [float(o.step[e]) for o, e in stages], moved, m))
        assert (found is None) == (best == np.inf)
        if found is not None:
            fitting += 1
            assert found.cost == pytest.approx(best)
    assert fitting > 60


# ----------------------------------------------------------------------------- segments and batches


def test_layers_that_are_alike_are_one_kind() -> None:
    chain = cut(gpt(6)(8))
    assert len(chain.segments) == 7
    assert chain.kinds[1:6] == (chain.kinds[1],) * 5
    assert not chain.hubs
    tied = cut(gpt(6, tied=True)(8))
    assert len(tied.hubs) == 1, "the embedding is taken at both ends"


def test_other_batches_are_what_a_capture_would_give() -> None:
    of = gpt(2)
    seen: list[int] = []

    def counted(rows: int) -> Calls:
        seen.append(rows)
        return of(rows)

    worked_out, captured = Batches(counted, 64).at(4), of(4)
    assert seen == [64, 32]
    assert [v.shape for v in worked_out.values] == [v.shape for v in captured.values]
    assert [(str(c.args), str(c.kwargs), c.extra) for c in worked_out.calls] == [
        (str(c.args), str(c.kwargs), c.extra) for c in captured.calls
    ]


class Moody(nn.Module):
    """A model that computes something else for a batch of ``odd`` rows. If ``most`` is set, batches
    of other sizes raise."""

    def __init__(self, odd: int, most: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.up, self.down, self.odd, self.most = nn.Linear(16, 32), nn.Linear(32, 16), odd, most

    def forward(self, x: Tensor) -> Tensor:
        if self.most and x.shape[0] not in self.most:
            raise ValueError("of another batch")
        y = self.up(x)
        return self.down(F.relu(y) if x.shape[0] == self.odd else y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("odd", "most"), [(16, ()), (8, ()), (0, (16,))], ids=str)
def test_batches_that_a_model_runs_otherwise_are_left_out(odd: int, most: tuple[int, ...]) -> None:
    plan = search_pipelines(
        capture(lambda: Moody(odd, most), 16), 16, DGX, 2, Options(), SearchSpace(stages=[1])
    )
    seen = {int(rows) for rows in plan.search["left_out"]}
    assert seen == ({8} if odd == 8 else {1, 2, 4, 8})
    assert 16 // plan.choices["micro_batches"] not in seen
    with pytest.raises(PlanError, match=f"nothing to search.*with a batch of {min(seen)}"):
        search_pipelines(
            capture(lambda: Moody(odd, most), 16),
            16,
            DGX,
            2,
            Options(),
            SearchSpace(stages=[1], micro_batches=[16 // min(seen)]),
        )


class Normed(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        wide = [
            [
                nn.Linear(256, 256),
                nn.BatchNorm1d(256),
                nn.Linear(256, 256),
                nn.BatchNorm1d(256),
                nn.ReLU(),
            ]
            for _ in range(blocks)
        ]
        self.blocks = nn.ModuleList(nn.Sequential(*layers) for layers in wide)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.long
@pytest.mark.parametrize("blocks", [4, pytest.param(8, marks=pytest.mark.extended)])
def test_what_takes_statistics_of_the_batch_is_not_run_in_micro_batches(blocks: int) -> None:
    """A model with batch statistics is not run in micro-batches, because the statistics and the
    loss would differ."""
    slow = Cluster(
        node_size=1,
        node_bandwidth=1e7,
        node_latency=1e-3,
        bandwidth=1e7,
        flops={"float32": 1e9},
        size=4,
    )

    def of(model: nn.Module) -> Any:
        return lambda rows: calls_of_model(model, (torch.empty(rows, 256),))

    training, evaluated = Normed(blocks), Normed(blocks).eval()
    plan = search_pipelines(of(training), 64, slow, 4)
    assert plan.choices["micro_batches"] == len(plan.choices["stages"]) == 1
    assert "blocks.0.1 takes statistics of the batch" in plan.report()
    other = search_pipelines(of(evaluated), 64, slow, 4)
    assert other.choices["micro_batches"] > 1, "on this network a pipeline is best"
    assert "statistics" not in other.report()
    asked = search_pipelines(
        of(training), 64, slow, 4, None, SearchSpace(stages=[4], micro_batches=[8])
    )
    assert asked.choices["micro_batches"] == 8, "whoever asks for them has them"
    with pytest.raises(PlanError, match=r"1 stage of 4 devices") as told:
        search_pipelines(of(training), 64, slow, 4, Options(memory=1000))
    assert "stages of" not in str(told.value)


def test_schedules_that_have_too_few_segments_are_left_out() -> None:
    of = capture(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]), 8
    )
    plan = search_pipelines(
        of, 8, DGX, 2, Options(), SearchSpace(schedules=("zb-v",), micro_batches=[4])
    )
    assert len(plan.choices["stages"]) == 1
    with pytest.raises(PlanError, match=r"nothing to search.*2 segments"):
        search_pipelines(
            of,
            8,
            DGX,
            2,
            Options(),
            SearchSpace(schedules=("zb-v",), stages=[2], micro_batches=[4]),
        )


@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_formulas_of_pipelines_are_what_is_simulated(stages: int, schedule: str) -> None:
    """The formula of each schedule equals the simulated time. The stages are even, and their
    backward takes twice as long as their forward. With fewer than 2 p - 1 micro-batches the two are
    close."""
    lanes = tuple(range(stages))
    lanes = (
        lanes * 2
        if schedule == "interleaved"
        else (*lanes, *reversed(lanes))
        if schedule == "zb-v"
        else lanes
    )
    each = stages / len(lanes)
    for micros, off in (
        (2 * stages - 1, 0.0),
        (2 * stages, 0.0),
        (5 * stages, 0.0),
        (stages, 0.03),
    ):
        micros = micros if schedule != "interleaved" else -(-micros // stages) * stages
        run = step(
            [StageTimes(each, 2 * each) for _ in lanes],
            schedule,
            lanes,
            micros,
            Cluster(overlap=1.0),
        )
        told = modelled(
            schedule,
            lanes,
            micros,
            [3 * each] * len(lanes),
            [0.0] * len(lanes),
            [0.0] * (len(lanes) - 1),
            [each] * len(lanes),
        )
        assert told == pytest.approx(run.seconds, rel=max(off, 1e-9)), micros


# ------------------------------------------------------------------- against the solver on one mesh


def layers(width: int = 2048, many: int = 3) -> Callable[[int], Calls]:
    return capture(
        lambda: nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(many)]
        ),
        width,
    )


@pytest.mark.parametrize("rows", [64, 512, 4096])
def test_gradients_that_take_longer_than_what_they_hide_behind(rows: int) -> None:
    """The cost of a one-stage step is its simulated time. The problem of one mesh is checked too:
    with few rows its bound of 0.85 hidden is wrong."""
    of, cluster = layers(), Cluster.preset("dgx-h100", nodes=4)
    options = Options(memory=10**15)
    plan = search_pipelines(of, rows, cluster, 32, options, only((4, 8)))
    assert plan.cost == pytest.approx(plan.seconds)
    assert plan.bound <= plan.cost * (1 + 1e-9)
    calls, where = of(rows), mesh((4, 8))
    found = search(calls, cluster, where, options, recipes={}).plan
    spent = found.cost_breakdown
    sums = sum(
        c.backward
        for c in found.changes
        if c.value in found.parameters and found.parameters[c.value] == c.src
    )
    backward = (
        sum(c.backward for c in found.calls)
        + sum(c.moving / 2 for c in found.calls if c.backward)
        + sum(c.backward for c in found.changes)
        - sums
    )
    assert spent["hidden"] == pytest.approx(0.85 * min(sums, backward), abs=1e-12)
    assert found.cost == pytest.approx(
        spent["computing"] + spent["moving"] + spent["updating"] - spent["hidden"]
    )
    assert found.bound <= found.cost
    data = found.alternatives["data parallel"]
    assert found.cost <= data.cost * (1 + 1e-9)
    wide = {
        name: formulate(
            calls, cluster, where, Options(summing=x, fixed=data_parallel(calls, where))
        )
        for name, x in (("plain", 0.0), ("turned", 1.0))
    }
    least = [float(solve(f.problem).cost) for f in wide.values()]
    assert data.cost >= max(least) * (1 - 1e-9)
    if rows == 64:
        assert least[1] > 1.5 * least[0], "else this shows nothing"


def test_of_choices_of_a_small_problem_none_is_better() -> None:
    """No choice of a small problem beats the plan found. All choices are tried, each with the
    larger of the two sums, that is with the real exposed time."""
    calls, cluster, where = layers(512, 1)(64), Cluster.preset("dgx-h100", nodes=2), mesh((4,))
    plain, turned = (
        formulate(calls, cluster, where, Options(collect=False, summing=x)).problem
        for x in (0.0, 1.0)
    )
    sizes = [len(c) for c in plain.costs]
    assert np.prod(sizes) < 1e6
    least = min(
        max(float(plain.evaluate(choice)), float(turned.evaluate(choice)))
        for choice in itertools.product(*map(range,
            sizes)) if np.isfinite(float(plain.evaluate(choice)))
    )  # fmt: skip
    found = search(calls, cluster, where, Options(collect=False), compared=False).plan
    assert found.cost == pytest.approx(least, rel=1e-9)
    assert found.optimal
    assert exposed_at(64)
    assert not exposed_at(1 << 17)


def exposed_at(rows: int) -> bool:
    """Return True if the gradients of a batch of this many rows are exposed."""
    calls, where = layers(512, 1)(rows), mesh((4,))
    formulation = formulate(
        calls,
        Cluster.preset("dgx-h100", nodes=2),
        where,
        Options(fixed=data_parallel(calls, where)),
    )
    choice = solve(formulation.problem).choice
    assert choice is not None
    return gradient_traffic_exposed(formulation, choice)


@pytest.mark.long
@pytest.mark.parametrize("widest", [1 << 9, 1 << 12, 1 << 16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sweep(6)
def test_bounds_stay_bounds_where_tables_are_too_wide(
    monkeypatch: pytest.MonkeyPatch, widest: int, tied: bool
) -> None:
    of, batches = gpt(2, tied=tied), None

    def least() -> tuple[float, float, bool]:
        nonlocal batches
        batches = batches or Batches(of, 16)
        ground = MeshContext(batches, 16, DGX, mesh((2, 4)), Options(memory=10**15), cut(of(16)))
        cutting = StageCosts(ground, 1, 1, None)
        bound = cutting.evenly(sides=True)
        cutting.settle()
        return (
            bound,
            float(cutting.first.of(runs(cutting.kinds, [False] * len(cutting.kinds))).score.min()),
            all(p.sound for p in ground._parts.values()),
        )

    bound, best, _ = least()
    assert 0 < bound <= best * (1 + 1e-9)
    monkeypatch.setattr(segment_cost, "_MAX_TABLE_ENTRIES", widest)
    lower, other, sound = least()
    assert lower <= bound * (1 + 1e-9)
    assert other >= best * (1 - 1e-9)
    assert (lower > 0) == sound
    if widest == 1 << 16:
        assert lower > 0.99 * bound, "what is left out costs little here"


@pytest.mark.long
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sweep(4)
def test_one_stage_costs_about_what_the_solver_says(shape: tuple[int, ...], tied: bool) -> None:
    """The plan of one stage costs a little more than the solver's, never less. Activations that
    cross segments are never partial here, and sharded parameters are gathered twice."""
    of, options = (
        gpt(2, tied=tied),
        Options(memory=10**15, collect=False, hidden=0.0, optimizer_state_ratio=0.0),
    )
    plan = search_pipelines(of, 16, DGX, 8, options, only(shape))
    problem = formulate(of(16), DGX, mesh(shape), options).problem
    proven = solve(problem)
    assert proven.optimal
    assert float(proven.cost) * (1 - 1e-9) <= plan.cost <= float(proven.cost) * 1.03
    assert plan.bound <= plan.cost * (1 + 1e-9)
    if not tied:
        assert plan.bound == pytest.approx(plan.cost), "without hubs one setting is solved exactly"


def test_the_bound_holds_for_parameters_that_are_gathered_once() -> None:
    """The bound also holds for the plan of one mesh, in which parameters are gathered once. The
    search over everything gathers them in both passes."""
    of, options = (
        capture(lambda: nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]), 1024),
        Options(memory=10**15, hidden=0.0),
    )
    plan, proven = (
        search_pipelines(of, 256, DGX, 4, options, only((4,))),
        solve(formulate(of(256), DGX, mesh((4,)), options).problem),
    )
    assert float(proven.cost) < plan.cost, "gathering twice costs more"
    assert plan.bound <= plan.cost
    assert plan.search["bound_gathered_once"] <= float(proven.cost) * (1 + 1e-9) < plan.bound, (
        "of one account each"
    )


# -------------------------------------------------------------------------------------- known plans


def wanted(plan: Plan, function: str) -> list[Any]:
    return [c.wanted for c in plan.calls if c.function == function]


def test_wide_mlp_with_a_small_batch_is_split_by_columns_then_rows() -> None:
    of = capture(
        lambda: nn.Sequential(
            nn.Linear(8192, 32768, bias=False), nn.ReLU(), nn.Linear(32768, 8192, bias=False)
        ),
        8192,
    )
    plan = search_pipelines(of, 8, DGX, 8, Options(), only((8,)))
    first, second = wanted(plan, "linear")
    assert first[1] == ("S(0)",), "a weight of (out, in): columns of its transpose"
    assert second[0] == ("S(1)",)
    assert second[1] == ("S(1)",)


def test_convolutions_by_data_and_a_huge_classifier_split() -> None:
    plan = search_pipelines(
        capture(lambda: Classifier(400_000), 3, 96, 96), 64, DGX, 8, Options(), only((8,))
    )
    assert all(w[0] == ("S(0)",) and w[1] == ("B",) for w in wanted(plan, "conv2d"))
    assert plan.parameters["head.weight"] == ("S(0)",)
    assert wanted(plan, "linear")[0][1] == ("S(0)",), "every rank has some of the classes"


def test_a_transformer_within_a_node_with_a_small_batch_goes_by_tensors() -> None:
    of = gpt(3, width=8192, heads=64, words=32000, length=1024)
    plan = search_pipelines(of, 1, DGX, 8, Options(), only((8,)))
    linear = [c for c in plan.calls if c.function == "linear" and c.module.startswith("blocks.1")]
    assert all(c.share == pytest.approx(1 / 8) for c in linear)
    up, down = linear[2], linear[3]
    assert up.wanted[1] == ("S(0)",)
    assert down.wanted[1] == ("S(1)",)
    norms = [
        c for c in plan.calls if c.function == "layer_norm" and c.module.startswith("blocks.1")
    ]
    # Splitting sequences between blocks would be a scatter and a gather. On this machine these take
    # longer than its all-reduce.
    assert all(c.wanted[0] in (("S(1)",), ("B",)) for c in norms)
    assert plan.optimal


@pytest.mark.long
def test_little_memory_leads_to_shares_and_recomputation() -> None:
    of, roomy = gpt(4, width=512), Options(memory=10**12)
    free = search_pipelines(of, 64, DGX, 8, roomy, only((8,), recompute=False))
    tight = search_pipelines(of, 64, DGX, 8, Options(memory=int(free.memory * 0.35)), only((8,)))
    assert tight.memory <= free.memory * 0.35
    assert tight.cost > free.cost
    assert tight.choices["recompute"]
    # The parameters alone would fill a device eight times over.
    wide = capture(lambda: nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(24)]), 2048)
    kept = 24 * 2048 * 2048 * 4
    starved = search_pipelines(wide, 4096, DGX, 8, Options(memory=int(kept * 1.2)), only((8,)))
    data = [w for w in wanted(starved, "linear") if w[0] == ("S(0)",) and w[1] == ("B",)]
    assert len(data) > 12, "the batch is split, weights are whole where they are used"
    shared = [
        path
        for path, layout in starved.parameters.items()
        if path.endswith("weight") and (layout != ("B",) or path in starved.choices["zero"])
    ]
    assert len(shared) > 12, "and kept in shares"


@pytest.mark.long
def test_a_slow_network_between_nodes_leads_to_stages() -> None:
    slow = Cluster(
        node_size=4,
        node_bandwidth=2e8,
        node_latency=1e-4,
        bandwidth=200e9,
        flops={"float32": 20e12, "bfloat16": 20e12},
        size=8,
        overlap=2.0,
    )
    of = gpt(4, width=1024, heads=8, words=1000, length=256)
    plan = search_pipelines(of, 32, slow, 8, Options(), SearchSpace(axes=1, micro_batches=[1, 8]))
    assert len(plan.choices["stages"]) > 1
    one = search_pipelines(
        of, 32, slow, 8, Options(), SearchSpace(stages=[1], axes=1, micro_batches=[1])
    )
    assert plan.seconds < one.seconds
    between = [s["ranks"] for s in plan.choices["stages"]]
    assert all(b - a <= 4 for a, b in between), "no stage lies across nodes"


# ---------------------------------------------------------------- bounds, errors, repeated searches


@pytest.mark.long
def test_the_same_plan_twice_and_bounds_hold() -> None:
    of, space = gpt(3), SearchSpace(micro_batches=[1, 4])
    one, two = (search_pipelines(of, 16, DGX, 4, Options(), space) for _ in range(2))
    for plan in (one, two):
        plan.search.clear()
    assert one.to_json() == two.to_json()
    assert 0 < one.bound <= one.cost
    for shape in ((4,), (2, 2)):
        assert search_pipelines(
            of, 16, DGX, 4, Options(), only(shape, micros=1)
        ).cost >= one.bound * (1 - 1e-9)
    for stages in (2, 4):
        assert search_pipelines(
            of, 16, DGX, 4, Options(), only((4 // stages,), stages, 4)
        ).cost >= one.bound * (1 - 1e-9)
    names = [c.name for c in one.calls]
    assert len(names) == len(set(names))
    assert {g.name for g in one.placed if g.kind == "parameter"} == {
        v.path for v in of(16).parameters
    }


@pytest.mark.long
def test_too_little_memory_says_what_would_do() -> None:
    space = SearchSpace(stages=[1, 2], micro_batches=[4], axes=1)
    with pytest.raises(PlanError, match=r"the minimum that was found is (\d+) bytes") as error:
        search_pipelines(gpt(3), 16, DGX, 4, Options(memory=100_000), space)
    least = int(str(error.value).split("the minimum that was found is ")[1].split()[0])
    assert (
        search_pipelines(gpt(3), 16, DGX, 4, Options(memory=2 * least), space).memory <= 2 * least
    )


def test_the_least_memory_of_a_model_with_hubs_is_that_of_hubs_well_laid() -> None:
    """The minimum memory of a model with shared values assumes good layouts of these values. The
    tied word table is most of the memory: replicated, it would need four times as much."""
    of, space = gpt(1, width=64, heads=4, words=4000, length=4, tied=True), only((4,))
    with pytest.raises(PlanError, match=r"the minimum that was found is (\d+) bytes") as error:
        search_pipelines(of, 4, DGX, 4, Options(memory=10_000), space)
    least = int(str(error.value).split("the minimum that was found is ")[1].split()[0])
    assert least < 4000 * 64 * 2 * 4, "parameter, gradient and optimizer state, whole"


def test_without_a_limit_no_memory_is_blamed() -> None:
    search = PipelineSearch(Batches(gpt(1), 4), Cluster(size=2), 2, Options(), SearchSpace())
    assert "memory" not in search._no_plan_message()


@pytest.mark.long
def test_plans_are_saved_with_their_stages(tmp_path: Any) -> None:
    plan = search_pipelines(gpt(4), 16, DGX, 4, Options(), only((2,), 2, 4))
    assert [s["ranks"] for s in plan.choices["stages"][:2]] == [[0, 2], [2, 4]]
    assert sum(len(s["segments"]) for s in plan.choices["stages"]) == len(cut(gpt(4)(16)).segments)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").choices == plan.choices


# ---------------------------------------------------------------------------------------- simulator


def test_a_step_on_a_clock() -> None:
    cluster = Cluster(overlap=1.0)
    alone = step(
        [
            StageTimes(
                1.0, 2.0, gathers=1.0, sums=1.5, updates=0.5, kept=100, activations=10, passing=5
            )
        ],
        "1f1b",
        (0,),
        2,
        cluster,
    )
    assert alone.seconds == pytest.approx(2 * 3.0 + 0.5), (
        "what is gathered and summed hides behind computing"
    )
    assert alone.memory == (115,)
    slowed = step(
        [StageTimes(1.0, 2.0, gathers=1.0, sums=1.5, updates=0.5)],
        "1f1b",
        (0,),
        2,
        Cluster(overlap=2.0),
    )
    assert slowed.seconds == pytest.approx(2 * 4.0 + 1.5 + 0.5)
    four = [StageTimes(1.0, 2.0, activations=10, first=k) for k in range(4)]
    line = step(four, "1f1b", range(4), 8, cluster)
    assert line.seconds == pytest.approx(3.0 * (8 + 3))
    assert line.memory == (40, 30, 20, 10)
    assert step(four, "zb-h1", range(4), 8, cluster).seconds == pytest.approx(3.0 * 8 + 3.0)
    assert step(four, "gpipe", range(4), 8, cluster).memory == (80,) * 4
    assert {e["name"] for e in line.trace()["traceEvents"] if e["ph"] == "X"} >= {"0F0", "3B7"}


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_a_plan_is_foretold_for_other_clusters(layers: int) -> None:
    of = gpt(layers, width=1024, heads=8)
    for space in (only((2, 2)), only((2,), 2, 4)):
        plan = search_pipelines(of, 16, DGX, 4, Options(), space)
        rows = 16 // plan.choices["micro_batches"]
        assert predict(plan, DGX, of(rows)).seconds == pytest.approx(plan.seconds, rel=0.02), (
            "the same cluster, the same time"
        )
        slower = Cluster.preset("pcie-a100")
        assert predict(plan, slower, of(rows)).seconds > plan.seconds
        assert predict(plan).seconds == pytest.approx(plan.seconds, rel=0.2), (
            "without the cluster its overlap isn't known"
        )
    with pytest.raises(PlanError, match="imagines as many"):
        predict(plan, DGX.with_size(2), of(4))
    with pytest.raises(PlanError, match="another batch"):
        predict(plan, DGX, of(8))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_large_transformer_on_512_devices() -> None:
    of = gpt(96, width=12288, heads=96, words=50304, length=2048)
    plan = search_pipelines(of, 1024, Cluster.preset("dgx-h100", nodes=64).with_size(512))
    assert plan.memory <= 79 << 30
    assert 0.6 * plan.seconds < plan.bound <= plan.cost


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_afterwards_as_it_was(on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with gc_paused():
            assert not gc.isenabled()
            with gc_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled() is on
        with pytest.raises(PlanError), gc_paused():
            raise PlanError("nothing fits")
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()
