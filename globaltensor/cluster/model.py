"""The cluster model: seconds of a move, of a kernel, and of both at once. Pure; every rank computes
the same numbers.

Moves cost by latency and bandwidth (the alpha-beta model) or by what was measured; kernels by a
roofline with a rate that small ones do not reach. The default is a generic machine, the same
whatever the backend, so that a plan does not depend on where it is made.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace

from ..errors import ClusterError
from .alpha_beta import BETWEEN, LOCAL, WITHIN, Group, group_of
from .frozen_dict import Frozen
from .measured_curves import Curve, Curves

__all__ = ["Cluster", "current_cluster", "named_cluster", "use_cluster"]

_ALONE = Group(1, 1, 0, 0)
#: What is said of the generic machine.
_ASSUMED = (
    "assumed, of no machine in particular: seconds are no prediction for this one. `globaltensor "
    "profile --out cluster.json` measures it, "
    'flow.use_cluster(flow.Cluster.load("cluster.json")) plans for it'
)
_HALVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Cluster:
    """What moves and kernels cost. Times in seconds, sizes in bytes, rates for one device.

    Moves: ``launch`` is what a collective costs before its first byte moves, ``latency`` what each
    of its steps adds, ``bandwidth`` what a rank sends in a second; ``node_latency`` and
    ``node_bandwidth`` the same between nodes of ``node_size`` devices (0: all links are alike), a
    rank's share while all ranks of its node send; alone it may send ``node_stream`` (0: no more
    than that). ``tree``: steps grow with the logarithm of the group, not with it. ``message``: what
    each further peer adds to an all-to-all then. ``measured``: curves that go before these
    constants where there are any.

    Kernels: ``flops`` is the matmul rate that large ones reach, by dtype; ``saturation`` the
    floating-point operations of a cube-shaped matmul at half that rate; ``kernel`` what each kernel
    costs at least. ``memory_latency`` and ``memory_bandwidth``: of reading and writing the own
    memory.

    ``overlap``: how much slower computing and moving are while both go on, from 1 (not at all) to 2
    (as slow as one after the other). ``skew``: seconds that ranks which have each computed wait for
    one another before a move that they cannot go on without; `seconds` leaves it out. ``bucketed``:
    what parameters and their gradients that move together, in buckets begun early, take of the time
    that such moves take by themselves. ``updating``: by how much longer an optimizer's step takes
    than reading and writing what it does, a parameter's other costs in a training step included.
    ``ops``: seconds of (forward, backward) of single ops, by keys of whoever measured them.
    ``memory``: of a device; 0 is unknown, and no limit. ``size``: devices there are; 0 is as many
    as asked for. ``device``: "cpu" or "cuda". ``source``: where these figures come from, in words
    (see `origin`); two clusters that differ in it only are equal.

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
    skew: float = 0.0
    updating: float = 1.0
    bucketed: float = 1.0
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
        # Part of the key of every plan, so worked out once.
        set_(self, "_hash", hash(tuple(getattr(self, f.name) for f in fields(self) if f.compare)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[object, ...]:
        return _made, (
            {f.name: getattr(self, f.name) for f in fields(self)},
        )  # the hash is another in another process

    # Moves

    def seconds(
        self, kind: str, nbytes: float, ranks: int | Sequence[int], together: int = 0
    ) -> float:
        """Time of one move among ``ranks`` (how many consecutive ones, or which: those on several
        nodes are joined by the slower links).

        ``nbytes`` is the size of the whole for all_gather (its result), reduce_scatter (its input),
        all_reduce, broadcast and send; what one rank holds for all_to_all; what the busiest rank
        sends or receives for exchange, whose ``ranks`` are it and its peers; what is read and
        written for slice, pad, mask and copy. ``together``: how many such groups use the links of a
        node at the same time; 0: all there is room for. Raises KeyError for another kind.
        """
        if kind in LOCAL:
            found = self._measured(LOCAL[kind], nbytes, _ALONE) if self.measured else None
            return self.memory_latency + nbytes / self.memory_bandwidth if found is None else found
        group = group_of(ranks if isinstance(ranks, int) else tuple(ranks), self.node_size)
        if kind not in WITHIN:
            raise KeyError(f"{kind!r} is no move; there are {', '.join(sorted((*WITHIN, *LOCAL)))}")
        if group.nodes == 1:
            return self._lawful(kind, nbytes, group, 0)
        # Not quicker than what as many ranks, or as a node has, take within one.
        return max(
            self._lawful(kind, nbytes, group, together),
            self._lawful(kind, nbytes, Group(min(group.ranks, self.node_size), 1, 0, 0), 0),
        )

    def _lawful(self, kind: str, nbytes: float, group: Group, together: int) -> float:
        """Neither half of an all-reduce takes longer than it does, nor does it take more than twice
        as long as both; an all-to-all takes no longer than gathering everything."""
        if kind in _HALVES and self.measured:
            found = self._halves(nbytes, group)
            if found is not None:
                return found[kind]
        elif kind == "all_to_all" and (self.measured or self.tree or group.nodes > 1):
            return min(
                self._priced(kind, nbytes, group, together),
                self._lawful("all_gather", nbytes * group.ranks, group, together),
            )
        return self._priced(kind, nbytes, group, together)

    def _halves(self, nbytes: float, group: Group) -> dict[str, float] | None:
        """Measured times of all_gather, reduce_scatter and all_reduce; one that was not measured
        follows from the others. None where none was."""
        gather, scatter, whole = (self._measured(kind, nbytes, group) for kind in _HALVES)
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

    def _priced(self, kind: str, nbytes: float, group: Group, together: int) -> float:
        found = self._measured(kind, nbytes, group) if self.measured else None
        if found is None and self.measured and group.ranks > 1:
            # Gathering whose ranks each send as much is nearer to the truth than constants that
            # nobody may have measured.
            found = self._measured(
                "all_gather",
                nbytes if kind == "all_to_all" else nbytes * group.ranks / (group.ranks - 1),
                group,
            )
        if found is not None:
            return found
        if group.nodes == 1:
            fixed, moving = WITHIN[kind](self, nbytes, group.ranks)
            return fixed + moving
        return BETWEEN[kind](self, nbytes, group, together)

    def _measured(self, kind: str, nbytes: float, group: Group) -> float | None:
        curves: Curves = self._curves  # type: ignore[attr-defined]
        return curves.seconds(
            kind, nbytes, group.ranks, group.local, lambda kind, n, p: WITHIN[kind](self, n, p)
        )

    def relaid(self, nbytes: float) -> float | None:
        """Seconds to bring so many bytes into another order before or after a move; None where
        copies weren't measured: plans leave it out then."""
        return self._measured("copy", 2 * nbytes, _ALONE) if self.measured else None

    # Kernels

    def compute(
        self, flops: float, nbytes: float, dtype: object = "float32", kernels: int = 1
    ) -> float:
        """Time of ``kernels`` kernels that do ``flops`` floating-point operations and read and
        write ``nbytes``, all of them together, by the roofline.

        Arithmetic runs at rate r / (1 + (s / f)^(1/3)) for f operations a kernel, r being ``flops``
        and s ``saturation`` of the dtype (a torch.dtype or its name): of a cube-shaped matmul the
        efficiency grows with its side. Where copies were measured their curve says what memory
        takes.
        """
        moving = self._touching(nbytes, kernels)
        if not flops:
            return kernels * self.kernel + moving
        name = str(dtype).removeprefix("torch.")
        half = self.saturation.get(name, 0.0)
        slowed = 1.0 + (half * kernels / flops) ** (1 / 3) if half else 1.0
        return kernels * self.kernel + max(flops * slowed / self.rate(name), moving)

    def _touching(self, nbytes: float, kernels: int) -> float:
        """Reading and writing, in as many kernels: by the curve of copies where it was measured, as
        caches make small ones quicker."""
        found = self._measured("copy", nbytes / kernels, _ALONE) if self.measured else None
        if found is None:
            return nbytes / self.memory_bandwidth
        return kernels * (found - (self._measured("copy", 0, _ALONE) or 0.0))

    def rate(self, dtype: object = "float32") -> float:
        """Floating-point operations per second of large matmuls: that of float32, or else the
        lowest known, for a dtype that isn't listed."""
        name = str(dtype).removeprefix("torch.")
        return self.flops.get(name) or self.flops.get("float32") or min(self.flops.values())

    def beside(self, computing: float, moving: float) -> float:
        """Seconds of a computation and a move that go on at the same time and take so long alone.

        >>> Cluster().beside(3.0, 2.0), Cluster(overlap=2.0).beside(3.0, 2.0)
        (3.0, 5.0)
        """
        return max(computing, moving) + (self.overlap - 1.0) * min(computing, moving)

    def op(self, key: str) -> tuple[float, float] | None:
        """Measured seconds of (forward, backward) of an op, None if it was not measured."""
        return self.ops.get(key)

    # Others like it

    @property
    def origin(self) -> str:
        """Where these figures come from, in words: what a plan says of its prices.

        >>> Cluster.preset("dgx-h100").origin
        'a preset, from data sheets and what others have measured'
        """
        told = self.source or ("as given" if self != _GENERIC.like(self) else _ASSUMED)
        return told + (f"; {len(self.ops)} calls by measured times" if self.ops else "")

    def like(self, other: Cluster) -> Cluster:
        """This cluster with the name, the number of devices, their kind, their memory and the
        measured calls of another one."""
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
        """How many machines; 0 where the size is not fixed."""
        return -(-self.size // self.node_size) if self.node_size else min(self.size, 1)

    def with_size(self, size: int) -> Cluster:
        """The same machine with so many devices."""
        return replace(self, size=size)

    def with_ops(self, ops: Mapping[str, tuple[float, float]]) -> Cluster:
        """With these times of ops beside those it has; newer ones win."""
        return replace(self, ops={**self.ops, **ops})

    def stretched(
        self,
        computing: float,
        moving: float,
        waiting: float = 0.0,
        updating: float | None = None,
        bucketed: float | None = None,
        copying: float | None = None,
    ) -> Cluster:
        """Where calls take ``computing`` times as long, moves between ranks ``moving`` times, ranks
        wait ``waiting`` seconds longer for one another, optimizers take ``updating`` times as long
        (None: as calls do), parameters and gradients in buckets ``bucketed`` times (None: as other
        moves do), and copying, as all reading and writing that was not measured with a call,
        ``copying`` times (None: as calls do).

        >>> c = Cluster().stretched(1.5, 2.0)
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
            skew=self.skew * moving + waiting,
            **{name: getattr(self, name) * moving for name in ("launch", "latency", "node_latency",
                "message")},
            **{name: getattr(self, name) / moving for name in ("bandwidth", "node_bandwidth",
                "node_stream")},
            updating=self.updating * (computing if updating is None else updating) / copying,
            bucketed=self.bucketed * (1.0 if bucketed is None else bucketed / moving),
        )  # fmt: skip

    @classmethod
    def preset(cls, name: str, nodes: int = 1, **changes: object) -> Cluster:
        """A known machine, ``nodes`` of them joined; ``changes``: other fields. Raises ValueError
        for an unknown name, listing those there are."""
        from .presets import preset

        return preset(name, nodes, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file that `load` reads."""
        from .json_file import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a file that `save` or a person wrote. Raises ClusterError, naming file and field,
        where it says no cluster. Where measured curves contradict the laws (measured_curves.py)
        they are made lawful, and a logged warning says which."""
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
        "skew",
        "node_size",
        "size",
        "memory",
    ):
        if not 0 <= getattr(c, name) < math.inf:
            raise ValueError(f"{name}={getattr(c, name)}: must be 0 or more")
    for name in ("bandwidth", "memory_bandwidth", "node_bandwidth"):
        if not getattr(c, name) > 0:
            raise ValueError(f"{name}={getattr(c, name)}: must be more than 0 bytes per second")
    if not 0 < c.bucketed < math.inf:
        raise ValueError(
            f"bucketed={c.bucketed}: a factor above 0, 1 where parameters and gradients in "
            f"buckets move as all else does"
        )
    if not 0 < c.updating < math.inf:
        raise ValueError(
            f"updating={c.updating}: a factor above 0, 1 where an optimizer takes as long as "
            f"reading and writing does"
        )
    if (
        not c.flops
        or not all(rate > 0 for rate in c.flops.values())
        or not all(half >= 0 for half in c.saturation.values())
    ):
        raise ValueError(
            f"flops={c.flops}, saturation={c.saturation}: at least one dtype's rate, above 0, and "
            f"no saturation below 0"
        )
    if not 1.0 <= c.overlap <= 2.0:
        raise ValueError(
            f"overlap={c.overlap}: from 1 (moves and kernels do not hinder each other) to 2 (they "
            f"take turns)"
        )
    if c.node_size and (c.node_latency < c.latency or c.node_bandwidth > c.bandwidth):
        links = (
            f"node_latency={c.node_latency:g}, node_bandwidth={c.node_bandwidth:g} against "
            f"latency={c.latency:g}, bandwidth={c.bandwidth:g}"
        )
        raise ValueError(
            f"{links}: a rank cannot reach other nodes quicker than its own; with node_size=0 all "
            f"links are alike"
        )
    for curve in c.measured:
        if curve.kind not in WITHIN and (curve.kind != "copy" or curve.ranks != 1):
            raise ValueError(
                f"measured {curve.kind} among {curve.ranks} ranks: there are "
                f"{', '.join(sorted(WITHIN))}, and copy of 1 rank"
            )
    if any(not (forward >= 0 and backward >= 0) for forward, backward in c.ops.values()):
        raise ValueError("ops: seconds must be 0 or more")


_GENERIC = Cluster()
_cluster: ContextVar[Cluster] = ContextVar("globaltensor_cluster", default=_GENERIC)


def current_cluster() -> Cluster:
    """The cluster that plans are made for."""
    return _cluster.get()


def named_cluster() -> Cluster | None:
    """Return the cluster that `use_cluster` has set here, None where plans are made for the generic
    machine because nobody has said otherwise."""
    found = _cluster.get()
    return None if found is _GENERIC else found


@contextmanager
def use_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """Plan for ``cluster`` in this block. All ranks must name the same one. Raises ClusterError
    where it is none."""
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
