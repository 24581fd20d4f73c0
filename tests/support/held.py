"""A measure of the memory that tensors take while a block runs. Benchmarks use it too."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Held"]


class Held(TorchDispatchMode):
    """A mode that records the peak bytes of the live tensors made in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr()
            for t in args
            if isinstance(t, torch.Tensor) and t.device.type != "meta"
        }
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if (
                isinstance(t, torch.Tensor)
                and t.device.type != "meta"
                and t.untyped_storage().data_ptr() not in given
            ):
                storage = t.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._live = {at: (ref, n) for at, (ref, n) in self._live.items() if not ref.expired()}
        self.most = max(self.most, sum(n for _, n in self._live.values()))
        return out
