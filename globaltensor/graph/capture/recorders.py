"""Recorders: they turn what `build` does on fake tensors into an fx graph.

No kernel runs, and no memory is allocated. `capture` runs build() under two torch-function modes.
`LogicalRecorder` sees each call that the user's code makes, with global shapes: this is the logical
graph, the same on every rank. `LocalRecorder` is pushed while such a call runs. It sees the call's
work on this rank's local tensors: torch functions, boxings, and steps of this package that
communicate, each as one call. This is the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import fx

from ..._base import overridable, torch_private
from ..._base.python_bodies import python_body, recover_dropped_args
from ..._base.pytree import replaced, tensors_in
from ..._ops import autograd_function
from ..._ops import random as draws
from ..._ops.call_plan import name_of
from ..._ops.dispatch import dispatch
from ..._ops.plan_call import lies_at, writes
from ..._ops.rules import DATA_FREE_VARIANTS
from ..._ops.rules.deferred_mean import materialize
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.gradients import parameter_gather
from ..._tensor.view_tracking import RemoteView
from ...boxing import box
from ...distributed.simulate import SimulatedWorld
from ...distributed.world import world
from ...errors import GraphError
from ...sharding.placement import Placement
from ...sharding.spec import Spec, layout_for
from ..module_settings import stage_of_tensor
from ..program.nodes import (
    BoxingCall,
    GatherCall,
    ProgramCall,
    RandomCall,
    autocast,
    set_grad_enabled,
)
from .autograd_recorder import Differentiated, Reached
from .constant_folding import NotConstant, evaluated, nodes_in
from .dry_world import DryWorld, Untraceable
from .random_branches import decided, drawn
from .recorder_base import Made, Recorder, casting, line, specs_of, spelled

__all__ = ["LocalRecorder", "LogicalRecorder"]

_HOOKS: Final = ("register_hook", "register_post_accumulate_grad_hook")
_RANDOM: Final = (
    "drop",
    "rand",
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
    "uniform",
    "exponential",
    "cauchy",
    "geometric",
)


#: Functions that return values of tensors.
_READING: Final = frozenset(
    {
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.to_dlpack,
    }
)
_MAKING: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor})


_BY_CHANCE: Final = (
    "build() chooses by a random number what it does, but a static graph does the same at each "
    "step:\n  {}\n"
    "set the probability to 0 (layerdrop, module_dropout), let a mask choose (x + (torch.rand([]) "
    ">= p) * (layer(x) - x)), or run this model without a graph"
)


class LocalRecorder(Differentiated):
    """A recorder of everything that is done to this rank's local tensors."""

    def __init__(self, fake: Any, dry: DryWorld, names: Mapping[int, str]) -> None:
        super().__init__(fake, dry.rank)
        self.world = dry
        self.names = names  # id of a local tensor -> the path of the parameter or buffer
        self._fakes: dict[int, torch.Tensor] = {}  # id of a real tensor -> its fake tensor
        self._reals: dict[int, torch.Tensor] = {}  # id of a fake tensor -> its real tensor
        self._grad, self._cast = torch.is_grad_enabled(), casting()
        self.start = self._grad, self._cast
        here = world()
        self._seed = (
            None
            if isinstance(getattr(here, "real", here), SimulatedWorld)
            else torch.default_generator.initial_seed()
        )
        self.boxed: list[tuple[Spec, Spec, str]] = []  # boxings, in order: (src, dst, why)
        self.as_run: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: (
            function
        )  # wraps a function that draws, when it runs on fake tensors
        self.special: dict[Any, Callable[..., Any]] = {
            box: self._box,
            overridable.apply: self._apply,
            draws.run: self._draw,
            draws.fill_local: self._filled,
            autograd_function.applied: self._applied,
            parameter_gather.gather_param: self._gathered,
            **self.derived,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = recover_dropped_args(func, kwargs or {})
        if any(issubclass(t, GlobalTensor) for t in types):
            with self:
                return dispatch(GlobalTensor, func, types, args, kwargs)
        special = self.special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in overridable.SEEN:
            with self:
                return func.__wrapped__(*args, **kwargs)
        # torch leaves out the types of ``fake == global``, and of operands in a list
        # (``torch.einsum("i, i", [x, y])``).
        if any(isinstance(t, GlobalTensor) for t in tensors_in(kwargs, tensors_in(args, []))):
            with self:
                return dispatch(GlobalTensor, func, types, args, kwargs)
        return self.record(func, args, kwargs)

    # States

    def standing(self, a: Any) -> Any:
        """Return the same pytree of arguments with fake tensors for real ones."""
        if isinstance(a, torch.Tensor):
            if torch_private.is_fake(a) or id(a) in self.known:  # (a meta tensor is not a fake one)
                return a
            found = self._fakes.get(id(a))
            if found is None:
                self.of(a)
                found = self._fakes[id(a)]
            return found
        if isinstance(a, (tuple, list)) and tensors_in(a, []):
            parts = [self.standing(v) for v in a]
            return (
                type(a)(parts)
                if type(a) in (tuple, list)
                else type(a)(*parts)
                if isinstance(getattr(a, "_fields", None), tuple)
                else tuple(parts)
            )
        if isinstance(a, dict):
            return {k: self.standing(v) for k, v in a.items()}
        return a

    def memory(self, t: torch.Tensor) -> Any:
        """Return a key that identifies the storage of this rank's local tensor."""
        part = t._local if isinstance(t, GlobalTensor) else t
        return self._fakes.get(id(part), part).untyped_storage()._cdata

    def within(self, stand: torch.Tensor) -> bool:
        """Return True if build() has made the fake tensor."""
        return id(stand) not in self._reals

    def of(self, t: torch.Tensor) -> fx.Node:
        stand = self._fakes.get(id(t), t)
        found = self.known.get(id(stand))
        return found if found is not None else self.state(t)

    def state(self, t: torch.Tensor) -> fx.Node:
        if torch_private.is_fake(t):
            raise GraphError("a tensor inside build() was made where the graph could not see it")
        stand = self.fake.from_tensor(t)
        if stand.requires_grad != t.requires_grad:
            stand.requires_grad_(t.requires_grad)
        stand.grad = None  # drop the gradient of an earlier step
        self._fakes[id(t)], self._reals[id(stand)] = stand, t
        self.alive.append(t)
        self.states.append(t)
        node = self.placeholder(self.names.get(id(t), "constant").replace(".", "_"), stand)
        node.meta["state"] = len(self.states) - 1
        return node

    # Calls

    def modes(self) -> None:
        """Record changes of the grad mode and of autocast, so that the program makes them too."""
        grad, cast = torch.is_grad_enabled(), casting()
        if grad != self._grad:
            self._grad = grad
            self.node(set_grad_enabled, (grad,), {}, None, effect=True, calls=0)
        if cast != self._cast:
            self._cast = cast
            self.node(autocast, tuple(cast), {}, None, effect=True, calls=0)

    def end(self) -> None:
        """Record the return to the modes at the start."""
        if self._grad != self.start[0]:
            self.node(set_grad_enabled, (self.start[0],), {}, None, effect=True, calls=0)
        if self._cast != self.start[1]:
            self.node(autocast, tuple(self.start[1]), {}, None, effect=True, calls=0)

    def record(
        self, func: Any, args: Any, kwargs: Any, target: Any = None, effect: bool = False
    ) -> Any:
        args, kwargs = self.standing(tuple(args)), self.standing(dict(kwargs))
        given = tensors_in(kwargs, tensors_in(args, []))
        before = [0 if t.is_inference() else t._version for t in given]
        met = self.world.met
        reading = func in _READING or (func is torch.Tensor.__format__ and args[1])
        try:
            if reading or (
                func in _MAKING
                and args
                and isinstance(args[0], (tuple, list))
                and tensors_in(args[0], [])
            ):
                raise torch_private.data_dependence()[0](func)
            out = func(*args, **kwargs)
        except torch_private.data_dependence() as error:
            try:
                out = self._constant(func, args, kwargs)
            except NotConstant:
                unseeing = None if reading else DATA_FREE_VARIANTS.get(func) or python_body(func)
                if unseeing is not None:
                    with self:
                        return unseeing(*args, **kwargs)
                if any(map(drawn, nodes_in([self.arg(args), self.arg(kwargs)]))):
                    raise GraphError(_BY_CHANCE.format(line())) from None
                raise error from None
        if torch_private.innermost_transform() is not None:
            raise GraphError(
                "build() uses a transform of torch.func (vmap, grad): write the batch as a dim, "
                "or wrap this part in globaltensor.local_map"
            )
        name = getattr(func, "__name__", "")
        written = tuple(
            i
            for i, (t, v) in enumerate(zip(given, before, strict=True))
            if not t.is_inference() and t._version != v
        )
        written = written or ((0,) if name == "__set__" else ())
        effect = effect or bool(written) or name in _HOOKS or any(word in name for word in _RANDOM)
        self.read = self.read or getattr(getattr(func, "__self__", None), "__name__", "") == "grad"
        if not effect and not tensors_in(out, []):
            return out
        self.modes()
        if target is None:
            target, args = spelled(func, args)
        made = self.node(target, self.arg(args), self.arg(kwargs), out, effect)
        made.meta["writes"] = written  # positions of the tensors that it writes to
        made.meta["meets"] = self.world.met > met  # whether it communicates
        made.meta["random"] = any(word in name for word in _RANDOM)
        if made.meta["random"]:
            self.unseeded()
        # ``x += 1`` returns the tensor itself. The user's code must then get the real tensor, which
        # it may store in a module.
        outs = tensors_in(out, [])
        return (
            replaced(out, iter([self._reals.get(id(t), t) for t in outs]))
            if any(id(t) in self._reals for t in outs)
            else out
        )

    def unseeded(self) -> None:
        """Raise GraphError if build() has seeded the generator, which a program does not do.

        Simulated ranks share one generator, so the check is left out for them."""
        if self._seed is not None and torch.default_generator.initial_seed() != self._seed:
            raise GraphError(
                "build() seeds torch's generator: it runs once, so only its first step would. "
                "Seed before the graph is called, or draw with a generator of "
                f"your own (generator=torch.Generator().manual_seed(...))\n  {line()}"
            )

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function that needs values, if they follow from the code alone.

        Raises NotConstant otherwise."""
        out = evaluated(self.graph, self.constants, func, self.arg(args), self.arg(kwargs))
        return replaced(out, iter([self.fake.from_tensor(t) for t in tensors_in(out, [])]))

    def _box(
        self,
        local: torch.Tensor,
        src: Spec,
        dst: Spec,
        grad: Spec | None = None,
        why: str = "",
        alias: bool = True,
    ) -> torch.Tensor:
        local = self.standing(local)
        if src is dst and grad is None:
            return local
        inside = self.rank in dst.placement._coordinates
        device = self.fake_device(dst, local)
        shape = dst.local_shape(self.rank) if inside else (0,)
        out = self.made(shape, dst.dtype, device, [local])
        self.modes()
        node = self.node(BoxingCall(src, dst, grad, why, alias), (self.of(local),), {}, out)
        node.meta["box"] = (src, dst)
        self.boxed.append((src, dst, why))
        return out

    def fake_device(self, dst: Spec, local: torch.Tensor) -> torch.device:
        if self.rank not in dst.placement._coordinates:
            return world().outside(dst.placement.type)
        return (
            local.device
            if local.device.type == dst.placement.type
            else torch.device(dst.placement.type)
        )

    def made(
        self, shape: Any, dtype: torch.dtype, device: torch.device, from_: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return a new fake tensor that autograd takes for a result of ``from_``."""
        real = dtype.is_floating_point or dtype.is_complex
        with self.fake:
            if real and torch.is_grad_enabled() and any(t.requires_grad for t in from_):
                return Made.apply(tuple(shape), dtype, device, *from_)  # type: ignore[no-any-return, no-untyped-call]
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def _apply(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a rule's function on local tensors, and record its calls.

        A function that communicates or asks for values is recorded as one call instead."""
        args, kwargs = (
            self.standing(tuple(args)),
            self.standing(kwargs),
        )  # convert first: ``x.to(dtype)`` may return x, which is then known by another node
        mark, known, modes = (
            next(iter(reversed(self.graph.nodes)), None),
            dict(self.known),
            (self._grad, self._cast),
        )
        try:
            with self:
                return function(*args, **kwargs)
        except (Untraceable, *torch_private.data_dependence()):
            self._forget(mark)
            self._grad, self._cast = modes
            self.known = {
                **{i: node for i, node in self.known.items() if node.op == "placeholder"},
                **known,
            }
        with torch_private.real_among_fake(
            self.fake
        ):  # real tensors that a rule made beforehand: positions, weights
            return self.record(function, args, kwargs, ProgramCall(function), True)

    def _forget(self, mark: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is mark:
                return
            if node.op != "placeholder":
                self.graph.erase_node(node)

    def _draw(self, function: Callable[..., Any], args: Any, kwargs: Any, coordinate: Any) -> Any:
        return self.record(
            self.as_run(function), args, kwargs, RandomCall(function, tuple(coordinate)), True
        )

    def _filled(self, spec: Spec, fill: Any, generator: Any = None) -> torch.Tensor:
        inside = self.rank in spec.placement._coordinates
        device = (
            torch.device(spec.placement.type) if inside else world().outside(spec.placement.type)
        )
        out = self.made(spec.local_shape(self.rank) if inside else (0,), spec.dtype, device, [])
        if any(isinstance(a, torch.Tensor) for a in (*fill.args, *fill.kwargs.values())):
            with self:
                return draws.fill_local.__wrapped__(spec, fill, generator)  # type: ignore[attr-defined,no-any-return]
        self.modes()
        step = ProgramCall(lambda generator: draws.fill_local(spec, fill, generator), fill.name)
        self.node(step, (self.arg(generator),), {}, out, effect=True)
        return out

    def _applied(self, function: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in(kwargs, tensors_in(args, []))
        reached = Reached()
        if not any(isinstance(t, GlobalTensor) for t in given):
            with torch_private.real_among_fake(self.fake):
                out = self.record(
                    reached.around(function.apply),
                    args,
                    kwargs,
                    ProgramCall(function.apply, function.__name__),
                )
            self.reaches(reached.leaves)
            return out
        with self:
            locals_ = [materialize(t)._local if isinstance(t, GlobalTensor) else t for t in given]
        step = autograd_function.LocalFunction(
            function, args, kwargs
        )  # its backward acts on global tensors too, so the program runs it as one call
        with torch_private.real_among_fake(self.fake):
            parts, written = self.record(
                reached.around(step), locals_, {}, ProgramCall(step, function.__name__), True
            )
        self.reaches(reached.leaves)
        for i, part in zip(step.written, written, strict=True):
            given[i]._local = part
        wrapped = [
            given[o] if isinstance(o, int) else part if o is None else GlobalTensor.wrap(part, o)
            for o, part in zip(step.outs, parts, strict=True)
        ]
        return replaced(step.result, iter(wrapped))

    def _gathered(self, leaf: GlobalTensor, src: Spec, dst: Spec, why: str) -> torch.Tensor:
        local = self.standing(leaf._local)
        shape = dst.local_shape(self.rank) if self.rank in dst.placement._coordinates else (0,)
        out = self.made(shape, dst.dtype, self.fake_device(dst, local), [local])
        self.modes()
        node = self.node(GatherCall(leaf, dst, why), (self.of(leaf._local),), {}, out)
        node.meta["box"] = (src, dst)
        self.boxed.append((src, dst, why))
        return out


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
        self.here: Placement | None = None  # placement of the stage whose module runs
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
                and not torch_private.is_fake(t._local)
            ):
                self.real[id(t)] = (t, t._local, t._spec, t._memory, dict(t.__dict__))

    def given_back(self) -> list[str]:
        """Restore tensors that hold fake tensors, and return their names."""
        lost = [held for held in self.real.values() if held[0]._local is not held[1]]
        for t, local, spec, memory, own in lost:
            t._local, t._spec, t._memory, t.__dict__ = local, spec, memory, own
        return [self.names.get(id(held[0]), "a tensor from outside") for held in lost]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = recover_dropped_args(func, kwargs or {})
        if func is stage_of_tensor:
            return self._staged(*args)
        if (
            func is torch.Tensor.__bool__
            and (told := decided(self.known.get(id(args[0])))) is not None
        ):
            return told
        if func is torch.Tensor.__bool__ and _asked_whether_causal(sys._getframe(1)):
            return False  # PyTorch takes no shortcut, and the mask itself still masks
        self.remember(tensors_in(kwargs, tensors_in(args, [])))
        if self.joins:
            args, kwargs = self._together(func, args, kwargs)
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
        if self._beneath(args) or self._beneath(kwargs):
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
        given = [t._spec for t in tensors_in(out, []) if isinstance(t, GlobalTensor)]
        if any(came) or given:  # for the plan: how operands came and were taken, what moved
            node.meta.update(
                came=came,
                took=took,
                boxes=tuple(self.local.boxed[first:]),
                called=name_of(func),
                given=given,
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

    def _together(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the operands of an op that mixes stages, moved to one placement.

        This is the placement of the running stage, or else of the latest stage among the operands.
        An op that writes into another stage is left as it is, and fails."""
        given = tensors_in(kwargs, tensors_in(args, []))
        placements = {t._spec.placement for t in given if isinstance(t, GlobalTensor)}
        if len(placements) < 2 or getattr(func, "__name__", "") == "backward":
            return args, kwargs
        latest = max(
            (t for t in given if isinstance(t, GlobalTensor)),
            key=lambda t: _or_first(self.of(t).meta.get("reached")),
        )
        where = self.here or latest._spec.placement
        if writes(func) and not lies_at(given[0], where):
            return args, kwargs
        with self:
            these = [
                self.brought(t, where)
                if isinstance(t, GlobalTensor) and t._spec.placement is not where
                else t
                for t in given
            ]
        return replaced(args, found := iter(these)), replaced(kwargs, found)

    def _staged(self, t: GlobalTensor, stage_id: int | None, placement: Placement | None) -> None:
        """Move ``t`` to ``placement``, and let what is computed from it belong to the stage."""
        node = self.of(t)
        if placement is not None and t._spec.placement is not placement:
            if not torch_private.is_fake(t._local):
                raise GraphError(
                    f"set_stage: {node.name} lies on {t._spec.placement!r}: bring the parameter "
                    f"to {placement!r} with to_global, before the call"
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
                node = self.local.known.get(id(materialize(t)._local))
                if node is not None and "value" not in node.meta:
                    self.count += 1
                    node.meta.update(value=self.count, spec=t._spec)

    def _beneath(self, given: Any) -> bool:
        """Return True if a call acts on local tensors, inside one of this package's functions."""
        tensors = tensors_in(given, [])
        return any(
            id(t) in self.local.known and id(t) not in self.known
            for t in tensors
            if not isinstance(t, GlobalTensor)
        )

    def state(self, t: torch.Tensor) -> fx.Node:
        name = self.names.get(id(t)) or f"constant_{len(self.states)}"
        self.states.append(t)
        node = self.placeholder(name.replace(".", "_"), t)
        node.meta["path"] = name
        return node


def _or_first(stage: int | None) -> int:
    return -1 if stage is None else stage


_WRITERS: Final = frozenset(
    {"__setitem__", "__set__", "backward", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
)
