"""Plans of calls with a rule: box the operands, run on the local tensors, wrap the results.

_ops/sharding_propagation.py makes the plans. `dispatch` itself runs the plans that need no boxing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch

from .._base.overridable import apply
from .._base.pytree import replaced, tensors_in
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.gradients import parameter_gather
from .._tensor.plain_operands import promote_plain_tensor
from .._tensor.strides import (
    Note,
    base_note,
    by_rows,
    device_strides,
    differ,
    has_single_element_parts,
    note_of,
    note_strides,
    results,
)
from .._tensor.view_tracking import (
    RemoteView,
    finish_inplace,
    has_aliases,
    has_partial_alias,
    link_alias,
)
from ..boxing import box, log, plan_boxing
from ..distributed.world import world
from ..errors import InplaceError
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .call_plan import CallPlan, as_on_one_device
from .nonmember_placeholders import nonmember_outputs

__all__ = [
    "REFUSED",
    "InPlacePlan",
    "LocalPlan",
    "LocalPlanList",
    "LocalPlanMany",
    "NotedViewPlan",
    "ReshapePlan",
    "StridedViewPlan",
    "box_partial_target",
    "inplace_error",
    "local_tensors_mislead",
    "register_random",
    "unpartial_norm_target",
]


_GETITEM = torch.Tensor.__getitem__

#: Functions that torch refuses because of the strides of their base, and functions that copy then.
REFUSED, COPIED = (
    frozenset(("view", "unflatten", "view_as_complex")),
    frozenset(("reshape", "flatten", "ravel")),
)

_PLACEHOLDER = torch.empty(0)  # placeholder for a tensor
_MAX_BASES = 64  # strides of bases, per plan


_run_random: Callable[..., Any] | None = None


def register_random(run: Callable[..., Any]) -> None:
    """Let plans call random functions through ``run``, as globaltensor._ops.random_streams does.

    ``run(function, args, kwargs, coordinates along split axes, placement)`` returns the result.
    """
    global _run_random
    _run_random = run


def inplace_error(name: str, spec: Spec) -> InplaceError:
    """Return the error for an in-place op that would need another sbp of its target."""
    return InplaceError(
        f"in-place {name} would need the sbp of its target changed, which an in-place op must not "
        f"do\n"
        f"  target {spec!r}\n"
        f"use the out-of-place form, or box the target first: x = x.to_global(sbp=...)"
    )


class _ViewCall(NamedTuple):
    """A call of a view function; ``tensors`` are those among its arguments, the base first."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]


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
        "takes_sparse",
        "traffic",
        "unread",
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
        # True if the function may take a sparse operand as it is, without a sparse result: a
        # contraction. Another one takes the dense values, because global tensors are dense.
        self.takes_sparse = True
        self.unread: frozenset[int] = frozenset()  # operands whose values do not matter
        self.structure: Any = None  # the pytree of the results, with meta tensors

    def locals(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the operands' local tensors, boxed to the layouts that the op needs."""
        if self.traffic and log.forbidden():
            for i, route in enumerate(self.routes):
                if route is not None:
                    log.check(route, f"{self.name}: operand {i}")
        out = []
        for i, (t, src, dst) in enumerate(zip(tensors, self.src, self.dst, strict=True)):
            if (
                self.gathers[i]
                and "_is_param" in t.__dict__
                and isinstance(t, GlobalTensor)
                and type(t) in ORDINARY
            ):
                out.append(parameter_gather.gather_param(t, src, dst, f"{self.name}: operand {i}"))
                continue
            if isinstance(t, GlobalTensor):
                local = t._local
            else:
                local = promote_plain_tensor(
                    t, src, f"operand {i} of {self.name}", i not in self.unread
                )
                if local.layout is not torch.strided and (
                    not self.takes_sparse or self.routes[i] is not None
                ):
                    local = local.to_dense()
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
                _run_random(
                    lambda **k: None,
                    (),
                    {"generator": kwargs.get("generator")},
                    (),
                    self.src[0].placement,
                )
            if self.inplace:
                _refuse_leaf(tensors[0], self.name)
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
                    out = _run_random(
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
                if self.view:
                    call = _ViewCall(func, args, kwargs, tensors)
                    return self._view(out, self.outs[0], call, 0)  # type: ignore[arg-type]
                wrapped_one = GlobalTensor.wrap(out, self.outs[0])  # type: ignore[arg-type]
                if self.order is not None:
                    self.order.arrange(func, args, kwargs, tensors, [wrapped_one])
                return wrapped_one
            result = tensors_in(out, [])
        pairs = zip(result, self.outs, strict=True)
        if self.view:
            call = _ViewCall(func, args, kwargs, tensors)
            wrapped = [self._view(local, spec, call, i) for i, (local, spec) in enumerate(pairs)]  # type: ignore[arg-type]
        else:
            wrapped = [GlobalTensor.wrap(local, spec) for local, spec in pairs]  # type: ignore[arg-type]
            if self.order is not None:
                self.order.arrange(func, args, kwargs, tensors, wrapped)
        return replaced(self.structure, iter(wrapped))

    def _view(
        self,
        local: torch.Tensor,
        spec: Spec,
        call: _ViewCall,
        i: int,
    ) -> GlobalTensor:
        """Wrap the ``i``-th result of a view function's call, and link it to its base."""
        base = call.tensors[0]
        if type(base) in ORDINARY and self.routes[0] is None and not self.picks:
            out = GlobalTensor.wrap(local, spec)
            link_alias(base, out)  # type: ignore[arg-type]
            return out
        if not isinstance(base, GlobalTensor):
            return GlobalTensor.wrap(local, spec)

        func, args, kwargs, tensors = call
        others = tensors[1:]
        index, places = args[1] if func is _GETITEM else None, repeat(_PLACEHOLDER)
        # drop the references to the base
        given, named = replaced(args, places), replaced(kwargs, places)

        def taken(source: Any) -> Any:
            these = iter([source, *others])
            return tensors_in(func(*replaced(given, these), **replaced(named, these)), [])[i]

        return RemoteView.of(local, spec, base, taken, index)


class ReshapePlan(LocalPlan):
    """A plan of a function that copies what it cannot view: reshape and flatten.

    On one device the strides decide whether it copies. Here the local tensor may be viewed, or a
    view that needs communication be made, where one device copies. The result is independent then.
    """

    __slots__ = ("copies_by_strides", "local_views")

    def __init__(
        self, name: str, src: Sequence[Spec], dst: Sequence[Spec], outs: Sequence[Spec | None]
    ) -> None:
        super().__init__(name, src, dst, outs)
        # strides of the base on one device -> True if the function copies there
        self.copies_by_strides: dict[tuple[int, ...], bool] = {}
        # the keys (`_key`) of bases that the local function views, as one device does
        self.local_views: set[Any] = set()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = args[0] if args else None
        if (
            not self.local_views
            or type(base) not in ORDINARY
            or _layout_key(base) not in self.local_views
        ):
            return super().run(func, args, kwargs)
        local = (self.function or func)(base._local, *args[1:], **kwargs)
        out = GlobalTensor.wrap(local, self.outs[0])  # type: ignore[arg-type]
        link_alias(base, out)
        return out

    def _view(
        self,
        local: torch.Tensor,
        spec: Spec,
        call: _ViewCall,
        i: int,
    ) -> GlobalTensor:
        func, args, kwargs, (base, *_) = call
        if not isinstance(base, GlobalTensor):
            return GlobalTensor.wrap(local, spec)
        strides = device_strides(base)
        if strides not in self.copies_by_strides:
            places = repeat(_PLACEHOLDER)
            given, named = replaced(args, places), replaced(kwargs, places)

            def taken(source: Any) -> Any:
                these = iter([source])
                return func(*replaced(given, these), **replaced(named, these))

            if len(self.copies_by_strides) >= _MAX_BASES:
                self.copies_by_strides.clear()
            self.copies_by_strides[strides] = results(base, strides, taken, copies=True) is None
        if self.copies_by_strides[strides]:
            if self.routes[0] is None and (local._is_view() or local.is_inference()):
                local = local.clone(memory_format=torch.contiguous_format)
            return GlobalTensor.wrap(local, spec)
        if self.routes[0] is None and type(base) in ORDINARY and not self.outside:
            if len(self.local_views) >= _MAX_BASES:
                self.local_views.clear()
            self.local_views.add(_layout_key(base))
        return super()._view(local, spec, call, i)


class NotedViewPlan(LocalPlan):
    """A plan of a recorded view function whose result notes the strides that one device has.

    The recorded program does not depend on them, but `ReshapePlan` needs them."""

    __slots__ = ()

    def _view(
        self,
        local: torch.Tensor,
        spec: Spec,
        call: _ViewCall,
        i: int,
    ) -> GlobalTensor:
        func, args, kwargs, (base, *others) = call
        out = super()._view(local, spec, call, i)
        if isinstance(base, GlobalTensor) and not others:
            places = repeat(_PLACEHOLDER)
            given, named = replaced(args, places), replaced(kwargs, places)

            def taken(source: Any) -> Any:
                these = iter([source])
                return func(*replaced(given, these), **replaced(named, these))

            try:
                strides = results(base, device_strides(base), taken, copies=False)
            except RuntimeError:  # torch refuses what the local tensors allow
                return out
            if strides is not None:
                note_strides(out, Note(strides[i], False))
        return out


def _layout_key(base: GlobalTensor) -> tuple[Any, ...]:
    """Return what determines the strides of an ordinary tensor on one device."""
    return note_of(base), base._local.stride(), base._memory is None


def local_tensors_mislead(name: str, src: Spec, out: Spec, communicates: bool) -> bool:
    """Return True if a function may copy on one device, but not on the local tensors.

    ``communicates``: its base is boxed, or is a view that needed communication.
    """
    return (
        name in COPIED
        and src.shape != out.shape
        and len(src.shape) > 1
        and (communicates or has_single_element_parts(src.plain))
    )


class StridedViewPlan(LocalPlan):
    """A plan of a view function whose local tensors may not determine the global memory order.

    The strides that the tensor would have on one device determine the result. The plan notes them
    (_tensor/strides.py)."""

    __slots__ = ("bases", "copies", "decides", "known", "quick", "refuses", "rows", "tells")

    def __init__(
        self, name: str, src: Sequence[Spec], dst: Sequence[Spec], outs: Sequence[Spec | None]
    ) -> None:
        super().__init__(name, src, dst, outs)
        # note of the base -> notes of the results, or None if the function would copy on one device
        self.known: dict[Note, list[Note] | None] = {}
        # the local tensors decide, on the ranks that have some
        elsewhere = self.outside and not differ(src[0].plain)
        # every tensor can be viewed in the shape and dtype that it has
        same = outs[0] is not None and (outs[0].shape, outs[0].dtype) == (
            src[0].shape,
            src[0].dtype,
        )
        self.refuses = name in REFUSED and not elsewhere and not same
        self.copies = name in COPIED and not same
        self.decides = self.refuses or (self.copies and not elsewhere)
        # the note that `base_note` returns in most cases
        self.rows = (
            Note(by_rows(src[0].shape), True) if self.decides and differ(src[0].plain) else None
        )
        self.quick = len(src) == 1 and self.routes[0] is None and not self.outside
        # True if the local tensor shows the memory order of the base
        self.tells = not differ(src[0].plain)
        # (strides of the local tensor, True if it shares no memory) -> the note of such a base
        self.bases: dict[Any, Note] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base = args[0] if args and self.quick else None
        if type(base) not in ORDINARY or self.picks:
            return self._run_general(func, args, kwargs)
        laid = base.__dict__.get("_strides")
        if laid is None:
            if self.rows is not None and base._memory is None and base._local.is_contiguous():
                laid = base.__dict__["_strides"] = self.rows
            else:
                laid = self._base_note(base)
        if laid not in self.known or (self.decides and not laid.exact):
            return self._run_general(func, args, kwargs)
        result_notes, function = self.known[laid], self.function or func
        if result_notes is None:
            copy = base._local.clone(memory_format=torch.contiguous_format)
            return GlobalTensor.wrap(function(copy, *args[1:], **kwargs), self.outs[0])  # type: ignore[arg-type]
        found = function(base._local, *args[1:], **kwargs)
        if self.single:
            out = GlobalTensor.wrap(found, self.outs[0])  # type: ignore[arg-type]
            link_alias(base, out)
            out.__dict__["_strides"] = result_notes[0]
            return out
        outs = []
        for local, spec, note in zip(found, self.outs, result_notes, strict=True):
            outs.append(GlobalTensor.wrap(local, spec))  # type: ignore[arg-type]
            link_alias(base, outs[-1])
            outs[-1].__dict__["_strides"] = note
        return type(self.structure)(outs)

    def _base_note(self, base: GlobalTensor) -> Note:
        """Return `base_note` of an ordinary base without a note."""
        if not self.tells or "_origin" in base.__dict__:
            return base_note(base, self.decides)
        shown = base._local.stride(), base._memory is None
        laid = self.bases.get(shown)
        if laid is None:
            if len(self.bases) >= _MAX_BASES:
                self.bases.clear()
            laid = self.bases[shown] = base_note(base, self.decides)
        return laid

    def _run_general(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call on the general path.

        It is needed for the first base with some strides, and for results that are not a view of
        the local tensor."""
        base, *others = tensors_in(kwargs, tensors_in(args, []))
        if not isinstance(base, GlobalTensor) or others:
            return super().run(func, args, kwargs)
        # drop the references to the base
        rest, named = replaced(args, repeat(_PLACEHOLDER)), replaced(kwargs, repeat(_PLACEHOLDER))

        def taken(x: Any) -> Any:
            these = iter([x])
            return func(*replaced(rest, these), **replaced(named, these))

        laid = base_note(base, self.decides)
        notes = self._result_notes(base, laid, taken)
        if notes is None:
            return self._run_on_copy(func, args, kwargs, base)
        if self.decides and not laid.exact:
            out = self._run_on_copy(func, args, kwargs, base)
            return RemoteView.of(out._local, out._spec, base, taken)
        out = super().run(func, args, kwargs)
        for t, found in zip(tensors_in(out, []), notes, strict=True):
            note_strides(t, found)  # type: ignore[arg-type]
        return out

    def _result_notes(
        self, base: GlobalTensor, laid: Note, taken: Callable[[Any], Any]
    ) -> list[Note] | None:
        """Return the notes of the results, or None if the function would copy on one device.

        Raises torch's error for strides that torch refuses."""
        if laid not in self.known:
            exact = laid.exact and self.routes[0] is None and not self.picks
            strides = results(base, laid.strides, taken, copies=self.copies)
            if len(self.known) >= _MAX_BASES:
                self.known.clear()
            self.known[laid] = (
                None if strides is None else [Note(found, exact) for found in strides]
            )
        return self.known[laid]

    def _run_on_copy(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: GlobalTensor
    ) -> GlobalTensor:
        """Run the call on a contiguous copy of the local tensor."""
        replacements = iter(
            [
                GlobalTensor.wrap(
                    base._local.clone(memory_format=torch.contiguous_format), base._spec
                )
            ]
        )
        out: GlobalTensor = super().run(
            func, replaced(args, replacements), replaced(kwargs, replacements)
        )
        if isinstance(out, RemoteView):
            out.detach_from_base()
        out._memory = None  # no other tensor shares the copy
        return out


class LocalPlanList(CallPlan):
    """A plan for a list of operands that need no boxing (cat, stack).

    The list is the first argument, and the result is one tensor."""

    __slots__ = ()

    def __init__(self, planned: LocalPlan) -> None:
        super().__init__()
        self.function, self.out, self.order = planned.function, planned.outs[0], planned.order

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands, *others = args
        locals_ = (
            [t._local for t in operands]
            if type(operands) is list
            else tuple([t._local for t in operands])
        )
        if self.function is None:
            local = func(locals_, *others, **kwargs)
        else:
            local = apply(self.function, (locals_, *others), kwargs)
        out = GlobalTensor.wrap(local, self.out)  # type: ignore[arg-type]
        if self.order is not None:
            self.order.arrange(func, args, kwargs, operands, [out])
        return out


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
        self.function, self.outs, self.view, self.kind, self.order = (
            planned.function,
            planned.outs,
            planned.view,
            type(planned.structure),
            planned.order,
        )

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # the operands are ordinary: isinstance with a class of tensors is slow
        local_args = [a._local if type(a) in ORDINARY else a for a in args]
        local_kwargs = {k: a._local if type(a) in ORDINARY else a for k, a in kwargs.items()}
        out = (
            func(*local_args, **local_kwargs)
            if self.function is None
            else apply(self.function, local_args, local_kwargs)
        )
        pairs = zip(out, self.outs, strict=True)
        wrapped = [GlobalTensor.wrap(local, spec) for local, spec in pairs]  # type: ignore[arg-type]
        if self.view and wrapped:
            link_alias(args[0], wrapped[0])
            memory = wrapped[0]._memory
            for t in wrapped:
                t._memory = memory
        elif self.order is not None:
            self.order.arrange(
                func, args, kwargs, tensors_in(kwargs, tensors_in(args, [])), wrapped
            )
        return self.kind(wrapped)


def _refuse_leaf(target: torch.Tensor, name: str) -> None:
    """Raise torch's error for a write into a leaf, on a rank that does not write itself."""
    if torch.is_grad_enabled() and target.requires_grad and target.is_leaf:
        of_view = "a view of " if name.startswith("__setitem__") else ""
        raise RuntimeError(
            f"{of_view}a leaf Variable that requires grad is being used in an in-place operation."
        )


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


def unpartial_norm_target(name: str, target: GlobalTensor, nonnegative: bool = False) -> None:
    """Box a target that is partial as a norm to broadcast before ``name`` writes to it.

    Local norms are never less than zero, but ``name`` may write any values. ``nonnegative``: it
    writes none less than zero, so a target with aliases stays as it is."""
    if any(e.reduce.startswith("norm") for e in target._spec.layout) and not (
        nonnegative and has_partial_alias(target)
    ):
        box_partial_target(name, target)
