"""Tests of mixed precision: autocast over every layout, GradScaler over all ranks, and gradients of
half parameters summed in float32."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.everywhere import full
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import noted

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
Loss = Callable[..., torch.Tensor]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(t: torch.Tensor, *sbp: Any, grid: tuple[int, ...] | None = None) -> torch.Tensor:
    where = (
        flow.placement.all("cpu")
        if grid is None
        else flow.placement(
            "cpu", torch.arange(int(torch.tensor(grid).prod())).reshape(grid).tolist()
        )
    )
    return t.to_global(where, [B] * where.axes).to_global(sbp=list(sbp)).detach().clone()  # type: ignore[no-any-return]


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3))


START = network()
TABLES = {"data": {"*": B}, "fsdp": {"*": S(0)}, "tensor": {"0.*": S(0), "3.weight": S(1), "*": B}}

# ----------------------------------------------------------------------------------------- autocast

HALVES = (torch.bfloat16, torch.float16)
TARGET = torch.tensor([0, 2, 1, -100, 2])
#: name -> (function, shapes of its operands)
CASES: dict[str, tuple[Loss, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(5, 4), (3, 4), (3,)]),
    "matmul": (torch.matmul, [(2, 5, 4), (4, 3)]),
    "baddbmm": (torch.baddbmm, [(2, 5, 3), (2, 5, 4), (2, 4, 3)]),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), [(2, 5, 4), (2, 4, 3)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(3, 4, 7), (6, 4, 3), (6,)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), [(2, 4, 7, 6), (3, 4, 3, 3)]),
    "attention": (F.scaled_dot_product_attention, [(2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(5, 4, 6), (6,), (6,)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [(3, 4, 5)]),
    "softmax": (lambda x: F.softmax(x, 1), [(5, 6)]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [(5, 6)]),
    "mse_loss": (F.mse_loss, [(5, 4), (5, 4)]),
    "kl_div": (
        lambda x, y: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="batchmean"),
        [(5, 4), (5, 4)],
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y)),
        [(5, 4), (5, 4)],
    ),
    "cosine": (lambda x, y: F.cosine_similarity(x, y), [(5, 4), (5, 4)]),
    "norm": (lambda x: torch.linalg.vector_norm(x, 2, 1), [(5, 4)]),
    "sum": (lambda x: (x @ x.transpose(0, 1)).sum(1), [(5, 4)]),
    "exp and cumsum": (lambda x: x.exp().cumsum(1), [(5, 4)]),
    "embedding and linear": (
        lambda x, w: F.linear(F.embedding(torch.tensor([1, 3, 2, 0]), x), w),
        [(5, 4), (3, 4)],
    ),
    "linear after linear": (
        lambda x, v, w: F.linear(torch.relu(F.linear(x, v)), w),
        [(5, 4), (6, 4), (3, 6)],
    ),
    "cross_entropy after linear": (
        lambda x, w: F.cross_entropy(F.linear(x, w), TARGET),
        [(5, 4), (3, 4)],
    ),
    "smoothed cross_entropy": (
        lambda x, w: F.cross_entropy(F.linear(x, w), TARGET, label_smoothing=0.1, reduction="sum"),
        [(5, 4), (3, 4)],
    ),
    "weighted cross_entropy": (
        lambda x, w, v: F.cross_entropy(F.linear(x, w), TARGET, weight=v.exp().detach()),
        [(5, 4), (3, 4), (3,)],
    ),
    "soft cross_entropy": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w), target=F.softmax(y, 1)),
        [(5, 4), (3, 4), (5, 3)],
    ),
    "layer_norm after linear": (lambda x, w: F.layer_norm(F.linear(x, w), (3,)), [(5, 4), (3, 4)]),
    "softmax after linear": (lambda x, w: F.softmax(F.linear(x, w), -1), [(5, 4), (3, 4)]),
    "batch_norm after conv": (
        lambda x, w: F.batch_norm(F.conv1d(x, w), None, None, training=True),
        [(4, 4, 7), (6, 4, 3)],
    ),
    "attention after linear": (
        lambda x, w: F.scaled_dot_product_attention(*[F.linear(x, w)] * 3, is_causal=True),
        [(2, 4, 6, 4), (4, 4)],
    ),
    "addition of both": (lambda x, w: F.linear(x, w) + x[:, :3], [(5, 4), (3, 4)]),
}
LAYOUTS = [
    (0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 0), (2, 0, 0), (2, 2, 2), (3, 0, 0), (-1, 0, -1),
    (-1, 1, 0), (-1, -1, -1), (0, -1, 0), (-2, 0, 0), (-2, -2, -1)
]  # fmt: skip


def layouts(shapes: list[tuple[int, ...]]) -> list[tuple[Any, ...]]:
    """Return the sbp of each operand: -1 is broadcast, -2 partial, others the dim that is split."""
    found = [
        tuple(
            B if d == -1 or d >= len(s) else P if d == -2 else S(d)
            for d, s in zip(row, shapes, strict=False)
        )
        for row in LAYOUTS
    ]
    return list(dict.fromkeys(found))


def near(got: torch.Tensor, want: torch.Tensor, share: float = 0.03) -> None:
    """Check that two tensors are equal up to rounding to half precision: a share of the maximum."""
    worst = float((got.float() - want.float()).abs().max())
    assert worst <= share * max(1.0, float(want.float().abs().max())), f"off by {worst}"


def _autocast(name: str, dtype: torch.dtype, grid: tuple[int, ...]) -> None:
    function, shapes = CASES[name]
    for row in layouts(shapes):
        plain = [values(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
        ours = [
            spread(t.detach(), *([e] + [B] * (len(grid) - 1)), grid=grid).requires_grad_()
            for t, e in zip(plain, row, strict=True)
        ]
        with torch.autocast("cpu", dtype=dtype):
            want, got = function(*plain), function(*ours)
        try:
            assert got.dtype is want.dtype
            assert got.to_local().dtype is want.dtype
            near(full(got), want.detach())
            g = values(*want.shape, seed=9)
            want.backward(g.to(want.dtype))
            got.backward(g.to(want.dtype))
            for a, b in zip(ours, plain, strict=True):
                if b.grad is None:
                    assert a.grad is None
                    continue
                assert a.grad.dtype is b.grad.dtype is torch.float32
                near(full(a.grad), b.grad)
        except Exception as error:
            noted(error, f"{name} of {row} on {grid}")
            raise


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.sweep(45)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for grid in ((2,), (2, 2)):
            simulate(
                grid[0] * (grid[1] if len(grid) > 1 else 1),
                _autocast,
                name,
                dtype,
                grid,
                timeout=20.0,
            )


def test_convolutions_where_a_rank_has_nothing_or_a_part_of_space() -> None:
    """Convolutions run where a rank has no elements, or a shard of a spatial dim. There the bias is
    added separately, in the dtype of the convolution's result."""

    def body() -> None:
        line = flow.placement("cpu", [0, 1, 2])
        x, w, b = (
            torch.ones(*shape).to_global(line, flow.sbp.broadcast).requires_grad_()
            for shape in ((2, 4, 7), (4, 4, 3), (4,))
        )
        for d in (0, 1, 2):
            for function in (F.conv1d, F.conv_transpose1d):
                with torch.autocast("cpu", torch.bfloat16):
                    y = function(
                        x.to_global(sbp=flow.sbp.split(d)),
                        w.to_global(sbp=flow.sbp.split(1 - d) if d == 1 else flow.sbp.broadcast),
                        b,
                    )
                assert y.dtype is y.to_local().dtype is torch.bfloat16
                y.float().sum().backward()

    simulate(3, body, timeout=20.0)


def _nested() -> None:
    x, w = spread(values(5, 4), S(0)), spread(values(3, 4), B)
    low, high = torch.bfloat16, torch.float32
    for _ in range(2):  # planned, then from cached plans
        assert F.linear(x, w).dtype is high
        with torch.autocast("cpu", dtype=low):
            y = F.linear(x, w)
            assert y.dtype is low
            with torch.autocast("cpu", enabled=False):
                assert F.linear(x, w).dtype is high
                assert F.linear(y.float(), w[:, :3]).dtype is high
            with torch.autocast("cpu", dtype=torch.float16):
                assert F.linear(x, w).dtype is torch.float16
            assert F.linear(x, w).dtype is low
            assert torch.is_autocast_enabled("cpu")
        assert F.linear(x, w).dtype is high

    @torch.autocast("cpu", dtype=low)
    def decorated(t: torch.Tensor) -> torch.Tensor:
        return F.linear(t, w)

    assert decorated(x).dtype is low
    with (
        torch.autocast("cuda", dtype=torch.float16)
        if torch.cuda.is_available()
        else torch.autocast("cpu", dtype=low)
    ):
        assert (x + 1).dtype is high


def test_nested_autocast() -> None:
    simulate(2, _nested)


class Cube(torch.autograd.Function):
    """A function like the one in torch's documentation: inputs are cast, and autocast is off
    inside."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


def _custom() -> None:
    x, w = values(5, 4).requires_grad_(), values(4, 4, seed=1)
    ours = spread(x.detach(), S(0)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = Cube.apply(x @ w).sum()
    want.backward()
    for cube in (flow.local_map(Cube.apply, out_sbp=S(0), in_sbp=S(0)), Cube.apply):
        ours.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = cube(ours @ spread(w, B)).sum()
        got.backward()
        near(full(got), want.detach())
        near(full(ours.grad), x.grad)


def test_custom_functions_under_autocast() -> None:
    simulate(2, _custom)


# --------------------------------------------------------------------------------------- GradScaler

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def scaled(table: Any, make: Any, clip: bool) -> list[list[float]]:
    """Train and compare with plain torch. Some batches have an inf in the last row, which is in the
    last rank's shard."""
    plain, ours = (
        copy.deepcopy(START),
        copy.deepcopy(START).to_global(flow.placement.all("cpu"), table),
    )
    scales: list[list[float]] = []
    for model, feed in ((plain, lambda t: t), (ours, lambda t: spread(t, S(0)))):
        optimizer, scaler = (
            make(model.parameters()),
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
        )
        scales.append([])
        for i in range(6):
            optimizer.zero_grad()
            t = values(5, 4, seed=i)
            if i in (1, 4):
                t[4] = float("inf") if i == 1 else float("nan")
            before = [
                full(p).clone() if p.is_global else p.detach().clone() for p in model.parameters()
            ]
            scaler.scale(model(feed(t)).square().mean()).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            scales[-1].append(scaler.get_scale())
            moved = [
                not torch.equal(full(p) if p.is_global else p, b)
                for p, b in zip(model.parameters(), before, strict=True)
            ]
            assert not any(moved) if i in (1, 4) else all(moved), (i, moved)
        state = scaler.state_dict()
        torch.amp.GradScaler("cpu").load_state_dict(state)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(a), b.detach(), rtol=1e-4, atol=1e-5)
    assert scales[0] == scales[1]
    return scales


@pytest.mark.parametrize("clip", [False, True], ids=["as it comes", "clipped"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("mode", list(TABLES))
@pytest.mark.sweep(5)
def test_grad_scaler(mode: str, name: str, clip: bool) -> None:
    found = simulate(2, scaled, TABLES[mode], OPTIMIZERS[name], clip, timeout=20.0)
    assert found[0] == found[1]
    assert found[0][0] == [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0]


@pytest.mark.parametrize("name", ["AdamW fused", "SGD foreach"])
def test_grad_scaler_where_somebody_watches_the_steps(name: str) -> None:
    """GradScaler works with hooks on the optimizer's steps. Such steps run the kernels over lists
    of global tensors."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name](parameters)
        optimizer.register_step_pre_hook(lambda *args: None)
        return optimizer

    for table in TABLES.values():
        simulate(2, scaled, table, make, True, timeout=20.0)


def _stages() -> None:
    """Train parameters on several placements. An inf in one stage skips the step of the others."""
    first, second = flow.placement("cpu", [0, 1]), flow.placement("cpu", [2])
    for bad in (False, True):
        a, b = (
            copy.deepcopy(START[0]).to_global(first, S(0)),
            copy.deepcopy(START[3]).to_global(second, B),
        )
        optimizer, scaler = (
            torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1),
            torch.amp.GradScaler("cpu", init_scale=4.0),
        )
        before = [p.to_local().clone() for p in (a.weight, b.weight)]
        y = b(
            a(values(5, 4).to_global(flow.placement.all("cpu"), B).to_global(first, B)).to_global(
                second, B
            )
        )
        if bad:
            a.weight.register_hook(lambda g: g * float("inf"))
        scaler.scale(y.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if bad else 4.0)
        for p, was in zip((a.weight, b.weight), before, strict=True):
            assert torch.equal(p.to_local(), was) == (bad or not was.numel())


def test_grad_scaler_over_stages() -> None:
    simulate(3, _stages)


@pytest.mark.parametrize("mode", ["fsdp", "data", "tensor"])
@pytest.mark.sweep(3)
def test_grad_scaler_on_processes(mode: str) -> None:
    run_on(2, scaled_on_processes, mode)


def scaled_on_processes(mode: str) -> None:
    optimizer = OPTIMIZERS["AdamW fused" if mode == "fsdp" else "AdamW foreach"]
    scaled(TABLES[mode], optimizer, mode != "data")


def _one_rank_has_it() -> None:
    """Put the inf into one rank's shard of a split parameter. Some ranks hold no elements at
    all."""
    rank = flow.env.get_rank()
    for where in (flow.placement.all("cpu"), flow.placement("cpu", [0, 1])):
        w = (
            values(2, 3)
            .to_global(flow.placement.all("cpu"), B)
            .to_global(where, S(0))
            .detach()
            .clone()
            .requires_grad_()
        )
        for bad in (None, 0, 1):
            optimizer, scaler = (
                torch.optim.SGD([w], lr=1.0),
                torch.amp.GradScaler("cpu", init_scale=4.0),
            )
            g = torch.ones(2, 3)
            if bad is not None:
                g[bad, 0] = float("inf")
            before = full(w) if rank in where.flat else None
            scaler.scale(
                (w * g.to_global(flow.placement.all("cpu"), B).to_global(where, B)).sum()
            ).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (4.0 if bad is None else 2.0)
            if before is not None:
                assert torch.equal(full(w), before - 1 if bad is None else before)
            w.grad = None


def test_one_rank_has_the_inf() -> None:
    simulate(3, _one_rank_has_it)


def _partial_gradients() -> None:
    """Check partial gradients. A partial leaf's gradient is broadcast. A hand-made partial gradient
    has finite summands and an infinite sum."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    largest = torch.full((2,), torch.finfo(torch.float32).max)
    found, one = torch.zeros(()), torch.ones(())
    part = largest.to_global(flow.placement.all("cpu"), P)
    torch._amp_foreach_non_finite_check_and_unscale_([part], found, one)
    assert found == 1
    found.zero_()
    torch._amp_foreach_non_finite_check_and_unscale_([part * 0.25], found, one)
    assert found == 0


def test_partial_gradients() -> None:
    simulate(2, _partial_gradients)


def test_the_check_costs_one_small_reduction() -> None:
    def run() -> None:
        model = copy.deepcopy(START).to_global(flow.placement.all("cpu"), B)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        scaler.scale(model(spread(values(5, 4), S(0))).square().mean()).backward()
        with record_collectives() as log:
            scaler.step(optimizer)
            scaler.update()
        assert [(t.kind, t.ranks) for t in log] == [("all_reduce", (0, 1))]
        assert log[0].bytes <= 8

    simulate(2, run)


def test_autocast_and_scaler_train() -> None:
    def run() -> None:
        ours = copy.deepcopy(START).to_global(flow.placement.all("cpu"), TABLES["fsdp"])
        plain = copy.deepcopy(START)
        losses: list[list[float]] = [[], []]
        for i, (model, feed) in enumerate(
            ((plain, lambda t: t), (ours, lambda t: spread(t, S(0))))
        ):
            optimizer, scaler = (
                torch.optim.AdamW(model.parameters(), lr=0.01),
                torch.amp.GradScaler("cpu", init_scale=256.0),
            )
            for _ in range(8):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(
                        model(feed(values(5, 4))),
                        TARGET.clone() if i == 0 else spread(TARGET, S(0)),
                    )
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                losses[i].append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=2e-2)
        assert losses[1][-1] < losses[1][0]

    simulate(2, run)


# -------------------------------------------------------------------------------- the dtype of sums


def _model(table: Any, wanted: torch.dtype | None) -> nn.Module:
    model = copy.deepcopy(START).to_global(flow.placement.all("cpu"), table).bfloat16()
    return flow.set_grad_reduce_dtype(model, wanted)  # type: ignore[no-any-return]


def _sums(table: Any) -> None:
    """Check sums in float32: the ranks' bfloat16 contributions are summed in float32 and rounded
    once. Twice as many bytes are sent."""
    batch = values(8, 4).bfloat16()
    share = batch.chunk(flow.env.get_world_size())[flow.env.get_rank()]
    local = copy.deepcopy(START).bfloat16()
    local(share).float().square().sum().backward()
    want = [
        t.grad.float()
        .to_global(flow.placement.all("cpu"), P)
        .to_global(sbp=B)
        .to_local()
        .bfloat16()
        for t in local.parameters()
    ]
    sent = {}
    for wanted in (None, torch.float32):
        model = _model(table, wanted)
        x = spread(batch, S(0))
        for _ in range(2):  # the second pass uses other buckets than the first
            model.zero_grad()
            loss = model(x).float().square().sum()
            with record_collectives() as log:
                loss.backward()
            sent[wanted] = sum(t.bytes for t in log if t.kind in ("all_reduce", "reduce_scatter"))
        for p, w in zip(model.parameters(), want, strict=True):
            assert p.grad.dtype is torch.bfloat16
            assert p.grad.sbp == p.sbp
            if wanted is not None:
                assert torch.equal(full(p.grad), w)
        model.zero_grad()
        with flow.no_sync():
            model(x).float().square().sum().backward()
        for p, w in zip(model.parameters(), want, strict=True):
            if wanted is not None:
                assert torch.equal(full(p.grad), w)  # summed when it is read
        found = torch.autograd.grad(model(x).float().square().sum(), list(model.parameters()))
        for g, w in zip(found, want, strict=True):
            assert g.dtype is torch.bfloat16
            if wanted is not None:
                assert torch.equal(full(g), w)
    assert sent[None]
    assert (
        2 * sent[None] - 4 <= sent[torch.float32] <= 2 * sent[None]
    )  # the bytes of a rank are rounded up


@pytest.mark.parametrize("mode", ["data", "fsdp"])
def test_sums_in_float32(mode: str) -> None:
    simulate(4, _sums, TABLES[mode], timeout=20.0)


def sums_on_processes() -> None:
    for mode in ("data", "fsdp"):
        _sums(TABLES[mode])


def test_sums_in_float32_on_processes() -> None:
    run_on(2, sums_on_processes)


def _two_axes() -> None:
    grid = flow.placement("cpu", [[0, 1], [2, 3]])
    batch, plain = values(8, 4), copy.deepcopy(START)
    plain(batch).square().mean().backward()
    for table in ({"*": [B, S(0)]}, {"*": [S(0), B]}, {"*": [S(0), S(0)]}, {"*": [B, B]}):
        model = flow.set_grad_reduce_dtype(
            copy.deepcopy(START).to_global(grid, table).bfloat16(), torch.float32
        )
        model(
            batch.bfloat16().to_global(grid, [B, B]).to_global(sbp=[S(0), S(0)])
        ).float().square().mean().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert a.grad.dtype is torch.bfloat16
            torch.testing.assert_close(full(a.grad).float(), b.grad, rtol=0.1, atol=0.02)


def test_sums_over_two_axes() -> None:
    simulate(4, _two_axes)


def _kept() -> None:
    """Check that a parameter keeps its reduce dtype through copies, pickles, casts and moves."""
    model = _model(TABLES["fsdp"], torch.float32)
    moved = copy.deepcopy(model).to_global(flow.placement.all("cpu"), B)
    others = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model).half(),
        moved,
    ]
    for other in (model, *others):
        assert {p._reduce_dtype for p in other.parameters()} == {torch.float32}
    assert {p._reduce_dtype for p in flow.set_grad_reduce_dtype(model, None).parameters()} == {None}
    w = flow.set_grad_reduce_dtype(
        spread(values(4, 3), B).bfloat16().requires_grad_(), torch.float64
    )
    (w * spread(values(4, 3, seed=1), S(0))).sum().backward()
    assert w.grad.dtype is torch.bfloat16
    for wrong in (torch.int32, torch.complex64, "float32"):
        with pytest.raises(RuntimeError, match="summed in a floating dtype"):
            flow.set_grad_reduce_dtype(model, wrong)


def test_the_choice_stays() -> None:
    simulate(2, _kept)


def _replicas() -> None:
    """Run DistributedDataParallel over replicas that are themselves global."""
    rank = flow.env.get_rank()
    where = flow.placement("cpu", [[0, 1], [2, 3]][rank // 2])
    plain = copy.deepcopy(START)
    plain(values(8, 4)).square().mean().backward()
    for quiet in (False, True):
        model = flow.set_grad_reduce_dtype(
            copy.deepcopy(START).to_global(where, {"0.*": S(0), "*": B}).bfloat16(), torch.float32
        )
        ddp = flow.nn.parallel.DistributedDataParallel(model)
        x = values(8, 4).chunk(2)[rank // 2].bfloat16()
        x = x.to_global(where, B)
        if quiet:
            with ddp.no_sync():
                ddp(x).float().square().mean().backward()
        else:
            ddp(x).float().square().mean().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert a.grad.dtype is torch.bfloat16
            near(full(a.grad), b.grad)


def test_sums_over_replicas() -> None:
    simulate(4, _replicas)


def test_complex_gradients_are_summed_as_they_are() -> None:
    def run() -> None:
        z = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        w = flow.set_grad_reduce_dtype(spread(z, B).requires_grad_(), torch.float32)
        plain = z.clone().requires_grad_()
        for t, x in ((w, spread(z, S(0))), (plain, z)):
            (t * x).abs().sum().backward()
        torch.testing.assert_close(full(w.grad), plain.grad)

    simulate(2, run)


def test_half_parameters_with_every_combination() -> None:
    """Accumulation, the scaler and sums in float32 work together."""

    def run(mode: str, wanted: Any) -> None:
        model = flow.set_grad_reduce_dtype(
            copy.deepcopy(START).to_global(flow.placement.all("cpu"), TABLES[mode]).bfloat16(),
            wanted,
        )
        plain = copy.deepcopy(START)
        for m, feed in ((plain, lambda t: t), (model, lambda t: spread(t.bfloat16(), S(0)))):
            optimizer, scaler = (
                torch.optim.SGD(m.parameters(), lr=0.1),
                torch.amp.GradScaler("cpu", init_scale=8.0),
            )
            for i in range(2):
                scaler.scale(m(feed(values(8, 4, seed=i))).float().square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimizer)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(a).float(), b.detach(), rtol=5e-2, atol=2e-2)

    for mode, wanted in itertools.product(TABLES, (None, torch.float32)):
        simulate(2, run, mode, wanted)
