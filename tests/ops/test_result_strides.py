"""Tests of the memory order of results: a copy that one device makes of a result is a copy here.

`contiguous`, `flatten` and `reshape` copy or not by the strides of their operand. A write into
their result shows which of the two they did.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import run_on

import globaltensor as flow
from globaltensor._ops import result_strides
from globaltensor.distributed.simulate import simulate

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum

#: Views that change the memory order of a tensor, or not.
OPERANDS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "t": lambda x: x.transpose(-1, -2),
    "outer t": lambda x: x.transpose(0, -1),
    "columns of t": lambda x: x.transpose(0, -1)[..., :2],
}
RESULTS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "exp": lambda x: x.exp(),
    "add itself": lambda x: x + x,
    "add a plain row": lambda x: x + torch.ones(x.shape[-1]),
    "where": lambda x: torch.where(x > 3, x, -x),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0).values,
    "flip": lambda x: x.flip(0),
    "cat": lambda x: torch.cat([x, x], 0),
    "index": lambda x: x[:, [0, 1]],
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "zeros_like": lambda x: torch.zeros_like(x),
    "in place": lambda x: x.mul_(2),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda y: y.flatten(),
    "contiguous": lambda y: y.contiguous(),
    "reshape": lambda y: y.reshape(y.shape[0] * y.shape[1], -1),
}


#: Each part has every seventh case. One case in 18 is of two shapes, each with another part.
PARTS = 7


def after_a_write(
    lay: Callable[[torch.Tensor], Any], shape: tuple[int, ...], part: int
) -> dict[str, Any]:
    """Return what each result holds after a write into a copy, or view, of it."""
    found: dict[str, Any] = {}
    cases = itertools.product(OPERANDS.items(), RESULTS.items(), COPIES.items())
    for (operand, view), (result, op), (copy, made) in itertools.islice(cases, part, None, PARTS):
        x = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)
        y = op(view(lay(x)))
        made(y).add_(100)
        whole = y.to_global(sbp=B).to_local() if isinstance(y, flow.Tensor) and y.is_global else y
        found[f"{operand}: {result}: {copy}"] = [round(v, 6) for v in whole.flatten().tolist()]
    return found


def on_ranks(shape: tuple[int, ...], part: int, sbps: list[Any]) -> list[dict[str, Any]]:
    where = flow.placement.all("cpu")
    lays = [lambda x, sbp=sbp: x.to_global(where, B).to_global(sbp=sbp) for sbp in sbps]  # type: ignore[attr-defined]
    return [after_a_write(lay, shape, part) for lay in lays]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("shape", [(4, 3), (2, 2), (5, 4), (4, 2, 3), (2, 4, 2)], ids=str)
@pytest.mark.sweep(36)
def test_a_copy_of_a_result_is_a_copy_where_one_device_copies(
    shape: tuple[int, ...], part: int
) -> None:
    want = after_a_write(lambda x: x.clone(), shape, part)
    sbps = [*[S(d) for d in range(len(shape))], P, B]
    first, second = run_on(2, on_ranks, shape, part, sbps, timeout=120)
    for sbp, got, other in zip(sbps, first, second, strict=True):
        assert got == other
        assert {k: (sbp, v) for k, v in got.items() if v != want[k]} == {}


def training(make: Callable[[Any], Any]) -> list[Any]:
    """Return a loss and a gradient through results that are arranged anew."""
    x = make(torch.arange(12.0, dtype=torch.float64).view(4, 3)).requires_grad_()
    y = (x.t() * 3).softmax(-1).contiguous()
    z = (x.t() + 1).flatten() * y.flatten()
    loss = (z * z).sum() + (x.t() @ x).mul(1e-2).tanh().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((grad * grad).sum(), x)
    return [round(v, 8) for t in (loss, grad, second) for v in t.detach().flatten().tolist()]


def gradients_on_ranks() -> list[Any]:
    where = flow.placement.all("cpu")
    return [
        training(lambda x, sbp=sbp: x.to_global(where, B).to_global(sbp=sbp).detach())  # type: ignore[attr-defined]
        for sbp in (S(0), S(1), P, B)
    ]


def test_gradients_pass_through_results_that_are_arranged() -> None:
    want = training(lambda x: x)
    for of_rank in run_on(2, gradients_on_ranks):
        assert of_rank == [want] * 4


class Written(flow.nn.Graph):
    def build(self, x: Any) -> Any:
        y = x.t() + 1
        y.contiguous().mul_(0)
        y.flatten().mul_(0)
        return y * 1


def of_a_graph() -> list[Any]:
    where = flow.placement.all("cpu")
    out = []
    for sbp in (S(0), S(1), P, B):
        x: Any = torch.arange(12.0).view(4, 3).to_global(where, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
        out.append(Written()(x).numpy().tolist())
    return out


def test_a_graph_copies_where_eager_does() -> None:
    want = (torch.arange(12.0).view(4, 3).t() + 1).tolist()
    assert run_on(2, of_a_graph) == [[want] * 4] * 2


def of_single_rows() -> list[list[Any]]:
    """Return what one device gives, and then global tensors, in one process.

    The process may choose the kernel of attention."""
    where = flow.placement.all("cpu")
    q, x = torch.ones(2, 8, 4, 16), torch.ones(2, 4, 8, 8)
    found = []
    lays: list[Callable[[Any], Any]] = [
        lambda t: t,
        lambda t: t.to_global(where, B).to_global(sbp=S(0)),
    ]
    for lay in lays:
        pictures = lay(x).contiguous(memory_format=torch.channels_last)
        results = of_kernels(lay(q).transpose(1, 2), pictures)
        found.append([(t.is_contiguous(), t.stride()) for t in results])
    return found


def of_kernels(q: Any, x: Any) -> list[Any]:
    w = torch.ones(6, 4, 3, 3)
    return [
        F.scaled_dot_product_attention(q, q, q, is_causal=True),
        F.conv2d(x, w),
        F.group_norm(x, 2),
        x.relu(),
    ]


def test_kernels_with_an_order_of_their_own() -> None:
    for of_one, of_global in run_on(2, of_single_rows):
        assert of_global == of_one


#: Calls whose order the kernels alone know: row-major operands with another result, a fake kernel
#: with another order than the real one, views without a base on this rank.
ORDERS: dict[str, Callable[[Any], Any]] = {
    "fft": lambda x: torch.fft.fft(x, dim=0).real.clone(),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "power of a number": lambda x: 2.0**x.T,
    "isin": lambda x: torch.isin(x.T, x).double(),
    "slice": lambda x: x[:, ::2] + 1,
    "chunk": lambda x: x.T.chunk(2, 0)[0] + 1,
    "cast": lambda x: x.T.long(),
    "view of a result": lambda x: (x.T + 1).view(x.T.shape),
    "scan": lambda x: x.T.cumprod(1),
    "unsqueeze": lambda x: x.T.unsqueeze(1) + 1,
}
READS: dict[str, Callable[[Any], Any]] = {
    "is_contiguous": lambda y: y.is_contiguous(),
    "view": lambda y: y.view(-1).numel(),
    "ravel": lambda y: y.ravel().numel(),
    "flatten": lambda y: y.flatten().numel(),
}


def orders(lay: Callable[[torch.Tensor], Any], n: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (name, make), (asked, read) in itertools.product(ORDERS.items(), READS.items()):
        y = make(lay(torch.arange(float(n * n), dtype=torch.float64).view(n, n) / n))
        try:
            found[f"{name}: {asked}"] = read(y)
        except RuntimeError:
            found[f"{name}: {asked}"] = "refused"
        y.contiguous().fill_(7)
        found[f"{name}: written, {asked}"] = y.sum().item()
    return found


def orders_on_ranks(n: int) -> list[dict[str, Any]]:
    where = flow.placement.all("cpu")
    return [
        orders(lambda x, sbp=sbp: x.to_global(where, B).to_global(sbp=sbp), n)  # type: ignore[attr-defined]
        for sbp in (S(0), S(1), P, B)
    ]


@pytest.mark.parametrize(("ranks", "n"), [(3, 4), (2, 2)])
@pytest.mark.sweep(2)
def test_ranks_agree_where_the_kernel_alone_knows_the_order(ranks: int, n: int) -> None:
    want = orders(lambda x: x.clone(), n)
    every = run_on(ranks, orders_on_ranks, n)
    assert all(of_rank == every[0] for of_rank in every)
    for sbp, got in zip(("S(0)", "S(1)", "P", "B"), every[0], strict=True):
        wrong = {k: (sbp, v, want[k]) for k, v in got.items() if v != pytest.approx(want[k])}
        assert wrong == {}


def of_plain_operands() -> list[Any]:
    where = flow.placement.all("cpu")
    g: Any = torch.ones(4, 3).to_global(where, B).to_global(sbp=S(1))  # type: ignore[attr-defined]
    p = torch.arange(12.0).view(4, 3)
    p = p if flow.env.get_rank() == 0 else p.T.contiguous().T
    return [(p + g).is_contiguous(), (p + g).view(-1).sum().item()]


def test_the_order_of_a_plain_operand_on_one_rank_decides_nothing() -> None:
    assert run_on(2, of_plain_operands) == [[True, 78.0]] * 2


class Softmax(flow.nn.Graph):
    def build(self, x: Any) -> Any:
        y = x.T.softmax(0) * 1
        y.flatten().mul_(0)
        return y


def of_a_graph_over_a_split() -> float:
    x: Any = torch.arange(12.0).view(4, 3).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    return Softmax()(x.to_global(sbp=S(1))).abs().sum().item()  # type: ignore[no-any-return]


def test_a_graph_over_a_split_softmax_views_where_one_device_does() -> None:
    assert run_on(2, of_a_graph_over_a_split) == [0.0, 0.0]


def of_a_grid() -> list[Any]:
    grid = flow.placement("cpu", [[0, 1], [2, 3]])
    x: Any = torch.arange(24.0).view(2, 2, 6).to_global(grid, [B, B])  # type: ignore[attr-defined]
    y = x.to_global(sbp=[S(0), S(1)]) + 1
    z = y.transpose(0, 1).contiguous()
    z.mul_(0)
    return [y.sum().item(), y.transpose(0, 1).is_contiguous()]


def test_parts_of_one_element_in_two_dims_show_no_order() -> None:
    assert run_on(4, of_a_grid) == [[300.0, False]] * 4


def kronecker_products() -> list[Any]:
    h: Any = torch.arange(9.0).view(3, 3).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    ones, found = torch.ones(2, 2), []
    for dim in (0, 1):
        t = h.to_global(sbp=S(dim)).t()  # the part of rank 1 has size 1
        found += [torch.kron(t, ones).tolist(), torch.kron(ones, t).tolist()]
    return found


def test_a_kernel_that_refuses_some_orders_is_run_alike_on_parts_of_size_1() -> None:
    t, ones = torch.arange(9.0).view(3, 3).t().contiguous(), torch.ones(2, 2)
    want = [torch.kron(t, ones).tolist(), torch.kron(ones, t).tolist()] * 2
    assert run_on(2, kronecker_products) == [want] * 2


TURNED: dict[str, Any] = {
    "view": lambda x: x.T,
    "elementwise": lambda x: x.T + 1,
    "softmax": lambda x: x.T.softmax(0),
    "product": lambda x: (x @ x.T).T,
    "with a sum": lambda x: x.T + x.sum(),
    "row-major": lambda x: x * 2,
}


class Turned(flow.nn.Graph):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.call = TURNED[name]

    def build(self, x: Any) -> Any:
        return self.call(x)


def outputs_of_graphs() -> list[str]:
    wrong = []
    for name, shape, sbp in itertools.product(TURNED, ((4, 3), (2, 2)), (B, S(0), S(1))):
        graph, plain = Turned(name), torch.arange(float(math.prod(shape))).view(shape)
        g: Any = plain.to_global(flow.placement.all("cpu"), B).to_global(sbp=sbp)  # type: ignore[attr-defined]
        for x, given in ((plain, g), (plain, g), (plain.T, g.T)):
            want, found = TURNED[name](x), graph(given)
            order = (want.stride(), want.is_contiguous()) == (found.stride(), found.is_contiguous())
            want, found = want.clone(), found * 1
            want.contiguous().zero_()
            found.contiguous().zero_()
            if not order or not torch.equal(want, found.to_global(sbp=B).to_local()):
                wrong.append(f"{name} {shape} {sbp} {want.stride()} {found.stride()}")
    return wrong


def test_outputs_of_graphs_have_the_memory_order_of_one_device() -> None:
    assert run_on(2, outputs_of_graphs) == [[], []]


LAST = torch.channels_last


def pictures(n: int) -> torch.Tensor:
    return torch.ones(n, 8, 18, 18)


def in_last(x: Any) -> Any:
    return x.contiguous(memory_format=LAST)


# (operand, sbp, call, further operands): calls whose local kernel has another order than one device
CALLS: dict[str, tuple[torch.Tensor, Any, Callable[..., Any], list[torch.Tensor]]] = {
    # along a split dim other than the first, a local function cuts its result from a longer one
    "cumsum": (torch.ones(3, 4), S(1), lambda x: x.cumsum(1), []),
    "cumprod of a transposed one": (torch.ones(3, 4), S(1), lambda x: x.T.cumprod(0), []),
    "cummax": (torch.ones(3, 4), S(1), lambda x: x.cummax(1)[0], []),
    "positions of cummax": (torch.ones(3, 4), S(1), lambda x: x.cummax(1)[1], []),
    "logcumsumexp": (torch.ones(3, 4), S(1), lambda x: x.logcumsumexp(1), []),
    "index_fill": (
        torch.ones(5, 5), S(1), lambda x, i: x.index_fill(1, i, 2.0), [torch.tensor([1])],
    ),
    "index_fill of a transposed one": (
        torch.ones(5, 5), S(1), lambda x, i: x.T.index_fill(0, i, 2.0), [torch.tensor([1])],
    ),
    "scatter": (
        torch.ones(5, 5), S(1), lambda x, i: x.scatter(1, i, 3.0), [torch.zeros(5, 1).long()],
    ),
    # the kernels of parts differ, or arguments ask for dims longer than those of a short run
    "max_pool2d": (pictures(2), S(2), lambda x: F.max_pool2d(in_last(x), 3, 2, 1), []),
    "diff": (pictures(2), S(2), lambda x: torch.diff(in_last(x), dim=2), []),
    "conv2d": (pictures(8), S(1), lambda x, w: F.conv2d(in_last(x), w), [torch.ones(8, 8, 3, 3)]),
    "conv2d in groups": (
        pictures(4), S(2), lambda x, w: F.conv2d(in_last(x), w, groups=8), [torch.ones(8, 1, 3, 3)],
    ),
    "group_norm": (pictures(2), S(0), lambda x: F.group_norm(in_last(x), 4), []),
    "pixel_shuffle": (pictures(2), S(0), lambda x: F.pixel_shuffle(in_last(x), 2), []),
    "pad": (pictures(2), S(0), lambda x: F.pad(in_last(x), (3, 3, 3, 3), mode="reflect"), []),
    "layer_norm": (
        torch.ones(16, 8, 64), S(2), lambda x: F.layer_norm(x.transpose(0, 1), (64,)) + 1, [],
    ),
    "fft2 of given sizes": (
        torch.ones(2, 60, 64), S(0),
        lambda x: torch.fft.fft2(x.permute(2, 1, 0).contiguous().permute(2, 1, 0), s=(60, 64)), [],
    ),
    # a matrix of zeros has no inverse
    "inv": (torch.eye(3).repeat(2, 1, 1), S(0), torch.linalg.inv, []),
    "cholesky": (torch.eye(3).repeat(2, 1, 1), S(0), torch.linalg.cholesky, []),
    "solve": (torch.eye(3).repeat(2, 1, 1), S(0), torch.linalg.solve, [torch.ones(2, 3, 2)]),
    # calls without a rule for the order
    "clone": (torch.ones(2, 3, 4, 4), S(0), lambda x: x.clone(memory_format=LAST), []),
    "ones_like": (
        torch.ones(2, 3, 4, 4), S(0), lambda x: torch.ones_like(x, memory_format=LAST), [],
    ),
    "dropout": (torch.ones(2, 3), S(0), lambda x: F.dropout(x.T, 1e-9), []),
    "foreach": (torch.ones(2, 3), S(0), lambda x: torch._foreach_add([x.T], 1.0)[0], []),
    "a view that communicates": (
        torch.ones(2, 3, 4), S(0), lambda x: x.transpose(1, 2)[1] * 1, [],
    ),
}  # fmt: skip


def zeroed_through_a_copy(y: Any) -> tuple[Any, ...]:
    order = y.stride(), y.is_contiguous()
    y.contiguous().zero_()
    values = y.to_global(sbp=B).to_local() if isinstance(y, flow.GlobalTensor) else y
    return *order, int((values != 0).sum())


def orders_of_calls(names: Sequence[str]) -> dict[str, Any]:
    where, found = flow.placement.all("cpu"), {}
    for name in names:
        x, sbp, call, others = CALLS[name]
        g, *rest = (t.to_global(where, B) for t in (x, *others))  # type: ignore[attr-defined]
        found[name] = zeroed_through_a_copy(call(g.to_global(sbp=sbp), *rest))
    return found


def test_every_kind_of_call_has_the_order_of_one_device() -> None:
    want = {
        n: zeroed_through_a_copy(call(x.clone(), *more)) for n, (x, _, call, more) in CALLS.items()
    }
    for found in run_on(2, orders_of_calls, list(CALLS)):
        assert found == want


def of_small_slices() -> list[Any]:
    x: Any = torch.zeros(2, 3, 4000, 40).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    y = x.to_global(sbp=S(0))[:, :, :2, :4].transpose(1, 2).exp()
    return [y.stride(), y.is_contiguous()]


def test_a_run_for_the_order_takes_no_memory_for_gaps() -> None:
    y = torch.zeros(2, 3, 4000, 40)[:, :, :2, :4].transpose(1, 2).exp()
    assert run_on(2, of_small_slices) == [[y.stride(), y.is_contiguous()]] * 2
    shape, strides = (2, 2, 3, 4), (480_000, 40, 160_000, 1)
    assert result_strides._with_small_gaps(shape, strides) == (33, 5, 11, 1)


def outside_of_a_placement() -> list[Any]:
    x: Any = torch.ones(2, 3, 4, 4).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    x = x.to_global(flow.placement("cpu", [0]), B)
    like = torch.zeros_like(x, memory_format=LAST)
    return [like.is_contiguous(), x.clone(memory_format=LAST).is_contiguous()]


def test_ranks_outside_know_the_order_that_a_program_asks_for() -> None:
    assert run_on(2, outside_of_a_placement) == [[False, False]] * 2


def test_simulated_ranks_leave_the_filters_of_warnings_as_they_were() -> None:
    before = list(warnings.filters)
    for _ in range(3):
        simulate(2, outside_of_a_placement)
        simulate(2, of_small_slices)
    assert list(warnings.filters) == before
