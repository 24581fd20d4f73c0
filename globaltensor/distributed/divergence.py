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
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from .._base.user_code import line_text, user_frame, user_line
from ..sharding.tensor_kinds import TensorKind

__all__ = [
    "ALWAYS_COMPARED",
    "COMPARED_EVERY",
    "OBJECTS",
    "OTHER_SIDE",
    "PARAMETER",
    "READING",
    "READING_ADVICE",
    "History",
    "PlainUse",
    "Purpose",
    "RecordedOperation",
    "Report",
    "collective_of",
    "describe",
    "described_operations",
    "differs_at_end",
    "due",
    "end_record",
    "how_it_ended",
    "plain_text",
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
#: The kind of a collective that exchanges Python objects.
OBJECTS: Final = "all_gather_object"
#: The purpose of a boxing that brings a value to Python: print, item(), numpy(), float().
READING: Final = "reading a value"
READING_ADVICE: Final = (
    "Printing, item() and numpy() of a global tensor are collective: call them on every rank, or "
    "box to broadcast first (x.to_global(sbp=flow.sbp.broadcast) on every "
    "rank): one rank may read a tensor that is broadcast on all"
)
#: The first word of the text that describes a plain tensor, if it is a parameter.
PARAMETER: Final = "parameter"
#: The last line of a rank that had to end before it knew what the others were doing.
OTHER_SIDE: Final = "the errors of other ranks show what they were doing"
_ADVICE: Final = (
    "Find the branch, order, number or random seed that differs between ranks. Code that only one "
    "rank runs needs plain tensors: call x.numpy() or "
    "x.to_global(sbp=flow.sbp.broadcast).to_local() on every rank first"
)
_PLAIN_ADVICE: Final = (
    "How to mend it, if it is\n"
    "  - a batch of a data loader: take flow.utils.data.GlobalDataLoader(dataset, batch_size, "
    "placement=placement), or GlobalBatches(loader, placement) around a loader with "
    "flow.utils.data.DistributedSampler\n"
    "  - the rows of this rank: x.to_global(placement, sbp=flow.sbp.split(0)) joins those of all "
    "ranks\n"
    "  - random: call torch.manual_seed with one number on every rank, or x.to_global(placement, "
    "sbp=flow.sbp.broadcast) to take the first rank's\n"
    "  - in the order of a set of strings: sort it, or start all ranks with PYTHONHASHSEED=0\n"
    "  - memory of torch.empty into which nothing was written: take torch.zeros\n"
    "On a placement of several axes sbp has one entry for each axis: [split(0), broadcast] if only "
    "the ranks along the first axis have rows of their own"
)
_MAX_OPERATIONS: Final = 2048  # saved with their text, for reports
_MAX_NUMBERS: Final = 512  # operations with a number, saved for reports
_MAX_PLAIN_USES: Final = 256  # saved, for reports
# The count in the name of a graph, which may differ by rank.
_COUNTER: Final = re.compile(r"_\d+\b")
_SHOWN: Final = 160  # characters of an operation that an error shows
# So many numbers of an operation are saved for reports, and none if it has more: a number that is
# new in each step is not worth the time.
_NUMBERS_OF_ONE: Final = 8
# The end of the text of an operation of which not all numbers are saved (alone: of any operation),
# and the text of operations that are not saved any more. Of these no report may say that a rank has
# not run them.
_MORE: Final = " with ..."
_OLDER: Final = "..."


class PlainUse(NamedTuple):
    """A use of a plain tensor among global ones, as a `History` keeps it for errors."""

    before: int  # the serial of the history before this use, which tells the uses apart
    code: int  # a digest of the values
    purpose: str
    dtype: torch.dtype
    shape: torch.Size
    first: bytes  # the first elements
    file: str  # the user's line
    line: int
    is_parameter: bool

    def described(self) -> list[Any]:
        """Return the serial, and the purpose, the values and the line as texts."""
        values: Any = []
        if self.first:
            try:
                values = torch.frombuffer(bytearray(self.first), dtype=self.dtype).tolist()
            except (NotImplementedError, RuntimeError, ValueError):  # a dtype without such values
                values = [self.first.hex()]
        return [
            self.before,
            self.purpose,
            (f"{PARAMETER} " if self.is_parameter else "")
            + plain_text(self.dtype, self.shape, values, f"{self.code:08x}"),
            line_text(self.file, self.line) if self.file else "",
        ]


def plain_text(dtype: torch.dtype, shape: Sequence[int], first: Sequence[Any], digest: str) -> str:
    """Return the text by which errors show a plain tensor. ``first`` are its first elements."""
    values = list(first)
    numbers = ", ".join(f"{n:.6g}" if isinstance(n, float) else str(n) for n in values)
    more = ", ..." if len(values) < torch.Size(shape).numel() else ""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} of [{numbers}{more}], digest {digest}"


class RecordedOperation(NamedTuple):
    """An operation that a rank has run: its text, and the user's line of its first use."""

    text: str
    file: str = ""
    line: int = 0

    def described(self) -> list[str]:
        """Return the texts of the operation and of the line."""
        return [self.text, line_text(self.file, self.line) if self.file else ""]


class History:
    """A rolling digest of what this rank has run on global tensors of some ranks.

    The digest is an integer, ``serial``. A record replaces it by a ``hash((serial, ...))`` of
    numbers, which is the same in every process. After a call it also identifies the result: the
    tensor's ``_serial`` is a copy of it. Calls record the serials of their operands, so that ranks
    which run one operation on different tensors diverge too. Dispatch adds to the serial itself.
    """

    __slots__ = (
        "codes", "grad_enabled", "number_counts", "numbers", "operations", "plain_count",
        "plain_uses", "ranks", "records", "serial",
    )  # fmt: skip

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = frozenset(ranks)
        #: True if there is another rank to compare with.
        self.records = len(self.ranks) > 1
        self.serial = 0
        #: The gradient mode of the last call. A call under `no_grad` on one rank alone gives the
        #: same value there, and other gradients.
        self.grad_enabled = True
        #: The planned operations by digest, each once, in the order of first use.
        self.operations: OrderedDict[bytes, RecordedOperation] = OrderedDict()
        #: Operations with their numbers, in the order of first use.
        self.numbers: OrderedDict[bytes, RecordedOperation] = OrderedDict()
        #: How many numbers each operation had, by its digest.
        self.number_counts: dict[bytes, int] = {}
        #: The last uses of plain tensors that `record_plain` added.
        self.plain_uses: deque[PlainUse] = deque(maxlen=_MAX_PLAIN_USES)
        self.plain_count = 0
        #: What `code_of` has returned.
        self.codes: dict[tuple[str, Any], bytes] = {}

    def record(self, what: bytes, *serials: int) -> None:
        """Add a call, described by ``what``, on tensors with these serials."""
        if self.records:
            self.serial = hash((self.serial, int.from_bytes(what, "little"), serials))

    def record_plain(self, use: PlainUse) -> None:
        """Add a use of a plain tensor, so that ranks whose values differ diverge."""
        self.plain_uses.append(use)
        self.plain_count += 1
        self.serial = hash((self.serial, use.code))

    def record_grad_mode(self, enabled: bool) -> None:
        """Add that the gradient mode has changed since the last call."""
        self.grad_enabled = enabled
        self.record(self.learn(f"torch.set_grad_enabled({enabled})"))

    def digest(self) -> bytes:
        """Return the digest of everything recorded so far, 8 bytes."""
        return self.serial.to_bytes(8, "little", signed=True)

    @staticmethod
    def ignored() -> History:
        """Return a history that records nothing, for a world that sends nothing."""
        return History(())

    def learn(self, text: str) -> bytes:
        """Return the digest by which to record the operation with this text.

        The text is saved for reports, with the user's line.
        """
        digest = digest_of(text)
        if self.records and digest not in self.operations:
            self.operations[digest] = RecordedOperation(text, *_place_of_user())
            if len(self.operations) > _MAX_OPERATIONS:
                self.operations.popitem(last=False)
        return digest

    def learn_number(self, digest: bytes, operation: bytes, number: Any) -> None:
        """Save for reports that an operation is recorded as ``digest`` with this number.

        ``operation``: the digest of the operation's text."""
        if not self.records or digest in self.numbers or operation not in self.operations:
            return
        if len(self.numbers) >= _MAX_NUMBERS:
            self.numbers[b""] = RecordedOperation(_MORE)  # of any operation
            return
        count = self.number_counts[operation] = self.number_counts.get(operation, 0) + 1
        text = self.operations[operation].text
        if count <= _NUMBERS_OF_ONE:
            text = f"{text} with {_number_text(number)}"
            self.numbers[digest] = RecordedOperation(text, *_place_of_user())
        else:
            self.numbers[digest_of(text + _MORE)] = RecordedOperation(text + _MORE)

    def code_of(self, what: str, spec: Any) -> bytes:
        """Return the digest by which to record a call on a tensor of this spec."""
        code = self.codes.get((what, spec))
        if code is None:
            if len(self.codes) >= _MAX_OPERATIONS:
                self.codes.clear()
            code = self.codes[what, spec] = self.learn(f"{what} of {spec!r}")
        return code


def _place_of_user() -> tuple[str, int] | tuple[()]:
    frame = user_frame()
    return () if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _number_text(number: Any) -> str:
    """Return the numbers of a call, nested as dispatch nests them, in their order.

    >>> _number_text(3), _number_text(((None, b"2"), 0.5))
    ('3', '2, 0.5')
    """
    if isinstance(number, tuple):
        return ", ".join(filter(None, map(_number_text, number)))
    if isinstance(number, bytes):
        return number.decode()
    return "" if number is None else repr(number)


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


def described_operations(histories: Iterable[History]) -> list[tuple[bytes, str, str]]:
    """Return the digest, the text and the line of each operation in the histories."""
    found: list[tuple[bytes, str, str]] = []
    for history in histories:
        if len(history.operations) >= _MAX_OPERATIONS:
            found.append((b"", _OLDER, ""))
        for known in (history.operations, history.numbers):
            for digest, operation in known.items():
                text, line = operation.described()
                found.append((digest, text, line))
    return found


@dataclass
class Report:
    """The description that one rank sends of itself when digests differ."""

    rank: int
    kind: str = ""  # the collective: all_reduce, ...
    purpose: str = ""  # the operation that needs it
    line: str = ""  # the line of the user's program
    # The plain tensor that is being compared, if the collective compares one.
    plain: str = ""
    # Each by its digest, its text and the line of its first use.
    operations: list[tuple[bytes, str, str]] = field(default_factory=list)
    odd: TensorKind | None = None  # the kind of that tensor, if it is not an ordinary one
    detail: str = ""  # what this rank has seen of the others, such as a message of another size
    # The last uses of plain tensors (`PlainUse.described`).
    plain_uses: list[list[Any]] = field(default_factory=list)
    raised: str = ""  # the last error of a function that this rank has run

    @staticmethod
    def here(
        rank: int,
        kind: str,
        purpose: Purpose,
        plain: str,
        histories: Sequence[History],
        odd: TensorKind | None = None,
        detail: str = "",
        raised: str = "",
    ) -> Report:
        """Return the current report of this rank."""
        operations = described_operations(histories)
        uses = [use.described() for history in histories for use in history.plain_uses]
        return Report(
            rank, kind, spelled(purpose), user_line(), plain, operations, odd, detail, uses, raised
        )

    def packed(self) -> bytes:
        """Return the report as bytes."""
        return pickle.dumps(
            (
                self.rank,
                self.kind,
                self.purpose,
                self.line,
                self.plain,
                self.operations,
                self.odd,
                self.detail,
                self.plain_uses,
                self.raised,
            )
        )

    @staticmethod
    def unpacked(data: bytes) -> Report:
        """Return the report of another rank from the bytes made by `packed`."""
        return Report(*pickle.loads(data))

    @property
    def place(self) -> str:
        """The collective that the rank is about to run, with its line."""
        return f"{collective_of(self.kind, self.purpose)}  ({self.line})"


def collective_of(kind: str, purpose: str) -> str:
    """Return a collective as errors show it.

    >>> collective_of("all_reduce", "add"), collective_of(OBJECTS, "parallelize")
    ('all_reduce for add', 'parallelize')
    """
    if kind == OBJECTS:
        return purpose or "an exchange of objects"
    return f"{kind or 'a collective'} for {purpose}" if purpose else kind or "a collective"


def _raised_texts(reports: Sequence[Report]) -> list[str]:
    """Return the errors that some ranks have had and others not, as lines of a text.

    A program that catches such an error goes on differently on each rank."""
    if len({r.raised for r in reports}) == 1:
        return []
    return [f"  rank {r.rank} had an error before: {r.raised}" for r in reports if r.raised]


def describe(reports: Sequence[Report], ranks: Sequence[int] = ()) -> str:
    """Return the error text of ranks that diverged, which is the same on every rank.

    ``reports`` are those of the ranks that answered, in the order of ranks. ``ranks``: all ranks of
    the collective.
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
    # Tensors for other operations may differ, and equal ones are not what differs.
    if (
        all(r.plain for r in reports)
        and len({r.plain for r in reports}) > 1
        and len({_COUNTER.sub("", r.purpose) for r in reports}) == 1
    ):
        return _plain_differs(reports)
    if found := _differing_plain_use(reports):
        return _plain_differs(found)
    reading = next((r for r in (first, other) if r.purpose.startswith(READING)), None)
    elsewhere = other if reading is first else first
    if reading is not None and reading.line != elsewhere.line:
        what = (
            f"rank {reading.rank} reads the value of a global tensor here, while rank "
            f"{elsewhere.rank} is at {elsewhere.place}. Not all ranks run both"
        )
        return "\n".join(
            [f"{_line_text(reading)}{what}. {READING_ADVICE}", *_raised_texts(reports)]
        )
    lines = [
        (
            f"{_line_text(first)}the ranks have diverged: all must run the same operations on "
            f"global tensors, in the same order"
        )
    ]
    lines.append(f"  rank {first.rank} is at {first.place}")
    if other is not first:
        lines.append(f"  rank {other.rank} is at {other.place}")
    lines += [f"  rank {r.rank}: {r.detail}" for r in reports if r.detail]
    lines += _raised_texts(reports)
    if not first.purpose and any(r.detail for r in reports):
        lines.append(
            "  messages of other sizes are often gradients of other parameters: requires_grad_(), "
            "detach() or another loss on some ranks only"
        )
    answered = {r.rank for r in reports}
    if silent := [r for r in ranks if r not in answered]:
        several = len(silent) > 1
        lines.append(
            f"  rank{'s' if several else ''} {', '.join(map(str, silent[:8]))} "
            f"{'have' if several else 'has'} not come to this collective: "
            f"{'they compute, are' if several else 'it computes, is'} in an operation with other "
            f"ranks, {'have' if several else 'has'} ended, or caught an error "
            f"of a collective (an interrupt, a timeout) and went on"
        )
    if other is not first:
        lines += _differing_operations(first, other)
        if len(lines) == 3 and (first.kind, first.purpose) == (other.kind, other.purpose):
            lines.append(
                "  they have run the same operations, but with other numbers, on other tensors, "
                "some more often, in another order, or on tensors that some have detached: "
                "flow.check_ranks() shows which"
            )
    lines.append(_ADVICE)
    return "\n".join(lines)


# ------------------------------------------------------------------ comparison at program end

_NOTHING_RUN: Final = History(()).digest().hex()
_AT_END: Final = "This was found when the program ended"
_LAST_OPERATIONS: Final = 256  # the most that a rank's record at its end has


def end_record(histories: Mapping[tuple[int, ...], History], failed: bool) -> bytes:
    """Return the record that a rank leaves for the others when its program ends.

    For each set of ranks it has the digest of the history and the last operations in it.
    """
    record = {
        ",".join(map(str, ranks)): [
            h.digest().hex(),
            _last_operations(h),
            [use.described() for use in h.plain_uses],
        ]
        for ranks, h in histories.items()
    }
    return json.dumps({"failed": failed, "histories": record}).encode()


def _last_operations(history: History) -> list[list[str]]:
    """Return the texts and lines of the last operations, and a mark if there were more."""
    operations = list(history.operations.values())
    older = [RecordedOperation(_OLDER)] if len(operations) > _LAST_OPERATIONS else []
    shown = [*older, *operations[-_LAST_OPERATIONS:], *history.numbers.values()]
    return [operation.described() for operation in shown]


def how_it_ended(record: bytes) -> tuple[str, bool]:
    """Return how another rank has ended, from the record that it left, or from an empty one.

    The second value is True if the rank did not reach the end of its program.

    >>> how_it_ended(b"")[0][:35]
    'has died, with no end of its progra'
    """
    if not record:
        how = (
            "has died, with no end of its program: it was killed by a signal (out of memory, a "
            "time limit), crashed, or called os._exit"
        )
        return how, True
    if json.loads(record)["failed"]:
        return "has failed: the exception in its own output is the cause", True
    how = (
        "has ended its program (the last line, or sys.exit), while this rank goes on: every rank "
        "must run the same operations on global tensors"
    )
    return how, False


def differs_at_end(rank: int, records: Mapping[int, bytes]) -> str:
    """Return the error text of ranks that have diverged, from records of ended ranks.

    Return an empty string if they have not diverged, or if a rank has failed.
    """
    ended = {r: json.loads(data) for r, data in records.items()}
    if any(record["failed"] for record in ended.values()):
        return ""
    own_histories = ended[rank]["histories"]
    for other, record in sorted(ended.items()):
        other_histories = record["histories"]
        for key in sorted({*own_histories, *other_histories}):
            if {rank, other} <= set(map(int, key.split(","))):
                (digest, operations, uses), (other_digest, other_operations, other_uses) = (
                    h.get(key, (_NOTHING_RUN, [], [])) for h in (own_histories, other_histories)
                )
                if digest != other_digest:
                    found = _differing_plain_use(
                        sorted(
                            (Report(rank, plain_uses=uses), Report(other, plain_uses=other_uses)),
                            key=lambda r: r.rank,
                        )
                    )
                    if found:
                        return f"{_plain_differs(found)}\n{_AT_END}"
                    return _divergence_at_end_text(rank, operations, other, other_operations)
    return ""


def _divergence_at_end_text(
    rank: int, operations: list[list[str]], other: int, other_operations: list[list[str]]
) -> str:
    lines = [
        (
            f"the ranks have diverged: rank {rank} and rank {other} have not run the same "
            f"operations on global tensors. {_AT_END}"
        )
    ]
    for me, own_operations, peer_operations in (
        (rank, operations, other_operations),
        (other, other_operations, operations),
    ):
        alone = _run_here_alone(own_operations, peer_operations)
        if alone is not None:
            peer_alone = _run_here_alone(peer_operations, own_operations)
            lines.append(
                f"  rank {me} has run {_shown_operation(*alone, peer_alone)}, which rank "
                f"{rank + other - me} has not"
            )
    if len(lines) == 1:
        lines.append(
            "  each operation has run on both, but on one rank more often, with other numbers or "
            "values of arguments, in another order, or on a detached tensor: flow.check_ranks() "
            "shows where"
        )
    lines.append(_ADVICE)
    return "\n".join(lines)


# -------------------------------------------------------------------------------------- error texts


def _line_text(report: Report) -> str:
    return f"{report.line}\n" if report.line else ""


def _run_here_alone(
    own: Sequence[Sequence[str]], of_peer: Sequence[Sequence[str]]
) -> tuple[str, str] | None:
    """Return the text and line of the first operation that a rank has run and its peer surely not.

    The operations are texts with their lines. The peer may not have saved all of them."""
    texts, peer_texts = {text for text, _ in own}, {text for text, _ in of_peer}
    after = _OLDER not in peer_texts  # True once the operations that the peer has saved begin
    for text, line in own:
        if text in peer_texts:
            after |= text != _OLDER
            continue
        operation, number, _ = text.rpartition(" with ")
        unknown = number and not (texts | peer_texts).isdisjoint((_MORE, f"{operation}{_MORE}"))
        if after and not unknown and text != _OLDER:
            return text, line
    return None


def _shown_operation(text: str, line: str, other: tuple[str, str] | None = None) -> str:
    """Return an operation as errors show it: of a long text the part that ``other`` has not."""
    begin = 0
    if other is not None and len(text) > _SHOWN:
        pairs = zip(text, other[0], strict=False)
        alike = next((i for i, (a, b) in enumerate(pairs) if a != b), len(text))
        begin = max(0, alike - _SHOWN // 2)
    shown = f"{text[:40]} ... {text[begin : begin + _SHOWN]}" if begin > 40 else text[:_SHOWN]
    return shown + (f"  ({line})" if line else "")


def _differing_operations(first: Report, other: Report) -> list[str]:
    lines = []
    for report, peer_report in ((first, other), (other, first)):
        own, of_peer = ([o[1:] for o in r.operations] for r in (report, peer_report))
        alone = _run_here_alone(own, of_peer)
        if alone is not None:
            shown = _shown_operation(*alone, _run_here_alone(of_peer, own))
            lines.append(
                f"  rank {report.rank} has run {shown}, which rank {peer_report.rank} has not"
            )
    return lines


def _differing_plain_use(reports: Sequence[Report]) -> list[Report]:
    """Return reports on the use of a plain tensor at which the ranks diverged, or none.

    They had run the same until then, and hold different values for it.
    """
    uses = [{use[0]: use[1:] for use in r.plain_uses} for r in reports]
    for before in uses[0]:
        if all(before in own for own in uses):
            found = [
                Report(r.rank, purpose=own[before][0], plain=own[before][1], line=own[before][2])
                for r, own in zip(reports, uses, strict=True)
            ]
            if (
                len({_COUNTER.sub("", r.purpose) for r in found})
                == 1
                < len({r.plain for r in found})
            ):
                return found
    return []


def _plain_differs(reports: Sequence[Report]) -> str:
    first = reports[0]
    kinds: dict[str, list[int]] = {}
    for r in reports:
        kinds.setdefault(r.plain, []).append(r.rank)
    held = "".join(
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}: {text}\n"
        for text, ranks in list(kinds.items())[:8]
    )
    head = (
        f"{_line_text(first)}a plain tensor that is used together with global tensors counts as "
        f"the same value on every rank, but the ranks hold different values for "
        f"{first.purpose}:\n{held}"
    )
    if any(r.plain.startswith(PARAMETER) for r in reports):
        return (
            f"{head}It is a parameter of a module that is not global. Call "
            "flow.parallelize(module, placement, plan) or module.to_global(placement, "
            "sbp=flow.sbp.broadcast) on that module too: all ranks then start from the first "
            "rank's values. To keep it plain, give all ranks the same values, for example by "
            "torch.manual_seed with one number before the module is made"
        )
    return f"{head}{_PLAIN_ADVICE}"
