"""Plans of calls that run on replicated operands, or that must move their target first.

_ops/sharding_propagation.py and _ops/fallback.py make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.pytree import replaced, tensors_in
from .._tensor.global_tensor import GlobalTensor
from .._tensor.view_tracking import (
    finish_inplace,
    has_aliases,
    has_partial_alias,
    mark_written,
)
from ..boxing import box
from ..distributed.world import world
from ..errors import InplaceError
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .call_plan import CallPlan
from .local_plan import LocalPlan, box_partial_target, inplace_error
from .nonmember_placeholders import ShapeHeader, materialised, nonmember_outputs

__all__ = ["MoveTargetPlan", "ReplicatedPlan", "shared", "wrapped_whole"]


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
                    f"in-place {self.name} would change the shape from {list(target.shape)} to "
                    f"{list(value.shape)}, but each rank's local tensor has a shape of its own: "
                    "use the out-of-place form"
                )
            if not inner.outside:
                self._check_partial(value)
            back = box(value, inner.dst[0], self.src[0], why=self.name)
            if not inner.outside:
                target._local.copy_(back)  # type: ignore[attr-defined]
            return finish_inplace(target)
        return wrapped_whole(out, self.placement, inner.outside)

    def _check_partial(self, value: torch.Tensor) -> None:
        """Raise InplaceError if the partial layout of the target cannot hold ``value``.

        A maximum or norm of local values passes no gradient, and a norm is not negative."""
        reduced = {e.reduce for e in self.src[0].layout} - {"", "sum"}
        if not reduced:
            return
        norm = reduced - {"max", "min"}
        if value.requires_grad or (
            norm and (torch_private.is_fake(value) or bool((value < 0).any()))
        ):
            raise inplace_error(self.name, self.src[0])


def shared(out: Any, placement: Placement, outside: bool, locals_: list[torch.Tensor]) -> Any:
    """Send the result's structure, shapes and dtypes to the ranks outside the placement.

    A result that is not a tensor is sent by value. The call is collective over all ranks unless the
    placement has all of them."""
    if len(placement.flat) == world().size:
        return out
    everyone = world().comm(tuple(range(world().size)))
    own_header = (
        None
        if outside
        else replaced(out, iter([ShapeHeader(t.shape, t.dtype) for t in tensors_in(out, [])]))
    )
    header = everyone.all_gather_object(own_header, "a function on replicated tensors")[
        placement.flat[0]
    ]
    return materialised(header, locals_) if outside else out


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
