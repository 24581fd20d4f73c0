"""The folders from which tests and the processes that they start import modules."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

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


def import_script(path: str) -> Any:
    """Import a script of this repository that is in no package, such as an example."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
