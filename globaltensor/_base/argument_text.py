"""The text of a call's arguments, by which ranks compare calls that no plan describes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from . import torch_private

__all__ = ["argument_text"]

#: Types whose text is the same in every process.
_SPELLED = (str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_OWN_NUMBERS = frozenset((int, float))
_MANY = 64  # a longer list of numbers is spelled at once, by their types too


def argument_text(value: Any) -> str:
    """Return the text of an argument, or of a pytree of them, the same on every rank.

    Equal numbers have one text, whatever their type: Python's, NumPy's, or a plain tensor without
    dims on the CPU. Named arguments are sorted. Of other values, such as a generator, the text has
    the type.

    >>> argument_text((0.5, {"std": np.float64(2.0), "mean": torch.tensor(0)}))
    '(0.5, {mean: 0, std: 2})'
    """
    if isinstance(value, (int, float, complex, np.number, np.bool_)):
        return _number_text(value)
    if isinstance(value, (tuple, list)):  # sizes may be either
        if len(value) > _MANY and _OWN_NUMBERS.issuperset(map(type, value)):
            return repr(list(value))
        return f"({', '.join(map(argument_text, value))})"
    if isinstance(value, dict):
        named = sorted((str(k), argument_text(v)) for k, v in value.items())
        return f"{{{', '.join(f'{k}: {text}' for k, text in named)}}}"
    if _is_plain_number(value):
        return _number_text(value.item())
    if isinstance(value, torch.Tensor):
        return "tensor"
    return repr(value) if isinstance(value, _SPELLED) else type(value).__name__


def _number_text(number: Any) -> str:
    if isinstance(number, (np.number, np.bool_)):
        number = number.item()
    if isinstance(number, complex) and not number.imag:
        number = number.real
    if isinstance(number, float):
        # -0.0 is another number for division
        is_negative_zero = not number and math.copysign(1.0, number) < 0
        whole = math.isfinite(number) and number.is_integer() and not is_negative_zero
        return repr(int(number) if whole else float(number))
    return repr(int(number)) if isinstance(number, int) else repr(number)


def _is_plain_number(value: Any) -> bool:
    """Return True for a number whose value can be read without a wait or a message."""
    if isinstance(value, np.ndarray):
        return not value.ndim and isinstance(value.item(), (int, float, complex))
    return (
        type(value) is torch.Tensor
        and not value.dim()
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not torch_private.recording.on
        and torch_private.innermost_transform() is None
    )
