"""A transparent wrapper around a module, for DistributedDataParallel.

It has the module's own attributes, and the module's own keys in state dicts."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Transparent"]


class Transparent(nn.Module):
    """A wrapper around ``module`` that forwards attributes which it does not have itself.

    ``state_dict()`` has no prefix ``module.``. ``load_state_dict`` accepts keys with and without
    it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None:
                raise
            return getattr(inner, name)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state as torch does, from keys with or without the prefix ``module.``."""
        taken = type(state_dict)(state_dict)
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            taken._metadata = {
                f"module.{name}".rstrip("."): entry for name, entry in metadata.items()
            } | metadata
        return super().load_state_dict(taken, strict, assign)


def _without_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Rename keys of a new state dict from ``prefix.module.x`` to ``prefix.x``."""
    old = f"{prefix}module."
    for key in [k for k in state if k.startswith(old)]:
        state[prefix + key[len(old) :]] = state.pop(key)
    kept = getattr(state, "_metadata", None)
    if kept is not None:
        own = prefix[:-1]
        for key in [k for k in kept if k == f"{prefix}module" or k.startswith(old)]:
            kept[own if key == f"{prefix}module" else prefix + key[len(old) :]] = kept.pop(key)


def _with_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename keys of a state dict before loading from ``prefix.x`` to ``prefix.module.x``.

    Keys that have this form already stay the same."""
    known = wrapper.get_submodule("module").state_dict().keys()
    for key in [k for k in state if k.startswith(prefix) and k[len(prefix) :] in known]:
        state[f"{prefix}module.{key[len(prefix) :]}"] = state.pop(key)
