"""Tests of tensors that cannot be global (sparse, nested, quantized, of classes with values
elsewhere). Every rank raises the same error before any data moves."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.world import world
from globaltensor.errors import (
    DivergenceError,
    GlobalTensorError,
    KernelError,
    KindError,
    PlacementError,
    ShapeError,
)

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def everywhere() -> Any:
    return flow.placement.all("cpu")


class Wrapper(torch.Tensor):
    """A tensor that stores its values in another one, as weights of quantization libraries do."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        out: Any = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        out.held = held
        return out  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*[a.held if isinstance(a, Wrapper) else a for a in args], **(kwargs or {}))
        return Wrapper(out) if func is torch.ops.aten.detach.default else out


class Named(torch.Tensor):
    """A tensor whose class adds an attribute."""

    name = "rows"


class Tracked(nn.Parameter):
    """A parameter whose class intercepts every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Shown(nn.Parameter):
    """A parameter whose class adds its own printing and a method."""

    def __repr__(self) -> str:
        return "shown"

    def weight_loader(self) -> str:
        return "loaded"


class Slotted(nn.Parameter):
    """A parameter whose class has slots."""

    __slots__ = ("extra",)


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, 3)


def masked() -> Tensor:
    return torch.masked.masked_tensor(torch.ones(2, 3), torch.ones(2, 3).bool())  # type: ignore[no-any-return]


def distributed() -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (2,)))


def quietly(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the same function without torch's warnings that a kind is in beta."""

    def run() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return run


KINDS: dict[str, Callable[[], Tensor]] = {
    "sparse tensor (torch.sparse_coo)": lambda: torch.ones(2, 3).to_sparse(),
    "sparse tensor (torch.sparse_csr)": lambda: torch.ones(2, 3).to_sparse_csr(),
    "sparse tensor (torch.sparse_bsc)": lambda: torch.ones(2, 3).to_sparse_bsc((1, 1)),
    "MKL-DNN tensor": lambda: torch.ones(2, 3).to_mkldnn(),
    "nested tensor (torch.strided)": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)]
    ),
    "nested tensor (torch.jagged)": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "quantized tensor (torch.qint8)": lambda: torch.quantize_per_tensor(
        torch.ones(2, 3), 0.1, 0, torch.qint8
    ),
    "MaskedTensor": masked,
    "FakeTensor": fake,
    "DTensor": distributed,
    "Wrapper": lambda: Wrapper(torch.ones(2, 3)),
    "UninitializedParameter": nn.parameter.UninitializedParameter,
    "UninitializedBuffer": nn.parameter.UninitializedBuffer,
    "functional tensor": lambda: torch._to_functional_tensor(torch.ones(2, 3)),
}
KINDS = {name: quietly(make) for name, make in KINDS.items()}
#: Kinds that torch's functions accept together with ordinary tensors.
OPERANDS = ("sparse", "MKL-DNN", "Wrapper")


def refusal(call: Callable[[], Any], kind: type[Exception] = GlobalTensorError) -> str:
    """Return the error's text, and check that the ranks are still in step."""
    with pytest.raises(kind) as found:
        call()
    assert float(torch.ones(()).to_global(everywhere(), P).item()) == world().size
    return f"{type(found.value).__name__}: {found.value}"


def texts(odd_ranks: tuple[int, ...]) -> list[str]:
    """Return the error of each kind, where `odd_ranks` have a tensor of that kind and the other
    ranks an ordinary tensor."""
    out = []
    for make in KINDS.values():
        odd = make()
        x = odd if world().rank in odd_ranks else torch.ones(2, 3)
        with record_collectives() as moved:
            out += [
                refusal(functools.partial(flow.to_global, x, everywhere(), sbp))
                for sbp in (B, S(0), P)
            ]
        assert [m for m in moved if m.kind != "all_gather_object"][
            3:
        ] == []  # without the sums in `refusal`
    return out


@pytest.mark.parametrize("odd_ranks", [(0,), (1,), (0, 1)])
@pytest.mark.sweep(2)
def test_to_global_refuses_kinds_on_every_rank(odd_ranks: tuple[int, ...]) -> None:
    first, second = run_on(2, texts, odd_ranks)
    assert first == second
    for i, name in enumerate(KINDS):
        for text in first[3 * i : 3 * i + 3]:
            assert text.startswith("KindError: the argument of to_global is a")
            assert name in text
            assert (f", on rank {odd_ranks[0]} of 2: that cannot be global" in text) == (
                len(odd_ranks) < 2
            )


def without_exchange() -> str:
    assert refusal(lambda: flow.to_global({"a": [torch.ones(2).to_sparse()]}, everywhere(), B))
    return refusal(
        lambda: torch.ones(2, 3).to_sparse().to_global(everywhere(), B, check_meta=False), KindError
    )  # type: ignore[attr-defined]


def meta() -> list[str]:
    world().forget()  # what earlier tests have compared on these ranks is compared less often
    x: Any = torch.ones(2, device="meta" if world().rank else "cpu")
    g = torch.ones(2).to_global(everywhere(), B)
    on_one = [
        refusal(call, PlacementError)
        for call in (lambda: x.to_global(everywhere(), B), lambda: g + x)
    ]
    y: Any = torch.ones(2, device="meta")
    return [
        *on_one,
        *[
            refusal(call, PlacementError)
            for call in (lambda: y.to_global(everywhere(), B), lambda: g * y)
        ],
    ]


def outside() -> list[float]:
    """Check that a rank outside the placement may pass any kind of tensor."""
    held: list[Any] = [odd() for odd in KINDS.values()]
    return [
        (odd if world().rank else torch.ones(2))
        .to_global(flow.placement("cpu", [0]), B)
        .sum()
        .item()
        for odd in held
    ]


def test_to_global_of_kinds_elsewhere() -> None:
    for texts_of in (without_exchange, meta):
        first, second = run_on(2, texts_of)
        assert first == second
    assert run_on(2, outside) == [[2.0] * len(KINDS)] * 2


def still_works() -> list[Any]:
    base, where = torch.arange(6.0).view(2, 3), everywhere()
    x: Any = base.as_subclass(Named)
    trained: Any = base.clone().as_subclass(Named).requires_grad_()
    (trained.to_global(where, S(0)) * 2).sum().backward()
    out = [x.to_global(where, sbp).sum().item() for sbp in (B, S(0), P)]
    out += [
        trained.grad.tolist(),
        (torch.ones(4, 2).to_global(where, S(0)) @ x).sum().item(),
        type(x.to_global(where, S(0)).to_local()).__name__,
    ]
    layer: Any = nn.Linear(3, 2)
    layer.weight, layer.bias = Shown(torch.ones(2, 3)), nn.Parameter(torch.zeros(2))
    layer.register_buffer("rows", x.clone())
    layer.to_global(where, B)
    from torch.distributed._functional_collectives import all_reduce

    waited: Any = all_reduce(torch.ones(2), "sum", torch.distributed.group.WORLD)
    assert type(waited).__name__ == "AsyncCollectiveTensor"
    return [
        *out,
        layer(torch.ones(1, 3)).sum().item(),
        layer.rows.sum().item(),
        waited.to_global(where, B).sum().item(),
    ]


def test_classes_that_only_add_to_tensors_become_global() -> None:
    for got in run_on(2, still_works):
        assert got == [15.0, 30.0, 30.0, [[2.0] * 3] * 2, 120.0, "Named", 6.0, 15.0, 4.0]


# ------------------------------------------------------------------------------------------ modules

PARAMETERS: dict[str, Callable[[], Any]] = {
    "weight of Linear is an UninitializedParameter": nn.parameter.UninitializedParameter,
    "weight of Linear is a sparse tensor": lambda: nn.Parameter(torch.ones(2, 3).to_sparse()),
    "weight of Linear is a Wrapper": lambda: nn.Parameter(Wrapper(torch.ones(2, 3))),
    "weight of Linear is a Tracked, whose class has methods of its own (__torch_function__)": lambda: (  # noqa: E501
        Tracked(torch.ones(2, 3))
    ),
    "weight of Linear is a Slotted, whose class has slots of its own": lambda: Slotted(
        torch.ones(2, 3)
    ),
    "table of Linear is a quantized tensor": quietly(
        lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    ),
}


def modules() -> list[str]:
    out = []
    for make in PARAMETERS.values():
        layers: list[Callable[[nn.Module], Any]] = [
            lambda m: m.to_global(everywhere(), B),
            lambda m: flow.parallelize(m, everywhere(), {"*": B}),
        ]  # type: ignore[operator]
        layers += [
            lambda m, plan=plan: flow.parallelize(m, everywhere(), plan)
            for plan in ("data", "fsdp", "tensor", "sequence", "auto")
        ]  # type: ignore[misc]
        for lay_out in layers:
            model = nn.Linear(3, 2)
            model.register_buffer("table", torch.zeros(2, 3))
            value = make()
            if world().rank:
                model._parameters.update({"weight": value}) if isinstance(
                    value, nn.Parameter
                ) else model._buffers.update(table=value)
            before = list(model.parameters())
            out.append(refusal(lambda model=model, lay_out=lay_out: lay_out(model), KindError))  # type: ignore[misc]
            assert all(
                a is b and not getattr(a, "is_global", False)
                for a, b in zip(before, model.parameters(), strict=True)
            )
    return out


def test_modules_with_such_parameters_are_refused_on_every_rank() -> None:
    first, second = run_on(2, modules)
    assert first == second
    each = len(first) // len(PARAMETERS)
    for i, text in enumerate(PARAMETERS):
        assert all(
            text in got and ", on rank 1 of 2: " in got for got in first[each * i : each * i + each]
        ), text


def gradients() -> list[str]:
    out = []
    for odd, kind in ((True, KindError), (False, ShapeError)):
        table = nn.Embedding(4, 3, sparse=odd)
        if world().rank:
            table(torch.tensor([1, 2])).sum().backward()
        text = refusal(lambda table=table: table.to_global(everywhere(), B), kind)  # type: ignore[misc]
        out.append(text if odd else "a gradient on one rank only")
    return out


def test_gradients_of_parameters_are_told_too() -> None:
    first, second = run_on(2, gradients)
    assert first == second
    assert (
        "weight of Embedding is a parameter whose gradient is a sparse tensor (torch.sparse_coo), "
        "on rank 1 of 2" in first[0]
    )


def loads() -> list[str]:
    out = []
    for sbp in (B, S(0)):
        for name in (
            "sparse tensor (torch.sparse_coo)",
            "quantized tensor (torch.qint8)",
            "Wrapper",
            "MaskedTensor",
            "FakeTensor",
        ):
            model: Any = nn.Linear(3, 2).to_global(everywhere(), sbp)  # type: ignore[operator]
            odd = KINDS[name]() if world().rank else torch.ones(2, 3)
            with pytest.raises(RuntimeError) as found:
                model.load_state_dict({"weight": odd, "bias": torch.ones(2)})
            assert name in str(found.value)
            assert model.bias.sum().item() == 2
            out.append(str(found.value))
    return out


def test_state_dicts_with_such_tensors_are_refused_on_every_rank() -> None:
    first, second = run_on(2, loads)
    assert first == second


# ----------------------------------------------------------------------------------------- operands


def sees_functions(x: Tensor) -> bool:
    """Return True if the class's own __torch_function__ runs first when its tensor is the first
    operand. The class then raises its own error."""
    return any(
        "__torch_function__" in vars(c)
        for c in type(x).__mro__[: type(x).__mro__.index(Tensor)]
        if c is not nn.Parameter
    )


def operands(odd_ranks: tuple[int, ...], name: str) -> list[str]:
    odd, where = KINDS[name](), everywhere()
    x: Any = odd if world().rank in odd_ranks else torch.ones(2, 3)
    g = torch.arange(6.0).view(2, 3).to_global(where, B)
    leaf: Any = torch.ones(2, 3).to_global(where, S(0)).requires_grad_()
    calls: list[Callable[[], Any]] = [
        lambda: g + x,
        lambda: g * x if sees_functions(x) else x * g,
        lambda: torch.where(g > 1, g, x),
        lambda: torch.cat([g, x]),
        lambda: g.clone().add_(x),
        lambda: g.clone().copy_(x),
        lambda: g.clone().__setitem__(slice(None), x),
        lambda: torch._foreach_add_([g.clone()], [x]) if "Uninitialized" not in name else g - x,
        lambda: (leaf * 2).backward(x),
        lambda: flow.local_map(lambda a, b: a, out_sbp=B, in_sbp=(B, B))(g, x),
        lambda: g.to_global(sbp=S(0)) + x,
    ]
    return [refusal(call) for call in calls]


@pytest.mark.parametrize("odd_ranks", [(0,), (1,)])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sweep(3)
def test_a_plain_operand_of_such_a_kind_on_one_rank_is_told_on_all(
    odd_ranks: tuple[int, ...], name: str
) -> None:
    first, second = run_on(2, operands, odd_ranks, name)
    assert first == second
    assert all(
        text.startswith("KindError")
        and f", on rank {odd_ranks[0]} of 2: that" in text
        and name in text
        for text in first
    ), first


@pytest.mark.parametrize("name", [n for n in KINDS if not n.startswith(OPERANDS)])
def test_a_plain_operand_of_such_a_kind_is_refused(name: str) -> None:
    first, second = run_on(2, operands, (0, 1), name)
    assert first == second
    assert all(text.startswith("KindError") and name in text for text in first), first


def sparse_operands() -> list[Any]:
    where = everywhere()
    g = torch.arange(12.0).view(4, 3).to_global(where, B)
    dense = torch.eye(4).roll(1, 0) * 2
    out = []
    for change in (dense.to_sparse, dense.to_sparse_csr, dense.to_sparse_csc):
        adjacency = quietly(change)()
        for sbp in (B, S(1)):
            x: Any = g.to_global(sbp=sbp)
            out.append(
                ((adjacency @ x).numpy() == (dense @ torch.arange(12.0).view(4, 3)).numpy())
                .all()
                .item()
            )
    mine = (dense * (1 + world().rank)).to_sparse()
    with pytest.raises(
        DivergenceError, match="a plain tensor that is used together with global tensors"
    ):
        mine @ g
    world().forget()
    return out


def test_sparse_operands_that_all_ranks_hold_alike_work() -> None:
    assert run_on(2, sparse_operands) == [[True] * 6] * 2


def elementwise_sparse() -> list[Any]:
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 5.0], [1.0, 1.0, 0.0]])
    value = torch.arange(12.0).view(4, 3)
    calls: dict[str, Any] = {
        "x * s": lambda x, s: x * s,
        "s * x": lambda x, s: s * x,
        "x + s": lambda x, s: x + s,
        "s + x": lambda x, s: s + x,
        "x - 2s": lambda x, s: torch.add(x, s, alpha=-2),
        "x += s": lambda x, s: x.clone().add_(s),
        "x *= s": lambda x, s: x.clone().mul_(s),
    }

    def outcome(call: Any, x: torch.Tensor, other: torch.Tensor) -> Any:
        x = x.detach().clone().requires_grad_()
        y = call(x, other)
        assert y.layout is torch.strided
        (y * y).sum().backward()
        assert x.grad is not None
        return y.tolist(), x.grad.tolist()

    wrong = []
    # A plan for a dense operand serves a sparse one too.
    operands = (dense.to_sparse(), dense, quietly(dense.to_sparse_csr)(), dense.to_sparse())
    for other in operands:
        for name, call in calls.items():
            want = outcome(call, value, dense)
            for sbp in (B, S(0), S(1), P):
                x: Any = value.to_global(everywhere(), B).to_global(sbp=sbp)
                if (got := outcome(call, x, other)) != want:
                    wrong.append((other.layout, name, sbp, got, want))
    return wrong


def test_elementwise_functions_take_the_dense_values_of_sparse_operands() -> None:
    assert run_on(2, elementwise_sparse) == [[], []]


def changed_kinds() -> list[Any]:
    g = torch.eye(4).roll(1, 0).to_global(everywhere(), B).to_global(sbp=S(0))
    dense = [quietly(change)().to_dense() for change in (g.to_sparse, g.to_sparse_csr)]
    assert all(x.layout is torch.strided and x.to_dense() is x for x in dense)
    with pytest.raises(KernelError, match="to_mkldnn, which makes a sparse, nested or MKL-DNN"):
        g.to_mkldnn()
    return [(x * 2).numpy().tolist() for x in dense]


def test_a_sparse_result_becomes_dense_again() -> None:
    want = (torch.eye(4).roll(1, 0) * 2).tolist()
    assert run_on(2, changed_kinds) == [[want] * 2] * 2


def results() -> list[str]:
    g = torch.ones(2, 3).to_global(everywhere(), B)
    return [
        refusal(
            lambda: flow.local_map(lambda a: a.to_sparse() if world().rank else a, out_sbp=B)(g),
            KindError,
        )
    ]


def batches() -> list[str]:
    loader = [torch.ones(2, 3).to_sparse() if world().rank else torch.ones(2, 3)]
    return [refusal(lambda: list(flow.utils.data.GlobalBatches(loader, everywhere())), KindError)]


def test_results_of_local_map_and_batches_of_such_kinds_are_refused() -> None:
    for program, what in (
        (results, "result 0 of local_map is a sparse"),
        (batches, "GlobalBatches: tensor 0 of a batch is a sparse"),
    ):
        first, second = run_on(2, program)
        assert first == second
        assert what in first[0]
        assert ", on rank 1 of 2: " in first[0]
