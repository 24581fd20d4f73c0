"""The cost of changing a tensor's layout on a mesh, for all pairs of layouts at once.

The moves are the runtime's own, priced by the cluster. Eager mode asks the planner for one route at
a time. The search needs all routes, so shortest paths are computed between all layouts together
(Floyd and Warshall 1962). `intra_op` and `inter_op` use `ReshardCosts`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..._tensor.gradients.parameter_gather import ALONE_BYTES
from ...boxing.move_cost import RELAID, move_costs
from ...boxing.moves import Layout, gathers, legal_moves
from ...cluster import Cluster
from ...sharding.balanced_split import nested_balanced_split
from ...sharding.placement import Placement
from ...sharding.sbp import Sbp, broadcast, dual, partial_sum

__all__ = ["FELLOWS", "ReshardCosts", "Routes", "duals"]

Table = np.ndarray[Any, np.dtype[Any]]
# the number of each layout, and the seconds from each to each
Routes = tuple[dict[Layout, int], Table]
_MAX_LAYOUTS = 4096  # the maximum number of layouts of one tensor
#: The number of parameters that share the latency of a gathering and the wait of ranks for one
#: another there. Priced by its bytes alone, a single gathered parameter among others that are not
#: gathered would cost nothing.
FELLOWS = 4


@lru_cache(maxsize=1 << 16)
def duals(layout: Layout) -> Layout:
    """Return the layout of the gradient of a tensor with this layout."""
    return tuple(dual(e) for e in layout)


class ReshardCosts:
    """The prices of layout changes on one mesh of one cluster.

    ``bucket`` is the bytes of gradients that one collective reduces. ``gathered`` is the bytes of
    parameters that are gathered together, and of their gradients that are scattered together. 0
    means that each tensor is communicated alone.
    """

    def __init__(
        self, cluster: Cluster, mesh: Placement, bucket: int = 0, gathered: int = 0
    ) -> None:
        self.cluster, self.mesh, self.bucket, self.gathered = cluster, mesh, bucket, gathered
        self._tables: dict[Any, Routes] = {}
        self._fibers: dict[tuple[int, ...], Sequence[int]] = {}
        self._seconds: dict[Any, float] = {}
        self._moves: dict[Any, float] = {}
        self._sizes: dict[tuple[tuple[int, ...], Layout], int] = {}

    def local(self, shape: Sequence[int], layout: Layout) -> int:
        """Return the number of elements of the largest local tensor."""
        key = tuple(shape), layout
        found = self._sizes.get(key)
        if found is None:
            found = self._sizes[key] = math.prod(self.local_shape(shape, layout))
        return found

    def local_shape(self, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
        """Return the shape of the largest local tensor."""
        sizes = []
        for dim, n in enumerate(shape):
            chain = tuple(
                (self.mesh.shape[a], e.unit)
                for a, e in enumerate(layout)
                if e.kind == "split" and e.dim == dim
            )
            sizes.append(
                max(length for _, length in nested_balanced_split(n, chain)) if chain else n
            )
        return tuple(sizes)

    def collective(self, kind: str, nbytes: int, axes: tuple[int, ...]) -> float:
        """Return the seconds of one collective along axes of the mesh."""
        key = kind, nbytes, axes
        seconds = self._seconds.get(key)
        if seconds is None:
            ranks = self._fibers.get(axes)
            if ranks is None:
                ranks = self._fibers[axes] = self.mesh.fiber(self.mesh.flat[0], axes)
            seconds = self._seconds[key] = self.cluster.seconds(kind, nbytes, ranks)
        return seconds

    def gradients(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        wanted: Sequence[Layout],
        stored: Sequence[Layout],
        routes: Routes | None = None,
    ) -> Table:
        """Return the seconds to bring a parameter's gradient to the parameter's layout.

        Rows are the layouts in which calls use the parameter, columns the layouts in which it is
        stored.

        Along axes that the parameter is broadcast over, its gradient arrives as a partial sum from
        every call. It is all-reduced together with other gradients (`reducer`). Where the parameter
        was gathered, its gradient is reduce-scattered together with others (`parameter_gather`).
        ``routes`` replaces the `table` of these layouts by that of more layouts.
        """
        numbers, seconds = routes or self.table(shape, dtype, [*wanted, *stored])
        summed = [self.summed(x) for x in stored]
        change_seconds = seconds[
            np.ix_(
                [numbers[duals(x)] for x in wanted],
                [numbers[duals(x) if axes else x] for x, axes in zip(stored, summed, strict=True)],
            )
        ]
        self._apply_bucket_prices("reduce_scatter", change_seconds.T, shape, dtype, stored, wanted)
        sizes = [dtype.itemsize * self.local(shape, x) for x in stored]
        sums = [
            self._bucket_share_seconds("all_reduce", nbytes, axes, self.bucket, copied=True)
            for nbytes, axes in zip(sizes, summed, strict=True)
        ]
        return change_seconds + np.array(sums)  # type: ignore[no-any-return]

    def summed(self, stored: Layout) -> tuple[int, ...]:
        """Return the axes over which gradients of a parameter are reduced in buckets."""
        if any(e.is_partial for e in stored):
            return ()
        return tuple(
            a
            for a, (e, n) in enumerate(zip(stored, self.mesh.shape, strict=True))
            if e.is_broadcast and n > 1
        )

    def _bucket_share_seconds(
        self, kind: str, nbytes: int, axes: tuple[int, ...], bucket: int, copied: bool
    ) -> float:
        """Return a tensor's share of the seconds of a bucket.

        ``copied`` says that the data is copied into the bucket, or out of it.
        """
        whole = max(nbytes, bucket)
        if not axes or not whole:
            return 0.0
        copying = self.cluster.relayout_seconds(whole) if copied else None
        return (
            (self.cluster.bucket_factor * self.collective(kind, whole, axes) + (copying or 0.0))
            * nbytes
            / whole
        )

    def fetched(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        stored: Sequence[Layout],
        wanted: Sequence[Layout],
        routes: Routes | None = None,
    ) -> Table:
        """Return the seconds to bring a parameter to the layouts in which calls use it.

        Rows are the layouts in which it is stored, columns those in which calls use it. Parameters
        are gathered together with others. ``routes`` replaces the `table` of these layouts by that
        of more layouts.
        """
        numbers, seconds = routes or self.table(shape, dtype, [*stored, *wanted])
        fetch_seconds = seconds[np.ix_([numbers[x] for x in stored], [numbers[x] for x in wanted])]
        self._apply_bucket_prices("all_gather", fetch_seconds, shape, dtype, stored, wanted)
        return fetch_seconds  # type: ignore[no-any-return]

    def _apply_bucket_prices(
        self,
        kind: str,
        seconds: Table,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        stored: Sequence[Layout],
        wanted: Sequence[Layout],
    ) -> None:
        """Overwrite the seconds of gathering a parameter, or scattering its gradient.

        The new value is the share of a bucket. This applies along the axes where ``stored`` splits
        the parameter and ``wanted`` does not.
        """
        if not self.gathered:
            return
        alone = min(self.gathered, ALONE_BYTES) if self.cluster.device == "cpu" else self.gathered
        for j, y in enumerate(wanted):
            for i, x in enumerate(stored):
                if x is not y and (axes := gathers(x, y)):
                    nbytes = dtype.itemsize * self.local(shape, y)
                    if nbytes >= alone:
                        # stored in the order in which it is sent
                        in_rows = all(x[a].dim == 0 for a in axes)
                        seconds[i, j] = (
                            self._bucket_share_seconds(kind, nbytes, axes, 0, copied=not in_rows)
                            + self.cluster.bucket_factor * self.cluster.rank_skew
                        )
                    else:
                        few = (
                            self.cluster.bucket_factor
                            * (self.collective(kind, 0, axes) + self.cluster.rank_skew)
                            / FELLOWS
                        )
                        seconds[i, j] = (
                            self._bucket_share_seconds(
                                kind, nbytes, axes, self.gathered, copied=True
                            )
                            + few
                        )

    def settled(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        layouts: Sequence[Layout],
        routes: Routes | None = None,
    ) -> Table:
        """Return the seconds to reduce the partial sums of a result that the user reads.

        In training the ranks have just synchronised to reduce gradients, so no rank is late.
        ``routes`` replaces the `table` of these layouts by that of more layouts.
        """
        whole = [tuple(broadcast if e.is_partial else e for e in x) for x in layouts]
        numbers, seconds = routes or self.table(shape, dtype, [*layouts, *whole])
        late = self.cluster.rank_skew if self.bucket else 0.0
        return np.array(
            [
                max(0.0, seconds[numbers[x], numbers[y]] - late)
                for x, y in zip(layouts, whole, strict=True)
            ]
        )

    def table(
        self, shape: tuple[int, ...], dtype: torch.dtype, layouts: Iterable[Layout]
    ) -> Routes:
        """Return (number of each layout, seconds from each to each).

        It has these layouts, those of gradients, and all layouts in between.

        A route passes only through layouts with the entries of these layouts: with more layouts it
        may be shorter. A single change of layout therefore costs as much as in a problem only in
        the table of all layouts that the problem has there.
        """
        axes = len(self.mesh.shape)
        requested = list(dict.fromkeys(layouts))
        splits = list(dict.fromkeys(e for layout in requested for e in layout if e.is_split))
        menus: list[list[Sbp]] = [[broadcast, partial_sum, *splits] for _ in range(axes)]
        others = [
            e for layout in requested for e in layout if e.is_partial and e is not partial_sum
        ]
        if math.prod(map(len, menus)) > _MAX_LAYOUTS:
            menus = [
                list(
                    dict.fromkeys(
                        [
                            broadcast,
                            partial_sum,
                            *(e for layout in requested for e in (layout[a], dual(layout[a]))),
                        ]
                    )
                )
                for a in range(axes)
            ]
        key = shape, dtype, tuple(tuple(m) for m in menus), tuple(others)
        routes = self._tables.get(key)
        if routes is None:
            menus = [list(dict.fromkeys([*m, *others])) for m in menus]
            routes = self._tables[key] = self._all_pairs(shape, dtype, menus)
        return routes

    def _all_pairs(
        self, shape: tuple[int, ...], dtype: torch.dtype, menus: list[list[Sbp]]
    ) -> tuple[dict[Layout, int], Table]:
        states, numbers, moves = _moves(tuple(map(tuple, menus)), self.mesh.shape)
        priced, relaid = (
            move_costs(tuple(shape), dtype, self.mesh, self.cluster),
            self.cluster.relayout_seconds(1) is not None,
        )
        nbytes = [dtype.itemsize * self.local(shape, layout) for layout in states]
        seconds = np.full((len(states), len(states)), np.inf)
        np.fill_diagonal(seconds, 0.0)
        for i, j, kind, axes in moves:
            if relaid and kind in RELAID:
                move_seconds = priced.move(kind, axes, states[i], states[j])[2]
            else:
                key = kind, axes, nbytes[i], nbytes[j]
                if (known := self._moves.get(key)) is None:
                    known = self._moves[key] = priced.price(*key)[1]
                move_seconds = known
            if move_seconds < seconds[i, j]:
                seconds[i, j] = move_seconds
        for k in range(len(states)):
            np.minimum(seconds, seconds[:, k, None] + seconds[None, k, :], out=seconds)
        return numbers, seconds


@lru_cache(maxsize=1 << 10)
def _moves(
    menus: tuple[tuple[Sbp, ...], ...], sizes: tuple[int, ...]
) -> tuple[list[Layout], dict[Layout, int], list[tuple[int, int, str, tuple[int, ...]]]]:
    """Return the layouts of these entries, the number of each, and the moves between them.

    A move is (from, to, kind, axes). The result holds for any tensor on a mesh of these sizes.
    """
    states = list(itertools.product(*menus))
    numbers = {layout: i for i, layout in enumerate(states)}
    moves = []
    for i, layout in enumerate(states):
        moves += [
            (i, j, kind, axes)
            for kind, axes, after in legal_moves(layout, sizes, menus)
            if (j := numbers.get(after)) is not None
        ]
    return states, numbers, moves
