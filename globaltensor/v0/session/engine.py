"""The engine of one device of a session: the variables and the graphs of all jobs.

The session runs it on the master, and `worker` on all other devices. All devices execute the
master's orders alike.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._tensor.global_tensor import GlobalTensor
from ..._tensor.pending_tensor import local_of
from ...distributed.world import placeholder, world
from ...sharding.sbp import broadcast
from ...sharding.spec import Spec
from ..errors import SessionError
from ..optimizer import DynamicLossScale
from ..optimizer_updates import Update
from ..recording.record import Record
from ..recording.run_record import HOME, JobGraph, Variables
from ..variables import created, merged
from .device_layout import Layout

__all__ = ["Engine"]

_STEP = "System-Train-TrainStep-"
_SCALE = "System-Train-LossScale-"


class _Count(NamedTuple):
    """A list of numbers that every device has locally and alike.

    ``read`` and ``write`` access it.
    """

    size: int
    dtype: torch.dtype
    read: Callable[[], list[Any]]
    write: Callable[[list[Any]], None]


class Engine:
    """The jobs of a session on this device.

    Every method except `names` and `shape_of` is collective: all devices must call it alike. Only
    the master passes and receives arrays.
    """

    def __init__(
        self, records: Sequence[Record], layout: Layout, seed: int, debug: bool = False
    ) -> None:
        self.records = {record.name: record for record in records}
        self.layout = layout
        self.declared = merged(records)
        trained = {name for record in records if record.training for name in record.trained}
        self.variables = created(self.declared, trained, layout, seed)
        # state of the random generator that the jobs use
        self.random = torch.Generator().manual_seed(seed).get_state()
        self.counts: dict[str, _Count] = {}  # step counts and loss scales, by name
        # optimizer states, by name
        self.states: dict[str, tuple[torch.nn.Parameter, Update, str]] = {}
        self.graphs = {record.name: self._graph(record, debug) for record in records}

    def _graph(self, record: Record, debug: bool) -> JobGraph:
        graph = JobGraph(
            record,
            self.layout,
            Variables({name: self.variables[name] for name in record.variables}),
        )
        if record.options.get("amp"):
            graph.config.enable_amp(
                True, dtype=torch.float16 if "cuda" in self._kinds() else torch.bfloat16
            )
        if record.options.get("compile"):
            graph.config.enable_compile(True)
        if debug:
            graph.debug(3)
        if not record.training:
            return graph
        if record.options.get("zero"):
            graph.config.enable_zero(
                True, stage=1, shard_min_size=record.options.get("zero_least", 1024)
            )
        wanted = record.optimizer.variables
        names = [name for name in record.trained if wanted is None or name in wanted]
        update = record.optimizer.made([record.variables[name] for name in names], self.variables)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            schedule = torch.optim.lr_scheduler.LambdaLR(update, record.optimizer.lr_scheduler.rate)
        graph.add_optimizer(update, lr_sch=schedule)
        policy = record.optimizer.loss_scale_policy
        if policy is not None:
            scaler = policy.scaler("cuda" if "cuda" in self._kinds() else "cpu")
            graph.set_grad_scaler(scaler)
            if isinstance(policy, DynamicLossScale):
                self.counts[_SCALE + record.name] = _scale(scaler)
        self.counts[_STEP + record.name] = _steps(update, schedule)
        for name in names:
            for state_name in update.state[self.variables[name]]:
                key = f"{name}-{state_name}"
                # Another job trains this variable too, and each has its own optimizer.
                if key in self.states or key in self.variables:
                    key = f"{record.name}-{key}"
                self.states[key] = self.variables[name], update, state_name
        return graph

    def _kinds(self) -> set[str]:
        return {p.placement.type for p in self.variables.values()}  # type: ignore[attr-defined]

    def names(self) -> list[str]:
        """Return the names of all that is saved.

        These are variables, optimizer states, step counts and loss scales.
        """
        return [*self.variables, *self.states, *self.counts]

    def shape_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of one of `names`. Not collective."""
        if name in self.counts:
            return (self.counts[name].size,), self.counts[name].dtype
        held = self._variable_or_state(name)
        return tuple(held.shape), held.dtype

    def run(
        self, job: str, arrays: Sequence[np.ndarray[Any, Any]] | None = None
    ) -> dict[int, list[np.ndarray[Any, Any]]]:
        """Run one call of a job.

        Return the pieces of each returned value, by its number; on other devices than the master,
        return an empty dict.
        """
        record, graph = self.records[job], self.graphs[job]
        inputs = []
        for i, given in enumerate(record.inputs):
            shape = (self.layout.size, *given.shape) if given.mirrored else given.shape
            inputs.append(
                self._wrap_on_master(shape, given.dtype, None if arrays is None else arrays[i])
            )
        with self._own_random_numbers():
            outs = graph(*inputs)
        if world().rank:
            return {}
        return {
            ref.index: [_array(piece._local) for piece in pieces]
            for ref, pieces in zip(record.returned, outs, strict=True)
        }

    def fetch(self, names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the values of variables, optimizer states and counts by name, on the master.

        Raise SessionError for an unknown name.
        """
        out = {}
        for name in names:
            if name in self.counts:
                out[name] = torch.tensor(
                    self.counts[name].read(), dtype=self.counts[name].dtype
                ).numpy()
                continue
            held: Any = self._variable_or_state(name).detach()
            home_value = (
                held.to_global(placement=HOME, sbp=broadcast)
                if isinstance(held, GlobalTensor)
                else held
            )
            if world().rank == 0:
                out[name] = _array(local_of(home_value))
        return out

    def load(
        self, names: Sequence[str], arrays: Mapping[str, np.ndarray[Any, Any]] | None = None
    ) -> None:
        """Set variables, optimizer states and counts to these values.

        The values must have the right shapes.
        """
        for name in names:
            if name in self.counts:
                own_count: Any = (
                    None if arrays is None else np.asarray(arrays[name]).reshape(-1).tolist()
                )
                counts = (
                    [own_count]
                    if world().size == 1
                    else world()
                    .comm(tuple(range(world().size)))
                    .all_gather_object(own_count, "a variable's value")
                )
                self.counts[name].write(counts[0])
                continue
            held: Any = self._variable_or_state(name)
            value: Any = self._wrap_on_master(
                tuple(held.shape), held.dtype, None if arrays is None else arrays[name]
            )
            with torch.no_grad():
                held.copy_(value.to_global(held.placement, held.sbp))

    def _variable_or_state(self, name: str) -> torch.Tensor:
        if name in self.variables:
            return self.variables[name]
        if name not in self.states:
            raise SessionError(f"no job of this session has a variable {name!r}")
        p, update, kept = self.states[name]
        found: torch.Tensor = update.state[p][kept]
        return found

    def _wrap_on_master(
        self, shape: tuple[int, ...], dtype: torch.dtype, array: np.ndarray[Any, Any] | None
    ) -> torch.Tensor:
        """Wrap the master's array as a global tensor that only the master holds."""
        spec = Spec.make(shape, dtype, HOME, broadcast)
        if array is None:
            return GlobalTensor.wrap(placeholder(spec), spec)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            local = torch.from_numpy(np.ascontiguousarray(array).reshape(shape)).to(dtype)
        return GlobalTensor.wrap(local, spec)

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Continue the jobs' random numbers where the last call ended.

        The script draws numbers on the master only, so the jobs must not depend on them.
        """
        before = torch.get_rng_state()
        torch.set_rng_state(self.random)
        try:
            yield
        finally:
            self.random = torch.get_rng_state()
            torch.set_rng_state(before)


def _steps(update: Update, schedule: Any) -> _Count:
    """Return access to a job's step count, from which its learning rate follows."""

    def write(values: list[Any]) -> None:
        schedule.last_epoch = int(values[0])
        for group in update.param_groups:
            group["steps"] = schedule.last_epoch
            group["lr"] = schedule.lr_lambdas[0](schedule.last_epoch)

    return _Count(1, torch.int64, lambda: [schedule.last_epoch], write)


def _scale(scaler: Any) -> _Count:
    """Return access to a dynamic loss scale: the scale, and the steps since it last changed."""

    def read() -> list[Any]:
        state = scaler.state_dict()
        return [state["scale"], state["_growth_tracker"]]

    def write(values: list[Any]) -> None:
        scaler.load_state_dict(
            {**scaler.state_dict(), "scale": float(values[0]), "_growth_tracker": int(values[1])}
        )

    return _Count(2, torch.float64, read, write)


def _array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Copy a tensor to a new array, which the next call does not overwrite."""
    value = value.detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy().copy()
