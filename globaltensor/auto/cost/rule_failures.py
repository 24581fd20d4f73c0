"""Strategies that a search has lost to errors in rules.

A rule refuses layouts by the library's own errors. Any other error is a fault of the rule, and is
counted here. `signatures.py` and `ir/flops.py` record them, and the plan reports them.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..._base import torch_private
from ..._base.pytree import replaced
from ..._base.user_code import PACKAGE_ROOT
from ..._ops.call_plan import name_of
from ..._ops.rules import OpDescription, Rule
from ...errors import FormError, GlobalTensorError
from ...graph.capture.dry_world import Untraceable
from ..plan.plan import Lost

__all__ = ["RuleFailures", "describe", "lost_by"]

#: The errors by which a composition refuses operands. Those of `data_dependence()` come from fake
#: tensors, for calls whose results depend on values.
REFUSALS: tuple[type[Exception], ...] = (
    GlobalTensorError,
    Untraceable,
    *torch_private.data_dependence(),
)


class RuleFailures(Counter[tuple[str, str]]):
    """A counter: (function, error) -> the number of operand layouts that could not be probed."""

    def note(self, func: Any, error: Exception, ways: int = 1) -> None:
        """Count an error, unless it is a refusal."""
        if not isinstance(error, REFUSALS):
            self[name_of(func), _error_text(error)] += ways


def _error_text(error: Exception) -> str:
    """Return the error in one line, with the last line of this library in its traceback."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename.startswith(str(PACKAGE_ROOT))
    ]
    lines = str(error).splitlines() or [""]
    place = (
        f" ({Path(frames[-1].filename).relative_to(PACKAGE_ROOT)}:{frames[-1].lineno})"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(": ") + place


def describe(rule: Rule, op: OpDescription, args: Any, kwargs: Any) -> bool:
    """Let the rule describe a call, and return False where it does not know this form of the call.

    Raises the errors of a faulty rule.
    """
    these = iter(op.args)
    given, named = replaced(args, these), replaced(kwargs, these)
    try:
        rule.describe(op, *given, **named)
    except FormError:
        return False
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # raised inside the rule, so it is not a mismatch of the rule's parameters
        return False
    return True


def lost_by(losses: Iterable[Mapping[tuple[str, str], int]]) -> tuple[Lost, ...]:
    """Return the lost strategies, one record per function and error.

    ``losses`` has an entry for each call of the graph; equal calls have an entry each.
    """
    ways, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in losses:
        for key, n in one.items():
            ways[key] += n
            calls[key] += 1
    return tuple(
        Lost(function, error, ways[function, error], calls[function, error])
        for function, error in sorted(ways)
    )
