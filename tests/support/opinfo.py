"""Torch's own database of ops and sample inputs, run on global tensors: each sample in several layouts, forward, backward, in-place and ``out=``,
on simulated ranks, beside plain torch. What comes out is data (`Outcome`); `tests/opinfo.py` makes the report of it, `test_opinfo.py` a quick gate.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

import globaltensor as flow
from globaltensor import dispatch
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GlobalTensorError
from globaltensor.plans import Boxed, Whole, replaced
from globaltensor.rules import RULES
from globaltensor.sbp import Sbp, broadcast, partial_sum, split

from .everywhere import full
from .oracle import swapped, tensors_in

__all__ = ["OPS", "Outcome", "name_of", "outcomes", "samples_of"]

OPS = [op for op in op_db if torch.float32 in op.dtypes]
#: Two signs that a sample's numbers are drawn, or its memory is not filled: then only shape and dtype can be compared.
_RANDOM = ("dropout", "rand", "normal", "bernoulli", "multinomial", "empty", "rrelu", "fractional", "uniform", "exponential", "geometric", "cauchy")
_DRAWS_IF_ASKED = ("multi_head_attention_forward", "scaled_dot_product_attention")
TIMEOUT = 30.0


@dataclass(frozen=True)
class Outcome:
    """How one call went. ``what``: forward, backward, in-place, out. ``how``: right, wrong, refused (an error of the library's own), error.

    ``ran``: native (some operand stayed split or partial), whole (a rule that wants every operand whole), fallback (no rule), own (no rule needed).
    """

    op: str
    sample: int
    grid: tuple[int, ...]
    layouts: str
    what: str
    how: str
    ran: str
    why: str = ""


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples_of(op: Any, most: int) -> list[Any]:
    """The samples of an op in float64 where it has that, else float32: the first, and others spread over the rest."""
    dtype = torch.float64 if torch.float64 in op.dtypes else torch.float32
    torch.manual_seed(0)
    every = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=bool(op.supports_autograd)), 400))
    step = max(1, -(-len(every) // most))
    return every[::step][:most]


def _layouts(tensors: Sequence[torch.Tensor], axes: int, draws: int, choose: random.Random) -> Iterator[list[list[Sbp]]]:
    """First the batch split, then the last dim, then drawn ones, partial sums among them."""
    for d in (0, -1):
        yield [[split(d % t.ndim) if t.ndim else broadcast] * axes for t in tensors]
    for _ in range(draws):
        found = []
        for t in tensors:
            kinds = [broadcast, *[split(d) for d in range(t.ndim)] * 2, *([partial_sum] if t.is_floating_point() or t.is_complex() else [])]
            found.append([choose.choice(kinds) for _ in range(axes)])
        yield found


def outcomes(op: Any, grids: Sequence[tuple[int, ...]], samples: int, draws: int) -> Iterator[Outcome]:
    """Every outcome of an op, in order."""
    kinds: list[tuple[str, Callable[..., Any]]] = [("forward", op.op)]
    if op.get_inplace() is not None:
        kinds.append(("in-place", op.get_inplace()))
    if op.supports_out:
        kinds.append(("out", op.op))
    for number, sample in enumerate(samples_of(op, samples)):
        ins = [sample.input, *sample.args]
        tensors = tensors_in([ins, sample.kwargs])
        if any(t.layout is not torch.strided for t in tensors):
            continue
        drawn = any(part in op.name for part in _RANDOM) or op.name.endswith(_DRAWS_IF_ASKED)
        for what, function in kinds:
            if what == "in-place" and sample.broadcasts_input:
                continue
            call = _Call(op, function, ins, sample.kwargs, tensors, what, drawn)
            want = call.plain()
            if want is None:
                continue
            for grid in grids:
                choose = random.Random(f"{op.name} {number} {grid}")
                for layouts in _layouts(tensors, len(grid), draws, choose):
                    shown = ", ".join(f"{list(t.shape)} {' '.join(e.short for e in s)}" for t, s in zip(tensors, layouts, strict=True))
                    for part, how, ran, why in call.on(grid, layouts, want):
                        yield Outcome(name_of(op), number, grid, shown, part, how, ran, why)


class _Call:
    """One sample of one op in one of its spellings."""

    def __init__(self, op: Any, function: Any, ins: Any, kwargs: Any, tensors: Any, what: str, drawn: bool) -> None:
        self.op, self.function, self.ins, self.kwargs, self.tensors, self.what, self.drawn = op, function, ins, kwargs, tensors, what, drawn

    def _run(self, tensors: Sequence[torch.Tensor], out: Any = None) -> Any:
        these = iter(tensors)
        ins = swapped(self.ins, these)
        more = {} if out is None else {"out": out}
        return self.function(*ins, **swapped(self.kwargs, these), **more)

    def _leaves(self) -> list[bool]:
        return [self.what == "forward" and t.requires_grad and (t.is_floating_point() or t.is_complex()) for t in self.tensors]

    def plain(self) -> tuple[Any, list[Any]] | None:
        """(result, gradients) of plain torch; None where it refuses the sample itself."""
        tensors = [t.detach().clone().requires_grad_(g) for t, g in zip(self.tensors, self._leaves(), strict=True)]
        try:
            torch.manual_seed(0)
            out = self._blank() if self.what == "out" else None
            result = self._run(tensors, out)
            result = result if out is None else out
            grads = [t.grad for t in tensors] if self._back(result) else []
        except Exception:
            return None
        return result, grads

    def _blank(self) -> Any:
        with torch.no_grad():
            return replaced(shape := self._run([t.detach().clone() for t in self.tensors]), iter([torch.zeros_like(t) for t in tensors_in([shape])]))

    def _back(self, result: Any) -> bool:
        outs = [o for o in tensors_in([result]) if o.requires_grad]
        if self.drawn or not outs or not any(self._leaves()):
            return False
        total: Any = 0
        for i, o in enumerate(outs):
            o = torch.real(o) + 2 * torch.imag(o) if o.is_complex() else o
            weight = torch.linspace(0.5, 1.5 + i, max(o.numel(), 1), dtype=o.dtype)[: o.numel()].reshape(o.shape)
            total = total + (o * weight).sum()
        total.backward()
        return True

    def on(self, grid: tuple[int, ...], layouts: Any, want: Any) -> list[tuple[str, str, str, str]]:
        """[(what, how, ran, why)]: forward and backward."""
        n = 1
        for size in grid:
            n *= size
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                each = simulate(n, self._on_rank, grid, layouts, want, timeout=TIMEOUT)
        except GlobalTensorError as error:
            return [(self.what, "refused", "", _first_line(error))]
        except Exception as error:
            return [(self.what, "error", "", _first_line(error))]
        worst = [max(results, key=lambda r: ("right", "wrong").index(r[1])) for results in zip(*each, strict=True)]
        return list(worst)

    def _on_rank(self, grid: Any, layouts: Any, want: Any) -> list[tuple[str, str, str, str]]:
        placement = flow.placement("cpu", torch.arange(torch.Size(grid).numel()).reshape(grid).tolist())
        whole = [broadcast] * len(grid)

        def spread(t: torch.Tensor, sbp: Any) -> Any:
            return t.detach().clone().to_global(placement=placement, sbp=whole, check_meta=False).to_global(sbp=sbp).detach().clone()

        ours = [spread(t, s).requires_grad_(g) for t, s, g in zip(self.tensors, layouts, self._leaves(), strict=True)]
        dispatch._cache.plans.clear()
        torch.manual_seed(0)
        out = None
        if self.what == "out":
            out = replaced(want[0], iter([spread(torch.zeros_like(t), [split(0) if t.ndim else broadcast] * len(grid)) for t in tensors_in([want[0]])]))
        result = self._run(ours, out)
        result = result if out is None else out
        ran = _how_it_ran()
        why = self._differs(result, want[0])
        found = [(self.what, "wrong" if why else "right", ran, why)]
        if want[1] and self._back(result):
            why = next((f"gradient {i}: {w}" for i, (t, g) in enumerate(zip(ours, want[1], strict=True)) if (w := self._differs_grad(t, g))), "")
            found.append(("backward", "wrong" if why else "right", ran, why))
        return found

    def _differs_grad(self, t: Any, want: Any) -> str:
        if want is None or t.grad is None:
            zero = want is None or not want.any()
            return "" if zero or t.grad is not None else "missing"
        return self._differs(t.grad, want)

    def _differs(self, got: Any, want: Any) -> str:
        """"" where they agree."""
        got_tensors, wanted = tensors_in([got]), tensors_in([want])
        if len(got_tensors) != len(wanted):
            return f"{len(got_tensors)} tensors, not {len(wanted)}"
        if not wanted:
            return "" if got == want or got is want else f"{got!r}, not {want!r}"
        for g, w in zip(got_tensors, wanted, strict=True):
            if g.shape != w.shape or g.dtype != w.dtype:
                return f"{g.dtype} {list(g.shape)}, not {w.dtype} {list(w.shape)}"
            if self.drawn:
                continue
            value = full(g) if g.is_global else g.detach()
            exact = 1e-4 if w.dtype in (torch.float32, torch.complex64) else 1e-7
            if w.layout is torch.strided and not torch.allclose(value, w.detach(), rtol=exact, atol=exact * 0.1, equal_nan=True):
                return f"values differ by {(value - w).abs().max().item() if w.dtype != torch.bool else 1:.3g}"
        return ""


def _how_it_ran() -> str:
    plans = dispatch._cache.plans
    if any(isinstance(p, Whole) and key[0] not in RULES for key, p in plans.items()):
        return "fallback"
    boxed = [p for p in plans.values() if isinstance(p, Boxed)]
    if any(not e.is_broadcast for p in boxed for s in p.dst for e in s.layout):
        return "native"
    return "whole" if boxed or any(isinstance(p, Whole) for p in plans.values()) else "own"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
