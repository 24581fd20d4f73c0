"""Tests of laws on random input. Boxing keeps values and gradients for all placements and sbp.
Small programs of ops equal plain torch, forward and gradient.

The ranks are simulated, and every example ends with a value that all ranks read. A failure prints
the program as Python.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note, settings
from hypothesis import strategies as st

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8])
Draw = Callable[[Any], Any]


def read(x: torch.Tensor) -> torch.Tensor:
    """Return the full value on every rank of the world."""
    return torch.from_numpy(x.detach().numpy())


def close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype, f"{what} is {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what} is {list(got.shape)}, not {list(want.shape)}"
    if want.numel() and want.is_floating_point():
        error, scale = float((got - want).abs().max()), max(1.0, float(want.abs().max()))
        assert error <= 1e-9 * scale, f"{what} is off by {error:.3g} (largest value {scale:.3g})"
    else:
        assert torch.equal(got, want), f"{what}:\n{got}\nnot\n{want}"


# --------------------------------------------------------------------------------------- strategies


def placements(n: int) -> st.SearchStrategy[list[Any]]:
    """Draw ranks of a world of n in any order: some or all of them, on one axis or two."""

    def arranged(order: list[int]) -> st.SearchStrategy[list[Any]]:
        grids = [[r for r in range(1, k + 1) if k % r == 0] for k in range(n + 1)]
        count = st.integers(1, n)
        return count.flatmap(
            lambda k: st.one_of(
                st.just(order[:k]),
                st.sampled_from(grids[k]).map(
                    lambda r: torch.tensor(order[:k]).view(r, -1).tolist()
                ),
            )
        )

    return st.permutations(range(n)).flatmap(arranged)


def sbps(axes: int, dims: int, partial: bool = True) -> st.SearchStrategy[list[Any]]:
    return st.lists(
        st.sampled_from([B, *([P] if partial else []), *[S(d) for d in range(dims)]]),
        min_size=axes,
        max_size=axes,
    )


def axes_of(ranks: list[Any]) -> int:
    return 2 if isinstance(ranks[0], list) else 1


def spread(t: torch.Tensor, ranks: list[Any], sbp: Sequence[Any]) -> torch.Tensor:
    """Return a leaf with this value and sbp."""
    placement = flow.placement("cpu", ranks)
    return (
        t.clone()
        .to_global(placement, [B] * placement.axes)
        .to_global(sbp=list(sbp))
        .detach()
        .requires_grad_(t.is_floating_point())
    )  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- boxing


@st.composite
def moves(draw: Draw) -> tuple[int, tuple[int, ...], list[tuple[list[Any], list[Any]]]]:
    n = draw(st.sampled_from([2, 3, 4]))
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    stops = []
    for _ in range(draw(st.integers(2, 4))):
        ranks = draw(placements(n))
        stops.append((ranks, draw(sbps(axes_of(ranks), len(shape)))))
    return n, shape, stops


def travel(t: torch.Tensor, c: torch.Tensor, stops: list[tuple[list[Any], list[Any]]]) -> None:
    x = y = spread(t, *stops[0])
    for ranks, sbp in stops[1:]:
        y = y.to_global(placement=flow.placement("cpu", ranks), sbp=sbp)
        assert y.sbp == tuple(sbp)
        here = flow.env.get_rank()
        assert y.to_local().shape == (
            y.spec.local_shape(here) if y.placement.coordinate(here) is not None else (0,)
        )
        close(read(y), t, f"at {ranks} {sbp}")
    if not t.is_floating_point():
        return
    last = y.placement
    (y * c.to_global(last, [B] * last.axes)).sum().backward()
    assert x.grad.placement is x.placement
    assert x.grad.sbp == x.sbp
    close(read(x.grad), c, "the gradient")


def check_boxing_keeps_values_and_gradients(case: Any) -> None:
    n, shape, stops = case
    gen = torch.Generator().manual_seed(math.prod(shape) + n)
    t, c = (torch.randn(shape, dtype=torch.float64, generator=gen) for _ in range(2))
    simulate(n, travel, t, c, stops, timeout=10.0)


moved_with_gradients = given(moves())


@moved_with_gradients
@settings(max_examples=30)
def test_boxing_keeps_values_and_gradients(case: Any) -> None:
    check_boxing_keeps_values_and_gradients(case)


@pytest.mark.extended
@moved_with_gradients
@settings(max_examples=120)
def test_more_boxings_keep_values_and_gradients(case: Any) -> None:
    check_boxing_keeps_values_and_gradients(case)


DTYPES = [
    getattr(torch, name)
    for name in "float32 bfloat16 float16 int64 int32 int16 int8 uint8 bool complex64 complex128".split()  # noqa: E501
]


def travel_any(t: torch.Tensor, stops: list[tuple[list[Any], list[Any]]]) -> None:
    y = spread(t, *stops[0]).detach()
    for ranks, sbp in stops[1:]:
        y = y.to_global(placement=flow.placement("cpu", ranks), sbp=sbp)
    everywhere = y.to_global(placement=flow.placement.all("cpu"), sbp=B).to_local()
    assert everywhere.dtype == t.dtype
    assert torch.equal(everywhere, t)


def check_boxing_of_every_dtype(case: Any, dtype: torch.dtype) -> None:
    n, shape, stops = case
    t = (
        (torch.arange(math.prod(shape)) % 7 - (0 if dtype in (torch.uint8, torch.bool) else 3))
        .reshape(shape)
        .to(dtype)
    )
    simulate(n, travel_any, t, stops, timeout=10.0)


moved_with_a_dtype = given(moves(), st.sampled_from(DTYPES))


@moved_with_a_dtype
@settings(max_examples=25)
def test_boxing_of_every_dtype(case: Any, dtype: Any) -> None:
    check_boxing_of_every_dtype(case, dtype)


@pytest.mark.extended
@moved_with_a_dtype
@settings(max_examples=100)
def test_more_boxings_of_every_dtype(case: Any, dtype: Any) -> None:
    check_boxing_of_every_dtype(case, dtype)


def twice(t: torch.Tensor, stops: list[tuple[list[Any], list[Any]]]) -> None:
    x = y = spread(t, *stops[0])
    for ranks, sbp in stops[1:]:
        y = y.to_global(placement=flow.placement("cpu", ranks), sbp=sbp)
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    assert g.sbp == x.sbp
    close(read(g), 3 * t**2, "the gradient")
    (h,) = torch.autograd.grad((g**2).sum(), x)
    close(read(h), 36 * t**3, "the second derivative")


def check_boxing_is_differentiable_twice(case: Any) -> None:
    n, shape, stops = case
    simulate(
        n,
        twice,
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        stops,
        timeout=10.0,
    )


moved = given(moves())


@moved
@settings(max_examples=20)
def test_boxing_is_differentiable_twice(case: Any) -> None:
    check_boxing_is_differentiable_twice(case)


@pytest.mark.extended
@moved
@settings(max_examples=80)
def test_many_boxings_are_differentiable_twice(case: Any) -> None:
    check_boxing_is_differentiable_twice(case)


# ----------------------------------------------------------------------------------------- programs
# An op is (text, function). The function maps the list of tensors made so far to a new tensor. The
# text is Python, in which `t` is that list.

Op = tuple[str, Callable[[list[torch.Tensor]], torch.Tensor]]
NAMES = {"torch": torch, "F": F}


def op(text: str) -> Op:
    return text, eval(f"lambda t: {text}", dict(NAMES))


def ops(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", ";").split(";") if part.strip()]


UNARY = ops("""
    torch.relu({x}); torch.tanh({x}); -{x}; {x} * 2; {x} + 1; 1 - {x}; torch.sigmoid({x}); F.gelu({x}); {x}.square(); ({x} * 0.1).exp(); {x}.abs()
    {x}.clamp(-1, 1); {x} / 3; 2 / ({x}.square() + 1); ({x} > 0).double() * {x}; torch.where({x} > 0, {x}, 0.5); {x}.clone().mul_(2)
    {x}.masked_fill({x} < 0, 3.0)
    ({x} > 0).float().double() * {x}; {x}.sum(); {x}.t(); {x}.flatten(); {x}.reshape(-1); {x}.square().mean() + {x}; {x}.contiguous()
    {x}.detach() * {x}; F.normalize({x}, dim=0); {x} - {x}.mean(); torch.logsumexp({x}, tuple(range({x}.ndim)))
""")  # noqa: E501
# Ops along a dim.
ALONG = ops("""
    {x}.sum({d}); {x}.sum({d}, keepdim=True); {x}.mean({d}); {x}.mean({d}, keepdim=True); {x}.amax({d}); {x}.max({d}).values; {x}.min({d}, True).values
    {x}.softmax({d}); {x}.log_softmax({d}); {x}.logsumexp({d}); {x}.cumsum({d}); {x}.var({d}, correction=0); {x}.norm(dim={d}); {x}.sort({d}).values
    {x}.flip({d}); {x}.roll(1, {d}); {x}.unsqueeze({d}); {x}.squeeze({d}); torch.cat([{x}, {x}], {d}); torch.stack([{x}, {x} * 2], {d})
    {x}.chunk(2, {d})[0]; {x}.transpose({d}, -1); {x}.movedim({d}, 0); {x}.narrow({d}, 0, 1); {x}.select({d}, -1)
    {x}.index_select({d}, torch.tensor([0, 0])); {x}.unbind({d})[0]; {x}.split(2, {d})[-1]; {x}.topk(1, {d}).values; {x}.repeat_interleave(2, {d})
    {x}.gather({d}, {x}.argsort({d})); {x}.unsqueeze({d}).expand_as(torch.stack([{x}, {x}], {d})); {x}.diff(dim={d}); {x}.prod({d})
    {x} - {x}.amax({d}, keepdim=True); F.layer_norm({x}, {x}.shape[-1:]); {x}.unflatten({d}, (1, -1)); {x}.tensor_split(2, {d})[0]
    {x}.swapaxes({d}, 0).clone(); {x}.scatter({d}, {x}.argmax({d}, keepdim=True), 0.5); {x}.index_fill({d}, torch.tensor([0]), 1.5)
    {x}.std({d}, correction=0) + 1
""")  # noqa: E501
INDEX = ops("""
    {x}[0]; {x}[-1]; {x}[1:]; {x}[:-1]; {x}[::2]; {x}[..., :1]; {x}[..., 0]; {x}[None]; {x}[:, None]; {x}[torch.tensor([0, 0, -1])]
    {x}[..., torch.tensor([0, -1])]; {x}.view({x}.shape); {x}.reshape({x}.shape[0], -1); {x}.flatten(0, 1); {x}.flatten(-2); {x}.tril(); {x}.triu(1)
    {x}.mT; {x}.diagonal(); {x}.view(-1, {x}.shape[-1]); F.pad({x}, (1, 2)); F.pad({x}, (0, 0, 1, 0)); {x}.repeat(2, *[1] * ({x}.ndim - 1))
    {x}.permute(*reversed(range({x}.ndim))); {x}.reshape(-1, 2); {x}.T; written({x}, 0, 7.0); written({x}, slice(1, None), 0.25)
    written({x}, (..., 0), {x}.mean())
""")  # noqa: E501
BINARY = ops("""
    {x} + {y}; {x} - {y}; {x} * {y}; torch.maximum({x}, {y}); torch.where({x} > {y}, {x}, {y}); {x} / ({y}.square() + 1); torch.addcmul({x}, {y}, {y})
    {x}.clone().add_({y}); {x}.lerp({y}, 0.3); {x} * ({y} > 0); torch.hypot({x}, {y} + 3)
""")  # noqa: E501
PRODUCT = ops("""
    {x} @ {y}; {x} @ {y}.mT; {x}.mT @ {y}; F.linear({x}, {y}); F.linear({x}, {y}, {y}.sum(-1)); torch.einsum('...ij,...ij->...i', {x}, {y})
    torch.outer({x}, {y}); {x}.matmul({y})
""")  # noqa: E501


def written(x: torch.Tensor, where: Any, value: Any) -> torch.Tensor:
    """Return a copy with a value written into it."""
    out = x.clone()
    out[where] = value
    return out


NAMES["written"] = written  # type: ignore[assignment]


@st.composite
def programs(draw: Draw) -> tuple[list[torch.Tensor], list[str]]:
    """Draw up to three operands and three to six ops that plain torch accepts."""
    gen = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    a, b, c = (draw(st.sampled_from([1, 2, 3, 4, 5, 7])) for _ in range(3))
    choices = [
        [(a, b)],
        [(a, b), (b, c)],
        [(a, b), (a, b)],
        [(a, b, c), (c, b)],
        [(a, b, c), (b, c)],
        [(a, b), (b,)],
        [(a, b, c, 2), (2, c)],
        [(0, b), (b, c)],
    ]
    shapes = draw(st.sampled_from(choices))
    tensors = [torch.randn(s, dtype=torch.float64, generator=gen) for s in shapes]
    values, texts = list(tensors), []
    for _ in range(draw(st.integers(3, 6))):
        found = _next(draw, values)
        if found is not None:
            texts.append(found[0])
            values.append(found[1])
    return tensors, texts


def _next(draw: Draw, values: list[torch.Tensor]) -> tuple[str, torch.Tensor] | None:
    """Draw an op that fits the tensors, and its result. Return None after six misses."""
    for _ in range(6):
        x = (
            draw(st.integers(0, len(values) - 1))
            if draw(st.integers(0, 3)) == 0
            else len(values) - 1
        )
        y = draw(st.integers(0, len(values) - 1))
        template = draw(
            st.sampled_from([UNARY, ALONG, ALONG, INDEX, BINARY, PRODUCT]).flatmap(st.sampled_from)
        )
        dim = draw(st.integers(-values[x].ndim, values[x].ndim - 1)) if values[x].ndim else 0
        text = template.format(x=f"t[{x}]", y=f"t[{y}]", d=dim)
        before = torch.is_warn_always_enabled()
        torch.set_warn_always(
            True
        )  # a call whose warning torch shows only once must not be drawn later either
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                value = op(text)[1](values)
        except (RuntimeError, IndexError, ValueError, TypeError, UserWarning):
            continue
        finally:
            torch.set_warn_always(before)
        if (
            value.numel() <= 600
            and bool(value.isfinite().all())
            and (not value.numel() or float(value.abs().max()) < 1e4)
        ):
            return text, value
    return None


def run_program(
    tensors: list[torch.Tensor], texts: list[str], boxes: Sequence[Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the last value, and the values of all ops."""
    values = list(tensors)
    for i, text in enumerate(texts):
        out = op(text)[1](values)
        if (
            out.is_global
            and i < len(boxes)
            and boxes[i] is not None
            and all(not e.is_split or e.dim < out.ndim for e in boxes[i])
        ):
            out = out.to_global(sbp=boxes[i])
        values.append(out)
    return values[-1], values[len(tensors) :]


def weighed(values: list[torch.Tensor]) -> torch.Tensor:
    """Return a number that depends on every element of every value that has a gradient."""
    total: Any = 0.0
    for i, v in enumerate(values):
        if v.requires_grad:
            weights = torch.cos(torch.arange(v.numel(), dtype=torch.float64) + i).reshape(v.shape)
            total = total + (v * weights).sum()
    return total  # type: ignore[no-any-return]


def on_rank(
    tensors: list[torch.Tensor],
    texts: list[str],
    ranks: list[Any],
    layouts: Any,
    boxes: Any,
    want: Any,
) -> None:
    ours = [spread(t, ranks, sbp) for t, sbp in zip(tensors, layouts, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", ".*0-dim operands", flow.errors.FallbackWarning
        )  # the fallback is right, and its speed is irrelevant for 0-dim tensors
        _, values = run_program(ours, texts, boxes)
        for text, got, expected in zip(texts, values, want[0], strict=True):
            assert got.is_global
            close(read(got), expected, text)
        total = weighed(values)
        if isinstance(total, torch.Tensor):
            total.backward()
    for i, (x, g) in enumerate(zip(ours, want[1], strict=True)):
        if g is not None:
            assert x.grad is not None, f"no gradient of operand {i}"
            assert x.grad.sbp == x.sbp
            close(read(x.grad), g, f"the gradient of operand {i}")


@st.composite
def spread_programs(draw: Draw) -> Any:
    tensors, texts = draw(programs())
    ranks = draw(
        st.sampled_from(
            [
                [0, 1],
                [0, 1, 2],
                [2, 0, 1],
                [3, 1, 2, 0],
                [[0, 1], [2, 3]],
                [[0, 1, 2, 3]],
                [[0], [1]],
            ]
        )
    )
    axes = axes_of(ranks)
    layouts = [draw(sbps(axes, t.ndim)) for t in tensors]
    boxes = [draw(st.one_of(st.none(), st.none(), sbps(axes, 3))) for _ in texts]
    return tensors, texts, ranks, layouts, boxes


def check_program(case: Any) -> None:
    tensors, texts, ranks, layouts, boxes = case
    n = int(torch.tensor(ranks).numel())
    plain = [t.clone().requires_grad_() for t in tensors]
    _, values = run_program(plain, texts, ())
    total = weighed(values)
    if isinstance(total, torch.Tensor):
        total.backward()
    want = [v.detach() for v in values], [p.grad for p in plain]
    lines = [
        f"t.append({x})" + (f".to_global(sbp={b})" if b else "")
        for x, b in zip(texts, boxes, strict=True)
    ]
    note(
        "\n".join([f"operands {[list(t.shape) for t in tensors]} as {layouts} on {ranks}", *lines])
    )
    simulate(n, on_rank, tensors, texts, ranks, layouts, boxes, want, timeout=10.0)


spread_over_ranks = given(spread_programs())


@spread_over_ranks
@settings(max_examples=20)
def test_programs_equal_plain_torch(case: Any) -> None:
    check_program(case)


@pytest.mark.extended
@spread_over_ranks
@settings(max_examples=100)
def test_more_programs_equal_plain_torch(case: Any) -> None:
    check_program(case)


@pytest.mark.slow
@settings(max_examples=3000)
@given(spread_programs())
def test_many_programs_equal_plain_torch(case: Any) -> None:
    check_program(case)


@pytest.mark.slow
@settings(max_examples=2000)
@given(moves())
def test_many_boxings(case: Any) -> None:
    n, shape, stops = case
    t, c = (
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i in range(2)
    )
    simulate(n, travel, t, c, stops, timeout=10.0)
