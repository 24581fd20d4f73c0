"""Tests of calls that reach torch's code below its functions: each error names a function that the
user knows, and what works instead. The named ways work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.pool import run_on
from torch.distributed.fsdp import fully_shard

import globaltensor as flow
from globaltensor.distributed.world import world
from globaltensor.errors import GlobalTensorError, KernelError, KindError

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def value() -> torch.Tensor:
    return torch.arange(12.0, dtype=torch.float64).view(4, 3)


def spread() -> Any:
    return value().to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))


def refusal(call: Callable[[], Any], kind: type[GlobalTensorError] = KernelError) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about copies and prototypes
        with pytest.raises(kind) as error:
            call()
    return str(error.value)


def same_on_ranks(fn: Callable[..., dict[str, str]]) -> dict[str, str]:
    texts, others = run_on(2, fn)
    assert texts == others
    return texts


def conversions() -> dict[str, str]:
    g, plain = spread(), torch.ones(2, dtype=torch.float64)
    calls: dict[str, Callable[[], Any]] = {
        "tensor": lambda: torch.tensor(g),
        "tensor by name": lambda: torch.tensor(data=g),
        "as_tensor": lambda: torch.as_tensor(g, dtype=torch.float32),
        "asarray": lambda: torch.asarray(g, dtype=torch.float32),
        "asarray, a copy": lambda: torch.asarray(g, copy=True),
        "Tensor": lambda: torch.Tensor(g),
        "DoubleTensor": lambda: torch.DoubleTensor(g),
        "new_tensor": lambda: plain.new_tensor(g),
        "new": lambda: plain.new(g),  # type: ignore[attr-defined]
        "nested_tensor": lambda: torch.nested.nested_tensor([g[0], g[1]]),
        "as_subclass": lambda: g.as_subclass(torch.Tensor),
    }
    return {name: refusal(call) for name, call in calls.items()}


def test_conversions_name_the_ways_to_copy_and_to_read() -> None:
    texts = same_on_ranks(conversions)
    assert len(texts) == 11
    for name, text in texts.items():
        for way in ("x.detach().clone()", "x.to(dtype)", "flow.tensor(x)", "x.to_local()"):
            assert way in text, (name, text)


def converted() -> list[bool]:
    g = spread()
    copies = flow.tensor(g), flow.as_tensor(g, dtype=torch.float32), g.detach().clone()
    return [c.sbp == (S(0),) and c.tolist() == value().tolist() for c in copies]


def test_these_ways_keep_the_layout() -> None:
    assert run_on(2, converted) == [[True] * 3] * 2


def of_other_kinds() -> dict[str, str]:
    g, places = spread()[0], torch.tensor([[0, 1, 2]])
    offsets, columns = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2])
    calls: dict[str, Callable[[], Any]] = {
        "coo": lambda: torch.sparse_coo_tensor(places, g, (3,)),
        "coo without a size": lambda: torch.sparse_coo_tensor(places, g),
        "coo, indices": lambda: torch.sparse_coo_tensor(
            places.to_global(g.placement, B),  # type: ignore[attr-defined]
            torch.ones(3),
            (3,),
        ),
        "csr": lambda: torch.sparse_csr_tensor(offsets, columns, g, (3, 3)),
        "as_nested_tensor": lambda: torch.nested.as_nested_tensor([g, g]),
        "jagged": lambda: torch.nested.as_nested_tensor([g, g], layout=torch.jagged),
        "nested view": lambda: torch.nested.as_nested_tensor(spread()),
    }
    return {name: refusal(call) for name, call in calls.items()}


def test_sparse_and_nested_tensors_of_global_ones_name_the_local_tensor() -> None:
    for name, text in same_on_ranks(of_other_kinds).items():
        for way in ("x.to_local()", "x.to_global(sbp=flow.sbp.broadcast).to_local()"):
            assert way in text, (name, text)


def transformed() -> dict[str, str]:
    g = spread()

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() ** 2).sum()

    one = torch.ones((), dtype=torch.float64)
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(f)(g),
        "grad of grad": lambda: torch.func.grad(torch.func.grad(torch.sin))(g.sum()),
        "vjp": lambda: torch.func.vjp(f, g)[1](one),
        "jacrev": lambda: torch.func.jacrev(torch.sin)(g),
        "vmap": lambda: torch.vmap(torch.sin)(g),
        "a global tensor from outside": lambda: torch.func.vjp(lambda x: (x * g).sum(), one),
    }
    return {name: refusal(call) for name, call in calls.items()}


def test_transforms_name_the_functions_that_compute_the_same() -> None:
    for name, text in same_on_ranks(transformed).items():
        for way in ("torch.autograd.functional.vjp, jacobian and hessian", "local_map"):
            assert way in text, (name, text)


def functionals() -> list[bool]:
    x, g = value(), spread()

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() ** 2).sum()

    functional = torch.autograd.functional
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda x: functional.vjp(f, x)[1],
        lambda x: functional.jacobian(lambda x: x.sin().sum(1), x),
        lambda x: functional.hessian(f, x),
    )
    return [torch.allclose(torch.tensor(call(g).tolist()), call(x).float()) for call in calls]


def test_these_functions_work() -> None:
    assert run_on(2, functionals) == [[True] * 3] * 2


def checked() -> dict[str, str]:
    g = spread().requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        torch.manual_seed(0)  # it draws gradients, the same on every rank
        assert check(torch.sin, (g,), check_undefined_grad=False)
    return {
        "gradcheck": refusal(lambda: torch.autograd.gradcheck(torch.sin, (g,))),
        "gradgradcheck": refusal(lambda: torch.autograd.gradgradcheck(torch.sin, (g,))),
    }


def test_gradcheck_names_the_option_with_which_it_works() -> None:
    for text in same_on_ranks(checked).values():
        assert "check_undefined_grad=False" in text


def quantized() -> dict[str, str]:
    g = spread().float()
    scales, zeros = torch.ones(4), torch.zeros(4).long()
    calls = {
        "quantize_per_tensor": lambda: torch.quantize_per_tensor(g, 0.1, 0, torch.quint8),
        "quantize_per_channel": lambda: torch.quantize_per_channel(
            g, scales, zeros, 0, torch.quint8
        ),
        "quantize_per_tensor_dynamic": lambda: torch.quantize_per_tensor_dynamic(
            g, torch.quint8, False
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these functions are deprecated
        for local in (g.to_local(), g.to_global(sbp=B).to_local()):
            assert torch.quantize_per_tensor(local, 0.1, 0, torch.quint8).is_quantized
    assert (g / 0.5).round().to(torch.int8).tolist() == (value() / 0.5).tolist()
    return {name: refusal(call) for name, call in calls.items()}


def wrapped() -> dict[str, str]:
    model = nn.Linear(4, 2)
    flow.parallelize(model, flow.placement.all("cpu"), "data")
    texts = {
        "ddp": refusal(lambda: nn.parallel.DistributedDataParallel(model)),
        "fsdp": refusal(lambda: fully_shard(model)),
    }
    world().forget()  # each rank has cut its own part out of the parameters: the ranks diverged
    world().comm(tuple(range(world().size))).barrier()
    return texts


def test_wrappers_of_torch_say_that_the_model_is_parallel_already() -> None:
    texts = same_on_ranks(wrapped)
    assert texts == {
        name: f"torch's {wrapper} was called on a model whose parameters are global tensors. Leave "
        f'it out: flow.parallelize(model, placement, "{plan}") does its work already, and backward '
        f"sums the gradients over the ranks"
        for name, wrapper, plan in (
            ("ddp", "DistributedDataParallel", "data"),
            ("fsdp", "fully_shard", "fsdp"),
        )
    }


def test_quantizing_names_ways_to_small_numbers() -> None:
    for name, text in same_on_ranks(quantized).items():
        for words in (f"torch.{name},", "x.to_local()"):
            assert words in text, (name, text)


def swapped() -> dict[str, str]:
    g, plain = spread(), value()
    module = nn.Linear(3, 2).double().to_global(g.placement, B)
    swap = torch.utils.swap_tensors
    texts = {
        "plain, global": refusal(lambda: swap(plain, g), KindError),
        "global, plain": refusal(lambda: swap(g, plain), KindError),
        "parameters": refusal(lambda: swap(nn.Parameter(plain), nn.Parameter(g)), KindError),
        "a global parameter": refusal(lambda: swap(module.weight, g), KindError),
    }
    other = torch.zeros(4, 3, dtype=torch.float64).to_global(g.placement, B)
    swap(g, other)
    assert (g.sbp, other.sbp) == ((B,), (S(0),))
    assert not g.any()
    assert other.tolist() == value().tolist()
    return texts


def test_swapping_a_plain_tensor_with_a_global_one_says_why_and_what_to_do() -> None:
    for name, text in same_on_ranks(swapped).items():
        for words in ("x.copy_(y)", "x.to_global(placement, sbp)", "fields"):
            assert words in text, (name, text)


def assigned_to_plain() -> dict[str, str]:
    plain, g = torch.ones(4, 3, dtype=torch.complex128), spread()

    def assign() -> None:
        plain.real = g

    texts = {"real": refusal(assign)}
    plain.real.copy_(g)
    assert plain.real.tolist() == value().tolist()
    return texts


def test_a_component_of_a_plain_tensor_names_copy() -> None:
    assert "plain.real.copy_(x)" in same_on_ranks(assigned_to_plain)["real"]
