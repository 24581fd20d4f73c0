"""Tests of mixtures of experts: the op against a loop over tokens, and its traffic. Tests of expert
models are in test_expert_modules.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bodies import Bodies, values
from support.everywhere import compare, full
from support.oracle import check, close
from support.pool import run_on
from torch import Tensor

import globaltensor as flow
from globaltensor._ops.rules import grouped_linear
from globaltensor.distributed.communicator import Traffic, record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import BoxingError, ShapeError

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
bodies = Bodies()

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def operands(
    tokens: int, k: int, count: int, hidden: int = 6, inner: int = 4, seed: int = 0
) -> Operands:
    """Return x, index (some entries name no expert), weights, gate_up and down."""
    gen = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, count + 1, (tokens, k), generator=gen)
    shapes = (tokens, hidden), (tokens, k), (count, 2 * inner, hidden), (count, hidden, inner)
    x, weights, gate_up, down = (values(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    return x, index, weights, gate_up, down


def truth(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the mixture token by token."""
    rows = []
    for t in range(x.shape[0]):
        row = 0 * x[t]
        for j, e in enumerate(index[t].tolist()):
            if 0 <= e < gate_up.shape[0]:
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                row = row + weights[t, j] * (down[e] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else x * weights.sum()


def leaves(tensors: Any) -> list[Tensor]:
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


def spread(tensors: Any, placement: Any, layouts: Any) -> list[Tensor]:
    whole = [B] * placement.axes
    return [
        t.to_global(placement, whole)
        .to_global(sbp=layout)
        .detach()
        .clone()
        .requires_grad_(t.is_floating_point())
        for t, layout in zip(tensors, layouts, strict=True)
    ]


def kinds(log: list[Traffic]) -> list[str]:
    return [t.kind for t in log]


def agree(tensors: Operands, placement: Any, layouts: Any, twice: bool = False) -> None:
    """Check that results, gradients and (``twice``) second gradients equal those of the loop."""
    plain, ours = leaves(tensors), spread(tensors, placement, layouts)
    seed = values(*tensors[0].shape, seed=77)
    want, got = truth(*plain), flow.moe_experts(*ours)
    inside = placement.coordinate(world().rank) is not None
    same(got, want, inside, "result")
    into = [i for i, t in enumerate(plain) if t.requires_grad]
    with_seed = (
        (want * seed).sum() + want.pow(2).sum(),
        (got * seed.to_global(placement, [B] * placement.axes)).sum() + got.pow(2).sum(),
    )
    wants, gots = (
        torch.autograd.grad(
            total,
            [t[i] for i in into],
            create_graph=twice,
            allow_unused=True,
            materialize_grads=True,
        )
        for total, t in zip(with_seed, (plain, ours), strict=True)
    )
    for i, g, w in zip(into, gots, wants, strict=True):
        same(g, w, inside, f"gradient of operand {i}")
    total = sum(w.pow(2).sum() for w in wants)
    if twice:
        sum(g.pow(2).sum() for g in gots).backward()
        if total.requires_grad:  # where no token has an expert, the loop's gradients are constants
            total.backward()
        for i in into:
            want = torch.zeros_like(plain[i]) if plain[i].grad is None else plain[i].grad
            same(ours[i].grad, want, inside, f"second gradient of operand {i}")


def same(got: Tensor, want: Tensor, inside: bool, what: str) -> None:
    got = full(got)
    if inside:
        close(got, want.detach(), what)


# ------------------------------------------------------------------------------------ on one device


def test_on_plain_tensors() -> None:
    tensors = operands(9, 2, 4)
    plain, ours = leaves(tensors), leaves(tensors)
    want, got = truth(*plain), flow.moe_experts(*ours)
    close(got.detach(), want.detach(), "result")
    want.pow(2).sum().backward()
    got.pow(2).sum().backward()
    for o, p in zip(ours, plain, strict=True):
        if p.requires_grad:
            close(o.grad, p.grad, "gradient")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 5], ids=["aligned", "not aligned"])
def test_grouped_linear(dtype: torch.dtype, width: int) -> None:
    rows, weight, bias = (
        values(*shape).to(dtype).requires_grad_()
        for shape in ((10, width), (4, 16, width), (4, 16))
    )
    counts = [4, 0, 5, 1]
    got = flow.grouped_linear(rows, counts, weight, bias)
    want = torch.cat([F.linear(r, weight[e], bias[e]) for e, r in enumerate(rows.split(counts))])
    near = {"rtol": 2e-2, "atol": 6e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, want, **near)
    for again in (False, True):  # the gradient of a sum is an expanded tensor
        gots, wants = (
            torch.autograd.grad(
                t.sum() + t.pow(2).sum(),
                [rows, weight, bias],
                create_graph=again,
                retain_graph=True,
            )
            for t in (got, want)
        )
        for g, w in zip(gots, wants, strict=True):
            torch.testing.assert_close(g, w, rtol=near["rtol"], atol=8 * near["atol"])
    if dtype is not torch.bfloat16:
        gots, wants = (
            torch.autograd.grad(sum(g.pow(2).sum() for g in gs), [rows, weight])
            for gs in (gots, wants)
        )
        for g, w in zip(gots, wants, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-3)


def test_the_kernel_is_taken_where_there_is_one() -> None:
    assert grouped_linear._has_kernel(torch.ones(3, 8), torch.ones(2, 4, 8))
    assert not grouped_linear._has_kernel(
        torch.ones(3, 8, dtype=torch.float64), torch.ones(2, 4, 8, dtype=torch.float64)
    )
    assert not grouped_linear._has_kernel(torch.ones(3, 5), torch.ones(2, 4, 5))


@pytest.mark.parametrize(("change", "says"), [
    (lambda x, i, w, g, d: (x, i, w[:, :1], g, d),
        (r"index \[tokens, k\] and weights \[tokens, k\] are wanted, got \[7, 6\], \[7, 2\], \[7, "
        r"1\]")),
    (lambda x, i, w, g, d: (x[:6], i, w, g, d), r"x \[tokens, hidden\]"),
    (lambda x, i, w, g, d: (x, i, w, g, d[:2]),
        r"the first dim of every parameter is that of the experts, got \[3, 8, 6\], \[2, 6, 4\]"),
    (lambda x, i, w, g, d: (x, i, w), "got none"),
])  # fmt: skip
def test_shapes_that_do_not_fit(change: Any, says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        flow.moe_experts(*change(*operands(7, 2, 3)))
    placement = flow.placement("cpu", [0])
    with pytest.raises(ShapeError, match=says):
        flow.moe_experts(*[t.to_global(placement, S(0)) for t in change(*operands(7, 2, 3))])


def test_a_function_that_changes_the_shape_of_rows() -> None:
    x, index, weights, gate_up, _ = operands(7, 2, 3)
    with pytest.raises(ShapeError, match="it must keep their shape"):
        flow.moe_experts(x, index, weights, gate_up, function=lambda rows, counts, w: rows[:, :2])


# --------------------------------------------------------------------------------- on several ranks


@pytest.mark.parametrize("sizes", [(7, 2, 5), (3, 2, 1), (8, 3, 4)])
def test_every_signature(sizes: tuple[int, int, int]) -> None:
    met = check(flow.moe_experts, *operands(*sizes), grids=((2,), (3,), (2, 2)), most=30)
    assert {
        "S(0) S(0) S(0) S(0) S(0) -> S(0)",
        "B B B S(0) S(0) -> P",
        "S(0) S(0) S(0) B B -> S(0)",
    } <= met


@pytest.mark.long
def test_drawn_layouts() -> None:
    compare(flow.moe_experts, *operands(7, 2, 5), draws=4)
    compare(flow.moe_experts, *operands(1, 1, 3), grids=((3,), (2, 2)), draws=2)


ENTRIES = st.sampled_from([B, S(0)])


@st.composite
def mixtures(draw: Any) -> tuple[tuple[int, ...], Operands, Any]:
    """Draw a grid, operands of any sizes with any experts, and layouts."""
    grid = draw(st.sampled_from([(2,), (3,), (4,), (2, 2)]))
    tokens, k, count = draw(st.integers(0, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 7))
    x, index, weights, gate_up, down = operands(tokens, k, count, 4, 2)
    which = draw(st.lists(st.integers(-1, count), min_size=tokens * k, max_size=tokens * k))
    index = torch.tensor(which, dtype=torch.int64).view(tokens, k)
    rows, matrices = ([draw(ENTRIES) for _ in grid] for _ in range(2))
    return grid, (x, index, weights, gate_up, down), [rows] * 3 + [matrices] * 2


def on_grid(grid: tuple[int, ...], tensors: Operands, layouts: Any) -> None:
    agree(
        tensors, flow.placement("cpu", torch.arange(world().size).reshape(grid).tolist()), layouts
    )


@pytest.mark.long
@given(mixtures())
@settings(max_examples=40, deadline=None)
def test_any_tokens_to_any_experts(mixture: tuple[tuple[int, ...], Operands, Any]) -> None:
    simulate(int(torch.tensor(mixture[0]).prod()), on_grid, *mixture, timeout=20.0)


EXPERT = [S(0)] * 5


@bodies.on(2)
def test_exact_on_two() -> None:
    everyone = flow.placement.all("cpu")
    for sizes in ((7, 2, 5), (1, 1, 2), (5, 2, 1), (6, 2, 4)):
        agree(operands(*sizes), everyone, EXPERT, twice=True)


@bodies.on(4)
def test_exact_on_four() -> None:
    everyone = flow.placement.all("cpu")
    agree(operands(9, 2, 6), everyone, EXPERT, twice=True)
    agree(
        operands(3, 2, 2), everyone, EXPERT, twice=True
    )  # ranks without tokens and ranks without experts


@pytest.mark.long
@bodies.on(4)
def test_exact_on_a_grid() -> None:
    grid = flow.placement("cpu", [[0, 1], [2, 3]])
    both, first, second = [S(0), S(0)], [S(0), B], [B, S(0)]
    for tokens, matrices in (
        (both, second),
        (both, both),
        (first, second),
        (first, both),
        (second, both),
    ):
        agree(operands(9, 2, 6), grid, [tokens] * 3 + [matrices] * 2, twice=True)


@bodies.on(2)
def test_all_tokens_to_one_expert() -> None:
    x, _, weights, gate_up, down = operands(8, 2, 4)
    for expert in (0, 3, 4):  # 4 is no expert
        agree(
            (x, torch.full((8, 2), expert), weights, gate_up, down),
            flow.placement.all("cpu"),
            EXPERT,
            twice=True,
        )


@bodies.on(4)
def test_ranks_outside() -> None:
    agree(operands(7, 2, 3), flow.placement("cpu", [2, 0]), EXPERT)


@bodies.on(2)
def test_only_some_operands_have_gradients() -> None:
    tensors, everyone = operands(5, 2, 2), flow.placement.all("cpu")
    for having in ([0], [2], [3], [4], [0, 4]):
        plain, ours = leaves(tensors), spread(tensors, everyone, EXPERT)
        for i in range(5):
            for t in (plain[i], ours[i]):
                t.requires_grad_(i in having)
        truth(*plain).pow(2).sum().backward()
        flow.moe_experts(*ours).pow(2).sum().backward()
        for i in having:
            close(full(ours[i].grad), plain[i].grad, f"gradient of operand {i} of {having}")


def biased(rows: Tensor, counts: list[int], weight: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return flow.grouped_linear(rows, counts, weight, bias).tanh() * scale


@bodies.on(2)
def test_another_kind_of_expert() -> None:
    everyone = flow.placement.all("cpu")
    tensors = (
        values(7, 6),
        torch.arange(14).view(7, 2) % 3,
        values(7, 2),
        values(3, 6, 6),
        values(3, 6),
        values(6),
    )
    plain, ours = leaves(tensors), spread(tensors, everyone, [*[S(0)] * 5, B])
    got = flow.moe_experts(*ours[:5], function=biased, shared=(ours[5],))
    one = [[(plain[3][e] @ x + plain[4][e]).tanh() * plain[5] for e in range(3)] for x in plain[0]]
    want = torch.stack(
        [
            sum(plain[2][t, j] * one[t][e] for j, e in enumerate(plain[1][t].tolist()))
            for t in range(7)
        ]
    )
    close(full(got), want.detach(), "result")
    want.pow(2).sum().backward()
    got.pow(2).sum().backward()
    for i in (0, 2, 3, 4, 5):
        close(full(ours[i].grad), plain[i].grad, f"gradient of operand {i}")


@bodies.on(2)
def test_under_autocast_tokens_travel_in_its_type() -> None:
    everyone = flow.placement.all("cpu")
    tensors = [t.float() if t.is_floating_point() else t for t in operands(16, 2, 4, 8, 8)]
    ours, plain = spread(tensors, everyone, EXPERT), leaves(tensors)
    with record_collectives() as wide:
        flow.moe_experts(*ours)
    with torch.autocast("cpu", torch.bfloat16):
        with record_collectives() as narrow:
            got = flow.moe_experts(*ours)
        want = flow.moe_experts(*plain)
    assert got.dtype is want.dtype is torch.float32
    torch.testing.assert_close(full(got), want.detach(), rtol=2e-2, atol=2e-2)
    assert [t.bytes for t in wide if t.kind == "all_to_all"] == [
        2 * t.bytes for t in narrow if t.kind == "all_to_all"
    ]
    got.sum().backward()
    assert all(
        t.grad is not None and t.grad.dtype is torch.float32 for t in ours if t.requires_grad
    )


def real() -> None:
    bodies.run()


def test_on_real_processes() -> None:
    run_on(2, real)


# ------------------------------------------------------------------------------------------ traffic


def traffic(layouts: Any, grid: Any) -> tuple[list[Traffic], list[Traffic]]:
    ours = spread(operands(8, 2, 4), flow.placement("cpu", grid), layouts)
    with record_collectives() as there:
        out = flow.moe_experts(*ours)
    with record_collectives() as back:
        torch.autograd.grad(out, [t for t in ours if t.requires_grad], out.detach())
    return there, back


def test_two_exchanges_each_way() -> None:
    for n in (2, 4):
        for there, back in simulate(n, traffic, EXPERT, list(range(n))):
            assert kinds(there) == [
                "all_gather",
                "all_to_all",
                "all_to_all",
            ]  # the first sends the number of rows for each rank
            assert there[0].bytes <= 8 * 4 * n
            assert kinds(back) == ["all_to_all", "all_to_all"]


def test_each_row_of_experts_exchanges_for_itself() -> None:
    tokens, matrices = [S(0), S(0)], [B, S(0)]
    for rank, (there, back) in enumerate(
        simulate(4, traffic, [tokens] * 3 + [matrices] * 2, [[0, 1], [2, 3]])
    ):
        assert kinds(there) == ["all_gather", "all_to_all", "all_to_all"]
        assert {t.ranks for t in there} == {(0, 1) if rank < 2 else (2, 3)}
        assert sorted(kinds(back)) == [
            "all_reduce",
            "all_reduce",
            "all_to_all",
            "all_to_all",
        ]  # gradients of both parameters, over the first axis


def test_whole_tokens_do_not_travel() -> None:
    for there, _ in simulate(2, traffic, [B, B, B, S(0), S(0)], [0, 1]):
        assert not there
    for there, _ in simulate(2, traffic, [S(0), S(0), S(0), B, B], [0, 1]):
        assert not there


def rows_sent() -> int:
    """Return the bytes sent for 8 tokens in two halves. The first half needs the second rank's
    experts, and the second half needs the experts of its own rank."""
    x, _, weights, gate_up, down = operands(8, 1, 4)
    index = torch.tensor([2, 3, 2, 3, 2, 3, 3, 3]).view(8, 1)
    ours = spread((x, index, weights, gate_up, down), flow.placement.all("cpu"), EXPERT)
    with record_collectives() as log:
        flow.moe_experts(*ours)
    return next(t.bytes for t in log if t.kind == "all_to_all")


def test_rows_that_are_at_home_are_not_sent() -> None:
    assert simulate(2, rows_sent) == [4 * 6 * 8, 0]


def logged() -> str:
    ours = spread(operands(8, 2, 4), flow.placement.all("cpu"), EXPERT)
    with flow.boxing_log() as log:
        flow.moe_experts(*ours)
    with (
        pytest.raises(BoxingError, match="experts: tokens to their experts, and back"),
        flow.no_boxing(),
    ):
        flow.moe_experts(*ours)
    (one,) = log
    return one.op


def test_the_exchange_is_logged_and_can_be_forbidden() -> None:
    assert simulate(2, logged) == ["experts: tokens to their experts, and back"] * 2
