"""Tests of recomputation in graphs: marked modules, checkpoints in the model itself, and the choice
by a memory limit. The numbers stay the same and the bytes fall."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import nn
from torch.utils.checkpoint import checkpoint

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GraphError
from globaltensor.graph.passes import memory_budget
from globaltensor.graph.passes.recompute import Recomputed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT, PARALLEL, loss_of, spread

B = flow.sbp.broadcast
Prepare = Callable[[Any], object]


def recomputed(graph: Any) -> list[Recomputed]:
    return [m for m in graph.program().modules() if isinstance(m, Recomputed)]


class Training(flow.nn.Graph):
    """A graph that trains by SGD on the mean square of the model's output."""

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=lr))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def recompute(*names: str) -> Prepare:
    def prepare(graph: Any) -> None:
        for name in names:
            getattr(graph.model, name).to(flow.nn.graph.GraphModule).activation_checkpointing = True

    return prepare


def train(
    model: nn.Module, x: torch.Tensor, prepare: Prepare | None, steps: int = 3
) -> tuple[list[float], list[torch.Tensor], Training]:
    """Train and return the losses, and the parameters and buffers after the steps."""
    graph = Training(model)
    if prepare is not None:
        prepare(graph)
    torch.manual_seed(1)
    losses = [graph(x).item() for _ in range(steps)]
    return losses, [t.detach().clone() for t in model.state_dict().values()], graph


def alike(model: nn.Module, x: torch.Tensor, prepare: Prepare, parts: int = 1) -> Training:
    """Train with and without recomputation. All numbers must be equal, and something must be
    recomputed."""
    want = train(copy.deepcopy(model), x, None)
    got = train(model, x, prepare)
    assert got[0] == want[0]
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len(recomputed(got[2])) == parts
    assert not recomputed(want[2])
    return got[2]


class Net(nn.Module):
    def __init__(self, body: nn.Module, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.body, self.last = nn.Linear(width, width), body, nn.Linear(width, width)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.first(x).tanh()))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())


def data(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Held:
    """A tensor saved by autograd. The class counts bytes, each memory once."""

    now, peak = 0, 0
    alive: Counter[int] = Counter()
    free: frozenset[int] = frozenset()

    def __init__(self, t: torch.Tensor) -> None:
        self.t, self.key = t, t.untyped_storage().data_ptr()
        if self.key not in Held.free:
            Held.alive[self.key] += 1
            Held.now += t.untyped_storage().nbytes() * (Held.alive[self.key] == 1)
            Held.peak = max(Held.peak, Held.now)

    def __del__(self) -> None:
        if self.key not in Held.free:
            Held.alive[self.key] -= 1
            Held.now -= self.t.untyped_storage().nbytes() * (Held.alive[self.key] == 0)


def peak_of(graph: Any, x: torch.Tensor, free: list[torch.Tensor]) -> int:
    """Return the peak bytes that autograd saves in one step, without those of ``free``."""
    Held.now = Held.peak = 0
    Held.alive, Held.free = Counter(), frozenset(t.untyped_storage().data_ptr() for t in free)
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.t):
        graph(x)
    return Held.peak


# ------------------------------------------------------------------------------------------ regions


def test_a_marked_module_is_recomputed_and_shown() -> None:
    graph = alike(Net(mlp()), data(), recompute("body"))
    text = str(graph.program())
    assert "Recomputed(" in text
    assert "self.recomputed_0(" in text
    assert text.count("gelu(") == 1, "the inner code is shown once, where it stands"


def test_the_bytes_fall() -> None:
    model, x = Net(nn.Sequential(*[mlp() for _ in range(4)])), data(64)
    free = [*model.parameters(), x]
    plain, marked = Training(copy.deepcopy(model)), Training(model)
    for part in marked.model.body:
        part.to(flow.nn.graph.GraphModule).activation_checkpointing = True
    plain(x), marked(x)
    assert peak_of(marked, x, free) < 0.6 * peak_of(plain, x, [*plain.model.parameters(), x])


def test_two_marked_modules_are_two_parts() -> None:
    alike(Net(mlp()), data(), recompute("first", "body"), parts=2)


def test_running_statistics_move_once() -> None:
    model = Net(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()))
    graph = alike(model, data(), recompute("body"))
    assert graph.model.body[1].num_batches_tracked.item() == 3


class Moving(nn.Module):
    """A module that scales by a state and then changes the state. When recomputed, it must scale by
    the old state. ``copied``: copies the state, as autograd requires without recomputation."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(8))
        self.linear, self.copied = nn.Linear(8, 8), copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x * (self.scale.clone() if self.copied else self.scale)).sin()
        self.scale.mul_(1.5)
        return out


def test_a_state_that_values_depend_on_is_as_it_was() -> None:
    plain, model = Net(Moving(True)), Net(Moving(False))
    model.load_state_dict(plain.state_dict())
    want, got = train(plain, data(), None), train(model, data(), recompute("body"))
    assert got[0] == want[0]
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(
        got[2].model.body.scale, torch.full((8,), 1.5**3, dtype=torch.float64)
    )


class Shifted(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.first(x) * 1.0))


class Before(nn.Module):
    """A module that writes to its input before any op saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.linear(x.cos()).exp()


def test_an_input_that_is_written_to_is_as_it_was() -> None:
    alike(Shifted(Before()), data(), recompute("body"))


class Later(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + 1
        y = self.body(h + 0)
        h += y
        return self.last(h)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin() + x


class LaterOn(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + 1
        y = self.body(h).sin()
        h += 1  # the body's input has changed
        return self.last(y) + h


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).sin()


def test_an_input_that_is_written_to_later_is_as_it_was() -> None:
    alike(LaterOn(Doubled()), data(), recompute("body"))
    alike(Later(Reads()), data(), recompute("body"))


class Twins(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x += 1
        return y.sin() + x


class WithTwins(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) + 1
        return self.last(self.body(h, h.view(-1, 8)))


def test_writing_to_memory_with_two_names_is_refused() -> None:
    with pytest.raises(GraphError, match="cannot run twice"):
        train(WithTwins(Twins()), data(), recompute("body"))


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.sigmoid().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x.float()).sin()
        return self.other(y.to(x.dtype) * scale).tanh()


def test_modes_change_inside() -> None:
    model = Net(Modes())
    model.body.linear.float()
    alike(model, data(), recompute("body"))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


class Calls(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sum().backward(retain_graph=True)
        return x.sin()


def test_a_backward_pass_inside_is_refused() -> None:
    with pytest.raises(GraphError, match="recomputed calls backward"):
        train(Net(Calls()), data(), recompute("body"))


def test_without_gradients_nothing_is_in_the_way() -> None:
    model = Net(mlp())

    class Evaluation(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    graph = Evaluation()
    recompute("body")(graph)
    torch.testing.assert_close(graph(data()), model(data()).detach())


# ------------------------------------------------------------------ checkpoints in the model itself


class Checkpointed(Net):
    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__(body)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        for part in self.body:
            h = checkpoint(part, h, use_reentrant=self.reentrant)
        return self.last(h)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_the_model_are_parts(reentrant: bool) -> None:
    model = Checkpointed(nn.Sequential(mlp(), mlp()), reentrant)
    plain = Net(nn.Sequential(mlp(), mlp()))
    plain.load_state_dict(model.state_dict())
    want = train(plain, data(), None)
    got = train(model, data(), None)
    assert got[0] == want[0]
    assert len(recomputed(got[2])) == 2


def test_checkpoints_outside_of_graphs_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        return x.sin().cos()

    for reentrant in (True, False):
        x = torch.ones(3, requires_grad=True)
        checkpoint(noted, x, use_reentrant=reentrant).sum().backward()
    assert len(runs) == 4


# ------------------------------------------------------------------------------------ several ranks


@functools.cache
def first() -> nn.Module:
    torch.manual_seed(0)
    return GPT(2, 16, 2, 8).double()


def small() -> nn.Module:
    """Return the same model at each call, although simulated ranks share torch's random numbers."""
    return copy.deepcopy(first())


def text(batch: int) -> torch.Tensor:
    return torch.randint(256, (batch, 9), generator=torch.Generator().manual_seed(3))


class Language(flow.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, rows: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, rows)
        loss.backward()
        return loss


def gpt(kind: str, batch: int, limit: int | None) -> tuple[list[float], list[str]]:
    """Return the losses of three steps and the last op of each recomputed part. Without a limit all
    blocks are recomputed, and otherwise the limit chooses."""
    model, everyone = small(), flow.placement.all("cpu")
    spread(model, PARALLEL[kind], everyone)
    graph = Language(model)
    if limit is None:
        for block in graph.model.blocks:
            block.to(flow.nn.graph.GraphModule).activation_checkpointing = True
    else:
        graph.config.set_memory_limit(limit)
    rows = text(batch).to_global(everyone, B, check_meta=False).to_global(sbp=PARALLEL[kind].batch)
    losses = [graph(rows).item() for _ in range(3)]
    assert recomputed(graph)
    return losses, [part.body.graph.output_node().prev.name for part in recomputed(graph)]


def reference(batch: int) -> list[float]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, losses = text(batch), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["data", "tensor", "fsdp", "sequence"])
@pytest.mark.sweep(2)
def test_ranks_move_data_again_in_one_order(kind: str) -> None:
    want = reference(4)
    for losses, _ in simulate(2, gpt, kind, 4, None):
        assert losses == pytest.approx(want, rel=1e-9)


@pytest.mark.long
def test_ranks_with_parts_of_unlike_size_choose_alike() -> None:
    want = reference(3)
    (losses, chosen), *others = simulate(2, gpt, "data", 3, 80_000)
    assert losses == pytest.approx(want, rel=1e-9)
    assert all(names == chosen for _, names in others)


def dropped(marked: bool) -> list[float]:
    everyone = flow.placement.all("cpu")
    model = Net(
        nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.5), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.3)
        )
    ).to_global(everyone, B)
    x = data(5).to_global(everyone, B, check_meta=False).to_global(sbp=flow.sbp.split(0))
    return train(model, x, recompute("body") if marked else None, steps=4)[0]


def test_dropout_draws_the_same_numbers_again() -> None:
    for plain, marked in zip(run_on(2, dropped, False), run_on(2, dropped, True), strict=True):
        assert plain == marked
        assert len(set(plain)) == 4


# ------------------------------------------------------------------------------------ memory limits


def big(limit: int | None) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT(6, 32, 2, 16).double()
    graph = Language(model)
    graph.config.set_memory_limit(limit)
    rows = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(4))
    return graph, rows, [*model.parameters(), rows]


def test_the_estimate_is_what_is_measured() -> None:
    graph, rows, free = big(None)
    graph(rows)
    measured = peak_of(graph, rows, free)
    assert memory_budget.kept_bytes(
        graph._last.captured.program, graph._last.captured.constants
    ) == pytest.approx(measured, rel=0.1)


@pytest.mark.long
def test_limits_are_kept_and_numbers_stay() -> None:
    graph, rows, free = big(None)
    want = [graph(rows).item() for _ in range(3)]
    most = peak_of(graph, rows, free)
    counts = []
    for share in (1.1, 0.8, 0.55):
        graph, rows, free = big(int(share * most))
        assert [graph(rows).item() for _ in range(3)] == pytest.approx(want, rel=1e-12)
        assert peak_of(graph, rows, free) <= share * most
        counts.append(sum(len(part.body.graph.nodes) for part in recomputed(graph)))
    assert counts[0] == 0
    assert 0 < counts[1] < counts[2], "a tighter limit recomputes more"


@pytest.mark.long
def test_what_cannot_be_kept_is_refused_with_what_can() -> None:
    graph, rows, _ = big(1000)
    with pytest.raises(GraphError, match="cannot be met") as refused:
        graph(rows)
    least = int(str(refused.value).split(" bytes) at the peak")[0].rsplit("(", 1)[1])
    graph, rows, free = big(least)
    graph(rows)
    assert peak_of(graph, rows, free) <= least
    with pytest.raises(GraphError, match="cannot be met"):
        big(least - 1)[0](rows)


def chain(seed: int, n: int) -> list[memory_budget.RecomputeUnit]:
    draw = random.Random(seed)
    calls = []
    for i in range(n):
        crossing = draw.randint(1, 20)
        later = draw.randint(0, crossing)
        calls.append(
            memory_budget.RecomputeUnit(
                i,
                0,
                draw.randint(1, 100),
                draw.uniform(1, 10),
                False,
                crossing,
                later,
                draw.randint(0, crossing - later),
            )
        )
    return calls


def bytes_of(
    calls: list[memory_budget.RecomputeUnit], cuts: tuple[int, ...], again: tuple[bool, ...]
) -> tuple[int, float]:
    """Return (peak, seconds) of the segments between cuts, each recomputed or not."""
    kept = peak = 0
    seconds = 0.0
    for k, (i, j) in enumerate(itertools.pairwise(cuts)):
        before = again[k - 1] if k else False
        if i:
            at = calls[i - 1]
            kept += (
                (at.crossing if again[k] else at.later) if before else at.unsaved if again[k] else 0
            )
        saved = sum(c.saved for c in calls[i:j])
        if again[k]:
            peak = max(peak, saved)
            seconds += sum(c.seconds for c in calls[i:j])
        else:
            kept += saved
    return kept + peak, seconds


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """The choice is the best of all ways to cut and to recompute. Bytes are rounded, so the
    effective limit may be a little lower than the given one."""
    n = 6
    calls = chain(seed, n)
    ways = []
    for count in range(n):
        for inner in itertools.combinations(range(1, n), count):
            cuts = (0, *inner, n)
            ways += [
                bytes_of(calls, cuts, again)
                for again in itertools.product((False, True), repeat=count + 1)
            ]
    total, least = sum(c.saved for c in calls), min(w[0] for w in ways)
    for share in (0.1, 0.4, 0.8):
        limit = int(least + share * (total - least))
        chosen = memory_budget.segments(calls, limit)
        cuts = tuple(sorted({0, n, *itertools.chain(*chosen)}))
        peak, seconds = bytes_of(
            calls, cuts, tuple((i, j) in chosen for i, j in itertools.pairwise(cuts))
        )
        assert peak <= limit
        assert seconds <= min(s for b, s in ways if b <= limit * 0.99) + 1e-9
    with pytest.raises(GraphError, match="cannot be met"):
        memory_budget.segments(calls, least - 1)
