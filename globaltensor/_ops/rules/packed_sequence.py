"""Rules of packed sequences (torch.nn.utils.rnn), which hold the steps of all sequences in one dim.

`rules` imports this module. Time comes first in that dim. The number of sequences in each step is a
plain cpu tensor, as the kernels of recurrent layers require.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._base import torch_private
from .notation import OpDescription
from .registry import rule

__all__: list[str] = []


def _plain_counts(counts: Any) -> torch.Tensor:
    """Return the values of a tensor of counts as a plain tensor.

    The call is collective where ``counts`` is global.
    """
    return (
        counts if type(counts) is torch.Tensor else torch.tensor(counts.tolist(), dtype=torch.int64)
    )


def _packed_positions(sizes: torch.Tensor, most: int) -> torch.Tensor:
    """Return the positions of the packed rows among those of [time, batch].

    ``most`` is the number of sequences in the batch.
    """
    return (torch.arange(most) < sizes[:, None]).flatten().nonzero().squeeze(1)


def _packed(input: Any, lengths: Any, batch_first: bool) -> Any:
    meta = torch.empty(input.shape, dtype=input.dtype, device="meta")
    _, sizes = torch_private.pack_padded(
        meta, _plain_counts(lengths), batch_first
    )  # torch's own checks
    steps = input.transpose(0, 1) if batch_first else input
    return steps[: len(sizes)].flatten(0, 1).index_select(
        0, _packed_positions(sizes, steps.shape[1])
    ), sizes


def _padded(
    data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    sizes = _plain_counts(batch_sizes)
    meta = torch.empty(data.shape, dtype=data.dtype, device="meta")
    whole, lengths = torch_private.pad_packed(meta, sizes, False, padding_value, total_length)
    time, batch = whole.shape[:2]
    rows = data.new_full((time * batch, *data.shape[1:]), padding_value).index_copy(
        0, _packed_positions(sizes, batch), data
    )
    steps = rows.unflatten(0, (time, batch))
    return steps.transpose(0, 1) if batch_first else steps, lengths


@rule(torch_private.pack_padded)
def _pack(op: OpDescription, *args: Any) -> None:
    op.composite = _packed


@rule(torch_private.pad_packed)
def _pad(op: OpDescription, *args: Any) -> None:
    op.composite = _padded
