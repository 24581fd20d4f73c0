"""Every collective of flow.distributed in every way to call it, on any backend. Each rank computes
the expected values on its own.

``sweep()`` runs in the ranks of a world. If run as a program (for example under mpirun), this file
starts a world and runs ``sweep()`` in it, with its arguments.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import globaltensor.distributed as dist

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum,
    "MAX": torch.maximum, "BAND": torch.bitwise_and, "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}  # fmt: skip
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t.clone(),
    "with gaps": lambda t: torch.zeros(*t.shape, 2, dtype=t.dtype)[..., 1].copy_(t),
}


@dataclass(frozen=True)
class Way:
    """A way to call a collective. ``rows(r)``: the length of dim 0 of rank r's data."""

    group: Any
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    late: bool = False
    layout: str = "contiguous"
    shape: tuple[int, ...] = (3, 4)
    uneven: bool = False

    def value(self, holder: int, other: int = 0, rows: int | None = None) -> torch.Tensor:
        """Return small whole numbers that differ with the holder, the receiver and the position.
        They are exact in every dtype and under every op."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        n = torch.arange(int(torch.tensor(shape).prod()))
        return ((n * (holder + 1) + 2 * holder + other) % 3).reshape(shape).to(self.dtype)

    def rows(self, rank: int) -> int | None:
        return self.ranks.index(rank) if self.uneven else None

    def hold(self, t: torch.Tensor) -> torch.Tensor:
        return LAYOUTS[self.layout](t)

    def blank(self, rows: int | None = None) -> torch.Tensor:
        return self.hold(torch.zeros_like(self.value(0, 0, rows)))

    def reduced(self, other: int = 0, rows: int | None = None) -> torch.Tensor:
        out = functools.reduce(OPS[self.op], [self.value(r, other, rows) for r in self.ranks])
        return out / len(self.ranks) if self.op == "AVG" else out

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        work = getattr(dist, name)(*args, group=self.group, async_op=self.late, **kwargs)
        if self.late:
            work.wait()

    def __str__(self) -> str:
        return (
            f"{self.op} {self.dtype} ranks {list(self.ranks)}{' async' * self.late} "
            f"{self.layout} {self.shape}{' uneven' * self.uneven}"
        )


Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]


def broadcast(w: Way, me: int) -> Pairs:
    x = w.hold(w.value(me))
    w.call("broadcast", x, src=w.ranks[-1])
    yield x, w.value(w.ranks[-1])


def all_gather(w: Way, me: int) -> Pairs:
    outs = [w.blank(w.rows(r)) for r in w.ranks]
    w.call("all_gather", outs, w.hold(w.value(me, 0, w.rows(me))))
    yield from zip(outs, [w.value(r, 0, w.rows(r)) for r in w.ranks], strict=True)


def all_gather_into_tensor(w: Way, me: int) -> Pairs:
    out = w.hold(torch.cat([w.blank() for _ in w.ranks]))
    w.call("all_gather_into_tensor", out, w.hold(w.value(me)))
    yield out, torch.cat([w.value(r) for r in w.ranks])


def gather(w: Way, me: int) -> Pairs:
    outs = [w.blank() for _ in w.ranks] if me == w.ranks[-1] else None
    w.call("gather", w.hold(w.value(me)), outs, dst=w.ranks[-1])
    yield from zip(outs or [], map(w.value, w.ranks), strict=False)


def scatter(w: Way, me: int) -> Pairs:
    out, src = w.blank(), w.ranks[-1]
    w.call(
        "scatter", out, [w.hold(w.value(src, r)) for r in w.ranks] if me == src else None, src=src
    )
    yield out, w.value(src, me)


def all_to_all(w: Way, me: int) -> Pairs:
    outs = [w.blank() for _ in w.ranks]
    w.call("all_to_all", outs, [w.hold(w.value(me, r)) for r in w.ranks])
    yield from zip(outs, [w.value(r, me) for r in w.ranks], strict=True)


def all_to_all_single(w: Way, me: int) -> Pairs:
    give, take = (
        [w.rows(r) for r in w.ranks],
        [w.rows(me) for _ in w.ranks],
    )  # rank r gets as many rows from each as its index in the group
    out = w.hold(torch.cat([w.blank(n) for n in take]))
    source = w.hold(torch.cat([w.value(me, r, n) for r, n in zip(w.ranks, give, strict=True)]))
    w.call("all_to_all_single", out, source, *((take, give) if w.uneven else ()))
    yield out, torch.cat([w.value(r, me, n) for r, n in zip(w.ranks, take, strict=True)])


def all_reduce(w: Way, me: int) -> Pairs:
    x = w.hold(w.value(me))
    w.call("all_reduce", x, op=getattr(dist.ReduceOp, w.op))
    yield x, w.reduced()


def reduce(w: Way, me: int) -> Pairs:
    x = w.hold(w.value(me))
    w.call("reduce", x, dst=w.ranks[-1], op=getattr(dist.ReduceOp, w.op))
    if me == w.ranks[-1]:
        yield x, w.reduced()


def reduce_scatter(w: Way, me: int) -> Pairs:
    out = w.blank(w.rows(me))
    w.call(
        "reduce_scatter",
        out,
        [w.hold(w.value(me, r, w.rows(r))) for r in w.ranks],
        op=getattr(dist.ReduceOp, w.op),
    )
    yield out, w.reduced(me, w.rows(me))


def reduce_scatter_tensor(w: Way, me: int) -> Pairs:
    out = w.blank()
    w.call(
        "reduce_scatter_tensor",
        out,
        w.hold(torch.cat([w.value(me, r) for r in w.ranks])),
        op=getattr(dist.ReduceOp, w.op),
    )
    yield out, w.reduced(me)


def point_to_point(w: Way, me: int) -> Pairs:
    """Send a ring of messages, and one in the other direction with a tag."""
    at, n = w.ranks.index(me), len(w.ranks)
    after, before = w.ranks[(at + 1) % n], w.ranks[at - 1]
    out, back = w.blank(), w.blank()
    works = [
        dist.isend(w.hold(w.value(me)), after, group=w.group),
        dist.irecv(out, before, group=w.group),
    ]
    works += [
        dist.isend(w.hold(w.value(me, 1)), before, group=w.group, tag=3),
        dist.irecv(back, after, group=w.group, tag=3),
    ]
    for work in works:
        work.wait()
    yield out, w.value(before)
    yield back, w.value(after, 1)


MOVES = (
    broadcast,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
)
REDUCTIONS = (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)
JOINED = (all_gather_into_tensor, all_to_all_single, reduce_scatter_tensor)


def admits(op: str, dtype: torch.dtype) -> bool:
    if op == "AVG":
        return dtype.is_floating_point
    if op.startswith("B"):
        return not dtype.is_floating_point and not dtype.is_complex
    return op == "SUM" or not dtype.is_complex


def ways(groups: list[Way]) -> Iterator[tuple[Callable[..., Pairs], Way]]:
    for way, late in itertools.product(groups, (False, True)):
        base = replace(way, late=late)
        for collective, dtype in itertools.product(MOVES, DTYPES):
            yield collective, replace(base, dtype=dtype)
        for collective, dtype, op in itertools.product(REDUCTIONS, DTYPES, OPS):
            if admits(op, dtype):
                yield collective, replace(base, dtype=dtype, op=op)
        for collective, layout in itertools.product(MOVES + REDUCTIONS, LAYOUTS):
            for dtype in (torch.float32, torch.bool):
                yield collective, replace(base, layout=layout, dtype=dtype)
        for collective, shape in itertools.product(
            MOVES + REDUCTIONS, [(), (0, 2), (1,), (1 << 14,)]
        ):
            if shape or collective not in JOINED:
                yield collective, replace(base, shape=shape)
        for collective in (all_gather, all_to_all_single, reduce_scatter):
            yield collective, replace(base, uneven=True)
    for layout, dtype in itertools.product(LAYOUTS, DTYPES):
        if len(groups[0].ranks) > 1:
            yield point_to_point, replace(groups[0], layout=layout, dtype=dtype)


def sweep(part: int = 0, parts: int = 1) -> tuple[int, list[str]]:
    """Run the sweep, or every ``parts``-th call of it. Return (number of calls, the errors, each
    with its call)."""
    size, me = dist.get_world_size(), dist.get_rank()
    everyone = tuple(range(size))
    groups = [Way(None, everyone)] + [
        Way(dist.new_group(list(ranks)), ranks)
        for ranks in ((0,), everyone[1:], everyone[::-1])
        if ranks
    ]
    count, wrong = 0, []
    calls = ways([replace(g, ranks=tuple(sorted(g.ranks))) for g in groups])
    for collective, way in itertools.islice(calls, part, None, parts):
        if me not in way.ranks:
            continue
        count += 1
        try:
            for got, want in collective(way, me):
                if got.shape != want.shape or not torch.equal(got, want.to(got.dtype)):
                    wrong.append(
                        f"rank {me}: {collective.__name__} {way}: got "
                        f"{got.flatten()[:8].tolist()}, not {want.flatten()[:8].tolist()}"
                    )
        except RuntimeError as error:
            wrong.append(f"rank {me}: {collective.__name__} {way}: {type(error).__name__} {error}")
    return count, wrong


if __name__ == "__main__":
    done, failures = sweep(*map(int, sys.argv[1:]))
    print(f"{done} calls", *failures[:10], sep="\n", flush=True)
    dist.destroy_process_group()
    raise SystemExit(bool(failures))
