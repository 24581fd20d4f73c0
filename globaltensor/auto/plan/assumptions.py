"""The loss and the optimizer that a search assumes for a model, in words.

`model_name` calls it, because a plan gets both together. The report and the page of a plan show it.
"""

from __future__ import annotations

from typing import Final

__all__ = ["assumptions"]

_LOSS: Final = "backward from every output of the model, no loss after it"
_OPTIMIZERS: Final = {
    0.0: "SGD or another",
    1.0: "SGD with momentum or another",
    2.0: "Adam or another",
}


def assumptions(optimizer_state_ratio: float) -> str:
    """Return the loss and the optimizer, which has so many bytes of state a byte of parameter.

    >>> print(assumptions(0.0).replace("; ", "\\n"))
    backward from every output of the model, no loss after it
    SGD or another optimizer with 0 bytes of state a byte of parameter
    """
    optimizer = _OPTIMIZERS.get(optimizer_state_ratio, "an")
    state = f"{optimizer_state_ratio:g} bytes of state a byte of parameter"
    return f"{_LOSS}; {optimizer} optimizer with {state}"
