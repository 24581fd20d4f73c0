"""A user's program with type errors: those that its comments ignore, and no other."""

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
    flow.randn(8, 4, placement="cpu", sbp=flow.sbp.split(0))  # type: ignore[call-overload]
    flow.randn(8, 4, placement=placement, spb=flow.sbp.split(0))  # type: ignore[call-overload]
    flow.randn(8, 4, placement=placement, sbp="split")  # type: ignore[arg-type]
    flow.zeros_like(x, sbp=0)  # type: ignore[arg-type]
    flow.sbp.split("rows")  # type: ignore[arg-type]
    flow.sbp.splt(0)  # type: ignore[attr-defined]
    flow.placement("cpu", rank=[0])  # type: ignore[call-arg]
    x.to_global(placement=placement, sbp=1)  # type: ignore[arg-type]
    x.to_global(sbps=flow.sbp.broadcast)  # type: ignore[call-arg]
    x.to_local(sbp=flow.sbp.broadcast)  # type: ignore[call-arg]
    x.sbps  # type: ignore[attr-defined]
    flow.to_global(x, placement, 3)  # type: ignore[call-overload]
    flow.matmull(x, x)  # type: ignore[attr-defined]
    flow.matmul(x)  # type: ignore[call-arg]
    flow.matmul(x, "w")  # type: ignore[arg-type]
    flow.save(x)  # type: ignore[call-arg]
    flow.load("f", global_src_rank="0")  # type: ignore[arg-type]
    flow.parallelize(x, placement, "fsdp")  # type: ignore[type-var]
    flow.parallelize(nn.Linear(2, 2), "cpu", "fsdp")  # type: ignore[arg-type]
    flow.parallelize(nn.Linear(2, 2), placement)  # type: ignore[call-arg]
    flow.local_map(3, out_sbp=flow.sbp.broadcast)  # type: ignore[arg-type]
    flow.local_map(abs)  # type: ignore[call-arg]
    flow.auto.plan(nn.Linear(2, 2), x, mesh="8")  # type: ignore[arg-type]
    flow.auto.plan(nn.Linear(2, 2), x, memroy=3)  # type: ignore[call-arg]
    flow.amp.GradScaler(init_scale="big")  # type: ignore[arg-type]
    flow.amp.GradScalr()  # type: ignore[attr-defined]
    flow.optim.AdamW(nn.Linear(2, 2).parameters(), rate=0.1)  # type: ignore[call-arg]
    flow.optim.Adm  # type: ignore[attr-defined]
    flow.distributed.get_rnk()  # type: ignore[attr-defined]
    nn.Linear("four", 4)  # type: ignore[arg-type]
    nn.Linear(4, 4, bias=True, placement=placement)  # type: ignore[call-arg]
    nn.Linear(4, 4).to_global(placement, 0)  # type: ignore[arg-type]
    nn.Linear(4, 4)(3)  # type: ignore[arg-type]
    nn.Linear(4, 4)(x, x)  # type: ignore[call-arg]
    nn.Lineer(4, 4)  # type: ignore[attr-defined]
    F.relu(x, inplce=True)  # type: ignore[call-arg]
    F.cross_entropy(x)  # type: ignore[call-arg]
    flow.rule(flow.bmm, 3)  # type: ignore[call-overload]
    flow.linalg.norm(x, orders=2)  # type: ignore[call-arg]
    flow.fft.ftt(x)  # type: ignore[attr-defined]
    flow.to_global(nn.Linear(2, 2), placement, flow.sbp.broadcast)  # type: ignore[call-overload]
    Net()(x, x)  # type: ignore[call-arg]
    Step()(x)  # type: ignore[call-arg]
    Step()(x, scale="a")  # type: ignore[arg-type]
    y: int = Net()(x)  # type: ignore[assignment]
    flow.run(rank_sum, "3")  # type: ignore[arg-type]
    flow.run(rank_sum, 3, procs=2)  # type: ignore[call-arg]
    flow.run(3)  # type: ignore[arg-type]
    x.max(dim=0).vals  # type: ignore[attr-defined]
    (x @ x).spb  # type: ignore[attr-defined]
