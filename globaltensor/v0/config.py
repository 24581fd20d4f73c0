"""``flow.config``: device counts and settings of the whole session.

User code calls these before the first job call. Each returns True, or False once the session has
started.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from .session.settings import setting, settings, whole

__all__ = [
    "collective_boxing", "cpu_device_num", "ctrl_port", "enable_debug_mode",
    "enable_legacy_model_io", "enable_model_io_v2", "enable_tensor_float_32_compute",
    "gpu_device_num", "machine_num", "use_rdma",
]  # fmt: skip


@setting
def gpu_device_num(val: int) -> None:
    """Set the number of GPU devices per machine, the same on all machines.

    Each device is a process. On a machine without GPUs, CPU devices replace them (one warning says
    so).
    """
    settings.gpus = whole("config.gpu_device_num", val)


@setting
def cpu_device_num(val: int) -> None:
    """Set the number of CPU devices per machine."""
    settings.cpus = whole("config.cpu_device_num", val)


@setting
def machine_num(val: int) -> None:
    """Set the number of machines; `env.machine` must name as many."""
    settings.machine_num = whole("config.machine_num", val)


@setting
def ctrl_port(val: int) -> None:
    """Set the port at which machines meet, like ``env.ctrl_port``."""
    settings.ctrl_port = whole("config.ctrl_port", val, 1, 65535)


@setting
def enable_debug_mode(val: bool = True) -> None:
    """Log the recorded jobs and the programs being built (logger ``globaltensor.v0``)."""
    settings.debug = bool(val)


@setting
def enable_legacy_model_io(val: bool = True) -> None:
    """Do nothing: both checkpoint interfaces are always available.

    They are ``checkpoint`` and ``train.CheckPoint``, and they use one format.
    """


@setting
def enable_model_io_v2(val: bool = True) -> None:
    """Do nothing: the opposite of `enable_legacy_model_io`, by an older name."""


@setting
def use_rdma(val: bool = True) -> None:
    """Require RDMA for data between machines.

    The session refuses to start where RDMA is not available (``flow.env.init_rdma``).
    """
    settings.rdma = bool(val)


@setting
def enable_tensor_float_32_compute(val: bool = True) -> None:
    """Allow GPUs to multiply float32 matrices in TF32.

    This sets ``torch.backends.cuda.matmul.allow_tf32``.
    """
    settings.tensor_float = bool(val)


def _hint(name: str) -> Callable[..., bool]:
    @setting
    def told(val: Any = True) -> None:
        """Do nothing: a hint to OneFlow's allocator, threads or transport.

        PyTorch and its backends choose these automatically.
        """

    told.__name__ = told.__qualname__ = name.rpartition(".")[2]
    return told


_HINTS = (
    "max_mdsave_worker_num", "rdma_mem_block_mbyte", "rdma_recv_msg_buf_mbyte",
    "reserved_host_mem_mbyte", "reserved_device_mem_mbyte",
    "compute_thread_pool_size", "comm_net_worker_num", "thread_enable_local_message_queue",
    "save_downloaded_file_to_local_fs",
    "persistence_buf_byte", "enable_mem_chain_merge",
    "nccl_use_compute_stream", "disable_group_boxing_by_dst_parallel",
)  # fmt: skip
_COLLECTIVE = (
    "enable_fusion", "num_callback_threads", "nccl_num_streams", "nccl_fusion_threshold_mb",
    "nccl_fusion_all_reduce", "nccl_fusion_reduce_scatter",
    "nccl_fusion_all_gather", "nccl_fusion_reduce", "nccl_fusion_broadcast",
    "nccl_fusion_all_reduce_use_buffer", "nccl_fusion_max_ops",
    "nccl_enable_all_to_all", "nccl_enable_mixed_fusion",
)  # fmt: skip

for _name in _HINTS:
    globals()[_name] = _hint(f"config.{_name}")

#: Settings of OneFlow's collectives, without effect: gradients are bucketed and overlapped
#: automatically.
collective_boxing = types.SimpleNamespace(
    **{name: _hint(f"config.collective_boxing.{name}") for name in _COLLECTIVE}
)
