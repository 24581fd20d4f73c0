"""sbp: the layout of a tensor on one axis of a placement. Pure values: nothing here communicates.

Users write these values, and every other package reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ..errors import SbpError

__all__ = [
    "Sbp",
    "broadcast",
    "partial_max",
    "partial_min",
    "partial_norm",
    "partial_sum",
    "sbp",
    "split",
]


class Sbp:
    """An entry of an sbp: ``split(dim)``, ``broadcast``, or a partial.

    Partials are ``partial_sum``, and max, min and norm where an op returns them. Entries are
    interned: equal entries are the same object. ``unit`` is internal (see
    ``globaltensor.sharding.spec``). A split with a unit assigns full groups of ``unit`` elements,
    so that merging and dividing dims keeps a split tensor split.
    """

    __slots__ = ("dim", "kind", "reduce", "unit")
    kind: str  # "split" | "broadcast" | "partial"
    dim: int
    unit: int
    reduce: str  # of a partial: "sum" | "max" | "min" | "norm2.0" ...
    _interned: dict[tuple[str, int, int, str], Sbp] = {}

    def __new__(cls, kind: str, dim: int = -1, unit: int = 1, reduce: str = "") -> Sbp:
        key = (kind, dim, unit, reduce)
        instance = cls._interned.get(key)
        if instance is None:
            instance = object.__new__(cls)
            for name, value in zip(("kind", "dim", "unit", "reduce"), key, strict=True):
                object.__setattr__(instance, name, value)
            instance = cls._interned.setdefault(key, instance)
        return instance

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("sbp entries are immutable")

    def __call__(self) -> Sbp:
        """Return the entry itself, so that ``broadcast()`` and ``partial_sum()`` work too.

        Raises SbpError for a split.
        """
        if self.kind == "split":
            raise SbpError(f"{self} is not callable; it is already an sbp entry")
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Sbp, (self.kind, self.dim, self.unit, self.reduce)

    def __copy__(self) -> Sbp:
        return self

    def __deepcopy__(self, memo: object) -> Sbp:
        return self

    def __repr__(self) -> str:
        if self.kind == "split":
            return f"globaltensor.sbp.split(dim={self.dim})"
        return "globaltensor.sbp." + (
            self.kind if self.kind == "broadcast" else f"partial_{self.reduce}"
        )

    @property
    def short(self) -> str:
        """The short form: ``S(0)``, ``B``, ``P``; with a unit ``S(0)/4``; a maximum ``P(max)``."""
        if self.kind == "split":
            return f"S({self.dim})" + (f"/{self.unit}" if self.unit != 1 else "")
        if self.kind == "broadcast":
            return "B"
        return "P" if self.reduce == "sum" else f"P({self.reduce})"

    @property
    def is_split(self) -> bool:
        return self.kind == "split"

    @property
    def is_broadcast(self) -> bool:
        return self.kind == "broadcast"

    @property
    def is_partial(self) -> bool:
        return self.kind == "partial"

    def with_unit(self, unit: int) -> Sbp:
        """Return the same split in full groups of ``unit`` elements."""
        return Sbp("split", self.dim, unit)


def split(dim: int | None = None, *, axis: int | None = None) -> Sbp:
    """Split dim ``dim`` over the ranks of an axis, balanced.

    Of n elements over p ranks the first n mod p ranks hold one more. A negative ``dim`` counts from
    the last dim and is resolved when the entry is applied to a tensor. ``axis`` is an older name of
    ``dim``. Raises SbpError where ``dim`` is no integer.
    """
    if dim is None:
        dim = axis
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise SbpError(f"split(dim) takes an integer dim, not {dim!r}")
    return Sbp("split", dim)


broadcast: Final = Sbp("broadcast")
partial_sum: Final = Sbp("partial", reduce="sum")
partial_max: Final = Sbp("partial", reduce="max")
partial_min: Final = Sbp("partial", reduce="min")
sbp = Sbp


def partial_norm(p: float) -> Sbp:
    """Return the partial whose value is the p-norm of the ranks' local values.

    Each rank holds the p-norm of its local tensor.
    """
    return Sbp("partial", reduce=f"norm{float(p)}")


#: The sbp of a tensor's cotangent, by the kind of the tensor's sbp (DESIGN: duality). Partials
#: other than sum are reduced before a gradient passes.
GRADIENT_SBP = {"split": None, "broadcast": partial_sum, "partial": broadcast}


def dual(entry: Sbp) -> Sbp:
    """Return the sbp of the gradient of a tensor with this sbp: S -> S, B -> P, P -> B."""
    return GRADIENT_SBP[entry.kind] or entry


def _shown(value: object) -> str:
    """Return what a message says of a value that is no layout."""
    if isinstance(value, str):  # it looks like one in print
        return f"the string {value!r}: write flow.sbp.split(0), flow.sbp.broadcast, ..."
    return "split without a dim: write split(0)" if value is split else repr(value)


def as_layout(value: object, axes: int, what: str = "sbp") -> tuple[Sbp, ...]:
    """Convert one entry, or a sequence of them, to a tuple of one entry for each axis.

    Raises SbpError where ``value`` is no such thing or has another number of entries.
    """
    entries: Iterable[object] = (
        (value,) if isinstance(value, Sbp) else value if isinstance(value, (list, tuple)) else ()
    )
    entries = tuple(entries)
    if not entries or not all(isinstance(e, Sbp) for e in entries):
        raise SbpError(
            f"{what} must be split(dim), broadcast or partial_sum, or a list of them; "
            f"got {_shown(value)}"
        )
    if len(entries) != axes:
        raise SbpError(
            f"{what} has {len(entries)} entr{'y' if len(entries) == 1 else 'ies'}, but the "
            f"placement has {axes} ax{'i' if axes == 1 else 'e'}s: give one entry for each axis"
        )
    return entries  # type: ignore[return-value]
