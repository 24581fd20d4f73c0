"""The only file that touches torch's private names, each with its reason.

It is checked with torch 2.11 and 2.13. Every package here that needs such a name gets it from this
file.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing import reductions

from .import_hooks import when_imported

#: An instance of a tensor subclass with shape, dtype and device but no storage: nothing below the
#: function level can read wrong values from it (1 us).
make_wrapper = torch.Tensor._make_wrapper_subclass

#: True if autocast is on for any device type. It is read at every call, and one query is cheaper
#: than one for each type.
any_autocast = torch._C._is_any_autocast_enabled

#: The kernel by which torch reads a number out of a tensor that stands in a number's place among a
#: function's arguments: ``torch.arange(lengths.max())``.
READING_A_NUMBER = torch.ops.aten._local_scalar_dense.default

#: The kernel of ``tensor.set_(source)``: only ``tensor``, not ``source``, can override that.
TAKING_MEMORY = torch.ops.aten.set_.source_Tensor

#: Copies a list of tensors into another one of the same shapes: one call instead of one for each.
copy_all = torch._foreach_copy_

#: (flat, tensors) -> views of a 1-D tensor, one of each tensor's shape. It is one call instead of
#: two for each tensor. torch's own reducers use it.
parts_of = torch._C._nn.unflatten_dense_tensors


def call_after_accumulation(leaf: torch.Tensor) -> None:
    """Call the hooks that torch runs once a gradient has been added to ``leaf.grad``.

    torch runs these hooks at the end of a backward pass only (2.1).
    """
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)


def computed_by(t: torch.Tensor) -> torch.autograd.graph.Node | None:
    """Return the autograd node that computed ``t``, or the base that ``t`` is a view of.

    That node stays in the graph when someone writes to the view. The view's own node does not.
    """
    return (t if t._base is None else t._base).grad_fn


def fake_tensors() -> Any:
    """Return a mode in which tensors have a device but no memory.

    Autocast sees these tensors. It does not see meta tensors, for which torch has public functions.
    """
    from torch._subclasses import fake_tensor

    fake_tensor.log.addFilter(_unrecorded)
    _prepare_fakes()
    return fake_tensor.FakeTensorMode()


@contextlib.contextmanager
def real_among_fake(fake: Any) -> Any:
    """Let tensors with memory meet fake ones inside this context, whose mode is ``fake``.

    Code that uses parameters of its own computes shapes with them.
    """
    before, fake.allow_non_fake_inputs = fake.allow_non_fake_inputs, True
    try:
        yield
    finally:
        fake.allow_non_fake_inputs = before


_preparing = threading.Lock()


@functools.cache
def _prepare_fakes_once() -> None:
    # Fake tensors on a CUDA build where no GPU is visible call this each time they start. In
    # several threads (simulated ranks) it crashes the process (2.11).
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._ensureCUDADeviceGuardSet = lambda: None


def _prepare_fakes() -> None:
    if torch.cuda._is_compiled() and not torch.cuda.is_available():
        with _preparing:
            _prepare_fakes_once()


def _unrecorded(record: logging.LogRecord) -> bool:
    """Return True if a log record may be shown: no recorder is at work.

    Fake tensors log a stack trace for every wrong call, in addition to the error that they raise.
    While a recorder is at work, the error alone is shown.
    """
    return not recording.on


#: True if a tensor is autograd's own zero tensor without memory: it must be cloned before its
#: memory is accessed.
is_zero_tensor = torch.Tensor._is_zerotensor


def queue_backward_callback(function: Any) -> None:
    """Run ``function`` when the current backward pass ends.

    torch's own reducers finish their buckets this way, and there is no public hook.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_kernel(func: object) -> bool:
    """Return True if a function is an operator of the dispatcher (``torch.ops...``).

    Such operators are below the function level.
    """
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def twin_of_kernel(kernel: Any) -> Any:
    """Return the torch function with a kernel's name and arguments, or None if there is none.

    torch's functions are generated from the kernels.
    """
    full = (
        kernel._qualified_op_name
        if isinstance(kernel, torch._ops.OpOverloadPacket)
        else kernel.name()
    )
    space, _, name = full.partition("::")
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
    name = (
        kernel._qualified_op_name
        if isinstance(kernel, torch._ops.OpOverloadPacket)
        else kernel.name()
    )
    return name.partition("::")[0] not in ("aten", "prim", "prims")


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


def default_store() -> Any:
    """Return the store through which the ranks have met.

    torch's public names return groups only.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def new_group(
    ranks: Sequence[int], rank: int, name: str, backend: str, timeout: timedelta
) -> torch.distributed.ProcessGroup:
    """Create a process group by its members alone, under a name they agree on.

    The public function, `dist.new_group(use_local_synchronization=True)`, puts the number of groups
    a process already has into the name. So members with different histories wait for each other for
    ever (seen with torch 2.13).
    """
    c10d: Any = torch.distributed.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        c10d.Backend(backend),
        default_store(),
        name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group  # type: ignore[no-any-return]


def memory_users(t: torch.Tensor) -> int:
    """Return the number of tensors that share the memory of ``t``, itself included.

    torch counts them, and has no public function for it. The query's own reference is subtracted.
    Only tests call this function: nothing here decides by it.
    """
    return int(torch._C._storage_Use_Count(t.untyped_storage()._cdata)) - 1  # type: ignore[attr-defined]


#: A weak reference to a tensor's memory, which shows when the memory has been freed. torch uses it
#: to share memory between processes.
StorageWeakRef = reductions.StorageWeakRef


def storage_key(t: torch.Tensor) -> int:
    """Return the same key for all tensors that share one memory: `StorageWeakRef.cdata` of it.

    While such a reference lives, no other memory has that key.
    """
    return t.untyped_storage()._cdata


def set_timeout(group: torch.distributed.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives.

    Before 2.14 torch has no public function for a group that exists already.
    """
    (
        getattr(torch.distributed, "set_timeout", None)
        or torch.distributed.distributed_c10d._set_pg_timeout
    )(timeout, group)


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of a gloo group's collectives: torch has no public function for it."""
    return group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[no-any-return]


#: Exchanges the C++ objects of two tensors. With an assignment to ``__class__`` a plain parameter
#: becomes a global one and stays the same object. The public torch.utils.swap_tensors does both.
#: But it refuses where anybody has a weak reference to either tensor, as optimizers, averages of
#: weights and recurrent layers do.
swap_impl = torch._C._swap_tensor_impl


def wrap_module_identity(around: Any) -> None:
    """Call ``around(apply, *tensors)`` in place of the identity of a module's full backward hooks.

    torch puts that identity around such a module. The identity is a custom Function, applied to the
    tensors that the module is called with, and no tensor can override it.
    """
    identity = torch.nn.modules._functions.BackwardHookFunction
    identity.apply = staticmethod(functools.partial(around, identity.apply))  # type: ignore[assignment]


def dual_functions() -> list[Any]:
    """Return the functions that make and unpack a dual tensor of forward-mode AD.

    torch.autograd.forward_ad and torch.func.jvp call them.
    """
    return [torch._make_dual, torch._unpack_dual]


def vmap_functions() -> list[Any]:
    """Return the functions by which torch's older vmap marks the batch dim of a tensor."""
    return [torch._add_batch_dim, torch._remove_batch_dim]


def unobserved() -> Any:
    """Return a context inside which the dispatch modes of others see no op.

    A selective checkpoint counts ops. Ops whose result is cached (a plan, a gathered parameter)
    must not count: they do not run again when the checkpoint runs the forward pass again. Under
    fake tensors the context changes nothing, because there the modes do the computing.
    """
    from torch.utils import _python_dispatch as modes

    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return (
        modes._disable_current_modes()
        if fake is None and torch._C._len_torch_dispatch_stack()
        else contextlib.nullcontext()
    )


def wrap_checkpoint_inputs(taken: Any, given: Any) -> None:
    """Call ``taken`` and ``given`` where a checkpoint saves and returns its inputs.

    ``taken(inputs) -> (what is saved, note)``, ``given(what was saved, note) -> inputs``. A
    checkpoint saves its inputs as autograd saves tensors, so that an outer checkpoint may drop them
    and compute them again. In a tensor without storage autograd sees no graph.
    """
    from torch.utils.checkpoint import _CheckpointFrame as Frame

    save, get = getattr(Frame, "save_inputs", None), getattr(Frame, "get_inputs", None)
    if save is None or get is None:
        _wrap_older_checkpoint_inputs(taken, given)
        return

    def save_inputs(frame: Any, *inputs: Any) -> None:
        parts, frame.note = taken(inputs)
        save(frame, *parts)

    Frame.save_inputs, Frame.get_inputs = save_inputs, lambda frame: given(get(frame), frame.note)  # type: ignore[method-assign]


def _wrap_older_checkpoint_inputs(taken: Any, given: Any) -> None:
    """Do the same for torch 2.11, which saves the inputs through a custom Function.

    The node of that Function returns them.
    """
    from torch.utils.checkpoint import _NoopSaveInputs as Saver  # type: ignore[attr-defined]

    save = Saver.apply

    def apply(*inputs: Any) -> Any:
        parts, note = taken(inputs)
        saved = save(*parts)
        if (node := saved.grad_fn) is not None:
            # The first entry is there so that one of them is a tensor. It does not come back.
            get, dummy = (
                node.get_args,
                note[0],
            )
            assert dummy is None
            node.get_args = lambda tensors: given(get(tensors), note[1:])
        return saved

    Saver.apply = staticmethod(apply)


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
    found = {}
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
                found[getattr(torch, name)] = lists
    return found


def watched_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if other code hooks an optimizer's step.

    Such hooks are the optimizer's own, or those of all optimizers except this library's.
    """
    hooks = sys.modules["torch.optim.optimizer"]
    others = (
        len(hooks._global_optimizer_pre_hooks) > 1 or len(hooks._global_optimizer_post_hooks) > 1
    )
    return others or bool(
        optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    )


class _Unbuilt(str):
    """The name of the MPI backend in torch, which torch's wheels are built without.

    It equals only the value that `Backend()` accepts for "no name given".
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other is torch.distributed.Backend.UNDEFINED

    def __ne__(self, other: object) -> bool:
        return not self == other


def register_mpi(create: Any) -> None:
    """Make ``create`` build the process groups of the backend "mpi".

    torch compares every backend with `Backend.MPI` and has a path of its own for it. That path has
    no store, no timeout and no groups made by their members alone. It raises an error where torch
    was built without MPI. Registered backends have all of these. So that name is removed from the
    comparison. Where torch has its own MPI, this backend replaces it.
    """
    torch.distributed.Backend.register_backend(
        "mpi", create, extended_api=True, devices=["cpu", "cuda"]
    )
    torch.distributed.Backend.MPI = _Unbuilt("mpi")


class _RecordingState(threading.local):
    on = False
    looks = False


#: ``on``: this thread captures a graph (set by graph/capture/capture.py). ``looks``: any mode of
#: this library is active, the one of _ops/rank_guard.py included.
recording = _RecordingState()


def function_mode_on() -> bool:
    """Return True if a recorder's torch-function mode is active.

    `torch.overrides` makes the same check in C before it calls a mode. Users' modes see what they
    always saw.
    """
    return recording.on and torch._C._is_torch_function_mode_enabled()


def looked_at() -> bool:
    """Return True if any torch-function mode of this library is active."""
    return recording.looks and torch._C._is_torch_function_mode_enabled()


def without_function_modes() -> Any:
    """Return a context inside which no torch-function mode sees the calls.

    torch's public switch turns off subclasses only.
    """
    return torch._C.DisableTorchFunction()


def data_dependence() -> tuple[type[Exception], ...]:
    """Return the errors that fake tensors raise where an op needs values.

    One of them is for shapes that depend on values.
    """
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )


def is_fake(t: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def fakes_are_on() -> bool:
    """Return True if fake tensors are on: torch has no public function for it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def processes_are_on() -> bool:
    """Return True if this process belongs to a job of several."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def is_functional(t: torch.Tensor) -> bool:
    """Return True if a tensor wraps another one in torch.func.functionalize.

    That transform removes writes from a program. The tensor's class does not show it.
    """
    return torch._is_functional_tensor(t)


@contextlib.contextmanager
def real_tensors() -> Any:
    """Make tensors with memory inside this context, unseen by any mode that is on outside.

    A recorder needs it for values that it needs at once.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with without_function_modes(), unset_fake_temporarily():
        yield


@contextlib.contextmanager
def outside_all_modes() -> Any:
    """Run calls on real tensors inside this context, unseen by function and dispatch modes."""
    with without_function_modes(), unobserved(), real_tensors():
        yield


_tracing = [0]  # number of threads that trace: ranks may be threads
_tracing_lock = threading.Lock()
_validating = [True]  # whether distributions validate their arguments outside `tracing`


@contextlib.contextmanager
def tracing() -> Any:
    """Make `torch.compiler.is_compiling()` return True inside this context.

    By it models know that they are being traced, and do not look into their data. Distributions do
    not look into theirs either.
    """
    import torch.compiler as compiler

    checked = torch.distributions.Distribution
    with _tracing_lock:
        if not _tracing[0]:
            _validating[0] = checked._validate_args
            checked.set_default_validate_args(False)
        _tracing[0] += 1
        compiler._is_compiling_flag = True
    try:
        yield
    finally:
        with _tracing_lock:
            _tracing[0] -= 1
            compiler._is_compiling_flag = _tracing[0] > 0
            if not _tracing[0]:
                checked.set_default_validate_args(_validating[0])


#: Returns the innermost active transform of torch.func (vmap, grad), or None. The tensors of such a
#: transform wrap others, and there is no public function to ask.
innermost_transform = torch._C._functorch.peek_interpreter_stack


#: Code by which torch's transformer layers check whether a mask is causal (torch 2.0). Given a mask
#: and no is_causal, they read its values, for a kernel for causal masks. A static graph has no
#: values, and no public function stands between that check and the layers.
CAUSAL_CHECK: CodeType | None = getattr(
    getattr(torch.nn.modules.transformer, "_detect_is_causal_mask", None), "__code__", None
)


def watch_checkpoints(region: Any) -> None:
    """Run the functions of torch.utils.checkpoint inside ``region()`` where that returns a context.

    There a checkpoint does nothing else. Where ``region()`` returns None, checkpoints are as torch
    made them. Models have imported the function `checkpoint` under names of their own. From there a
    call follows one of these two paths.
    """
    import torch.utils.checkpoint as home

    name = "_checkpoint_without_reentrant_generator"
    # Since torch 2.14, with the arguments as a tuple and a dict.
    name += "_impl" if hasattr(home, f"{name}_impl") else ""
    original, reentrant = getattr(home, name), home.CheckpointFunction

    def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        inside = region()
        if inside is None:
            yield from original(function, *args, **kwargs)
        else:
            with inside:
                yield

    def apply(function: Any, preserve: Any, *args: Any) -> Any:
        inside = region()
        if inside is None:
            return super(reentrant, reentrant).apply(function, preserve, *args)  # type: ignore[misc]
        with inside:
            return function(*args)

    setattr(home, name, generator)
    reentrant.apply = staticmethod(apply)  # type: ignore[assignment,method-assign]


#: True if a parameter may adopt another tensor's data as its ``.data``. Modules that are cast or
#: moved check it (torch 1.3).
may_take_data = torch._has_compatible_shallow_copy_type


def refresh_weights(module: torch.nn.Module) -> None:
    """Rebuild a recurrent layer's list of weights after its parameters were replaced.

    Such a layer keeps its weights in a list as well as in its parameters, with weak references by
    which it recognizes them. The layer rebuilds list and references itself in forward the same way
    (torch 2.11: `RNNBase._init_flat_weights`).
    """
    if isinstance(module, torch.nn.RNNBase):
        module._init_flat_weights()


#: The common base of batch norms of 1, 2 and 3 dims and their lazy kinds. It has no public name.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm


def check_input(norm: BatchNorm, x: torch.Tensor) -> None:
    """Raise ValueError where an input does not have the number of dims that a batch norm expects.

    A batch norm's forward makes this check first.
    """
    norm._check_input_dim(x)


def wrap_associative_scan(around: Any) -> None:
    """Call ``around(associative_scan, ...)`` in place of torch's scan with a user's function.

    torch's scan is a prototype without a public name yet (torch 2.9). Models import it where they
    call it. If the scan has moved to another module, it stays as it is.
    """
    import importlib

    with contextlib.suppress(ImportError, AttributeError):
        home: Any = importlib.import_module("torch._higher_order_ops.associative_scan")
        home.associative_scan = torch._higher_order_ops.associative_scan = functools.partial(
            around, home.associative_scan
        )


def wrap_gathered_states(whole: Any) -> None:
    """Call ``whole(value, ranks)`` for each value of a state dict that is gathered in full.

    torch.distributed.checkpoint.state_dict gathers it (full_state_dict=True) on these ranks, or on
    all where ``ranks`` is empty. That function recognizes by class what to gather, and treats any
    other tensor as a full one (torch 2.2).
    """

    def change(home: Any) -> None:
        iterate, as_it_is = home._iterate_state_dict, home._identity_func

        def gathering(value: Any, sharded: Any, in_parts: Any, plain: Any, **options: Any) -> Any:
            value = (
                whole(value, options.get("ranks_only", ()))
                if plain is as_it_is and in_parts is not as_it_is
                else value
            )
            return iterate(value, sharded, in_parts, plain, **options)

        home._iterate_state_dict = gathering

    when_imported("torch.distributed._state_dict_utils", change)


def wrap_staged_states(staged: Any) -> None:
    """Call ``staged(copy, x)`` in place of the copy to the CPU in async_save.

    torch.distributed.checkpoint.async_save copies a tensor by its storage (torch 2.9).
    """

    def change(home: Any) -> None:
        def offload(self: Any, x: Any, memo: Any, **options: Any) -> Any:
            return staged(lambda t: original(self, t, memo, **options), x)

        # in torch versions without that method, the new attribute is never called
        stager = home.StateDictStager
        original, stager._offload_tensor = getattr(stager, "_offload_tensor", None), offload

    when_imported("torch.distributed.checkpoint._state_dict_stager", change)


def wrap_flex_attention(around: Any, refused: Any) -> None:
    """Call ``around(flex_attention, ...)`` in place of torch's function.

    torch's function cannot be overridden. Code that imported the function before calls ``refused(q,
    k, v)``.
    """

    def change(home: Any) -> None:
        original, check = home.flex_attention, home._validate_sdpa_input
        home.flex_attention = functools.wraps(original)(functools.partial(around, original))
        home._validate_sdpa_input = lambda *args, **kwargs: (
            refused(*args[:3]) or check(*args, **kwargs)
        )

    when_imported("torch.nn.attention.flex_attention", change)


class _Data(property):
    """The attribute ``data`` of torch.Tensor with a check before it is set.

    Recorders read its name (properties have one since Python 3.13).
    """

    __name__ = "data"


def guard_data(check: Any) -> None:
    """Run ``check(tensor, value)`` before ``tensor.data = value``.

    For that assignment torch lets only ``tensor`` override, never ``value``. It adopts the value's
    memory, which a tensor without storage doesn't have. The attribute is still read in C, under the
    name that its descriptor gets here.
    """
    descriptor = torch._C.TensorBase.data
    take = descriptor.__set__

    def set_data(tensor: torch.Tensor, value: Any) -> None:
        check(tensor, value)
        take(tensor, value)

    torch.Tensor._data_in_c = descriptor  # type: ignore[attr-defined]
    torch.Tensor.data = _Data(
        operator.attrgetter("_data_in_c"), set_data, descriptor.__delete__, doc=descriptor.__doc__
    )  # type: ignore[assignment, misc]


def wrap_dlpack(held: Any) -> None:
    """Export ``held(tensor)`` in place of the tensor passed to torch's exporters to DLPack.

    These exporters read the tensor's memory, and no tensor can override them.
    """
    for home, name in (
        (torch._C, "_to_dlpack"),
        (torch._C, "_to_dlpack_versioned"),
        (torch, "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
    ):
        export = getattr(home, name, None)
        if export is not None:
            setattr(home, name, _exporting(export, held))


def _exporting(export: Any, held: Any) -> Any:
    @functools.wraps(export)
    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return export(held(tensor), *args, **kwargs)

    return run


def before_collectives(
    reads: Mapping[str, str], noted: Mapping[Any, Any], check: Callable[[str, Any, Any, Any], None]
) -> None:
    """Call ``check(name, argument, op, group)`` before collectives of torch.distributed.

    ``reads``: name of the collective -> the argument that it reads, which ``check`` gets. The check
    runs only while ``noted`` is not empty. These functions accept plain tensors, so no other hook
    sees them. Names that were imported from torch.distributed before this call keep the originals.
    """

    def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters
        usual = {n: p.default for n, p in parameters.items()}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Otherwise do not even read the arguments: that takes a tenth of a small collective.
            if noted:
                given = usual | dict(zip(parameters, args, strict=False)) | kwargs
                check(name, given.get(reads[name]), given.get("op"), given.get("group"))
            return function(*args, **kwargs)

        return call

    for name in reads:
        original = getattr(torch.distributed, name)
        wrapped = checked(name, original)
        for home in (torch.distributed, torch.distributed.distributed_c10d):
            if getattr(home, name, None) is original:
                setattr(home, name, wrapped)


@contextlib.contextmanager
def uncompiled_backward() -> Any:
    """Run a backward pass in this thread and uncompiled inside this context.

    Compiled autograd, a private switch of the compiler's, would not run the hooks of leaves.
    """
    home = sys.modules.get("torch._dynamo.compiled_autograd")
    with (
        torch.autograd.set_multithreading_enabled(False),
        contextlib.nullcontext() if home is None else home._disable(),
    ):
        yield


def compiles_backward() -> bool:
    """Return True if compiled autograd is on."""
    home = sys.modules.get("torch._dynamo.compiled_autograd")
    return home is not None and home.compiled_autograd_enabled


class _Uncompiled(threading.local):
    # True if this thread has just run uncompiled a function that was to be compiled with
    # fullgraph=True
    whole = False


_uncompiled = _Uncompiled()


def watch_compiler(left: Any, meets: Any, met: Any, tell: Any, refusal: str) -> None:
    """Ask before and while torch.compile traces a function.

    There is no public way to keep the compiler away from a kind of tensors (checked with torch
    2.13).

    ``left(code, variables, outside)``: return True if a function is to run uncompiled, with all
    that it calls. ``meets(value)``: return True if the tracer must not handle this value.
    ``met(code)``: return True if the tracer met such a value in the code that it has just traced.
    ``tell(whole)`` is called before a function runs uncompiled. ``whole``: its caller wants all of
    it compiled, or an error. ``refusal``: the tracer's message, which torch.export shows.
    """

    def ask_before(home: Any) -> None:
        from torch._dynamo import types

        action, convert = types.FrameAction, home.CatchErrorsWrapper.__call__
        eagerly = types.ConvertFrameReturn(
            frame_exec_strategy=types.FrameExecStrategy(action.SKIP, action.SKIP),
            apply_to_code=False,
        )

        def call(self: Any, frame: Any, *args: Any) -> Any:
            code = frame.f_code
            if not left(code, frame.f_locals, frame.f_globals):
                met(code)  # clear what a failed trace left
                try:
                    out = convert(self, frame, *args)
                except Exception:
                    if not met(code):
                        raise
                else:
                    if not met(code):
                        return out
            whole = isinstance(self._torchdynamo_orig_backend, home.ConvertFrameAssert)
            tell(whole)
            _uncompiled.whole = whole
            return eagerly

        home.CatchErrorsWrapper.__call__ = call

    def ask_after(home: Any) -> None:
        # By it a call with fullgraph=True checks whether anything was compiled (2.13).
        count = getattr(home, "set_fullgraph_compiled_frame_count", None)

        def counted(n: int) -> int:
            found, left = count(n), _uncompiled.whole
            _uncompiled.whole = False
            return 1 if n < 0 and left else found

        if count is not None:
            home.set_fullgraph_compiled_frame_count = counted

    def ask_within(home: Any) -> None:
        from torch._dynamo.exc import Unsupported

        build = home.VariableBuilder.__call__

        def call(self: Any, value: Any) -> Any:
            if meets(value):
                raise Unsupported(refusal, skip_frame=True)
            return build(self, value)

        home.VariableBuilder.__call__ = call

    when_imported("torch._dynamo.eval_frame", ask_after)
    when_imported("torch._dynamo.convert_frame", ask_before)
    when_imported("torch._dynamo.variables.builder", ask_within)
