"""Tests of flow.utils.data. Global batches are those of one device on every placement, each rank
reads only its share, and a position in an epoch can be saved."""

from __future__ import annotations

import itertools
from collections import UserDict, namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.pool import run_on
from torch.utils import data

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GlobalTensorError, SbpError, ShapeError
from globaltensor.utils.data import DistributedSampler, GlobalBatches, GlobalDataLoader

S, B = flow.sbp.split, flow.sbp.broadcast
GRIDS: list[tuple[list[Any], list[Any]]] = [
    ([0], [S(0)]),
    ([0, 1, 2], [S(0)]),
    ([0, 1], [B]),
    ([0, 1], [S(1)]),
    ([[0, 1], [2, 3]], [S(0), S(0)]),
    ([[0, 1], [2, 3]], [S(0), B]),
    ([[0, 1], [2, 3]], [B, S(0)]),
    ([[0, 1], [2, 3]], [S(0), S(1)]),
    ([2, 0], [S(0)]),  # rank 1 is outside the placement, and the ranks are not in numeric order
]
Pair = namedtuple("Pair", "rows labels")


class Squares(data.Dataset[Any]):
    """A dataset that records the requested indices."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.asked.append(i)
        return {"x": torch.tensor([i, i * i, 7]), "pair": (float(i), [torch.tensor(i)])}


def flat(batch: dict[str, Any]) -> list[list[Any]]:
    return [t.tolist() for t in (batch["x"], batch["pair"][0], batch["pair"][1][0])]


def one_device(length: int, size: int, shuffle: bool, drop_last: bool, epoch: int) -> list[Any]:
    dataset = Squares(length)
    sampler: Any = data.DistributedSampler(dataset, 1, 0, shuffle, seed=5)
    sampler.set_epoch(epoch)
    return [
        flat(batch)
        for batch in data.DataLoader(dataset, size, sampler=sampler, drop_last=drop_last)
    ]


def every_batch(
    ranks: list[Any],
    sbp: Sequence[Any],
    length: int,
    size: int,
    shuffle: bool,
    drop_last: bool,
    epoch: int,
    check: bool,
) -> tuple[Any, ...]:
    dataset = Squares(length)
    loader = GlobalDataLoader(
        dataset, size, placement=flow.placement("cpu", ranks), sbp=sbp, shuffle=shuffle, seed=5,
        drop_last=drop_last, check_meta=check
    )  # fmt: skip
    loader.set_epoch(epoch)
    got = [flat(batch) for batch in loader]
    assert len(got) == len(loader)
    return got, dataset.asked


@given(
    grid=st.sampled_from(GRIDS),
    length=st.integers(0, 23),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    check=st.booleans(),
)
def test_batches_are_those_of_one_device(
    grid: Any, length: int, size: int, shuffle: bool, drop_last: bool, epoch: int, check: bool
) -> None:
    ranks, sbp = grid
    world = int(torch.tensor(ranks).max()) + 1
    told = simulate(world, every_batch, ranks, sbp, length, size, shuffle, drop_last, epoch, check)
    want = one_device(length, size, shuffle, drop_last, epoch)
    for got, _ in told:
        assert got == want
    read = [i for _, asked in told for i in asked]
    assert sorted(read) == sorted(i for batch in want for i, *_ in batch[0]), (
        "each sample is read once on all ranks together"
    )


def test_a_replica_reads_once_and_augments_alike() -> None:
    def augmented() -> Any:
        torch.manual_seed(flow.env.get_rank())  # each rank draws its own numbers
        dataset = data.TensorDataset(torch.arange(8.0))
        noisy = [(x + torch.rand(()),) for (x,) in dataset]
        loader = GlobalDataLoader(
            noisy, 4, placement=flow.placement("cpu", [[0, 1], [2, 3]]), sbp=[S(0), B]
        )  # type: ignore[arg-type]
        return [batch[0].to_local().tolist() for batch in loader]

    told = simulate(4, augmented)
    assert told[0] == told[1] != told[2] == told[3]


def test_kinds_of_structure() -> None:
    def kinds() -> Any:
        def collate(samples: list[int]) -> Any:
            rows = torch.tensor(samples)
            return UserDict(
                pair=Pair(rows, [rows + 1, (rows + 2,)]),
                names=[f"s{i}" for i in samples],
                none=None,
            )

        loader = GlobalDataLoader(
            range(5), 5, placement=flow.placement("cpu", [0, 1]), sbp=S(0), collate_fn=collate
        )  # type: ignore[arg-type]
        (batch,) = loader
        assert isinstance(batch["pair"], Pair)
        assert batch["none"] is None
        return batch["pair"].rows.tolist(), batch["pair"].labels[1][0].tolist(), batch["names"]

    assert simulate(2, kinds) == [
        ([0, 1, 2, 3, 4], [2, 3, 4, 5, 6], ["s0", "s1", "s2"]),
        ([0, 1, 2, 3, 4], [2, 3, 4, 5, 6], ["s3", "s4"]),
    ]


def test_the_place_in_an_epoch_is_kept_for_any_number_of_ranks() -> None:
    def loader() -> GlobalDataLoader:
        return GlobalDataLoader(
            range(20), 3, placement=flow.placement.all("cpu"), sbp=S(0), shuffle=True, seed=2
        )  # type: ignore[arg-type]

    def begin() -> Any:
        here = loader()
        here.set_epoch(4)
        got = [batch.tolist() for batch in itertools.islice(here, 3)]
        return got, here.state_dict()

    def go_on(state: Any) -> Any:
        here = loader()
        here.load_state_dict(state)
        here.set_epoch(4)  # as a training loop does: the position is kept
        rest = [batch.tolist() for batch in here]
        again = [batch.tolist() for batch in here]
        return rest, again, here.state_dict()["batches"]

    def whole() -> Any:
        here = loader()
        here.set_epoch(4)
        return [batch.tolist() for batch in here]

    (first, state), _ = simulate(2, begin)
    assert state["batches"] == 3
    (want,) = simulate(1, whole)
    for rest, again, batches in simulate(3, go_on, state):
        assert first + rest == want
        assert again == want, "the epoch after it begins at the start"
        assert batches == 7


def test_a_finished_epoch_does_not_begin_again() -> None:
    loader = GlobalDataLoader(range(4), 2, placement=flow.placement("cpu", [0]), sbp=S(0))  # type: ignore[arg-type]
    assert len(list(loader)) == 2
    again = GlobalDataLoader(range(4), 2, placement=flow.placement("cpu", [0]), sbp=S(0))  # type: ignore[arg-type]
    again.load_state_dict(loader.state_dict())
    assert list(again) == []
    again.set_epoch(1)
    assert len(list(again)) == 2


def test_a_state_of_other_batches_is_refused() -> None:
    state = GlobalDataLoader(range(4), 2, placement=flow.placement("cpu", [0])).state_dict()  # type: ignore[arg-type]
    with pytest.raises(GlobalTensorError, match=r"batch_size 2 \(here 3\)"):
        GlobalDataLoader(range(4), 3, placement=flow.placement("cpu", [0])).load_state_dict(state)  # type: ignore[arg-type]


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(
        GlobalTensorError,
        match=r"no state of a loader: it has no epoch, batches, .*seed \(but step\)",
    ):
        GlobalDataLoader(range(4), 2, placement=flow.placement("cpu", [0])).load_state_dict(
            {"step": 3}
        )  # type: ignore[arg-type]


def test_reading_leaves_torchs_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    assert (
        len(list(GlobalDataLoader(range(8), 2, placement=flow.placement("cpu", [0]), shuffle=True)))
        == 4
    )  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), before)


def padded(samples: list[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.ones(i + 1) for i in samples], batch_first=True)


def test_shares_that_do_not_fit_are_told() -> None:
    def read(collate: Any) -> None:
        list(
            GlobalDataLoader(
                range(4), 4, placement=flow.placement("cpu", [0, 1]), sbp=S(0), collate_fn=collate
            )
        )  # type: ignore[arg-type]

    with pytest.raises(
        ShapeError, match=r"rank 0 has float32\[2, 2\], rank 1 float32\[2, 4\].*pad to a length"
    ):
        simulate(2, read, padded)
    with pytest.raises(
        ShapeError, match=r"shape \[3\] of rank 0's 2 samples: dim 0 must count them"
    ):
        simulate(2, read, lambda samples: torch.zeros(3))


def test_what_makes_no_sense_is_told() -> None:
    class Stream(data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    place = flow.placement("cpu", [0])
    with pytest.raises(GlobalTensorError, match="reads by index"):
        GlobalDataLoader(Stream(), 2, placement=place)
    with pytest.raises(GlobalTensorError, match="at least 1, not 0"):
        GlobalDataLoader(range(3), 0, placement=place)  # type: ignore[arg-type]
    with pytest.raises(GlobalTensorError, match="pass one"):
        GlobalDataLoader(
            range(3), 1, placement=place, shuffle=True, sampler=data.SequentialSampler(range(3))
        )  # type: ignore[arg-type]
    with pytest.raises(SbpError, match="partial_sum"):
        GlobalDataLoader(range(3), 1, placement=place, sbp=flow.sbp.partial_sum)  # type: ignore[arg-type]


def test_a_dim_that_no_tensor_has_is_told() -> None:
    """It gave batches that every rank held in full, without a word."""
    rows = data.TensorDataset(torch.zeros(4, 3, 2), torch.zeros(4))

    def read(kind: str, dim: int) -> Any:
        place = flow.placement("cpu", [0, 1])
        if kind == "GlobalDataLoader":
            loader: Any = GlobalDataLoader(rows, 4, placement=place, sbp=S(dim))
        else:
            loader = GlobalBatches(data.DataLoader(rows, 4), place, sbp=S(dim))
        return [tuple(t.sbp for t in batch) for batch in loader]

    for kind in ("GlobalDataLoader", "GlobalBatches"):
        assert simulate(2, read, kind, 2)[0] == [((S(2),), (B,))]
        with pytest.raises(
            SbpError, match=rf"{kind}: sbp .*split\(dim=7\) splits dim 7, but no te"
        ):
            simulate(2, read, kind, 7)


def test_another_sampler_gives_another_order() -> None:
    backwards = data.BatchSampler(range(5, -1, -1), 1, False)
    loader = GlobalDataLoader(
        range(6), 4, placement=flow.placement("cpu", [0]), sampler=[i for [i] in backwards]
    )  # type: ignore[arg-type]
    assert [b.tolist() for b in loader] == [[5, 4, 3, 2], [1, 0]]


def on_processes() -> tuple[Any, ...]:
    """Load with workers, then run a training step on data split over the ranks."""
    torch.manual_seed(0)
    rows, labels = torch.randn(10, 4), torch.randn(10, 1)
    place = flow.placement.all("cpu")
    loader = GlobalDataLoader(
        data.TensorDataset(rows, labels),
        4,
        placement=place,
        sbp=S(0),
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([x.numpy().tolist() for x, _ in loader])
    w = torch.zeros(4, 1).to_global(place, B).requires_grad_()
    for x, y in loader:
        (x @ w - y).square().mean().backward()
    assert w.grad is not None
    return epochs, w.grad.numpy().tolist()


@pytest.mark.filterwarnings("ignore:This process")  # (is multi-threaded, and forks)
def test_workers_and_training_on_processes() -> None:
    alone = on_processes()
    for told in run_on(2, on_processes):
        assert told[0] == alone[0]
        torch.testing.assert_close(torch.tensor(told[1]), torch.tensor(alone[1]))


def shares() -> tuple[int, int, list[int], list[float]]:
    sampler = DistributedSampler(range(9), seed=3)  # type: ignore[arg-type]
    sampler.set_epoch(1)
    loader = flow.utils.data.DataLoader(
        torch.arange(6.0),
        batch_size=3,
        sampler=flow.utils.data.DistributedSampler(torch.arange(6.0), shuffle=False),
    )
    return sampler.num_replicas, sampler.rank, list(sampler), torch.cat(list(loader)).tolist()


def test_distributed_sampler_on_processes() -> None:
    for rank, told in enumerate(run_on(2, shares)):
        torchs: Any = data.DistributedSampler(range(9), 2, rank, seed=3)  # type: ignore[arg-type]
        torchs.set_epoch(1)
        assert told == (2, rank, list(torchs), [float(i) for i in range(rank, 6, 2)])


def test_everything_else_is_torchs() -> None:
    assert flow.utils.data.DataLoader is data.DataLoader
    assert flow.utils.data.random_split is data.random_split
    assert isinstance(DistributedSampler(range(3)), data.DistributedSampler)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid rank 4"):
        DistributedSampler(range(3), 2, 4)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu() -> None:
    rows = torch.randn(64, 3)
    place = flow.placement("cuda", [0])
    loader = GlobalDataLoader(
        data.TensorDataset(rows, torch.arange(64)), 10, placement=place, sbp=S(0), num_workers=1
    )
    got = [(x.to_local(), y.to_local()) for x, y in loader]
    assert {t.device.type for pair in got for t in pair} == {"cuda"}
    assert torch.equal(torch.cat([x for x, _ in got]).cpu(), rows)
    assert torch.equal(torch.cat([y for _, y in got]).cpu(), torch.arange(64))


def test_a_loader_without_a_batch_size_names_the_other_way() -> None:
    rows = data.TensorDataset(torch.ones(4))
    for size in (None, 0, 2.5):
        with pytest.raises(GlobalTensorError, match=r"not .*GlobalBatches\(loader, placement\)"):
            GlobalDataLoader(rows, size)  # type: ignore[arg-type]
