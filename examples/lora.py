"""Fine-tune a Hugging Face Llama with low-rank adapters (LoRA), on any number of processes.

    python -m globaltensor.distributed.launch --nproc_per_node 2 examples/lora.py --parallel tensor

`--model` is a folder or a name that transformers can load; without it, a small Llama with random
weights is adapted. Only the adapters are trained and saved. They follow their layers: where a
projection is split by columns, `lora_B` is split with it and `lora_A` is on every rank. A model
that `peft.get_peft_model` has prepared can be passed to `flow.parallelize` in the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import transformers
from torch import Tensor, nn
from train_gpt import corpus, draw

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split


class Lora(nn.Module):
    """A frozen linear layer, and a trained product of two low-rank matrices (Hu et al. 2021)."""

    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)  # the adapted model starts as the model

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


def adapt(model: nn.Module, names: Sequence[str], rank: int) -> nn.Module:
    """Freeze the model, and give adapters to the linear layers of these names."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in names and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), name, Lora(module, rank))
    return model


def load(path: str | None) -> nn.Module:
    """Load or make the model, the same on every rank."""
    torch.manual_seed(0)
    if path is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # random weights that adapters can make something of
    )
    return transformers.LlamaForCausalLM(config)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train the adapters, and return the losses of all steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a causal language model of 256 or more tokens")
    parser.add_argument("--parallel", choices=["data", "fsdp", "tensor"], default="tensor")
    parser.add_argument("--rank", type=int, default=8, help="columns of lora_B")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="snippets a step, over all processes")
    parser.add_argument("--context", type=int, default=63, help="bytes of a snippet, minus one")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", help="file for the trained adapters")
    options = parser.parse_args(arguments)

    everyone = flow.placement.all(options.device)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model = adapt(load(options.model), targets, options.rank)  # adapters first, then the layout
    flow.parallelize(model, everyone, options.parallel)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if flow.env.get_rank() == 0:
        total = sum(p.numel() for p in model.parameters())
        share = sum(p.numel() for p in trained.values()) / total
        print(f"{total:,} parameters, of which {share:.1%} are trained", flush=True)
        for name in ("q_proj.lora_A", "q_proj.lora_B", "o_proj.lora_A", "o_proj.lora_B"):
            path = next(path for path in trained if name in path)
            print(f"  {name}  {trained[path].sbp}", flush=True)

    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    text, losses = corpus(), []
    batch = B if options.parallel == "tensor" else S(0)
    for step in range(options.steps):
        rows = draw(text, options.batch, options.context, step).to(options.device)
        ids = rows.to_global(everyone, B).to_global(sbp=batch)  # every rank has drawn the same
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if flow.env.get_rank() == 0 and (step % 20 == 0 or step + 1 == options.steps):
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    if options.out:  # full values: they can be loaded on any number of ranks, and by torch.load
        flow.save({name: p.detach() for name, p in trained.items()}, options.out, global_dst_rank=0)
    return losses


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
