"""Tests of less common jobs: mixed precision, older forms, chosen variables, mirrored convolutions,
pieces of pieces, uneven batches."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import constant, drawn, play, same

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp
from globaltensor.v0.blob import apply
from globaltensor.v0.math import _reduced
from globaltensor.v0.session.device_layout import Layout

DEVICES = pytest.mark.parametrize("devices", [1, 2])


@pytest.fixture(autouse=True)
def _own_session() -> Iterator[None]:
    flow.clear_default_session()
    yield
    flow.clear_default_session()


@DEVICES
def test_mixed_precision_with_a_growing_scale(devices: int) -> None:
    config = flow.function_config()
    config.enable_auto_mixed_precision(True)

    @flow.global_function(type="train", function_config=config)
    def train(x: tp.Numpy.Placeholder((8, 6))) -> tp.Tuple[tp.Numpy, tp.Numpy]:
        out = flow.layers.dense(x, 5, kernel_initializer=flow.truncated_normal(0.5), name="d")
        loss = flow.math.reduce_sum(flow.math.square(out), axis=1)
        flow.optimizer.Adam(
            constant(0.01), loss_scale_policy=flow.optimizer.loss_scale.dynamic_loss_scale(2.0**8)
        ).minimize(loss)
        return loss, out

    got = play(devices, [(train, drawn(8, 6))] * 5)
    assert got.results[-1][0].mean() < got.results[0][0].mean()
    assert got.results[0][1].dtype == np.float32, (
        "bfloat16 has no dtype of NumPy's: it comes out as float32"
    )
    assert got.variables["d-weight"].dtype == np.float32


def test_the_older_decorator() -> None:
    config = flow.function_config()
    config.train.primary_lr(0.1)
    config.train.model_update_conf({"naive_conf": {}})

    @flow.global_function(config)
    def train(x: tp.Numpy.Placeholder((8, 6))) -> tp.Numpy:
        loss = flow.math.reduce_mean(flow.layers.dense(x, 5, name="d"))
        flow.losses.add_loss(loss)
        return loss

    got = play(2, [(train, drawn(8, 6))] * 2)
    same(got.variables["d-bias"], np.full(5, -0.04, np.float32))
    assert got.results[1] < got.results[0]


def test_an_optimizer_of_some_variables_and_several_losses() -> None:
    @flow.global_function(type="train")
    def train(x: tp.Numpy.Placeholder((8, 6))) -> tp.Numpy:
        loss = flow.math.reduce_mean(
            flow.layers.dense(x, 5, name="d", kernel_initializer=flow.ones_initializer())
        )
        flow.optimizer.SGD(constant(0.1), momentum=0, variables=["d-bias"]).minimize([loss, loss])
        return loss

    got = play(2, [(train, drawn(8, 6))] * 2)
    assert (got.variables["d-weight"] == 1).all()
    same(got.variables["d-bias"], np.full(5, -0.08, np.float32))


@DEVICES
def test_convolutions_in_the_mirrored_view(devices: int) -> None:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())

    @flow.global_function(type="train", function_config=config)
    def train(
        x: tp.ListNumpy.Placeholder((2, 3, 8, 8)),
        y: tp.ListNumpy.Placeholder((2,), dtype=flow.int32),
    ) -> tp.ListNumpy:
        with flow.scope.placement("gpu", f"0:0-{devices - 1}"):
            convolved = flow.layers.conv2d(
                x, 4, 3, padding="SAME", activation=flow.nn.relu, name="c"
            )
        hidden = flow.nn.dropout(flow.nn.max_pool2d(convolved, 2, 2, "VALID"), 0.3)
        flat = flow.reshape(hidden, (hidden.shape[0], -1))
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(
            y, flow.layers.dense(flat, 5, name="d")
        )
        clip = flow.optimizer.grad_clipping.by_global_norm(1.0)
        flow.optimizer.SGD(constant(0.1), grad_clipping=clip).minimize(loss)
        return loss

    xs, ys = (
        [drawn(2, 3, 8, 8, seed=i) for i in range(devices)],
        [np.array([1, 2], np.int32)] * devices,
    )
    got = play(devices, [(train, xs, ys)] * 8)
    assert np.mean(got.results[-1]) < np.mean(got.results[0])


def test_lists_of_lists_and_functions_of_torch() -> None:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())

    @flow.global_function(function_config=config)
    def summed(x: tp.ListListNumpy.Placeholder((4, 3))) -> tp.ListListNumpy:
        return flow.unpack(torch.cumsum(x, 1), 2)

    x = drawn(8, 3)
    found = play(2, [(summed, [[x[:1], x[1:4]], [x[4:6], x[6:]]])]).results[0]
    same(np.concatenate([np.concatenate(pieces) for pieces in found]), np.cumsum(x, 1))
    assert [[piece.shape for piece in pieces] for pieces in found] == [[(2, 3), (2, 3)]] * 2


def test_pieces_that_are_no_lists_of_arrays() -> None:
    @flow.global_function()
    def job(y: tp.ListListNumpy.Placeholder((2,), dtype=flow.int32)) -> tp.ListNumpy:
        return y

    y = np.zeros(2, np.int32)
    for match, given in [
        (
            (
                r"y of device 0 is ListListNumpy: a list of one or more arrays is wanted.*got a "
                r"ndarray"
            ),
            [y, y],
        ),
        ("y of device 1 is ListListNumpy: .*got an empty one", [[y], []]),
        (
            r"y of device 0: pieces of shapes \[2\], \[2, 1\] do not make one array",
            [[y, y[:, None]], [y]],
        ),
    ]:
        with pytest.raises(flow.JobError, match=match):
            play(2, [(job, given)])


def test_a_view_within_a_job_holds_for_all_ops() -> None:
    """A view set within a job holds for all ops, dropout and pieces included. In the mirrored view
    each device has its own rows."""

    @flow.global_function(type="train")
    def job(x: tp.Numpy.Placeholder((4, 2))) -> tp.Tuple[tp.ListNumpy, tp.ListNumpy, tp.Numpy]:
        assert not flow.scope.mirrored_view_enabled()
        loss = flow.math.reduce_mean(x * flow.get_variable("w", (4, 2)))
        flow.optimizer.SGD(constant(0.0)).minimize(loss)
        with flow.scope.mirrored_view():
            dropped = flow.nn.relu(flow.nn.dropout(x, 0.5))
            packed = flow.pack(flow.unpack(x, 2), 2)
            assert packed.shape == dropped.shape == (2, 2)
            here = flow.nn.dropout(x * 1, 0.5)
        with flow.scope.consistent_view():
            return dropped, packed, flow.nn.relu(here)

    x = 1 + np.arange(8, dtype=np.float32).reshape(4, 2)
    dropped, packed, joined = play(2, [(job, x)]).results[0]
    same(np.concatenate(packed), x)
    for found in (np.concatenate(dropped), joined):
        assert ((found == 0) | (found == 2 * x)).all()


def test_the_view_of_a_job_is_seen_in_it() -> None:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())

    @flow.global_function(function_config=config)
    def job(x: tp.Numpy.Placeholder((4, 2))) -> tp.Tuple[tp.ListNumpy, tp.Numpy]:
        assert flow.scope.mirrored_view_enabled()
        with flow.scope.consistent_view():
            assert flow.scope.consistent_view_enabled()
            whole = flow.nn.relu(x)
        return flow.repeat(whole, 1), whole

    assert flow.scope.consistent_view_enabled()
    (mine, whole) = play(2, [(job, drawn(4, 2))]).results[0]
    same(np.concatenate(mine), whole)


def test_a_record_is_the_same_in_every_process() -> None:
    """A job's record is the same in every process. Machines compare their records, although
    functions have other addresses in each process."""

    def digest() -> str:
        def mean(x: Any, axis: Any, keepdims: bool) -> Any:
            return torch.mean(x, axis, keepdims)

        @flow.global_function()
        def job(x: tp.Numpy.Placeholder((4, 2))) -> tp.Numpy:
            return apply(
                _reduced, flow.math.reduce_max(x, axis=1, keepdims=True), mean, (0,), False
            )

        flow.clear_default_session()
        kept.append(mean)  # keep the first function alive, so that the second gets another address
        record = job.recorded(Layout(1, 1))
        assert " at 0x" not in "".join(record.lines())
        return record.digest()

    kept: list[Any] = []
    assert digest() == digest()


@DEVICES
def test_two_jobs_that_train_one_variable_keep_a_state_each(devices: int) -> None:
    def training(name: str, beta: float, **options: Any) -> Any:
        def job(x: tp.Numpy.Placeholder((4,))) -> tp.Numpy:
            loss = x * flow.get_variable("w", (4,))
            flow.optimizer.SGD(constant(0.1), momentum=beta, **options).minimize(loss)
            return loss

        job.__name__ = name
        return flow.global_function(type="train")(job)

    scale = flow.optimizer.loss_scale.dynamic_loss_scale(4.0, 2)
    first, second = training("first", 0.9), training("second", 0.5, loss_scale_policy=scale)
    x = np.ones(4, np.float32)
    calls = [(first, x), (second, x), (second, 2 * x), (second, x)]
    got = play(devices, calls)
    assert sorted(got.variables) == sorted(
        [
            "w",
            "w-momentum",
            "second-w-momentum",
            "System-Train-TrainStep-first",
            "System-Train-TrainStep-second",
            "System-Train-LossScale-second",
        ]
    )
    same(got.variables["w-momentum"], np.full(4, -0.025))
    assert got.variables["System-Train-LossScale-second"].tolist() == [8.0, 1.0], (
        "twice as large after two steps, and one step since"
    )
    flow.clear_default_session()
    whole = play(devices, [*calls, *calls], more=[first, second])
    again = play(devices, calls, got.variables, more=[first, second])
    for name, value in whole.variables.items():
        same(again.variables[name], value)


def test_batches_and_units_that_do_not_divide() -> None:
    @flow.global_function(type="train")
    def train(x: tp.Numpy.Placeholder((7, 6))) -> tp.Numpy:
        split = flow.distribute.split(0)
        loss = flow.math.square(
            flow.layers.dense(
                x, 5, name="d", kernel_initializer=flow.ones_initializer(), model_distribute=split
            )
        )
        flow.optimizer.SGD(constant(0.1), momentum=0).minimize(loss)
        return loss

    one, three = (play(n, [(train, drawn(7, 6))] * 3) for n in (1, 3))
    for a, b in zip(one.results, three.results, strict=True):
        same(a, b)

    @flow.global_function()
    def elsewhere(x: tp.Numpy.Placeholder((4, 2))) -> tp.Numpy:
        with flow.scope.placement("cpu", "0:1-2"):
            doubled = x + x
        return flow.math.reduce_mean(doubled, axis=0) * 2

    same(play(3, [(elsewhere, np.ones((4, 2), np.float32))]).results[0], [4, 4])
