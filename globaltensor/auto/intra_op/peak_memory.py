"""The memory of a plan: which tensors are live when, and what the peak is made of.

`formulate` asks for the memory usage of each strategy, over time. The peak of a choice is the
largest sum at any time: `Problem.peak`. `read_solution` splits it into its components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...boxing.moves import Layout
from ..cost.reshard_cost import ReshardCosts
from ..cost.strategies import StrategyTable
from ..ir.op_graph import Calls, Value
from ..plan.plan import PlacedTensor
from .layout_pairs import Array, ListCache, Pair, wanted_layouts
from .search_options import Options, is_gathered_twice

if TYPE_CHECKING:
    from .formulate import Formulation

__all__ = ["MemoryUsage", "Use", "memory_breakdown"]

# (start, end) or None for always, and bytes by strategy.
Use = tuple[tuple[int, int] | None, Array]


class MemoryUsage:
    """The memory usage of the tensors of a program over time, by strategy.

    A time is the number of a call. Backward has the times after the last call, in reverse.
    """

    def __init__(
        self,
        calls: Calls,
        options: Options,
        prices: ReshardCosts,
        candidates: Mapping[int, StrategyTable],
        lists: ListCache,
    ) -> None:
        self.calls, self.options, self.prices = calls, options, prices
        self.candidates, self.lists = candidates, lists
        self.end = len(calls.calls)

    def saved_interval(self, number: int) -> tuple[int, int]:
        """Return the interval from a call to its backward."""
        return number, 2 * self.end - number

    def last_use(self, value: Value) -> int:
        return max(value.takers, default=value.maker)

    def has_single_user(self, value: Value) -> bool:
        """Return True if exactly one call uses the value.

        Backward then uses the tensor in the layout in which that call used it.
        """
        return not value.state and len(set(value.takers)) == 1 and value.maker in self.candidates

    def shares_memory(self, value: Value) -> bool:
        """Return True if the value shares the memory of the operand it was made from."""
        return self.calls.calls[value.maker].inplace or self.candidates[value.maker].free

    def of_value(self, value: Value, layouts: Sequence[Layout]) -> list[Use]:
        """Return the memory usage of a computed value.

        The value is live until its last use, or until backward where it is saved. Its gradient is
        live in backward.
        """
        size = self.local_bytes(value, layouts)
        start, end = value.maker, self.last_use(value) + 1
        if not self.calls.training:
            return [((start, end), size)]
        if value.saved and not self.has_single_user(value):
            return [(self.saved_interval(start), size)]
        found: list[Use] = [((start, end), size)]
        if value.grad:
            found.append(((2 * self.end - end, 2 * self.end - start), size))
        return found

    def local_bytes(self, value: Value, layouts: Sequence[Layout | None]) -> Array:
        """Return the bytes of the largest local tensor in each of these layouts; None counts 0."""
        return self.lists.cached(
            ("bytes", value.shape, value.dtype.itemsize),
            (layouts,),
            lambda: self._compute_local_bytes(value, layouts),
        )

    def _compute_local_bytes(self, value: Value, layouts: Sequence[Layout | None]) -> Array:
        return np.array(
            [
                0 if x is None else value.dtype.itemsize * self.prices.local(value.shape, x)
                for x in layouts
            ],
            dtype=float,
        )

    def needs_more_memory(
        self, value: Value, src: Sequence[Layout], dst: Sequence[Layout]
    ) -> Array:
        """Return where ``dst`` needs more memory than a rank has in ``src``.

        The result in ``dst`` is then a copy whose memory is counted.
        """
        whole = np.array([not any(e.is_partial for e in y) for y in dst], dtype=bool)
        return np.asarray(
            (
                self._compute_local_bytes(value, dst)[None, :]
                > self._compute_local_bytes(value, src)[:, None]
            )
            & whole[None, :]
        )

    def of_copies(
        self, value: Value, pairs: Sequence[Pair], apart: Sequence[bool], takers: Sequence[int]
    ) -> tuple[list[Use], Array]:
        """Return the memory usage of a parameter's copies, and the bytes that autograd saves.

        A copy is live from the first use to its backward, or only around each use. Where calls have
        their own copies, the usage is the sum of the largest copy of each call.
        """
        wanted = [wanted_layouts(self.calls, self.candidates, value, t) for t in takers]
        key = "copies", value.shape, value.dtype.itemsize, value.saved, self.options.freed
        size, noted = self.lists.cached(
            key, (pairs, *wanted), lambda: self._copy_bytes(value, pairs, apart, wanted)
        )
        if not size.any():
            return [], size
        first, last = min(takers), max(takers)
        if not self.calls.training:
            return [((first, last + 1), size)], np.zeros(len(pairs))

        def make() -> tuple[Array, Array, Array]:
            saved_bytes = np.where(noted | (not value.saved), 0.0, size)
            # In backward a freed copy is gathered again. Its gradient is live until it has been
            # reduce-scattered.
            return (
                saved_bytes,
                size - saved_bytes,
                (size - saved_bytes) * value.saved + size * value.grad,
            )

        saved_bytes, passing, again = self.lists.cached(
            ("amounts", value.saved, value.grad), (size, noted), make
        )
        spans = (
            self.saved_interval(first),
            (first, last + 1),
            (2 * self.end - last - 1, 2 * self.end - first),
        )
        return [
            (span, amounts)
            for span, amounts in zip(spans, (saved_bytes, passing, again), strict=True)
            if amounts.any()
        ], saved_bytes

    def _copy_bytes(
        self,
        value: Value,
        pairs: Sequence[Pair],
        apart: Sequence[bool],
        wanted: Sequence[Sequence[Layout]],
    ) -> tuple[Array, Array]:
        """Return by strategy (bytes of copies, True where autograd saves no copy)."""
        ends, most, grown = (
            self.lists.ends(pairs),
            np.zeros(len(pairs)),
            np.zeros(len(pairs), dtype=bool),
        )
        if any(apart):
            for those in wanted:
                different = list(dict.fromkeys(those))
                most = most + (
                    self.needs_more_memory(value, ends.first, different)
                    * self._compute_local_bytes(value, different)[None, :]
                ).max(1)
        if ends.copies:
            grown = (ends.of_copies >= 0) & self.needs_more_memory(value, ends.made, ends.copies)[
                ends.of_made, ends.of_copies
            ]
        noted = np.array(
            [
                y is not None and is_gathered_twice(self.calls, self.options, value, x, y)
                for x, y in pairs
            ]
        )
        return np.where(apart, most, grown * self.local_bytes(value, ends.second)), noted


def memory_breakdown(
    f: Formulation, choice: Sequence[int], placed: Sequence[PlacedTensor], peak: int
) -> dict[str, int]:
    """Return the components of the memory peak, in bytes a rank.

    Parameters that are gathered for a short time count as activations.
    """
    trained = {v.label for v in f.calls.parameters if f.calls.training and v.grad}
    parameters = sum(g.bytes for g in placed if g.kind == "parameter")
    gradients = sum(g.bytes for g in placed if g.name in trained)
    optimizer = int(gradients * f.options.optimizer_state_ratio)
    other_bytes = sum(g.bytes for g in placed if g.kind != "parameter")
    copies = int(sum(kept[choice[node]] for node, kept in f.copies.items()))
    terms = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "inputs and buffers": other_bytes,
        "gathered parameters": copies,
    }
    return {**terms, "activations": max(0, peak - sum(terms.values()))}
