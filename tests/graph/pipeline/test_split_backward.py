"""Tests of delayed weight gradients: their numbers, the time at which they arrive, and the tensors
saved in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bodies import values
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from globaltensor._base.torch_private import memory_users
from globaltensor.graph.pipeline import split_backward
from globaltensor.graph.pipeline.split_backward import DeferredWeightGrads
from globaltensor.graph.pipeline.stage import Stage

Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]], dict[str, Any]]

CASES: dict[str, Case] = {
    "linear": (F.linear, split_backward.linear, [(5, 3), (4, 3), (4,)], {}),
    "linear without bias": (F.linear, split_backward.linear, [(2, 5, 3), (4, 3)], {}),
    "linear of a vector": (F.linear, split_backward.linear, [(3,), (4, 3), (4,)], {}),
    "linear of no features": (F.linear, split_backward.linear, [(2, 5, 0), (4, 0), (4,)], {}),
    "linear of nothing": (F.linear, split_backward.linear, [(0, 3), (4, 3), (4,)], {}),
    "matmul": (torch.matmul, split_backward.matmul, [(2, 3, 5), (5, 4)], {}),
    "matmul of a vector": (torch.matmul, split_backward.matmul, [(5,), (5, 4)], {}),
    "lighter linear": (F.linear, split_backward.lighter_linear, [(2, 5, 3), (4, 3), (4,)], {}),
    "lighter linear without bias": (F.linear, split_backward.lighter_linear, [(5, 3), (4, 3)], {}),
    "lighter linear of a vector": (
        F.linear,
        split_backward.lighter_linear,
        [(3,), (4, 3), (4,)],
        {},
    ),
    "lighter linear of no features": (
        F.linear,
        split_backward.lighter_linear,
        [(2, 5, 0), (4, 0), (4,)],
        {},
    ),
    "lighter linear of columns": (
        lambda x, w, b: F.linear(x.mT, w, b),
        lambda *a: split_backward.lighter_linear(a[0].mT, *a[1:]),
        [(2, 3, 5), (4, 3), (4,)],
        {},
    ),
    "lighter linear of nothing": (
        F.linear,
        split_backward.lighter_linear,
        [(0, 3), (4, 3), (4,)],
        {},
    ),
    "lighter matmul": (torch.matmul, split_backward.lighter_matmul, [(2, 3, 5), (5, 4)], {}),
    "conv1d": (
        F.conv1d,
        split_backward.conv1d,
        [(2, 4, 9), (6, 2, 3), (6,)],
        {"groups": 2, "padding": 1},
    ),
    "conv2d": (
        F.conv2d,
        split_backward.conv2d,
        [(2, 3, 8, 7), (5, 3, 3, 2), (5,)],
        {"stride": (2, 1), "dilation": 2, "padding": (1, 0)},
    ),
    "conv2d without bias": (F.conv2d, split_backward.conv2d, [(2, 3, 8, 7), (5, 3, 3, 3)], {}),
    "conv3d": (F.conv3d, split_backward.conv3d, [(1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (3,)], {}),
}


def operands(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [values(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def whole(
    plain: Callable[..., Tensor], shapes: list[tuple[int, ...]], more: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    given = operands(shapes)
    out = plain(*given, **more)
    out.backward(values(*out.shape, seed=9))
    return out.detach(), [t.grad for t in given]  # type: ignore[misc]


def same(got: list[Any], want: list[Any]) -> None:
    for g, w in zip(got, want, strict=True):
        if w is None:
            assert g is None
            continue
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_weights_wait(name: str) -> None:
    plain, ours, shapes, more = CASES[name]
    want, grads = whole(plain, shapes, more)
    given, later = operands(shapes), DeferredWeightGrads()
    with later.recording():
        out = ours(*given, **more)
    with later.holding():
        out.backward(values(*out.shape, seed=9))
    same([out.detach(), given[0].grad], [want, grads[0]])
    assert all(t.grad is None for t in given[1:])
    assert later.waiting == 1
    later.run()
    same([t.grad for t in given], grads)
    assert later.waiting == 0
    later.run()  # a second run adds nothing
    same([t.grad for t in given], grads)


@pytest.mark.parametrize("name", CASES)
def test_without_holding_all_comes_at_once(name: str) -> None:
    plain, ours, shapes, more = CASES[name]
    _, grads = whole(plain, shapes, more)
    given, later = operands(shapes), DeferredWeightGrads()
    with later.recording():
        out = ours(*given, **more)
    out.backward(values(*out.shape, seed=9))
    if "lighter" in name:
        later.run()
    assert later.waiting == 0
    same([t.grad for t in given], grads)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES
        if not any(word in name for word in ("nothing", "no features", "conv3d", "lighter"))
    ],
)
@pytest.mark.sweep(2)
def test_second_derivatives(name: str) -> None:
    _, ours, shapes, more = CASES[name]

    def run(*given: Tensor) -> Tensor:
        with DeferredWeightGrads().recording():
            return ours(*given, **more)

    # Copies of leaves are not leaves. This test passes the leaves themselves, as weights are.
    assert torch.autograd.gradgradcheck(run, operands(shapes))


def test_outside_a_stage_they_are_torchs_own() -> None:
    for plain, ours, shapes, more in CASES.values():
        given = operands(shapes)
        assert type(ours(*given, **more).grad_fn) is type(plain(*given, **more).grad_fn)


def test_what_cannot_wait_comes_at_once() -> None:
    """Gradients that cannot wait arrive at once: of weights that are not leaves, and of operands
    whose weight needs no gradient."""
    x, w, b = operands([(5, 3), (4, 3), (4,)])
    later = DeferredWeightGrads()
    with later.recording():
        out = split_backward.linear(x, w * 2, b) + split_backward.linear(x, w.detach(), b * 3)
    with later.holding():
        out.sum().backward()
    assert later.waiting == 0
    same(
        [w.grad, b.grad],
        [2 * x.detach().sum(0).expand(4, 3), torch.full((4,), 20.0, dtype=torch.float64)],
    )
    x, w, b = operands([(5, 3), (4, 3), (4,)])
    with later.recording():
        out = split_backward.linear(x, w, b * 3)  # the weight can wait, the bias cannot
    with later.holding():
        out.sum().backward()
    same([b.grad], [torch.full((4,), 15.0, dtype=torch.float64)])
    assert w.grad is None
    later.run()
    same(
        [w.grad, b.grad],
        [x.detach().sum(0).expand(4, 3), torch.full((4,), 15.0, dtype=torch.float64)],
    )


def test_an_input_that_was_written_to_is_told() -> None:
    x, w = operands([(5, 3), (4, 3)])
    later = DeferredWeightGrads()
    with later.recording():
        h = x * 2
        out = split_backward.lighter_linear(h, w)
    h.add_(1)
    out.sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"the input \[5, 3\] of a linear layer is at version 1, expected version 0",
    ):
        later.run()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("lighter", [False, True])
def test_weights_that_are_no_real_matrices_come_at_once(lighter: bool, dtype: torch.dtype) -> None:
    shapes = [(2, 3, 5), (2, 5, 4)] if dtype is torch.float64 else [(3, 5), (5, 4)]
    given, theirs = (
        [t.detach().to(dtype).requires_grad_() for t in operands(shapes)] for _ in range(2)
    )
    later = DeferredWeightGrads()
    with later.recording():
        out = (split_backward.lighter_matmul if lighter else split_backward.matmul)(*given)
    with later.holding():
        (out * 1j if dtype.is_complex else out).abs().sum().backward()
    assert later.waiting == 0
    want = torch.matmul(*theirs)
    (want * 1j if dtype.is_complex else want).abs().sum().backward()
    same([t.grad for t in given], [t.grad for t in theirs])


def test_results_that_nobody_differentiates() -> None:
    """Results without a backward pass are allowed. Of two products only one reaches the loss. With
    gradients off, no gradient is delayed."""
    x, w, v = operands([(5, 3), (4, 3), (4, 3)])
    later = DeferredWeightGrads()
    with later.recording():
        out = split_backward.lighter_linear(x, w)
        split_backward.lighter_linear(x, v)
        with torch.no_grad():
            same([split_backward.lighter_linear(x, v)], [F.linear(x, v)])
    assert later.waiting == 2
    with later.holding():
        out.sum().backward()
    later.run()
    same([w.grad, v.grad], [x.detach().sum(0).expand(4, 3), None])


@pytest.mark.parametrize("linear", [split_backward.linear, split_backward.lighter_linear])
def test_a_whole_backward_of_a_stage_that_could_split_it(linear: Callable[..., Tensor]) -> None:
    """A stage that could split its backward can also run it as one. A user's schedule may have both
    forms."""
    x, w, b = operands([(5, 3), (4, 3), (4,)])
    stage = Stage(lambda x: (linear(x, w, b),), [0])
    stage.forward(0, [x.detach()], split=True)
    (of_x,) = stage.backward(0, {0: torch.ones(5, 4, dtype=torch.float64)}).values()
    want = [
        w.detach().sum(0).expand(5, 3),
        x.detach().sum(0).expand(4, 3),
        torch.full((4,), 5.0, dtype=torch.float64),
    ]
    same([of_x, w.grad, b.grad], want)
    assert stage.micros == ()


@pytest.mark.parametrize("name", CASES)
def test_results_that_are_written_to(name: str) -> None:
    """A result may be written in place, as activations do. A product of more than two dims is a
    view, and an in-place write replaces its autograd node by another."""
    plain, ours, shapes, more = CASES[name]
    given, theirs, later = operands(shapes), operands(shapes), DeferredWeightGrads()
    with later.recording():
        out = ours(given[0] * 2, *given[1:], **more)
        out.mul_(3).tanh_()
    with later.holding():
        out.sum().backward()
    assert all(t.grad is None for t in given[1:])
    later.run()
    plain(theirs[0] * 2, *theirs[1:], **more).mul(3).tanh().sum().backward()
    same([t.grad for t in given], [t.grad for t in theirs])


def test_frozen_weights() -> None:
    x, w, b = operands([(5, 3), (4, 3), (4,)])
    later = DeferredWeightGrads()
    with later.recording():
        out = split_backward.linear(x, w.requires_grad_(False), b)
        half = split_backward.linear(x, w.clone().requires_grad_(), b.detach())
    with later.holding():
        out.sum().backward()
        assert later.waiting == 0
        half.sum().backward()
    assert later.waiting == 1
    later.run()
    same([b.grad], [torch.full((4,), 5.0, dtype=torch.float64)])


class Within(torch.autograd.Function):
    """A function that recomputes its result in backward, and calls torch.autograd.grad itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return split_backward.linear(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(split_backward.linear(x, w), [x, w], grads)


def test_a_backward_within_a_backward_gets_what_it_asks_for() -> None:
    x, w = operands([(5, 3), (4, 3)])
    stage = Stage(lambda x: (Within.apply(x, w),), [0])
    stage.forward(0, [x], split=True)
    (of_x,) = stage.backward_input(0, {0: torch.ones(5, 4, dtype=torch.float64)}).values()
    same([of_x, w.grad], [w.detach().sum(0).expand(5, 3), x.detach().sum(0).expand(4, 3)])


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_add_up_and_hooks_run(hooked: bool) -> None:
    w, steps = values(4, 3, seed=1).requires_grad_(), []

    def hook(grad: Tensor) -> Tensor:
        steps.append("hook")
        return grad * 10

    if hooked:
        w.register_hook(hook)
    w.register_post_accumulate_grad_hook(
        lambda t: steps.append("added") if t.grad is not None else None
    )
    laters, want = (
        [DeferredWeightGrads(), DeferredWeightGrads()],
        torch.zeros(4, 3, dtype=torch.float64),
    )
    for i, later in enumerate(laters):
        x = values(5, 3, seed=2 + i)
        want += (10 if hooked else 1) * x.sum(0)
        with later.recording():
            out = split_backward.linear(x, w).sum()
        with later.holding():
            out.backward()
    assert steps == ["hook", "added"] * (2 if hooked else 0), (
        "a gradient that somebody watches does not wait"
    )
    for later in laters:
        later.run()
    assert steps == (["hook", "added"] if hooked else ["added"]) * 2
    same([w.grad], [want])


def test_autocast() -> None:
    def run(linear: Callable[..., Tensor], later: DeferredWeightGrads | None) -> list[Any]:
        x, w, b = (t.detach().float().requires_grad_() for t in operands([(5, 3), (4, 3), (4,)]))
        with torch.autocast("cpu", torch.bfloat16), (later or DeferredWeightGrads()).recording():
            out = linear(x, w, b)
        if later is None:
            out.sum().backward()
        else:
            with later.holding():
                out.sum().backward()
            assert later.waiting == 1
            later.run()
        return [out.detach(), x.grad, w.grad, b.grad]

    want = run(F.linear, None)
    assert want[0].dtype is torch.bfloat16
    for got, w in zip(run(split_backward.linear, DeferredWeightGrads()), want, strict=True):
        torch.testing.assert_close(got, w, rtol=2e-2, atol=2e-2)
        assert got.dtype is w.dtype


class Box:
    def __init__(self, t: Tensor) -> None:
        self.t = t


def test_between_i_and_w_only_inputs_and_gradients_of_results_are_kept() -> None:
    w, v = values(4, 6, seed=1).requires_grad_(), values(6, 2, seed=2).requires_grad_()
    boxes: list[weakref.ref[Box]] = []

    def pack(t: Tensor) -> Box:
        box = Box(t)
        boxes.append(weakref.ref(box))
        return box

    def function(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.t):
            h = split_backward.matmul(x, w)
            return (
                split_backward.matmul(h.sin().exp(), v),
            )  # only autograd saves the sine and its input

    stage = Stage(function, [0])
    stage.forward(0, [values(3, 4)], split=True)
    assert sum(ref() is not None for ref in boxes) == len(boxes) > 4
    stage.backward_input(0, {0: values(3, 2, seed=5)})
    assert [ref() for ref in boxes if ref() is not None] == []
    kept = [t for work in stage._later[0]._work for t in work.args]  # type: ignore[attr-defined]
    shapes = sorted(
        tuple(t.shape) for t in kept if isinstance(t, Tensor) and t is not w and t is not v
    )
    assert shapes == [(3, 2), (3, 4), (3, 6), (3, 6)]
    stage.backward_weight(0)
    assert stage.micros == ()


def test_outputs_are_not_kept() -> None:
    w = values(4, seed=1).requires_grad_()
    stage = Stage(lambda x: (x * w + 1,))
    (out,) = stage.forward(0, [values(3, 4)])
    assert memory_users(out) == 1, "the stage holds an output that its backward does not need"
    stage.backward(0, {0: torch.ones_like(out)})
    same([w.grad], [values(3, 4).sum(0)])


@pytest.mark.parametrize(
    "context", [{}, {"context_fn": split_backward.checkpointing}], ids=["plain", "context_fn"]
)
def test_checkpoints(context: dict[str, Any]) -> None:
    w = values(4, 4, seed=1).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (
            checkpoint(
                lambda x: split_backward.linear(split_backward.linear(x, w).tanh(), w),
                x,
                use_reentrant=False,
                **context,
            ),
        )

    x = values(3, 4).requires_grad_()
    (F.linear(F.linear(x, w).tanh(), w)).sum().backward()
    want, w.grad = w.grad, None
    stage = Stage(function, [0])
    stage.forward(0, [x], split=True)
    grads = stage.backward_input(0, {0: torch.ones(3, 4, dtype=torch.float64)})
    assert w.grad is None
    stage.backward_weight(0)
    same([grads[0], w.grad], [x.grad, want])


def test_the_table_of_replacements() -> None:
    a, b = values(2, 3), values(3, 4, seed=1)
    for plain, ours in split_backward.DEFERRED.items():
        if ours is split_backward.matmul:
            same([ours(a, b)], [plain(a, b)])
