"""Lists of layouts and of pairs of layouts, and the tables that are computed from them.

A pair is the layout that a tensor is made in, and one that it is also stored in. `formulate` and
`peak_memory` use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...boxing.moves import Layout
from ..cost.strategies import StrategyTable
from ..ir.op_graph import Calls, Value

__all__ = ["Array", "Ends", "ListCache", "Pair", "maker_layouts", "wanted_layouts"]

Array = np.ndarray[Any, np.dtype[Any]]
_T = TypeVar("_T")
# the layout a value is made or given in, and the one it is also stored in
Pair = tuple[Layout, Layout | None]


class Ends(NamedTuple):
    """The layouts of a list of pairs.

    `first` and `second` are the two layouts of each pair. `made` and `copies` are the distinct ones
    of either. `of_made` and `of_copies` are the pairs' indices into these (-1: none).
    """

    first: list[Layout]
    second: list[Layout | None]
    made: list[Layout]
    copies: list[Layout]
    of_made: Array
    of_copies: Array


class ListCache:
    """A cache of what is computed from lists of layouts, by the identity of the lists."""

    def __init__(self) -> None:
        self.tables: dict[Any, tuple[tuple[Any, ...], Any]] = {}

    def cached(self, key: Any, lists: tuple[Any, ...], make: Callable[[], _T]) -> _T:
        """Return the result of `make`, cached by `key` and the identity of these lists.

        Equal calls share their lists, so the lists are not compared element by element. The cache
        keeps the lists alive, because their ids must not be reused by other objects.
        """
        key = key, *map(id, lists)
        found = self.tables.get(key)
        if found is None:
            found = self.tables[key] = lists, make()
        made: _T = found[1]
        return made

    def ends(self, pairs: Sequence[Pair]) -> Ends:
        """Return the distinct layouts of a list of pairs, and the pairs' indices into them."""

        def make() -> Ends:
            first, second = [x for x, _ in pairs], [y for _, y in pairs]
            made, copies = (
                {x: i for i, x in enumerate(dict.fromkeys(those))}
                for those in (first, (y for y in second if y is not None))
            )
            of_copies = np.array([-1 if y is None else copies[y] for y in second], dtype=np.int64)
            return Ends(
                first,
                second,
                list(made),
                list(copies),
                np.array([made[x] for x in first], dtype=np.int64),
                of_copies,
            )

        return self.cached("ends", (pairs,), make)


def maker_layouts(
    calls: Calls, candidates: Mapping[int, StrategyTable], value: Value
) -> list[Layout]:
    """Return the layouts that a computed value is made in, by strategy of its maker."""
    call = calls.calls[value.maker]
    return candidates[value.maker].outs[call.outs.index(value.number)]


def wanted_layouts(
    calls: Calls, candidates: Mapping[int, StrategyTable], value: Value, taker: int
) -> list[Layout]:
    """Return the layouts in which a call uses a value, by strategy of the call."""
    call = calls.calls[taker]
    return candidates[taker].ins[call.operands.index(value.number)]
