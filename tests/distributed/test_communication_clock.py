"""Tests of the clock of collectives: what it counts, and that nothing stays wrapped."""

from __future__ import annotations

import time

import torch
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.communication_clock import CommunicationClock
from globaltensor.distributed.communicator import Communicator
from globaltensor.distributed.world import world

B, S = flow.sbp.broadcast, flow.sbp.split
LATE = 0.3  # seconds


def a_late_rank() -> tuple[float, float]:
    """Let rank 1 be late for a collective, synchronous and then asynchronous."""
    here = world()
    everyone = tuple(range(here.size))
    here.comm(everyone).barrier()
    shares = []
    for kind in ("all_reduce", "all_reduce_async"):
        clock = CommunicationClock()
        clock.start()
        if here.rank == 1:
            time.sleep(LATE)
        done = getattr(here.comm(everyone), kind)(torch.ones(1000))
        if kind == "all_reduce_async":
            done.wait()
        shares.append(clock.stop())
        assert not clock.running
        assert all(isinstance(comm, Communicator) for comm in here._comms.values())
    return shares[0], shares[1]


def test_waiting_for_a_late_rank_is_communication() -> None:
    on_time, late = run_on(2, a_late_rank)
    assert min(on_time) > 0.8, "rank 0 has waited nearly all the time"
    assert max(late) < 0.5


def results_are_the_same() -> tuple[bool, int, int]:
    torch.manual_seed(0)
    x = torch.randn(6, 4).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    w = torch.randn(4, 4).to_global(flow.placement.all("cpu"), B).requires_grad_()  # type: ignore[attr-defined]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        w.grad = None
        out = (x @ w).to_global(sbp=B)
        out.square().sum().backward()
        assert w.grad is not None
        return out.to_local(), w.grad.to_local()

    before, clock = step(), CommunicationClock()
    clock.start()
    timed, intervals = step(), len(clock._intervals)
    clock.stop()
    after = step()
    same = all(
        torch.equal(a, b) and torch.equal(a, c)
        for a, b, c in zip(before, timed, after, strict=True)
    )
    return same, intervals, len(clock._intervals)


def test_a_timed_step_computes_the_same() -> None:
    for same, intervals, left in run_on(2, results_are_the_same):
        assert same
        assert intervals >= 3, "a gather, a bucket of gradients, and the wait for it"
        assert left == 0


def a_new_communicator() -> bool:
    here, clock = world(), CommunicationClock()
    ranks = (1, 0)
    here._comms.pop(ranks, None)
    clock.start()
    here.comm(ranks).barrier()
    clock.stop()
    return isinstance(here._comms[ranks], Communicator)


def test_a_communicator_that_is_made_meanwhile_stays() -> None:
    assert run_on(2, a_new_communicator) == [True, True]


def two_clocks() -> tuple[bool, bool, int]:
    """Run clocks that overlap, and close the world's communicators while one runs."""
    here = world()
    everyone = tuple(range(here.size))
    first, second = CommunicationClock(), CommunicationClock()
    first.start()
    second.start()
    here.comm(everyone).all_reduce(torch.ones(3))
    running = first.running, second.running
    first.stop()
    assert type(here._comms) is dict
    assert all(isinstance(comm, Communicator) for comm in here._comms.values())
    second.start()
    here._comms.clear()  # as World.close does
    second.stop()
    return *running, len(here._comms)


def test_clocks_that_overlap_leave_nothing_wrapped() -> None:
    assert run_on(2, two_clocks) == [(True, False, 0)] * 2


def a_channel_opened_in_a_measured_step() -> list[float]:
    """Open a channel while the clock of rank 0 alone runs: both ends use the same transport."""
    here, clock = world(), CommunicationClock()
    if here.rank == 0:
        clock.start()
    x = torch.arange(4.0) + here.rank
    channel = here.channel(0, 1, torch.device("cpu"))
    if here.rank == 0:
        channel.send(x)
        clock.stop()
        return x.tolist()
    out = torch.empty(4)
    channel.receive(out).wait()
    return out.tolist()


def test_a_channel_that_opens_in_a_measured_step_works_at_both_ends() -> None:
    sent, received = run_on(2, a_channel_opened_in_a_measured_step)
    assert sent == received == [0.0, 1.0, 2.0, 3.0]
