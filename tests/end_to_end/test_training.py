"""Tests that complete models train to the numbers of one device: losses, gradients, parameters and
buffers over five optimizer steps, in float64, to 1e-9.

Every parallel mode runs on 2 and 4 ranks and on a 2x2 placement. The reference is the same model,
plain, in this process.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.pool import run_on
from test_example_gpt import example

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

B, S = flow.sbp.broadcast, flow.sbp.split
VOCABULARY, WIDTH, HEADS, TIME, STEPS = 37, 12, 3, 6, 5
NEAR = 1e-9

# --------------------------------------------------------------------------------------- the models


class MLP(nn.Module):
    """An MLP on [batch, time, features], so that the time dim can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.mid, self.down = (
            nn.LayerNorm(10),
            nn.Linear(10, 14),
            nn.Linear(14, 14),
            nn.Linear(14, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.mid(torch.tanh(self.up(self.norm(x))))))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.bn, self.down, self.out = (
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 7, 3),
            nn.Linear(7, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.up(x))), 2)
        return self.out(F.gelu(self.down(x)).mean((2, 3)))


class Encoder(nn.Module):
    """A BERT-like model: two embeddings, encoder layers, a label from the first token."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.token, self.position, self.norm = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(TIME, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            17,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=norm_first,
        )
        self.encoder, self.out = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.token(ids) + self.position(torch.arange(ids.shape[1])))
        return self.out(torch.tanh(self.encoder(x)[:, 0]))


def make_gpt(vocabulary: int) -> nn.Module:
    module = example()
    module.VOCABULARY = vocabulary
    return module.GPT(2, WIDTH, HEADS, TIME)  # type: ignore[no-any-return]


def gpt_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rows(batch: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, vocabulary, (batch, TIME + 1)),)


#: name: (model, batch, loss)
MODELS: dict[
    str,
    tuple[
        Callable[[int], nn.Module],
        Callable[[int, int], tuple[torch.Tensor, ...]],
        Callable[..., torch.Tensor],
    ],
] = {
    "gpt": (make_gpt, rows, gpt_loss),
    "mlp": (
        lambda v: MLP(),
        lambda b, v: (torch.randn(b, TIME, 10).double(), torch.randn(b, TIME, 3).double()),
        lambda m, x, y: F.mse_loss(m(x), y),
    ),
    "cnn": (
        lambda v: CNN(),
        lambda b, v: (torch.randn(b, 3, 9, 8).double(), torch.randint(0, 5, (b,))),
        lambda m, x, y: F.cross_entropy(m(x), y),
    ),
    **{
        name: (
            lambda v, first=first: Encoder(first),  # type: ignore[misc]
            lambda b, v: (torch.randint(0, VOCABULARY, (b, TIME)), torch.randint(0, 4, (b,))),
            lambda m, x, y: F.cross_entropy(m(x), y),
        )
        for name, first in (("encoder pre", True), ("encoder post", False))
    },
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}

# ----------------------------------------------------------------------------------- parallel modes

# The usual split of a transformer, a feed-forward net and a convolutional net: the first layer of
# a pair by columns, the second by rows.
TABLE = {
    "*.q.weight": S(0), "*.k.weight": S(0), "*.v.weight": S(0), "*.out.weight": S(1),
    "*in_proj_*": S(0), "*out_proj.weight": S(1),
    "*linear1.*": S(0), "*linear2.weight": S(1), "*up.*": S(0), "*down.weight": S(1), "bn.num*": B,
    "bn.*": S(0), "token.weight": S(0), "*": B,
}  # fmt: skip
SUMS = {"token": B, "*.out": B, "*down": B, "*self_attn.out_proj": B, "*linear2": B}
IN_TIME = {
    "token": S(1),
    "*.out": S(1),
    "*.down": S(1),
    "down": S(1),
    "*linear2": S(1),
    "*norm*": B,
}


@dataclass(frozen=True)
class Spread:
    """A parallel mode: the placement's shape, and the sbp of the batch, of the parameters and of
    modules' outputs."""

    grid: tuple[int, ...]
    batch: Sequence[Any]
    parameters: Mapping[str, Any]
    outputs: Mapping[str, Any]

    @property
    def size(self) -> int:
        return int(torch.tensor(self.grid).prod())


def axis(table: Mapping[str, Any], *before: Any) -> dict[str, Any]:
    return {pattern: [*before, sbp] for pattern, sbp in table.items()}


def lowest(*entries: Any) -> Callable[[str, torch.Tensor], list[Any]]:
    """Split each tensor that has the dim, and broadcast the others (biases, counters)."""
    return lambda path, t: [e if not e.is_split or e.dim < t.dim() else B for e in entries]


def spreads(ranks: str) -> dict[str, Spread]:
    """Return every mode, on "2" or "4" ranks in a line or on "2x2"."""
    if ranks == "2x2":
        grid = (2, 2)
        both = {name: [sbp, sbp] for name, sbp in TABLE.items()}
        return {
            "data": Spread(grid, [S(0), S(0)], {"*": [B, B]}, {}),
            "fsdp": Spread(grid, [S(0), S(0)], {"": lowest(S(0), S(0))}, {}),
            "data x fsdp": Spread(grid, [S(0), S(0)], {"": lowest(B, S(0))}, {}),
            "tensor": Spread(grid, [B, B], both, {name: [sbp, sbp] for name, sbp in SUMS.items()}),
            "sequence": Spread(grid, [S(0), B], axis(TABLE, B), axis(IN_TIME, S(0))),
            "hybrid": Spread(grid, [S(0), B], axis(TABLE, B), axis(SUMS, S(0))),
            "fsdp x tensor": Spread(
                grid,
                [S(0), B],
                {n: [S(1) if s == S(0) and "weight" in n else B, s] for n, s in TABLE.items()},
                {},
            ),
        }
    n = int(ranks)
    return {
        "data": Spread((n,), [S(0)], {"*": B}, {}),
        "tensor": Spread((n,), [B], TABLE, SUMS),
        # the library decides where to reduce partial sums
        "tensor, free": Spread((n,), [B], TABLE, {}),
        "sequence": Spread((n,), [B], TABLE, IN_TIME),
        "sequence, input": Spread(
            (n,), [S(1)], {"*": B}, {}
        ),  # context parallelism: the input is split in time, or in space
        "fsdp": Spread((n,), [S(0)], {"": lowest(S(0))}, {}),
        "hybrid": Spread((n // 2, 2), [S(0), B], axis(TABLE, B), axis(SUMS, S(0))),
    }


def spread(model: nn.Module, how: Spread, placement: Any) -> None:
    model.to_global(placement, how.parameters.get("", how.parameters))
    for name, module in model.named_modules():
        for pattern, sbp in how.outputs.items():
            if fnmatch.fnmatch(name, pattern) and not (
                isinstance(module, nn.Conv2d) or name == "norm" == pattern
            ):
                module.register_forward_hook(
                    lambda module, inputs, output, sbp=sbp: output.to_global(sbp=sbp)
                )


# ----------------------------------------------------------------------------------------- training


@dataclass
class History:
    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    state: dict[str, torch.Tensor]


def whole(x: torch.Tensor) -> torch.Tensor:
    return (
        torch.from_numpy(x.detach().numpy()) if x.is_global else x.detach()
    ).clone()  # clipping and the optimizer write into gradients


def train(
    model: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batches: Sequence[Sequence[torch.Tensor]],
    optimizer: str,
) -> History:
    step = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(step, len(batches))
    losses, gradients = [], []
    for batch in batches:
        step.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        gradients.append(
            {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        )
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        step.step()
        schedule.step()
        losses.append(loss.item())
    return History(losses, gradients, {name: whole(t) for name, t in model.state_dict().items()})


@functools.lru_cache(maxsize=64)
def single(
    model: str, batch: int, vocabulary: int, optimizer: str
) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]], History]:
    """Return the model before training, the batches, and the history of one device."""
    make, data, loss_of = MODELS[model]
    torch.manual_seed(batch)
    start = make(vocabulary).double()
    batches = [data(batch, vocabulary) for _ in range(STEPS)]
    return start, batches, train(copy.deepcopy(start), loss_of, batches, optimizer)


def same(got: History, want: History) -> None:
    assert got.losses == pytest.approx(want.losses, rel=NEAR, abs=0)
    for i, (ours, theirs) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        assert ours.keys() == theirs.keys()
        # Some gradients are zero except for rounding (a key's bias). The floor is the rounding
        # error of the largest gradient.
        floor = 1e-5 * max(float(g.abs().max()) for g in theirs.values())
        for name, g in theirs.items():
            assert float((ours[name] - g).abs().max()) <= NEAR * max(float(g.abs().max()), floor), (
                f"gradient of {name} in step {i}"
            )
    assert got.state.keys() == want.state.keys()
    for name, value in want.state.items():
        torch.testing.assert_close(
            got.state[name],
            value,
            rtol=NEAR,
            atol=NEAR * 1e-2,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def on_rank(
    model: str, start: nn.Module, batches: Any, want: History, how: Spread, optimizer: str
) -> None:
    placement = flow.placement("cpu", torch.arange(how.size).reshape(how.grid).tolist())
    mine = copy.deepcopy(start)
    spread(mine, how, placement)
    fed = [[_fed(t, placement, how.batch) for t in batch] for batch in batches]
    same(train(mine, MODELS[model][2], fed, optimizer), want)


def _fed(t: torch.Tensor, placement: Any, sbp: Sequence[Any]) -> torch.Tensor:
    fits = [e if not e.is_split or e.dim < t.dim() else B for e in sbp]  # labels have no time dim
    return t.to_global(placement, [B] * placement.axes).to_global(sbp=fits)


def equal(
    model: str,
    ranks: str,
    mode: str,
    batch: int = 5,
    vocabulary: int = VOCABULARY,
    optimizer: str = "sgd",
) -> None:
    """Check that the model trains in this mode, on simulated ranks, as on one device."""
    how = spreads(ranks)[mode]
    start, batches, want = single(model, batch, vocabulary, optimizer)
    simulate(how.size, on_rank, model, start, batches, want, how, optimizer, timeout=30.0)


def on_process(
    model: str, ranks: str, mode: str, batch: int, vocabulary: int, optimizer: str
) -> None:
    start, batches, want = single(model, batch, vocabulary, optimizer)
    on_rank(model, start, batches, want, spreads(ranks)[mode], optimizer)


# ---------------------------------------------------------------------------------------- the tests

CASES = [
    (model, ranks, mode)
    for model in MODELS
    for ranks in ("2", "4", "2x2")
    for mode in spreads(ranks)
]
# Cases of every test run: each mode for the GPT, and for other models the modes that differ most.
QUICK = {
    *[("gpt", ranks, mode) for ranks in ("2", "2x2") for mode in spreads(ranks)],
    ("gpt", "4", "fsdp"), ("mlp", "2", "sequence, input"), ("mlp", "4", "fsdp"),
    ("mlp", "2x2", "hybrid"), ("mlp", "2", "tensor"),
    ("cnn", "2", "data"), ("cnn", "2x2", "data"), ("cnn", "2", "tensor"), ("cnn", "2", "fsdp"),
    ("encoder pre", "2", "data"), ("encoder post", "2", "tensor"), ("encoder post", "2x2", "fsdp"),
    ("encoder pre", "2x2", "hybrid"),
    ("encoder pre", "2", "sequence"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "ranks", "mode"),
    [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow, id="-".join(c)) for c in CASES],
)
@pytest.mark.sweep(6)
def test_equal(model: str, ranks: str, mode: str) -> None:
    equal(model, ranks, mode)


UNEVEN = [
    (batch, mode) for batch in (3, 1) for mode in ("data", "fsdp", "tensor", "sequence", "hybrid")
]


@pytest.mark.parametrize(
    ("batch", "mode"),
    [
        pytest.param(b, m, marks=() if m in ("data", "fsdp") else pytest.mark.slow)
        for b, m in UNEVEN
    ],
)
@pytest.mark.sweep(3)
def test_batches_smaller_than_the_ranks(batch: int, mode: str) -> None:
    equal("gpt", "4", mode, batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("batch", [3, 1])
def test_small_batches_of_all_models(model: str, batch: int) -> None:
    if model == "cnn" and batch == 1:
        batch = 2
    equal(model, "2", "data", batch=batch)
    equal(model, "4", "fsdp", batch=batch)


@pytest.mark.parametrize(
    "vocabulary",
    [3, pytest.param(41, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "mode",
    [
        "tensor",
        pytest.param("hybrid", marks=pytest.mark.slow),
        pytest.param("fsdp", marks=pytest.mark.slow),
    ],
)
def test_uneven_vocabularies(vocabulary: int, mode: str) -> None:
    equal("gpt", "4", mode, vocabulary=vocabulary)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused"])
@pytest.mark.parametrize("mode", ["fsdp", "tensor"])
@pytest.mark.sweep(3)
def test_optimizers(optimizer: str, mode: str) -> None:
    equal("gpt", "2", mode, optimizer=optimizer)


REAL = [
    ("gpt", "2", "fsdp"), ("cnn", "2", "data"), ("gpt", "2", "tensor"), ("gpt", "2x2", "hybrid"),
    ("encoder pre", "4", "data"), ("gpt", "4", "sequence"),
    ("mlp", "2x2", "fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "ranks", "mode"),
    [
        pytest.param(*c, marks=() if i < 2 else pytest.mark.slow, id="-".join(c))
        for i, c in enumerate(REAL)
    ],
)
def test_on_processes(model: str, ranks: str, mode: str) -> None:
    run_on(spreads(ranks)[mode].size, on_process, model, ranks, mode, 5, VOCABULARY, "adamw fused")
