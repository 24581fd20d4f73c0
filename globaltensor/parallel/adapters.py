"""Linear layers and embedding tables, with their position in a model and their adapters.

`parallelize` uses them. A layer may be inside another module: one that adds low-rank matrices
(LoRA: Hu et al. 2021), or one that trains a copy instead, as in peft, or a module of the user that
does so. Or its weight is computed from other tensors (torch.nn.utils.parametrize).

An adapter follows its layer's layout. A parameter that computes the layer's outputs is split with
them, and one that receives its inputs is split with these. Any layout computes the same, so an
unknown adapter costs speed at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import nn

__all__ = ["Layer", "layers_in", "transposed"]

#: Names under which peft stores the layer of an adapter, and the module of which a copy is trained.
_BASES = ("base_layer", "original_module")


def transposed(module: nn.Module) -> bool:
    """Return True if a linear layer's weight is [inputs, outputs], as in transformers' Conv1D."""
    return (
        not isinstance(module, nn.Linear)
        and hasattr(module, "nf")
        and "weight" in module._parameters
    )


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or transposed(module)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a layer; those of a table are words and features."""
    # `module.weight` would be computed anew if it is parametrized, with another iteration for
    # spectral norm.
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if weight is None or weight.dim() != 2:
        return module.in_features, module.out_features  # type: ignore[return-value]
    inputs, outputs = weight.shape if transposed(module) else reversed(weight.shape)
    return inputs, outputs


class Layer:
    """A linear layer or a table: ``base``, at ``inner`` in its model.

    ``module``, at ``path``, is the outermost module in its place. It accepts the layer's inputs,
    and returns the layer's outputs plus those of its adapters."""

    def __init__(self, inner: str, base: nn.Module, path: str, module: nn.Module) -> None:
        self.inner, self.base, self.path, self.module = inner, base, path, module
        self.inputs, self.outputs = _sizes(base)
        self._from_right = path != inner and _from_right(module, base)

    @property
    def parent(self) -> str:
        """The path of the module that contains this one."""
        return self.path.rpartition(".")[0]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the layer's own parameters and those of its adapters, with their paths."""
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            yield f"{self.path}.{name}".lstrip("."), parameter

    def own(self, path: str) -> bool:
        """Return True if a parameter is the layer's itself."""
        return path.rpartition(".")[0] == self.inner

    def of_outputs(self, parameter: torch.Tensor) -> int | None:
        """Return the dim of a parameter that corresponds to the outputs, or None."""
        if parameter.dim() == 1:
            return 0 if parameter.shape[0] == self.outputs else None
        return self._dim(parameter, self.outputs, self.inputs, 0)

    def of_inputs(self, parameter: torch.Tensor) -> int | None:
        """Return the dim of a parameter that corresponds to the inputs, or None.

        A vector has none."""
        return self._dim(parameter, self.inputs, self.outputs, 1)

    def _dim(self, parameter: torch.Tensor, size: int, other: int, usual: int) -> int | None:
        """Return the dim of a parameter that has size ``size``, or None.

        Matrices of adapters are [outputs, inputs] like those of linear layers, with a rank in place
        of one. They are transposed where their shapes show this."""
        turned = isinstance(self.base, nn.Embedding) or transposed(self.base)
        shape = tuple(parameter.shape)
        if shape == ((self.inputs, self.outputs) if turned else (self.outputs, self.inputs)):
            return 1 - usual if turned else usual  # the layer's own, or a copy
        if len(shape) != 2:
            return None
        if self._from_right:
            usual = 1 - usual
        if shape[usual] == size:
            return usual
        return 1 - usual if shape[1 - usual] == size != other else None


def _from_right(module: nn.Module, base: nn.Module) -> bool:
    """Return True if a module's own matrices multiply a square layer's inputs from the right.

    The first of these matrices, which receives the inputs, then is [inputs, rank]."""
    inputs, outputs = _sizes(base)
    first = next((p for p in module._parameters.values() if p is not None and p.dim() == 2), None)
    return first is not None and inputs == outputs == first.shape[0] > first.shape[1]


def layers_in(model: nn.Module) -> list[Layer]:
    """Return all layers of a model in order, without those that belong to another layer."""
    modules = dict(model.named_modules())
    layers = [
        _outermost_layer(path, module, modules)
        for path, module in modules.items()
        if _is_layer(module)
    ]
    # if several are in one module, the first counts
    tops = {layer.path: layer for layer in reversed(layers)}
    return [
        layer
        for layer in layers
        if tops[layer.path] is layer
        and not any(top in tops and top != layer.path for top in _parent_paths(layer.path))
    ]


def _parent_paths(path: str) -> Iterator[str]:
    """Yield the paths of the modules that contain the module at ``path``."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _outermost_layer(inner: str, base: nn.Module, modules: Mapping[str, nn.Module]) -> Layer:
    """Return a layer with the outermost module in its place."""
    path = inner
    while path:
        parent, _, name = path.rpartition(".")
        if not _represents_child(modules[parent], name, base):
            break
        path = parent
    return Layer(inner, base, path, modules[path])


def _represents_child(module: nn.Module, name: str, base: nn.Module) -> bool:
    """Return True if a module represents its child ``name``, with pairs of low-rank matrices.

    The child is ``base``, or itself represents ``base``."""
    if name in _BASES:
        return True
    inputs, outputs = _sizes(base)
    added = [
        p for path, p in module.named_parameters() if path.partition(".")[0] != name and p.dim() > 1
    ]
    if not added or isinstance(module, nn.Sequential) or any(p.dim() > 2 for p in added):
        return False
    taking, giving = Counter[int](), Counter[int]()  # rank -> number of matrices
    for p in added:
        rows, columns = p.shape
        if max(rows, columns) in (inputs, outputs) and min(rows, columns) < min(inputs, outputs):
            if columns == inputs or (rows == inputs and rows != outputs):
                taking[min(rows, columns)] += 1
            else:
                giving[min(rows, columns)] += 1
        else:
            return False
    return taking == giving and sum(p.numel() for p in added) < inputs * outputs
