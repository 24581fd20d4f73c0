"""The candidates of a call on a mesh: every combination of one signature per axis.

Each candidate has its layouts and its costs. `intra_op/formulate.py` and `inter_op` call
`StrategyBuilder`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..._ops.rules import RULES
from ...boxing.moves import Layout
from ...cluster import Cluster
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, broadcast, split
from ...sharding.spec import Spec
from ..ir.flops import Work, work_of
from ..ir.op_graph import Call, Value
from .measured_ops import op_key, parts
from .reshard_cost import ReshardCosts
from .rule_failures import RuleFailures
from .signatures import CostedSignature, probe_decomposition, signatures

__all__ = ["StrategyBuilder", "StrategyTable", "gives_every_rank_data", "roofline"]

Array = np.ndarray[Any, np.dtype[Any]]
# Candidates of a call; above that, signatures that divide no work are dropped first.
_MAX_CANDIDATES = 1024


@dataclass(eq=False)
class StrategyTable:
    """The strategies of a call, one per index k.

    - ``ins[i][k]``, ``outs[i][k]``: the layouts of operand and result i.
    - ``forward[k]``, ``backward[k]``: seconds of computing.
    - ``moving[k]``: seconds that the call itself communicates, both passes.
    - ``share[k]``: the fraction of the work that one rank does.
    """

    ins: list[list[Layout]]
    outs: list[list[Layout]]
    forward: Array
    backward: Array
    moving: Array
    share: Array
    losses: RuleFailures = field(default_factory=RuleFailures)  # strategies lost to errors
    left_out: int = 0  # number of strategies above the limit

    def __len__(self) -> int:
        return len(self.forward)

    @cached_property
    def free(self) -> bool:
        """True if the call costs no time, as views do."""
        return not self.forward.any()


class StrategyBuilder:
    """A builder of candidates on one mesh; equal calls share their tables."""

    def __init__(self, prices: ReshardCosts, training: bool) -> None:
        self.prices, self.training = prices, training
        self._found: dict[Hashable, StrategyTable] = {}
        self._states: dict[Hashable, list[Layout]] = {}

    def of(self, call: Call, values: Sequence[Value]) -> StrategyTable:
        key = call.key if call.key is not None else call.number
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._build_table(call, values)
        return found

    def states(self, value: Value, stored: bool) -> list[Layout]:
        """Return the possible layouts of a given tensor.

        A parameter or an input is replicated, or split along any dim that gives each rank data.
        Other tensors are replicated.
        """
        key = value.shape, stored
        layouts = self._states.get(key)
        if layouts is None:
            mesh = self.prices.mesh
            menus = [
                [
                    broadcast,
                    *(split(d) for d, n in enumerate(value.shape) if stored and n >= size > 1),
                ]
                for size in mesh.shape
            ]
            layouts = self._states[key] = [
                layout
                for layout in itertools.product(*menus)
                if gives_every_rank_data(value.shape, layout, mesh)
            ]
        return layouts

    def _axis_signatures(
        self, call: Call, values: Sequence[Value], size: int, losses: RuleFailures
    ) -> list[CostedSignature]:
        def probe() -> tuple[list[CostedSignature], RuleFailures]:
            lost = RuleFailures()
            return signatures(call, values, size, lost), lost

        found, lost = _cached_probe(None if call.key is None else (call.key, size), probe)
        losses.update(lost)
        return list(found)  # a copy, which `_build_table` may shorten

    def _composition_results(
        self, call: Call, operands: Sequence[Value], come: Sequence[Any], losses: RuleFailures
    ) -> Any:
        """Return the result layouts and traffic of a composition on several axes at once."""

        def probe() -> tuple[Any, RuleFailures]:
            lost = RuleFailures()
            specs = [
                Spec.make(v.shape, v.dtype, self.prices.mesh, layout)
                for v, layout in zip(operands, come, strict=True)
            ]
            return probe_decomposition(call, specs, lost), lost

        found, lost = _cached_probe(
            None if call.key is None else ("on", call.key, self.prices.mesh.shape, tuple(come)),
            probe,
        )
        losses.update(lost)
        return found

    def _build_table(self, call: Call, values: Sequence[Value]) -> StrategyTable:
        mesh, operands, results = (
            self.prices.mesh,
            [values[v] for v in call.operands],
            [values[v] for v in call.outs],
        )
        losses = RuleFailures()
        menus = [self._axis_signatures(call, values, size, losses) for size in mesh.shape]
        every = math.prod(map(len, menus))
        while math.prod(map(len, menus)) > _MAX_CANDIDATES:
            longest = max(menus, key=len)
            longest.sort(key=lambda s: s.divided, reverse=True)
            longest.pop()
        ins: list[list[Layout]] = [[] for _ in operands]
        outs: list[list[Layout]] = [[] for _ in results]
        rows = []
        left_out = every - math.prod(map(len, menus))
        work = work_of(call, values, losses)
        taken: set[tuple[Any, ...]] = set()
        # An operand may appear twice, as in y * y.
        again = [(i, k) for i, v in enumerate(call.operands) if (k := call.operands.index(v)) < i]
        for combination in itertools.product(*menus):
            come = [
                _canonical(v, [s.ins[i] for s in combination], mesh) for i, v in enumerate(operands)
            ]
            if any(come[i] != come[k] for i, k in again):
                continue  # one tensor has one layout
            lie = [
                _canonical(v, [s.outs[min(i, len(s.outs) - 1)] for s in combination], mesh)
                for i, v in enumerate(results)
            ]
            acting = [s for s in combination if not all(e.is_broadcast for e in s.ins)]
            if None not in come and len(acting) > 1 and any(s.composed for s in acting):
                seen = (
                    self._composition_results(call, operands, come, losses)
                    if not any(map(_has_loose_partial, acting))
                    else None
                )
                if seen is None:
                    continue
                lie = [
                    layout if gives_every_rank_data(v.shape, layout, mesh) else None
                    for v, layout in zip(results, seen[0], strict=True)
                ]
            key = (*come, *lie)
            if key in taken or any(layout is None for layout in key):
                continue
            if call.fixed is not None and (
                lie[0] != call.fixed if len(call.fixed) == len(mesh.shape) else False
            ):
                continue
            taken.add(key)
            for column, layout in zip((*ins, *outs), key, strict=True):
                column.append(layout)  # type: ignore[arg-type]
            rows.append((combination, come, lie))
        if not rows:
            whole = (broadcast,) * len(mesh.shape)
            ins, outs = [[whole] for _ in operands], [[call.fixed or whole] for _ in results]
            rows.append(((), [whole] * len(operands), [o[0] for o in outs]))
        share = np.array(
            [self._share(combination, operands, results) for combination, _, _ in rows], dtype=float
        )
        if work.view:
            computing = np.zeros((2, len(rows)))
        else:
            computing = self._compute_seconds(
                call,
                operands,
                results,
                [come for _, come, _ in rows],
                [lie for _, _, lie in rows],
                work,
                share,
            )
            if work.flops and self.prices.cluster.ops:
                computing *= [
                    self._kernel_runs(call, operands, results, *row, work, part)
                    for row, part in zip(rows, share.tolist(), strict=True)
                ]
        moving = np.array(
            [
                self._communication_seconds(combination, part)
                for (combination, _, _), part in zip(rows, share.tolist(), strict=True)
            ]
        )
        twice = self.training if work.view else computing[1] > 0
        return StrategyTable(ins, outs, *computing, moving * (1 + twice), share, losses, left_out)

    def _share(
        self,
        combination: Sequence[CostedSignature],
        operands: Sequence[Value],
        results: Sequence[Value],
    ) -> float:
        """Return the fraction of the work that one rank does."""
        return math.prod(
            _largest_work_share(s, operands, results, size)
            for s, size in zip(combination, self.prices.mesh.shape, strict=False)
            if s.divided
        )

    def _communication_seconds(self, combination: Sequence[CostedSignature], share: float) -> float:
        """Return the seconds that a candidate itself communicates in the forward pass."""
        prices, moving = self.prices, 0.0
        for axis, s in enumerate(combination):
            others = share * (prices.mesh.shape[axis] if s.divided else 1)
            for kind, nbytes in s.moved:
                moving += (
                    nbytes * 1e-12
                    if kind == "seconds"
                    else prices.collective(kind, int(nbytes * min(1.0, others)), (axis,))
                    + prices.cluster.rank_skew
                )
        return moving

    def _kernel_runs(
        self, call: Call, operands: Sequence[Value], results: Sequence[Value],
        combination: Sequence[CostedSignature], come: Sequence[Layout], lie: Sequence[Layout],
        work: Work, share: float,
    ) -> float:  # fmt: skip
        """Return how often a candidate runs the call that was measured.

        In ring attention a rank's rows of queries meet the keys of all ranks, one rank after the
        other. The measurement has only the rank's own keys.
        """
        if (
            not any(s.moved for s in combination)
            or self._measured_seconds(call, operands, come) is None
        ):
            return 1.0
        layouts = zip((*operands, *results), (*come, *lie), strict=True)
        once = work_of(
            call,
            {
                v.number: dataclasses.replace(v, shape=self.prices.local_shape(v.shape, layout))
                for v, layout in layouts
            },
        ).flops
        return max(1.0, work.flops * share / once) if once else 1.0

    def _compute_seconds(
        self,
        call: Call,
        operands: Sequence[Value],
        results: Sequence[Value],
        come: Sequence[Any],
        lie: Sequence[Any],
        work: Work,
        share: Array,
    ) -> Array:
        """Return the seconds of both passes for each candidate.

        Some candidates may be measured while others cannot be. An example is a call that slices its
        operand itself: its kernel works on another shape than the operand's. The estimate of such a
        candidate is corrected by a factor. The factor is that of the measured candidate with the
        nearest share of the work. Without it, estimates, which are lower than measurements, would
        win against them.
        """
        measured = [self._measured_seconds(call, operands, c) for c in come]
        known = [k for k, seconds in enumerate(measured) if seconds is not None]
        if len(known) == len(measured):
            return np.array(measured, dtype=float).T
        estimates = np.array(
            [
                self._roofline_seconds(operands, results, c, o, work, part)
                for c, o, part in zip(come, lie, share.tolist(), strict=True)
            ]
        ).T
        if known:
            measured_seconds = np.array([measured[k] for k in known], dtype=float).T
            off = np.divide(
                measured_seconds,
                estimates[:, known],
                out=np.ones_like(measured_seconds),
                where=estimates[:, known] > 0,
            )
            near = np.abs(np.log(share[known])[:, None] - np.log(share)[None]).argmin(0)
            estimates *= off[:, near]
            estimates[:, known] = measured_seconds
        return estimates

    def _measured_seconds(
        self, call: Call, operands: Sequence[Value], come: Sequence[Layout]
    ) -> tuple[float, float] | None:
        """Return the seconds of both passes on local tensors of these layouts, if measured.

        The result is None where this cluster has no measurement.
        """
        cluster = self.prices.cluster
        key = op_key(call, operands, parts(operands, come, self.prices)) if cluster.ops else None
        found = None if key is None else cluster.op(key)
        return found if found is None or self.training else (found[0], 0.0)

    def _roofline_seconds(
        self,
        operands: Sequence[Value],
        results: Sequence[Value],
        come: Sequence[Any],
        lie: Sequence[Any],
        work: Work,
        share: float,
    ) -> tuple[float, float]:
        """Return the seconds of both passes by the roofline."""
        prices = self.prices
        nbytes = sum(
            v.dtype.itemsize * prices.local(v.shape, layout)
            for v, layout in zip((*operands, *results), (*come, *lie), strict=True)
        )
        return roofline(prices.cluster, operands, results, work, share, nbytes, self.training)


def roofline(
    cluster: Cluster,
    operands: Sequence[Value],
    results: Sequence[Value],
    work: Work,
    share: float,
    nbytes: float,
    training: bool,
) -> tuple[float, float]:
    """Return the seconds of both passes for a fraction of a call's work.

    ``share`` is the fraction. ``nbytes`` are the bytes of operands and results in it.
    """
    dtype = next(
        (v.dtype for v in (*results, *operands) if v.dtype.is_floating_point),
        (results or operands)[0].dtype,
    )
    forward = cluster.compute(work.flops * share, nbytes, dtype)
    if not (training and work.backward):
        return forward, 0.0
    return forward, cluster.compute(
        work.flops * share * work.backward, int(nbytes * 1.5), dtype, kernels=2 if work.flops else 1
    )


#: Signatures of calls by version of the rules, for all meshes. Probing is slow where a call is a
#: composition.
_known: dict[Hashable, Any] = {}
_MAX_CACHED = 1 << 14


def _cached_probe(key: Hashable | None, probe: Callable[[], Any]) -> Any:
    """Return the result of ``ask``, cached by key until the rules change.

    Without a key nothing is cached.
    """
    if key is None:
        return probe()
    key = RULES.version, key
    try:
        return _known[key]
    except KeyError:
        found = probe()
    if len(_known) >= _MAX_CACHED:
        _known.clear()
    _known[key] = found
    return found


def _has_loose_partial(s: CostedSignature) -> bool:
    """Return True if some tensor is partial in a signature that is not a composition.

    Such signatures are not combined with a composition.
    """
    return not s.composed and any(e.is_partial for e in (*s.ins, *s.outs))


def _largest_work_share(
    s: CostedSignature, operands: Sequence[Value], results: Sequence[Value], size: int
) -> float:
    """Return the fraction of the work that the busiest rank of an axis has."""
    for v, e in zip((*operands, *results), (*s.ins, *s.outs), strict=False):
        if e.is_split:
            n, unit = v.shape[e.dim], e.unit
            return min(1.0, unit * -(-n // (unit * size)) / n) if n else 1.0
    return 1.0 / size


def _canonical(value: Value, entries: Sequence[Sbp], mesh: Placement) -> Layout | None:
    """Return the layout in the form that specs use, or None if some rank would have no data."""
    plain = all(e.unit == 1 for e in entries)  # such a layout is in that form already
    layout = tuple(entries) if plain else Spec.make(value.shape, value.dtype, mesh, entries).layout
    return layout if gives_every_rank_data(value.shape, layout, mesh) else None


@lru_cache(maxsize=1 << 16)
def gives_every_rank_data(shape: tuple[int, ...], layout: Layout, mesh: Placement) -> bool:
    """Return True if every rank has data of a tensor with this layout."""
    for dim, n in enumerate(shape):
        parts = math.prod(
            mesh.shape[a] for a, e in enumerate(layout) if e.is_split and e.dim == dim
        )
        if parts > 1 and n < parts:
            return False
    return True
