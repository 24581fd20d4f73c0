"""``flow.nn``: torch.nn, and this library's additions to it."""

from . import graph, parallel
from .._base.torch_namespace import directory as _directory, names_of_torch as _names_of_torch
from ..graph.graph import Graph

__getattr__ = _names_of_torch(__name__)
__dir__ = _directory(__name__)
