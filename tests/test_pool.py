"""Tests of the pool of processes that other tests use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from support.pool import Pool, RanksFailed, run_on

import globaltensor as flow
from globaltensor._tensor.gradients.parameter_gather import GatherState
from globaltensor._tensor.gradients.reducer import reducer
from globaltensor.distributed import env
from globaltensor.distributed.world import world


def who() -> tuple[int, int, list[int]]:
    comm = world().comm(tuple(range(env.get_world_size())))
    return env.get_rank(), env.get_world_size(), comm.all_gather_object(os.getpid())


def fails_on_one() -> None:
    if env.get_rank() == 1:
        raise ValueError("the sky fell")
    world().comm((0, 1)).barrier()


def sleeps_on_one() -> None:
    if env.get_rank() == 1:
        time.sleep(60)


def dies_on_one() -> None:
    if env.get_rank() == 1:
        os._exit(7)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_of_one_world(n: int) -> None:
    first, again = run_on(n, who), run_on(n, who)
    assert [(rank, size) for rank, size, _ in first] == [(r, n) for r in range(n)]
    assert first == again, "the processes are the same from call to call"
    assert len(set(first[0][2])) == n


def turns_settings_on() -> None:
    flow.fuse_loss_count()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def learns_an_order() -> None:
    everyone = flow.placement.all("cpu")
    layer = flow.parallelize(torch.nn.Linear(2, 2), everyone, "fsdp")
    layer(torch.ones(2, 2).to_global(everyone, flow.sbp.split(0)))


def orders() -> int:
    return len(world().state(GatherState).orders)


def test_the_order_of_gathers_is_not_kept_for_the_next_call() -> None:
    """In some tests the ranks part, and so do the orders that they learn."""
    run_on(2, learns_an_order)
    assert run_on(2, orders) == [0, 0]


def settings() -> tuple[bool, torch.dtype, bool]:
    return reducer().rides, torch.get_default_dtype(), torch.is_grad_enabled()


def test_what_one_call_sets_the_next_does_not_see() -> None:
    run_on(2, turns_settings_on)
    assert run_on(2, settings) == [(False, torch.float32, True)] * 2


@pytest.mark.extended
def test_a_failure_shows_its_traceback_and_ends_the_pool(fresh_pool: Callable[[int], Pool]) -> None:
    pool = fresh_pool(2)
    pool.run(who)
    with pytest.raises(
        RanksFailed, match=r"(?s)rank 1 of 2: Traceback.*in fails_on_one.*ValueError: the sky fell"
    ):
        pool.run(fails_on_one)


def test_a_late_rank_shows_where_it_is(fresh_pool: Callable[[int], Pool]) -> None:
    pool = fresh_pool(2)
    pool.run(who)  # the world has started and this file is imported, however busy the machine is
    with pytest.raises(
        RanksFailed, match=r"(?s)rank 1 of 2: no answer within 1 s.*in sleeps_on_one"
    ):
        pool.run(sleeps_on_one, timeout=1)


def test_a_dead_rank_is_noticed(fresh_pool: Callable[[int], Pool]) -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2: the process ended with code 7"):
        fresh_pool(2).run(dies_on_one)


def test_a_function_that_cannot_be_sent_is_refused_here() -> None:
    with pytest.raises(AttributeError, match=r"local object|pickle"):
        run_on(2, lambda: None)


def test_the_processes_of_the_shared_pair_hash_texts_differently() -> None:
    """So a program whose ranks go through a set of texts in different orders fails here."""
    first, second = run_on(2, hash, "a text")
    assert first != second
