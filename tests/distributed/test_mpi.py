"""Tests of the backend "mpi": the functions of torch.distributed, on ranks started by mpirun,
against values computed here."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.mpi import needs_mpi, run_by_mpi
from support.pool import RanksFailed

import globaltensor as flow
from globaltensor.distributed.backends.mpi import collectives, progress
from globaltensor.errors import WorldError

pytestmark = needs_mpi

_FLOATS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
_INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
_COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": lambda a, b: a + b,
    "AVG": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": min,
    "MAX": max,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}
_KINDS = {
    "SUM": [*_FLOATS, *_INTEGERS, *_COMPLEX, torch.bool],
    "PRODUCT": [*_FLOATS, *_INTEGERS, torch.bool],
    "AVG": [*_FLOATS, torch.complex64],
    **{op: [*_FLOATS, *_INTEGERS, torch.bool] for op in ("MIN", "MAX")},
    **{op: [*_INTEGERS, torch.bool] for op in ("BAND", "BOR", "BXOR")},
}


@functools.cache
def _group(ranks: tuple[int, ...]) -> Any:
    """Return a group that its members alone create."""
    flow.env.get_rank()
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else _made_by_members(ranks)


def _made_by_members(ranks: Sequence[int], **options: Any) -> Any:
    """Create a group on its members alone, and restore torch's group count. Since 2.14 torch counts
    such groups on the members alone. That count names the groups that all ranks create later, so
    later tests would wait for each other."""
    world: Any = dist.distributed_c10d._world
    count = world.group_count
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        world.group_count = count


def _term(rank: int, dtype: torch.dtype, n: int) -> list[Any]:
    """Return small numbers, exact in every dtype and under every reduction."""
    numbers = [(i * (rank + 1) + rank) % 3 for i in range(n)]
    if dtype is torch.bool:
        return [bool(x % 2) for x in numbers]
    return [complex(x, -1) for x in numbers] if dtype.is_complex else numbers


def _tensor(numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
    wide = (
        torch.complex128
        if dtype.is_complex
        else torch.float64
        if dtype.is_floating_point
        else torch.bool
        if dtype is torch.bool
        else torch.int64
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return torch.tensor(numbers, dtype=wide).to(dtype)


def _same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype
    a, b = (
        t.to(torch.complex128 if t.is_complex() else torch.float64)
        if t.dtype is not torch.uint64
        else t.view(torch.int64)
        for t in (got, want)
    )
    assert torch.equal(a, b), f"{what}: {a.tolist()[:8]} instead of {b.tolist()[:8]}"


def _reduce_all(ranks: tuple[int, ...], sizes: list[int]) -> int:
    """Check all_reduce, reduce and reduce_scatter in every reduction and dtype. Return the number
    of checks."""
    me, count = flow.env.get_rank(), 0
    if me not in ranks:
        return 0
    group, root = _group(ranks), ranks[-1]
    for (op, dtypes), n in itertools.product(_KINDS.items(), sizes):
        for dtype in dtypes:
            total = [
                functools.reduce(_FOLDS[op], column)
                for column in zip(*(_term(r, dtype, n) for r in ranks), strict=True)
            ]
            if op == "AVG":
                total = [x / len(ranks) for x in total]
            want, mine, how = (
                _tensor(total, dtype),
                _tensor(_term(me, dtype, n), dtype),
                getattr(dist.ReduceOp, op),
            )
            x = mine.clone()
            dist.all_reduce(x, how, group)
            _same(x, want, f"all_reduce {op} {dtype} {n}")
            x = mine.clone()
            progress = dist.reduce(x, root, how, group, async_op=True)
            progress.wait()
            _same(x, want if me == root else mine, f"reduce {op} {dtype} {n}")
            out = torch.empty(n, dtype=dtype)
            dist.reduce_scatter(out, [mine] * len(ranks), how, group)
            _same(out, want, f"reduce_scatter {op} {dtype} {n}")
            count += 3
    return count


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=str)
@pytest.mark.sweep(2)
def test_reductions_of_every_dtype(ranks: tuple[int, ...]) -> None:
    assert max(run_by_mpi(2, _reduce_all, ranks, [0, 1, 5])) > 100


@pytest.mark.extended
def test_reductions_among_three_of_four_ranks() -> None:
    assert max(run_by_mpi(4, _reduce_all, (0, 1, 3), [5])) > 50


def _large(ranks: tuple[int, ...]) -> None:
    """Check tensors large enough for the rounds of the large algorithm. The chunks of the ranks are
    uneven, and every rank must get the same bits."""
    me = flow.env.get_rank()
    if me not in ranks:
        return
    group = _group(ranks)
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (1 << 18, (1 << 21) + 7)):
        parts = [
            torch.randn(n, generator=torch.Generator().manual_seed(r)).to(dtype) for r in ranks
        ]
        x = parts[ranks.index(me)].clone()
        dist.all_reduce(x, group=group)
        want = functools.reduce(torch.add, [p.double() for p in parts])
        torch.testing.assert_close(
            x.double(), want, rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-6
        )
        every = [torch.empty_like(x) for _ in ranks]
        dist.all_gather(every, x, group)
        assert all(torch.equal(e, x) for e in every), "ranks have other bits"
        y = parts[ranks.index(me)].clone()
        dist.reduce(y, ranks[0], group=group)
        assert torch.equal(y, x if me == ranks[0] else parts[ranks.index(me)])


def test_large_reductions() -> None:
    run_by_mpi(2, _large, (0, 1))


@pytest.mark.extended
def test_large_reductions_among_four() -> None:
    run_by_mpi(4, _large, (0, 1, 2, 3))


def _in_pieces(ranks: tuple[int, ...]) -> None:
    """Check chunks of few and of many pieces of about 60 elements. Some chunks are empty on most
    ranks."""
    me = flow.env.get_rank()
    if me not in ranks:
        return
    group, place, size = _group(ranks), ranks.index(me), len(ranks)
    with (
        mock.patch.multiple(collectives, EAGER=0, _SMALL=0, _CACHED=512 * (size - 1)),
        mock.patch.object(collectives.Scratch, "_spare", []),
    ):
        for n in (
            0,
            1,
            size,
            63 * size,
            64 * size,
            65 * size,
            192 * size - 1,
            193 * size + 1,
            1000 * size + 1,
        ):
            parts = [
                torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(r))
                for r in ranks
            ]
            x, total = parts[place].clone(), functools.reduce(torch.add, parts)
            dist.all_reduce(x, group=group)
            _same(x, total, f"all_reduce of {n}")
            for sizes in ([n, *[0] * (size - 1)], [2 * n + 5, *[n] * (size - 1)], [n] * size):
                whole = [
                    torch.randn(
                        sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(r)
                    )
                    for r in ranks
                ]
                out = torch.full((sizes[place],), -1.0, dtype=torch.float64)
                dist.reduce_scatter(out, list(whole[place].split(sizes)), group=group)
                _same(
                    out,
                    functools.reduce(torch.add, whole).split(sizes)[place],
                    f"reduce_scatter of {sizes}",
                )


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 3)])
@pytest.mark.extended
def test_reductions_in_many_pieces(ranks: tuple[int, ...]) -> None:
    run_by_mpi(ranks[-1] + 1, _in_pieces, ranks)


def _scaled() -> None:
    me = flow.env.get_rank()
    for factor in (0.5, torch.tensor([3.0])):
        x = torch.full((4,), me + 1.0)
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor))
        _same(x, torch.full((4,), 3.0 * float(factor)), f"PREMUL_SUM by {factor}")
        out = torch.empty(2)
        flow.distributed.reduce_scatter_tensor(
            out, torch.full((4,), me + 1.0), dist._make_nccl_premul_sum(factor)
        )
        _same(
            out, torch.full((2,), 3.0 * float(factor)), f"reduce_scatter of PREMUL_SUM by {factor}"
        )


def test_sums_of_scaled_parts() -> None:
    run_by_mpi(2, _scaled)


def _senseless() -> list[str]:
    flow.env.get_rank()
    said = []
    for op, dtype in (
        (dist.ReduceOp.BAND, torch.float32),
        (dist.ReduceOp.AVG, torch.int32),
        (dist.ReduceOp.MAX, torch.complex64),
    ):
        with pytest.raises(WorldError) as caught:
            dist.group.WORLD.allreduce([torch.ones(2, dtype=dtype)], op)
        said.append(str(caught.value))
    with pytest.raises(WorldError) as caught:
        flow.distributed.all_gather_into_tensor(torch.empty(5), torch.empty(2))
    said.append(str(caught.value))
    with pytest.raises(WorldError) as caught:
        dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 2], [2, 2])
    said.append(str(caught.value))
    with pytest.raises(WorldError) as caught:
        dist.send(torch.ones(1), 1 - flow.env.get_rank(), tag=-1)
    return [*said, str(caught.value)]


def test_calls_that_make_no_sense() -> None:
    band, avg, order, size, splits, tag = run_by_mpi(2, _senseless)[0]
    assert band == (
        "ReduceOp.BAND is not defined for torch.float32: it combines the bits of integers or bool"
    )
    assert (
        avg
        == "ReduceOp.AVG is not defined for torch.int32: use SUM and divide, or convert to float"
    )
    assert "complex numbers have no order" in order
    assert "output has 5 elements (shape [5]); it needs 2 x 2" in size
    assert "output_split_sizes [1, 2] must be 2 numbers that add up to 4 rows" in splits
    assert "tag -1 must be from 0 to" in tag


def _moved(ranks: tuple[int, ...]) -> None:
    """Check that every torch dtype is moved unchanged, out of and into memory of any layout."""
    me = flow.env.get_rank()
    if me not in ranks:
        return
    group, size = _group(ranks), len(ranks)
    # torch itself barely supports quantized dtypes and dtypes smaller than a byte.
    odd = re.compile(r"qu?int|bits|u?int[1-7]$|complex")
    for dtype in sorted(
        {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not odd.search(str(d))},
        key=str,
    ):
        raw = torch.arange(8 * dtype.itemsize) % (2 if dtype is torch.bool else 251)
        values = [
            raw.add(r).remainder(2 if dtype is torch.bool else 251).to(torch.uint8).view(dtype)
            for r in ranks
        ]
        parts = [torch.empty(8, dtype=dtype) for _ in ranks]
        dist.all_gather(parts, values[ranks.index(me)], group)
        for got, want in zip(parts, values, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (
                f"{dtype} was changed"
            )
    x = torch.arange(12.0).reshape(3, 4) + me
    for give, take in itertools.product(
        (x, x.mT.contiguous().mT, x.repeat(1, 2)[:, :4], x[:, :1].expand(3, 4)),
        (torch.empty(3, 4), torch.empty(4, 3).mT),
    ):
        parts = [take.clone(memory_format=torch.preserve_format) for _ in ranks]
        dist.all_gather(parts, give, group)
        for r, part in zip(ranks, parts, strict=True):
            torch.testing.assert_close(part, give - me + r)
    z = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(me))
    out = torch.empty(size * 3, dtype=torch.complex64).conj()
    group._allgather_base(out, z.conj()).wait()
    everyone = [
        torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(r)).conj()
        for r in ranks
    ]
    torch.testing.assert_close(out, torch.cat(everyone).resolve_conj())


def test_every_dtype_and_layout_moves() -> None:
    run_by_mpi(2, _moved, (0, 1))


def _passed_on() -> None:
    """Run collectives among more ranks than send to each other directly."""
    me, n = flow.env.get_rank(), flow.env.get_world_size()
    for root in range(n):
        x = torch.full((3,), float(me))
        dist.broadcast(x, root)
        _same(x, torch.full((3,), float(root)), f"broadcast from {root}")
    x = torch.full((5,), float(me))
    dist.all_reduce(x)
    _same(x, torch.full((5,), n * (n - 1) / 2), "all_reduce")
    dist.barrier()


@pytest.mark.extended
def test_more_ranks_pass_messages_on() -> None:
    run_by_mpi(5, _passed_on)


def _coalesced() -> None:
    me, group = flow.env.get_rank(), dist.group.WORLD
    from torch.distributed.distributed_c10d import _coalescing_manager

    xs = [torch.full((k,), float(me)) for k in (1, 2, 3)]
    with _coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert [x.tolist() for x in xs] == [[1.0] * k for k in (1, 2, 3)]
    outs, ins = (
        [torch.empty(2), torch.empty(4)],
        [torch.full((1,), float(me)), torch.full((2,), float(me))],
    )
    group.allgather_into_tensor_coalesced(outs, ins).wait()
    assert [out.tolist() for out in outs] == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    outs, ins = [torch.empty(1), torch.empty(2)], [torch.arange(2.0), torch.arange(4.0)]
    group.reduce_scatter_tensor_coalesced(outs, ins).wait()
    assert [out.tolist() for out in outs] == [[2.0 * me], [4.0 * me, 4.0 * me + 2]]
    lists, ins = (
        [[torch.empty(2), torch.empty(2)] for _ in range(2)],
        [torch.full((2,), 10.0 * me), torch.full((2,), 10.0 * me + 1)],
    )
    group.allgather_coalesced(lists, ins).wait()
    assert [[out.tolist() for out in outs] for outs in lists] == [
        [[10.0 * r] * 2, [10.0 * r + 1] * 2] for r in range(2)
    ], "first the rank, then the tensor"
    with pytest.raises(WorldError, match="one for each rank"):
        group.allgather_coalesced(lists[:1], ins)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.irecv(xs[0], 1 - me)
        dist.isend(torch.full((1,), 7.0 + me), 1 - me)
    manager.wait()
    assert xs[0].item() == 8.0 - me


def test_coalesced() -> None:
    run_by_mpi(2, _coalesced)


def _sparse() -> torch.Tensor:
    me = flow.env.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch 2.11 warns of every sparse tensor that its invariants are unchecked
        x = torch.sparse_coo_tensor(
            [[0, 2 + me]],
            torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (me + 1),
            (4, 2),
            check_invariants=True,
        )
    dist.all_reduce(x)
    return x.to_dense()


def test_sparse_sum() -> None:
    for got in run_by_mpi(2, _sparse):
        assert got.tolist() == [[3, 6], [0, 0], [3, 4], [6, 8]]


def _futures() -> list[float]:
    """Run a hook that waits for another operation of the same group, as PowerSGD's hooks do."""
    x, y, z = torch.ones(1 << 20), torch.full((3,), 2.0), torch.full((2,), 3.0)

    def hook(future: Any) -> float:
        inner = dist.all_reduce(y, async_op=True).get_future()
        return float(future.value()[0][0] + inner.wait()[0][0])

    one = dist.all_reduce(x, async_op=True).get_future().then(hook).wait()
    # Start this operation only afterwards. The hook may run in this thread or in another, so
    # a concurrent operation could come before or after the hook's, in another order on each rank.
    other = dist.all_reduce(z, async_op=True).get_future()
    return [one, other.wait()[0][0].item()]


def test_futures_wait_for_each_other() -> None:
    assert run_by_mpi(2, _futures) == [[6.0, 6.0]] * 2


def _started_early(full: bool) -> list[float]:
    """Start the sum on rank 1 only after rank 0 has gone on: a rank that starts an operation waits
    in it only for a short time. Then run a sum that both ranks start together."""
    flow.env.get_rank()
    library = dist.group.WORLD.library  # type: ignore[union-attr]
    was, library.full = library.full, full
    try:
        x, word, first = (
            torch.full((1 << 19,), dist.get_rank() + 1.0),
            torch.zeros(1),
            dist.get_rank() == 0,
        )
        if not first:
            dist.recv(word, 0)
        early = dist.all_reduce(x, async_op=True)
        if first:
            dist.send(word + 7, 1)
        early.wait()
        future = dist.all_reduce(x, async_op=True).get_future()
        return [float(future.wait()[0][-1]), float(word)]
    finally:
        library.full = was


@pytest.mark.parametrize("full", [False, True])
def test_who_starts_early_goes_on(full: bool) -> None:
    assert run_by_mpi(2, _started_early, full) == [[6.0, 0.0], [6.0, 7.0]]


class _Coming:
    """An operation whose messages never arrive."""

    over, moves, moving, started = False, 0, True, 0.0

    def __init__(self, roomy: bool) -> None:
        self.roomy = roomy

    def overdue(self, waited: float) -> None:
        pass


@pytest.mark.parametrize(("roomy", "naps"), [(True, [1e-3]), (False, [1e-4, 1e-4, 1e-3])])
def test_a_message_on_its_way_is_looked_at_again(
    roomy: bool, naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(progress.time, "sleep", slept.append)
    for waited in (0.5e-3, 5e-3, 0.5, 5.0):
        progress.Progress()._nap([_Coming(roomy)], waited)  # type: ignore[list-item]
    assert slept == naps


def _on_its_way() -> list[bool]:
    """Report the progress of a sum that rank 1 starts later: is rank 0's operation moving before
    that, and is the operation moving at the end?"""
    later, big, first = dist.new_group(backend="gloo"), torch.ones(1 << 22), dist.get_rank() == 0
    early = dist.all_reduce(big, async_op=True) if first else None
    told = [early.moving] if early is not None else [False]
    dist.barrier(later)
    operation = early or dist.all_reduce(big, async_op=True)
    operation.wait()
    return [*told, operation.moving, bool((big == 2).all())]


def test_whether_a_message_is_on_its_way() -> None:
    assert run_by_mpi(2, _on_its_way) == [[False, False, True]] * 2


def _in_inference_mode() -> float:
    with torch.inference_mode():
        x = torch.ones(3)
        dist.all_reduce(x, async_op=True).wait()
        big = torch.ones(1 << 19)
        dist.all_reduce(big, async_op=True).get_future().wait()
        return float(x.sum() + big[-1])


def test_inference_mode() -> None:
    assert run_by_mpi(2, _in_inference_mode) == [8.0, 8.0]


def _monitored(late: int | None) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if late == flow.env.get_rank():
        dist.barrier()
        return "late"
    try:
        group.monitored_barrier(wait_all_ranks=True)
        said = ""
    except WorldError as error:
        said = str(error)
    if late is not None:
        dist.barrier()
    return said


def test_monitored_barrier() -> None:
    assert run_by_mpi(2, _monitored, None) == ["", ""]
    assert (
        "monitored_barrier: timed out after 1 s: nothing has come from rank 1"
        in run_by_mpi(2, _monitored, 1)[0]
    )


def _other_sizes(n: int, more: int) -> str:
    me = flow.env.get_rank()
    with pytest.raises(WorldError) as caught:
        dist.all_reduce(torch.ones(n + more * me))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2], "the group cannot be used any more"
    return str(caught.value)


@pytest.mark.parametrize(
    ("n", "more"), [(3, 1), (300_000, 1), (1 << 21, 1 << 21), (1 << 22, 1 << 22), (5 << 20, 1)]
)
def test_ranks_that_give_other_sizes_are_told(n: int, more: int) -> None:
    """Different sizes raise an error, including sizes that consist of full pieces."""
    one, other = run_by_mpi(2, _other_sizes, n, more)
    assert f"all_reduce of float32 [{n}]: rank 1 sent" in one or "gave up" in one
    assert f"all_reduce of float32 [{n + more}]: rank 0 sent" in other or "gave up" in other


def _late() -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if flow.env.get_rank() == 1:
        dist.barrier()
        return ""
    progress = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    with pytest.raises(WorldError) as caught:
        progress.wait()
    with pytest.raises(RuntimeError, match="timed out"):
        dist.irecv(torch.ones(3), 1).wait(timedelta(seconds=0.2))
    assert progress.is_completed()
    assert not progress.is_success()
    assert progress.exception() is caught.value
    dist.barrier()
    return str(caught.value)


def test_a_wait_ends_with_the_groups_time_limit() -> None:
    said = run_by_mpi(2, _late)[0]
    assert (
        "of ranks [0, 1]: all_reduce of float32 [3]: timed out after 1 s: nothing has come from "
        "rank 1" in said
    )


def _no_partner() -> None:
    if flow.env.get_rank() == 0:
        _made_by_members([0, 1], timeout=timedelta(seconds=1))


def test_a_group_that_not_all_members_make() -> None:
    with pytest.raises(RanksFailed, match=r"after 1 s ranks \[1\] have not joined"):
        run_by_mpi(2, _no_partner)
