"""Tests of pipeline schedules: each family on all lanes that it accepts, the checker, the simulator
against a graph's longest path. Files, drawings and timelines are tested too.

The oracle here does not use the package's own walk over the rows. It makes one graph of row order
and data, and asks graphlib for an order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from globaltensor.errors import ScheduleError
from globaltensor.graph.pipeline import (
    check,
    default_schedule,
    max_activations,
    parse_schedule,
    peak_activations,
    resolve_schedule,
    save_trace,
    schedule,
    simulate,
    timeline,
    trace,
)
from globaltensor.graph.pipeline.schedule import FAMILIES, Action, Schedule, Span
from globaltensor.graph.pipeline.validate_schedule import stages_in_flight

ANYWHERE = ("gpipe", "1f1b", "forward")
TRAINING = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
UNIT = {"F": 1.0, "I": 1.0, "W": 1.0}  # so a B costs 2


def chain(stages: int) -> set[tuple[int, int]]:
    return {(k, k + 1) for k in range(stages - 1)}


def layout(name: str, p: int, turns: int = 2) -> tuple[int, ...]:
    """Return the layout of p lanes that the family needs."""
    line = tuple(range(p))
    return line + line[::-1] if name == "zb-v" else line * turns if name == "interleaved" else line


@st.composite
def any_lanes(draw: Any) -> tuple[int, ...]:
    """Draw 1 to 4 lanes for 1 to 7 stages, in any order."""
    wild = draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
    names = sorted(set(wild))
    return tuple(names.index(lane) for lane in wild)


def graph(s: Schedule, edges: set[tuple[int, int]]) -> dict[Any, list[Any]]:
    """Return a graph: node -> the nodes that must run before it. Nodes are actions, and messages
    (action, to stage). Messages on one link follow one another."""
    halves = {a[1:] for row in s.rows for a in row if a.kind == "I"}
    nodes: dict[Any, list[Any]] = {}

    def after(action: Action, before: Action, message: bool = True) -> None:
        crosses = message and s.lanes[before.stage] != s.lanes[action.stage]
        nodes.setdefault(action, []).append((before, action.stage) if crosses else before)
        if crosses:
            nodes.setdefault((before, action.stage), []).append(before)

    for row in s.rows:
        for action, following in pairwise(row):
            after(following, action, message=False)
        for action in row:
            kind, stage, micro = action
            nodes.setdefault(action, [])
            if kind == "F":
                for a, _ in (e for e in edges if e[1] == stage):
                    after(action, Action("F", a, micro))
            elif kind == "W":
                after(action, Action("I", stage, micro))
            else:
                after(action, Action("F", stage, micro))
                for _, b in (e for e in edges if e[0] == stage):
                    after(action, Action("I" if (b, micro) in halves else "B", b, micro))
    for row in s.rows:
        for a, b in product(range(s.stages), repeat=2):
            messages = [(action, b) for action in row if action.stage == a and (action, b) in nodes]
            for one, two in pairwise(messages):
                nodes[two].append(one)
    return nodes


def longest(
    s: Schedule,
    costs: Mapping[tuple[str, int], float],
    travel: Mapping[tuple[int, int], float],
    edges: set[tuple[int, int]],
) -> dict[Any, float]:
    """Return the end time of each node. Raises CycleError for a deadlock."""
    nodes, ends = graph(s, edges), dict[Any, float]()
    for node in TopologicalSorter(nodes).static_order():
        if isinstance(node, Action):
            seconds = costs[node.kind, node.stage]
        else:
            a, b = node[0].stage, node[1]
            seconds = travel.get((a, b), travel.get((b, a), 0.0))
        ends[node] = max((ends[before] for before in nodes[node]), default=0.0) + seconds
    return ends


def whole(s: Schedule) -> bool:
    """Return True if the schedule has every action once, on its lane."""
    actions = [a for row in s.rows for a in row]
    placed = all(s.lanes[a.stage] == lane for lane, row in enumerate(s.rows) for a in row)
    each = {
        (k, m): "".join(sorted(a.kind for a in actions if a[1:] == (k, m)))
        for k in range(s.stages)
        for m in range(s.micros)
    }
    return (
        placed
        and len(actions) == len(set(actions))
        and (set(each.values()) <= {"BF", "FIW"} or set(each.values()) == {"F"})
    )


# Every family, on all lanes that it accepts.


@given(any_lanes(), st.integers(1, 9), st.sampled_from(ANYWHERE), st.booleans())
def test_any_lanes_and_any_number_of_micro_batches(
    lanes: tuple[int, ...], micros: int, name: str, eager: bool
) -> None:
    options = {"eager": eager} if name == "1f1b" else {}
    s = schedule(name, lanes, micros, **options)
    assert whole(s)
    longest(
        s,
        dict.fromkeys([(k, n) for k in "FBIW" for n in range(s.stages)], 1.0),
        {},
        chain(s.stages),
    )
    check(s, most=max_activations(name, lanes, micros, **options))


@given(
    st.sampled_from(("interleaved", "zb-h1", "zb-h2", "zb-v")),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(1, 30),
)
def test_every_family_keeps_its_promise(name: str, p: int, turns: int, micros: int) -> None:
    lanes = layout(name, p, turns)
    s = schedule(name, lanes, micros)
    assert whole(s)
    longest(
        s,
        dict.fromkeys([(k, n) for k in "FBIW" for n in range(s.stages)], 1.0),
        {},
        chain(s.stages),
    )
    check(s, most=max_activations(name, lanes, micros))


@given(st.permutations(range(4)), st.integers(1, 9))
def test_lanes_may_come_in_any_order(order: list[int], micros: int) -> None:
    back = {lane: k for k, lane in enumerate(order)}
    for name in ("interleaved", "zb-v", "zb-h1", "zb-h2", "1f1b", "gpipe"):
        lanes = layout(name, 4)
        s, plain = schedule(name, [order[k] for k in lanes], micros), schedule(name, lanes, micros)
        assert s.rows == tuple(plain.rows[back[lane]] for lane in range(4)), name


def test_stages_that_follow_one_another_on_a_lane_act_as_one() -> None:
    s = schedule("1f1b", (0, 0, 1), 2)
    assert str(s).splitlines()[1:] == [
        "lane 0  0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1",
        "lane 1  2F0 2B0 2F1 2B1",
    ]
    assert (
        " ".join(map(str, schedule("zb-h1", (0, 0), 2).rows[0]))
        == "0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1"
    )


def test_gradients_accumulate_in_the_order_of_micro_batches() -> None:
    for name in TRAINING:
        s = schedule(name, layout(name, 3), 7)
        for stage in range(s.stages):
            for kind in "FBIW":
                micros = [
                    a.micro for row in s.rows for a in row if a.kind == kind and a.stage == stage
                ]
                assert micros == sorted(micros), (name, kind, stage)


# Known figures, derived by hand from the papers.


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("m", [1, 2, 4, 7, 12])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, m: int, p: int) -> None:
    run = simulate(schedule(name, range(p), m), {"F": 1.0, "B": 2.0})
    assert run.makespan == 3 * (m + p - 1)
    assert run.bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(
    ("p", "turns", "m"),
    [(2, 2, 2), (2, 2, 3), (2, 3, 8), (3, 2, 7), (4, 2, 8), (4, 4, 13), (5, 3, 17)],
)
def test_bubble_of_interleaved_is_divided_by_the_turns(p: int, turns: int, m: int) -> None:
    """The interleaved bubble is divided by the number of turns v. With m >= p, a step takes 3 (m v
    + p - 1) units, each a third of a stage. 1f1b with stages v times as long takes 3 (m v + (p - 1)
    v)."""
    run = simulate(
        schedule("interleaved", layout("interleaved", p, turns), m), {"F": 1.0, "B": 2.0}
    )
    assert run.makespan == 3 * (m * turns + p - 1)


def test_interleaved_of_one_turn_is_1f1b() -> None:
    for m in (1, 2, 5, 9):
        assert schedule("interleaved", (0, 1, 2), m).rows == schedule("1f1b", (0, 1, 2), m).rows


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_zero_bubbles_with_equal_costs(p: int) -> None:
    """The bubbles of zero-bubble schedules match Qi et al. ZB-H1's is (p - 1) (F + I - W), a third
    of 1f1b's. ZB-H2 and ZB-V have none. A stage of ZB-V is half as long."""
    m, half = 2 * p + 1, dict.fromkeys(UNIT, 0.5)
    runs = {
        name: simulate(schedule(name, layout(name, p), m), half if name == "zb-v" else UNIT)
        for name in ("1f1b", "zb-h1", "zb-h2", "zb-v")
    }
    assert {name: run.period for name, run in runs.items()} == {
        "1f1b": 3 * (m + p - 1),
        "zb-h1": 3 * m + p - 1,
        "zb-h2": 3 * m,
        "zb-v": 3 * m,
    }
    assert runs["zb-h2"].period_bubble == runs["zb-v"].period_bubble == 0
    # The last lane cannot start before the first forward reaches it, so a single step takes that
    # much longer.
    assert [run.makespan for run in runs.values()] == [
        3 * (m + p - 1),
        3 * m + p - 1,
        3 * m + p - 1,
        3 * m + (p - 1) / 2,
    ]
    assert runs["zb-v"].bubble < runs["zb-h2"].bubble == runs["zb-h1"].bubble < runs["1f1b"].bubble


def test_memory_as_in_the_papers() -> None:
    p, m = 4, 12
    held = {
        name: peak_activations(schedule(name, layout(name, p), m))
        for name in (*TRAINING, "forward")
    }
    assert held == {
        "gpipe": (12,) * 4,
        "1f1b": (4, 3, 2, 1),
        "interleaved": (11, 9, 7, 5),  # the stages are half as large
        "zb-h1": (4,) * 4,
        "zb-h2": (7,) * 4,
        "zb-v": (8,) * 4,  # the stages are half as large
        "forward": (0,) * 4,
    }
    assert held == {name: max_activations(name, layout(name, p), m) for name in held}
    assert stages_in_flight(schedule("1f1b", (0, 0, 1), 9)) == (2, 2, 1)


def test_eager_1f1b_hides_transfers() -> None:
    """Eager 1f1b hides transfers. A round trip of a forward and its gradient crosses twice. With
    transfers as long as a forward, plain 1f1b waits for them in each round, and eager 1f1b does
    not."""
    plain, eager = (
        simulate(schedule("1f1b", range(4), 16, eager=e), {"F": 1.0, "B": 2.0}, transfer=1.0)
        for e in (False, True)
    )
    assert eager.makespan == 3 * (16 + 3) + 2 * 3 < plain.makespan
    assert peak_activations(schedule("1f1b", range(4), 16, eager=True)) == (7, 5, 3, 1)


def test_best() -> None:
    assert [
        default_schedule(lanes)
        for lanes in (
            (0,),
            (0, 0),
            (0, 1, 2),
            (0, 1, 0, 1),
            (1, 0, 1, 0),
            (0, 1, 1, 0),
            (0, 0, 1),
            (0, 1, 0),
        )
    ] == [*("1f1b", "1f1b", "1f1b", "interleaved", "interleaved", "1f1b", "1f1b", "1f1b")]


# Names and layouts.


@pytest.mark.parametrize(
    ("spelling", "name", "lanes"),
    [
        *(
            ("GPipe", "gpipe", (0, 1)),
            ("1F1B", "1f1b", (0, 1)),
            ("zb_h1", "zb-h1", (0, 1)),
            ("ZBH1", "zb-h1", (0, 1)),
            ("ZB-H2", "zb-h2", (0, 1)),
        ),
        *(
            ("ZB-V", "zb-v", (0, 1, 1, 0)),
            ("zero bubble v", "zb-v", (0, 0)),
            ("Interleaved1F1B", "interleaved", (0, 1, 0, 1)),
            ("Forward", "forward", (0,)),
        ),
    ],
)
def test_spellings(spelling: str, name: str, lanes: tuple[int, ...]) -> None:
    assert schedule(spelling, lanes, 2).name == name


@pytest.mark.parametrize(
    ("name", "lanes", "micros", "options", "message"),
    [
        (
            "interleaved",
            (0, 1, 1, 0),
            2,
            {},
            (
                "interleaved needs lanes that take one stage each, in turn, such as 0, 1, 0, 1; "
                "the "
                "stages are on lanes [0, 1,"
            ),
        ),
        (
            "zb-h1",
            (0, 1, 0),
            2,
            {},
            (
                "zb-h1 needs lanes that each hold one stage, or several that follow one another, "
                "such "
                "as 0, 1, 2; the stages are on lanes"
            ),
        ),
        (
            "zb-v",
            (0, 1),
            2,
            {},
            (
                "zb-v needs lanes that go there and back, such as 0, 1, 2, 2, 1, 0; the stages "
                "are on "
                "lanes [0, 1]"
            ),
        ),
        (
            "zb-v",
            (0, 1),
            2,
            {},
            "For these there are: forward, gpipe, 1f1b, interleaved, zb-h1, zb-h2",
        ),
        (
            "1f1c",
            (0, 1),
            2,
            {},
            (
                "there is no schedule '1f1c' (did you mean 1f1b?). There are, for these lanes:\n  "
                "forward: any lanes\n  gpipe: any lanes"
            ),
        ),
        (
            "1f1b",
            (),
            2,
            {},
            "lanes must say on which lane each stage is, in numbers from 0, not []",
        ),
        ("1f1b", (0, 2), 2, {}, "no stage is on lane 1 of [0, 2]"),
        ("1f1b", (0, "1"), 2, {}, "in numbers from 0, not [0, '1']"),
        ("1f1b", (0, 1), 0, {}, "micros must be a number of micro-batches, at least 1, not 0"),
        ("1f1b", (0, 1), True, {}, "at least 1, not True"),
        ("1f1b", (0, 1), 2, {"warm": 3}, "1f1b has no option warm: it has eager"),
        ("gpipe", (0, 1), 2, {"eager": True}, "gpipe has no option eager: it has none"),
    ],
)
def test_what_cannot_be(
    name: str, lanes: Any, micros: Any, options: dict[str, Any], message: str
) -> None:
    for make in (schedule, max_activations):
        with pytest.raises(ScheduleError) as caught:
            make(name, lanes, micros, **options)
        assert message in str(caught.value)


def test_the_error_lists_every_family() -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule("round", (0, 1), 2)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == list(
        FAMILIES
    )


def test_what_a_user_may_give(tmp_path: Path) -> None:
    s = schedule("gpipe", (0, 1), 3)
    s.save(tmp_path / "mine.json")
    assert [
        parse_schedule(wanted)
        for wanted in ("OneFOneB", None, s, tmp_path / "mine.json", str(tmp_path / "mine.json"))
    ] == ["1f1b", None, s, s, s]
    for wanted, message in (
        ("1f1c", "did you mean 1f1b"),
        (3, "not 3"),
        (tmp_path / "none.json", "No such file"),
        ("none.json", "no schedule in none.json"),
    ):
        with pytest.raises(ScheduleError, match=message):
            parse_schedule(wanted)  # type: ignore[arg-type]
    assert [resolve_schedule(wanted, (0, 1), 3).name for wanted in (None, "zb-h1", s)] == [
        "1f1b",
        "zb-h1",
        "gpipe",
    ]
    with pytest.raises(
        ScheduleError,
        match=(
            r"gpipe is for stages on lanes \[0, 1\] and 3 micro-batches; here stages are on "
            r"lanes \[0, 1\], and there are 4"
        ),
    ):
        resolve_schedule(s, (0, 1), 4)
    with pytest.raises(ScheduleError, match="would not end"):
        resolve_schedule(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), (0, 1), 2)


# The checker.


def by_hand(*rows: str, lanes: tuple[int, ...] | None = None, micros: int = 2) -> Schedule:
    where = lanes or tuple(range(len(rows)))
    return Schedule(
        "mine",
        len(where),
        micros,
        tuple(tuple(map(Action.parse, row.split())) for row in rows),
        where,
    )


def refused(s: Schedule, **options: Any) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(s, **options)
    return str(caught.value)


def test_a_deadlock_is_named() -> None:
    assert refused(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")) == (
        "schedule mine would not end:\n"
        "  lane 0 at position 1 (0B0) waits for 1B0, which lane 1 does at position 2\n"
        "  lane 1 at position 1 (1F1) waits for 0F1, which lane 0 does at position 2"
    )
    assert refused(by_hand("0F0 0W0 0I0", micros=1)).endswith(
        "\n  lane 0 at position 1 (0W0) waits for 0I0, which the same lane does at position 2"
    )


@pytest.mark.parametrize(
    ("rows", "lanes", "message"),
    [
        (("0F0 0F0 0F1 0B0 0B1",), None, "lane 0 has 0F0 2 times, at positions 0, 1"),
        (
            ("0F0 0F1 0B0",),
            None,
            "lane 0 does F of stage 0, micro-batch 1: it must do F and B, or F, I and W, each once",
        ),
        (("0F0 0F1 0B0 0I1",), None, "lane 0 does FI of stage 0, micro-batch 1"),
        (("0F0 0F1 0B0 0B1 0W1",), None, "lane 0 does FBW of stage 0, micro-batch 1"),
        (
            ("0F0 0B0 0F1 0B1 0F2",),
            None,
            "lane 0 at position 4 has 0F2, but there are stages 0 to 0 and micro-batches 0 to 1",
        ),
        (
            ("0F0 0F1 1F0 1F1", "1F0 1F1"),
            None,
            "lane 0 at position 2 has 1F0, but stage 1 is on lane 1",
        ),
        (
            ("0F0 0F1 0B0 0B1",),
            (0, 1),
            "there are rows for lanes 0 to 0, but the stages are on lanes [0, 1]",
        ),
    ],
)
def test_what_is_not_whole(
    rows: tuple[str, ...], lanes: tuple[int, ...] | None, message: str
) -> None:
    assert message in refused(by_hand(*rows, lanes=lanes))


def test_many_errors_are_counted() -> None:
    lines = refused(by_hand("0F0", micros=20)).splitlines()
    assert len(lines) == 10
    assert lines[-1] == "  and 11 more"


def test_too_many_activations() -> None:
    check(schedule("gpipe", (0, 1), 4), most=(4, 4))
    assert (
        refused(schedule("gpipe", (0, 1), 4), most=(4, 3))
        == "schedule gpipe holds too many activations:\n  lane 1 holds 4, may hold 3"
    )


@given(st.data())
def test_the_checker_agrees_with_the_graph(data: Any) -> None:
    """The checker agrees with the graph. Rows are shuffled, and actions are dropped, doubled or
    moved. A schedule is refused exactly if it cannot run."""
    name = data.draw(st.sampled_from(["1f1b", "gpipe", "zb-v"]))
    s = schedule(name, layout(name, data.draw(st.integers(1, 3))), data.draw(st.integers(1, 3)))
    rows = [list(row) for row in s.rows]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(rows))
        assume(row)
        i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        match data.draw(st.sampled_from(["swap", "swap", "swap", "lose", "double", "move"])):
            case "swap":
                row[i], row[j] = row[j], row[i]
            case "lose":
                del row[i]
            case "double":
                row.insert(j, row[i])
            case "move":
                data.draw(st.sampled_from(rows)).append(row.pop(i))
    changed = Schedule("changed", s.stages, s.micros, tuple(map(tuple, rows)), s.lanes)
    try:
        right = whole(changed) and bool(
            longest(
                changed,
                dict.fromkeys([(k, n) for k in "FBIW" for n in range(s.stages)], 1.0),
                {},
                chain(s.stages),
            )
        )
    except CycleError:
        right = False
    if right:
        check(changed)
    else:
        refused(changed)


def test_edges_say_what_waits_for_what() -> None:
    """Edges define the dependencies between stages. In two towers, stages 0 and 1 both feed 2, and
    not each other."""
    towers = by_hand("0F0 0B0", "1F0 2F0 2B0 1B0", lanes=(0, 1, 1), micros=1)
    check(towers, edges={(0, 2), (1, 2)})
    crossed = by_hand("1F0 0F0 1B0 0B0", "2F0 2B0", lanes=(0, 0, 1), micros=1)
    check(crossed, edges={(0, 2), (1, 2)})
    assert (
        "lane 0 at position 0 (1F0) waits for 0F0, which the same lane does at position 1"
        in refused(crossed)
    )
    skip = by_hand("0F0 2F0 2B0 0B0", "1F0 1B0", lanes=(0, 1, 0), micros=1)
    check(skip, edges={(0, 1), (1, 2), (0, 2)})
    early = by_hand("0F0 2F0 0B0 2B0", "1F0 1B0", lanes=(0, 1, 0), micros=1)
    assert (
        "lane 0 at position 2 (0B0) waits for 2B0, which the same lane does at position 3"
        in refused(early, edges={(0, 2)})
    )
    assert "an edge goes from a stage to a later one of 2, not 0 -> 2, 1 -> 0" in refused(
        schedule("gpipe", (0, 1), 1), edges=[(1, 0), (0, 2)]
    )


# The simulator.


@given(st.data())
def test_the_simulator_finds_the_longest_path(data: Any) -> None:
    name = data.draw(st.sampled_from(TRAINING))
    p = data.draw(st.integers(1, 4))
    lanes = data.draw(any_lanes()) if name in ANYWHERE else layout(name, p)
    s, number = schedule(name, lanes, data.draw(st.integers(1, 6))), st.integers(0, 9).map(float)
    costs = {(kind, stage): data.draw(number) for kind in "FBIW" for stage in range(s.stages)}
    skips = data.draw(
        st.sets(
            st.tuples(st.integers(0, s.stages - 1), st.integers(0, s.stages - 1)).filter(
                lambda e: e[0] < e[1]
            ),
            max_size=3,
        )
    )
    edges = chain(s.stages) | skips if s.stages > 1 else set()
    travel = {edge: data.draw(number) for edge in sorted(edges)} | {
        (b, a): data.draw(number) for a, b in sorted(edges) if data.draw(st.booleans())
    }
    run, ends = simulate(s, costs, travel, edges=edges), longest(s, costs, travel, edges)
    assert {span.action: span.end for span in run.spans} == {
        a: end for a, end in ends.items() if isinstance(a, Action)
    }
    assert all(
        span.end - span.start == costs[span.action.kind, span.action.stage]
        and span.lane == s.lanes[span.action.stage]
        for span in run.spans
    )
    assert run.in_flight == peak_activations(s)
    assert simulate(s, costs, travel, edges=edges) == run
    assert simulate(s, costs, travel) == simulate(
        s, costs, travel, edges=edges
    )  # transfers name their edges


def test_a_slow_link_carries_one_message_at_a_time() -> None:
    """A slow link carries one message at a time. After four forwards of 1 s over a link of 5 s a
    message, the last arrives at 1 + 4 * 5."""
    run = simulate(schedule("forward", (0, 1), 4), {"F": 1.0}, transfer=5.0)
    assert [span.start for span in run.spans if span.lane == 1] == [6, 11, 16, 21]
    assert (
        simulate(schedule("forward", (0, 0), 4), {"F": 1.0}, transfer=5.0).makespan == 8
    )  # no message crosses


def test_costs() -> None:
    s = schedule("gpipe", (0, 1), 1)
    assert simulate(s, UNIT).makespan == 6
    assert simulate(s, {"F": 1.0, "B": 2.0, ("F", 1): 4.0}).makespan == 9
    for costs, message in (
        ({"F": 1.0, "I": 1.0}, "costs lack B of stage 1"),
        ({"F": -1.0, "B": 1.0}, "costs are seconds, not {'F': -1.0}"),
    ):
        with pytest.raises(ScheduleError, match=message.replace("{", "\\{")):
            simulate(s, costs)
    with pytest.raises(ScheduleError, match="would not end"):
        simulate(by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), UNIT)


def test_optimizer_steps_end_each_lane() -> None:
    run = simulate(schedule("zb-h2", (0, 1), 4), UNIT, step=2.0)
    assert run.steps == ((0, 12, 14), (1, 13, 15))
    assert (run.makespan, run.period) == (15, 14)
    assert run.busy == (14, 14)
    assert simulate(schedule("zb-h2", (0, 1), 4), UNIT, step=(0.0, 1.0)).steps == ((1, 13, 14),)


def test_bytes() -> None:
    s = schedule("zb-h1", (0, 1), 4)  # 0F0 0F1 0I0 0W0 ... and 1F0 1I0 1F1 1I1 1W0 ...
    assert simulate(s, UNIT, nbytes=(10, 100)).peak_bytes == (20, 200)
    assert simulate(s, UNIT, nbytes=(10, 100), kept=(1, 30)).peak_bytes == (20, 130)
    assert simulate(s, UNIT).peak_bytes == ()
    assert simulate(schedule("forward", (0, 0), 4), UNIT, nbytes=(10, 100)).peak_bytes == (100,)


# Files and drawings.


@given(any_lanes(), st.integers(1, 4), st.sampled_from(ANYWHERE))
def test_a_file_gives_it_back(
    tmp_path_factory: Any, lanes: tuple[int, ...], micros: int, name: str
) -> None:
    path, s = tmp_path_factory.mktemp("schedules") / "s.json", schedule(name, lanes, micros)
    s.save(path)
    assert Schedule.load(path) == s


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"name": "mine", "micros": 2, "lanes": [0, 1], "rows": ["0F0 0F1  0B0 0B1", "1F0 1I0 1F1 '
        '1I1 1W0 1W1"]}'
    )
    check(Schedule.load(path))
    assert Schedule.load(str(path)).rows[1][-1] == Action("W", 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rows": ["0F0 0F1 0X0"]},
            (
                "lane 0, position 2: '0X0' is no action: write stage, kind and micro-batch, such "
                "as "
                "2F0; kinds are F (forward), B"
            ),
        ),
        ({"rows": ["0F0", "0B0"]}, "2 rows for 1 lane"),
        ({"rows": "0F0"}, "rows must be a list with one text of actions for each lane"),
        ({"rows": [["F", 0, 0]]}, "rows must be a list with one text of actions for each lane"),
        ({"lanes": 1}, "lanes must be a list, the lane of each stage, such as [0, 1], not 1"),
        ({"lanes": [1]}, "no stage is on lane 0 of [1]"),
        ({"micros": "2"}, "micros must be a number of micro-batches, at least 1, not '2'"),
        ({"name": 3}, "name must be text, not 3"),
        (
            {"title": "x"},
            (
                "the keys 'name', 'lanes', 'micros', 'rows', but this has the keys 'name', "
                "'lanes', "
                "'micros', 'rows', 'title'"
            ),
        ),
    ],
)
def test_a_file_that_is_no_schedule(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(
            {"name": "mine", "lanes": [0], "micros": 2, "rows": ["0F0 0F1 0B0 0B1"]} | change
        )
    )
    with pytest.raises(ScheduleError) as caught:
        Schedule.load(path)
    assert str(caught.value).startswith(f"{path}: ") or "position" in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    for text, message in (("{", "is not JSON"), ("[]", "but this has list")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ScheduleError, match=message):
            Schedule.load(tmp_path / "x.json")


def test_drawings() -> None:
    s = schedule("zb-h1", (0, 1), 3)
    assert str(s) == (
        "zb-h1: 2 stages, 3 micro-batches\nlane 0  0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\nlane 1 "
        " 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    )
    assert simulate(s, UNIT).draw().splitlines() == [
        "lane 0  F0 F1    I0 W0 F2 I1 W1 I2 W2",
        "lane 1     F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert simulate(
        schedule("1f1b", (0, 0, 1), 1), {"F": 1.0, "B": 2.0}, step=1.0
    ).draw().splitlines() == [
        "lane 0  0F0- 1F0-                1B0------ 0B0------ step",
        "lane 1            2F0- 2B0------ step",
    ]
    assert (
        max(
            len(line)
            for line in simulate(schedule("gpipe", (0, 1), 200), UNIT).draw(60).splitlines()
        )
        <= 70
    )


# Timelines.


def test_a_measured_timeline() -> None:
    line = timeline(
        [
            (0, "0F0", 10.0, 11.0),
            (1, Action("F", 1, 0), 11.5, 12.5),
            (1, "1B0", 12.5, 14.5),
            (0, "0B0", 15.0, 18.0),
        ]
    )
    assert (line.lanes, line.makespan, line.busy, line.bubble) == (2, 8.0, (4.0, 3.0), 1 - 7 / 16)
    assert line.period == 8.0
    assert line.costs == {("B", 0): 3.0, ("B", 1): 2.0, ("F", 0): 1.0, ("F", 1): 1.0}
    assert timeline([]).bubble == timeline([]).makespan == 0
    with pytest.raises(ScheduleError, match="start before end"):
        timeline([(0, "0F0", 2.0, 1.0)])


@pytest.mark.parametrize("name", TRAINING)
def test_costs_of_a_timeline_give_it_again(name: str) -> None:
    s = schedule(name, layout(name, 3), 5)
    run = simulate(s, {(kind, k): 1.0 + k for kind in "FBIW" for k in range(s.stages)})
    assert simulate(s, run.costs).spans == run.spans


def test_measured_beside_simulated(tmp_path: Path) -> None:
    run = simulate(schedule("1f1b", (0, 1), 2), {"F": 1e-3, "B": 2e-3}, step=1e-3)
    save_trace(
        tmp_path / "trace.json",
        measured=[
            Span(lane, action, 7 + start, 7 + 2 * end) for lane, action, start, end in run.spans
        ],
        simulated=run,
    )
    data = json.loads((tmp_path / "trace.json").read_text())
    assert data == trace(
        measured=[
            Span(lane, action, 7 + start, 7 + 2 * end) for lane, action, start, end in run.spans
        ],
        simulated=run,
    )
    events = data["traceEvents"]
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        0: "measured",
        1: "simulated",
    }
    assert [
        (e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"
    ] == [(s, k, f"lane {k}") for s in (0, 1) for k in (0, 1)]
    done = [e for e in events if e["ph"] == "X"]
    assert len(done) == 2 * 8 + 2
    assert min(e["ts"] for e in done if e["pid"] == 0) == 0
    back = next(e for e in done if e["pid"] == 1 and e["name"] == "1B0")
    assert back == {
        "ph": "X",
        "name": "1B0",
        "cat": "backward",
        "pid": 1,
        "tid": 1,
        "ts": pytest.approx(2000),
        "dur": pytest.approx(2000),
    } | {"args": {"stage": 1, "micro": 0}}
    assert [e["tid"] for e in done if e["name"] == "step"] == [0, 1]


def test_costs_of_single_actions() -> None:
    plan = schedule("1f1b", (0, 1), micros=2)
    seconds = {action: 1.0 + action.micro for row in plan.rows for action in row}
    run = simulate(plan, seconds)
    assert run.each == seconds
    assert timeline(run.spans).each == seconds
    assert (
        run.makespan
        == simulate(plan, {**seconds, ("F", 0): 100.0}).makespan
        == 1 + 1 + 1 + 2 + 2 + 2
    )  # 0F0 1F0 1B0 1F1 1B1 0B1
