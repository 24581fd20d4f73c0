"""Metrics of the torchmetrics library that are fed global tensors: what they count is already that
of the whole batch, and is not added up over ranks again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from .._base.import_hooks import when_imported
from .._base.pytree import tensors_in
from .._tensor.global_tensor import GlobalTensor

__all__ = ["install"]

#: In a metric's ``__dict__``: True if its last update was given global tensors.
_FED: Final = "_globaltensor_fed"


def _change(home: Any) -> None:
    """Change ``torchmetrics.metric.Metric``: ``update`` notes what it is given, and ``sync`` does
    nothing after global tensors."""
    metric = home.Metric
    sync, wrap_update = metric.sync, getattr(metric, "_wrap_update", None)
    if (
        wrap_update is None
    ):  # then the collectives refuse what would count twice (distributed/replicated_values.py)
        return

    @functools.wraps(wrap_update)
    def _wrap_update(self: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        inner = wrap_update(self, update)

        @functools.wraps(inner)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.__dict__[_FED] = any(
                isinstance(t, GlobalTensor) for t in tensors_in((args, kwargs), [])
            )
            return inner(*args, **kwargs)

        return noting

    @functools.wraps(sync)
    def _sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self.__dict__.get(_FED) else sync(self, *args, **kwargs)

    metric._wrap_update, metric.sync = _wrap_update, _sync


def install() -> None:
    when_imported("torchmetrics.metric", _change)
