"""Tests that ranks diverge when they run one operation on different tensors of the same spec.

Two processes run each program. In each, one rank takes another tensor, another order of tensors, or
leaves out a step that changes one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.divergent_programs import B, S, chosen, line, rows, silent
from support.launched import Launched
from support.pool import run_on
from torch import nn

import globaltensor as flow


def two(plan: str = "data") -> nn.ModuleList:
    layers = nn.ModuleList([nn.Linear(3, 3, bias=False).double() for _ in range(2)])
    return flow.parallelize(layers, line(), plan)  # type: ignore[return-value]


def boxed_in_another_order() -> None:
    a, b = rows(), rows(1)
    for x in chosen((a, b), (b, a)):
        x.to_global(sbp=S(1))


def another_operand() -> None:
    (chosen(rows(), rows(1)) * 2).sum().item()


def another_operand_of_two_axes() -> None:
    where = flow.placement("cpu", [[0, 1], [2, 3]])
    a, b = (torch.ones(4, 6).to_global(where, [B, B]).to_global(sbp=[S(0), S(1)]) for _ in range(2))  # type: ignore[attr-defined]
    (b if flow.env.get_rank() == 3 else a).to_global(sbp=[S(1), S(0)])
    a.sum().item()  # the exchange itself is between two other ranks


def written_into() -> None:
    a, b = rows(), rows(1)
    chosen(a, b).mul_(2.0)
    a.sum().item()


def out_argument() -> None:
    a, b = rows(), rows(1)
    torch.add(a, 1, out=chosen(a, b))
    a.sum().item()


def parameter_written_into() -> None:
    layers = two()
    with torch.no_grad():
        chosen(*layers).weight.zero_()
    layers[0](rows()).sum().item()


def layers_in_another_order(plan: str) -> Callable[[], None]:
    def run() -> None:
        layers, x = two(plan), rows()
        for layer in chosen(list(layers), list(layers)[::-1]):
            x = layer(x)
        x.sum().item()

    return run


def accumulated_in_another_order() -> None:
    a, b, total = rows(), rows(1), torch.zeros(())
    for x in chosen((a, b), (b, a)):
        total = total * 2 + x.sum()
    total.item()


def dict_in_another_order() -> None:
    state = {"a": rows(), "b": rows(1)}
    for key in chosen(["a", "b"], ["b", "a"]):
        state[key] = state[key].to_global(sbp=B)


def lists() -> None:
    a, b = rows(), rows(1)
    torch._foreach_mul_(chosen([a, b], [b, a]), [2.0, 3.0])
    a.sum().item()


def several_results() -> None:
    left, right = rows().to_global(sbp=B)[:, :2].chunk(2, 1)
    (chosen(left, right) * rows()).sum().item()


def value_that_is_read() -> None:
    chosen(rows().sum(), rows(1).sum()).item()


def printed() -> None:
    str(chosen(rows(), rows(1)))


def copied() -> None:
    c = rows(2)
    c.copy_(chosen(rows(), rows(1)))
    c.sum().item()


def data_attribute() -> None:
    c = rows(2)
    c.data = chosen(rows(), rows(1))
    c.sum().item()


def detached() -> None:
    (chosen(rows().detach(), rows(1).detach()) * 2).sum().item()


def cloned() -> None:
    a = rows()
    chosen(a, a.clone()).mul_(2.0)
    a.sum().item()


def created() -> None:
    a, b = (flow.zeros(4, 3, placement=line(), sbp=S(0)) for _ in range(2))
    chosen(a, b).add_(1.0)
    a.sum().item()


def another_gradient() -> None:
    layers = two()
    layers[1](layers[0](rows())).sum().backward()
    chosen(*layers).weight.grad.mul_(2.0)
    layers[0](rows()).sum().item()


def gradient_not_cleared(plan: str) -> Callable[[], None]:
    def run() -> None:
        layers = two(plan)
        optimizer = torch.optim.SGD(layers.parameters(), 1e-3)
        for step in range(3):
            layers[0](rows()).sum().backward()
            optimizer.step()
            if flow.env.get_rank() == 0 or step != 1:
                optimizer.zero_grad()
        layers[0](rows()).sum().item()

    return run


def gradient_cleared() -> None:
    layers = two()
    optimizer = torch.optim.SGD(layers.parameters(), 1e-3)
    layers[0](rows()).sum().backward()
    if flow.env.get_rank() == 0:
        layers[0].weight.grad = None
    optimizer.step()
    layers[0](rows()).sum().item()


def fewer_parameters() -> None:
    layers = two("fsdp")
    optimizer = torch.optim.AdamW(list(layers.parameters())[: 2 - flow.env.get_rank()], 1e-3)
    layers[1](layers[0](rows())).sum().backward()
    optimizer.step()
    layers[0](rows()).sum().item()


def loaded_step_count() -> None:
    layers = two()
    optimizer = torch.optim.Adam(layers.parameters(), 0.1)
    layers[1](layers[0](rows())).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.tensor(1.0 + 50 * flow.env.get_rank())
    optimizer.load_state_dict(state)
    layers[0](rows()).sum().item()


def cleared_state() -> None:
    layers = two()
    optimizer = torch.optim.Adam(layers.parameters(), 0.1)
    layers[1](layers[0](rows())).sum().backward()
    optimizer.step()
    if flow.env.get_rank() == 0:
        optimizer.state.clear()
    optimizer.step()
    layers[0](rows()).sum().item()


def another_rate(rate: Callable[[float], Any]) -> Callable[[], None]:
    def run() -> None:
        layers = two()
        optimizer = torch.optim.SGD(layers.parameters(), rate(0.1 * (1 + flow.env.get_rank())))
        layers[0](rows()).sum().backward()
        optimizer.step()
        layers[0](rows()).sum().item()

    return run


def rate_written_in_place() -> None:
    layers = two()
    optimizer = torch.optim.Adam(layers.parameters(), torch.tensor(0.1))
    for _ in range(2):
        layers[0](rows()).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(chosen(0.1, 0.3))
    layers[0](rows()).sum().item()


def rate_of_a_graph() -> None:
    layers = two()
    optimizer = torch.optim.SGD(layers[0].parameters(), np.float64(0.1))

    class Step(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layers[0]
            self.add_optimizer(optimizer)

        def build(self, x: Any) -> Any:
            loss = self.layer(x).sum()
            loss.backward()
            return loss

    step = Step()
    step(rows())
    optimizer.param_groups[0]["lr"] *= chosen(np.float64(1.0), np.float64(2.0))
    for _ in range(2):
        step(rows()).item()


def leaf_frozen() -> None:
    a, b = nn.Parameter(rows()), nn.Parameter(rows(1))
    b.requires_grad_(flow.env.get_rank() == 0)
    (a * b).sum().backward()
    torch.optim.SGD([a, b], 0.1).step()
    b.sum().item()


def gradient_given() -> None:
    a = rows().requires_grad_()
    (a * 2).backward(chosen(rows(), rows(1)))
    a.grad.sum().item()


def gradient_asked_for() -> None:
    a, b = rows().requires_grad_(), rows(1).requires_grad_()
    torch.autograd.grad((a * b).sum(), chosen(a, b))[0].sum().item()


def gradient_picked() -> None:
    a, b = rows().requires_grad_(), rows(1).requires_grad_()
    chosen(*torch.autograd.grad((a * b).sum(), (a, b))).sum().item()


def result_of_a_hook() -> None:
    a, others = rows().requires_grad_(), (rows(1), rows(2))
    y = a * 1
    y.register_hook(lambda grad: chosen(*others))
    y.sum().backward()
    a.grad.sum().item()


def trained(part: Callable[[Any], Any]) -> None:
    """Read a gradient of ``x * part(x * 2)``. It is another one where ``part`` cuts the graph."""
    x = rows().requires_grad_()
    (x * part(x * 2)).sum().backward()
    x.grad.sum().item()


def cut_on_one_rank(cut: Callable[[Any], Any]) -> Callable[[], None]:
    return lambda: trained(chosen(lambda y: y, cut))


def detached_in_place(y: Any) -> Any:
    y.detach_()
    return y


def tied_weight_detached() -> None:
    layer = two()[0]
    y = layer(rows()) + rows() @ chosen(layer.weight, layer.weight.detach())
    y.sum().backward()
    layer.weight.grad.sum().item()


def gradient_from_a_function(gradient: Callable[[Any], Any]) -> Callable[[], None]:
    """Let the backward of a Function return ``gradient`` of the one that it receives."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradient(grads[0])

    return lambda: trained(Same.apply)


def another_gradient_from_a_function() -> None:
    others = rows(1), rows(2)
    gradient_from_a_function(lambda grad: chosen(*others))()


def without_gradients_on_one_rank() -> None:
    x = rows().requires_grad_()
    with torch.set_grad_enabled(chosen(True, False)):
        scale = x.tanh().mean()
    (x * scale).sum().backward()


def numpy_noise(grad: Any) -> Any:
    return torch.from_numpy(grad.numpy() * np.random.default_rng(flow.env.get_rank()).normal())


def cut_on_all_ranks() -> list[float]:
    """Cut the graph on every rank, and detach on one rank what has no graph, or is not used."""
    x = rows().requires_grad_()
    with torch.no_grad():
        y = x * 2
    y = chosen(y, y.detach())
    (x * y * (x * 2).detach()).sum().backward()
    chosen(x, x.detach())
    layer = two()[0]
    for p in layer.parameters():
        p.data = chosen(p, p.data)
    return [x.grad.sum().item(), layer(rows()).shape[0]]


PROGRAMS: dict[str, Callable[[], None]] = {
    "boxed in another order": boxed_in_another_order,
    "another operand": another_operand,
    "written into": written_into,
    "out=": out_argument,
    "parameter written into": parameter_written_into,
    "layers in another order, data": layers_in_another_order("data"),
    "layers in another order, fsdp": layers_in_another_order("fsdp"),
    "layers in another order, tensor": layers_in_another_order("tensor"),
    "accumulated in another order": accumulated_in_another_order,
    "dict in another order": dict_in_another_order,
    "foreach": lists,
    "several results": several_results,
    "read": value_that_is_read,
    "printed": printed,
    "copied": copied,
    ".data": data_attribute,
    "detached": detached,
    "cloned": cloned,
    "created": created,
    "another gradient": another_gradient,
    "gradient not cleared, data": gradient_not_cleared("data"),
    "gradient not cleared, fsdp": gradient_not_cleared("fsdp"),
    "gradient cleared": gradient_cleared,
    "fewer parameters": fewer_parameters,
    "loaded step count": loaded_step_count,
    "cleared state": cleared_state,
    "rate of NumPy": another_rate(np.float64),
    "rate that is a tensor": another_rate(torch.tensor),
    "rate written in place": rate_written_in_place,
    "rate of a graph": rate_of_a_graph,
    "leaf frozen": leaf_frozen,
    "gradient given": gradient_given,
    "gradient asked for": gradient_asked_for,
    "gradient picked": gradient_picked,
    "result of a hook": result_of_a_hook,
    "detached on one rank": cut_on_one_rank(lambda y: y.detach()),
    ".data on one rank": cut_on_one_rank(lambda y: y.data),
    "detached in place on one rank": cut_on_one_rank(detached_in_place),
    "gradient of a Function, another": another_gradient_from_a_function,
    "gradient of a Function, None": gradient_from_a_function(lambda grad: chosen(grad, None)),
    "gradient of a Function, plain": gradient_from_a_function(
        lambda grad: chosen(torch.ones(4, 3).double(), torch.zeros(4, 3).double())),
    "gradient of a Function, from NumPy": gradient_from_a_function(numpy_noise),
    "without gradients on one rank": without_gradients_on_one_rank,
    "tied weight detached on one rank": tied_weight_detached,
}  # fmt: skip


def programs_of_two_ranks() -> list[str]:
    return silent(PROGRAMS)


def program_of_four_ranks() -> list[str]:
    return silent({"another operand of two axes": another_operand_of_two_axes})


def test_ranks_that_use_other_tensors_diverge() -> None:
    assert run_on(2, programs_of_two_ranks) == [[], []]


def test_one_rank_of_four_that_uses_another_tensor_diverges() -> None:
    assert run_on(4, program_of_four_ranks) == [[]] * 4


def steps_of_one_rank() -> list[float]:
    """Run what one rank may do alone: nothing here moves data."""
    x, rank = rows(), flow.env.get_rank()
    full = x.to_global(sbp=B)
    if rank == 0:
        print(full.shape, full.to_local().sum(), x.to_local(), full.device, x.stride())
        full.to_global(sbp=S(0)).to_local()
        x.detach().clone()
    return [(x * 2).sum().item(), full.sum().item()]


def test_what_one_rank_may_do_alone_does_not_diverge() -> None:
    assert run_on(2, steps_of_one_rank) == [[132.0, 66.0]] * 2


def test_graphs_that_all_ranks_cut_do_not_diverge() -> None:
    assert run_on(2, cut_on_all_ranks) == [[2024.0, 4]] * 2


def tensors_of_single_ranks() -> float:
    """Move a tensor between placements of one rank each: other ranks know it by no serial."""
    a = torch.ones(4, 3).to_global(flow.placement("cpu", [0]), B) * 2  # type: ignore[attr-defined]
    b = (a + 1).to_global(placement=line(), sbp=S(0))
    c = b.to_global(placement=flow.placement("cpu", [1]), sbp=B) * 3
    d = c.to_global(placement=line(), sbp=B) + b
    return d.sum().item()  # type: ignore[no-any-return]


def empty_tensor_on_other_ranks() -> float:
    """Move a tensor of no elements to a placement with a rank that does not know it."""
    there, grid = flow.placement("cpu", [2, 3]), flow.placement("cpu", [[0], [2]])
    # a collective, after which the other ranks know the serials of tensors there no longer
    torch.ones(4, 3).to_global(there, S(0)).sum().to_global(sbp=B)  # type: ignore[attr-defined]
    empty = torch.ones(0, 3).to_global(there, B).detach()  # type: ignore[attr-defined]
    moved = empty.to_global(placement=grid, sbp=[B, B])
    (moved * 2).sum()
    torch.ones(4, 3).to_global(grid, [B, B])  # type: ignore[attr-defined]
    return rows().sum().item()  # type: ignore[no-any-return]


def test_an_empty_tensor_that_moves_does_not_make_ranks_diverge() -> None:
    assert run_on(4, empty_tensor_on_other_ranks) == [66.0] * 4


def test_tensors_of_single_ranks_do_not_diverge() -> None:
    assert run_on(2, tensors_of_single_ranks) == [144.0] * 2


CAUGHT = """
import torch, globaltensor as flow
where, B, S = flow.placement.all("cpu"), flow.sbp.broadcast, flow.sbp.split
x = torch.ones(4, 3).to_global(where, B).to_global(sbp=S(0))
try:
    if flow.env.get_rank() == 0:
        x.mul_(2)
    x.sum().item()
except Exception as error:
    print(type(error).__name__)
print(x.sum().item())
"""


def test_a_program_that_caught_the_error_does_not_end_with_exit_code_0(tmp_path: Path) -> None:
    script = tmp_path / "caught.py"
    script.write_text(CAUGHT)
    arguments = ["--nproc_per_node", 2, script]
    with Launched(tmp_path, *arguments, warm=True, OMP_NUM_THREADS="1") as launcher:
        assert launcher.code() == 1
    assert launcher.out.count("DivergenceError") == 2
    assert "It caught the error and went on, so numbers after that may be wrong" in launcher.err
