"""torch.optim's elementwise optimizers on global parameters, at the speed of local ones.

The package calls `install` on import, which adds hooks to every optimizer. For the length of a step
these optimizers work on the local tensors.

Their update of an element depends only on this element's parameter, gradient and state. So a step
on each rank's local tensors is a step on the global tensors. Other optimizers run their calls on
global tensors: those that need full tensors (LBFGS, Adafactor, Muon), subclasses, and optimizers
with step hooks of other code. A partial parameter is stepped as its sum.

If a parameter has a ``_shard`` (ZeRO, optim/zero.py), a rank steps only its shard. It needs a shard
of the gradient and a state of that size. Afterwards the shards are gathered into the parameter,
many at a time.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._base import torch_private
from .._base.patches import patch
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.grad import clear_grads, local_grad
from .._tensor.history import identify_copy, record
from ..boxing import box
from ..distributed.divergence import digest_of
from ..distributed.world import world
from ..errors import GlobalTensorError, ShapeError
from ..sharding.placement import Placement
from ..sharding.sbp import partial_sum
from ..sharding.spec import Spec, StorageSpec
from .hyperparameters import hyperparameter_tensors, hyperparameters, spelled
from .repeated_step import RepeatedStep, State, group_values, identical
from .shard_gather import ShardPlaces, SteppedShards, stepped, summed
from .state_layout import relay_state, state_beside

__all__ = ["ELEMENTWISE", "install", "relay"]

ELEMENTWISE = {
    SGD,
    ASGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
}  # globaltensor.v0 adds its own
# torch has a kernel for the full step, on the cpu too
FUSED = frozenset({SGD, Adagrad, Adam, AdamW})
# for narrower dtypes the loop rounds each op's result, the kernel only the last
_EXACT = frozenset({torch.float32, torch.float64})


class _Twin(NamedTuple):
    """The state of one parameter, and the same with local tensors.

    ``shown`` and ``seen`` are copies of ``known`` and ``local`` when last examined: a program may
    replace a value of the state. ``spec`` is the layout of the stepped tensor.
    """

    known: State
    shown: State
    local: State
    seen: State
    spec: Spec


class _Swap:
    """A replacement of one optimizer's parameters and state by the local tensors, during a step."""

    def __init__(self) -> None:
        # by the id of the parameter
        self.twins: dict[int, _Twin] = {}
        self.before: tuple[list[list[GlobalTensor]], Any, list[tuple[torch.Tensor, Any]]] | None = (
            None
        )
        self.fused: list[State] = []  # the groups that use the fused kernel for this step only
        self.shares = SteppedShards()
        self.places: ShardPlaces | None = None  # positions of the last step's shards
        # the record of the last step, if the next one may exchange the same
        self.last: RepeatedStep | None = None
        self.known = 0  # number of parameters with a state before this step

    def repeat_last(self, optimizer: Optimizer) -> bool:
        """Exchange the same as in the last step.

        Return False, with nothing done, if this is not valid."""
        last = self.last
        grads = None if last is None else last.gradients(optimizer)
        if last is None or grads is None:
            return False
        self.before = (
            [group["params"] for group in optimizer.param_groups],
            optimizer.state,
            [(local, None) for local, _ in grads],
        )
        for local, grad in grads:
            local.grad = grad
        for group, locals_ in zip(optimizer.param_groups, last.locals, strict=True):
            group["params"] = locals_
        for group in last.fused:
            group["fused"] = True
        self.fused = list(last.fused)
        optimizer.state = last.state
        return True

    def enter(self, optimizer: Optimizer) -> None:
        """Exchange parameters and state.

        Do nothing if a parameter or its gradient is not ordinary."""
        if self.repeat_last(optimizer):
            return
        self.last = None
        lists = [group["params"] for group in optimizer.param_groups]
        gradients = _gradients_of(lists, world().rank)
        if gradients is None:
            return
        shares = self._shares(gradients)
        state, grads, before = self._local_states(optimizer.state, gradients, shares)
        # From here on nothing can fail.
        self.shares, self.known = shares, len(state)
        self.before = lists, optimizer.state, before
        for part, grad in grads:
            part.grad = grad
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = [shares.parts.get(id(p), p._local) for p in params]
            if type(optimizer) in FUSED and _can_fuse(group, state):
                group["fused"] = True
                self.fused.append(group)
        optimizer.state = state

    def _shares(self, gradients: _Gradients) -> SteppedShards:
        """Return the shards that this rank steps, and the sums of partial parameters."""
        members = gradients.members
        if members and (self.places is None or not self.places.serve(members)):
            self.places = ShardPlaces(members)
        shares = SteppedShards(self.places if members else None)
        for p, spec in gradients.sums:
            shares.add(p, spec)
        return shares

    def _local_states(
        self, known_of: Any, gradients: _Gradients, shares: SteppedShards
    ) -> tuple[
        defaultdict[torch.Tensor, State],
        list[tuple[torch.Tensor, torch.Tensor]],
        list[tuple[torch.Tensor, torch.Tensor | None]],
    ]:
        """Return the state of the local tensors, the gradients to assign, and those before."""
        state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        parts = shares.parts
        for p, spec, grad in gradients.stepped:
            part = parts.get(id(p), p._local) if parts else p._local
            held = part.grad
            if held is not grad:
                grads.append((part, grad))
                before.append((part, held))
            if known := known_of.get(p):
                state[part] = self._localize_state(p, spec, known)
        return state, grads, before

    def _localize_state(self, p: GlobalTensor, spec: Spec, known: State) -> State:
        twin = self.twins.get(id(p))
        if (
            twin is not None
            and twin.known is known
            and twin.spec is spec
            and identical(list(known.values()), list(twin.shown.values()))
        ):
            return twin.local
        for k, v in known.items():
            if isinstance(v, torch.Tensor) and k != "step" and v.shape == p.shape:
                known[k] = state_beside(p, spec, v)
            # a step count that was loaded from a state made global as a whole
            elif isinstance(v, GlobalTensor):
                known[k] = torch.from_numpy(v.numpy()).to(v.device)
        part_state = {k: v._local if isinstance(v, GlobalTensor) else v for k, v in known.items()}
        self.twins[id(p)] = _Twin(known, dict(known), part_state, dict(part_state), spec)
        return part_state

    def leave(self, optimizer: Optimizer, done: bool = False) -> None:
        """Undo the exchange, and make new state global. ``done``: the step has not failed.

        Only then the stepped shards are written to the parameters."""
        if self.before is None:
            return
        (lists, state, grads), self.before, state_of_part = self.before, None, optimizer.state
        optimizer.state = state
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            # Torch's fused kernels write past autograd. Tensors that were gathered from these
            # values must be seen as outdated.
            if group.get("fused"):
                torch.autograd.graph.increment_version([p._local for p in params])
        fused, self.fused = self.fused, []
        for group in fused:
            group["fused"] = None
        twins, parts = self.twins, self.shares.parts
        known = self.last is not None and self.last.unchanged()
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
            for p in params:
                if p._memory is not None:
                    p._memory.writes += 1
                if known:
                    continue
                part = parts.get(id(p), p._local) if parts else p._local
                if part_state := state_of_part.get(part):
                    twin = twins.get(id(p))
                    if (
                        twin is None
                        or twin.local is not part_state
                        or not identical(list(part_state.values()), list(twin.seen.values()))
                    ):
                        self._globalize_state(p, part, part_state, state)
        for part, grad in grads:
            part.grad = grad
        if not known:
            # If states were created in this step, the next step may use the fused kernel where this
            # one could not.
            same = len(state_of_part) == self.known or len(fused) == len(lists)
            self.last = (
                RepeatedStep.of(optimizer, state_of_part)
                if done and self.places is None and same
                else None
            )
            if self.last is not None:
                self.last.fused = fused
        shares, self.shares = self.shares, SteppedShards()
        if done:
            shares.gather()

    def _globalize_state(
        self, p: GlobalTensor, part: torch.Tensor, part_state: State, state: Any
    ) -> None:
        twin = self.twins.get(id(p))
        if twin is None or twin.local is not part_state:
            twin = self.twins[id(p)] = _Twin(state[p], {}, part_state, {}, stepped(p))
        for k, v in part_state.items():
            if k not in twin.seen or twin.seen[k] is not v:
                twin.seen[k] = v
                like = isinstance(v, torch.Tensor) and k != "step" and v.shape == part.shape
                if like:
                    out = GlobalTensor.wrap(v, stepped(p).replace(dtype=v.dtype))
                    v = identify_copy(out, p, int.from_bytes(digest_of(str(k)), "little"))
                twin.known[k] = twin.shown[k] = v


class _Gradients(NamedTuple):
    """The gradients of a step on local tensors.

    ``members`` and ``sums`` are the parameters that are stepped as shards or as sums.
    """

    stepped: list[tuple[GlobalTensor, Spec, torch.Tensor]]
    members: list[tuple[GlobalTensor, StorageSpec]]  # parameters of which this rank steps a shard
    sums: list[tuple[GlobalTensor, Spec]]  # partial parameters, which are stepped as their sums


def _gradients_of(lists: Sequence[Sequence[torch.Tensor]], rank: int) -> _Gradients | None:
    """Return the local gradients of all parameters, or None if one of these is not ordinary.

    If this rank steps a shard of a parameter, the gradient is cut to that shard. The gradient of a
    partial parameter is summed. The sum is collective."""
    result = _Gradients([], [], [])
    # The last spec found ordinary. The next parameter mostly has the same one.
    seen: Spec | None = None
    for p in itertools.chain.from_iterable(lists):
        if not isinstance(p, GlobalTensor) or type(p) not in ORDINARY:
            return None
        spec = p._spec
        if spec is not seen:
            if not _ordinary(p, rank):
                return None
            usual = rank in spec.placement._coordinates and summed(spec) is spec
            seen = spec if usual else None
        leaf = p._leaf
        if leaf is not None and leaf.local.grad is None and "_kept_grad" not in p.__dict__:
            grad = leaf.value  # as `local_grad` returns it
        else:
            alike, grad = local_grad(p)
            if not alike:
                return None
        if grad is None:
            continue
        if rank not in spec.placement._coordinates:
            # a parameter of other ranks: its state exists here in the layout that it has there
            result.stepped.append((p, stepped(p), grad))
            continue
        if p._shard is not None and (shard := stepped(p)) is not spec:
            spec = shard
            result.members.append((p, spec))  # type: ignore[arg-type]
            if p._grad_shard is None:
                grad = grad[spec.share(rank, rank)].contiguous()  # type: ignore[attr-defined]
        if spec is not seen and (whole := summed(p._spec)) is not p._spec:
            grad = box(
                grad,
                spec.replace(dtype=grad.dtype),
                whole.replace(dtype=grad.dtype),
                why="optimizer step",
            )
            spec = whole
            result.sums.append((p, spec))
        result.stepped.append((p, spec, grad))
    return result


def _can_fuse(group: State, state: Any) -> bool:
    """Return True if a group of local tensors may step with torch's fused kernel.

    The user must not have selected an implementation. The kernel must return the result of the loop
    over the parameters, torch's default on the cpu. It reads memory without regard to strides, and
    expects the state of all parameters or of none."""
    settings = (
        group.get("fused"),
        group.get("foreach"),
        group.get("capturable") or None,
        group.get("differentiable") or None,
    )
    rate = group["lr"]
    if any(s is not None for s in settings) or (
        isinstance(rate, torch.Tensor) and rate.dtype is not torch.float64
    ):
        return False
    if any(isinstance(v, torch.Tensor) for k, v in group.items() if k != "lr") or any(
        isinstance(b, torch.Tensor) for b in group.get("betas", ())
    ):
        return False
    tensors = [(p, p.grad) for p in group["params"] if p.grad is not None]
    kind = tensors[0][0].dtype if tensors else None
    # with float64 as default dtype the loop counts its steps in float64
    if kind not in _EXACT or torch.get_default_dtype() is torch.float64:
        return False
    for p, grad in tensors:
        if (
            p.dtype is not kind
            or grad.dtype is not kind
            or p.device.type != "cpu"
            or grad.layout is not torch.strided
        ):
            return False
        if not (p.is_contiguous() and grad.is_contiguous()):
            return False
    known = [
        {k: v for k, v in state[p].items() if v is not None} if p in state else {}
        for p, _ in tensors
    ]
    if any(k.keys() != known[0].keys() for k in known):
        return False
    for (p, _), mine in zip(tensors, known, strict=True):
        for name, v in mine.items():
            if isinstance(v, torch.Tensor) and (
                v.dtype is not torch.float32
                if name == "step"
                else v.dtype is not kind or v.stride() != p.stride()
            ):
                return False
    return True


def _ordinary(p: GlobalTensor, rank: int) -> bool:
    spec = p._spec
    # A parameter of other ranks steps along, so that its state exists here as it does there.
    if rank not in spec.placement._coordinates:
        return p._local.shape == (0,)
    return not any(e.is_partial and e is not partial_sum for e in spec.layout)


def relay(optimizer: Optimizer) -> None:
    """Box the optimizer's state to the layouts of the stepped tensors, which have changed.

    Collective."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if known := optimizer.state.get(p):
                relay_state(p, known)
    if optimizer in _swaps:
        _swaps[optimizer].twins.clear()
        _swaps[optimizer].places = _swaps[optimizer].last = None


def _wrap_load_state_dict(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Load a state as torch does, and box it to the layouts of the parameters.

        State may be a full value, or be on other ranks than its parameter. The call is collective
        if state needs boxing.

        Raises ShapeError, and leaves the optimizer as it was, if a state of an elementwise
        optimizer does not have its parameter's shape."""
        if self in _swaps:
            _swaps[self].leave(self)  # undo a step that failed half way
        before = self.state, self.param_groups
        load(self, *args, **kwargs)
        try:
            _check_shapes(self)
            relay(self)
            _record_loaded(self)
        except BaseException:
            self.state, self.param_groups = before
            raise

    return load_state_dict


def _check_shapes(optimizer: Optimizer) -> None:
    """Raise ShapeError if a state does not have its parameter's shape, before any communication.

    State of one element (a count, a product of rates) may have any number of dims."""
    if type(optimizer) not in ELEMENTWISE:
        return
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            for key, v in optimizer.state.get(p, {}).items():
                if (
                    isinstance(p, GlobalTensor)
                    and isinstance(v, torch.Tensor)
                    and v.shape != p.shape
                    and v.numel() != 1
                ):
                    raise ShapeError(
                        f"load_state_dict of {type(optimizer).__name__}: {key!r} of parameter {j} "
                        f"of group {i} has shape {list(v.shape)}, the parameter "
                        f"{list(p.shape)}: pass the full value, a plain tensor that is the same "
                        f"on every rank or a global tensor; x.to_global(placement, sbp) makes the "
                        f"ranks' local tensors global (here {p._spec!r})"
                    )


_swaps: weakref.WeakKeyDictionary[Optimizer, _Swap] = weakref.WeakKeyDictionary()


#: An optimizer's attribute: the values in its groups at its last step, the number of its
#: parameters, the bytes that represent the numbers among the values, and the hash of the serials
#: of the parameters.
_RECORDED = "_globaltensor_recorded"


# A program's counts of steps are compared at so many first steps, and then at one in so many.
_COUNTS_COMPARED: Final = 16
# The plain numbers in the state of torch's optimizers, which count steps or follow from the count.
_COUNTS: Final = ("step", "eta", "mu", "mu_product", "n_iter", "func_evals")


@dataclass(slots=True)
class _RecordedGroups:
    """The results of `_record` for an optimizer, valid until its groups change."""

    values: list[Any]  # of the groups
    count: int  # of parameters
    tensors: list[torch.Tensor]  # hyperparameters that are tensors
    versions: list[int]  # of these
    code: bytes
    # The placements of the parameters, each with the hash of the serials of those on it.
    parameters: dict[Placement, int]
    # These placements, if their ranks compare the hyperparameters together, else empty.
    together: tuple[Placement, ...] = ()
    # The number of states, if none was empty and all were of global parameters, else -1.
    full_states: int = -1
    steps: int = 0  # how many were recorded, with earlier groups too


def _record(optimizer: Optimizer) -> None:
    """Add a step to the history of what this rank has run.

    Ranks compare the optimizer's class, its hyperparameters, its parameters, how many of them have
    a state, and at intervals the counts of steps in it. Where no rank has all parameters, as in a
    pipeline, the ranks of all placements compare the hyperparameters."""
    this_world, groups = world(), optimizer.param_groups
    if (
        not this_world.compares
        or not groups
        or not groups[0]["params"]
        or not isinstance(groups[0]["params"][0], GlobalTensor)
    ):
        return
    values = group_values(groups)
    known: _RecordedGroups | None = optimizer.__dict__.get(_RECORDED)
    count = sum(len(group["params"]) for group in groups)
    if (
        known is None
        or known.count != count
        or not identical(values, known.values)
        or (known.tensors and [t._version for t in known.tensors] != known.versions)
    ):
        tensors = hyperparameter_tensors(optimizer)
        settings = "; ".join(map(spelled, hyperparameters(optimizer)))
        serials: defaultdict[Placement, list[int]] = defaultdict(list)
        for group in groups:
            for p in group["params"]:
                if isinstance(p, GlobalTensor):
                    serials[p._spec.shown.placement].append(p._serial)
        known = optimizer.__dict__[_RECORDED] = _RecordedGroups(
            values,
            count,
            tensors,
            [t._version for t in tensors],
            digest_of(f"{type(optimizer).__name__}.step with {settings}"),
            {placement: hash(tuple(of)) for placement, of in serials.items()},
            _compared_together(serials),
            steps=0 if known is None else known.steps,
        )
        for places in [*((placement,) for placement in serials), known.together]:
            if places:
                this_world.history(places).learn(f"{type(optimizer).__name__}.step with {settings}")
    with_state = len(optimizer.state)
    if with_state != known.full_states:
        # Reading the state of a parameter makes an empty one.
        full = sum(1 for p, state in optimizer.state.items() if type(p) in ORDINARY and state)
        with_state, known.full_states = full, with_state if full == with_state else -1
    known.steps += 1
    counted = known.steps <= _COUNTS_COMPARED or known.steps % _COUNTS_COMPARED == 0
    several = len(known.parameters) > 1
    for placement, parameters in known.parameters.items():
        history = this_world.history((placement,))
        if history.records and this_world.rank in history.ranks:
            if several:
                with_state = sum(1 for _ in _states_on(optimizer, placement))
            history.record(known.code, with_state, parameters)
            if counted:
                history.record(digest_of(repr(_counts(_states_on(optimizer, placement)))))
    if known.together:
        this_world.history(known.together).record(known.code)


def _compared_together(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Return the placements of an optimizer's parameters, or none if a rank is on all of them.

    Then the optimizer may be one of that rank alone, for the parameters that it has."""
    places = tuple(placements)
    common = frozenset.intersection(*(frozenset(placement.flat) for placement in places))
    return () if common else places


def _states_on(optimizer: Optimizer, placement: Placement) -> Iterator[State]:
    """Yield the states of the parameters on a placement, if not empty."""
    for p, state in optimizer.state.items():
        if state and isinstance(p, GlobalTensor) and p._spec.shown.placement is placement:
            yield state


def _counts(states: Iterable[State]) -> list[float]:
    """Return the counts of steps in the states, as far as this rank can read them at once."""
    found = [state[name] for state in states for name in _COUNTS if name in state]
    tensors = [
        v for v in found if type(v) is torch.Tensor and v.numel() == 1 and v.device.type == "cpu"
    ]
    numbers = [float(v) for v in found if isinstance(v, (int, float))]
    if tensors:
        numbers += torch.cat([t.detach().reshape(1).double() for t in tensors]).tolist()
    return numbers


def _record_loaded(optimizer: Optimizer) -> None:
    """Add the numbers of a loaded state, such as counts of steps, to the history of this rank.

    They are plain values, which must be the same on every rank."""
    for p, state in optimizer.state.items():
        if isinstance(p, GlobalTensor):
            numbers = {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in state.items()
                if type(value) in _NUMBERS or (type(value) is torch.Tensor and value.numel() == 1)
            }
            record(f"loaded state {numbers!r}", p)


_NUMBERS = frozenset((int, float, bool, tuple))


def _enter(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    _record(optimizer)
    if isinstance(optimizer, SparseAdam):
        _refuse_sparse(optimizer)
    if (
        type(optimizer) not in ELEMENTWISE
        or len(args) > 2
        or torch_private.watched_steps(optimizer)
    ):
        return None
    swap = _swaps.get(optimizer)
    if swap is None:
        groups = optimizer.param_groups
        if not all(isinstance(p, GlobalTensor) for g in groups for p in g["params"]) or any(
            g.get("differentiable") for g in groups
        ):
            return None
        swap = _swaps[optimizer] = _Swap()
        optimizer.register_state_dict_pre_hook(_leave_for_reading)
    swap.leave(optimizer)  # if the last step failed half way
    closure = _closure(args, kwargs)
    if closure is None:
        swap.enter(optimizer)
        return None
    # these optimizers do this first in a step, on global parameters
    with torch.enable_grad():
        loss = closure()
    swap.enter(optimizer)
    return args[:1], {"closure": lambda: loss}


def _refuse_sparse(optimizer: SparseAdam) -> None:
    """Raise GlobalTensorError if a parameter is global.

    Its gradient is dense, and does not show which rows were used."""
    if any(
        isinstance(p, GlobalTensor) for group in optimizer.param_groups for p in group["params"]
    ):
        raise GlobalTensorError(
            f"{type(optimizer).__name__} got a global parameter: the gradient of a global tensor "
            f"is dense, even for Embedding(sparse=True). "
            "Use torch.optim.Adam (which also decays the moments of rows that were not used), "
            "SGD or Adagrad (which take the same steps), "
            "or leave the embedding a plain module, and give it plain indices"
        )


def _closure(args: Any, kwargs: Any) -> Any:
    """Return the closure among the arguments of an optimizer's step, or None."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _leave(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    swap = _swaps.get(optimizer)
    if swap is not None:
        swap.leave(optimizer, done=True)
    if _closure(args, kwargs) is not None:
        _record(optimizer)  # the closure may have changed a hyperparameter


def _leave_for_reading(optimizer: Optimizer) -> None:
    # A step that failed half way has not been undone.
    if optimizer in _swaps:
        _swaps[optimizer].leave(optimizer)


def _wrap_zero_grad(zero_grad: Any, parameters: Callable[[Any], Iterable[torch.Tensor]]) -> Any:
    """Wrap ``zero_grad`` so that it clears gradients of global tensors without reading them.

    Torch's loop reads each gradient first, which would reduce pending gradients and wrap them."""

    @functools.wraps(zero_grad)
    def run(self: Any, set_to_none: bool = True) -> None:
        if set_to_none and not torch_private.function_mode_on():
            clear_grads(
                p for p in parameters(self) if isinstance(p, GlobalTensor) and type(p) in ORDINARY
            )
        zero_grad(self, set_to_none)

    return run


def _module_zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
    if not set_to_none or torch_private.function_mode_on() or getattr(self, "_is_replica", False):
        _torch_module_zero_grad(self, set_to_none)
        return
    leaves = []
    for p in self.parameters():
        if isinstance(p, GlobalTensor) and type(p) in ORDINARY:
            leaves.append(p)
        elif p.grad is not None:
            p.grad = None
    clear_grads(leaves)


_torch_module_zero_grad = torch.nn.Module.zero_grad


def install() -> None:
    patch(
        "torch.nn:Module.zero_grad",
        lambda before: functools.wraps(_torch_module_zero_grad)(_module_zero_grad),
    )
    patch(
        "torch.optim:Optimizer.zero_grad",
        lambda before: _wrap_zero_grad(
            before, lambda self: (p for group in self.param_groups for p in group["params"])
        ),
    )
    patch("torch.optim:Optimizer.load_state_dict", _wrap_load_state_dict)
    register_optimizer_step_pre_hook(_enter)
    register_optimizer_step_post_hook(_leave)
