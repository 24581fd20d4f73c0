"""A memory limit: choose which parts of a program to recompute, at minimum cost.

The chosen parts make the memory that autograd saves for backward fit the limit. `Graph` calls
`choose_recompute` before the passes.

The saved memory of each call is not guessed: the calls run once more on fake tensors, under hooks
that see what autograd saves. The forward pass is cut where few bytes are alive (between the layers
of a transformer: one tensor). A dynamic program chooses which segments between cuts to recompute
(Chen et al. 2016, "Training deep nets with sublinear memory cost"). The chain model is that of
Beaumont et al. 2021, "Efficient combination of rematerialization and offloading". Their rotor also
recomputes inside recomputed segments, which is not done here.

The model assumes three things. The peak is the saved memory when backward starts plus the largest
segment that is recomputed. All inputs of a segment are saved. Parameters and the call's inputs are
free. Under these assumptions the choice is the best one, up to rounding: bytes are counted in
2048ths of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from ..._base import torch_private
from ..._base.pytree import object_tensors
from ...boxing import plan_boxing
from ...boxing.moves import show_bytes
from ...cluster import current_cluster
from ...distributed.world import world
from ...errors import GraphError
from ..capture.dry_world import GRAPH
from ..program.nodes import (
    BoxingCall,
    GatherCall,
    ProgramCall,
    RandomCall,
    autocast,
    backward,
    set_grad_enabled,
)
from .subgraph import operands

__all__ = ["RecomputeUnit", "choose_recompute", "kept_bytes", "segments"]

_FLOPS_PER_BYTE = 50.0  # of the assumed machine: FLOP/s over memory bandwidth
_LAUNCH = 5e-6  # minimum seconds of a call
_BINS = 2048  # the limit is divided into so many units
_MAX_CUTS = 64
_MAX_PEAKS = 48  # sizes of the largest recomputed segment that are tried


class RecomputeUnit(NamedTuple):
    """A run of consecutive nodes that go together: a call of the user's, or a region.

    Bytes are those of the rank with the most."""

    number: int  # number of the user's call that it begins with
    stage: int
    saved: int  # bytes saved for backward: of its results, and of internal tensors
    seconds: float  # to compute it once more
    fixed: bool  # a region of the user's, recomputed in any case
    crossing: int = (
        0  # bytes made so far and used later: inputs of a segment that starts behind this call
    )
    later: int = 0  # of those, the bytes that autograd saves for later calls
    unsaved: int = 0  # of those, the bytes that autograd does not save


# ------------------------------------------------------------------------------------- saved memory


class SavedActivations:
    """The memory that autograd saves for each call.

    ``shared`` holds keys of memory that nodes' values use, ``own`` the bytes of memory internal to
    the call."""

    def __init__(self, graph: fx.Graph, constants: Mapping[str, Any]) -> None:
        self.constants = constants
        self.sizes: dict[int, int] = {}  # bytes of memory that some node's value uses
        self.free: set[int] = set()
        self.shared: dict[fx.Node, set[int]] = {}
        self.own: dict[fx.Node, int] = {}
        self.seconds: dict[fx.Node, float] = {}
        for node in graph.nodes:
            for t in object_tensors(node.meta.get("val"), []):
                self.sizes.setdefault(torch_private.storage_key(t), t.untyped_storage().nbytes())
            if node.op == "placeholder":
                self.free |= {
                    torch_private.storage_key(t) for t in object_tensors(node.meta.get("val"), [])
                }
        counter = FlopCounterMode(display=False)
        mode = next(
            (
                t.fake_mode
                for n in graph.nodes
                for t in object_tensors(n.meta.get("val"), [])
                if torch_private.is_fake(t)
            ),
            None,
        )
        if mode is None:
            return
        flops, before = (
            0,
            [
                (k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k))
                for k in ("cpu", "cuda")
            ],
        )
        try:
            with torch.enable_grad(), mode, counter:
                for node in graph.nodes:
                    if node.target is backward:
                        break
                    if node.op in ("call_function", "call_method"):
                        self._inspect_node(node)
                        total = counter.get_total_flops()
                        self.seconds[node] = self._time(node, total - flops)
                        flops = total
        finally:
            autocast(*before)

    def _inspect_node(self, node: fx.Node) -> None:
        shared: set[int] = set()
        own: dict[int, int] = {}
        function: Any = node.target.function if isinstance(node.target, RandomCall) else node.target
        if node.target in (autocast, set_grad_enabled):
            function(*node.args)
        elif isinstance(node.target, (BoxingCall, GatherCall)):
            pass  # linear, so the gradient needs no value
        elif isinstance(node.target, ProgramCall) and not isinstance(node.target, RandomCall):
            if torch.is_grad_enabled():  # not looked into: inputs and results count as saved
                shared = {
                    torch_private.storage_key(t)
                    for n in [*operands(node), node]
                    for t in object_tensors(n.meta.get("val"), [])
                    if t.is_floating_point()
                }
        elif not node.meta.get("writes") and torch.is_grad_enabled():
            shared, own = self._run(node, function)
        self.shared[node], self.own[node] = shared - self.free, sum(own.values())

    def _run(self, node: fx.Node, function: Any) -> tuple[set[int], dict[int, int]]:
        saved: list[torch.Tensor] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            saved.append(t)
            return t

        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs),
            lambda n: self.constants[n.target] if n.op == "get_attr" else n.meta.get("val"),
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = (
                getattr(args[0], function)(*args[1:], **kwargs)
                if node.op == "call_method"
                else function(*args, **kwargs)
            )
        again = zip(object_tensors(out, []), object_tensors(node.meta.get("val"), []), strict=False)
        same = {torch_private.storage_key(a): torch_private.storage_key(b) for a, b in again}
        keys = [(same.get(key := torch_private.storage_key(t), key), t) for t in saved]
        return {k for k, _ in keys if k in self.sizes}, {
            k: t.untyped_storage().nbytes() for k, t in keys if k not in self.sizes
        }

    def _time(self, node: fx.Node, flops: int) -> float:
        """Return a node's time by the roofline: arithmetic or memory, whichever takes longer."""
        cluster = current_cluster()
        if isinstance(node.target, (BoxingCall, GatherCall)):
            return plan_boxing(*node.meta["box"]).seconds
        moved = sum(
            t.numel() * t.element_size()
            for n in [*operands(node), node]
            for t in object_tensors(n.meta.get("val"), [])
        )
        return _LAUNCH + max(moved, flops / _FLOPS_PER_BYTE) / cluster.memory_bandwidth


def kept_bytes(graph: fx.Graph, constants: Mapping[str, Any]) -> int:
    """Return the bytes that autograd saves for backward when the program runs unchanged.

    Parameters and the call's inputs do not count."""
    activations = SavedActivations(graph, constants)
    return sum(activations.own.values()) + sum(
        activations.sizes[k] for k in set().union(*activations.shared.values(), set())
    )


# ---------------------------------------------------------------------- the forward pass as a chain


def _calls(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes of the forward pass, grouped by call."""
    out: list[list[fx.Node]] = []
    last: Any = None
    for node in graph.nodes:
        if node.target is backward:
            break
        if not node.op.startswith("call_"):
            continue
        region = node.meta.get("region")
        of = (region, None if region is not None else node.meta.get("call"), node.meta.get("stage"))
        if of != last:
            out.append([])
        out[-1].append(node)
        last = of
    return out


def _chain(graph: fx.Graph, constants: Mapping[str, Any]) -> list[RecomputeUnit]:
    """Return this rank's figures of each call."""
    activations, calls = SavedActivations(graph, constants), _calls(graph)
    place = {node: i for i, call in enumerate(calls) for node in call}
    made: dict[int, int] = {}
    used: dict[int, int] = {}
    saver: dict[int, int] = {}
    for node, i in place.items():
        for t in object_tensors(node.meta.get("val"), []):
            made.setdefault(torch_private.storage_key(t), i)
        for n in node.all_input_nodes:
            used.update(
                (torch_private.storage_key(t), i) for t in object_tensors(n.meta.get("val"), [])
            )
        saver.update((key, i) for key in activations.shared.get(node, ()))
    n = len(calls)
    saved = [sum(activations.own.get(node, 0) for node in call) for call in calls]
    crossing, later, unsaved = [0] * n, [0] * n, [0] * n
    for key, first in made.items():
        if key in activations.free:
            continue
        size, last = activations.sizes[key], used.get(key, first)
        if key in saver:
            saved[first] += size
        if last - first > n // 2 and n > 8:
            continue  # alive throughout (positions, masks), so left out of every cut
        for i in range(first, last):
            crossing[i] += size
            later[i] += size if saver.get(key, -1) > i else 0
            unsaved[i] += size if key not in saver else 0
    return [
        RecomputeUnit(
            call[0].meta.get("call", i), call[0].meta.get("stage") or 0, saved[i],
            sum(activations.seconds.get(node, 0.0) for node in call),
            call[0].meta.get("region") is not None, crossing[i], later[i], unsaved[i],
        )
        for i, call in enumerate(calls)
    ]  # fmt: skip


def _max_over_ranks(own_chain: list[RecomputeUnit]) -> list[RecomputeUnit]:
    """Return the same chain on every rank, with each call's maximum over the ranks. Collective."""
    this_world = world()
    if this_world.size == 1:
        return own_chain
    merged: dict[tuple[int, int], RecomputeUnit] = {}
    for chain in this_world.comm(tuple(range(this_world.size))).all_gather_object(
        [tuple(c) for c in own_chain], GRAPH
    ):
        for fields in chain:
            call = RecomputeUnit(*fields)
            had = merged.get((call.stage, call.number))
            merged[call.stage, call.number] = (
                call if had is None else RecomputeUnit(*map(max, had, call))
            )
    return sorted(merged.values(), key=lambda c: c.number)


# --------------------------------------------------------------------------------------- the choice


def choose_recompute(graph: fx.Graph, constants: Mapping[str, Any], limit: int) -> None:
    """Mark the nodes to recompute with a ``region``.

    Autograd then saves at most ``limit`` bytes. The limit is for one micro-batch, on any rank, and
    for each stage separately. Collective. Raises GraphError if the limit cannot be met, with the
    limit that can."""
    if not any(node.target is backward for node in graph.nodes):
        return
    chain = _max_over_ranks(_chain(graph, constants))
    numbers = iter(range(1 << 20, 1 << 30))
    chosen: list[tuple[int, int, int, int]] = []
    for stage in sorted({c.stage for c in chain}):
        calls = [c for c in chain if c.stage == stage]
        chosen += [
            (stage, calls[i].number, calls[j - 1].number, next(numbers))
            for i, j in segments(calls, limit)
        ]
    for nodes in _calls(graph):
        number, stage = nodes[0].meta.get("call", -1), nodes[0].meta.get("stage") or 0
        region = next(
            (r for s, first, last, r in chosen if s == stage and first <= number <= last), None
        )
        if region is not None and nodes[0].meta.get("region") is None:
            for node in nodes:
                node.meta["region"] = region


def segments(calls: Sequence[RecomputeUnit], limit: int) -> list[tuple[int, int]]:
    """Return the runs of calls to recompute, as [i, j).

    The choice is the cheapest one whose saved bytes plus largest recomputed segment are within
    ``limit``. Regions that are recomputed in any case are not among the runs. Raises GraphError if
    there is no such choice."""
    if not any(c.fixed for c in calls) and sum(c.saved for c in calls) <= limit:
        return []
    chain = _Segments(calls)
    peaks = sorted({w for row in chain.work for w in row if 0 <= w < math.inf})
    least = min((chain.min_saved_bytes(w) + w, w) for w in peaks)
    if least[0] > limit:
        raise GraphError(
            f"set_memory_limit: {show_bytes(limit)} ({limit} bytes) cannot be met: with "
            f"everything recomputed that can be, autograd still saves {show_bytes(int(least[0]))} "
            f"({int(least[0])} bytes) at the peak; make the batch smaller "
            "(set_gradient_accumulation_steps), or raise the limit to that"
        )
    fitting = [w for w in peaks if w <= limit and chain.min_saved_bytes(w) + w <= limit]
    tried = {
        fitting[round(i * (len(fitting) - 1) / max(1, _MAX_PEAKS - 1))] for i in range(_MAX_PEAKS)
    } | {least[1]}
    cheapest = min(
        (best for w in sorted(tried) if (best := chain.cheapest(w, limit)) is not None),
        key=lambda best: best[0],
        default=None,
    )
    chosen = (
        cheapest[1] if cheapest is not None else chain.tightest(least[1])
    )  # only rounding excluded it
    return [(chain.cuts[i], chain.cuts[j]) for i, j in chosen if not calls[chain.cuts[i]].fixed]


class _Segments:
    """A chain that is cut where few bytes cross.

    Segment [i, j) goes from cut i to cut j. Recomputing it costs ``seconds[i][j]`` and needs
    ``work[i][j]`` bytes."""

    def __init__(self, calls: Sequence[RecomputeUnit]) -> None:
        n = len(calls)
        must = {
            i
            for i in range(1, n)
            if calls[i].fixed != calls[i - 1].fixed or (calls[i].fixed and calls[i - 1].fixed)
        }
        ranked = sorted(c.crossing for c in calls[:-1])
        bound = ranked[min(len(ranked) - 1, max(16, len(ranked) // 8))] if ranked else 0
        free = [i for i in range(1, n) if calls[i - 1].crossing <= bound and i not in must]
        free = free[:: max(1, -(-len(free) // _MAX_CUTS))]
        self.cuts = [0, *sorted({*must, *free}), n]
        m = len(self.cuts)
        at = [calls[c - 1] if 0 < c < n else None for c in self.cuts]
        self.crossing = [c.crossing if c else 0 for c in at]
        self.later = [c.later if c else 0 for c in at]
        self.unsaved = [c.unsaved if c else 0 for c in at]
        total = np.concatenate([[0], np.cumsum([c.saved for c in calls], dtype=np.int64)])
        spent = np.concatenate([[0.0], np.cumsum([c.seconds for c in calls])])
        self.saved = [int(total[c]) for c in self.cuts]  # up to each cut
        self.fixed = [calls[c].fixed for c in self.cuts[:-1]]
        self.known: dict[
            float, tuple[float, list[tuple[int, int]]]
        ] = {}  # by the largest segment allowed
        self.work = [[math.inf] * m for _ in range(m)]
        self.seconds = [[0.0] * m for _ in range(m)]
        for i in range(m - 1):
            for j in range(i + 1, m):
                if j > i + 1 and any(self.fixed[i:j]):
                    break
                self.work[i][j] = int(total[self.cuts[j]] - total[self.cuts[i]])
                self.seconds[i][j] = (
                    0.0 if self.fixed[i] else float(spent[self.cuts[j]] - spent[self.cuts[i]])
                )

    def _boundary_bytes(self, i: int, before: int, recomputed: int) -> int:
        """Return the bytes saved at cut i, between the segment before it and the next one.

        ``before`` and ``recomputed`` are 1 if the respective segment is recomputed, else 0."""
        if before:
            return self.crossing[i] if recomputed else self.later[i]
        return self.unsaved[i] if recomputed else 0

    def _segment_options(self, j: int, peak: float) -> list[tuple[int, int, int, int, float]]:
        """Return (i, recomputed, before, bytes, seconds) of the segments that end at cut j.

        ``before`` is 1 if the segment before it is recomputed, else 0."""
        out = []
        if not self.fixed[j - 1]:
            out = [
                (
                    j - 1,
                    0,
                    t,
                    self.saved[j] - self.saved[j - 1] + self._boundary_bytes(j - 1, t, 0),
                    0.0,
                )
                for t in (0, 1)
            ]
        for i in range(j - 1, -1, -1):
            if self.work[i][j] <= peak or (self.fixed[i] and self.work[i][j] < math.inf):
                out += [
                    (i, 1, t, self._boundary_bytes(i, t, 1), self.seconds[i][j]) for t in (0, 1)
                ]
        return out

    def _min_memory_choice(self, peak: float) -> tuple[float, list[tuple[int, int]]]:
        """Return the minimum of saved bytes and the recomputed segments that reach it.

        No recomputed segment needs more than ``peak`` bytes."""
        if peak in self.known:
            return self.known[peak]
        m = len(self.cuts)
        best = [[math.inf, math.inf] for _ in range(m)]
        came: dict[tuple[int, int], tuple[int, int]] = {}
        best[0][0] = 0
        for j in range(1, m):
            for i, t, before, nbytes, _ in self._segment_options(j, peak):
                if best[i][before] + nbytes < best[j][t]:
                    best[j][t] = best[i][before] + nbytes
                    came[j, t] = (i, before)
        at = (m - 1, 0 if best[-1][0] <= best[-1][1] else 1)
        self.known[peak] = best[at[0]][at[1]], self._trace_back(at, lambda at: came[at])
        return self.known[peak]

    def _trace_back(self, at: tuple[int, int], came: Any) -> list[tuple[int, int]]:
        out = []
        while at[0]:
            before = came(at)
            if at[1]:
                out.append((before[0], at[0]))
            at = before
        return out[::-1]

    def min_saved_bytes(self, peak: float) -> float:
        return self._min_memory_choice(peak)[0]

    def tightest(self, peak: float) -> list[tuple[int, int]]:
        return self._min_memory_choice(peak)[1]

    def cheapest(self, peak: float, limit: int) -> tuple[float, list[tuple[int, int]]] | None:
        """Return (seconds, recomputed segments) of the cheapest choice within the limit.

        The choice saves at most ``limit - peak`` bytes. Return None if there is no such choice."""
        m, size = len(self.cuts), max(1.0, (limit - peak) / _BINS)
        bins = int((limit - peak) / size)
        best = np.full((m, 2, bins + 1), np.inf)
        came = np.zeros((m, 2, bins + 1, 2), np.int32)
        best[0, 0, 0] = 0.0
        for j in range(1, m):
            for i, t, before, _, seconds in self._segment_options(j, peak):
                # Saved segments follow one another, so their sum is rounded, not each of them.
                entered = self._boundary_bytes(i, before, t)
                shift = math.ceil(entered / size) + (
                    0 if t else math.ceil(self.saved[j] / size) - math.ceil(self.saved[i] / size)
                )
                if shift > bins:
                    continue
                new = best[i, before, : bins + 1 - shift] + seconds
                better = new < best[j, t, shift:]
                best[j, t, shift:][better] = new[better]
                came[j, t, shift:][better] = (i * 2 + before, shift)
        t, b = np.unravel_index(int(np.argmin(best[-1])), best[-1].shape)
        if not np.isfinite(best[-1, t, b]):
            return None
        where = [int(b)]

        def back(at: tuple[int, int]) -> tuple[int, int]:
            i, shift = came[at[0], at[1], where[0]]
            where[0] -= int(shift)
            return int(i) // 2, int(i) % 2

        return float(best[-1, t, b]), self._trace_back((m - 1, int(t)), back)
