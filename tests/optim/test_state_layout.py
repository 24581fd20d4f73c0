"""optim/state_layout.py: loaded state whose tensors do not have the shape of their parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

import globaltensor as flow
from globaltensor._tensor.global_tensor import GlobalTensor

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
#: Adafactor keeps sums over rows and columns, LBFGS flat gradients in lists.
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.1),
    "LBFGS": lambda params: optim.LBFGS(params, lr=0.1, max_iter=2),
}


def parameters(layout: list[Any] | None) -> list[Any]:
    start = [torch.arange(n, dtype=torch.float64).cos() for n in (12, 3)]
    start[0] = start[0].view(3, 4)
    if layout is None:
        return [t.requires_grad_() for t in start]
    grid = flow.placement("cpu", [[0, 1]] if len(layout) == 2 else [0, 1])
    both = (t.to_global(grid, [B] * len(layout)) for t in start)  # type: ignore[attr-defined]
    first, second = both
    return [first.to_global(sbp=layout).detach().requires_grad_(), second.detach().requires_grad_()]


def steps(optimizer: optim.Optimizer, params: list[Any]) -> None:
    def loss() -> Any:
        optimizer.zero_grad()
        value = sum(((p - 1) ** 2).sum() for p in params)
        value.backward()  # type: ignore[union-attr]
        return value

    for _ in range(2):
        optimizer.step(loss)


def whole(state: Any) -> Any:
    """Return a state with plain full values, as a file of one device has it."""
    if isinstance(state, dict):
        return {k: whole(v) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole(v) for v in state)
    return full(state) if isinstance(state, torch.Tensor) else state


def full(t: Any) -> torch.Tensor:
    if not isinstance(t, GlobalTensor):
        return t  # type: ignore[no-any-return]
    return t.detach().to_global(flow.placement.all("cpu"), B).to_local().clone()  # type: ignore[attr-defined, no-any-return]


def resumed(name: str, file: str, plain: bool) -> list[list[list[float]]]:
    """Return, for each layout, the parameters after a state was saved, loaded and used."""
    results = []
    for layout in ([B], [S(0)], [S(1)], [P], [B, S(0)]):
        params = parameters(layout)
        optimizer = OPTIMIZERS[name](params)
        steps(optimizer, params)
        flow.save(optimizer.state_dict(), file, global_dst_rank=0)
        state = flow.load(file, global_src_rank=0)
        again = [p.detach().clone().requires_grad_() for p in params]
        optimizer = OPTIMIZERS[name](again)
        optimizer.load_state_dict(whole(state) if plain else state)
        steps(optimizer, again)
        results.append([full(p).tolist() for p in again])
    return results


@pytest.mark.parametrize("plain", [False, True], ids=["on one rank", "plain"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.sweep(3)
def test_state_of_another_shape_goes_to_the_ranks_of_its_parameter(
    name: str, plain: bool, ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    params = parameters(None)
    optimizer = OPTIMIZERS[name](params)
    steps(optimizer, params)
    steps(optimizer, params)
    want = [p.detach() for p in params]
    for of_rank in ranks(2, resumed, name, str(tmp_path / "state.pt"), plain):
        for got in of_rank:
            torch.testing.assert_close([torch.tensor(v, dtype=torch.float64) for v in got], want)
