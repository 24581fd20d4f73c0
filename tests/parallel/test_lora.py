"""Tests of adapters in models that are laid out by name. The adapted layer has the layout that it
would have without adapters, the adapters follow it, and training is that of one device.

The modules are built as in peft. A module that replaces a layer has it as ``base_layer`` and has
low-rank matrices under the names of adapters. A module that is trained in place of another keeps
both. The returned model forwards the attributes of the inner model.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import run_on
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as older_weight_norm
from torch.nn.utils.parametrize import register_parametrization

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives
from globaltensor.parallel.adapters import layers_in

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
WIDTH, INNER, HEADS, WORDS, LAYERS, RANK = 16, 24, 4, 18, 2, 2

# ------------------------------------------------------------------------------------------ a model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(WIDTH, INNER),
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Gated()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.before(x))
        return x + self.mlp(self.between(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.norm, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList([Block() for _ in range(LAYERS)]),
            nn.LayerNorm(WIDTH),
            None,
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), words.flatten())  # type: ignore[misc]


class Planned(Decoder):
    """A model that has its own layout plan, as models of transformers do."""

    @property
    def tp_plan(self) -> dict[str, str]:
        plan = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            plan[f"layers.*.{name}"] = "colwise"
        return {**plan, "layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"}


class Turned(nn.Module):
    """A linear layer that stores its weight as [inputs, outputs] (transformers' Conv1D)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = (
            nn.Parameter(torch.randn(nx, nf) * 0.1),
            nn.Parameter(torch.zeros(nf)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            *x.shape[:-1], self.nf
        )


# ----------------------------------------------------------------------------------------- adapters


def sizes(base: Any) -> tuple[int, int]:
    return (base.nx, base.nf) if isinstance(base, Turned) else (base.in_features, base.out_features)


class Lora(nn.Module):
    """A copy of ``peft.tuners.lora.Linear``."""

    def __init__(self, base_layer: nn.Module, bias: bool = False) -> None:
        super().__init__()
        inputs, outputs = sizes(base_layer)
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict(
            {
                "default": nn.Linear(inputs, RANK, bias=False),
                "other": nn.Linear(inputs, 3, bias=False),
            }
        )
        self.lora_B = nn.ModuleDict(
            {
                "default": nn.Linear(RANK, outputs, bias=bias),
                "other": nn.Linear(3, outputs, bias=bias),
            }
        )
        self.lora_embedding_A, self.lora_magnitude_vector = nn.ParameterDict(), nn.ModuleDict()
        self.scaling, self.active, self.merged, self.disabled = (
            {"default": 2.0, "other": 0.5},
            ["default"],
            False,
            False,
        )

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in self.active if not (self.merged or self.disabled) else ():
            result = (
                result
                + self.lora_B[name](self.lora_A[name](self.lora_dropout["default"](x)))
                * self.scaling[name]
            )
        return result  # type: ignore[no-any-return]

    def merge(self) -> None:
        self.base_layer.weight.data += (
            self.lora_B["default"].weight @ self.lora_A["default"].weight * self.scaling["default"]
        )  # type: ignore[operator]
        self.merged = True


class Dora(Lora):
    """An adapter that trains the magnitude separately from the direction (Liu et al. 2024)."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        magnitude = nn.Module()
        magnitude.weight = nn.Parameter(base_layer.weight.detach().norm(dim=1))  # type: ignore[operator]
        self.lora_magnitude_vector = nn.ModuleDict({"default": magnitude})

    def forward(self, x: Tensor) -> Tensor:
        a, b, weight = self.lora_A["default"], self.lora_B["default"], self.base_layer.weight
        norm = (weight + self.scaling["default"] * (b.weight @ a.weight)).norm(dim=1).detach()  # type: ignore[operator]
        scale = (self.lora_magnitude_vector["default"].weight / norm).view(1, -1)  # type: ignore[operator]
        bias = self.base_layer.bias
        direction = F.linear(x, weight) + b(a(x)) * self.scaling["default"]  # type: ignore[arg-type]
        return scale * direction + bias  # type: ignore[no-any-return, operator]


class LoraTable(nn.Module):
    """A copy of ``peft.tuners.lora.Embedding``."""

    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_embedding_A = nn.ParameterDict(
            {"default": nn.Parameter(torch.randn(RANK, base_layer.num_embeddings))}
        )
        self.lora_embedding_B = nn.ParameterDict(
            {"default": nn.Parameter(torch.randn(base_layer.embedding_dim, RANK))}
        )

    def forward(self, words: Tensor) -> Tensor:
        return (
            self.base_layer(words)
            + F.embedding(words, self.lora_embedding_A["default"].T)
            @ self.lora_embedding_B["default"].T
        )  # type: ignore[no-any-return]


class Saved(nn.Module):
    """A copy of ``peft.utils.ModulesToSaveWrapper``: it trains a copy in place of the module."""

    def __init__(self, original_module: nn.Module) -> None:
        super().__init__()
        self.original_module = original_module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original_module)})

    def forward(self, *args: Any) -> Any:
        return self.modules_to_save["default"](*args)


class Scaled(nn.Module):
    """A copy of ``peft.tuners.ia3.Linear``: it multiplies its outputs, or its inputs, by a
    vector."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        shape = (
            (1, base_layer.in_features)
            if base_layer.in_features == INNER
            else (base_layer.out_features, 1)
        )
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.ones(shape))})

    def forward(self, x: Tensor) -> Tensor:
        factor = self.ia3_l["default"].flatten()
        return (
            self.base_layer(x * factor)
            if self.ia3_l["default"].shape[0] == 1
            else self.base_layer(x) * factor
        )  # type: ignore[no-any-return]


class Own(nn.Module):
    """A user's own adapter without any of these names; its matrices are applied from the right."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.into, self.out = (
            nn.Parameter(torch.randn(linear.in_features, RANK)),
            nn.Parameter(torch.randn(RANK, linear.out_features)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.into @ self.out  # type: ignore[no-any-return]


class Added(nn.Module):
    """A parametrization that adds LoRA's product to a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.randn(RANK, weight.shape[1])),
            nn.Parameter(torch.randn(weight.shape[0], RANK)),
        )

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Around(nn.Module):
    """A copy of ``peft.PeftModel``: it makes paths longer, and it forwards the inner model's
    attributes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model").model, name)

    def forward(self, *args: Any) -> Any:
        return self.base_model.model(*args)  # type: ignore[operator]


COLUMNS, ROWS = ("q_proj", "v_proj", "up_proj"), ("down_proj",)


def put(model: nn.Module, names: Sequence[str], make: Callable[[Any], nn.Module]) -> None:
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in names:
            setattr(model.get_submodule(parent), name, make(module))


def parametrized(layer: nn.Linear) -> nn.Module:
    register_parametrization(layer, "weight", Added(layer.weight))
    return layer


def by_a_hook(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        # PyTorch warns that this function is deprecated
        warnings.simplefilter("ignore", FutureWarning)
        return older_weight_norm(layer)


def table_too(model: nn.Module) -> None:
    put(model, (*COLUMNS, *ROWS, "head"), Lora)
    put(model, ("embed",), LoraTable)


def saved_too(model: nn.Module) -> None:
    put(model, (*COLUMNS, *ROWS), Lora)
    put(model, ("embed", "head"), Saved)


def turned(layer: nn.Linear) -> Turned:
    return Turned(layer.out_features, layer.in_features)


def turned_ones(model: nn.Module) -> None:
    put(
        model, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), turned
    )
    put(model, (*COLUMNS, *ROWS), Lora)


KINDS: dict[str, Callable[[nn.Module], None]] = {
    "none": lambda model: None,
    "lora": lambda model: put(model, (*COLUMNS, *ROWS), Lora),
    "of all": lambda model: put(
        model, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), Lora
    ),
    "with biases": lambda model: put(
        model, (*COLUMNS, *ROWS), lambda layer: Lora(layer, bias=True)
    ),
    "dora": lambda model: put(model, (*COLUMNS, *ROWS), Dora),
    "tables and heads": table_too,
    "copies": saved_too,
    "scaled": lambda model: put(model, ("k_proj", "v_proj", "down_proj"), Scaled),
    "somebody's own": lambda model: put(model, (*COLUMNS, *ROWS), Own),
    "turned": turned_ones,
    "parametrized": lambda model: put(model, (*COLUMNS, *ROWS), parametrized),
    "weight norm": lambda model: put(model, (*COLUMNS, *ROWS), parametrizations.weight_norm),
    "older weight norm": lambda model: put(model, (*COLUMNS, *ROWS), by_a_hook),
}


def made(kind: str, cls: type[Decoder], around: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = cls()
    KINDS[kind](model)
    for p in model.parameters():
        p.data.normal_(0.0, 0.3)
    adapters = kind not in ("none", "weight norm", "older weight norm")
    for name, p in model.named_parameters():
        p.requires_grad_(
            not adapters
            or not (
                "base_layer" in name
                or "original" in name
                or name.endswith(("proj.weight", "linear.weight"))
            )
        )
    return (Around(model) if around else model).double()


# ------------------------------------------------------------------------------------------ layouts


def layouts(kind: str, named: str, plan: str, around: bool) -> dict[str, str]:
    """Return, by path, the layouts of parameters of the first block's layers, the table and the
    head."""
    model = flow.parallelize(made(kind, CLASSES[named], around), flow.placement.all("cpu"), plan)
    found = {
        name.removeprefix("base_model.model.").removeprefix("layers.0."): p.sbp[0]
        for name, p in model.named_parameters()
    }  # type: ignore[attr-defined]
    return {
        name: "B" if sbp == B else f"S({sbp.dim})"
        for name, sbp in found.items()
        if not name.startswith("layers.")
    }


CLASSES: dict[str, type[Decoder]] = {"by its plan": Planned, "by structure": Decoder}
LORA = {
    **{f"{layer}.{part}": lies
       for layer in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
       for part,
       lies in {"base_layer.weight": "S(0)", "base_layer.bias": "S(0)",
           "lora_A.default.weight": "B", "lora_A.other.weight": "B",
                          "lora_B.default.weight": "S(0)", "lora_B.other.weight": "S(0)"}.items()},
    **{f"mlp.down_proj.{part}": lies
       for part,
       lies in {"base_layer.weight": "S(1)", "base_layer.bias": "B",
           "lora_A.default.weight": "S(1)", "lora_A.other.weight": "S(1)",
                          "lora_B.default.weight": "B", "lora_B.other.weight": "B"}.items()},
    "self_attn.k_proj.weight": "S(0)", "self_attn.k_proj.bias": "S(0)",
    "self_attn.o_proj.weight": "S(1)", "self_attn.o_proj.bias": "B",
    "mlp.gate_proj.weight": "S(0)", "mlp.gate_proj.bias": "S(0)", "embed.weight": "S(0)",
    "head.weight": "S(0)",
}  # fmt: skip
OTHERS: dict[str, dict[str, str]] = {
    "tables and heads": {"embed.base_layer.weight": "S(0)",
        "embed.lora_embedding_A.default": "S(1)", "embed.lora_embedding_B.default": "B",
                         "head.base_layer.weight": "S(0)", "head.lora_A.default.weight": "B",
                         "head.lora_B.default.weight": "S(0)"},
    "copies": {"embed.original_module.weight": "S(0)",
        "embed.modules_to_save.default.weight": "S(0)",
        "head.modules_to_save.default.weight": "S(0)"},
    "dora": {"mlp.up_proj.lora_magnitude_vector.default.weight": "S(0)",
        "mlp.down_proj.lora_magnitude_vector.default.weight": "B"},
    "with biases": {"mlp.up_proj.lora_B.default.bias": "S(0)",
        "mlp.down_proj.lora_B.default.bias": "B"},
    "scaled": {"self_attn.v_proj.ia3_l.default": "S(0)", "mlp.down_proj.ia3_l.default": "S(1)",
        "mlp.down_proj.base_layer.weight": "S(1)"},
    "somebody's own": {"mlp.up_proj.linear.weight": "S(0)", "mlp.up_proj.into": "B",
        "mlp.up_proj.out": "S(1)", "mlp.down_proj.linear.weight": "S(1)",
                       "mlp.down_proj.into": "S(0)", "mlp.down_proj.out": "B"},
    "turned": {"mlp.up_proj.base_layer.weight": "S(1)", "mlp.up_proj.lora_A.default.weight": "B",
        "mlp.up_proj.lora_B.default.weight": "S(0)",
               "mlp.down_proj.base_layer.weight": "S(0)",
               "mlp.down_proj.lora_A.default.weight": "S(1)",
               "mlp.down_proj.lora_B.default.weight": "B"},
    "parametrized": {"mlp.up_proj.parametrizations.weight.original": "S(0)",
        "mlp.up_proj.parametrizations.weight.0.a": "B",
                     "mlp.up_proj.parametrizations.weight.0.b": "S(0)",
                     "mlp.down_proj.parametrizations.weight.original": "S(1)",
                     "mlp.down_proj.parametrizations.weight.0.a": "S(1)",
                     "mlp.down_proj.parametrizations.weight.0.b": "B"},
    "weight norm": {"mlp.up_proj.parametrizations.weight.original0": "S(0)",
        "mlp.up_proj.parametrizations.weight.original1": "S(0)",
                    "mlp.down_proj.parametrizations.weight.original0": "B",
                    "mlp.down_proj.parametrizations.weight.original1": "S(1)"},
    "older weight norm": {"mlp.up_proj.weight_g": "S(0)", "mlp.up_proj.weight_v": "S(0)",
        "mlp.down_proj.weight_g": "B", "mlp.down_proj.weight_v": "S(1)"},
}  # fmt: skip


def all_layouts(named: str) -> list[str]:
    """Return the parameters that have another layout than expected."""
    wrong = []
    for plan, around in (("tensor", True), ("tensor", False), ("sequence", True)):
        found = layouts("lora", named, plan, around)
        wrong += [
            f"{plan}, {name}: {found[name]}" for name, lies in LORA.items() if found[name] != lies
        ]
        wrong += [
            f"{plan}, {name}" for name, lies in found.items() if name not in LORA and lies != "B"
        ]
    for kind, expected in OTHERS.items():
        found = layouts(kind, named, "tensor", True)
        wrong += [
            f"{kind}, {name}: {found[name]}"
            for name, lies in expected.items()
            if found[name] != lies
        ]
    return wrong


@pytest.mark.parametrize("named", CLASSES)
@pytest.mark.sweep(2)
def test_adapters_follow_the_layers_they_are_for(named: str) -> None:
    assert run_on(2, all_layouts, named) == [[]] * 2


def traffic(named: str, plan: str) -> list[str]:
    """Return the cases in which a forward pass sends more with adapters than without."""
    words = torch.arange(8).view(2, 4).to_global(everyone := flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
    sent = {}
    for kind in (
        "none",
        "lora",
        "of all",
        "tables and heads",
        "copies",
        "scaled",
        "somebody's own",
    ):
        model = flow.parallelize(made(kind, CLASSES[named]), everyone, plan)
        model(words)
        with record_collectives() as log:
            model(words)
        sent[kind] = Counter(t.kind for t in log), sum(t.bytes for t in log)
    return [f"{kind}: {n}, not {sent['none']}" for kind, n in sent.items() if n != sent["none"]]


@pytest.mark.parametrize("plan", ["tensor", "sequence"])
@pytest.mark.parametrize("named", CLASSES)
@pytest.mark.sweep(4)
def test_adapters_send_nothing_forward(named: str, plan: str) -> None:
    assert run_on(2, traffic, named, plan) == [[]] * 2


# ----------------------------------------------------------------------------------------- training


def whole(x: Any) -> Tensor:
    return x.to_global(sbp=[B] * x.placement.axes).to_local()  # type: ignore[no-any-return]


def steps(model: nn.Module, words: Tensor, read: Callable[[Any], Tensor]) -> Iterator[list[Tensor]]:
    """Yield the loss and the gradients of each of some steps, and finally the parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        yield [
            read(loss),
            *[
                torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else read(p.grad)
                for p in trained
            ],
        ]
        optimizer.step()
    yield [read(p) for p in model.parameters()]


def trains(
    kinds: Sequence[str], plans: Sequence[tuple[Any, Any, Any]], classes: Sequence[str]
) -> list[str]:
    """Return the cases in which training differs from one device."""
    words = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(2))
    wrong = []
    for kind in kinds:
        for named in classes:
            plain = list(steps(made(kind, CLASSES[named]), words, lambda t: t.detach().clone()))
            for plan, ranks, sbp in plans:
                placement = flow.placement("cpu", ranks)
                model = flow.parallelize(made(kind, CLASSES[named]), placement, plan)
                given = words.to_global(placement, [B] * placement.axes).to_global(sbp=sbp)  # type: ignore[attr-defined]
                for i, (got, want) in enumerate(
                    zip(steps(model, given, whole), plain, strict=True)
                ):
                    for a, b in zip(got, want, strict=True):
                        if not torch.allclose(a, b, rtol=1e-8, atol=1e-9):
                            wrong.append(
                                f"{kind}, {named}, {plan}, step {i}, {list(a.shape)}: "
                                f"{(a - b).abs().max():.1e}"
                            )
    return wrong


LINE = [0, 1]
ON_TWO = [("tensor", LINE, [B]), ("sequence", LINE, [B]), ("fsdp", LINE, [S(0)])]
ON_FOUR = [
    (["data", "tensor"], [[0, 1], [2, 3]], [S(0), B]),
    (["fsdp", "sequence"], [[0, 1], [2, 3]], [S(0), B]),
]


@pytest.mark.parametrize("plan", ON_TWO, ids=lambda plan: plan[0])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@pytest.mark.sweep(25)
def test_training_is_that_of_one_device(kind: str, plan: tuple[Any, Any, Any]) -> None:
    assert run_on(2, trains, [kind], [plan], list(CLASSES)) == [[]] * 2


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("lora", ON_FOUR[0]), ("lora", ON_FOUR[1]), ("tables and heads", ON_FOUR[0])],
    ids=str,
)
@pytest.mark.sweep(3)
def test_training_on_a_grid_is_that_of_one_device(kind: str, plan: tuple[Any, Any, Any]) -> None:
    assert run_on(4, trains, [kind], [plan], ["by its plan"]) == [[]] * 4


@contextlib.contextmanager
def changed(model: nn.Module, **settings: Any) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, Lora)]
    before = [{name: getattr(layer, name) for name in settings} for layer in layers]
    for layer in layers:
        layer.__dict__.update(settings)
    yield
    for layer, was in zip(layers, before, strict=True):
        layer.__dict__.update(was)


def used_otherwise(plan: str) -> list[str]:
    """Check adapters that are turned off, exchanged, used two at a time, and merged."""
    words = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(2))
    everyone, wrong = flow.placement.all("cpu"), []
    plain = made("lora", Planned)
    model = flow.parallelize(made("lora", Planned), everyone, plan)
    given = words.to_global(everyone, B).to_global(sbp=S(0) if plan == "fsdp" else B)  # type: ignore[attr-defined]

    def same(what: str) -> None:
        if not torch.allclose(whole(model(given)), plain(words).detach(), rtol=1e-10):
            wrong.append(f"{plan}, {what}")

    for settings in (
        {"disabled": True},
        {"active": ["other"]},
        {"active": ["default", "other"]},
    ):
        with changed(model, **settings), changed(plain, **settings):
            same(str(settings))
    for m in (*model.modules(), *plain.modules()):
        if isinstance(m, Lora):
            m.merge()
    same("merged")
    return wrong


@pytest.mark.parametrize("plan", ["tensor", "sequence", "fsdp"])
@pytest.mark.sweep(3)
def test_adapters_may_be_turned_off_changed_and_merged(plan: str) -> None:
    assert run_on(2, used_otherwise, plan) == [[]] * 2


# ------------------------------------------------------------------------- modules without adapters


class Pair(nn.Module):
    """A model of two models, each with its own plan."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Planned(), Planned()


def others() -> list[str]:
    everyone = flow.placement.all("cpu")
    pair, alone = (
        dict(flow.parallelize(model, everyone, "tensor").named_parameters())
        for model in (Pair(), nn.Linear(4, 6))
    )
    expected = {
        "first.layers.0.mlp.up_proj.weight": S(0), "second.layers.1.mlp.down_proj.weight": S(1),
        "second.embed.weight": S(0), "weight": S(0),
    }  # fmt: skip
    found = {**pair, **alone}
    return [
        f"{name}: {found[name].sbp}"
        for name, lies in expected.items()
        if found[name].sbp != (lies,)
    ]  # type: ignore[attr-defined]


def test_models_of_several_and_of_one_layer() -> None:
    assert run_on(2, others) == [[]] * 2


@pytest.mark.parametrize("module", [
    nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 16)),  # layers in a row
    nn.ModuleDict({"wide": nn.Linear(16, 64), "narrow": nn.Linear(64, 16)}),
    nn.ModuleDict({"q": nn.Linear(16, 16), "k": nn.Linear(16, 8), "v": nn.Linear(16, 8),
        "out": nn.Linear(16, 16)}),
    nn.ModuleDict({"dense": nn.Linear(16, 16), "norm": nn.LayerNorm(16)}),
    nn.ModuleDict({"squeeze": nn.Linear(16, 4), "excite": nn.Linear(4, 16)}),
    nn.ModuleDict({"table": nn.Embedding(16, 8), "places": nn.Embedding(4, 8),
        "in": nn.Linear(8, 16)}),
], ids=["in a row", "pair", "attention", "with a norm", "narrow pair", "tables"])  # fmt: skip
def test_layers_beside_one_another_are_no_adapters(module: nn.Module) -> None:
    plain = [path for path, m in module.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    assert [layer.path for layer in layers_in(module)] == plain
