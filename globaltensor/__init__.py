"""globaltensor: a cluster looks like one device. Names not defined here are torch's."""

from typing import Any

import torch as _torch_package

from . import foreach as _foreach  # (handlers)
from . import scaling as _scaling  # (handlers)
from . import optimizers as _optimizers
from . import draws as _draws  # (handlers)
from . import functions as _functions
from . import modules as _modules  # (adds to_global and to_local to torch.nn.Module)
from . import borrowed as _borrowed
from . import associative as _associative
from . import tracebacks as _tracebacks
from . import flex as _flex  # (wraps torch's when it is imported)
from . import counted_once as _counted_once
from . import savers as _savers
from . import metrics as _metrics
from . import uncompiled as _uncompiled  # (keeps torch.compile away, when that is imported)
from .arrays import BFloat16Tensor, BoolTensor, ByteTensor, CharTensor, DoubleTensor, FloatTensor, HalfTensor, IntTensor, LongTensor, ShortTensor, Tensor
from . import amp, auto, comm, distributed, nn, pipeline, sbp, utils
from .boxing import boxing_log, explain_boxing, no_boxing
from .checkpoint import load, save
from .cluster import Cluster, current_cluster, use_cluster
from .convert import to_global, to_local
from .dispatch import rule
from .distributed import env
from .distributed.spawn import run, spawn
from .local_map import local_map
from .pace import guard
from .parallelize import parallelize
from .pickling import rebuild_global_tensor  # (the name that files have for it)
from .placement import Placement, placement
from .replicas import check_replicas
from .reducer import counts_ride, no_sync, reduce_dtype
from .rules.attention import attention
from .rules.experts import experts
from .rules.grouped import grouped_linear
from .show import show
from .spec import Spec
from .spellings import global_to_global, local_to_global, tensordot, transpose
from .tensor import GlobalTensor

# Last: torch's creation functions with placement= and sbp=, among them ``tensor``, which is also the name of a module here.
from .creation import *  # noqa: F403

_tracebacks.install()
_functions.install()
_optimizers.install()
_borrowed.install()
_associative.install()
_savers.install()
_metrics.install()
_counted_once.install()

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    try:
        return getattr(_torch_package, name)
    except AttributeError:
        raise AttributeError(f"neither globaltensor nor torch has {name!r}") from None
