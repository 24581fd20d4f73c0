"""box: boxing as a differentiable function of local tensors.

Conversion and dispatch call `box`. The backward of src -> dst is dual(dst) -> dual(src). That is a
boxing too, so it can be differentiated any number of times. Partial max, min and norm are reduced
by functions of their own, since their gradient depends on the values.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from .._base.overridable import shown
from .._base.refusals import refuse_transforms
from .._base.torch_private import function_mode_on, innermost_transform, is_zero_tensor, storage_key
from ..distributed.world import world
from ..errors import BoxingError
from ..sharding.sbp import broadcast, partial_sum
from ..sharding.spec import Spec
from .execute import run
from .log import exchanges, record_boxing
from .planner import BoxingPlan, plan_boxing

__all__ = ["box"]


def box(
    local: Tensor, src: Spec, dst: Spec, grad: Spec | None = None, why: str = "", alias: bool = True
) -> Tensor:
    """Return the local tensor of ``dst`` from that of ``src``.

    The result is differentiable any number of times. Every rank of both placements must call this
    function.

    A rank outside ``src`` passes an empty ``(0,)`` placeholder, which must require grad where the
    tensor does: its backward takes part too. A rank outside ``dst`` gets such a placeholder.
    ``grad``: a spec on the placement of ``src`` that the gradient passes through. ``why`` names the
    op for logs and for `no_boxing`; empty or ``to_global`` is explicit. With ``alias`` the result
    may share memory with ``local`` (a slice is a view), so it must not be written to. Without
    ``alias``, only ``src is dst`` returns ``local`` itself. Raises BoxingError.
    """
    if src is dst and grad is None:
        return local
    if function_mode_on():
        return shown(box, local, src, dst, grad, why, alias)  # type: ignore[no-any-return]
    if innermost_transform() is not None:
        refuse_transforms()
    if is_zero_tensor(local):
        local = local.clone()
    if local.requires_grad and torch.is_grad_enabled():
        return _run_differentiable(local, src, dst, grad, why, alias)
    route = plan_boxing(src, dst)
    record_boxing(route, why)
    return _run(route, local, alias, why)


def _run(route: BoxingPlan, local: Tensor, alias: bool, why: str) -> Tensor:
    out = run(route, local, why)
    if alias:
        return out
    if out.numel() and storage_key(out) == storage_key(local):
        return out.clone(memory_format=torch.contiguous_format)
    return out.contiguous()  # as the clone on the rank whose value stays


def _run_differentiable(
    local: Tensor, src: Spec, dst: Spec, grad: Spec | None, why: str, alias: bool
) -> Tensor:
    if grad is not None and (grad.placement is not src.placement or grad.shape != src.shape):
        raise BoxingError(
            f"{why or 'to_global'}: the gradient's sbp must be one on the placement of the "
            f"tensor, {src.placement}; got {grad.placement}"
        )
    local, src = _reduce_odd_partials(local, src, dst, why)
    if src is dst and grad is None:
        return local
    route = plan_boxing(src, dst)
    record_boxing(route, why)
    return _Box.apply(local, route, grad, why, alias)  # type: ignore[no-any-return, no-untyped-call]


def _reduce_odd_partials(local: Tensor, src: Spec, dst: Spec, why: str) -> tuple[Tensor, Spec]:
    """Reduce the partial maxima, minima and norms that the boxing changes.

    The last axes reduce first.
    """
    while odd := [
        a for a, e in enumerate(src.layout) if e.kind == "partial" and e is not partial_sum
    ]:
        if src.placement is dst.placement and all(src.layout[a] is dst.layout[a] for a in odd):
            break
        partial = [a for a, e in enumerate(src.layout) if e.kind == "partial"]
        entry = src.layout[partial[-1]]
        group = [
            a for i, a in enumerate(partial) if all(src.layout[b] is entry for b in partial[i:])
        ]
        settled = src.replace(
            layout=[broadcast if a in group else e for a, e in enumerate(src.layout)]
        )
        route = plan_boxing(src, settled)
        record_boxing(route, why)
        if entry is partial_sum:
            local = _Box.apply(local, route, None, why, True)  # type: ignore[no-untyped-call]
        else:
            local = (_Norm if entry.reduce.startswith("norm") else _Extreme).apply(local, route)  # type: ignore[no-untyped-call]
        src = settled
    return local, src


def _box_gradient(gradient: Tensor, src: Spec, dst: Spec, why: str) -> Tensor:
    """Box a gradient, differentiably where the backward pass asks for it (create_graph)."""
    if src is dst:
        return gradient
    if gradient.requires_grad and torch.is_grad_enabled():
        return _run_differentiable(gradient, src, dst, None, why, True)
    route = plan_boxing(src, dst)
    record_boxing(route, why)
    return run(route, gradient, why)


def _crosses_placements(route: BoxingPlan) -> bool:
    return route.src.placement is not route.dst.placement


def _agree(gradient: Tensor, route: BoxingPlan, placeholder: tuple[Tensor, ...]) -> Tensor:
    """Tell a rank that only sent its shard whether the gradient is itself differentiated.

    With create_graph the gradient may be differentiated, which this rank does not see. If it is,
    the rank's empty share is tied to the placeholder of the result on this rank. So this rank takes
    the same path in the second backward.
    """
    this_world = world()
    members = tuple(sorted({*route.src.placement.flat, *route.dst.placement.flat}))
    if this_world.rank not in members:
        return gradient + placeholder[0]  # no other rank to ask: a yes costs nothing here
    with exchanges("backward with create_graph: agreement of the ranks"):
        wanted = this_world.comm(members).all_reduce(
            torch.tensor([gradient.requires_grad and not placeholder]), "max"
        )
    return gradient + placeholder[0] if placeholder and bool(wanted) else gradient


#: The tensor that nodes save which have nothing to save. A checkpoint (torch.utils.checkpoint)
#: computes its region again when the first of its saved tensors is read, and ends when the last one
#: is computed. As every move saves a tensor, all ranks do so at the same point between their
#: collectives, and each rank runs all of them.
NOTHING: Final = torch.empty(0)


class _Box(torch.autograd.Function):
    """A linear boxing, applied to one local tensor. The other arguments are constants."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        route: BoxingPlan,
        grad: Spec | None,
        why: str,
        alias: bool,
    ) -> Tensor:
        ctx.route, ctx.grad, ctx.why = route, grad, why
        out = _run(route, local, alias, why)
        ctx.away = (
            _crosses_placements(route) and world().rank not in route.dst.placement._coordinates
        )
        ctx.save_for_backward(out if ctx.away else NOTHING)
        # Detach the view of its buffer, which no other code holds: autograd forbids writing into a
        # view made here.
        if not alias and out._is_view():
            out = out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        route, why = ctx.route, f"backward of {ctx.why or 'to_global'}"
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        gradient_spec, input_gradient_spec = route.dst.dual(), route.src.dual()
        saved = ctx.saved_tensors  # read before anything is sent
        if torch.is_grad_enabled() and _crosses_placements(route):
            gradient = _agree(gradient, route, saved if ctx.away else ())
        if ctx.grad is not None:
            gradient, gradient_spec = (
                _box_gradient(gradient, gradient_spec, ctx.grad, why),
                ctx.grad,
            )
        return (
            _box_gradient(gradient, gradient_spec, input_gradient_spec, why),
            None,
            None,
            None,
            None,
        )


class _Extreme(torch.autograd.Function):
    """A partial max or min to broadcast.

    The gradient goes to the ranks whose value is the result, in equal shares.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, route: BoxingPlan) -> Tensor:
        out = run(route, local)
        if out is local or out.data_ptr() == local.data_ptr():
            out = out.clone()
        ctx.route, ctx.away = route, _is_nonmember(local, route)
        if ctx.away:
            ctx.save_for_backward(NOTHING)
        else:
            # Partial over the reduced axes: each rank counts itself, and the sum is the number of
            # ranks that share the gradient.
            axes = [a for a, e in enumerate(route.src.layout) if e is not route.dst.layout[a]]
            is_extreme = (local == out).to(out.dtype)
            ones = route.dst.replace(
                layout=[
                    partial_sum if a in axes else e
                    for a, e in enumerate(_without_partials(route.dst).layout)
                ]
            )
            counting = plan_boxing(ones, _without_partials(route.dst))
            record_boxing(counting, "backward of a partial max or min: ranks that share it")
            ctx.save_for_backward(is_extreme / run(counting, is_extreme))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (share,) = ctx.saved_tensors
        whole = _box_gradient(
            gradient,
            ctx.route.dst.dual(),
            _gradient_spec(ctx.route),
            "backward of a partial max or min",
        )
        return whole if ctx.away else whole * share, None


class _Norm(torch.autograd.Function):
    """A partial p-norm to broadcast: d y / d n_r = (n_r / y)^(p-1), and 0 where y is 0."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, route: BoxingPlan) -> Tensor:
        out = run(route, local)
        if out is local or out.data_ptr() == local.data_ptr():
            out = out.clone()
        ctx.route = route
        ctx.p = next(
            float(e.reduce.removeprefix("norm"))
            for a, e in enumerate(route.src.layout)
            if e is not route.dst.layout[a]
        )
        ctx.save_for_backward(local, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        local, out = ctx.saved_tensors
        whole = _box_gradient(
            gradient,
            ctx.route.dst.dual(),
            _gradient_spec(ctx.route),
            "backward of a partial norm",
        )
        if _is_nonmember(local, ctx.route):
            return whole, None
        ratio = local / torch.where(out == 0, torch.ones_like(out), out)
        return whole * (ratio.sign() * ratio.abs().pow(ctx.p - 1)), None


def _gradient_spec(route: BoxingPlan) -> Spec:
    """Return the spec in which the gradient of the reduced tensor is replicated.

    It is the dual of the source: the dual of a partial max, min or norm is broadcast.
    """
    return route.src.dual()


def _without_partials(spec: Spec) -> Spec:
    """Return the spec with broadcast in place of what is still partial.

    Each rank counts for itself on those axes.
    """
    return spec.replace(layout=[broadcast if e.kind == "partial" else e for e in spec.layout])


def _is_nonmember(local: Tensor, route: BoxingPlan) -> bool:
    return world().rank not in route.src.placement._coordinates
