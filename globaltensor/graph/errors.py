"""What a graph refuses."""

from ..errors import GlobalTensorError

__all__ = ["GraphError"]


class GraphError(GlobalTensorError):
    """Code that no static graph can hold, or a graph that is used otherwise than it was built."""
