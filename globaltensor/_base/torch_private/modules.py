"""Torch's private names about modules and optimizers."""

from __future__ import annotations

import sys
import weakref
from types import CodeType

import torch

__all__ = [
    "CAUSAL_CHECK", "DERIVED_FROM_PARAMETERS", "BatchNorm", "check_input", "refresh_weights",
    "watched_steps",
]  # fmt: skip


def watched_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if other code hooks an optimizer's step.

    Such hooks are the optimizer's own, or those of all optimizers except this library's.
    """
    hooks = sys.modules["torch.optim.optimizer"]
    others = (
        len(hooks._global_optimizer_pre_hooks) > 1 or len(hooks._global_optimizer_post_hooks) > 1
    )
    return others or bool(
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )


#: Code by which torch's transformer layers check whether a mask is causal (torch 2.0). Given a mask
#: and no is_causal, they read its values, for a kernel for causal masks. A static graph has no
#: values, and no public function stands between that check and the layers.
CAUSAL_CHECK: CodeType | None = getattr(
    getattr(torch.nn.modules.transformer, "_detect_is_causal_mask", None), "__code__", None
)


def refresh_weights(module: torch.nn.Module, flatten: bool = True) -> None:
    """Rebuild a recurrent layer's list of weights after its parameters were replaced.

    Such a layer keeps its weights in a list as well as in its parameters, with weak references by
    which it recognizes them. The layer rebuilds list and references itself in forward the same way
    (torch 2.11: `RNNBase._init_flat_weights`). ``flatten``: also move the weights into one block of
    memory, for which the layer asks for their dtype and address. A capture would take them for
    inputs of the graph.
    """
    if not isinstance(module, torch.nn.RNNBase):
        return
    if flatten:
        module._init_flat_weights()
        return
    weights = [getattr(module, name, None) for name in module._flat_weights_names]
    module._flat_weights = weights
    module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]


#: The attributes of a recurrent layer that it derives from its parameters (`refresh_weights`). A
#: pass with other parameters leaves old lists with these behind, which nothing refers to.
DERIVED_FROM_PARAMETERS = ("_flat_weights", "_flat_weight_refs")

#: The common base of batch norms of 1, 2 and 3 dims and their lazy kinds. It has no public name.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm


def check_input(norm: BatchNorm, x: torch.Tensor) -> None:
    """Raise ValueError where an input does not have the number of dims that a batch norm expects.

    A batch norm's forward makes this check first.
    """
    norm._check_input_dim(x)
