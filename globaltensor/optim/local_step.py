"""torch.optim's elementwise optimizers on global parameters, at the speed of local ones: for the
length of a step they work on the local tensors.

What these optimizers do to an element depends on nothing but that element's own parameter, gradient
and state, so a step on each rank's part is a step on the whole. Others (LBFGS, Adafactor, Muon:
they look at a whole tensor), subclasses, and optimizers whose steps somebody else's hooks look at
go the general way, call by call. A parameter whose parts are summands is stepped as their sum.

Of a parameter with a ``_shard`` (ZeRO, optim/zero.py) a rank steps its share only: what it needs of
the gradient, a state of that size. Afterwards the shares are gathered into the parameter, many at a
time.
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
}  # v0 adds its own
FUSED = frozenset(
    {SGD, Adagrad, Adam, AdamW}
)  # torch has a kernel for the whole step, on the cpu too
_EXACT = frozenset(
    {torch.float32, torch.float64}
)  # of narrower numbers the loop rounds each op's result, the kernel only the last

State = dict[str, Any]

BUCKET_BYTES = 16 << 20  # of parameters that are gathered together
ALONE_BYTES = (
    1 << 20
)  # a parameter of this size, whose shares follow each other in memory, is gathered where it lies


def _alike(a: Spec, b: Spec) -> bool:
    return a.placement is b.placement and a.layout == b.layout


def stepped(p: GlobalTensor) -> Spec:
    """How what a rank steps of a parameter, and the state of it, lie."""
    shard = p._shard
    if shard is not None and shard.shown is p._spec:  # it may have been laid otherwise since
        return shard
    return _summed(p._spec)


def _summed(spec: Spec) -> Spec:
    """What a sum whose parts lie on the ranks is stepped as: no step of a part is that of the
    sum."""
    return (
        spec.replace(layout=[broadcast if e.is_partial else e for e in spec.layout])
        if any(e.is_partial for e in spec.layout)
        else spec
    )


class _Bucket:
    """Parameters whose shares are gathered together, and where all that lies."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.ranks: tuple[int, ...] = ()
        self.numels: list[int] = []  # that each rank gives
        self.own: list[torch.Tensor] = []  # this rank's shares, in the parameters
        self.params: list[int] = []
        self.places: list[
            torch.Tensor
        ] = []  # where each share of each rank goes, in the order in which they come
        self.sizes: list[int] = []


class _Places:
    """Where in some parameters the shares of all ranks lie. Worked out once: it holds as long as
    these are the parameters and their memory."""

    def __init__(self, members: Sequence[tuple[GlobalTensor, StorageSpec]]) -> None:
        self.members = [(p, p._local, shard) for p, shard in members]
        self.alone: list[
            tuple[int, torch.Tensor, torch.Tensor, tuple[int, ...], list[int]]
        ] = []  # parameter, own share, whole, ranks, numels
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
        """Whether they hold for these parameters."""
        if len(members) != len(self.members):
            return False
        return all(
            p is q and p._local is local and shard is other
            for (p, shard), (q, local, other) in zip(members, self.members, strict=True)
        )


class _Shares:
    """What this rank steps of parameters that all have whole, for the length of a step, and how it
    comes back to them."""

    def __init__(self, places: _Places | None = None) -> None:
        self.parts: dict[int, torch.Tensor] = {}  # id of a parameter -> this rank's share
        self.places = places
        self.flats: list[torch.Tensor] = []  # the shares of each bucket, one after the other
        self.sums: list[
            tuple[GlobalTensor, torch.Tensor]
        ] = []  # parameters whose parts are summands, and their sums
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
        """A parameter whose parts are summands is stepped as their sum. Collective."""
        self.parts[id(p)] = box(p._local.detach(), p._spec, spec, why="optimizer step", alias=False)
        self.sums.append((p, self.parts[id(p)]))

    def gather(self) -> None:
        """Every rank's shares, and what each adds to a sum, into the parameters. Collective."""
        with torch.no_grad():
            for p, part in self.sums:
                p._local.copy_(box(part, _summed(p._spec), p._spec, why="optimizer step"))
        if self.places is None:
            return
        with torch.no_grad():
            for number, _, whole, ranks, numels in self.places.alone:
                world().comm(ranks).all_gather_into(
                    self.parts[number], numels, whole
                )  # which has written past autograd
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
    """Whether the shares of a parameter's local tensor are runs of its memory, in order."""
    split = {e.dim for a, e in enumerate(shard.layout) if a in shard.axes}
    return split == {0} and p._local.is_contiguous()


_LIE = operator.attrgetter("_local", "_spec", "_leaf", "_shard")


class _Exchanged:
    """What a step has exchanged. The next one exchanges the same, but for the gradients, if it is
    of the same parameters, which lie alike and have the same state: then it need not look at each
    again."""

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
        #: Which parameters the step left alone: those of other ranks, say.
        self.idle = [
            (p._local.grad if p._leaf is None else p._leaf.value) is None for p in self.params
        ]
        self.fused: list[State] = []  # the groups that step with the fused kernel unasked

    @classmethod
    def of(cls, optimizer: Optimizer, mine_of: Any) -> _Exchanged | None:
        """None where tensors are among the settings, a rank steps a share of a parameter (ZeRO), or
        one has sat out this step with its state."""
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
        """(local tensor, its gradient) of those that do not lie together; None: look at all."""
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
                    return None  # which is still to be summed
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
        """Whether the states of the local tensors hold what they held."""
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
    """What of a group's settings decides on how it steps, besides numbers; None where tensors are
    among them."""
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
    """One optimizer's parameters and state, exchanged for the local tensors for the length of a
    step."""

    def __init__(self) -> None:
        # id of a parameter -> its state; the same with locals in it; the locals as they were when
        # last looked at; how what is stepped lay
        self.twins: dict[int, tuple[State, State, State, Spec]] = {}
        self.before: tuple[list[list[GlobalTensor]], Any, list[tuple[torch.Tensor, Any]]] | None = (
            None
        )
        self.fused: list[State] = []  # the groups that step with the fused kernel this once
        self.shares = _Shares()
        self.places: _Places | None = None  # of the last step's shares
        self.last: _Exchanged | None = (
            None  # what the step before exchanged, where the next may do likewise
        )
        self.known = 0  # how many parameters had a state before this step

    def again(self, optimizer: Optimizer) -> bool:
        """Exchange as at the step before; False, and nothing done, where that does not serve."""
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
        """Exchange; do nothing where a parameter or its gradient is no ordinary one."""
        if self.again(optimizer):
            return
        self.last = None
        lists, rank = [group["params"] for group in optimizer.param_groups], world().rank
        members: list[tuple[GlobalTensor, StorageSpec]] = []
        found: list[tuple[GlobalTensor, Spec, torch.Tensor]] = []
        sums: list[tuple[GlobalTensor, Spec]] = []
        seen: Spec | None = (
            # the last one found ordinary: mostly that of the next parameter too, or of one of its
            # shape
            None
        )
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
                    grad = leaf.value  # as `local_grad` says
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
        # From here on nothing fails.
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
            elif isinstance(
                v, GlobalTensor
            ):  # a count of steps that was loaded from a state made global as a whole
                known[k] = torch.from_numpy(v.numpy()).to(v.device)
        mine = {k: v._local if isinstance(v, GlobalTensor) else v for k, v in known.items()}
        self.twins[id(p)] = (known, mine, dict(mine), spec)
        return mine

    def leave(self, optimizer: Optimizer, done: bool = False) -> None:
        """Undo it; what the step has added to the state becomes global. ``done``: the step has not
        failed, so its shares are what the parameters become."""
        if self.before is None:
            return
        (lists, state, grads), self.before, mine_of = self.before, None, optimizer.state
        optimizer.state = state
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            # torch's fused kernels write past autograd; what was gathered from these values must be
            # known to be old
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
            # Where states have begun in this step the next may do what this one could not: step
            # with the fused kernel.
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
    """Whether a group of local tensors may step with torch's fused kernel: the user has not said
    how it is to step, and the kernel gives what the loop over the parameters, torch's default on
    the cpu, gives. It reads memory as it lies and expects the state of all parameters or of
    none."""
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
    if (
        kind not in _EXACT or torch.get_default_dtype() is torch.float64
    ):  # then the loop counts its steps in float64
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
    if (
        rank not in spec.placement._coordinates
    ):  # nothing of it is here: it steps along, so that its state is known here as it is there
        return p._local.shape == (0,)
    return not any(e.is_partial and e is not partial_sum for e in spec.layout)


def _beside(p: GlobalTensor, spec: Spec, value: torch.Tensor) -> GlobalTensor:
    """Lay out state as what is stepped of its parameter. What was loaded may lie otherwise, or be a
    plain whole value.

    The part is on the device of the parameter's own, also on ranks outside the placement: fused
    kernels take the empty parts with the rest."""
    if isinstance(value, GlobalTensor) and value._spec is spec.replace(dtype=value._spec.dtype):
        return value
    part = torch.empty(spec.local_shape(world().rank), dtype=value.dtype, device=p._local.device)
    out = GlobalTensor.wrap(part, spec.replace(dtype=value.dtype))
    with torch.no_grad():
        out.copy_(value)
    return out


def relay(optimizer: Optimizer) -> None:
    """What an optimizer steps of its parameters has changed: lay its state likewise. Collective."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if known := optimizer.state.get(p):
                _relay_state(p, known)
    if optimizer in _swaps:
        _swaps[optimizer].twins.clear()
        _swaps[optimizer].places = _swaps[optimizer].last = None


def _relay_state(p: torch.Tensor, known: State) -> None:
    """Lay out the state of one parameter. A loaded state may share its tensors with another
    optimizer: one that no longer shares moments must not share counts of steps either."""
    laid = {k: _laid(p, v, k) for k, v in known.items()}
    moved = any(laid[k] is not v for k, v in known.items())
    for k, v in laid.items():
        known[k] = v.clone() if moved and v is known[k] and isinstance(v, torch.Tensor) else v


def _laid(p: torch.Tensor, value: Any, key: Any) -> Any:
    """Lay out a value of a parameter's state: each tensor of the parameter's shape as what is
    stepped of it. Counts of steps stay as they are."""
    if type(value) is dict:
        return {k: _laid(p, v, k) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_laid(p, v, key) for v in value)
    if isinstance(value, torch.Tensor) and key != "step" and value.shape == p.shape:
        if isinstance(p, GlobalTensor):
            return _beside(p, stepped(p), value)
        if isinstance(value, GlobalTensor):  # of a parameter that is on each rank
            everyone = Placement(value.placement.type, list(range(world().size)))
            return (
                value.detach().to_global(placement=everyone, sbp=broadcast).to_local().to(p.device)
            )  # type: ignore[attr-defined]
    return value


def _taking(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        """As torch's. State of a parameter's shape, which may come whole, then lies as the
        parameter does. Collective where it has to move.

        Raises ShapeError, and leaves the optimizer as it was, where the state of an elementwise
        optimizer has not its parameter's shape."""
        if self in _swaps:
            _swaps[self].leave(self)  # of a step that failed half way
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
    """Raises ShapeError, before anything moves. State of one element (a count, a product of rates)
    may have any number of dims."""
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


#: Of an optimizer: the values in its groups when it stepped last, and the bytes that stand for the
#: numbers among them.
_RECORDED = "_globaltensor_recorded"


def _record(optimizer: Optimizer) -> None:
    """Add a step to what this rank has run on its parameters: ranks compare the optimizer and the
    numbers among its settings."""
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
    swap.leave(optimizer)  # where the step before failed half way
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        swap.enter(optimizer)
        return None
    with (
        torch.enable_grad()
    ):  # the first thing that these optimizers do in a step, on global parameters
        loss = closure()
    swap.enter(optimizer)
    return args[:1], {"closure": lambda: loss}


def _refuse_sparse(optimizer: SparseAdam) -> None:
    """Raise GlobalTensorError where a parameter is global: its gradient is dense, and does not tell
    which rows were asked for."""
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
    # A step that failed half way has not been left.
    if optimizer in _swaps:
        _swaps[optimizer].leave(optimizer)


def _forgetting(zero_grad: Any, parameters: Callable[[Any], Iterable[torch.Tensor]]) -> Any:
    """Let gradients of global tensors go without a look at them: torch's loop reads each one first,
    which would sum what is pending and wrap it."""

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
