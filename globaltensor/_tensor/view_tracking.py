"""Views that had to move data.

A view of a tensor shares its memory, so what is written into one shows in the other. Where the
values of a view lie on other ranks than the view's (``x[0]`` of a split ``x``), each has memory of
its own: what is written into the view is written on into its base, and the view is taken anew when
it is looked at after its base, or another view of that, was written into.

Which tensors share memory, and how often it was written into, is counted by function calls, so all
ranks count alike: their parts would not, a rank may have none of what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from .._base import torch_private
from ..boxing import box
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .global_tensor import AliasGroup, GlobalTensor, SlottedGlobalTensor
from .strides import copy_noted_strides

__all__ = [
    "RemoteView",
    "alias_of",
    "finish_inplace",
    "has_aliases",
    "has_partial_alias",
    "link_alias",
    "mark_written",
    "refresh_view",
]

_KEPT: Any = SlottedGlobalTensor.__dict__["_local"]


def link_alias(source: GlobalTensor, out: GlobalTensor, viewed: bool = True) -> None:
    """``out`` shows what ``source`` holds, and is told of writes. ``viewed``: it is a view (a
    detached tensor is let go its own way)."""
    memory = source._memory
    if memory is None:
        memory = source._memory = AliasGroup()
    memory.viewed = memory.viewed or viewed
    out._memory = memory


def has_aliases(x: GlobalTensor) -> bool:
    """Whether it is a view, or the base of one, that would not follow if its part were exchanged
    for another."""
    return x._memory is not None and x._memory.viewed and not isinstance(x, RemoteView)


def has_partial_alias(x: GlobalTensor) -> bool:
    """Whether it lies as parts of a sum that another tensor may show as well, a view or a detached
    one: what is written into it has to stay parts."""
    return (
        x._memory is not None
        and not isinstance(x, RemoteView)
        and all(e.reduce in ("", "sum") for e in x._spec.layout)
    )


def mark_written(x: Any) -> None:
    """``x`` has been written into, by something that did not ask whether it is a view."""
    if isinstance(x, GlobalTensor) and x._memory is not None:
        x._memory.writes += 1


#: What a moved view is of, for nobody else to change; what gives it again of that; where that is
#: ``source[index]``; whether gradients were recorded.
Origin = tuple[GlobalTensor, Callable[[GlobalTensor], GlobalTensor], Any, bool]


class RemoteView(SlottedGlobalTensor):
    """What a view function gave of another tensor by moving data."""

    __slots__ = ()

    @staticmethod
    def of(
        local: torch.Tensor,
        spec: Spec,
        source: GlobalTensor,
        taken: Callable[[GlobalTensor], GlobalTensor],
        index: Any = None,
    ) -> GlobalTensor:
        """``taken(source)``, whose part here is ``local``. ``index``: where that is
        ``source[index]``."""
        # With a gradient where the view has one: it must not keep alive what led to its base.
        origin = alias_of(source, not local.requires_grad), taken, index, torch.is_grad_enabled()
        out = torch_private.make_wrapper(
            RemoteView, spec.shape, dtype=spec.dtype, device=local.device
        )
        link_alias(source, out)
        out._spec = spec
        out.follow(local, origin)
        return cast(GlobalTensor, out)

    def follow(self, local: torch.Tensor, origin: Origin) -> None:
        """From now on it shows what ``origin`` says, which is ``local`` at the time."""
        _KEPT.__set__(self, local)
        self.__dict__.update(_origin=origin, _seen=self._memory.writes)  # type: ignore[union-attr]

    @property
    def _local(self) -> torch.Tensor:  # type: ignore[override]
        held = self.__dict__
        if held["_seen"] != self._memory.writes:  # type: ignore[union-attr]
            source, taken, _, grad = held["_origin"]
            with torch.set_grad_enabled(grad):
                anew = taken(source)
                local = anew._local  # first: where it moved itself it lies as it does by now
                if anew._spec is not self._spec:
                    local = box(
                        local,
                        anew._spec,
                        self._spec,
                        why="a view of what was written into",
                        alias=False,
                    )
            self.follow(local, held["_origin"])
        return _KEPT.__get__(self)  # type: ignore[no-any-return]

    @_local.setter
    def _local(self, value: torch.Tensor) -> None:
        _KEPT.__set__(self, value)

    def detach_origin(self) -> None:
        """From now on neither it nor what it shows has gradients."""
        source, taken, index, _ = self.__dict__["_origin"]
        self.follow(self._local.detach(), (alias_of(source, detached=True), taken, index, False))

    def cut(self) -> None:
        """From now on it is a tensor by itself."""
        local = self._local
        del self.__dict__["_origin"], self.__dict__["_seen"]
        self.__class__ = SlottedGlobalTensor  # type: ignore[assignment]
        self._local, self._memory = local, None

    def write_on(self) -> None:
        """What was written into it into its base too."""
        local = _KEPT.__get__(self)
        source, taken, index, _ = origin = self.__dict__["_origin"]
        value = GlobalTensor.wrap(local, self._spec)
        if index is not None:
            source[index] = value
        else:
            ids: Any = torch.arange(source.numel()).view(source.shape)
            shown = taken(ids)
            if _overlaps(shown):
                source.copy_(_put_changed(source, shown, value, taken(source)))
                return  # it is taken anew: the other places of what was written into show it too
            source.copy_(source.put(shown, value))
        self.follow(local, origin)


def _overlaps(view: torch.Tensor) -> bool:
    """Tell by its strides whether a view may show an element several times."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _put_changed(source: GlobalTensor, shown: Any, value: Any, before: Any) -> Any:
    """Write what differs between two states of a view, ``before`` and ``value``, into a copy of
    ``source``, whose elements the view may show several times.

    ``shown``: the number in ``source`` of each element of the view. Of the places that show an
    element, the last one that changed counts: overlapping windows that were not written into still
    hold the old value."""
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
    """Another tensor that shows the same."""
    local = x._local.detach() if detached else x._local
    if isinstance(x, RemoteView):
        source, taken, index, _ = x.__dict__["_origin"]
        with torch.set_grad_enabled(not detached):
            return RemoteView.of(local, x._spec, source, taken, index)
    # (torch.nn.Parameter wants what is detached to be of the same class.)
    out = (
        GlobalTensor.without_slots(local, x._spec)
        if type(x) is GlobalTensor
        else GlobalTensor.wrap(local, x._spec)
    )
    link_alias(x, out, viewed=False)
    copy_noted_strides(x, out)
    return out


def refresh_view(x: Any) -> None:
    """A view that had to move data shows from now on what its base holds. Collective where that has
    been written into."""
    if isinstance(x, RemoteView):
        x._local  # noqa: B018


def finish_inplace(target: GlobalTensor) -> GlobalTensor:
    """``target`` has been written into: its views are told, and where it is itself one that had to
    move data, so is its base."""
    if isinstance(target, RemoteView):
        target.write_on()
    elif target._memory is not None:
        target._memory.writes += 1
    return target
