"""Older names of the interface that are functions of other names."""

from __future__ import annotations

from collections.abc import Sequence

from .scope import PlacementScope, placement

__all__ = ["device_prior_placement", "fixed_placement"]


def fixed_placement(device_tag: str, machine_device_ids: str | Sequence[str]) -> PlacementScope:
    """An older name of ``scope.placement``."""
    return placement(device_tag, machine_device_ids)


def device_prior_placement(
    device_tag: str, machine_device_ids: str | Sequence[str]
) -> PlacementScope:
    """An older name of ``scope.placement``."""
    return placement(device_tag, machine_device_ids)
