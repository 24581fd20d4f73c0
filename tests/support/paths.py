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
    *sorted(p for p in TESTS.rglob("*") if p.is_dir() and not p.name.startswith(("__", "support"))),
]
PYTHONPATH = os.pathsep.join(map(str, [ROOT, *FOLDERS]))
