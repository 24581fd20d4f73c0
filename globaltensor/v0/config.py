"""``flow.config``: how many devices, and settings of the whole session. Each returns True, or False
once the session has started."""

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
    """Devices of each machine, the same on all. Each is a process; where a machine has no GPU, a
    CPU device takes its place (one warning says so)."""
    settings.gpus = whole("config.gpu_device_num", val)


@setting
def cpu_device_num(val: int) -> None:
    """CPU devices of each machine."""
    settings.cpus = whole("config.cpu_device_num", val)


@setting
def machine_num(val: int) -> None:
    """Number of machines; `env.machine` must name as many."""
    settings.machine_num = whole("config.machine_num", val)


@setting
def ctrl_port(val: int) -> None:
    """As ``env.ctrl_port``."""
    settings.ctrl_port = whole("config.ctrl_port", val, 1, 65535)


@setting
def enable_debug_mode(val: bool = True) -> None:
    """Log (logger ``globaltensor.v0``) what is recorded of each job and which programs are
    built."""
    settings.debug = bool(val)


@setting
def enable_legacy_model_io(val: bool = True) -> None:
    """No effect: both interfaces of models, ``checkpoint`` and ``train.CheckPoint``, are there
    either way, in one format."""


@setting
def enable_model_io_v2(val: bool = True) -> None:
    """The opposite of `enable_legacy_model_io`, by an older name."""


@setting
def use_rdma(val: bool = True) -> None:
    """Make sure that data between machines goes by RDMA: the session refuses to start where it
    cannot (``flow.env.init_rdma``)."""
    settings.rdma = bool(val)


@setting
def enable_tensor_float_32_compute(val: bool = True) -> None:
    """Whether GPUs may multiply float32 matrices in TF32
    (``torch.backends.cuda.matmul.allow_tf32``)."""
    settings.tensor_float = bool(val)


def _hint(name: str) -> Callable[..., bool]:
    @setting
    def told(val: Any = True) -> None:
        """No effect: a hint to the original's allocator, threads or transport; PyTorch and its
        backends choose these themselves."""

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

#: Settings of the original's collectives, without effect: gradients are bucketed and overlapped by
#: themselves.
collective_boxing = types.SimpleNamespace(
    **{name: _hint(f"config.collective_boxing.{name}") for name in _COLLECTIVE}
)
