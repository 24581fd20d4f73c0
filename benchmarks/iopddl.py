"""Run the solver on the contest's instances: score (best known cost / ours), bound's gap and time.

Run it on a machine that is otherwise idle.

python benchmarks/iopddl.py FOLDER            a table, for the instances A, G, M and S in the folder
python benchmarks/iopddl.py FOLDER --json     one object a line
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: instance -> (best known cost, seconds)
KNOWN = {"A": (6548641531, 60), "G": (217039, 10), "M": (49928157500, 180), "S": (1521949310, 240)}


def measure(path: Path, best: int, seconds: int) -> dict[str, Any]:
    """Run the command once on an instance, and return the row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "globaltensor.auto.iopddl",
            str(path),
            "--seconds",
            str(seconds),
            "--out",
            f"{folder}/solution.json",
        ]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * seconds + 60)
        took = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{path}: the solver ended with {done.returncode}: {done.stderr.strip()}")
    cost, bound = (
        int(re.search(rf"^{word} (-?\d+)", done.stdout, re.M)[1]) for word in ("cost", "bound")
    )  # type: ignore[index]
    gap = (cost - bound) / cost
    return {
        "case": path.name.split(".")[0],
        "cost": cost,
        "bound": bound,
        "score": round(best / cost, 5),
        "gap": round(gap, 6),
        "seconds": round(took, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="instances, as letters")
    options = parser.parse_args()
    if not options.json:
        print(
            "| instance | limit s | took s | cost | bound | score | gap "
            "|\n|---|---|---|---|---|---|---|"
        )
    for name, (best, seconds) in KNOWN.items():
        if options.only and name not in options.only:
            continue
        paths = sorted(options.folder.glob(f"{name}.json*"))
        if not paths:
            raise SystemExit(
                f"{options.folder} has no {name}.json or {name}.json.gz; --only takes the letters "
                f"of the instances that are there"
            )
        row = measure(paths[0], best, seconds)
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            values = (
                row["case"],
                seconds,
                row["seconds"],
                row["cost"],
                row["bound"],
                row["score"],
                f"{row['gap']:.4%}",
            )
            print("| " + " | ".join(map(str, values)) + " |", flush=True)


if __name__ == "__main__":
    main()
