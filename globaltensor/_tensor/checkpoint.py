"""Global tensors in files: `save` and `load` of full values by one rank.

`torch.distributed.checkpoint` writes each shard once and reads it into any layout, by the protocol
here. `torch.load` may read the classes that global tensors are made of.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.atomic_file import Replacement
from .._base.patches import patch
from .._base.pytree import replaced, tensors_in
from .._base.user_code import user_line
from ..distributed.network import machine_name
from ..distributed.world import placeholder, world
from ..errors import DivergenceError, PartError, SbpError, WorldError
from ..sharding.placement import Placement
from ..sharding.sbp import Sbp, broadcast
from ..sharding.spec import Spec, _rebuild_spec, _rebuild_storage_spec
from .global_tensor import GlobalTensor
from .pending_tensor import local_of
from .serialization import GATHERED, SHARD_WRITTEN, rebuild_global_tensor
from .storage import is_whole

__all__ = ["load", "save"]

# ------------------------------------------------------------------------- full values, by one rank


def save(
    obj: Any,
    f: Any,
    *args: Any,
    global_dst_rank: int | None = None,
    save_as_external_data: bool = False,
    **options: Any,
) -> None:
    """Save an object as ``torch.save`` does, with full values where ``global_dst_rank`` is given.

    With ``global_dst_rank`` every rank calls this function, and that rank alone writes. The file
    holds full values, which plain PyTorch reads too.

    Without it, each rank that calls writes its own local tensor of each global tensor. The file is
    for the same rank of a world of the same size. Name files by rank then: a rank that would
    replace another rank's file by other shards raises WorldError.

    A file at a path is replaced when the new one is complete: until then the old one stays.
    ``save_as_external_data`` is OneFlow's and has no effect: torch's files can be mapped as they
    are. Raises WorldError on every rank where writing fails.
    """
    if global_dst_rank is None:
        if not isinstance(f, (str, os.PathLike)):
            torch.save(obj, f, *args, **options)
            return
        sink, token = _Sink(f), SHARD_WRITTEN.set(functools.partial(_claim, f))
        try:
            sink.take(obj, *args, **options)
        finally:
            SHARD_WRITTEN.reset(token)
        if sink.error is not None:
            raise sink.error from None
        return
    this_world = world()
    _check_same_save(obj, global_dst_rank, options.get("pickle_module", pickle))
    _check_rank(this_world.size, "global_dst_rank", global_dst_rank)
    token, sink = (
        GATHERED.set(global_dst_rank),
        _Sink(f if this_world.rank == global_dst_rank else None),
    )
    try:
        # Ranks that write nothing still go through the object: the tensors that are on them are
        # requested in one order.
        sink.take(obj, *args, **options)
    finally:
        GATHERED.reset(token)
    errors = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        "" if sink.error is None else str(sink.error), "save"
    )
    if any(errors):
        raise WorldError(
            f"save: rank {global_dst_rank} could not write the file: {next(filter(None, errors))}"
        )


def _claim(path: str | os.PathLike[str], rank: int, shard: str) -> None:
    """Raise WorldError if a rank of this machine has written other shards to a path.

    The path is recorded in the store through which the ranks have met. Other ranks take no part: a
    rank may save alone.
    """
    store = getattr(world(), "store", None)
    if store is None:
        return
    try:
        key = f"globaltensor/shards/{machine_name()}{os.path.realpath(path)}"
        first = store.compare_set(key, "", f"{rank} {shard}").decode()
    except (RuntimeError, NotImplementedError):  # the rank that served the store has ended
        return
    other, _, other_shard = first.partition(" ")
    if shard == other_shard or other == str(rank):  # its own file, now of another layout
        return
    raise WorldError(
        f"{user_line()}\nsave: rank {rank} would replace what rank {other} has written to "
        f"{os.fspath(path)!r}: without global_dst_rank each rank writes its own shards, and "
        f"these ranks hold different ones. Name the files by rank, with flow.env.get_rank() in "
        f"the path. Or call flow.save(obj, path, global_dst_rank=0) on every rank: rank 0 then "
        f"writes the full values, which any layout can load"
    )


def _check_same_save(obj: Any, target: Any, pickle_module: Any) -> None:
    """Raise DivergenceError unless all ranks are to save the same global tensors to one rank.

    The tensors are compared by order, name, layout and identity. Collective among all ranks.
    """
    this_world = world()
    if this_world.size == 1:
        return
    try:
        own_tensors = _tensors_to_save(obj, pickle_module)
    except Exception as error:  # torch.save raises it, if it is the same on every rank
        own_tensors = [f"{type(error).__name__}: {error}"]
    everyone = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        (repr(target), own_tensors), "save"
    )
    first_target, first_tensors = everyone[0]
    for rank, (peer_target, peer_tensors) in enumerate(everyone):
        if peer_target != first_target:
            raise DivergenceError(
                f"{user_line()}\nsave: the ranks pass different global_dst_rank: {first_target} on "
                f"rank 0, {peer_target} on rank {rank}. One rank writes the file: pass the same "
                f"number on every rank"
            )
        if peer_tensors != first_tensors:
            at = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(first_tensors, peer_tensors, strict=False))
                    if a != b
                ),
                min(len(first_tensors), len(peer_tensors)),
            )
            rows = "".join(
                f"  rank {r}: {each[at] if at < len(each) else 'no further tensor'}\n"
                for r, each in ((0, first_tensors), (rank, peer_tensors))
            )
            raise DivergenceError(
                f"{user_line()}\nsave: the ranks pass objects with other global tensors, or with "
                f"the same in another order. They differ from tensor {at} on:\n{rows}"
                "Pass the same object on every rank; dicts must have their keys in the same order"
            )


def _tensors_to_save(obj: Any, pickle_module: Any) -> list[str]:
    """Return a text for each global tensor in an object, in the order in which pickle meets them.

    Nothing is written, and no tensor is read.
    """
    places: dict[int, str] = {}
    numbers: dict[int, int] = {}
    rows: list[str] = []
    alive: list[Any] = []  # so that no other object gets the id of one that was met

    class Lister(pickle_module.Pickler):  # type: ignore[misc, name-defined]
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, GlobalTensor):
                alive.append(value)
                same = numbers.setdefault(id(value), len(rows))
                again = "" if same == len(rows) else f", the same as tensor {same}"
                rows.append(f"{places.get(id(value), 'a tensor')}: {value._spec!r}{again}")
                return "global tensor"
            if isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
                return "plain tensor"
            if isinstance(value, (dict, list, tuple)):
                alive.append(value)
                prefix = places.get(id(value), "")
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in items:
                    if isinstance(item, (torch.Tensor, dict, list, tuple)):
                        places.setdefault(id(item), f"{prefix}[{key!r}]")
            return None

    Lister(io.BytesIO(), 2).dump(obj)
    return rows


class _Sink:
    """A file that one rank writes to, while the others write nothing.

    A path gets its file when that is complete. An error is raised only at the end: the other ranks
    are going through the object too.
    """

    def __init__(self, f: Any) -> None:
        self.error: OSError | None = None
        self._new: Replacement | None = None
        self._file: Any = f
        if isinstance(f, (str, os.PathLike)):
            self._try(self._open, f)

    def _open(self, path: str | os.PathLike[str]) -> None:
        self._file = None
        self._new = Replacement(path)
        self._file = self._new.file

    def take(self, obj: Any, *args: Any, **options: Any) -> None:
        """Write an object completely."""
        try:
            torch.save(obj, self, *args, **options)  # type: ignore[arg-type]
        except BaseException as error:
            self.error = self.error or OSError(str(error))
            raise
        finally:
            if self._new is not None:
                self._try(self._new.commit)
                self._new.abandon()

    def write(self, data: Any) -> int:
        if self._file is not None:
            self._try(self._file.write, data)
        return len(data)

    def flush(self) -> None:
        if self._file is not None:
            self._try(self._file.flush)

    def _try(self, act: Any, *args: Any) -> None:
        if self.error is None:
            try:
                act(*args)
            except OSError as error:
                self.error = error


def load(
    f: Any, map_location: Any = None, *args: Any, global_src_rank: int | None = None, **options: Any
) -> Any:
    """Load an object as ``torch.load`` does, read by one rank where ``global_src_rank`` is given.

    With ``global_src_rank`` every rank calls this function, and that rank alone reads. Each tensor
    becomes a global one that is complete on its CPU. ``load_state_dict`` or ``to_global`` moves it
    to any layout from there.

    ``map_location`` may then be a placement, on which the tensors are broadcast, or the name of a
    device type. Raises WorldError on every rank where reading fails.
    """
    if global_src_rank is None:
        return torch.load(f, map_location, *args, **options)
    this_world = world()
    _check_rank(this_world.size, "global_src_rank", global_src_rank)
    own_header: Any = None
    read_tensors: list[torch.Tensor] = []
    if this_world.rank == global_src_rank:
        try:
            read = torch.load(f, "cpu", *args, **options)
            read_tensors = [_value(t) for t in tensors_in(read, [])]
            own_header = (
                "",
                replaced(read, iter([torch.empty(0)] * len(read_tensors))),
                [(t.shape, t.dtype) for t in read_tensors],
            )
        except Exception as error:
            own_header = f"{type(error).__name__}: {error}", None, []
    everyone = this_world.comm(tuple(range(this_world.size))).all_gather_object(
        (global_src_rank, own_header), "load"
    )
    for rank, (source, _) in enumerate(everyone):
        if source != everyone[0][0]:
            raise DivergenceError(
                f"{user_line()}\nload: the ranks pass different global_src_rank: {everyone[0][0]} "
                f"on rank 0, {source} on rank {rank}. One rank reads the file: pass the same "
                f"number on every rank"
            )
    said, shell, metas = everyone[global_src_rank][1]
    if said:
        raise WorldError(f"load: rank {global_src_rank} could not read the file: {said}")
    specs = [
        Spec.make(shape, dtype, Placement("cpu", [global_src_rank]), [broadcast])
        for shape, dtype in metas
    ]
    parts: Any = read_tensors if this_world.rank == global_src_rank else map(placeholder, specs)
    whole: list[Any] = [
        GlobalTensor.wrap(t.detach(), spec) for t, spec in zip(parts, specs, strict=True)
    ]
    if isinstance(map_location, Placement):
        whole = [
            t.to_global(placement=map_location, sbp=[broadcast] * map_location.axes) for t in whole
        ]
    elif map_location is not None:
        whole = [t.to(map_location) for t in whole]
    return replaced(shell, iter(whole))


def _value(t: torch.Tensor) -> torch.Tensor:
    """Return the value of a tensor from a file.

    The tensor may be a global one whose writer had all of it. Raises PartError for a shard.
    """
    if not isinstance(t, GlobalTensor):
        return t
    if not is_whole(t._spec, world().rank):
        raise PartError(
            f"the file holds one rank's local tensor of a global tensor ({t._spec!r}), not its "
            f"value: write it with flow.save(obj, path, global_dst_rank=0) on every rank, "
            "or read it with flow.load(path) on the rank that wrote it"
        )
    return t._local


def _check_rank(size: int, name: str, rank: Any) -> None:
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise WorldError(f"{name}={rank!r}: it must be a rank of this world, 0 to {size - 1}")


# ------------------------------------------------------------------------------------------- shards


def _local_box(x: GlobalTensor) -> tuple[torch.Size, torch.Size] | None:
    """Return (offsets, lengths) of this rank's local tensor in the global one.

    Return None where it holds nothing: another rank's local tensor may begin at the same place.
    Raises SbpError for a partial tensor.
    """
    spec = x._spec
    if any(e.is_partial for e in spec.layout):
        whole = [broadcast if e.is_partial else e for e in x.sbp]
        raise SbpError(
            f"a checkpoint cannot hold a partial tensor ({spec!r}), because no rank has a shard of "
            f"its value: "
            f"put x.to_global(sbp={whole!r}) in the state dict"
        )
    rank = world().rank
    if spec.placement.coordinate(rank) is None:
        return None
    offsets, lengths = spec.box(rank)
    return (
        (torch.Size(offsets), torch.Size(lengths)) if 0 not in lengths or not spec.numel else None
    )


def write_items(self: GlobalTensor, name: str, value: Any) -> list[Any]:
    """Return what this rank could write. One rank writes shards that several ranks hold."""
    from torch.distributed.checkpoint import metadata, planner

    held = _local_box(self)
    if held is None:
        return []
    data = planner.TensorWriteData(
        chunk=metadata.ChunkStorageMetadata(*held),
        properties=metadata.TensorProperties.create_from_tensor(self._stored),
        size=self._spec.shape,
    )
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(name, held[0]),
            type=planner.WriteItemType.SHARD,
            tensor_data=data,
        )
    ]


def chunk_list(self: GlobalTensor) -> list[Any]:
    """Return the shards that this rank is to read."""
    from torch.distributed.checkpoint import metadata

    held = _local_box(self)
    return [] if held is None else [metadata.ChunkStorageMetadata(*held)]


def tensor_shard(self: GlobalTensor, index: Any) -> torch.Tensor:
    """Return the memory that is written, or read into."""
    return local_of(self).detach()  # type: ignore[no-any-return]


def _check_all_shards(where: str, shards: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise PartError if the shards in a checkpoint do not cover one of the tensors.

    ``shards``: torch's metadata of each value in the checkpoint. ``where``: the function, for the
    error.
    """
    for name in names:
        sizes = getattr(shards.get(name), "size", None)
        if sizes is None:
            continue
        held = sum(math.prod(chunk.sizes) for chunk in shards[name].chunks)
        if held < math.prod(sizes):
            raise PartError(
                f"{where}: the checkpoint holds {held} of the {math.prod(sizes)} elements of "
                f"{name}. Every rank has shards of it, so all ranks must save together, with one "
                f"call of torch.distributed.checkpoint.save on each and without no_dist=True. To "
                f"write the full values by one rank, call flow.save(obj, path, global_dst_rank=0) "
                f"on every rank"
            )


def _check_same_names(plans: Sequence[Any]) -> None:
    """Raise PartError if some ranks save shards of a tensor, and those of others are missing.

    ``plans``: torch's plan of each rank for what it writes, in the order of ranks.
    """
    from torch.distributed.checkpoint.planner import WriteItemType

    held: dict[str, dict[int, int]] = {}  # name -> elements by rank
    numels: dict[str, int] = {}
    if not all(getattr(plan, "usable", True) for plan in plans):
        return  # torch keeps the plans of an earlier save for ranks that pass the same as there
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type is WriteItemType.SHARD:
                name, data = item.index.fqn, item.tensor_data
                numels[name] = math.prod(data.size)
                of = held.setdefault(name, {})
                of[rank] = of.get(rank, 0) + math.prod(data.chunk.sizes)
    for name, of in held.items():
        missing = [rank for rank in range(len(plans)) if rank not in of]
        if missing and sum(of.values()) < numels[name]:
            raise PartError(
                f"torch.distributed.checkpoint.save: ranks {list(of)} save shards of {name}, and "
                f"ranks {missing} do not, but {sum(of.values())} of its {numels[name]} elements "
                f"are not all. Every rank must pass a state with the same names: the state_dict of "
                f"the same modules and optimizers"
            )


def _wrap_save_plan(create: Any) -> Any:
    def create_global_plan(self: Any, plans: Any) -> Any:
        _check_same_names(plans)
        made = create(self, plans)
        shards = made[1].state_dict_metadata
        _check_all_shards("torch.distributed.checkpoint.save", shards, shards)
        return made

    return create_global_plan


def _wrap_load_plan(create: Any) -> Any:
    def create_plan(state_dict: Any, metadata: Any, *args: Any, **options: Any) -> Any:
        _check_all_shards(
            "torch.distributed.checkpoint.load",
            metadata.state_dict_metadata,
            [name for name, value in state_dict.items() if isinstance(value, torch.Tensor)],
        )
        return create(state_dict, metadata, *args, **options)

    return create_plan


def _full_value(value: Any, ranks: tuple[int, ...]) -> Any:
    """Return the full value on these ranks, or on all. Others get a tensor without elements."""
    if not isinstance(value, GlobalTensor):
        return value
    where = Placement(value.placement.type, list(ranks) or list(range(world().size)))
    return value.detach().to_global(placement=where, sbp=[broadcast]).to_local()


def _copy_to_cpu(copy: Any, x: Any) -> Any:
    """Return a copy on the CPU. A global tensor is copied to the CPUs of the same ranks."""
    if not isinstance(x, GlobalTensor):
        return copy(x)
    spec = x._spec
    return GlobalTensor.wrap(
        copy(local_of(x).detach()),
        spec.replace(placement=spec.placement.with_type("cpu")),
    )


def install() -> None:
    """Install the protocol of torch's checkpoints for sharded tensors.

    Also allow the functions that `torch.load` may call in a file of weights.
    """
    torch_private.wrap_gathered_states(_full_value)
    torch_private.wrap_staged_states(_copy_to_cpu)
    planners = "torch.distributed.checkpoint.default_planner"
    patch(f"{planners}:DefaultSavePlanner.create_global_plan", _wrap_save_plan)
    patch(f"{planners}:create_default_local_load_plan", _wrap_load_plan)
    GlobalTensor.__create_write_items__ = write_items  # type: ignore[attr-defined]
    GlobalTensor.__create_chunk_list__ = chunk_list  # type: ignore[attr-defined]
    GlobalTensor.__get_tensor_shard__ = tensor_shard  # type: ignore[attr-defined]
    torch.serialization.add_safe_globals(
        [rebuild_global_tensor, _rebuild_spec, _rebuild_storage_spec, Placement, Sbp]
    )


install()
