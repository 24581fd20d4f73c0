"""The memory order of results: that of one device, also where local tensors would not show it.

Plans of calls use it. A local kernel gives its result the memory order of one device, except where
an operand was boxed, where the local function communicates, or where a local tensor has size 1 in a
split dim. There the function itself is run once on small tensors with the operands' strides on one
device. A result in another order than this run shows is copied into that order. If its local tensor
would not show the order, its strides are noted (_tensor/strides.py).
Otherwise ``y = x.T + 1; y.contiguous().zero_()`` would write into ``y``.

All ranks take the same decisions: these follow from specs, notes, and local strides that every rank
has alike. Plain operands count as row-major. Results of unknown order are laid out row-major. Calls
without a rule, on replicated operands, have the order of their local results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch

from .._base import torch_private
from .._base.pytree import replaced, tensors_in
from .._base.user_code import without_warnings
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.strides import (
    Note,
    arrange,
    by_rows,
    dense_strides,
    device_strides,
    has_hidden_gaps,
    note_of,
)
from ..distributed.world import world
from ..sharding.spec import Spec
from .call_plan import DelegatePlan

__all__ = ["ComposedPlan", "ResultStrides", "local_order_misleads"]

_MAX_KNOWN = 64  # per plan
# A call on tensors with at most so many elements is run on tensors of the same shapes.
_MAX_ELEMENTS = 1 << 12
_MAX_RUN_ELEMENTS = 1 << 20  # also where no run with short dims shows the order
# Functions that choose a kernel, and with it the order, by the sizes, or that pad to given sizes.
_BY_SIZE = frozenset(
    (
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.functional.multi_head_attention_forward,
        *(f for name, f in vars(torch.fft).items() if "fft" in name and callable(f)),
    )
)
_Strides = tuple[int, ...]


class _TrialSizes(NamedTuple):
    """The sizes of a run: all dims but the last ``kept`` ones are at most ``longest``."""

    longest: int
    kept: int


# The arguments of a call (kernels, groups, normalized shapes) may ask for longer dims.
_SHORT = (
    _TrialSizes(2, 0),
    _TrialSizes(4, 0),
    _TrialSizes(2, 1),
    _TrialSizes(2, 2),
    _TrialSizes(8, 0),
    _TrialSizes(16, 0),
)


def local_order_misleads(
    boxed: bool, outside: bool, messages: bool, remote: bool, outs: Sequence[Spec | None]
) -> bool:
    """Return True if local results of a call may have another memory order than on one device.

    ``boxed``: an operand is boxed. ``outside``: this rank holds no part of the operands.
    ``messages``: the local function may communicate. ``remote``: an operand is a view that needed
    communication, whose local tensor has an order of its own.
    """
    matrices = [o for o in outs if o is not None and o.ndim > 1]
    return bool(matrices) and (
        boxed or outside or messages or remote or any(has_hidden_gaps(o.plain) for o in matrices)
    )


class ResultStrides:
    """The memory order that one device gives the results of a plan's calls.

    ``src``: the specs of the operands. ``random``: the calls draw random numbers, so they are not
    run for their order. Results in the shape of the first operand have its order."""

    __slots__ = ("hidden", "known", "notes", "random", "rows", "rows_give_rows")

    def __init__(self, src: Sequence[Spec], random: bool = False) -> None:
        self.random = random
        rank = world().rank
        # For each operand: True if its local tensor may not show its order, False if it does, None
        # if it has none (a vector, a number).
        self.hidden = [
            None if s.ndim < 2 else s.placement.coordinate(rank) is None or has_hidden_gaps(s.plain)
            for s in src
        ]
        # the strides that each operand's local tensor has if the operand is row-major
        self.rows = [
            () if h else by_rows(s.local_shape(rank)) for s, h in zip(src, self.hidden, strict=True)
        ]
        # True if row-major operands give row-major results; None before the first call
        self.rows_give_rows: bool | None = None
        # strides of the operands on one device -> those of the results, or None if unknown
        self.known: dict[Any, list[_Strides] | None] = {}
        # what determines the order on one device -> the notes of results that need no copy
        self.notes: dict[Any, list[Note | None]] = {}

    def is_row_major(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Return True if all operands, and so the result, are row-major: the usual case.

        In the arguments of the call each ordinary tensor stands by itself. Only a view of another
        tensor, or a tensor with a note, has an order that its local tensor may not show.
        """
        if not self.rows_give_rows:
            return False
        i = 0
        for a in (*args, *kwargs.values()) if kwargs else args:
            if type(a) in ORDINARY:
                hidden = self.hidden[i]
                if hidden is not None and (
                    "_strides" in a.__dict__
                    or (a._memory is not None if hidden else a._local.stride() != self.rows[i])
                ):
                    return False
                i += 1
        return True

    def arrange(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[torch.Tensor],
        outs: Sequence[GlobalTensor],
    ) -> None:
        """Give ``outs``, the new results of ``func(*args, **kwargs)``, their memory order."""
        layouts, seen = [], None
        for t in operands:
            if type(t) not in ORDINARY:
                break
            layouts += t.__dict__.get("_strides"), t._local.stride(), t._memory is None  # type: ignore[attr-defined]
        else:
            seen = (*layouts, *[o._local.stride() for o in outs])
            notes = self.notes.get(seen)
            if notes is not None:
                for out, note in zip(outs, notes, strict=True):
                    if note is not None:
                        out.__dict__["_strides"] = note
                return
        before = [o._local for o in outs]
        self._arrange(func, args, kwargs, operands, outs)
        if seen is not None and all(o._local is t for o, t in zip(outs, before, strict=True)):
            if len(self.notes) >= _MAX_KNOWN:
                self.notes.clear()
            self.notes[seen] = [note_of(o) for o in outs]

    def _arrange(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[torch.Tensor],
        outs: Sequence[GlobalTensor],
    ) -> None:
        if any(type(t) not in ORDINARY and t.layout is not torch.strided for t in operands):
            return  # it has no strides
        rows = [by_rows(t.shape) for t in operands]

        def found(strides: Sequence[_Strides]) -> list[_Strides] | None:
            if self.random:
                return _strides_of_first(operands[0], strides[0], outs)
            return _strides_on_one_device(func, args, kwargs, operands, strides, outs)

        if self.rows_give_rows is None:
            usual = found(rows)
            self.rows_give_rows = usual is not None and all(
                _same(shown, by_rows(o.shape), o.shape)
                for shown, o in zip(usual, outs, strict=True)
            )
        key = tuple(
            device_strides(t) if isinstance(t, GlobalTensor) else row
            for t, row in zip(operands, rows, strict=True)
        )
        if self.rows_give_rows and all(map(_same, key, rows, [t.shape for t in operands])):
            wanted: list[_Strides] | None = [by_rows(o.shape) for o in outs]
        else:
            if key not in self.known:
                if len(self.known) >= _MAX_KNOWN:
                    self.known.clear()
                self.known[key] = found(key)
            wanted = self.known[key]
        if wanted is None and func not in _BY_SIZE:
            wanted = [by_rows(o.shape) for o in outs]  # so that the ranks have one order
        if wanted is not None and len(wanted) == len(outs):
            for out, strides in zip(outs, wanted, strict=True):
                arrange(out, strides)


def _same(a: _Strides, b: _Strides, shape: Iterable[int]) -> bool:
    """Return True if two strides of a tensor of this shape are the same, but for dims of size 1."""
    return all(x == y for x, y, n in zip(a, b, shape, strict=True) if n > 1)


def _strides_of_first(
    first: torch.Tensor, strides: _Strides, outs: Sequence[GlobalTensor]
) -> list[_Strides] | None:
    """Return the strides of copies of the ``first`` operand, None if ``outs`` differ in shape."""
    if any(o.shape != first.shape for o in outs):
        return None
    return [dense_strides(first.shape, strides) for _ in outs]


def _strides_on_one_device(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[torch.Tensor],
    strides: Sequence[_Strides],
    outs: Sequence[GlobalTensor],
) -> list[_Strides] | None:
    """Return the strides of the results for operands with these strides, or None if unknown.

    The kernels of meta and fake tensors have an order of their own, so the call is run on real
    ones. If the operands are large, it is run with short dims first. The first run that the
    arguments allow, and in which no dim vanishes, shows the order."""
    with torch_private.outside_all_modes(), torch.no_grad(), without_warnings():
        for sizes, fill in itertools.product(_trial_sizes(func, operands), (_zeros, _identities)):
            generator = torch.default_generator.get_state()
            try:
                these = iter([fill(t, s, sizes) for t, s in zip(operands, strides, strict=True)])
                shown = tensors_in(func(*replaced(args, these), **replaced(kwargs, these)), [])
            except Exception:  # a call that needs other sizes or values
                continue
            finally:
                # Only if the call has drawn random numbers: other threads may draw meanwhile.
                if not torch.equal(torch.default_generator.get_state(), generator):
                    torch.default_generator.set_state(generator)
            if len(shown) == len(outs) and all(map(_shows_order, shown, outs, repeat(sizes))):
                return [
                    t.stride() if sizes is None else dense_strides(o.shape, t.stride())
                    for t, o in zip(shown, outs, strict=True)
                ]
    return None


def _trial_sizes(
    func: Callable[..., Any], operands: Sequence[torch.Tensor]
) -> list[_TrialSizes | None]:
    """Return the sizes of the runs that may show the order of a call's results.

    None stands for the sizes of the call itself."""
    count = sum(t.numel() for t in operands)
    if count <= _MAX_ELEMENTS:
        return [None]
    short = [] if func in _BY_SIZE else _SHORT
    return [*short, None] if count <= _MAX_RUN_ELEMENTS else [*short]


def _shows_order(run: torch.Tensor, out: GlobalTensor, sizes: _TrialSizes | None) -> bool:
    """Return True if the result of a run tells the order of ``out``: none of its dims is gone."""
    if sizes is None:
        return run.shape == out.shape
    return run.dim() == out.dim() and not any(
        n != m and n <= 1 for n, m in zip(run.shape, out.shape, strict=True)
    )


def _zeros(t: torch.Tensor, strides: _Strides, sizes: _TrialSizes | None) -> torch.Tensor:
    """Return zeros in the order of these strides, of an operand's shape or with short dims."""
    shape = list(t.shape)
    if sizes is not None:
        shape = [
            min(n, sizes.longest) if d < len(shape) - sizes.kept else n for d, n in enumerate(shape)
        ]
        strides = dense_strides(shape, strides)
    elif sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) > 2 * t.numel():
        strides = _with_small_gaps(shape, strides)
    return torch.empty_strided(shape, strides, dtype=t.dtype, device=t.device).zero_()


def _identities(t: torch.Tensor, strides: _Strides, sizes: _TrialSizes | None) -> torch.Tensor:
    """Return identity matrices, or ones, in place of `_zeros`: a matrix of zeros has no inverse."""
    filled = _zeros(t, strides, sizes)
    if filled.dim() < 2 or filled.shape[-1] != filled.shape[-2]:
        return filled.fill_(1)
    filled.diagonal(dim1=-2, dim2=-1).fill_(1)
    return filled


def _with_small_gaps(shape: Sequence[int], strides: _Strides) -> _Strides:
    """Return strides in the same order, with gaps of one element where there are gaps.

    A small slice of a large tensor has gaps as large as that tensor."""
    steps, step, dense = [0] * len(shape), 1, 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if strides[d] and shape[d] > 1:
            step += strides[d] > dense
            steps[d] = step
            step, dense = step * shape[d], strides[d] * shape[d]
    return tuple(steps)


class ComposedPlan(DelegatePlan):
    """A plan of a call that its rule composes of other calls.

    Their results may have another memory order."""

    __slots__ = ("order",)

    def __init__(self, composed: Callable[..., Any], order: ResultStrides) -> None:
        super().__init__(composed)
        self.order = order

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self.other(*args, **kwargs)
        operands = tensors_in(kwargs, tensors_in(args, []))
        results = tensors_in(out, [])
        # not a result that is an operand, or a view of one or of another result
        shared = [t._memory for t in (*operands, *results) if isinstance(t, GlobalTensor)]
        if all(
            type(t) in ORDINARY and (t._memory is None or shared.count(t._memory) == 1)
            for t in results
        ) and not any(t is operand for t in results for operand in operands):
            for t in results:
                t._memory = None  # type: ignore[attr-defined]  # shared with a local variable
            self.order.arrange(func, args, kwargs, operands, results)
        return out
