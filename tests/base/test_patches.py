"""Tests that the table of patches lists every patch, and that undoing restores the originals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.warm_python import warm_python

from globaltensor._base import patches
from globaltensor._base.patches import Patch, patch, status, undo

# The changes that `import globaltensor` makes in torch's modules and classes. They are found by
# comparing all attributes before and after.
CHANGED = """
import functools, logging, sys, types, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed, torch.distributed.checkpoint, torch.utils.checkpoint
import torch.distributed.checkpoint.state_dict, torch.nn.attention.flex_attention

def attributes():
    found, classes = {}, {logging.Handler: None}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                found[module, key] = value
                if isinstance(value, type) and (value.__module__ or "").startswith("torch"):
                    classes[value] = None
    for each in classes:
        for key, value in list(vars(each).items()):
            found[each, key] = value
    return found

def ours(value):
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "fset", None) or getattr(value, "fget", None) or value
    code = getattr(value, "__code__", None)
    return "globaltensor" in getattr(code, "co_filename", "")

before = attributes()
import globaltensor
from globaltensor._base import patches
after = attributes()
changed = {at for at, value in after.items() if at in before and before[at] is not value
           or at not in before and ours(value)}
listed = {(home, name) for home, name, _ in patches._applied.values()}
# torch keeps these itself: a counter of hooks, and the set of classes that add_safe_globals fills
own = {"next_id", "_marked_safe_globals_set"}
for home, name in changed - listed:
    if name not in own:
        print("not in the table:", home, name)
patches.undo()
for home, name in listed:
    there = vars(home).get(name, None)
    if there is not before.get((home, name)) and home is not sys:
        print("not undone:", home, name)
"""


def test_the_table_lists_every_change_of_torch_and_undo_takes_it_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHANGED], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_each_row_names_a_target_once_and_gives_a_reason() -> None:
    targets = [row.target for row in patches.TABLE]
    assert len(set(targets)) == len(targets)
    assert all(row.target.count(":") == 1 and row.reason and row.since for row in patches.TABLE)
    states = {s.row.target: s.state for s in status()}
    assert states["torch.nn:Module.to_global"] == "applied"
    assert set(states.values()) <= {"applied", "waits for import", "unused"}


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> str:
    target = "colorsys:ONE_THIRD"
    monkeypatch.setitem(patches._ROWS, target, Patch(target, "Python 3.10", "a test"))
    return target


def test_a_patch_can_be_made_twice_and_undone(listed: str) -> None:
    import colorsys

    before = colorsys.ONE_THIRD
    patch(listed, lambda value: (value, 1))
    patch(listed, lambda value: (value, 2))
    assert ((before, 1), 2) == colorsys.ONE_THIRD
    undo(listed)
    assert before == colorsys.ONE_THIRD


def test_names_that_a_version_lacks_are_left_out(
    listed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "colorsys:NO_SUCH_NAME"
    monkeypatch.setitem(patches._ROWS, target, Patch(target, "Python 3.10", "a test"))
    import colorsys

    patch(target, lambda value: 1)
    assert not hasattr(colorsys, "NO_SUCH_NAME")
    patch(target, lambda value: (value, 1), missing=True)
    assert colorsys.NO_SUCH_NAME == (None, 1)  # type: ignore[attr-defined]
    undo(target)
    assert not hasattr(colorsys, "NO_SUCH_NAME")


def test_a_target_outside_the_table_is_refused() -> None:
    with pytest.raises(KeyError):
        patch("torch:add", lambda value: value)


def test_several_changes_wait_for_the_import_of_one_module() -> None:
    program = """
import sys
from globaltensor._base.import_hooks import when_imported
assert "sched" not in sys.modules
when_imported("sched", lambda module: setattr(module, "first", 1))
when_imported("sched", lambda module: setattr(module, "second", module.first + 1))
import sched
assert (sched.first, sched.second) == (1, 2)
when_imported("sched", lambda module: setattr(module, "third", 3))
assert sched.third == 3
"""
    run_alone(program, warm_python())


@pytest.mark.extended  # the test of the whole table looks at every change that is undone
def test_undoing_all_leaves_torch_as_it_was() -> None:
    program = """
import torch
to, apply = torch.nn.Module.to, torch.autograd.Function.apply
import globaltensor
from globaltensor._base.patches import undo
assert torch.nn.Module.to is not to
undo()
assert torch.nn.Module.to is to and not hasattr(torch.Tensor, "to_global")
x = torch.ones(2, requires_grad=True)
x.data = torch.zeros(3)
assert x.shape == (3,)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert hasattr(torch.Tensor, "to_global")


def run_alone(program: str, python: str = sys.executable) -> None:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_search_for_a_module_before_its_import_keeps_its_changes() -> None:
    run_alone(
        """
import importlib.util, sys
from globaltensor._base.import_hooks import when_imported
when_imported("sched", lambda module: setattr(module, "changed", True))
assert importlib.util.find_spec("sched") is not None
assert "sched" not in sys.modules
import sched
assert sched.changed
""",
        warm_python(),
    )


def test_a_module_whose_first_import_fails_is_changed_at_the_second(tmp_path: Path) -> None:
    (tmp_path / "fails_once.py").write_text(
        "import builtins\n"
        "builtins.tries = getattr(builtins, 'tries', 0) + 1\n"
        "if builtins.tries == 1:\n"
        "    raise OSError('not yet')\n"
    )
    run_alone(
        f"""
import sys
from globaltensor._base.import_hooks import when_imported
sys.path.insert(0, {str(tmp_path)!r})
changed = []
when_imported("fails_once", changed.append)
try:
    import fails_once
except OSError:
    pass
else:
    raise AssertionError("the first import must fail")
assert not changed
finders = len(sys.meta_path)
import fails_once
assert changed == [fails_once]
assert len(sys.meta_path) == finders - 1
""",
        warm_python(),
    )


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("torch.distributed", "torch.distributed.distributed_c10d"),
        ("torch.distributed.distributed_c10d", "torch.distributed"),
    ],
)
@pytest.mark.sweep(2)
def test_a_collective_that_another_library_replaced_before_is_kept(ours: str, other: str) -> None:
    """One of the two names of a collective is another library's: it must still be called, once."""
    run_alone(f"""
import importlib, torch, torch.distributed
replaced, plain = importlib.import_module({other!r}), importlib.import_module({ours!r})
torchs, calls = plain.all_reduce, []

def all_reduce(tensor, *args, **kwargs):
    calls.append(tensor)
    return plain.all_reduce(tensor, *args, **kwargs)

replaced.all_reduce = all_reduce
import globaltensor
from globaltensor._base import patches

# A process group of one rank.
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
t = torch.ones(2)
replaced.all_reduce(t)
assert len(calls) == 1 and calls[0] is t, calls
assert t.tolist() == [1, 1]
patches.undo()
assert replaced.all_reduce is all_reduce and plain.all_reduce is torchs
torch.distributed.destroy_process_group()  # else torch's threads may abort the process as it ends
""")
