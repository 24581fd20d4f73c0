"""Functions that a higher layer provides to a lower one, by name.

A lower layer owns the table and calls what is in it. The module of a higher layer that fills the
table is imported at the first use, so that `import globaltensor` does not pay for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["Providers"]


class Providers:
    """A table of functions by key, filled by the module ``provider`` when a key is first asked for.

    >>> table = Providers("squares", "math")
    >>> table.register(2)(lambda x: x * x)(3)
    9
    >>> table[2](4), table.get(3)
    (16, None)
    """

    def __init__(self, name: str, provider: str) -> None:
        self.name, self.provider = name, provider
        self._functions: dict[Hashable, Callable[..., Any]] = {}

    def register(self, key: Hashable) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function under ``key``."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self._functions[key] = function
            return function

        return add

    def get(self, key: Hashable) -> Callable[..., Any] | None:
        """Return the function registered under ``key``; None where there is none yet."""
        return self._functions.get(key)

    def __getitem__(self, key: Hashable) -> Callable[..., Any]:
        """Return the function under ``key``. Import the provider first where it is missing.

        Raises KeyError where the provider registers none.
        """
        if key not in self._functions:
            importlib.import_module(self.provider)
        return self._functions[key]
