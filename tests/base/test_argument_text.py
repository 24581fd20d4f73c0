"""Tests of the text of arguments, by which ranks compare calls."""

from __future__ import annotations

import numpy as np
import torch

from globaltensor._base.argument_text import argument_text


def test_the_text_of_equal_arguments_is_equal() -> None:
    texts = {argument_text(v) for v in (1, 1.0, True, np.float32(1), torch.tensor(1.0), 1 + 0j)}
    assert texts == {"1"}
    assert argument_text(-0.0) != argument_text(0.0)
    assert argument_text([1, 2]) == argument_text(torch.Size((1, 2))) == "(1, 2)"
    assert argument_text({"b": None, "a": torch.float32}) == "{a: torch.float32, b: None}"
    assert argument_text(torch.Generator()) == "Generator"
    assert argument_text([float("nan"), float("inf")]) == "(nan, inf)"


def test_long_lists_of_numbers_have_a_text() -> None:
    assert argument_text([0] * 100) == repr([0] * 100)
    assert argument_text([0.5] * 99 + [1.5]) != argument_text([0.5] * 100)
