"""Train a language model on sequences that are split over the ranks in time (context parallelism).

    python -m globaltensor.distributed.launch --nproc_per_node 2 examples/long_context.py

The model is the GPT of train_gpt.py, unchanged. Each rank holds some positions of every sequence
and of all activations. Only attention needs the others: in ring attention, blocks of keys and
values visit one rank after another. The losses are those of one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy
from train_gpt import GPT, corpus, draw

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the losses of all steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=2048, help="positions of a sequence")
    parser.add_argument("--method", choices=["ring", "heads", "gather"], default="ring")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)

    everyone = flow.placement.all(options.device)
    torch.manual_seed(0)  # the same on every rank
    model = GPT(options.layers, options.width, 4, options.context).to(options.device)
    flow.parallelize(model, everyone, "data")  # parameters on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, losses, loud = corpus(), [], flow.env.get_rank() == 0
    for step in range(options.steps):
        rows = draw(text, options.batch, options.context, step).to(options.device)
        inputs, targets = (
            part.to_global(everyone, B).to_global(sbp=S(1))  # every rank has drawn the same
            for part in (rows[:, :-1], rows[:, 1:])
        )
        with flow.context_parallel(options.method), flow.boxing_log() as log:
            logits = model(inputs)  # [batch, time, 256], split in time too
        loss = cross_entropy(logits.transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if loud and step == 0:
            print(
                f"{options.context} positions, of which this rank has {inputs.to_local().shape[1]}"
            )
            moves = [str(move) for move in log if move.bytes] or ["nothing"]
            print("in the forward pass, ranks send:", *moves, sep="\n  ")
        if loud and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
