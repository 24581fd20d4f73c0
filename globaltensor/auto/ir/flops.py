"""The work of a call: floating-point operations, and whether it is a view.

`cost/strategies.py` calls `work_of` for a global call and for one rank's local tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..._ops.rules import RULES, Arg, OpDescription
from ...sharding.placement import Placement
from ...sharding.sbp import broadcast
from ...sharding.spec import Spec
from ..cost.rule_failures import RuleFailures, describe
from .op_graph import Call, Value

__all__ = ["Work", "work_of"]

_ONE = Placement("cpu", [0])
_VIEWS = frozenset(
    "view reshape transpose permute t T mT expand squeeze unsqueeze flatten unflatten __getitem__ "
    "split chunk unbind movedim swapaxes detach narrow select "
    "view_as expand_as contiguous to_global global_to_global tensor_split swapdims real".split()
)
_CONVOLUTIONS = frozenset((F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d))


class Work(NamedTuple):
    """The work of a global call.

    `flops` are the floating-point operations of forward. `view` is True if the call only returns
    another view of its operand. `backward` is the ratio of backward's operations to forward's.
    """

    flops: float
    view: bool
    backward: float


def work_of(
    call: Call, values: Sequence[Value] | Mapping[int, Value], losses: RuleFailures | None = None
) -> Work:
    """Return the work of a call by its index notation.

    A contraction has two operations for each combination of its indices. Other calls have 0, and
    are priced by the bytes they read and write. ``losses`` records an error of the call's rule; the
    call then counts as no contraction.
    """
    operands, outs = [values[v] for v in call.operands], [values[v] for v in call.outs]
    name = getattr(call.func, "__name__", "")
    owner = getattr(getattr(call.func, "__self__", None), "__name__", "")
    trained = sum(v.grad for v in operands)
    if name in _VIEWS or owner in _VIEWS:
        return Work(0.0, True, 0.0)
    if call.func is F.scaled_dot_product_attention and len(operands) > 2:
        q, k = operands[0].shape, operands[1].shape
        causal = 0.5 if call.kwargs.get("is_causal") else 1.0
        return Work(4.0 * math.prod(q) * k[-2] * causal, False, 2.5 if trained else 0.0)
    if call.func in _CONVOLUTIONS and len(operands) > 1:
        return Work(
            2.0 * math.prod(outs[0].shape) * math.prod(operands[1].shape[1:]),
            False,
            float(min(trained, 2)),
        )
    flops, factors = _contraction(call, operands, RuleFailures() if losses is None else losses)
    backward = (
        float(sum(v.grad for i, v in enumerate(operands) if i in factors and len(v.shape) > 1))
        if flops
        else 1.5
    )
    return Work(flops, False, backward if trained else 0.0)


def _contraction(
    call: Call, operands: Sequence[Value], losses: RuleFailures
) -> tuple[float, Sequence[int]]:
    """Return (operations, indices of the multiplied operands) of an op that sums products.

    A product of two operands has two operations for each combination of its indices. More operands
    are multiplied from left to right, as in torch. Other ops have 0 operations.
    """
    rule = RULES.get(call.func)
    if rule is None or len(operands) < 2:
        return 0.0, ()
    specs = [Spec.make(v.shape, v.dtype, _ONE, broadcast) for v in operands]
    op = OpDescription([Arg(i, s) for i, s in enumerate(specs)], function=call.func)
    try:
        if not describe(rule, op, call.args, call.kwargs):
            return 0.0, ()
        sizes = {
            f: n
            for spec, dims in zip(specs, op.dims, strict=True)
            for n, f in zip(spec.shape, dims, strict=True)
            if f is not None
        }
    except Exception as error:
        losses.note(call.func, error, 0)
        return 0.0, ()
    factors = [i for i in range(len(operands)) if i not in op.addends]
    terms = [set(op.dims[i]) - {None} for i in factors]
    if op.composite is not None or not any(
        a & b & set(op.reduce) for a, b in itertools.combinations(terms, 2)
    ):
        return 0.0, ()
    flops, product = 0.0, terms[0]
    for k, term in enumerate(terms[1:], 2):
        product = product | term
        flops += 2.0 * math.prod(sizes[f] for f in product)
        product = {
            f for f in product if f not in op.reduce or any(f in later for later in terms[k:])
        }
    return flops, factors
