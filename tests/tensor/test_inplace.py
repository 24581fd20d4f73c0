"""Tests of in-place ops by the argument ``inplace=True``: the tensor itself changes, on every
placement and sbp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.bodies import values
from torch import Tensor

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import InplaceError

LINE = flow.placement("cpu", [0, 1])
B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split


def on(x: Tensor, sbp: Any) -> Any:
    return x.to_global(LINE, B).to_global(sbp=sbp)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "hardtanh": lambda x: torch.nn.Hardtanh(-0.5, 0.5, inplace=True)(x),
    "rrelu": lambda x: F.rrelu(x, inplace=True),
    "dropout": lambda x: F.dropout(x, 0.0, inplace=True),
}


class Graph(flow.nn.Graph):
    def __init__(self, step: Callable[[Any], Any]) -> None:
        super().__init__()
        self.step = step

    def build(self, x: Any) -> Any:
        return self.step(x)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("sbp", [B, S(0), S(1), P])
@pytest.mark.sweep(3)
def test_the_tensor_itself_changes(name: str, sbp: Any) -> None:
    def step(x: Any) -> Any:
        y = x * 1
        z = FUNCTIONS[name](y)
        assert z is y
        return y + 1, y

    def on_ranks() -> None:
        for run in (step, Graph(step)):
            for got, want in zip(run(on(values(5, 4), sbp)), step(values(5, 4)), strict=True):
                torch.testing.assert_close(torch.from_numpy(got.numpy()), want)

    simulate(2, on_ranks)


def test_what_the_user_has_laid_out_does_not_move() -> None:
    def on_ranks() -> None:
        with pytest.raises(InplaceError, match="in-place relu"):
            F.relu(on(values(4, 4), P), inplace=True)

    simulate(2, on_ranks)


VIEWED: dict[str, Callable[[Tensor], Any]] = {
    "diagonal": lambda x: torch.diagonal(x).add_(-1).pow_(2),  # Barlow Twins' loss
    "row": lambda x: x[1].mul_(2).tanh_(),
    "transposed": lambda x: x.t().clamp_(0, 1),
    "flat": lambda x: x.view(-1).abs_().sqrt_(),
    "scanned": lambda x: x.narrow(0, 0, 2).cumsum_(0),
    "base": lambda x: (x.view(-1), x.exp_()),
}


@pytest.mark.parametrize("name", VIEWED)
@pytest.mark.parametrize("layout", [[P], [S(1)], [P, S(0)], [S(1), P], [P, P]], ids=str)
@pytest.mark.sweep(4)
def test_views_of_partial_sums_and_their_bases_change_together(
    name: str, layout: list[Any]
) -> None:
    """No view would follow if its base, or another view of the base, got another layout."""

    def step(x: Any) -> Any:
        y = x * 1
        VIEWED[name](y)
        return y

    def on_ranks() -> None:
        placement = flow.placement("cpu", [0, 1] if len(layout) == 1 else [[0, 1], [2, 3]])
        x = values(5, 5).abs().add_(0.1).requires_grad_()
        mine = (
            x.detach()
            .to_global(placement, [B] * len(layout))
            .to_global(sbp=layout)
            .detach()
            .requires_grad_()
        )  # type: ignore[attr-defined]
        got, want = step(mine), step(x)
        for leaf, y in ((mine, got), (x, want)):
            y.sin().sum().backward()
            assert leaf.grad is not None
        torch.testing.assert_close(torch.from_numpy(got.detach().numpy()), want.detach())
        torch.testing.assert_close(torch.from_numpy(mine.grad.numpy()), x.grad)
        torch.testing.assert_close(
            torch.from_numpy(Graph(step)(mine).detach().numpy()), want.detach()
        )

    simulate(2 if len(layout) == 1 else 4, on_ranks)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7), (9, 2), (1, 1), (3, 3, 3)], ids=str)
@pytest.mark.parametrize("wrap", [False, True])
def test_diagonals_are_filled_where_they_lie(shape: tuple[int, ...], wrap: bool) -> None:
    def step(x: Any) -> Any:
        return (x * 1).fill_diagonal_(3.0, wrap)

    def on_ranks() -> None:
        for sbp in (B, S(0), S(1), P):
            x = values(*shape).requires_grad_()
            mine = on(x.detach(), sbp).detach().requires_grad_()
            with flow.no_boxing():
                got = step(mine)
            want = step(x)
            for y in (got, want):
                y.sin().sum().backward()
            torch.testing.assert_close(torch.from_numpy(got.detach().numpy()), want.detach())
            torch.testing.assert_close(torch.from_numpy(mine.grad.numpy()), x.grad)

    simulate(2, on_ranks)


@pytest.mark.filterwarnings("ignore:the rule of put")
@pytest.mark.parametrize("sbp", [B, S(0), P])
def test_on_whole_tensors_with_gradients(sbp: Any) -> None:
    index = torch.tensor([7, 7])

    def on_ranks() -> None:
        x, v = values(5, 4).requires_grad_(), values(2).requires_grad_()
        mine, u = (
            on(x.detach(), sbp).detach().requires_grad_(),
            on(v.detach(), B).detach().requires_grad_(),
        )
        for leaf, value in ((x, v), (mine, u)):
            y = leaf * 1
            y.put_(index if leaf is x else on(index, B), value, accumulate=True)
            y.square().sum().backward()
        for got, want in ((mine.grad, x.grad), (u.grad, v.grad)):
            torch.testing.assert_close(torch.from_numpy(got.numpy()), want)

    simulate(2, on_ranks)


def _of_itself(y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        z = y.detach()
        y.clamp_(0)
    return y, z


#: Writes into a tensor or into a detached one. Each function returns both tensors.
SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "detached": lambda y: (y, y.detach().clamp_(0)),
    "data": lambda y: (y, y.data.add_(1)),
    "detached twice": lambda y: (y, y.detach().detach().masked_fill_(torch.arange(4) > 1, 2.0)),
    "recorded": lambda y: (y.detach(), y.clamp_(0))[::-1],
    "not recorded": _of_itself,
}


@pytest.mark.parametrize("write", SHARED)
def test_what_is_detached_from_a_partial_shows_the_same(write: str) -> None:
    """Clamping needs the full sum, so the result is boxed back to partial_sum."""

    def step(x: Any, w: Any) -> Any:
        x = x.detach().requires_grad_()
        y = x @ w
        y, z = SHARED[write](y)
        y.square().sum().backward()
        return y.detach(), z, x.grad, z.sum()

    def on_ranks() -> None:
        for got, want in zip(
            step(on(values(5, 3), S(1)), on(values(3, 4), S(0))),
            step(values(5, 3), values(3, 4)),
            strict=True,
        ):
            torch.testing.assert_close(torch.from_numpy(got.numpy()), want)

    simulate(2, on_ranks)


def test_several_at_once_do_not_part_from_what_shows_the_same() -> None:
    def on_ranks() -> None:
        y = on(values(5, 3), S(1)) @ on(values(3, 4), S(0))
        z = y * 1
        torch._foreach_clamp_min_([y.detach()], 0.0)
        torch.testing.assert_close(
            torch.from_numpy(y.numpy()), (values(5, 3) @ values(3, 4)).clamp(0)
        )
        torch._foreach_clamp_min_([z], 0.0)
        torch.testing.assert_close(
            torch.from_numpy(z.numpy()), (values(5, 3) @ values(3, 4)).clamp(0)
        )

    simulate(2, on_ranks)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda x: x.fill_(-2),
    "fill_ of a tensor": lambda x: x.fill_(x.new_tensor(-2)),
    "copy_": lambda x: x.copy_(x.new_tensor([-1, 2, -3, 0])),
    "out": lambda x: torch.neg(x * 1, out=x),
    "uniform_": lambda x: x.uniform_(-3.0, -3.0),
    "like": lambda x: torch.full_like(x, -2),
    "like, of another type": lambda x: torch.zeros_like(x, dtype=torch.bool).index_fill(
        0, torch.tensor([1]), True
    ),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_any_values_go_where_norms_of_parts_were(write: str, p: float) -> None:
    def step(x: Any) -> Any:
        norms = torch.linalg.vector_norm(x, p, 0)
        return WRITES[write](norms), norms

    def on_ranks() -> None:
        for sbp in (S(0), S(1)):
            for got, want in zip(step(on(values(5, 4), sbp)), step(values(5, 4)), strict=True):
                torch.testing.assert_close(torch.from_numpy(got.numpy()), want)

    simulate(2, on_ranks)


LISTS: dict[str, Callable[[list[Any], list[Any]], Any]] = {
    "add a number": lambda x, y: torch._foreach_add_(x, 1.0),
    "add numbers": lambda x, y: torch._foreach_add_(x, [1.0, 2.0]),
    "add": lambda x, y: torch._foreach_add_(x, y, alpha=0.5),
    "mul": lambda x, y: torch._foreach_mul_(x, y),
    "lerp": lambda x, y: torch._foreach_lerp_(x, y, 0.3),
    "addcmul": lambda x, y: torch._foreach_addcmul_(x, y, y, value=0.5),
    "copy": lambda x, y: torch._foreach_copy_(x, y),
    "neg": lambda x, y: torch._foreach_neg_(x),
    "zero": lambda x, y: torch._foreach_zero_(x),
}
#: In-place ops that are not linear.
CURVED: dict[str, Callable[[list[Any], list[Any]], Any]] = {
    "abs": lambda x, y: torch._foreach_abs_(x),
    "maximum": lambda x, y: torch._foreach_maximum_(x, y),
}


@pytest.mark.parametrize("kind", ["detached", "view", "pinned"])
@pytest.mark.parametrize("write", [*LISTS, *CURVED])
def test_lists_of_partials_that_others_show_are_written_into(write: str, kind: str) -> None:
    seen: Callable[[Any], Any] = {
        "detached": lambda x: x.detach(),
        "view": lambda x: x[1:],
        "pinned": lambda x: x,
    }[kind]
    do = {**LISTS, **CURVED}[write]

    def step(x: Any, other: Any, y: Any) -> list[Any]:
        target = seen(x)
        do([target, other], [y[: target.shape[0]], y])
        return [x, other]

    def on_ranks() -> None:
        part = on(values(5, 4), P) if kind == "pinned" else on(values(5, 4), P) * 1
        if kind == "pinned" and write == "abs":
            with pytest.raises(InplaceError, match=r"abs_.*\n.*\n.*to_global"):
                step(part, on(values(5, 4), S(1)), on(values(5, 4) * 2, S(0)))
            return
        for got, want in zip(
            step(part, on(values(5, 4), S(1)), on(values(5, 4) * 2, S(0))),
            step(values(5, 4), values(5, 4), values(5, 4) * 2),
            strict=True,
        ):
            torch.testing.assert_close(torch.from_numpy(got.numpy()), want)

    simulate(2, on_ranks)


#: Results that are the maxima, minima or norms of the ranks' local values.
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "norm": lambda x: x.norm(dim=1),
}
#: Tensors that share the memory of such a result.
SHARING: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda y: y.view(-1, 1),
    "indexed": lambda y: y[:, None],
    "part": lambda y: y[1:4],
    "detached": lambda y: y.detach(),
    "data": lambda y: y.data,
}
#: Writes whose results are not negative where the target is a norm.
NONNEGATIVE: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda z: z.add_(1e-3),
    "scale": lambda z: z.mul_(2),
    "clamp": lambda z: z.clamp_(min=0.5),
    "reciprocal": lambda z: z.abs_().reciprocal_(),
    "fill": lambda z: z.fill_(3.0),
    "zero": lambda z: z.zero_(),
    "set": lambda z: z.__setitem__(0, 7.0),
    "several": lambda z: torch._foreach_add_([z], 1.0),
}


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("reduced", REDUCED)
def test_what_shares_a_maximum_or_a_norm_is_written_into(reduced: str, sharing: str) -> None:
    def step(x: Any, write: Callable[[Tensor], Any]) -> list[Any]:
        y = REDUCED[reduced](x)
        z = SHARING[sharing](y)
        write(z)
        return [y, z]

    def on_ranks() -> None:
        for write in NONNEGATIVE.values():
            for got, want in zip(
                step(on(values(5, 4), S(1)), write), step(values(5, 4), write), strict=True
            ):
                torch.testing.assert_close(torch.from_numpy(got.numpy()), want)

    simulate(2, on_ranks)


@pytest.mark.parametrize("sharing", SHARING)
def test_a_norm_that_is_shared_cannot_become_negative(sharing: str) -> None:
    """Each rank holds the norm of its local values. A norm that is not shared is boxed first."""

    def on_ranks() -> None:
        norm = on(values(5, 4), S(1)).norm(dim=1)
        with pytest.raises(InplaceError, match=r"neg_.*\n.*P\(norm2.0\)\n.*to_global"):
            SHARING[sharing](norm).neg_()
        want = values(5, 4).norm(dim=1)
        torch.testing.assert_close(torch.from_numpy(norm.numpy()), want)
        alone = on(values(5, 4), S(1)).norm(dim=1).neg_()
        torch.testing.assert_close(torch.from_numpy(alone.numpy()), -want)

    simulate(2, on_ranks)


def _set_first_row(x: Tensor) -> Tensor:
    x[0] = 2.0
    return x.relu_()


#: Writes into a tensor that is made like an op's result.
MADE_LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "one hot": lambda y: torch.zeros_like(y).scatter_(
        1, torch.tensor([[1], [0], [3], [2], [1]]), 1
    ),
    "masked_fill_": lambda y: torch.full_like(y, 3.0).masked_fill_(torch.arange(4) > 1, 2.0),
    "index_fill_": lambda y: torch.ones_like(y).index_fill_(0, torch.tensor([1, 4]), 0.5),
    "exp_": lambda y: torch.ones_like(y).exp_(),
    "copy_, clamp_": lambda y: torch.empty_like(y).copy_(y).clamp_(0),
    "item": lambda y: _set_first_row(torch.full_like(y, -1.0)),
    "foreach": lambda y: (z := torch.full_like(y, -1.0), torch._foreach_abs_([z]))[0],
    "like that again": lambda y: torch.ones_like(torch.zeros_like(y)).exp_(),
}


@pytest.mark.parametrize("write", MADE_LIKE)
def test_what_is_made_like_a_partial_result_may_be_written_into(write: str) -> None:
    """One-hot targets of a loss are `torch.zeros_like(logits).scatter_(1, labels, 1)`."""

    def step(x: Any, w: Any) -> Any:
        y = x @ w
        return MADE_LIKE[write](y), y * 1

    def on_ranks() -> None:
        x, w = on(values(5, 3), S(1)), on(values(3, 4), S(0))
        assert (x @ w).sbp == (P,)
        for run in (step, flow.nn.Graph.trace(step)):
            for got, want in zip(run(x, w), step(values(5, 3), values(3, 4)), strict=True):
                torch.testing.assert_close(torch.from_numpy(got.numpy()), want)
        with pytest.raises(InplaceError):  # the layout that the user chose
            torch.zeros_like(on(values(5, 4), P)).exp_()
        with pytest.raises(InplaceError):
            flow.zeros_like(x @ w, sbp=P).exp_()

    simulate(2, on_ranks)


SAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda t: F.relu(t, inplace=True),
    "leaky_relu": lambda t: F.leaky_relu(t, inplace=True),
    "sigmoid": torch.sigmoid_,
    "exp": torch.exp_,
    "sqrt": torch.sqrt_,
}


def saved_results_of_slices() -> list[list[list[float]]]:
    found = []
    for write in SAVING.values():
        for where in (flow.placement.all("cpu"), flow.placement("cpu", [1])):
            x: Any = values(6, 4).abs().to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
            x = x.to_global(where, S(0)).detach().requires_grad_()
            y = x * 1.0
            write(y[1:4])
            y.sum().backward()
            found.append(x.grad.to_global(flow.placement.all("cpu"), B).tolist())
    return found


def test_functions_that_save_what_they_write_run_on_slices() -> None:
    want = []
    for write in SAVING.values():
        x = values(6, 4).abs().requires_grad_()
        y = x * 1.0
        write(y[1:4])
        y.sum().backward()
        assert x.grad is not None
        want += [x.grad.tolist()] * 2
    for found in simulate(2, saved_results_of_slices):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(want))
