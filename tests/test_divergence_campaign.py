"""A campaign: programs drawn at random in which exactly one rank does one thing otherwise. None of them ends with exit code 0; without the odd step all do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.diverging import KINDS, drawn
from support.mpi import needs_mpi, run_by_mpi

from globaltensor.distributed.launcher import tether
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError
from globaltensor.graph.errors import GraphError

SERVER = Path(__file__).parent / "support" / "diverging_server.py"


class Server:
    """Runs programs as pairs of whole processes (support/diverging_server.py)."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid()), sys.executable, str(SERVER)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=variables)

    def run(self, number: int, odd: int | None, shared: bool, graph: bool) -> tuple[list[int | None], list[str]]:
        """(exit codes, what the ranks said) of a program; ``odd``: the rank that does the odd step otherwise."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        task = {"number": number, "odd": odd, "shared": str(int(shared)), "graph": graph, "folder": self.folder}
        self.process.stdin.write(json.dumps(task) + "\n")
        codes = json.loads(self.process.stdout.readline())
        return codes, [Path(self.folder, str(rank)).read_text() for rank in range(2)]


@contextmanager
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        started = Server(folder)
        try:
            yield started
        finally:
            assert started.process.stdin is not None
            started.process.stdin.close()
            started.process.wait(60)
            assert started.process.stdout is not None
            started.process.stdout.close()


#: Shared memory, graphs, which programs.
CAMPAIGNS = {
    "shared memory": (True, False, range(33)),
    "gloo": (False, False, range(33, 55)),
    "graphs": (True, True, range(20)),
    "graphs on gloo": (False, True, range(20, 30)),
}


@pytest.mark.parametrize("name", CAMPAIGNS)
@pytest.mark.timeout(600)
def test_no_program_whose_ranks_diverge_ends_well(name: str) -> None:
    shared, graph, numbers = CAMPAIGNS[name]
    wrong: list[Any] = []
    with server() as programs:
        for number in numbers:
            program = drawn(number, graph)
            for odd in (None, number % 2):
                codes, said = programs.run(number, odd, shared, graph)
                told = [text.strip().splitlines()[-1:] for text in said]
                if odd is None and codes != [0, 0]:
                    wrong.append((number, program.kinds, "all ranks do the same", codes, told))
                if odd is not None and (codes == [0, 0] or None in codes):
                    wrong.append((number, program.kinds[program.odd], program.kinds, codes))
                if odd is not None and program.reads and not all("DivergenceError" in text or "GraphError" in text for text in said):
                    wrong.append((number, program.kinds[program.odd], "not every rank was told", codes, told))
    assert not wrong, "\n".join(map(str, wrong))


def test_every_kind_of_odd_step_is_drawn() -> None:
    odd = {program.kinds[program.odd] for program in map(drawn, range(33))}
    assert len(odd) == len(KINDS)


def over_mpi(numbers: range, graph: bool) -> list[tuple[int, str]]:
    """The programs that were not told of, here."""
    wrong = []
    for number in numbers:
        for odd in (None, number % 2):
            told = ""
            try:
                drawn(number, graph).run(odd=world().rank == odd, graph=graph)
            except (DivergenceError, GraphError) as error:
                told = type(error).__name__
            held = [h.digest() for h in world().histories.values()]
            everyone = world().comm((0, 1)).all_gather_unchecked(held)
            same = everyone[0] == everyone[1]
            if (odd is None and (told or not same)) or (odd is not None and not told and same):
                wrong.append((number, f"odd {odd}, told {told!r}, same {same}"))
            world().forget()
    return wrong


@needs_mpi
def test_on_mpi() -> None:
    for graph in (False, True):
        assert run_by_mpi(2, over_mpi, range(22), graph, timeout=120.0) == [[], []]
