"""A call tried without its values: what comes out, or torch's own words where it refuses the call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from . import _torch
from .distributed.world import world
from .plans import replaced, tensors_in
from .spec import Spec

__all__ = ["on_meta"]

_MOST = 1 << 20  # elements of operands that a call is tried with


def on_meta(func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor] | None, Any]:
    """Run the function on meta tensors of the global shapes -> (result tensors, result); None where torch has no meta kernel for it."""
    cast = _torch.any_autocast()
    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            for one in (torch.no_grad(), _torch.without_function_modes(), _torch.unobserved(), _torch.fake_tensors() if cast else _torch.real_tensors()):
                stack.enter_context(one)
            these = iter([torch.empty(s.shape, dtype=s.dtype, device=world().device(s.placement.type) if cast else "meta") for s in specs])
            warnings.simplefilter("ignore")
            out = func(*replaced(args, these), **replaced(kwargs, these))
    except (RuntimeError, AssertionError) as error:
        if isinstance(error, NotImplementedError) or "on meta tensors" in str(error):  # no such kernel; or the result depends on values
            return None, None
        tried, own = _alone(func, specs, args, kwargs)
        if tried and own is None and isinstance(error, AssertionError):
            return None, None  # the kernel for meta tensors takes less; where it refuses in words, the other may not look (attention: as many keys as values)
        raise own or (RuntimeError(str(error)) if isinstance(error, AssertionError) else error) from None
    return tensors_in(out, []), out


def _alone(func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Exception | None]:
    """(whether the call could be tried on one device, what was raised): kernels for meta tensors are written in Python, and word some refusals otherwise."""
    if sum(s.numel for s in specs) > _MOST or any(s.placement.type != "cpu" for s in specs):
        return False, None
    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            for one in (torch.no_grad(), _torch.without_function_modes(), _torch.unobserved(), _torch.real_tensors()):
                stack.enter_context(one)
            these = iter([torch.zeros(s.shape, dtype=s.dtype) for s in specs])
            warnings.simplefilter("ignore")
            func(*replaced(args, these), **replaced(kwargs, these))
    except Exception as error:
        return True, error
    return True, None
