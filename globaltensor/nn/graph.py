"""``flow.nn.graph``: graphs, and the types of modules and tensors inside a graph."""

from ..graph.graph import Graph
from ..graph.module_settings import GraphModule, GraphTensor

__all__ = ["Graph", "GraphModule", "GraphTensor"]
