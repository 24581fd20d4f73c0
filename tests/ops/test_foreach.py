"""Tests of functions over lists that mix plain and global tensors. Plain targets hold the global
result on every rank, as after ``plain.copy_(g)``."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bodies import values
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value
from globaltensor.distributed.simulate import simulate

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum

Lists = list[list[Any]]


def fused_adam(lists: Lists) -> None:
    params, grads, averages, squares = lists
    settings = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.01,
        "eps": 1e-8,
        "maximize": False,
        "amsgrad": False,
    }
    torch._fused_adam_(
        params,
        grads,
        averages,
        [s.abs_() for s in squares],
        [],
        [torch.tensor(1.0) for _ in params],
        **settings,
    )


def fused_sgd(lists: Lists) -> None:
    settings = {
        "lr": 0.1,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
        "is_first_step": False,
    }
    torch._fused_sgd_(*lists[:3], **settings)


#: Functions that write into lists of tensors, with the number of lists that each takes.
WRITING: dict[str, tuple[int, Callable[[Lists], Any]]] = {
    "copy": (2, lambda x: torch._foreach_copy_(*x)),
    "add": (2, lambda x: torch._foreach_add_(*x, alpha=2)),
    "add by name": (2, lambda x: torch._foreach_add_(self=x[0], other=x[1])),
    "sub": (2, lambda x: torch._foreach_sub_(*x)),
    "mul": (2, lambda x: torch._foreach_mul_(*x)),
    "div": (2, lambda x: torch._foreach_div_(*x)),
    "maximum": (2, lambda x: torch._foreach_maximum_(*x)),
    "lerp": (2, lambda x: torch._foreach_lerp_(*x, 0.3)),
    "lerp by tensors": (3, lambda x: torch._foreach_lerp_(*x)),
    "addcmul": (3, lambda x: torch._foreach_addcmul_(*x, value=0.5)),
    "addcdiv": (3, lambda x: torch._foreach_addcdiv_(*x, 0.5)),
    "addcdiv by numbers": (
        3,
        lambda x: torch._foreach_addcdiv_(*x, torch.arange(1.0, len(x[0]) + 1)),
    ),
    "square root": (
        2,
        lambda x: torch._foreach_sqrt_([a for pair in zip(*x, strict=True) for a in pair]),
    ),
    "one factor": (2, lambda x: torch._foreach_mul_(x[0], x[1][0][0, 0])),
    "fewer dims": (2, lambda x: torch._foreach_add_(x[0], [y[0] for y in x[1]])),
    "fused adam": (4, fused_adam),
    "fused sgd": (3, fused_sgd),
}
MAKING: dict[str, tuple[int, Callable[[Lists], Any]]] = {
    "add": (2, lambda x: torch._foreach_add(*x, alpha=2)),
    "fewer dims first": (2, lambda x: torch._foreach_mul([y[0] for y in x[0]], x[1])),
    "numbers first": (2, lambda x: torch._foreach_mul([y[0, 0] for y in x[0]], x[1])),
    "lerp": (2, lambda x: torch._foreach_lerp(*x, 0.3)),
    "one factor": (2, lambda x: torch._foreach_mul(x[0], x[1][0].sum())),
    "norm": (2, lambda x: torch._foreach_norm([*x[0], *x[1]])),
    "wide norm": (
        2,
        lambda x: torch._foreach_norm([t.float() for t in (*x[0], *x[1])], 1, torch.float64),
    ),
    "max": (2, lambda x: torch._foreach_max([*x[0], *x[1]])),
}


def layouts(count: int, placement: Any) -> Iterator[list[Any]]:
    """Yield layouts of the operands. Each is plain (None) or has one of some layouts, with at least
    one plain and one global operand."""
    whole, split, partial = (
        [B] * placement.axes,
        [S(0)] * placement.axes,
        [*[S(1)] * (placement.axes - 1), P],
    )
    if count == 2:
        yield from (
            list(found)
            for found in itertools.product((None, whole, split, partial), repeat=2)
            if None in found and found != (None, None)
        )
    else:
        for other in (whole, split, partial):
            yield [None, *[other] * (count - 1)]
            yield [None, None, *[other] * (count - 2)]
            yield [split, None, *[other] * (count - 2)]


def laid_out(value: Tensor, placement: Any, sbp: Any) -> Any:
    return (
        value.clone()
        if sbp is None
        else value.to_global(placement, [B] * placement.axes).to_global(sbp=sbp).clone()
    )  # type: ignore[attr-defined]


def whole(x: Any) -> Tensor:
    return gather_global_value(x) if x.is_global else x.detach()


def compare(got: Any, want: Any, what: str) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            whole(a), b, rtol=1e-12, atol=1e-13, msg=lambda text, i=i: f"{what}, {i}: {text}"
        )


def as_plain(ranks: Any, beside: bool) -> None:
    """Check every kernel in every mix of layouts. With ``beside``, each list has a second tensor
    that is always global."""
    placement = flow.placement("cpu", ranks)
    data = [values(5, 3, seed=i).abs() + 0.5 for i in range(8)]
    for kernels in (WRITING, MAKING):
        for name, (count, kernel) in kernels.items():
            for sbp in layouts(count, placement):
                if name.startswith("fused") and sbp[0] is None and P in (sbp[1] or ()):
                    continue  # squares of partial sums must not be taken
                plain = [
                    [data[k].clone(), *([data[k + 4].clone()] if beside else [])]
                    for k in range(count)
                ]
                ours = [
                    [
                        laid_out(t, placement, sbp[k] if i == 0 else [S(0)] * placement.axes)
                        for i, t in enumerate(ts)
                    ]
                    for k, ts in enumerate(plain)
                ]
                targets = list(ours[0])
                want, got = kernel(plain), kernel(ours)
                what = f"{name} {sbp}"
                assert all(a is b for a, b in zip(targets, ours[0], strict=True)), what
                compare([t for ts in ours for t in ts], [t for ts in plain for t in ts], what)
                if kernels is MAKING:
                    compare(got, want, what)


@pytest.mark.long
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with others"])
@pytest.mark.sweep(2)
def test_every_mix_of_layouts(beside: bool) -> None:
    simulate(2, as_plain, [0, 1], beside, timeout=60.0)


@pytest.mark.long
def test_every_mix_of_layouts_on_four_ranks() -> None:
    simulate(4, as_plain, [[0, 1], [2, 3]], False, timeout=60.0)


def test_ranks_outside_the_placement_have_the_result_too() -> None:
    simulate(3, as_plain, [0, 2], False, timeout=60.0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def averages() -> list[Tensor]:
    """Check and return a plain average of a model that trains in shards."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    trained = flow.parallelize(model(), flow.placement.all("cpu"), "fsdp")
    alone = model()
    ours, theirs = (
        AveragedModel(copy.deepcopy(alone), multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(2)
    )
    steps: list[Any] = [
        (m, torch.optim.SGD(m.parameters(), lr=0.1), average)
        for m, average in ((trained, ours), (alone, theirs))
    ]
    for step in range(3):
        for m, optimizer, average in steps:
            optimizer.zero_grad()
            m(values(5, 4, seed=step)).square().sum().backward()
            optimizer.step()
            average.update_parameters(m)
    found = list(ours.module.parameters())
    assert all(type(p) is nn.Parameter for p in found)
    compare(found, [p.detach() for p in theirs.module.parameters()], "average")
    return [p.detach() for p in found]


def plain_parameters() -> list[Tensor]:
    """Check optimizers of plain parameters whose gradients are global."""
    placement = flow.placement.all("cpu")
    found = []
    makers: list[Any] = [
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
    ]
    for make, sbp in itertools.product(makers, (B, S(0), P)):
        ours, alone = (nn.Parameter(values(4, 3)) for _ in range(2))
        optimizers = [make([p]) for p in (ours, alone)]
        for step in range(3):
            grad = values(4, 3, seed=step + 1)
            alone.grad, ours.grad = grad, laid_out(grad, placement, [sbp])
            norms = [
                torch.nn.utils.clip_grad_norm_([p, q], 1.5)
                for p, q in ((ours, second(step)), (alone, second(step)))
            ]
            compare(norms[:1], norms[1:], "norm")
            for optimizer in optimizers:
                optimizer.step()
        compare([ours], [alone.detach()], f"{optimizers[0]} {sbp}")
        found.append(ours.detach())
    return found


def second(step: int) -> nn.Parameter:
    """Return a parameter with a plain gradient."""
    p = nn.Parameter(values(2))
    p.grad = values(2, seed=step)
    return p


def on_ranks() -> list[Tensor]:
    placement = flow.placement.all("cpu")
    g = torch.arange(12.0).view(4, 3).to_global(placement, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    plain = torch.zeros(4, 3)
    torch._foreach_copy_([plain], [g])
    assert plain.tolist() == torch.arange(12.0).view(4, 3).tolist()
    as_plain([0, 1], True)
    return [*averages(), *plain_parameters()]


def test_real_ranks_hold_the_same() -> None:
    first, other = run_on(2, on_ranks)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def refused() -> None:
    placement = flow.placement.all("cpu")
    g = values(4, 3).to_global(placement, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="same number of tensors, got 1 and 2"):
        torch._foreach_add_([g], [g, g])
    with pytest.raises(RuntimeError, match="same number of tensors, got 1 and 2"):
        torch._foreach_add_([torch.zeros(4, 3)], [g, g])
    with pytest.raises(RuntimeError, match="must match the size"):
        torch._foreach_add([torch.zeros(2, 3)], [g])
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        torch._foreach_add_([torch.zeros(3)], [g])
    leaf = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        torch._foreach_add_([leaf], [g])
    assert not leaf.any()


def test_refusals_are_those_of_one_device() -> None:
    simulate(2, refused)
    run_on(2, refused)


def factors_of_each() -> None:
    """One list has a partial leaf, which is written singly, and plain tensors."""
    where = flow.placement.all("cpu")
    for function in (torch._foreach_addcdiv_, torch._foreach_addcmul_):
        found = []
        for partial in (False, True):
            targets = [torch.arange(1.0, 7).view(2, 3) for _ in range(3)]
            others = [t + 1 for t in targets]
            if partial:
                targets[0] = laid_out(targets[0], where, [flow.sbp.partial_sum]).requires_grad_()
            with torch.no_grad():
                function(targets, others, others, [0.5, 2.0, -1.0])
            found.append([whole(t.detach()) for t in targets])
        for got, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, want)


def test_each_tensor_has_its_own_factor_where_one_stays_partial() -> None:
    run_on(2, factors_of_each)


def gradients() -> None:
    placement = flow.placement.all("cpu")
    weight = values(4, 3)
    for sbp in (B, S(0), P):
        a, b = values(4, 3, seed=1).requires_grad_(), values(4, 3, seed=2).requires_grad_()
        ours = b.detach().to_global(placement, B).to_global(sbp=sbp).detach().requires_grad_()  # type: ignore[attr-defined]
        also = a.detach().clone().requires_grad_()
        for x, y in ((a, b), (also, ours)):
            target = x * 2
            torch._foreach_mul_([target], [y])
            assert not target.is_global  # type: ignore[attr-defined]
            (target * weight).square().sum().backward()
        compare([also.grad, ours.grad], [a.grad, b.grad], f"gradients {sbp}")


def test_gradients_go_through() -> None:
    simulate(2, gradients)
    run_on(2, gradients)


#: Writes into tensors that share memory. Each must see what the ones before it have written.
IN_TURN: dict[str, Callable[[Any, Any], Any]] = {
    "one twice": lambda t, g: torch._foreach_add_([t, t], [g, g * 2]),
    "one twice by numbers": lambda t, g: torch._foreach_addcmul_([t, t], [g, g], [g, g], [2, 3]),
    "by a tensor of numbers": lambda t, g: torch._foreach_addcdiv_(
        [t, t], [g, g], [g + 9, g + 9], torch.tensor([2.0, 3.0])
    ),
    "views that overlap": lambda t, g: torch._foreach_mul_([t[:3], t[1:]], [g[:3], g[1:]]),
    "views without overlap": lambda t, g: torch._foreach_mul_([t[:2], t[2:]], [g[:2], g[2:]]),
    "columns": lambda t, g: torch._foreach_add_([t[:, :2], t[:, 1:]], [g[:, :2], g[:, 1:]]),
    "target, then operand": lambda t, g: torch._foreach_add_([t, t.new_ones(4, 3)], [g, t]),
    "operand, then target": lambda t, g: torch._foreach_sub_([t.new_ones(4, 3), t], [t, g]),
    "copied": lambda t, g: torch._foreach_copy_([t, t[:1]], [g, g[1:2]]),
}  # fmt: skip


def in_turn() -> None:
    placement = flow.placement.all("cpu")
    for name, write in IN_TURN.items():
        for sbp in (B, S(0), S(1), P):
            mine, want = values(4, 3, seed=1), values(4, 3, seed=1)
            g = values(4, 3).to_global(placement, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
            write(mine, g)
            write(want, values(4, 3))
            compare(mine, want, f"{name} {sbp}")


def test_targets_that_share_memory_are_written_in_turn() -> None:
    simulate(2, in_turn)
    run_on(2, in_turn)
