"""``module.load_state_dict`` of modules with global parameters: ranks that differ raise one error.

PyTorch puts every error of a copied parameter into the text of one RuntimeError, and goes on with
the next parameter. Ranks that have diverged must not go on, so their error comes out at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._base.patches import patch
from .._base.user_code import user_line
from .._tensor.global_tensor import GlobalTensor
from ..distributed.world import world
from ..errors import DivergenceError, WorldError

__all__ = ["check_same_keys"]

_SHOWN = 3  # names that an error shows


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
        return load(self, state_dict, *args, **options)

    return run


def _wrap_load_from_state_dict(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def run(self: torch.nn.Module, *args: Any) -> None:
        *others, error_messages = args
        messages = _LoadingErrors()
        load(self, *others, messages)
        error_messages += messages

    return run


def install() -> None:
    """Patch torch.nn.Module: the ranks compare names, and their errors come out once."""
    patch("torch.nn:Module.load_state_dict", _wrap_load_state_dict)
    patch("torch.nn:Module._load_from_state_dict", _wrap_load_from_state_dict)


install()
