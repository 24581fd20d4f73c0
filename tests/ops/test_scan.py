"""Tests of cumulative functions, extremes with their indices, and topk over a split dim: results
equal plain torch's, and little of the operand is moved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.everywhere import compare, full
from support.oracle import check, close, spelled
from support.pool import run_on

import globaltensor as flow
from globaltensor.boxing import ExchangeRecord
from globaltensor.cluster import Cluster, use_cluster
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.sbp import Sbp, broadcast, split

B, S = broadcast, split
INF, NAN = float("inf"), float("nan")


def x(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape) + sum(shape))
    )


def ids(top: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(top))


zeros = torch.where(x(7, 3) > 0.7, 0.0, x(7, 3))
ties = ids(3, 9, 2).double()
SCANS: list[tuple[Any, ...]] = [
    *[(partial(f, dim=0), t) for f in (torch.cumsum, torch.cumprod,
        torch.logcumsumexp) for t in (x(7, 3), x(2), x(1, 3))],
    *[(partial(f, dim=-1), x(2, 5)) for f in (torch.cumsum, torch.cumprod, torch.logcumsumexp,
        torch.cummax, torch.cummin)],
    (partial(torch.cumprod, dim=0), zeros), (partial(torch.cumsum, dim=0), ids(9, 7, 2)),
    (partial(torch.cumprod, dim=0), ids(4, 5).to(torch.int32)),
    (partial(torch.cumsum, dim=0, dtype=torch.float64), ids(9, 7)),
    (partial(torch.cumsum, dim=0, dtype=torch.int32), ids(9, 7)),
    (partial(torch.cumsum, dim=0), ids(2, 7).bool()),
    *[(partial(f, dim=0), t) for f in (torch.cummax, torch.cummin) for t in (x(7, 3), x(2), ties,
        ids(3, 7), ids(2, 6).bool())],
]  # fmt: skip
BEST: list[tuple[Any, ...]] = [
    *[(partial(f, dim=d, keepdim=k), x(5, 3)) for f in (torch.max, torch.min, torch.argmax,
        torch.argmin) for d in (0, -1) for k in (False, True)],
    *[(partial(f, dim=0), t) for f in (torch.max, torch.min, torch.argmax,
        torch.argmin) for t in (ties, ids(3, 7), x(2, 3))],
    *[(f, t) for f in (torch.argmax, torch.argmin) for t in (x(5, 3), ties, x(2, 3, 4), ids(3, 7),
        x(1))],
    (partial(torch.argmax, keepdim=True), x(3, 4)),
    *[(partial(torch.topk, k=k, dim=d, largest=b), x(5, 4)) for k in (0, 1, 3, 4) for d in (0,
        1) for b in (False, True)],
    (partial(torch.topk, k=2), x(2)),
]  # fmt: skip
PICKS: list[tuple[Any, ...]] = [
    *[(partial(torch.kthvalue, k=k, dim=d, keepdim=b), x(5, 4)) for k in (1, 3) for d in (0,
        1) for b in (False, True)],
    *[(partial(f, dim=0), t) for f in (torch.median, torch.nanmedian) for t in (x(9, 2),
        x(8, 3).float(), x(2, 3), torch.randperm(9), x(1, 2))],
    (partial(torch.median, dim=-1, keepdim=True), x(2, 6)),
    (partial(torch.median, dim=1), x(2, 5, 3)),
]  # fmt: skip
SORTS: list[tuple[Any, ...]] = [
    *[(partial(torch.sort, dim=0, descending=b), t) for b in (False, True) for t in (x(9, 2), x(7),
        ties, ids(3, 8), x(2), x(9).float(), x(3, 0, 2))],
    *[(partial(torch.sort, dim=0), (ids(250, 9) - n).to(t)) for n,
        t in ((0, torch.uint8), (125, torch.int8), (125, torch.int32), (125, torch.int16))],
    (partial(torch.sort, dim=0), (ids(9, 9) - 5) * (1 << 60)),
    (partial(torch.sort, dim=0), ids(2, 7).bool()), (partial(torch.sort, dim=0, stable=True), ties),
    (torch.sort, x(2, 7)), (partial(torch.argsort, dim=0), ties),
    (partial(torch.argsort, descending=True), x(6)), (torch.msort, x(7, 2)),
    (partial(torch.sort, dim=1), x(2, 5, 3)),
]  # fmt: skip


def name(row: tuple[Any, ...]) -> str:
    given = row[0].keywords if isinstance(row[0], partial) else ""
    return (
        f"{getattr(row[0], 'func', row[0]).__name__} {given} {row[1].dtype} {tuple(row[1].shape)}"
    )


def function_of(row: tuple[Any, ...]) -> str:
    return getattr(row[0], "func", row[0]).__name__


@pytest.mark.parametrize("row", SCANS + BEST + PICKS + SORTS, ids=name)
@pytest.mark.sweep(18, kind=function_of)
def test_every_signature(row: tuple[Any, ...]) -> None:
    function, kwargs = (
        (row[0].func, row[0].keywords) if isinstance(row[0], partial) else (row[0], {})
    )
    met = check(function, row[1], most=30, **kwargs)
    d = kwargs.get("dim", -1 if row in SORTS and function is not torch.msort else 0) % row[1].ndim
    assert any(f"S({d})" in text.split(" -> ")[0] for text in met)


@pytest.mark.parametrize("row", SCANS + BEST + PICKS + SORTS, ids=name)
@pytest.mark.sweep(18, kind=function_of)
def test_on_global_tensors(row: tuple[Any, ...]) -> None:
    # else the exchange would not pay off for so few elements
    with use_cluster(Cluster(launch=0.0, latency=0.0)):
        compare(*row, draws=3)


@pytest.mark.parametrize(
    "function", [torch.Tensor.cumsum_, torch.Tensor.cumprod_], ids=lambda f: f.__name__
)
def test_in_place(function: Any) -> None:
    met = check(function, x(5, 3), 0, inplace=True)
    assert any(text.startswith("S(0)") for text in met)


SPECIAL = [
    [1.0, NAN, 2.0, NAN, 3.0], [NAN, 0.0, 1.0, NAN, -1.0], [-INF] * 5, [INF, -INF, INF, 0.0, INF],
    [0.0, 0.0, -0.0, 0.0, 0.0], [-INF, -INF, 1.0, -INF, 2.0],
]  # fmt: skip


def on_special(functions: list[Any]) -> None:
    placement = flow.placement.all("cpu")
    for f in functions:
        for row in SPECIAL:
            plain = torch.tensor(row, dtype=torch.float64)
            want, got = f(plain), f(plain.to_global(placement, B).to_global(sbp=S(0)))
            for w, g in zip(
                *[t if isinstance(t, tuple) else (t,) for t in (want, got)], strict=True
            ):
                close(full(g), w, f"{f} of {row}")


@pytest.mark.long
@pytest.mark.parametrize("n", [3, 7, 2, 4])
@pytest.mark.sweep(2)
def test_nans_infinities_and_equals(n: int) -> None:
    functions = [torch.argmax, torch.argmin]
    functions += [
        partial(f, dim=0)
        for f in (
            torch.cummax,
            torch.cummin,
            torch.max,
            torch.min,
            torch.argmax,
            torch.cumsum,
            torch.cumprod,
            torch.logcumsumexp,
        )
    ]
    functions += [
        lambda t, f=f: f(t, dim=0)[0]
        for f in (torch.median, torch.nanmedian, partial(torch.kthvalue, k=2))
    ]
    functions += [
        partial(f, dim=0, descending=b) for f in (torch.sort, torch.argsort) for b in (False, True)
    ]
    with use_cluster(Cluster(launch=0.0, latency=0.0)):
        simulate(n, on_special, functions)


def on_halves(dtype: torch.dtype) -> None:
    placement = flow.placement.all("cpu")
    for row in [*SPECIAL, x(9).tolist()]:
        plain = torch.tensor(row, dtype=dtype)
        for f in (partial(torch.sort, descending=b) for b in (False, True)):
            for w, g in zip(
                f(plain), f(plain.to_global(placement, B).to_global(sbp=S(0))), strict=True
            ):
                assert g.sbp == (S(0),)
                close(full(g), w, f"{f} of {row}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sorting_narrow_types(dtype: torch.dtype) -> None:
    with use_cluster(Cluster(launch=0.0, latency=0.0)):
        simulate(3, on_halves, dtype)


def twice(
    function: Callable[..., Any], whole: torch.Tensor, layout: list[Sbp], grid: tuple[int, ...]
) -> None:
    n = int(torch.tensor(grid).prod())
    placement = flow.placement("cpu", torch.arange(n).reshape(grid).tolist())
    ours = (
        whole.to_global(placement, [B] * len(grid)).to_global(sbp=layout).detach().requires_grad_()
    )
    found = []
    for t in (whole.clone().requires_grad_(), ours):
        out = function(t)
        out = out[0] if isinstance(out, tuple) else out
        (first,) = torch.autograd.grad((out.sin() * out).sum(), t, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), t)
        found.append([out, first, second])
    for i, (w, g) in enumerate(zip(*found, strict=True)):
        close(full(g), w.detach(), f"value {i} of {layout} on {grid}")


SMOOTH = [
    *[(partial(f, dim=0), t) for f in (torch.cumsum, torch.cumprod, torch.logcumsumexp,
        torch.cummax, torch.max) for t in (x(7, 3), x(2, 3))],
    (partial(torch.sort, dim=0), x(7, 3)), (partial(torch.sort, dim=0), x(2, 2)),
    (partial(torch.topk, k=2, dim=0), x(7, 3)),
    (partial(torch.cumprod, dim=0), zeros), (partial(torch.median, dim=0), x(7, 3)),
    (partial(torch.kthvalue, k=2, dim=0), x(2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("row", SMOOTH, ids=name)
@pytest.mark.sweep(2)
def test_gradients_of_gradients(row: tuple[Any, ...]) -> None:
    with use_cluster(Cluster(launch=0.0, latency=0.0)):
        simulate(2, twice, *row, [S(0)], (2,))
        simulate(5, twice, *row, [S(0)], (5,))
        simulate(4, twice, *row, [S(0), S(0)], (2, 2))
        simulate(4, twice, *row, [S(1), S(0)], (2, 2))


def test_on_processes() -> None:
    for f in (torch.cumsum, torch.cummax, torch.max):
        run_on(2, twice, partial(f, dim=0), x(7, 3), [S(0)], (2,))


# ------------------------------------------------------------------------------------------ traffic

N, WIDTH = 64, 3


def traffic(function: Callable[..., Any]) -> tuple[Any, list[str], int, list[str], int]:
    ours = (
        x(N, WIDTH)
        .to_global(flow.placement.all("cpu"), B)
        .to_global(sbp=S(0))
        .detach()
        .requires_grad_()
    )
    with record_collectives() as there:
        out = function(ours)
    first = out[0] if isinstance(out, tuple) else out
    total = first.sum() if first.requires_grad else None
    with record_collectives() as back:
        if total is not None:
            total.backward()
    return (
        first.sbp[0].short,
        [t.kind for t in there],
        sum(t.bytes for t in there),
        [t.kind for t in back],
        sum(t.bytes for t in back),
    )


ROWS = 3 * WIDTH * 8  # bytes that the other three of four ranks send, one row each
FORWARD, BACKWARD = ["all_gather"], ["reduce_scatter"]


@pytest.mark.parametrize(
    ("function", "sbp", "forward", "rows", "backward"),
    [
        (torch.cumsum, "S(0)", FORWARD, 1, BACKWARD), (torch.cumprod, "S(0)", FORWARD, 1, BACKWARD),
        (torch.logcumsumexp, "S(0)", FORWARD, 1, BACKWARD),
        (torch.cummax, "S(0)", 2 * FORWARD, 2, BACKWARD),
        (torch.max, "B", 2 * FORWARD, 2, BACKWARD), (torch.argmin, "B", 2 * FORWARD, 2, []),
    ],
    ids=spelled,
)  # fmt: skip
@pytest.mark.sweep(2)
def test_a_total_of_each_part_is_all_that_moves(
    function: Any, sbp: str, forward: list[str], rows: int, backward: list[str]
) -> None:
    for found in simulate(4, traffic, partial(function, dim=0)):
        assert found == (sbp, forward, rows * ROWS, backward, ROWS * len(backward))


def test_topk_moves_its_candidates() -> None:
    for found in simulate(4, traffic, partial(torch.topk, k=2, dim=0)):
        assert found == ("B", 2 * ["exchange"], 2 * 2 * ROWS, ["exchange"], 2 * ROWS)


def test_argmax_of_all_moves_two_numbers() -> None:
    assert simulate(4, traffic, torch.argmax) == [("B", 2 * FORWARD, 2 * 3 * 8, [], 0)] * 4


def sort_traffic(n: int, function: Callable[..., Any], width: int) -> tuple[Any, list[str], int]:
    shape = (n, width) if width else (n,)
    ours = x(*shape).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
    with record_collectives() as log:
        out = function(ours)
    return (
        (out if isinstance(out, torch.Tensor) else out[0]).sbp[0].short,
        [t.kind for t in log if t.kind != "all_reduce"],
        sum(t.bytes for t in log),
    )


@pytest.mark.parametrize(
    "function",
    [partial(torch.sort, dim=0), partial(torch.argsort, dim=0), torch.msort],
    ids=spelled,
)
def test_a_long_sort_gathers_nothing(function: Any) -> None:
    n = 1 << 18
    for short, kinds, nbytes in simulate(4, sort_traffic, n, function, 0):
        assert (short, kinds) == ("S(0)", ["all_gather"] * 2 + ["all_to_all"] * 2)
        assert nbytes < 1.05 * 2 * n * 8 / 4, (
            "each element goes to its place: its value and its index"
        )


def reasons_of_a_sort() -> list[list[str]]:
    ours = x(64).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0)).requires_grad_()  # type: ignore[attr-defined]
    with flow.boxing_log() as forward:
        values = ours.sort().values
    with flow.boxing_log() as backward:
        (grad,) = torch.autograd.grad(values.pow(3).sum(), ours, create_graph=True)
    with flow.boxing_log() as double_backward:
        grad.pow(2).sum().backward()
    logs = forward, backward, double_backward
    return [[r.op for r in log if isinstance(r, ExchangeRecord)] for log in logs]


def test_the_exchange_of_a_double_backward_is_named() -> None:
    places = "elements to their places in a split dim"
    with use_cluster(Cluster(launch=0.0, latency=0.0)):
        for forward, backward, double_backward in simulate(2, reasons_of_a_sort):
            assert places in forward
            assert f"backward of {places}" in backward
            assert f"backward of backward of {places}" in double_backward
            assert places not in (*backward, *double_backward)


@pytest.mark.parametrize(
    "function", [partial(torch.kthvalue, k=77, dim=0), partial(torch.median, dim=0)], ids=spelled
)
@pytest.mark.sweep(2)
def test_one_place_in_the_order_moves_counts_only(function: Any) -> None:
    for short, kinds, nbytes in simulate(4, sort_traffic, 1 << 20, function, 0):
        assert (short, kinds) == ("B", ["all_gather"] * 2)
        assert nbytes < 1 << 13


def test_many_lanes_are_dealt_out_and_few_elements_gathered() -> None:
    assert {
        found[0] for found in simulate(4, sort_traffic, 64, partial(torch.sort, dim=0), 4096)
    } == {"S(1)"}
    assert {
        tuple(found[1]) for found in simulate(4, sort_traffic, 64, partial(torch.sort, dim=0), 0)
    } == {("all_gather",)}


# -------------------------------------------------------------------------- user-defined operations


def _after(left: Any, right: Any) -> Any:
    return {"a": left["a"] * right["a"], "b": right["a"] * left["b"] + right["b"]}


def _one_by_one(a: torch.Tensor, b: torch.Tensor, dim: int, reverse: bool) -> list[torch.Tensor]:
    places = list(zip(a.unbind(dim), b.unbind(dim), strict=True))
    done: list[Any] = []
    for x, y in reversed(places) if reverse else places:
        done.append(_after(done[-1], {"a": x, "b": y}) if done else {"a": x, "b": y})
    return [torch.stack([d[k] for d in (reversed(done) if reverse else done)], dim) for k in "ab"]


@pytest.mark.parametrize("mode", ["generic", "pointwise"])
@pytest.mark.parametrize(("dim", "reverse"), [(0, False), (1, True), (-1, False)])
@pytest.mark.sweep(3)
def test_associative_scan(mode: str, dim: int, reverse: bool) -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    def scan(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        if not isinstance(a, flow.GlobalTensor):
            return _one_by_one(a, b, dim, reverse)
        found: Any = associative_scan(
            _after, {"a": a, "b": b}, dim, reverse=reverse, combine_mode=mode
        )
        return [found["a"], found["b"]]

    compare(scan, x(5, 3, 2), x(5, 3, 2).sin(), draws=3)


def test_associative_scan_of_plain_tensors_is_torchs_own() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    given = x(5, 3)
    torch.testing.assert_close(
        associative_scan(torch.add, given, 0, combine_mode="generic"), given.cumsum(0)
    )
