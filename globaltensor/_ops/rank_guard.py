"""``check_ranks``: compare the operations of ranks, and report where they diverge.

Users call it. Global tensors need every rank to run the same ops in the same order. Before each
collective of global tensors, its ranks exchange what they have run so far and the purpose of the
collective. The messages have one size and a process group of their own. So ranks that do different
things neither hang nor read each other's data as something else.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .._base import torch_private
from .._base.pytree import tensors_in
from .._base.user_code import user_line as _line
from .._tensor.global_tensor import ORDINARY, GlobalTensor
from .._tensor.plain_operands import content_digest
from ..distributed.communicator import Communicator
from ..distributed.world import ProcessWorld, timeout, world
from ..distributed.world_base import World
from ..errors import DivergenceError, WorldError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp
from .call_plan import name_of
from .check_replicas import replica_ranks

__all__ = ["check_ranks"]

_BYTES: Final = 4096  # size of a message
_MAX_OPS_SHOWN: Final = 12  # maximum number of ops in a message
_TEXT: Final = 100  # maximum number of characters per op
# these communicate nothing, or their collectives are compared
_UNSEEN: Final = frozenset({"__get__", "detach", "to_local", "backward"})
_serial = itertools.count()


class OpRecord(NamedTuple):
    """An op, and the line of the program that called it."""

    placement: Placement
    op: str
    line: str
    operands: str  # text that tells operands of one layout apart


class RankGuard(TorchFunctionMode):
    """A record of the ops that this rank has run under the guard."""

    def __init__(self, this_world: World, name: str) -> None:
        super().__init__()
        self._world, self._name = this_world, name
        self._done: collections.deque[OpRecord] = collections.deque(maxlen=_MAX_OPS_SHOWN)
        self._digests: dict[Placement, tuple[int, bytes]] = {}
        #: For each group of ranks with the same local tensor: the number of operands seen, a digest
        #: of their values, and the text of the last ones.
        self._replicas: dict[
            tuple[int, ...], tuple[int, bytes, collections.deque[tuple[str, str]]]
        ] = {}
        # local tensor -> its version, and the digest of its values at that version
        self._seen: Any = WeakIdKeyDictionary()
        self._now = ""
        self._busy = False
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        global_operands = [t for t in tensors_in((args, kwargs), []) if isinstance(t, GlobalTensor)]
        if not global_operands or getattr(func, "__name__", "") in _UNSEEN:
            return func(*args, **kwargs)
        self._record_replicas(name, global_operands)
        what = f"{name}({', '.join([*map(_value_text, args), *(f'{k}={_value_text(v)}' for k, v in kwargs.items())])})"  # noqa: E501
        which = _operand_ids_text(global_operands)
        self._now, before = _shorten(what), self._now
        try:
            out = func(*args, **kwargs)
        finally:
            self._now = before
        if tensors_in(out, []):
            placement = global_operands[0].placement
            count, digest = self._digests.get(placement, (0, b""))
            self._digests[placement] = (
                count + 1,
                hashlib.blake2b(digest + f"{what}{which}".encode(), digest_size=8).digest(),
            )
            self._done.append(OpRecord(placement, _shorten(what), _line(), which))
        return out

    def _record_replicas(self, name: str, operands: Sequence[GlobalTensor]) -> None:
        """Record the values of operands of which other ranks hold replicas."""
        for i, x in enumerate(operands):
            group = replica_ranks(x._spec, self._world.rank)
            local = x._local if len(group) > 1 and type(x) in ORDINARY else None
            if (
                local is None
                or local.is_meta
                or local.layout is not torch.strided
                or torch_private.is_fake(local)
            ):
                continue
            version = -1 if local.is_inference() else local._version
            known = self._seen.get(local)
            if known is None or known[0] != version or version < 0:
                with torch.no_grad(), torch_private.without_function_modes():
                    known = self._seen[local] = version, content_digest(local)
            count, digest, last = self._replicas.get(
                group, (0, b"", collections.deque(maxlen=_MAX_OPS_SHOWN))
            )
            last.append((f"operand {i} of {name} {x._spec!r} ({known[1].hex()})", _line()))
            self._replicas[group] = (
                count + 1,
                hashlib.blake2b(digest + known[1], digest_size=8).digest(),
                last,
            )

    def compare(self, comm: Communicator, kind: str) -> None:
        """Compare with the other ranks of a collective, before it runs.

        Raises DivergenceError if they differ, and WorldError if a rank does not arrive."""
        if comm.size == 1 or self._busy:
            return
        self._busy = True
        try:
            common = [p for p in self._digests if set(comm.ranks) <= set(p.flat)]
            done = [
                (did.op, did.line, did.operands) for did in self._done if did.placement in common
            ]
            counts = {
                repr(p): (self._digests[p][0], self._digests[p][1].hex())
                for p in sorted(common, key=repr)
            }
            state = hashlib.blake2b(json.dumps(counts).encode(), digest_size=8).hexdigest()
            # Groups of which this collective joins several ranks. A group is named by a digest, so
            # that a report stays short where groups are large.
            replicas = {
                hashlib.blake2b(repr(g).encode(), digest_size=4).hexdigest(): each
                for g, each in sorted(self._replicas.items())
                if len(set(comm.ranks) & set(g)) > 1
            }
            held = {g: f"{n} {digest.hex()}" for g, (n, digest, _) in replicas.items()}
            shown = [(g, *each) for g, (_, _, last) in replicas.items() for each in last]
            own_report = {
                "kind": kind,
                "op": self._now,
                "line": _line(),
                "n": sum(n for n, _ in counts.values()),
                "state": state,
                "done": done,
            }
            own_report |= {"replicas": held, "operands": shown}
            reports = self._exchange_reports(comm, own_report)
        finally:
            self._busy = False
        same = ("kind", "op", "n", "state")
        # all ranks compare with the same rank, so they raise the same error
        first, reference = comm.ranks[0], reports[0]
        for rank, other in zip(comm.ranks, reports, strict=True):
            if any(other[key] != reference[key] for key in same):
                self._world.forget()
                self._world.diverged = _mismatched_ops_text(first, reference, rank, other)
                raise DivergenceError(self._world.diverged)
        # and each rank of a group of replicas with the first one of that group
        firsts: dict[str, tuple[int, dict[str, Any]]] = {}
        for rank, other in zip(comm.ranks, reports, strict=True):
            for group, digest in other["replicas"].items():
                first, reference = firsts.setdefault(group, (rank, other))
                if digest != reference["replicas"][group]:
                    self._world.forget()
                    raise DivergenceError(
                        _mismatched_replicas_text(group, first, reference, rank, other)
                    )

    def _exchange_reports(self, comm: Communicator, own_report: dict[str, Any]) -> list[Any]:
        if not isinstance(self._world, ProcessWorld):
            return comm.all_gather_unchecked(own_report)
        self.post_position(_position_text(own_report))
        ranks = tuple(sorted(comm.ranks))
        sent = torch.frombuffer(bytearray(_message(own_report)), dtype=torch.uint8)
        got = [torch.empty_like(sent) for _ in ranks]
        try:
            dist.all_gather(got, sent, group=self._group(ranks))
        except RuntimeError as error:
            others = "".join(
                f"\n  rank {r} {self._peer_position(r)}" for r in ranks if r != self._world.rank
            )
            problem = (
                f"the ranks have diverged, or a rank has ended: not all of ranks {list(ranks)} "
                f"arrived within {timeout().total_seconds():g} s"
            )
            raise WorldError(
                f"{problem}\n  rank {self._world.rank} is {_position_text(own_report)}{others}"
            ) from error
        reports = dict(
            zip(ranks, (json.loads(g.numpy().tobytes().rstrip(b"\0")) for g in got), strict=True)
        )
        return [reports[r] for r in comm.ranks]

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self._groups:
            name = f"globaltensor_{self._name}_{'_'.join(map(str, ranks))}"
            self._groups[ranks] = torch_private.new_group(
                ranks, self._world.rank, name, "gloo", timeout()
            )
        return self._groups[ranks]

    # The position of each rank, for the ranks that wait for it.

    def post_position(self, position: str) -> None:
        """Tell the other ranks how far this one has come within the block."""
        if isinstance(self._world, ProcessWorld) and dist.is_initialized():
            torch_private.default_store().set(f"{self._name}/{self._world.rank}", position)

    def _peer_position(self, rank: int) -> str:
        try:
            store, key = torch_private.default_store(), f"{self._name}/{rank}"
            return (
                f"was last {store.get(key).decode()}"
                if store.check([key])
                else "has not entered check_ranks(): every rank must enter the block"
            )
        except RuntimeError:
            return "cannot be reached"


def _message(report: dict[str, Any]) -> bytes:
    """Return a message of `_BYTES`, without the oldest ops if it would be longer."""
    for drop in range(max(len(report["done"]), len(report["operands"])) + 1):
        text = json.dumps(
            {**report, "done": report["done"][drop:], "operands": report["operands"][drop:]}
        ).encode()
        if len(text) <= _BYTES:
            return text.ljust(_BYTES, b"\0")
    return (
        json.dumps({**report, "done": [], "operands": [], "line": ""})
        .encode()[:_BYTES]
        .ljust(_BYTES, b"\0")
    )


def _position_text(report: dict[str, Any]) -> str:
    what = f"{report['kind']} of {report['op']}" if report["op"] else report["kind"]
    return f"at {what}, after {report['n']} op{'' if report['n'] == 1 else 's'}  ({report['line']})"


def _mismatched_ops_text(
    me: int, own_report: dict[str, Any], rank: int, other: dict[str, Any]
) -> str:
    lines = [
        (
            f"the ranks have diverged: all must run the same ops on global tensors, in the same "
            f"order\n  "
            f"rank {me} {_position_text(own_report)}\n  rank {rank} {_position_text(other)}"
        )
    ]
    if own_report["state"] != other["state"]:
        one, two = (
            {
                report["n"] - len(report["done"]) + i: tuple(did)
                for i, did in enumerate(report["done"])
            }
            for report in (own_report, other)
        )
        at = next(
            (
                n
                for n in sorted(one.keys() | two.keys())
                if n >= max(min(one, default=0), min(two, default=0)) and _op(one, n) != _op(two, n)
            ),
            None,
        )
        if at is None:
            lines.append(f"the ranks differ in an op before the last {_MAX_OPS_SHOWN}")
        else:
            same_text = at in one and at in two and one[at][0] == two[at][0]
            lines += [
                f"the first op that differs is number {at + 1}",
                f"  rank {me} ran {_op_text(one, at, same_text)}",
                f"  rank {rank} ran {_op_text(two, at, same_text)}",
            ]
    return "\n".join(lines)


def _mismatched_replicas_text(
    group: str, me: int, own_report: dict[str, Any], rank: int, other: dict[str, Any]
) -> str:
    """Return the error text for ranks of a group whose replicas hold different values."""
    own_operands, other_operands = (
        [(text, line) for of, text, line in report["operands"] if of == group]
        for report in (own_report, other)
    )
    pairs = zip(own_operands, other_operands, strict=False)
    pair = next(((a, b) for a, b in pairs if a[0] != b[0]), None)
    which = (
        "an operand before those that the ranks have exchanged"
        if pair is None
        else f"{pair[0][0]} on rank {me}, {pair[1][0]} on rank {rank}  ({pair[0][1]})"
    )
    return (
        f"replicas differ: ranks {me} and {rank} hold different values of the same shard of a "
        f"global tensor\n  {which}\n"
        "Something has changed it on one rank only: a write into to_local(), a different file, "
        "a different random seed. flow.check_replicas(model) names parameters"
    )


def _op(done: dict[int, tuple[str, ...]], n: int) -> str:
    return f"{done[n][0]}{done[n][2]}" if n in done else ""


def _op_text(done: dict[int, tuple[str, ...]], n: int, operands: bool) -> str:
    """Return an op as errors show it, with the ``operands`` that tell it from another one."""
    if n not in done:
        return "nothing more"
    op, line, which = done[n]
    return f"{op}{which if operands else ''}  ({line})"


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 4]} ..."


def _operand_ids_text(operands: Sequence[GlobalTensor]) -> str:
    """Return text that tells operands of one layout apart: ``" on tensors 3fa1, 07c2"``.

    It is the end of each serial. Only tensors on the first one's placement have a serial that its
    ranks share."""
    placement = operands[0].placement
    ends = [f"{t._serial & 0xFFFF:04x}" for t in operands if t._serial and t.placement is placement]
    return f" on tensor{'s' if len(ends) > 1 else ''} {', '.join(ends)}" if ends else ""


def _value_text(value: Any) -> str:
    if isinstance(value, GlobalTensor):
        return repr(value._spec)
    if isinstance(value, torch.Tensor):
        return f"plain {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, Sbp):
        return value.short
    known = isinstance(value, (int, float, complex, str, slice, torch.dtype, type(None)))
    return repr(value) if known else type(value).__name__


@contextlib.contextmanager
def check_ranks() -> Iterator[None]:
    """Compare what the ranks run within the block, and report operations that diverge.

    Every rank must enter the block. Without it, each collective compares a digest of the operations
    that were run. Ranks that diverge then get an error that does not name the operation. Within the
    block the error names both ranks, operations and lines. Each collective costs a message more,
    and each operation some ten microseconds.

    The ranks compare functions and methods with their scalar arguments, and the shape, dtype,
    placement and sbp of tensors. They also compare the values of replicated operands, those of
    plain tensors at every use, and the collectives, forward and backward. Raises DivergenceError.
    Raises WorldError if a rank does not arrive within GLOBALTENSOR_TIMEOUT seconds, with the last
    positions of the other ranks.

    >>> import globaltensor as flow
    >>> with check_ranks():
    ...     _ = flow.ones(4, placement=flow.placement("cpu", [0]), sbp=flow.sbp.split(0)).sum()
    """
    this_world = world()
    pace, before = (
        RankGuard(
            this_world, f"pace{next(_serial)}" if isinstance(this_world, ProcessWorld) else ""
        ),
        (this_world.pace, torch_private.recording.looks),
    )
    pace.post_position("in the block, at no collective yet")
    this_world.pace, torch_private.recording.looks = pace, True
    try:
        with pace:
            yield
    finally:
        this_world.pace, torch_private.recording.looks = before
