"""The world while a graph is captured: ranks, placements and shapes are as they are, but no tensor
is sent."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from ..._base import torch_private
from ...distributed.communicator import Communicator
from ...distributed.world import World
from ..errors import GraphError

__all__ = ["INSIDE", "DryComm", "DryWorld", "Left", "Untraceable"]

#: What a rank that runs build() puts before what it tells the others.
INSIDE: Final = "in build()"


class Untraceable(Exception):
    """A step communicates, or asks for a value, where a recorder looks into it: it has to be kept
    whole."""


class DryComm(Communicator):
    """A communicator that sends nothing: what a step would receive has the right shape, and that is
    all that is asked of it."""

    world: DryWorld

    def _swap(self, sends: Any, recvs: Any, device: torch.device) -> None:
        if torch_private.function_mode_on():
            raise Untraceable
        self.world.met += 1

    def barrier(self) -> None:
        """Note that ranks would have met."""
        if self.size > 1:
            self._swap({}, {}, torch.device("cpu"))

    def all_gather_object(self, value: object) -> list[Any]:
        """What ranks tell each other about shapes they do tell, while they capture: all run build()
        at the same time."""
        if len(self.ranks) != self.world.size:
            raise GraphError(
                "inside build() some ranks cannot tell each other what they hold (to_global of a "
                "local tensor exchanges shapes: pass check_meta=False, or make "
                "the tensor global before the call)"
            )
        with torch_private.real_tensors():
            told = self.world.real.comm(self.ranks).all_gather_object((INSIDE, value))
        away = [r for r, (what, _) in enumerate(told) if what != INSIDE]
        if away:
            raise Left(
                f"rank {away[0]} has left build(), where this rank asks what the others hold: "
                f"{told[away[0]][1]}"
            )
        return [v for _, v in told]


class Left(GraphError):
    """Another rank is not in build() any more."""


class DryWorld(World):
    """The world as it is, but nothing is sent."""

    dry = True

    @property
    def real(self) -> World:
        """The world that this one is like."""
        found = self._real()
        assert found is not None, "whoever captures is in it"
        return found

    def __init__(self, real: World) -> None:
        super().__init__(real.rank, real.size, real.local_rank, real.node_size)
        self._real = weakref.ref(real)  # which may hold what was dreamt up in this one
        self.met = 0  # how often ranks would have met

    def _connect(self, ranks: tuple[int, ...]) -> Communicator:
        return DryComm(self, ranks)

    def device(self, type: str) -> torch.device:
        return self.real.device(type)
