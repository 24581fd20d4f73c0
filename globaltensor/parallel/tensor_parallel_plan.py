"""The plan "tensor" of a model: which of its linear layers are split by columns, which by rows.

A model may declare its splits (transformers: ``base_model_tp_plan``). Otherwise pairs of layers are
found from the structure of its modules. `parallelize` calls these functions.
"""

from __future__ import annotations

import fnmatch
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .adapters import Layer, layers_in

__all__ = ["SplitParameter", "cuts_heads", "declared_splits", "largest_splits", "paired_splits"]


SEQUENTIAL_FORWARD = nn.Sequential.forward


class SplitParameter(NamedTuple):
    """A parameter that is split."""

    path: str
    dim: int
    # the path of the outermost module in place of the layer, with its adapters if it has some
    layer: str
    module: nn.Module  # the module at that path
    base: nn.Module  # the layer itself
    whole: bool  # the module's result is replicated
    column: bool = False  # the layer needs replicated activations


def declared_splits(model: nn.Module) -> list[SplitParameter]:
    """Return the splits of the model's own ``tp_plan``, or of those of models inside it.

    A ``tp_plan`` is {path pattern of a module or parameter: style}. The result is empty without
    one."""
    layers = layers_in(model)
    splits = [
        part
        for path, module, plan in _plans(model)
        for part in _splits_of_plan(plan, path, module, layers)
    ]
    # A column layer that is wider than the inputs of the row layer with the same parent computes
    # several tensors at once (queries, keys and values). Each of them remains split when the output
    # is cut.
    taken = {
        _parent_path(part): part.base.in_features
        for part in splits
        if not part.column and isinstance(part.base, nn.Linear)
    }
    several = [
        part.column
        and isinstance(part.base, nn.Linear)
        and part.base.out_features > taken.get(_parent_path(part), math.inf)
        for part in splits
    ]
    return [
        part._replace(whole=part.whole and not more)
        for part, more in zip(splits, several, strict=True)
    ]


def _plans(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, Mapping[str, Any]]]:
    """Yield (path, module, its plan) for the outermost modules with a plan of their own.

    A wrapper around a model forwards the model's attributes, but has other paths. Such attributes
    do not count."""
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


def _splits_of_plan(
    plan: Mapping[str, Any], at: str, model: nn.Module, layers: Sequence[Layer]
) -> Iterator[SplitParameter]:
    """Yield the splits of parameters that the plan of the model at path ``at`` defines."""
    # the head's logits stay split by words, because cross-entropy accepts them so
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None

    def part(
        path: str, dim: int | None, layer: str, module: nn.Module, base: nn.Module, style: str
    ) -> Iterator[SplitParameter]:
        if dim is not None:
            whole = "colwise" not in style or ("gather" in style and module is not head)
            yield SplitParameter(path, dim, layer, module, base, whole, "colwise" in style)

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
    """Return the plan's style of a path, or "" if it has none."""
    return str(
        next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(path, pattern)), None)
        or ""
    )


def _dim(layer: Layer, parameter: torch.Tensor, style: str) -> int | None:
    """Return the dim along which a layer's parameter is split in this style, or None."""
    if "embedding" in style:
        return layer.of_inputs(parameter)
    if "colwise" in style:
        return layer.of_outputs(parameter)
    return layer.of_inputs(parameter) if "rowwise" in style else None


def _dim_of(parameter: torch.Tensor, style: str) -> int | None:
    """Return the dim along which a parameter outside of layers is split in this style, or None.

    Words or experts are the first dim, then outputs, then inputs."""
    if "embedding" in style or style == "grouped_gemm":
        return 0
    if "colwise" in style:
        return max(0, parameter.dim() - 2)
    return parameter.dim() - 1 if "rowwise" in style and parameter.dim() > 1 else None


def cuts_heads(
    part: SplitParameter, parts: Sequence[SplitParameter], model: nn.Module, size: int
) -> bool:
    """Return True if splitting this layer would cut attention heads.

    Such a layer has fewer heads than another layer with the same parent (those of keys and values).
    If it were split, ranks would have fractions of a head. Every rank then computes them all, as in
    Megatron-LM, and nothing is communicated."""
    around, layer = _parent_path(part), part.base
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
        if p.column and isinstance(p.base, nn.Linear) and _parent_path(p) == around
    )
    return layer.out_features < widest and layer.out_features % (width * size) != 0


def _parent_path(part: SplitParameter) -> str:
    """Return the path of the module that contains a parameter's layer."""
    return part.layer.rpartition(".")[0]


def _column(layer: Layer, whole: bool = False) -> Iterator[SplitParameter]:
    """Yield the splits of a layer by its outputs."""
    for path, parameter in layer.parameters():
        if (dim := layer.of_outputs(parameter)) is not None:
            yield SplitParameter(path, dim, layer.path, layer.module, layer.base, whole, True)


def _row(layer: Layer) -> Iterator[SplitParameter]:
    """Yield the splits of a layer by its inputs, which are the words of a table.

    The bias of an affine layer is replicated."""
    for path, parameter in layer.parameters():
        if (dim := layer.of_inputs(parameter)) is not None:
            yield SplitParameter(path, dim, layer.path, layer.module, layer.base, True)


def paired_splits(model: nn.Module) -> list[SplitParameter]:
    """Return column-then-row pairs, found by the positions of layers.

    In an `nn.Sequential`, a layer comes before one that takes its outputs. In a block of a repeated
    list of layers, a layer that widens or makes heads comes before one that closes."""
    layers = layers_in(model)
    linears = [layer for layer in layers if not isinstance(layer.base, nn.Embedding)]
    splits: list[SplitParameter] = []
    paired: set[str] = set()
    for column, row in _sequential_pairs(model, linears):
        splits += _split_pair([column], row)
        paired |= {column.path, row.path}
    linears = [layer for layer in linears if layer.path not in paired]
    for scope, group in itertools.groupby(linears, lambda layer: _scope(layer.parent)):
        if scope:
            families = [list(f) for _, f in itertools.groupby(group, lambda layer: layer.parent)]
            splits += _splits_of_pairs(families)
    return [*splits, *_vocabulary(layers)]


def _sequential_pairs(model: nn.Module, linears: Sequence[Layer]) -> Iterator[tuple[Layer, Layer]]:
    """Yield the pairs of linear layers that follow each other in an `nn.Sequential`.

    Modules between the two have no parameters: activations and dropout."""
    by_path = {layer.path: layer for layer in linears}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Sequential) or type(module).forward is not SEQUENTIAL_FORWARD:
            continue
        column: Layer | None = None
        for name, child in module.named_children():
            layer = by_path.get(f"{path}.{name}".lstrip("."))
            if layer is not None and column is not None and column.outputs == layer.inputs:
                yield column, layer
                column = None
            elif layer is not None or next(child.parameters(), None) is not None:
                column = layer


def largest_splits(model: nn.Module) -> Iterator[SplitParameter]:
    """Yield the split of the largest linear layer by its outputs, for a model without pairs.

    In a convolutional model this is mostly the classifier (Krizhevsky 2014)."""
    linears = [layer for layer in layers_in(model) if isinstance(layer.base, nn.Linear)]
    if linears:
        yield from _column(max(linears, key=lambda layer: layer.outputs * layer.inputs))


def _scope(path: str) -> str:
    """Return the repeated block that contains a module, as ``decoder.layers.3``.

    Returns "" outside of any."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[: last + 1])


def _splits_of_pairs(families: list[list[Layer]]) -> Iterator[SplitParameter]:
    """Yield the splits of the pairs in a block.

    ``families``: the linear layers of the block, grouped by their parents."""
    waiting: list[Layer] = []  # columns whose row has not been found yet
    for i, family in enumerate(families):
        first, last = family[0], family[-1]
        if waiting and len(family) == 1 and _restores_width(waiting[0], last):
            yield from _split_pair(waiting, last)
            waiting = []
        elif len(family) > 1 and _restores_width(first, last) and not _is_qkv(family):
            yield from _split_pair(family[:-1], last)
            waiting = []
        else:
            after = families[i + 1] if i + 1 < len(families) else []
            waiting = (
                family
                if len(after) == 1
                and _restores_width(first, after[0])
                and len({layer.inputs for layer in family}) == 1
                else []
            )


def _split_pair(columns: Sequence[Layer], row: Layer) -> Iterator[SplitParameter]:
    for layer in columns:
        # several in one (queries, keys and values): each remains split when the output is cut
        several = layer.outputs > row.inputs and layer.outputs % row.inputs == 0
        yield from _column(
            layer,
            whole=layer.outputs != columns[0].outputs
            or (layer.outputs != row.inputs and not several),
        )
    yield from _row(row)


def _restores_width(first: Layer, last: Layer) -> bool:
    """Return True if ``last`` maps the outputs of ``first`` back to the size of its inputs.

    Its inputs may be a share of these outputs, because queries, keys and values may be one
    layer."""
    return first.outputs % last.inputs == 0 and last.outputs == first.inputs


def _is_qkv(family: list[Layer]) -> bool:
    """Return True for three equal layers: queries, keys and values.

    Their row layer has another parent."""
    return len(family) == 3 and len({(layer.inputs, layer.outputs) for layer in family}) == 1


def _vocabulary(layers: list[Layer]) -> Iterator[SplitParameter]:
    """Yield the splits of the head with a logit for each word, and of tables with as many words."""
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
