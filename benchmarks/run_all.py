"""Run every benchmark and write the results.

Rows go to results/<name>.jsonl, one JSON object a line, and the tables to results/README.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import LIMIT, describe, end, end_by_signal, keep, options, table

HERE = Path(__file__).resolve().parent
#: name -> the contender that ours is compared with. If rows have different contenders, a row is
#: compared with the first of these that it has.
BENCHMARKS = {"eager_overhead": "plain", "data_parallel": "ddp", "fsdp": "fsdp2",
    "tensor_parallel": "dtensor", "boxing": "dtensor", "collectives": "gloo",
              "divergence": "off", "models": "ddp, dtensor", "long_context": "gather",
              "graph": "by hand", "pipeline": "torch",
              "auto_parallel": "data", "gpu": "plain"}  # fmt: skip

#: Results of other runs of a benchmark (`auto_parallel.py --nproc 4 --save`), which this script
#: leaves unchanged.
MORE = {"auto_parallel": ["auto_parallel_on_4"]}
OURS = ("ours", "apart", "eager", "graph", "compiled")


def run(name: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Run a benchmark in processes of its own, and return its rows. Its stderr is not captured."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / f"{name}.py"), "--json", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    finally:
        end(process, group=True)
    if process.returncode:
        sys.exit(f"{name} failed with status {process.returncode}")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def compared(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the rows as tables, with the ratio of ours to its anchor."""
    tables = []
    for base in BENCHMARKS[name].split(", "):
        those = [row for row in rows if base in row]
        if those or base == BENCHMARKS[name]:
            ratios = {
                row["case"]: {ours: row[ours] / row[base] for ours in OURS if ours in row}
                for row in those
            }
            tables.append(table(those or rows, ratios, base))
    alone = [
        row
        for row in rows
        if tables and not any(base in row for base in BENCHMARKS[name].split(", "))
    ]
    if alone and len(alone) < len(rows):
        tables.append(table(alone))
    return "\n\n".join(tables)


def page(results: Path) -> str:
    """Return a page with the tables of all existing results."""
    anchors = "plain, ddp, fsdp2, dtensor, gather, gloo, by hand, torch.distributed.pipelining"
    about = (
        f"Medians; contenders timed in turn in one run; in brackets ours over its anchor "
        f"({anchors}). `make bench` writes this page."
    )
    parts = [f"# Measured\n\n{describe()}. {about}"]
    for name in BENCHMARKS:
        for path in (results / f"{stem}.jsonl" for stem in [name, *MORE.get(name, [])]):
            if path.exists():
                parts.append(
                    f"## "
                    f"{path.stem}\n\n{compared(name, [json.loads(line) for line in path.read_text().splitlines()])}"  # noqa: E501
                )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    chosen = options(__doc__.splitlines()[0], steps=0)
    arguments = (["--quick"] if chosen.quick else []) + (
        ["--steps", str(chosen.steps)] if chosen.steps else []
    )
    # A quick run shows that the benchmarks run; its numbers are not saved.
    results = None if chosen.quick else HERE / "results"
    end_by_signal()
    for name in BENCHMARKS:
        if chosen.only not in name or (name == "gpu" and not torch.cuda.is_available()):
            continue
        # boxing.py has its own sizes and rounds
        rows = run(name, arguments if name != "boxing" else [])
        print(
            "\n".join(json.dumps({"benchmark": name} | row) for row in rows)
            if chosen.json
            else f"\n== {name}\n{compared(name, rows)}",
            flush=True,
        )
        if results:
            results.mkdir(exist_ok=True)
            keep(rows, name)
            (results / "README.md").write_text(page(results))


if __name__ == "__main__":
    main()
