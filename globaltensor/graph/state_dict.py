"""Save and load the state of a graph. `Graph.state_dict` and its counterparts call this module."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from .._ops.methods import gather_global_value
from .._tensor.global_tensor import GlobalTensor
from ..errors import GraphError

__all__ = ["load_state_dict", "not_copied", "state_dict"]

STEP = "System-Train-TrainStep"  # as in OneFlow: its name, and a tensor with one element
TRAINING = ("optimizers", "lr_schedulers")


def state_dict(graph: Any, destination: Any = None) -> Any:
    out = OrderedDict() if destination is None else destination
    for name, module in graph._modules.items():
        out[name] = module.state_dict()
    if graph._optimizers:
        out["optimizers"] = [entry.optimizer.state_dict() for entry in graph._optimizers]
        out["lr_schedulers"] = [
            [s.state_dict() for s in _schedules(entry)] for entry in graph._optimizers
        ]
        out[STEP] = torch.tensor([graph._steps])
    if graph._scaler is not None:
        out["grad_scaler"] = graph._scaler.state_dict()
    out["rng"] = torch.get_rng_state()
    return out


def _schedules(entry: Any) -> list[Any]:
    return (
        list(entry.schedule)
        if isinstance(entry.schedule, (list, tuple))
        else [entry.schedule]
        if entry.schedule is not None
        else []
    )


def load_state_dict(graph: Any, saved: Any, strict: bool = True) -> None:
    if strict:
        _check(graph, saved)
    for name, module in graph._modules.items():
        if name in saved:
            module.load_state_dict(saved[name], strict=strict)
    for entry, entry_state in zip(graph._optimizers, saved.get("optimizers", ()), strict=False):
        entry.optimizer.load_state_dict(entry_state)
    for entry, entry_state in zip(graph._optimizers, saved.get("lr_schedulers", ()), strict=False):
        for schedule, one in zip(_schedules(entry), entry_state, strict=False):
            schedule.load_state_dict(one)
    if graph._scaler is not None and "grad_scaler" in saved:
        graph._scaler.load_state_dict(saved["grad_scaler"])
    graph.__dict__["_steps"] = int(_to_plain(saved.get(STEP, graph._steps)))
    if "rng" in saved:
        torch.set_rng_state(_to_plain(saved["rng"]))


def _check(graph: Any, saved: Any) -> None:
    """Raise RuntimeError if the names in a state do not match the graph, before anything is loaded.

    State of optimizers is no error for a graph without optimizers: such a graph evaluates what
    another one trains."""
    wanted = [*graph._modules, *(TRAINING if graph._optimizers else ())]
    other = [
        name
        for name in saved
        if name not in wanted and name not in (*TRAINING, STEP, "grad_scaler", "rng")
    ]
    missing = [name for name in wanted if name not in saved]
    if missing:
        had = ", ".join(map(str, saved))
        raise RuntimeError(
            f"{graph.name}: the state has no entry for {', '.join(missing)} (it has {had}): pass "
            "strict=False to leave these unchanged"
        )
    if other:
        raise RuntimeError(
            f"{graph.name}: the state has {', '.join(map(str, other))}, which the graph does not "
            "have: pass strict=False to ignore these"
        )
    if graph._optimizers:
        has = [len(schedules) for schedules in saved["lr_schedulers"]]
        own_counts = [len(_schedules(entry)) for entry in graph._optimizers]
        if len(saved["optimizers"]) != len(own_counts) or has != own_counts:
            raise RuntimeError(
                f"{graph.name}: the state is of {len(saved['optimizers'])} optimizers with {has} "
                f"schedulers, the graph has {len(own_counts)} with {own_counts}: add as "
                "many, or pass strict=False to load those that both have"
            )


def not_copied(graph: Any, protocol: Any) -> Any:
    """Raise GraphError in place of ``__reduce_ex__``: a graph cannot be saved or copied.

    A graph is code, and programs for the ranks of this job."""
    raise GraphError(
        f"{graph.name} cannot be saved, pickled or copied: a graph is code. Save "
        "graph.state_dict(), and load that state with load_state_dict() into a new graph of the "
        "same class"
    )


def _to_plain(x: Any) -> Any:
    """Return a plain tensor. `to_global` may have made every tensor of a state global."""
    return gather_global_value(x) if isinstance(x, GlobalTensor) else x
