"""Train on a Ray cluster: Ray Train starts the workers and sets their ranks.

    pip install 'ray[train]'
    python examples/deploy/ray_train.py --workers 2

The function `train` is ordinary code with global tensors, the same as in a script.
"""

from __future__ import annotations

import argparse
from typing import Any


def train(config: dict[str, Any]) -> None:
    """Train a small model on this worker, and report the loss of each epoch to Ray."""
    import torch
    from ray import train as ray_train

    import globaltensor as flow

    everyone = flow.placement.all("cuda" if config["gpu"] else "cpu")
    torch.manual_seed(0)  # the same on every worker
    rows = torch.randn(256, 16)
    labels = rows[:, :4].argmax(1)  # the class: which of the first four features is largest
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    flow.parallelize(model, everyone, "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = (
        t.to_global(everyone, flow.sbp.broadcast).to_global(sbp=flow.sbp.split(0))
        for t in (rows, labels)
    )
    for epoch in range(config["epochs"]):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()  # collective, as report() is: every worker calls both
        ray_train.report({"epoch": epoch, "loss": value})
        if flow.env.get_rank() == 0:
            print(f"epoch {epoch} on {flow.env.get_world_size()} workers: loss {value:.4f}")


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config={"gpu": options.gpu, "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
