"""A user's program without a type error: each part of the interface in a function that runs.

Type checkers read it under their strict settings, and a test runs it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch

import globaltensor as flow
import globaltensor.nn as nn
import globaltensor.nn.functional as F
import globaltensor.nn.init as init
from globaltensor.nn.utils import clip_grad_norm_
from globaltensor.utils.data import DataLoader, GlobalDataLoader, TensorDataset

everyone = flow.placement.all("cpu")


def readme() -> None:
    x = flow.randn(8, 4, placement=everyone, sbp=flow.sbp.split(0))
    w = flow.randn(4, 3, placement=everyone, sbp=flow.sbp.broadcast, requires_grad=True)
    y = flow.matmul(x, w)
    flow.visualize_sharding(y, file=io.StringIO())
    y.square().mean().backward()
    assert w.grad is not None
    print(y.sbp, w.grad.sbp, y.spec, y.placement.axes)


def losses(plan: str | Sequence[str] | None) -> flow.Tensor:
    flow.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).double()
    inputs, targets = flow.randn(6, 16, 8).double(), flow.randint(4, (6, 16))
    if plan is not None:
        model = flow.parallelize(model, everyone, plan, inputs=inputs[0])
    optimizer = flow.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[float] = []
    for x, t in zip(inputs, targets, strict=True):
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return flow.tensor(found, dtype=flow.float64)


def readme_plans() -> None:
    alone = losses(None)
    for plan in ("data", "fsdp", ["data"]):
        flow.testing.assert_close(losses(plan), alone)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    found = flow.auto.plan(model, flow.empty(4, 8), "dgx-h100", mesh=(2,))
    print(found.report(), found.explain("0.weight"))


def quickstart() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3))
    flow.parallelize(model, everyone, "fsdp")
    print(model[0].weight.sbp)
    optimizer = flow.optim.AdamW(model.parameters(), lr=0.01)
    rows = flow.randn(64, 6, placement=everyone, sbp=flow.sbp.split(0))
    labels = rows[:, :3].argmax(1)
    for step in range(3):
        loss = F.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
    file = io.BytesIO()
    flow.save({"model": model.state_dict()}, file, global_dst_rank=0)
    file.seek(0)
    loaded = flow.load(file, global_src_rank=0)
    model.load_state_dict(loaded["model"])


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(flow.ones(width))
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.heads = heads

    def forward(self, x: flow.Tensor, mask: flow.Tensor | None = None) -> flow.Tensor:
        batch, time, width = x.shape
        q, k, v = self.project(self.norm(x)).view(batch, time, 3, self.heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
        )
        out = mixed.transpose(1, 2).reshape(batch, time, width) * self.scale
        for layer in self.layers:
            out = F.relu(layer(out))
        return self.out(out) + x


class Training(nn.Graph):
    def __init__(self, model: Block, optimizer: flow.optim.Optimizer) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, x: flow.Tensor, target: flow.Tensor) -> flow.Tensor:
        loss = F.mse_loss(self.model(x), target)
        loss.backward()
        return loss


def graph() -> None:
    block = Block(8).to_global(everyone, flow.sbp.broadcast)
    block.to_global(everyone, {"*.weight": flow.sbp.broadcast, "*": flow.sbp.broadcast})
    block.to_global(everyone, lambda path, tensor: flow.sbp.broadcast)
    training = Training(block, flow.optim.SGD(block.parameters(), lr=0.1, momentum=0.9))
    tokens = flow.rand(2, 4, 8, placement=everyone, sbp=[flow.sbp.split(0)])
    for _ in range(2):
        value: float = training(tokens, flow.zeros_like(tokens)).item()
        print(value)
    hidden: flow.Tensor = block(tokens, mask=None)
    print(hidden.sbp, block.to_local().out.weight)


def layouts() -> None:
    square = flow.placement("cpu", [[0]])
    x = flow.randn(4, 6, placement=everyone, sbp=flow.sbp.split(0))
    moved = x.to_global(square, [flow.sbp.split(0), flow.sbp.broadcast]).to_local()
    plain = flow.to_global(flow.randn(3), placement=everyone, sbp=flow.sbp.broadcast)
    nested = flow.to_global({"a": flow.ones(2)}, everyone, flow.sbp.broadcast)
    print(moved.is_local, nested["a"].sbp, plain.sum().sbp, (plain @ plain + 1 - 2 * plain).sbp)
    best = x.max(dim=1)
    print(best.values.sbp, best.indices.sbp, x.topk(2).values.sbp, flow.max(x, 0).values.sbp)
    hidden = x / x.norm()
    hidden += 1
    hidden = flow.cat([hidden, -hidden]).softmax(-1)
    if isinstance(hidden, flow.GlobalTensor):
        print(hidden.placement)
    first, second = hidden.split(4)
    pieces = flow.split(x, 2), flow.chunk(x, 2), flow.stack([x, x]), flow.where(x > 0, x, 0)
    print(first.sbp, second.sbp, pieces[1][0].sbp, pieces[3].sbp, x[None, ..., 0].T)
    for row in x:
        print(row.sbp, x.cpu().numpy(), x.tolist(), float(x.sum()), bool((x > 0).all()))
    values, indices = flow.sort(x)
    mean, std = x.mean(0, keepdim=True), x.std(dim=0)
    print(values.sbp, indices.sbp, mean.sbp, std.sbp, flow.einsum("ij,ij->i", x, x).sbp)
    print(flow.explain_boxing(x, x.to_global(sbp=flow.sbp.broadcast)), flow.current_cluster())
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = flow.autograd.grad(leaf.square().sum(), leaf)
    print(flow.linalg.norm(x).sbp, flow.fft.fft(x, dim=1).sbp, flow.special.expit(x).sbp)
    print(flow.linalg.eigh(x.T @ x).eigenvalues, flow.linalg.vector_norm(x, ord=2).item())
    print(gradient, flow.float32, flow.cuda.is_available(), flow.__version__)


class Layers(nn.Module):
    mean: flow.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", flow.zeros(3))
        self.embed = nn.Embedding(10, 4)
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.attention = nn.MultiheadAttention(4, 2)
        self.dropout = nn.Dropout(0.1)
        self.batch_norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.rnn = nn.LSTM(4, 4)

    def forward(self, ids: flow.Tensor, image: flow.Tensor) -> tuple[flow.Tensor, flow.Tensor]:
        hidden = self.dropout(self.embed(ids))
        mixed, weights = self.attention(hidden, hidden, hidden)
        if weights is not None:
            mixed = mixed + weights.mean()
        output, (h, _) = self.rnn(mixed)
        features = self.pool(self.batch_norm(self.conv(image)))
        return self.parts["a"](output + h) - self.mean.sum(), features.flatten(1)


def modules() -> None:
    model = Layers().train().eval().to(flow.float64).requires_grad_(False)
    flow.parallelize(model, everyone, {"*": flow.sbp.broadcast})
    left, right = model(flow.randint(0, 10, (3,)), image=flow.rand(1, 3, 8, 8).double())
    for name, parameter in model.named_parameters():
        print(name, parameter.sbp, parameter.data.shape, parameter.grad)
    for key, tensor in model.state_dict().items():
        print(key, tensor)
    print(sum(p.numel() for p in model.parameters()), left, right, model.conv.bias)
    print(
        model.embed.weight.to_global(sbp=flow.sbp.broadcast), [m.training for m in model.modules()]
    )
    flow.check_replicas(model)
    init.zeros_(model.conv.weight)


@flow.no_grad()
def evaluate(model: Block, x: flow.Tensor) -> flow.Tensor:
    return model(x)


def training_tools() -> None:
    block = flow.parallelize(Block(8), everyone, "data")
    optimizer = flow.optim.LAMB(block.parameters(), lr=1e-3)
    schedule = flow.optim.lr_scheduler.WarmupLR(flow.optim.lr_scheduler.StepLR(optimizer, 10))
    scaler = flow.amp.GradScaler("cpu")
    tokens = flow.rand(2, 4, 8, placement=everyone, sbp=flow.sbp.split(0))
    with flow.no_sync(), flow.boxing_log() as log:
        with flow.autocast("cpu", dtype=flow.bfloat16):
            loss = block(tokens).square().mean()
        scaler.scale(loss).backward()
    clip_grad_norm_(block.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    print(log, evaluate(block, tokens).sbp)
    with flow.utils.global_view.global_mode(True, placement=everyone, sbp=flow.sbp.broadcast):
        print(flow.ones(3).sbp)


def double(t: flow.Tensor) -> flow.Tensor:
    return t * 2


def functions() -> None:
    rows = flow.ones(4, 2, placement=everyone, sbp=flow.sbp.split(0))
    doubled = flow.local_map(double, out_sbp=flow.sbp.split(0), in_sbp=flow.sbp.split(0))(rows)
    print(doubled.sbp)
    flow.rule(flow.chain_matmul, "m k, k n -> m n", linear=[[0], [1]])


def rank_sum(n: int, scale: float = 1.0) -> float:
    return n * scale + flow.distributed.get_rank() + flow.env.get_world_size()


def processes() -> None:
    totals: list[float] = flow.run(rank_sum, 3, nprocs=1)
    print(totals)


def data() -> None:
    pairs = TensorDataset(flow.randn(8, 4), flow.randn(8))
    for features, wanted in DataLoader(pairs, batch_size=2):
        print(features, wanted)
    print(len(GlobalDataLoader(pairs, placement=everyone, batch_size=4)))
    total = flow.ones(2)
    flow.distributed.all_reduce(total)
    flow.comm.all_reduce(total)
    flow.distributed.barrier()


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc.forward(x))


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).sum()
    return loss


def with_torchs_names() -> None:
    """Use torch's functions, whose results are of torch's types for a checker."""
    layout = {"*.weight": flow.sbp.split(0), "*": flow.sbp.broadcast}
    model: Plain = flow.parallelize(Plain(), everyone, layout)
    x = flow.randn(8, 4, placement=everyone, sbp=flow.sbp.split(0))
    print(flow.to_global(loss_of(model, x)).sbp)
    y = torch.matmul(x, x.T)
    assert isinstance(y, flow.GlobalTensor)
    print(y.sbp, y.to_global(sbp=flow.sbp.broadcast).to_local())


def main() -> None:
    readme()
    readme_plans()
    quickstart()
    graph()
    layouts()
    modules()
    training_tools()
    functions()
    processes()
    data()
    with_torchs_names()


if __name__ == "__main__":
    main()
