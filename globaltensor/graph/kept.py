"""What build() leaves behind in modules. It runs once, on stand-ins: these must not stay, and what a program has to do at each step must be in it."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .. import _torch
from ..plans import tensors_in
from ..wrapper import GlobalTensor
from .errors import GraphError

__all__ = ["kept"]

_OWN = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def kept(modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Inside, build() runs. Afterwards modules hold what they held before; a buffer that was given a new tensor gets its values at each step.

    Raises GraphError where a module has gained or lost a parameter or buffer, or where numbers were drawn that a program would repeat for ever.
    """
    parts = {f"{name}.{path}".rstrip("."): part for name, module in modules.items() for path, part in module.named_modules()}
    hooked = [path for path, part in parts.items() if part._backward_hooks or part._backward_pre_hooks]
    if hooked and torch.is_grad_enabled():
        raise GraphError(
            f"{hooked[0]} has backward hooks, which run on the autograd graph of build()'s one run: hook a tensor in forward instead "
            "(x.register_hook(...)), or a parameter"
        )
    before = {path: (dict(vars(part)), dict(part._parameters), dict(part._buffers)) for path, part in parts.items()}
    drawn = random.getstate(), _numpy_state()
    done = False
    try:
        yield
        done = True
    finally:
        changed = [(path, part, *before[path]) for path, part in parts.items()]
        writes = [w for path, part, attributes, parameters, buffers in changed for w in _restored(path, part, attributes, parameters, buffers, done)]
    if random.getstate() != drawn[0] or _numpy_state() != drawn[1]:
        raise GraphError(
            "build() draws numbers from Python's or NumPy's generator: it runs once, so each step would use the same number again. Draw with torch "
            "(torch.rand, torch.randint), or hand the number to the graph as a tensor"
        )
    with torch.no_grad():
        for buffer, value in writes:
            buffer.copy_(value)


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return kind, keys.tobytes(), *rest  # type: ignore[union-attr]


def _fits(old: Any, new: Any) -> bool:
    tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    return tensors and old.shape == new.shape and isinstance(old, GlobalTensor) >= isinstance(new, GlobalTensor)


def _restored(path: str, part: torch.nn.Module, attributes: Any, parameters: Any, buffers: Any, done: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Put a module back as it was -> (buffer, what it is to be) for those that were given new tensors."""
    writes = []
    for kind, now, then in (("parameter", part._parameters, parameters), ("buffer", part._buffers, buffers)):
        renewed = {n for n in now.keys() | then.keys() if now.get(n) is not then.get(n) or (n in now) != (n in then)}
        given = {n: now.get(n) for n in renewed}
        now.clear()
        now.update(then)
        for name in renewed if done else ():
            old, new = then.get(name), given[name]
            if kind == "parameter" or not _fits(old, new):
                raise GraphError(
                    f"build() gives {path}.{name} another {kind}: a graph's modules keep their parameters and buffers. Write into the buffer "
                    f"({name}.copy_(value), of one shape), or keep the value as an input and an output of the graph"
                )
            writes.append((old, new))
    own = vars(part)
    for name in [n for n, v in own.items() if n not in _OWN and v is not attributes.get(n) and tensors_in(v, [])]:
        was = attributes.get(name)
        if name in attributes:
            own[name] = was
        else:
            del own[name]
        if done and not tensors_in(was, []):
            warnings.warn(
                f"{path}.{name} is given a tensor inside build(), which runs once, on tensors without values: the attribute is as it was before. "
                "Return the tensor from build() instead",
                stacklevel=2,
            )
    _torch.refresh_weights(part)
    return writes  # type: ignore[return-value]
