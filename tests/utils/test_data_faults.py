"""Tests of data that is wrong on one rank alone. All ranks end, no rank waits for its time limit,
and that rank's error is reported first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched import Launched, end, nobody_left, write_script

TRAINING = """
import torch, torch.nn as nn, torch.nn.functional as F
import globaltensor as flow

what, wrong_rank, plan, reduction, workers = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
everyone = flow.placement.all("cpu")
torch.manual_seed(0)
model = flow.parallelize(nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(32, 10)), everyone, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        wrong = rank == wrong_rank and i == 21
        if what == "sample" and wrong:
            raise OSError("sample 21 cannot be read")
        return torch.tensor([i % 10, 99 if what == "token" and wrong else 1, 2, 3]), torch.tensor(99 if what == "target" and wrong else i % 10)

for epoch in range(1000):
    for x, y in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=workers):
        x, y = (t.to_global(everyone, flow.sbp.split(0)) for t in (x, y))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).mean().backward()
        optimizer.step()
"""  # noqa: E501
# time for all ranks to import torch and to end; ranks wait for each other four times as long
SECONDS = 150.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says", "shared"),
    [
        (("target", 1, "data", "mean", 0), "IndexError: Target 99 is out of bounds", "1"),
        (("target", 0, "fsdp", "none", 0), "IndexError: Target 99 is out of bounds", "0"),
        (("token", 1, "tensor", "mean", 0), "IndexError: index out of range in self", "1"),
        (("sample", 1, "fsdp", "mean", 1), "OSError: sample 21 cannot be read", "0"),
    ],
    ids=["target", "target over gloo", "token", "sample of a worker over gloo"],
)
@pytest.mark.sweep(4)
def test_wrong_data_on_one_rank_ends_all(
    arguments: tuple[object, ...], says: str, shared: str, folder: Path
) -> None:
    script = write_script(folder, TRAINING)
    with Launched(
        folder,
        "--nproc_per_node",
        2,
        script,
        *arguments,
        warm=True,
        GLOBALTENSOR_SHARED_MEMORY=shared,
    ) as started:
        assert started.code(SECONDS) == 1
        summary = started.err[started.err.index("globaltensor.launch: rank") :]
        assert (
            f"globaltensor.launch: rank {arguments[1]} (local rank {arguments[1]}"
            in summary.splitlines()[0]
        )
        assert f"| {says}" in summary
        assert nobody_left(folder)
