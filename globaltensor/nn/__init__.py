"""``flow.nn``: torch.nn, and this library's additions to it."""

from . import graph, parallel
from .._base.torch_namespace import names_of_torch as _names_of_torch
from ..graph.graph import Graph

__getattr__ = _names_of_torch(__name__)
