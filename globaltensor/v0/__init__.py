"""``import globaltensor.v0 as flow``: the job-function interface of OneFlow 0.1 to 0.4.

A script configures machines and devices, decorates functions, and calls them with NumPy arrays.
This package is a thin layer: each job function is recorded once (v0/recording/record.py). Every
device then replays the recording in the ``build()`` of an `nn.Graph` (v0/recording/run_record.py).
Docs: docs/v0.md.
"""

import torch as _torch

from . import (
    checkpoint,
    config,
    data,
    distribute,
    env,
    layers,
    losses,
    math,
    nn,
    optimizer,
    regularizers,
    scope,
    train,
    typing,
)
from .ops import *  # noqa: F403
from .blob import Blob
from .checkpoint import get_all_variables, load_variables
from .distribute import assert_is_valid_distribute
from .errors import JobError, SessionError
from .function_config import FunctionConfig, function_config
from .initializers import (
    constant_initializer,
    glorot_normal_initializer,
    glorot_uniform_initializer,
    kaiming_initializer,
    ones_initializer,
    random_normal_initializer,
    random_uniform_initializer,
    truncated_normal,
    truncated_normal_initializer,
    variance_scaling_initializer,
    xavier_normal_initializer,
    xavier_uniform_initializer,
    zeros_initializer,
)  # fmt: skip
from .recording.job_function import global_function
from .deprecated import device_prior_placement, fixed_placement
from .scope import current_scope
from .session.session import reset as clear_default_session
from .variables import assign, get_variable

float, float32, double, float64, float16, half = (
    _torch.float32,
    _torch.float32,
    _torch.float64,
    _torch.float64,
    _torch.float16,
    _torch.float16,
)
bfloat16, int8, char, int32, int64, uint8, bool = (
    _torch.bfloat16, _torch.int8, _torch.int8, _torch.int32, _torch.int64, _torch.uint8,
    _torch.bool,
)  # fmt: skip
