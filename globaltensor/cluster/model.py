"""The cluster model: seconds of a move, of a kernel, and of both at once.

The model is pure, and every rank computes the same numbers. Boxing plans, graph passes and auto
parallelism take their costs from it.

A move costs by latency and bandwidth (the alpha-beta model) or by measured times. A kernel costs by
a roofline whose rate small kernels do not reach. The default is a generic machine, the same for
every backend, so that a plan does not depend on where it is made.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace

from ..errors import ClusterError
from .alpha_beta import BETWEEN, LOCAL, WITHIN, RankGroup, group_of
from .frozen_dict import Frozen
from .measured_curves import Curve, Curves

__all__ = ["Cluster", "current_cluster", "named_cluster", "use_cluster"]

_ALONE = RankGroup(1, 1, 0, 0)
#: The origin that plans state for the generic machine.
_ASSUMED = (
    "assumed, of no machine in particular: seconds are no prediction for this one. `globaltensor "
    "profile --out cluster.json` measures it, and a block `with "
    'flow.use_cluster(flow.Cluster.load("cluster.json")):` plans for it'
)
_HALVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Cluster:
    """The costs of moves and kernels on a machine.

    Times are in seconds, sizes in bytes, rates for one device. Moves:

    - ``launch``: the time of a collective before its first byte moves.
    - ``latency``: the time that each step of a collective adds.
    - ``bandwidth``: the bytes that a rank sends in a second.
    - ``node_size``: the devices of a node; 0: all links are alike.
    - ``node_latency``, ``node_bandwidth``: the same between nodes. The bandwidth is a rank's share
      while all ranks of its node send.
    - ``node_stream``: the bandwidth of a rank that sends to other nodes alone; 0: no more than its
      share.
    - ``tree``: True if steps grow with the logarithm of the group's size, not with the size.
    - ``message``: the time that each further peer then adds to an all-to-all.
    - ``measured``: curves, which take precedence over these constants.
    - ``rank_skew``: the time that ranks, each of which has computed, wait for one another before a move
      that they cannot continue without. `seconds` leaves it out.
    - ``bucket_factor``: a factor on the moves of parameters and gradients that move together, in buckets
      that start early. The factor is relative to the time that such moves take alone.

    Kernels:

    - ``flops``: the rate that large matmuls reach, by dtype.
    - ``saturation``: the floating-point operations of a cube-shaped matmul at half that rate.
    - ``kernel``: the minimum time of a kernel.
    - ``memory_latency``, ``memory_bandwidth``: those of a device's own memory, read and written.
    - ``overlap``: the slowdown of computing and moving while both run, from 1 (none) to 2 (as slow
      as one after the other).
    - ``optimizer_factor``: the time of an optimizer's step relative to its reading and writing. It includes
      a parameter's other costs in a training step.
    - ``ops``: seconds of (forward, backward) of single ops, by keys of the code that measured them.

    The machine:

    - ``device``: "cpu" or "cuda".
    - ``size``: the number of devices; 0: as many as asked for.
    - ``memory``: the memory of a device; 0: unknown, and no limit.
    - ``source``: the origin of these figures in words (see `origin`). Clusters that differ only in
      it are equal.

    Raises ValueError where a number is out of its range.

    >>> c = Cluster()
    >>> c.seconds("all_reduce", 1 << 20, 4) == c.seconds("reduce_scatter", 1 << 20, 4) + c.seconds("all_gather", 1 << 20, 4)
    True
    """  # noqa: E501

    launch: float = 10e-6
    latency: float = 2e-6
    bandwidth: float = 20e9
    memory_latency: float = 2e-6
    memory_bandwidth: float = 200e9
    node_size: int = 0
    node_latency: float = 5e-6
    node_bandwidth: float = 5e9
    node_stream: float = 0.0
    tree: bool = False
    message: float = 0.0
    kernel: float = 5e-6
    flops: Mapping[str, float] = field(
        default_factory=lambda: Frozen(
            {"float64": 5e12, "float32": 10e12, "bfloat16": 20e12, "float16": 20e12}
        )
    )
    saturation: Mapping[str, float] = field(default_factory=lambda: Frozen({}))
    overlap: float = 1.0
    rank_skew: float = 0.0
    optimizer_factor: float = 1.0
    bucket_factor: float = 1.0
    name: str = "generic"
    device: str = "cpu"
    size: int = 0
    memory: int = 0
    measured: tuple[Curve, ...] = ()
    ops: Mapping[str, tuple[float, float]] = field(default_factory=lambda: Frozen({}))
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name in ("flops", "saturation", "ops"):
            value = getattr(self, name)
            set_(self, name, value if isinstance(value, Frozen) else Frozen(value))
        set_(self, "measured", tuple(self.measured))
        _check(self)
        set_(self, "_curves", Curves(self.measured))
        # The hash is part of the key of every plan, so it is computed once.
        set_(self, "_hash", hash(tuple(getattr(self, f.name) for f in fields(self) if f.compare)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[object, ...]:
        # The hash differs from process to process.
        return _made, ({f.name: getattr(self, f.name) for f in fields(self)},)

    # ------------------------------------------------------------------------------------ moves

    def seconds(
        self, kind: str, nbytes: float, ranks: int | Sequence[int], together: int = 0
    ) -> float:
        """Return the time of one move among ``ranks``.

        ``ranks``: the number of consecutive ranks, or the ranks themselves. Ranks on several nodes
        are joined by the slower links. ``nbytes``: the size of the global tensor for all_gather
        (its result), reduce_scatter (its input), all_reduce, broadcast and send. It is one rank's
        input for all_to_all. For exchange, whose ``ranks`` are the busiest rank and its peers, it
        is what that rank sends or receives. It is the bytes read and written for slice, pad, mask
        and copy. ``together``: the number of such groups that use the links of a node at the same
        time; 0: as many as there is room for. Raises KeyError for another kind.
        """
        if kind in LOCAL:
            found = self._measured_seconds(LOCAL[kind], nbytes, _ALONE) if self.measured else None
            return self.memory_latency + nbytes / self.memory_bandwidth if found is None else found
        group = group_of(ranks if isinstance(ranks, int) else tuple(ranks), self.node_size)
        if kind not in WITHIN:
            raise KeyError(
                f"{kind!r} is not a kind of move; the kinds are "
                f"{', '.join(sorted((*WITHIN, *LOCAL)))}"
            )
        if group.nodes == 1:
            return self._consistent_seconds(kind, nbytes, group, 0)
        # A move between nodes takes at least the time of the same move within one node. The move
        # within the node has as many ranks as the node has, or all ranks if they are fewer.
        return max(
            self._consistent_seconds(kind, nbytes, group, together),
            self._consistent_seconds(
                kind, nbytes, RankGroup(min(group.ranks, self.node_size), 1, 0, 0), 0
            ),
        )

    def _consistent_seconds(
        self, kind: str, nbytes: float, group: RankGroup, together: int
    ) -> float:
        """Return the time of one move, kept consistent with the times of related moves.

        An all-reduce takes no less than either half, and at most twice as long as both halves. An
        all-to-all takes no longer than gathering everything.
        """
        if kind in _HALVES and self.measured:
            found = self._halves(nbytes, group)
            if found is not None:
                return found[kind]
        elif kind == "all_to_all" and (self.measured or self.tree or group.nodes > 1):
            return min(
                self._move_seconds(kind, nbytes, group, together),
                self._consistent_seconds("all_gather", nbytes * group.ranks, group, together),
            )
        return self._move_seconds(kind, nbytes, group, together)

    def _halves(self, nbytes: float, group: RankGroup) -> dict[str, float] | None:
        """Return measured times of all_gather, reduce_scatter and all_reduce.

        A missing time follows from the others. Return None where none of them was measured.
        """
        gather, scatter, whole = (self._measured_seconds(kind, nbytes, group) for kind in _HALVES)
        gather, scatter = (
            gather or scatter or (whole and whole / 2),
            scatter or gather or (whole and whole / 2),
        )
        if not gather or not scatter:
            return None
        whole = whole or gather + scatter
        whole = max(whole, math.sqrt(whole * max(gather, scatter)))
        gather, scatter = min(gather, whole), min(scatter, whole)
        return dict(
            zip(_HALVES, (gather, scatter, min(whole, 2 * (gather + scatter))), strict=True)
        )

    def _move_seconds(self, kind: str, nbytes: float, group: RankGroup, together: int) -> float:
        measured_seconds = self._measured_seconds(kind, nbytes, group) if self.measured else None
        if measured_seconds is None and self.measured and group.ranks > 1:
            # The constants may not have been measured. The measured time of an all_gather is a
            # better estimate. Each rank sends the same number of bytes in it.
            measured_seconds = self._measured_seconds(
                "all_gather",
                nbytes if kind == "all_to_all" else nbytes * group.ranks / (group.ranks - 1),
                group,
            )
        if measured_seconds is not None:
            return measured_seconds
        if group.nodes == 1:
            fixed, moving = WITHIN[kind](self, nbytes, group.ranks)
            return fixed + moving
        return BETWEEN[kind](self, nbytes, group, together)

    def exchange_at_least(self, nbytes: float) -> float:
        """Return a lower bound of the seconds of an exchange, whatever the number of peers.

        ``nbytes``: the bytes that the busiest rank sends or receives.

        >>> c = Cluster.preset("dgx-h100")
        >>> bound = c.exchange_at_least(1 << 20)
        >>> all(bound <= c.seconds("exchange", 1 << 20, ranks) for ranks in range(2, 65))
        True
        """
        pair = self.seconds("exchange", nbytes, 2)
        group = group_of(2, self.node_size)
        if self.measured and self._measured_seconds("exchange", nbytes, group) is None:
            # Among p ranks `_move_seconds` returns the time of an all_gather of
            # nbytes * p / (p - 1). This number falls as p grows, but it stays above ``nbytes``.
            gathered = self._measured_seconds("all_gather", nbytes, group)
            return pair if gathered is None else min(pair, gathered)
        return pair

    def _measured_seconds(self, kind: str, nbytes: float, group: RankGroup) -> float | None:
        curves: Curves = self._curves  # type: ignore[attr-defined]
        return curves.seconds(
            kind, nbytes, group.ranks, group.local, lambda kind, n, p: WITHIN[kind](self, n, p)
        )

    def relayout_seconds(self, nbytes: float) -> float | None:
        """Return seconds to reorder so many bytes before or after a move.

        Return None where copies weren't measured. Plans leave this cost out then.
        """
        return self._measured_seconds("copy", 2 * nbytes, _ALONE) if self.measured else None

    # ------------------------------------------------------------------------------------ kernels

    def compute(
        self, flops: float, nbytes: float, dtype: object = "float32", kernels: int = 1
    ) -> float:
        """Return the time of ``kernels`` kernels by the roofline.

        All of them together do ``flops`` floating-point operations and read and write ``nbytes``.
        Arithmetic runs at rate r / (1 + (s / f)^(1/3)) for f operations a kernel. Here r is
        ``flops`` and s is ``saturation`` of the dtype (a torch.dtype or its name). So the
        efficiency of a cube-shaped matmul grows with its side. Where copies were measured, their
        curve gives the time of memory accesses.
        """
        moving = self._memory_traffic_seconds(nbytes, kernels)
        if not flops:
            return kernels * self.kernel + moving
        name = str(dtype).removeprefix("torch.")
        half = self.saturation.get(name, 0.0)
        slowed = 1.0 + (half * kernels / flops) ** (1 / 3) if half else 1.0
        return kernels * self.kernel + max(flops * slowed / self.rate(name), moving)

    def _memory_traffic_seconds(self, nbytes: float, kernels: int) -> float:
        """Return the time of reading and writing ``nbytes`` in so many kernels.

        It follows the curve of copies where that was measured, because caches make small kernels
        faster.
        """
        found = self._measured_seconds("copy", nbytes / kernels, _ALONE) if self.measured else None
        if found is None:
            return nbytes / self.memory_bandwidth
        return kernels * (found - (self._measured_seconds("copy", 0, _ALONE) or 0.0))

    def rate(self, dtype: object = "float32") -> float:
        """Return the floating-point operations per second of large matmuls.

        For a dtype that isn't listed it is the rate of float32, or else the lowest known rate.
        """
        name = str(dtype).removeprefix("torch.")
        return self.flops.get(name) or self.flops.get("float32") or min(self.flops.values())

    def overlapped(self, computing: float, moving: float) -> float:
        """Return seconds of a computation and a move at once, from the times of each alone.

        >>> Cluster().overlapped(3.0, 2.0), Cluster(overlap=2.0).overlapped(3.0, 2.0)
        (3.0, 5.0)
        """
        return max(computing, moving) + (self.overlap - 1.0) * min(computing, moving)

    def op(self, key: str) -> tuple[float, float] | None:
        """Return measured seconds of (forward, backward) of an op; None if not measured."""
        return self.ops.get(key)

    # ------------------------------------------------------------------------------------ variants

    @property
    def origin(self) -> str:
        """The origin of these figures in words, which a plan states with its prices.

        >>> Cluster.preset("dgx-h100").origin
        'a preset, from data sheets and what others have measured'
        """
        told = self.source or ("as given" if self != _GENERIC.like(self) else _ASSUMED)
        return told + (f"; {len(self.ops)} calls by measured times" if self.ops else "")

    def like(self, other: Cluster) -> Cluster:
        """Return this cluster with another one's name, size, device, memory and measured calls."""
        return replace(
            self,
            name=other.name,
            size=other.size,
            device=other.device,
            memory=other.memory,
            ops=other.ops,
        )

    @property
    def nodes(self) -> int:
        """The number of machines; 0 where the size is not fixed."""
        return -(-self.size // self.node_size) if self.node_size else min(self.size, 1)

    def with_size(self, size: int) -> Cluster:
        """Return the same machine with so many devices."""
        return replace(self, size=size)

    def with_ops(self, ops: Mapping[str, tuple[float, float]]) -> Cluster:
        """Return this cluster with these times of ops added. They replace older ones."""
        return replace(self, ops={**self.ops, **ops})

    def scaled(
        self,
        computing: float,
        moving: float,
        waiting: float = 0.0,
        updating: float | None = None,
        bucketed: float | None = None,
        copying: float | None = None,
    ) -> Cluster:
        """Return this cluster with its times multiplied by factors.

        ``computing``: factor of the time of calls. ``moving``: factor of moves between ranks.
        ``waiting``: seconds that ranks wait longer for one another. ``updating``: factor of
        optimizers (None: as calls). ``bucketed``: factor of parameters and gradients in buckets
        (None: as other moves). ``copying``: factor of copies, and of all reading and writing that
        was not measured with a call (None: as calls).

        >>> c = Cluster().scaled(1.5, 2.0)
        >>> c.seconds("all_reduce", 1 << 20, 4) / Cluster().seconds("all_reduce", 1 << 20, 4), round(c.compute(1e9, 0) / Cluster().compute(1e9, 0), 9)
        (2.0, 1.5)
        """  # noqa: E501
        copying = computing if copying is None else copying
        curves = (
            replace(
                c,
                points=tuple(
                    (n, s * (copying if c.kind == "copy" else moving)) for n, s in c.points
                ),
            )
            for c in self.measured
        )
        return replace(
            self, kernel=self.kernel * computing,
            flops={k: rate / computing for k, rate in self.flops.items()}, measured=tuple(curves),
            memory_latency=self.memory_latency * copying,
            memory_bandwidth=self.memory_bandwidth / copying,
            ops={k: (f * computing, b * computing) for k, (f, b) in self.ops.items()},
            rank_skew=self.rank_skew * moving + waiting,
            **{name: getattr(self, name) * moving for name in ("launch", "latency", "node_latency",
                "message")},
            **{name: getattr(self, name) / moving for name in ("bandwidth", "node_bandwidth",
                "node_stream")},
            optimizer_factor=self.optimizer_factor
            * (computing if updating is None else updating)
            / copying,
            bucket_factor=self.bucket_factor * (1.0 if bucketed is None else bucketed / moving),
        )  # fmt: skip

    @classmethod
    def preset(cls, name: str, nodes: int = 1, **changes: object) -> Cluster:
        """Return a cluster of ``nodes`` known machines, joined. ``changes``: other fields.

        Raises ValueError for an unknown name, and lists the known ones.
        """
        from .presets import preset

        return preset(name, nodes, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster to a JSON file that `load` reads."""
        from .json_file import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a file that `save` or a person wrote.

        Raises ClusterError, which names file and field, where it describes no cluster. Measured
        curves that contradict the laws are corrected, and a logged warning names them.
        """
        from .json_file import load

        return load(path)


def _made(values: dict[str, object]) -> Cluster:
    return Cluster(**values)  # type: ignore[arg-type]


def _check(c: Cluster) -> None:
    for name in (
        "launch",
        "latency",
        "memory_latency",
        "node_latency",
        "node_stream",
        "message",
        "kernel",
        "rank_skew",
        "node_size",
        "size",
        "memory",
    ):
        if not 0 <= getattr(c, name) < math.inf:
            raise ValueError(f"{name}={getattr(c, name)}: must be 0 or more")
    for name in ("bandwidth", "memory_bandwidth", "node_bandwidth"):
        if not getattr(c, name) > 0:
            raise ValueError(f"{name}={getattr(c, name)}: must be more than 0 bytes per second")
    if not 0 < c.bucket_factor < math.inf:
        raise ValueError(
            f"bucket_factor={c.bucket_factor}: must be a factor above 0; 1 means that parameters "
            f"and gradients in buckets move as fast as other data"
        )
    if not 0 < c.optimizer_factor < math.inf:
        raise ValueError(
            f"optimizer_factor={c.optimizer_factor}: must be a factor above 0; 1 means that an "
            f"optimizer takes as long as reading and writing its data"
        )
    if (
        not c.flops
        or not all(rate > 0 for rate in c.flops.values())
        or not all(half >= 0 for half in c.saturation.values())
    ):
        raise ValueError(
            f"flops={c.flops}, saturation={c.saturation}: flops needs the rate of at least one "
            f"dtype, all rates must be above 0, and no saturation may be below 0"
        )
    if not 1.0 <= c.overlap <= 2.0:
        raise ValueError(
            f"overlap={c.overlap}: must be from 1 (moves and kernels do not slow each other down) "
            f"to 2 (they take turns)"
        )
    if c.node_size and (c.node_latency < c.latency or c.node_bandwidth > c.bandwidth):
        links = (
            f"node_latency={c.node_latency:g}, node_bandwidth={c.node_bandwidth:g} against "
            f"latency={c.latency:g}, bandwidth={c.bandwidth:g}"
        )
        raise ValueError(
            f"{links}: a rank cannot reach other nodes quicker than its own; with node_size=0 all "
            f"links are equally fast"
        )
    for curve in c.measured:
        if curve.kind not in WITHIN and (curve.kind != "copy" or curve.ranks != 1):
            raise ValueError(
                f"measured {curve.kind} among {curve.ranks} ranks: the kinds of curve are "
                f"{', '.join(sorted(WITHIN))}, and copy of 1 rank"
            )
    if any(not (forward >= 0 and backward >= 0) for forward, backward in c.ops.values()):
        raise ValueError("ops: seconds must be 0 or more")


_GENERIC = Cluster()
_cluster: ContextVar[Cluster] = ContextVar("globaltensor_cluster", default=_GENERIC)


def current_cluster() -> Cluster:
    """Return the cluster that plans are made for."""
    return _cluster.get()


def named_cluster() -> Cluster | None:
    """Return the cluster that `use_cluster` has set here.

    Return None where no cluster was set: plans are then made for the generic machine.
    """
    found = _cluster.get()
    return None if found is _GENERIC else found


@contextmanager
def use_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """Plan for ``cluster`` in this block. All ranks must name the same one.

    Raises ClusterError where ``cluster`` is no Cluster.
    """
    if not isinstance(cluster, Cluster):
        raise ClusterError(
            f"use_cluster takes a Cluster, not {cluster!r}: Cluster.preset(name), or "
            f"Cluster.load(file)"
        )
    token = _cluster.set(cluster)
    try:
        yield cluster
    finally:
        _cluster.reset(token)
