"""Autocast of global tensors (``torch.autocast``).

Functions with a rule run torch's own kernels, which autocast sees. A composite is cast here as
autocast casts the function that it stands for. `dispatch` puts `autocast_state` into the keys of
plans, and `plan_call` wraps composites.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._base.pytree import replaced, tensors_in
from ..sharding.spec import Spec
from .shape_inference import infer_outputs

__all__ = ["as_autocast_would", "autocast_state"]


def autocast_state() -> tuple[Any, ...]:
    """Return (device type, dtype) of each kind of device for which autocast is on."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda", "xpu")
        if torch.is_autocast_enabled(kind)
    )


def as_autocast_would(
    composite: Callable[..., Any],
    func: Any,
    specs: Sequence[Spec],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meta: Sequence[torch.Tensor],
) -> Callable[..., Any]:
    """Return a composite that casts as autocast casts for ``func``.

    Autocast has a policy for ``func``, but not for the functions that ``composite`` calls. So the
    inputs are cast to the dtype that ``func`` would return, and the composite runs with autocast
    off."""
    kinds = [kind for kind, _ in autocast_state()]

    def off() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    try:
        with off():
            plain = [m.dtype for m in infer_outputs(func, specs, args, kwargs)[0] or ()]
    except RuntimeError:  # operands of several dtypes, which autocast unifies
        plain = []
    found = {m.dtype for m in meta}
    wanted = found.pop() if len(found) == 1 else None
    if wanted is None or not wanted.is_floating_point:
        wanted = None
    elif plain == [m.dtype for m in meta] and any(
        s.dtype.is_floating_point and s.dtype.itemsize > wanted.itemsize for s in specs
    ):
        # it accepts these dtypes as they are, such as the running statistics of a batch norm
        wanted = None

    def run(*args: Any, **kwargs: Any) -> Any:
        if wanted is not None:
            cast_operands = iter(
                [
                    t.to(wanted) if t.is_floating_point() else t
                    for t in tensors_in(kwargs, tensors_in(args, []))
                ]
            )
            args, kwargs = replaced(args, cast_operands), replaced(kwargs, cast_operands)
        with off():
            return composite(*args, **kwargs)

    return run
