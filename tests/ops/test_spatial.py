"""Tests of split spatial dims: convolutions, pools, pads, flips and rolls over a split dim. Results
equal plain torch's, and little of the operand is moved."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.everywhere import full
from support.oracle import check, close, spelled
from support.pool import run_on

import globaltensor as flow
from globaltensor.boxing.halo_exchange import HaloPlan, fetch_halo, most_fetched
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import BoxingError
from globaltensor.sbp import Sbp, broadcast, partial_sum, split

B, P, S = broadcast, partial_sum, split


def x(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + sum(shape))
    )


# ------------------------------------------------------------------------------------- the exchange


def fetched(
    held: list[tuple[int, int]], wanted: list[list[tuple[int, int]]]
) -> tuple[Any, Any, int]:
    whole = x(2, max(b for _, b in held), 3)
    rank = world().rank
    local = whole[:, slice(*held[rank])].clone().requires_grad_()
    reach = HaloPlan(range(len(held)), rank, held, wanted)
    with record_collectives() as log:
        out = fetch_halo(local, 1, reach)
    want = torch.cat([whole[:, a:b] for a, b in wanted[rank]] or [whole[:, :0]], 1)
    close(out.detach(), want, "fetched")
    (grad,) = torch.autograd.grad(out, local, torch.ones_like(out) * (rank + 1))
    times = torch.zeros(whole.shape[1], dtype=torch.float64)
    for r, intervals in enumerate(wanted):
        for a, b in intervals:
            times[a:b] += r + 1
    close(grad, times[slice(*held[rank]), None].expand(2, -1, 3), "gradient")
    return None, None, sum(t.bytes for t in log)


def test_intervals_from_anyone_in_any_order() -> None:
    held = [(0, 4), (4, 5), (5, 5), (5, 9)]
    found = simulate(4, fetched, held, [[(0, 5)], [(2, 9)], [(8, 9), (0, 1)], []])
    row = 2 * 3 * 8
    assert [b for _, _, b in found] == [3 * row, row, 0, 5 * row]


def check_who_gives_what_element_by_element(
    data: st.DataObject, lengths: list[int], order: Any
) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    held = [(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    order.shuffle(held)
    place = st.integers(0, ends[-1])
    wanted = data.draw(
        st.lists(
            st.lists(st.tuples(place, place).map(lambda ab: (min(ab), max(ab))), max_size=3),
            min_size=len(held),
            max_size=len(held),
        )
    )
    holder = {i: q for q, (a, b) in enumerate(held) for i in range(a, b)}
    fetched = [
        [(holder[i], i - held[holder[i]][0]) for a, b in intervals for i in range(a, b)]
        for intervals in wanted
    ]
    for rank in range(len(held)):
        reach = HaloPlan(range(len(held)), rank, held, wanted)
        assert [(q, a + k) for q, a, n in reach.chunks for k in range(n)] == fetched[rank]
        assert {
            i: [a + k for a, n in mine for k in range(n)] for i, mine in reach.outgoing.items()
        } == {
            i: those
            for i, some in enumerate(fetched)
            if (those := [at for q, at in some if q == rank])
        }
    assert most_fetched(held, wanted) == max(
        sum(q != i for q, _ in some) for i, some in enumerate(fetched)
    )


pieces = given(
    st.data(),
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)


@pytest.mark.long
@pieces
@settings(max_examples=60, deadline=None)
def test_who_gives_what_element_by_element(data: Any, lengths: Any, order: Any) -> None:
    check_who_gives_what_element_by_element(data, lengths, order)


@pytest.mark.extended
@pieces
@settings(max_examples=300, deadline=None)
def test_who_gives_what_in_many_cases(data: Any, lengths: Any, order: Any) -> None:
    check_who_gives_what_element_by_element(data, lengths, order)


def test_what_every_rank_has_moves_nothing() -> None:
    held = [(0, 3), (3, 6)]
    assert simulate(2, lambda: fetched(held, [[(1, 3)], [(3, 4), (5, 6)]])[2]) == [0, 0]


# ------------------------------------------------------------------------------------------- values

CONVS: list[tuple[Any, ...]] = [
    *[(partial(F.conv1d, stride=s, padding=p, dilation=d), x(2, 3, 11), x(4, 3, 3),
        x(4)) for s in (1, 2, 5) for p in (0, 1, 3) for d in (1, 2)],
    (partial(F.conv1d, padding="same"), x(2, 3, 7), x(4, 3, 4), x(4)),
    (partial(F.conv1d, padding="valid"), x(2, 3, 7), x(4, 3, 4)),
    (partial(F.conv1d, padding="same", dilation=3), x(3, 7), x(4, 3, 2)),
    (partial(F.conv1d, padding=4), x(2, 3, 2), x(4, 3, 3), x(4)),
    (F.conv1d, x(2, 3, 5), x(4, 3, 5), x(4)),
    (partial(F.conv2d, padding="same"), x(2, 3, 5, 6), x(4, 3, 2, 3), x(4)),
    (partial(F.conv2d, padding=(2, 1), stride=(1, 2)), x(2, 3, 5, 6), x(4, 3, 4, 2)),
    (partial(F.conv2d, padding=1, groups=2, stride=2), x(1, 4, 7, 5), x(6, 2, 3, 3), x(6)),
    (F.conv2d, x(2, 3, 5, 1), x(4, 3, 3, 1), x(4)),
    (partial(F.conv3d, padding=1), x(1, 2, 5, 3, 2), x(2, 2, 3, 3, 3), x(2)),
    *[
        (partial(F.conv_transpose1d, stride=s, padding=p, dilation=d, output_padding=min(s - 1, 1)),
            x(2, 3, 5), x(3, 4, 3), x(4))
        for s in (1, 2, 4) for p in (0, 1) for d in (1, 2)
    ],
    (partial(F.conv_transpose1d, padding=2), x(2, 3, 3), x(3, 4, 3), x(4)),
    (partial(F.conv_transpose1d, stride=5), x(3, 4), x(3, 4, 2), x(4)),
    (partial(F.conv_transpose2d, stride=2, padding=1, output_padding=(1, 0), groups=2),
        x(1, 4, 3, 5), x(4, 3, 3, 3), x(6)),
    (partial(F.conv_transpose3d, stride=2), x(1, 2, 3, 2, 2), x(2, 2, 2, 2, 2)),
]  # fmt: skip
POOLS: list[tuple[Any, ...]] = [
    *[(partial(F.max_pool1d, kernel_size=k, stride=s, padding=p, dilation=d), x(2, 3, 11)) for k, s,
        p in ((2, None, 0), (3, 1, 1), (3, 4, 1)) for d in (1, 2)],
    (partial(F.max_pool1d, kernel_size=3, stride=2, ceil_mode=True), x(3, 8)),
    (partial(F.max_pool1d, kernel_size=3, return_indices=True), x(2, 3, 11)),
    (partial(F.max_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=True, return_indices=True),
        x(2, 3, 6, 8)),
    (partial(F.max_pool2d, kernel_size=(2, 3), return_indices=True), -x(2, 2, 7, 9).abs()),
    (partial(F.max_pool3d, kernel_size=2, stride=1), x(1, 2, 4, 3, 3)),
    (partial(F.max_pool3d, kernel_size=2, padding=1, return_indices=True), x(2, 1, 5, 3, 2)),
    *[
        (partial(F.avg_pool1d, kernel_size=3, stride=s, padding=1, ceil_mode=c,
            count_include_pad=i), x(2, 3, 10))
        for s in (1, 2, 3) for c in (False, True) for i in (False, True)
    ],
    (partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=True), x(2, 3, 6, 8)),
    (partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1, count_include_pad=False),
        x(2, 3, 6, 8)),
    (partial(F.avg_pool2d, kernel_size=(3, 2), divisor_override=5), x(2, 3, 6, 7)),
    (partial(F.avg_pool3d, kernel_size=2, padding=1), x(1, 2, 4, 3, 3)),
    (partial(F.adaptive_avg_pool1d, output_size=3), x(2, 3, 9)),
    (partial(F.adaptive_avg_pool2d, output_size=(3, None)), x(2, 2, 6, 5)),
    (partial(F.adaptive_max_pool2d, output_size=(4, 3), return_indices=True), x(2, 2, 8, 7)),
    (partial(F.adaptive_avg_pool1d, output_size=4), x(2, 3, 9)),
]  # fmt: skip
MOVES: list[tuple[Any, ...]] = [
    (partial(torch.flip, dims=(0,)), x(7)), (partial(torch.flip, dims=(0, 1)), x(5, 4)),
    (torch.flipud, x(5, 3)), (torch.fliplr, x(3, 5)),
    *[(partial(torch.roll, shifts=n, dims=1), x(2, 7)) for n in (1, -3, 9)],
    (partial(torch.roll, shifts=(1, 2, 1), dims=(0, 1, 0)), x(5, 4)),
    (partial(torch.roll, shifts=2), x(5)),
    *[(partial(F.pad, pad=(2, 3), mode=m), x(2, 2, 5)) for m in ("constant", "reflect", "replicate",
        "circular")],
    *[(partial(F.pad, pad=(1, 2, 3, 0), mode=m), x(2, 2, 5, 4)) for m in ("constant", "reflect",
        "replicate", "circular")],
    (partial(F.pad, pad=(-1, 2, 0, -3), value=3.0), x(2, 5, 4)),
    (partial(F.pad, pad=(-3, 5)), x(2, 4)), (partial(F.pad, pad=(9, 0)), x(3)),
]  # fmt: skip
SIZES: list[tuple[Any, ...]] = [
    *[
        (partial(F.interpolate, mode=m, **k), x(2, 2, 7))
        for m in ("nearest", "nearest-exact", "linear") for k in ({"size": 11}, {"size": 3},
            {"scale_factor": 2.3})
    ],
    *[
        (partial(F.interpolate, mode="linear", align_corners=True, **k), x(2, 7)[None])
        for k in ({"size": 11}, {"size": 3}, {"size": 1}, {"scale_factor": 2})
    ],
    *[
        (partial(F.interpolate, mode=m, align_corners=a, **k), x(1, 2, 5, 4))
        for m in ("bilinear", "bicubic") for a in (False, True) for k in ({"size": (7, 3)},
            {"scale_factor": (1.7, 2)}, {"scale_factor": 0.6})
    ],
    (partial(F.interpolate, scale_factor=2, mode="nearest"), x(2, 3, 4, 3)),
    (partial(F.interpolate, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True),
        x(1, 2, 5, 4)),
    (partial(F.interpolate, size=(5, 2, 3), mode="trilinear"), x(1, 2, 3, 3, 2)),
    (partial(F.interpolate, scale_factor=2, mode="bilinear"), x(0, 2, 4, 3)),
    (partial(F.interpolate, size=(3, 2), mode="area"), x(1, 2, 6, 4)),
    (partial(F.interpolate, size=(3, 3), mode="bilinear", antialias=True), x(1, 2, 6, 5)),
]  # fmt: skip
POWERS = [
    (partial(F.lp_pool1d, norm_type=2, kernel_size=3, stride=2), x(2, 3, 9)),
    (partial(F.lp_pool2d, norm_type=3, kernel_size=(2, 3)), x(2, 3, 6, 7).abs()),
    (partial(F.lp_pool2d, norm_type=2, kernel_size=2, ceil_mode=True), x(1, 2, 5, 5)),
]  # fmt: skip

# torch warns of a copy here, and so does this library
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")


def name(row: tuple[Any, ...]) -> str:
    given = {k: v for k, v in row[0].keywords.items() if v} if isinstance(row[0], partial) else ""
    return f"{getattr(row[0], 'func', row[0]).__name__} {given} {[tuple(t.shape) for t in row[1:]]}"


def called(row: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return (
        (row[0].func, row[1:], row[0].keywords)
        if isinstance(row[0], partial)
        else (row[0], row[1:], {})
    )


@pytest.mark.parametrize("row", CONVS + POOLS + MOVES + SIZES, ids=name)
@pytest.mark.sweep(12)
def test_every_signature(row: tuple[Any, ...]) -> None:
    function, args, kwargs = called(row)
    met = check(function, *args, most=25, grids=((2,), (3,), (2, 2)), **kwargs)
    assert (
        any(f"S({args[0].ndim - 1})" in text.split(" -> ")[1] for text in met)
        or args[0].shape[-1] == 1
        or any(word in name(row) for word in ("adaptive", "area", "antialias"))
    )


def on_space(
    function: Callable[..., Any],
    tensors: list[torch.Tensor],
    layouts: list[list[Sbp]],
    grid: tuple[int, ...],
    twice: bool,
) -> None:
    """Compare values, gradients, and gradients of a sum of squared gradients. Operand 0 has each of
    `layouts`, and the other operands are broadcast."""
    n = int(torch.tensor(grid).prod())
    placement = flow.placement("cpu", torch.arange(n).reshape(grid).tolist())
    for layout in layouts:
        plain = [t.clone().requires_grad_() for t in tensors]
        laid = [layout, *[[B] * len(grid)] * len(tensors)]
        ours = [
            t.to_global(placement, [B] * len(grid)).to_global(sbp=s).detach().requires_grad_()
            for t, s in zip(tensors, laid, strict=False)
        ]
        found = []
        for operands in (plain, ours):
            out = function(*operands)
            out = out[0] if isinstance(out, tuple) else out
            first = torch.autograd.grad((out.sin() * out).sum(), operands, create_graph=twice)
            second = (
                torch.autograd.grad(sum((g * g).sum() for g in first), operands) if twice else ()
            )
            found.append([out, *first, *second])
        assert found[1][0].sbp == ours[0].sbp, f"{layout} became {found[1][0].sbp}"
        for i, (want, got) in enumerate(zip(*found, strict=True)):
            close(full(got), want.detach(), f"value {i} of {layout} on {grid}")


@pytest.mark.parametrize("row", CONVS[::3] + POOLS[::3] + POWERS + MOVES + SIZES, ids=name)
@pytest.mark.sweep(12)
def test_split_space_stays_split(row: tuple[Any, ...]) -> None:
    if "adaptive" in name(row) or "antialias" in name(row):
        pytest.skip("its windows do not divide the dim, or reach far")
    last = row[1].ndim - 1
    if row[0] is torch.flipud:
        pytest.skip("the last dim stays as it is")
    simulate(2, on_space, row[0], list(row[1:]), [[S(last)]], (2,), True)
    simulate(5, on_space, row[0], list(row[1:]), [[S(last)]], (5,), True)
    simulate(
        4,
        on_space,
        row[0],
        list(row[1:]),
        [
            [S(last), S(last)],
            [S(last), S(0)],
            [S(last - 1) if row[1].ndim > 3 else S(last), S(last)],
        ],
        (2, 2),
        True,
    )


def pooled(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, kernel_size=3, stride=2, padding=1)


def test_on_processes() -> None:
    run_on(
        2,
        on_space,
        partial(F.conv2d, padding=1),
        [x(2, 3, 5, 6), x(4, 3, 3, 3), x(4)],
        [[S(2)], [S(3)]],
        (2,),
        True,
    )
    run_on(2, on_space, pooled, [x(2, 3, 7, 6)], [[S(2)], [S(3)]], (2,), False)


def network(mode: str, plain: torch.nn.Module, picture: torch.Tensor) -> None:
    """Train spatial layers for one step. Each rank has a band of the picture, and the weights are
    replicated."""
    plain = copy.deepcopy(plain)
    placement = flow.placement.all("cpu")
    ours = copy.deepcopy(plain).to_global(placement, B)
    want = plain(picture)
    got = ours(picture.to_global(placement, B).to_global(sbp=S(2)))
    assert got.sbp == (S(2),)
    close(full(got), want.detach(), mode)
    want.square().sum().backward()
    got.square().sum().backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        close(full(q.grad), p.grad, mode)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_a_network_over_bands_of_a_picture(mode: str) -> None:
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, 2, 1), torch.nn.Conv2d(4, 4, 3, 2, "valid"),
        torch.nn.ConvTranspose2d(4, 2, 3, 2), torch.nn.AvgPool2d(2),
    ).double()  # fmt: skip
    simulate(3, network, mode, layers, x(2, 3, 17, 12))


# ------------------------------------------------------------------------------------------ traffic


Sent = list[tuple[str, int]]


def traffic(
    function: Callable[..., Any], shape: tuple[int, ...], others: list[tuple[int, ...]], sbp: Sbp
) -> tuple[Sent, Sent]:
    placement = flow.placement.all("cpu")
    ours = [
        x(*s)
        .to_global(placement, B)
        .to_global(sbp=sbp if i == 0 else B)
        .detach()
        .requires_grad_(i == 0)
        for i, s in enumerate([shape, *others])
    ]
    with record_collectives() as there:
        out = function(*ours)
    out = out[0] if isinstance(out, tuple) else out
    total = out.sum()
    with record_collectives() as back:
        total.backward()
    assert out.sbp == (sbp,)
    return [(t.kind, t.bytes) for t in there], [(t.kind, t.bytes) for t in back]


ROW = 2 * 3 * 10 * 8  # bytes of a row of a picture of shape (2, 3, 16, 10)
PICTURE = (2, 3, 16, 10)


@pytest.mark.parametrize(
    ("function", "others", "rows"),
    [
        # rows that each of 4 ranks sends
        (partial(F.conv2d, padding=1), [(4, 3, 3, 3)], [1, 2, 2, 1]),
        (partial(F.conv2d, padding=(2, 0)), [(4, 3, 5, 1)], [2, 4, 4, 2]),
        (partial(F.conv2d, padding=1, stride=2), [(4, 3, 3, 3)], [1, 1, 1, 0]),
        (F.conv2d, [(4, 3, 1, 1)], []),
        (partial(F.conv2d, stride=2), [(4, 3, 2, 2)], []),
        (partial(F.conv_transpose2d, stride=2), [(3, 4, 2, 2)], []),
        (partial(F.max_pool2d, kernel_size=2), [], []),
        (partial(F.max_pool2d, kernel_size=3, stride=1, padding=1), [], [1, 2, 2, 1]),
        (partial(F.avg_pool2d, kernel_size=4), [], []),
        (partial(F.adaptive_avg_pool2d, output_size=(8, 1)), [], []),
        (partial(F.interpolate, scale_factor=2), [], []),
        (partial(F.interpolate, scale_factor=2, mode="bilinear"), [], [1, 2, 2, 1]),
        (partial(F.pad, pad=(1, 1)), [], []),
        (partial(F.pad, pad=(0, 0, 1, 1), mode="circular"), [], [1, 0, 1, 2]),
        (partial(torch.roll, shifts=-1, dims=2), [], [1, 1, 1, 1]),
    ],
    ids=spelled,
)
def test_a_halo_is_all_that_moves(
    function: Any, others: list[tuple[int, ...]], rows: list[int]
) -> None:
    found = simulate(4, traffic, function, PICTURE, others, S(2))
    assert [there for there, _ in found] == (
        [[("exchange", n * ROW)] for n in rows] if rows else [[]] * 4
    )
    back = [sum(n for _, n in back) for _, back in found]
    assert sum(back) == sum(rows) * ROW, "the gradient of the halo goes back to whom it came from"


def test_a_world_of_one_has_the_same_splits() -> None:
    def alone() -> None:
        bands = x(2, 3, 8, 6).to_global(flow.placement.all("cpu"), S(2))
        for f in (
            partial(F.conv2d, weight=x(4, 3, 3, 3)),
            partial(F.avg_pool2d, kernel_size=2),
            partial(F.interpolate, scale_factor=2),
        ):
            assert f(bands).sbp == (S(2),)
        for f in (
            partial(torch.flip, dims=(2,)),
            partial(torch.roll, shifts=1, dims=2),
            partial(torch.cumsum, dim=2),
            partial(torch.rot90, k=2, dims=(2, 3)),
        ):
            assert f(bands).sbp == (S(2),)
            close(full(f(bands)), f(x(2, 3, 8, 6)), str(f))

    simulate(1, alone)


def seen() -> list[str]:
    bands = x(2, 3, 8, 6).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(2))
    with flow.no_boxing():
        F.conv2d(bands, x(4, 3, 1, 1))  # no window crosses a boundary
        for f in (
            partial(F.conv2d, weight=x(4, 3, 3, 3)),
            partial(torch.cumsum, dim=2),
            partial(torch.roll, shifts=1, dims=2),
        ):
            with pytest.raises(BoxingError, match=r"would exchange .* with other ranks"):
                f(bands)
    with flow.boxing_log() as log:
        F.conv2d(bands, x(4, 3, 3, 3), padding=1)
        bands.cumsum(2)
    return [str(record) for record in log]


def test_exchanges_are_seen_and_forbidden() -> None:
    row = 2 * 3 * 6 * 8  # bytes
    want = [
        f"halo along dim 2  exchange  {row} B  ranks 0-1",
        f"totals of the shards of a split dim  all_gather  {row} B  ranks 0-1",
    ]
    assert simulate(2, seen) == [want, want]


def empty_pictures() -> list[Any]:
    where = flow.placement.all("cpu")
    out: list[Any] = []
    for mode, sbp in itertools.product(
        ("nearest", "nearest-exact", "bilinear", "bicubic", "area"), (B, S(0), S(1), S(2))
    ):
        x = torch.ones(0, 3, 4, 4).to_global(where, B).to_global(sbp=sbp).requires_grad_()
        y = F.interpolate(x, scale_factor=2, mode=mode)
        y.sum().backward()
        out.append((tuple(y.shape), tuple(x.grad.shape)))
    return out


def test_a_batch_without_pictures_is_interpolated() -> None:
    assert simulate(2, empty_pictures) == [[((0, 3, 8, 8), (0, 3, 4, 4))] * 20] * 2
