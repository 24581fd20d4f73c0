"""Rules of losses; `rules` imports them.

A mean over a split dim is the local sum over the global count. A cross-entropy over a split
vocabulary never gathers it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..._base.python_bodies import python_body
from ..._base.torch_private import function_mode_on, is_fake
from ..._tensor.global_tensor import GlobalTensor
from .deferred_mean import DeferredMean, PendingCount
from .helpers import check_range, register, skip_when_empty, split_in
from .notation import Arg, Dims, LocalContext, OpDescription, Range, align
from .partial_extrema import extremum, reduce_partials
from .registry import DATA_FREE_VARIANTS, composite, rule

__all__ = ["pick", "weight_of_kept"]


def _argument_reader(function: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that reads a call's arguments by name.

    The function turns the old ``size_average`` and ``reduce`` into ``reduction``.
    """
    signature = inspect.signature(function)
    names = tuple(signature.parameters)
    usual = {
        name: p.default for name, p in signature.parameters.items() if p.default is not p.empty
    }

    def read(*args: Any, **kwargs: Any) -> dict[str, Any]:
        call = {**usual, **dict(zip(names, args, strict=False)), **kwargs}
        if (
            len(call) != len(names)
            or len(args) > len(names)
            or not kwargs.keys().isdisjoint(names[: len(args)])
        ):
            # bind() raises the error; it is not used for every call, as it takes ten times as long
            signature.bind(*args, **kwargs)
        average, reduce = call.pop("size_average", None), call.pop("reduce", None)
        if average is not None or reduce is not None:
            call["reduction"] = "none" if reduce is False else "sum" if average is False else "mean"
        return call

    return read


def _reduce(
    op: OpDescription,
    function: Any,
    each: Dims,
    shape: Sequence[int],
    call: dict[str, Any],
    read: Callable[..., dict[str, Any]],
    plain: bool = False,
) -> None:
    """Describe the reduction that a loss asks for.

    ``each`` names the dims of the losses themselves (``reduction="none"``). ``plain``: the call has
    tensor arguments only.
    """
    kind = call["reduction"]
    if kind == "none":
        op.out = [each]
        return
    op.out = [()]
    op.reduce = {f: "sum" for f in each if f is not None}
    if kind == "sum":
        return
    count = (shape[0] if shape else 1) if kind == "batchmean" else math.prod(shape)

    def local(split: LocalContext) -> Callable[..., Any]:
        if not any(split.is_split(f) for f in op.reduce):
            return function  # type: ignore[no-any-return]
        narrow = split.outs[0].dtype in (torch.float16, torch.bfloat16)

        def run(*args: Any, **kwargs: Any) -> Tensor:
            call = read(*args, **kwargs)
            if narrow:  # a sum may be too large for the dtype
                here = function(**{**call, "reduction": "none"})
                return (here.sum(dtype=torch.float32) / count).to(here.dtype)
            return function(**{**call, "reduction": "sum"}) / count  # type: ignore[no-any-return]

        return (
            run if narrow or not plain else lambda *args: function(*args, reduction="sum") / count
        )

    op.local = local


def _declare_elementwise(function: Any) -> None:
    read = _argument_reader(function)

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        call = read(*args, **kwargs)
        plain = len(args) == len(op.args) and not kwargs
        op.dims, each = align([a.shape for a in op.args])
        shape = torch.broadcast_shapes(*[a.shape for a in op.args])
        if call["reduction"] == "batchmean":
            shape = torch.Size(call["input"].shape)
        _reduce(op, function, each, shape, call, read, plain)

    register(function, describe)


for _f in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss,
    F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
):  # fmt: skip
    _declare_elementwise(_f)

# The mean of weighted squares or distances is their sum over the sum of the weights, not over their
# count.
for _f in (F.mse_loss, F.l1_loss):
    _read = _argument_reader(_f)
    composite(
        _f.__name__,
        lambda *args, read=_read, **kwargs: (
            (call := read(*args, **kwargs))["reduction"] == "mean"
            and call.get("weight") is not None
        ),
    )(python_body(_f))


def variance(var: Tensor) -> Tensor:
    """Return a copy of ``var``. Raises ValueError if an element is negative."""
    if has_torch_function((var,)):
        return handle_torch_function(variance, (var,), var)  # type: ignore[no-any-return]
    if not is_fake(var) and not var.is_meta and bool((var < 0).any()):
        raise ValueError("var has negative entry/entries")
    return var.clone()


@rule([variance])
def _variance(op: OpDescription, var: Arg) -> None:
    op.set(var, tuple(range(var.ndim)))
    op.out = [op.dims[0]]


def _gaussian_of_program(
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    var = variance(var) if isinstance(var, Tensor) else var * torch.ones_like(input)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    if var.ndim != input.ndim or sum(
        m for n, m in zip(input.shape, var.shape, strict=True) if n != m
    ) != (var.shape != input.shape):
        raise ValueError("var is of incorrect size")
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (
        var.log() + (input - target) ** 2 / var + (math.log(2 * math.pi) if full else 0.0)
    )
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@rule([F.gaussian_nll_loss])
def _gaussian(op: OpDescription, *args: Any, **kwargs: Any) -> None:
    """Describe ``gaussian_nll_loss`` by torch's own body.

    The body checks the variances first. In a program, each rank instead checks its local tensor
    once there are values.
    """
    op.composite = _gaussian_of_program if function_mode_on() else python_body(F.gaussian_nll_loss)


DATA_FREE_VARIANTS[F.gaussian_nll_loss] = _gaussian_of_program


def _declare_per_sample(function: Any, ranks: Sequence[int]) -> None:
    """Declare a loss with one value per sample.

    ``ranks`` are the dims of each operand for one sample. A weight has one dim, its classes. The
    dims in front of them are samples, which broadcast and are parallel.
    """
    read = _argument_reader(function)

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        call = read(*args, **kwargs)
        one = [
            1 if a is call.get("weight") else ranks[min(i, len(ranks) - 1)]
            for i, a in enumerate(op.args)
        ]
        samples = [tuple(a.shape[: max(0, a.ndim - n)]) for a, n in zip(op.args, one, strict=True)]
        names, each = align(samples)
        for a, lead in zip(op.args, names, strict=True):
            op.set(a, (*lead, *[None] * (a.ndim - len(lead))))
        _reduce(op, function, each, torch.broadcast_shapes(*samples), call, read)
        op.local = skip_when_empty(op, function)

    register(function, describe)


_declare_per_sample(F.multi_margin_loss, [1, 0])
_declare_per_sample(F.multilabel_margin_loss, [1])
_declare_per_sample(F.multilabel_soft_margin_loss, [1])


@composite("multilabel_margin_loss", lambda input, target, *args, **kwargs: input.ndim == 1)
def _one_multilabel_margin_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the loss of one sample as that of a batch of one.

    For a single sample torch reports another shape on meta tensors than it returns.
    """
    return F.multilabel_margin_loss(input[None], target[None], *args, **kwargs).reshape(())


_declare_per_sample(F.cosine_embedding_loss, [1, 1, 0])
_declare_per_sample(F.triplet_margin_loss, [1])


# ------------------------------------------------------------------------------------------ classes


def pick(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return ``x[..., index, ...]`` at ``dim``, one element for each of ``index``.

    ``x`` has the dims of ``index`` and ``dim``. Or ``x`` is one row for all, and ``dim`` is 0.
    """
    if has_torch_function((x, index)):
        return handle_torch_function(pick, (x, index), x, index, dim)
    return _pick_local(x, index, dim, 0)


def _pick_local(x: Tensor, index: Tensor, dim: int, offset: int) -> Tensor:
    """Pick elements as `pick` does, from the classes that start at ``offset``.

    Return zero where the index is not among these classes.
    """
    local_index = index - offset
    inside = (local_index >= 0) & (local_index < x.shape[dim])
    if not x.shape[dim]:
        return (x.sum(dim) if x.ndim > index.ndim else x.sum().expand(index.shape)) * 0
    local_index = torch.where(inside, local_index, 0)
    values = (
        x[local_index]
        if x.ndim == 1 and index.ndim != 0
        else x.gather(dim, local_index.unsqueeze(dim)).squeeze(dim)
    )
    return torch.where(inside, values, 0.0)


@rule(pick)
def _pick(op: OpDescription, x: Arg, index: Arg, dim: int) -> None:
    names = tuple(range(index.ndim))
    op.set(index, names)
    op.set(x, (*names[:dim], "class", *names[dim:]) if x.ndim == index.ndim + 1 else ("class",))
    op.out, op.reduce = [names], {"class": "sum"}
    op.linear = [frozenset([x.index])]
    classes = x.shape[dim] if x.ndim > 1 else x.shape[0]

    def local(split: LocalContext) -> Callable[..., Tensor]:
        offset = split.box("class")[0]

        def run(x: Tensor, index: Tensor, dim: int) -> Tensor:
            # Check the targets as torch does on the cpu. On an accelerator the check would wait for
            # the device. A recorder must see this data dependence, so that it records the call as
            # one step. Otherwise fake tensors have no numbers, and nothing is checked.
            seen = (
                index.device.type == "cpu"
                and index.numel()
                and (function_mode_on() or not is_fake(index))
            )
            if seen and not 0 <= int(index.min()) <= int(index.max()) < classes:
                raise IndexError(
                    f"Target {int(index[(index < 0) | (index >= classes)][0])} is out of bounds."
                )
            return _pick_local(x, index, dim, offset)

        return run

    op.local = local


def _declare_class_loss(function: Any, over_split: Callable[[dict[str, Any]], Tensor]) -> None:
    """Declare ``cross_entropy`` or ``nll_loss``.

    The rule itself does not split the class dim. Where an operand's class dim is split, or a mean
    goes over a split batch, the loss is composed of global ops.
    """
    read = _argument_reader(function)

    def describe(op: OpDescription, *args: Any, **kwargs: Any) -> None:
        call = read(*args, **kwargs)
        x, target, weight = call["input"], call["target"], call["weight"]
        at = 0 if x.ndim == 1 else 1
        names: list[Any] = list(range(x.ndim))
        each = tuple(n for n in names if n != at)
        soft = target.ndim == x.ndim and target.dtype.is_floating_point
        op.set(x, names)
        op.set(target, names if soft else each)
        op.whole = {at}
        if weight is not None:
            # torch's kernels raise this, but those for meta tensors do not
            if tuple(weight.shape) != (x.shape[at],):
                raise RuntimeError(
                    f"weight tensor should be defined either for all {x.shape[at]} classes or no "
                    f"classes, but has shape {list(weight.shape)}"
                )
            op.set(weight, (at,))
        if not soft:
            op.ranges[target.index] = _target_range(x.shape[at], call["ignore_index"])
        if not soft and target.dtype not in (torch.int64, torch.uint8):
            raise RuntimeError(f"expected target dtype to be Long or Byte, but got {target.dtype}")
        # torch's kernels accept bytes, those for meta tensors do not
        if target.dtype == torch.uint8:
            op.composite = lambda *a, **k: function(
                **{**(call := read(*a, **k)), "target": call["target"].long()}
            )
            return
        if split_in(x, [at]) or (soft and split_in(target, [at])):
            op.compose(lambda *a, **k: over_split(read(*a, **k)))
            return
        split = split_in(x, each) or split_in(target, range(target.ndim))
        if call["reduction"] == "mean" and split and not soft:
            op.compose(lambda *a, **k: _mean_of_kept(function, read(*a, **k)))
            return
        if call["reduction"] == "mean" and not soft:
            op.whole = set(names)
            op.out = [()]
            return
        _reduce(op, function, each, [x.shape[d] for d in each], call, read)

    register(function, describe)


def _target_range(n: int, ignored: int) -> Range:
    """Return the range of valid targets."""
    return Range(n, IndexError, "Target {} is out of bounds.", ignored)


def _kept_targets(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return (True where a target counts, the weight of each target)."""
    target, weight = call["target"], call["weight"]
    keep = target != call["ignore_index"]
    if weight is None:
        return keep, keep
    return keep, torch.where(keep, pick(weight.detach(), torch.where(keep, target, 0), 0), 0.0)


def sum_of_kept(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    function: Any,
    ignore_index: int,
    **smoothing: float,
) -> Tensor:
    """Return the sum of the losses of the targets that count."""
    if has_torch_function((x, target)):
        return handle_torch_function(
            sum_of_kept, (x, target), x, target, weight, function, ignore_index, **smoothing
        )
    wide = x.float() if x.dtype == torch.float16 else x  # a sum may be too large for the dtype
    return function(wide, target, weight, ignore_index=ignore_index, reduction="sum", **smoothing)


def weight_of_kept(
    target: Tensor, weight: Tensor | None, ignore_index: int, most: int = 0
) -> Tensor:
    """Return the sum of the weights of the targets that count.

    ``most`` is the number of targets on all ranks. graph/passes/defer_mean.py reads it from a
    program.
    """
    given = (target,) if weight is None else (target, weight)
    if has_torch_function(given):
        return handle_torch_function(weight_of_kept, given, target, weight, ignore_index, most)
    keep = target != ignore_index
    if weight is None:
        return keep.sum()
    kept = torch.where(keep, target, 0)
    try:
        return (weight.detach()[kept] * keep).sum()
    except IndexError:
        check_range(kept, _target_range(weight.shape[0], 0))
        raise


@rule(weight_of_kept)
def _weight_of_kept(op: OpDescription, target: Arg, weight: Arg | None, *args: Any) -> None:
    names = tuple(range(target.ndim))
    op.set(target, names)
    op.out, op.reduce = [()], dict.fromkeys(names, "sum")  # class weights are not split


@rule(sum_of_kept)
def _sum_of_kept(
    op: OpDescription, x: Arg, target: Arg, weight: Arg | None, *args: Any, **kwargs: Any
) -> None:
    at = _class_dim(x)
    names = tuple(range(x.ndim))
    each = tuple(n for n in names if n != at)
    op.set(x, names)
    op.set(target, each)
    if not target.dtype.is_floating_point:
        op.ranges[target.index] = _target_range(
            x.shape[at], kwargs.get("ignore_index", args[1] if len(args) > 1 else -100)
        )
    op.out, op.whole, op.reduce = [()], {at}, dict.fromkeys(each, "sum")


def _mean_of_kept(function: Any, call: dict[str, Any]) -> Tensor:
    """Return the sum of the losses over the weight of the targets that count, on all ranks."""
    x, target, weight = call.pop("input"), call.pop("target"), call.pop("weight")
    del call["reduction"]
    ignore_index = call.pop("ignore_index")
    most, graph = target.numel(), torch.is_grad_enabled() and x.requires_grad
    count = PendingCount(weight_of_kept(target, weight, ignore_index, most), most)
    if weight is not None or x.dtype == torch.float16 or not (graph and count.may_ride()):
        count.start()  # the reduction runs while the losses are computed
    total = sum_of_kept(x, target, weight, function, ignore_index, **call)
    if x.dtype == torch.float16:
        return (total / count()).to(x.dtype)
    if weight is None and isinstance(total, GlobalTensor) and total.requires_grad:
        return DeferredMean.of(total, count)
    return total / count()


def _class_dim(x: Any) -> int:
    return 0 if x.ndim == 1 else 1


def _reduce_losses(call: dict[str, Any], losses: Tensor, weights: Tensor | None) -> Tensor:
    if call["reduction"] == "none":
        return losses
    total = losses.sum()
    if call["reduction"] == "sum":
        return total
    return total / (
        reduce_partials(weights.sum()) if weights is not None else max(1, losses.numel())
    )


def _split_nll(call: dict[str, Any]) -> Tensor:
    x = reduce_partials(call["input"])
    at = _class_dim(x)
    _check_targets(call["target"], x, at)
    keep, weights = _kept_targets(call)
    losses = torch.where(keep, -pick(x, torch.where(keep, call["target"], 0), at), 0.0)
    if call["weight"] is not None:
        losses = losses * weights
    return _reduce_losses(call, losses, weights)


def _check_targets(target: Tensor, x: Tensor, at: int) -> None:
    if tuple(target.shape) != (*x.shape[:at], *x.shape[at + 1 :]):
        raise ValueError(
            f"target has shape {list(target.shape)}, but for an input of shape {list(x.shape)} it "
            f"needs {[*x.shape[:at], *x.shape[at + 1 :]]}"
        )


def _split_cross_entropy(call: dict[str, Any]) -> Tensor:
    logits = call["input"]
    x = reduce_partials(
        logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    )
    at, target, weight, smoothing = (
        _class_dim(x),
        call["target"],
        call["weight"],
        call["label_smoothing"],
    )
    # The losses do not change when every logit of a row is shifted; the largest becomes 0.
    x = x - reduce_partials(extremum(x, (at,), True, True))
    sums = x.exp().sum(at)
    column = (
        weight.reshape([-1 if d == at else 1 for d in range(x.ndim)])
        if weight is not None
        else None
    )
    if target.ndim == x.ndim and target.is_floating_point():
        goal = target * (1 - smoothing) + smoothing / x.shape[at] if smoothing else target
        goal = goal if column is None else goal * column
        return _reduce_losses(
            call, reduce_partials(sums).log() * goal.sum(at) - (x * goal).sum(at), None
        ).to(torch.promote_types(logits.dtype, goal.dtype))
    _check_targets(target, x, at)
    keep, weights = _kept_targets(call)
    target_logits = pick(x, torch.where(keep, target, 0), at)
    sums, target_logits, *spread = reduce_partials(
        torch.stack(
            [
                sums,
                target_logits,
                *([x.sum(at) if column is None else (x * column).sum(at)] if smoothing else []),
            ]
        )
    ).unbind()
    norm = sums.log()
    losses = norm - target_logits if weight is None else (norm - target_logits) * weights
    if smoothing:
        every = (
            norm * (x.shape[at] if weight is None else reduce_partials(weight.sum())) - spread[0]
        )
        losses = losses * (1 - smoothing) + every * (smoothing / x.shape[at])
    return _reduce_losses(call, torch.where(keep, losses, 0.0), weights).to(logits.dtype)


_declare_class_loss(F.cross_entropy, _split_cross_entropy)
_declare_class_loss(F.nll_loss, _split_nll)
