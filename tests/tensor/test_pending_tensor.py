"""Tests of pending tensors: reading ``_local`` never communicates, and whatever receives such a
tensor from user code materializes it first."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.bodies import values
from torch import nn
from torch.utils.checkpoint import checkpoint

import globaltensor as flow
from globaltensor._tensor.pending_tensor import PendingTensor
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate

B, S = flow.sbp.broadcast, flow.sbp.split


def view_behind_its_base(place: Any) -> Any:
    """Return a view [8] whose base [4, 2] was written into."""
    base = values(4, 2) if place is None else values(4, 2).to_global(place, B).to_global(sbp=S(1))
    view = base.view(8)
    base.add_(1)
    view.base = base  # a base without a reference cannot be written into
    return view


def unread_mean(place: Any) -> Any:
    """Return a mean loss that was not read, without its gradient."""
    logits, target = values(6, 3).requires_grad_(), torch.tensor([0, 1, 2, -100, 1, 0])
    if place is not None:
        logits, target = (t.to_global(place, B).to_global(sbp=S(0)) for t in (logits, target))
    loss = F.cross_entropy(logits, target)
    mean = loss.detach()
    mean.base = loss
    return mean


PENDING: dict[str, Callable[[Any], Any]] = {"view": view_behind_its_base, "mean": unread_mean}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, other: Any) -> Any:
        ctx.save_for_backward(other)
        return x + other

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (other,) = ctx.saved_tensors
        return grads[0] * other, other


class Buffers(nn.Module):
    def __init__(self, t: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones_like(t))
        self.frozen = nn.Parameter(t, requires_grad=False)
        self.register_buffer("buffer", t)

    def forward(self, x: Any) -> Any:
        return self.weight * x + self.buffer + self.frozen


class Graph(flow.nn.Graph):
    def __init__(self, module: Any = None) -> None:
        super().__init__()
        self.module = module

    def build(self, x: Any) -> Any:
        return self.module(x) if self.module is not None else x.exp()


def alone(t: Any) -> Any:
    """Return the tensor without the reference to its base, which may be no leaf."""
    del t.base
    return t


def write(t: Any) -> None:
    """Make a view pending again."""
    if t.base.dim():
        with torch.no_grad():
            t.base.add_(1)


def leaf_like(t: Any) -> Any:
    return torch.ones_like(t).requires_grad_()


def with_data(t: Any) -> Any:
    out = torch.zeros_like(t)
    out.data = t
    return out


def with_grad(t: Any) -> Any:
    leaf = leaf_like(t)
    leaf.grad = t
    return leaf.grad


def stepped_with(t: Any) -> Any:
    leaf = leaf_like(t)
    optimizer = torch.optim.SGD([leaf], lr=0.5)
    leaf.grad = t
    for _ in range(3):
        optimizer.step()
        write(t)
    return leaf


def through_hook(t: Any) -> Any:
    leaf = leaf_like(t)
    product = leaf * 2
    product.register_hook(lambda grad: t)
    product.sum().backward()
    return leaf.grad


def from_gradient(t: Any) -> Any:
    leaf = leaf_like(t)
    (leaf * leaf).backward(t)
    return leaf.grad


def differentiated(t: Any) -> Any:
    leaf = leaf_like(t)
    return torch.autograd.grad(leaf * leaf, leaf, t)


def through_function(t: Any) -> Any:
    leaf = leaf_like(t)
    out = Doubled.apply(leaf, t)
    out.sum().backward()
    return out, leaf.grad


def recomputed(t: Any) -> Any:
    leaf = leaf_like(t)
    out = [
        checkpoint(lambda x, y: (x * y).exp(), leaf, t, use_reentrant=reentrant)
        for reentrant in (False, True)
    ]
    sum(out).sum().backward()
    return *out, leaf.grad


def in_hooked_module(t: Any) -> Any:
    leaf, module = leaf_like(t), Buffers(t)
    seen: list[Any] = []
    module.register_full_backward_hook(lambda m, inputs, outputs: seen.extend(inputs))
    module(leaf * t).sum().backward()
    return seen


def trained(t: Any) -> Any:
    module = Buffers(t)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for clearing in (optimizer, module, optimizer):
        module(t).sum().backward()
        write(t)
        optimizer.step()
        write(t)
        clearing.zero_grad()
        write(t)
    return list(module.parameters())


def swapped(t: Any) -> Any:
    other = torch.zeros_like(t)
    torch.utils.swap_tensors(alone(t), other)
    return other


def made_global(t: Any, back: bool = False) -> Any:
    module = Buffers(t)
    if t.is_global:
        module.to_global(t.placement, B)  # type: ignore[operator]
        if back:
            module.to_local()  # type: ignore[operator]
    return module


def in_replicas(t: Any) -> Any:
    module: Any = Buffers(t)
    if t.is_global and t.dim():  # (the mean is partial, which is refused)
        module = flow.nn.parallel.DistributedDataParallel(module)
    return module(torch.ones_like(t))


USES: dict[str, Callable[[Any], Any]] = {
    "method": lambda t: t.exp(),
    "function": lambda t: torch.exp(t),
    "attribute": lambda t: t.mT if t.dim() > 1 else t.real,
    "operator": lambda t: 3 - t,
    "second operand": lambda t: torch.ones_like(t) / t,
    "in a list": lambda t: torch.stack([torch.ones_like(t), t]),
    "by name": lambda t: torch.add(torch.ones_like(t), other=t),
    "einsum": lambda t: torch.einsum("...,...->...", [torch.ones_like(t), t]),
    "where": lambda t: torch.where(t > 1, t, torch.zeros_like(t)),
    "copy_": lambda t: torch.zeros_like(t).copy_(t),
    "copy_ as a function": lambda t: torch.Tensor.copy_(torch.zeros_like(t), t),
    "out": lambda t: torch.exp(t, out=torch.zeros_like(t)),
    "out of the same": lambda t: torch.exp(torch.ones_like(t), out=t),
    "into a plain tensor": lambda t: torch.zeros(t.shape, dtype=t.dtype).copy_(t),
    "written into": lambda t: t.mul_(2),
    "filled": lambda t: t.fill_(2),
    "random": lambda t: torch.normal(t, 0.0),
    "drawn into": lambda t: t.normal_(generator=torch.Generator().manual_seed(1)),
    "item set": lambda t: t.__setitem__(..., 3.0) or t,
    "foreach": lambda t: torch._foreach_add([torch.ones_like(t)], [t]),
    "foreach in place": lambda t: torch._foreach_add_([torch.zeros_like(t), t], [t, t]),
    "foreach norm": lambda t: torch._foreach_norm([t]),
    "contiguous": lambda t: t.contiguous(),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "detach as a function": lambda t: torch.detach(t),
    "detach_": lambda t: t.detach_() if t.is_global else t.detach(),
    "data": lambda t: t.data,
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "requires_grad_": lambda t: t.requires_grad_(),
    "double": lambda t: t.float(),
    "to": lambda t: t.to(torch.float32, copy=True),
    "type": lambda t: t.type(torch.float32),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "sum as a number": lambda t: float(t.sum()),
    "text": lambda t: str(t)[:30],
    "format": lambda t: f"{t.sum():.3f}",
    "contains": lambda t: 2.0 in t,
    "equal": lambda t: torch.equal(torch.zeros_like(t), t),
    "is_contiguous": lambda t: t.is_contiguous(),
    "is_contiguous as a function": lambda t: torch.Tensor.is_contiguous(t),
    "stride": lambda t: t.stride(),
    "version": lambda t: t.clone()._version,
    "retains_grad": lambda t: t.retains_grad,
    "output_nr": lambda t: t.output_nr,
    "grad_fn": lambda t: t.grad_fn is None,
    "grad": lambda t: t.grad is None,
    "copy": copy.copy,
    "deepcopy": lambda t: copy.deepcopy(alone(t)),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "set_": lambda t: torch.zeros_like(t).set_(t),
    "with_data": with_data,
    "with_grad": with_grad,
    "stepped_with": stepped_with,
    "through_hook": through_hook,
    "from_gradient": from_gradient,
    "differentiated": differentiated,
    "through_function": through_function,
    "recomputed": recomputed,
    "in_hooked_module": in_hooked_module,
    "trained": trained,
    "swapped": swapped,
    "is_set_to": lambda t: t.is_set_to(t),
    "storage": lambda t: (t.untyped_storage().nbytes() > 0, t.data_ptr() != 0),
    "same dtype": lambda t: t.to(t.dtype).double(),
    "same layout": lambda t: t.to_global(sbp=t.sbp) if t.is_global else t,
    "full value": lambda t: t.to_global(sbp=B).to_local() if t.is_global else t,
    "module state": lambda t: copy.deepcopy(Buffers(alone(t))).state_dict()["buffer"],
    "module made global": lambda t: made_global(t).buffer,
    "module made local": lambda t: made_global(t, back=True).buffer,
    "replicas": in_replicas,
    "local_map": lambda t: (flow.local_map(torch.neg, t.sbp) if t.is_global else torch.neg)(t),
    "summary": lambda t: bool(flow.utils.memory_summary(Buffers(t))) if t.is_global else True,
    "check_replicas": lambda t: flow.check_replicas(t) if t.is_global else None,
    "saved": lambda t: flow.save({"t": t}, os.devnull, global_dst_rank=0) if t.is_global else None,
    "graph": lambda t: Graph()(t) if t.is_global else t.exp(),
    "graph of a module": lambda t: (Graph if t.is_global else lambda m: m)(Buffers(t))(
        torch.ones_like(t)
    ),
}


def comparable(result: Any) -> list[Any]:
    """Return the tensors of a result as plain ones, and other values as they are."""
    if isinstance(result, torch.Tensor):
        plain = torch.tensor(result.detach().tolist(), dtype=torch.float64)
        return [plain.to(result.dtype)]
    if isinstance(result, (list, tuple)):
        return [each for r in result for each in comparable(r)]
    return [result]


@pytest.mark.parametrize("kind", PENDING)
@pytest.mark.parametrize("use", USES)
@pytest.mark.sweep(2)
def test_a_use_has_the_result_of_one_device(use: str, kind: str) -> None:
    want = comparable(USES[use](PENDING[kind](None)))

    def on_ranks() -> None:
        t = PENDING[kind](flow.placement.all("cpu"))
        assert isinstance(t, PendingTensor)
        assert t._is_pending()
        got = comparable(USES[use](t))
        assert len(got) == len(want)
        for mine, plain in zip(got, want, strict=True):
            if isinstance(plain, torch.Tensor):
                torch.testing.assert_close(mine, plain)
            else:
                assert mine == plain

    simulate(2, on_ranks)


@pytest.mark.parametrize("kind", PENDING)
def test_the_local_tensor_is_never_fetched_by_reading_it(kind: str) -> None:
    def on_ranks() -> None:
        t = PENDING[kind](flow.placement.all("cpu"))
        with record_collectives() as log, pytest.raises(AssertionError, match="_materialize"):
            t._local  # noqa: B018
        assert not log
        assert t._is_pending()
        assert t._materialize() is t
        assert t._local is t._stored

    simulate(2, on_ranks)


#: Uses that need no value, so that one rank alone may make them.
WITHOUT_VALUES: dict[str, Callable[[Any], Any]] = {
    "to its dtype": lambda t: t.to(t.dtype),
    "to its layout": lambda t: t.to_global(sbp=t.sbp),
    "another tensor of its dtype": lambda t: torch.zeros(2).to(t),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda t: t.new_zeros(3),
    "is_contiguous": lambda t: t.is_contiguous(),
    "is_complex": torch.is_complex,
}


@pytest.mark.parametrize("kind", PENDING)
@pytest.mark.parametrize("use", WITHOUT_VALUES)
def test_what_needs_no_value_fetches_none(use: str, kind: str) -> None:
    def on_ranks() -> None:
        t = PENDING[kind](flow.placement.all("cpu"))
        with record_collectives() as log:
            WITHOUT_VALUES[use](t)
        assert not log
        assert t._is_pending()

    simulate(2, on_ranks)
