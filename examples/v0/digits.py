"""The digits that the programs beside this file train on: MNIST's, from a folder that is named, or
those that ship with scikit-learn."""

import argparse

import numpy as np

import globaltensor.v0 as flow

SIDE, TEST = (
    28,
    497,
)  # as high and wide as MNIST's; of scikit-learn's 1797 digits so many are kept for the test


def options(epochs, **more):
    """Return the command line that the programs share."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--mnist",
        metavar="FOLDER",
        help="folder with MNIST's IDX files; without it, the digits of scikit-learn are used",
    )
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--steps", type=int, help="stop after this many batches")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def load(folder, batch_size):
    """Return (images, labels) to train with and (images, labels) to test with.

    They are as ``flow.data.load_mnist`` returns them.
    """
    if folder is not None:
        return flow.data.load_mnist(batch_size, batch_size, out_dir=folder)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "no --mnist FOLDER is given, and scikit-learn, which has digits, is not installed: "
            "pip install '.[examples]' in a checkout of globaltensor"
        ) from None
    found = load_digits()
    order = np.random.RandomState(0).permutation(len(found.target))
    images = np.kron(found.images[order] / 16.0, np.ones((3, 3)))  # 8 x 8 -> 24 x 24
    edge = (SIDE - images.shape[-1]) // 2
    images = np.pad(images, ((0, 0), (edge, edge), (edge, edge))).astype(np.float32)[:, None]
    labels = found.target[order].astype(np.int32)
    return batched(images[:-TEST], labels[:-TEST], batch_size), batched(
        images[-TEST:], labels[-TEST:], batch_size
    )


def batches(arguments, train):
    """(step, images, labels), epoch after epoch, as many as the command line says."""
    steps = (pair for _ in range(arguments.epochs) for pair in zip(*train, strict=True))
    for step, (images, labels) in enumerate(steps):
        if step == arguments.steps:
            return
        yield step, images, labels


def accuracy(predict, test):
    """Per cent of the digits of a test that a function from images to logits knows."""
    right = [predict(images).argmax(1) == labels for images, labels in zip(*test, strict=True)]
    return 100.0 * np.mean(right)


def batched(images, labels, size):
    """Cut arrays into batches and drop an incomplete last one."""
    n = len(images) // size
    return images[: n * size].reshape(n, size, *images.shape[1:]), labels[: n * size].reshape(
        n, size
    )
