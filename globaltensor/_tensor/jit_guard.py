"""``torch.jit``, ``make_fx`` and AOTAutograd on global tensors: refusals that name what works.

A TorchScript program has plain tensors only. Tracing would read a global tensor's memory, and
scripting would copy local tensors without their layout. Inside a program no function of torch is
called through Python, so a global tensor would reach kernels that have no memory to read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._base.patches import patch
from .._base.pytree import object_tensors
from .._base.user_code import user_line
from ..errors import CompileError
from .global_tensor import GlobalTensor

__all__: list[str] = []


def _global_tensors(values: Any) -> Iterator[str]:
    """Yield a description of each global tensor in modules and in pytrees of tensors."""
    for value in values:
        if isinstance(value, torch.nn.Module):
            named = [*value.named_parameters(), *value.named_buffers()]
            yield from (f"its tensor {n}" for n, t in named if isinstance(t, GlobalTensor))
        else:
            yield from (
                "an argument" for t in object_tensors(value, []) if isinstance(t, GlobalTensor)
            )


class _RefuseGlobalTensors(TorchFunctionMode):
    """A mode in which a call with a global tensor is an error: a tracer runs.

    The function that is traced may use one that it holds, in a closure for example. What this
    library computes for it on the local tensors would become a part of the program.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, GlobalTensor) for t in types):
            raise _refusal(self._name, "a tensor that the traced function uses")
        return func(*args, **(kwargs or {}))


def _refusal(name: str, found: str) -> CompileError:
    return CompileError(
        f"{user_line()}\n{name} cannot hold global tensors, and {found} is one. To run "
        f"a model on many ranks as a static graph, use flow.nn.Graph. To export it, "
        f"copy its values to a plain model first: plain.load_state_dict(torch.load(f)) "
        f"after flow.save(model.state_dict(), f, global_dst_rank=0) on every rank"
    )


def _refusing(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            if (found := next(_global_tensors([*args, *options.values()]), None)) is not None:
                raise _refusal(name, found)
            if name == "torch.jit.script":
                # it looks names up in the frame that called it, which is one further up now
                options["_frames_up"] = options.get("_frames_up", 0) + 1
                return function(*args, **options)
            with _RefuseGlobalTensors(name):
                return function(*args, **options)

        return run

    return replaced


def _refusing_make_fx(make_fx: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make_fx)
    def run(*args: Any, **options: Any) -> Any:
        traced = make_fx(*args, **options)

        @functools.wraps(traced)
        def trace(*inputs: Any) -> Any:
            if (found := next(_global_tensors(inputs), None)) is not None:
                raise _refusal("make_fx", found)
            return traced(*inputs)

        return trace

    return run


def _refusing_inputs(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse the inputs of a function that AOTAutograd compiles.

    The graph would hold what this library does for the layouts of the first call, and run it for
    those of all later ones.
    """

    @functools.wraps(process_inputs)
    def run(flat_args: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(t, GlobalTensor) for t in flat_args):
            raise _refusal("AOTAutograd (functorch.compile)", "an input")
        return process_inputs(flat_args, *args, **options)

    return run


def _refusing_call(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if next(_global_tensors([*args, *options.values()]), None) is not None:
            raise CompileError(
                f"{user_line()}\na program of torch.jit ({self.name}) runs on plain tensors, and "
                f"an argument is a global tensor. Call the Python function or module "
                f"that the program was made of, or run the program on local tensors: "
                f"globaltensor.local_map(program, out_sbp=..., in_sbp=...)"
            )
        return function(self, *args, **options)

    return call


def install() -> None:
    """Patch the functions of torch.jit that take modules, and the calls of its programs."""
    patch("torch.jit:trace", _refusing("torch.jit.trace"))
    patch("torch.jit:trace_module", _refusing("torch.jit.trace_module"))
    patch("torch.jit:_get_trace_graph", _refusing("torch.onnx.export(dynamo=False)"))
    patch("torch.jit:script", _refusing("torch.jit.script"))
    patch("torch._C:ScriptFunction.__call__", _refusing_call)
    patch("torch._C:ScriptMethod.__call__", _refusing_call)
    patch("torch.fx.experimental.proxy_tensor:make_fx", _refusing_make_fx)
    patch("torch._functorch.aot_autograd:process_inputs", _refusing_inputs)


install()
