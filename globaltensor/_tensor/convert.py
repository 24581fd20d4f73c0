"""Conversion of local tensors to one spec: gather what the ranks hold, and check that it fits.

Pytrees of tensors are made global and local here too. `to_global` and the modules' methods call it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from .._base import torch_private
from .._base.user_code import user_line
from ..distributed.world import world
from ..errors import DivergenceError, GlobalTensorError, PlacementError, SbpError, ShapeError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp
from ..sharding.spec import Spec
from ..sharding.tensor_kinds import TensorKind, described, refuse
from .global_tensor import GlobalTensor

__all__ = [
    "all_ranks",
    "check_meta_consistency",
    "check_placement",
    "device_type",
    "gather_specs",
    "global_id",
    "to_global",
    "to_local",
]


@lru_cache(maxsize=64)
def all_ranks(size: int) -> Placement:
    return Placement("cpu", list(range(size)))


def check_placement(placement: Placement) -> None:
    """Raise PlacementError where the placement names a rank outside this world."""
    if not isinstance(placement, Placement):
        type = placement if placement in ("cpu", "cuda") else "cpu"
        raise PlacementError(
            f"placement must be a globaltensor.placement, got {placement!r}: all ranks are "
            f'flow.placement.all("{type}")'
        )
    size = world().size
    outside = [r for r in placement.flat if r >= size]
    if outside:
        raise PlacementError(
            f"{placement!r} names rank {', '.join(map(str, outside))}, but this world has {size} "
            f"rank{'s' if size > 1 else ''} (0 to {size - 1}): "
            "start more processes (--nproc_per_node), or use fewer ranks "
            f'(flow.placement.all("{placement.type}") has all of this world)'
        )


def device_type(device: Any) -> str:
    """Return the device type for a global tensor.

    Raises GlobalTensorError for one device of many.
    """
    device = torch.device(device) if isinstance(device, str) else device
    if isinstance(device, int) or (
        device.index is not None
        and device.type != "cpu"
        and device.index != world().index(device.type)
    ):
        kind = getattr(device, "type", "cuda")
        raise GlobalTensorError(
            f"a global tensor moves by device type, not to one device ({device}): use "
            f"x.to({kind!r}) or to_global(placement=...)"
        )
    return str(device.type)


def gather_specs(
    local: torch.Tensor, placement: Placement, layout: Sequence[Sbp], check: bool
) -> tuple[Spec, bool]:
    """Return the spec of the global tensor that the ranks' local tensors form.

    Also return True if all have the same memory order. Collective over the world if ``check``.
    """
    this_world = world()
    own_description = described(local, placement)
    target = placement.flat, _layout_arguments_text(placement, tuple(layout))
    order = (
        ()
        if isinstance(own_description, TensorKind) or local.is_contiguous()
        else tuple(sorted(range(local.dim()), key=lambda d: (-local.stride(d), d)))
    )
    alike = True
    if check and this_world.size > 1:
        # A rank whose tensors have no memory sends that, too.
        with (
            torch_private.real_tensors()
            if isinstance(own_description, TensorKind)
            else contextlib.nullcontext()
        ):
            descriptions = this_world.comm(tuple(range(this_world.size))).all_gather_object(
                (own_description, order, target), "to_global"
            )
        _check_same_target([description[2] for description in descriptions])
        held = {r: descriptions[r][0] for r in placement.flat}
        alike = len({descriptions[r][1] for r in placement.flat}) == 1
    else:
        held = dict.fromkeys(placement.flat, own_description)
    return spec_of(held, placement, layout), alike


@lru_cache(maxsize=256)
def _layout_arguments_text(placement: Placement, layout: tuple[Sbp, ...]) -> str:
    return f"{placement!r}, sbp={list(layout) if len(layout) > 1 else layout[0]!r}"


def _check_same_target(targets: Sequence[tuple[tuple[int, ...], str]]) -> None:
    """Raise DivergenceError if a rank of a placement passes other arguments to to_global.

    ``targets``: for each rank the ranks of its placement, and its arguments as a text. Ranks of
    separate placements may call together.
    """
    odd = next(
        ((r, m) for r, (ranks, text) in enumerate(targets) for m in ranks if targets[m][1] != text),
        None,
    )
    if odd is not None:
        rows = "".join(f"  rank {r} passes {targets[r][1]}\n" for r in sorted(odd))
        raise DivergenceError(
            f"{user_line()}\nto_global: the ranks pass different arguments:\n{rows}"
            "Pass the same sbp, and a placement that lists the same ranks in the same order, on "
            "every rank"
        )


def spec_of(held: Mapping[int, Any], placement: Placement, layout: Sequence[Sbp]) -> Spec:
    """Combine the descriptions of the ranks' local tensors into the spec.

    ``held``: for each rank `tensor_kinds.described`, shape and dtype. Raises KindError and
    ShapeError, which name the ranks and what they hold.

    >>> p = Placement("cpu", [0, 1])
    >>> spec_of({0: ((3, 2), torch.float32), 1: ((2, 2), torch.float32)}, p, [Sbp("split", 0)])
    f32[5, 2] S(0)
    """
    refuse("the argument of to_global", held)
    first, dtype = held[placement.flat[0]]
    if any(d is not dtype for _, d in held.values()):
        raise ShapeError(
            _mismatch_text("to_global: the ranks' local tensors have different dtypes", held)
            + "cast them to one dtype first, for example x.float()"
        )
    if any(len(s) != len(first) for s, _ in held.values()):
        raise ShapeError(
            _mismatch_text(
                "to_global: the ranks' local tensors have different numbers of dims", held
            )
            + "pass a local tensor of the same global tensor on every rank"
        )
    canonical = [
        Sbp("split", e.dim % len(first))
        if e.is_split and first and -len(first) <= e.dim < len(first)
        else e
        for e in layout
    ]
    shape = list(first)
    for dim in {e.dim for e in canonical if e.is_split and e.dim < len(first)}:
        axes = [a for a, e in enumerate(canonical) if e.is_split and e.dim == dim]
        shape[dim] = sum(held[r][0][dim] for r in placement.fiber(placement.flat[0], axes))
    spec = Spec.make(shape, dtype, placement, canonical)
    wrong = [r for r in placement.flat if spec.local_shape(r) != held[r][0]]
    if wrong:
        short = " ".join(e.short for e in layout)
        balanced = "; ".join(f"rank {r}: {list(spec.local_shape(r))}" for r in placement.flat[:8])
        raise ShapeError(
            _mismatch_text(
                f"to_global: the ranks' local tensors do not form one tensor with sbp {short}", held
            )
            + f"the local shapes of a tensor of shape {shape} would be {balanced}. If n elements "
            "are split over p ranks, the first n mod p hold one more; "
            "dims that are not split must be equal"
        )
    return spec


def _mismatch_text(what: str, held: Mapping[int, Any]) -> str:
    rows = [
        f"  rank {r} has {str(d).removeprefix('torch.')}{list(s)}\n"
        for r, (s, d) in list(held.items())[:16]
    ]
    more = f"  and {len(held) - 16} more ranks\n" if len(held) > 16 else ""
    return f"{what}\n{''.join(rows)}{more}"


def check_meta_consistency(self: GlobalTensor) -> None:
    """Check that all ranks have the same tensor: shape, dtype, placement, sbp.

    Collective over the world. Raises ShapeError, which names two ranks that differ.
    """
    this_world, spec = world(), self._spec.shown
    own_description = (
        f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)} "
        f"{' '.join(e.short for e in spec.layout)} on {spec.placement!r}"
    )
    descriptions = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        own_description, "check_meta_consistency"
    )
    for r, other in enumerate(descriptions):
        if other != descriptions[0]:
            raise ShapeError(
                f"the ranks have different tensors:\n  rank 0 has {descriptions[0]}\n"
                f"  rank {r} has {other}\nmake the tensor with the same calls on every rank"
            )


def global_id(self: GlobalTensor) -> int:
    """Return a number of this tensor's own, the same on every rank.

    All ranks must ask for the numbers of the same tensors in the same order. Nothing communicates.
    """
    known = self.__dict__
    if "_global_id" not in known:
        _ids.last += 1
        known["_global_id"] = _ids.last
    return known["_global_id"]  # type: ignore[no-any-return]


class _Ids(threading.local):
    last = -1  # simulated ranks are threads, and each counts separately


_ids = _Ids()


def to_global(x: Any, placement: Placement | None = None, sbp: Any = None, **options: Any) -> Any:
    """Make a tensor, or the tensors in a pytree of tuples, lists and dicts, global.

    It is ``flow.to_global``. ``sbp`` may be a callable ``(path, tensor) -> sbp``. Raises SbpError
    for None.
    """
    if x is None:
        raise SbpError(
            "to_global of None: a rank without inputs must call "
            "flow.utils.global_view.to_global, which gets shapes and dtypes from the other ranks"
        )
    return _convert_nested(
        x,
        lambda path, t: t.to_global(
            placement,
            sbp(path, t) if callable(sbp) and not isinstance(sbp, Sbp) else sbp,
            **options,
        ),
    )


def to_local(x: Any, **options: Any) -> Any:
    """Make a tensor, or the tensors in a pytree, local: ``flow.to_local``."""
    return _convert_nested(
        x, lambda path, t: t.to_local(**options) if isinstance(t, GlobalTensor) else t
    )


def _convert_nested(x: Any, change: Callable[[str, torch.Tensor], Any], path: str = "") -> Any:
    if isinstance(x, torch.Tensor):
        return change(path, x)
    if isinstance(x, (dict, UserDict)):
        # copied, not built from its items: its class may need other arguments (a defaultdict), or
        # count the items (a Counter)
        out = copy.copy(x)
        for k, v in x.items():
            out[k] = _convert_nested(v, change, f"{path}.{k}".lstrip("."))
        return out
    if isinstance(x, (tuple, list)):
        parts = [_convert_nested(v, change, f"{path}.{i}".lstrip(".")) for i, v in enumerate(x)]
        return type(x)(*parts) if isinstance(getattr(x, "_fields", None), tuple) else type(x)(parts)
    return x
