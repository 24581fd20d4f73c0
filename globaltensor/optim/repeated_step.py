"""A record of an optimizer's last step, with which the next step skips most checks.

`local_step` makes a record after a step.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .shard_gather import same_layout, stepped

__all__ = ["RepeatedStep", "State", "group_values", "identical"]


State = dict[str, Any]

_LAYOUT_FIELDS = operator.attrgetter("_local", "_spec", "_leaf", "_shard")


class RepeatedStep:
    """A record of an optimizer's step: its parameters, their layouts and their states.

    If these are the same at the next step, only the gradients differ. The next step then does not
    examine each parameter again."""

    def __init__(
        self, groups: Sequence[State], held: Any, state_of_part: defaultdict[torch.Tensor, State]
    ) -> None:
        self.groups = list(groups)
        self.params: list[GlobalTensor] = [p for group in groups for p in group["params"]]
        self.layout_fields = list(itertools.chain.from_iterable(map(_LAYOUT_FIELDS, self.params)))
        self.locals = [[p._local for p in group["params"]] for group in groups]
        self.held = list(map(held.get, self.params))
        #: The values of the states that the program sees, which it may replace.
        self.shown = list(itertools.chain.from_iterable(map(dict.values, filter(None, self.held))))
        self.state, self.part_states = state_of_part, list(state_of_part.values())
        self.lengths, self.values = (
            list(map(len, self.part_states)),
            list(itertools.chain.from_iterable(map(dict.values, self.part_states))),
        )
        self.settings, self.option_values = list(map(_settings, groups)), group_values(groups)
        #: Parameters that the step skipped, for example those of other ranks.
        self.idle = [
            (p._local.grad if p._leaf is None else p._leaf.value) is None for p in self.params
        ]
        self.fused: list[State] = []  # the groups that use the fused kernel without a request

    @classmethod
    def of(cls, optimizer: Optimizer, state_of_part: Any) -> RepeatedStep | None:
        """Return the record of a step, or None if the next step cannot reuse it.

        The next step cannot reuse it in three cases. A setting is a tensor, a rank steps a shard of
        a parameter (ZeRO), or this step skipped a parameter that has a state."""
        groups, held = optimizer.param_groups, optimizer.state
        if None in map(_settings, groups):
            return None
        usual = all(
            stepped(p) is p._spec and (p in held) == (p._local in state_of_part)
            for group in groups
            for p in group["params"]
        )
        return cls(groups, held, state_of_part) if usual else None

    def gradients(self, optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return (local tensor, gradient) pairs to assign, or None to examine all parameters.

        There is a pair for each gradient that is not stored in its local tensor."""
        groups, params = optimizer.param_groups, self.params
        if len(groups) != len(self.groups) or not all(map(operator.is_, groups, self.groups)):
            return None
        option_values = group_values(groups)
        if not identical(option_values, self.option_values):
            if list(map(_settings, groups)) != self.settings:
                return None
            self.option_values = option_values
        if [len(group["params"]) for group in groups] != list(map(len, self.locals)):
            return None
        if not all(
            map(
                operator.is_,
                itertools.chain.from_iterable(group["params"] for group in groups),
                params,
            )
        ):
            return None
        if not all(
            map(
                operator.is_,
                itertools.chain.from_iterable(map(_LAYOUT_FIELDS, params)),
                self.layout_fields,
            )
        ):
            return None
        if not self.unchanged() or not all(
            map(operator.is_, map(optimizer.state.get, params), self.held)
        ):
            return None
        shown = itertools.chain.from_iterable(map(dict.values, filter(None, self.held)))
        if not identical(list(shown), self.shown):
            return None
        local_grads, dtype = [], None if not self.fused else self.fused[0]["params"][0].dtype
        for p, local, leaf, idle in zip(
            params, self.layout_fields[::4], self.layout_fields[2::4], self.idle, strict=True
        ):
            grad = local.grad
            if leaf is not None:
                if grad is not None:
                    return None  # the gradient is still to be reduced
                grad = leaf.value
            if (grad is None) is not idle:
                return None
            if grad is None:
                continue
            seen = p.__dict__.get("_kept_grad")
            if seen is not None and (
                type(seen[1]) not in ORDINARY
                or seen[1]._local is not grad
                or not same_layout(seen[1]._spec, p._spec)
            ):
                return None
            if leaf is not None:
                local_grads.append((local, grad))
            if dtype is not None and not (
                grad.dtype is dtype and grad.layout is torch.strided and grad.is_contiguous()
            ):
                return None
        return local_grads

    def unchanged(self) -> bool:
        """Return True if the states of the local tensors hold the same objects as before."""
        if (
            len(self.state) != len(self.part_states)
            or list(map(len, self.part_states)) != self.lengths
        ):
            return False
        return all(
            map(
                operator.is_,
                itertools.chain.from_iterable(map(dict.values, self.part_states)),
                self.values,
            )
        )


def group_values(groups: Sequence[State]) -> list[Any]:
    return [v for group in groups for v in group.values()]


def identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _settings(group: State) -> Any:
    """Return the settings, other than numbers, that determine how a group steps.

    Returns None if a setting is a tensor."""
    values = [v for k, v in group.items() if k != "params"]
    if any(
        isinstance(v, torch.Tensor)
        for v in itertools.chain(values, *(v for v in values if isinstance(v, (tuple, list))))
    ):
        return None
    return torch.get_default_dtype(), [
        v if v is None or isinstance(v, bool) else type(v) for v in values
    ]
