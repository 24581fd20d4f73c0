"""``nn.Graph``: a function of modules and tensors, captured once and run as a program.

The function is captured once for each shape of its inputs. The program then runs without any
dispatch. Users derive from `Graph` as ``flow.nn.Graph``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from .._base.providers import Providers
from .._base.pytree import object_tensors, replaced_in_objects, skeleton
from .._ops.rules import RULES
from .._tensor.compiler_guard import LEFT_ALONE
from .._tensor.global_tensor import GlobalTensor
from .._tensor.gradients import flat_buffers
from .._tensor.gradients.reducer import reducer
from .._tensor.pending_tensor import local_of
from .._tensor.plain_operands import check_replicated
from .._tensor.strides import note_strides, noted_order
from ..distributed.divergence import digest_of
from ..distributed.world import world
from ..errors import GraphError, noted
from ..optim.zero import Zero, freeing
from ..sharding.placement import Placement
from ..sharding.spec import layout_for
from . import passes, printing
from . import state_dict as state
from .capture.capture import CaptureResult, Result, capture
from .capture.dry_world import DryWorld
from .capture.module_hooks import configured_placements, stages_of, watched
from .capture.replicated_uses import compare_uses
from .config import Config
from .grad_clip import clip
from .microbatch import MicrobatchSplit
from .module_settings import ProxyModule, bare
from .module_state import ModuleState
from .passes.lower import lower
from .pipeline.grad_sync import Grads
from .pipeline.measured_timeline import measured
from .pipeline.pipelined_graph import PipelinedGraph
from .pipeline.timeline import Timeline
from .program.program import Program, reader
from .rank_agreement import Text, agree, agreed, seed_of, settings
from .sharding_plan import PlanFollower, ShardingPlan, following_plan, plan_of
from .validation import (
    apply_settings,
    attributes,
    check_captured,
    check_optimizer,
    check_scaler,
    modules_of,
    rebound,
)

__all__ = ["Graph"]

_numbers: defaultdict[str, Iterator[int]] = defaultdict(
    itertools.count
)  # counts the graphs of each class

#: Errors of torch's kernels for an index out of range. A graph's kernels see local tensors.
_INDEX_ERROR = re.compile(r"index .*out of (bounds|range)|Index .*out of (bounds|range)")
_LOCAL_NUMBERS = (
    "an index in the graph is out of range. Index and size are those of the local tensors of a "
    "rank, where a tensor is split: call build() itself with the same arguments (graph.build(...)) "
    "for those of the global tensors"
)
#: Planners of a graph whose config asks for a search: (graph, args, kwargs) -> PlanFollower.
GRAPH_PLANNERS = Providers("planners of graphs", "globaltensor.auto")


class _Optimizer:
    """An optimizer of a graph, with the schedulers of its learning rate."""

    def __init__(self, optimizer: Optimizer, schedule: Any) -> None:
        self.optimizer, self.schedule = optimizer, schedule


class CompiledShape:
    """The capture, the program and the plan of one shape of the graph's inputs."""

    def __init__(
        self, captured: CaptureResult, program: Program | None, staged: PipelinedGraph | None
    ) -> None:
        self.captured, self.program, self.staged = captured, program, staged
        self.digest = b""  # ranks compare it to see that they call the same program
        self.searched: Any = None  # the plan that a search has found for this shape

    def run(self, micros: Sequence[list[torch.Tensor]], scale: float, training: bool) -> list[Any]:
        """Return the results of each micro-batch.

        Gradients are summed over the ranks in the last micro-batch."""
        flat_buffers.keep_freed_memory()
        try:
            outs = self._run_micros(micros, scale, training)
        except (IndexError, RuntimeError) as error:
            if _INDEX_ERROR.search(str(error)):
                noted(error, _LOCAL_NUMBERS)
            raise
        return [_fill_outputs(self.captured.structure, iter(out)) for out in outs]

    def _run_micros(
        self, micros: Sequence[list[torch.Tensor]], scale: float, training: bool
    ) -> list[Any]:
        outs: Any
        if self.staged is not None:
            outs = self.staged(micros, scale)
        else:
            outs, gradient_reducer = [], reducer()
            for i, inputs in enumerate(micros):
                with (
                    gradient_reducer.deferring()
                    if training and i < len(micros) - 1
                    else contextlib.nullcontext()
                ):
                    outs.append(self.program(inputs, scale))  # type: ignore[misc]
        return outs  # type: ignore[no-any-return]

    @property
    def module(self) -> Any:
        """The fx module of this rank; with several stages, a module that holds theirs."""
        return self.program.module if self.program is not None else self.staged.module  # type: ignore[union-attr]


class Graph:
    """A static graph (OneFlow's ``nn.Graph``).

    Derive from this class: set modules as attributes in ``__init__``, and write the computation in
    ``build``.

    A graph with an optimizer (`add_optimizer`) trains: ``build`` calls ``loss.backward()``, and
    each call of the graph is one step of the optimizers. Inputs and outputs are pytrees (tuples,
    lists and dicts) of tensors and plain values. Each new shape, dtype, placement or sbp of the
    inputs is captured once. The graph caches the programs of the last 10 shapes (see
    `with_dynamic_input_shape`).
    """

    def __init__(
        self,
        *,
        enable_get_runtime_state_dict: bool = False,
        debug_v_level: int = -1,
        debug_ranks: Any = None,
        debug_max_py_stack_depth: int = 2,
        debug_only_user_py_stack: bool = True,
        debug_op_repr_with_py_stack: bool = False,
    ) -> None:
        self.__dict__.update(
            config=Config(),
            name=f"{type(self).__name__}_{next(_numbers[type(self).__name__])}",
            _blocks={},
            _modules=OrderedDict(),
            _optimizers=[],
            _scaler=None,
            _built=OrderedDict(),
            _size=10,
            _steps=0,
            _held=None,
            _grads=Grads(),
            _shared=(None, None),  # ZeRO: its settings, and the object that applies them
            _last=None,
            _debug=printing.Debug(
                debug_v_level,
                debug_ranks,
                debug_max_py_stack_depth,
                debug_only_user_py_stack,
                debug_op_repr_with_py_stack,
            ),
            _captures=0,
            _plan=None,
            _arranged=None,  # the plan that a search has found for the shape being built
            _lock=threading.Lock(),
        )

    # Attributes

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" not in self.__dict__:
            raise GraphError(
                f"{type(self).__name__}.__init__ must call super().__init__() before it sets "
                f"attributes"
            )
        value = bare(value)
        if isinstance(value, torch.nn.Module):
            self._modules[name] = value
            self.__dict__.pop(name, None)
            return
        if isinstance(value, Graph):
            raise GraphError(
                f"{type(self).__name__}.{name}: a graph cannot hold another graph; set the "
                "modules that they share on both"
            )
        if isinstance(value, Optimizer):
            raise GraphError(
                f"{type(self).__name__}.{name}: add an optimizer with self.add_optimizer(optimizer)"
            )
        self._modules.pop(name, None)
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules")
        if modules is None:
            raise GraphError(f"{type(self).__name__}.__init__ must call super().__init__() first")
        if name in modules:
            return ProxyModule(modules[name], self._blocks)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        if self._modules.pop(name, None) is None:
            object.__delattr__(self, name)

    # Public API

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs from the inputs. Write this method in the derived class."""
        raise GraphError(
            f"{type(self).__name__} has no build(): write the computation there, as a module's "
            f"forward"
        )

    def add_optimizer(
        self, optim: Optimizer, *, lr_sch: Any = None, is_sparse: bool = False
    ) -> None:
        """Train with this optimizer: one step at each call.

        Several optimizers may be added, for different parameters. ``lr_sch`` is a scheduler of
        torch (or a list of schedulers) that steps after the optimizer. A parameter group with
        ``clip_grad_max_norm`` (and ``clip_grad_norm_type``, 2.0 by default) has its gradients
        clipped to that norm before the step, over all micro-batches and stages. ``is_sparse`` is
        OneFlow's and has no effect. Raises GraphError if ``optim`` is not an optimizer, or if a
        scheduler needs a metric.
        """
        check_optimizer(optim, lr_sch, [entry.optimizer for entry in self._optimizers])
        self._optimizers.append(_Optimizer(optim, lr_sch))
        self.config.training = True

    def set_grad_scaler(self, grad_scaler: Any = None) -> None:
        """Multiply the loss by the scale of a gradient scaler.

        ``grad_scaler`` is a ``flow.amp.GradScaler(...)`` or a ``StaticGradScaler``. A step with a
        non-finite gradient is skipped. Raises GraphError if ``grad_scaler`` is not a scaler."""
        check_scaler(grad_scaler)
        self.__dict__["_scaler"] = grad_scaler

    def debug(
        self,
        v_level: int = 0,
        *,
        ranks: Any = None,
        max_py_stack_depth: int = 2,
        only_user_py_stack: bool = True,
        op_repr_with_py_stack: bool = False,
    ) -> None:
        """Log what the graph does.

        ``v_level``: -1 logs nothing, 0 logs each capture, 1 also the modules, 2 also each op, 3
        also the programs. ``ranks``: the ranks that log (None: rank 0; -1: all).
        ``op_repr_with_py_stack``: print each op with the lines of code that made it."""
        self.__dict__["_debug"] = printing.Debug(
            v_level, ranks, max_py_stack_depth, only_user_py_stack, op_repr_with_py_stack
        )

    # State

    @property
    def is_compiled(self) -> bool:
        """True if at least one program has been built."""
        return bool(self._built)

    @property
    def training(self) -> bool:
        return bool(self.config.training)

    def state_dict(self, destination: Any = None) -> Any:
        """Return the state of everything that the graph trains.

        The state covers modules, optimizers, schedulers, the number of steps and the random number
        generators. The method works before or after the first call."""
        return state.state_dict(self, destination)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        """Load a state that `state_dict` returned, before or after the first call.

        Raises the errors of torch's load_state_dict."""
        state.load_state_dict(self, state_dict, strict)

    def runtime_state_dict(self, destination: Any = None) -> Any:
        """Return `state_dict`: a program has no state of its own."""
        return self.state_dict(destination)

    load_runtime_state_dict = load_state_dict
    __reduce_ex__ = state.not_copied

    # Calls

    @classmethod
    def trace(cls, func: Callable[..., Any]) -> Graph:
        """Return a graph whose build() is ``func``, a function or a module.

        Raises GraphError if ``func`` is not callable.

        >>> import torch
        >>> doubled = Graph.trace(lambda x: x * 2)
        >>> doubled(torch.ones(3))
        tensor([2., 2., 2.])
        """
        if not callable(func):
            raise GraphError(
                "Graph.trace: func must be a function or a module that accepts and returns "
                f"tensors, got {func!r}"
            )
        graph = cls()
        graph._modules.update((f"module_{i}", module) for i, module in enumerate(modules_of(func)))
        graph.__dict__["build"] = func
        return graph

    @classmethod
    def with_dynamic_input_shape(
        cls, *, size: int = 10, enable_shared: bool = True
    ) -> Callable[[Any], Any]:
        """Decorate a graph's ``__init__`` (or its class) to cache more or fewer programs.

        The graph caches the programs of the last ``size`` input shapes. Every graph accepts any
        shape."""
        if not isinstance(size, int) or size < 1:
            raise GraphError(
                f"with_dynamic_input_shape: size is a number of shapes, at least 1, got {size!r}"
            )

        def decorated(target: Any) -> Any:
            original = target.__init__ if isinstance(target, type) else target

            @functools.wraps(original)
            def init(self: Graph, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                self.__dict__["_size"] = size

            if isinstance(target, type):
                target.__init__ = init  # type: ignore[misc]
            return target if isinstance(target, type) else init

        return decorated

    def enable_shared(self, mode: bool = True) -> None:
        """Do nothing: graphs always share the parameters of their modules."""

    def share_from(self, graph: Graph) -> None:
        """Do nothing: graphs that hold the same modules share their parameters."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "_modules" not in self.__dict__:
            raise GraphError(f"{type(self).__name__}.__init__ must call super().__init__()")
        if isinstance(world(), DryWorld):
            raise GraphError(
                f"{self.name} is called in the build() of another graph: call the modules that it "
                f"holds"
            )
        if not self._built:
            agree(self.name, Text(settings(self, ())))  # before any code acts on them
        self._attach()
        args, kwargs = self._move_to_stages(args, kwargs)
        compared = self._check_inputs(args, kwargs)
        cutting = MicrobatchSplit(args, kwargs, self.config.accumulation if self.training else 1)
        micros = cutting.split()
        built = self._compiled_shape_for(*micros[0], len(micros))
        inputs = object_tensors(kwargs, object_tensors(args, []))
        compare_uses(built.captured.replicated, () if compared else inputs, self.name, built.digest)
        world().history_of_all().record(built.digest)
        self._record(built, inputs)
        if built.staged is not None:
            built.staged.pipeline.trace = self.config.timeline
        with torch.set_grad_enabled(self.training):
            outs = (
                self._step(built, micros)
                if self.training
                else built.run(list(map(_inputs, micros)), 1.0, False)
            )
        return cutting.join(outs)

    def _record(self, built: CompiledShape, inputs: Sequence[torch.Tensor]) -> None:
        """Add the call to the histories of the placements of its global tensors.

        The serials of inputs and captured tensors make ranks diverge that pass other tensors."""
        this_world = world()
        if not this_world.compares:
            return
        serials: defaultdict[Placement, list[int]] = defaultdict(list)
        for t in (*inputs, *built.captured.global_states):
            if isinstance(t, GlobalTensor):
                serials[t._spec.shown.placement].append(t._serial)
        for placement, operands in serials.items():
            this_world.history((placement,)).record(built.digest, *operands)

    def _check_inputs(self, args: Any, kwargs: Any) -> bool:
        """Check that plain inputs of a graph of global tensors are the same on every rank.

        Returns False if no input or parameter is global: then `compare_uses` checks the inputs that
        build() uses with global tensors of its own."""
        inputs = object_tensors(kwargs, object_tensors(args, []))
        this_world = world()
        if this_world.compares and any(
            isinstance(t, GlobalTensor) for t in (*self._module_state().tensors, *inputs)
        ):
            for i, t in enumerate(inputs):
                if not isinstance(t, GlobalTensor):
                    check_replicated(
                        t,
                        tuple(range(this_world.size)),
                        f"input {i} of {self.name}",
                        place=(self.name, i),
                    )
            return True
        return False

    def _step(self, built: CompiledShape, micros: Sequence[Any]) -> list[Any]:
        """Run forward and backward of each micro-batch, then one step of each optimizer."""
        self._clear()
        scale = 1.0 / len(micros)
        if self._scaler is not None:
            scale *= float(self._scaler.scale(torch.ones(())))
            history = world().history_of_all()
            history.record(history.learn(f"gradients of {type(self).__name__} scaled by {scale!r}"))
        with freeing(self._shared[0], self.config.freed, built.searched):
            outs = built.run(list(map(_inputs, micros)), scale, True)
        ran = time.time()
        if built.staged is not None:
            self._grads.complete(self._held.trained())
        for entry in self._optimizers:
            clip(entry.optimizer, self._scaler)
            if self._scaler is None:
                entry.optimizer.step()
            else:
                self._scaler.step(entry.optimizer)
        if built.staged is not None:
            built.staged.pipeline.stepped = (ran, time.time())
        if self._scaler is not None:
            self._scaler.update()
        for entry in self._optimizers:
            for schedule in (
                entry.schedule
                if isinstance(entry.schedule, (list, tuple))
                else [entry.schedule]
                if entry.schedule is not None
                else ()
            ):
                schedule.step()
        self._clear()
        self.__dict__["_steps"] += 1
        return outs

    def _clear(self) -> None:
        self._held.clear([entry.optimizer for entry in self._optimizers])

    def _module_state(self) -> ModuleState:
        """Return the state of the modules as they are now."""
        if self._held is None or not self._held.current(self._modules):
            self.__dict__["_held"] = ModuleState(self._modules)
        return self._held  # type: ignore[no-any-return]

    def _attach(self) -> None:
        """Apply the current settings that are not part of a program, and attach or detach ZeRO."""
        apply_settings(self.config, [entry.optimizer for entry in self._optimizers])
        wanted = self.config.zero if self.training else None
        if wanted == self._shared[0]:
            return
        if self._shared[1] is not None:
            self._shared[1].detach()
        zero = (
            None
            if wanted is None
            else Zero(
                [entry.optimizer for entry in self._optimizers], wanted[0], wanted[1]
            ).attach()
        )
        self.__dict__["_shared"] = (wanted, zero)

    def _move_to_stages(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments on the placements of the stages.

        A global tensor that is on no stage's placement (a batch on all ranks, say) is moved to the
        first stage, with its sbp unchanged. Without stages, the arguments are returned unchanged.
        """
        places = self._stage_placements()
        inputs = object_tensors(kwargs, object_tensors(args, []))
        if not places or not any(
            isinstance(t, GlobalTensor) and t.placement not in places for t in inputs
        ):
            return args, kwargs
        first = places[0]

        def move_to_stage(t: Any) -> Any:
            if not isinstance(t, GlobalTensor) or t.placement in places:
                return t
            return t.to_global(placement=first, sbp=layout_for(first, t.sbp))

        moved_inputs = iter([move_to_stage(t) for t in inputs])
        return replaced_in_objects(args, moved_inputs), replaced_in_objects(kwargs, moved_inputs)

    def _stage_placements(self) -> list[Placement]:
        """Return the placements of the stages that modules are assigned to."""
        key = self._module_state(), *((b.stage_id, b.placement) for b in self._blocks.values())
        known = self.__dict__.get("_placements")
        if known is None or known[0] != key:
            known = self.__dict__["_placements"] = (
                key,
                configured_placements(self._modules, self._blocks),
            )
        return known[1]  # type: ignore[no-any-return]

    # Building

    def _key(self, args: Any, kwargs: Any) -> Any:
        held = (
            self._held if self._held is not None else self._module_state()
        )  # during a call, `_stage_placements` has already refreshed it
        given = _shape_of(args), _shape_of(kwargs)
        return (
            *given,
            held.state(),
            self.config.version,
            self.training,
            attributes(self),
            _autocast_now(),
            RULES.version,
            rebound(self._built.values()),
        )

    def _compiled_shape_for(self, args: Any, kwargs: Any, micros: int) -> CompiledShape:
        key = self._key(args, kwargs)
        try:
            compiled_shape = self._built.get(key)
        except TypeError as error:
            raise GraphError(
                f"{self.name}: the arguments of a graph are tensors and values that can be "
                f"compared (numbers, strings, None): {error}"
            ) from None
        if compiled_shape is None:
            try:
                if self.config.auto is not None and self._plan is None:
                    self.__dict__["_arranged"] = GRAPH_PLANNERS["auto"](
                        self, args, kwargs
                    )  # the planner may change layouts of parameters
                    self._module_state()
                    key = self._key(args, kwargs)
                compiled_shape = self._build(args, kwargs, micros)
                self._built[(*key[:-1], rebound([*self._built.values(), compiled_shape]))] = (
                    compiled_shape
                )
            finally:
                self.__dict__["_arranged"] = None
            while len(self._built) > max(1, self._size):
                self._built.popitem(last=False)
        else:
            self._built.move_to_end(key)
        self.__dict__["_last"] = compiled_shape
        return compiled_shape

    def _build(self, args: Any, kwargs: Any, micros: int) -> CompiledShape:
        texts: list[str] = []

        def capture_once() -> tuple[tuple[CaptureResult, Sequence[Placement]], Text]:
            with torch.set_grad_enabled(self.training):
                captured = self._capture_build(args, kwargs)
                stages = stages_of(self.name, self._modules, self._blocks, captured.logical)
                check_captured(self, captured, micros, len(stages))
                text = Text(
                    settings(self, stages),
                    printing.lines(captured.logical),
                    seed_of(captured.program),
                )
                texts[:] = [*text.settings, *text.ops]
                return (captured, stages), text

        captured, stages = agreed(self.name, capture_once, f"{self.name} was captured")
        built = agreed(
            self.name, lambda: (self._programs(captured, stages, args, kwargs, micros), None)
        )
        built.searched = None if self._arranged is None else self._arranged.searched
        built.digest = digest_of("\n".join(texts))
        self.__dict__["_last"] = built
        self._debug.log(self, captured, built.module)
        return built

    def _programs(
        self,
        captured: CaptureResult,
        stages: Sequence[Placement],
        args: Any,
        kwargs: Any,
        micros: int,
    ) -> CompiledShape:
        """Return this rank's programs. Collective."""
        outside = [*captured.global_states, *self._module_state().tensors]
        owners = {id(local_of(p)): p for p in outside}
        states = [reader(owners.get(id(t), t)) for t in captured.states]
        if self.config.memory is not None:
            passes.choose_recompute(captured.program, captured.constants, self.config.memory)
        if len(stages) > 1:
            inputs = object_tensors(kwargs, object_tensors(args, []))
            how = self.config.schedule, self.config.buffers, self.name, self.config.backend
            built = CompiledShape(
                captured, None, PipelinedGraph(captured, stages, inputs, states, micros, *how)
            )
        else:
            captured.program = passes.agreed({0: captured.program})[0]
            lower(captured.program, captured.constants, self.config.backend)
            built = CompiledShape(
                captured,
                Program(captured.program, captured.constants, states, captured.inputs, self.name),
                None,
            )
        return built

    def _capture_build(
        self, args: Any, kwargs: Any, around: Callable[[Any], Any] = lambda hooks: hooks
    ) -> CaptureResult:
        """Capture build() and return the result.

        ``around`` wraps the context in which modules report when they run. build() runs in the
        context that ``around`` returns."""
        self.__dict__["_captures"] += 1
        named = {
            f"{name}.{path}": t
            for name, m in self._modules.items()
            for path, t in itertools.chain(m.named_parameters(), m.named_buffers())
        }
        kinds = {
            p.placement.type if isinstance(p, GlobalTensor) else p.device.type
            for p in self._module_state().tensors
        } or {"cpu"}

        def build(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                if self.config.amp is not None:
                    for kind in kinds:
                        stack.enter_context(torch.autocast(kind, dtype=self.config.amp))
                return self.build(*args, **kwargs)

        hooks: Callable[..., Any] = functools.partial(
            watched, self._modules, self._blocks, own=self.__dict__, build=self.build
        )
        applied = self._arranged or (None if self._plan is None else PlanFollower(self._plan))
        return capture(
            build,
            args,
            kwargs,
            named,
            around(hooks if applied is None else functools.partial(following_plan, applied, hooks)),
        )

    # Inspection

    def program(self) -> fx.GraphModule:
        """Return this rank's program for the inputs last seen; ``print`` shows it as Python code.

        Raises GraphError before the first call."""
        if self._last is None:
            raise GraphError(f"{self.name} has no program yet: it is built at the first call")
        return self._last.module  # type: ignore[no-any-return]

    def logical(self) -> fx.Graph:
        """Return the captured graph of the inputs last seen.

        Its nodes are torch functions on tensors of global shape, the same on every rank. Raises
        GraphError before the first call."""
        if self._last is None:
            raise GraphError(
                f"{self.name} has not been captured yet: that happens at the first call"
            )
        return self._last.captured.logical  # type: ignore[no-any-return]

    def plan(self) -> ShardingPlan:
        """Return each op's operand layouts and boxings in the captured graph.

        The plan can be printed, compared, saved and edited. Raises GraphError before the first
        call."""
        return plan_of(self.logical())

    def use_plan(self, plan: ShardingPlan | str | None) -> None:
        """Follow a plan from the next call on.

        Operands are boxed to the plan's layouts before each op runs. ``plan`` is a plan, the path
        of a saved plan, or None to follow none. All ranks must pass the same plan. The next call
        raises GraphError if an op cannot accept an operand in the planned layout, and names the op.
        It also raises GraphError if the plan belongs to another graph."""
        self.__dict__["_plan"] = (
            ShardingPlan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
        )
        self.config.version += 1

    def auto_plan(self) -> Any:
        """Return the plan that the search has found for the inputs last seen (`flow.auto.Plan`).

        The plan holds its price, its proof, its memory and its reasons. Raises GraphError before
        the first call, and if these inputs were seen without config.enable_auto_parallel() or
        followed a plan of `use_plan`."""
        if self._last is None or self._last.searched is None:
            raise GraphError(
                f"{self.name} has no automatic plan of the inputs last seen: call "
                "config.enable_auto_parallel() before the call, and do not call use_plan()"
            )
        return self._last.searched

    def single_device_module(self) -> fx.GraphModule:
        """Return the captured graph of the inputs last seen as a module of plain tensors.

        The module holds copies of the parameters as they are now. It serves inspection, tests and
        export. It accepts the full tensors of the inputs in order, and returns the tensors that
        build() returned, in order. A ``backward`` through it fills ``.grad`` of its parameters.
        Collective. Raises GraphError before the first call, and if build() uses values of a single
        rank (``to_local``)."""
        if self._last is None:
            raise GraphError(
                f"{self.name} has not been captured yet: that happens at the first call"
            )
        return self._last.captured.alone()  # type: ignore[no-any-return]

    def timeline(self, path: str | os.PathLike[str] | None = None) -> Timeline:
        """Return when each rank ran what in the last run of a pipeline, optimizer steps included.

        Call ``config.enable_timeline()`` before that run. With ``path``, rank 0 writes a Chrome
        trace there, which also holds the simulator's prediction from the actions' costs in that
        run. Clocks of several hosts may differ. Collective. Raises GraphError before such a run,
        and for a graph of one stage."""
        staged = None if self._last is None else self._last.staged
        if staged is None or not self.config.timeline:
            raise GraphError(
                f"{self.name} has no timeline: a timeline needs a pipeline of several stages, and "
                "config.enable_timeline() before the call"
            )
        return measured(staged.pipeline, path)

    def __repr__(self) -> str:
        return printing.describe(self)


def _autocast_now() -> tuple[Any, ...]:
    return tuple(
        [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
    )


def _shape_of(value: Any) -> Any:
    """Return the properties of a pytree of inputs that a program depends on.

    For each tensor these are its spec, or its shape, dtype and device, its `requires_grad`, and the
    memory order that it notes."""
    return skeleton(
        value,
        lambda t: (
            (t._spec, t.requires_grad, noted_order(t))
            if isinstance(t, GlobalTensor)
            else ((tuple(t.shape), t.dtype, t.device), t.requires_grad)
        ),
    )


def _inputs(micro: tuple[Any, Any]) -> list[torch.Tensor]:
    args, kwargs = micro
    return list(map(local_of, object_tensors(kwargs, object_tensors(args, []))))


def _fill_outputs(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return build()'s result, filled with this run's tensors."""
    outs: list[torch.Tensor] = []
    this_world = world()
    for i, result in enumerate(object_tensors(structure, [], Result)):
        out: torch.Tensor = next(tensors).detach()
        if result.spec is not None:
            history = this_world.history((result.spec.shown.placement,))
            out = GlobalTensor.wrap(out, result.spec)
            out._serial = hash((history.serial, i))
            if result.note is not None:
                note_strides(out, result.note)
        outs.append(out)
    return replaced_in_objects(structure, iter(outs), Result)


LEFT_ALONE.append(Graph)
