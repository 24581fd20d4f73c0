"""What a graph saves and takes back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from ..tensor import full
from ..wrapper import GlobalTensor

__all__ = ["load_state_dict", "state_dict"]

STEP = "System-Train-TrainStep"  # OneFlow's name


def state_dict(graph: Any, destination: Any = None) -> Any:
    out = OrderedDict() if destination is None else destination
    for name, module in graph._modules.items():
        out[name] = module.state_dict()
    if graph._optimizers:
        out["optimizers"] = [entry.optimizer.state_dict() for entry in graph._optimizers]
        out["lr_schedulers"] = [[s.state_dict() for s in _schedules(entry)] for entry in graph._optimizers]
        out[STEP] = graph._steps
    if graph._scaler is not None:
        out["grad_scaler"] = graph._scaler.state_dict()
    out["rng"] = torch.get_rng_state()
    return out


def _schedules(entry: Any) -> list[Any]:
    return list(entry.schedule) if isinstance(entry.schedule, (list, tuple)) else [entry.schedule] if entry.schedule is not None else []


def load_state_dict(graph: Any, saved: Any, strict: bool = True) -> None:
    missing = [name for name in graph._modules if name not in saved]
    if missing and strict:
        had = ", ".join(map(str, saved))
        raise RuntimeError(f"{graph.name}: the state has nothing for {', '.join(missing)} (it has {had}): pass strict=False to leave them")
    for name, module in graph._modules.items():
        if name in saved:
            module.load_state_dict(saved[name], strict=strict)
    for entry, kept in zip(graph._optimizers, saved.get("optimizers", ()), strict=strict):
        entry.optimizer.load_state_dict(kept)
    for entry, kept in zip(graph._optimizers, saved.get("lr_schedulers", ()), strict=strict):
        for schedule, one in zip(_schedules(entry), kept, strict=True):
            schedule.load_state_dict(one)
    if graph._scaler is not None and "grad_scaler" in saved:
        graph._scaler.load_state_dict(saved["grad_scaler"])
    graph.__dict__["_steps"] = saved.get(STEP, graph._steps)
    if "rng" in saved:
        torch.set_rng_state(_plain(saved["rng"]))


def _plain(x: torch.Tensor) -> torch.Tensor:
    """A state may come as `to_global` has made it, every tensor of it global."""
    return full(x) if isinstance(x, GlobalTensor) else x
