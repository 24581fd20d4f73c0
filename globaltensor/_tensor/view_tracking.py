"""Views that need communication. The dispatcher and `GlobalTensor` call these functions.

A view of a tensor shares its memory, so a write into one shows in the other. Where a view's values
are on other ranks than the view itself (``x[0]`` of a split ``x``), each has memory of its own. A
write into the view is then applied to its base too. The view is computed again when it is read
after a write into its base, or into another view of the base.

The tensors that share memory, and the writes into it, are counted by function calls, so all ranks
count alike. Local tensors would not do: a rank may hold none of the written elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from .._base import torch_private
from .._base.patches import patch
from ..boxing import box
from ..distributed.world import world
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .global_tensor import AliasGroup, GlobalTensor, SlottedGlobalTensor
from .gradients.reducer import observe_gradients
from .history import detached_serial
from .pending_tensor import PendingTensor
from .strides import copy_noted_strides, device_strides

__all__ = [
    "RemoteView",
    "alias_of",
    "finish_inplace",
    "has_aliases",
    "has_partial_alias",
    "link_alias",
    "mark_written",
]


def link_alias(source: GlobalTensor, out: GlobalTensor, viewed: bool = True) -> None:
    """Make ``out`` an alias of ``source`` that sees writes into it.

    ``viewed``: it is a view, which must follow if the local tensor is replaced. A detached tensor
    need not follow.
    """
    memory = source._memory
    if memory is None:
        memory = source._memory = AliasGroup()
    memory.viewed = memory.viewed or viewed
    out._memory = memory


def has_aliases(x: GlobalTensor) -> bool:
    """Return True if ``x`` has aliases that would go stale if its local tensor were replaced.

    It is a view then, or the base of one.
    """
    return x._memory is not None and x._memory.viewed and not isinstance(x, RemoteView)


def has_partial_alias(x: GlobalTensor) -> bool:
    """Return True if a partial ``x`` may have an alias, a view or a detached tensor.

    In-place writes must then keep it partial.
    """
    return (
        x._memory is not None
        and not isinstance(x, RemoteView)
        and any(e.is_partial for e in x._spec.layout)
    )


def mark_written(x: Any) -> None:
    """Record a write into ``x`` by code that did not check whether it is a view."""
    if isinstance(x, GlobalTensor) and x._memory is not None:
        x._memory.writes += 1


_AMBIGUOUS = (  # torch's words
    " with grad mode enabled. Given that this use case is ambiguous and error-prone, it is "
    "forbidden. You can clarify your code by moving both the view and the inplace either both "
    "inside the no_grad block (if you don't want the inplace to be tracked) or both outside (if "
    "you want the inplace to be tracked)."
)
_UNTRACKED_WRITE = "A view was created in no_grad mode and is being modified inplace" + _AMBIGUOUS
_UNTRACKED_READ = (
    "A view was created in no_grad mode and its base or another view of its base has been "
    "modified inplace" + _AMBIGUOUS
)
#: (an alias of the base that no other code changes; the function that computes the view of it; the
#: index where that is ``source[index]``; True if gradients were recorded).
Origin = tuple[GlobalTensor, Callable[[GlobalTensor], GlobalTensor], Any, bool]


class RemoteView(PendingTensor):
    """A view of another tensor that needed communication.

    It is pending after a write into its base.
    """

    __slots__ = ()

    @staticmethod
    def of(
        local: torch.Tensor,
        spec: Spec,
        source: GlobalTensor,
        taken: Callable[[GlobalTensor], GlobalTensor],
        index: Any = None,
    ) -> GlobalTensor:
        """Return the view ``taken(source)``, whose local tensor is ``local``.

        ``index``: the index where that is ``source[index]``.
        """
        # The alias of a base without a graph follows it, because a later write may give the base
        # one. A view without gradient must not keep alive the graph that its base has.
        detached = not local.requires_grad and source.requires_grad and not source.is_leaf
        origin = alias_of(source, detached), taken, index, torch.is_grad_enabled()
        out = torch_private.make_wrapper(
            RemoteView, spec.shape, dtype=spec.dtype, device=local.device
        )
        link_alias(source, out)
        out._spec, out._serial = spec, 0
        if not torch.is_grad_enabled() and (local.is_floating_point() or local.is_complex()):
            out.__dict__["_untracked"] = True
            if source.requires_grad:
                local = _untracked_copy(local)
        elif local.requires_grad and torch_private.share_storage(local, source._stored):
            # A write into the view is repeated on its base, which autograd would count as a second
            # write into what the first one has saved.
            local = local.clone()
        out.rebind(local, origin)
        return cast(GlobalTensor, out)

    def alias(self, detached: bool) -> GlobalTensor:
        """Return another tensor that is the same view."""
        source, taken, index, grad = self.__dict__["_origin"]
        local = self._local.detach() if detached else self._local
        out = torch_private.make_wrapper(
            RemoteView, self._spec.shape, dtype=self._spec.dtype, device=local.device
        )
        link_alias(self, out)
        out._spec = self._spec
        out._serial = detached_serial(self) if detached else self._serial
        if detached:
            source, grad = alias_of(source, detached=True), False
        elif "_untracked" in self.__dict__:
            out.__dict__["_untracked"] = True
        out.rebind(local, (source, taken, index, grad))
        return cast(GlobalTensor, out)

    def rebind(self, local: torch.Tensor, origin: Origin) -> None:
        """Show what ``origin`` describes from now on, which is ``local`` at present."""
        self._local = local
        self.__dict__.update(_origin=origin, _seen=self._memory.writes)  # type: ignore[union-attr]

    def _is_pending(self) -> bool:
        return bool(self.__dict__["_seen"] != self._memory.writes)  # type: ignore[union-attr]

    def _materialize(self) -> GlobalTensor:
        """Compute the view from its base again, if the base was written into. Collective then."""
        if self._is_pending():
            origin = source, taken, _, grad = self.__dict__["_origin"]
            with torch.set_grad_enabled(grad):
                # this may be another such view, or a mean whose spec changes here
                anew = taken(source)._materialize()
                local = anew._local
                if anew._spec is not self._spec:
                    local = box(
                        local,
                        anew._spec,
                        self._spec,
                        why="a view of what was written into",
                        alias=False,
                    )
            stored, untracked = self._stored, "_untracked" in self.__dict__
            if not grad and not untracked:
                # it was detached: on some ranks it may be a view, which autograd would refuse to
                # write into
                local = local.detach()
            if untracked and not stored.requires_grad and source.requires_grad:
                stored = _untracked_copy(local)  # the write gave its base a graph
            if stored.requires_grad and (
                untracked or (stored.is_leaf and not source.requires_grad)
            ):
                # autograd knows the view by this local tensor, and counts the write as its own
                with torch.no_grad():
                    local = stored.copy_(local)
            if stored is not local and stored.retains_grad and local.grad_fn is not None:
                local.retain_grad()  # torch keeps the gradient of a tensor's last version
                observe_gradients(local)
            self.rebind(local, origin)
        return self

    @property
    def requires_grad(self) -> bool:
        """True if autograd tracks the view. The answer needs no update of its values."""
        stored, untracked = self._stored, "_untracked" in self.__dict__
        if stored.requires_grad and (untracked or not self._is_pending() or stored.is_leaf):
            return True
        differentiable = self.is_floating_point() or self.is_complex()
        return bool(differentiable and self.__dict__["_origin"][0].requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        vars(GlobalTensor)["requires_grad"].__set__(self, value)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True if no operation with a gradient made the view. Its values need no update for that.

        Raises RuntimeError where torch does: for a view that was made without gradients, whose base
        was written into.
        """
        if not self._is_pending():
            return bool(self._stored.is_leaf)
        if "_untracked" in self.__dict__ and self.requires_grad:
            raise RuntimeError(_UNTRACKED_READ)
        return not self.__dict__["_origin"][0].requires_grad

    def keep_as_leaf(self) -> None:
        """Give the view its own memory, which becomes a leaf. It still follows its base."""
        self._local = self._local.detach().clone()

    def detach_origin(self) -> None:
        """Detach the view and its base from the graph."""
        source, taken, index, _ = self.__dict__["_origin"]
        self.__dict__.pop("_untracked", None)
        local = self._materialize()._local.detach()
        self.rebind(local, (alias_of(source, detached=True), taken, index, False))

    def detach_from_base(self) -> None:
        """Make the view an independent tensor."""
        local = self._materialize()._local
        del self.__dict__["_origin"], self.__dict__["_seen"]
        self.__class__ = SlottedGlobalTensor  # type: ignore[assignment]
        self._local, self._memory = local, None

    def write_through(self) -> None:
        """Write the view's values into its base too.

        Raises RuntimeError where torch does: for a view without gradients of a base that has some,
        and a write for which gradients are recorded."""
        local = self._stored
        source, taken, index, _ = origin = self.__dict__["_origin"]
        if (
            "_untracked" in self.__dict__
            and torch.is_grad_enabled()
            and (local.requires_grad or source.requires_grad)
        ):
            self._local = local.detach()
            raise RuntimeError(_UNTRACKED_WRITE)
        # a copy: the local tensors of the view and of its base may overlap on some rank
        value = GlobalTensor.wrap(local.clone(), self._spec)
        if index is not None:
            source[index] = value
        elif value.dtype != source.dtype:
            source.copy_(_with_view_written(source, taken, value))
        else:
            ids: Any = torch.arange(source.numel()).view(source.shape)
            shown = taken(ids)
            if _overlaps(shown):
                source.copy_(_copy_with_changes(source, shown, value, taken(source)))
                # the view is computed again: other positions of a written element show it too
                return
            source.copy_(source.put(shown, value))
        self.rebind(local, origin)


def _untracked_copy(local: torch.Tensor) -> torch.Tensor:
    """Return a copy that autograd takes for a view made without gradients of a base with some.

    So torch itself answers and refuses as it does for a view on one device.
    """
    if torch.is_inference_mode_enabled():
        return local
    base = local.detach().clone().requires_grad_()
    with torch.no_grad():
        return base.view_as(base)


def _with_view_written(
    source: GlobalTensor, taken: Callable[[Any], Any], value: GlobalTensor
) -> GlobalTensor:
    """Return a replicated copy of ``source`` in which its view ``taken(source)`` holds ``value``.

    The view has another dtype, so that its elements are not elements of ``source``.
    """
    replicated = [broadcast] * source.placement.axes
    copy: Any = source.to_global(source.placement, replicated)._materialize()  # type: ignore[attr-defined]
    written: Any = value.to_global(source.placement, replicated)  # type: ignore[attr-defined]
    if source.placement.coordinate(world().rank) is None:
        return copy  # type: ignore[no-any-return]
    whole = torch.empty_strided(
        source.shape, device_strides(source), dtype=source.dtype, device=copy._local.device
    ).copy_(copy._local)
    taken(whole).copy_(written._local)
    return GlobalTensor.wrap(whole, copy._spec)


def _overlaps(view: torch.Tensor) -> bool:
    """Return True if a view may show an element several times, judged by its strides."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _copy_with_changes(source: GlobalTensor, shown: Any, value: Any, before: Any) -> Any:
    """Return a copy of ``source`` with the changes of a view.

    The view may show an element several times. It changed from ``before`` to ``value``. ``shown``:
    the number in ``source`` of each element of the view. Of the positions that show an element, the
    last one that changed counts: overlapping windows that were not written into still hold the old
    value.
    """
    changed = (value != before) & ~(value.isnan() & before.isnan())
    if value.dtype.is_floating_point:
        changed = changed | (value.signbit() != before.signbit())
    places = torch.where(changed.flatten(), torch.arange(shown.numel()), -1)
    last = torch.full((source.numel(),), -1).to_global(
        source.placement, [broadcast] * source.placement.axes
    )  # type: ignore[attr-defined]
    last = last.scatter_reduce(0, shown.flatten(), places, "amax").view(source.shape)
    return torch.where(last >= 0, value.take(last.clamp(min=0)), source)


def alias_of(x: GlobalTensor, detached: bool = False) -> GlobalTensor:
    """Return another tensor that is an alias of ``x``."""
    if isinstance(x, RemoteView):
        return x.alias(detached)
    local, spec, serial = x._local, x._spec, x._serial
    if detached:
        if local.requires_grad:
            serial = detached_serial(x)
        local = local.detach()
    # (torch.nn.Parameter requires that a detached tensor has the same class.)
    out = (
        GlobalTensor.without_slots(local, spec)
        if type(x) is GlobalTensor
        else GlobalTensor.wrap(local, spec)
    )
    memory = x._memory
    if memory is None:  # `link_alias`, without the cost of a call
        memory = x._memory = AliasGroup()
    out._memory = memory
    copy_noted_strides(x, out)
    out._serial = serial
    return out


def finish_inplace(target: GlobalTensor) -> GlobalTensor:
    """Record a write into ``target``, and apply it to the base of a view that needs communication.

    Views of ``target`` see the write.
    """
    if isinstance(target, RemoteView):
        try:
            target.write_through()
        except Exception:
            # The base refused the write: all views of it show its values again.
            target._memory.writes += 1  # type: ignore[union-attr]
            raise
    elif target._memory is not None:
        target._memory.writes += 1
    return target


def _parameter_of_view(make: Callable[..., Any]) -> Any:
    """Let ``torch.nn.Parameter(view)`` take a view that needs communication.

    A leaf that requires grad has its own local tensor, so it is no such view. Without gradient the
    parameter stays a view of its base, as on one device.
    """

    @functools.wraps(make)
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if requires_grad and isinstance(data, RemoteView):
            data = data.detach()
            data.detach_from_base()
        return make(cls, data, requires_grad)

    return staticmethod(new)


patch("torch.nn:Parameter.__new__", _parameter_of_view)
