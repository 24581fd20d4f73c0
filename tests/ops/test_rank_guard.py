"""Tests of flow.check_ranks. Ranks that run different ops raise an error with both ranks' ops and
lines before data is exchanged. Ranks that run the same ops see no effect."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch
from support.pool import run_on
from torch import nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError, WorldError

B, S = flow.sbp.broadcast, flow.sbp.split
PAIR = flow.placement("cpu", [0, 1])


def rows() -> torch.Tensor:
    return flow.ones(4, 4, placement=PAIR, sbp=S(0), requires_grad=True)  # type: ignore[no-any-return]


def another_number(rank: int) -> None:
    y = rows() * (2 if rank == 0 else 3)
    y.to_global(sbp=B)


def another_order(rank: int) -> None:
    x = rows()
    for sbp in (B, S(1)) if rank == 0 else (S(1), B):
        x.to_global(sbp=sbp)


def one_op_more(rank: int) -> None:
    x = rows()
    if rank == 1:
        x = x.double()
    x.sum().item()


def another_backward(rank: int) -> None:
    w = flow.ones(4, placement=PAIR, sbp=B, requires_grad=True)
    (rows() * w).sum().backward() if rank == 0 else rows().exp().to_global(sbp=B)


APART = {
    another_number: [
        r"rank 0 ran mul\(f32\[4, 4\] S\(0\), 2\)  \(test_rank_guard.py:\d+: y = rows\(\) \* ",
        r"rank 1 ran mul\(f32\[4, 4\] S\(0\), 3\)",
        "number 1",
    ],
    another_order: [
        r"rank 0 at all_gather of to_global\(f32\[4, 4\] S\(0\), sbp=B\), after 0 ops",
        r"rank 1 at all_to_all of to_global\(.* sbp=S\(1\)\)",
    ],
    one_op_more: [
        r"rank 1 ran double\(f32\[4, 4\] S\(0\)\)  \(test_rank_guard.py:\d+: x = x.double\(\)",
        r"rank 0 ran sum\(f32\[4, 4\] S\(0\)\)",
    ],
    another_backward: [
        r"rank 1 at all_gather of to_global",
        r"rank 1 ran exp\(f32\[4, 4\] S\(0\)\)",
        r"rank 0 ran mul\(",
    ],
}


def told(body: Callable[[int], None]) -> str:
    with (
        pytest.raises(
            WorldError, match="the ranks have diverged: all must run the same ops"
        ) as found,
        flow.check_ranks(),
    ):
        body(world().rank)
    return str(found.value)


@pytest.mark.parametrize("body", APART, ids=lambda body: body.__name__)
def test_ranks_that_go_apart_are_told(body: Callable[[int], None]) -> None:
    for text in simulate(2, told, body):
        for pattern in APART[body]:
            assert re.search(pattern, text), f"{pattern!r} is not in\n{text}"


def on_processes() -> list[str]:
    return [told(body) for body in APART] + [str(rows().sum().item())]


def test_on_processes_and_the_world_goes_on() -> None:
    """Some of these programs abort the process inside gloo, or give wrong values, without the
    guard."""
    for texts in run_on(2, on_processes):
        assert texts[-1] == "16.0"
        for text, patterns in zip(texts, APART.values(), strict=False):
            assert all(re.search(pattern, text) for pattern in patterns), text


def one_does_not_come() -> str:
    # made first, with the usual timeout: the other rank waits in this group below
    world().comm((0, 1)).barrier()
    os.environ["GLOBALTENSOR_TIMEOUT"] = "3"  # long enough to make a group on a busy machine
    try:
        with flow.check_ranks():
            rows().sum().item()
            if world().rank == 0:
                with pytest.raises(WorldError) as found:
                    rows().to_global(sbp=B)
    finally:
        del os.environ["GLOBALTENSOR_TIMEOUT"]
        world().forget()  # forget that the ranks have diverged
    world().comm((0, 1)).barrier()
    return str(found.value) if world().rank == 0 else ""


def test_a_rank_that_does_not_come() -> None:
    said, _ = run_on(2, one_does_not_come)
    assert re.search(r"not all of ranks \[0, 1\] arrived within 3 s", said)
    assert re.search(
        r"rank 0 is at all_gather of to_global\(f32\[4, 4\] S\(0\), sbp=B\), after 1 op  "
        r"\(test_rank_guard.py:\d+: rows\(\).to_global",
        said,
    )
    assert re.search(
        r"rank 1 was last at all_reduce, after 1 op  "
        r"\(test_rank_guard.py:\d+: rows\(\).sum\(\).item",
        said,
    )


def trained() -> list[float]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=numbers))
    flow.parallelize(model, flow.placement("cpu", [[0, 1]]), ["data", "fsdp"])
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    x = flow.ones(
        5, 4, placement=flow.placement("cpu", [[0, 1]]), sbp=[B, S(0)], dtype=torch.float64
    )
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world().rank == 0:
            x.to_local().mean(), loss.detach()  # a rank may read its own local tensor
        losses.append(loss.item())
    return losses


def with_and_without() -> None:
    want = trained()
    with flow.check_ranks():
        assert trained() == want
    assert world().pace is None


def test_ranks_that_do_the_same_see_nothing() -> None:
    simulate(2, with_and_without)
    run_on(2, with_and_without)


def other_tensors_under_the_guard() -> str:
    where = flow.placement.all("cpu")
    a, b = (flow.ones(4, 3, placement=where, sbp=S(0)) for _ in range(2))
    with pytest.raises(DivergenceError) as raised, flow.check_ranks():
        (b if flow.env.get_rank() else a).mul(2).sum().item()
    return str(raised.value)


def differs_once(guarded: bool) -> list[str]:
    """Use a plain tensor 40 times, once with another value on each rank. Return what is told."""
    x, told = rows(), []

    def steps() -> None:
        for i in range(40):
            try:
                x + torch.full((4,), float(flow.env.get_rank() * (i == 21)))
            except DivergenceError as error:
                told.append(f"{i}: {'float32[4]' in str(error)}")
                return

    if guarded:
        with flow.check_ranks():
            steps()
    else:
        steps()
    return told


@pytest.mark.parametrize("run", [simulate, run_on])
def test_the_guard_compares_plain_tensors_at_every_use(run: Callable[..., list[list[str]]]) -> None:
    assert run(2, differs_once, True) == [["21: True"]] * 2
    # by default at a later one: a digest of the other uses is compared with what the ranks have run
    assert simulate(2, differs_once, False) == [["22: True"]] * 2


def test_the_guard_names_the_operation_on_another_tensor() -> None:
    for text in run_on(2, other_tensors_under_the_guard):
        assert re.search(
            r"rank 0 ran mul\(f32\[4, 3\] S\(0\), 2\) on tensor (\w{4})  .*\n"
            r"  rank 1 ran mul\(f32\[4, 3\] S\(0\), 2\) on tensor (?!\1)\w{4}  ",
            text,
        ), text
