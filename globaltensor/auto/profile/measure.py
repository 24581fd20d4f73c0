"""``profile``: measure a cluster in bounded time.

Users call it directly or by ``globaltensor profile``. Every rank of the job calls it and gets the
same Cluster.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from typing import Any, Final

import torch

from ...cluster import Cluster
from ...distributed.cluster_env import detect
from ...distributed.run.spawn import run
from ...distributed.world import ProcessWorld, world
from ...distributed.world_base import World
from ...errors import ClusterError
from .clock import Clock
from .collective_timing import constants, measure_moves, measure_overlap, measure_skew
from .kernels import measure_kernels

__all__ = ["measured", "profile"]

_SHARES: Final = {"kernels": 0.3, "moves": 0.5, "overlap": 0.1, "rank_skew": 0.1}  # of ``seconds``


def profile(
    seconds: float = 40.0,
    nproc: int = 0,
    device: str = "auto",
    backend: str = "auto",
    name: str = "profiled",
    *,
    stage: Callable[[str], object] | None = None,
) -> Cluster:
    """Measure kernels, communication and both at once in about ``seconds``.

    Return a Cluster of this world, the same on every rank. In a job of several ranks all of them
    must call it. A process without a job starts ``nproc`` ranks of its own on this machine (0: one
    for each GPU, or two), with ``backend`` as for ``run``.

    ``device`` is "cpu" or "cuda"; "auto" uses GPUs where each rank has one. Ranks of a node must be
    numbered one after the other. Matmuls run with the threads that ranks have. A measurement takes
    as long as its slowest rank; the result is the median over interleaved rounds.

    ``stage``, if given, is called on rank 0 with the name of each part of the measurements when it
    begins. Where ranks are started, it is pickled.

    Raises ClusterError where the ranks or the options allow no measurement, and WorldError as
    ``run`` does.
    """
    if not seconds > 0:
        raise ClusterError(f"seconds={seconds}: seconds must be a positive number")
    if nproc < 0 or device not in ("auto", "cpu", "cuda"):
        raise ClusterError(
            f'nproc={nproc}, device="{device}": nproc is 0 or more, device "auto", "cpu" or "cuda"'
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ClusterError(
            'device="cuda": this machine shows no GPU; device="cpu" measures its cores'
        )
    place = detect(os.environ)
    if place is not None and place.world_size > 1:
        if nproc and nproc != place.world_size:
            raise ClusterError(
                f"nproc={nproc}: this job has {place.world_size} ranks already, and these are "
                "measured; leave nproc out"
            )
        return measured(seconds, device, name, stage=stage)
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    n = nproc or (gpus if device == "cuda" else max(2, gpus))
    found = run(
        measured,
        *(seconds, device, name, False, stage),
        nprocs=n,
        backend=backend,
        timeout=10 * seconds + 120.0,
    )
    return found[0]


def measured(
    seconds: float,
    device: str,
    name: str,
    hurried: bool = False,
    stage: Callable[[str], object] | None = None,
) -> Cluster:
    """Measure the ranks of this world. Return a Cluster, the same on every rank.

    All ranks must call it. ``hurried``: take a second or two, with fewer sizes, kinds of moves and
    groups. ``stage`` is as for `profile`.
    """
    here = world()
    begin = _ignore if stage is None or here.rank else stage
    type_ = _device(here, device)
    clock = Clock(here.device(type_), hurried)
    if type_ == "cuda":
        torch.cuda.set_device(clock.device)
    node_size = _node_size(here)
    begin("matmuls and memory")
    found = measure_kernels(clock, seconds * _SHARES["kernels"], hurried)
    if here.size > 1:
        begin("collectives and messages")
        curves = measure_moves(clock, seconds * _SHARES["moves"], node_size, hurried)
        begin("communication and computation at once")
        found |= {
            "measured": (*found["measured"], *curves),
            **constants(curves),
            "overlap": measure_overlap(clock, seconds * _SHARES["overlap"]),
        }
        begin("how long ranks wait for one another")
        found["rank_skew"] = measure_skew(clock, seconds * _SHARES["rank_skew"], hurried)
    else:
        found |= _borrowed(type_)
    found |= {
        "name": name,
        "device": type_,
        "size": here.size,
        "node_size": node_size,
        "memory": _memory(clock.device, node_size or here.size),
    }
    found["source"] = _source(seconds, here)
    cluster: Cluster = clock.everyone.all_gather_object(Cluster(**found))[0]
    return cluster


def _ignore(stage: str) -> None:
    """Ignore a stage: no one watches."""


def _source(seconds: float, here: World) -> str:
    """Describe the origin of the figures in words."""
    threads, backend = (
        torch.get_num_threads(),
        here.backend if isinstance(here, ProcessWorld) else "",
    )
    ranks = (
        f"{here.size} rank{'s' * (here.size != 1)} of {threads} "
        f"thread{'s' * (threads != 1)}{f' over {backend}' if backend else ''}"
    )
    return (
        f"measured on {socket.gethostname()}, {datetime.date.today().isoformat()}, in about "
        f"{seconds:g} s: {ranks}"
    )


def _device(here: World, device: str) -> str:
    if device != "auto":
        return device
    each = here.comm(tuple(range(here.size))).all_gather_object(
        torch.cuda.device_count() > here.local_rank
    )
    return "cuda" if all(each) else "cpu"


def _node_size(here: World) -> int:
    """Return the number of ranks of a node; 0 where there is one node.

    The attribute ``node_size`` of a world is the number of nodes.
    """
    nodes = here.node_size
    if nodes <= 1:
        return 0
    per_node = here.size // nodes
    locals_ = here.comm(tuple(range(here.size))).all_gather_object(here.local_rank)
    if here.size % nodes or locals_ != [r % per_node for r in range(here.size)]:
        raise ClusterError(
            f"{here.size} ranks on {nodes} nodes have the local ranks {locals_}: profile with as "
            f"many on each node, numbered node by node"
        )
    return per_node


def _memory(device: torch.device, local: int) -> int:
    """Return bytes of a device: a GPU's own memory, or a CPU rank's share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    except (AttributeError, ValueError, OSError):  # this system does not report it
        return 0


def _borrowed(device: str) -> dict[str, Any]:
    """Return the links of a preset, for a world of one rank, which has no links to measure."""
    other = Cluster.preset("cpu" if device == "cpu" else "pcie-gen5")
    return {
        name: getattr(other, name)
        for name in ("launch", "latency", "bandwidth", "overlap", "rank_skew")
    }
