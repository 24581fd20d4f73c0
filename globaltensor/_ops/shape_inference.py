"""A call tried without its values: what comes out, or torch's own words where it refuses the
call."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.pytree import replaced, tensors_in
from ..distributed.world import world
from ..sharding.spec import Spec

__all__ = ["check_dtypes", "infer_outputs", "memoized", "operands_among"]

_MOST = 1 << 20  # elements of operands that a call is tried with
_MOST_TRIED = 1 << 16  # elements of operands whose dtypes are tried as they are
_DTYPES = re.compile(
    r"dtype|scalar type|result type|Input type|data type|not implemented "
    r"for|complex|integral|floating"
)
_REMEMBERED = 1 << 13  # calls

Found = tuple[list[torch.Tensor] | None, Any]


class _Known(threading.local):
    found: dict[Any, Found] | None = None


_known = _Known()


@contextlib.contextmanager
def memoized(found: dict[Any, Found]) -> Iterator[None]:
    """Inside, a call is tried once for operands of the same shapes, however they lie, and what came
    out is kept in ``found``."""
    before, _known.found = _known.found, found
    try:
        yield
    finally:
        _known.found = before


def infer_outputs(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Found:
    """Run the function on meta tensors of the global shapes -> (result tensors, result); None where
    torch has no meta kernel for it."""
    known = _known.found
    if known is None or torch_private.any_autocast():
        return _tried(func, specs, args, kwargs)
    try:
        key = (
            func,
            tuple((s.shape, s.dtype) for s in specs),
            _spelled(args),
            _spelled(kwargs),
            torch.get_default_dtype(),
        )
        found = known.get(key)
    except TypeError:  # of what cannot be hashed
        return _tried(func, specs, args, kwargs)
    if found is None:
        if len(known) >= _REMEMBERED:
            known.clear()
        found = known[key] = _tried(func, specs, args, kwargs)
    return found


def _spelled(value: Any) -> Any:
    """A nest of arguments without its tensors, in which numbers of other types differ."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, (tuple, list)):
        return type(value), *map(_spelled, value)
    if isinstance(value, dict):
        return dict, *((k, _spelled(v)) for k, v in value.items())
    if isinstance(value, slice):
        return slice, *map(_spelled, (value.start, value.stop, value.step))
    return type(value), value


def _tried(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Found:
    cast = torch_private.any_autocast()
    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            tensors = torch_private.fake_tensors() if cast else torch_private.real_tensors()
            for one in (
                torch.no_grad(),
                torch_private.without_function_modes(),
                torch_private.unobserved(),
                tensors,
            ):
                stack.enter_context(one)
            these = iter(
                [
                    torch.empty(
                        s.shape,
                        dtype=s.dtype,
                        device=world().device(s.placement.type) if cast else "meta",
                    )
                    for s in specs
                ]
            )
            warnings.simplefilter("ignore")
            given = replaced((args, kwargs), these)
            out = func(*given[0], **given[1])
    except (RuntimeError, AssertionError) as error:
        # There is no such kernel; or the result depends on values.
        if (
            isinstance(error, NotImplementedError)
            or "on meta tensors" in str(error)
            or torch_private.lacks_fake(func, error)
        ):
            return None, None
        tried, own = _try_on_cpu(func, specs, args, kwargs)
        if tried and own is None and isinstance(error, AssertionError):
            # the kernel for meta tensors takes less; where it refuses in words, the other may not
            # look (attention: as many keys as values)
            return (
                None,
                None,
            )
        raise own or (
            RuntimeError(str(error)) if isinstance(error, AssertionError) else error
        ) from None
    results = tensors_in(out, [])
    positions = {id(t): i for i, t in enumerate(tensors_in(given[1], tensors_in(given[0], [])))}
    for t in results:
        if id(t) in positions:
            t.operand = positions[id(t)]  # type: ignore[attr-defined]
    return results, out


def check_dtypes(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise what PyTorch's kernel for the CPU raises of operands of these dtypes: kernels for meta
    tensors, and functions that take its place, accept more.

    The call is tried on zeros, of smaller shapes where the operands are large: other errors than
    those of dtypes say nothing then.
    """
    usual = {s.dtype for s in specs} in ({torch.float32}, {torch.float64})
    if (
        usual
        or torch_private.any_autocast()
        or torch_private.recording.on
        or any(s.placement.type != "cpu" for s in specs)
    ):
        return
    large = sum(s.numel for s in specs) > _MOST_TRIED
    shapes = [tuple(min(n, 2) for n in s.shape) if large else tuple(s.shape) for s in specs]
    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            # What draws must not move the stream of random numbers on.
            modes = (
                torch_private.without_function_modes(),
                torch_private.unobserved(),
                torch_private.real_tensors(),
            )
            for one in (torch.no_grad(), *modes, torch.random.fork_rng([])):
                stack.enter_context(one)
            these = iter(
                [torch.zeros(shape, dtype=s.dtype) for shape, s in zip(shapes, specs, strict=True)]
            )
            warnings.simplefilter("ignore")
            func(*replaced(args, these), **replaced(kwargs, these))
    except Exception as error:
        if isinstance(error, NotImplementedError) or _DTYPES.search(str(error)):
            raise


def operands_among(results: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
    """Return for each tensor that `infer_outputs` gave the position of the operand that it is, if
    the function returns that itself."""
    return tuple(t.__dict__.get("operand") for t in results)


def _try_on_cpu(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Exception | None]:
    """(whether the call could be tried on one device, what was raised): kernels for meta tensors
    are written in Python, and word some refusals otherwise."""
    if sum(s.numel for s in specs) > _MOST or any(s.placement.type != "cpu" for s in specs):
        return False, None
    try:
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            for one in (
                torch.no_grad(),
                torch_private.without_function_modes(),
                torch_private.unobserved(),
                torch_private.real_tensors(),
            ):
                stack.enter_context(one)
            these = iter([torch.zeros(s.shape, dtype=s.dtype) for s in specs])
            warnings.simplefilter("ignore")
            func(*replaced(args, these), **replaced(kwargs, these))
    except Exception as error:
        return True, error
    return True, None
