"""Tests of the drawing of a boxing route."""

from __future__ import annotations

import copy
import pickle
from xml.etree import ElementTree

import pytest
import torch

from globaltensor.boxing import explain_boxing, plan_boxing
from globaltensor.boxing.moves import show_bytes
from globaltensor.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

LINE, GRID = Placement("cpu", [0, 1]), Placement("cpu", [[0, 1], [2, 3]])


def make(placement: Placement, *layout: Sbp) -> Spec:
    return Spec.make((4096, 1024), torch.float32, placement, layout)


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]


def test_layouts_and_moves_stand_in_the_order_of_the_route() -> None:
    src, dst = make(GRID, partial_sum, split(0)), make(GRID, split(1), broadcast)
    text = explain_boxing(src, dst)
    drawn = texts(text.svg())
    route = [t for t in drawn if t.startswith("f32[") or " on axis " in t or "MiB a rank" in t]
    assert route == [
        "f32[4096, 1024] P S(0)",
        "reduce_scatter on axis 0",
        f"4.0 MiB a rank, {text.plan.moves[0].seconds * 1e3:.3g} ms",
        "f32[4096, 1024] S(1) S(0)",
        "all_gather on axis 1",
        f"4.0 MiB a rank, {text.plan.moves[1].seconds * 1e3:.3g} ms",
        "f32[4096, 1024] S(1) B",
        f"2 moves: 8.0 MiB a rank, {text.plan.seconds * 1e3:.3g} ms",
    ]


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (make(LINE, split(0)), make(Placement("cpu", [2, 3]), split(1))),
        (make(GRID, partial_sum, partial_sum), make(GRID, split(0), split(1))),
        (make(GRID, split(0), split(0)), make(LINE, broadcast)),
        (make(LINE, broadcast), make(LINE, split(0))),
        (make(LINE, broadcast), make(LINE, partial_sum)),
    ],
)
def test_each_move_has_its_name_and_its_bytes(src: Spec, dst: Spec) -> None:
    plan = plan_boxing(src, dst)
    drawn = texts(explain_boxing(src, dst).svg())
    assert plan.moves
    for move in plan.moves:
        assert any(t.split(" on ")[0] == move.kind for t in drawn)
        cost = f"{show_bytes(move.bytes)} a rank, " if move.bytes else "no traffic"
        assert any(t.startswith(cost) for t in drawn)
    assert sum(t.startswith("f32[") for t in drawn) == 1 + len(plan.moves)


def test_nothing_moves() -> None:
    spec = make(LINE, split(0))
    drawn = texts(explain_boxing(spec, spec).svg())
    assert "nothing moves: both layouts are the same" in drawn
    assert sum(t.startswith("f32[") for t in drawn) == 1


def test_the_text_is_an_ordinary_string() -> None:
    text = explain_boxing(make(LINE, split(0)), make(LINE, broadcast))
    assert isinstance(text, str)
    assert text.splitlines()[0] == (
        "f32[4096, 1024] S(0) on cpu[0, 1] -> f32[4096, 1024] B on cpu[0, 1]"
    )
    assert text._repr_html_() == (
        f'<div class="gt-layout" style="overflow-x:auto">{text.svg()}</div>'
    )
    for other in (pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert type(other) is str
        assert other == text
