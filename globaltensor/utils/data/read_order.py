"""Texts of the rows that a loader reads, which the ranks compare.

The loaders call these functions.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils import data

__all__ = ["SPLIT_ADVICE", "order_text", "sampler_text", "subset_text"]

_SHOWN_ROWS: Final = 6
_ARRAYS: Final = (torch.Tensor, np.ndarray)
SPLIT_ADVICE: Final = (
    "random_split draws the same rows on every rank with generator=torch.Generator().manual_seed(0)"
)


def order_text(rows: Sequence[Any]) -> str:
    """Return a text of the rows to read: the first ones, and a digest of all."""
    try:
        data_bytes = array("q", rows).tobytes()
    except (TypeError, OverflowError):  # keys that are no numbers
        data_bytes = repr(rows).encode()
    first = ", ".join(map(str, rows[:_SHOWN_ROWS])) + (", ..." if len(rows) > _SHOWN_ROWS else "")
    return f"[{first}] (digest {hashlib.blake2b(data_bytes, digest_size=8).hexdigest()})"


def subset_text(dataset: Any) -> str:
    """Return a text of the rows that each `torch.utils.data.Subset` in a dataset has.

    It is empty if the dataset has no subset."""
    texts: list[str] = []
    inner: Iterable[Any] = ()
    if isinstance(dataset, data.Subset):
        rows: Any = dataset.indices
        texts.append(order_text(rows.tolist() if isinstance(rows, _ARRAYS) else list(rows)))
        inner = (dataset.dataset,)
    elif isinstance(dataset, data.ConcatDataset):
        inner = dataset.datasets
    elif isinstance(dataset, data.StackDataset):
        parts = dataset.datasets
        inner = parts.values() if isinstance(parts, dict) else parts
    return ", ".join([*texts, *filter(None, map(subset_text, inner))])


def sampler_text(loader: Any) -> str:
    """Return a text of what decides the shares that a DistributedSampler gives the ranks.

    It is empty for a loader without such a sampler, whose rows may be any."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if not isinstance(sampler, data.DistributedSampler) or sampler.num_replicas == 1:
        return ""
    settings = [f"{len(sampler.dataset)} samples, epoch {sampler.epoch}"]
    if sampler.shuffle:
        settings.append(f"seed {sampler.seed}")
    if subset := subset_text(sampler.dataset):
        settings.append(f"subset {subset}")
    return ", ".join(settings)
