"""Tests that graphs train as one device does: four kinds of models, in every way of distributing
them, over three steps, to 1e-9 in float64.

One device runs the same micro-batches, so no other difference remains. (Batch norms see one
micro-batch at a time, and running statistics go through them in turn.)
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

B, S = flow.sbp.broadcast, flow.sbp.split
WORDS, LENGTH, WIDTH, BATCH, STEPS = 13, 6, 8, 16, 3


# ------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.before(x)
        q, k, v = (
            project(h).unflatten(-1, (4, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A decoder whose head is the embedding of its words."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(True) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class BERT(nn.Module):
    """An encoder in which word 0 is padding. A mask that all layers share hides the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position, self.norm = (
            nn.Embedding(WORDS, WIDTH, padding_idx=0),
            nn.Embedding(LENGTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.layers = nn.ModuleList(Block(False) for _ in range(4))
        self.pooler, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0)[:, None, None, :]
        x = self.norm(self.token(ids) + self.position(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(torch.tanh(self.pooler(x)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.short = (
            nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        y += self.short(x)
        return F.relu_(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        )
        self.body = nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2), Residual(8, 8, 1))
        self.head = nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1))  # type: ignore[no-any-return]


def t5() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=2, d_ff=2 * WIDTH, num_layers=2, num_decoder_layers=2,
        num_heads=4, dropout_rate=0.0, use_cache=False,
        relative_attention_num_buckets=4, relative_attention_max_distance=8,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def words(step: int, seed: int = 0) -> Tensor:
    return torch.randint(
        1, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(100 * step + seed)
    )


def padded(step: int) -> Tensor:
    ids = words(step)
    ids[::3, LENGTH - 2 :] = 0
    return ids


def pictures(step: int) -> Tensor:
    return torch.randn(
        BATCH, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )


def next_words(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Task(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]  # inputs, then targets
    run: Callable[..., Tensor]  # (model, *inputs) -> logits
    loss: Callable[[Tensor, Tensor], Tensor]
    split: dict[str, Any]  # the layouts of parameters for tensor parallelism
    length: int  # the dim that sequence parallelism splits
    at: dict[int, list[str]]  # the first modules of stages, by the number of stages


HEADS = {"*.q.weight": S(0), "*.k.weight": S(0), "*.v.weight": S(0), "*.o.weight": S(1)}
ATTENTION = {**HEADS, "*.up.*": S(0), "*.down.weight": S(1)}
TASKS = {
    "gpt": Task(GPT, lambda s: (words(s), words(s, 1)), lambda m, x: m(x), next_words,
        {**ATTENTION, "token.weight": S(0), "*": B}, 1,
                {2: ["blocks.2"], 4: ["blocks.1", "blocks.2", "blocks.3"]}),
    "bert": Task(BERT, lambda s: (padded(s), words(s, 1)), lambda m, x: m(x), next_words,
        {**ATTENTION, "token.weight": S(1), "head.weight": S(0), "*": B}, 1,
                 {2: ["layers.1"], 4: ["layers.0", "layers.2", "pooler"]}),
    "resnet": Task(ResNet, lambda s: (pictures(s), words(s)[:, 0]), lambda m, x: m(x),
        F.cross_entropy,
                   {"*conv*.weight": S(0), "*.short.*": B, "head.weight": S(1), "*": B}, 2,
                   {2: ["body.1"], 4: ["body.0", "body.1", "body.2"]}),
    "t5": Task(t5, lambda s: (words(s), words(s, 2), words(s, 1)), lambda m, x,
        y: m(input_ids=x, decoder_input_ids=y).logits, next_words,
               {**HEADS, "*.wi.weight": S(0), "*.wo.weight": S(1), "shared.weight": S(0), "*": B},
               1,
               {2: ["decoder"], 4: ["encoder.block.1", "decoder", "decoder.block.1"]}),
}  # fmt: skip


# Ranks are threads that share torch's generator and initializers, which transformers changes
# meanwhile. So all ranks copy one model.
_making = threading.Lock()


@functools.cache
def _initial(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = TASKS[name].model().double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
    return model


def initial(name: str) -> nn.Module:
    with _making:
        return _initial(name)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1
    )


def part(t: Tensor, micros: int, blocks: int, i: int) -> Tensor:
    """Return micro-batch ``i``: some rows of each block that a rank holds."""
    return t.unflatten(0, (blocks, micros, -1))[:, i].flatten(0, 1)


@functools.cache
def reference(
    name: str,
    micros: int = 1,
    blocks: int = 1,
    amp: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses and the state of one device."""
    task, model = TASKS[name], copy.deepcopy(initial(name)).to(dtype)
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        total = 0.0
        for i in range(micros):
            *given, targets = (
                part(t.to(dtype) if t.is_floating_point() else t, micros, blocks, i)
                for t in task.batch(step)
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = task.loss(task.run(model, *given), targets) / micros
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {k: v.detach() for k, v in model.state_dict().items()}


# ------------------------------------------------------------------------------------ distributions


class Spread(NamedTuple):
    """A distribution of a case: the ranks of each stage (one: no pipeline), and the sbp of
    parameters and inputs on each axis of a stage."""

    stages: list[Any]
    tensor: bool = False  # the last axis splits the parameters
    entry: tuple[
        Any, ...
    ] = ()  # () : split along the batch over the first axis, broadcast over the others
    zero: int = 0
    micros: int = 1
    schedule: str | None = None
    at: tuple[str, ...] | None = None
    prepare: Callable[[Any], None] | None = None
    amp: bool = False

    @property
    def ranks(self) -> int:
        return 1 + max(r for s in self.stages for r in torch.tensor(s).flatten().tolist())

    def sbp(self, axes: int, model: str = "") -> Any:
        if not self.tensor:
            return B
        table = TASKS[model].split
        return {path: [B] * (axes - 1) + [sbp] for path, sbp in table.items()}

    def inputs(self, axes: int) -> list[Any]:
        return list(self.entry) or ([B] if self.tensor and axes == 1 else [S(0)] + [B] * (axes - 1))


class Training(flow.nn.Graph):
    def __init__(self, task: Task, model: nn.Module, spread: Spread) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.add_optimizer(optimizer_of(model))
        self.config.set_gradient_accumulation_steps(spread.micros)
        if spread.zero:
            self.config.enable_zero(True, stage=spread.zero, shard_min_size=1)
        if spread.schedule:
            self.config.set_schedule(spread.schedule)
        if spread.amp:
            self.config.enable_amp(True, dtype=torch.bfloat16)
        if spread.prepare:
            spread.prepare(self)

    def build(self, *given: Any) -> Any:
        *inputs, targets = given
        loss = self.task.loss(self.task.run(self.model, *inputs), targets)
        loss.backward()
        return loss


def placed(
    name: str, spread: Spread, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, list[flow.placement]]:
    places = [flow.placement("cpu", ranks) for ranks in spread.stages]
    model = copy.deepcopy(initial(name)).to(dtype)
    sbp = spread.sbp(places[0].axes, name)
    if len(places) == 1:
        model.to_global(places[0], sbp)  # type: ignore[operator]
    else:
        at = list(spread.at) if spread.at is not None else TASKS[name].at[len(places)]
        flow.pipeline.cut(model, places, at, sbp)
    return model, places


def given(
    name: str,
    spread: Spread,
    places: Sequence[flow.placement],
    step: int,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    *inputs, targets = (
        t.to(dtype) if t.is_floating_point() else t for t in TASKS[name].batch(step)
    )
    sbp = spread.inputs(places[0].axes)
    kept = [B if e.is_split and e.dim >= targets.dim() else e for e in sbp]
    everywhere = [(t, places[0], sbp) for t in inputs] + [(targets, places[-1], kept)]
    return [t.to_global(place, [B] * place.axes).to_global(sbp=how) for t, place, how in everywhere]  # type: ignore[attr-defined]


def whole(x: Any) -> Tensor:
    return x.detach().to_global(x.placement, [B] * x.placement.axes)._local  # type: ignore[no-any-return]


def train(
    name: str, spread: Spread, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    model, places = placed(name, spread, dtype)
    before = {path: (p.placement, p.sbp) for path, p in model.named_parameters()}  # type: ignore[attr-defined]
    graph = Training(TASKS[name], model, spread)
    losses = [whole(graph(*given(name, spread, places, step, dtype))) for step in range(STEPS)]
    assert not torch.is_autocast_enabled("cpu"), "a call leaves autocast as it found it"
    assert {path: (p.placement, p.sbp) for path, p in model.named_parameters()} == before  # type: ignore[attr-defined]
    return losses, {path: whole(t) for path, t in model.state_dict().items()}, graph


def blocks_of(spread: Spread) -> int:
    """Return the number of row blocks into which the batch is split, if a micro-batch takes rows of
    each block."""
    found = set()
    for stage in (spread.stages[0], spread.stages[-1]):
        shape = torch.tensor(stage).shape
        found.add(
            torch.Size(
                n
                for n, e in zip(shape, spread.inputs(len(shape)), strict=True)
                if e.is_split and e.dim == 0
            ).numel()
        )
    return max(found) if len(found) == 1 and BATCH % (max(found) * spread.micros) == 0 else 1


def equal(
    name: str,
    spread: Spread,
    within: float = 1e-9,
    dtype: torch.dtype = torch.float64,
    state_within: float | None = None,
) -> None:
    """Compare losses and state with those of one device, on every rank."""
    state_within = within if state_within is None else state_within
    want_losses, want_state = reference(name, spread.micros, blocks_of(spread), spread.amp, dtype)
    losses, state, _ = train(name, spread, dtype)
    for step, (got, want) in enumerate(zip(losses, want_losses, strict=True)):
        if got.numel():
            torch.testing.assert_close(
                got.to(want.dtype),
                want,
                rtol=within,
                atol=within,
                msg=lambda m, step=step: f"loss of step {step}: {m}",
            )  # type: ignore[misc]
    assert state.keys() == want_state.keys()
    for path, want in want_state.items():
        if state[path].shape == want.shape:  # otherwise it is on other ranks
            torch.testing.assert_close(
                state[path],
                want,
                rtol=state_within,
                atol=state_within,
                msg=lambda m, path=path: f"{path}: {m}",
            )  # type: ignore[misc]


def check(name: str, spread: Spread, **how: Any) -> None:
    reference(
        name,
        spread.micros,
        blocks_of(spread),
        spread.amp,
        **({"dtype": how["dtype"]} if "dtype" in how else {}),
    )  # once, not in every thread
    simulate(spread.ranks, functools.partial(equal, name, spread, **how))


# -------------------------------------------------------------------------------------------- cases


def sequence(name: str) -> Spread:
    return Spread([[0, 1]], entry=(S(TASKS[name].length),))


def recompute(graph: Any) -> None:
    """Recompute a part of each stage in backward."""
    again = {
        "blocks.0",
        "blocks.2",
        "blocks.3",
        "layers.1",
        "layers.3",
        "body.0",
        "body.2",
        "encoder.block.1",
        "decoder.block.0.layer.1",
    }
    for path in again & {path for path, _ in graph.model.named_modules()}:
        graph.model.get_submodule(path).to(
            flow.nn.graph.GraphModule
        ).activation_checkpointing = True


NAMES = sorted(TASKS)
ONE = [[0, 1]]
CUBE = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
FLAT: dict[str, Callable[[str], Spread]] = {
    "data": lambda name: Spread(ONE),
    "accumulating-2": lambda name: Spread(ONE, micros=2),
    "accumulating-4": lambda name: Spread(ONE, micros=4),
    "tensor": lambda name: Spread(ONE, tensor=True),
    "tensor-accumulating": lambda name: Spread(ONE, tensor=True, micros=2),
    "sequence": sequence,
    "zero-1": lambda name: Spread(ONE, zero=1),
    "zero-2": lambda name: Spread(ONE, zero=2),
    "zero-3": lambda name: Spread(ONE, zero=3),
    "zero-3-accumulating": lambda name: Spread(ONE, zero=3, micros=2),
    "data-tensor": lambda name: Spread([[[0, 1], [2, 3]]], tensor=True),
    "data-tensor-zero-2": lambda name: Spread([[[0, 1], [2, 3]]], tensor=True, zero=2),
}
TWO, FOUR = [[0], [1]], [[0], [1], [2], [3]]
PIPED: dict[str, Spread] = {
    **{
        f"{schedule}-2": Spread(TWO, micros=4, schedule=schedule)
        for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")
    },
    **{
        f"{schedule}-4": Spread(FOUR, micros=4, schedule=schedule)
        for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2")
    },
    "interleaved-4": Spread([[0], [1], [0], [1]], micros=4, schedule="interleaved"),
    "zb-v-4": Spread([[0], [1], [1], [0]], micros=4, schedule="zb-v"),
    "one-micro-batch": Spread(TWO),
    "uneven-1-2": Spread([[0], [1, 2]], micros=4),
    "uneven-1-2-zb": Spread([[0], [1, 2]], micros=2, schedule="zb-h1"),
    "uneven-3-1": Spread([[0, 1, 2], [3]], micros=2, entry=(B,)),
    "uneven-3-1-split": Spread([[0, 1, 2], [3]], micros=2),
    "staged-zero-2": Spread([[0, 1], [2, 3]], micros=4, zero=2),
    "staged-zero-3": Spread([[0, 1], [2, 3]], micros=4, zero=3),
    "staged-zero-3-zb": Spread([[0, 1], [2, 3]], micros=4, zero=3, schedule="zb-h1"),
    "staged-tensor": Spread([[0, 1], [2, 3]], micros=2, tensor=True),
    "recomputed": Spread(TWO, micros=4, prepare=recompute),
    "recomputed-zero-3": Spread([[0, 1], [2, 3]], micros=2, zero=3, prepare=recompute),
    "recomputed-zb": Spread(FOUR, micros=4, schedule="zb-h1", prepare=recompute),
    "staged-data-tensor": Spread(CUBE, micros=2, tensor=True),
    "staged-data-tensor-zero-3": Spread(CUBE, micros=2, tensor=True, zero=3),
    "staged-data-tensor-zb": Spread(CUBE, micros=2, tensor=True, schedule="zb-h1"),
}
#: The default run has one kind of model for each distribution, and all other cases are slow.
QUICK = {
    ("data", "resnet"), ("accumulating-4", "resnet"), ("tensor", "bert"), ("sequence", "gpt"),
    ("zero-3", "resnet"),
    ("gpipe-2", "resnet"), ("1f1b-2", "t5"), ("zb-h2-2", "gpt"), ("interleaved-4", "bert"),
    ("zb-v-4", "resnet"), ("zb-h1-4", "resnet"),
    ("uneven-1-2", "resnet"), ("staged-zero-2", "resnet"), ("recomputed", "gpt"),
    ("recomputed-zb", "gpt"), ("staged-data-tensor", "resnet"),
}  # fmt: skip


def tiers(ways: Any) -> list[Any]:
    return [
        pytest.param(way, name, marks=[] if (way, name) in QUICK else pytest.mark.slow)
        for way in ways
        for name in NAMES
    ]


@pytest.mark.long
@pytest.mark.parametrize(("way", "name"), tiers(FLAT))
@pytest.mark.sweep(6)
def test_spread_over_ranks(way: str, name: str) -> None:
    check(name, FLAT[way](name))


@pytest.mark.long
@pytest.mark.parametrize(("way", "name"), tiers(PIPED))
@pytest.mark.sweep(3)
def test_in_stages(way: str, name: str) -> None:
    check(name, PIPED[way])


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet", "gpt", pytest.param("bert", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["data", "stages"])
@pytest.mark.sweep(4)
def test_mixed_precision(way: str, name: str) -> None:
    """Mixed precision rounds bfloat16 products as eager autocast on one device does. Sums in
    another order differ by units in the last place (2**-8). If such a difference changes the sign
    of a gradient near 0, AdamW steps in the other direction: by its rate, 0.02, in each of three
    steps."""
    spread = Spread(ONE, amp=True) if way == "data" else Spread(TWO, micros=2, amp=True)
    check(name, spread, within=2e-2, dtype=torch.float32, state_within=0.12)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.25))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


DROPPING = Dropping().double()


def dropped(
    stages: list[list[int]], schedule: str | None, seed: int, again: bool = False
) -> list[Tensor]:
    """Return the losses of three steps with dropout, and the seed of a draw after them."""
    places = [flow.placement("cpu", ranks) for ranks in stages]
    model = copy.deepcopy(DROPPING)
    if len(stages) == 1:
        model.to_global(places[0], B)  # type: ignore[operator]
    else:
        flow.pipeline.cut(model, places, ["second"])

    class Graph(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer_of(model))
            self.config.set_gradient_accumulation_steps(4)
            self.config.set_schedule(schedule)

        def build(self, x: Any) -> Any:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

    graph = Graph()
    if again:
        graph.model.second.to(flow.nn.graph.GraphModule).activation_checkpointing = True
    flow.env.get_rank() or torch.manual_seed(seed)
    x = torch.ones(8, WIDTH, dtype=torch.float64).to_global(places[0], B)  # type: ignore[attr-defined]
    losses = [graph(x).to_global(flow.placement.all("cpu"), B)._local for _ in range(3)]
    return [*losses, torch.tensor(torch.initial_seed() % 2**53)]


def test_dropout_in_stages_is_that_of_one_device() -> None:
    """Dropout in stages equals that of one device. The masks are the same for every schedule, also
    if a stage is recomputed. The generator ends in the same state."""

    def run(stages: list[list[int]], *how: Any) -> list[Tensor]:
        found: dict[int, list[Tensor]] = {}

        def rank() -> None:
            flow.env.get_rank() or torch.manual_seed(how[1])
            found[flow.env.get_rank()] = dropped(stages, *how)

        simulate(1 + max(r for s in stages for r in s), rank, timeout=30.0)
        for other in found.values():
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)
        return found[0]

    want = run([[0]], None, 5)
    for how in (("gpipe", 5), ("1f1b", 5), ("zb-h1", 5), ("1f1b", 5, True)):
        torch.testing.assert_close(run([[0], [1]], *how), want, rtol=1e-12, atol=0)
    assert not torch.equal(torch.stack(run([[0], [1]], "1f1b", 6)[:3]), torch.stack(want[:3]))
