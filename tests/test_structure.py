"""The rooms: what may import what, where torch's private names live, and that importing does
nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import globaltensor

ROOT = Path(globaltensor.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Lowest first: what this is in a sentence stands in CONTRIBUTING.md. A folder or file of the
# package's top imports from earlier rows, and earlier in its own row.
LAYERS: dict[str, tuple[str, ...]] = {
    "base": ("errors", "_base"),
    "values": ("sharding", "cluster"),
    "ranks": ("distributed", "comm"),
    "moves": ("boxing",),
    "tensor": ("_tensor",),
    "operations": ("_ops",),
    "programs": ("amp", "optim", "parallel", "graph"),
    "search and interface": (
        "auto",
        "sbp",
        "pipeline",
        "nn",
        "utils",
        "v0",
        "__init__",
        "__main__",
    ),
}
_ORDER = [room for rooms in LAYERS.values() for room in rooms]


def layer(room: str) -> int:
    return _ORDER.index(room) if room in _ORDER else -1


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(room, line) of everything of this package that a file imports."""
    package = ["globaltensor", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[list[str]] = []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            names = [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        for name in names:
            if name[0] == "globaltensor":
                yield (name[1] if len(name) > 1 else "__init__"), node.lineno


def private(path: Path) -> Iterator[tuple[str, int]]:
    """(name, line) of torch's private names in a file."""
    tree = ast.parse(path.read_text())
    roots = {}  # local name -> what of torch it stands for
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [
                (alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names
            ]
        for local, full in names:
            if full.split(".")[0] == "torch":
                roots[local] = full
                if any(hidden(part) for part in full.split(".")):
                    yield full, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and hidden(node.attr):
            chain, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                chain, value = [value.attr, *chain], value.value
            if isinstance(value, ast.Name) and value.id in roots:
                yield ".".join([roots[value.id], *chain]), node.lineno


def hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_room_has_its_layer() -> None:
    assert {room(path) for path in FILES} <= set(_ORDER), (
        "a new file or folder at the top needs its place in LAYERS: as low as what it imports "
        "allows"
    )


def test_imports_go_down_only() -> None:
    wrong = []
    for path in FILES:
        mine = room(path)
        for other, line in imported(path):
            if other != mine and layer(other) >= layer(mine):
                wrong.append(
                    f"{path.relative_to(ROOT.parent)}:{line}: {mine} imports {other}, which does "
                    f"not stand below it"
                )
    assert not wrong, "\n".join(wrong)


def test_private_names_of_torch_live_in_one_file() -> None:
    wrong = [
        f"{path.relative_to(ROOT.parent)}:{line}: {name}"
        for path in FILES
        if path.name != "torch_private.py"
        for name, line in private(path)
    ]
    assert not wrong, "move these to _base/torch_private.py, with a reason:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_holds(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), (
        f"{path.name} doesn't say what it is: it needs a docstring"
    )


def test_importing_prints_nothing_and_starts_nothing() -> None:
    program = """
import os, sys, threading, torch
def threads():
    return threading.active_count(), len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
before = threads()
import globaltensor
assert not torch.distributed.is_initialized(), "a process group was started"
assert threads() == before, "threads were started"
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    pass
else:
    raise AssertionError("processes were started")
assert "globaltensor.distributed.launch" not in sys.modules, "python -m globaltensor.distributed.launch would warn"
"""  # noqa: E501
    # A world of two that does not exist: starting it at import would fail or hang.
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "PYTHONPATH": str(ROOT.parent),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    assert not done.stderr
