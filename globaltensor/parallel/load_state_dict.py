"""``module.load_state_dict`` of modules with global parameters: ranks that differ raise one error.

PyTorch puts every error of a copied parameter into the text of one RuntimeError, and goes on with
the next parameter. Ranks that have diverged must not go on, so their error comes out at once.

With ``assign=True`` PyTorch puts the loaded tensors in place of a module's. A plain tensor then
becomes global, in the layout of the tensor that it replaces: plain parameters would take the memory
of the full model on every rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from .._base.patches import patch
from .._base.user_code import user_line
from .._tensor.global_tensor import GlobalTensor
from ..distributed.world import world
from ..errors import DivergenceError, WorldError
from ..sharding.spec import Spec

__all__ = ["check_same_keys"]

_SHOWN = 3  # names that an error shows


class _Assigned(NamedTuple):
    """A plain tensor that a call of load_state_dict(assign=True) put in place of a global one."""

    plain: torch.Tensor
    layout: Spec
    value: torch.Tensor  # the global tensor of the same value, in this layout
    made: torch.Tensor  # the parameter or buffer that the module has now


#: Those of the call that runs.
_ASSIGNED: ContextVar[list[_Assigned]] = ContextVar("assigned")


class _LoadingErrors(list[str]):
    """A list of error texts that PyTorch fills, except for errors that concern other ranks."""

    def append(self, message: str) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, WorldError):
            raise error
        super().append(message)


def check_same_keys(module: torch.nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Raise DivergenceError unless the ranks of a module's global tensors load the same names.

    Collective among these ranks.
    """
    this_world = world()
    tensors = [*module.parameters(), *module.buffers()]
    placements = {t._spec.placement for t in tensors if isinstance(t, GlobalTensor)}
    ranks = tuple(sorted({r for placement in placements for r in placement.flat}))
    if len(ranks) < 2 or this_world.rank not in ranks or not this_world.compares:
        return
    everyone = this_world.comm(ranks).all_gather_object(sorted(state_dict), "load_state_dict")
    for rank, names in zip(ranks, everyone, strict=True):
        if names != everyone[0]:
            only = [
                f"  only rank {r} has {', '.join(sorted(set(own) - set(other))[:_SHOWN])}\n"
                for r, own, other in (
                    (ranks[0], everyone[0], names),
                    (rank, names, everyone[0]),
                )
                if set(own) - set(other)
            ]
            raise DivergenceError(
                f"{user_line()}\nload_state_dict of {type(module).__name__}: the ranks pass state "
                f"dicts with different names:\n{''.join(only)}"
                "Load the same file on every rank: flow.load(path, global_src_rank=0) reads it on "
                "one rank for all"
            )


def _wrap_load_state_dict(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def run(self: torch.nn.Module, state_dict: Any, *args: Any, **options: Any) -> Any:
        if isinstance(state_dict, Mapping):
            check_same_keys(self, state_dict)
        token = _ASSIGNED.set([])
        try:
            return load(self, state_dict, *args, **options)
        finally:
            _ASSIGNED.reset(token)

    return run


def _wrap_load_from_state_dict(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def run(self: torch.nn.Module, *args: Any) -> None:
        *others, error_messages = args
        messages = _LoadingErrors()
        before = _own_global_tensors(self)
        load(self, *others, messages)
        for name, old in before.items():
            _keep_global(self, name, old)
        error_messages += messages

    return run


def _own_global_tensors(module: torch.nn.Module) -> dict[str, GlobalTensor]:
    own = (*module._parameters.items(), *module._buffers.items())
    return {name: t for name, t in own if isinstance(t, GlobalTensor)}


def _keep_global(module: torch.nn.Module, name: str, old: GlobalTensor) -> None:
    """Make a plain tensor that was put in place of a global one global, in the same layout.

    Tensors that are one object, or that share their memory, do so afterwards.
    """
    assigned = getattr(module, name, None)
    if not isinstance(assigned, torch.Tensor) or isinstance(assigned, GlobalTensor):
        return
    converted = _ASSIGNED.get([])
    for other in converted:
        if other.plain is assigned:
            setattr(module, name, other.made)
            return
    tensor = next(
        (o.value for o in converted if o.layout is old._spec and _is_alias(o.plain, assigned)), None
    )
    if tensor is None:
        with torch.no_grad():
            tensor = torch.empty_like(old, dtype=assigned.dtype, device=assigned.device)
            if not assigned.is_meta:
                tensor.copy_(assigned)
    is_parameter = name in module._parameters
    made = torch.nn.Parameter(tensor, assigned.requires_grad) if is_parameter else tensor
    converted.append(_Assigned(assigned, old._spec, tensor, made))
    setattr(module, name, made)


def _is_alias(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two plain tensors show the same memory in the same form."""
    return (
        a.device == b.device
        and a.device.type != "meta"
        and a.numel() > 0
        and (a.data_ptr(), a.shape, a.stride(), a.dtype)
        == (b.data_ptr(), b.shape, b.stride(), b.dtype)
    )


def install() -> None:
    """Patch torch.nn.Module: the ranks compare names, and their errors come out once."""
    patch("torch.nn:Module.load_state_dict", _wrap_load_state_dict)
    patch("torch.nn:Module._load_from_state_dict", _wrap_load_from_state_dict)


install()
