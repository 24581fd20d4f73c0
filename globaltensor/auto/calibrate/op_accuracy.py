"""``flow.auto.calibrate``: measure how long the calls of one model take.

Users call it before `flow.auto.plan`. It measures local tensors of every shape that a search on a
mesh may assign to a rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._base.pytree import object_tensors
from ..._tensor.global_tensor import GlobalTensor
from ...cluster import Cluster
from ...distributed.world import world
from ...errors import PlanError
from ...sharding.placement import Placement
from ..api import calls_of, cluster_of, mesh_of
from ..cost.measured_ops import Shape, local_call, op_key, parts
from ..cost.reshard_cost import ReshardCosts
from ..cost.strategies import StrategyBuilder, StrategyTable
from ..ir.op_graph import Call, Calls, Value
from ..profile import measure_ops
from .steps import COPIES, calibrate_steps

__all__ = ["Measurable", "calibrate", "ops_of"]

_MAX_OPERAND_BYTES = 1 << 28  # the maximum bytes of operands that exist at a time
_MIN_RUNS = 16  # the minimum number of runs of a call while it is measured
_MIN_RUN_SECONDS = 4e-3  # the minimum seconds of each of these runs, both passes together
_ASSUMED_MEMORY = 16 << 30  # the assumed bytes of a rank if the cluster has no figure


class Measurable(NamedTuple):
    """A call on local tensors of one shape.

    ``make`` returns the function, its arguments, and the parameters among them. ``grad`` is whether
    gradients flow. ``seconds`` is what the model of the cluster predicts for both passes, ``uses``
    the number of equal calls, and ``nbytes`` the size of the operands.
    """

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
    """Return ``cluster`` with the measured times of a model's calls, which `plan` then uses.

    Calls are measured on local tensors of all shapes that they may have on this mesh. All ranks of
    the world must call it with the same arguments, and get the same numbers. All of them measure at
    once, because in a step they would compute at once. It takes about ``seconds``. The calls that
    matter most by the model of the cluster are measured first. Calls for which there is no time
    keep the model's price.

    A third of the time is spent on whole training steps of a few plans, on copies of the model.
    Calls and moves take longer within a step than alone, so the cluster's times are scaled to fit
    these steps. This part is skipped with ``steps=False``, and for:

    - a graph, a model on the meta device, or a model of global tensors;
    - a model whose copies with their optimizers (40 times its size) take more than half of the
      memory;
    - a mesh whose number of ranks is not the world's.

    Inputs on the meta device are replaced by random numbers, and integers such as class numbers by
    0.

    Arguments are as for `flow.auto.plan`; the mesh may have more ranks than the world. Raises
    GraphError where the model's code depends on values, and PlanError for invalid arguments.
    """
    if not seconds > 0:
        raise PlanError(f"seconds is a positive number, got {seconds!r}")
    cluster = cluster_of(cluster)
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    calls, where = calls_of(model_or_graph, args, kwargs, cluster.device), mesh_of(mesh, cluster)
    menu = StrategyBuilder(ReshardCosts(cluster, where), calls.training)
    candidates = {c.number: menu.of(c, calls.values) for c in calls.calls if not c.wild}
    runs = (
        steps
        and calls.training
        and _can_run(model_or_graph, where, cluster.memory or _ASSUMED_MEMORY)
    )
    own = seconds * 2 / 3 if runs else seconds
    batches = [
        batch
        for batch in map(
            _runnable_ops, _batches(_affordable(ops_of(calls, where, candidates, cluster), own))
        )
        if batch
    ]
    whole = sum(map(_measuring_seconds, (op for batch in batches for op in batch)))
    between = _bytes_per_step(calls)
    for batch in batches:
        cluster = measure_ops(
            cluster,
            [(op.key, op.make, op.grad) for op in batch],
            own * sum(map(_measuring_seconds, batch)) / whole,
            between,
        )
    return (
        calibrate_steps(model_or_graph, args, dict(kwargs or {}), cluster, where, seconds - own)
        if runs
        else cluster
    )


def _can_run(model: Any, mesh: Placement, memory: int) -> bool:
    """Return True if these ranks can run steps of the model.

    All copies of the model must fit into half of a rank's memory.
    """
    if not isinstance(model, torch.nn.Module) or len(mesh.flat) != world().size:
        return False
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.requires_grad for t in tensors) or any(
        t.is_meta or isinstance(t, GlobalTensor) for t in tensors
    ):
        return False
    return COPIES * sum(t.nbytes for t in tensors) <= memory / 2


def _runnable_ops(ops: Sequence[Measurable]) -> list[Measurable]:
    """Select the ops that every rank can run on random numbers.

    Some calls do not accept arbitrary numbers, such as one that needs a positive matrix, or an
    index into a smaller tensor.
    """
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
        world().comm(tuple(range(world().size))).all_gather_object(able, "a calibration of ops")
        if world().size > 1
        else [able]
    )
    return [op for op, *flags in zip(ops, *everyone, strict=True) if all(flags)]


def _bytes_per_step(calls: Calls) -> int:
    """Estimate how many bytes a step touches.

    They are the parameters with their gradients and an optimizer's state, and the computed values.
    """
    parameters = sum(v.nbytes for v in calls.parameters)
    return (4 if calls.training else 1) * parameters + sum(
        v.nbytes for v in calls.values if not v.state
    )


def _make_local_op(
    call: Call, operands: Sequence[Value], shapes: Sequence[Shape], device: torch.device
) -> Any:
    """Return the call on one rank, its arguments, and the parameters among them."""
    found = local_call(call, operands, shapes, device)
    assert found is not None, f"{call.name} does not run on local tensors of {shapes}"
    function, args = found
    return (
        function,
        args,
        [t for v, t in zip(operands, args[0], strict=True) if v.state in ("parameter", "buffer")],
    )


def ops_of(
    calls: Calls, mesh: Placement, candidates: Mapping[int, StrategyTable], cluster: Cluster
) -> list[Measurable]:
    """List every call on every shape of local tensors that its candidates assign to a rank.

    Each call and shape is listed once. Calls that are only views, or that cannot run on local
    tensors, are left out.
    """
    prices, device = ReshardCosts(cluster, mesh), world().device(cluster.device)
    op_of_key: dict[str, Measurable | None] = {}
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
            before = op_of_key.get(key)
            if key not in op_of_key:
                fits = local_call(call, operands, shapes, torch.device("meta")) is not None
                nbytes = sum(
                    v.dtype.itemsize * torch.Size(s).numel()
                    for v, s in zip(operands, shapes, strict=True)
                )
                grad = calls.training and any(v.grad for v in operands)
                op_of_key[key] = (
                    Measurable(
                        key,
                        functools.partial(_make_local_op, call, operands, shapes, device),
                        grad,
                        taken,
                        1,
                        nbytes,
                    )
                    if fits
                    else None
                )
            elif before is not None:
                op_of_key[key] = before._replace(uses=before.uses + 1)
    return [op for op in op_of_key.values() if op is not None]


def _measuring_seconds(op: Measurable) -> float:
    """Return the seconds that measuring an op takes."""
    return _MIN_RUNS * max(_MIN_RUN_SECONDS, op.seconds)


def _affordable(ops: Sequence[Measurable], seconds: float) -> list[Measurable]:
    """Select the ops for which there is time, those that matter most first."""
    left, selected = seconds, []
    for op in sorted(ops, key=lambda op: -op.seconds * op.uses):
        if _measuring_seconds(op) <= left:
            left -= _measuring_seconds(op)
            selected.append(op)
    return selected


def _batches(ops: Sequence[Measurable]) -> Iterator[list[Measurable]]:
    """Split the ops into batches whose operands fit into memory together."""
    batch: list[Measurable] = []
    for op in ops:
        if batch and sum(o.nbytes for o in batch) + op.nbytes > _MAX_OPERAND_BYTES:
            yield batch
            batch = []
        batch.append(op)
    if batch:
        yield batch
