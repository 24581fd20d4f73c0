"""Functions on global tensors, compared with plain torch on simulated ranks. The layouts of all
operands are drawn, forward and gradient are compared, and the calls use the whole library."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import noted
from globaltensor.sbp import Sbp, broadcast, partial_sum, split

from .oracle import close, swapped, tensors_in

GRIDS = ((2,), (3,), (2, 2))


def compare(
    func: Callable[..., Any],
    *args: Any,
    grids: Sequence[Sequence[int]] = GRIDS,
    draws: int = 6,
    fallback: bool = False,
    **kwargs: Any,
) -> None:
    """Run ``func`` on global operands in ``draws`` drawn layouts on each grid. Results and
    gradients must equal plain torch's."""
    tensors = tensors_in([args, kwargs])
    for grid in grids:
        choose = random.Random(f"{func} {grid}")
        layouts = [[_draw(t, len(grid), choose) for t in tensors] for _ in range(draws)]
        layouts.insert(0, [[split(0) if t.ndim else broadcast] * len(grid) for t in tensors])
        n = int(torch.tensor(grid).prod())
        simulate(n, _on_rank, func, tensors, args, kwargs, grid, layouts, fallback, timeout=20.0)


def _draw(t: torch.Tensor, axes: int, choose: random.Random) -> list[Sbp]:
    kinds = [
        broadcast,
        *[split(d) for d in range(t.ndim)] * 2,
        *([partial_sum] if t.is_floating_point() else []),
    ]
    return [choose.choice(kinds) for _ in range(axes)]


def _on_rank(
    func: Any, tensors: Any, args: Any, kwargs: Any, grid: Any, layouts: Any, fallback: bool
) -> None:
    placement = flow.placement(
        "cpu", torch.arange(int(torch.tensor(grid).prod())).reshape(tuple(grid)).tolist()
    )
    whole = [broadcast] * len(grid)
    for layout in layouts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if fallback else "error")
                _one(func, tensors, args, kwargs, placement, whole, layout)
        except Exception as error:
            shown = [
                f"{list(t.shape)} {' '.join(e.short for e in s)}"
                for t, s in zip(tensors, layout, strict=True)
            ]
            noted(
                error, f"in {getattr(func, '__name__', func)} of {', '.join(shown)} on {list(grid)}"
            )
            raise


def _one(
    func: Any, tensors: Any, args: Any, kwargs: Any, placement: Any, whole: Any, layout: Any
) -> None:
    plain = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    ours = [
        t.detach()
        .clone()
        .to_global(placement=placement, sbp=whole)
        .to_global(placement=placement, sbp=s)
        .detach()
        .requires_grad_(t.is_floating_point())
        for t, s in zip(tensors, layout, strict=True)
    ]
    want = tensors_in(_call(func, args, kwargs, plain))
    got = tensors_in(_call(func, args, kwargs, ours))
    assert len(got) == len(want), f"{len(got)} results, not {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.is_global
        assert (g.dtype, g.shape) == (w.dtype, w.shape), (
            f"result {i} is {g.dtype} {list(g.shape)}, not {w.dtype} {list(w.shape)}"
        )
        close(full(g), w.detach(), f"result {i}")
    smooth = [i for i, w in enumerate(want) if w.requires_grad]
    if not smooth:
        return
    gen = torch.Generator().manual_seed(13)
    want, got = (
        [torch.real(t) + 2 * torch.imag(t) if t.is_complex() else t for t in ts]
        for ts in (want, got)
    )
    weights = [torch.randn(want[i].shape, dtype=want[i].dtype, generator=gen) for i in smooth]
    total = sum((want[i] * w).sum() for i, w in zip(smooth, weights, strict=True))
    total.backward()  # type: ignore[union-attr]
    mine = sum(
        (got[i] * w.to_global(placement=placement, sbp=whole)).sum()
        for i, w in zip(smooth, weights, strict=True)
    )
    mine.backward()  # type: ignore[union-attr]
    for i, (o, p) in enumerate(zip(ours, plain, strict=True)):
        if p.grad is not None:
            assert o.grad is not None, f"operand {i} got no gradient"
            close(full(o.grad), p.grad, f"gradient of operand {i}")


def full(x: Any) -> torch.Tensor:
    """Return the full value, on every rank."""
    return (
        x.detach().to_global(placement=x.placement, sbp=[broadcast] * x.placement.axes).to_local()
    )


def _call(func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
    these = iter(tensors)
    return func(*swapped(args, these), **swapped(kwargs, these))
