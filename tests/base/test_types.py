"""Tests of what type checkers and IDEs see: the stubs, ``dir``, and a user's programs under the
strict settings of mypy and pyright."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import globaltensor as flow
from globaltensor._base.torch_namespace import public_names
from globaltensor._ops import creation

ROOT = Path(flow.__file__).parent
TESTS = Path(__file__).parents[1]
RIGHT = TESTS / "support/typed/right.py"
WRONG = TESTS / "support/typed/wrong.py"
IGNORED = re.compile(r"  # type: ignore\[[a-z-]+\]$", re.MULTILINE)
PACKAGES = [
    "globaltensor", "globaltensor.amp", "globaltensor.autograd", "globaltensor.distributed",
    "globaltensor.distributed.fsdp", "globaltensor.fft", "globaltensor.linalg", "globaltensor.nn",
    "globaltensor.nn.functional", "globaltensor.nn.init", "globaltensor.nn.parallel",
    "globaltensor.nn.utils", "globaltensor.optim", "globaltensor.optim.lr_scheduler",
    "globaltensor.special", "globaltensor.utils", "globaltensor.utils.data",
]  # fmt: skip


def stub_of(package: str) -> Path:
    path = ROOT.joinpath(*package.split(".")[1:])
    return path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")


def made_for_this_torch() -> bool:
    return f"torch {torch.__version__.partition('+')[0]} " in stub_of("globaltensor").read_text()


@pytest.mark.extended
def test_the_stubs_are_those_of_the_sources() -> None:
    if not made_for_this_torch():
        pytest.skip("the stubs were made with another version of torch")
    done = subprocess.run(
        [sys.executable, "-m", "support.stubs.generate", "--check"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"run `make stubs`:\n{done.stdout}{done.stderr}"


def exported(package: str) -> set[str]:
    """Return the names that a stub exports: those it defines, and ``import x as x``."""
    names = set()
    for node in ast.parse(stub_of(package).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {a.asname for a in node.names if a.asname and a.asname == a.name}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_stub_exports_what_dir_shows(package: str) -> None:
    if not made_for_this_torch():
        pytest.skip("the stubs were made with another version of torch")
    module = importlib.import_module(package)
    other = exported(package) ^ set(public_names(package))
    # other tests import submodules, which are attributes from then on
    other -= {n for n in other if isinstance(vars(module).get(n, 0) or 0, ModuleType)}
    theirs = importlib.import_module(package.replace("globaltensor", "torch", 1))
    other -= {n for n in other if isinstance(vars(theirs).get(n), ModuleType)}
    assert not other


@functools.cache
def definitions(package: str) -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.parse(stub_of(package).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


OURS = [
    name
    for name in sorted(definitions("globaltensor"))
    if inspect.unwrap(vars(flow).get(name, len)).__module__.startswith("globaltensor")
]


def arguments(node: ast.FunctionDef) -> list[str]:
    a = node.args
    return [x.arg for x in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if x]


@pytest.mark.parametrize("name", OURS)
def test_a_function_has_the_parameters_of_its_stub(name: str) -> None:
    function = getattr(flow, name)
    for node in definitions("globaltensor")[name]:
        if name in creation.__all__:  # torch's parameters, and two more
            assert {"placement", "sbp"} <= {x.arg for x in node.args.kwonlyargs}
        else:
            real = inspect.signature(function).parameters
            kinds = {p.kind for p in real.values()}
            loose = inspect.Parameter.VAR_KEYWORD in kinds
            extra = set(arguments(node)) - set(real)
            assert not extra or loose, f"the function does not accept {extra}"
            required = {
                p.name
                for p in real.values()
                if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            }
            assert required <= set(arguments(node))


def test_methods_of_tensors_and_modules_have_the_parameters_of_their_stubs() -> None:
    def stub(package: str, cls: str, name: str) -> list[str]:
        (node,) = [
            n
            for n in ast.parse(stub_of(package).read_text()).body
            if isinstance(n, ast.ClassDef) and n.name == cls
        ]
        (method,) = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name]
        return arguments(method)

    x = flow.ones(2, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
    for name in ("to_global", "to_local", "global_id", "check_meta_consistency"):
        real = inspect.signature(getattr(type(x), name)).parameters
        assert stub("globaltensor", "Tensor", name) == list(real)
    for name in ("to_global", "to_local"):
        real = inspect.signature(getattr(torch.nn.Module, name)).parameters
        assert stub("globaltensor.nn", "Module", name) == list(real)


# --------------------------------------------------------------------------------------- checkers


def wrong_lines() -> set[int]:
    lines = WRONG.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if IGNORED.search(line)}


def shown(lines: set[int]) -> str:
    text = WRONG.read_text().splitlines()
    return "\n".join(f"{number}: {text[number - 1].strip()}" for number in sorted(lines))


def copied(folder: Path) -> list[str]:
    """Copy both programs there and return their names. The copies lack the comments that let
    ``make types`` ignore errors."""
    for path in (RIGHT, WRONG):
        (folder / path.name).write_text(IGNORED.sub("", path.read_text()))
    return [RIGHT.name, WRONG.name]


def run_mypy(folder: Path) -> tuple[set[tuple[str, int]], str]:
    """Return the lines with errors, and mypy's report. It runs as for an installed package."""
    names = copied(folder)
    cache = TESTS.parent / ".mypy_cache/user"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", cache, *names],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(\w+\.py):(\d+): error", done.stdout, re.MULTILINE)
    return {(name, int(line)) for name, line in found}, done.stdout


def run_pyright(folder: Path) -> tuple[set[tuple[str, int]], str]:
    """Return the lines with errors, and pyright's report."""
    command = shutil.which("pyright", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None or subprocess.run([command, "--version"], capture_output=True).returncode:
        pytest.skip("pyright does not start: its package fetches it from npm, with Node.js, once")
    settings = {"typeCheckingMode": "strict", "include": copied(folder)}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [command, "--outputjson", "--pythonpath", sys.executable],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    errors = {
        (Path(d["file"]).name, d["range"]["start"]["line"] + 1): d["message"]
        for d in json.loads(done.stdout)["generalDiagnostics"]
        if d["severity"] == "error"
    }
    return set(errors), "\n".join(f"{name}:{line}: {m}" for (name, line), m in errors.items())


@pytest.mark.parametrize(
    "checker",
    [
        # `make types` runs mypy on these programs, in this checkout.
        pytest.param(run_mypy, id="mypy", marks=pytest.mark.extended),
        pytest.param(run_pyright, id="pyright", marks=pytest.mark.extended),
    ],
)
def test_a_right_program_has_no_error_and_each_wrong_call_is_found(
    checker: Callable[[Path], tuple[set[tuple[str, int]], str]], tmp_path: Path
) -> None:
    errors, report = checker(tmp_path)
    false = {line for name, line in errors if name == RIGHT.name}
    assert not false, report
    found = {line for name, line in errors if name == WRONG.name}
    assert not wrong_lines() - found, f"not found:\n{shown(wrong_lines() - found)}"
    assert not found - wrong_lines(), f"false errors:\n{shown(found - wrong_lines())}\n{report}"


@pytest.mark.extended
def test_the_right_program_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(RIGHT)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------- dir


def test_dir_lists_this_librarys_names_and_torchs() -> None:
    assert {"placement", "randn", "auto", "matmul", "float32", "nn", "channels_last"} <= {
        *dir(flow)
    }
    assert {"Graph", "Linear", "Module", "functional", "Parameter"} <= {*dir(flow.nn)}
    assert {"all_reduce", "get_rank", "ReduceOp"} <= {*dir(flow.distributed)}
    assert {"LAMB", "AdamW", "lr_scheduler"} <= {*dir(flow.optim)}
    assert {"WarmupLR", "StepLR"} <= {*dir(flow.optim.lr_scheduler)}
    assert not {"math", "sys", "Any", "TYPE_CHECKING", "torch"} & {*dir(flow)}
    assert not {"wraps", "Any", "partial"} & {*dir(flow.optim.lr_scheduler)}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.distributed.reduce_op
def test_each_name_of_dir_works(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in dir(module) if getattr(module, name, "absent") == "absent"] == []


def test_a_star_import_gives_the_names_that_dir_shows() -> None:
    names: dict[str, object] = {}
    exec("from globaltensor import *", names)
    del names["__builtins__"]
    assert names.keys() == {name for name in dir(flow) if not name.startswith("_")}
    assert {"placement", "to_global", "auto", "float32"} <= names.keys()
    assert names["zeros_like"] is flow.zeros_like


@pytest.mark.parametrize(
    ("package", "name"),
    [("nn", "Linear"), ("utils", "Progress"), ("nn.parallel", "DataParallel")],
)
def test_a_star_import_of_a_package_gives_torchs_names_too(package: str, name: str) -> None:
    names: dict[str, object] = {}
    exec(f"from globaltensor.{package} import *", names)
    module = importlib.import_module(f"globaltensor.{package}")
    assert names[name] is getattr(module, name)
    assert {n for n in names if n[0] != "_"} == {n for n in dir(module) if n[0] != "_"}


def test_functional_is_torchs_own() -> None:
    import globaltensor.nn.functional as functional

    assert functional is torch.nn.functional
    assert flow.nn.functional is torch.nn.functional
    assert importlib.reload(flow.nn).functional is torch.nn.functional
