"""Tests of torch's autograd interface on global tensors against plain torch: hooks, options of
grad, higher derivatives, modes, checkpoints."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn as nn
import torch.nn.functional as F
from support.bodies import Bodies, values
from support.everywhere import full
from support.pool import run_on
from torch.autograd import functional
from torch.autograd.graph import (
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import KernelError, SbpError, ShapeError, noted

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
BODIES = Bodies()
TAKES_DICTS = tuple(int(n) for n in torch.__version__.split(".")[:2]) > (
    2,
    11,
)  # torch.autograd.grad, as inputs
on = BODIES.on


def everyone() -> flow.Placement:
    return flow.placement.all("cpu")


def leaf(t: torch.Tensor, *sbp: Any, where: flow.Placement | None = None) -> torch.Tensor:
    where = where or everyone()
    out = (
        t.detach()
        .to_global(everyone(), B)
        .to_global(where, [B] * where.axes)
        .to_global(sbp=list(sbp))
        .detach()
        .clone()
    )
    return out.requires_grad_(t.is_floating_point())  # type: ignore[no-any-return]


def same(got: Any, want: Any) -> None:
    if want is None:
        assert got is None
        return
    assert got is not None
    torch.testing.assert_close(
        full(got) if got.is_global else got, want.detach(), rtol=1e-8, atol=1e-10
    )


def alike(got: Any, want: Any) -> None:
    """Compare pytrees of tensors."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            alike(g, w)
    else:
        same(got, want)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3)).double()


START = network()
TABLES = {"data": {"*": B}, "fsdp": {"*": S(0)}, "tensor": {"0.*": S(0), "3.weight": S(1), "*": B}}


def twins(table: str = "data") -> tuple[nn.Sequential, nn.Sequential]:
    """Return the same model twice, plain and global."""
    return copy.deepcopy(START), copy.deepcopy(START).to_global(everyone(), TABLES[table])


def gradients_agree(plain: nn.Module, ours: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        try:
            same(a.grad, b.grad)
        except AssertionError as error:
            noted(error, f"gradient of {name}")
            raise


# --------------------------------------------------------------------------------- hooks of modules


@pytest.mark.parametrize("table", list(TABLES))
@pytest.mark.parametrize("sbp", [S(0), S(1), B], ids=str)
def test_full_backward_hooks(table: str, sbp: Any) -> None:
    """Hooks on every module, before and after backward, see the same values in the same order as in
    torch, and their changes have the same effect."""

    def run() -> None:
        seen: list[list[Any]] = [[], []]
        plain, ours = twins(table)
        data = values(5, 4)
        xs = (data.clone().requires_grad_(), leaf(data, sbp))
        for i, (model, x) in enumerate(zip((plain, ours), xs, strict=True)):
            for name, module in model.named_modules():
                module.register_full_backward_pre_hook(
                    lambda m, go, i=i, name=name: seen[i].append((name, "pre", go))
                )
                module.register_full_backward_hook(
                    lambda m, gi, go, i=i, name=name: seen[i].append((name, "full", gi, go))
                )
            model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
            model[1].register_full_backward_pre_hook(lambda m, go: (go[0] + 1,))
            handle = model[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 1000,))
            handle.remove()
            model(x).square().sum().backward()
        assert [s[:2] for s in seen[1]] == [s[:2] for s in seen[0]]
        for got, want in zip(seen[1], seen[0], strict=True):
            assert all(g.is_global for g in got[2])
            alike(got[2:], want[2:])
        gradients_agree(plain, ours)
        same(xs[1].grad, xs[0].grad)

    simulate(2, run)


class Two(nn.Module):
    """A module with several inputs and outputs, some without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(4, 3, seed=8))

    def forward(
        self, x: torch.Tensor, n: int, mask: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = (x * n) @ self.weight
        return torch.where(mask, z, z * 0.5), (y * x).sum(1), mask


@on(2)
def test_hooks_of_a_module_with_several_tensors() -> None:
    for sbps in ((S(0), S(0), S(0)), (B, S(1), S(0)), (S(1), B, B), (B, B, P)):
        seen: list[list[Any]] = [[], []]
        plain, ours = Two(), Two().to_global(everyone(), B)
        x, y, mask = values(5, 4), values(5, 4, seed=1), values(5, 3, seed=2) > 0
        operands = (
            (x.clone().requires_grad_(), mask, y.clone().requires_grad_()),
            (leaf(x, sbps[0]), leaf(mask, sbps[1]), leaf(y, sbps[2])),
        )
        for i, (m, (a, b, c)) in enumerate(zip((plain, ours), operands, strict=True)):
            m.register_full_backward_hook(lambda m, gi, go, mine=seen[i]: mine.append((gi, go)))
            m.register_full_backward_hook(lambda m, gi, go: (gi[0], None, None, gi[3] * 3))
            first, second, third = m(a, 2, b, c)
            assert not third.requires_grad
            (first.square().sum() + second.square().sum()).backward()
            second = m(a, 2, b, c)[1]
            second.sum().backward()  # an output without a gradient
        alike(seen[1], seen[0])
        for got, want in zip(operands[1], operands[0], strict=True):
            same(got.grad, want.grad)


@on(2)
def test_hooks_of_all_modules() -> None:
    plain, ours = twins("fsdp")
    seen: list[list[Any]] = [[], []]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, (model, x) in enumerate(
            ((plain, values(5, 4).requires_grad_()), (ours, leaf(values(5, 4), S(0))))
        ):
            mine = set(model.modules())

            def after(m: Any, gi: Any, go: Any, i: int = i, mine: Any = mine) -> None:
                if m in mine:  # simulated ranks share the hooks of all modules
                    seen[i].append((gi, go))

            def before(m: Any, go: Any, i: int = i, mine: Any = mine) -> None:
                if m in mine:
                    seen[i].append(go)

            handles = [
                nn.modules.module.register_module_full_backward_hook(after),
                nn.modules.module.register_module_full_backward_pre_hook(before),
            ]
            try:
                model(x).square().sum().backward()
            finally:
                for handle in handles:
                    handle.remove()
    assert len(seen[0]) >= 10
    alike(seen[1], seen[0])
    gradients_agree(plain, ours)


@on(2)
def test_hooks_where_no_input_has_a_gradient() -> None:
    plain, ours = twins()
    seen: list[list[Any]] = [[], []]
    for i, (model, x) in enumerate(
        ((plain, values(5, 4)), (ours, leaf(values(5, 4), S(0)).detach()))
    ):
        model[0].register_full_backward_hook(lambda m, gi, go, i=i: seen[i].append((gi[0], go[0])))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(x).square().sum().backward()
    alike(seen[1], seen[0])
    assert seen[1][0][0] is None


@on(2)
def test_hooks_of_modules_with_derivatives_of_derivatives() -> None:
    found = []
    plain, ours = twins("tensor")
    for model, x in ((plain, values(5, 4).requires_grad_()), (ours, leaf(values(5, 4), S(0)))):
        model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
        found.append((g, x.grad))
    alike(found[1], found[0])
    gradients_agree(plain, ours)


@on(2)
def test_hooks_of_a_loss() -> None:
    """The gradient of a mean over split targets starts from a bound on the count. Hooks must see
    the gradients of the mean itself."""
    target = torch.tensor([0, 1, -100, 2, -100, -100])
    seen: list[list[Any]] = [[], []]
    for i in range(2):
        model = copy.deepcopy(START)
        x, t = values(6, 4), target
        if i:
            model.to_global(everyone(), B)
            x, t = leaf(x, S(0)).detach(), leaf(t, S(0))
        model[3].register_full_backward_hook(lambda m, gi, go, mine=seen[i]: mine.append((gi, go)))
        F.cross_entropy(model(x), t).backward()
        loss = nn.CrossEntropyLoss()
        loss.register_full_backward_hook(lambda m, gi, go, i=i: seen[i].append((gi[0], go)))
        loss(model(x), t).backward()
        seen[i].append([p.grad for p in model.parameters()])
    alike(seen[1], seen[0])


def _elsewhere() -> None:
    """Check that a rank outside the placement calls the same hooks, on empty tensors."""
    where = flow.placement("cpu", [0, 1])
    plain, ours = copy.deepcopy(START), copy.deepcopy(START).to_global(where, B)
    calls = []
    x = leaf(values(5, 4), S(0), where=where)
    ours[1].register_full_backward_hook(
        lambda m, gi, go: calls.append(
            (gi[0].to_global(everyone(), B), go[0].to_global(everyone(), B))
        )
    )
    want: list[Any] = []
    plain[1].register_full_backward_hook(lambda m, gi, go: want.append((gi[0], go[0])))
    ours(x).square().sum().backward()
    plain(values(5, 4).requires_grad_()).square().sum().backward()
    assert len(calls) == 1
    alike(calls, want)


def test_hooks_outside_the_placement() -> None:
    simulate(3, _elsewhere)


def _grid() -> None:
    where = flow.placement("cpu", [[0, 1], [2, 3]])
    for table, sbp in (
        ({"0.*": [B, S(0)], "3.weight": [B, S(1)], "*": [B, B]}, (S(0), B)),
        ({"*": [S(0), S(0)]}, (S(0), S(0))),
        ({"*": [B, B]}, (S(1), S(0))),
    ):
        plain, ours = copy.deepcopy(START), copy.deepcopy(START).to_global(where, table)
        seen: list[list[Any]] = [[], []]
        for i, (model, x) in enumerate(
            ((plain, values(3, 4).requires_grad_()), (ours, leaf(values(3, 4), *sbp, where=where)))
        ):
            for module in model:
                module.register_full_backward_hook(
                    lambda m, gi, go, mine=seen[i]: mine.append((gi, go))
                )
            model[3].weight.register_hook(lambda g, mine=seen[i]: mine.append(g))
            model(x).square().sum().backward()
        alike(seen[1], seen[0])
        gradients_agree(plain, ours)


def test_hooks_over_two_axes() -> None:
    simulate(4, _grid)


def test_a_module_hook_must_return_what_torch_asks_for() -> None:
    def run() -> None:
        ours = twins()[1]
        x = leaf(values(5, 4), S(0))
        handle = ours[1].register_full_backward_hook(lambda m, gi, go: (gi[0], gi[0]))
        with pytest.raises(RuntimeError, match="invalid number of grad_input"):
            ours(x).sum().backward()
        handle.remove()
        handle = ours[1].register_full_backward_hook(lambda m, gi, go: (gi[0].to_local(),))
        with pytest.raises(ShapeError, match="plain tensor counts as the full gradient"):
            ours(x).sum().backward()
        handle.remove()
        ours(x).sum().backward()  # the failed calls leave no state behind
        assert x.grad is not None

    simulate(2, run)


def test_plain_modules_keep_their_hooks() -> None:
    plain = network()
    seen: list[Any] = []
    plain[1].register_full_backward_hook(lambda m, gi, go: seen.append((type(gi[0]), go[0].shape)))
    plain(values(5, 4)).sum().backward()
    assert seen == [(torch.Tensor, torch.Size([5, 6]))]


# --------------------------------------------------------------------------------- hooks of tensors


@on(2)
def test_hooks_of_tensors() -> None:
    """Hooks run in registration order, and each receives the result of the hook before it."""
    for sbp in (S(0), S(1), B):
        seen: list[list[Any]] = [[], []]
        pairs = (
            (values(5, 4).requires_grad_(), values(4, 3, seed=1).requires_grad_()),
            (leaf(values(5, 4), sbp), leaf(values(4, 3, seed=1), B)),
        )
        for i, (x, w) in enumerate(pairs):
            y = x @ w
            for factor in (2, 3):
                y.register_hook(lambda g, factor=factor: g * factor)
                y.register_hook(lambda g, mine=seen[i]: mine.append(g))
            dropped = y.register_hook(lambda g: g * 0)
            dropped.remove()
            with y.register_hook(lambda g: g * 0):
                pass  # a handle is a context manager
            y.register_hook(lambda g: torch.clamp(g, max=1.0))
            w.register_hook(
                lambda g, mine=seen[i]: mine.append(g)
            )  # a leaf's hook sees the gradient of both uses, summed over the ranks
            (y.square().sum() + w.sin().sum()).backward()
        assert len(seen[1]) == 3
        alike(seen[1], seen[0])
        alike([t.grad for t in pairs[1]], [t.grad for t in pairs[0]])
        assert seen[1][0].sbp == (pairs[1][0] @ pairs[1][1])._spec.dual().sbp


@on(2)
def test_what_hooks_must_not_do() -> None:
    x = leaf(values(5, 4), S(0))
    y = x * 2
    handle = y.register_hook(lambda g: g.to_local())
    with pytest.raises(ShapeError, match="plain tensor counts as the full gradient"):
        y.sum().backward()
    handle.remove()
    handle = y.register_hook(lambda g: 1.0)
    with pytest.raises(SbpError, match="must return a tensor or None, not float"):
        y.sum().backward()
    handle.remove()
    for hooked in (x, x * 2):  # the error says what the hook did, not how boxing failed
        handle = hooked.register_hook(lambda g: g[:1])
        with pytest.raises(ShapeError, match=r"shape \[5, 4\] returned .* shape \[1, 4\]"):
            hooked.sum().backward()
        handle.remove()
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        x.detach().register_hook(lambda g: None)
    with pytest.raises(RuntimeError, match="non-leaf"):
        (x * 2).register_post_accumulate_grad_hook(lambda t: None)


@pytest.mark.parametrize("table", list(TABLES))
@pytest.mark.sweep(2)
def test_an_optimizer_for_each_parameter_in_backward(table: str) -> None:
    """torch's recipe works: step and drop each gradient as soon as it is available."""

    def run() -> None:
        plain, ours = twins(table)
        for model, feed in ((plain, lambda t: t), (ours, lambda t: leaf(t, S(0)).detach())):
            optimizers = {p: torch.optim.AdamW([p], lr=0.05) for p in model.parameters()}
            count = []

            def step(p: Any, optimizers: Any = optimizers, count: Any = count) -> None:
                optimizers[p].step()
                optimizers[p].zero_grad()
                count.append(p)

            handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
            for i in range(3):
                model(feed(values(5, 4, seed=i))).square().mean().backward()
            assert len(count) == 3 * len(handles)
            assert all(p.grad is None for p in model.parameters())
            for handle in handles:
                handle.remove()
            model(feed(values(5, 4))).square().mean().backward()
            assert len(count) == 3 * len(handles)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            same(a, b)
        gradients_agree(plain, ours)

    simulate(2, run)


@on(2)
def test_several_hooks_after_accumulation() -> None:
    for sbp in (S(0), B):
        w, calls = leaf(values(4, 3), sbp), []
        first = w.register_post_accumulate_grad_hook(
            lambda t, calls=calls: calls.append(("a", t.grad.sum().item()))
        )
        second = w.register_post_accumulate_grad_hook(
            lambda t, calls=calls: calls.append(("b", t.grad.sum().item()))
        )
        x = leaf(values(5, 4, seed=1), S(0)).detach()
        total = float(values(5, 4, seed=1).sum()) * 3
        (x @ w).sum().backward()
        first.remove()
        (x @ w).sum().backward()
        second.remove()
        (x @ w).sum().backward()
        assert [name for name, _ in calls] == ["a", "b", "b"]
        assert [v for _, v in calls] == pytest.approx([total, total, 2 * total])


@on(2)
def test_a_hook_after_accumulation_must_return_none() -> None:
    """torch refuses a hook that returns a gradient. Ignoring the value would train with another
    gradient than the hook's author meant."""
    x = leaf(values(5, 4, seed=1), S(0)).detach()
    for sbp in (B, S(0), S(1), P):
        for returned in (lambda t: t.grad * 0.5, lambda t: 1, lambda t: t.grad.mul_(2)):
            w = leaf(values(4, 3), sbp)
            handle = w.register_post_accumulate_grad_hook(returned)
            with pytest.raises(RuntimeError, match=r"post accumulate grad hook .* return None"):
                (x @ w).sum().backward()
            handle.remove()
            w.grad = None
            (x @ w).sum().backward()
            assert w.grad.sum().item() == pytest.approx(float(values(5, 4, seed=1).sum()) * 3)
    plain = nn.Linear(4, 3)
    plain.weight.register_post_accumulate_grad_hook(lambda t: t.grad * 0.5)
    model = flow.parallelize(plain, everyone(), "data")
    with pytest.raises(RuntimeError, match=r"post accumulate grad hook .* return None"):
        model(x.float()).sum().backward()


@on(2)
def test_hooks_stay_with_a_leaf_that_gets_other_data() -> None:
    """The leaf is the same object after model.half() or p.data = ..., with its hooks and their
    handles."""
    for before, after in ((B, B), (S(0), S(0)), (B, S(0)), (S(0), B)):
        w, x = leaf(values(4, 3), before), leaf(values(5, 4, seed=1), S(0)).detach()
        calls: list[Any] = []
        first = w.register_hook(lambda g, calls=calls: calls.append(g.sum().item()))
        second = w.register_post_accumulate_grad_hook(
            lambda t, calls=calls: calls.append(t.grad.dtype)
        )
        w.data = leaf(values(4, 3, seed=2), after).detach().float()
        total = float(values(5, 4, seed=1).sum()) * 3
        (x.float() @ w).sum().backward()
        assert calls == [pytest.approx(total, rel=1e-5), torch.float32]
        first.remove()
        second.remove()
        (x.float() @ w).sum().backward()
        assert len(calls) == 2
        assert w.grad.sbp == (after,)


@on(2)
def test_a_leaf_that_gets_other_data_keeps_its_gradient() -> None:
    for before, after in ((B, B), (S(0), S(0)), (B, S(0)), (S(0), B), (P, B), (S(1), P)):
        w = nn.Parameter(leaf(values(4, 3), before).detach())
        (w * w).sum().backward()
        w.data = leaf(values(4, 3, seed=2), after).detach()
        assert w.grad.sbp == (after,)
        assert torch.equal(full(w.grad), values(4, 3) * 2)
        (w * w).sum().backward()
        assert torch.allclose(full(w.grad), values(4, 3) * 2 + values(4, 3, seed=2) * 2)
        model = nn.ParameterList([w]).float()
        assert w.dtype is w.grad.dtype is torch.float32
        assert model[0] is w
        assert torch.allclose(
            full(w.grad).double(), values(4, 3) * 2 + values(4, 3, seed=2) * 2, rtol=1e-5
        )


def _steps_on_a_grid() -> None:
    """Check both kinds of hooks on parameters that are summed over one axis and split over the
    other."""
    where = flow.placement("cpu", [[0, 1], [2, 3]])
    for table in ([S(0), B], [B, S(0)], [B, B], [S(0), S(1)], [S(0), S(0)]):
        ends = []
        for ours in (False, True):
            model, x = copy.deepcopy(START), values(5, 4)
            if ours:
                model.to_global(
                    where,
                    lambda path, t, table=table: [
                        e if not e.is_split or e.dim < t.dim() else B for e in table
                    ],
                )
                x = leaf(x, S(0), S(0), where=where).detach()
            optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

            def step(p: Any, optimizers: Any = optimizers) -> None:
                optimizers[p].step()
                optimizers[p].zero_grad()

            for p in model.parameters():
                p.register_post_accumulate_grad_hook(step)
                p.register_hook(lambda g: g * 2)
            for _ in range(3):
                model(x).square().mean().backward()
            ends.append(list(model.parameters()))
        alike(ends[1], ends[0])


@pytest.mark.long
def test_optimizers_in_backward_over_two_axes() -> None:
    simulate(4, _steps_on_a_grid)


@on(2)
def test_hooks_beside_writing_in_place() -> None:
    """A hook belongs to the value that the tensor had when the hook was registered."""
    found = []
    for x in (values(6, 2).requires_grad_(), leaf(values(6, 2), S(0))):
        seen: list[Any] = []
        y = x * 1
        y.register_hook(lambda g: g * 2)
        y.mul_(3)
        y.register_hook(seen.append)
        y.square().sum().backward()
        y = x * 2
        y.retain_grad()
        (y * y).sum().backward(inputs=[y])
        found.append((x.grad, y.grad, seen))
    alike(found[1], found[0])


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_of_several_tensors(mode: Any) -> None:
    def run() -> None:
        for sbp in (S(0), B):
            seen: list[list[Any]] = [[], []]
            for i, (x, w) in enumerate(
                (
                    (values(5, 4).requires_grad_(), values(4, 3).requires_grad_()),
                    (leaf(values(5, 4), sbp), leaf(values(4, 3), B)),
                )
            ):
                y = x @ w
                unused = x * 2
                handle = register_multi_grad_hook(
                    (x, w, y, unused), lambda *g, mine=seen[i]: mine.extend(g), mode=mode
                )
                y.square().sum().backward(retain_graph=True)
                y.sum().backward(inputs=[w], retain_graph=True)
                handle.remove()
                y.sum().backward()
            assert len(seen[0]) == 2
            alike(seen[1], seen[0])

    simulate(2, run)


@on(2)
def test_gradients_that_are_kept() -> None:
    for sbp in (S(0), S(1), B):
        kept = []
        for x in (values(5, 4).requires_grad_(), leaf(values(5, 4), sbp)):
            y, z = x.sin(), x.sum(0)
            for t in (x, y, z):
                t.retain_grad()
                t.retain_grad()
            y.register_hook(lambda g: g * 2)
            for _ in range(2):
                ((y * y).sum() + (z * z).sum()).backward(retain_graph=True)
            kept.append((x.grad, y.grad, z.grad))
            assert x.retains_grad is False
            assert y.retains_grad
        alike(kept[1], kept[0])


@on(2)
def test_hooks_of_nodes_see_parts() -> None:
    x = leaf(values(6, 4), S(0))
    y = (x * 2).sin()
    seen: list[Any] = []
    y.grad_fn.register_hook(lambda inputs, outputs: seen.append((inputs, outputs)))
    y.grad_fn.register_prehook(lambda outputs: seen.append(outputs))
    assert y.grad_fn.name() == "SinBackward0"
    assert y.grad_fn.next_functions[0][0].name() == "MulBackward0"
    y.sum().backward()
    mine = values(6, 4).tensor_split(flow.env.get_world_size())[flow.env.get_rank()]
    assert torch.equal(seen[0][0], torch.ones_like(mine))
    torch.testing.assert_close(seen[1][0][0], (mine * 2).cos())


@on(2)
def test_older_module_hooks_see_parts() -> None:
    ours = twins()[1]
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours[1].register_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
        ours(leaf(values(6, 4), S(0))).square().sum().backward()
    assert seen[0].shape == (3, 6)
    assert not isinstance(seen[0], flow.GlobalTensor)


@on(2)
def test_a_hook_settles_what_a_loss_still_owes() -> None:
    """A hook sees complete gradients, whenever it was registered before backward."""
    target = torch.tensor([0, 1, -100, 2, -100, -100])
    want, plain = [], copy.deepcopy(START)
    plain[0].weight.register_hook(want.append)
    F.cross_entropy(plain(values(6, 4)), target).backward()
    for early in (True, False):
        got: list[Any] = []
        ours = copy.deepcopy(START).to_global(everyone(), B)
        if early:
            ours[0].weight.register_hook(got.append)
        loss = F.cross_entropy(ours(leaf(values(6, 4), S(0)).detach()), leaf(target, S(0)))
        if not early:
            ours[0].weight.register_hook(got.append)
        loss.backward()
        alike(got, want)
        gradients_agree(plain, ours)


@on(2)
def test_hooks_of_saved_tensors() -> None:
    for sbp in (S(0), B):
        w, x = leaf(values(4, 4), sbp), leaf(values(6, 4, seed=1), S(0))
        p, q = values(4, 4).requires_grad_(), values(6, 4, seed=1).requires_grad_()
        packed = []

        def pack(t: torch.Tensor, packed: Any = packed) -> Any:
            packed.append(type(t))
            return t.numpy(force=True)

        with saved_tensors_hooks(pack, torch.from_numpy):
            y = F.layer_norm((x @ w).tanh(), (4,))
        assert set(packed) == {torch.Tensor}  # local tensors
        y.square().sum().backward()
        F.layer_norm((q @ p).tanh(), (4,)).square().sum().backward()
        with save_on_cpu():
            y = F.layer_norm((x @ w).tanh(), (4,))
        y.square().sum().backward()
        for a, b in ((w, p), (x, q)):
            same(a.grad, b.grad * 2)


# -------------------------------------------------------------------------------- grad and backward


@on(2)
def test_what_grad_can_be_asked() -> None:
    for sbps in ((S(0), S(0)), (S(1), B), (B, S(1))):
        found: list[Any] = []
        one, two = values(5, 4), values(5, 4, seed=1)
        for x, y in (
            (one.clone().requires_grad_(), two.clone().requires_grad_()),
            (leaf(one, sbps[0]), leaf(two, sbps[1])),
        ):
            g = values(5, 4, seed=2)
            a, b = x * y, x.sum(1)
            found.append([])
            found[-1].append(torch.autograd.grad([a, b], [x, y], [g, g[:, 0]], retain_graph=True))
            found[-1].append(
                torch.autograd.grad(b, [x, y], g[:, 0], allow_unused=True, retain_graph=True)
            )
            found[-1].append(
                torch.autograd.grad(b, [x, y], g[:, 0], materialize_grads=True, retain_graph=True)
            )
            if TAKES_DICTS:
                found[-1].append(
                    list(torch.autograd.grad(a, {"x": x, "y": y}, g, retain_graph=True).values())
                )
            found[-1].append(
                torch.autograd.grad(
                    a, [x, y], torch.stack([g, g * 2, -g]), is_grads_batched=True, retain_graph=True
                )
            )
            found[-1].append(
                torch.autograd.grad(
                    [a, b],
                    [x],
                    [torch.stack([g, g]), g.T[:2]],
                    is_grads_batched=True,
                    retain_graph=True,
                )
            )
            with pytest.raises(RuntimeError, match="implicitly created only for scalar"):
                torch.autograd.grad(a, [x])
            with pytest.raises(ValueError, match="allow_unused"):
                torch.autograd.grad(a, [x], g, materialize_grads=True, allow_unused=False)
            found[-1].append(
                torch.autograd.grad([a, b], [x], [g.float(), g[:, 0]], retain_graph=True)
            )
            with pytest.raises(RuntimeError, match=r"Mismatch in shape: grad_output\[0\]"):
                torch.autograd.grad([a, b], [x], [g[:2], g[:, 0]])
            with pytest.raises(RuntimeError, match="For complex Tensors, both grad_output"):
                torch.autograd.grad(a, [x], g + 0j)
            with pytest.raises(TypeError, match="gradients can be either Tensors or None"):
                torch.autograd.grad(a.sum(), [x], [2.0], retain_graph=True)
            with pytest.raises(RuntimeError, match="only for real scalar outputs but got"):
                (a + 0j).sum().backward()
            torch.autograd.backward([a, b], [g, g[:, 0]], inputs=[x])
            found[-1].append((x.grad, y.grad))
            with pytest.raises(RuntimeError, match="second time"):
                a.sum().backward()
        alike(found[1], found[0])


@on(2)
def test_edges() -> None:
    """A GradientEdge and its gradient are those of this rank's local tensor."""
    x = leaf(values(6, 4), S(0))
    y = x * 2
    edge = get_gradient_edge(y)
    (part,) = torch.autograd.grad((y * 3).sum(), edge)
    assert not isinstance(part, flow.GlobalTensor)
    assert torch.equal(part, torch.full_like(y.to_local(), 3.0))


@on(2)
def test_an_edge_starts_no_backward_pass() -> None:
    """An edge has no layout, so the error names the tensor as the way."""
    for sbp in (S(0), B, P):
        x = leaf(values(6, 4), sbp)
        y = (x * 2).sum()
        with pytest.raises(KernelError, match="Pass the tensor itself"):
            torch.autograd.grad(get_gradient_edge(y), x)
        with pytest.raises(KernelError, match="Pass the tensor itself"):
            torch.autograd.backward([(x * 3).sum(), get_gradient_edge(y)])
        (gradient,) = torch.autograd.grad(y, x)
        assert torch.equal(full(gradient), torch.full_like(values(6, 4), 2.0))


TARGET = torch.tensor([2, 0, -100, 1, 2])
SMOOTH: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, [(2, 5, 4), (4, 3)]),
    "linear": (F.linear, [(5, 4), (3, 4), (3,)]),
    "softmax": (lambda x: F.softmax(x, 1), [(5, 4)]),
    "log_softmax": (lambda x: F.log_softmax(x, 0), [(5, 4)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(5, 4), (4,), (4,)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [(3, 4, 5)]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(4, 3, 5)]),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [(3, 4, 6), (2, 4, 3)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), [(2, 3, 6, 5), (4, 3, 3, 3)]),
    "cross_entropy": (lambda x: F.cross_entropy(x, TARGET), [(5, 3)]),
    "smoothed cross_entropy": (lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.1), [(5, 3)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        [(2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4)],
    ),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4)],
    ),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 3], [2, 1]]), w).sin(), [(5, 4)]),
    "gelu": (F.gelu, [(5, 4)]),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), [(5, 4)]),
    "norm": (lambda x: torch.linalg.vector_norm(x, 3, 1), [(5, 4)]),
    "indexing": (lambda x: x[torch.tensor([0, 2, 2])] * x[1:4], [(5, 4)]),
    "cat and view": (lambda x, y: torch.cat([x, y], 1).reshape(-1, 2).prod(1), [(4, 3), (4, 5)]),
}


def _twice(name: str) -> None:
    function, shapes = SMOOTH[name]
    rows = [
        (S(0),) * 3,
        (S(1),) * 3,
        (B, S(0), S(1)),
        (S(0), B, B),
        (S(2), B, B),
        (S(2),) * 3,
        (P, B, B),
    ]
    for row in rows:
        sbps = [
            e if not e.is_split or e.dim < len(s) else B for e, s in zip(row, shapes, strict=False)
        ]
        plain = [values(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]
        ours = [leaf(t, e) for t, e in zip(plain, sbps, strict=True)]
        try:
            found = []
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                for ts in (plain, ours):
                    first = torch.autograd.grad(function(*ts).square().sum(), ts, create_graph=True)
                    second = torch.autograd.grad(sum((g * g).sum() for g in first), ts)
                    found.append((first, second))
            alike(found[1], found[0])
        except Exception as error:
            noted(error, f"{name} of {sbps}")
            raise


@pytest.mark.parametrize("name", list(SMOOTH))
@pytest.mark.sweep(4)
def test_derivatives_of_derivatives(name: str) -> None:
    simulate(2, _twice, name, timeout=20.0)
    if name in ("matmul", "softmax", "layer_norm", "cross_entropy"):
        simulate(3, _twice, name, timeout=20.0)


@on(2)
def test_functional() -> None:
    def rows(x: Any) -> Any:
        return (x**3).sum(1)

    def total(x: Any) -> Any:
        return (x.sin() * x).sum()

    def both(x: Any, y: Any) -> Any:
        return (x @ y).tanh(), (x * 2).sum(0)

    data, v, w = values(3, 2), values(3, seed=5), values(3, 2, seed=6)
    for sbp in (S(0), S(1), B):
        found = []
        for x, y, a, b in (
            (data, values(2, 2), v, w),
            tuple(leaf(t, e).detach() for t, e in ((data, sbp), (values(2, 2), B), (v, B), (w, B))),
        ):
            results = [
                functional.jacobian(rows, x),
                functional.jacobian(rows, x, vectorize=True),
                functional.jacobian(both, (x, y)),
            ]
            results += [
                functional.hessian(total, x),
                functional.hessian(total, x, vectorize=True),
                functional.vjp(rows, x, a),
                functional.jvp(rows, x, b),
            ]
            results += [functional.vhp(total, x, b), functional.hvp(total, x, b)]
            z = x.clone().requires_grad_()
            functional.jacobian(rows, z, create_graph=True).square().sum().backward()
            found.append([*results, z.grad])
        alike(found[1], found[0])


@pytest.mark.long
@on(2)
def test_gradcheck() -> None:
    """gradcheck compares with finite differences of the global function itself. torch's test with
    undefined gradients goes through a C++ Function that writes into views of the outputs. So the
    outputs must not be split in a dim other than the first."""
    check = functools.partial(torch.autograd.gradcheck, check_undefined_grad=False, atol=1e-4)
    for sbps in ((S(0), B), (S(1), S(0)), (B, B)):
        x, w = leaf(values(3, 2), sbps[0]), leaf(values(2, 2, seed=1), sbps[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert check(lambda x, w: (x @ w).tanh().to_global(sbp=B), (x, w))
            assert check(lambda x: F.softmax(x, 0).to_global(sbp=S(0)), (x,))
            if sbps[0] != S(1):  # the gradients are the outputs here
                # (Simulated ranks share torch's generator, so each rank would draw
                # different numbers.)
                start = [values(3, 2, seed=2).requires_grad_()]
                assert torch.autograd.gradgradcheck(
                    lambda x, w: (x @ w).tanh().to_global(sbp=B),
                    (x, w),
                    start,
                    check_undefined_grad=False,
                    atol=1e-4,
                )
            with pytest.raises(RuntimeError, match="Jacobian mismatch"):
                check(lambda x: (x.detach() * x).to_global(sbp=B), (x,))


# -------------------------------------------------------------------------------------------- modes


@on(2)
def test_modes() -> None:
    x = leaf(values(5, 4), S(0))
    with torch.inference_mode():
        y = x * 2
        assert y.is_inference()
        assert not y.requires_grad
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        (y * x).sum()
    with torch.set_grad_enabled(False):
        assert not (x * 2).requires_grad
        with torch.enable_grad():
            assert (x * 2).requires_grad
    assert not torch.no_grad()(lambda t: t * 2)(x).requires_grad
    data = x.data
    assert not data.requires_grad
    y = x.sin()
    data.add_(1)  # writes through .data are not tracked: no error, as in torch
    y.sum().backward()
    z = x.exp()
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_saved_tensors_that_are_written_to() -> None:
    def run() -> None:
        found = []
        for x in (values(6, 4).requires_grad_(), leaf(values(6, 4), S(0))):
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                y = x * 1
                z = y.cos()
                y.add_(1)
                z.sum().backward()
            found.append(x.grad)
        alike(found[1], found[0])

    simulate(1, run)  # the mode is per process


def test_anomaly_mode_names_the_function() -> None:
    def run() -> None:
        x = leaf(values(3, 2), S(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with (
                torch.autograd.set_detect_anomaly(True),
                pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"),
            ):
                (x * 0).sqrt().mul(0).sum().backward()

    simulate(1, run)  # the mode is per process, and simulated ranks are threads


# -------------------------------------------------------------------------------------- checkpoints


def checkpoints_of_dropout() -> None:
    for sbp in (S(0), B):
        torch.manual_seed(1)
        x = leaf(torch.ones(16, 8, dtype=torch.float64), sbp)
        model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.2))
        y = checkpoint(model, x, use_reentrant=False)
        before = F.dropout(x.detach(), 0.5)
        y.sum().backward()
        after = F.dropout(x.detach(), 0.5)
        same(x.grad, full(y))  # the gradient is zero for dropped elements
        assert 0.2 < float((full(y) == 0).double().mean()) < 0.9
        torch.manual_seed(1)
        model(x)
        same(before, full(F.dropout(x, 0.5)))
        same(after, full(F.dropout(x, 0.5)))  # recomputation has drawn no new random numbers


def test_checkpoints_repeat_what_was_random() -> None:
    run_on(2, checkpoints_of_dropout)  # simulated ranks share torch's generator


@on(2)
def test_nested_checkpoints_and_hooks() -> None:
    plain, ours = twins("fsdp")
    seen: list[Any] = []
    ours[2].register_full_backward_hook(lambda m, gi, go: seen.append(gi[0]))
    want: list[Any] = []
    plain[2].register_full_backward_hook(lambda m, gi, go: want.append(gi[0]))

    def nested(model: Any, x: Any) -> Any:
        inner = checkpoint(lambda t: model[1](model[0](t)), x, use_reentrant=False)
        return model[3](checkpoint(model[2], inner, use_reentrant=False))

    plain(values(5, 4).requires_grad_()).square().sum().backward()
    checkpoint(
        nested, ours, leaf(values(5, 4), S(0)), use_reentrant=False
    ).square().sum().backward()
    alike(seen, want)
    gradients_agree(plain, ours)


@pytest.mark.parametrize("table", list(TABLES))
def test_reentrant_checkpoints(table: str) -> None:
    """A reentrant checkpoint runs a backward pass within the backward pass. The mean's count is
    still being reduced, and there are leaves on either side."""
    target = torch.tensor([0, 1, -100, 2, -100])

    def run() -> None:
        plain, ours = twins(table)
        data = values(5, 4)
        ends = []
        for model, x, t in (
            (plain, data.clone().requires_grad_(), target),
            (ours, leaf(data, S(0)), leaf(target, S(0))),
        ):
            for _ in range(2):
                y = checkpoint(model[1], model[0](x), use_reentrant=True)
                F.cross_entropy(
                    checkpoint(lambda h, model=model: model[3](model[2](h)), y, use_reentrant=True),
                    t,
                ).backward()
                F.cross_entropy(checkpoint(model, x, use_reentrant=True), t).backward()
            ends.append(x.grad)
        same(ends[1], ends[0])
        gradients_agree(plain, ours)

    simulate(2, run)


@pytest.mark.parametrize("table", list(TABLES))
def test_selective_checkpoints(table: str) -> None:
    """Selective checkpoints count the local ops to save. Ops that run once, for planning or
    gathering, must not be counted."""

    def run() -> None:
        plain, ours = twins(table)
        plain(values(5, 4)).square().sum().backward()
        contexts = functools.partial(
            create_selective_checkpoint_contexts,
            [torch.ops.aten.addmm.default, torch.ops.aten.mm.default],
        )
        for _ in range(2):
            ours.zero_grad()
            checkpoint(
                ours, leaf(values(5, 4), S(0)), use_reentrant=False, context_fn=contexts
            ).square().sum().backward()
            gradients_agree(plain, ours)

    simulate(2, run)


# ------------------------------------------------------------------------- torch.func, forward mode


@pytest.mark.parametrize("table", list(TABLES))
def test_functional_call(table: str) -> None:
    def run() -> None:
        plain, ours = twins(table)
        found = []
        for model, x in ((plain, values(5, 4)), (ours, leaf(values(5, 4), S(0)).detach())):
            others = {
                name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()
            }
            torch.func.functional_call(model, others, (x,)).square().sum().backward()
            found.append([p.grad for p in others.values()])
            assert all(p.grad is None for p in model.parameters())
        alike(found[1], found[0])

    simulate(2, run)


@on(2)
def test_transforms_on_the_parts() -> None:
    """torch.func transforms work on local tensors inside local_map: per-sample gradients of a split
    batch."""
    w, x = values(4, 3), values(6, 4, seed=1)

    def loss(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (row @ w).tanh().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    ours = flow.local_map(each, out_sbp=S(0), in_sbp=[B, S(0)])(
        leaf(w, B).detach(), leaf(x, S(0)).detach()
    )
    same(ours, each(w, x))
    assert ours.sbp == (S(0),)


def test_what_cannot_be_transformed_says_so() -> None:
    def run() -> None:
        x = leaf(values(4, 3), S(0)).detach()
        warnings.simplefilter("ignore")  # PyTorch warns when it loads forward mode
        for transform in (
            torch.func.grad(lambda t: t.sin().sum()),
            torch.func.vmap(torch.sin),
            torch.func.jacrev(torch.sin),
            torch.func.hessian(torch.sin),
        ):
            with pytest.raises(KernelError, match="local_map"):
                transform(x)
        with pytest.raises(KernelError, match=r"functional\.jvp"):
            torch.func.jvp(torch.sin, (x,), (x,))
        with pytest.raises(KernelError, match=r"functional\.jvp"), forward_ad.dual_level():
            forward_ad.make_dual(x, x)
        with pytest.raises(KernelError, match=r"functional\.jvp"), forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(4, 3), x)
        same((x * 2), values(4, 3) * 2)  # no state is left behind

    simulate(1, run)  # levels of forward mode are per process


@on(2)
def test_no_hook_no_traffic() -> None:
    """A backward pass with hooks moves the same bytes as one without hooks."""
    sent = []
    for hooked in (False, True):
        ours = twins("data")[1]
        if hooked:
            for module in ours:
                module.register_full_backward_hook(lambda m, gi, go: None)
        x = leaf(values(6, 4), S(0))
        loss = ours(x).square().sum()
        with record_collectives() as log:
            loss.backward()
        sent.append(sum(t.bytes for t in log))
    assert sent[0] == sent[1] > 0


#: Each part has every third body. All bodies also run on simulated ranks.
PARTS_ON_PROCESSES = 3


def on_processes(part: int) -> None:
    BODIES.run(part, PARTS_ON_PROCESSES)


@pytest.mark.parametrize("part", range(PARTS_ON_PROCESSES))
@pytest.mark.sweep(PARTS_ON_PROCESSES)
def test_on_processes(part: int) -> None:
    run_on(2, on_processes, part)
