"""Tests of boxing between real processes over gloo. Two of the processes test every dtype, tensors
with gaps, and gradients. All four test groups in any order of ranks."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time
import warnings

import pytest
import torch
from support.paths import PYTHONPATH
from support.warm_python import warm_python

from globaltensor.distributed.backends.shared_memory import VARIABLE, host

RANKS = 4
DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    ),
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    ),
    *(
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
]


@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.sweep(2)
def test_processes(shared: str, tmp_path: pathlib.Path) -> None:
    """All processes run `work`, below, and the first failure ends the others. They communicate
    through shared memory, and through gloo alone."""
    env = {
        **os.environ,
        VARIABLE: shared,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [PYTHONPATH, os.environ.get("PYTHONPATH")])),
    }
    logs = [tmp_path / f"rank{r}.txt" for r in range(RANKS)]
    ranks = []
    for r, log in enumerate(logs):
        with log.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [warm_python(), __file__, str(r), str(tmp_path / "meeting")],
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + 90
    try:
        while (
            any(r.poll() is None for r in ranks)
            and not any(r.poll() for r in ranks)
            and time.monotonic() < end
        ):
            time.sleep(0.05)
    finally:
        for r in ranks:
            r.kill()
            r.wait()
    text = "\n".join(log.read_text()[-3000:] for log in logs)
    print(text)
    assert [r.returncode for r in ranks] == [0] * RANKS, text


def values(dtype: torch.dtype) -> torch.Tensor:
    t = torch.arange(1, 16).reshape(5, 3)
    if dtype is torch.bool:
        return t % 3 == 0
    return (2.0 ** (t % 5)).to(dtype) if dtype is torch.float8_e8m0fnu else t.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype is b.dtype and torch.equal(*bits)


def every_dtype() -> None:
    from globaltensor.boxing import box
    from globaltensor.distributed.world import world
    from globaltensor.sbp import broadcast, partial_max, partial_sum, split
    from globaltensor.sharding.placement import Placement
    from globaltensor.sharding.spec import Spec

    everyone, turned = Placement("cpu", [0, 1]), Placement("cpu", [1, 0])
    whole = [broadcast, split(0), split(1)]
    for dtype in DTYPES:
        full = values(dtype)
        entries = [*whole] if dtype in (torch.float8_e8m0fnu,) else [*whole, partial_sum]
        start = Spec.make(full.shape, dtype, everyone, broadcast)
        for a in entries:
            for b in entries:
                ways = [(everyone, everyone), (everyone, turned), (turned, Placement("cpu", [1]))]
                for here, there in ways if dtype is torch.float64 else ways[:1]:
                    src, dst = (
                        Spec.make(full.shape, dtype, here, a),
                        Spec.make(full.shape, dtype, there, b),
                    )
                    local = box(box(box(full, start, src), src, dst), dst, dst.replicated())
                    if dst.placement.coordinate(world().rank) is not None:
                        assert same(local, full), f"{src} -> {dst}: {local} is not {full}"
        if not dtype.is_complex:
            largest = Spec.make(full.shape, dtype, everyone, partial_max)
            assert same(box(full, largest, start), full)


def strides() -> None:
    from globaltensor.boxing import box
    from globaltensor.sbp import broadcast, partial_sum, split
    from globaltensor.sharding.placement import Placement
    from globaltensor.sharding.spec import Spec

    everyone = Placement("cpu", [0, 1])
    full = torch.arange(48.0).reshape(6, 8)
    kinds = [
        full,
        full.T.contiguous().T,
        torch.zeros(6, 8, 2)[..., 0],
        torch.zeros(12, 16)[::2, ::2],
        full.new_zeros(9, 8)[2:8],
    ]
    for gap in kinds[2:]:
        gap.copy_(full)
    for gap in kinds:
        for a in (split(0), split(1), partial_sum):
            for b in (broadcast, split(0), split(1)):
                start, src, dst = (
                    Spec.make((6, 8), torch.float32, everyone, e) for e in (broadcast, a, b)
                )
                local = box(gap, start, src)
                before = local.clone()
                assert torch.equal(box(box(local, src, dst), dst, start), full)
                assert torch.equal(local, before)


def gradients() -> None:
    from globaltensor.boxing import box
    from globaltensor.distributed.world import world
    from globaltensor.sbp import broadcast, partial_sum, split
    from globaltensor.sharding.placement import Placement
    from globaltensor.sharding.spec import Spec

    rank, first = world().rank, Placement("cpu", [0])
    everyone = Placement("cpu", [0, 1])
    full = torch.arange(1.0, 16.0, dtype=torch.float64).reshape(5, 3)
    for a in (broadcast, split(0), split(1), partial_sum):
        for b, place in (
            (broadcast, everyone),
            (split(0), everyone),
            (split(1), Placement("cpu", [1])),
            (broadcast, first),
        ):
            start, src = (Spec.make(full.shape, full.dtype, everyone, e) for e in (broadcast, a))
            dst = Spec.make(full.shape, full.dtype, place, b)
            x = box(full, start, src, alias=False).requires_grad_()
            y = box(box(x, src, dst), dst, dst.replicated())
            (g,) = torch.autograd.grad((y**3).sum() * (rank == place.flat[0]), x, create_graph=True)
            whole = box(g, src.dual(), start)
            assert torch.allclose(whole, 3 * full**2)
            (h,) = torch.autograd.grad((whole * whole).sum() * (rank == 0), x)
            assert torch.allclose(box(h, src.dual(), start), 36 * full**3)


def collectives() -> None:
    from globaltensor.distributed.world import world

    rank, comm = world().rank, world().comm((1, 0))
    flat = torch.full((70_000,), rank + 1.0)
    handles = [comm.all_reduce_async(flat), comm.all_reduce_async(small := torch.ones(3))]
    assert comm.all_gather_object(rank) == [1, 0]
    for handle in handles:
        handle.wait()
    assert flat.eq(3).all()
    assert small.tolist() == [2.0] * 3
    assert [t.tolist() for t in comm.all_gather(torch.full((rank + 1,), rank), [2, 1])] == [
        [1, 1],
        [0],
    ]
    assert comm.broadcast(torch.tensor([rank]), 0).tolist() == [1]
    comm.barrier()


def under_way() -> None:
    """Run all-reduces that overlap with computation: of few and many elements, of every dtype, with
    dropped ones between them."""
    from globaltensor.distributed.world import world

    for ranks in ((1, 0), (0, 1, 2), (3, 1, 0, 2)):
        if world().rank not in ranks:
            continue
        comm, p = world().comm(ranks), len(ranks)
        for n in (1, 7, 1000, 40_000, 450_000):
            for op in ("sum", "max", "min"):
                for dtype in (
                    torch.float32,
                    torch.float64,
                    torch.int64,
                    torch.bfloat16,
                    torch.bool,
                    torch.complex64,
                    torch.uint8,
                ):
                    if dtype.is_complex and op != "sum":
                        continue
                    source = torch.Generator().manual_seed(n)
                    parts = [
                        torch.randint(0, 9, (n,), generator=source).to(dtype) for _ in range(p)
                    ]
                    mine = parts[comm.index].clone()
                    handle = comm.all_reduce_async(mine, op)
                    if n == 7:
                        comm.all_reduce_async(parts[comm.index].clone(), op)  # never awaited
                    handle.wait()
                    handle.wait()
                    wide = torch.stack(
                        [
                            q.to(torch.complex64 if dtype.is_complex else torch.float64)
                            for q in parts
                        ]
                    )
                    want = (
                        wide.sum(0)
                        if op == "sum"
                        else wide.amax(0)
                        if op == "max"
                        else wide.amin(0)
                    )
                    assert torch.equal(mine, want.to(dtype)), (ranks, n, op, dtype)


def groups() -> None:
    from globaltensor.boxing import box, plan_boxing
    from globaltensor.distributed.backends import process_group_comm
    from globaltensor.distributed.world import world
    from globaltensor.sbp import broadcast, partial_sum, split
    from globaltensor.sharding.placement import Placement
    from globaltensor.sharding.spec import Spec

    def check(shape: tuple[int, ...], src: Spec, dst: Spec) -> None:
        full = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
        own = (
            full.clone()
            if src.placement.coordinate(world().rank) is not None
            else torch.empty(0, dtype=torch.float64)
        )
        local = box(own, src.replicated(), src)
        out = box(local, src, dst)
        assert tuple(out.shape) == dst.local_shape(world().rank)
        back = box(out, dst, dst.replicated())
        if dst.placement.coordinate(world().rank) is not None:
            assert torch.equal(back, full), (
                f"{src} {src.placement} -> {dst} {dst.placement}\n{plan_boxing(src, dst)}"
            )

    draw = random.Random(1)
    placements = [
        Placement("cpu", r)
        for r in (
            [0, 1, 2, 3],
            [3, 0, 1],
            [2],
            [[0, 1], [2, 3]],
            [[3, 1], [0, 2]],
            [[0], [2]],
            [2, 1, 3, 0],
        )
    ]
    for _ in range(120):
        shape = draw.choice([(8, 8), (5, 3), (13, 2), (3, 1, 5), (7,), (2,)])
        entries = [broadcast, partial_sum, *map(split, range(len(shape)))]
        src, dst = (
            Spec.make(shape, torch.float64, p, [draw.choice(entries) for _ in p.shape])
            for p in draw.choices(placements, k=2)
        )
        check(shape, src, dst)
    # Tensors larger than the limit of an all-to-all with copies, and larger than torch's all-to-all
    # can count.
    line, turned, (short, long) = placements[0], placements[-1], ((64, 4099), (300, 700))
    for a, b in (
        (split(0), broadcast),
        (split(1), broadcast),
        (split(0), split(1)),
        (partial_sum, broadcast),
        (partial_sum, split(1)),
    ):
        for place in (line, turned):
            check(
                short,
                Spec.make(short, torch.float64, place, a),
                Spec.make(short, torch.float64, place, b),
            )
    process_group_comm._MAX_GLOO_BYTES = 1 << 16  # type: ignore[misc]
    check(
        long,
        Spec.make(long, torch.float64, line, split(0)),
        Spec.make(long, torch.float64, line, split(1)),
    )
    check(
        long,
        Spec.make(long, torch.float64, line, partial_sum),
        Spec.make(long, torch.float64, line, split(1)),
    )
    flat = torch.full((100_003,), world().rank + 1.0)
    handles = [world().comm((2, 0, 3, 1)).all_reduce_async(part) for part in flat.split(30_000)]
    for handle in handles:
        handle.wait()
    assert flat.eq(10).all()


def work(rank: int, meeting: str) -> None:
    import torch.distributed as dist

    from globaltensor.distributed.world import ProcessWorld, world

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    for part in (collectives, every_dtype, strides, gradients, groups, under_way):
        start = time.perf_counter()
        if rank < 2 or part in (groups, under_way):
            part()
        print(f"{part.__name__} {time.perf_counter() - start:.2f} s", flush=True)
    here = world()
    assert isinstance(here, ProcessWorld)
    assert (here.neighbours is not None) == bool(host())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2])


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
    ],
)
def test_incomplete_variables_are_named(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from globaltensor.distributed.world import reset_world, world
    from globaltensor.errors import WorldError

    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reset_world()
    try:
        with pytest.raises(WorldError, match=text):
            world()
    finally:
        reset_world()
