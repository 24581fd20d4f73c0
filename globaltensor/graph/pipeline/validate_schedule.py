"""The checker of schedules, and their maximum numbers of activations.

A schedule must run every action once, in an order that can end. Users and `resolve_schedule` call
`check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ...errors import ScheduleError
from .schedule import KINDS, Action, Schedule, default_schedule, find, schedule

__all__ = [
    "Flow",
    "check",
    "max_activations",
    "peak_activations",
    "resolve_schedule",
    "running_order",
    "stages_in_flight",
]

_SHOWN = 8  # number of errors of one schedule that a message shows


class Flow:
    """A dependency graph of a schedule's actions.

    ``edges`` are all the pairs (from stage, to stage) between which values cross, including skip
    connections; by default each stage feeds the next. Gradients cross in the other direction.
    Raises ScheduleError for an edge that does not go from a stage to a later one."""

    def __init__(
        self, schedule: Schedule, edges: Collection[tuple[int, int]] | None = None
    ) -> None:
        pairs = (
            [(k, k + 1) for k in range(schedule.stages - 1)]
            if edges is None
            else sorted(set(edges))
        )
        wrong = [pair for pair in pairs if not 0 <= pair[0] < pair[1] < schedule.stages]
        if wrong:
            raise ScheduleError(
                f"an edge goes from a stage to a later one of {schedule.stages}, not "
                f"{', '.join(f'{a} -> {b}' for a, b in wrong)}"
            )
        self.edges = tuple(pairs)
        self.sources: list[list[int]] = [
            [a for a, b in pairs if b == k] for k in range(schedule.stages)
        ]
        self.targets: list[list[int]] = [
            [b for a, b in pairs if a == k] for k in range(schedule.stages)
        ]
        self._halves = {(a.stage, a.micro) for row in schedule.rows for a in row if a.kind == "I"}

    def back(self, stage: int, micro: int) -> Action:
        """Return the action that computes the gradients of this stage's inputs."""
        return Action("I" if (stage, micro) in self._halves else "B", stage, micro)

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that must run before this one."""
        kind, stage, micro = action
        if kind == "F":
            return [Action("F", source, micro) for source in self.sources[stage]]
        if kind == "W":
            return [Action("I", stage, micro)]
        return [
            Action("F", stage, micro),
            *(self.back(target, micro) for target in self.targets[stage]),
        ]


def check(
    schedule: Schedule,
    edges: Collection[tuple[int, int]] | None = None,
    most: Sequence[int] | None = None,
) -> None:
    """Raise ScheduleError, with lane and position, unless a schedule is complete and can run.

    Lanes run their rows in order, and wait for what they need. They must run each action exactly
    once: F, and B or both I and W, of every stage and micro-batch. A schedule without any backward
    is valid too: evaluation. ``edges`` are as for `Flow`. ``most`` is the number of activations
    that each lane may hold."""
    problems = _shape(schedule) or list(_counts(schedule))
    if problems:
        more = len(problems) - _SHOWN
        raise ScheduleError(
            "\n  ".join(
                [
                    f"schedule {schedule.name} is incomplete or invalid:",
                    *problems[:_SHOWN],
                    *([f"and {more} more"] if more > 0 else []),
                ]
            )
        )
    for _ in running_order(schedule, Flow(schedule, edges)):
        pass
    if most is not None:
        lanes = enumerate(zip(peak_activations(schedule), most, strict=True))
        over = [
            f"lane {lane} holds {held}, may hold {may}" for lane, (held, may) in lanes if held > may
        ]
        if over:
            raise ScheduleError(
                "\n  ".join([f"schedule {schedule.name} holds too many activations:", *over])
            )


def _shape(schedule: Schedule) -> list[str]:
    lanes, stages = schedule.lanes, schedule.stages
    if len(lanes) != stages or not stages or schedule.micros < 1:
        return [
            (
                f"lanes must give the lane of each of its {stages} stages, and micros be at least "
                f"1: "
                f"lanes {list(lanes)}, micros {schedule.micros}"
            )
        ]
    if not all(0 <= lane < len(schedule.rows) for lane in lanes):
        return [
            (
                f"there are rows for lanes 0 to {len(schedule.rows) - 1}, but the stages are on "
                f"lanes "
                f"{list(lanes)}"
            )
        ]
    return []


def _counts(schedule: Schedule) -> Iterator[str]:
    places: dict[Action, list[int]] = {}
    for lane, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            entry = f"lane {lane} at position {position} has {action}"
            if action.kind not in KINDS:
                yield f"{entry}, but kinds are {', '.join(KINDS)}"
            elif not (0 <= action.stage < schedule.stages and 0 <= action.micro < schedule.micros):
                yield (
                    f"{entry}, but there are stages 0 to {schedule.stages - 1} and micro-batches "
                    f"0 to {schedule.micros - 1}"
                )
            elif schedule.lanes[action.stage] != lane:
                yield f"{entry}, but stage {action.stage} is on lane {schedule.lanes[action.stage]}"
            else:
                places.setdefault(action, []).append(position)
    for action, positions in places.items():
        if len(positions) > 1:
            yield (
                f"lane {schedule.lanes[action.stage]} has {action} {len(positions)} times, at "
                f"positions {', '.join(map(str, positions))}"
            )
    for stage, lane in enumerate(schedule.lanes):
        for micro in range(schedule.micros):
            does = "".join(kind for kind in KINDS if Action(kind, stage, micro) in places)
            if does not in (("FB", "FIW") if schedule.trains else ("F",)):
                yield (
                    f"lane {lane} does {does or 'nothing'} of stage {stage}, micro-batch "
                    f"{micro}: it must do F and B, or F, I and W, each once"
                )


def running_order(schedule: Schedule, flow: Flow) -> Iterator[tuple[int, Action]]:
    """Yield (lane, action) in an order in which the lanes can run their rows.

    Raises ScheduleError if all remaining actions wait for one another."""
    waiting_at: dict[Action, list[int]] = {}
    at, done = [0] * len(schedule.rows), set[Action]()
    able = list(range(len(schedule.rows)))
    while able:
        lane = able.pop()
        row = schedule.rows[lane]
        while at[lane] < len(row):
            action = row[at[lane]]
            missing = next((need for need in flow.needs(action) if need not in done), None)
            if missing is not None:
                waiting_at.setdefault(missing, []).append(lane)
                break
            done.add(action)
            at[lane] += 1
            able += waiting_at.pop(action, [])
            yield lane, action
    stuck = [lane for lane, row in enumerate(schedule.rows) if at[lane] < len(row)]
    if stuck:
        raise ScheduleError(
            "\n  ".join(
                [
                    f"schedule {schedule.name} would not end:",
                    *(_wait_text(schedule, flow, lane, at[lane], done) for lane in stuck),
                ]
            )
        )


def _wait_text(schedule: Schedule, flow: Flow, lane: int, position: int, done: set[Action]) -> str:
    action = schedule.rows[lane][position]
    missing = next(need for need in flow.needs(action) if need not in done)
    other = schedule.lanes[missing.stage]
    if missing not in schedule.rows[other]:
        where = f"lane {other} never does"
    else:
        where = (
            f"{'the same lane' if other == lane else f'lane {other}'} does at position "
            f"{schedule.rows[other].index(missing)}"
        )
    return f"lane {lane} at position {position} ({action}) waits for {missing}, which {where}"


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return the maximum number of activations that each lane holds at a time.

    Activations of a stage and micro-batch are held from F to B, or to W. In evaluation none are
    held."""
    return (
        tuple(peak for peak, _ in map(_peaks, schedule.rows))
        if schedule.trains
        else (0,) * len(schedule.rows)
    )


def stages_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the maximum number of activations that each stage holds at a time."""
    peaks = [_peaks(row)[1] for row in schedule.rows]
    return tuple(
        peaks[lane][stage] if schedule.trains else 0 for stage, lane in enumerate(schedule.lanes)
    )


def _peaks(row: Sequence[Action]) -> tuple[int, Counter[int]]:
    now, peaks, total, peak = Counter[int](), Counter[int](), 0, 0
    for kind, stage, _ in row:
        change = {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        now[stage] += change
        total += change
        peaks[stage], peak = max(peaks[stage], now[stage]), max(peak, total)
    return peak, peaks


def resolve_schedule(
    wanted: str | Schedule | None,
    lanes: Sequence[int],
    micros: int,
    edges: Collection[tuple[int, int]] | None = None,
) -> Schedule:
    """Return the schedule to run for stages on ``lanes``, after checking it.

    It is the schedule of this name, the default one for None, or the passed one. Raises
    ScheduleError if the name does not exist for these lanes. Also raises it if the schedule was
    written for other lanes or another number of micro-batches, or cannot run.

    >>> resolve_schedule(None, (0, 1, 0, 1), 4).name
    'interleaved'
    """
    made = (
        wanted
        if isinstance(wanted, Schedule)
        else schedule(default_schedule(lanes) if wanted is None else wanted, lanes, micros)
    )
    if (made.lanes, made.micros) != (tuple(lanes), micros):
        raise ScheduleError(
            f"schedule {made.name} is for stages on lanes {list(made.lanes)} and {made.micros} "
            f"micro-batches; "
            f"here stages are on lanes {list(lanes)}, and there are {micros} micro-batches"
        )
    check(made, edges)
    return made


def max_activations(
    name: str, lanes: Sequence[int], micros: int, **options: Any
) -> tuple[int, ...]:
    """Return the maximum number of activations that each lane will hold with a schedule.

    The bound holds for any order in which its lanes come to run.

    >>> max_activations("1f1b", (0, 1, 2), 8), max_activations("gpipe", (0, 1, 2), 8)
    ((3, 2, 1), (8, 8, 8))
    """
    family, where, count = find(name, lanes, micros, options)
    return family.promise(where, count, **options)
