"""A mean whose count is still being reduced: the division happens when its value is read.

The losses (loss.py) create it. The backward pass (_tensor/gradients/reducer.py) applies its factor.

A cross-entropy over a split batch divides by the targets that count on *all* ranks. If the forward
pass awaited that number, every rank would wait for the slowest in the middle of each step. Backward
does not need the number there, as gradients are linear in the initial gradient. A pass may
therefore start from ``1 / bound``. The factor ``bound / count`` is applied when the gradients of
leaves have been summed, where ranks meet anyway. The count then needs no collective of its own
either: it is reduced as the last element of the first bucket of gradients ("it is attached").
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from ..._base import torch_private
from ..._tensor.global_tensor import GlobalTensor, SlottedGlobalTensor
from ..._tensor.gradients.reducer import Reducer
from ..._tensor.pending_tensor import PendingTensor
from ...distributed.world import world
from ...sharding.placement import Placement
from ...sharding.sbp import partial_sum
from ...sharding.spec import Spec
from .partial_extrema import reduce_partials_async

__all__ = ["DeferredMean", "PendingCount"]


def _raise_waited_twice() -> torch.Tensor:
    raise AssertionError("asked once")


class PendingCount:
    """The sum of ``part``, weights of targets, over the ranks.

    The reduction starts on request, or at the latest when the object is called. Or it is attached
    to another reduction. ``bound``: where every target weighs 1, the number of targets on all
    ranks. The sum is at most ``bound``, and mostly equals it. ``programmed``: all ranks run the
    same program, in which the loss is not read before its backward pass.
    """

    def __init__(self, part: torch.Tensor, bound: int, programmed: bool = False) -> None:
        self.part, self.bound, self.programmed = part, bound, programmed
        self._wait: Callable[[], torch.Tensor] | None = None  # None: the reduction has not started
        # The watchers of the gradients, if they are the reason why this count is not attached.
        # The ranks then learn by the count's own message if any watcher is left.
        self._watchers: Any = None
        self.attached = False
        self._sum: torch.Tensor | None = None
        # the function to wait with, and the tensor that then holds the count
        self._attached_to: tuple[Callable[[], None], torch.Tensor] | None = None
        self._brought: float | None = None  # the count that was read from that tensor
        self._factor: float | None = None

    @property
    def started(self) -> bool:
        return self._wait is not None or self.attached

    def start(self) -> None:
        """Start the reduction, unless it has started. Collective."""
        if not self.started:
            if self._watchers is None:
                self._wait = reduce_partials_async(self.part)
            else:
                self._watchers.ask(self._start_with_flag)

    def _start_with_flag(self, some: bool) -> Callable[[], bool]:
        """Start the reduction, and send ``some`` to the other ranks in the same message.

        The function returned waits, and returns True if any rank sent True.
        """
        part = self.part
        assert isinstance(part, GlobalTensor)
        both = torch.stack([part._local.detach(), torch.full_like(part._local, some)])
        wait = cast(
            Callable[[], GlobalTensor],
            functools.cache(
                reduce_partials_async(GlobalTensor.wrap(both, part._spec.replace(shape=(2,))))
            ),
        )

        def count() -> torch.Tensor:
            # Each rank calls this at a different time. So this function uses the local tensor,
            # because operations on global tensors are compared between ranks.
            whole = wait()
            return GlobalTensor.wrap(whole._local[0], whole._spec.replace(shape=()))

        self._wait = count
        return lambda: bool(wait()._local[1])

    def __call__(self) -> torch.Tensor:
        """Return the sum on every rank. Collective if the reduction has not started."""
        if self._sum is None and self.attached:
            part = self.part
            assert isinstance(part, GlobalTensor)
            whole = part._spec.replicated()
            self._sum = GlobalTensor.wrap(
                torch.tensor(self._received_count(), dtype=whole.dtype, device=part._local.device),
                whole,
            )
        elif self._sum is None:
            self.start()
            assert self._wait is not None
            self._sum, self._wait = (
                self._wait(),
                _raise_waited_twice,
            )  # this frees the buffers of the reduction
        return self._sum

    def factor(self) -> float:
        """Return ``bound`` over the count, or 1 if no target counts.

        In the latter case no element has a gradient.
        """
        if self._factor is None:
            if self.attached and self._sum is None:
                number = self._received_count()
            else:
                found = self()
                number = float(found._local if isinstance(found, GlobalTensor) else found)
            self._factor = self.bound / (number or self.bound)
        return self._factor

    def may_ride(self) -> bool:
        """Return True if the next backward pass is likely to reduce the count with its gradients.

        The count must be a partial sum, all ranks must have one, and gradients must be summed over
        the ranks without being observed. Collective.
        """
        this_world, part = world(), self.part
        gradient_reducer = this_world.existing_state(Reducer)
        if (
            gradient_reducer is None
            or gradient_reducer.deferred
            or not isinstance(part, GlobalTensor)
            or torch_private.function_mode_on()
        ):
            return False
        if not self.programmed and (gradient_reducer.asked or not gradient_reducer.rides):
            return False
        if len(part._spec.placement.flat) != this_world.size or not any(
            e is partial_sum for e in part._spec.layout
        ):
            return False
        if gradient_reducer.watchers.none_left():
            return True
        if all(
            e is partial_sum
            for a, e in enumerate(part._spec.layout)
            if part._spec.placement.shape[a] > 1
        ):
            self._watchers = gradient_reducer.watchers
        return False

    def payload(
        self, placement: Placement, axes: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return this rank's contribution to a sum that the gradients need anyway.

        The sum is over ``axes`` of a placement in ``dtype``. The contribution is a tensor without
        dims. Return None if the count's reduction has already started. Also return None if such a
        sum would differ from the count or not be exact; the reduction is then started separately.
        """
        if self.started:
            return None
        assert isinstance(self.part, GlobalTensor)
        spec = self.part._spec
        own = {a for a, e in enumerate(spec.layout) if e is partial_sum}
        if (
            placement is not spec.placement
            or not own.issubset(axes)
            or not dtype.is_floating_point
            or self.bound * torch.finfo(dtype).eps > 1
        ):
            self.start()
            return None
        where = placement._coordinates[world().rank]
        here = self.part._local.detach()
        # Along other axes all ranks have the same value, so only one of them contributes it.
        return torch.zeros_like(here) if any(where[a] for a in axes if a not in own) else here

    def attach(self, wait: Callable[[], None], cell: torch.Tensor) -> None:
        """Record the reduction to which the count is attached.

        After ``wait`` returns, the count is in ``cell`` (of one element). The caller must read the
        count before ``cell`` is overwritten.
        """
        self._attached_to, self.attached = (wait, cell), True

    def _received_count(self) -> float:
        """Return the count from the reduction to which it was attached.

        The count is exact in each dtype in which it may be attached.
        """
        if self._brought is None:
            assert self._attached_to is not None
            wait, cell = self._attached_to
            wait()
            self._brought, self._attached_to = cell.item(), None
        return self._brought

    def drop(self) -> None:
        """Record that the reduction to which the count is attached will not complete."""
        if self.attached and self._brought is None:
            self._attached_to, self.attached = None, False


class DeferredMean(PendingTensor):
    """The quotient ``total / count()``, which is computed when its value is needed.

    ``_materialize`` turns the object into an ordinary GlobalTensor.
    """

    __slots__ = ()

    @staticmethod
    def of(total: GlobalTensor, count: PendingCount) -> GlobalTensor:
        """Return the mean of ``total``, a scalar that may have a gradient."""
        out = torch_private.make_wrapper(
            DeferredMean, total._spec.shape, dtype=total._spec.dtype, device=total._local.device
        )
        out._spec = total._spec
        out._memory = None
        out._serial = 0
        out.__dict__["_parts"] = (total, count)
        return cast(GlobalTensor, out)

    def _is_pending(self) -> bool:
        return True

    def _materialize(self) -> GlobalTensor:
        """Compute the quotient in place, since other code may hold the tensor.

        Collective if the reduction of its count has not started.
        """
        held = self.__dict__
        source = held["_source"]() if "_source" in held else None
        if isinstance(source, DeferredMean):
            source._materialize()  # this also materializes ``self``
            if not isinstance(self, DeferredMean):
                return self
        total, count = held.pop("_parts")
        if not count.started and (reducer := world().existing_state(Reducer)) is not None:
            reducer.asked = True  # read before backward: from now on the reduction starts early
        # The value may be read without gradients (a meter under no_grad). The tensor keeps its own
        # gradient.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(torch.is_grad_enabled() or total.requires_grad),
        ):
            local, spec = (
                _divide_total(total, count)
                if source is None
                else ((detached := source.detach())._local, detached._spec)
            )
        self.__class__ = SlottedGlobalTensor  # type: ignore[assignment]
        self._local, self._spec = local, spec
        held.pop("_source", None)
        for view in held.pop("_views", ()):
            if (other := view()) is not None:
                other._materialize()
        return self

    @property
    def _stored(self) -> torch.Tensor:
        return cast(torch.Tensor, self.__dict__["_parts"][0]._stored)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return bool(self.__dict__["_parts"][0].requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._materialize().requires_grad = value

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.__dict__["_parts"][0].device  # type: ignore[no-any-return]

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return not self.requires_grad

    def detach(self) -> GlobalTensor:  # type: ignore[override]
        """Return the same value without a gradient, in the same memory.

        Reading the value of either tensor sets it in both.
        """
        total, count = self.__dict__["_parts"]
        out = DeferredMean.of(total.detach(), count)
        out.__dict__["_source"] = weakref.ref(self)
        self.__dict__.setdefault("_views", []).append(weakref.ref(out))
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in _SCALINGS
            and not kwargs
            and len(args) == 2
            and not torch_private.function_mode_on()
        ):
            # A multiple of the mean is the mean of a multiple, so the value is still not needed.
            a, b = args
            if isinstance(a, DeferredMean) and type(b) in _NUMBERS:
                total, count = a.__dict__["_parts"]
                return DeferredMean.of(func(total, b), count)
            if isinstance(b, DeferredMean) and type(a) in _NUMBERS and func in _PRODUCTS:
                total, count = b.__dict__["_parts"]
                return DeferredMean.of(func(a, total), count)
        return super().__torch_function__(func, types, args, kwargs)

    def owed(self) -> tuple[GlobalTensor, PendingCount]:
        """Return (the total, the count by which it must be divided).

        A backward pass that starts from the total and ``1 / bound`` must later apply the count's
        factor.
        """
        return self.__dict__["_parts"]  # type: ignore[no-any-return]


_NUMBERS = (int, float)
_PRODUCTS = frozenset(
    (
        torch.mul,
        torch.Tensor.mul,
        torch.Tensor.__mul__,
        torch.Tensor.__rmul__,
        torch.multiply,
        torch.Tensor.multiply,
    )
)
_SCALINGS = _PRODUCTS | {
    torch.div,
    torch.Tensor.div,
    torch.Tensor.__truediv__,
    torch.divide,
    torch.Tensor.divide,
    torch.true_divide,
    torch.Tensor.true_divide,
}


def _divide_total(total: GlobalTensor, count: PendingCount) -> tuple[torch.Tensor, Spec]:
    """Return the quotient's local tensor and spec.

    Local tensors are divided. A rank may read its own value alone, which is not an operation of the
    program that all ranks run.
    """
    number: Any = count()
    if torch_private.function_mode_on():
        found: Any = total / number
        return found._local, found._spec
    return total._local / (
        number._local if isinstance(number, GlobalTensor) else number
    ), total._spec
