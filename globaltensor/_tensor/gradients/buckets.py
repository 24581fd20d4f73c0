"""Buckets of gradients that all ranks form alike. Pure. Reducer and parameter gather use them.

The order in which a backward pass delivers gradients depends on the local graph, and a rank with an
empty local tensor may have another graph. So the contents of a bucket, and their order, follow from
numbers that all ranks know: each leaf has one. The arrivals of the last pass make the buckets of
the next one. A bucket is sent when it is complete and those before it are sent. The rest is sent
when the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

__all__ = ["Buckets"]

T = TypeVar("T")


class Buckets(Generic[T]):
    """A queue of items by their leaf's number, sent in buckets.

    ``merge`` joins two arrivals for one leaf. ``first`` and ``limit`` are the bytes of the first
    bucket and of later ones.
    """

    def __init__(self, first: int, limit: int, merge: Callable[[T, T], T]) -> None:
        self.first, self.limit, self.merge = first, limit, merge
        self.plan: list[dict[int, int]] = []  # of the last pass: number -> number of its arrivals
        # the arrivals that the plan was made from
        self.planned: dict[int, tuple[int, int, Hashable]] = {}
        self.bucket: dict[int, int] = {}  # number -> index of its bucket in the plan
        self.parts: list[dict[int, tuple[int, int, Hashable]]] = []  # `planned`, bucket by bucket
        # Bytes of each bucket with a key that needs smaller buckets.
        self.limits: dict[Hashable, int] = {}
        self.drop()

    def expect(
        self, arrivals: Mapping[int, tuple[int, int, Hashable]], limits: Mapping[Hashable, int]
    ) -> None:
        """Plan the next pass from expected arrivals, not from the last pass.

        Call it between passes. ``arrivals``: number -> (arrivals, bytes, key). ``limits``: bytes of
        each bucket with a key that needs smaller buckets.
        """
        self.limits.update(limits)
        self._plan({**self.planned, **arrivals})
        self.drop()

    def drop(self) -> None:
        """Drop what has arrived in this pass."""
        self.items: dict[int, T] = {}
        # Number -> (arrivals, bytes, key of items that may share a bucket).
        self.seen: dict[int, tuple[int, int, Hashable]] = {}
        self.sent = 0
        # In each bucket, how many numbers have not arrived as often as planned.
        self.missing = [len(bucket) for bucket in self.plan]

    def add(self, number: int, item: T, nbytes: int, key: Hashable) -> list[list[T]]:
        """Add one arrival, and return the buckets that are now ready to send, in order."""
        before = self.seen.get(number)
        if before is None:
            times = 1
        else:
            times = before[0] + 1
            item = self.merge(self.items[number], item) if number in self.items else item
        self.items[number], self.seen[number] = item, (times, nbytes, key)
        where = self.bucket.get(number)
        if where is None:
            return []
        planned = self.plan[where][number]
        if times == planned:
            self.missing[where] -= 1
        elif times == planned + 1:
            self.missing[where] += 1
        return self._pop_ready()

    def add_again(self, number: int) -> None:
        """Count one more arrival that is in the item already, if there is an item."""
        if number not in self.seen:
            return
        times, nbytes, key = self.seen[number]
        self.seen[number] = (times + 1, nbytes, key)
        where = self.bucket.get(number)
        if where is not None and times == self.plan[where][number]:
            self.missing[where] += 1

    def add_all(self, where: int, items: Mapping[int, T]) -> list[list[T]]:
        """Add all items of a planned bucket at once, and return the buckets that are ready.

        None of the items may have arrived before.
        """
        self.seen.update(self.parts[where])
        self.missing[where] = 0
        if where == self.sent:
            self.sent += 1
            return [[items[n] for n in self.plan[where]], *self._pop_ready()]
        self.items.update(items)
        return self._pop_ready()

    def _pop_ready(self) -> list[list[T]]:
        ready = []
        while self.sent < len(self.plan) and not self.missing[self.sent]:
            ready.append([self.items.pop(n) for n in self.plan[self.sent]])
            self.sent += 1
        return ready

    def finish(self) -> list[list[T]]:
        """End the pass, and return what has not been sent, bucket by bucket.

        The next pass forms its buckets from this one's arrivals.
        """
        rest = [
            [self.items[n] for n in bucket]
            for bucket in self._buckets(sorted(self.items, reverse=True))
        ]
        if self.seen != self.planned:
            self._plan(self.seen)
        self.drop()
        return rest

    def _plan(self, seen: dict[int, tuple[int, int, Hashable]]) -> None:
        self.planned, self.seen = seen, seen
        self.plan = self._buckets(sorted(seen, reverse=True))
        self.bucket = {n: i for i, bucket in enumerate(self.plan) for n in bucket}
        self.parts = [{n: seen[n] for n in bucket} for bucket in self.plan]

    def _buckets(self, numbers: list[int]) -> list[dict[int, int]]:
        """Group numbers into buckets, the last-made leaf first.

        Backward reaches the last layers first.
        """
        done: list[dict[int, int]] = []
        # Each key has its own small first bucket, so that ranks that share only some keys agree.
        begun: set[Hashable] = set()
        open_: dict[Hashable, tuple[dict[int, int], int]] = {}
        for n in numbers:
            times, nbytes, key = self.seen[n]
            bucket, size = open_.pop(key, ({}, 0))
            most = self.limits.get(key)
            # such a bucket never exceeds its limit
            if most is not None and bucket and size + nbytes > most:
                done.append(bucket)
                bucket, size = {}, 0
            bucket[n] = times
            if size + nbytes >= (most or (self.limit if key in begun else self.first)):
                done.append(bucket)
                begun.add(key)
            else:
                open_[key] = (bucket, size + nbytes)
        return done + [bucket for bucket, _ in open_.values()]
