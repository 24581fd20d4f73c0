"""``flow.amp``: torch.amp, and this library's scalers of the loss."""

from .scalers import GradScaler, StaticGradScaler
from ..borrowed import names_of_torch as _names_of_torch

__getattr__ = _names_of_torch(__name__)
