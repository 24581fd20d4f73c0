"""A world for capture: ranks, placements and shapes are real, but no tensor is sent.

`capture` runs build() in it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from ..._base import torch_private
from ..._base.user_code import user_line
from ...distributed.communicator import Communicator
from ...distributed.divergence import OBJECTS, Report, describe
from ...distributed.world_base import World
from ...errors import DivergenceError, GraphError
from .replicated_uses import NotedUse

__all__ = ["GRAPH", "INSIDE", "DryComm", "DryWorld", "Left", "Untraceable"]

#: The mark that a rank inside build() puts before the objects that it sends to others.
INSIDE: Final = "in build()"
#: The purpose of every exchange of objects while a graph is built. A rank that fails, or that has
#: left build(), sends its report to ranks that exchange something else, so all have one purpose.
GRAPH: Final = "building a graph"


class Untraceable(Exception):
    """A sign that a step communicates or needs a value, and must be recorded as one call."""


class DryComm(Communicator):
    """A communicator that sends nothing: received tensors have the right shapes and no values."""

    world: DryWorld

    def _swap(self, sends: Any, recvs: Any, device: torch.device) -> None:
        if torch_private.function_mode_on():
            raise Untraceable
        self.world.met += 1

    def barrier(self) -> None:
        """Record that ranks would have met."""
        if self.size > 1:
            self._swap({}, {}, torch.device("cpu"))

    def all_gather_object(self, value: object, purpose: str = "") -> list[Any]:
        """Exchange objects with the other ranks for real.

        Ranks need each other's shapes during capture, and all run build() at the same time. Raises
        GraphError for a group of some ranks only, and Left if another rank has left build(). Raises
        DivergenceError if the ranks exchange objects for different purposes."""
        if len(self.ranks) != self.world.size:
            raise GraphError(
                "inside build(), only all ranks together can exchange data, not some of them "
                "(to_global of a local tensor exchanges shapes: pass check_meta=False, or make "
                "the tensor global before the call)"
            )
        with torch_private.real_tensors():
            replies = self.world.real.comm(self.ranks).all_gather_object(
                (INSIDE, (purpose, user_line(), value)), GRAPH
            )
        away = [r for r, (what, _) in enumerate(replies) if what != INSIDE]
        if away:
            raise Left(
                f"rank {away[0]} has left build(), but this rank waits there for an exchange with "
                f"it: {replies[away[0]][1]}"
            )
        messages = [message for _, message in replies]
        if any(theirs != purpose for theirs, _, _ in messages):
            reports = [
                Report(rank, OBJECTS, theirs, line)
                for rank, (theirs, line, _) in zip(self.ranks, messages, strict=True)
            ]
            raise DivergenceError(describe(reports))
        return [v for _, _, v in messages]


class Left(GraphError):
    """An error: another rank has left build()."""


class DryWorld(World):
    """A copy of the real world that sends no tensor."""

    dry = True

    @property
    def real(self) -> World:
        """The world that this one copies."""
        found = self._real()
        assert found is not None, "the capturing rank is in the real world"
        return found

    def __init__(self, real: World) -> None:
        super().__init__(real.rank, real.size, real.local_rank, real.node_size)
        self._real = weakref.ref(real)  # weak, since the real world may hold objects of this one
        self.met = 0  # number of times that ranks would have met
        #: Plain tensors that build() uses with global ones.
        self.replicated: list[NotedUse] = []

    def _connect(self, ranks: tuple[int, ...]) -> Communicator:
        return DryComm(self, ranks)

    def note_replicated(self, tensor: torch.Tensor, ranks: Sequence[int], purpose: str) -> None:
        self.replicated.append(NotedUse(tensor, tuple(ranks), purpose))

    def device(self, type: str) -> torch.device:
        return self.real.device(type)
