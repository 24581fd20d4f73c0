"""The table of every change to code that is not this library's: torch's, Python's and others'.

Each row names the target, the reason and the oldest version. The module that needs a replacement
defines it and calls `patch`. ``globaltensor doctor --patches`` prints the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .import_hooks import when_imported

__all__ = ["TABLE", "Patch", "Status", "current", "patch", "status", "undo"]


class Patch(NamedTuple):
    """One name of another library that this library replaces or adds.

    ``target``: the module, a colon, and the name in it, as in an entry point. ``since``: the oldest
    version of that library that the patch supports.
    """

    target: str
    since: str
    reason: str


def _method_patches(*names: str) -> tuple[Patch, ...]:
    reason = "a method of all tensors: on a plain tensor it returns a result or raises an error"
    return tuple(Patch(f"torch:Tensor.{name}", "torch 2.11", reason) for name in names)


_COUNTED_TWICE = "refuses to add up what is already the sum over ranks (a global tensor's number)"
_UNSEEN = (
    "reads a tensor's memory, and no tensor can override it: returns the local tensor, or refuses"
)
_SAVER_OF_ONE_RANK = "writes a file on one rank alone: refuses tensors of which others have shards"
_SAVER = "writes a file from a tensor's memory: refuses tensors of which this rank has a shard"

#: All patches, in order of the libraries and modules they change.
TABLE: tuple[Patch, ...] = (
    # --- tensors
    *_method_patches(
        "to_global",
        "local_to_global",
        "to_local",
        "is_global",
        "is_local",
        "is_lazy",
        "is_consistent",
        "to_consistent",
        "placement",
        "sbp",
        "global_id",
        "check_meta_consistency",
    ),
    Patch(
        "torch:Tensor.data",
        "torch 2.11",
        "x.data = global: torch lets only x override, and adopts memory that a global tensor lacks",
    ),
    Patch("torch:Tensor._data_in_c", "torch 2.11", "the attribute `data` as it was, still in C"),
    Patch("torch._C:_to_dlpack", "torch 2.11", _UNSEEN),
    Patch("torch._C:_to_dlpack_versioned", "torch 2.11", _UNSEEN),
    Patch("torch:to_dlpack", "torch 2.11", _UNSEEN),
    Patch("torch.utils.dlpack:to_dlpack", "torch 2.11", _UNSEEN),
    Patch(
        "torch.utils:swap_tensors",
        "torch 2.11",
        "checks no override; says why a global tensor and a plain one cannot be exchanged",
    ),
    # --- autograd
    Patch(
        "torch.autograd:Function.apply",
        "torch 2.11",
        "custom Functions take global tensors: they run on local ones as a kernel does",
    ),
    Patch(
        "torch.nn.modules._functions:BackwardHookFunction.apply",
        "torch 2.11",
        "the identity that full backward hooks put around a module is applied to local tensors",
    ),
    Patch(
        "torch.utils.checkpoint:_CheckpointFrame.save_inputs",
        "torch 2.13",
        "a checkpoint saves its inputs as autograd saves tensors; global ones have no storage",
    ),
    Patch(
        "torch.utils.checkpoint:_CheckpointFrame.get_inputs",
        "torch 2.13",
        "returns a checkpoint's inputs as the global tensors that were saved",
    ),
    Patch(
        "torch.utils.checkpoint:_NoopSaveInputs.apply",
        "torch 2.11",
        "the same for the older form, in which a custom Function saves the inputs",
    ),
    Patch(
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
        "torch 2.11",
        "a captured graph treats a checkpoint as a region to recompute",
    ),
    Patch(
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl",
        "torch 2.14",
        "the same, under the name of newer versions",
    ),
    Patch(
        "torch.utils.checkpoint:CheckpointFunction.apply",
        "torch 2.11",
        "the same for reentrant checkpoints",
    ),
    # --- modules and optimizers
    Patch("torch.nn:Module.to_global", "torch 2.11", "module.to_global(placement, sbp)"),
    Patch("torch.nn:Module.to_local", "torch 2.11", "module.to_local()"),
    Patch(
        "torch.nn:Parameter.__new__",
        "torch 2.11",
        "a view that needs communication is of another class than the parameter made of it",
    ),
    Patch(
        "torch.nn:Module.to",
        "torch 2.11",
        "module.to(x) asks x for its device below Python, where a global tensor has none",
    ),
    Patch(
        "torch.nn:Module.load_state_dict",
        "torch 2.11",
        "the ranks first compare the names that they load into global tensors",
    ),
    Patch(
        "torch.nn:Module._load_from_state_dict",
        "torch 2.11",
        "an error that concerns other ranks comes out, not as text in a RuntimeError of torch",
    ),
    Patch(
        "torch.nn:Module.zero_grad",
        "torch 2.11",
        "clears gradients without reading them: reading would reduce pending ones",
    ),
    Patch("torch.optim:Optimizer.zero_grad", "torch 2.11", "the same for an optimizer's"),
    Patch(
        "torch.optim:Optimizer.load_state_dict",
        "torch 2.11",
        "boxes full state to the layout of its parameter",
    ),
    Patch(
        "torch.nn:SyncBatchNorm.forward",
        "torch 2.11",
        "reads the input's device and calls its own collectives; a global batch needs neither",
    ),
    # --- functions that check no override
    Patch(
        "torch._higher_order_ops.associative_scan:associative_scan",
        "torch 2.11",
        "torch's scan with a user's function checks no override",
    ),
    Patch("torch._higher_order_ops:associative_scan", "torch 2.11", "its name in the package"),
    Patch(
        "torch._higher_order_ops.cond:CondOp.__call__",
        "torch 2.11",
        "refuses operands in dicts and lists before it asks for overrides",
    ),
    Patch(
        "torch.distributions.von_mises:_rejection_sample",
        "torch 2.11",
        "begins with memory that torch has not written, which differs between ranks",
    ),
    Patch(
        "torch.nn.attention.flex_attention:flex_attention",
        "torch 2.11",
        "checks no override; runs by this library's rule on global tensors",
    ),
    Patch(
        "torch.nn.attention.flex_attention:_validate_sdpa_input",
        "torch 2.11",
        "refuses global tensors where a program had imported the function before",
    ),
    # --- torch.distributed
    Patch(
        "torch.distributed:Backend.MPI",
        "torch 2.11",
        "torch has a path of its own for the name mpi, without store, timeout or local groups",
    ),
    *(
        Patch(
            f"{home}:init_process_group",
            "torch 2.11",
            "a script may still call it when this library has connected the ranks",
        )
        for home in ("torch.distributed", "torch.distributed.distributed_c10d")
    ),
    *(
        Patch(
            f"{home}:destroy_process_group",
            "torch 2.11",
            "the processes that a rank starts after it may be ranks themselves",
        )
        for home in ("torch.distributed", "torch.distributed.distributed_c10d")
    ),
    *(
        Patch(f"{home}:{name}", "torch 2.11", "ranks that wait for each other would wait for long")
        for name in (
            "barrier",
            "monitored_barrier",
            "new_group",
            "broadcast",
            "scatter",
            "all_to_all",
            "all_to_all_single",
        )
        for home in ("torch.distributed", "torch.distributed.distributed_c10d")
    ),
    # All of these are patched for the reason of the barriers too.
    *(
        Patch(f"{home}:{name}", "torch 2.11", _COUNTED_TWICE)
        for name in (
            "all_reduce",
            "reduce",
            "all_gather",
            "all_gather_into_tensor",
            "gather",
            "reduce_scatter",
            "reduce_scatter_tensor",
        )
        for home in ("torch.distributed", "torch.distributed.distributed_c10d")
    ),
    *(
        Patch(f"{home}:{name}", since, _COUNTED_TWICE)
        for name, since in (
            ("all_gather_single", "torch 2.13"),
            ("reduce_scatter_single", "torch 2.13"),
            ("gather_into_tensor", "torch 2.14"),
            ("gather_single", "torch 2.14"),
        )
        for home in ("torch.distributed", "torch.distributed.distributed_c10d")
    ),
    Patch(
        "torch.distributed._state_dict_utils:_iterate_state_dict",
        "torch 2.11",
        "full_state_dict=True recognizes by class what to gather",
    ),
    Patch(
        "torch.distributed.checkpoint._state_dict_stager:StateDictStager._offload_tensor",
        "torch 2.11",
        "async_save copies a tensor by its storage, which a global tensor lacks",
    ),
    Patch(
        "torch.distributed.checkpoint.default_planner:DefaultSavePlanner.create_global_plan",
        "torch 2.11",
        "refuses a checkpoint that lacks shards: one rank alone (no_dist=True) has only its own",
    ),
    Patch(
        "torch.distributed.checkpoint.default_planner:create_default_local_load_plan",
        "torch 2.11",
        "refuses to load from a checkpoint that lacks shards of a tensor",
    ),
    # --- the compiler and fake tensors
    Patch(
        "torch._dynamo.convert_frame:CatchErrorsWrapper.__call__",
        "torch 2.11",
        "keeps torch.compile away from code on global tensors outside nn.Graph",
    ),
    Patch(
        "torch._dynamo.variables.builder:VariableBuilder.__call__",
        "torch 2.11",
        "ends a trace that meets a global tensor",
    ),
    Patch(
        "torch._dynamo.eval_frame:set_fullgraph_compiled_frame_count",
        "torch 2.13",
        "fullgraph=True counts a frame that was left uncompiled on purpose",
    ),
    Patch(
        "torch._C:_ensureCUDADeviceGuardSet",
        "torch 2.11",
        "crashes the process when several threads start fake tensors and no GPU is visible",
    ),
    *(
        Patch(f"torch.jit:{name}", "torch 2.11", "refuses global tensors, by a message")
        for name in ("trace", "trace_module", "_get_trace_graph", "script")
    ),
    *(
        Patch(f"torch._C:{name}.__call__", "torch 2.11", "refuses global tensors, by a message")
        for name in ("ScriptFunction", "ScriptMethod")
    ),
    Patch(
        "torch.fx.experimental.proxy_tensor:make_fx",
        "torch 2.11",
        "refuses global tensors, whose values would become constants of the graph",
    ),
    Patch(
        "torch._functorch.aot_autograd:process_inputs",
        "torch 2.11",
        "refuses global tensors: the graph would hold the moves of the first call's layouts",
    ),
    # --- Python and other libraries
    Patch(
        "sys:excepthook",
        "Python 3.10",
        "errors of this library show the user's frames only; MPI learns that its process failed",
    ),
    Patch(
        "logging:Handler.handleError",
        "Python 3.10",
        "errors of this library in a log call, which logging prints, show the user's frames only",
    ),
    Patch("safetensors.torch:_flatten", "safetensors 0.4", _SAVER),
    Patch("safetensors.torch:_flatten_as_ptr", "safetensors 0.6", _SAVER),
    Patch("safetensors.torch:save_model", "safetensors 0.4", _SAVER),
    Patch("transformers.modeling_utils:PreTrainedModel.save_pretrained", "transformers 4", _SAVER),
    Patch("peft.peft_model:PeftModel.save_pretrained", "peft 0.10", _SAVER),
    Patch("accelerate.accelerator:Accelerator.save_model", "accelerate 1", _SAVER),
    *(
        Patch(f"accelerate.{home}:save", "accelerate 1", _SAVER_OF_ONE_RANK)
        for home in ("utils.other", "utils", "checkpointing", "accelerator")
    ),
    *(
        Patch(target, "transformers 4, accelerate 1", "trains a model of global tensors, unwrapped")
        for target in (
            "accelerate.accelerator:Accelerator.prepare_model",
            *(
                f"transformers.trainer:Trainer.{name}"
                for name in (
                    "_prepare_inputs",
                    "_get_num_items_in_batch",
                    "compute_loss",
                    "training_step",
                    "prediction_step",
                    "_save",
                    "_save_optimizer_and_scheduler",
                )
            ),
        )
    ),
    Patch(
        "torchmetrics.metric:Metric._wrap_update",
        "torchmetrics 1",
        "notes whether a metric was fed global tensors",
    ),
    Patch(
        "torchmetrics.metric:Metric.sync",
        "torchmetrics 1",
        "counts of global tensors are those of the global batch: they are not added again",
    ),
)

_ROWS = {row.target: row for row in TABLE}
_ABSENT = object()
#: target -> (the object that has the name, the name, its own value before or `_ABSENT`)
_applied: dict[str, tuple[Any, str, Any]] = {}
_waiting: set[str] = set()


class Status(NamedTuple):
    """A row of the table, and the state of its patch in this process.

    ``state``: "applied", "waits for import", or "unused". Unused is a patch that this process does
    not need, or whose target this version of the library lacks.
    """

    row: Patch
    state: str


def patch(target: str, replace: Callable[[Any], Any], *, missing: bool = False) -> None:
    """Put ``replace(value)`` in place of the value that ``target`` names, now or at its import.

    If that version of the library has no such name, nothing changes. With ``missing`` the name is
    then added, and ``replace`` gets None. A module that is not imported yet is patched right after
    its import. A second patch of a target gets the value that the first one put there, so that it
    can wrap that value.

    ``target``: the target of a row of `TABLE`. Raises KeyError for any other.
    """
    row = _ROWS[target]
    module, _, path = row.target.partition(":")
    *holders, name = path.split(".")

    def change(home: Any) -> None:
        _waiting.discard(target)
        for holder in holders:
            home = getattr(home, holder, None)
        before = getattr(home, name, _ABSENT) if home is not None else _ABSENT
        if home is None or (before is _ABSENT and not missing):
            return
        own = vars(home).get(name, _ABSENT)
        setattr(home, name, replace(None if before is _ABSENT else before))
        _applied.setdefault(target, (home, name, own))

    _waiting.add(target)
    when_imported(module, change)


def undo(target: str | None = None) -> None:
    """Restore what ``target`` named before its first patch; without ``target``, undo all patches.

    A patch that waits for the import of its module is not undone. Raises KeyError for a target that
    is not patched.
    """
    for each in reversed(list(_applied)) if target is None else [target]:
        home, name, own = _applied.pop(each)
        if own is _ABSENT:
            delattr(home, name)
        else:
            setattr(home, name, own)


def current(target: str) -> Any:
    """Return the value at ``target`` if this library has patched it, else None."""
    if target not in _applied:
        return None
    home, name, _ = _applied[target]
    return getattr(home, name, None)


def status() -> list[Status]:
    """Return every row of the table with its state in this process."""
    return [
        Status(
            row,
            "applied"
            if row.target in _applied
            else "waits for import"
            if row.target in _waiting and row.target.partition(":")[0] not in sys.modules
            else "unused",
        )
        for row in TABLE
    ]
