"""The signatures of stubs, from the source and stub files of torch and of this library.

`Writer.function` and `Writer.members` convert a definition's syntax tree to the text of a stub.
Arguments may be tensors and modules of torch (`IN`). Results are those of this library (`OUT`).
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

#: Names in results and attributes that the stubs replace by those of this library.
OUT = {
    "Tensor": "Tensor",
    "GlobalTensor": "Tensor",
    "Parameter": "Parameter",
    "Module": "Module",
    "ModuleList": "ModuleList",
    "Sequential": "Sequential",
}
#: Where the names of the right column stand, for the stubs that do not define them.
HOMES = {"Tensor": "globaltensor", **dict.fromkeys(("Parameter", "Module"), "globaltensor.nn")}
#: What a tensor or module that goes in may be.
IN = {
    "Tensor": "_torch.Tensor",
    "GlobalTensor": "_torch.Tensor",
    "Parameter": "_torch.nn.Parameter",
    "Module": "_torch.nn.Module",
}
_KEPT_DECORATORS = {"overload", "property", "staticmethod", "classmethod", "contextmanager"}

Definition = ast.FunctionDef | ast.AnnAssign


@dataclass(frozen=True)
class Source:
    """A file with definitions, and the names that its annotations use."""

    module: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def path(self) -> Path:
        top, *rest = self.module.split(".")
        (folder,) = importlib.import_module(top).__path__
        base = Path(folder, *rest)
        endings = (".pyi", ".py") if top == "torch" else (".py",)
        candidates = [
            *(base / f"__init__{end}" for end in endings),
            *(base.parent / f"{base.name}{end}" for end in endings),
        ]
        return next(path for path in candidates if path.exists())

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Name -> (module, the name there; "" for the module itself)."""
        found = {}
        package = self.module if self.path.stem == "__init__" else self.module.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0],
                        "",
                    )
            elif isinstance(node, ast.ImportFrom):
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                home = ".".join([*(base if node.level else []), *filter(None, [node.module])])
                for alias in node.names:
                    found[alias.asname or alias.name] = (home, alias.name)
        return found

    @cached_property
    def functions(self) -> dict[str, list[ast.FunctionDef]]:
        """Name -> its definition, or its overloads."""
        return _chosen(_statements(self.tree.body))

    def members(self, name: str) -> dict[str, list[Definition]]:
        """Return the attributes and methods that a class of this file defines."""
        (node,) = [n for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name == name]
        body = list(_statements(node.body))
        attributes: dict[str, list[Definition]] = {
            n.target.id: [n]
            for n in body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        return {**attributes, **_chosen(body)}


@cache
def source(module: str) -> Source:
    return Source(module)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that a type checker sees: of ``if TYPE_CHECKING`` the first branch."""
    for node in body:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            yield from _statements(node.orelse if test.startswith("not ") else node.body)
        else:
            yield node


def _chosen(body: Iterable[ast.stmt]) -> dict[str, list]:  # type: ignore[type-arg]
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return {
        name: [n for n in nodes if "overload" in _decorators(n)] or nodes[-1:]
        for name, nodes in found.items()
    }


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list]


def mentions(node: ast.AST | None, names: Iterable[str]) -> bool:
    """Return True if an annotation has one of the names, also inside of text."""
    words = set(names)
    return node is not None and any(
        (isinstance(n, ast.Name) and n.id in words)
        or (isinstance(n, ast.Attribute) and (n.attr in words or "return_types" in ast.unparse(n)))
        or (isinstance(n, ast.Constant) and isinstance(n.value, str) and _mentions(n.value, words))
        for n in ast.walk(node)
    )


def _mentions(text: str, words: set[str]) -> bool:
    try:
        return mentions(ast.parse(text, mode="eval"), words)
    except SyntaxError:
        return False


def result(node: Definition) -> ast.expr | None:
    return node.annotation if isinstance(node, ast.AnnAssign) else node.returns


class _Names(ast.NodeTransformer):
    """A change of the names of one annotation to what they are in the stub."""

    def __init__(self, writer: Writer, origin: Source, own: dict[str, str]) -> None:
        self.writer, self.origin, self.own = writer, origin, own

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value).endswith("Literal"):
            node.value = self.visit(node.value)
            return node
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            return self.visit(ast.parse(node.value, mode="eval").body)  # type: ignore[no-any-return]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        text = ast.unparse(node)
        if text.startswith("torch.return_types.") and self.own is OUT:
            return _expression(
                f"{self.writer.module('globaltensor._tensor', 'return_types')}.{node.attr}"
            )
        if text in ("torch.Tensor", "torch.nn.Module", "nn.Module", "torch.nn.Parameter"):
            return self.visit_Name(ast.Name(node.attr))
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.own:
            return _expression(self.writer.own(self.own[node.id]))
        return _expression(self.writer.name(node.id, self.origin))


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@dataclass
class Writer:
    """The text of one stub, and the imports that its annotations need."""

    package: str
    defines: set[str]
    imports: dict[str, str] = field(default_factory=dict)  # alias -> import statement

    def own(self, name: str) -> str:
        if name in self.defines or "." in name:
            return name
        return self._imported(HOMES.get(name, "globaltensor.nn"), name)

    def module(self, home: str, name: str) -> str:
        return self._imported(home, name)

    def name(self, name: str, origin: Source) -> str:
        """Return what a name of a file is called here; import it where that is needed."""
        if name == "torch":
            return "_torch"
        if name in origin.imports:
            return self._imported(*origin.imports[name])
        if hasattr(builtins, name):
            return f"_builtins.{name}"
        return self._imported(origin.module, name)

    def _imported(self, home: str, name: str) -> str:
        base = name or home
        alias = "_" + base.replace(".", "_").lstrip("_")
        line = f"from {home} import {name} as {alias}" if name else f"import {home} as {alias}"
        while self.imports.setdefault(alias, line) != line:
            alias += "_"
            line = f"{line.rpartition(' as ')[0]} as {alias}"
        return alias

    def annotation(self, node: ast.expr | None, origin: Source, own: dict[str, str]) -> ast.expr:
        if node is None:
            return _expression(self._imported("typing", "Any"))
        changed = _Names(self, origin, own).visit(copy.deepcopy(node))
        assert isinstance(changed, ast.expr)
        return changed

    def function(
        self, nodes: Sequence[ast.FunctionDef], origin: Source, *, more: str = "", name: str = ""
    ) -> list[str]:
        """Return the lines of a function's stub. ``more``: keyword parameters to add."""
        lines = []
        for node in nodes:
            args = copy.deepcopy(node.args)
            for position, arg in enumerate(
                [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
            ):
                if arg is None or (position == 0 and arg.arg in ("self", "cls")):
                    continue
                arg.annotation = self.annotation(arg.annotation, origin, IN)
            args.defaults = [_default(d) for d in args.defaults]
            args.kw_defaults = [d and _default(d) for d in args.kw_defaults]
            for parameter in filter(None, more.split(", ")):
                key, _, kind = parameter.partition(": ")
                args.kwonlyargs.append(ast.arg(key, _expression(kind)))
                args.kw_defaults.append(ast.Constant(None))
            returns = ast.unparse(self.annotation(node.returns, origin, OUT))
            for decorator in _decorators(node):
                if decorator in ("overload", "contextmanager"):
                    home = {"overload": "typing", "contextmanager": "contextlib"}[decorator]
                    lines.append(f"@{self._imported(home, decorator)}")
                elif decorator in _KEPT_DECORATORS:
                    lines.append(f"@_builtins.{decorator}")
            if node.name == "__init__":
                returns = "None"
            lines.append(f"def {name or node.name}({ast.unparse(args)}) -> {returns}: ...")
        return lines

    def members(self, found: dict[str, list[Definition]], origin: Source) -> list[str]:
        """Return the lines of attributes and methods of a class, indented."""
        lines = []
        for name, nodes in found.items():
            if isinstance(nodes[0], ast.AnnAssign):
                kind = ast.unparse(self.annotation(nodes[0].annotation, origin, OUT))
                lines.append(f"{name}: {kind}")
            else:
                lines += self.function(nodes, origin)  # type: ignore[arg-type]
        return [f"    {line}" for line in lines]


def _default(node: ast.expr) -> ast.expr:
    simple = isinstance(node, ast.Constant) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    )
    return node if simple else ast.Constant(...)
