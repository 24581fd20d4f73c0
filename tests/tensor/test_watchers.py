"""Tests of code that observes intermediate gradients. It sees the true gradients and slows down
only the observed passes, not later ones."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from test_deferred_mean import traffic
from torch import Tensor, nn

import globaltensor as flow
from globaltensor._ops.rules.deferred_mean import DeferredMean
from globaltensor._tensor.gradients.reducer import reducer
from globaltensor.distributed.communicator import record_collectives

_pools: dict[int, Pool] = {}


def run_on(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``fn`` on ``n`` processes that run these tests alone: other processes may still hold an
    object that observes gradients."""
    if n not in _pools:
        _pools[n] = Pool(n, warm=True)
    try:
        return _pools[n].run(fn, *args)
    except BaseException:
        del _pools[n]
        raise


@pytest.fixture(scope="module", autouse=True)
def _own_processes() -> Iterator[None]:
    yield
    for pool in _pools.values():
        pool.close()
    _pools.clear()


B, S = flow.sbp.broadcast, flow.sbp.split
IGNORED = -100


class Doubled(torch.autograd.Function):
    """A Function that doubles its input and records the gradient that its backward receives."""

    seen: list[Tensor] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Doubled.seen.append(grads[0])
        return grads[0] * 2


class Task:
    """A classifier with one weight [7, 5] on samples [9, 7], plain or split over the samples. More
    samples are ignored on the first rank than on the other."""

    def __init__(self, plain: bool) -> None:
        draw = torch.Generator().manual_seed(1)
        x, weight = (
            torch.randn(9, 7, dtype=torch.float64, generator=draw),
            torch.randn(7, 5, dtype=torch.float64, generator=draw),
        )
        target = torch.randint(0, 5, (9,), generator=draw)
        target[[0, 1, 3, 8]] = IGNORED
        self.plain, self.x, self.target, self.weight = plain, x, target, weight.requires_grad_()
        if not plain:
            self.x, self.target = (
                t.to_global(everyone(), B).to_global(sbp=S(0)) for t in (x, target)
            )  # type: ignore[attr-defined]
            self.weight = weight.detach().to_global(everyone(), B).requires_grad_()  # type: ignore[attr-defined]
        self.loss: Any = None

    def forward(self, change: Callable[[Tensor], Tensor] = lambda logits: logits) -> Tensor:
        return F.cross_entropy(change(self.x @ self.weight), self.target)

    def step(self, change: Callable[[Tensor], Tensor] = lambda logits: logits) -> None:
        self.weight.grad = None
        self.loss = self.forward(change)
        self.loss.backward()


def everyone() -> flow.placement:
    return flow.placement.all("cpu")


def same(values: list[Tensor]) -> list[float]:
    """Return the values that a hook received or produced, as numbers that do not depend on the
    layout."""
    return [float(s) for v in values for s in v.sum(1)]


# Each function observes one or several passes of the task. It must return the same on one device.
# Afterwards no code observes gradients.


def hook_on_the_leaf(task: Task) -> Any:
    seen: list[Tensor] = []
    handle = task.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    task.step()
    handle.remove()
    return same(seen)


def hook_that_changes(task: Task) -> Any:
    with task.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)):  # type: ignore[no-untyped-call]
        task.step()
    return task.weight.grad.tolist()  # type: ignore[union-attr]


def hook_on_the_way(task: Task) -> Any:
    seen: list[Tensor] = []

    def hooked(logits: Tensor) -> Tensor:
        logits.register_hook(seen.append)  # type: ignore[no-untyped-call]
        return logits

    task.step(hooked)
    return same(seen)


def retained(task: Task) -> Any:
    seen: list[Tensor] = []

    def keeping(logits: Tensor) -> Tensor:
        logits.retain_grad()
        seen.append(logits)
        return logits

    task.step(keeping)
    return same([t.grad for t in seen])  # type: ignore[misc]


def node_looked_at(task: Task) -> Any:
    seen: list[Tensor] = []

    def hooked(logits: Tensor) -> Tensor:
        logits.grad_fn.register_prehook(lambda grads: seen.append(grads[0].detach().clone()))  # type: ignore[union-attr]
        return logits

    task.step(hooked)
    if task.plain:
        return same(seen)
    # a node sees local tensors
    return same([t.to_global(everyone(), S(0)) for t in seen])  # type: ignore[attr-defined]


def node_behind_one(task: Task) -> Any:
    """Hook the node that accumulates into the leaf, through a temporary tensor, as libraries that
    hook gradients do."""
    seen: list[Tensor] = []
    node = task.weight.expand_as(task.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    handle = node.register_hook(lambda _, grads: seen.append(grads[0].detach().clone()))
    gc.collect()
    task.step()
    handle.remove()
    if task.plain:
        return same(seen)
    return same([t.to_global(everyone(), flow.sbp.partial_sum) for t in seen])  # type: ignore[attr-defined]


def custom_function(task: Task) -> Any:
    task.step(Doubled.apply)
    seen, Doubled.seen = Doubled.seen, []
    return same(seen)


def plain_leaf(task: Task) -> Any:
    own = torch.full((5,), 0.5, dtype=torch.float64, requires_grad=True)
    task.step(lambda logits: logits * own)
    return own.grad.tolist()  # type: ignore[union-attr]


def plain_leaf_made_global(task: Task) -> Any:
    own = torch.full((5,), 0.5, dtype=torch.float64, requires_grad=True)
    task.step(lambda logits: logits + (own if task.plain else own.to_global(everyone(), B)))  # type: ignore[attr-defined]
    return own.grad.tolist()  # type: ignore[union-attr]


def leaf_that_is_not_shared(task: Task) -> Any:
    own = torch.full((9, 5), 0.5, dtype=torch.float64)
    leaf: Any = own if task.plain else own.to_global(everyone(), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    leaf.requires_grad_()
    task.step(lambda logits: logits * leaf)
    return leaf.grad.tolist()


def leaf_without_gradients_again(task: Task) -> Any:
    held.append(leaf := torch.ones(4).to_global(everyone(), B).to_global(sbp=S(0)).requires_grad_())  # type: ignore[attr-defined]
    task.step()
    leaf.requires_grad_(False)


def unsummed(task: Task) -> Any:
    with flow.no_sync():
        task.step()
        task.forward().backward()  # type: ignore[no-untyped-call]
    task.forward().backward()  # type: ignore[no-untyped-call]
    return task.weight.grad.tolist()  # type: ignore[union-attr]


def unsummed_and_read(task: Task) -> Any:
    with flow.no_sync():
        task.step()
    return task.weight.grad.tolist()  # type: ignore[union-attr]


def unsummed_and_dropped(task: Task) -> Any:
    with flow.no_sync():
        task.step()
    task.weight.grad = None


def hooked_module(task: Task) -> Any:
    seen: list[Tensor] = []
    module = nn.Identity()
    handle = module.register_full_backward_hook(lambda module, grads, outs: seen.append(grads[0]))
    task.step(module)
    handle.remove()
    return same(seen)


def local_function(task: Task) -> Any:
    own = torch.full((5,), 0.5, dtype=torch.float64, requires_grad=True)
    here = lambda logits: logits * own  # noqa: E731
    task.step(here if task.plain else flow.local_map(here, out_sbp=S(0)))
    assert own.grad is not None
    return (
        own.grad.tolist()
        if task.plain
        else own.grad.to_global(everyone(), flow.sbp.partial_sum).tolist()
    )  # type: ignore[attr-defined]


held: list[Any] = []
ENDED = [
    hook_on_the_leaf,
    hook_that_changes,
    leaf_without_gradients_again,
    unsummed,
    unsummed_and_read,
    unsummed_and_dropped,
]
GONE = [
    hook_on_the_way, retained, node_looked_at, node_behind_one, custom_function, plain_leaf,
    plain_leaf_made_global, leaf_that_is_not_shared, hooked_module,
    local_function,
]  # fmt: skip


def waited(task: Task) -> bool:
    """Return True if a pass waits for the target count before backward begins."""
    task.step()
    return not isinstance(task.loss, DeferredMean)


def apart(task: Task) -> bool:
    """Return True if the target count needs its own message."""
    with record_collectives() as log:
        task.step()
    return [t.bytes for t in log] != [(7 * 5 + 1) * 8]


def after(looks: Callable[[Task], Any], rides: bool) -> list[str]:
    """Return the faults of an observed pass and of the passes after it."""
    ours, plain = Task(False), Task(True)
    flow.fuse_loss_count(rides)
    found = []
    for _ in range(2 * rides):
        ours.step()
    if (apart if rides else waited)(ours):
        found.append("slow before")
    got, want = looks(ours), looks(plain)
    if (got is None) != (want is None) or (
        want is not None
        and not torch.allclose(torch.tensor(got), torch.tensor(want), rtol=1e-12, atol=1e-14)
    ):
        found.append("other numbers")
    ours.loss = None  # this frees the graph, too
    slow = [(apart if rides else waited)(ours) for _ in range(3)]
    plain.step()
    if not torch.allclose(
        torch.tensor(ours.weight.grad.tolist(), dtype=torch.float64), plain.weight.grad, rtol=1e-12
    ):  # type: ignore[union-attr,arg-type]
        found.append("other numbers afterwards")
    flow.fuse_loss_count(False)
    # If an observer is dropped but not ended, the ranks have to inform each other first.
    return found + [
        f"slow: {n} passes afterwards"
        for n, is_slow in enumerate(slow)
        if is_slow and (n > 0 or not rides or looks in ENDED)
    ]


def looked() -> dict[str, list[str]]:
    found = {
        f"{looks.__name__}{', riding' * rides}": after(looks, rides)
        for looks in (*ENDED, *GONE)
        for rides in (False, True)
    }
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.extended
def test_the_pass_after_a_look_is_fast_again() -> None:
    assert run_on(2, looked) == [{}] * 2


def looked_at_briefly() -> dict[str, list[str]]:
    """Observe passes by a hook on a leaf and by ``no_sync()``, and count messages in between."""
    found = {
        f"{looks.__name__}{', riding' * rides}": after(looks, rides)
        for looks in (hook_on_the_leaf, unsummed)
        for rides in (False, True)
    }
    try:
        found["messages"] = traffic()
    finally:
        flow.fuse_loss_count(False)
    return {name: wrong for name, wrong in found.items() if wrong}


def test_a_hook_and_no_sync_slow_down_one_pass_alone() -> None:
    assert run_on(2, looked_at_briefly) == [{}] * 2


def held_on_one_rank() -> list[tuple[bool, bool]]:
    """Return (the count travels with the gradients, the gradients are right) for each pass after an
    observed one. The observing object stays alive on the first rank for some passes."""
    flow.fuse_loss_count()
    ours, plain = Task(False), Task(True)
    plain.step()
    ours.step(Doubled.apply)
    Doubled.seen.clear()
    kept = [ours.loss] if flow.env.get_rank() == 0 else []
    ours.loss = None
    found = []
    for i in range(10):
        if i == 5:
            kept.clear()
        rode = not apart(ours)
        found.append(
            (
                rode,
                torch.allclose(
                    torch.tensor(ours.weight.grad.tolist(), dtype=torch.float64), plain.weight.grad
                ),
            )
        )  # type: ignore[union-attr,arg-type]
    flow.fuse_loss_count(False)
    return found


def test_ranks_on_which_objects_go_at_other_times_take_the_same_decisions() -> None:
    first, second = run_on(2, held_on_one_rank)
    assert first == second
    assert all(right for _, right in first)
    assert [rode for rode, _ in first] == [False] * 6 + [True] * 4


class Sharing(flow.nn.Graph):
    """A training graph of SGD whose gradients are reduce-scattered (ZeRO 2)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.enable_zero(True, stage=2, shard_min_size=1)

    def build(self, x: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def held_on_first_rank(task: Task) -> list[Any]:
    """Return the loss of an observed pass, which keeps its observers alive, on the first rank.
    Return an empty list on the others."""
    task.step(Doubled.apply)
    Doubled.seen.clear()
    kept = [task.loss] if flow.env.get_rank() == 0 else []
    task.loss = None
    gc.collect()
    return kept


def shared_out_while_held_on_one_rank(graphs: bool) -> list[bool]:
    """Return, for each step, True if its loss is that of one device. Only on the first rank an
    object that observed gradients is still alive."""
    ours, found = Task(False), []
    kept = held_on_first_rank(ours)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    plain = copy.deepcopy(model)
    task, optimizer = Task(True), torch.optim.SGD(plain.parameters(), lr=0.1)
    flow.parallelize(model, everyone(), "data" if graphs else "fsdp")
    graph, stepping = (
        Sharing(model) if graphs else None,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    for i in range(4):
        if i == 2:
            kept.clear()
        if graph is not None:
            loss = graph(ours.x, ours.target)
        else:
            stepping.zero_grad()
            loss = F.cross_entropy(model(ours.x), ours.target)
            loss.backward()  # type: ignore[no-untyped-call]
            stepping.step()
        optimizer.zero_grad()
        wanted = F.cross_entropy(plain(task.x), task.target)
        wanted.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(abs(float(loss.mean()) - float(wanted.detach())) < 1e-12)
    return found


@pytest.mark.parametrize("graphs", [False, True], ids=["eager, fsdp", "graph, ZeRO 2"])
@pytest.mark.sweep(2)
def test_a_look_that_one_rank_alone_still_holds_is_no_divergence(graphs: bool) -> None:
    """Each rank's garbage collector decides when an object is freed. The values that the ranks
    compare must not depend on that."""
    assert run_on(2, shared_out_while_held_on_one_rank, graphs) == [[True] * 4] * 2


def moved_while_held_on_one_rank(of_x: Any, of_target: Any) -> list[bool]:
    """Return, for each step, True if its gradient is that of one device. The pass may move
    gradients between ranks. Only on the first rank an object that observed gradients is still
    alive."""
    kept, found = held_on_first_rank(Task(False)), []
    task, plain = Task(False), Task(True)
    task.x, task.target = (
        t.to_global(everyone(), B).to_global(sbp=sbp)  # type: ignore[attr-defined]
        for t, sbp in ((plain.x, of_x), (plain.target, of_target))
    )
    plain.step()
    for _ in range(3):
        task.step()
        found.append(
            torch.allclose(
                torch.tensor(task.weight.grad.tolist(), dtype=torch.float64), plain.weight.grad
            )  # type: ignore[union-attr,arg-type]
        )
    found.append(bool(kept) == (flow.env.get_rank() == 0))
    return found


@pytest.mark.parametrize("of_target", [B, S(0)], ids=["B", "S(0)"])
@pytest.mark.parametrize("of_x", [B, S(0), S(1)], ids=["B", "S(0)", "S(1)"])
def test_gradients_that_move_have_one_factor_on_all_ranks(of_x: Any, of_target: Any) -> None:
    assert run_on(2, moved_while_held_on_one_rank, of_x, of_target) == [[True] * 4] * 2


class Accumulating(flow.nn.Graph):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module.weight = nn.Parameter(task.weight.detach())  # type: ignore[arg-type]
        self.add_optimizer(torch.optim.SGD(self.module.parameters(), lr=0.0))
        self.config.set_gradient_accumulation_steps(2)

    def build(self, x: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(x @ self.module.weight, target)  # type: ignore[operator]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def accumulating() -> bool:
    """Return True if passes are slow after a graph that accumulates micro-batches."""
    gc.collect()
    task = Task(False)
    flow.fuse_loss_count()
    for _ in range(3):  # the ranks inform each other that observers of earlier tests are gone
        task.step()
    assert not apart(task)
    flow.fuse_loss_count(False)
    task.loss = None
    graph = Accumulating(task)
    for _ in range(2):
        graph(task.x[:8], task.target[:8])
    flow.fuse_loss_count()
    slow = apart(task)
    flow.fuse_loss_count(False)
    return slow


def test_a_graph_of_micro_batches_leaves_no_trace() -> None:
    assert run_on(2, accumulating) == [False] * 2


def fewer_ranks() -> list[bool]:
    """Check leaves of the first two ranks that hold unsummed contributions. The other ranks do not
    know of them."""
    flow.fuse_loss_count()
    ours, plain = Task(False), Task(True)
    plain.step()
    few = flow.placement("cpu", [0, 1])
    other = torch.ones(7, dtype=torch.float64).to_global(few, B).requires_grad_()  # type: ignore[attr-defined]
    found = []
    for i in range(6):
        if i == 1:
            with flow.no_sync():
                (other * 2).sum().backward()
        if i == 3:
            found.append(other.grad.to_global(everyone(), B).tolist() == [2.0] * 7)  # type: ignore[union-attr]
        ours.step()
        found.append(
            torch.allclose(
                torch.tensor(ours.weight.grad.tolist(), dtype=torch.float64), plain.weight.grad
            )
        )  # type: ignore[union-attr,arg-type]
    flow.fuse_loss_count(False)
    return found


def test_contributions_that_only_some_ranks_have() -> None:
    assert run_on(4, fewer_ranks) == [[True] * 7] * 4


def watchers() -> tuple[int, int]:
    """Return (observers alive, observers that the program began and did not end) after many
    observed passes."""
    task = Task(False)
    before = reducer().watchers.open
    for _ in range(20):
        handle = task.weight.register_hook(lambda grad: None)  # type: ignore[no-untyped-call]
        with flow.no_sync():
            task.forward().backward()  # type: ignore[no-untyped-call]
        task.forward().backward()  # type: ignore[no-untyped-call]
        handle.remove()
        handle.remove()
    return len(reducer().watchers.alive), reducer().watchers.open - before


def test_what_the_program_ends_is_not_counted_any_more() -> None:
    assert run_on(2, watchers) == [(0, 0)] * 2


@pytest.mark.parametrize("through", ["post", "hook"])
def test_gathered_gradients_travel_together_again(through: str) -> None:
    assert run_on(2, gathered, through) == [(True, True)] * 2


def gathered(through: str) -> tuple[bool, bool]:
    """Return (a hook on a split parameter changes the collectives of a pass, the collectives are
    the same again after the hook's removal)."""
    model = flow.parallelize(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), everyone(), "fsdp"
    )
    x = torch.ones(128, 64).to_global(everyone(), B).to_global(sbp=S(0))  # type: ignore[attr-defined]

    def step() -> list[str]:
        with record_collectives() as log:
            model(x).sum().backward()
        return [t.kind for t in log]

    step()
    before, weight = step(), next(model.parameters())
    handle = (
        weight.register_post_accumulate_grad_hook(lambda p: None)
        if through == "post"
        else weight.register_hook(lambda grad: None)
    )  # type: ignore[no-untyped-call]
    between = step()
    handle.remove()
    step()  # this pass still has the buckets of the previous pass
    return between != before, step() == before


def after_a_divergence() -> tuple[bool, list[bool]]:
    """Return (the ranks have diverged, which later passes send the count separately). One rank
    alone has hooked a leaf."""
    flow.fuse_loss_count()
    for _ in range(2):
        Task(False).step()
    task, handle = Task(False), None
    if flow.env.get_rank() == 0:
        handle = task.weight.register_hook(lambda grad: None)  # type: ignore[no-untyped-call]
    try:
        task.step()
        diverged = False
    except flow.errors.DivergenceError:
        diverged = True
    if handle is not None:
        handle.remove()
    task.loss = None
    del task
    gc.collect()
    found = []
    for _ in range(6):
        later = Task(False)
        found.append(apart(later))
        assert torch.allclose(
            torch.tensor(later.weight.grad.tolist(), dtype=torch.float64), gradient_alone()
        )  # type: ignore[union-attr]
    flow.fuse_loss_count(False)
    return diverged, found


def gradient_alone() -> Tensor:
    plain = Task(True)
    plain.step()
    return plain.weight.grad  # type: ignore[return-value]


def test_ranks_that_have_diverged_agree_again(fresh_pool: Any) -> None:
    first, second = fresh_pool(2).run(after_a_divergence)
    assert first == second
    assert first[0]
    assert first[1][-2:] == [False, False]


def made_by_one_rank() -> tuple[list[bool], list[bool]]:
    """Return which passes send the count separately, as two lists. In the first list's passes one
    rank alone copies and unpickles leaves. In the second list's passes all ranks use such a leaf,
    with unsummed contributions on each rank."""
    gc.collect()
    flow.fuse_loss_count()
    value = torch.linspace(-1, 1, 14, dtype=torch.float64).view(7, 2)
    leaf = torch.nn.Parameter(value.to_global(everyone(), B).to_global(sbp=S(1)))  # type: ignore[attr-defined]
    data = pickle.dumps(leaf)
    del leaf
    for _ in range(4):
        Task(False).step()
    kept = []
    before = []
    for _ in range(3):
        if flow.env.get_rank() == 1:
            kept += [read := pickle.loads(data), copy.deepcopy(read)]
        before.append(apart(Task(False)))
    used = []
    for i in range(5):
        ours, plain, mine, alone = (
            Task(False),
            Task(True),
            pickle.loads(data),
            value.clone().requires_grad_(),
        )
        ours.x, plain.x = ours.x + (mine * 3).sum(), plain.x + (alone * 3).sum()
        ours.x, plain.x = ours.x * mine.square().sum(), plain.x * alone.square().sum()
        used.append(apart(ours))
        plain.step()
        assert torch.allclose(
            torch.tensor(ours.weight.grad.tolist(), dtype=torch.float64), plain.weight.grad
        ), i  # type: ignore[union-attr,arg-type]
        assert torch.allclose(torch.tensor(mine.grad.tolist(), dtype=torch.float64), alone.grad), i  # type: ignore[arg-type]
    flow.fuse_loss_count(False)
    return before, used


def test_leaves_that_one_rank_alone_makes_change_nothing() -> None:
    first, second = run_on(2, made_by_one_rank)
    assert first == second
    assert first[0] == [False] * 3
