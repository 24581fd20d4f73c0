"""Torch's foreach and fused optimizer kernels over lists of global tensors.

The dispatcher calls them through its handlers. They run on lists of local tensors, at the speed of
local kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.argument_text import argument_text
from .._base.pytree import tensors_in
from .._tensor.global_tensor import GlobalTensor
from .._tensor.history import identify_results, record_together
from .._tensor.plain_operands import operand_spec, promote_plain_tensor
from .._tensor.strides import copy_noted_order
from .._tensor.view_tracking import finish_inplace, has_aliases, has_partial_alias
from ..boxing import box
from ..distributed.world import placeholder, world
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, broadcast, partial_max, partial_min, partial_norm
from ..sharding.spec import Spec
from ..sharding.tensor_kinds import kind_of
from .call_plan import name_of
from .dispatch import register_handlers
from .fallback import copy_back, global_copy
from .local_plan import box_partial_target
from .shape_inference import infer_outputs

__all__ = ["foreach", "foreach_norm"]


#: The kernels over lists: the names of a kernel's lists, and whether it writes into each list.
KERNELS = torch_private.list_functions()


def _tensor_lists(args: Sequence[Any]) -> list[Sequence[Any]]:
    return [
        a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)
    ]


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel over lists, element by element.

    The tensors at index i of each list are boxed to the layout of the first list's tensor. Raises
    RuntimeError if the lists differ in length."""
    name = name_of(func)
    writes = name.endswith("_")
    if kwargs:
        args, kwargs = _move_lists_to_positions(func, args, kwargs)
    lists = _tensor_lists((*args, *kwargs.values()) if kwargs else args)
    first = lists[0]
    _record_call(name, args, kwargs, first)
    for other in lists:
        if len(other) != len(first):
            raise RuntimeError(
                f"Tensor lists must have the same number of tensors, got {len(first)} and "
                f"{len(other)}"
            )
    if writes:
        if any(_must_stay_partial(name, t) for t in first):
            return _run_partials_singly(func, args, kwargs, first)
        _box_partial_targets(name, first)
    # A single number for all tensors, such as a clipping factor.
    factor = next((a for a in (*args, *kwargs.values()) if isinstance(a, GlobalTensor)), None)
    specs = [_column_spec(name, column, factor, writes) for column in zip(*lists, strict=True)]
    if writes and (elsewhere := _misplaced_targets(func, args, kwargs, specs)):
        return _run_on_copies(func, args, kwargs, elsewhere, specs)
    rank = world().rank
    own_indices = [
        i for i, s in enumerate(specs) if s is None or s.placement.coordinate(rank) is not None
    ]
    places = list(dict.fromkeys(s.placement for s in specs if s is not None))

    def localised(a: Any) -> Any:
        if (
            isinstance(a, (list, tuple))
            and len(a) == len(first)
            and a
            and isinstance(a[0], torch.Tensor)
        ):
            parts = [_local_operand(t, s, name) for t, s in zip(a, specs, strict=True)]
            return parts if len(own_indices) == len(parts) else [parts[i] for i in own_indices]
        if isinstance(a, GlobalTensor):
            copies = [
                (
                    p,
                    box(
                        a._local,
                        a._spec,
                        a._spec.replace(placement=p, layout=[broadcast] * p.axes),
                        why=name,
                    ),
                )
                for p in places
            ]
            return next((part for p, part in copies if rank in p._coordinates), a._local)
        if isinstance(a, (list, tuple)) and len(a) == len(first) and len(own_indices) < len(first):
            return [a[i] for i in own_indices]
        return a

    new_args, new_kwargs = (
        [localised(a) for a in args],
        {k: localised(v) for k, v in kwargs.items()},
    )
    result = func(*new_args, **new_kwargs) if own_indices else []
    if writes:
        for t in first:
            if isinstance(t, GlobalTensor) and t._memory is not None:
                finish_inplace(t)
        return first
    out = _wrap_results(result, own_indices, specs)
    for t, made in zip(first, out, strict=False):
        if "_strides" in t.__dict__ and isinstance(made, GlobalTensor) and made.shape == t.shape:
            copy_noted_order(t, made)
    identify_results([t for t in tensors_in(out, []) if isinstance(t, GlobalTensor)])
    return out


def _record_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: Sequence[torch.Tensor]
) -> None:
    """Add the call to this rank's history.

    The entry has the call's numbers, the tensor count, the first global tensor's layout, and the
    tensors' serials."""
    others = [*args, *[kwargs[k] for k in sorted(kwargs)]]
    tensors = [t for a in (first, *_tensor_lists(others)) for t in a if isinstance(t, GlobalTensor)]
    tensors += [a for a in others if isinstance(a, GlobalTensor)]  # one factor for all
    if tensors:
        numbers = [a for a in others if not _tensor_lists([a])]
        record_together(f"{name} {len(first)} {argument_text(numbers)}", tensors)


def _move_lists_to_positions(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move lists that were passed by name to their positions."""
    for name in list(KERNELS[func])[len(args) :]:
        if name not in kwargs:
            break
        args, kwargs = (*args, kwargs[name]), {k: v for k, v in kwargs.items() if k != name}
    return args, kwargs


def _misplaced_targets(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Sequence[Spec | None]
) -> list[tuple[int, int]]:
    """Return (list, element) of each written tensor whose layout differs from its column's.

    A plain tensor in a column with a global one is such a tensor."""
    mismatched = []
    for k, (name, writes) in enumerate(KERNELS[func].items()):
        # gradients are written into where they are unscaled
        if not writes or k >= len(args) or (name == "grads" and kwargs.get("grad_scale") is None):
            continue
        for i, (t, spec) in enumerate(zip(args[k], specs, strict=False)):
            if isinstance(t, GlobalTensor):
                if k and t._spec is not spec and t.dim():
                    mismatched.append((k, i))
            # A step counter, 0-dim in a later list, belongs to each rank alone.
            elif spec is not None and (k == 0 or t.dim()):
                mismatched.append((k, i))
    return mismatched


def _run_on_copies(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    elsewhere: Sequence[tuple[int, int]],
    specs: Sequence[Any],
) -> Any:
    """Run the kernel on copies in the layouts of their columns, and copy the results back.

    Afterwards a plain tensor has the full result on every rank. Elements that share memory are
    computed in turn, because each must see what the ones before it have written."""
    if len(args[0]) > 1 and _share_memory([args[k][i] for k, i in elsewhere], args):
        return _run_columns_in_turn(func, args, kwargs)
    lists: list[Any] = [list(a) if isinstance(a, (list, tuple)) else a for a in args]
    for k, i in elsewhere:
        t, spec = args[k][i], specs[i]
        lists[k][i] = (
            t.to_global(placement=spec.placement, sbp=spec.layout)
            if isinstance(t, GlobalTensor)
            else global_copy(t, spec.placement, name_of(func))
        )
    func(*lists, **kwargs)
    for k, i in elsewhere:
        if isinstance(args[k][i], GlobalTensor):
            args[k][i].copy_(lists[k][i])
        else:
            copy_back(args[k][i], lists[k][i])
    return args[0]


def _share_memory(written: Sequence[torch.Tensor], args: tuple[Any, ...]) -> bool:
    """Return True if a written plain tensor may share memory with another element of the lists.

    The bytes between a tensor's first and last element count as its memory."""
    targets = {id(t) for t in written if not isinstance(t, GlobalTensor)}
    places: dict[Any, list[tuple[int, int, bool]]] = {}
    for tensors in _tensor_lists(args):
        for t in tensors:
            if isinstance(t, GlobalTensor) or t.layout is not torch.strided or not t.numel():
                continue
            reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
            begin = t.storage_offset() * t.element_size()
            place = (begin, begin + reach * t.element_size(), id(t) in targets)
            places.setdefault((t.device, torch_private.storage_key(t)), []).append(place)
    for found in places.values():
        end, target_end = -1, -1
        for begin, until, target in sorted(found):
            if begin < (end if target else target_end):
                return True
            end, target_end = max(end, until), max(target_end, until if target else -1)
    return False


def _run_columns_in_turn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel for the first element of each list, then for the second one, and so on."""
    n = len(args[0])

    def column(a: Any, i: int) -> Any:
        each = isinstance(a, (list, tuple)) or (isinstance(a, torch.Tensor) and a.dim() == 1)
        return a[i : i + 1] if each and len(a) == n else a

    for i in range(n):
        func(*[column(a, i) for a in args], **{k: column(v, i) for k, v in kwargs.items()})
    return args[0]


def _must_stay_partial(name: str, t: torch.Tensor) -> bool:
    """Return True if a target is partial and has to stay so.

    This is so if the user chose its sbp, if another tensor shares its partial values, or if it is a
    leaf that requires grad."""
    if (
        not name.startswith("_foreach_")
        or name == "_foreach_zero_"
        or not isinstance(t, GlobalTensor)
    ):
        return False
    return any(e.is_partial for e in t._spec.layout) and (
        t._pinned
        or has_aliases(t)
        or has_partial_alias(t)
        or (t._local.is_leaf and t._local.requires_grad)
    )


#: Names of the kernels' arguments that differ from those of the methods.
NAMES = {"scalars": "value", "weights": "weight", "tensors1": "end"}


def _run_partials_singly(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: Sequence[torch.Tensor]
) -> Any:
    """Run the kernel where some targets have to stay partial.

    These targets use the method of the same name, which knows what is linear. The others use the
    kernel."""
    name = name_of(func).removeprefix("_foreach_")
    method = getattr(torch.Tensor, name, None)
    # for the few functions that have no in-place method
    ordinary = getattr(torch, name.removesuffix("_"), None)
    alone = [i for i, t in enumerate(first) if _must_stay_partial(name_of(func), t)]
    together = [i for i in range(len(first)) if i not in alone]
    given, named_given = args, kwargs
    if name in ("addcmul_", "addcdiv_") and len(args) > 3:  # the method takes the factor by name
        given, named_given = args[:3], {**kwargs, "value": args[3]}

    def picked(a: Any, which: list[int]) -> Any:
        each = isinstance(a, (list, tuple)) or (isinstance(a, torch.Tensor) and a.dim() == 1)
        return [a[i] for i in which] if each and len(a) == len(first) else a

    for i in alone:
        target, *others = [picked(a, [i])[0] if picked(a, [i]) is not a else a for a in given]
        named = {
            NAMES.get(k, k): picked(v, [i])[0] if picked(v, [i]) is not v else v
            for k, v in named_given.items()
        }
        if isinstance(named.get("value"), torch.Tensor):
            named["value"] = named["value"].item()
        if method is not None:
            method(target, *others, **named)
        else:
            target.copy_(ordinary(target, *others, **named))  # type: ignore[misc]
    if together:
        func(
            *[picked(a, together) for a in args],
            **{k: picked(v, together) for k, v in kwargs.items()},
        )
    return first


def _box_partial_targets(name: str, targets: Sequence[torch.Tensor]) -> None:
    """Box partial targets that cannot be written as they are, as before any other in-place op.

    Raises InplaceError if a target cannot be boxed."""
    for t in targets:
        if (
            isinstance(t, GlobalTensor)
            and name != "_foreach_zero_"
            and any(e.is_partial for e in t._spec.layout)
        ):
            box_partial_target(name, t)


def _column_spec(
    name: str, column: Sequence[torch.Tensor], factor: GlobalTensor | None, writes: bool
) -> Spec | None:
    """Return the spec of the result for the tensors at one index of each list.

    It is the spec of the first global tensor there, or None if all are plain."""
    owner = next((t for t in column if isinstance(t, GlobalTensor)), factor)
    if owner is None:
        return None
    spec = owner._spec
    for t in column:
        if not isinstance(t, GlobalTensor) and kind_of(t) is not None:
            # raises on every rank if the kind is not supported
            operand_spec(t, spec.placement, f"an operand of {name}")
    for t in column:
        if not (isinstance(t, GlobalTensor) and t._spec is spec) and t.shape != spec.shape:
            spec = _broadcast(column, spec, writes)
            break
    if writes or not any(e.is_partial for e in spec.layout):
        return spec
    return spec.replace(layout=[broadcast if e.is_partial else e for e in spec.layout])


def _broadcast(column: Sequence[torch.Tensor], spec: Spec, writes: bool) -> Spec:
    """Return the result's spec where operands have several shapes.

    The layout is the same if the shape is the result's, else broadcast. Raises torch's own
    error."""
    shape = column[0].shape
    for other in column[1:]:
        pair = [
            spec.replace(shape=s, layout=[broadcast] * spec.placement.axes)
            for s in (shape, other.shape)
        ]
        found, _ = infer_outputs(
            torch.Tensor.add_ if writes else torch.add, pair, (column[0], other), {}
        )
        shape = found[0].shape  # type: ignore[index]
    return (
        spec
        if shape == spec.shape
        else spec.replace(shape=shape, layout=[broadcast] * spec.placement.axes)
    )


def _aligned_layout(shape: torch.Size, spec: Spec) -> Sequence[Sbp]:
    """Return the layout in which an operand's local tensors broadcast against those of ``spec``."""
    if shape == spec.shape:
        return spec.layout
    more = spec.ndim - len(shape)
    same = [
        e.is_split and e.dim >= more and shape[e.dim - more] == spec.shape[e.dim]
        for e in spec.layout
    ]
    return [
        Sbp("split", e.dim - more, e.unit) if s else broadcast
        for e, s in zip(spec.layout, same, strict=True)
    ]


def _local_operand(t: torch.Tensor, spec: Spec | None, name: str) -> torch.Tensor:
    if isinstance(t, GlobalTensor):
        if spec is None or t._spec is spec:
            return t._local
        return box(
            t._local,
            t._spec,
            t._spec.replace(placement=spec.placement, layout=_aligned_layout(t.shape, spec)),
            why=name,
        )
    if spec is None or t.dim() == 0:  # a step counter
        return t
    whole = operand_spec(t, spec.placement, f"an operand of {name}")
    return box(
        promote_plain_tensor(t, whole, f"an operand of {name}"),
        whole,
        whole.replace(layout=_aligned_layout(t.shape, spec)),
        why=name,
    )


def _wrap_results(result: Any, own_indices: list[int], specs: Sequence[Spec | None]) -> Any:
    if isinstance(result, (list, tuple)) and result and isinstance(result[0], (list, tuple)):
        return tuple(_wrap_results(r, own_indices, specs) for r in result)
    local_results = dict(zip(own_indices, result, strict=True))
    dtype = next(iter(local_results.values())).dtype if local_results else None
    out = []
    for i, spec in enumerate(specs):
        if spec is None:
            out.append(local_results[i])
        else:
            made = spec.replace(dtype=local_results[i].dtype if i in local_results else dtype)
            out.append(
                GlobalTensor.wrap(
                    local_results[i] if i in local_results else placeholder(made), made
                )
            )
    return tuple(out) if isinstance(result, tuple) else out


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the norm of each tensor as a partial norm.

    clip_grad_norm_ then needs one reduction for all of them."""
    tensors = args[0]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    if (order not in (math.inf, -math.inf) and order <= 0) or not all(
        isinstance(t, GlobalTensor) for t in tensors
    ):
        dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
        return tuple(torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors)
    _record_call("_foreach_norm", (tensors, order, *args[2:]), kwargs, tensors)
    kind = (
        partial_max
        if order == math.inf
        else partial_min
        if order == -math.inf
        else partial_norm(order)
    )
    specs = [
        t._spec.replace(layout=[broadcast if e.is_partial else e for e in t._spec.layout])
        for t in tensors
    ]
    rank = world().rank
    own_indices = [i for i, s in enumerate(specs) if s.placement.coordinate(rank) is not None]
    parts = [_local_operand(t, s, "_foreach_norm") for t, s in zip(tensors, specs, strict=True)]
    # torch has no largest element of an empty tensor: use the neutral element for an empty shard
    if math.isinf(order):
        parts = [
            t if t.numel() or not s.numel else t.new_full((1,), 0.0 if order > 0 else math.inf)
            for t, s in zip(parts, specs, strict=True)
        ]
    local_norms = (
        dict(
            zip(
                own_indices, func([parts[i] for i in own_indices], *args[1:], **kwargs), strict=True
            )
        )
        if own_indices
        else {}
    )
    everyone = _joint_placement([s.placement for s in specs])
    out = []
    for i, spec in enumerate(specs):
        if everyone is not None:
            out.append(_contribution(local_norms.get(i), spec, everyone, kind))
            continue
        made = Spec.make(
            (),
            local_norms[i].dtype if i in local_norms else spec.dtype,
            spec.placement,
            [kind if e.is_split else broadcast for e in spec.layout],
        )
        out.append(
            GlobalTensor.wrap(local_norms[i] if i in local_norms else placeholder(made), made)
        )
    identify_results(out)
    return tuple(out)


def _joint_placement(placements: Sequence[Placement]) -> Placement | None:
    """Return a placement of all ranks if there are several placements, as in pipeline stages.

    Returns None if there is one."""
    if all(p is placements[0] for p in placements):
        return None
    return Placement(placements[0].type, sorted({r for p in placements for r in p.flat}))


def _contribution(
    norm: torch.Tensor | None, spec: Spec, everyone: Placement, kind: Sbp
) -> GlobalTensor:
    """Return a norm as the contribution of each rank of all placements.

    A rank outside the tensor's placement adds nothing, and one of several replicas adds the
    norm."""
    where = spec.placement.coordinate(world().rank)
    made = Spec.make((), spec.dtype if norm is None else norm.dtype, everyone, [kind])
    if (
        norm is None
        or where is None
        or any(c and e.is_broadcast for c, e in zip(where, spec.layout, strict=True))
    ):
        norm = torch.full(
            (),
            math.inf if kind is partial_min else 0.0,
            dtype=made.dtype,
            device=world().device(everyone.type),
        )
    return GlobalTensor.wrap(norm, made)


def _powsum(t: torch.Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return (t if dtype is None else t.to(dtype)).abs().pow(ord).sum()


#: The function for each tensor, or pair of tensors, of kernels that are not elementwise.
SINGLY: dict[str, Callable[..., torch.Tensor]] = {
    "_foreach_max": torch.max,
    "_foreach_mm": torch.mm,
    "_foreach_powsum": _powsum,
}


def singly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Apply the function of `SINGLY` to each tensor separately."""
    lists = _tensor_lists(args)
    return tuple(
        SINGLY[name_of(func)](*column, *args[len(lists) :], **kwargs)
        for column in zip(*lists, strict=True)
    )


register_handlers(
    {
        function: foreach_norm
        if function is torch_private.foreach_norm
        else singly
        if name_of(function) in SINGLY
        else foreach
        for function in KERNELS
    },
    "list of tensors",
)
