"""Devices by machine, as the job-function interface names them. Scopes and the session use them.

``"0:0-3"`` are devices 0 to 3 of machine 0. Device d of machine m is rank ``m * each + d`` of the
world, where every machine has ``each`` devices. The types here are pure values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ...sharding.placement import Placement
from ..errors import JobError

__all__ = ["Devices", "Layout"]

_TAGS: Final = {"gpu": "gpu", "cuda": "gpu", "cpu": "cpu"}
_PATTERN: Final = re.compile(r"(\d+):(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Devices:
    """An ordered list of devices of one kind, as (machine, device) pairs.

    ``tag`` is "gpu" or "cpu".
    """

    tag: str
    ids: tuple[tuple[int, int], ...]

    @staticmethod
    def parse(tag: str, ids: str | Sequence[str]) -> Devices:
        """Parse ``machine:device`` or ``machine:first-last``, or a list of such texts.

        Raise JobError for another tag, other text, or a device named twice.

        >>> Devices.parse("gpu", ["0:0-1", "1:0"]).ids
        ((0, 0), (0, 1), (1, 0))
        """
        if tag not in _TAGS:
            raise JobError(f'placement: the device tag is "gpu" or "cpu", got {tag!r}')
        device_ids: list[tuple[int, int]] = []
        for text in [ids] if isinstance(ids, str) else list(ids):
            match = _PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
            if match is None or (match[3] is not None and int(match[3]) < int(match[2])):
                raise JobError(
                    f'placement: devices are named "machine:device" or "machine:first-last", like '
                    f'"0:0" and "0:0-3"; got {text!r}'
                )
            device_ids += [
                (int(match[1]), device)
                for device in range(int(match[2]), int(match[3] or match[2]) + 1)
            ]
        if not device_ids:
            raise JobError("placement: at least one device must be named")
        twice = sorted({d for d in device_ids if device_ids.count(d) > 1})
        if twice:
            raise JobError(
                f"placement: device {twice[0][0]}:{twice[0][1]} is named twice in {ids!r}"
            )
        return Devices(_TAGS[tag], tuple(device_ids))

    def __str__(self) -> str:
        return f'"{self.tag}", "{", ".join(f"{m}:{d}" for m, d in self.ids)}"'


@dataclass(frozen=True)
class Layout:
    """The devices of a session: ``each`` on every one of ``machines``.

    ``kind`` is torch's device type for devices tagged "gpu".
    """

    machines: int = 1
    each: int = 1
    tag: str = "cpu"
    kind: str = "cpu"

    @property
    def size(self) -> int:
        return self.machines * self.each

    @property
    def all(self) -> Devices:
        """Every device, the default placement of a job."""
        return Devices(
            self.tag, tuple((m, d) for m in range(self.machines) for d in range(self.each))
        )

    def check(self, devices: Devices) -> Devices:
        """Return ``devices``. Raise JobError if this layout lacks some of them."""
        missing = [f"{m}:{d}" for m, d in devices.ids if m >= self.machines or d >= self.each]
        if missing:
            available = (
                f"{self.machines} machine{'s' if self.machines > 1 else ''} with {self.each} "
                f"device{'s' if self.each > 1 else ''} each"
            )
            how = (
                f"config.{devices.tag}_device_num(n)"
                if self.machines > max(m for m, _ in devices.ids)
                else "env.machine([...])"
            )
            raise JobError(
                f"placement({devices}): there is no device {', '.join(missing)}, only {available}; "
                f"{how} says how many there are"
            )
        return devices

    def placement(self, devices: Devices) -> Placement:
        """Return the placement of tensors on these devices."""
        return Placement(self.kind if devices.tag == "gpu" else "cpu", self.ranks(devices.ids))

    def ranks(self, ids: Iterable[tuple[int, int]]) -> list[int]:
        return [m * self.each + d for m, d in ids]
