"""Fine-tune an unmodified Hugging Face language model on the source of Python's standard library.

    python -m globaltensor.distributed.launch --nproc_per_node 2 examples/finetune_hf.py --parallel
    fsdp --out runs/finetuned

`--model` is a folder that `save_pretrained` has written, or a name that transformers can load.
Without `--model`, a small Llama with random weights is trained. The result is a folder of
safetensors that `from_pretrained` reads. Every byte is a token, so no tokenizer is needed. A model
for `--model` must have a vocabulary of at least 256 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from train_gpt import corpus, draw

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split
PLANS = ["data", "fsdp", "tensor", "sequence"]


def load(path: str | None) -> nn.Module:
    """Load or make the model to fine-tune, the same on every rank."""
    if path is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(path)  # type: ignore[no-any-return]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
                                      tie_word_embeddings=True)  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def save(model: nn.Module, folder: str) -> None:
    """Write the full weights, as one device would have them. Collective; rank 0 writes."""
    whole = {
        name: value.to_global(sbp=[B] * value.placement.axes).to_local().cpu()
        for name, value in model.state_dict().items()
    }
    if flow.env.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)  # type: ignore[operator]


def train(options: argparse.Namespace) -> list[float]:
    """Fine-tune the model as ``options`` say, and return the losses of all steps."""
    everyone = flow.placement.all(options.device)
    model = flow.parallelize(load(options.model), everyone, options.parallel).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    text, losses = corpus(), []
    sbp = B if options.parallel in ("tensor", "sequence") else S(0)
    bar = tqdm(range(options.steps), disable=None if flow.env.get_rank() == 0 else True)
    for step in bar:
        ids = (
            draw(text, options.batch, options.context, step)
            .long()
            .to_global(everyone, B)
            .to_global(sbp=sbp)
        )  # type: ignore[attr-defined]
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    if options.out:
        save(model, options.out)
    return losses


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        help=(
            "folder or name of a causal language model; without it, a small model with random "
            "weights"
        ),
    )
    add("--parallel", choices=PLANS, default="data", help="the plan (see flow.parallelize)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=8, help="snippets a step, over all ranks")
    add("--context", type=int, default=63, help="number of bytes of a snippet, minus one")
    add("--rate", type=float, default=3e-3, help="learning rate")
    add("--out", help="folder for the result")
    options = parser.parse_args(arguments)
    if small := [
        f"--{name}" for name in ("steps", "batch", "context") if getattr(options, name) < 1
    ]:
        parser.error(f"{', '.join(small)} must be at least 1")
    if options.model and options.model.startswith((".", "/")) and not Path(options.model).is_dir():
        parser.error(
            f"--model {options.model} is no folder: give one that save_pretrained has written"
        )
    return options


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    options = parse()
    losses = train(options)
    if flow.env.get_rank() == 0:
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"
            + (f"; saved to {options.out}" if options.out else "")
        )
