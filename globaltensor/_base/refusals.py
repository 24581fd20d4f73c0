"""Error texts for a global tensor that gets below torch's functions.

That is a kernel, a collective of torch.distributed, or a transform of torch.func. Dispatch and
boxing call these functions.
"""

from __future__ import annotations

from ..errors import KernelError
from . import torch_private

__all__ = ["collective_message", "kernel_message", "refuse_transforms"]


def kernel_message(where: object) -> str:
    return (
        f"a global tensor reached {where}, below torch's functions, where its sbp is not known. "
        "Run that code on local tensors instead: "
        "globaltensor.local_map(function, out_sbp=..., in_sbp=...) passes it local tensors and "
        "makes its results global"
    )


def collective_message(name: str) -> str:
    return (
        f"a global tensor was given to a collective of torch.distributed (c10d.{name}): it "
        "is one value on all ranks already, so there is nothing to gather or to add up. Use "
        "x.to_global(sbp=flow.sbp.broadcast) for the full value on every rank, or x.to_local() "
        "to send only this rank's local tensor"
    )


def refuse_transforms() -> None:
    """Raise KernelError inside a transform of torch.func.

    Its tensors wrap others, and have no memory that could be sent.
    """
    if torch_private.innermost_transform() is not None:
        raise KernelError(
            kernel_message("a transform of torch.func (grad, vjp, vmap, jacrev, ...)")
        )
