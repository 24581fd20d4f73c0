"""Functions of other libraries that write a model's file: they read the memory of its tensors, so
they refuse tensors that lie in parts.

safetensors reads it by ctypes, where an error would get another class. transformers and accelerate
go on to it on the first rank alone: they are asked before, so that every rank that calls gets the
same error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .._base.import_hooks import when_imported
from .storage import refuse_parts

__all__ = ["install"]


def _before(home: Any, name: str, check: Callable[..., None]) -> None:
    """Let ``check`` run, with the same arguments, before a function or method; where that is gone,
    nothing changes."""
    function = getattr(home, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(home, name, run)


def _check_tensors(tensors: Any, *args: Any, **kwargs: Any) -> None:
    refuse_parts("safetensors", tensors.values() if isinstance(tensors, dict) else ())


def _check_module(model: Any, *args: Any, **kwargs: Any) -> None:
    refuse_parts("safetensors", model.state_dict().values())


def _check_pretrained(
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Of a model with adapters the adapters alone are written; and transformers has its own ways
    for models that it has split itself."""
    config = getattr(model, "config", None)
    if not (
        getattr(model, "_hf_peft_config_loaded", False)
        or getattr(config, "distributed_config", None)
        or kwargs.get("distributed_checkpoint")
    ):
        refuse_parts(
            "save_pretrained()", (model.state_dict() if state_dict is None else state_dict).values()
        )


def _check_model(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("safe_serialization", args[2] if len(args) > 2 else True):
        refuse_parts("Accelerator.save_model()", model.state_dict().values())


def _guard_safetensors(home: Any) -> None:
    _before(home, "save_model", _check_module)
    for name in (
        "_flatten_as_ptr",
        "_flatten",
    ):  # looked up when its public functions are called, which others may have taken by name before
        _before(home, name, _check_tensors)


def install() -> None:
    when_imported("safetensors.torch", _guard_safetensors)
    when_imported(
        "transformers.modeling_utils",
        lambda home: _before(home.PreTrainedModel, "save_pretrained", _check_pretrained),
    )
    when_imported(
        "accelerate.accelerator", lambda home: _before(home.Accelerator, "save_model", _check_model)
    )
