"""The device that tests run on. With GLOBALTENSOR_TEST_DEVICE=cuda, every placement that a test
puts on "cpu" is on the GPU, which the ranks share.

Tensors that a test makes itself stay on the CPU, and comparisons move both sides there. This is
enough for tests of global tensors. A test of the CPU itself cannot pass: its name in a text, its
generator, or an index out of range, which is fatal on a GPU. `make test-gpu` names files.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

DEVICE = os.environ.get("GLOBALTENSOR_TEST_DEVICE", "cpu")
#: The names of device types in `globaltensor.sharding.placement`. The module is imported by its
#: path, because the package's attribute of that name is the class.
_ALIASES: dict[str, str] = importlib.import_module("globaltensor.sharding.placement")._ALIASES


def move() -> None:
    """Place this process's placements on `DEVICE`."""
    if DEVICE == "cpu":
        return
    _ALIASES["cpu"] = DEVICE
    torch.backends.cudnn.allow_tf32 = False
    torch.testing.assert_close = _leniently(torch.testing.assert_close)  # type: ignore[assignment]
    for holder in (torch, torch.Tensor):
        for name in ("equal", "allclose"):
            setattr(holder, name, _on_the_cpu(getattr(holder, name)))
    numpy = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self, **kwargs: numpy(_here(self), **kwargs)  # type: ignore[method-assign, assignment]


def _here(value: Any) -> Any:
    return (
        value.cpu()
        if isinstance(value, torch.Tensor)
        and not getattr(value, "is_global", False)
        and value.is_cuda
        else value
    )


def _on_the_cpu(compare: Callable[..., bool]) -> Callable[..., bool]:
    def compared(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
        return compare(_here(a), _here(b), *args, **kwargs)

    return compared


def _leniently(check: Callable[..., None]) -> Callable[..., None]:
    def checked(*args: Any, **kwargs: Any) -> None:
        check(*args, **{"check_device": False, **kwargs})

    return checked
