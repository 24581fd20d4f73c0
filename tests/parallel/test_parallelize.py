"""Tests of flow.parallelize: the layouts under each plan, its cost in collectives, and unmodified
Hugging Face models that train as on one device."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import SbpError

transformers = pytest.importorskip("transformers", reason="needs globaltensor[hf]")

B, S = flow.sbp.broadcast, flow.sbp.split
WORDS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **WORDS,
}
WIDE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LENGTH = 12


def text(n: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (n, LENGTH))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def image(n: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(n, 3, 16, 16, dtype=torch.float64),
        "labels": torch.arange(n) % 7,
    }


def speech(n: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(n, 16, 2 * LENGTH, dtype=torch.float64),
        "labels": text(n)["labels"],
    }


FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[int], dict[str, Tensor]]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                 "attn_pdrop": 0.0, **WORDS}, text),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8, **DECODER}, text),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**DECODER, "num_key_value_heads": 4}, text),
    "bert": ("BertForMaskedLM", "BertConfig", {**WIDE, **STILL, **WORDS}, text),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
               "dropout_rate": 0.0, "vocab_size": 99, "decoder_start_token_id": 0}, text),
    "vit": ("ViTForImageClassification", "ViTConfig",
        {"image_size": 16, "patch_size": 4, "num_labels": 7, **WIDE, **STILL}, image),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig",
                {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                    "encoder_ffn_dim": 64,
                 "decoder_ffn_dim": 64, "num_mel_bins": 16, "max_source_positions": LENGTH,
                 "max_target_positions": LENGTH, "decoder_start_token_id": 1,
                 "dropout": 0.0, **WORDS}, speech),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig",
        {"num_local_experts": 4, "experts_implementation": "eager", **DECODER}, text),
}  # fmt: skip


def build(family: str) -> nn.Module:
    model, config, settings, _ = FAMILIES[family]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).double().train()  # type: ignore[no-any-return]


def whole(x: Tensor) -> Tensor:
    return x.to_global(sbp=[B] * x.placement.axes).to_local()  # type: ignore[attr-defined,no-any-return]


def steps(model: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(family: str, plans: list[tuple[Any, list[int] | list[list[int]], Any]], n: int) -> None:
    """Check training under each plan. The tolerance allows for parts of some models in float32,
    whose sums depend on their order."""
    torch.manual_seed(n)
    batch = FAMILIES[family][3](n)
    plain = build(family)
    want = steps(plain, batch)
    for plan, ranks, sbp in plans:
        placement = flow.placement("cpu", ranks)
        model = build(family)
        names = [name for name, _ in model.named_parameters()]
        assert flow.parallelize(model, placement, plan) is model
        assert [name for name, _ in model.named_parameters()] == names
        shared = {
            key: value.to_global(placement, [B] * placement.axes).to_global(sbp=sbp)
            for key, value in batch.items()
        }  # type: ignore[attr-defined]
        got = steps(model, shared)
        torch.testing.assert_close(
            torch.tensor(got),
            torch.tensor(want),
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, plan=plan: f"{family} {plan}: {m}",
        )
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                whole(p),
                q.detach(),
                rtol=1e-5,
                atol=1e-6,
                msg=lambda m, at=(plan, name): f"{family} {at}: {m}",
            )


LINE = [0, 1]
ON_TWO = [
    ("data", LINE, [S(0)]),
    ("fsdp", LINE, [S(0)]),
    ("tensor", LINE, [B]),
    ("sequence", LINE, [B]),
    ("auto", LINE, [S(0)]),
]
ON_FOUR = [
    ("hybrid", [[0, 1], [2, 3]], [S(0), B]),
    (["fsdp", "tensor"], [[0, 1], [2, 3]], [S(0), B]),
    ("auto", [[0, 1], [2, 3]], [S(0), B]),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sweep(12)
def test_trains_as_on_one_device(family: str) -> None:
    run_on(2, train, family, ON_TWO, 3)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_on_one_device_on_a_grid(family: str) -> None:
    run_on(4, train, family, ON_FOUR, 4)


# ---------------------------------------------------------------------------------- costs of a plan


def collectives(
    family: str, plan: str, layers: int, batch: dict[str, Tensor] | None = None
) -> tuple[list[str], list[str]]:
    """Return the collectives of a forward and of a backward pass of the body, without the loss."""
    torch.manual_seed(0)
    batch, everyone = batch or text(2), flow.placement.all("cpu")
    model = flow.parallelize(of_depth(family, layers), everyone, plan)
    shared = {key: value.to_global(everyone, B) for key, value in batch.items()}  # type: ignore[attr-defined]
    if plan == "data":
        shared = {key: value.to_global(sbp=S(0)) for key, value in shared.items()}  # type: ignore[attr-defined]
    model(**shared)  # the first call makes the plans
    here = world()
    here.trace = forward = []
    out = (
        model.model(input_ids=shared["input_ids"])
        if family == "llama"
        else model.bert(input_ids=shared["input_ids"])
    )
    here.trace = backward = []
    out.last_hidden_state.sum().backward()
    here.trace = None
    return [t.kind for t in forward], [t.kind for t in backward]


def tensor_plan(family: str) -> None:
    one, two = collectives(family, "tensor", 1), collectives(family, "tensor", 2)
    for fewer, more in zip(one, two, strict=True):
        assert more.count("all_reduce") - fewer.count("all_reduce") == 2, (fewer, more)
        assert set(more) == {"all_reduce"}, more


def sequence_plan(family: str) -> None:
    """Check that each all-reduce becomes a reduce-scatter and an all-gather, which move as many
    bytes."""
    one, two = collectives(family, "sequence", 1), collectives(family, "sequence", 2)
    for fewer, more in zip(one, two, strict=True):
        assert [
            more.count(kind) - fewer.count(kind)
            for kind in ("reduce_scatter", "all_gather", "all_reduce")
        ] == [2, 2, 0], (fewer, more)


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.sweep(2)
def test_a_block_split_in_time(family: str) -> None:
    run_on(2, sequence_plan, family)


def fused_plan(family: str) -> None:
    """Check queries, keys and values in one projection: ranks exchange only the missing shards, and
    nothing is gathered."""
    torch.manual_seed(0)
    batch, everyone = text(2), flow.placement.all("cpu")
    model = flow.parallelize(build(family), everyone, "tensor")
    ids = batch["input_ids"].to_global(everyone, B)  # type: ignore[attr-defined]
    body = model.transformer if family == "gpt2" else model.model
    body(input_ids=ids)
    with flow.boxing_log() as log:
        body(input_ids=ids)
    kinds = [move.kind for entry in log if hasattr(entry, "plan") for move in entry.plan.moves]
    assert set(kinds) <= {"all_reduce", "mask"}, [str(entry) for entry in log]
    exchanged = [entry.bytes for entry in log if not hasattr(entry, "plan")]
    gathered = (
        2 * sum([96] if family == "gpt2" else [96, 128]) * 2 * LENGTH * 8 // 2
    )  # bytes gathered by each of two ranks, in two layers
    assert 0 < sum(exchanged) <= gathered / 2, exchanged


@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_several_projections_in_one_are_not_gathered(family: str) -> None:
    run_on(2, fused_plan, family)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_megatron_block_reduces_twice_each_way(family: str) -> None:
    run_on(2, tensor_plan, family)


#: The settings for the number of layers, for families with another name for it. An encoder and
#: a decoder grow together.
DEPTHS = {
    "gpt2": ["n_layer"],
    "t5": ["num_layers", "num_decoder_layers"],
    "whisper": ["encoder_layers", "decoder_layers"],
}


def of_depth(family: str, layers: int) -> nn.Module:
    name, config, settings, _ = FAMILIES[family]
    torch.manual_seed(7)
    depth = dict.fromkeys(DEPTHS.get(family, ["num_hidden_layers"]), layers)
    return (
        getattr(transformers, name)(getattr(transformers, config)(**{**settings, **depth}))
        .double()
        .train()
    )  # type: ignore[no-any-return]


def one_step(base: nn.Module, batch: dict[str, Tensor]) -> tuple[Counter[str], Counter[str]]:
    """Run a training step on four ranks. Return the collectives of the forward and the backward
    pass under the tensor plan."""
    placement, model = flow.placement("cpu", [0, 1, 2, 3]), copy.deepcopy(base)
    flow.parallelize(model, placement, "tensor")
    shared = {key: value.to_global(placement, B) for key, value in batch.items()}  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_collectives() as forward:
        loss = model(**shared).loss
    with record_collectives() as backward:
        loss.backward()
    before = loss.item()
    with flow.no_boxing():
        optimizer.step()
    assert model(**shared).loss.item() < before
    return Counter(t.kind for t in forward), Counter(t.kind for t in backward)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sweep(12)
@pytest.mark.long
def test_a_layer_on_four_ranks(family: str) -> None:
    """A layer issues two all-reduces in each direction. An encoder and a decoder layer, with
    attention between them, issue five. A fused projection of queries, keys and values issues
    exchanges."""
    transformers.logging.set_verbosity_error()
    batch = FAMILIES[family][3](4)
    (fewer, more) = (simulate(4, one_step, of_depth(family, n), batch)[0] for n in (1, 2))
    fused = {"gpt2": {"exchange": 1}, "phi3": {"exchange": 4}}.get(
        family, {}
    )  # phi3 exchanges in both its pairs
    for one, two in zip(fewer, more, strict=True):
        assert dict(two - one) == {"all_reduce": 5 if family in ("t5", "whisper") else 2, **fused}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sweep(4)
def test_data_parallel_forward_on_four_ranks(family: str) -> None:
    """Nothing is moved before the loss, whose target count is summed over all ranks."""
    base = build(family)
    inputs = {key: value for key, value in FAMILIES[family][3](4).items() if key != "labels"}
    if family in ("t5", "whisper"):
        inputs["decoder_input_ids"] = text(4)["input_ids"]

    def run() -> None:
        placement, model = flow.placement("cpu", [0, 1, 2, 3]), copy.deepcopy(base)
        flow.parallelize(model, placement, "data")
        # else GPT-2 searches the tokens for the padding token, to warn of it
        model.config.pad_token_id = None
        shared = {
            key: value.to_global(placement, B).to_global(sbp=S(0)) for key, value in inputs.items()
        }  # type: ignore[attr-defined]
        with flow.no_boxing():
            model(**shared)

    simulate(4, run)


def few_heads(plan: str, batch: dict[str, Tensor]) -> None:
    """Check two heads of keys and values with four heads of queries on four ranks. Each rank has
    one query head, and all ranks compute all key heads."""
    one, two = (collectives("llama", plan, layers, batch) for layers in (1, 2))
    wanted = {"tensor": {"all_reduce": 2}, "sequence": {"reduce_scatter": 2, "all_gather": 2}}[plan]
    for fewer, more in zip(one, two, strict=True):
        assert {
            kind: n for kind in set(more) if (n := more.count(kind) - fewer.count(kind))
        } == wanted, (fewer, more)


@pytest.mark.parametrize("plan", ["tensor", "sequence"])
@pytest.mark.parametrize("run", [simulate, run_on])
@pytest.mark.sweep(4)  # four processes import transformers first, which takes longer than the rest
def test_a_megatron_block_with_fewer_heads_of_keys_than_ranks(
    run: Callable[..., list[Any]], plan: str
) -> None:
    run(4, few_heads, plan, text(2))


def data_plan() -> None:
    everyone = flow.placement.all("cpu")
    model = flow.parallelize(build("llama"), everyone, "data")
    ids = text(4)["input_ids"].to_global(everyone, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    with flow.no_boxing():
        model(input_ids=ids)


def test_data_parallel_forward_does_not_communicate() -> None:
    run_on(2, data_plan)


# ------------------------------------------------------------------------------------------ layouts


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(4, 10))


def held(model: Callable[[], nn.Module], plan: Any, ranks: Any) -> dict[str, str]:
    placed = flow.parallelize(model(), flow.placement("cpu", ranks), plan)
    return {
        name: " ".join(e.short for e in p.sbp)
        for name, p in [*placed.named_parameters(), *placed.named_buffers()]
    }


def test_tensor_plan_by_structure() -> None:
    encoder = functools.partial(
        nn.TransformerEncoder, nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
    )
    here = simulate(2, held, encoder, "tensor", [0, 1])[0]
    assert here["layers.1.linear1.weight"] == here["layers.1.linear1.bias"] == "S(0)"
    assert here["layers.1.linear2.weight"] == "S(1)"
    assert here["layers.1.linear2.bias"] == here["layers.1.norm1.weight"] == "B"
    assert {
        name
        for name, sbp in simulate(2, held, Classifier, "tensor", [0, 1])[0].items()
        if sbp != "B"
    } == {"classifier.1.weight", "classifier.1.bias"}


def vgg() -> nn.Module:
    """Build a classifier of three linear layers, as in VGG: one pair, and a layer without one."""
    drop = nn.Dropout(0.0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), drop, nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)
    )


class Block(nn.Module):
    """A block of a vision transformer, with its MLP in an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0))
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.mlp(x)  # type: ignore[no-any-return]


def test_tensor_plan_pairs_the_layers_of_an_nn_sequential() -> None:
    def splits(model: Callable[[], nn.Module]) -> dict[str, str]:
        layouts = simulate(2, held, model, "tensor", [0, 1])[0]
        return {n: sbp for n, sbp in layouts.items() if n.endswith("weight") and sbp != "B"}

    assert splits(vgg) == {"1.weight": "S(0)", "4.weight": "S(1)"}
    assert splits(blocks) == {
        f"{block}.{name}": sbp
        for block in (0, 1)
        for name, sbp in (
            ("qkv.weight", "S(0)"), ("proj.0.weight", "S(1)"),
            ("mlp.1.weight", "S(0)"), ("mlp.3.weight", "S(1)"),
        )
    }  # fmt: skip
    # a module with parameters between two layers parts them, and so do other widths
    between = (lambda: nn.LayerNorm(8), 8), (lambda: nn.Unflatten(1, (2, 4)), 4)
    for module, width in between:
        model = functools.partial(parted, module, width)
        assert splits(model) == {"0.weight": "S(0)"}


def parted(between: Callable[[], nn.Module], width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), between(), nn.Linear(width, 2))


def train_pairs(model: Callable[[], nn.Module], shape: tuple[int, ...], plan: str) -> None:
    torch.manual_seed(0)
    plain, x = model().double(), torch.randn(shape).double()
    everyone = flow.placement("cpu", [0, 1])
    model = flow.parallelize(copy.deepcopy(plain), everyone, plan)
    wanted, got = plain(x), model(x.to_global(everyone, B))  # type: ignore[attr-defined]
    torch.testing.assert_close(whole(got), wanted)
    wanted.square().mean().backward()
    got.square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), p.grad)


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block())


@pytest.mark.parametrize("plan", ["tensor", "sequence"])
def test_pairs_in_an_nn_sequential_train_as_on_one_device(plan: str) -> None:
    run_on(2, train_pairs, vgg, (5, 3, 4), plan)
    run_on(2, train_pairs, blocks, (2, 6, 8), plan)


def test_fsdp_splits_evenly_where_it_can() -> None:
    here = simulate(2, held, Classifier, "fsdp", [0, 1])[0]
    assert here["features.0.weight"] == here["classifier.1.weight"] == "S(0)"
    assert here["features.1.running_mean"] == here["features.1.num_batches_tracked"] == "B"
    assert simulate(4, held, lambda: nn.Linear(8, 3), "fsdp", [0, 1, 2, 3])[0] == {
        "weight": "S(1)",
        "bias": "S(0)",
    }
    assert simulate(4, held, lambda: nn.Linear(8, 4), ["data", "fsdp"], [[0, 1], [2, 3]])[0] == {
        "weight": "B S(0)",
        "bias": "B S(0)",
    }
    assert simulate(
        4, held, lambda: nn.Linear(8, 4), {"weight": [S(0), S(1)], "*": [B, B]}, [[0, 1], [2, 3]]
    )[0] == {"weight": "S(0) S(1)", "bias": "B B"}


@pytest.mark.parametrize(("plan", "ranks", "says"), [
    ("tensr", [0], "unknown plan 'tensr': there are 'data', 'fsdp', 'tensor', 'sequence'"),
    ("tensr", [0], "; did you mean 'tensor'"),
    ("FSDP", [0], "; did you mean 'fsdp'"),
    ("ddp", [0], "; did you mean 'data'"),
    ("HSDP", [0], r"; did you mean \['data', 'fsdp'\]"),
    ("hybrid", [0], 'plan "hybrid" needs a placement of two axes'),
    (["data", "tensor"], [0], r"the plan names 2 axes \(data, tensor\), the placement has 1: pass"),
    (["data", "tensor"], [0], r'flow.placement\("cpu", \[\[0, 1\], \[2, 3\]\]\) has two'),
    ({"bias": B}, [0], "no pattern matches 'weight'"),
    ({"bias": B}, [0], r'add a last entry "\*": flow\.sbp\.broadcast'),
])  # fmt: skip
def test_wrong_plans(plan: Any, ranks: list[int], says: str) -> None:
    with pytest.raises(SbpError, match=says):
        flow.parallelize(nn.Linear(2, 2), flow.placement("cpu", ranks), plan)


def parametrized(plain: nn.Module) -> None:
    """Check that laying out a model does not evaluate parametrized weights: an evaluation would
    change spectral norm's state."""
    kept = [b.clone() for b in plain.buffers()]
    for plan in ("tensor", "sequence"):
        model = flow.parallelize(copy.deepcopy(plain), flow.placement("cpu", [0, 1]), plan)
        for b, want in zip(model.buffers(), kept, strict=True):
            torch.testing.assert_close(whole(b), want, rtol=0, atol=0)


def test_parametrized_weights_are_as_they_were() -> None:
    simulate(
        2,
        parametrized,
        nn.Sequential(
            *[nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(2)]
        ),
    )


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("*.wieght", "*.weight"),
        ("0.bais", "0.bias"),
        ("*wight", "*weight"),
        ("*.weights", "*.weight"),
    ],
)
@pytest.mark.parametrize("way", ["parallelize", "to_global"])
def test_a_misspelt_pattern_is_told(way: str, pattern: str, near: str) -> None:
    """It left the parameter replicated, without a word."""
    model, place = nn.Sequential(nn.Linear(2, 2)), flow.placement("cpu", [0])
    lay_out = (
        functools.partial(flow.parallelize, model) if way == "parallelize" else model.to_global
    )
    says = f"the pattern {pattern!r} matches no parameter or buffer: did you mean {near!r}?"
    with pytest.warns(UserWarning, match=re.escape(says)):
        lay_out(place, {pattern: S(0), "*": B})  # type: ignore[operator]


def test_a_table_of_patterns_may_serve_several_models() -> None:
    model, place = nn.Sequential(nn.Linear(2, 2)), flow.placement("cpu", [0])
    table = {"*.up.bias": S(0), "*in_proj_*": S(0), "1.weight": S(0), "*.weight": S(0), "*": B}
    table |= {"*.weigh_scale": S(0), "100.weight": S(0), "*.wei": S(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow.parallelize(model, place, table)
    assert (model[0].weight.sbp, model[0].bias.sbp) == ((S(0),), (B,))
