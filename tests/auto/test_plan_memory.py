"""Tests of the memory of plans. Gathered parameters are counted, and are saved for backward or
gathered again. A rank's peak is the plan's figure."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from support.bodies import values
from support.pool import run_on
from test_apply import carried, line, number, searched
from test_search import only
from test_zero import Live
from torch import Tensor, nn

import globaltensor as flow
from globaltensor._tensor.gradients import parameter_gather
from globaltensor.auto.apply.modules import install_reshard_hooks
from globaltensor.auto.inter_op.predict import predict
from globaltensor.auto.intra_op.formulate import formulate
from globaltensor.auto.intra_op.search import data_parallel, price_layouts, search
from globaltensor.auto.intra_op.search_options import Options
from globaltensor.auto.ir.trace import calls_of_model, captured_calls
from globaltensor.auto.solver import solve
from globaltensor.cluster import Cluster
from globaltensor.distributed.simulate import simulate
from globaltensor.sharding.placement import Placement

B, S = flow.sbp.broadcast, flow.sbp.split
WIDTH, LAYERS, ROWS = 256, 6, 1536
WEIGHTS = LAYERS * WIDTH * WIDTH * 8
FAST = Cluster(
    launch=0, latency=0, bandwidth=1e9, kernel=0.0, flops={"float32": 1e12, "float64": 1e12}
)


def stack(width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        *[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
    ).double()


class Training(flow.nn.Graph):
    def __init__(self, model: nn.Module, mode: str = "Disable") -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        self.config.enable_auto_parallel()
        self.config.enable_auto_memory(mode)

    def build(self, x: Any) -> Any:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


class Tied(nn.Module):
    """A model with a weight that two calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.weight) @ self.weight.t()).square().mean()


# ------------------------------------------------------------------------------------ on real ranks


def _trained(mode: str) -> dict[str, Any]:
    """Run three steps and measure this rank's peak in the last two."""
    place = flow.placement.all("cpu")
    model = stack().to_global(place, B)  # type: ignore[operator]
    graph, x = Training(model, mode), values(ROWS, WIDTH).to_global(place, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    losses = [number(graph(x))]
    live = Live()
    live.look([p._local for p in model.parameters()])
    live.look(
        [
            v._local
            for s in graph._optimizers[0].optimizer.state.values()
            for v in s.values()
            if getattr(v, "is_global", False)
        ]
    )
    live.look([x._local])
    with live:
        losses += [number(graph(x)) for _ in range(2)]
    plan = graph.auto_plan()
    return {
        "peak": live.peak,
        "plan": plan.memory,
        "held": plan.memory_breakdown,
        "choices": plan.choices,
        "losses": losses,
    }


def test_what_a_rank_holds_is_what_the_plan_says() -> None:
    model, x = stack(), values(ROWS, WIDTH)
    optimizer, plain = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        plain.append(loss.item())
    kept, again = (
        run_on(2, _trained, mode)[0] for mode in ("ModerateMemoryDown", "HeavyMemoryDown")
    )
    for found in (kept, again):
        assert found["losses"] == pytest.approx(plain, rel=1e-9)
        assert found["plan"] == pytest.approx(found["peak"], rel=0.04)
    assert kept["held"]["gathered parameters"] > WEIGHTS / 2, (
        "kept in shares, and what is gathered of them for backward too"
    )
    assert not kept["choices"].get("reshard_after_forward")
    assert again["choices"]["reshard_after_forward"]
    assert not again["held"]["gathered parameters"]
    assert again["peak"] < kept["peak"] - WEIGHTS / 2


# -------------------------------------------------------------------------------------- the problem


def problem_of(model: nn.Module, x: Tensor, mesh: tuple[int, ...], **options: Any) -> Any:
    where = Placement("cpu", np.arange(np.prod(mesh)).reshape(mesh))
    return formulate(calls_of_model(model, (x,)), FAST, where, Options(**options))


def test_copies_cost_what_was_paid_before_and_take_memory() -> None:
    """Gathered copies take memory, or time if gathered again. The batch is split and each sharded
    weight is gathered for its layer. Each copy is saved for backward, except the first, whose input
    needs no gradient."""
    shares = {f"{2 * k}.weight": ((S(0),),) for k in range(LAYERS)} | {
        f"{2 * k}.bias": ((B,),) for k in range(LAYERS)
    }
    fixed = {**shares, "input_0": ((S(0),),)}
    kept, again = (
        problem_of(stack(), torch.empty(1 << 14, WIDTH).double(), (4,), fixed=fixed, freed=freed)
        for freed in (False, True)
    )
    one, two = solve(kept.problem), solve(again.problem)
    assert one.optimal
    assert two.optimal
    assert one.choice is not None
    assert two.choice is not None
    copies = [
        sum(f.copies[node][choice[node]] for node in f.copies)
        for f, choice in ((kept, one.choice), (again, two.choice))
    ]
    assert copies == [(LAYERS - 1) * WIDTH * WIDTH * 8, 0]
    gather = FAST.seconds("all_gather", WIDTH * WIDTH * 8, (0, 1, 2, 3))
    assert float(two.cost - one.cost) == pytest.approx((LAYERS - 1) * gather, rel=0.05), (
        "all but one are gathered twice"
    )
    saved = kept.problem.peak(one.choice) - again.problem.peak(two.choice)
    assert saved >= (LAYERS - 3) * WIDTH * WIDTH * 8


def test_what_is_gathered_is_never_free_of_memory() -> None:
    """The node of a parameter counts the gathered memory for every choice in which a call needs
    more of the parameter than a rank stores."""
    for mesh, collect in itertools.product(((2,), (2, 2)), (False, True)):
        for model in (stack(16, 2), Tied().double()):
            f = problem_of(model, torch.empty(8, 16).double(), mesh, collect=collect)
            random = np.random.default_rng(0)
            for value in f.calls.parameters:
                node = f.node_of_value[value.number]
                for taker in dict.fromkeys(value.takers):
                    call, at = f.calls.calls[taker], f.node_of_call[taker]
                    wanted = f.candidates[taker].ins[call.operands.index(value.number)]
                    table = sum(
                        t
                        for (i, j), t in zip(f.problem.edges, f.problem.tables, strict=True)
                        if (i, j) == (node, at)
                    )
                    for s, k in random.integers((len(f.layouts[node]), len(wanted)), size=(60, 2)):
                        made, copy = f.layouts[node][s]
                        more = f.prices.local(value.shape, wanted[k]) > f.prices.local(
                            value.shape, made
                        ) and not any(e.is_partial for e in wanted[k])
                        if more and np.isfinite(table[s, k]):
                            taken = max(
                                float(u.amounts[s])
                                for u in f.problem.usages[node]
                                if u.start is not None
                            )
                            assert taken >= 8 * f.prices.local(value.shape, wanted[k]), (
                                mesh,
                                collect,
                                made,
                                copy,
                                wanted[k],
                            )


def test_calls_that_share_a_parameter_may_each_have_a_copy() -> None:
    """Calls that share a parameter may each have their own copy. One call may need a sharded tied
    weight whole, and another call half of it. Without a memory limit, counting the copies does not
    raise the cost of the best plan."""
    x = torch.empty(64, 16).double()
    for collect in (False, True):
        f = problem_of(Tied().double(), x, (2, 2), collect=collect)
        best = solve(f.problem)
        free = dataclasses.replace(f.problem, tables=list(f.problem.tables))
        node = f.node_of_value[f.calls.parameters[0].number]
        for e, (i, j) in enumerate(free.edges):
            if i == node:  # as if each wanted layout could be made from the stored layout
                taker = next(c for c, at in f.node_of_call.items() if at == j)
                value, call = f.calls.parameters[0], f.calls.calls[taker]
                wanted = f.candidates[taker].ins[call.operands.index(value.number)]
                there = f.prices.fetched(
                    value.shape, value.dtype, [x for x, _ in f.layouts[node]], wanted
                )
                back = f.prices.gradients(
                    value.shape, value.dtype, wanted, [x for x, _ in f.layouts[node]]
                ).T * (1 - 0.9)
                free.tables[e] = np.minimum(free.tables[e], there + back)
        assert best.optimal
        assert float(best.cost) <= float(solve(free).cost) * (1 + 1e-9)


def test_a_graphs_calls_keep_what_its_models_calls_keep() -> None:
    model, x = (
        nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16)).double(),
        values(8, 16),
    )
    plain = calls_of_model(model, (x,))
    want = {v.path for v in plain.parameters if v.saved}, [c.extra for c in plain.calls]
    assert want[0] == {"1.weight", "1.bias", "3.weight"}

    def run() -> None:
        place = flow.placement.all("cpu")
        ours = copy.deepcopy(model).to_global(
            place, lambda path, t: S(0) if path == "3.weight" else B
        )
        graph = Training(ours)
        for sbp in (B, S(0)):
            given = x.to_global(place, B, check_meta=False).to_global(sbp=sbp)  # type: ignore[attr-defined]
            found = captured_calls(graph, (given,))[1]
            assert {v.path.removeprefix("model.") for v in found.parameters if v.saved} == want[0]
            assert [c.extra for c in found.calls][: len(want[1])] == want[1], (
                "what a rank keeps of a part stands for all of it"
            )

    simulate(2, run)


# ------------------------------------------------------------------------------------ under a limit


@pytest.mark.long
@pytest.mark.parametrize("layers", [4, pytest.param(8, marks=pytest.mark.extended)])
def test_little_memory_lets_go_of_what_was_gathered(layers: int) -> None:
    calls = calls_of_model(stack(64, layers), (torch.empty(1 << 14, 64).double(),))
    where = Placement("cpu", np.arange(8))
    shares = {v.path: ((S(0),),) for v in calls.parameters}
    options = Options(fixed={**shares, "input_0": ((S(0),),)})
    roomy = search(calls, FAST, where, options, compared=False)
    least = roomy.formulation.least_memory()
    assert least is not None
    assert least < roomy.plan.memory
    tight = search(calls, FAST, where, dataclasses.replace(options, memory=least), compared=False)
    assert not roomy.plan.choices.get("reshard_after_forward")
    assert tight.plan.choices["reshard_after_forward"]
    assert tight.plan.memory <= least
    assert tight.plan.cost > roomy.plan.cost
    assert tight.plan.cost == pytest.approx(tight.formulation.problem.evaluate(tight.choice))
    spent = tight.plan.cost_breakdown
    assert spent["computing"] + spent["moving"] + spent["updating"] - spent[
        "hidden"
    ] == pytest.approx(tight.plan.cost), "the second time is moving too"
    assert "gathered again in backward" in tight.plan.report()
    again = predict(tight.plan, FAST, calls, options)
    assert again.seconds == pytest.approx(predict(tight.plan).seconds, rel=1e-6), (
        "priced anew, both times are there"
    )
    kept = solve(dataclasses.replace(roomy.formulation.problem, usage_limit=least))
    assert not kept.feasible, "with copies kept nothing fits"


@pytest.mark.long
@pytest.mark.parametrize("part", [0.3, 0.1, 0.5, 0.8])
@pytest.mark.sweep(4)
def test_of_both_ways_to_fit_the_cheaper_one_is_taken(part: float) -> None:
    calls = calls_of_model(stack(64, 4), (torch.empty(1 << 12, 64).double(),))
    where = Placement("cpu", np.arange(4))
    plain = Options(hidden=0.0)  # one problem for each variant, as nothing hides
    free = search(calls, FAST, where, plain, compared=False)
    least = free.formulation.least_memory()
    assert least is not None
    limit = round(least + part * (free.plan.memory - least))
    limited = dataclasses.replace(plain, memory=limit)
    found = search(calls, FAST, where, limited, compared=False)
    ways = [
        solve(formulate(calls, FAST, where, dataclasses.replace(limited, freed=freed)).problem)
        for freed in (False, True)
    ]
    assert found.plan.memory <= limit
    assert found.plan.cost == pytest.approx(
        min(float(w.cost) for w in ways if w.feasible), rel=1e-4
    )
    assert found.plan.bound <= found.plan.cost


def test_ways_that_are_compared_may_let_go_too() -> None:
    calls = calls_of_model(stack(64, 8), (torch.empty(1 << 12, 64).double(),))
    f = formulate(calls, FAST, Placement("cpu", np.arange(8)), Options())
    shares = {v.path: ((S(0),),) for v in calls.parameters} | {"input_0": ((S(0),),)}
    roomy, tight = price_layouts(f, shares), price_layouts(f.under(freed=True), shares)
    assert roomy == tight, "without a limit nothing is let go of"
    limited = price_layouts(f.under(memory=roomy.memory - 1), shares)
    assert limited.fits
    assert limited.memory < roomy.memory
    assert limited.cost > roomy.cost
    assert not price_layouts(f.under(memory=1 << 10), data_parallel(calls, f.mesh)).fits


# ------------------------------------------------------------------------------------ applied plans


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "stages", "schedule"), [((2,), 2, "1f1b"), ((2,), 2, "zb-h1"), ((4,), 1, "1f1b")]
)
@pytest.mark.sweep(3)
def test_a_plan_in_shares_and_stages_is_carried_out(
    mesh: tuple[int, ...], stages: int, schedule: str
) -> None:
    space = only(mesh, stages, 4 if stages > 1 else 2, schedules=(schedule,), recompute=False)
    tight = searched(4, space, memory=int(searched(4, space).memory * 0.8))
    assert tight.choices["reshard_after_forward"]
    carried(tight, 4, line(4))


def test_in_eager_mode_a_models_forward_lets_go() -> None:
    plain, x = stack(16, 2), values(4, 16)
    plan = search(
        calls_of_model(plain, (x,)), FAST, Placement("cpu", [0, 1]), Options(), compared=False
    ).plan

    def run(freed: bool) -> tuple[list[int], list[Tensor]]:
        place = flow.placement.all("cpu")
        model = copy.deepcopy(plain).to_global(place, S(0))
        install_reshard_hooks(
            model, dataclasses.replace(plan, choices={"reshard_after_forward": freed})
        )
        noted: list[int] = []
        model[2].register_forward_hook(lambda *_: noted.append(parameter_gather._state().freed))
        given = x.to_global(place, B, check_meta=False)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="shape"):
            model(given[:, :3])  # a run that fails closes everything that it has opened
        model(given).square().mean().backward()
        with torch.no_grad():
            model(given)
        assert not parameter_gather._state().freed
        return noted, [p.grad._local.clone() for p in model.parameters()]

    (without, want), (within, got) = simulate(2, run, False)[0], simulate(2, run, True)[0]
    assert (without, within) == ([0, 0], [1, 0]), "only where gradients are wanted"
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
