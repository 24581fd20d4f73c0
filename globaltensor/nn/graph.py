"""``flow.nn.graph``: what modules and tensors become inside a graph."""

from ..graph.graph import Graph
from ..graph.module_settings import GraphModule, GraphTensor

__all__ = ["Graph", "GraphModule", "GraphTensor"]
