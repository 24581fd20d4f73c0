"""Metrics of the torchmetrics library on global tensors.

Their counts are already those of the global batch, so they must not be summed over ranks again. The
package calls `install` on import."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from .._base.patches import patch
from .._base.pytree import tensors_in
from .._tensor.global_tensor import GlobalTensor

__all__ = ["install"]

#: Key in a metric's ``__dict__``: True if its last update received global tensors.
_FED: Final = "_globaltensor_fed"


def _noting_update(wrap_update: Any) -> Any:
    """Wrap ``Metric._wrap_update``: ``update`` then records whether it received global tensors."""

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

    return _wrap_update


def _syncing_local(sync: Any) -> Any:
    """Wrap ``Metric.sync``: it does nothing where the last update received global tensors."""

    @functools.wraps(sync)
    def _sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if self.__dict__.get(_FED) else sync(self, *args, **kwargs)

    return _sync


def install() -> None:
    # Where a version of torchmetrics has no `_wrap_update`, nothing is noted, and the collectives
    # refuse to count twice (distributed/replicated_results.py).
    patch("torchmetrics.metric:Metric._wrap_update", _noting_update)
    patch("torchmetrics.metric:Metric.sync", _syncing_local)
