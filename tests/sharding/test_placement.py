"""Tests of placements of all ranks of a job, on grids."""

from __future__ import annotations

import pytest

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import PlacementError


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        (None, [0, 1, 2, 3, 4, 5]),
        ((6,), [0, 1, 2, 3, 4, 5]),
        ((2, 3), [[0, 1, 2], [3, 4, 5]]),
        ((3, -1), [[0, 1], [2, 3], [4, 5]]),
        ([-1, 1], [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_all_ranks_on_a_grid(shape: list[int] | None, ranks: list[object]) -> None:
    def program() -> None:
        assert flow.placement.all("cpu", shape) == flow.placement("cpu", ranks)

    simulate(6, program)


@pytest.mark.parametrize("shape", [(4, 2), (4, -1), (-1, -1), (-2, 3), (0,), (), (1.5, 4), 6])
def test_a_grid_of_another_number_of_ranks_is_refused(shape: object) -> None:
    def program() -> None:
        with pytest.raises(PlacementError, match=r"placement\.all.*has 6 ranks.*\(2, -1\)"):
            flow.placement.all("cpu", shape)  # type: ignore[arg-type]

    simulate(6, program)
