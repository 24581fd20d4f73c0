"""Cluster: what computing and moving data cost on a machine, given by constants, by a preset or by
what was measured there."""

from .measured_curves import Curve
from .model import Cluster, current_cluster, named_cluster, use_cluster
from .presets import PRESETS

__all__ = ["PRESETS", "Cluster", "Curve", "current_cluster", "named_cluster", "use_cluster"]
