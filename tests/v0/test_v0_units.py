"""Tests of the separate units of the job-function view: device names, schedules, annotations,
files, settings, and the inputs that each rejects."""

import gzip
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable  # noqa: UP035 - of this name

import numpy as np
import pytest
import torch
from support.jobs import constant, play

import globaltensor
import globaltensor.v0 as flow
import globaltensor.v0.typing as tp
from globaltensor.v0.data import read_idx
from globaltensor.v0.session.control_channel import proxies
from globaltensor.v0.session.device_layout import Devices, Layout
from globaltensor.v0.session.settings import settings


@pytest.fixture(autouse=True)
def _own_session() -> Iterator[None]:
    flow.clear_default_session()
    yield
    flow.clear_default_session()


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ("0:0", [(0, 0)]),
        ("1:2-4", [(1, 2), (1, 3), (1, 4)]),
        (["0:1", "1:0-1"], [(0, 1), (1, 0), (1, 1)]),
    ],
)
def test_devices_by_name(ids: Any, found: Any) -> None:
    devices = Devices.parse("gpu", ids)
    assert list(devices.ids) == found
    assert Layout(2, 5).placement(devices).flat == tuple(5 * m + d for m, d in found)


@pytest.mark.parametrize("ids", ["", "0", "0:", "0:3-1", "a:b", [], ["0:0", "0:0-1"], "0:0,1", [0]])
def test_devices_without_a_name(ids: Any) -> None:
    with pytest.raises(flow.JobError, match="placement"):
        Devices.parse("gpu", ids)


def test_devices_that_are_not_there() -> None:
    with pytest.raises(
        flow.JobError,
        match=r"there is no device 1:0, only 1 machine with 2 devices each; env.machine",
    ):
        Layout(1, 2, "gpu").check(Devices.parse("gpu", "1:0"))
    with pytest.raises(
        flow.JobError,
        match=r"there is no device 0:2, only 1 machine with 2 devices each; config.gpu_device_num",
    ):
        Layout(1, 2, "gpu").check(Devices.parse("gpu", "0:0-2"))
    with pytest.raises(flow.JobError, match="gpu"):
        flow.scope.placement("tpu", "0:0")


opt = flow.optimizer
RATES: list[tuple[Any, Callable[[int], float]]] = [
    (
        opt.PiecewiseConstantScheduler([2, 4], [1.0, 0.5, 0.1]),
        lambda s: 1.0 if s <= 2 else 0.5 if s <= 4 else 0.1,
    ),
    (
        opt.PiecewiseScalingScheduler(2.0, [2, 4], [0.5, 0.1]),
        lambda s: 2.0 if s <= 2 else 1.0 if s <= 4 else 0.2,
    ),
    (opt.PiecewiseScalingScheduler(2.0, [3], 0.1), lambda s: 2.0 if s <= 3 else 0.2),
    (
        opt.CosineScheduler(0.1, 5, 0.1),
        lambda s: 0.1 * (0.9 * 0.5 * (1 + math.cos(math.pi * min(s, 5) / 5)) + 0.1),
    ),
    (opt.PolynomialScheduler(1.0, 4, 0.1, 2.0), lambda s: 0.9 * (1 - min(s, 4) / 4) ** 2 + 0.1),
    (
        opt.PolynomialScheduler(1.0, 4, 0.1, cycle=True),
        lambda s: 0.9 * (1 - max(s, 1) / (4 * math.ceil(max(s, 1) / 4))) + 0.1,
    ),
    (
        opt.LinearCosineScheduler(0.1, 4),
        lambda s: (
            0.1 * ((1 - min(s, 4) / 4) * 0.5 * (1 + math.cos(math.pi * min(s, 4) / 4)) + 0.001)
        ),
    ),
    (opt.ExponentialScheduler(0.1, 3, 0.5), lambda s: 0.1 * 0.5 ** (s / 3)),
    (opt.ExponentialScheduler(0.1, 3, 0.5, staircase=True), lambda s: 0.1 * 0.5 ** (s // 3)),
    (opt.InverseTimeScheduler(0.1, 3, 0.5), lambda s: 0.1 / (1 + 0.5 * s / 3)),
    (opt.NaturalExpScheduler(0.1, 3, 0.5, True), lambda s: 0.1 * math.exp(-0.5 * (s // 3))),
    (opt.CustomScheduler(lambda s: 0.1 / (1 + s)), lambda s: 0.1 / (1 + s)),
    (
        opt.CosineScheduler(0.1, 8, warmup=opt.warmup.linear(4, 0.1)),
        lambda s: (
            0.1 * (0.1 + 0.9 * s / 4) if s < 4 else 0.05 * (1 + math.cos(math.pi * min(s, 8) / 8))
        ),
    ),
    (
        opt.ExponentialScheduler(0.1, 3, 0.5, warmup=opt.warmup.constant(2, 0.3)),
        lambda s: 0.03 if s < 2 else 0.1 * 0.5 ** (s / 3),
    ),
]


@pytest.mark.parametrize(
    ("schedule", "rate"),
    RATES,
    ids=lambda v: type(v).__name__ if isinstance(v, opt.LrScheduler) else "",
)
def test_schedules(schedule: Any, rate: Callable[[int], float]) -> None:
    for step in range(12):
        assert schedule.rate(step) == pytest.approx(rate(step), rel=1e-12)


def refused(
    match: str, body: Callable[[Any], Any], kind: str = "predict", returns: Any = None
) -> None:
    def job(x: tp.Numpy.Placeholder((4, 3))):  # type: ignore[no-untyped-def]
        return body(x)

    if returns is not None:
        job.__annotations__["return"] = returns
    with pytest.raises(flow.JobError, match=match):
        play(1, [(flow.global_function(kind)(job), np.zeros((4, 3), np.float32))])


@pytest.mark.parametrize(
    ("match", "body"),
    [
        (r"matmul of Blob\(x", lambda x: flow.matmul(x, x)),
        (
            r"reshape: \[4, 3\] has 12 elements, \[5, -1\] does not",
            lambda x: flow.reshape(x, [5, -1]),
        ),
        ("has no value while the job is recorded", lambda x: 1 if x[0, 0] > 0 else 2),
        ("has no value", lambda x: np.asarray(x)),
        ("the first get_variable must set its shape", lambda x: flow.get_variable("v")),
        (
            r"variable v has shape \[3\] and .*, but is named again with \[4\]",
            lambda x: [flow.get_variable("v", (n,)) for n in (3, 4)],
        ),
        (
            r"v has .*float32, but is named again with .*int32",
            lambda x: [flow.get_variable("v", (3,), dtype=d) for d in (flow.float, flow.int32)],
        ),
        ("exists already", lambda x: [flow.layers.dense(x, 2), flow.layers.dense(x, 2)]),
        (
            "no dim 2 to be split",
            lambda x: flow.get_variable("v", (3, 3), distribute=flow.distribute.split(2)),
        ),
        (
            r"flow.distribute.split\(axis\), broadcast\(\) or auto\(\)",
            lambda x: x.with_distribute("split"),
        ),
        (
            r"a distribute is wanted: .*; got 'split'",
            lambda x: flow.layers.dense(x, 2, model_distribute="split"),
        ),
        (
            r"model_distribute is split\(0\)",
            lambda x: flow.layers.dense(x, 2, model_distribute=flow.distribute.split(1)),
        ),
        (
            "there is no device 0:1",
            lambda x: flow.scope.placement("gpu", "0:1").__enter__() and x + x,
        ),
        ("dim 0 of .* must divide by the number of pieces, 3", lambda x: flow.unpack(x, 3)),
        ("comes in 1 piece, which 2 does not divide", lambda x: flow.pack(x, 2)),
        (
            "different numbers of pieces",
            lambda x: flow.unpack(x, 2) + flow.repeat(flow.get_variable("v", (3,)), 4),
        ),
        ("rate is at least 0 and below 1", lambda x: flow.nn.dropout(x, 1.0)),
        (
            "labels come first",
            lambda x: flow.nn.sparse_softmax_cross_entropy_with_logits(flow.cast(x, flow.int32), x),
        ),
        ("data_format is NCHW or NHWC", lambda x: flow.layers.conv2d(x, 2, data_format="CHWN")),
        ('is of type "predict"', lambda x: opt.SGD(constant(0.1)).minimize(x)),
        ("autograd computes gradients now", lambda x: flow.layers.layer_norm_grad(x)),
        ("a function of the step instead", lambda x: opt.CustomScheduler("lr/out_0")),
        (
            "the session counts them itself now",
            lambda x: opt.SGD(constant(0.1), train_step_lbn="step"),
        ),
        (
            "cannot both be given",
            lambda x: opt.AdamW(
                constant(0.1), weight_decay_includes="a", weight_decay_excludes="b"
            ),
        ),
        ("is one of flow", lambda x: flow.get_variable("v", (3,), initializer=3)),
    ],
    ids=lambda v: v[:24] if isinstance(v, str) else "",
)
def test_what_a_job_function_may_not_do(match: str, body: Callable[[Any], Any]) -> None:
    refused(match, body)
    globaltensor.v0.scope._current.set(globaltensor.v0.scope.Scope())


@pytest.mark.parametrize(
    ("match", "body", "returns"),
    [
        ("is Numpy, but it is no blob", lambda x: 3, tp.Numpy),
        ("annotate Numpy", lambda x: x, tp.ListNumpy),
        ("has 2 values, but it has 3", lambda x: (x, x, x), tp.Tuple[tp.Numpy, tp.Numpy]),
        ("is a Dict, but it is list", lambda x: [x], tp.Dict[str, tp.Numpy]),
        ("annotate results with Numpy", lambda x: x, np.ndarray),
    ],
)
def test_what_a_job_function_may_not_return(
    match: str, body: Callable[[Any], Any], returns: Any
) -> None:
    refused(match, body, returns=returns)


def test_jobs_that_train_nothing() -> None:
    refused("trains nothing: call flow.optimizer", lambda x: x, "train")
    flow.clear_default_session()
    refused(
        "it has no trainable variable",
        lambda x: opt.SGD(constant(0.1)).minimize(flow.math.reduce_sum(x)),
        "train",
    )
    for names, told in (
        (["w", "wieght"], "names 'wieght', which it does not train; it trains w"),
        ([], "names none; it trains w"),
    ):
        flow.clear_default_session()
        body = lambda x, names=names: opt.SGD(constant(0.1), variables=names).minimize(  # noqa: E731
            x * flow.get_variable("w", (3,))
        )
        refused(f"its optimizer's list of variables {told}", body, "train")


def test_parameters_say_what_they_take() -> None:
    with pytest.raises(flow.JobError, match="parameter x has no annotation"):
        flow.global_function()(lambda x: x)
    with pytest.raises(
        flow.JobError, match=r'type is "train" or "predict", got .*write @flow.global_function\(\)'
    ):
        flow.global_function(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(flow.JobError, match="the shape is a tuple of sizes"):
        tp.Numpy.Placeholder(4)
    with pytest.raises(flow.JobError, match="has no batch_axis 2"):
        tp.Numpy.Placeholder((4, 3), batch_axis=2)

    @flow.global_function()
    def job(
        x: tp.Numpy.Placeholder((2,)), y: tp.ListNumpy.Placeholder((2,), dtype=flow.int32)
    ) -> tp.Numpy:
        return x

    good, whole = np.zeros(2, np.float64), np.zeros(2, np.int32)
    assert play(1, [(job, good, [whole])]).results[0].dtype == np.float32
    for match, args in [
        (r"x takes an array of shape \[2\], got \[3\]", (np.zeros(3), [whole])),
        ("y of device 0 takes int32, got float64", (good, [good])),
        ("one entry for each of 1 devices is wanted, got a ndarray", (good, whole)),
        ("missing a required argument: 'y'", (good,)),
    ]:
        with pytest.raises(flow.JobError, match=match):
            play(1, [(job, *args)])


def test_settings_count_until_the_session_starts(caplog: pytest.LogCaptureFixture) -> None:
    assert flow.config.cpu_device_num(1) is True
    assert flow.config.collective_boxing.nccl_fusion_threshold_mb(8) is True
    assert flow.env.machine("10.0.0.1", {"addr": "10.0.0.2", "ctrl_port_agent": 7}) is True
    assert [m.addr for m in settings.machines] == ["10.0.0.1", "10.0.0.2"]
    for wrong in (["10.0.0.1", "10.0.0.1"], [], [{"address": "10.0.0.1"}], [3]):
        with pytest.raises(flow.SessionError, match=r"env\.machine"):
            flow.env.machine(wrong)
    with pytest.raises(flow.SessionError, match="from 1 to 65535"):
        flow.env.ctrl_port(0)
    with pytest.raises(flow.SessionError, match="an integer is wanted"):
        flow.config.gpu_device_num("2")  # type: ignore[arg-type]
    settings.machines = []
    flow.config.machine_num(2)
    with pytest.raises(
        flow.SessionError, match=r"config.machine_num\(2\), but env.machine names none"
    ):
        flow.env.init()
    flow.config.machine_num(1)
    assert flow.env.init() is True
    assert flow.env.init() is False
    assert flow.config.cpu_device_num(4) is False
    assert "had no effect" in caplog.text
    assert flow.env.current_resource().machine_num == 1


def test_hints_are_taken_and_what_is_gone_names_its_successor() -> None:
    config = flow.function_config()
    config.cudnn_conv_force_fwd_algo(3)
    config.concurrency_width(2)
    for name in ("qat", "use_tensorrt", "ssp_stage"):
        with pytest.raises(AttributeError, match="instead"):
            getattr(config, name)
    with pytest.raises(AttributeError, match="default_data_type"):
        config.default_datatype(flow.float)
    with pytest.raises(flow.JobError, match="distributed_split"):
        config.optimizer_placement_optimization_mode("zero3")
    config.train.primary_lr(0.1)
    config.train.model_update_conf({"adam": {}})
    with pytest.raises(flow.JobError, match="exactly one of"):
        config.train.optimizer()


def test_mnist_from_idx_files(tmp_path: Path) -> None:
    draw = np.random.RandomState(0)
    for prefix, n in (("train", 7), ("t10k", 5)):
        images, labels = (
            draw.randint(0, 256, (n, 28, 28), np.uint8),
            draw.randint(0, 10, n).astype(np.uint8),
        )
        content = struct.pack(">4B3I", 0, 0, 8, 3, n, 28, 28) + images.tobytes()
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">4BI", 0, 0, 8, 1, n) + labels.tobytes()
        )
    (train, train_labels), (test, _) = flow.data.load_mnist(3, 5, out_dir=str(tmp_path))
    assert (train.shape, train.dtype, train_labels.shape, train_labels.dtype) == (
        (2, 3, 1, 28, 28),
        np.float32,
        (2, 3),
        np.int32,
    )
    assert 0 <= train.min() < train.max() <= 1
    np.testing.assert_allclose(test[0, :, 0], images / 255.0, rtol=1e-6)
    assert flow.data.load_mnist(3, 5, "NHWC", out_dir=str(tmp_path))[1][0].shape == (
        1,
        5,
        28,
        28,
        1,
    )
    with pytest.raises(flow.SessionError, match="make no batch of 8"):
        flow.data.load_mnist(8, 5, out_dir=str(tmp_path))
    cut = tmp_path / "cut"
    cut.write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 9) + b"12")
    with pytest.raises(flow.SessionError, match=r"says \[9\], but holds 2 bytes"):
        read_idx(cut)
    cut.write_bytes(struct.pack(">4BI", 0, 0, 8, 3, 9))
    with pytest.raises(flow.SessionError, match="ends in its header, which should name 3 sizes"):
        read_idx(cut)
    cut.write_bytes(b"no idx")
    with pytest.raises(flow.SessionError, match="is no IDX file"):
        read_idx(cut)


def test_snapshots(tmp_path: Path) -> None:
    values = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "ns-b": np.array([3], np.int64),
        "x/y": np.zeros((), np.int32),
    }
    flow.checkpoint.save(str(tmp_path / "new" / "one"), values)
    assert (
        tmp_path / "new" / "one" / "a" / "meta"
    ).read_text() == "shape {\n  dim: 2\n  dim: 3\n}\ndata_type: kFloat\n"
    left = (
        tmp_path / f"again.unfinished-{os.getpid()}"
    )  # as if left by a killed process with this process's id
    (left / "a").mkdir(parents=True)
    (left / "old").mkdir()
    flow.checkpoint.save(str(tmp_path / "again"), values)
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == [
        "a",
        "ns-b",
        "snapshot_done",
        "x",
    ]
    found = flow.checkpoint.get(str(tmp_path / "new" / "one"))
    assert sorted(found) == sorted(values)
    for name, value in values.items():
        np.testing.assert_array_equal(found[name].numpy(), value)
        assert found[name].shape == value.shape
    assert found["a"].dtype is torch.float32
    with pytest.raises(flow.SessionError, match="holds something already"):
        flow.checkpoint.save(str(tmp_path / "new"), values)
    with pytest.raises(flow.SessionError, match="outside of the folder"):
        flow.checkpoint.save(str(tmp_path / "two"), {"../three": values["a"]})
    assert not (tmp_path / "two").exists()
    (tmp_path / "new" / "one" / "snapshot_done").unlink()
    with pytest.raises(flow.SessionError, match="not written completely"):
        flow.checkpoint.get(str(tmp_path / "new" / "one"))
    with pytest.raises(flow.SessionError, match="no folder"):
        flow.checkpoint.get(str(tmp_path / "nothing"))


def test_numbered_snapshots_in_one_process(tmp_path: Path) -> None:
    @flow.global_function()
    def job(x: tp.Numpy.Placeholder((2,))) -> tp.Numpy:
        return x * flow.get_variable("v", (2,), initializer=flow.ones_initializer())

    manager = flow.train.SimpleCheckPointManager(str(tmp_path))
    manager.initialize_or_restore()
    manager.save()
    flow.load_variables({"v": np.array([2.0, 3.0]), "nobody's": np.zeros(1)})
    assert job(np.ones(2, np.float32)).tolist() == [2.0, 3.0]
    manager.save()
    assert manager.list_checkpoints() == ["snapshot_1", "snapshot_2"]
    flow.train.CheckPoint().load(str(tmp_path / "snapshot_1"))
    assert flow.get_all_variables()["v"].numpy().tolist() == [1.0, 1.0]
    manager.initialize_or_restore()
    assert np.asarray(flow.get_all_variables()["v"]).tolist() == [2.0, 3.0]
    with pytest.raises(flow.JobError, match=r"variable v has shape \[2\], the value \[3\]"):
        flow.load_variables({"v": np.zeros(3)})
    with pytest.raises(flow.SessionError, match="no job has w; no value is given for v"):
        flow.load_variables({"w": np.zeros(3)}, ignore_mismatch=False)
    with pytest.raises(flow.JobError, match="after the session has started"):
        flow.global_function()(lambda: None)


def test_what_is_loaded_is_looked_at_before() -> None:
    @flow.global_function(type="train")
    def job(x: tp.Numpy.Placeholder((2,))) -> tp.Numpy:
        loss = x * flow.get_variable("w", (2,))
        opt.SGD(constant(0.1)).minimize(loss)
        return loss

    flow.get_all_variables()
    good = {"w": np.ones(2), "w-momentum": np.ones(2), "System-Train-TrainStep-job": np.array([3])}
    for name, wrong, says in [
        ("w-momentum", np.zeros(3), r"w-momentum has shape \[2\], the value \[3\]"),
        (
            "System-Train-TrainStep-job",
            np.zeros(0),
            r"TrainStep-job has shape \[1\], the value \[0\]",
        ),
        (
            "w-momentum",
            np.array(["a", "b"]),
            "numbers are wanted for w-momentum, got an array of <U1",
        ),
    ]:
        with pytest.raises(flow.JobError, match=says):
            flow.load_variables({**good, name: wrong})
    assert flow.get_all_variables()["w"].numpy().tolist() == [0, 0], (
        "none is loaded where one does not fit"
    )
    flow.load_variables(good)
    assert flow.get_all_variables()["w"].numpy().tolist() == [1, 1]


def test_proxies_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    assert not proxies()
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    assert proxies().startswith(" HTTPS_PROXY is set, but")


def test_initializers() -> None:
    generator = torch.Generator().manual_seed(0)
    for made, deviation in [
        (flow.truncated_normal(0.5), 0.5 * 0.8796),
        (flow.random_normal_initializer(0.0, 2.0), 2.0),
        (flow.glorot_uniform_initializer(), math.sqrt(2 / 900)),
        (flow.xavier_normal_initializer(), math.sqrt(2 / 900)),
        (flow.variance_scaling_initializer(2.0, "fan_out"), math.sqrt(2 / 400)),
        (flow.kaiming_initializer((400, 500), nonlinearity="relu"), math.sqrt(2 / 500)),
        (flow.random_uniform_initializer(-1, 1), math.sqrt(1 / 3)),
    ]:
        values = made.fill(torch.empty(400, 500), generator)
        assert values.std().item() == pytest.approx(deviation, rel=0.02)
        assert values.mean().abs() < 0.02
    assert flow.truncated_normal(0.5).fill(torch.empty(10000), generator).abs().max() <= 1.0
    with pytest.raises(flow.JobError, match="mode is one of"):
        flow.variance_scaling_initializer(mode="fan")


def test_nothing_leaks_into_the_main_namespace() -> None:
    for name in (
        "global_function",
        "function_config",
        "get_variable",
        "scope",
        "losses",
        "truncated_normal",
        "clear_default_session",
    ):
        assert not hasattr(globaltensor, name)
    assert not hasattr(torch.Tensor, "with_distribute")
    assert globaltensor.float is torch.float
