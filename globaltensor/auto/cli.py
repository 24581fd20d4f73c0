"""``globaltensor plan``: plan a model named on the command line.

The command line calls `run`. The cluster need not exist here.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._base.atomic_file import check_writable
from .._base.command_line import closest
from .._base.progress_line import ProgressLine
from ..cluster import PRESETS, Cluster
from ..errors import GlobalTensorError, PlanError
from ..graph.graph import Graph
from .api import plan
from .plan.plan import Plan
from .plan.report import report

__all__ = ["Target", "cluster_for", "options_of", "plan_target", "run", "target"]

_UNMEASURED = (
    "assumed to be those of the generic machine, except the number of GPUs and their memory; "
    "`globaltensor profile --out cluster.json` measures them"
)


class Target(NamedTuple):
    """A model or graph to plan, with its arguments."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def options_of(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to the parser."""
    parser.add_argument(
        "target",
        metavar="MODULE:NAME",
        help=(
            "a module that can be imported from here, or a file, and the name in it that provides "
            "(model, inputs)"
        ),
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE-OR-PRESET",
        help=(
            f"a file that `globaltensor profile --out` has written, or one of {', '.join(PRESETS)}"
        ),
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="number of devices of the cluster to use (default: all)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of a device, such as 16GiB (default: the cluster's)",
    )
    parser.add_argument("--mesh", metavar="2x4", help="the shape of the mesh")
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="number of rows of the inputs (default: those of the example inputs)",
    )
    parser.add_argument(
        "--objective",
        choices=("time", "memory"),
        default="time",
        help="what to minimize (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="stop the search after this many seconds, with the best plan so far",
    )
    parser.add_argument(
        "--explain",
        action="append",
        default=[],
        metavar="PATH",
        help="instead of the report, explain the choice for this module, parameter or call",
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as an HTML page")
    parser.add_argument("--save", metavar="FILE", help="write the plan as JSON, for Plan.load")
    parser.add_argument(
        "--json", action="store_true", help="print the plan as JSON instead of the report"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="add the times of the search, the size of its problem and the log of its solver",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="show no progress on stderr, only errors and notes"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command. Return the exit code."""
    line = ProgressLine("globaltensor plan", options.seconds, quiet=options.quiet)
    say: Callable[[str], object] = lambda text: line.print(f"globaltensor plan: {text}")  # noqa: E731
    try:
        for path in (options.html, options.save):
            if path:
                check_writable(path)  # fail now rather than after the search
        with line:
            line.show("searching")
            best_plan = plan_target(
                options.target, options.cluster, options.devices, memory=options.memory,
                mesh=_shape(options.mesh), batch=options.batch,
                objective=options.objective, seconds=options.seconds, say=say,
            )  # fmt: skip
        output_texts = [best_plan.explain(path) for path in options.explain] or [
            best_plan.to_json()
            if options.json
            else report(best_plan, options.verbose, options.save)
        ]
        for path, write in ((options.html, best_plan.save_html), (options.save, best_plan.save)):
            if path:
                write(path)
                say(f"written to {path}")
    except (GlobalTensorError, OSError) as error:
        say(str(error))
        return 1
    sys.stdout.write("\n\n".join(output_texts) + "\n")
    return 0


def plan_target(
    name: str,
    cluster: str | None = None,
    devices: int | None = None,
    *,
    say: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> Plan:
    """Return the plan for the target MODULE:NAME on ``devices`` devices of a cluster.

    ``options`` are as for `plan`. ``say`` is called with each assumption that was made.
    """
    wanted = target(name)
    on = cluster_for(cluster, devices, say)
    return plan(wanted.model, wanted.args, on, kwargs=wanted.kwargs, **options)


def cluster_for(
    cluster: str | None,
    devices: int | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Cluster:
    """Return a cluster by preset or file, with ``devices`` devices.

    Without a name it is this machine's accelerators, or two devices of the generic cluster if the
    machine has fewer than two. Raises PlanError or ClusterError.
    """
    if devices is not None and devices < 1:
        raise PlanError(f"--devices {devices}: at least 1")
    if cluster is None:
        gpu_count = torch.cuda.device_count()
        if gpu_count >= 2:
            memory = torch.cuda.get_device_properties(0).total_memory
            return Cluster(
                device="cuda",
                size=devices or gpu_count,
                memory=memory,
                name=f"this machine, {torch.cuda.get_device_name(0)}",
                source=_UNMEASURED,
            )
        count = devices or 2
        say(
            f"no --cluster given and fewer than 2 accelerators here: planning for {count} "
            f"device{'s' * (count != 1)} of the generic cluster, which describes no particular "
            "machine; `globaltensor profile --out cluster.json` measures this one, for --cluster "
            "cluster.json"
        )
        return Cluster(size=count)
    if cluster in PRESETS and not os.path.exists(cluster):
        resolved = Cluster.preset(cluster)
    elif os.path.exists(cluster) or os.sep in cluster or cluster.endswith(".json"):
        resolved = Cluster.load(cluster)
    else:
        meant = closest(cluster, PRESETS)
        raise PlanError(
            f"--cluster {cluster}: there is no such file, and no preset of this name; presets are "
            f"{', '.join(PRESETS)}" + (f"; did you mean {meant}?" if meant else "")
        )
    if devices is not None:
        return resolved.with_size(devices)
    if not resolved.size:
        say(
            f"{cluster} does not say how many devices there are: planning for 2; set the number "
            "with --devices"
        )
        return replace(resolved, size=2)
    return resolved


def target(name: str) -> Target:
    """Return the target that MODULE:NAME provides.

    Raises PlanError where the name does not exist or provides something else. Errors of the
    target's own code are passed on.
    """
    module, found, path = name.rpartition(":")
    if not found or not module or not path:
        raise PlanError(
            f"{name!r} is not of the form MODULE:NAME, as in mymodels.gpt:small or "
            f"models/gpt.py:small"
        )
    value: Any = _imported(module)
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            names = (
                [n for n in vars(value) if not n.startswith("_")]
                if hasattr(value, "__dict__")
                else []
            )
            meant, near = closest(part, names), ", ".join(names)[:300]
            raise PlanError(
                f"{module} has no {path!r}"
                + (f"; it has {near}" if near else "")
                + (f"; did you mean {meant!r}?" if meant else "")
            ) from None
    if (
        callable(value)
        and not isinstance(value, (torch.nn.Module, Graph))
        and not _is_model_class(value)
    ):
        value = value()
    return _read(value, name)


def _imported(module: str) -> Any:
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise PlanError(f"there is no file {module}")
        sys.path.insert(0, str(file.parent.resolve()))
        made = importlib.util.spec_from_file_location(file.stem, file)
        if made is None or made.loader is None:
            raise PlanError(f"{module} cannot be imported")
        found = importlib.util.module_from_spec(made)
        sys.modules.setdefault(file.stem, found)
        made.loader.exec_module(found)
        return found
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise PlanError(
            f"no module {module!r} can be imported from {os.getcwd()}; it must be in that folder, "
            "on PYTHONPATH or installed"
        ) from None


def _is_model_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, (torch.nn.Module, Graph))


def _read(value: Any, name: str) -> Target:
    """Convert (model, inputs) or (model, inputs, keyword arguments) to a target."""
    if isinstance(value, (torch.nn.Module, Graph)) or _is_model_class(value):
        raise PlanError(
            f"{name} is a model without inputs; give a tuple (model, inputs), or a function that "
            f"returns one, such as: def small(): return Net(), (torch.empty(8, 32),)"
        )
    if not isinstance(value, tuple) or not 2 <= len(value) <= 3:
        raise PlanError(
            f"{name} provides {_describe_type(value)}; expected (model, inputs) or (model, inputs, "
            "keyword arguments)"
        )
    model, inputs, kwargs = (*value, {})[:3]
    if _is_model_class(model):
        model = model()
    if not isinstance(model, (torch.nn.Module, Graph)):
        raise PlanError(
            f"{name} provides {_describe_type(model)} as its model; expected a torch.nn.Module, an "
            "nn.Graph, or the class of one"
        )
    if isinstance(inputs, Mapping) and not kwargs:
        inputs, kwargs = (), inputs
    if not isinstance(kwargs, Mapping):
        raise PlanError(
            f"{name} provides {_describe_type(kwargs)} as keyword arguments; expected a dict"
        )
    return Target(
        model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), dict(kwargs)
    )


def _describe_type(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = type(value).__name__
    return "nothing" if value is None else f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"


def _shape(text: str | None) -> Sequence[int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise PlanError(f"--mesh {text}: a shape such as 8 or 2x4")
    return [int(n) for n in text.split("x")]
