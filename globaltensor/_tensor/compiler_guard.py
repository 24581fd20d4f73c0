"""Keep torch.compile away from code on global tensors.

Such code runs uncompiled, with everything that it calls, on every rank alike. The package calls
`install` at import.

torch.compile looks at each Python function before it runs it. A function that holds global tensors
in its variables, or that meets one while it is traced, is not compiled, nor is any part of it. Code
on plain tensors is compiled as ever. Nothing here runs, and no compiler is imported, before someone
calls torch.compile. ``nn.Graph`` with ``enable_compile`` compiles what each rank computes on its
local tensors, which are plain.
"""

from __future__ import annotations

import dis
import functools
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, MethodType
from typing import Any
from weakref import WeakSet

import torch

from .._base import torch_private
from .._base.user_code import caller_frame, is_user_code, user_line, warn_user
from ..distributed.world_base import World
from ..errors import CompileError, CompileWarning
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp
from ..sharding.spec import Spec
from .global_tensor import GlobalTensor

__all__ = ["LEFT_ALONE", "forget", "install"]

#: Classes whose objects a compiler must not look into: code that uses one is not compiled. Other
#: packages add theirs.
LEFT_ALONE: list[type] = [GlobalTensor, Placement, Sbp, Spec, World]
_MAX_ITEMS = 256  # maximum number of items of a list or dict of arguments that are checked
_MAX_DEPTH = 3
# Functions that surely use the parameters of their module.
_CALLING = frozenset({"forward", "__call__"})

_TORCH = str(Path(torch.__file__).parent) + os.sep
_CONTROL_FLOW = os.path.join(_TORCH, "_higher_order_ops", "")

_INSTEAD = (
    "To compile a forward pass or a training step on global tensors, write it as a "
    "flow.nn.Graph and switch on graph.config.enable_compile()"
)
_WHOLE = (
    "torch.compile(..., fullgraph=True) cannot compile code on global tensors: leave out "
    "fullgraph=True, and the code runs uncompiled. "
    f'{_INSTEAD}. Under torch.compiler.set_stance("force_eager") nothing is compiled, with or '
    f"without fullgraph"
)
_NOT_AN_OPERAND = (
    "a function passed to torch.cond or while_loop uses global tensors that are not among the "
    "operands, so it cannot be traced. Make an operand or the condition global "
    "(x.to_global(placement, sbp=flow.sbp.broadcast)), or use Python's own if and while"
)


class _TracingState(threading.local):
    met = False  # True if the function that this thread traces has met an object of these classes


_tracing = _TracingState()
_warned = [False]
#: Functions of the user that met global tensors which were not visible in their variables.
_meeting: WeakSet[CodeType] = WeakSet()


def forget() -> None:
    """Let the compiler retry functions that met global tensors: a module has become local."""
    _meeting.clear()


def _must_not_trace(value: Any) -> bool:
    """Return True if the compiler, about to trace code that uses ``value``, must not do so."""
    if issubclass(type(value), tuple(LEFT_ALONE)):
        _tracing.met = True
        return True
    return False


def _must_run_uncompiled(
    code: CodeType, variables: dict[str, Any], outside: dict[str, Any]
) -> bool:
    """Return True if a function that is about to run must run uncompiled, with all that it calls.

    ``outside``: the variables of its module.
    """
    return code in _meeting or _variables_hold_global(code, variables, outside)


def _met_global_tensor(code: CodeType) -> bool:
    """Return True if the function that has just been traced met a global tensor.

    It is remembered if it is the user's own: torch's functions serve other code too.
    """
    met, _tracing.met = _tracing.met, False
    if met and is_user_code(code):
        _meeting.add(code)
    return met


def _warn_uncompiled(whole: bool) -> None:
    """Warn that a function is not compiled, once in a process.

    Always raise an error where the user wants the ``whole`` of it compiled (fullgraph=True). Where
    a library compiles its own code so (torchao's optimizers do), the user has not asked for it, and
    the code runs uncompiled. Nothing is said of `torch.cond` and its kin, which compile a call
    themselves.
    """
    if whole and (operands := _operands_of_control_flow()) is not None:
        if not any(_holds_global(value, False, _MAX_DEPTH) for value in operands):
            raise CompileError(f"{user_line()}\n{_NOT_AN_OPERAND}")
        return
    if whole and _called_by_user():
        raise CompileError(f"{user_line()}\n{_WHOLE}")
    if _warned[0]:
        return
    _warned[0] = True
    warn_user(
        f"torch.compile does not compile code on global tensors: such code runs uncompiled, here "
        f"and everywhere else. {_INSTEAD}",
        CompileWarning,
    )


def _operands_of_control_flow() -> list[Any] | None:
    """Return the variables of torch's function of control flow that compiles a call.

    Return None if none of these functions compiles it."""
    frame, found = caller_frame(), None
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.startswith(_CONTROL_FLOW):
            found = list(frame.f_locals.values())  # of the outermost one, which the user called
        frame = frame.f_back
    return found


def _called_by_user() -> bool:
    """Return True if the user's own code has called a compiled function."""
    frame = caller_frame()
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is None or is_user_code(frame.f_code)


# ---------------------------------------------------------------------- global tensors in variables


@functools.lru_cache(maxsize=1 << 10)
def _used_global_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of its module that a function uses."""
    return tuple(
        {
            str(i.argval)
            for i in dis.get_instructions(code)
            if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        }
    )


def _variables_hold_global(
    code: CodeType, variables: dict[str, Any], outside: dict[str, Any]
) -> bool:
    """Return True if a function's variables hold global tensors as it begins, or users of them.

    Such users are modules, optimizers and the like. A method need not use what its object has,
    unless it is the one by which the object is called.
    """
    methods = is_user_code(code) and code.co_name not in _CALLING
    if any(
        _holds_global(value, not (methods and name == "self"), _MAX_DEPTH)
        for name, value in variables.items()
    ):
        return True
    return (
        any(_holds_global(outside.get(name), True, _MAX_DEPTH) for name in _used_global_names(code))
        if is_user_code(code)
        else False
    )


def _holds_global(value: Any, calls: bool, depth: int) -> bool:
    kind = type(value)
    if issubclass(kind, tuple(LEFT_ALONE)):
        return True
    if depth == 0 or kind in (int, float, str, bool, type(None)) or issubclass(kind, torch.Tensor):
        return False
    if issubclass(kind, (list, tuple, dict)):
        items: Iterable[Any] = value.values() if issubclass(kind, dict) else value
        return any(
            _holds_global(item, calls, depth - 1)
            for _, item in zip(range(_MAX_ITEMS), items, strict=False)
        )
    return calls and _callable_holds_global(value, depth)


def _callable_holds_global(value: Any, depth: int) -> bool:
    """Return True if a callable works on global tensors of its own."""
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
        return _callable_holds_global(value.__self__, depth)
    if issubclass(kind, functools.partial):
        return any(
            _holds_global(item, True, depth - 1)
            for item in (value.func, *value.args, *value.keywords.values())
        )
    if issubclass(kind, type) or not callable(value):
        return False
    return any(
        _holds_global(item, True, depth - 1) for item in getattr(value, "__dict__", {}).values()
    )


def install() -> None:
    """Install the check before torch's compiler, once it is imported, traces a function."""
    torch_private.watch_compiler(
        _must_run_uncompiled, _must_not_trace, _met_global_tensor, _warn_uncompiled, _WHOLE
    )


install()
