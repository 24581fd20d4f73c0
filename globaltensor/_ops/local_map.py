"""``local_map``: run a function of local tensors on global ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._base.overridable import visible
from .._base.pytree import replaced, tensors_in
from .._tensor.convert import spec_of
from .._tensor.global_tensor import GlobalTensor
from .._tensor.gradients.reducer import observe_gradients, reducer
from .._tensor.gradients.watchers import Watcher
from .._tensor.history import identify_results
from .._tensor.pending_tensor import materialize_all
from .._tensor.plain_operands import operand_spec, promote_plain_tensor
from ..boxing import box
from ..distributed.world import placeholder, world
from ..errors import SbpError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, as_layout
from ..sharding.tensor_kinds import described, refuse

__all__ = ["local_map"]


def local_map(
    function: Callable[..., Any],
    out_sbp: Any,
    in_sbp: Any = None,
    *,
    placement: Placement | None = None,
) -> Callable[..., Any]:
    """Turn a function of local tensors into a function of global tensors.

    Use it for own kernels, custom ``torch.autograd.Function``s, and code that knows its ranks.

    The result accepts global tensors and boxes them to ``in_sbp``: one sbp, or one for each of
    them. None leaves their layouts as they are. Then it calls ``function`` with this rank's local
    tensors, and wraps the results with ``out_sbp``: one sbp, or one for each result. Gradients
    follow by duality. The gradient that ``function`` returns for a broadcast input is summed over
    the ranks. The gradient of a partial result is replicated on every rank.

    ``in_sbp`` may also have an entry for each tensor, where a tensor that is not global is the same
    on every rank (None: passed unchanged). Or it may have an entry for each argument in order
    (None: not a tensor). Raises SbpError if the number of sbp does not fit, and ShapeError if the
    local results do not form a tensor.

    >>> import torch
    >>> import globaltensor as flow
    >>> double = flow.local_map(lambda x: x * 2, out_sbp=flow.sbp.split(0), in_sbp=flow.sbp.split(0))
    >>> double(flow.ones(2, placement=flow.placement("cpu", [0]), sbp=flow.sbp.split(0))).tolist()
    [2.0, 2.0]
    """  # noqa: E501

    name = getattr(function, "__name__", type(function).__name__)  # a module or a partial has none

    @functools.partial(visible, name="local_map", alone=function)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in(kwargs, tensors_in(args, []))
        materialize_all(tensors)
        where = placement or next(
            (t.placement for t in tensors if isinstance(t, GlobalTensor)), None
        )
        if where is None:
            raise SbpError("local_map: no argument is global, and no placement= was given")
        locals_ = []
        for t, layout in zip(tensors, _input_layouts(in_sbp, args, tensors, where), strict=True):
            if isinstance(t, GlobalTensor):
                dst = t._spec.replace(
                    placement=where, layout=t._spec.shown.layout if layout is None else layout
                )
                locals_.append(box(t._local, t._spec, dst, why=f"local_map({name})"))
            elif layout is not None:
                src = operand_spec(t, where, f"argument of local_map({name})")
                locals_.append(
                    box(
                        promote_plain_tensor(t, src, f"argument of local_map({name})"),
                        src,
                        src.replace(layout=layout),
                        why=f"local_map({name})",
                    )
                )
            else:
                locals_.append(t)
        these = iter(locals_)
        inside = where.coordinate(world().rank) is not None
        out = function(*replaced(args, these), **replaced(kwargs, these)) if inside else None
        if world().size > 1:
            _record_call(where, tensors)
        return _wrap_outputs(out, out_sbp, where, inside)

    return functools.wraps(function)(lambda *args, **kwargs: run(*args, **kwargs))


def _input_layouts(
    in_sbp: Any, args: tuple[Any, ...], tensors: Sequence[torch.Tensor], placement: Placement
) -> list[tuple[Sbp, ...] | None]:
    """Return the layout for each of the tensors, or None for a tensor that is passed unchanged."""
    ours = [isinstance(t, GlobalTensor) for t in tensors]
    if (
        isinstance(in_sbp, (list, tuple))
        and len(in_sbp) != sum(ours)
        and not _is_layout(in_sbp, placement)
    ):
        if len(in_sbp) == len(args) != len(tensors):
            flat = [isinstance(a, torch.Tensor) for a in args]
            if sum(flat) == len(tensors) and all(
                value is None
                for value, is_tensor in zip(in_sbp, flat, strict=True)
                if not is_tensor
            ):
                in_sbp = [value for value, is_tensor in zip(in_sbp, flat, strict=True) if is_tensor]
        if len(in_sbp) == len(tensors):
            return _layouts_per_tensor(in_sbp, len(tensors), placement, "in_sbp")
    wanted = iter(_layouts_per_tensor(in_sbp, sum(ours), placement, "in_sbp"))
    return [next(wanted) if is_global else None for is_global in ours]


def _is_layout(value: Sequence[Any], placement: Placement) -> bool:
    return len(value) == placement.axes and all(isinstance(v, Sbp) for v in value)


def _layouts_per_tensor(
    value: Any, count: int, placement: Placement, what: str
) -> list[tuple[Sbp, ...] | None]:
    if value is None:
        return [None] * count
    one = (
        isinstance(value, (list, tuple))
        and _is_layout(value, placement)
        and (placement.axes > 1 or count == 1)
    )
    if isinstance(value, Sbp) or one:
        return [as_layout(value, placement.axes, what)] * count
    if not isinstance(value, (list, tuple)):
        raise SbpError(
            f"local_map: {what} is an sbp, or a list with one for each of {count} tensors; got "
            f"{value!r}"
        )
    if len(value) != count:
        raise SbpError(f"local_map: {what} has {len(value)} entries for {count} tensors")
    return [None if v is None else as_layout(v, placement.axes, what) for v in value]


def _record_call(placement: Placement, tensors: Sequence[torch.Tensor]) -> None:
    """Add the call to the history of the placement's ranks.

    Its function is not part of the entry: each rank may run another one. The other ranks know the
    serials of tensors on this placement only."""
    world().history((placement,)).record(
        b"local_map",
        *[
            t._serial
            for t in tensors
            if isinstance(t, GlobalTensor) and t._spec.shown.placement is placement
        ],
    )


def _watch_gradients(result: torch.Tensor) -> None:
    """Watch a result for gradients that ``function`` may use in a way that ranks cannot know.

    The function may use leaves of its own, or add hooks to tensors. Ranks do not know whether other
    ranks do."""
    if result.requires_grad:
        observe_gradients(result)
    else:
        Watcher(reducer().watchers)  # it is released at once


def _wrap_outputs(out: Any, out_sbp: Any, placement: Placement, inside: bool) -> Any:
    this_world = world()
    results = tensors_in(out, [])
    # The ranks exchange the shapes of their local results. Ranks outside the placement also receive
    # the structure of the result.
    own_description = (
        ([described(t) for t in results], replaced(out, iter([torch.empty(0)] * len(results))))
        if inside
        else None
    )
    descriptions: Sequence[Any] = (
        this_world.comm(tuple(range(this_world.size))).all_gather_object(
            own_description, "local_map"
        )
        if this_world.size > 1
        else [own_description]
    )
    shapes, shell = descriptions[placement.flat[0]]
    layouts = _layouts_per_tensor(out_sbp, len(shapes), placement, "out_sbp")
    wrapped = []
    for i, layout in enumerate(layouts):
        if layout is None:
            raise SbpError("local_map: out_sbp must have an sbp for each result")
        held = {r: descriptions[r][0][i] for r in placement.flat}
        refuse(f"result {i} of local_map", held)
        spec = spec_of(held, placement, layout)
        local = results[i] if inside else placeholder(spec)
        if torch.is_grad_enabled():
            _watch_gradients(local)
        wrapped.append(GlobalTensor.wrap(local, spec))
    identify_results(wrapped)
    return replaced(out if inside else shell, iter(wrapped))
