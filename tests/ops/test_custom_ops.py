"""Tests of operators that programs make with torch.library: rules under every spelling, operators
without a function for fake tensors, and operators that write into arguments."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bodies import Bodies, values
from support.pool import run_on
from torch import Tensor

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value
from globaltensor._ops.rules import RULES
from globaltensor.boxing import log
from globaltensor.distributed.communicator import record_collectives
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GlobalTensorError, PlacementError

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
BODIES = Bodies()
on = BODIES.on
SPACE = "globaltensor_tests"
lock = threading.Lock()
known: dict[str, Any] = {}
library = torch.library.Library(SPACE, "FRAGMENT")


#: Each part has every third body. All bodies also run on simulated ranks.
PARTS_ON_PROCESSES = 3


def on_processes(part: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flow.errors.FallbackWarning)
        BODIES.run(part, PARTS_ON_PROCESSES)


@pytest.mark.parametrize("part", range(PARTS_ON_PROCESSES))
@pytest.mark.sweep(PARTS_ON_PROCESSES)
def test_on_processes(part: int) -> None:
    run_on(2, on_processes, part)


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    before = dict(RULES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flow.errors.FallbackWarning)
        yield
    RULES.clear()
    RULES.update(before)


def everywhere() -> Any:
    return flow.placement.all("cpu")


def laid_out(value: Tensor, sbp: Any, where: Any = None) -> Any:
    where = where or everywhere()
    return value.to_global(where, [B] * where.axes).to_global(sbp=sbp).detach().clone()  # type: ignore[attr-defined]


def same(got: Any, want: Tensor) -> None:
    torch.testing.assert_close(
        gather_global_value(got) if got.is_global else got.detach(), want, rtol=1e-12, atol=1e-13
    )


def once(name: str, make: Callable[[str], Any]) -> Any:
    """Return the operator called `name`. The first simulated rank (a thread of this process) makes
    it."""
    with lock:
        if name not in known:
            known[name] = make(name)
        return known[name]


# -------------------------------------------------------------------------------------------- rules


def squared(x: Tensor) -> Tensor:
    return x * x


def custom_op(name: str, made: Callable[..., Any] = torch.library.custom_op) -> Any:
    op = made(f"{SPACE}::{name}", squared, mutates_args=())
    if made is torch.library.custom_op:
        op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return op


def triton_op(name: str) -> Any:
    return custom_op(name, torch.library.triton_op)


def defined(name: str) -> Any:
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, squared, "CPU")
    library._register_fake(name, torch.empty_like)
    qualified = f"{SPACE}::{name}"
    torch.library.register_autograd(
        qualified,
        lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return getattr(getattr(torch.ops, SPACE), name)


SPELLINGS: dict[str, Callable[[Any, str], Any]] = {
    "itself": lambda op, name: op,
    "packet": lambda op, name: getattr(getattr(torch.ops, SPACE), name),
    "overload": lambda op, name: getattr(getattr(torch.ops, SPACE), name).default,
    "name": lambda op, name: f"{SPACE}::{name}",
}


@on()
def test_a_rule_is_found_under_every_spelling() -> None:
    for make, declared in itertools.product((custom_op, triton_op, defined), SPELLINGS):
        name = f"squared_{make.__name__}_{declared}"
        op = once(name, make)
        flow.rule(SPELLINGS[declared](op, name), "a b -> a b")
        for called in ("itself", "packet", "overload"):
            function = SPELLINGS[called](op, name)
            for sbp in (S(0), S(1), B, P):
                x = laid_out(values(5, 3), sbp).requires_grad_()
                with flow.boxing_log() as seen:
                    y = function(x)
                assert y.sbp == (sbp,) if sbp is not P else y.sbp != (P,), (make, declared, called)
                assert len(seen) == (sbp is P)
                same(y, values(5, 3).square())
                y.sum().backward()
                same(x.grad, values(5, 3) * 2)


class Squares(flow.nn.Graph):
    """A graph of one operator, with the gradient of its operand if that is wanted."""

    def __init__(self, op: Any, x: Any) -> None:
        super().__init__()
        self.op, self.held = op, torch.nn.Module()
        self.held.w = torch.nn.Parameter(x)
        self.add_optimizer(torch.optim.SGD(self.held.parameters(), lr=1.0))

    def build(self) -> Any:
        y = self.op(self.held.w)
        y.sum().backward()
        return y


def moved(program: Callable[[], Any]) -> list[tuple[str, int]]:
    with record_collectives() as log:
        program()
    return [(t.kind, t.bytes) for t in log]


def rule_in_a_graph() -> dict[str, list[Any]]:
    """Return the traffic of a step, in a graph and without one, before and after the rule."""
    found, before = {}, dict(RULES)
    op = custom_op("squared_in_a_graph")
    for declared in (False, True):
        if declared:
            flow.rule(op, "a b -> a b")
        for sbp in (S(0), S(1)):
            x = laid_out(values(5, 3), sbp)
            graph = Squares(op, x.clone())
            graph()
            found[f"graph {sbp} {declared}"] = moved(graph)
            same(graph.held.w.detach(), values(5, 3) * (1 - 2) * (1 - 2))
            y = graph()
            assert not declared or y.sbp == (sbp,)
            same(y, values(5, 3).square())
            leaf = x.requires_grad_()
            found[f"eager {sbp} {declared}"] = moved(lambda leaf=leaf: op(leaf).sum().backward())
    RULES.clear()
    RULES.update(before)
    return found


def quietly(body: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flow.errors.FallbackWarning)
        return body()


def test_a_graph_uses_the_rule() -> None:
    first, other = run_on(2, quietly, rule_in_a_graph)
    assert first == other
    for program, traffic in first.items():
        if program.endswith("True"):
            assert traffic == [], program
        else:
            assert [kind for kind, _ in traffic] == ["all_gather", "reduce_scatter"], program


def pair(x: Tensor, others: list[Tensor], scale: float = 2.0) -> tuple[Tensor, Tensor]:
    return x * scale, others[0] @ others[1]


def pair_op(name: str) -> Any:
    op = torch.library.custom_op(f"{SPACE}::{name}", pair, mutates_args=())
    op.register_fake(lambda x, others, scale=2.0: (torch.empty_like(x), others[0] @ others[1]))
    return op


@on()
def test_operands_in_lists() -> None:
    op = once("pair", pair_op)
    flow.rule(op, "a b, a c, c d -> a b, a d", linear=[[0, 1]])
    data = values(4, 3), values(4, 5), values(5, 2)
    want = pair(data[0], [*data[1:]], 3.0)
    for sbp, expected in ((S(0), (S(0), S(0))), (B, (B, B)), (P, (P, P))):
        x, first = (laid_out(t, sbp) for t in data[:2])
        got = op(x, [first, data[2]], scale=3.0)
        assert tuple(g.sbp[0] for g in got) == expected
        for g, w in zip(got, want, strict=True):
            same(g, w)


def test_targets_that_no_rule_is_found_for_are_refused() -> None:
    with pytest.raises(
        GlobalTensorError,
        match="neither a function of torch nor an operator has the name 'nonesuch'",
    ):
        flow.rule("nonesuch", "a -> a")
    with pytest.raises(GlobalTensorError, match="neither a function of torch nor an operator"):
        flow.rule(f"{SPACE}::nonesuch", "a -> a")
    for target in (squared, torch.nn.Linear, torch.autograd.Function):
        with pytest.raises(GlobalTensorError, match=r"would never be found.*local_map"):
            flow.rule(target, "a -> a")


# --------------------------------------------------------------------- no function for fake tensors


@torch.library.custom_op(f"{SPACE}::unfaked", mutates_args=())
def unfaked(x: Tensor) -> Tensor:
    return x * x


@torch.library.custom_op(f"{SPACE}::places", mutates_args=())
def places(x: Tensor) -> Tensor:
    return x.flatten().nonzero()


@places.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(), 1), dtype=torch.int64)


@on()
def test_operators_without_fakes_run_on_whole_tensors() -> None:
    for sbp in (B, S(0), P):
        same(unfaked(laid_out(values(5, 3), sbp)), values(5, 3).square())
        same(places(laid_out(values(5, 3).relu(), sbp)), values(5, 3).relu().flatten().nonzero())


def test_ranks_outside_know_what_came_out() -> None:
    def on_ranks() -> None:
        where = flow.placement("cpu", [0, 2])
        same(unfaked(laid_out(values(5, 3), S(0), where)), values(5, 3).square())
        same(
            places(laid_out(values(5, 3).relu(), S(0), where)),
            values(5, 3).relu().flatten().nonzero(),
        )

    simulate(3, on_ranks)


def test_the_rule_of_an_operator_without_a_fake_says_what_to_add() -> None:
    flow.rule(unfaked, "a b -> a b")

    def on_ranks() -> None:
        with pytest.raises(
            GlobalTensorError,
            match=r"the shape of the operator's result is unknown.*register_fake.*local_map",
        ):
            unfaked(laid_out(values(5, 3), S(0)))

    simulate(2, on_ranks)


class Unfaked(flow.nn.Graph):
    """A graph of an operator without a fake."""

    def build(self, x: Tensor) -> Tensor:
        return unfaked(x)


def asked_for_fakes() -> list[str]:
    """Return the errors of an operator without a fake: in a graph, and with a rule."""

    def told(call: Callable[[], Any]) -> str:
        with pytest.raises(RuntimeError) as error:
            call()
        return str(error.value)

    before, x = dict(RULES), laid_out(values(5, 3), S(0))
    same(unfaked(x), values(5, 3).square())
    found = [told(lambda: Unfaked()(x)), told(lambda: Unfaked()(values(5, 3)))]
    flow.rule(unfaked, "a b -> a b")
    found += [told(lambda: unfaked(x)), told(lambda: Unfaked()(x))]
    RULES.clear()
    RULES.update(before)
    return found


def test_ranks_ask_for_a_fake_alike() -> None:
    first, other = run_on(2, quietly, asked_for_fakes)
    assert first == other
    for text in first:
        assert "register_fake" in text


def test_a_graph_asks_for_a_fake() -> None:
    class Step(flow.nn.Graph):
        def build(self, x: Tensor) -> Tensor:
            return unfaked(x)

    with pytest.raises(RuntimeError, match="register_fake"):
        Step()(values(5, 3))


# ----------------------------------------------------------------------------- operators that write


@torch.library.custom_op(f"{SPACE}::add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor, scale: float = 1.0) -> None:
    x.add_(y, alpha=scale)


@torch.library.custom_op(f"{SPACE}::add_rows", mutates_args=("total",))
def add_rows(x: Tensor, total: Tensor) -> Tensor:
    total.add_(x.sum(0))
    return x * 2


@add_rows.register_fake
def _(x: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{SPACE}::add_each", mutates_args=("xs",))
def add_each(xs: list[Tensor], y: Tensor) -> None:
    for x in xs:
        x.add_(y)


library.define("scale_(Tensor(a!) x, float by) -> Tensor(a!)")
library.impl("scale_", lambda x, by: x.mul_(by), "CompositeExplicitAutograd")
scale_ = getattr(torch.ops, SPACE).scale_
KINDS = (None, B, S(0), S(1), P)


def written(where: Any) -> None:
    """Compare each writing operator, on plain and global tensors, with itself on one device."""
    layouts = [None, *[[e] * where.axes for e in KINDS[1:]]]
    for a, b in itertools.product(layouts, repeat=2):
        if a is b is None:
            continue
        x, y, total = values(4, 3), values(4, 3, seed=1), values(3, seed=2)
        ours = [
            t.clone() if sbp is None else laid_out(t, sbp, where) for t, sbp in ((x, a), (y, b))
        ]
        assert add_into(*ours, scale=0.5) is None  # type: ignore[func-returns-value]
        same(ours[0], x + 0.5 * y)
        same(ours[1], y)
        add_each([ours[0], ours[1]], ours[0] * 1)
        same(ours[0], 2 * (x + 0.5 * y))
        same(ours[1], y + x + 0.5 * y)
        rows = (
            total.clone()
            if b is None
            else laid_out(total, [e if e != S(1) else S(0) for e in b], where)
        )
        first = x.clone() if a is None else laid_out(x, a, where)
        same(add_rows(first, rows), x * 2)
        same(rows, total + x.sum(0))
        if a is not None:
            z = laid_out(x, a, where)
            assert scale_(z, 3.0) is z
            assert list(z.sbp) == a
            same(z, x * 3)
            base = laid_out(x, a, where)
            row = base[1]
            add_into(row, total)
            want = x.clone()
            want[1] += total
            same(base, want)
            same(row, want[1])
            add_into(base, y)
            same(row, want[1] + y[1])
            leaf = laid_out(x, a, where).requires_grad_()
            add_into(leaf, y)  # PyTorch lets operators write into leaves
            same(leaf.detach(), x + y)
            assert leaf.is_leaf


@on()
def test_what_operators_write_into_arguments() -> None:
    written(everywhere())


library.define("add_one_(Tensor(a!) x) -> ()")
library.define("rest(Tensor(a) x) -> Tensor(a)")
library.define("second(Tensor x, Tensor(a) y) -> Tensor(a)")
library.define("row_and_sum(Tensor(a) x) -> (Tensor(a), Tensor)")
library.define("rows_of_all(Tensor(a)[] x) -> Tensor(a)[]")
DEFINED_VIEWS: dict[str, Any] = {
    "second": lambda x, y: y[1:],
    "row_and_sum": lambda x: (x[1], x.sum(0)),
    "rows_of_all": lambda x: [t[1] for t in x],
}
for _name, _function in DEFINED_VIEWS.items():
    library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"{SPACE}::{_name}", _function, lib=library)
library.impl("add_one_", lambda x: [x.add_(1), None][1], "CPU")
library.impl("rest", lambda x: x[1:], "CPU")
torch.library.register_fake(f"{SPACE}::add_one_", lambda x: None, lib=library)
torch.library.register_fake(f"{SPACE}::rest", lambda x: x[1:], lib=library)
DEFINED: Any = getattr(torch.ops, SPACE)


@on()
def test_a_kernel_whose_writes_autograd_sees_does_not_write_into_leaves() -> None:
    for sbp in (B, S(0), S(1), P):
        x = laid_out(values(4, 3), [sbp]).requires_grad_()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used"):
            DEFINED.add_one_(x)
        same(x.detach(), values(4, 3))
        with torch.no_grad():
            DEFINED.add_one_(x)
        same(x.detach(), values(4, 3) + 1)


@on()
def test_what_is_written_into_the_view_of_an_operator_is_in_its_base() -> None:
    for sbp in (B, S(0), S(1), P):
        x = laid_out(values(4, 3), [sbp])
        rest = DEFINED.rest(x)
        rest.mul_(2)
        want = values(4, 3)
        want[1:] *= 2
        same(x, want)
        x.add_(1)
        same(rest, want[1:] + 1)


def _written_views(call: Any, make: Any) -> list[Any]:
    """Return the tensors after writes into the results of operators, and the results after writes
    into the tensors."""
    x, y = make(), make()
    view = call("second", x, y)
    view.mul_(2)
    row, total = call("row_and_sum", x)
    row.add_(1)
    total.mul_(3)
    first, second = call("rows_of_all", [x, y])
    second.sub_(5)
    found = [t.numpy().tolist() for t in (x, y, view, row, total, first, second)]
    x.add_(1)
    y.mul_(2)
    return found + [t.numpy().tolist() for t in (x, y, view, row, total, first, second)]


@on()
def test_a_result_is_a_view_of_the_argument_that_its_schema_names() -> None:
    want = _written_views(lambda name, *args: DEFINED_VIEWS[name](*args), lambda: values(4, 3))
    for sbp in (B, S(0), S(1), P):
        found = _written_views(
            lambda name, *args: getattr(DEFINED, name)(*args),
            lambda sbp=sbp: laid_out(values(4, 3), [sbp]),  # type: ignore[misc]
        )
        torch.testing.assert_close(found, want)


@on()
def test_a_tensor_that_is_passed_twice_is_one_tensor() -> None:
    for sbp in (B, S(0), S(1), P):
        x = laid_out(values(4, 3), [sbp])
        add_each([x, x], laid_out(values(4, 3, seed=1), [sbp]))
        same(x, values(4, 3) + 2 * values(4, 3, seed=1))
        y = laid_out(values(4, 3), [sbp])
        add_into(y, y)
        same(y, values(4, 3) * 2)


def test_what_operators_write_on_four_ranks() -> None:
    simulate(4, lambda: written(flow.placement("cpu", [[0, 1], [2, 3]])))


def test_ranks_outside_have_what_was_written_into_plain_tensors() -> None:
    simulate(3, lambda: written(flow.placement("cpu", [0, 2])))


def with_rules() -> None:
    written(everywhere())
    for sbp in (S(0), S(1), B):
        x, y = laid_out(values(4, 3), sbp), laid_out(values(4, 3, seed=1), sbp)
        with log.no_boxing():
            add_into(x, y)
            scale_(x, 2.0)
        same(x, 2 * (values(4, 3) + values(4, 3, seed=1)))
    columns, total = laid_out(values(4, 3), S(1)), laid_out(values(3, seed=2), S(0))
    with log.no_boxing():
        assert add_rows(columns, total).sbp == (S(1),)
    same(total, values(3, seed=2) + values(4, 3).sum(0))
    rows, total = laid_out(values(4, 3), S(0)), laid_out(values(3, seed=2), B)
    add_rows(rows, total)  # the rows of one rank are not sufficient
    same(total, values(3, seed=2) + values(4, 3).sum(0))


def declare() -> None:
    flow.rule(add_into, "a b, a b -> ", linear=[[0, 1]])
    flow.rule(add_rows, "a b, b -> a b", linear=[[0, 1]])
    flow.rule(scale_, "a b -> a b", linear=[[0]])


def test_rules_of_operators_that_write() -> None:
    declare()
    simulate(2, with_rules)


def declared_on_processes() -> None:
    before = dict(RULES)
    declare()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", flow.errors.FallbackWarning
        )  # the operands do not have the dims of the rule
        with_rules()
    RULES.clear()
    RULES.update(before)


def test_rules_of_operators_that_write_on_processes() -> None:
    run_on(2, declared_on_processes)


@on()
def test_a_graph_with_an_operator_that_writes() -> None:
    class Step(flow.nn.Graph):
        def build(self, x: Tensor) -> Tensor:
            y = x * 1
            add_into(y, x, 2.0)
            return y * x

    for sbp in (B, S(0), P):
        graph = Step()
        for seed in range(2):
            same(
                graph(laid_out(values(4, 3, seed=seed), sbp)), values(4, 3, seed=seed).square() * 3
            )


def test_arguments_of_several_placements_are_refused() -> None:
    def on_ranks() -> None:
        x, y = (laid_out(values(4, 3), S(0), flow.placement("cpu", [r])) for r in range(2))
        with pytest.raises(PlacementError):
            add_into(x, y)

    simulate(2, on_ranks)
