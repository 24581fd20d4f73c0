"""``globaltensor.distributed``: torch.distributed on a world that starts automatically.

Names that are not defined here are torch's.
"""

import torch.distributed as _dist

from .._base.torch_namespace import directory as _directory, names_of_torch as _names_of_torch

if _dist.is_available():
    from .collectives import *  # noqa: F403
    from .process_groups import *  # noqa: F403

__getattr__ = _names_of_torch(__name__)
__dir__ = _directory(__name__)
