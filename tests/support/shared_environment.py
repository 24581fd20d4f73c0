"""The environment of processes that several tests share."""

from __future__ import annotations

import os

__all__ = ["shared_environment"]


def shared_environment() -> dict[str, str]:
    """Return the environment without the variable by which a test ends its own processes
    (support/launched.py). Otherwise the test in which a process starts would end it."""
    return {name: value for name, value in os.environ.items() if name != "TEST_FOLDER"}
