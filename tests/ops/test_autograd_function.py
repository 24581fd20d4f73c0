"""Tests of custom torch.autograd.Functions on global tensors. Values, gradients and second
gradients are the same as on plain tensors, for every layout of the inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import run_on
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import KernelError

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


class Affine(torch.autograd.Function):
    """A Function with several inputs and outputs, a number, and one output without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, power: int, shift: Tensor | None) -> Any:
        ctx.save_for_backward(x, scale, None)
        ctx.power = power
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        assert not any(ctx.needs_input_grad[2:])
        return x**power * scale, signs, x.sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, none = ctx.saved_tensors
        assert none is None
        return (
            grads[0] * scale * ctx.power * x ** (ctx.power - 1) + grads[2].unsqueeze(1),
            (grads[0] * x**ctx.power).sum(0) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


class Apart(torch.autograd.Function):
    """A Function with a forward without a context and an unused output."""

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
        return x.exp() * factor, x * 5

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert grads[1] is None
        return grads[0] * ctx.saved_tensors[0], None


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.sin()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.x.cos()


class Clipped(torch.autograd.Function):
    """The identity with a nonlinear backward: partial gradients must be summed before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].clamp(-0.5, 0.5)


class Buffered(torch.autograd.Function):
    """A Function that computes in buffers: a plain one, one of no elements, and one like x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        squares = torch.mul(x, x, out=torch.empty(x.shape, dtype=x.dtype))
        sums = torch.sum(x, 1, keepdim=True, out=torch.empty(0, dtype=x.dtype))
        return torch.mul(squares, sums, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        sums = x.sum(1, keepdim=True)
        return grads[0] * 2 * x * sums + (grads[0] * x * x).sum(1, keepdim=True)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 3


def affine(x: Tensor, w: Tensor) -> Tensor:
    a, signs, sums = Affine.apply(x, w, 3, None)
    return a * signs + sums.unsqueeze(1)


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    z = InPlace.apply(y)
    assert z is y
    return z * y


def through_kernels(x: Tensor, w: Tensor) -> Tensor:
    return Cube.apply(F.linear(x, x)) + Cube.apply(Cube.apply(w)).sum()


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cube": lambda x, w: Cube.apply(x) * w,
    "several": affine,
    "apart": lambda x, w: Apart.apply(x)[0] * w,
    "apart, a number": lambda x, w: Apart.apply(x, 3.0)[0] * w,
    "once": lambda x, w: Once.apply(x) * w,
    "clipped": lambda x, w: Clipped.apply(x * w) * x,
    "in buffers": lambda x, w: Buffered.apply(x) * w,
    "in place": in_place,
    "nested": through_kernels,
}
TWICE = [name for name in USES if name not in ("once", "in place")]


def run(use: Callable[[Tensor, Tensor], Tensor], twice: bool, plain_weight: bool) -> None:
    line = flow.placement("cpu", [0, 1])
    draw = torch.Generator().manual_seed(2)
    x0, w0 = (
        torch.randn(5, 4, dtype=torch.float64, generator=draw),
        torch.randn(4, dtype=torch.float64, generator=draw),
    )

    def gradients(x: Tensor, w: Tensor) -> list[Tensor]:
        found = list(torch.autograd.grad((use(x, w) ** 2).sum(), [x, w], create_graph=twice))
        if twice:
            found += torch.autograd.grad(sum((g**2).sum() for g in found), [x, w])  # type: ignore[arg-type]
        return found

    want = [use(x0, w0), *gradients(x0.clone().requires_grad_(), w0.clone().requires_grad_())]
    for sbp in (S(0), S(1), B, P):
        x = x0.to_global(line, B).to_global(sbp=sbp).detach().requires_grad_()  # type: ignore[attr-defined]
        w = w0.clone().requires_grad_() if plain_weight else w0.to_global(line, B).requires_grad_()  # type: ignore[attr-defined]
        got = [use(x.detach(), w.detach()), *gradients(x, w)]
        for g, value in zip(got, want, strict=True):
            whole = torch.tensor(g.tolist(), dtype=torch.float64)
            torch.testing.assert_close(whole, value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", USES)
def test_as_on_one_device(name: str) -> None:
    simulate(2, run, USES[name], False, False)


@pytest.mark.parametrize("name", TWICE)
def test_second_gradients(name: str) -> None:
    simulate(2, run, USES[name], True, False)


class Tripled(torch.autograd.Function):
    """A Function that writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 3


class Same(torch.autograd.Function):
    """A Function that returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class Wrong(Same):
    """A Function whose gradient has another shape than its input."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].sum(0)


def borders() -> None:
    """Compare views that are written into, results that are inputs, and gradients that do not
    fit."""
    start = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    for sbp in (B, S(0), S(1), P):
        found = []
        for x in (
            start.clone(),
            start.to_global(flow.placement.all("cpu"), B).to_global(sbp=sbp).detach(),  # type: ignore[attr-defined]
        ):
            x.requires_grad_()
            base = x * 2
            row: Any = Tripled.apply(base[1])
            ((row * row).sum() + (base * base).sum()).backward()
            plain = x.detach()
            alias: Any = Same.apply(plain)
            assert alias is not plain
            alias[0] += 1
            found.append([base.detach(), x.grad, plain])
            with pytest.raises(
                RuntimeError,
                match=r"WrongBackward returned an invalid gradient at index 0 - got \[3\] but",
            ):
                Wrong.apply(x).sum().backward()  # type: ignore[attr-defined]
        for got, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(gather_global_value(got), want)


def test_functions_at_the_borders() -> None:
    simulate(2, borders)


#: Each part has every third use. All uses also run on simulated ranks.
PARTS = 3


def on_processes(part: int) -> None:
    for name, use in list(USES.items())[part::PARTS]:
        run(use, name in TWICE, False)
    run(affine, False, True)
    borders()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_on_processes(part: int) -> None:
    run_on(2, on_processes, part)


def test_plain_tensors_beside_global_ones() -> None:
    simulate(2, run, affine, False, True)


class Weighted(torch.nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w)


def in_a_graph(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Check that two steps of a graph equal two steps of a loop: a Function saves tensors per
    step."""
    line = flow.placement("cpu", [0, 1])
    draw = torch.Generator().manual_seed(2)
    x0, w0 = (
        torch.randn(2, 5, 4, dtype=torch.float64, generator=draw),
        torch.randn(4, dtype=torch.float64, generator=draw),
    )
    plain = Weighted(w0.clone())
    wanted = []
    for x in x0:
        loss = (use(x, plain.w) ** 2).sum()
        wanted.append(loss.item())
        (grad,) = torch.autograd.grad(loss, [plain.w])
        plain.w.data -= 0.001 * grad
    for sbp in (S(0), S(1), B, P):
        model = Weighted(w0.clone()).to_global(line, B)  # type: ignore[operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

        class Training(flow.nn.Graph):
            def __init__(self, model: Any, optimizer: Any) -> None:
                super().__init__()
                self.model = model
                self.add_optimizer(optimizer)

            def build(self, x: Tensor) -> Tensor:
                loss = (use(x, self.model.w) ** 2).sum()
                loss.backward()
                return loss

        graph = Training(model, optimizer)
        got = [graph(x.to_global(line, B).to_global(sbp=sbp)).item() for x in x0]  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(
            torch.tensor(model.w.tolist(), dtype=torch.float64),
            plain.w.detach(),
            rtol=1e-10,
            atol=1e-11,
        )
        alone = graph.single_device_module()
        with torch.no_grad():
            alone.get_parameter("model.w").copy_(w0)
        torch.testing.assert_close(alone(x0[0])[0].item(), wanted[0], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", USES)
@pytest.mark.sweep(3)
def test_in_a_graph(name: str) -> None:
    simulate(2, in_a_graph, USES[name])


def wrong() -> None:
    class Two(Cube):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0], grads[0]

    x = torch.ones(3).to_global(flow.placement.all("cpu"), B).requires_grad_()  # type: ignore[attr-defined]
    with pytest.raises(
        RuntimeError,
        match=r"function Two returned an incorrect number of gradients \(expected 1, got 2\)",
    ):
        Two.apply(x).sum().backward()


def test_a_wrong_number_of_gradients() -> None:
    simulate(2, wrong)


def checkpointed(reentrant: bool) -> None:
    line = flow.placement.all("cpu")
    draw = torch.Generator().manual_seed(3)
    x0, w0 = (
        torch.randn(4, 3, dtype=torch.float64, generator=draw),
        torch.randn(3, 3, dtype=torch.float64, generator=draw),
    )

    def gradients(x: Tensor, *weights: Tensor) -> list[Any]:
        for w in weights:
            x = checkpoint(lambda x, w: (x @ w).tanh(), x, w, use_reentrant=reentrant)
        x.square().sum().backward()
        return [w.grad for w in weights]

    want = gradients(x0, *(w0.clone().requires_grad_() for _ in range(2)))
    for sbp in (S(0), B, S(1)):
        for held in (B, S(0)):
            weights = [
                w0.to_global(line, B).to_global(sbp=held).detach().requires_grad_()
                for _ in range(2)
            ]  # type: ignore[attr-defined]
            got = gradients(x0.to_global(line, B).to_global(sbp=sbp), *weights)  # type: ignore[attr-defined]
            for g, value in zip(got, want, strict=True):
                torch.testing.assert_close(
                    torch.tensor(g.tolist(), dtype=torch.float64), value, rtol=1e-12, atol=1e-12
                )


def checkpointed_layers() -> None:
    """Check checkpointed layers as models use them: the parameters are not among the arguments."""

    def gradients(model: torch.nn.Sequential, x: Tensor) -> list[Any]:
        x = x * 1  # a reentrant checkpoint needs an input with a gradient
        for layer in model:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=True)
        x.square().sum().backward()
        return [p.grad for p in model.parameters()]

    line, plain = (
        flow.placement.all("cpu"),
        torch.nn.Sequential(*[torch.nn.Linear(3, 3).double() for _ in range(3)]),
    )
    with torch.no_grad():
        for i, p in enumerate(plain.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape).roll(i))
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    want = gradients(plain, x)
    for plan in ("data", "fsdp"):
        model = flow.parallelize(copy.deepcopy(plain), line, plan)
        for p in model.parameters():
            p.grad = None
        for times in (1, 2):
            got = gradients(
                model, x.detach().to_global(line, B).to_global(sbp=S(0)).detach().requires_grad_()
            )  # type: ignore[arg-type,attr-defined]
            for g, value in zip(got, want, strict=True):
                torch.testing.assert_close(
                    torch.tensor(g.tolist(), dtype=torch.float64),
                    times * value,
                    rtol=1e-12,
                    atol=1e-12,
                )


def test_reentrant_checkpoint_of_layers() -> None:
    simulate(2, checkpointed_layers)


def checkpointed_plain_batch(plan: str, plain: torch.nn.Sequential) -> None:
    """Check reentrant checkpoints of global modules whose arguments are all plain."""

    def gradients(model: torch.nn.Sequential) -> list[Any]:
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
        target = torch.tensor([2, -100, -100, 1])
        for _ in range(2):
            y = checkpoint(model, x, use_reentrant=True)
            torch.nn.functional.cross_entropy(y, target).backward()
            checkpoint_sequential(model, 2, x, use_reentrant=True).square().mean().backward()
        assert not checkpoint(model, x.detach(), use_reentrant=True).requires_grad
        return [x.grad, *(p.grad for p in model.parameters())]

    model = flow.parallelize(copy.deepcopy(plain), flow.placement.all("cpu"), plan)
    for g, value in zip(gradients(model), gradients(copy.deepcopy(plain)), strict=True):
        torch.testing.assert_close(torch.tensor(g.tolist(), dtype=torch.float64), value)


@pytest.mark.parametrize("plan", ["data", "fsdp", "tensor"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoint_of_a_plain_batch(plan: str) -> None:
    # Made once: simulated ranks are threads, and share torch's random state.
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 3))
    simulate(2, checkpointed_plain_batch, plan, plain.double())


def closes_over_a_global_tensor() -> None:
    w = torch.ones(3).to_global(flow.placement.all("cpu"), B).requires_grad_()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    with pytest.raises(KernelError, match=r"by name.* Pass it to apply .* x\.to_global\(placement"):
        Scaled.apply(torch.ones(3, requires_grad=True))


def test_a_function_that_closes_over_a_global_tensor() -> None:
    simulate(2, closes_over_a_global_tensor)


def computed() -> None:
    """Check requires_grad_ on a computed tensor. Hooks on embeddings call it for reentrant
    checkpoints (`enable_input_require_grads` of Hugging Face models)."""
    x0 = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    for sbp in (S(0), B):
        x = x0.to_global(flow.placement.all("cpu"), B).to_global(sbp=sbp).detach().requires_grad_()  # type: ignore[attr-defined]
        y = x * 2
        assert y.requires_grad_() is y
        y.square().sum().backward()
        torch.testing.assert_close(torch.tensor(x.grad.tolist(), dtype=torch.float64), 8 * x0)
        with pytest.raises(
            RuntimeError, match="you can only change requires_grad flags of leaf variables"
        ):
            y.requires_grad_(False)
        with pytest.raises(
            RuntimeError, match="you can only change requires_grad flags of leaf variables"
        ):
            y.requires_grad = True


def test_what_is_computed_requires_grad_already() -> None:
    simulate(2, computed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    simulate(2, checkpointed, reentrant)
