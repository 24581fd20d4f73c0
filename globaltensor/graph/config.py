"""The settings of a graph, under OneFlow's names.

Each setting's docstring says what the setting does here, or that it has no effect. Users reach them
as ``graph.config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import GraphError

__all__ = ["Config"]

#: The fraction of the savable memory that each mode saves, where the savable memory is that of the
#: fastest plan. None: save as much as is needed to fit.
MEMORY = {
    "Disable": 0.0,
    "SlightMemoryDown": 0.25,
    "ModerateMemoryDown": 0.5,
    "HeavyMemoryDown": 1.0,
    "AdaptiveMemory": None,
}
CALLS = ("enable_", "set_", "allow_", "follow")  # prefixes of the names of settings
STRAIGHTEN = ("Disable", "SpeedFirst", "MemoryFirst", "OverlapCpuGpu", "DelayShortGpu")


@dataclass(frozen=True)
class Auto:
    """The settings of the search for layouts."""

    ignore_user_sbp: bool = False
    computation: float = 1.0
    wait: float = 0.0  # in start-up times of a collective
    trunk: bool = True
    collector: bool = True
    memory: str = "AdaptiveMemory"


def _number(what: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value < float("inf")
    ):
        raise GraphError(f"{what}: a number of at least 0, got {value!r}")
    return float(value)


class Config:
    """The settings of a graph, ``graph.config``.

    A setting takes effect at the next call. A change makes the graph build its programs again."""

    def __init__(self) -> None:
        self.training = False
        self.amp: torch.dtype | None = None
        self.zero: tuple[int, int, int] | None = (
            None  # (stage, shard_min_size, shard_restore_level)
        )
        self.accumulation = 1
        self.buffers = 2
        self.schedule: Any = None  # a name, a Schedule, or None: the best for the stages
        self.backend: str | None = None  # of torch.compile
        self.memory: int | None = None  # upper limit of saved activations in bytes
        self.freed = False  # whether gathered parameters are freed, and gathered again in backward
        self.timeline = False
        self.straighten = "MemoryFirst"
        self.fused: bool | None = None  # None, True: as the optimizers choose
        self.search: bool | None = None  # whether cudnn chooses its algorithms by heuristics
        self.auto: Auto | None = None  # settings of the search for layouts
        self.version = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if "version" in self.__dict__ and name not in self.__dict__:
            mend = (
                f"call config.{name}(...)"
                if hasattr(type(self), name)
                else f"there are {', '.join(n for n in dir(self) if n.startswith(CALLS))}"
            )
            raise GraphError(f"graph.config.{name} cannot be set: {mend}")
        object.__setattr__(self, name, value)
        if name != "version" and "version" in self.__dict__:
            object.__setattr__(self, "version", self.version + 1)

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:
        """Run build() under ``torch.autocast`` with this dtype (float16 or bfloat16).

        Parameters keep their dtype. Raises GraphError for another dtype."""
        if dtype not in (torch.float16, torch.bfloat16):
            raise GraphError(f"enable_amp: dtype is torch.float16 or torch.bfloat16, got {dtype}")
        self.amp = dtype if mode else None

    def enable_zero(
        self,
        mode: bool = True,
        *,
        stage: int = 2,
        shard_min_size: int = 1024,
        shard_restore_level: int = 1,
    ) -> None:
        """Shard optimizer state (stage 1), also gradients (2), and also parameters (3).

        This is ZeRO (Rajbhandari et al. 2020). Each tensor is sharded over the ranks of the axes on
        which it is broadcast. Parameters with fewer than ``shard_min_size`` elements a rank stay
        replicated. What the user sees of the parameters does not change.

        ``shard_restore_level`` is OneFlow's hint of how strictly a shard is gathered before a use.
        Here an op always sees the full parameter (level 2), and the values are the same at each
        level. Raises GraphError for a stage outside 1 to 3, a size below 1, or a level outside 0 to
        2.
        """
        if stage not in (1, 2, 3):
            raise GraphError(
                f"enable_zero: stage is 1 (optimizer state), 2 (and gradients) or 3 (and "
                f"parameters), got {stage!r}"
            )
        if not isinstance(shard_min_size, int) or shard_min_size < 1:
            raise GraphError(
                f"enable_zero: shard_min_size is a number of elements, at least 1, got "
                f"{shard_min_size!r}"
            )
        if shard_restore_level not in (0, 1, 2):
            raise GraphError(
                f"enable_zero: shard_restore_level is 0, 1 or 2, got {shard_restore_level!r}"
            )
        self.zero = (stage, shard_min_size, shard_restore_level) if mode else None

    def set_zero_redundancy_optimizer_mode(self, mode: str = "distributed_split") -> None:
        """Raise GraphError: OneFlow has removed this setting, and enable_zero() replaces it."""
        raise GraphError(
            f"set_zero_redundancy_optimizer_mode({mode!r}) was removed: use "
            "config.enable_zero(True, stage=1)"
        )

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Split each call's batch (dim 0 of every input) into ``value`` micro-batches.

        Gradients are averaged, and the optimizers step once. With pipeline stages, these are the
        micro-batches that stream through the stages. Outputs are joined along dim 0 in the batch's
        order, and scalars become their mean. Raises GraphError below 1."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GraphError(
                f"set_gradient_accumulation_steps: a number of micro-batches, at least 1, got "
                f"{value!r}"
            )
        self.accumulation = value

    def set_outputs_buffer_size(self, value: int = 2) -> None:
        """Set the number of buffers (credits) between two pipeline stages.

        So many messages may wait before the sender blocks. Raises GraphError below 1."""
        if not isinstance(value, int) or value < 1:
            raise GraphError(
                f"set_outputs_buffer_size: a number of buffers, at least 1, got {value!r}"
            )
        self.buffers = value

    def set_schedule(self, schedule: Any) -> None:
        """Set the schedule of the pipeline stages.

        ``schedule`` is "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", a `Schedule`, or
        the path of a file with one. Raises ScheduleError for an unknown name."""
        from .pipeline.schedule import parse_schedule

        self.schedule = parse_schedule(schedule)

    def use_auto_plan(self, plan: Any) -> None:
        """Apply the choices of a ``flow.auto.plan`` other than the layouts.

        `flow.parallelize(model, placement, plan)` applies the layouts. This method sets the number
        of micro-batches, the schedule of the stages, and whether gathered parameters are freed
        (`flow.reshard_after_forward`). It also sets ZeRO, at the highest stage that the plan
        chooses for any parameter. ZeRO then covers all parameters at least as large as the smallest
        one for which the plan chooses it. Raises GraphError if ``plan`` is not a plan."""
        if not isinstance(getattr(plan, "choices", None), Mapping):
            raise GraphError(
                "config.use_auto_plan takes a plan, made by flow.auto.plan(...) or "
                f"flow.auto.load_plan(file), got {plan!r}"
            )
        chosen = plan.choices
        self.set_gradient_accumulation_steps(chosen.get("micro_batches", 1))
        if chosen.get("schedule"):
            self.set_schedule(chosen["schedule"])
        self.freed = bool(chosen.get("reshard_after_forward"))
        shared = chosen.get("zero") or {}
        least = min(
            (g.bytes // getattr(torch, g.dtype).itemsize for g in plan.placed if g.name in shared),
            default=1,
        )
        self.enable_zero(
            bool(shared),
            stage=max((how["stage"] for how in shared.values()), default=1),
            shard_min_size=max(1, least),
        )

    # The search for layouts (auto/). Its settings count even if they are made before the search is
    # switched on.

    def _auto(self, **changes: Any) -> None:
        object.__setattr__(self, "_asked", replace(self.__dict__.get("_asked", Auto()), **changes))
        if self.auto is not None:
            self.auto = self._asked

    def enable_auto_parallel(self, mode: bool = True) -> None:
        """Search for the best layouts of parameters and of all computed tensors.

        The search runs at the first call for each shape of the inputs. Explicit ``to_global`` in
        build() stays. The layouts of parameters may change: their sbp is part of the result
        (`Graph.auto_plan`)."""
        self.auto = self.__dict__.get("_asked", Auto()) if mode else None

    def enable_auto_parallel_ignore_user_sbp_config(self, mode: bool = True) -> None:
        """Let the search also choose the layouts of explicit ``to_global`` in build().

        This applies where such a call stays on the same placement."""
        self._auto(ignore_user_sbp=bool(mode))

    def set_auto_parallel_computation_cost_ratio(self, ratio: float) -> None:
        """Set the weight of computation against communication.

        OneFlow's 0.05 weighs them as the cluster's model does. Twice that value counts computation
        double. Raises GraphError below 0."""
        self._auto(computation=_number("set_auto_parallel_computation_cost_ratio", ratio) / 0.05)

    def set_auto_parallel_wait_time(self, cost: float) -> None:
        """Set an extra cost of each change of layout, on top of the cluster's model.

        In the unit of ``cost``, OneFlow's 1.65e4 is the start-up time of one collective. A higher
        cost favours fewer, larger collectives. Raises GraphError below 0."""
        self._auto(wait=_number("set_auto_parallel_wait_time", cost) / 1.65e4)

    def enable_auto_parallel_trunk_algo(self, mode: bool = True) -> None:
        """Count only the traffic of parameters and gradients that computation cannot hide.

        The traffic of parameters and of their gradients is off the trunk of the computation. The
        setting is on by default; with False all of that traffic counts."""
        self._auto(trunk=bool(mode))

    def enable_auto_parallel_sbp_collector(self, mode: bool = True) -> None:
        """Let the search count a change of a tensor's layout once for several calls that share it.

        Calls share such changes when they run, too. The setting is on by default."""
        self._auto(collector=bool(mode))

    def enable_auto_memory(self, mode: str = "AdaptiveMemory") -> None:
        """Set how much memory the search saves, by mode.

        "Disable" saves nothing. "SlightMemoryDown", "ModerateMemoryDown" and "HeavyMemoryDown" save
        a quarter, a half and all of what can be saved of the fastest plan's memory.
        "AdaptiveMemory" saves what is needed to fit the device, if the cluster states the device's
        memory. Raises GraphError for another mode."""
        if mode not in MEMORY:
            raise GraphError(f"enable_auto_memory: one of {', '.join(MEMORY)}, got {mode!r}")
        self._auto(memory=mode)

    def enable_timeline(self, mode: bool = True) -> None:
        """Record when each rank runs what in a pipeline, for `Graph.timeline`.

        On an accelerator, each rank then waits for its device after each action."""
        self.timeline = bool(mode)

    def enable_compile(self, mode: bool = True, *, backend: str = "inductor") -> None:
        """Compile the programs with ``torch.compile`` and this backend."""
        self.backend = backend if mode else None

    def set_memory_limit(self, nbytes: int | None) -> None:
        """Recompute in backward, so that a rank saves at most ``nbytes`` bytes of activations.

        The choice of what to recompute has the minimum cost. None: recompute nothing."""
        if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 0):
            raise GraphError(f"set_memory_limit: a number of bytes or None, got {nbytes!r}")
        self.memory = nbytes

    def enable_straighten_algorithm(self, mode: str = "MemoryFirst") -> None:
        """Check the mode and do nothing else: a program here runs in the order of the user's code.

        In OneFlow, the mode chooses an order for its actors. Raises GraphError for an unknown mode.
        """
        if mode not in STRAIGHTEN:
            raise GraphError(
                f"enable_straighten_algorithm: one of {', '.join(STRAIGHTEN)}, got {mode!r}"
            )
        self.straighten = mode

    def allow_fuse_model_update_ops(self, mode: bool = True) -> None:
        """Use torch's fused optimizer kernels where the device has them.

        Optimizers left at their defaults do so anyway. ``False`` turns the fused kernels off."""
        self.fused = mode

    def enable_multi_tensor_update(self, mode: bool = True) -> None:
        """Set `allow_fuse_model_update_ops`.

        torch's fused kernels update all parameters at once."""
        self.fused = mode

    def enable_fused_model_update_cast(self, mode: bool = True) -> None:
        """Do nothing: autocast has no half-precision copies of parameters to cast in an update."""

    def allow_fuse_add_to_output(self, mode: bool = True) -> None:
        """Do nothing: with `enable_compile` the compiler fuses such ops.

        Without the compiler, torch runs the ops one by one."""

    def allow_fuse_cast_scale(self, mode: bool = True) -> None:
        """Do nothing: with `enable_compile` the compiler fuses such ops.

        Without the compiler, torch runs the ops one by one."""

    def enable_cudnn_conv_heuristic_search_algo(self, mode: bool = True) -> None:
        """Choose how cudnn selects convolution algorithms.

        The default is by heuristics. ``False`` measures the algorithms instead: it sets
        ``torch.backends.cudnn.benchmark`` at the next call. No effect on CPU."""
        self.search = mode

    def enable_compress_memory(self, mode: bool = True) -> None:
        """Do nothing: torch's allocator reuses memory at run time, without a plan to pack."""

    def enable_choose_best_memory_allocation(self, mode: bool = True) -> None:
        """Do nothing: torch's allocator reuses memory at run time, without a plan to choose."""

    def __repr__(self) -> str:
        changed = {k: v for k, v in self.__dict__.items() if k not in ("version", "_asked")}
        return f"Config({', '.join(f'{k}={v!r}' for k, v in changed.items())})"
