"""Tests of autograd with global tensors against plain torch: hooks, accumulation, checkpoints,
higher derivatives, and every optimizer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.bodies import Bodies, values
from support.everywhere import full
from support.pool import run_on
from torch.autograd.functional import hessian, jacobian
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
LAYOUTS = (S(0), S(1), B)
BODIES = Bodies()
on = BODIES.on


def leaf(t: torch.Tensor, sbp: Any) -> torch.Tensor:
    where = flow.placement.all("cpu")
    return t.to_global(where, B).to_global(sbp=sbp).detach().clone().requires_grad_()  # type: ignore[no-any-return]


def same(got: Any, want: Any) -> None:
    assert got is not None
    torch.testing.assert_close(
        full(got) if got.is_global else got, want.detach(), rtol=1e-9, atol=1e-12
    )


def pairs(*shapes: tuple[int, ...]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return the same leaves, plain and global, in several layouts."""
    found = []
    for sbps in ((S(0),) * 4, (S(1),) * 4, (B,) * 4, (S(0), B, S(1), S(0)), (S(1), S(0), B, B)):
        plain = [values(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
        found.append(
            (
                plain,
                [
                    leaf(p.detach(), e if not e.is_split or e.dim < p.dim() else B)
                    for p, e in zip(plain, sbps, strict=False)
                ],
            )
        )
    return found


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3)).double()


TABLES = {"data": {"*": B}, "fsdp": {"*": S(0)}, "tensor": {"0.*": S(0), "3.weight": S(1), "*": B}}
START = network()


# -------------------------------------------------------------------------------- backward and grad


@on(3)
def test_backward() -> None:
    for plain, ours in pairs((5, 4), (4, 3)):
        for x, w in (plain, ours):
            y = torch.tanh(x @ w)
            (y.sum() + y.max() + y.norm()).backward(retain_graph=True)
            y.mean().backward()
        for a, b in zip(ours, plain, strict=True):
            same(a.grad, b.grad)
            assert a.grad.sbp == a.sbp
            assert a.grad.placement is a.placement


@on(2)
def test_backward_of_something_larger() -> None:
    for plain, ours in pairs((5, 4), (4, 3)):
        g = values(5, 3, seed=7)
        (plain[0] @ plain[1]).backward(g)
        for seed in (g, *[leaf(g, e).detach() for e in (S(0), S(1), B, P)]):
            for x in ours:
                x.grad = None
            (ours[0] @ ours[1]).backward(seed)
            for a, b in zip(ours, plain, strict=True):
                same(a.grad, b.grad)


@on(2)
def test_several_outputs_and_inputs() -> None:
    for plain, ours in pairs((5, 4), (5, 4)):
        for x, y in (plain, ours):
            z = x * y
            torch.autograd.backward([z.sum(), (z * z).sum()], inputs=[x])
            assert y.grad is None
        same(ours[0].grad, plain[0].grad)
        got, want = (
            torch.autograd.grad([(x * y).sum(), (x / 2).sum()], [x, y]) for x, y in (ours, plain)
        )
        for a, b in zip(got, want, strict=True):
            same(a, b)
        assert [a.sbp for a in got] == [x.sbp for x in ours]
        unused = torch.autograd.grad(ours[0].sum(), ours, allow_unused=True)
        assert unused[1] is None
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(ours[0].sum(), ours)


@on(2)
def test_second_and_third_derivatives() -> None:
    for plain, ours in pairs((5, 4), (4, 3)):
        found = []
        for x, w in (plain, ours):
            y = torch.sigmoid(x @ w).sum() + (x**3).mean()
            first = torch.autograd.grad(y, [x, w], create_graph=True)
            second = torch.autograd.grad(
                sum((g * g).sum() for g in first), [x, w], create_graph=True
            )
            sum((g**2).sum() for g in second).backward()  # type: ignore[union-attr]
            found.append([*first, *second, x.grad, w.grad])
        for b, a in zip(*found, strict=True):
            same(a, b)


@on(2)
def test_gradient_penalty() -> None:
    """backward(create_graph=True) returns gradients that have a graph."""
    for plain, ours in pairs((5, 4), (4, 3)):
        for x, w in (plain, ours):
            (g,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
            ((g.norm(dim=1) - 1) ** 2).mean().backward()
        same(ours[1].grad, plain[1].grad)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_derivatives_of_the_gradient_of_a_plain_tensor(ranks: int) -> None:
    """A plain input's gradient is plain, the same on every rank: what it adds counts once."""

    def differentiated(w: torch.Tensor) -> list[torch.Tensor]:
        x, found = values(5, 4).requires_grad_(), []
        y = x.sin() @ w
        for _ in range(3):
            (y,) = torch.autograd.grad(y.square().sum() + y.sum(), x, create_graph=True)
            found.append(y)
            y = y + w.sum() * x  # the next derivative is that of a plain and a global tensor
        y.square().mean().backward()
        (g,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
        ((g.norm(dim=1) - 1) ** 2).mean().backward()  # a loss of plain tensors alone
        return [*found, x.grad, w.grad]  # type: ignore[list-item]

    def run() -> None:
        want = differentiated(values(4, 3, seed=1).requires_grad_())
        for sbp in LAYOUTS:
            got = differentiated(leaf(values(4, 3, seed=1), sbp))
            assert not any(t.is_global for t in got[:-1])
            for a, b in zip(got, want, strict=True):
                same(a.detach(), b)

    simulate(ranks, run)


@pytest.mark.parametrize("plan", ["data", "fsdp", "tensor"])
def test_batches_of_gradients_of_plain_tensors(plan: str) -> None:
    """torch runs the pass under its own vmap, since neither inputs nor outputs are global."""

    def derivatives(model: nn.Module) -> list[torch.Tensor]:
        x = values(4)

        def slope(x: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]

        return [
            hessian(lambda x: model(x).square().sum(), x, vectorize=True),
            jacobian(slope, x, vectorize=True),
        ]

    def run() -> None:
        model = flow.parallelize(copy.deepcopy(START), flow.placement.all("cpu"), plan)
        for a, b in zip(derivatives(model), derivatives(START), strict=True):
            same(a, b)

    simulate(2, run)


@on(2)
def test_grad_is_written() -> None:
    x = leaf(values(4, 3), S(0))
    x.grad = leaf(values(4, 3, seed=1), B).detach()
    assert x.grad.sbp == (S(0),)
    same(x.grad, values(4, 3, seed=1))
    (x * 2).sum().backward()
    same(x.grad, values(4, 3, seed=1) + 2)
    x.grad.zero_()
    (x * 2).sum().backward()
    same(x.grad, torch.full((4, 3), 2.0).double())
    x.grad.mul_(3)
    same(x.grad, torch.full((4, 3), 6.0).double())
    x.grad = None
    assert x.grad is None
    del x.grad
    y = leaf(values(4), B)
    for _ in range(3):
        (y * y).sum().backward()
    same(y.grad, 6 * values(4))
    kept = y.grad
    y.grad *= 0.5
    same(y.grad, 3 * values(4))
    assert kept.is_global


@on(2)
def test_what_has_no_gradient() -> None:
    x = leaf(values(4, 3), S(0))
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        assert not (x * 2).requires_grad
    assert not x.detach().requires_grad
    assert not (x > 0).requires_grad
    assert not x.argmax(1).requires_grad
    with torch.no_grad():
        x.add_(1)
    (x.detach() * x).sum().backward()
    same(x.grad, values(4, 3) + 1)
    with torch.enable_grad():
        assert (x * 2).requires_grad
    x.requires_grad_(False)
    assert not (x * 2).requires_grad


@on(2)
def test_leaves_made_of_reductions() -> None:
    reductions = (
        lambda x: x.norm(dim=0),
        lambda x: x.amax(0),
        lambda x: x.amin(0),
        lambda x: x.sum(0),
    )
    for reduce in reductions:
        made = [reduce(t.detach()) for t in (values(5, 3), leaf(values(5, 3), S(0)))]
        for make in (lambda t: t.clone().requires_grad_(), lambda t: nn.Parameter(t.clone())):
            plain, ours = (make(t) for t in made)
            for t in (plain, ours):
                (t * t * 3).sum().backward()
                torch.optim.SGD([t], lr=0.1).step()
            same(ours.grad, plain.grad)
            same(ours, plain)


@on(2)
def test_told_again_to_require_grad() -> None:
    for sbp in (B, S(0), P):
        x = leaf(values(4, 3), sbp)
        x.requires_grad_()  # as module.requires_grad_(True) does for all parameters
        (x * 2).sum().backward()
        same(x.grad, torch.full((4, 3), 2.0).double())
        x.requires_grad_(False)
        same(x.grad, torch.full((4, 3), 2.0).double())
        x.requires_grad = True
        (x * 3).sum().backward()
        same(x.grad, torch.full((4, 3), 5.0).double())
    model = (
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        .double()
        .to_global(x.placement, B)
    )
    for trained in ([1], [0, 1], [0]):
        model.requires_grad_(False).zero_grad()
        for i in trained:
            model[i].requires_grad_(True)
        model(x.detach()).sum().backward()
        for i in (0, 1):
            assert (model[i].weight.grad is not None) == (i in trained)


@on(2)
def test_retain_grad() -> None:
    for plain, ours in pairs((5, 4), (4, 3)):
        kept = []
        for x, w in (plain, ours):
            y = x @ w
            y.retain_grad()
            assert y.retains_grad
            (y * y).sum().backward()
            kept.append(y.grad)
        same(kept[1], kept[0])


# -------------------------------------------------------------------------------------------- hooks


@on(2)
def test_hooks() -> None:
    for plain, ours in pairs((5, 4), (4, 3)):
        seen: list[list[Any]] = [[], []]
        for i, (x, w) in enumerate((plain, ours)):
            y = x @ w
            y.register_hook(lambda g: g * 2)
            y.register_hook(functools.partial(list.append, seen[i]))
            handle = w.register_hook(lambda g: g * 100)
            handle.remove()
            w.register_hook(lambda g: g + g)
            (y * y).sum().backward()
        same(seen[1][0], seen[0][0])
        same(ours[0].grad, plain[0].grad)
        same(ours[1].grad, plain[1].grad)


@on(2)
def test_plain_tensors_as_gradients() -> None:
    """A plain tensor that a hook returns, or that is given to .grad, counts as the same on every
    rank, as in other operations. It was refused."""
    for plain, ours in pairs((5, 4), (4, 3)):
        for x, w in (plain, ours):
            y = x @ w
            y.register_hook(lambda g: values(5, 3, seed=4))
            x.register_hook(lambda g: values(5, 4, seed=5))
            (y * y).sum().backward()
            w.grad = values(4, 3, seed=6)
            (x.detach() @ w).sum().backward()  # adds to it
        for got, want in zip(ours, plain, strict=True):
            same(got.grad, want.grad)
            assert got.grad.sbp == got.sbp
            got.grad = torch.eye(*got.shape).double().to_sparse()
            same(got.grad, torch.eye(*got.shape).double())
    x = leaf(values(4, 3), S(0))
    with pytest.raises(DivergenceError, match=r"different values for a gradient given to \.grad"):
        x.grad = torch.full((4, 3), float(flow.env.get_rank())).double()
    world().forget()
    handle = x.register_hook(lambda g: torch.full((4, 3), float(flow.env.get_rank())).double())
    with pytest.raises(DivergenceError, match="for the gradient that a hook returned"):
        x.sum().backward()
    world().forget()
    handle.remove()
    for given in (x, x.detach().clone().to_local().requires_grad_()):
        with pytest.raises(
            TypeError, match="expected to be a Tensor or None but got grad of type fl"
        ):
            given.grad = 1.0


@on(2)
def test_hooks_after_accumulation() -> None:
    """Optimizers in backward use such hooks: each parameter steps when its gradient is ready."""
    for sbp in LAYOUTS:
        w, x = leaf(values(4, 4), sbp), leaf(values(6, 4, seed=1), S(0)).detach()
        p, q = values(4, 4).requires_grad_(), values(6, 4, seed=1)

        def step(t: torch.Tensor) -> None:
            with torch.no_grad():
                t.add_(t.grad, alpha=-0.1)
            t.grad = None

        for t in (w, p):
            handle = t.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            (x @ w).tanh().sum().backward()
            (q @ p).tanh().sum().backward()
        same(w, p)
        assert w.grad is None
        handle.remove()


@on(2)
def test_hooks_of_modules() -> None:
    model = copy.deepcopy(START)
    twin = copy.deepcopy(START).to_global(flow.placement.all("cpu"), B)
    seen: list[list[Any]] = [[], []]
    for i, (m, x) in enumerate(((model, values(6, 4)), (twin, leaf(values(6, 4), S(0)).detach()))):
        m[0].register_forward_hook(
            lambda module, inputs, output, i=i: seen[i].append(output.detach())
        )
        m[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        m(x).sum().backward()
    same(seen[1][0], seen[0][0])
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        same(a.grad, b.grad)


def _which_results_have_a_gradient() -> list[list[bool]]:
    x = leaf(values(3, 5, 5), S(0))  # the fourth rank has no matrix
    return [
        [t.requires_grad for t in f(x)]
        for f in (torch.linalg.lu, torch.linalg.slogdet, torch.linalg.qr, torch.linalg.lu_factor_ex)
    ]


def test_an_empty_part_has_the_gradients_of_the_others() -> None:
    plain = values(3, 5, 5).requires_grad_()
    want = [
        [t.requires_grad for t in f(plain)]
        for f in (torch.linalg.lu, torch.linalg.slogdet, torch.linalg.qr, torch.linalg.lu_factor_ex)
    ]
    assert simulate(4, _which_results_have_a_gradient) == [want] * 4


def _gradient_without_memory() -> None:
    """Check zeros that autograd represents by a tensor without memory (the gradient of a sign)."""
    for sbp in (S(0), S(1), B, P):
        x = leaf(values(3, 2), sbp)
        x.sgn().sum().backward()
        assert not x.grad.numpy().any()
        assert not x.grad.to_global(sbp=B).to_local().any()


def test_gradient_without_memory() -> None:
    simulate(2, _gradient_without_memory)


def test_full_backward_hooks() -> None:
    def run() -> None:
        seen: list[list[Any]] = [[], []]
        model = copy.deepcopy(START)
        twin = copy.deepcopy(START).to_global(flow.placement.all("cpu"), B)
        for i, (m, x) in enumerate(
            ((model, values(6, 4)), (twin, leaf(values(6, 4), S(0)).detach()))
        ):
            m[1].register_full_backward_hook(
                lambda module, gi, go, i=i: seen[i].extend([gi[0], go[0]])
            )
            m(x).sum().backward()
        for a, b in zip(seen[1], seen[0], strict=True):
            same(a, b)

    simulate(2, run)


# --------------------------------------------------------------------- accumulation and checkpoints


@pytest.mark.parametrize("mode", list(TABLES))
@pytest.mark.parametrize("quiet", [True, False])
def test_accumulation(mode: str, quiet: bool) -> None:
    def run() -> None:
        plain, ours = (
            copy.deepcopy(START),
            copy.deepcopy(START).to_global(flow.placement.all("cpu"), TABLES[mode]),
        )
        for i in range(3):
            t = values(6, 4, seed=i)
            plain(t).square().mean().backward()
            x = leaf(t, S(0)).detach()
            if quiet and i < 2:
                with flow.no_sync():
                    ours(x).square().mean().backward()
            else:
                ours(x).square().mean().backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            same(a.grad, b.grad)
            assert a.grad.sbp == a.sbp

    simulate(2, run)


@on(2)
def test_reading_a_gradient_under_no_sync() -> None:
    x, w = leaf(values(6, 4), S(0)).detach(), leaf(values(4, 3, seed=1), B)
    with record_collectives() as log, flow.no_sync():
        (x @ w).sum().backward()
    assert not log
    same(w.grad, values(6, 4).sum(0)[:, None].expand(4, 3))


@pytest.mark.parametrize("mode", list(TABLES))
def test_checkpointed(mode: str) -> None:
    def run() -> None:
        plain, ours = (
            copy.deepcopy(START),
            copy.deepcopy(START).to_global(flow.placement.all("cpu"), TABLES[mode]),
        )
        plain(values(6, 4)).square().mean().backward()
        x = leaf(values(6, 4), S(0))
        checkpoint(ours, x, use_reentrant=False).square().mean().backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            same(a.grad, b.grad)
            a.grad = None
        checkpoint_sequential(ours, 2, x, use_reentrant=False).square().mean().backward()
        checkpoint(
            lambda m, t: m(t), ours, x, use_reentrant=False, preserve_rng_state=False
        ).square().mean().mul(0).backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            same(a.grad, b.grad)

    simulate(2, run)


@on(2)
def test_checkpointed_dropout_draws_the_same_again() -> None:
    x = leaf(torch.ones(64, 8, dtype=torch.float64), S(0))
    y = checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=False)
    y.sum().backward()
    same(x.grad, full(y))  # the gradient is zero for dropped elements
    assert 0.2 < float((full(y) == 0).double().mean()) < 0.8


# --------------------------------------------------------------------------------------- optimizers


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{
        f"{name} {how}": functools.partial(
            getattr(torch.optim, name),
            **{how: True} if how != "loop" else {"foreach": False},
            **options,
        )
        for name, options in (
            ("SGD", {"lr": 0.1, "momentum": 0.9}),
            ("Adam", {"lr": 0.1}),
            ("AdamW", {"lr": 0.1, "amsgrad": True}),
            ("Adagrad", {"lr": 0.1}),
        )
        for how in ("loop", "foreach", "fused")
    },
    **{
        f"{name} {how}": functools.partial(
            getattr(torch.optim, name), foreach=how == "foreach", lr=0.05
        )
        for name in ("RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "Rprop", "ASGD")
        for how in ("loop", "foreach")
    },
}
SCHEDULES: list[Callable[[Any], Any]] = [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.StepLR(o, 2)], [2]
    ),
]


def optimised(make: Any, schedule: Any, mode: str, clip: float = 0.5) -> None:
    plain, ours = (
        copy.deepcopy(START),
        copy.deepcopy(START).to_global(flow.placement.all("cpu"), TABLES[mode]),
    )
    for model, feed in ((plain, lambda t: t), (ours, lambda t: leaf(t, S(0)).detach())):
        optimizer = make(model.parameters())
        scheduler = schedule(optimizer)
        for i in range(4):
            optimizer.zero_grad(set_to_none=i % 2 == 0)
            model(feed(values(6, 4, seed=i))).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        same(a, b)
        assert mode == "tensor" or a.sbp == (TABLES[mode]["*"],)


def way_of(name: str, mode: str) -> str:
    """Return how an optimizer steps. Of fused optimizers, each case is a kind of its own."""
    way = name.split()[1]
    return f"{name} {mode}" if way == "fused" else way


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("mode", ["fsdp", "tensor"])
@pytest.mark.sweep(6, kind=way_of)
def test_optimizers(name: str, mode: str) -> None:
    simulate(2, optimised, OPTIMIZERS[name], SCHEDULES[0], mode, timeout=20.0)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_schedules(schedule: Any) -> None:
    simulate(2, optimised, OPTIMIZERS["AdamW foreach"], schedule, "fsdp", timeout=20.0)


@on(2)
def test_the_state_of_an_optimizer() -> None:
    """The state has the layout of its parameters, and can be loaded into a new optimizer."""
    ours = copy.deepcopy(START).to_global(flow.placement.all("cpu"), TABLES["fsdp"])
    one = torch.optim.AdamW(ours.parameters(), lr=0.1)
    x = leaf(values(6, 4), S(0)).detach()
    ours(x).square().mean().backward()
    one.step()
    for p, state in one.state.items():
        assert state["exp_avg"].is_global
        assert state["exp_avg"].sbp == p.sbp
    twin = copy.deepcopy(ours)
    two = torch.optim.AdamW(twin.parameters(), lr=0.1)
    # torch's optimizers share the tensors that they load
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for model, optimizer in ((ours, one), (twin, two)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for a, b in zip(twin.parameters(), ours.parameters(), strict=True):
        same(a, full(b))
        assert a.sbp == b.sbp
    added = torch.optim.SGD(
        [{"params": ours[0].parameters(), "lr": 0.1}, {"params": ours[3].parameters()}], lr=0.2
    )
    added.step()


@on(2)
def test_a_closure() -> None:
    found = []
    for w in (values(4, 3).requires_grad_(), leaf(values(4, 3), S(0))):
        optimizer = torch.optim.SGD([w], lr=0.1)

        def closure(w: torch.Tensor = w, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (w**2).sum()
            loss.backward()
            return loss

        found.append((w, optimizer.step(closure)))
    same(found[1][0], found[0][0])
    assert found[1][1].item() == pytest.approx(found[0][1].item())


@on(2)
def test_clip_grad_value_and_ema() -> None:
    plain, ours = (
        copy.deepcopy(START),
        copy.deepcopy(START).to_global(flow.placement.all("cpu"), TABLES["tensor"]),
    )
    for model, x in ((plain, values(6, 4)), (ours, leaf(values(6, 4), B).detach())):
        model(x).square().sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        same(a.grad, b.grad)
    average = torch.optim.swa_utils.AveragedModel(
        ours, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(ours)
    average.update_parameters(ours)
    for a, b in zip(average.module.parameters(), ours.parameters(), strict=True):
        same(a, full(b))
    got, want = (nn.utils.get_total_norm([p.grad for p in m.parameters()]) for m in (ours, plain))
    assert float(got) == pytest.approx(float(want))


#: Each part has every fourth body. All bodies also run on simulated ranks.
PARTS_ON_PROCESSES = 4


def on_processes(part: int) -> None:
    BODIES.run(part, PARTS_ON_PROCESSES)
    for mode in TABLES:
        optimised(OPTIMIZERS["AdamW fused"], SCHEDULES[0], mode)


@pytest.mark.parametrize("part", range(PARTS_ON_PROCESSES))
@pytest.mark.sweep(PARTS_ON_PROCESSES)
def test_on_processes(part: int) -> None:
    run_on(2, on_processes, part)
