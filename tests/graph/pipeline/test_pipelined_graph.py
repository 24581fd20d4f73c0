"""Tests of pipelines in graphs: models cut by `flow.pipeline.cut` and `set_stage`, the values that
cross between stages, errors, and the agreement of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_graph_training import whole
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GlobalTensorError, GraphError, PlacementError

B, S = flow.sbp.broadcast, flow.sbp.split
WIDTH = 4


def rows(seed: int = 0, n: int = 8, width: int = WIDTH) -> Tensor:
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def places(*stages: Any) -> list[flow.placement]:
    return [flow.placement("cpu", ranks) for ranks in (stages or ([0], [1]))]


def initialised(model: nn.Module) -> nn.Module:
    """Initialize a model with the same weights on every rank. Ranks are threads that share torch's
    generator."""
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.double().parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64) * 0.4)
    return model


class Graph(flow.nn.Graph):
    def __init__(
        self,
        model: nn.Module,
        build: Callable[..., Any],
        *,
        micros: int = 2,
        trains: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.model, self.function = model, build
        if trains:
            self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        self.config.set_gradient_accumulation_steps(micros)
        if name is not None:
            self.config.set_schedule(name)

    def build(self, *inputs: Any) -> Any:
        return self.function(self.model, *inputs)


def squared(model: Any, *inputs: Any) -> Any:
    loss = model(*inputs).square().mean()
    loss.backward()
    return loss


def as_one_device(
    make: Callable[[], nn.Module],
    stages: Sequence[flow.placement],
    at: Sequence[str] | None,
    *,
    sbp: Any = B,
    micros: int = 2,
    build: Any = squared,
    schedule: str | None = None,
) -> None:
    """Train three steps in stages and on one device, on every rank, and compare."""
    plain, ours = initialised(make()), initialised(make())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    flow.pipeline.cut(ours, stages, at, sbp)
    graph = Graph(ours, build, micros=micros, name=schedule)
    for step in range(3):
        parts = rows(step).tensor_split(micros)
        want = sum(_scaled(build(_Scaled(plain, micros), part)) for part in parts) / micros
        optimizer.step()
        optimizer.zero_grad()
        got = graph(rows(step).to_global(stages[0], B))  # type: ignore[attr-defined]
        _close(got, want, f"step {step}")
    for (path, ours_), theirs in zip(
        ours.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        _close(ours_, theirs, path)


class _Scaled:
    """A model that scales its gradients as one micro-batch of ``n``."""

    def __init__(self, model: nn.Module, n: int) -> None:
        self.model, self.n = model, n

    def __call__(self, *inputs: Any) -> Any:
        out = self.model(*inputs)
        out.register_hook(lambda g: g / self.n)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _scaled(t: Any) -> Tensor:
    return t.detach()  # type: ignore[no-any-return]


def _close(got: Any, want: Tensor, what: str) -> None:
    here = whole(got)
    if here.shape == want.shape:  # otherwise it is on other ranks
        torch.testing.assert_close(here, want, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


# ----------------------------------------------------------------- models whose values cross stages


class Tied(nn.Module):
    """A model in the shape of GPT-2: the first and the last module share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Linear(WIDTH, WIDTH, bias=False)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.wte(x)
        for block in self.h:
            x = torch.tanh(block(x))
        return self.lm_head(x)  # type: ignore[no-any-return]


class Rotary(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "table", torch.linspace(0, 1, WIDTH, dtype=torch.float64), persistent=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.table * torch.arange(x.shape[0], dtype=torch.float64)[:, None]
        return angles.cos(), angles.sin()


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        return self.linear(x * angles[0] + x.flip(-1) * angles[1]).masked_fill(~mask, 0.0)


class Decoder(nn.Module):
    """A model whose layers all use rotary tables and a written mask, both made once. The input is
    added again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.layers = Rotary(), nn.ModuleList(Rotated() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        angles = self.rotary(x)
        mask = torch.ones(WIDTH, dtype=torch.bool)
        mask[1] = False
        first = x
        for layer in self.layers:
            x = layer(x, angles, mask)
        return self.norm(x + first)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


class Nested(nn.Module):
    """A model whose stages begin deep inside, one of them with an op that writes to its input.
    Several stages have statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.norm = nn.Linear(WIDTH, WIDTH), Inner(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.norm(self.body(h)) + h


class Branches(nn.Module):
    """An encoder and a decoder: the second stage reads the first stage's result for one input, and
    another input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
            nn.Bilinear(WIDTH, WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x), x.flip(0))  # type: ignore[no-any-return]


class Again(nn.Module):
    """A model that runs the same blocks several times, one of them under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.last = self.h[0]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.h:
                x = x + block(x)
        return self.last(x) + self.h[1](x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A model of ResNet-like blocks that write in place, on inputs of three dims. Two stages use
    one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, WIDTH))
            for _ in range(4)
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).repeat(1, 3, 1)
        positive = x > 0
        for block in self.h:
            out = block(x)
            out += x
            x = self.act(out)
        return x * ((x > 0.1) & positive).to(x.dtype)


CUTS = {
    "again": (Again, ["h.1"], [[0], [1]]),
    "again-uneven": (Again, ["h.1"], [[0, 1], [2]]),
    "tied": (Tied, ["h.1"], [[0], [1]]),
    "tied-uneven": (Tied, ["h.1"], [[0, 1], [2]]),
    "tied-evenly-cut": (Tied, None, [[0], [1]]),
    "tied-there-and-back": (Tied, ["h.0", "h.1", "lm_head"], [[0], [1], [1], [0]]),
    "rotary-mask-skip": (Decoder, ["layers.1"], [[0], [1]]),
    "rotary-three": (Decoder, ["layers.1", "layers.2"], [[0], [1], [2]]),
    "rotary-in-turn": (Decoder, ["layers.1", "layers.2"], [[0], [1], [0]]),
    "nested": (Nested, ["body.blocks.2"], [[0], [1]]),
    "nested-written": (Nested, ["body.blocks.3"], [[0], [1]]),
    "nested-three": (Nested, ["body.blocks.3", "norm"], [[0], [1, 2], [3]]),
    "in-place": (Residual, ["h.2"], [[0], [1]]),
    "in-place-inside": (Residual, ["h.1.1", "h.3"], [[0, 1], [2], [3]]),
    "branches": (Branches, ["decoder"], [[0], [1]]),
    "branches-inside": (Branches, ["encoder.2", "decoder"], [[0], [1], [2]]),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.sweep(3)
def test_cut_models_are_one_device(name: str) -> None:
    make, at, stages = CUTS[name]
    simulate(
        1 + max(r for s in stages for r in s), lambda: as_one_device(make, places(*stages), at)
    )


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-h2"])
def test_activations_in_place_under_other_schedules(schedule: str) -> None:
    simulate(2, lambda: as_one_device(Residual, places(), ["h.2"], micros=4, schedule=schedule))


def test_tied_weights_keep_one_gradient() -> None:
    def run() -> None:
        model = flow.pipeline.cut(initialised(Tied()), places(), ["h.1"])
        assert model.lm_head.weight is model.wte.weight
        assert len(list(model.parameters())) == 5

    simulate(2, run)


def test_sbp_patterns_see_paths_of_the_whole_model() -> None:
    def run() -> None:
        seen: list[str] = []
        stages = places([0, 1], [2, 3])
        model = flow.pipeline.cut(
            initialised(Nested()), stages, ["body.blocks.2"], lambda path, t: seen.append(path) or B
        )
        assert {"stem.weight", "body.blocks.2.bias", "norm.running_mean"} <= set(seen)
        assert [t.placement for t in (model.stem.weight, model.norm.running_mean)] == stages
        split = flow.pipeline.cut(
            initialised(Nested()), stages, ["body.blocks.2"], {"body.blocks.2.weight": S(0), "*": B}
        )
        assert [w.sbp for w in (split.body.blocks[2].weight, split.stem.weight)] == [(S(0),), (B,)]

    simulate(4, run)
    simulate(
        4,
        lambda: as_one_device(
            Nested,
            places([0, 1], [2, 3]),
            ["body.blocks.2"],
            sbp={"stem.weight": S(0), "body.blocks.2.weight": S(1), "*": B},
        ),
    )


def test_stages_set_by_hand() -> None:
    def run() -> None:
        stages = places()
        ours, plain = initialised(Branches()), initialised(Branches())
        ours.encoder.to_global(stages[0], B)
        ours.decoder.to_global(stages[1], B)
        graph = Graph(ours, squared)
        graph.model.encoder.to(flow.nn.graph.GraphModule).set_stage(0, stages[0])
        graph.model.decoder.to(flow.nn.graph.GraphModule).set_stage(1, stages[1])
        x = rows(0, 8)
        _close(
            graph(x.to_global(stages[0], B)),
            torch.stack([plain(part).square().mean() for part in x.tensor_split(2)]).mean(),
            "loss",
        )  # type: ignore[attr-defined]

    simulate(2, run)


def test_a_tensor_begins_a_stage() -> None:
    """A tensor begins a stage by `tensor.to(GraphTensor).set_stage`: values computed from it are in
    the next stage. The ops belong to no module."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64) * 0.5)

    def run() -> None:
        stages = places()
        both = nn.ModuleList([Weights().to_global(p, B) for p in stages])  # type: ignore[operator]

        def build(model: Any, x: Any) -> Any:
            x.to(flow.nn.graph.GraphTensor).set_stage(0, stages[0])
            h = torch.tanh(x @ model[0].w)
            h.to(flow.nn.graph.GraphTensor).set_stage(1, stages[1])
            assert h.placement is stages[1]
            loss = (h @ model[1].w).square().mean()
            loss.backward()
            return loss

        graph = Graph(both, build)
        loss = graph(rows().to_global(stages[0], B))  # type: ignore[attr-defined]
        w = torch.eye(WIDTH, dtype=torch.float64) * 0.5
        _close(loss, (torch.tanh(rows() @ w) @ w).square().mean(), "loss")
        assert list(graph._last.staged.programs) == [flow.env.get_rank()]
        with pytest.raises(GraphError, match="in build"):
            rows().to_global(stages[0], B).to(flow.nn.graph.GraphTensor).set_stage(0)  # type: ignore[attr-defined]

    simulate(2, run)


def test_evaluation_with_several_outputs() -> None:
    """A graph without an optimizer runs the full batch as one micro-batch, regardless of the
    settings for training."""

    def run() -> None:
        stages = places()
        model, plain = (
            flow.pipeline.cut(initialised(Branches()), stages, ["decoder"]),
            initialised(Branches()),
        )

        def build(model: Any, x: Any) -> Any:
            h = model.encoder(x)
            return {"hidden": h, "out": [model.decoder(h, x.flip(0)), 3]}

        graph = Graph(model, build, micros=4, trains=False)
        for n in (8, 3):
            found, x = graph(rows(n=n).to_global(stages[0], B)), rows(n=n)  # type: ignore[attr-defined]
            assert found["out"][1] == 3
            assert [t.placement for t in (found["hidden"], found["out"][0])] == stages
            _close(found["hidden"], plain.encoder(x), "hidden")
            _close(found["out"][0], plain(x), "out")

    simulate(2, run)


def test_outputs_and_a_loss_that_is_used_after_backward() -> None:
    def run() -> None:
        stages = places()
        model, plain = (
            flow.pipeline.cut(initialised(Branches()), stages, ["decoder"]),
            initialised(Branches()),
        )

        def build(model: Any, x: Any) -> Any:
            out = model(x)
            loss = out.square().mean()
            loss.backward()
            return loss * 2, out + 1

        double, more = Graph(model, build)(rows().to_global(stages[0], B))  # type: ignore[attr-defined]
        want = torch.cat([plain(part) for part in rows().tensor_split(2)])
        _close(double, want.square().mean() * 2, "loss")
        _close(more, want + 1, "out")

    simulate(2, run)


# ------------------------------------------------------------------------------------------- errors


def refused(
    build: Callable[..., Any],
    match: str,
    error: type[Exception] = GraphError,
    prepare: Callable[[Any, Any], None] | None = None,
) -> None:
    """Check that all ranks raise the error, and that none waits for another."""

    def run() -> None:
        stages = places()
        model = flow.pipeline.cut(initialised(Branches()), stages, ["decoder"])
        graph = Graph(model, build)
        if prepare is not None:
            prepare(graph, stages)
        with pytest.raises(error, match=match):
            graph(rows().to_global(stages[0], B))  # type: ignore[attr-defined]

    simulate(2, run)


def test_two_backward_calls() -> None:
    def build(model: Any, x: Any) -> Any:
        out = model(x)
        loss, other = out.square().mean(), out.sum()
        loss.backward(retain_graph=True)
        other.backward()
        return loss

    refused(build, "add the losses")


def test_backward_of_a_gradient() -> None:
    def build(model: Any, x: Any) -> Any:
        out = model(x)
        out.backward(torch.ones_like(out))
        return out

    refused(build, "multiply the loss")


def test_gradients_in_build() -> None:
    def build(model: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, [model.decoder.weight], retain_graph=True)
        loss.backward()
        return loss + grad.sum() * 0

    refused(build, r"hook of the optimizer")


def test_a_plain_output() -> None:
    def build(model: Any, x: Any) -> Any:
        loss = squared(model, x)
        return loss, torch.arange(3)

    refused(build, "must be global tensors")


def test_an_op_that_mixes_stages_set_by_hand() -> None:
    """An op that mixes stages set by hand is an error. In a model cut by `cut` the op runs in the
    latest of the stages (`Decoder`, `Nested`). Modules placed by hand stay on their placement."""

    def run() -> None:
        stages = places()
        model = initialised(Branches())
        model.encoder.to_global(stages[0], B)
        model.decoder.to_global(stages[1], B)

        def build(model: Any, x: Any) -> Any:
            h = model.encoder(x)
            return squared(lambda h: h + model.decoder(h, x), h)

        graph = Graph(model, build)
        for k, part in enumerate((graph.model.encoder, graph.model.decoder)):
            part.to(flow.nn.graph.GraphModule).set_stage(k, stages[k])
        with pytest.raises(PlacementError, match=r"different placements(.|\n)*to_global"):
            graph(rows().to_global(stages[0], B))  # type: ignore[attr-defined]

    simulate(2, run)


def test_a_gap() -> None:
    def prepare(graph: Any, stages: Any) -> None:
        graph.model.decoder.to(flow.nn.graph.GraphModule).set_stage(2, stages[1])

    refused(squared, r"there are \[0, 2\].*set_stage\(1, ...\) is missing", prepare=prepare)


def test_two_placements() -> None:
    def prepare(graph: Any, stages: Any) -> None:
        graph.model.decoder.to(flow.nn.graph.GraphModule).set_stage(0, stages[1])

    refused(squared, "a stage has one placement", prepare=prepare)


def test_a_module_that_lies_elsewhere() -> None:
    def prepare(graph: Any, stages: Any) -> None:
        graph.model.decoder.to_global(stages[0], B)
        graph.model.decoder.to(flow.nn.graph.GraphModule).set_stage(1, stages[1])

    refused(squared, r"model.decoder.weight is on .*move it there with to_global", prepare=prepare)


def test_a_local_tensor_of_another_stage() -> None:
    """A local tensor of another stage raises an error on both ranks, although only rank 0 runs
    stage 0 and meets the tensor."""

    def build(model: Any, x: Any) -> Any:
        h = model.encoder(x)
        scale = h.to_local().abs().mean().detach()
        loss = model.decoder(h, x).square().mean() * scale
        loss.backward()
        return loss

    refused(build, "only global tensors cross stages|to_local", GlobalTensorError)


def test_stages_that_run_backwards() -> None:
    def run() -> None:
        stages = places()
        model = initialised(Branches())
        model.encoder.to_global(stages[1], B)
        model.decoder.to_global(stages[0], B)
        graph = Graph(model, squared)
        graph.model.encoder.to(flow.nn.graph.GraphModule).set_stage(1, stages[1])
        graph.model.decoder.to(flow.nn.graph.GraphModule).set_stage(0, stages[0])
        with pytest.raises(GraphError, match="does not come before it"):
            graph(rows().to_global(stages[0], B))  # type: ignore[attr-defined]

    simulate(2, run)


@pytest.mark.parametrize(
    ("at", "match"),
    [
        (["nowhere"], "no submodule 'nowhere'"),
        (["decoder", "encoder"], "at= names 2"),
        ([], "at= names 0"),
    ],
)
def test_cut_says_what_is_wrong(at: list[str], match: str) -> None:
    with pytest.raises(GlobalTensorError, match=match):
        flow.pipeline.cut(Branches(), places([0], [0]), at)


def test_cut_wants_the_models_order() -> None:
    with pytest.raises(GlobalTensorError, match="in the order of the model"):
        flow.pipeline.cut(Branches(), places([0], [0], [0]), ["decoder", "encoder"])
    with pytest.raises(GlobalTensorError, match="name with at="):
        flow.pipeline.cut(nn.Bilinear(2, 2, 2), places([0], [0]))
    with pytest.raises(GlobalTensorError, match="list of"):
        flow.pipeline.cut(Branches(), ["cpu"])  # type: ignore[list-item]


def test_a_model_whose_order_is_not_that_of_its_forward() -> None:
    """A model whose declared order differs from its forward is refused. The head is declared before
    the blocks, so it would be in the first stage, but it runs last."""

    class Early(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.h = self._modules.pop("h")  # now the last one

    def run() -> None:
        stages = places()
        graph = Graph(flow.pipeline.cut(initialised(Early()), stages, ["h.1"]), squared)
        with pytest.raises(
            GraphError,
            match=(
                r"needs a value .*test_pipelined_graph.py:\d+.* of stage 1, which does not come "
                r"before it"
            ),
        ):
            graph(rows().to_global(stages[0], B))  # type: ignore[attr-defined]

    simulate(2, run)
