"""``flow.utils.trace(path)``: a trace of all ranks in one file, for Perfetto and chrome://tracing.

Users call it. torch.profiler records each rank, and rank 0 writes the events of all ranks.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from .._base.atomic_file import check_writable, write_text
from ..distributed.simulate import SimulatedWorld
from ..distributed.world import world
from ..distributed.world_base import World
from ..errors import WorldError

__all__ = ["merged", "trace"]

Path = str | os.PathLike[str]
_FLOWS: Final = frozenset("stf")  # the phases of flow events, which viewers draw as arrows


def trace(
    path: Path, *, record_shapes: bool = False, with_stack: bool = False
) -> contextlib.AbstractContextManager[profile]:
    """Return a context that profiles the block on all ranks, and writes one trace to ``path``.

    Collective: all ranks enter and leave the block. Each rank is a process of the trace, and rank 0
    writes the file when the block ends. Boxings are named ranges: ``box S(0)->B 4.2 MiB ranks
    0-1``. The block's value is torch's profiler of this rank. ``record_shapes``, ``with_stack``:
    those of ``torch.profiler.profile``. A block that raises writes nothing.

    Raises WorldError on all ranks if rank 0 cannot write the file, and for simulated ranks, which
    are threads of one process.

    >>> import json, os, pathlib, tempfile
    >>> import globaltensor as flow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = os.path.join(folder, "trace.json")
    ...     with flow.utils.trace(file):
    ...         y = torch.ones(3, 3) @ torch.ones(3, 3)
    ...     events = json.loads(pathlib.Path(file).read_text())["traceEvents"]
    >>> {e["pid"] for e in events}, any(e["name"] == "aten::mm" for e in events)
    ({0}, True)
    """
    return _record_trace(path, record_shapes, with_stack)


@contextlib.contextmanager
def _record_trace(path: Path, record_shapes: bool, with_stack: bool) -> Iterator[profile]:
    this_world = world()
    if isinstance(this_world, SimulatedWorld) and this_world.size > 1:
        raise WorldError(
            "flow.utils.trace: simulated ranks are threads of one process, and torch's profiler "
            "records a process. Start real ranks: python -m globaltensor.distributed.launch "
            f"--nproc_per_node {this_world.size} SCRIPT"
        )
    offset = _start_together(this_world, path)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    recorder = profile(activities=activities, record_shapes=record_shapes, with_stack=with_stack)
    with recorder:
        yield recorder
    traces = _gather_traces(this_world, _compact(_export_trace(recorder), this_world.rank, offset))
    if this_world.rank == 0:
        write_text(path, json.dumps(merged(traces), separators=(",", ":")))


def _start_together(this_world: World, path: Path) -> float:
    """Check the path on rank 0; return the microseconds that this rank's clock is ahead of rank 0.

    Ranks on one machine share a clock. On several, the offset is as exact as a barrier.
    """
    error = ""
    if this_world.rank == 0:
        try:
            check_writable(path)
        except OSError as found:
            error = f"{type(found).__name__}: {found}"
    if this_world.size == 1:
        said, clocks = error, [0]
    else:
        everyone = this_world.comm(tuple(range(this_world.size)))
        said = everyone.all_gather_object(error, "flow.utils.trace")[0]
        everyone.barrier()
        clocks = everyone.all_gather_object(time.time_ns(), "flow.utils.trace")
    if said:
        raise WorldError(
            f"flow.utils.trace: rank 0 cannot write {os.fspath(path)!r} ({said}). Pass a path in "
            f"an existing folder that may be written to"
        )
    return (clocks[this_world.rank] - clocks[0]) / 1e3 if this_world.node_size > 1 else 0.0


def _export_trace(recorder: profile) -> dict[str, Any]:
    """Return the Chrome trace of one rank's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace.json")
        recorder.export_chrome_trace(file)
        with open(file, encoding="utf-8", errors="replace") as opened:
            return json.load(opened)  # type: ignore[no-any-return]


def _compact(rank_trace: dict[str, Any], rank: int, offset: float) -> dict[str, Any]:
    """Return the events of one rank, with the rank as their process and rank 0's clock as time.

    Threads and GPU streams are numbered from 0. ``names`` in the result has their names.
    """
    threads: dict[tuple[Any, Any], int] = {}
    names: dict[int, str] = {}
    events = []
    for event in rank_trace.get("traceEvents", ()):
        process = event.get("pid")
        if not isinstance(process, int) or isinstance(process, bool):
            continue  # the profiler's own spans
        if event["ph"] == "M" and event["name"] != "thread_name":
            continue
        thread = threads.setdefault((process, event.get("tid")), len(threads))
        if event["ph"] == "M":
            names[thread] = str(event["args"]["name"]).strip()
            continue
        event = {**event, "pid": rank, "tid": thread}
        if "ts" in event:
            event["ts"] = event["ts"] - offset
        if event["ph"] in _FLOWS and "id" in event:
            event["id"] = f"{rank}.{event['id']}"
        events.append(event)
    used = {event["tid"] for event in events}
    return {
        "rank": rank,
        "base": rank_trace.get("baseTimeNanoseconds", 0),
        "names": {thread: names.get(thread, f"thread {thread}") for thread in sorted(used)},
        "events": events,
    }


def _gather_traces(this_world: World, own_trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the traces of all ranks on rank 0, and none elsewhere. Collective."""
    if this_world.size == 1:
        return [own_trace]
    packed = gzip.compress(json.dumps(own_trace).encode(), 1)
    everyone = this_world.comm(tuple(range(this_world.size)))
    sizes = everyone.all_gather_object(len(packed), "flow.utils.trace")
    data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    sends = {} if this_world.rank == 0 else {0: data}
    expected = {r: sizes[r] for r in range(1, this_world.size)} if this_world.rank == 0 else {}
    came = everyone.exchange(sends, expected, data)
    if this_world.rank:
        return []
    others = [
        json.loads(gzip.decompress(came[r].numpy().tobytes())) for r in range(1, this_world.size)
    ]
    return [own_trace, *others]


def merged(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the traces of the ranks as one Chrome trace, whose processes are the ranks.

    Times are in microseconds from the base of the first rank.
    """
    events: list[dict[str, Any]] = []
    base = traces[0]["base"]
    for rank_trace in traces:
        rank, later = rank_trace["rank"], (rank_trace["base"] - base) / 1e3
        about = {"ph": "M", "pid": rank, "tid": 0, "ts": 0}
        events.append({**about, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({**about, "name": "process_sort_index", "args": {"sort_index": rank}})
        events += [
            {**about, "tid": int(thread), "name": "thread_name", "args": {"name": name}}
            for thread, name in rank_trace["names"].items()
        ]
        events += [
            {**event, "ts": event["ts"] + later} if "ts" in event else event
            for event in rank_trace["events"]
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
