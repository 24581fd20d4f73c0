"""Spec: the global shape, dtype, placement and sbp of a tensor, and the box that each rank holds.

Specs are pure and interned. Every package that plans or moves tensors uses them.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence

import torch

from ..errors import SbpError
from .balanced_split import balanced_split, nested_balanced_split
from .placement import Placement
from .sbp import Sbp, as_layout, broadcast, dual

__all__ = ["Spec", "StorageSpec", "fitting", "layout_for"]

# setdefault of a weak dictionary is not atomic: of two threads (autograd's, or simulated ranks)
# both could insert an object.
_interning = threading.Lock()


def layout_for(placement: Placement, layout: Sequence[Sbp]) -> list[Sbp]:
    """Return the layout on another placement of a tensor with this layout.

    It is the same where that placement has as many axes, and broadcast on all axes otherwise.
    """
    return list(layout) if len(layout) == placement.axes else [broadcast] * placement.axes


def fitting(layout: Sequence[Sbp], dims: int) -> list[Sbp]:
    """Return the layout with broadcast in place of entries that do not fit ``dims`` dims.

    These are splits of dims that it does not have, and partials other than sums, which admit no
    other values.
    """
    return [
        broadcast if (e.is_split and e.dim >= dims) or e.reduce not in ("", "sum") else e
        for e in layout
    ]


class Spec:
    """The description of a global tensor that every rank knows: shape, dtype, placement and layout.

    The layout is its sbp, units included. Specs are interned: ``Spec.make`` returns the same object
    for equal arguments, so specs are compared by identity. ``layout`` is canonical: negative dims
    are resolved, and a unit that changes nothing is 1.
    """

    __slots__ = ("__weakref__", "_boxes", "_text", "dtype", "layout", "placement", "sbp", "shape")
    shape: torch.Size
    dtype: torch.dtype
    placement: Placement
    layout: tuple[Sbp, ...]
    sbp: tuple[Sbp, ...]
    _boxes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    _text: bytes
    # Weak: a spec lives as long as a tensor or a plan needs it. So the table is bounded and
    # identity is equality.
    _interned: weakref.WeakValueDictionary[tuple[object, ...], Spec] = weakref.WeakValueDictionary()

    @classmethod
    def make(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        placement: Placement,
        sbp: Sbp | Sequence[Sbp],
    ) -> Spec:
        """Return the spec with these fields.

        Raises SbpError where the sbp does not fit the placement's axes or the shape's dims.
        """
        layout = (
            (sbp,)
            if isinstance(sbp, Sbp)
            else tuple(sbp)
            if isinstance(sbp, (list, tuple))
            else as_layout(sbp, placement.axes)
        )
        key = (tuple(shape), dtype, placement, layout)
        spec = cls._interned.get(key)
        if spec is not None:
            return spec
        layout = _canonical_layout(key[0], placement, as_layout(sbp, placement.axes))
        canonical = (key[0], dtype, placement, layout)
        spec = cls._interned.get(canonical)
        if spec is None:
            spec = object.__new__(cls)
            set_ = object.__setattr__
            set_(spec, "shape", torch.Size(shape))
            set_(spec, "dtype", dtype)
            set_(spec, "placement", placement)
            set_(spec, "layout", layout)
            set_(spec, "sbp", tuple(e if e.unit == 1 else e.with_unit(1) for e in layout))
            set_(spec, "_boxes", {})
            set_(spec, "_text", b"")
            with _interning:
                spec = cls._interned.setdefault(canonical, spec)
        cls._interned[key] = spec
        return spec

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("specs are immutable")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_spec, (tuple(self.shape), self.dtype, self.placement, self.layout)

    @property
    def shown(self) -> Spec:
        """The spec that users see: the spec itself, except for a tensor stored otherwise.

        See `StorageSpec`.
        """
        return self

    @property
    def plain(self) -> Spec:
        """The ordinary spec of the same layout, whose ``shown`` is itself."""
        return self

    @property
    def text(self) -> bytes:
        """The spec and its placement as bytes, the same on every rank."""
        if not self._text:
            object.__setattr__(self, "_text", f"{self!r} on {self.placement!r}".encode())
        return self._text

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the global tensor."""
        return self.numel * self.dtype.itemsize

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Return the placement axes that split ``dim``, outermost first."""
        return tuple(a for a, e in enumerate(self.layout) if e.kind == "split" and e.dim == dim)

    def chain(self, dim: int) -> tuple[tuple[int, int], ...]:
        """Return (parts, unit) of each axis that splits ``dim``, outermost first."""
        return tuple((self.placement.shape[a], self.layout[a].unit) for a in self.axes_of(dim))

    def box(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offsets, lengths) of the box of ``rank``. Raises KeyError outside the placement.

        >>> Spec.make((5, 4), torch.float32, Placement("cpu", [0, 1]), Sbp("split", 0)).box(1)
        ((3, 0), (2, 4))
        """
        box = self._boxes.get(rank)
        if box is None:
            where = self.placement._coordinates[rank]
            offsets, lengths = [0] * len(self.shape), list(self.shape)
            for axis, entry in enumerate(self.layout):
                if entry.kind == "split":
                    offset, length = balanced_split(
                        lengths[entry.dim], self.placement.shape[axis], entry.unit
                    )[where[axis]]
                    offsets[entry.dim] += offset
                    lengths[entry.dim] = length
            box = self._boxes[rank] = (tuple(offsets), tuple(lengths))
        return box

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the local tensor on ``rank``: ``(0,)`` outside the placement."""
        return self.box(rank)[1] if rank in self.placement._coordinates else (0,)

    def largest_shape(self) -> tuple[int, ...]:
        """Return the shape of the largest local tensor."""
        return tuple(
            max(length for _, length in nested_balanced_split(n, self.chain(dim)))
            for dim, n in enumerate(self.shape)
        )

    def local_numel(self) -> int:
        """Return the number of elements of the largest local tensor."""
        return math.prod(self.largest_shape())

    def replace(
        self,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        placement: Placement | None = None,
        layout: Sequence[Sbp] | None = None,
    ) -> Spec:
        """Return the same spec with some fields changed."""
        return Spec.make(
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            self.placement if placement is None else placement,
            self.layout if layout is None else layout,
        )

    def dual(self) -> Spec:
        """Return the spec of this tensor's gradient: S stays, B becomes P, P becomes B."""
        return self.replace(layout=[dual(e) for e in self.layout])

    def replicated(self) -> Spec:
        """Return the spec of the same tensor, broadcast on every axis."""
        return self.replace(layout=[broadcast] * self.placement.axes)

    def __repr__(self) -> str:
        short = (
            str(self.dtype)
            .removeprefix("torch.")
            .replace("float", "f")
            .replace("uint", "u")
            .replace("int", "i")
            .replace("bf", "bf")
        )
        return f"{short}{list(self.shape)} {' '.join(e.short for e in self.layout)}"

    def _repr_html_(self) -> str:
        """Return the drawing that notebooks show. Nothing communicates."""
        from .sharding_svg import layout_html

        return layout_html(self)


class StorageSpec(Spec):
    """The spec of a tensor that is stored with another layout than ``shown``, the one that ops see.

    Each rank stores only its share of the local tensor that ``shown`` gives it (ZeRO,
    arXiv:1910.02054). Ops treat such a tensor as having the spec ``shown``, and gather it. Each
    rank's share is part of its local tensor by ``shown``. The ranks along ``axes`` of the placement
    hold the shares of one local tensor, in order. The placement may have the axes of ``shown``'s
    placement in another order.
    """

    __slots__ = ("axes", "shown")
    axes: tuple[int, ...]
    shown: Spec
    _interned_storage: weakref.WeakValueDictionary[tuple[Spec, Spec], StorageSpec] = (
        weakref.WeakValueDictionary()
    )

    @classmethod
    def of(cls, spec: Spec, shown: Spec, axes: Sequence[int]) -> StorageSpec:
        """Return the storage spec of these arguments: the same object for equal arguments.

        ``axes``: the axes of ``spec.placement`` that split what ``shown`` does not.
        """
        storage = cls._interned_storage.get((spec, shown))
        if storage is None:
            storage = object.__new__(cls)
            set_ = object.__setattr__
            for name in ("shape", "dtype", "placement", "layout", "sbp", "_boxes"):
                set_(storage, name, getattr(spec, name))
            set_(storage, "_text", b"")
            set_(storage, "axes", tuple(axes))
            set_(storage, "shown", shown)
            with _interning:
                storage = cls._interned_storage.setdefault((spec, shown), storage)
        return storage

    @property
    def plain(self) -> Spec:
        return Spec.make(self.shape, self.dtype, self.placement, self.layout)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_storage_spec, (self.plain, self.shown, self.axes)

    def replace(
        self,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        placement: Placement | None = None,
        layout: Sequence[Sbp] | None = None,
    ) -> Spec:
        """Return the spec with some fields changed.

        With another dtype it is still a storage spec. With another shape, placement or layout it is
        an ordinary spec.
        """
        if shape is None and placement is None and layout is None:
            return StorageSpec.of(
                self.plain.replace(dtype=dtype), self.shown.replace(dtype=dtype), self.axes
            )
        return super().replace(shape=shape, dtype=dtype, placement=placement, layout=layout)

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose shares make up what ``rank`` holds by ``shown``, in order."""
        return self.placement.fiber(rank, self.axes)

    def share(self, rank: int, holder: int) -> tuple[slice, ...]:
        """Return the slices of the share of ``holder`` in the local tensor of its peer ``rank``.

        That is the local tensor by ``shown``.
        """
        offsets = self.shown.box(rank)[0]
        return tuple(
            slice(b - o, b - o + n) for b, n, o in zip(*self.box(holder), offsets, strict=True)
        )

    def __repr__(self) -> str:
        return f"{self.shown!r} kept as {super().__repr__()}"


def _rebuild_spec(
    shape: Sequence[int], dtype: torch.dtype, placement: Placement, layout: Sequence[Sbp]
) -> Spec:
    """Rebuild a spec from a pickle.

    A function of the module has a name by which ``torch.load`` can allow it. A method has none.
    """
    return Spec.make(shape, dtype, placement, layout)


def _rebuild_storage_spec(spec: Spec, shown: Spec, axes: Sequence[int]) -> StorageSpec:
    """Rebuild a `StorageSpec` from a pickle."""
    return StorageSpec.of(spec, shown, axes)


def _canonical_layout(
    shape: tuple[int, ...], placement: Placement, layout: tuple[Sbp, ...]
) -> tuple[Sbp, ...]:
    """Resolve negative dims, refuse dims out of range, and drop units that change nothing."""
    out = []
    for axis, entry in enumerate(layout):
        if entry.kind == "split":
            dim = entry.dim + len(shape) if entry.dim < 0 else entry.dim
            if not 0 <= dim < len(shape):
                raise SbpError(
                    f"sbp splits dim {entry.dim} on axis {axis}, but the tensor has {len(shape)} "
                    f"{'dim' if len(shape) == 1 else 'dims'} (shape {list(shape)}): "
                    + (
                        "use broadcast or partial_sum for a 0-dim tensor"
                        if not shape
                        else "use split(0)"
                        if len(shape) == 1
                        else f"use split(0) to split({len(shape) - 1})"
                    )
                )
            entry = Sbp("split", dim, entry.unit)
        out.append(entry)
    for dim in {e.dim for e in out if e.kind == "split" and e.unit != 1}:
        axes = [a for a, e in enumerate(out) if e.kind == "split" and e.dim == dim]
        chain = tuple((placement.shape[a], out[a].unit) for a in axes)
        if nested_balanced_split(shape[dim], chain) == nested_balanced_split(
            shape[dim], tuple((p, 1) for p, _ in chain)
        ):
            for a in axes:
                out[a] = Sbp("split", dim)
    return tuple(out)
