"""``flow.comm``: collectives and messages by OneFlow's names: sums only, all ranks, blocking.

Users call these functions. ``flow.distributed`` has torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as torch_dist

from .distributed import collectives as dist
from .distributed.process_groups import start
from .errors import ShapeError, WorldError

__all__ = [
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "barrier", "broadcast",
    "gather", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
]  # fmt: skip

_TAG: Final = 7004  # tag of the message that describes the tensor to follow
_MAX_DIMS: Final = 61
_DTYPES: Final = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_DEVICES: Final = ("cpu", "cuda", "xpu", "hpu", "npu", "mlu", "mps")


def all_reduce(tensor: torch.Tensor) -> None:
    """Sum ``tensor`` over all ranks, in place. All ranks pass one shape and dtype."""
    dist.all_reduce(tensor)


def all_gather(tensor_list: list[Any], tensor: torch.Tensor) -> None:
    """Gather every rank's tensor (of one shape and dtype) into ``tensor_list``.

    The list has one entry for each rank. An entry is written into where it fits, and replaced where
    it does not. Raises ShapeError where the list has another length.
    """
    size = start().size
    if len(tensor_list) != size:
        raise ShapeError(
            f"comm.all_gather: the list has {len(tensor_list)} entries for {size} ranks: pass one "
            f"entry for each"
        )
    fits = [
        isinstance(t, torch.Tensor)
        and (t.shape, t.dtype, t.device) == (tensor.shape, tensor.dtype, tensor.device)
        for t in tensor_list
    ]
    tensor_list[:] = [
        t if fit else torch.empty_like(tensor) for t, fit in zip(tensor_list, fits, strict=True)
    ]
    dist.all_gather(tensor_list, tensor)


def all_gather_into_tensor(output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:
    """Gather every rank's tensor into ``output_tensor``, in the order of the ranks.

    The result is concatenated or stacked, as the shape of the output says. Raises ShapeError where
    its size doesn't fit.
    """
    size = start().size
    if output_tensor.numel() != size * input_tensor.numel():
        sizes = f"{tuple(output_tensor.shape)} for {size} inputs of {tuple(input_tensor.shape)}"
        raise ShapeError(
            f"comm.all_gather_into_tensor: the output is {sizes}: it must hold "
            f"{size * input_tensor.numel()} elements"
        )
    flat = output_tensor.contiguous().view(-1)
    dist.all_gather_into_tensor(flat, input_tensor.contiguous().view(-1))
    if flat.data_ptr() != output_tensor.data_ptr():
        output_tensor.copy_(flat.view(output_tensor.shape))


def broadcast(tensor: torch.Tensor, src: int) -> None:
    """Copy the tensor of rank ``src`` to every rank, in place."""
    dist.broadcast(tensor, src)


def scatter(
    tensor: torch.Tensor, scatter_list: Sequence[torch.Tensor] | None = None, src: int = 0
) -> None:
    """Send each rank one tensor of the list of rank ``src``, and write it into ``tensor``."""
    dist.scatter(tensor, list(scatter_list) if scatter_list is not None else None, src)


def reduce(tensor: torch.Tensor, dst: int) -> None:
    """Sum ``tensor`` over all ranks, in place on rank ``dst``. The others keep theirs."""
    dist.reduce(tensor if start().rank == dst else tensor.clone(), dst)


def all_to_all(
    output_tensor_list: list[torch.Tensor], input_tensor_list: list[torch.Tensor]
) -> None:
    """Send entry i of every rank's input list to rank i, into its output list."""
    dist.all_to_all(output_tensor_list, input_tensor_list)


def barrier() -> None:
    """Return when all ranks have called this function."""
    dist.barrier()


def reduce_scatter(output: torch.Tensor, input_list: list[torch.Tensor]) -> None:
    """Sum entry i of every rank's list into ``output`` on rank i."""
    dist.reduce_scatter(output, input_list)


def reduce_scatter_tensor(output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:
    """Sum shard i of every rank's tensor, cut along dim 0, into ``output_tensor`` on rank i.

    Shards may have any shape of that size. Raises ShapeError where the size doesn't fit.
    """
    size = start().size
    if input_tensor.numel() != size * output_tensor.numel():
        sizes = f"{tuple(input_tensor.shape)} for {size} outputs of {tuple(output_tensor.shape)}"
        raise ShapeError(
            f"comm.reduce_scatter_tensor: the input is {sizes}: it must hold "
            f"{size * output_tensor.numel()} elements"
        )
    flat = output_tensor.contiguous().view(-1)
    dist.reduce_scatter_tensor(flat, input_tensor.contiguous().view(-1))
    if flat.data_ptr() != output_tensor.data_ptr():
        output_tensor.copy_(flat.view(output_tensor.shape))


def gather(
    tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, dst: int = 0
) -> None:
    """Gather every rank's tensor into the list of rank ``dst``. Elsewhere the list is ignored."""
    dist.gather(tensor, gather_list if start().rank == dst else None, dst)


def send(tensor: torch.Tensor, dst: int, send_meta: bool = True) -> None:
    """Send ``tensor`` to rank ``dst``, which calls ``recv``.

    ``send_meta``: send shape, dtype and device first. Without it, the receiver must know them.
    Raises ShapeError where a tensor has too many dims to describe.
    """
    if send_meta:
        shape = list(tensor.shape)
        if len(shape) > _MAX_DIMS:
            raise ShapeError(
                f"comm.send: the tensor has {len(shape)} dims; at most {_MAX_DIMS} are possible"
            )
        meta = [len(shape), _DTYPES.index(tensor.dtype), _DEVICES.index(tensor.device.type), *shape]
        dist.send(
            torch.tensor(meta + [0] * (3 + _MAX_DIMS - len(meta)), device=_meta_device()),
            dst,
            tag=_TAG,
        )
    dist.send(tensor, dst)


def recv(
    src: int,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Receive a tensor from rank ``src``: return a new one, or ``out``.

    Pass shape, dtype and device where the sender passes ``send_meta=False``, and none of them
    otherwise. Raises WorldError where only some are passed, ShapeError where ``out`` does not fit.
    """
    is_passed = [value is not None for value in (shape, dtype, device)]
    if any(is_passed) and not all(is_passed):
        raise WorldError(
            "comm.recv: pass all of shape, dtype and device (the sender's send_meta=False), or "
            "none of them"
        )
    this_world = start()
    if not any(is_passed):
        meta = torch.empty(3 + _MAX_DIMS, dtype=torch.int64, device=_meta_device())
        dist.recv(meta, src, tag=_TAG)
        dims, which, where, *sizes = meta.tolist()
        shape, dtype, device = sizes[:dims], _DTYPES[which], this_world.device(_DEVICES[where])
    assert shape is not None
    assert dtype is not None
    if out is None:
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
    elif (tuple(out.shape), out.dtype) != (tuple(shape), dtype):
        raise ShapeError(
            f"comm.recv: out is {out.dtype} {tuple(out.shape)}, but rank {src} sends {dtype} "
            f"{tuple(shape)}"
        )
    dist.recv(out, src)
    return out


def _meta_device() -> torch.device:
    """Return the device of a message about a message: the cpu, if the group can send from it."""
    config = str(torch_dist.get_backend_config(start().process_group and torch_dist.group.WORLD))
    return (
        torch.device("cpu")
        if config != "nccl" and ("cpu" in config or ":" not in config)
        else start().device("cuda")
    )
