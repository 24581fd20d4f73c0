"""Tests of `GlobalBatches`: each rank brings its own rows."""

from __future__ import annotations

import pytest
import torch
from support.pool import run_on
from support.refused import refused
from support.rows import line
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import globaltensor as flow
from globaltensor.errors import GlobalTensorError, SbpError, ShapeError
from globaltensor.utils.data import GlobalBatches

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def loaders() -> None:
    rank, size, where = flow.env.get_rank(), flow.env.get_world_size(), line()
    data = TensorDataset(torch.arange(24.0).view(12, 2), torch.arange(12))
    loader = DataLoader(
        data, batch_size=2, sampler=DistributedSampler(data, size, rank, shuffle=False)
    )
    batches = GlobalBatches(loader, where)
    assert len(batches) == len(loader) == 3
    for _ in range(2):  # epochs
        seen = []
        for x, label in batches:
            assert x.sbp == label.sbp == (S(0),)
            assert x.shape == (2 * size, 2)
            seen += label.tolist()
        assert sorted(seen) == list(range(12))
    # Batches may be dicts and contain 0-dim tensors and values that are not tensors.
    one = [
        {"x": torch.full((2, 3), float(rank)), "scale": torch.tensor(2.0), "name": f"rank {rank}"}
    ]
    (batch,) = GlobalBatches(one, where)
    assert batch["x"].tolist() == [[float(r)] * 3 for r in range(size) for _ in range(2)]
    assert batch["scale"].sbp == (B,)
    assert batch["name"] == f"rank {rank}"
    with pytest.raises(
        GlobalTensorError,
        match=r"loader of rank 1 has ended after 1 batches, that of rank 0 has more",
    ):
        list(GlobalBatches([torch.ones(2)] * (2 - rank), where))
    assert len(list(GlobalBatches([torch.ones(2)] * (2 - rank), where, uneven="stop"))) == 1
    with pytest.raises(ShapeError, match="do not form one tensor"):
        list(GlobalBatches([torch.ones(2 + 3 * rank)], where))
    assert next(iter(GlobalBatches([torch.ones(3 - rank)], where))).shape == (5,)
    with pytest.raises(GlobalTensorError, match="numbers of tensors by rank"):
        list(GlobalBatches([(torch.ones(2),) * (1 + rank)], where))
    refused(
        lambda: list(GlobalBatches([torch.full((2,), float(rank))], where, B)), "read the same rows"
    )
    for wrong in ({"uneven": "pad"}, {"sbp": P}):
        with pytest.raises(GlobalTensorError):
            GlobalBatches([], where, **wrong)


def loaders_on_four() -> None:
    rank, square = flow.env.get_rank(), flow.placement("cpu", [[0, 1], [2, 3]])
    with pytest.raises(SbpError, match="give sbp"):
        GlobalBatches([], square)
    (x,) = GlobalBatches([torch.full((2,), float(rank // 2))], square, [S(0), B])
    assert x.tolist() == [0, 0, 1, 1]
    refused(
        lambda: list(GlobalBatches([torch.full((2,), float(rank))], square, [S(0), B])),
        "read the same rows",
    )
    pair = flow.placement("cpu", [0, 2])
    found = list(
        GlobalBatches([torch.full((2,), float(rank))] if rank in (0, 2) else (), pair)
    )  # ranks outside the placement iterate, too
    assert [x.shape for x in found] == [(4,)]


def test_each_rank_brings_its_rows() -> None:
    run_on(2, loaders)
    run_on(4, loaders_on_four)
