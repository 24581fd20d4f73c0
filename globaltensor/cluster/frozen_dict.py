"""Frozen: a read-only mapping that can be hashed.

A cluster holds such mappings, so that it can be part of a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

__all__ = ["Frozen"]

V = TypeVar("V")


class Frozen(Mapping[str, V]):
    """A read-only mapping, in the order of its keys. It equals any mapping of the same items.

    >>> Frozen({"b": 2, "a": 1})
    {'a': 1, 'b': 2}
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, V]) -> None:
        self._items = dict(sorted(items.items()))
        self._hash = hash(tuple(self._items.items()))

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Frozen):
            return self is other or (self._hash == other._hash and self._items == other._items)
        return isinstance(other, Mapping) and self._items == dict(other)

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[object, ...]:
        return Frozen, (self._items,)  # strings have other hashes in another process
