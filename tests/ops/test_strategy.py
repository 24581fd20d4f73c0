"""Tests of the choice of an op's signature, and of inferring a call's outputs without its
values."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from globaltensor._ops.rules import Arg, OpDescription, rule_of
from globaltensor._ops.shape_inference import infer_outputs, memoized
from globaltensor.sbp import broadcast, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

CHOOSING = importlib.import_module("globaltensor._ops.rules.strategy")
MESH = Placement("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]])
OPS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "matmul": (torch.matmul, ((8, 16), (16, 24))),
    "batched": (torch.matmul, ((4, 8, 16), (4, 16, 8))),
    "add": (torch.add, ((8, 16), (8, 16))),
    "scaled": (torch.mul, ((8, 16), (16,))),
    "sum": (torch.sum, ((8, 16),)),
    "transpose": (torch.t, ((8, 16),)),
}


def test_what_is_put_before_a_batch_follows_the_batch() -> None:
    """A class token whose features are split, before a batch whose rows are: the batch stays."""
    token, batch = (
        Spec.make(shape, torch.float32, MESH, [split(dim), broadcast])
        for shape, dim in (((64, 1, 128), 2), ((64, 16, 128), 0))
    )
    for specs in ([token, batch], [batch, token]):
        args = [Arg(i, s) for i, s in enumerate(specs)]
        op, rule = OpDescription(args, function=torch.cat), rule_of(torch.cat, {})
        assert rule is not None
        rule.describe(op, args, 1)
        out = Spec.make((64, 17, 128), torch.float32, MESH, [broadcast] * 2)
        choice = CHOOSING.select_signature(op, [out])
        assert choice.outs[0].layout[0] == split(0)


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(OPS)), st.data())
def test_what_is_chosen_is_the_cheapest_of_all_and_of_those_the_first(
    name: str, data: st.DataObject
) -> None:
    func, shapes = OPS[name]
    layouts = [
        [
            data.draw(st.sampled_from([broadcast, partial_sum, *map(split, range(len(shape)))]))
            for _ in MESH.shape
        ]
        for shape in shapes
    ]
    specs = [
        Spec.make(shape, torch.float32, MESH, layout)
        for shape, layout in zip(shapes, layouts, strict=True)
    ]
    op, rule = (
        OpDescription([Arg(i, s) for i, s in enumerate(specs)], function=func),
        rule_of(func, {}),
    )
    assert rule is not None
    rule.describe(op, *op.args)
    outs = [
        Spec.make(
            func(*(torch.empty(shape, device="meta") for shape in shapes)).shape,
            torch.float32,
            MESH,
            [broadcast] * 2,
        )
    ]
    op.out = op.out or [(None,) * outs[0].ndim]
    found = CHOOSING.select_signature(op, outs)
    if not CHOOSING._price(op, specs, found, inf)[-1] and all(
        s in op.signatures(a) for a, s in enumerate(found.signatures)
    ):
        return  # the operands' layouts fit this signature, so no others are priced
    every = [
        CHOOSING._choice(signatures, specs, outs)
        for signatures in itertools.product(*(list(op.signatures(a)) for a in range(2)))
    ]
    assert found == min(every, key=lambda choice: CHOOSING._price(op, specs, choice, inf))


def test_pricing_ends_where_it_costs_too_much() -> None:
    specs = [
        Spec.make((8, 16), torch.float32, MESH, [partial_sum, broadcast]),
        Spec.make((16, 24), torch.float32, MESH, [split(1), broadcast]),
    ]
    op, rule = (
        OpDescription([Arg(i, s) for i, s in enumerate(specs)], function=torch.matmul),
        rule_of(torch.matmul, {}),
    )
    assert rule is not None
    rule.describe(op, *op.args)
    outs = [Spec.make((8, 24), torch.float32, MESH, [broadcast] * 2)]
    whole = CHOOSING._choice(
        (next(s for s in op.signatures(0) if s.factor is None),) * 2, specs, outs
    )
    seconds = CHOOSING._price(op, specs, whole, inf)[0]
    assert seconds > 0
    assert CHOOSING._price(op, specs, whole, seconds)[0] == seconds
    assert CHOOSING._price(op, specs, whole, seconds / 2) is None


@pytest.mark.parametrize(
    "func",
    [
        lambda x: x / 2,
        torch.sqrt,
        lambda x: torch.where(x > 0, 1.0, 0.0),
        lambda x: x * 1j,
        lambda x: x.double() + 1,
        lambda x: torch.stack([x, x]) * 0.5,
    ],
    ids=["quotient", "sqrt", "where", "complex", "told", "listed"],
)
def test_results_of_the_default_dtype_follow_it(
    func: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.arange(6)
    lies = x.to_global(Placement("cpu", [0]), split(0))  # type: ignore[attr-defined]
    try:
        for dtype in (torch.float32, torch.float64, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            found, wanted = func(lies), func(x)
            assert found.dtype is found.to_local().dtype is wanted.dtype  # type: ignore[attr-defined]
            assert torch.equal(found.to_local(), wanted)  # type: ignore[attr-defined]
    finally:
        torch.set_default_dtype(torch.float32)


class Counted:
    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.calls = func, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.func(*args, **kwargs)


def test_calls_are_tried_once_for_the_same_shapes_and_arguments() -> None:
    add, spec = Counted(torch.add), Spec.make((4, 4), torch.int32, MESH, [broadcast, broadcast])
    lies = spec.replace(layout=[split(0), split(1)])
    x = torch.empty(4, 4, dtype=torch.int32)

    def asked(spec: Spec, *more: Any, **kwargs: Any) -> tuple[Any, Any]:
        found = infer_outputs(add, [spec], (x, *more), kwargs)[0]
        assert found is not None
        return tuple(found[0].shape), found[0].dtype

    with memoized({}):
        assert asked(spec, 1) == asked(lies, 1) == ((4, 4), torch.int32)
        assert add.calls == 1
        # 1.0 == 1, but it is a different argument
        assert asked(spec, 1.0) == ((4, 4), torch.float32)
        assert asked(spec, 1, alpha=2) == ((4, 4), torch.int32)
        assert asked(spec.replace(shape=(2, 4)), 1) == ((2, 4), torch.int32)
        assert add.calls == 4
        for _ in range(2):
            with pytest.raises(RuntimeError):
                infer_outputs(add, [spec, spec.replace(shape=(3, 3))], (x, torch.empty(3, 3)), {})
    before = add.calls
    assert asked(spec, 1) == asked(spec, 1) == ((4, 4), torch.int32)
    assert add.calls == before + 2


def test_slices_that_end_at_the_value_of_a_tensor_are_tried_each_time() -> None:
    spec = Spec.make((4, 4), torch.float32, MESH, [broadcast, broadcast])
    x = torch.empty(4, 4)
    with memoized({}):
        for end in (2, 3):
            ends = slice(None, torch.tensor(end))
            rows = infer_outputs(torch.Tensor.__getitem__, [spec], (x, ends), {})[0]
            assert rows is None or rows[0].shape == (end, 4)
