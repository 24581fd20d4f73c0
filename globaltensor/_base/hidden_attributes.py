"""Attributes that this library keeps in the ``__dict__`` of tensors, modules and optimizers.

Each is written by one module and read by those that need it. They are listed here because no class
declares them: the objects are the user's, or a tensor has them only now and then.
"""

from __future__ import annotations

from typing import Final

__all__ = ["HIDDEN_ATTRIBUTES"]

#: name -> (the module that writes it, its meaning)
HIDDEN_ATTRIBUTES: Final[dict[str, tuple[str, str]]] = {
    # --- on global tensors
    "_accumulated": ("_tensor/autograd_hooks.py", "hooks for after a gradient was added"),
    "_gathered_number": ("_tensor/gradients/parameter_gather.py", "number of a gathered leaf"),
    "_global_id": ("_tensor/convert.py", "the id that OneFlow's `global_id` shows"),
    "_is_param": ("torch", "True for a parameter of a tensor subclass"),
    "_kept_grad": ("_tensor/grad.py", "the global gradient that was last read, and its local one"),
    "_laid_for_training": ("auto/apply/graphs.py", "whether a plan for training gave the layout"),
    "_node": ("_tensor/autograd_hooks.py", "the autograd node of a tensor with hooks"),
    "_origin": ("_tensor/view_tracking.py", "base and function of a view that communicated"),
    "_parts": ("_ops/rules/deferred_mean.py", "sum and count of a mean that is not divided yet"),
    "_seen": ("_tensor/view_tracking.py", "number of writes to the base that a view has seen"),
    "_source": ("_ops/rules/deferred_mean.py", "the mean of which this one is a view"),
    "_strides": ("_tensor/strides.py", "memory order, where the local tensor does not show it"),
    "_untracked": ("_tensor/view_tracking.py", "True for a view made without gradients"),
    "_views": ("_ops/rules/deferred_mean.py", "views of a mean that is not divided yet"),
    "_watched": ("_tensor/autograd_hooks.py", "True once the hooks of a leaf are installed"),
    "_local": ("_tensor/global_tensor.py", "the slot of the local tensor, read past a property"),
    "operand": (
        "_ops/shape_inference.py",
        "the number of the operand that a meta tensor stands for",
    ),
    # --- on modules
    "_automatic_plan": ("auto/apply/modules.py", "the plan that `parallelize` applied"),
    "_borrowed": ("graph/pipeline/split_model.py", "parameters lent to a stage while it runs"),
    "_entered": ("graph/pipeline/split_model.py", "stages entered and not left yet"),
    "_met_before": ("graph/pipeline/split_model.py", "placements of the stages around this call"),
    "_modules": ("torch", "the submodules of a module"),
    "_stage": ("graph/pipeline/split_model.py", "the stage of a block"),
    "forward": ("parallel/expert_modules.py", "the forward of a module whose experts are split"),
    # --- on graphs, optimizers and other objects
    "_choose_plan": ("auto/apply/graphs.py", "the function that chooses a graph's plan"),
    "_shared": ("graph/graph.py", "the ZeRO settings that a graph has applied"),
    "_steps": ("graph/graph.py", "number of steps of a graph"),
    "build": ("graph/graph.py", "the build function of a graph made by a decorator"),
    "_globaltensor_fed": ("_ops/metrics.py", "whether a metric's last update got global tensors"),
    "_globaltensor_recorded": ("optim/local_step.py", "settings of an optimizer at its last step"),
    "_job": ("v0/recording/run_record.py", "the job that a recorded run belongs to"),
}
