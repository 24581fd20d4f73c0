"""Tests of a rule that is declared while the program runs. Everything derived from the previous
rules is dropped, in every thread and every cache."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import globaltensor as flow
from globaltensor.distributed.communicator import record_collectives

B, S = flow.sbp.broadcast, flow.sbp.split
BY_ROWS = "a b -> a b"

pytestmark = pytest.mark.filterwarnings("ignore::globaltensor.errors.FallbackWarning")


def function(
    during: Callable[[], object] = lambda: None, factor: bool = False
) -> Callable[..., Tensor]:
    """Return a function that no rule covers. ``during`` is called while the function is tried on
    meta tensors."""

    def doubled(x: Tensor, by: float = 2.0) -> Tensor:
        if has_torch_function((x,)):
            return (
                handle_torch_function(doubled, (x,), x, by)
                if factor
                else handle_torch_function(doubled, (x,), x)
            )  # type: ignore[no-any-return]
        if x.is_meta:
            during()
        return x * by

    return doubled


def rows() -> Any:
    return torch.arange(12.0).view(4, 3).to_global(flow.placement.all("cpu"), B).to_global(sbp=S(0))  # type: ignore[attr-defined]


def how(twice: Callable[[Tensor], Tensor], x: Any) -> str:
    """Return the traffic of a call and the sbp of its result."""
    with warnings.catch_warnings(), record_collectives() as log:
        warnings.simplefilter("ignore")
        out: Any = twice(x)
    assert torch.equal(out.to_global(sbp=B).to_local(), torch.arange(12.0).view(4, 3) * 2)
    return f"{[t.kind for t in log]} {out.sbp[0]}"


GATHERED, SPLIT = f"['all_gather'] {B}", f"[] {S(0)}"


class Other:
    """A second thread, which runs one function after another."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], Any]] = []
        self.done: list[Any] = []

    def run(self, what: Callable[[], Any]) -> Any:
        """Run `what` in the thread, wait, and return its result."""
        self.todo.append(what)
        self.given.release()
        self.taken.acquire()
        if isinstance(self.done[-1], BaseException):
            raise self.done[-1]
        return self.done[-1]

    def __enter__(self) -> Other:
        self.given, self.taken = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._work)
        self.thread.start()
        return self

    def _work(self) -> None:
        while True:
            self.given.acquire()
            if not self.todo:
                return
            try:
                self.done.append(self.todo.pop()())
            except BaseException as error:
                self.done.append(error)
            self.taken.release()

    def __exit__(self, *_: Any) -> None:
        self.given.release()
        self.thread.join()


def in_another_thread() -> list[str]:
    twice, x = function(), rows()
    with Other() as other:
        found = [other.run(lambda: how(twice, x))]
        flow.rule(twice, BY_ROWS)
        found.append(other.run(lambda: how(twice, x)))
        third = function()
        found.append(how(third, x))
        other.run(lambda: flow.rule(third, BY_ROWS))
        found.append(how(third, x))
    return found


def test_plans_of_other_threads_are_forgotten() -> None:
    assert run_on(2, in_another_thread) == [[GATHERED, SPLIT] * 2] * 2


class Declaring(flow.nn.Graph):
    """A graph that declares a rule in build()."""

    def __init__(self, twice: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.twice = [twice]

    def build(self, x: Tensor) -> Tensor:
        flow.rule(self.twice[0], BY_ROWS)
        return x + 1


def in_a_capture() -> list[str]:
    """Check plans that are set aside while a graph is captured."""
    twice, x = function(), rows()
    found = [how(twice, x)]
    Declaring(twice)(x)
    return [*found, how(twice, x)]


def test_plans_put_aside_are_forgotten() -> None:
    assert run_on(2, in_a_capture) == [[GATHERED, SPLIT]] * 2


def while_planning() -> list[str]:
    """Declare the rule while a call is being planned under the previous rules. The function is
    called once more than it is tried."""
    declare: list[Callable[[], object]] = []
    twice, x = function(lambda: [f() for f in declare]), rows()

    def once() -> None:
        declare.clear()
        flow.rule(twice, BY_ROWS)

    declare.append(once)
    return [how(twice, x), how(twice, x)]


def test_a_plan_that_is_being_made_is_not_kept() -> None:
    assert run_on(2, while_planning) == [[GATHERED, SPLIT]] * 2


def numbers() -> tuple[list[float], list[float]]:
    """Replace a rule whose plan ignores numbers by one whose plan depends on numbers, and check
    both."""
    times, x = function(factor=True), rows()

    def by_number(op: Any, x: Any, by: float) -> None:
        op.set(x, tuple(range(x.ndim)))
        op.out = [tuple(range(x.ndim))]
        op.local = lambda split: lambda x, _: x * by  # the number is fixed in the plan

    flow.rule(times, BY_ROWS, scalars=True)
    first = [float(times(x, by)[0, 1]) for by in (2.0, 3.0)]
    flow.rule(times)(by_number)
    return first, [float(times(x, by)[0, 1]) for by in (2.0, 3.0)]


def test_whether_numbers_matter_is_told_by_the_last_rule() -> None:
    assert run_on(2, numbers) == [([2.0, 3.0], [2.0, 3.0])] * 2


class Calling(flow.nn.Graph):
    def __init__(self, twice: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.twice = [twice]

    def build(self, x: Tensor) -> Tensor:
        return self.twice[0](x)


def in_a_graph() -> list[str]:
    twice, x = function(), rows()
    graph = Calling(twice)
    found = [how(graph, x)]
    flow.rule(twice, BY_ROWS)
    return [*found, how(graph, x), how(graph, x)]


def test_graphs_are_captured_again() -> None:
    assert run_on(2, in_a_graph) == [[GATHERED, SPLIT, SPLIT]] * 2


class Between(nn.Module):
    def __init__(self, twice: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.twice = nn.Linear(512, 512), nn.Linear(512, 512), twice

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.twice(self.up(x)))  # type: ignore[no-any-return]


def test_the_search_asks_again() -> None:
    model, x = Between(twice := function()), torch.empty(4096, 512)
    before = flow.auto.plan(model, x, "dgx-h100", mesh=(8,))
    flow.rule(twice, BY_ROWS)
    assert flow.auto.plan(model, x, "dgx-h100", mesh=(8,)).cost < before.cost
