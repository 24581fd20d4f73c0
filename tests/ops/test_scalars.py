"""Tests that 0-dim tensors move between placements automatically, as torch moves them between
devices. Tensors with dims do not move."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import PlacementError

B, S = flow.sbp.broadcast, flow.sbp.split
PLACES = [[0], [1, 2], [2, 0]]
SHAPES = [(3, 4), (5,), (2, 3)]


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]


def spread(value: torch.Tensor, ranks: list[int], sbp: flow.sbp.sbp) -> torch.Tensor:
    everywhere = value.to_global(flow.placement("cpu", [0, 1, 2]), B, check_meta=False)
    return everywhere.to_global(flow.placement("cpu", ranks), sbp)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("sbp", [B, S(0)])
def test_gradients_of_several_placements_are_clipped_together(
    norm: float, foreach: bool | None, sbp: flow.sbp.sbp
) -> None:
    plain = [torch.nn.Parameter(v) for v in values()]
    for p in plain:
        p.grad = p.detach() * 3
    want = torch.nn.utils.clip_grad_norm_(plain, 1.0, norm)

    def body() -> tuple[float, list[np.ndarray]]:
        parameters = [
            torch.nn.Parameter(spread(v, ranks, sbp))
            for v, ranks in zip(values(), PLACES, strict=True)
        ]
        for p in parameters:
            p.grad = p.detach() * 3
        total = torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm, foreach=foreach)
        return total.item(), [p.grad.numpy() for p in parameters]

    for total, grads in simulate(3, body):
        assert total == pytest.approx(want.item(), rel=1e-12)
        for got, p in zip(grads, plain, strict=True):
            np.testing.assert_allclose(got, p.grad.numpy(), rtol=1e-12)


def test_numbers_meet_where_the_tensor_lies() -> None:
    first, second, _ = values()

    def body() -> tuple[np.ndarray, list[int], list[str]]:
        x, y = spread(first, [0], B), spread(second, [1, 2], S(0))
        with record_collectives() as log:
            out = x * y.sum()
        return out.numpy(), out.placement.flat, [t.kind for t in log]

    for got, where, log in simulate(3, body):
        np.testing.assert_allclose(got, (first * second.sum()).numpy(), rtol=1e-12)
        assert list(where) == [0]
        assert len(log) <= 2


def test_numbers_alone_meet_on_all_their_ranks() -> None:
    def body() -> tuple[float, list[int]]:
        out = sum(spread(v, ranks, B).sum() for v, ranks in zip(values(), PLACES, strict=True))
        return out.item(), sorted(out.placement.flat)

    want = sum(v.sum().item() for v in values())
    for got, where in simulate(3, body):
        assert got == pytest.approx(want, rel=1e-12)
        assert where == [0, 1, 2]


def test_gradients_go_back_to_where_the_numbers_came_from() -> None:
    first, second, _ = (v.requires_grad_() for v in values())
    (first.sum() * second).sum().backward()

    def body() -> list[np.ndarray]:
        x, y = (
            spread(v.detach(), ranks, sbp).requires_grad_()
            for v, ranks, sbp in ((first, [0], B), (second, [1, 2], S(0)))
        )
        (x.sum() * y).sum().backward()
        return [x.grad.numpy(), y.grad.numpy()]

    for grads in simulate(3, body):
        for got, v in zip(grads, (first, second), strict=True):
            np.testing.assert_allclose(got, v.grad.numpy(), rtol=1e-12)


def test_tensors_with_dims_do_not_move_by_themselves() -> None:
    def body() -> None:
        spread(torch.ones(2), [0], B) + spread(torch.ones(2), [1], B)

    with pytest.raises(PlacementError, match=r"different placements(.|\n)*to_global"):
        simulate(3, body)
