"""The command ``globaltensor``: its verbs, each of which is a Python function.

globaltensor launch --nproc_per_node 2 script.py     start a script on several processes
globaltensor doctor [--json]                         what this machine and this environment offer
globaltensor profile --nproc 2 --out cluster.json    what computing and moving data cost here, for plans
globaltensor plan MODULE:NAME --cluster cluster.json the best way to run a model there
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Sequence

__all__ = ["doctor", "main"]


def doctor() -> dict[str, object]:
    """Return what this process would run on. Starts nothing.

    The dict has versions, devices, backends, and the world that the environment describes."""
    import torch
    import torch.distributed as dist

    from .distributed.cluster_env import detect
    from .errors import WorldError

    try:
        found = detect(os.environ)
        place = (
            "a world of one"
            if found is None
            else (
                f"rank {found.rank} of {found.world_size} at {found.meeting}, started by "
                f"{found.source}"
            )
        )
    except WorldError as error:
        place = f"cannot tell: {error}"
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and importlib.util.find_spec("mpi4py") is not None,
    }
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "backends": [name for name, available in backends.items() if available],
        "world": place,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["launch"]:  # it has its own options, and passes the script's on
        from .distributed.launch import main as launch

        return launch(arguments[1:], prog="globaltensor launch")
    parser = argparse.ArgumentParser(
        prog="globaltensor",
        description="Global tensors for PyTorch: a cluster looks like one device.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    verbs.add_parser("launch", help="start a script on several processes (globaltensor launch -h)")
    verbs.add_parser("doctor", help="what this machine and this environment offer").add_argument(
        "--json", action="store_true", help="one JSON object"
    )
    _profile_options(
        verbs.add_parser(
            "profile", help="measure what computing and moving data cost here", description=_PROFILE
        )
    )
    planner = verbs.add_parser("plan", help="find the best way to run a model on a cluster")
    if arguments[:1] == ["plan"]:  # it imports more than other verbs need
        from .auto import cli

        planner.description = cli.DESCRIPTION
        cli.options_of(planner)
        return cli.run(parser.parse_args(arguments))
    options = parser.parse_args(arguments)
    if options.verb == "profile":
        return _profile(options)
    return _doctor(options)


def _doctor(options: argparse.Namespace) -> int:
    found = doctor()
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.writelines(
            f"{name:14}{', '.join(map(str, value)) or 'none' if isinstance(value, list) else value}\n"  # noqa: E501
            for name, value in found.items()
        )
    return 0


_PROFILE = """Measures matmuls, memory, each collective by size and group, messages, and how much moving and computing hinder each other, on all ranks at once.
In a job of several ranks (under a launcher) it measures these; otherwise it starts ranks of its own on this machine."""  # noqa: E501


def _profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=int,
        default=0,
        metavar="N",
        help="ranks to start: one for each GPU, or two, unless told",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        metavar="S",
        help="how long it may measure (about; %(default)g)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what is measured"
    )
    parser.add_argument(
        "--backend", default="auto", help="gloo, nccl or mpi: what carries the collectives"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="where to write it, as JSON that Cluster.load and `globaltensor plan --cluster` read",
    )
    parser.add_argument(
        "--name", default="profiled", help="how plans and reports call this cluster"
    )
    parser.add_argument(
        "--json", action="store_true", help="print what would be written instead of a table"
    )


def _profile(options: argparse.Namespace) -> int:
    from ._base.writable_path import check_writable
    from .auto.profile import describe, profile
    from .cluster.json_file import as_json
    from .distributed.cluster_env import detect
    from .distributed.world import world
    from .errors import ClusterError, WorldError

    try:
        place = detect(os.environ)
        # on the rank that writes, and before the measurements
        if options.out and (place is None or place.rank == 0):
            check_writable(options.out)
        found = profile(
            options.seconds, options.nproc, options.device, options.backend, options.name
        )
        if world().rank == 0:
            if options.out:
                found.save(options.out)
            sys.stdout.write(
                (json.dumps(as_json(found)) if options.json else describe(found)) + "\n"
            )
    except (ClusterError, WorldError, OSError) as error:
        sys.stderr.write(f"globaltensor profile: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
