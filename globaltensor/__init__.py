"""globaltensor: a cluster looks like one device. Names not defined here are torch's."""

import importlib as _importlib
from typing import Any as _Any

import torch as _torch_package

from ._ops import foreach as _foreach  # (adds handlers)
from .amp import unscale as _scaling  # (adds handlers)
from .optim import local_step as _optimizers
from ._ops import random_streams as _draws  # (adds handlers)
from ._ops import autograd_function as _functions

# (adds to_global and to_local to torch.nn.Module)
from .parallel import load_state_dict as _load_state_dict
from .parallel import module_to_global as _modules
from ._base import torch_namespace as _borrowed
from ._ops import associative_scan as _associative
from ._base import tracebacks as _tracebacks
from ._ops import control_flow as _control_flow  # (registers its handlers)
from ._ops import flex_attention as _flex  # (wraps torch's function when that is imported)
from .distributed import user_collectives as _user_collectives
from ._tensor import file_savers as _savers
from .utils import hf_trainer as _trainer
from ._ops import metrics as _metrics

# (keeps torch.compile away from code on global tensors)
from ._tensor import compiler_guard as _uncompiled
from ._tensor import jit_guard as _unscripted
from ._ops.legacy_constructors import (
    BFloat16Tensor,
    BoolTensor,
    ByteTensor,
    CharTensor,
    DoubleTensor,
    FloatTensor,
    HalfTensor,
    IntTensor,
    LongTensor,
    ShortTensor,
    Tensor,
)
from . import amp, comm, distributed, nn, pipeline, sbp, utils
from .boxing import boxing_log, explain_boxing, no_boxing
from ._tensor.checkpoint import load, save
from .cluster import Cluster, current_cluster, use_cluster
from ._tensor.convert import to_global, to_local
from ._ops.fallback import rule
from .distributed import env
from .distributed.run.spawn import run, spawn
from ._ops.local_map import local_map
from ._ops.rank_guard import check_ranks
from .parallel.parallelize import parallelize
from ._tensor.serialization import rebuild_global_tensor  # (files contain this name)
from .sharding.placement import Placement, placement
from ._ops.check_replicas import check_replicas
from ._tensor.gradients.parameter_gather import reshard_after_forward
from ._tensor.gradients.reducer import fuse_loss_count, no_sync, set_grad_reduce_dtype
from ._ops.rules.attention.sdpa import context_parallel
from ._ops.rules.experts import moe_experts
from ._ops.rules.grouped_linear import grouped_linear

# the name in torch and JAX, and a short one
from ._tensor.display import sharding_svg, visualize_sharding, visualize_sharding as show
from .sharding.spec import Spec
from .utils.memory import memory_summary
from ._ops.oneflow_aliases import global_to_global, local_to_global, tensordot, transpose
from ._ops.methods import GlobalTensor

# Last: torch's creation functions with placement= and sbp=. One of them is ``tensor``, which is
# also the name of a module here.
from ._ops.creation import *  # noqa: F403

_tracebacks.install()
_functions.install()
_optimizers.install()
_borrowed.install()
_associative.install()
_savers.install()
_trainer.install()
_metrics.install()
_user_collectives.install()

__version__ = "0.1.0"

#: Modules of the package that are imported when they are first asked for.
_LAZY_MODULES = ("auto",)


def __getattr__(name: str) -> _Any:
    if name == "__all__":  # for ``from globaltensor import *``
        return _borrowed.public_names(__name__)
    if name in _LAZY_MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    try:
        return getattr(_torch_package, name)
    except AttributeError:
        hint = "" if name.startswith("_") else _borrowed.similar_name(__name__, name)
        raise AttributeError(f"neither globaltensor nor torch has {name!r}{hint}") from None


__dir__ = _borrowed.directory(__name__)
