"""Values in transit between processes: pickled, with their tensors separate in host memory.

`spawn` and `worker` call this module.

Objects that a notebook defines (functions, lambdas, closures, classes of ``__main__``) are sent by
value, with cloudpickle. Ordinary tensors arrive on the CPU. Each rank sends its local tensor of a
global tensor. Once those of all ranks have arrived, they are assembled.
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


class _SerializedTensor(NamedTuple):
    """A tensor in transit.

    A global tensor has a ``spec``, and ``part`` is this rank's local tensor.
    """

    part: torch.Tensor
    spec: Spec | None
    requires_grad: bool
    is_parameter: bool


@dataclass(frozen=True)
class SerializedValue:
    """A value in transit.

    ``body`` is its pickle, in which a tensor is an index into ``tensors``.
    """

    body: bytes
    tensors: tuple[_SerializedTensor, ...]

    @property
    def global_tensors(self) -> list[_SerializedTensor]:
        return [t for t in self.tensors if t.spec is not None]


_wrap: list[Callable[[torch.Tensor, Spec], Any]] = []


def register_wrapper(wrap: Callable[[torch.Tensor, Spec], Any]) -> None:
    """Register the function that makes a global tensor from a local tensor and its Spec.

    The class of global tensors is in a layer above this package.
    """
    _wrap[:] = [wrap]


def _is_global(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor) and bool(x.is_global)  # type: ignore[attr-defined]


def pack(value: object) -> SerializedValue:
    """Serialize a value for sending.

    Raise pickle's own error if something in it cannot be pickled: TypeError, PicklingError,
    AttributeError ...
    """
    # Keyed by id, so the tensors must live until the end.
    tensors: dict[int, tuple[int, torch.Tensor]] = {}

    def index(tensor: object) -> int | None:
        if (
            not isinstance(tensor, torch.Tensor)
            or not (type(tensor) is torch.Tensor or _is_global(tensor))
            or tensor.is_meta
        ):
            return None
        return tensors.setdefault(id(tensor), (len(tensors), tensor))[0]

    body = _pickle_body(value, index)
    return SerializedValue(body, tuple(_serialize_tensor(tensor) for _, tensor in tensors.values()))


def _pickle_body(value: object, index: Any) -> bytes:
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


def _serialize_tensor(tensor: torch.Tensor) -> _SerializedTensor:
    if _is_global(tensor):
        held: Any = tensor
        part, spec = held._materialize()._local, held.spec
        is_parameter = isinstance(tensor, torch.nn.Parameter)
    else:
        part, spec, is_parameter = tensor, None, False
    plain = part.detach().cpu()
    if plain.layout is torch.strided and plain.untyped_storage().nbytes() != plain.nbytes:
        plain = plain.clone()  # of a view, send only its own elements
    return _SerializedTensor(plain, spec, tensor.requires_grad and tensor.is_leaf, is_parameter)


def save(parcel: SerializedValue, path: Path) -> None:
    """Write a serialized value to a file, which appears complete or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(parcel, unfinished)
    unfinished.rename(path)


def load(path: Path) -> SerializedValue:
    """Read a serialized value that this user's own processes have written."""
    parcel: SerializedValue = torch.load(path, map_location="cpu", weights_only=False)
    return parcel


def unpack(parcel: SerializedValue, wholes: Sequence[torch.Tensor] | None = None) -> Any:
    """Return the value.

    ``wholes`` are replacements for its global tensors. Without them the local tensors are used,
    which in a world of one are the full values.
    """
    parts = [t.part for t in parcel.global_tensors] if wholes is None else list(wholes)
    replacements = iter(parts)
    tensors = [
        _restore_tensor(t, t.part if t.spec is None else next(replacements)) for t in parcel.tensors
    ]

    class Unpacker(pickle.Unpickler):
        def persistent_load(self, index: int) -> torch.Tensor:
            return tensors[index]

    return Unpacker(io.BytesIO(parcel.body)).load()


def _restore_tensor(sent: _SerializedTensor, value: torch.Tensor) -> torch.Tensor:
    if sent.is_parameter:
        return torch.nn.Parameter(value, sent.requires_grad)
    return value.detach().requires_grad_(sent.requires_grad) if sent.requires_grad else value


def assembled(parcels: Sequence[SerializedValue]) -> list[Any]:
    """Return the value of each rank, with full tensors in place of its global tensors.

    Ranks that sent the same global tensor share the full one. The k-th global tensor of one rank
    belongs to the k-th of the others. Raise WorldError if they are not the same.
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
                known[key] = _assemble_value(k, tensor.spec, sent)
            wholes.append(known[key])
        out.append(unpack(parcel, wholes))
    return out


def _assemble_value(
    k: int, spec: Spec, sent: Sequence[Sequence[_SerializedTensor]]
) -> torch.Tensor:
    """Return the full value of a global tensor from the local tensors of the ranks.

    It is computed by boxing to broadcast on simulated ranks.
    """
    for rank in spec.placement.flat:
        theirs = sent[rank][k].spec if k < len(sent[rank]) else None
        if theirs is not spec:
            returned = (
                f"{theirs} as number {k} of its global tensors"
                if theirs
                else f"only {len(sent[rank])} global tensor(s)"
            )
            raise WorldError(
                f"one rank returned {spec} as number {k} of its global tensors, but rank {rank}, "
                f"which holds a shard of it, returned {returned}: return the same global tensors "
                "on all ranks, or return x.to_local() for a rank's local tensor"
            )
    cpu_spec = spec.replace(placement=Placement("cpu", spec.placement.ranks))
    parts = {rank: sent[rank][k].part for rank in spec.placement.flat}

    def boxed() -> torch.Tensor:
        x: Any = _wrap[0](parts.get(world().rank, placeholder(cpu_spec)), cpu_spec)
        value: torch.Tensor = x.to_global(sbp=cpu_spec.replicated().layout).to_local()
        return value

    found: torch.Tensor = simulate(len(sent), boxed)[spec.placement.flat[0]]
    return found
