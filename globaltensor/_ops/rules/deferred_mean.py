"""A mean whose count is still on its way: the quotient is taken when somebody looks at it.

A cross-entropy over a split batch divides by the targets that count on *all* ranks. Were that
number awaited in the forward pass, every rank would wait for the slowest in the middle of each
step. Backward does not need it there: gradients are linear in what it starts from, so a pass may
start from ``1 / bound`` and pay the factor ``bound / count`` when the gradients of leaves have been
summed (_tensor/gradients/reducer.py), where ranks meet anyway. Then the count needs no collective
of its own either: it rides at the end of the first bucket of gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch

from ..._base import torch_private
from ..._tensor.global_tensor import GlobalTensor, SlottedGlobalTensor
from ...distributed.world import world
from ...sharding.placement import Placement
from ...sharding.sbp import partial_sum
from ...sharding.spec import Spec
from .partial_extrema import reduce_partials_async

__all__ = ["DeferredMean", "PendingCount", "materialize"]


def _over() -> torch.Tensor:
    raise AssertionError("asked once")


class PendingCount:
    """The sum of ``part``, weights of targets, over the ranks. It starts when it is told to, at the
    latest when it is called; or it rides with something else. ``bound``: where every target weighs
    1, how many there are on all ranks, so that the sum is at most that, and mostly just that.
    ``programmed``: all ranks run the same program, in which nobody looks at the loss before its
    backward pass."""

    def __init__(self, part: torch.Tensor, bound: int, programmed: bool = False) -> None:
        self.part, self.bound, self.programmed = part, bound, programmed
        self._wait: Callable[[], torch.Tensor] | None = None  # None: not on its way
        # of which all ranks have to know whether some are left, as this number does not ride for
        # their sake
        self._watchers: Any = None
        self.riding = False
        self._sum: torch.Tensor | None = None
        self._rides_in: tuple[Callable[[], None], torch.Tensor] | None = (
            None  # what to wait for, and where it then lies
        )
        self._brought: float | None = None  # and what lay there
        self._factor: float | None = None

    @property
    def started(self) -> bool:
        return self._wait is not None or self.riding

    def start(self) -> None:
        """Begin, unless it is on its way. Collective."""
        if not self.started:
            if self._watchers is None:
                self._wait = reduce_partials_async(self.part)
            else:
                self._watchers.ask(self._start_with)

    def _start_with(self, some: bool) -> Callable[[], bool]:
        """Begin, and tell the other ranks ``some`` by the same message -> whether any rank has told
        so."""
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
            # Each rank calls this at a time of its own. So it takes the local tensor: operations on
            # global tensors are compared between ranks.
            whole = wait()
            return GlobalTensor.wrap(whole._local[0], whole._spec.replace(shape=()))

        self._wait = count
        return lambda: bool(wait()._local[1])

    def __call__(self) -> torch.Tensor:
        """The sum on every rank. Collective where it has not been started."""
        if self._sum is None and self.riding:
            part = self.part
            assert isinstance(part, GlobalTensor)
            whole = part._spec.replicated()
            self._sum = GlobalTensor.wrap(
                torch.tensor(self._arrived(), dtype=whole.dtype, device=part._local.device), whole
            )
        elif self._sum is None:
            self.start()
            assert self._wait is not None
            self._sum, self._wait = self._wait(), _over  # and let go of what brought it
        return self._sum

    def factor(self) -> float:
        """``bound`` over the count. Where nothing counts nothing has a gradient: 1."""
        if self._factor is None:
            if self.riding and self._sum is None:
                number = self._arrived()
            else:
                found = self()
                number = float(found._local if isinstance(found, GlobalTensor) else found)
            self._factor = self.bound / (number or self.bound)
        return self._factor

    def may_ride(self) -> bool:
        """Return True if backward is likely to bring it: it is a sum of parts, all ranks have one,
        and gradients are summed over the ranks with nobody looking. Collective."""
        here, part = world(), self.part
        found = here.reducer
        if (
            found is None
            or found.deferred
            or not isinstance(part, GlobalTensor)
            or torch_private.function_mode_on()
        ):
            return False
        if not self.programmed and (found.asked or not found.rides):
            return False
        if len(part._spec.placement.flat) != here.size or not any(
            e is partial_sum for e in part._spec.layout
        ):
            return False
        if found.watchers.none_left():
            return True
        if all(
            e is partial_sum
            for a, e in enumerate(part._spec.layout)
            if part._spec.placement.shape[a] > 1
        ):
            self._watchers = found.watchers
        return False

    def rider(
        self, placement: Placement, axes: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What this rank gives to a sum over ``axes`` of a placement in ``dtype``, a tensor without
        dims, that then is the count. None: it is on its way already, or such a sum is another one,
        or not exact, and it has been started."""
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
        return (
            torch.zeros_like(here) if any(where[a] for a in axes if a not in own) else here
        )  # along other axes all have the same

    def ride(self, wait: Callable[[], None], cell: torch.Tensor) -> None:
        """What it rides with is under way: ``wait`` for it, then the count is in ``cell`` (of one
        element), to be read before others write there."""
        self._rides_in, self.riding = (wait, cell), True

    def _arrived(self) -> float:
        """What has come with what it rode with: exact in each dtype that it rides in."""
        if self._brought is None:
            assert self._rides_in is not None
            wait, cell = self._rides_in
            wait()
            self._brought, self._rides_in = cell.item(), None
        return self._brought

    def drop(self) -> None:
        """What it rode with will not arrive."""
        if self.riding and self._brought is None:
            self._rides_in, self.riding = None, False


class DeferredMean(SlottedGlobalTensor):
    """``total / count()``. Becomes an ordinary GlobalTensor as soon as its local part is asked
    for."""

    __slots__ = ()

    @staticmethod
    def of(total: GlobalTensor, count: PendingCount) -> GlobalTensor:
        """``total``: a scalar that may have a gradient."""
        out = torch_private.make_wrapper(
            DeferredMean, total._spec.shape, dtype=total._spec.dtype, device=total._local.device
        )
        out._spec = total._spec
        out._memory = None
        out.__dict__["_parts"] = (total, count)
        return cast(GlobalTensor, out)

    @property
    def _local(self) -> torch.Tensor:  # type: ignore[override]
        return materialize(self)._local

    @_local.setter
    def _local(self, value: torch.Tensor) -> None:
        materialize(self)._local = value

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return bool(self.__dict__["_parts"][0].requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        materialize(self).requires_grad = value

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.__dict__["_parts"][0].device  # type: ignore[no-any-return]

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return not self.requires_grad

    def detach(self) -> GlobalTensor:  # type: ignore[override]
        """The same value without a gradient, in the same memory: whichever of both is looked at
        first, the other has it then too."""
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
            a, b = args  # a multiple is a quotient of a multiple: nobody has looked yet
            if isinstance(a, DeferredMean) and type(b) in _NUMBERS:
                total, count = a.__dict__["_parts"]
                return DeferredMean.of(func(total, b), count)
            if isinstance(b, DeferredMean) and type(a) in _NUMBERS and func in _PRODUCTS:
                total, count = b.__dict__["_parts"]
                return DeferredMean.of(func(a, total), count)
        return super().__torch_function__(func, types, args, kwargs)

    def owed(self) -> tuple[GlobalTensor, PendingCount]:
        """(the total, by what it has to be divided): backward may start from the total and ``1 /
        bound``, and owes the factor of the count."""
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


def _taken(total: GlobalTensor, count: PendingCount) -> tuple[torch.Tensor, Spec]:
    """The quotient's local tensor and spec. Local parts are divided: a rank may look at its own
    alone, which is no operation of the program that all run."""
    number: Any = count()
    if torch_private.function_mode_on():
        found: Any = total / number
        return found._local, found._spec
    return total._local / (
        number._local if isinstance(number, GlobalTensor) else number
    ), total._spec


def materialize(x: GlobalTensor) -> GlobalTensor:
    """Take the quotient: in place, since others may hold the tensor. Collective where its count is
    not on its way."""
    if isinstance(x, DeferredMean):
        held = x.__dict__
        source = held["_source"]() if "_source" in held else None
        if isinstance(source, DeferredMean):
            materialize(source)  # and with it this one
            if not isinstance(x, DeferredMean):
                return x
        total, count = held.pop("_parts")
        if not count.started and (reducer := world().reducer) is not None:
            reducer.asked = True  # before backward: the next time it starts at once
        # Who looks may do so without gradients (a meter under no_grad); the tensor keeps its own.
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(torch.is_grad_enabled() or total.requires_grad),
        ):
            local, spec = (
                _taken(total, count)
                if source is None
                else ((detached := source.detach())._local, detached._spec)
            )
        x.__class__ = SlottedGlobalTensor
        x._local, x._spec = local, spec
        held.pop("_source", None)
        for view in held.pop("_views", ()):
            if (other := view()) is not None:
                materialize(other)
    return x
