"""``flow.utils``: torch.utils, and this library's additions to it."""

from . import data, global_view
from .memory import memory_summary
from .run_trace import trace
from .training_progress import TrainingProgress as Progress
from .._base.torch_namespace import directory as _directory, names_of_torch as _names_of_torch

__getattr__ = _names_of_torch(__name__)
__dir__ = _directory(__name__)
