"""``flow.visualize_sharding(x)``: the ranks that hold each shard, drawn for a terminal or as SVG.

The drawing is made from the spec alone: nothing communicates. Users call it.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

import torch
import torch.distributed as dist
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .._base.terminal import in_colour
from ..boxing.explain import BoxingExplanation
from ..distributed.cluster_env import detect
from ..distributed.world import running
from ..sharding.holdings_table import MAX_RANKS, rank_rows
from ..sharding.placement import Placement
from ..sharding.sbp import broadcast
from ..sharding.spec import Spec
from .global_tensor import GlobalTensor

__all__ = ["drawing", "sharding_svg", "visualize_sharding"]

_WIDTH = 48
#: Backgrounds of ranks on a terminal, in its palette of 256 colours: light, for black text. They
#: have the hues of the SVG drawings.
_BACKGROUNDS = (117, 216, 116, 219, 150, 147, 222, 123, 211, 157, 183, 186)


def visualize_sharding(
    x: GlobalTensor | Spec | torch.nn.Module, file: TextIO | None = None
) -> None:
    """Print which rank holds which shard of ``x``.

    ``x``: a global tensor, a Spec, or a module, of which a table of all parameters and buffers is
    printed: dtype and shape, sbp (for each axis), and the shape that a rank holds. ``file``: where to print; each rank that passes one prints to
    it. Without ``file``, the first rank of the world prints to standard output and the other ranks
    print nothing. Every rank may call it, or only some: nothing communicates.

    On a terminal each rank has a colour, unless the variable NO_COLOR is set
    (https://no-color.org); with FORCE_COLOR the colours also go to files and pipes.

    >>> import globaltensor as flow
    >>> visualize_sharding(Spec.make((4, 6), flow.float32, flow.placement("cpu", [0, 1]), flow.sbp.split(0)))
    f32[4, 6] S(0)  on cpu [0, 1]
      rank 0  [0]  [2, 6]  x[0:2, :]
      rank 1  [1]  [2, 6]  x[2:4, :]
    <BLANKLINE>
          6
       +------+
       |0     |
       |      |
     4 +------+
       |1     |
       |      |
       +------+

    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(3, 8)
    >>> model = flow.parallelize(model, flow.placement("meta", [0]), "fsdp")
    >>> visualize_sharding(model)
    Linear: 2 parameters and buffers, on meta [0]; the last column has the shape that a rank holds
      weight  f32[8, 3]  S(0)  [8, 3]
      bias    f32[8]     S(0)  [8]
    """  # noqa: E501
    if file is None and not _on_first_rank():
        return
    out = sys.stdout if file is None else file
    if isinstance(x, torch.nn.Module):
        print(_table_of_module(x), file=out)
        return
    print(drawing(_spec(x, "visualize_sharding"), colour=in_colour(out)), file=out)


def _table_of_module(module: torch.nn.Module) -> str:
    """Return a table with a row for each parameter and buffer, in the order of the modules."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    specs = {name: t.spec for name, t in tensors if isinstance(t, GlobalTensor)}
    places = list(dict.fromkeys(spec.placement for spec in specs.values()))
    rows = []
    for name, t in tensors:
        if (spec := specs.get(name)) is None:
            lazy = isinstance(t, (UninitializedParameter, UninitializedBuffer))
            kind = "no shape yet" if lazy else repr(_described(t)).rpartition(" ")[0]
            rows.append((name, kind, "plain", ""))
            continue
        kind, _, sbp = repr(spec).partition("] ")
        ranks = spec.placement.flat  # the first holds the largest shard, the last the smallest
        held = str(list(spec.local_shape(ranks[0])))
        if spec.local_shape(ranks[-1]) != spec.local_shape(ranks[0]):
            held = f"{held} at most"
        if len(places) > 1:
            held += f"  on {_place(spec.placement)}"
        rows.append((name, f"{kind}]", sbp, held))
    widths = [max((len(row[k]) for row in rows), default=0) for k in range(3)]
    head = f"{type(module).__name__}: {len(tensors)} parameters and buffers"
    if plain := len(tensors) - len(specs):
        head += f", {plain} of them plain"
    if len(places) == 1:
        head += f", on {_place(places[0])}"
    if places:
        head += "; the last column has the shape that a rank holds"
    lines = [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, (*widths, 0), strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([head, *lines])


def _described(t: torch.Tensor) -> Spec:
    return Spec.make(t.shape, t.dtype, Placement("cpu", [0]), broadcast)


def _place(placement: Placement) -> str:
    return f"{placement.type} {placement.ranks.tolist()}"


def sharding_svg(x: GlobalTensor | Spec | Placement | BoxingExplanation) -> str:
    """Return a drawing of ``x`` as SVG text, 396 px wide, in light and dark colours.

    ``x``: a global tensor or a Spec, whose split dims are drawn with the ranks that hold each
    slice; a placement; or the result of ``flow.explain_boxing``. The colours follow the page
    (``prefers-color-scheme``). Several ranks in a cell hold copies, and in a hatched cell each
    rank holds a summand. Nothing communicates, and every rank returns the same text. Raises
    TypeError for anything else.

    >>> import globaltensor as flow
    >>> x = flow.zeros(4, 6, placement=flow.placement("cpu", [0]), sbp=flow.sbp.split(0))
    >>> svg = sharding_svg(x)
    >>> svg[:4], "rank 0" in svg
    ('<svg', True)
    """
    from ..sharding.sharding_svg import layout_svg

    if isinstance(x, BoxingExplanation):
        return x.svg()
    return layout_svg(x if isinstance(x, Placement) else _spec(x, "sharding_svg"))


def _spec(x: object, caller: str) -> Spec:
    if isinstance(x, GlobalTensor):
        return x.spec
    if isinstance(x, Spec):
        return x
    raise TypeError(
        f"{caller} draws a global tensor or a Spec"
        f"{', or a module' * (caller == 'visualize_sharding')}, not {type(x).__name__}: of data "
        f"that every rank has make a global one first, flow.tensor(data, placement=..., sbp=...)"
    )


def _on_first_rank() -> bool:
    """Return True on rank 0 of the world. The world is not started for it."""
    current = running()
    if current is not None:
        return current.rank == 0
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    place = detect(os.environ)
    return place is None or place.rank == 0


def drawing(spec: Spec, colour: bool = False) -> str:
    """Return the text of ``visualize_sharding``. ``colour``: with the colours of a terminal."""
    where = spec.placement
    lines = [f"{spec!r}  on {where.type} {where.ranks.tolist()}"]
    rows = rank_rows(spec)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for rank, row in zip(where.flat, rows, strict=False):
        name, *cells = (cell.ljust(w) for cell, w in zip(row, widths, strict=False))
        lines.append("  ".join(("", _paint(name, rank, colour), *cells, row[3])))
    if len(rows) < where.size:
        lines.append(f"  and {where.size - len(rows)} more ranks")
    split = sorted({e.dim for e in spec.layout if e.is_split})
    if 1 <= len(split) <= 2 and spec.numel and where.size <= MAX_RANKS:
        lines += ["", *_picture(spec, split, colour)]
    return "\n".join(lines)


def _paint(text: str, rank: int, colour: bool) -> str:
    """Return the text on the background of a rank, as a terminal reads it."""
    if not colour:
        return text
    return f"\x1b[38;5;16;48;5;{_BACKGROUNDS[rank % len(_BACKGROUNDS)]}m{text}\x1b[0m"


def _picture(spec: Spec, split: list[int], colour: bool) -> list[str]:
    """Draw the (at most two) split dims as a rectangle: each shard with the ranks that hold it."""
    down = split[0] if len(split) == 2 or spec.ndim < 2 or split[0] == 0 else 0
    across = (
        split[1] if len(split) == 2 else (None if spec.ndim < 2 else (1 if down == 0 else split[0]))
    )
    if spec.ndim >= 2 and across == down:
        across = None
    held: dict[tuple[int, int], list[int]] = {}
    ends: tuple[set[int], set[int]] = (
        {spec.shape[down]},
        {1 if across is None else spec.shape[across]},
    )
    for r in spec.placement.flat:
        offsets, lengths = spec.box(r)
        x0, x1 = (0, 1) if across is None else (offsets[across], offsets[across] + lengths[across])
        y0, y1 = offsets[down], offsets[down] + lengths[down]
        if x1 > x0 and y1 > y0:
            held.setdefault((y0, x0), []).append(r)
            ends[0].add(y1)
            ends[1].add(x1)
    ys, xs = sorted(ends[0]), sorted(ends[1])
    labels = {k: _ranks(v) for k, v in held.items()}
    cells = []
    for i, x in enumerate(xs):
        start = xs[i - 1] if i else 0
        need = max((len(t) for (_, x0), t in labels.items() if x0 == start), default=1)
        cells.append(
            max(need, min(_WIDTH // len(xs), 6 * (x - start) // max(1, min(6, x - start))))
        )
    rule = "+" + "+".join("-" * w for w in cells) + "+"
    top = "" if across is None else str(spec.shape[across]).center(len(rule))
    out, y0 = [f"   {top}".rstrip(), f"   {rule}"], 0
    for y in ys:
        row, blank, x0 = [], [], 0
        for w, x in zip(cells, xs, strict=True):
            holders = held.get((y0, x0), [])
            row.append(_cell(labels.get((y0, x0), ""), w, holders, colour))
            blank.append(_cell("", w, holders, colour))
            x0 = x
        out += [f"   |{'|'.join(row)}|", f"   |{'|'.join(blank)}|", f"   {rule}"]
        y0 = y
    middle = 1 + (len(out) - 1) // 2
    out[middle] = f"{spec.shape[down]:>2} " + out[middle][3:]
    return [line for line in out if line]


def _cell(text: str, width: int, ranks: list[int], colour: bool) -> str:
    """Return a line of a cell: all in the colour of its rank, or each of several ranks in its own.

    Copies and summands are held by several ranks.
    """
    if len(ranks) == 1:
        return _paint(text.ljust(width), ranks[0], colour)
    painted = re.sub(r"\d+", lambda n: _paint(n[0], int(n[0]), colour), text)
    return painted + " " * (width - len(text))


def _ranks(ranks: list[int]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
