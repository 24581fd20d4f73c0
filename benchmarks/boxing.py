"""Compare boxing with DTensor's redistribute on 2 gloo processes.

Both move the same tensors in turn, and the results are medians. Run it on a machine that is
otherwise idle.

python benchmarks/boxing.py            a table
python benchmarks/boxing.py --json     one object a line: case, unit, the median of each contender, and the share of what a bare pair of messages moves
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

RANKS = 2
#: name -> (rows, columns, number of measurements)
SIZES = {"4 KB": (32, 32, 200), "1 MB": (512, 512, 60), "26 MB": (2560, 2560, 25)}
LINKS = ("S(0)->B", "S(1)->B", "P->B", "P->S(0)", "P->S(1)", "S(0)->S(1)", "S(1)->S(0)", "B->S(0)")


def measure(contenders: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Return the median times in ms of functions that are called in turn.

    A call starts when all ranks are ready, and its time is that of the slowest rank."""
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(times + 3):
        for name in names if turn % 2 else names[::-1]:
            dist.barrier()
            start = time.perf_counter()
            contenders[name]()
            spent[name].append(time.perf_counter() - start)
    mine = torch.tensor([spent[name][3:] for name in names], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return {
        name: statistics.median(row.tolist()) * 1e3 for name, row in zip(names, mine, strict=True)
    }


def cases() -> list[dict[str, object]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from globaltensor.boxing import box, plan_boxing
    from globaltensor.sbp import broadcast, partial_sum, split
    from globaltensor.sharding.placement import placement
    from globaltensor.sharding.spec import Spec

    mesh, everyone = init_device_mesh("cpu", (RANKS,)), placement("cpu", list(range(RANKS)))
    theirs = {"B": Replicate(), "P": Partial(), "S(0)": Shard(0), "S(1)": Shard(1)}
    ours = {"B": broadcast, "P": partial_sum, "S(0)": split(0), "S(1)": split(1)}
    peer, out = 1 - dist.get_rank(), []
    for size, (rows, columns, times) in SIZES.items():
        for link in LINKS:
            a, b = link.split("->")
            src, dst = (
                Spec.make((rows, columns), torch.float32, everyone, ours[e]) for e in (a, b)
            )
            local = torch.randn(src.local_shape(dist.get_rank()))
            d = DTensor.from_local(local, mesh, [theirs[a]], run_check=False)
            route = plan_boxing(src, dst)
            sent, received = (
                torch.zeros(max(1, route.bytes // 4)),
                torch.empty(max(1, route.bytes // 4)),
            )

            def bare(sent: torch.Tensor = sent, received: torch.Tensor = received) -> None:
                works = [dist.irecv(received, peer), dist.isend(sent, peer)]
                for work in works:
                    work.wait()  # type: ignore[union-attr]

            contenders: dict[str, Callable[[], object]] = {
                "dtensor": lambda d=d, e=theirs[b]: d.redistribute(mesh, [e]).to_local(),  # type: ignore[misc]
                "ours": lambda local=local, src=src, dst=dst: box(local, src, dst),  # type: ignore[misc]
            }
            if route.bytes:
                contenders["messages"] = bare
            medians = measure(contenders, times)
            row: dict[str, object] = {
                "case": f"{link} {size}",
                "unit": "ms",
                **{name: round(ms, 4) for name, ms in medians.items()},
            }
            if route.bytes:
                row["bytes"] = route.bytes
                row["share_of_link"] = round(medians["messages"] / medians["ours"], 3)
            out.append(row)
    return out


def work(rank: int, meeting: str, as_json: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    rows = cases()
    if rank == 0:
        if as_json:
            print("\n".join(json.dumps(row) for row in rows))
        else:
            print(
                f"{'case':20} {'dtensor':>10} {'ours':>10} {'ours/dtensor':>13} {'messages':>10} "
                f"{'share of link':>14}   (ms)"
            )
            for row in rows:
                ratio = float(row["ours"]) / float(row["dtensor"])  # type: ignore[arg-type]
                link = f"{row.get('messages', '-'):>10} {row.get('share_of_link', '-'):>14}"
                print(
                    f"{row['case']:20} {row['dtensor']:>10} {row['ours']:>10} {ratio:>13.2f} {link}"
                )
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank, args.meeting, args.json)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [
            sys.executable,
            __file__,
            "--meeting",
            os.path.join(folder, "meeting"),
            *(["--json"] if args.json else []),
        ]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(r)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            )
            for r in range(RANKS)
        ]
        try:
            return max(abs(r.wait(timeout=600)) for r in ranks)
        finally:
            for r in ranks:
                r.kill()


if __name__ == "__main__":
    sys.exit(main())
