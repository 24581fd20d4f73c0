"""Watchers: reasons for which user code may see gradients before they are complete.

Such reasons are hooks, nodes of the graph that user code has got, and leaves that no reducer sums.
The reducer holds the watchers of a rank, and tensors and hooks add to them.

As long as there is a watcher, no factor may be pending on a gradient (_ops/rules/deferred_mean.py).
A `Watcher` stands for one such reason. The object that makes gradients visible holds it: the hook's
closure, the node, the leaf. So the watcher is freed with that object, and needs no notification.

The time at which an object is freed differs between ranks: a garbage collector may run on one rank
and not on another. So ranks decide by the watchers that the program has begun and ended, in the
same order on all ranks (``open``). A watcher may be freed without an end: it is no longer
``alive``. The ranks report that to each other (`Watchers.ask`), together with the number that the
gradients of a pass are divided by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Watcher", "Watchers", "end_of"]

# Keys in the metadata of a node: a watcher of it alone, and one of all nodes behind it too.
_SEEN, _REACHED = (
    "globaltensor_seen",
    "globaltensor_reached",
)


class Watcher:
    """A reason for which gradients may be seen early. It lasts until it is ended, or freed."""

    __slots__ = ("end",)

    def __init__(self, among: Watchers) -> None:
        #: Call it when the program no longer needs the watcher, on every rank alike. The watcher
        #: itself may have been freed here by then.
        self.end = _WatcherEnd(among)

    def __del__(self) -> None:
        self.end.among.alive.discard(self.end.number)


class _WatcherEnd:
    """The end of a watcher, which does not keep the watcher alive."""

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
        self.alive: set[int] = set()  # numbers of the watchers that exist
        # number of watchers that were begun and not ended, except those that all ranks know to be
        # freed
        self.open = 0
        self.begun = 0
        self._gone = 0  # all ranks know that no watcher up to this number is left
        # Waits for the answer to a question that was sent.
        self._answer: Callable[[], bool] | None = None
        # The number of watchers begun before the question, and the number of later ones that are
        # open.
        self._then, self._since = (
            0,
            0,
        )

    def begin(self) -> int:
        """Count one more watcher, and return its number."""
        self.begun += 1
        self.open += 1
        self._since += 1
        self.alive.add(self.begun)
        return self.begun

    def ended(self, number: int) -> None:
        """Record that the program has ended the watcher of that number."""
        self.alive.discard(number)
        self.open -= number > self._gone
        self._since -= number > self._then

    def none_left(self) -> bool:
        """Return True if no rank has a watcher, as far as all ranks know.

        All ranks call it in the same passes.
        """
        if self._answer is not None:
            answer, self._answer = self._answer, None
            if not answer():
                self.open, self._gone = self._since, self._then
        return not self.open

    def ask(self, send: Callable[[bool], Callable[[], bool]]) -> None:
        """Ask the ranks whether watchers are left that the program has not ended.

        ``send(some)`` sends to the other ranks whether this rank has some. It returns a function
        that answers whether any rank has some. The next `none_left` calls that function. All ranks
        call `ask` in the same passes.
        """
        self._then, self._since = self.begun, 0
        self._answer = send(bool(self.alive))

    def doubt(self) -> None:
        """Count one watcher that does not exist.

        Ranks that have run different things may have counted differently. The next answer corrects
        the count.
        """
        self._answer = None
        self.open += 1

    def of(self, local: torch.Tensor) -> None:
        """Begin a watcher that lasts as long as the graph that has computed ``local``.

        For a leaf it lasts as long as the leaf requires grad.
        """
        held = local.__dict__ if local.grad_fn is None else local.grad_fn.metadata
        if _SEEN not in held:
            held[_SEEN] = Watcher(self)

    def of_graph(self, node: torch.autograd.graph.Node) -> None:
        """Begin a watcher that lasts as long as any node of the graph that ends in ``node``.

        Code that has a node can reach the nodes behind it, and may hook into these.
        """
        if _REACHED in node.metadata:
            return
        watcher, nodes = Watcher(self), [node]
        while nodes:
            metadata = (node := nodes.pop()).metadata
            if _REACHED not in metadata:  # else the node has one, and so do all nodes behind it
                metadata[_REACHED] = watcher
                nodes.extend(behind for behind, _ in node.next_functions if behind is not None)


def end_of(leaf: torch.Tensor) -> None:
    """End the watcher of a leaf that no longer requires grad."""
    watcher = leaf.__dict__.pop(_SEEN, None)
    if watcher is not None:
        watcher.end()
