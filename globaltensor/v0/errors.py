"""The exceptions of the job-function interface, raised by all modules of `globaltensor.v0`."""

from __future__ import annotations

from ..errors import GlobalTensorError

__all__ = ["JobError", "SessionError"]


class JobError(GlobalTensorError):
    """An error in a job function, its arguments or its settings."""


class SessionError(GlobalTensorError):
    """An error of a session: its machines cannot meet, do not agree, or one of them is gone."""
