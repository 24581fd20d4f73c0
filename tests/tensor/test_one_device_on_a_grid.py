"""Tests that code for one device works on a placement of two axes, with four real processes. The
same on one axis is in test_one_device.py, test_identity.py and tests/ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.bodies import values
from support.pool import run_on
from test_custom_ops import add_each, add_into, add_rows, scale_, unfaked
from test_foreach import WRITING
from test_index_range_errors import X, indices, said
from test_one_device import RESULTS, Chunked
from torch import Tensor

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value
from globaltensor.errors import FallbackWarning

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
Layout = tuple[Any, Any]

#: Layouts in which the axes differ, or split one dim twice.
MIXED: tuple[Layout, ...] = ((S(0), S(1)), (S(0), S(0)), (P, B), (S(1), B), (S(0), P))

#: Functions that return their operand, of each kind in test_identity.py.
ITSELF: dict[str, Callable[[Any], Any]] = {
    "dropout in eval mode": lambda x: F.dropout(x, 0.5, False),
    "Dropout in eval mode": lambda x: torch.nn.Dropout().eval()(x),
    "plus": lambda x: +x,
    "real": lambda x: x.real,
    "conj": lambda x: x.conj(),
    "flatten": lambda x: x.flatten(1),
    "contiguous": lambda x: x.contiguous(),
    "to its dtype": lambda x: x.to(torch.float64),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x)[0],
    "type_as": lambda x: x.type_as(x),
}


def grid() -> Any:
    return flow.placement("cpu", [[0, 1], [2, 3]])


def laid_out(value: Tensor, sbp: Layout) -> Any:
    """Return a leaf with this sbp, of a copy of the value."""
    return value.to_global(grid(), (B, B)).to_global(sbp=sbp).detach().clone()  # type: ignore[attr-defined]


def same(got: Any, want: Tensor, *about: Any) -> None:
    assert got.shape == want.shape, about
    torch.testing.assert_close(
        gather_global_value(got) if got.is_global else got.detach(),
        want.detach(),
        rtol=1e-12,
        atol=1e-13,
        msg=lambda text: f"{about}: {text}",
    )


def detached_in_place(sbp: Layout) -> None:
    """``detach_()`` of results and views, which torch refuses for views of local tensors."""
    ways: dict[str, Callable[[Any], Any]] = {
        "result": lambda g: g * 2, "turned": lambda g: g.t(), "row": lambda g: g[0],
        "flat": lambda g: (g * 2).view(12), "boxed": lambda g: g.to_global(sbp=(B, S(0))),
    }  # fmt: skip
    for name, way in ways.items():
        y = way(laid_out(values(4, 3), sbp).requires_grad_())
        assert y.detach_() is y, (name, sbp)
        assert y.is_leaf
        assert not y.requires_grad
        same(y, way(laid_out(values(4, 3), (B, B))), name, sbp)
    base = laid_out(values(4, 3), sbp).requires_grad_() * 2
    row = base[0].detach_()
    base.mul_(3)
    same(row, values(4, 3)[0] * 6, "a row of what is written", sbp)
    assert base.requires_grad


def data_replaced(sbp: Layout) -> None:
    """``.data = plain`` keeps the axes whose split dim the new shape has."""
    for shape in ((4, 3), (5, 3), (1, 7), (2, 3, 4), (3,), ()):
        x, value = laid_out(values(4, 3), sbp), values(*shape, seed=1)
        x.data = value
        kept = tuple(s if not s.is_split or s.dim < len(shape) else B for s in sbp)
        assert (x.sbp, x.placement) == (kept, grid()), (sbp, shape)
        same(x, value, sbp, shape)
        same(x * 2, value * 2, sbp, shape)
    parameter, alone = (torch.nn.Parameter(t) for t in (laid_out(values(4, 3), sbp), values(4, 3)))
    for p in (parameter, alone):
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.data = values(6, 3, seed=1)
        (p * p * p).sum().backward()
        optimizer.step()
    if P not in sbp:  # the gradient of a sum has no partial layout
        same(parameter, alone, "trained", sbp)


def results_in_buffers(sbp: Layout) -> None:
    """``out=`` plain and global buffers, also of no elements."""
    for name, (function, dtypes) in RESULTS.items():
        want = function(values(4, 3))
        wanted = want if isinstance(want, tuple) else (want,)
        x = laid_out(values(4, 3), sbp)
        for shapes in ([w.shape for w in wanted], [torch.Size([0])] * len(wanted)):
            empty = [torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
            for targets in (empty, [laid_out(t, (B, S(0))) for t in empty]):
                function(x, out=tuple(targets) if len(targets) > 1 else targets[0])
                for t, w in zip(targets, wanted, strict=True):
                    same(t, w.to(t.dtype), name, sbp, shapes)
    rows = torch.zeros(8, 3, dtype=torch.float64)
    torch.mul(laid_out(values(4, 3), sbp), 2, out=rows[::2])
    same(rows[::2], values(4, 3) * 2, sbp)
    assert not rows[1::2].any()
    weight, alone = values(7, 3, seed=1), values(4, 3).requires_grad_()
    Chunked.apply(alone, weight).backward()
    ours = laid_out(values(4, 3), sbp).requires_grad_()
    Chunked.apply(ours, laid_out(weight, (B, S(0)))).backward()
    same(ours.grad, alone.grad, "a function with buffers", sbp)  # type: ignore[arg-type]


def functions_that_return_their_operand(sbp: Layout) -> None:
    for name, function in ITSELF.items():
        x = laid_out(values(4, 3), sbp)
        assert function(x) is x, (name, sbp)
        assert x.sbp == sbp
    leaf = laid_out(values(4, 3), sbp).requires_grad_()
    y = torch.broadcast_tensors(F.dropout((+(leaf * 2)).flatten(1), 0.5, False))[0]
    y.retain_grad()
    y.mul_(3)
    y.square().sum().backward()
    same(leaf.grad, values(4, 3) * 72, sbp)
    row = laid_out(values(12), tuple(B if s == S(1) else s for s in sbp))  # type: ignore[arg-type]
    assert row.flatten() is row


def foreach_on_plain_targets(sbp: Layout) -> None:
    """A plain target, or a plain and a global one, after an in-place function over lists."""
    data = [values(5, 3, seed=i).abs() + 0.5 for i in range(8)]
    for name, (count, kernel) in WRITING.items():
        if name.startswith("fused") and P in sbp:
            continue  # squares of partial sums must not be taken
        want = [[data[k].clone(), data[k + 4].clone()] for k in range(count)]
        got = [[laid_out(t, sbp) for t in ts] for ts in want]
        got[0][0] = want[0][0].clone()
        kernel(want)
        kernel(got)
        assert not got[0][0].is_global
        for ours, alone in zip(got, want, strict=True):
            for o, a in zip(ours, alone, strict=True):
                same(o, a, name, sbp)


def in_place_on_plain_targets(sbp: Layout) -> None:
    def written(g: Any, index: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.zeros(4, 3, dtype=torch.float64).scatter_add_(0, index, g)
        doubled = weight * 2
        doubled.add_(g, alpha=2)
        doubled[0] = g[1]
        doubled *= g.sum()
        doubled[1:].copy_(g[:3] + doubled[1:])
        doubled.lerp_(g, 0.25)
        return counts, doubled

    source, index, factor = values(4, 3), indices(4, 3, n=4, at=0, wrong=3), values(4, 3, seed=2)
    alone, weight = source.clone().requires_grad_(), values(4, 3, seed=1).requires_grad_()
    ours, own = laid_out(source, sbp).requires_grad_(), weight.detach().clone().requires_grad_()
    want = written(alone, index, weight)
    got = written(ours, laid_out(index, (B, S(0))), own)
    for g, w in zip(got, want, strict=True):
        assert not g.is_global  # type: ignore[attr-defined]
        same(g, w, sbp)
    for counts, doubled in (want, got):
        (counts * factor + doubled.square()).sum().backward()
    same(ours.grad, alone.grad, "gradient", sbp)  # type: ignore[arg-type]
    same(own.grad, weight.grad, "gradient of the target", sbp)  # type: ignore[arg-type]


def indices_out_of_range(sbp: Layout) -> None:
    """The error is torch's, in sizes of the whole. Indices are not split: ranks that do not hold
    the wrong one learn of it when the other ranks end."""
    if P in sbp:
        return
    rows, few = indices(6, 4, n=6, at=-1, wrong=9), indices(4, n=4, at=-1, wrong=-9)
    classes = indices(6, n=4, at=-1, wrong=7)
    cases: dict[str, tuple[Callable[..., Any], Tensor]] = {
        "gather": (lambda x, i: x.gather(0, i), rows),
        "scatter": (lambda x, i: x.scatter(0, i, 1.0), rows),
        "index_select": (lambda x, i: x.index_select(1, i), few),
        "columns": (lambda x, i: x[:, i], few),
        "cross_entropy": (lambda x, t: F.cross_entropy(x, t), classes),
        "embedding": (lambda x, i: F.embedding(i, x), rows),
    }
    for name, (function, index) in cases.items():
        want = said(lambda f=function, i=index: f(X, i))
        assert "no error" not in want
        for i in (index.clone(), laid_out(index, (B, B))):
            x = laid_out(X, sbp)
            assert said(lambda f=function, x=x, i=i: f(x, i)) == want, (name, sbp)


def writes_of_operators(sbp: Layout) -> None:
    """Operators that write into arguments, into a plain tensor and into global ones."""
    x, y, total = values(4, 3), values(4, 3, seed=1), values(3, seed=2)
    of_rows: Any = tuple(B if s == S(1) else s for s in sbp)
    for first, other in (
        (x.clone(), laid_out(y, sbp)),
        (laid_out(x, sbp), y.clone()),
        (laid_out(x, sbp), laid_out(y, (S(1), S(0)))),
    ):
        assert add_into(first, other, scale=0.5) is None  # type: ignore[func-returns-value]
        same(first, x + 0.5 * y, sbp)
        add_each([first, other], first * 1)
        same(first, 2 * (x + 0.5 * y), sbp)
        same(other, y + x + 0.5 * y, sbp)
    for sums in (total.clone(), laid_out(total, of_rows)):
        same(add_rows(laid_out(x, sbp), sums), x * 2, sbp)
        same(sums, total + x.sum(0), sbp)
    z = laid_out(x, sbp)
    row = z[1]
    assert scale_(z, 3.0) is z
    assert z.sbp == sbp
    add_into(row, total)
    want = x * 3
    want[1] += total
    same(z, want, sbp)
    same(row, want[1], sbp)
    same(unfaked(laid_out(x, sbp)), x.square(), sbp)


BODIES: tuple[Callable[[Layout], None], ...] = (
    detached_in_place, data_replaced, results_in_buffers, functions_that_return_their_operand,
    foreach_on_plain_targets, in_place_on_plain_targets, indices_out_of_range, writes_of_operators,
)  # fmt: skip
#: Bodies of many calls, which run in three layouts.
MANY_CALLS = (results_in_buffers, foreach_on_plain_targets)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.sweep(4)
def test_as_on_one_device(body: Callable[[Layout], None]) -> None:
    run_on(4, in_mixed_layouts, body)


def in_mixed_layouts(body: Callable[[Layout], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for sbp in MIXED[:: 2 if body in MANY_CALLS else 1]:
            body(sbp)
