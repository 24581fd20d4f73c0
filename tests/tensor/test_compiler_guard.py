"""Tests of torch.compile around code on global tensors. The numbers are those of one device on
every rank, a warning says that the code is not compiled, and fullgraph=True raises an error."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.pool import Pool, run_on

import globaltensor as flow

B, S = flow.sbp.broadcast, flow.sbp.split
ROWS = 4
STEPS = 3


class Net(nn.Module):
    """A model of two linear layers, a buffer, and a Python branch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) * self.scale
        return y + y if twice else y


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, ROWS * 8, dtype=torch.float64).view(ROWS, 8)


Step = Callable[[torch.Tensor], torch.Tensor]


def by_function(m: Any, opt: Any, **options: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = m(x, twice=True).pow(2).mean()
        loss.backward()
        opt.step()
        return loss

    return torch.compile(step, **options)  # type: ignore[no-any-return]


def by_arguments(m: Any, opt: Any, **options: Any) -> Step:
    def step(things: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        things["opt"].zero_grad()
        loss = things["m"](x, True).pow(2).mean()
        loss.backward()
        things["opt"].step()
        return loss

    compiled = torch.compile(step, **options)
    return lambda x: compiled({"m": m, "opt": opt}, x)


class Trainer:
    def __init__(self, m: Any, opt: Any) -> None:
        self.state = types.SimpleNamespace(m=m, opt=opt)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.state.m(x, twice=True).pow(2).mean()  # type: ignore[no-any-return]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 3 / 3  # an op on a plain tensor, before any global tensor
        self.state.opt.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.state.opt.step()
        return loss


def by_method(m: Any, opt: Any, **options: Any) -> Step:
    return torch.compile(Trainer(m, opt).step, **options)  # type: ignore[no-any-return]


def by_parts(m: Any, opt: Any, **options: Any) -> Step:
    """Compile the model, the loss and the optimizer's step separately."""
    model, square, update = (
        torch.compile(m, **options),
        torch.compile(lambda y: y.pow(2).mean(), **options),
        torch.compile(opt.step, **options),
    )

    def step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = square(model(x, twice=True))
        loss.backward()
        update()
        return loss  # type: ignore[no-any-return]

    return step


def by_module(m: Any, opt: Any, **options: Any) -> Step:
    """Call ``module.compile()`` on the model and on one of its layers."""
    m.down.compile(**options)
    m.compile(**options)

    def step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = m(x, twice=True).pow(2).mean()
        loss.backward()
        opt.step()
        return loss  # type: ignore[no-any-return]

    return step


def by_forward(m: Any, opt: Any, **options: Any) -> Step:
    """Replace the model's forward by a compiled one, and compile the backward pass too."""
    m.forward = torch.compile(m.forward, **options)
    back = torch.compile(lambda loss: loss.backward(), **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = m(x, twice=True).pow(2).mean()
        back(loss)
        opt.step()
        return loss  # type: ignore[no-any-return]

    return step


SPELLINGS = {
    f.__name__: f for f in (by_function, by_arguments, by_method, by_parts, by_module, by_forward)
}


def whole(t: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(t.detach().numpy())


def trained(
    spelling: str, plan: str | None, kind: Any = torch.optim.AdamW, **options: Any
) -> list[torch.Tensor]:
    """Return the losses of some steps, then gradients and parameters. With ``plan`` None they are
    those of one device, without a compiler."""
    m = net()
    if plan is not None:
        flow.parallelize(m, flow.placement.all("cpu"), plan)
    opt = kind(m.parameters(), lr=0.05)
    step = SPELLINGS[spelling](m, opt, **options) if plan is not None else Trainer(m, opt).step
    losses = [step(rows()) for _ in range(STEPS)]
    return [whole(t) for t in (*losses, *[p.grad for p in m.parameters()], *m.parameters())]  # type: ignore[arg-type]


def differs(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


OPTIONS: tuple[dict[str, Any], ...] = (
    {"backend": "aot_eager"}, {"backend": "inductor"}, {"dynamic": True},
    {"mode": "reduce-overhead"}, {"mode": "max-autotune-no-cudagraphs"},
)  # fmt: skip
#: Ways to compile a training step. Each part has every ninth one. The first part has every plan,
#: and two of the options.
WAYS: list[tuple[str, str, dict[str, Any]]] = [
    *itertools.product(("data", "fsdp", "tensor"), SPELLINGS, [{"backend": "eager"}]),
    *(("tensor", way, options) for options in OPTIONS for way in ("by_method", "by_parts")),
]
PARTS = 9


def train_in_ways(part: int) -> dict[str, float]:
    """Return the difference from one device for each way to compile a training step."""
    wanted = trained("by_function", None)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for plan, spelling, options in WAYS[part::PARTS]:
            found[f"{plan} {spelling} {options}"] = differs(
                trained(spelling, plan, **options), wanted
            )
    return found


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_numbers_are_those_of_one_device(part: int) -> None:
    for found in run_on(2, quietly, train_in_ways, part):
        assert not {name: far for name, far in found.items() if far > 1e-12}


def quietly(fn: Callable[..., Any], argument: Any = None) -> Any:
    """Call ``fn(argument)`` without warnings. The warning that code is not compiled appears once
    per process, in the first of these tests to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(argument)


def meet_in_other_ways(start: None) -> dict[str, float]:
    everyone, torch_compile = (
        flow.placement.all("cpu"),
        lambda f, **k: torch.compile(f, backend="eager", **k),
    )
    x, m = rows(), flow.parallelize(net(), flow.placement.all("cpu"), "tensor")
    g, reference, first = (
        x.to_global(everyone, B).to_global(sbp=S(0)),
        net(),
        flow.placement("cpu", [0]),
    )

    class Box:
        def __init__(self) -> None:
            self.m = m

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.m(x)  # type: ignore[no-any-return]

    class Graph(flow.nn.Graph):
        def __init__(self, m: Any) -> None:
            super().__init__()
            self.m = m

        def build(self, x: torch.Tensor) -> torch.Tensor:
            return self.m(x)  # type: ignore[no-any-return]

    def inner(x: torch.Tensor) -> torch.Tensor:
        return m(x)

    def through_another(x: torch.Tensor) -> torch.Tensor:
        print(end="")  # the compiler breaks the graph here, and continues after it
        return inner(x.sin()) if x.sum().item() > 1e9 else inner(x)

    def made_inside(x: torch.Tensor) -> torch.Tensor:
        return m((x + 1).to_global(everyone, B) - 1)

    def at_one_rank(x: torch.Tensor) -> torch.Tensor:
        return reference(x).to_global(first, B).to_global(everyone, B)  # type: ignore[attr-defined,no-any-return]

    made = flow.parallelize(net(), everyone, "data")
    graph = Graph(torch.compile(flow.parallelize(net(), everyone, "data"), backend="eager"))
    ways = {
        "callable object": lambda: torch_compile(Box())(x),
        "linear module": lambda: made.norm(x) * 0 + torch_compile(Wrapped(made))(x),
        "function of a function": lambda: torch_compile(through_another)(x),
        "made inside": lambda: torch_compile(made_inside)(x),
        "one rank": lambda: torch_compile(at_one_rank)(x),
        "graph of a compiled module": lambda: graph(g),
        "compiled graph": lambda: torch_compile(graph)(g),
        "local_map of a compiled function": lambda: m(
            flow.local_map(torch_compile(lambda t: t * 2, fullgraph=True), S(0), [S(0)])(g) / 2
        ),
        "compiled local_map": lambda: torch_compile(
            lambda g: m(flow.local_map(lambda t: t * 2, S(0), [S(0)])(g) / 2)
        )(g),
        "under the guard": lambda: guarded(torch_compile(m), x),
        "in lists": lambda: torch_compile(lambda pair: m(pair[0][0]))([[g], 1]),
    }
    wanted = reference(x).detach()
    return {name: float((whole(way()) - wanted).abs().max()) for name, way in ways.items()}


class Wrapped(nn.Module):
    def __init__(self, m: nn.Module) -> None:
        super().__init__()
        self.all = nn.Sequential(m)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all(x)  # type: ignore[no-any-return]


def guarded(f: Any, x: torch.Tensor) -> torch.Tensor:
    with flow.check_ranks():
        return f(x)  # type: ignore[no-any-return]


def test_global_tensors_are_met_wherever_they_are_held() -> None:
    for found in run_on(2, quietly, meet_in_other_ways):
        assert not {name: far for name, far in found.items() if far > 1e-12}


#: Each part has every third pair of a layout and a kind of options.
PARTS_OF_FLEX = 3


def flex_in_ways(part: int) -> dict[str, float]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    everyone = flow.placement.all("cpu")
    q, k, v = [torch.randn(2, 4, 32, 16, dtype=torch.float64) for _ in range(3)]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")
    far = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modules imported by torch's compiler warn
        compiled = torch.compile(flex_attention)
        kinds: dict[str, dict[str, Any]] = {
            "score_mod": {"score_mod": lambda s, b, h, i, j: s + h * 0.5 + b},
            "mask": {"block_mask": mask},
        }
        cases = itertools.product((S(0), S(1), S(2), B), kinds.items())
        for layout, (name, options) in itertools.islice(cases, part, None, PARTS_OF_FLEX):
            a, b, c = [t.to_global(everyone, B).to_global(sbp=layout) for t in (q, k, v)]
            wanted = flex_attention(q, k, v, **options)
            far[f"{layout} {name}"] = float(
                (whole(compiled(a, b, c, **options)) - wanted).abs().max()
            )
            inside = torch.compile(lambda *t, o=options: flex_attention(*t, **o))
            far[f"{layout} {name} in a function"] = float(
                (whole(inside(a, b, c)) - wanted).abs().max()
            )
    return far


@pytest.mark.parametrize("part", range(PARTS_OF_FLEX))
@pytest.mark.sweep(PARTS_OF_FLEX)
def test_flex_attention_compiled_as_its_users_do(part: int) -> None:
    for found in run_on(2, quietly, flex_in_ways, part):
        assert not {name: far for name, far in found.items() if far > 1e-10}


LIBRARY = """
import torch

def update(p, grad, momentum, lr):
    momentum.mul_(0.9).add_(grad)
    p.sub_(momentum * lr)

class Optimizer(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                lr = torch.tensor(group["lr"], dtype=torch.float64)
                torch.compile(update, fullgraph=True, dynamic=False, backend="eager")(p.detach(), p.grad, state["momentum"], lr)
"""  # noqa: E501


def library_optimizer(folder: str) -> Any:
    """Return an optimizer class that compiles its update with fullgraph=True, as torchao's do. Its
    code appears to be in a file of `folder`."""
    module = types.ModuleType("imitated_optimizer")
    exec(
        compile(LIBRARY, os.path.join(folder, "imitated", "optimizer.py"), "exec"), module.__dict__
    )
    return module.Optimizer


def train_by_a_library(plan: str) -> float:
    kind = library_optimizer(sysconfig.get_path("purelib"))
    wanted = trained("by_function", None, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return differs(trained("by_module", plan, kind, backend="eager"), wanted)


@pytest.mark.parametrize("plan", ["tensor", "data", "fsdp"])
@pytest.mark.sweep(3)
def test_optimizers_of_libraries_that_compile_their_step(plan: str) -> None:
    assert max(run_on(2, quietly, train_by_a_library, plan)) <= 1e-12


def whole_graphs(start: None) -> dict[str, str]:
    """Return the error that each use of fullgraph=True raises."""
    everyone = flow.placement.all("cpu")
    m, x = flow.parallelize(net(), everyone, "tensor"), rows()
    opt, made = torch.optim.SGD(m.parameters(), lr=0.1), x.to_global(everyone, B)
    optimizers = []
    for folder in (
        sysconfig.get_path("purelib"),
        "/home/user",
    ):  # the same code, in a library and in user code
        weight = made.clone()
        weight.grad = made
        optimizers.append(library_optimizer(folder)([weight], 0.1))

    def said(f: Any, *args: Any) -> str:
        try:
            f(*args)
        except flow.errors.GlobalTensorError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    whole = {"fullgraph": True, "backend": "eager"}
    return {
        "module": said(torch.compile(m, **whole), x),
        "function": said(torch.compile(lambda x: m(x), **whole), x),
        "argument": said(torch.compile(lambda x: x + 1, **whole), made),
        "to_global": said(torch.compile(lambda x: x.to_global(everyone, B) + 1, **whole), x),
        "step": said(torch.compile(opt.step, **whole)),
        "method": said(torch.compile(Trainer(m, opt).loss, **whole), x),
        "an optimizer of a library": said(optimizers[0].step),
        "an optimizer of the user's": said(optimizers[1].step),
    }


def test_fullgraph_is_refused_on_every_rank_alike() -> None:
    first, second = run_on(2, quietly, whole_graphs)
    assert first == second
    assert first.pop("an optimizer of a library") == "nothing"
    for name, text in first.items():
        assert text.startswith(
            ("CompileError: test_compiler_guard.py:", "CompileError: optimizer.py:")
        ), (name, text)
        assert all(
            word in text for word in ("fullgraph=True", "nn.Graph", "enable_compile", "force_eager")
        ), (name, text)


def warn_once(plan: str) -> tuple[list[str], float]:
    """Return the warnings of some compiled calls, and the difference from one device."""
    everyone = flow.placement.all("cpu")
    m, x = flow.parallelize(net(), everyone, plan), rows()
    wanted, far = net()(x).detach(), 0.0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            for compiled in (
                torch.compile(m, backend="eager"),
                torch.compile(lambda x: m(x), backend="eager"),
            ):
                far = max(far, float((whole(compiled(x)) - wanted).abs().max()))
    return [
        f"{os.path.basename(w.filename)} {w.category.__name__} {w.message}"
        for w in seen
        if "compile" in str(w.message)
    ], far


@pytest.mark.parametrize("plan", ["data", "tensor"])
@pytest.mark.sweep(2)
def test_one_warning_names_the_way_that_compiles(
    fresh_pool: Callable[[int], Pool], plan: str
) -> None:
    for found, far in fresh_pool(2).run(warn_once, plan):
        assert len(found) == 1
        assert found[0].startswith("test_compiler_guard.py CompileWarning torch.compile")
        assert all(word in found[0] for word in ("nn.Graph", "enable_compile"))
        assert far <= 1e-12


def frames() -> int:
    return int(torch._dynamo.utils.counters["frames"]["ok"])


def test_code_on_plain_tensors_is_compiled_as_ever() -> None:
    """Plain code is compiled, including modules that were global in between, and code shared with
    global objects."""
    torch._dynamo.reset()
    alone, other, x = net(), net(), rows()

    def through(x: torch.Tensor) -> torch.Tensor:
        return Trainer(alone, None).state.m(x)  # type: ignore[no-any-return]

    run = torch.compile(through, backend="eager")
    alone.to_global(flow.placement.all("cpu"), B)  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(x).is_global  # type: ignore[attr-defined]
        assert torch.compile(alone, backend="eager")(x).is_global
    before = frames()
    torch.compile(other, backend="eager")(x)
    assert frames() == before + 1
    alone.to_local()  # type: ignore[operator]
    before = frames()
    assert torch.equal(run(x), alone(x))
    assert not run(x).is_global  # type: ignore[attr-defined]
    assert frames() > before
    wanted = alone(x).detach()
    # code compiled for plain parameters must not run on global ones
    alone.to_global(flow.placement.all("cpu"), B)  # type: ignore[operator]
    assert run(x).is_global  # type: ignore[attr-defined]
    assert float((whole(run(x)) - wanted).abs().max()) < 1e-12


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.SyncBatchNorm(8).eval(),
        lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU()),
        lambda: nn.LayerNorm(8),
    ],
)
def test_torchs_modules_that_this_library_wraps_are_compiled_whole(
    make: Callable[[], nn.Module],
) -> None:
    torch._dynamo.reset()
    m, x = make(), torch.randn(4, 8)
    assert torch.allclose(torch.compile(m, backend="eager", fullgraph=True)(x), m(x))


def compiled_autograd(start: None) -> float:
    wanted = trained("by_function", None)
    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return max(
            differs(trained(s, "tensor", backend="eager"), wanted)
            for s in ("by_function", "by_forward")
        )


def test_compiled_autograd_leaves_global_gradients_alone() -> None:
    assert max(run_on(2, compiled_autograd, None)) <= 1e-12


@pytest.mark.extended  # test_importing_prints_nothing_and_starts_nothing asks for it too
def test_importing_does_not_import_the_compiler() -> None:
    program = (
        "import sys, globaltensor; assert 'torch._dynamo' not in sys.modules and "
        "'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
