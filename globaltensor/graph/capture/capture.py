"""Capture: run `build` once on fake tensors without memory.

The result is the logical graph and this rank's program. `Graph` and the search for layouts call
`capture`."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._base import torch_private
from ..._base.pytree import object_tensors, replaced_in_objects
from ..._ops.dispatch import fresh_plans
from ..._tensor.global_tensor import ORDINARY, GlobalTensor
from ..._tensor.gradients.reducer import reducer
from ..._tensor.pending_tensor import local_of, materialize_all
from ..._tensor.strides import (
    Note,
    by_rows,
    copy_noted_strides,
    device_strides,
    has_hidden_gaps,
    note_of,
)
from ..._tensor.view_tracking import RemoteView
from ...distributed.world import set_world, world
from ...errors import GraphError
from ...sharding.spec import Spec
from ..program.nodes import backward
from .checkpoint_regions import marked
from .dry_world import DryWorld
from .local_recorder import LocalRecorder
from .logical_recorder import LogicalRecorder
from .recorder_base import of_user
from .replicated_uses import ReplicatedUse, replicated_uses
from .single_device import on_one_device

__all__ = ["CaptureResult", "Result", "capture"]


@dataclass
class Result:
    """A tensor that build() returned: its spec (None: a plain tensor), whether it has no dims.

    ``note``: the strides of one device, if the local tensors do not show them."""

    spec: Spec | None
    scalar: bool
    note: Note | None


@dataclass
class CaptureResult:
    """The graphs and facts that one run of build() yields."""

    logical: fx.Graph
    program: fx.Graph
    constants: dict[str, Any]
    # Real tensors that the program reads, in the order of its inputs. The call's inputs come before
    # them.
    states: list[torch.Tensor]
    inputs: int
    structure: Any  # build's result, tensors replaced by Result
    scaled: bool  # whether there is a backward pass
    read: bool  # whether build() reads gradients
    alone: Callable[[], fx.GraphModule]  # makes the logical graph a module of plain tensors
    logical_constants: dict[str, Any]  # values of the logical graph's get_attr nodes
    #: Global tensors from outside that the program reads or writes: parameters, variables.
    global_states: list[GlobalTensor]
    #: Values from outside, and inputs, that must be the same on every rank.
    replicated: list[ReplicatedUse]
    #: (container, key) of entries whose tensors the program reads or writes into, and of entries
    #: that lead to them.
    slots: list[tuple[Any, Any]]


def capture(
    build: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    named: Mapping[str, torch.Tensor],
    hooks: Callable[[LogicalRecorder], Any],
    imagined: bool = False,
) -> CaptureResult:
    """Run ``build`` once on fake tensors and record it.

    ``args`` and ``kwargs`` are the call's inputs. ``imagined`` says that these are meta tensors
    that represent tensors on the cpu. ``named`` holds parameters and buffers by path.
    ``hooks(recorder)`` is a context in which modules report when they run. Raises GraphError if the
    code depends on data."""
    real = world()
    materialize_all(object_tensors(kwargs, object_tensors(args, [])), list(named.values()))
    fake = torch_private.fake_tensors()
    dry = DryWorld(real)
    with _using_world(dry, real), fresh_plans():
        local = LocalRecorder(
            fake,
            dry,
            {
                id(t._stored if isinstance(t, GlobalTensor) else t): path
                for path, t in named.items()
            },
        )
        logical = LogicalRecorder(fake, local, {id(t): path for path, t in named.items()})
        inputs = object_tensors(kwargs, object_tensors(args, []))
        stand_ins = [_fake_input(t, fake, imagined) for t in inputs]
        these = iter(stand_ins)
        args, kwargs = replaced_in_objects(args, these), replaced_in_objects(kwargs, these)
        for i, s in enumerate(stand_ins):
            node = local.placeholder(f"input_{i}", s._local if isinstance(s, GlobalTensor) else s)
            node.meta["input"] = i
            logical.placeholder(f"input_{i}", s)
        logical.remember(named.values())
        try:
            with torch_private.tracing(), fake:
                with logical, marked(logical), hooks(logical), _restoring_outside_tensors(logical):
                    out = build(*args, **kwargs)
                with local:
                    # (A mean from outside is materialized below, where nothing is recorded.)
                    for t in object_tensors(out, []):
                        if isinstance(t, RemoteView):
                            t._materialize()
        except torch_private.data_dependence() as error:
            raise GraphError(_data_dependent_message(error)) from None
        outs = object_tensors(out, [])
        results = [
            Result(t._spec, not t.dim(), _hidden_order(t))
            if isinstance(t, GlobalTensor)
            else Result(None, not t.dim(), None)
            for t in outs
        ]
        for node in local.graph.nodes:
            if node.target is backward:
                node.meta["watched"] = (
                    reducer().watchers.begun > 0
                )  # whether build() may see gradients before they are reduced
        local.end()
        local.unseeded()
        local.graph.output(tuple(local.of(local_of(t)) for t in outs))
        logical.graph.output(tuple(logical.of(t) for t in outs))
        replicated = _find_replicated_uses(dry, local, logical, inputs)
    return CaptureResult(
        logical.graph,
        local.graph,
        local.constants,
        local.states,
        len(stand_ins),
        replaced_in_objects(out, iter(results)),
        local.scale is not None,  # type: ignore[arg-type]
        local.read,
        lambda: on_one_device(logical.graph, logical.constants, local.start),
        logical.constants,
        [t for t in logical.states if isinstance(t, GlobalTensor) and type(t) in ORDINARY],
        replicated,
        list({(id(held), k): (held, k) for held, k in logical.slots}.values()),
    )


def _find_replicated_uses(
    dry: DryWorld, local: LocalRecorder, logical: LogicalRecorder, inputs: list[torch.Tensor]
) -> list[ReplicatedUse]:
    """Return the values from outside that build() uses as the same on every rank."""
    parts = {id(part) for _, part, *_ in logical.real.values()}
    nodes = {i: local.node_of(use.tensor) for i, use in enumerate(dry.replicated)}
    return replicated_uses(
        dry.replicated,
        {i: node for i, node in nodes.items() if node is not None},
        [None if isinstance(t, GlobalTensor) else t for t in inputs],
        [None if id(t) in parts else t for t in local.states],
        local.constants,
    )


@contextlib.contextmanager
def _restoring_outside_tensors(logical: LogicalRecorder) -> Iterator[None]:
    """Restore the contents of tensors from outside after build().

    Raises GraphError if build() has changed the dtype, sbp or placement of one."""
    done = False
    try:
        yield
        done = True
    finally:
        lost = logical.given_back()
        if lost and done:
            raise GraphError(
                f"build() makes {lost[0]} another tensor (of another dtype, sbp or placement, or "
                "swapped): build() runs once, on fake tensors, and the graph keeps using the "
                "original tensor. Change the tensor before the graph is called (module.to(dtype), "
                "to_global); in-place writes that change none of these are part of the graph"
            )


@contextlib.contextmanager
def _using_world(dry: Any, real: Any) -> Iterator[None]:
    """Use ``dry`` as the world of this thread."""
    set_world(dry)
    before, torch_private.recording.on, torch_private.recording.looks = (
        torch_private.recording.looks,
        True,
        True,
    )
    try:
        yield
    finally:
        torch_private.recording.on, torch_private.recording.looks = False, before
        set_world(None)
        if world() is not real:
            set_world(real)


def _fake_input(t: torch.Tensor, fake: Any, imagined: bool) -> torch.Tensor:
    """Return a fake tensor for an input."""
    real = local_of(t).detach()
    if imagined:
        with fake:
            stand_in = torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype
            ).requires_grad_(t.requires_grad)
    else:
        stand_in = fake.from_tensor(real).requires_grad_(t.requires_grad)
    if not isinstance(t, GlobalTensor):
        return stand_in  # type: ignore[no-any-return]
    given = GlobalTensor.wrap(stand_in, t._spec)
    copy_noted_strides(t, given)
    return given


def _hidden_order(t: GlobalTensor) -> Note | None:
    """Return the strides of one device, if they are not row-major and local tensors may hide them.

    The strides of a program's local results may differ from those of the run that recorded it."""
    if not has_hidden_gaps(t._spec.plain) or (isinstance(t, RemoteView) and note_of(t) is None):
        return None
    strides = device_strides(t)
    return None if strides == by_rows(t.shape) else Note(strides, False)


def _data_dependent_message(error: BaseException) -> str:
    """Return an error text with the line of the user's code that asks for a value."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if of_user(f.filename)]
    at = (
        f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
        if frames
        else "inside torch"
    )
    return (
        f"build() asks for the value of a tensor, or for a shape that depends on values, which no "
        f"static graph knows:\n  {at}\n"
        "write the choice as an op (torch.where, a mask), take the value from the graph's "
        "outputs, or run this part without a graph"
    )
