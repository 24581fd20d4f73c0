"""Tests of the SVG drawings of specs and placements: they show each rank and each element, once."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from globaltensor.sbp import Sbp, broadcast, partial_max, partial_norm, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.placement_svg import short_placement
from globaltensor.sharding.sharding_svg import layout_html, layout_svg
from globaltensor.sharding.spec import Spec, StorageSpec
from globaltensor.sharding.svg_canvas import COLOURS, WIDTH, text_width

SVG = "{http://www.w3.org/2000/svg}"


def grid(*shape: int, first: int = 0) -> Placement:
    return Placement("cpu", np.arange(first, first + math.prod(shape)).reshape(shape))


def make(shape: tuple[int, ...], placement: Placement, *layout: Sbp) -> Spec:
    return Spec.make(shape, torch.float32, placement, layout)


def parsed(x: Spec | Placement) -> ElementTree.Element:
    return ElementTree.fromstring(layout_svg(x))


def texts(x: Spec | Placement) -> list[str]:
    return [t.text or "" for t in parsed(x).iter(f"{SVG}text")]


def cells(x: Spec | Placement) -> list[tuple[str, ElementTree.Element, list[str]]]:
    """Return (tooltip, first rectangle, texts) of each cell."""
    found = []
    for group in parsed(x).iter(f"{SVG}g"):
        title, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert box is not None
        found.append((title.text or "", box, [t.text or "" for t in group.iter(f"{SVG}text")]))
    return found


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 8, 17]), min_size=1, max_size=3))
    first = draw(st.sampled_from([0, 5, 998, 12000]))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 4096, 10**7]), max_size=4))
    entries = [broadcast, partial_sum, partial_max, partial_norm(2)]
    entries += [split(d) for d in range(len(shape))]
    layout = draw(st.lists(st.sampled_from(entries), min_size=len(sizes), max_size=len(sizes)))
    return make(tuple(shape), grid(*sizes, first=first), *layout)


of_any_spec = given(specs())


def check_everything_is_inside_the_frame_and_cells_do_not_overlap(spec: Spec) -> None:
    root = parsed(spec)
    height = number(root, "height")
    assert number(root, "width") == WIDTH <= 400
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= number(box, "x") <= number(box, "x") + number(box, "width") <= WIDTH
        assert 0 <= number(box, "y") <= number(box, "y") + number(box, "height") <= height
    for text in root.iter(f"{SVG}text"):
        size = number(text, "font-size")
        assert size >= 10.5
        width = text_width(text.text or "", size)
        left = number(text, "x") - {"middle": width / 2, "end": width}.get(
            text.attrib.get("text-anchor", "start"), 0
        )
        assert 0 <= left <= left + width <= WIDTH
        assert size <= number(text, "y") <= height
    boxes = [box for _, box, _ in cells(spec)]
    for one, other in pairwise(boxes):
        x, y = number(one, "x"), number(one, "y")
        beside = number(other, "x") >= x + number(one, "width") - 0.05
        assert beside or number(other, "y") >= y + number(one, "height") - 0.05


@of_any_spec
@settings(max_examples=30, deadline=None)
def test_everything_is_inside_the_frame_and_cells_do_not_overlap(spec: Spec) -> None:
    check_everything_is_inside_the_frame_and_cells_do_not_overlap(spec)


@pytest.mark.extended
@of_any_spec
@settings(max_examples=120, deadline=None)
def test_many_drawings_are_inside_the_frame(spec: Spec) -> None:
    check_everything_is_inside_the_frame_and_cells_do_not_overlap(spec)


def check_each_label_is_inside_its_cell(spec: Spec) -> None:
    for group in parsed(spec).iter(f"{SVG}g"):
        cell = next(group.iter(f"{SVG}rect"))
        for text in group.iter(f"{SVG}text"):
            half = text_width(text.text or "", number(text, "font-size")) / 2
            middle = number(text, "x")
            assert number(cell, "x") <= middle - half + 0.1
            assert middle + half - 0.1 <= number(cell, "x") + number(cell, "width")
            assert number(cell, "y") <= number(text, "y") - 8
            assert number(text, "y") <= number(cell, "y") + number(cell, "height")


@of_any_spec
@settings(max_examples=30, deadline=None)
def test_each_label_is_inside_its_cell(spec: Spec) -> None:
    check_each_label_is_inside_its_cell(spec)


@pytest.mark.extended
@of_any_spec
@settings(max_examples=120, deadline=None)
def test_many_labels_are_inside_their_cells(spec: Spec) -> None:
    check_each_label_is_inside_its_cell(spec)


def check_cells_that_are_not_folded_show_each_element_and_each_rank(spec: Spec) -> None:
    if not spec.numel or spec.placement.size > 64 or any("more" in t for t in texts(spec)):
        return
    shown: dict[int, int] = {}
    elements = 0
    for tooltip, _, labels in cells(spec):
        match = re.search(r"shape \[(.*)\], on ", tooltip)
        assert match is not None
        count = math.prod(int(n) for n in match[1].split(", ") if n)
        elements += count
        for text in labels:
            if rank := re.fullmatch(r"(?:rank )?(\d+)", text):
                assert int(rank[1]) not in shown
                shown[int(rank[1])] = count
    assert elements == spec.numel
    for rank, count in shown.items():
        assert count == math.prod(spec.local_shape(rank))
    whole = not any("..." in t or t.endswith(" ranks") for _, _, ts in cells(spec) for t in ts)
    if whole:
        holding = {r for r in spec.placement.flat if math.prod(spec.local_shape(r))}
        assert set(shown) == holding


@of_any_spec
@settings(max_examples=30, deadline=None)
def test_cells_that_are_not_folded_show_each_element_and_each_rank(spec: Spec) -> None:
    check_cells_that_are_not_folded_show_each_element_and_each_rank(spec)


@pytest.mark.extended
@of_any_spec
@settings(max_examples=120, deadline=None)
def test_many_cells_show_each_element_and_each_rank(spec: Spec) -> None:
    check_cells_that_are_not_folded_show_each_element_and_each_rank(spec)


def test_an_uneven_split_is_drawn_to_scale() -> None:
    drawn = cells(make((5, 7), grid(2, 2), split(0), split(1)))
    assert [title for title, _, _ in drawn] == [
        "x[0:3, 0:4], shape [3, 4], on rank 0",
        "x[0:3, 4:7], shape [3, 3], on rank 1",
        "x[3:5, 0:4], shape [2, 4], on rank 2",
        "x[3:5, 4:7], shape [2, 3], on rank 3",
    ]
    boxes = [box for _, box, _ in drawn]
    assert number(boxes[0], "width") / number(boxes[1], "width") == pytest.approx(4 / 3, rel=1e-3)
    assert number(boxes[0], "height") / number(boxes[2], "height") == pytest.approx(3 / 2, rel=1e-3)
    labels = texts(make((5, 7), grid(2, 2), split(0), split(1)))
    assert {"0:3", "3:5", "0:4", "4:7", "\u2193 dim 0: 5 in 2   \u2192 dim 1: 7 in 2"} <= {*labels}
    assert "not to scale" not in labels
    assert "not to scale" in texts(make((5, 700000), grid(2), split(0)))


def test_a_split_with_a_unit_says_so() -> None:
    spec = make((16,), grid(3), split(0).with_unit(4))
    assert "axis 0, 3 ranks: S(0)/4, dim 0 is split, unit 4" in texts(spec)
    assert cells(spec)[0][0] == "x[0:8], shape [8], on rank 0"


def test_a_tensor_stored_otherwise_is_drawn_as_it_is_stored() -> None:
    shown, stored = make((8, 4), grid(2), broadcast), make((8, 4), grid(2), split(0))
    spec = StorageSpec.of(stored, shown, (0,))
    assert cells(spec)[1][2] == cells(stored)[1][2] == ["rank 1"]
    assert "f32[8, 4] B kept as f32[8, 4] S(0)" in texts(spec)


def test_a_rank_without_elements_is_named() -> None:
    drawn = texts(make((3,), grid(5), split(0)))
    assert [t for t in drawn if t.startswith("rank ")] == ["rank 0", "rank 1", "rank 2"]
    assert "0 elements on ranks 3, 4" in drawn


def test_copies_stand_in_one_cell() -> None:
    (cell,) = cells(make((8, 8), grid(4), broadcast))
    assert cell[2] == ["0", "1", "2", "3"]
    assert cell[0] == "x[:, :], shape [8, 8], on ranks 0, 1, 2, 3"
    first, second = cells(make((8, 8), grid(2, 2), broadcast, split(0)))
    assert (first[2], second[2]) == (["0", "2"], ["1", "3"])


@pytest.mark.parametrize(
    ("layout", "label", "note"),
    [
        ((partial_sum, split(0)), "0 + 2", "the sum"),
        ((partial_max, split(0)), "max( 0 , 2 )", "the maximum"),
        ((partial_norm(2), split(0)), "norm2.0( 0 , 2 )", "the 2.0-norm"),
        ((partial_sum, broadcast), "( 0 1 ) + ( 2 3 )", "the sum"),
        ((broadcast, partial_sum), "( 0 2 ) + ( 1 3 )", "the sum"),
        ((partial_max, partial_sum), "max( 0 + 1 , 2 + 3 )", "the maximum of the sum"),
        ((partial_sum, partial_sum), "0 + 1 + 2 + 3", "the sum"),
    ],
)
def test_partials_are_hatched_and_name_their_reduction(
    layout: tuple[Sbp, Sbp], label: str, note: str
) -> None:
    spec = make((8, 8), grid(2, 2), *layout)
    assert " ".join(cells(spec)[0][2]) == label
    drawn = " ".join(" ".join(texts(spec)).split())  # a line may be wrapped
    assert f"hatched: a cell's value is {note} over its ranks" in drawn
    hatches = [p for p in parsed(spec).iter(f"{SVG}path") if "hatch" in p.attrib["class"]]
    assert len(hatches) == len(cells(spec))


def test_a_partial_over_one_rank_is_the_value() -> None:
    spec = make((8, 8), grid(1), partial_sum)
    assert not list(parsed(spec).iter(f"{SVG}path"))
    assert not any(t.startswith("hatched") for t in texts(spec))


def test_hatches_stay_in_their_cells() -> None:
    root = parsed(make((8, 8), grid(2, 2), partial_sum, split(0)))
    for group in root.iter(f"{SVG}g"):
        box, path = next(group.iter(f"{SVG}rect")), next(group.iter(f"{SVG}path"))
        points = re.findall(r"[ML](\S+) ([\d.]+)", path.attrib["d"])
        assert len(points) > 10
        for x, y in points:
            assert -0.1 <= float(x) - number(box, "x") <= number(box, "width") + 0.1
            assert -0.1 <= float(y) - number(box, "y") <= number(box, "height") + 0.1


def test_dims_that_are_not_drawn_are_named() -> None:
    drawn = texts(make((64, 128, 512, 3), grid(4), split(2)))
    assert "\u2193 dim 0: 64   \u2192 dim 2: 512 in 4" in drawn
    assert "not drawn: dim 1 (128), dim 3 (3); not split" in drawn


def test_a_third_split_dim_has_a_rectangle_for_each_piece() -> None:
    spec = make((9, 16, 32), grid(2, 2, 2), split(0), split(1), split(2))
    assert {"dim 0: 0:5", "dim 0: 5:9"} <= {*texts(spec)}
    assert [ts for _, _, ts in cells(spec)] == [[f"rank {i}"] for i in range(8)]
    many = make((9, 16, 32), grid(9, 2, 2), split(0), split(1), split(2))
    assert "... 5 more" in texts(many)
    assert len(cells(many)) == 4 * 4


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 5)])
def test_no_elements(shape: tuple[int, ...]) -> None:
    spec = make(shape, grid(2), split(len(shape) - 1))
    assert not cells(spec)
    assert {"0 elements", "0 elements on ranks 0, 1"} <= {*texts(spec)}


def test_no_dims() -> None:
    spec = make((), grid(2), partial_sum)
    assert "0 dims: one number" in texts(spec)
    assert [ts for _, _, ts in cells(spec)] == [["0", "+", "1"]]


@pytest.mark.parametrize(
    ("spec", "folded", "last"),
    [
        (make((4096, 64), grid(512), split(0)), "505 more", "rank 511"),
        (make((64, 4096), grid(512), split(1)), "+505", "511"),
        (make((64, 64), grid(512), broadcast), "...", "511"),
        (make((64, 64), grid(512), partial_sum), "...", "511"),
        (make((4096, 4096), grid(64, 64), split(0), split(1)), "57 more", "4095"),
    ],
)
def test_many_ranks_are_folded(spec: Spec, folded: str, last: str) -> None:
    assert {folded, last} <= {*texts(spec)}
    assert len(cells(spec)) <= 64
    assert number(parsed(spec), "height") < 600
    assert "and " + str(spec.placement.size - 64) + " more ranks" in layout_html(spec)
    assert layout_html(spec).count("<tr>") == 1 + 64


def test_sixteen_ranks_are_all_drawn() -> None:
    assert [ts for _, _, ts in cells(make((16,), grid(16), split(0)))] == [
        [f"rank {r}"] for r in range(16)
    ]


def test_drawing_a_large_placement_does_not_fill_the_cache_of_boxes() -> None:
    spec = make((1 << 20, 8), grid(1 << 14), split(0))
    layout_svg(spec)
    assert len(spec._boxes) < 100


def test_a_placement_shows_its_ranks_in_order() -> None:
    assert [(t, ts) for t, _, ts in cells(Placement("cuda", [[3, 1], [0, 7]]))] == [
        ("rank 3 at [0, 0]", ["3"]),
        ("rank 1 at [0, 1]", ["1"]),
        ("rank 0 at [1, 0]", ["0"]),
        ("rank 7 at [1, 1]", ["7"]),
    ]
    assert "placement on cuda, 2 x 2 = 4 ranks" in texts(Placement("cuda", [[3, 1], [0, 7]]))
    line = [int(ts[0].removeprefix("rank ")) for _, _, ts in cells(grid(64))]
    assert line == list(range(64))
    cube = cells(grid(2, 2, 2))
    assert [t for t, _, _ in cube][5] == "rank 5 at [1, 0, 1]"


@pytest.mark.parametrize("shape", [(100,), (65,), (512,), (32, 32), (9, 4, 4), (4096,)])
def test_a_large_placement_is_folded(shape: tuple[int, ...]) -> None:
    placement = grid(*shape)
    drawn = cells(placement)
    assert len(drawn) <= 64
    assert any("more" in t for t in texts(placement))
    assert drawn[-1][0].startswith(f"rank {placement.size - 1} at ")


def test_a_rank_has_one_colour_in_all_drawings() -> None:
    (one,) = [b for _, b, _ in cells(make((4,), Placement("cpu", [COLOURS + 2]), split(0)))]
    assert one.attrib["class"].split()[0] == "r2"
    boxes = [b.attrib["class"].split()[0] for _, b, _ in cells(grid(COLOURS))]
    assert boxes == [f"r{i}" for i in range(COLOURS)]


def test_colours_are_readable_in_light_and_dark() -> None:
    """Text on a fill has a contrast of 7:1 at least (WCAG 2.2, level AAA)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    style = layout_svg(grid(2)).partition("<style>")[2].partition("</style>")[0]
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for rules in (light, dark):
        colour = dict(re.findall(r"\.gt-svg \.(\w+)\{(?:fill|stroke):#(\w{6})\}", rules))
        pairs = [("ink", f"r{i}", 7.0) for i in range(COLOURS)]
        pairs += [("ink", "ground", 7.0), ("soft", "ground", 5.0), ("mark", "ground", 5.0)]
        for front, back, least in [*pairs, ("ink", "many", 7.0)]:
            low, high = sorted((luminance(colour[front]), luminance(colour[back])))
            assert (high + 0.05) / (low + 0.05) >= least, (front, back)


def test_html_escapes_and_shows_the_table() -> None:
    html = make((4, 6), grid(2), split(0))._repr_html_()
    assert html == layout_html(make((4, 6), grid(2), split(0)))
    assert "<td>rank 1</td><td>[1]</td><td>[2, 6]</td><td>x[2:4, :]</td>" in html
    assert "<script" not in html
    assert "&lt;b&gt;" in layout_html(grid(2), more="<b>")
    assert grid(2)._repr_html_().startswith('<div class="gt-layout"')


def test_short_placement() -> None:
    assert short_placement(Placement("cuda", [4, 2])) == "cuda [4, 2]"
    assert short_placement(grid(64, 8)) == "cpu, 64 x 8 ranks, 0 to 511"
