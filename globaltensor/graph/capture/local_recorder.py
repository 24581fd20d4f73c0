"""The recorder of one rank's program: it turns the work on local tensors into an fx graph.

No kernel runs, and no memory is allocated. `capture` runs build() under two torch-function modes.
`LogicalRecorder` sees each call of the user's code. While such a call runs, `LocalRecorder` sees
its work on this rank's local tensors: torch functions, boxings, and steps of this package that
communicate, each as one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from ..._base import overridable, torch_private
from ..._base.python_bodies import python_body, recover_dropped_args
from ..._base.pytree import replaced, tensors_in
from ..._ops import autograd_function
from ..._ops import random_streams as draws
from ..._ops.rules import DATA_FREE_VARIANTS
from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.gradients import parameter_gather
from ..._tensor.pending_tensor import PendingTensor, local_of
from ...boxing import box
from ...distributed.simulate import SimulatedWorld
from ...distributed.world import world
from ...errors import GraphError
from ...sharding.spec import Spec
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
from .random_branches import drawn
from .recorder_base import Made, casting, line, spelled

__all__ = [
    "LocalRecorder",
]

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


def _returns_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if a function returns values of tensors as Python numbers, text or arrays."""
    return func in _READING or bool(func is torch.Tensor.__format__ and args[1])


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if a function returns values of tensors, or makes a tensor from some."""
    if _returns_values(func, args):
        return True
    makes = func in _MAKING and args and isinstance(args[0], (tuple, list))
    return bool(makes and tensors_in(args[0], []))


def _mutated_positions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of the tensors whose versions are not ``versions`` any more."""
    return tuple(
        i
        for i, (t, version) in enumerate(zip(tensors, versions, strict=True))
        if not t.is_inference() and t._version != version
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
        this_world = world()
        self._seed = (
            None
            if isinstance(getattr(this_world, "real", this_world), SimulatedWorld)
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
            draws.fill_local: self._record_fill,
            autograd_function.applied: self._record_autograd_function,
            parameter_gather.gather_param: self._record_gather,
            **self.derived,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = recover_dropped_args(func, kwargs or {})
        if any(issubclass(t, GlobalTensor) for t in types):
            return self._dispatch(func, types, args, kwargs)
        special = self.special.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in overridable.SEEN:
            with self:
                return func.__wrapped__(*args, **kwargs)
        # torch leaves out the types of ``fake == global``, and of operands in a list
        # (``torch.einsum("i, i", [x, y])``).
        if any(isinstance(t, GlobalTensor) for t in tensors_in(kwargs, tensors_in(args, []))):
            return self._dispatch(func, types, args, kwargs)
        return self.record(func, args, kwargs)

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Dispatch a call on global tensors, and record what it does to local tensors."""
        with self:
            return PendingTensor.__torch_function__(func, types, args, kwargs)

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
        part = local_of(t)
        return self._fakes.get(id(part), part).untyped_storage()._cdata

    def within(self, stand: torch.Tensor) -> bool:
        """Return True if build() has made the fake tensor."""
        return id(stand) not in self._reals

    def of(self, t: torch.Tensor) -> fx.Node:
        stand = self._fakes.get(id(t), t)
        found = self.known.get(id(stand))
        return found if found is not None else self.state(t)

    def real_of(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor from outside that a fake tensor represents, or None."""
        return self._reals.get(id(t))

    def node_of(self, t: torch.Tensor) -> fx.Node | None:
        """Return the node of a tensor, or None if the program does not have the tensor."""
        return self.known.get(id(self._fakes.get(id(t), t)))

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
        """Run a call on fake tensors, add it to the program as a node, and return its result.

        ``target``: the node's function, if it is not ``func``. ``effect``: the call does more than
        return its result, so the node is never removed. A call may need values of tensors. If the
        code alone determines the values, the call is evaluated. Otherwise a variant of the function
        that needs no values runs. Raises GraphError if there is no such variant."""
        args, kwargs = self.standing(tuple(args)), self.standing(dict(kwargs))
        tensors = tensors_in(kwargs, tensors_in(args, []))
        versions = [0 if t.is_inference() else t._version for t in tensors]
        met = self.world.met
        try:
            if _reads_values(func, args):
                raise torch_private.data_dependence()[0](func)
            out = func(*args, **kwargs)
        except torch_private.data_dependence() as error:
            try:
                out = self._constant(func, args, kwargs)
            except NotConstant:
                return self._run_data_free_variant(func, args, kwargs, error)
        if torch_private.innermost_transform() is not None:
            raise GraphError(
                "build() uses a transform of torch.func (vmap, grad): write the batch as a dim, "
                "or wrap this part in globaltensor.local_map"
            )
        name = getattr(func, "__name__", "")
        written = _mutated_positions(tensors, versions) or ((0,) if name == "__set__" else ())
        draws = any(word in name for word in _RANDOM)
        effect = effect or bool(written) or name in _HOOKS or draws
        self.read = self.read or getattr(getattr(func, "__self__", None), "__name__", "") == "grad"
        if not effect and not tensors_in(out, []):
            return out
        self.modes()
        if target is None:
            target, args = spelled(func, args)
        made = self.node(target, self.arg(args), self.arg(kwargs), out, effect)
        made.meta["writes"] = written  # positions of the tensors that it writes to
        made.meta["meets"] = self.world.met > met  # whether it communicates
        made.meta["random"] = draws
        if draws:
            self.unseeded()
        return self._real_results(out)

    def _run_data_free_variant(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Run a call whose values are unknown by a variant that needs none.

        Raises GraphError if the values are random, and ``error`` where there is no such variant."""
        variant = None
        if not _returns_values(func, args):
            variant = DATA_FREE_VARIANTS.get(func) or python_body(func)
        if variant is not None:
            with self:
                return variant(*args, **kwargs)
        if any(map(drawn, nodes_in([self.arg(args), self.arg(kwargs)]))):
            raise GraphError(_BY_CHANCE.format(line())) from None
        raise error from None

    def _real_results(self, out: Any) -> Any:
        """Return a result with the real tensors among it in place of their fake ones.

        ``x += 1`` returns the tensor itself. The user's code must then get the real tensor, which
        it may store in a module."""
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
                "build() seeds torch's generator: build() runs once, so only the first step would "
                "be seeded. Seed before the graph is called, or draw with a generator of your own "
                f"(generator=torch.Generator().manual_seed(...))\n  {line()}"
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

    def _record_fill(self, spec: Spec, fill: Any, generator: Any = None) -> torch.Tensor:
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

    def _record_autograd_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        operands = tensors_in(kwargs, tensors_in(args, []))
        reached = Reached()
        if not any(isinstance(t, GlobalTensor) for t in operands):
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
            locals_ = list(map(local_of, operands))
        step = autograd_function.LocalFunction(
            function, args, kwargs
        )  # its backward acts on global tensors too, so the program runs it as one call
        with torch_private.real_among_fake(self.fake):
            parts, written = self.record(
                reached.around(step), locals_, {}, ProgramCall(step, function.__name__), True
            )
        self.reaches(reached.leaves)
        for i, part in zip(step.written, written, strict=True):
            operands[i]._local = part
        wrapped = [
            operands[o] if isinstance(o, int) else part if o is None else GlobalTensor.wrap(part, o)
            for o, part in zip(step.outs, parts, strict=True)
        ]
        return replaced(step.result, iter(wrapped))

    def _record_gather(self, leaf: GlobalTensor, src: Spec, dst: Spec, why: str) -> torch.Tensor:
        local = self.standing(leaf._local)
        shape = dst.local_shape(self.rank) if self.rank in dst.placement._coordinates else (0,)
        out = self.made(shape, dst.dtype, self.fake_device(dst, local), [local])
        self.modes()
        node = self.node(GatherCall(leaf, dst, why), (self.of(leaf._local),), {}, out)
        node.meta["box"] = (src, dst)
        self.boxed.append((src, dst, why))
        return out
