"""``flow.auto.calibrate``: a cluster that knows how long the calls of one model take, on parts of
every shape that a search on a mesh may give a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._base.pytree import object_tensors
from ..._tensor.global_tensor import GlobalTensor
from ...cluster import Cluster
from ...distributed.world import world
from ...sharding.placement import Placement
from ..api import calls_of, cluster_of, mesh_of
from ..cost.measured_ops import Shape, local_call, op_key, parts
from ..cost.reshard_cost import ReshardCosts
from ..cost.strategies import StrategyBuilder, StrategyTable
from ..ir.op_graph import Call, Calls, Value
from ..plan.plan import PlanError
from ..profile import measure_ops
from .steps import COPIES, calibrate_steps

__all__ = ["Measurable", "calibrate", "ops_of"]

_TOGETHER = 1 << 28  # bytes of operands that are there at a time
_TIMES = 16  # how often a call runs at least while it is measured
_LEAST = 4e-3  # seconds that each of these runs takes at least, of both passes
_UNKNOWN = 16 << 30  # bytes that a rank is taken to have where the cluster does not say


class Measurable(NamedTuple):
    """A call on parts of one shape: ``make`` gives the function, its arguments and which are
    parameters, ``grad`` is whether gradients flow. ``seconds``: what the model of the cluster says
    both passes take, ``uses``: how many calls are like it, ``nbytes``: of the operands."""

    key: str
    make: Callable[[], tuple[Callable[..., Any], Sequence[Any], Sequence[torch.Tensor]]]
    grad: bool
    seconds: float
    uses: int
    nbytes: int


def calibrate(
    model_or_graph: Any,
    example_inputs: Any,
    cluster: Cluster | None = None,
    mesh: Placement | Sequence[int] | None = None,
    *,
    seconds: float = 30.0,
    kwargs: Mapping[str, Any] | None = None,
    steps: bool = True,
) -> Cluster:
    """``cluster`` with the measured times of a model's calls, on parts of all shapes that they may
    have on this mesh: what `plan` then counts by.

    All ranks of the world must call it with the same arguments and get the same numbers: all of
    them measure at once, as in a step they would compute at once. It takes about ``seconds``: calls
    that by the model of the cluster matter most are measured first, and those for which there is no
    time are left to it.

    A third of the time goes into whole training steps of a few plans, on copies of the model:
    within a step calls and moves take longer than alone, and the cluster's times are stretched as
    these steps say (auto/calibrate/steps.py). Not for a graph, a model on the meta device or of
    global tensors, one whose copies with their optimizers (40 times its size) take more than half
    of the memory, and a mesh that is not of as many ranks as the world; nor with ``steps=False``.
    Inputs on the meta device are drawn, numbers of classes are 0 then.

    Arguments are as for `flow.auto.plan`; the mesh may be of more ranks than the world. Raises
    GraphError where the model's code depends on values, PlanError where they make no sense.
    """
    if not seconds > 0:
        raise PlanError(f"seconds is a positive number, got {seconds!r}")
    found = cluster_of(cluster)
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    calls, where = calls_of(model_or_graph, args, kwargs, found.device), mesh_of(mesh, found)
    menu = StrategyBuilder(ReshardCosts(found, where), calls.training)
    candidates = {c.number: menu.of(c, calls.values) for c in calls.calls if not c.wild}
    runs = steps and calls.training and _can_run(model_or_graph, where, found.memory or _UNKNOWN)
    own = seconds * 2 / 3 if runs else seconds
    batches = [
        batch
        for batch in map(
            _running, _batches(_affordable(ops_of(calls, where, candidates, found), own))
        )
        if batch
    ]
    whole = sum(map(_takes, (op for batch in batches for op in batch)))
    between = _touched(calls)
    for batch in batches:
        found = measure_ops(
            found,
            [(op.key, op.make, op.grad) for op in batch],
            own * sum(map(_takes, batch)) / whole,
            between,
        )
    return (
        calibrate_steps(model_or_graph, args, dict(kwargs or {}), found, where, seconds - own)
        if runs
        else found
    )


def _can_run(model: Any, mesh: Placement, memory: int) -> bool:
    """Whether there is a model whose steps these ranks can run, each rank with all copies of it in
    half of its memory."""
    if not isinstance(model, torch.nn.Module) or len(mesh.flat) != world().size:
        return False
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.requires_grad for t in tensors) or any(
        t.is_meta or isinstance(t, GlobalTensor) for t in tensors
    ):
        return False
    return COPIES * sum(t.nbytes for t in tensors) <= memory / 2


def _running(ops: Sequence[Measurable]) -> list[Measurable]:
    """Those that every rank can run on numbers that are drawn: not all calls take any (a matrix
    that has to be positive, an index into less)."""
    able = []
    for op in ops:
        try:
            function, args, _ = op.make()
            with torch.set_grad_enabled(op.grad):
                outs = [t for t in object_tensors(function(*args), []) if t.requires_grad]
            torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
            able.append(True)
        except Exception:
            able.append(False)
    everyone = (
        world().comm(tuple(range(world().size))).all_gather_object(able)
        if world().size > 1
        else [able]
    )
    return [op for op, *flags in zip(ops, *everyone, strict=True) if all(flags)]


def _touched(calls: Calls) -> int:
    """About how many bytes a step touches: parameters with their gradients and an optimizer's
    state, and what is computed."""
    parameters = sum(v.nbytes for v in calls.parameters)
    return (4 if calls.training else 1) * parameters + sum(
        v.nbytes for v in calls.values if not v.state
    )


def _made(
    call: Call, operands: Sequence[Value], shapes: Sequence[Shape], device: torch.device
) -> Any:
    """The call on one rank, its arguments, and those of them that are parameters."""
    found = local_call(call, operands, shapes, device)
    assert found is not None, "it has been tried without memory"
    function, args = found
    return (
        function,
        args,
        [t for v, t in zip(operands, args[0], strict=True) if v.state in ("parameter", "buffer")],
    )


def ops_of(
    calls: Calls, mesh: Placement, candidates: Mapping[int, StrategyTable], cluster: Cluster
) -> list[Measurable]:
    """Every call on every shape of parts that its candidates give a rank, each once; those that are
    only views, or cannot be made on parts, are left out."""
    prices, device = ReshardCosts(cluster, mesh), world().device(cluster.device)
    found: dict[str, Measurable | None] = {}
    for number, menu in candidates.items():
        call = calls.calls[number]
        operands = [calls.values[v] for v in call.operands]
        seen = set()
        for k in range(len(menu)):
            taken = float(menu.forward[k] + menu.backward[k])
            shapes = parts(operands, [layouts[k] for layouts in menu.ins], prices)
            key = op_key(call, operands, shapes) if taken else None
            if key is None or key in seen:
                continue
            seen.add(key)
            before = found.get(key)
            if key not in found:
                fits = local_call(call, operands, shapes, torch.device("meta")) is not None
                nbytes = sum(
                    v.dtype.itemsize * torch.Size(s).numel()
                    for v, s in zip(operands, shapes, strict=True)
                )
                grad = calls.training and any(v.grad for v in operands)
                found[key] = (
                    Measurable(
                        key,
                        functools.partial(_made, call, operands, shapes, device),
                        grad,
                        taken,
                        1,
                        nbytes,
                    )
                    if fits
                    else None
                )
            elif before is not None:
                found[key] = before._replace(uses=before.uses + 1)
    return [op for op in found.values() if op is not None]


def _takes(op: Measurable) -> float:
    """Seconds of measuring it."""
    return _TIMES * max(_LEAST, op.seconds)


def _affordable(ops: Sequence[Measurable], seconds: float) -> list[Measurable]:
    """Those that there is time for, what matters most first."""
    left, kept = seconds, []
    for op in sorted(ops, key=lambda op: -op.seconds * op.uses):
        if _takes(op) <= left:
            left -= _takes(op)
            kept.append(op)
    return kept


def _batches(ops: Sequence[Measurable]) -> Iterator[list[Measurable]]:
    """As many at a time as memory is meant to hold."""
    batch: list[Measurable] = []
    for op in ops:
        if batch and sum(o.nbytes for o in batch) + op.nbytes > _TOGETHER:
            yield batch
            batch = []
        batch.append(op)
    if batch:
        yield batch
