"""Agreement of the ranks before they run a graph.

Ranks compare the settings of a graph, what they have captured, and whether it went well. If they
differ, all ranks raise, and the error names the rank and the difference. `Graph` calls this module
when it builds a program."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from .._base.argument_text import argument_text
from ..distributed.communicator import Communicator
from ..distributed.simulate import SimulatedWorld
from ..distributed.world import world
from ..errors import GraphError, noted
from ..optim.hyperparameters import as_numbers
from ..sharding.placement import Placement
from .capture.dry_world import GRAPH, INSIDE, Left
from .grad_clip import CLIP_OPTIONS
from .program.nodes import RandomCall

__all__ = ["Text", "agree", "agreed", "seed_of", "settings"]

T = TypeVar("T")


class Text(NamedTuple):
    """The text that ranks compare: settings and ops, one per line.

    ``seed`` is the seed of the random numbers that the program draws, None if it draws none here.
    """

    settings: Sequence[str]
    ops: Sequence[str] = ()
    seed: int | None = None


def settings(graph: Any, stages: Sequence[Placement]) -> list[str]:
    """Return the settings, optimizers and stages of a graph, one per line.

    These must be the same on every rank, as must build()."""
    lines = [
        f"config.{name} = {_value_text(value)}"
        for name, value in vars(graph.config).items()
        if name not in ("version", "_asked")
    ]
    for i, entry in enumerate(graph._optimizers):
        kind = type(entry.optimizer).__name__
        for j, group in enumerate(entry.optimizer.param_groups):
            names = {*entry.optimizer.defaults, *CLIP_OPTIONS}
            options = ", ".join(
                f"{name}={_number_or_text(value)}" for name, value in group.items() if name in names
            )
            lines.append(
                f"optimizer {i} ({kind}), group {j}: {len(group['params'])} parameters, {options}"
            )
        schedules = (
            entry.schedule if isinstance(entry.schedule, (list, tuple)) else [entry.schedule]
        )
        lines.append(
            f"optimizer {i} ({kind}), learning rate: "
            f"{', '.join(type(s).__name__ for s in schedules if s is not None) or 'no scheduler'}"
        )
    if graph._scaler is not None:
        lines.append(f"grad scaler: {type(graph._scaler).__name__}")
    return lines + [f"stage {k} is on {p!r}" for k, p in enumerate(stages)]


def _value_text(value: Any) -> str:
    """Return a text for a value that is the same on every rank."""
    if isinstance(value, torch.Tensor):
        return (
            f"{value.item()!r} (tensor)"
            if value.numel() == 1
            else f"a tensor of {value.numel()} elements"
        )
    text = repr(value)
    return text if " at 0x" not in text else type(value).__name__


def _number_or_text(value: Any) -> str:
    """Return a text that is equal for equal numbers of different types."""
    numbers = as_numbers(value)
    return _value_text(value) if numbers is None else argument_text(numbers)


def seed_of(program: fx.Graph) -> int | None:
    """Return the seed of torch's generator, or None if this rank does not draw from the generator.

    Simulated ranks share one generator, so they return None."""
    drawn = any(
        isinstance(n.target, RandomCall) and n.kwargs.get("generator") is None
        for n in program.nodes
    )
    return torch.initial_seed() if drawn and not isinstance(world(), SimulatedWorld) else None


def agree(name: str, report: Text | Exception | None) -> None:
    """Raise GraphError on all ranks unless every rank passes the same text.

    ``report`` is the text, an error of this rank, or None to report success only. A rank that
    passes its own error returns, and its caller raises that error; the other ranks raise
    GraphError. Collective among all ranks."""
    this_world = world()
    if this_world.size == 1:
        return
    comm = this_world.comm(tuple(range(this_world.size)))
    bad = isinstance(report, Exception)
    own_report = (
        f"{type(report).__name__}: {report}"
        if bad
        else None
        if report is None
        else (_digest(report.settings), _digest(report.ops), report.seed)
    )  # type: ignore[union-attr]
    everyone = comm.all_gather_object((bad, own_report), GRAPH)
    inside = [r for r, (what, _) in enumerate(everyone) if what == INSIDE]
    if inside:
        if bad:
            return
        raise GraphError(
            f"{name}: this rank has finished build(), but rank {inside[0]} waits there for an "
            "exchange with the other ranks: build() must do the same on every rank"
        )
    failed = [r for r, (wrong, _) in enumerate(everyone) if wrong]
    if failed:
        if not bad:
            raise GraphError(
                f"{name}: rank {failed[0]} could not capture the graph: {everyone[failed[0]][1]}"
            )
        return
    if report is None or not isinstance(report, Text):
        return
    settings, ops, seeds = zip(*[digest for _, digest in everyone], strict=True)
    _check_same_lines(
        name,
        comm,
        settings,
        report.settings,
        "other settings",
        "",
        "config, optimizers and stages must be set alike on every rank",
    )
    _check_same_lines(
        name, comm, ops, report.ops, "captured another graph", "; the graphs differ from op {} on",
        "build() and its inputs must be the same on every rank: no branch may depend on the "
        "rank, and random numbers that decide a branch need the same seed on every rank",
    )  # fmt: skip
    drawing = {r: seed for r, seed in enumerate(seeds) if seed is not None}
    odd = _find_odd_value(list(drawing.values()))
    if odd is not None:
        ranks = list(drawing)
        usual, other = ranks[odd[0]], ranks[odd[1]]
        raise GraphError(
            f"{name}: rank {other} draws random numbers from another seed than rank {usual} "
            f"({drawing[other]}, {drawing[usual]}): call torch.manual_seed with the same number "
            "on every rank; for random numbers that differ between ranks (data), use a "
            "torch.Generator"
        )


def agreed(name: str, make: Callable[[], tuple[T, Text | None]], doing: str = "") -> T:
    """Return what ``make`` returns, if it succeeds with the same text on every rank.

    Raises the error that ``make`` raises on this rank, with a note of what ``doing`` describes, and
    GraphError as `agree` does. Collective among all ranks."""
    try:
        result, report = make()
    except Exception as error:
        if not isinstance(error, Left):  # Left: the other ranks have left already
            agree(name, error)
        if doing:
            noted(error, f"(while {doing})")
        raise
    agree(name, report)
    return result


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _find_odd_value(values: Sequence[Any]) -> tuple[int, int] | None:
    """Return (index of the most common value, first index of another value).

    Return None if all values are equal. On a tie, the value that comes first counts as the most
    common."""
    if len(set(values)) <= 1:
        return None
    usual = Counter(values).most_common(1)[0][0]
    return values.index(usual), next(i for i, v in enumerate(values) if v != usual)


def _check_same_lines(
    name: str,
    comm: Communicator,
    digests: Sequence[str],
    lines: Sequence[str],
    what: str,
    where: str,
    advice: str,
) -> None:
    odd = _find_odd_value(digests)
    if odd is None:
        return
    texts = comm.all_gather_object(list(lines), GRAPH)
    usual, other = texts[odd[0]], texts[odd[1]]
    at = next(
        (i for i, (a, b) in enumerate(zip(usual, other, strict=False)) if a != b),
        min(len(usual), len(other)),
    )
    said = "\n".join(
        f"  rank {r} has  {texts[r][at] if at < len(texts[r]) else '(nothing more)'}"
        for r in sorted(odd)
    )
    has = "has captured another graph" if what.startswith("captured") else f"has {what}"
    raise GraphError(
        f"{name}: rank {odd[1]} {has} than rank {odd[0]}{where.format(at)}:\n{said}\n{advice}"
    )
