"""Tests that Hugging Face's Trainer trains a model of global tensors as one device does."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pool import run_on

import globaltensor as flow
from globaltensor.errors import ShapeError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS, STEPS = 4, 4  # rows of one rank, and steps
PLANS = "fsdp", "tensor"


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=8,
            intermediate_size=16, vocab_size=32, max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    ).double()  # fmt: skip


def examples(masked: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return texts of 4 to 9 tokens, without a label for some tokens."""
    random = torch.Generator().manual_seed(2)
    found = []
    for i in range(2 * ROWS * STEPS):
        ids = torch.randint(1, 32, (4 + i % 6,), generator=random)
        labels = torch.where(torch.arange(len(ids)) < i % 3, -100, ids)
        mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
        found.append({"input_ids": ids, "labels": labels, **mask})
    return found


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    padding = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in rows], batch_first=True, padding_value=padding[name]
        )
        for name in rows[0]
    }


def trainer(of: Any, folder: str, data: Any, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    return InOrder(
        of,
        TrainingArguments(
            folder, per_device_train_batch_size=ROWS, per_device_eval_batch_size=ROWS,
            num_train_epochs=1, logging_steps=1, save_steps=2, use_cpu=True, report_to=[],
            disable_tqdm=True, learning_rate=0.01, lr_scheduler_type="constant", **options,
        ),
        train_dataset=data,
        eval_dataset=data[: 3 * ROWS],
        data_collator=collated,
    )  # fmt: skip


def one_device(rows_of_a_step: int) -> tuple[list[float], list[float], Any]:
    """Return losses, norms of gradients and the model of a training loop on one device."""
    plain, data = model(), examples()
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01, weight_decay=0.0)
    losses, norms = [], []
    for at in range(0, len(data), rows_of_a_step):
        loss = plain(**collated(data[at : at + rows_of_a_step])).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, plain


def whole(t: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(t.detach().numpy())


def same_weights(got: Any, want: Any) -> None:
    for (name, p), (_, q) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        torch.testing.assert_close(
            whole(p), q.detach(), rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def trained(folder: str, plan: str, accumulated: int) -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    losses, norms, plain = one_device(2 * ROWS * accumulated)
    placement = flow.placement.all("cpu")
    try:
        ours = flow.parallelize(model(), placement, plan)
        options = {"gradient_accumulation_steps": accumulated, "optim": "adamw_torch"}
        training = trainer(ours, folder, examples(), **options)
        training.train()
        logged = [row for row in training.state.log_history if "loss" in row]
        assert [float(row["loss"]) for row in logged] == pytest.approx(losses, rel=1e-5)
        assert [float(row["grad_norm"]) for row in logged] == pytest.approx(norms, rel=1e-5)
        same_weights(ours, plain)

        asked = examples()[:5]  # not a whole number of batches
        found = training.predict(asked)
        batch = collated(asked)
        with torch.no_grad():
            logits = plain(**batch).logits
        assert found.predictions.shape[0] == len(asked)
        for i, row in enumerate(asked):
            n = len(row["input_ids"])
            torch.testing.assert_close(
                torch.from_numpy(found.predictions[i, :n]), logits[i, :n], rtol=1e-5, atol=1e-6
            )

        if accumulated == 1:
            resumed = flow.parallelize(model(), placement, plan)
            trainer(resumed, folder, examples(), **options).train(
                resume_from_checkpoint=f"{folder}/checkpoint-2"
            )
            same_weights(resumed, plain)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@pytest.mark.parametrize(("plan", "accumulated"), [("fsdp", 1), ("tensor", 2), ("data", 1)])
@pytest.mark.sweep(2, kind=lambda plan, accumulated: accumulated)
def test_training_is_that_of_one_device(plan: str, accumulated: int, tmp_path: Path) -> None:
    run_on(2, trained, str(tmp_path), plan, accumulated, timeout=120.0)
    if accumulated == 1:
        from transformers import LlamaForCausalLM

        _, _, plain = one_device(2 * ROWS)
        last = f"{tmp_path}/checkpoint-{STEPS}"
        same_weights(LlamaForCausalLM.from_pretrained(last, dtype=torch.float64), plain)
        state = torch.load(f"{last}/optimizer.pt")["state"]
        # (the Trainer's groups of parameters have another order)
        shapes = sorted(p.shape for p in plain.parameters())
        assert sorted(each["exp_avg"].shape for each in state.values()) == shapes
    shutil.rmtree(tmp_path)


def of_other_lengths(folder: str) -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        ours = flow.parallelize(model(), flow.placement.all("cpu"), "fsdp")
        with pytest.raises(
            ShapeError, match=r"rows of different shapes for 'input_ids'.*max_length"
        ):
            trainer(ours, folder, examples(masked=False)).train()
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def test_rows_without_a_mask_are_not_padded(tmp_path: Path) -> None:
    run_on(2, of_other_lengths, str(tmp_path), timeout=120.0)


def test_a_model_of_plain_tensors_trains_as_before(tmp_path: Path) -> None:
    losses, _, plain = one_device(ROWS)
    training = trainer(copy.deepcopy(model()), str(tmp_path), examples(), optim="adamw_torch")
    training.train()
    logged = [row["loss"] for row in training.state.log_history if "loss" in row]
    assert list(map(float, logged)) == pytest.approx(losses, rel=1e-5)
    same_weights(training.model, plain)
