"""Tests of capture: build() on one device, on split data and on split models. They also cover
tensors that capture must not save, kernels and memory that it must not use, and errors with their
place.

The first test of a captured graph is that it runs on one device (`Graph.single_device_module`) with
the numbers of plain torch. Then each rank's program must do so.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import operator
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_parallelize import FAMILIES
from test_parallelize import build as family
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import globaltensor as flow
from globaltensor._base import torch_private
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.errors import GraphError

B, S = flow.sbp.broadcast, flow.sbp.split
FILE = __file__.rsplit("/", 1)[-1]


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(x: Any) -> Tensor:
    return (
        x.detach().to_global(sbp=[B] * x.placement.axes).to_local() if x.is_global else x.detach()
    )  # type: ignore[no-any-return]


def same(got: Any, want: Tensor, what: str = "", within: float = 1e-9) -> None:
    torch.testing.assert_close(
        whole(got), want.detach(), rtol=within, atol=within, msg=lambda m: f"{what}: {m}"
    )


def graph_of(
    module: nn.Module, build: Callable[..., Any], *optimizers: torch.optim.Optimizer
) -> flow.nn.Graph:
    class Built(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = module
            for optimizer in optimizers:
                self.add_optimizer(optimizer)

        def build(self, *args: Any, **kwargs: Any) -> Any:
            return build(self.model, *args, **kwargs)

    return Built()


def trained(model: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
    out = model(*inputs, **named)
    loss: Tensor = out.loss if hasattr(out, "loss") else out.square().mean()
    loss.backward()
    return loss


# ------------------------------------------------------------------------------------------- models


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.body, self.head = kind(4, 6, 2, batch_first=True), nn.Linear(6, 1)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])  # type: ignore[no-any-return]


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(
            x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        )  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A small ResNet: convolutions, batch norms with running statistics, in-place activations and
    sums."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2, self.head = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4, momentum=None),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        z = self.norm2(self.conv2(y))
        z += y
        return self.head(F.adaptive_avg_pool2d(F.relu_(z), 1).flatten(1))  # type: ignore[no-any-return]


class Writes(nn.Module):
    """A model with in-place ops, views that are written into, several kinds of buffer updates,
    parts without gradients, and constants."""

    seen: Tensor
    steps: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        y[:, 1] = 1.0
        y[:, 2].mul_(2)
        y.t()[0].add_(1)
        self.seen.mul_(0.9).add_(x.mean(0) * 0.1)
        self.steps += 1
        self.average = 0.5 * self.average + 0.5 * x.detach().mean(0)
        with torch.no_grad():
            self.seen += self.linear.weight.sum(0)
            gate = self.linear(x).softmax(-1)
        mask = torch.tril(torch.ones(4, 4, dtype=torch.bool))
        if not mask.all() and mask[0, 0]:  # known from the code alone
            y = y.masked_fill(~mask[2], 0.5)
        return (
            y * self.seen.detach() * gate
            + torch.full((4,), 3.0) * torch.arange(4)
            + y.new_ones(4)
            + self.average
        )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))  # type: ignore[no-any-return]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
            assert y.dtype is torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                z = self.b(x)
        return y.to(x.dtype) + z


def ids(seed: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 8, (4, 3), generator=torch.Generator().manual_seed(seed)),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "lstm": (lambda: Recurrent(nn.LSTM), lambda seed: (values(4, 5, 4, seed=seed),)),
    "gru": (lambda: Recurrent(nn.GRU), lambda seed: (values(4, 5, 4, seed=seed),)),
    "transformer": (Seq2Seq, lambda seed: (values(4, 5, 8, seed=seed),)),
    "residual": (Residual, lambda seed: (values(4, 3, 6, 6, seed=seed),)),
    "writes": (Writes, lambda seed: (values(4, 4, seed=seed),)),
    "tied": (Tied, ids),
    "mixed": (Mixed, lambda seed: (values(4, 4, seed=seed).float(),)),
}


seeding = threading.Lock()  # simulated ranks share one generator


def made(name: str) -> nn.Module:
    with seeding:
        torch.manual_seed(0)
        model = MODELS[name][0]()
    return model if name == "mixed" else model.double()


def check(
    model: nn.Module,
    plain: nn.Module,
    given: Callable[[Tensor], Tensor],
    batches: list[dict[str, Tensor] | tuple[Tensor, ...]],
    within: float,
) -> None:
    """Train ``model`` in a graph and ``plain`` without. Compare the losses, all states, and the
    captured graph's results on one device."""
    graph = graph_of(model, trained, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    names = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    for step, batch in enumerate(batches):
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
        before = copy.deepcopy(plain)
        optimizer.zero_grad()
        want = trained(plain, *args, **kwargs)
        got = graph(*[given(t) for t in args], **{k: given(t) for k, t in kwargs.items()})
        same(got, want, f"loss of step {step}", within)
        if step == 0:  # the captured graph has the current parameters: restore the first ones
            single = graph.single_device_module()
            state = {**dict(before.named_parameters()), **dict(before.named_buffers())}
            with torch.no_grad():
                for name, t in [*single.named_parameters(), *single.named_buffers()]:
                    if name.startswith("model."):
                        t.copy_(state[name.removeprefix("model.")])
            same(single(*args, *kwargs.values())[0], want, "loss on one device", within)
            theirs = dict(plain.named_parameters())
            for name, p in single.named_parameters():
                wanted = theirs[name.removeprefix("model.")].grad
                got, wanted = (torch.zeros_like(p) if g is None else g for g in (p.grad, wanted))
                same(got, wanted, f"gradient of {name} on one device", within)
            for name, t in single.named_buffers():
                if name.startswith("model."):
                    same(
                        t,
                        plain.get_buffer(name.removeprefix("model.")),
                        f"{name} on one device",
                        within,
                    )
        optimizer.step()
        for (name, t), wanted in zip(
            model.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            same(t, wanted, f"{name} after step {step}", within)
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == names, (
        "parameters and buffers are no longer the same tensors"
    )


@pytest.mark.parametrize("name", MODELS)
def test_models_of_torch_on_one_device(name: str) -> None:
    check(
        made(name),
        made(name),
        lambda t: t,
        [MODELS[name][1](seed) for seed in range(3)],
        1e-6 if name == "mixed" else 1e-10,
    )


def on_ranks(name: str, ranks: Any, plan: str, sbp: list[Any]) -> None:
    placement = flow.placement("cpu", ranks)
    model = flow.parallelize(made(name), placement, plan)
    spread = lambda t: t.to_global(placement, [B] * placement.axes).to_global(sbp=sbp)  # noqa: E731
    check(
        model,
        made(name),
        spread,
        [MODELS[name][1](seed) for seed in range(3)],
        1e-2 if name == "mixed" else 1e-9,
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sweep(4)
def test_models_of_torch_on_split_data(name: str) -> None:
    simulate(2, on_ranks, name, [0, 1], "data", [S(0)], timeout=60.0)


@pytest.mark.parametrize("name", ["transformer", "writes", "tied", "residual"])
@pytest.mark.sweep(2)
def test_models_of_torch_on_a_grid(name: str) -> None:
    simulate(4, on_ranks, name, [[0, 1], [2, 3]], "data", [S(0), B], timeout=60.0)


# --------------------------------------------------------------------------- models of transformers


def batches_of(name: str) -> list[Any]:
    torch.manual_seed(3)
    return [FAMILIES[name][3](4) for _ in range(2)]


@pytest.fixture(autouse=True)
def _one_form_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the form of Mixtral's experts that a graph can capture. The plain form loops over the
    experts that data has hit, which no static graph can. `parallelize` replaces either form by its
    own."""
    model, config, settings, batch = FAMILIES["mixtral"]
    monkeypatch.setitem(
        FAMILIES,
        "mixtral",
        (model, config, {**settings, "experts_implementation": "batched_mm"}, batch),
    )


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sweep(2)
def test_models_of_transformers_on_one_device(name: str) -> None:
    check(family(name), family(name), lambda t: t, batches_of(name), 1e-6)


def family_on_ranks(
    base: nn.Module, batches: list[Any], ranks: Any, plan: Any, sbp: list[Any]
) -> None:
    placement = flow.placement("cpu", ranks)
    model = flow.parallelize(copy.deepcopy(base), placement, plan)
    check(
        model,
        copy.deepcopy(base),
        lambda t: t.to_global(placement, [B] * placement.axes).to_global(sbp=sbp),
        batches,
        1e-5,
    )


@pytest.mark.long
@pytest.mark.parametrize("plan", ["data", "tensor"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sweep(13)
def test_models_of_transformers_on_two_ranks(name: str, plan: str) -> None:
    simulate(
        2,
        family_on_ranks,
        family(name),
        batches_of(name),
        [0, 1],
        plan,
        [S(0) if plan == "data" else B],
        timeout=60.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_transformers_on_a_grid(name: str) -> None:
    simulate(
        4,
        family_on_ranks,
        family(name),
        batches_of(name),
        [[0, 1], [2, 3]],
        "hybrid",
        [S(0), B],
        timeout=90.0,
    )


# ----------------------------------------------------------------------------------- random numbers


def test_random_numbers_are_those_of_the_loop() -> None:
    """Random numbers equal those of the loop. The generator ends in the same state, from the first
    call on."""

    def drawn(model: nn.Module, x: Tensor) -> Any:
        x = (
            F.dropout(model(x), 0.5)
            + torch.rand(4)
            + torch.randn_like(x)
            + torch.empty(4).uniform_()
            + torch.randint(0, 5, (4,))
        )
        return (
            x
            + torch.bernoulli(torch.full((4,), 0.5))
            + torch.randperm(4)
            + torch.normal(0.0, 1.0, (4,))
            + F.gumbel_softmax(x)
            + x.clone().exponential_()
        )

    model, x = nn.Linear(4, 4).double(), values(3, 4)
    graph = graph_of(model, drawn)
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        got, after = graph(x), torch.get_rng_state()
        torch.manual_seed(seed)
        same(got, drawn(model, x))
        assert torch.equal(after, torch.get_rng_state())


def dropout_on_ranks(base: nn.Module) -> None:
    placement = flow.placement("cpu", [0, 1])
    model, x = (
        copy.deepcopy(base).to_global(placement, B),
        values(4, 4).to_global(placement, B).to_global(sbp=S(0)),
    )  # type: ignore[operator]
    graph = graph_of(model, lambda m, x: m(x))
    for seed in range(2):
        outs = []
        for run in (graph, model):
            barrier()
            torch.manual_seed(seed)
            barrier()
            outs.append(whole(run(x)))
        torch.testing.assert_close(outs[0], outs[1])
        assert (outs[0] == 0).any()


def barrier() -> None:
    world().comm((0, 1)).barrier()


def test_dropout_of_global_tensors_is_that_of_the_loop() -> None:
    simulate(
        2, dropout_on_ranks, nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)).double(), timeout=30.0
    )


# ------------------------------------------------------------------------------- inputs and outputs


@dataclasses.dataclass
class Pair:
    x: Tensor
    note: str
    more: list[Any]


Named = namedtuple("Named", "x y")


def test_nests_of_all_kinds_go_in_and_out() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    def nested(model: nn.Module, data: Any) -> Any:
        y = model(data.x) * len(data.more)
        out = BaseModelOutput(y, (y, y * 2))
        return {
            "pair": Pair(y, "out", [y + 1, None]),
            "named": Named(y, (data.more[0], 3)),
            "output": out,
            "none": None,
            "size": y.shape,
        }

    model = nn.Linear(4, 4).double()
    graph = graph_of(model, nested)
    for seed in range(2):
        data = Pair(values(3, 4, seed=seed), "in", [values(2, seed=seed), 1.0])
        got, want = graph(data), nested(model, data)
        assert list(got) == list(want)
        assert (
            got["none"],
            got["size"],
            got["pair"].note,
            got["pair"].more[1],
            got["named"].y[1],
        ) == (None, want["size"], "out", None, 3)
        assert type(got["named"]) is Named
        assert type(got["output"]) is BaseModelOutput
        pairs = [
            (got["pair"].x, want["pair"].x),
            (got["pair"].more[0], want["pair"].more[0]),
            (got["named"].y[0], want["named"].y[0]),
        ]
        for ours, theirs in [
            *pairs,
            (got["output"].hidden_states[1], want["output"].hidden_states[1]),
            (got["output"]["last_hidden_state"], want["pair"].x),
        ]:
            same(ours, theirs)
            assert not ours.requires_grad
    assert graph._captures == 1


# ---------------------------------------------------------------------------- no kernels, no memory


class Allocated(TorchDispatchMode):
    """A mode that counts tensors with memory among the results of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.large: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if (
                isinstance(t, Tensor)
                and not torch_private.is_fake(t)
                and not t.is_meta
                and t.numel() > 64
                and t._base is None
                and "detach" not in str(func)
            ):
                self.large.append(f"{func} {list(t.shape)}")
        return out


@pytest.mark.parametrize("sbp", [B, S(0)])
def test_a_kernel_whose_name_is_that_of_the_function_around_it(sbp: Any) -> None:
    def spectrum(x: Any) -> Any:
        return torch.stft(
            x, 4, window=torch.hann_window(4, dtype=x.dtype), return_complex=True
        ).abs()

    def body() -> None:
        x: Any = values(5, 9)
        given = x.to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=sbp)
        graph = graph_of(nn.Identity(), lambda module, x: spectrum(x))
        same(graph(given), spectrum(x))
        same(graph.single_device_module()(x)[0], spectrum(x))

    simulate(2, body)


@pytest.mark.parametrize(
    "compare", [operator.eq, operator.ne, operator.lt, operator.ge], ids=lambda f: f.__name__
)
def test_a_plain_tensor_compared_with_a_global_one(compare: Callable[..., Any]) -> None:
    """A plain tensor can be compared with a global one. An example is a one-hot mask,
    ``torch.arange(5) == labels[:, None]``."""

    def on_ranks() -> None:
        labels = torch.arange(6) % 5
        mine = labels.to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
        graph = flow.nn.Graph.trace(lambda x: compare(torch.arange(5), x[:, None]))
        assert torch.equal(whole(graph(mine)), compare(torch.arange(5), labels[:, None]))

    simulate(2, on_ranks)


def test_data_of_uneven_parts() -> None:
    """The `.data` of uneven shards can be updated. An example is a soft target update:
    ``t.data.mul_(0.9); t.data.add_(0.1 * p.data)``."""

    def follow(target: Any, source: Any) -> None:
        target.data.mul_(0.5)
        target.data.add_(0.5 * source.data)

    def on_ranks() -> None:
        where = flow.placement("cpu", [0, 1])
        plain = [values(3), values(3, seed=1)]
        target, source = (nn.Parameter(v.to_global(where, B).to_global(sbp=S(0))) for v in plain)  # type: ignore[attr-defined]

        def build(x: Any) -> Any:
            follow(target, source)
            return x * 1

        graph = flow.nn.Graph.trace(build)
        for _ in range(2):
            graph(source.detach())
            follow(*plain)
            same(target, plain[0])
        alone = graph.single_device_module()
        torch.testing.assert_close(alone(values(3))[0], values(3))

    simulate(2, on_ranks)


def test_operands_of_einsum_in_a_list() -> None:
    def on_ranks() -> None:
        x, y = values(4, 6), values(6, 3, seed=1)
        where = flow.placement("cpu", [0, 1])
        mine = [t.to_global(where, B).to_global(sbp=S(0)) for t in (x, y)]  # type: ignore[attr-defined]
        same(flow.nn.Graph.trace(lambda x, y: torch.einsum("bi,ij->bj", (x, y)))(*mine), x @ y)  # type: ignore[call-overload]

    simulate(2, on_ranks)


def test_capture_runs_no_kernel() -> None:
    model, x = (
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        torch.randn(2, 9, 16),
    )
    graph = graph_of(model, trained, torch.optim.SGD(model.parameters(), lr=0.1))
    with Allocated() as allocated, torch.enable_grad():
        graph._compiled_shape_for((x,), {}, 1)
    assert not allocated.large
    with Allocated() as allocated:
        graph(x)
    assert allocated.large, "the count counts nothing"


def test_a_model_larger_than_memory_is_captured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(60_000, 60_000, bias=False) for _ in range(4)])  # 58 GB
    graph = graph_of(model, lambda m, x: m(x).sum())
    assert graph(torch.empty(4, 60_000, device="meta")).is_meta
    assert "linear" in str(graph.program())


# -------------------------------------------------------------------------------- values and errors

K = torch.tensor(3.0)
ASKING: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "item": lambda m, x: x * m.bias[0].item(),
    "float": lambda m, x: x * float(x.mean()),
    "int": lambda m, x: x[:, : int(m.bias[0])],
    "tolist": lambda m, x: x * m.bias.tolist()[0],
    "numpy": lambda m, x: x * torch.from_numpy(m.bias.detach().numpy()),
    "array": lambda m, x: x * torch.tensor(np.asarray(m.bias.detach())),
    "branch": lambda m, x: x if x.mean() > 0 else x * 2,
    "equal": lambda m, x: x if torch.equal(x, x) else x * 2,
    "allclose": lambda m, x: x if torch.allclose(x, x) else x * 2,
    "tensor of tensors": lambda m, x: x * torch.tensor([m.bias[0], m.bias[1], 1.0, 2.0]),
    "constant from outside": lambda m, x: x * K.item(),
    "format": lambda m, x: x * len(f"{x.sum():.3f}"),
    "nonzero": lambda m, x: x.nonzero(),
    "mask": lambda m, x: x[x > 0],
    "unique": lambda m, x: x.unique(),
    "max": lambda m, x: x * max(m.bias),
    "contains": lambda m, x: x * (1.0 in m.bias),
    "range": lambda m, x: torch.arange(int(x.sum())),
    "dlpack": lambda m, x: torch.from_dlpack(m.bias.detach()),
}


@pytest.mark.filterwarnings("ignore:.*__array__")
@pytest.mark.parametrize("what", ASKING)
def test_asking_for_values_names_the_line(what: str) -> None:
    line = ASKING[what].__code__.co_firstlineno
    with pytest.raises(GraphError, match=rf"{FILE}:{line}"):
        graph_of(nn.Linear(4, 4), ASKING[what])(torch.randn(3, 4))


def asked_on_ranks() -> None:
    placement = flow.placement("cpu", [0, 1])
    model, x = (
        nn.Linear(4, 4).to_global(placement, B),
        values(4, 4).float().to_global(placement, B).to_global(sbp=S(0)),
    )
    for what, function in ASKING.items():
        if what not in ("tensor of tensors", "constant from outside"):
            with pytest.raises(GraphError, match=rf"{FILE}:{function.__code__.co_firstlineno}"):
                graph_of(model, function)(x)


@pytest.mark.filterwarnings("ignore:.*__array__")
def test_asking_for_values_of_global_tensors_names_the_line() -> None:
    simulate(2, asked_on_ranks, timeout=60.0)


READ: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "constant from outside": lambda m, x: x * K,
    "data": lambda m, x: x * m.bias.data,
    "elements": lambda m, x: x * sum(v for v in m.bias),
    "stack": lambda m, x: x * torch.stack([m.bias[0]] * 4),
    "list of numbers": lambda m, x: (
        x * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.as_tensor([1, 2, 3, 4])
    ),
    "functional_call": lambda m, x: torch.func.functional_call(
        m.to(nn.Module), {"weight": m.weight * 2}, (x,)
    ),  # type: ignore[attr-defined]
    "numbers of NumPy": lambda m, x: (
        x * np.sqrt(4)
        + np.float32(2) * x
        + F.dropout(x, np.float64(0)).reshape(np.int64(3), -1) * np.array([2.0, 3.0])[1]
    ),
    "enumerations": lambda m, x: (
        x * Size.TWO + torch.einsum(Formula.ROWS, x, x).sum(Size.ONE, keepdim=True)
    ),
    "out": lambda m, x: torch.add(m(x), 1, out=torch.empty(3, 4)),
    "foreach": lambda m, x: torch._foreach_add([x, m(x)], 1)[1],
    "custom function": lambda m, x: Square.apply(m(x)),
}


class Size(enum.IntEnum):
    ONE = 1
    TWO = 2


class Formula(str, enum.Enum):
    ROWS = "ij, ij -> ij"


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


@pytest.mark.parametrize("what", READ)
def test_states_are_read_at_each_call(what: str) -> None:
    model, function = nn.Linear(4, 4), READ[what]
    graph = graph_of(model, function)
    for step in range(3):
        with torch.no_grad():
            K.fill_(step)
            model.weight.add_(1.0)
            model.bias.mul_(-1.5)
            x = values(3, 4, seed=step).float()
            want = (
                model(x) + 1
                if what == "out"
                else model(x).square()
                if what == "custom function"
                else None
            )
        got = graph(x)
        with torch.no_grad():
            wanted = function(graph.model, x) if want is None else want
        same(got, wanted, within=1e-6)
    assert graph._captures == 1


def test_transforms_of_torch_func_are_refused() -> None:
    with pytest.raises(GraphError, match="vmap"):
        graph_of(nn.Linear(4, 4), lambda m, x: torch.vmap(lambda row: m(row))(x))(torch.randn(3, 4))


def test_a_seed_in_build_is_refused() -> None:
    def seeded(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return x + torch.rand(4)

    with pytest.raises(GraphError, match="seeds"):
        graph_of(nn.Linear(4, 4), seeded)(torch.randn(3, 4))


class Hashed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return x + torch.rand(4)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def test_a_custom_function_may_seed_in_each_step() -> None:
    graph, x = (
        graph_of(nn.Linear(4, 4), lambda m, x: Hashed.apply(x) + torch.rand(4)),
        torch.randn(3, 4),
    )
    torch.manual_seed(7)
    noise = torch.rand(4) + torch.rand(4)
    torch.manual_seed(11)
    for _ in range(2):
        same(graph(x), x + noise, within=1e-6)
        torch.rand(1)


# ---------------------------------------------------------------------- the library's own functions


def ours_on_ranks() -> None:
    placement = flow.placement("cpu", [0, 1])
    model, x = nn.Linear(4, 4).double(), values(4, 4)
    nn.init.constant_(model.weight, 0.5), nn.init.constant_(model.bias, 0.25)
    model.to_global(placement, B)
    mapped = flow.local_map(
        lambda t: (t * 2).sum(0, keepdim=True), out_sbp=flow.sbp.partial_sum, in_sbp=S(0)
    )

    def build(m: nn.Module, x: Tensor) -> Any:
        y = (
            m(x)
            + flow.zeros(4, 4, placement=placement, sbp=S(0))
            + flow.arange(4, placement=placement, sbp=S(0))
        )
        y = y + flow.full((4,), 2.0, placement=placement, sbp=B)
        y = (
            y
            + x.new_ones(4, 4)
            + torch.ones_like(x)
            + flow.eye(4, placement=placement, sbp=S(1))
            + flow.tensor([1.0, 2, 3, 4], placement=placement, sbp=B)
        )
        y = y + torch.arange(4.0).to_global(placement, B)
        return (
            y
            + mapped(x)
            + torch.ones(2, 4).to_global(placement, S(0), check_meta=False)
            + torch.ones(2, 4).to_global(placement, S(0))
        )

    given = x.to_global(placement, B).to_global(sbp=S(0))
    graph = graph_of(model, build)
    for _ in range(2):
        same(graph(given), whole(build(model, given)))
    with pytest.raises(
        RuntimeError, match=r"shape|size"
    ):  # on one device, its two local rows are the full tensor
        graph.single_device_module()(x)

    def random_numbers(m: nn.Module, x: Tensor) -> Any:
        return (
            x
            + flow.randn(4, 4, placement=placement, sbp=S(0))
            + flow.rand(300, 300, placement=placement, sbp=S(1)).mean()
            + torch.randn_like(x)
        )

    drawing = graph_of(model, random_numbers)
    drawing(given)
    outs = []
    for run in (lambda: drawing(given), lambda: random_numbers(model, given)):
        barrier()
        torch.manual_seed(3)
        barrier()
        outs.append(whole(run()))
    torch.testing.assert_close(outs[0], outs[1])
    assert drawing.single_device_module()(x)[0].shape == (4, 4)

    local = graph_of(model, lambda m, x: m(x).to_local() * 2)
    same(local(given), model(given).to_local() * 2)
    with pytest.raises(GraphError, match=FILE):
        local.single_device_module()


def test_creation_local_map_and_to_local_in_build() -> None:
    simulate(2, ours_on_ranks, timeout=60.0)


def one_fails() -> None:
    placement = flow.placement("cpu", [0, 1])
    model, x = nn.Linear(4, 4).to_global(placement, B), torch.ones(4, 4).to_global(placement, B)

    def build(m: nn.Module, x: Tensor) -> Any:
        if world().rank == 1:
            raise ValueError("on purpose")
        return torch.ones(2, 4).to_global(placement, S(0)) + x

    with pytest.raises(ValueError if world().rank == 1 else GraphError, match="on purpose"):
        graph_of(model, build)(x)
    same(graph_of(model, lambda m, x: x * 2)(x), torch.full((4, 4), 2.0))


def test_a_rank_that_fails_in_build_is_told_by_all() -> None:
    simulate(2, one_fails, timeout=30.0)


@pytest.mark.parametrize("mask", ["causal", "another", "plain"])
@pytest.mark.sweep(2)
def test_a_mask_of_torchs_transformers(mask: str) -> None:
    """Torch's transformers check whether a mask is the causal one, to use a shorter path. A graph
    uses the general path, with the same numbers."""
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).double().eval()
    x, y = values(4, 3, 8), values(4, 3, 8, seed=1)
    hidden = (
        nn.Transformer.generate_square_subsequent_mask(3).double()
        if mask != "another"
        else values(3, 3, seed=2)
    )
    want = model(x, y, hidden, hidden)

    def body() -> None:
        line = flow.placement.all("cpu")
        mine = copy.deepcopy(model).to_global(line, B)
        put = [t.to_global(line, B).to_global(sbp=S(0)) for t in (x, y)]
        masks = [hidden if mask == "plain" else hidden.to_global(line, B)] * 2
        same(graph_of(mine, lambda m, *args: m(*args))(*put, *masks), want)

    simulate(2, body, timeout=20.0)


def test_gaussian_likelihoods() -> None:
    """Gaussian likelihoods accept variances of every valid shape. A negative variance raises when
    the program has values to check."""
    x, y = values(5, 3), values(5, 3, seed=1)

    def body() -> None:
        line = flow.placement.all("cpu")
        for shape in ((5, 3), (5, 1), (5,)):
            for kind in ({}, {"full": True, "reduction": "sum"}, {"reduction": "none"}):
                var = values(*shape, seed=2).square()
                var[0] = 0.0
                put = [t.to_global(line, B).to_global(sbp=S(0)) for t in (x, y, var)]
                graph = graph_of(
                    nn.Identity(), lambda m, *args, kind=kind: F.gaussian_nll_loss(*args, **kind)
                )
                same(graph(*put), F.gaussian_nll_loss(x, y, var, **kind))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="var has negative"):
            graph(put[0], put[1], -(put[2] + 1))
        with pytest.raises(ValueError, match="incorrect size"):
            graph(put[0], put[1], put[0].T)

    simulate(2, body, timeout=20.0)


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "ctc_loss": lambda x: F.ctc_loss(
        x.log_softmax(-1)[:, None],
        torch.tensor([[1, 2]]),
        (x[:1, 0] > 9).long() + 5,
        (x[:1, 0] > 9).long() + 1,
    ),
    "istft": lambda x: torch.istft(
        torch.fft.rfft(x, dim=0), 4, 2, window=torch.hann_window(4, dtype=x.dtype)
    ),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x.sin(), x.exp()),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_torch_looks_into_first(name: str) -> None:
    """Torch's checks of plain values in a graph run at each call, when there are values."""

    def build(model: nn.Module, x: Tensor) -> Tensor:
        loss = UNSEEN[name](model(x)).square().mean()
        loss.backward()
        return loss

    model = nn.Linear(4, 4).double()
    plain, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    graph = graph_of(model, build, optimizer)
    for step in range(2):
        x = values(4 if name == "istft" else 5, 4, seed=step)
        plain.zero_grad()
        want = build(plain, x)
        same(graph(x), want)
        with torch.no_grad():
            for p in plain.parameters():
                assert p.grad is not None
                p -= 0.1 * p.grad
        same(model.weight, plain.weight)


def parts_on_ranks(n: int) -> None:
    """Run a step on each rank's local tensor, as a plain tensor. Some ranks have more rows and some
    have none."""
    line = flow.placement("cpu", list(range(world().size)))
    model, plain = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    with torch.no_grad():
        for i, (p, q) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
            q.copy_(p.copy_(values(*p.shape, seed=i)))
    model.to_global(line, B)

    def build(m: nn.Module, x: Tensor) -> Tensor:
        mine = m(x).to_local()
        rows = (
            mine.reshape(mine.shape[0], 2)
            * torch.arange(1.0, mine.shape[0] + 1.0, dtype=mine.dtype).clamp(max=1.0)[:, None]
        )
        loss: Tensor = rows[: len(rows)].to_global(line, S(0)).square().sum()
        loss.backward()
        return loss

    graph, optimizer = (
        graph_of(model, build, torch.optim.SGD(model.parameters(), lr=0.1)),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    for step in range(2):
        x = values(n, 3, seed=step)
        optimizer.zero_grad()
        want = plain(x).square().sum()
        want.backward()
        optimizer.step()
        same(graph(x.to_global(line, B).to_global(sbp=S(0))), want)  # type: ignore[attr-defined]
    same(model.weight, plain.weight)
    with pytest.raises(GraphError, match="captured another graph"):
        graph_of(
            model,
            lambda m, x: (
                m(x) + (x.to_local() + world().rank).sum()
                if world().rank
                else m(x) + x.to_local().sum()
            ),
        )(
            x.to_global(line, B).to_global(sbp=S(0))  # type: ignore[attr-defined]
        )


@pytest.mark.parametrize("n", [1, 4, 5])
def test_what_a_rank_does_with_its_part_is_its_own(n: int) -> None:
    simulate(3, parts_on_ranks, n, timeout=20.0)


PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, torch.tensor([True, False, True, True])],
    "off the diagonal": lambda x: (x @ x.T)[~torch.eye(4, dtype=torch.bool)],
    "masked_select": lambda x: x.masked_select(torch.ones(4, 4).triu(1).bool()).view(2, 3),
    "a row for all": lambda x: torch.masked_select(x, torch.arange(4) > 1),
}


@pytest.mark.parametrize("what", PICKED)
@pytest.mark.parametrize("spread", [False, True])
def test_masks_that_follow_from_the_code_pick_places(what: str, spread: bool) -> None:
    plain = nn.Linear(4, 4).double()
    with torch.no_grad():
        plain.weight.copy_(values(4, 4)), plain.bias.copy_(values(4))

    def body() -> None:
        line = flow.placement("cpu", [0, 1])
        model, alone, x = copy.deepcopy(plain), copy.deepcopy(plain), values(4, 4, seed=1)
        build = lambda m, x: trained(lambda x: PICKED[what](m(x)), x)  # type: ignore[arg-type]  # noqa: E731
        if spread:
            model.to_global(line, B)  # type: ignore[operator]
        graph = graph_of(model, build, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            want = build(alone, x)
            optimizer.step()
            same(graph(x.to_global(line, B).to_global(sbp=S(0)) if spread else x), want)  # type: ignore[attr-defined]
        same(model.weight, alone.weight)

    simulate(2 if spread else 1, body, timeout=20.0)


PREPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "a scan of a parameter": lambda w: w.cumsum(1),
    "a scan": lambda w: (w * 2).cumsum(-1),
    "places and weights": lambda w: F.interpolate(w[None, None], scale_factor=2.0, mode="bicubic"),
}


@pytest.mark.parametrize("what", PREPARED)
def test_what_a_rule_has_made_before_it_runs(what: str) -> None:
    """Tensors that a rule prepares before it runs are real, and the program contains them. A split
    op saves such tensors in addition to its operands."""

    def build(model: nn.Module, x: Tensor) -> Tensor:
        loss = PREPARED[what](model.weight).square().sum() + model(x).sum()  # type: ignore[arg-type]
        loss.backward()
        return loss

    plain = nn.Linear(5, 4, bias=False).double()
    with torch.no_grad():
        plain.weight.copy_(values(4, 5))

    def body() -> None:
        line = flow.placement("cpu", [0, 1])
        model, alone = copy.deepcopy(plain).to_global(line, S(1)), copy.deepcopy(plain)  # type: ignore[operator]
        graph, optimizer = (
            graph_of(model, build, torch.optim.SGD(model.parameters(), lr=0.01)),
            torch.optim.SGD(alone.parameters(), lr=0.01),
        )
        for step in range(2):
            x = values(3, 5, seed=step)
            optimizer.zero_grad()
            want = build(alone, x)
            optimizer.step()
            same(graph(x.to_global(line, B)), want)  # type: ignore[attr-defined]
        same(model.weight, alone.weight)

    simulate(2, body, timeout=20.0)


class Stopped(nn.Module):
    """A model whose modes change right before an op that stays one call, as an op that communicates
    does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).to_global(sbp=S(1)) if x.is_global else self.a(x)  # type: ignore[attr-defined]
        with torch.no_grad():
            best = y.topk(3, 1).values
            gate = self.b(best).sigmoid()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype is torch.float32):
            z = y.softmax(1).topk(3, 1).values
            return (self.b(z) * gate).float() if x.dtype is torch.float32 else self.b(z) * gate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_modes_around_an_op_that_is_kept_whole(dtype: torch.dtype) -> None:
    within = 1e-9 if dtype is torch.float64 else 3e-2

    def body() -> None:
        line = flow.placement("cpu", [0, 1])
        plain, model = Stopped().to(dtype), Stopped().to(dtype)
        with torch.no_grad():
            for i, (p, q) in enumerate(zip(plain.parameters(), model.parameters(), strict=True)):
                q.copy_(p.copy_(values(*p.shape, seed=i)))
        model.to_global(line, B)
        graph, optimizer = (
            graph_of(model, trained, torch.optim.SGD(model.parameters(), lr=0.1)),
            torch.optim.SGD(plain.parameters(), lr=0.1),
        )
        for step in range(2):
            x = values(4, 4, seed=step).to(dtype)
            optimizer.zero_grad()
            want = trained(plain, x)
            optimizer.step()
            same(graph(x.to_global(line, B)), want, within=within)  # type: ignore[attr-defined]
        for name, p in plain.named_parameters():
            same(model.get_parameter(name), p, name, within)
        assert [
            n.args[0][1]
            for n in graph.program().graph.nodes
            if getattr(n.target, "__name__", "") == "autocast"
        ] == [True, False][: 2 * (within > 1e-3)]

    simulate(2, body, timeout=20.0)


class LayerDrop(nn.Module):
    """A layer that is dropped with some probability, often none, as in models of speech."""

    def __init__(self, drop: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        if self.drop(torch.rand([])):
            return x
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("drop", "dropped"),
    [
        (lambda p: p < 0.0, False), (lambda p: p < -0.5, False), (lambda p: p >= 0, True),
        (lambda p: p < 1, True), (lambda p: p <= 1.0, True),
        (lambda p: p > 1, False), (lambda p: torch.lt(p, 0.0), False), (lambda p: p.gt(1.5), False),
        (lambda p: p > 0, True), (lambda p: p <= 0.0, False),
        (lambda p: p < 0.5, None), (lambda p: p + 1 < 0, None), (lambda p: p < p, None),
        (lambda p: torch.rand([], dtype=torch.half) > 0, None),
    ],
)  # fmt: skip
def test_a_drawn_number_that_decides_nothing(
    drop: Callable[[Tensor], Any], dropped: bool | None
) -> None:
    torch.manual_seed(0)
    module, x = LayerDrop(drop), values(2, 3)
    asked = LayerDrop.forward.__code__.co_firstlineno + 1

    def body() -> None:
        place = flow.placement.all("cpu")
        graph = flow.nn.Graph.trace(copy.deepcopy(module).to_global(place, B))
        shared = x.to_global(place, B).to_global(sbp=S(0))
        if dropped is None:
            with pytest.raises(
                GraphError,
                match=rf"chooses by a random number(.|\n)*{FILE}:{asked}(.|\n)*layerdrop",
            ):
                graph(shared)
            return
        torch.testing.assert_close(
            graph(shared).to_global(sbp=B).to_local(), x if dropped else module(x).detach()
        )

    simulate(2, body)
