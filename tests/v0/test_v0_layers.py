"""Tests of layers and ops of jobs on one and two devices: values and gradients equal those of plain
PyTorch.

This file has no ``from __future__ import annotations``: placeholders have the shapes of a test's
arguments.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.jobs import constant, drawn, play, same

import globaltensor.v0 as flow
import globaltensor.v0.typing as tp

DEVICES = pytest.mark.parametrize("devices", [1, 2])


@pytest.fixture(autouse=True)
def _own_session() -> Iterator[None]:
    flow.clear_default_session()
    yield
    flow.clear_default_session()


def layer(
    devices: int,
    shape: tuple[int, ...],
    build: Callable[[Any], Any],
    values: dict[str, Any],
    want: Callable[..., Any],
    tolerance: float = 1e-5,
) -> None:
    """Compare a layer's values, and the gradients of its variables and input, with plain
    PyTorch."""

    @flow.global_function(type="train")
    def train(x: tp.Numpy.Placeholder(shape)) -> tp.Numpy:
        offset = flow.get_variable("offset", shape)
        out = build(x + offset)
        flow.optimizer.SGD(constant(1.0), momentum=0).minimize(
            flow.math.reduce_sum(out * flow.math.sin(out))
        )
        return out

    x = drawn(*shape)
    got = play(devices, [(train, x)], values)
    ps = {
        name: torch.tensor(v).requires_grad_()
        for name, v in {"offset": np.zeros(shape, np.float32), **values}.items()
    }
    out = want(torch.tensor(x) + ps["offset"], *[p for name, p in ps.items() if name != "offset"])
    same(got.results[0], out.detach(), tolerance)
    (out * out.sin()).sum().backward()
    for name, p in ps.items():
        same(got.variables[name], (p - p.grad).detach(), tolerance)


@DEVICES
def test_conv1d(devices: int) -> None:
    build = lambda x: flow.layers.conv1d(x, 4, 3, strides=2, padding="SAME", name="c")  # noqa: E731
    want = lambda x, w, b: F.conv1d(F.pad(x, (1, 0)), w, b, stride=2)  # noqa: E731 - 10 wide, so one more place, before
    layer(devices, (4, 3, 10), build, {"c-weight": drawn(4, 3, 3), "c-bias": drawn(4)}, want)


@DEVICES
def test_conv2d_with_groups_and_channels_last(devices: int) -> None:
    build = lambda x: flow.layers.conv2d(  # noqa: E731
        x, 6, 3, padding="SAME", dilation_rate=2, groups=2, use_bias=False, name="c"
    )
    layer(
        devices,
        (4, 4, 7, 7),
        build,
        {"c-weight": drawn(6, 2, 3, 3)},
        lambda x, w: F.conv2d(x, w, padding=2, dilation=2, groups=2),
    )
    flow.clear_default_session()
    build = lambda x: flow.layers.conv2d(x, 5, (3, 2), data_format="NHWC", name="c")  # noqa: E731
    want = lambda x, w, b: F.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), b).permute(  # noqa: E731
        0, 2, 3, 1
    )
    layer(devices, (4, 6, 5, 3), build, {"c-weight": drawn(5, 3, 2, 3), "c-bias": drawn(5)}, want)


@DEVICES
def test_conv3d(devices: int) -> None:
    build = lambda x: flow.layers.conv3d(  # noqa: E731
        x, 3, 2, padding=[[0, 0], [0, 0], [1, 1], [0, 1], [1, 0]], name="c"
    )
    want = lambda x, w, b: F.conv3d(F.pad(x, (1, 0, 0, 1, 1, 1)), w, b)  # noqa: E731
    layer(
        devices,
        (2, 2, 3, 4, 4),
        build,
        {"c-weight": drawn(3, 2, 2, 2, 2), "c-bias": drawn(3)},
        want,
    )


@DEVICES
def test_pooling(devices: int) -> None:
    layer(
        devices,
        (4, 2, 7, 7),
        lambda x: flow.nn.max_pool2d(x, 2, 2, "SAME"),
        {},
        lambda x: F.max_pool2d(F.pad(x, (1, 0, 1, 0), value=-1e9), 2),
    )
    flow.clear_default_session()
    layer(
        devices,
        (4, 2, 7, 7),
        lambda x: flow.nn.max_pool2d(x, 3, 2, "VALID", ceil_mode=True),
        {},
        lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    )
    flow.clear_default_session()
    layer(
        devices,
        (4, 2, 8),
        lambda x: flow.nn.avg_pool1d(x, 3, 1, "SAME"),
        {},
        lambda x: F.avg_pool1d(x, 3, 1, 1, count_include_pad=False),
    )


@DEVICES
def test_layer_norm(devices: int) -> None:
    values = {"n-beta": drawn(5), "n-gamma": drawn(5)}
    build = lambda x: flow.layers.layer_norm(x, begin_norm_axis=1, name="n")  # noqa: E731
    layer(devices, (4, 3, 5), build, values, lambda x, b, g: F.layer_norm(x, [3, 5]) * g + b)


@DEVICES
def test_batch_normalization_and_its_moving_values(devices: int) -> None:
    values = {"b-beta": drawn(3), "b-gamma": drawn(3)}
    build = lambda x: flow.layers.batch_normalization(x, axis=1, momentum=0.9, name="b")  # noqa: E731
    layer(
        devices,
        (6, 3, 4),
        build,
        values,
        lambda x, b, g: F.batch_norm(x, None, None, g, b, True, eps=0.001),
    )
    flow.clear_default_session()

    @flow.global_function(type="train")
    def train(x: tp.Numpy.Placeholder((6, 4, 3))) -> tp.Numpy:
        out = flow.layers.batch_normalization(x, momentum=0.9, name="b")
        flow.optimizer.SGD(constant(0.1), momentum=0).minimize(flow.math.reduce_sum(out))
        return out

    @flow.global_function()
    def predict(x: tp.Numpy.Placeholder((6, 4, 3))) -> tp.Numpy:
        return flow.layers.batch_normalization(x, name="b")

    x = drawn(6, 4, 3)
    got = play(devices, [(train, x), (train, x + 1), (predict, x)])
    norm = torch.nn.BatchNorm1d(3, eps=0.001, momentum=0.1)
    for shift in (0, 1):
        norm.zero_grad()
        norm(torch.tensor(x + shift).movedim(-1, 1)).sum().backward()
        with torch.no_grad():
            for p in norm.parameters():
                p -= 0.1 * p.grad
    same(got.variables["b-moving_mean"], norm.running_mean)
    same(got.variables["b-moving_variance"], norm.running_var)
    same(got.results[2], norm.eval()(torch.tensor(x).movedim(-1, 1)).movedim(1, -1).detach(), 1e-5)


def test_batch_normalization_in_the_mirrored_view() -> None:
    config = flow.function_config()
    config.default_logical_view(flow.scope.mirrored_view())

    @flow.global_function(type="train", function_config=config)
    def train(x: tp.ListNumpy.Placeholder((3, 2))) -> tp.ListNumpy:
        out = flow.layers.batch_normalization(x, momentum=0.5, name="b")
        flow.optimizer.SGD(constant(0.1), momentum=0).minimize(
            flow.math.reduce_sum(out * out * out)
        )
        return out

    x = drawn(6, 2)
    got = play(2, [(train, [x[:3], x[3:]])])
    for part, out in zip((x[:3], x[3:]), got.results[0], strict=True):
        same(out, F.batch_norm(torch.tensor(part), None, None, None, None, True, eps=0.001), 1e-5)
    same(got.variables["b-moving_mean"], 0.5 * (x[:3].mean(0) + x[3:].mean(0)) / 2)


@DEVICES
def test_upsampling_and_other_shapes(devices: int) -> None:
    layer(
        devices,
        (4, 2, 3, 3),
        lambda x: flow.layers.upsample_2d(x, (2, 3)),
        {},
        lambda x: F.interpolate(x, [6, 9]),
    )
    flow.clear_default_session()

    def build(x: Any) -> Any:
        parts = flow.split_like(x, [x[:, :2], x[:, 2:]], axis=1)
        y = flow.concat([parts[1], parts[0]], axis=1)
        y = flow.transpose(flow.reshape(y, (4, -1, 2)), (2, 0, 1))
        return flow.pad(
            flow.squeeze(flow.expand_dims(flow.slice(y, [None, 1, 0], [None, 2, -1]), 0), [0]),
            [(0, 0), (1, 0), (0, 1)],
            0.5,
        )

    def want(x: Any) -> Any:
        y = torch.cat([x[:, 2:], x[:, :2]], 1).reshape(4, -1, 2).permute(2, 0, 1)
        return F.pad(y[:, 1:3], (0, 1, 1, 0), value=0.5)

    layer(devices, (4, 6), build, {}, want)


@pytest.mark.parametrize(
    "name",
    [
        f"reduce_{kind}"
        for kind in ("sum", "mean", "max", "min", "std", "variance", "euclidean_norm", "prod")
    ],
)
def test_reductions(name: str) -> None:
    @flow.global_function()
    def job(x: tp.Numpy.Placeholder((4, 3, 2))) -> tp.Tuple[tp.Numpy, tp.Numpy]:
        reduction = getattr(flow.math, name)
        return reduction(x), reduction(x, axis=[0, 2], keepdims=True)

    x = drawn(4, 3, 2)
    functions = {
        "std": np.std,
        "variance": np.var,
        "euclidean_norm": lambda v, **o: np.sqrt(np.sum(v * v, **o)),
    }
    function = functions.get(name.removeprefix("reduce_")) or getattr(
        np, name.removeprefix("reduce_")
    )
    got = play(2, [(job, x)]).results[0]
    same(got[0], function(x), 1e-5)
    same(got[1], function(x, axis=(0, 2), keepdims=True), 1e-5)


def test_elementwise_functions_with_numbers() -> None:
    @flow.global_function()
    def job(x: tp.Numpy.Placeholder((4, 3))) -> tp.Bundle[tp.Numpy]:
        m = flow.math
        return [
            m.maximum(x, 0), m.minimum(0.5, x), m.divide(1, m.exp(x)), m.greater(x, 0),
            m.clip_by_value(x, -0.5, 0.5), m.divide_no_nan(x, m.relu(x)),
            m.squared_difference(x, 1), m.l2_normalize(x, axis=1), m.add_n([x, x, x]), m.argmax(x),
            m.top_k(x, k=2), flow.where(x > 0, x, x * 0),
            flow.cast(x, flow.int32), m.polyval([1.0, 2.0, 3.0], x),
            flow.constant(2.0, flow.float, (3,)) * x, flow.zeros_like(x) + flow.ones((4, 1)),
            m.exp(m.negative(m.xdivy(m.relu(x), x * 0))), m.xdivy(m.relu(x), x),
        ]  # fmt: skip

    x = drawn(4, 3)
    t = torch.tensor(x)
    want = [
        t.clamp(min=0), t.clamp(max=0.5), 1 / t.exp(), (t > 0), t.clamp(-0.5, 0.5), (t > 0).float(),
        (t - 1) ** 2, F.normalize(t, dim=1), 3 * t, t.argmax(1),
        t.topk(2).indices, t.relu(), t.int(), t * t + 2 * t + 3, 2 * t, torch.ones(4, 3),
        (t <= 0).float(), (t > 0).float(),
    ]  # fmt: skip
    for got, expected in zip(play(2, [(job, x)]).results[0], want, strict=True):
        same(got.astype(np.float32), expected.float(), 1e-5)
