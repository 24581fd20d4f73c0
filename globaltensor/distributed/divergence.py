"""Detect ranks that diverge: each rank has a rolling digest of what it has run on global tensors.

Each collective compares the digests. Communicators, dispatch and the world call this module.

Global tensors need every rank to run the same operations in the same order. A `History` is the
digest for one set of ranks. Dispatch, boxing, optimizers and graphs record there what they run. A
communicator adds the collective itself and compares the result with the other ranks. Shared memory
carries the digest in the note that announces the data. Other transports compare it in a separate
message before the data moves (`due` says when). If digests differ, the ranks exchange a `Report`
each and raise the same error. So a program whose ranks diverged does not end with exit code 0.
`flow.check_ranks` also names the operation where they diverged.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .._base.user_code import user_line
from ..sharding.tensor_kinds import TensorKind

__all__ = [
    "ALWAYS_COMPARED", "COMPARED_EVERY", "READING", "READING_ADVICE", "History", "Purpose",
    "Report", "describe", "differs_at_end", "due", "end_record",
    "spelled",
]  # fmt: skip

#: The first collectives of a communicator are all compared before data moves, later ones at
#: intervals. Most programs that diverge do so in their first steps. A message takes 0.15 ms on
#: gloo, and 1 ms if all cores compute. One message in 8 collectives took 2 to 3 % of a
#: tensor-parallel step of a GPT 4 x 128.
ALWAYS_COMPARED: Final = 64
COMPARED_EVERY: Final = 8
# After this many collectives the interval is eight times as long.
OFTEN_COMPARED: Final = 1024
#: The purpose of a boxing that brings a value to Python: print, item(), numpy(), float().
READING: Final = "reading a value"
READING_ADVICE: Final = (
    "Printing, item() and numpy() of a global tensor are collective: call them on every rank, or "
    "box to broadcast first (x.to_global(sbp=broadcast) on every "
    "rank), so that each rank has the full value"
)
_ADVICE: Final = (
    "Find the branch, number or random seed that differs between ranks. Code that only one rank "
    "runs needs plain tensors: call x.numpy() or x.to_global(sbp=broadcast).to_local() on every "
    "rank first"
)
_MAX_OPERATIONS: Final = 2048  # saved with their text, for reports
_SHOWN: Final = 160  # characters of an operation that an error shows
# A function that does nothing, as fast as Python allows.
_ignore: Callable[[bytes], None] = deque[bytes](maxlen=0).append


class History:
    """A rolling digest of what this rank has run on global tensors of some ranks.

    ``record`` adds to it, which takes about 20 ns.
    """

    __slots__ = ("digest", "operations", "ranks", "record")

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = frozenset(ranks)
        rolling = hashlib.blake2b(digest_size=8)
        self.record: Callable[[bytes], None] = rolling.update if len(self.ranks) > 1 else _ignore
        #: Returns the digest of everything recorded so far.
        self.digest: Callable[[], bytes] = rolling.digest
        #: The planned operations, each once, in the order of first use: digest -> text.
        self.operations: OrderedDict[bytes, str] = OrderedDict()

    @staticmethod
    def ignored() -> History:
        """Return a history that records nothing, for a world that sends nothing."""
        return History(())

    def learn(self, text: str) -> bytes:
        """Return the digest by which to record the operation with this text.

        The text is saved for reports.
        """
        digest = digest_of(text)
        if len(self.ranks) > 1:
            self.operations[digest] = text
            if len(self.operations) > _MAX_OPERATIONS:
                self.operations.popitem(last=False)
        return digest


def digest_of(text: str) -> bytes:
    """Return 8 bytes that are the same on every rank for the same text."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


#: The purpose of a collective: a text, or the text of what needs a boxing together with its plan,
#: which has ``src`` and ``dst``.
Purpose = str | tuple[str, Any]


def spelled(purpose: Purpose) -> str:
    """Return a purpose as errors show it."""
    return (
        purpose
        if isinstance(purpose, str)
        else f"{purpose[0] or 'to_global'}: {purpose[1].src!r} -> {purpose[1].dst!r}"
    )


def due(count: int) -> bool:
    """Return True if collective number ``count`` (from 1) is compared in a separate message."""
    return (
        count <= ALWAYS_COMPARED
        or count % (COMPARED_EVERY if count <= OFTEN_COMPARED else 8 * COMPARED_EVERY) == 0
    )


@dataclass
class Report:
    """The description that one rank sends of itself when digests differ."""

    rank: int
    kind: str = ""  # the collective: all_reduce, ...
    purpose: str = ""  # the operation that needs it
    line: str = ""  # the line of the user's program
    # The plain tensor that is being compared, if the collective compares one.
    plain: str = ""
    operations: list[tuple[bytes, str]] = field(default_factory=list)
    odd: TensorKind | None = None  # the kind of that tensor, if it is not an ordinary one

    @staticmethod
    def here(
        rank: int,
        kind: str,
        purpose: Purpose,
        plain: str,
        histories: Sequence[History],
        odd: TensorKind | None = None,
    ) -> Report:
        """Return the current report of this rank."""
        operations = [item for history in histories for item in history.operations.items()]
        return Report(rank, kind, spelled(purpose), user_line(), plain, operations, odd)

    def packed(self) -> bytes:
        """Return the report as bytes."""
        return pickle.dumps(
            (self.rank, self.kind, self.purpose, self.line, self.plain, self.operations, self.odd)
        )

    @staticmethod
    def unpacked(data: bytes) -> Report:
        """Return the report of another rank from the bytes made by `packed`."""
        return Report(*pickle.loads(data))

    @property
    def place(self) -> str:
        """The collective that the rank is about to run, with its line."""
        what = self.kind if not self.purpose else f"{self.kind} for {self.purpose}"
        return f"{what}  ({self.line})"


def describe(reports: Sequence[Report]) -> str:
    """Return the error text of ranks that diverged, which is the same on every rank.

    ``reports`` are those of the ranks that answered, in the order of ranks.
    """
    first = reports[0]
    other = next(
        (
            r
            for r in reports[1:]
            if (r.kind, r.purpose, r.plain, r.line)
            != (first.kind, first.purpose, first.plain, first.line)
        ),
        reports[-1],
    )
    if all(r.plain for r in reports):
        return _plain_differs(reports)
    reading = next((r for r in (first, other) if r.purpose.startswith(READING)), None)
    elsewhere = other if reading is first else first
    if reading is not None and reading.line != elsewhere.line:
        what = (
            f"rank {reading.rank} reads the value of a global tensor here, while rank "
            f"{elsewhere.rank} is at {elsewhere.place}"
        )
        return f"{_at(reading)}{what}. {READING_ADVICE}"
    lines = [
        (
            f"{_at(first)}the ranks have diverged: all must run the same operations on global "
            f"tensors, in the same order"
        )
    ]
    lines += [f"  rank {r.rank} is at {r.place}" for r in (first, other)]
    lines += _only_there(first, other) or [
        (
            "  they have run the same operations, but with other numbers, other values of "
            "arguments, "
            "or in another order: flow.check_ranks() shows which"
        )
    ]
    lines.append(_ADVICE)
    return "\n".join(lines)


# ------------------------------------------------------------------ comparison at program end

_NOTHING_RUN: Final = hashlib.blake2b(digest_size=8).hexdigest()
_LAST_OPERATIONS: Final = 256  # the most that a rank's record at its end has


def end_record(histories: Mapping[tuple[int, ...], History], failed: bool) -> bytes:
    """Return the record that a rank leaves for the others when its program ends.

    For each set of ranks it has the digest of the history and the last operations in it.
    """
    record = {
        ",".join(map(str, ranks)): [
            h.digest().hex(),
            list(h.operations.values())[-_LAST_OPERATIONS:],
        ]
        for ranks, h in histories.items()
    }
    return json.dumps({"failed": failed, "histories": record}).encode()


def differs_at_end(rank: int, records: Mapping[int, bytes]) -> str:
    """Return the error text of ranks that have diverged, from records of ended ranks.

    Return an empty string if they have not diverged, or if a rank has failed.
    """
    ended = {r: json.loads(data) for r, data in records.items()}
    if any(record["failed"] for record in ended.values()):
        return ""
    mine = ended[rank]["histories"]
    for other, record in sorted(ended.items()):
        theirs = record["histories"]
        for key in sorted({*mine, *theirs}):
            if {rank, other} <= set(map(int, key.split(","))):
                (digest, operations), (other_digest, other_operations) = (
                    h.get(key, (_NOTHING_RUN, [])) for h in (mine, theirs)
                )
                if digest != other_digest:
                    return _at_end(rank, operations, other, other_operations)
    return ""


def _at_end(rank: int, operations: list[str], other: int, other_operations: list[str]) -> str:
    lines = [
        (
            f"the ranks have diverged: rank {rank} and rank {other} have not run the same "
            f"operations "
            f"on global tensors. This was found when the program ended"
        )
    ]
    for me, mine, theirs in (
        (rank, operations, other_operations),
        (other, other_operations, operations),
    ):
        text = next((text for text in mine if text not in theirs), None)
        if text is not None:
            lines.append(
                f"  rank {me} has run {text[:_SHOWN]}, which rank {rank + other - me} has not"
            )
    if len(lines) == 1:
        lines.append(
            "  they differ in numbers, in values of arguments or in the order of operations: "
            "flow.check_ranks() shows where"
        )
    lines.append(_ADVICE)
    return "\n".join(lines)


# -------------------------------------------------------------------------------------- error texts


def _at(report: Report) -> str:
    return f"{report.line}\n" if report.line else ""


def _only_there(first: Report, other: Report) -> list[str]:
    lines = []
    for mine, theirs in ((first, other), (other, first)):
        known = {digest for digest, _ in theirs.operations}
        text = next((text for digest, text in mine.operations if digest not in known), None)
        if text is not None:
            lines.append(
                f"  rank {mine.rank} has run {text[:_SHOWN]}, which rank {theirs.rank} has not"
            )
    return lines


def _plain_differs(reports: Sequence[Report]) -> str:
    first = reports[0]
    kinds: dict[str, list[int]] = {}
    for r in reports:
        kinds.setdefault(r.plain, []).append(r.rank)
    held = "".join(
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}: {text}\n"
        for text, ranks in list(kinds.items())[:8]
    )
    return (
        f"{_at(first)}a plain tensor that is used together with global tensors counts as the same "
        f"value on every rank, but the ranks hold different values for "
        f"{first.purpose}:\n{held}"
        "If each rank has its own rows, make them one global tensor first: x.to_global(placement, "
        "sbp=flow.sbp.split(0)); for a data loader use "
        "flow.utils.data.GlobalBatches(loader, placement). If all ranks should hold the same "
        "value, x.to_global(placement, sbp=flow.sbp.broadcast) copies the first rank's, and "
        "torch.manual_seed with one number on every rank makes all ranks draw the same"
    )
