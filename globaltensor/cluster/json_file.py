"""A cluster as a JSON file that people can read and write.

Fields that are left out are those of the generic machine (model.py). `Cluster.save` and
`Cluster.load` call these functions.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from .._base.atomic_file import write_text
from ..errors import ClusterError
from .measured_curves import Curve
from .model import Cluster

__all__ = ["as_json", "from_json", "load", "save"]

VERSION: Final = 2
_KEY: Final = "globaltensor_cluster"
_NUMBERS: Final = {f.name: f for f in fields(Cluster) if isinstance(f.default, int | float | str)}

log = logging.getLogger("globaltensor")


def as_json(cluster: Cluster) -> dict[str, Any]:
    """Return the JSON object that `save` writes."""
    document: dict[str, Any] = {_KEY: VERSION}
    document |= {
        name: getattr(cluster, name)
        for name in ("name", "device", *(n for n in _NUMBERS if n not in ("name", "device")))
    }
    document |= {"flops": dict(cluster.flops), "saturation": dict(cluster.saturation)}
    document["measured"] = [
        {"kind": c.kind, "ranks": c.ranks, "nodes": c.nodes, "points": [list(p) for p in c.points]}
        for c in cluster.measured
    ]
    document["ops"] = {key: list(seconds) for key, seconds in cluster.ops.items()}
    return document


def save(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Write a cluster to a file: see `Cluster.save`."""
    write_text(path, json.dumps(as_json(cluster), indent=1) + "\n")


def load(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster from a file: see `Cluster.load`."""
    try:
        document = json.loads(Path(path).read_text())
    except OSError as error:
        raise ClusterError(
            f"{path}: cannot be read: {error.strerror}; `globaltensor profile --out {path}` "
            f"writes such a file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{path}: is no JSON: {error}") from error
    try:
        cluster = from_json(document)
    except ValueError as error:
        raise ClusterError(f"{path}: {error}") from error
    if not cluster.source:
        cluster = replace(cluster, source=f"from {path}")
    for curve in cluster.measured:
        lawful = curve.lawful()
        if lawful != curve:
            changed = sum(a != b for a, b in zip(curve.points, lawful.points, strict=True))
            text = (
                "%s: %s among %d ranks on %d nodes: more bytes took less time at %d of %d "
                "sizes; planners see the nearest rising curve"
            )
            log.warning(
                text, path, curve.kind, curve.ranks, curve.nodes, changed, len(curve.points)
            )
    return cluster


def from_json(document: object) -> Cluster:
    """Return the cluster that `as_json` describes.

    Raises ValueError, which names the field that cannot be understood.
    """
    if not isinstance(document, dict) or _KEY not in document:
        raise ValueError(f'describes no cluster: it has no "{_KEY}": {VERSION}')
    if document[_KEY] != VERSION:
        raise ValueError(
            f"is of version {document[_KEY]}, but this library reads version {VERSION}: profile "
            f"again, or use the library that wrote it"
        )
    known = {f.name for f in fields(Cluster)}
    unknown = sorted(document.keys() - known - {_KEY})
    if unknown:
        raise ValueError(
            f"unknown field{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; there are "
            f"{', '.join(sorted(known))}"
        )
    values: dict[str, Any] = {
        name: _scalar(name, value) for name, value in document.items() if name in _NUMBERS
    }
    for name in ("flops", "saturation"):
        if name in document:
            values[name] = {
                key: _number(f"{name}[{key}]", value)
                for key, value in _object(name, document[name]).items()
            }
    if "ops" in document:
        values["ops"] = {
            key: _pair(f"ops[{key}]", value)
            for key, value in _object("ops", document["ops"]).items()
        }
    if "measured" in document:
        if not isinstance(document["measured"], list):
            raise ValueError("measured: must be a list of curves")
        values["measured"] = tuple(
            _curve(f"measured[{i}]", value) for i, value in enumerate(document["measured"])
        )
    return Cluster(**values)


def _scalar(name: str, value: object) -> object:
    default = _NUMBERS[name].default
    if isinstance(default, bool | str):
        if not isinstance(value, type(default)):
            raise ValueError(
                f"{name}={value!r}: must be "
                f"{'true or false' if isinstance(default, bool) else 'text'}"
            )
        return value
    return _integer(name, value) if isinstance(default, int) else _number(name, value)


def _number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{where}={value!r}: must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{where}={str(value)[:20]}... ({len(str(value))} digits): must be a number that a "
            f"float can hold"
        ) from None


def _integer(where: str, value: object) -> int:
    number = _number(where, value)
    if not number.is_integer():
        raise ValueError(f"{where}={value!r}: must be a whole number")
    # `value` keeps all digits of an int, and a float holds 15 of them
    return int(value)  # type: ignore[call-overload, no-any-return]


def _object(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object of names and values")
    return value


def _pair(where: str, value: object) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{where}={value!r}: must be two numbers")
    return _number(where, value[0]), _number(where, value[1])


def _curve(where: str, value: object) -> Curve:
    curve_fields = _object(where, value)
    missing = {"kind", "ranks", "points"} - curve_fields.keys()
    if missing or not isinstance(curve_fields["points"], list):
        raise ValueError(f"{where}: needs kind, ranks and a list of points (bytes, seconds)")
    ranks, nodes = (
        _integer(f"{where}.{name}", curve_fields.get(name, 1)) for name in ("ranks", "nodes")
    )
    points = tuple(
        (_integer(f"{where}.points", n), s)
        for n, s in (_pair(f"{where}.points", p) for p in curve_fields["points"])
    )
    try:
        return Curve(str(curve_fields["kind"]), ranks, nodes, points)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
