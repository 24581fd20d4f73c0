"""Shape inference: run a call on meta tensors to infer its outputs.

The planner calls it. If the call is invalid, PyTorch's own error is raised."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._base import torch_private
from .._base.pytree import replaced, tensors_in
from .._base.tracebacks import mark_torch_error
from .._base.user_code import without_warnings
from ..distributed.world import world
from ..sharding.spec import Spec

__all__ = ["check_dtypes", "check_out_dtypes", "infer_outputs", "memoized", "operands_among"]

_MAX_CPU_ELEMENTS = (
    1 << 20
)  # a call runs on the CPU only if its operands have at most so many elements
# dtypes are checked at the full shapes only if operands have at most so many elements
_MAX_CHECKED_ELEMENTS = 1 << 16
_DTYPES = re.compile(
    r"dtype|scalar type|result type|Input type|data type|not implemented "
    r"for|complex|integral|floating|cannot be converted to type|does not support bool"
)
_MAX_MEMOIZED = 1 << 13  # maximum number of memoized calls
# the class of a meta tensor, as torch's errors name the target of an assignment
_META_CLASS = re.compile(r"torch\.meta\.(\w+)")

Found = tuple[list[torch.Tensor] | None, Any]


class _ThreadMemo(threading.local):
    memo: dict[Any, Found] | None = None


_known = _ThreadMemo()


@contextlib.contextmanager
def memoized(memo: dict[Any, Found]) -> Iterator[None]:
    """Memoize inferred outputs in ``memo`` within the block.

    A call is run once for operands of the same shapes and dtypes, whatever their layouts."""
    before, _known.memo = _known.memo, memo
    try:
        yield
    finally:
        _known.memo = before


def infer_outputs(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Found:
    """Run the function on meta tensors of the global shapes and return (result tensors, result).

    Returns (None, None) if torch has no meta kernel for it, or if the result depends on values."""
    try:
        return _infer_memoized(func, specs, args, kwargs)
    except Exception as error:
        mark_torch_error(error)
        raise


def _infer_memoized(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Found:
    """Do the work of `infer_outputs`, or return what it found for the same call."""
    known = _known.memo
    if known is None or torch_private.any_autocast():
        return _try_call(func, specs, args, kwargs)
    try:
        key = (
            func,
            tuple((s.shape, s.dtype) for s in specs),
            _argument_key(args),
            _argument_key(kwargs),
            torch.get_default_dtype(),
        )
        inferred = known.get(key)
    except TypeError:  # the arguments cannot be hashed
        return _try_call(func, specs, args, kwargs)
    if inferred is None:
        if len(known) >= _MAX_MEMOIZED:
            known.clear()
        inferred = known[key] = _try_call(func, specs, args, kwargs)
    return inferred


def _argument_key(value: Any) -> Any:
    """Return a key of a pytree of arguments, without the values of tensors.

    Numbers of different types have different keys. Raises TypeError where the call has none."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, (tuple, list)):
        return type(value), *map(_argument_key, value)
    if isinstance(value, dict):
        return dict, *((k, _argument_key(v)) for k, v in value.items())
    if isinstance(value, slice):
        bounds = value.start, value.stop, value.step
        if any(isinstance(bound, torch.Tensor) for bound in bounds):
            raise TypeError("the result's shape depends on the value of a bound")
        return slice, *map(_argument_key, bounds)
    return type(value), value


def _try_call(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Found:
    cast = torch_private.any_autocast()
    try:
        with contextlib.ExitStack() as stack, without_warnings():
            tensors = torch_private.fake_tensors() if cast else torch_private.real_tensors()
            for one in (
                torch.no_grad(),
                torch_private.without_function_modes(),
                torch_private.unobserved(),
                tensors,
            ):
                stack.enter_context(one)
            stand_ins = iter(
                [
                    torch.empty(
                        s.shape,
                        dtype=s.dtype,
                        device=world().device(s.placement.type) if cast else "meta",
                    )
                    for s in specs
                ]
            )
            stand_in_args = replaced((args, kwargs), stand_ins)
            out = func(*stand_in_args[0], **stand_in_args[1])
    except TypeError as error:
        if "torch.meta." not in str(error):
            if (shapes := _empty_results(func, specs, args, kwargs)) is not None:
                return shapes
            raise
        raise TypeError(_META_CLASS.sub(r"global torch.\1", str(error))) from None
    except (RuntimeError, AssertionError, ValueError, IndexError) as error:
        # There is no such kernel, or the result depends on values.
        if (
            isinstance(error, NotImplementedError)
            or "on meta tensors" in str(error)
            or torch_private.lacks_fake(func, error)
        ):
            return None, None
        tried, own = _try_on_cpu(func, specs, args, kwargs)
        if tried and own is None and isinstance(error, AssertionError):
            # The meta kernel accepts less. If it refuses with an assertion, another device's
            # kernel may accept the call (attention: as many keys as values).
            return None, None
        raise own or (
            RuntimeError(str(error)) if isinstance(error, AssertionError) else error
        ) from None
    results = tensors_in(out, [])
    positions = {
        id(t): i
        for i, t in enumerate(tensors_in(stand_in_args[1], tensors_in(stand_in_args[0], [])))
    }
    for t in results:
        if id(t) in positions:
            t.operand = positions[id(t)]  # type: ignore[attr-defined]
    return results, out


def _empty_results(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Found | None:
    """Return what the CPU's kernel gives for an empty operand, or None if it refuses the call.

    torch's Python kernels for meta tensors fail on some empty operands (``F.interpolate``)."""
    if all(s.numel for s in specs) or sum(s.numel for s in specs) > _MAX_CPU_ELEMENTS:
        return None
    try:
        with torch_private.outside_all_modes(), torch.no_grad(), torch.random.fork_rng([]):
            these = iter([torch.zeros(s.shape, dtype=s.dtype) for s in specs])
            out = func(*replaced(args, these), **replaced(kwargs, these))
    except Exception:  # the error of the meta kernel stands
        return None
    results = [torch.empty_like(t, device="meta") for t in tensors_in(out, [])]
    return results, replaced(out, iter(results))


def check_dtypes(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise the error of PyTorch's CPU kernel for operands of these dtypes.

    Meta kernels, and functions that replace a kernel, accept more dtypes. The call is run on zeros,
    with smaller shapes if the operands are large. Errors that are not about dtypes are ignored
    then.
    """
    usual = {s.dtype for s in specs} in ({torch.float32}, {torch.float64})
    if usual or torch_private.any_autocast() or any(s.placement.type != "cpu" for s in specs):
        return
    large = sum(s.numel for s in specs) > _MAX_CHECKED_ELEMENTS
    shapes = [tuple(min(n, 2) for n in s.shape) if large else tuple(s.shape) for s in specs]
    try:
        with contextlib.ExitStack() as stack, without_warnings():
            # A random function must not advance the random stream.
            modes = (torch_private.outside_all_modes(), torch_private.unobserved())
            for one in (torch.no_grad(), *modes, torch.random.fork_rng([])):
                stack.enter_context(one)
            these = iter(
                [torch.zeros(shape, dtype=s.dtype) for shape, s in zip(shapes, specs, strict=True)]
            )
            func(*replaced(args, these), **replaced(kwargs, these))
    except Exception as error:
        if isinstance(error, NotImplementedError) or _DTYPES.search(str(error)):
            mark_torch_error(error)
            raise


def check_out_dtypes(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise the error of PyTorch's CPU kernel for ``out=`` of these dtypes.

    Meta kernels accept more of them. The call is run on zeros, with smaller shapes if the operands
    are large, without and with ``out=``: only what is refused with it is an error.
    """
    if any(s.placement.type != "cpu" for s in specs):
        return
    large = sum(s.numel for s in specs) > _MAX_CHECKED_ELEMENTS
    modes = (torch_private.outside_all_modes(), torch_private.unobserved())
    with contextlib.ExitStack() as stack, without_warnings():
        for one in (torch.no_grad(), *modes, torch.random.fork_rng([])):
            stack.enter_context(one)
        these = iter(
            [
                torch.zeros([min(n, 2) for n in s.shape] if large else s.shape, dtype=s.dtype)
                for s in specs
            ]
        )
        args, kwargs = replaced(args, these), replaced(kwargs, these)
        try:
            func(*args, **{name: a for name, a in kwargs.items() if name != "out"})
        except Exception:  # of this call nothing can be said
            return
        try:
            func(*args, **kwargs)
        except Exception as error:
            mark_torch_error(error)
            raise


def operands_among(results: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
    """Return for each result of `infer_outputs` the operand that it is, or None.

    A function may return an operand itself."""
    return tuple(t.__dict__.get("operand") for t in results)


def _try_on_cpu(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Exception | None]:
    """Run a call on zeros on one device, and return (True if it could be run, the error or None).

    Meta kernels are written in Python and word some errors differently."""
    if sum(s.numel for s in specs) > _MAX_CPU_ELEMENTS or any(
        s.placement.type != "cpu" for s in specs
    ):
        return False, None
    try:
        with torch_private.outside_all_modes(), torch.no_grad(), without_warnings():
            these = iter([torch.zeros(s.shape, dtype=s.dtype) for s in specs])
            func(*replaced(args, these), **replaced(kwargs, these))
    except Exception as error:
        return True, error
    return True, None
