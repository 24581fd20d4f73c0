"""The cluster of a job's ranks, for users who name no cluster.

Graphs that search for a plan call it. It is measured in a few seconds once on a machine, and from
then on read from a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from ..._base.cpu_cores import usable_cores
from ...cluster import Cluster
from ...distributed.backends.shared_memory import VARIABLE as SHARED_MEMORY
from ...distributed.world import ProcessWorld, world
from ...errors import ClusterError
from .measure import measured

__all__ = ["VARIABLE", "cache_folder", "cluster_here"]

#: The environment variable that switches measuring off, by the value 0.
VARIABLE: Final = "GLOBALTENSOR_PROFILE"
_SECONDS: Final = 2.0
_VERSION: Final = 2  # of the measurements and their method
_SHORT: Final = (
    ". Calls are priced by operations and bytes: steps of small models take two or "
    "three times as long, flow.auto.calibrate measures their calls"
)

log = logging.getLogger("globaltensor")


def cluster_here(device: str) -> Cluster | None:
    """Return the cluster of this world's ranks, measured on devices of this type now or before.

    Return None where measuring is switched off or impossible. It takes about two seconds if nothing
    else runs. Rank 0 saves the figures in a file in the user's cache. They serve all later jobs
    with the same ranks, threads, machines and versions. All ranks must call it, and get the same
    cluster.
    """
    this_world = world()
    # ranks that are threads take turns, so there is nothing to measure
    if this_world.size == 1 or not isinstance(this_world, ProcessWorld):
        return None
    everyone = this_world.comm(tuple(range(this_world.size)))
    asked = everyone.all_gather_object(
        (os.environ.get(VARIABLE, "1") != "0", _machine(device)), "a measurement of this machine"
    )
    if not asked[0][0]:  # rank 0 decides for all
        return None
    what = {
        "version": _VERSION,
        "device": device,
        "backend": this_world.backend,
        "torch": torch.__version__,
        "ranks": [machine for _, machine in asked],
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]
    known = this_world.state(KnownClusters)
    if key not in known:  # the same on every rank
        known[key] = _kept_or_measured(device, cache_folder() / f"{key}.json")
    return known[key]


class KnownClusters(dict[str, Cluster | None]):
    """The clusters that a rank knows, by a hash of what their figures depend on."""


def _kept_or_measured(device: str, path: Path) -> Cluster | None:
    this_world = world()
    everyone = this_world.comm(tuple(range(this_world.size)))
    saved: Cluster | None = everyone.all_gather_object(
        _read(path) if this_world.rank == 0 else None, "a measurement of this machine"
    )[0]
    if saved is not None:
        return saved
    try:
        cluster = measured(_SECONDS, device, "this machine", hurried=True)
        cluster = replace(
            cluster,
            measured=tuple(curve.lawful() for curve in cluster.measured),
            source=cluster.source + _SHORT,
        )
    except ClusterError as error:  # the same on every rank
        log.warning(
            "the ranks of this job could not be measured, so plans are made for the generic "
            "machine: %s",
            error,
        )
        return None
    notes = everyone.all_gather_object(
        _write(path, cluster) if this_world.rank == 0 else "", "a measurement of this machine"
    )
    return replace(cluster, source=cluster.source + notes[0])


def cache_folder() -> Path:
    """Return the folder of measured clusters in the user's cache."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # this user has no home directory
        folder = Path(tempfile.gettempdir())
    return folder / "globaltensor" / "clusters"


def _machine(device: str) -> dict[str, Any]:
    """Return the properties of a rank that its figures depend on."""
    properties: dict[str, Any] = {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda" and torch.cuda.is_available():
        properties["gpus"] = [
            torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())
        ]
    return properties | {"shared memory": os.environ.get(SHARED_MEMORY, "1")}


def _processor() -> str:
    """Return the name of the processor."""
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines,
    ):
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> Cluster | None:
    """Return the cluster in a file; None where the file is missing or broken."""
    if not path.exists():
        return None
    try:
        return Cluster.load(path)
    except ClusterError as error:
        log.warning(
            "a file of measurements cannot be read, so this machine is measured again: %s", error
        )
        return None


def _write(path: Path, cluster: Cluster) -> str:
    """Save a cluster. Return a sentence about the file, for the source of the cluster.

    The file is written completely or not at all. If it cannot be written, the sentence is empty,
    and the next job measures again.
    """
    file_note = f". Saved in {path}: delete the file to measure again"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(cluster, source=cluster.source + file_note).save(path)
    except OSError as error:
        log.warning(
            "measurements could not be saved, so the next job measures again: %s: %s",
            path,
            error.strerror or error,
        )
        return ""
    return file_note
