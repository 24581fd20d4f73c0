"""The memory order of results: that of one device, also where local tensors would not show it.

_ops/local_plan.py calls it. A kernel on local tensors gives its results the order that one device
gives them. There are exceptions: an operand was boxed, messages were sent inside the function, or a
local tensor has size 1 in a split dim. Then the function itself is run on fake tensors with the
operands' strides on one device (kernels for the meta device have an order of their own). The local
result is copied into that order, or notes it (_tensor/strides.py). Otherwise
``y = x.T + 1; y.contiguous().zero_()`` would write into ``y``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.pytree import replaced, tensors_in
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.strides import arrange, by_rows, device_strides, has_hidden_gaps
from ..distributed.world import world
from ..sharding.spec import Spec
from .call_plan import DelegatePlan

__all__ = ["ComposedPlan", "ResultStrides", "local_order_misleads"]

_MAX_KNOWN = 64  # per plan


def local_order_misleads(
    boxed: bool, outside: bool, messages: bool, outs: Sequence[Spec | None]
) -> bool:
    """Return True if local results of a call may have another memory order than on one device.

    ``boxed``: an operand is boxed. ``outside``: this rank holds no part of the operands.
    ``messages``: the local function communicates.
    """
    matrices = [o for o in outs if o is not None and o.ndim > 1]
    return bool(matrices) and (
        boxed or outside or messages or any(has_hidden_gaps(o.plain) for o in matrices)
    )


class ResultStrides:
    """The memory order that one device gives the results of a plan's calls.

    ``src``: the specs of the operands."""

    __slots__ = ("known", "rows")

    def __init__(self, src: Sequence[Spec]) -> None:
        rank = world().rank
        outside = src[0].placement.coordinate(rank) is None
        # the strides of each operand's local tensor, if it is row-major
        self.rows = [None if outside else by_rows(s.local_shape(rank)) for s in src]
        # strides of the operands on one device -> those of the results, or None if unknown
        self.known: dict[Any, list[tuple[int, ...]] | None] = {}

    def is_row_major(self, args: tuple[Any, ...], local: torch.Tensor) -> bool:
        """Return True if all operands, and the local result, are row-major for sure.

        ``args``: the arguments of a call, where each ordinary tensor stands by itself. This is the
        quick test of `arrange` on the hot path. Only a view of another tensor, or a tensor with a
        note, has an order that its local tensor may not show."""
        i = 0
        for a in args:
            if type(a) in ORDINARY:
                if "_strides" in a.__dict__ or (
                    a._memory is not None and a._local.stride() != self.rows[i]
                ):
                    return False
                i += 1
        return local.is_contiguous()

    def arrange(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: Sequence[torch.Tensor],
        outs: Sequence[GlobalTensor],
    ) -> None:
        """Give ``outs``, the new results of ``func(*args, **kwargs)``, their memory order."""
        if any(type(t) not in ORDINARY and t.layout is not torch.strided for t in operands):
            return  # it has no strides
        if all(map(_is_row_major, operands, self.rows)) and all(
            o._local.is_contiguous() for o in outs
        ):
            return
        key = tuple(
            device_strides(t) if isinstance(t, GlobalTensor) else t.stride() for t in operands
        )
        if key not in self.known:
            if len(self.known) >= _MAX_KNOWN:
                self.known.clear()
            self.known[key] = _strides_on_one_device(func, args, kwargs, operands, key)
        wanted = self.known[key]
        if wanted is not None and len(wanted) == len(outs):
            for out, strides in zip(outs, wanted, strict=True):
                arrange(out, strides)


def _is_row_major(t: torch.Tensor, rows: tuple[int, ...] | None) -> bool:
    """Return True if an operand is row-major on one device. ``rows``: its local strides then."""
    if type(t) not in ORDINARY:
        return not isinstance(t, GlobalTensor) and t.is_contiguous()
    held = t.__dict__
    if "_origin" in held:
        return False
    note = held.get("_strides")
    if note is not None:
        return bool(note.strides == by_rows(t.shape))
    return rows is None or t._local.stride() == rows  # type: ignore[attr-defined]


def _strides_on_one_device(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[torch.Tensor],
    strides: Sequence[tuple[int, ...]],
) -> list[tuple[int, ...]] | None:
    """Return the strides of the results for operands with these strides, or None if unknown."""
    with (
        torch.no_grad(),
        torch_private.without_function_modes(),
        torch_private.unobserved(),
        torch_private.real_tensors(),
        torch_private.fake_tensors(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        these = iter(
            [
                torch.empty_strided(t.shape, s, dtype=t.dtype, device=t.device)
                for t, s in zip(operands, strides, strict=True)
            ]
        )
        # a function without a kernel for fake tensors: its results stay as they are
        with contextlib.suppress(Exception):
            out = func(*replaced(args, these), **replaced(kwargs, these))
            return [t.stride() for t in tensors_in(out, [])]
    return None


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
        # not a result that is an operand, or a view of one
        if all(type(t) in ORDINARY and t._memory is None for t in results) and not any(
            t is operand for t in results for operand in operands
        ):
            self.order.arrange(func, args, kwargs, operands, results)
        return out
