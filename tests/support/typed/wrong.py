"""A user's program with type errors: those of the lines that end in ``# wrong``, and no other."""

# ruff: noqa: B018, F841
from __future__ import annotations

import globaltensor as flow
import globaltensor.nn as nn
import globaltensor.nn.functional as F


class Net(nn.Module):
    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return x


class Step(nn.Graph):
    def build(self, x: flow.Tensor, scale: float) -> flow.Tensor:
        return x * scale


def rank_sum(n: int) -> int:
    return n


def calls() -> None:
    placement = flow.placement.all("cpu")
    x = flow.randn(8, 4, placement=placement, sbp=flow.sbp.split(0))
    flow.randn(8, 4, placement="cpu", sbp=flow.sbp.split(0))  # wrong
    flow.randn(8, 4, placement=placement, spb=flow.sbp.split(0))  # wrong
    flow.randn(8, 4, placement=placement, sbp="split")  # wrong
    flow.zeros_like(x, sbp=0)  # wrong
    flow.sbp.split("rows")  # wrong
    flow.sbp.splt(0)  # wrong
    flow.placement("cpu", rank=[0])  # wrong
    x.to_global(placement=placement, sbp=1)  # wrong
    x.to_global(sbps=flow.sbp.broadcast)  # wrong
    x.to_local(sbp=flow.sbp.broadcast)  # wrong
    x.sbps  # wrong
    flow.to_global(x, placement, 3)  # wrong
    flow.matmull(x, x)  # wrong
    flow.matmul(x)  # wrong
    flow.matmul(x, "w")  # wrong
    flow.save(x)  # wrong
    flow.load("f", global_src_rank="0")  # wrong
    flow.parallelize(x, placement, "fsdp")  # wrong
    flow.parallelize(nn.Linear(2, 2), "cpu", "fsdp")  # wrong
    flow.parallelize(nn.Linear(2, 2), placement)  # wrong
    flow.local_map(3, out_sbp=flow.sbp.broadcast)  # wrong
    flow.local_map(abs)  # wrong
    flow.auto.plan(nn.Linear(2, 2), x, mesh="8")  # wrong
    flow.auto.plan(nn.Linear(2, 2), x, memroy=3)  # wrong
    flow.amp.GradScaler(init_scale="big")  # wrong
    flow.amp.GradScalr()  # wrong
    flow.optim.AdamW(nn.Linear(2, 2).parameters(), rate=0.1)  # wrong
    flow.optim.Adm  # wrong
    flow.distributed.get_rnk()  # wrong
    nn.Linear("four", 4)  # wrong
    nn.Linear(4, 4, bias=True, placement=placement)  # wrong
    nn.Linear(4, 4).to_global(placement, 0)  # wrong
    nn.Linear(4, 4)(3)  # wrong
    nn.Linear(4, 4)(x, x)  # wrong
    nn.Lineer(4, 4)  # wrong
    F.relu(x, inplce=True)  # wrong
    F.cross_entropy(x)  # wrong
    flow.rule(flow.bmm, 3)  # wrong
    flow.linalg.norm(x, orders=2)  # wrong
    flow.fft.ftt(x)  # wrong
    flow.to_global(nn.Linear(2, 2), placement, flow.sbp.broadcast)  # wrong
    Net()(x, x)  # wrong
    Step()(x)  # wrong
    Step()(x, scale="a")  # wrong
    y: int = Net()(x)  # wrong
    flow.run(rank_sum, "3")  # wrong
    flow.run(rank_sum, 3, procs=2)  # wrong
    flow.run(3)  # wrong
    x.max(dim=0).vals  # wrong
    (x @ x).spb  # wrong
