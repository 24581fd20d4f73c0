"""Find a plan and apply it in eager mode: ``flow.parallelize(model, placement, "auto")``.

`parallelize` calls this module through `MODEL_PLANNERS`. The search needs inputs. With example
inputs it runs at once, otherwise at the model's first call. Parameters are boxed in place, and the
plan is applied like any other (auto/apply/modules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..._base import torch_private
from ..._base.pytree import object_tensors
from ..._tensor.global_tensor import GlobalTensor
from ...errors import GraphError
from ...graph.config import Auto
from ...graph.rank_agreement import Text, agreed
from ...parallel.module_to_global import module_to_global
from ...parallel.parallelize import MODEL_PLANNERS
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast
from ..ir.op_graph import Calls
from ..ir.trace import calls_of_model
from ..plan.model_name import named_after
from ..plan.plan import Plan
from .graphs import apply_layouts, cluster_at_hand, search_plan
from .modules import install_layout_hooks, install_reshard_hooks

__all__ = ["plan_of"]


@MODEL_PLANNERS.register("auto")
def _parallelize_auto(model: nn.Module, placement: Placement, inputs: Any) -> nn.Module:
    """Shard a model by the search's plan: now if there are example inputs, else at its first call.

    Collective."""
    module_to_global(model, placement, [broadcast] * placement.axes)
    if inputs is not None:
        _lay_out(model, placement, inputs if isinstance(inputs, tuple) else (inputs,), {})
    else:
        model.register_forward_pre_hook(_ShardAtFirstCall(placement), with_kwargs=True)
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan that ``flow.parallelize`` has applied to a model.

    The plan comes from the search of "auto", or was passed to `parallelize`. The result is None for
    other models, and for "auto" without example inputs until the model's first call."""
    return model.__dict__.get("_automatic_plan")


class _ShardAtFirstCall:
    """A forward pre-hook that shards its module at the first call and then removes itself.

    A copy of the module has its own hook."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch_private.recording.on:
            raise GraphError(
                f"{type(module).__name__} gets its layouts at its first call (parallelize with "
                f'"auto"), which is too late inside a graph: pass parallelize '
                "example inputs=, or make the model broadcast and let the graph search for the "
                "complete step with config.enable_auto_parallel()"
            )
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is self:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        try:
            _lay_out(module, self.placement, args, kwargs)
        except Exception:
            # the hook stays in place, because the next call has to search again
            module.register_forward_pre_hook(self, prepend=True, with_kwargs=True)
            raise


def _lay_out(model: nn.Module, placement: Placement, args: Any, kwargs: Any) -> None:
    name, cluster = type(model).__name__, cluster_at_hand(placement)

    def capture_calls() -> tuple[Calls, Text]:
        calls = calls_of_model(model, args, kwargs, cluster.device)
        return calls, Text(
            (),
            [
                f"{c.name} = {_values_text(calls, c.operands)} -> {_values_text(calls, c.outs)}"
                for c in calls.calls
            ],
        )

    calls = agreed(
        name,
        capture_calls,
        'parallelize with "auto" searched for a plan: for a model that reads values of tensors, '
        'name a plan: "data", "fsdp" or "tensor"',
    )
    given = object_tensors(kwargs, object_tensors(args, []))
    inputs = [v for v in calls.values if v.state == "input"]
    fixed = {
        v.name: (t._spec.layout,)
        for v, t in zip(inputs, given, strict=True)
        if isinstance(t, GlobalTensor)
    }
    found = agreed(name, lambda: (search_plan(calls, cluster, placement, Auto(), fixed, 2.0), None))
    apply_layouts(dict(model.named_parameters()), found)
    install_layout_hooks(model, found.plan)
    install_reshard_hooks(model, found.plan)
    model.__dict__["_automatic_plan"] = named_after(found.plan, model)


def _values_text(calls: Calls, numbers: Sequence[int]) -> str:
    return ", ".join(f"{v.label} {list(v.shape)}" for v in (calls.values[n] for n in numbers))
