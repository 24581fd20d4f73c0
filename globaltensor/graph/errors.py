"""The error of static graphs. All of `globaltensor.graph` raises it."""

from ..errors import GlobalTensorError

__all__ = ["GraphError"]


class GraphError(GlobalTensorError):
    """An error for code that no static graph can hold, or for a graph used otherwise than built."""
