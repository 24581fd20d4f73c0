"""``flow.utils``: torch.utils, and this library's additions to it."""

from . import data, global_view
from .._base.torch_namespace import names_of_torch as _names_of_torch

__getattr__ = _names_of_torch(__name__)
