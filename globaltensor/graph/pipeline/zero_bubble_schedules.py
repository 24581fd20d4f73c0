"""Zero-bubble schedules, which run the backward in two halves.

No other action waits for the half of the weights, so it fills time that would be idle. `pipeline`
imports this module to register the families."""

from __future__ import annotations

from .gpipe_1f1b_schedules import expand, per_lane, runs
from .schedule import Action, family

__all__: list[str] = []

_ONCE = "lanes that each hold one stage, or several that follow one another, such as 0, 1, 2"
_THERE_AND_BACK = "lanes that go there and back, such as 0, 1, 2, 2, 1, 0"


def _has_one_run_per_lane(lanes: tuple[int, ...]) -> bool:
    return len(runs(lanes)) == max(lanes) + 1


def _is_v_shaped(lanes: tuple[int, ...]) -> bool:
    return len(lanes) == 2 * (max(lanes) + 1) and lanes == lanes[::-1]


def _equal_activations(each: int, lanes: tuple[int, ...], micros: int) -> tuple[int, ...]:
    return per_lane(lanes, [min(micros, each)] * len(runs(lanes)))


@family(
    "zb-h1",
    "zero-bubble-h1",
    layout=_ONCE,
    fits=_has_one_run_per_lane,
    promise=lambda lanes, micros: _equal_activations(len(runs(lanes)), lanes, micros),
)
def zb_h1(lanes: tuple[int, ...], micros: int) -> list[list[Action]]:
    """Return the rows of ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024).

    The order is that of 1f1b. Run k lags k micro-batches behind with weights, so that all runs hold
    as many activations as the first run of 1f1b. With F = I = W, the bubble is a third of that of
    1f1b."""
    many = len(runs(lanes))
    return _rows_with_lag(lanes, micros, [many - k for k in range(many)], list(range(many)))


@family(
    "zb-h2",
    "zero-bubble-h2",
    layout=_ONCE,
    fits=_has_one_run_per_lane,
    promise=lambda lanes, micros: _equal_activations(2 * len(runs(lanes)) - 1, lanes, micros),
)
def zb_h2(lanes: tuple[int, ...], micros: int) -> list[list[Action]]:
    """Return the rows of ZB-H2 (same paper).

    It has nearly twice the forwards at the start and twice the lag of the weights, so nearly twice
    the activations. With F = I = W, and at least 2 p - 1 micro-batches for p runs, no lane is ever
    idle between its first action and its last."""
    many = len(runs(lanes))
    return _rows_with_lag(
        lanes, micros, [2 * (many - k) - 1 for k in range(many)], [2 * k for k in range(many)]
    )


def _rows_with_lag(
    lanes: tuple[int, ...], micros: int, warm: list[int], lag: list[int]
) -> list[list[Action]]:
    """Return rows in which run k starts with warm[k] forwards.

    Then follow I of a micro-batch, W of the one lag[k] before it, the next F, and so on. The
    remaining weights end the row."""
    rows: list[list[Action]] = [[] for _ in range(max(lanes) + 1)]
    for k, run in enumerate(runs(lanes)):
        work = [("F", micro) for micro in range(warm[k])]
        for micro in range(micros + lag[k]):
            work += [("I", micro), ("W", micro - lag[k]), ("F", micro + warm[k])]
        rows[run.lane] += expand(
            run, ((kind, micro) for kind, micro in work if 0 <= micro < micros)
        )
    return rows


@family(
    "zb-v",
    "zero-bubble-v",
    "zbv-zero-bubble",
    layout=_THERE_AND_BACK,
    fits=_is_v_shaped,
    promise=lambda lanes, micros: (2 * min(micros, max(lanes) + 1),) * (max(lanes) + 1),
)
def zb_v(lanes: tuple[int, ...], micros: int) -> list[list[Action]]:
    """Return the rows of ZB-V.

    The paper (Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024) calls it
    V-ZB. Lane r has stages r ("down") and 2p - 1 - r ("up") of 2p, each half as long as with a
    stage per lane. With F = I = W there is no bubble. The memory is that of 1f1b's first stage, and
    the same for every lane."""
    wide = max(lanes) + 1
    rows: list[list[Action]] = [[] for _ in range(wide)]
    for rank, lane in enumerate(lanes[:wide]):
        down, up, after = rank, 2 * wide - 1 - rank, wide - rank
        next_of = dict.fromkeys([(kind, stage) for kind in "FIW" for stage in (down, up)], 0)

        def emit(
            times: int,
            *work: tuple[str, int],
            lane: int = lane,
            next_of: dict[tuple[str, int], int] = next_of,
        ) -> None:
            for _ in range(times):
                for kind, stage in work:
                    rows[lane].append(Action(kind, stage, next_of[kind, stage]))
                    next_of[kind, stage] += 1

        total = max(micros, 2 * wide - 1)
        emit(2 * after - 1, ("F", down))
        emit(rank, ("F", up), ("F", down))
        emit(after, ("F", up), ("I", up), ("W", up))
        emit(
            total - next_of["F", down],
            ("F", down),
            ("I", down),
            ("W", down),
            ("F", up),
            ("I", up),
            ("W", up),
        )
        emit(total - next_of["F", up], ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
        emit(rank, ("I", down), ("I", up))
        emit(after, ("I", down), ("W", down))
        emit(total - next_of["W", up], ("W", up))
        emit(total - next_of["W", down], ("W", down))
    # A pipeline with fewer micro-batches than it takes to fill is a longer one with the rest left
    # out.
    return [[action for action in row if action.micro < micros] for row in rows]
