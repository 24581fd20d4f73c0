"""Metrics of the torchmetrics library on global tensors.

Their counts are already those of the global batch, so they must not be summed over ranks again. The
package calls `install` on import."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from .._base.import_hooks import when_imported
from .._base.pytree import tensors_in
from .._tensor.global_tensor import GlobalTensor

__all__ = ["install"]

#: Key in a metric's ``__dict__``: True if its last update received global tensors.
_FED: Final = "_globaltensor_fed"


def _change(home: Any) -> None:
    """Patch ``torchmetrics.metric.Metric``.

    ``update`` records whether it received global tensors, and ``sync`` then does nothing."""
    metric = home.Metric
    sync, wrap_update = metric.sync, getattr(metric, "_wrap_update", None)
    # Without it, the collectives refuse to count twice (distributed/replicated_values.py).
    if wrap_update is None:
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
