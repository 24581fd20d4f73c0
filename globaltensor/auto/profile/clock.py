"""Timing on all ranks at once; the measurements in this folder call it.

Rounds go over all cases in turn, and all ranks begin each case together. A case takes as long as
its slowest rank in each round; the result is the median over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..._tensor.gradients.flat_buffers import keep_freed_memory
from ...distributed.communicator import Communicator
from ...distributed.world import world
from ...distributed.world_base import World

__all__ = ["Case", "Clock"]

_BLOCK_SECONDS = 2e-3  # calls are repeated for at least this time before the clock is read
_QUICK_SECONDS = 5e-3
_MAX_CALLS = 200
_MAX_ROUNDS = 50
_MIN_ROUNDS = 3


@dataclass
class Case:
    """A case to time.

    ``call`` is timed; it is None on ranks that the case does not need. ``size`` orders the cases of
    one ``name``: where one takes too long, larger ones are left out. ``prepare`` runs before each
    call, untimed.
    """

    name: object
    size: float
    call: Callable[[], object] | None
    prepare: Callable[[], object] | None = None
    count: int = 1  # operations in a call; the result is the time of one
    calls: int = 1  # calls in a block, chosen by the clock


class Clock:
    """The clock of one rank.

    Every rank must ask for the same cases in the same order. ``hurried``: one round is enough.
    """

    def __init__(self, device: torch.device, hurried: bool = False) -> None:
        keep_freed_memory()  # as a training step does
        self.device, self.hurried = device, hurried
        self.world: World = world()
        self.everyone: Communicator = self.world.comm(tuple(range(self.world.size)))

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the elementwise maximum over the ranks."""
        return [
            max(each)
            for each in zip(
                *self.everyone.all_gather_object(list(seconds), "a measurement of this machine"),
                strict=True,
            )
        ]

    def time(
        self, cases: Sequence[Case], seconds: float, longest: float | None = None
    ) -> dict[int, float]:
        """Return median seconds of a call by the case's number, in about ``seconds`` in total.

        With ``longest``, cases whose call takes longer are left out, and larger ones of the same
        name. Then the slowest cases for which there is no time are left out, but never the first
        one of a name. Without ``longest`` nothing is left out. Each remaining case is timed three
        times at least.
        """
        began = self.world_time()
        took = self._pilot(cases, longest)
        left = max(seconds - (self.world_time() - began), seconds / 4)
        timed_cases = (
            sorted(took) if longest is None else self._affordable(cases, took, left / _MIN_ROUNDS)
        )
        blocks: dict[int, list[float]] = {i: [] for i in timed_cases}
        quick = [i for i in timed_cases if took[i] <= _QUICK_SECONDS]
        rounds = 0
        while rounds < _MAX_ROUNDS:
            # quick cases are repeated: they cost little and vary most
            for each in (
                timed_cases,
                quick,
                [] if self.hurried else quick,
            ):
                for i in each:
                    blocks[i].append(self._block(cases[i]))
            rounds += 1
            if (
                rounds >= (1 if self.hurried else _MIN_ROUNDS)
                and (self.world_time() - began) * (1 + 1 / rounds) > seconds
            ):
                break
        on_ranks = self.everyone.all_gather_object(blocks, "a measurement of this machine")
        return {
            i: statistics.median(
                max(each) for each in zip(*(ranks[i] for ranks in on_ranks), strict=True)
            )
            for i in timed_cases
        }

    def _affordable(
        self, cases: Sequence[Case], took: dict[int, float], seconds: float
    ) -> list[int]:
        """Select the cases that fit into a round of ``seconds``."""
        first = {}
        for i in sorted(took, reverse=True):
            first[cases[i].name] = i
        kept, cost = sorted(took), {i: t * cases[i].calls * cases[i].count for i, t in took.items()}
        for i in sorted(kept, key=lambda i: (-cost[i], i)):
            if sum(cost[k] for k in kept) > seconds and i not in first.values():
                kept.remove(i)
        return kept

    def world_time(self) -> float:
        """Return the time of rank 0's clock, so that all ranks decide alike."""
        now: float = self.everyone.all_gather_object(
            time.perf_counter(), "a measurement of this machine"
        )[0]
        return now

    def _pilot(self, cases: Sequence[Case], longest: float | None) -> dict[int, float]:
        """Warm up all cases and choose how often a block calls each.

        Return seconds of a call for the cases that are fast enough.
        """
        seconds_of_case: dict[int, float] = {}
        late: set[object] = set()
        begun: set[object] = set()
        for i, case in enumerate(cases):
            if case.name in late:
                continue
            took = self.slowest([self._block(case)])[0]
            if longest is None or took <= 4 * longest:  # the first call of all may take longer
                took = self.slowest([self._block(case)])[0]
            if longest is not None and took > longest:
                late.add(case.name)
                if case.name in begun:
                    continue
            begun.add(case.name)
            case.calls = (
                1
                if case.prepare
                else max(1, min(_MAX_CALLS, int(_BLOCK_SECONDS / max(took, 1e-9))))
            )
            seconds_of_case[i] = took
        return seconds_of_case

    def _block(self, case: Case) -> float:
        """Time a block of calls on this rank. Return seconds of one call."""
        if case.prepare is not None:
            case.prepare()
        self.everyone.barrier()
        if case.call is None:
            return 0.0
        self._synchronize()
        began = time.perf_counter()
        for _ in range(case.calls):
            case.call()
        self._synchronize()
        return (time.perf_counter() - began) / (case.calls * case.count)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
