"""Global tensors in files: `torch.distributed.checkpoint` writes each part once and reads it into any layout; `torch.load` knows what they are made of."""

from __future__ import annotations

from typing import Any

import torch

from .distributed.world import world
from .errors import SbpError
from .placement import Placement
from .sbp import Sbp, broadcast
from .spec import made, stored
from .tensor import rebuild
from .wrapper import GlobalTensor

__all__: list[str] = []


def _held(x: GlobalTensor) -> tuple[torch.Size, torch.Size] | None:
    """(offsets, lengths) of what this rank holds of the whole. None: nothing, and another rank's part may begin where this one would."""
    spec = x._spec
    if any(e.is_partial for e in spec.layout):
        whole = [broadcast if e.is_partial else e for e in x.sbp]
        raise SbpError(
            f"a partial tensor ({spec!r}) has no part of its own value on a rank, so a checkpoint cannot hold it: "
            f"put x.to_global(sbp={whole!r}) in the state dict"
        )
    rank = world().rank
    if spec.placement.coordinate(rank) is None:
        return None
    offsets, lengths = spec.box(rank)
    return (torch.Size(offsets), torch.Size(lengths)) if 0 not in lengths or not spec.numel else None


def write_items(self: GlobalTensor, name: str, value: Any) -> list[Any]:
    """What this rank could write; equal parts of several ranks are written by one of them."""
    from torch.distributed.checkpoint import metadata, planner

    held = _held(self)
    if held is None:
        return []
    data = planner.TensorWriteData(
        chunk=metadata.ChunkStorageMetadata(*held),
        properties=metadata.TensorProperties.create_from_tensor(self._local),
        size=self._spec.shape,
    )
    return [planner.WriteItem(index=metadata.MetadataIndex(name, held[0]), type=planner.WriteItemType.SHARD, tensor_data=data)]


def chunk_list(self: GlobalTensor) -> list[Any]:
    """What this rank is to read."""
    from torch.distributed.checkpoint import metadata

    held = _held(self)
    return [] if held is None else [metadata.ChunkStorageMetadata(*held)]


def tensor_shard(self: GlobalTensor, index: Any) -> torch.Tensor:
    """The memory that is written, or read into."""
    return self._local.detach()


def install() -> None:
    """The protocol by which torch's checkpoints meet tensors that lie in parts, and the names that `torch.load` may call in a file of weights."""
    GlobalTensor.__create_write_items__ = write_items  # type: ignore[attr-defined]
    GlobalTensor.__create_chunk_list__ = chunk_list  # type: ignore[attr-defined]
    GlobalTensor.__get_tensor_shard__ = tensor_shard  # type: ignore[attr-defined]
    torch.serialization.add_safe_globals([rebuild, made, stored, Placement, Sbp])


install()
