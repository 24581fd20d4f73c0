"""``flow.parallelize(model, placement, plan)``: a model written for one device becomes global, by the name of a plan.

A plan says which sbp each parameter has, nothing else; any choice computes the same, since the data moves where the algebra needs it. So the names are
recipes for speed and memory: who holds what, and which activations then stay where they are.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .convert import check_placement
from .errors import SbpError
from .modules import SbpChoice, module_to_global
from .placement import Placement
from .sbp import Sbp, broadcast, split

__all__ = ["PLANS", "parallelize"]

#: sbp of one tensor on one axis of the placement: (model, size of the axis) -> (path, tensor) -> sbp.
Recipe = Callable[[nn.Module, int], Callable[[str, torch.Tensor], Sbp]]


def parallelize(model: nn.Module, placement: Placement, plan: SbpChoice | str | Sequence[str]) -> nn.Module:
    """Make every parameter and buffer of ``model`` global on ``placement``, in place; returns the model, its class, methods and parameter names unchanged.

    ``plan``:

    - ``"data"``: every rank holds all parameters; give the batch as ``split(0)``.
    - ``"fsdp"``: every parameter is split, and gathered when it is used; give the batch as ``split(0)``. (Rajbhandari et al. 2020, ZeRO stage 3.)
    - ``"tensor"``: pairs of linear layers are split by their outputs and then by their inputs, vocabularies by their words; give the batch as ``broadcast``.
      Which layers those are the model says itself (``tp_plan`` of Hugging Face models), or its structure does. (Shoeybi et al. 2019, Megatron-LM.)
    - ``"hybrid"``, on a placement of two axes: data over the first, tensor over the second; give the batch as ``[split(0), broadcast]``.
    - one name for each axis, ``["fsdp", "tensor"]``; on several axes ``"tensor"`` alone means data over all but the last.
    - anything that ``module.to_global`` takes as sbp: path patterns ``{"*.q_proj.weight": split(0), "*": broadcast}``, a callable ``(path, tensor) -> sbp``.

    The local tensors are whole values, the same model on every rank (the first rank's count). Collective.
    Raises SbpError for an unknown plan, PlacementError, and ShapeError where the ranks' models differ.

    >>> import torch
    >>> import globaltensor as flow
    >>> model = flow.parallelize(torch.nn.Linear(4, 2), flow.placement("cpu", [0]), "fsdp")
    >>> model.weight.sbp
    (globaltensor.sbp.split(dim=0),)
    """
    check_placement(placement)
    names = _names(plan, placement.axes)
    if names is None:
        return module_to_global(model, placement, plan)  # type: ignore[arg-type]
    recipes = [PLANS[name](model, size) for name, size in zip(names, placement.shape, strict=True)]
    buffers = {path for path, _ in model.named_buffers(remove_duplicate=False)}

    def layout(path: str, tensor: torch.Tensor) -> list[Sbp]:
        return [broadcast if path in buffers else recipe(path, tensor) for recipe in recipes]

    return module_to_global(model, placement, layout)


def _names(plan: Any, axes: int) -> list[str] | None:
    """The recipe of each axis; None where the plan is no name."""
    given = [plan] if isinstance(plan, str) else list(plan) if isinstance(plan, (list, tuple)) and plan and all(isinstance(p, str) for p in plan) else None
    if given is None:
        return None
    if given == ["hybrid"]:
        if axes != 2:
            raise SbpError(f'plan "hybrid" needs a placement of two axes, replicas x ranks of one, not of {axes}: flow.placement("cpu", [[0, 1], [2, 3]])')
        given = ["data", "tensor"]
    elif given == ["tensor"]:
        given = ["data"] * (axes - 1) + given
    elif len(given) == 1:
        given = given * axes
    unknown = [name for name in given if name not in PLANS]
    if unknown:
        raise SbpError(f"unknown plan {unknown[0]!r}: there are {', '.join(map(repr, [*PLANS, 'hybrid']))}, a list of these for the axes, and path patterns")
    if len(given) != axes:
        raise SbpError(f"the plan names {len(given)} axes ({', '.join(given)}), the placement has {axes}")
    return given


def _data(model: nn.Module, size: int) -> Callable[[str, torch.Tensor], Sbp]:
    return lambda path, tensor: broadcast


def _fsdp(model: nn.Module, size: int) -> Callable[[str, torch.Tensor], Sbp]:
    def choose(path: str, tensor: torch.Tensor) -> Sbp:
        """The first dim that gives every rank an equal part; else the longest."""
        if not tensor.dim():
            return broadcast
        even = next((d for d, n in enumerate(tensor.shape) if n and n % size == 0), None)
        return split(max(range(tensor.dim()), key=lambda d: tensor.shape[d]) if even is None else even)

    return choose


def _tensor(model: nn.Module, size: int) -> Callable[[str, torch.Tensor], Sbp]:
    roles = _planned(model) or dict(_structured(model))

    def choose(path: str, tensor: torch.Tensor) -> Sbp:
        dim = roles.get(path)
        return broadcast if dim is None else split(dim)

    return choose


#: The plans by name.
PLANS: dict[str, Recipe] = {"data": _data, "fsdp": _fsdp, "tensor": _tensor}

# ---------------------------------------------------------------------------------------------------------------- what a model says itself


def _planned(model: nn.Module) -> dict[str, int]:
    """The dim that each parameter is split along, by the model's own ``tp_plan`` {path pattern of a module or parameter: style}; {} if it has none."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    found: dict[str, int] = {}
    if not isinstance(plan, Mapping):
        return found
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{path}.{name}".lstrip(".")
            style = next((s for pattern, s in plan.items() if fnmatch.fnmatchcase(full, pattern)), None)
            style = style or next((s for pattern, s in plan.items() if fnmatch.fnmatchcase(path, pattern)), None)
            dim = _dim_of(module, name, parameter, str(style or ""))
            if dim is not None:
                found[full] = dim
    return found


def _dim_of(module: nn.Module, name: str, parameter: torch.Tensor, style: str) -> int | None:
    """Along which dim a parameter of this style is split."""
    if "embedding" in style or style == "grouped_gemm":  # words; experts
        return 0
    if "colwise" in style:
        return _outputs(module, parameter)
    if "rowwise" in style and parameter.dim() > 1:
        return _inputs(module, parameter)
    return None


def _transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as [inputs, outputs] (transformers' Conv1D)."""
    return not isinstance(module, nn.Linear) and hasattr(module, "nf")


def _outputs(module: nn.Module, parameter: torch.Tensor) -> int:
    return parameter.dim() - 1 if _transposed(module) or parameter.dim() == 1 else parameter.dim() - 2


def _inputs(module: nn.Module, parameter: torch.Tensor) -> int:
    return parameter.dim() - 2 if _transposed(module) else parameter.dim() - 1


# ---------------------------------------------------------------------------------------------------------------- what its structure says


class _Layer:
    """A linear layer: where it is, and its numbers of inputs and outputs."""

    def __init__(self, path: str, module: nn.Module) -> None:
        weight: Any = module.weight
        self.path, self.module = path, module
        self.outputs, self.inputs = weight.shape[_outputs(module, weight)], weight.shape[_inputs(module, weight)]

    def split(self, role: str) -> Iterator[tuple[str, int]]:
        for name, parameter in self.module._parameters.items():
            if parameter is not None and role == "column":
                yield f"{self.path}.{name}", _outputs(self.module, parameter)
            elif parameter is not None and parameter.dim() > 1:
                yield f"{self.path}.{name}", _inputs(self.module, parameter)


def _structured(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Column-then-row pairs, found by who stands beside whom: in a block of a repeated list of layers, what widens or makes heads comes before what closes."""
    linears = [_Layer(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear) or (_transposed(m) and hasattr(m, "weight"))]
    for scope, group in itertools.groupby(linears, lambda layer: _scope(layer.path)):
        if scope:
            families = [list(f) for _, f in itertools.groupby(group, lambda layer: layer.path.rpartition(".")[0])]
            yield from _paired(families)
    yield from _vocabulary(model, linears)


def _scope(path: str) -> str:
    """The repeated block that a module is in, ``decoder.layers.3``; "" outside of any."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[: last + 1])


def _paired(families: list[list[_Layer]]) -> Iterator[tuple[str, int]]:
    """``families``: the linear layers of a block, those of one parent together."""
    waiting: list[_Layer] = []  # columns whose row is still to come
    for i, family in enumerate(families):
        first, last = family[0], family[-1]
        if waiting and len(family) == 1 and _closes(waiting[0], last):
            for layer in waiting:
                yield from layer.split("column")
            yield from last.split("row")
            waiting = []
        elif len(family) > 1 and _closes(first, last) and not _queries(family):
            for layer in family[:-1]:
                yield from layer.split("column")
            yield from last.split("row")
            waiting = []
        else:
            after = families[i + 1] if i + 1 < len(families) else []
            waiting = family if len(after) == 1 and _closes(first, after[0]) and len({layer.inputs for layer in family}) == 1 else []


def _closes(first: _Layer, last: _Layer) -> bool:
    """Whether ``last`` takes what ``first`` gives (or a share of it: queries, keys and values may be one layer) back to where it came from."""
    return first.outputs % last.inputs == 0 and last.outputs == first.inputs


def _queries(family: list[_Layer]) -> bool:
    """Three layers alike: queries, keys and values, whose row has another parent."""
    return len(family) == 3 and len({(layer.inputs, layer.outputs) for layer in family}) == 1


def _vocabulary(model: nn.Module, linears: list[_Layer]) -> Iterator[tuple[str, int]]:
    """The head that gives a logit for each word, and the tables of as many words."""
    tables = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Embedding)]
    words = {m.num_embeddings for _, m in tables} & {layer.outputs for layer in linears if not _scope(layer.path)}
    for layer in linears:
        if layer.outputs in words and not _scope(layer.path):
            yield from layer.split("column")
    for path, table in tables:
        if table.num_embeddings in words and not _scope(path):
            yield f"{path}.weight", 0
