"""Tests of the reference document 000: its data-parallel script, started as the document says, on
gloo and on mpi.

The document's collectives are tested in test_distributed_api.py, its global tensors in
test_seed_global.py, its launcher in test_launcher.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.mpi import mpirun, needs_mpi
from support.program import LAUNCH, run

# The document's script, with its lost brackets and line ends restored. It uses "cuda" if there is
# one GPU for each rank.
SCRIPT = """
import globaltensor as flow
from globaltensor.nn.parallel import DistributedDataParallel as ddp

DEVICE = "cuda" if flow.cuda.device_count() >= 2 else "cpu"

train_x = [
    flow.tensor([[1, 2], [2, 3]], dtype=flow.float32),
    flow.tensor([[4, 6], [3, 1]], dtype=flow.float32),
]
train_y = [
    flow.tensor([[8], [13]], dtype=flow.float32),
    flow.tensor([[26], [9]], dtype=flow.float32),
]

class Model(flow.nn.Module):
    def __init__(self):
        super().__init__()
        self.lr = 0.01
        self.iter_count = 500
        self.w = flow.nn.Parameter(flow.tensor([[0], [0]], dtype=flow.float32))

    def forward(self, x):
        x = flow.matmul(x, self.w)
        return x

m = Model().to(DEVICE)
m = ddp(m)
loss = flow.nn.MSELoss(reduction="sum")
optimizer = flow.optim.SGD(m.parameters(), m.lr)

for i in range(0, m.iter_count):
    rank = flow.env.get_rank()
    x = train_x[rank].to(DEVICE)
    y = train_y[rank].to(DEVICE)

    y_pred = m(x)
    l = loss(y_pred, y)
    if (i + 1) % 50 == 0:
        print(f"{i+1}/{m.iter_count} loss:{l}")

    optimizer.zero_grad()
    l.backward()
    optimizer.step()

print(f"\\nw:{m.w.flatten().tolist()}")
"""
# The purpose of the document's state dict: a model without the wrapper loads the state of one that
# was trained with it.
AFTER = """
plain = Model()
plain.load_state_dict({k: v.cpu() for k, v in m.state_dict().items()})
assert list(m.state_dict()) == ["w"] and flow.allclose(plain.w, flow.tensor([[2.0], [3.0]]), atol=1e-2), plain.w
import pathlib
pathlib.Path(f"right.{flow.env.get_rank()}").write_text(flow.distributed.get_backend())
"""  # noqa: E501


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=needs_mpi)])
@pytest.mark.sweep(2)
def test_its_data_parallel_script(backend: str, tmp_path: Path) -> None:
    (tmp_path / "ddp_train.py").write_text(SCRIPT + AFTER)
    start = mpirun(2, sys.executable) if backend == "mpi" else [*LAUNCH, "--nproc_per_node", "2"]
    code, out = run([*start, "./ddp_train.py"], folder=tmp_path)
    assert code == 0, out
    assert [(tmp_path / f"right.{rank}").read_text() for rank in range(2)] == [backend] * 2
    assert "500/500 loss:" in out
