"""Tests of the fine-tuning example: the loss falls, and transformers reads the weights back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.program import LAUNCH, run

transformers = pytest.importorskip("transformers", reason="needs globaltensor[hf]")

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "finetune_hf.py")


def losses(*options: str) -> tuple[float, float]:
    code, out = run(
        [
            *LAUNCH,
            "--nproc_per_node",
            "2",
            EXAMPLE,
            "--steps",
            "8",
            "--batch",
            "3",
            "--context",
            "15",
            *options,
        ],
        seconds=240,
    )
    assert code == 0, out
    found = re.search(r"loss ([\d.]+) -> ([\d.]+)", out)
    assert found is not None, out
    return float(found[1]), float(found[2])


def test_transformers_reads_the_result(tmp_path: Path) -> None:
    first, last = losses("--parallel", "fsdp", "--out", str(tmp_path / "model"))
    assert last < first - 0.2
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.extended
def test_the_result_goes_on(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    first, _ = losses("--parallel", "fsdp", "--out", folder)
    again, _ = losses("--parallel", "data", "--model", folder)
    assert again < first - 0.2
