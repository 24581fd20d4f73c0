"""The launcher's command line: OneFlow's options and torchrun's. ``distributed.launch`` calls it.

An option may also be spelled with dashes. torchrun's variable ``PET_<OPTION>`` sets it too.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import determine_local_world_size

from ..._base.command_line import CommandParser
from ...errors import WorldError
from .job import ROLE, Job, Output

__all__ = ["job_of", "parser"]

BACKENDS: Final = ("auto", "gloo", "nccl", "mpi")
_DESCRIPTION: Final = (
    "Start a script as several processes, on one machine or more, and monitor them."
)
_EXAMPLES: Final = (
    "%(prog)s -n 2 train.py --lr 0.1",
    "%(prog)s --nnodes 2 --node_rank 0 -n 8 --master_addr 10.0.0.1 --master_port 29500 train.py      (on 10.0.0.1; --node_rank 1 on the other)",  # noqa: E501
    "%(prog)s --nnodes 1:4 --max_restarts 3 --rdzv_backend c10d --rdzv_endpoint 10.0.0.1:29400 --rdzv_id job7 train.py     (the same on each)",  # noqa: E501
)
_EPILOG: Final = """\
A variable can set each option: PET_NPROC_PER_NODE sets --nproc_per_node. Kubernetes' PyTorch jobs
set such variables. docs/environment.md describes the launcher."""


def parser(
    prog: str = "python -m globaltensor.distributed.launch",
    description: str = _DESCRIPTION,
    examples: Sequence[str] = _EXAMPLES,
) -> CommandParser:
    """Return the parser of the launcher's options, each with its explanation."""
    out = CommandParser(
        prog=prog, description=description, examples=examples, epilog=_EPILOG, allow_abbrev=False
    )

    def group(title: str) -> Any:
        into = out.add_argument_group(title)

        def add(*names: str, help: str, **how: Any) -> None:
            dashed = [name.replace("_", "-") for name in names if "_" in name]
            into.add_argument(*names, *dashed, action=how.pop("action", env), help=help, **how)

        return add

    add = group("processes and nodes")
    add(
        "--nnodes",
        default="1",
        help=(
            "number of nodes (machines), or MIN:MAX for an elastic job; start the launcher on "
            "each (default 1)"
        ),
    )
    add(
        "--node_rank",
        type=int,
        default=0,
        help="number of this node, from 0; not used with a dynamic rendezvous (default 0)",
    )
    add(
        "-n",
        "--nproc_per_node",
        default="1",
        help=(
            "processes on this node; gpu: one for each GPU, cpu: for each core, auto: gpu where "
            "there is one (default 1)"
        ),
    )
    add(
        "--master_addr",
        default="127.0.0.1",
        help="address of node 0, where the ranks meet (default 127.0.0.1)",
    )
    add(
        "--master_port",
        type=int,
        default=0,
        help="a free port on node 0; needed with several nodes (default: one that is free)",
    )
    add(
        "--local_addr",
        default="",
        help=(
            "address at which the other nodes reach this node; used with a dynamic rendezvous "
            "(default: the address of the route to --rdzv_endpoint)"
        ),
    )
    add(
        "--backend",
        choices=BACKENDS,
        default="",
        help=(
            "sets GLOBALTENSOR_BACKEND, the backend of the collectives; mpi: start the ranks "
            "through mpirun (default auto)"
        ),
    )

    add = group("failures and rendezvous")
    add(
        "--max_restarts",
        type=int,
        default=0,
        help="how many times all ranks are restarted after a failure (default 0)",
    )
    add(
        "--rdzv_backend",
        default="",
        help=(
            "static: nodes have a --node_rank; c10d: nodes meet at --rdzv_endpoint; ... (default "
            "static; MIN:MAX: c10d)"
        ),
    )
    add(
        "--rdzv_endpoint",
        default="",
        help="HOST:PORT where nodes meet; with static the same as --master_addr and --master_port",
    )
    add(
        "--rdzv_id",
        default="",
        help=(
            "the job's name, the same on all its nodes; jobs of different names may share an "
            "endpoint"
        ),
    )
    add(
        "--rdzv_conf",
        default="",
        help=(
            "KEY=VALUE,...: timeout (seconds until all nodes must have joined), connect_timeout "
            "(seconds until node 0 must answer), keep_alive_interval (seconds between heartbeats "
            "of a launcher), keep_alive_max_attempt (how many heartbeats it may miss), "
            "last_call_timeout (seconds in which more nodes than MIN may join), and the options of "
            "the backend"
        ),
    )
    add(
        "--standalone",
        action=check_env,
        help="a single node without other nodes, on a free port; --rdzv_* are ignored",
    )
    add(
        "--monitor_interval",
        type=float,
        default=0.1,
        help="seconds between checks of the ranks (default 0.1)",
    )
    add(
        "--shutdown_timeout",
        type=float,
        default=10.0,
        help="seconds between SIGTERM and SIGKILL when ranks are stopped (default 10)",
    )
    add(
        "--start_method",
        choices=("spawn", "fork", "forkserver"),
        default="spawn",
        help="accepted as by torchrun, without effect: a script always runs as its own process",
    )
    add(
        "--role",
        default=ROLE,
        help=f"a name for the ranks, in ROLE_NAME and before the lines of --tee (default {ROLE})",
    )

    add = group("the script")
    add(
        "-m",
        "--module",
        action=check_env,
        help="the script is the name of a module, which runs as with `python -m`",
    )
    add(
        "--no_python",
        action=check_env,
        help="the script is an executable program: run it without python",
    )

    add = group("output")
    add(
        "--redirect_stdout_and_stderr",
        action=check_env,
        help=(
            "write each rank's output to LOGDIR/local_rank_<i>/stdout and stderr instead of the "
            "console"
        ),
    )
    add(
        "--logdir",
        default="log",
        help=(
            "folder for --redirect_stdout_and_stderr; earlier logs there are overwritten "
            "(default log)"
        ),
    )
    add(
        "--log_dir",
        default="",
        help=(
            "folder for -r and -t, as in torchrun: the files are "
            "LOG_DIR/<rdzv_id>_<random>/attempt_<n>/<local rank>/stdout.log and stderr.log"
        ),
    )
    add(
        "-r",
        "--redirects",
        default="0",
        help=(
            "output for --log_dir only: 0 nothing, 1 stdout, 2 stderr, 3 both, or by local "
            "rank 0:3,1:1"
        ),
    )
    add(
        "-t",
        "--tee",
        default="0",
        help="output for --log_dir and the console, with the rank before each line (as for -r)",
    )
    add(
        "--local_ranks_filter",
        default="",
        help="local ranks whose output the console shows, such as 0,2; the files get all output",
    )

    out.add_argument(
        "training_script", help="the script (or module, or program) that every rank runs"
    )
    out.add_argument(
        "training_script_args",
        nargs=argparse.REMAINDER,
        help="arguments of the script",
    )
    return out


def job_of(options: argparse.Namespace) -> Job:
    """Return the parsed command line as a job. Raise WorldError if it makes no sense."""
    nnodes = _nodes(options.nnodes)
    backend, endpoint, run = (
        options.rdzv_backend or ("static" if nnodes[0] == nnodes[1] else "c10d"),
        options.rdzv_endpoint,
        options.rdzv_id,
    )
    addr, port = options.master_addr, options.master_port
    if options.standalone:
        if nnodes != (1, 1):
            raise WorldError(f"--standalone is for one node, but --nnodes is {options.nnodes}")
        backend, endpoint, run, addr, port = "static", "", uuid.uuid4().hex, "127.0.0.1", 0
    if backend == "static" and endpoint:
        addr, port = _endpoint(endpoint, port)
    elif backend != "static" and not endpoint and port:
        endpoint = f"{addr}:{port}"
    return Job(
        command=_command(options),
        nproc_per_node=_processes(options.nproc_per_node),
        nnodes=nnodes,
        node_rank=options.node_rank,
        addr=addr,
        port=port,
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_id=run,
        rdzv_conf=_conf(options.rdzv_conf),
        local_addr=options.local_addr,
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        role=options.role,
        shutdown_timeout=options.shutdown_timeout,
        backend=options.backend,
        output=_output(options),
    )


def _command(options: argparse.Namespace) -> list[str]:
    script, arguments = options.training_script, options.training_script_args
    if options.no_python and options.module:
        raise WorldError(
            "--no_python and --module exclude each other: a module needs python to run it"
        )
    if options.no_python:
        return [script, *arguments]
    if options.module:
        return [sys.executable, "-u", "-m", script, *arguments]
    if not os.path.exists(script):
        raise WorldError(
            f"{script} does not exist (looked from {os.getcwd()}): name a script, or a module "
            f"with -m"
        )
    return [sys.executable, "-u", script, *arguments]


def _nodes(text: str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in text.split(":")]
        return numbers[0], numbers[-1] if len(numbers) <= 2 else int("")
    except ValueError:
        raise WorldError(
            f"--nnodes {text}: must be a number of nodes (machines), or MIN:MAX"
        ) from None


def _processes(text: str) -> int:
    try:
        return int(determine_local_world_size(text))
    except ValueError as error:
        if text == "gpu":
            raise WorldError(
                "--nproc_per_node gpu: PyTorch finds no GPU on this machine. Give a number for "
                "processes on CPUs. With a GPU, check the build of PyTorch and the driver: "
                "globaltensor doctor"
            ) from error
        raise WorldError(
            f"--nproc_per_node {text}: must be a number, auto, cpu or gpu ({error})"
        ) from error


def _endpoint(text: str, port: int) -> tuple[str, int]:
    host, colon, number = text.rpartition(":")
    try:
        return (host.strip("[]"), int(number)) if colon else (text, port)
    except ValueError:
        raise WorldError(f"--rdzv_endpoint {text}: it must be HOST:PORT") from None


def _conf(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for key, equals, value in pairs:
        if not (key.strip() and equals and value.strip()):
            raise WorldError(f"--rdzv_conf {text}: it must be KEY=VALUE,KEY=VALUE,...")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _output(options: argparse.Namespace) -> Output:
    streams = {}
    for name in ("redirects", "tee"):
        value = getattr(options, name)
        try:
            streams[name] = Std.from_str(value)
        except ValueError:
            raise WorldError(
                f"--{name} {value}: must be 0 nothing, 1 stdout, 2 stderr, 3 both, or by local "
                f"rank, like 0:3,1:1"
            ) from None
    try:
        shown = (
            frozenset(int(part) for part in options.local_ranks_filter.split(","))
            if options.local_ranks_filter
            else None
        )
    except ValueError:
        raise WorldError(
            f"--local_ranks_filter {options.local_ranks_filter}: must be local ranks, separated by "
            f"commas, like 0,2"
        ) from None
    folder = Path(options.logdir) if options.redirect_stdout_and_stderr else None
    return Output(folder, streams["redirects"], streams["tee"], options.log_dir or None, shown)
