"""Tests of torch.optim on global parameters. The numbers are those of plain parameters. The state
is global between steps, and stays complete through saving, loading and a failed step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.everywhere import full
from torch import optim

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.optim import local_step

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
SHAPES = {"w": (5, 4), "b": (3,), "s": ()}
MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd without momentum": lambda p: optim.SGD(p, lr=0.1),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, foreach=False),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1, t0=2),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
}


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in SHAPES.items()
    }


def spread(x: torch.Tensor) -> torch.Tensor:
    return (
        x.clone()
        .to_global(flow.placement.all("cpu"), B)
        .to_global(sbp=S(0) if x.dim() else B)
        .detach()
    )


def whole(x: Any) -> torch.Tensor:
    return x.detach().to_global(sbp=B).to_local() if x.is_global else x


def step(
    optimizer: optim.Optimizer,
    parameters: dict[str, torch.Tensor],
    seed: int,
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    for name, grad in values(seed).items():
        parameters[name].grad = None if seed == 2 and name == "b" else make(grad)
    optimizer.step()


def on_rank(maker: str) -> None:
    plain = {n: v.requires_grad_() for n, v in values(0).items()}
    ours = {n: spread(v.detach()).requires_grad_() for n, v in plain.items()}
    reference, optimizer = MAKERS[maker](plain.values()), MAKERS[maker](ours.values())
    for seed in (1, 2, 3):
        step(reference, plain, seed, torch.Tensor.clone)
        step(optimizer, ours, seed, spread)
    saved = copy.deepcopy((reference.state_dict(), optimizer.state_dict()))
    reference, optimizer = MAKERS[maker](plain.values()), MAKERS[maker](ours.values())
    reference.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for seed in (4, 5):
        step(reference, plain, seed, torch.Tensor.clone)
        step(optimizer, ours, seed, spread)
    for name, p in ours.items():
        torch.testing.assert_close(whole(p), plain[name].detach(), rtol=1e-12, atol=1e-12)
        for key, value in reference.state[plain[name]].items():
            if isinstance(value, torch.Tensor):
                mine = optimizer.state[p][key]
                assert mine.is_global == (
                    value.shape == p.shape and (p.dim() > 0 or mine.is_global)
                ), (name, key)
                torch.testing.assert_close(whole(mine), value, rtol=1e-12, atol=1e-12)
    assert all(p.is_global for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("maker", MAKERS)
def test_equals_plain(maker: str) -> None:
    simulate(2, on_rank, maker)


def renew(optimizer: optim.Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def rate_in_a_tensor(optimizer: optim.Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2, dtype=torch.float64)


def another_state(optimizer: optim.Optimizer, params: list[torch.Tensor]) -> None:
    optimizer.state[params[0]] = {
        k: v.clone() if k == "step" else v * 0.5 for k, v in optimizer.state[params[0]].items()
    }


#: Changes between two steps: after backward, when gradients exist, and before backward.
AFTER_BACKWARD: dict[str, Callable[[optim.Optimizer, list[torch.Tensor]], Any]] = {
    "nothing": lambda o, p: None,
    "a gradient is looked at": lambda o, p: p[0].grad.mul_(2),  # type: ignore[union-attr]
    "gradients set": lambda o, p: [setattr(q, "grad", q.grad.clone()) for q in p[:2]],  # type: ignore[union-attr]
    "a gradient more": lambda o, p: setattr(p[2], "grad", torch.ones_like(p[2])),
    "a gradient less": lambda o, p: setattr(p[0], "grad", None),
    "a rate": lambda o, p: o.param_groups[0].update(lr=0.3),
    "a rate in a tensor": rate_in_a_tensor,
    "in a loop": lambda o, p: o.param_groups[0].update(foreach=False, fused=None),
    "fused": lambda o, p: o.param_groups[0].update(foreach=None, fused=True),
    "state loaded": renew,
    "state emptied": lambda o, p: o.state.clear(),
    "another state": another_state,
    "a moment": lambda o, p: o.state[p[0]].update(exp_avg=torch.ones_like(p[0])),
    "a plain moment": lambda o, p: o.state[p[0]].update(exp_avg_sq=torch.ones(p[0].shape).double()),
    "a count of steps": lambda o, p: o.state[p[0]].update(step=torch.tensor(50.0)),
    "a parameter less": lambda o, p: o.param_groups[0]["params"].pop(),
    "parameters in another order": lambda o, p: o.param_groups[0]["params"].reverse(),
}
BEFORE_BACKWARD: dict[str, Callable[[optim.Optimizer, list[torch.Tensor]], Any]] = {
    "a parameter held still": lambda o, p: p[0].requires_grad_(False),
    "a group more": lambda o, p: o.add_param_group(
        {"params": [o.param_groups[0]["params"].pop()], "lr": 0.2}
    ),
    "a parameter written": lambda o, p: p[0].data.mul_(0.5),
    "a parameter laid otherwise": lambda o, p: (
        setattr(p[0], "data", p[0].data.to_global(sbp=S(1))) if p[0].is_global else None
    ),
}


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "split"])
@pytest.mark.parametrize("change", [*AFTER_BACKWARD, *BEFORE_BACKWARD])
@pytest.mark.sweep(3)
def test_a_change_between_steps(change: str, shared: bool) -> None:
    """A step that finds everything as the previous step left it reads only the gradients."""
    before = BEFORE_BACKWARD.get(change, AFTER_BACKWARD["nothing"])
    after = AFTER_BACKWARD.get(change, AFTER_BACKWARD["nothing"])

    def train(params: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        # the first parameter has no gradient
        optimizer = optim.AdamW([params[2], *params[:2]], lr=0.1)
        for i in range(6):
            optimizer.zero_grad()
            if i == 3:
                before(optimizer, params)
            ((x @ params[0]).relu() @ params[1]).square().mean().backward()
            if i == 3:
                after(optimizer, params)
            swap = local_step._swaps.get(optimizer)
            again = (
                swap is not None
                and swap.last is not None
                and swap.last.gradients(optimizer) is not None
            )
            optimizer.step()
            if isinstance(params[0], flow.GlobalTensor) and (
                change in ("nothing", "gradients set") or i < 3
            ):
                assert again == (i > 0)
        return params

    generator = torch.Generator().manual_seed(0)
    first, second, idle, x = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((4, 6), (6, 2), (3, 3), (5, 4))
    )
    expected = [
        p.detach() for p in train([w.clone().requires_grad_() for w in (first, second, idle)], x)
    ]

    def ranks() -> None:
        everyone = flow.placement.all("cpu")
        put = [
            w.clone()
            .to_global(everyone, B)
            .to_global(sbp=B if shared else layout)
            .detach()
            .requires_grad_()  # type: ignore[attr-defined]
            for w, layout in ((first, S(1)), (second, S(0)), (idle, S(1)))
        ]
        got = train(put, x.to_global(everyone, B).to_global(sbp=S(0) if shared else B))
        for p, w in zip(got, expected, strict=True):
            torch.testing.assert_close(whole(p), w, rtol=1e-10, atol=1e-10)

    simulate(2, ranks)


@pytest.mark.parametrize("how", ["plainly", "with a closure", "in a loop"])
@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW, optim.Adagrad, optim.Rprop, optim.NAdam])
@pytest.mark.sweep(2)
def test_parameters_that_lie_as_sums(make: Any, how: str) -> None:
    """An optimizer step on summands is not a step on their sum. So a partial parameter is stepped
    in full and then gets its layout back."""
    settings = {"momentum": 0.9} if make is optim.SGD else {}

    def train(params: list[Any], x: Any) -> tuple[list[Any], optim.Optimizer, list[Any]]:
        optimizer, losses = (
            make(params, lr=0.1, foreach=False if how == "in a loop" else None, **settings),
            [],
        )

        def closure() -> Any:
            optimizer.zero_grad()
            loss = ((x @ params[0]).tanh() @ params[1]).square().mean() + params[2] ** 4
            loss.backward()
            return loss

        for i in range(4):
            losses.append(optimizer.step(closure) if how == "with a closure" else closure())
            if how != "with a closure":
                optimizer.step()
            if i == 1:
                renew(optimizer, params)
        return params, optimizer, losses

    generator = torch.Generator().manual_seed(0)
    starts = [
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((4, 6), (6, 2), ())
    ]
    x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    expected, reference, losses = train([s.clone().requires_grad_() for s in starts], x)

    def ranks() -> None:
        everyone = flow.placement("cpu", [[0, 1], [2, 3]])
        layouts = ([P, S(1)], [B, P], [P, P])
        put = [
            s.to_global(everyone, [B, B]).to_global(sbp=layout).detach().requires_grad_()
            for s, layout in zip(starts, layouts, strict=True)
        ]
        got, optimizer, mine = train(put, x.to_global(everyone, [B, B]))
        for g, w in zip([*got, *mine], [*expected, *losses], strict=True):
            torch.testing.assert_close(full(g), w.detach(), rtol=1e-10, atol=1e-10)
        for p, q, layout in zip(got, expected, layouts, strict=True):
            assert p.sbp == tuple(layout)
            for key, value in reference.state[q].items():
                if isinstance(value, torch.Tensor) and value.shape == q.shape:
                    torch.testing.assert_close(
                        whole_of(optimizer.state[p][key]), value, rtol=1e-10, atol=1e-10
                    )

    def whole_of(t: Any) -> torch.Tensor:
        return full(t) if t.is_global else t

    simulate(4, ranks, timeout=20.0)


def test_a_step_that_fails_leaves_the_optimizer_global() -> None:
    p = torch.ones(4).to_global(flow.placement.all("cpu"), S(0)).requires_grad_()
    optimizer = optim.SGD([p], lr=0.1)
    optimizer.param_groups[0]["lr"] = "much"
    p.grad = torch.ones(4).to_global(flow.placement.all("cpu"), S(0))
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.state_dict()
    assert optimizer.param_groups[0]["params"][0] is p


def test_mixed_and_closures() -> None:
    p = torch.ones(4).to_global(flow.placement.all("cpu"), S(0)).requires_grad_()
    optimizer = optim.SGD([p], lr=0.5)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert p.sum().item() == 0.0


def _loaded() -> None:
    p = flow.placement("cpu", [0, 1])
    w = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)
    plain = w.clone().requires_grad_()
    ours = (
        w.to_global(p, flow.sbp.broadcast)
        .to_global(sbp=flow.sbp.split(0))
        .detach()
        .requires_grad_()
    )  # type: ignore[attr-defined]
    one, two = torch.optim.Adam([plain], lr=0.1), torch.optim.Adam([ours], lr=0.1)
    plain.grad, ours.grad = w.sin(), w.sin().to_global(p, flow.sbp.broadcast)  # type: ignore[attr-defined]
    one.step()
    two.load_state_dict(one.state_dict())  # full plain values: each rank keeps its shard
    with torch.no_grad():
        ours.copy_(plain)
    one.step(), two.step()
    assert two.state[ours]["exp_avg"].sbp == (flow.sbp.split(0),)
    assert torch.allclose(
        torch.from_numpy(ours.detach().numpy()), plain.detach(), rtol=1e-12, atol=0
    )
    seen: list[bool] = []
    two.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(
            optimizer.param_groups[0]["params"][0].is_global
        )
    )
    two.step()
    assert seen == [True], "a user's hook sees the global parameters"


def test_loaded_state_and_hooks_of_others() -> None:
    simulate(2, _loaded)


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01, **k),
    "adam": lambda p, **k: optim.Adam(
        p, lr=torch.tensor(0.1, dtype=torch.float64), weight_decay=0.01, amsgrad=True, **k
    ),
    "adamw": lambda p, **k: optim.AdamW(p, lr=0.1, **k),
    "adagrad": lambda p, **k: optim.Adagrad(p, lr=0.1, lr_decay=0.01, **k),
}


def kernels_of(optimizer: optim.Optimizer) -> set[str]:
    """Return the names of the fused kernels that a step runs."""
    with torch.profiler.profile(acc_events=True) as seen:
        optimizer.step()
    return {e.key for e in seen.key_averages() if "_fused_" in e.key}


def on_one_rank(size: int = 40, dtype: torch.dtype = torch.float64) -> Any:
    p = (
        torch.linspace(-1, 1, size, dtype=dtype)
        .to_global(flow.placement("cpu", [0]), B)
        .requires_grad_()
    )
    p.grad = torch.linspace(1, -2, size, dtype=dtype).to_global(flow.placement("cpu", [0]), B)
    return p


@pytest.mark.parametrize("maker", OPTIMIZERS)
def test_steps_with_the_fused_kernel_where_the_user_has_not_chosen(maker: str) -> None:
    one, two = on_one_rank(), on_one_rank()
    fused, loop = OPTIMIZERS[maker]([one]), OPTIMIZERS[maker]([two], foreach=False)
    for round_ in range(4):
        assert kernels_of(fused)
        assert not kernels_of(loop)
        assert fused.param_groups[0]["fused"] is None
        assert fused.state_dict()["param_groups"][0]["fused"] is None
        torch.testing.assert_close(
            one.to_local().detach(), two.to_local().detach(), rtol=1e-14, atol=1e-14
        )
        if round_ == 1:  # the two optimizers exchange their states
            saved = copy.deepcopy((fused.state_dict(), loop.state_dict()))
            for optimizer, state in zip((loop, fused), saved, strict=True):
                state["param_groups"][0]["foreach"] = optimizer.param_groups[0]["foreach"]
                optimizer.load_state_dict(state)


def test_steps_with_the_loop_where_the_kernel_would_round_otherwise() -> None:
    assert not kernels_of(optim.AdamW([on_one_rank(dtype=torch.bfloat16)], lr=0.1))
    assert not kernels_of(optim.AdamW([on_one_rank()], lr=torch.tensor(0.1)))
    p, late = on_one_rank(), on_one_rank()
    late.grad, kept = None, late.grad
    optimizer = optim.SGD([p, late], lr=0.1, momentum=0.9)
    assert kernels_of(optimizer)
    late.grad = kept
    assert not kernels_of(optimizer), "the kernel wants momentum of all or of none"
    assert kernels_of(optimizer)


def test_a_fused_step_that_fails_leaves_no_trace() -> None:
    p = on_one_rank()
    optimizer = optim.AdamW([p], lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None


def test_foreach_writes_as_other_in_place_ops_do() -> None:
    x = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)

    def body() -> None:
        rows = x.to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
        norms, sums, twos = (
            rows.norm(dim=0),
            rows.sum(0),
            rows[0] * 0 + 2,
        )  # ops left the norms and the sums partial
        torch._foreach_mul_([norms, sums], [twos, twos])
        assert torch.allclose(full(norms), x.norm(dim=0) * 2)
        assert torch.allclose(full(sums), x.sum(0) * 2)
        part = rows[1:3]
        torch._foreach_mul_([part], 10.0)
        assert torch.equal(full(rows), torch.cat([x[:1], x[1:3] * 10, x[3:]])), (
            "the base of a view that had to move gets it too"
        )
        columns = rows.to_global(sbp=S(1))
        torch._foreach_mul_([columns.view(-1)], 2.0)
        assert torch.equal(full(columns), full(rows) * 2), "by whatever view"

    simulate(2, body, timeout=20.0)


def test_adafactor_in_lists() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 6).double()

    def steps(model: Any, x: torch.Tensor) -> None:
        optimizer = optim.Adafactor(model.parameters(), foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    start = copy.deepcopy(plain)
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    steps(plain, x)

    def body() -> None:
        everyone = flow.placement.all("cpu")
        for sbp in (S(0), B):
            model = copy.deepcopy(start).to_global(everyone, sbp)
            steps(model, x.to_global(everyone, B))
            assert torch.allclose(full(model.weight), plain.weight.detach())

    simulate(2, body, timeout=20.0)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Adafactor in lists", "Muon"])
def test_who_looks_at_whole_tensors_steps_parts_of_a_sum(name: str) -> None:
    if not hasattr(optim, name.split()[0]):
        pytest.skip("this torch has no such optimizer")
    makers: dict[str, Any] = {
        "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=2),
        "Adafactor": lambda p: optim.Adafactor(p, lr=0.1, foreach=False),
        "Adafactor in lists": lambda p: optim.Adafactor(p, lr=0.1, foreach=True),
        "Muon": lambda p: optim.Muon(p, lr=0.1),
    }
    start = [
        torch.arange(24.0, dtype=torch.float64).view(6, 4).cos(),
        torch.arange(24.0, dtype=torch.float64).view(6, 4).sin(),
    ]

    def steps(params: list[Any]) -> list[Any]:
        optimizer = makers[name](params)
        for _ in range(2):

            def loss() -> Any:
                optimizer.zero_grad()
                value = sum(((p - 1) ** 2).sum() for p in params)
                value.backward()  # type: ignore[union-attr]
                return value

            optimizer.step(loss)
        return params

    want = steps([t.clone().requires_grad_() for t in start])

    def body() -> None:
        everyone = flow.placement.all("cpu")
        for layout in ((P, B), (B, P), (P, P)) if name == "Muon" else ((P, B), (B, P), (P, S(0))):
            params = [
                t.to_global(everyone, B).to_global(sbp=sbp).detach().requires_grad_()
                for t, sbp in zip(start, layout, strict=True)
            ]
            for got, plain in zip(steps(params), want, strict=True):
                near = 1e-2 if name == "Muon" else 1e-9  # Muon computes in bfloat16
                assert torch.allclose(full(got), plain.detach(), rtol=near, atol=near)

    simulate(2, body, timeout=20.0)
