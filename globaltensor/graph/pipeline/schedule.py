"""Schedules as data: the actions of each lane of a pipeline, in order.

Making a schedule is pure: every rank makes the same one from the same arguments. The families
(gpipe, 1f1b, interleaved, zb-h1, ...) are in files of their own and register here. A user's file
serves as well (`Schedule.load`).
"""

from __future__ import annotations

import difflib
import json
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..._base.atomic_file import write_text
from ...errors import ScheduleError

__all__ = [
    "FAMILIES",
    "Action",
    "Family",
    "Schedule",
    "Span",
    "default_schedule",
    "family",
    "find",
    "in_turn",
    "parse_schedule",
    "schedule",
]

KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_TOKEN = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """An action of a lane, written "2F0": stage 2, forward, micro-batch 0.

    ``kind`` is F (forward), B (full backward), I (backward of inputs only) or W (backward of
    weights only).

    >>> str(Action("F", 2, 0))
    '2F0'
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    @staticmethod
    def parse(text: str) -> Action:
        """Parse the text that ``str`` wrote. Raises ValueError for anything else."""
        match = _TOKEN.fullmatch(text)
        if not match:
            raise ValueError(
                f"{text!r} is no action: write stage, kind and micro-batch, such as 2F0; kinds "
                f"are {_kinds()}"
            )
        return Action(match[2], int(match[1]), int(match[3]))


class Span(NamedTuple):
    """The start and end of a lane's action in seconds, measured or simulated."""

    lane: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """A schedule: the actions of every lane, in order.

    A lane is a set of ranks that holds one or more stages. ``lanes[k]`` is the lane of stage k, and
    ``rows[l]`` holds the actions of lane l. Sends and receives follow from the rows and are not in
    them. `check` tests whether a schedule can run.

    >>> print(schedule("1f1b", lanes=(0, 1), micros=3))
    1f1b: 2 stages, 3 micro-batches
    lane 0  0F0 0F1 0B0 0F2 0B1 0B2
    lane 1  1F0 1B0 1F1 1B1 1F2 1B2
    """

    name: str
    stages: int
    micros: int
    rows: tuple[tuple[Action, ...], ...]
    lanes: tuple[int, ...]

    @property
    def trains(self) -> bool:
        """True if there is a backward: a schedule without one is for evaluation."""
        return any(action.kind != "F" for row in self.rows for action in row)

    def __str__(self) -> str:
        wide = len(str(len(self.rows) - 1))
        lines = [
            f"lane {lane:{wide}}  {' '.join(map(str, row))}".rstrip()
            for lane, row in enumerate(self.rows)
        ]
        return "\n".join(
            [
                (
                    f"{self.name}: {_count(self.stages, 'stage')}, "
                    f"{_count(self.micros, 'micro-batch', 'micro-batches')}"
                ),
                *lines,
            ]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule as JSON: name, lanes, micros, and a line of actions for each lane."""
        rows = [" ".join(map(str, row)) for row in self.rows]
        data = {"name": self.name, "lanes": list(self.lanes), "micros": self.micros, "rows": rows}
        write_text(path, json.dumps(data, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a file that `save` or a user wrote.

        Raises ScheduleError, with the place, if the file is not a schedule. Whether the schedule
        can run is left to `check`."""
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ScheduleError(f"{os.fspath(path)} is not JSON: {error}") from None
        return _read(data, os.fspath(path))


def _read(data: Any, path: str) -> Schedule:
    keys = ("name", "lanes", "micros", "rows")
    if not isinstance(data, dict) or set(data) != set(keys):
        description = (
            f"the keys {', '.join(map(repr, data)) or 'none'}"
            if isinstance(data, dict)
            else type(data).__name__
        )
        raise ScheduleError(
            f"{path}: a schedule is an object with the keys {', '.join(map(repr, keys))}, but "
            f"this has {description}"
        )
    name, lanes, micros, rows = (data[key] for key in keys)
    if not isinstance(name, str):
        raise ScheduleError(f"{path}: name must be text, not {name!r}")
    if not isinstance(lanes, list):
        raise ScheduleError(
            f"{path}: lanes must be a list, the lane of each stage, such as [0, 1], not {lanes!r}"
        )
    try:
        lanes, micros = _check_lanes(lanes), _check_micros(micros)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
        raise ScheduleError(
            f'{path}: rows must be a list with one text of actions for each lane, such as "0F0 0B0"'
        )
    if len(rows) != max(lanes) + 1:
        raise ScheduleError(
            f"{path}: {_count(len(rows), 'row')} for {_count(max(lanes) + 1, 'lane')}"
        )
    return Schedule(
        name,
        len(lanes),
        micros,
        tuple(_row(row, f"{path}: lane {lane}") for lane, row in enumerate(rows)),
        lanes,
    )


def _row(text: str, where: str) -> tuple[Action, ...]:
    actions = []
    for position, token in enumerate(text.split()):
        try:
            actions.append(Action.parse(token))
        except ValueError as error:
            raise ScheduleError(f"{where}, position {position}: {error}") from None
    return tuple(actions)


class Family(NamedTuple):
    """A family of schedules.

    ``rows(lanes, micros, **options)`` returns the rows, ``fits(lanes)`` whether it can make them,
    and ``layout`` describes the lanes that it needs. ``promise(lanes, micros)`` returns the maximum
    number of activations that each lane will ever hold."""

    name: str
    rows: Callable[..., Sequence[Iterable[Action]]]
    layout: str
    fits: Callable[[tuple[int, ...]], bool]
    promise: Callable[..., tuple[int, ...]]
    options: frozenset[str]


FAMILIES: dict[str, Family] = {}
_Rows = TypeVar("_Rows", bound=Callable[..., Sequence[Iterable[Action]]])
_SPELLINGS: dict[str, str] = {}


def family(
    name: str,
    *others: str,
    layout: str = "any lanes",
    fits: Callable[[tuple[int, ...]], bool] = lambda lanes: True,
    promise: Callable[..., tuple[int, ...]],
    options: Iterable[str] = (),
) -> Callable[[_Rows], _Rows]:
    """Register the decorated function as the family ``name``, also spelt as ``others``."""

    def register(rows: _Rows) -> _Rows:
        FAMILIES[name] = Family(name, rows, layout, fits, promise, frozenset(options))
        _SPELLINGS.update({_normalized_name(spelling): name for spelling in (name, *others)})
        return rows

    return register


def schedule(name: str, lanes: Sequence[int], micros: int, **options: Any) -> Schedule:
    """Return the schedule of this name for stages on ``lanes`` and ``micros`` micro-batches.

    ``lanes[k]`` is the lane of stage k. Case, hyphens, underscores and spaces in a name do not
    count. Raises ScheduleError for an unknown name, and for lanes or options that the schedule
    cannot do.

    >>> schedule("GPipe", [0, 1], micros=2).rows[1]
    (Action(kind='F', stage=1, micro=0), Action(kind='F', stage=1, micro=1), Action(kind='B', stage=1, micro=0), Action(kind='B', stage=1, micro=1))
    """  # noqa: E501
    schedule_family, where, count = find(name, lanes, micros, options)
    return Schedule(
        schedule_family.name,
        len(where),
        count,
        tuple(tuple(row) for row in schedule_family.rows(where, count, **options)),
        where,
    )


def parse_schedule(wanted: str | os.PathLike[str] | Schedule | None) -> str | Schedule | None:
    """Parse a schedule that a user passes.

    Return the registered name for a name, and the schedule in the file for a path or a text that
    ends in ".json". A Schedule and None are returned unchanged. Raises ScheduleError for an unknown
    name, or a file without a schedule.

    >>> parse_schedule("ZB_H1")
    'zb-h1'
    """
    if wanted is None or isinstance(wanted, Schedule):
        return wanted
    if not isinstance(wanted, (str, os.PathLike)):
        raise ScheduleError(
            f"a schedule is a name, a Schedule or the path of a file with one, not {wanted!r}"
        )
    if isinstance(wanted, str) and not wanted.endswith(".json"):
        return _family_named(wanted).name
    try:
        return Schedule.load(wanted)
    except OSError as error:
        raise ScheduleError(f"no schedule in {os.fspath(wanted)}: {error.strerror}") from error


def default_schedule(lanes: Sequence[int]) -> str:
    """Return the name of the default schedule: interleaved if lanes take several stages in turn.

    For other lanes it is 1f1b.

    >>> default_schedule((0, 1, 2)), default_schedule((0, 1, 0, 1))
    ('1f1b', 'interleaved')
    """
    where = _check_lanes(lanes)
    return "interleaved" if in_turn(where) and len(where) > max(where) + 1 > 1 else "1f1b"


def in_turn(lanes: tuple[int, ...]) -> bool:
    """Return True if the lanes take one stage each, in repeated order: 0, 1, 2, 0, 1, 2."""
    turn = lanes[: max(lanes) + 1]
    return (
        len(set(turn)) == len(turn)
        and not len(lanes) % len(turn)
        and lanes == turn * (len(lanes) // len(turn))
    )


def find(
    name: str, lanes: Sequence[int], micros: int, options: Collection[str] = ()
) -> tuple[Family, tuple[int, ...], int]:
    """Return the family of this name, with the checked lanes and micros.

    Raises ScheduleError where `schedule` does."""
    schedule_family, where, count = _family_named(name), _check_lanes(lanes), _check_micros(micros)
    if not schedule_family.fits(where):
        able = ", ".join(f.name for f in FAMILIES.values() if f.fits(where))
        raise ScheduleError(
            f"{schedule_family.name} needs {schedule_family.layout}; the stages are on lanes "
            f"{list(where)}. For these there are: {able}"
        )
    unknown = sorted(set(options) - schedule_family.options)
    if unknown:
        raise ScheduleError(
            f"{schedule_family.name} has no option {', '.join(unknown)}: it has "
            f"{', '.join(sorted(schedule_family.options)) or 'none'}"
        )
    return schedule_family, where, count


def _family_named(name: str) -> Family:
    plain = _normalized_name(name)
    if plain not in _SPELLINGS:
        near = difflib.get_close_matches(plain, _SPELLINGS, 1)
        hint = f" (did you mean {_SPELLINGS[near[0]]}?)" if near else ""
        names = "".join(f"\n  {f.name}: {f.layout}" for f in FAMILIES.values())
        raise ScheduleError(
            f"there is no schedule {name!r}{hint}. There are, for these lanes:{names}"
        )
    return FAMILIES[_SPELLINGS[plain]]


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_ ]", "", str(name)).lower()


def _check_lanes(lanes: Sequence[int]) -> tuple[int, ...]:
    where = tuple(map(_as_integer, lanes))
    if not where or min(where) < 0:
        raise ScheduleError(
            f"lanes must say on which lane each stage is, in numbers from 0, not {list(lanes)!r}"
        )
    idle = sorted(set(range(max(where))) - set(where))
    if idle:
        raise ScheduleError(
            f"lanes are numbered from 0 without gaps, but no stage is on lane "
            f"{', '.join(map(str, idle))} of {list(where)}"
        )
    return where


def _check_micros(micros: int) -> int:
    if _as_integer(micros) < 1:
        raise ScheduleError(f"micros must be a number of micro-batches, at least 1, not {micros!r}")
    return _as_integer(micros)


def _as_integer(number: Any) -> int:
    """Return the number as an int, or -1 if it is not an integer."""
    try:
        return -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return -1


def _kinds() -> str:
    return ", ".join(f"{kind} ({meaning})" for kind, meaning in KINDS.items())


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
