"""The command ``globaltensor``: each verb is a Python function first; this file only names them.

    globaltensor launch --nproc_per_node 2 script.py     start a script on several processes
    globaltensor doctor [--json]                         what this machine and this environment offer
"""

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
    """What this process would run on: versions, devices, backends, and the world that the environment describes. Starts nothing."""
    import torch
    import torch.distributed as dist

    from .distributed.detect import detect
    from .errors import WorldError

    try:
        found = detect(os.environ)
        place = "a world of one" if found is None else f"rank {found.rank} of {found.world_size} at {found.addr}:{found.port}, started by {found.source}"
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
    """The command line -> the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["launch"]:  # has options of its own, and passes the script's on
        from .distributed.launch import main as launch

        return launch(arguments[1:], prog="globaltensor launch")
    parser = argparse.ArgumentParser(prog="globaltensor", description="Global tensors for PyTorch: a cluster looks like one device.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    verbs.add_parser("launch", help="start a script on several processes (globaltensor launch -h)")
    verbs.add_parser("doctor", help="what this machine and this environment offer").add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    found = doctor()
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.writelines(f"{name:14}{', '.join(map(str, value)) or 'none' if isinstance(value, list) else value}\n" for name, value in found.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
