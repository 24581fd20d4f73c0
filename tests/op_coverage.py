"""The coverage report: torch's ops on global tensors. `make coverage` writes docs/coverage.md and
docs/coverage.json.

An op *ran* **native** if its rule kept an operand split. It ran **composite** if it is written with
other global ops (torch's own Python body, or ours) and none of them replicated the largest operand.
It ran **own** if it needs no data (shapes, dtypes, functions without operands). It ran **whole** if
a rule needs every operand replicated or the result's shape depends on data. It ran **fallback** if
no rule knows it: every operand is replicated, with a warning. The best of all samples and layouts
counts.

At most three samples of an op are tried (the first, the first of those with the most dims, one
more). Each runs on 2, 4 and 2x2 simulated ranks, in up to three fixed layouts and one drawn layout,
partial sums among them. Shards have unequal sizes, and are empty if there are fewer elements than
ranks.

The verdict **right** means plain torch's numbers in every layout; of ops that draw random numbers
only shapes and dtypes are compared. The verdict **some** means right or refused with an error that
names a fix, never wrong. The verdict **refused** means refused in every layout, **wrong** means
other numbers, and **error** means an error that is not the library's.
DTensor's columns use the same samples on two ranks, in the layouts that do not mix: every operand
split by its first dim, the first operand only, or all by the last dim. There **some** means that
DTensor raises in some of these layouts, and **fails** that it raises in all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
GRIDS = ((2,), (4,), (2, 2))
KINDS = ("forward", "backward", "in-place", "out")
RAN = ("native", "composite", "whole", "fallback", "own")
VERDICTS = ("right", "some", "refused", "error", "wrong")
SECONDS = 240.0  # limit for one op
PEER_SECONDS = 15.0  # DTensor's share of it: with many operands its search for placements is slow

Row = dict[str, Any]


def measure(task: tuple[int, int, int]) -> Row:
    """Measure one op and return its row of the report."""
    import torch

    torch.set_num_threads(1)
    from support.dtensor import outcomes_of_dtensor
    from support.opinfo import dtype_of, name_of, ops, outcomes

    index, samples, draws = task
    op, began = ops()[index], time.monotonic()
    ours = [vars(o) for o in outcomes(op, GRIDS, samples, draws)]
    theirs, start = [], time.monotonic()
    for o in outcomes_of_dtensor(op, samples):
        theirs.append(vars(o))
        if time.monotonic() - start > PEER_SECONDS:
            break
    row = {
        "op": name_of(op),
        "float": torch.float32 in op.dtypes,
        "dtype": str(dtype_of(op)).removeprefix("torch."),
        **summary(ours),
    }
    peer = summary([{**o, "how": "refused" if o["how"] == "error" else o["how"]} for o in theirs])
    row["dtensor"] = {
        "verdicts": peer["verdicts"],
        "uneven": peer["uneven"],
        "problems": peer["problems"][:1],
    }
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def verdict(hows: Sequence[str]) -> str:
    """Return the verdict on the outcomes of one kind."""
    n = Counter(hows)
    return (
        "wrong"
        if n["wrong"]
        else "error"
        if n["error"]
        else "right"
        if not n["refused"]
        else "some"
        if n["right"]
        else "refused"
    )


def summary(found: Sequence[dict[str, Any]]) -> Row:
    """Summarize outcomes: {kind: verdict}, how the op ran, the verdict on forward with uneven
    shards, and the first problem."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in found:
        by_kind[outcome["what"]].append(outcome)
    verdicts, problems = {}, []
    for what, outcomes in by_kind.items():
        verdicts[what] = verdict([o["how"] for o in outcomes])
        if verdicts[what] != "right":
            problems.append(
                next(
                    f"{what} of {o['layouts']} on {list(o['grid'])}: {o['why']}"
                    for o in outcomes
                    if o["how"] == _worst(outcomes)
                )
            )
    ran = [o["ran"] for o in found if o["what"] == "forward" and o["ran"]]
    uneven = [o["how"] for o in found if o["what"] == "forward" and o["uneven"]]
    return {
        "ran": next((kind for kind in RAN if kind in ran), ""), "calls": len(found),
        "verdicts": verdicts,
        "uneven": verdict(uneven) if uneven else "", "problems": problems,
    }  # fmt: skip


def _worst(outcomes: Sequence[dict[str, Any]]) -> str:
    return next(h for h in ("wrong", "error", "refused") if any(o["how"] == h for o in outcomes))


# ----------------------------------------------------------------------------------------- the page


def report(rows: Sequence[Row]) -> str:
    """Return the text of the page."""
    measured = [r for r in rows if r["verdicts"]]
    floats = [r for r in measured if r["float"]]
    text = ["# Coverage", "", (__doc__ or "").split("\n\n", 1)[1].strip(), ""]
    text += [
        (f"{len(rows)} entries of torch's op database, {sum(r['float'] for r in rows)} of which "
        f"take float32; {len(measured)} have samples for a CPU."),
        (f"{sum(r['calls'] for r in rows)} calls on 2, 4 and 2x2 simulated ranks were compared "
        f"with plain torch."), "",
    ]  # fmt: skip
    text += ["| ran | all | float32 |", "|---|---|---|"]
    text += [
        f"| {kind or 'not at all'} | {_count(measured, 'ran', kind)} | "
        f"{_count(floats, 'ran', kind)} |"
        for kind in (*RAN, "")
    ]
    text += [
        "",
        "| verdict | "
        + " | ".join(f"{k}" for k in KINDS)
        + " | uneven | DTensor forward | backward | uneven |",
        "|---" * 9 + "|",
    ]
    for v in VERDICTS:
        ours = [sum(r["verdicts"].get(k) == v for r in measured) for k in KINDS] + [
            _count(measured, "uneven", v)
        ]
        peers = [r["dtensor"] for r in measured]
        theirs = [
            sum(p["verdicts"].get(k) == v for p in peers) for k in ("forward", "backward")
        ] + [sum(p["uneven"] == v for p in peers)]
        text.append(
            f"| {'refused (DTensor: fails)' if v == 'refused' else v} | "
            + " | ".join(map(str, [*ours, *theirs]))
            + " |"
        )
    text += ["", "## Refused, or wrong", ""]
    text += [
        f"- `{r['op']}`: {'; '.join(r['problems'])}"
        for r in measured
        if {"refused", "error", "wrong"} & set(r["verdicts"].values())
    ]
    for kind, title in (
        ("fallback", "Computed on full tensors, for lack of a rule"),
        ("whole", "Computed on full tensors by a rule"),
    ):
        text += [
            "",
            f"## {title}",
            "",
            ", ".join(f"`{r['op']}`" for r in measured if r["ran"] == kind) or "none",
        ]
    text += [
        "",
        "## Every entry",
        "",
        (
            "| op | ran | forward | backward | in-place | out | uneven | DTensor forward | "
            "backward | "
            "uneven |"
        ),
        "|---" * 10 + "|",
    ]
    for r in rows:
        peer = r["dtensor"]
        cells = [r["ran"] or "-", *(r["verdicts"].get(k, "") for k in KINDS), r["uneven"]]
        cells += [
            {"refused": "fails"}.get(v, v)
            for v in (
                peer["verdicts"].get("forward", ""),
                peer["verdicts"].get("backward", ""),
                peer["uneven"],
            )
        ]
        text.append(f"| `{r['op']}` | " + " | ".join(cells) + " |")
    return "\n".join([*text, ""])


def _count(rows: Sequence[Row], key: str, value: str) -> int:
    return sum(r[key] == value for r in rows)


# ------------------------------------------------------------------------------------------ the run


def pooled(tasks: Sequence[Any], jobs: int) -> Iterator[tuple[int, Row]]:
    """Yield each task's row from one of a few processes, in the order of completion. An op that
    kills its process, or takes too long, is reported as such."""
    from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool

    context, left = multiprocessing.get_context("spawn"), list(tasks)
    while left:
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            running: dict[Any, Any] = {}
            try:
                while left or running:
                    while (
                        left and len(running) < jobs
                    ):  # no task waits in the pool, so a crash names the running tasks
                        task = left.pop(0)
                        running[pool.submit(measure, task)] = task
                    done, _ = wait(running, timeout=SECONDS, return_when=FIRST_COMPLETED)
                    if not done:
                        raise BrokenProcessPool
                    for future in done:
                        yield running[future][0], future.result()
                        del running[future]
            except BrokenProcessPool:
                for process in list((pool._processes or {}).values()):
                    process.kill()
                for task in running.values():
                    died = {"verdicts": {}, "uneven": "", "problems": []}
                    yield task[0], {
                        "op": f"number {task[0]}", "float": True, "dtype": "", "ran": "",
                        "calls": 0, "verdicts": {"forward": "error"}, "uneven": "",
                        "problems": ["its process died, or took too long"], "dtensor": died,
                    }  # fmt: skip


def write(folder: Path, rows: Sequence[Row]) -> None:
    (folder / "coverage.json").write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    (folder / "coverage.md").write_text(report(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=3, help="samples of each op at most")
    parser.add_argument(
        "--draws",
        type=int,
        default=1,
        help="drawn layouts of each sample, beside up to three fixed ones",
    )
    parser.add_argument(
        "--only",
        default="",
        help=(
            "ops whose name holds one of these texts (comma between; =name: that op); the others "
            "keep their rows"
        ),
    )
    parser.add_argument("--part", default="1/1", help="k/n: the k-th of n slices of the ops")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs", help="folder for coverage.md and coverage.json"
    )
    options = parser.parse_args()
    from support.opinfo import name_of, ops

    part, parts = map(int, options.part.split("/"))
    texts = options.only.split(",")
    names = [name_of(op) for op in ops()]
    chosen = [
        i
        for i in range(part - 1, len(names), parts)
        if any(t in names[i] or t == f"={names[i]}" for t in texts)
    ]
    data = options.out / "coverage.json"
    every = options.only == "" and parts == 1
    kept: dict[str, Row] = (
        {} if every or not data.exists() else {r["op"]: r for r in json.loads(data.read_text())}
    )
    fresh: list[Row] = []
    for i, row in pooled([(i, options.samples, options.draws) for i in chosen], options.jobs):
        kept[names[i]] = {**row, "op": names[i]}
        fresh.append(kept[names[i]])
        bad = {"error", "wrong"} & set(row["verdicts"].values())
        if len(fresh) % 20 == 0:
            write(options.out, [kept[n] for n in names if n in kept])
        print(
            f"{len(fresh)}/{len(chosen)} {names[i]} {row['ran']} {row['verdicts']}",
            *(row["problems"] if bad else []),
            flush=True,
        )
    write(options.out, [kept[n] for n in names if n in kept])
    wrong = [r["op"] for r in fresh if {"error", "wrong"} & set(r["verdicts"].values())]
    print(f"{len(fresh)} ops, {len(wrong)} with something wrong: {' '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
