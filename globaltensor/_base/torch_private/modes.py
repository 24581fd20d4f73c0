"""Torch's private names about modes: autocast, fake tensors, function and dispatch modes."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from typing import Any

import torch

from ..patches import patch

__all__ = [
    "any_autocast",
    "data_dependence",
    "fake_tensors",
    "fakes_are_on",
    "function_mode_on",
    "is_fake",
    "looked_at",
    "outside_all_modes",
    "real_among_fake",
    "real_tensors",
    "recording",
    "tracing",
    "unobserved",
    "without_function_modes",
]

#: True if autocast is on for any device type. It is read at every call, and one query is cheaper
#: than one for each type.
any_autocast = torch._C._is_any_autocast_enabled


def fake_tensors() -> Any:
    """Return a mode in which tensors have a device but no memory.

    Autocast sees these tensors. It does not see meta tensors, for which torch has public functions.
    """
    from torch._subclasses import fake_tensor

    fake_tensor.log.addFilter(_no_recorder_active)
    _prepare_fakes()
    return fake_tensor.FakeTensorMode()


@contextlib.contextmanager
def real_among_fake(fake: Any) -> Any:
    """Let tensors with memory meet fake ones inside this context, whose mode is ``fake``.

    Code that uses parameters of its own computes shapes with them.
    """
    before, fake.allow_non_fake_inputs = fake.allow_non_fake_inputs, True
    try:
        yield
    finally:
        fake.allow_non_fake_inputs = before


_preparing = threading.Lock()


@functools.cache
def _prepare_fakes_once() -> None:
    # Fake tensors on a CUDA build where no GPU is visible call this each time they start. In
    # several threads (simulated ranks) it crashes the process (2.11).
    torch._C._ensureCUDADeviceGuardSet()
    patch("torch._C:_ensureCUDADeviceGuardSet", lambda once: lambda: None)


def _prepare_fakes() -> None:
    if torch.cuda._is_compiled() and not torch.cuda.is_available():
        with _preparing:
            _prepare_fakes_once()


def _no_recorder_active(record: logging.LogRecord) -> bool:
    """Return True if a log record may be shown: no recorder is at work.

    Fake tensors log a stack trace for every wrong call, in addition to the error that they raise.
    While a recorder is at work, the error alone is shown.
    """
    return not recording.on


def unobserved() -> Any:
    """Return a context inside which the dispatch modes of others see no op.

    A selective checkpoint counts ops. Ops whose result is cached (a plan, a gathered parameter)
    must not count: they do not run again when the checkpoint runs the forward pass again. Under
    fake tensors the context changes nothing, because there the modes do the computing.
    """
    from torch.utils import _python_dispatch as modes

    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return (
        modes._disable_current_modes()
        if fake is None and torch._C._len_torch_dispatch_stack()
        else contextlib.nullcontext()
    )


class _RecordingState(threading.local):
    on = False
    looks = False


#: ``on``: this thread captures a graph (set by graph/capture/capture.py). ``looks``: any mode of
#: this library is active, the one of _ops/rank_guard.py included.
recording = _RecordingState()


def function_mode_on() -> bool:
    """Return True if a recorder's torch-function mode is active.

    `torch.overrides` makes the same check in C before it calls a mode. Users' modes see what they
    always saw.
    """
    return recording.on and torch._C._is_torch_function_mode_enabled()


def looked_at() -> bool:
    """Return True if any torch-function mode of this library is active."""
    return recording.looks and torch._C._is_torch_function_mode_enabled()


def without_function_modes() -> Any:
    """Return a context inside which no torch-function mode sees the calls.

    torch's public switch turns off subclasses only.
    """
    return torch._C.DisableTorchFunction()


def data_dependence() -> tuple[type[Exception], ...]:
    """Return the errors that fake tensors raise where an op needs values.

    One of them is for shapes that depend on values.
    """
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )


def is_fake(t: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def fakes_are_on() -> bool:
    """Return True if fake tensors are on: torch has no public function for it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def real_tensors() -> Any:
    """Make tensors with memory inside this context, unseen by any mode that is on outside.

    A recorder needs it for values that it needs at once.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with without_function_modes(), unset_fake_temporarily():
        yield


@contextlib.contextmanager
def outside_all_modes() -> Any:
    """Run calls on real tensors inside this context, unseen by function and dispatch modes."""
    with without_function_modes(), unobserved(), real_tensors():
        yield


_tracing = [0]  # number of threads that trace: ranks may be threads
_tracing_lock = threading.Lock()
_validating = [True]  # whether distributions validate their arguments outside `tracing`


@contextlib.contextmanager
def tracing() -> Any:
    """Make `torch.compiler.is_compiling()` return True inside this context.

    By it models know that they are being traced, and do not look into their data. Distributions do
    not look into theirs either.
    """
    import torch.compiler as compiler

    checked = torch.distributions.Distribution
    with _tracing_lock:
        if not _tracing[0]:
            _validating[0] = checked._validate_args
            checked.set_default_validate_args(False)
        _tracing[0] += 1
        compiler._is_compiling_flag = True
    try:
        yield
    finally:
        with _tracing_lock:
            _tracing[0] -= 1
            compiler._is_compiling_flag = _tracing[0] > 0
            if not _tracing[0]:
                checked.set_default_validate_args(_validating[0])
