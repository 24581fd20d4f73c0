"""The folders from which processes started by a test import this suite's modules."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
#: The tests' own folders. Other tests import modules from them, as `pythonpath` in pyproject.toml
#: says.
FOLDERS = [
    TESTS,
    *sorted(
        path
        for path in TESTS.rglob("*")
        if path.is_dir()
        and not path.name.startswith("__")
        and TESTS / "support" not in (path, *path.parents)
    ),
]
PYTHONPATH = os.pathsep.join(map(str, [ROOT, *FOLDERS]))
