"""Tests of the cases that `make test` runs of a sweep (conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import extend


class Case:
    """A case of a parametrised test, with what `extend` reads of an item."""

    def __init__(
        self, function: Callable[..., None], *markers: pytest.MarkDecorator, **params: Any
    ) -> None:
        self.function, self.nodeid = function, function.__name__
        self.callspec = SimpleNamespace(params=params)
        self.markers = [m.mark for m in markers]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((m for m in self.markers if m.name == name), None)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers.append(marker.mark)

    @property
    def extended(self) -> bool:
        return self.get_closest_marker("extended") is not None


def kept(cases: list[Case], *names: str) -> list[Any]:
    """Return the named parameters of the cases that stay in `make test`."""
    extend(cases)  # type: ignore[arg-type]
    return [tuple(c.callspec.params[n] for n in names) for c in cases if not c.extended]


def one() -> None: ...
def other() -> None: ...


def test_one_case_in_a_few_stays_and_the_others_are_extended() -> None:
    cases = [Case(one, pytest.mark.sweep(3), seed=seed) for seed in range(8)]
    assert kept(cases, "seed") == [(0,), (3,), (6,)]
    assert sum(c.extended for c in cases) == 5


def test_the_first_case_of_each_kind_stays_wherever_it_is() -> None:
    sweep = pytest.mark.sweep(4, kind=lambda seed, how: (how, seed % 2))
    pairs = [(seed, how) for how in "ab" for seed in range(10)]
    cases = [Case(one, sweep, how=how, seed=seed) for seed, how in pairs]
    assert kept(cases, "seed", "how") == [
        (0, "a"), (1, "a"), (8, "a"), (9, "a"), (0, "b"), (1, "b"), (8, "b"), (9, "b")
    ]  # fmt: skip


def test_a_kind_of_one_case_stays() -> None:
    sweep = pytest.mark.sweep(9, kind=lambda row: row)
    assert kept([Case(one, sweep, row=row) for row in "aabac"], "row") == [("a",), ("b",), ("c",)]


def test_each_test_is_counted_on_its_own() -> None:
    sweep = pytest.mark.sweep(2, kind=lambda seed: None)
    cases = [Case(f, sweep, seed=seed) for seed in range(3) for f in (one, other)]
    assert kept(cases, "seed") == [(0,), (0,), (2,), (2,)]


def test_a_test_that_is_no_sweep_stays_whole() -> None:
    cases = [Case(one, pytest.mark.long, seed=seed) for seed in range(3)]
    assert kept(cases, "seed") == [(0,), (1,), (2,)]


def test_a_kind_has_the_parameters_by_their_names() -> None:
    with pytest.raises(TypeError, match="seed"):
        extend([Case(one, pytest.mark.sweep(2, kind=lambda row: row), seed=0)])  # type: ignore[list-item]


def test_what_is_extended_is_not_in_make_test(pytestconfig: pytest.Config) -> None:
    assert "not extended" in " ".join(pytestconfig.getini("addopts"))
