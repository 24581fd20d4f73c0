"""Random small models, machines and meshes for tests of the search. The minimum cost of a problem
is found by trying every choice."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from globaltensor.auto.intra_op.formulate import Formulation
from globaltensor.auto.ir.op_graph import Calls
from globaltensor.auto.ir.trace import calls_of_model
from globaltensor.auto.solver import Problem
from globaltensor.cluster import Cluster
from globaltensor.sharding.placement import Placement

__all__ = ["Case", "TooLarge", "cheaper", "drawn", "everything_tried", "tiny"]

PRESETS = ("dgx-h100", "dgx-a100", "pcie-a100", "cpu", "generic", "ethernet-1g")
ROWS = (1, 2, 3, 4, 8, 16, 64, 512)
Array = np.ndarray[Any, Any]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))  # type: ignore[no-any-return]


class Case(NamedTuple):
    """A case to plan. ``draw``: the source of a test's other random choices."""

    draw: random.Random
    model: nn.Module
    x: Tensor
    calls: Calls
    cluster: Cluster
    mesh: Placement

    def __str__(self) -> str:
        return f"{self.model} of {list(self.x.shape)} on {self.mesh.shape} of {self.cluster}"


def drawn(seed: int) -> Case:
    """Draw linears, norms, gelus, residuals, attention or convolutions, on a mesh of one or two
    axes."""
    draw = random.Random(seed)
    with torch.device("meta"):
        model, x = _model(draw)
    return _case(draw, model, x, ((2,), (2,), (4,), (8,), (3,), (2, 2), (2, 4)))


def tiny(seed: int) -> Case:
    """Draw one or two layers, so few that all plans can be tried."""
    draw = random.Random(seed)
    width, rows = draw.choice((8, 32, 128, 2048)), draw.choice((1, 2, 4, 8, 64, 512))
    out, bias, kind = draw.choice((8, width, 4 * width)), draw.random() < 0.5, draw.randrange(5)
    with torch.device("meta"):
        x = torch.empty(rows, width)
        if kind == 0:
            model: nn.Module = nn.Linear(width, out)
        elif kind == 1:
            model = nn.Sequential(
                nn.Linear(width, out, bias=False), nn.GELU(), nn.Linear(out, 8, bias=False)
            )
        elif kind == 2:
            model = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out, bias=bias))
        elif kind == 3:
            model = Residual(nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()))
        else:
            model, x = (
                nn.Sequential(
                    nn.Conv2d(3, draw.choice((4, 16)), 3, padding=1, bias=bias), nn.ReLU()
                ),
                torch.empty(rows, 3, 8, 8),
            )
    return _case(draw, model, x, ((2,), (2,), (4,), (3,), (2, 2)))


def _case(
    draw: random.Random, model: nn.Module, x: Tensor, shapes: Sequence[tuple[int, ...]]
) -> Case:
    shape = draw.choice(shapes)
    cluster = _cluster(draw, math.prod(shape))
    mesh = Placement("cpu", np.arange(math.prod(shape)).reshape(shape))
    return Case(draw, model, x, calls_of_model(model, (x,), None, cluster.device), cluster, mesh)


def _model(draw: random.Random) -> tuple[nn.Module, Tensor]:
    kind, width, rows = (
        draw.choice(("rows", "rows", "words", "pictures")),
        draw.choice((8, 32, 128, 512, 2048)),
        draw.choice(ROWS),
    )
    layers: list[nn.Module] = []
    if kind == "pictures":
        channels, side = draw.choice((3, 8, 64)), draw.choice((8, 16))
        x = torch.empty(rows, channels, side, side)
        for _ in range(draw.randint(1, 2)):
            more = draw.choice((4, 16, 64))
            layers += [nn.Conv2d(channels, more, 3, padding=1), draw.choice((nn.ReLU, nn.GELU))()]
            channels = more
        if draw.random() < 0.5:
            layers.append(nn.AdaptiveAvgPool2d(1))
            side = 1
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(channels * side**2, draw.choice((4, 16)))
        ), x
    x = (
        torch.empty(rows, width)
        if kind == "rows"
        else torch.empty(rows, draw.choice((4, 16, 64)), width)
    )
    for _ in range(draw.randint(1, 4)):
        what = draw.choice(
            [
                "linear",
                "linear",
                "gelu",
                "norm",
                "mlp",
                "residual",
                *(["attention"] * 2 if kind == "words" else []),
            ]
        )
        if what == "linear":
            out = draw.choice((8, width, 4 * width))
            layers.append(nn.Linear(width, out, bias=draw.random() < 0.6))
            width = out
        elif what == "gelu":
            layers.append(nn.GELU())
        elif what == "norm":
            layers.append(nn.LayerNorm(width))
        elif what == "mlp":
            layers.append(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            )
        elif what == "residual":
            layers.append(Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))))
        else:
            layers.append(Residual(Attention(width, draw.choice((1, 2, 4)))))
    return nn.Sequential(*layers, nn.Linear(width, 8)), x


def _cluster(draw: random.Random, size: int) -> Cluster:
    """Draw a known machine, or one that does not exist."""
    if draw.random() < 0.6:
        return dataclasses.replace(Cluster.preset(draw.choice(PRESETS)), size=size)

    def magnitude(low: float, high: float) -> float:
        return 10.0 ** draw.uniform(low, high)

    return Cluster(
        name="made up", size=size, launch=magnitude(-7, -4), latency=magnitude(-7, -4),
        bandwidth=magnitude(8, 12), memory_bandwidth=magnitude(9, 12.5),
        kernel=magnitude(-7, -5), flops={"float32": magnitude(10, 14)},
        overlap=draw.choice((1.0, 1.15, 1.5, 2.0)), rank_skew=draw.choice((0.0, magnitude(-6, -3))),
        bucket_factor=draw.choice((1.0, 0.4)), optimizer_factor=draw.choice((1.0, 3.0)),
    )  # fmt: skip


# -------------------------------------------------------------------------------- trying everything


def both(f: Formulation) -> tuple[Problem, Problem]:
    """Return the problems of the two sums. A plan's cost is the larger sum."""
    return f.problem, f.turned().problem


def everything_tried(f: Formulation, limit: int | None, most: float = 3e6) -> float | None:
    """Return the minimum cost of all choices within the limit, inf if none fits. Returns None if
    there are more than ``most`` choices."""
    problems = both(f)
    sizes = [len(c) for c in problems[0].costs]
    if math.prod(sizes) > most:
        return None

    def wide(values: Any, nodes: tuple[int, ...]) -> Array:
        """Reshape values to an array over all choices."""
        found = np.asarray(values, dtype=float)
        found = found if nodes == tuple(sorted(nodes)) else found.T
        return found.reshape([n if k in nodes else 1 for k, n in enumerate(sizes)])

    sums = []
    for problem in problems:
        total = np.zeros(sizes)
        for node, costs in enumerate(problem.costs):
            total = total + wide(costs, (node,))
        for edge, table in zip(problem.edges, problem.tables, strict=True):
            total = total + wide(table, edge)
        sums.append(total)
    larger = np.maximum(*sums)
    if limit is not None:
        usages = [(node, use) for node, uses in enumerate(problems[0].usages) for use in uses]
        for moment in {use.start for _, use in usages if use.start is not None} | {0}:
            level = np.zeros(sizes)
            for node, use in usages:
                if use.start is None or use.end is None or use.start <= moment < use.end:
                    level = level + wide(use.amounts, (node,))
            larger = np.where(level > limit * (1 + 1e-9), np.inf, larger)
    return float(larger.min())


class TooLarge(Exception):
    """An error raised when a test has no time for the number of choices."""


# strategies of some nodes -> the possible pairs of sums; no pair is below another in both sums
Points = dict[tuple[int, ...], Array]


def cheaper(f: Formulation, cost: float, most: int = 60_000) -> bool:
    """Return True if some choice costs less than ``cost``, with any memory. All choices are
    enumerated node by node. Choices with the same strategies at the boundary are pruned if another
    is below in both sums. Raises TooLarge."""
    factors = _factors(*both(f), cost)
    left = {node for nodes, _ in factors for node in nodes}
    while left:
        node = min(
            left, key=lambda x: (len({v for nodes, _ in factors if x in nodes for v in nodes}), x)
        )
        left.remove(node)
        own = sorted(
            (factor for factor in factors if node in factor[0]), key=lambda factor: len(factor[0])
        )
        nodes, points = own[0]
        for more, table in own[1:]:
            nodes, points = _joined(nodes, points, more, table, cost)
            if len(points) > most:
                raise TooLarge
        at, rest = nodes.index(node), dict[tuple[int, ...], list[Array]]()
        for key, pairs in points.items():
            rest.setdefault(key[:at] + key[at + 1 :], []).append(pairs)
        merged = {key: _front(np.concatenate(pairs)) for key, pairs in rest.items()}
        factors = [factor for factor in factors if node not in factor[0]] + [
            (nodes[:at] + nodes[at + 1 :], merged)
        ]
    total: Points = {(): np.zeros((1, 2))}
    for nodes, points in factors:
        _, total = _joined((), total, nodes, points, cost)
    return bool(total)


def _factors(one: Problem, other: Problem, cost: float) -> list[tuple[tuple[int, ...], Points]]:
    found: list[tuple[tuple[int, ...], Points]] = []
    tables = [
        ((node,), a, b) for node, (a, b) in enumerate(zip(one.costs, other.costs, strict=True))
    ]
    for nodes, first, second in [*tables, *zip(one.edges, one.tables, other.tables, strict=True)]:
        pair = np.stack([first, second], -1).astype(float)
        found.append(
            (
                tuple(nodes),
                {
                    tuple(map(int, key)): pair[tuple(key)][None]
                    for key in np.argwhere((pair < cost).all(-1))
                },
            )
        )
    return found


def _joined(
    nodes: tuple[int, ...], points: Points, more: tuple[int, ...], table: Points, cost: float
) -> tuple[tuple[int, ...], Points]:
    """Add the sums of two factors for equal strategies of the shared nodes. Only pairs with both
    sums below ``cost`` are kept."""
    shared, new = [n for n in more if n in nodes], [n for n in more if n not in nodes]
    index: dict[tuple[int, ...], list[tuple[tuple[int, ...], Array]]] = {}
    for key, pairs in table.items():
        index.setdefault(tuple(key[more.index(n)] for n in shared), []).append(
            (tuple(key[more.index(n)] for n in new), pairs)
        )
    found: Points = {}
    for key, pairs in points.items():
        for rest, theirs in index.get(tuple(key[nodes.index(n)] for n in shared), ()):
            sums = (pairs[:, None] + theirs[None]).reshape(-1, 2)
            sums = sums[(sums < cost).all(1)]
            if len(sums):
                found[key + rest] = _front(sums)
    return (*nodes, *new), found


def _front(pairs: Array) -> Array:
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    least = np.minimum.accumulate(pairs[:, 1])
    return pairs[np.append(True, least[1:] < least[:-1])]
