"""Tests of modules of experts: which modules are found, how they are split, which data is moved,
and unmodified Hugging Face models that train as on one device."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.bodies import values
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import SbpError, ShapeError
from globaltensor.parallel.expert_modules import expert_parameters, experts_in

B, S = flow.sbp.broadcast, flow.sbp.split


class Experts(nn.Module):
    """A module with the interface of experts, written for one device."""

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(values(count, hidden, inner, seed=1) / hidden**0.5)
        self.down = nn.Parameter(values(count, inner, hidden, seed=2) / inner**0.5)
        self.bias = nn.Parameter(values(count, hidden, seed=3))
        self.norm = nn.LayerNorm(hidden, dtype=torch.float64)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, place = torch.where(top_k_index == e)
            rows = self.norm(
                F.silu(hidden_states[token] @ self.up[e]) @ self.down[e] + self.bias[e]
            )
            out.index_add_(0, token, rows * top_k_weights[token, place, None])
        return out


class Block(nn.Module):
    def __init__(self, count: int = 5, hidden: int = 8, inner: int = 6, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(hidden, count, dtype=torch.float64)
        self.experts = Experts(count, hidden, inner)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(self.k, -1)
        return x + self.experts(x, index, weights)


def block(**sizes: int) -> Block:
    torch.manual_seed(0)
    return Block(**sizes)


def whole(x: Tensor) -> Tensor:
    return x.to_global(sbp=[B] * x.placement.axes).to_local()  # type: ignore[attr-defined,no-any-return]


def trained(model: nn.Module, batch: dict[str, Tensor], loss: Callable[..., Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(**batch))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
    return losses


def train(
    model: nn.Module,
    batch: dict[str, Tensor],
    loss: Callable[..., Tensor],
    plan: Any,
    ranks: Any,
    sbp: Any,
    near: float,
) -> None:
    plain, ours, placement = (
        copy.deepcopy(model),
        copy.deepcopy(model),
        flow.placement("cpu", ranks),
    )
    want = trained(plain, batch, loss)
    assert flow.parallelize(ours, placement, plan) is ours
    shared = {
        key: value.to_global(placement, [B] * placement.axes).to_global(sbp=sbp)
        for key, value in batch.items()
    }  # type: ignore[attr-defined]
    got = trained(ours, shared, loss)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=near, atol=near)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            whole(p),
            q.detach(),
            rtol=near,
            atol=near,
            msg=lambda text, name=name: f"{name} under {plan}: {text}",
        )


LINE, GRID = [0, 1], [[0, 1], [2, 3]]
WAYS: dict[str, tuple[Any, Any, Any]] = {
    "expert": ("expert", LINE, [S(0)]),
    "expert, whole batch": ("expert", LINE, [B]),
    "data": ("data", LINE, [S(0)]),
    "fsdp": ("fsdp", LINE, [S(0)]),
    "tensor": ("tensor", LINE, [B]),
    "expert on four": ("expert", [0, 1, 2, 3], [S(0)]),
    "data x expert": ("expert", GRID, [S(0), S(0)]),
    "fsdp x expert": (["fsdp", "expert"], GRID, [S(0), S(0)]),
    "expert x expert": (["expert", "expert"], GRID, [S(0), S(0)]),
    "expert x tensor": (["expert", "tensor"], GRID, [S(0), B]),
    "patterns": (
        {"*experts.up": S(0), "*experts.down": S(0), "*experts.bias": S(0), "*": B},
        LINE,
        [S(0)],
    ),
}


def square(out: Tensor) -> Tensor:
    return out.pow(2).mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sweep(3)
def test_a_module_of_ones_own(way: str) -> None:
    plan, ranks, sbp = WAYS[way]
    batch = {"x": values(9, 8)}
    simulate(
        torch.tensor(ranks).numel(),
        train,
        block(),
        batch,
        square,
        plan,
        ranks,
        sbp,
        1e-9,
        timeout=20.0,
    )


# ------------------------------------------------------------------------------------------ layouts


def held(model: nn.Module, plan: Any, ranks: Any) -> dict[str, str]:
    placed = flow.parallelize(copy.deepcopy(model), flow.placement("cpu", ranks), plan)
    return {name: " ".join(e.short for e in p.sbp) for name, p in placed.named_parameters()}


def test_experts_are_split_by_expert() -> None:
    matrices = {"experts.up", "experts.down", "experts.bias"}
    model = block()
    assert set(experts_in(model)) == {"experts"}
    assert {f"experts.{name}" for name in expert_parameters(model.experts)} == matrices
    for plan, ranks, split, rest in [
        ("expert", LINE, "S(0)", "B"), ("tensor", LINE, "S(0)", "B"),
        ("expert", GRID, "B S(0)", "B B"), (["expert", "tensor"], GRID, "S(0) S(0)", "B B"),
    ]:  # fmt: skip
        here = simulate(torch.tensor(ranks).numel(), held, model, plan, ranks)[0]
        assert {name for name, sbp in here.items() if sbp == split} >= matrices
        assert here["experts.norm.weight"] == rest
    assert (
        simulate(2, held, model, "fsdp", LINE)[0]["experts.up"] == "S(1)"
    )  # otherwise tokens would go to experts that are split


def test_a_model_without_experts() -> None:
    with pytest.raises(SbpError, match='plan "expert": the model has no module of experts'):
        flow.parallelize(nn.Linear(2, 2), flow.placement("cpu", [0]), "expert")


def test_other_modules_are_left_alone() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4, 4))

        def forward(self, left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
            return left

    assert not experts_in(nn.Sequential(nn.Conv1d(2, 3, 4), nn.Bilinear(2, 3, 4), Bilinear()))


class GraphConvolution(nn.Module):
    """A layer with the signature of a module of experts: three dims of weights, and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(values(2, 3, 4))

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, hops: int = 1
    ) -> Tensor:
        for _ in range(hops):
            rows = x[edge_index[0]]
            rows = rows if edge_weight is None else rows * edge_weight[:, None]
            x = x + torch.zeros_like(x).index_add(0, edge_index[1], rows)
        return (x @ self.weight).sum(0)


@pytest.mark.parametrize("plan", ["data", "fsdp", "tensor", "auto"])
def test_a_layer_with_the_signature_of_experts_runs_its_own_forward(plan: str) -> None:
    x, edges, weights = values(5, 3), torch.tensor([[0, 1, 2, 4], [1, 2, 0, 3]]), values(4)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((edges,), {}),
        ((edges, weights), {}),
        ((edges, weights, 2), {}),
        ((), {"edge_index": edges, "edge_weight": weights}),
        ((edges,), {"hops": 2}),
    ]

    def run() -> None:
        where = flow.placement.all("cpu")
        plain = GraphConvolution()
        model = flow.parallelize(copy.deepcopy(plain), where, plan)
        for args, kwargs in calls:
            rows = x.to_global(where, B).to_global(sbp=S(0))
            plain.zero_grad()
            model.zero_grad()
            want, found = plain(x, *args, **kwargs), model(rows, *args, **kwargs)
            want.square().sum().backward()
            found.square().sum().backward()
            for a, b in ((found.detach(), want.detach()), (model.weight.grad, plain.weight.grad)):
                torch.testing.assert_close(a.to_global(sbp=B).to_local(), b)

    simulate(2, run)


def moved(model: nn.Module, plan: str, sbp: Any) -> tuple[list[str], list[str]]:
    everyone = flow.placement.all("cpu")
    ours = flow.parallelize(copy.deepcopy(model), everyone, plan)
    x = values(8, 8).to_global(everyone, B).to_global(sbp=sbp).requires_grad_()
    ours(x)  # the first call makes the plans
    with record_collectives() as there:
        out = ours(x)
    with record_collectives() as back:
        out.sum().backward()
    return [t.kind for t in there], [t.kind for t in back]


def test_traffic() -> None:
    """The plan issues the exchanges, and one bucket that sums the gradients of parameters that are
    not split."""
    model, exchanges = block(), ["all_to_all", "all_to_all"]
    assert (
        simulate(2, moved, model, "expert", S(0))
        == [(["all_gather", *exchanges], [*exchanges, "all_reduce"])] * 2
    )
    assert simulate(2, moved, model, "data", S(0)) == [([], ["all_reduce"])] * 2
    there, back = simulate(2, moved, model, "expert", B)[0]
    assert there == ["all_reduce"]
    assert set(back) == {"all_reduce"}


def seen(plan: str, model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the indices that the module's own forward receives."""
    ours, shapes = flow.parallelize(copy.deepcopy(model), flow.placement.all("cpu"), plan), []

    class Watched(Experts):
        def forward(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            shapes.append(tuple(top_k_index.shape))
            return super().forward(hidden_states, top_k_index, top_k_weights)

    ours.experts.__class__ = Watched
    ours(values(8, 8).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0)))
    return shapes


def test_where_all_experts_are_the_module_takes_the_tokens_as_they_are() -> None:
    model = block()
    assert simulate(2, seen, "data", model) == [[(4, 2)]] * 2
    assert all(
        rows[0][1] == 1 for rows in simulate(2, seen, "expert", model)
    )  # the module receives rows, each with one expert


# ------------------------------------------------------------------------ the module stays a module


def test_copied_pickled_and_local_again() -> None:
    model, placement, x = block(), flow.placement("cpu", [0]), values(6, 8)
    want = model(x).detach()
    ours = flow.parallelize(copy.deepcopy(model), placement, "expert")
    names = list(ours.state_dict())
    assert names == list(model.state_dict())
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    torch.testing.assert_close(whole(twin(x.to_global(placement, S(0))).detach()), want)
    back = twin.to_local()
    torch.testing.assert_close(back(x).detach(), want)
    torch.testing.assert_close(pickle.loads(pickle.dumps(back))(x).detach(), want)


def test_plans_do_not_keep_a_model_alive() -> None:
    placement = flow.placement("cpu", [0])
    ours = flow.parallelize(block(), placement, "expert")
    ours(values(6, 8).to_global(placement, S(0)))
    seen = weakref.ref(ours.experts)
    del ours
    gc.collect()
    assert seen() is None


def test_under_a_checkpoint_and_with_accumulated_gradients() -> None:
    simulate(2, checkpointed, block())


def checkpointed(model: nn.Module) -> None:
    everyone, x = flow.placement.all("cpu"), values(8, 8)
    plain, ours = copy.deepcopy(model), flow.parallelize(copy.deepcopy(model), everyone, "expert")
    for part in (x[:3], x[3:]):
        square(plain(part)).backward()
    for i, part in enumerate((x[:3], x[3:])):
        with flow.no_sync() if i == 0 else functools.partial(torch.enable_grad)():
            there = part.to_global(everyone, B).to_global(sbp=S(0))
            square(torch.utils.checkpoint.checkpoint(ours, there, use_reentrant=False)).backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


class Step(flow.nn.Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def build(self, x: Tensor) -> Tensor:
        loss = square(self.model(x))
        loss.backward()
        return loss


def in_a_graph(model: nn.Module, sbp: Any) -> None:
    everyone, x = flow.placement.all("cpu"), values(9, 8)
    plain, ours = copy.deepcopy(model), flow.parallelize(copy.deepcopy(model), everyone, "expert")
    graph, there = Step(ours), x.to_global(everyone, B).to_global(sbp=sbp)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        want = square(plain(x))
        want.backward()
        optimizer.step()
        torch.testing.assert_close(torch.tensor(graph(there).item()), torch.tensor(want.item()))
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach())


@pytest.mark.parametrize("sbp", [S(0), B], ids=["split batch", "whole batch"])
def test_in_a_graph(sbp: Any) -> None:
    """A recorder of fake tensors must not treat the (empty) calls inside the module as the
    program."""
    simulate(2, in_a_graph, block(), sbp)


def test_a_module_that_returns_more() -> None:
    class Two(Experts):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            return super().forward(hidden_states, top_k_index, top_k_weights), None

    model = block()
    model.experts = Two(5, 8, 6)
    ours, placement = (
        flow.parallelize(model, flow.placement("cpu", [0]), "expert"),
        flow.placement("cpu", [0]),
    )
    with pytest.raises(
        ShapeError, match="Two: a module of experts must return one tensor, not tuple"
    ):
        ours(values(6, 8).to_global(placement, S(0)))


# ------------------------------------------------------------------------------------- Hugging Face

WORDS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **WORDS,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**DECODER, "num_local_experts": 5, "output_router_logits": True}),
    "qwen3_moe": ("Qwen3Moe",
        {**DECODER, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
            "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3",
        {**DECODER, **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1,
                                   "moe_intermediate_size": 16, "first_k_dense_replace": 1}),
    # transposed matrices, biases, another gate
    "gpt_oss": ("GptOss",
        {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}  # fmt: skip


def build(family: str, implementation: str = "eager") -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs globaltensor[hf]")
    transformers.logging.set_verbosity_error()
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**sizes, experts_implementation=implementation)
    torch.manual_seed(7)
    return getattr(transformers, f"{name}ForCausalLM")(config).double().train()  # type: ignore[no-any-return]


def text(n: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (n, 12), generator=torch.Generator().manual_seed(n))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def loss_of(out: Any) -> Tensor:
    return out.loss  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["expert", "expert, whole batch", "data x expert"])
@pytest.mark.sweep(6)
def test_models_train_as_on_one_device(family: str, way: str) -> None:
    """The tolerance is wider because parts of these models compute in float32, whose sums depend on
    their order."""
    plan, ranks, sbp = WAYS[way]
    simulate(
        torch.tensor(ranks).numel(),
        train,
        build(family),
        text(3 if way == "expert" else 4),
        loss_of,
        plan,
        ranks,
        sbp,
        1e-6,
        timeout=30.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "way", ["data", "fsdp", "tensor", "expert on four", "fsdp x expert", "expert x tensor"]
)
def test_models_under_other_plans(family: str, way: str) -> None:
    plan, ranks, sbp = WAYS[way]
    simulate(
        torch.tensor(ranks).numel(),
        train,
        build(family),
        text(4),
        loss_of,
        plan,
        ranks,
        sbp,
        1e-6,
        timeout=30.0,
    )


def on_processes(family: str) -> None:
    train(build(family), text(3), loss_of, *WAYS["expert"], 1e-6)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.sweep(2)
def test_models_on_real_processes(family: str) -> None:
    run_on(2, on_processes, family)


@pytest.mark.long
def test_a_models_own_grouped_matmul() -> None:
    """The module's own forward runs on local tensors, with the implementation that it is set to.
    This implementation has no float64."""
    model = build("mixtral", "grouped_mm").float()
    simulate(2, train, model, text(4), loss_of, "expert", LINE, [S(0)], 1e-4, timeout=30.0)
