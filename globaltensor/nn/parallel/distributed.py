"""DistributedDataParallel: torch's own, on a world that starts automatically.

Users construct it. It uses torch's C++ reducer, and has OneFlow's keywords in addition to
torch's."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._tensor.global_tensor import GlobalTensor
from ...distributed.process_groups import start
from ...errors import GlobalTensorError, WorldError
from .replicas import GlobalReplicas
from .transparent import Transparent

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(Transparent, nn.parallel.DistributedDataParallel):
    """A wrapper that trains ``module`` on each rank's share of the batch.

    Gradients are averaged over the ranks while backward runs. It has all of torch's arguments and
    methods (``no_sync``, ``join``, ``register_comm_hook``, ...). In addition:

    - No ``init_process_group`` is needed.
    - Attributes that the wrapper does not have are the module's: ``ddp(model).lr`` is ``model.lr``.
    - ``state_dict()`` has the module's own keys, without the prefix ``module.``.
      ``load_state_dict`` accepts keys with and without it.
    - ``broadcast_parameters=False``: each rank begins with its own parameters (torch:
      ``init_sync=False``).
    - ``bucket_size``: the average number of parameters in a bucket, in place of ``bucket_cap_mb``.
      ``use_bucket=False``: one all-reduce for each parameter.
    - On machines with several GPUs a module on ``"cuda"`` moves to the GPU of the local rank. This
      GPU becomes the current one, and ``.to("cuda")`` then means it.

    Raises WorldError on every rank if the ranks cannot meet, or if their modules differ. The error
    names two ranks and what they hold. Source: OneFlow's and torch's
    ``nn.parallel.DistributedDataParallel``; Li et al., PyTorch Distributed, VLDB 2020.
    """

    def __new__(cls, module: nn.Module | None = None, *args: Any, **options: Any) -> Any:
        """Create the wrapper, which is a `GlobalReplicas` for a module with global parameters."""
        if not isinstance(module, nn.Module) or not any(
            isinstance(p, GlobalTensor) for p in module.parameters()
        ):
            return super().__new__(cls)
        known = {
            name: options.pop(name)
            for name in ("broadcast_buffers", "broadcast_parameters", "process_group")
            if name in options
        }
        if args or options:
            raise GlobalTensorError(
                f"DistributedDataParallel of a module with global parameters takes "
                f"{', '.join(('broadcast_buffers', 'broadcast_parameters', 'process_group'))} "
                f"by name, not {', '.join(options) or 'positional arguments'}: its gradients go "
                f"through the buckets of global tensors"
            )
        return GlobalReplicas(module, **known)

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        broadcast_parameters: bool = True,
        bucket_size: int | None = None,
        use_bucket: bool = True,
        **more: Any,
    ) -> None:
        start()
        if not device_ids:
            _to_own_device(module)
        _check_same_modules(
            module,
            process_group if more.get("device_mesh") is None else more["device_mesh"].get_group(),
        )
        if bucket_size is not None or not use_bucket:
            if bucket_cap_mb is not None:
                raise GlobalTensorError(
                    "DistributedDataParallel: bucket_cap_mb and bucket_size (or use_bucket=False) "
                    "both set the size of a bucket: pass one of them"
                )
            bucket_cap_mb = _bucket_megabytes(module, bucket_size if use_bucket else None)
        if broadcast_buffers is False:
            more["broadcast_buffers"] = False
        with warnings.catch_warnings():
            # torch 2.13 warns about names that it will remove, and has no replacement with the same
            # effect yet.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module, device_ids, output_device, dim,
                init_sync=init_sync and broadcast_parameters, process_group=process_group,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters, check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph, **more,
            )  # fmt: skip


def _bucket_megabytes(module: nn.Module, parameters: int | None) -> float:
    """Return torch's bucket size in MiB for this many parameters of average size.

    If ``parameters`` is None, the size is so small that each parameter has its own bucket."""
    if parameters is None:
        return 2.0**-20
    if parameters < 1:
        raise GlobalTensorError(
            f"DistributedDataParallel: bucket_size is the number of parameters in a bucket, at "
            f"least 1, not {parameters}"
        )
    sizes = [p.nbytes for p in module.parameters() if p.requires_grad] or [1]
    return parameters * sum(sizes) / len(sizes) / 2**20


def _check_same_modules(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise WorldError on every rank if the modules differ.

    Torch's own check raises on all ranks but the first of the group, which continues and waits for
    the others."""
    own_parameters = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in module.named_parameters()
        if not nn.parameter.is_lazy(p)
    ]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own_parameters, group=group)
    for index, other in enumerate(every):
        pairs = itertools.zip_longest(every[0], other)
        wrong = next(((a, b) for a, b in pairs if a != b), None)
        if wrong is not None:
            ranks = dist.get_process_group_ranks(group)
            descriptions = [
                f"rank {ranks[i]} has {_parameter_text(p)}"
                for i, p in zip((0, index), wrong, strict=True)
            ]
            raise WorldError(
                f"DistributedDataParallel: the ranks' modules differ: "
                f"{', where '.join(descriptions)}; all need the same parameters in the same order"
            )


def _parameter_text(parameter: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if parameter is None:
        return "no more parameters"
    name, shape, dtype, trained = parameter
    return f"{name}, {dtype.removeprefix('torch.')}{list(shape)}{'' if trained else ', frozen'}"


def _to_own_device(module: nn.Module) -> None:
    """Move a module from the first GPU to that of the local rank.

    Before a world has started, ``.to("cuda")`` means the first GPU on every rank. Under NCCL two
    ranks cannot share one."""
    local = start().local_rank
    if local == 0 or torch.cuda.device_count() <= local or torch.cuda.current_device() != 0:
        return
    if {p.device for p in module.parameters()} == {torch.device("cuda", 0)}:
        torch.cuda.set_device(local)
        module.to(torch.device("cuda", local))
