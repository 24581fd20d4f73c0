"""The command ``globaltensor``: its verbs, each of which is a Python function.

globaltensor launch -n 2 script.py                   start a script on several processes
globaltensor trace -n 2 --out trace.json script.py   the same, with a trace of all ranks for Perfetto
globaltensor doctor [--json | --patches]             check this machine and this environment
globaltensor ops [NAME ...]                          how torch's functions run on global tensors
globaltensor profile -n 2 --out cluster.json         what computing and moving data cost here, for plans
globaltensor plan MODULE:NAME --cluster cluster.json the best way to run a model there
globaltensor completion bash                         a script that completes all this in a shell
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ._base.command_line import CommandParser
    from .distributed.doctor import Finding

__all__ = ["doctor", "main"]


def doctor(ranks: bool = True) -> list[Finding]:
    """Check this machine and this environment, and return the findings.

    They are about versions, extras and backends, the world that the environment describes, cores,
    memory, limits, network interfaces, GPUs and clocks. With ``ranks`` two processes are started
    over gloo. They exchange a number and end within a minute. Nothing else is started.
    """
    from .distributed.doctor import examine

    return list(examine(ranks))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["launch"]:  # it has its own options, and passes the script's on
        from .distributed.launch import main as launch

        return launch(arguments[1:], prog="globaltensor launch")
    if arguments[:1] == ["trace"]:  # the launcher's options too
        from .utils.trace_command import main as trace

        return trace(arguments[1:])
    top, parsers = _parsers(arguments[:1])
    options = top.parse_args(arguments)
    if options.verb == "completion":
        from ._base.shell_completion import completion_script
        from .distributed.launcher.options import parser as launcher
        from .utils.trace_command import trace_parser

        _, parsers = _parsers(list(_VERBS))
        parsers |= {"launch": launcher("globaltensor launch"), "trace": trace_parser()}
        sys.stdout.write(completion_script(options.shell, "globaltensor", top, parsers))
        return 0
    runs = {"doctor": _doctor, "ops": _ops, "profile": _profile, "plan": _plan}
    try:
        return runs[options.verb](options)
    except KeyboardInterrupt:
        sys.stderr.write(f"globaltensor {options.verb}: interrupted\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # such as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parsers(verbs: Sequence[str]) -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser of the command, and the parsers of its verbs.

    The options of ``plan`` need more imports than other verbs do, so they are added only if
    ``verbs`` names it.
    """
    from . import __version__
    from ._base.command_line import CommandParser

    top = CommandParser(
        prog="globaltensor",
        description="Global tensors for PyTorch: a cluster looks like one device.",
        examples=(
            "globaltensor doctor                          check this machine",
            "globaltensor launch -n 2 train.py --lr 0.1   start two processes",
            "globaltensor plan models/gpt.py:small --cluster dgx-h100",
        ),
        epilog="`globaltensor VERB --help` has the options and examples of a verb.",
    )
    top.add_argument("--version", action="version", version=f"globaltensor {__version__}")
    group = top.add_subparsers(dest="verb", required=True, metavar="verb")
    parsers: dict[str, CommandParser] = {}
    for verb, (what, description, examples, add_options) in _VERBS.items():
        parser = parsers[verb] = group.add_parser(
            verb, help=what, description=description, examples=examples
        )
        if verb != "plan" or "plan" in verbs:
            add_options(parser)
    return top, parsers


# ------------------------------------------------------------------------------------------- doctor


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--patches",
        action="store_true",
        help="list what this library changes in torch and in other libraries, with the reasons",
    )
    parser.add_argument(
        "--no-ranks", action="store_true", help="start no processes: skip the check two_ranks"
    )


def _doctor(options: argparse.Namespace) -> int:
    if options.patches:
        sys.stdout.write(_patch_table())
        return 0
    from ._base.progress_line import ProgressLine
    from .distributed.doctor import as_data, examine

    findings, checks = [], examine(ranks=not options.no_ranks)
    while True:
        with ProgressLine("globaltensor doctor", quiet=options.json) as line:
            line.show("checking")
            finding = next(checks, None)
        if finding is None:
            break
        findings.append(finding)
        if not options.json:
            sys.stdout.write(f"{finding}\n")
            sys.stdout.flush()
    if options.json:
        sys.stdout.write(json.dumps(as_data(findings), indent=1) + "\n")
    return int(any(finding.status == "FAIL" for finding in findings))


def _patch_table() -> str:
    """Return the table of patches as text: target, since, state and reason of each."""
    import globaltensor  # noqa: F401 - importing it applies the patches

    from ._base.patches import status

    rows = [(s.row.target, s.row.since, s.state, s.row.reason) for s in status()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]])
        + "\n"
        for row in rows
    )


# ---------------------------------------------------------------------------------------------- ops


def _ops_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="parts of names, such as nn.functional.linear"
    )


def _ops(options: argparse.Namespace) -> int:
    from collections import Counter

    import globaltensor  # noqa: F401 - importing it registers the entries

    from ._base.command_line import closest
    from ._ops.op_table import KINDS, op_table

    every = op_table()
    table = [
        entry
        for entry in every
        if not options.names or any(name in entry.function for name in options.names)
    ]
    if not table:
        functions = [entry.function for entry in every]
        short = {name.rpartition(".")[2]: name for name in functions}
        near = [closest(name, functions) or closest(name, short) for name in options.names]
        meant = f"; did you mean {', '.join(filter(None, near))}?" if any(near) else ""
        sys.stderr.write(f"globaltensor ops: no function of torch matches {options.names}{meant}\n")
        return 1
    width = max(len(entry.function) for entry in table)
    for entry in table:
        sys.stdout.write(f"{entry.function:{width}}  {entry.kind:16}{entry.detail}".rstrip() + "\n")
    sys.stdout.write("\n")
    for kind, n in Counter(entry.kind for entry in table).most_common():
        sys.stdout.write(f"{n:5}  {kind:16}{KINDS[kind]}\n")
    return 0


# ------------------------------------------------------------------------------------------ profile


def _profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        "--nproc",
        type=int,
        default=0,
        metavar="N",
        help="number of ranks to start (default: one for each GPU, or two)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        metavar="S",
        help="about how many seconds to measure (default: %(default)g)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="the device to measure"
    )
    parser.add_argument(
        "--backend", default="auto", help="the backend that runs the collectives: gloo, nccl or mpi"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=(
            "file to write the measurements to, as JSON that Cluster.load and `globaltensor plan "
            "--cluster` read"
        ),
    )
    parser.add_argument(
        "--name", default="profiled", help="name of this cluster in plans and reports"
    )
    parser.add_argument(
        "--json", action="store_true", help="print what would be written instead of a table"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="show no progress on stderr, only errors"
    )


def _profile(options: argparse.Namespace) -> int:
    from ._base.atomic_file import check_writable
    from ._base.progress_line import ProgressLine, StageFile
    from .auto.profile import describe, profile
    from .cluster.json_file import as_json
    from .distributed.cluster_env import detect
    from .distributed.world import world
    from .errors import ClusterError, WorldError

    try:
        place = detect(os.environ)
        first = place is None or place.rank == 0
        # on the rank that writes, and before the measurements
        if options.out and first:
            check_writable(options.out)
        with tempfile.TemporaryDirectory(prefix="globaltensor_profile_") as folder:
            stage = StageFile(str(Path(folder, "stage")))
            quiet = options.quiet or not first
            with ProgressLine("globaltensor profile", options.seconds, stage, quiet) as line:
                line.show("starting ranks" if place is None else "connecting to the other ranks")
                cluster = profile(
                    options.seconds,
                    options.nproc,
                    options.device,
                    options.backend,
                    options.name,
                    stage=stage,
                )
        if world().rank == 0:
            if options.out:
                cluster.save(options.out)
            sys.stdout.write(
                (json.dumps(as_json(cluster)) if options.json else describe(cluster)) + "\n"
            )
    except (ClusterError, WorldError, OSError) as error:
        sys.stderr.write(f"globaltensor profile: {error}\n")
        return 1
    return 0


# -------------------------------------------------------------------------------- plan, completion


def _plan_options(parser: argparse.ArgumentParser) -> None:
    from .auto import cli

    cli.options_of(parser)


def _plan(options: argparse.Namespace) -> int:
    from .auto.cli import run

    return run(options)


def _completion_options(parser: argparse.ArgumentParser) -> None:
    from ._base.shell_completion import SHELLS

    parser.add_argument("shell", choices=tuple(SHELLS), help="the shell that reads the script")


def _no_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the launcher has its own parser."""


#: Each verb with its line in the help of the command, its description, examples and options.
_VERBS: Final[
    dict[str, tuple[str, str, tuple[str, ...], Callable[[argparse.ArgumentParser], None]]]
] = {
    "launch": ("start a script on several processes (globaltensor launch -h)", "", (), _no_options),
    "trace": (
        "start a script on several processes, and write one trace of them",
        "",
        (),
        _no_options,
    ),
    "doctor": (
        "check this machine and this environment, and advise",
        """\
Checks this machine and this environment. Each check is a line: ok, warn (jobs run, but worse) or
FAIL (they do not), with what was found and how to mend it. One check starts two processes, which
exchange a number and end within a minute. The exit code is 1 if a check fails.""",
        (
            "globaltensor doctor",
            "globaltensor doctor --no-ranks --json         start no processes",
            "globaltensor doctor --patches                 what importing the library changes",
        ),
        _doctor_options,
    ),
    "ops": (
        "list how each of torch's functions runs on global tensors",
        "Lists how each of torch's functions runs on global tensors.",
        (
            "globaltensor ops                  all of them, and a count of each kind",
            "globaltensor ops conv softmax     those with one of these in their names",
        ),
        _ops_options,
    ),
    "profile": (
        "measure the cost of computation and communication here",
        """\
Measures matmuls, memory, each collective by size and group, messages, and how much communication
and computation slow each other down, on all ranks at the same time. In a job of several ranks
(under a launcher) it measures those ranks. Otherwise it starts ranks on this machine.""",
        (
            "globaltensor profile -n 2 --out cluster.json          two ranks of this machine",
            "globaltensor profile --seconds 10 --quiet --json      coarse figures, for programs",
            "globaltensor launch -n 8 --no_python globaltensor profile --out cluster.json",
        ),
        _profile_options,
    ),
    "plan": (
        "find the best plan to run a model on a cluster",
        """\
Finds the best plan to run a model on a cluster. Reports its cost, the reasons, and the cost of the
alternatives. The model is not run and no device is needed, so the cluster may be one that you do
not have. MODULE:NAME is a tuple (model, inputs), or a function that returns one. The inputs are a
tuple of tensors, of which only the shapes are used. A dict of keyword arguments may follow the
inputs. An nn.Graph or its class may replace the model.""",
        (
            "globaltensor plan models/gpt.py:small --cluster dgx-h100 --memory 60GiB",
            "globaltensor plan models/gpt.py:small --save p.json --html p.html",
            "globaltensor plan mymodels.gpt:small --mesh 2x4 --explain 'blocks.*.up'",
        ),
        _plan_options,
    ),
    "completion": (
        "print a script that completes this command in a shell",
        "Prints a script that completes verbs, options and values of this command in a shell.",
        (
            'eval "$(globaltensor completion bash)"                           in ~/.bashrc',
            "globaltensor completion zsh > ~/.zfunc/_globaltensor             a folder of $fpath",
            "globaltensor completion fish > ~/.config/fish/completions/globaltensor.fish",
        ),
        _completion_options,
    ),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
