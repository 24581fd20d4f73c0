"""``flow.function_config()``: the settings of one job function.

User code fills them in and hands them to `global_function`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import optimizer as optimizers
from .errors import JobError
from .scope import PlacementScope, View
from .session.settings import logger

__all__ = ["FunctionConfig", "function_config"]

#: Options of OneFlow's compiler, memory planner and cudnn that have no effect here, because torch
#: chooses automatically.
HINTS = frozenset({
    "all_reduce_fp16", "all_reduce_group_min_mbyte", "all_reduce_group_num",
    "all_reduce_group_size_warmup", "all_reduce_lazy_ratio", "allow_cpu_return_op",
    "concurrency_width", "cudnn_buf_limit_mbyte", "cudnn_conv_enable_pseudo_half",
    "cudnn_conv_enable_true_half", "cudnn_conv_force_bwd_data_algo",
    "cudnn_conv_force_bwd_filter_algo", "cudnn_conv_force_fwd_algo",
    "cudnn_conv_heuristic_search_algo", "cudnn_conv_use_deterministic_algo_only",
    "default_initializer_conf", "disable_all_reduce_sequence",
    "do_parallel_cast_before_widening_type_cast", "enable_all_reduce_group", "enable_cudnn",
    "enable_cudnn_conv_pseudo_half", "enable_cudnn_fused_normalization_add_relu",
    "enable_float_compute_for_half_gemm", "enable_fuse_add_to_output",
    "enable_fuse_cast_scale", "enable_fuse_model_update_ops", "enable_gradients_stats_aggregation",
    "enable_inplace", "enable_inplace_in_reduce_struct",
    "enable_keep_header_only", "enable_nccl", "enable_reused_mem",
    "enable_true_half_config_when_conv",
    "exp_run_conf", "indexed_slices_optimizer_conf", "non_distributed_optimizer_group_size_mbyte",
    "prune_cast_to_static_shape_ops",
    "prune_parallel_cast_ops", "use_boxing_v2", "use_memory_allocation_algorithm_v2",
    "use_nccl_inter_node_communication",
})  # fmt: skip
GONE = {
    "enable_quantization_aware_training": (
        "quantization-aware training: use torch.ao.quantization on a torch model instead"
    ),
    "qat": "quantization-aware training: use torch.ao.quantization on a torch model instead",
    "use_tensorrt": "TensorRT: export the model with torch and use torch_tensorrt instead",
    "tensorrt": "TensorRT: export the model with torch and use torch_tensorrt instead",
    "ssp_stage": (
        "stages: use flow.scope.placement with flow.unpack and flow.pack, or "
        "globaltensor.nn.Graph with set_stage instead"
    ),
    "static_mem_alloc_policy_white_list": "memory plans: torch's allocator is used instead",
    "static_mem_alloc_algo_white_list": "memory plans: torch's allocator is used instead",
}
_ZERO_MODES = ("none", "distributed_split", "non_distributed")


class FunctionConfig:
    """The settings of a job function.

    Pass them as ``@flow.global_function(type="train", function_config=config)``. Every setter
    returns None. Options of OneFlow without effect here are accepted and logged (`HINTS`). Removed
    ones raise AttributeError and name their replacement (`GONE`).
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype = torch.float32
        self.view: View | None = None
        self.scope: PlacementScope | None = None
        self.options: dict[str, Any] = {}
        self.train = _Train()

    def default_data_type(self, value: torch.dtype) -> None:
        """Set the default dtype of floating-point values.

        Raise JobError if ``value`` is no dtype.
        """
        if not isinstance(value, torch.dtype):
            raise JobError(
                f"default_data_type: one of flow.float, flow.double, flow.float16 ...; got "
                f"{value!r}"
            )
        self.dtype = value

    def default_logical_view(self, value: View) -> None:
        """Set the job's default view: ``scope.consistent_view()`` or ``scope.mirrored_view()``.

        Raise JobError for another value.
        """
        if not isinstance(value, View):
            raise JobError(
                f"default_logical_view: flow.scope.consistent_view() or "
                f"flow.scope.mirrored_view(), got {value!r}"
            )
        self.view = value

    def default_distribute_strategy(self, value: View) -> None:
        """Set the job's default view; an older name of `default_logical_view`."""
        self.default_logical_view(value)

    def default_placement_scope(self, value: PlacementScope) -> None:
        """Set the devices of ops outside of any placement block, as ``scope.placement(...)``.

        Raise JobError for another value.
        """
        if not isinstance(value, PlacementScope):
            raise JobError(
                f'default_placement_scope: flow.scope.placement("gpu", "0:0-3"), got {value!r}'
            )
        self.scope = value

    def enable_auto_mixed_precision(self, value: bool = True) -> None:
        """Compute in float16 on GPUs and in bfloat16 on CPUs, wherever that is safe.

        This uses torch.autocast. Variables keep their dtype.
        """
        self.options["amp"] = bool(value)

    def optimizer_placement_optimization_mode(self, mode: str) -> None:
        """Set whether optimizer states are sharded over the devices.

        "distributed_split" (and "non_distributed", its older form) keeps a shard of the states on
        each device (ZeRO stage 1). "none" keeps all states on every device. Raise JobError for
        another mode.
        """
        if mode not in _ZERO_MODES:
            raise JobError(
                f"optimizer_placement_optimization_mode: one of {', '.join(_ZERO_MODES)}; got "
                f"{mode!r}"
            )
        self.options["zero"] = mode != "none"

    def optimizer_placement_optimization_threshold(self, value: int) -> None:
        """Set the minimum size of variables whose optimizer states are sharded.

        ``value`` counts elements per device. Raise JobError for a value below 1.
        """
        if not isinstance(value, int) or value < 1:
            raise JobError(
                f"optimizer_placement_optimization_threshold: a number of elements, at least 1; "
                f"got {value!r}"
            )
        self.options["zero_least"] = value

    def enable_non_distributed_optimizer(self, value: bool = True) -> None:
        """Shard optimizer states; an older form of `optimizer_placement_optimization_mode`.

        True corresponds to its mode "non_distributed", False to "none".
        """
        self.options["zero"] = bool(value)

    def use_xla_jit(self, value: bool = True) -> None:
        """Compile the job's program with torch.compile."""
        self.options["compile"] = bool(value)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in HINTS:
            return lambda *_, **__: logger.info(
                "function_config.%s has no effect: torch chooses automatically", name
            )
        if name in GONE:
            raise AttributeError(f"function_config.{name} was removed. It was for {GONE[name]}")
        near = difflib.get_close_matches(
            name, [*HINTS, *(n for n in dir(type(self)) if not n.startswith("_"))], 1
        )
        raise AttributeError(f"function_config has no {name!r}{f'; {near[0]}?' if near else ''}")


def function_config() -> FunctionConfig:
    """Return new settings of a job, to be filled in."""
    return FunctionConfig()


class _Train:
    """The older way to set the optimizer, with ``losses.add_loss(loss)`` in the job.

    ``minimize`` is the newer way.
    """

    def __init__(self) -> None:
        self.rates: list[float | None] = [None, None]
        self.scale: float | None = None
        self.update: Mapping[str, Any] | None = None

    def primary_lr(self, value: float) -> None:
        """Set the learning rate."""
        self.rates[0] = float(value)

    def secondary_lr(self, value: float) -> None:
        """Set the learning rate of variables with ``model_name="bias"``."""
        self.rates[1] = float(value)

    def loss_scale_factor(self, value: float) -> None:
        """Set the loss scale, by which the loss is multiplied."""
        self.scale = float(value)

    def model_update_conf(self, value: Mapping[str, Any]) -> None:
        """Set the optimizer and its options.

        One key names the optimizer: ``{"naive_conf": {}}``, ``{"momentum_conf": {"beta": 0.9}}``
        and so on. Further keys are ``learning_rate_decay``, ``warmup_conf``, ``clip_conf`` and
        ``weight_decay_conf``. `optimizer` raises JobError unless exactly one key names an
        optimizer.
        """
        self.update = dict(value)

    def optimizer(self) -> optimizers.Optimizer | None:
        """Return the optimizer that these settings describe, or None if nothing was set.

        Raise JobError if the settings are incomplete.
        """
        if self.update is None and self.rates[0] is None:
            return None
        if self.rates[0] is None:
            raise JobError(
                "function_config.train: primary_lr is missing; use "
                "flow.optimizer.SGD(...).minimize(loss) instead of these settings"
            )
        update = dict(self.update or {"naive_conf": {}})
        kinds = [name for name in update if name in _UPDATES]
        if len(kinds) != 1:
            raise JobError(
                f"function_config.train.model_update_conf: exactly one of {', '.join(_UPDATES)} "
                f"is wanted, got {', '.join(update) or 'none'}"
            )
        kind, arguments = _UPDATES[kinds[0]]
        conf = dict(update[kinds[0]] or {})
        options = {arguments.get(name, name): value for name, value in conf.items()}
        if kinds[0] == "naive_conf":
            options["momentum"] = 0
        clip = update.get("clip_conf", {}).get("clip_by_global_norm")
        if clip:
            options["grad_clipping"] = optimizers.grad_clipping.by_global_norm(clip["clip_norm"])
        try:
            made: optimizers.Optimizer = kind(
                _schedule(self.rates[0], update), loss_scale_factor=self.scale, **options
            )
        except TypeError as error:
            raise JobError(
                f"function_config.train.model_update_conf: {kinds[0]}: {error}"
            ) from None
        decay = update.get("weight_decay_conf")
        if decay:
            made._decays(
                decay["weight_decay_rate"],
                _name_pattern(decay, "includes"),
                _name_pattern(decay, "excludes"),
            )
        made.secondary = self.rates[1]
        return made


def _name_pattern(decay: Mapping[str, Any], name: str) -> Any:
    return (decay.get(name) or {}).get("pattern")


_UPDATES: dict[str, tuple[Callable[..., optimizers.Optimizer], dict[str, str]]] = {
    "naive_conf": (optimizers.SGD, {}),
    "momentum_conf": (optimizers.SGD, {"beta": "momentum"}),
    "adam_conf": (optimizers.Adam, {}),
    "lazy_adam_conf": (optimizers.LazyAdam, {}),
    "rmsprop_conf": (optimizers.RMSProp, {}),
    "lars_conf": (optimizers.LARS, {}),
    "lamb_conf": (optimizers.LAMB, {}),
}


def _schedule(rate: float, update: Mapping[str, Any]) -> optimizers.LrScheduler:
    warm = update.get("warmup_conf") or {}
    warmup = None
    if "constant_conf" in warm:
        warmup = optimizers.warmup.constant(
            warm["constant_conf"]["warmup_batches"], warm["constant_conf"]["multiplier"]
        )
    elif "linear_conf" in warm:
        warmup = optimizers.warmup.linear(
            warm["linear_conf"]["warmup_batches"], warm["linear_conf"]["start_multiplier"]
        )
    decay = update.get("learning_rate_decay") or {}
    if not decay:
        return optimizers.PiecewiseConstantScheduler([], [rate], warmup)
    name, conf = next(iter(decay.items()))
    conf = dict(conf)
    if name == "piecewise_constant_conf":
        return optimizers.PiecewiseConstantScheduler(
            list(conf["boundaries"]), list(conf["values"]), warmup
        )
    if name == "piecewise_scaling_conf":
        return optimizers.PiecewiseScalingScheduler(
            rate, list(conf["boundaries"]), list(conf["scales"])[1:], warmup
        )
    kinds = {
        "cosine_conf": optimizers.CosineScheduler,
        "polynomial_conf": optimizers.PolynomialScheduler,
        "linear_cosine_conf": optimizers.LinearCosineScheduler,
        "exponential_conf": optimizers.ExponentialScheduler,
        "inverse_time_conf": optimizers.InverseTimeScheduler,
        "natural_exp_conf": optimizers.NaturalExpScheduler,
    }
    if name not in kinds:
        raise JobError(
            f"function_config.train.model_update_conf: learning_rate_decay is one of "
            f"{', '.join(kinds)}; got {name!r}"
        )
    made: optimizers.LrScheduler = kinds[name](
        rate, conf.pop("decay_batches"), **conf, warmup=warmup
    )
    return made
