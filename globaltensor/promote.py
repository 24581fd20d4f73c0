"""A plain tensor among global ones counts as broadcast: the same value on every rank. That is checked where it happens first."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from . import _torch
from .boxing import box
from .distributed.comm import as_bytes, flatten
from .distributed.world import placeholder, world
from .placement import Placement
from .reducer import watch
from .spec import Spec
from .user_code import caller_frame
from .wrapper import refuse_transforms

__all__ = ["check_replicated", "content_digest", "promote"]

_ALWAYS_CHECKED = 16  # uses of a plain tensor at one place
_MAX_PLACES = 1 << 14  # in the program, that are counted
_SHOWN = 3  # numbers of a tensor that an error shows


class _ReplicatedInput(torch.autograd.Function):
    """A plain tensor that enters an op as broadcast: every rank's copy gets the whole gradient, not its own share."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
        ctx.spec = spec
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0] if grads[0].layout is torch.strided else grads[0].to_dense()
        return box(grad, ctx.spec.dual(), ctx.spec, why="gradient of a plain tensor"), None


def promote(tensor: torch.Tensor, spec: Spec, purpose: str, checked: bool = True) -> torch.Tensor:
    """Return the local tensor of a broadcast global one from a plain tensor among global ones. ``purpose`` says what it is used for, in errors.

    Raises DivergenceError, on every rank, if ranks hold different values (`check_replicated`), and KernelError inside a transform of torch.func. Not
    ``checked``: where the values do not matter.
    """
    refuse_transforms()
    graph, here = tensor.requires_grad and torch.is_grad_enabled(), world()
    if spec.placement.coordinate(here.rank) is None:
        nothing = placeholder(spec.replace(dtype=tensor.dtype)).requires_grad_(graph)
        if graph:
            watch(nothing)
        return nothing
    if checked and here.compares and len(spec.placement.flat) > 1:
        check_replicated(tensor, spec.placement, purpose)
    if tensor.device.type != spec.placement.type:
        tensor = tensor.to(here.device(spec.placement.type))
    if graph:
        entered = _ReplicatedInput.apply(tensor, spec)
        watch(entered)
        return entered  # type: ignore[no-any-return]
    return tensor


def check_replicated(tensor: torch.Tensor, ranks: Placement | tuple[int, ...], purpose: str, place: Any = None) -> None:
    """Compare a plain tensor with those of the other ranks: the first 16 times that the program comes to this place, then at intervals that grow by an eighth.

    ``place``: what to count by, beside the ranks; None: the line of code that has called this library. Collective at these times; all of ``ranks`` call it.
    Raises DivergenceError, on every rank, naming the line, who holds what, and how to say what is meant.
    """
    if place is None:
        frame = caller_frame()
        place = (frame.f_code, frame.f_lasti, purpose) if frame is not None else purpose
    here, place = world(), (place, ranks)  # ranks of several placements come to one place not equally often
    known = here.plain_places.get(place)
    if known is None:
        if len(here.plain_places) >= _MAX_PLACES:
            here.plain_places.clear()
        known = here.plain_places[place] = [0, 1]
    known[0] += 1
    count, due = known
    if count < due:
        return
    known[1] = count + 1 + (count // 8 if count > _ALWAYS_CHECKED else 0)
    if tensor.is_meta or tensor.layout is not torch.strided or _torch.is_fake(tensor):
        return
    with torch.no_grad(), _torch.unobserved():
        digest, text = _content(tensor)
    here.comm(tuple(sorted(ranks.flat if isinstance(ranks, Placement) else ranks))).compare_plain(digest, text, purpose)


def _content(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return a digest of a tensor's shape, dtype and values [1], and a text that shows them."""
    code, first = content_digest(tensor), flatten(tensor)[:_SHOWN].tolist()
    numbers = ", ".join(f"{n:.6g}" if isinstance(n, float) else str(n) for n in first)
    more = ", ..." if tensor.numel() > _SHOWN else ""
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return torch.frombuffer(bytearray(code), dtype=torch.int64), f"{kind} of [{numbers}{more}], digest {code.hex()}"


def content_digest(tensor: torch.Tensor) -> bytes:
    """Return 8 bytes that are equal for equal bytes, shapes and dtypes: a NaN equals itself, and 0.0 does not equal -0.0."""
    flat = flatten(tensor).cpu()
    code = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=8)
    if flat.numel():
        code.update(as_bytes(flat).numpy())
    return code.digest()
