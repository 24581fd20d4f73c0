"""The settings of a graph, under OneFlow's names. Each says what it does here; those that are no
choice of ours say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .errors import GraphError

__all__ = ["Config"]

#: How much of what can be saved of the fastest plan's memory a mode saves; None: what it takes to
#: fit.
MEMORY = {
    "Disable": 0.0,
    "SlightMemoryDown": 0.25,
    "ModerateMemoryDown": 0.5,
    "HeavyMemoryDown": 1.0,
    "AdaptiveMemory": None,
}
CALLS = ("enable_", "set_", "allow_", "follow")  # how the names of settings begin
STRAIGHTEN = ("Disable", "SpeedFirst", "MemoryFirst", "OverlapCpuGpu", "DelayShortGpu")


@dataclass(frozen=True)
class Auto:
    """What the search for layouts is told."""

    ignore_user_sbp: bool = False
    computation: float = 1.0
    wait: float = 0.0  # in starts of a collective
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
    """``graph.config``. Settings count from the next call on; a change builds the graph's programs
    anew."""

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
        self.memory: int | None = None  # bytes of activations to be kept at most
        self.freed = (
            False  # whether gathered parameters are let go of, and gathered again in backward
        )
        self.timeline = False
        self.straighten = "MemoryFirst"
        self.fused: bool | None = None  # None, True: as the optimizers choose
        self.search: bool | None = None  # of cudnn's algorithms
        self.auto: Auto | None = None  # search for layouts
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
        """Run build() under ``torch.autocast`` with this dtype (float16 or bfloat16); parameters
        stay as they are. Raises GraphError for another dtype."""
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
        """Keep optimizer state (stage 1), gradients too (2), and parameters too (3) in parts, one
        on each rank of the axes that they are broadcast over (ZeRO, Rajbhandari et al. 2020).
        Parameters of fewer than ``shard_min_size`` elements a rank stay whole. What the user sees
        of the parameters does not change.

        ``shard_restore_level``: OneFlow's hint how strictly a part is brought together before a
        use; here an op always sees the whole parameter (level 2), the values are the same at each
        level. Raises GraphError for a stage outside 1 to 3, a size below 1, a level outside 0 to 2.
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
        """Gone from OneFlow. Raises GraphError: enable_zero() is its name now."""
        raise GraphError(
            f"set_zero_redundancy_optimizer_mode({mode!r}) is no more: use "
            f"config.enable_zero(True, stage=1)"
        )

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Cut each call's batch (dim 0 of every input) into ``value`` micro-batches; gradients are
        averaged, the optimizers step once. With pipeline stages these are the micro-batches that
        stream through. Outputs are joined along dim 0 in the batch's order, scalars become their
        mean. Raises GraphError below 1."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GraphError(
                f"set_gradient_accumulation_steps: a number of micro-batches, at least 1, got "
                f"{value!r}"
            )
        self.accumulation = value

    def set_outputs_buffer_size(self, value: int = 2) -> None:
        """How many messages may wait between two pipeline stages before the sender has to wait
        (credits). Raises GraphError below 1."""
        if not isinstance(value, int) or value < 1:
            raise GraphError(
                f"set_outputs_buffer_size: a number of buffers, at least 1, got {value!r}"
            )
        self.buffers = value

    def set_schedule(self, schedule: Any) -> None:
        """How pipeline stages take turns: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v",
        a `Schedule`, or the path of a file with one. Raises ScheduleError for a name nobody
        knows."""
        from .pipeline.schedule import parse_schedule

        self.schedule = parse_schedule(schedule)

    def follow(self, plan: Any) -> None:
        """Take what a plan of ``flow.auto.plan`` has chosen beside the layouts (those
        `flow.parallelize(model, placement, plan)` takes): the number of micro-batches, the schedule
        of its stages, whether gathered parameters are let go of (`sharded.freed`), and ZeRO: the
        highest stage that it gives a parameter, for all that are at least as large as the smallest
        it gives one to. Raises GraphError for what is no plan."""
        if not isinstance(getattr(plan, "choices", None), Mapping):
            raise GraphError(
                f"config.follow takes a plan, of flow.auto.plan(...) or "
                f"flow.auto.load_plan(file), got {plan!r}"
            )
        chosen = plan.choices
        self.set_gradient_accumulation_steps(chosen.get("micro_batches", 1))
        if chosen.get("schedule"):
            self.set_schedule(chosen["schedule"])
        self.freed = bool(chosen.get("freed"))
        shared = chosen.get("zero") or {}
        least = min(
            (g.bytes // getattr(torch, g.dtype).itemsize for g in plan.given if g.name in shared),
            default=1,
        )
        self.enable_zero(
            bool(shared),
            stage=max((how["stage"] for how in shared.values()), default=1),
            shard_min_size=max(1, least),
        )

    # The search for layouts (auto/). Settings made before it is switched on count too.

    def _auto(self, **changes: Any) -> None:
        object.__setattr__(self, "_asked", replace(self.__dict__.get("_asked", Auto()), **changes))
        if self.auto is not None:
            self.auto = self._asked

    def enable_auto_parallel(self, mode: bool = True) -> None:
        """Search for the best layouts of parameters and of all that is computed, at the first call
        for each shape of the inputs. Explicit ``to_global`` in build() stays. Parameters may lie
        otherwise afterwards: their sbp is part of the answer (`Graph.auto_plan`)."""
        self.auto = self.__dict__.get("_asked", Auto()) if mode else None

    def enable_auto_parallel_ignore_user_sbp_config(self, mode: bool = True) -> None:
        """Let the search choose the layouts of explicit ``to_global`` in build() too, where these
        stay on the same placement."""
        self._auto(ignore_user_sbp=bool(mode))

    def set_auto_parallel_computation_cost_ratio(self, ratio: float) -> None:
        """Weight of computing against moving; OneFlow's 0.05 is as the cluster's model says, twice
        that counts computing double. Raises GraphError below 0."""
        self._auto(computation=_number("set_auto_parallel_computation_cost_ratio", ratio) / 0.05)

    def set_auto_parallel_wait_time(self, cost: float) -> None:
        """What each change of layout costs besides what the cluster's model says: in units of which
        OneFlow's 1.65e4 is the start of one collective. Favours fewer, larger ones. Raises
        GraphError below 0."""
        self._auto(wait=_number("set_auto_parallel_wait_time", cost) / 1.65e4)

    def enable_auto_parallel_trunk_algo(self, mode: bool = True) -> None:
        """Count the traffic of parameters and of their gradients, which is off the trunk of the
        computation, only as far as it cannot hide behind computing (on unless this is called with
        False: then all of it counts)."""
        self._auto(trunk=bool(mode))

    def enable_auto_parallel_sbp_collector(self, mode: bool = True) -> None:
        """Let several calls that take one tensor share a change of its layout in the search's
        accounts, as they do when they run (on unless this is called with False)."""
        self._auto(collector=bool(mode))

    def enable_auto_memory(self, mode: str = "AdaptiveMemory") -> None:
        """How much the search saves memory: "Disable" not at all; "SlightMemoryDown",
        "ModerateMemoryDown", "HeavyMemoryDown" a quarter, a half, all of what can be saved of the
        fastest plan's; "AdaptiveMemory" what it takes to fit the device, where the cluster says how
        much that has. Raises GraphError for another."""
        if mode not in MEMORY:
            raise GraphError(f"enable_auto_memory: one of {', '.join(MEMORY)}, got {mode!r}")
        self._auto(memory=mode)

    def enable_timeline(self, mode: bool = True) -> None:
        """Note when each rank does what in a pipeline, for `Graph.timeline`. On an accelerator that
        makes a rank wait for its device after each action."""
        self.timeline = bool(mode)

    def enable_compile(self, mode: bool = True, *, backend: str = "inductor") -> None:
        """Hand the programs to ``torch.compile`` with this backend."""
        self.backend = backend if mode else None

    def set_memory_limit(self, nbytes: int | None) -> None:
        """Recompute in backward what it takes to keep at most so many bytes of activations on a
        rank, chosen for the least cost. None: recompute nothing."""
        if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 0):
            raise GraphError(f"set_memory_limit: a number of bytes or None, got {nbytes!r}")
        self.memory = nbytes

    def enable_straighten_algorithm(self, mode: str = "MemoryFirst") -> None:
        """No effect: OneFlow's choice of an order for its actors; a program here runs in the order
        of the user's code. Raises GraphError for no known mode."""
        if mode not in STRAIGHTEN:
            raise GraphError(
                f"enable_straighten_algorithm: one of {', '.join(STRAIGHTEN)}, got {mode!r}"
            )
        self.straighten = mode

    def allow_fuse_model_update_ops(self, mode: bool = True) -> None:
        """Step with torch's fused optimizer kernels where there are some for the device, as
        optimizers left at their defaults do anyway; ``False``: without."""
        self.fused = mode

    def enable_multi_tensor_update(self, mode: bool = True) -> None:
        """As `allow_fuse_model_update_ops`: torch's fused kernels take all parameters at once."""
        self.fused = mode

    def enable_fused_model_update_cast(self, mode: bool = True) -> None:
        """No effect: autocast keeps no copies of parameters in half precision that an update would
        have to cast."""

    def allow_fuse_add_to_output(self, mode: bool = True) -> None:
        """No effect of its own: with `enable_compile` the compiler fuses such ops, without it torch
        runs them one by one."""

    def allow_fuse_cast_scale(self, mode: bool = True) -> None:
        """No effect of its own: with `enable_compile` the compiler fuses such ops, without it torch
        runs them one by one."""

    def enable_cudnn_conv_heuristic_search_algo(self, mode: bool = True) -> None:
        """No effect on CPU. On CUDA, ``False`` sets ``torch.backends.cudnn.benchmark`` at the next
        call: measure the algorithms instead of guessing."""
        self.search = mode

    def enable_compress_memory(self, mode: bool = True) -> None:
        """No effect: torch's allocator reuses memory at run time, there is no allocation plan to
        pack."""

    def enable_choose_best_memory_allocation(self, mode: bool = True) -> None:
        """No effect: torch's allocator reuses memory at run time, there is no allocation plan to
        choose."""

    def __repr__(self) -> str:
        changed = {k: v for k, v in self.__dict__.items() if k not in ("version", "_asked")}
        return f"Config({', '.join(f'{k}={v!r}' for k, v in changed.items())})"
