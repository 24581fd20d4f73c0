"""torch.optim's elementwise optimizers on global parameters, at the speed of local ones: for the length of a step they work on the local tensors.

What these optimizers do to an element depends on nothing but that element's own parameter, gradient and state, so a step on each rank's part is a
step on the whole. Others (LBFGS, Adafactor, Muon: they look at a whole tensor), subclasses, steps with a closure, and optimizers whose steps somebody
else's hooks look at go the general way, call by call.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import _torch
from .distributed.world import world
from .gradients import local_grad
from .wrapper import GlobalTensor

__all__ = ["install"]

ELEMENTWISE = frozenset({SGD, ASGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})
FUSED = frozenset({SGD, Adagrad, Adam, AdamW})  # torch has a kernel for the whole step, on the cpu too
_EXACT = frozenset({torch.float32, torch.float64})  # of narrower numbers the loop rounds each op's result, the kernel only the last

State = dict[str, Any]


class _Swap:
    """One optimizer's parameters and state, exchanged for the local tensors for the length of a step."""

    def __init__(self) -> None:
        # id of a parameter -> its state; the same with locals in it; the locals as they were when last looked at
        self.twins: dict[int, tuple[State, State, State]] = {}
        self.before: tuple[list[list[GlobalTensor]], Any, list[tuple[torch.Tensor, Any]]] | None = None
        self.fused: list[State] = []  # the groups that step with the fused kernel this once

    def enter(self, optimizer: Optimizer) -> None:
        """Exchange; do nothing where a parameter or its gradient is no ordinary one."""
        lists, rank = [group["params"] for group in optimizer.param_groups], world().rank
        state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        known_of = optimizer.state
        for params in lists:
            for p in params:
                if not isinstance(p, GlobalTensor) or not _ordinary(p, rank):
                    return
                alike, grad = local_grad(p)
                if not alike:
                    return
                if grad is None:
                    continue
                local = p._local
                if local.grad is not grad:
                    grads.append((local, grad))
                if known := known_of.get(p):
                    state[local] = self._localised(p, known)
        # From here on nothing fails.
        self.before = lists, optimizer.state, [(local, local.grad) for local, _ in grads]
        for local, grad in grads:
            local.grad = grad
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = [p._local for p in params]
            if type(optimizer) in FUSED and _fusable(group, state):
                group["fused"] = True
                self.fused.append(group)
        optimizer.state = state

    def _localised(self, p: GlobalTensor, known: State) -> State:
        twin = self.twins.get(id(p))
        if twin is not None and twin[0] is known and len(known) == len(twin[1]):
            return twin[1]
        for k, v in known.items():
            if isinstance(v, torch.Tensor) and k != "step" and v.shape == p.shape:
                known[k] = _beside(p, v)
        mine = {k: v._local if isinstance(v, GlobalTensor) else v for k, v in known.items()}
        self.twins[id(p)] = (known, mine, dict(mine))
        return mine

    def leave(self, optimizer: Optimizer) -> None:
        """Undo it; what the step has added to the state becomes global."""
        if self.before is None:
            return
        (lists, state, grads), self.before, mine_of = self.before, None, optimizer.state
        optimizer.state = state
        for group in self.fused:
            group["fused"] = None
        self.fused = []
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
            for p in params:
                if mine := mine_of.get(p._local):
                    self._globalised(p, mine, state)
        for local, grad in grads:
            local.grad = grad

    def _globalised(self, p: GlobalTensor, mine: State, state: Any) -> None:
        twin = self.twins.get(id(p))
        if twin is None or twin[1] is not mine:
            twin = self.twins[id(p)] = (state[p], mine, {})
        known, _, seen = twin
        for k, v in mine.items():
            if k not in seen or seen[k] is not v:
                seen[k] = v
                like = isinstance(v, torch.Tensor) and k != "step" and v.shape == p._local.shape
                known[k] = GlobalTensor.wrap(v, p._spec.replace(dtype=v.dtype)) if like else v


def _fusable(group: State, state: Any) -> bool:
    """Whether a group of local tensors may step with torch's fused kernel: the user has not said how it is to step, and the kernel gives what the loop over
    the parameters, torch's default on the cpu, gives. It reads memory as it lies and expects the state of all parameters or of none."""
    settings = (group.get("fused"), group.get("foreach"), group.get("capturable") or None, group.get("differentiable") or None)
    rate = group["lr"]
    if any(s is not None for s in settings) or (isinstance(rate, torch.Tensor) and rate.dtype is not torch.float64):
        return False
    if any(isinstance(v, torch.Tensor) for k, v in group.items() if k != "lr") or any(isinstance(b, torch.Tensor) for b in group.get("betas", ())):
        return False
    tensors = [(p, p.grad) for p in group["params"] if p.grad is not None]
    kind = tensors[0][0].dtype if tensors else None
    if kind not in _EXACT or torch.get_default_dtype() is torch.float64:  # then the loop counts its steps in float64
        return False
    for p, grad in tensors:
        if p.dtype is not kind or grad.dtype is not kind or p.device.type != "cpu" or grad.layout is not torch.strided:
            return False
        if not (p.is_contiguous() and grad.is_contiguous()):
            return False
    known = [{k: v for k, v in state[p].items() if v is not None} if p in state else {} for p, _ in tensors]
    if any(k.keys() != known[0].keys() for k in known):
        return False
    for (p, _), mine in zip(tensors, known, strict=True):
        for name, v in mine.items():
            if isinstance(v, torch.Tensor) and (v.dtype is not torch.float32 if name == "step" else v.dtype is not kind or v.stride() != p.stride()):
                return False
    return True


def _ordinary(p: GlobalTensor, rank: int) -> bool:
    spec = p._spec
    return rank in spec.placement._coordinates and not any(e.is_partial for e in spec.layout)


def _beside(p: GlobalTensor, value: torch.Tensor) -> GlobalTensor:
    """State that lies as its parameter does. What was loaded may lie otherwise, or be a plain whole value."""
    if isinstance(value, GlobalTensor) and value._spec.layout == p._spec.layout and value._spec.placement is p._spec.placement:
        return value
    out = GlobalTensor.wrap(torch.empty_like(p._local, dtype=value.dtype, requires_grad=False), p._spec.replace(dtype=value.dtype))
    with torch.no_grad():
        out.copy_(value)
    return out


_swaps: weakref.WeakKeyDictionary[Optimizer, _Swap] = weakref.WeakKeyDictionary()


def _enter(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if type(optimizer) not in ELEMENTWISE or len(args) > 1 or kwargs.get("closure") is not None or _torch.watched_steps(optimizer):
        return
    swap = _swaps.get(optimizer)
    if swap is None:
        groups = optimizer.param_groups
        if not all(isinstance(p, GlobalTensor) for g in groups for p in g["params"]) or any(g.get("differentiable") for g in groups):
            return
        swap = _swaps[optimizer] = _Swap()
        optimizer.register_state_dict_pre_hook(_leave_for_reading)
    swap.leave(optimizer)  # where the step before failed half way
    swap.enter(optimizer)


def _leave(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    swap = _swaps.get(optimizer)
    if swap is not None:
        swap.leave(optimizer)


def _leave_for_reading(optimizer: Optimizer) -> None:
    # A step that failed half way has not been left.
    _leave(optimizer, (), {})


def install() -> None:
    register_optimizer_step_pre_hook(_enter)
    register_optimizer_step_post_hook(_leave)
