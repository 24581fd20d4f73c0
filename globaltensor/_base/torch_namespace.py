"""Names and modules that are torch's: what a package of ours doesn't define is handed on from the
package of torch with the same name.

``flow.nn.Linear`` is ``torch.nn.Linear``, and ``import globaltensor.nn.functional as F`` gives
``torch.nn.functional`` itself, not a copy of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["install", "names_of_torch"]

_OURS = "globaltensor."


def names_of_torch(package: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for one of our packages. Raises AttributeError where torch has no such name
    either."""
    theirs = package.replace("globaltensor", "torch", 1)

    def get(name: str) -> Any:
        module = importlib.import_module(theirs)
        if not name.startswith("__"):  # a package's path, its __all__ and the like are its own
            found = getattr(module, name, module)
            if (
                isinstance(found, ModuleType)
                and PathFinder.find_spec(f"{package}.{name}", sys.modules[package].__path__)
                is not None
            ):
                return importlib.import_module(
                    f"{package}.{name}"
                )  # one of ours that nobody has loaded yet
            if found is not module:
                return found
            if (
                "__path__" in vars(module)
                and importlib.util.find_spec(f"{theirs}.{name}") is not None
            ):
                return importlib.import_module(
                    f"{theirs}.{name}"
                )  # one that torch doesn't load by itself
        raise AttributeError(f"neither {package} nor {theirs} has {name!r}")

    return get


class _Borrowed(MetaPathFinder, Loader):
    """Finds modules of ours that only torch has."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(_OURS) or PathFinder.find_spec(name, _folders(name)) is not None:
            return None
        found = importlib.util.find_spec(_theirs(name))
        return (
            None
            if found is None
            else ModuleSpec(name, self, is_package=found.submodule_search_locations is not None)
        )

    def exec_module(self, module: ModuleType) -> None:
        # What stands here when the import ends is what it gives: torch's own module, with its own
        # name.
        sys.modules[module.__name__] = importlib.import_module(_theirs(module.__name__))


def _theirs(name: str) -> str:
    return "torch." + name.removeprefix(_OURS)


def _folders(name: str) -> list[str]:
    """Where a module of ours would lie: nowhere, if what should hold it is torch's."""
    parent = sys.modules[name.rpartition(".")[0]]
    return list(parent.__path__) if parent.__name__.startswith("globaltensor") else []


def install() -> None:
    """Make ``import globaltensor.<module of torch>`` work. First in line: the path of torch's own
    packages would load their modules a second time."""
    if not any(isinstance(finder, _Borrowed) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Borrowed())
