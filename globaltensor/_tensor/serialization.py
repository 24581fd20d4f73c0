"""Global tensors in pickles: ``torch.save``, ``copy.copy``, queues between processes.

Pickle calls `reduce_ex` and `rebuild_global_tensor`.

Each rank writes its own local tensor, with its spec and its position. Read as another shard it
would give wrong numbers, so that is an error. A tensor that is complete on the rank that writes it
may be read by any rank, of a world of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from ..boxing import box
from ..distributed.world import placeholder, world
from ..errors import PartError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, broadcast
from ..sharding.spec import Spec, StorageSpec
from .global_tensor import GlobalTensor
from .history import COPY
from .set_data import set_requires_grad
from .storage import is_whole

__all__ = ["GATHERED", "SHARD_WRITTEN", "rebuild_global_tensor", "reduce_ex", "remade"]

#: The rank that writes full values (checkpoint.save).
GATHERED: ContextVar[int | None] = ContextVar("globaltensor_gathered", default=None)

#: Called with (rank, shard) of the first tensor of which a rank writes only a shard
#: (checkpoint.save).
SHARD_WRITTEN: ContextVar[Callable[[int, str], None] | None] = ContextVar(
    "globaltensor_shard_written", default=None
)

#: The header of a local tensor in a pickle: see `_header`.
_Header = Mapping[str, Any]


def reduce_ex(self: GlobalTensor, protocol: Any) -> Any:
    """Return the pickle of this rank's local tensor, with its position.

    Inside `checkpoint.save` by one rank it is the full value, an ordinary tensor.
    """
    is_parameter = getattr(self, "_is_param", False)
    if (target := GATHERED.get()) is not None:
        home = Spec.make(self.shape, self.dtype, Placement("cpu", [target]), [broadcast])
        whole = box(self._local.detach(), self._spec, home, why="to_global").requires_grad_(
            self.requires_grad
        )
        return (
            torch.nn.Parameter(whole, self.requires_grad) if is_parameter else whole
        ).__reduce_ex__(protocol)
    if (written := SHARD_WRITTEN.get()) is not None and not is_whole(self._spec, world().rank):
        SHARD_WRITTEN.set(None)
        written(world().rank, _shard(self._spec, world().rank))
    local = self._local.detach()
    held = local if local.is_meta else local.cpu()
    return rebuild_global_tensor, (
        held,
        {**_header(self._spec), "serial": self._serial},
        self.requires_grad,
        is_parameter,
        self._reduce_dtype,
    )


def _shard(spec: Spec, rank: int) -> str:
    """Return a text that is equal on the ranks that hold the same shard of a tensor."""
    where = spec.placement.coordinate(rank)
    if where is None:
        return "nothing"
    return str([c for c, e in zip(where, spec.layout, strict=True) if not e.is_broadcast])


def rebuild_global_tensor(
    local: torch.Tensor,
    header: _Header,
    requires_grad: bool,
    is_parameter: bool,
    reduce_dtype: torch.dtype | None = None,
) -> GlobalTensor:
    """Rebuild a global tensor from what `reduce_ex` has written.

    Raises PartError where that is another shard than this rank needs.

    Files name this function, as ``globaltensor.rebuild_global_tensor``: its name and its arguments
    must not change.
    """
    # A helper process must not start the world: it would join the ranks under the number of the
    # rank that it helps.
    if header["helper"]:
        out = remade(local, _spec(header), False, is_parameter, reduce_dtype)
        out._local.requires_grad_(requires_grad)
        return _restore_serial(out, header)
    spec, this_world = _spec_in_this_world(header), world()
    if this_world.rank not in spec.placement._coordinates:
        local = placeholder(spec)
    elif not local.is_meta:
        local = local.to(this_world.device(spec.placement.type))
    return _restore_serial(remade(local, spec, requires_grad, is_parameter, reduce_dtype), header)


def _restore_serial(out: GlobalTensor, header: _Header) -> GlobalTensor:
    """Give the tensor the serial of the tensor that was written.

    Each rank reads what a call of the same program has written. A file of an older version has no
    serial."""
    out._serial = hash((header.get("serial", 0), COPY))
    return out


rebuild_global_tensor.__module__ = "globaltensor"


def remade(
    local: torch.Tensor,
    spec: Spec,
    requires_grad: bool,
    is_parameter: bool,
    reduce_dtype: torch.dtype | None,
) -> GlobalTensor:
    """Wrap a local tensor that has no history as a leaf."""
    out = GlobalTensor.without_slots(local, spec)
    if is_parameter:
        out._is_param = True  # type: ignore[attr-defined]
    out._reduce_dtype = reduce_dtype
    if requires_grad:
        set_requires_grad(out, True, maybe_alone=True)
    return out


# ------------------------------------------------------------------------------- headers of pickles


def _header(spec: Spec) -> dict[str, Any]:
    """Return the header of a local tensor, in types that any version of this library can read.

    A process that is started with the header is this rank's helper (a data loader's worker). It
    needs what this rank has.
    """
    this_world = world()
    storage_fields = (
        {"shown": _layout(spec.shown), "axes": list(spec.axes)}
        if isinstance(spec, StorageSpec)
        else {}
    )
    who = {
        "rank": this_world.rank,
        "world": this_world.size,
        "helper": get_spawning_popen() is not None,
    }
    return {
        "version": 1,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        **who,
        **_layout(spec),
        **storage_fields,
    }


def _layout(spec: Spec) -> dict[str, Any]:
    entries = [[e.kind, e.dim, e.unit, e.reduce] for e in spec.layout]
    return {"type": spec.placement.type, "ranks": spec.placement.ranks.tolist(), "sbp": entries}


def _spec(header: _Header) -> Spec:
    def made(layout_header: _Header) -> Spec:
        return Spec.make(
            header["shape"],
            header["dtype"],
            Placement(layout_header["type"], layout_header["ranks"]),
            [Sbp(*entry) for entry in layout_header["sbp"]],
        )

    return (
        StorageSpec.of(made(header), made(header["shown"]), header["axes"])
        if "shown" in header
        else made(header)
    )


def _spec_in_this_world(header: _Header) -> Spec:
    """Return the spec of the tensor here.

    Raises PartError where the file does not hold what this rank needs of the tensor.
    """
    spec, writer, this_world = _spec(header), header["rank"], world()
    if is_whole(spec, writer):
        if max(spec.placement.flat) < this_world.size:
            return spec
        everyone = Placement(spec.placement.type, list(range(this_world.size)))
        return Spec.make(spec.shape, spec.dtype, everyone, [broadcast])
    need = _coordinates(spec, this_world.rank)
    if header["world"] != this_world.size or (
        need is not None and need != _coordinates(spec, writer)
    ):
        raise PartError(_refusal_text(header, spec))
    return spec


def _coordinates(spec: Spec, rank: int) -> Any:
    """Return the box, and the summand, that a rank holds; None outside the placement."""
    where = spec.placement.coordinate(rank)
    return (
        None
        if where is None
        else (spec.box(rank), [c for c, e in zip(where, spec.layout, strict=True) if e.is_partial])
    )


def _refusal_text(header: _Header, spec: Spec) -> str:
    this_world, writer, size = world(), header["rank"], header["world"]
    reader = (
        f"rank {this_world.rank} of {this_world.size} needs {_part_text(spec, this_world.rank)}"
    )
    if this_world.size != size:
        reader = f"this is rank {this_world.rank} of a world of {this_world.size}"
    return (
        f"the saved data holds {_part_text(spec, writer)} of a global tensor ({spec!r} on "
        f"{spec.placement!r}), written by rank {writer} of a world of {size}, "
        f"but {reader}. Use one of these: each rank writes and reads a file of its own, named by "
        f"rank; or every rank calls "
        "flow.save(obj, path, global_dst_rank=0) and flow.load(path, global_src_rank=0), whose "
        "file holds full values; or torch.distributed.checkpoint, "
        "which reads into any layout on any number of ranks"
    )


def _part_text(spec: Spec, rank: int) -> str:
    found = _coordinates(spec, rank)
    if found is None:
        return "nothing (it is outside the placement)"
    (offsets, lengths), summands = found
    part = "part [" + ", ".join(f"{o}:{o + n}" for o, n in zip(offsets, lengths, strict=True)) + "]"
    return part + (
        f", number {summands[0] if len(summands) == 1 else summands} of the summands"
        if summands
        else ""
    )
