"""``flow.utils.data``: data for many ranks. All other names are torch.utils.data's."""

from ..._base.torch_namespace import directory as _directory, names_of_torch as _names_of_torch
from .batches import GlobalBatches
from .loader import GlobalDataLoader
from .sampler import DistributedSampler

__getattr__ = _names_of_torch(__name__)
__dir__ = _directory(__name__)
