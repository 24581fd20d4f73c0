"""Plain tensors among global ones: they count as broadcast, the same value on every rank.

Dispatch calls these functions. The ranks compare their values (`check_replicated`).
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .._base import torch_private
from .._base.refusals import refuse_transforms
from .._base.user_code import user_frame
from ..boxing import box
from ..distributed.communicator import as_bytes, flatten
from ..distributed.divergence import PARAMETER, PlainUse, plain_text
from ..distributed.world import placeholder, world
from ..distributed.world_base import World, on_forget
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from ..sharding.tensor_kinds import BARE, TensorKind, described, kind_of, refuse
from .global_tensor import GlobalTensor
from .gradients.reducer import observe_gradients

__all__ = [
    "check_replicated",
    "compare_replicated",
    "comparison_due",
    "content_digest",
    "operand_spec",
    "promote_plain_tensor",
    "record_replicated",
    "replicated_grad",
]

# Number of uses of plain tensors for one purpose that are always checked.
_ALWAYS_CHECKED = 16
# Maximum number of purposes that are counted.
_MAX_PLACES = 1 << 14
# Number of a tensor's elements that an error shows.
_SHOWN = 3
# Size in bytes of the chunks that are summed for the digest of a recorded tensor. The digest of a
# tensor of one chunk covers all of its values by itself.
_CHUNK = 1 << 15
# The most bytes that one such digest reads.
_MAX_READ = 1 << 23
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class Comparisons:
    """A count of the uses of plain tensors at one place, which says when ranks exchange digests.

    They do so at the first 16 uses, then at intervals that grow by an eighth.
    """

    __slots__ = ("count", "next")

    def __init__(self) -> None:
        self.count, self.next = 0, 1

    def due(self) -> bool:
        """Count a use, and return True if the ranks compare at this one."""
        self.count += 1
        if self.count < self.next:
            return False
        self.next = self.count + 1 + (self.count // 8 if self.count > _ALWAYS_CHECKED else 0)
        return True


class PlainPlaces(dict[Any, Comparisons]):
    """A table of the places where the program uses plain tensors with global ones."""


@on_forget
def _forget_places(of: World) -> None:
    if (found := of.existing_state(PlainPlaces)) is not None:
        found.clear()


class _PlainBorder(torch.autograd.Function):
    """A step between a plain tensor and a broadcast one. Each rank has the same full value."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
        ctx.spec = spec
        return tensor.view_as(tensor)


class _ReplicatedInput(_PlainBorder):
    """A plain tensor that enters an op as broadcast.

    Every rank's copy gets the full gradient, not its own share.
    """

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = box(_dense(grads[0]), ctx.spec.dual(), ctx.spec, why="gradient of a plain tensor")
        if grad.requires_grad and torch.is_grad_enabled():  # it may be differentiated again
            grad = _ReplicatedOutput.apply(grad, ctx.spec)
        return grad, None


class _ReplicatedOutput(_PlainBorder):
    """A broadcast tensor that leaves as a plain one.

    Its gradient is plain too: every rank has all of it, and the gradient of one rank counts.
    """

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = _dense(grads[0])
        if grad.requires_grad and torch.is_grad_enabled():
            grad = _ReplicatedInput.apply(grad, ctx.spec)
        return box(grad, ctx.spec, ctx.spec.dual(), why="gradient of a plain gradient"), None


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()


def operand_spec(tensor: torch.Tensor, placement: Placement, purpose: str) -> Spec:
    """Return the spec of a plain tensor among global ones: broadcast.

    Raises KindError for a tensor that functions cannot accept together with local tensors of global
    ones. If only this rank has such a tensor, the others get the error when they compare
    (`check_replicated`). So this rank compares before it raises.
    """
    kind = described(tensor, placement)
    if isinstance(kind, TensorKind) and not kind.operand:
        this_world, ranks = world(), placement.flat
        if this_world.compares and len(ranks) > 1 and this_world.rank in ranks:
            this_world.comm(tuple(sorted(ranks))).compare_plain(
                _digest_of(kind.text), kind.text, purpose, kind
            )
        refuse(purpose, dict.fromkeys(ranks, kind))
    return Spec.make(tensor.shape, tensor.dtype, placement, [broadcast] * placement.axes)


def promote_plain_tensor(
    tensor: torch.Tensor, spec: Spec, purpose: str, checked: bool = True
) -> torch.Tensor:
    """Return the local tensor of a broadcast global one from a plain tensor among global ones.

    ``purpose`` names its use in errors. Raises DivergenceError or KindError, on every rank, if
    ranks hold different values or kinds (`check_replicated`). Raises KernelError inside a transform
    of torch.func. Not ``checked``: the values do not matter.
    """
    refuse_transforms()
    graph, this_world = tensor.requires_grad and torch.is_grad_enabled(), world()
    if spec.placement.coordinate(this_world.rank) is None:
        nothing = placeholder(spec.replace(dtype=tensor.dtype)).requires_grad_(graph)
        if graph:
            observe_gradients(nothing)
        return nothing
    if checked and len(spec.placement.flat) > 1 and spec.placement.type != "meta":
        if this_world.compares:
            check_replicated(tensor, spec.placement, purpose)
        elif this_world.dry:
            this_world.note_replicated(tensor, spec.placement.flat, purpose)
    if tensor.device.type != spec.placement.type:
        tensor = tensor.to(this_world.device(spec.placement.type))
    if graph:
        entered = _ReplicatedInput.apply(tensor, spec)
        observe_gradients(entered)
        return entered  # type: ignore[no-any-return]
    return tensor


def replicated_grad(tensor: torch.Tensor, placement: Placement, purpose: str) -> GlobalTensor:
    """Return the broadcast global tensor of a plain one that a program gives as a gradient.

    A sparse one becomes dense. Collective. Raises DivergenceError or KindError, on every rank, as
    `promote_plain_tensor`.
    """
    spec = operand_spec(tensor, placement, purpose)
    tensor = _dense(tensor)
    return GlobalTensor.wrap(promote_plain_tensor(tensor, spec, purpose), spec)


def check_replicated(
    tensor: torch.Tensor, ranks: Placement | tuple[int, ...], purpose: str, place: Any = None
) -> None:
    """Compare a plain tensor with those of the other ranks.

    The ranks exchange digests at the first 16 uses of such tensors for one purpose, then at
    intervals that grow by an eighth (in guard mode, at all). The other uses are part of the record
    of what ranks run (`record_replicated`), and compared with it. ``place``: the key to count by,
    with the ranks. None: the purpose, and the tensor's dtype and number of dims. The line of the
    program is no part of it, because one rank may run the same call from another line (to time or
    log it). The comparison is collective: all of ``ranks`` call it. Raises DivergenceError, on
    every rank. The error names the line, the ranks with their values, and how to express what is
    meant.
    """
    if place is None:
        place = purpose, tensor.dtype, tensor.dim()
    # Ranks of several placements reach one place at different frequencies.
    if comparison_due((place, ranks)):
        compare_replicated(tensor, ranks.flat if isinstance(ranks, Placement) else ranks, purpose)
    else:
        record_replicated(tensor, ranks, purpose)


def record_replicated(
    tensor: torch.Tensor, ranks: Placement | tuple[int, ...], purpose: str
) -> None:
    """Add a digest of a plain tensor to the record of what ranks run, which collectives compare.

    Ranks with other values diverge here, and get a DivergenceError at their next collective that
    compares. Only ordinary tensors in CPU memory are recorded: elsewhere reading the values would
    make the program wait.
    """
    if (
        tensor.device.type != "cpu"
        or kind_of(tensor) is not None
        or (type(tensor) not in _ORDINARY and torch_private.is_fake(tensor))
    ):
        return
    this_world = world()
    history = (
        this_world.history((ranks,))
        if isinstance(ranks, Placement)
        else this_world.history_of(tuple(sorted(ranks)))
    )
    if not history.records:
        return
    code, first = _quick_digest(tensor, history.plain_count)
    frame = user_frame()
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
    history.record_plain(
        PlainUse(
            history.serial,
            code,
            purpose,
            tensor.dtype,
            tensor.shape,
            first,
            file,
            line,
            isinstance(tensor, torch.nn.Parameter),
        )
    )


def _quick_digest(tensor: torch.Tensor, turn: int) -> tuple[int, bytes]:
    """Return a digest of a tensor's values and their order, and its first elements.

    Both are the same on every rank that holds the same values, in any memory layout. A checksum of
    32 KiB takes 15 us. Of a larger tensor, chunks of 32 KiB are summed as integers, by chunk and
    by position in the chunk, which takes a third of the time, and the checksum is one of the sums.
    Of a tensor of more than 8 MiB only some rows are read, others at each ``turn``.
    """
    size, element = tensor.nbytes, tensor.element_size()
    if size <= _CHUNK and type(tensor) in _ORDINARY and tensor.is_contiguous():
        special = tensor.is_conj() or tensor.is_neg()
        if not special and (address := tensor.data_ptr()):
            contents = ctypes.string_at(address, size)  # a quarter of the time of numpy()
            return zlib.crc32(contents), contents[: _SHOWN * element]
    with torch.no_grad(), torch_private.unobserved():
        tensor = _in_memory(tensor)
        if size > _MAX_READ:
            first = tensor[(0,) * (tensor.dim() - 1)][:_SHOWN]
            flat = flatten(_some_rows(tensor, -(-size // _MAX_READ), turn))
        else:
            flat = flatten(tensor)
            first = flat[:_SHOWN]
        if not flat.numel():
            return 0, b""
        memory, shown = as_bytes(flat).numpy(), as_bytes(flatten(first)).numpy().tobytes()
    whole = memory.size // _CHUNK * _CHUNK
    code = zlib.crc32(memory[whole:])
    if whole:
        chunks = memory[:whole].view(np.int64).reshape(-1, _CHUNK // 8)
        code = zlib.crc32(chunks.sum(0), zlib.crc32(chunks.sum(1), code))
    return code, shown


def _some_rows(tensor: torch.Tensor, blocks: int, turn: int) -> torch.Tensor:
    """Return one of ``blocks`` blocks of a tensor, another one at each turn.

    They are blocks of its first dim that has as many slices.
    """
    dim = next((d for d, n in enumerate(tensor.shape) if n >= blocks), None)
    if dim is None:
        return tensor
    length = -(-tensor.shape[dim] // blocks)
    start = min(turn % blocks * length, tensor.shape[dim] - length)
    return tensor.narrow(dim, start, length)


def comparison_due(place: Any) -> bool:
    """Count a use of plain tensors at a place, and return True if the ranks compare at this one.

    ``place`` is a hashable key. In guard mode (`check_ranks`) they compare at each.
    """
    this_world = world()
    places = this_world.state(PlainPlaces)
    known = places.get(place)
    if known is None:
        if len(places) >= _MAX_PLACES:
            places.clear()
        known = places[place] = Comparisons()
    return known.due() or this_world.pace is not None


def compare_replicated(tensor: torch.Tensor, ranks: Sequence[int], purpose: str) -> None:
    """Compare a plain tensor with those of the other ranks now. See `check_replicated`."""
    kind = kind_of(tensor) or (BARE if tensor.is_meta else None)
    if kind is None and torch_private.is_fake(tensor):
        return
    with torch.no_grad(), torch_private.unobserved():
        digest, text = (
            _digest_and_text(_in_memory(tensor))
            if kind is None
            else _digest_and_text_of_kind(tensor, kind)
        )
    world().comm(tuple(sorted(ranks))).compare_plain(digest, text, purpose, kind)


def _digest_and_text_of_kind(tensor: torch.Tensor, kind: TensorKind) -> tuple[torch.Tensor, str]:
    """Return digest and text of a tensor of a kind without values in memory of its own.

    They are made of the tensor's kind and, if it is sparse, of its contents.
    """
    parts: Sequence[torch.Tensor] = ()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        parts = tensor.indices(), tensor.values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    text = (
        f"{kind.text} of shape {list(tensor.shape)}, digest "
        f"{b''.join(map(content_digest, parts)).hex()}"
        if parts
        else kind.text
    )
    return _digest_of(text), text


def _digest_of(text: str) -> torch.Tensor:
    return _as_number(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _as_number(code: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(code), dtype=torch.int64)


def _digest_and_text(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return a digest [1] of a tensor's shape, dtype and values, and a text that shows them."""
    code = content_digest(tensor)
    text = plain_text(tensor.dtype, tensor.shape, flatten(tensor)[:_SHOWN].tolist(), code.hex())
    if isinstance(tensor, torch.nn.Parameter):
        text = f"{PARAMETER} {text}"
    return _as_number(code), text


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory: zeros of forward derivatives may have none."""
    return torch.zeros_like(tensor) if torch_private.is_zero_tensor(tensor) else tensor


def content_digest(tensor: torch.Tensor) -> bytes:
    """Return 8 bytes that are equal for equal bytes, shapes and dtypes.

    A NaN equals itself, and 0.0 does not equal -0.0.
    """
    flat = flatten(tensor).cpu()
    code = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=8)
    if flat.numel():
        code.update(as_bytes(flat).numpy())
    return code.digest()
