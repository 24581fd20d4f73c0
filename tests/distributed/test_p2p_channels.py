"""Tests of single messages between two ranks that run concurrently with the computation: simulated,
over gloo, over MPI, and through groups of two as for NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.mpi import needs_mpi, run_by_mpi
from support.pool import run_on

from globaltensor._base.torch_private import memory_users
from globaltensor.distributed.backends.p2p_channels import NativeChannel
from globaltensor.distributed.backends.shared_memory import host
from globaltensor.distributed.communicator import Message
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import ProcessWorld, world
from globaltensor.errors import WorldError

CPU = torch.device("cpu")


def run_connected(ranks: int, program: Callable[[], Any]) -> list[Any]:
    """Run on processes that have detected their shared memory."""
    return run_on(ranks, connected, program)


def connected(program: Callable[[], Any]) -> Any:
    here = world()
    for channel in [here.channel(source, target, CPU) for source, target in ((0, 1), (1, 0))]:
        channel.connect()
        assert not host() or channel._peers is not None
    try:
        return program()
    finally:
        here._channels.clear()


EVERYWHERE = pytest.mark.parametrize(
    "run", [simulate, run_on, run_connected, pytest.param(run_by_mpi, marks=needs_mpi)]
)


def soon(message: Message) -> bool:
    end = time.monotonic() + 30
    while not message.over() and time.monotonic() < end:
        time.sleep(1e-3)
    return message.over()


def both_ways() -> list[float]:
    """Send on both ranks before either receives, with long and short messages. Receives are waited
    for in another order than they were posted."""
    here, other = world().rank, 1 - world().rank
    out, into = world().channel(here, other, CPU), world().channel(other, here, CPU)
    sizes = [1, 1 << 18, 3]
    sent = [out.send(torch.full((n,), 10.0 * here + i)) for i, n in enumerate(sizes)]
    buffers = [torch.empty(n) for n in sizes]
    messages = [into.receive(b) for b in buffers]
    messages[1].arrive()  # only this rank's own work is left
    for message in reversed(messages):
        message.wait()
    for message in sent:
        assert soon(message)
        message.wait()
    assert all(bool((b == b[0]).all()) for b in buffers)
    assert world().channel(here, other, CPU) is out
    return [float(b[-1]) for b in buffers]


@EVERYWHERE
def test_messages_keep_their_order(run: Callable[..., list[Any]]) -> None:
    assert run(2, both_ways) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def any_layout() -> list[Any]:
    """Check that a send transfers elements in row-major order, for any stride and dtype."""
    there = [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(7, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
    ]
    if world().rank == 0:
        for message in [world().channel(0, 1, CPU).send(t) for t in there]:
            message.wait()
        return []
    found = [torch.empty(t.numel(), dtype=t.dtype) for t in there]
    for message in [world().channel(0, 1, CPU).receive(t) for t in found]:
        message.wait()
    return [t.tolist() for t in found]


@EVERYWHERE
def test_any_layout_and_dtype(run: Callable[..., list[Any]]) -> None:
    assert run(2, any_layout)[1] == [[0, 3, 1, 4, 2, 5], [7.0], [True, False], [1 - 2j]]


def let_go() -> bool:
    """Check that a finished message holds no memory, whichever rank waited for it."""
    if world().rank == 1:
        world().channel(0, 1, CPU).receive(torch.empty(1 << 18)).wait()
        return True
    t = torch.ones(1 << 18)
    message = world().channel(0, 1, CPU).send(t)
    assert soon(message)
    message.wait()
    del message
    end = time.monotonic() + 30
    while memory_users(t) > 1 and time.monotonic() < end:
        time.sleep(1e-3)
    return memory_users(t) == 1


@EVERYWHERE
def test_memory_is_let_go(run: Callable[..., list[Any]]) -> None:
    assert run(2, let_go) == [True, True]


def through_pairs() -> list[float]:
    """Use groups of two, one for each direction; gloo stands in for NCCL."""
    here = world()
    assert isinstance(here, ProcessWorld)
    before, here.backends = here.backends, {"cpu": "gloo"}
    here._channels.clear()
    try:
        assert isinstance(here.channel(0, 1, CPU), NativeChannel)
        for source, target in ((0, 1), (1, 0)):
            here.channel(source, target, CPU).connect()
        return both_ways_in_order()
    finally:
        here.backends = before
        here._channels.clear()


def both_ways_in_order() -> list[float]:
    here, other = world().rank, 1 - world().rank
    buffers = [torch.empty(1 << 18), torch.empty(2)]
    messages = [world().channel(other, here, CPU).receive(b) for b in buffers]
    messages += [
        world().channel(here, other, CPU).send(torch.full((n,), 10.0 * here + n))
        for n in (1 << 18, 2)
    ]
    for message in messages:
        message.wait()
    return [float(b[-1]) for b in buffers]


def test_groups_of_two() -> None:
    assert run_on(2, through_pairs) == [[10.0 + (1 << 18), 12.0], [float(1 << 18), 2.0]]


@pytest.mark.parametrize("ranks", [(0, 0), (1, 2), (0, 3), (-1, 0)])
def test_ranks_that_have_no_channel(ranks: tuple[int, int]) -> None:
    def run() -> None:
        if world().rank == 0:
            world().channel(*ranks, CPU)

    with pytest.raises(WorldError, match="they must be two ranks of this job, this one among them"):
        simulate(3, run)


def test_messages_that_never_come_and_wrong_ones() -> None:
    def ended() -> None:
        if world().rank == 0:
            world().channel(1, 0, CPU).receive(torch.empty(2)).wait()

    with pytest.raises(
        WorldError, match="rank 0 waited for a message from rank 1, but it has ended"
    ):
        simulate(2, ended, timeout=10.0)

    def late() -> None:
        if world().rank == 0:
            world().channel(1, 0, CPU).receive(torch.empty(2)).wait()
        else:
            time.sleep(1.0)

    with pytest.raises(WorldError, match=r"rank 1, but no message arrived within 0\.1 s"):
        simulate(2, late, timeout=0.1)

    def other() -> None:
        if world().rank == 0:
            world().channel(1, 0, CPU).receive(torch.empty(2)).wait()
        else:
            world().channel(1, 0, CPU).send(torch.empty(3))

    with pytest.raises(WorldError, match="rank 1 sent 12 bytes where rank 0 expects 8"):
        simulate(2, other)


def test_a_world_of_one_has_no_channels() -> None:
    with pytest.raises(WorldError, match="rank 0 of 1 asked for a channel from rank 0 to rank 1"):
        world().channel(0, 1, CPU)
