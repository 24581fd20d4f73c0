"""Tests that ranks compare the numbers of calls that make or fill tensors, and the names of
arguments.

Two processes run each program. In each, one rank passes another number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.divergent_programs import B, Program, S, chosen, line, rows, silent
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.distributed.divergence import History, digest_of


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def made(make: Callable[[], Any]) -> Program:
    """Return a program that makes a tensor, then reads another one."""

    def run() -> None:
        make()
        rows().sum().item()

    return run


def rank() -> int:
    return flow.env.get_rank()


def like() -> Any:
    return torch.empty_like(rows())


def split(make: Any, *args: Any, **kwargs: Any) -> Any:
    return make(*args, placement=line(), sbp=S(0), **kwargs)


PROGRAMS: dict[str, Program] = {
    "full_like": made(lambda: torch.full_like(rows(), 1.0 + rank())),
    "full_like of another dtype": made(lambda: torch.full_like(rows(), 1 + rank(),
        dtype=torch.int64)),
    "full_like by name": made(lambda: torch.full_like(rows(), fill_value=1.0 + rank())),
    "ones_like or zeros_like": made(lambda: chosen(torch.ones_like, torch.zeros_like)(rows())),
    "new_full": made(lambda: rows().new_full((4,), np.float64(rank()))),
    "fill_": made(lambda: like().fill_(np.float64(rank()))),
    "normal_": made(lambda: like().normal_(100.0 * rank())),
    "normal_ of a NumPy number": made(lambda: like().normal_(np.float64(100 * rank()))),
    "normal_ by name": made(lambda: like().normal_(std=1.0 + rank())),
    "uniform_": made(lambda: like().uniform_(0, 1 + rank(), generator=seeded())),
    "random_": made(lambda: like().random_(2 + rank(), generator=seeded())),
    "exponential_": made(lambda: like().exponential_(1.0 + 99 * rank(), generator=seeded())),
    "bernoulli_": made(lambda: like().bernoulli_(np.float64(0.2 + 0.5 * rank()))),
    "bernoulli_ of a plain tensor": made(lambda: like().bernoulli_(
        torch.full((4, 3), 0.2 + 0.5 * rank()))),
    "bernoulli_ of a plain number": made(lambda: like().bernoulli_(
        torch.tensor(0.2 + 0.5 * rank()))),
    "trunc_normal_": made(lambda: nn.init.trunc_normal_(like(), mean=float(rank()), std=0.01,
        generator=seeded())),
    "init.uniform_": made(lambda: nn.init.uniform_(like(), 0.0, 1.0 + rank())),
    "init.constant_": made(lambda: nn.init.constant_(like(), 1.0 + rank())),
    "arange": made(lambda: split(flow.arange, np.int64(100 * rank()), np.int64(100 * rank() + 4))),
    "arange of numbers": made(lambda: split(flow.arange, 100 * rank(), 100 * rank() + 4)),
    "full": made(lambda: split(flow.full, (4,), torch.tensor(1.0 + rank()))),
    "full of a NumPy array": made(lambda: split(flow.full, (4,), np.array(1.0 + rank()).item())),
    "full by name": made(lambda: split(flow.full, size=(4,), fill_value=1.0 + rank())),
    "linspace": made(lambda: split(flow.linspace, torch.tensor(0.0), torch.tensor(1.0 + rank()),
        4)),
    "logspace": made(lambda: split(flow.logspace, 0.0, 1.0, 4, base=2.0 + rank())),
    "randint": made(lambda: split(flow.randint, 100 * rank(), 100 * rank() + 5, (4,),
        generator=seeded())),
    "rand of another dtype": made(lambda: split(flow.rand, 4, generator=seeded(),
        dtype=chosen(torch.float32, torch.float64))),
    "normal": made(lambda: split(flow.normal, 1.0 * rank(), 1.0, (4,), generator=seeded())),
    "normal of plain tensors": made(lambda: split(flow.normal, torch.full((4,), 1.0 * rank()), 1.0,
        generator=seeded())),
    "randint_like": made(lambda: torch.randint_like(rows(), 2 + rank())),
    "kaiser_window": made(lambda: split(flow.kaiser_window, 4, True, 1.0 + rank())),
    "scalar_tensor": made(lambda: flow.scalar_tensor(1.0 + rank(), placement=line(), sbp=B)),
    "eye": made(lambda: split(flow.eye, 4, dtype=chosen(torch.float32, torch.float64))),
    "foreach": made(lambda: torch._foreach_mul([rows()], torch.tensor(1.0 + rank()))),
    "foreach of a NumPy number": made(lambda: torch._foreach_mul([rows()], np.float64(rank()))),
    "foreach norm": made(lambda: torch._foreach_norm([rows()], 1 + rank())),
    "named number": made(lambda: torch.clamp(rows(), max=5.0, min=float(rank()))),
    "exchanged numbers": made(lambda: torch.clamp(rows(),
        **chosen({"min": 1.0, "max": 2.0}, {"max": 1.0, "min": 2.0}))),
    "exchanged tensors": made(lambda: torch.addcmul(rows(),
        **chosen({"tensor1": one, "tensor2": two}, {"tensor2": one, "tensor1": two}))
        if (one := rows(1)) is not (two := rows(2)) else None),
}  # fmt: skip


def programs_of_two_ranks() -> list[str]:
    return silent(PROGRAMS)


def test_numbers_of_creation_and_fills_are_compared() -> None:
    assert run_on(2, programs_of_two_ranks) == [[], []]


def equal_numbers_of_other_types() -> float:
    """Pass equal numbers, by other types and in another order of names, on each rank."""
    x = rows()
    half = chosen(0.5, np.float64(0.5))
    torch.full_like(x, half)
    like().normal_(chosen(0, torch.tensor(0.0)), chosen(1.0, np.int64(1)), generator=seeded())
    like().bernoulli_(half).fill_(chosen(True, np.float32(1.0)))
    split(flow.full, **chosen({"size": [4], "fill_value": half}, {"fill_value": 0.5, "size": (4,)}))
    split(flow.arange, chosen(0, np.int64(0)), chosen(4, np.int32(4)))
    torch._foreach_mul([x], half)
    other, another = rows(1), rows(2)
    torch.add(x, **chosen({"other": other, "alpha": 2.0}, {"alpha": 2.0, "other": other}))
    torch.clamp(x, **chosen({"min": 1.0, "max": 2.0}, {"max": 2.0, "min": 1.0}))
    torch.clamp(x, **chosen({"min": other, "max": another}, {"max": another, "min": other}))
    by_name = {"tensor1": other, "tensor2": another, "value": 3.0}
    torch.addcmul(x, **chosen(by_name, dict(reversed(by_name.items()))))
    torch.addcmul(
        **chosen({"input": x, **by_name}, dict(reversed({"input": x, **by_name}.items())))
    )
    torch.where(x > 1, **chosen({"input": x, "other": other}, {"other": other, "input": x}))
    return (x + other).sum().item()  # type: ignore[no-any-return]


def test_equal_numbers_and_another_order_of_names_do_not_diverge() -> None:
    assert run_on(2, equal_numbers_of_other_types) == [144.0] * 2


def test_numbers_saved_for_reports_are_bounded() -> None:
    history = History((0, 1))
    for i in range(1000):
        operation = history.learn(f"mul(f32[{i}] B, float)")
        for number in range(20):
            history.learn_number(digest_of(f"{i} {number}"), operation, number)
    assert len(history.numbers) < 600
    assert len(history.number_counts) < 600
