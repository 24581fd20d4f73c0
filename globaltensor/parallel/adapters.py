"""Linear layers and tables of words, where they stand in a model and what belongs to them.

A layer may stand inside another module: one that adds low-rank matrices to it (LoRA: Hu et al.
2021), or trains a copy in its place, as peft does; one of the user's own that does so. Or its
weight is computed of others (torch.nn.utils.parametrize). What belongs to it is laid out as it is:
what gives its outputs is split with them, what takes its inputs with these. Any layout computes the
same, so what is not known costs speed at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import nn

__all__ = ["Layer", "layers_in", "transposed"]

#: By what names peft keeps the layer that an adapter is for, and the module that a copy is trained
#: for.
_BASES = ("base_layer", "original_module")


def transposed(module: nn.Module) -> bool:
    """Return True if a linear layer keeps its weight as [inputs, outputs] (transformers'
    Conv1D)."""
    return (
        not isinstance(module, nn.Linear)
        and hasattr(module, "nf")
        and "weight" in module._parameters
    )


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or transposed(module)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a layer; of a table, words and features."""
    # not `module.weight`: a parametrized one is computed anew, spectral norm's with another
    # iteration
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if weight is None or weight.dim() != 2:
        return module.in_features, module.out_features  # type: ignore[return-value]
    inputs, outputs = weight.shape if transposed(module) else reversed(weight.shape)
    return inputs, outputs


class Layer:
    """A linear layer or a table: ``base``, at ``inner`` in its model. ``module``, at ``path``, is
    the outermost module that stands for it: it takes what the layer takes, and gives what that
    gives and its adapters add."""

    def __init__(self, inner: str, base: nn.Module, path: str, module: nn.Module) -> None:
        self.inner, self.base, self.path, self.module = inner, base, path, module
        self.inputs, self.outputs = _sizes(base)
        self._from_right = path != inner and _from_right(module, base)

    @property
    def parent(self) -> str:
        """The path of the module that it is in."""
        return self.path.rpartition(".")[0]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its own, and what belongs to it, by path."""
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            yield f"{self.path}.{name}".lstrip("."), parameter

    def own(self, path: str) -> bool:
        """Return True if a parameter is the layer's itself."""
        return path.rpartition(".")[0] == self.inner

    def of_outputs(self, parameter: torch.Tensor) -> int | None:
        """The dim of a parameter that stands for the outputs; None: it has none."""
        if parameter.dim() == 1:
            return 0 if parameter.shape[0] == self.outputs else None
        return self._dim(parameter, self.outputs, self.inputs, 0)

    def of_inputs(self, parameter: torch.Tensor) -> int | None:
        """The same of inputs. (A vector has none.)"""
        return self._dim(parameter, self.inputs, self.outputs, 1)

    def _dim(self, parameter: torch.Tensor, size: int, other: int, usual: int) -> int | None:
        """Matrices of adapters are [outputs, inputs], with a rank in place of one, as those of
        linear layers are; or the other way round, where that shows."""
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
    """Return True if a module applies matrices of its own to a square layer's inputs from the
    right: the first of them, which takes these, is [inputs, rank]."""
    inputs, outputs = _sizes(base)
    first = next((p for p in module._parameters.values() if p is not None and p.dim() == 2), None)
    return first is not None and inputs == outputs == first.shape[0] > first.shape[1]


def layers_in(model: nn.Module) -> list[Layer]:
    """All layers of a model, in order; what belongs to one is none itself."""
    modules = dict(model.named_modules())
    found = [
        _seated(path, module, modules) for path, module in modules.items() if _is_layer(module)
    ]
    tops = {
        layer.path: layer for layer in reversed(found)
    }  # where several stand for one, the first counts
    return [
        layer
        for layer in found
        if tops[layer.path] is layer
        and not any(top in tops and top != layer.path for top in _above(layer.path))
    ]


def _above(path: str) -> Iterator[str]:
    """The paths of the modules that one is in."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _seated(inner: str, base: nn.Module, modules: Mapping[str, nn.Module]) -> Layer:
    """A layer, in as many modules as stand for it."""
    path = inner
    while path:
        parent, _, name = path.rpartition(".")
        if not _stands_for(modules[parent], name, base):
            break
        path = parent
    return Layer(inner, base, path, modules[path])


def _stands_for(module: nn.Module, name: str, base: nn.Module) -> bool:
    """Return True if a module is its child of that name, which is or stands for ``base``, and pairs
    of low-rank matrices beside it."""
    if name in _BASES:
        return True
    inputs, outputs = _sizes(base)
    added = [
        p for path, p in module.named_parameters() if path.partition(".")[0] != name and p.dim() > 1
    ]
    if not added or isinstance(module, nn.Sequential) or any(p.dim() > 2 for p in added):
        return False
    taking, giving = Counter[int](), Counter[int]()  # by their ranks
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
