"""Index notation for the signatures that an op admits (DESIGN §4).

Rules are written in it, and `strategy` reads the signatures. The module is pure.

A rule describes one call by naming its index dimensions, as an einsum does. These names, the
*factors*, imply every signature on each axis of the placement. One factor may be split: operands
that have it are split at that dim, the others are broadcast, and a result without it is partial. Or
nothing is split. Or partial sums pass through, where the op is linear.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import FormError
from ...sharding.sbp import Sbp, broadcast
from ...sharding.spec import Spec

__all__ = ["Arg", "Factor", "LocalContext", "OpDescription", "Signature", "align", "parse"]

Factor = Hashable
Dims = tuple[Factor | None, ...]


class Arg:
    """A tensor operand as a rule sees it: its position among the tensor operands, and its spec."""

    __slots__ = ("index", "spec")

    def __init__(self, index: int, spec: Spec) -> None:
        self.index, self.spec = index, spec

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.spec.shape)

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    @property
    def dtype(self) -> Any:
        return self.spec.dtype

    def dim(self, d: int) -> int:
        """Return dim ``d``, counted from either end, as counted from the front.

        Raises IndexError as torch does.
        """
        n = max(self.ndim, 1)
        if not -n <= d < n:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {d})"
            )
        return d % n

    def is_split(self, d: int) -> bool:
        """Return True if some axis splits dim ``d``."""
        return bool(self.spec.axes_of(d))


@dataclass(frozen=True)
class Signature:
    """One admissible choice on one axis: an sbp for each operand and each result.

    ``factor`` is the factor that is split, or None.
    """

    ins: tuple[Sbp, ...]
    outs: tuple[Sbp, ...]
    factor: Factor | None = None


@dataclass
class LocalContext:
    """The layouts of the chosen signatures, seen by one rank.

    A rule's ``local`` receives it to build the function that runs on that rank.
    """

    rank: int
    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    factors: dict[Factor, tuple[int, ...]]  # a split factor -> the axes that split it
    op: OpDescription

    def is_split(self, factor: Factor) -> bool:
        return factor in self.factors

    def box(self, factor: Factor) -> tuple[int, int]:
        """Return the (offset, length) of a factor on this rank.

        Both count elements of the first operand dim that has the factor.
        """
        for spec, dims in zip(self.ins, self.op.dims, strict=True):
            if factor in dims:
                offsets, lengths = spec.box(self.rank)
                d = dims.index(factor)
                return offsets[d], lengths[d]
        raise KeyError(factor)

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """Return the local shape of result ``i`` on this rank."""
        return self.outs[i].local_shape(self.rank)


@dataclass(frozen=True)
class Range:
    """The integers that an operand may hold: from 0 to ``n - 1``, or ``also``.

    For another number PyTorch raises ``error`` with ``text.format(number)``.
    """

    n: int
    error: type[Exception]
    text: str
    also: int | None = None


@dataclass
class OpDescription:
    """One call, described by its rule.

    ``dims``: for each operand, the factor of each dim (None: the dim is broadcast or must not be
    split). ``out``: the same for each result. ``reduce``: kind of partial for each factor that no
    result has. ``whole``: factors that must not be split. ``linear``: groups of operands that may
    be partial sums together while the others are broadcast, which makes the results partial.
    ``addends``: operands that enter as partial where a contracted factor is split (a bias).
    ``carries``: any kind of partial passes through. ``scale``: (operand or ``~result``, dim) ->
    elements of that dim in one element of its factor. ``local``: builds the function that a rank
    runs (None: torch's own). ``composite``: a function that computes the call with other global ops
    instead. ``whole_call``: the result's shape depends on data, so the call runs on replicated
    operands. ``menu``: the signatures on an axis, where they are not exactly those that follow from
    the factors. ``traffic``: returns, for a choice, the seconds for which ``local`` itself
    communicates. ``function``: the torch function called. ``random``: the call draws random
    numbers. ``view``: the result aliases operand 0. ``exchanges``: factors along which ``local``
    communicates, where they are split, with the other ranks of the factor. All of these ranks must
    run ``local``, and its backward, in the same order. ``ranges``: for operands that are indices,
    the values that they may hold. ``unread``: operands whose values do not matter.
    """

    args: list[Arg]
    dims: list[Dims] = field(default_factory=list)
    out: list[Dims] = field(default_factory=list)
    reduce: dict[Factor, str] = field(default_factory=dict)
    whole: set[Factor] = field(default_factory=set)
    linear: list[frozenset[int]] = field(default_factory=list)
    addends: frozenset[int] = frozenset()
    carries: bool = False
    scale: dict[tuple[int, int], int] = field(default_factory=dict)
    local: Callable[[LocalContext], Callable[..., Any] | None] | None = None
    composite: Callable[..., Any] | None = None
    # torch's own function first checks the arguments of a composite, on meta tensors.
    checked: bool = False
    whole_call: bool = False
    random: bool = False
    view: bool = False
    menu: Callable[[int], Sequence[Signature]] | None = None
    traffic: Callable[[Any], float] | None = None
    exchanges: set[Factor] = field(default_factory=set)
    ranges: dict[int, Range] = field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    function: Any = None

    def __post_init__(self) -> None:
        if not self.dims:
            self.dims = [(None,) * a.ndim for a in self.args]

    def compose(self, function: Callable[..., Any]) -> None:
        """Replace the call by ``function`` of global tensors.

        torch's own function checks the arguments first, so that an invalid call raises PyTorch's
        error.
        """
        self.composite, self.checked = function, True

    def set(self, arg: Arg, dims: Sequence[Factor | None]) -> None:
        """Name the dims of one operand."""
        self.dims[arg.index] = tuple(dims)

    def factors(self) -> list[Factor]:
        """Return the factors that may be split, in order of appearance."""
        seen: dict[Factor, None] = {}
        for dims in self.dims:
            for f in dims:
                if f is not None and f not in self.whole:
                    seen.setdefault(f)
        return list(seen)

    def signatures(self, axis: int) -> Iterator[Signature]:
        """Return every signature on ``axis``, the plainest first.

        Units are those of the operands' layouts.
        """
        return self.derived(axis) if self.menu is None else iter(self.menu(axis))

    def derived(self, axis: int) -> Iterator[Signature]:
        """Yield the signatures that follow from the factors and from linearity."""
        none = (broadcast,) * len(self.args)
        outs = (broadcast,) * len(self.out)
        entries = [a.spec.layout[axis] for a in self.args]
        for factor in self.factors():
            for unit in self._units(factor, entries):
                yield self._split(factor, unit)
        partials = {
            e for e in entries if e.kind == "partial" and (e.reduce == "sum" or self.carries)
        }
        for kind in sorted(partials, key=lambda e: e.reduce):
            for group in self.linear:
                ins = tuple(kind if i in group else broadcast for i in range(len(none)))
                yield Signature(ins, (kind,) * len(outs))
        yield Signature(none, outs)

    def _units(self, factor: Factor, entries: list[Sbp]) -> list[int]:
        units = {1: None}
        for i, (dims, entry) in enumerate(zip(self.dims, entries, strict=True)):
            if entry.kind == "split" and entry.dim < len(dims) and dims[entry.dim] == factor:
                scale = self.scale.get((i, entry.dim), 1)
                if entry.unit % scale == 0:
                    units[entry.unit // scale] = None
        return list(units)

    def _split(self, factor: Factor, unit: int) -> Signature:
        contracted = factor in self.reduce
        partial = Sbp("partial", reduce=self.reduce[factor]) if contracted else broadcast

        def entry(which: int, dims: Dims, otherwise: Sbp) -> Sbp:
            if factor not in dims:
                return otherwise
            d = dims.index(factor)
            return Sbp("split", d, unit * self.scale.get((which, d), 1))

        ins = tuple(
            entry(i, dims, partial if contracted and i in self.addends else broadcast)
            for i, dims in enumerate(self.dims)
        )
        return Signature(
            ins, tuple(entry(~i, dims, partial) for i, dims in enumerate(self.out)), factor
        )


def align(shapes: Sequence[tuple[int, ...]], tag: str = "") -> tuple[list[Dims], Dims]:
    """Align broadcasting shapes from the right and name their factors.

    Return the dims of each shape, and those of the result. A dim of size 1 that meets a larger one
    has no factor.

    >>> align([(5, 1), (1, 6), (6,)])
    ([(('', 2), None), (None, ('', 1)), (('', 1),)], (('', 2), ('', 1)))
    """
    n = max((len(s) for s in shapes), default=0)
    columns = [[s[len(s) - k] for s in shapes if len(s) >= k] for k in range(1, n + 1)]
    sizes = [0 if 0 in column else max(column) for column in columns]
    every: list[Dims] = [
        tuple((tag, k) if s[len(s) - k] == sizes[k - 1] else None for k in range(len(s), 0, -1))
        for s in shapes
    ]
    return every, tuple((tag, k) for k in range(n, 0, -1))


def parse(notation: str, args: Sequence[Arg | None]) -> tuple[list[Dims], list[Dims], set[Factor]]:
    """Parse notation such as ``"... i, o i, o -> ... o"`` for these operands.

    Return the dims of each operand that is given, the dims of each result, and the factors that
    must not be split. A name after ``!`` must not be split. ``...`` stands for leading dims that
    broadcast. Operands that are None are skipped. Raises FormError where the operands do not fit
    the notation.
    """
    left, right = (side.split(",") for side in notation.split("->"))
    if len(args) > len(left):
        raise FormError(f"{len(args)} operands for notation {notation!r}")
    whole: set[Factor] = set()
    patterns = [
        [
            t.lstrip("!")
            for t in term.split()
            if not (t.startswith("!") and whole.add(t.lstrip("!")))  # type: ignore[func-returns-value]
        ]
        for term in left
    ]
    leading = [
        a.shape[: a.ndim - (len(p) - 1)] if a is not None and "..." in p else ()
        for a, p in zip(args, patterns, strict=False)
    ]
    ellipsis, whole_ellipsis = align(leading, "...")
    dims: list[Dims] = []
    for a, pattern, lead in zip(args, patterns, ellipsis, strict=False):
        if a is not None:
            named: list[Factor | None] = []
            for t in pattern:
                named += lead if t == "..." else [t]
            # A dim of size 1 that meets a larger one broadcasts.
            if len(named) != a.ndim:
                raise FormError(
                    f"operand {a.index} has shape {list(a.shape)}, which does not fit {notation!r}"
                )
            dims.append(tuple(named))
    outs: list[Dims] = []
    for term in right:
        named = []
        for t in term.split():
            named += whole_ellipsis if t == "..." else [t]
        outs.append(tuple(named))
    return dims, outs, whole
