"""The recorder of the logical graph: the calls that the user's code makes, with global shapes.

It is the same on every rank. `capture` runs build() under this recorder, which pushes a
`LocalRecorder` while a call runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import fx

from ..._base import overridable, torch_private
from ..._base.python_bodies import recover_dropped_args
from ..._base.pytree import replaced, tensors_in
from ..._ops.call_plan import name_of
from ..._ops.sharding_propagation import lies_at, writes
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.pending_tensor import local_of
from ..._tensor.view_tracking import RemoteView
from ...errors import GraphError
from ...sharding.placement import Placement
from ...sharding.spec import layout_for
from ..module_settings import stage_of_tensor
from .local_recorder import LocalRecorder
from .random_branches import decided
from .recorder_base import Recorder, casting, line, specs_of, spelled

__all__ = ["LogicalRecorder"]


def _asked_whether_causal(frame: Any) -> bool:
    """Return True if PyTorch's causal check of a mask asks for the truth value.

    The check may ask directly, or through the method of a global tensor."""
    return torch_private.CAUSAL_CHECK is not None and torch_private.CAUSAL_CHECK in (
        frame.f_code,
        frame.f_back and frame.f_back.f_code,
    )


class LogicalRecorder(Recorder):
    """A recorder of the user's calls, on tensors of global shape.

    ``local`` records the work of each call on local tensors."""

    def __init__(self, fake: Any, local: LocalRecorder, names: Mapping[int, str]) -> None:
        super().__init__(fake)
        self.local = local
        self.names = names  # id of a parameter or buffer -> its path
        self.count = 0
        self.joins = False  # whether an op that mixes stages runs in the latest of them
        self.stage_placement: Placement | None = None  # placement of the stage whose module runs
        self.moved: dict[
            tuple[int, Placement], tuple[torch.Tensor, torch.Tensor]
        ] = {}  # a tensor that several ops need is moved to a stage once
        self.applied: Any = None  # the plan to follow (graph/sharding_plan.py), if any
        self.slots: list[
            tuple[Any, Any]
        ] = []  # (dict or list, key) of attributes whose tensors the program uses
        self.real: dict[
            int, tuple[Any, ...]
        ] = {}  # global tensors from outside, and what they hold

    def remember(self, tensors: Iterable[torch.Tensor]) -> None:
        """Save the contents of tensors from outside before build() changes them.

        Views that need communication are left out: reading one may refresh it, which is an op."""
        for t in tensors:
            if (
                isinstance(t, GlobalTensor)
                and not isinstance(t, RemoteView)
                and id(t) not in self.real
                and not torch_private.is_fake(local_of(t))
            ):
                self.real[id(t)] = (t, t._local, t._spec, t._memory, dict(t.__dict__))

    def given_back(self) -> list[str]:
        """Restore tensors that hold fake tensors, and return their names."""
        lost = [held for held in self.real.values() if held[0]._stored is not held[1]]
        for t, local, spec, memory, own in lost:
            t._local, t._spec, t._memory, t.__dict__ = local, spec, memory, own
        return [self.names.get(id(held[0]), "a tensor from outside") for held in lost]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = recover_dropped_args(func, kwargs or {})
        if func is stage_of_tensor:
            return self._set_stage(*args)
        if (
            func is torch.Tensor.__bool__
            and (known_value := decided(self.known.get(id(args[0])))) is not None
        ):
            return known_value
        if func is torch.Tensor.__bool__ and _asked_whether_causal(sys._getframe(1)):
            return False  # PyTorch takes no shortcut, and the mask itself still masks
        self.remember(tensors_in(kwargs, tensors_in(args, [])))
        if self.joins:
            args, kwargs = self._move_to_one_placement(func, args, kwargs)
        self.local.path, self.local.stage, self.local.region = self.path, self.stage, self.region
        self.call = self.local.call = self.call + 1
        came, first, taken = specs_of(args, kwargs), len(self.local.boxed), (args, kwargs)
        with self.local:
            if self.applied is not None and any(came):
                taken = self.applied.before(func, args, kwargs)
            took = specs_of(*taken)
            out = func(*taken[0], **taken[1])
            if self.applied is not None:
                self.applied.written(func, *taken)
            self.values(out)
        if self._acts_on_local_tensors(args) or self._acts_on_local_tensors(kwargs):
            return out
        name = getattr(func, "__name__", "")
        written = (
            (name.endswith("_") and not name.endswith("__"))
            or name in _WRITERS
            or kwargs.get("out") is not None
            or kwargs.get("inplace") is True
        )
        if not written and not tensors_in(out, []):
            return out
        if func in overridable.SEEN:
            target: Any = func if func in overridable.ALONE else func.__name__
        else:
            target, args = spelled(func, args)
        node = self.node(target, self.arg(args), self.arg(kwargs), out, written)
        reached = [
            s
            for s in (
                self.stage,
                *(a.meta.get("reached") for a in node.all_input_nodes if self.stage is None),
            )
            if s is not None
        ]
        node.meta["reached"] = max(reached, default=None)  # the latest stage that it follows from
        node.meta.update(where=line(), modes=(torch.is_grad_enabled(), casting()), func=func)
        result_specs = [t._spec for t in tensors_in(out, []) if isinstance(t, GlobalTensor)]
        if any(came) or result_specs:  # for the plan: how operands came and were taken, what moved
            node.meta.update(
                came=came,
                took=took,
                boxes=tuple(self.local.boxed[first:]),
                called=name_of(func),
                result_specs=result_specs,
            )
            if self.applied is not None:
                self.applied.after(node, func, *taken)
        return out

    def brought(self, t: GlobalTensor, where: Placement) -> GlobalTensor:
        """Return the tensor on another placement.

        Its sbp is unchanged if the placement has as many axes."""
        key = (id(t), where)
        if key not in self.moved:
            self.moved[key] = (
                t,
                t.to_global(placement=where, sbp=layout_for(where, t.sbp)),
            )  # the entry keeps t alive, so that its id stays unique
        return self.moved[key][1]  # type: ignore[return-value]

    def _move_to_one_placement(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the operands of an op that mixes stages, moved to one placement.

        This is the placement of the running stage, or else of the latest stage among the operands.
        An op that writes into another stage is left as it is, and fails."""
        operands = tensors_in(kwargs, tensors_in(args, []))
        placements = {t._spec.placement for t in operands if isinstance(t, GlobalTensor)}
        if len(placements) < 2 or getattr(func, "__name__", "") == "backward":
            return args, kwargs
        latest = max(
            (t for t in operands if isinstance(t, GlobalTensor)),
            key=lambda t: _stage_order(self.of(t).meta.get("reached")),
        )
        where = self.stage_placement or latest._spec.placement
        if writes(func) and not lies_at(operands[0], where):
            return args, kwargs
        with self:
            moved_operands = [
                self.brought(t, where)
                if isinstance(t, GlobalTensor) and t._spec.placement is not where
                else t
                for t in operands
            ]
        return replaced(args, replacements := iter(moved_operands)), replaced(kwargs, replacements)

    def _set_stage(
        self, t: GlobalTensor, stage_id: int | None, placement: Placement | None
    ) -> None:
        """Move ``t`` to ``placement``, and let what is computed from it belong to the stage."""
        node = self.of(t)
        if placement is not None and t._spec.placement is not placement:
            if not torch_private.is_fake(t._stored):
                raise GraphError(
                    f"set_stage: {node.name} is on {t._spec.placement!r}: move the parameter to "
                    f"{placement!r} with to_global, before the call"
                )
            with self:
                moved: Any = t.to_global(placement=placement, sbp=layout_for(placement, t.sbp))
            node.meta["val"] = GlobalTensor.wrap(t._local, t._spec)  # its value before the move
            t._local, t._spec = moved._local, moved._spec
            node = self.known[id(t)] = self.of(moved)
        if stage_id is not None:
            node.meta["starts"] = stage_id

    def values(self, out: Any) -> None:
        """Number the results of a call.

        The numbers are the same on every rank, while names of local nodes may differ."""
        for t in tensors_in(out, []):
            if isinstance(t, GlobalTensor):
                node = self.local.known.get(id(local_of(t)))
                if node is not None and "value" not in node.meta:
                    self.count += 1
                    node.meta.update(value=self.count, spec=t._spec)

    def of(self, t: torch.Tensor) -> fx.Node:
        """Return the node of a tensor.

        ``torch.from_numpy`` inside build() returns the fake tensor of a tensor from outside: the
        node is that tensor's."""
        real = self._real_of(t)
        return super().of(t if real is None else real)

    def _real_of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor from outside that a fake tensor represents, if this graph has it."""
        real = self.local.real_of(t)
        return real if real is not None and id(real) in self.known else None

    def _acts_on_local_tensors(self, given: Any) -> bool:
        """Return True if a call acts on local tensors, inside one of this package's functions."""
        tensors = tensors_in(given, [])
        return any(
            id(t) in self.local.known and id(t) not in self.known and self._real_of(t) is None
            for t in tensors
            if not isinstance(t, GlobalTensor)
        )

    def state(self, t: torch.Tensor) -> fx.Node:
        name = self.names.get(id(t)) or f"constant_{len(self.states)}"
        self.states.append(t)
        node = self.placeholder(name.replace(".", "_"), t)
        node.meta["path"] = name
        return node


def _stage_order(stage: int | None) -> int:
    return -1 if stage is None else stage


_WRITERS: Final = frozenset(
    {"__setitem__", "__set__", "backward", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
)
