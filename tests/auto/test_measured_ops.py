"""Tests of measured calls in the search: keys, the choice of measured calls, and their use by the
search."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.pool import run_on
from test_strategies import Attention, Pictures
from torch import nn

import globaltensor as flow
from globaltensor.auto.calibrate import op_accuracy as calibration
from globaltensor.auto.calibrate import steps as whole
from globaltensor.auto.calibrate.op_accuracy import _affordable, _batches, ops_of
from globaltensor.auto.cost.measured_ops import op_key, parts
from globaltensor.auto.cost.reshard_cost import ReshardCosts
from globaltensor.auto.cost.strategies import StrategyBuilder, StrategyTable
from globaltensor.auto.intra_op.formulate import bucket_of, updating
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.op_graph import Calls
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.cluster import Cluster
from globaltensor.cluster.measured_curves import Curve
from globaltensor.sbp import broadcast as B
from globaltensor.sbp import split as S
from globaltensor.sharding.placement import Placement

MESH = Placement("cpu", [0, 1])


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), x)


def candidates_of(
    calls: Calls, cluster: Cluster, mesh: Placement = MESH
) -> dict[int, StrategyTable]:
    menu = StrategyBuilder(ReshardCosts(cluster, mesh), calls.training)
    return {c.number: menu.of(c, calls.values) for c in calls.calls if not c.wild}


def first(calls: Calls, name: str) -> Any:
    return next(c for c in calls.calls if c.func.__name__ == name)


def test_a_key_says_function_parts_and_arguments() -> None:
    calls = calls_of_model(Linears(), (torch.randn(4, 8),))
    linear = first(calls, "linear")
    operands = [calls.values[v] for v in linear.operands]
    shapes = parts(operands, [(S(0),), (B,), (B,)], ReshardCosts(Cluster(), MESH))
    assert (
        op_key(linear, operands, shapes) == "linear(float32[2, 8], float32[16, 8]~, float32[16]~)"
    )
    uneven = parts(
        operands, [(B,), (S(0),), (S(0),)], ReshardCosts(Cluster(), Placement("cpu", [0, 1, 2]))
    )
    assert uneven == [(4, 8), (6, 8), (6,)]
    gelus = [c for c in calls_of_model(Gelus(), (torch.randn(4, 8),)).calls if c.func is F.gelu]
    keys = {op_key(c, [calls.values[c.operands[0]]], [(4, 8)]) for c in gelus}
    assert len(gelus) == 2
    assert len(keys) == 2  # the second with another approximation


class Gelus(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) + F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(("model", "inputs"), [
    (Linears, lambda: (torch.randn(4, 8),)),
    (Attention, lambda: (torch.randint(0, 12, (4, 8)), torch.randint(0, 12, (4, 8)))),
    (Pictures, lambda: (torch.randn(4, 4, 8, 8),)),
])  # fmt: skip
def test_what_is_to_be_measured_runs(model: Any, inputs: Any) -> None:
    calls = calls_of_model(model(), inputs())
    found = ops_of(calls, MESH, candidates_of(calls, Cluster()), Cluster())
    assert len({op.key for op in found}) == len(found)
    for op in found:
        function, args, held = op.make()
        assert {id(t) for t in held} <= {id(t) for t in args[0]}
        assert bool(held) == any(
            name in op.key for name in ("linear", "conv2d", "embedding", "layer_norm")
        ), "parameters are told from what is computed"
        out = function(*args)
        leaves = [t for t in args[0] if t.requires_grad]
        assert op.grad == bool(leaves)
        if op.grad:
            assert any(
                g is not None for g in torch.autograd.grad(out.sum(), leaves, allow_unused=True)
            ), op.key
    # Each computing call is measured with each shape of its local tensors. All calls of these
    # models can be made on local tensors when split by rows or columns.
    assert any(
        op.key.startswith(("linear(float32[2,", "linear(float32[4, 8, ", "conv2d(float32[2,"))
        for op in found
    )
    assert sum(op.uses for op in found) >= len({c.func for c in calls.calls if c.operands}) / 2


def test_the_search_counts_what_was_measured() -> None:
    calls = calls_of_model(Linears(), (torch.randn(4, 8),))
    linear = first(calls, "linear")
    key = "linear(float32[2, 8], float32[16, 8]~, float32[16]~)"
    cluster = Cluster().with_ops({key: (7.0, 11.0)})
    before, after = (
        candidates_of(calls, Cluster())[linear.number],
        candidates_of(calls, cluster)[linear.number],
    )
    by_rows = [
        k for k in range(len(after)) if after.ins[0][k] == (S(0),) and after.ins[1][k] == (B,)
    ]
    assert by_rows
    for k in range(len(after)):
        if k in by_rows:
            assert (after.forward[k], after.backward[k]) == (7.0, 11.0)
        else:  # calls without a measurement are scaled by the same factor
            assert after.forward[k] == pytest.approx(
                before.forward[k] * 7.0 / before.forward[by_rows[0]]
            )
            assert after.backward[k] == pytest.approx(
                before.backward[k] * 11.0 / before.backward[by_rows[0]]
            )
    calls.training = False
    alone = candidates_of(calls, cluster)[linear.number]
    assert [(alone.forward[k], alone.backward[k]) for k in by_rows] == [(7.0, 0.0)] * len(by_rows)


class Attending(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)


@pytest.mark.parametrize("size", [2, 4])
def test_rings_of_attention_do_what_was_measured_for_each_rank(size: int) -> None:
    """Query rows that are split meet the keys of all ranks, but heads that are split do not."""
    calls = calls_of_model(Attending(), (torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 8)))
    (call,) = (c for c in calls.calls if "attention" in c.func.__name__)
    mesh = Placement("cpu", list(range(size)))
    operands, seconds = [calls.values[v] for v in call.operands], 7.0
    keys = {
        op_key(call, operands, parts(operands, [(S(d),)] * 3, ReshardCosts(Cluster(), mesh))): (
            seconds,
            0.0,
        )
        for d in (1, 2)
    }
    found = candidates_of(calls, Cluster().with_ops(keys), mesh)[call.number]
    told = {
        found.ins[0][k][0].dim: found.forward[k]
        for k in range(len(found))
        if {x[k] for x in found.ins} in ({(S(1),)}, {(S(2),)})
    }
    assert told == pytest.approx({1: seconds, 2: size * seconds})


def test_a_measurement_changes_the_plan() -> None:
    """A measurement changes the plan: the batch is split until calls on half of it are measured to
    be slow."""
    model, x = Linears(), torch.randn(64, 8)
    cluster = Cluster(
        kernel=0.0, launch=0.0, latency=0.0, memory_bandwidth=1e5, bandwidth=1e12, size=2
    )
    before = flow.auto.plan(model, x, cluster, mesh=(2,))
    calls = calls_of_model(model, (x,))
    ops = ops_of(calls, MESH, candidates_of(calls, cluster), cluster)
    slow = {
        op.key: (1.0, 1.0) if "[32, " in op.key else (op.seconds / 2, op.seconds / 2) for op in ops
    }
    after = flow.auto.plan(model, x, cluster.with_ops(slow), mesh=(2,))
    assert any(("S(0)",) in call.wanted for call in before.calls)
    assert after.cost < 1.0
    assert not any(call.wanted[0] == ("S(0)",) for call in after.calls if call.function == "linear")


def test_what_matters_most_is_measured_within_the_time() -> None:
    calls = calls_of_model(
        Attention(), (torch.randint(0, 12, (4, 8)), torch.randint(0, 12, (4, 8)))
    )
    found = ops_of(calls, MESH, candidates_of(calls, Cluster()), Cluster())
    few = _affordable(found, 0.5)
    assert 0 < len(few) < len(found)
    assert min(op.seconds * op.uses for op in few) >= max(
        op.seconds * op.uses for op in found if op not in few
    )
    large = [op._replace(nbytes=1 << 27) for op in found]
    assert [len(batch) for batch in _batches(large)] == [2] * (len(found) // 2) + [1] * (
        len(found) % 2
    )


def test_no_time_to_measure_is_told() -> None:
    with pytest.raises(flow.auto.PlanError, match="seconds is a positive number, got 0"):
        flow.auto.calibrate(Linears(), torch.randn(4, 8), Cluster(size=2), (2,), seconds=0)


def calibrated() -> tuple[dict[str, tuple[float, float]], float, float]:
    model, x = Linears(), torch.randn(4, 8)
    cluster = flow.auto.calibrate(model, x, Cluster(size=2), (2,), seconds=2.0)
    plan = flow.auto.plan(model, x, cluster, mesh=(2,))
    return dict(cluster.ops), plan.cost, plan.bound


@pytest.mark.extended
def test_all_ranks_get_the_same_cluster() -> None:
    (mine, cost, bound), other = run_on(2, calibrated)
    assert (mine, cost, bound) == other
    assert any(
        key.startswith("linear(float32[2, 8]") and forward > 0 and backward > 0
        for key, (forward, backward) in mine.items()
    )
    assert bound <= cost * (1 + 1e-9)


def whole_steps(steps: bool) -> tuple[Any, ...]:
    torch.manual_seed(3)
    model, found = Linears(), []
    before, drawn = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    kept = whole.factors
    whole.factors = lambda steps: found.append((steps, kept(steps))) or kept(steps)  # type: ignore[func-returns-value]
    try:
        cluster = flow.auto.calibrate(
            model, torch.empty(4, 8, device="meta"), Cluster(size=2), (2,), seconds=2.0, steps=steps
        )
    finally:
        whole.factors = kept
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(
        torch.equal(v, before[k]) and not isinstance(v, flow.GlobalTensor)
        for k, v in model.state_dict().items()
    )
    assert all(p.grad is None for p in model.parameters())
    return cluster.launch, cluster.kernel, found


@pytest.mark.extended
def test_whole_steps_stretch_the_cluster() -> None:
    """The cluster is fitted to the steps of plans that differ in computing and moving. The fit is
    the same on every rank, and the model is unchanged."""
    (launch, kernel, found), other = run_on(2, whole_steps, True)
    assert (launch, kernel, found) == other
    ((steps, (computing, moving, waiting, held, buckets)),) = found
    assert waiting >= 0
    assert held > 0 < buckets
    assert all(min(s.bucketed, s.moving) > -1e-12 for s in steps)
    assert len({round(s.bucketed, 9) for s in steps}) > 2
    assert all(s.updating > 0 for s in steps)
    assert max(s.waits for s in steps) > 0.9
    assert all(s.waits >= 0 for s in steps)
    assert len(steps) == len(whole._WAYS)
    assert all(s.computing > 0 and s.measured > 0 for s in steps)
    assert len({round(s.moving, 9) for s in steps}) > 2
    assert (launch, kernel) == pytest.approx(
        (Cluster().launch * moving, Cluster().kernel * computing)
    )
    for launch, kernel, found in run_on(2, whole_steps, False):
        assert (launch, kernel, found) == (Cluster().launch, Cluster().kernel, [])


def built_anew(seconds: float, most: int) -> list[int]:
    """Return two counts for each build: the previous build's graphs that are still alive, and the
    new graphs. A plan is built ``most`` times if there is time."""
    kept, timed, seen, before = whole._build_steps, whole._time_steps, [], []
    usual, whole._GRAPHS = whole._GRAPHS, most

    def built(*args: Any) -> Any:
        seen.append(sum(graph() is not None for graph in before))
        graphs = kept(*args)
        before[:] = [weakref.ref(step.args[0]) for step in graphs.values()]  # type: ignore[attr-defined]
        seen.append(len(graphs))
        return graphs

    whole._build_steps, whole._time_steps = (
        built,
        lambda graphs, clock, seconds: dict.fromkeys(graphs, 1.0),
    )
    try:
        whole.calibrate_steps(
            Linears(), (torch.empty(4, 8, device="meta"),), {}, Cluster(size=2), MESH, seconds
        )
    finally:
        whole._build_steps, whole._time_steps, whole._GRAPHS = kept, timed, usual
    return seen


def test_graphs_are_built_anew_as_long_as_there_is_time() -> None:
    ways = len(whole._WAYS)
    assert run_on(2, built_anew, 1e-3, 2) == [[0, ways]] * 2
    assert run_on(2, built_anew, 300.0, 2) == [[0, ways] * 2] * 2


def test_steps_of_a_model_that_fills_memory_are_not_run() -> None:
    model, nbytes = Linears(), sum(p.nbytes for p in Linears().parameters())
    one = Placement("cpu", [0])
    assert calibration._can_run(model, one, 2 * whole.COPIES * nbytes)
    assert not calibration._can_run(model, one, 2 * whole.COPIES * nbytes - 1)
    assert not calibration._can_run(model, MESH, 1 << 40)  # more ranks than there are
    assert not calibration._can_run(Linears().to("meta"), one, 1 << 40)
    assert not calibration._can_run(Linears().requires_grad_(False), one, 1 << 40)


class Choosy(torch.nn.Linear):
    """A linear layer whose steps only run on rows with a nonzero sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return torch.linalg.cholesky(out.T @ out * 0)  # fails on values, not on shapes


def strange() -> tuple[float, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cluster = flow.auto.calibrate(
            Choosy(8, 8), torch.empty(4, 8, device="meta"), Cluster(size=2), (2,), seconds=1.0
        )
    return cluster.launch, [str(w.message) for w in caught if "calibrate" in str(w.message)]


def test_a_model_whose_steps_fail_is_calibrated_by_its_calls() -> None:
    for launch, said in run_on(2, strange):
        assert launch == Cluster().launch
        assert len(said) == len(whole._WAYS)
        assert "steps of the plan 'data parallel' could not be run, and are left out" in "".join(
            said
        )


@pytest.mark.parametrize(
    ("computing", "moving", "waiting"), [(1.3, 1.7, 0.0), (0.6, 2.0, 0.02), (2.0, 1.0, 0.01)]
)
def test_factors_are_found_again(computing: float, moving: float, waiting: float) -> None:
    draw, held, buckets = np.random.default_rng(0), 2.5, 0.4
    counts, drawn = draw.integers(0, 40, 100), draw.uniform(0.1, 2.0, size=(100, 4))
    steps = [
        whole.MeasuredStep(
            c, m, computing * c + moving * m + waiting * n + held * u + buckets * b, n, u, b
        )
        for (c, m, u, b), n in zip(drawn, counts, strict=True)
    ]
    found = whole.factors(steps)
    assert found[:2] == pytest.approx((computing, moving), rel=0.2)
    assert found[2] == pytest.approx(waiting, rel=0.2, abs=3e-3)
    assert found[3] == pytest.approx(held, rel=0.2)
    assert found[4] == pytest.approx(buckets, abs=0.25)  # pulled towards the factor of other moves
    assert whole.factors([whole.MeasuredStep(1.0, 0.0, 1.5)] * 3) == pytest.approx(
        (1.5, 1.5, 0.0, 1.5, 1.5), rel=0.02
    )  # nothing moved, so the other factors get the same value
    assert whole.factors([whole.MeasuredStep(1.0, 1.0, 100.0)]) == (10.0, 10.0, 0.0, 10.0, 10.0)
    shorter = [
        whole.MeasuredStep(1.0, 1.0, 2.0),
        whole.MeasuredStep(1.0, 1.0, 1.9, waits=30),
        whole.MeasuredStep(1.0, 0.1, 1.1),
    ]
    assert whole.factors(shorter)[2] == 0.0  # a wait cannot be negative


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(),
        Cluster.preset("dgx-h100", 2),
        Cluster(measured=(Curve("all_reduce", 2, 1, ((1024, 1e-4), (1 << 20, 2e-3))),)),
    ],
)
def test_stretched_times(cluster: Cluster) -> None:
    longer, ranks = cluster.scaled(1.5, 2.0), 2
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"):
        for nbytes in (0, 4096, 1 << 22):
            assert longer.seconds(kind, nbytes, ranks) == pytest.approx(
                2.0 * cluster.seconds(kind, nbytes, ranks)
            )
    for flops, nbytes in ((0.0, 1 << 20), (1e9, 1 << 10)):
        assert longer.compute(flops, nbytes) == pytest.approx(1.5 * cluster.compute(flops, nbytes))
    assert cluster.with_ops({"a": (1.0, 2.0)}).scaled(1.5, 9.0).op("a") == (1.5, 3.0)
    assert cluster.scaled(1.0, 1.0) == cluster
    assert cluster.scaled(1.0, 2.0, 3e-4).rank_skew == 2.0 * cluster.rank_skew + 3e-4
    assert cluster.scaled(2.0, 1.0, 0.0, 3.0).optimizer_factor == 1.5 * cluster.optimizer_factor
    assert cluster.scaled(2.0, 4.0, bucketed=1.0).bucket_factor == 0.25 * cluster.bucket_factor
    copying = cluster.scaled(2.0, 4.0, updating=3.0, copying=5.0)
    assert copying.seconds("copy", 1 << 20, 1) == pytest.approx(
        5.0 * cluster.seconds("copy", 1 << 20, 1)
    )
    whole, longer_whole = (
        updating(c, 1 << 32, Options(), torch.float32) for c in (cluster, copying)
    )
    assert longer_whole == pytest.approx(3.0 * whole, rel=0.01)  # a kernel launch is negligible
    once, later = (
        updating(c, 1 << 20, Options(), torch.float32)
        for c in (cluster, cluster.scaled(2.0, 1.0, 0.0, 3.0))
    )
    assert later == pytest.approx(3 * once)


def test_gradients_of_broadcast_parameters_are_summed_whole_and_together() -> None:
    """Gradients of broadcast parameters are summed whole and in buckets, for any consumer of the
    parameter. The reducer sums the gradients that arrive at a leaf on several ranks."""
    cluster = Cluster(launch=1e-3, latency=0.0)
    shape, alone, together = (
        (8, 16),
        ReshardCosts(cluster, MESH),
        ReshardCosts(cluster, MESH, bucket=10 * 8 * 16 * 4),
    )
    one, all_ = cluster.seconds("all_reduce", 512, 2), cluster.seconds("all_reduce", 5120, 2)
    found = alone.gradients(shape, torch.float32, [(B,), (S(0),)], [(B,), (S(0),)])
    pad, scatter = cluster.seconds("pad", 768, 1), cluster.seconds("reduce_scatter", 512, 2)
    assert found == pytest.approx(np.array([[one, scatter], [one + pad, 0.0]]), rel=0.01)
    found = together.gradients(shape, torch.float32, [(B,), (S(0),)], [(B,), (S(0),)])
    assert found == pytest.approx(
        np.array([[all_ / 10, scatter], [all_ / 10 + pad, 0.0]]), rel=0.01
    )
    calls = calls_of_model(Linears(), (torch.randn(4, 8),))
    assert bucket_of(calls) == sum(p.numel() * 4 for p in Linears().parameters())


def test_gathered_parameters_wait_together() -> None:
    """Parameters that are gathered together wait for late ranks once. Each other move in the middle
    of a step waits for itself."""
    shape, rank_skew = (8, 16), 1e-3
    tables = []
    for late in (0.0, rank_skew):
        prices = ReshardCosts(
            dataclasses.replace(Cluster(latency=0.0), rank_skew=late), MESH, gathered=1 << 20
        )
        tables.append(
            [
                prices.fetched(shape, torch.float32, [(B,), (S(0),)], [(B,), (S(0),)]),
                prices.table(shape, torch.float32, [(S(0),), (B,)]),
            ]
        )
    (before, (numbers, seconds)), (after, (_, later)) = tables
    assert after - before == pytest.approx(np.array([[0.0, 0.0], [rank_skew / 4, 0.0]]))
    at = numbers[(S(0),)], numbers[(B,)]
    assert later[at] - seconds[at] == pytest.approx(rank_skew)


def test_buckets_have_a_factor_of_their_own() -> None:
    """The bucket factor applies to gathered parameters and to gradients summed or scattered in
    buckets, and to no other move."""
    shape, layouts = (8, 16), [(B,), (S(0),)]
    found = []
    for bucketed in (1.0, 0.5):
        prices = ReshardCosts(
            dataclasses.replace(Cluster(), bucket_factor=bucketed),
            MESH,
            bucket=1 << 20,
            gathered=1 << 20,
        )
        gradients, fetched = (
            f(shape, torch.float32, layouts, layouts) for f in (prices.gradients, prices.fetched)
        )
        found.append((gradients[0], fetched[1, 0], prices.table(shape, torch.float32, layouts)[1]))
    (sums, gathers, others), (half, less, same) = found
    assert (half, less) == (pytest.approx(sums / 2), pytest.approx(gathers / 2))
    assert np.array_equal(others, same)
