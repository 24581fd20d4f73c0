"""The table of torch's functions: what kind of entry answers a call of each on global tensors.

``globaltensor ops`` prints it. Dispatch looks functions up in this order: handler, rule, body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .._base import patches, torch_private
from .._base.python_bodies import python_body
from .._tensor.global_tensor import GlobalTensor
from .call_plan import name_of
from .dispatch import handler_kind
from .methods import PLAIN
from .rules import RULES

__all__ = ["OpEntry", "kind_of_function", "op_table"]

#: Kinds of entries, with what they mean to a user.
KINDS = {
    "rule": "a rule says which layouts it admits; it runs on local tensors",
    "creation": "makes a tensor on the placement of its arguments",
    "random": "draws the numbers that one device would draw",
    "method": "a method or query that needs no rule",
    "list of tensors": "a kernel over lists of tensors, run on the lists of local tensors",
    "backward": "starts a backward pass",
    "patch": "replaced, because it checks no override (globaltensor doctor --patches)",
    "body": "runs torch's own Python function; the calls inside it are dispatched",
    "refused": "raises an error that names an alternative",
    "none": "no entry: it runs on full tensors, with a warning",
}


class OpEntry(NamedTuple):
    """A torch function, as users call it, and the kind of entry that answers it (see `KINDS`)."""

    function: str
    kind: str
    #: The rule's name, or the target of the patch. Empty for other kinds.
    detail: str


def kind_of_function(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the kind of entry that answers calls of a torch function, and the entry's detail.

    >>> import torch
    >>> kind_of_function(torch.add)
    ('rule', 'add')
    >>> kind_of_function(torch.Tensor.new_zeros)[0], kind_of_function(torch.Tensor.apply_)[0]
    ('creation', 'none')
    """
    if (kind := handler_kind(function)) is not None:
        return kind, ""
    if function in RULES:
        return "rule", RULES[function].name
    if _own_attribute(function):
        return "method", ""
    for row in patches.TABLE:
        if patches.current(row.target) is function:
            return "patch", row.target
    return ("body" if python_body(function) is not None else "none"), ""


def op_table() -> list[OpEntry]:
    """Return an entry for each function of torch that a tensor can override, by name.

    >>> table = op_table()
    >>> len(table) > 1000, {entry.kind for entry in table} <= set(KINDS)
    (True, True)
    """
    return sorted({OpEntry(name, *kind_of_function(f)) for name, f in _overridable_functions()})


def _own_attribute(function: Any) -> bool:
    """Return True for a property, or for a method that GlobalTensor overrides."""
    name = name_of(function)
    if getattr(function, "__name__", "") == "__get__":
        return True
    return function is getattr(torch.Tensor, name, None) and name in vars(GlobalTensor)


def _overridable_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each overridable function with the name by which users call it.

    Names that this library adds to torch's classes are left out.
    """
    own = {id(getattr(torch.Tensor, name)) for name in PLAIN}
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            name = torch.overrides.resolve_name(function) or name_of(function)
            if id(getattr(function, "__self__", function)) in own or id(function) in own:
                continue
            if not any(_is_private(part) for part in name.split(".")):
                yield name, function
    for function in (*torch_private.vmap_functions(), *torch_private.dual_functions()):
        yield f"torch.{function.__name__}", function
    for function in torch_private.list_functions():
        yield f"torch.{function.__name__}", function


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
