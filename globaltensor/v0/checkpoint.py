"""``flow.checkpoint``: save variables to a folder and load them.

Each variable has a folder of its name with two files. ``out`` holds its elements as they are in
memory, ``meta`` its shape and dtype. A file ``snapshot_done`` marks that all have been written.
User code calls this; the master writes. Snapshots are compatible with OneFlow's in both directions.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from .errors import JobError, SessionError
from .session.session import session
from .session.settings import logger

__all__ = ["FileBacked", "Variable", "get", "get_all_variables", "load_variables", "save"]

DONE: Final = "snapshot_done"
_TYPES: Final = {
    "kFloat": "float32", "kDouble": "float64", "kFloat16": "float16", "kInt8": "int8",
    "kInt32": "int32", "kInt64": "int64", "kUInt8": "uint8",
    "kChar": "int8", "kBool": "bool",
}  # fmt: skip
_NAMES: Final = {name: kind for kind, name in reversed(_TYPES.items())}


class Variable:
    """A variable of the session, whose value is fetched on access."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the current value as a new array."""
        return session().fetch([self.name])[self.name]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return (
            f"Variable({self.name}, shape={list(self.shape)}, "
            f"dtype={str(self.dtype).removeprefix('torch.')})"
        )


class FileBacked:
    """A variable in a snapshot folder, which is read on access."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        text = (folder / "meta").read_text()
        kind = re.search(r"data_type:\s*(\w+)", text)
        if kind is None or kind[1] not in _TYPES:
            raise SessionError(
                f"checkpoint.get: {folder / 'meta'} has no known data_type ({', '.join(_TYPES)})"
            )
        self.shape = tuple(int(n) for n in re.findall(r"dim:\s*(\d+)", text))
        self.dtype = getattr(torch, _TYPES[kind[1]])
        self._kind = np.dtype(_TYPES[kind[1]])

    def numpy(self) -> np.ndarray[Any, Any]:
        """Read the value. Raise SessionError if the file's size does not match the shape."""
        flat = np.fromfile(self.folder / "out", dtype=self._kind)
        if flat.size != int(np.prod(self.shape)):
            raise SessionError(
                f"checkpoint.get: {self.folder / 'out'} has {flat.size} elements, its meta has "
                f"the shape {list(self.shape)}: it is damaged"
            )
        return flat.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"FileBacked({self.name}, shape={list(self.shape)}, {self.folder})"


def get_all_variables() -> dict[str, Variable]:
    """Return the variables of all jobs by name, and start the session if needed.

    Optimizer states are not among them; `save` saves those too.
    """
    this_session = session()
    return {name: Variable(name, *this_session.shape_of(name)) for name in this_session.names()}


def save(path: str, var_dict: Mapping[str, Any] | None = None) -> None:
    """Write variables into a folder, which must be empty or not exist yet.

    Without ``var_dict``, save everything: variables, optimizer states, step counts and dynamic loss
    scales. Otherwise save the given values by name: arrays, or the results of `get_all_variables`
    and `get`. Raise SessionError if the folder is not empty.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SessionError(
            f"checkpoint.save: {folder} holds something already: name a folder that is not there "
            f"yet"
        )
    this_session = session()
    arrays = (
        this_session.fetch(this_session.saved_names())
        if var_dict is None
        else {name: np.asarray(_value(v)) for name, v in var_dict.items()}
    )
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    # A killed process with the same pid may have left this folder.
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for name, array in arrays.items():
            _write(unfinished, name, array)
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / DONE).touch()
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write(folder: Path, name: str, array: np.ndarray[Any, Any]) -> None:
    where = folder / name
    if folder.resolve() not in where.resolve().parents:
        raise SessionError(
            f"checkpoint.save: a variable named {name!r} would be written outside of the folder"
        )
    if array.dtype.name not in _NAMES:
        raise SessionError(
            f"checkpoint.save: {name} is {array.dtype}, which has no name in the format"
        )
    where.mkdir(parents=True)
    np.ascontiguousarray(array).tofile(where / "out")
    dims = "".join(f"  dim: {n}\n" for n in array.shape)
    (where / "meta").write_text(f"shape {{\n{dims}}}\ndata_type: {_NAMES[array.dtype.name]}\n")


def get(path: str) -> dict[str, FileBacked]:
    """Return the variables in a folder by name; their values are read on access.

    Raise SessionError if there is no complete snapshot.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise SessionError(f"checkpoint.get: there is no folder {folder}")
    found = {name: FileBacked(name, where) for name, where in _folders(folder, "")}
    if not found or not (folder / DONE).exists():
        why = "no variables" if not found else f"no {DONE}: it was not written completely"
        raise SessionError(f"checkpoint.get: {folder} is no snapshot: it has {why}")
    return found


def _folders(folder: Path, before: str) -> Iterator[tuple[str, Path]]:
    for where in sorted(p for p in folder.iterdir() if p.is_dir()):
        if (where / "meta").is_file() and (where / "out").is_file():
            yield before + where.name, where
        yield from _folders(where, f"{before}{where.name}/")


def load_variables(value_dict: Mapping[str, Any], ignore_mismatch: bool = True) -> None:
    """Set variables to the values of arrays, by name, and optimizer states if a snapshot has them.

    Names that no job has are skipped. With ``ignore_mismatch=False``, raise SessionError for such
    names and for variables without a value. Raise JobError for a value of another shape, or one
    that is not numeric.
    """
    this_session = session()
    known, own = set(this_session.saved_names()), this_session.names()
    strange = sorted(set(value_dict) - known)
    missing = sorted(set(own) - set(value_dict))
    if (strange or missing) and not ignore_mismatch:
        problems = [f"no job has {', '.join(strange)}"] * bool(strange) + [
            f"no value is given for {', '.join(missing)}"
        ] * bool(missing)
        raise SessionError(f"load_variables: {'; '.join(problems)}")
    if strange:
        logger.info("load_variables: no job has %s", ", ".join(strange))
    arrays = {
        name: np.asarray(_value(value_dict[name]))
        for name in this_session.saved_names()
        if name in value_dict
    }
    # Check all values before loading any: an error halfway would leave the devices out of step.
    for (
        name,
        array,
    ) in arrays.items():
        shape = this_session.shape_of(name)[0]
        if array.shape != shape:
            raise JobError(
                f"load_variables: {'variable ' if name in own else ''}{name} has shape "
                f"{list(shape)}, the value {list(array.shape)}"
            )
        if array.dtype.kind not in "biufc":
            raise JobError(
                f"load_variables: numbers are wanted for {name}, got an array of {array.dtype}"
            )
    if arrays:
        this_session.load(arrays)


def _value(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.detach().cpu().numpy()
    return given.numpy() if isinstance(given, (Variable, FileBacked)) else given
