"""placement: the ranks that hold a tensor, as an N-D array of ranks. Nothing here communicates.

Placements are pure values. Users write them, and every other package reads them.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import PlacementError

__all__ = ["DEVICE_TYPES", "Placement", "placement", "register_job_size"]

DEVICE_TYPES = ("cpu", "cuda", "xpu", "hpu", "npu", "mlu", "mps", "meta")
_ALIASES = {"gpu": "cuda"}


_job: list[Callable[[], tuple[int, int]]] = []


def register_job_size(size: Callable[[], tuple[int, int]]) -> None:
    """Register the function that knows this job's numbers of ranks and nodes (distributed/env.py).

    ``size()`` -> (ranks, nodes).
    """
    _job[:] = [size]


def _job_size() -> tuple[int, int]:
    return _job[0]()


class Placement:
    """The devices that hold a tensor: a device type and an N-D array of ranks in the given order.

    ``placement("cuda", [0, 1])`` has one axis; ``placement("cuda", [[0, 1], [2, 3]])`` two.
    Interned and immutable. Raises PlacementError for an unknown device type, a duplicate or
    negative rank, or ranks that are not integers in a full array. A rank that this job does not
    have is refused where a tensor or a model first uses the placement, because plans for a larger
    cluster name such ranks.

    >>> placement("cpu", [[0, 1], [2, 3]]).shape
    (2, 2)
    """

    __slots__ = ("_coordinates", "_fibers", "_ranks_array", "flat", "shape", "type")
    type: str
    flat: tuple[int, ...]
    shape: tuple[int, ...]
    _coordinates: dict[int, tuple[int, ...]]
    _fibers: dict[tuple[int, ...], tuple[int, ...]]
    _ranks_array: np.ndarray[Any, np.dtype[np.int64]]
    _interned: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Placement] = {}

    def __new__(
        cls,
        type: str = "",
        ranks: int | Sequence[Any] | np.ndarray[Any, Any] | Mapping[int, Any] = (),
        hierarchy: Sequence[int] | None = None,
        *,
        device_type: str | None = None,
        device_ids: Mapping[int, Any] | None = None,
    ) -> Placement:
        # The last three are OneFlow's older spelling: {node: devices of that node}, and the shape
        # of their ranks.
        type, ranks = device_type or type, ranks if device_ids is None else device_ids
        if isinstance(ranks, Mapping):
            ranks = _of_nodes(ranks, hierarchy)
        elif hierarchy is not None:
            raise PlacementError(
                f"hierarchy={hierarchy!r} belongs to ranks given by node, {{0: [0, 1]}}; a list "
                f"of ranks has its own shape: [[0, 1], [2, 3]]"
            )
        kind = _ALIASES.get(type, type)
        if kind not in DEVICE_TYPES:
            raise PlacementError(
                f"unknown device type {type!r} in placement; known: {', '.join(DEVICE_TYPES)} "
                f"(and 'gpu' for 'cuda')"
            )
        try:
            array = np.atleast_1d(np.array(ranks))
        except ValueError as error:
            raise PlacementError(
                f"ranks of a placement must form a full array (rows of equal length), got {ranks!r}"
            ) from error
        if not array.size:
            raise PlacementError("a placement needs at least one rank: placement(type, ranks)")
        if not np.issubdtype(array.dtype, np.integer):
            raise PlacementError(f"ranks of a placement must be integers, got {ranks!r}")
        flat = tuple(int(r) for r in array.ravel())
        if min(flat) < 0:
            raise PlacementError(f"a rank of a placement is negative: {ranks!r}")
        if len(set(flat)) != len(flat):
            duplicates = sorted({r for r in flat if flat.count(r) > 1})
            raise PlacementError(
                f"duplicate rank {', '.join(map(str, duplicates))} in placement ranks {ranks!r}: "
                f"each rank may appear once"
            )
        return cls._intern(kind, flat, array.shape)

    @classmethod
    def _intern(cls, kind: str, flat: tuple[int, ...], shape: tuple[int, ...]) -> Placement:
        key = (kind, flat, tuple(shape))
        instance = cls._interned.get(key)
        if instance is None:
            instance = object.__new__(cls)
            array = np.array(flat, dtype=np.int64).reshape(shape)
            array.setflags(write=False)
            set_ = object.__setattr__
            set_(instance, "type", kind)
            set_(instance, "flat", flat)
            set_(instance, "shape", tuple(int(n) for n in shape))
            set_(instance, "_ranks_array", array)
            set_(
                instance,
                "_coordinates",
                {int(r): tuple(int(c) for c in index) for index, r in np.ndenumerate(array)},
            )
            set_(instance, "_fibers", {})
            instance = cls._interned.setdefault(key, instance)
        return instance

    @staticmethod
    def all(type: str, shape: Sequence[int] | None = None) -> Placement:
        """Return the placement of all ranks of this job, on one axis or on a grid of ``shape``.

        Args:
            type: the kind of device, "cpu" or "cuda".
            shape: the number of ranks along each axis. One of them may be -1: the ranks that the
                others leave. The ranks are numbered row by row, as by ``numpy.arange``.

        Raises:
            PlacementError: the ranks of the job do not form a grid of ``shape``.

        >>> placement.all("cpu", (1, -1)).shape[0]
        1
        """
        ranks = np.arange(_job_size()[0])
        if shape is not None:
            try:
                lengths = [operator.index(n) for n in shape]
                if not lengths or min(lengths) < -1:
                    raise ValueError(lengths)
                ranks = ranks.reshape(lengths)
            except (TypeError, ValueError) as error:
                raise PlacementError(
                    f"placement.all({type!r}, {shape!r}): the job has {ranks.size} ranks, which "
                    f"do not form a grid of this shape. Start as many as it needs (the launcher's "
                    f"--nproc_per_node), or give a shape such as (2, -1), where -1 is the rest"
                ) from error
        return Placement(type, ranks)

    @property
    def device_type(self) -> str:
        """OneFlow's older name of ``type``."""
        warnings.warn(
            "placement.device_type is placement.type now", DeprecationWarning, stacklevel=2
        )
        return self.type

    @property
    def hierarchy(self) -> tuple[int, ...]:
        """OneFlow's older name of the shape of ``ranks``."""
        warnings.warn(
            "placement.hierarchy is placement.ranks.shape now", DeprecationWarning, stacklevel=2
        )
        return self.shape

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("placements are immutable")

    @property
    def ranks(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The ranks as a read-only integer array of the placement's shape."""
        return self._ranks_array

    @property
    def axes(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of ``rank``, an index for each axis; None outside the placement."""
        return self._coordinates.get(rank)

    def fiber(self, rank: int, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks along ``axes`` from ``rank``, itself included.

        The first axis is the slowest.
        """
        key = rank, *axes
        ranks = self._fibers.get(key)
        if ranks is None:
            where = self._coordinates[rank]
            index = tuple(slice(None) if a in axes else where[a] for a in range(len(self.shape)))
            block = self._ranks_array[index]
            order = sorted(axes)
            ranks = self._fibers[key] = tuple(
                int(r) for r in np.transpose(block, [order.index(a) for a in axes]).ravel()
            )
        return ranks

    def with_type(self, type: str) -> Placement:
        """Return the placement of the same ranks on another device type."""
        return Placement(type, self._ranks_array)

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.type, self._ranks_array.tolist())

    def __copy__(self) -> Placement:
        return self

    def __deepcopy__(self, memo: object) -> Placement:
        return self

    def __repr__(self) -> str:
        return f'globaltensor.placement(type="{self.type}", ranks={self._ranks_array.tolist()})'

    def _repr_html_(self) -> str:
        """Return the drawing that notebooks show."""
        from .sharding_svg import layout_html

        return layout_html(self)


def _of_nodes(devices: Mapping[int, Any], hierarchy: Sequence[int] | None) -> np.ndarray[Any, Any]:
    """Return the ranks of ``{node: device, or devices}``.

    The ranks of a node are numbered one after the other, and each node has the same number of
    ranks.
    """
    said = (
        "placement(type, {node: devices}, hierarchy) is deprecated: name the ranks, "
        "placement(type, [[0, 1], [2, 3]])"
    )
    warnings.warn(said, DeprecationWarning, stacklevel=3)
    each = {
        int(node): np.atleast_1d(np.array(list(d) if isinstance(d, range) else d))
        for node, d in devices.items()
    }
    if (
        any(
            d.ndim != 1 or not np.issubdtype(d.dtype, np.integer) or d.min(initial=0) < 0
            for d in each.values()
        )
        or min(each, default=-1) < 0
    ):
        raise PlacementError(
            f"devices by node must be {{node: a device, or a list or range of devices}}, numbered "
            f"from 0; got {devices!r}"
        )
    ranks_of_job, nodes = _job_size()
    on_each = ranks_of_job // nodes if max(each) else 0
    ranks = np.concatenate([node * on_each + d for node, d in sorted(each.items())])
    if hierarchy and math.prod(hierarchy) != ranks.size:
        raise PlacementError(
            f"hierarchy {tuple(hierarchy)} has {math.prod(hierarchy)} places for {ranks.size} "
            f"devices: {devices!r}"
        )
    return ranks.reshape(tuple(hierarchy)) if hierarchy else ranks


placement = Placement
