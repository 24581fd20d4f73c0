"""Tests that calls do what the search predicts. Operands in a candidate's layouts give results in
its layouts, and nothing else moves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import globaltensor as flow
from globaltensor._base import torch_private
from globaltensor._base.pytree import replaced, tensors_in
from globaltensor._ops.rules.partial_extrema import AHEAD
from globaltensor.auto.cost import strategies
from globaltensor.auto.cost.reshard_cost import ReshardCosts
from globaltensor.auto.cost.strategies import StrategyBuilder
from globaltensor.auto.ir.flops import work_of
from globaltensor.auto.ir.op_graph import Calls, ValueRef
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.boxing import boxing_log, plan_boxing
from globaltensor.cluster import Cluster
from globaltensor.distributed.simulate import simulate
from globaltensor.sbp import broadcast, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec


class Attention(nn.Module):
    """A model of an embedding, a norm, attention, gelu, and a loss over words."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm, self.head = nn.Embedding(12, 16), nn.LayerNorm(16), nn.Linear(16, 12)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.token(ids) * 2.0
        q, k, v = (
            f(self.norm(h)).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        out = h + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return F.cross_entropy(self.head(F.gelu(out)).flatten(0, 1), y.flatten())


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.Linear(8 * 16, 12),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.relu(self.two(F.relu(self.one(x)))), 2)
        return F.log_softmax(self.out(y.flatten(1)), dim=-1).mean() + y.pow(2).sum()


MODELS = {
    "attention": (Attention, lambda: (torch.randint(0, 12, (4, 8)), torch.randint(0, 12, (4, 8)))),
    "pictures": (Pictures, lambda: (torch.randn(4, 4, 8, 8, dtype=torch.float64),)),
}


def plainly(
    calls: Calls, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Compute each value by running the calls on one device."""
    states = dict([*model.named_parameters(), *model.named_buffers()])
    given = iter(inputs)
    found = {v.number: states[v.path].detach() if v.path else next(given) for v in calls.states()}
    for call in calls.calls:
        args, kwargs = (with_values(a, found) for a in (call.args, call.kwargs))
        found.update(zip(call.outs, tensors_in(call.func(*args, **kwargs), []), strict=True))
    return found


def with_values(given: Any, values: dict[int, Any]) -> Any:
    return replaced(
        given, iter([values[t.number] for t in tensors_in(given, []) if isinstance(t, ValueRef)])
    )


@pytest.mark.parametrize("grid", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(4)
def test_candidates_are_what_runs(name: str, grid: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    made, inputs = MODELS[name][0]().double(), MODELS[name][1]()
    calls = calls_of_model(made, inputs)
    values = plainly(calls, made, inputs)
    mesh = Placement("cpu", np.arange(np.prod(grid)).reshape(grid))
    menu = StrategyBuilder(ReshardCosts(Cluster(), mesh), True)
    unique = {call.key: call for call in calls.calls if not call.wild}
    tried = simulate(
        int(np.prod(grid)),
        lambda: [run(call, menu, calls, values, mesh) for call in unique.values()],
    )
    assert sum(tried[0]) > 2 * len(unique)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_loss_keeps_its_targets_split(weighted: bool) -> None:
    """A mean loss keeps its targets split, and the split costs no extra time in any plan. The
    number of counted targets is summed while the losses are computed, or with the gradients."""

    class Loss(nn.Module):
        def forward(
            self, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor
        ) -> torch.Tensor:
            return F.cross_entropy(x, target, weight if weighted else None)

    calls = calls_of_model(
        Loss(),
        (torch.randn(8, 5, requires_grad=True), torch.zeros(8, dtype=torch.long), torch.ones(5)),
    )
    call = next(c for c in calls.calls if "cross_entropy" in c.name)
    found = StrategyBuilder(ReshardCosts(Cluster(), Placement("cpu", [0, 1])), True).of(
        call, calls.values
    )
    ways = [tuple(column[k][0] for column in found.ins)[:2] for k in range(len(found))]
    assert found.moving[ways.index((split(0), split(0)))] == 0


def run(
    call: Any, menu: StrategyBuilder, calls: Calls, values: dict[int, torch.Tensor], mesh: Placement
) -> int:
    found = menu.of(call, calls.values)
    for k in range(len(found)):
        operands = [values[v] for v in call.operands]
        what = f"{call.name} of {[[e.short for e in column[k]] for column in found.ins]}"
        given = {}
        for v, t, column in zip(call.operands, operands, found.ins, strict=True):
            spread = [broadcast] * mesh.axes
            given[v] = (
                t
                if calls.values[v].plain
                else t.to_global(mesh, spread, check_meta=False).to_global(mesh, list(column[k]))
            )  # type: ignore[attr-defined]
        with boxing_log() as log:
            out = call.func(*with_values(call.args, given), **with_values(call.kwargs, given))
        results = tensors_in(out, [])
        for v, t, column in zip(call.outs, results, found.outs, strict=True):
            if not isinstance(t, flow.GlobalTensor):
                assert calls.values[v].plain, what
                continue
            assert t._spec.layout == column[k], (
                f"{what} gives {t._spec!r}, the candidate says {[e.short for e in column[k]]}"
            )
            torch.testing.assert_close(
                whole(t), values[v], msg=lambda m, what=what: f"{what}: {m}", rtol=1e-10, atol=1e-10
            )
        moved = [
            record for record in log if record.bytes and record.op != AHEAD
        ]  # a sum that overlaps with the computation is free
        assert not moved or found.moving[k] > 0, (
            f"{what} moves {list(map(str, moved))}, which the candidate does not price"
        )
    return len(found)


def whole(t: Any) -> torch.Tensor:
    return t.to_global(sbp=[broadcast] * t.placement.axes).to_local()  # type: ignore[no-any-return]


@pytest.mark.parametrize("grid", [(2,), (2, 4)], ids=str)
@pytest.mark.parametrize("shape", [(8, 16), (5, 9)], ids=str)
def test_all_prices_at_once_are_those_of_the_planner(
    grid: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """The prices of all moves between layouts of one mesh equal the planner's. Prices may be higher
    where the planner has a shorter route along no axis (each rank fetches its pieces at once). On
    several axes, prices may be lower, by routes over layouts that the planner does not try."""
    mesh = Placement("cpu", np.arange(np.prod(grid)).reshape(grid))
    prices, entries = ReshardCosts(Cluster(), mesh), [broadcast, partial_sum, split(0), split(1)]
    layouts = [tuple(entries[i] for i in at) for at in np.ndindex(*[4] * len(grid))]
    specs = [Spec.make(shape, torch.float32, mesh, layout) for layout in layouts]
    numbers, seconds = prices.table(shape, torch.float32, layouts)
    for a, src in zip(layouts, specs, strict=True):
        for b, dst in zip(layouts, specs, strict=True):
            route = plan_boxing(src.replace(layout=a), dst.replace(layout=b))
            found = seconds[numbers[a], numbers[b]]
            if all(m.axes for m in route.moves):
                told = f"{found} for {src!r} -> {dst!r}: {route}, {route.seconds}"
                assert found <= route.seconds * (1 + 1e-9), told
                assert len(grid) > 1 or found == pytest.approx(route.seconds), told


def test_candidates_are_left_out_on_one_mesh_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on candidates applies to one mesh only. Another mesh that has room for all candidates
    gets them all."""
    monkeypatch.setattr(strategies, "_known", {})
    calls = calls_of_model(nn.Linear(6, 10), (torch.randn(4, 6),))
    with monkeypatch.context() as short:
        short.setattr(strategies, "_MAX_CANDIDATES", 4)
        assert len(menu_of((2, 2)).of(calls.calls[0], calls.values)) <= 4
    after = len(menu_of((2,)).of(calls.calls[0], calls.values))
    strategies._known.clear()
    assert after == len(menu_of((2,)).of(calls.calls[0], calls.values))


def menu_of(grid: tuple[int, ...]) -> StrategyBuilder:
    return StrategyBuilder(
        ReshardCosts(Cluster(), Placement("cpu", np.arange(np.prod(grid)).reshape(grid))), True
    )


class Squares(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ x.exp()) * (y @ y) + x * x


def test_an_operand_that_stands_twice_comes_in_one_layout() -> None:
    calls, menu = calls_of_model(Squares(), (torch.randn(8, 8), torch.randn(8, 8))), menu_of((2,))
    twice = [c for c in calls.calls if len(c.operands) == 2 and c.operands[0] == c.operands[1]]
    assert [c.func.__name__ for c in twice] == ["matmul", "mul"]
    for call in twice:
        found = menu.of(call, calls.values)
        assert found.ins[0] == found.ins[1]
    different = next(c for c in calls.calls if c.func.__name__ == "matmul" and c not in twice)
    assert menu.of(different, calls.values).ins[0] != menu.of(different, calls.values).ins[1], (
        "not taken for the same call as y @ y"
    )


def test_dropout_leaves_attention_its_layouts_on_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, attention keeps its layouts on two axes, except those that are linear in the
    values. Dropped scores of a partial sum would be drawn again on each rank. No call needs more
    than shapes."""

    def layouts(rate: float) -> set[tuple[Any, ...]]:
        attention = partial(F.scaled_dot_product_attention, dropout_p=rate, is_causal=True)
        made = calls_of_model(Called(attention), tuple(torch.empty(4, 4, 8, 4) for _ in range(3)))
        with monkeypatch.context() as patch:
            patch.setattr(
                torch_private, "fake_tensors", lambda: pytest.fail("meta tensors would do")
            )
            found = menu_of((2, 2)).of(made.calls[-1], made.values)
        return set(zip(*found.ins, *found.outs, strict=True))

    plain, dropped = layouts(0.0), layouts(0.1)
    assert (split(2), split(2)) in {q for q, *_ in dropped}
    assert dropped == {(q, k, v, out) for q, k, v, out in plain if not any(e.is_partial for e in v)}


def test_products_are_counted_wherever_their_operands_stand() -> None:
    m, k, n, b = 4, 8, 16, 3
    a, c, many, more = (
        torch.empty(*s, requires_grad=True) for s in ((m, k), (k, n), (b, m, k), (b, k, n))
    )
    bias = torch.empty(m, n, requires_grad=True)
    cases: list[tuple[Any, tuple[torch.Tensor, ...], float]] = [
        (torch.addmm, (bias, a, c), m * k * n),
        (torch.baddbmm, (bias, many, more), b * m * k * n),
        (torch.addbmm, (bias, many, more), b * m * k * n),
        (torch.addmv, (bias[:, 0], a, c[:, 0]), m * k),
        (
            lambda x, y, z: torch.einsum("mk,kn,nj->mj", x, y, z),
            (a, c, torch.empty(n, 5)),
            m * k * n + m * n * 5,
        ),
        (lambda x, y: torch.einsum("mk,kn->mn", x, y), (a, c), m * k * n),
    ]
    for function, given, pairs in cases:
        calls = calls_of_model(Called(function), given)
        work = work_of(calls.calls[-1], calls.values)
        assert work.flops == 2 * pairs, function
        assert work.backward == sum(
            t.requires_grad for t in given if t.dim() > 1 and t is not bias
        ), function


class Called(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.function(*given)  # type: ignore[no-any-return]
