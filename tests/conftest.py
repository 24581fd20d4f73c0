"""What every test gets: a fixed seed, one thread, and the shared processes (support/pool.py), which end with the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from support.mpi import close_mpi_pools
from support.pool import Pool, close_pools, run_on

# Machines differ in speed, and the first example pays for imports: no deadline for an example; the run has its own time limit.
settings.register_profile("here", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("here")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(2, fn, *args)`` -> each rank's result, on real processes."""
    return run_on


@pytest.fixture
def simulated() -> Callable[..., list[Any]]:
    """``simulated(4, fn, *args)`` -> each rank's result, on threads of this process."""
    from globaltensor.distributed.simulate import simulate

    return simulate


@pytest.fixture
def fresh_pool() -> Iterator[Callable[[int], Pool]]:
    """Pools of a test's own, for tests that break them."""
    made: list[Pool] = []

    def make(n: int) -> Pool:
        made.append(Pool(n))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def pytest_sessionfinish() -> None:
    close_pools()
    close_mpi_pools()
