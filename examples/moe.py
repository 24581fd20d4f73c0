"""Train a language model with a mixture of experts, each rank holding some of the experts.

    python -m globaltensor.distributed.launch --nproc_per_node 2 examples/moe.py

A router sends each token through two of many small networks, the experts. The plan "expert" finds
the experts by their form, splits them over the ranks, and leaves the rest data parallel. Tokens
travel to their experts and back in two all-to-alls. No token is dropped, so losses are as on one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpt import Block, corpus, draw

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives

B, S = flow.sbp.broadcast, flow.sbp.split


class Experts(nn.Module):
    """Feed-forward networks in the form that transformers 5 has: the experts are the first dim."""

    def __init__(self, number: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(number, inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(number, width, inner) / inner**0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)  # [tokens, width]
        for e in range(len(self.up)):  # on a rank: the experts that the rank holds
            token, place = torch.where(top_k_index == e)
            rows = F.linear(F.gelu(F.linear(hidden_states[token], self.up[e])), self.down[e])
            out.index_add_(0, token, rows * top_k_weights[token, place, None])
        return out


class Mixture(nn.Module):
    """A router and its experts, in place of a feed-forward layer: [batch, time, width]."""

    def __init__(self, number: int, width: int, k: int) -> None:
        super().__init__()
        self.router, self.k = nn.Linear(width, number, bias=False), k
        self.experts = Experts(number, width, 2 * width)
        self.balance = torch.zeros(())  # of the last forward

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chance = self.router(tokens).softmax(-1)  # [tokens, experts]
        weights, index = chance.topk(self.k)
        # Fedus et al. 2021: smallest, at 1, where all experts get the same number of tokens.
        share = F.one_hot(index, chance.shape[1]).sum(1).to(chance.dtype).mean(0) / self.k
        self.balance = (share * chance.mean(0)).sum() * chance.shape[1]
        return self.experts(tokens, index, weights).view(x.shape)


class Model(nn.Module):
    """Layers of attention (those of train_gpt.py) and a mixture: [batch, time] to logits."""

    def __init__(self, layers: int, width: int, context: int, number: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.attention = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.mixtures = nn.ModuleList(Mixture(number, width, 2) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers + 1))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for attention, norm, mixture in zip(
            self.attention, self.norms, self.mixtures, strict=False
        ):
            x = attention(x)
            x = x + mixture(norm(x))
        return self.head(self.norms[-1](x))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, and return the cross-entropies of all steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {"experts": 8, "layers": 2, "width": 64, "context": 64, "batch": 8, "steps": 60}
    for name, default in sizes.items():  # batch: snippets a step, over all processes
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)

    everyone = flow.placement.all(options.device)
    torch.manual_seed(0)  # the same on every rank
    model = Model(options.layers, options.width, options.context, options.experts)
    flow.parallelize(model.to(options.device), everyone, "expert")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, losses, loud = corpus(), [], flow.env.get_rank() == 0
    if loud:
        up = model.mixtures[0].experts.up
        print(f"experts {tuple(up.shape)} {up.sbp}, on this rank {tuple(up.to_local().shape)}")
    for step in range(options.steps):
        rows = draw(text, options.batch, options.context, step).to(options.device)
        rows = rows.to_global(everyone, B).to_global(sbp=S(0))
        with record_collectives() as sent:  # of the forward pass
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        balance = torch.stack([mixture.balance for mixture in model.mixtures]).mean()
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        optimizer.step()
        losses.append(loss.item())
        even = balance.item()  # collective: on every rank
        if loud and (step % 20 == 0 or step + 1 == options.steps):
            moved = sum(each.bytes for each in sent if each.kind == "all_to_all") / 1024
            traffic = f"balance {even:.3f} (1: even), {moved:.0f} KiB in all-to-alls"
            print(f"step {step}: loss {losses[-1]:.4f}, {traffic}", flush=True)
    return losses


if __name__ == "__main__":
    main()
