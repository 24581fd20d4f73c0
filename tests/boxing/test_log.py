"""Tests of boxing_log(): it shows all that a rank sends, as `record_collectives` counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.pool import run_on

import globaltensor as flow
from globaltensor.boxing import BoxingRecord, ExchangeRecord
from globaltensor.distributed.communicator import Traffic, record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.graph.program.coalesced import CoalescedCollective

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
Records = list[BoxingRecord | ExchangeRecord]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(5)]
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.Tanh())])


def batch(width: int = 16) -> torch.Tensor:
    torch.manual_seed(1)
    everyone = flow.placement.all("cpu")
    return torch.randn(512, width).to_global(everyone, B).to_global(sbp=S(0))  # type: ignore[attr-defined, no-any-return]


def watched(step: Callable[[], Any], warm: int = 2) -> tuple[Records, list[Traffic]]:
    """Return what the log and the communicators record of a step, after ``warm`` steps."""
    for _ in range(warm):
        step()
    with record_collectives() as sent, flow.boxing_log() as log:
        step()
    return log, sent


def compare(log: Records, sent: list[Traffic]) -> None:
    assert sum(record.bytes for record in log) == sum(traffic.bytes for traffic in sent) > 0, (
        "\n".join(map(str, [*log, *sent]))
    )


class Step(flow.nn.Graph):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def training_step(plan: str, graph: bool) -> Callable[[], Any]:
    model = flow.parallelize(mlp(), flow.placement.all("cpu"), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch() if plan != "tensor" else batch().to_global(sbp=B)  # type: ignore[attr-defined]
    if graph:
        program = Step(model, optimizer)
        return lambda: program(x)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def logged_step(plan: str, graph: bool) -> list[tuple[str, str, int, tuple[int, ...]]]:
    log, sent = watched(training_step(plan, graph))
    compare(log, sent)
    return [(r.op, r.kind, r.bytes, r.ranks) for r in log if isinstance(r, ExchangeRecord)]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("plan", ["data", "fsdp", "tensor"])
def test_the_log_shows_all_that_a_training_step_sends(plan: str, graph: bool) -> None:
    run_on(2, logged_step, plan, graph)


PARAMETERS = 5 * (16 * 16 + 16) * 4  # bytes


def test_a_bucket_of_gradients_is_one_entry() -> None:
    (one,) = run_on(2, logged_step, "data", False)[0]
    assert one == ("gradients: 10 summed in one bucket", "all_reduce", PARAMETERS, (0, 1))


def test_parameters_gathered_together_are_one_entry() -> None:
    gathered, scattered = run_on(2, logged_step, "fsdp", False)[1]
    half = PARAMETERS // 2
    assert gathered == (
        "parameters: 10 gathered together, first for linear: operand 1",
        "all_gather",
        half,
        (0, 1),
    )
    assert scattered == (
        "gradients of gathered parameters: 10 in one bucket",
        "reduce_scatter",
        half,
        (0, 1),
    )


class Experts(nn.Module):
    """Four experts, two for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        everyone, width = flow.placement.all("cpu"), 8
        whole = torch.randn(4, 2 * width, width) * 0.1, torch.randn(4, width, width) * 0.1
        self.gate_up, self.down = (
            nn.Parameter(t.to_global(everyone, B).to_global(sbp=S(0)))  # type: ignore[attr-defined]
            for t in whole
        )
        index, weights = torch.randint(4, (12, 2)), torch.rand(12, 2)
        self.index, self.weights = (
            t.to_global(everyone, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
            for t in (index, weights)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return flow.moe_experts(x, self.index, self.weights, self.gate_up, self.down)


def rows_of_tokens() -> torch.Tensor:
    torch.manual_seed(1)
    everyone = flow.placement.all("cpu")
    return torch.randn(12, 8).to_global(everyone, B).to_global(sbp=S(0)).requires_grad_()  # type: ignore[attr-defined, no-any-return]


def gathered_again() -> list[str]:
    """Gather parameters again in backward, while no_boxing() forbids hidden traffic there."""
    model, x = flow.parallelize(mlp(), flow.placement.all("cpu"), "fsdp"), batch()

    def forward() -> torch.Tensor:
        with flow.reshard_after_forward():
            return model(x).square().mean()  # type: ignore[no-any-return]

    forward().backward()
    loss = forward()
    with record_collectives() as sent, flow.boxing_log() as log, flow.no_boxing():
        loss.backward()
    compare(log, sent)
    return [r.op for r in log]


def test_what_is_gathered_again_in_backward_is_logged() -> None:
    for ops in run_on(2, gathered_again):
        again = [op for op in ops if "reshard_after_forward" in op]
        assert again
        assert {op.split(":")[0] for op in ops} <= {
            "parameters",
            "backward of a use under reshard_after_forward",
            "gradients of gathered parameters",
        }


def expert_step() -> Callable[[], Any]:
    model, x = Experts(), rows_of_tokens()

    def step() -> None:
        model(x).square().sum().backward()
        model.zero_grad()
        x.grad = None

    return step


class Attended(flow.nn.Graph):
    """A training step of a linear layer whose results attend to each other round a ring."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8).to_global(flow.placement.all("cpu"), B)  # type: ignore[operator]
        self.add_optimizer(torch.optim.SGD(self.linear.parameters(), lr=0.1))

    def build(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        with flow.context_parallel("ring"):
            h = nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True)
        loss = h.square().mean()
        loss.backward()
        return loss


def graph_of(kind: str) -> list[str]:
    if kind == "experts":
        model, x = Experts(), rows_of_tokens().detach()
        program: flow.nn.Graph = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        torch.manual_seed(1)
        x = torch.randn(2, 4, 32, 8).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
        program, x = Attended(), x.to_global(sbp=S(2))
    log, sent = watched(lambda: program(x))
    compare(log, sent)
    return [r.op for r in log]


@pytest.mark.parametrize("kind", ["experts", "ring"])
def test_exchanges_of_graphs_are_logged(kind: str) -> None:
    name = {
        "experts": "experts: tokens to their experts, and back",
        "ring": "scaled_dot_product_attention: keys and values round the ring",
    }[kind]
    for ops in run_on(2, graph_of, kind):
        assert ops[0] == name
        assert f"backward of {name}" in ops


def logged_experts() -> list[str]:
    log, sent = watched(expert_step())
    compare(log, sent)
    there_and_back = [t.bytes for t in sent if t.kind == "all_to_all"]
    forward, *backward = [r for r in log if isinstance(r, ExchangeRecord)]
    assert forward.kind == "all_gather+all_to_all"
    assert len(there_and_back) == 4
    assert [r.bytes for r in backward] == there_and_back[2:]
    return [r.op for r in log]


def test_the_backward_exchanges_of_experts_are_logged() -> None:
    name = "experts: tokens to their experts, and back"
    assert run_on(2, logged_experts) == [[name, *[f"backward of {name}"] * 2]] * 2


def logged_ring(length: int) -> list[tuple[str, int]]:
    torch.manual_seed(0)
    everyone = flow.placement.all("cpu")
    ours = [
        torch.randn(2, 4, length, 8).to_global(everyone, B).to_global(sbp=S(2)).requires_grad_()  # type: ignore[attr-defined]
        for _ in range(3)
    ]

    def step() -> None:
        with flow.context_parallel("ring"):
            out = nn.functional.scaled_dot_product_attention(*ours, is_causal=True)
        out.backward(torch.ones_like(out))
        for t in ours:
            t.grad = None

    log, sent = watched(step)
    compare(log, sent)
    return [(r.op, r.bytes) for r in log]


@pytest.mark.parametrize("length", [8, 4096])
def test_the_backward_of_ring_attention_is_logged(length: int) -> None:
    name = "scaled_dot_product_attention: keys and values round the ring"
    for rank in run_on(2, logged_ring, length):
        assert [op for op, _ in rank] == [name, f"backward of {name}"]
        (_, forward), (_, backward) = rank
        assert backward > forward  # gradients go round with the keys and values


def backward_alone() -> list[str]:
    w = torch.ones(4, 4).to_global(flow.placement.all("cpu"), S(0)).requires_grad_()  # type: ignore[attr-defined]
    with flow.boxing_log() as forward:
        loss = (w * 1).to_global(sbp=B).sum()
    with flow.boxing_log() as backward:
        loss.backward()
    assert len(forward) == 1
    return [r.op for r in backward]


def test_a_log_of_the_backward_pass_alone_has_its_traffic() -> None:
    assert simulate(2, backward_alone) == [["backward of to_global"]] * 2


def nested() -> tuple[int, int, int]:
    x = torch.ones(4, 4).to_global(flow.placement.all("cpu"), S(0))  # type: ignore[attr-defined]
    with flow.boxing_log() as outer:
        with flow.boxing_log() as inner, record_collectives() as sent:
            x.to_global(sbp=B)
        x.to_global(sbp=B)
    x.to_global(sbp=B)
    return len(outer), len(inner), len(sent)


def test_logs_nest_and_close() -> None:
    assert simulate(2, nested) == [(2, 1, 1)] * 2


def capture_sends_nothing() -> None:
    """Check that the dry run of a capture adds nothing to a log that is open around it."""
    step = training_step("data", True)
    log, sent = watched(step, warm=0)
    compare(log, sent)


def test_what_a_capture_imagines_is_not_logged() -> None:
    run_on(2, capture_sends_nothing)


def ranges_of_a_step() -> list[str]:
    step = training_step("data", False)
    x = torch.ones(1024, 512).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    step()
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        x.to_global(sbp=B)
        step()
    names = [event.name for event in profile.events()]
    return [name for name in names if name.startswith(("box ", "exchange "))]


def test_boxings_are_named_ranges_of_a_profiler() -> None:
    assert run_on(2, ranges_of_a_step)[0] == [
        "box S(0)->B 1.0 MiB ranks 0-1",
        "exchange gradients: 10 summed in one bucket",
    ]


def joined_boxings() -> list[tuple[str, str]]:
    values = [batch(16), batch(4)]
    routes = [(x.spec, x.spec.replicated(), f"op {i}") for i, x in enumerate(values)]  # type: ignore[attr-defined]
    joint = CoalescedCollective(routes)
    locals_ = [x.to_local().requires_grad_() for x in values]  # type: ignore[attr-defined]

    def step() -> None:
        sum(whole.sum() for whole in joint(*locals_)).backward()  # type: ignore[union-attr]

    log, sent = watched(step)
    compare(log, sent)
    return [(r.op, r.kind) for r in log]


def test_boxings_that_a_graph_joins_are_one_entry() -> None:
    assert (
        run_on(2, joined_boxings)
        == [
            [
                ("2 boxings: op 0, op 1", "all_gather"),
                ("2 boxings: backward of op 0, backward of op 1", "reduce_scatter"),
            ]
        ]
        * 2
    )


def counted_loss() -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(16, 5).to_global(flow.placement.all("cpu"), B)  # type: ignore[operator]
    x = batch()
    targets = torch.arange(512).remainder(5).to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    targets = targets.to_global(sbp=S(0))

    def step() -> None:
        nn.functional.cross_entropy(model(x), targets, ignore_index=2).backward()

    log, sent = watched(step)
    compare(log, sent)
    assert len(log) == len(sent)
    return [r.op for r in log]


def test_a_sum_that_starts_early_is_named_plainly() -> None:
    (first, *_), other = run_on(2, counted_loss)
    assert first == "sum of partial values, started before it is needed"
    assert other[0] == first


def of_stages() -> tuple[list[str], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    stages = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    flow.pipeline.cut(model, stages)
    program = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(8, 16).to_global(stages[0], B, check_meta=False)  # type: ignore[attr-defined]
    log, sent = watched(lambda: program(x))
    assert sum(r.bytes for r in log) == sum(t.bytes for t in sent)
    return [str(r) for r in log if r.kind == "send"], len([t for t in sent if t.kind == "send"])


def test_what_pipeline_stages_send_is_logged() -> None:
    for entries, sent in run_on(2, of_stages):
        assert len(entries) == sent >= 1
        assert entries[0] == "pipeline: from one stage to another  send  512 B  ranks 0-1"


def overlapping_logs() -> list[int]:
    """Open two logs and close the first one first."""
    x = torch.ones(4, 6).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    first, second = flow.boxing_log(), flow.boxing_log()
    one, two = first.__enter__(), second.__enter__()
    x.to_global(sbp=B)
    first.__exit__(None, None, None)
    x.to_global(sbp=S(1))
    second.__exit__(None, None, None)
    x.to_global(sbp=B)
    assert world().observer is None
    return [len(one), len(two)]


def test_logs_may_close_in_any_order() -> None:
    assert run_on(2, overlapping_logs) == [[1, 2]] * 2
