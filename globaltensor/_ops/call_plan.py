"""Plans of calls: box the operands, run on the local tensors, wrap the results.

_ops/plan_call.py makes the plans. _ops/dispatch.py caches and runs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch

from .._base import torch_private
from .._base.overridable import apply
from .._base.python_bodies import recover_dropped_args
from .._base.pytree import rebuilt_tuple, replaced, tensors_in
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.gradients import parameter_gather
from .._tensor.promote import promote_plain_tensor
from .._tensor.strides import Note, base_note, by_rows, differ, note_strides, results
from .._tensor.view_tracking import (
    RemoteView,
    finish_inplace,
    has_aliases,
    has_partial_alias,
    link_alias,
    mark_written,
)
from ..boxing import box, log, plan_boxing
from ..boxing.autograd import NOTHING
from ..distributed.world import world
from ..errors import GlobalTensorError, InplaceError
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .rules import RULES, Range

__all__ = [
    "CallPlan",
    "ConstantPlan",
    "DelegatePlan",
    "InPlacePlan",
    "LocalPlan",
    "LocalPlanList",
    "LocalPlanMany",
    "MoveTargetPlan",
    "RangeCheckedPlan",
    "ReplicatedPlan",
    "ReturnOperandPlan",
    "StridedViewPlan",
    "as_on_one_device",
    "box_partial_target",
    "describe_call",
    "inplace_error",
    "name_of",
    "nonmember_outputs",
    "shared",
    "unpartial_norm_target",
    "wrapped_whole",
]  # fmt: skip

_GETITEM = torch.Tensor.__getitem__
#: Functions that torch refuses because of the strides of their base, and functions that copy then.
_REFUSED, _COPIED = (
    frozenset(("view", "unflatten", "view_as_complex")),
    frozenset(("reshape", "flatten", "ravel")),
)
_PLACE = torch.empty(0)  # placeholder for a tensor
_MOST_AGAIN = 1 << 24  # repeat a failed call only if its operands have at most so many elements

#: Random functions in training run through this function, set by globaltensor._ops.random. Its
#: arguments: (function, args, kwargs, coordinates along split axes, placement).
RANDOM: list[Callable[..., Any]] = []


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


def inplace_error(name: str, spec: Spec) -> InplaceError:
    return InplaceError(
        f"in-place {name} would need the sbp of its target changed, which an in-place op must not "
        f"do\n"
        f"  target {spec!r}\n"
        f"use the out-of-place form, or bring the target there first: x = x.to_global(sbp=...)"
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

    The error of a local call has the numbers of the local tensor. ``locals_``: operands as they
    were boxed for the call. Returns None if the call has no indices, or if the cause cannot be
    found here.
    """
    tensors = tensors_in(kwargs, tensors_in(args, []))
    if (
        isinstance(error, GlobalTensorError)
        or torch_private.recording.on
        or not any(map(_may_be_index, tensors))
    ):
        return None
    if (
        sum(t.numel() for t in tensors) > _MOST_AGAIN
        or any(map(callable, (*args, *kwargs.values())))
        or any(torch_private.is_fake(t) for t in tensors)
    ):
        return None
    try:
        with torch_private.outside_all_modes(), torch.no_grad(), warnings.catch_warnings():
            these = iter(
                [_whole(t, part) for t, part in zip(tensors, locals_ or tensors, strict=True)]
            )
            warnings.simplefilter("ignore")
            func(*replaced(args, these), **replaced(kwargs, these))
    except Exception as alone:
        return alone
    return None


def _may_be_index(t: torch.Tensor) -> bool:
    return not (t.dtype.is_floating_point or t.dtype.is_complex or t.dtype is torch.bool)


def _whole(t: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a copy of an operand if this rank has its full value, else zeros of its shape."""
    here = part._local if isinstance(part, GlobalTensor) else part
    partial = isinstance(t, GlobalTensor) and any(e.is_partial for e in t._spec.layout)
    return (
        here.detach().cpu().clone()
        if here.shape == t.shape and not partial
        else torch.zeros(t.shape, dtype=t.dtype)
    )


# -------------------------------------------------------------------------------------------- plans


_MAX_CACHED_DIGESTS = 64  # per plan


def _not_recorded(digest: bytes) -> None:
    """Record nothing: the plan is part of another plan, which is recorded."""


class CallPlan:
    """The actions for one key of the plan cache.

    If ``direct`` is True, operands need no boxing, the result is one tensor and arguments are flat.
    Then ``call`` runs the plan inline."""

    __slots__ = (
        "device",
        "digest",
        "digests",
        "direct",
        "dtype",
        "function",
        "out",
        "picks",
        "record",
        "shape",
        "usual",
        "view",
    )

    def __init__(self) -> None:
        # digest of the call, as `record` adds it to the history of this rank
        self.digest = b""
        # number that the plan does not depend on -> digest of the call with it
        self.digests: dict[Any, bytes] = {}
        self.record: Callable[[bytes], None] = _not_recorded
        self.direct = self.view = False
        # True if the result has the default dtype and is on the cpu. A wrapper has these unless
        # they are passed, and passing them takes a third of making the wrapper.
        self.usual = False
        # True for a view function that picks from a split dim: the owner contributes the data, so
        # the result is a copy.
        self.picks = False
        self.function: Callable[..., Any] | None = None
        self.out: Spec | None = None
        self.shape: torch.Size | None = None
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None

    def digest_with(self, number: Any) -> bytes:
        """Return the digest of a call with this number, and cache it.

        A training step uses the same numbers again. The digest of 0.0 and -0.0 is the same."""
        if len(self.digests) >= _MAX_CACHED_DIGESTS:
            self.digests.clear()
        found = self.digests[number] = self.digest + repr(number).encode()
        return found

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError("a plan that is not direct has its own run")


class RecoverArgsPlan(CallPlan):
    """A plan for torch functions that drop an argument before ``__torch_function__``.

    If the dropped argument was passed, call ``again`` with it. Otherwise run the plan for the call
    without this argument."""

    __slots__ = ("again", "usual")

    def __init__(self, usual: CallPlan, again: Callable[..., Any]) -> None:
        super().__init__()
        self.usual, self.again = usual, again

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = recover_dropped_args(func, kwargs)
        return self.usual.run(func, args, kwargs) if given is kwargs else self.again(*args, **given)


class DefaultDtypePlan(CallPlan):
    """A plan whose result has torch's default dtype, though no operand has a floating dtype.

    An example is an integer divided by an integer. If the default dtype has changed, ``anew`` plans
    the call again. The key of the plan cache does not contain the default dtype, because every
    other call would pay for that."""

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
    return any(o is not None and _broken(o.dtype) for o in outs) and not any(
        _broken(t.dtype) for t in tensors_in(kwargs, tensors_in(args, []))
    )


def _broken(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class ConstantPlan(CallPlan):
    """A plan whose result is no tensor and follows from the specs alone."""

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


class ReturnOperandPlan(CallPlan):
    """A plan that returns operands themselves where the function does.

    Results are numbered as `tensors_in` numbers them. ``inner`` is the plan of the other results,
    if any."""

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
    """A plan that checks indices that every rank has in full, before any rank takes its shard.

    So every rank raises for a bad index, not its owner alone."""

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


def check_range(index: torch.Tensor, allowed: Range) -> None:
    """Raise PyTorch's error for an index that is out of range.

    On an accelerator do nothing: its kernels do not wait for the numbers either."""
    if index.device.type != "cpu" or not index.numel() or torch_private.is_fake(index):
        return
    lowest, highest = torch.aminmax(index)
    if lowest >= 0 and highest < allowed.n:
        return
    wrong = (index < 0) | (index >= allowed.n)
    if allowed.also is not None:
        wrong = wrong & (index != allowed.also)
    if wrong.any():
        raise allowed.error(allowed.text.format(int(index[wrong].reshape(-1)[0])))


class LocalPlan(CallPlan):
    """A plan: box the operands that need it, run on the local tensors, wrap the results."""

    __slots__ = (
        "coordinates",
        "dst",
        "gathers",
        "inplace",
        "name",
        "outs",
        "outside",
        "random",
        "routes",
        "single",
        "src",
        "structure",
        "traffic",
    )

    def __init__(
        self, name: str, src: Sequence[Spec], dst: Sequence[Spec], outs: Sequence[Spec | None]
    ) -> None:
        super().__init__()
        self.name, self.src, self.dst, self.outs = name, tuple(src), tuple(dst), tuple(outs)
        routes = [plan_boxing(a, b) if a is not b else None for a, b in zip(src, dst, strict=True)]
        self.routes = [r if r is not None and r.moves else None for r in routes]
        self.gathers = [
            r is not None and bool(parameter_gather.gather_axes(r.src, r.dst)) for r in self.routes
        ]
        self.traffic = any(r is not None and r.bytes for r in self.routes)
        self.outside = src[0].placement.coordinate(world().rank) is None
        self.inplace = False
        self.random = False
        self.single = False
        self.coordinates: tuple[int, ...] | None = None
        self.structure: Any = None  # the pytree of the results, with meta tensors

    def locals(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the operands' local tensors, boxed to the layouts that the op needs."""
        if self.traffic and log.forbidden():
            for i, route in enumerate(self.routes):
                if route is not None:
                    log.check(route, f"{self.name}: operand {i}")
        out = []
        for i, (t, src, dst) in enumerate(zip(tensors, self.src, self.dst, strict=True)):
            if self.gathers[i] and "_is_param" in t.__dict__ and isinstance(t, GlobalTensor):
                out.append(parameter_gather.gather_param(t, src, dst, f"{self.name}: operand {i}"))
                continue
            local = (
                t._local
                if isinstance(t, GlobalTensor)
                else promote_plain_tensor(t, src, f"operand {i} of {self.name}")
            )
            # The result of a view function may be written into, so its boxed base must not share
            # memory.
            out.append(
                local
                if self.routes[i] is None
                else box(
                    local, src, dst, why=f"{self.name}: operand {i}", alias=not self.view or i > 0
                )
            )
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        locals_ = self.locals(tensors)
        if self.outside:
            if self.random:  # the random stream advances here too
                RANDOM[0](
                    lambda **k: None,
                    (),
                    {"generator": kwargs.get("generator")},
                    (),
                    self.src[0].placement,
                )
            result = nonmember_outputs(self.outs, locals_)
            if self.inplace:
                # without an autograd graph (an optimizer's step) it stays the leaf that it is
                if result[0].requires_grad:
                    tensors[0]._local = result[0]
                return finish_inplace(tensors[0])
        else:
            these = iter(locals_)
            function = self.function or func
            new_args, new_kwargs = replaced(args, these), replaced(kwargs, these)
            try:
                if self.coordinates is not None:
                    out = RANDOM[0](
                        function, new_args, new_kwargs, self.coordinates, self.src[0].placement
                    )
                else:
                    out = (
                        function(*new_args, **new_kwargs)
                        if self.function is None
                        else apply(function, new_args, new_kwargs)
                    )
            except (IndexError, RuntimeError) as error:
                if (alone := as_on_one_device(error, func, args, kwargs, locals_)) is not None:
                    raise alone from None
                raise
            if self.inplace:
                tensors[0]._spec = self.outs[0]
                return finish_inplace(tensors[0])
            if self.single:
                return (
                    GlobalTensor.wrap(out, self.outs[0])
                    if not self.view
                    else self._view(out, self.outs[0], (func, args, kwargs, 0))
                )  # type: ignore[arg-type]
            result = tensors_in(out, [])
        pairs = zip(result, self.outs, strict=True)
        wrap = self._view if self.view else lambda local, spec, call: GlobalTensor.wrap(local, spec)
        return replaced(
            self.structure,
            iter(
                [
                    wrap(local, spec, (func, args, kwargs, i))
                    for i, (local, spec) in enumerate(pairs)
                ]
            ),
        )  # type: ignore[arg-type]

    def _view(
        self,
        local: torch.Tensor,
        spec: Spec,
        call: tuple[Any, tuple[Any, ...], dict[str, Any], int],
    ) -> GlobalTensor:
        """Wrap the ``i``-th result of a view function's call, and link it to its base."""
        func, args, kwargs, i = call
        base, *others = tensors_in(kwargs, tensors_in(args, []))
        if not isinstance(base, GlobalTensor):
            return GlobalTensor.wrap(local, spec)
        if self.routes[0] is None and not self.picks and type(base) in ORDINARY:
            out = GlobalTensor.wrap(local, spec)
            link_alias(base, out)
            return out

        index, places = args[1] if func is _GETITEM else None, repeat(_PLACE)
        # drop the references to the base
        given, named = replaced(args, places), replaced(kwargs, places)

        def taken(source: Any) -> Any:
            these = iter([source, *others])
            return tensors_in(func(*replaced(given, these), **replaced(named, these)), [])[i]

        return RemoteView.of(local, spec, base, taken, index)


class StridedViewPlan(LocalPlan):
    """A plan of a view function whose local tensors may not determine the global memory order.

    The plan notes the strides that one device would have, and these decide (_tensor/strides.py)."""

    __slots__ = ("decides", "known", "quick", "refuses", "rows")

    def __init__(
        self, name: str, src: Sequence[Spec], dst: Sequence[Spec], outs: Sequence[Spec | None]
    ) -> None:
        super().__init__(name, src, dst, outs)
        # note of the base -> notes of the results, or None if one device would copy
        self.known: dict[Note, list[Note] | None] = {}
        # the local tensors decide, on the ranks that have some
        elsewhere = self.outside and not differ(src[0].plain)
        self.refuses = name in _REFUSED and not elsewhere
        self.decides = self.refuses or (name in _COPIED and not elsewhere)
        # the note that `base_note` returns in most cases
        self.rows = (
            Note(by_rows(src[0].shape), True) if self.decides and differ(src[0].plain) else None
        )
        self.quick = len(src) == 1 and self.routes[0] is None and not self.outside

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = args[0] if args and self.quick else None
        if type(base) not in ORDINARY or not self.single or self.picks:
            return self._planned(func, args, kwargs)
        laid = base.__dict__.get("_strides")
        if laid is None:
            if self.rows is not None and base._memory is None and base._local.is_contiguous():
                laid = base.__dict__["_strides"] = self.rows
            else:
                laid = base_note(base, self.decides)
        found = self.known.get(laid)
        if found is None or (self.decides and not laid.exact):
            return self._planned(func, args, kwargs)
        out = GlobalTensor.wrap(
            (self.function or func)(base._local, *args[1:], **kwargs), self.outs[0]
        )  # type: ignore[arg-type]
        link_alias(base, out)
        out.__dict__["_strides"] = found[0]
        return out

    def _planned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call on the general path.

        It is for the first base with these strides, and for results that are no view of the local
        tensor."""
        base, *others = tensors_in(kwargs, tensors_in(args, []))
        if not isinstance(base, GlobalTensor) or others:
            return super().run(func, args, kwargs)
        # drop the references to the base
        rest, named = replaced(args, repeat(_PLACE)), replaced(kwargs, repeat(_PLACE))

        def taken(x: Any) -> Any:
            these = iter([x])
            return func(*replaced(rest, these), **replaced(named, these))

        laid = base_note(base, self.decides)
        notes = self._notes(base, laid, taken) if laid.exact or not self.refuses else []
        if notes is None:
            return self._of_copy(func, args, kwargs, base)
        if self.decides and not laid.exact:
            out = self._of_copy(func, args, kwargs, base)
            return RemoteView.of(out._local, out._spec, base, taken)
        out = super().run(func, args, kwargs)
        for t, found in zip(tensors_in(out, []), notes, strict=True):
            note_strides(t, found)  # type: ignore[arg-type]
        return out

    def _notes(
        self, base: GlobalTensor, laid: Note, taken: Callable[[Any], Any]
    ) -> list[Note] | None:
        """Return the notes of the results, or None if one device would copy.

        Raises torch's error for strides that it refuses."""
        if laid not in self.known:
            exact = laid.exact and self.routes[0] is None and not self.picks
            strides = results(base, laid.strides, taken, copies=self.decides and not self.refuses)
            self.known[laid] = (
                None if strides is None else [Note(found, exact) for found in strides]
            )
        return self.known[laid]

    def _of_copy(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: GlobalTensor
    ) -> GlobalTensor:
        """Run the call on a contiguous copy of the local tensor."""
        these = iter(
            [
                GlobalTensor.wrap(
                    base._local.clone(memory_format=torch.contiguous_format), base._spec
                )
            ]
        )
        out: GlobalTensor = super().run(func, replaced(args, these), replaced(kwargs, these))
        if isinstance(out, RemoteView):
            out.cut()
        out._memory = None  # no other tensor shares the copy
        return out


class LocalPlanList(CallPlan):
    """A plan for operands that need no boxing in a list, the first argument (cat, stack).

    The result is one tensor."""

    __slots__ = ()

    def __init__(self, planned: LocalPlan) -> None:
        super().__init__()
        self.function, self.out = planned.function, planned.outs[0]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands, *others = args
        locals_ = (
            [t._local for t in operands]
            if type(operands) is list
            else tuple([t._local for t in operands])
        )
        if self.function is None:
            return GlobalTensor.wrap(func(locals_, *others, **kwargs), self.out)  # type: ignore[arg-type]
        return GlobalTensor.wrap(apply(self.function, (locals_, *others), kwargs), self.out)  # type: ignore[arg-type]


class InPlacePlan(CallPlan):
    """A plan for an in-place call whose operands need no boxing and are flat among the arguments.

    The first operand is the target."""

    __slots__ = ()

    def __init__(self, planned: LocalPlan) -> None:
        super().__init__()
        self.function, self.out = planned.function, planned.outs[0]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        locals_ = [a._local if type(a) in ORDINARY else a for a in args]
        if kwargs:
            kwargs = {k: v._local if type(v) in ORDINARY else v for k, v in kwargs.items()}
        (self.function or func)(*locals_, **kwargs)
        target = args[0]
        target._spec = self.out
        if target._memory is not None:  # as `mark_written` does
            target._memory.writes += 1
        return target


class LocalPlanMany(CallPlan):
    """A plan for flat operands that need no boxing, with several results (split, chunk, topk)."""

    __slots__ = ("kind", "outs")

    def __init__(self, planned: LocalPlan) -> None:
        super().__init__()
        self.function, self.outs, self.view, self.kind = (
            planned.function,
            planned.outs,
            planned.view,
            type(planned.structure),
        )

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local_args = tuple([a._local if isinstance(a, GlobalTensor) else a for a in args])
        local_kwargs = {
            k: a._local if isinstance(a, GlobalTensor) else a for k, a in kwargs.items()
        }
        out = (
            func(*local_args, **local_kwargs)
            if self.function is None
            else apply(self.function, local_args, local_kwargs)
        )
        wrapped = [
            GlobalTensor.wrap(local, spec) for local, spec in zip(out, self.outs, strict=True)
        ]  # type: ignore[arg-type]
        if self.view:
            for t in wrapped:
                link_alias(args[0], t)
        return self.kind(wrapped)


def box_partial_target(name: str, target: GlobalTensor) -> None:
    """Box a partial in-place target (maximum, norm) to broadcast before ``name`` writes to it.

    Raises InplaceError if the user chose its sbp, if it has aliases, or if it is a leaf that
    requires grad."""
    if (
        target._pinned
        or has_aliases(target)
        or has_partial_alias(target)
        or (target._local.is_leaf and target._local.requires_grad)
    ):
        raise inplace_error(name, target._spec)
    whole = target._spec.replace(
        layout=[broadcast if e.is_partial else e for e in target._spec.layout]
    )
    with torch.set_grad_enabled(torch.is_grad_enabled() or target._local.requires_grad):
        target._local = box(target._local, target._spec, whole, why=name, alias=False)
    target._spec = whole


def unpartial_norm_target(name: str, target: GlobalTensor) -> None:
    """Box a target that is partial as a norm to broadcast before ``name`` writes to it.

    Local norms are never less than zero, but ``name`` may write any values."""
    if any(e.reduce.startswith("norm") for e in target._spec.layout):
        box_partial_target(name, target)


class MoveTargetPlan(LocalPlan):
    """A plan for an in-place op whose target has become partial and cannot stay so.

    The target is boxed to a layout in which the op can run. Raises InplaceError if the user chose
    the target's sbp, or if it is a leaf that requires grad."""

    __slots__ = ()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        target = tensors[0]
        if target._pinned or (target._local.is_leaf and target._local.requires_grad):
            raise inplace_error(self.name, target._spec)
        # An alias of the target would not follow: write the result back in the partial layout.
        if has_aliases(target) or has_partial_alias(target):
            return ReplicatedPlan(self.name, self.src, True).run(func, args, kwargs)
        # The program did not ask for this boxing. So also under no_grad, gradients of the boxed
        # values are recorded.
        with torch.set_grad_enabled(torch.is_grad_enabled() or target._local.requires_grad):
            locals_ = self.locals(tensors)
            if not self.outside:
                # the boxed tensor may be a view, or part of a buffer
                locals_[0] = locals_[0].clone()
        if self.outside:
            target._local = nonmember_outputs(self.outs, locals_)[0]
        else:
            these = iter(locals_)
            (self.function or func)(*replaced(args, these), **replaced(kwargs, these))
            target._local = locals_[0]
        target._spec = self.dst[0]
        return finish_inplace(target)


class ReplicatedPlan(CallPlan):
    """The broadcast fallback: every operand is replicated on every rank.

    It runs functions without a rule, and calls whose result shapes depend on data."""

    __slots__ = ("inplace", "name", "placement", "src")

    def __init__(self, name: str, src: Sequence[Spec], inplace: bool) -> None:
        super().__init__()
        self.name, self.src, self.placement, self.inplace = (
            name,
            tuple(src),
            src[0].placement,
            inplace,
        )

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        if self.inplace and any(e.is_partial for e in self.src[0].layout):
            if not has_partial_alias(tensors[0]):  # type: ignore[arg-type]
                box_partial_target(self.name, tensors[0])  # type: ignore[arg-type]
                return func(*args, **kwargs)
            if tensors[0]._pinned:  # type: ignore[attr-defined]
                raise inplace_error(self.name, self.src[0])
        inner = LocalPlan(self.name, self.src, [s.replicated() for s in self.src], [])
        locals_ = inner.locals(tensors)
        if self.inplace and not inner.outside:
            locals_[0] = locals_[0].clone()  # the boxed tensor may be a view, or part of a buffer
        out: Any = None
        if not inner.outside:
            these = iter(locals_)
            before = [-1 if t.is_inference() else t._version for t in locals_]
            out = func(*replaced(args, these), **replaced(kwargs, these))
            for i, version in enumerate(before):
                if (
                    inner.routes[i] is not None
                    and version >= 0
                    and locals_[i]._version != version
                    and not (self.inplace and i == 0)
                ):
                    # The call wrote into a boxed copy (running statistics, for example): write the
                    # values back to the operand's local tensor.
                    with torch.no_grad():
                        tensors[i]._local.copy_(
                            box(locals_[i], inner.dst[i], self.src[i], why=self.name)
                        )  # type: ignore[attr-defined]
                    mark_written(tensors[i])
        out = shared(out, self.placement, inner.outside, locals_)
        if self.inplace:
            target = tensors[0]
            value = out if isinstance(out, torch.Tensor) else locals_[0]
            if not inner.outside and value.shape != target.shape:
                raise InplaceError(
                    f"in-place {self.name} makes {list(value.shape)} of {list(target.shape)}, but "
                    f"a global tensor has a part of its own shape on each rank: "
                    "use the out-of-place form"
                )
            back = box(value, inner.dst[0], self.src[0], why=self.name)
            if not inner.outside:
                target._local.copy_(back)  # type: ignore[attr-defined]
            return finish_inplace(target)
        return wrapped_whole(out, self.placement, inner.outside)


def shared(out: Any, placement: Placement, outside: bool, locals_: list[torch.Tensor]) -> Any:
    """Send the result's structure, shapes and dtypes to the ranks outside the placement.

    A result that is no tensor is sent by value. The call is collective over all ranks unless the
    placement has all of them."""
    if len(placement.flat) == world().size:
        return out
    everyone = world().comm(tuple(range(world().size)))
    mine = (
        None
        if outside
        else replaced(out, iter([_ShapeHeader(t.shape, t.dtype) for t in tensors_in(out, [])]))
    )
    told = everyone.all_gather_object(mine)[placement.flat[0]]
    return _materialise(told, locals_) if outside else out


def wrapped_whole(out: Any, placement: Placement, outside: bool) -> Any:
    """Wrap the result of replicated operands, in the form that `shared` returns."""
    whole = [broadcast] * placement.axes
    results = [(t, t._shape if outside else t.shape) for t in tensors_in(out, [])]  # type: ignore[attr-defined]
    return replaced(
        out,
        iter(
            [
                GlobalTensor.wrap(t, Spec.make(shape, t.dtype, placement, whole))
                for t, shape in results
            ]
        ),
    )


class _ShapeHeader:
    """A shape and dtype of a tensor, as sent to ranks outside a placement."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype


def _materialise(told: Any, locals_: list[torch.Tensor]) -> Any:
    if isinstance(told, _ShapeHeader):
        out = nonmember_outputs([None], locals_, told.dtype)[0]
        out._shape = told.shape  # type: ignore[attr-defined]
        return out
    if isinstance(told, (tuple, list)):
        parts = [_materialise(v, locals_) for v in told]
        return type(told)(parts) if type(told) in (tuple, list) else rebuilt_tuple(told, parts)  # type: ignore[arg-type]
    return told


class _NonMember(torch.autograd.Function):
    """An autograd placeholder on a rank outside the placement, which computes nothing.

    Its backward joins the same boxings in the same order as that of the other ranks."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, device: torch.device, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.inputs = [(t.shape, t.dtype, t.device) for t in inputs]
        # a checkpoint recomputes its region here when the ranks that compute do
        ctx.save_for_backward(NOTHING)
        return torch.empty(0, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018
        return (
            None,
            None,
            *[
                torch.zeros(s, dtype=d, device=v) if d.is_floating_point or d.is_complex else None
                for s, d, v in ctx.inputs
            ],
        )


def nonmember_outputs(
    outs: Sequence[Spec | None], locals_: list[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the placeholders that a rank outside the placement holds for a call's results.

    They are empty, and linked to the operands in the autograd graph where gradients are
    recorded."""
    out = []
    for spec in outs:
        kind = spec.dtype if spec is not None else dtype
        grad = (
            torch.is_grad_enabled()
            and any(t.requires_grad for t in locals_)
            and (kind.is_floating_point or kind.is_complex)
        )  # type: ignore[union-attr]
        device = (
            world().outside(spec.placement.type)
            if spec is not None
            else next((t.device for t in locals_), torch.device("cpu"))
        )
        out.append(
            _NonMember.apply(kind, device, *locals_)
            if grad
            else torch.empty(0, dtype=kind, device=device)
        )
    return out
