"""Tests that programs in which ranks differ only in what they may differ in are not accused.

Two processes run each program. All run the same operations on global tensors, but one of them logs,
times, or keeps notes of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError

B, S = flow.sbp.broadcast, flow.sbp.split


def rows(add: float = 0.0) -> Any:
    value = torch.arange(16.0, dtype=torch.float64).view(4, 4) + add
    return value.to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))  # type: ignore[attr-defined]


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return flow.parallelize(nn.Linear(4, 4).double(), flow.placement.all("cpu"), "data")  # type: ignore[return-value]


def first() -> bool:
    return bool(flow.env.get_rank() == 0)


def a_call_from_two_lines() -> Any:
    """Time one call in ten on rank 0, which is another line of the program."""
    model, x = layer(), torch.ones(4, 4, dtype=torch.float64)
    for step in range(60):
        if first() and step % 10 == 0:
            y = model(x)
        else:
            y = model(x)
        y.sum().backward()
    return model.weight.grad


def state_read_for_a_log() -> Any:
    """Read each parameter's state on rank 0, which makes empty states of a defaultdict."""
    model = layer()
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(3):
        model(rows()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if first():
            assert [len(optimizer.state[p]) for p in model.parameters()] == [3, 0]
    return model.weight


def notes_in_a_parameter_group() -> Any:
    """Keep objects whose repr differs by rank in a group, and rates of NumPy on one rank."""
    model = layer()
    optimizer = torch.optim.SGD(
        [{"params": list(model.parameters()), "notes": (object(), frozenset("abcdef"))}], lr=0.1
    )
    optimizer.param_groups[0]["verbose"] = first()
    optimizer.param_groups[0]["lr"] = 0.5 if first() else np.float64(0.5)
    optimizer.param_groups[0]["momentum"] = 0 if first() else torch.tensor(0.0)
    model(rows()).sum().backward()
    optimizer.step()
    return model.weight


def gradients_of_inputs_in_another_order() -> Any:
    """Pass inputs in the order of a set, which differs by rank."""
    a, b = rows().requires_grad_(), rows(1).requires_grad_()
    inputs = [a, b] if first() else [b, a]
    gradients = dict(zip(map(id, inputs), torch.autograd.grad((a * b).sum(), inputs), strict=True))
    return gradients[id(a)] + 2 * gradients[id(b)]


def no_writer_on_other_ranks() -> Any:
    written: list[str] = []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append(name)

    with flow.utils.Progress(
        2, every=1, log_to=Writer() if first() else None, quiet=True
    ) as progress:
        for _ in range(2):
            progress.step(rows().sum())
    assert bool(written) == first()
    return rows()


def moved_to_where_it_is() -> Any:
    """Move a module on rank 0 to the device that it is on."""
    model = layer()
    model(rows()).sum().backward()
    if first():
        model.to("cpu").cpu().to(torch.float64)
    model(rows()).sum().backward()
    return model.weight.grad


def names_that_a_debugger_lists() -> Any:
    x = rows()
    if first():
        assert {"to_global", "add_", "_local", "grad"} <= set(dir(x))
    return x * 2


PROGRAMS: dict[str, Callable[[], Any]] = {
    "names that a debugger lists": names_that_a_debugger_lists,
    "a call from two lines": a_call_from_two_lines,
    "state read for a log": state_read_for_a_log,
    "notes in a parameter group": notes_in_a_parameter_group,
    "gradients of inputs in another order": gradients_of_inputs_in_another_order,
    "no writer on other ranks": no_writer_on_other_ranks,
    "moved to where it is": moved_to_where_it_is,
}


def accused() -> list[str]:
    """Return the programs that raise DivergenceError or end with other values than one device."""
    names = []
    for name, program in PROGRAMS.items():
        try:
            program().to_global(sbp=B).sum().item()
            (rows() * 2).sum().item()  # a collective, which compares the ranks
        except DivergenceError as error:
            names.append(f"{name}: {error}")
        world().forget()
        world().comm(tuple(range(world().size))).barrier()
    return names


def test_what_may_differ_by_rank_is_not_accused() -> None:
    assert run_on(2, accused) == [[], []]


def comparisons_that_met_others() -> str:
    """Compare a plain tensor for one operation on rank 0 and for another one elsewhere."""
    x, indices = torch.ones(4, 4, dtype=torch.float64), torch.tensor([0, 1])
    model, table = layer(), torch.nn.Embedding(4, 4).to_global(flow.placement.all("cpu"), B)  # type: ignore[operator]
    try:
        if first():
            model(x)
        else:
            table(indices)
    except DivergenceError as error:
        return str(error)
    return ""


def test_the_error_does_not_compare_tensors_of_two_operations() -> None:
    for text in run_on(2, comparisons_that_met_others):
        assert "the ranks have diverged" in text
        assert "operand 0 of linear" in text
        assert "of embedding" in text
        assert "hold different values" not in text
