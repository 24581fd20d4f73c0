"""Tests that files identify their contents: files name the shard that they hold, files are replaced
atomically, and loaded states get the right layout."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import itertools
import os
import pickle
import pickletools
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import run_on
from support.warm_python import warm_python
from torch import nn

import globaltensor as flow
from globaltensor._base.atomic_file import Replacement, replacing, write_text
from globaltensor.auto.solver import Problem
from globaltensor.auto.solver.problem_io import save as save_problem
from globaltensor.distributed.launch import reserved_port
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import PartError, ShapeError, WorldError
from globaltensor.graph import pipeline
from globaltensor.graph.sharding_plan import PlannedOp, ShardingPlan
from globaltensor.sharding.spec import StorageSpec

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split


def spread(t: torch.Tensor, sbp: Any, placement: Any = None) -> Any:
    where = placement or flow.placement.all("cpu")
    return t.clone().to_global(where, [B] * where.axes).to_global(sbp=sbp).detach()


def rows(n: int = 4) -> torch.Tensor:
    return torch.arange(n * 3.0).view(n, 3)


def whole(x: Any) -> torch.Tensor:
    """Return the full value, on every rank."""
    return torch.from_numpy(x.detach().numpy())


def refused(path: Path, **options: Any) -> str:
    """Check that reading the file raises an error, and return its text."""
    with pytest.raises(PartError) as caught:
        torch.load(path, **options)
    return str(caught.value)


# ------------------------------------------------------------------- shards are not interchangeable

LOADS = """
import sys
import torch
{}
try:
    torch.load(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("imports", "says"),
    [
        ("import globaltensor", r"^PartError the saved data holds part \[0:2, 0:3\] .*flow\.save"),
        (
            "",
            r"^UnpicklingError [\s\S]*GLOBAL globaltensor\.rebuild_global_tensor was not",
        ),
    ],
    ids=["with the import", "PyTorch alone"],
)
def test_a_program_that_loads_a_shard_as_pytorch_does_by_default(
    imports: str, says: str, tmp_path: Path
) -> None:
    """The import is enough: no weights_only=False. Without it, PyTorch's error names the library,
    as docs/files.md says."""

    def saves() -> None:
        x = flow.ones(4, 3, placement=flow.placement.all("cpu"), sbp=S(0))
        torch.save({"weight": x}, tmp_path / f"{flow.env.get_rank()}.pt")

    simulate(2, saves)
    python = warm_python() if imports else sys.executable  # warm_python has the import
    command = [python, "-c", LOADS.format(imports), str(tmp_path / "0.pt")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert re.search(says, ran.stdout), ran.stdout


def read_by_others(folder: str) -> None:
    n, rank = flow.env.get_world_size(), flow.env.get_rank()
    line, path = flow.placement.all("cpu"), Path(folder)
    weight = nn.Parameter(spread(rows(5), S(0)))
    parts = {
        "rows": spread(rows(5), S(0)),
        "columns": spread(rows(), S(1)),
        "tiny": spread(rows(1), S(0)),
        "sum": spread(rows(), P),
        "integers": spread(rows().long(), S(0)),
        "parameter": weight,
        "nested": {"state": {0: {"exp_avg": [spread(rows(), S(0))]}}},
        "units": spread(torch.ones(2, 3, 4), S(1)).flatten(1),
    }
    for name, value in parts.items():
        if rank == 0:
            torch.save(value, path / name)
        meet()
        for options in ({"weights_only": True}, {"weights_only": False}):
            if rank:
                said = refused(path / name, **options)
                assert "flow.save(obj, path, global_dst_rank=0)" in said
                assert "torch.distributed.checkpoint" in said
                assert f"written by rank 0 of a world of {n}" in said
            else:
                torch.load(path / name, **options)
    if rank:
        theirs, mine = parts["rows"]._spec.box(0), parts["rows"]._spec.box(rank)
        assert f"part [0:{theirs[1][0]}, 0:3] of a global tensor (f32[5, 3] S(0)" in refused(
            path / "rows"
        )
        assert (
            f"rank {rank} of {n} needs part [{mine[0][0]}:{mine[0][0] + mine[1][0]}, 0:3]"
            in refused(path / "rows")
        )
        assert "number 0 of the summands" in refused(path / "sum")
    wholes = {
        "b": spread(rows(), B),
        "w": nn.Parameter(spread(rows(), B)),
        "n": spread(torch.tensor(3), B),
    }
    wholes["first"] = spread(rows(), B, flow.placement("cpu", [0]))
    if rank == 0:
        torch.save(wholes, path / "whole")
    meet()
    got = torch.load(path / "whole")
    for name in ("b", "w", "n"):
        assert torch.equal(got[name].to_local(), wholes[name].to_local())
        assert got[name].placement == line
    assert isinstance(got["w"], nn.Parameter)
    # rank 0 has the value, whichever rank reads it
    assert torch.equal(whole(got["first"]), rows())


def meet() -> None:
    """Wait until all ranks have reached this call."""
    flow.zeros(1, placement=flow.placement.all("cpu"), sbp=P).numpy()


def test_a_part_is_not_read_as_another(tmp_path: Path) -> None:
    run_on(2, read_by_others, str(tmp_path))
    (tmp_path / "four").mkdir()
    run_on(4, read_by_others, str(tmp_path / "four"))


def trained(model: Any, optimizer: Any) -> None:
    x: Any = torch.ones(4, 3)
    for _ in range(2):
        optimizer.zero_grad()
        model(
            x.to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
        ).square().mean().backward()
        optimizer.step()


def small_network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def one_saves_all_load(folder: str, plan: str) -> None:
    rank, path = flow.env.get_rank(), Path(folder)
    torch.manual_seed(0)
    model = flow.parallelize(small_network(), flow.placement.all("cpu"), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    assert any(p.sbp != (B,) for p in model.parameters()) == (plan != "data")
    if rank == 0:
        torch.save(model.state_dict(), path / "model.pt")
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
        torch.save({"model": model, "step": 3}, path / "all.pt")
    meet()
    for name in ("model.pt", "optimizer.pt", "all.pt"):
        if rank and plan != "data":
            refused(path / name, weights_only=False)
        else:
            torch.load(path / name, weights_only=False)
    if plan == "data":  # every rank holds what the file holds
        torch.manual_seed(1)
        again = flow.parallelize(small_network(), flow.placement.all("cpu"), plan)
        other = torch.optim.AdamW(again.parameters())
        again.load_state_dict(torch.load(path / "model.pt"))
        other.load_state_dict(torch.load(path / "optimizer.pt"))
        all_in_one = torch.load(path / "all.pt", weights_only=False)["model"]
        for name, value in model.state_dict().items():
            assert torch.equal(whole(again.state_dict()[name]), whole(value)), name
            assert torch.equal(whole(all_in_one.state_dict()[name]), whole(value)), name
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            want, got = optimizer.state[p], other.state[q]
            assert got.keys() == want.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(whole(got[key]), whole(want[key])) for key in want)
            assert got["exp_avg"]._spec is want["exp_avg"]._spec
        trained(model, optimizer)
        trained(again, other)
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(whole(p), whole(q))


def test_one_rank_saves_and_all_load(tmp_path: Path) -> None:
    for plan in ("fsdp", "tensor", "data"):
        (tmp_path / plan).mkdir()
        run_on(2, one_saves_all_load, str(tmp_path / plan), plan)


def grids(folder: str) -> None:
    rank, path = flow.env.get_rank(), Path(folder)
    grid, half = flow.placement("cpu", [[0, 1], [2, 3]]), flow.placement("cpu", [0, 1])
    layouts = {"s b": [S(0), B], "b s": [B, S(0)], "s p": [S(0), P]}
    values = {
        **{name: spread(rows(5), layout, grid) for name, layout in layouts.items()},
        "half": spread(rows(), S(0), half),
    }
    split, shown = values["s b"]._spec.replace(layout=[S(0), S(1)]), values["s b"]._spec
    share = spread(rows(5), [S(0), S(1)], grid)
    values["share"] = flow.GlobalTensor.wrap(share.to_local(), StorageSpec.of(split, shown, [1]))
    for name, value in values.items():
        torch.save(value, path / f"{name}.{rank}")
    meet()
    same = {
        "s b": [(0, 1), (2, 3)],
        "b s": [(0, 2), (1, 3)],
        "s p": [],
        "half": [(2, 3)],
        "share": [],
    }
    for name, value in values.items():
        for writer in range(4):
            alike = writer == rank or any({writer, rank} == set(pair) for pair in same[name])
            alike = alike or (name == "half" and rank > 1)  # these ranks need no data
            if alike:
                got = torch.load(path / f"{name}.{writer}")
                assert got._spec is value._spec
                assert torch.equal(got._local, value._local)
            else:
                said = refused(path / f"{name}.{writer}")
                assert ("holds nothing" in said) == (name == "half" and writer > 1)


def test_ranks_that_hold_the_same_part_may_read_it(tmp_path: Path) -> None:
    run_on(4, grids, str(tmp_path))


def write_for_others(folder: str) -> None:
    state = {
        "part": spread(rows(), S(0)),
        "whole": spread(rows(), B),
        "on one": spread(rows(), S(0), flow.placement("cpu", [0])),
    }
    for name, value in state.items():
        if flow.env.get_rank() == 0:
            torch.save(value, f"{folder}/{name}")
    meet()


def read_in_another_world(folder: str) -> None:
    n = flow.env.get_world_size()
    said = refused(Path(folder) / "part")
    assert "written by rank 0 of a world of" in said
    assert f"this is rank {flow.env.get_rank()} of a world of {n}" in said
    for name in ("whole", "on one"):
        got = torch.load(f"{folder}/{name}")
        assert torch.equal(whole(got), rows())
        plain = nn.Linear(3, 4, bias=False)
        plain.load_state_dict({"weight": got})
        assert torch.equal(plain.weight.detach(), rows())
        model: Any = nn.Linear(3, 4, bias=False).to_global(flow.placement.all("cpu"), S(0))  # type: ignore[operator]
        model.load_state_dict({"weight": got})
        assert torch.equal(whole(model.weight), rows())


def test_worlds_of_other_sizes(tmp_path: Path) -> None:
    for n, others in ((4, (2,)), (2, (4,))):
        folder = tmp_path / str(n)
        folder.mkdir()
        run_on(n, write_for_others, str(folder))
        for m in others:
            run_on(m, read_in_another_world, str(folder))
        read_in_another_world(str(folder))  # this process is a world of one rank


def forked(x: Any) -> Any:
    from multiprocessing.reduction import ForkingPickler

    return ForkingPickler.dumps(x)


class Rows(torch.utils.data.Dataset[Any]):
    """A data set that contains a global tensor and returns global tensors."""

    def __init__(self) -> None:
        self.x = spread(rows(), S(0))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return i, self.x


def loaded() -> None:
    batches = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=1)
    for i, (number, x) in enumerate(batches):
        assert number == i
        assert torch.equal(whole(x), rows())


def test_what_a_rank_sends_to_itself_comes_back() -> None:
    run_on(2, what_goes_round)
    run_on(2, loaded)


def what_goes_round() -> None:
    x = spread(rows(5), S(0))
    for got in (
        pickle.loads(pickle.dumps(x)),
        copy.copy(x),
        copy.deepcopy(x),
        pickle.loads(bytes(forked(x))),
    ):
        assert got._spec is x._spec
        assert torch.equal(whole(got), rows(5))


def sent_to_others() -> None:
    told: list[Any] = [None] * 2
    torch.distributed.all_gather_object(told, spread(rows(), B))
    assert all(torch.equal(t.to_local(), rows()) for t in told)
    with pytest.raises(PartError, match=r"each rank writes and reads a file of its own"):
        torch.distributed.all_gather_object(told, spread(rows(), S(0)))


def test_a_message_with_a_part_is_refused_by_another_rank() -> None:
    run_on(2, sent_to_others)


def test_a_file_names_one_function_of_this_library() -> None:
    """Files stay readable when code moves within the package, because they name only one function
    of it."""
    x: Any = rows().to_global(flow.placement("cpu", [0]), S(0))  # type: ignore[attr-defined]
    names = [
        arg
        for op, arg, _ in pickletools.genops(pickle.dumps(x, protocol=2))
        if op.name == "GLOBAL" and arg.startswith("globaltensor")
    ]
    assert names == ["globaltensor rebuild_global_tensor"]
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(buffer) == []


def parts_and_wholes(folder: str) -> None:
    if flow.env.get_rank() == 0:
        torch.save({"w": spread_alone(S(0))}, f"{folder}/alone")
    x, y = spread(rows(), S(0)), spread(rows(), B)
    if flow.env.get_rank() == 0:
        torch.save({"w": x}, f"{folder}/part")
        torch.save({"w": y}, f"{folder}/whole")
    with pytest.raises(
        WorldError,
        match=(
            r"rank 0 could not read the file: PartError: the file holds one rank's local tensor of "
            r"a global tensor"
        ),
    ):
        flow.load(f"{folder}/part", global_src_rank=0)
    assert torch.equal(whole(flow.load(f"{folder}/whole", global_src_rank=0)["w"]), rows())
    assert torch.equal(whole(flow.load(f"{folder}/alone", global_src_rank=0)["w"]), rows())


def spread_alone(sbp: Any) -> Any:
    return flow.GlobalTensor.wrap(
        rows(), flow.Spec.make((4, 3), torch.float32, flow.placement("cpu", [0]), [sbp])
    )


def test_load_by_one_rank_of_a_file_with_parts(tmp_path: Path) -> None:
    run_on(2, parts_and_wholes, str(tmp_path))


# --------------------------------------------------------------------------------- replacing a file

SAVING = """
import sys
import torch
import globaltensor as flow

path = sys.argv[1]
everyone = flow.placement.all("cpu")
for i in range(1, 10_000):
    x = torch.full((1 << 20,), float(i)).to_global(everyone, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
    flow.save({"x": x, "same": [torch.full((1000,), i)]}, path, global_dst_rank=0)
    if i == 1 and flow.env.get_rank() == 0:
        print("saved", flush=True)
"""  # noqa: E501


def started(script: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start two ranks that run a script."""
    with reserved_port() as port:
        common = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        environment = {
            **os.environ,
            **common,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [warm_python(), "-c", script, *arguments]
        streams: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
        }
        return [
            subprocess.Popen(
                command, env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)}, **streams
            )
            for r in range(2)
        ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sweep(2)
def test_a_file_is_whole_whenever_the_ranks_are_killed(tmp_path: Path, seed: int) -> None:
    path, chance = tmp_path / "m.pt", random.Random(seed)
    ranks = started(SAVING, str(path))
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "saved\n"
        time.sleep(chance.uniform(0, 0.1))
    finally:
        for rank in ranks:
            rank.kill()  # SIGKILL
        for rank in ranks:
            rank.communicate()
    got = torch.load(path)
    assert got["x"].shape == (1 << 20,)
    assert got["x"].unique().tolist() == got["same"][0].unique().tolist()


def replaces(path: Path) -> None:
    """Replace a file again and again, each time with another letter."""
    for i in itertools.count():
        with replacing(path) as file:
            for _ in range(50):
                file.write(letter(i) * 1000)


def letter(i: int) -> bytes:
    return bytes([ord("a") + i % 26])


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sweep(5)
def test_a_file_is_whole_whenever_its_writer_is_killed(
    tmp_path: Path, seed: int, nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:
        monkeypatch.setattr(os, "O_TMPFILE", 0)
    path, chance = tmp_path / "text", random.Random(seed)
    path.write_bytes(b"-" * 50_000)
    for _ in range(5):
        pid = os.fork()
        if not pid:
            replaces(path)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        text = path.read_bytes()
        assert len(text) == 50_000
        assert len(set(text)) == 1


@contextlib.contextmanager
def full_disk(room: int = 50_000) -> Iterator[None]:
    """Limit the size of files that this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Full(io.BytesIO):
    """A file on a full disk."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def disk_is_full(folder: str) -> None:
    path = Path(folder) / "m.pt"
    flow.save({"w": spread(rows(), S(0))}, path, global_dst_rank=0)
    before = path.read_bytes()
    large = spread(torch.ones(100_000), S(0))
    with (
        full_disk(),
        pytest.raises(WorldError, match=r"rank 0 could not write the file: .*File too large"),
    ):
        flow.save({"w": large}, path, global_dst_rank=0)
    with pytest.raises(
        WorldError, match=r"rank 0 could not write the file: .*No space left on device"
    ):
        flow.save({"w": large}, Full(), global_dst_rank=0)
    with pytest.raises(WorldError, match=r"rank 0 could not write the file: .*nowhere"):
        flow.save({"w": large}, path.parent / "nowhere" / "m.pt", global_dst_rank=0)
    with pytest.raises(WorldError, match=r"rank 0 could not write the file: .*Is a directory"):
        flow.save({"w": large}, path.parent, global_dst_rank=0)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        flow.save({"w": large, "f": lambda: 0}, path, global_dst_rank=0)
    meet()
    assert path.read_bytes() == before
    meet()
    flow.save(
        {"w": spread(rows(), S(0))}, path, global_dst_rank=0, _use_new_zipfile_serialization=False
    )
    assert torch.equal(torch.load(path)["w"], rows())
    own = path.with_name(f"own.{flow.env.get_rank()}")
    flow.save({"w": large}, own, _use_new_zipfile_serialization=False)
    assert torch.load(own)["w"]._spec is large._spec
    flow.save({"w": large}, own)
    assert torch.load(own)["w"]._spec is large._spec
    before = own.read_bytes()
    with full_disk(), pytest.raises(OSError, match="File too large"):
        flow.save({"w": large}, own)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        flow.save(lambda: 0, own)
    assert own.read_bytes() == before
    meet()
    assert {p.name for p in path.parent.iterdir()} == {"m.pt", "own.0", "own.1"}


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    run_on(2, disk_is_full, str(tmp_path))


def writers(path: Path) -> dict[str, Callable[[], None]]:
    problem = Problem("p")
    problem.node(list(range(99)))
    plan = ShardingPlan((PlannedOp("op" * 99, "f", "", None, "cpu", (), ()),))
    cluster, turns = flow.Cluster.preset("dgx-h100"), pipeline.schedule("1f1b", [0, 1], 8)
    done = [pipeline.Span(0, turns.rows[0][0], 0.0, 1.0)]
    return {
        "text": lambda: write_text(path, "x" * 1000),
        "schedule": lambda: turns.save(path),
        "trace": lambda: pipeline.save_trace(path, foretold=done),
        "cluster": lambda: cluster.save(path),
        "problem": lambda: save_problem(problem, path),
        "plan": lambda: plan.save(path),
    }


def test_other_files_stay_too(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for name, write in writers(path).items():
        path.write_text("old")
        with full_disk(100), pytest.raises(OSError, match="File too large"):
            write()
        assert path.read_text() == "old", name
        write()
        assert len(path.read_text()) > 100
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_replaced_file_is_what_a_plain_open_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    before = os.umask(0o027)
    try:
        for nameless in (os.O_TMPFILE, 0):
            monkeypatch.setattr(os, "O_TMPFILE", nameless)
            new, old, target, link = (
                tmp_path / f"{name}{nameless}" for name in ("new", "old", "target", "link")
            )
            write_text(new, "x")
            assert mode(new) == 0o640
            old.write_text("longer than the new one")
            old.chmod(0o604)
            write_text(old, "x")
            assert (mode(old), old.read_text()) == (0o604, "x")
            link.symlink_to(target)
            for text in ("made at its end", "replaced there"):
                write_text(link, text)
                assert link.is_symlink()
                assert target.read_text() == text
    finally:
        os.umask(before)
    write_text("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    monkeypatch.chdir(tmp_path)
    write_text("here", "x")
    assert Path("here").read_text() == "x"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_text(tmp_path / "nowhere" / "x", "x")
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "x")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "here"):
        raise ZeroDivisionError
    assert Path("here").read_text() == "x"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".globaltensor")]


def test_a_file_in_a_folder_where_none_may_be_made_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "x"
    path.write_text("old")
    monkeypatch.setattr(Replacement, "_create_file", refuse)
    write_text(path, "new")
    assert path.read_text() == "new"


# ----------------------------------------------------------------------------- states of optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS([q for g in p for q in g["params"]], lr=0.1, max_iter=2),
}


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7, bias=False), nn.Linear(7, 1)
    ).double()


def groups(model: Any) -> Any:
    return [
        {"params": model[0].parameters()},
        {"params": [*model[2].parameters(), *model[3].parameters()], "lr": 0.05},
    ]


def stepped(model: Any, optimizer: Any, times: int = 1) -> None:
    x: Any = torch.arange(12, dtype=torch.float64).view(4, 3) / 12
    if next(model.parameters()).is_global:
        placement = next(model.parameters()).placement
        x = x.to_global(placement, [B] * placement.axes)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = model(x).square().sum()
        value.backward()
        return value

    for _ in range(times):
        optimizer.step(loss)


def layouts() -> dict[str, tuple[Any, Any]]:
    line = flow.placement.all("cpu")
    rows = {"*.weight": S(0), "*": B}
    found: dict[str, tuple[Any, Any]] = {
        "rows": (line, rows),
        "columns": (line, {"*.weight": S(1), "*": S(0)}),
        "whole": (line, B),
        "sums": (line, P),
    }
    if line.size == 4:
        grid, some = flow.placement("cpu", [[0, 1], [2, 3]]), flow.placement("cpu", [1, 3])
        found = {
            "grid": (grid, {"*.weight": [S(0), S(1)], "*": [B, S(0)]}),
            "half": (grid, {"*": [S(0), B]}),
            "some": (some, rows),
        }
    return found


#: Each part has every seventh pair of an optimizer and a layout.
PARTS = 7


def laid_out_at_once(folder: str, part: int) -> None:
    cases = itertools.product(OPTIMIZERS.items(), layouts().items())
    for (maker, make), (name, (placement, sbp)) in itertools.islice(cases, part, None, PARTS):
        if maker == "lbfgs" and name == "some":
            continue  # LBFGS has one state for all parameters, with the shape of none of them
        plain = network()
        reference = make(groups(plain))
        stepped(plain, reference, 2)
        model = network()
        model.load_state_dict(plain.state_dict())
        model.to_global(placement, sbp)
        optimizer = make(groups(model))
        path = f"{folder}/{maker} {name}"
        flow.save(reference.state_dict(), path, global_dst_rank=0)
        for saved in (
            copy.deepcopy(reference.state_dict()),
            flow.load(path, global_src_rank=0),
            flow.load(path, placement, global_src_rank=0),
        ):
            counts = [kept["step"] for kept in saved["state"].values() if "step" in kept]
            optimizer.load_state_dict(saved)
            assert [
                kept["step"] for kept in optimizer.state.values() if "step" in kept
            ] == counts or maker == "adamw fused"
            check_state(model, optimizer, plain, reference)
        if maker != "lbfgs":
            goes_on(make, model, optimizer, plain, reference)


def check_state(model: Any, optimizer: Any, plain: Any, reference: Any) -> None:
    """Check the layout of each state tensor."""
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        for key, want in reference.state.get(q, {}).items():
            if key != "step":
                check_value(p, key, optimizer.state[p][key], want)


def check_value(p: Any, key: str, got: Any, want: Any) -> None:
    """Check that a state tensor of the parameter's shape has the parameter's layout and takes no
    extra memory, and that one of another shape (Adafactor's sums over rows and columns, the flat
    gradients in LBFGS's lists) is whole on the parameter's placement. A number that comes plain
    stays so."""
    if isinstance(want, list):
        assert len(got) == len(want), key
        for ours, theirs in zip(got, want, strict=True):
            check_value(p, key, ours, theirs)
        return
    if not isinstance(want, torch.Tensor):
        assert got == want, key
        return
    want = want.to(p.dtype)  # as torch does when it loads
    if not want.ndim and not got.is_global:
        assert torch.equal(got, want), key
    else:
        same_shape = want.shape == p.shape
        # a partial parameter is stepped as a replicated sum
        layout = [e if same_shape and not e.is_partial else B for e in p._spec.layout]
        spec = p._spec.replace(shape=tuple(want.shape), layout=layout, dtype=want.dtype)
        assert got._spec is spec, key
        if same_shape:
            assert got._local.untyped_storage().nbytes() == got._local.nbytes
        assert torch.equal(whole(got), want), key


def goes_on(make: Any, model: Any, optimizer: Any, plain: Any, reference: Any) -> None:
    """Check that the next step is that of one device."""
    other = network()
    other.load_state_dict(plain.state_dict())
    alone = make(groups(other))
    alone.load_state_dict(copy.deepcopy(reference.state_dict()))
    stepped(other, alone)
    stepped(model, optimizer)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS, kind=lambda n, part: n)
def test_a_state_that_comes_whole_is_laid_out_at_once(tmp_path: Path, n: int, part: int) -> None:
    run_on(n, laid_out_at_once, str(tmp_path), part)


def states_that_do_not_fit() -> None:
    plain, model = (
        network(),
        network().to_global(flow.placement.all("cpu"), {"*.weight": S(0), "*": B}),
    )
    reference, optimizer = torch.optim.Adam(groups(plain)), torch.optim.Adam(groups(model))
    stepped(plain, reference)
    stepped(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    for bad in (torch.zeros(4, 3), torch.zeros(3, 3), torch.zeros(15), model[0].weight.to_local()):
        saved = copy.deepcopy(reference.state_dict())
        saved["state"][0]["exp_avg_sq"] = bad
        saved["param_groups"][0]["lr"] = 7.0
        with pytest.raises(
            ShapeError,
            match=(
                r"load_state_dict of Adam: 'exp_avg_sq' of parameter 0 of group 0 has shape .* "
                r"the parameter \[5, 3\]"
            ),
        ):
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert all(
            torch.equal(whole(v), whole(after["state"][i][k]))
            for i, kept in before["state"].items()
            for k, v in kept.items()
            if k != "step"
        )
    stepped(model, optimizer)
    plain.load_state_dict({name: whole(t) for name, t in model.state_dict().items()})
    reference.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    )  # plain parameters get full plain states
    assert not any(t.is_global for kept in reference.state.values() for t in kept.values())
    stepped(plain, reference)
    stepped(model, optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=1e-9, atol=1e-9)


def shared_with_another() -> None:
    """Check that `state_dict` returns the optimizer's own tensors, as on one device."""
    plain, model = network(), network().to_global(flow.placement.all("cpu"), S(0))
    reference, optimizer = (
        torch.optim.Adam(plain.parameters()),
        torch.optim.Adam(model.parameters()),
    )
    stepped(plain, reference)
    optimizer.load_state_dict(reference.state_dict())
    stepped(plain, reference, 3)
    assert {kept["step"].item() for kept in optimizer.state.values()} == {1.0}
    stepped(model, optimizer)
    assert {kept["step"].item() for kept in reference.state.values()} == {4.0}


def test_a_state_is_not_shared_by_halves() -> None:
    run_on(2, shared_with_another)


def test_states_that_do_not_fit_and_states_for_plain_parameters() -> None:
    run_on(2, states_that_do_not_fit)


def after_a_step_that_failed() -> None:
    model = network().to_global(flow.placement.all("cpu"), S(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.sgd"], "sgd", failing)
        with pytest.raises(ZeroDivisionError):
            stepped(model, optimizer)
    saved["state"][0]["momentum_buffer"] = torch.full((5, 3), 3.0, dtype=torch.float64)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    (model[0].weight * 0).sum().backward()
    optimizer.step()
    assert torch.equal(
        whole(optimizer.state[model[0].weight]["momentum_buffer"]),
        torch.full((5, 3), 2.7, dtype=torch.float64),
    )


def failing(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError


def test_a_state_that_is_loaded_after_a_step_that_failed() -> None:
    run_on(2, after_a_step_that_failed)
