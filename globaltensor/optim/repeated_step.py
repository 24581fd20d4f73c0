"""A record of an optimizer's last step, by which the next one need not examine every parameter.

`local_step` makes one after a step.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import (
    Optimizer,
)

from .._tensor.global_tensor import GlobalTensor
from .shard_gather import same_layout, stepped

__all__ = ["RepeatedStep", "State", "group_values", "identical"]


State = dict[str, Any]

_LAYOUT_FIELDS = operator.attrgetter("_local", "_spec", "_leaf", "_shard")


class RepeatedStep:
    """A record of what a step has exchanged.

    The next step exchanges the same, except for the gradients, if parameters, layouts and states
    are the same. Then it need not examine each of them again."""

    def __init__(
        self, groups: Sequence[State], held: Any, mine_of: defaultdict[torch.Tensor, State]
    ) -> None:
        self.groups = list(groups)
        self.params: list[GlobalTensor] = [p for group in groups for p in group["params"]]
        self.lie = list(itertools.chain.from_iterable(map(_LAYOUT_FIELDS, self.params)))
        self.locals = [[p._local for p in group["params"]] for group in groups]
        self.held = list(map(held.get, self.params))
        self.state, self.mine = mine_of, list(mine_of.values())
        self.lengths, self.values = (
            list(map(len, self.mine)),
            list(itertools.chain.from_iterable(map(dict.values, self.mine))),
        )
        self.settings, self.given = list(map(_settings, groups)), group_values(groups)
        #: Parameters that the step skipped, for example those of other ranks.
        self.idle = [
            (p._local.grad if p._leaf is None else p._leaf.value) is None for p in self.params
        ]
        self.fused: list[State] = []  # the groups that use the fused kernel without a request

    @classmethod
    def of(cls, optimizer: Optimizer, mine_of: Any) -> RepeatedStep | None:
        """Return the record of a step, or None if the next step cannot reuse it.

        It cannot if tensors are among the settings, or if a rank steps a shard of a parameter
        (ZeRO). Nor can it if a parameter with a state was skipped in this step."""
        groups, held = optimizer.param_groups, optimizer.state
        if None in map(_settings, groups):
            return None
        usual = all(
            stepped(p) is p._spec and (p in held) == (p._local in mine_of)
            for group in groups
            for p in group["params"]
        )
        return cls(groups, held, mine_of) if usual else None

    def gradients(self, optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return (local tensor, gradient) pairs to assign, or None to examine all parameters.

        The pairs are those of gradients that are not stored in the local tensors."""
        groups, params = optimizer.param_groups, self.params
        if len(groups) != len(self.groups) or not all(map(operator.is_, groups, self.groups)):
            return None
        given = group_values(groups)
        if not identical(given, self.given):
            if list(map(_settings, groups)) != self.settings:
                return None
            self.given = given
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
            map(operator.is_, itertools.chain.from_iterable(map(_LAYOUT_FIELDS, params)), self.lie)
        ):
            return None
        if not self.unchanged() or not all(
            map(operator.is_, map(optimizer.state.get, params), self.held)
        ):
            return None
        found, dtype = [], None if not self.fused else self.fused[0]["params"][0].dtype
        for p, local, leaf, idle in zip(
            params, self.lie[::4], self.lie[2::4], self.idle, strict=True
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
                seen[1]._local is not grad or not same_layout(seen[1]._spec, p._spec)
            ):
                return None
            if leaf is not None:
                found.append((local, grad))
            if dtype is not None and not (
                grad.dtype is dtype and grad.layout is torch.strided and grad.is_contiguous()
            ):
                return None
        return found

    def unchanged(self) -> bool:
        """Return True if the states of the local tensors hold the same objects as before."""
        if len(self.state) != len(self.mine) or list(map(len, self.mine)) != self.lengths:
            return False
        return all(
            map(
                operator.is_,
                itertools.chain.from_iterable(map(dict.values, self.mine)),
                self.values,
            )
        )


def group_values(groups: Sequence[State]) -> list[Any]:
    return [v for group in groups for v in group.values()]


def identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _settings(group: State) -> Any:
    """Return the settings, other than numbers, that determine how a group steps.

    Returns None if tensors are among the settings."""
    values = [v for k, v in group.items() if k != "params"]
    if any(
        isinstance(v, torch.Tensor)
        for v in itertools.chain(values, *(v for v in values if isinstance(v, (tuple, list))))
    ):
        return None
    return torch.get_default_dtype(), [
        v if v is None or isinstance(v, bool) else type(v) for v in values
    ]
