"""Checks of a graph's optimizers, scaler and captured program.

`Graph` calls them. The module also lists the settings and attributes that programs depend on."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from .._base.pytree import tensors_in
from .._tensor.pending_tensor import local_of
from ..errors import GraphError
from .capture.reachable_containers import identity

__all__ = [
    "apply_settings",
    "attributes",
    "check_captured",
    "check_optimizer",
    "modules_of",
    "rebound",
]


def check_optimizer(optimizer: Any, schedules: Any, others: Iterable[Optimizer]) -> None:
    """Raise GraphError if an optimizer or its schedulers cannot be used by a graph.

    An optimizer must be a torch.optim.Optimizer, need no closure, and not be among ``others``. A
    scheduler must be made for this optimizer and need no metric."""
    if not isinstance(optimizer, Optimizer):
        raise GraphError(
            "add_optimizer: an optimizer of torch.optim is expected, got "
            f"{type(optimizer).__name__}"
        )
    if any(optimizer is other for other in others):
        raise GraphError(
            f"add_optimizer: this {type(optimizer).__name__} is added already: it would step "
            f"twice. Give its schedulers in a list, lr_sch=[...]"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise GraphError(
            f"add_optimizer: {type(optimizer).__name__} runs the model several times a step, "
            f"through a closure: use it without a graph"
        )
    for schedule in schedules if isinstance(schedules, (list, tuple)) else [schedules]:
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise GraphError(
                "add_optimizer: ReduceLROnPlateau needs a metric: step it yourself, between the "
                "calls of the graph"
            )
        if schedule is not None and not callable(getattr(schedule, "step", None)):
            raise GraphError(
                f"add_optimizer: lr_sch is a scheduler of torch.optim.lr_scheduler, or a list of "
                f"them, got {schedule!r}"
            )
        if getattr(schedule, "optimizer", optimizer) is not optimizer:
            raise GraphError(
                f"add_optimizer: lr_sch, a {type(schedule).__name__}, was made for another "
                "optimizer: make the scheduler for the optimizer that it is passed with"
            )


def check_scaler(scaler: Any) -> None:
    """Raise GraphError if ``scaler`` is neither a gradient scaler nor None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise GraphError(
            f"set_grad_scaler: flow.amp.GradScaler(...), StaticGradScaler(scale) or None, got "
            f"{scaler!r}"
        )


def check_captured(graph: Any, captured: Any, micros: int, stages: int) -> None:
    """Raise GraphError for a graph that would not train, or not as build() says."""
    if not graph._optimizers:
        return
    if not captured.scaled:
        raise GraphError(
            f"{graph.name} has an optimizer, but build() calls no backward(): call "
            f"loss.backward() there, or leave out add_optimizer"
        )
    read = {id(t) for t in captured.states}
    held_ids = {id(p) for p in graph._module_state().tensors}
    for entry in graph._optimizers:
        for group in entry.optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in held_ids and id(local_of(p)) not in read:
                    raise GraphError(
                        f"{graph.name}: {type(entry.optimizer).__name__} has a parameter of shape "
                        f"{list(p.shape)} that the graph does not hold: set its module "
                        "as an attribute of the graph, or leave it out (a module copied after the "
                        "optimizer was made has other parameters)"
                    )
    if captured.read and (micros > 1 or stages > 1 or graph._scaler is not None):
        why = (
            "they are still multiplied by the scaler's scale"
            if micros == stages == 1
            else "they are not complete before the last micro-batch"
        )
        raise GraphError(
            f"{graph.name}: build() reads gradients, but {why}: read them in a hook of the "
            "optimizer, which runs when they are complete: "
            "optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: "
            "torch.nn.utils.clip_grad_norm_(parameters, 1.0))"
        )


def apply_settings(config: Any, optimizers: Iterable[Any]) -> None:
    """Apply the settings that act outside of programs.

    These are fused optimizer kernels and cudnn's choice of algorithms."""
    if config.fused is not None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if "fused" in group and group["fused"] is not True:  # the user's choice stays
                    group["fused"] = None if config.fused else False
    if config.search is not None:
        torch.backends.cudnn.benchmark = not config.search


def modules_of(function: Any) -> list[torch.nn.Module]:
    """Return the modules that a function refers to.

    The function may be a module or a module's method. Modules in its attributes, its closure and
    the globals that it names count too."""
    held = [
        getattr(function, "__self__", None),
        function,
        *getattr(function, "__dict__", {}).values(),
    ]
    held += [
        cell.cell_contents
        for cell in getattr(function, "__closure__", None) or ()
        if cell != types.CellType()
    ]
    code = getattr(function, "__code__", None)
    if code is not None:
        held += [function.__globals__.get(name) for name in code.co_names]
    found = {id(m): m for m in held if isinstance(m, torch.nn.Module)}
    return list(found.values())


def rebound(programs: Iterable[Any]) -> frozenset[Any]:
    """Return the ids of the tensors in the entries that programs read or keep a state in.

    These are entries of modules, variables, lists, dicts and objects. A tensor that the user
    assigns to such an entry replaces the former one from then on."""
    slots = {(id(held), k): held for built in programs for held, k in built.captured.slots}
    return frozenset([(where, k, identity(held, k)) for (where, k), held in slots.items()])


def attributes(graph: Any) -> tuple[Any, ...]:
    """Return the graph's attributes that its programs depend on: plain values and tensor ids."""
    fingerprint: list[Any] = []
    for name, value in graph.__dict__.items():
        if not name.startswith("_") and name not in ("name", "config"):
            if isinstance(value, (int, float, str, bool, type(None))):
                fingerprint.append((name, type(value), value))
            elif isinstance(value, (torch.Tensor, tuple, list, dict)):
                fingerprint += [(name, id(t)) for t in tensors_in(value, [])]
    return tuple(fingerprint)
