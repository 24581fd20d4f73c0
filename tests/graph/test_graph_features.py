"""Tests of the features of graphs that train, and of changes between calls: optimizers, schedules,
gradients read in build(), scalers, precision, state, errors."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bodies import Bodies
from support.pool import run_on
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lr

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import GraphError

B, S = flow.sbp.broadcast, flow.sbp.split
FILE = __file__.rsplit("/", 1)[-1]
bodies = Bodies()


def model_of(seed: int = 0) -> nn.Sequential:
    """Return a model with the same numbers on every rank, from a generator that simulated ranks do
    not share."""
    numbers = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=numbers) * 0.5)
    return model


def batch(step: int, n: int = 4) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    return loss


class Training(flow.nn.Graph):
    def __init__(
        self,
        model: nn.Module,
        *optimizers: Any,
        step: Callable[..., Any] = backward,
        schedule: Any = None,
        scaler: Any = None,
    ) -> None:
        super().__init__()
        self.model, self.step = model, step
        for optimizer in optimizers:
            self.add_optimizer(optimizer, lr_sch=schedule)
        if scaler is not None:
            self.set_grad_scaler(scaler)

    def build(self, x: Tensor) -> Any:
        return self.step(self.model, x)


class Evaluation(flow.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: Tensor) -> Any:
        return self.model(x)


def whole(x: Any) -> Tensor:
    return (
        x.detach().to_global(sbp=[B] * x.placement.axes).to_local() if x.is_global else x.detach()
    )  # type: ignore[no-any-return]


def same(got: Any, want: Tensor, what: str = "") -> None:
    torch.testing.assert_close(
        whole(got), want.detach(), rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}"
    )


def same_parameters(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(p, q, name)


def looped(
    make: Callable[[nn.Module], optim.Optimizer],
    schedule: Any = None,
    step: Callable[..., Any] = backward,
    split: bool = False,
) -> None:
    """Train five steps with a graph and with a plain loop, and compare. ``split``: on two ranks
    with data split."""
    plain, model = model_of(), model_of()
    placement = flow.placement("cpu", [0, 1]) if split else None
    if placement is not None:
        model.to_global(placement, B)  # type: ignore[operator]
    theirs, ours = make(plain), make(model)
    their_schedule, our_schedule = (schedule(theirs), schedule(ours)) if schedule else (None, None)
    graph = Training(model, ours, step=step, schedule=our_schedule)
    for i in range(5):
        theirs.zero_grad()
        want = step(plain, batch(i))
        theirs.step()
        if their_schedule is not None:
            their_schedule.step()
        given = (
            batch(i) if placement is None else batch(i).to_global(placement, B).to_global(sbp=S(0))
        )
        same(graph(given), want, f"loss of step {i}")
    same_parameters(model, plain)


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    name: lambda m, name=name: getattr(optim, name)(m.parameters(), lr=0.01)  # type: ignore[misc]
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "ASGD",
        "Adafactor",
    )
} | {
    "amsgrad": lambda m: optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "groups": lambda m: optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.5}, {"params": m[2].parameters(), "momentum": 0.9}],
        lr=0.1,
    ),  # type: ignore[index]
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda m: optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01)
SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.1, 2), lr.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, 2),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, 1.0, 3),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [1, 3]),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=8),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 4),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, 1.0, 2), lr.ExponentialLR(o, 0.5)], [2]
    ),
    "StepLR": lambda o: lr.StepLR(o, 2, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sweep(2)
def test_every_optimizer(name: str) -> None:
    looped(OPTIMIZERS[name])
    simulate(2, looped, OPTIMIZERS[name], None, backward, True, timeout=30.0)


@pytest.mark.filterwarnings("ignore:.*step.*epoch")
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(name: str) -> None:
    looped(OPTIMIZERS["SGD"], SCHEDULES[name])


# ----------------------------------------------------------------------------- gradients in build()


def clipped_norm(model: nn.Module, x: Tensor) -> Tensor:
    loss = backward(model, x)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return loss


def clipped_values(model: nn.Module, x: Tensor) -> Tensor:
    loss = backward(model, x)
    nn.utils.clip_grad_value_(model.parameters(), 0.001)
    return loss


def edited(model: nn.Module, x: Tensor) -> Tensor:
    loss = backward(model, x)
    weights = list(model.parameters())
    weights[0].grad.mul_(0.5)  # type: ignore[union-attr]
    weights[1].grad = weights[1].grad * 2 + weights[1].detach()  # type: ignore[operator]
    weights[2].grad = None
    assert weights[2].grad is None
    return loss + weights[0].grad.norm()  # type: ignore[no-any-return,union-attr]


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x).square().mean()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    loss: Tensor = out + slope.square().sum()
    loss.backward()
    return loss


def hooked(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.register_hook(lambda grad: grad * 3)
    loss: Tensor = out.square().mean()
    loss.backward()
    return loss


def twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    return loss


@pytest.mark.parametrize("step", [clipped_norm, clipped_values, edited, penalised, hooked, twice])
@pytest.mark.sweep(2)
def test_gradients_in_build(step: Callable[..., Any]) -> None:
    looped(OPTIMIZERS["SGD"], None, step)
    simulate(2, looped, OPTIMIZERS["SGD"], None, step, True, timeout=30.0)


def test_gradients_that_are_not_complete_are_not_read() -> None:
    for scaler, micros in ((flow.amp.StaticGradScaler(8.0), 1), (None, 2)):
        model = model_of()
        graph = Training(
            model, optim.SGD(model.parameters(), lr=0.1), step=clipped_norm, scaler=scaler
        )
        graph.config.set_gradient_accumulation_steps(micros)
        with pytest.raises(GraphError, match="register_step_pre_hook"):
            graph(batch(0))


def test_hooks_of_the_optimizer_see_complete_gradients() -> None:
    plain, model = model_of(), model_of()
    theirs, ours = (optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for optimizer, m in ((theirs, plain), (ours, model)):
        optimizer.register_step_pre_hook(
            lambda *_, m=m: nn.utils.clip_grad_norm_(m.parameters(), 0.01) and None
        )
    graph = Training(model, ours)
    graph.config.set_gradient_accumulation_steps(2)
    for i in range(3):
        theirs.zero_grad()
        want = backward(plain, batch(i))
        theirs.step()
        same(graph(batch(i)), want)
    same_parameters(model, plain)


# ---------------------------------------------------------------------------- scalers and precision


@pytest.mark.parametrize(
    "make",
    [
        lambda: flow.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
        lambda: flow.amp.StaticGradScaler(128.0, "cpu"),
    ],
)
def test_scalers(make: Callable[[], Any]) -> None:
    plain, model, theirs, ours = model_of(), model_of(), make(), make()
    one, two = (optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    graph = Training(model, two, scaler=ours)
    for i in range(4):
        one.zero_grad()
        theirs.scale(loss_of(plain, batch(i))).backward()
        theirs.step(one)
        theirs.update()
        graph(batch(i))
        assert ours.get_scale() == theirs.get_scale()
    same_parameters(model, plain)
    assert ours.get_scale() == (128.0 if isinstance(ours, flow.amp.StaticGradScaler) else 256.0)


def test_a_step_whose_gradients_overflow_is_skipped() -> None:
    model = nn.Linear(4, 2)
    before, scaler = copy.deepcopy(model), flow.amp.StaticGradScaler(1e30, "cpu")
    Training(model, optim.SGD(model.parameters(), lr=0.1), scaler=scaler)(torch.full((4, 4), 1e30))
    same_parameters(model, before)
    assert scaler.get_scale() == pytest.approx(1e30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_autocast(dtype: torch.dtype) -> None:
    plain, model = model_of().float(), model_of().float()
    one, two = (optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    graph = Training(model, two)
    graph.config.enable_amp(True, dtype=dtype)
    for i in range(3):
        one.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            want = loss_of(plain, batch(i).float())
        want.backward()
        one.step()
        same(graph(batch(i).float()), want)
    same_parameters(model, plain)
    evaluation = Evaluation(model)
    evaluation.config.enable_amp(True, dtype=dtype)
    assert evaluation(batch(0).float()).dtype is dtype


# ------------------------------------------------------------------------------------ between calls


def test_what_changes_between_calls_is_seen() -> None:
    plain, model = model_of(), model_of()
    one, two = (optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    graph, evaluation, saved = (
        Training(model, two),
        Evaluation(model),
        copy.deepcopy(plain.state_dict()),
    )

    def step(i: int) -> None:
        one.zero_grad()
        want = backward(plain, batch(i))
        one.step()
        same(graph(batch(i)), want, f"loss {i}")
        same_parameters(model, plain)
        same(evaluation(batch(i)), plain(batch(i)), f"evaluation {i}")

    step(0)
    for m in (plain, model):
        m.load_state_dict(saved)
    step(1)
    with torch.no_grad():
        for m in (plain, model):
            m[0].weight.copy_(torch.ones(8, 4))
            m[2].weight.data = torch.ones(2, 8, dtype=torch.float64)
    step(2)
    for m in (plain, model):
        m[0].weight.requires_grad_(False)
        m[2].bias.requires_grad_(False)
    step(3)
    assert model[0].weight.grad is None
    for m in (plain, model):
        m[0].weight.requires_grad_(True)
    step(4)
    model.load_state_dict(copy.deepcopy(saved), assign=True)  # other parameters
    same(evaluation(batch(0)), model(batch(0)))
    model[0] = nn.Linear(4, 8).double()
    same(evaluation(batch(0)), model(batch(0)))


def test_training_and_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).double()
    graph = Evaluation(model)
    for training in (True, False, True, False):
        graph.model.train(training)
        plain = copy.deepcopy(model)
        torch.manual_seed(2)
        got = graph(batch(0))
        torch.manual_seed(2)
        same(got, plain(batch(0)))
        same(model[2].running_mean, plain[2].running_mean)  # type: ignore[arg-type]
    assert graph._captures == 2


def test_names_count_the_graphs_of_a_class() -> None:
    class Counted(flow.nn.Graph):
        pass

    class AlsoCounted(Counted):
        pass

    assert [graph().name for graph in (Counted, Counted, AlsoCounted, Counted)] == [
        "Counted_0",
        "Counted_1",
        "AlsoCounted_0",
        "Counted_2",
    ]


def test_attributes_of_the_graph() -> None:
    class Scaled(Evaluation):
        factor, table = 2.0, torch.ones(2)

        def build(self, x: Tensor) -> Any:
            return self.model(x) * self.factor + self.table

    model = model_of()
    graph = Scaled(model)
    for factor, table in ((2.0, torch.ones(2)), (3.0, torch.zeros(2)), (3.0, torch.arange(2.0))):
        graph.factor, graph.table = factor, table
        same(graph(batch(0)), model(batch(0)) * factor + table)
    graph.table.add_(1)
    same(graph(batch(0)), model(batch(0)) * 3 + torch.arange(2.0) + 1)


def test_shapes_are_captured_once_and_kept_up_to_a_bound() -> None:
    sizes: list[int] = []

    @flow.nn.Graph.with_dynamic_input_shape(size=2)
    class Counted(Evaluation):
        def build(self, x: Tensor) -> Any:
            sizes.append(len(x))
            return self.model(x)

    class Decorated(Evaluation):  # the form that OneFlow's users write
        @flow.nn.Graph.with_dynamic_input_shape(size=2)
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)

        build = Counted.build

    model = model_of()
    for graph in (Counted(model), Decorated(model)):
        for n in (1, 2, 1, 2, 3, 1, 2):
            same(graph(batch(0, n)), model(batch(0, n)))
        assert sizes == [1, 2, 3, 1, 2]
        assert len(graph._built) == 2
        sizes.clear()


def test_trace() -> None:
    model = model_of()

    class Holds:
        def __init__(self) -> None:
            self.inner = model

        def __call__(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    for function in (lambda x, k=1: model(x) * k, model, Holds()):
        graph = flow.nn.Graph.trace(function)
        same(graph(batch(0)), model(batch(0)))
        model.load_state_dict(model_of(3).state_dict(), assign=True)
        same(graph(batch(0)), model(batch(0)))


@bodies.on(2)
def uneven_micro_batches() -> None:
    placement = flow.placement("cpu", [0, 1])
    for n, micros in ((8, 4), (10, 2), (6, 3), (9, 3), (5, 5)):
        plain, model = model_of(), model_of().to_global(placement, B)  # type: ignore[operator]
        one, two = (optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
        graph = Training(model, two)
        graph.config.set_gradient_accumulation_steps(micros)
        for i in range(2):
            one.zero_grad()
            want = backward(plain, batch(i, n))
            one.step()
            same(
                graph(batch(i, n).to_global(placement, B).to_global(sbp=S(0))),
                want,
                f"{n} in {micros}",
            )
        same_parameters(model, plain)


@bodies.on(2)
def models_that_move() -> None:
    both, last = flow.placement("cpu", [0, 1]), flow.placement("cpu", [1])
    model, plain = model_of().to_global(both, B), model_of()  # type: ignore[operator]
    graph, want = Evaluation(model), plain(batch(0))
    same(graph(batch(0).to_global(both, B)), want)
    model.to_global(both, S(0))
    same(graph(batch(0).to_global(both, B)), want)
    model.to_global(last, B)
    out = graph(batch(0).to_global(both, B).to_global(last, B))
    assert out.placement == last
    same(out.to_global(both, B), want)


@bodies.on(3)
def some_of_the_ranks() -> None:
    two, all_ = flow.placement("cpu", [1, 2]), flow.placement("cpu", [0, 1, 2])
    plain, model = model_of(), model_of().to_global(two, B)  # type: ignore[operator]
    one, other = (optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model))
    graph = Training(model, other)
    for i in range(3):
        one.zero_grad()
        want = backward(plain, batch(i, 5))
        one.step()
        got = graph(batch(i, 5).to_global(all_, B).to_global(two, S(0)))
        assert got.placement == two
        same(got.to_global(all_, B), want)


@bodies.on(2)
def a_step_that_fails() -> None:
    placement = flow.placement("cpu", [0, 1])
    plain, model = model_of(), model_of().to_global(placement, B)  # type: ignore[operator]
    one, two = (optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    graph = Training(model, two)
    for i in range(3):
        one.zero_grad()
        want = backward(plain, batch(i))
        one.step()
        given = batch(i).to_global(placement, B).to_global(sbp=S(0))
        if i == 1:
            broken = model[0].weight._local.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                graph(given)
            broken.remove()
            assert torch.is_grad_enabled()
        same(graph(given), want)
    same_parameters(model, plain)


def into_other_placements(folder: Path, called: bool) -> None:
    placement = flow.placement("cpu", [0, 1])

    def graph_of(seed: int, sbp: Any) -> tuple[nn.Module, Training]:
        model = model_of(seed).to_global(placement, sbp)  # type: ignore[operator]
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        return model, Training(model, optimizer, schedule=lr.StepLR(optimizer, 2, 0.5))

    plain = model_of()
    one = optim.AdamW(plain.parameters(), lr=0.1)
    schedule = lr.StepLR(one, 2, 0.5)

    def step(graph: Training, i: int) -> None:
        one.zero_grad()
        want = backward(plain, batch(i))
        one.step()
        schedule.step()
        same(graph(batch(i).to_global(placement, B)), want, f"loss {i}")

    _, first = graph_of(0, B)
    for i in range(3):
        step(first, i)
    path = folder / f"{world().rank} {called}"
    torch.save(first.state_dict(), path)
    model, second = graph_of(1, S(0))
    if called:
        second(batch(9).to_global(placement, B))
    second.load_state_dict(torch.load(path, weights_only=False))
    for i in range(3, 6):
        step(second, i)
    same_parameters(model, plain)
    assert all(p.sbp == (S(0),) for p in model.parameters())
    assert second.state_dict()["System-Train-TrainStep"] == 6


@pytest.mark.parametrize("called", [False, True])
def test_state_goes_into_graphs_that_lie_otherwise(tmp_path: Path, called: bool) -> None:
    simulate(2, into_other_placements, tmp_path, called, timeout=30.0)


def test_uneven_micro_batches() -> None:
    uneven_micro_batches()


def test_models_that_move() -> None:
    models_that_move()


def test_some_of_the_ranks() -> None:
    some_of_the_ranks()


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    a_step_that_fails()


@pytest.mark.parametrize("level", range(-1, 4))
def test_debug_goes_through_logging(
    level: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = Evaluation(model_of())
    graph.debug(level, op_repr_with_py_stack=True)
    with caplog.at_level(logging.DEBUG):
        graph(batch(0))
    text = caplog.text
    assert ["captured" in text, "MODULE" in text, "tanh" in text, "def forward" in text] == [
        level >= 0,
        level >= 1,
        level >= 1,
        level >= 3,
    ]
    assert capsys.readouterr().out == ""
    assert "(MODULE:model:Sequential)" in repr(graph)


# ------------------------------------------------------------------------------------------- errors


def again(model: nn.Module, x: Tensor) -> Tensor:
    loss = backward(model, x)
    loss.backward()
    return loss


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "twice": (again, rf"twice.*\n.*{FILE}:"),
    "no backward": (loss_of, "calls no backward"),
    "no scalar": (lambda m, x: m(x).backward(), "only for scalar"),
    "nothing to derive": (lambda m, x: x.sum().backward(), rf"does not require grad\n.*{FILE}"),
    "create_graph": (lambda m, x: loss_of(m, x).backward(create_graph=True), "create_graph"),
    "retain_grad": (lambda m, x: m(x).retain_grad(), rf"retain_grad.*\n.*{FILE}"),
    "a branch": (lambda m, x: backward(m, x) if loss_of(m, x) > 0 else None, FILE),
    "a float": (lambda m, x: float(backward(m, x)), FILE),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_build_must_not_do(what: str) -> None:
    model = model_of()
    step, says = WRONG[what]
    with pytest.raises((GraphError, RuntimeError), match=says):
        Training(model, optim.SGD(model.parameters(), lr=0.1), step=step)(batch(0))


def test_gradients_in_a_graph_without_an_optimizer() -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.square().sum(), x)[0]

    def recorded(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return slope(x.detach().requires_grad_())

    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(GraphError, match=rf"enable_grad.*\n.*{FILE}"):
        flow.nn.Graph.trace(slope)(x)
    assert torch.equal(flow.nn.Graph.trace(recorded)(x), slope(x))


def test_what_a_graph_must_not_be_given() -> None:
    model, other = model_of(), model_of()

    class Early(flow.nn.Graph):
        def __init__(self) -> None:
            self.model = model

    with pytest.raises(GraphError, match=r"super\(\).__init__"):
        Early()
    with pytest.raises(GraphError, match="has no build"):
        flow.nn.Graph()(batch(0))
    inner = Evaluation(model)
    with pytest.raises(GraphError, match="another graph"):
        Evaluation(inner)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="another graph"):
        flow.nn.Graph.trace(lambda x: inner(x))(batch(0))
    with pytest.raises(GraphError, match="does not hold"):
        Training(model, optim.SGD(other.parameters(), lr=0.1))(batch(0))
    with pytest.raises(GraphError, match="closure"):
        Training(model, optim.LBFGS(model.parameters()))
    with pytest.raises(GraphError, match="got int"):
        Training(model, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GraphError, match="metric"):
        Training(model, optimizer, schedule=lr.ReduceLROnPlateau(optimizer))
    with pytest.raises(GraphError, match="add_optimizer"):
        inner.optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GraphError, match="can be compared"):
        flow.nn.Graph.trace(lambda x, y: x)(batch(0), {1, 2})
    with pytest.raises(GraphError, match="until it has an optimizer"):
        flow.nn.Graph.trace(lambda x: loss_of(model, x).backward())(batch(0))
    model[2].register_full_backward_hook(lambda module, given, got: None)
    with pytest.raises(GraphError, match=r"model\.2 has backward hooks"):
        Training(model, optim.SGD(model.parameters(), lr=0.1))(batch(0))


def test_outputs_are_detached() -> None:
    model = model_of()
    graph = Training(
        model,
        optim.SGD(model.parameters(), lr=0.1),
        step=lambda m, x: (backward(m, x), m(x), m[0].weight),
    )
    assert not any(t.requires_grad for t in graph(batch(0)))


def on_two() -> None:
    bodies.run()


def test_on_real_processes() -> None:
    run_on(2, on_two)


def test_settings_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own test helpers, which other tests import, forbid such settings for the rest of the
    # process.
    monkeypatch.setitem(
        torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True
    )
    model = model_of()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    graph, plain = Training(model, optimizer), model_of()
    one, before = (
        optim.AdamW(plain.parameters(), lr=0.1, fused=False),
        torch.backends.cudnn.benchmark,
    )
    for fused in (False, True):
        graph.config.allow_fuse_model_update_ops(fused)
        graph.config.enable_cudnn_conv_heuristic_search_algo(fused)
        one.zero_grad()
        want = backward(plain, batch(0))
        one.step()
        same(graph(batch(0)), want)
        assert optimizer.param_groups[0]["fused"] is (None if fused else False)
        assert torch.backends.cudnn.benchmark is not fused
    torch.backends.cudnn.benchmark = before


def sgd_of(model: nn.Module) -> optim.SGD:
    return optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            lambda g: setattr(g.config, "enable_amp", True),
            r"config.enable_amp cannot be set: call config.enable_amp\(...\)",
        ),
        (
            lambda g: setattr(g.config, "enable_aMP", True),
            "config.enable_aMP cannot be set: there are .*enable_amp, .*set_schedule",
        ),
        (
            lambda g: g.config.use_auto_plan("plan.json"),
            r"use_auto_plan takes a plan, made by flow.auto.plan.* got 'plan.json'",
        ),
        (
            lambda g: g.add_optimizer(sgd_of(g.model), lr_sch=0.5),
            "lr_sch is a scheduler of torch.optim.lr_scheduler, or a list of them, got 0.5",
        ),
        (
            lambda g: g.add_optimizer(sgd_of(g.model), lr_sch=lr.StepLR(sgd_of(g.model), 1)),
            "lr_sch, a StepLR, was made for another optimizer",
        ),
        (
            lambda g: g.add_optimizer(g._optimizers[0].optimizer),
            "this SGD is added already: it would step twice",
        ),
        (lambda g: g.debug(4), r"v_level is -1 \(nothing\), 0, 1, 2 or 3 \(all\), got 4"),
        (
            lambda g: g.debug(1, ranks="0"),
            "ranks is a rank, a list of them, -1 for all or None for rank 0, got '0'",
        ),
        (
            lambda g: g.set_grad_scaler(128.0),
            r"flow.amp.GradScaler\(...\), StaticGradScaler\(scale\) or None, got 128.0",
        ),
        (lambda g: flow.nn.Graph.trace(5), "a function or a module .* got 5"),  # type: ignore[arg-type]
        (
            lambda g: flow.nn.Graph.with_dynamic_input_shape(size=0),
            "size is a number of shapes, at least 1, got 0",
        ),
    ],
    ids=[
        "method set",
        "no setting",
        "no plan",
        "no scheduler",
        "another's scheduler",
        "twice",
        "no level",
        "no rank",
        "no scaler",
        "no function",
        "no size",
    ],
)
def test_settings_that_would_be_lost_are_told(
    wrong: Callable[[Training], object], says: str
) -> None:
    model = model_of()
    graph = Training(model, sgd_of(model))
    with pytest.raises(GraphError, match=says):
        wrong(graph)


def test_a_scale_that_would_lose_the_loss_is_refused() -> None:
    with pytest.raises(flow.errors.GlobalTensorError, match="a number above 0, got 0"):
        flow.amp.StaticGradScaler(0)


def test_a_misspelt_setting_of_a_module_is_told() -> None:
    graph = Training(model_of())
    graph.model.to(flow.nn.graph.GraphModule).activation_checkpointing = True
    with pytest.raises(AttributeError, match="activation_checkpoint"):
        graph.model.to(flow.nn.graph.GraphModule).activation_checkpoint = True


def test_modules_of_a_module_are_found_as_they_are_of_any_module() -> None:
    """Submodules of a graph's module are found like those of any module: by iteration, by name or
    by index. A setting made on a submodule found in any of these ways counts."""
    kind = flow.nn.graph.GraphModule
    parts = nn.ModuleDict(
        {"first": nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "second": nn.Linear(4, 2)}
    )
    for walk in (
        lambda m: m.children(),
        lambda m: dict(m.named_children()).values(),
        lambda m: m.values(),
        lambda m: dict(m.items()).values(),
        lambda m: list(m.modules())[1:],
        lambda m: [part for name, part in m.named_modules(remove_duplicate=False) if name],
        lambda m: [m[name] for name in m],
    ):
        graph = Evaluation(parts)
        for part in walk(graph.model):
            part.to(kind).activation_checkpointing = True
        said = [graph.model["first"], graph.model["second"]]
        assert all(part.to(kind).activation_checkpointing for part in said)
        assert said[0] == parts["first"]
        assert len({*said, parts["first"], parts["second"]}) == 2

    class Own(nn.Module):
        def values(self) -> int:
            return 3

    assert Evaluation(Own()).model.values() == 3
    with pytest.raises(
        flow.errors.RenamedError, match=r"\.to\(nn.graph.GraphModule\), which has set_stage"
    ):
        Evaluation(parts).model["first"].config.stage_id = 0  # OneFlow's form


def test_modules_of_a_graph_make_another() -> None:
    class Two(Evaluation):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4))
            self.head = nn.Linear(4, 2)
            self.both = nn.Sequential(self.model, nn.Sequential(nn.Tanh(), self.head))
            self.model.head, self.both[1][0] = self.head, nn.Sigmoid()
            self.head.to(flow.nn.graph.GraphModule).activation_checkpointing = True

        def build(self, x: Tensor) -> Any:
            return self.both(x)

    graph = Two()
    x = torch.randn(3, 4)
    same(graph(x), graph.head(torch.sigmoid(graph.model(x))))
    held = graph.both.to(nn.Module)
    assert type(held[0]) is type(held[1][1]) is type(held[0].head) is nn.Linear
    del graph.both[1]
    same(graph.both(x), graph.model(x))


def test_a_graph_is_saved_by_its_state() -> None:
    graph = Evaluation(model_of())
    for copied in (copy.deepcopy, lambda g: torch.save(g, io.BytesIO())):
        with pytest.raises(
            GraphError,
            match=(
                r"Evaluation_\d+ cannot be saved, pickled or copied: .* Save "
                r"graph.state_dict\(\)"
            ),
        ):
            copied(graph)


def test_a_state_of_another_graph_is_told_before_any_of_it_is_taken() -> None:
    def training(*parts: str, schedules: int = 0, optimizers: int = 1) -> Training:
        model = model_of()
        each = [sgd_of(model) for _ in range(optimizers)]
        graph = Training(model)
        for one in each:
            graph.add_optimizer(one, lr_sch=[lr.StepLR(one, 1) for _ in range(schedules)])
        for part in parts:
            setattr(graph, part, nn.Linear(1, 1))
        return graph

    evaluation = Evaluation(model_of())
    states = {
        "evaluation": evaluation.state_dict(),
        "none": training("head").state_dict(),
        "more": training(schedules=2).state_dict(),
    }
    for graph, state, says in (
        (
            training(),
            "evaluation",
            (
                r"the state has no entry for optimizers, lr_schedulers \(it has model, rng\): pass "
                r"strict=False"
            ),
        ),
        (training("head", "tail"), "none", "the state has no entry for tail"),
        (
            training(),
            "none",
            "the state has head, which the graph does not have: pass strict=False",
        ),
        (
            training(schedules=1),
            "more",
            r"the state is of 1 optimizers with \[2\] schedulers, the graph has 1 with \[1\]",
        ),
        (
            training(schedules=2, optimizers=2),
            "more",
            r"the state is of 1 optimizers with \[2\] schedulers, the graph has 2 with \[2, 2\]",
        ),
    ):
        before = copy.deepcopy(graph.model.state_dict())
        with pytest.raises(RuntimeError, match=says):
            graph.load_state_dict(states[state])
        assert all(torch.equal(v, before[k]) for k, v in graph.model.state_dict().items())
        graph.load_state_dict(states[state], strict=False)
        assert all(
            torch.equal(v, states[state]["model"][k]) for k, v in graph.model.state_dict().items()
        )
    evaluation.load_state_dict(states["more"])  # entries for untrained parts are ignored
    assert all(
        torch.equal(v, states["more"]["model"][k]) for k, v in evaluation.model.state_dict().items()
    )


def test_lines_of_code_in_the_graph_that_is_printed() -> None:
    graph = Evaluation(model_of())
    graph(batch(0))
    assert "test_graph_features.py" not in repr(graph)
    graph.debug(-1, op_repr_with_py_stack=True)
    assert f"{__file__}:{Evaluation.build.__code__.co_firstlineno + 1})" in repr(graph)


def test_hooks_and_functions_of_modules_are_those_of_the_call() -> None:
    def on_ranks() -> None:
        where = flow.placement.all("cpu")
        layer = flow.parallelize(nn.Linear(6, 3), where, "data")
        x: Any = flow.randn(8, 6, placement=where, sbp=S(0))
        graph = flow.nn.Graph.trace(lambda x: layer(x))
        before, built = graph(x).numpy(force=True), len(graph._built)
        hook = layer.register_forward_hook(lambda module, given, out: out * 100)
        assert (graph(x).numpy(force=True) == before * 100).all()
        hook.remove()
        assert (graph(x).numpy(force=True) == before).all()
        assert len(graph._built) == built + 1  # the first program serves again
        hook = layer.register_forward_pre_hook(lambda module, given: (given[0] * 0,))
        assert (graph(x).numpy(force=True) != before).any()
        hook.remove()
        plain = layer.forward
        layer.forward = lambda x: plain(x) * 7  # type: ignore[method-assign]
        assert (graph(x).numpy(force=True) == before * 7).all()

    simulate(2, on_ranks)
