"""Solve an instance of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.

    python -m globaltensor.auto.iopddl FILE --seconds 60 --out SOLUTION

FILE is JSON or gzipped JSON. SOLUTION becomes a JSON list with one strategy a node. The program
prints the cost, a proven lower bound, the gap, and feasibility with the peak usage and the limit.
All are exact integers. The time limit counts from the start of the process. The exit code is 0 with
a solution, 1 where none was found, and 2 where the file is invalid.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time

from .._base.atomic_file import check_writable, write_text
from .solver import Problem, ProblemError, Solution, from_iopddl, solve

#: Time reserved for the step that is running at the time limit, and for writing the answer: in
#: seconds, and as a fraction of the time limit.
RESERVE = 0.5, 0.05


def process_age() -> float:
    """Return the seconds since this process started.

    On a system without this information, estimate it from processor time.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            started = int(file.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 2 * time.process_time()


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic() - process_age()
    parser = argparse.ArgumentParser(
        prog="python -m globaltensor.auto.iopddl", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("file", help="the instance, .json or .json.gz")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="time limit from the start of the process (default: 60)",
    )
    parser.add_argument(
        "--out", help="file to write the solution to: a JSON list with one strategy for each node"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the randomised stages (default: 0)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="number of threads for the integer programs (default: 2)",
    )
    options = parser.parse_args(arguments)
    gc.disable()  # the search makes millions of numbers and no cycles
    try:
        problem = from_iopddl(options.file)
        if options.out:
            check_writable(options.out)  # fail now rather than after the search
    except (ProblemError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    left = (
        options.seconds - (time.monotonic() - started) - RESERVE[0] - RESERVE[1] * options.seconds
    )
    solution = solve(problem, seconds=max(left, 0.0), seed=options.seed, threads=options.threads)
    if solution.choice is None:
        sys.stderr.write(f"error: {missing(problem, solution, options.seconds)}\n")
        return 1
    if options.out:
        write_text(options.out, json.dumps(solution.choice))
    gap = "optimal" if solution.optimal else f"gap {solution.gap:.4%}"
    lines = [
        f"cost {solution.cost}",
        f"bound {solution.bound}",
        gap,
        f"feasible yes, peak usage {solution.peak}, limit {problem.usage_limit}",
    ]
    lines.append(f"seconds {time.monotonic() - started:.1f}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def missing(problem: Problem, solution: Solution, seconds: float) -> str:
    """Explain why there is no solution, and what would help."""
    if not solution.infeasible:
        return (
            f"no feasible choice was found in {seconds:g} s, but it is not proven that none "
            "exists: give more time with --seconds"
        )
    text = (
        f"no choice of strategies fits the usage limit {problem.usage_limit} and avoids the "
        f"forbidden entries (proven)"
    )
    if solution.least_usage is None:
        return f"{text}; without the limit there is none either"
    found, bound = solution.least_usage
    return f"{text}; a limit of {found} would do" + (
        "" if bound == found else f", one below {bound} would not"
    )


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # freeing millions of numbers one by one takes a second
