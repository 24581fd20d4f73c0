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

#: The fraction of the time that each measurement gets.
_SHARES: Final = {"kernels": 0.3, "moves": 0.5, "overlap": 0.1, "rank_skew": 0.1}


def profile(
    seconds: float = 40.0,
    nproc: int = 0,
    device: str = "auto",
    backend: str = "auto",
    name: str = "profiled",
    *,
    stage: Callable[[str], object] | None = None,
) -> Cluster:
    """Measure kernels, communication, and both at the same time, in about ``seconds``.

    Return a Cluster of this world, the same on every rank. In a job of several ranks, all ranks
    must call this function. A process without a job starts ``nproc`` ranks on this machine (0: one
    for each GPU, or two). ``backend`` is as for ``run``.

    ``device`` is "cpu" or "cuda"; "auto" uses GPUs where each rank has one. Ranks of a node must be
    numbered one after the other. Matmuls run with the threads that ranks have. A measurement takes
    as long as its slowest rank; the result is the median over interleaved rounds.

    ``stage``, if given, is called on rank 0 with the name of each part of the measurements when it
    begins. If this call starts ranks, ``stage`` is pickled.

    Raises ClusterError if the ranks or the options allow no measurement, and WorldError as ``run``
    does.
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
    clusters = run(
        measured,
        seconds,
        device,
        name,
        False,
        stage,
        nprocs=n,
        backend=backend,
        timeout=10 * seconds + 120.0,
    )
    return clusters[0]


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
    this_world = world()
    begin = _ignore if stage is None or this_world.rank else stage
    type_ = _device(this_world, device)
    clock = Clock(this_world.device(type_), hurried)
    if type_ == "cuda":
        torch.cuda.set_device(clock.device)
    node_size = _node_size(this_world)
    begin("matmuls and memory")
    fields = measure_kernels(clock, seconds * _SHARES["kernels"], hurried)
    if this_world.size > 1:
        begin("collectives and messages")
        curves = measure_moves(clock, seconds * _SHARES["moves"], node_size, hurried)
        begin("communication and computation at once")
        fields |= {
            "measured": (*fields["measured"], *curves),
            **constants(curves),
            "overlap": measure_overlap(clock, seconds * _SHARES["overlap"]),
        }
        begin("how long ranks wait for one another")
        fields["rank_skew"] = measure_skew(clock, seconds * _SHARES["rank_skew"], hurried)
    else:
        fields |= _preset_links(type_)
    fields |= {
        "name": name,
        "device": type_,
        "size": this_world.size,
        "node_size": node_size,
        "memory": _memory(clock.device, node_size or this_world.size),
    }
    fields["source"] = _source(seconds, this_world)
    cluster: Cluster = clock.everyone.all_gather_object(
        Cluster(**fields), "a measurement of this machine"
    )[0]
    return cluster


def _ignore(stage: str) -> None:
    """Do nothing: no function for the names of stages was given."""


def _source(seconds: float, this_world: World) -> str:
    """Describe the origin of the figures in words."""
    threads, backend = (
        torch.get_num_threads(),
        this_world.backend if isinstance(this_world, ProcessWorld) else "",
    )
    ranks = (
        f"{this_world.size} rank{'s' * (this_world.size != 1)} of {threads} "
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
        torch.cuda.device_count() > here.local_rank, "a measurement of this machine"
    )
    return "cuda" if all(each) else "cpu"


def _node_size(this_world: World) -> int:
    """Return the number of ranks of a node; 0 where there is one node.

    It is computed from the attribute ``node_size`` of the world, which is the number of nodes.
    """
    nodes = this_world.node_size
    if nodes <= 1:
        return 0
    per_node = this_world.size // nodes
    locals_ = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        this_world.local_rank, "a measurement of this machine"
    )
    if this_world.size % nodes or locals_ != [r % per_node for r in range(this_world.size)]:
        raise ClusterError(
            f"{this_world.size} ranks on {nodes} nodes have the local ranks {locals_}: profile "
            f"with as many on each node, numbered node by node"
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


def _preset_links(device: str) -> dict[str, Any]:
    """Return the links of a preset, for a world of one rank, which has no links to measure."""
    other = Cluster.preset("cpu" if device == "cpu" else "pcie-gen5")
    return {
        name: getattr(other, name)
        for name in ("launch", "latency", "bandwidth", "overlap", "rank_skew")
    }
