"""``flow.utils.data``: data for many ranks. All other names are torch.utils.data's."""

from ..._base.torch_namespace import names_of_torch as _names_of_torch
from .batches import GlobalBatches
from .loader import GlobalDataLoader
from .sampler import DistributedSampler

__getattr__ = _names_of_torch(__name__)
