"""Capture of the calls of a model or a graph as `Calls`.

The model runs once on tensors without memory, on one imagined rank, so that no layout affects the
result. `auto/api.py` and `auto/apply` call `calls_of_model` and `captured_calls`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..._base.pytree import object_tensors, replaced_in_objects
from ..._tensor.global_tensor import GlobalTensor
from ...distributed.world import world
from ...graph.capture.capture import CaptureResult, capture
from ...graph.capture.module_hooks import watched
from ...graph.capture.reachable_containers import Containers, entry, put_back
from ...parallel.expert_modules import dispatch_tokens, experts_in
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast
from ...sharding.spec import Spec
from .op_graph import Calls, read

__all__ = ["calls_of_model", "captured_calls", "saving"]


@contextlib.contextmanager
def saving(
    hooks: Callable[[Any], Any], saved: dict[int, list[torch.Tensor]], device: str, recorder: Any
) -> Iterator[None]:
    """Record the tensors that autograd saves for backward while build() runs.

    `saved` maps the number of the user's call to its saved tensors, as on a device of type
    `device`.
    """
    if device == "cuda":
        recorder.local.as_run = _with_fused_kernels
    # Autograd holds `pack` as long as results of build() exist, and the recorder holds these
    # results. The garbage collector does not see this cycle, so it is broken by `running.clear()`.
    running = [recorder]

    def pack(t: torch.Tensor) -> torch.Tensor:
        for its in running:
            saved.setdefault(its.call, []).append(t)
        return t

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), hooks(recorder):
            yield
    finally:
        running.clear()


class _FusedKernelsMode(TorchFunctionMode):
    """A mode that saves for backward what GPU kernels save.

    GPU attention saves no more with dropout than without, because dropout happens inside the
    kernel. GPU dropout saves one byte per element. The capture runs on the CPU. Its attention
    kernel saves the scores and the dropped scores, and its dropout saves a mask in the dtype of the
    input.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args and args[0].dtype is not torch.float64:
            args, kwargs = (
                (*args[:4], *[0.0] * len(args[4:5]), *args[5:]),
                {k: v for k, v in kwargs.items() if k != "dropout_p"},
            )
        elif func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if inplace or not training or not 0 < p < 1 or not input.is_floating_point():
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _with_fused_kernels(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _FusedKernelsMode():
            return function(*args, **kwargs)

    return run


def calls_of_model(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Calls:
    """Return the calls of one forward pass of a model.

    Only the shapes of parameters and inputs are used: no memory is allocated, and nothing is
    computed. ``device`` is the target device type, "cpu" or "cuda". Their kernels save different
    tensors for backward.

    Raises GraphError where the model's code depends on values.
    """
    one = Placement("cpu", [world().rank])
    states = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    lent = {path: _replicated_on_meta(t, one) for path, t in states.items()}
    held_at = _paths_of_held_states(model, states)
    arguments = args, dict(kwargs or {})
    inputs = replaced_in_objects(
        arguments, iter([_replicated_on_meta(t, one) for t in object_tensors(arguments, [])])
    )
    saved: dict[int, list[torch.Tensor]] = {}

    containers = _containers_of([model])

    def build(given: dict[str, torch.Tensor], inputs: Any) -> Any:
        held = {name: given[path] for name, path in held_at.items()}
        with _replaced(containers, {id(t): given[path] for path, t in states.items()}):
            return functional_call(model, held, inputs[0], inputs[1], tie_weights=False)

    def hooks(recorder: Any) -> Any:
        return saving(lambda r: watched({"model": model}, {}, r), saved, device, recorder)

    with (
        _restoring_attributes([model]),
        torch.set_grad_enabled(True),
        _dispatching_experts(model),
    ):
        captured = capture(build, (lent, inputs), {}, {}, hooks, imagined=True)
    names = [f"input_{i}" for i in range(captured.inputs)]
    calls = _read(captured, saved, dict(zip(names, lent, strict=False)))
    for call in calls.calls:
        call.module = call.module.removeprefix("model").removeprefix(".")
    # The captured inputs begin with the parameters and buffers. A user counts the model's inputs.
    numbered = {name: f"input_{i}" for i, name in enumerate(names[len(lent) :])}
    for value in calls.values:
        if value.state == "input":
            value.name = numbered.get(value.name, value.name)
    return calls


def _paths_of_held_states(
    model: torch.nn.Module, states: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return the path in ``states`` of each tensor that a module of the model holds, by its name.

    A tensor that several modules hold has a name for each of them. A module that has several names
    counts once: `functional_call` ties its parameters under all of them, and then restores the old
    value under one name and the new one under the next.
    """
    paths = {id(t): path for path, t in states.items()}
    return {
        f"{prefix}.{name}".removeprefix("."): paths[id(t)]
        for prefix, module in model.named_modules()
        for name, t in (*module._parameters.items(), *module._buffers.items())
        if t is not None
    }


@contextlib.contextmanager
def _restoring_attributes(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore all attributes of the models' modules after the context.

    The pass was not one of the program. A number that it left, such as the length of a table that
    it filled, would say that the table is filled, but the table has its old values again.
    """
    containers = _containers_of(models)
    try:
        yield
    finally:
        for place in containers.found.values():
            now = dict(place.items())
            changed = {
                k for k in now.keys() | place.then.keys() if now.get(k) is not place.then.get(k)
            }
            put_back(place, changed)


def _containers_of(models: Iterable[torch.nn.Module]) -> Containers:
    """Return what the attributes of the models' modules refer to."""
    parts = dict.fromkeys(part for model in models for part in model.modules())
    containers = Containers(parts)
    for part in parts:
        containers.add_attributes(type(part).__name__, vars(part))
    return containers


@contextlib.contextmanager
def _replaced(containers: Containers, stands: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace tensors in the containers within the context.

    `functional_call` replaces registered parameters and buffers. A module may also keep them in a
    dict, a list or a tuple of its own. ``stands`` maps the id of a tensor to what stands for it.
    """
    changed: list[tuple[Any, Any, Any, Any]] = []
    for container in containers.found.values():
        held = container.held
        if not isinstance(held, (dict, list, deque)):
            continue
        for k, v in container.then.items():
            tensors = object_tensors(v, []) if isinstance(v, (torch.Tensor, tuple)) else []
            if any(id(t) in stands for t in tensors):
                new = replaced_in_objects(v, iter([stands.get(id(t), t) for t in tensors]))
                changed.append((held, k, v, new))
                held[k] = new
    try:
        yield
    finally:
        for held, k, old, new in changed:
            if entry(held, k) is new:
                held[k] = old


@contextlib.contextmanager
def _dispatching_experts(model: torch.nn.Module) -> Iterator[None]:
    """Run expert modules through `experts` within the context, and restore them afterwards.

    The layouts of `experts` do not depend on which tokens are routed where.
    """
    strange = [m for m in experts_in(model).values() if "forward" not in m.__dict__]
    for module in strange:
        dispatch_tokens(module)
    try:
        yield
    finally:
        for module in strange:
            del module.__dict__["forward"]


def captured_calls(
    graph: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, device: str = "cpu"
) -> tuple[fx.Graph, Calls]:
    """Return the captured graph of a graph's build() for these inputs, and its calls.

    ``device`` has the same meaning as in `calls_of_model`.
    """
    saved: dict[int, list[torch.Tensor]] = {}
    models = graph._modules.values()
    with _restoring_attributes(models), torch.set_grad_enabled(graph.training):
        captured = graph._capture_build(
            args,
            dict(kwargs or {}),
            lambda hooks: lambda recorder: saving(hooks, saved, device, recorder),
        )
    stands = {
        id(captured.states[node.meta["state"]]): node.meta["val"]
        for node in captured.program.nodes
        if "state" in node.meta
    }
    calls = _read(captured, saved, {}, stands)
    calls.training = graph.training
    return captured.logical, calls


def _replicated_on_meta(t: torch.Tensor, one: Placement) -> GlobalTensor:
    """Return a tensor of the same shape, replicated on one rank, without memory."""
    strides = (
        torch.empty(t.shape, device="meta").stride()
        if isinstance(t, GlobalTensor) or t.layout is not torch.strided
        else t.stride()
    )
    local = torch.empty_strided(t.shape, strides, dtype=t.dtype, device="meta").requires_grad_(
        t.requires_grad
    )
    return GlobalTensor.wrap(local, Spec.make(t.shape, t.dtype, one, broadcast))


def _read(
    captured: CaptureResult,
    saved: dict[int, list[torch.Tensor]],
    paths: dict[str, str],
    stands: Mapping[int, torch.Tensor] | None = None,
) -> Calls:
    return read(captured.logical, captured.logical_constants, saved, paths, stands)
