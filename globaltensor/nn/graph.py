"""``flow.nn.graph``: what modules and tensors become inside a graph."""

from ..graph.module_settings import GraphModule, GraphTensor
from ..graph.graph import Graph

__all__ = ["Graph", "GraphModule", "GraphTensor"]
