"""Formulas for the time of a training step under each pipeline schedule.

The search over stages (auto/inter_op) computes the time of every plan by these formulas. It then
simulates only the best plans. `simulate` runs a schedule on a simulated clock.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["COUNTS_FILLING", "PRICED", "bubble_left", "filling", "modelled", "usual_lanes"]


#: Schedules that these formulas know.
PRICED = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "zb-v")
#: Schedules whose formula contains the time of the first micro-batch in all stages.
COUNTS_FILLING = ("1f1b", "gpipe")


def usual_lanes(schedule: str, stages: int) -> tuple[int, ...]:
    """Return the lane of each chunk of a model that a schedule runs on ``stages`` lanes.

    >>> usual_lanes("1f1b", 2), usual_lanes("interleaved", 2), usual_lanes("zb-v", 2)
    ((0, 1), (0, 1, 0, 1), (0, 1, 1, 0))
    """
    if schedule == "interleaved":
        return tuple(range(stages)) * 2
    if schedule == "zb-v":
        return (*range(stages), *reversed(range(stages)))
    return tuple(range(stages))


def bubble_left(schedule: str, stages: int, micros: int) -> float:
    """Return the fraction of 1f1b's bubble that a schedule leaves.

    >>> bubble_left("1f1b", 4, 8), bubble_left("interleaved", 4, 8)
    (1.0, 0.5)
    """
    short = _shortage(stages, micros)
    return {
        "interleaved": 0.5,
        "zb-h1": 1 / 3,
        "zb-h2": (1 + short) / 3,
        "zb-v": (0.5 + short) / 3,
    }.get(schedule, 1.0)


def _shortage(stages: int, micros: int) -> float:
    """Return the fraction of 2 p - 1 micro-batches that a step on p stages lacks."""
    return max(0.0, 1 - micros / (2 * stages - 1))


def modelled(
    schedule: str,
    lanes: Sequence[int],
    micros: int,
    times: Sequence[float],
    steps: Sequence[float],
    transfers: Sequence[float],
    forwards: Sequence[float],
) -> float:
    """Return the time of a step by a schedule's formula.

    Every lane runs all micro-batches. The pipeline fills before and drains afterwards. There are p
    lanes and m micro-batches. A stage takes t seconds for each micro-batch, and u seconds once a
    step.

    The time of 1f1b and gpipe is the sum of t plus the maximum of (m - 1) t + u. The time of the
    other schedules is m t + u of the busiest lane, plus a bubble:

    - interleaved: with v chunks a lane, the bubble is t of (p - 1) / v stages.
    - zb-h1: the bubble is the forward time of p - 1 stages, because the backward of weights fills
      the rest.
    - zb-v: the bubble is half that of zb-h1, because a lane starts when half a stage has run its
      forward. With fewer than 2 p - 1 micro-batches the bubble is larger.
    - zb-h2: in a single step its simulated time is not less than that of zb-h1.
    """
    count = max(lanes) + 1
    work = [
        sum(t for t, where in zip(times, lanes, strict=True) if where == lane)
        for lane in range(count)
    ]
    own = [
        sum(u for u, where in zip(steps, lanes, strict=True) if where == lane)
        for lane in range(count)
    ]
    if schedule in COUNTS_FILLING:
        return (
            sum(work)
            + max((micros - 1) * t + u for t, u in zip(work, own, strict=True))
            + sum(transfers)
        )
    busiest = max(micros * t + u for t, u in zip(work, own, strict=True))
    return (
        busiest
        + filling(schedule, count, len(lanes), micros, sum(work), sum(forwards))
        + sum(transfers) * count / len(lanes)
    )


def filling(
    schedule: str, stages: int, chunks: int, micros: int, work: float, forward: float
) -> float:
    """Return the seconds for which a lane waits in a step.

    ``work``: seconds of one micro-batch in all stages. ``forward``: seconds of its forward pass.
    """
    short = _shortage(stages, micros)
    if schedule == "zb-h2":
        return forward * ((stages - 1) + short * (stages - 2)) / stages
    each = {
        "zb-h1": forward,
        "zb-v": forward * (0.5 + short),
        "interleaved": work * stages / chunks,
    }.get(schedule, work)
    return each * (stages - 1) / stages
