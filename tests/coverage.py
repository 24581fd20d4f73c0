"""The coverage report: torch's ops on global tensors. `make coverage` writes docs/coverage.md and docs/coverage.json.

An op is *native* where some operand stayed split or partial, *whole* where its rule wants every operand whole or its result's shape depends on data,
*fallback* where no rule knows it; *right* where every outcome of every kind is plain torch's, or a refusal by the library in a layout that some other
layout does not share; *refused* where no layout works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
RANKS = {"forward": 0, "backward": 1, "in-place": 2, "out": 3}
RAN = ("native", "own", "whole", "fallback")

Row = dict[str, Any]


def measure(task: tuple[int, tuple[tuple[int, ...], ...], int, int]) -> Row:
    """One op's row of the report."""
    import torch

    torch.set_num_threads(1)
    from support.opinfo import OPS, name_of, outcomes

    index, grids, samples, draws = task
    found = list(outcomes(OPS[index], grids, samples, draws))
    return {"op": name_of(OPS[index]), **summary([vars(o) for o in found])}


def summary(found: Sequence[dict[str, Any]]) -> Row:
    """Outcomes -> {what: verdict}, how it ran, and the first thing that went wrong."""
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in found:
        by_kind[outcome["what"]].append(outcome)
    verdicts, problems = {}, []
    for what, outcomes in by_kind.items():
        hows = Counter(o["how"] for o in outcomes)
        verdicts[what] = "wrong" if hows["wrong"] else "error" if hows["error"] else "right" if hows["right"] else "refused"
        if verdicts[what] != "right":
            problems.append(next(f"{what} of {o['layouts']}: {o['why']}" for o in outcomes if o["how"] not in ("right",)))
    ran = [o["ran"] for o in found if o["what"] == "forward" and o["ran"]]
    return {"ran": next((kind for kind in RAN if kind in ran), "nothing"), "calls": len(found), "verdicts": verdicts, "problems": problems}


def report(rows: Sequence[Row]) -> str:
    """The page."""
    text = ["# Coverage", "", (__doc__ or "").split("\n\n", 1)[1].strip(), ""]
    calls = sum(r["calls"] for r in rows)
    measured = [r for r in rows if r["verdicts"]]
    text += [f"{len(measured)} entries of torch's op database, {calls} calls compared with plain torch.", ""]
    text += ["| | forward | backward | in-place | `out=` |", "|---|---|---|---|---|"]
    for verdict in ("right", "refused", "error", "wrong"):
        text.append(f"| {verdict} | " + " | ".join(str(sum(r["verdicts"].get(what) == verdict for r in rows)) for what in RANKS) + " |")
    text += ["", "How they ran: " + ", ".join(f"{sum(r['ran'] == kind for r in measured)} {kind}" for kind in RAN) + ".", ""]
    bad = [r for r in rows if r["problems"]]
    text += ["## Not right", ""] + [f"- `{r['op']}`: {'; '.join(r['problems'])}" for r in bad] + [""]
    for kind in ("fallback", "whole"):
        text += [f"## Run {'on whole tensors, without a rule' if kind == 'fallback' else 'whole by rule'}", ""]
        text += [", ".join(f"`{r['op']}`" for r in measured if r["ran"] == kind) or "none", ""]
    return "\n".join(text)


def pooled(tasks: Iterable[Any], jobs: int, seconds: float) -> list[Row]:
    """Each task in one of a few processes; one that hangs or dies is reported as such, and its process replaced."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    context, rows, left = multiprocessing.get_context("spawn"), {}, list(tasks)
    while left:
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            futures = {pool.submit(measure, task): task for task in left}
            try:
                for done in as_completed(futures, timeout=seconds):
                    rows[futures[done][0]] = done.result()
                    print(f"\r{len(rows)}", end="", file=sys.stderr, flush=True)
                left = []
            except BrokenProcessPool:
                running = next(task for future, task in futures.items() if task[0] not in rows)
                rows[running[0]] = {"op": f"number {running[0]}", "ran": "nothing", "calls": 0, "verdicts": {"forward": "error"}, "problems": ["it died"]}
                left = [task for task in left if task[0] not in rows]
    return [rows[i] for i in sorted(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=6, help="samples of each op at most")
    parser.add_argument("--draws", type=int, default=3, help="drawn layouts of each sample, beside two fixed ones")
    parser.add_argument("--only", default="", help="ops whose name holds this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for coverage.md and coverage.json")
    options = parser.parse_args()
    from support.opinfo import OPS, name_of

    grids = ((2,), (4,), (2, 2))
    rows = pooled([(i, grids, options.samples, options.draws) for i, op in enumerate(OPS) if options.only in name_of(op)], options.jobs, 3600)
    (options.out / "coverage.md").write_text(report(rows))
    (options.out / "coverage.json").write_text(json.dumps(rows, indent=0))
    wrong = [r for r in rows if set(r["verdicts"].values()) & {"wrong", "error"}]
    print(f"\n{len(rows)} ops, {len(wrong)} with something wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
