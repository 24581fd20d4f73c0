"""Torch's private names about autograd: nodes, hooks, checkpoints, transforms."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import profiler as _profiler

from ..patches import patch

__all__ = [
    "call_after_accumulation",
    "compiles_backward",
    "computed_by",
    "innermost_transform",
    "is_batched",
    "map_batch",
    "profiling",
    "queue_backward_callback",
    "uncompiled_backward",
    "watch_checkpoints",
    "wrap_checkpoint_inputs",
    "wrap_module_identity",
]


def call_after_accumulation(leaf: torch.Tensor) -> None:
    """Call the hooks that torch runs once a gradient has been added to ``leaf.grad``.

    torch runs these hooks at the end of a backward pass only (2.1).
    """
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)


def computed_by(t: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the autograd node that computed ``t``, or the base that ``t`` is a view of.

    That node stays in the graph when someone writes to the view. The view's own node does not.
    """
    return (t if t._base is None else t._base).grad_fn


def profiling() -> bool:
    """Return True while a profiler of torch runs in this process.

    Reading this variable takes 15 ns. The public function takes 70 ns. torch's own code reads the
    variable for the same reason (2.1).
    """
    return _profiler._is_profiler_enabled


def queue_backward_callback(function: Any) -> None:
    """Run ``function`` when the current backward pass ends.

    torch's own reducers finish their buckets this way, and there is no public hook.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def wrap_module_identity(around: Any) -> None:
    """Call ``around(apply, *tensors)`` in place of the identity of a module's full backward hooks.

    torch puts that identity around such a module. The identity is a custom Function, applied to the
    tensors that the module is called with, and no tensor can override it.
    """
    patch(
        "torch.nn.modules._functions:BackwardHookFunction.apply",
        lambda apply: staticmethod(functools.partial(around, apply)),
    )


def wrap_checkpoint_inputs(pack: Any, unpack: Any) -> None:
    """Call ``pack`` and ``unpack`` where a checkpoint saves and returns its inputs.

    ``pack(inputs) -> (what is saved, note)``, ``unpack(what was saved, note) -> inputs``. A
    checkpoint saves its inputs as autograd saves tensors, so that an outer checkpoint may drop them
    and compute them again. In a tensor without storage autograd sees no graph.
    """

    def saving(save: Any) -> Any:
        def save_inputs(frame: Any, *inputs: Any) -> None:
            parts, frame.note = pack(inputs)
            save(frame, *parts)

        return save_inputs

    frame = torch.utils.checkpoint._CheckpointFrame
    if not (hasattr(frame, "save_inputs") and hasattr(frame, "get_inputs")):
        _wrap_older_checkpoint_inputs(pack, unpack)
        return
    home = "torch.utils.checkpoint"
    patch(f"{home}:_CheckpointFrame.save_inputs", saving)
    patch(
        f"{home}:_CheckpointFrame.get_inputs",
        lambda get: lambda frame: unpack(get(frame), frame.note),
    )


def _wrap_older_checkpoint_inputs(pack: Any, unpack: Any) -> None:
    """Do the same for torch 2.11, which saves the inputs through a custom Function.

    The node of that Function returns them.
    """

    def saving(save: Any) -> Any:
        def apply(*inputs: Any) -> Any:
            parts, note = pack(inputs)
            saved = save(*parts)
            if (node := saved.grad_fn) is not None:
                # The first entry is there so that one of them is a tensor. It does not come back.
                get, dummy = node.get_args, note[0]
                assert dummy is None
                node.get_args = lambda tensors: unpack(get(tensors), note[1:])
            return saved

        return staticmethod(apply)

    patch("torch.utils.checkpoint:_NoopSaveInputs.apply", saving)


#: Returns the innermost active transform of torch.func (vmap, grad), or None. The tensors of such a
#: transform wrap others, and there is no public function to ask.
innermost_transform = torch._C._functorch.peek_interpreter_stack


#: Returns True for a batch of gradients in a pass of ``torch.autograd.grad(is_grads_batched=True)``
#: on plain tensors, which torch runs under a vmap of its own.
is_batched = torch._C._functorch.is_legacy_batchedtensor


def map_batch(function: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return the batch of the results of ``function`` for each gradient of ``batch``."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    rows = torch._remove_batch_dim(batch, level, 0, 0).unbind(0)
    return torch._add_batch_dim(torch.stack([function(row) for row in rows]), 0, level)


def watch_checkpoints(region: Any) -> None:
    """Run the functions of torch.utils.checkpoint inside ``region()`` where that returns a context.

    There a checkpoint does nothing else. Where ``region()`` returns None, checkpoints are as torch
    made them. Models have imported the function `checkpoint` under names of their own. From there a
    call follows one of these two paths.
    """

    def generator(original: Any) -> Any:
        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            inside = region()
            if inside is None:
                yield from original(function, *args, **kwargs)
            else:
                with inside:
                    yield

        return run

    reentrant = torch.utils.checkpoint.CheckpointFunction

    def apply(function: Any, preserve: Any, *args: Any) -> Any:
        inside = region()
        if inside is None:
            return super(reentrant, reentrant).apply(function, preserve, *args)  # type: ignore[misc]
        with inside:
            return function(*args)

    name = "_checkpoint_without_reentrant_generator"
    # Since torch 2.14, with the arguments as a tuple and a dict.
    name += "_impl" if hasattr(torch.utils.checkpoint, f"{name}_impl") else ""
    patch(f"torch.utils.checkpoint:{name}", generator)
    patch("torch.utils.checkpoint:CheckpointFunction.apply", lambda _: staticmethod(apply))


@contextlib.contextmanager
def uncompiled_backward() -> Any:
    """Run a backward pass in this thread and uncompiled inside this context.

    Compiled autograd, a private switch of the compiler's, would not run the hooks of leaves.
    """
    home = sys.modules.get("torch._dynamo.compiled_autograd")
    with (
        torch.autograd.set_multithreading_enabled(False),
        contextlib.nullcontext() if home is None else home._disable(),
    ):
        yield


def compiles_backward() -> bool:
    """Return True if compiled autograd is on."""
    home = sys.modules.get("torch._dynamo.compiled_autograd")
    return home is not None and home.compiled_autograd_enabled
