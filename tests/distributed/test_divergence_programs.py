"""Tests of whole programs whose ranks diverge: what is told, and in how few lines."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launched import Launched
from support.mpi import needs_mpi
from support.rows import line, rows
from torch import nn

import globaltensor as flow
from globaltensor._base.tracebacks import shortened
from globaltensor.errors import SbpError

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


PROGRAM = """
import torch
import globaltensor as flow
rank = flow.env.get_rank()
B, S = flow.sbp.broadcast, flow.sbp.split
x = torch.arange(12.).view(4, 3).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
"""
READS = {
    "print": "print(x)",
    "item": "total = (x * x).sum().item()",
    "logging": 'import logging; logging.warning("%s", x)',
    # as torch.utils.tensorboard reads a value, in a function of a library
    "writer": 'writer.add_scalar("loss", x.sum(), 1)',
}
WRITER = """
class SummaryWriter:
    def add_scalar(self, tag, value, step):
        self.value = value.detach().cpu().numpy()
"""
LAST = PROGRAM + "print((x * (2 + rank)).to_local().sum())\n"
OWN_GROUP = (
    "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    + LAST
    + "dist.destroy_process_group()\n"
)


def launched(
    folder: Path, program: str, *options: str, warm: bool = True, ranks: int = 2, **variables: str
) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(program)
    with Launched(
        folder,
        "--nproc_per_node",
        ranks,
        *options,
        script,
        warm=warm,
        OMP_NUM_THREADS="1",
        **variables,
    ) as running:
        code = running.code()
    return code, running.err


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize(
    ("shared", "backend"),
    [
        ("1", "gloo"),
        ("0", "gloo"),
        pytest.param("1", "mpi", marks=[needs_mpi, pytest.mark.extended]),
    ],
    ids=["shared memory", "gloo", "mpi"],
)
@pytest.mark.sweep(3)
def test_a_value_read_on_one_rank_is_told_in_few_lines(
    tmp_path: Path, shared: str, backend: str, reads: str
) -> None:
    (tmp_path / "writers.py").write_text(WRITER)
    program = PROGRAM + "from writers import SummaryWriter\nwriter = SummaryWriter()\n"
    code, said = launched(
        tmp_path,
        f"{program}if rank == 0:\n    {READS[reads]}\n",
        "--backend",
        backend,
        warm=backend != "mpi",
        GLOBALTENSOR_SHARED_MEMORY=shared,
    )
    assert code == 1
    # a log call shows all its callers, among them those that run this program as __main__
    said = re.sub(r".*File .*/support/warm_python/.*\n.*\n", "", said)
    own, _, summary = said.partition("globaltensor.launch:")
    line = re.escape(READS[reads])
    for text in (own, summary):  # the rank's error and the launcher's summary say the same
        assert re.search(
            rf"File \".*train.py\", line 10, in <module>\n.*{line}\n(.*writers.py.*\n.*\n)?"
            rf".*WorldError: (train.py:10: {line}|writers.py:4: .*)\n",
            text,
        ), text
        assert (
            "Printing, item() and numpy() of a global tensor are collective: call them on every "
            "rank, or box to broadcast first" in text
        )
        assert "/globaltensor/" not in text
        assert "/logging/" not in text
        assert "GLHF" not in text
        # the program goes on after a log call, so its end tells of the divergence, in 3 lines
        assert len(text.splitlines()) < 12 + 3 * (reads == "logging"), text


SOON = (
    "from globaltensor.distributed import watchdog; watchdog._TICK_SECONDS = 0.05; "
    "watchdog._NOTED_SECONDS = watchdog._UNCHANGED_SECONDS = 0.1; "
    "watchdog._SECONDS = watchdog._MOVING_SECONDS = watchdog._PEERS_MOVING_SECONDS = 0.4\n"
)


@pytest.mark.parametrize(
    "barrier",
    [
        "dist.barrier()",
        "flow.distributed.barrier()",
        "dist.monitored_barrier()",
        "dist.new_group([0, 1])",
        "dist.broadcast(torch.ones(3), 0)",
        "dist.gather(torch.ones(3), [torch.ones(3)] * 2 * (rank == 0) or None)",
    ],
)
@pytest.mark.parametrize("alone", ["print(x)", "y = x.to_global(sbp=B)"])
@pytest.mark.sweep(10)
def test_a_rank_that_waits_for_ranks_in_a_barrier_is_told(
    tmp_path: Path, alone: str, barrier: str
) -> None:
    code, said = launched(
        tmp_path,
        f"{PROGRAM}{SOON}import torch.distributed as dist\nif rank == 0:\n    {alone}\n{barrier}\n",
    )
    assert code == 1
    assert f"DivergenceError: train.py:10: {alone}\n" in said, said
    name = barrier.partition("(")[0].rpartition(".")[2]
    assert f"while rank 1 waits for it in torch.distributed.{name}  (train.py:" in said
    assert ("Printing, item() and numpy()" in said) == ("print" in alone)


@pytest.mark.parametrize("call", ["dist.barrier()", "dist.all_reduce(torch.ones(3))"])
@pytest.mark.parametrize("first", [True, False], ids=["first exchange", "later exchange"])
@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "gloo"])
@pytest.mark.sweep(6)
def test_a_rank_is_told_at_its_first_exchange_and_over_gloo_too(
    tmp_path: Path, shared: str, first: bool, call: str
) -> None:
    program = f"""{SOON}import torch, torch.distributed as dist, globaltensor as flow
x = flow.ones(4, placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0))
{"" if first else "x.sum().item()"}
if flow.env.get_rank() == 0:
    print(x.sum().item())
{call}
"""
    code, said = launched(tmp_path, program, GLOBALTENSOR_SHARED_MEMORY=shared)
    assert code == 1
    name = call.partition("(")[0].rpartition(".")[2]
    summary = said.partition("globaltensor.launch:")[2]
    assert "DivergenceError: train.py:6: print(x.sum().item())\n" in summary, said
    assert f"while rank 1 waits for it in torch.distributed.{name}  (train.py:" in summary
    assert "GLHF" not in said


@pytest.mark.parametrize(
    ("some", "shared"), [({0}, "0"), ({0, 1}, "0"), ({1, 2, 3}, "0"), ({0, 1}, "1")], ids=str
)
@pytest.mark.sweep(4)
def test_ranks_in_a_barrier_and_in_an_operation_of_four_are_told(
    tmp_path: Path, some: set[int], shared: str
) -> None:
    program = f"""{PROGRAM}{SOON}import torch.distributed as dist
x.sum().item()
if rank in {some}:
    dist.barrier()
y = x.to_global(sbp=B)
"""
    code, said = launched(tmp_path, program, ranks=4, GLOBALTENSOR_SHARED_MEMORY=shared)
    assert code == 1
    assert re.search(r"DivergenceError: train.py:\d+: y = x.to_global", said), said
    assert re.search(r"waits? (for it )?in torch\.distributed\.barrier", said), said


AROUND = """
import globaltensor as flow
rank = flow.env.get_rank()
ends = [rank, (rank + 1) % 3] if rank < 2 else [0, 2]
x = flow.ones(4, placement=flow.placement("cpu", ends), sbp=flow.sbp.split(0))
total = x.sum().item()
"""


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "gloo"])
@pytest.mark.sweep(2)
def test_operations_that_wait_for_each_other_in_a_circle_are_told(
    tmp_path: Path, shared: str
) -> None:
    code, said = launched(tmp_path, SOON + AROUND, ranks=3, GLOBALTENSOR_SHARED_MEMORY=shared)
    assert code == 1
    assert re.search(r"DivergenceError: train.py:\d+: total = x.sum\(\).item\(\)", said), said
    assert re.search(r"ranks? .* waits? in .*  \(train.py:\d+: total = x.sum\(\).item\(\)\)", said)


IN_A_ROW_AND_IN_ALL = """
import torch
import globaltensor as flow
rank = flow.env.get_rank()
B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
grid = flow.placement("cpu", [[0, 1], [2, 3]])
x = flow.ones(8, 4, placement=grid, sbp=[S(0), P], requires_grad=True)
for step in range(3):
    loss = x.to_global(sbp=[S(0), B]).square().sum()
    if rank == 1 and step == 1:
        loss.backward(retain_graph=True)
    loss.backward()
    y = torch.zeros(2).to_global(grid, [B, B])
"""


@pytest.mark.parametrize(
    ("shared", "backend"),
    [
        ("0", "gloo"),
        ("1", "gloo"),
        pytest.param("1", "mpi", marks=[needs_mpi, pytest.mark.extended]),
    ],
    ids=["gloo", "shared memory", "mpi"],
)
@pytest.mark.sweep(3)
def test_ranks_that_wait_for_each_other_in_two_groups_are_told(
    tmp_path: Path, shared: str, backend: str
) -> None:
    """Rank 1 is in an operation of its row, and the others wait for it in one of all ranks."""
    code, said = launched(
        tmp_path,
        SOON + IN_A_ROW_AND_IN_ALL,
        "--backend",
        backend,
        ranks=4,
        warm=backend != "mpi",
        GLOBALTENSOR_SHARED_MEMORY=shared,
    )
    assert code == 1
    assert re.search(r"DivergenceError: train.py:\d+: (y = torch|loss.backward\(\))", said), said


LATE_AT_BARRIERS = f"""{PROGRAM}{SOON}
import time, torch.distributed as dist
pair = dist.new_group([0, 1])
for _ in range(2500):  # more notes than a socket holds
    dist.barrier()
for group in (None, pair):
    if rank == 0:
        time.sleep(0.6)
    dist.barrier(group)
    if rank == 1:
        time.sleep(0.6)
    total = x.sum().item()
    work = dist.barrier(group, async_op=True)
    assert (x + 1).sum().item() == total + 12
    work.wait()
"""


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "gloo"])
@pytest.mark.sweep(2)
def test_ranks_that_come_late_to_a_barrier_are_waited_for(tmp_path: Path, shared: str) -> None:
    assert launched(tmp_path, LATE_AT_BARRIERS, GLOBALTENSOR_SHARED_MEMORY=shared) == (0, "")


def test_all_frames_of_an_error_are_shown_on_request(tmp_path: Path) -> None:
    for reads in ("print", "logging"):
        code, said = launched(
            tmp_path,
            f"{PROGRAM}if rank == 0:\n    {READS[reads]}\n",
            GLOBALTENSOR_TRACEBACK="full",
        )
        assert code == 1
        assert "/globaltensor/boxing/" in said


@pytest.mark.parametrize("program", [LAST, OWN_GROUP], ids=["world of ours", "group of the user"])
@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.sweep(4)
def test_a_divergence_after_the_last_collective_is_told_at_the_end(
    tmp_path: Path, shared: str, program: str
) -> None:
    code, said = launched(tmp_path, program, GLOBALTENSOR_SHARED_MEMORY=shared)
    assert code == 1
    assert "DivergenceError: the ranks have diverged" in said
    assert "This was found when the program ended" in said
    for rank in range(2):  # the line, though the ranks differ in a number alone
        ran = f"rank {rank} has run mul(f32[4, 3] S(0), int) with {2 + rank}  (train.py:"
        assert ran in said
    code, said = launched(
        tmp_path, program.replace("2 + rank", "2"), GLOBALTENSOR_SHARED_MEMORY=shared
    )
    assert (code, said) == (0, ""), said


DDP_LEFTOVERS = (
    PROGRAM
    + """
import torch.distributed as dist
dist.init_process_group("gloo")   # as a script for DDP has, after the ranks are connected
dist.init_process_group(backend="gloo", rank=rank, world_size=2)
assert x.sum().item() == 66 and dist.get_world_size() == 2
dist.destroy_process_group()
"""
)


def test_a_script_may_still_initialise_the_process_group(tmp_path: Path) -> None:
    assert launched(tmp_path, DDP_LEFTOVERS) == (0, "")
    code, said = launched(tmp_path, DDP_LEFTOVERS.replace("world_size=2", "world_size=4"))
    assert code == 1
    assert "init_process_group asks for world_size 4, but this process already is rank" in said


LATE_PLAIN = (
    PROGRAM
    + """
for step in range(100):
    own = torch.arange(40_000.0)
    if step == 99 and rank == 1:
        own[20_000] += 1
    y = flow.ones(40_000, placement=x.placement, sbp=flow.sbp.broadcast) * own
"""
)


@pytest.mark.parametrize("after", ["", "for _ in range(9):\n    x.sum().item()\n"])
@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.sweep(3)
def test_a_plain_tensor_that_differs_late_and_once_is_told(
    tmp_path: Path, shared: str, after: str
) -> None:
    code, said = launched(tmp_path, LATE_PLAIN + after, GLOBALTENSOR_SHARED_MEMORY=shared)
    assert code == 1
    assert "train.py:" in said
    assert "the ranks hold different values for operand 1 of mul" in said
    assert re.search(r"rank 1: float32\[40000\] of \[0, 1, 2, ...\]", said)
    assert ("This was found when the program ended" in said) == (not after)
    same = LATE_PLAIN.replace("+= 1", "+= 0") + after
    assert launched(tmp_path, same, GLOBALTENSOR_SHARED_MEMORY=shared) == (0, "")


def test_errors_show_the_lines_of_the_user_alone() -> None:
    with pytest.raises(SbpError) as found:
        rows().to_global(sbp=S(7))
    lines = shortened(found.value)
    assert lines is not None
    text = "".join(lines)
    assert __file__ in text
    assert os.path.dirname(flow.__file__) not in text
    assert "SbpError: sbp splits dim 7" in text
    assert found.value._render_traceback_()[0] == "Traceback (most recent call last):"  # type: ignore[attr-defined]
    assert shortened(ValueError("mine")) is None


REFUSED_BY_TORCH: list[tuple[type[Exception], str, Callable[[torch.Tensor], Any]]] = [
    (RuntimeError, "mat1 and mat2 shapes", lambda x: nn.Linear(7, 2)(x)),
    (RuntimeError, "same dtype", lambda x: nn.Linear(x.shape[1], 2)(x.double())),
    (RuntimeError, "same dtype", lambda x: nn.Linear(x.shape[1], 2)(x.long())),
    (ValueError, "to match target batch_size", lambda x: loss_of(x, torch.tensor([1]))),
    (RuntimeError, "target dtype", lambda x: loss_of(x, torch.zeros(len(x)))),
    (IndexError, "out of bounds", lambda x: x[:, 99]),
]
loss_of = nn.functional.cross_entropy


@pytest.mark.parametrize(("kind", "says", "call"), REFUSED_BY_TORCH)
def test_calls_that_torch_refuses_show_the_lines_of_the_user_alone(
    kind: type[Exception], says: str, call: Callable[[torch.Tensor], Any]
) -> None:
    for _ in range(2):  # a call that is planned the first time, and perhaps cached then
        with pytest.raises(kind, match=says) as found:
            call(rows())
        assert "KeyError" not in "".join(traceback.format_exception(found.value))
        lines = shortened(found.value)
        assert lines is not None
        text = "".join(lines)
        assert says in text
        assert __file__ in text
        assert os.path.dirname(flow.__file__) not in text
        assert os.path.dirname(torch.__file__) not in text


UNSEEDED = """
from typing import Any
import torch
from torch import nn
import globaltensor as flow
B = flow.sbp.broadcast
"""


def unseeded() -> tuple[list[float], float, list[float]]:
    """Draw in a program without a seed: torch gives each process a different seed."""
    where = line()
    own = torch.initial_seed()
    x = flow.randn(3, placement=where, sbp=B)
    dropped = nn.functional.dropout(torch.ones(64).to_global(where, B))  # type: ignore[attr-defined]
    return x.tolist(), float(own), dropped.to_local().tolist()


def test_without_a_seed_all_ranks_draw_the_first_ones_numbers(tmp_path: Path) -> None:
    functions = "".join(map(inspect.getsource, (line, unseeded)))
    script = tmp_path / "train.py"
    script.write_text(f"{UNSEEDED}{functions}print(unseeded())\n")
    with Launched(
        tmp_path, "--nproc_per_node", 2, script, warm=True, OMP_NUM_THREADS="1"
    ) as running:
        assert running.code() == 0, running.err
    first, second = sorted(
        re.sub(r"^\[\w+\]:", "", each) for each in running.out.strip().splitlines()
    )
    (x, seed, dropped), (y, other, dropped_too) = eval(first), eval(second)
    assert (x, dropped) == (y, dropped_too)
    assert seed != other


OPTIMIZERS = """
import torch, globaltensor as flow
rank = flow.env.get_rank()
E, B, S = flow.placement.all("cpu"), flow.sbp.broadcast, flow.sbp.split
"""
STAGES = """
L, R = flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])
a, b = (torch.nn.Parameter(torch.ones(4).to_global(p, B)) for p in (L, R))
optimizer = torch.optim.SGD([a, b], lr=0.1)
for step in range(4):
    if DIFFERS and rank == 3 and step == 2:
        optimizer.param_groups[0]["lr"] = 0.5
    ((a * 2).to_global(R, B) * b).sum().backward()
    optimizer.step(), optimizer.zero_grad()
total = b.sum().item()
"""
COUNTS = """
model = flow.parallelize(torch.nn.Linear(6, 4), E, "data")
optimizer = torch.optim.{name}(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(8, 6).to_global(E, B).to_global(sbp=S(0))).square().mean().backward()
    optimizer.step(), optimizer.zero_grad()
    if DIFFERS and rank == 1 and step == 2:
        optimizer.state[model.weight]["{key}"].mul_(3)
"""
SCALES = """
class Step(flow.nn.Graph):
    def __init__(self):
        super().__init__()
        self.model = flow.parallelize(torch.nn.Linear(6, 4), E, "data")
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        scale = 64.0 if DIFFERS and rank == 1 else 128.0
        self.set_grad_scaler({scaler})

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

graph = Step()
for step in range(4):
    graph(torch.ones(8, 6).to_global(E, B).to_global(sbp=S(0)))
"""
CLOSURES = """
model = flow.parallelize(torch.nn.Linear(6, 4), E, "data")
optimizer = torch.optim.{name}(model.parameters(), lr=0.1)

def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(8, 6).to_global(E, B).to_global(sbp=S(0))).square().mean()
    loss.backward()
    if DIFFERS and rank == 1 and step == 3:
        optimizer.param_groups[0]["lr"] = 0.5
    return loss

for step in range(4):
    optimizer.step(closure)
"""
OTHER_STEPS = {
    **{f"lr in a closure of {name}": (CLOSURES.format(name=name), 2) for name in ("SGD", "LBFGS")},
    "lr of a later stage": (STAGES, 4),
    **{
        f"{key} of {name}": (COUNTS.format(name=name, key=key), 2)
        for name, key in (("Adam", "step"), ("NAdam", "mu_product"), ("ASGD", "eta"))
    },
    "scale": (SCALES.format(scaler="flow.amp.StaticGradScaler(scale)"), 2),
    "first scale": (SCALES.format(scaler="flow.amp.GradScaler(init_scale=scale)"), 2),
}


def kind_of_step(what: str) -> str:
    return next(word for word in ("closure", "stage", "scale", "of") if word in what)


@pytest.mark.parametrize("what", OTHER_STEPS)
@pytest.mark.sweep(3, kind=kind_of_step)
def test_optimizer_steps_that_differ_on_one_rank_are_told(tmp_path: Path, what: str) -> None:
    program, ranks = OTHER_STEPS[what]
    code, said = launched(tmp_path, f"{OPTIMIZERS}DIFFERS = True{program}", ranks=ranks)
    assert code == 1
    assert "DivergenceError" in said


@pytest.mark.parametrize("what", OTHER_STEPS)
@pytest.mark.sweep(8)
def test_the_same_optimizer_steps_on_all_ranks_are_run(tmp_path: Path, what: str) -> None:
    program, ranks = OTHER_STEPS[what]
    code, said = launched(tmp_path, f"{OPTIMIZERS}DIFFERS = False{program}", ranks=ranks)
    assert (code, said) == (0, ""), said


RIGHT = {
    # A rank that is no member of the new group leaves torch's function at once.
    "new_group": """
if rank == 2:
    time.sleep(2)
if rank:
    dist.new_group([1, 2], use_local_synchronization=True)
else:
    dist.new_group([1, 2])
""",
    # A rank that is not the destination leaves the collective as soon as it has sent.
    "gather": """
if rank == 2:
    time.sleep(2)
dist.gather(torch.ones(2), [torch.empty(2) for _ in range(3)] if rank == 0 else None, dst=0)
""",
    "an optimizer of each rank for what it holds": """
tied = [
    flow.ones(4, placement=flow.placement("cpu", [r, r + 1]), sbp=B, requires_grad=True)
    for r in (0, 1)
]
held = [p for p in tied if rank in p.placement.ranks]
optimizer = torch.optim.SGD(held, lr=0.1)
for _ in range(3):
    for p in tied:
        (p * 2).sum().backward()
    optimizer.step()
for p in tied:
    p.detach().sum(0, keepdim=True).to_global(sbp=flow.sbp.split(0)).to_global(sbp=B)
""",
    "an optimizer of each rank": """
tied = flow.ones(4, placement=pair, sbp=B, requires_grad=True)
own = flow.ones(4, placement=flow.placement("cpu", [rank]), sbp=B, requires_grad=True)
optimizer = torch.optim.SGD([tied, own] if rank == 0 else [tied], lr=0.1)
for _ in range(3):
    (tied * 2).sum().backward()
    (own * 2).sum().backward()
    optimizer.step()
""",
}


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("what", RIGHT)
@pytest.mark.sweep(3)
def test_programs_whose_ranks_are_late_or_differ_rightly_are_run(
    tmp_path: Path, what: str, shared: str
) -> None:
    program = f"""{SOON}import time, torch, torch.distributed as dist, globaltensor as flow
B, rank = flow.sbp.broadcast, flow.env.get_rank()
pair, everyone = flow.placement("cpu", [0, 1]), flow.placement.all("cpu")
x = flow.ones(4, placement=pair, sbp=flow.sbp.split(0))
{RIGHT[what]}
y = x.to_global(sbp=B)
flow.ones(3, placement=everyone, sbp=flow.sbp.split(0)).sum().item()
"""
    code, said = launched(tmp_path, program, ranks=3, GLOBALTENSOR_SHARED_MEMORY=shared)
    assert (code, said) == (0, ""), said


REPORTS = """
import torch, globaltensor as flow
rank = flow.env.get_rank()
x = flow.ones(2, 400, placement=flow.placement.all("cpu"), sbp=flow.sbp.broadcast)
"""
#: Programs in which much has run, and what a report of the ranks must say and must not.
LONG_PROGRAMS = {
    "many numbers": (
        "for i in range(12):\n    x * (i + 0.5)\nif rank:\n    x * 100.5\n",
        "more often",
        "has run mul",
    ),
    "a number after many": (
        "for i in range(12):\n    x * (i + 0.5)\nx + (1.5 + rank)\n",
        "rank 1 has run add(f32[2, 400] B, float) with 2.5",
        "has run mul",
    ),
    "many operations": (
        "for i in range(300):\n    x[:, i:i + 1]\nif rank:\n    x.sin()\n",
        "rank 1 has run sin(f32[2, 400] B)",
        "has run __getitem__",
    ),
}


@pytest.mark.parametrize("name", LONG_PROGRAMS)
def test_reports_say_nothing_of_what_is_not_saved_any_more(tmp_path: Path, name: str) -> None:
    program, says, never = LONG_PROGRAMS[name]
    code, said = launched(tmp_path, REPORTS + program)
    assert code == 1
    assert says in said
    assert never not in said


@pytest.mark.parametrize("first", ["", "x.sum().item()\n"], ids=["first exchange", "later"])
def test_a_collective_of_flow_that_one_rank_is_in_alone_is_told_over_gloo(
    tmp_path: Path, first: str
) -> None:
    program = (
        f"{SOON}{PROGRAM if first else PROGRAM.rpartition('x =')[0]}{first}"
        "if rank:\n    flow.distributed.all_reduce(torch.ones(3))\nelse:\n"
        '    torch.ones(4).to_global(flow.placement.all("cpu"), B).sum().item()\n'
    )
    code, said = launched(tmp_path, program, GLOBALTENSOR_SHARED_MEMORY="0")
    assert code == 1
    assert "IndexError" not in said
    assert "GLHF" not in said
    assert re.search(
        r"all_reduce +\(train.py:\d+: flow.distributed.all_reduce"
        r"|flow.distributed.all_reduce.*\n.*(did not join|but rank 0 calls an operation)",
        said,
    )


def test_check_ranks_says_which_rank_has_not_entered_the_block(tmp_path: Path) -> None:
    code, said = launched(
        tmp_path,
        f"{PROGRAM}if rank == 0:\n    with flow.check_ranks():\n        x.sum().item()\n"
        "else:\n    x.sum().item()\n",
        GLOBALTENSOR_TIMEOUT="4",
    )
    assert code == 1
    assert "rank 1 has not entered check_ranks(): every rank must enter the block" in said, said
