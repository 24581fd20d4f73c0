"""Tests of ZeRO: training in shards gives the numbers of one device, users see the same tensors as
before, and each rank stores its share of the bytes."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.bodies import values
from support.device import DEVICE
from support.mpi import needs_mpi, run_by_mpi
from support.pool import run_on
from torch import nn, optim
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

import globaltensor as flow
from globaltensor._tensor.gradients import parameter_gather
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import set_world, world
from globaltensor.errors import ZeroError
from globaltensor.graph.capture.dry_world import DryWorld
from globaltensor.optim.zero import Zero, shares_of
from globaltensor.sharding.spec import Spec

B, S = flow.sbp.broadcast, flow.sbp.split
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05),
}


class Net(nn.Module):
    """A model with a tied embedding, sizes that no number of ranks divides, a 0-dim parameter, and
    a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up, self.down, self.norm = nn.Linear(6, 13), nn.Linear(13, 6), nn.LayerNorm(6)
        self.frozen = nn.Parameter(torch.ones(6, 7), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        h = self.embedding(x)
        h = h + self.down(torch.tanh(self.up(self.norm(h)))) * self.scale
        h = torch.tanh(h @ self.frozen) @ self.frozen.t()
        return h @ self.embedding.weight.t()


def net(make: Callable[[], Any] = Net) -> Any:
    """Return the same model on every rank. Simulated ranks are threads that share torch's
    generator, so the model draws from its own generator."""
    model, gen = make().double(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64) * 0.4)
    return model


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (12, 3), generator=gen), torch.randint(
        0, 11, (12, 3), generator=gen
    )


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def groups(model: Net, maker: str) -> list[optim.Optimizer]:
    """Return two optimizers; the first has two groups with different settings."""
    biases = [p for n, p in model.named_parameters() if n.endswith("bias") or p.dim() == 0]
    rest = [p for p in (*model.up.parameters(), *model.down.parameters()) if p.dim() > 1]
    other = [model.embedding.weight, model.norm.weight, model.frozen]
    first = OPTIMIZERS[maker]([{"params": rest, "lr": 0.02}, {"params": biases}])
    return [first, OPTIMIZERS[maker](other)]


def whole(x: Any) -> torch.Tensor:
    return (
        x.detach().to_global(x.placement, [B] * x.placement.axes).to_local() if x.is_global else x
    )


def reference(maker: str, steps: int) -> tuple[Net, list[optim.Optimizer]]:
    model = net()
    optimizers = groups(model, maker)
    for seed in range(steps):
        loss_of(model, *batch(seed)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def tensor_parallel(path: str, tensor: torch.Tensor) -> list[Any]:
    """Split rows or columns of the two layers over the second axis."""
    return [B, {"up.weight": S(0), "up.bias": S(0), "down.weight": S(1)}.get(path, B)]


def placed(ranks: Sequence[Any]) -> tuple[Any, Net, list[Any]]:
    p = flow.placement("cpu", ranks)
    model = net()
    model.to_global(p, tensor_parallel if p.axes == 2 else B)  # type: ignore[operator]
    return p, model, [S(0)] + [B] * (p.axes - 1)


def train(
    model: Net,
    optimizers: Sequence[optim.Optimizer],
    place: Any,
    sbp: Any,
    seeds: Sequence[int],
    freed: bool,
) -> None:
    for seed in seeds:
        x, y = (t.to_global(place, [B] * place.axes).to_global(sbp=sbp) for t in batch(seed))  # type: ignore[attr-defined]
        with parameter_gather.reshard_after_forward() if freed else contextlib.nullcontext():
            loss = loss_of(model, x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(
    model: Net, optimizers: Sequence[optim.Optimizer], want: tuple[Net, list[optim.Optimizer]]
) -> None:
    close = {"rtol": 1e-9, "atol": 1e-9}
    pairs = dict(zip(model.parameters(), want[0].parameters(), strict=True))
    for (name, p), q in zip(model.named_parameters(), pairs.values(), strict=True):
        torch.testing.assert_close(
            whole(p), q.detach(), **close, msg=lambda text, name=name: f"{name}: {text}"
        )  # type: ignore[arg-type]
    for ours, theirs in zip(optimizers, want[1], strict=True):
        for group in ours.param_groups:
            for p in group["params"]:
                mine, its = ours.state.get(p, {}), theirs.state.get(pairs[p], {})
                assert {k for k, v in mine.items() if v is not None} == {
                    k for k, v in its.items() if v is not None
                }
                for key, value in its.items():
                    if isinstance(value, torch.Tensor):
                        assert mine[key].shape == value.shape
                        torch.testing.assert_close(whole(mine[key]).to(value.dtype), value, **close)  # type: ignore[arg-type]


def _equal(maker: str, ranks: Any, stage: int) -> None:
    place, model, sbp = placed(ranks)
    before = {n: (p.sbp, p.placement, p.shape) for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    optimizers = groups(model, maker)
    # the optimizer has state before ZeRO is attached
    train(model, optimizers, place, sbp, [0], False)
    zero = Zero(optimizers, stage, shard_min_size=1).attach()
    assert zero.shared
    train(model, optimizers, place, sbp, [1], False)
    train(model, optimizers, place, sbp, [2, 3], True)
    assert {n: (p.sbp, p.placement, p.shape) for n, p in model.named_parameters()} == before  # type: ignore[attr-defined]
    same(model, optimizers, reference(maker, 4))
    zero.detach()
    for p in model.parameters():
        assert p._spec.shown is p._spec
        assert p._local.shape == p.spec.local_shape(flow.env.get_rank())
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step" and value.dim():
                    assert value._local.shape == p._local.shape
                    assert value.sbp == p.sbp
    train(model, optimizers, place, sbp, [4], False)
    same(model, optimizers, reference(maker, 5))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2], [0, 1, 2, 3], [[0, 1], [2, 3]]], ids=str)
@pytest.mark.parametrize("maker", OPTIMIZERS)
@pytest.mark.sweep(10)
def test_training_equals_one_device(maker: str, ranks: Any, stage: int) -> None:
    simulate(torch.tensor(ranks).numel(), _equal, maker, ranks, stage, timeout=20.0)


# ------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize(
    "ranks", [[0, 1, 2], [[0, 1], [2, 3]], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]], ids=str
)
def test_shares_are_disjoint_pieces_of_what_is_shown(ranks: Any) -> None:
    place = flow.placement("cpu", ranks)
    for shape in [(7,), (2, 3), (1, 1), (6, 5), (3, 8, 2), (0, 4)]:
        for layout in _layouts(place.axes, len(shape)):
            spec = Spec.make(shape, torch.float64, place, layout)
            shares = shares_of(spec)
            held = [a for a, e in enumerate(layout) if e.is_broadcast]
            assert (shares is None) == (
                not held or spec.numel < torch.tensor([place.shape[a] for a in held]).prod().item()
            )
            for rank in place.flat if shares is not None else ():
                assert sorted(shares.ranks(rank)) == sorted(place.fiber(rank, held))  # type: ignore[union-attr]
                count = torch.zeros(spec.local_shape(rank))
                for holder in shares.ranks(rank):  # type: ignore[union-attr]
                    part = count[shares.share(rank, holder)]  # type: ignore[union-attr]
                    assert part.shape == shares.local_shape(holder)  # type: ignore[union-attr]
                    part += 1
                assert (count == 1).all()


def _layouts(axes: int, dims: int) -> list[list[Any]]:
    entries = [B, *[S(d) for d in range(dims)]]
    return [[]] if not axes else [[e, *rest] for e in entries for rest in _layouts(axes - 1, dims)]


def test_only_large_parameters_are_shared() -> None:
    place = flow.placement("cpu", [0, 1])
    assert shares_of(Spec.make((64, 32), torch.float32, place, B), 1024) is not None
    assert shares_of(Spec.make((64, 31), torch.float32, place, B), 1024) is None
    assert shares_of(Spec.make((), torch.float32, place, B)) is None
    assert shares_of(Spec.make((64, 32), torch.float32, place, S(0))) is None


# ---------------------------------------------------------------------------------- the user's view


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_users_see_what_they_saw(stage: int) -> None:
    simulate(2, _seen, stage, timeout=20.0)


def _seen(stage: int) -> None:
    place, model, sbp = placed([0, 1])
    _, other, _ = placed([0, 1])
    x = batch(0)[0].to_global(place, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
    zero = Zero(groups(model, "adamw"), stage, 1).attach()
    w, v = model.up.weight, other.up.weight
    assert (model(x).sbp, w.sbp, w.spec, str(w), w.nbytes) == (
        other(x).sbp,
        v.sbp,
        v.spec,
        str(v),
        v.nbytes,
    )
    torch.testing.assert_close(whole(model(x)), whole(other(x)))
    assert torch.equal(w.to_local(), v.to_local())
    assert w.to_local().shape == w.shape
    assert w.to_global(sbp=B) is w
    assert torch.equal(w.to_global(sbp=S(1)).to_local(), v.to_global(sbp=S(1)).to_local())
    for name, value in model.state_dict().items():
        assert value.sbp == (B,)
        assert torch.equal(whole(value), whole(other.state_dict()[name]))
    for twin in (copy.deepcopy(w), w.detach(), w.data, w.clone(), torch.zeros_like(w)):
        assert (twin.shape, twin.sbp) == (v.shape, v.sbp)
    with torch.no_grad():
        for t in (w, v):
            t.copy_(values(13, 6))
            t[3] = 2.0
            t.mul_(2.0)
            t.data = t.data + 1.0
            t.data[0, 0] = 5.0
    assert torch.equal(whole(w), whole(v))
    assert stage != 3 or w._local.numel() < w.numel()
    changed = {n: p.detach().to_global(sbp=B) * 3 for n, p in other.state_dict().items()}
    model.load_state_dict(changed)
    other.load_state_dict(changed)
    torch.testing.assert_close(whole(model(x)), whole(other(x)))
    for m in (model, other):
        m(x).sum().backward()
        m(x).sum().backward()
    grad, want = model.up.weight.grad, other.up.weight.grad
    assert (grad.sbp, grad.shape, grad.to_local().shape) == (want.sbp, want.shape, want.shape)
    torch.testing.assert_close(whole(grad), whole(want))
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5).numpy() for m in (model, other)]
    torch.testing.assert_close(*map(torch.from_numpy, norms))
    torch.testing.assert_close(whole(model.up.weight.grad), whole(other.up.weight.grad))
    zero.detach()
    torch.testing.assert_close(model.up.weight.grad.to_local(), other.up.weight.grad.to_local())
    assert (
        model.up.weight.to_local().data_ptr() == model.up.weight._local.data_ptr()
    )  # the parameter is replicated again
    assert model.to_local().up.weight.shape == (13, 6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("then", [0, 1, 2, 3])
@pytest.mark.sweep(5)
def test_state_goes_on_in_another_stage(stage: int, then: int) -> None:
    simulate(3, _goes_on, stage, then, timeout=20.0)


def _goes_on(stage: int, then: int) -> None:
    place, model, sbp = placed([0, 1, 2])
    optimizers = groups(model, "adamw")
    Zero(optimizers, stage, 1).attach()
    train(model, optimizers, place, sbp, [0, 1], stage == 3)
    saved = copy.deepcopy((model.state_dict(), [o.state_dict() for o in optimizers]))
    for optimizer, state in zip(optimizers, saved[1], strict=True):
        every = [p for group in optimizer.param_groups for p in group["params"]]
        assert state["state"]
        assert all(s["exp_avg"].shape == every[i].shape for i, s in state["state"].items())
        assert all(
            s["exp_avg"].sbp == every[i].sbp for i, s in state["state"].items() if every[i].dim()
        )
    place, other, sbp = placed([0, 1, 2])
    others = groups(other, "adamw")
    if then:
        Zero(others, then, 1).attach()
    other.load_state_dict(saved[0])
    for optimizer, state in zip(others, saved[1], strict=True):
        optimizer.load_state_dict(state)
    train(other, others, place, sbp, [2, 3], then == 3)
    same(other, others, reference("adamw", 4))


# ------------------------------------------------------------------------------- variants of a step


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.sweep(2)
def test_closures_hooks_scalers_and_accumulation(stage: int) -> None:
    simulate(2, _ways, stage, timeout=20.0)


def _ways(stage: int) -> None:
    place, model, sbp = placed([0, 1])
    optimizer, plain = optim.AdamW(model.parameters(), lr=0.01), net()
    theirs = optim.AdamW(plain.parameters(), lr=0.01)
    Zero([optimizer], stage, 1).attach()

    def both(of: Callable[[Any, Any, Any], None]) -> None:
        x, y = batch(0)
        of(plain, theirs, (x, y))
        of(model, optimizer, [t.to_global(place, B).to_global(sbp=sbp) for t in (x, y)])  # type: ignore[attr-defined]
        same(model, [optimizer], (plain, [theirs]))

    def closure(m: Any, o: Any, data: Any) -> None:
        def again() -> Any:
            o.zero_grad()
            loss = loss_of(m, *data)
            loss.backward()
            return loss

        o.step(again)

    def accumulated(m: Any, o: Any, data: Any) -> None:
        o.zero_grad()
        with flow.no_sync() if m is model else contextlib.nullcontext():
            loss_of(m, *data).backward()
        loss_of(m, *data).backward()
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        o.step()

    def scaled(m: Any, o: Any, data: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            o.zero_grad()
            scaler.scale(loss_of(m, *data)).backward()
            scaler.unscale_(o)
            scaler.step(o)
            scaler.update()

    for way in (accumulated, scaled, closure, accumulated):
        both(way)
    seen: list[bool] = []
    handle = optimizer.register_step_pre_hook(
        lambda o, a, k: seen.append(all(p.is_global for p in o.param_groups[0]["params"]))
    )
    both(accumulated)
    handle.remove()
    assert seen == [True]
    both(accumulated)


def test_a_step_that_fails() -> None:
    simulate(2, _fails, timeout=20.0)


def _fails() -> None:
    _, model, _ = placed([0, 1])
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    Zero([optimizer], 1, 1).attach()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    both = world().comm((0, 1))
    assert all(
        len({str(v) for v in both.all_gather_object(p.to_local().tolist())}) == 1
        for p in model.parameters()
    ), "the ranks agree again"


def test_parameters_of_stages_on_different_ranks() -> None:
    for stage in (1, 2, 3):
        simulate(4, _stages, stage, timeout=20.0)


def _stages(stage: int) -> None:
    first, second = flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])
    plain = net(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)))
    model = net(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)))
    model[0].to_global(first, B)
    model[1].to_global(second, B)
    ours, theirs = optim.AdamW(model.parameters(), lr=0.1), optim.AdamW(plain.parameters(), lr=0.1)
    zero = Zero([ours], stage, 1).attach()
    x = values(4, 5)
    for _ in range(3):
        (plain(x) ** 2).sum().backward()
        h = model[0](x.to_global(first, B).to_global(sbp=S(0)))  # type: ignore[attr-defined]
        (model[1](h.to_global(second, S(0))) ** 2).sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        everywhere = p.detach().to_global(flow.placement.all("cpu"), B).to_local()
        torch.testing.assert_close(everywhere, q.detach(), rtol=1e-9, atol=1e-9)
    zero.detach()


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("stage", [0, 4, True, "1"])
def test_stages_that_are_not(stage: Any) -> None:
    with pytest.raises(ZeroError, match="stages 1"):
        Zero([], stage)


def test_sizes_that_are_not() -> None:
    with pytest.raises(ZeroError, match="1 or more"):
        Zero([], 1, shard_min_size=0)


def test_optimizers_that_look_at_whole_tensors() -> None:
    p = [torch.ones(2, 2, requires_grad=True)]

    class Own(optim.SGD):
        """An optimizer of the user, about which nothing is known."""

    for optimizer in (optim.LBFGS(p), optim.Adafactor(p), optim.Muon(p), Own(p)):
        with pytest.raises(ZeroError, match="element by element"):
            Zero([optimizer], 1)
    with pytest.raises(ZeroError, match="differentiable"):
        Zero([optim.SGD(p, differentiable=True)], 1)


# -------------------------------------------------------------------------------- bytes and traffic


class Live(TorchDispatchMode):
    """A mode that counts the bytes of memory that ops have used and that is still alive. ``peak``
    is the maximum so far."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def now(self) -> int:
        self.known = {k: v for k, v in self.known.items() if not v[0].expired()}
        return sum(n for _, n in self.known.values())

    def look(self, tensors: Any) -> None:
        for t in tensors:
            if isinstance(t, torch.Tensor):
                ref = StorageWeakRef(t.untyped_storage())
                if ref.cdata not in self.known or self.known[ref.cdata][0].expired():
                    self.known[ref.cdata] = (ref, t.untyped_storage().nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.look(tree_flatten((args, kwargs, out))[0])
        self.peak = max(self.peak, self.now())
        return out


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


LAYERS, WIDTH = 6, 64
LAYER = sum(p.numel() for p in Layer(WIDTH).parameters()) * 8
MODEL = LAYERS * LAYER
OTHERS = 96 << 10  # activations and other small tensors


def _bytes(stage: int) -> dict[str, int]:
    """Return the bytes that one rank holds in the third step of training with AdamW."""
    place = flow.placement.all("cpu")
    model = net(lambda: nn.Sequential(*[Layer(WIDTH) for _ in range(LAYERS)])).to_global(place, B)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    Zero([optimizer], stage, 1).attach()
    x = values(4, WIDTH).to_global(place, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    live = Live()
    live.look([p._local for p in model.parameters()])
    with live:
        for _ in range(3):
            optimizer.zero_grad()
            before, live.peak = live.now(), 0
            with parameter_gather.reshard_after_forward():
                loss = model(x).sum()
            loss.backward()
            del loss
            backward, gradients = live.peak, _stored(p.grad for p in model.parameters())
            optimizer.step()
    state = _stored(v for s in optimizer.state.values() for k, v in s.items() if k != "step")
    return {
        "before": before,
        "backward": backward,
        "gradients": gradients,
        "peak": live.peak,
        "state": state,
    }


def _stored(tensors: Any) -> int:
    """Return the bytes of the memory that holds this rank's local tensors."""
    memory = [t._local.untyped_storage() for t in tensors]
    return sum({m.data_ptr(): m.nbytes() for m in memory}.values())


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.sweep(2)
def test_bytes_fall_as_zero_says(n: int) -> None:
    found = {stage: run_on(n, _bytes, stage)[0] for stage in (1, 2, 3)}
    for stage, f in found.items():
        assert f["state"] <= 2 * MODEL / n, f"stage {stage}: optimizer state"
    assert found[1]["gradients"] >= MODEL, "the measure sees whole gradients"
    assert found[2]["gradients"] <= MODEL / n
    assert found[3]["gradients"] <= MODEL / n
    assert found[2]["backward"] - found[2]["before"] < MODEL, (
        "whole gradients never lie here at once"
    )
    assert found[3]["before"] <= 3 * MODEL / n + OTHERS
    assert found[3]["peak"] <= 4 * MODEL / n + 4 * LAYER, (
        "a share of parameters, gradients and state, and one layer's"
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.sweep(2)
def test_traffic(stage: int) -> None:
    simulate(2, _traffic, stage, timeout=20.0)


def _traffic(stage: int) -> None:
    place, model, sbp = placed([0, 1])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    Zero([optimizer], stage, 1).attach()
    train(model, [optimizer], place, sbp, [0, 1], False)
    x, y = (t.to_global(place, B).to_global(sbp=sbp) for t in batch(2))  # type: ignore[attr-defined]
    loss = loss_of(model, x, y)
    with record_collectives() as log:
        loss.backward()
    assert [t.kind for t in log if t.bytes > 100] == [
        ["all_reduce"],
        ["reduce_scatter"],
        ["reduce_scatter"],
    ][stage - 1]
    with record_collectives() as log:
        optimizer.step()
    assert [t.kind for t in log] == ([] if stage == 3 else ["all_gather"])


# ------------------------------------------------------------------------------------- freed memory


def test_what_is_freed_is_gathered_again() -> None:
    simulate(2, _freed, timeout=20.0)


def _freed() -> None:
    place = flow.placement.all("cpu")
    model, plain = net(), net()
    flow.parallelize(model, place, "fsdp")
    x, y = (t.to_global(place, B).to_global(sbp=S(0)) for t in batch(0))  # type: ignore[attr-defined]
    for _ in range(2):
        with parameter_gather.reshard_after_forward():
            loss = loss_of(model, x, y)
        with record_collectives() as log:
            loss.backward()
        assert any(t.kind == "all_gather" for t in log), "gathered again on the way back"
        loss_of(plain, *batch(0)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-9, atol=1e-9)
    twice = [
        torch.autograd.grad(m.up(h).pow(3).sum(), list(m.up.parameters()), create_graph=True)
        for m, h in ((plain, values(4, 6)),)
    ]
    with parameter_gather.reshard_after_forward():
        h = values(4, 6).to_global(place, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
        ours = torch.autograd.grad(
            model.up(h).pow(3).sum(), list(model.up.parameters()), create_graph=True
        )
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in ours), model.up.weight)[0]
    want = torch.autograd.grad(sum(g.pow(2).sum() for g in twice[0]), plain.up.weight)[0]
    torch.testing.assert_close(whole(second), want, rtol=1e-9, atol=1e-9)


def test_freed_with_checkpoints_empty_parts_and_shared_ranks() -> None:
    simulate(3, _freed_elsewhere, timeout=20.0)


def _freed_elsewhere() -> None:
    first, second = flow.placement("cpu", [0, 1]), flow.placement("cpu", [1, 2])
    plain = net(lambda: nn.Sequential(*[nn.Linear(5, 5) for _ in range(6)]))
    model = net(lambda: nn.Sequential(*[nn.Linear(5, 5) for _ in range(6)]))
    for i, layer in enumerate(model):
        flow.parallelize(layer, second if i % 2 else first, "fsdp")

    def passed(m: Any, x: Any) -> Any:
        for i, layer in enumerate(m):
            if m is model:
                x = x.to_global(second if i % 2 else first, S(0))
            x = (
                checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
                if i in (2, 3)
                else torch.tanh(layer(x))
            )
        return (x**2).sum()

    for rows in (1, 4, 4):  # with one row, one rank has none
        x = values(rows, 5)
        with parameter_gather.reshard_after_forward():
            loss = passed(model, x.to_global(first, B))  # type: ignore[attr-defined]
        loss.backward()
        passed(plain, x).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        everywhere = p.grad.to_global(flow.placement.all("cpu"), B).to_local()
        torch.testing.assert_close(everywhere, q.grad, rtol=1e-9, atol=1e-9)


def _state_of_other_ranks(kind: str) -> list[Any]:
    """Train a parameter of ranks 0 and 1. Return the layouts of its state, and the values."""
    where, everywhere = flow.placement("cpu", [0, 1]), flow.placement.all("cpu")
    start = values(5, 3).to_global(where, B)  # type: ignore[attr-defined]
    p = start.to_global(sbp=flow.sbp.partial_sum if kind == "partial" else B).detach()
    p.requires_grad_()
    optimizer = optim.AdamW([p], lr=0.1)
    if kind != "partial":
        Zero([optimizer], int(kind), 1).attach()
    for _ in range(4):
        optimizer.zero_grad()
        (p.to_global(sbp=B) ** 2).sum().backward()
        optimizer.step()
    moments = [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
    whole = [m.to_global(everywhere, B).to_local() for m in (*moments, p.detach())]
    return [repr(m._spec) for m in moments] + [type(m._spec).__name__ for m in moments] + whole


@pytest.mark.parametrize("kind", ["1", "2", "partial"])
@pytest.mark.parametrize("run", [simulate, run_on])
def test_state_has_one_layout_also_on_ranks_without_the_parameter(
    run: Callable[..., list[Any]], kind: str
) -> None:
    plain = values(5, 3).requires_grad_()
    optimizer = optim.AdamW([plain], lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (plain**2).sum().backward()
        optimizer.step()
    want = [optimizer.state[plain][name] for name in ("exp_avg", "exp_avg_sq")] + [plain.detach()]
    found = run(4, _state_of_other_ranks, kind)
    assert all(rank[:4] == found[0][:4] for rank in found)
    for rank in found:
        torch.testing.assert_close(rank[4:], want, rtol=1e-9, atol=1e-9)


def test_sums_in_another_dtype_and_parameters_that_travel() -> None:
    simulate(2, _bfloat16, timeout=20.0)


def _bfloat16() -> None:
    place = flow.placement.all("cpu")
    for stage in (1, 2, 3):
        layer = nn.Linear(8, 16).bfloat16().to_global(place, B)  # type: ignore[operator]
        flow.set_grad_reduce_dtype(layer, torch.float32)
        optimizer = optim.SGD(layer.parameters(), lr=0.1)
        Zero([optimizer], stage, 1).attach()
        x = torch.ones(4, 8, dtype=torch.bfloat16).to_global(place, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
        for _ in range(2):
            layer(x).sum().backward()
            assert layer.weight.grad.dtype is torch.bfloat16
            assert (whole(layer.weight.grad) == 4).all()
            optimizer.step()
            optimizer.zero_grad()
        twin = pickle.loads(pickle.dumps(layer.weight))
        assert (twin.sbp, twin.shape, twin._local.shape) == (
            layer.weight.sbp,
            layer.weight.shape,
            layer.weight._local.shape,
        )
        assert torch.equal(whole(twin), whole(layer.weight))
        layer.double()
        assert layer.weight.sbp == (B,)
        assert layer.weight._local.numel() == (64 if stage == 3 else 128)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("together", [1, 2])
def test_gradients_that_are_conjugated_or_negated_by_a_bit(dim: int, together: int) -> None:
    simulate(2, _by_a_bit, dim, together)


def _by_a_bit(dim: int, together: int) -> None:
    gen, place = torch.Generator().manual_seed(3), flow.placement.all("cpu")
    values, grad = (
        [torch.randn(5, 6, dtype=torch.complex128, generator=gen) for _ in range(together)]
        for _ in range(2)
    )
    for bit, of in (("conj", lambda x: x), ("neg", lambda x: x.real)):
        for marked in (False, True):
            leaves = [nn.Parameter(of(x).to_global(place, B).to_global(sbp=S(dim))) for x in values]
            there = [g.to(leaves[0].device) for g in grad]
            given = [
                (g.conj() if bit == "conj" else g.conj().imag) if marked else of(g) for g in there
            ]
            assert all(getattr(g, f"is_{bit}")() is marked for g in given)
            wholes = [
                parameter_gather.gather_param(p, p._spec, p._spec.replace(layout=(B,)), "a test")
                for p in leaves
            ]
            torch.autograd.backward(wholes, given)
            for p, x, g in zip(leaves, wholes, given, strict=True):
                assert torch.equal(x, p.to_global(sbp=B).to_local())
                assert torch.equal(
                    p.grad.to_global(sbp=B).to_local(), 2 * g.resolve_conj().resolve_neg()
                )


def test_what_changes_before_backward_is_told() -> None:
    simulate(2, _changes, timeout=20.0)


def _changes() -> None:
    place = flow.placement.all("cpu")
    layer = nn.Linear(4, 6).to_global(place, S(0))  # type: ignore[operator]
    x = torch.ones(8, 4).to_global(place, B).to_global(sbp=S(0)).requires_grad_()  # type: ignore[attr-defined]
    with parameter_gather.reshard_after_forward():
        out = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with parameter_gather.reshard_after_forward():
        h = x * 2
        out = (h * h).sum()
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def _on_processes(stage: int) -> None:
    _equal("adamw", [0, 1], stage)


@pytest.mark.parametrize("stage", [3, 1, 2])
@pytest.mark.sweep(3)
def test_on_processes(stage: int) -> None:
    run_on(2, _on_processes, stage)


@needs_mpi
@pytest.mark.skipif(DEVICE != "cpu", reason="mpirun's ranks take NCCL where there is a GPU")
def test_over_mpi() -> None:
    run_by_mpi(2, _on_processes, 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_in_shares_of_what_is_split_already_are_clipped(stage: int) -> None:
    """A bias that is split along one of two axes is sharded along the other axis. Its gradient is
    on the same ranks, with the axes in another order."""

    class Step(flow.nn.Graph):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(
                optim.SGD(
                    [
                        {
                            "params": list(model.parameters()),
                            "clip_grad_max_norm": 0.1,
                            "clip_grad_norm_type": 2.0,
                        }
                    ],
                    lr=0.5,
                )
            )
            self.config.enable_zero(True, stage=stage, shard_min_size=1)

        def build(self, x: Any) -> Any:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    data = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain = net(lambda: nn.Linear(16, 16))
    optimizer = optim.SGD(plain.parameters(), lr=0.5)
    want = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(data).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        want.append(loss.item())

    def run() -> list[float]:
        where = flow.placement("cpu", [[0, 1], [2, 3]])
        step = Step(net(lambda: nn.Linear(16, 16)).to_global(where, [B, S(0)]))
        x = data.to_global(where, [B, B], check_meta=False).to_global(sbp=[S(0), B])  # type: ignore[attr-defined]
        return [step(x).item() for _ in range(2)]

    assert simulate(4, run)[0] == pytest.approx(want, rel=1e-9)


def _gathered_in_a_dry_world() -> list[list[str]]:
    place = flow.placement.all("cpu")
    layers = [nn.Linear(4, 6, bias=False).to_global(place, S(0)) for _ in range(2)]  # type: ignore[operator]
    real, logs = world(), []
    set_world(DryWorld(real))
    try:
        for _ in range(2):  # in the second pass both are gathered together
            with flow.boxing_log() as log:
                for i, layer in enumerate(layers):
                    p = layer.weight
                    whole = p._spec.replicated()
                    parameter_gather.gather_param(p, p._spec, whole, f"use {i}")
            parameter_gather.reset_prefetch(layers[0].weight.placement)
            logs.append([r.op for r in log])
    finally:
        set_world(real)
    return logs


def test_a_dry_world_logs_each_gathered_parameter_once() -> None:
    assert simulate(2, _gathered_in_a_dry_world) == [[["use 0", "use 1"]] * 2] * 2
