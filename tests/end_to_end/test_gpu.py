"""Tests on GPUs: real processes that share one GPU over gloo, or have one GPU each over NCCL, and
differences from the CPU.

`make test-gpu` runs these, and runs the tests of the CPU again with their placements on the GPU
(support/device.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.pool import Pool
from test_example_gpt import GRAPHS, MODES, SMALL, STAGES, compare

import globaltensor as flow
from globaltensor import boxing_log
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import WorldError

pytestmark = pytest.mark.gpu
B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
GPUS = torch.cuda.device_count()


@pytest.fixture
def sharing(
    monkeypatch: pytest.MonkeyPatch, fresh_pool: Callable[[int], Pool]
) -> Callable[..., list[Any]]:
    """Return a function to call as ``sharing(2, fn)``. It runs on processes whose collectives use
    gloo, so that they may share a GPU."""
    monkeypatch.setenv("GLOBALTENSOR_BACKEND", "gloo")
    return lambda n, fn, *args: fresh_pool(n).run(fn, *args, timeout=120.0)


# ------------------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention_by_flash_kernels(
    kind: torch.dtype, heads: tuple[int, int], causal: bool
) -> None:
    """The results are as close to float64 as those of torch's own kernel, forward and backward.
    Each rank has 600 rows, so that causal rows are dealt out in pairs."""
    shapes = [(2, h, 1200, 32) for h in (heads[0], heads[1], heads[1])]
    whole = [
        torch.randn(s, generator=torch.Generator().manual_seed(i)).to("cuda", kind)
        for i, s in enumerate(shapes)
    ]
    weight = torch.randn(shapes[0], generator=torch.Generator().manual_seed(9)).to("cuda", kind)

    def attended(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor
    ) -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=heads[0] != heads[1]
        )
        return [out.detach(), *torch.autograd.grad((out * w).sum(), (q, k, v))]

    def split() -> list[torch.Tensor]:
        where = flow.placement("cuda", [0, 1])
        given = [
            t.to_global(where, B).to_global(sbp=S(2)).detach().requires_grad_()
            for t in (*whole, weight)
        ]  # type: ignore[call-arg]
        with flow.context_parallel("ring"):
            return [t.to_global(sbp=B).to_local() for t in attended(*given)]

    exact = attended(*[t.double().cpu().requires_grad_() for t in (*whole, weight)])
    plain = attended(*[t.clone().requires_grad_() for t in (*whole, weight)])
    for found in simulate(2, split):
        for got, own, want in zip(found, plain, exact, strict=True):
            worst, usual = ((t.cpu().double() - want).abs().max() for t in (got, own))
            assert worst <= 3 * usual + 1e-3


# ----------------------------------------------------------------------- processes that share a GPU


def test_the_example_trains_as_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOBALTENSOR_BACKEND", "gloo")
    compare(
        tmp_path, 2, [*MODES, *STAGES, *GRAPHS[:3]], [*SMALL, "--device", "cuda"], seconds=240.0
    )


def _moved() -> None:
    x = torch.arange(35.0, dtype=torch.float64).view(5, 7)
    both, first, second = (
        flow.placement("cuda", [0, 1]),
        flow.placement("cuda", [0]),
        flow.placement("cuda", [1]),
    )
    host = flow.placement("cpu", [1])
    for source in (both, first, host):
        for target in (both, first, second, host, flow.placement("cpu", [1, 0])):
            for one in (S(0), S(1), B):
                for other in (S(0), S(1), B, P):
                    a = x.to_global(placement=source, sbp=B).to_global(sbp=one)
                    b = a.to_global(placement=target, sbp=other)
                    assert b.placement is target
                    if flow.env.get_rank() in target.flat:
                        assert b.to_local().device.type == target.type
                    back = b.to_global(placement=flow.placement("cpu", [0, 1]), sbp=B).to_local()
                    assert torch.equal(back, x), f"{source} {one} -> {target} {other}"
    y = x.to_global(placement=both, sbp=S(0))
    assert y.device.type == "cuda"
    assert y.cpu().placement == flow.placement("cpu", [0, 1])
    assert y.cpu().cuda().sbp == y.sbp
    assert y.to("cuda") is y
    assert torch.equal(torch.from_numpy(y.numpy()), torch.cat([x, x]))
    total = (y * 2).sum()
    assert total.item() == 4 * x.sum().item()
    assert "cuda" in repr(y)


def test_tensors_move_between_devices(sharing: Callable[..., list[Any]]) -> None:
    sharing(2, _moved)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.rnn = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.GRU(8, 6, batch_first=True),
        )
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.conv(x)))
        return self.out(self.rnn(x.mean(2).transpose(1, 2))[0][:, -1])


def _trained(sbp: str | None, autocast: bool) -> list[float]:
    """Return the losses of four steps of an ordinary training loop. ``sbp`` is that of the batch,
    None on one device."""
    torch.manual_seed(3)
    dtype = torch.float32 if autocast else torch.float64
    net, place = Net().to("cuda", dtype), flow.placement("cuda", [0, 1])
    xs, ys = (
        torch.randn(4, 6, 3, 8, 8, dtype=dtype, device="cuda"),
        torch.randint(0, 4, (4, 6), device="cuda"),
    )
    if sbp is not None:
        net.to_global(place, B)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler, losses = torch.amp.GradScaler("cuda", enabled=autocast, init_scale=256.0), []
    for x, y in zip(xs, ys, strict=True):
        if sbp is not None:
            x, y = (
                t.to_global(placement=place, sbp=B).to_global(sbp=S(0) if sbp == "split" else B)
                for t in (x, y)
            )
        with torch.autocast("cuda", dtype=torch.float16, enabled=autocast):
            loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:RNN module weights")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_loop_trains_as_on_one_device(sharing: Callable[..., list[Any]], autocast: bool) -> None:
    torch.backends.cudnn.allow_tf32 = False
    want = _trained(None, autocast)
    for sbp in ("split", "whole"):
        for got in sharing(2, _trained, sbp, autocast):
            assert got == pytest.approx(want, rel=2e-2 if autocast else 1e-9)


# ------------------------------------------------------------------ the thread of the backward pass


def _in_the_same_thread() -> None:
    place = flow.placement("cuda", torch.arange(flow.env.get_world_size()).tolist())
    here, threads = threading.get_ident(), []
    x = torch.ones(4, 4, device="cuda").to_global(placement=place, sbp=S(0))
    w = torch.ones(4, 4, device="cuda").to_global(placement=place, sbp=S(1)).requires_grad_()
    with boxing_log() as log:
        y = x @ (w * 1).to_global(sbp=B)
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        y.sum().backward()
    assert threads == [here]
    assert [r.plan.moves[0].kind for r in log] == ["all_gather", "reduce_scatter"]
    assert w.grad is not None
    n = float(len(place.flat))
    assert torch.equal(w.grad.to_local().cpu(), torch.full((4, 4), 4 * n))


def test_backward_runs_in_the_thread_that_asks(sharing: Callable[..., list[Any]]) -> None:
    sharing(2, _in_the_same_thread)


def test_backward_runs_in_the_thread_that_asks_of_simulated_ranks() -> None:
    simulate(3, _in_the_same_thread)


# --------------------------------------------------------------------------------------------- NCCL


def test_the_example_over_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has one rank per GPU, four at most. With one GPU, NCCL runs collectives of one
    rank."""
    monkeypatch.setenv("GLOBALTENSOR_BACKEND", "cpu:gloo,cuda:nccl")
    modes = [*MODES[:4], "data --graph", *(STAGES if GPUS > 1 else [])]
    compare(tmp_path, min(GPUS, 4), modes, [*SMALL, "--device", "cuda"], seconds=240.0)


def _second_has_none() -> str:
    if flow.env.get_rank() == 0:
        return ""
    with pytest.raises(WorldError) as caught:
        flow.zeros(2, placement=flow.placement("cuda", [0, 1]), sbp=S(0))
    return str(caught.value)


def test_nccl_wants_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, fresh_pool: Callable[[int], Pool]
) -> None:
    monkeypatch.setenv("GLOBALTENSOR_BACKEND", "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    said = fresh_pool(2).run(_second_has_none, timeout=120.0)
    assert "rank 1 (local rank 1) has no cuda device: PyTorch finds 1" in said[1]
    assert "Start at most 1 process here, let ranks share GPUs with the backend gloo" in said[1]


# ---------------------------------------------------------------------------------- compiled graphs


def _compiled(sbp: str | None) -> list[float]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to("cuda")
    place = flow.placement("cuda", torch.arange(flow.env.get_world_size()).tolist())
    net.to_global(place, B)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    class Step(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.add_optimizer(optimizer)
            self.config.enable_compile(sbp is not None)

        def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(self.net(x), y)
            loss.backward()
            return loss

    step = Step()
    x, y = torch.randn(8, 16, device="cuda"), torch.randint(0, 4, (8,), device="cuda")
    x, y = (t.to_global(placement=place, sbp=B).to_global(sbp=S(0)) for t in (x, y))
    return [step(x, y).item() for _ in range(3)]


def test_a_compiled_graph(sharing: Callable[..., list[Any]]) -> None:
    want = sharing(2, _compiled, None)
    for got in sharing(2, _compiled, "compiled"):
        assert got == pytest.approx(want[0], rel=1e-4)
