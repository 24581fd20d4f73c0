"""Tests of exchanges of objects: ranks that exchange them for different purposes, or with other
arguments, raise one error that names both places."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.pool import run_on
from support.refused import refused
from torch import nn

import globaltensor as flow
from globaltensor.distributed.divergence import OBJECTS, Report, collective_of, describe
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.utils.data import GlobalBatches

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def line() -> Any:
    return flow.placement.all("cpu")


def rows() -> Any:
    return torch.arange(12.0).view(4, 3).to_global(line(), B).to_global(sbp=S(0))  # type: ignore[attr-defined]


def of_other_functions() -> list[str]:
    rank, said, where = flow.env.get_rank(), [], line()
    model = flow.parallelize(nn.Linear(3, 3), where, "data")

    def parallelized() -> None:
        if rank == 0:
            flow.parallelize(nn.Linear(3, 3), where, "data")
        rows()

    def checked() -> None:
        if rank == 0:
            flow.check_replicas(model)
        rows()

    def made_here() -> None:
        if rank == 0:
            torch.ones(2).to_global(where, S(0))  # type: ignore[attr-defined]
        flow.parallelize(nn.Linear(3, 3), where, "data")

    def batched() -> None:
        if rank == 0:
            next(iter(GlobalBatches([torch.ones(2)] * 3)))
        else:
            torch.ones(2).to_global(where, S(0))  # type: ignore[attr-defined]

    for body, first, second in (
        (parallelized, "parallelize", "to_global"),
        (checked, "check_replicas", "to_global"),
        (made_here, "to_global", "parallelize"),
        (batched, "GlobalBatches", "to_global"),
    ):
        said.append(
            refused(
                body,
                r"^test_exchanges.py:\d+: ",
                rf"rank 0 is at {first}  \(test_exchanges.py:\d+: ",
                rf"rank 1 is at {second}  \(test_exchanges.py:\d+: ",
            )
        )
        assert "with other numbers" not in said[-1]
    assert rows().sum().item() == 66.0
    return said


def without_shared_memory() -> str:
    comm: Any = world().comm((1, 0))
    comm._peers = {torch.device("cpu"): None}
    for _ in range(70):  # the next collective is not compared in a separate message
        comm.barrier()
    text = refused(
        lambda: comm.all_gather_object(1, "load" if flow.env.get_rank() else "save"),
        "rank 0 is at save",
        "rank 1 is at load",
    )
    assert comm.all_gather_object(flow.env.get_rank(), "load") == [1, 0]
    return text


def test_exchanges_of_different_functions_are_told() -> None:
    said = run_on(2, of_other_functions)
    assert said[0] == said[1]
    said = simulate(2, of_other_functions, timeout=30.0)
    assert said[0] == said[1]


def test_every_exchange_is_compared() -> None:
    said = run_on(2, without_shared_memory)
    assert said[0] == said[1]


def arguments() -> list[str]:
    rank, said = flow.env.get_rank(), []
    mine = flow.placement("cpu", [0, 1] if rank == 0 else [1, 0])
    one_line = r"^test_exchanges.py:\d+: .*\nto_global: the ranks pass different arguments:\n"
    said.append(
        refused(
            lambda: torch.arange(4.0).to_global(mine, S(0)),  # type: ignore[attr-defined]
            one_line + r"  rank 0 passes .*\[0, 1\].*\n  rank 1 passes .*\[1, 0\].*\n",
        )
    )
    said.append(
        refused(
            lambda: torch.ones(4, 3).to_global(line(), P if rank else B),  # type: ignore[attr-defined]
            one_line + r"  rank 0 passes .*broadcast\n  rank 1 passes .*partial_sum\n",
        )
    )
    said.append(
        refused(
            lambda: torch.ones(4, 4).to_global(line(), S(rank)),  # type: ignore[attr-defined]
            one_line,
        )
    )
    # placements without a common rank need not agree
    own = torch.ones(2).to_global(flow.placement("cpu", [rank]), B)  # type: ignore[attr-defined]
    assert own.sum().item() == 2.0
    world().forget()
    world().comm((0, 1)).barrier()
    return said


def test_to_global_compares_its_arguments() -> None:
    said = run_on(2, arguments)
    assert said[0] == said[1]


def equal_tensors() -> str:
    rank, x = flow.env.get_rank(), rows() * 1.0

    def added() -> None:
        nonlocal x
        if rank == 0:
            x = x * 2.0
        x.add_(torch.ones(1))

    return refused(
        added,
        r"^test_exchanges.py:\d+: x.add_\(torch.ones\(1\)\)\nthe ranks have diverged",
        r"rank 1 is at comparison of a plain tensor for operand 1 of add_",
    )


def test_an_equal_plain_tensor_is_not_blamed() -> None:
    said = run_on(2, equal_tensors)
    assert said[0] == said[1]
    assert "hold different values" not in said[0]


def cut_alone(x: Any, cut: bool) -> Any:
    """Cut the graph on this rank if ``cut``. Ranks do not compare the function of a local_map."""
    return flow.local_map(lambda part: part.detach() if cut else part, S(0))(x)


def sizes() -> list[str]:
    rank, said, where = flow.env.get_rank(), [], line()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return flow.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), where, "data")

    def frozen() -> None:
        m = model()
        if rank == 0:
            m[0].bias.requires_grad_(False)  # type: ignore[index, operator, union-attr]
        m(rows()).sum().backward()
        assert m[0].weight.grad.to_local() is not None  # type: ignore[index, operator, union-attr]

    def detached() -> None:
        m = model()
        h = m[0](rows())  # type: ignore[index, operator]
        m[1](cut_alone(h, rank == 0)).sum().backward()  # type: ignore[index, operator]
        assert m[1].weight.grad.to_local() is not None  # type: ignore[index, operator, union-attr]

    said.append(
        refused(
            frozen,
            r"^test_exchanges.py:\d+: .*to_global\(.*\nthe ranks have diverged",
            r"rank 0 has run requires_grad_\(False\) of f32\[3\] B  \(.*\), which rank 1 has not",
        )
    )

    def plainly_detached() -> None:
        m = model()
        h = m[0](rows())  # type: ignore[index, operator]
        m[1](h if rank else h.detach()).sum().backward()  # type: ignore[index, operator]

    said.append(
        refused(
            plainly_detached,
            r"^test_exchanges.py:\d+: .*backward\(.*\nthe ranks have diverged",
            r"or on tensors that some have detached: flow.check_ranks\(\) shows which",
        )
    )
    said.append(
        refused(
            detached,
            r"^test_exchanges.py:\d+: .*backward\(.*\nthe ranks have diverged",
            r"rank 0 is at all_reduce  \(test_exchanges.py:\d+: ",
            r"rank 0: rank 1 has sent \d+ bytes where \d+ were expected",
            r"rank 1: rank 0 has sent \d+ bytes where \d+ were expected",
            r"requires_grad_\(\), detach\(\) or another loss",
        )
    )
    return said


def test_gradients_that_one_rank_lacks_name_the_lines() -> None:
    said = run_on(2, sizes)
    assert said[0] == said[1]


def sizes_without_shared_memory() -> list[str]:
    """Return the errors of backward where one rank has gradients of fewer parameters.

    Gloo would end the process of a rank that gets a longer message than it expects."""
    rank, said, where = flow.env.get_rank(), [], line()
    assert world().comm((0, 1)).peers(torch.device("cpu")) is None

    def detached(plan: str, odd: int) -> None:
        torch.manual_seed(0)
        m = flow.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), where, plan)
        h = m[0](rows())
        m[1](cut_alone(h, rank == odd)).sum().backward()
        assert m[1].weight.grad.to_local() is not None

    for plan, odd in (("data", 0), ("data", 1), ("fsdp", 0), ("fsdp", 1)):
        said.append(
            refused(
                functools.partial(detached, plan, odd),
                r"^test_exchanges.py:\d+: .*backward\(.*\nthe ranks have diverged",
                r"rank 0: rank 1 moves \d+ bytes where this rank moves \d+",
                r"rank 1: rank 0 moves \d+ bytes where this rank moves \d+",
            )
        )
    return said


def test_gradients_that_one_rank_lacks_end_no_process(
    fresh_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOBALTENSOR_SHARED_MEMORY", "0")
    said = fresh_pool(2).run(sizes_without_shared_memory)
    assert said[0] == said[1]


def test_a_rank_is_named_once() -> None:
    report = Report(0, "all_reduce", "add", "train.py:3: x + y")
    text = describe([report], (0, 1))
    assert text.count("rank 0 is at") == 1
    assert "rank 1 has not come to this collective" in text
    assert "other numbers" not in text
    text = describe([report, Report(1, "all_reduce", "add", "train.py:3: x + y")], (0, 1))
    assert "rank 1 is at all_reduce for add  (train.py:3: x + y)" in text
    assert "other numbers" in text
    assert "no collective" not in text


def test_the_name_of_a_collective() -> None:
    assert collective_of(OBJECTS, "save") == "save"
    assert collective_of(OBJECTS, "") == "an exchange of objects"
    assert collective_of("", "") == "a collective"
    assert collective_of("all_gather", "to_global") == "all_gather for to_global"
