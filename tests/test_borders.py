"""The borders between global and local tensors: gradients on all ranks, those outside the placement too."""

from __future__ import annotations

from typing import Any

import torch
from support.bodies import values

import globaltensor as flow
from globaltensor.distributed.simulate import simulate


def test_ranks_outside_agree_that_a_leaf_has_a_gradient() -> None:
    def on_ranks() -> None:
        one: Any = flow.placement("cpu", [1])
        rows: Any = values(4, 3)
        x = rows.to_global(one, flow.sbp.split(0)).detach().requires_grad_()
        back = x.to_local(grad_sbp=flow.sbp.split(0)).to_global(one, flow.sbp.split(0))
        back.square().sum().backward()
        torch.testing.assert_close(torch.from_numpy(x.grad.numpy()), 2 * rows)

    simulate(2, on_ranks, timeout=20.0)
