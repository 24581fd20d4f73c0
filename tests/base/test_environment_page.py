"""Tests that docs/environment.md lists every environment variable that the package reads or sets.

The names in the source are the keys of `os.environ`, the constants of modules that use
`os.environ`, and the arguments of the functions that recognise a launcher.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import globaltensor

ROOT = Path(globaltensor.__file__).parent
PAGE = ROOT.parent / "docs" / "environment.md"
#: The form of a variable's name in a constant. A key of `os.environ` may have any form.
NAME = re.compile(r"[A-Z][A-Z0-9]+(_[A-Za-z0-9]+)+")
#: Methods of `cluster_env.Environment` whose arguments are names of variables.
READERS = {"text", "number"}


def is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def texts(node: ast.expr | None) -> list[str]:
    """Return the texts of a constant, or of a tuple or set of constants."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.Set) else [node]
    values = [e.value for e in elements if isinstance(e, ast.Constant)]
    return [value for value in values if isinstance(value, str)]


def names(source: str) -> Iterator[str]:
    """Yield the names of environment variables in a module's source."""
    if "environ" not in source:
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if is_environ(node.func.value) or node.func.attr == "getenv":
                yield from texts(node.args[0]) if node.args else ()
            elif node.func.attr in READERS:
                yield from (name for argument in node.args for name in texts(argument))
        elif isinstance(node, ast.Subscript) and is_environ(node.value):
            yield from texts(node.slice)
        elif isinstance(node, ast.Compare) and any(
            is_environ(part) for each in node.comparators for part in ast.walk(each)
        ):
            yield from texts(node.left)
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            found = texts(statement.value)
            if all(NAME.fullmatch(text) for text in found):
                yield from found


def test_names_are_found_in_each_form() -> None:
    source = """
__all__ = ["NOT_A_VARIABLE"]
KINDS = ("OTHER_TEXTS", "in a tuple")
A_NAME: Final = "IN_A_CONSTANT"
NAMES = ("IN_A_TUPLE", "SECOND_OF_IT")
os.environ.get("READ", "1")
os.environ["SET"] = "x"
"ASKED" not in os.environ
{"FIRST", "LAST"} <= os.environ.keys()
os.getenv("BY_FUNCTION")
self.number("RECOGNISED")
"""
    assert set(names(source)) == {
        "IN_A_CONSTANT", "IN_A_TUPLE", "SECOND_OF_IT", "READ", "SET", "ASKED", "FIRST", "LAST",
        "BY_FUNCTION", "RECOGNISED",
    }  # fmt: skip


def test_the_page_lists_every_variable() -> None:
    used: dict[str, str] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for name in names(path.read_text()):
            used.setdefault(name, str(path.relative_to(ROOT)))
    assert "GLOBALTENSOR_TIMEOUT" in used
    listed = set(re.findall(r"`([A-Za-z0-9_]+)`", PAGE.read_text()))
    missing = {name: path for name, path in used.items() if name not in listed}
    assert not missing, f"docs/environment.md lacks {missing}"
