"""The calls of a step for other batch sizes, interpolated from captures of two sizes.

Shapes grow linearly with the batch, so two captures determine any third. `inter_op` uses `Batches`
and `BatchMenu` to price micro-batches.

Signatures are probed once for each call and axis, for both sizes, and hold for all meshes and
batches. For axes longer than `_MAX_PROBED_RANKS`, the signatures of an axis of that length are
used, where each rank still has data.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from ...boxing.moves import Layout
from ...errors import PlanError
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, broadcast, partial_sum, split
from ...sharding.spec import Spec
from ..ir.op_graph import Call, Calls, Value, ValueRef
from .reshard_cost import ReshardCosts
from .rule_failures import RuleFailures
from .signatures import CostedSignature, probe_decomposition, signatures
from .strategies import StrategyBuilder, StrategyTable

__all__ = ["BatchMenu", "Batches", "takes_statistics"]

_MAX_PROBED_RANKS = 8
_ENTRIES: Final = {"broadcast": broadcast, "partial": partial_sum}


class _CannotInterpolate(Exception):
    """An error: interpolation between two captures is not possible.

    The captures differ in more than numbers, or a number is not whole at this batch.
    """


class Batches:
    """The calls of a step by number of rows in the batch.

    ``capture(batch)`` returns the calls of a step on that many rows. ``batch`` and its half are
    captured. Other sizes are interpolated from these two. A size is captured itself only where the
    two captures differ in more than numbers.
    """

    def __init__(self, capture: Callable[[int], Calls], batch: int) -> None:
        self.capture, self.batch = capture, batch
        self.whole = capture(batch)
        self.half: Calls | None = None
        if batch % 2 == 0 and batch >= 4:
            try:
                self.half = self._capture_at(batch // 2)
            except PlanError:
                pass  # `at` raises the error if that size is needed
        self._at: dict[int, Calls] = {batch: self.whole}
        # Key of a call -> its lost strategies, on the mesh where most were lost.
        self._lost: dict[Hashable, Counter[tuple[str, str]]] = {}
        self._signatures: dict[
            tuple[Hashable, int, int], tuple[list[CostedSignature], RuleFailures]
        ] = {}
        self._compositions: dict[Any, tuple[list[tuple[Any, ...]] | None, RuleFailures]] = {}

    def at(self, rows: int) -> Calls:
        """Return the calls of a step on ``rows`` rows.

        Raises PlanError where the model makes other calls than with the full batch, or does not
        run.
        """
        calls = self._at.get(rows)
        if calls is None:
            try:
                calls = self._interpolate_calls(rows)
            except _CannotInterpolate:
                calls = self._capture_at(rows)
            self._at[rows] = calls
        return calls

    def _capture_at(self, rows: int) -> Calls:
        try:
            calls = self.capture(rows)
        except Exception as error:
            raise PlanError(
                f"with a batch of {rows} instead of {self.batch} the model does not run: {error}"
            ) from error
        if not _makes_same_calls(self.whole, calls):
            raise PlanError(
                f"with a batch of {rows} the model makes other calls than with one of {self.batch}"
            )
        return calls

    def _interpolate_calls(self, rows: int) -> Calls:
        half = self.half
        if half is None:
            raise _CannotInterpolate
        # in units of the batch: 0 is the full batch, `batch` is half of it
        part = 2 * (self.batch - rows)

        def interpolate(a: int, b: int) -> int:
            if a == b:
                return a
            value, rest = divmod(a * self.batch - (a - b) * part, self.batch)
            if rest or value < 0 or (a > 0 and value == 0):
                raise _CannotInterpolate
            return value

        values = [
            dataclasses.replace(
                v, shape=tuple(map(interpolate, v.shape, w.shape)), takers=list(v.takers)
            )
            for v, w in zip(self.whole.values, half.values, strict=True)
        ]
        calls = []
        for c, d in zip(self.whole.calls, half.calls, strict=True):
            extra = max(0, round(c.extra + (d.extra - c.extra) * part / self.batch))
            args, kwargs = (
                _interpolate_args(c.args, d.args, interpolate),
                _interpolate_args(c.kwargs, d.kwargs, interpolate),
            )
            calls.append(
                dataclasses.replace(
                    c,
                    args=args,
                    kwargs=kwargs,
                    extra=extra,
                    key=None if c.key is None else (c.key, rows),
                )
            )
        return dataclasses.replace(self.whole, calls=calls, values=values)

    def signatures(
        self, call: Call, rows: int, ranks: int, losses: RuleFailures
    ) -> list[CostedSignature]:
        """Return the signatures of a call at a batch of ``rows`` on an axis of ``ranks``.

        ``losses`` counts errors as in `signatures.signatures`.
        """
        probed = min(ranks, _MAX_PROBED_RANKS)
        if rows != self.batch and self.half is None:
            return signatures(call, self.at(rows).values, probed, losses)
        big, small = self._probe(self.whole, call.number, probed, 0, losses), None
        if rows != self.batch and self.half is not None:
            small = {
                (s.ins, s.outs): s for s in self._probe(self.half, call.number, probed, 1, losses)
            }
        if small is None:
            return big
        part = 2 * (self.batch - rows) / self.batch
        interpolated = []
        for s in big:
            other = small.get((s.ins, s.outs), s)
            if len(other.moved) == len(s.moved):
                moved = tuple(
                    (kind, max(0, round(n + (k - n) * part)))
                    for (kind, n), (_, k) in zip(s.moved, other.moved, strict=True)
                )
                s = s._replace(moved=moved)
            interpolated.append(s)
        return interpolated

    def composition(
        self, call: Call, entries: tuple[tuple[Any, ...], ...], losses: RuleFailures
    ) -> list[tuple[Any, ...]] | None:
        """Return the layouts of a composition's results on a mesh of several axes of two ranks.

        ``entries`` has the operands' layout along each axis. The result is None where the
        composition rejects them.
        """
        made = self.whole.calls[call.number]
        key = self._key(made), entries
        if key not in self._compositions:
            lost = RuleFailures()
            placement = Placement("cpu", np.arange(2 ** len(entries)).reshape((2,) * len(entries)))
            operands = [self.whole.values[v] for v in made.operands]
            columns = [
                [_ENTRIES.get(axis[i]) or split(axis[i]) for axis in entries]
                for i in range(len(operands))
            ]
            seen = probe_decomposition(
                made,
                [
                    Spec.make(v.shape, v.dtype, placement, column)
                    for v, column in zip(operands, columns, strict=True)
                ],
                lost,
            )
            self._compositions[key] = (
                None if seen is None else [_dims(layout) for layout in seen[0]],
                lost,
            )
        found, lost = self._compositions[key]
        losses.update(lost)
        return found

    def note(self, call: Call, losses: RuleFailures) -> None:
        """Record the lost strategies of a call, for all calls with the same key."""
        key = self._key(self.whole.calls[call.number])
        self._lost[key] = self._lost.get(key, Counter()) | losses

    def losses(self) -> list[Counter[tuple[str, str]]]:
        """Return the lost strategies of each call."""
        return [self._lost[key] for key in map(self._key, self.whole.calls) if key in self._lost]

    @staticmethod
    def _key(call: Call) -> Hashable:
        return call.number if call.key is None else call.key

    def _probe(
        self, calls: Calls, number: int, ranks: int, which: int, losses: RuleFailures
    ) -> list[CostedSignature]:
        call = calls.calls[number]
        key = self._key(call), ranks, which
        probed = self._signatures.get(key)
        if probed is None:
            lost = RuleFailures()
            probed = self._signatures[key] = signatures(call, calls.values, ranks, lost), lost
        losses.update(probed[1])
        return probed[0]


class BatchMenu(StrategyBuilder):
    """A builder of candidates for the calls of one batch on one mesh.

    Its signatures are shared by all meshes and batches. Compositions along several axes at once are
    probed on axes of two ranks.
    """

    def __init__(self, prices: ReshardCosts, batches: Batches, rows: int) -> None:
        super().__init__(prices, batches.whole.training)
        self.batches, self.rows = batches, rows

    def _axis_signatures(
        self, call: Call, values: Sequence[Value], size: int, losses: RuleFailures
    ) -> list[CostedSignature]:
        return [
            s._replace(composed=False)
            for s in self.batches.signatures(call, self.rows, size, losses)
        ]

    def _build_table(self, call: Call, values: Sequence[Value]) -> StrategyTable:
        found = self._drop_unrunnable(call, super()._build_table(call, values))
        self.batches.note(call, found.losses)
        return found

    def _drop_unrunnable(self, call: Call, candidates: StrategyTable) -> StrategyTable:
        """Return the table without compositions that do not run along several axes at once."""
        mesh = self.prices.mesh
        compositions = {
            a: {
                _dims((*s.ins, *s.outs))
                for s in self.batches.signatures(call, self.rows, n, RuleFailures())
                if s.composed
            }
            for a, n in enumerate(mesh.shape)
            if n > 1
        }
        if sum(map(bool, compositions.values())) < 2:
            return candidates
        good = [
            k
            for k in range(len(candidates))
            if self._composition_runs(
                call,
                [x[k] for x in candidates.ins],
                [x[k] for x in candidates.outs],
                compositions,
                candidates.losses,
            )
        ]
        ins, outs = (
            [[x[k] for k in good] for x in those] for those in (candidates.ins, candidates.outs)
        )
        return StrategyTable(
            ins,
            outs,
            *(
                column[good]
                for column in (
                    candidates.forward,
                    candidates.backward,
                    candidates.moving,
                    candidates.share,
                )
            ),
            candidates.losses,
            candidates.left_out,
        )

    def _composition_runs(
        self,
        call: Call,
        ins: list[Layout],
        outs: list[Layout],
        compositions: dict[int, set[Any]],
        losses: RuleFailures,
    ) -> bool:
        both = [
            a for a, those in compositions.items() if _dims([x[a] for x in (*ins, *outs)]) in those
        ]
        if len(both) < 2:
            return True
        seen = self.batches.composition(
            call, tuple(_dims([x[a] for x in ins]) for a in both), losses
        )
        return seen is not None and seen == [_dims([x[a] for a in both]) for x in outs]


def takes_statistics(calls: Calls) -> str:
    """Return the name of the first call that normalizes by batch statistics, or "".

    Batch norm does so in training. It gives different numbers in micro-batches.
    """
    return next(
        (
            c.module or c.name
            for c in calls.calls
            if c.func in _BATCH_NORMS
            and (c.args[5] if len(c.args) > 5 else c.kwargs.get("training"))
        ),
        "",
    )


_BATCH_NORMS = (torch.nn.functional.batch_norm, torch.batch_norm)


def _dims(entries: Iterable[Sbp]) -> tuple[Any, ...]:
    return tuple(e.dim if e.is_split else e.kind for e in entries)


def _makes_same_calls(one: Calls, other: Calls) -> bool:
    same_calls = [(c.func, c.operands, c.outs, c.wild, c.inplace) for c in one.calls] == [
        (c.func, c.operands, c.outs, c.wild, c.inplace) for c in other.calls
    ]
    same_values = [(len(v.shape), v.dtype, v.state, v.path) for v in one.values] == [
        (len(v.shape), v.dtype, v.state, v.path) for v in other.values
    ]
    return same_calls and same_values


def _interpolate_args(a: Any, b: Any, interpolate: Callable[[int, int], int]) -> Any:
    """Return the arguments with each integer interpolated between those of two captures."""
    if isinstance(a, ValueRef) or a is b:
        return a
    if type(a) is not type(b):
        raise _CannotInterpolate
    if isinstance(a, bool) or not isinstance(a, (int, tuple, list, dict, slice)):
        return a
    if isinstance(a, int):
        return interpolate(a, b)
    if isinstance(a, slice):
        return slice(
            *(
                _interpolate_args(x, y, interpolate)
                for x, y in zip((a.start, a.stop, a.step), (b.start, b.stop, b.step), strict=True)
            )
        )
    if len(a) != len(b):
        raise _CannotInterpolate
    if isinstance(a, dict):
        return {k: _interpolate_args(v, b[k], interpolate) for k, v in a.items()}
    parts = [_interpolate_args(x, y, interpolate) for x, y in zip(a, b, strict=True)]
    return type(a)(parts)
