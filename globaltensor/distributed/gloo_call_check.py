"""Check that the ranks of a group call the same collective, before torch's collective runs.

`collectives` calls this module on gloo. Gloo itself does not check: it ends the process whose
tensor is shorter, or leaves part of a longer one unwritten.

Before a collective each rank sends a description of the call, 48 bytes, to every other rank and
compares those that it receives. This is an all-to-all, which costs about as much as the smallest
all-reduce. Between two ranks of one host it takes 0.2 ms. Messages take 0.1 ms while both cores are
idle, but up to 4 ms otherwise. The next blocking call compares what an asynchronous call has
received. ``GLOBALTENSOR_CHECK_COLLECTIVES=0`` turns the check off.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.user_code import user_line
from ..errors import WorldError
from .world import world

__all__ = ["VARIABLE", "CallHeader", "check_collective", "enabled", "gloo_reason"]

VARIABLE: Final = "GLOBALTENSOR_CHECK_COLLECTIVES"
# The line of gloo's source where an error came up.
_GLOO_PLACE: Final = re.compile(r"\[\S+\.(?:cc|h):\d+\] ")
_MAX_WAITING: Final = 256
_NUMEL: Final = 3  # the index of ``numel`` in a header
_NAMES: Final = (
    "barrier", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single",
)  # fmt: skip
_DTYPES: Final = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_OPS: Final = (
    "",
    "SUM",
    "AVG",
    "PRODUCT",
    "MIN",
    "MAX",
    "BAND",
    "BOR",
    "BXOR",
    "PREMUL_SUM",
    "other",
)


@dataclass(frozen=True)
class CallHeader:
    """A collective as one rank calls it, on ``numel`` elements.

    ``parts`` is a checksum of the sizes if there are several tensors. -1 means that there is no
    value.
    """

    name: str
    op: str = ""
    dtype: torch.dtype | None = None
    numel: int = -1
    root: int = -1
    parts: int = -1

    def header(self) -> list[int]:
        kind = -1 if self.dtype is None else _DTYPES.index(self.dtype)
        return [
            _NAMES.index(self.name),
            _OPS.index(self.op),
            kind,
            self.numel,
            self.root,
            self.parts,
        ]

    @staticmethod
    def read(header: Tensor) -> CallHeader:
        name, op, dtype, *numbers = header.tolist()
        if not (0 <= name < len(_NAMES) and 0 <= op < len(_OPS) and dtype < len(_DTYPES)):
            # the peer runs an operation on global tensors, whose message this is
            return CallHeader("an operation on global tensors", "", None, -1, -1, 0)
        return CallHeader(_NAMES[name], _OPS[op], None if dtype < 0 else _DTYPES[dtype], *numbers)

    def __str__(self) -> str:
        of = (
            ""
            if self.dtype is None
            else f" of {self.numel} {str(self.dtype).removeprefix('torch.')}"
        )
        return f"{self.name}{of}{f' ({self.op})' if self.op else ''}{f', root {self.root}' if self.root >= 0 else ''}"  # noqa: E501


@dataclass
class PeerHeaders:
    """The headers that the group's ranks send for one call, and the expected ones.

    ``headers`` is complete once ``work`` has ended. ``me`` is this rank's place in ``ranks``.
    """

    work: Any
    headers: Tensor
    expected: Tensor
    ranks: list[int]
    me: int


class _Waiting(dict[str, list[PeerHeaders]]):
    """A rank's headers that have not been compared yet, by the name of the group."""


def enabled() -> bool:
    """Return True if collectives are compared."""
    return os.environ.get(VARIABLE, "1") != "0"


def check_collective(
    group: dist.ProcessGroup,
    call: CallHeader,
    block: bool,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Send this call's header to the other ranks of ``group``, and compare theirs with it.

    With ``block`` all headers are compared at once, those of earlier calls too. Otherwise the
    comparison waits for a later call. ``pairs`` is for an all-to-all: the elements received from
    and sent to each rank of the group. Raise WorldError if a call differs, naming this rank, the
    other one and both calls. Raise WorldError if a rank does not join, naming the possible ranks.
    """
    size = group.size()
    if size == 1:
        return
    said = expected = _headers(call, size)
    if pairs is not None:
        said, expected = said.clone(), said.clone()
        said[:, _NUMEL], expected[:, _NUMEL] = torch.tensor(pairs).unbind(1)
    headers = torch.empty_like(said)
    work = dist.all_to_all_single(headers, said, group=group, async_op=True)
    waiting = world().state(_Waiting).setdefault(group.group_name, [])
    waiting.append(
        PeerHeaders(work, headers, expected, dist.get_process_group_ranks(group), group.rank())
    )
    if block or len(waiting) > _MAX_WAITING:
        heard, waiting[:] = waiting[:], []
        for one in heard:
            _compare(one, f"{user_line()}\n" if one is heard[-1] else "")


@functools.lru_cache(maxsize=1024)
def _headers(call: CallHeader, size: int) -> Tensor:
    """Return a header for each rank. The tensor is shared and must not be written to."""
    return torch.tensor([call.header()] * size)


def gloo_reason(error: Exception) -> str:
    """Return gloo's text without the place in its source and its advice."""
    return _GLOO_PLACE.sub("", str(error)).partition(". This is typically")[0]


def _compare(one: PeerHeaders, line: str) -> None:
    """Compare the headers of one call. ``line``: that of the user, if it makes this call now."""
    me, own_call = one.ranks[one.me], CallHeader.read(one.expected[one.me])
    try:
        one.work.wait()
    except RuntimeError as error:
        others = ", ".join(str(r) for r in one.ranks if r != me)
        who = f"rank {others}" if len(one.ranks) == 2 else f"one of ranks {others}"
        raise WorldError(
            f"{user_line()}\nrank {me} calls {own_call}, but {who} did not join: it has died, "
            f"hangs, or does something else\n({gloo_reason(error)})"
        ) from error
    if torch.equal(one.headers, one.expected):
        return
    at = int((one.headers != one.expected).any(1).nonzero()[0])
    heard, own_call, other = (
        CallHeader.read(one.headers[at]),
        CallHeader.read(one.expected[at]),
        one.ranks[at],
    )
    if (heard.name, heard.dtype) == (own_call.name, own_call.dtype) and own_call.name.startswith(
        "all_to_all"
    ):
        raise WorldError(
            f"{line}{own_call.name}: rank {other} sends {heard.numel} elements to rank {me}, which "
            f"expects {own_call.numel}; make the sizes agree"
        )
    raise WorldError(
        f"{line}rank {me} calls {own_call}, but rank {other} calls {heard}: all ranks of a group "
        f"must call the same, with tensors that match"
    )
