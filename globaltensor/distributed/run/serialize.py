"""Values on their way between processes: pickled, with their tensors beside them in host memory.

What a notebook defines (functions, lambdas, closures, classes of ``__main__``) travels by value,
with cloudpickle. Ordinary tensors arrive on the CPU. Of a global tensor each rank sends its part;
where the parts of all ranks have come, they are put together.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from ...errors import WorldError
from ...sharding.placement import Placement
from ...sharding.spec import Spec
from ..simulate import simulate
from ..world import placeholder, world

__all__ = ["SerializedValue", "assembled", "load", "pack", "register_wrapper", "save", "unpack"]


class _Tensor(NamedTuple):
    """A tensor on its way. ``spec``: of a global one, of which ``part`` is this rank's."""

    part: torch.Tensor
    spec: Spec | None
    requires_grad: bool
    is_parameter: bool


@dataclass(frozen=True)
class SerializedValue:
    """A value on its way: ``body`` is its pickle, in which a tensor is an index into
    ``tensors``."""

    body: bytes
    tensors: tuple[_Tensor, ...]

    @property
    def global_tensors(self) -> list[_Tensor]:
        return [t for t in self.tensors if t.spec is not None]


_wrap: list[Callable[[torch.Tensor, Spec], Any]] = []


def register_wrapper(wrap: Callable[[torch.Tensor, Spec], Any]) -> None:
    """Say how a local tensor and its Spec become a global tensor, whose class stands above this
    package."""
    _wrap[:] = [wrap]


def _is_global(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor) and bool(x.is_global)  # type: ignore[attr-defined]


def pack(value: object) -> SerializedValue:
    """Make a value ready to be sent. Raises what pickle raises where something in it cannot be:
    TypeError, PicklingError, AttributeError ..."""
    kept: dict[
        int, tuple[int, torch.Tensor]
    ] = {}  # the tensors live until the end: their ids are keys

    def index(tensor: object) -> int | None:
        if (
            not isinstance(tensor, torch.Tensor)
            or not (type(tensor) is torch.Tensor or _is_global(tensor))
            or tensor.is_meta
        ):
            return None
        return kept.setdefault(id(tensor), (len(kept), tensor))[0]

    body = _pickled(value, index)
    return SerializedValue(body, tuple(_sent(tensor) for _, tensor in kept.values()))


def _pickled(value: object, index: Any) -> bytes:
    try:
        from cloudpickle import Pickler  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        from pickle import Pickler

    class Packer(Pickler):  # type: ignore[misc, valid-type, unused-ignore]
        def persistent_id(self, item: object) -> int | None:
            found: int | None = index(item)
            return found

    buffer = io.BytesIO()
    Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _sent(tensor: torch.Tensor) -> _Tensor:
    if _is_global(tensor):
        held: Any = tensor
        part, spec, is_parameter = held._local, held.spec, isinstance(tensor, torch.nn.Parameter)
    else:
        part, spec, is_parameter = tensor, None, False
    plain = part.detach().cpu()
    if plain.layout is torch.strided and plain.untyped_storage().nbytes() != plain.nbytes:
        plain = plain.clone()  # of a view only what it shows
    return _Tensor(plain, spec, tensor.requires_grad and tensor.is_leaf, is_parameter)


def save(parcel: SerializedValue, path: Path) -> None:
    """Write a parcel; the file appears whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(parcel, unfinished)
    unfinished.rename(path)


def load(path: Path) -> SerializedValue:
    """Read a parcel that this user's own processes have written."""
    parcel: SerializedValue = torch.load(path, map_location="cpu", weights_only=False)
    return parcel


def unpack(parcel: SerializedValue, wholes: Sequence[torch.Tensor] | None = None) -> Any:
    """The value. ``wholes``: what the global tensors in it have become; without it they are those
    of a world of one, whose part is the whole."""
    parts = [t.part for t in parcel.global_tensors] if wholes is None else list(wholes)
    these = iter(parts)
    tensors = [_received(t, t.part if t.spec is None else next(these)) for t in parcel.tensors]

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, index: int) -> torch.Tensor:
            return tensors[index]

    return Unpacker(io.BytesIO(parcel.body)).load()


def _received(sent: _Tensor, value: torch.Tensor) -> torch.Tensor:
    if sent.is_parameter:
        return torch.nn.Parameter(value, sent.requires_grad)
    return value.detach().requires_grad_(sent.requires_grad) if sent.requires_grad else value


def assembled(parcels: Sequence[SerializedValue]) -> list[Any]:
    """The value that each rank has sent, global tensors as ordinary ones with the whole value,
    which the ranks that sent the same one share.

    The k-th global tensor of one rank belongs to the k-th of the others. Raises WorldError where
    they are not the same.
    """
    sent = [parcel.global_tensors for parcel in parcels]
    known: dict[tuple[int, Spec], torch.Tensor] = {}
    out = []
    for rank, parcel in enumerate(parcels):
        wholes = []
        for k, tensor in enumerate(sent[rank]):
            assert tensor.spec is not None
            key = (k, tensor.spec)
            if key not in known:
                known[key] = _whole(k, tensor.spec, sent)
            wholes.append(known[key])
        out.append(unpack(parcel, wholes))
    return out


def _whole(k: int, spec: Spec, sent: Sequence[Sequence[_Tensor]]) -> torch.Tensor:
    """What the parts of the ranks of ``spec`` make, found by boxing them to broadcast on simulated
    ranks."""
    for rank in spec.placement.flat:
        theirs = sent[rank][k].spec if k < len(sent[rank]) else None
        if theirs is not spec:
            told = (
                f"as number {k} of its global tensors {theirs}"
                if theirs
                else f"only {len(sent[rank])} global tensor(s)"
            )
            raise WorldError(
                f"some rank returned as number {k} of its global tensors {spec}, but rank {rank}, "
                f"which holds a part of it, returned {told}: "
                "return the same global tensors on all ranks, or x.to_local() for a rank's own part"
            )
    here = spec.replace(placement=Placement("cpu", spec.placement.ranks))
    parts = {rank: sent[rank][k].part for rank in spec.placement.flat}

    def boxed() -> torch.Tensor:
        x: Any = _wrap[0](parts.get(world().rank, placeholder(here)), here)
        value: torch.Tensor = x.to_global(sbp=here.replicated().layout).to_local()
        return value

    found: torch.Tensor = simulate(len(sent), boxed)[spec.placement.flat[0]]
    return found
