"""torch.distributed's collectives and messages, with torch's signatures, safe for any tensor.

User code calls them through ``flow.distributed``. Each call starts the world if it has not started.

Gloo reads and writes storages as they are in memory. So on gloo a tensor may be sent as a
contiguous copy. That is the case if it is not contiguous, or if gloo does not know its dtype. The
ranks also compare first what they are about to call (distributed/gloo_call_check.py). Other
backends get the arguments unchanged.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.user_code import user_line
from ..errors import KernelError, WorldError
from .gloo_call_check import CallHeader, check_collective, enabled, gloo_reason
from .process_groups import start
from .replicated_results import ADDING, refuse_replicated
from .user_collectives import WATCHED, watched
from .watchdog import current

__all__ = [
    "P2POp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "init_device_mesh", "irecv",
    "isend", "monitored_barrier", "new_subgroups",
    "new_subgroups_by_enumeration", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list",
]  # fmt: skip

Function = Callable[..., Any]

# The texts of gloo where another rank has not come.
_NOT_JOINED: Final = re.compile(r"Timed out waiting|closed by peer|reset by peer", re.IGNORECASE)

_GLOO: Final = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8,
    torch.int32, torch.int64, torch.bool
}  # fmt: skip
#: Dtypes that gloo cannot reduce -> a dtype that it can reduce. The wider one holds all values and
#: wraps round as the narrow one does.
_WIDER: Final = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
}
#: torch renamed these in 2.13 and warns at the older names.
_RENAMED: Final = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}


def refuse_global(name: str, values: Iterable[Any]) -> None:
    """Raise KernelError if one of the values, or an element of one, is a global tensor.

    torch.distributed's own collectives raise the same class.
    """
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_global:  # type: ignore[attr-defined]
            spec = value.spec  # type: ignore[attr-defined]
            raise KernelError(
                f"{name} got a global tensor, {spec!r}: collectives accept local tensors. Use "
                "x.to_global(sbp=...) to move a global tensor between ranks, with its gradient, or "
                "x.to_local() to get this rank's local tensor"
            )
        if isinstance(value, (list, tuple)):
            refuse_global(name, value)


def _on_gloo(config: str, device: torch.device | None) -> bool:
    """Return True if gloo carries the tensors of this device in a group with these backends."""
    return ":" not in config or f"{'cpu' if device is None else device.type}:gloo" in config


class _Staged(dist.Work):
    """A torch work whose results must still be copied to the caller's tensors."""

    def __init__(self, work: Any, deliver: Callable[[], None], results: list[Tensor]) -> None:
        super().__init__()
        self.work, self._deliver, self._results, self._lock, self._delivered = (
            work,
            deliver,
            results,
            threading.Lock(),
            False,
        )

    def _finish(self, *_: object) -> list[Tensor]:
        with self._lock:
            if not self._delivered:
                self._deliver()
                self._delivered = True
        return self._results

    def wait(self, *timeout: Any) -> bool:
        self.work.wait(*timeout)
        self._finish()
        return True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def is_success(self) -> bool:
        return bool(self.work.is_success())

    def exception(self) -> Any:
        return self.work.exception()

    def source_rank(self) -> int:
        return int(self.work._source_rank())

    _source_rank = source_rank

    def get_future(self) -> Any:
        return self.work.get_future().then(self._finish)


def _carrier(t: Tensor, reduces: bool) -> Tensor:
    """Return the tensor that gloo sends for ``t``: ``t``, a view of the same memory, or a copy."""
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    plain = t.contiguous()
    if plain.dtype in _GLOO:
        return plain
    return (
        plain.to(_WIDER.get(plain.dtype, plain.dtype))
        if reduces
        else plain.unsqueeze(-1).view(torch.uint8)
    )


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Raise WorldError with the user's line where gloo reports that another rank did not join.

    ``name``: the function, for the error.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WorldError) or not _NOT_JOINED.search(str(error)):
            raise
        why = gloo_reason(error)
        raise WorldError(
            f"{user_line()}\nrank {dist.get_rank()} is in flow.distributed.{name}, and another "
            f"rank has not joined it: that rank has ended, hangs, or is in another function, such "
            f"as an operation on global tensors. The last line of each rank's own output shows "
            f"where\n({why})"
        ) from error


def check_peer(name: str, argument: str, rank: Any) -> None:
    """Raise WorldError if ``rank`` is no rank of this job. Gloo would wait for it without end.

    ``name`` and ``argument``: the function and its argument, for the error."""
    size = dist.get_world_size()
    if isinstance(rank, int) and not 0 <= rank < size:
        raise WorldError(
            f"{name}: {argument}={rank} is not a rank of this job, whose ranks are 0 to {size - 1}"
        )


def _parameters(name: str) -> list[str]:
    """Return the names of the parameters of one of torch's functions.

    A library that has replaced ``torch.distributed``'s function may hide them (``*args``). The
    function of ``distributed_c10d`` then shows them.
    """
    names = list(inspect.signature(getattr(dist, name)).parameters)
    if "group" in names:
        return names
    return list(inspect.signature(getattr(dist.distributed_c10d, name)).parameters)


class _Collective:
    """One of torch's functions: which arguments it reads and writes, and how to describe a call."""

    def __init__(
        self, name: str, reads: str = "", writes: str = "", reduces: bool = False, root: str = ""
    ) -> None:
        self.name, self.reads, self.writes, self.reduces, self.root = (
            name,
            reads,
            writes,
            reduces,
            root,
        )
        self.original: Function = getattr(dist, name)
        self.function: Function = getattr(dist, _RENAMED.get(name, name), self.original)
        self.names = _parameters(name)
        self.position = self.names.index("group")
        # The argument that names the other rank of a message.
        self.peer = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}.get(name, "")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        thread, outer = threading.get_ident(), current.call
        if self.name not in WATCHED or (outer is not None and outer[0] == thread):
            return self._call(args, kwargs)
        current.number += 1  # as `watched` does
        current.call = thread, self.name, args, kwargs
        try:
            return self._call(args, kwargs)
        finally:
            current.call = None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        this_world = start()
        refuse_global(self.name, args)
        if kwargs:
            refuse_global(self.name, kwargs.values())
        group = (
            kwargs["group"]
            if "group" in kwargs
            else args[self.position]
            if len(args) > self.position
            else None
        )
        if self.peer or self.name in ADDING:
            bound = dict(zip(self.names, args, strict=False)) | kwargs
            if self.peer:
                check_peer(self.name, self.peer, bound.get(self.peer))
            else:
                refuse_replicated(self.name, bound.get(self.reads), bound.get("op"), group)
        config = (
            this_world.backend
            if group is None
            else str(dist.get_backend_config(group))
            if isinstance(group, dist.ProcessGroup)
            else ""
        )
        if "gloo" not in config or len(args) > len(self.names):
            return self.function(*args, **kwargs)
        group = dist.group.WORLD if group is None else group
        assert group is not None  # start() has created the group
        # (A signature's bind would take ten times as long.)
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        some = self._tensors(arguments, self.reads) or self._tensors(arguments, self.writes)
        if (
            dist.get_rank(group) < 0
            or not all(isinstance(t, Tensor) for t in some)
            or not _on_gloo(config, some[0].device if some else None)
        ):
            return self.function(**arguments)
        return self._on_gloo(arguments, group)

    @staticmethod
    def _tensors(arguments: dict[str, Any], name: str) -> list[Any]:
        value = arguments.get(name)
        return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]

    def _on_gloo(self, arguments: dict[str, Any], group: dist.ProcessGroup) -> Any:
        if self.name in _DESCRIBED and enabled():
            call, pairs = self._describe(arguments, group)
            check_collective(group, call, not arguments.get("async_op", False), pairs)
        if (
            self.name == "all_gather"
            and len({t.numel() for t in self._tensors(arguments, self.writes)}) > 1
        ):
            return _all_gather_unevenly(arguments, group)
        tensors = [t for n in (self.reads, self.writes) for t in self._tensors(arguments, n)]
        if any(t.layout is not torch.strided for t in tensors):
            return self.function(**arguments)  # gloo sums sparse tensors itself
        swapped = {id(t): _carrier(t, self.reduces) for t in tensors}
        straight = all(
            swapped[id(t)].data_ptr() == t.data_ptr() and swapped[id(t)].dtype == t.dtype
            for t in tensors
        )
        try:
            return self.function(**arguments) if straight else self._staged(arguments, swapped)
        except RuntimeError as error:
            if self.name != "all_to_all" or "does not support alltoall" not in str(error):
                raise
            return _all_to_all_joined(arguments, group)

    def _staged(self, arguments: dict[str, Any], swapped: dict[int, Tensor]) -> Any:
        def carried(value: Any) -> Any:
            return (
                [swapped[id(t)] for t in value]
                if isinstance(value, (list, tuple))
                else swapped[id(value)]
            )

        names = [n for n in {self.reads, self.writes} if arguments.get(n) is not None]
        result = self.function(**{**arguments, **{n: carried(arguments[n]) for n in names}})
        outs = self._tensors(arguments, self.writes)

        def deliver() -> None:
            with torch.no_grad():
                for t in outs:
                    carrier = swapped[id(t)]
                    if carrier.data_ptr() != t.data_ptr():
                        t.copy_(
                            carrier.view(t.dtype).view(t.shape)
                            if carrier.dtype == torch.uint8 != t.dtype
                            else carrier
                        )

        if isinstance(result, dist.Work):
            return _Staged(result, deliver, outs)
        deliver()
        return result

    def _describe(
        self, arguments: dict[str, Any], group: dist.ProcessGroup
    ) -> tuple[CallHeader, list[tuple[int, int]] | None]:
        reads, writes = self._tensors(arguments, self.reads), self._tensors(arguments, self.writes)
        some = (reads or writes or [None])[0]
        if self.name.startswith("all_to_all"):
            gets, gives = (
                _split_numels(reads, arguments.get("input_split_sizes"), group),
                _split_numels(writes, arguments.get("output_split_sizes"), group),
            )
            return CallHeader(self.name, dtype=some.dtype), list(zip(gets, gives, strict=True))
        op = (
            getattr(arguments.get("op", dist.ReduceOp.SUM), "name", "other") if self.reduces else ""
        )
        lists = next((v for v in (reads, writes) if len(v) > 1), [])
        measured = (
            lists
            if self.name in ("all_gather", "reduce_scatter")
            else (writes if self.name == "scatter" else reads)
        )
        numel = sum(t.numel() for t in measured) if measured else -1
        parts = (
            zlib.crc32(str([t.numel() for t in lists]).encode())
            if self.name in ("all_gather", "reduce_scatter")
            else -1
        )
        return CallHeader(
            self.name,
            op,
            None if some is None else some.dtype,
            numel,
            self._root(arguments, group),
            parts,
        ), None

    def _root(self, arguments: dict[str, Any], group: dist.ProcessGroup) -> int:
        if not self.root:
            return -1
        inside = arguments.get(f"group_{self.root}")
        if inside is not None:
            return dist.get_global_rank(group, inside)
        root = arguments.get(self.root)
        return 0 if root is None else int(root)


_DESCRIBED: Final = {
    "barrier", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor",
    "all_to_all", "all_to_all_single",
}  # fmt: skip


def _split_numels(
    tensors: Sequence[Tensor], rows: Sequence[int] | None, group: dist.ProcessGroup
) -> list[int]:
    """Return the number of elements for each rank of the group."""
    if len(tensors) == group.size() > 1:
        return [t.numel() for t in tensors]
    whole, size = tensors[0], group.size()
    if not rows:
        return [whole.numel() // size] * size
    row = whole[:1].numel()
    return [n * row for n in rows]


def _all_gather_unevenly(arguments: dict[str, Any], group: dist.ProcessGroup) -> Any:
    """Gather local tensors of several sizes by an all-to-all of copies.

    Gloo gathers local tensors of one size only.
    """
    outs, own_tensor, size = arguments["tensor_list"], arguments["tensor"], group.size()
    numels = [t.numel() for t in outs]
    source = (
        own_tensor.detach().contiguous().view(-1).unsqueeze(-1).view(torch.uint8).repeat(size, 1)
    )
    target = source.new_empty(sum(numels), own_tensor.itemsize)
    late = bool(arguments.get("async_op", False))
    work = dist.all_to_all_single(
        target, source, numels, [own_tensor.numel()] * size, group=group, async_op=late
    )

    def deliver() -> None:
        with torch.no_grad():
            for t, part in zip(outs, target.split(numels), strict=True):
                t.copy_(part.reshape(-1).view(own_tensor.dtype).view(t.shape))

    if late:
        return _Staged(work, deliver, outs)
    deliver()
    return None


def _all_to_all_joined(arguments: dict[str, Any], group: dist.ProcessGroup) -> Any:
    """Exchange lists of tensors by one all-to-all of their concatenation.

    Gloo in older torch has only the all-to-all of one tensor.
    """
    outs, late = list(arguments["output_tensor_list"]), bool(arguments.get("async_op", False))
    ins = [
        t.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for t in arguments["input_tensor_list"]
    ]
    source, received = torch.cat(ins), [t.nbytes for t in outs]
    target = source.new_empty(sum(received))
    work = dist.all_to_all_single(
        target, source, received, [t.numel() for t in ins], group=group, async_op=late
    )

    def deliver() -> None:
        with torch.no_grad():
            for t, part in zip(outs, target.split_with_sizes(received), strict=True):
                t.copy_(part.view(t.dtype).view(t.shape))

    if late:
        return _Staged(work, deliver, outs)
    deliver()
    return None


def _make_collective(
    name: str, reads: str = "", writes: str = "", reduces: bool = False, root: str = ""
) -> Function:
    collective = _Collective(name, reads, writes, reduces, root)

    @functools.wraps(collective.original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return collective(args, kwargs)

    call.__module__, call.__doc__ = __name__, collective.function.__doc__
    return call


all_reduce = _make_collective("all_reduce", "tensor", "tensor", reduces=True)
reduce = _make_collective("reduce", "tensor", "tensor", reduces=True, root="dst")
broadcast = _make_collective("broadcast", "tensor", "tensor", root="src")
all_gather = _make_collective("all_gather", "tensor", "tensor_list")
all_gather_into_tensor = _make_collective("all_gather_into_tensor", "input_tensor", "output_tensor")
gather = _make_collective("gather", "tensor", "gather_list", root="dst")
scatter = _make_collective("scatter", "scatter_list", "tensor", root="src")
reduce_scatter = _make_collective("reduce_scatter", "input_list", "output", reduces=True)
reduce_scatter_tensor = _make_collective("reduce_scatter_tensor", "input", "output", reduces=True)
all_to_all = _make_collective("all_to_all", "input_tensor_list", "output_tensor_list")
all_to_all_single = _make_collective("all_to_all_single", "input", "output")
barrier = watched(_make_collective("barrier"))
send, isend = _make_collective("send", "tensor"), _make_collective("isend", "tensor")
recv, irecv = _make_collective("recv", writes="tensor"), _make_collective("irecv", writes="tensor")

_TORCHS: Final[dict[Function, Function]] = {isend: dist.isend, irecv: dist.irecv}


def _start_world_first(name: str, peer: str = "") -> Function:
    """Return torch's function of this name, with the world started before it.

    ``peer``: the argument that names the other rank of a message, to be checked."""
    original: Function = getattr(dist, name)
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        start()
        if peer:
            check_peer(name, peer, (dict(zip(names, args, strict=False)) | kwargs).get(peer))
        with explained(name):
            return original(*args, **kwargs)

    call.__module__ = __name__
    return call


all_gather_object, gather_object = (
    _start_world_first("all_gather_object"),
    _start_world_first("gather_object"),
)
broadcast_object_list, scatter_object_list = (
    _start_world_first("broadcast_object_list"),
    _start_world_first("scatter_object_list"),
)
send_object_list = _start_world_first("send_object_list", "dst")
recv_object_list = _start_world_first("recv_object_list", "src")
monitored_barrier, init_device_mesh = (
    watched(_start_world_first("monitored_barrier")),
    _start_world_first("init_device_mesh"),
)
new_subgroups, new_subgroups_by_enumeration = (
    _start_world_first("new_subgroups"),
    _start_world_first("new_subgroups_by_enumeration"),
)


class P2POp(dist.P2POp):
    """A torch ``P2POp`` that accepts our ``isend`` and ``irecv`` as well as torch's own."""

    def __new__(cls, op: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        start()
        refuse_global("P2POp", [tensor])
        check_peer("P2POp", "peer", args[0] if args else kwargs.get("peer"))
        return super().__new__(cls, _TORCHS.get(op, op), tensor, *args, **kwargs)

    def __init__(self, op: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        super().__init__(_TORCHS.get(op, op), tensor, *args, **kwargs)


@functools.wraps(dist.batch_isend_irecv)
def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(p2p_op_list)
