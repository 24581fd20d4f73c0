"""Buckets that all ranks form alike. Pure.

The order in which a backward pass delivers gradients depends on the local graph, and a rank with an
empty part may have another one. So what goes into a bucket, and the order within it, follow from
numbers that all ranks know: each leaf has one. What arrived in the last pass makes the buckets of
the next; a bucket goes out when all of it is there and those before it are out; the rest goes out
when the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

__all__ = ["Buckets"]

T = TypeVar("T")


class Buckets(Generic[T]):
    """Items by their leaf's number. ``merge`` joins two arrivals for one leaf; ``first`` and
    ``limit`` are bytes of the first and of later buckets."""

    def __init__(self, first: int, limit: int, merge: Callable[[T, T], T]) -> None:
        self.first, self.limit, self.merge = first, limit, merge
        self.plan: list[dict[int, int]] = []  # of the last pass: number -> how often it arrived
        self.planned: dict[int, tuple[int, int, Hashable]] = {}  # what the plan was made from
        self.bucket: dict[int, int] = {}  # number -> index of its bucket in the plan
        self.parts: list[dict[int, tuple[int, int, Hashable]]] = []  # `planned`, bucket by bucket
        self.limits: dict[
            Hashable, int
        ] = {}  # bytes of all buckets of a key that wants smaller ones
        self.drop()

    def expect(
        self, arrivals: Mapping[int, tuple[int, int, Hashable]], limits: Mapping[Hashable, int]
    ) -> None:
        """Between passes: plan the next one from what will come, number -> (arrivals, bytes, key),
        and not from the last. ``limits``: see there."""
        self.limits.update(limits)
        self._plan({**self.planned, **arrivals})
        self.drop()

    def drop(self) -> None:
        """Forget what has arrived in this pass."""
        self.items: dict[int, T] = {}
        self.seen: dict[
            int, tuple[int, int, Hashable]
        ] = {}  # number -> (arrivals, bytes, what may go together)
        self.sent = 0
        self.missing = [
            len(bucket) for bucket in self.plan
        ]  # in each bucket, the numbers that have not arrived as often as planned

    def add(self, number: int, item: T, nbytes: int, key: Hashable) -> list[list[T]]:
        """One arrival -> the buckets that are now ready to go, in order."""
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
        return self._ready()

    def again(self, number: int) -> None:
        """One arrival more that is in the item already, if there is one."""
        if number not in self.seen:
            return
        times, nbytes, key = self.seen[number]
        self.seen[number] = (times + 1, nbytes, key)
        where = self.bucket.get(number)
        if where is not None and times == self.plan[where][number]:
            self.missing[where] += 1

    def whole(self, where: int, items: Mapping[int, T]) -> list[list[T]]:
        """All items of a bucket of the plan, none of which had arrived, as planned -> the buckets
        that are now ready to go, in order."""
        self.seen.update(self.parts[where])
        self.missing[where] = 0
        if where == self.sent:
            self.sent += 1
            return [[items[n] for n in self.plan[where]], *self._ready()]
        self.items.update(items)
        return self._ready()

    def _ready(self) -> list[list[T]]:
        ready = []
        while self.sent < len(self.plan) and not self.missing[self.sent]:
            ready.append([self.items.pop(n) for n in self.plan[self.sent]])
            self.sent += 1
        return ready

    def finish(self) -> list[list[T]]:
        """The pass ends -> what has not gone yet, bucket by bucket. The next pass forms its buckets
        from this one's arrivals."""
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
        """Last made, first served: backward meets the last layers first."""
        done: list[dict[int, int]] = []
        begun: set[Hashable] = (
            set()
        )  # each way has its small first bucket, so that ranks that share only some ways agree
        open_: dict[Hashable, tuple[dict[int, int], int]] = {}
        for n in numbers:
            times, nbytes, key = self.seen[n]
            bucket, size = open_.pop(key, ({}, 0))
            most = self.limits.get(key)
            if most is not None and bucket and size + nbytes > most:  # these never grow beyond
                done.append(bucket)
                bucket, size = {}, 0
            bucket[n] = times
            if size + nbytes >= (most or (self.limit if key in begun else self.first)):
                done.append(bucket)
                begun.add(key)
            else:
                open_[key] = (bucket, size + nbytes)
        return done + [bucket for bucket, _ in open_.values()]
