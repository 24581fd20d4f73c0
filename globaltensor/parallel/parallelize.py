"""``flow.parallelize(model, placement, plan)``: make a model written for one device global.

A plan has a name. It defines the sbp of each parameter, and for some layers that their results are
replicated at once. Any choice computes the same, since data is boxed where the algebra needs it.
The plans are recipes for speed and memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .._base.providers import Providers
from .._tensor.convert import check_placement
from .._tensor.global_tensor import GlobalTensor
from ..errors import SbpError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, broadcast, split
from .adapters import Layer, layers_in
from .expert_modules import dispatch_tokens, expert_parameters, experts_in
from .module_to_global import SameModel, SbpChoice
from .tensor_parallel_plan import (
    SplitParameter,
    cuts_heads,
    declared_splits,
    largest_splits,
    paired_splits,
)

__all__ = ["PLANS", "parallelize"]


#: Functions that shard a model. Under "auto": by a search, (model, placement, inputs) -> model.
#: Under a plan's class: by this plan, (model, placement, plan) -> model.
MODEL_PLANNERS = Providers("planners of models", "globaltensor.auto")


class Recipe(NamedTuple):
    """A plan on one axis of the placement."""

    sbp: Callable[[str, torch.Tensor], Sbp]  # the sbp of a parameter, by its path
    whole: Sequence[nn.Module] = ()  # their results are not left partial or split by features
    gathered: Sequence[nn.Module] = ()  # their inputs arrive split in time and are gathered
    in_time: bool = False  # partial results are split in time, not replicated


def parallelize(
    model: nn.Module,
    placement: Placement,
    plan: SbpChoice | str | Sequence[str] | Any,
    *,
    inputs: Any = None,
) -> nn.Module:
    """Make every parameter and buffer of ``model`` global on ``placement``, in place.

    Returns the model, with its class, methods and parameter names unchanged. Collective.

    ``plan``:

    - ``"data"``: every rank holds all parameters. Pass the batch as ``split(0)``.
    - ``"fsdp"``: every parameter is split, and gathered when it is used. Pass the batch as
      ``split(0)``. (Rajbhandari et al. 2020, ZeRO stage 3.)
    - ``"tensor"``: pairs of linear layers are split by their outputs and then by their inputs, and
      vocabularies by their words. Pass the batch as ``broadcast``. The model itself defines these
      layers (``tp_plan`` of Hugging Face models), or its structure does. Adapters of a layer (LoRA)
      follow it. All else stays replicated, nn.MultiheadAttention and convolutions too. (Shoeybi et
      al. 2019, Megatron-LM.)
    - ``"sequence"``: like tensor, but activations [batch, time, features] between the pairs are
      split in time. This needs a reduce-scatter and an all-gather in place of each all-reduce, and
      less memory. (Korthikanti et al. 2022.)
    - ``"expert"``: modules of experts are split over their experts, and all else is as in data.
      Tokens are sent to the ranks of their experts and back, by one all-to-all each way. Pass the
      batch as ``split(0)``. If it is ``broadcast``, each rank computes its experts' share.
      (Lepikhin et al. 2021, GShard.)
    - ``"hybrid"``, on a placement of two axes: a short name of ``["data", "tensor"]``. Pass the
      batch as ``[split(0), broadcast]``.
    - ``"auto"``: the best plan that a search finds for this model on this placement (`flow.auto`).
      The search uses ``inputs`` (a tuple of example arguments), or the arguments of the first call.
      Pass the batch in any layout.
    - a plan from ``flow.auto.plan`` or ``flow.auto.load_plan``, for as many ranks as the placement
      has. It defines layouts, and stages if it has several. ``graph.config.use_auto_plan(plan)``
      applies its micro-batches, schedule and ZeRO.
    - a list of one name for each axis, ``["fsdp", "tensor"]``. On several axes ``"tensor"``,
      ``"sequence"`` or ``"expert"`` alone means data over all but the last.
    - any sbp argument of ``module.to_global``: path patterns ``{"*.q_proj.weight": split(0), "*":
      broadcast}``, or a callable ``(path, tensor) -> sbp``.

    Under every plan `moe_experts` runs the modules of experts. Such a module has parameters of
    three dims, the first of which is the experts, and ``forward(hidden_states, top_k_index,
    top_k_weights)``. The local tensors are full values of the same model on every rank, and the
    first rank's data counts. The tensors of a model on the meta device stay there.
    ``model.to_empty(device=...)`` then allocates memory for each rank's local tensors alone.
    ``reset_parameters`` or ``load_state_dict`` fills them. ``load_state_dict(state, assign=True)``
    does both: plain tensors of ``state`` become global in the layout of those that they replace.

    Raises SbpError for an unknown plan, and for "expert" on a model without such modules. Raises
    PlacementError, KindError if a parameter cannot be global (sparse, quantized, not initialized),
    and ShapeError if the ranks' models differ.

    >>> import torch
    >>> import globaltensor as flow
    >>> model = flow.parallelize(torch.nn.Linear(4, 2), flow.placement("cpu", [0]), "fsdp")
    >>> model.weight.sbp
    (globaltensor.sbp.split(dim=0),)
    """
    check_placement(placement)
    if not isinstance(model, nn.Module):
        raise SbpError(
            f"parallelize takes a torch.nn.Module, not a {type(model).__name__}: to make a tensor "
            f"global, use x.to_global(placement, sbp)"
        )
    # before shapes are read, because not every kind of parameter has one
    same = SameModel(model, placement, "parallelize")
    if plan == "auto":
        searched: nn.Module = MODEL_PLANNERS["auto"](
            _dispatch_expert_tokens(model), placement, inputs
        )
        return searched
    if (apply_plan := MODEL_PLANNERS.get(type(plan))) is not None:
        planned: nn.Module = apply_plan(_dispatch_expert_tokens(model), placement, plan)
        return planned
    names = _names(plan, placement.axes)
    if names is None:
        same.lay_out(plan)  # type: ignore[arg-type]
        return _dispatch_expert_tokens(model)
    recipes = [PLANS[name](model, size) for name, size in zip(names, placement.shape, strict=True)]
    buffers = {path for path, _ in model.named_buffers(remove_duplicate=False)}

    def layout(path: str, tensor: torch.Tensor) -> list[Sbp]:
        return [broadcast if path in buffers else recipe.sbp(path, tensor) for recipe in recipes]

    same.lay_out(layout)
    for axis, recipe in enumerate(recipes):
        for module in recipe.whole:
            module.register_forward_hook(Settled(axis, recipe.in_time))
        for module in recipe.gathered:
            module.register_forward_pre_hook(Gathered(axis), with_kwargs=True)
    return _dispatch_expert_tokens(model)


def _dispatch_expert_tokens(model: nn.Module) -> nn.Module:
    for module in experts_in(model).values():
        dispatch_tokens(module)
    return model


def _box_axis(x: GlobalTensor, axis: int, entry: Sbp) -> Any:
    return x.to_global(sbp=[entry if a == axis else e for a, e in enumerate(x.sbp)])


class Settled:
    """A forward hook that settles a module's result on one axis.

    A partial result is replicated by one all-reduce, or split in time by one reduce-scatter. A
    result that is split by features is gathered."""

    def __init__(self, axis: int, in_time: bool) -> None:
        self.axis, self.in_time = axis, in_time

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, GlobalTensor) or len(output.sbp) <= self.axis:
            return None
        entry = output.sbp[self.axis]
        if entry.is_partial:
            return _box_axis(
                output, self.axis, split(1) if self.in_time and output.dim() > 2 else broadcast
            )
        return (
            _box_axis(output, self.axis, broadcast)
            if entry.is_split and entry.dim == output.dim() - 1
            else None
        )


class Gathered:
    """A forward pre-hook that gathers activations that are split in time on one axis.

    They are gathered once for all layers inside that receive them."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(self._gathered(a) for a in args), {
            name: self._gathered(a) for name, a in kwargs.items()
        }

    def _gathered(self, x: Any) -> Any:
        if (
            not isinstance(x, GlobalTensor)
            or len(x.sbp) <= self.axis
            or x.dim() < 3
            or not x.is_floating_point()
        ):
            return x
        entry = x.sbp[self.axis]
        return _box_axis(x, self.axis, broadcast) if entry.is_split and entry.dim == 1 else x


def _names(plan: Any, axes: int) -> list[str] | None:
    """Return the recipe name of each axis, or None if the plan is no name.

    Raises SbpError for an unknown name, or if the number of names does not fit."""
    names = (
        [plan]
        if isinstance(plan, str)
        else list(plan)
        if isinstance(plan, (list, tuple)) and plan and all(isinstance(p, str) for p in plan)
        else None
    )
    if names is None:
        return None
    if names == ["hybrid"]:
        if axes != 2:
            raise SbpError(
                f'plan "hybrid" needs a placement of two axes (replicas x ranks of a replica), not '
                f'of {axes}: for example flow.placement("cpu", [[0, 1], [2, 3]])'
            )
        names = ["data", "tensor"]
    elif names in (["tensor"], ["sequence"], ["expert"]):
        names = ["data"] * (axes - 1) + names
    elif len(names) == 1:
        names = names * axes
    unknown = [name for name in names if name not in PLANS]
    if unknown:
        known = ", ".join(map(repr, [*PLANS, "hybrid", "auto"]))
        name = unknown[0].lower()
        near = (
            [_OTHER_NAMES[name]]
            if name in _OTHER_NAMES
            else difflib.get_close_matches(name, [*PLANS, "hybrid", "auto"], 1)
        )
        raise SbpError(
            f"unknown plan {unknown[0]!r}: there are {known}, a list of these with one for each "
            f"axis, and path patterns" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if len(names) != axes:
        raise SbpError(
            f"the plan names {len(names)} axes ({', '.join(names)}), the placement has {axes}: "
            f"pass one plan for each axis, or a placement with an axis for each plan. "
            f'flow.placement("cpu", [[0, 1], [2, 3]]) has two'
        )
    return names


def _data(model: nn.Module, size: int) -> Recipe:
    return Recipe(lambda path, tensor: broadcast)


def _fsdp(model: nn.Module, size: int) -> Recipe:
    of_experts = _paths_of_experts(model)

    def choose(path: str, tensor: torch.Tensor) -> Sbp:
        """Return the split of the first dim that gives every rank an equal shard.

        If there is none, the longest dim is split. The dim of experts is left out: tokens would be
        sent to split experts, which should be gathered."""
        if not tensor.dim():
            return broadcast
        dims = range(path in of_experts, tensor.dim())
        even = next((d for d in dims if tensor.shape[d] and tensor.shape[d] % size == 0), None)
        return split(max(dims, key=lambda d: tensor.shape[d]) if even is None else even)

    return Recipe(choose)


def _paths_of_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> module of experts, for the parameters whose first dim is the experts."""
    return {
        f"{path}.{name}".lstrip("."): module
        for path, module in experts_in(model).items()
        for name in expert_parameters(module)
    }


def _expert(model: nn.Module, size: int) -> Recipe:
    paths = _paths_of_experts(model)
    if not paths:
        raise SbpError(
            'plan "expert": the model has no module of experts. Such a module has parameters of '
            "three dims, the first of which is the experts, "
            'and forward(hidden_states, top_k_index, top_k_weights). Use "data" or "tensor" instead'
        )
    return Recipe(
        lambda path, tensor: split(0) if path in paths else broadcast,
        list({id(m): m for m in paths.values()}.values()),
    )


def _tensor(model: nn.Module, size: int) -> Recipe:
    # each rank has some experts in full, even if the model's plan splits their parameters
    experts = _paths_of_experts(model)
    parts = [
        part
        for part in declared_splits(model) or paired_splits(model) or largest_splits(model)
        if part.path not in experts
    ]
    parts = [part for part in parts if not cuts_heads(part, parts, model, size)]
    parts += [
        SplitParameter(path, 0, path.rpartition(".")[0], module, module, True)
        for path, module in experts.items()
    ]
    dims = {part.path: part.dim for part in parts}
    whole = {id(part.module): part.module for part in parts if part.whole}

    def choose(path: str, tensor: torch.Tensor) -> Sbp:
        return split(dims[path]) if path in dims else broadcast

    return Recipe(choose, list(whole.values()))


def _sequence(model: nn.Module, size: int) -> Recipe:
    recipe, modules = _tensor(model, size), dict(model.named_modules())
    linears = {
        id(layer.module): layer
        for layer in layers_in(model)
        if not isinstance(layer.base, nn.Embedding)
    }
    columns = [
        part.layer
        for part in declared_splits(model) or paired_splits(model) or largest_splits(model)
        if part.column
    ]
    parents = [path.rpartition(".")[0] for path in dict.fromkeys(columns)]
    # If all inputs of a module are passed to several such layers (queries, keys and values), they
    # are gathered once, before the module.
    shared = {
        parent
        for parent in parents
        if parents.count(parent) > 1 and _only_linears(modules[parent], linears)
    }
    gathered = dict.fromkeys(
        parent if (parent := path.rpartition(".")[0]) in shared else path for path in columns
    )
    return recipe._replace(gathered=[modules[path] for path in gathered], in_time=True)


def _only_linears(module: nn.Module, linears: Mapping[int, Layer]) -> bool:
    """Return True if linear layers are the only children with parameters for the module's inputs.

    A norm among the children, for example, would need the input without the gather."""
    widths = {linears[id(child)].inputs for child in module.children() if id(child) in linears}
    others = [child for child in module.children() if id(child) not in linears]
    return not any(p.shape[-1] in widths for child in others for p in child.parameters() if p.dim())


#: The plans by name: (model, size of the axis) -> recipe.
PLANS: dict[str, Callable[[nn.Module, int], Recipe]] = {
    "data": _data,
    "fsdp": _fsdp,
    "tensor": _tensor,
    "sequence": _sequence,
    "expert": _expert,
}

#: What other libraries call these plans.
_OTHER_NAMES: dict[str, str | list[str]] = {
    **dict.fromkeys(("ddp", "dp", "replicate", "data_parallel"), "data"),
    **dict.fromkeys(("fsdp2", "zero", "zero3", "zero-3", "fully_shard"), "fsdp"),
    **dict.fromkeys(("tp", "tensor_parallel", "model"), "tensor"),
    **dict.fromkeys(("sp", "sequence_parallel"), "sequence"),
    **dict.fromkeys(("ep", "moe"), "expert"),
    "hsdp": ["data", "fsdp"],
}
