"""``flow.memory_summary()``: the memory that a model and its optimizer use on this rank.

Users call it. Nothing communicates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .._base.pytree import tensors_in
from .._tensor.global_tensor import GlobalTensor
from ..boxing.moves import show_bytes, show_placement
from ..distributed.world import world
from ..errors import GlobalTensorError
from ..sharding.spec import Spec

__all__ = ["MemoryRow", "MemorySummary", "memory_summary", "peak_memory", "resident_memory"]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The tensors of one kind and one layout.

    ``kind`` is parameters, gradients, optimizer state or buffers. ``layout`` is sbp and placement,
    or ``plain`` and the device. ``tensors`` is the number of tensors. ``bytes`` is the size of
    their local tensors on this rank. ``full_bytes`` is the size of the global tensors.
    """

    kind: str
    layout: str
    tensors: int
    bytes: int
    full_bytes: int


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """The memory of this rank. Printing it shows a table, if there are tensors.

    ``rows`` are the tensors by kind and layout. ``resident`` is the memory of the process in bytes.
    ``device`` and ``device_peak`` are the bytes that torch has allocated on the accelerator, now
    and at the peak. An unknown number is None.
    """

    rank: int
    rows: tuple[MemoryRow, ...]
    resident: int | None
    device: int | None = None
    device_peak: int | None = None

    @property
    def bytes(self) -> int:
        """The bytes on this rank, summed over all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def full_bytes(self) -> int:
        """The full size in bytes, summed over all rows."""
        return sum(row.full_bytes for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as numbers, strings, lists and dicts, for JSON."""
        return {**asdict(self), "bytes": self.bytes, "full_bytes": self.full_bytes}

    def __str__(self) -> str:
        lines = [("", "layout", "tensors", f"rank {self.rank}", "full")]
        before = ""
        for row in self.rows:
            kind, before = ("" if row.kind == before else row.kind), row.kind
            sizes = show_bytes(row.bytes), show_bytes(row.full_bytes)
            lines.append((kind, row.layout, str(row.tensors), *sizes))
        count = str(sum(row.tensors for row in self.rows))
        lines.append(("total", "", count, show_bytes(self.bytes), show_bytes(self.full_bytes)))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        table = [
            "  ".join(
                cell.ljust(width) if i < 2 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        figures = (
            ("process", self.resident),
            ("device", self.device),
            ("device at most", self.device_peak),
        )
        known = [f"{name} {show_bytes(n)}" for name, n in figures if n is not None]
        if known and not self.rows:
            table = []
        return "\n".join([*table, *([", ".join(known)] if known else [])])


def memory_summary(
    model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> MemorySummary:
    """Return the memory of parameters, gradients, optimizer state and buffers on this rank.

    Tensors are grouped by layout, with their size on this rank and their full size. A tensor that
    occurs several times counts once. Without a model, the parameters are those of the optimizer.
    Without both, only the memory of the process is measured. Each rank gets its own numbers, and
    nothing communicates. Raises GlobalTensorError for other arguments.

    >>> import globaltensor as flow
    >>> model = torch.nn.Linear(4, 2).to_global(flow.placement("cpu", [0]), flow.sbp.broadcast)
    >>> summary = memory_summary(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> print(str(summary).rpartition("\\n")[0])
                layout       tensors  rank 0  full
    parameters  B on cpu[0]        2    40 B  40 B
    total                          2    40 B  40 B
    >>> [(row.kind, row.bytes) for row in summary.rows]
    [('parameters', 40)]
    """
    if not isinstance(model, torch.nn.Module | None):
        raise GlobalTensorError(
            f"memory_summary: model is a {type(model).__name__}; pass a torch.nn.Module"
        )
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise GlobalTensorError(
            f"memory_summary: optimizer is a {type(optimizer).__name__}; pass a "
            f"torch.optim.Optimizer"
        )
    parameters: Iterable[torch.Tensor] = ()
    if model is not None:
        parameters = model.parameters()
    elif optimizer is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = list(parameters)
    state = [] if optimizer is None else tensors_in(list(optimizer.state.values()), [])
    kinds: dict[str, Iterable[tuple[str, int, int]]] = {
        "parameters": map(_tensor_bytes, _unique_tensors(parameters)),
        "gradients": (held for p in _unique_tensors(parameters) for held in _gradients(p)),
        "optimizer state": map(_tensor_bytes, _unique_tensors(state)),
        "buffers": map(_tensor_bytes, _unique_tensors(() if model is None else model.buffers())),
    }
    rows = [row for kind, held in kinds.items() for row in _rows_by_layout(kind, held)]
    device, peak = _on_device()
    return MemorySummary(world().rank, tuple(rows), resident_memory(), device, peak)


def _unique_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for t in tensors:
        if id(t) not in seen:
            seen.add(id(t))
            yield t


def _tensor_bytes(t: torch.Tensor) -> tuple[str, int, int]:
    """Return (layout, bytes here, full bytes) of a tensor."""
    if isinstance(t, GlobalTensor):
        return _global(t._spec, t._stored)
    return f"plain on {t.device}", t.nbytes, t.nbytes


def _global(spec: Spec, local: torch.Tensor) -> tuple[str, int, int]:
    text, shown = _sbp(spec), spec.shown
    if shown is not spec:
        text = f"{_sbp(shown)} stored as {text}"
    where = f"{text} on {show_placement(spec.placement)}"
    return where, local.nbytes, spec.numel * local.dtype.itemsize


def _sbp(spec: Spec) -> str:
    return " ".join(e.short for e in spec.layout)


def _gradients(p: torch.Tensor) -> Iterator[tuple[str, int, int]]:
    """Yield the gradient of a parameter, and its gradient that is not yet summed over the ranks.

    ``.grad`` of a global tensor is not read, because reading it would sum the gradient.
    """
    if not isinstance(p, GlobalTensor):
        if p.grad is not None:
            yield _tensor_bytes(p.grad)
        return
    leaf, pending = p._leaf, p._stored.grad
    if pending is not None:
        yield _global(p._spec if leaf is None else leaf.dual, pending)
    if leaf is not None and leaf.value is not None:
        yield _global(leaf.grad_spec, leaf.value)


def _rows_by_layout(kind: str, held: Iterable[tuple[str, int, int]]) -> list[MemoryRow]:
    rows: dict[str, MemoryRow] = {}
    for layout, here, full in held:
        old = rows.get(layout, MemoryRow(kind, layout, 0, 0, 0))
        rows[layout] = MemoryRow(
            kind, layout, old.tensors + 1, old.bytes + here, old.full_bytes + full
        )
    return sorted(rows.values(), key=lambda row: -row.bytes)


def resident_memory() -> int | None:
    """Return the bytes of memory that this process uses now, or None if that is unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux
        return None


def peak_memory() -> int | None:
    """Return the peak bytes that torch has allocated on the accelerator.

    If the accelerator is not in use, return the peak memory of this process, or None if that is
    unknown.
    """
    peak = _on_device()[1]
    if peak is not None:
        return peak
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _on_device() -> tuple[int | None, int | None]:
    """Return (allocated bytes, peak of allocated bytes) of the GPU, or (None, None)."""
    if not torch.cuda.is_initialized():
        return None, None
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
