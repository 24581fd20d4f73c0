"""Compare a training step of unmodified Hugging Face models: ours, torch DDP and DTensor.

Data and expert parallel are compared with DDP, and tensor parallel with DTensor's
`parallelize_module`. Weights are random, sizes are small, and dropout is off. DTensor splits the
same pairs of projections as ours by columns and rows, with plain tensors between them. It splits
the vocabulary only if the embedding is not tied to the head, because it breaks ties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import transformers
from common import LEAST, Row, interleave, on_ranks, options, same_losses, show
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import globaltensor as flow

WORDS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
#: Attributes of transformers' modules that count heads or columns: a rank has a share of them.
HEADS_OF = {
    "BertSelfAttention": ("num_attention_heads", "all_head_size"),
    "T5Attention": ("n_heads", "inner_dim"),
    "WhisperAttention": ("num_heads",),
}
Batch = dict[str, Tensor]


class Family:
    """A model of transformers, with the names of the layers to split by columns and by rows."""

    def __init__(
        self, model: str, config: str, settings: dict[str, Any], columns: tuple[str, ...],
        rows: tuple[str, ...], tied: bool = False,
        modes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.model, self.config, self.settings, self.columns, self.rows, self.tied = (
            model,
            config,
            settings,
            columns,
            rows,
            tied,
        )
        self.modes = modes or (("data", "tensor") if columns else ("data",))

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, self.model)(
            getattr(transformers, self.config)(**self.settings)
        ).train()  # type: ignore[no-any-return]

    def batch(self, n: int, length: int) -> Batch:
        """Draw a batch of ``n`` rows, the same on every rank."""
        draw = torch.Generator().manual_seed(1)
        if "num_mel_bins" in self.settings:
            sound = torch.randn(
                n,
                self.settings["num_mel_bins"],
                2 * self.settings["max_source_positions"],
                generator=draw,
            )
            return {
                "input_features": sound,
                "labels": torch.randint(3, 256, (n, length), generator=draw),
            }
        if "image_size" in self.settings:
            side = self.settings["image_size"]
            return {
                "pixel_values": torch.randn(n, 3, side, side, generator=draw),
                "labels": torch.randint(self.settings["num_labels"], (n,), generator=draw),
            }
        ids = torch.randint(3, 256, (n, length), generator=draw)
        return {"input_ids": ids, "labels": ids}

    def dtensor(self) -> nn.Module:
        model = self.build()
        plan: dict[str, ParallelStyle] = {}
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and name.endswith(self.columns):
                plan[name] = ColwiseParallel()
            elif isinstance(module, nn.Linear) and name.endswith(self.rows):
                plan[name] = RowwiseParallel()
            elif not self.tied and name.endswith("embed_tokens"):
                plan[name] = RowwiseParallel(input_layouts=Replicate())
            elif not self.tied and name == "lm_head":
                plan[name] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
        # some attention modules read the number of heads from an attribute, not from their weights
        for module in model.modules():
            for name in HEADS_OF.get(type(module).__name__, ()):
                setattr(module, name, getattr(module, name) // dist.get_world_size())
        return model


def families(hidden: int, layers: int) -> dict[str, Family]:
    wide = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    few = {"num_key_value_heads": 2, **wide, **WORDS}
    attended, gated = (
        ("q_proj", "k_proj", "v_proj"),
        (("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")),
    )
    return {
        "llama": Family("LlamaForCausalLM", "LlamaConfig", few, *gated),
        "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": hidden // 4, **few},
            *gated),
        "gpt2": Family("GPT2LMHeadModel", "GPT2Config",
                       {"n_embd": hidden, "n_layer": layers, "n_head": 4, "resid_pdrop": 0.0,
                           "embd_pdrop": 0.0, "attn_pdrop": 0.0, **WORDS}, (), ()),
        "bert": Family("BertForMaskedLM", "BertConfig", {**wide, **STILL, **WORDS},
                       ("query", "key", "value", "intermediate.dense"),
                       ("attention.output.dense", "output.dense"), tied=True),
        "t5": Family("T5ForConditionalGeneration", "T5Config",
                     {"d_model": hidden, "d_kv": hidden // 4, "d_ff": 4 * hidden,
                         "num_layers": layers // 2 or 1, "num_heads": 4, "dropout_rate": 0.0,
                      "decoder_start_token_id": 0, **WORDS},
                      (".q", ".k", ".v", ".wi", "relative_attention_bias"), (".o", ".wo"),
                      tied=True),
        "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig",
                          {"d_model": hidden, "encoder_layers": layers // 2 or 1,
                              "decoder_layers": layers // 2 or 1, "encoder_attention_heads": 4,
                           "decoder_attention_heads": 4, "encoder_ffn_dim": 4 * hidden,
                           "decoder_ffn_dim": 4 * hidden, "num_mel_bins": 16, "dropout": 0.0,
                           "max_source_positions": 64, "max_target_positions": 64,
                           "decoder_start_token_id": 1, **WORDS},
                          (*attended, "fc1"), ("out_proj", "fc2"), tied=True),
        "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 8, **few},
            (), (), modes=("data", "expert")),
        "vit": Family("ViTForImageClassification", "ViTConfig",
            {"image_size": 32, "patch_size": 4, "num_labels": 10, **wide, **STILL},
                      (*attended, "fc1"), ("o_proj", "fc2")),
    }  # fmt: skip


def step_of(model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    """Return a function that does one training step and returns the loss.

    Plain and DTensor parameters cannot share a group of the optimizer."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups if group], lr=1e-4, fused=True
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def mean(loss: Tensor) -> float:
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def compare(name: str, family: Family, mode: str, batch: Batch, rounds: int) -> Row:
    everyone, size = flow.placement.all("cpu"), dist.get_world_size()
    ours = flow.parallelize(family.build(), everyone, mode)
    shared = {key: value.to_global(everyone, flow.sbp.broadcast) for key, value in batch.items()}  # type: ignore[attr-defined]
    if mode in ("data", "expert"):
        shared = {key: value.to_global(sbp=flow.sbp.split(0)) for key, value in shared.items()}
        mine = {key: value.tensor_split(size)[dist.get_rank()] for key, value in batch.items()}
        steps = {
            "ddp": step_of(DistributedDataParallel(family.build()), mine),
            "ours": step_of(ours, shared),
        }
        same_losses({"ddp": lambda: mean(steps["ddp"]()), "ours": lambda: steps["ours"]().item()})
    else:
        steps = {"dtensor": step_of(family.dtensor(), batch), "ours": step_of(ours, shared)}
        same_losses(
            {"dtensor": lambda: steps["dtensor"]().item(), "ours": lambda: steps["ours"]().item()}
        )
    return Row(f"{name} {mode} step", interleave(steps, rounds, calls=3, least=LEAST), "ms")


def main() -> None:
    chosen = options((__doc__ or "").splitlines()[0], steps=11)
    on_ranks(chosen.nproc)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    flow.env.get_rank()
    rows = []
    for name, family in families(*((32, 1) if chosen.quick else (128, 4))).items():
        batch = family.batch(4, 16) if chosen.quick else family.batch(8, 64)
        for mode in family.modes:
            if chosen.only in f"{name} {mode}":
                rows.append(compare(name, family, mode, batch, chosen.steps))
    if dist.get_rank() == 0:
        for base in ("ddp", "dtensor"):
            if found := [row for row in rows if base in row.seconds]:
                show(found, chosen.json, base)


if __name__ == "__main__":
    main()
