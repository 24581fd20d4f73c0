"""Tests of creation functions: global sizes, torch's values on any layout, and errors that name the
missing argument."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import globaltensor as flow
from globaltensor._ops import creation
from globaltensor._tensor.global_tensor import GlobalTensor
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GlobalTensorError, PlacementError, SbpError
from globaltensor.sbp import Sbp, broadcast, partial_max, partial_sum, split
from globaltensor.sharding.placement import Placement

LINE, GRID, ONE = (
    Placement("cpu", [0, 1, 2]),
    Placement("cpu", [[3, 0], [2, 1]]),
    Placement("cpu", [0]),
)
S0, S1 = split(0), split(1)
FLAT: list[tuple[Placement, tuple[Sbp, ...]]] = [
    *((LINE, (e,)) for e in (S0, partial_sum, partial_max)),
    *((GRID, pair) for pair in ((S0, S0), (partial_sum, split(-1)))),
]
TABLES = [
    *FLAT,
    (LINE, (S1,)),
    *((GRID, p) for p in itertools.product((broadcast, S0, S1), repeat=2)),
]

Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
MATRICES: Calls = {
    "ones": ((5, 4), {}),
    "zeros": (((5, 4),), {"dtype": torch.bool}),
    "full": (((5, 4), 2.5), {}),
    "full ": (((5, 4),), {"fill_value": 7}),
    "eye": ((5,), {}),
    "eye ": ((3, 7), {"dtype": torch.int32}),
    "tensor": (([[1, 2], [3, 4], [5, 6]],), {}),
    "as_tensor": ((np.arange(12.0).reshape(4, 3),), {"dtype": torch.float32}),
    "tril_indices": ((4, 3), {}),
    "triu_indices": ((4, 3), {"offset": 1}),
}
VECTORS: Calls = {
    "arange": ((7,), {}),
    "arange ": ((1, 19, 3), {}),
    "arange  ": ((19, 1, -3), {"dtype": torch.int16}),
    "arange   ": ((), {"start": 2, "end": 9}),
    "arange    ": ((2,), {"end": 9, "step": 2}),
    "arange     ": ((0.0, 1.0, 0.07), {}),
    "arange      ": ((11,), {"dtype": torch.float32}),
    "arange       ": ((3, 3), {}),
    "linspace": ((0, 1, 23), {}),
    "linspace ": ((2, 2, 5), {"dtype": torch.float64}),
    "logspace": ((0, 1, 5), {"base": 2.0}),
    "bartlett_window": ((7,), {}),
    "blackman_window": ((7,), {}),
    "hamming_window": ((7,), {"periodic": False}),
    "hann_window": ((7,), {}),
    "kaiser_window": ((7, True, 10.0), {}),
}


def everywhere(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layouts: list[tuple[Placement, tuple[Sbp, ...]]],
) -> None:
    want = getattr(torch, name.strip())(*args, **kwargs)

    def on_ranks() -> None:
        for placement, layout in layouts:
            with record_collectives() as log:
                x = getattr(flow, name.strip())(
                    *args, placement=placement, sbp=list(layout), **kwargs
                )
            assert not log, "creating communicates"
            assert isinstance(x, GlobalTensor)
            assert tuple(x.shape) == tuple(want.shape)
            assert x.dtype == want.dtype
            assert x.spec.layout == tuple(
                split(e.dim % want.ndim) if e.is_split else e for e in layout
            )
            assert tuple(x.to_local().shape) == x.spec.local_shape(flow.env.get_rank())
            got = x.numpy()
            assert np.array_equal(got, want.numpy()), (name, layout)

    simulate(4, on_ranks)


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name: str) -> None:
    everywhere(
        name,
        *MATRICES[name],
        [
            t
            for t in TABLES
            if MATRICES[name][1].get("dtype") is not torch.bool or not t[1][0].is_partial
        ],
    )


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    everywhere(name, *VECTORS[name], FLAT)


def test_scalars_and_empty() -> None:
    def on_ranks() -> None:
        assert float(flow.scalar_tensor(3.5, placement=LINE, sbp=partial_sum)) == 3.5
        assert float(flow.tensor(2.0, placement=LINE, sbp=broadcast)) == 2.0
        assert tuple(flow.empty(0, 3, placement=LINE, sbp=S0).numpy().shape) == (0, 3)
        assert tuple(
            flow.empty(5, 3, dtype=torch.bfloat16, placement=GRID, sbp=[S0, S1]).shape
        ) == (5, 3)

    simulate(4, on_ranks)


def test_without_placement_it_is_torch() -> None:
    x = flow.ones(2, 3, dtype=torch.float64, requires_grad=True)
    assert type(x) is Tensor
    assert x.requires_grad
    assert torch.equal(flow.zeros_like(x), torch.zeros(2, 3, dtype=torch.float64))
    for name in creation.__all__:
        assert getattr(flow, name) is getattr(creation, name)


def test_a_rank_makes_its_own_part_only() -> None:
    def on_ranks() -> None:
        four = Placement("cpu", list(range(4)))
        x = flow.zeros(4, 1 << 20, placement=four, sbp=S0)
        assert x.to_local().shape == (1, 1 << 20)
        assert x.to_local().untyped_storage().nbytes() == 4 << 20
        assert (
            flow.arange(1 << 22, placement=four, sbp=S0).to_local()[0] == flow.env.get_rank() << 20
        )

    simulate(4, on_ranks)


def test_likes() -> None:
    def on_ranks() -> None:
        x = flow.ones(5, 4, dtype=torch.float64, placement=GRID, sbp=[S0, broadcast])
        for name, args in (
            ("zeros", ()),
            ("ones", ()),
            ("full", (2.5,)),
            ("empty", ()),
            ("rand", ()),
            ("randn", ()),
            ("randint", (9,)),
        ):
            y = getattr(torch, name + "_like")(x, *args)
            assert y.spec is x.spec, name
            z = getattr(flow, name + "_like")(
                x, *args, dtype=torch.float32, sbp=[S1, S0], device=x.device
            )
            assert z.spec is x.spec.replace(dtype=torch.float32, layout=[S1, S0])
            moved = getattr(flow, name + "_like")(
                x, *args, placement=LINE, sbp=S1, requires_grad=True
            )
            assert moved.placement is LINE
            assert moved.requires_grad
            made = getattr(flow, name + "_like")(torch.empty(3, 2), *args, placement=LINE, sbp=S0)
            assert tuple(made.shape) == (3, 2)
        assert float(torch.full_like(x, 2.5).sum()) == 50.0
        assert float(flow.full_like(x, fill_value=2.0).sum()) == 40.0

    simulate(4, on_ranks)


#: Arguments of the creation functions by torch's names.
KEYWORDS: dict[str, dict[str, Any]] = {
    **{name: {"size": (3, 2)} for name in ("zeros", "ones", "empty", "rand", "randn")},
    **{name: {"data": [[1.0, 2.0]]} for name in ("tensor", "as_tensor")},
    **{name: {"row": 3, "col": 2, "offset": 0} for name in ("tril_indices", "triu_indices")},
    **{name: {"window_length": 4} for name in creation._WINDOWS},
    "full": {"size": (3, 2), "fill_value": 2.0},
    "eye": {"n": 3, "m": 2},
    "arange": {"start": 1, "end": 8, "step": 2},
    "linspace": {"start": 0, "end": 1, "steps": 4},
    "logspace": {"start": 0, "end": 1, "steps": 4},
    "scalar_tensor": {"s": 2.0},
    "randint": {"low": 0, "high": 5, "size": (3, 2)},
    "normal": {"mean": 0.0, "std": 1.0, "size": (3, 2)},
    "randperm": {"n": 4},
    **{name: {} for name in creation.LIKES},
    "full_like": {"fill_value": 2.0},
    "randint_like": {"low": 0, "high": 5},
}


@pytest.mark.parametrize("name", creation.__all__)
def test_arguments_by_name(name: str) -> None:
    words = KEYWORDS[name]

    def on_ranks() -> None:
        plain = torch.ones(3, 2)
        shared = plain.to_global(ONE, broadcast)  # type: ignore[attr-defined]
        inputs = [{"input": x} for x in (plain, shared)] if name in creation.LIKES else [{}]
        for given in inputs:
            want = getattr(torch, name)(**words, **({"input": plain} if given else {}))
            results = [
                getattr(flow, name)(**given, **words),
                getattr(torch, name)(**given, **words),
                getattr(flow, name)(**given, **words, placement=ONE, sbp=broadcast),
            ]
            for got in results:
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert [x.is_global for x in results] == [*[given.get("input") is shared] * 2, True]

    simulate(1, on_ranks)


@pytest.mark.parametrize(
    "name",
    ["clone", "detach", "numel", "is_complex", "is_floating_point", "is_conj", "is_inference"],
)
def test_the_input_of_a_handler_by_name(name: str) -> None:
    def on_ranks() -> None:
        x = flow.ones(3, 2, placement=ONE, sbp=broadcast)
        got, want = (getattr(torch, name)(input=t) for t in (x, torch.ones(3, 2)))
        assert (got.tolist() == want.tolist()) if isinstance(want, Tensor) else got == want
        assert torch.equal(input=x, other=x)
        assert torch.fill_(input=x, value=2).tolist() == [[2.0] * 2] * 3
        assert torch.zero_(input=x).tolist() == [[0.0] * 2] * 3

    simulate(1, on_ranks)


def test_new() -> None:
    def on_ranks() -> None:
        x = flow.ones(5, 4, dtype=torch.float64, placement=GRID, sbp=[S0, broadcast])
        b = [broadcast, broadcast]
        assert float(x.new_ones(2, 2).sum()) == 4.0
        made = [
            x.new_ones(2, 2),
            x.new_zeros((2, 2)),
            x.new_empty((2, 2)),
            x.new_full((2, 2), 3),
            x.new_tensor([[1, 2], [3, 4]]),
        ]
        for y in (*made, torch.Tensor.new_ones(x, (2, 2))):
            assert list(y.sbp) == b
            assert y.placement is GRID
            assert y.dtype == torch.float64
        assert (
            x.new_zeros(3, dtype=torch.int64, device="cpu", requires_grad=False).dtype
            == torch.int64
        )
        assert x.new_ones((6, 2), placement=LINE, sbp=S0).to_local().shape in ((2, 2), (0,))
        there = Placement("meta", GRID.ranks)
        for y in (
            x.new_ones(2, device="meta"),
            torch.zeros_like(x, device="meta"),
            torch.empty_like(x, device=torch.device("meta")),
        ):
            assert y.is_meta
            assert y.placement is there
        assert y.sbp == x.sbp
        back = torch.full_like(y, 3.0, device="cpu")
        assert back.placement is GRID
        assert np.array_equal(back.numpy(), np.full((5, 4), 3.0))
        with pytest.raises(PlacementError, match="device"):
            x.new_ones(2, device="meta", placement=LINE, sbp=S0)
        with pytest.raises(PlacementError, match=r"no values to put on .*torch.empty_like"):
            torch.ones(2, device="meta").to_global(LINE, S0)
        with pytest.raises(PlacementError, match="leave out device"):
            x.new_ones(2, placement=LINE, device="cuda")

    simulate(4, on_ranks)


def test_the_old_constructor() -> None:
    def on_ranks() -> None:
        for x in (
            flow.Tensor(2, 3, placement=LINE, sbp=S0),
            flow.Tensor(torch.Size((2, 3)), placement=LINE, sbp=S0),
        ):
            assert (x.shape, x.dtype, x.sbp) == ((2, 3), torch.float32, (S0,))
        rows = [[1, 2], [3, 4]]
        for data in (
            rows,
            np.array(rows),
            torch.tensor(rows),
            flow.tensor(rows, placement=LINE, sbp=broadcast),
        ):
            x = flow.Tensor(data, placement=LINE, sbp=S0)
            assert (x.dtype, x.sbp, x.tolist()) == (torch.float32, (S0,), rows)

    simulate(3, on_ranks)
    plain = flow.Tensor([[1, 2]])
    assert type(plain) is torch.Tensor
    assert (torch.Tensor, flow.nn.Parameter(plain).__class__.__mro__[1]) == (
        flow.Tensor,
        flow.Tensor,
    )
    assert isinstance(plain, flow.Tensor)
    assert issubclass(GlobalTensor, flow.Tensor)
    assert not isinstance(3, flow.Tensor)
    assert flow.Tensor.add is torch.Tensor.add


def test_typed_constructors() -> None:
    def on_ranks() -> None:
        for kind in (
            "BFloat16",
            "Bool",
            "Byte",
            "Char",
            "Double",
            "Float",
            "Half",
            "Int",
            "Long",
            "Short",
        ):
            made, own = getattr(flow, f"{kind}Tensor"), getattr(torch, f"{kind}Tensor")
            x = made([[1, 0], [1, 1], [0, 1]], placement=LINE, sbp=S0)
            assert (x.dtype, x.sbp, x.tolist()) == (
                own.dtype,
                (S0,),
                own([[1, 0], [1, 1], [0, 1]]).tolist(),
            )
            assert (
                made(2, 3, placement=LINE, sbp=S0).shape,
                made(2, 3).shape,
                type(made(2, 3)),
            ) == ((2, 3), (2, 3), torch.Tensor)
            assert (made == own, isinstance(x, made), made.dtype) == (True, True, own.dtype)
            assert (
                isinstance(x, flow.Tensor),
                torch.ones(2).type(made).dtype,
                x.double().type(made).dtype,
            ) == (True, own.dtype, own.dtype)
            with pytest.raises(PlacementError, match=rf"{kind}Tensor got sbp=.*add placement="):
                made(2, 3, sbp=S0)
        with pytest.raises(PlacementError, match=r"^Tensor got sbp="):
            flow.Tensor(2, 3, sbp=S0)

    simulate(3, on_ranks)


def test_global_ids_are_the_same_on_every_rank() -> None:
    def on_ranks() -> list[int]:
        x, y = (flow.zeros(2, placement=LINE, sbp=S0) for _ in range(2))
        assert x.global_id() == x.global_id()
        return [x.global_id(), y.global_id(), (x + y).global_id()]

    first, *others = simulate(3, on_ranks)
    assert len(set(first)) == 3
    assert all(ids == first for ids in others)


NUMPY: dict[str, Callable[[Any, Any], Any]] = {
    "x + a": lambda x, a: x + a, "x - a": lambda x, a: x - a, "x * a": lambda x, a: x * a,
    "x / a": lambda x, a: x / a, "x // a": lambda x, a: x // a,
    "x % a": lambda x, a: x % a, "x ** a": lambda x, a: x**a, "x @ a": lambda x, a: x @ a,
    "a / x": lambda x, a: a / x, "x == a": lambda x, a: x == a,
    "sin": lambda x, a: np.sin(x), "isnan": lambda x, a: np.isnan(x), "maximum": np.maximum,
    "exp of a sum": lambda x, a: np.exp(x.sum()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:__array_wrap__")
@pytest.mark.parametrize("name", NUMPY)
def test_what_numpy_makes_of_a_global_tensor_is_global(name: str) -> None:
    values, array = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), np.array([[2.0, 2.0], [1.0, 3.0]])
    want = NUMPY[name](values, array)

    def on_ranks() -> None:
        for sbp in (S0, broadcast, partial_sum):
            got = NUMPY[name](flow.tensor(values.tolist(), placement=LINE, sbp=sbp), array)
            assert got.is_global
            assert got.placement == LINE
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-6)

    simulate(4, on_ranks)


def test_in_place_and_out() -> None:
    def on_ranks() -> None:
        for placement, layout in ((LINE, (S0,)), (LINE, (partial_sum,)), (GRID, (S1, S0))):
            x = flow.ones(4, 4, placement=placement, sbp=list(layout))
            assert float(x.fill_(2.0).sum()) == 32.0
            assert float(x.zero_().sum()) == 0.0
            assert x.spec.layout == layout
            assert float(nn.init.constant_(x, 3.0).sum()) == 48.0
        w = flow.empty(4, 3, placement=GRID, sbp=[S0, S1])
        nn.init.eye_(w)
        assert np.array_equal(w.numpy(), torch.eye(4, 3).numpy())
        torch.arange(6, out=(v := flow.empty(6, dtype=torch.int64, placement=LINE, sbp=S0)))
        assert v.tolist() == list(range(6))
        flow.arange(1, 7, out=v, placement=LINE, sbp=S0)  # the same placement and sbp, stated again
        assert v.tolist() == list(range(1, 7))
        with flow.utils.global_view.global_mode(True, LINE, broadcast):
            flow.arange(2, 8, out=v)
        assert v.tolist() == list(range(2, 8))
        with pytest.raises(PlacementError, match="already has a layout"):
            flow.arange(6, out=v, placement=LINE, sbp=broadcast)

    simulate(4, on_ranks)


def test_gradients() -> None:
    def on_ranks() -> None:
        for layout in ((S0,), (broadcast,)):
            x = flow.full((5, 2), 3.0, placement=LINE, sbp=list(layout), requires_grad=True)
            assert x.is_leaf
            assert x.requires_grad
            (x * x).sum().backward()
            assert x.grad is not None
            assert np.array_equal(x.grad.numpy(), np.full((5, 2), 6.0, dtype=np.float32))

    simulate(4, on_ranks)


def test_a_device_says_the_placements_type() -> None:
    def on_ranks() -> None:
        x = flow.ones(5, 3, placement=LINE, sbp=S0)
        elsewhere = LINE.with_type("meta")
        for y in (
            torch.empty_like(x, device="meta"),
            torch.zeros_like(x, device=torch.device("meta")),
            flow.tensor(x, device="meta"),
        ):
            assert (y.placement, y.sbp, y.shape) == (elsewhere, (S0,), (5, 3))
        assert x.new_ones(2, device="meta").placement == elsewhere
        assert torch.ones_like(x, device="cpu").placement is LINE
        model = nn.Linear(3, 5).to_global(LINE, S0).to_empty(device="meta")
        assert (model.weight.placement, model.weight.sbp) == (elsewhere, (S0,))
        nn.init.ones_(model.to_empty(device="cpu").weight)
        assert model.weight.tolist() == [[1.0] * 3] * 5

    simulate(4, on_ranks)


def test_from_a_plain_tensor() -> None:
    """The copy is made without torch's warning about copies, which would name a line of ours."""
    data = torch.arange(5.0)

    def on_ranks() -> None:
        x = flow.tensor(data, placement=LINE, sbp=S0)
        assert (x.tolist(), x.dtype) == ([0, 1, 2, 3, 4], torch.float32)
        x.zero_()
        assert data.tolist() == [0, 1, 2, 3, 4]
        y = flow.tensor(data=data, dtype=torch.float64, requires_grad=True, placement=ONE, sbp=S0)
        assert (y.dtype, y.requires_grad, y.is_leaf) == (torch.float64, True, True)
        with pytest.raises(TypeError):
            flow.tensor(data, dtype="float64", placement=LINE, sbp=S0)

    simulate(4, on_ranks)


def test_from_a_global_tensor() -> None:
    def on_ranks() -> None:
        x = flow.arange(5, dtype=torch.float64, placement=LINE, sbp=S0).requires_grad_()
        with pytest.raises(TypeError, match=r"argument 'dtype' must be torch\.dtype, not str"):
            flow.tensor(x, dtype="float64")
        y = x * 2
        for copy in (
            flow.tensor(y),
            flow.tensor(data=y, requires_grad=True),
            y.new_tensor(y),
            flow.tensor(y, device="cpu", dtype=torch.float32),
        ):
            assert copy.is_leaf
            assert (copy.sbp, copy.placement) == ((S0,), LINE)
            assert copy.tolist() == [0, 2, 4, 6, 8]
            copy.detach().zero_()
            assert y.tolist() == [0, 2, 4, 6, 8]
        assert flow.tensor(y, requires_grad=True).requires_grad
        assert flow.as_tensor(y) is y
        single = flow.as_tensor(y, dtype=torch.float32, placement=ONE, sbp=broadcast)
        assert (single.dtype, single.sbp, single.placement) == (torch.float32, (broadcast,), ONE)
        single.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 5
        assert x.detach().int().new_tensor(y).dtype == torch.int32
        assert flow.tensor(y, sbp=broadcast).sbp == (broadcast,)

    simulate(4, on_ranks)


BAD: list[tuple[Callable[[], Any], type[GlobalTensorError], str]] = [
    (lambda: flow.ones(2, 2, placement=ONE), SbpError, "no sbp"),
    (lambda: flow.ones(2, 2, sbp=S0), PlacementError, "no placement"),
    (lambda: flow.zeros_like(torch.ones(2), sbp=S0), PlacementError, "no placement"),
    (lambda: flow.ones(2, 2, placement=[0], sbp=S0), PlacementError, "placement"),
    (lambda: flow.ones(2, 2, placement=ONE, sbp=[S0, S1]), SbpError, "2 entries"),
    (lambda: flow.ones(2, 2, placement=ONE, sbp=split(2)), SbpError, "dim 2"),
    (lambda: flow.ones(2, 2, placement=ONE, sbp="split"), SbpError, "split"),
    (lambda: flow.ones(2, 2, placement=ONE, sbp=S0, device="cpu"), PlacementError, "device"),
    (lambda: flow.ones(2, 2, placement=ONE, sbp=S0, out=torch.empty(2, 2)), PlacementError, "out"),
    (lambda: flow.ones(2, placement=Placement("cpu", [0, 7]), sbp=S0), PlacementError, "rank 7"),
    (
        lambda: flow.tensor(flow.ones(2, placement=ONE, sbp=S0), placement=ONE, device="cuda"),
        PlacementError,
        "leave out device",
    ),
    (lambda: flow.zeros(2, 2, layout=torch.sparse_coo, placement=ONE, sbp=S0), SbpError, "layout"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_arguments(number: int) -> None:
    call, error, words = BAD[number]
    with pytest.raises(error, match=words):
        call()
