"""The oracle of rules. A rule is right if slicing the operands, running each rank and assembling
the results gives plain torch's results, for every signature that the rule admits.

The oracle uses only the algebra: no dispatcher, no processes, no boxing. Ranks that exchange halos
and the like do so as threads. `distribute` and `assemble` define in a few lines the meaning of a
layout. `check` walks the signatures.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from globaltensor._ops.rules.notation import Arg, LocalContext, OpDescription, Signature
from globaltensor._ops.rules.registry import RULES
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import noted
from globaltensor.sbp import Sbp, broadcast, partial_max, partial_sum
from globaltensor.sbp import split as split_sbp
from globaltensor.sharding.balanced_split import balanced_split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

from .device import DEVICE

Locals = dict[int, torch.Tensor]
Parts = dict[int, list[torch.Tensor]]
GRIDS = ((2,), (3,), (2, 2))


def summands(
    value: torch.Tensor, parts: int, reduce: str, gen: torch.Generator
) -> list[torch.Tensor]:
    """Return different tensors that reduce to ``value``."""
    if value.dtype == torch.bool or not value.numel():
        return [value if i == parts - 1 else torch.zeros_like(value) for i in range(parts)]
    noise = [
        torch.randint(-4, 5, value.shape, generator=gen).to(value.device, value.dtype)
        for _ in range(parts - 1)
    ]
    if reduce == "sum":
        return [*noise, value - sum(noise)] if noise else [value]
    sign = {"max": -1, "min": 1}[reduce]
    return [*[value + sign * n.abs() for n in noise], value]


def reduced(parts: Sequence[torch.Tensor], reduce: str) -> torch.Tensor:
    """Return the value that partial tensors represent."""
    if reduce == "max" or (reduce == "sum" and parts[0].dtype == torch.bool):
        return torch.stack(list(parts)).amax(0)
    if reduce == "min":
        return torch.stack(list(parts)).amin(0)
    if reduce.startswith("norm"):
        return torch.stack(list(parts)).norm(float(reduce[4:]), 0)
    return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)


def distribute(value: torch.Tensor, spec: Spec, gen: torch.Generator) -> Locals:
    """Split a global value into the local tensor of every rank."""
    found: Locals = {}

    def go(part: torch.Tensor, axis: int, where: tuple[int, ...]) -> None:
        if axis == spec.placement.axes:
            found[int(spec.placement.ranks[where])] = part.clone()
            return
        entry, n = spec.layout[axis], spec.placement.shape[axis]
        if entry.is_split:
            parts = [
                part.narrow(entry.dim, a, length)
                for a, length in balanced_split(part.shape[entry.dim], n, entry.unit)
            ]
        else:
            parts = [part] * n if entry.is_broadcast else summands(part, n, entry.reduce, gen)
        for i, p in enumerate(parts):
            go(p, axis + 1, (*where, i))

    go(value.to(DEVICE), 0, ())
    return found


def assemble(
    locals_: Locals, spec: Spec, what: str = "result", like: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Assemble the local tensors of all ranks into the global value. Fails if broadcast ranks
    differ or a local shape is not the spec's."""
    for rank, t in locals_.items():
        assert tuple(t.shape) == spec.local_shape(rank), (
            f"{what} on rank {rank} has shape {tuple(t.shape)}, its spec {spec} says "
            f"{spec.local_shape(rank)}"
        )

    def go(axis: int, where: tuple[int, ...]) -> torch.Tensor:
        if axis == spec.placement.axes:
            return locals_[int(spec.placement.ranks[where])]
        entry = spec.layout[axis]
        parts = [go(axis + 1, (*where, i)) for i in range(spec.placement.shape[axis])]
        if entry.is_split:
            return torch.cat(parts, entry.dim)
        if entry.is_broadcast:
            for p in parts[1:]:
                close(p, parts[0], f"{what} is broadcast on axis {axis}, but ranks differ", like)
            return parts[0]
        return reduced(parts, entry.reduce)

    return go(0, ())


def close(
    got: torch.Tensor, want: torch.Tensor, what: str, like: Sequence[torch.Tensor] = ()
) -> None:
    """Check that two tensors are equal up to rounding in the coarsest dtype among the tensors and
    ``like``."""
    near = (
        1e-5
        if any(
            t.dtype in (torch.float32, torch.complex64, torch.float16, torch.bfloat16)
            for t in (want, *like)
        )
        else 1e-9
    )
    torch.testing.assert_close(
        got, want, rtol=near, atol=near, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a pytree of tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    nest = (
        value
        if isinstance(value, (tuple, list))
        else value.values()
        if isinstance(value, dict)
        else ()
    )
    return [t for v in nest for t in tensors_in(v)]


def swapped(value: Any, these: Iterator[Any]) -> Any:
    """Return the same pytree with its tensors replaced by ``these``, in order."""
    if isinstance(value, torch.Tensor):
        return next(these)
    if isinstance(value, dict):
        return {k: swapped(v, these) for k, v in value.items()}
    return (
        type(value)([swapped(v, these) for v in value]) if type(value) in (tuple, list) else value
    )


def described(func: Any, specs: Sequence[Spec], args: Any, kwargs: Any) -> OpDescription:
    """Describe a call with these specs by the rule of ``func``."""
    op = OpDescription([Arg(i, s) for i, s in enumerate(specs)])
    these = iter(op.args)
    RULES[func].describe(op, *swapped(args, these), **swapped(kwargs, these))
    return op


def _candidates(tensor: torch.Tensor) -> list[Sbp]:
    entries = [
        broadcast,
        *[split_sbp(d) for d in range(tensor.ndim)],
        *[split_sbp(d).with_unit(2) for d in range(tensor.ndim)],
        partial_max,
    ]
    return entries if tensor.dtype == torch.bool else [*entries, partial_sum]


def menus(
    func: Any, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any, placement: Placement
) -> list[dict[tuple[Sbp, ...], None]]:
    """Return, for each axis, the operand entries of every signature that some layout of the
    operands produces."""
    menu: list[dict[tuple[Sbp, ...], None]] = [{} for _ in placement.shape]
    for i, t in enumerate(tensors):
        for entry in _candidates(t):
            one = [
                entry
                if k == i or (entry.is_partial and (u.is_floating_point() or i == k))
                else broadcast
                for k, u in enumerate(tensors)
            ]
            specs = [
                Spec.make(u.shape, u.dtype, placement, [e] * placement.axes)
                for u, e in zip(tensors, one, strict=True)
            ]
            op = described(func, specs, args, kwargs)
            if op.composite is None:
                if not op.out:
                    op.out = [()]
                for axis in range(placement.axes):
                    menu[axis].update(dict.fromkeys(s.ins for s in op.signatures(axis)))
    return menu


def _exact(
    op: OpDescription, specs: Sequence[Spec], outs: Sequence[torch.Tensor]
) -> tuple[list[Spec], dict[Any, tuple[int, ...]]] | None:
    """Return the result specs if the operands fit a signature on every axis, as the dispatcher
    would choose it."""
    placement = specs[0].placement
    chosen: list[Signature] = []
    for axis in range(placement.axes):
        for s in op.signatures(axis):
            if all(
                spec.replace(layout=[e if a == axis else x for a, x in enumerate(spec.layout)])
                is spec
                for e, spec in zip(s.ins, specs, strict=True)
            ):
                chosen.append(s)
                break
        else:
            return None
    factors: dict[Any, tuple[int, ...]] = {}
    for axis, s in enumerate(chosen):
        if s.factor is not None:
            factors[s.factor] = (*factors.get(s.factor, ()), axis)
    found = []
    for i, o in enumerate(outs):
        layout = [s.outs[min(i, len(s.outs) - 1)] for s in chosen]
        found.append(Spec.make(o.shape, o.dtype, placement, layout))
    ins = [spec.replace(layout=[s.ins[i] for s in chosen]) for i, spec in enumerate(specs)]
    return (found, factors) if all(a is b for a, b in zip(ins, specs, strict=True)) else None


def check(
    func: Any,
    *args: Any,
    grids: Sequence[Sequence[int]] = GRIDS,
    most: int = 60,
    inplace: bool = False,
    **kwargs: Any,
) -> set[str]:
    """Check every signature of one call, forward and gradient, and return the signatures met, as
    text. At most ``most`` of them are sampled on grids.

    ``inplace``: operand 0 is written, and its new value is the result.
    """
    met: set[str] = set()
    tensors = tensors_in([args, kwargs])
    choose = random.Random(0)
    for grid in grids:
        placement = Placement("cpu", torch.arange(math.prod(grid)).reshape(tuple(grid)).tolist())
        combos = list(itertools.product(*menus(func, tensors, args, kwargs, placement)))
        for combo in combos if len(combos) <= most else choose.sample(combos, most):
            specs = [
                Spec.make(t.shape, t.dtype, placement, [entries[i] for entries in combo])
                for i, t in enumerate(tensors)
            ]
            text = _check_one(func, specs, tensors, args, kwargs, inplace)
            if text:
                met.add(text)
    return met


def _check_one(
    func: Any, specs: list[Spec], tensors: list[torch.Tensor], args: Any, kwargs: Any, inplace: bool
) -> str:
    op = described(func, specs, args, kwargs)
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    want = _run(func, leaves, args, kwargs, inplace)
    if op.composite is not None:
        return ""
    if not op.out:
        op.out = [(None,) * o.ndim for o in want]
    found = _exact(op, specs, want)
    if found is None:
        return ""
    outs, factors = found
    text = (
        f"{getattr(func, '__name__', func)}: {', '.join(map(repr, specs))} -> "
        f"{', '.join(map(repr, outs))}"
    )
    try:
        _compare(func, op, specs, outs, factors, leaves, want, args, kwargs, inplace)
    except Exception as error:
        noted(error, f"in {text} on {specs[0].placement}")
        raise
    return (
        f"{' '.join(','.join(e.short for e in s.layout) for s in specs)} -> "
        f"{' '.join(','.join(e.short for e in s.layout) for s in outs)}"
    )


def _on_ranks(placement: Placement, together: bool, step: Callable[[int], None]) -> None:
    """Run ``step`` for each rank: on simulated ranks if they communicate, otherwise one after the
    other."""
    if together:
        simulate(placement.size, lambda: step(world().rank), timeout=20.0)
    else:
        for rank in placement.flat:
            step(rank)


def _run(
    func: Callable[..., Any], leaves: Sequence[torch.Tensor], args: Any, kwargs: Any, inplace: bool
) -> list[torch.Tensor]:
    ins = [t * 1 if t.requires_grad else t.clone() for t in leaves] if inplace else list(leaves)
    these = iter(ins)
    out = func(*swapped(args, these), **swapped(kwargs, these))
    return [ins[0]] if inplace else tensors_in(out)


def _compare(
    func: Any,
    op: OpDescription,
    specs: list[Spec],
    outs: list[Spec],
    factors: dict[Any, tuple[int, ...]],
    leaves: list[torch.Tensor],
    want: list[torch.Tensor],
    args: Any,
    kwargs: Any,
    inplace: bool,
) -> None:
    gen = torch.Generator().manual_seed(1)
    placement = specs[0].placement
    parts = [distribute(t.detach(), s, gen) for t, s in zip(leaves, specs, strict=True)]
    inputs: Parts = {}
    results: Parts = {}

    def forward(rank: int) -> None:
        function = (
            op.local(LocalContext(rank, tuple(specs), tuple(outs), factors, op))
            if op.local is not None
            else None
        ) or func
        inputs[rank] = [p[rank].requires_grad_(p[rank].is_floating_point()) for p in parts]
        results[rank] = _run(function, inputs[rank], args, kwargs, inplace)
        assert len(results[rank]) == len(want)

    together = bool(op.exchanges & factors.keys())
    _on_ranks(placement, together, forward)
    for i, w in enumerate(want):
        assert all(results[r][i].dtype == w.dtype for r in results), (
            f"result {i} has dtype {results[placement.flat[0]][i].dtype}, not {w.dtype}"
        )
        close(
            assemble({r: results[r][i].detach() for r in results}, outs[i], f"result {i}"),
            w.detach(),
            f"result {i}",
        )
    kinds = {e.reduce for s in (*specs, *outs) for e in s.layout if e.is_partial}
    smooth = [i for i, w in enumerate(want) if w.requires_grad]
    if kinds - {"sum"} or not smooth:
        return
    wanted = [i for i, t in enumerate(leaves) if t.requires_grad]
    cotangents = [torch.randn(want[i].shape, dtype=want[i].dtype, generator=gen) for i in smooth]
    truth = torch.autograd.grad(
        [want[i] for i in smooth],
        [leaves[i] for i in wanted],
        cotangents,
        allow_unused=True,
        materialize_grads=True,
    )
    shares = [distribute(c, outs[i].dual(), gen) for i, c in zip(smooth, cotangents, strict=True)]
    grads: dict[int, Any] = {}

    def backward(rank: int) -> None:
        mine = [results[rank][i] for i in smooth]
        # A rank whose result does not depend on its operands would not join the collectives of the
        # backward pass.
        assert all(m.requires_grad for m in mine), f"result on rank {rank} is cut off from autograd"
        grads[rank] = torch.autograd.grad(
            mine, [inputs[rank][i] for i in wanted], [s[rank] for s in shares], allow_unused=True
        )
        for i, g, t in zip(wanted, grads[rank], truth, strict=True):
            assert g is not None or not t.any(), (
                f"operand {i} is cut off from autograd on rank {rank}"
            )

    _on_ranks(placement, together, backward)
    for k, i in enumerate(wanted):
        if all(g[k] is None for g in grads.values()):
            continue
        filled = {
            r: torch.zeros(specs[i].local_shape(r), dtype=leaves[i].dtype) if g[k] is None else g[k]
            for r, g in grads.items()
        }
        close(
            assemble(filled, specs[i].dual(), f"gradient of operand {i}", want),
            truth[k],
            f"gradient of operand {i}",
            want,
        )


def spelled(value: Any) -> str:
    """Return a test parameter's text for the test's name. Functions get no address, which differs
    between processes."""
    if isinstance(value, partial):
        return f"{spelled(value.func)}({', '.join([*map(str, value.args), *(f'{k}={v}' for k, v in value.keywords.items())])})"  # noqa: E501
    return getattr(value, "__name__", None) or str(value)
