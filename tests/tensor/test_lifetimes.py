"""Tests of memory that the library reuses between steps. No gradient in use is overwritten, and no
memory outlives the model that it was allocated for."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor._tensor.gradients import reducer
from globaltensor._tensor.gradients.flat_buffers import Room
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world

B, S = flow.sbp.broadcast, flow.sbp.split


def everyone() -> flow.placement:
    return flow.placement.all("cpu")


def rows(n: int, width: int, seed: int = 0) -> Any:
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(seed))
    return x.to_global(everyone(), B).to_global(sbp=S(0))  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------ owners of gradients


@contextlib.contextmanager
def counting_nothing() -> Iterator[None]:
    """Disable reference counts inside the block: another version of Python or torch may report
    other counts."""
    before = sys.getrefcount, torch._C._storage_Use_Count  # type: ignore[attr-defined]
    sys.getrefcount = lambda x: 2  # type: ignore[assignment]
    torch._C._storage_Use_Count = lambda cdata: 2  # type: ignore[attr-defined]
    try:
        yield
    finally:
        sys.getrefcount, torch._C._storage_Use_Count = before  # type: ignore[attr-defined]


def of_storage(grad: Any) -> Tensor:
    storage = grad.to_local().untyped_storage()
    return torch.tensor([]).set_(storage, grad.to_local().storage_offset(), grad.shape)  # type: ignore[no-any-return]


#: Objects that a program may keep of a gradient: (how it gets one, how to read its values).
HOLDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda grad: grad, lambda grad: grad.to_local()),
    "in a list of all": (lambda grad: [grad], lambda grads: grads[0].to_local()),
    "its part": (lambda grad: grad.to_local(), lambda part: part),
    "a view": (lambda grad: grad.view(-1), lambda view: view.to_local()),
    "a row": (lambda grad: grad[0], lambda row: row.to_local()),
    "a view of a view of its part": (lambda grad: grad.to_local().t()[1:], lambda view: view),
    "detached": (lambda grad: grad.detach(), lambda grad: grad.to_local()),
    "its data": (lambda grad: grad.data, lambda grad: grad.to_local()),
    "an array": (lambda grad: grad.to_local().numpy(), torch.from_numpy),
    "a part of an array": (lambda grad: grad.to_local().numpy()[1:], torch.from_numpy),
    "by DLPack": (lambda grad: torch.from_dlpack(grad.to_local()), lambda t: t),
    "a buffer": (
        lambda grad: memoryview(grad.to_local().numpy()),
        lambda view: torch.from_numpy(np.asarray(view)),
    ),
    "its storage": (
        lambda grad: (grad.to_local().untyped_storage(), grad.to_local().storage_offset()),
        lambda s: torch.tensor([]).set_(s[0], s[1], (6, 6)),
    ),
    "a parameter made of it": (lambda grad: nn.Parameter(grad.to_local()), lambda p: p.detach()),
    "a weak and a strong reference": (
        lambda grad: (weakref.ref(grad), grad),
        lambda pair: pair[0]().to_local(),
    ),
}


def steps(room: int, way: str) -> list[str]:
    """Return the kinds of kept objects whose gradients changed in later passes."""
    before, reducer.ROOM_BYTES = reducer.ROOM_BYTES, room
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(len(HOLDS))]).to_global(everyone(), B)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters())
    held: list[tuple[str, Any, Tensor]] = []
    handles = []

    def hold(name: str, grad: Any) -> None:
        kept = HOLDS[name][0](grad)
        held.append((name, kept, HOLDS[name][1](kept).clone()))

    if way == "in hooks":
        handles = [
            layer.weight.register_post_accumulate_grad_hook(lambda p, name=name: hold(name, p.grad))
            for name, layer in zip(HOLDS, model, strict=True)
        ]
    with counting_nothing():
        for step in range(6):
            if way == "set to zero" or step % 2:
                optimizer.zero_grad(set_to_none=way != "set to zero")
            else:
                for p in model.parameters():
                    p.grad = None
            model(rows(4, 6, step)).square().sum().backward()
            if way != "in hooks" and way != "set to zero":
                for name, layer in zip(HOLDS, model, strict=True):
                    hold(name, layer.weight.grad)
            if way == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                held.clear()  # clipping has scaled these gradients in place
                for name, layer in zip(HOLDS, model, strict=True):
                    hold(name, layer.weight.grad)
            if way == "set to zero" and step == 0:
                for name, layer in zip(HOLDS, model, strict=True):
                    hold(name, layer.weight.grad * 1)
            optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    reducer.ROOM_BYTES = before
    assert held
    return [name for name, kept, was in held if not torch.equal(HOLDS[name][1](kept), was)]


@pytest.mark.parametrize("way", ["read", "in hooks", "clipped", "set to zero"])
@pytest.mark.parametrize("room", [0, reducer.ROOM_BYTES], ids=["in rooms", "small"])
@pytest.mark.sweep(2)
def test_gradients_that_are_held_stay_as_they_are(room: int, way: str) -> None:
    assert run_on(2, steps, room, way) == [[]] * 2


def served_again(room: int) -> list[bool]:
    """Return, for each step, True if its gradients reuse the memory of the previous step's freed
    gradients."""
    before, reducer.ROOM_BYTES = reducer.ROOM_BYTES, room
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to_global(everyone(), B)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(6):
        optimizer.zero_grad()
        model(rows(4, 6, step)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append([p.grad.to_local().data_ptr() for p in model.parameters()])
        optimizer.step()
    reducer.ROOM_BYTES = before
    return [a == b for a, b in itertools.pairwise(found[2:])]


@pytest.mark.parametrize("room", [0, reducer.ROOM_BYTES], ids=["in rooms", "small"])
def test_memory_that_is_let_go_serves_again(room: int) -> None:
    assert run_on(2, served_again, room) == [[True] * 3] * 2


class Passing(flow.nn.Graph):
    """A pipeline graph that returns the input of its second stage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config.set_gradient_accumulation_steps(2)

    def build(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def received() -> list[bool]:
    """Return, for each result of a pipeline, True if further calls left it unchanged."""
    first, second = (flow.placement("cpu", [r]) for r in (0, 1))
    graph = Passing(
        flow.pipeline.cut(nn.Sequential(nn.Linear(6, 6), nn.Identity()), [first, second], at=["1"])
    )
    held = []
    with counting_nothing():
        for step in range(6):
            out: Any = graph(torch.full((4, 6), float(step)).to_global(first, B))  # type: ignore[attr-defined]
            held.append((out, out.to_local().clone()))
    return [torch.equal(out.to_local(), was) for out, was in held]


def test_results_of_a_pipeline_stay_as_they_are() -> None:
    assert run_on(2, received) == [[True] * 6] * 2


def test_a_room_is_free_when_its_loan_is_over() -> None:
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.bool,
        torch.int64,
    ):
        room = Room(4 * dtype.itemsize)
        assert room.free
        flat = room.lend(dtype)
        assert (flat.shape, flat.dtype, room.free) == ((4,), dtype, False)
        view, where = flat[1:3], flat.data_ptr()
        del flat
        assert not room.free
        del view
        assert room.free
        assert room.lend(dtype).data_ptr() == where
    assert Room(0).lend(torch.float32).numel() == 0


# --------------------------------------------------------------------- memory that outlives a model


def nbytes() -> int:
    """Return the bytes of all tensors of this process."""
    found = {}
    for x in gc.get_objects():
        if (
            type(x) in (Tensor, nn.Parameter)
            and x.device.type == "cpu"
            and x.layout is torch.strided
        ):
            storage = x.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


WIDTH = 128
MODEL = 4 * WIDTH * (WIDTH + 1) * 4  # bytes of the model's parameters


def model(plan: Any) -> nn.Module:
    made = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    return (
        flow.parallelize(made, everyone(), plan)
        if isinstance(plan, str)
        else made.to_global(everyone(), plan)
    )  # type: ignore[operator, no-any-return]


def trained(plan: Any, times: int = 4) -> None:
    made = model(plan)
    optimizer = torch.optim.AdamW(made.parameters())
    for step in range(times):
        made(rows(4 * WIDTH, WIDTH, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held_at_its_end(plan: Any) -> None:
    """Drop the model while its gradients are still alive."""
    made = model(plan)
    made(rows(4 * WIDTH, WIDTH)).square().mean().backward()


def asked(plan: Any) -> None:
    """Use the model several times without a backward pass: the next parameters are gathered
    ahead."""
    made = model(plan)
    with torch.no_grad():
        for step in range(3):
            made(rows(4 * WIDTH, WIDTH, step))


def freed(plan: Any, back: bool) -> None:
    made = model(plan)
    for step in range(3):
        with flow.reshard_after_forward():
            loss = made(rows(4 * WIDTH, WIDTH, step)).square().mean()
        if back:
            loss.backward()


def cyclic(plan: Any) -> None:
    """Make a model that only the garbage collector frees."""
    made = model(plan)
    made.me = [made]  # type: ignore[assignment]
    for step in range(3):
        made(rows(4 * WIDTH, WIDTH, step)).square().mean().backward()


def broken(plan: Any) -> None:
    """Run a pass that fails halfway."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise ArithmeticError

    made: Any = model(plan)
    for _ in range(2):
        with contextlib.suppress(ArithmeticError):
            made[1:](Failing.apply(made[0](rows(4 * WIDTH, WIDTH)))).square().mean().backward()


def unsummed(plan: Any) -> None:
    made = model(plan)
    with flow.no_sync():
        made(rows(4 * WIDTH, WIDTH)).square().mean().backward()


class Training(flow.nn.Graph):
    def __init__(self, made: nn.Module, stage: int, micros: int) -> None:
        super().__init__()
        self.made = made
        self.add_optimizer(torch.optim.AdamW(made.parameters()))
        self.config.set_gradient_accumulation_steps(micros)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: Tensor) -> Tensor:
        loss = self.made(x).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]


def in_a_graph(plan: Any, stage: int = 0, micros: int = 1) -> None:
    graph = Training(model(plan), stage, micros)
    for step in range(3):
        graph(rows(4 * WIDTH, WIDTH, step))


def replicated() -> None:
    made = flow.nn.parallel.DistributedDataParallel(model(B))
    for step in range(3):
        made(rows(4 * WIDTH, WIDTH, step)).square().mean().backward()


USES: dict[str, Callable[[], None]] = {
    **{f"{name}, {use.__name__}": (lambda use=use, plan=plan: use(plan)) for use in (trained,
        held_at_its_end, asked, cyclic, broken, unsummed)
       for name, plan in (("data", B), ("fsdp", "fsdp"), ("tensor", "tensor"))},
    "graph": lambda: in_a_graph(B),
    "graph, fsdp": lambda: in_a_graph("fsdp"),
    "graph, shares": lambda: in_a_graph(B, stage=2),
    "graph, micro-batches": lambda: in_a_graph(B, micros=2),
    "replicas": replicated,
    "freed": lambda: freed("fsdp", True),
    "freed, not differentiated": lambda: freed("fsdp", False),
}  # fmt: skip


#: Each part has every fourth use.
PARTS = 4


def left_behind(room: int, part: int) -> dict[str, int]:
    """Return the bytes left after a model has gone and other, small ones have been used, for each
    use that leaves too many."""
    small = nn.Linear(3, 3).to_global(everyone(), B)  # type: ignore[operator]

    def other() -> None:
        small(rows(2, 3)).sum().backward()
        small.zero_grad()

    found, (roomy, reducer.ROOM_BYTES) = {}, (reducer.ROOM_BYTES, room)
    other()
    gc.collect()
    gc.freeze()  # neither the collector nor nbytes() looks at what was there before
    before = nbytes()
    for name, use in list(USES.items())[part::PARTS]:
        use()
        gc.collect()
        other()
        found[name], before = nbytes() - before, nbytes()
    gc.unfreeze()
    reducer.ROOM_BYTES = roomy
    return {name: n for name, n in found.items() if n > MODEL // 64}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("room", [1 << 12, reducer.ROOM_BYTES], ids=["in rooms", "small"])
@pytest.mark.sweep(PARTS + 1)
def test_nothing_is_left_of_a_model_that_has_gone(room: int, part: int) -> None:
    assert run_on(2, left_behind, room, part) == [{}] * 2


def plans_hold_no_arguments() -> list[bool]:
    """Return whether the operands of calls are gone once nothing but the cached plans is left."""
    P = flow.sbp.partial_sum
    calls: dict[str, Callable[[Any], Any]] = {
        "out": lambda x: torch.add(x, x, out=flow.zeros(3, 5, placement=everyone(), sbp=B)),
        "placements": lambda x: x + flow.ones((), placement=flow.placement("cpu", [0]), sbp=B),
        "plain target": lambda x: torch.zeros(3, 5).copy_(x),
        "composed": lambda x: torch.std_mean(x, 0),
        "replicated": lambda x: torch.linalg.matrix_norm(x),
        "signature": lambda x: x.to_global(sbp=P).sum(),
        "in place": lambda x: x.mul_(2.0),
        "operand": lambda x: nn.functional.dropout(x, training=False),
    }
    held = []
    for call in calls.values():
        x = rows(3, 5)
        held.append(weakref.ref(x._local))
        call(x)
        del x
    gc.collect()
    gone = [operand() is None for operand in held]
    assert gone == [True] * len(calls), dict(zip(calls, gone, strict=True))
    return gone


def test_cached_plans_hold_no_arguments() -> None:
    assert all(map(all, run_on(2, plans_hold_no_arguments)))


def kept() -> list[bool]:
    """Check that the memory cached for gradients never exceeds that of the current leaves'
    gradients, however the leaves change."""
    roomy, reducer.ROOM_BYTES = reducer.ROOM_BYTES, 1 << 12
    flats, found = reducer.reducer().flats, []
    gc.collect()
    others = flats.nbytes
    models: list[nn.Module] = []
    for step in range(12):
        if step in (0, 3, 5):
            models.append(model(B))
        if step == 8:
            del models[0]
        if step == 10:
            models[0].requires_grad_(False)
            models[0][0].requires_grad_(True)  # type: ignore[index]
        used = models[step % len(models) :] if step % 2 else models
        sum(made(rows(4, WIDTH, step)).square().mean() for made in used).backward()  # type: ignore[union-attr]
        for made in models:
            made.zero_grad()
        found.append(flats.nbytes - others <= len(models) * (MODEL + 8 * 4))
    del models, used, made
    gc.collect()
    reducer.ROOM_BYTES = roomy
    return [*found, flats.nbytes == others]


def test_what_is_kept_for_gradients_is_bounded_by_them() -> None:
    assert run_on(2, kept) == [[True] * 13] * 2


def gone_on_one_rank() -> list[bool]:
    """Use a second model after the first one in a few passes, and then no more. One rank frees it
    at once, and the other later."""
    student, plain = model("fsdp"), nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for p, q in zip(plain.parameters(), student.parameters(), strict=True):
        p.data.copy_(q.to_global(sbp=B).to_local())  # type: ignore[operator]
    teacher: Any = model("fsdp")
    later = [teacher] if flow.env.get_rank() == 1 else []
    found = []
    for step in range(30):
        x = rows(4 * WIDTH, WIDTH, step)
        out = student(x)
        if step < 4:
            out = out + teacher(x)
        elif step == 4:
            teacher = None
            gc.collect()
        elif step == 8:
            later.clear()
            gc.collect()
        out.square().mean().backward()
        if step >= 4:
            want = plain(x.to_global(sbp=B).to_local())
            found.append(torch.allclose(out.to_global(sbp=B).to_local(), want, atol=1e-5))
        student.zero_grad()
    return found


def test_ranks_on_which_a_model_goes_at_other_times_gather_alike() -> None:
    assert run_on(2, gone_on_one_rank) == [[True] * 26] * 2


def dreamt() -> weakref.ref[Any]:
    flow.auto.plan(
        nn.Sequential(nn.Linear(8, 8), nn.Softmax(1), nn.BatchNorm1d(8)),
        torch.empty(4, 8),
        "dgx-h100",
        mesh=(2,),
    )
    return weakref.ref(world())


def test_a_world_goes_with_what_was_dreamt_up_in_it() -> None:
    found = simulate(2, dreamt)
    gc.collect()
    assert [ref() for ref in found] == [None] * 2
