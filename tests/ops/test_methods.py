"""Tests of the methods of a global tensor. Every method is compared with its plain counterpart on
simulated ranks, and a selection runs on real processes."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import pickle
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.bodies import Bodies, values
from support.everywhere import full
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.sbp import partial_max

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
BODIES = Bodies()
on = BODIES.on


def rank() -> int:
    return flow.env.get_rank()


def line() -> Any:
    return flow.placement.all("cpu")


def spread(t: torch.Tensor, sbp: Any, placement: Any = None, grad: bool = False) -> torch.Tensor:
    where = placement or line()
    return (
        t.to_global(where, [B] * where.axes)
        .to_global(sbp=sbp)
        .detach()
        .clone()
        .requires_grad_(grad)
    )


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(full(got) if got.is_global else got, want, rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------------- attributes


@on(3)
def test_attributes() -> None:
    x = spread(values(5, 4), S(0))
    assert (x.shape, x.size(), x.size(-1), x.dim(), x.ndim, x.numel(), len(x), x.nelement()) == (
        (5, 4),
        (5, 4),
        4,
        2,
        2,
        20,
        5,
        20,
    )
    assert isinstance(x, torch.Tensor)
    assert x.is_global
    assert not x.is_local
    assert (x.placement, x.sbp) == (line(), (S(0),))
    assert (x.dtype, x.device.type, x.nbytes, x.itemsize, x.element_size()) == (
        torch.float64,
        "cpu",
        160,
        8,
        8,
    )
    assert x.is_floating_point()
    assert not x.is_complex()
    assert x.stride() == (4, 1)
    assert x.is_contiguous()
    assert x.t().stride() == (1, 4)
    assert (x.is_leaf, x.requires_grad, x.grad_fn, x.grad) == (True, False, None, None)
    assert torch.is_tensor(x)
    assert torch.is_floating_point(x)
    assert torch.numel(x) == 20
    assert x.to_local().shape == ([2, 2, 1][rank()], 4)
    assert {x: 1}[x] == 1, "hashable by identity"
    assert x.is_cpu
    assert not x.is_cuda


@on(4, real=False)
def test_ranks_outside() -> None:
    x = flow.arange(6, placement=flow.placement("cpu", [2, 0]), sbp=S(0))
    assert x.shape == (6,)
    assert x.to_local().tolist() == {0: [3, 4, 5], 2: [0, 1, 2]}.get(rank(), [])
    assert (x.tolist(), int(x.sum()), x[3].item()) == ([0, 1, 2, 3, 4, 5], 15, 3)
    assert x.device.type == "cpu"
    y = (x * 2).double().requires_grad_()
    (y * y).sum().backward()
    assert y.grad.tolist() == [0, 4, 8, 12, 16, 20]


@on(2)
def test_local_to_global() -> None:
    mine = torch.full((2, 3), float(rank()), dtype=torch.float64)
    whole = torch.stack([torch.zeros(3), torch.ones(3)]).double()
    same(mine.to_global(line(), S(0)), whole.repeat_interleave(2, 0))
    same(
        mine.to_global(line(), S(-1)), torch.cat([torch.zeros(2, 3), torch.ones(2, 3)], 1).double()
    )
    assert mine.to_global(line(), S(-1)).sbp == (S(1),)
    same(mine.to_global(line(), P), torch.ones(2, 3).double())
    same(mine.to_global(line(), B), torch.zeros(2, 3).double())
    assert mine[0, 0] == rank(), "the local tensor stays as it is"
    same(torch.arange(2.0 - rank()).to_global(line(), S(0)), torch.tensor([0.0, 1.0, 0.0]))
    with record_collectives() as log:
        mine.to_global(line(), S(0), check_meta=False)
    assert not log
    shared = mine.to_global(line(), S(0))
    shared.mul_(3)
    assert (mine == 3 * rank()).all(), "without copy=True the part is the tensor's own memory"
    apart = mine.to_global(line(), S(0), copy=True)
    apart.zero_()
    assert (mine == 3 * rank()).all()
    same(
        flow.to_global(mine, line(), S(0)),
        shared.to_local().new_tensor([[0.0] * 3] * 2 + [[3.0] * 3] * 2),
    )


@on(2)
def test_gradients_through_to_global() -> None:
    for sbp, scale in ((S(0), [2.0, 2.0]), (P, [2.0, 2.0])):
        mine = torch.full((2,), float(rank()), requires_grad=True)
        (mine.to_global(line(), sbp) * 2).sum().backward()
        assert mine.grad is not None
        assert mine.grad.tolist() == scale


@on(2)
def test_global_to_global() -> None:
    t = values(5, 4)
    x = spread(t, S(0))
    assert x.to_global() is x
    assert x.to_global(sbp=S(0)) is x
    assert x.to_global(sbp=S(0), copy=True) is not x
    for sbp in (B, P, S(1), S(-1)):
        y = x.to_global(sbp=sbp)
        same(y, t)
        y.add_(1) if not sbp.is_partial else y.mul_(2)
        same(x, t)
    assert (
        x.to_global(placement=flow.placement("cpu", [1, 0])).to_local().shape[0] == [2, 3][rank()]
    )


@on(2)
def test_grad_sbp() -> None:
    x = spread(values(4, 4), S(0), grad=True)
    with flow.boxing_log() as log:
        (x.to_global(sbp=B, grad_sbp=S(1)) ** 2).sum().backward()
    same(x.grad, 2 * full(x))
    assert [(r.src.layout[0].short, r.dst.layout[0].short) for r in log] == [
        ("S(0)", "B"),
        ("P", "S(1)"),
        ("S(1)", "S(0)"),
    ]


@on(2)
def test_to_local() -> None:
    x = spread(values(4, 2), B, grad=True)
    (x.to_local() * (rank() + 1)).sum().backward()
    assert full(x.grad).tolist() == [[3.0, 3.0]] * 4, "by duality what the ranks did is summed"
    y = spread(values(4, 2), B, grad=True)
    (y.to_local(grad_sbp=B) * 2).sum().backward()
    assert full(y.grad).tolist() == [[2.0, 2.0]] * 4, "every rank has computed the same"
    z = spread(values(4, 2), S(0), grad=True)
    (z.to_local() * (rank() + 1)).sum().backward()
    assert full(z.grad).tolist() == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2
    part = z.detach().to_local(copy=True)
    part.zero_()
    assert full(z).abs().min() > 0
    assert not part.is_global


# ------------------------------------------------------------------------------------------- values


@on(3)
def test_reading() -> None:
    t = values(3, 2)
    for sbp in (S(0), S(1), B, P):
        x = spread(t, sbp)
        assert np.array_equal(x.numpy(), t.numpy()) or sbp is P
        assert np.allclose(x.numpy(), t.numpy(), rtol=1e-12)
        assert np.asarray(x).shape == (3, 2)
        assert x.tolist()[2] == pytest.approx(t.tolist()[2])
        assert x[1, 1].item() == pytest.approx(t[1, 1].item())
        assert float(x.max()) == pytest.approx(float(t.max()))
        assert int(x.sum() * 100) == int(t.sum() * 100)
        assert bool((x == x).all())
        assert complex(x[0, 0]) == pytest.approx(complex(t[0, 0]))
        assert f"{x[0, 1]:.3f}" == f"{t[0, 1]:.3f}"
        assert np.allclose(x.requires_grad_().detach().numpy(), t.numpy())
        assert x.numpy(force=True).shape == (3, 2)
    n = spread(torch.tensor(2), B)
    assert [10, 20, 30][n] == 30
    assert list(range(int(n))) == [0, 1]
    assert 1.5 in spread(torch.tensor([1.0, 1.5]), S(0))
    assert [row.tolist() for row in spread(torch.arange(4).view(2, 2), S(0))] == [[0, 1], [2, 3]], (
        "iteration"
    )


@on(2)
def test_repr() -> None:
    x = spread(torch.arange(4.0), S(0), grad=True)
    assert repr(x) == (
        'tensor([0., 1., 2., 3.], placement=globaltensor.placement(type="cpu", ranks=[0, 1]), '
        "sbp=(globaltensor.sbp.split(dim=0),), requires_grad=True)"
    )
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    assert repr(nn.Parameter(x.detach())).startswith("Parameter containing:\ntensor([0., 1.")
    assert str(x.detach()) == repr(x.detach()) == f"{x.detach()}"
    assert "sbp=(globaltensor.sbp.partial_sum,)" in repr(spread(torch.ones(2), P))


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    simulate(
        2,
        lambda: flow.visualize_sharding(
            spread(values(4, 6), S(1)), file=file if rank() == 0 else io.StringIO()
        ),
    )
    assert "f64[4, 6] S(1)  on cpu [0, 1]" in file.getvalue()
    assert "rank 1  [1]  [4, 3]  x[:, 3:6]" in file.getvalue()
    simulate(1, lambda: flow.visualize_sharding(spread(values(2), B)))
    assert "rank 0" in capsys.readouterr().out


# -------------------------------------------------------------------------------- indexing, writing


INDEXES: list[Any] = [
    0, -1, slice(1, 4), slice(None, None, 2), (slice(None), 1), (..., -1), None, (0, 2),
    ([0, 2, 2],), (slice(None), [1, 0]), ([0, 3], [1, 2]),
    torch.tensor([True, False, True, False, True]), (torch.tensor([4, 0]), slice(0, 2)),
    slice(4, 2), (1, slice(1, 2), None), torch.tensor(2),
]  # fmt: skip


@on(3, real=False)
def test_reading_by_index() -> None:
    t = values(5, 4)
    for sbp in (S(0), S(1), B, P):
        for index in INDEXES:
            p, x = t.clone().requires_grad_(), spread(t, sbp, grad=True)
            got, want = x[index], p[index]
            same(got, want.detach())
            (got * 2).sum().backward()
            (want * 2).sum().backward()
            same(x.grad, p.grad)  # type: ignore[arg-type]


@pytest.mark.long
@on(3, real=False)
def test_writing_by_index() -> None:
    t = values(5, 4)
    for sbp in (S(0), S(1), B):
        for index in INDEXES:
            p, x = t.clone(), spread(t, sbp)
            p[index], x[index] = 7.0, 7.0
            same(x, p)
            assert x.sbp == (sbp,)
            v = values(*p[index].shape, seed=1)
            p[index] = v
            x[index] = spread(v, S(0) if v.dim() else B)
            same(x, p)
            assert x.sbp == (sbp,)
            p[index] += 1
            x[index] += 1
            same(x, p)


@on(2)
def test_writing_through_views() -> None:
    p, x = values(4, 6), spread(values(4, 6), S(0))
    for t in (p, x):
        t[1:3].mul_(2)
        t.view(4, 2, 3)[:, 1].fill_(5)
        t.t()[0] = 9
        t.select(1, 2).add_(t[:, 3])
        a, b = t.chunk(2, 1)
        a.copy_(b)
        t[0] += 1
        t[1:3] *= t[0]
        t[-1].copy_(t[0])
        t[[0, 2]] -= 1
        row = t[3]
        row.add_(1).relu_()
        row.fill_(2.5)
        t.diagonal().mul_(3)
        t.view(3, 8)[1:].mul_(-2)  # the local tensors had to move, and no index says where to
        t.view(3, 8)[0].zero_()
        row = t[0]
        t.add_(1)
        row.add_(1)  # the view shows the base's values
    same(x, p)


@on(2)
def test_views_in_place() -> None:
    p, x = (
        values(1, 4, 6),
        [spread(values(1, 4, 6), sbp, grad=True) for sbp in (S(0), S(1), S(2), B, P)],
    )
    for t in (p, *x):
        base = t * 1
        y = base.clone()
        seen = y[0]
        assert y.squeeze_(0) is y
        assert y.shape == (4, 6)
        y.t_().unsqueeze_(1)
        y.add_(1).transpose_(0, -1)
        torch.Tensor.swapdims_(y, 1, 2)
        assert y.shape == (4, 6, 1)
        assert y.dim() == 3
        if t is p:
            want, shown = y, seen
            continue
        same(y, want)
        same(seen, shown)  # writes reach the view
        y.square().sum().backward()
        same(t.grad, 2 * (p + 1))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x[0].unsqueeze_(0)


@on(2)
def test_in_place() -> None:
    t = values(4, 6)
    y = values(4, 6, seed=1)
    for sbp in (S(0), S(1), B):
        for other in (S(0), S(1), B, P):
            p, x, q, z = t.clone(), spread(t, sbp), y, spread(y, other)
            kept = x
            for a, b in ((p, q), (x, z)):
                a += b
                a *= 2
                a -= b.mean()
                a /= 3
                a.add_(b, alpha=0.5).mul_(b).addcmul_(b, b).lerp_(b, 0.3).clamp_(
                    -2, 2
                ).relu_().neg_().pow_(2).exp_()
                a.masked_fill_(b > 0, 1.5)
                a.copy_(a + b[0])
            assert x is kept
            assert x.sbp == (sbp,)
            same(x, p)
    x = spread(t, P)
    x.mul_(2).add_(spread(t, P)).sub_(spread(t, B)).add_(1).neg_()
    assert x.sbp == (P,)
    same(x, -(2 * t + 1))
    x.zero_()
    same(x, torch.zeros(4, 6).double())
    x.fill_(3)
    same(x, torch.full((4, 6), 3.0).double())


@pytest.mark.parametrize(
    "placement",
    [flow.placement("cpu", [0, 1]), flow.placement("cpu", [0]), flow.placement("cpu", [[0], [1]])],
)
def test_in_place_into_what_was_local(placement: Any) -> None:
    def on_ranks() -> None:
        for sbp in ([B], [S(0)], [P]):
            for back in (None, B, S(1), P):
                a, b = values(4, 6).requires_grad_(), values(4, 2, seed=1).requires_grad_()
                here = a * 2
                layout = sbp * placement.axes
                x = here.to_global(placement, layout)  # type: ignore[attr-defined]
                if back is not None:
                    x = x.to_global(sbp=[back] * placement.axes)
                rows = x.shape[0]
                x[:, :2] = b[:1]
                x[:, 2:4].mul_(3)
                x.add_(1)
                # (also on ranks outside the placement)
                value = torch.from_numpy(x.detach().numpy())
                assert torch.equal(value[:, :2], b[:1].detach().expand(rows, 2) + 1)
                (x * x).sum().backward()
                gradient = (torch.zeros_like(a) if a.grad is None else a.grad).to_global(
                    placement, [B if e is P else e for e in layout]
                )  # type: ignore[attr-defined]
                same(
                    torch.from_numpy(gradient.numpy()),
                    4 * value * torch.tensor([0, 0, 3, 3, 1, 1.0]),
                )

    simulate(2, on_ranks)


@pytest.mark.parametrize(("sbp", "grad"), [(B, P), (S(0), S(0)), (P, B)])
def test_in_place_into_what_becomes_local(sbp: Any, grad: Any) -> None:
    """The local tensor is an ordinary view if the gradient already has the layout of `grad_sbp`."""

    def on_ranks() -> None:
        x = spread(values(4, 6), sbp, grad=True)
        y = x * 3
        part = y.to_local(grad_sbp=grad)
        part[:1].mul_(2)
        part.sum().backward()
        assert torch.equal(y.to_local(), part)
        rows = [6.0] + [3.0] * (part.shape[0] - 1)
        whole = rows * 2 if sbp is S(0) else [r * 2 for r in rows] if sbp is B else rows
        same(x.grad, torch.tensor(whole).double()[:, None].expand(4, 6))

    simulate(2, on_ranks)


def test_in_place_beside_what_was_local() -> None:
    def on_ranks() -> None:
        a = values(4, 6).requires_grad_()
        here = a * 2
        here.to_global(line(), S(0)).mul_(3)  # type: ignore[attr-defined]
        same(here.detach(), 6 * a.detach())
        here.sum().backward()
        assert torch.equal(a.grad, torch.full_like(a, 6))
        copied = here.to_global(line(), S(0), copy=True)  # type: ignore[attr-defined]
        copied.zero_()
        same(here.detach(), 6 * a.detach())

    simulate(2, on_ranks)


@on(2)
def test_a_partial_that_ops_have_left_moves() -> None:
    """In-place ops may change the layout of a partial sum that an op produced. They may not change
    a partial layout that the user chose."""
    t, w = values(4, 6), values(6, 4)
    y = spread(t, S(1)) @ spread(w, S(0))
    assert y.sbp == (P,)
    same(y.relu_(), (t @ w).relu())
    assert not y.sbp[0].is_partial
    z = (spread(t, S(1), grad=True) @ spread(w, S(0), grad=True)).sigmoid_()
    z.sum().backward()
    placed = (spread(t, S(1)) @ spread(w, S(0))).to_global(sbp=P)
    placed.mul_(2)  # linear ops keep partial_sum
    assert placed.sbp == (P,)
    other = (spread(t, S(1)) @ spread(w, S(0))).to_global(sbp=B).to_global(sbp=P)
    with pytest.raises(RuntimeError, match="in-place relu_"):
        other.relu_()
    same(other, t @ w)


@on(2)
def test_in_place_on_the_way() -> None:
    t = values(4, 6)
    p, x = t.clone().requires_grad_(), spread(t, S(0), grad=True)
    for a in (p, x):
        b = a * 2
        b.mul_(a).add_(1)
        b[0] = 0
        b[:, 1:3].mul_(b[:, 2:4].detach().clone())
        F.relu(b, inplace=True)
        b.sum().backward()
    same(x.grad, p.grad)  # type: ignore[arg-type]


@on(2)
def test_out() -> None:
    x, y = spread(values(4, 6), S(0)), spread(values(4, 6, seed=1), S(1))
    out = flow.empty(4, 6, dtype=torch.float64, placement=line(), sbp=S(1))
    assert torch.add(x, y, out=out) is out
    assert out.sbp == (S(1),)
    same(out, full(x) + full(y))


# --------------------------------------------------------------------------------- copies and casts


@on(2)
def test_detach_clone_copy() -> None:
    t = values(3, 4)
    x = spread(t, S(0), grad=True)
    d = x.detach()
    assert not d.requires_grad
    assert (d.placement, d.sbp) == (x.placement, x.sbp)
    d.mul_(2)
    same(x, 2 * t)
    c = x.clone()
    assert c.grad_fn is not None
    c.sum().backward()
    same(x.grad, torch.ones(3, 4).double())
    with torch.no_grad():
        x.copy_(t)
        same(x, t)
        x.copy_(spread(2 * t, S(1)))
        same(x, 2 * t)
        x.copy_(spread(t, P)[:1])
        same(x, t[:1].expand(3, 4))
        x.copy_(spread(t.float(), B))
        same(x, t.float().double())
    assert x.sbp == (S(0),)
    p = spread(t, P)
    p.copy_(spread(t, S(0)))
    assert p.sbp == (P,)
    same(p, t)


@on(2)
def test_dtypes() -> None:
    t = values(3, 4) * 10
    for sbp in (S(0), B, P):
        x = spread(t, sbp)
        for name in (
            "float",
            "half",
            "bfloat16",
            "long",
            "int",
            "short",
            "bool",
            "cfloat",
            "double",
        ):
            got, want = getattr(x, name)(), getattr(t, name)()
            assert got.dtype == want.dtype
            if name not in ("half", "bfloat16") or sbp is not P:
                torch.testing.assert_close(full(got), want)
        assert x.double() is x
        assert x.to(torch.float32).dtype == x.type(torch.float32).dtype == torch.float32
        assert x.type_as(x.float()).dtype == torch.float32
        assert x.type_as(torch.ones(1)).dtype == torch.float32
        assert torch.ones(1, dtype=torch.int32).type_as(x).dtype == torch.float64
        assert x.to(x.float()).dtype == torch.float32
        assert x.to("cpu") is x
        assert x.cpu() is x
        assert x.to("cpu", torch.float32, non_blocking=True).dtype == torch.float32
        assert x.to(dtype=torch.float64, copy=True) is not x
        assert x.type() == "torch.DoubleTensor"
    y = spread(t, S(0), grad=True)
    (y.float() * 2).sum().backward()
    assert y.grad.dtype == torch.float64
    assert torch.promote_types(y.dtype, torch.float32) == torch.result_type(y, 1) == torch.float64


@on(2)
def test_made_like_another() -> None:
    x = spread(values(3, 4), S(0))
    for y in (
        torch.zeros_like(x),
        torch.rand_like(x),
        x.new_ones(3, 4),
        torch.full_like(x, 2),
        x.new_full((2, 2), 1.0),
        torch.empty_like(x).float(),
    ):
        assert y.is_global
        assert y.placement == x.placement
    assert torch.zeros_like(x).sbp == x.sbp


@on(2)
def test_deepcopy() -> None:
    x = spread(values(3, 4), S(0), grad=True)
    (x * x).sum().backward()
    y = copy.deepcopy(x)
    assert (y.sbp, y.requires_grad, y.is_leaf) == (x.sbp, True, True)
    same(y.grad, full(x.grad))
    with torch.no_grad():
        y.zero_()
    assert full(x).abs().min() > 0
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().to_global(line(), S(0))
    twin = copy.deepcopy(model)
    assert type(twin[0].weight) is type(model[0].weight)
    assert isinstance(twin[0].weight, nn.Parameter)
    (twin(x.detach()) ** 2).sum().backward()
    assert twin[0].weight.grad is not None
    assert model[0].weight.grad is None
    a, b = copy.deepcopy([x, x])
    assert a is b
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)


@on(2)
def test_pickle() -> None:
    x = spread(values(3, 4), S(0), grad=True)
    for y in (pickle.loads(pickle.dumps(x)), pickle.loads(pickle.dumps({"x": x}))["x"]):
        assert (y.sbp, y.placement, y.requires_grad) == (x.sbp, x.placement, True)
        assert y.placement is x.placement
        same(y, full(x))
    file = io.BytesIO()
    model = nn.Linear(4, 3).double().to_global(line(), S(0))
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    same(loaded["weight"], full(model.weight))
    p = pickle.loads(pickle.dumps(model.weight))
    assert isinstance(p, nn.Parameter)


# --------------------------------------------------------------------------- parameters and modules


@on(2)
def test_parameters() -> None:
    p = nn.Parameter(spread(values(4, 3), S(0)))
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, torch.Tensor)
    assert p.is_global
    assert p.requires_grad
    assert p.is_leaf
    assert p.sbp == (S(0),)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 3).to_global(line(), B).to_global(sbp=S(1)))
            self.register_buffer("mask", flow.ones(4, 3, placement=line(), sbp=B))

    model = Own()
    assert [n for n, _ in model.named_parameters()] == ["w"]
    assert [n for n, _ in model.named_buffers()] == ["mask"]
    assert not nn.Parameter(spread(values(2), B), requires_grad=False).requires_grad
    model.w.data = model.w.data * 2
    same(model.w, torch.full((4, 3), 2.0))
    model.requires_grad_(False)
    assert not model.w.requires_grad
    model.double().float().half().bfloat16()
    assert model.w.dtype == torch.bfloat16
    assert model.w.is_global
    model.zero_grad()
    assert nn.utils.parameters_to_vector(model.parameters()).shape == (12,)


@on(2)
def test_module_to_global() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            OrderedDict(q=nn.Linear(4, 6), k=nn.Linear(6, 6, bias=False), n=nn.BatchNorm1d(6))
        )

    # Values are not random, because simulated ranks share torch's generator.
    start = {
        k: (torch.arange(float(v.numel())).view(v.shape) / 10).to(v.dtype)
        for k, v in make().state_dict().items()
    }

    def fresh(*args: Any) -> nn.Module:
        model = make()
        model.load_state_dict(start)
        out = model.to_global(*args)
        assert out is model
        for name, t in model.state_dict().items():
            same(t, start[name])
        return model

    one = fresh(line(), B)
    assert all(t.sbp == (B,) for t in (*one.parameters(), *one.buffers()))
    assert fresh(line(), S(1)).q.bias.sbp == (B,), (
        "one sbp for all: a tensor without that dim stays broadcast"
    )
    named = fresh(line(), {"q.*": S(0), "*": B})
    assert (named.q.weight.sbp, named.q.bias.sbp, named.k.weight.sbp) == ((S(0),), (S(0),), (B,))
    called = fresh(line(), lambda path, t: S(0) if path.startswith("k") and t.dim() == 2 else B)
    assert (called.k.weight.sbp, called.q.weight.sbp) == ((S(0),), (B,))
    ids = {id(p) for p in named.parameters()}
    named.to_global(line(), {"*num*": B, "*": S(0)})
    assert named.k.weight.sbp == (S(0),)
    assert len(ids) == len(list(named.parameters()))
    named.to_global(sbp=S(1))
    assert (named.k.weight.sbp, named.k.weight.placement) == ((S(1),), line())
    named.to_global(flow.placement("cpu", [1]))
    assert (named.k.weight.sbp, named.n.weight.sbp, named.n.weight.placement) == (
        (S(1),),
        (B,),
        flow.placement("cpu", [1]),
    )
    named.to_global(line(), S(0))
    for name, t in named.state_dict().items():
        same(t, start[name])
    named.to_local()
    assert not any(t.is_global for t in (*named.parameters(), *named.buffers()))
    assert named.q.weight.shape == (3, 4)
    tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    tied.to_global(line(), S(0))
    assert tied[0].weight is tied[1].weight
    frozen = nn.Linear(2, 2).requires_grad_(False).to_global(line(), B)
    assert not frozen.weight.requires_grad
    trained = nn.Linear(2, 2)
    trained(torch.ones(1, 2)).sum().backward()
    trained.to_global(line(), S(0))
    same(trained.weight.grad, torch.ones(2, 2))


@on(2)
def test_a_global_module_moves_as_torchs_do() -> None:
    model = nn.Linear(3, 4)
    nn.init.ones_(model.weight)
    weight = model.to_global(line(), S(0)).weight
    model(flow.ones(2, 3, placement=line(), sbp=B)).sum().backward()
    model._apply(lambda t: t.to_global(flow.placement("cpu", [1]), B))
    assert model.weight is weight
    for t in (weight, weight.grad):
        assert t is not None
        assert (t.placement, t.sbp) == (flow.placement("cpu", [1]), (B,))
    assert weight.grad.tolist() == [[2.0] * 3] * 4
    meta = flow.placement("meta", [0, 1])
    for move in (lambda m: m.to("meta"), lambda m: m.to(device="meta", dtype=torch.float64)):
        moved = move(nn.Linear(3, 4).to_global(line(), S(0)))
        assert isinstance(moved.weight, nn.Parameter)
        assert (moved.weight.placement, moved.weight.sbp, moved.weight.requires_grad) == (
            meta,
            (S(0),),
            True,
        )
    like = flow.ones(2, dtype=torch.float64, placement=line(), sbp=B)
    for module in (nn.Linear(3, 4), nn.Linear(3, 4).to_global(line(), S(0))):
        before = module.weight.detach().clone()
        for moved in (module.to(like), module.to(tensor=like, non_blocking=True)):
            assert (moved.weight.dtype, moved.weight.is_meta) == (torch.float64, False)
            assert torch.equal(moved.weight.detach(), before.double()), "and the values stay"
    local = nn.Linear(3, 4)
    local._apply(lambda t: t.to_global(line(), B))  # type: ignore[attr-defined]
    assert all(p.is_global and isinstance(p, nn.Parameter) for p in local.parameters())
    assert all(p.is_local for p in local._apply(lambda t: t.to_local()).parameters())


@on(2)
def test_synchronised_batch_norm() -> None:
    """SyncBatchNorm on global tensors is batch norm. torch's own version requires GPUs in an
    initialised process group."""
    x = values(5, 3, 2)
    plain, alone = nn.BatchNorm1d(3).double(), x.clone().requires_grad_()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).to_global(line(), B)
    for sbp in (S(0), S(2), B):
        mine = spread(x, sbp, grad=True)
        got, want = model(mine), plain(alone)
        same(got.detach(), want.detach())
        (got**2).sum().backward()
        (want**2).sum().backward()
        same(mine.grad, alone.grad)
        same(model.running_var, plain.running_var)
        alone.grad = None
    assert model(x).is_global


@on(2)
def test_a_module_takes_the_first_ranks_values() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank() + 1)
    model.to_global(line(), S(0))
    same(model.weight, torch.ones(2, 3))


@on(2)
def test_state_dict() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    with torch.no_grad():
        for i, p in enumerate(
            plain.parameters()
        ):  # simulated ranks share torch's generator, so their random numbers differ
            p.copy_(torch.arange(float(p.numel())).view(p.shape) / 10 + i)
    a = copy.deepcopy(plain).to_global(line(), {"0.weight": S(0), "*": B})
    b = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).to_global(
        line(), {"0.weight": S(1), "*": B}
    )
    state = a.state_dict()
    assert all(v.is_global for v in state.values())
    assert not any(v.requires_grad for v in state.values())
    assert b.load_state_dict(state).missing_keys == []
    assert b[0].weight.sbp == (S(1),)
    same(b[0].weight, plain[0].weight.detach())
    c = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).to_global(line(), B)
    c.load_state_dict(plain.state_dict())  # full values, the same on every rank
    same(c[0].weight, plain[0].weight.detach())
    d = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).to_global(line(), B)
    d.load_state_dict(state, assign=True)
    assert d[0].weight.sbp == (S(0),)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(6)).to_global(line(), B).load_state_dict(
            state
        )
    with pytest.raises(RuntimeError, match="Missing key"):
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(1, 1)).to_global(
            line(), B
        ).load_state_dict(state)


Pair = namedtuple("Pair", "x y")


@on(2)
def test_nested() -> None:
    nest = {
        "a": [torch.ones(2), (torch.zeros(3), 5)],
        "b": Pair(torch.ones(1), None),
        "c": "text",
        "d": OrderedDict(e=torch.ones(4)),
    }
    there = flow.to_global(nest, line(), lambda path, t: S(0) if path == "a.1.0" else B)
    assert there["a"][1][0].sbp == (S(0),)
    assert there["a"][1][0].shape == (6,)
    assert there["a"][0].sbp == (B,)
    assert (there["a"][1][1], there["b"].y, there["c"]) == (5, None, "text")
    assert type(there["b"]) is Pair
    assert type(there["d"]) is OrderedDict
    moved = flow.to_global(there, sbp=B)
    assert moved["a"][1][0].sbp == (B,)
    back = flow.to_local(there)
    assert back["a"][1][0].tolist() == [0.0] * 3
    assert json.dumps(back["a"][0].tolist()) == "[1.0, 1.0]"
    assert flow.to_local(there["b"]).x.tolist() == [1.0]


@pytest.mark.parametrize(
    "change", [flow.to_global, flow.utils.global_view.to_global], ids=["flow", "global_view"]
)
def test_dicts_of_other_classes(change: Any) -> None:
    """A tokenizer returns a UserDict. A model's output, a defaultdict and a Counter are not
    constructed from pairs."""
    place, x = flow.placement("cpu", [0]), torch.ones(2)
    given = [OrderedDict(x=x), defaultdict(list, x=x), UserDict(x=x), Counter(words=3)]
    *changed, counted = (
        change(
            [nest],
            place,
            B,
            **({} if change is flow.to_global else {"warn_on_non_tensor_leaf": False}),
        )[0]
        for nest in given
    )
    for before, after in zip(given, changed, strict=False):
        assert type(after) is type(before)
        assert after["x"].is_global
        assert before["x"] is x
        assert flow.to_local(after)["x"].tolist() == [1.0, 1.0]
    assert changed[1]["other"] == []
    assert counted == Counter(words=3)


# ------------------------------------------------------------------------- other functions of torch


@on(2)
def test_local_map() -> None:
    x, w = spread(values(4, 6), S(0), grad=True), spread(values(6, 3), B, grad=True)
    product = flow.local_map(lambda a, b: a @ b, out_sbp=S(0), in_sbp=[S(0), B])
    y = product(x, w)
    assert y.sbp == (S(0),)
    same(y, (full(x) @ full(w)).detach())
    y.square().sum().backward()
    p, q = full(x).clone().requires_grad_(), full(w).clone().requires_grad_()
    (p @ q).square().sum().backward()
    same(x.grad, p.grad)  # type: ignore[arg-type]
    same(w.grad, q.grad)  # type: ignore[arg-type]
    inner = flow.local_map(lambda a, b: a @ b, out_sbp=P, in_sbp=[S(1), S(0)])
    same(inner(x.detach(), w.detach()), full(x) @ full(w))
    both = flow.local_map(
        lambda a: (a.sum(0), {"max": a.amax()}), out_sbp=[P, partial_max], in_sbp=S(0)
    )
    total, most = both(x.detach())
    same(total, full(x).sum(0))
    same(most["max"], full(x).amax())
    made = flow.local_map(lambda n: torch.full((n,), float(rank())), out_sbp=S(0), placement=line())
    assert made(2).tolist() == [0.0, 0.0, 1.0, 1.0]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


@on(2)
def test_local_map_of_a_custom_function() -> None:
    cube = flow.local_map(lambda a: Cube.apply(a), out_sbp=S(0), in_sbp=S(0))
    for sbp in (S(0), S(1), B, P):
        x = spread(values(4, 3), sbp, grad=True)
        cube(x).sum().backward()
        same(x.grad, 3 * full(x) ** 2)
        assert x.grad.sbp == (sbp,)


@on(2)
def test_a_function_of_torch_given_to_local_map() -> None:
    """local_map accepts callables that are not Python functions with a name."""
    x = spread(values(4, 3), S(0))
    same(flow.local_map(torch.exp, out_sbp=S(0))(x), full(x).exp())
    same(flow.local_map(functools.partial(torch.mul, other=2), out_sbp=S(0))(x), 2 * full(x))
    same(
        flow.local_map(nn.Linear(3, 2).double().requires_grad_(False), out_sbp=S(0))(x)[:0],
        torch.empty(0, 2).double(),
    )
    same(
        flow.local_map(Cube.apply, out_sbp=S(0), in_sbp=S(0))(x.requires_grad_()).detach(),
        full(x) ** 3,
    )


@on(2)
def test_torch_functions() -> None:
    """Common functions that scripts use, other than arithmetic, work on global tensors."""
    x = spread(values(4, 3), S(0))
    assert torch.equal(x, x.clone())
    assert torch.allclose(x, x.to_global(sbp=B))
    torch.testing.assert_close(x.to_local(), x.clone().to_local())
    assert x.is_same_size(x.clone())
    assert torch.broadcast_shapes(x.shape, (1, 3)) == (4, 3)
    assert math.isclose(x.sum(), full(x).sum(), rel_tol=1e-9)
    assert sum([x, x]).sbp == (S(0),)
    assert max(x.flatten()) == full(x).max()
    assert sorted(x[:, 0].tolist()) == sorted(full(x)[:, 0].tolist())
    assert torch.no_grad()(lambda: x * 2)().sbp == (S(0),)
    with torch.inference_mode():
        same(x * 2, 2 * full(x))


@pytest.mark.parametrize("w_sbp", [B, S(0), S(1), P])
def test_autocast(w_sbp: Any) -> None:
    x, w, target = values(4, 3).float(), values(3, 2).float(), torch.tensor([0, 1, 1, -100])

    def loss(x: Any, w: Any, target: Any) -> Any:
        y = x @ w
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = x @ w
            assert (
                low.dtype
                == (low.to_local().dtype if low.is_global else low.dtype)
                == torch.bfloat16
            )
            assert F.layer_norm(x, (3,)).dtype == torch.float32
            loss = F.cross_entropy(low, target)
            assert loss.dtype == torch.float32
        assert (x @ w).dtype == y.dtype == torch.float32
        return loss

    def run() -> None:
        ours, plain = spread(w, w_sbp).requires_grad_(), w.clone().requires_grad_()
        got, want = loss(spread(x, S(0)), ours, spread(target, S(0))), loss(x, plain, target)
        got.backward()
        want.backward()
        assert torch.allclose(full(got), want, rtol=2e-2), (full(got), want)
        assert torch.allclose(full(ours.grad), plain.grad, atol=2e-2)

    simulate(2, run)


def components() -> list[Any]:
    def written(x: Any, name: str, value: Any) -> list[complex]:
        setattr(x, name, value)
        return x.tolist()  # type: ignore[no-any-return]

    start, new = torch.tensor([1 + 2j, 3 - 1j, 0j, 1j]), torch.arange(4.0)
    return [
        (written(spread(start, sbp), name, given), written(start.clone(), name, alone))
        for name in ("real", "imag")
        for sbp in (S(0), B, P)
        for given, alone in (
            (3.0, 3.0),
            (np.float32(0.5), 0.5),
            (new, new),
            (new.to_global(line(), B), new),
            (new[:1], new[:1]),
        )
    ]


def test_real_and_imaginary_parts_are_assigned() -> None:
    for rows in run_on(2, components):
        assert len(rows) == 30
        assert all(got == want for got, want in rows), rows


def test_assigning_a_component_of_a_view_writes_into_its_base() -> None:
    def body() -> list[complex]:
        x: Any = spread(torch.ones(4, 2, dtype=torch.complex64), S(0))
        x[:, 0].imag = 5.0
        for real in (torch.ones(2), spread(torch.ones(2), B)):
            with pytest.raises(RuntimeError, match="imag is not implemented"):
                _ = real.imag
        return x.sum(0).tolist()  # type: ignore[no-any-return]

    assert simulate(2, body) == [[4 + 20j, 4 + 0j]] * 2


def on_processes() -> None:
    BODIES.run()


def test_on_processes() -> None:
    run_on(2, on_processes)
