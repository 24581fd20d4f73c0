"""Measure collectives on the backends gloo and mpi (ours): time per call and bytes per second.

The limit, "copy", is a copy of the same number of bytes in memory.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import Row, interleave, on_ranks, options, show

import globaltensor as flow

SIZES = {"4 KB": 1 << 12, "64 KB": 1 << 16, "1 MB": 1 << 20, "26 MB": 26 << 20}
QUICK_SIZES = {"4 KB": 1 << 12}
#: Bytes of a timed block. It is fixed because every rank must make the same number of calls.
BLOCK = 1 << 22

#: torch renamed these functions in 2.13 and warns at the older names.
gather_evenly = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
scatter_evenly = vars(dist).get("reduce_scatter_single") or dist.reduce_scatter_tensor


@dataclass
class Timed(Row):
    """A row that also reports bytes per second."""

    nbytes: int = 0

    def line(self) -> str:
        told = json.loads(super().line())
        scale = {"us": 1e3, "ms": 1e6}[self.unit]
        return json.dumps(
            told
            | {
                f"{name} GB/s": round(self.nbytes / scale / self.median(name), 3)
                for name in self.seconds
            }
        )


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    x.zero_()
    return lambda: dist.all_reduce(x, group=group)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    part = x.chunk(group.size())[group.rank()].clone()
    return lambda: gather_evenly(x, part, group=group)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    out = torch.empty(x.numel() // group.size())
    return lambda: scatter_evenly(out, x, group=group)


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    out = torch.empty_like(x)
    return lambda: dist.all_to_all_single(out, x, group=group)


def broadcast(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.broadcast(x, 0, group=group)


def ring(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a call in which each rank sends to the next rank and receives from the previous."""
    out, me, n = torch.empty_like(x), group.rank(), group.size()

    def call() -> None:
        for work in (dist.isend(x, (me + 1) % n, group), dist.irecv(out, (me - 1) % n, group)):
            work.wait()

    return call


COLLECTIVES = {
    f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, ring)
}


def compare(name: str, size: str, groups: dict[str, dist.ProcessGroup], rounds: int) -> Row:
    """Time a collective on ``size`` bytes, which is the size of the full tensor on all ranks."""
    n = dist.get_world_size()
    x, y = torch.zeros(SIZES[size] // 4 // n * n), torch.zeros(SIZES[size] // 4 // n * n)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: y.copy_(x)}
    calls |= {backend: COLLECTIVES[name](x.clone(), group) for backend, group in groups.items()}
    return Timed(
        f"{name} {size}",
        interleave(calls, rounds, calls=min(200, max(1, BLOCK // SIZES[size]))),
        "us",
        x.nbytes,
    )


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=15)
    if importlib.util.find_spec("mpi4py") is None:
        sys.exit("mpi4py is not installed: make install-mpi")
    on_ranks(chosen.nproc, backend="mpi")
    torch.set_num_threads(1)
    flow.env.get_rank()  # starts the process group
    groups = {"gloo": dist.new_group(backend="gloo"), "ours": dist.group.WORLD}
    cases = [
        (name, size)
        for size in (QUICK_SIZES if chosen.quick else SIZES)
        for name in COLLECTIVES
        if chosen.only in f"{name} {size}"
    ]
    rows = [compare(name, size, groups, chosen.steps) for name, size in cases]
    if dist.get_rank() == 0:
        show(rows, chosen.json, "gloo")


if __name__ == "__main__":
    main()
