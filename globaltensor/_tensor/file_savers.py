"""Guards of other libraries' functions that write a model's file.

They read the memory of a model's tensors, so they refuse sharded tensors. The package calls
`install` at import.

safetensors reads the memory by ctypes, where an error would get another class. transformers, peft
and accelerate call it on the first rank alone. They are guarded before that, so that every rank
that calls gets the same error.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from .._base.patches import patch
from .._base.pytree import tensors_in
from .storage import refuse_parts

__all__ = ["install"]


def _check_before(target: str, check: Callable[..., None]) -> None:
    """Call ``check`` with the same arguments before a function or method."""

    def checking(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    patch(target, checking)


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
    """Check a model before save_pretrained.

    For a model with adapters only the adapters are written. transformers has its own paths for
    models that it has split itself.
    """
    config = getattr(model, "config", None)
    if getattr(config, "distributed_config", None) or kwargs.get("distributed_checkpoint"):
        return
    if getattr(model, "_hf_peft_config_loaded", False):
        state_dict = model.get_adapter_state_dict(state_dict=state_dict)
    elif state_dict is None:
        state_dict = model.state_dict()
    refuse_parts("save_pretrained()", state_dict.values())


def _check_adapters(
    model: Any,
    save_directory: Any,
    safe_serialization: bool = True,
    selected_adapters: Any = None,
    save_embedding_layers: Any = "auto",
    *args: Any,
    **kwargs: Any,
) -> None:
    """Check the adapters of a peft model before its save_pretrained.

    Without safetensors, peft writes the adapters by torch.save, whose files identify their shards.
    """
    if safe_serialization:
        get_peft_model_state_dict = importlib.import_module("peft").get_peft_model_state_dict
        for name in selected_adapters or model.peft_config:
            adapters = get_peft_model_state_dict(
                model,
                state_dict=kwargs.get("state_dict"),
                adapter_name=name,
                save_embedding_layers=save_embedding_layers,
            )
            refuse_parts("save_pretrained()", adapters.values())


def _check_model(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Check a model before accelerate writes it, which it does on one rank of each node or of all.

    So also torch.save would write a file without the shards of other ranks.
    """
    refuse_parts("Accelerator.save_model()", model.state_dict().values())


def _check_object(obj: Any, *args: Any, **kwargs: Any) -> None:
    """Check the tensors of an object, such as an optimizer's state, in the same way."""
    refuse_parts("accelerate's save()", tensors_in(obj, []))


def install() -> None:
    _check_before("safetensors.torch:save_model", _check_module)
    # These two are looked up when safetensors' public functions run, which others may have imported
    # before.
    _check_before("safetensors.torch:_flatten_as_ptr", _check_tensors)
    _check_before("safetensors.torch:_flatten", _check_tensors)
    _check_before("transformers.modeling_utils:PreTrainedModel.save_pretrained", _check_pretrained)
    _check_before("peft.peft_model:PeftModel.save_pretrained", _check_adapters)
    _check_before("accelerate.accelerator:Accelerator.save_model", _check_model)
    # The other modules have the name from the first, in the form that it had at their import.
    for home in ("utils.other", "utils", "checkpointing", "accelerator"):
        _check_before(f"accelerate.{home}:save", _check_object)
