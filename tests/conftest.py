"""The setup of every test: a fixed seed, one thread, and the shared processes (support/pool.py),
which end with the run."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from hypothesis import settings
from support import device, forked, hosts, launched, mpi, pool, program, scripts, warm_python
from support.mpi import close_mpi_pools
from support.pool import Pool, close_pools, run_on
from support.warm_python import close_warm_python

# Machines differ in speed, and the first example pays for imports. So an example has no deadline,
# and the run has its own time limit.
settings.register_profile("here", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("here")
# Automatic plans assume the generic machine, so they are the same on every test machine.
os.environ.setdefault("GLOBALTENSOR_PROFILE", "0")
device.move()


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
    """Return ``ranks(2, fn, *args)``, which runs ``fn`` on real processes and returns each rank's
    result."""
    return run_on


@pytest.fixture
def simulated() -> Callable[..., list[Any]]:
    """Return ``simulated(4, fn, *args)``, which runs ``fn`` on threads of this process and returns
    each rank's result."""
    from globaltensor.distributed.simulate import simulate

    return simulate


@pytest.fixture
def fresh_pool() -> Iterator[Callable[[int], Pool]]:
    """Make a test's own pools, for tests that break them."""
    made: list[Pool] = []

    def make(n: int) -> Pool:
        made.append(Pool(n, warm=True))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks that ``flow.run`` starts run under support/warm_python."""
    executable = warm_python.warm_python()
    monkeypatch.setattr("multiprocessing.spawn._python_exe", executable)


#: Functions and classes that start processes, or run on the shared ones.
STARTERS = {
    id(thing)
    for module in (forked, hosts, launched, mpi, pool, program, scripts, subprocess, warm_python)
    for thing in vars(module).values()
    if callable(thing)
}
STARTERS.add(id(subprocess))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check",
        action="store_true",
        help="leave out tests that start processes, and run one case of each other test",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--check"):
        settings.register_profile("check", settings.get_profile("here"), max_examples=10)
        settings.load_profile("check")


def sampled(items: list[pytest.Item], known: dict[Any, bool]) -> None:
    """Leave the sample of --check in ``items``: one case of each test without processes.

    The tests of whole programs, in end_to_end, and those marked `long` are left out too.
    """
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        # The examples of distributed/run start processes too.
        whole_programs = {"end_to_end", "run"} & set(item.path.parts)
        left_out = any(map(item.get_closest_marker, ("long", "extended", "slow", "gpu")))
        if not whole_programs and not left_out and not with_processes(item, known):
            cases.setdefault(getattr(item, "function", item.nodeid), []).append(item)
    items[:] = [of[len(of) // 2] for of in cases.values()]


def with_processes(item: pytest.Item, known: dict[Any, bool]) -> bool:
    """Return True if a test starts processes, by its fixtures, its code or its parameters."""
    if {"ranks", "fresh_pool", "network", "warm_ranks"} & set(getattr(item, "fixturenames", ())):
        return True
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec is not None else ()
    functions = [getattr(item, "function", None), *values]
    return any(id(f) in STARTERS or starts_processes(f, known) for f in functions)


def extend(items: list[pytest.Item]) -> None:
    """Mark the cases of each sweep that ``make test`` leaves out as extended. Of each kind of case,
    the first one stays."""
    seen: dict[Any, int] = {}
    for item in items:
        if (sweep := item.get_closest_marker("sweep")) is not None:
            of = getattr(item, "function", item.nodeid)
            if "kind" in sweep.kwargs:
                of = of, sweep.kwargs["kind"](**item.callspec.params)  # type: ignore[attr-defined]
            number = seen[of] = seen.get(of, -1) + 1
            if number % sweep.args[0]:
                item.add_marker(pytest.mark.extended)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the collector ignores the modules, which are most of its work
    gc.set_threshold(50_000)  # and it runs seldom: by default it takes a tenth of the time


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests, and note which of them start processes."""
    known: dict[Any, bool] = {}
    extend(items)
    if config.getoption("--check"):
        sampled(items, known)
    for item in items:
        item.stash[STARTS_PROCESSES] = with_processes(item, known)


STARTS_PROCESSES = pytest.StashKey[bool]()
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.hookimpl(tryfirst=True)  # before fixtures start threads or processes
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Run a test without processes on one core. Simulated ranks are threads, which hand Python's
    lock to each other at every operation: between cores that takes longer than the operation."""
    if CORES:
        many = item.stash[STARTS_PROCESSES]
        os.sched_setaffinity(0, CORES if many else {CORES[WORKER % len(CORES)]})


def starts_processes(function: Any, known: dict[Any, bool]) -> bool:
    """Return True if a function of a test file names something that starts processes.

    It may do so itself or through other functions of that file.
    """
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        return False
    if function not in known:
        known[function] = False
        here = [
            function.__globals__[name]
            for name in names(function.__code__)
            if name in function.__globals__
        ]
        mine = [
            f for f in here if isinstance(f, FunctionType) and f.__globals__ is function.__globals__
        ]
        known[function] = any(id(thing) in STARTERS for thing in here) or any(
            starts_processes(f, known) for f in mine
        )
    return known[function]


def names(code: CodeType) -> set[str]:
    inner = [names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


def pytest_sessionfinish() -> None:
    close_pools()
    close_mpi_pools()
    close_warm_python()
