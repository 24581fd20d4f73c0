"""Deprecated functions of user code, each of which calls the function that replaced it."""

from __future__ import annotations

from collections.abc import Sequence

from .scope import PlacementScope, placement

__all__ = ["device_prior_placement", "fixed_placement"]


def fixed_placement(device_tag: str, machine_device_ids: str | Sequence[str]) -> PlacementScope:
    """Return ``scope.placement(...)``; an older name of that function."""
    return placement(device_tag, machine_device_ids)


def device_prior_placement(
    device_tag: str, machine_device_ids: str | Sequence[str]
) -> PlacementScope:
    """Return ``scope.placement(...)``; an older name of that function."""
    return placement(device_tag, machine_device_ids)
