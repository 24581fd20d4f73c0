"""A campaign of random programs in which exactly one rank does one step differently. None of these
programs ends with exit code 0; without the odd step all of them do."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from support.diverging import KINDS, drawn
from support.forked import forked
from support.launched import Launched
from support.mpi import needs_mpi, run_by_mpi
from support.pool import run_on

from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError, GraphError


def program(number: int, odd: int | None, graph: bool) -> None:
    """Run one of the programs on this rank. On rank ``odd`` its odd step runs in the other
    variant."""
    drawn(number, graph).run(odd=int(os.environ["RANK"]) == odd, graph=graph)


#: (shared memory, graphs, program numbers)
CAMPAIGNS = {
    "shared memory": (True, False, range(33)),
    "gloo": (False, False, range(33, 55)),
    "graphs": (True, True, range(20)),
    "graphs on gloo": (False, True, range(20, 30)),
}


@pytest.mark.parametrize(
    "every",
    [22, pytest.param(11, marks=pytest.mark.extended), pytest.param(1, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", CAMPAIGNS)
@pytest.mark.timeout(600)
def test_no_program_whose_ranks_diverge_ends_well(name: str, every: int) -> None:
    """One program in ``every`` is run."""
    shared, graph, numbers = CAMPAIGNS[name]
    numbers = numbers[::every]
    variables = {"GLOBALTENSOR_SHARED_MEMORY": str(int(shared)), "GLOBALTENSOR_TIMEOUT": "40"}
    wrong: list[Any] = []
    for number in numbers:
        kinds, at, reads = (found := drawn(number, graph)).kinds, found.odd, found.reads
        for odd in (None, number % 2):
            codes, said = forked(2, program, number, odd, graph, variables=variables)
            told = [text.strip().splitlines()[-1:] for text in said]
            if odd is None and codes != [0, 0]:
                wrong.append((number, kinds, "all ranks do the same", codes, told))
            if odd is not None and (codes == [0, 0] or None in codes):
                wrong.append((number, kinds[at], kinds, codes))
            if (
                odd is not None
                and reads
                and not all("DivergenceError" in text or "GraphError" in text for text in said)
            ):
                wrong.append((number, kinds[at], "not every rank was told", codes, told))
    assert not wrong, "\n".join(map(str, wrong))


def test_every_kind_of_odd_step_is_drawn() -> None:
    odd = {program.kinds[program.odd] for program in map(drawn, range(33))}
    assert len(odd) == len(KINDS)


def in_one_world(numbers: range, graph: bool) -> list[tuple[int, str]]:
    """Return the programs whose divergence raised no error in this world."""
    wrong = []
    for number in numbers:
        for odd in (None, number % 2):
            told = ""
            try:
                drawn(number, graph).run(odd=world().rank == odd, graph=graph)
            except (DivergenceError, GraphError) as error:
                told = type(error).__name__
            held = [h.digest() for h in world().histories.values()]
            try:
                first, second = world().comm((0, 1)).all_gather_unchecked(held)
                same = first == second
            except DivergenceError:  # each message in shared memory carries the digest
                same = False
            if (odd is None and (told or not same)) or (odd is not None and not told and same):
                wrong.append((number, f"odd {odd}, told {told!r}, same {same}"))
            world().forget()
    return wrong


#: Each part has every third kind of step. `make test` runs another part on each transport.
PARTS = 3


def all_kinds(run: Any, part: int, rounds: int = 1) -> None:
    """In each round every kind of step is the odd one of a program, eager and as a graph."""
    for graph in (False, True):
        numbers = range(part, rounds * len(KINDS), PARTS)
        assert run(2, in_one_world, numbers, graph) == [[], []]


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.sweep(PARTS)
def test_all_kinds_on_shared_memory(part: int) -> None:
    all_kinds(run_on, part)


@pytest.mark.parametrize("part", [1, 2, 0])
@pytest.mark.sweep(PARTS)
def test_all_kinds_on_gloo(fresh_pool: Any, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setenv("GLOBALTENSOR_SHARED_MEMORY", "0")
    pool = fresh_pool(2)
    all_kinds(lambda n, fn, *args: pool.run(fn, *args), part)


@needs_mpi
@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.extended)])
@pytest.mark.parametrize("part", [2, 0, 1])
@pytest.mark.sweep(PARTS, kind=lambda part, rounds: rounds)
def test_all_kinds_on_mpi(part: int, rounds: int) -> None:
    all_kinds(functools.partial(run_by_mpi, timeout=120.0), part, rounds)


PROGRAM = """
import os
from support.diverging import drawn
drawn({number}, {graph}).run(odd=int(os.environ["RANK"]) == {odd}, graph={graph})
"""


@needs_mpi
@pytest.mark.extended
@pytest.mark.parametrize(
    ("reads", "graph"), [(False, False), (True, True)], ids=["reads nothing", "graph that is read"]
)
def test_programs_on_mpi_end_with_an_error(tmp_path: Path, reads: bool, graph: bool) -> None:
    number = next(n for n in range(100, 200) if drawn(n, graph).reads == reads)
    script, root = tmp_path / "train.py", Path(__file__).parents[2]
    script.write_text(PROGRAM.format(number=number, graph=graph, odd=number % 2))
    path = f"{root}:{root / 'tests'}"
    options = "--nproc_per_node", 2, "--backend", "mpi"
    with Launched(tmp_path, *options, script, PYTHONPATH=path, OMP_NUM_THREADS="1") as running:
        assert running.code() != 0
    running.says("DivergenceError|GraphError")
