"""Tests of the collectives that the standard parallel layouts of a model issue, forward and
backward: exactly these, and no others."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.pool import Pool
from test_example_gpt import example
from test_training import SUMS, TABLE

import globaltensor as flow
from globaltensor.distributed.communicator import Traffic, record_collectives
from globaltensor.distributed.simulate import simulate

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
REDUCE, GATHER, SCATTER, TO_ALL = ["all_reduce"], ["all_gather"], ["reduce_scatter"], ["all_to_all"]


def leaf(shape: tuple[int, ...], sbp: Any) -> torch.Tensor:
    whole = torch.randn(
        shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64
    )
    return (
        whole.to_global(flow.placement.all("cpu"), B)
        .to_global(sbp=sbp)
        .detach()
        .clone()
        .requires_grad_()
    )  # type: ignore[no-any-return]


def ids(top: int, *shape: int, sbp: Any = B) -> torch.Tensor:
    whole = torch.randint(0, top, shape, generator=torch.Generator().manual_seed(top))
    return whole.to_global(flow.placement.all("cpu"), B).to_global(sbp=sbp)  # type: ignore[no-any-return]


def kinds(log: list[Traffic]) -> list[str]:
    return [t.kind for t in log]


# ------------------------------------------------------------------------------------------- one op

X, W, V = (64, 32), (32, 48), (48,)
HEADS = (4, 4, 16, 8)
#: name, function, operands, sbp of the result, collectives forward, and collectives backward
OPS: list[tuple[str, Callable[..., Any], list[tuple[tuple[int, ...], Any]], Any, list[str],
    list[str]]] = [
    ("pointwise, both split", torch.add, [(X, S(0)), (X, S(0))], S(0), [], []),
    ("pointwise, one whole", torch.mul, [(X, S(0)), (X, B)], S(0), [], REDUCE),
    ("pointwise, the other whole", torch.mul, [(X, B), (X, S(1))], S(1), [], REDUCE),
    ("a bias to a split batch", torch.add, [(X, S(0)), ((32,), B)], S(0), [], REDUCE),
    ("a bias split as its activations", torch.add, [(X, S(1)), ((32,), S(0))], S(1), [], []),
    ("sums of sums", torch.add, [(X, P), (X, P)], P, [], []),
    ("a sum scaled", lambda x: x * 2, [(X, P)], P, [], []),
    ("three operands, two whole", torch.addcmul, [(X, S(0)), (X, B), (X, B)], S(0), [], REDUCE),
    ("three operands, the first whole", torch.addcmul, [(X, B), (X, S(0)), (X, B)], S(0), [],
        REDUCE),
    ("a choice by a split mask", lambda x, y, z: torch.where(x > 0, y, z),
        [(X, S(0)), (X, B), (X, B)], S(0), [], REDUCE),
    ("joined", lambda x, y, z: torch.cat([x, y, z], 1), [(X, S(0)), (X, B), (X, B)], S(0), [],
        REDUCE),
    ("matmul, data parallel", torch.matmul, [(X, S(0)), (W, B)], S(0), [], REDUCE),
    ("matmul, by columns", torch.matmul, [(X, B), (W, S(1))], S(1), [], REDUCE),
    ("matmul, by rows", torch.matmul, [(X, S(1)), (W, S(0))], P, [], []),
    ("linear, data parallel", F.linear, [(X, S(0)), ((48, 32), B), (V, B)], S(0), [], REDUCE),
    ("linear, by columns", F.linear, [(X, B), ((48, 32), S(0)), (V, S(0))], S(1), [], REDUCE),
    ("linear, by rows", F.linear, [(X, S(1)), ((48, 32), S(1)), (V, B)], P, [], REDUCE),
    ("linear by rows, summed up", lambda *a: F.linear(*a).to_global(sbp=B),
        [(X, S(1)), ((48, 32), S(1))], B, REDUCE, REDUCE),
    ("linear by rows, onto a split", lambda *a: F.linear(*a).to_global(sbp=S(0)),
        [(X, S(1)), ((48, 32), S(1))], S(0), SCATTER, GATHER),
    ("sum over the split dim", lambda x: x.sum(0), [(X, S(0))], P, [], []),
    ("sum over another dim", lambda x: x.sum(1), [(X, S(0))], S(0), [], []),
    ("softmax along another dim", lambda x: x.softmax(1), [(X, S(0))], S(0), [], []),
    ("layer norm, data parallel", lambda x, w, b: F.layer_norm(x, (32,), w, b),
        [(X, S(0)), ((32,), B), ((32,), B)], S(0), [], REDUCE),
    ("attention, data parallel", F.scaled_dot_product_attention, [(HEADS, S(0))] * 3, S(0), [], []),
    ("attention, by heads", F.scaled_dot_product_attention, [(HEADS, S(1))] * 3, S(1), [], []),
    ("transpose, view and back", lambda x: x.unflatten(1, (4, 8)).transpose(0, 1).flatten(1),
        [(X, S(1))], S(0), [], []),
    ("relu of a sum", torch.relu, [(X, P)], S(0), SCATTER, GATHER),
    ("split to another split", lambda x: x.to_global(sbp=S(1)), [(X, S(0))], S(1), TO_ALL, TO_ALL),
    ("gather", lambda x: x.to_global(sbp=B), [(X, S(0))], B, GATHER, SCATTER),
    ("slice", lambda x: x.to_global(sbp=S(0)), [(X, B)], S(0), [], REDUCE),
]  # fmt: skip


def run_op(
    function: Callable[..., Any], operands: list[tuple[tuple[int, ...], Any]]
) -> tuple[Any, list[str], list[str]]:
    ours = [leaf(*o) for o in operands]
    with record_collectives() as there:
        out = function(*ours)
    with record_collectives() as back:
        out.sum().backward()
    assert all(x.grad is None or x.grad.sbp == x.sbp for x in ours)
    return out.sbp[0].short, kinds(there), kinds(back)


@pytest.mark.parametrize("row", OPS, ids=lambda row: row[0])
@pytest.mark.parametrize("n", [2, 4])
def test_ops(row: Any, n: int) -> None:
    _, function, operands, sbp, forward, backward = row
    found = simulate(n, run_op, function, operands)
    assert found == [(sbp.short, forward, backward)] * n


def run_embedding(weight: Any, at: Any) -> tuple[Any, list[str], list[str]]:
    table, index = leaf((40, 16), weight), ids(40, 8, 6, sbp=at)
    with record_collectives() as there:
        out = F.embedding(index, table)
    with record_collectives() as back:
        out.sum().backward()
    return out.sbp[0].short, kinds(there), kinds(back)


def test_embedding() -> None:
    assert simulate(2, run_embedding, B, S(0)) == [("S(0)", [], REDUCE)] * 2
    assert simulate(2, run_embedding, S(0), B) == [("P", [], [])] * 2
    assert simulate(2, run_embedding, S(1), B) == [("S(2)", [], [])] * 2


def run_cross_entropy(sbp: Any, at: Any) -> tuple[list[str], list[int], list[str]]:
    logits, target = leaf((64, 40), sbp), ids(40, 64, sbp=at)
    with record_collectives() as there:
        loss = F.cross_entropy(logits, target)
    with record_collectives() as back:
        loss.backward()
    return kinds(there), [t.bytes for t in there], kinds(back)


def test_cross_entropy() -> None:
    assert (
        simulate(2, run_cross_entropy, B, B) == [([], [], [])] * 2
        or simulate(2, run_cross_entropy, B, B) == [([], [], REDUCE)] * 2
    )
    there, nbytes, back = simulate(2, run_cross_entropy, S(0), S(0))[0]
    assert (there, back) == (REDUCE, [])
    assert sum(nbytes) <= 16, "the count of targets and the sum of losses"
    there, nbytes, _ = simulate(2, run_cross_entropy, S(1), B)[0]
    assert there == 2 * REDUCE, (
        "the maxima, and the sums with the targets' logits: never the logits themselves"
    )
    assert sum(nbytes) <= 3 * 64 * 8


# ------------------------------------------------------------------------------------------- a step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.out = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.down(F.gelu(self.up(self.norm(x)))))


def step(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer
) -> dict[str, list[Traffic]]:
    found = {}
    with record_collectives() as found["forward"]:
        loss = model(x).square().mean()
    with record_collectives() as found["backward"]:
        loss.backward()
    with record_collectives() as found["clip"]:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with record_collectives() as found["step"]:
        optimizer.step()
        optimizer.zero_grad()
    with record_collectives() as found["item"]:
        loss.item()
    return found


def steps(
    parameters: Any, batch: Any, grid: Any = None, count: int = 3
) -> list[dict[str, list[tuple[str, int, int]]]]:
    """Return the messages of each of some steps, as (kind, ranks, bytes)."""
    placement = flow.placement.all("cpu") if grid is None else flow.placement("cpu", grid)
    torch.manual_seed(0)
    model = Net().to_global(placement, parameters)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(64, 32).to_global(placement, [B] * placement.axes).to_global(sbp=batch)
    return [
        {
            k: [(t.kind, len(t.ranks), t.bytes) for t in v]
            for k, v in step(model, x, optimizer).items()
        }
        for _ in range(count)
    ]


NUMEL = sum(p.numel() for p in Net().parameters())


@pytest.mark.parametrize("n", [2, 4])
def test_a_data_parallel_step(n: int) -> None:
    """A step issues one all-reduce for all gradients together, and one for a number that is
    read."""
    nbytes = 2 * 4 * NUMEL * (n - 1) // n
    for found in simulate(n, steps, B, S(0)):
        for now in found:
            assert now["forward"] == now["clip"] == now["step"] == []
            assert [(k, r) for k, r, _ in now["backward"]] == [("all_reduce", n)]
            assert now["backward"][0][2] == pytest.approx(nbytes, abs=8)
            assert [k for k, _, _ in now["item"]] == REDUCE


@pytest.mark.parametrize("n", [2, 4])
def test_an_fsdp_step(n: int) -> None:
    """A step issues one all-gather for all parameters, one reduce-scatter for all gradients, and
    one reduction for their norm, after the order of parameters is known."""
    sharded = lambda path, t: S(0)  # noqa: E731
    for found in simulate(n, steps, sharded, S(0)):
        for now in found[1:]:
            assert [k for k, _, _ in now["forward"]] == GATHER
            assert [k for k, _, _ in now["backward"]] == SCATTER
            assert [k for k, _, _ in now["clip"]] == REDUCE
            assert now["clip"][0][2] <= 16
            assert now["step"] == []
            assert now["forward"][0][2] == pytest.approx(4 * NUMEL * (n - 1) / n, rel=0.05)


def test_a_tensor_parallel_step() -> None:
    """Each pair of projections issues one all-reduce forward and one backward."""
    table = {"up.*": S(0), "down.weight": S(1), "*": B}

    def run() -> list[Any]:
        model = Net().to_global(flow.placement.all("cpu"), table)
        model.down.register_forward_hook(lambda m, i, o: o.to_global(sbp=B))
        x = torch.ones(64, 32).to_global(flow.placement.all("cpu"), B)
        with record_collectives() as there:
            loss = model(x).square().mean()
        with record_collectives() as back:
            loss.backward()
        return [kinds(there), kinds(back)[:1], len(back)]

    for there, back, count in simulate(2, run):
        assert there == REDUCE
        assert back == REDUCE
        assert count <= 2, (
            "the activations' gradient, and a bucket of those of broadcast parameters"
        )


def test_hybrid_steps_reduce_along_the_data_axis() -> None:
    table = {"up.*": [B, S(0)], "down.weight": [B, S(1)], "*": [B, B]}
    for found in simulate(4, steps, table, [S(0), B], [[0, 1], [2, 3]]):
        for now in found:
            # Gradients of split parameters are reduced over 2 ranks. Those of parameters that are
            # broadcast on both axes are reduced over all 4 at once.
            assert {r for _, r, _ in now["backward"]} <= {2, 4}
            assert all(
                k in ("all_reduce", "reduce_scatter", "all_gather") for k, _, _ in now["backward"]
            )
            assert now["step"] == []
            assert len(now["clip"]) <= 1


def test_accumulated_gradients_are_reduced_once() -> None:
    def run() -> list[Any]:
        model = Net().to_global(flow.placement.all("cpu"), B)
        x = torch.ones(8, 32).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))
        with record_collectives() as quiet, flow.no_sync():
            for _ in range(3):
                model(x).square().mean().backward()
        with record_collectives() as last:
            model(x).square().mean().backward()
        with record_collectives() as reading:
            _ = [p.grad for p in model.parameters()]
        return [kinds(quiet), kinds(last), kinds(reading)]

    assert simulate(2, run) == [[[], REDUCE, []]] * 2


@pytest.mark.parametrize(
    ("sbp", "order"), [(S(0), 2.0), (S(0), 1.0), (S(0), float("inf")), (B, 2.0)]
)
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_takes_one_reduction(sbp: Any, order: float, foreach: bool | None) -> None:
    def run() -> tuple[list[str], float]:
        torch.manual_seed(0)
        model = nn.ParameterList([leaf((8, 4), sbp), leaf((6,), sbp), leaf((4, 4), B)])
        for p in model:
            p.grad = p.detach() * 2
        with record_collectives() as log:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, foreach=foreach)
        return kinds(log), float(norm)

    whole = torch.cat(
        [
            torch.randn(
                s, generator=torch.Generator().manual_seed(len(s)), dtype=torch.float64
            ).flatten()
            * 2
            for s in ((8, 4), (6,), (4, 4))
        ]
    )
    for log, norm in simulate(2, run):
        assert log == (REDUCE if sbp is not B else [])
        assert norm == pytest.approx(float(whole.norm(order)))


def gpt_traffic(table: Any, batch: Any, outputs: Any) -> list[Any]:
    placement = flow.placement.all("cpu")
    torch.manual_seed(0)
    model = example().GPT(2, 32, 4, 6).to_global(placement, table)
    for name, module in model.named_modules():
        for pattern, sbp in outputs.items():
            if fnmatch.fnmatch(name, pattern):
                module.register_forward_hook(lambda m, i, o, sbp=sbp: o.to_global(sbp=sbp))
    rows = (
        torch.randint(0, 64, (8, 7), generator=torch.Generator().manual_seed(0))
        .to_global(placement, B)
        .to_global(sbp=batch)
    )
    found = []
    for _ in range(2):
        with record_collectives() as there:
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        with record_collectives() as back:
            loss.backward()
        found.append((kinds(there), kinds(back)))
    return found


def test_a_gpt() -> None:
    """The model has two blocks. Data parallel: the loss's count and one bucket. Tensor parallel:
    one sum after the embedding, one after each of four pairs, two in the loss, and as many
    backward."""
    for found in simulate(2, gpt_traffic, {"*": B}, S(0), {}):
        assert found == [(REDUCE, REDUCE)] * 2
    for found in simulate(2, gpt_traffic, TABLE, B, SUMS):
        for there, back in found:
            assert there == 7 * REDUCE
            assert set(back) == {"all_reduce"}
            assert len(back) <= 8
    for found in simulate(2, gpt_traffic, lambda path, t: S(0), S(0), {}):
        there, back = found[1]
        # The table of positions is as short as the context, so each rank looks up its own rows and
        # the results are summed. The tied weight is gathered for each use.
        assert there == [*GATHER, *REDUCE, *GATHER, *REDUCE]
        assert back == [*REDUCE, *SCATTER]


# --------------------------------------------------------------------------------------- no traffic


def test_what_never_communicates() -> None:
    def run() -> list[str]:
        x = leaf((8, 4), S(0)).detach()
        with record_collectives() as log:
            _ = (
                x.shape,
                x.sbp,
                x.detach(),
                x.clone(),
                x.float(),
                x.to_local(),
                x.t(),
                x[:, 1],
                x.zero_(),
                x.mul_(2),
                copy.deepcopy(x),
                x.contiguous(),
            )
            _ = (
                torch.zeros_like(x),
                flow.ones(8, placement=x.placement, sbp=S(0)),
                flow.randn(8, placement=x.placement, sbp=S(0)),
                x.unbind(1),
            )
        return kinds(log)

    assert simulate(2, run) == [[], []]


def everything() -> None:
    for _, function, operands, sbp, forward, backward in OPS:
        assert run_op(function, operands) == (sbp.short, forward, backward)
    for now in steps(B, S(0)):
        assert [k for k, _, _ in now["backward"]] == REDUCE
    for now in steps(lambda path, t: S(0), S(0))[1:]:
        found = [[k for k, _, _ in now[w]] for w in ("forward", "backward", "clip")]
        assert found == [GATHER, SCATTER, REDUCE], found


def test_on_processes(fresh_pool: Callable[[int], Pool]) -> None:
    """In a world of its own: what earlier tests have left may add messages to a step."""
    fresh_pool(2).run(everything)
