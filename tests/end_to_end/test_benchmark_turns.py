"""benchmarks/turns.py: two runs of a benchmark that take turns."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.paths import import_script


@pytest.fixture(scope="module")
def turns() -> Any:
    return import_script("benchmarks/turns.py")


def test_one_works_while_the_other_waits(turns: Any, tmp_path: Path) -> None:
    work: list[str] = []

    def run(name: str) -> None:
        mine = turns.Turns(tmp_path, name, 6)
        for _ in range(mine.rounds):
            with mine.turn():
                work.append(f"{name} begins")
                work.append(f"{name} ends")

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in "BA"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    order = "ABBAABBAABBA"
    assert work == [f"{name} {what}" for name in order for what in ("begins", "ends")]


def test_all_ranks_of_a_run_have_a_turn_together(
    turns: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        ranks.append(turns.Turns(tmp_path, "B", 1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    other, work = turns.Turns(tmp_path, "A", 1), []

    def run(mine: Any) -> None:
        with mine.turn():
            work.append("B")

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in ranks]
    for thread in threads:
        thread.start()
    with other.turn():
        threads[0].join(0.2)
        work.append("A")
    for thread in threads:
        thread.join(20)
    assert work == ["A", "B", "B"]
