"""Fallback to torch's namespace: a name that a package here lacks comes from torch's same package.

``flow.nn.Linear`` is ``torch.nn.Linear``, and ``import globaltensor.nn.functional as F`` gives
``torch.nn.functional`` itself, not a copy of it. The packages of this library call
`names_of_torch` and `directory`, and the top one calls `install`. Type checkers cannot follow this:
they read stubs, which `make stubs` writes.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["directory", "install", "names_of_torch", "public_names"]

_OURS = "globaltensor."


def names_of_torch(package: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for one of this library's packages.

    The function raises AttributeError where torch has no such name either.
    """
    theirs = package.replace("globaltensor", "torch", 1)

    def get(name: str) -> Any:
        if name == "__all__":  # for ``from package import *``
            return public_names(package)
        module = importlib.import_module(theirs)
        # a package's own __path__, __file__ and the like never come from torch
        if not name.startswith("__"):
            attribute = getattr(module, name, module)
            if (
                isinstance(attribute, ModuleType)
                and PathFinder.find_spec(f"{package}.{name}", sys.modules[package].__path__)
                is not None
            ):
                # A submodule of this package that has not been imported yet.
                return importlib.import_module(f"{package}.{name}")
            if attribute is not module:
                return attribute
            if (
                "__path__" in vars(module)
                and importlib.util.find_spec(f"{theirs}.{name}") is not None
            ):
                # A submodule that torch does not import by default.
                return importlib.import_module(f"{theirs}.{name}")
        raise AttributeError(f"neither {package} nor {theirs} has {name!r}")

    return get


@functools.cache
def similar_name(package: str, name: str) -> str:
    """Return the end of an error about a misspelt name: a suggestion, or an empty text."""
    near = difflib.get_close_matches(name, public_names(package), 1, 0.8)
    return f": did you mean {near[0]!r}?" if near else ""


def public_names(package: str) -> list[str]:
    """Return the public names of one of this library's packages, sorted: its own, and torch's.

    Names that torch's package only imports from elsewhere (``math``, ``Any``) are left out.
    """
    module = importlib.import_module(package)
    theirs = importlib.import_module(package.replace("globaltensor", "torch", 1))
    own: Sequence[str] = ()
    if module is not theirs:
        own = vars(module).get("__all__") or [n for n in vars(module) if n[0] != "_"]
    lazy: Sequence[str] = vars(module).get("_LAZY_MODULES", ())
    with warnings.catch_warnings():  # reading a deprecated name warns
        warnings.simplefilter("ignore")
        borrowed = [n for n in dir(theirs) if not n.startswith("_") and _is_torchs(theirs, n)]
    return sorted({*own, *lazy, *borrowed})


def _is_torchs(module: ModuleType, name: str) -> bool:
    if name in ("torch", "TYPE_CHECKING"):
        return False
    value = getattr(module, name, None)
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return not isinstance(home, str) or home.partition(".")[0] == "torch"


def directory(package: str) -> Callable[[], list[str]]:
    """Return a ``__dir__`` for one of this library's packages.

    It lists the public names of the package, torch's included, and the package's dunder names.
    """
    return lambda: sorted(
        {n for n in vars(sys.modules[package]) if n.startswith("__")} | {*public_names(package)}
    )


class _TorchModuleFinder(MetaPathFinder, Loader):
    """A finder and loader for modules of this library that only torch defines."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (
            not name.startswith(_OURS)
            or PathFinder.find_spec(name, _search_folders(name)) is not None
        ):
            return None
        found = importlib.util.find_spec(_torch_module_name(name))
        return (
            None
            if found is None
            else ModuleSpec(name, self, is_package=found.submodule_search_locations is not None)
        )

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns the entry of sys.modules as it is after this call: torch's own
        # module, under its own name.
        sys.modules[module.__name__] = importlib.import_module(_torch_module_name(module.__name__))


def _torch_module_name(name: str) -> str:
    return "torch." + name.removeprefix(_OURS)


def _search_folders(name: str) -> list[str]:
    """Return the folders to search for a module: none if its parent package is torch's."""
    parent = sys.modules[name.rpartition(".")[0]]
    return list(parent.__path__) if parent.__name__.startswith("globaltensor") else []


def install() -> None:
    """Make ``import globaltensor.<module of torch>`` work.

    The finder goes first in ``sys.meta_path``: the path of torch's own packages would load their
    modules a second time.
    """
    if not any(isinstance(finder, _TorchModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchModuleFinder())
