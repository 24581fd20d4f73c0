"""Tests of torch.nn.utils on global modules: parametrizations, weight norm and vectors of
parameters, before and after the module becomes global."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.bodies import values
from support.everywhere import compare, full
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters
from torch.nn.utils import weight_norm as older_weight_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import InplaceError

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
LAYOUTS = (B, S(0), {"0.weight": S(0), "0.bias": S(0), "2.weight": S(1), "*": B})


class Squashed(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.tanh()

    def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
        return w.clamp(-0.9, 0.9).atanh()


def squash(m: Any) -> None:
    register_parametrization(m[0], "weight", Squashed())


def squash_and_assign(m: Any) -> None:
    squash(m)
    m[0].weight = m[0].weight.detach() * 0.5


def squash_and_leave(m: Any) -> None:
    squash(m)
    remove_parametrizations(m[0], "weight")


def norm(m: Any) -> None:
    parametrizations.weight_norm(m[0])
    parametrizations.weight_norm(m[2], dim=None)


def norm_columns(m: Any) -> None:
    parametrizations.weight_norm(m[2], dim=1)


def older_norm(m: Any) -> None:
    older_weight_norm(m[0])


def halve(m: Any) -> None:
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(m.parameters()) * 0.5, m.parameters())


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "change", [squash, squash_and_assign, squash_and_leave, norm, norm_columns, older_norm, halve]
)
def test_of_global_modules(change: Callable[[Any], None]) -> None:
    plain, start = network(), network()
    change(plain)
    plain(values(6, 5)).square().sum().backward()
    held = dict(plain.named_parameters())

    def body() -> None:
        line = flow.placement.all("cpu")
        for layout in LAYOUTS:
            model = copy.deepcopy(start).to_global(line, layout)
            sbps = {name: p.sbp for name, p in model.named_parameters()}
            change(model)
            model(values(6, 5).to_global(line, B).to_global(sbp=S(0))).square().sum().backward()
            for name, p in model.named_parameters():
                torch.testing.assert_close(full(p), held[name].detach())
                torch.testing.assert_close(full(p.grad), held[name].grad)
                origin = name.replace("parametrizations.", "").replace(".original", "")
                assert change is halve or sbps.get(origin, p.sbp) == p.sbp, name

    simulate(2, body, timeout=20.0)


def test_set() -> None:
    def body() -> None:
        line = flow.placement.all("cpu")
        x, y = (values(5, 3, seed=i).to_global(line, B).to_global(sbp=S(i)) for i in (0, 1))
        x.set_(y)
        assert x.sbp == (S(0),)
        assert torch.equal(full(x), full(y))
        z = y.clone()
        y.set_(z)
        z.zero_()
        assert not full(y).any(), "what lies alike shares its memory"
        p = nn.Parameter(x)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            p.set_(z)
        with torch.no_grad():
            p.set_(values(2, 3).to_global(line, B))
        (p * 2).sum().backward()
        assert torch.equal(full(p.grad), torch.full((2, 3), 2.0).double())
        with pytest.raises(InplaceError, match="is the memory of one rank's local tensor"):
            x.set_(torch.zeros(3).untyped_storage())
        with pytest.raises(RuntimeError, match="Could not set"):
            x.set_(z.float())

    simulate(2, body, timeout=20.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dim", "shape"), [(0, (5, 1, 1)), (1, (1, 4, 1)), (2, (1, 1, 3)), (-1, ())]
)
@pytest.mark.sweep(4)
def test_weight_norm_runs_where_its_operands_lie(dim: int, shape: tuple[int, ...]) -> None:
    v, g = values(5, 4, 3), values(*shape, seed=1)
    compare(torch._weight_norm, v, g, dim)
    compare(torch.norm_except_dim, v, 2, dim)


def test_norms_of_gradients_with_empty_parts() -> None:
    """Norms of gradients are right with empty shards. A rank without elements of a tensor does not
    contribute to the maximum. Norms of any order work, in lists and one by one."""
    gradients = [values(2, 3), values(1, seed=1), values(5, seed=2)]
    orders = (float("inf"), -float("inf"), 1.0, 2.0, 0.5, 0.0)
    want = [nn.utils.get_total_norm(gradients, order) for order in orders]

    def body() -> None:
        line = flow.placement.all("cpu")
        put = [g.to_global(line, B).to_global(sbp=S(0)) for g in gradients]
        for order, expected in zip(orders, want, strict=True):
            for foreach in (True, False):
                torch.testing.assert_close(
                    full(nn.utils.get_total_norm(put, order, foreach=foreach)), expected
                )

    simulate(3, body, timeout=20.0)
