"""``flow.parallelize(model, placement, plan)``: a model written for one device becomes global, by
the name of a plan.

A plan says which sbp each parameter has, and of some layers that their results are made whole at
once. Any choice computes the same, since the data moves where the algebra needs it: the names are
recipes for speed and memory.
"""

from __future__ import annotations

import fnmatch
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .._tensor.convert import check_placement
from .._tensor.global_tensor import GlobalTensor
from ..errors import SbpError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, broadcast, split
from .adapters import Layer, layers_in
from .expert_modules import dispatch_tokens, expert_parameters, experts_in
from .module_to_global import SameModel, SbpChoice

__all__ = ["PLANS", "parallelize"]


#: What lays a model out by a search, (model, placement, inputs) -> model, under str; or by a plan,
#: (model, placement, plan) -> model, under the plan's class. Set by globaltensor.auto.
SEARCHED: dict[type, Callable[[nn.Module, Placement, Any], nn.Module]] = {}


class Recipe(NamedTuple):
    """A plan on one axis of the placement."""

    sbp: Callable[[str, torch.Tensor], Sbp]  # of a parameter, by its path
    whole: Sequence[nn.Module] = ()  # whose results are not left partial or split by features
    gathered: Sequence[nn.Module] = ()  # whose inputs come split in time and are made whole
    in_time: bool = False  # partial results are split in time, not made whole


def parallelize(
    model: nn.Module,
    placement: Placement,
    plan: SbpChoice | str | Sequence[str] | Any,
    *,
    inputs: Any = None,
) -> nn.Module:
    """Make every parameter and buffer of ``model`` global on ``placement``, in place; returns the
    model, its class, methods and parameter names unchanged.

    ``plan``:

    - ``"data"``: every rank holds all parameters; give the batch as ``split(0)``.
    - ``"fsdp"``: every parameter is split, and gathered when it is used; give the batch as
      ``split(0)``. (Rajbhandari et al. 2020, ZeRO stage 3.)
    - ``"tensor"``: pairs of linear layers are split by their outputs and then by their inputs,
      vocabularies by their words; give the batch as ``broadcast``. Which layers those are the model
      says itself (``tp_plan`` of Hugging Face models), or its structure does. Adapters of a layer
      (LoRA) follow it. (Shoeybi et al. 2019, Megatron-LM.)
    - ``"sequence"``: as tensor, and between the pairs activations [batch, time, features] are split
      in time: a reduce-scatter and an all-gather in place of each all-reduce, and less memory.
      (Korthikanti et al. 2022.)
    - ``"expert"``: modules of experts are split over their experts, and all else is as in data:
      tokens go to the ranks of their experts and come back, by one all-to-all each way. Give the
      batch as ``split(0)``; of one given as ``broadcast`` each rank computes its experts' share.
      (Lepikhin et al. 2021, GShard.)
    - ``"hybrid"``, on a placement of two axes: data over the first, tensor over the second; give
      the batch as ``[split(0), broadcast]``.
    - ``"auto"``: what a search finds best for this model on this placement (`flow.auto`), for
      ``inputs`` (a tuple of example arguments), or those of its first call; give the batch in any
      layout.
    - a plan, from ``flow.auto.plan`` or ``flow.auto.load_plan``, for as many ranks as the placement
      has: layouts, and stages if it has several. Micro-batches, schedule and ZeRO are taken by
      ``graph.config.follow(plan)``.
    - one name for each axis, ``["fsdp", "tensor"]``; on several axes ``"tensor"``, ``"sequence"``
      or ``"expert"`` alone means data over all but the last.
    - anything that ``module.to_global`` takes as sbp: path patterns ``{"*.q_proj.weight": split(0),
      "*": broadcast}``, a callable ``(path, tensor) -> sbp``.

    Under every plan a module of experts, one with parameters [experts, ., .] and
    ``forward(hidden_states, top_k_index, top_k_weights)``, runs by `experts`. The local tensors are
    whole values, the same model on every rank (the first rank's count). Of a model on the meta
    device the parts stay there: then ``model.to_empty(device=...)`` gives each rank memory for its
    part alone, to be filled by ``reset_parameters`` or ``load_state_dict``. Collective. Raises
    SbpError for an unknown plan, and for "expert" on a model without such modules, PlacementError,
    KindError of parameters that cannot be global (sparse, quantized, not initialized), and
    ShapeError where the ranks' models differ.

    >>> import torch
    >>> import globaltensor as flow
    >>> model = flow.parallelize(torch.nn.Linear(4, 2), flow.placement("cpu", [0]), "fsdp")
    >>> model.weight.sbp
    (globaltensor.sbp.split(dim=0),)
    """
    check_placement(placement)
    if not isinstance(model, nn.Module):
        raise SbpError(
            f"parallelize takes a torch.nn.Module, not a {type(model).__name__}: a tensor becomes "
            f"global by x.to_global(placement, sbp)"
        )
    same = SameModel(
        model, placement
    )  # before anything looks at shapes: not every kind of parameter has one
    if plan == "auto":
        return SEARCHED[str](_dispatched(model), placement, inputs)
    if type(plan) in SEARCHED and not isinstance(plan, str):
        return SEARCHED[type(plan)](_dispatched(model), placement, plan)
    names = _names(plan, placement.axes)
    if names is None:
        same.lay_out(plan)  # type: ignore[arg-type]
        return _dispatched(model)
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
    return _dispatched(model)


def _dispatched(model: nn.Module) -> nn.Module:
    for module in experts_in(model).values():
        dispatch_tokens(module)
    return model


def _boxed(x: GlobalTensor, axis: int, entry: Sbp) -> Any:
    return x.to_global(sbp=[entry if a == axis else e for a, e in enumerate(x.sbp)])


class Settled:
    """A forward hook: on this axis every rank has the module's whole result, by one all-reduce of
    what is partial or one gather of split features; or, of what is partial, its stretch of time, by
    one reduce-scatter."""

    def __init__(self, axis: int, in_time: bool) -> None:
        self.axis, self.in_time = axis, in_time

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, GlobalTensor) or len(output.sbp) <= self.axis:
            return None
        entry = output.sbp[self.axis]
        if entry.is_partial:
            return _boxed(
                output, self.axis, split(1) if self.in_time and output.dim() > 2 else broadcast
            )
        return (
            _boxed(output, self.axis, broadcast)
            if entry.is_split and entry.dim == output.dim() - 1
            else None
        )


class Gathered:
    """A forward pre-hook: activations that are split in time on this axis are gathered, once for
    all layers inside that take them."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(self.whole(a) for a in args), {
            name: self.whole(a) for name, a in kwargs.items()
        }

    def whole(self, x: Any) -> Any:
        if (
            not isinstance(x, GlobalTensor)
            or len(x.sbp) <= self.axis
            or x.dim() < 3
            or not x.is_floating_point()
        ):
            return x
        entry = x.sbp[self.axis]
        return _boxed(x, self.axis, broadcast) if entry.is_split and entry.dim == 1 else x


def _names(plan: Any, axes: int) -> list[str] | None:
    """The recipe of each axis; None where the plan is no name."""
    given = (
        [plan]
        if isinstance(plan, str)
        else list(plan)
        if isinstance(plan, (list, tuple)) and plan and all(isinstance(p, str) for p in plan)
        else None
    )
    if given is None:
        return None
    if given == ["hybrid"]:
        if axes != 2:
            raise SbpError(
                f'plan "hybrid" needs a placement of two axes, replicas x ranks of one, not of '
                f'{axes}: flow.placement("cpu", [[0, 1], [2, 3]])'
            )
        given = ["data", "tensor"]
    elif given in (["tensor"], ["sequence"], ["expert"]):
        given = ["data"] * (axes - 1) + given
    elif len(given) == 1:
        given = given * axes
    unknown = [name for name in given if name not in PLANS]
    if unknown:
        known = ", ".join(map(repr, [*PLANS, "hybrid", "auto"]))
        raise SbpError(
            f"unknown plan {unknown[0]!r}: there are {known}, a list of these for the axes, and "
            f"path patterns"
        )
    if len(given) != axes:
        raise SbpError(
            f"the plan names {len(given)} axes ({', '.join(given)}), the placement has {axes}"
        )
    return given


def _data(model: nn.Module, size: int) -> Recipe:
    return Recipe(lambda path, tensor: broadcast)


def _fsdp(model: nn.Module, size: int) -> Recipe:
    of_experts = _paths_of_experts(model)

    def choose(path: str, tensor: torch.Tensor) -> Sbp:
        """The first dim that gives every rank an equal part; else the longest. Not that of experts:
        tokens would go to them, and they are to be gathered."""
        if not tensor.dim():
            return broadcast
        dims = range(path in of_experts, tensor.dim())
        even = next((d for d in dims if tensor.shape[d] and tensor.shape[d] % size == 0), None)
        return split(max(dims, key=lambda d: tensor.shape[d]) if even is None else even)

    return Recipe(choose)


def _paths_of_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The parameters whose first dim is the experts, and whose they are."""
    return {
        f"{path}.{name}".lstrip("."): module
        for path, module in experts_in(model).items()
        for name in expert_parameters(module)
    }


def _expert(model: nn.Module, size: int) -> Recipe:
    paths = _paths_of_experts(model)
    if not paths:
        raise SbpError(
            'plan "expert": the model has no module of experts, which is one with parameters of '
            "three dims, the first the experts, "
            'and forward(hidden_states, top_k_index, top_k_weights); take "data", or "tensor"'
        )
    return Recipe(
        lambda path, tensor: split(0) if path in paths else broadcast,
        list({id(m): m for m in paths.values()}.values()),
    )


def _tensor(model: nn.Module, size: int) -> Recipe:
    experts = _paths_of_experts(
        model
    )  # each rank has some of them whole, whatever the model's plan says of their insides
    parts = [
        part
        for part in _planned(model) or _structured(model) or _largest(model)
        if part.path not in experts
    ]
    parts = [part for part in parts if not _cuts_heads(part, parts, model, size)]
    parts += [
        _Part(path, 0, path.rpartition(".")[0], module, module, True)
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
        for part in _planned(model) or _structured(model) or _largest(model)
        if part.column
    ]
    parents = [path.rpartition(".")[0] for path in dict.fromkeys(columns)]
    # Where all that a module takes goes into several such layers (queries, keys and values) it is
    # gathered once, where they have it from.
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
    """Whether what holds parameters among the children are linear layers alone; a norm beside them
    would take the input as it comes."""
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


class _Part(NamedTuple):
    """A parameter that is split."""

    path: str
    dim: int
    # the path of the module that stands for the layer which it belongs to, with adapters if it has
    # some
    layer: str
    module: nn.Module  # that one
    base: nn.Module  # the layer itself
    whole: bool  # the module's result is made whole
    column: bool = False  # it takes whole activations


# ------------------------------------------------------------------------- what a model says itself


def _planned(model: nn.Module) -> list[_Part]:
    """By the model's own ``tp_plan`` {path pattern of a module or parameter: style}, or those of
    models inside it; nothing if there is none."""
    layers = layers_in(model)
    found = [
        part for path, module, plan in _plans(model) for part in _by(plan, path, module, layers)
    ]
    # A layer beside one of rows that takes less gives several things in one (queries, keys and
    # values): cut, each of them is split as it is.
    taken = {
        _around(part): part.base.in_features
        for part in found
        if not part.column and isinstance(part.base, nn.Linear)
    }
    several = [
        part.column
        and isinstance(part.base, nn.Linear)
        and part.base.out_features > taken.get(_around(part), math.inf)
        for part in found
    ]
    return [
        part._replace(whole=part.whole and not more)
        for part, more in zip(found, several, strict=True)
    ]


def _plans(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, Mapping[str, Any]]]:
    """(path, module, its plan) of the outermost modules that have one of their own; what stands
    around a model hands on its attributes, with other paths."""
    for name in ("tp_plan", "_tp_plan"):
        if (
            inspect.getattr_static(module, name, None) is not None
            and isinstance(plan := getattr(module, name), Mapping)
            and plan
        ):
            yield path, module, plan
            return
    for name, child in module.named_children():
        yield from _plans(child, f"{path}.{name}".lstrip("."))


def _by(
    plan: Mapping[str, Any], at: str, model: nn.Module, layers: Sequence[Layer]
) -> Iterator[_Part]:
    """Return what the plan of a model, at that path, says of its parameters."""
    head = (
        model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    )  # its logits stay split by words: cross-entropy takes them so

    def part(
        path: str, dim: int | None, layer: str, module: nn.Module, base: nn.Module, style: str
    ) -> Iterator[_Part]:
        if dim is not None:
            whole = "colwise" not in style or ("gather" in style and module is not head)
            yield _Part(path, dim, layer, module, base, whole, "colwise" in style)

    inside = {id(m) for layer in layers for m in layer.module.modules()}
    for layer in layers:
        if not at or layer.path == at or layer.path.startswith(f"{at}."):
            style = _style(plan, layer.path.removeprefix(at).lstrip("."))
            for path, parameter in layer.parameters():
                name = path.rpartition(".")[2]
                own = (
                    _style(plan, f"{layer.path}.{name}".removeprefix(at).lstrip("."))
                    if layer.own(path)
                    else ""
                )
                yield from part(
                    path,
                    _dim(layer, parameter, own or style),
                    layer.path,
                    layer.module,
                    layer.base,
                    own or style,
                )
    for path, module in model.named_modules():
        if id(module) not in inside:
            for name, parameter in module._parameters.items():
                full = f"{path}.{name}".lstrip(".")
                if parameter is not None and (style := _style(plan, full) or _style(plan, path)):
                    yield from part(
                        f"{at}.{full}".lstrip("."),
                        _dim_of(parameter, style),
                        f"{at}.{path}".lstrip("."),
                        module,
                        module,
                        style,
                    )


def _style(plan: Mapping[str, Any], path: str) -> str:
    """Return what the plan says of a path; "" where it says nothing."""
    return str(
        next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(path, pattern)), None)
        or ""
    )


def _dim(layer: Layer, parameter: torch.Tensor, style: str) -> int | None:
    """Along which dim a parameter of a layer of this style is split."""
    if "embedding" in style:
        return layer.of_inputs(parameter)
    if "colwise" in style:
        return layer.of_outputs(parameter)
    return layer.of_inputs(parameter) if "rowwise" in style else None


def _dim_of(parameter: torch.Tensor, style: str) -> int | None:
    """The same of what is no layer: words or experts come first, then outputs, then inputs."""
    if "embedding" in style or style == "grouped_gemm":
        return 0
    if "colwise" in style:
        return max(0, parameter.dim() - 2)
    return parameter.dim() - 1 if "rowwise" in style and parameter.dim() > 1 else None


def _cuts_heads(part: _Part, parts: Sequence[_Part], model: nn.Module, size: int) -> bool:
    """Return True if a layer gives fewer heads than one beside it (those of keys and values), and
    so few that ranks would have parts of a head: then every rank computes them all, as in
    Megatron-LM, and nothing moves."""
    around, layer = _around(part), part.base
    width = getattr(model.get_submodule(around), "head_dim", None)
    if (
        not part.column
        or not isinstance(layer, nn.Linear)
        or not isinstance(width, int)
        or not width
    ):
        return False
    widest = max(
        p.base.out_features
        for p in parts
        if p.column and isinstance(p.base, nn.Linear) and _around(p) == around
    )
    return layer.out_features < widest and layer.out_features % (width * size) != 0


def _around(part: _Part) -> str:
    """The path of the module that a part's layer is in."""
    return part.layer.rpartition(".")[0]


# -------------------------------------------------------------------------- what its structure says


def _column(layer: Layer, whole: bool = False) -> Iterator[_Part]:
    """Split by outputs."""
    for path, parameter in layer.parameters():
        if (dim := layer.of_outputs(parameter)) is not None:
            yield _Part(path, dim, layer.path, layer.module, layer.base, whole, True)


def _row(layer: Layer) -> Iterator[_Part]:
    """Split by inputs, which of a table are its words. What every rank has whole of an affine layer
    is its bias."""
    for path, parameter in layer.parameters():
        if (dim := layer.of_inputs(parameter)) is not None:
            yield _Part(path, dim, layer.path, layer.module, layer.base, True)


def _structured(model: nn.Module) -> list[_Part]:
    """Column-then-row pairs, found by who stands beside whom: in a block of a repeated list of
    layers, what widens or makes heads comes before what closes."""
    layers = layers_in(model)
    linears = [layer for layer in layers if not isinstance(layer.base, nn.Embedding)]
    found: list[_Part] = []
    for scope, group in itertools.groupby(linears, lambda layer: _scope(layer.path)):
        if scope:
            families = [list(f) for _, f in itertools.groupby(group, lambda layer: layer.parent)]
            found += _paired(families)
    return [*found, *_vocabulary(layers)]


def _largest(model: nn.Module) -> Iterator[_Part]:
    """Of a model without such pairs (a convolutional one) the largest linear layer alone, by its
    outputs: mostly the classifier (Krizhevsky 2014)."""
    linears = [layer for layer in layers_in(model) if isinstance(layer.base, nn.Linear)]
    if linears:
        yield from _column(max(linears, key=lambda layer: layer.outputs * layer.inputs))


def _scope(path: str) -> str:
    """The repeated block that a module is in, ``decoder.layers.3``; "" outside of any."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[: last + 1])


def _paired(families: list[list[Layer]]) -> Iterator[_Part]:
    """``families``: the linear layers of a block, those of one parent together."""
    waiting: list[Layer] = []  # columns whose row is still to come
    for i, family in enumerate(families):
        first, last = family[0], family[-1]
        if waiting and len(family) == 1 and _closes(waiting[0], last):
            yield from _pair(waiting, last)
            waiting = []
        elif len(family) > 1 and _closes(first, last) and not _queries(family):
            yield from _pair(family[:-1], last)
            waiting = []
        else:
            after = families[i + 1] if i + 1 < len(families) else []
            waiting = (
                family
                if len(after) == 1
                and _closes(first, after[0])
                and len({layer.inputs for layer in family}) == 1
                else []
            )


def _pair(columns: Sequence[Layer], row: Layer) -> Iterator[_Part]:
    for layer in columns:
        several = (
            layer.outputs > row.inputs and layer.outputs % row.inputs == 0
        )  # in one (queries, keys and values): cut, each of them is split as it is
        yield from _column(
            layer,
            whole=layer.outputs != columns[0].outputs
            or (layer.outputs != row.inputs and not several),
        )
    yield from _row(row)


def _closes(first: Layer, last: Layer) -> bool:
    """Whether ``last`` takes what ``first`` gives (or a share of it: queries, keys and values may
    be one layer) back to where it came from."""
    return first.outputs % last.inputs == 0 and last.outputs == first.inputs


def _queries(family: list[Layer]) -> bool:
    """Three layers alike: queries, keys and values, whose row has another parent."""
    return len(family) == 3 and len({(layer.inputs, layer.outputs) for layer in family}) == 1


def _vocabulary(layers: list[Layer]) -> Iterator[_Part]:
    """The head that gives a logit for each word, and the tables of as many words."""
    outside = [layer for layer in layers if not _scope(layer.path)]
    tables = [layer for layer in outside if isinstance(layer.base, nn.Embedding)]
    heads = [layer for layer in outside if not isinstance(layer.base, nn.Embedding)]
    words = {table.inputs for table in tables} & {head.outputs for head in heads}
    for head in heads:
        if head.outputs in words:
            yield from _column(head)
    for table in tables:
        if table.inputs in words:
            yield from _row(table)
