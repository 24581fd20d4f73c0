"""Compare this tree with a commit: run a benchmark on both at once, in turn block by block.

    python benchmarks/against.py HEAD~1 data_parallel --rounds 15 --only "4 x"

Two runs one after the other differ by the machine's pace, which is often more than what a change
costs. Here each block of calls has the same block of the other tree beside it, and the report has
the median over the rounds of their ratio, with its quartiles. A ratio above 1 means that this tree
is slower. Both runs take their benchmarks from this tree and the library from their own, so a
benchmark that names a module which the commit lacks does not run.

The addresses that a process gets change its times. ``--starts 5`` starts both runs five times, and
the report takes the rounds of all starts together. Cores differ in pace: keep a benchmark of one
process on one core, by ``taskset -c 1 python benchmarks/against.py ...``. A ratio of ours proves
nothing if the ratios of the other contenders are as far from 1.

    python benchmarks/against.py HEAD~1 eager_overhead --instructions

counts the processor's instructions by valgrind. Counts hardly differ from run to run, so the report
shows a change of a tenth of a percent. Only benchmarks of one process can be counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import instructions
from common import LIMIT, ROOT, end, end_by_signal, table
from turns import FOLDER, ROUNDS, RUN

HERE = Path(__file__).resolve().parent


def started(
    tree: Path, run: str, folder: Path, chosen: argparse.Namespace
) -> subprocess.Popen[str]:
    """Start the benchmark of a tree, as run "A" or "B"."""
    counts = folder / f"{run}.jsonl"
    if chosen.instructions:
        before = instructions.command(counts)
        # the same order of sets in both runs
        environment = {instructions.COUNTS: str(counts), "PYTHONHASHSEED": "0"}
    else:
        before = []
        environment = {FOLDER: str(folder), RUN: run, ROUNDS: str(chosen.rounds)}
    with (folder / f"{run}.out").open("w") as output:
        return subprocess.Popen(
            [
                *before,
                sys.executable,
                str(tree / "benchmarks" / f"{chosen.benchmark}.py"),
                "--json",
                *chosen.rest,
            ],
            cwd=tree,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)} | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def wait(runs: list[subprocess.Popen[str]], folder: Path) -> None:
    """Wait for both runs. If one fails, end the other, and exit with what it said."""
    until = time.monotonic() + LIMIT
    try:
        codes = [run.poll() for run in runs]
        while None in codes and not any(codes):  # one works still, and none has failed
            if time.monotonic() > until:
                sys.exit(f"no end after {LIMIT:.0f} s")
            time.sleep(0.2)
            codes = [run.poll() for run in runs]
    finally:
        for run in runs:
            if run.poll() is None:
                end(run, group=True)
    for name, run in zip("AB", runs, strict=True):
        if run.returncode > 0:  # the other one has been ended by a signal
            sys.exit((folder / f"{name}.out").read_text()[-4000:])
    if not (folder / "A.jsonl").exists():
        sys.exit("this benchmark has no contenders that `common.interleave` times in turn")


def ratios(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the ratios of this tree's seconds, or instructions, to the commit's.

    They are by case and contender."""
    lines = (folder / "A.out").read_text().splitlines()
    cases = [str(json.loads(line)["case"]) for line in lines if line.startswith("{")]
    before, now = (
        [json.loads(line) for line in (folder / f"{run}.jsonl").read_text().splitlines()]
        for run in "AB"
    )
    return {
        cases[i] if i < len(cases) else str(i): {
            contender: [y / x for x, y in zip(a[contender], b[contender], strict=True)]
            for contender in a
        }
        for i, (a, b) in enumerate(zip(before, now, strict=True))
    }


def rows(starts: list[dict[str, dict[str, list[float]]]]) -> list[dict[str, object]]:
    """Return a row for each case: the median ratio over the rounds of all starts, and quartiles."""
    listed: list[dict[str, object]] = []
    for case, contenders in starts[0].items():
        row: dict[str, object] = {"case": case, "unit": "ratio"}
        for contender in contenders:
            each = [ratio for start in starts for ratio in start[case][contender]]
            low, middle, high = statistics.quantiles(each, n=4)
            row[contender] = f"{middle:.3f} [{low:.2f}, {high:.2f}]"
        listed.append(row)
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="what this tree is compared with")
    parser.add_argument("benchmark", help="the name of a benchmark here that has contenders")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each contender")
    parser.add_argument("--starts", type=int, default=1, help="times that both runs are started")
    parser.add_argument(
        "--instructions", action="store_true", help="count instructions instead of seconds"
    )
    chosen, chosen.rest = parser.parse_known_args()
    end_by_signal()
    folder = Path(tempfile.mkdtemp(prefix="against-"))
    tree = folder / "tree"
    git = ["git", "-C", str(ROOT), "worktree"]
    try:
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), chosen.commit], check=True)
        shutil.copytree(HERE, tree / "benchmarks", dirs_exist_ok=True)
        starts = []
        for i in range(chosen.starts):
            turns = folder / str(i)
            turns.mkdir()
            runs = [started(each, run, turns, chosen) for each, run in ((tree, "A"), (ROOT, "B"))]
            wait(runs, turns)
            starts.append(ratios(turns))
        print(table(rows(starts)))
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
