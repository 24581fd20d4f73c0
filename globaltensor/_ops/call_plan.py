"""Plans of calls: the base class, and the plans that box no operand.

_ops/sharding_propagation.py makes the plans. _ops/dispatch.py caches and runs them. Plans of calls
with a rule are in `local_plan`. Plans that run on full tensors are in `replicated_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.python_bodies import recover_dropped_args
from .._base.pytree import replaced, tensors_in
from .._base.tracebacks import mark_torch_error
from .._base.user_code import without_warnings
from .._tensor.global_tensor import GlobalTensor
from ..distributed.divergence import History, digest_of
from ..errors import GlobalTensorError
from ..sharding.spec import Spec
from .rules import RULES, Range
from .rules.helpers import check_range

__all__ = [
    "ANYWHERE",
    "ANYWHERE_UNSORTED",
    "IN_LIST",
    "ONE_AND_NAMED",
    "ONE_AND_NAMED_UNSORTED",
    "AttributePlan",
    "CallPlan",
    "ConstantPlan",
    "DelegatePlan",
    "RangeCheckedPlan",
    "ReturnOperandPlan",
    "as_on_one_device",
    "describe_call",
    "name_of",
]  # fmt: skip

# A failed call is repeated on one device only if its operands have at most this many elements.
_MAX_REPEATED_ELEMENTS = 1 << 24


def describe_call(func: Any, tensors: Sequence[torch.Tensor]) -> str:
    """Return a call as error messages show it: ``add(f32[4, 4] S(0), f32[4, 4] B)``."""
    shown = [
        repr(t._spec) if isinstance(t, GlobalTensor) else f"plain {list(t.shape)}" for t in tensors
    ]
    return f"{name_of(func)}({', '.join(shown)})"


def name_of(func: Any) -> str:
    if func in RULES:
        return RULES[func].name + ("_" if RULES[func].inplace else "")
    owner = getattr(func, "__self__", None)
    return (
        getattr(owner, "__name__", "attribute")
        if getattr(func, "__name__", "") == "__get__"
        else getattr(func, "__name__", str(func))
    )


# ----------------------------------------------------------------------------- pytrees of arguments


def is_index_scalar(t: torch.Tensor) -> bool:
    """Return True if a tensor may represent a whole number: a size, an index, a dim."""
    return (
        not t.dim()
        and not t.is_floating_point()
        and not t.is_complex()
        and t.dtype is not torch.bool
    )


def with_index_scalars(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``func`` with numbers in place of all integer scalar tensors but the first operand.

    Examples are ``x.view(n, -1)`` and ``x.narrow(0, 0, n)``."""
    found = tensors_in(kwargs, tensors_in(args, []))
    these = iter([t.item() if i and is_index_scalar(t) else t for i, t in enumerate(found)])
    return func(*replaced(args, these), **replaced(kwargs, these))


# ----------------------------------------------------------------------------- indices out of range


def as_on_one_device(
    error: Exception,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    locals_: Sequence[torch.Tensor] = (),
) -> Exception | None:
    """Return PyTorch's error for the call on one device, where indices are out of range.

    The error of a local call states the sizes of the local tensor, so users see this one instead.
    ``locals_``: the operands, boxed for the call. Returns None if the call has no indices, or if
    this rank cannot find the cause.
    """
    tensors = tensors_in(kwargs, tensors_in(args, []))
    if (
        isinstance(error, GlobalTensorError)
        or torch_private.recording.on
        or not any(map(_may_be_index, tensors))
    ):
        return None
    if (
        sum(t.numel() for t in tensors) > _MAX_REPEATED_ELEMENTS
        or any(map(callable, (*args, *kwargs.values())))
        or any(torch_private.is_fake(t) for t in tensors)
    ):
        return None
    try:
        with torch_private.outside_all_modes(), torch.no_grad(), without_warnings():
            these = iter(
                [
                    _full_or_zeros(t, part)
                    for t, part in zip(tensors, locals_ or tensors, strict=True)
                ]
            )
            func(*replaced(args, these), **replaced(kwargs, these))
    except Exception as alone:
        mark_torch_error(alone)
        return alone
    return None


def _may_be_index(t: torch.Tensor) -> bool:
    return not (t.dtype.is_floating_point or t.dtype.is_complex or t.dtype is torch.bool)


def _full_or_zeros(t: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a copy of an operand if this rank has its full value, else zeros of its shape."""
    here = part._stored if isinstance(part, GlobalTensor) else part
    partial = isinstance(t, GlobalTensor) and any(e.is_partial for e in t._spec.layout)
    return (
        here.detach().cpu().clone()
        if here.shape == t.shape and not partial
        else torch.zeros(t.shape, dtype=t.dtype)
    )


# -------------------------------------------------------------------------------------------- plans


_MAX_CACHED_CODES = 64  # per plan
# Where the global operands of a call are, if they are not its first one to three arguments:
IN_LIST = -1  # the entries of the first argument, a list
ONE_AND_NAMED = -2  # the first argument, and arguments passed by name
ANYWHERE = -3  # found by a search of all arguments
# The same, where arguments by name are not in alphabetical order. Ranks may pass them in any order.
ONE_AND_NAMED_UNSORTED = -4
ANYWHERE_UNSORTED = -5


class CallPlan:
    """A plan of a call: the actions for one key of the plan cache.

    If ``direct`` is True, operands need no boxing, the result is one tensor and arguments are flat.
    `dispatch` runs such a plan inline."""

    __slots__ = (
        "code",
        "codes",
        "device",
        "direct",
        "dtype",
        "function",
        "mixed_history",
        "number_names",
        "order",
        "out",
        "picks",
        "recorded",
        "shape",
        "usual",
        "view",
    )

    def __init__(self) -> None:
        # number of the call in the history of this rank, the same on every rank
        self.code = 0
        # number that the plan does not depend on -> code of the call with it
        self.codes: dict[Any, int] = {}
        # The names of the arguments with these numbers, where they are not in alphabetical order.
        self.number_names: tuple[str, ...] = ()
        # The history of calls, the code, and where the global operands are: their number if they
        # are the first one to three arguments, or one of the constants above. It is None if the
        # plan is part of another plan, which is recorded, if there is no other rank, or in the next
        # case.
        self.recorded: tuple[History, int, int] | None = None
        # The history if operands are on several placements: ranks outside one of them may know its
        # tensors by other serials.
        self.mixed_history: History | None = None
        self.direct = self.view = False
        # True if the result has the default dtype and is on the cpu. A wrapper has these unless
        # they are passed, and passing them takes a third of making the wrapper.
        self.usual = False
        # True for a view function that picks from a split dim: the owner contributes the data, so
        # the result is a copy.
        self.picks = False
        # `ResultStrides`, where the local results may have another memory order than on one device
        self.order: Any = None
        self.function: Callable[..., Any] | None = None
        self.out: Spec | None = None
        self.shape: torch.Size | None = None
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None

    def code_with(self, number: Any) -> int:
        """Return the code of a call with this number. Cache it, and save its text for reports.

        Training steps repeat the same numbers. 0.0 and -0.0 have the same code."""
        if len(self.codes) >= _MAX_CACHED_CODES:
            self.codes.clear()
        known = _sorted_by_name(number, self.number_names) if self.number_names else number
        digest = digest_of(f"{self.code} {known!r}")
        history = self.mixed_history if self.recorded is None else self.recorded[0]
        if history is not None:
            history.learn_number(digest, self.code.to_bytes(8, "little"), known)
        self.codes[number] = code = int.from_bytes(digest, "little")
        return code

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("a plan that is not direct has its own run")


def _sorted_by_name(number: Any, names: tuple[str, ...]) -> Any:
    """Return the numbers of a call, nested as `dispatch` nests them, sorted by argument names."""
    by_name = {}
    for name in reversed(names):
        number, by_name[name] = number
    for name in sorted(by_name):
        number = (number, by_name[name])
    return number


class RecoverArgsPlan(CallPlan):
    """A plan for torch functions that drop an argument before ``__torch_function__``.

    If the user passed that argument, the plan calls ``again`` with it. Otherwise it runs ``usual``,
    the plan for the call without this argument."""

    __slots__ = ("again", "usual")

    def __init__(self, usual: CallPlan, again: Callable[..., Any]) -> None:
        super().__init__()
        self.usual, self.again = usual, again

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = recover_dropped_args(func, kwargs)
        return self.usual.run(func, args, kwargs) if given is kwargs else self.again(*args, **given)


class DefaultDtypePlan(CallPlan):
    """A plan whose result has torch's default dtype, though no operand has a floating dtype.

    An example is the quotient of two integers. If the default dtype has changed, ``anew`` plans the
    call again. The key of the plan cache does not contain the default dtype, because that would
    slow down all other calls."""

    __slots__ = ("anew", "default", "planned")

    def __init__(self, planned: CallPlan, anew: Callable[..., CallPlan]) -> None:
        super().__init__()
        self.planned, self.anew, self.default = planned, anew, torch.get_default_dtype()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.get_default_dtype() is not self.default:
            self.planned, self.default = self.anew(func, args, kwargs), torch.get_default_dtype()
        return self.planned.run(func, args, kwargs)


def has_default_dtype(found: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a plan's result may have the default dtype.

    This is so if a result has a floating or complex dtype and no operand has one."""
    outs = getattr(found, "outs", None) or [found.out]
    return any(o is not None and _is_inexact(o.dtype) for o in outs) and not any(
        _is_inexact(t.dtype) for t in tensors_in(kwargs, tensors_in(args, []))
    )


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class ConstantPlan(CallPlan):
    """A plan whose result is no tensor and follows from the specs alone.

    One rank may ask alone, so such calls are not recorded."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.value


class DelegatePlan(CallPlan):
    """A plan that calls another function with the same arguments: a composite or a handler."""

    __slots__ = ("other",)

    def __init__(self, other: Callable[..., Any]) -> None:
        super().__init__()
        self.other = other

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.other(*args, **kwargs)


class AttributePlan(DelegatePlan):
    """A plan that reads an attribute, which is no view. One rank may read it alone."""

    __slots__ = ()


class ReturnOperandPlan(CallPlan):
    """A plan for functions that return some of their operands unchanged.

    ``operands``: for each result, the position of the operand that it is, or None. Results and
    operands are in the order of `tensors_in`. ``inner``: the plan that computes the other results,
    or None."""

    __slots__ = ("inner", "operands", "structure")

    def __init__(
        self, operands: Sequence[int | None], structure: Any, inner: CallPlan | None
    ) -> None:
        super().__init__()
        self.operands, self.structure, self.inner = operands, structure, inner

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        results = (
            [None] * len(self.operands)
            if self.inner is None
            else tensors_in(self.inner.run(func, args, kwargs), [])
        )
        return replaced(
            self.structure,
            iter(
                [
                    r if i is None else tensors[i]
                    for r, i in zip(results, self.operands, strict=True)
                ]
            ),
        )


class RangeCheckedPlan(CallPlan):
    """A plan that checks replicated indices before any rank takes its shard of them.

    Therefore every rank raises for an index out of range, not only the index's owner."""

    __slots__ = ("inner", "ranges")

    def __init__(self, inner: CallPlan, ranges: Sequence[tuple[int, Range]]) -> None:
        super().__init__()
        self.inner, self.ranges = inner, tuple(ranges)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        for i, allowed in self.ranges:
            t = tensors[i]
            check_range(t._local if isinstance(t, GlobalTensor) else t, allowed)
        return self.inner.run(func, args, kwargs)
