"""Compare replicas of tensors between ranks.

Ranks of a broadcast layout hold the same values, and only the program can have made them differ.
Users call `check_replicas`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .._base import torch_private
from .._tensor.global_tensor import GlobalTensor
from .._tensor.pending_tensor import materialize_all
from .._tensor.plain_operands import content_digest
from ..distributed.world import world
from ..errors import DivergenceError
from ..sharding.spec import Spec

__all__ = ["check_replicas", "replica_ranks"]

_SHOWN = 8  # maximum number of tensors, or ranks, that an error names


def replica_ranks(spec: Spec, rank: int) -> tuple[int, ...]:
    """Return the sorted ranks that hold the same local tensor as ``rank``, with ``rank`` itself.

    The result is empty outside the placement.

    >>> from globaltensor.sharding.placement import placement
    >>> from globaltensor.sbp import broadcast, split
    >>> replica_ranks(Spec.make((4,), torch.float32, placement("cpu", [[0, 1], [2, 3]]), [broadcast, split(0)]), 3)
    (1, 3)
    """  # noqa: E501
    if rank not in spec.placement._coordinates:
        return ()
    axes = [a for a, e in enumerate(spec.layout) if e.is_broadcast]
    return tuple(sorted(spec.placement.fiber(rank, axes))) if axes else (rank,)


def check_replicas(
    *targets: torch.nn.Module | torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
) -> None:
    """Compare the replicas of tensors between ranks, bit by bit. Collective.

    ``targets``: modules (parameters and buffers), optimizers (their state), tensors, or iterables
    of tensors, the same on every rank. A global tensor is compared along the axes on which it is
    broadcast. A plain tensor is compared between all ranks. Raises DivergenceError on every rank,
    with the names of the tensors and ranks that differ.

    Ranks that run the same operations keep their replicas equal, and each collective compares the
    operations. This check also finds writes into ``to_local()`` on one rank, or other files loaded
    there. `flow.check_ranks` does the same for every operand.

    >>> import globaltensor as flow
    >>> check_replicas(torch.nn.Linear(4, 2).to_global(flow.placement("cpu", [0]), flow.sbp.broadcast))
    """  # noqa: E501
    this_world = world()
    if this_world.size == 1:
        return
    own_digests = {}
    for name, tensor in _named_tensors(targets):
        if isinstance(tensor, GlobalTensor):
            group = replica_ranks(tensor._spec, this_world.rank)
            if len(group) > 1:
                own_digests[name] = group, content_digest(tensor._local.detach()).hex()
        else:
            own_digests[name] = tuple(range(this_world.size)), content_digest(tensor.detach()).hex()
    everyone = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        own_digests, "check_replicas"
    )
    wrong = []
    for name in dict.fromkeys(n for held in everyone for n in held):
        for group in dict.fromkeys(held[name][0] for held in everyone if name in held):
            digests = {r: everyone[r][name][1] for r in group if name in everyone[r]}
            if len(set(digests.values())) > 1 or len(digests) < len(group):
                wrong.append(f"  {name}: {_format_groups(digests, group)}\n")
    if wrong:
        more = f"  and {len(wrong) - _SHOWN} more\n" if len(wrong) > _SHOWN else ""
        raise DivergenceError(
            f"the replicas of {len(wrong)} "
            f"tensor{'s' if len(wrong) > 1 else ''} differ between ranks:\n"
            f"{''.join(wrong[:_SHOWN])}{more}"
            "Something has changed them on some ranks only: a write into to_local(), a different "
            "file, a different random seed. To make them equal again, send the first rank's "
            "values to all ranks: "
            "x.copy_(x.to_local().to_global(x.placement, sbp=flow.sbp.broadcast))"
        )


def _format_groups(digests: dict[int, str], group: Iterable[int]) -> str:
    held: dict[str, list[int]] = {}
    for r in group:
        held.setdefault(digests.get(r, "no such tensor"), []).append(r)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN]))}: {text}"
        for text, ranks in held.items()
    )


def _named_tensors(targets: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of the targets once, with a name."""
    seen: set[int] = set()
    for i, target in enumerate(targets):
        for name, tensor in _tensors_of(target, f"argument {i}"):
            if (
                id(tensor) not in seen
                and not torch_private.is_fake(tensor)
                and not tensor.is_meta
                and tensor.layout is torch.strided
            ):
                seen.add(id(tensor))
                materialize_all(tensor)
                yield name, tensor


def _tensors_of(target: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(target, torch.Tensor):
        yield name, target
    elif isinstance(target, torch.nn.Module):
        yield from target.named_parameters()
        yield from target.named_buffers()
    elif isinstance(target, torch.optim.Optimizer):
        for g, group in enumerate(target.param_groups):
            for p, parameter in enumerate(group["params"]):
                for key, value in target.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"state {key} of parameter {p} in group {g}", value
    else:
        for k, inner in target.items() if isinstance(target, dict) else enumerate(target):
            yield from _tensors_of(inner, f"{name}.{k}")
