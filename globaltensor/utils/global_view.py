"""``flow.utils.global_view``: OneFlow's functions for pytrees of tensors, and its global mode.

Users call them to convert pytrees between local and global, and to create global tensors without
placement and sbp in each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .._base.pytree import object_tensors, replaced_in_objects
from .._base.user_code import warn_user
from .._ops.creation import GLOBALLY
from .._tensor.convert import check_placement
from .._tensor.global_tensor import GlobalTensor
from ..distributed.world import world
from ..errors import SbpError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, as_layout

__all__ = ["GlobalMode", "current_global_mode", "global_mode", "to_global", "to_local"]

_LEAVES = (torch.Tensor, type(None))


def to_global(
    input: Any,
    placement: Placement | None = None,
    sbp: Sbp | Sequence[Sbp] | Callable[[Any, torch.Tensor], Any] | None = None,
    warn_on_non_tensor_leaf: bool = True,
    **options: Any,
) -> Any:
    """Make every tensor in a pytree of tuples, lists and dicts global.

    Collective over the world.

    ``sbp``: one for all, or a callable ``(input, tensor) -> sbp``. Ranks outside the placement may
    pass None: they receive the pytree of its first rank. ``options``: those of ``x.to_global``. A
    leaf that is neither a tensor nor None stays the same, with a warning. Raises SbpError,
    PlacementError, ShapeError.
    """
    if warn_on_non_tensor_leaf:
        _warn_unchanged(input)
    tensors = object_tensors(input, [])
    if placement is not None:
        check_placement(placement)
        this_world, first = world(), placement.flat[0]
        own_shell = _shape(input) if this_world.rank == first else input is None
        shells = this_world.comm(tuple(range(this_world.size))).all_gather_object(
            own_shell, "global_view.to_global"
        )
        if input is None and shells[first] is not True:
            shell, kinds = shells[first]
            tensors = [torch.empty(0, dtype=d, requires_grad=g) for d, g in kinds]
            input = replaced_in_objects(shell, iter(tensors))
    made = [
        t.to_global(placement=placement, sbp=sbp(input, t) if _is_rule(sbp) else sbp, **options)
        for t in tensors
    ]  # type: ignore[attr-defined, operator]
    return replaced_in_objects(input, iter(made))


def _is_rule(sbp: Any) -> bool:
    return callable(sbp) and not isinstance(sbp, Sbp)


def _shape(input: Any) -> Any:
    """Return what another rank needs to build the same pytree.

    It is the pytree with an empty tensor for each tensor, and their dtypes. It is True if ``input``
    is None."""
    if input is None:
        return True
    tensors = object_tensors(input, [])
    return replaced_in_objects(input, iter([torch.empty(0)] * len(tensors))), [
        (t.dtype, t.requires_grad) for t in tensors
    ]


def _warn_unchanged(value: Any) -> None:
    if isinstance(value, dict):
        for v in value.values():
            _warn_unchanged(v)
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for v in value:
            _warn_unchanged(v)
    elif not isinstance(value, _LEAVES):
        warn_user(
            f"global_view.to_global: a {type(value).__name__} is no tensor and stays unchanged "
            "on each rank",
        )


def to_local(input: Any, *, copy: bool = False) -> Any:
    """Replace every global tensor in a pytree by this rank's local tensor.

    The pytree consists of tuples, lists and dicts. Local tensors stay the same."""
    tensors = object_tensors(input, [])
    return replaced_in_objects(
        input, iter([t.to_local(copy=copy) if isinstance(t, GlobalTensor) else t for t in tensors])
    )


@dataclass(frozen=True)
class GlobalMode:
    """A state of `global_mode`: on or off, and the layout of created tensors."""

    placement: Placement | None = None
    sbp: tuple[Sbp, ...] | None = None

    @property
    def is_enabled(self) -> bool:
        """True if creation functions without ``placement`` and ``sbp`` make global tensors."""
        return self.placement is not None


@contextmanager
def global_mode(
    enabled: bool, placement: Placement | None = None, sbp: Sbp | Sequence[Sbp] | None = None
) -> Iterator[GlobalMode]:
    """Make this library's creation functions create global tensors within the block.

    This applies to ``flow.ones`` and the like in calls with neither placement nor sbp. With
    ``enabled=False`` they create local tensors again. Torch's own functions (``torch.ones``) always
    create local tensors. Raises SbpError, PlacementError.

    >>> from globaltensor import placement
    >>> from globaltensor.sbp import broadcast
    >>> with global_mode(True, placement("cpu", [0]), broadcast):
    ...     current_global_mode().sbp
    (globaltensor.sbp.broadcast,)
    """
    if enabled:
        if placement is None or sbp is None:
            raise SbpError("global_mode(True) needs placement and sbp, the layout of new tensors")
        check_placement(placement)
        token = GLOBALLY.set((placement, as_layout(sbp, placement.axes)))
    else:
        token = GLOBALLY.set((None, None))
    try:
        yield current_global_mode()
    finally:
        GLOBALLY.reset(token)


def current_global_mode() -> GlobalMode:
    """Return the current state of `global_mode`."""
    return GlobalMode(*GLOBALLY.get())
