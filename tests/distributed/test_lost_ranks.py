"""Tests of ranks that end, die or fork while others go on: the error of the others says what is
known about them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from support.paths import PYTHONPATH
from support.pool import run_on
from support.warm_python import warm_python

import globaltensor as flow
from globaltensor.distributed.launch import reserved_port
from globaltensor.errors import WorldError

PROGRAM = """
import os, signal, sys
import torch
import globaltensor as flow
rank = flow.env.get_rank()
B, S = flow.sbp.broadcast, flow.sbp.split
x = torch.arange(12.).view(4, 3).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
x.sum().item()
"""


def ran(folder: Path, program: str, **variables: str) -> list[tuple[int, str]]:
    """Run a program as two ranks without a launcher, which would end the second one. Return the
    exit code and the errors of each."""
    (folder / "train.py").write_text(PROGRAM + program)
    with reserved_port() as port:
        ranks = [
            subprocess.Popen(
                [warm_python(), str(folder / "train.py")],
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    "OMP_NUM_THREADS": "1",
                    "GLOBALTENSOR_TIMEOUT": "40",
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    **variables,
                },
            )
            for rank in range(2)
        ]
        try:
            said = [process.communicate(timeout=100)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        return [(process.returncode, text) for process, text in zip(ranks, said, strict=True)]


@pytest.mark.parametrize(
    ("end", "known"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 has died, with no end of its program: it"),
        ("sys.exit('no data')", "rank 1 has ended its program (the last line, or sys.exit), while"),
        ("assert not rank, 'no rows'", "rank 1 has failed: the exception in its own output is"),
    ],
    ids=["killed", "exit", "failed"],
)
@pytest.mark.sweep(3)
def test_the_error_says_how_the_other_rank_ended(tmp_path: Path, end: str, known: str) -> None:
    (code, said), _ = ran(tmp_path, f"if rank == 1:\n    {end}\nx = x * 2\nx.sum().item()\n")
    assert code == 1
    assert re.search(
        r"WorldError: train.py:\d+: x.sum\(\).item\(\)\n.*" + re.escape(known), said
    ), said
    assert "Rank 0 waits for it in all_reduce for reading a value: f32[] P -> f32[] B" in said
    # the advice is for a program in which rank 1 reads nothing
    assert ("Printing, item() and numpy()" in said) == ("sys.exit" in end)


@pytest.mark.sweep(2)
def test_without_shared_memory_the_connection_shows_the_end(tmp_path: Path) -> None:
    (code, said), _ = ran(
        tmp_path,
        "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nx.sum().item()\n",
        GLOBALTENSOR_SHARED_MEMORY="0",
    )
    assert code == 1
    assert re.search(r"WorldError: train.py:\d+: x.sum\(\).item\(\)\n.*rank 1 has ended, or", said)
    assert "GLHF" not in said


@pytest.mark.parametrize("more", [True, False], ids=["more operations", "no more operations"])
@pytest.mark.sweep(2)
def test_a_rank_that_leaves_without_a_word_is_told_at_the_end(tmp_path: Path, more: bool) -> None:
    (code, said), _ = ran(
        tmp_path, "if rank == 1:\n    os._exit(0)\n" + ("y = x * 2\n" if more else "")
    )
    if more:
        assert code == 1
        assert "DivergenceError: rank 1 has died, with no end of its program" in said
        assert "after its last exchange with rank 1" in said
    else:
        assert (code, said) == (0, "")


def forked() -> str:
    """Return the text that a child of this rank gets, and check that the rank goes on."""
    where = flow.placement.all("cpu")
    x = torch.arange(4.0).to_global(where, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))  # type: ignore[attr-defined]
    x.sum().item()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = "no error"
        try:
            (x * 3).sum().item()
        except WorldError as error:
            text = str(error)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    text = os.read(read, 4096).decode()
    os.close(read)
    assert (x * 3).sum().item() == 18.0
    return text


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_is_no_rank() -> None:
    for rank, text in enumerate(run_on(2, forked)):
        assert re.match(
            r"test_lost_ranks.py:\d+: \(x \* 3\).sum\(\).item\(\)\n"
            rf"this process is a child that os.fork made of rank {rank}",
            text,
        ), text


STARTED_BY_A_RANK = """
import subprocess
child = "import globaltensor as flow; print(flow.placement.all('cpu').size)"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=40)
assert done.returncode == 1, done
text = f"was started by rank {rank} (process {os.getpid()}), and is not a rank itself: it cannot"
assert text in done.stderr, done.stderr
own = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, env=own)
assert (done.returncode, done.stdout) == (0, "1\\n"), done
assert x.sum().item() == 66
import torch.distributed as dist
child = "import torch.distributed as d, globaltensor; d.init_process_group('gloo')"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=40)
assert done.returncode == 1 and text in done.stderr, done.stderr
dist.barrier()
dist.destroy_process_group()  # the next processes may be the ranks
assert "_GLOBALTENSOR_RANK_PROCESS" not in os.environ
"""


def test_a_process_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    """It joined as a second process of that rank, and waited for the others until the timeout."""
    assert ran(tmp_path, STARTED_BY_A_RANK) == [(0, ""), (0, "")]


WORKERS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return x
if __name__ == "__main__":
    next(iter(torch.utils.data.DataLoader(Rows(), 2, num_workers=1)))
"""


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_worker_of_a_loader_that_returns_global_tensors_is_told(tmp_path: Path) -> None:
    for code, said in ran(tmp_path, WORKERS):
        assert code == 1
        assert "a worker of a DataLoader, which is no rank" in said
        assert "let the dataset hold the values, x.numpy()" in said


MISMATCH = """
P, E = flow.sbp.partial_sum, x.placement
large, small = (torch.ones(n).to_global(E, P) for n in {sizes})
for _ in range(70):
    large.to_global(sbp=B)
    small.to_global(sbp=B)
for _ in range({before}):  # the next collective is not compared before the data moves
    large.to_global(sbp=B)
if rank == {odd}:
    small.to_global(sbp=B)
else:
    large.to_global(sbp=B)
large.to_global(sbp=B)
"""


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("sizes", [(64, 8), (9000, 20)])
@pytest.mark.sweep(6)
def test_gloo_ends_no_rank_without_a_word(tmp_path: Path, sizes: tuple[int, int], odd: int) -> None:
    """A message that is longer than the receiver expects ends its process. Its own rank is told in
    any case, and the other one where the store has not ended with that process."""
    program = MISMATCH.format(sizes=sizes, odd=odd, before=5)
    ended = ran(tmp_path, program, GLOBALTENSOR_SHARED_MEMORY="0")
    assert [code for code, _ in ended] == [1, 1]
    (_, ended_by_gloo), (_, other) = ended[odd], ended[1 - odd]
    assert "the ranks have diverged" in ended_by_gloo
    assert "small.to_global" in ended_by_gloo
    assert "gloo received a longer message" in ended_by_gloo
    if odd == 1:
        assert "the ranks have diverged" in other
        assert "rank 1 is at all_reduce for to_global" in other
        assert "small.to_global" in other
    else:
        assert "rank 0 has ended" in other
        assert "TCPStore" not in other, "torch's C++ trace of the store that rank 0 served"


OWN_COLLECTIVE = """
x.to_global(sbp=B)  # the library's last collective: it is over
torch.distributed.all_reduce(torch.ones(8 if rank == 1 else 64))
torch.distributed.barrier()
"""


def test_gloo_keeps_its_words_for_a_collective_of_the_user(tmp_path: Path) -> None:
    """The ranks' operations on global tensors are the same, so nothing is said of them."""
    ended = ran(tmp_path, OWN_COLLECTIVE, GLOBALTENSOR_SHARED_MEMORY="0")
    assert ended[1][0] == -signal.SIGABRT
    assert "op.preamble.length" in ended[1][1]
    assert "diverged" not in ended[1][1]
