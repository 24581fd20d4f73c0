"""Tests of loaders whose ranks would read other rows than on one device. Each ends with one error
on every rank, and so do batches of different structures and options that cannot be passed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch.utils import data

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import DivergenceError, GlobalTensorError, ShapeError
from globaltensor.utils.data import DistributedSampler, GlobalBatches, GlobalDataLoader

S, B = flow.sbp.split, flow.sbp.broadcast


def failure(action: Callable[[], Any]) -> str:
    """Return the class and the text of the error that ``action`` raises on this rank."""
    try:
        action()
    except GlobalTensorError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def one_error(texts: list[str], *parts: str) -> bool:
    return all(t == texts[0] and all(part in t for part in parts) for t in texts)


def loader_of(length: int = 16, **options: Any) -> GlobalDataLoader:
    rows = torch.arange(float(length))
    return GlobalDataLoader(
        data.TensorDataset(rows), 4, placement=flow.placement.all("cpu"), sbp=S(0), **options
    )


def read_other_rows(how: str, check_meta: bool) -> str:
    rank = flow.env.get_rank()
    options: dict[str, Any] = {"check_meta": check_meta}
    if how == "seed":
        options |= {"shuffle": True, "seed": rank}
    elif how == "epoch":
        options |= {"shuffle": True}
    elif how == "sampler":
        generator = torch.Generator().manual_seed(rank)
        options |= {"sampler": data.RandomSampler(range(16), generator=generator)}
    elif how == "length":
        options |= {"drop_last": True}
    loader = loader_of(16 + (how == "length" and rank), **options)
    if how == "epoch":
        loader.set_epoch(rank)
    if how == "position" and rank == 1:
        loader.load_state_dict(loader.state_dict() | {"batches": 1})
    return failure(lambda: list(loader))


@pytest.mark.parametrize("check_meta", [True, False])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("seed", "seed is 1 on rank 1, 0 on rank 0"),
        ("epoch", "epoch is 1 on rank 1, 0 on rank 0"),
        ("sampler", "the order of the samples is ["),
        ("length", "the length of the dataset is 17 on rank 1, 16 on rank 0"),
        ("position", "batches is 3 (12 samples) on rank 1, 4 (16 samples) on rank 0"),
    ],
)
def test_ranks_that_would_read_other_rows_are_told(how: str, says: str, check_meta: bool) -> None:
    texts = run_on(2, read_other_rows, how, check_meta)
    assert one_error(texts, "DivergenceError: GlobalDataLoader: rank 1 would read other", says)


def split_of(rows: Any) -> data.Dataset[Any]:
    """Split the rows as a script does that sets no seed: other rows on each rank."""
    generator = torch.Generator().manual_seed(flow.env.get_rank())
    return data.random_split(rows, [12, 4], generator)[0]


SUBSETS: dict[str, Callable[[Any], Any]] = {
    "random_split": split_of,
    "nested": lambda rows: data.Subset(split_of(rows), range(8)),
    "concatenated": lambda rows: data.ConcatDataset([rows, split_of(rows)]),
    "stacked": lambda rows: data.StackDataset(split_of(rows), split_of(rows)),
    "one rank": lambda rows: data.Subset(rows, range(16)) if flow.env.get_rank() else rows,
    "tensor": lambda rows: data.Subset(rows, torch.arange(8) + flow.env.get_rank()),
}


def read_other_subsets(how: str, own: bool) -> str:
    """Read a split of the rows, with GlobalDataLoader or with GlobalBatches (``own``)."""
    rows, where = SUBSETS[how](data.TensorDataset(torch.arange(16.0))), flow.placement.all("cpu")
    if not own:
        return failure(lambda: list(GlobalDataLoader(rows, 4, placement=where, sbp=S(0))))
    loader = data.DataLoader(rows, 2, sampler=DistributedSampler(rows, drop_last=True))
    return failure(lambda: list(GlobalBatches(loader, where)))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("how", SUBSETS)
@pytest.mark.sweep(3)
def test_ranks_with_other_subsets_are_told(how: str, own: bool) -> None:
    texts = run_on(2, read_other_subsets, how, own)
    says = "the DistributedSamplers of the ranks divide other rows" if own else "the subset of the"
    assert one_error(texts, "DivergenceError: Global", says, "generator=torch.Generator()")


def sample_otherwise(how: str) -> str:
    """Let ranks pass other settings to a DistributedSampler, or take their rows without one."""
    rank, rows = flow.env.get_rank(), data.TensorDataset(torch.arange(16.0))
    sampler: Any = DistributedSampler(rows, seed=rank if how == "seed" else 0)
    if how == "epoch":
        sampler.set_epoch(rank)
    options: dict[str, Any] = {"batch_size": 4, "sampler": sampler}
    if how == "batch_sampler":
        sampler.set_epoch(rank)
        options = {"batch_sampler": data.BatchSampler(sampler, 4, drop_last=True)}
    if how == "own rows":
        rows, options = data.Subset(rows, range(rank, 16, 2)), {"batch_size": 4}  # type: ignore[assignment]
    loader = data.DataLoader(rows, **options)
    return failure(lambda: list(GlobalBatches(loader, flow.placement.all("cpu"))))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("seed", "seed 0; rank 1 has 16 samples, epoch 0, seed 1"),
        ("epoch", "rank 1 has 16 samples, epoch 1, seed 0"),
        ("batch_sampler", "rank 1 has 16 samples, epoch 1, seed 0"),
        ("own rows", "no error"),
    ],
)
def test_samplers_of_other_settings_are_told(how: str, says: str) -> None:
    assert one_error(run_on(2, sample_otherwise, how), says)


def begin_again(check_meta: bool) -> str:
    loader = loader_of(check_meta=check_meta)
    batches = iter(loader)
    next(batches)
    if flow.env.get_rank() == 1:
        batches = iter(loader)

    def read() -> None:
        (x,) = next(batches)
        x.sum().item()

    return failure(read)


def test_a_rank_that_begins_again_is_told() -> None:
    texts = run_on(2, begin_again, True)
    assert one_error(
        texts, "DivergenceError", "rank 0 reads batch 1 of epoch 0, but rank 1 begins an iteration"
    )
    assert all("DivergenceError" in t for t in run_on(2, begin_again, False))


def batches_begun_again() -> str:
    batches = GlobalBatches([torch.ones(2)] * 3, flow.placement.all("cpu"))
    iterator = iter(batches)
    next(iterator)
    if flow.env.get_rank() == 1:
        iterator = iter(batches)
    return failure(lambda: next(iterator))


def test_a_rank_that_begins_its_own_batches_again_is_told() -> None:
    assert one_error(
        run_on(2, batches_begun_again), "DivergenceError", "rank 0 reads batch 1, rank 1 batch 0"
    )


def on_one_loader() -> list[Any]:
    loader, epochs = loader_of(shuffle=True, seed=3), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([x.numpy().tolist() for (x,) in loader])
    rows = data.RandomSampler(range(16), generator=torch.Generator().manual_seed(5))
    epochs.append([x.numpy().tolist() for (x,) in loader_of(sampler=rows)])
    return epochs


def test_ranks_that_read_the_same_order_read_all_rows() -> None:
    alone = on_one_loader()
    assert run_on(2, on_one_loader) == [alone, alone]


def outside(length: int) -> str:
    """Iterate on three ranks, of which rank 2 is outside and has a dataset of its own."""
    rank = flow.env.get_rank()
    rows = torch.zeros(length) if rank == 2 else torch.arange(6.0)
    loader = GlobalDataLoader(
        rows,  # type: ignore[arg-type]
        4,
        placement=flow.placement("cpu", [0, 1]),
        sbp=S(0),
    )
    return failure(lambda: list(loader))


def test_a_rank_outside_needs_as_many_batches() -> None:
    assert simulate(3, outside, 6) == ["no error"] * 3
    assert one_error(simulate(3, outside, 7), "DivergenceError", "batches is 2 (7 samples)")


def batch_of(rank: int, case: str) -> Any:
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    return {
        "keys": [{"a": x}, {"b": x}],
        "order": [{"a": x, "b": y}, {"b": y, "a": x}],
        "containers": [[x, (y,)], ((x,), y)],
        "values": [{"a": x, "b": 3}, {"a": x, "b": 4}],
        "no tensor": [{"a": x, "b": None}, {"a": None, "b": x}],
    }[case][rank]


def batches_of(case: str) -> str:
    batches = GlobalBatches([batch_of(flow.env.get_rank(), case)], flow.placement.all("cpu"))
    return failure(lambda: list(batches))


@pytest.mark.parametrize("case", ["keys", "order", "containers", "no tensor"])
def test_batches_of_different_structures_are_told(case: str) -> None:
    assert one_error(run_on(2, batches_of, case), "batches have different structures")


def test_values_that_are_no_tensors_may_differ() -> None:
    assert run_on(2, batches_of, "values") == ["no error"] * 2


class Shares(data.Dataset[Any]):
    """A dataset of two samples of different structures."""

    def __init__(self, case: str) -> None:
        self.case = case

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Any:
        batch = batch_of(i, self.case)
        return batch


def collate(samples: list[Any]) -> Any:
    def one_row(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[:1]
        if isinstance(value, dict):
            return {k: one_row(v) for k, v in value.items()}
        return type(value)(map(one_row, value)) if isinstance(value, (list, tuple)) else value

    return one_row(samples[0])


@pytest.mark.parametrize("case", ["keys", "order", "containers", "no tensor"])
def test_shares_of_different_structures_are_told(case: str) -> None:
    def read() -> str:
        place = flow.placement.all("cpu")
        loader = GlobalDataLoader(Shares(case), 2, placement=place, sbp=S(0), collate_fn=collate)
        with pytest.raises(ShapeError) as caught:
            list(loader)
        return str(caught.value)

    assert one_error(simulate(2, read), "the shares of a batch have different structures")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"batch_sampler": [[0, 1]]}, "batch_sampler cannot be passed: pass sampler"),
        ({"generator": torch.Generator()}, "generator cannot be passed: pass seed"),
    ],
    ids=["batch_sampler", "generator"],
)
def test_options_that_the_loader_sets_are_told(option: dict[str, Any], says: str) -> None:
    with pytest.raises(GlobalTensorError, match=says):
        loader_of(**option)


def test_divergence_is_told_before_any_row_is_read() -> None:
    asked = []

    class Counted(data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> torch.Tensor:
            asked.append(i)
            return torch.ones(1)

    def read() -> None:
        place, rank = flow.placement.all("cpu"), flow.env.get_rank()
        with pytest.raises(DivergenceError, match="seed"):
            list(GlobalDataLoader(Counted(), 2, placement=place, sbp=S(0), seed=rank))

    simulate(2, read)
    assert not asked
