"""Random programs in which one rank may run one step differently: another operation, number, slice,
dtype, layout, order or branch.

A program is a list of steps on a few global tensors. `Program.run` runs it as one rank does. The
odd rank runs the step ``odd`` in its other variant. The difference is seldom a shape, so without a
comparison of the ranks most of these programs end and give wrong numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import globaltensor as flow

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
N = 4  # rows and columns of every tensor

Held = dict[str, Any]


@dataclass
class Step:
    """A step in its usual variant and in another."""

    kind: str
    usual: Callable[[Held], None]
    other: Callable[[Held], None]


@dataclass
class Program:
    """A program: its steps, the index of the odd step, and how the program ends."""

    seed: int
    steps: list[Step]
    odd: int
    trains: bool
    reads: bool  # True if it ends with a value that all ranks read
    kinds: list[str] = field(default_factory=list)

    def run(self, odd: bool, graph: bool = False) -> Any:
        """Run the program and return its result. ``odd``: run the odd step in its other variant."""
        first = tensors(self.seed)
        model, optimizer = first["model"], first["optimizer"]

        def body(x: Tensor) -> Tensor:
            held = first | {"x": x}
            for i, step in enumerate(self.steps):
                (step.other if odd and i == self.odd else step.usual)(held)
            out: Tensor = model(held["x"] + held["z"].to_global(sbp=S(0))).square().mean()
            if self.trains:
                out.backward()
            return out

        if graph:
            built = Built(body, model, optimizer if self.trains else None)
            loss = built(first["x"])
            loss = built(first["x"])
        else:
            loss = body(first["x"])
            if self.trains:
                optimizer.step()
                optimizer.zero_grad()
                loss = body(first["x"])
        return loss.item() if self.reads else loss


class Built(flow.nn.Graph):  # type: ignore[misc]
    """A static graph of a program."""

    def __init__(self, body: Callable[[Tensor], Tensor], model: nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.body, self.model = body, model
        if optimizer is not None:
            self.add_optimizer(optimizer)

    def build(self, x: Tensor) -> Tensor:
        return self.body(x)


def tensors(seed: int) -> Held:
    where = flow.placement.all("cpu")
    torch.manual_seed(seed)
    whole = torch.randn(N, N, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N)).double()
    flow.parallelize(model, where, "data" if seed % 2 else "fsdp")
    x = whole.to_global(where, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    return {
        "x": x,
        "z": (whole * 0.5).to_global(where, B),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # type: ignore[attr-defined]


def put(name: str, make: Callable[[Held], Tensor]) -> Callable[[Held], None]:
    def step(held: Held) -> None:
        held[name] = make(held)

    return step


def both(
    name: str, usual: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> tuple[Callable[[Held], None], Callable[[Held], None]]:
    return put(name, lambda held: usual(held[name])), put(name, lambda held: other(held[name]))


UNARY = [torch.sin, torch.tanh, torch.exp, torch.sigmoid, torch.neg, torch.abs]


def operation(draw: random.Random) -> Step:
    one, two = draw.sample(UNARY, 2)
    return Step("operation", *both(draw.choice("xz"), one, two))


def factor(draw: random.Random) -> Step:
    one, two = draw.sample([0.5, 2.0, -1.0, 3, 0.25, 1.5], 2)
    forms: list[Callable[[Tensor, Any], Tensor]] = [
        lambda t, k: t * k, lambda t, k: t + k, lambda t, k: k - t, lambda t, k: t.clamp(max=k),
        lambda t, k: torch.add(t, t, alpha=k), lambda t, k: t.mul(k),
    ]  # fmt: skip
    form = draw.choice(forms)
    return Step("factor", *both(draw.choice("xz"), lambda t: form(t, one), lambda t: form(t, two)))


def cut(draw: random.Random) -> Step:
    one, two = draw.sample(range(N), 2)
    dim = draw.choice([0, 1])

    def pick(i: int) -> Callable[[Tensor], Tensor]:
        return lambda t: t + (t[i : i + 1] if dim == 0 else t[:, i : i + 1])

    return Step("slice", *both(draw.choice("xz"), pick(one), pick(two)))


def dtype(draw: random.Random) -> Step:
    one, two = draw.sample([torch.float32, torch.float16, torch.bfloat16, torch.float64], 2)
    return Step(
        "dtype",
        *both(
            draw.choice("xz"),
            lambda t: t.to(one).sin().double(),
            lambda t: t.to(two).sin().double(),
        ),
    )


def layout(draw: random.Random) -> Step:
    one, two = draw.sample([S(0), S(1), B], 2)
    name = draw.choice("xz")

    def through(sbp: Any) -> Callable[[Any], Tensor]:
        return lambda t: t.to_global(sbp=sbp).cumsum(0).to_global(sbp=t.sbp)  # type: ignore[no-any-return]

    return Step("layout", *both(name, through(one), through(two)))


def order(draw: random.Random) -> Step:
    def exchanged(held: Held, first: str, second: str) -> None:
        a = held["x"] if first == "x" else held["z"].to_global(sbp=S(0))
        b = held["x"] if second == "x" else held["z"].to_global(sbp=S(0))
        left, right = a.to_global(sbp=S(1)), b.to_global(sbp=S(1))
        held[first], held[second] = (
            left.to_global(sbp=S(0)),
            right.to_global(sbp=S(0) if second == "x" else B),
        )
        held[first] = held[first] if first == "x" else held[first].to_global(sbp=B)

    return Step(
        "order", lambda held: exchanged(held, "x", "z"), lambda held: exchanged(held, "z", "x")
    )


def branch(draw: random.Random) -> Step:
    name, one = draw.choice("xz"), draw.choice(UNARY)
    return Step("branch", put(name, lambda held: one(held[name])), lambda held: None)


def in_place(draw: random.Random) -> Step:
    one, two = draw.sample([0.5, 2.0, 3.0], 2)
    name = draw.choice("xz")

    def scaled(k: float) -> Callable[[Held], None]:
        def step(held: Held) -> None:
            held[name] = held[name].clone()
            held[name].mul_(k)

        return step

    return Step("in place", scaled(one), scaled(two))


def reduction(draw: random.Random) -> Step:
    one, two = draw.sample([torch.sum, torch.mean, torch.amax, torch.amin], 2)
    name, dim = draw.choice("xz"), draw.choice([0, 1])
    return Step(
        "reduction",
        *both(
            name, lambda t: t - one(t, dim, keepdim=True), lambda t: t - two(t, dim, keepdim=True)
        ),
    )


def seed(draw: random.Random) -> Step:
    def noise(n: int) -> Callable[[Held], None]:
        def step(held: Held) -> None:
            torch.manual_seed(n)
            held["x"] = held["x"] + flow.randn(
                N, N, placement=flow.placement.all("cpu"), sbp=S(0), dtype=torch.float64
            )

        return step

    return Step("seed", noise(1), noise(2))


def plain(draw: random.Random) -> Step:
    def added(scale: float) -> Callable[[Held], None]:
        return put("x", lambda held: held["x"] + torch.arange(N, dtype=torch.float64) * scale)

    return Step("plain tensor", added(1.0), added(2.0))


KINDS = [operation, factor, cut, dtype, layout, order, branch, in_place, reduction, seed, plain]


def drawn(number: int, graph: bool = False) -> Program:
    """Return program ``number``: the kind of its odd step cycles through all kinds, and all else is
    drawn. A graph's build() may not seed."""
    draw, kinds = random.Random(number), [kind for kind in KINDS if not (graph and kind is seed)]
    steps = [draw.choice(kinds)(draw) for _ in range(draw.randint(1, 5))]
    odd = draw.randrange(len(steps) + 1)
    steps.insert(odd, kinds[number % len(kinds)](draw))
    return Program(
        number,
        steps,
        odd,
        trains=draw.random() < 0.5,
        reads=draw.random() < 0.7,
        kinds=[s.kind for s in steps],
    )
