"""Undo the side effects of build() on modules.

build() runs once, on fake tensors. These must not remain in modules, and updates that a program has
to make at each step must become part of it. `module_hooks` enters `restoring_modules`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..._base import torch_private
from ..._base.pytree import tensors_in
from ..._base.user_code import warn_user
from ..._tensor.global_tensor import GlobalTensor
from ...errors import GraphError
from .logical_recorder import LogicalRecorder
from .reachable_containers import Containers, TensorContainer, named, put_back
from .recorder_base import Recorder

__all__ = ["restoring_modules"]


@contextlib.contextmanager
def restoring_modules(
    modules: Mapping[str, torch.nn.Module],
    own: dict[str, Any],
    logical: LogicalRecorder,
    build: Any = None,
) -> Iterator[None]:
    """Restore the modules and the graph after build(), and record their updates.

    build() runs inside this context. Afterwards the modules, and the graph whose attributes are
    ``own``, hold what they held before, and so do the variables outside that ``build`` refers to. A
    buffer that build() has replaced by a new tensor gets the new values at each step. So does a
    tensor that is an attribute or a variable, or in a list or dict there.

    Raises GraphError if a module has gained or lost a parameter or buffer, or if numbers were drawn
    that a program would repeat for ever.
    """
    parts = {
        f"{name}.{path}".rstrip("."): part
        for name, module in modules.items()
        for path, part in module.named_modules()
    }
    hooked = [
        path for path, part in parts.items() if part._backward_hooks or part._backward_pre_hooks
    ]
    if hooked and torch.is_grad_enabled():
        raise GraphError(
            f"{hooked[0]} has backward hooks, which would run on the autograd graph of build()'s "
            "single run only: hook a tensor in forward instead (x.register_hook(...)), or a "
            "parameter"
        )
    before = {path: (dict(part._parameters), dict(part._buffers)) for path, part in parts.items()}
    containers = Containers(parts.values())
    for path, attributes in [("", own), *((path, vars(part)) for path, part in parts.items())]:
        containers.add_attributes(path, attributes)
    for function in dict.fromkeys([build, *map(type, parts.values())]):
        containers.add_function(function)
    places = containers.found
    drawn = random.getstate(), _numpy_state()
    done = False
    try:
        yield
        done = True
    finally:
        changed = [(path, part, *before[path]) for path, part in parts.items()]
        writes = [
            w
            for path, part, parameters, buffers in changed
            for w in _restore_module(path, part, parameters, buffers, done)
        ]
        moved = {
            id(t)
            for place in places.values()
            for k in place.changed()
            for t in tensors_in(place.then.get(k), [])
        }
        writes += [
            w
            for place in places.values()
            for w in _restore_container(place, places, moved, logical if done else None)
        ]
        if done:
            logical.slots += containers.modules
            logical.slots += [
                slot
                for place in places.values()
                for k in _read(place, logical)
                for slot in place.slots(k)
            ]
    if random.getstate() != drawn[0] or _numpy_state() != drawn[1]:
        raise GraphError(
            "build() draws numbers from Python's or NumPy's generator: it runs once, so each step "
            "would use the same number again. Draw with torch (torch.rand, torch.randint), or "
            "pass the number to the graph as a tensor"
        )
    with torch.no_grad():
        memory = {logical.local.memory(held) for held, _ in writes}
        values = [
            value.clone() if logical.local.memory(value) in memory else value for _, value in writes
        ]  # copies, since a value may change when another tensor is written
        for (held, _), value in zip(writes, values, strict=True):
            held.copy_(value)


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return kind, keys.tobytes(), *rest  # type: ignore[union-attr]


def _can_copy_into(old: Any, new: Any) -> bool:
    tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    return (
        tensors
        and old.shape == new.shape
        and isinstance(old, GlobalTensor) >= isinstance(new, GlobalTensor)
    )


def _read(container: TensorContainer, logical: LogicalRecorder) -> list[Any]:
    """Return the keys of tensors that are inputs of the program."""
    return [
        k
        for k, v in container.then.items()
        if any(id(t) in logical.known for t in tensors_in(v, []))
    ]


def _restore_container(
    container: TensorContainer,
    places: Mapping[int, TensorContainer],
    moved: set[int],
    logical: LogicalRecorder | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Put back entries that build() has replaced by fake tensors, or by one of ``moved``.

    ``moved`` are tensors that were elsewhere before. Returns (tensor, new value) for tensors
    that get the new value at each step. Warns of other replaced entries."""
    replaced_entries = {
        k: v
        for k, v in container.changed().items()
        if any(_is_fake(t) or id(t) in moved for t in tensors_in(v, []))
    }
    put_back(container, replaced_entries)
    writes = []
    for k, new in replaced_entries.items() if logical is not None else ():
        olds, news = tensors_in(container.then.get(k), []), tensors_in(new, [])
        pairs = list(zip(olds, news, strict=True)) if len(olds) == len(news) else []
        if pairs and not any(_depends_on_inputs(logical, new, moved) for _, new in pairs):
            continue
        if pairs and all(
            _can_copy_into(o, n) and o.dtype is n.dtype and _is_unshared(o, places)
            for o, n in pairs
        ):
            writes += pairs
            logical.slots.extend(container.slots(k))  # type: ignore[union-attr]
        else:
            warn_user(
                f"{named(container.path, container.held, k)} is given a tensor inside build(), "
                "which runs once, on tensors without values: its old value was restored. Return "
                "the tensor from build() instead, or keep it in a buffer",
            )
    return writes


def _is_fake(t: torch.Tensor) -> bool:
    return torch_private.is_fake(t._stored if isinstance(t, GlobalTensor) else t)


def _is_unshared(old: torch.Tensor, places: Mapping[int, TensorContainer]) -> bool:
    """Return True if no other name of a module, the graph or a variable has the same tensor.

    Writing into a shared tensor would change the other name's value too."""
    held_values = (
        v
        for place in places.values()
        for v in place.then.values()
        if isinstance(v, (torch.Tensor, tuple))
    )
    return sum(t is old for v in held_values for t in tensors_in(v, [])) == 1


def _depends_on_inputs(logical: Recorder, new: torch.Tensor, moved: set[int]) -> bool:
    """Return True if the new tensor depends on an input of the call or on one of ``moved``.

    Otherwise it follows from the code alone (a table that is made again)."""
    states = {logical.known[i] for i in moved if i in logical.known}
    todo, seen = [logical.known.get(id(new))], set()
    while todo:
        node = todo.pop()
        if node is None or node in states or (node.op == "placeholder" and "path" not in node.meta):
            return True
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _restore_module(
    path: str, part: torch.nn.Module, parameters: Any, buffers: Any, done: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Restore a module, and return (buffer, new value) for buffers that were given new tensors."""
    writes = []
    for kind, now, then in (
        ("parameter", part._parameters, parameters),
        ("buffer", part._buffers, buffers),
    ):
        renewed = {
            n
            for n in now.keys() | then.keys()
            if now.get(n) is not then.get(n) or (n in now) != (n in then)
        }
        given = {n: now.get(n) for n in renewed}
        now.clear()
        now.update(then)
        for name in renewed if done else ():
            old, new = then.get(name), given[name]
            if kind == "parameter" or not _can_copy_into(old, new):
                raise GraphError(
                    f"build() replaces the {kind} {path}.{name}: a graph's modules keep their "
                    f"parameters and buffers. Write into the buffer ({name}.copy_(value), of one "
                    "shape), or keep the value as an input and an output of the graph"
                )
            writes.append((old, new))
    torch_private.refresh_weights(part, flatten=False)
    return writes  # type: ignore[return-value]
