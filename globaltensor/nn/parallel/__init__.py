"""``flow.nn.parallel``: DistributedDataParallel on a world that starts automatically.

All other names are torch's."""

from ..._base.torch_namespace import directory as _directory, names_of_torch as _names_of_torch
from .distributed import DistributedDataParallel

__getattr__ = _names_of_torch(__name__)
__dir__ = _directory(__name__)
