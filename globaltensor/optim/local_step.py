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
import math
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

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
from .._tensor.global_tensor import GlobalTensor
from .._tensor.grad import local_grad, set_grad
from ..boxing import box
from ..distributed.world import world
from ..errors import GlobalTensorError, ShapeError
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast, partial_sum
from ..sharding.spec import Spec, StorageSpec

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

State = dict[str, Any]

BUCKET_BYTES = 16 << 20  # size limit of parameters that are gathered together
# a parameter of this size, whose shards are consecutive in memory, is gathered in place
ALONE_BYTES = 1 << 20


def _alike(a: Spec, b: Spec) -> bool:
    return a.placement is b.placement and a.layout == b.layout


def stepped(p: GlobalTensor) -> Spec:
    """Return the layout of the tensor that a rank steps for a parameter, and of its state."""
    shard = p._shard
    if shard is not None and shard.shown is p._spec:  # its layout may have changed since
        return shard
    return _summed(p._spec)


def _summed(spec: Spec) -> Spec:
    """Return the spec with partial entries replaced by broadcast.

    A step of a summand is not a step of the sum, so the sum is stepped."""
    return (
        spec.replace(layout=[broadcast if e.is_partial else e for e in spec.layout])
        if any(e.is_partial for e in spec.layout)
        else spec
    )


class _Bucket:
    """A group of parameters whose shards are gathered together, and the shards' positions."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.ranks: tuple[int, ...] = ()
        self.numels: list[int] = []  # elements that each rank contributes
        self.own: list[torch.Tensor] = []  # views of this rank's shards in the parameters
        self.params: list[int] = []
        # views of the destination of each rank's shards, in the order of arrival
        self.places: list[torch.Tensor] = []
        self.sizes: list[int] = []


class _Places:
    """The positions of all ranks' shards in some parameters.

    They are computed once, and remain valid as long as the parameters and their memory are the
    same."""

    def __init__(self, members: Sequence[tuple[GlobalTensor, StorageSpec]]) -> None:
        self.members = [(p, p._local, shard) for p, shard in members]
        # (parameter id, own shard, full tensor, ranks, element counts)
        self.alone: list[tuple[int, torch.Tensor, torch.Tensor, tuple[int, ...], list[int]]] = []
        of_ways: dict[Hashable, list[tuple[_Bucket, list[tuple[GlobalTensor, StorageSpec]]]]] = {}
        rank = world().rank
        for p, shard in members:
            local = p._local
            if local.nbytes >= ALONE_BYTES and _in_a_row(p, shard):
                whole, ranks = local.detach(), shard.ranks(rank)
                self.alone.append(
                    (
                        id(p),
                        whole[shard.share(rank, rank)],
                        whole.view(-1),
                        ranks,
                        [math.prod(shard.local_shape(r)) for r in ranks],
                    )
                )
                continue
            of_way = of_ways.setdefault(
                (shard.placement, shard.axes, local.dtype, local.device), []
            )
            if not of_way or of_way[-1][0].nbytes + local.nbytes > BUCKET_BYTES:
                of_way.append((_Bucket(), []))
            of_way[-1][0].nbytes += local.nbytes
            of_way[-1][1].append((p, shard))
        self.buckets = [bucket for of_way in of_ways.values() for bucket, _ in of_way]
        for bucket, those in (entry for of_way in of_ways.values() for entry in of_way):
            bucket.ranks, bucket.params = those[0][1].ranks(rank), [id(p) for p, _ in those]
            for r in bucket.ranks:
                places = [p._local.detach()[shard.share(rank, r)] for p, shard in those]
                bucket.places += places
                bucket.sizes += [t.numel() for t in places]
                bucket.numels.append(sum(t.numel() for t in places))
                if r == rank:
                    bucket.own = places

    def serve(self, members: Sequence[tuple[GlobalTensor, StorageSpec]]) -> bool:
        """Return True if the positions are valid for these parameters."""
        if len(members) != len(self.members):
            return False
        return all(
            p is q and p._local is local and shard is other
            for (p, shard), (q, local, other) in zip(members, self.members, strict=True)
        )


class _Shares:
    """The shards of replicated parameters that this rank steps, for the length of a step.

    `gather` writes them back to the parameters."""

    def __init__(self, places: _Places | None = None) -> None:
        self.parts: dict[int, torch.Tensor] = {}  # id of a parameter -> this rank's shard
        self.places = places
        self.flats: list[torch.Tensor] = []  # the shards of each bucket, one after the other
        # partial parameters, and their sums
        self.sums: list[tuple[GlobalTensor, torch.Tensor]] = []
        if places is None:
            return
        self.parts.update({number: own for number, own, *_ in places.alone})
        for bucket in places.buckets:
            flat = torch.cat([own.reshape(-1) for own in bucket.own])
            self.flats.append(flat)
            for number, own, part in zip(
                bucket.params,
                bucket.own,
                flat.split_with_sizes([t.numel() for t in bucket.own]),
                strict=True,
            ):
                self.parts[number] = part.view(own.shape)

    def add(self, p: GlobalTensor, spec: Spec) -> None:
        """Add a partial parameter, which is stepped as its sum. Collective."""
        self.parts[id(p)] = box(p._local.detach(), p._spec, spec, why="optimizer step", alias=False)
        self.sums.append((p, self.parts[id(p)]))

    def gather(self) -> None:
        """Gather every rank's shards, and box the sums, into the parameters. Collective."""
        with torch.no_grad():
            for p, part in self.sums:
                p._local.copy_(box(part, _summed(p._spec), p._spec, why="optimizer step"))
        if self.places is None:
            return
        with torch.no_grad():
            for number, _, whole, ranks, numels in self.places.alone:
                # this writes past autograd
                world().comm(ranks).all_gather_into(self.parts[number], numels, whole)
                torch.autograd.graph.increment_version(whole)
            self.parts.clear()
            for bucket in self.places.buckets:
                flat = self.flats.pop(0)
                came = torch.empty(sum(bucket.numels), dtype=flat.dtype, device=flat.device)
                world().comm(bucket.ranks).all_gather_into(flat, bucket.numels, came)
                shares = came.split_with_sizes(bucket.sizes)
                torch_private.copy_all(
                    bucket.places,
                    [
                        share.view(place.shape)
                        for share, place in zip(shares, bucket.places, strict=True)
                    ],
                )


def _in_a_row(p: GlobalTensor, shard: StorageSpec) -> bool:
    """Return True if the shards of a parameter's local tensor are consecutive in its memory."""
    split = {e.dim for a, e in enumerate(shard.layout) if a in shard.axes}
    return split == {0} and p._local.is_contiguous()


_LIE = operator.attrgetter("_local", "_spec", "_leaf", "_shard")


class _Exchanged:
    """A record of what a step has exchanged.

    The next step exchanges the same, except for the gradients, if parameters, layouts and states
    are the same. Then it need not examine each of them again."""

    def __init__(
        self, groups: Sequence[State], held: Any, mine_of: defaultdict[torch.Tensor, State]
    ) -> None:
        self.groups = list(groups)
        self.params: list[GlobalTensor] = [p for group in groups for p in group["params"]]
        self.lie = list(itertools.chain.from_iterable(map(_LIE, self.params)))
        self.locals = [[p._local for p in group["params"]] for group in groups]
        self.held = list(map(held.get, self.params))
        self.state, self.mine = mine_of, list(mine_of.values())
        self.lengths, self.values = (
            list(map(len, self.mine)),
            list(itertools.chain.from_iterable(map(dict.values, self.mine))),
        )
        self.settings, self.given = list(map(_settings, groups)), _values(groups)
        #: Parameters that the step skipped, for example those of other ranks.
        self.idle = [
            (p._local.grad if p._leaf is None else p._leaf.value) is None for p in self.params
        ]
        self.fused: list[State] = []  # the groups that use the fused kernel without a request

    @classmethod
    def of(cls, optimizer: Optimizer, mine_of: Any) -> _Exchanged | None:
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
        given = _values(groups)
        if not _identical(given, self.given):
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
        if not all(map(operator.is_, itertools.chain.from_iterable(map(_LIE, params)), self.lie)):
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
                seen[1]._local is not grad or not _alike(seen[1]._spec, p._spec)
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


def _values(groups: Sequence[State]) -> list[Any]:
    return [v for group in groups for v in group.values()]


def _identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
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


class _Swap:
    """A replacement of one optimizer's parameters and state by the local tensors, during a step."""

    def __init__(self) -> None:
        # id of a parameter -> (its state, the same with local tensors, a copy of the latter when
        # last examined, the layout of the stepped tensor)
        self.twins: dict[int, tuple[State, State, State, Spec]] = {}
        self.before: tuple[list[list[GlobalTensor]], Any, list[tuple[torch.Tensor, Any]]] | None = (
            None
        )
        self.fused: list[State] = []  # the groups that use the fused kernel for this step only
        self.shares = _Shares()
        self.places: _Places | None = None  # positions of the last step's shards
        # the record of the last step, if the next one may exchange the same
        self.last: _Exchanged | None = None
        self.known = 0  # number of parameters with a state before this step

    def again(self, optimizer: Optimizer) -> bool:
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
        if self.again(optimizer):
            return
        self.last = None
        lists, rank = [group["params"] for group in optimizer.param_groups], world().rank
        members: list[tuple[GlobalTensor, StorageSpec]] = []
        found: list[tuple[GlobalTensor, Spec, torch.Tensor]] = []
        sums: list[tuple[GlobalTensor, Spec]] = []
        # The last spec found ordinary. The next parameter mostly has the same one.
        seen: Spec | None = None
        for params in lists:
            for p in params:
                if not isinstance(p, GlobalTensor):
                    return
                spec = p._spec
                if spec is not seen:
                    if not _ordinary(p, rank):
                        return
                    seen = (
                        spec
                        if rank in spec.placement._coordinates and _summed(spec) is spec
                        else None
                    )
                leaf = p._leaf
                if leaf is not None and leaf.local.grad is None and "_kept_grad" not in p.__dict__:
                    grad = leaf.value  # as `local_grad` returns it
                else:
                    alike, grad = local_grad(p)
                    if not alike:
                        return
                if grad is not None:
                    if (
                        p._shard is not None
                        and (spec := stepped(p)) is not p._spec
                        and rank in spec.placement._coordinates
                    ):
                        members.append((p, spec))  # type: ignore[arg-type]
                        if p._grad_shard is None:
                            grad = grad[spec.share(rank, rank)].contiguous()  # type: ignore[attr-defined]
                    if (
                        spec is not seen
                        and (whole := _summed(p._spec)) is not p._spec
                        and rank in spec.placement._coordinates
                    ):
                        grad = box(
                            grad,
                            spec.replace(dtype=grad.dtype),
                            whole.replace(dtype=grad.dtype),
                            why="optimizer step",
                        )
                        sums.append((p, spec := whole))
                    found.append((p, spec, grad))
        if members and (self.places is None or not self.places.serve(members)):
            self.places = _Places(members)
        shares = _Shares(self.places if members else None)
        for p, spec in sums:
            shares.add(p, spec)
        state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        known_of, parts = optimizer.state, shares.parts
        for p, spec, grad in found:
            part = parts.get(id(p), p._local) if parts else p._local
            held = part.grad
            if held is not grad:
                grads.append((part, grad))
                before.append((part, held))
            if known := known_of.get(p):
                state[part] = self._localised(p, spec, known)
        # From here on nothing can fail.
        self.shares, self.known = shares, len(state)
        self.before = lists, optimizer.state, before
        for part, grad in grads:
            part.grad = grad
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = [shares.parts.get(id(p), p._local) for p in params]
            if type(optimizer) in FUSED and _fusable(group, state):
                group["fused"] = True
                self.fused.append(group)
        optimizer.state = state

    def _localised(self, p: GlobalTensor, spec: Spec, known: State) -> State:
        twin = self.twins.get(id(p))
        if twin is not None and twin[0] is known and len(known) == len(twin[1]) and twin[3] is spec:
            return twin[1]
        for k, v in known.items():
            if isinstance(v, torch.Tensor) and k != "step" and v.shape == p.shape:
                known[k] = _beside(p, spec, v)
            # a step count that was loaded from a state made global as a whole
            elif isinstance(v, GlobalTensor):
                known[k] = torch.from_numpy(v.numpy()).to(v.device)
        mine = {k: v._local if isinstance(v, GlobalTensor) else v for k, v in known.items()}
        self.twins[id(p)] = (known, mine, dict(mine), spec)
        return mine

    def leave(self, optimizer: Optimizer, done: bool = False) -> None:
        """Undo the exchange, and make new state global. ``done``: the step has not failed.

        Only then the stepped shards are written to the parameters."""
        if self.before is None:
            return
        (lists, state, grads), self.before, mine_of = self.before, None, optimizer.state
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
                if mine := mine_of.get(part):
                    twin = twins.get(id(p))
                    if (
                        twin is None
                        or twin[1] is not mine
                        or list(map(id, mine.values())) != list(map(id, twin[2].values()))
                    ):
                        self._globalised(p, part, mine, state)
        for part, grad in grads:
            part.grad = grad
        if not known:
            # If states were created in this step, the next step may use the fused kernel where this
            # one could not.
            same = len(mine_of) == self.known or len(fused) == len(lists)
            self.last = (
                _Exchanged.of(optimizer, mine_of) if done and self.places is None and same else None
            )
            if self.last is not None:
                self.last.fused = fused
        shares, self.shares = self.shares, _Shares()
        if done:
            shares.gather()

    def _globalised(self, p: GlobalTensor, part: torch.Tensor, mine: State, state: Any) -> None:
        twin = self.twins.get(id(p))
        if twin is None or twin[1] is not mine:
            twin = self.twins[id(p)] = (state[p], mine, {}, stepped(p))
        known, _, seen, _ = twin
        for k, v in mine.items():
            if k not in seen or seen[k] is not v:
                seen[k] = v
                like = isinstance(v, torch.Tensor) and k != "step" and v.shape == part.shape
                known[k] = GlobalTensor.wrap(v, stepped(p).replace(dtype=v.dtype)) if like else v


def _fusable(group: State, state: Any) -> bool:
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


def _beside(p: GlobalTensor, spec: Spec, value: torch.Tensor) -> GlobalTensor:
    """Box a value of the state to the layout of the stepped tensor.

    A loaded value may have another layout, or be a plain full value. The local tensor is on the
    device of the parameter's local tensor, also on ranks outside the placement: fused kernels
    accept the empty tensors with the rest."""
    if isinstance(value, GlobalTensor) and value._spec is spec.replace(dtype=value._spec.dtype):
        return value
    part = torch.empty(spec.local_shape(world().rank), dtype=value.dtype, device=p._local.device)
    out = GlobalTensor.wrap(part, spec.replace(dtype=value.dtype))
    with torch.no_grad():
        out.copy_(value)
    return out


def relay(optimizer: Optimizer) -> None:
    """Box the optimizer's state to the layouts of the stepped tensors, which have changed.

    Collective."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if known := optimizer.state.get(p):
                _relay_state(p, known)
    if optimizer in _swaps:
        _swaps[optimizer].twins.clear()
        _swaps[optimizer].places = _swaps[optimizer].last = None


def _relay_state(p: torch.Tensor, known: State) -> None:
    """Box the state of one parameter.

    A loaded state may share its tensors with another optimizer. If boxing separates the moments,
    the counts of steps must be separated too."""
    laid = {k: _laid(p, v, k) for k, v in known.items()}
    moved = any(laid[k] is not v for k, v in known.items())
    for k, v in laid.items():
        known[k] = v.clone() if moved and v is known[k] and isinstance(v, torch.Tensor) else v


def _laid(p: torch.Tensor, value: Any, key: Any) -> Any:
    """Box a value of a parameter's state: each tensor of the parameter's shape.

    The result has the layout of the stepped tensor. Counts of steps remain the same."""
    if type(value) is dict:
        return {k: _laid(p, v, k) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_laid(p, v, key) for v in value)
    if isinstance(value, torch.Tensor) and key != "step" and value.shape == p.shape:
        if isinstance(p, GlobalTensor):
            return _beside(p, stepped(p), value)
        if isinstance(value, GlobalTensor):  # the state of a parameter that is plain on each rank
            everyone = Placement(value.placement.type, list(range(world().size)))
            return (
                value.detach().to_global(placement=everyone, sbp=broadcast).to_local().to(p.device)
            )  # type: ignore[attr-defined]
    return value


def _taking(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Load a state as torch does, and box it to the layouts of the parameters.

        State of a parameter's shape may be a full value. The call is collective if state needs
        boxing.

        Raises ShapeError, and leaves the optimizer as it was, if a state of an elementwise
        optimizer does not have its parameter's shape."""
        if self in _swaps:
            _swaps[self].leave(self)  # undo a step that failed half way
        before = self.state, self.param_groups
        load(self, *args, **kwargs)
        try:
            _check_shapes(self)
            relay(self)
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
                        f"{list(p.shape)}: give the whole value, a plain tensor that is the same "
                        f"on every rank or a global one; a rank's own part becomes one "
                        f"by x.to_global(placement, sbp) (here {p._spec!r})"
                    )


_swaps: weakref.WeakKeyDictionary[Optimizer, _Swap] = weakref.WeakKeyDictionary()


#: An optimizer's attribute: the values in its groups at its last step, and the bytes that represent
#: the numbers among them.
_RECORDED = "_globaltensor_recorded"


def _record(optimizer: Optimizer) -> None:
    """Add a step to the history of what this rank has run.

    Ranks compare the optimizer and the numbers among its settings."""
    here, groups = world(), optimizer.param_groups
    if (
        not here.compares
        or not groups
        or not groups[0]["params"]
        or not isinstance(first := groups[0]["params"][0], GlobalTensor)
    ):
        return
    values, known = _values(groups), optimizer.__dict__.get(_RECORDED)
    if known is None or not _identical(values, known[0]):
        numbers = [v for v in values if type(v) in _NUMBERS]
        known = optimizer.__dict__[_RECORDED] = (
            values,
            f"{type(optimizer).__name__} {numbers!r}".encode(),
        )
    here.history((first._spec.shown.placement,)).record(known[1])


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
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
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
            f"is dense, also of Embedding(sparse=True). "
            "Use torch.optim.Adam (whose moments of rows that nobody has asked for decay as "
            "well), SGD or Adagrad (which take the same steps), "
            "or leave the embedding a plain module"
        )


def _leave(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    swap = _swaps.get(optimizer)
    if swap is not None:
        swap.leave(optimizer, done=True)


def _leave_for_reading(optimizer: Optimizer) -> None:
    # A step that failed half way has not been undone.
    if optimizer in _swaps:
        _swaps[optimizer].leave(optimizer)


def _forgetting(zero_grad: Any, parameters: Callable[[Any], Iterable[torch.Tensor]]) -> Any:
    """Wrap ``zero_grad`` so that it clears gradients of global tensors without reading them.

    Torch's loop reads each gradient first, which would reduce pending gradients and wrap them."""

    @functools.wraps(zero_grad)
    def run(self: Any, set_to_none: bool = True) -> None:
        if set_to_none and not torch_private.function_mode_on():
            for p in parameters(self):
                if isinstance(p, GlobalTensor):
                    set_grad(p, None)
        zero_grad(self, set_to_none)

    return run


def _module_zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
    if not set_to_none or torch_private.function_mode_on() or getattr(self, "_is_replica", False):
        _torch_module_zero_grad(self, set_to_none)
        return
    for p in self.parameters():
        if isinstance(p, GlobalTensor):
            set_grad(p, None)
        elif p.grad is not None:
            p.grad = None


_torch_module_zero_grad = torch.nn.Module.zero_grad


def install() -> None:
    torch.nn.Module.zero_grad = functools.wraps(_torch_module_zero_grad)(_module_zero_grad)  # type: ignore[method-assign]
    Optimizer.zero_grad = _forgetting(
        Optimizer.zero_grad,
        lambda self: (p for group in self.param_groups for p in group["params"]),
    )  # type: ignore[method-assign]
    Optimizer.load_state_dict = _taking(Optimizer.load_state_dict)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_enter)
    register_optimizer_step_post_hook(_leave)
