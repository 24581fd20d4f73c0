"""Tests of the table that says what kind of entry answers each torch function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from globaltensor.__main__ import main
from globaltensor._base import torch_private
from globaltensor._ops.op_table import KINDS, kind_of_function, op_table


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (torch.add, "rule"),
        (torch.Tensor.__getitem__, "rule"),
        (F.linear, "rule"),
        (torch.zeros_like, "creation"),
        (torch.Tensor.uniform_, "random"),
        (torch.Tensor.detach, "method"),
        (torch.Tensor.is_cuda.__get__, "method"),
        (torch.Tensor.backward, "backward"),
        (torch._foreach_add, "list of tensors"),
        (torch_private.dual_functions()[0], "refused"),
        (torch.Tensor.sbp.__get__, "method"),  # type: ignore[attr-defined]
        (torch.to_dlpack, "patch"),
        (torch.Tensor.__contains__, "body"),
        (F.soft_margin_loss, "rule"),
    ],
)
def test_kinds(function: object, kind: str) -> None:
    assert kind_of_function(function)[0] == kind  # type: ignore[arg-type]


def test_every_function_has_one_entry() -> None:
    names = [entry.function for entry in op_table()]
    assert len(names) == len(set(names)) > 1000
    assert {entry.kind for entry in op_table()} <= set(KINDS)


def test_names_that_this_library_adds_are_no_functions_of_torch() -> None:
    names = {entry.function for entry in op_table()}
    assert "torch.Tensor.is_cuda.__get__" in names
    assert not any(name.split(".")[2:3] == ["sbp"] for name in names)
    assert "torch.Tensor.to_global" not in names


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "nn.functional.linear"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["torch.nn.functional.linear", "rule", "linear"]
    assert main(["ops", "no_such_function"]) == 1
    assert "no function of torch matches" in capsys.readouterr().err
    assert main(["doctor", "--patches"]) == 0
    assert "torch.nn:Module.to_global" in capsys.readouterr().out
