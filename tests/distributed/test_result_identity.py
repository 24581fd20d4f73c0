"""Tests that each function which makes a tensor gives it an identity that other ranks compare.

Two processes run each program: each makes two tensors, and one rank goes on with the other one.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.divergent_programs import B, Program, S, chosen, line, rows, silent
from support.pool import run_on
from torch import nn
from torch.utils.checkpoint import checkpoint

import globaltensor as flow
from globaltensor.utils.data import GlobalBatches, GlobalDataLoader


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class OneOfItsTensors(torch.autograd.Function):
    """A Function whose backward uses the gradient on one rank and a saved tensor on the other."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return chosen(grads[0], *ctx.saved_tensors) * 2


class OneOfItsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return chosen(*grads) * 2


def leaf(add: float = 0.0) -> Any:
    return rows(add).requires_grad_()


def pair() -> tuple[Any, Any]:
    return rows(), rows(1)


def used(some: Any, other: Any) -> None:
    """Read the sum of the first tensor on rank 0 and of the second one elsewhere."""
    chosen(some, other).sum().item()
    rows()  # an exchange, also if reading needs none


def each(make: Callable[[Any], Any]) -> Program:
    """Return a program that makes a tensor from each of two, and goes on with one of them."""
    return lambda: used(*map(make, pair()))


def of_one(make: Callable[[Any], Any]) -> Program:
    """Return a program that makes a tensor from one of two, then reads another one."""

    def run() -> None:
        a, b = pair()
        make(chosen(a, b)).sum().item()

    return run


def foreach_norms() -> None:
    torch._foreach_norm([chosen(*pair())])[0].item()


def foreach_factor() -> None:
    a, factors = rows(), [torch.tensor(n).double().to_global(line(), B) for n in (2.0, 3.0)]
    torch._foreach_mul([a], chosen(*factors))[0].sum().item()


def foreach_maximum() -> None:
    a, b = pair()
    torch._foreach_maximum([a], [chosen(a, b)])[0].sum().item()


def foreach_results() -> None:
    used(*torch._foreach_mul(list(pair()), 2.0))


def clipped_norms() -> None:
    a, b = leaf(), leaf(1)
    (a * a + b * b).sum().backward()
    nn.utils.get_total_norm([chosen(a, b).grad]).item()


def custom_function_backward(function: Any) -> Program:
    def run() -> None:
        x = leaf()
        out = function.apply(x)
        (out if isinstance(out, torch.Tensor) else out[0] + out[1]).sum().backward()
        x.grad.sum().item()

    return run


def checkpointed_backward() -> None:
    x, y = leaf(), leaf(1)

    def product(a: Any, b: Any) -> Any:
        return chosen(a, b).sin() * (a * b)

    checkpoint(product, x * 1, y * 1, use_reentrant=True).sum().backward()
    (x.grad + y.grad).sum().item()


def mapped(x: Any) -> Any:
    return flow.local_map(torch.neg, S(0))(x)


def loader_batch() -> None:
    data = torch.utils.data.TensorDataset(*[torch.arange(8.0).view(8, 1) + n for n in (0, 1)])
    used(*next(iter(GlobalDataLoader(data, placement=line(), batch_size=4))))


def loaders() -> None:
    data = torch.arange(8.0).view(8, 1)
    made = [GlobalDataLoader(data + n, placement=line(), batch_size=4) for n in (0, 1)]
    used(*[next(iter(loader)) for loader in made])


def batch() -> None:
    rank = float(flow.env.get_rank())
    used(*next(iter(GlobalBatches([(torch.full((2, 1), rank), torch.ones(2, 1))], line()))))


def batches() -> None:
    used(*GlobalBatches([torch.ones(2, 1), torch.zeros(2, 1)], line()))


def saved_and_loaded() -> None:
    file = io.BytesIO()
    torch.save(pair(), file)
    file.seek(0)
    used(*torch.load(file))


def batch_norm() -> None:
    x = rows().to_global(sbp=B)
    means = [make(x[0]) for make in (torch.zeros_like, torch.ones_like)]
    F.batch_norm(x, chosen(*means), torch.ones_like(x[0]))
    rows()


def layers_with_hooks() -> None:
    layers = [nn.Linear(3, 3).double().to_global(line(), B) for _ in range(2)]  # type: ignore[operator]
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: None)
    x = leaf()
    used(*[layer(x) for layer in layers])


def hooked_gradients() -> None:
    x, y, seen = leaf(), leaf(1), []
    for t in (x, y):
        t.register_hook(lambda grad: seen.append(grad * 1))
    (x * y).sum().backward()
    used(*seen)


def optimizer_state(*keys: str) -> Program:
    """Return a program that uses one of two tensors in the state of an optimizer.

    They are of two parameters, or have two keys."""

    def run() -> None:
        layers = [nn.Linear(3, 3, bias=False).double().to_global(line(), B) for _ in range(2)]  # type: ignore[operator]
        optimizer = torch.optim.Adam([layer.weight for layer in layers], 0.1)
        layers[1](layers[0](rows())).sum().backward()
        optimizer.step()
        some, other = layers if len(keys) == 1 else layers[:1] * 2
        used(optimizer.state[some.weight][keys[0]], optimizer.state[other.weight][keys[-1]])

    return run


def gradients() -> None:
    x, y = leaf(), leaf(1)
    used(*torch.autograd.grad((x * y).sum(), (x, y)))


def on_two_placements() -> None:
    one = flow.placement("cpu", [0])
    a, b = pair()
    factor = flow.ones((), placement=one, sbp=B, dtype=torch.float64)
    used(a * factor, b * factor)


PROGRAMS: dict[str, Program] = {
    **{f"{name}()": each(lambda x, name=name: getattr(x, name)()) for name in (
        "half", "float", "bfloat16", "int", "long", "short", "char", "byte", "bool", "cfloat",
        "cdouble")},
    "to(dtype)": each(lambda x: x.to(torch.float32)),
    "to(tensor)": each(lambda x: x.to(torch.ones(1))),
    "type": each(lambda x: x.type(torch.float32)),
    "type_as": each(lambda x: x.type_as(torch.ones(1))),
    "torch.Tensor.float": each(torch.Tensor.float),
    "plain.type_as": lambda: used(*[torch.ones(4, 3).add(n).type_as(rows()) for n in (0, 1)]),
    "float, of one": of_one(lambda x: x.float()),
    "deepcopy": each(copy.deepcopy),
    "deepcopy of a list": lambda: used(*copy.deepcopy(list(pair()))),
    "deepcopy of a module": lambda: used(*copy.deepcopy(nn.ParameterList(
        [nn.Parameter(x) for x in pair()]))),
    "deepcopy, of one": of_one(copy.deepcopy),
    "copy": each(copy.copy),
    "copy of a view": each(lambda x: copy.copy(x.t()[1:])),
    "deepcopy of a view": each(lambda x: copy.deepcopy(x.detach()[1:])),
    ".data": each(lambda x: x.data),
    ".data of a view": each(lambda x: x[1:].data),
    "detach of a view": each(lambda x: x[1:].detach()),
    "view": each(lambda x: x[1:]),
    "pickle": each(lambda x: pickle.loads(pickle.dumps(x))),
    "torch.load": saved_and_loaded,
    "contiguous": each(lambda x: x.t().contiguous()),
    "contiguous(channels_last)": each(lambda x: x.view(4, 3, 1, 1).contiguous(
        memory_format=torch.channels_last)),
    "Parameter": each(nn.Parameter),
    "Function": lambda: used(*[Square.apply(x) for x in (leaf(), leaf(1))]),
    "Function without gradient": each(Square.apply),
    "gradient and saved tensor": custom_function_backward(OneOfItsTensors),
    "gradients of a Function": custom_function_backward(OneOfItsGradients),
    "checkpoint": lambda: used(*[checkpoint(torch.sin, x, use_reentrant=True)
        for x in (leaf(), leaf(1))]),
    "inputs of a checkpoint": checkpointed_backward,
    "local_map": each(mapped),
    "local_map, of one": of_one(mapped),
    "results of local_map": lambda: used(*flow.local_map(
        lambda x: (x, x + 1), [S(0), S(0)])(rows())),
    "zeros_like": each(torch.zeros_like),
    "ones_like": each(torch.ones_like),
    "zeros_like and ones_like": lambda: used(torch.zeros_like(rows()), torch.ones_like(rows())),
    "full_like": each(lambda x: torch.full_like(x, 2.0)),
    "empty_like": each(lambda x: torch.empty_like(x).fill_(1.0)),
    "rand_like": each(lambda x: torch.rand_like(x)),
    "new_ones": each(lambda x: x.new_ones(4, 3)),
    "flow.tensor": lambda: used(*[flow.tensor([1.0, n], placement=line(), sbp=B)
        for n in (0.0, 1.0)]),
    "flow.as_tensor": each(lambda x: flow.as_tensor(x, dtype=torch.float32)),
    "foreach norm": foreach_norms,
    "foreach factor": foreach_factor,
    "foreach maximum": foreach_maximum,
    "foreach results": foreach_results,
    "foreach norms": lambda: used(*torch._foreach_norm(list(pair()))),
    "total norm": clipped_norms,
    "GlobalDataLoader": loader_batch,
    "two loaders": loaders,
    "GlobalBatches": batch,
    "two batches": batches,
    "batch_norm": batch_norm,
    "hooks of modules": layers_with_hooks,
    "hooks of tensors": hooked_gradients,
    "autograd.grad": gradients,
    "optimizer state": optimizer_state("exp_avg"),
    "optimizer state, two keys": optimizer_state("exp_avg", "exp_avg_sq"),
    "several placements": on_two_placements,
    "numpy": lambda: used(*[np.sin(x) for x in pair()]),
    "filled": of_one(lambda x: x.normal_(generator=torch.Generator().manual_seed(1))),
}  # fmt: skip


def programs_of_two_ranks() -> list[str]:
    return silent(PROGRAMS)


def test_results_of_each_function_are_told_apart() -> None:
    assert run_on(2, programs_of_two_ranks) == [[], []]


def steps_of_one_rank() -> list[float]:
    """Run on one rank alone what makes a tensor without a message."""
    x, y = leaf(), leaf(1)
    layer = nn.Linear(3, 3).double().to_global(line(), B)  # type: ignore[operator]
    layer(x * y).sum().backward()
    whole = x.detach().to_global(sbp=B)
    made, flat, view = [x, copy.deepcopy(x)], whole.t(), whole[1:]
    if flow.env.get_rank():
        made = [copy.copy(x), copy.deepcopy(x)]
        copy.deepcopy(layer), copy.deepcopy([x.grad, x])
        torch.save(whole, file := io.BytesIO())
        pickle.dumps((x, whole)), file.seek(0), torch.load(file)
        nn.Parameter(x), x.data, x.detach().double(), whole.half().long().bool(), x.type_as(whole)
        (
            flat.contiguous(),
            view.detach().clone(),
            copy.copy(view),
            copy.deepcopy(view),
            x.to(torch.int),
        )
    layer.zero_grad()
    made[1].grad = None
    (made[1] + layer(whole.float().double())).sum().backward()
    return [(made[0] * whole).sum().item(), made[1].grad.sum().item()]


def test_one_rank_alone_may_copy_and_convert() -> None:
    assert run_on(2, steps_of_one_rank) == [[506.0, 12.0]] * 2


def saved_by_one_rank(path: str) -> float:
    """Let rank 0 write a tensor that it has in full, for all ranks to read."""
    whole = rows().to_global(sbp=B)
    if not flow.env.get_rank():
        torch.save({"a": whole}, path)
    rows()
    return (torch.load(path)["a"] * rows()).sum().item()  # type: ignore[no-any-return]


def test_a_file_of_one_rank_does_not_make_ranks_diverge(tmp_path: Path) -> None:
    assert run_on(2, saved_by_one_rank, str(tmp_path / "saved")) == [506.0] * 2
