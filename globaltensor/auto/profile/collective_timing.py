"""The cost of communication between the ranks of this job, by kind, size and group.

`measure` calls it. All groups of a size communicate at the same time, as in a program.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ...cluster import Curve
from ...distributed.communicator import Communicator
from ...distributed.world_base import World
from ...sharding.balanced_split import balanced_split
from .clock import Case, Clock

__all__ = ["constants", "groups_of", "measure_moves", "measure_overlap", "measure_skew"]

SIZES: Final = tuple(1 << k for k in (10, 13, 16, 19, 22, 24, 25, 26))
_FEW_SIZES: Final = tuple(1 << k for k in (10, 16, 20, 24))
# other kinds are priced by these (`Cluster.seconds`)
_FEW_KINDS: Final = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
)
_LARGE: Final = 1 << 22
# from this size on the data is written before each move; smaller data stays in the caches anyway
_COMPUTED: Final = 1 << 19
_MAX_CALL_SECONDS: Final = 1.0  # the maximum seconds of one call
_BESIDE_BYTES: Final = 1 << 23  # bytes that are reduced during a computation
_BESIDE_SIDE: Final = 256
# (side, number) of the matmuls between two moves
_BETWEEN: Final = (
    (64, 8),
    (128, 8),
    (128, 24),
    (256, 8),
)
_SMALL_BYTES: Final = (1 << 12, 1 << 16, 1 << 18)
_MAX_FAR_RANKS: Final = 512

Call = Callable[[], object]


def groups_of(size: int, node_size: int) -> list[tuple[int, int, list[tuple[int, ...]]]]:
    """List (ranks, nodes, groups) to measure in a world of ``size`` ranks.

    Within nodes the groups have 2, 4, ... and all ranks of one node. Across nodes they have one
    rank of each node, and all ranks.

    >>> groups_of(4, 2)
    [(2, 1, [(0, 1), (2, 3)]), (2, 2, [(0, 2), (1, 3)]), (4, 2, [(0, 1, 2, 3)])]
    """
    local = node_size or size
    nodes, group_sets = size // local, []
    sizes = sorted(
        {*(1 << k for k in range(1, local.bit_length()) if 1 << k <= local), local} - {1}
    )
    for p in sizes:
        group_sets.append(
            (
                p,
                1,
                [
                    tuple(range(at + i, at + i + p))
                    for at in range(0, size, local)
                    for i in range(0, local - p + 1, p)
                ],
            )
        )
    for m in sorted(
        {*(1 << k for k in range(1, nodes.bit_length()) if 1 << k <= nodes), nodes} - {1}
    ):
        group_sets.append(
            (
                m,
                m,
                [
                    tuple(at + r + i * local for i in range(m))
                    for at in range(0, (nodes // m) * m * local, m * local)
                    for r in range(local)
                ],
            )
        )
        if local > 1 and m * local <= _MAX_FAR_RANKS:
            group_sets.append(
                (
                    m * local,
                    m,
                    [
                        tuple(range(at, at + m * local))
                        for at in range(0, (nodes // m) * m * local, m * local)
                    ],
                )
            )
    return group_sets


def measure_moves(
    clock: Clock, seconds: float, node_size: int, hurried: bool = False
) -> tuple[Curve, ...]:
    """Measure curves of all kinds of moves, for each size of group.

    ``hurried``: measure some kinds, sizes and groups only.
    """
    cases: list[Case] = []
    bench = _Bench(clock.world, clock.device)
    every = groups_of(clock.world.size, node_size)
    for p, nodes, groups in _essential_groups(every) if hurried else every:
        own_group = next((group for group in groups if clock.world.rank in group), None)
        for kind, make in _KINDS.items():
            if kind in _FEW_KINDS if hurried else kind != "send" or p == 2:
                count = 2 if kind == "send" else 1
                for n in _FEW_SIZES if hurried else _sizes(kind, p):
                    call = None if own_group is None else make(bench, own_group, n)
                    cases.append(
                        Case(
                            (kind, p, nodes),
                            n,
                            call,
                            functools.partial(bench.compute, n) if n >= _COMPUTED else None,
                            count,
                        )
                    )
    seconds_of_case = clock.time(cases, seconds, min(_MAX_CALL_SECONDS, seconds / 40))
    points: dict[Any, list[tuple[int, float]]] = {}
    for i, took in seconds_of_case.items():
        points.setdefault(cases[i].name, []).append((int(cases[i].size), took))
    return tuple(Curve(kind, p, nodes, tuple(each)) for (kind, p, nodes), each in points.items())


def _essential_groups(
    groups: list[tuple[int, int, list[tuple[int, ...]]]],
) -> list[tuple[int, int, list[tuple[int, ...]]]]:
    """Select two ranks and all ranks within a node, and as many nodes as there are across nodes."""
    within, across = (
        [g for g in groups if g[1] == 1],
        [g for g in groups if g[1] == groups[-1][1] > 1],
    )
    return [*within[:1], *within[1:][-1:], *across]


def _sizes(kind: str, ranks: int) -> list[int]:
    """List the sizes in rising order. In an exchange each peer gets at least one element."""
    least = 4 * (ranks - 1) if kind == "exchange" else 0
    return sorted({max(n, least) for n in SIZES})


def constants(curves: Sequence[Curve]) -> dict[str, float]:
    """Compute latencies and bandwidths for groups and kinds that were not measured.

    They come from the ring formula of the all-gathers.
    """
    near = {c.ranks: c.lawful().points for c in curves if c.kind == "all_gather" and c.nodes == 1}
    far = {
        c.ranks: c.lawful().points
        for c in curves
        if c.kind == "all_gather" and c.ranks == c.nodes > 1
    }
    fields: dict[str, float] = {}
    if near or far:
        fields["launch"], fields["latency"] = _steps(near or far)
        fields["bandwidth"] = _bandwidth(near or far)
    if far:
        # The model assumes that links between nodes are not faster than those within a node.
        fields["node_latency"] = max(
            fields["latency"], max(0.0, far[max(far)][0][1] - fields["launch"]) / (max(far) - 1)
        )
        fields["node_bandwidth"] = min(fields["bandwidth"], _bandwidth(far))
    return fields


def _steps(by_ranks: dict[int, tuple[tuple[int, float], ...]]) -> tuple[float, float]:
    """Return seconds (before the first step, of a step), from the smallest sizes."""
    few, many = min(by_ranks), max(by_ranks)
    first, last = by_ranks[few][0][1], by_ranks[many][0][1]
    step = first / few if few == many else max(0.0, last - first) / (many - few)
    return max(0.0, first - (few - 1) * step), step


def _bandwidth(by_ranks: dict[int, tuple[tuple[int, float], ...]]) -> float:
    """Return the best bandwidth among large sizes.

    The largest size may be slower, because much memory has other costs.
    """
    p = max(by_ranks)
    first = by_ranks[p][0][1]
    large = [(n, took) for n, took in by_ranks[p] if n >= _LARGE] or [by_ranks[p][-1]]
    return max(n * (p - 1) / p / max(took - first, 0.1 * took) for n, took in large)


def measure_overlap(clock: Clock, seconds: float) -> float:
    """Measure the factor, 1 to 2, by which computing and reducing at the same time slow down."""
    comm, device = clock.everyone, clock.device
    data = torch.zeros(_BESIDE_BYTES // 4, device=device)
    a, b = (torch.ones(_BESIDE_SIDE, _BESIDE_SIDE, device=device) for _ in range(2))

    def reduce() -> None:
        comm.all_reduce_async(data).wait()

    reducing, one = clock.time(
        [Case("reduce", 0, reduce), Case("matmul", 0, lambda: a @ b)], seconds / 4
    ).values()
    times = max(1, round(reducing / one))  # computing takes about as long as reducing

    def compute() -> None:
        for _ in range(times):
            a @ b

    def both() -> None:
        handle = comm.all_reduce_async(data)
        compute()
        handle.wait()

    moving, computing, together = clock.time(
        [Case("reduce", 0, reduce), Case("compute", 0, compute), Case("both", 0, both)],
        seconds * 3 / 4,
    ).values()
    return min(2.0, max(1.0, 1.0 + (together - max(moving, computing)) / min(moving, computing)))


def measure_skew(clock: Clock, seconds: float, hurried: bool = False) -> float:
    """Measure how many seconds longer a small all-reduce takes between computations than in a row.

    Ranks do not reach it at the same time, and wake up late.
    """
    comm, device = clock.everyone, clock.device
    cases: list[Case] = []
    for side, times in _BETWEEN[:2] if hurried else _BETWEEN:
        a, b = (
            torch.ones(side, side, device=device),
            [torch.ones(side, side, device=device) for _ in range(times)],
        )

        def compute(a: Tensor = a, b: Sequence[Tensor] = b) -> None:
            for t in b:
                torch.nn.functional.gelu(a @ t)

        for nbytes in _SMALL_BYTES[:2] if hurried else _SMALL_BYTES:
            data = torch.zeros(nbytes // 4, device=device)

            def move(data: Tensor = data) -> None:
                comm.all_reduce(data)

            def both(compute: Call = compute, move: Call = move) -> None:
                compute()
                move()

            cases += [
                Case(name, 0, call)
                for name, call in (("compute", compute), ("move", move), ("both", both))
            ]
    took = list(clock.time(cases, seconds).values())
    found = [
        both - computing - moving
        for computing, moving, both in zip(took[::3], took[1::3], took[2::3], strict=True)
    ]
    return max(0.0, statistics.median(found))


# -------------------------------------------------------------------- the timed call, for each kind


class _Bench:
    """The data of the timed calls: this rank, and memory that all calls share.

    Results are new tensors, as in programs.
    """

    def __init__(self, this_world: World, device: torch.device) -> None:
        self.this_world, self.device = this_world, device
        # ones, because the system maps all zeros to one page, which is always in the caches
        self._some = torch.ones(SIZES[-1] // 4, device=device)

    def data(self, nbytes: int) -> Tensor:
        """Return a tensor of ``nbytes`` bytes."""
        return self._some[: nbytes // 4]

    def compute(self, nbytes: int) -> None:
        """Write the data anew, because data that a program moves has just been computed."""
        self.data(nbytes).fill_(1.0)


def _shares(nbytes: int, comm: Communicator) -> list[int]:
    return [length for _, length in balanced_split(nbytes // 4, comm.size)]


def _all_gather(bench: _Bench, ranks: tuple[int, ...], nbytes: int) -> Call:
    comm, data = bench.this_world.comm(ranks), bench.data(nbytes)
    numels = _shares(nbytes, comm)
    own = data[: numels[comm.index]]
    return lambda: comm.all_gather_into(own, numels, torch.empty_like(data))


def _reduce_scatter(bench: _Bench, ranks: tuple[int, ...], nbytes: int) -> Call:
    comm = bench.this_world.comm(ranks)
    chunks = bench.data(nbytes).split_with_sizes(_shares(nbytes, comm))
    return lambda: comm.reduce_scatter(chunks)


def _all_reduce(bench: _Bench, ranks: tuple[int, ...], nbytes: int) -> Call:
    comm, data = bench.this_world.comm(ranks), bench.data(nbytes)
    return lambda: comm.all_reduce(data)


def _all_to_all(bench: _Bench, ranks: tuple[int, ...], nbytes: int) -> Call:
    comm, data = bench.this_world.comm(ranks), bench.data(nbytes)
    shares = _shares(nbytes, comm)
    sends, numels, longest = (
        data.split_with_sizes(shares),
        [shares[comm.index]] * comm.size,
        comm.size * max(shares),
    )
    return lambda: comm.all_to_all_into(sends, numels, data.new_empty(sum(numels)), longest)


def _broadcast(bench: _Bench, ranks: tuple[int, ...], nbytes: int) -> Call:
    comm, data = bench.this_world.comm(ranks), bench.data(nbytes)
    return lambda: comm.broadcast(data, 0)


def _exchange(bench: _Bench, ranks: tuple[int, ...], nbytes: int) -> Call:
    comm = bench.this_world.comm(ranks)
    others = [i for i in range(comm.size) if i != comm.index]
    each = nbytes // 4 // len(others)
    data, where = (
        bench.data(nbytes),
        [(i, slice(k * each, (k + 1) * each)) for k, i in enumerate(others)],
    )
    sends = {i: data[part] for i, part in where}

    def call() -> None:
        out = torch.empty_like(data)
        comm.exchange_into(sends, {i: out[part] for i, part in where}, bench.device)

    return call


def _send(bench: _Bench, ranks: tuple[int, ...], nbytes: int) -> Call:
    """Send forth and back, which counts as two sends."""
    forth, back = (
        bench.this_world.channel(source, target, bench.device)
        for source, target in (ranks, ranks[::-1])
    )
    forth.connect()
    back.connect()
    data, first = bench.data(nbytes), bench.this_world.rank == ranks[0]

    def call() -> None:
        if first:
            forth.send(data).wait()
            back.receive(torch.empty_like(data)).wait()
        else:
            forth.receive(torch.empty_like(data)).wait()
            back.send(data).wait()

    return call


_KINDS: Final = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "exchange": _exchange,
    "send": _send,
}
