"""Cluster: the costs of computing and moving data on a machine.

They come from constants, from a preset or from measurements on the machine. Every planner uses
them.
"""

from .measured_curves import Curve
from .model import Cluster, current_cluster, named_cluster, use_cluster
from .presets import PRESETS

__all__ = ["PRESETS", "Cluster", "Curve", "current_cluster", "named_cluster", "use_cluster"]
