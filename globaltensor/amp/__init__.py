"""``flow.amp``: torch.amp, and this library's loss scalers.

``autocast`` is torch's own; _ops/autocast.py says how global tensors follow it.
"""

from .grad_scaler import GradScaler, StaticGradScaler
from .._base.torch_namespace import directory as _directory, names_of_torch as _names_of_torch

__getattr__ = _names_of_torch(__name__)
__dir__ = _directory(__name__)
