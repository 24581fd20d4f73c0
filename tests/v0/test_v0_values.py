"""Tests that jobs on one and two devices give the values of the same network in plain PyTorch. They
cover layers, losses, optimizers, schedules, views, pieces and layouts.

This file has no ``from __future__ import annotations``: some placeholders have the shapes of a
test's arguments.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.jobs import Played, constant, drawn, play, same

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp

DEVICES = pytest.mark.parametrize("devices", [1, 2])
STEPS, BATCH = 5, 8


@pytest.fixture(autouse=True)
def _own_session() -> Iterator[None]:
    flow.clear_default_session()
    yield
    flow.clear_default_session()


def batches() -> list[tuple[Any, Any]]:
    return [
        (drawn(BATCH, 6, seed=i), np.random.RandomState(i).randint(0, 4, BATCH).astype(np.int32))
        for i in range(STEPS)
    ]


START = {
    "hidden-weight": drawn(10, 6) * 0.4,
    "hidden-bias": drawn(10) * 0.1,
    "out-weight": drawn(4, 10) * 0.4,
    "out-bias": drawn(4) * 0.1,
}


def network(x: Any, **options: Any) -> Any:
    hidden = flow.layers.dense(x, 10, activation=flow.math.tanh, name="hidden")
    return flow.layers.dense(hidden, 4, name="out", **options)


def training(
    minimize: Callable[[Any], None], net: Callable[..., Any] = network, config: Any = None
) -> Any:
    @flow.global_function(type="train", function_config=config)
    def train(
        x: tp.Numpy.Placeholder((BATCH, 6)), y: tp.Numpy.Placeholder((BATCH,), dtype=flow.int32)
    ) -> tp.Numpy:
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(y, net(x))
        minimize(loss)
        return loss

    return train


def plain(
    change: Callable[[list[Any], int], None], forward: Any = None
) -> tuple[list[Any], list[Any]]:
    """Train the same network in plain PyTorch and return (losses of each step, parameters).
    ``change(parameters, step)`` updates the parameters by their gradients."""
    parameters = [torch.tensor(v).requires_grad_() for v in START.values()]
    losses = []
    for step, (x, y) in enumerate(batches()):
        a, b, c, d = parameters
        logits = (
            F.linear(torch.tanh(F.linear(torch.tensor(x), a, b)), c, d)
            if forward is None
            else forward(torch.tensor(x), *parameters)
        )
        loss = F.cross_entropy(logits, torch.tensor(y).long(), reduction="none")
        for p in parameters:
            p.grad = None
        loss.mean().backward()
        with torch.no_grad():
            change(parameters, step)
        losses.append(loss.detach().numpy())
    return losses, [p.detach().numpy() for p in parameters]


def by(
    optimizer: Callable[[list[Any]], Any], rate: Callable[[int], float] | None = None
) -> Callable[[list[Any], int], None]:
    """Return a change that a torch optimizer makes."""
    made: list[Any] = []

    def change(parameters: list[Any], step: int) -> None:
        if not made:
            made.append(optimizer(parameters))
        if rate is not None:
            made[0].param_groups[0]["lr"] = rate(step)
        made[0].step()

    return change


def agrees(
    devices: int,
    job: Any,
    change: Callable[[list[Any], int], None],
    forward: Any = None,
    tolerance: float = 1e-6,
) -> Played:
    got = play(devices, [(job, *batch) for batch in batches()], START)
    losses, parameters = plain(change, forward)
    same(got.results, losses, tolerance)
    for name, value in zip(START, parameters, strict=True):
        same(got.variables[name], value, tolerance)
    return got


# --------------------------------------------------------------------------------------- optimizers


@DEVICES
def test_sgd_with_momentum_and_clipping(devices: int) -> None:
    clip = flow.optimizer.grad_clipping.by_global_norm(0.3)
    job = training(
        lambda loss: flow.optimizer.SGD(constant(0.2), momentum=0.9, grad_clipping=clip).minimize(
            loss
        )
    )
    sgd = by(lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9))

    def change(parameters: list[Any], step: int) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        sgd(parameters, step)

    agrees(devices, job, change)


def test_a_falling_rate_goes_into_the_momentum() -> None:
    job = training(
        lambda loss: flow.optimizer.SGD(
            flow.optimizer.ExponentialScheduler(0.2, 2, 0.5), momentum=0.9
        ).minimize(loss)
    )
    velocity: dict[int, Any] = {}

    def change(parameters: list[Any], step: int) -> None:
        for i, p in enumerate(parameters):
            velocity[i] = 0.9 * velocity.get(i, 0.0) + 0.2 * 0.5 ** (step / 2) * p.grad
            p -= velocity[i]

    agrees(2, job, change)


@DEVICES
@pytest.mark.parametrize(
    "warmup",
    [None, flow.optimizer.warmup.linear(3, 0.1), flow.optimizer.warmup.constant(2, 0.5)],
    ids=["none", "linear", "constant"],
)
def test_adam_with_warmup_and_cosine(devices: int, warmup: Any) -> None:
    schedule = flow.optimizer.CosineScheduler(0.05, 4, alpha=0.1, warmup=warmup)
    job = training(
        lambda loss: flow.optimizer.Adam(schedule, do_bias_correction=True).minimize(loss)
    )
    agrees(devices, job, by(lambda ps: torch.optim.Adam(ps), schedule.rate), tolerance=2e-6)


def test_adam_without_correction() -> None:
    job = training(lambda loss: flow.optimizer.Adam(constant(0.01)).minimize(loss))
    m: dict[int, Any] = {}
    v: dict[int, Any] = {}

    def change(parameters: list[Any], step: int) -> None:
        for i, p in enumerate(parameters):
            m[i] = 0.9 * m.get(i, 0.0) + 0.1 * p.grad
            v[i] = 0.999 * v.get(i, 0.0) + 0.001 * p.grad**2
            p -= 0.01 * m[i] / (v[i].sqrt() + 1e-8)

    agrees(2, job, change, tolerance=2e-6)


@DEVICES
def test_adamw_excludes_by_pattern(devices: int) -> None:
    made = lambda loss: flow.optimizer.AdamW(  # noqa: E731
        constant(0.02), do_bias_correction=True, weight_decay=0.1, weight_decay_excludes="bias"
    ).minimize(loss)
    adamw = (  # noqa: E731
        lambda ps: torch.optim.AdamW(
            [{"params": ps[0::2], "weight_decay": 0.1}, {"params": ps[1::2], "weight_decay": 0.0}],
            lr=0.02,
        )
    )
    agrees(devices, training(made), by(adamw), tolerance=2e-6)


def test_sgdw() -> None:
    def change(parameters: list[Any], step: int) -> None:
        for i, p in enumerate(parameters):
            p -= 0.1 * (p.grad + (0.05 if i == 2 else 0.0) * p)

    sgdw = flow.optimizer.SGDW(
        constant(0.1), momentum=0, weight_decay=0.05, weight_decay_includes=["out-weight"]
    )
    agrees(2, training(sgdw.minimize), change)


@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop(centered: bool) -> None:
    square: dict[int, Any] = {}
    mean: dict[int, Any] = {}

    def change(parameters: list[Any], step: int) -> None:
        for i, p in enumerate(parameters):
            square[i] = 0.9 * square.get(i, 0.0) + 0.1 * p.grad**2
            mean[i] = 0.9 * mean.get(i, 0.0) + 0.1 * p.grad
            p -= 0.01 * p.grad / (square[i] - (mean[i] ** 2 if centered else 0.0) + 1e-6).sqrt()

    agrees(
        2,
        training(
            lambda loss: flow.optimizer.RMSProp(constant(0.01), 0.9, 1e-6, centered).minimize(loss)
        ),
        change,
        tolerance=5e-6,
    )


@DEVICES
def test_lars_and_lamb(devices: int) -> None:
    state: dict[int, Any] = {}

    def lars(parameters: list[Any], step: int) -> None:
        for i, p in enumerate(parameters):
            own = 0.5 * 0.1 * p.norm() / (1e-9 + p.grad.norm())
            state[i] = 0.9 * state.get(i, 0.0) + own * p.grad
            p -= state[i]

    agrees(
        devices,
        training(
            lambda loss: flow.optimizer.LARS(constant(0.5), lars_coefficient=0.1).minimize(loss)
        ),
        lars,
    )
    flow.clear_default_session()
    moments: dict[int, Any] = {}

    def lamb(parameters: list[Any], step: int) -> None:
        for i, p in enumerate(parameters):
            m, v = moments.get(i, (0.0, 0.0))
            m, v = moments[i] = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2
            direction = (m / (1 - 0.9 ** (step + 1))) / (
                (v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6
            ) + 0.01 * p
            p -= 0.02 * p.norm() / direction.norm() * direction

    agrees(
        devices,
        training(
            lambda loss: flow.optimizer.LAMB(constant(0.02), weight_decay=0.01).minimize(loss)
        ),
        lamb,
        tolerance=5e-6,
    )


def test_lazy_adam_leaves_untouched_rows() -> None:
    @flow.global_function(type="train")
    def train(ids: tp.Numpy.Placeholder((4,), dtype=flow.int32)) -> tp.Numpy:
        table = flow.get_variable("table", (6, 3), initializer=flow.ones_initializer())
        loss = flow.math.reduce_sum(flow.math.square(flow.gather(table, ids)), axis=1)
        flow.optimizer.LazyAdam(constant(0.1)).minimize(loss)
        return loss

    got = play(
        2, [(train, np.array([0, 1, 1, 2], np.int32)), (train, np.array([0, 0, 0, 0], np.int32))]
    )
    assert (got.variables["table"][3:] == 1).all()
    assert (got.variables["table-m"][3:] == 0).all()
    once = got.variables["table"][1]
    assert (once < 1).all()
    assert (got.variables["table"][0] < once).all()


def test_regularizers() -> None:
    def net(x: Any) -> Any:
        hidden = flow.layers.dense(
            x,
            10,
            activation=flow.math.tanh,
            name="hidden",
            kernel_regularizer=flow.regularizers.l2(0.1),
        )
        return flow.layers.dense(hidden, 4, name="out", bias_regularizer=flow.regularizers.l1(0.05))

    def change(parameters: list[Any], step: int) -> None:
        for i, p in enumerate(parameters):
            p -= 0.1 * (
                p.grad + (0.1 * p if i == 0 else 0.0) + (0.05 * p.sign() if i == 3 else 0.0)
            )

    agrees(
        2,
        training(lambda loss: flow.optimizer.SGD(constant(0.1), momentum=0).minimize(loss), net),
        change,
    )


@DEVICES
@pytest.mark.parametrize(
    "policy",
    [
        flow.optimizer.loss_scale.static_loss_scale(128.0),
        flow.optimizer.loss_scale.dynamic_loss_scale(2.0**10, 2),
    ],
    ids=["static", "dynamic"],
)
@pytest.mark.sweep(2)
def test_loss_scales_change_nothing_finite(devices: int, policy: Any) -> None:
    job = training(
        lambda loss: flow.optimizer.SGD(
            constant(0.1), momentum=0, loss_scale_policy=policy
        ).minimize(loss)
    )
    agrees(devices, job, by(lambda ps: torch.optim.SGD(ps, lr=0.1)))


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.sweep(2)
def test_shared_out_optimizer_state(devices: int) -> None:
    config = flow.function_config()
    config.optimizer_placement_optimization_mode("distributed_split")
    config.optimizer_placement_optimization_threshold(4)
    job = training(
        lambda loss: flow.optimizer.Adam(constant(0.02), do_bias_correction=True).minimize(loss),
        config=config,
    )
    got = agrees(devices, job, by(lambda ps: torch.optim.Adam(ps, lr=0.02)), tolerance=2e-6)
    assert got.variables["hidden-weight-m"].shape == (10, 6)


def test_older_settings() -> None:
    config = flow.function_config()
    config.train.primary_lr(0.1)
    config.train.secondary_lr(0.02)
    config.train.model_update_conf(
        {
            "momentum_conf": {"beta": 0.5},
            "warmup_conf": {"linear_conf": {"warmup_batches": 2, "start_multiplier": 0.5}},
        }
    )
    job = training(flow.losses.add_loss, config=config)
    velocity: dict[int, Any] = {}

    def change(parameters: list[Any], step: int) -> None:
        for i, p in enumerate(parameters):
            rate = (0.02 if i % 2 else 0.1) * min(1.0, 0.5 + 0.25 * step)
            velocity[i] = 0.5 * velocity.get(i, 0.0) + rate * p.grad
            p -= velocity[i]

    agrees(2, job, change)


# ------------------------------------------------------------------------------ layouts, placements


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.sweep(2)
def test_model_parallel(cast: bool) -> None:
    def net(x: Any) -> Any:
        if not cast:
            return network(x, model_distribute=flow.distribute.split(0))
        hidden = flow.layers.dense(
            x,
            10,
            activation=flow.math.tanh,
            name="hidden",
            model_distribute=flow.distribute.split(0),
        )
        hidden = flow.parallel_cast(
            hidden,
            distribute=flow.distribute.broadcast(),
            gradient_distribute=flow.distribute.split(1),
        )
        return flow.layers.dense(hidden, 4, name="out").with_gradient_distribute(
            flow.distribute.broadcast()
        )

    agrees(
        2,
        training(lambda loss: flow.optimizer.SGD(constant(0.1), momentum=0).minimize(loss), net),
        by(lambda ps: torch.optim.SGD(ps, lr=0.1)),
    )


@pytest.mark.parametrize("pieces", [0, 2, 4])
@pytest.mark.sweep(2)
def test_a_pipeline(pieces: int) -> None:
    def net(x: Any) -> Any:
        x = flow.unpack(x, pieces) if pieces else x
        with flow.scope.placement("gpu", "0:0"):
            hidden = flow.layers.dense(x, 10, activation=flow.math.tanh, name="hidden")
        with flow.scope.placement("gpu", "0:1"):
            out = flow.layers.dense(hidden, 4, name="out")
        return flow.pack(out, pieces) if pieces else out

    clip = flow.optimizer.grad_clipping.by_global_norm(0.3)
    job = training(
        lambda loss: flow.optimizer.SGD(constant(0.1), momentum=0, grad_clipping=clip).minimize(
            loss
        ),
        net,
    )

    def change(parameters: list[Any], step: int) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        for p in parameters:
            p -= 0.1 * p.grad

    agrees(2, job, change)


def test_a_loss_in_pieces_and_what_is_repeated() -> None:
    @flow.global_function(type="train")
    def train(
        x: tp.Numpy.Placeholder((BATCH, 6)), y: tp.Numpy.Placeholder((BATCH,), dtype=flow.int32)
    ) -> tp.Tuple[tp.Numpy, tp.Numpy]:
        factor = flow.repeat(
            flow.get_variable("factor", (1,), initializer=flow.ones_initializer()), 2
        )
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(
            flow.unpack(y, 2), network(flow.unpack(x, 2)) * factor
        )
        flow.optimizer.SGD(constant(0.1), momentum=0).minimize(loss)
        return flow.pack(loss, 2), flow.acc(flow.math.reduce_sum(loss), 2)

    got = play(2, [(train, *batch) for batch in batches()], START)
    parameters = [torch.tensor(v).requires_grad_() for v in START.values()] + [
        torch.ones(1, requires_grad=True)
    ]
    for (x, y), (rows, total) in zip(batches(), got.results, strict=True):
        a, b, c, d, factor = parameters
        loss = F.cross_entropy(
            F.linear(torch.tanh(F.linear(torch.tensor(x), a, b)), c, d) * factor,
            torch.tensor(y).long(),
            reduction="none",
        )
        grads = torch.autograd.grad(loss.mean(), parameters)
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                p -= 0.1 * g
        same(rows, loss.detach())
        same(total, loss.detach().sum())
    same(got.variables["factor"], parameters[-1].detach())


def test_wide_placements_and_the_default_placement() -> None:
    config = flow.function_config()
    config.default_placement_scope(flow.scope.placement("gpu", ["0:1", "0:3"]))

    def net(x: Any) -> Any:
        with flow.scope.placement("cpu", "0:0-3"):
            hidden = flow.layers.dense(x, 10, activation=flow.math.tanh, name="hidden")
        return flow.layers.dense(hidden, 4, name="out")

    job = training(
        lambda loss: flow.optimizer.SGD(constant(0.1), momentum=0).minimize(loss), net, config
    )
    agrees(4, job, by(lambda ps: torch.optim.SGD(ps, lr=0.1)))


# -------------------------------------------------------------------------------------------- views


def halves(job_batches: list[tuple[Any, Any]]) -> list[tuple[list[Any], list[Any]]]:
    h = BATCH // 2
    return [([x[:h], x[h:]], [y[:h], y[h:]]) for x, y in job_batches]


def test_the_mirrored_view_with_another_loss() -> None:
    config = flow.function_config()
    config.default_distribute_strategy(flow.distribute.mirrored_strategy())

    @flow.global_function(type="train", function_config=config)
    def train(
        x: tp.ListNumpy.Placeholder((BATCH // 2, 6)),
        y: tp.ListNumpy.Placeholder((BATCH // 2,), dtype=flow.int32),
    ) -> tp.Tuple[tp.ListNumpy, tp.ListListNumpy]:
        assert flow.scope.mirrored_view_enabled()
        logits = network(flow.reshape(x, [x.shape[0], -1]))
        wanted = flow.one_hot(y, 4)
        loss = flow.math.reduce_mean(flow.math.squared_difference(logits, wanted))
        flow.optimizer.Adam(constant(0.02), do_bias_correction=True).minimize(loss)
        return loss, logits

    got = play(2, [(train, *batch) for batch in halves(batches())], START)
    parameters = [torch.tensor(v).requires_grad_() for v in START.values()]
    adam = torch.optim.Adam(parameters, lr=0.02)
    for (x, y), (loss, logits) in zip(batches(), got.results, strict=True):
        a, b, c, d = parameters
        out = F.linear(torch.tanh(F.linear(torch.tensor(x), a, b)), c, d)
        want = F.mse_loss(out, F.one_hot(torch.tensor(y).long(), 4).float())
        adam.zero_grad()
        want.backward()
        adam.step()
        same(np.mean(loss), want.item(), 2e-6)
        assert [len(parts) for parts in logits] == [1, 1]
        same(np.concatenate([parts[0] for parts in logits]), out.detach(), 2e-6)
    for name, value in zip(START, parameters, strict=True):
        same(got.variables[name], value.detach(), 2e-6)


def test_views_within_a_job_and_shared_by_jobs() -> None:
    @flow.global_function()
    def predict(x: tp.Numpy.Placeholder((BATCH, 6))) -> tp.Tuple[tp.Numpy, tp.ListNumpy]:
        logits = network(x)
        with flow.scope.mirrored_view():
            best = flow.math.reduce_max(logits)
        return flow.math.reduce_sum(best * 1.0, axis=0), best

    x = batches()[0][0]
    got = play(2, [(predict, x)], START)
    a, b, c, d = (torch.tensor(v) for v in START.values())
    out = F.linear(torch.tanh(F.linear(torch.tensor(x), a, b)), c, d)
    want = [out[:4].max(), out[4:].max()]
    same(got.results[0][1], want)
    same(got.results[0][0], sum(want))


# --------------------------------------------------------------------------------- jobs and results


def test_jobs_share_variables_and_train_what_they_name() -> None:
    def generator(x: Any, trainable: bool) -> Any:
        return flow.layers.dense(
            x, 6, activation=flow.math.tanh, name="generator", trainable=trainable
        )

    def critic(x: Any, trainable: bool) -> Any:
        return flow.layers.dense(x, 1, name="critic", trainable=trainable)

    @flow.global_function(type="train")
    def train_generator(x: tp.Numpy.Placeholder((4, 3))) -> tp.Numpy:
        loss = flow.math.reduce_mean(critic(generator(x, True), False))
        flow.optimizer.SGD(constant(0.1), momentum=0).minimize(loss)
        return loss

    @flow.global_function(type="train")
    def train_critic(x: tp.Numpy.Placeholder((4, 3))) -> tp.Numpy:
        loss = flow.math.negative(flow.math.reduce_mean(critic(generator(x, False), True)))
        flow.optimizer.SGD(constant(0.1), momentum=0).minimize(loss)
        return loss

    start = {
        "generator-weight": drawn(6, 3),
        "generator-bias": drawn(6),
        "critic-weight": drawn(1, 6),
        "critic-bias": drawn(1),
    }
    x = drawn(4, 3)
    got = play(2, [(train_generator, x), (train_critic, x), (train_generator, x)], start)
    ps = {name: torch.tensor(v).requires_grad_() for name, v in start.items()}
    for i, part in enumerate(("generator", "critic", "generator")):
        out = F.linear(
            torch.tanh(F.linear(torch.tensor(x), ps["generator-weight"], ps["generator-bias"])),
            ps["critic-weight"],
            ps["critic-bias"],
        ).mean()
        loss = -out if part == "critic" else out
        same(got.results[i], loss.detach())
        mine = [p for name, p in ps.items() if name.startswith(part)]
        grads = torch.autograd.grad(loss, mine)
        with torch.no_grad():
            for p, g in zip(mine, grads, strict=True):
                p -= 0.1 * g
    for name, p in ps.items():
        same(got.variables[name], p.detach())


def test_nests_of_results_and_arguments() -> None:
    @flow.global_function()
    def named(
        pair: tp.Tuple[tp.Numpy.Placeholder((2, 2)), tp.Numpy.Placeholder((2,), dtype=flow.int64)],
        z: tp.Numpy.Placeholder(()),
    ) -> tp.Dict[str, tp.Numpy]:
        return {"x": pair[0] + z, "y": pair[1] * 2}

    @flow.global_function()
    def bundled(x: tp.Numpy.Placeholder((2, 2), batch_axis=1)) -> tp.Bundle[tp.Numpy]:
        return {"a": [x, {"b": x * 2}], "c": (1 - x,)}

    @flow.global_function()
    def listed(x: tp.Numpy.Placeholder((2, 2), batch_axis=None)) -> tp.Tuple[tp.Numpy, ...]:
        return x / 2, x**2, -x, abs(x), x @ x if hasattr(x, "__matmul__") else flow.matmul(x, x)

    x = drawn(2, 2)
    got = play(2, [(named, (x, np.array([1, 2])), 3.0), (bundled, x), (listed, x)])
    same(got.results[0]["x"], x + 3)
    assert got.results[0]["y"].tolist() == [2, 4]
    same(got.results[1]["a"][1]["b"], x * 2)
    same(got.results[1]["c"][0], 1 - x)
    for value, want in zip(got.results[2], (x / 2, x**2, -x, abs(x), x @ x), strict=True):
        same(value, want)


def test_variables_by_name_and_namespace() -> None:
    @flow.global_function()
    def job(x: tp.Numpy.Placeholder((4, 3))) -> tp.Numpy:
        with flow.scope.namespace("outer"), flow.scope.namespace("inner"):
            w = flow.get_variable(
                "w",
                (3, 3),
                initializer=flow.random_uniform_initializer(-1, 1),
                distribute=flow.distribute.split(1),
                random_seed=7,
            )
            assert flow.get_variable("w") is not None
            v = flow.get_variable("w", (3, 3))
        return flow.matmul(x, w) + flow.matmul(x, v, transpose_b=True)

    x = drawn(4, 3)
    got = play(2, [(job, x)])
    again = play(1, [(job, x)])
    assert list(got.variables) == ["outer-inner-w"]
    w = got.variables["outer-inner-w"]
    same(again.variables["outer-inner-w"], w, 0)
    assert np.abs(w).max() < 1
    same(got.results[0], x @ w + x @ w.T)


def test_assignments_are_kept() -> None:
    @flow.global_function()
    def count(x: tp.Numpy.Placeholder((2,))) -> tp.Numpy:
        total = flow.get_variable("total", (2,), trainable=False)
        flow.assign(total, total + x)
        return total

    got = play(2, [(count, np.ones(2, np.float32))] * 3)
    assert got.variables["total"].tolist() == [3.0, 3.0]
