"""Tests of conversions between global and local tensors and modules: gradients on all ranks,
including ranks outside the placement, and errors that change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bodies import values

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import SbpError


def test_ranks_outside_agree_that_a_leaf_has_a_gradient() -> None:
    def on_ranks() -> None:
        one: Any = flow.placement("cpu", [1])
        rows: Any = values(4, 3)
        x = rows.to_global(one, flow.sbp.split(0)).detach().requires_grad_()
        back = x.to_local(grad_sbp=flow.sbp.split(0)).to_global(one, flow.sbp.split(0))
        back.square().sum().backward()
        torch.testing.assert_close(torch.from_numpy(x.grad.numpy()), 2 * rows)

    simulate(2, on_ranks, timeout=20.0)


def test_a_module_that_cannot_be_laid_out_so_stays_as_it_was() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    with pytest.raises(SbpError, match=r"1\.num_batches_tracked of Sequential: sbp splits dim 0"):
        model.to_global(flow.placement("cpu", [0]), {"*": flow.sbp.split(0)})
    assert not any(t.is_global for t in (*model.parameters(), *model.buffers()))


def test_local_map_takes_plain_tensors_and_other_arguments() -> None:
    def on_ranks() -> None:
        line: Any = flow.placement("cpu", [0, 1])
        B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
        x, w = values(5, 3).requires_grad_(), values(3, 4, seed=1).requires_grad_()
        (3 * (x @ w)).square().sum().backward()
        for in_sbp, out in (
            ((S(1), S(0)), P),
            ((S(0), B), S(0)),
            ((None, S(1), S(0)), P),
            ((None, S(0), None), S(0)),
        ):
            named = len(in_sbp) == 3
            plain = w.detach().clone().requires_grad_()
            ours = x.detach().to_global(line, B).to_global(sbp=S(0)).detach().requires_grad_()  # type: ignore[attr-defined]
            run = flow.local_map(
                (lambda scale, a, b: scale * (a @ b)) if named else (lambda a, b: 3 * (a @ b)),
                out,
                in_sbp,
            )
            run(*(3, ours, plain) if named else (ours, plain)).square().sum().backward()
            torch.testing.assert_close(torch.from_numpy(ours.grad.numpy()), x.grad)
            if in_sbp[-1] is not None:
                torch.testing.assert_close(plain.grad, w.grad)
        with pytest.raises(SbpError, match="in_sbp has 3 entries"):
            flow.local_map(lambda scale, a, b: a, S(0), (S(0), S(0), B))(3, ours, plain)
        scaled = flow.local_map(lambda a, b: a * b, S(0), (S(0), None))(ours, 2.0)
        assert torch.equal(torch.from_numpy(scaled.detach().numpy()), 2 * x.detach())

    simulate(2, on_ranks, timeout=20.0)


def test_parts_without_elements_stay_in_the_graph_of_complex_numbers() -> None:
    def on_ranks() -> None:
        line: Any = flow.placement("cpu", [0, 1])
        for shape in ((1, 2), (0, 2), (3, 2)):
            x: Any = values(*shape)
            x = (
                x.to_global(line, flow.sbp.broadcast)
                .to_global(sbp=flow.sbp.split(0))
                .detach()
                .requires_grad_()
            )
            torch.view_as_real(
                2j * torch.view_as_complex(x)
            ).sum().backward()  # the gradient of a sum is one number, expanded
            torch.testing.assert_close(
                torch.from_numpy(x.grad.numpy()),
                torch.tensor([2.0, -2.0], dtype=torch.float64).expand(shape),
            )

    simulate(2, on_ranks, timeout=20.0)


def test_an_order_of_memory_is_asked_for_by_to() -> None:
    def on_ranks() -> None:
        line: Any = flow.placement("cpu", [0, 1])
        images: Any = values(3, 2, 4, 5)
        x = images.to_global(line, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
        y = x.to(memory_format=torch.channels_last)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert x.to(memory_format=torch.preserve_format) is x
        torch.testing.assert_close(torch.from_numpy(y.numpy()), images, rtol=0, atol=0)
        layer: Any = torch.nn.Conv2d(2, 3, 2).to_global(line, flow.sbp.broadcast)  # type: ignore[operator]
        assert layer.to(memory_format=torch.channels_last).weight.is_contiguous(
            memory_format=torch.channels_last
        )

    simulate(2, on_ranks, timeout=20.0)
