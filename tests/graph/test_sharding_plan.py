"""Tests of plans: their text, their unchanged return from a file, and edited plans, which are
followed or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_passes import Block, Decoder, ids, spread, values, whole
from torch import nn

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GraphError
from globaltensor.graph.sharding_plan import ShardingPlan
from globaltensor.sbp import broadcast as B
from globaltensor.sbp import split as S


class Pair(nn.Module):
    """A module of two matrices, the first split along its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(spread(values(6, 8, seed=1), S(1)))
        self.down = nn.Parameter(spread(values(8, 6, seed=2), S(0)))


def step(m: Any, x: Any) -> Any:
    h = torch.relu(x @ m.up)
    loss = (h @ m.down).pow(2).mean()
    loss.backward()
    return loss


def trained(model: nn.Module, build: Callable[..., Any]) -> flow.nn.Graph:
    class Trained(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))

        def build(self, *given: Any) -> Any:
            return build(self.model, *given)

    return Trained()


def given(sbp: Any = B) -> Any:
    return spread(values(4, 6, seed=3), sbp)


def test_a_plan_says_how_each_op_takes_its_operands() -> None:
    def body() -> None:
        graph = trained(Pair(), step)
        graph(given())
        plan = graph.plan()
        assert [op.function for op in plan] == [
            "matmul",
            "relu",
            "matmul",
            "pow",
            "mean",
            "backward",
        ]
        first, second = plan.ops[0], plan.ops[2]
        assert [(o.of, o.came, o.wanted) for o in first.operands] == [
            ("input_0", ("B",), ("B",)),
            ("model_up", ("S(1)",), ("S(1)",)),
        ]
        assert first.results == (("S(1)",),)
        assert second.results == (("P",),)
        assert plan["pow_1"].operands[0].came == ("P",)
        assert plan["pow_1"].operands[0].wanted != ("P",)
        (moved,) = plan["pow_1"].boxings
        assert moved.why == "pow: operand 0"
        assert moved.bytes > 0
        assert plan.bytes == moved.bytes
        lines = str(plan).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("pow_1 = pow(matmul_1 P->"))
        assert moved.moves[0] in lines[at + 1]
        assert f"{moved.bytes} B" in lines[at + 1]
        assert len(lines) == len(plan.ops) + len(moved.moves)

    simulate(2, body)


def test_a_plan_comes_back_from_a_file(tmp_path: Path) -> None:
    def body() -> None:
        graph = trained(Pair(), step)
        graph(given())
        plan = graph.plan()
        file = tmp_path / f"{flow.distributed.get_rank()}.json"
        plan.save(file)
        assert ShardingPlan.load(file) == plan
        assert plan.diff(ShardingPlan.load(file)) == ""
        assert {op["name"] for op in json.loads(file.read_text())["ops"]} == {
            op.name for op in plan
        }

    simulate(2, body)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "no plan"),
        ('{"version": 1}', "no plan"),
        ('{"version": 99, "ops": []}', "version 99"),
        ("[]", "no plan"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(GraphError, match=said):
        ShardingPlan.load(tmp_path / "p.json")


@pytest.mark.parametrize("sbp", [B, S(0), S(1)])
def test_a_plan_that_is_used_as_it_is_changes_nothing(sbp: Any) -> None:
    def body() -> None:
        graph = trained(Pair(), step)
        graph(given(sbp))
        plan = graph.plan()
        with record_collectives() as before:
            graph(given(sbp))
        graph.use_plan(plan)
        with record_collectives() as after:
            graph(given(sbp))
        assert graph._captures == 2
        assert graph.plan().diff(plan) == ""
        assert [t.kind for t in after] == [t.kind for t in before]

    simulate(2, body)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_edited_plan_is_followed_with_the_same_numbers(ranks: int) -> None:
    def body() -> None:
        plain, edited = trained(Pair(), step), trained(Pair(), step)
        want = [whole(plain(given())) for _ in range(3)]
        assert (whole(edited(given())) - want[0]).abs().max() < 1e-12
        before = edited.plan()
        # Change the plan to data parallel: the batch split, the parameters gathered.
        plan = (
            before.wanting("matmul", 0, S(0))
            .wanting("matmul", 1, B)
            .wanting("relu", 0, S(0))
            .wanting("matmul_1", 0, S(0))
            .wanting("matmul_1", 1, B)
        )
        plan = plan.wanting("pow_1", 0, S(0)).wanting("mean", 0, S(0))
        edited.use_plan(plan)
        for expected in want[1:]:
            torch.testing.assert_close(whole(edited(given())), expected, rtol=1e-12, atol=1e-12)
        now = edited.plan()
        assert now["matmul"].operands[0].wanted == ("S(0)",)
        assert now["matmul_1"].results == (("S(0)",),)
        told = before.diff(now)
        assert "matmul: operand 0 is taken as B -> S(0)" in told
        assert "forward traffic" in told
        for name in ("up", "down"):
            torch.testing.assert_close(
                whole(getattr(edited._modules["model"], name)),
                whole(getattr(plain._modules["model"], name)),
                rtol=1e-12,
                atol=1e-12,
            )
        edited.use_plan(None)
        edited(given())
        assert edited.plan().diff(before) == ""

    simulate(ranks, body)


def test_a_parameter_is_gathered_where_the_plan_says_so_though_taking_it_as_it_lies_costs_less() -> (  # noqa: E501
    None
):
    def body() -> None:
        plain, edited = trained(Pair(), step), trained(Pair(), step)
        want = [whole(plain(given())) for _ in range(3)]
        assert (whole(edited(given())) - want[0]).abs().max() < 1e-12
        plan = (
            edited.plan()
            .wanting("matmul", 1, B)
            .wanting("relu", 0, B)
            .wanting("matmul_1", 0, B)
            .wanting("matmul_1", 1, B)
            .wanting("pow_1", 0, B)
        )
        edited.use_plan(plan)
        for expected in want[1:]:
            torch.testing.assert_close(whole(edited(given())), expected, rtol=1e-12, atol=1e-12)
        for name in ("matmul", "matmul_1"):
            op = edited.plan()[name]
            assert (op.operands[1].wanted, op.results) == (("B",), (("B",),))
        for name in ("up", "down"):
            torch.testing.assert_close(
                whole(getattr(edited._modules["model"], name)),
                whole(getattr(plain._modules["model"], name)),
                rtol=1e-12,
                atol=1e-12,
            )

    simulate(2, body)


def test_what_an_op_cannot_do_is_refused_with_what_it_can() -> None:
    def body() -> None:
        graph = trained(Pair(), step)
        graph(given())
        # The operand is split along its contracted dim while the other operand is split along its
        # columns. Matmul has no such signature.
        graph.use_plan(graph.plan().wanting("matmul", 0, S(1)))
        with pytest.raises(
            GraphError,
            match=(
                r"(?s)matmul = matmul .*plan wants operand \d .*its rule admits.*axis "
                r"0.*\(S\(1\), S\(0\)\)"
            ),
        ):
            graph(given())
        graph.use_plan(None)
        graph(given())

    simulate(2, body)


def test_an_sbp_that_does_not_fit_is_refused() -> None:
    def body() -> None:
        graph = trained(Pair(), step)
        graph(given())
        plan = graph.plan()
        for wrong in (S(5), [S(0), S(1)]):
            graph.use_plan(plan.wanting("relu", 0, wrong))
            with pytest.raises(GraphError, match=r"relu: the plan wants operand 0 \(matmul"):
                graph(given())
        with pytest.raises(GraphError, match="no op 'nothing'"):
            plan.wanting("nothing", 0, B)
        with pytest.raises(GraphError, match="1 operands"):
            plan.wanting("relu", 1, B)

    simulate(2, body)


def test_the_plan_of_another_graph_is_refused() -> None:
    def other(m: Any, x: Any) -> Any:
        loss = torch.tanh(x @ m.up).mean()
        loss.backward()
        return loss

    def longer(m: Any, x: Any) -> Any:
        return step(m, x) * 1

    def body() -> None:
        graph = trained(Pair(), step)
        graph(given())
        for build in (other, longer):
            another = trained(Pair(), build)
            another(given())
            graph.use_plan(another.plan())
            with pytest.raises(GraphError, match="plan is of another graph"):
                graph(given())

    simulate(2, body)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["data", "tensor", "fsdp", "hybrid"])
@pytest.mark.sweep(4)
def test_plans_of_whole_models_are_followed(kind: str) -> None:
    def body() -> None:
        def make() -> Any:
            model = Decoder(Block).double()
            with torch.no_grad():
                for i, p in enumerate(model.parameters()):
                    p.copy_(values(*p.shape, seed=i))
            where = (
                flow.placement("cpu", [[0, 1], [2, 3]])
                if kind == "hybrid"
                else flow.placement.all("cpu")
            )
            return flow.parallelize(model, where, kind)

        def loss(m: Any, x: Any, y: Any) -> Any:
            found = F.cross_entropy(m(x).flatten(0, 1), y.flatten())
            found.backward()
            return found

        sbp = S(0) if kind in ("data", "fsdp") else B
        x, y = ids(4, 6, sbp=sbp).clamp(min=0), ids(4, 6, sbp=sbp, seed=4).clamp(min=0)
        if kind == "hybrid":
            x, y = (
                t.to_global(placement=flow.placement("cpu", [[0, 1], [2, 3]]), sbp=[S(0), B])
                for t in (x, y)
            )
        graph, again = trained(make(), loss), trained(make(), loss)
        want = [whole(graph(x, y)) for _ in range(2)]
        again(x, y)
        plan = again.plan()
        again.use_plan(plan)
        torch.testing.assert_close(whole(again(x, y)), want[1], rtol=1e-11, atol=1e-11)
        assert plan.diff(again.plan()) == ""

    simulate(4 if kind == "hybrid" else 2, body)
