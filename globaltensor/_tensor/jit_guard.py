"""``torch.jit`` on global tensors: a refusal that names what works instead.

A TorchScript program has plain tensors only. Tracing would read a global tensor's memory, and
scripting would copy local tensors without their layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

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


def _refusing(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            if (found := next(_global_tensors([*args, *options.values()]), None)) is not None:
                raise CompileError(
                    f"{user_line()}\n{name} cannot hold global tensors, and {found} is one. To run "
                    f"a model on many ranks as a static graph, use flow.nn.Graph. To export it, "
                    f"copy its values to a plain model first: plain.load_state_dict(torch.load(f)) "
                    f"after flow.save(model.state_dict(), f, global_dst_rank=0) on every rank"
                )
            if name == "torch.jit.script":
                # it looks names up in the frame that called it, which is one further up now
                options["_frames_up"] = options.get("_frames_up", 0) + 1
            return function(*args, **options)

        return run

    return replaced


def install() -> None:
    """Patch the functions of torch.jit that take modules."""
    patch("torch.jit:trace", _refusing("torch.jit.trace"))
    patch("torch.jit:trace_module", _refusing("torch.jit.trace_module"))
    patch("torch.jit:script", _refusing("torch.jit.script"))


install()
