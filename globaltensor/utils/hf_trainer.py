"""Hugging Face's Trainer for a model whose parameters are global tensors.

The package calls `install` at import. transformers and accelerate treat ranks as
DistributedDataParallel does: each rank reads rows of its own. Here these rows become one global
batch, the loss is over all of them, and files hold full values. A model of plain tensors trains as
before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._base.patches import patch
from .._base.pytree import object_tensors, replaced, replaced_in_objects, tensors_in
from .._tensor.global_tensor import GlobalTensor
from ..distributed.world import world
from ..errors import ShapeError
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast, split

__all__ = ["install"]

#: The value that a missing token has in each tensor of a batch. A missing token counts nowhere.
_PADDING = {"labels": -100, "attention_mask": 0, "token_type_ids": 0, "input_ids": 0}


def _placement(model: Any) -> Placement | None:
    """Return the placement of the model's first global parameter, or None if all are plain."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((p._spec.placement for p in parameters if isinstance(p, GlobalTensor)), None)


def _full(x: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor on this rank, without a graph."""
    if not isinstance(x, GlobalTensor):
        return x.detach()
    everywhere = [broadcast] * x._spec.placement.axes
    return x.detach().to_global(sbp=everywhere).to_local()  # type: ignore[no-any-return]


def _full_tensors(obj: Any) -> Any:
    """Return the same pytree with the full values of its tensors. The same tensor stays one."""
    tensors = tensors_in(obj, [])
    full = {id(t): _full(t) for t in tensors}
    return replaced(obj, iter([full[id(t)] for t in tensors]))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a result with a row for each example; a number is the same."""
    if not isinstance(x, GlobalTensor):
        return x
    by_rows = broadcast if x.dim() == 0 else split(0)
    return x.detach().to_global(sbp=[by_rows] * x._spec.placement.axes).to_local()  # type: ignore[no-any-return]


def _padded(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Pad this rank's rows to the length of the longest ones of all ranks.

    Collators pad to the longest example of a batch, which is another one on each rank. Raises
    ShapeError, on every rank, for tensors that have no known padding.
    """
    own = {k: tuple(v.shape[1:]) for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    everyone = world().comm(tuple(range(world().size))).all_gather_object(own, "rows of a batch")
    out = dict(inputs)
    for name in own:
        shapes = [shapes.get(name) for shapes in everyone]
        if len(set(shapes)) == 1:
            continue
        known = name in _PADDING and "attention_mask" in inputs
        if not known or any(shape is None or len(shape) != 1 for shape in shapes):
            raise ShapeError(
                f"the ranks have rows of different shapes for {name!r}: {shapes}. They become one "
                f"batch: pad all examples to one length (for a tokenizer: padding='max_length'), "
                "or give the model an attention_mask, so that rows can be padded here"
            )
        missing = max(shape[0] for shape in shapes) - own[name][0]
        out[name] = torch.nn.functional.pad(inputs[name], (0, missing), value=_PADDING[name])
    return out


def _global_batch(inputs: Any, placement: Placement) -> Any:
    """Return the global batch of the rows that all ranks have."""
    from .data.batches import GlobalBatches

    if isinstance(inputs, Mapping) and world().size > 1:
        inputs = _padded(inputs)
    joined = [split(0)] * placement.axes
    return next(iter(GlobalBatches([inputs], placement, joined)))


def _around(target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the decorated ``run(original, self, *args, **kwargs)`` in place of a method."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        def replace(original: Any) -> Any:
            @functools.wraps(original)
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                return run(original, self, *args, **kwargs)

            return method

        _METHODS[target] = replace
        return run

    return decorate


_METHODS: dict[str, Callable[[Any], Any]] = {}


@_around("accelerate.accelerator:Accelerator.prepare_model")
def _prepare_model(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the model unwrapped, and where it is: its tensors know both."""
    if _placement(model) is None:
        return original(self, model, *args, **kwargs)
    return original(self, model, device_placement=False, evaluation_mode=True)


@_around("transformers.trainer:Trainer._prepare_inputs")
def _prepare_inputs(original: Any, self: Any, inputs: Any) -> Any:
    prepared, placement = original(self, inputs), _placement(self.model)
    if placement is None or any(isinstance(t, GlobalTensor) for t in object_tensors(prepared, [])):
        return prepared
    return _global_batch(prepared, placement)


@_around("transformers.trainer:Trainer._get_num_items_in_batch")
def _count_items(original: Any, self: Any, batch_samples: Any, *args: Any, **kwargs: Any) -> Any:
    """Count this rank's labels, also of a batch that is global already. The counts are added."""
    if _placement(self.model) is None:
        return original(self, batch_samples, *args, **kwargs)
    labels = [
        {name: _rows(each[name]) for name in ("labels", "shift_labels") if name in each}
        if isinstance(each, Mapping)
        else each
        for each in batch_samples
    ]
    return original(self, labels, *args, **kwargs)


@_around("transformers.trainer:Trainer.compute_loss")
def _compute_loss(
    original: Any,
    self: Any,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """Compute the mean over the items of all ranks.

    The Trainer multiplies its loss by the number of processes, because gradients would be averaged
    over them. Here they are summed.
    """
    placement = _placement(self.model)
    if placement is None:
        return original(self, model, inputs, return_outputs, num_items_in_batch)
    averaged = getattr(self.args, "average_tokens_across_devices", False)
    count = num_items_in_batch
    if count is not None and not averaged and self.args.world_size > 1:
        counted = torch.as_tensor(count, device=self.args.device)
        count = self.accelerator.gather(counted.reshape(1)).sum()
    loss, outputs = original(self, model, inputs, True, count)
    if (
        averaged
        and count is not None
        and (self.model_accepts_loss_kwargs or self.compute_loss_func)
    ):
        size = getattr(self, "get_tp_size", lambda: 1)()
        loss = loss / (self.accelerator.num_processes // size)
    return (loss, outputs) if return_outputs else loss


@_around("transformers.trainer:Trainer.training_step")
def _training_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the loss as a plain number, to which the Trainer adds those of other steps."""
    return _full(original(self, *args, **kwargs))


@_around("transformers.trainer:Trainer.prediction_step")
def _prediction_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return this rank's rows of the results, which the Trainer gathers."""
    found = original(self, *args, **kwargs)
    tensors = object_tensors(found, [])
    return replaced_in_objects(found, iter([_rows(t) for t in tensors]))


@_around("transformers.trainer:Trainer._save")
def _save(original: Any, self: Any, output_dir: Any = None, state_dict: Any = None) -> Any:
    """Gather the full values on every rank. The first one writes them."""
    if _placement(self.model) is not None:
        if state_dict is None:  # tied parameters are one tensor there
            state_dict = self.model.state_dict(keep_vars=True)
        state_dict = _full_tensors(dict(state_dict))
    return original(self, output_dir, state_dict)


class _SavedState:
    """An optimizer's state with full values, in place of the optimizer while it is written."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


@_around("transformers.trainer:Trainer._save_optimizer_and_scheduler")
def _save_optimizer(original: Any, self: Any, output_dir: Any) -> Any:
    if _placement(self.model) is None:
        return original(self, output_dir)
    optimizer = self.optimizer
    self.optimizer = _SavedState(_full_tensors(optimizer.state_dict()))
    try:
        return original(self, output_dir)
    finally:
        self.optimizer = optimizer


def install() -> None:
    """Put the functions above in place of the methods, when their modules are imported."""
    for target, replace in _METHODS.items():
        patch(target, replace)
