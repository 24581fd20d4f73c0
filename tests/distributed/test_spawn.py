"""Tests of ranks started from Python: ``flow.run`` as a notebook uses it, and ``flow.spawn`` with
torch's interface. Linux's /proc shows which processes are alive."""

from __future__ import annotations

import inspect
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launched import within
from support.mpi import needs_mpi
from support.program import run

import globaltensor as flow
from globaltensor.errors import WorldError

PROMPT = 20.0  # seconds for processes to be gone, on a busy machine


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder that the environment of every process of the test names. Kill those processes
    afterwards."""
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    yield tmp_path
    for pid in alive(tmp_path):
        os.kill(pid, signal.SIGKILL)


def alive(folder: Path) -> list[int]:
    """Return the processes whose environment names the folder, except this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                int(entry.name) != os.getpid()
                and f"TEST_FOLDER={folder}\0".encode() in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def ended(process: subprocess.Popen[Any]) -> bool:
    return process.poll() is not None


def cell(source: str, name: str = "<cell 1>") -> dict[str, Any]:
    """Return the names that a notebook's cell defines: in no file, in ``__main__``, with a source
    known to linecache alone."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    return names


# ---------------------------------------------------------------------------- arguments and results


TOLD = """
import os, sys
import torch
import globaltensor as flow

factor = 10

class Answer:
    def __init__(self, **values):
        self.values = values

def work(x, scale=lambda rank: rank * factor):
    print("out of rank", flow.env.get_rank())
    print("err of rank", flow.env.get_rank(), file=sys.stderr)
    env = flow.env.get_rank(), flow.env.get_world_size(), flow.env.get_local_rank(), flow.env.get_node_size()
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR".split()
    others = [name for name, value in os.environ.items() if name.startswith("TORCHELASTIC") and value]
    grads = [x.requires_grad, x.is_leaf]
    return Answer(env=env, told=[os.environ.get(name) for name in names], others=others, scaled=scale(flow.env.get_rank()), x=x * 2, grads=grads)
"""  # noqa: E501


@pytest.mark.usefixtures("warm_ranks")
def test_each_rank_knows_who_it_is_and_what_a_cell_defines_travels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mark: Path
) -> None:
    monkeypatch.setenv(
        "TORCHELASTIC_USE_AGENT_STORE", "True"
    )  # this process may itself be the only rank of a torchrun job
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    names = cell(TOLD)
    results = flow.run(names["work"], torch.tensor([1.0, 2.0], requires_grad=True), nprocs=2)
    assert [type(result) for result in results] == [names["Answer"]] * 2, (
        "the class that comes back is the cell's own"
    )
    for rank, result in enumerate(result.values for result in results):
        assert result["env"] == (rank, 2, rank, 1)
        assert result["told"] == [str(rank), "2", str(rank), "2", "127.0.0.1"]
        assert result["others"] == []
        assert result["scaled"] == 10 * rank
        assert result["grads"] == [True, True]
        assert result["x"].tolist() == [2.0, 4.0]
        assert not result["x"].requires_grad, "what was computed comes back as a value"
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["out of rank 0", "out of rank 1"]
    assert sorted(err.splitlines()) == ["err of rank 0", "err of rank 1"]
    assert not alive(mark)


def globals_of_all_kinds() -> dict[str, Any]:
    P, S, B = flow.sbp.partial_sum, flow.sbp.split, flow.sbp.broadcast
    everyone, last = flow.placement.all("cpu"), flow.placement("cpu", [1])
    x = torch.arange(15.0).reshape(5, 3)
    whole = x.to_global(placement=everyone, sbp=B)
    module = torch.nn.Linear(3, 2, bias=False).to_global(everyone, S(0))  # type: ignore[operator]
    rank = flow.env.get_rank()
    return {
        "split": whole.to_global(sbp=S(0)),
        "partial": torch.full((3,), float(rank + 1)).to_global(placement=everyone, sbp=P),
        "half": whole.to_global(sbp=S(1)).bfloat16(),
        "empty": whole[:0],
        "one rank's": whole.to_global(placement=last, sbp=B),
        "module": module,
        "loss": (whole.to_global(sbp=S(0)).requires_grad_() ** 2).mean(),
        "own": x[rank],
    }


@pytest.mark.usefixtures("warm_ranks")
def test_global_tensors_come_back_whole(mark: Path) -> None:
    results = flow.run(globals_of_all_kinds)
    x = torch.arange(15.0).reshape(5, 3)
    expected = {
        "split": x,
        "partial": torch.full((3,), 3.0),
        "half": x.bfloat16(),
        "empty": x[:0],
        "one rank's": x,
        "loss": (x**2).mean(),
    }
    for rank, result in enumerate(results):
        for name, want in expected.items():
            assert type(result[name]) is torch.Tensor, name
            torch.testing.assert_close(
                result[name],
                want,
                msg=lambda text, name=name, rank=rank: f"{name} of rank {rank}: {text}",
            )
        assert result["own"].tolist() == x[rank].tolist()
        weight = result["module"].weight
        assert isinstance(weight, torch.nn.Parameter)
        assert (weight.shape, weight.requires_grad) == ((2, 3), True)
        result["module"](x).sum().backward()  # the returned module is an ordinary one


@pytest.mark.usefixtures("warm_ranks")
def test_global_tensors_that_are_not_the_same_on_all_ranks_are_told(mark: Path) -> None:
    def on_one_rank() -> Any:
        x = flow.zeros(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
        return x if flow.env.get_rank() == 0 else x.shape

    with pytest.raises(
        WorldError,
        match=(
            r"rank 1, which holds a shard of it, returned only 0 global tensor.*return the same "
            r"global tensors on all ranks"
        ),
    ):
        flow.run(on_one_rank)


@pytest.mark.extended
def test_runs_side_by_side_do_not_meet(mark: Path) -> None:
    results: dict[int, Any] = {}

    def summed(start: int) -> float:
        x = torch.full((1,), float(start)).to_global(
            placement=flow.placement.all("cpu"), sbp=flow.sbp.partial_sum
        )  # type: ignore[call-arg]
        return float(x)

    def start(i: int) -> None:
        results[i] = flow.run(summed, 10**i)

    threads = [threading.Thread(target=start, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {0: [2.0, 2.0], 1: [20.0, 20.0]}


@needs_mpi
@pytest.mark.extended
def test_ranks_of_an_mpi_world(mark: Path) -> None:
    def summed() -> Any:
        x = flow.ones(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)).sum()
        return flow.env.get_rank(), torch.distributed.get_backend(), x.item()

    assert flow.run(summed, backend="mpi") == [(0, "mpi", 4.0), (1, "mpi", 4.0)]
    assert within(PROMPT, lambda: not alive(mark)), "mpirun has ended too"


# ----------------------------------------------------------------------------------------- failures


FAILS = """
import time
import globaltensor as flow

class Fell(Exception):
    def __init__(self, what, how):
        super().__init__(f"{what} {how}")
        self.what, self.how = what, how
    def __reduce__(self):
        return Fell, (self.what, self.how)

def work():
    flow.placement.all("cpu")
    if flow.env.get_rank() == 1:
        raise Fell("the sky", "fell")
    time.sleep(300)
"""


@pytest.mark.usefixtures("warm_ranks")
def test_the_failing_rank_s_exception_is_raised_here_and_the_others_end(mark: Path) -> None:
    names = cell(FAILS)
    began = time.monotonic()
    with pytest.raises(names["Fell"], match="the sky fell") as caught:
        flow.run(names["work"])
    assert time.monotonic() - began < 60
    assert not alive(mark), "the rank that slept has ended"
    assert (caught.value.what, caught.value.how) == ("the sky", "fell")  # type: ignore[attr-defined]
    text = str(caught.value.__cause__)
    assert text.startswith("rank 1 of 2 failed:\nTraceback (most recent call last):\n")
    assert 'File "<cell 1>", line 15, in work\n    raise Fell("the sky", "fell")' in text, (
        "the cell's own line is shown"
    )
    assert "worker.py" not in text


def unpicklable_error() -> None:
    error = ValueError("it holds a lock")
    error.args = (*error.args, threading.Lock())
    raise error


class Demanding(Exception):
    """An exception that cannot be unpickled: it is made with two arguments and passes one on."""

    def __init__(self, what: str, how: str) -> None:
        super().__init__(what + how)


def demanding_error() -> None:
    raise Demanding("x", "y")


def leave() -> None:
    sys.exit(3)


def die() -> None:
    if flow.env.get_rank() == 1:
        print("last words", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    flow.placement.all("cpu")
    torch.distributed.barrier()  # fails because the other rank died; that death must be reported


def vanish() -> None:
    os._exit(5)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("fn", "nprocs", "says"),
    [
        (unpicklable_error, 1, r"(?s)rank 0 of 1 failed:.*in unpicklable_error.*it holds a lock"),
        (demanding_error, 1, r"(?s)rank 0 of 1 failed:.*Demanding: xy"),
        (leave, 1, r"(?s)rank 0 of 1 failed:.*in leave.*SystemExit: 3"),
        (
            die,
            2,
            (
                r"(?s)rank 1 \(local rank 1, pid \d+ on .*\) was ended by SIGKILL \(signal 9\), as "
                r"by kill -9, or by the system when memory runs out.*\| last words"
            ),
        ),
        (vanish, 1, r"rank 0 \(.*\) ended with exit code 5; the function had not returned"),
    ],
)
@pytest.mark.sweep(3)
def test_what_else_may_happen_to_a_rank_is_told(
    fn: Callable[[], None], nprocs: int, says: str, mark: Path
) -> None:
    with pytest.raises(WorldError, match=says):
        flow.run(fn, nprocs=nprocs)
    assert not alive(mark)


def hang() -> None:
    if flow.env.get_rank() == 1:
        flow.zeros(
            2, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)
        ).sum().item()  # rank 0 never joins this collective
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    time.sleep(300)


@pytest.mark.extended
def test_time_runs_out(mark: Path) -> None:
    began = time.monotonic()
    with pytest.raises(
        WorldError,
        match=(
            r"(?s)ranks 0, 1 of 2 had not returned after 15 s.*rank 0 was here:.*in hang.*rank "
            r"1 was here:.*in hang"
        ),
    ):
        flow.run(hang, timeout=15)
    assert time.monotonic() - began < 15 + PROMPT
    assert within(PROMPT, lambda: not alive(mark)), "what a rank has started ends with it"


class SlowToArrive:
    """An argument that takes forever to unpickle, as a module may take to import."""

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (300,)


def test_a_start_that_takes_too_long(mark: Path) -> None:
    with pytest.raises(WorldError, match=r"rank 0 of 1 had not begun after 2 s \(start_timeout\)"):
        flow.run(print, SlowToArrive(), nprocs=1, start_timeout=2)
    assert not alive(mark)


@pytest.mark.usefixtures("warm_ranks")
def test_what_cannot_travel_is_told(mark: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(
        WorldError,
        match=(
            r"cannot send <?.*lambda.* to the ranks: TypeError: cannot pickle "
            r"'_thread.lock'.*inside the function"
        ),
    ):
        flow.run(lambda: lock)
    with pytest.raises(
        WorldError, match=r"rank 0 cannot send back what .*lambda.* returned, a generator"
    ):
        flow.run(lambda: (i for i in range(3)), nprocs=1)


def test_run_in_a_rank_is_told(ranks: Callable[..., list[Any]]) -> None:
    ranks(2, _nested)
    code, out = run(
        [sys.executable, "-c", "import globaltensor as flow; flow.run(print)"],
        RANK="1",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    assert code == 1
    assert "run was called on rank 1 of 2" in out


def _nested() -> None:
    rank = flow.env.get_rank()
    with pytest.raises(
        WorldError,
        match=(
            f"run was called on rank {rank} of 2, but it starts a world of its own: call the "
            f"function itself"
        ),
    ):
        flow.run(print)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nprocs": 0}, "nprocs=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"start_timeout": -1.0}, "start_timeout=-1.0"),
    ],
)
def test_numbers_that_make_no_sense_are_told(options: dict[str, Any], says: str) -> None:
    with pytest.raises(WorldError, match=says):
        flow.run(print, **options)


# --------------------------------------------------------------------------------------- interrupts


SLEEPS = """
import os, pathlib, signal, subprocess, sys, time
import globaltensor as flow

def work():
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    flow.placement.all("cpu")
    (pathlib.Path(os.environ["TEST_FOLDER"]) / f"here.{flow.env.get_rank()}").touch()
    time.sleep(300)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
flow.run(work)
"""


@pytest.mark.parametrize(
    ("number", "deaf"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGKILL, False)]
)
@pytest.mark.sweep(3)
def test_an_end_from_outside_leaves_nobody(number: signal.Signals, deaf: bool, mark: Path) -> None:
    command = [
        sys.executable,
        "-",
        *(["deaf"] if deaf else []),
    ]  # a program from stdin has no file that could be imported again
    around = {**os.environ, "TMPDIR": str(mark)}  # a killed process leaves files behind
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=mark, env=around
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(SLEEPS.encode())
        process.stdin.close()
        assert within(60, lambda: len(list(mark.glob("here.*"))) == 2 or ended(process))
        os.kill(process.pid, number)
        assert within(PROMPT, lambda: ended(process))
        said = process.stderr.read().decode()
    assert within(PROMPT, lambda: not alive(mark)), "not the ranks, nor what they have started"
    assert process.returncode == -number
    assert said.count("Traceback") == (number == signal.SIGINT), said
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)


def test_a_rank_ends_with_its_parent_where_the_kernel_does_not_see_to_it(mark: Path) -> None:
    orphan = (
        "import os, sys, time; from globaltensor.distributed.run.worker import end_with; "
        "os.setpgid(0, 0); end_with(os.getppid())"
    )
    orphan += f"; open({str(mark / 'here')!r}, 'w'); time.sleep(300)"
    parent = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', "
        f"{orphan!r}]); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        assert within(60, (mark / "here").exists)
        assert len(alive(mark)) == 2
        process.kill()
    assert within(PROMPT, lambda: not alive(mark))


# -------------------------------------------------------------------------------------------- spawn


DOCUMENT = """
import torch
import torch.distributed as dist
import globaltensor as mp
import globaltensor as flow

def demo_basic(rank, world_size, port):
    dist.init_process_group(backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=world_size, rank=rank)
    tensor = torch.ones(2, 2)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    print(f"Rank {flow.env.get_rank()}: {tensor.tolist()}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    from globaltensor.distributed.launch import reserved_port
    with reserved_port() as port:
        mp.spawn(demo_basic, args=(2, port), nprocs=2)
"""  # noqa: E501


@pytest.mark.extended
def test_spawn_is_torch_s(mark: Path) -> None:
    assert flow.spawn is torch.multiprocessing.spawn
    assert (
        str(inspect.signature(flow.spawn))
        == "(fn, args=(), nprocs=1, join=True, daemon=False, start_method='spawn')"
    )
    (mark / "document.py").write_text(DOCUMENT)
    done = subprocess.run(
        [sys.executable, "document.py"], cwd=mark, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # a rank may write between the other rank's line and its newline
        assert f"Rank {rank}: [[2.0, 2.0], [2.0, 2.0]]" in done.stdout
