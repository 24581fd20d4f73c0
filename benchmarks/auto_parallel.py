"""Compare the step times that the search predicts with the measured ones.

The plans are the one that the search finds, known ones and random ones. Each is run as a graph that
follows it. Before that, the cluster is profiled, and calibrated for each model. A row of the table
is about one model's plans. It has the median error of the predicted time and the rank correlation
(Spearman). It compares the time of the plan that the search would choose with the best measured one
(regret) and with data parallel. The pace of a shared machine changes within seconds. So a step that
belongs to no plan, the yardstick, is timed during calibration and among the plans, and the error is
reported at equal pace as well. The last row is about the plans of all models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Size, interleave, keep, on_ranks, options, same_losses, table
from torch import Tensor, nn
from train_gpt import loss_of

import globaltensor as flow
from globaltensor.auto.api import recipes_of
from globaltensor.auto.apply import graphs
from globaltensor.auto.calibrate.steps import perturbed
from globaltensor.auto.cost.reshard_cost import ReshardCosts
from globaltensor.auto.cost.strategies import StrategyBuilder, gives_every_rank_data
from globaltensor.auto.intra_op.formulate import formulate
from globaltensor.auto.intra_op.read_solution import read_plan
from globaltensor.auto.intra_op.search import SearchResult, binding_formulation, data_parallel
from globaltensor.auto.profile import profile
from globaltensor.auto.solver import solve
from globaltensor.cluster import Cluster, use_cluster
from globaltensor.distributed.world import world

T = TypeVar("T")
B, S = flow.sbp.broadcast, flow.sbp.split
YARDSTICK = "yardstick"
# Seconds of a calibration. Of thirty seconds, steps would get ten. Within ten seconds, a shared
# machine may be a tenth slower or quicker than usual.
CALIBRATED = 120.0
GRAPHS = 8  # graphs as which each plan is run
TOGETHER = 7  # graphs that exist at a time
# Plans that take at most NEAR times the best plan's time are run as AGAIN more graphs, because the
# regret is computed from them.
NEAR, AGAIN = (
    1.1,
    2 * GRAPHS,
)
POLISHED = 50  # iterations of the median polish

# ---------------------------------------------------------------- models


class Mlp(nn.Module):
    """A model of wide layers, for few rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), x)


class Pictures(nn.Module):
    """A model of convolutions with few parameters and a classifier with many."""

    def __init__(self, side: int, classes: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.hidden, self.classes = (
            nn.Linear(32 * (side // 4) ** 2, classes),
            nn.Linear(classes, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.one(x)), 2)
        h = F.max_pool2d(F.relu(self.two(h)), 2)
        return (
            F.log_softmax(self.classes(F.relu(self.hidden(h.flatten(1)))), dim=-1).square().mean()
        )


class Words(nn.Module):
    """The example's GPT with its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gpt = size.model()

    def forward(self, rows: Tensor) -> Tensor:
        return loss_of(self.gpt, rows)


class Case(NamedTuple):
    """A function that makes a model, and the model's batch."""

    make: Callable[[], nn.Module]
    batch: Tensor


def cases(quick: bool) -> dict[str, Case]:
    torch.manual_seed(1)
    width, side, classes = (64, 8, 32) if quick else (512, 16, 1024)
    gpt = Size(1, 32, 2, 16, 4) if quick else Size(2, 128, 4, 64, 8)
    return {
        "wide mlp": Case(lambda: Mlp(width), torch.randn(32, width)),
        "gpt": Case(lambda: Words(gpt), gpt.rows()),
        "cnn, big classifier": Case(
            lambda: Pictures(side, classes), torch.randn(32, 3, side, side)
        ),
    }


# ---------------------------------------------------------------- variants of a plan


class Way(NamedTuple):
    """A variant: the batch's sbp, and the function that chooses the rest (see `graphs.follow`)."""

    name: str
    batch: Any
    choose: Callable[..., SearchResult]


def solved(
    calls: Any,
    cluster: Cluster,
    mesh: Any,
    auto: Any,
    given: Any,
    states: float,
    *,
    layouts: Any = None,
    noise: float = 0.0,
    seed: int = 0,
) -> SearchResult:
    """Return the best plan that has the layouts of ``layouts(calls, mesh)`` (path -> layouts).

    With ``noise``, random amounts are added to the costs, so that the result is only near the best
    plan. ``noise`` is their mean as a fraction of a node's mean cost. Raises ValueError if no plan
    has these layouts."""
    fixed = {**(layouts(calls, mesh) if layouts else {}), **given}
    formulation = formulate(calls, cluster, mesh, graphs.options_of(auto, cluster, fixed, states))
    best = agreed(solve(formulation.problem))
    if noise and best.feasible:
        best = agreed(
            solve(perturbed(formulation, noise * float(best.cost) / len(best.choice), seed))
        )
    if not best.feasible:
        raise ValueError("no plan has these layouts")
    by = binding_formulation(formulation, best.choice)
    best = dataclasses.replace(best, cost=by.problem.evaluate(best.choice), bound=0.0)
    return SearchResult(read_plan(by, best), by, best.choice)


def agreed(found: T) -> T:
    """Return rank 0's value, since ranks may differ after a time limit or a measurement."""
    here = world()
    all_: list[T] = here.comm(tuple(range(here.size))).all_gather_object(found)
    return all_[0]


def anyhow(calls: Any, mesh: Any, seed: int) -> dict[str, Any]:
    """Return random layouts of parameters, of which a random fraction is replicated."""
    random, menu = np.random.default_rng(seed), StrategyBuilder(ReshardCosts(Cluster(), mesh), True)
    whole, found = random.uniform(0.2, 0.9), {}
    for v in calls.parameters:
        states = menu.states(v, True)
        found[v.path] = (
            states[0] if random.random() < whole else states[random.integers(len(states))],
        )
    return found


def ways(quick: bool, graph: Callable[[], Any]) -> Iterator[Way]:
    def recipe(name: str) -> Callable[[Any, Any], Any]:
        return lambda calls, mesh: recipes_of(graph(), calls, mesh)[name]

    def data(calls: Any, mesh: Any) -> Any:
        return {
            path: layouts
            for path, layouts in data_parallel(calls, mesh).items()
            if gives_every_rank_data((mesh.size,), layouts[0], mesh)
        }

    yield Way("found, batch split", S(0), solved)
    yield Way("found, batch whole", B, solved)
    yield Way("data", S(0), functools.partial(solved, layouts=data))
    yield Way("tensor", B, functools.partial(solved, layouts=recipe("tensor parallel")))
    yield Way("fsdp", S(0), functools.partial(solved, layouts=recipe("fully sharded (ZeRO-3)")))
    yield Way(
        "tensor, batch split", S(0), functools.partial(solved, layouts=recipe("tensor parallel"))
    )
    yield Way(
        "fsdp, batch whole", B, functools.partial(solved, layouts=recipe("fully sharded (ZeRO-3)"))
    )
    yield Way("found, dim 1 split", S(1), solved)
    for seed in range(1 if quick else 8):
        batch = (S(0), B)[seed % 2]
        yield Way(
            f"random layouts {seed}",
            batch,
            functools.partial(
                solved, layouts=lambda calls, mesh, seed=seed: anyhow(calls, mesh, seed)
            ),
        )
    for seed in range(1 if quick else 12):
        yield Way(
            f"near the best {seed}",
            (S(0), B)[seed % 2],
            functools.partial(solved, noise=0.5 * 2 ** (seed // 2), seed=seed),
        )


# ---------------------------------------------------------------- measurement


class Step(flow.nn.Graph):
    """A training step that follows one of the variants."""

    def __init__(self, model: nn.Module, way: Way) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        self.config.enable_auto_parallel()
        self.config.enable_auto_memory("Disable")
        graphs.follow(self, way.choose)

    def build(self, batch: Tensor) -> Tensor:
        loss = self.model(batch)
        loss.backward()
        return loss


class Chosen:
    """A choice that is made once."""

    def __init__(self, choose: Callable[..., SearchResult]) -> None:
        self.choose, self.found = choose, None

    found: SearchResult | None

    def __call__(self, *args: Any) -> SearchResult:
        if self.found is None:
            self.found = self.choose(*args)
        return self.found


class Measured(NamedTuple):
    """A variant's predicted and measured step time, in seconds.

    ``halves`` holds the time measured in the even rounds and the time in the odd rounds."""

    name: str
    foretold: float
    measured: float
    halves: tuple[float, float]


def yardstick(case: Case) -> Callable[[], float]:
    """Return a step of the plain model on each rank's share of the batch.

    The step sums the gradients over the ranks."""
    torch.manual_seed(0)
    model, batch = case.make(), case.batch.tensor_split(dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss = model(batch)
        loss.backward()
        dist.all_reduce(
            torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
        )
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # type: ignore[no-any-return]

    return step


def pace(step: Callable[[], float]) -> float:
    """Return the seconds of the yardstick, timed in blocks of steps as it is among the plans.

    The timing takes some seconds: in a shorter time the machine's varying pace changes the result
    by a twentieth."""
    return statistics.median(interleave({YARDSTICK: step}, 16, calls=10, again=5)[YARDSTICK])


def measure(case: Case, cluster: Cluster, rounds: int, quick: bool) -> tuple[list[Measured], float]:
    """Time all variants of a model in turn, round by round, with the yardstick among them.

    Returns the variants' times and the yardstick's seconds. Variants with the same plan are run
    once. Steps of one plan differ by up to a tenth from one graph to the next, however often they
    are repeated, because of where the graph's memory is allocated. So each plan is run as several
    graphs, one after the other, and its time is the median of theirs. If two dozen graphs exist
    together, each is a twentieth slower than alone, and training has only one. So a few exist at a
    time, in another combination each time. The minimum of many times is one that happened to be
    small, so the plans near the minimum are run as more graphs."""
    runs, more, tried = 2 if quick else GRAPHS, 1 if quick else AGAIN, _Tried({}, {}, {}, {}, [])
    groups: list[dict[str, list[float]]] = []
    names = [way.name for way in ways(quick, lambda: None)]
    for run in range(runs + more):
        names = [name for name in names if tried.same.get(name, name) == name]
        if run == runs:
            names = near_the_best(at_one_pace(agreed(groups)))
        turn = (
            [names[i] for i in np.random.default_rng(run).permutation(len(names))] if run else names
        )
        for first in range(0, len(turn), TOGETHER):
            groups.append(
                _graphs_in_turn(
                    case,
                    rounds if quick else math.ceil(rounds / runs),
                    quick,
                    turn[first : first + TOGETHER],
                    tried,
                )
            )
    seconds, median = at_one_pace(groups), statistics.median

    def over(name: str, part: slice) -> float:
        return median(median(found[part] or found) for found in seconds[name])

    every, even, odd = slice(None), slice(None, None, 2), slice(1, None, 2)
    told = [(name, seconds_, tried.same[name]) for name, seconds_ in tried.foretold.items()]
    return [
        Measured(name, seconds_, over(same, every), (over(same, even), over(same, odd)))
        for name, seconds_, same in told
    ], over(YARDSTICK, every)


class _Tried(NamedTuple):
    """The results so far, by the variants' names.

    - ``chosen``: the choice of each variant
    - ``same``: the first variant with the same plan, which is run for all of them
    - ``foretold``: the predicted seconds
    - ``seen``: the first variant of each plan
    - ``losses``: the losses of the first steps"""

    chosen: dict[str, Chosen]
    same: dict[str, str]
    foretold: dict[str, float]
    seen: dict[Any, str]
    losses: list[float]


def _graphs_in_turn(
    case: Case, rounds: int, quick: bool, names: list[str], tried: _Tried
) -> dict[str, list[float]]:
    """Return the seconds of each variant that is run, round by round."""
    everyone = flow.placement.all("cpu")
    steps: dict[str, Callable[[], float]] = {}
    here: list[Any] = [None]
    every = {way.name: way for way in ways(quick, lambda: here[0])}
    gc.collect()  # frees the graphs of the previous call
    for way in map(every.__getitem__, names):
        torch.manual_seed(0)
        model = case.make().to_global(everyone, B)  # type: ignore[operator]
        batch = case.batch.to_global(everyone, B, check_meta=False).to_global(sbp=way.batch)
        graph = here[0] = Step(
            model, way._replace(choose=tried.chosen.setdefault(way.name, Chosen(way.choose)))
        )
        graph(batch)
        plan = graph.auto_plan()
        told = str(way.batch), str(graph.plan()), tuple(sorted(plan.parameters.items()))
        first = tried.same[way.name] = tried.seen.setdefault(told, way.name)
        if first == way.name or way.name == "data":
            tried.foretold[way.name] = plan.seconds
        if first != way.name:
            continue
        # The step reads the loss, as the search assumes: a partial sum has to be summed then.
        steps[way.name] = lambda graph=graph, batch=batch: graph(batch).item()  # type: ignore[misc]
    if not steps:
        return {}
    known = {"the first": iter(tried.losses).__next__} if tried.losses else {}
    tried.losses[:] = same_losses(known | steps)
    steps[YARDSTICK] = yardstick(case)
    # A block is some steps in a row, as in training. If the models took turns after every step,
    # each would find the caches full of the others' data.
    return interleave(steps, rounds, calls=10, warm_up=1, again=5)


def at_one_pace(groups: list[dict[str, list[float]]]) -> dict[str, list[list[float]]]:
    """Return the seconds of each contender at the machine's usual pace, by graph and by round.

    An entry of ``groups`` has the seconds of contenders that took turns, round by round. The pace
    may change from one round to the next by more than plans differ. A measured time is modelled as
    the contender's own time multiplied by the pace of the round. Both are found by alternating
    medians (median polish; Tukey, Exploratory Data Analysis, 1977). This works because each
    contender takes turns with other contenders each time.
    """
    cells = [
        (name, (i, k), math.log(took))
        for i, seconds in enumerate(groups)
        for name, found in seconds.items()
        for k, took in enumerate(found)
    ]
    pace = {at: 0.0 for _, at, _ in cells}
    for _ in range(POLISHED):
        own: dict[str, list[float]] = {}
        for name, at, log in cells:
            own.setdefault(name, []).append(log - pace[at])
        usual = {name: statistics.median(logs) for name, logs in own.items()}
        by: dict[tuple[int, int], list[float]] = {at: [] for at in pace}
        for name, at, log in cells:
            by[at].append(log - usual[name])
        pace = {at: statistics.median(logs) for at, logs in by.items()}
    middle = statistics.median(pace.values())
    found: dict[str, list[list[float]]] = {}
    for i, seconds in enumerate(groups):
        for name, times in seconds.items():
            found.setdefault(name, []).append(
                [took / math.exp(pace[i, k] - middle) for k, took in enumerate(times)]
            )
    return found


def near_the_best(seconds: dict[str, list[list[float]]]) -> list[str]:
    """Return the contenders that took at most NEAR times the time of the quickest one.

    A contender's time is the median of its graphs' medians."""
    took = {
        name: statistics.median(map(statistics.median, found))
        for name, found in seconds.items()
        if name != YARDSTICK
    }
    return [name for name, each in took.items() if each <= NEAR * min(took.values())]


def ranks_of(values: list[float]) -> Any:
    """Return the rank of each value; equal values get the mean of their ranks."""
    array = np.array(values)
    return (array[:, None] > array[None]).sum(1) + (array[:, None] == array[None]).sum(1) / 2


def correlation(a: list[float], b: list[float]) -> float:
    """Return Spearman's rank correlation."""
    return float(np.corrcoef(ranks_of(a), ranks_of(b))[0, 1])


def summary(name: str, all_: list[Measured], slower: float) -> dict[str, Any]:
    """Return the row of a model.

    The search would choose the plan with the minimum predicted time. ``slower`` is the yardstick's
    time among the plans, as a multiple of its time during calibration. "of two halves" is the rank
    correlation between the times of one half of the rounds and those of the other half. No
    prediction ranks the plans much better than that."""
    found = min((m for m in all_ if m.name.startswith("found")), key=lambda m: m.foretold)
    best, data = min(all_, key=lambda m: m.measured), next(m for m in all_ if m.name == "data")
    error, even = (
        statistics.median(abs(m.foretold * by - m.measured) / m.measured for m in all_)
        for by in (1.0, slower)
    )
    return {
        "case": name, "unit": "ms", "data": round(data.measured * 1e3, 3),
        "ours": round(found.measured * 1e3, 3), "best": round(best.measured * 1e3, 3),
        "plans": len(all_), "median error": f"{error:.1%}", "at equal pace": f"{even:.1%}",
        "pace": f"{slower:.2f}",
        "rank correlation": f"{correlation([m.foretold for m in all_], [m.measured for m in all_]):.3f}",  # noqa: E501
        "of two halves": f"{correlation([m.halves[0] for m in all_], [m.halves[1] for m in all_]):.3f}",  # noqa: E501
        "regret": f"{found.measured / best.measured - 1:.1%}", "chosen": found.name,
    }  # fmt: skip


def together(told: list[dict[str, Any]], all_: list[Measured]) -> dict[str, Any]:
    """Return the row of all models.

    It has the sums of times, the largest regret, and the error of the predictions over all
    plans."""
    error = statistics.median(abs(m.foretold - m.measured) / m.measured for m in all_)
    sums = {key: round(sum(row[key] for row in told), 3) for key in ("data", "ours", "best")}
    rank = correlation([m.foretold for m in all_], [m.measured for m in all_])
    regret = max(float(row["regret"].rstrip("%")) for row in told)
    return {
        "case": "all",
        "unit": "ms",
        **sums,
        "plans": len(all_),
        "median error": f"{error:.1%}",
        "rank correlation": f"{rank:.3f}",
        "regret": f"{regret}%",
    }


def main() -> None:
    more = {
        "--save": {
            "action": "store_true",
            "help": "write each plan's times and the tables into results/",
        }
    }
    chosen = options(__doc__.splitlines()[0], steps=24, more=more)
    on_ranks(chosen.nproc)
    torch.set_num_threads(1)
    first = flow.env.get_rank() == 0
    profiled = profile(seconds=4.0 if chosen.quick else 30.0, device="cpu")
    told, details, every = [], [], []
    for name, case in cases(chosen.quick).items():
        if chosen.only not in name:
            continue
        inputs = torch.empty_like(case.batch, device="meta")
        before = pace(yardstick(case))
        cluster = flow.auto.calibrate(
            case.make(),
            inputs,
            profiled,
            (chosen.nproc,),
            seconds=2.0 if chosen.quick else CALIBRATED,
        )
        after = pace(yardstick(case))
        with use_cluster(cluster):
            found, among = measure(case, cluster, chosen.steps, chosen.quick)
        told.append(summary(name, found, among / statistics.mean((before, after))))
        every += found
        details += [
            {
                "case": f"{name}: {m.name}",
                "unit": "ms",
                "foretold": round(m.foretold * 1e3, 3),
                "measured": round(m.measured * 1e3, 3),
            }
            for m in found
        ]
    if not first:
        return
    if len(told) > 1:
        told.append(together(told, every))
    print(
        "\n".join(map(json.dumps, told)) if chosen.json else f"{table(told)}\n\n{table(details)}",
        flush=True,
    )
    if chosen.save:
        ranks = "" if chosen.nproc == 2 else f"_on_{chosen.nproc}"
        keep(told, f"auto_parallel{ranks}")
        keep(details, f"auto_parallel_plans{ranks}")


if __name__ == "__main__":
    with warnings.catch_warnings(), contextlib.suppress(BrokenPipeError):
        warnings.simplefilter("ignore")
        main()
