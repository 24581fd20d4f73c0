"""Backward passes that start from global tensors, and gradients of tensors that are not leaves.

The dispatcher calls these functions in place of torch.autograd's. Autograd itself runs on the local
tensors. The sum of leaf gradients over ranks is in _tensor/gradients/reducer.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from .._base import torch_private
from .._base.overridable import visible
from .._base.user_code import user_line
from .._tensor.global_tensor import GlobalTensor
from .._tensor.gradients import parameter_gather, reducer
from .._tensor.history import GRADIENT, record
from .._tensor.pending_tensor import local_of
from .._tensor.plain_operands import operand_spec, promote_plain_tensor
from ..boxing import box
from ..distributed.world import world
from ..errors import KernelError
from ..sharding.spec import Spec
from .dispatch import register_handlers
from .rules.deferred_mean import DeferredMean, PendingCount

__all__ = ["backward", "grad", "run_with_pending_scale"]


def initial_cotangent(output: GlobalTensor, grad: Any, place: int = 0) -> torch.Tensor:
    """Return the cotangent that this rank starts a backward pass from.

    A broadcast output is seeded as partial: the value on one rank, zero on the others. ``place``:
    the place of the output among several. Raises RuntimeError where ``grad`` is None and the output
    has more than one element or is complex, and where ``grad`` does not fit."""
    spec = output._spec
    record("backward", output, *([grad] if isinstance(grad, GlobalTensor) else []))
    where = spec.placement.coordinate(world().rank)
    if grad is None:
        if spec.numel != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs; this one has shape "
                f"{list(spec.shape)}: pass gradient="
            )
        if spec.dtype.is_complex:
            raise RuntimeError(
                f"grad can be implicitly created only for real scalar outputs but got {spec.dtype}"
            )
        if where is None:
            return torch.zeros_like(output._local)
        counted = all(where[a] == 0 for a, e in enumerate(spec.layout) if e.is_broadcast)
        return torch.ones_like(output._local) if counted else torch.zeros_like(output._local)
    if not isinstance(grad, torch.Tensor):
        raise TypeError(f"gradients can be either Tensors or None, but got {type(grad).__name__}")
    if isinstance(grad, GlobalTensor):
        grad = _fitting_gradient(grad, spec, place)
        return box(local_of(grad), grad._spec, spec.dual(), why="gradient given to backward")
    whole = operand_spec(grad, spec.placement, "gradient given to backward")
    # The ranks compare it first: it may be of another kind, or another tensor, on each of them.
    local = promote_plain_tensor(grad, whole, "gradient given to backward")
    fitting = _fitting_gradient(grad if where is None else local, spec, place)
    local = local if where is None else fitting
    whole = whole.replace(shape=spec.shape, dtype=spec.dtype)
    return box(local, whole, spec.dual(), why="gradient given to backward")


def _fitting_gradient(grad: torch.Tensor, spec: Spec, place: int) -> torch.Tensor:
    """Return a gradient passed for an output in the output's dtype.

    Raises RuntimeError where torch does: for another shape, or for a complex and a real dtype."""
    if grad.shape == spec.shape and grad.dtype is spec.dtype:
        return grad
    if grad.shape != spec.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output[{place}] has a shape of {grad.shape} and "
            f"output[{place}] has a shape of {spec.shape}."
        )
    if grad.dtype.is_complex != spec.dtype.is_complex:
        raise RuntimeError(
            f"For complex Tensors, both grad_output and output are required to have the same "
            f"dtype. Mismatch in dtype: grad_output[{place}] has a dtype of {grad.dtype} and "
            f"output[{place}] has a dtype of {spec.dtype}."
        )
    return grad.to(spec.dtype)


def _materialize_output(output: Any) -> Any:
    """Materialize an output, and reduce partials other than sums, which have no cotangent."""
    if isinstance(output, GlobalTensor) and any(
        e.is_partial and e.reduce != "sum" for e in output._materialize()._spec.layout
    ):
        settled = GlobalTensor.wrap(
            box(output._local, output._spec, output._spec.replicated(), why="backward"),
            output._spec.replicated(),
        )
        settled._serial = output._serial
        return settled
    return output


def _as_list(value: Any) -> list[Any]:
    return (
        []
        if value is None
        else [value]
        if isinstance(value, (torch.Tensor, GradientEdge))
        else list(value)
    )


def _roots_and_seeds(outputs: Sequence[Any], grads: Any) -> tuple[list[Any], list[Any]]:
    if any(isinstance(o, GradientEdge) for o in outputs):
        raise KernelError(
            "a GradientEdge of a global tensor cannot start a backward pass: it belongs to this "
            "rank's local tensor and has no layout, so the gradient that each rank starts from is "
            "unknown. Pass the tensor itself: torch.autograd.grad(y, inputs), y.backward()"
        )
    given = _as_list(grads) or [None] * len(outputs)
    outputs = [_materialize_output(o) for o in outputs]
    seeds = [
        initial_cotangent(o, g, i) if isinstance(o, GlobalTensor) else g
        for i, (o, g) in enumerate(zip(outputs, given, strict=True))
    ]
    # A rank outside an output's placement may hold a placeholder without an autograd graph (in a
    # second derivative). This rank has nothing to compute for that output.
    reached = [
        i for i, o in enumerate(outputs) if local_of(o).requires_grad or not _is_nonmember(o)
    ]
    return [local_of(outputs[i]) for i in reached], [seeds[i] for i in reached]


def _is_nonmember(x: Any) -> bool:
    return isinstance(x, GlobalTensor) and x._spec.placement.coordinate(world().rank) is None


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Run torch.autograd.backward where some outputs are global."""
    locals_, seeds = _roots_and_seeds(_as_list(tensors), grad_tensors)
    into = None if inputs is None else [local_of(i) for i in _as_list(inputs)]
    if not locals_:
        return
    run(locals_, seeds, retain_graph, create_graph, into)


def in_this_thread() -> Any:
    """Return a context manager that runs backward passes in the calling thread, on a GPU too.

    Context settings of the caller (`no_boxing`, a method of attention) then hold in the backward
    pass."""
    return (
        torch_private.uncompiled_backward()
        if torch_private.compiles_backward()
        else torch.autograd.set_multithreading_enabled(False)
    )


@visible
def run(
    locals_: list[Any],
    seeds: list[Any],
    retain_graph: bool | None,
    create_graph: bool,
    into: list[Any] | None,
) -> None:
    gradient_reducer = reducer.reducer()
    # If another pass is running, this one is part of it (a recomputed checkpoint), and its
    # gradients are needed now.
    within = gradient_reducer.queued
    with parameter_gather.immediate(into is not None), in_this_thread():
        try:
            torch.autograd.backward(locals_, seeds, retain_graph, create_graph, inputs=into)
            if within:
                gradient_reducer.finish()
        except BaseException as error:
            reducer.reducer().abort()
            parameter_gather.abort()
            if (same_on_all_ranks := _saved_tensor_error(error)) is not None:
                raise same_on_all_ranks from None
            raise


_LOCAL_SHAPE = re.compile(r"(has been modified by an inplace operation: )\[\S+ \[[\d, ]*\]\]")
_NO_SHAPE = r"\1a tensor (each rank saved its local tensor)"


def _saved_tensor_error(error: BaseException) -> RuntimeError | None:
    """Return torch's error for a saved tensor that was written into, without the local shape.

    Returns None for any other error. Writes count on every rank, so all ranks raise the error."""
    if type(error) is not RuntimeError or not _LOCAL_SHAPE.search(str(error)):
        return None
    return RuntimeError(f"{user_line()}\n{_LOCAL_SHAPE.sub(_NO_SHAPE, str(error), count=1)}")


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Run torch.autograd.grad where some tensors are global.

    Returns one gradient per input, each with its input's sbp."""
    options.pop("only_inputs", None)
    if options.pop("is_grads_batched", False):
        return _run_batched(
            outputs,
            inputs,
            _as_list(grad_outputs),
            create_graph if retain_graph is None else retain_graph,
            create_graph,
            options,
        )
    locals_, seeds = _roots_and_seeds(_as_list(outputs), grad_outputs)
    wanted = _as_list(inputs)
    # The order does not matter: it may be that of a set, which differs by rank.
    record("autograd.grad", *sorted(_global_tensors_in(wanted), key=lambda x: x._serial))
    if not locals_:
        return tuple(
            GlobalTensor.wrap(torch.zeros_like(x._local), x._spec) if _is_nonmember(x) else None
            for x in wanted
        )
    with parameter_gather.immediate(True), in_this_thread():
        try:
            found = torch.autograd.grad(
                locals_, [local_of(i) for i in wanted], seeds, retain_graph, create_graph, **options
            )
        except RuntimeError as error:
            if (same_on_all_ranks := _saved_tensor_error(error)) is not None:
                raise same_on_all_ranks from None
            raise
    with torch.set_grad_enabled(create_graph):
        return tuple(_in_input_sbp(x, g) for x, g in zip(wanted, found, strict=True))


def _global_tensors_in(tensors: Sequence[Any]) -> list[GlobalTensor]:
    return [t for t in tensors if isinstance(t, GlobalTensor)]


def _run_batched(
    outputs: Any,
    inputs: Any,
    grads: list[Any],
    retain_graph: bool,
    create_graph: bool,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """Run one backward pass for each index of the first dim of ``grads``, and stack the gradients.

    PyTorch would run one pass under vmap, which does not support global tensors."""
    sizes = {g.shape[0] for g in grads if g is not None}
    if len(sizes) != 1 or 0 in sizes:
        raise RuntimeError(
            f"is_grads_batched: the first dim of every grad_outputs is the batch; it must have the "
            f"same size in all of them, not 0; got {sorted(sizes)}"
        )
    n = sizes.pop()
    rows = [
        grad(
            outputs,
            inputs,
            [None if g is None else g[i] for g in grads],
            retain_graph or i < n - 1,
            create_graph,
            **options,
        )
        for i in range(n)
    ]
    return tuple(
        None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)
    )


def _in_input_sbp(x: Any, g: torch.Tensor | None) -> Any:
    if g is None or not isinstance(x, GlobalTensor):
        return g
    spec = x._spec.replace(dtype=g.dtype)
    out = GlobalTensor.wrap(
        reducer.reduce_gradient(g, spec.dual(), spec, x._reduce_dtype, "torch.autograd.grad"), spec
    )
    history = world().history((x._spec.shown.placement,))
    out._serial = hash((history.serial, x._serial, GRADIENT))
    return out


def tensor_backward(
    self: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    if (
        isinstance(self, DeferredMean)
        and gradient is None
        and inputs is None
        and not (create_graph or torch_private.function_mode_on())
    ):
        total, count = self.owed()
        total._serial = self._serial  # a rank that has read the mean starts from the mean itself
        # Where the output's placement has not all ranks, a rank that sums leaves may not know the
        # count.
        if (count.started or reducer.reducer().may_owe()) and len(
            total._spec.placement.flat
        ) == world().size:
            run_with_pending_scale(
                total._local, initial_cotangent(total, None), count, retain_graph
            )
            return
    backward(
        [self], None if gradient is None else [gradient], retain_graph, create_graph, inputs=inputs
    )


def run_with_pending_scale(
    total: torch.Tensor, start: torch.Tensor, count: PendingCount, retain_graph: bool | None
) -> None:
    """Run the backward pass of ``total / count()`` from ``start``.

    Where the ranks have not begun to add up the count, and no user code observes intermediate
    gradients, the division by the count is deferred until the gradients are summed. All ranks
    decide alike: a pass may move gradients between ranks, where those with the count's factor and
    those without it must not be added."""
    gradient_reducer = reducer.reducer()
    gradient_reducer.asked = False
    if count.started or not gradient_reducer.may_owe():
        total_count = count()
        run(
            [total],
            [
                start
                / (total_count._local if isinstance(total_count, GlobalTensor) else total_count)
            ],
            retain_graph,
            False,
            None,
        )
        return
    gradient_reducer.owed = count
    try:
        run([total], [start / count.bound], retain_graph, False, None)
    finally:
        gradient_reducer.owed = None
        count.drop()


def _no_forward_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise KernelError(
        "forward-mode derivatives do not cross from rank to rank, so a global tensor cannot be a "
        "dual tensor: torch.autograd.functional.jvp computes the same with "
        "two backward passes; globaltensor.local_map(function, out_sbp=..., in_sbp=...) runs "
        "forward mode on the local tensors of a function that moves no data"
    )


def _no_vmap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise KernelError(
        "vmap does not see how the local tensors form a global tensor: write the batch as a "
        "dim (torch's functions accept leading dims), loop over it, or "
        "run vmap on the local tensors: globaltensor.local_map(torch.vmap(function), out_sbp=..., "
        "in_sbp=...)"
    )


register_handlers(dict.fromkeys(torch_private.dual_functions(), _no_forward_mode), "refused")
register_handlers(dict.fromkeys(torch_private.vmap_functions(), _no_vmap), "refused")
register_handlers(
    {
        torch.autograd.backward: lambda func, args, kwargs: backward(*args, **kwargs),
        torch.autograd.grad: lambda func, args, kwargs: grad(*args, **kwargs),
        torch.Tensor.backward: lambda func, args, kwargs: tensor_backward(*args, **kwargs),
    },
    "backward",
)
