"""The CPU cores that this process may use."""

from __future__ import annotations

import os
import sys

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Return the number of CPU cores that this process may run on, at least 1.

    On Linux it respects the affinity, which taskset, Slurm and containers set.

    >>> usable_cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
