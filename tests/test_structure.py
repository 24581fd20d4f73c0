"""Tests of the package's structure: the direction of imports, the place of torch's private names,
and an import without side effects."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import globaltensor
from globaltensor._base.hidden_attributes import HIDDEN_ATTRIBUTES

ROOT = Path(globaltensor.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# The lowest layer comes first. CONTRIBUTING.md describes the layers in a sentence. A folder or file
# of the package's top imports from earlier rows, and from earlier entries of its own row.
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


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file of the package, as ast.walk does."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _nodes_are_freed() -> Iterator[None]:
    yield
    nodes.cache_clear()


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (room, line) of each import of this package in a file."""
    package = ["globaltensor", *path.relative_to(ROOT).parts[:-1]]
    for node in nodes(path):
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
    """Yield (name, line) of torch's private names in a file."""
    roots = {}  # local name -> the torch name that it refers to
    for node in nodes(path):
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
    for node in nodes(path):
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


@pytest.mark.long
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


def test_private_names_of_torch_live_in_one_folder() -> None:
    wrong = [
        f"{path.relative_to(ROOT.parent)}:{line}: {name}"
        for path in FILES
        if path.parent.name != "torch_private"
        for name, line in private(path)
    ]
    assert not wrong, "move these to _base/torch_private/, with a reason:\n" + "\n".join(wrong)


def hidden_attributes(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each attribute that a file reads or writes in another object's
    __dict__."""
    if "__dict__" not in path.read_text():
        return
    texts = {
        target.id: node.value.value
        for node in nodes(path)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }

    def other(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == "__dict__"
            and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        )

    for node in nodes(path):
        keys: list[ast.AST] = []
        if isinstance(node, ast.Subscript) and other(node.value):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if other(node.func.value) and node.func.attr in ("get", "pop", "setdefault"):
                keys = node.args[:1]
            elif other(node.func.value) and node.func.attr == "update":
                keys = [ast.Constant(word.arg) for word in node.keywords]
                keys += [key for arg in node.args if isinstance(arg, ast.Dict)
                         for key in arg.keys if key is not None]  # fmt: skip
        elif isinstance(node, ast.Compare) and any(map(other, node.comparators)):
            keys = [node.left]
        for key in keys:
            name = key.value if isinstance(key, ast.Constant) else texts.get(getattr(key, "id", ""))
            if isinstance(name, str):
                yield name, node.lineno


def test_hidden_attributes_are_declared() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for name, line in hidden_attributes(path)
        if name not in HIDDEN_ATTRIBUTES
    ]
    assert not wrong, "declare them in _base/hidden_attributes.py:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("x.__dict__['_a'] = 1", ["_a"]),
        ("x.__dict__[_KEY]", ["_named"]),
        ("x.__dict__.get('_a')", ["_a"]),
        ("x.__dict__.update(_a=1, _b=2)", ["_a", "_b"]),
        ("x.__dict__.update({'_a': 1, _KEY: 2}, _b=3, **more)", ["_b", "_a", "_named"]),
        ("'_a' in x.__dict__", ["_a"]),
        ("self.__dict__.update(_a=1)", []),
        ("names.update(_a=1)", []),
    ],
)
def test_hidden_attributes_are_found(tmp_path: Path, statement: str, names: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"_KEY = '_named'\n{statement}\n")
    assert [name for name, _ in hidden_attributes(path)] == names


def words(text: str) -> set[str]:
    """Return the names and the texts of one word in a program, without those in docstrings."""
    found: set[Any] = set()
    for node in ast.walk(ast.parse(text)):
        found |= {getattr(node, field, None) for field in ("id", "attr", "arg", "name")}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.mark.parametrize("name", HIDDEN_ATTRIBUTES)
def test_the_module_of_a_hidden_attribute_has_it(name: str) -> None:
    module, _ = HIDDEN_ATTRIBUTES[name]
    assert name in words_of(module), f"{module} does not write {name}"


@functools.cache
def words_of(module: str) -> set[str]:
    """Return the words of a module of the package, or of torch's modules and parameters."""
    if module == "torch":
        return words(inspect.getsource(torch.nn.Module) + inspect.getsource(torch.nn.parameter))
    return words((ROOT / module).read_text())


def test_files_say_what_they_hold() -> None:
    silent = []
    for path in FILES:
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        if path.read_text().strip() and not ast.get_docstring(module):
            silent.append(str(path.relative_to(ROOT)))
    assert not silent, f"without a docstring that says what they are: {silent}"


#: File names that two folders share. Each folder makes clear which file it is.
TWICE = {
    "autograd.py": "of boxing, and torch's private names of it",
    "distributed.py": "torch's page of that name, and its private names",
    "modules.py": "plans applied to modules, and torch's private names of modules",
    "collectives.py": "what users call, and how MPI runs it",
    "explain.py": "of boxing, and of plans",
    "graph.py": "the class, and the public page that has it",
    "reduction.py": "rules of reductions, and MPI's own arithmetic",
    "sbp.py": "the class, and the public page that has it",
    "search.py": "within one mesh, and over meshes and stages",
    "simulate.py": "ranks as threads, and a pipeline schedule",
    "checkpoint.py": "of global tensors, and OneFlow's page of that name",
    "config.py": "of graphs, and OneFlow's page of that name",
    "env.py": "of ranks, and OneFlow's page of that name",
    "errors.py": "of everything, and of job functions",
    "ops.py": "OneFlow's page of that name",
}
#: Class names that a public page of OneFlow's interface also has.
PAGES = {"LAMB"}


def test_a_file_name_says_which_file_it_is() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert {name for name, n in names.items() if n > 1} <= set(TWICE)
    assert max(n for name, n in names.items()) == 2


def test_a_class_name_means_one_thing() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: at for name, at in classes.items() if len(at) > 1 and name not in PAGES}
    assert not twice


def test_the_root_has_few_entries() -> None:
    names = {p.name for p in ROOT.iterdir() if p.suffix != ".pyi"}  # stubs are generated
    entries = names - {"__pycache__", "py.typed"}
    assert len(entries) <= 21, sorted(entries)


def docstrings(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, line, text) of each docstring in a file."""
    kinds = {ast.Module: "module", ast.ClassDef: "class"}
    for node in nodes(path):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield kinds.get(type(node), "function"), getattr(node, "lineno", 1), text


#: Words that no docstring opens with: a noun clause stands where a verb or a noun should be.
NOUN_CLAUSES = set("What Whether How Where Who Whose Which As Of When While If Whoever".split())
ARTICLES = {"A", "An", "The", "One", "Two"}


def test_docstrings_open_with_a_verb_or_an_article() -> None:
    wrong = []
    for path in FILES:
        for kind, line, text in docstrings(path):
            first = re.split(r"\W", text, maxsplit=1)[0]
            if first in NOUN_CLAUSES or (kind == "class" and first not in ARTICLES):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


#: Household words, and the field's words for them (STYLE, "Plain English").
GLOSSARY = {
    r"foretell|foretells|foretold": "predict",
    r"go apart|goes apart|gone apart|went apart": "diverge",
    r"stand-ins?": "fake tensor",
    r"nests? of": "pytree",
    r"lies as|lie as|lies so": "has the layout of",
    r"carries out|carried out|carry out": "apply",
    r"besides?": "with, other",
    r"told|tells us": "send, report",
    r"nobody|somebody|whoever": "the noun that is meant",
}


def test_docstrings_and_comments_use_the_fields_words() -> None:
    household = re.compile(rf"\b({'|'.join(GLOSSARY)})\b", re.IGNORECASE)
    wrong = []
    for path in FILES:
        if not household.search(path.read_text()):
            continue
        texts = [(line, text) for _, line, text in docstrings(path)]
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        texts += [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]
        for line, text in texts:
            wrong += [f"{path.relative_to(ROOT)}:{line}: {w}" for w in household.findall(text)]
    assert not wrong, "\n".join(wrong)


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
assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules), "the compiler was imported"
assert "globaltensor.distributed.launch" not in sys.modules, "python -m globaltensor.distributed.launch would warn"
"""  # noqa: E501
    # The world of two does not exist, so starting it at import would fail or hang.
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
