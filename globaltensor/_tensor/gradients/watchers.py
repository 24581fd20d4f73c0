"""Who may see gradients on their way to the leaves: hooks, nodes of the graph that somebody has
looked at, leaves that no reducer sums.

As long as somebody may, no gradient may be owed a factor (_ops/rules/deferred_mean.py). A `Watcher`
stands for one such reason, and is held by what lets it see: the hook's closure, the node, the leaf.
So it goes with that, and nobody has to be told.

When an object goes is a matter of each rank: a collector may run here and not there. What a rank
does for itself may follow from the watchers that are there (``alive``). What the ranks do together
follows from what the program has made and ended, in the same order on all of them (``open``); of
watchers that have gone without an end the ranks tell each other (`Watchers.ask`), with the number
that the gradients of a pass are divided by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Watcher", "Watchers", "end_of"]

_SEEN, _REACHED = (
    "globaltensor_seen",
    "globaltensor_reached",
)  # among the metadata of a node: watchers of it alone, and of all behind it too


class Watcher:
    """A reason for which gradients may be seen on their way. It lasts until it is ended, or let
    go."""

    __slots__ = ("end",)

    def __init__(self, among: Watchers) -> None:
        #: The program is through with it, on every rank alike: may be called when it has gone here,
        #: too.
        self.end = _End(among)

    def __del__(self) -> None:
        self.end.among.alive.discard(self.end.number)


class _End:
    """What ends a watcher, and does not keep it."""

    __slots__ = ("among", "number", "over")

    def __init__(self, among: Watchers) -> None:
        self.among, self.number, self.over = among, among.begin(), False

    def __call__(self) -> None:
        if not self.over:
            self.over = True
            self.among.ended(self.number)


class Watchers:
    """The watchers of one rank."""

    def __init__(self) -> None:
        self.alive: set[int] = set()  # by their numbers, those that are there
        # how many the program has begun and not ended, aside from those that all ranks know to have
        # gone
        self.open = 0
        self.begun = 0
        self._gone = 0  # the number up to which all ranks know that none is left
        self._answer: Callable[[], bool] | None = (
            None  # waits for the answer to a question that is under way
        )
        self._then, self._since = (
            0,
            0,
        )  # how many had begun when it was asked, and how many of those after it are open

    def begin(self) -> int:
        """Count one more -> its number."""
        self.begun += 1
        self.open += 1
        self._since += 1
        self.alive.add(self.begun)
        return self.begun

    def ended(self, number: int) -> None:
        """The program has ended the watcher of that number."""
        self.alive.discard(number)
        self.open -= number > self._gone
        self._since -= number > self._then

    def none_left(self) -> bool:
        """Return True if no rank has a watcher, as far as all know. All ranks call it in the same
        passes."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            if not answer():
                self.open, self._gone = self._since, self._then
        return not self.open

    def ask(self, send: Callable[[bool], Callable[[], bool]]) -> None:
        """Ask the ranks whether watchers are left that the program has not ended. ``send(some)``
        tells the others whether this rank has some, and returns what says whether any has, to be
        called by the next `none_left`. All ranks call it in the same passes."""
        self._then, self._since = self.begun, 0
        self._answer = send(bool(self.alive))

    def doubt(self) -> None:
        """Count one that is not there: ranks that have run different things may have counted
        differently, and the next answer tells what is so."""
        self._answer = None
        self.open += 1

    def of(self, local: torch.Tensor) -> None:
        """Begin one that lasts as long as the graph that has computed ``local``; of a leaf, as long
        as that requires grad."""
        held = local.__dict__ if local.grad_fn is None else local.grad_fn.metadata
        if _SEEN not in held:
            held[_SEEN] = Watcher(self)

    def of_graph(self, node: torch.autograd.graph.Node) -> None:
        """Begin one that lasts as long as any part of the graph that ends in ``node``: who has a
        node gets at those behind it, and may hook into these."""
        if _REACHED in node.metadata:
            return
        watcher, nodes = Watcher(self), [node]
        while nodes:
            metadata = (node := nodes.pop()).metadata
            if _REACHED not in metadata:  # else it has one, as have all behind it
                metadata[_REACHED] = watcher
                nodes.extend(behind for behind, _ in node.next_functions if behind is not None)


def end_of(leaf: torch.Tensor) -> None:
    """A leaf no longer requires grad."""
    watcher = leaf.__dict__.pop(_SEEN, None)
    if watcher is not None:
        watcher.end()
