"""``flow.nn.parallel``: DistributedDataParallel on a world that starts by itself; everything else
is torch's."""

from ..._base.torch_namespace import names_of_torch as _names_of_torch
from .distributed import DistributedDataParallel

__getattr__ = _names_of_torch(__name__)
