"""``flow.data``: a loader of MNIST from files on this machine, for user code."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np

from .errors import SessionError

__all__ = ["load_mnist", "read_idx"]

_FILES: Final = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_UNSIGNED_BYTES: Final = 0x08

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def load_mnist(
    train_batch_size: int = 100,
    test_batch_size: int = 100,
    data_format: str = "NCHW",
    url: str | None = None,
    hash_check: str | None = None,
    out_dir: str = ".",
) -> tuple[Arrays, Arrays]:
    """Return ((images, labels) to train with, (images, labels) to test with), in batches.

    Images are float32 in [0, 1] of shape (batches, size, 1, 28, 28), or (batches, size, 28, 28, 1)
    with ``data_format="NHWC"``. Labels are int32 of shape (batches, size). An incomplete last batch
    is dropped.

    They are read from the four IDX files (plain or ``.gz``) or from ``mnist.npz`` in the folder
    ``out_dir``. Nothing is downloaded, so ``url`` and ``hash_check`` have no effect. Raise
    SessionError if the files are missing or damaged.
    """
    if data_format not in ("NCHW", "NHWC"):
        raise SessionError(f'load_mnist: data_format is "NCHW" or "NHWC", got {data_format!r}')
    folder = Path(out_dir)
    packed = folder / "mnist.npz"
    if packed.is_file():
        with np.load(packed) as found:
            arrays = [found[name] for name in ("x_train", "y_train", "x_test", "y_test")]
    else:
        arrays = [read_idx(_find_file(folder, name)) for name in _FILES]
    train = _batches(arrays[0], arrays[1], train_batch_size, data_format)
    return train, _batches(arrays[2], arrays[3], test_batch_size, data_format)


def _find_file(folder: Path, name: str) -> Path:
    for candidate in (
        name,
        f"{name}.gz",
        name.replace("-idx", ".idx"),
        name.replace("-idx", ".idx") + ".gz",
    ):
        if (folder / candidate).is_file():
            return folder / candidate
    problem = f"load_mnist: there is no {name} (or {name}.gz) in {folder.resolve()}"
    mend = (
        f"put MNIST's four IDX files ({', '.join(_FILES)}), or mnist.npz, there, or name their "
        f"folder with out_dir="
    )
    raise SessionError(f"{problem}; nothing is downloaded: {mend}")


def read_idx(path: Path) -> np.ndarray[Any, Any]:
    """Read an IDX file of unsigned bytes (http://yann.lecun.com/exdb/mnist), plain or gzipped.

    Raise SessionError for another file, or a truncated one.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise SessionError(f"load_mnist: {path} cannot be read: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTES:
        raise SessionError(f"load_mnist: {path} is no IDX file of unsigned bytes")
    dims = content[3]
    if len(content) < 4 + 4 * dims:
        raise SessionError(
            f"load_mnist: {path} ends in its header, which should name {dims} sizes: it is damaged"
        )
    shape = struct.unpack_from(f">{dims}I", content, 4)
    start = 4 + 4 * dims
    if len(content) - start != math.prod(shape):
        raise SessionError(
            f"load_mnist: {path} says {list(shape)}, but holds {len(content) - start} bytes: it "
            f"is damaged"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _batches(
    images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], size: int, data_format: str
) -> Arrays:
    n = len(images) // size
    if not n or len(images) != len(labels):
        raise SessionError(
            f"load_mnist: {len(images)} images and {len(labels)} labels make no batch of {size}"
        )
    pixels = (images[: n * size].astype(np.float32) / 255.0).reshape(n, size, *images.shape[1:])
    return np.expand_dims(pixels, 2 if data_format == "NCHW" else -1), labels[: n * size].astype(
        np.int32
    ).reshape(n, size)
