"""Tests of the cluster model. Planners rely on its laws, which are checked over constants, presets
and measured tables. Presets and files are tested too."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from globaltensor.boxing import plan_boxing
from globaltensor.boxing.move_cost import move_costs
from globaltensor.cluster import PRESETS, Cluster, Curve, use_cluster
from globaltensor.cluster.alpha_beta import group_of
from globaltensor.errors import ClusterError
from globaltensor.sbp import broadcast, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

COLLECTIVES = ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "exchange"]
SLACK = 1 + 1e-9  # tolerance for rounding
times = st.floats(1e-7, 1e-2)
rates = st.floats(1e7, 1e12)
sizes = st.one_of(st.integers(0, 100), st.integers(0, 1 << 34))


@st.composite
def constants(draw: st.DrawFn) -> Cluster:
    """A random cluster given by constants."""
    latency, bandwidth = draw(times), draw(rates)
    links = {
        "node_latency": latency * draw(st.floats(1, 100)),
        "node_bandwidth": bandwidth / draw(st.floats(1, 100)),
    }
    return Cluster(
        launch=draw(times),
        latency=latency,
        bandwidth=bandwidth,
        node_size=draw(st.sampled_from([0, 1, 2, 3, 4, 8])),
        node_stream=draw(rates),
        tree=draw(st.booleans()),
        message=draw(times),
        memory_bandwidth=draw(rates),
        kernel=draw(times),
        flops=draw(
            st.dictionaries(st.sampled_from(["float64", "float32", "bfloat16"]), rates, min_size=1)
        ),
        saturation=draw(
            st.dictionaries(st.sampled_from(["float64", "float32", "bfloat16"]), st.floats(0, 1e12))
        ),
        overlap=draw(st.floats(1, 2)),
        rank_skew=draw(times),
        optimizer_factor=draw(st.floats(0.1, 10)),
        bucket_factor=draw(st.floats(0.1, 10)),
        **links,
    )


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Draw measurements that obey no law."""
    nodes = draw(st.sampled_from([1, 1, 2, 4]))
    points = draw(
        st.dictionaries(st.integers(1, 1 << 30), st.floats(1e-7, 10.0), min_size=1, max_size=5)
    )
    kind = draw(st.sampled_from([*COLLECTIVES, "send", "copy"]))
    nodes, local = (nodes, draw(st.sampled_from([1, 2, 3, 4, 8]))) if kind != "copy" else (1, 1)
    return Curve(kind, nodes * local, nodes, tuple(points.items()))


@st.composite
def tables(draw: st.DrawFn) -> Cluster:
    """A random cluster with measurements."""
    return replace(draw(constants()), measured=tuple(draw(st.lists(curves(), max_size=12))))


presets = st.builds(lambda name: Cluster.preset(name), st.sampled_from(list(PRESETS)))
clusters = st.one_of(constants(), tables(), presets)


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(
    clusters,
    st.sampled_from([*COLLECTIVES, "send", "copy", "slice"]),
    sizes,
    sizes,
    st.integers(1, 64),
    st.integers(0, 4),
)
def test_more_bytes_take_no_less(
    c: Cluster, kind: str, n: int, more: int, p: int, together: int
) -> None:
    assert 0 <= c.seconds(kind, n, p, together) <= c.seconds(kind, n + more, p, together) * SLACK
    spread = range(0, 3 * p, 3)
    assert (
        0
        < c.seconds(kind, n, spread, together)
        <= c.seconds(kind, n + more, spread, together) * SLACK
    )


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(
    clusters,
    st.sampled_from(COLLECTIVES),
    sizes,
    st.integers(1, 32),
    st.integers(0, 32),
    st.integers(1, 8),
)
def test_more_ranks_take_no_less(
    c: Cluster, kind: str, n: int, p: int, more: int, local: int
) -> None:
    if not c.node_size or p + more <= c.node_size:
        assert c.seconds(kind, n, max(2, p)) <= c.seconds(kind, n, max(2, p + more)) * SLACK
    if c.node_size and not c.measured:  # more nodes, with the same number of ranks on each
        local = min(local, c.node_size)

        def spread(nodes: int) -> list[int]:
            return [node * c.node_size + r for node in range(nodes) for r in range(local)]

        if p * local > 1:
            assert c.seconds(kind, n, spread(p)) <= c.seconds(kind, n, spread(p + more)) * SLACK


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(
    clusters,
    sizes,
    st.one_of(
        st.integers(2, 64),
        st.lists(st.integers(0, 40), min_size=2, max_size=12, unique=True).map(tuple),
    ),
    st.integers(0, 4),
)
def test_halves_of_an_all_reduce(
    c: Cluster, n: int, ranks: int | tuple[int, ...], together: int
) -> None:
    whole, scatter, gather = (
        c.seconds(kind, n, ranks, together)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert max(scatter, gather) <= whole * SLACK
    assert whole <= 2 * (scatter + gather) * SLACK
    assert scatter + gather <= 2 * whole * SLACK
    if not c.measured:  # by the formulas both halves take exactly as long
        assert whole == pytest.approx(scatter + gather)


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(clusters, st.sampled_from([*COLLECTIVES, "send"]), sizes, st.integers(2, 8))
def test_between_nodes_nothing_is_quicker_than_within_one(
    c: Cluster, kind: str, n: int, p: int
) -> None:
    if c.node_size:
        within = c.seconds(kind, n, range(min(p, c.node_size)))
        assert within <= c.seconds(kind, n, range(0, p * c.node_size, c.node_size)) * SLACK


@pytest.mark.long
@settings(deadline=None, max_examples=100)
@given(
    clusters,
    st.integers(0, 1 << 30),
    st.one_of(
        st.integers(2, 64),
        st.lists(st.integers(0, 40), min_size=2, max_size=12, unique=True).map(tuple),
    ),
)
def test_an_all_to_all_moves_a_share_and_not_the_whole(
    c: Cluster, share: int, ranks: int | tuple[int, ...]
) -> None:
    p = ranks if isinstance(ranks, int) else len(ranks)
    assert (
        c.seconds("all_to_all", share, ranks) <= c.seconds("all_gather", share * p, ranks) * SLACK
    )


def test_an_all_to_all_of_much_costs_a_fraction_of_the_gather() -> None:
    for name in PRESETS:
        c = Cluster.preset(name)
        p = c.node_size if c.node_size > 1 else 8
        assert c.seconds("all_to_all", (1 << 30) // p, p) < 2.5 / p * c.seconds(
            "all_gather", 1 << 30, p
        ), name


LAYOUTS = [broadcast, partial_sum, split(0), split(1)]


@settings(deadline=None, max_examples=60)
@given(clusters, st.sampled_from([[0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 8], [16, 24]]]), st.data())
def test_a_detour_never_pays(c: Cluster, ranks: list[object], data: st.DataObject) -> None:
    place = Placement("cpu", ranks)
    shape = data.draw(st.sampled_from([(8, 8), (64, 48), (1000, 1000)]))
    layouts = [[data.draw(st.sampled_from(LAYOUTS)) for _ in place.shape] for _ in range(2)]
    # Detours use only entries that plan() tries too. For speed, on each axis it tries the entries
    # of both ends there, the splits on any axis of an end, and broadcast.
    splits = [e for layout in layouts for e in layout if e.is_split]
    layouts.insert(
        1,
        [
            data.draw(st.sampled_from([broadcast, layouts[0][axis], layouts[1][axis], *splits]))
            for axis in range(len(place.shape))
        ],
    )
    a, b, end = (Spec.make(shape, torch.float32, place, layout) for layout in layouts)
    with use_cluster(c):
        assert (
            plan_boxing(a, end).seconds
            <= (plan_boxing(a, b).seconds + plan_boxing(b, end).seconds) * SLACK
        )


def check_kernels_are_priced_by_a_roofline(
    c: Cluster, flops: float, nbytes: float, dtype: torch.dtype | str, kernels: int
) -> None:
    took = c.compute(flops, nbytes, dtype, kernels)
    assert took >= max(kernels * c.kernel, flops / c.rate(dtype))
    assert took <= c.compute(flops * 1.5, nbytes, dtype, kernels) * SLACK
    assert took <= c.compute(flops, nbytes * 1.5, dtype, kernels) * SLACK
    if not any(curve.kind == "copy" for curve in c.measured):  # small copies may be faster
        assert took >= nbytes / c.memory_bandwidth
        assert took <= c.compute(flops, nbytes, dtype, kernels + 1) * SLACK
        assert (
            c.compute(2 * flops, 2 * nbytes, dtype) <= 2 * c.compute(flops, nbytes, dtype) * SLACK
        )


work = given(
    clusters,
    st.floats(0, 1e15),
    st.floats(0, 1e12),
    st.sampled_from([torch.float32, "bfloat16", torch.int8]),
    st.integers(1, 100),
)


@pytest.mark.long
@work
@settings(max_examples=60, deadline=None)
def test_kernels_are_priced_by_a_roofline(
    c: Cluster, flops: float, nbytes: float, dtype: torch.dtype | str, kernels: int
) -> None:
    check_kernels_are_priced_by_a_roofline(c, flops, nbytes, dtype, kernels)


@pytest.mark.extended
@work
@settings(max_examples=300, deadline=None)
def test_many_kernels_are_priced_by_a_roofline(
    c: Cluster, flops: float, nbytes: float, dtype: torch.dtype | str, kernels: int
) -> None:
    check_kernels_are_priced_by_a_roofline(c, flops, nbytes, dtype, kernels)


def test_small_tensors_lie_in_caches() -> None:
    c = Cluster(
        kernel=1e-6,
        measured=(Curve("copy", 1, 1, ((1 << 10, 1e-6), (1 << 20, 11e-6), (1 << 30, 1.0))),),
    )
    assert c.compute(0, 1 << 20) == pytest.approx(11e-6)
    assert c.compute(0, 1 << 30) == pytest.approx(1.0)
    assert c.compute(0, 1 << 21, kernels=2) == pytest.approx(22e-6)
    assert c.compute(0, 10) == 1e-6


@settings(deadline=None, max_examples=100)
@given(clusters, st.sampled_from([(8, 8), (13, 5), (1000, 1000)]), st.data())
def test_no_exchange_costs_less_than_is_known_before(
    c: Cluster, shape: tuple[int, int], data: st.DataObject
) -> None:
    places = [
        Placement("cpu", ranks)
        for ranks in ([0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 8], [16, 24]], [4, 5])
    ]
    (here, before), (there, after) = (
        (
            move_costs(shape, torch.float32, place, c),
            tuple(data.draw(st.sampled_from([broadcast, split(0), split(1)])) for _ in place.shape),
        )
        for place in (data.draw(st.sampled_from(places)) for _ in range(2))
    )
    assert (
        here.exchange_at_least(before, there, after)
        <= here.exchange(before, there, after)[1] * SLACK
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("node_size", [0, 1, 2, 8])
def test_no_exchange_costs_less_where_only_gatherings_were_measured(
    ranks: int, node_size: int
) -> None:
    """Priced as a gathering, an exchange takes less time among more ranks."""
    for c in (
        Cluster(node_size=node_size, measured=(Curve("all_gather", ranks, 1, ((1, 1.0),)),)),
        Cluster.preset("dgx-h100"),
    ):
        for nbytes in (1, 385, 1 << 20, 1 << 28):
            bound = c.exchange_at_least(nbytes)
            assert all(
                bound <= c.seconds("exchange", nbytes, n) * SLACK for n in (2, 3, 4, 8, 16, 64)
            )
    flat = move_costs((8, 8), torch.float32, Placement("cpu", [0, 1, 2, 3]), c)
    assert flat.exchange_at_least((split(0),), flat, (broadcast,)) <= (
        flat.exchange((split(0),), flat, (broadcast,))[1] * SLACK
    )


def test_half_of_the_rate_at_the_saturation() -> None:
    c = Cluster(flops={"float32": 1e12}, saturation={"float32": 2e9}, kernel=0.0)
    assert c.compute(2e9, 0, torch.float32) == pytest.approx(2 * 2e9 / 1e12)
    assert c.compute(2e15, 0, torch.float32) == pytest.approx(2e15 / 1e12, rel=0.02)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1, 2))
def test_side_by_side_lies_between_the_longer_and_the_sum(
    a: float, b: float, overlap: float
) -> None:
    took = Cluster(overlap=overlap).overlapped(a, b)
    assert max(a, b) <= took <= (a + b) * SLACK


# ------------------------------------------------------------------------------ links between nodes


def test_strided_groups_share_the_links_of_a_node() -> None:
    c = Cluster(
        node_size=4,
        bandwidth=100e9,
        node_bandwidth=1e9,
        node_stream=4e9,
        latency=0,
        node_latency=0,
        launch=0,
    )
    n = 1 << 30
    strided = (0, 4)  # one of four such groups
    assert c.seconds("all_gather", n, strided) == pytest.approx(n / 2 / 1e9)
    assert c.seconds("all_gather", n, strided, together=1) == pytest.approx(n / 2 / 4e9)
    assert c.seconds("all_gather", n, strided, together=2) == pytest.approx(n / 2 / 2e9)
    # All eight ranks send over all links of their nodes, half of the bytes, and share within a
    # node.
    assert c.seconds("all_gather", n, range(8)) == pytest.approx(n / 2 / 4e9 + n * 3 / 4 / 100e9)
    assert c.seconds("send", n, (0, 4), together=1) == pytest.approx(n / 4e9)


def test_phases_pay_where_steps_between_nodes_cost_more() -> None:
    c = Cluster(
        node_size=8, launch=0, latency=1e-6, node_latency=1e-4, bandwidth=100e9, node_bandwidth=50e9
    )
    assert c.seconds("all_gather", 8, range(64)) == pytest.approx(7e-6 + 7e-4, rel=1e-3)


def test_a_group_knows_its_emptiest_and_its_fullest_node() -> None:
    groups = [(0, 1, 2, 8), tuple(range(20)), 20, 16, 7]
    assert [group_of(ranks, 8) for ranks in groups] == [
        (4, 2, 1, 3),
        (20, 3, 4, 8),
        (20, 3, 4, 8),
        (16, 2, 8, 8),
        (7, 1, 0, 0),
    ]


def test_nodes_with_fewer_ranks_have_fewer_links() -> None:
    c = Cluster(
        node_size=8, launch=0, latency=0, node_latency=0, bandwidth=100e9, node_bandwidth=1e9
    )
    n = 1 << 30
    assert c.seconds("all_gather", n, (0, 1, 2, 8)) == pytest.approx(
        n * 3 / 4 / 1e9
    )  # rank 8 receives all of it over its own link
    slow = replace(c, latency=1e-6, node_latency=1e-4)
    assert slow.seconds("all_gather", 4, (0, 1, 2, 8)) == pytest.approx(
        2e-6 + 1e-4, rel=1e-3
    )  # in phases, the first within the three
    far = tuple(
        Curve("all_gather", p, 2, ((n, 8.0 / p),)) for p in (2, 4)
    )  # one and two ranks on each of two nodes
    assert (
        replace(c, measured=far).seconds("all_gather", n, (0, 1, 2, 8)) >= 4.0
    )  # from the curve with one rank on a node


# ----------------------------------------------------------------------------------------- measured


def test_a_measured_point_is_what_was_measured() -> None:
    c = Cluster(
        measured=(Curve("all_gather", 4, 1, ((1 << 10, 1e-3), (1 << 20, 2e-3), (1 << 26, 0.1))),)
    )
    assert c.seconds("all_gather", 1 << 20, 4) == 2e-3
    assert c.seconds("all_gather", 10, 4) == 1e-3
    assert c.seconds("all_gather", 1 << 27, 4) == pytest.approx(0.2)
    assert c.seconds("all_gather", 1 << 15, 4) == pytest.approx(math.sqrt(2) * 1e-3)
    assert c.seconds("all_gather", 1 << 27, 8) > 0.2  # by the ring formula
    assert c.seconds("all_gather", 1 << 27, 8) == pytest.approx(0.2 * (7 / 8) / (3 / 4), rel=0.02)


def test_measured_groups_grow_where_the_formula_has_no_steps() -> None:
    """Measured groups grow even where the formula has no steps. With latencies of 0, or a curve of
    one rank, there is nothing to scale or divide by."""
    for p in (1, 2):
        c = Cluster(
            launch=0,
            latency=0,
            measured=(Curve("all_gather", p, 1, ((1 << 10, 1e-5), (1 << 20, 1e-3))),),
        )
        took = [c.seconds("all_gather", 1 << 20, ranks) for ranks in (2, 4, 8)]
        assert took == sorted(took)
        assert c.seconds("all_gather", 1 << 10, 4) == 1e-5


def test_measured_group_sizes_are_joined() -> None:
    c = Cluster(
        measured=tuple(Curve("broadcast", p, 1, ((1 << 20, s),)) for p, s in ((2, 1e-3), (8, 4e-3)))
    )
    assert c.seconds("broadcast", 1 << 20, 4) == pytest.approx(2e-3)


def test_measured_between_nodes_is_kept_apart() -> None:
    near, far = (
        Curve("all_gather", 2, 1, ((1 << 20, 1e-3),)),
        Curve("all_gather", 2, 2, ((1 << 20, 5e-3),)),
    )
    c = Cluster(node_size=2, measured=(near, far))
    assert (
        c.seconds("all_reduce", 1 << 20, (0, 2)) == 10e-3
    )  # from the measurement, not the constants
    assert c.seconds("all_gather", 1 << 20, (0, 1)) == 1e-3
    assert c.seconds("all_gather", 1 << 20, (0, 2)) == 5e-3


def test_copies_can_be_measured_too() -> None:
    c = Cluster(measured=(Curve("copy", 1, 1, ((1 << 20, 1e-3),)),))
    assert c.seconds("slice", 1 << 20, 1) == c.seconds("copy", 1 << 20, 1) == 1e-3


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((1, 0.0),), ((1, math.inf),), ((1, 1.0), (1, 2.0))]
)
def test_curves_that_cannot_be(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="the curve of all_gather among 2 ranks"):
        Curve("all_gather", 2, 1, points)


# --------------------------------------------------------------------------- presets, files, values


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str, tmp_path: Path) -> None:
    c = Cluster.preset(name)
    assert c.name == name
    assert c.compute(2 * 4096**3, 3 * 4096**2 * 4, "float32") > 0
    c.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == c


def test_many_nodes_of_a_preset() -> None:
    c = Cluster.preset("dgx-h100", nodes=64, memory=1 << 36)
    assert (c.size, c.nodes, c.memory) == (512, 64, 1 << 36)
    assert c.with_size(4096).nodes == 512
    with pytest.raises(ValueError, match=r"no preset is named 'dgx'; there are generic, dgx-a100"):
        Cluster.preset("dgx")
    with pytest.raises(ValueError, match="no links between nodes"):
        Cluster.preset("cpu", nodes=2)


@given(clusters)
@settings(deadline=None, max_examples=50)
def test_a_cluster_is_a_value(c: Cluster) -> None:
    again = pickle.loads(pickle.dumps(c))
    assert again == c
    assert hash(again) == hash(c)
    assert replace(c, launch=c.launch + 1) != c


def test_files_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    with pytest.raises(
        ClusterError, match=r"cluster\.json: cannot be read: No such file.*globaltensor profile"
    ):
        Cluster.load(path)
    for text, told in {
        "{": "is no JSON",
        "[]": "describes no cluster",
        '{"globaltensor_cluster": 9}': "version 9, but this library reads version 2",
        '{"globaltensor_cluster": 2, "bandwith": 1}': "unknown field bandwith; there are bandwidth",
        '{"globaltensor_cluster": 2, "bandwidth": "1"}': "bandwidth='1': must be a number",
        '{"globaltensor_cluster": 2, "bandwidth": -1}': "must be more than 0 bytes per second",
        '{"globaltensor_cluster": 2, "size": 1.5}': "size=1.5: must be a whole number",
        '{"globaltensor_cluster": 2, "tree": 1}': "tree=1: must be true or false",
        '{"globaltensor_cluster": 2, "overlap": 3}': "overlap=3.0: must be from 1",
        '{"globaltensor_cluster": 2, "optimizer_factor": 0}': (
            "optimizer_factor=0.0: must be a factor above 0"
        ),
        '{"globaltensor_cluster": 2, "bucket_factor": 0}': (
            "bucket_factor=0.0: must be a factor above 0"
        ),
        '{"globaltensor_cluster": 2, "flops": {"float32": "fast"}}': r"flops\[float32\]='fast'",
        '{"globaltensor_cluster": 2, "ops": {"mm": 1}}': r"ops\[mm\]=1: must be two numbers",
        '{"globaltensor_cluster": 2, "measured": [{"kind": "send"}]}': (
            r"measured\[0\]: needs "
            r"kind, ranks"
        ),
        (
            '{"globaltensor_cluster": 2, "measured": [{"kind": "send", "ranks": 2, "points": [[1, '
            "-1]]}]}"
        ): (
            r"measured\[0\]: "
            r"the "
            r"curve "
            r"of "
            r"send"
        ),
        '{"globaltensor_cluster": 2, "node_size": 2, "node_latency": 0}': (
            "cannot reach other nodes quicker"
        ),
        "[" * 100_000: "is no JSON",
        '{"globaltensor_cluster": 2, "size": 1e999}': "size=inf: must be a whole number",
        '{"globaltensor_cluster": 2, "memory": NaN}': "memory=nan: must be a number",
        '{"globaltensor_cluster": 2, "bandwidth": 1'
        + "0" * 400
        + "}": r"bandwidth=1000.*\(401 digits\): must be a number that a float can hold",
        '{"globaltensor_cluster": 2, "measured": [{"kind": "send", "ranks": NaN, "points": []}]}': (
            r"measured\[0\]\.ranks=nan: "
            r"must "
            r"be "
            r"a "
            r"number"
        ),
        '{"globaltensor_cluster": 2, "measured": [{"kind": "send", "ranks": 2.5, "points": []}]}': (
            r"measured\[0\]\.ranks=2.5: "
            r"must "
            r"be "
            r"a "
            r"whole"
        ),
        (
            '{"globaltensor_cluster": 2, "measured": [{"kind": "send", "ranks": 2, "points": '
            "[[1e999, "
            "1]]}]}"
        ): (
            r"measured\[0\]\.points=inf: "
            r"must "
            r"be "
            r"a "
            r"whole"
        ),
    }.items():
        path.write_text(text)
        with pytest.raises(ClusterError, match=told):
            Cluster.load(path)


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps(
            {
                "globaltensor_cluster": 2,
                "name": "mine",
                "bandwidth": 100_000_000_000,
                "flops": {"float32": 1e12},
            }
        )
    )
    assert Cluster.load(path) == Cluster(name="mine", bandwidth=1e11, flops={"float32": 1e12})


def test_unlawful_curves_are_mended_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cluster.json"
    c = Cluster(
        measured=(Curve("all_reduce", 2, 1, ((1 << 10, 4e-3), (1 << 20, 1e-3), (1 << 25, 1.0))),)
    )
    c.save(path)
    with caplog.at_level("WARNING", "globaltensor"):
        assert Cluster.load(path) == c
    assert (
        "all_reduce among 2 ranks on 1 nodes: more bytes took less time at 2 of 3 sizes"
        in caplog.text
    )
    assert c.seconds("all_reduce", 1 << 10, 2) == pytest.approx(2e-3)


def test_times_of_ops() -> None:
    c = Cluster(ops={"linear 8x8": (1e-3, 2e-3)})
    assert c.op("linear 8x8") == (1e-3, 2e-3)
    assert c.op("linear 9x9") is None
    assert c.with_ops({"linear 9x9": (1.0, 2.0)}).ops == {
        "linear 8x8": (1e-3, 2e-3),
        "linear 9x9": (1.0, 2.0),
    }


def test_an_exchange_over_nodes_costs_their_links() -> None:
    def seconds(there: list[int]) -> float:
        a, b = (
            Spec.make((1 << 10, 1 << 10), torch.float32, Placement("cpu", ranks), [split(0)])
            for ranks in ([0, 1], there)
        )
        route = plan_boxing(a, b)
        assert [m.kind for m in route.moves] == ["exchange"]
        return route.seconds

    with use_cluster(Cluster(node_size=2, node_bandwidth=1e8)):
        assert 10 * seconds([1, 0]) < seconds([2, 3])


def test_what_was_not_measured_follows_from_the_gathers() -> None:
    c = Cluster(
        measured=(Curve("all_gather", 4, 1, ((1 << 10, 1e-3), (1 << 20, 2e-3), (1 << 26, 0.1))),)
    )
    assert c.seconds("all_to_all", 1 << 20, 4) == 2e-3
    assert c.seconds("exchange", 3 << 18, 4) == pytest.approx(2e-3)
    assert c.seconds("reduce_scatter", 1 << 20, 4) == 2e-3
    assert c.seconds("all_reduce", 1 << 20, 4) == 4e-3


def test_of_a_slow_all_reduce_the_halves_are_run() -> None:
    a, b = (
        Spec.make((1 << 10, 1 << 10), torch.float32, Placement("cpu", [0, 1, 2, 3]), [entry])
        for entry in (partial_sum, broadcast)
    )
    assert [m.kind for m in plan_boxing(a, b).moves] == ["all_reduce"]
    half, whole = ((1 << 10, 1e-5), (1 << 22, 1e-3)), ((1 << 10, 3e-5), (1 << 22, 3e-3))
    slow = Cluster(
        measured=(
            Curve("all_gather", 4, 1, half),
            Curve("reduce_scatter", 4, 1, half),
            Curve("all_reduce", 4, 1, whole),
        )
    )
    with use_cluster(slow):
        assert [m.kind for m in plan_boxing(a, b).moves] == ["reduce_scatter", "all_gather"]


def test_pieces_of_later_dims_cost_copies_where_these_were_measured() -> None:
    def seconds(before: object, after: object) -> float:
        a, b = (
            Spec.make((1 << 10, 1 << 10), torch.float32, Placement("cpu", [0, 1]), [entry])
            for entry in (before, after)
        )  # type: ignore[list-item]
        return plan_boxing(a, b).seconds

    gather = Curve("all_gather", 2, 1, ((1 << 10, 1e-5), (1 << 22, 1e-3)))
    copies = Curve("copy", 1, 1, ((1 << 10, 1e-6), (1 << 23, 1e-4)))
    with use_cluster(Cluster(measured=(gather,))):
        assert seconds(split(0), broadcast) == seconds(split(1), broadcast) == pytest.approx(1e-3)
        assert seconds(broadcast, split(0)) == seconds(broadcast, split(1))
    with use_cluster(Cluster(measured=(gather, copies))):
        assert seconds(split(0), broadcast) == pytest.approx(1e-3)
        assert seconds(split(1), broadcast) == pytest.approx(1.1e-3)
        assert seconds(broadcast, split(0)) < seconds(
            broadcast, split(1)
        )  # these rows are a contiguous view
