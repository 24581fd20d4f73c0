"""``flow.nn``: torch.nn, and what this library adds to it."""

from typing import Any

from torch import nn as _nn


def __getattr__(name: str) -> Any:
    try:
        return getattr(_nn, name)
    except AttributeError:
        raise AttributeError(f"neither globaltensor.nn nor torch.nn has {name!r}") from None
