"""Tests of gradient buckets: all ranks form the same ones, in whatever order their backward passes
deliver gradients."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import globaltensor as flow
from globaltensor._tensor.gradients import reducer
from globaltensor._tensor.gradients.buckets import Buckets
from globaltensor.distributed.simulate import simulate


def passed(arrivals: list[int], buckets: Buckets[int]) -> list[list[int]]:
    """Return the buckets of one pass, in the order they were sent."""
    out = [bucket for n in arrivals for bucket in buckets.add(n, n, 4 * n, n % 2)]
    return out + buckets.finish()


def test_the_same_whatever_the_order() -> None:
    draw = random.Random(1)
    every = [1, 2, 3, 4, 5, 6, 7, 7]
    ranks: list[Buckets[int]] = [Buckets(8, 24, lambda a, b: a) for _ in range(3)]
    for _ in range(20):
        orders = [draw.sample(every, len(every)) for _ in ranks]
        results = [passed(order, b) for order, b in zip(orders, ranks, strict=True)]
        assert results[0] == results[1] == results[2]
        assert sorted(itertools.chain(*results[0])) == sorted(set(every))


def passed_by_bucket(arrivals: list[int], buckets: Buckets[int]) -> list[list[int]]:
    """Return the buckets as `passed` does. Leaves that the plan expects once wait until their
    bucket is complete."""
    out: list[list[int]] = []
    came: dict[int, list[int]] = {
        i: [] for i, bucket in enumerate(buckets.plan) if set(bucket.values()) == {1}
    }  # arrivals of the buckets that are not complete yet
    for n in arrivals:
        where = buckets.bucket.get(n, -1)
        if where not in came:
            out += buckets.add(n, n, 4 * n, n % 2)
        elif n in came[where]:
            for waiting in came.pop(where):
                out += buckets.add(waiting, waiting, 4 * waiting, waiting % 2)
            buckets.add_again(n)
        else:
            came[where].append(n)
            if len(came[where]) == len(buckets.plan[where]):
                out += buckets.add_all(where, {n: n for n in came.pop(where)})
    for n in itertools.chain(*came.values()):
        out += buckets.add(n, n, 4 * n, n % 2)
    return out + buckets.finish()


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=12), min_size=2, max_size=6),
    st.randoms(use_true_random=False),
)
def test_whole_buckets_are_the_same(passes: list[list[int]], draw: random.Random) -> None:
    one: Buckets[int] = Buckets(8, 24, lambda a, b: a)
    other: Buckets[int] = Buckets(8, 24, lambda a, b: a)
    for arrivals in passes:
        # Leaves arrive in the same order if one arrives twice, else in any order. If a leaf arrives
        # twice, the order decides after which arrival its bucket leaves (see `Buckets`).
        order = (
            arrivals if len(set(arrivals)) < len(arrivals) else draw.sample(arrivals, len(arrivals))
        )
        assert passed(arrivals, one) == passed_by_bucket(order, other)
        assert one.plan == other.plan
        assert one.planned == other.planned


def test_a_leaf_that_stays_away_and_a_new_one() -> None:
    b: Buckets[int] = Buckets(8, 24, lambda a, b: a)
    passed([1, 2, 3, 4], b)
    assert sorted(itertools.chain(*passed([4, 2, 9], b))) == [2, 4, 9]
    assert sorted(itertools.chain(*passed([9, 4, 2], b))) == [2, 4, 9]


def _empty_part() -> None:
    """Split one sample over two ranks: the rank without a sample has a different local graph."""
    p = flow.placement("cpu", [0, 1])
    generator = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(s, dtype=torch.float64, generator=generator) for s in ((1, 6, 4), (6,), (6,))
    )
    ours = [
        w.to_global(p, flow.sbp.broadcast).requires_grad_(),
        b.to_global(p, flow.sbp.broadcast).requires_grad_(),
    ]  # type: ignore[attr-defined]
    plain = [w.clone().requires_grad_(), b.clone().requires_grad_()]
    for _ in range(3):
        F.group_norm(
            x.to_global(p, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0)), 2, *ours
        ).sin().sum().backward()  # type: ignore[attr-defined]
        F.group_norm(x, 2, *plain).sin().sum().backward()
        for mine, other in zip(ours, plain, strict=True):
            assert torch.allclose(torch.from_numpy(mine.grad.numpy()), other.grad, rtol=1e-9)


def test_a_rank_with_an_empty_part() -> None:
    simulate(2, _empty_part)


def test_gradients_are_placed_where_they_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients go to preallocated memory in every case: several steps, kept gradients, a weight
    used twice, an unused weight, and a gradient that is not contiguous."""
    monkeypatch.setattr(reducer, "ROOM_BYTES", 0)

    torch.manual_seed(0)
    made = [torch.nn.Linear(6, 6).double() for _ in range(4)]

    def trained(x: Any, place: Callable[[torch.nn.Module], Any]) -> list[Any]:
        layers = copy.deepcopy(made)
        model = torch.nn.ModuleList(layers)
        place(model)
        found = []
        for step in range(5):
            y = layers[1](layers[0](layers[0](x)))
            y = layers[2](y) if step % 2 else y @ layers[3].weight
            y.square().mean().backward()
            if step == 2:  # two backward passes in one step
                (layers[0].weight * y.detach().mean()).sum().backward()
            if step != 3:
                with torch.no_grad():
                    for p in model.parameters():
                        if p.grad is not None:
                            found.append(p.grad.clone())
                            p -= 0.1 * p.grad
                model.zero_grad()
        return found

    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = trained(x, lambda model: None)

    def on_ranks() -> None:
        pair = flow.placement("cpu", [0, 1])
        got = trained(
            x.to_global(pair, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0)),
            lambda model: model.to_global(pair, flow.sbp.broadcast),
        )  # type: ignore[attr-defined]
        assert reducer.reducer().flats
        for mine, plain in zip(got, want, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine.numpy()), plain)

    simulate(2, on_ranks)


@given(data=st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("room", [0, reducer.ROOM_BYTES], ids=["in rooms", "small"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_gradients_of_leaves_that_come_and_stay_away(
    room: int, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Buckets wait until they are complete. Each pass has other leaves and another order. Some
    steps have two passes, gradients of gradients, gradients read during the pass, or sums in
    another dtype."""
    monkeypatch.setattr(reducer, "ROOM_BYTES", room)
    count = 6
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(3, dtype=torch.float64, generator=generator) for _ in range(count)]
    x = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    kinds = [
        "backward",
        "backward",
        "backward",
        "accumulate",
        "twice differentiable",
        "hooked",
        "summed in float32",
    ]
    drawn = [(data.draw(st.permutations(range(count)).flatmap(lambda o: st.integers(1,
        count).map(lambda n: o[:n]))), data.draw(st.sampled_from(kinds)))
             for _ in range(6)]  # fmt: skip

    def trained(leaves: list[Any], x: Any, ours: bool) -> list[Any]:
        found: list[Any] = []
        for used, kind in drawn:
            if kind == "summed in float32" and ours:
                flow.set_grad_reduce_dtype(leaves[used[0]], torch.float32)
            hook = (
                leaves[used[0]].register_post_accumulate_grad_hook(
                    lambda p: found.append(p.grad.clone())
                )
                if kind == "hooked"
                else None
            )
            y = x
            for i in used:
                y = (y * leaves[i]).sin()
            with flow.no_sync() if kind == "accumulate" else contextlib.nullcontext():
                y.square().mean().backward(create_graph=kind == "twice differentiable")
            if hook is not None:
                hook.remove()
            if kind == "accumulate":
                continue
            for leaf in leaves:
                if leaf.grad is not None:
                    found.append(leaf.grad.detach().clone())
                    leaf.grad = None
        return found

    want = trained([v.clone().requires_grad_() for v in values], x, False)

    def on_ranks() -> None:
        pair = flow.placement("cpu", [0, 1])
        leaves = [v.clone().to_global(pair, flow.sbp.broadcast).requires_grad_() for v in values]  # type: ignore[attr-defined]
        got = trained(
            leaves, x.to_global(pair, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0)), True
        )  # type: ignore[attr-defined]
        for mine, plain in zip(got, want, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine.numpy()), plain, rtol=1e-5, atol=1e-6)

    simulate(2, on_ranks)


def _kept(p: Any, how: str) -> tuple[Any, Callable[[], Any]]:
    """Return (an object that a program keeps of ``p.grad``, a function that reads its value)."""
    grad = p.grad
    if how == "the gradient":
        return grad, lambda: grad.numpy()
    if how == "a part of it":
        part = grad[1:]
        return part, lambda: part.numpy()
    if how == "the local tensor":
        local = grad.to_local()
        return local, local.tolist
    if how == "an array of it":
        array = grad.to_local().detach().numpy()
        return array, array.tolist
    if how == "a graph":
        w = (
            torch.ones(3, dtype=torch.float64)
            .to_global(p.placement, flow.sbp.broadcast)
            .requires_grad_()
        )  # type: ignore[attr-defined]
        y = (w * grad.detach()).sum()
        return y, lambda: torch.autograd.grad(y, w, retain_graph=True)[0].numpy()
    if how == "new data":
        grad.data = grad.data * 2
    elif how == "asked for a gradient":
        grad.requires_grad_()
    elif how == "named":
        grad.name_of_mine = how
    return None, lambda: 0


@pytest.mark.parametrize("room", [0, reducer.ROOM_BYTES], ids=["in rooms", "small"])
@pytest.mark.parametrize(
    "how",
    [
        "the gradient",
        "a part of it",
        "the local tensor",
        "an array of it",
        "a graph",
        "new data",
        "asked for a gradient",
        "named",
        "",
    ],
)
def test_memory_serves_again_once_nobody_has_it(
    room: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer, "ROOM_BYTES", room)
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(3, dtype=torch.float64, generator=draw) for _ in range(3)]
    inputs = [torch.randn(4, 3, dtype=torch.float64, generator=draw) for _ in range(6)]

    def on_ranks() -> None:
        pair = flow.placement("cpu", [0, 1])
        leaves = [v.clone().to_global(pair, flow.sbp.broadcast).requires_grad_() for v in values]  # type: ignore[attr-defined]
        plain = [v.clone().requires_grad_() for v in values]
        keeps, addresses = [], []
        for step, x in enumerate(inputs):
            for leaf in (*leaves, *plain):
                leaf.grad = None
            for these, y in (
                (plain, x),
                (leaves, x.to_global(pair, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))),
            ):  # type: ignore[attr-defined]
                for leaf in these:
                    y = (y * leaf).sin()
                y.square().mean().backward()
            for mine, other in zip(leaves, plain, strict=True):
                assert not mine.grad.requires_grad
                assert not hasattr(mine.grad, "name_of_mine")
                torch.testing.assert_close(torch.from_numpy(mine.grad.numpy()), other.grad)
            addresses.append(leaves[1].grad.to_local().data_ptr())
            if step in (2, 3):
                held, read = _kept(leaves[1], how)
                keeps.append((held, read, read()))
        for _, read, value in keeps:
            torch.testing.assert_close(
                torch.as_tensor(read()), torch.as_tensor(value), rtol=0, atol=0
            )
        if not how:
            assert len(set(addresses[1:])) == 1, (
                "from the second step on, whose buckets are planned"
            )

    simulate(2, on_ranks)
