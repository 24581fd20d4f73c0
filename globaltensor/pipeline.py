"""``flow.pipeline``: a model cut into stages, and the schedules by which stages take turns.

This module is the public page of `graph.pipeline`, for users.
"""

from .graph.pipeline import *  # noqa: F403
from .graph.pipeline.split_model import cut

__all__ = ["cut"]
