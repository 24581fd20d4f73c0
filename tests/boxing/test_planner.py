"""Tests of the laws of plans, on specs alone, without communication."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from globaltensor.auto.cost.reshard_cost import ReshardCosts
from globaltensor.boxing import explain_boxing, plan_boxing
from globaltensor.boxing.move_cost import _traffic
from globaltensor.boxing.moves import legal_moves
from globaltensor.cluster import Cluster, current_cluster, use_cluster
from globaltensor.errors import BoxingError
from globaltensor.sbp import Sbp, broadcast, partial_max, partial_norm, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

LINE, GRID = Placement("cpu", [0, 1, 2, 3]), Placement("cpu", [[0, 1], [2, 3]])
PLACEMENTS = [
    LINE,
    GRID,
    Placement("cpu", [3, 0, 1]),
    Placement("cpu", [[5], [4]]),
    Placement("cuda", [0, 1]),
    Placement("cpu", [[[0, 1]], [[6, 7]]]),
]
ENTRIES = [broadcast, partial_sum, split(0), split(1), split(0).with_unit(3), split(1).with_unit(2)]


def make(
    shape: tuple[int, ...],
    placement: Placement,
    *layout: object,
    dtype: torch.dtype = torch.float32,
) -> Spec:
    return Spec.make(shape, dtype, placement, layout)  # type: ignore[arg-type]


@st.composite
def specs(
    draw: st.DrawFn, shape: tuple[int, int], placements: list[Placement] = PLACEMENTS
) -> Spec:
    placement = draw(st.sampled_from(placements))
    return make(
        shape,
        placement,
        *draw(st.lists(st.sampled_from(ENTRIES), min_size=placement.axes, max_size=placement.axes)),
    )


SHAPES = st.tuples(st.integers(0, 13), st.integers(0, 13))


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(st.data(), SHAPES)
def test_a_plan_leads_from_one_end_to_the_other(
    data: st.DataObject, shape: tuple[int, int]
) -> None:
    src, dst = data.draw(specs(shape)), data.draw(specs(shape))
    route = plan_boxing(src, dst)
    assert route is plan_boxing(src, dst)
    assert (route.moves == ()) == (src is dst)
    here = src
    for move in route.moves:
        assert move.src is here
        assert move.bytes >= 0
        assert move.seconds >= 0
        assert (move.kind in ("keep", "slice", "mask", "pad", "copy")) <= (move.bytes == 0)
        here = move.dst
    assert here is dst
    assert route.bytes == sum(m.bytes for m in route.moves)
    assert len(str(route).splitlines()) == max(1, len(route.moves))
    assert len(explain_boxing(src, dst).splitlines()) == 2 + len(route.moves)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.tuples(st.integers(1, 64), st.integers(1, 64)))
def test_no_detour_is_cheaper(data: st.DataObject, shape: tuple[int, int]) -> None:
    a, b, c = (data.draw(specs(shape, [LINE, GRID])) for _ in range(3))
    if len({s.placement for s in (a, b, c)}) == 1 and set(b.layout) <= {
        broadcast,
        *a.layout,
        *c.layout,
    }:
        assert (
            plan_boxing(a, c).seconds
            <= plan_boxing(a, b).seconds + plan_boxing(b, c).seconds + 1e-12
        )


def test_a_small_tensor_is_padded_and_summed_over_both_axes_at_once() -> None:
    """A small tensor is padded and summed over both axes at once. One all-reduce of four ranks
    starts once, but a gather and an all-reduce start twice."""
    src, dst = make((1, 1), GRID, partial_sum, split(0)), make((1, 1), GRID, broadcast, broadcast)
    assert [m.kind for m in plan_boxing(src, dst).moves] == ["pad", "all_reduce"]
    large = [
        make((4096, 4096), GRID, *layout)
        for layout in ((partial_sum, split(0)), (broadcast, broadcast))
    ]
    assert [m.kind for m in plan_boxing(*large).moves] != ["pad", "all_reduce"]


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPES)
def test_the_way_back_of_a_gradient_exists(data: st.DataObject, shape: tuple[int, int]) -> None:
    src, dst = data.draw(specs(shape)), data.draw(specs(shape))
    back = plan_boxing(dst.dual(), src.dual())
    assert back.dst.dual() is src


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (partial_sum, broadcast, "all_reduce"),
        (partial_sum, split(0), "reduce_scatter"),
        (split(0), broadcast, "all_gather"),
        (split(0), split(1), "all_to_all"),
        (broadcast, split(1), "slice"),
        (broadcast, partial_sum, "mask"),
        (split(1), partial_sum, "pad"),
        (partial_max, broadcast, "all_reduce"),
        (partial_norm(2), split(0), "reduce_scatter"),
    ],
)
def test_one_axis_takes_one_move(a: object, b: object, kind: str) -> None:
    route = plan_boxing(make((13, 8), LINE, a), make((13, 8), LINE, b))
    assert [m.kind for m in route.moves] == [kind]
    where = "@axis0"
    assert str(route).startswith(
        f"{route.src.layout[0].short}->{route.dst.layout[0].short}{where}  {kind}  "
    )
    assert (route.bytes == 0) == (kind in ("slice", "mask", "pad"))


def kinds(src: Spec, dst: Spec) -> list[str]:
    return [m.kind for m in plan_boxing(src, dst).moves]


def test_axes_that_lie_alike_move_as_one() -> None:
    shape, P, B, S = (1 << 10, 1 << 10), partial_sum, broadcast, split
    assert kinds(make(shape, GRID, P, P), make(shape, GRID, B, B)) == ["all_reduce"]
    assert kinds(make((6, 4), GRID, S(0), S(0)), make((6, 4), GRID, B, B)) == ["all_gather"]
    assert kinds(make((6, 4), GRID, P, P), make((6, 4), GRID, S(0), S(0))) in (
        ["reduce_scatter"],
        ["reduce_scatter"] * 2,
    )


def test_a_split_under_another_of_its_dim_is_not_moved_alone() -> None:
    layouts = [
        after
        for _, axes, after in legal_moves((split(0), split(0)), (2, 2), [[broadcast, split(1)]] * 2)
        if axes == (0,)
    ]
    assert layouts == []
    assert kinds(
        make((8, 4), GRID, split(0), split(0)), make((8, 4), GRID, broadcast, split(0))
    ) == ["exchange"]


def test_an_exchange_spares_the_gather() -> None:
    a, b = make((64, 64), GRID, split(0), split(1)), make((64, 64), GRID, split(1), split(0))
    assert kinds(a, b) == ["exchange"]
    assert plan_boxing(a, b).bytes <= a.nbytes // 4


def test_between_placements() -> None:
    shape, here, there = (
        (1 << 10, 1 << 10),
        Placement("cpu", [0, 1]),
        Placement("cpu", [4, 5, 6, 7]),
    )
    assert kinds(make(shape, here, split(0)), make(shape, there, split(1))) == ["exchange"]
    assert kinds(
        make(shape, here, broadcast), make(shape, Placement("cuda", [0, 1]), broadcast)
    ) == ["copy"]
    # one source rank: shards are sent once and gathered on the destination
    assert kinds(make(shape, Placement("cpu", [0]), broadcast), make(shape, there, broadcast)) == [
        "exchange",
        "all_gather",
    ]
    assert (
        kinds(make(shape, here, partial_sum), make(shape, there, partial_sum))[0]
        == "reduce_scatter"
    )
    # the same boxes on the same ranks, in another notation
    assert (
        plan_boxing(make(shape, LINE, split(0)), make(shape, GRID, split(0), split(0))).bytes == 0
    )


def test_empty_tensors_and_axes_of_one_rank_move_nothing() -> None:
    one = Placement("cpu", [[0], [1]])
    for a, b in itertools.product(ENTRIES[:4], repeat=2):
        assert plan_boxing(make((0, 5), LINE, a), make((0, 5), LINE, b)).bytes == 0
        assert plan_boxing(make((4, 5), one, broadcast, a), make((4, 5), one, broadcast, b)).is_noop


def test_large_placements() -> None:
    big = Placement(
        "cuda", [[[i * 64 + j * 8 + k for k in range(8)] for j in range(8)] for i in range(16)]
    )
    route = plan_boxing(
        make((4096, 4096, 4), big, partial_sum, split(0), split(0)),
        make((4096, 4096, 4), big, split(0), broadcast, split(1)),
    )
    assert 0 < route.bytes <= 2 * 4096 * 4096 * 4 * 4


def test_shape_and_dtype_stay() -> None:
    with pytest.raises(BoxingError, match="keeps shape and dtype"):
        plan_boxing(make((4, 4), LINE, broadcast), make((4, 5), LINE, broadcast))
    with pytest.raises(TypeError, match="specs or global tensors"):
        explain_boxing(1, 2)


def test_costs_are_sane() -> None:
    c = Cluster(node_size=4)
    for n, p in itertools.product((0, 1, 1000, 10**9), (2, 3, 8, 64)):
        assert c.seconds("all_reduce", n, p) == c.seconds("reduce_scatter", n, p) + c.seconds(
            "all_gather", n, p
        )
        assert c.seconds("all_to_all", n // p, p) <= c.seconds("all_gather", n, p)
        for kind in (
            "all_gather",
            "all_reduce",
            "reduce_scatter",
            "all_to_all",
            "exchange",
            "slice",
            "copy",
        ):
            assert c.seconds(kind, n, p) <= c.seconds(kind, n + 1, p)
            assert c.seconds(kind, n, range(4)) <= c.seconds(kind, n, range(2, 6))
    assert hash(Cluster()) == hash(Cluster())
    with use_cluster(c):
        assert current_cluster() is c
    assert current_cluster() == Cluster()


def test_a_move_that_others_must_come_to_waits_for_them() -> None:
    """A move that needs other ranks waits for them. Each such move in the middle of a step also
    costs the ranks' rank_skew. A move within a rank does not wait, and neither does the sum of
    gradients at the end of the step."""
    line, (together, apart) = Placement("cpu", [0, 1]), (Cluster(), Cluster(rank_skew=1.0))

    def seconds(before: Sbp, after: Sbp, cluster: Cluster) -> float:
        with use_cluster(cluster):
            return plan_boxing(make((8, 8), line, before), make((8, 8), line, after)).seconds

    whole, summed = broadcast, partial_sum
    for before, after in (
        (split(0), whole),
        (summed, whole),
        (summed, split(0)),
        (split(0), split(1)),
        (whole, split(0)),
        (whole, summed),
    ):
        assert seconds(before, after, apart) - seconds(before, after, together) == pytest.approx(
            float(before is not whole)
        )
    found = [
        ReshardCosts(cluster, line).gradients((8, 8), torch.float32, [(whole,)], [(whole,)])
        for cluster in (together, apart)
    ]
    assert found[0].item() == found[1].item() > 0


def overlap(
    a: tuple[tuple[int, ...], tuple[int, ...]], b: tuple[tuple[int, ...], tuple[int, ...]]
) -> int:
    return math.prod(
        max(0, min(o + n, p + m) - max(o, p)) for o, n, p, m in zip(*a, *b, strict=True)
    )


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data(), SHAPES)
def test_traffic_of_an_exchange_box_by_box(data: st.DataObject, shape: tuple[int, int]) -> None:
    """The traffic of an exchange is counted without enumerating pairs of ranks. It equals a count
    box by box."""
    whole = [broadcast, *[e for e in ENTRIES if e.is_split]]
    places = [*PLACEMENTS, Placement("cpu", [[7, 2, 0], [1, 8, 4]])]
    ends = [
        (
            p := data.draw(st.sampled_from(places)),
            data.draw(st.lists(st.sampled_from(whole), min_size=p.axes, max_size=p.axes)),
        )
        for _ in range(2)
    ]
    src, dst = (make(shape, p, *layout) for p, layout in ends)
    if not src.numel:
        return
    boxes = {src.box(r) for r in src.placement.flat if 0 not in src.box(r)[1]}
    copies = sum(src.box(r) == next(iter(boxes)) for r in src.placement.flat)
    met = {
        (box, r): n for box in boxes for r in dst.placement.flat
        if (n := overlap(box, dst.box(r))) and not (r in src.placement.flat and src.box(r) == box)
    }  # fmt: skip
    taken = [sum(n for (_, q), n in met.items() if q == r) for r in dst.placement.flat]
    given_ = [-(-sum(n for (b, _), n in met.items() if b == box) // copies) for box in boxes]
    peers = [sum(q == r for _, q in met) for r in dst.placement.flat] + [
        -(-sum(b == box for b, _ in met) // copies) for box in boxes
    ]
    nbytes, most, pair = _traffic(src, dst, 3)
    assert (nbytes, most) == ((4 * max(taken + given_), max(peers)) if met else (0, 0))
    if pair is not None:
        taker, other = pair
        assert taker // 3 != other // 3
        assert (src.box(other), taker) in met
    elif len(boxes) == len(src.placement.flat):  # every box is sent by the only rank that has it
        assert all(
            q // 3 == r // 3 for (box, q) in met for r in src.placement.flat if src.box(r) == box
        )
