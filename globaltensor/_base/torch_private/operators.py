"""Torch's private names of operators: kernels, schemas, functions without a public name."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..patches import patch

__all__ = [
    "COND",
    "WHILE_LOOP",
    "admits_nesting",
    "all_overloads",
    "at_least",
    "batch_norm_kernel",
    "dual_functions",
    "flash_attention",
    "flash_attention_backward",
    "flatten_recurrent_weights",
    "foreach_norm",
    "grouped_mm",
    "has_flash_attention",
    "is_all_true",
    "is_any_true",
    "is_custom",
    "is_kernel",
    "kernel_views",
    "kernel_writes",
    "lacks_fake",
    "list_functions",
    "lu_with_info",
    "meshgrid_of_list",
    "name_of_kernel",
    "names_in_schema_order",
    "nest_carried",
    "nested_constructors",
    "pack_padded",
    "pad_packed",
    "softmax_backward",
    "softmax_without_rows",
    "spellings_of_operator",
    "stft",
    "take_along_wraps",
    "tree_flatten",
    "tree_unflatten",
    "twin_of_kernel",
    "unscale_gradients",
    "viewed_arguments",
    "vmap_functions",
    "weight_norm",
    "wrap_associative_scan",
    "wrap_cond",
    "wrap_flex_attention",
    "wrap_von_mises",
    "written_arguments",
]


def is_kernel(func: object) -> bool:
    """Return True if a function is an operator of the dispatcher (``torch.ops...``).

    Such operators are below the function level.
    """
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def name_of_kernel(kernel: Any) -> str:
    """Return the full name of a kernel: ``aten::add``, or ``aten::add.Tensor`` of an overload."""
    name: str = (
        kernel._qualified_op_name
        if isinstance(kernel, torch._ops.OpOverloadPacket)
        else kernel.name()
    )
    return name


def all_overloads(kernel: Any) -> Any:
    """Return the operator that chooses among the overloads of a kernel, for an overload of it.

    Return any other function as it is.
    """
    return kernel.overloadpacket if isinstance(kernel, torch._ops.OpOverload) else kernel


def twin_of_kernel(kernel: Any) -> Any:
    """Return the torch function with a kernel's name and arguments, or None if there is none.

    torch's functions are generated from the kernels.
    """
    space, _, name = name_of_kernel(kernel).partition("::")
    found = (
        getattr(where, name.split(".")[0], None) for where in (torch, torch.Tensor, torch._C._nn)
    )
    return next(filter(None, found), None) if space == "aten" else None


def kernel_writes(kernel: Any) -> bool:
    """Return True if a kernel writes into one of its arguments.

    For a name without its overload, the underscore at its end decides, or its only overload's
    schema.
    """
    if isinstance(kernel, torch._ops.OpOverloadPacket):
        overload = _only_overload(kernel)
        return kernel.__name__.endswith("_") or (
            overload is not None and bool(overload._schema.is_mutable)
        )
    return bool(kernel._schema.is_mutable)


def kernel_views(kernel: Any) -> bool:
    """Return True if a kernel writes into no argument, but a result is a view of one."""
    one = _only_overload(kernel) if isinstance(kernel, torch._ops.OpOverloadPacket) else kernel
    return one is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in one._schema.returns
    )


def viewed_arguments(kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return for each result of a kernel the argument that it is a view of, or None.

    The schema of a list does not name the memory: it counts as that of the first argument which
    results may be views of.
    """
    one = _only_overload(kernel) if isinstance(kernel, torch._ops.OpOverloadPacket) else kernel
    memory: dict[str, Any] = {}  # keyed by the name of the memory in the schema: Tensor(a)
    for i, argument in enumerate(one._schema.arguments):
        if argument.alias_info is not None and (i < len(args) or argument.name in kwargs):
            value = args[i] if i < len(args) else kwargs[argument.name]
            memory.setdefault("", value)
            memory.update(dict.fromkeys(argument.alias_info.before_set, value))
    return [
        None if r.alias_info is None else memory.get(min(r.alias_info.before_set, default=""))
        for r in one._schema.returns
    ]


def _only_overload(packet: Any) -> Any:
    """Return the overload that a packet stands for where nothing else says which.

    That is its only overload, or the default one. Return None where there is neither.
    """
    names = packet.overloads()
    return (
        getattr(packet, names[0])
        if len(names) == 1
        else packet.default
        if "default" in names
        else None
    )


def is_custom(kernel: Any) -> bool:
    """Return True if a kernel is not PyTorch's own.

    A program or a library has registered it (torch.library).
    """
    return name_of_kernel(kernel).partition("::")[0] not in ("aten", "prim", "prims")


def written_arguments(
    kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], list[Any]] | None:
    """Return the arguments that a kernel writes into, and for each result which of them it is.

    A result that is none of them has None. Return None where the choice of an overload leaves that
    open.
    """
    overload = _only_overload(kernel) if isinstance(kernel, torch._ops.OpOverloadPacket) else kernel
    if overload is None:
        return None
    written: dict[str, Any] = {}  # keyed by the name of the memory in the schema: Tensor(a!)
    for i, argument in enumerate(overload._schema.arguments):
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and (i < len(args) or argument.name in kwargs)
        ):
            # a list has no such name
            memory = min(argument.alias_info.before_set, default=argument.name)
            written[memory] = args[i] if i < len(args) else kwargs[argument.name]
    returns = [
        None if r.alias_info is None else written.get(min(r.alias_info.before_set, default=""))
        for r in overload._schema.returns
    ]
    return list(written.values()), returns


# Other names of arguments that torch's functions accept: of the schemas, and those of NumPy.
_ARGUMENT_NAMES = {"self": "input", "x": "input", "a": "input", "x1": "input", "x2": "other"}


def names_in_schema_order(function: Any, names: Sequence[str]) -> list[str] | None:
    """Return the names of a call's arguments in the order of the operator's schema.

    Return None where ``names`` are in that order already, and for functions written in Python,
    which pass their arguments on in one order.
    """
    usual = [_ARGUMENT_NAMES.get(name, name) for name in names]
    for schema in _schemas_of(function):
        order = [_ARGUMENT_NAMES.get(a.name, a.name) for a in schema.arguments]
        if set(usual) <= set(order):
            pairs = sorted(zip(usual, names, strict=True), key=lambda pair: order.index(pair[0]))
            ordered = [name for _, name in pairs]
            return None if ordered == list(names) else ordered
    return None


def _schemas_of(function: Any) -> list[Any]:
    """Return the schemas of a kernel, or of the kernels behind a function written in C++."""
    if isinstance(function, torch._ops.OpOverload):
        return [function._schema]
    if isinstance(function, torch._ops.OpOverloadPacket):
        return [getattr(function, name)._schema for name in function.overloads()]
    if isinstance(function, FunctionType):
        return []
    name = getattr(function, "__name__", "")
    return list(torch._C._jit_get_schemas_for_operator(f"aten::{name}")) if name else []


def spellings_of_operator(target: Any) -> list[Any]:
    """Return every object by which a dispatcher operator is called.

    PyTorch passes these objects to the overrides of tensor subclasses. The list is empty where
    ``target`` is no operator.

    ``target``: the result of torch.library.custom_op or triton_op, ``torch.ops.space.name``, one of
    its overloads, or "space::name".
    """
    if isinstance(target, str):
        space, _, name = target.partition("::")
        target = getattr(getattr(torch.ops, space), name, None) if name else None
    elif isinstance(target, torch._library.custom_ops.CustomOpDef):
        target = target._opoverload
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [target, *[getattr(target, overload) for overload in target.overloads()]]
    if isinstance(target, torch._ops.OpOverload):
        packet = target.overloadpacket
        return [target, packet] if _only_overload(packet) is target else [target]
    return []


def lacks_fake(kernel: Any, error: BaseException) -> bool:
    """Return True if an error says that a custom kernel lacks a function for fake tensors.

    Also return True if that function cannot derive the shape of the result.
    """
    return (
        is_kernel(kernel)
        and is_custom(kernel)
        and any(text in str(error) for text in ("fake impl", "data-dependent shape"))
    )


def has_flash_attention(q: Any, k: Any, v: Any) -> bool:
    """Return True if a flash attention kernel supports these tensors [..., n, e].

    Such a kernel needs no table of scores, and returns the logsumexp.
    """
    if (
        q.shape[-1] != v.shape[-1]
        or not q.is_floating_point()
        or 0 in (*q.shape, *k.shape, *v.shape)
    ):
        return False
    if q.device.type != "cuda" or torch.version.cuda is None:
        return q.device.type == "cpu"
    narrow = (
        q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    )
    return (
        narrow
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def flash_attention(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """Run the flash kernel [b, h, n, e] -> (result, logsumexp [b, h, n]).

    The public function does not return the logsumexp. On a GPU several heads of q may share one of
    k.
    """
    if q.device.type == "cpu":
        return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )[:2]  # type: ignore[no-any-return]


def flash_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[Any, Any, Any]:
    """Return the flash kernel's gradients of q, k and v.

    ``out`` and ``lse`` may belong to more keys than ``k`` holds. Then the results are the shares of
    these keys.
    """
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )  # type: ignore[no-any-return]
    # The random state of dropout: there is no dropout.
    drawn = (
        lse.new_empty(2, dtype=torch.uint64),
        lse.new_empty((), dtype=torch.uint64),
    )
    lengths = None, None, q.shape[-2], k.shape[-2]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, *drawn, scale=scale
    )


#: nn.TransformerEncoder calls it, before it looks at the class of its tensors, to check whether a
#: mask allows its fast path of nested tensors.
admits_nesting = torch._nested_tensor_from_mask_left_aligned

#: The function that torch.meshgrid calls for one list of tensors, without checking for overrides.
meshgrid_of_list = torch._VF.meshgrid

#: The functions that torch.atleast_1d, 2d and 3d call for one tensor or one list of tensors,
#: without checking a list's tensors for overrides.
at_least = {n: [getattr(torch._VF, f"atleast_{n}d")] for n in (1, 2, 3)}

#: The functions that torch.stft and torch.lu call after checking their arguments.
stft, lu_with_info = torch._VF.stft, torch._lu_with_info

#: g * v / |v|: torch.nn.utils.weight_norm and its parametrization call it. There is no public name.
weight_norm = torch._weight_norm

#: The checks that torch.distributions and torch's own tensor checks use, as functions and methods.
is_all_true, is_any_true = (
    [torch._is_all_true, torch.Tensor._is_all_true],
    [torch._is_any_true, torch.Tensor._is_any_true],
)

#: The functions that torch.nn.utils.rnn.pack_padded_sequence and pad_packed_sequence call after
#: checking their arguments.
pack_padded, pad_packed = torch._pack_padded_sequence, torch._pad_packed_sequence

#: The kernel of torch.nn.functional.grouped_mm, and that function where torch has it.
grouped_mm = [
    f
    for f in (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))
    if f is not None
]

#: Batch norm's kernel by its newer name.
batch_norm_kernel = torch._native_batch_norm_legit

#: Kernels in torch's database of ops: a softmax that returns zeros for rows without a finite
#: element, and the backward of softmax.
softmax_without_rows = [torch.ops.aten._safe_softmax, torch.ops.aten._safe_softmax.default]
softmax_backward = [
    torch.ops.aten._softmax_backward_data,
    torch.ops.aten._softmax_backward_data.default,
]


@functools.cache
def take_along_wraps() -> bool:
    """Return True if torch.take_along_dim wraps indices beyond a dim (2.13).

    Other versions refuse such indices.
    """
    try:
        torch.take_along_dim(torch.zeros(2), torch.tensor([-1]), 0)
    except RuntimeError:
        return False
    return True


def dual_functions() -> list[Any]:
    """Return the functions that make and unpack a dual tensor of forward-mode AD.

    torch.autograd.forward_ad and torch.func.jvp call them.
    """
    return [torch._make_dual, torch._unpack_dual]


def vmap_functions() -> list[Any]:
    """Return the functions by which torch's older vmap marks the batch dim of a tensor."""
    return [torch._add_batch_dim, torch._remove_batch_dim]


def nested_constructors() -> list[Any]:
    """Return the functions by which torch.nested makes nested tensors of others."""
    return [
        torch._nested_tensor_from_tensor_list,
        torch._nested_view_from_buffer,
        torch._nested_view_from_jagged,
    ]


#: Copies the weights of a recurrent layer into one piece of memory, as cuDNN needs them.
#: `nn.RNNBase.flatten_parameters` calls it on a GPU.
flatten_recurrent_weights = torch._cudnn_rnn_flatten_weight

#: GradScaler calls it on the gradients of one device and dtype. It has no public name.
unscale_gradients = torch._amp_foreach_non_finite_check_and_unscale_

#: Norms of many tensors in one kernel. clip_grad_norm_ uses it.
foreach_norm = torch._foreach_norm


def list_functions() -> dict[Any, dict[str, bool]]:
    """Return the kernels over lists of tensors that torch.optim calls, which have no public names.

    Each kernel maps to its lists by name: True where it writes into them.
    """
    kernels = {}
    for name in dir(torch):
        if name.startswith(("_foreach_", "_fused_")):
            kernel = getattr(torch.ops.aten, name)
            arguments = getattr(kernel, kernel.overloads()[0])._schema.arguments
            lists = {
                a.name: a.alias_info is not None and a.alias_info.is_write
                for a in arguments
                if str(a.type) == "List[Tensor]"
            }
            if lists:
                kernels[getattr(torch, name)] = lists
    return kernels


#: What `torch.cond` and torch's `while_loop` call, after they have compiled it.
COND, WHILE_LOOP = torch.ops.higher_order.cond, torch.ops.higher_order.while_loop


def wrap_cond(around: Any) -> None:
    """Call ``around(cond, pred, true_fn, false_fn, operands)`` in place of `COND`.

    `COND` refuses operands in dicts and lists, before it asks for overrides. Code that torch
    compiles never has them there.
    """

    def around_it(original: Any) -> Any:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(functools.partial(original, self), *args, **kwargs)

        return __call__

    patch("torch._higher_order_ops.cond:CondOp.__call__", around_it)


def nest_carried(body: Any, flat: Sequence[Any]) -> Any:
    """Return the ``flat`` values that `WHILE_LOOP` carries in the pytree that the user passed.

    ``body`` is torch's own function around the user's, which knows this pytree.
    """
    variables = inspect.getclosurevars(body).nonlocals
    if "in_spec" not in variables:
        return tuple(flat)
    return tree_unflatten(flat, variables["in_spec"])[0]


def wrap_associative_scan(around: Any) -> None:
    """Call ``around(associative_scan, ...)`` in place of torch's scan with a user's function.

    torch's scan is a prototype without a public name yet (torch 2.9). Models import it where they
    call it. If the scan has moved to another module, it stays as it is.
    """

    def around_it(original: Any) -> Any:
        return functools.partial(around, original)

    home = "torch._higher_order_ops.associative_scan"
    patch(f"{home}:associative_scan", around_it)
    # the same object in the package
    patch(
        "torch._higher_order_ops:associative_scan",
        lambda before: importlib.import_module(home).associative_scan,
    )


def wrap_von_mises(around: Any) -> None:
    """Call ``around(sampler, loc, concentration, proposal, start)`` for a von Mises distribution.

    torch's sampler begins with memory that it has not written, and replaces all of it.
    """
    patch(
        "torch.distributions.von_mises:_rejection_sample",
        lambda original: functools.partial(around, original),
    )


def wrap_flex_attention(around: Any, refused: Any) -> None:
    """Call ``around(flex_attention, ...)`` in place of torch's function.

    torch's function cannot be overridden. Code that imported the function before calls ``refused(q,
    k, v)``.
    """
    home = "torch.nn.attention.flex_attention"
    patch(
        f"{home}:flex_attention",
        lambda original: functools.wraps(original)(functools.partial(around, original)),
    )
    patch(
        f"{home}:_validate_sdpa_input",
        lambda check: lambda *args, **kwargs: refused(*args[:3]) or check(*args, **kwargs),
    )
