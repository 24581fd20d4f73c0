"""Randomness: the fills of global tensors, and the streams of random ops in training (dropout).

The dispatcher calls its handlers, and plans of random ops call `run`.

Filling: every rank draws the *global* sequence, in bounded blocks, and keeps its own shard. So a
tensor holds the numbers that one device would draw, whatever its placement and sbp. The generator
ends in the state that it would have on one device, on every rank.

In training: an op draws from a stream of its own. Its seed depends on the *key* and on the rank's
coordinates along the axes that split the result. The key is the seed field of torch's CPU
generator, advanced by each such op. So ``torch.manual_seed`` resets the key, and ``get_rng_state``,
``fork_rng`` and ``torch.utils.checkpoint`` save and restore it. Plain draws leave the key
unchanged: ranks that drew different numbers of their own still agree on a mask.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct
from typing import Any, Final

import torch
from torch import Tensor

from .._base import torch_private
from .._base.argument_text import argument_text
from .._base.overridable import shown, visible
from .._tensor.global_tensor import GlobalTensor
from .._tensor.history import record
from .._tensor.pending_tensor import local_of
from .._tensor.plain_operands import check_replicated
from .._tensor.strides import memory_order
from .._tensor.view_tracking import finish_inplace
from ..boxing import box
from ..distributed.simulate import SimulatedWorld
from ..distributed.world import placeholder, world
from ..errors import InplaceError, PlacementError, WorldError
from ..sharding.placement import Placement
from ..sharding.spec import Spec
from . import local_plan
from .dispatch import register_handlers

__all__ = [
    "FILLS",
    "RandomFill",
    "advance_key",
    "draw_global",
    "fill_in_order",
    "fill_local",
    "owns_value",
    "part",
    "reserve_keys",
    "run",
    "run_with_key",
    "zero_unless_owner",
]

#: Elements drawn at once. A multiple of 16, because torch makes normal numbers in groups of 16.
BLOCK: Final = 1 << 16
_GROUP: Final = 16
_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15  # splitmix64's increment: odd, so the key visits all 2^64 values
# the state of a generator begins with its seed, in the machine's byte order
_write_seed = Struct("=Q").pack_into

# ------------------------------------------------------------------------------------------ streams


def splitmix64(z: int) -> int:
    """Return splitmix64's finaliser of ``z``: 64 bits that look unrelated for neighbouring ``z``.

    Source: Steele, Lea, Flood 2014."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def run(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    coordinate: Sequence[int],
    placement: Placement | None = None,
) -> Any:
    """Call ``function(*args, **kwargs)`` on local tensors, drawing from the op's own stream.

    ``coordinate``: this rank's coordinates along the axes that split the result, and 0 along the
    others. Equal coordinates draw equal numbers. A ``generator=`` among ``kwargs`` replaces the
    default one, and its seed is the key. Afterwards the generator has its previous state, with the
    key advanced. The ranks of ``placement`` compare their keys, because they must draw from one
    seed.
    """
    if torch_private.function_mode_on():
        return shown(run, function, args, kwargs, coordinate)
    generator = kwargs.get("generator")
    if generator is None:
        agree_on_seed()
    if generator is None and isinstance(world(), SimulatedWorld):
        with _serialized(_device_of(args)):
            return _run_with_generator(function, args, kwargs, coordinate, torch.default_generator)
    if placement is not None:
        world().history((placement,)).record(
            b"key %d" % (generator or torch.default_generator).initial_seed()
        )
    return _run_with_generator(
        function, args, kwargs, coordinate, generator or torch.default_generator
    )


def _run_with_generator(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    coordinate: Sequence[int],
    generator: torch.Generator,
) -> Any:
    key = generator.initial_seed()
    seed = splitmix64(key)
    for c in coordinate:
        seed = splitmix64(seed + c + 1 & _MASK)
    device = _device_of(args)
    # The numbers on an accelerator are drawn from its own generator, but the key is the CPU's. So
    # every rank has one key, whatever its device.
    other = (
        _accelerator(device)
        if generator is torch.default_generator and device.type != "cpu"
        else None
    )
    state = generator.get_state()
    before = None if other is None else other.get_state()
    try:
        generator.manual_seed(seed)
        if other is not None:
            other.manual_seed(seed)
        return function(*args, **kwargs)
    finally:
        _write_seed(state.numpy(), 0, key + _STEP & _MASK)  # type: ignore[arg-type]
        generator.set_state(state)
        if other is not None and before is not None:
            other.set_state(before)


_seed_at_import = torch.initial_seed()


class SeedAgreement:
    """A rank's record of whether the ranks have checked that they draw from one seed."""

    done = False


def agree_on_seed() -> None:
    """Give all ranks the first rank's seed if the program has set none. Collective, once.

    PyTorch seeds every process differently. The first draw of a world for global tensors calls
    this. All ranks of the world draw, or skip, at the same points."""
    this_world = world()
    seed = this_world.state(SeedAgreement)
    if seed.done or not this_world.compares or isinstance(this_world, SimulatedWorld):
        return
    seed.done = True
    everyone = this_world.comm(tuple(range(this_world.size)))
    rank_seeds = everyone.all_gather_object(
        (torch.initial_seed(), torch.initial_seed() == _seed_at_import),
        "the seed of random numbers",
    )
    if len({seed for seed, _ in rank_seeds}) > 1 and all(fresh for _, fresh in rank_seeds):
        state = everyone.broadcast(torch.default_generator.get_state(), 0)
        torch.manual_seed(rank_seeds[0][0])  # of accelerators too
        torch.default_generator.set_state(state)


def reserve_keys(count: int) -> int:
    """Reserve the keys of the next ``count`` draws for `run_with_key`, and return the first.

    Torch's generator advances past them. Every rank must reserve them at the same point."""
    agree_on_seed()
    with _serialized(torch.device("cpu")):
        state = torch.default_generator.get_state()
        key = torch.default_generator.initial_seed()
        _write_seed(state.numpy(), 0, key + count * _STEP & _MASK)  # type: ignore[arg-type]
        torch.default_generator.set_state(state)
    return key


def run_with_key(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    coordinate: Sequence[int],
    first: int,
    number: int,
) -> Any:
    """Run like `run`, but with key ``number`` of those reserved from ``first`` on.

    The order and the ranks of these runs do not matter: the generator keeps its state."""
    with _one_at_a_time if isinstance(world(), SimulatedWorld) else nullcontext():
        state = torch.default_generator.get_state()
        was = state.clone()
        _write_seed(state.numpy(), 0, first + number * _STEP & _MASK)  # type: ignore[arg-type]
        torch.default_generator.set_state(state)
        try:
            return _run_with_generator(function, args, kwargs, coordinate, torch.default_generator)
        finally:
            torch.default_generator.set_state(was)


def advance_key(generator: torch.Generator | None = None) -> None:
    """Advance the key on a rank outside the placement, in place of ``run``.

    The rank draws nothing, but its key stays equal to that of the others."""
    run(_draw_nothing, (), {"generator": generator}, ())


def _draw_nothing(generator: torch.Generator | None = None) -> None:
    pass


def _device_of(args: Sequence[Any]) -> torch.device:
    for a in args:
        if isinstance(a, Tensor):
            return a.device
    return torch.device("cpu")


def _accelerator(device: torch.device) -> torch.Generator | None:
    """Return the default generator of a cuda device, or None: others have no public one."""
    if device.type != "cuda":
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]


# ---------------------------------------------------------------------------------- simulated ranks

_one_at_a_time = threading.Lock()


@contextmanager
def _serialized(device: torch.device) -> Iterator[None]:
    """Let simulated ranks draw one after another within the block, all from the same state.

    Simulated ranks are threads and share torch's generators. Real ranks are not affected."""
    this_world = world()
    if not isinstance(this_world, SimulatedWorld) or this_world.size == 1:
        yield
        return
    accelerator = _accelerator(device)
    generators = [torch.default_generator, *([] if accelerator is None else [accelerator])]
    everyone = this_world.comm(tuple(range(this_world.size)))
    everyone.all_gather_object(
        None, "the seed of random numbers"
    )  # after this, no rank is still drawing or seeding
    states = everyone.all_gather_object(
        [g.get_state() for g in generators] if this_world.rank == 0 else None,
        "the seed of random numbers",
    )[0]
    try:
        with _one_at_a_time:
            for g, state in zip(generators, states, strict=True):
                g.set_state(state)
            yield
    finally:
        everyone.all_gather_object(None, "the seed of random numbers")


# ------------------------------------------------------------------------------------------ filling


@dataclass(frozen=True)
class RandomFill:
    """A call of a torch in-place random method: ``RandomFill("normal_", (0.0, 1.0))``."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, target: Tensor, generator: torch.Generator | None) -> Tensor:
        out: Tensor = getattr(Tensor, self.name)(
            target, *self.args, **self.kwargs, generator=generator
        )
        return out

    def in_blocks(self, dtype: torch.dtype) -> bool:
        """Return True if drawing in blocks gives the numbers of a single draw on this CPU."""
        return not any(
            isinstance(a, Tensor) for a in (*self.args, *self.kwargs.values())
        ) and _draws_in_blocks(self.name, dtype)


@lru_cache(maxsize=256)
def _draws_in_blocks(name: str, dtype: torch.dtype) -> bool:
    # This is measured, because it depends on the kernel. With MKL (Intel), bernoulli_ and
    # exponential_ seed a stream of their own once per call.
    fill, n = (
        RandomFill(name, (0.5,) if name in ("bernoulli_", "geometric_") else ()),
        2 * BLOCK + 3,
    )
    a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    with torch_private.real_tensors():
        whole, pieces = fill(torch.empty(n, dtype=dtype), a), torch.empty(n, dtype=dtype)
        for start, length in _blocks(n):
            fill(pieces[start : start + length], b)
        return torch.equal(whole, pieces) and torch.equal(a.get_state(), b.get_state())


def _blocks(n: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each block of n elements.

    The last block has the rest, because fewer than 16 elements are drawn by another algorithm."""
    start = 0
    while n - start >= BLOCK + _GROUP:
        yield start, BLOCK
        start += BLOCK
    yield start, n - start


@visible
def fill_local(spec: Spec, fill: RandomFill, generator: torch.Generator | None = None) -> Tensor:
    """Return this rank's new local tensor of a tensor that ``fill`` fills.

    It is a placeholder outside the placement. Every rank of the world must call this, so that all
    generators advance alike. Memory: the local tensor and one block, or the full tensor if the
    kernel cannot draw in blocks.
    """
    rank, device = world().rank, _device(spec)
    inside = spec.placement.coordinate(rank) is not None
    if device is None:
        return _drawn_elsewhere(spec, generator)
    everything = inside and spec.local_shape(rank) == tuple(spec.shape)
    if everything or device.type != "cpu" or spec.numel < BLOCK or not fill.in_blocks(spec.dtype):
        return draw_global(
            spec,
            lambda: fill(torch.empty(spec.shape, dtype=spec.dtype, device=device), generator),
            generator,
        )
    with _prepared_fill(device, generator, spec):
        out = torch.empty(spec.local_shape(rank), dtype=spec.dtype)
        buffer = torch.empty(BLOCK + _GROUP, dtype=spec.dtype)
        offsets = spec.box(rank)[0] if inside else ()
        for start, length in _blocks(spec.numel):
            block = fill(buffer[:length], generator)
            if inside:
                _copy_block(block, start, tuple(spec.shape), offsets, out)
    return zero_unless_owner(out, spec) if inside else out


def draw_global(
    spec: Spec, whole: Callable[[], Tensor], generator: torch.Generator | None = None
) -> Tensor:
    """Return this rank's shard of the tensor that ``whole()`` draws at once."""
    device = _device(spec)
    if device is None:
        return _drawn_elsewhere(spec, generator)
    with _prepared_fill(device, generator, spec):
        return part(whole(), spec)


def fill_in_order(
    spec: Spec, fill: RandomFill, strides: Sequence[int], generator: torch.Generator | None
) -> Tensor:
    """Return this rank's new local tensor of a tensor with these strides that ``fill`` fills.

    torch draws in memory order, so the full tensor is drawn. The local tensor has the same order of
    dims.
    """
    device = _device(spec)
    if device is None:
        return _drawn_elsewhere(spec, generator)
    local = draw_global(
        spec, lambda: fill(_empty_strided(spec, strides, device), generator), generator
    )
    if local.shape == spec.shape:
        return local
    order = sorted(range(local.dim()), key=lambda d: (-strides[d], d))
    inverse = sorted(range(local.dim()), key=order.__getitem__)
    return local.permute(order).contiguous().permute(inverse)


def part(whole: Tensor, spec: Spec) -> Tensor:
    """Return this rank's shard of a tensor that every rank holds in full.

    On a partial axis coordinate 0 holds the value and the others hold zeros. The result shares no
    memory with ``whole`` unless it is all of it.
    """
    rank = world().rank
    if spec.placement.coordinate(rank) is None:
        return placeholder(spec)
    offsets, lengths = spec.box(rank)
    out = whole
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        out = out.narrow(dim, offset, length)
    return zero_unless_owner(
        whole
        if lengths == tuple(whole.shape)
        else out.clone(memory_format=torch.contiguous_format),
        spec,
    )


def zero_unless_owner(local: Tensor, spec: Spec) -> Tensor:
    """Return the local tensor if this rank holds the value, else zeros."""
    return local if owns_value(spec) else torch.zeros_like(local)


def owns_value(spec: Spec) -> bool:
    """Return True if this rank holds the value along every axis that sums.

    The value must be on one rank of such an axis, which is coordinate 0."""
    where = spec.placement.coordinate(world().rank) or ()
    return not any(
        c and e.is_partial and e.reduce not in ("max", "min")
        for c, e in zip(where, spec.layout, strict=bool(where))
    )


def _copy_block(
    block: Tensor, start: int, shape: tuple[int, ...], offsets: tuple[int, ...], out: Tensor
) -> None:
    """Copy the elements of ``block`` that are in the box at ``offsets`` into ``out``.

    ``block`` has the elements from ``start`` on of a row-major tensor of ``shape``."""
    if not out.numel():
        return
    row, first, n = math.prod(shape[1:]), offsets[0], len(block)
    if len(shape) > 1 and start % row:  # the rest of a row that an earlier block began
        i, length = start // row, min(n, row - start % row)
        if first <= i < first + len(out):
            _copy_block(block[:length], start % row, shape[1:], offsets[1:], out[i - first])
        block, start, n = block[length:], start + length, n - length
    i, rows = start // row, n // row
    a, b = max(i, first), min(i + rows, first + len(out))
    if a < b:
        value = block[(a - i) * row : (b - i) * row].view(b - a, *shape[1:])
        for dim in range(1, len(shape)):
            value = value.narrow(dim, offsets[dim], out.shape[dim])
        out[a - first : b - first].copy_(value)
    # the beginning of a row that a later block ends
    if n > rows * row and first <= i + rows < first + len(out):
        _copy_block(block[rows * row :], 0, shape[1:], offsets[1:], out[i + rows - first])


def _device(spec: Spec) -> torch.device | None:
    """Return the device on which this rank draws for ``spec``.

    Returns None on a rank outside the placement without such a device: it has no generator to
    advance."""
    try:
        return world().device(spec.placement.type)
    except WorldError:
        if spec.placement.coordinate(world().rank) is None:
            return None
        raise


def _drawn_elsewhere(spec: Spec, generator: torch.Generator | None) -> Tensor:
    """Return the placeholder of a rank without a generator, which agrees on the seed all the same.

    The agreement is collective among all ranks of the world."""
    if generator is None:
        agree_on_seed()
    return placeholder(spec)


@contextmanager
def _prepared_fill(
    device: torch.device, generator: torch.Generator | None, spec: Spec
) -> Iterator[None]:
    """Prepare the fill of a tensor of ``spec`` within the block.

    The tensor's ranks compare the state of the generator, because they must draw one sequence."""
    if generator is None:
        agree_on_seed()
    with nullcontext() if generator is not None else _serialized(device):
        this_world = world()
        if this_world.compares and not torch_private.recording.on:
            state = (generator or _accelerator(device) or torch.default_generator).get_state()
            this_world.history((spec.placement,)).record(
                hashlib.blake2b(state.numpy(), digest_size=8).digest()
            )
        yield


# ----------------------------------------------------------------------------------------- handlers

#: torch.Tensor's methods that fill a tensor with random numbers
FILLS: Final = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)


def _fill_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``x.normal_()`` and similar on a global tensor: the numbers are those of one device."""
    x, *rest = args
    kwargs = dict(kwargs)
    generator = kwargs.pop("generator", None)
    name = func.__name__
    if not isinstance(x, GlobalTensor):
        raise InplaceError(
            f"{name} on a plain tensor cannot take a global argument: pass to_local() of the "
            f"argument, or make the target global with to_global(placement, sbp)"
        )
    local_plan.unpartial_norm_target(name, x)
    spec, local = x._spec, x._local
    record(f"{name} {argument_text((rest, kwargs))}", x)
    record(name, *[a for a in (*rest, *kwargs.values()) if isinstance(a, GlobalTensor)])
    rest = [_replicate_argument(name, a, spec) for a in rest]
    fill = RandomFill(
        name, tuple(rest), {k: _replicate_argument(name, a, spec) for k, a in kwargs.items()}
    )
    strides = memory_order(x)
    whole = (
        tuple(local.shape) == tuple(spec.shape)
        and not any(e.is_partial for e in spec.layout)
        and spec.numel
    )
    if whole and (local.is_contiguous() if strides is None else local.stride() == strides):
        with _prepared_fill(local.device, generator, spec):
            fill(local, generator)
    else:
        with torch.no_grad():
            # For an order that is not row-major, use torch's own kernel for it, which cannot draw
            # in blocks.
            value = (
                fill_local(spec, fill, generator)
                if strides is None
                else draw_global(
                    spec,
                    lambda: fill(_empty_strided(spec, strides, local.device), generator),
                    generator,
                )
            )
        # with grad mode as it is, so that torch's own checks and its version counter apply
        local.copy_(value)
    return finish_inplace(x)


def _empty_strided(spec: Spec, strides: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=device)


def check_drawn_from(value: Tensor, spec: Spec, name: str) -> None:
    """Compare a plain tensor, such as one of probabilities, with those of the other ranks.

    A number is part of the record of the call instead."""
    this_world, ranks = world(), spec.placement.flat
    if value.dim() and this_world.compares and len(ranks) > 1 and this_world.rank in ranks:
        check_replicated(value, spec.placement, f"argument of {name}")


def _replicate_argument(name: str, value: Any, spec: Spec) -> Any:
    """Replicate an argument: a global tensor of probabilities becomes its full value."""
    if not isinstance(value, GlobalTensor):
        if isinstance(value, Tensor):
            check_drawn_from(value, spec, name)
        return value
    if value._spec.placement is not spec.placement:
        raise PlacementError(
            f"{name}: the target is on {spec.placement!r}, but its argument is on "
            f"{value._spec.placement!r}; "
            f"move the argument with to_global(placement={spec.placement!r})"
        )
    if spec.placement.coordinate(world().rank) is None:
        # Any probability advances the generator by the same amount.
        return torch.full(value._spec.shape, 0.5, dtype=value._spec.dtype)
    return box(
        local_of(value).detach(), value._spec, value._spec.replicated(), why=f"argument of {name}"
    )


def _check_deviations(std: Any) -> None:
    """Raise torch's error where a standard deviation is negative or NaN.

    A rank sees its local tensor, so another rank may raise the error alone."""
    if not isinstance(std, Tensor):
        if not std >= 0:
            raise RuntimeError(f"normal expects std >= 0.0, but found std {std:g}")
    else:
        here = local_of(std).detach()
        if here.numel() and not here.is_complex() and not bool((here >= 0).all()):
            raise RuntimeError("normal expects all elements of std >= 0.0")


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``torch.normal(mean, std)`` with a global mean or std.

    Standard normal numbers are scaled and shifted, as torch does."""
    kwargs = dict(kwargs)
    generator, out = kwargs.pop("generator", None), kwargs.pop("out", None)
    mean, std = (*args, *(kwargs[k] for k in ("mean", "std") if k in kwargs), 1.0)[:2]
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):  # only out= is global
        size = torch.Size(kwargs["size"] if "size" in kwargs else args[2])
        if size != out.shape:
            raise InplaceError(
                f"out= has shape {list(out.shape)}, but the requested shape is {list(size)}: pass "
                f"a global tensor of that shape"
            )
        return out.normal_(mean, std, generator=generator)
    if isinstance(std, GlobalTensor) and any(e.is_partial for e in std._spec.layout):
        std = std.to_global(sbp=std._spec.replicated().layout)
    _check_deviations(std)
    if not all(v.is_floating_point() for v in (mean, std) if isinstance(v, Tensor)):
        ones = [torch.ones((), dtype=v.dtype) if isinstance(v, Tensor) else v for v in (mean, std)]
        # torch's kernel refuses most of these dtypes
        torch.normal(*ones, generator=torch.Generator())
    like: Any = (
        mean * std
        if isinstance(mean, Tensor) and isinstance(std, Tensor)
        else mean
        if isinstance(mean, Tensor)
        else std
    )
    spec = like._spec.replace(
        layout=[e if e.is_split else like._spec.replicated().layout[0] for e in like._spec.layout]
    )
    with torch.no_grad():
        numbers = (
            GlobalTensor.wrap(fill_local(spec, RandomFill("normal_", (0.0, 1.0)), generator), spec)
            * std
            + mean
        )
        return numbers if out is None else out.copy_(numbers)


register_handlers({getattr(Tensor, name): _fill_in_place for name in FILLS}, "random")
register_handlers({torch.normal: _normal}, "random")
local_plan.register_random(run)


def _sample_von_mises(
    sampler: Callable[..., Tensor],
    loc: Tensor,
    concentration: Tensor,
    proposal: Tensor,
    start: Tensor,
) -> Tensor:
    """Start the sampler with zeros, which all ranks have alike, if a parameter is global."""
    if isinstance(loc, GlobalTensor) or isinstance(concentration, GlobalTensor):
        start = torch.zeros_like(start)
    return sampler(loc, concentration, proposal, start)


torch_private.wrap_von_mises(_sample_von_mises)
