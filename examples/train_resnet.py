"""Train a small ResNet on the digits of scikit-learn, data parallel on any number of processes.

    python -m globaltensor.distributed.launch --nproc_per_node 2 examples/train_resnet.py

The model and the loop are written as for one device. Three lines are about ranks: the placement,
`flow.parallelize`, and the loader that brings each rank its rows of the batch. Batch norm uses the
statistics of the full batch, so the losses don't depend on the number of processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import globaltensor as flow
from globaltensor.utils.data import GlobalDataLoader


class Block(nn.Module):
    """A residual block of two 3 x 3 convolutions: [batch, inputs, height, width]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet for images [batch, 1, 8, 8] of ten classes (after He et al. 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.classifier = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.classifier(x.mean((2, 3)))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1797 images of handwritten digits, and their classes: for training, and for a test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "scikit-learn has the images: pip install '.[examples]' in a checkout of globaltensor"
        ) from None
    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(classes)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


@torch.no_grad()
def accuracy(model: nn.Module, loader: GlobalDataLoader) -> float:
    """Return the fraction of images whose class the model finds. Every rank calls it."""
    model.eval()
    hits = [(model(images).argmax(1) == labels).float().sum().item() for images, labels in loader]
    model.train()
    return sum(hits) / len(loader.dataset)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Train, and return the mean loss and the accuracy after each epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100, help="images a step, over all processes")
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    parser.add_argument("--parallel", choices=["data", "fsdp", "auto"], default="data")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)

    everyone = flow.placement.all(options.device)
    torch.manual_seed(0)  # the same on every rank
    model = ResNet(options.width)
    example = torch.zeros(options.batch, 1, 8, 8)
    flow.parallelize(model, everyone, options.parallel, inputs=example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training, test = digits()
    split = {"placement": everyone, "sbp": flow.sbp.split(0)}
    loader = GlobalDataLoader(training, options.batch, shuffle=True, seed=0, **split)
    held_out = GlobalDataLoader(test, options.batch, **split)

    results: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for epoch in range(options.epochs):
        loader.set_epoch(epoch)
        losses = []
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results["loss"].append(torch.stack(losses).mean().item())  # collective: on every rank
        results["accuracy"].append(accuracy(model, held_out))
        if flow.env.get_rank() == 0:
            loss, right = results["loss"][-1], results["accuracy"][-1]
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {right:.1%}", flush=True)
    return results


if __name__ == "__main__":
    main()
