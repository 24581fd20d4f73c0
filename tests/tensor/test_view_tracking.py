"""Tests of views and writes into them: a view shows its base's writes, and the base the view's,
wherever their local tensors are."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.bodies import values
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
PLACEMENTS = {
    (2,): [[B], [S(0)], [S(1)]],
    (3,): [[S(0)], [S(1)]],
    (2, 2): [[S(0), S(1)], [S(0), S(0)], [B, S(1)]],
}

#: Functions from a tensor with dims to views of it. If one needs more dims or rows, it returns `x`.
VIEWS: dict[str, Callable[[Any], list[Any]]] = {
    "first": lambda x: [x[0]],
    "last": lambda x: [x[-1]],
    "number": lambda x: [x[torch.tensor(0)]],
    "rows": lambda x: [x[1:]],
    "steps": lambda x: [x[::2]],
    "columns": lambda x: [x[..., :1]],
    "new": lambda x: [x[None]],
    "select": lambda x: [x.select(0, 0)],
    "narrow": lambda x: [x.narrow(-1, 0, 1)],
    "transpose": lambda x: [x.transpose(0, -1)],
    "chunk": lambda x: list(x.chunk(2)),
    "split": lambda x: list(x.split(1, dim=-1)),
    "unbind": lambda x: list(x.unbind(0)),
    "unsqueeze": lambda x: [x.unsqueeze(0)],
    "unflatten": lambda x: [x.unflatten(0, (1, -1))],
    "diagonal": lambda x: [x.diagonal()] if x.dim() > 1 else [x],
    "detach": lambda x: [x.detach()],
    "data": lambda x: [x.data],
}
WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, n: x.add_(n),
    "imul": lambda x, n: x.__imul__(n),
    "fill": lambda x, n: x.fill_(n),
    "zero": lambda x, n: x.zero_(),
    "copy": lambda x, n: x.copy_(x * n),
    "item": lambda x, n: x.__setitem__(0, n) if x.dim() else x.fill_(n),
    "foreach": lambda x, n: torch._foreach_add_([x], float(n)),
    "relu": lambda x, n: torch.relu_(x.sub_(n)),
    "normal": lambda x, n: x.normal_(generator=torch.Generator().manual_seed(n)),
    "out": lambda x, n: torch.add(x, n, out=x),
    "unsqueeze_": lambda x, n: x.unsqueeze_(0),
    "transpose_": lambda x, n: x.transpose_(0, -1) if x.dim() else x,
}

steps = st.lists(
    st.one_of(
        st.tuples(st.just("view"), st.integers(0, 20), st.sampled_from(sorted(VIEWS))),
        st.tuples(st.just("write"), st.integers(0, 20), st.sampled_from(sorted(WRITES))),
        st.tuples(st.just("read"), st.integers(0, 20), st.just("")),
    ),
    min_size=2,
    max_size=9,
).filter(
    lambda program: (
        not {"transpose", "transpose_", "diagonal", "normal"} & {name for *_, name in program}
        > {"normal"}
    )
)  # normal_ draws in memory order


def played(x: Any, program: list[tuple[str, int, str]]) -> list[Any]:
    """Return all tensors of a program, and the values it read."""
    tensors, read = [x], []
    for number, (kind, which, name) in enumerate(program, 2):
        t = tensors[which % len(tensors)]
        if kind == "view" and t.dim() and t.numel():
            tensors += VIEWS[name](t)
        elif kind == "write":
            WRITES[name](t, number)
        elif kind == "read":
            read.append(t * 2)
    return tensors + read


def check_a_program_of_views_and_writes(
    program: list[tuple[str, int, str]], shape: tuple[int, ...], where: tuple[int, ...], data: Any
) -> None:
    fitting = [
        sbp for sbp in PLACEMENTS[where] if all(not e.is_split or e.dim < len(shape) for e in sbp)
    ]
    sbp, size = data.draw(st.sampled_from(fitting)), torch.Size(where).numel()
    want = played(values(*shape), program)

    def on_ranks() -> None:
        placement = flow.placement("cpu", torch.arange(size).view(where).tolist())
        got = played(
            values(*shape).to_global(placement, [B] * len(where)).to_global(sbp=sbp), program
        )
        assert len(got) == len(want)
        for mine, plain in zip(got, want, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine.numpy()), plain)

    simulate(size, on_ranks)


programs = given(
    program=steps,
    shape=st.sampled_from([(4, 3), (5, 2), (2, 3, 2), (1, 4), (6,)]),
    where=st.sampled_from(sorted(PLACEMENTS)),
    data=st.data(),
)


@pytest.mark.long
@programs
@settings(max_examples=50)
def test_a_program_of_views_and_writes(program: Any, shape: Any, where: Any, data: Any) -> None:
    check_a_program_of_views_and_writes(program, shape, where, data)


@pytest.mark.extended
@programs
@settings(max_examples=200)
def test_many_programs_of_views_and_writes(program: Any, shape: Any, where: Any, data: Any) -> None:
    check_a_program_of_views_and_writes(program, shape, where, data)


#: Views that torch allows writes into while gradients are recorded.
DIFFERENTIABLE = [
    name for name in VIEWS if name not in ("chunk", "split", "unbind", "detach", "data")
]
gradual = steps.map(
    lambda program: [s for s in program if s[0] != "view" or s[2] in DIFFERENTIABLE]
).map(
    lambda program: [
        s
        for s in program
        if s[2] not in ("out", "foreach", "copy", "relu", "unsqueeze_", "transpose_")
    ]
)


def check_gradients_through_a_program(program: list[tuple[str, int, str]], sbp: Any) -> None:
    def gradient(leaf: Any) -> Any:
        found = played(leaf * 1, program)
        sum((t * (i + 1)).sum() for i, t in enumerate(found)).backward()
        return leaf.grad

    want = gradient(values(4, 3).requires_grad_())

    def on_ranks() -> None:
        got = gradient(
            values(4, 3)
            .to_global(flow.placement("cpu", [0, 1]), B)
            .to_global(sbp=sbp)
            .requires_grad_()
        )
        torch.testing.assert_close(torch.from_numpy(got.numpy()), want)

    simulate(2, on_ranks)


gradual_programs = given(program=gradual, sbp=st.sampled_from([B, S(0), S(1)]))


@pytest.mark.long
@gradual_programs
@settings(max_examples=25)
def test_gradients_through_a_program(program: Any, sbp: Any) -> None:
    check_gradients_through_a_program(program, sbp)


@pytest.mark.extended
@gradual_programs
@settings(max_examples=100)
def test_gradients_through_many_programs(program: Any, sbp: Any) -> None:
    check_gradients_through_a_program(program, sbp)


class Played(flow.nn.Graph):
    def __init__(self, program: list[tuple[str, int, str]]) -> None:
        super().__init__()
        self.program = program

    def build(self, x: Any) -> Any:
        return tuple(played(x * 1, self.program))


def check_in_a_graph(program: list[tuple[str, int, str]], sbp: Any) -> None:
    want = played(values(4, 3), program)

    def on_ranks() -> None:
        x = values(4, 3).to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=sbp)
        for mine, plain in zip(Played(program)(x), want, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine.numpy()), plain)

    simulate(2, on_ranks)


in_graphs = given(
    program=steps.map(lambda program: [s for s in program if s[2] != "normal"]),
    sbp=st.sampled_from([B, S(0), S(1)]),
)


@pytest.mark.long
@in_graphs
@example(program=[("view", 0, "chunk"), ("write", 0, "add"), ("read", 1, "")], sbp=S(0))
@example(program=[("view", 0, "chunk"), ("view", 0, "number")], sbp=S(1))
@settings(max_examples=20)
def test_a_program_in_a_graph(program: list[tuple[str, int, str]], sbp: Any) -> None:
    check_in_a_graph(program, sbp)


@pytest.mark.extended
@in_graphs
@settings(max_examples=200)
def test_many_programs_in_a_graph(program: list[tuple[str, int, str]], sbp: Any) -> None:
    check_in_a_graph(program, sbp)


def test_an_optimizers_step_shows_in_views() -> None:
    def on_ranks() -> None:
        placement = flow.placement("cpu", [0, 1])
        for make in (torch.optim.SGD, torch.optim.Adam):
            weight = torch.nn.Parameter(flow.ones(4, 3, placement=placement, sbp=S(0)))
            row, optimizer = weight.detach()[1], make([weight], lr=0.5)

            def closure(weight: Any = weight, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = (weight * weight).sum()
                loss.backward()
                return loss

            closure(), optimizer.step()
            assert row.numpy().tolist() == weight.detach().numpy()[1].tolist() != [1.0] * 3

    simulate(2, on_ranks)


#: Views of a tensor of 5 x 3, with a layout in which they need communication on two ranks.
MOVED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "row": (S(0), lambda x: x[1]),
    "rows": (S(0), lambda x: x[2:]),
    "row of flat": (S(1), lambda x: x.view(15)[3:6]),
}


def _answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except RuntimeError as error:
        return str(error).partition(": ")[2] or str(error)


def _state(x: Any) -> list[Any]:
    """Return the flags and values of a tensor, or torch's refusal of a question."""
    return [
        _answer(lambda: x.requires_grad),
        _answer(lambda: x.is_leaf),
        _answer(lambda: (x * 2).requires_grad),
        x.detach().numpy().tolist(),
    ]


def _grads(loss: Any, *leaves: Any) -> list[Any]:
    loss.backward()
    return [None if x.grad is None else x.grad.numpy().tolist() for x in leaves]


def _base_written(make: Callable[[], Any], view: Callable[[Any], Any]) -> list[Any]:
    leaf, base = make().requires_grad_(), make()
    v = view(base)
    base.mul_(leaf)
    return [*_state(v), *_grads((v * v).sum() + (base * 3).sum(), leaf)]


def _view_written(make: Callable[[], Any], view: Callable[[Any], Any]) -> list[Any]:
    leaf, base = make().requires_grad_(), make()
    v, other = view(base), view(base)
    v.mul_(view(leaf))
    states = [*_state(v), *_state(base), *_state(other)]
    return states + _grads((base * base).sum() + (other * other).sum() + v.sum(), leaf)


def _view_of_view_written(make: Callable[[], Any], view: Callable[[Any], Any]) -> list[Any]:
    leaf, base = make().requires_grad_(), make()
    v = view(base)
    v[:1].add_(leaf.sum())
    return [*_state(v), *_state(base), *_grads((base * base).sum() + v.sum(), leaf)]


def _base_becomes_a_leaf(make: Callable[[], Any], view: Callable[[Any], Any]) -> list[Any]:
    base = make()
    v = view(base)
    base.requires_grad_()
    with torch.no_grad():
        base.add_(1)
    return [*_state(v), *_grads((v * 2).sum() + (base * 3).sum(), base)]


def _detached(make: Callable[[], Any], view: Callable[[Any], Any]) -> list[Any]:
    leaf, base = make().requires_grad_(), make()
    v, w = view(base).detach(), view(base.detach())
    base.mul_(leaf)
    states = [*_state(v), *_state(w)]
    v.mul_(view(leaf))
    return [*states, *_state(base), *_state(w), *_grads((base * 3).sum(), leaf)]


def _gradient_retained(make: Callable[[], Any], view: Callable[[Any], Any]) -> list[Any]:
    leaf = make().requires_grad_()
    base = leaf * 2
    v = view(base)
    v.retain_grad()
    base.mul_(3)
    return _grads((v * v).sum() + base.sum(), v, leaf)


HISTORIES = {
    f.__name__: f
    for f in (
        _base_written, _view_written, _view_of_view_written, _base_becomes_a_leaf, _detached,
        _gradient_retained,
    )
}  # fmt: skip


def _made_without_gradients(then: str, leaf: bool) -> Callable[..., list[Any]]:
    def run(make: Callable[[], Any], view: Callable[[Any], Any]) -> list[Any]:
        weight = make().requires_grad_()
        base = make() if then == "base gets a graph" else weight if leaf else weight * 1
        with torch.no_grad():
            v = view(base)
        before = _state(v)
        with torch.set_grad_enabled("without" not in then):
            write = {
                "": lambda: None,
                "view": lambda: v.add_(1),
                "view without": lambda: v.add_(1),
                "base without": lambda: base.add_(1),
                "detached": lambda: v.detach().add_(1),
                "base gets a graph": lambda: base.add_(weight),
                "base": lambda: base.add_(1),
                "leaf": lambda: v.requires_grad_(),
            }[then]
            refused = _answer(lambda: write() is None)
        return [before, refused, _state(v), v.detach().numpy().tolist(), base.requires_grad]

    return run


HISTORIES.update(
    {
        f"without gradients, {then or 'nothing'}, {'leaf' if leaf else 'computed'}": (
            _made_without_gradients(then, leaf)
        )
        for then in (
            "", "view", "view without", "base without", "detached", "base gets a graph", "base",
            "leaf",
        )
        for leaf in (True, False)
        if then not in ("base", "leaf") or leaf == (then == "leaf")
    }
)  # fmt: skip


def _leaf_view(then: str) -> Callable[..., list[Any]]:
    def run(make: Callable[[], Any], view: Callable[[Any], Any]) -> list[Any]:
        base = make()
        v = view(base).requires_grad_()
        if then == "base":
            base.add_(1)
        elif then == "base without":
            with torch.no_grad():
                base.add_(1)
        elif then == "view":
            with torch.no_grad():
                v.mul_(2)
        elif then == "step":
            (v * v).sum().backward()
            torch.optim.SGD([v], 0.25).step()
            v.grad = None
        elif then == "no leaf":
            base.add_(1)
            v.requires_grad_(False)
            base.add_(1)
            return [*_state(v), *_state(base)]
        return [*_state(v), *_state(base), *_grads((v * v).sum(), v), *_state(view(base))]

    return run


HISTORIES.update(
    {
        f"a leaf, {then}": _leaf_view(then)
        for then in ("base", "base without", "view", "step", "no leaf")
    }
)


def histories_on_ranks() -> list[Any]:
    placement = flow.placement.all("cpu")
    return [
        run(lambda sbp=sbp: _five().to_global(placement, B).to_global(sbp=sbp).detach(), view)  # type: ignore[misc]
        for run in HISTORIES.values()
        for sbp, view in MOVED.values()
    ]


def _five() -> Any:
    return torch.arange(15.0).view(5, 3).clone()


def test_a_view_has_the_flags_and_gradients_of_one_device() -> None:
    """The base or the view changes after the view was made: by a write, or into a leaf."""
    first, second = run_on(2, histories_on_ranks)
    assert first == second
    found = iter(first)
    for name, run in HISTORIES.items():
        for view_name, (_, view) in MOVED.items():
            assert next(found) == run(_five, view), (name, view_name)


@pytest.mark.parametrize("sbp", [S(0), S(1), P, B], ids=str)
def test_a_parameter_is_made_of_any_view(sbp: Any) -> None:
    """A row or column needs communication where that dim is split."""

    def on_ranks() -> None:
        plain = torch.arange(15.0).view(5, 3)
        views: list[Callable[[Any], Any]] = [
            lambda x: x[1],
            lambda x: x[:2],
            lambda x: x[:, 0],
            lambda x: x[:, 1:].detach(),
            lambda x: x.diagonal(),
            lambda x: x.reshape(-1),
            lambda x: x.mean(0),
        ]
        for view in views:
            base = plain.to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=sbp)  # type: ignore[attr-defined]
            ours, want = torch.nn.Parameter(view(base)), torch.nn.Parameter(view(plain.clone()))
            for p in (ours, want):
                (p * p).sum().backward()
                torch.optim.SGD([p], lr=0.25).step()
            assert isinstance(ours, torch.nn.Parameter)
            assert ours.is_leaf
            assert ours.detach().numpy().tolist() == want.detach().tolist()
            assert not torch.nn.Parameter(view(base), requires_grad=False).requires_grad

    simulate(2, on_ranks)


def test_a_view_without_gradient_lets_its_graph_go() -> None:
    def on_ranks() -> None:
        x = flow.ones(4, 3, placement=flow.placement("cpu", [0, 1]), sbp=S(0)).requires_grad_()
        y = x * 2
        local = weakref.ref(y._local)  # the graph holds this tensor, so it stands for the graph
        z = y * y
        first, second = y[1].detach(), y.detach()[1]
        with torch.no_grad():
            third = y[1]
        del y, z
        assert local() is None
        assert first.sum().item() == second.sum().item() == third.sum().item() == 6.0

    simulate(2, on_ranks)


METADATA: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda x, name=name: getattr(x, name)
        for name in ("device", "requires_grad", "is_leaf", "is_meta", "layout", "is_sparse")
    },
    **{
        f"{name}()": lambda x, name=name: getattr(x, name)()
        for name in (
            "get_device", "is_inference", "is_pinned", "is_signed", "is_conj", "is_neg",
            "is_shared", "type",
        )
    },
    "torch.is_conj": lambda x: torch.is_conj(x),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("grad", [False, True])
def test_one_rank_alone_may_ask_for_the_metadata_of_a_view(name: str, grad: bool) -> None:
    def on_ranks() -> None:
        ask, rank = METADATA[name], flow.env.get_rank()
        weight = values(4, 2).to_global(flow.placement.all("cpu"), B).requires_grad_(grad)  # type: ignore[attr-defined]
        x = (weight * 1).to_global(sbp=S(1)) * 1
        view = x.view(8)  # its values are on other ranks than those of ``x``
        x.add_(1)
        alone = ask(view) if rank == 0 else None
        total = float((view * 2).sum())
        assert abs(total - float((weight + 1).sum()) * 2) < 1e-9
        if rank == 0:
            assert alone == ask(view)
            assert alone == ask((values(4, 2).requires_grad_(grad) * 1).view(8))

    simulate(2, on_ranks, timeout=20.0)
