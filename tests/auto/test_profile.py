"""Tests of profiling. A measured cluster obeys the laws and is the same on all ranks. The command
line saves and loads it unchanged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pool import run_on

from globaltensor.__main__ import main
from globaltensor.auto.profile import describe, measure_ops, profile
from globaltensor.auto.profile.clock import Case, Clock
from globaltensor.auto.profile.collective_timing import constants, groups_of, measure_moves
from globaltensor.auto.profile.kernels import fitted
from globaltensor.cluster import Cluster, Curve
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import ClusterError

KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "exchange",
    "send",
)


def measured(seconds: float) -> Cluster:
    return profile(seconds, device="cpu")


def lawful(c: Cluster, ranks: int) -> None:
    for n in (0, 1 << 10, 1 << 20, 1 << 30):
        for kind in KINDS:
            assert 0 < c.seconds(kind, n, ranks) <= c.seconds(kind, 2 * n + 1, ranks)
        whole, halves = (
            c.seconds("all_reduce", n, ranks),
            [c.seconds(kind, n, ranks) for kind in ("all_gather", "reduce_scatter")],
        )
        assert (
            max(halves) <= whole <= 2 * sum(halves)
        )  # no ring formula here: these are measured times, on a machine that may be busy
    assert 1 <= c.overlap <= 2
    assert 0 <= c.rank_skew < 1
    for dtype in ("float64", "float32", "bfloat16"):
        assert c.compute(2 * 64**3, 0, dtype) < c.compute(2 * 2048**3, 0, dtype)


def test_two_ranks_measure_their_cluster() -> None:
    a, b = run_on(2, measured, 1.0, timeout=120)
    assert a == b
    assert (a.size, a.device, a.node_size) == (2, "cpu", 0)
    assert {curve.kind for curve in a.measured} == {*KINDS, "copy"}
    assert all(curve.ranks == 2 for curve in a.measured if curve.kind != "copy")
    lawful(a, 2)
    assert "2 cpu devices" in describe(a)
    assert "all_to_all" in describe(a)


def measured_as_nodes(seconds: float) -> Cluster:
    here = world()
    nodes, local = here.node_size, here.local_rank
    here.node_size, here.local_rank = 2, here.rank % 2
    try:
        return profile(seconds, device="cpu")
    finally:
        here.node_size, here.local_rank = nodes, local


@pytest.mark.slow
def test_four_ranks_of_two_nodes() -> None:
    found = run_on(4, measured_as_nodes, 2.0, timeout=300)
    assert all(c == found[0] for c in found)
    c = found[0]
    assert (c.size, c.node_size, c.nodes) == (4, 2, 2)
    assert {(curve.ranks, curve.nodes) for curve in c.measured if curve.kind == "all_gather"} == {
        (2, 1),
        (2, 2),
        (4, 2),
    }
    assert c.seconds("all_gather", 1 << 20, (0, 1)) <= c.seconds("all_gather", 1 << 20, (0, 2))
    lawful(c, 2)
    lawful(c, 4)


def test_groups() -> None:
    assert groups_of(1, 0) == []
    assert groups_of(3, 0) == [(2, 1, [(0, 1)]), (3, 1, [(0, 1, 2)])]
    sizes = [(p, nodes) for p, nodes, _ in groups_of(32, 8)]
    assert sizes == [(2, 1), (4, 1), (8, 1), (2, 2), (16, 2), (4, 4), (32, 4)]
    for p, nodes, groups in groups_of(32, 8):
        ranks = [r for group in groups for r in group]
        assert sorted(ranks) == list(range(32))
        assert all(len(group) == p and len({r // 8 for r in group}) == nodes for group in groups)


@pytest.mark.parametrize(("ranks", "sizes"), [(4, 8), (300, 8), (3000, 7)])
def test_each_peer_of_a_large_exchange_gets_something(ranks: int, sizes: int) -> None:
    sent: list[int] = []

    class Alone:
        """A group with one rank, in which nothing moves."""

        index = 0

        def __init__(self, ranks: tuple[int, ...]) -> None:
            self.size = len(ranks)

        def exchange_into(
            self,
            sends: dict[int, torch.Tensor],
            recvs: dict[int, torch.Tensor],
            device: torch.device,
        ) -> None:
            assert [t.numel() for t in sends.values()] == [t.numel() for t in recvs.values()]
            assert all(t.numel() for t in sends.values())
            sent.append(sum(t.nbytes for t in sends.values()))

    class Called:
        """A clock that only runs the calls."""

        device = torch.device("cpu")
        world = SimpleNamespace(
            rank=0, size=ranks, comm=Alone, channel=lambda *_: SimpleNamespace(connect=lambda: None)
        )

        def time(self, cases: list[Case], seconds: float, longest: float) -> dict[int, float]:
            chosen = [i for i, case in enumerate(cases) if case.name == ("exchange", ranks, 1)]
            for i in chosen:
                assert cases[i].call is not None
                cases[i].call()
            return dict.fromkeys(chosen, 1.0)

    (curve,) = measure_moves(Called(), 1.0, 0)  # type: ignore[arg-type]
    assert len(curve.points) == len(sent) == sizes
    for (nbytes, _), real in zip(curve.points, sent, strict=True):
        assert real <= nbytes < real + 4 * ranks


@pytest.mark.parametrize(
    ("device", "gpus", "nproc", "started"),
    [
        ("auto", 0, 0, 2),
        ("auto", 1, 0, 2),
        ("auto", 4, 0, 4),
        ("cpu", 4, 0, 2),
        ("cuda", 1, 0, 1),
        ("cuda", 4, 0, 4),
        ("cuda", 1, 3, 3),
        ("auto", 4, 3, 3),
    ],
)
def test_how_many_ranks_are_started(
    device: str, gpus: int, nproc: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(
        sys.modules["globaltensor.auto.profile.measure"], "run", lambda *_, nprocs, **__: [nprocs]
    )
    assert profile(1.0, nproc, device) == started


def test_rates_are_found_again() -> None:
    def took(f: float) -> float:
        return 2e-6 + f / 5e12 * (1 + (3e9 / f) ** (1 / 3))

    rate, saturation = fitted(
        [(2.0 * n**3, took(2.0 * n**3)) for n in (128, 512, 2048, 8192)], 2e-6
    )
    assert rate == pytest.approx(5e12)
    assert saturation == pytest.approx(3e9)
    assert fitted([(1e9, 1.0)], 0.0) == (1e9, 0.0)


def test_constants_are_found_again() -> None:
    known = Cluster(
        node_size=2, launch=1e-4, latency=2e-5, bandwidth=1e9, node_latency=5e-5, node_bandwidth=2e8
    )
    sizes = [1 << 10, 1 << 28]
    groups = {(2, 1): (0, 1), (2, 2): (0, 2), (4, 4): (0, 2, 4, 6)}
    curves = [
        Curve(
            "all_gather", p, nodes, tuple((n, known.seconds("all_gather", n, ranks)) for n in sizes)
        )
        for (p, nodes), ranks in groups.items()
    ]
    found = constants(curves)
    assert found["bandwidth"] == pytest.approx(1e9, rel=1e-3)
    assert found["node_bandwidth"] == pytest.approx(2e8, rel=1e-3)
    assert found["launch"] + found["latency"] == pytest.approx(1.2e-4, rel=0.05)
    Cluster(node_size=2, **found)
    assert constants([]) == {}


def timed() -> tuple[dict[int, float], list[int]]:
    calls = [0, 0, 0, 0]

    def call(i: int, waits: float) -> Case:
        def work() -> None:
            calls[i] += 1
            if waits:
                torch.ones(1).sum()
                __import__("time").sleep(waits)

        return Case("slow" if waits else "quick", i, None if i == 3 and world().rank else work)

    times = Clock(torch.device("cpu")).time(
        [call(0, 0.0), call(1, 0.02), call(2, 0.9), call(3, 0.0)], 2.0, 0.2
    )
    return times, calls


def test_what_takes_too_long_is_left_out() -> None:
    (times, calls), (others, others_calls) = run_on(2, timed)
    assert times == others  # the same figures on every rank
    assert sorted(times) == [0, 1, 3]
    assert times[1] >= 0.02
    assert calls[2] <= 2
    assert calls[:3] == others_calls[:3]
    assert calls[3] > others_calls[3] == 0


def linear() -> tuple[Any, list[Any]]:
    x, w = torch.ones(16, 32, requires_grad=True), torch.ones(8, 32, requires_grad=True)
    return torch.nn.functional.linear, [x, w]


def with_ops() -> Cluster:
    c = Cluster(ops={"old": (1.0, 2.0)})
    return measure_ops(
        c,
        [
            ("linear", linear, True),
            ("same", linear, False),
            ("argmax", lambda: (torch.argmax, [torch.ones(4)]), True),
        ],
        seconds=0.5,
    )


def test_ops_are_timed() -> None:
    a, b = run_on(2, with_ops)
    assert a == b
    assert a.op("old") == (1.0, 2.0)
    assert all(t > 0 for t in a.op("linear") or [0.0])
    forward, backward = a.op("same") or (0.0, 1.0)
    assert forward > 0
    assert backward == 0
    assert (a.op("argmax") or (0.0, 0.0))[0] > 0


def different_ops() -> list[str]:
    here, told = world().rank, []
    for names in ((["a"], ["b"]), (["a"], ["a", "b"])):
        with pytest.raises(ClusterError) as error:
            measure_ops(Cluster(), [(name, linear, True) for name in names[here]], seconds=0.1)
        told.append(str(error.value))
    with pytest.raises(ClusterError) as error:
        measure_ops(Cluster(), [("a", linear, here == 0)], seconds=0.1)
    return [*told, str(error.value)]


def test_ranks_that_measure_different_ops_are_told() -> None:
    a, b = simulate(2, different_ops, timeout=20)
    assert a == b
    assert (
        "number 0 is 'a' with needs_grad=True on rank 0, 'b' with needs_grad=True on rank 1" in a[0]
    )
    assert "number 1 is none on rank 0, 'b'" in a[1]
    assert (
        "number 0 is 'a' with needs_grad=True on rank 0, 'a' with needs_grad=False on rank 1"
        in a[2]
    )


def test_a_world_of_one_has_no_links_to_measure() -> None:
    with pytest.raises(ClusterError, match="seconds=0"):
        profile(0)
    with pytest.raises(ClusterError, match="nproc=-1"):
        profile(1, nproc=-1)
    with pytest.raises(ClusterError, match='device="tpu"'):
        profile(1, device="tpu")


@pytest.mark.usefixtures("warm_ranks")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    assert (
        main(
            [
                "profile",
                "--nproc",
                "2",
                "--seconds",
                "1",
                "--device",
                "cpu",
                "--out",
                str(path),
                "--name",
                "here",
                "--json",
            ]
        )
        == 0
    )
    c = Cluster.load(path)
    assert (c.name, c.size) == ("here", 2)
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
    lawful(c, 2)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, told in (
        (["--help"], 0, "Under a launcher"),
        (["--device", "tpu"], 2, "'tpu'"),
        (["--seconds", "soon"], 2, "'soon'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["profile", *arguments])
        assert ended.value.code == code
        said = capsys.readouterr()
        assert told.lower() in (said.out + said.err).lower()
    for arguments, told in (
        (["--seconds", "0"], "seconds=0.0"),
        (["--out", str(tmp_path)], "Is a directory"),
    ):
        assert main(["profile", *arguments]) == 1
        said = capsys.readouterr()
        assert said.err.startswith("globaltensor profile: ")
        assert told in said.err
        assert not said.out


def test_a_command_that_fails_leaves_the_output_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old, link = tmp_path / "new.json", tmp_path / "old.json", tmp_path / "link.json"
    Cluster(name="old").save(old)
    link.symlink_to(tmp_path / "end.json")
    for path in (new, old, link):
        assert main(["profile", "--seconds", "0", "--out", str(path)]) == 1
        assert "seconds=0.0" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [link, old]
    assert Cluster.load(old).name == "old"
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["profile", "--seconds", "0", "--out", str(tmp_path / "none" / "x.json")]) == 1
    assert "seconds=0.0" in capsys.readouterr().err  # only the other rank needs the file
