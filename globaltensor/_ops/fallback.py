"""Calls without a rule, on replicated operands, and calls with ``out=`` or plain targets.

_ops/sharding_propagation.py plans them. Results are copied into ``out=`` and into plain targets."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.overridable import SEEN, apply
from .._base.python_bodies import python_body
from .._base.user_code import warn_user
from .._tensor.global_tensor import GlobalTensor
from .._tensor.plain_operands import operand_spec, promote_plain_tensor
from ..distributed.replicated_results import note_replicated
from ..distributed.world import sent, world
from ..errors import FallbackWarning, GlobalTensorError, InplaceError
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec, fitting
from . import call_plan
from .call_plan import (
    CallPlan,
    ConstantPlan,
    DelegatePlan,
    ReturnOperandPlan,
    name_of,
    replaced,
    tensors_in,
)
from .custom_ops import Viewing, Writing
from .replicated_plan import ReplicatedPlan
from .rules import rule as declare_rule
from .rules import spellings_of
from .shape_inference import check_out_dtypes, infer_outputs, operands_among

__all__ = ["check_out", "copy_back", "global_copy", "rule", "write_into_plain"]


_WARNED: set[str] = set()

#: Functions that compute in the dtype of ``out=`` where no dtype is passed.
_COMPUTED_IN_OUT = frozenset(
    (
        "sum",
        "nansum",
        "prod",
        "mean",
        "nanmean",
        "cumsum",
        "cumprod",
        "linspace",
        "logspace",
    )
)
#: Functions that replace elements of their target, and do not read the others.
_OVERWRITING = frozenset(
    (
        "copy_",
        "fill_",
        "zero_",
        "__setitem___",  # the name that `name_of` returns
        "index_copy_",
        "index_fill_",
        "index_put_",
        "put_",
        "masked_fill_",
        "masked_scatter_",
        "scatter_",
    )
)
#: With ``beta=0`` these do not read their target.
_ADDED_TO = frozenset(("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_"))


def plan_without_rule(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallPlan:
    """Return the plan of a call without a rule.

    A Python function of torch runs through its own body. Any other function runs on replicated
    tensors, with one warning."""
    if (
        any(map(call_plan.is_index_scalar, tensors_in(kwargs, tensors_in(args, []))[1:]))
        and infer_outputs(func, specs, args, kwargs)[0] is None
    ):
        return DelegatePlan(lambda *a, **k: call_plan.with_index_scalars(func, a, k))
    name = name_of(func)
    inplace = name.endswith("_") and not name.endswith("__")
    body = python_body(func)
    if body is not None:
        return DelegatePlan(body)
    if inplace and not isinstance(tensors_in(kwargs, tensors_in(args, []))[0], GlobalTensor):
        placement = specs[0].placement
        return DelegatePlan(lambda *a, **k: write_into_plain(func, placement, a, k))
    meta, structure = infer_outputs(func, specs, args, kwargs) if not inplace else (None, None)
    if meta == [] and structure is not None:
        return ConstantPlan(structure)
    same = operands_among(meta or ())
    if same and None not in same:
        return ReturnOperandPlan(same, structure, None)
    warn_without_rule(func)
    if torch_private.is_kernel(func) and torch_private.kernel_views(func):
        return Viewing(name, specs, inplace)
    return ReplicatedPlan(name, specs, inplace)


def plan_on_whole(
    func: Any, specs: Sequence[Spec], written: tuple[tuple[int, ...], tuple[int | None, ...]]
) -> CallPlan:
    """Return the plan for an operator that writes into arguments: every operand is replicated."""
    plan = Writing.on_whole(name_of(func), specs)
    plan.writes, plan.returns = written
    return plan


def warn_without_rule(func: Any) -> None:
    """Warn once that a function has no rule."""
    name = name_of(func)
    if name not in _WARNED:
        _WARNED.add(name)
        # torch.sparse's functions have private names, by which no rule is found: `_sparse_mm`
        public = next((f"torch.sparse.{k}" for k, f in vars(torch.sparse).items() if f is func), "")
        target = public or (f"torch.ops.{func}" if torch_private.is_kernel(func) else repr(name))
        warn_user(
            f"no rule for {public or name}: it runs on full tensors (every input is boxed to "
            f"broadcast). Declare how it splits with "
            f"globaltensor.rule({target}, notation), or run it on local tensors with "
            f"globaltensor.local_map",
            FallbackWarning,
        )


def write_into_plain(
    func: Any, placement: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an in-place op with global operands on a plain tensor, which is the same on all ranks.

    Afterwards the tensor has the full result on every rank."""
    target = args[0]
    name = name_of(func)
    # of `index_put_` and `put_`
    accumulates = kwargs.get("accumulate") or (name.endswith("put_") and len(args) > 3 and args[3])
    if name in _OVERWRITING and not accumulates and not kwargs.get("reduce"):
        return _overwrite_plain(func, placement, args, kwargs)
    read = name not in _ADDED_TO or kwargs.get("beta", 1) != 0
    stand_in = global_copy(target, placement, f"target of {name}", checked=read)
    result = func(stand_in, *args[1:], **kwargs)
    copy_back(target, stand_in)
    return target if result is stand_in else result


def _overwrite_plain(
    func: Any, placement: Placement, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an op that replaces elements of a plain tensor, with the full values of its operands.

    The other elements stay what they are on each rank. They may differ between the ranks: a buffer
    of `torch.empty`, which is filled in parts, holds other numbers on each rank before."""
    target = args[0]
    name = name_of(func)
    operands = tensors_in(kwargs, tensors_in(args[1:], []))
    values: list[torch.Tensor] = []
    for i, t in enumerate(operands, 1):
        if isinstance(t, GlobalTensor):
            values.append(_full_value(t).to(target.device))
            continue
        purpose = f"operand {i} of {name}"
        with torch.no_grad():
            promote_plain_tensor(t, operand_spec(t, placement, purpose), purpose)  # compares ranks
        values.append(t)
    replacements = iter(values)
    positional = replaced(args[1:], replacements)
    func(target, *positional, **replaced(kwargs, replacements))
    note_replicated(target)
    return target


def global_copy(
    plain: torch.Tensor, placement: Placement, purpose: str, checked: bool = True
) -> GlobalTensor:
    """Return a broadcast copy of a plain tensor, as the target of an in-place op in its place.

    Call `copy_back` afterwards."""
    spec = operand_spec(plain, placement, purpose)
    return GlobalTensor.wrap(
        promote_plain_tensor(plain, spec, purpose, checked=checked).clone(), spec
    )


def copy_back(plain: torch.Tensor, written: GlobalTensor) -> None:
    """Copy the full value of a global tensor into a plain tensor on every rank. Collective.

    Ranks outside the placement are included."""
    plain.copy_(_full_value(written))
    note_replicated(plain)


def _full_value(t: GlobalTensor) -> torch.Tensor:
    """Return the full value of a global tensor on every rank, those outside its placement included.

    Collective. The ranks outside have no share of its gradient."""
    placement = t.placement
    whole: Any = t.to_global(sbp=[broadcast] * placement.axes)
    value: torch.Tensor = whole.to_local(grad_sbp=[broadcast] * placement.axes)
    this_world, inside = world(), placement.coordinate(world().rank) is not None
    if this_world.size > len(placement.flat):
        received = value.detach() if inside else value.new_empty(t.shape)
        sent_value = apply(sent, (received, placement.flat[0]), {})
        value = value if inside else sent_value
    return value


def check_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise PyTorch's own error for a call whose ``out=`` does not fit.

    Raises InplaceError if a global ``out`` would have to change its shape, or cannot hold the
    dtype."""
    rest = _without_out(func, kwargs)
    operands, targets = tensors_in(rest, tensors_in(args, [])), tensors_in(kwargs["out"], [])
    where = next(
        t._spec.shown.placement for t in (*operands, *targets) if isinstance(t, GlobalTensor)
    )

    def specs_of(tensors: Sequence[torch.Tensor]) -> list[Spec]:
        return [Spec.make(t.shape, t.dtype, where, [broadcast] * where.axes) for t in tensors]

    results = infer_outputs(func, specs_of(operands), args, rest)[0]
    # the meta device replaces it for inference
    given = {name: a for name, a in kwargs.items() if name != "device"}
    specs = specs_of(tensors_in(given, tensors_in(args, [])))
    if results is None:
        check_out_dtypes(func, specs, args, given)
        return
    for target, result in zip(targets, results, strict=False):
        if isinstance(target, GlobalTensor):
            if target.numel() and target.shape != result.shape:
                raise InplaceError(
                    f"out= has shape {list(target.shape)}, but the result has shape "
                    f"{list(result.shape)}: pass a global tensor of that shape"
                )
            if not torch.can_cast(result.dtype, target.dtype):
                name = name_of(func)
                raise InplaceError(
                    f"out= of {name} has {target.dtype}, but the result has {result.dtype}, which "
                    f"can't be cast to it: pass a tensor of a wider dtype"
                )
    infer_outputs(func, specs, args, given)
    if any(t.dtype != r.dtype for t, r in zip(targets, results, strict=False)):
        check_out_dtypes(func, specs, args, given)


def _without_out(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the same call without ``out=``, which may decide the dtype."""
    rest = {name: a for name, a in kwargs.items() if name != "out"}
    out = kwargs["out"]
    if (
        name_of(func) in _COMPUTED_IN_OUT
        and rest.get("dtype") is None
        and isinstance(out, torch.Tensor)
    ):
        rest["dtype"] = out.dtype
    return rest


def call_with_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a result and copy it into the tensors passed as ``out``.

    Global targets receive it in their layout, plain targets the full value on every rank. Raises
    RuntimeError if a target or result requires grad."""
    targets = tensors_in(kwargs["out"], [])
    if name_of(func) in _COMPUTED_IN_OUT:  # in the dtype of `out`, a result may have no gradient
        _refuse_gradients(func, tensors_in(kwargs, tensors_in(args, [])))
    result = func(*args, **_without_out(func, kwargs))
    values = tensors_in(result, [])
    _refuse_gradients(func, [*values, *targets])
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            _copy_to_out(target, value)
    return replaced(result, iter(targets))


def _refuse_gradients(func: Any, tensors: Sequence[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{name_of(func)}(): functions with out=... arguments don't support automatic "
            f"differentiation, but one of the arguments requires grad."
        )


def _copy_to_out(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a result into a tensor passed as ``out``, resized to the result as in PyTorch."""
    if target.shape != value.shape:
        if target.numel():
            warn_user(
                f"An output with one or more elements was resized since it had shape "
                f"{list(target.shape)}, which does not match the required output shape "
                f"{list(value.shape)}. This behavior is deprecated: pass a tensor of that shape, "
                f"or one of 0 elements",
                UserWarning,
            )
        if isinstance(target, GlobalTensor):
            target.data = target.new_empty(
                value.shape, placement=target.placement, sbp=fitting(target.sbp, value.dim())
            )
        else:
            target.resize_(value.shape)
    if isinstance(target, GlobalTensor) or not isinstance(value, GlobalTensor):
        target.copy_(value)
    else:
        copy_back(target, value)


@functools.wraps(declare_rule)
def rule(*args: Any, **kwargs: Any) -> Any:
    target = kwargs["target"] if "target" in kwargs else args[0]
    for one in target if isinstance(target, (list, tuple)) else [target]:
        check_target(one)
    return declare_rule(*args, **kwargs)


def check_target(target: Any) -> None:
    """Raise GlobalTensorError for a target whose rule would never be found."""
    if isinstance(target, str):
        if not spellings_of(target):
            raise GlobalTensorError(
                f"rule: neither a function of torch nor an operator has the name {target!r}; write "
                f"the name of an operator of your own as 'space::name'"
            )
    elif isinstance(target, type) or (
        isinstance(target, types.FunctionType) and not _checks_overrides(target)
    ):
        raise GlobalTensorError(
            f"rule: {target.__module__}.{target.__qualname__} is written in Python and runs on "
            f"global tensors without a rule: a rule for it would never be "
            "found. Rules are for torch's functions and for operators (torch.library.custom_op); "
            "globaltensor.local_map runs a function of your own on local tensors"
        )


def _checks_overrides(function: Any) -> bool:
    """Return True if a Python function checks its tensors for ``__torch_function__`` overrides."""
    while function is not None:
        if (getattr(function, "__module__", None) or "").startswith("torch") or function in SEEN:
            return True
        if isinstance(function, types.FunctionType) and any(
            "torch_function" in name for name in function.__code__.co_names
        ):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
