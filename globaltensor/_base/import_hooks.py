"""Run code when a module is first imported, so that users who never import it pay nothing.

`patches` calls `when_imported` for modules that torch and other libraries import late.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["when_imported"]


class _LateFinder:
    """A finder for one module, which changes that module right after its code has run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changes: list[Callable[[Any], None]] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                # Not at the search, where a program may only ask for the module's place, and not
                # before the code has run, which may fail and be tried again.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _waiting.pop(name, None)
                for change in self.changes:
                    change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_waiting: dict[str, _LateFinder] = {}


def when_imported(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change(module)`` once the module is imported: now, or at its import."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    if name not in _waiting:
        _waiting[name] = _LateFinder(name)
        sys.meta_path.insert(0, _waiting[name])
    _waiting[name].changes.append(change)
