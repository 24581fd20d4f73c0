"""The same samples on torch's own distributed tensors (DTensor), with two ranks simulated in one
process. The coverage report compares with these outcomes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from .opinfo import Call, Outcome, calls_of, first_line, fixed_layouts, name_of, shown
from .oracle import tensors_in

__all__ = ["outcomes_of_dtensor"]

RANKS = 2


def outcomes_of_dtensor(op: Any, samples: int) -> Iterator[Outcome]:
    """Yield the outcomes of ``opinfo.outcomes`` for DTensor: forward and backward in the fixed
    layouts on two ranks. Any exception is an "error"."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=RANKS)
    for number, call, want in calls_of(op, samples):
        if call.what != "forward" or not call.tensors:
            continue
        for layouts in fixed_layouts(call.tensors, 1):
            uneven = any(
                t.shape[e.dim] % RANKS
                for t, s in zip(call.tensors, layouts, strict=True)
                for e in s
                if e.is_split
            )
            for what, how, why in _on(call, layouts, want):
                yield Outcome(
                    name_of(op),
                    number,
                    (RANKS,),
                    shown(call.tensors, layouts),
                    what,
                    how,
                    "",
                    why,
                    uneven,
                )


def _on(call: Call, layouts: Any, want: Any) -> list[tuple[str, str, str]]:
    what, found = "forward", []
    try:
        with warnings.catch_warnings(), LocalTensorMode(RANKS):
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", (RANKS,))
            ours = [
                distribute_tensor(
                    t.detach().clone(),
                    mesh,
                    [Shard(e.dim) if e.is_split else Replicate() for e in s],
                )
                .detach()
                .requires_grad_(g)
                for t, s, g in zip(call.tensors, layouts, call.leaves(), strict=True)
            ]
            torch.manual_seed(0)
            result = call.run(ours)
            why = call.differs(result, want[0], _gathered)
            found.append(("forward", "wrong" if why else "right", why))
            if not want[1]:
                return found
            what = "backward"
            if _back(call, result, mesh):
                grads = (
                    (i, t.grad, g)
                    for i, (t, g) in enumerate(zip(ours, want[1], strict=True))
                    if g is not None and g.any()
                )
                why = next(
                    (
                        f"gradient {i}: {w}"
                        for i, t, g in grads
                        if (w := "missing" if t is None else call.differs(t, g, _gathered))
                    ),
                    "",
                )
                found.append(("backward", "wrong" if why else "right", why))
    except Exception as error:
        found.append((what, "error", first_line(error)))
    return found


def _gathered(x: Any) -> torch.Tensor:
    value = x.full_tensor() if isinstance(x, DTensor) else x
    parts = list(value._local_tensors.values()) if isinstance(value, LocalTensor) else [value]
    # A value that differs between the ranks becomes NaN, which compares unequal.
    return (
        parts[0].detach()
        if all(torch.equal(p.nan_to_num(), parts[0].nan_to_num()) for p in parts[1:])
        else torch.full_like(parts[0], float("nan"))
    )


def _back(call: Call, result: Any, mesh: Any) -> bool:
    """Run backward like ``Call.back``, with replicated weights: DTensor does not mix with plain
    tensors."""
    outs = [o for o in tensors_in([result]) if o.requires_grad]
    total: Any = 0
    for i, o in enumerate(outs):
        o = torch.real(o) + 2 * torch.imag(o) if o.is_complex() else o
        weight = call.weight(i, torch.empty(o.shape, dtype=o.dtype))
        total = (
            total
            + (
                o
                * (
                    distribute_tensor(weight, mesh, [Replicate()])
                    if isinstance(o, DTensor)
                    else weight
                )
            ).sum()
        )
    if outs and not call.drawn and any(call.leaves()):
        total.backward()
        return True
    return False
