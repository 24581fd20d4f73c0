"""Problems as files: this library's JSON, and the ASPLOS/EuroSys 2025 contest's format (IOPDDL).

The library's JSON also stores names and labels. Users call `save`, `load` and `from_iopddl`.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from typing import Any

import numpy as np

from ..._base.atomic_file import replacing
from ...errors import ProblemError
from .problem import Array, Problem, numbers

FORMAT = "globaltensor problem 1"


def save(problem: Problem, path: str | os.PathLike[str]) -> None:
    """Write a problem as JSON, gzipped where the name ends in .gz.

    Equal tables are written once. A forbidden float is written as null.
    """
    rows: list[Any] = []
    known: dict[tuple[int, ...] | bytes, int] = {}
    edges = []
    for (i, j), table in zip(problem.edges, problem.tables, strict=True):
        key = table.dtype.char.encode() + bytes(str(table.shape), "ascii") + table.tobytes()
        if key not in known:
            known[key] = len(rows)
            rows.append(written(table))
        edges.append([i, j, known[key]])
    nodes = [
        {
            "name": name,
            "labels": labels,
            "costs": written(costs),
            "usages": [[use.start, use.end, use.amounts.tolist()] for use in uses],
        }
        for name, labels, costs, uses in zip(
            problem.names, problem.labels, problem.costs, problem.usages, strict=True
        )
    ]
    whole = {
        "format": FORMAT,
        "name": problem.name,
        "usage_limit": problem.usage_limit,
        "nodes": nodes,
        "tables": rows,
        "edges": edges,
    }
    text = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()
    with replacing(path) as file:
        file.write(gzip.compress(text, 5, mtime=0) if str(path).endswith(".gz") else text)


def load(path: str | os.PathLike[str]) -> Problem:
    """Read a problem that `save` wrote, or a contest instance.

    Raises ProblemError that names the file and its fault.
    """
    content = read_json(path)
    try:
        if isinstance(content, dict) and content.get("format") == FORMAT:
            return ours(content)
        return contest(content, str(path))
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def from_iopddl(path: str | os.PathLike[str]) -> Problem:
    """Read a contest instance (JSON, or gzipped JSON).

    Raises ProblemError that names the file and its fault.
    """
    try:
        return contest(read_json(path), str(path))
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json.loads(data)
    except (OSError, EOFError) as error:
        raise ProblemError(f"cannot read {path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"{path} is no JSON: {str(error)[:200]}") from None
    except Exception as error:  # zlib.error is not an OSError
        raise ProblemError(f"cannot unpack {path}: {error}") from None


def ours(content: dict[str, Any]) -> Problem:
    limit = content.get("usage_limit")
    if (
        limit is not None
        and type(limit) is not int
        and not (type(limit) is float and math.isfinite(limit))
    ):
        raise ProblemError(f"usage_limit must be a finite number or null, not {str(limit)[:60]!r}")
    problem = Problem(str(content.get("name") or ""), limit)
    try:
        for node in content["nodes"]:
            uses = [
                (lasting(start, end, len(problem.costs)), amounts)
                for start, end, amounts in node["usages"]
            ]
            problem.node(read(node["costs"], "costs"), uses, node.get("name"), node.get("labels"))
        tables = [read(table, "table") for table in content["tables"]]
        for i, j, t in content["edges"]:
            problem.edge(i, j, tables[t])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProblemError(
            f"it is not in the form that save writes ({type(error).__name__}: {error})"
        ) from None
    return problem


def lasting(start: Any, end: Any, node: int) -> tuple[int, int] | None:
    if start is None and end is None:
        return None
    if type(start) is not int or type(end) is not int:
        raise ProblemError(
            f"node {node}: a usage lasts from an integer to an integer, or always (null, null), "
            f"not from {start!r} to {end!r}"
        )
    return start, end


def contest(content: Any, name: str) -> Problem:
    """Build a problem from the contest's JSON.

    The format has one half-open interval per node, flat row-major edge tables, and integers only.
    """
    try:
        whole = content["problem"]
        intervals, costs, usages = (whole["nodes"][key] for key in ("intervals", "costs", "usages"))
        ends, tables = whole["edges"]["nodes"], whole["edges"]["costs"]
        limit = whole.get("usage_limit")
        problem = Problem(str(whole.get("name") or name), limit)
    except (KeyError, TypeError, AttributeError) as error:
        parts = "problem.nodes, problem.edges and problem.usage_limit"
        raise ProblemError(
            f"it is no contest instance: {parts} are expected ({type(error).__name__}: {error})"
        ) from None
    if limit is not None and type(limit) is not int:
        raise ProblemError(f"usage_limit must be an integer, not {limit!r}")
    if not isinstance(costs, list) or not len(costs) == len(intervals) == len(usages):
        raise ProblemError(
            f"{len(costs)} costs, {len(usages)} usages and {len(intervals)} intervals: one of "
            f"each a node is expected"
        )
    if len(ends) != len(tables):
        raise ProblemError(
            f"{len(ends)} edges and {len(tables)} tables: one table an edge is expected"
        )
    for row, interval, amounts in zip(costs, intervals, usages, strict=True):
        if (
            not isinstance(interval, list)
            or len(interval) != 2
            or not all(type(moment) is int for moment in interval)
        ):
            raise ProblemError(
                f"node {len(problem.costs)}: an interval is a list of two integers, not "
                f"{str(interval)[:60]}"
            )
        problem.node(
            whole_numbers(row, len(problem.costs)),
            [((interval[0], interval[1]), whole_numbers(amounts, len(problem.costs)))],
        )
    shared: dict[bytes, Array] = {}
    for ends_of, flat in zip(ends, tables, strict=True):
        try:
            i, j = ends_of
            sizes = len(problem.costs[i]), len(problem.costs[j])
            table = numbers(flat, f"the table of edge ({i}, {j})")
            if table.dtype.kind != "i":
                raise ProblemError(f"the table of edge ({i}, {j}) must hold integers")
            if table.size != sizes[0] * sizes[1]:
                raise ProblemError(
                    f"edge ({i}, {j}) needs {sizes[0]} x {sizes[1]} costs, it has {table.size}"
                )
            table = table.reshape(sizes)
        except (TypeError, ValueError, IndexError) as error:
            raise ProblemError(
                f"edge {len(problem.edges)} joins {str(ends_of)[:60]}: two numbers of nodes are "
                f"expected ({error})"
            ) from None
        problem.edge(i, j, shared.setdefault(bytes(str(sizes), "ascii") + table.tobytes(), table))
    return problem


def whole_numbers(values: Any, node: int) -> Array:
    row = numbers(values, f"node {node}'s costs and usages")
    if row.dtype.kind != "i" and row.size:
        raise ProblemError(f"node {node}: costs and usages must be integers: {str(values)[:80]}")
    return row


def written(costs: Array) -> Any:
    """Return the costs as nested lists, with None for inf, which JSON does not have."""
    if costs.dtype.kind == "i":
        return costs.tolist()
    return np.where(np.isfinite(costs), costs.astype(object), None).tolist()  # type: ignore[call-overload]


def read(rows: Any, what: str) -> Array:
    forbidden = np.asarray(rows, dtype=object)
    if not (forbidden == None).any():  # noqa: E711 (element by element)
        return numbers(rows, what)
    return numbers(np.where(forbidden == None, math.inf, forbidden).astype(np.float64), what)  # noqa: E711
