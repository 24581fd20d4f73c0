"""The borders between global and local tensors and modules: gradients on all ranks, those outside the placement too; errors that change nothing."""

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
