"""``measure_ops``: time the forward and backward passes of real ops on every rank at once.

`flow.auto.calibrate` and users call it. Ranks that share cores or memory slow each other down, as
in a training step.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...cluster import Cluster
from ...errors import ClusterError
from .clock import Case, Clock

__all__ = ["measure_ops"]

#: Makes a function, its arguments, and optionally the tensors among them that are parameters.
Make = Callable[
    [],
    tuple[Callable[..., Any], Sequence[Any]]
    | tuple[Callable[..., Any], Sequence[Any], Sequence[Tensor]],
]
_CACHES = 1 << 26  # bytes; touching this many evicts everything else from the caches
_TURNS = 16


def measure_ops(
    cluster: Cluster, ops: Iterable[tuple[str, Make, bool]], seconds: float = 30.0, between: int = 0
) -> Cluster:
    """Return ``cluster`` with the times of these ops added, the same on every rank.

    All ranks must call it with the same ops in the same order. It takes about ``seconds`` in total,
    but at least three rounds of every op.

    Each op is (key, make, needs_grad). ``make()`` returns a function and its arguments, ordinary
    tensors on the rank's device; a third item lists the tensors that are parameters. With
    needs_grad the forward runs with autograd. Then the gradients of all leaves among the arguments
    that require grad are timed as backward. Without needs_grad backward is 0. Ops take turns, so
    the arguments of all exist at once: pass as many ops in a call as fit into memory.

    ``between`` is the number of bytes that the rest of a step touches from one use of a parameter
    to the next. Parameters then come from a different place in a buffer of that size (64 MiB at
    most) each time. So they are as cold as in a step. 0: parameters stay in place, in warm caches.

    Raises ClusterError, on every rank, where keys or needs_grad differ between ranks.
    """
    ops = list(ops)
    clock = Clock(_device_of(cluster))
    _check_same(clock, [(key, bool(needs_grad)) for key, _, needs_grad in ops])
    cases: list[Case] = []
    keys: list[tuple[str, bool]] = []
    arena = _ColdMemory(between, clock.device) if between else None
    for key, make, needs_grad in ops:
        function, args, *held = make()
        op = _Op(function, args, needs_grad, held[0] if held else (), arena)
        cases.append(Case((key, "forward"), 0, op.forward))
        keys.append((key, False))
        if needs_grad:
            cases.append(Case((key, "backward"), 0, op.backward, op.prepare))
            keys.append((key, True))
    times = clock.time(cases, seconds)
    found: dict[str, tuple[float, float]] = {}
    for i, (key, is_backward) in enumerate(keys):
        found[key] = (found[key][0], times[i]) if is_backward else (times[i], 0.0)
    return cluster.with_ops(found)


def _check_same(clock: Clock, own_ops: list[tuple[str, bool]]) -> None:
    """Raise ClusterError, before any timing, if ranks have different ops.

    Ranks that time different ops would wait for each other forever.
    """
    first, *others = clock.everyone.all_gather_object(own_ops, "a measurement of ops")
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            at = next(
                (i for i, (a, b) in enumerate(zip(first, theirs, strict=False)) if a != b),
                min(len(first), len(theirs)),
            )
            a, b = (
                f"{ops[at][0]!r} with needs_grad={ops[at][1]}" if at < len(ops) else "none"
                for ops in (first, theirs)
            )
            raise ClusterError(
                f"measure_ops: all ranks must measure the same ops in the same order; number {at} "
                f"is {a} on rank 0, {b} on rank {rank}"
            )


def _device_of(cluster: Cluster) -> torch.device:
    from ...distributed.world import world

    return world().device(cluster.device)


def _tensors(value: object) -> list[Tensor]:
    """List all tensors in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for each in value for t in _tensors(each)] if isinstance(value, list | tuple) else []


class _ColdMemory:
    """A buffer of random numbers from which ops take their parameters, each turn at another place.

    The ops find their parameters cold, as in a step that touches as many bytes from one use of a
    parameter to the next.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = min(nbytes, _CACHES), device
        self._of: dict[torch.dtype, Tensor] = {}

    def turns(self, held: Sequence[Tensor]) -> int:
        """Return the number of places with room for all of these tensors."""
        each = sum(t.nbytes for t in held)
        return max(1, min(_TURNS, self.nbytes // each)) if each else 1

    def param_at(self, turn: int, t: Tensor) -> Tensor:
        """Return a parameter like ``t`` from the place of this turn."""
        if not t.dtype.is_floating_point or t.nbytes * 2 > self.nbytes:
            return t
        if t.dtype not in self._of:
            self._of[t.dtype] = torch.randn(
                self.nbytes // t.dtype.itemsize, generator=torch.Generator().manual_seed(0)
            ).to(self.device, t.dtype)
        numbers = self._of[t.dtype]
        first = turn * (numbers.numel() // _TURNS) % (numbers.numel() - t.numel())
        return (
            numbers[first : first + t.numel()]
            .view(t.shape)
            .detach()
            .requires_grad_(t.requires_grad)
        )


class _Op:
    """An op with its arguments: one set of them for each turn of its parameters ``held``.

    The backward of a forward runs after as many other forwards as there are sets.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        needs_grad: bool,
        held: Sequence[Tensor] = (),
        arena: _ColdMemory | None = None,
    ) -> None:
        self.function, self.needs_grad = function, needs_grad
        known = set(map(id, held))
        turns = 1 if arena is None else arena.turns(held)
        self.sets = (
            [tuple(args)]
            if arena is None
            else [
                _map_tensors(tuple(args), functools.partial(_param_at_turn, arena, k, known))
                for k in range(turns)
            ]
        )
        self.leaves = [[t for t in _tensors(list(own)) if t.requires_grad] for own in self.sets]
        self.turn = 0
        self.waiting: deque[tuple[int, list[Tensor], list[Tensor]]] = deque()

    def forward(self) -> object:
        self.turn = (self.turn + 1) % len(self.sets)
        with torch.set_grad_enabled(self.needs_grad):
            return self.function(*self.sets[self.turn])

    def prepare(self) -> None:
        """Run the forwards before the next backward, and make a gradient for each result."""
        while len(self.waiting) < len(self.sets):
            outs = [t for t in _tensors(self.forward()) if t.requires_grad]
            self.waiting.append((self.turn, outs, [torch.ones_like(t) for t in outs]))

    def backward(self) -> None:
        turn, outs, seeds = self.waiting.popleft()
        if outs and self.leaves[turn]:
            torch.autograd.grad(outs, self.leaves[turn], seeds, allow_unused=True)


def _param_at_turn(arena: _ColdMemory, turn: int, known: set[int], t: Tensor) -> Tensor:
    return arena.param_at(turn, t) if id(t) in known else t


def _map_tensors(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """Copy lists, tuples and dicts with other tensors."""
    if isinstance(value, Tensor):
        return new(value)
    if type(value) in (list, tuple):
        return type(value)([_map_tensors(v, new) for v in value])
    return {k: _map_tensors(v, new) for k, v in value.items()} if type(value) is dict else value
