"""Keep torch.compile away from code on global tensors: what works on them runs as it is, with
everything that it calls, on every rank alike.

torch.compile looks at each Python function before it runs it. One that holds global tensors in its
variables, or that comes upon one while it is traced, is not compiled; no part of it is. Code on
plain tensors is compiled as ever. Nothing of this runs, and no compiler is imported, before someone
calls torch.compile. ``nn.Graph`` with ``enable_compile`` compiles what each rank computes on its
local tensors, which are plain.
"""

from __future__ import annotations

import dis
import functools
import os
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, MethodType
from typing import Any
from weakref import WeakSet

import torch

from .._base import torch_private
from .._base.user_code import caller_frame, is_user_code, user_frame, user_line
from ..distributed.world import World
from ..errors import CompileError, CompileWarning
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp
from ..sharding.spec import Spec
from .global_tensor import GlobalTensor

__all__ = ["LEFT_ALONE", "forget", "install"]

#: Classes whose objects a compiler must not look into: code that uses one is not compiled. Rooms
#: above add theirs.
LEFT_ALONE: list[type] = [GlobalTensor, Placement, Sbp, Spec, World]
_MAX_ITEMS = 256  # of a list or dict of arguments, that are looked at
_MAX_DEPTH = 3
_CALLING = frozenset(
    {"forward", "__call__"}
)  # functions that surely use the parameters of their module

_TORCH = str(Path(torch.__file__).parent) + os.sep

_INSTEAD = (
    "To compile a forward pass or a training step on global tensors, write it as a "
    "flow.nn.Graph and switch on graph.config.enable_compile()"
)
_WHOLE = (
    "torch.compile(..., fullgraph=True) was asked to compile code on global tensors, which it "
    "cannot: leave out fullgraph=True, and the code runs as it is. "
    f'{_INSTEAD}. Under torch.compiler.set_stance("force_eager") nothing is compiled, whatever '
    f"fullgraph says"
)


class _Told(threading.local):
    met = False  # whether the function that this thread traces has come upon one of ours


_told = _Told()
_warned = [False]
#: Functions of the user that came upon global tensors nobody saw in their variables.
_meeting: WeakSet[CodeType] = WeakSet()


def forget() -> None:
    """Let the compiler try again what came upon global tensors: a module has become local."""
    _meeting.clear()


def _meets(value: Any) -> bool:
    """Return True if the compiler, which is about to trace what uses ``value``, must not."""
    if issubclass(type(value), tuple(LEFT_ALONE)):
        _told.met = True
        return True
    return False


def _left(code: CodeType, variables: dict[str, Any], outside: dict[str, Any]) -> bool:
    """Return True if a function that is about to run must run as it is, with all that it calls.
    ``outside``: the variables of its module."""
    return code in _meeting or _holds_any(code, variables, outside)


def _met(code: CodeType) -> bool:
    """Return True if the function that has just been traced came upon one of ours. It is remembered
    if it is the user's own: torch's serve others too."""
    met, _told.met = _told.met, False
    if met and is_user_code(code):
        _meeting.add(code)
    return met


def _tell(whole: bool) -> None:
    """Say that a function is not compiled: once in a process; always as an error where the user
    wants the ``whole`` of it compiled (fullgraph=True).

    Where a library compiles its own code so (torchao's optimizers do), the user has asked for
    nothing, and the code runs as it is.
    """
    if whole and _asked_by_user():
        raise CompileError(f"{user_line()}\n{_WHOLE}")
    if _warned[0]:
        return
    _warned[0] = True
    frame = user_frame()
    where = ("globaltensor", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    said = (
        f"torch.compile does not compile code on global tensors: it runs as it is, here and "
        f"wherever else that happens. {_INSTEAD}"
    )
    warnings.warn_explicit(said, CompileWarning, *where)


def _asked_by_user() -> bool:
    """Return True if it is the user's own code that has called a compiled function."""
    frame = caller_frame()
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is None or is_user_code(frame.f_code)


# ---------------------------------------------------------------------- global tensors in variables


@functools.lru_cache(maxsize=1 << 10)
def _outside(code: CodeType) -> tuple[str, ...]:
    """Return the names of its module that a function uses."""
    return tuple(
        {
            str(i.argval)
            for i in dis.get_instructions(code)
            if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        }
    )


def _holds_any(code: CodeType, variables: dict[str, Any], outside: dict[str, Any]) -> bool:
    """Return True if the variables of a function, as it begins, hold global tensors, or modules,
    optimizers and the like that work on them.

    A method need not use what its object has, unless it is the one by which the object is called.
    """
    methods = is_user_code(code) and code.co_name not in _CALLING
    if any(
        _holds(value, not (methods and name == "self"), _MAX_DEPTH)
        for name, value in variables.items()
    ):
        return True
    return (
        any(_holds(outside.get(name), True, _MAX_DEPTH) for name in _outside(code))
        if is_user_code(code)
        else False
    )


def _holds(value: Any, calls: bool, depth: int) -> bool:
    kind = type(value)
    if issubclass(kind, tuple(LEFT_ALONE)):
        return True
    if depth == 0 or kind in (int, float, str, bool, type(None)) or issubclass(kind, torch.Tensor):
        return False
    if issubclass(kind, (list, tuple, dict)):
        items: Iterable[Any] = value.values() if issubclass(kind, dict) else value
        return any(
            _holds(item, calls, depth - 1)
            for _, item in zip(range(_MAX_ITEMS), items, strict=False)
        )
    return calls and _has(value, depth)


def _has(value: Any, depth: int) -> bool:
    """Return True if something that is called works on global tensors of its own."""
    kind = type(value)
    if issubclass(kind, torch.nn.Module):
        return any(
            isinstance(t, GlobalTensor)
            for held in (value.parameters(), value.buffers())
            for t in held
        )
    if issubclass(kind, torch.optim.Optimizer):
        return any(
            isinstance(p, GlobalTensor) for group in value.param_groups for p in group["params"]
        )
    if issubclass(kind, MethodType):
        return _has(value.__self__, depth)
    if issubclass(kind, functools.partial):
        return any(
            _holds(item, True, depth - 1)
            for item in (value.func, *value.args, *value.keywords.values())
        )
    if issubclass(kind, type) or not callable(value):
        return False
    return any(_holds(item, True, depth - 1) for item in getattr(value, "__dict__", {}).values())


def install() -> None:
    """Ask here before torch's compiler, once it is imported, traces a function."""
    torch_private.watch_compiler(_left, _meets, _met, _tell, _WHOLE)


install()
