"""Do the ranks of a group call the same collective? Gloo does not ask: it ends the process whose tensor is shorter, or leaves part of a longer one unwritten.

Before a collective each rank tells the next one in the group what it is about to call, and compares what it hears from the one before: one message
of 56 bytes, about 0.1 ms on one host, and nothing on the wire grows with the tensors. In an all-to-all every pair compares what the one sends
with what the other expects. What an asynchronous call hears is compared by the next call that blocks. ``GLOBALTENSOR_CHECK_COLLECTIVES=0`` turns it off.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WorldError
from .world import World, world

__all__ = ["VARIABLE", "Call", "agree", "enabled"]

VARIABLE: Final = "GLOBALTENSOR_CHECK_COLLECTIVES"
_TAG: Final = 7003  # keeps these messages apart from all others
_MOST_WAITING: Final = 256
_NAMES: Final = (
    "barrier", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single",
)  # fmt: skip
_DTYPES: Final = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_OPS: Final = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM", "other")


@dataclass(frozen=True)
class Call:
    """A collective as one rank calls it: of ``numel`` elements; ``parts`` is a number made of the sizes where there are several; -1: has none."""

    name: str
    op: str = ""
    dtype: torch.dtype | None = None
    numel: int = -1
    root: int = -1
    parts: int = -1

    def header(self) -> Tensor:
        name, op, dtype, *numbers = astuple(self)
        return torch.tensor([_NAMES.index(name), _OPS.index(op), -1 if dtype is None else _DTYPES.index(dtype), *numbers])

    @staticmethod
    def read(header: Tensor) -> Call:
        name, op, dtype, *numbers = header.tolist()
        return Call(_NAMES[name], _OPS[op], None if dtype < 0 else _DTYPES[dtype], *numbers)

    def __str__(self) -> str:
        of = "" if self.dtype is None else f" of {self.numel} {str(self.dtype).removeprefix('torch.')}"
        return f"{self.name}{of}{f' ({self.op})' if self.op else ''}{f', root {self.root}' if self.root >= 0 else ''}"


@dataclass
class _Heard:
    """A message on its way: what it must say, and from whom."""

    work: Any
    header: Tensor
    expected: Call
    ranks: tuple[int, int]
    sent: tuple[Any, Tensor]


_WAITING: weakref.WeakKeyDictionary[World, dict[str, list[_Heard]]] = weakref.WeakKeyDictionary()


def enabled() -> bool:
    """Whether collectives are compared."""
    return os.environ.get(VARIABLE, "1") != "0"


def agree(group: dist.ProcessGroup, call: Call, block: bool, pairs: Mapping[int, tuple[int, int]] | None = None) -> None:
    """Tell the others of ``group`` and hear from them. ``pairs``, of an all-to-all: for each rank in the group how many elements it gets and gives.

    Raises WorldError naming two ranks and what each calls, or the rank that did not come.
    """
    size, me = group.size(), group.rank()
    if size == 1:
        return
    waiting = _WAITING.setdefault(world(), {}).setdefault(group.group_name, [])
    waiting += _ring(group, call, me, size) if pairs is None else _all(group, call, me, pairs)
    if block or len(waiting) > _MOST_WAITING:
        heard, waiting[:] = waiting[:], []
        for one in heard:
            _compare(one)


def _ring(group: dist.ProcessGroup, call: Call, me: int, size: int) -> Iterator[_Heard]:
    yield _exchange(group, (me + 1) % size, call, (me - 1) % size, call, me)


def _all(group: dist.ProcessGroup, call: Call, me: int, pairs: Mapping[int, tuple[int, int]]) -> Iterator[_Heard]:
    for peer, (gets, gives) in pairs.items():
        if peer != me:
            yield _exchange(group, peer, Call(call.name, dtype=call.dtype, numel=gets), peer, Call(call.name, dtype=call.dtype, numel=gives), me)


def _exchange(group: dist.ProcessGroup, to: int, said: Call, source: int, expected: Call, me: int) -> _Heard:
    out = said.header()
    heard = torch.empty_like(out)
    receive = group.recv([heard], source, _TAG)
    ranks = dist.get_global_rank(group, me), dist.get_global_rank(group, source)
    return _Heard(receive, heard, expected, ranks, (group.send([out], to, _TAG), out))


def _compare(one: _Heard) -> None:
    me, other = one.ranks
    try:
        one.work.wait()
        one.sent[0].wait()
    except RuntimeError as error:
        raise WorldError(f"rank {me} calls {one.expected}, but rank {other} did not come: {error}; it has died, hangs, or does something else") from error
    heard = Call.read(one.header)
    if heard == one.expected:
        return
    if heard.name == one.expected.name and heard.dtype == one.expected.dtype and heard.name.startswith("all_to_all"):
        raise WorldError(f"{heard.name}: rank {other} sends {heard.numel} elements to rank {me}, which expects {one.expected.numel}; make the sizes agree")
    raise WorldError(f"rank {me} calls {one.expected}, but rank {other} calls {heard}: all ranks of a group must call the same, with tensors that match")
