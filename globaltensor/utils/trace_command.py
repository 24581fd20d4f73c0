"""``globaltensor trace``: run a script on several ranks, and write one trace of all of them.

`main` is the command. It starts the launcher, whose ranks run this file as a module: each runs the
script in a block of `flow.utils.trace`.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Final

from .._base.command_line import CommandParser
from ..distributed.env import get_rank
from ..distributed.launch import run
from ..distributed.launcher.job import Job
from ..distributed.launcher.options import job_of, parser
from ..errors import WorldError
from .run_trace import trace

__all__ = ["main", "trace_parser"]

_DESCRIPTION: Final = """\
Runs a script as the launcher does, profiles it on all ranks with torch.profiler, and writes one
trace of all ranks for ui.perfetto.dev and chrome://tracing. Trace a short run: the trace of a
complete program is large, and is collected in memory. flow.utils.trace(path) traces a block."""
_EXAMPLES: Final = (
    "%(prog)s -n 2 train.py --steps 5",
    "%(prog)s -n 2 --out first_steps.json train.py",
)


def trace_parser(prog: str = "globaltensor trace") -> CommandParser:
    """Return the parser of the command: the launcher's options, and ``--out``."""
    out = parser(prog, _DESCRIPTION, _EXAMPLES)
    out.add_argument(
        "--out",
        default="trace.json",
        metavar="FILE",
        help="the file of the trace (default %(default)s); other options are the launcher's",
    )
    return out


def main(arguments: Sequence[str] | None = None, prog: str = "globaltensor trace") -> int:
    """Run the command, and return its exit code."""
    options = trace_parser(prog).parse_args(arguments)

    def job() -> Job:
        if options.no_python:
            raise WorldError("--no_python: only a Python script or module can be traced")
        plain = job_of(options)
        script = plain.command[2:]  # without the interpreter and -u
        command = [*plain.command[:2], "-m", __name__, options.out, *script]
        return dataclasses.replace(plain, command=command)

    return run(job)


def _run_traced(path: str, script: str, *arguments: str) -> None:
    """Run a script, or a module after ``-m``, as python does, in the block of a trace."""
    # torch's profiler writes a line of its own at each start and stop, of level 5
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    module = script == "-m"
    sys.argv[:] = arguments if module else [script, *arguments]
    if not module:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    ending = None
    with trace(path):
        try:
            if module:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:  # such as sys.exit(main()): the trace is written if it succeeded
            if end.code:
                raise
            ending = end
    if get_rank() == 0:
        sys.stderr.write(f"globaltensor trace: wrote {path}; ui.perfetto.dev opens it\n")
    if ending is not None:
        raise ending


if __name__ == "__main__":
    _run_traced(*sys.argv[1:])
