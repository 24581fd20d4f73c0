"""Transfers between stages: values in one direction, gradients in the other, during computation.

`runtime` drives them. Each value is split into the pieces that boxing's exchange would send, and a
piece is a message. Between two ranks, messages of one direction have a fixed order: the order in
which the sender's row of the schedule makes them. Both sides derive this order, so messages need no
names. Receives are posted ahead, in that order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..._tensor.gradients.flat_buffers import Room
from ...boxing import log
from ...boxing.moves import recv_slices, send_slices
from ...distributed.communicator import Channel, Message
from ...distributed.world_base import World
from ...errors import ScheduleError, WorldError
from ...sharding.spec import Spec
from .schedule import Schedule

__all__ = ["Edge", "Route", "Transfer", "lane_of"]

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Edge:
    """An edge: an output of stage ``source`` that becomes an input of stage ``target``.

    ``output`` and ``input`` are their numbers. The value has the spec ``src`` in the source and
    ``dst`` in the target. Neither is partial. ``source < target``, neighbours or not. ``source`` -1
    is an input of the call, passed for each micro-batch as ``dst``.
    """

    source: int
    output: int
    target: int
    input: int
    src: Spec
    dst: Spec
    differentiable: bool


class Route(NamedTuple):
    """A direction of an edge: its values, or its gradients (``back``).

    ``number`` is that of the edge."""

    number: int
    edge: Edge
    back: bool

    @property
    def ends(self) -> tuple[Spec, Spec]:
        """(spec at the sender, spec at the receiver)."""
        return (self.edge.dst, self.edge.src) if self.back else (self.edge.src, self.edge.dst)

    @property
    def stages(self) -> tuple[int, int]:
        """(stage of the sender, stage of the receiver)."""
        return (
            (self.edge.target, self.edge.source)
            if self.back
            else (self.edge.source, self.edge.target)
        )

    @property
    def what(self) -> str:
        """The description of the value for which its receiver waits."""
        return (
            f"the gradient of output {self.edge.output}"
            if self.back
            else f"input {self.edge.input}"
        )

    def reaches(self, rank: int) -> bool:
        """Return True if a rank needs its values.

        An arriving gradient becomes the dual of ``src``: along a broadcast axis all ranks but the
        first have zero."""
        spec = self.ends[1]
        where = spec.placement.coordinate(rank)
        return where is not None and not (
            self.back and any(i and e.is_broadcast for i, e in zip(where, spec.layout, strict=True))
        )

    def recv_pieces(self, rank: int) -> list[tuple[int, Slices, Slices]]:
        """Return (sender, slices there, slices here) of each piece that ``rank`` receives."""
        return recv_slices(*self.ends, rank) if self.reaches(rank) else []

    def send_pieces(self, rank: int) -> list[tuple[int, Slices]]:
        """Return (receiver, slices here) of each piece that ``rank`` sends."""
        return [piece for piece in send_slices(*self.ends, rank) if self.reaches(piece[0])]


class _Pool:
    """A pool of memory for one route, reused once no tensor refers to it.

    Devices other than CPUs have allocators that cache freed memory."""

    def __init__(self, idle: int) -> None:
        self._idle = idle
        self._all: list[Room] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        nbytes = numel * dtype.itemsize
        room = next((room for room in self._all if room.nbytes == nbytes and room.free), None)
        if room is None:
            self._all.append(room := Room(nbytes))
        return room.lend(dtype)

    def trim(self) -> None:
        """Free unused memory beyond the number of buffers to cache."""
        idle = [i for i, room in enumerate(self._all) if room.free]
        for i in reversed(idle[self._idle :]):
            del self._all[i]


class _Piece(NamedTuple):
    message: Message
    into: Slices
    flat: Tensor | None  # buffer in which it arrives, unless it arrives in place


class _Arrival:
    """A value of one micro-batch that arrives in pieces."""

    __slots__ = ("out", "pieces")

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self.pieces: dict[int, _Piece] = {}


class _Intake:
    """The messages from one rank, in order, and the number of receives posted so far."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.channel: Channel | None = None  # once they are connected
        self.order: list[tuple[Route, int]] = []
        self.places: dict[tuple[Route, int], int] = {}
        self.asked = 0
        self.open: dict[Route, int] = {}

    def add(self, route: Route, micro: int) -> None:
        self.places[route, micro] = len(self.order)
        self.order.append((route, micro))


class Transfer:
    """The transfers between one rank's stages and other stages.

    ``credits`` is the number of receives of a route that may be posted, and of its idle buffers
    that are cached. ``waited`` counts the seconds for which `receive` waited for messages, without
    its own work; the reader may reset it.

    A run starts with `begin` and ends with `finish`. In between, each value is sent and received
    once, in any order that the schedule allows.
    """

    def __init__(
        self,
        this_world: World,
        edges: Sequence[Edge],
        schedule: Schedule,
        lanes: dict[int, int],
        credits: int,
    ) -> None:
        self._world, self._credits = this_world, credits
        used = {
            (action.kind == "F", action.stage)
            for row in schedule.rows
            for action in row
            if action.kind != "W"
        }
        crossing = [(number, edge) for number, edge in enumerate(edges) if edge.source >= 0]
        routes = [Route(number, edge, False) for number, edge in crossing] + [
            Route(number, edge, True) for number, edge in crossing if edge.differentiable
        ]
        self.routes = [route for route in routes if (not route.back, route.stages[0]) in used]
        self._recv_pieces = {route: route.recv_pieces(this_world.rank) for route in self.routes}
        self._send_pieces = {route: route.send_pieces(this_world.rank) for route in self.routes}
        self._shape = {route: route.ends[1].local_shape(this_world.rank) for route in self.routes}
        self._pools: dict[Route, _Pool] = {route: _Pool(credits) for route in self.routes}
        self._arrivals: dict[tuple[Route, int], _Arrival] = {}
        self._sent: list[tuple[Message, Route, int, int]] = []
        self.waited = 0.0
        self._intakes: dict[tuple[int, str], _Intake] = {}
        for route, micro, who in self._expected_messages(schedule, lanes):
            self._intakes.setdefault((who, _wire(route)), _Intake(who)).add(route, micro)
        self._connected = False

    def _expected_messages(
        self, schedule: Schedule, lanes: dict[int, int]
    ) -> Iterator[tuple[Route, int, int]]:
        """Yield (route, micro-batch, sending rank) of all messages to this rank.

        Messages from each rank are in the order in which that rank sends them."""
        for who in sorted(
            {piece[0] for pieces in self._recv_pieces.values() for piece in pieces}
            - {self._world.rank}
        ):
            for action in schedule.rows[lanes[who]]:
                for route in self.leaving(action.kind, action.stage):
                    if any(piece[0] == who for piece in self._recv_pieces[route]):
                        yield route, action.micro, who

    def _connect(self) -> None:
        me = self._world.rank
        out = {
            (to, _wire(route))
            for route, pieces in self._send_pieces.items()
            for to, _ in pieces
            if to != me
        }
        ways = [(who, me, wire) for who, wire in self._intakes] + [
            (me, to, wire) for to, wire in out
        ]
        # Opening a channel may wait for its other side, so all ranks use one order.
        for source, target, wire in sorted(ways):
            channel = self._world.channel(source, target, self._world.device(wire))
            try:
                channel.connect()
            except WorldError as error:
                raise WorldError(
                    f"{error}\n(rank {me} cannot connect with rank {source + target - me}, which "
                    f"has a stage next to one of its stages)"
                ) from error
            if target == me:
                self._intakes[source, wire].channel = channel

    def leaving(self, kind: str, stage: int) -> list[Route]:
        """Return the routes on which an action sends, in order."""
        return (
            [r for r in self.routes if r.stages[0] == stage and r.back == (kind != "F")]
            if kind != "W"
            else []
        )

    def begin(self) -> None:
        """Post the first receives. The first call is collective among all ranks."""
        if not self._connected:
            self._connect()
            self._connected = True
        for intake in self._intakes.values():
            intake.asked, intake.open = 0, {}
        for intake in self._intakes.values():
            self._post_receives(intake)

    def send(self, route: Route, micro: int, value: Tensor) -> None:
        """Start sending a value to the ranks that need it.

        The value must not be changed until the run ends. Pieces that this rank needs itself are
        copied."""
        self._check_part(route, value)
        wire = self._world.device(_wire(route))
        for to, where in self._send_pieces[route]:
            piece = value[where].to(wire)
            try:
                with log.exchanges("pipeline: from one stage to another"):
                    message = self._world.channel(self._world.rank, to, wire).send(piece)
            except WorldError as error:
                raise WorldError(self._send_error_text(route, micro, to, error)) from error
            self._sent.append((message, route, micro, to))
        for who, source_slices, into in self._recv_pieces[route]:
            if who == self._world.rank:
                self._arrival(route, micro).out[into] = value[source_slices].to(wire)
        self.collect()

    def _check_part(self, route: Route, value: Tensor) -> None:
        spec = route.ends[0]
        shape = spec.local_shape(self._world.rank)
        if value.shape != shape or value.dtype is not spec.dtype:
            what = (
                f"a gradient of input {route.edge.input}"
                if route.back
                else f"output {route.edge.output}"
            )
            raise ScheduleError(
                f"rank {self._world.rank}: stage {route.stages[0]} returns {what} of {value.dtype} "
                f"{list(value.shape)}; its edge expects {spec.dtype} {list(shape)}, this rank's "
                f"local tensor of {spec}"
            )

    def receive(self, route: Route, micro: int) -> Tensor:
        """Wait for a value and return it.

        A gradient has the dual spec of its output. The caller must call `go_on` afterwards. Raises
        WorldError, with what was awaited, where, and from which rank.
        """
        device = self._world.device(route.ends[1].placement.type)
        if not route.reaches(self._world.rank):
            return torch.zeros(self._shape[route], dtype=route.edge.src.dtype, device=device)
        intakes = [
            self._intakes[who, _wire(route)]
            for who, _, _ in self._recv_pieces[route]
            if who != self._world.rank
        ]
        for intake in intakes:
            self._post_receives(intake, intake.places[route, micro])
        arrival = self._arrival(route, micro)
        del self._arrivals[route, micro]
        for who, piece in arrival.pieces.items():
            try:
                if not piece.message.over():
                    began = time.perf_counter()
                    piece.message.arrive()
                    self.waited += time.perf_counter() - began
                piece.message.wait()
            except WorldError as error:
                raise WorldError(self._receive_error_text(route, micro, who, error)) from error
            if piece.flat is not None:
                arrival.out[piece.into] = piece.flat.view([s.stop - s.start for s in piece.into])
        for intake in intakes:
            intake.open[route] -= 1
        return arrival.out.to(device)

    def go_on(self) -> None:
        """Post the receives for which there are credits now, and free what has been sent."""
        for intake in self._intakes.values():
            self._post_receives(intake)
        self.collect()

    def collect(self) -> None:
        """Free what has been sent, and surplus buffers."""
        under_way = []
        for entry in self._sent:
            if entry[0].over():
                self._wait_until_sent(*entry)
            else:
                under_way.append(entry)
        self._sent = under_way
        for pool in self._pools.values():
            pool.trim()

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        while self._sent:
            self._wait_until_sent(*self._sent.pop(0))
        for pool in self._pools.values():
            pool.trim()

    def forget(self) -> None:
        """Drop all messages after a run has failed."""
        self._arrivals.clear()
        self._sent.clear()

    def _wait_until_sent(self, message: Message, route: Route, micro: int, to: int) -> None:
        try:
            message.wait()
        except WorldError as error:
            raise WorldError(self._send_error_text(route, micro, to, error)) from error

    def _send_error_text(self, route: Route, micro: int, to: int, error: WorldError) -> str:
        (source, target), what = (
            route.stages,
            f"gradient of input {route.edge.input}"
            if route.back
            else f"output {route.edge.output}",
        )
        return (
            f"rank {self._world.rank}: stage {source} could not send the {what} of micro-batch "
            f"{micro} to stage {target} on rank {to}: {error}"
        )

    def _receive_error_text(self, route: Route, micro: int, who: int, error: WorldError) -> str:
        source, target = route.stages
        return (
            f"rank {self._world.rank}: stage {target} waited for {route.what} of micro-batch "
            f"{micro} from stage {source} on rank {who}: {error}"
        )

    def _arrival(self, route: Route, micro: int) -> _Arrival:
        arrival = self._arrivals.get((route, micro))
        if arrival is None:
            shape, spec, device = (
                self._shape[route],
                route.ends[1],
                self._world.device(_wire(route)),
            )
            flat = self._pools[route].take(math.prod(shape), spec.dtype, device)
            arrival = self._arrivals[route, micro] = _Arrival(flat.view(shape))
        return arrival

    def _post_receives(self, intake: _Intake, upto: int = -1) -> None:
        """Post receives in order.

        These are all receives up to the one at ``upto``, and more while their routes have credits.
        """
        while intake.asked < len(intake.order):
            route, micro = intake.order[intake.asked]
            if intake.asked > upto and intake.open.get(route, 0) >= self._credits:
                return
            assert intake.channel is not None
            arrival, who = self._arrival(route, micro), intake.source
            into = next(into for giver, _, into in self._recv_pieces[route] if giver == who)
            place, flat = arrival.out[into], None
            if not place.is_contiguous():
                flat = self._pools[route].take(place.numel(), place.dtype, place.device)
            try:
                message = intake.channel.receive(place.view(-1) if flat is None else flat)
            except WorldError as error:
                raise WorldError(self._receive_error_text(route, micro, who, error)) from error
            arrival.pieces[who] = _Piece(message, into, flat)
            intake.open[route] = intake.open.get(route, 0) + 1
            intake.asked += 1


def _wire(route: Route) -> str:
    """Return the device type of the messages: the host's if the two ends differ."""
    source, target = (spec.placement.type for spec in route.ends)
    return source if source == target else "cpu"


def lane_of(placements: Sequence[Sequence[int]], schedule: Schedule) -> dict[int, int]:
    """Return rank -> lane. Raises ScheduleError if a rank would be on two lanes."""
    lane_of_rank: dict[int, int] = {}
    for stage, ranks in enumerate(placements):
        lane = schedule.lanes[stage]
        for rank in ranks:
            if lane_of_rank.setdefault(rank, lane) != lane:
                raise ScheduleError(
                    f"rank {rank} holds stage {stage} on lane {lane} and another on lane "
                    f"{lane_of_rank[rank]}: stages that share ranks belong on one lane"
                )
    return lane_of_rank
