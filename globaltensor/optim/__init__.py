"""``flow.optim``: torch.optim, and OneFlow's optimizer and schedulers that torch lacks."""

from . import lr_scheduler
from .._base.torch_namespace import directory as _directory, names_of_torch as _names_of_torch
from .lamb import LAMB

__all__ = ["LAMB", "lr_scheduler"]

__getattr__ = _names_of_torch(__name__)
__dir__ = _directory(__name__)
