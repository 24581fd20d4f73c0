"""Torch's own database of ops and sample inputs, run on global tensors.

Each sample runs in several layouts, forward, backward, in-place and ``out=``, on simulated ranks.
The results are compared with plain torch. Each result is data (`Outcome`): `op_coverage.py` makes a
report of it, and `test_opinfo.py` a quick gate.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import globaltensor as flow
from globaltensor._base.pytree import replaced
from globaltensor._ops import creation, dispatch
from globaltensor._ops.call_plan import DelegatePlan
from globaltensor._ops.local_plan import LocalPlan
from globaltensor._ops.replicated_plan import ReplicatedPlan
from globaltensor._ops.rules import RULES
from globaltensor._tensor.global_tensor import GlobalTensor
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GlobalTensorError
from globaltensor.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.sharding.spec import Spec

from .device import DEVICE
from .everywhere import full
from .oracle import swapped, tensors_in

__all__ = [
    "Call",
    "Outcome",
    "calls_of",
    "dtype_of",
    "first_line",
    "fixed_layouts",
    "name_of",
    "ops",
    "outcomes",
    "shown",
]

Layouts = list[list[Sbp]]


@functools.cache
def ops() -> list[Any]:
    """Return torch's database of ops.

    It takes 4 s to import, and every pytest process collects the tests that need it.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core as opinfo_core

    # Each iterator of samples asks which unittest.TestCase it serves, through all frames of the
    # stack. That is a tenth of the time of these tests, and there is none.
    common_utils.extract_test_fn = opinfo_core.extract_test_fn = lambda: None
    return list(op_db)


#: Name parts of ops whose numbers are drawn, or whose memory is not filled. Only shape and dtype of
#: such samples can be compared.
_RANDOM = (
    "dropout",
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "empty",
    "rrelu",
    "fractional",
    "uniform",
    "exponential",
    "geometric",
    "cauchy",
    "lowrank",
)
_DRAWS_IF_ASKED = ("multi_head_attention_forward", "scaled_dot_product_attention")
TIMEOUT = 30.0
_LARGE = 20_000  # elements above which a sample only costs time


@dataclass(frozen=True)
class Outcome:
    """An outcome of one call. ``what``: forward, backward, in-place, out. ``how``: right, wrong,
    refused (one of the library's own errors), error.

    ``ran``: native if the op's rule kept some operand split; composite if it is written with global
    ops, none of which replicated the largest operand. It is whole if an operand was replicated,
    fallback if there is no rule, and own if no rule is needed. ``uneven``: some split was into
    unequal shards.
    """

    op: str
    sample: int
    grid: tuple[int, ...]
    layouts: str
    what: str
    how: str
    ran: str = ""
    why: str = ""
    uneven: bool = False


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def dtype_of(op: Any) -> torch.dtype | None:
    """Return the dtype of an op's samples, or None if the op supports none on the device."""
    known = op.supported_dtypes(DEVICE)
    return next(
        (
            d
            for d in (torch.float64, torch.float32, torch.complex128, torch.int64, torch.int32)
            if d in known
        ),
        None,
    )


def _samples(op: Any, most: int) -> list[Any]:
    """Return the first sample, the first of those with the most dims, and others spread over the
    rest."""
    dtype = dtype_of(op)
    if dtype is None:
        return []
    torch.manual_seed(0)
    every = list(
        itertools.islice(
            op.sample_inputs(
                DEVICE, dtype, requires_grad=bool(op.supports_autograd) and dtype.is_floating_point
            ),
            400,
        )
    )
    small = [
        s
        for s in every
        if all(t.numel() <= _LARGE for t in tensors_in([s.input, s.args, s.kwargs]))
    ]
    every = small or every

    def dims(sample: Any) -> tuple[int, bool]:
        first = next(iter(tensors_in([sample.input, sample.args])), torch.empty(0))
        return (first.ndim if first.numel() > 1 else 0), first.numel() < 4096

    best = max(range(len(every)), key=lambda i: (dims(every[i]), -i), default=0)
    step = max(1, -(-len(every) // max(1, most - 1)))
    return [
        every[i] for i in dict.fromkeys([0, best, *range(step, len(every), step)]) if i < len(every)
    ][:most]


def fixed_layouts(tensors: Sequence[torch.Tensor], axes: int) -> Iterator[Layouts]:
    """Yield three layouts: every operand's first dim split, the first operand's only, the last dim
    of all."""
    seen: list[Layouts] = []
    for dims in ([0] * len(tensors), [0, *[None] * (len(tensors) - 1)], [-1] * len(tensors)):
        found = [
            [split(d % t.ndim) if t.ndim and d is not None else broadcast] * axes
            for t, d in zip(tensors, dims, strict=False)
        ]
        if found not in seen:
            seen.append(found)
            yield found


def _drawn_layouts(
    tensors: Sequence[torch.Tensor], axes: int, draws: int, choose: random.Random
) -> Iterator[Layouts]:
    """Yield layouts drawn at random, partial sums among them."""
    for _ in range(draws):
        found = []
        for t in tensors:
            kinds = [
                broadcast,
                *[split(d) for d in range(t.ndim)] * 2,
                *([partial_sum] if t.is_floating_point() or t.is_complex() else []),
            ]
            found.append([choose.choice(kinds) for _ in range(axes)])
        yield found


def shown(tensors: Sequence[torch.Tensor], layouts: Layouts) -> str:
    return ", ".join(
        f"{list(t.shape)} {' '.join(e.short for e in s)}"
        for t, s in zip(tensors, layouts, strict=True)
    )


def calls_of(op: Any, samples: int) -> Iterator[tuple[int, Call, Any]]:
    """Yield (sample number, call, plain torch's result and gradients) for each variant of the op:
    forward, in-place, out."""
    kinds: list[tuple[str, Callable[..., Any]]] = [("forward", op.op)]
    if op.get_inplace() is not None:
        kinds.append(("in-place", op.get_inplace()))
    if op.supports_out:
        kinds.append(("out", op.op))
    for number, sample in enumerate(_samples(op, samples)):
        ins = [sample.input, *sample.args]
        tensors = tensors_in([ins, sample.kwargs])
        if any(t.layout is not torch.strided for t in tensors):
            continue
        for what, function in kinds:
            if what == "in-place" and sample.broadcasts_input:
                continue
            call = Call(op, function, ins, sample.kwargs, tensors, what)
            want = call.plain()
            if want is not None:
                yield number, call, want


def outcomes(
    op: Any, grids: Sequence[tuple[int, ...]], samples: int, draws: int
) -> Iterator[Outcome]:
    """Yield every outcome of an op, in order. In-place and ``out=`` share the rule, so they run in
    only two layouts of each sample and grid."""
    for number, call, want in calls_of(op, samples):
        for grid in grids:
            choose = random.Random(f"{op.name} {number} {grid}")
            drawn = list(_drawn_layouts(call.tensors, len(grid), draws, choose))
            fixed = list(fixed_layouts(call.tensors, len(grid)))
            if not call.tensors:
                fixed, drawn = _placed_layouts(want[0], len(grid)), []
            for layouts in [*fixed, *drawn] if call.what == "forward" else [*fixed[:1], *drawn[:1]]:
                uneven = any(
                    t.shape[e.dim] % math.prod(grid)
                    for t, s in zip(call.tensors, layouts, strict=False)
                    for e in s
                    if e.is_split
                )
                for what, how, ran, why in call.on(grid, layouts, want):
                    text = shown(call.tensors, layouts) if call.tensors else str(layouts)
                    yield Outcome(name_of(op), number, grid, text, what, how, ran, why, uneven)


def _placed_layouts(want: Any, axes: int) -> list[Layouts]:
    """Return the layouts requested for the result of a function without operands."""
    return [[[split(0) if isinstance(want, torch.Tensor) and want.ndim else broadcast] * axes]]


class Call:
    """A call: one sample of one op in one of its variants."""

    def __init__(
        self, op: Any, function: Any, ins: Any, kwargs: Any, tensors: Any, what: str
    ) -> None:
        self.op, self.function, self.ins, self.kwargs, self.tensors, self.what = (
            op,
            function,
            ins,
            kwargs,
            tensors,
            what,
        )
        self.written: dict[
            int, torch.Tensor
        ] = {}  # operands that plain torch writes into (running statistics) -> their new values
        self.drawn = any(part in op.name for part in _RANDOM) or op.name.endswith(_DRAWS_IF_ASKED)

    def run(self, tensors: Sequence[torch.Tensor], out: Any = None) -> Any:
        """Run the call with these operands."""
        these = iter(tensors)
        ins = swapped(self.ins, these)
        more = {} if out is None else {"out": out}
        return self.function(*ins, **swapped(self.kwargs, these), **more)

    def leaves(self) -> list[bool]:
        """Return which operands get a gradient."""
        return [
            self.what == "forward" and t.requires_grad and (t.is_floating_point() or t.is_complex())
            for t in self.tensors
        ]

    def plain(self) -> tuple[Any, list[Any]] | None:
        """Return (result, gradients) of plain torch, or None if torch rejects the sample itself."""
        tensors = [
            t.detach().clone().requires_grad_(g)
            for t, g in zip(self.tensors, self.leaves(), strict=True)
        ]
        try:
            torch.manual_seed(0)
            out = self._blank() if self.what == "out" else None
            result = self.run(tensors, out)
            self.written = {
                i: t.detach().clone()
                for i, t in enumerate(tensors)
                if not t.equal(self.tensors[i].detach()) and self.what == "forward"
            }
            if out is not None:
                if self.differs(out, self.run(tensors)):
                    # torch's own out= differs from its result (ihfft over one dim is not
                    # conjugated)
                    return None
                result = out
        except Exception:
            return None
        try:
            grads = [t.grad for t in tensors] if self.back(result) else []
        except RuntimeError:  # eigenvectors have gradients only if their phase has no effect
            grads = []
        return result, grads

    def _blank(self) -> Any:
        with torch.no_grad():
            return replaced(
                shape := self.run([t.detach().clone() for t in self.tensors]),
                iter([torch.zeros_like(t) for t in tensors_in([shape])]),
            )

    def back(self, result: Any) -> bool:
        """Run backward from a weighted sum of all results. Returns False if no result has a
        gradient."""
        outs = [o for o in tensors_in([result]) if o.requires_grad]
        if self.drawn or not outs or not any(self.leaves()):
            return False
        total: Any = 0
        for i, o in enumerate(outs):
            o = torch.real(o) + 2 * torch.imag(o) if o.is_complex() else o
            total = total + (o * self.weight(i, o)).sum()
        total.backward()
        return True

    @staticmethod
    def weight(i: int, like: torch.Tensor) -> torch.Tensor:
        return torch.linspace(
            0.5, 1.5 + i, max(like.numel(), 1), dtype=like.dtype, device=like.device
        )[: like.numel()].reshape(like.shape)

    def on(self, grid: tuple[int, ...], layouts: Any, want: Any) -> list[tuple[str, str, str, str]]:
        """Run the call on a grid and return [(what, how, ran, why)], for forward and backward."""
        n = math.prod(grid)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                each = simulate(
                    n,
                    self._on_rank if self.tensors else self._made,
                    grid,
                    layouts,
                    want,
                    timeout=TIMEOUT,
                )
        except GlobalTensorError as error:
            return [(self.what, "refused", "", first_line(error))]
        except Exception as error:
            return [(self.what, "error", "", first_line(error))]
        return [
            max(results, key=lambda r: ("right", "wrong").index(r[1]))
            for results in zip(*each, strict=True)
        ]

    def _made(self, grid: Any, layouts: Any, want: Any) -> list[tuple[str, str, str, str]]:
        """Call a function without operands that makes its result on a placement."""
        make = getattr(flow, self.op.name, None) if self.op.name in creation.__all__ else None
        torch.manual_seed(0)
        if make is None or self.what != "forward":
            why = self.differs(self.run([]), want[0])
            return [(self.what, "wrong" if why else "right", "own", why)]
        placed = {
            k: v for k, v in self.kwargs.items() if k not in ("device", "layout", "requires_grad")
        }
        result = make(*self.ins, **placed, placement=_placement(grid), sbp=layouts[0])
        why = self.differs(result, want[0])
        return [
            (self.what, "wrong" if why else "right", "native" if result.is_global else "own", why)
        ]

    def _on_rank(self, grid: Any, layouts: Any, want: Any) -> list[tuple[str, str, str, str]]:
        placement = _placement(grid)
        whole = [broadcast] * len(grid)

        def spread(t: torch.Tensor, sbp: Any) -> Any:
            spec = Spec.make(t.shape, t.dtype, placement, whole)
            return GlobalTensor.wrap(t.detach().clone(), spec).to_global(sbp=sbp).detach().clone()

        ours = [
            spread(t, s).requires_grad_(g)
            for t, s, g in zip(self.tensors, layouts, self.leaves(), strict=True)
        ]
        dispatch._cache.plans.clear()
        torch.manual_seed(0)
        out = None
        if self.what == "out":
            out = replaced(
                want[0],
                iter(
                    [
                        spread(torch.zeros_like(t), [split(0) if t.ndim else broadcast] * len(grid))
                        for t in tensors_in([want[0]])
                    ]
                ),
            )
        result = self.run(ours, out)
        result = result if out is None else out
        ran = (
            _how_it_ran(max(t.numel() for t in self.tensors))
            if any(e is not broadcast for s in layouts for e in s)
            else ""
        )
        if not any(t.ndim for t in self.tensors):
            ran = "own"
        if ran == "own" and any(
            t.is_global and not all(e.is_broadcast for e in t._spec.layout)
            for t in tensors_in([result])
        ):
            ran = "native"  # by a handler, which needs no plan
        why = self.differs(result, want[0]) or next(
            (
                f"operand {i}: {w}"
                for i, t in self.written.items()
                if (w := self.differs(ours[i], t))
            ),
            "",
        )
        found = [(self.what, "wrong" if why else "right", ran, why)]
        if want[1] and self.back(result):
            why = next(
                (
                    f"gradient {i}: {w}"
                    for i, (t, g) in enumerate(zip(ours, want[1], strict=True))
                    if (w := self.differs_grad(t, g))
                ),
                "",
            )
            found.append(("backward", "wrong" if why else "right", ran, why))
        return found

    def differs_grad(self, t: Any, want: Any) -> str:
        if want is None or t.grad is None:
            zero = want is None or not want.any()
            return "" if zero or t.grad is not None else "missing"
        return self.differs(t.grad, want)

    def differs(
        self, got: Any, want: Any, gathered: Callable[[Any], torch.Tensor] | None = None
    ) -> str:
        """Return how two values differ, "" if they agree. ``gathered``: gathers a distributed
        tensor."""
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
            value = gathered(g) if gathered is not None else full(g) if g.is_global else g.detach()
            exact = 1e-4 if w.dtype in (torch.float32, torch.complex64) else 1e-7
            if w.layout is torch.strided and not torch.allclose(
                value, w.detach(), rtol=exact, atol=exact * 0.1, equal_nan=True
            ):
                return (
                    f"values differ by "
                    f"{(value - w).abs().max().item() if w.dtype != torch.bool else 1:.3g}"
                )
        return ""


def _placement(grid: Sequence[int]) -> Any:
    return flow.placement("cpu", torch.arange(math.prod(grid)).reshape(tuple(grid)).tolist())


def _how_it_ran(largest: int) -> str:
    """Return how a call ran, from the plans made for it. ``largest``: elements of its largest
    operand."""
    plans = dispatch._cache.plans
    if any(isinstance(p, ReplicatedPlan) and key[0] not in RULES for key, p in plans.items()):
        return "fallback"
    boxed = [p for p in plans.values() if isinstance(p, LocalPlan)]
    through = any(isinstance(p, DelegatePlan) for p in plans.values())
    gathered = any(isinstance(p, ReplicatedPlan) for p in plans.values()) or any(
        r is not None
        and 2 * r.src.numel > largest
        and not any(e.is_broadcast for e in r.src.layout)
        and all(e.is_broadcast for e in r.dst.layout)
        for p in boxed
        for r in p.routes
    )
    kept = any(e.is_split for p in boxed for s in p.dst for e in s.layout)
    if kept and not (through and gathered):
        return "composite" if through else "native"
    return "whole" if boxed or any(isinstance(p, ReplicatedPlan) for p in plans.values()) else "own"


def first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {textwrap.shorten(line, 320, placeholder=' ...')}"
