"""Tests of the side effects of build() on modules and on the graph, and of changes by others
between calls (graph/capture/side_effects.py)."""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from test_capture import B, S, graph_of, same, values, whole
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GraphError


class Keeps(nn.Module):
    cache: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor, how: str) -> Tensor:
        if how == "attribute":
            self.cache = x * 2
        elif how == "parameter":
            self.linear.weight = nn.Parameter(self.linear.weight * 2)
        elif how == "buffer":
            self.register_buffer("late", x.sum())
        elif how == "shape":
            self.mask = x
        elif how == "python":
            return x * random.random()
        elif how == "numpy":
            return x * float(np.random.rand())
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["parameter", "buffer", "shape", "python", "numpy"])
def test_what_a_program_could_not_repeat_is_refused(how: str) -> None:
    model = Keeps()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    with pytest.raises(
        GraphError,
        match={"python": "Python's", "numpy": "NumPy"}.get(
            how, r"model\.(linear\.weight|late|mask)"
        ),
    ):
        graph_of(model, lambda m, x: m(x, how))(torch.randn(3, 4))
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(after[k] is t for k, t in before.items())


def test_a_tensor_left_on_a_module_is_told() -> None:
    model = Keeps()
    with pytest.warns(UserWarning, match=r"model\.cache"):
        graph_of(model, lambda m, x: m(x, "attribute"))(torch.randn(3, 4))
    assert model.cache is None


class Notes:
    def __init__(self) -> None:
        self.pair = values(4, seed=6), values(4, seed=7)


class Runs(nn.Module):
    """A module that stores a state in plain attributes, and a table that it makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.linear.load_state_dict({"weight": values(4, 4, seed=4), "bias": values(4, seed=5)})
        self.mean, self.seen = (
            values(4, seed=1),
            [values(4, seed=2), {"last": values(3, 4, seed=3)}],
        )
        self.table = torch.zeros(4, dtype=torch.float64)
        self.notes = Notes()
        self.left, self.right = values(4, 4, seed=8), values(4, 4, seed=9)
        self.register_buffer("up", values(4, seed=10))
        self.register_buffer("down", values(4, seed=11))

    def forward(self, x: Tensor) -> Tensor:
        self.left, self.right = self.right, self.left.t()
        self.up, self.down = self.down, self.up
        self.table = torch.arange(4, dtype=torch.float64)
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.seen[0] = self.seen[0] * 2
        self.notes.pair = self.notes.pair[1] + x.sum(0), self.notes.pair[0]
        y = (
            self.linear(x)
            + self.mean
            + self.seen[0]
            + self.table
            + self.notes.pair[1]
            + self.left[0]
            + self.up
        )
        self.seen[1]["last"] = y
        return y


class Counts(flow.nn.Graph):
    def __init__(self, model: nn.Module, total: Tensor) -> None:
        super().__init__()
        self.model, self.total = model, total

    def build(self, x: Tensor) -> Any:
        y = self.model(x)
        self.total = self.total + y.sum()
        return y * self.total


def states_in_attributes() -> None:
    placement = flow.placement("cpu", [0, 1])
    want, mine, alone = Runs(), Runs(), Runs()
    mine.linear.to_global(placement, B)
    there = lambda t: t.to_global(placement, B)  # noqa: E731
    mine.mean, mine.seen, mine.table = (
        there(mine.mean),
        [there(mine.seen[0]), {"last": there(mine.seen[1]["last"])}],
        there(mine.table),
    )
    mine.notes.pair, mine.left, mine.right = (
        (there(mine.notes.pair[0]), there(mine.notes.pair[1])),
        there(mine.left),
        there(mine.right),
    )
    mine.up, mine.down = there(mine.up), there(mine.down)
    graphs = (
        Counts(mine, there(torch.zeros((), dtype=torch.float64))),
        Counts(alone, torch.zeros((), dtype=torch.float64)),
    )
    total, table = torch.zeros((), dtype=torch.float64), alone.table
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            x = values(3, 4, seed=10 + i)
            y = want(x)
            total = total + y.sum()
            same(graphs[0](there(x).to_global(sbp=S(0))), y * total)
            same(graphs[1](x), y * total)
            for model in (mine, alone):
                pairs = zip(
                    [*model.notes.pair, model.left, model.right],
                    [*want.notes.pair, want.left, want.right],
                    strict=True,
                )
                for got, told in (
                    *pairs,
                    (model.mean, want.mean),
                    (model.seen[0], want.seen[0]),
                    (model.seen[1]["last"], want.seen[1]["last"]),
                ):
                    same(got, told)
    assert [g._captures for g in graphs] == [1, 1]
    assert alone.table is table


def test_states_in_attributes() -> None:
    simulate(2, states_in_attributes)


class Reads(nn.Module):
    """A module with tensors that are neither parameters nor buffers, in the places where users put
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.tables = (
            torch.tensor(2.0, dtype=torch.float64),
            {"all": [torch.ones(4, dtype=torch.float64)]},
        )
        self.unread = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.tables["all"][0]


def plain_tensors_rebound(way: str) -> None:
    placement = flow.placement("cpu", [0, 1])
    there = (lambda t: t.to_global(placement, B)) if way == "global" else (lambda t: t)
    model = Reads()
    model.scale, model.tables["all"][0] = there(model.scale), there(model.tables["all"][0])
    graph, x = graph_of(model, lambda model, x: model(x)), values(3, 4)
    for step in range(6):
        same(graph(there(x)), x * (2.0 + (step >= 2)) + 1.0 + (step >= 4))
        if step == 1:
            model.scale = there(torch.tensor(3.0, dtype=torch.float64))
        elif step == 3:
            model.tables["all"][0] = there(torch.full((4,), 2.0, dtype=torch.float64))
        model.unread = torch.ones(2)
    assert graph._captures == 3


@pytest.mark.parametrize("way", ["global", "plain"])
def test_plain_tensors_that_are_rebound(way: str) -> None:
    simulate(2, plain_tensors_rebound, way)


class Remembers(nn.Module):
    """A recurrent layer whose state continues from batch to batch until it is reset."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3).double()
        self.reset()

    def reset(self) -> None:
        self.state: Any = (
            torch.zeros(1, 2, 3, dtype=torch.float64),
            torch.zeros(1, 2, 3, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layer(x, self.state)
        self.state = tuple(t.detach() for t in state)
        return out


class Trained(flow.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().sum()
        loss.backward()
        return loss


def a_state_set_back(base: nn.Module) -> None:
    placement = flow.placement("cpu", [0, 1])
    want, local, ours = (copy.deepcopy(base) for _ in range(3))
    ours.to_global(placement, B)
    there = lambda t: t.to_global(placement, B)  # noqa: E731
    graphs, optimizer = (Trained(local), Trained(ours)), torch.optim.SGD(want.parameters(), lr=0.5)
    for _ in range(3):
        for model in (want, local, ours):
            model.reset()
        ours.state = tuple(map(there, ours.state))
        for i in range(3):
            x = values(2, 2, 4, seed=i)
            loss = want(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            same(graphs[0](x), loss)
            same(graphs[1](there(x)), loss)
            for mine in (local.state, ours.state):
                same(mine[1], want.state[1])
    same(local.layer.weight_hh_l0, want.layer.weight_hh_l0)
    same(ours.layer.weight_hh_l0, want.layer.weight_hh_l0)
    assert [g._captures for g in graphs] == [3, 3]


def test_a_state_that_is_set_back() -> None:
    simulate(2, a_state_set_back, Remembers())


def test_tensors_left_in_lists_and_dicts_are_told() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outs: list[Any] = [None]
            self.shown = {"kept": torch.ones(4)}
            self.one = self.other = torch.ones(2)
            self.notes = Notes()

        def forward(self, x: Tensor) -> Tensor:
            self.outs.append(x * 2)
            self.notes.pair = x, x  # type: ignore[assignment]
            self.shown["more"] = x * 3
            self.one = self.one + x[0, :2]  # an in-place write would change the other name too
            return x * 4

    model = Leaves()
    with pytest.warns(UserWarning, match="is given a tensor") as told:
        graph_of(model, lambda m, x: m(x))(torch.randn(3, 4))
    said = [str(w.message).split(" is given")[0] for w in told]
    assert said == ["model.one", "model.outs[1]", "model.shown.more", "model.notes.pair"]
    assert model.outs == [None]
    assert list(model.shown) == ["kept"]
    assert model.one is model.other


def tensors_made_others() -> None:
    """Check that the graph names what it cannot do and leaves the model unchanged, on ranks too."""
    placement = flow.placement("cpu", [0, 1])
    model, free = nn.Linear(4, 4).to_global(placement, B), values(4).to_global(placement, B)
    weight = whole(model.weight).clone()
    x = values(3, 4).float().to_global(placement, B)

    def freed(m: nn.Module, x: Tensor) -> Tensor:
        free.data = free.to_global(sbp=S(0))
        return m(x) + free.float()

    for what, named in (
        ((lambda m, x: m.double()(x.double())), r"model\.weight"),
        (freed, "a tensor from outside"),
    ):
        with pytest.raises(GraphError, match=rf"build\(\) makes {named} another tensor"):
            graph_of(model, what)(x)
        assert model.weight.dtype is torch.float32
        assert free.sbp == (B,)
        same(model.weight, weight)
    same(graph_of(model, lambda m, x: m(x))(x), whole(model(x)))


def test_tensors_made_others() -> None:
    simulate(2, tensors_made_others)


def test_a_graph_holds_no_inputs() -> None:
    model = nn.Linear(4, 4)
    graph, x = graph_of(model, lambda m, x: m(x)), torch.randn(3, 4)
    graph(x)
    kept = weakref.ref(x)
    del x
    assert kept() is None
