"""A graph's settings of its modules: pipeline stages and recomputation.

The settings belong to the graph, so that two graphs may share a module. ``graph.model`` returns the
module wrapped in a `ProxyModule`, and ``graph.model.layer.to(nn.graph.GraphModule)`` returns the
settings of that submodule.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from .._base import torch_private
from .._ops.methods import register_view_class
from ..errors import GraphError, RenamedError
from ..sharding.placement import Placement

__all__ = ["GraphModule", "GraphTensor", "ModuleSettings", "ProxyModule", "bare", "stage_of_tensor"]


class ModuleSettings:
    """The settings of one module in one graph. Setting any other attribute is an error."""

    __slots__ = ("activation_checkpointing", "placement", "stage_id")

    def __init__(self) -> None:
        self.stage_id: int | None = None
        self.placement: Placement | None = None
        self.activation_checkpointing = False

    def set_stage(self, stage_id: int | None = None, placement: Placement | None = None) -> None:
        """Assign this module to pipeline stage ``stage_id``, which runs on ``placement``.

        The module's inputs are moved to that placement, with their sbp unchanged. Raises GraphError
        if ``stage_id`` is not a number from 0 on, or ``placement`` is not a placement.
        """
        if stage_id is not None and (
            not isinstance(stage_id, int) or isinstance(stage_id, bool) or stage_id < 0
        ):
            raise GraphError(f"set_stage: stage_id counts the stages from 0, got {stage_id!r}")
        if placement is not None and not isinstance(placement, Placement):
            raise GraphError(
                f"set_stage: placement must be a globaltensor.placement, got {placement!r}"
            )
        self.stage_id, self.placement = stage_id, placement

    @property
    def plain(self) -> bool:
        return (
            self.stage_id is None and self.placement is None and not self.activation_checkpointing
        )


class GraphModule(ModuleSettings):
    """The settings that ``module.to(nn.graph.GraphModule)`` returns inside a graph."""

    __slots__ = ()


class GraphTensor(ModuleSettings):
    """The settings of a global tensor that ``tensor.to(nn.graph.GraphTensor)`` returns.

    The call is made in build()."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def set_stage(self, stage_id: int | None = None, placement: Placement | None = None) -> None:
        """Start pipeline stage ``stage_id``, which runs on ``placement``, at this tensor.

        Everything that build() computes from this tensor from here on belongs to the stage, except
        inside modules with their own stage. The tensor is moved to the placement, with its sbp
        unchanged. Raises GraphError as `ModuleSettings.set_stage` does, and outside of build()."""
        if not torch_private.function_mode_on():
            raise GraphError("set_stage of a tensor: call it in build(), where the tensor is used")
        super().set_stage(stage_id, placement)
        torch.overrides.handle_torch_function(
            stage_of_tensor, (self._tensor,), self._tensor, stage_id, placement
        )  # type: ignore[no-untyped-call]


register_view_class(GraphTensor)


def stage_of_tensor(
    tensor: torch.Tensor, stage_id: int | None, placement: Placement | None
) -> None:
    """Do nothing: this is the function that a recorder sees for `GraphTensor.set_stage`."""


class ProxyModule:
    """A wrapper of a graph's module that behaves as the module and knows its settings."""

    def __init__(self, module: Any, blocks: dict[int, GraphModule]) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_blocks", blocks)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return this module's settings in this graph for the class GraphModule.

        For the class nn.Module, return the module itself. For other arguments, convert the module
        as ``torch.nn.Module.to`` does."""
        if args and args[0] is GraphModule:
            return self._blocks.setdefault(id(self._module), GraphModule())
        if args and args[0] is torch.nn.Module:
            return self._module
        return _as_proxy(self._module.to(*args, **kwargs), self._blocks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def __copy__(self) -> Any:
        return copy.copy(self._module)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._module, memo)

    def __getattr__(self, name: str) -> Any:
        if name == "config" and not hasattr(self._module, name):
            raise RenamedError(
                "a module's .config was removed: use .to(nn.graph.GraphModule), which has "
                "set_stage(stage_id, placement) and activation_checkpointing"
            )
        value = getattr(self._module, name)
        if (
            name in WALKS
            and inspect.ismethod(value)
            and value.__func__ is getattr(WALKS[name], name)
        ):
            return functools.partial(_walk, value, self._blocks)
        return _as_proxy(value, self._blocks)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, bare(value))

    def get_submodule(self, target: str) -> Any:
        """Return a submodule by its path, as ``torch.nn.Module.get_submodule`` does.

        The result is a proxy: ``graph.model.get_submodule("layers.3").to(nn.graph.GraphModule)``.
        """
        return _as_proxy(self._module.get_submodule(target), self._blocks)

    def __getitem__(self, index: Any) -> Any:
        return _as_proxy(self._module[index], self._blocks)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._module[index] = bare(value)

    def __delitem__(self, index: Any) -> None:
        del self._module[index]

    def __eq__(self, other: object) -> bool:
        return bool(self._module == (other._module if type(other) is ProxyModule else other))

    def __hash__(self) -> int:
        return hash(self._module)

    def __iter__(self) -> Iterator[Any]:
        return iter(_as_proxy(m, self._blocks) for m in self._module)

    def __len__(self) -> int:
        return len(self._module)

    def __contains__(self, item: Any) -> bool:
        return item in self._module

    def __repr__(self) -> str:
        return repr(self._module)


#: PyTorch's methods that yield modules or (name, module) pairs, and the class that defines each. An
#: override of such a method in a user's class is left as it is.
WALKS = {
    **dict.fromkeys(("children", "named_children", "modules", "named_modules"), torch.nn.Module),
    **dict.fromkeys(("items", "values"), torch.nn.ModuleDict),
}


def bare(value: Any) -> Any:
    """Return the module that a proxy wraps.

    If a module was made of proxies (``self.net = nn.Sequential(self.a, self.b)``), replace the
    proxies in it by their modules and return it."""
    value = value._module if type(value) is ProxyModule else value
    for module in value.modules() if isinstance(value, torch.nn.Module) else ():
        for name, part in module._modules.items():
            if type(part) is ProxyModule:
                module._modules[name] = part._module  # before the walk reaches it
    return value


def _walk(method: Any, blocks: dict[int, GraphModule], *args: Any, **kwargs: Any) -> Iterator[Any]:
    for found in method(*args, **kwargs):
        yield (
            (found[0], _as_proxy(found[1], blocks))
            if isinstance(found, tuple)
            else _as_proxy(found, blocks)
        )


def _as_proxy(value: Any, blocks: dict[int, GraphModule]) -> Any:
    return ProxyModule(value, blocks) if isinstance(value, torch.nn.Module) else value
