"""What the job-function view raises."""

from __future__ import annotations

from ..errors import GlobalTensorError

__all__ = ["JobError", "SessionError"]


class JobError(GlobalTensorError):
    """A job function, its arguments or its settings make no sense."""


class SessionError(GlobalTensorError):
    """The machines of a session cannot meet, do not agree, or one of them is gone."""
