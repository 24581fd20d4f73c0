"""Error texts for a global tensor that gets below torch's functions.

That is a kernel, a collective of torch.distributed, or a transform of torch.func. Dispatch and
boxing call these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..errors import KernelError
from . import torch_private

__all__ = [
    "collective_message",
    "copied_message",
    "dense_message",
    "kernel_message",
    "refusal_of_kernel",
    "refuse_collective",
    "refuse_transforms",
]

#: The kernels by which torch's functions copy or view the memory of an argument. These functions
#: check no override.
_COPIES = frozenset(("alias", "clone", "detach", "_to_copy"))

#: The namespaces of the kernels of torch.distributed: its collectives in place, and those that
#: return their results (torch.distributed._functional_collectives).
COLLECTIVES = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")
)


def refusal_of_kernel(kernel: Any) -> KernelError:
    """Return the error for a kernel that a global tensor has reached.

    Its text is about the function of torch that calls the kernel, where that is known.
    """
    name = kernel._opname
    modules = set(_calling_modules())
    if any(module.startswith("torch._functorch") for module in modules):
        return KernelError(transform_message())
    if "torch.autograd.gradcheck" in modules:
        return KernelError(
            f"torch.autograd.gradcheck called the kernel {kernel} on a global tensor, whose "
            "gradients torch computes on local tensors: pass check_undefined_grad=False, and "
            "leave check_batched_grad and check_forward_ad off"
        )
    if (wrapper := _wrapper_under_construction()) is not None:
        return KernelError(wrapper_message(wrapper))
    if kernel.namespace in COLLECTIVES:
        return KernelError(collective_message(f"{kernel.namespace}.{name}"))
    if "sparse" in name or "nested" in name:
        return KernelError(dense_message(f"the kernel {kernel}"))
    if name == "copy_":
        return KernelError(
            f"a global tensor reached the kernel {kernel}, as in plain.real = x, where torch asks "
            "only the plain tensor for an override: use plain.real.copy_(x)"
        )
    if name in _COPIES:
        return KernelError(copied_message(f"the kernel {kernel}"))
    return KernelError(kernel_message(f"the kernel {kernel}"))


def _calling_modules() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def _wrapper_under_construction() -> str | None:
    """Return torch's wrapper for data parallelism that is being made of a model, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "torch.nn.parallel.distributed" and function == "__init__":
            return "DistributedDataParallel"
        if module.startswith("torch.distributed.fsdp") and function == "fully_shard":
            return "fully_shard"
        frame = frame.f_back
    return None


def wrapper_message(wrapper: str) -> str:
    plan = "data" if wrapper == "DistributedDataParallel" else "fsdp"
    return (
        f"torch's {wrapper} was called on a model whose parameters are global tensors. Leave it "
        f'out: flow.parallelize(model, placement, "{plan}") does its work already, and backward '
        "sums the gradients over the ranks"
    )


def copied_message(where: str) -> str:
    return (
        f"a global tensor reached {where} in a function that takes the memory of its argument "
        "(torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor, torch.nested.nested_tensor, "
        "new, new_tensor, as_subclass), and a global tensor has only a part of the values in "
        "memory. Use x.detach().clone() for a copy, x.to(dtype) for another dtype, or "
        "flow.tensor(x) and flow.as_tensor(x, dtype=...). x.to_local() is this rank's local "
        "tensor, and x.numpy() the full value"
    )


def dense_message(where: str) -> str:
    return (
        f"a global tensor reached {where}, which makes a sparse, nested or MKL-DNN tensor of it, "
        "but global tensors are dense, and local tensors of other kinds are not made of them. Use "
        "x.to_local() for a tensor of this rank's values, or "
        "x.to_global(sbp=flow.sbp.broadcast).to_local() for one of the full value"
    )


def no_values_message(what: str) -> str:
    return (
        f"{what} needs the values of a tensor on the meta device, which has none. Allocate memory "
        "and set the values first: for a model, model.to_empty(device=...), then load_state_dict "
        "or reset_parameters"
    )


def transform_message() -> str:
    return (
        "a global tensor was passed to a transform of torch.func (grad, vjp, vmap, jacrev, ...), "
        "whose tensors wrap others below torch's functions, where the sbp is not known. "
        "torch.autograd.functional.vjp, jacobian and hessian, and torch.autograd.grad, compute "
        "such derivatives of global tensors. For vmap, write the batch as a dim. "
        "globaltensor.local_map(function, out_sbp=..., in_sbp=...) runs a transform on local "
        "tensors"
    )


def kernel_message(where: object) -> str:
    return (
        f"a global tensor reached {where}, below torch's functions, where its sbp is not known. "
        "Run that code on local tensors instead: "
        "globaltensor.local_map(function, out_sbp=..., in_sbp=...) passes it local tensors and "
        "makes its results global"
    )


def collective_message(name: str) -> str:
    return (
        f"a global tensor was given to a collective of torch.distributed ({name}): it "
        "is one value on all ranks already, so there is nothing to gather or to add up. Use "
        "x.to_global(sbp=flow.sbp.broadcast) for the full value on every rank, or x.to_local() "
        "to send only this rank's local tensor"
    )


def refuse_collective(kernel: Any) -> None:
    """Raise KernelError if a kernel is a collective of torch.distributed.

    On full tensors it would count the value of a global tensor once for each rank.
    """
    namespace, _, name = torch_private.name_of_kernel(kernel).partition("::")
    if namespace in COLLECTIVES:
        raise KernelError(collective_message(f"{namespace}.{name}"))


def refuse_transforms() -> None:
    """Raise KernelError inside a transform of torch.func.

    Its tensors wrap others, and have no memory that could be sent.
    """
    if torch_private.innermost_transform() is not None:
        raise KernelError(transform_message())
