"""Tests of random numbers. Draws equal those of one device on any placement. Replicas share a
stream, and split ranks have different ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import run_on
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import globaltensor as flow
from globaltensor._ops import random_streams as draws
from globaltensor._ops.random_streams import RandomFill, advance_key, fill_local, run
from globaltensor.distributed.communicator import Communicator
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import set_world, world
from globaltensor.distributed.world_base import World
from globaltensor.errors import InplaceError
from globaltensor.sbp import Sbp, broadcast, partial_sum, split
from globaltensor.sharding.placement import Placement
from globaltensor.sharding.spec import Spec

LINE, GRID = Placement("cpu", [0, 1, 2]), Placement("cpu", [[0, 1], [2, 3]])
S0, S1 = split(0), split(1)
LAYOUTS: list[tuple[Placement, tuple[Sbp, ...]]] = [
    *((LINE, (e,)) for e in (broadcast, S0, S1, partial_sum)),
    *((GRID, pair) for pair in itertools.product((broadcast, S0, S1), repeat=2)),
    (GRID, (partial_sum, S1)),
]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FILLS: list[tuple[RandomFill, tuple[torch.dtype, ...]]] = [
    (RandomFill("uniform_", (-1.0, 3.0)), (*FLOATS, torch.complex64)),
    (RandomFill("normal_", (1.0, 2.0)), (*FLOATS, torch.complex64)),
    (RandomFill("random_", (0, 100)), (*FLOATS, torch.int64, torch.int32, torch.uint8)),
    (RandomFill("random_", (0, 1 << 40)), (torch.int64, torch.float64)),
    (RandomFill("random_"), (torch.int64, torch.bool)),
    (RandomFill("bernoulli_", (0.3,)), (*FLOATS, torch.int64, torch.bool)),
    (RandomFill("exponential_", kwargs={"lambd": 2.0}), FLOATS),
    (RandomFill("cauchy_"), FLOATS),
    (RandomFill("geometric_", (0.3,)), (*FLOATS, torch.int64)),
    (RandomFill("log_normal_"), FLOATS),
]


class Alone(World):
    """A rank that cannot communicate: drawing needs no communication."""

    def _connect(self, ranks: tuple[int, ...]) -> Communicator:
        raise AssertionError("drawing communicates")


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    set_world(Alone(rank, size))
    try:
        yield
    finally:
        set_world(None)


def assembled(spec: Spec, size: int, make: Callable[[], Tensor]) -> Tensor:
    """Return the global tensor of the ranks' local tensors. Each rank starts from the same seed and
    must end in the same state."""
    whole, states = torch.zeros(spec.shape, dtype=spec.dtype), []
    for rank in range(size):
        with as_rank(rank, size):
            torch.manual_seed(7)
            local = make().cpu()
            states.append(torch.get_rng_state())
        if spec.placement.coordinate(rank) is None:
            assert local.shape == (0,)
            continue
        offsets, lengths = spec.box(rank)
        assert tuple(local.shape) == lengths
        where = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        if any(e.is_partial for e in spec.layout):
            where += local
        else:
            where.copy_(local)
    assert all(torch.equal(s, states[0]) for s in states)
    return whole


def on_one_device(
    fill: RandomFill, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return fill(torch.empty(shape, dtype=dtype), None), torch.get_rng_state()


def check(
    fill: RandomFill,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    placement: Placement,
    layout: tuple[Sbp, ...],
) -> None:
    spec = Spec.make(shape, dtype, placement, layout)
    want, state = on_one_device(fill, shape, dtype)
    got = assembled(
        spec, placement.size + 1, lambda: fill_local(spec, fill)
    )  # one rank more than the placement
    assert torch.equal(got, want), f"{fill} {spec}"
    assert torch.equal(torch.get_rng_state(), state), f"{fill} {spec}: the generator ends elsewhere"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a block size so small that small tensors need many blocks."""
    draws._draws_in_blocks.cache_clear()
    monkeypatch.setattr(draws, "BLOCK", 32)
    yield
    draws._draws_in_blocks.cache_clear()


SIZES = (*range(20), *range(20, 200, 7), 1000)
#: Each part has every seventh size. One case in 25 is of several functions, each with another part.
PARTS = 7


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("fill", "dtypes"),
    FILLS,
    ids=lambda v: v.name + str(v.args) if isinstance(v, RandomFill) else "",
)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(25)
def test_every_size_and_dtype(fill: RandomFill, dtypes: tuple[torch.dtype, ...], part: int) -> None:
    for dtype in dtypes:
        for n in SIZES[part::PARTS]:
            check(fill, (n,), dtype, LINE, (S0,))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("placement", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "shape", [(37, 19), (5, 70), (70, 3), (3, 1), (2, 0), (7, 3, 2, 5), (1, 4, 33)], ids=str
)
@pytest.mark.sweep(3)
def test_every_layout(
    shape: tuple[int, ...], placement: Placement, layout: tuple[Sbp, ...]
) -> None:
    for fill in (RandomFill("normal_"), RandomFill("uniform_")):
        check(fill, shape, torch.float32, placement, layout)


@pytest.mark.usefixtures("small_blocks")
def test_units_and_zero_dims() -> None:
    check(RandomFill("normal_"), (24, 9), torch.float32, GRID, (S0.with_unit(4), S1.with_unit(3)))
    check(RandomFill("normal_"), (), torch.float32, LINE, (broadcast,))


@pytest.mark.parametrize(
    "n", [draws.BLOCK - 1, draws.BLOCK + 15, draws.BLOCK + 16, 3 * draws.BLOCK + 5]
)
def test_large_tensors(n: int) -> None:
    for fill in (
        RandomFill("normal_"),
        RandomFill("bernoulli_", (0.5,)),
        RandomFill("exponential_"),
    ):
        check(fill, (n,), torch.float32, LINE, (S0,))
        check(fill, (2, n // 2), torch.float32, GRID, (S1, S0))


def test_a_kernel_without_blocks_is_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "BLOCK", 32)
    monkeypatch.setattr(draws, "_draws_in_blocks", lambda name, dtype: False)
    check(RandomFill("bernoulli_", (0.3,)), (37, 19), torch.float32, GRID, (S0, S1))


# --------------------------------------------------------------------------- through the dispatcher

DRAWS: dict[str, Callable[..., Tensor]] = {
    "rand": lambda **k: flow.rand(37, 19, **k),
    "randn": lambda **k: flow.randn((3, 5), **k),
    "randn double": lambda **k: flow.randn(37, 19, dtype=torch.float64, **k),
    "randint": lambda **k: flow.randint(0, 1000, (37, 19), **k),
    "randint one bound": lambda **k: flow.randint(50, (37, 19), dtype=torch.int32, **k),
    "randint named": lambda **k: flow.randint(low=3, high=9, size=(37, 19), **k),
    "normal": lambda **k: flow.normal(1.0, 2.0, (37, 19), **k),
    "normal of tensors": lambda **k: flow.normal(
        torch.arange(8.0).view(2, 4), torch.ones(2, 4), **k
    ),
    "rand_like": lambda **k: flow.rand_like(torch.zeros(37, 19), **k),
    "randn_like": lambda **k: flow.randn_like(torch.zeros(37, 19, dtype=torch.float64), **k),
    "randint_like": lambda **k: flow.randint_like(torch.zeros(37, 19), 5, 11, **k),
}


@pytest.mark.parametrize("name", DRAWS)
def test_creation_equals_one_device(name: str) -> None:
    def on_ranks(placement: Placement, layout: tuple[Sbp, ...]) -> list[Tensor]:
        torch.manual_seed(42)
        drawn = [DRAWS[name](placement=placement, sbp=list(layout)) for _ in range(2)]
        assert all(tuple(d.sbp) == layout for d in drawn)
        return [*(torch.from_numpy(d.numpy()) for d in drawn), torch.get_rng_state()]

    torch.manual_seed(42)
    want = [DRAWS[name](), DRAWS[name](), torch.get_rng_state()]
    for placement, layout in LAYOUTS[:9:2]:
        for got in simulate(placement.size, on_ranks, placement, layout):
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), layout


def test_randperm_and_generator() -> None:
    def on_ranks() -> list[Tensor]:
        torch.manual_seed(3)
        own = torch.Generator().manual_seed(11)
        before = torch.get_rng_state()
        a = flow.randn(50, 3, placement=LINE, sbp=S0, generator=own)
        assert torch.equal(torch.get_rng_state(), before)  # the default generator is unchanged
        b = flow.empty(50, 3, placement=LINE, sbp=S0).uniform_(generator=own)
        c = flow.randperm(19, placement=LINE, sbp=S0, generator=own)
        d = flow.randperm(19, placement=LINE, sbp=S0)
        return [torch.from_numpy(x.numpy()) for x in (a, b, c, d)]

    own = torch.Generator().manual_seed(11)
    torch.manual_seed(3)
    want = [
        torch.randn(50, 3, generator=own),
        torch.empty(50, 3).uniform_(generator=own),
        torch.randperm(19, generator=own),
        torch.randperm(19),
    ]
    for got in simulate(4, on_ranks):
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


OLD = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 13)
INITS: list[Callable[[Tensor], object]] = [
    nn.init.uniform_, nn.init.normal_, nn.init.xavier_uniform_, nn.init.xavier_normal_,
    nn.init.kaiming_uniform_, nn.init.kaiming_normal_,
    nn.init.trunc_normal_, lambda w: nn.init.constant_(w, 3.0), lambda w: w.uniform_(-2, 3),
    lambda w: w.bernoulli_(0.3),
    lambda w: w.bernoulli_(p=torch.full((16, 12), 0.4)),
    lambda w: w.exponential_(), lambda w: w.random_(2, 9), lambda w: w.random_(),
    lambda w: w.geometric_(0.2), lambda w: w.log_normal_(), lambda w: w.cauchy_(),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(INITS)))
def test_initialisers_equal_one_device(number: int) -> None:
    def on_ranks(placement: Placement, layout: tuple[Sbp, ...]) -> Tensor:
        w = flow.zeros(16, 12, placement=placement, sbp=list(layout), requires_grad=True)
        torch.manual_seed(9)
        with torch.no_grad():
            INITS[number](w)
        assert tuple(w.sbp) == layout
        assert w.requires_grad
        return torch.from_numpy(w.detach().numpy())

    torch.manual_seed(9)
    want = torch.zeros(16, 12)
    INITS[number](want)
    for placement, layout in LAYOUTS[1:9:2]:
        if number == 6 and OLD and any(e.is_partial for e in layout):
            continue  # there it consists of in-place ops that partial tensors do not support
        for got in simulate(placement.size, on_ranks, placement, layout):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["uniform_", "normal_", "constant_", "kaiming_uniform_"])
def test_an_initialiser_whose_place_another_library_has_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another library may replace an initialiser, as transformers does while it makes a model.
    Inside torch's own initialiser, which runs in the end, the name then refers to the
    replacement."""
    own = getattr(nn.init, name)

    def theirs(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(tensor, *args, **kwargs)

    theirs.__name__ = name
    monkeypatch.setattr(nn.init, name, theirs)
    args = (3.0,) if name == "constant_" else ()
    torch.manual_seed(9)
    want = getattr(nn.init, name)(torch.zeros(16, 12), *args)

    def on_ranks() -> Tensor:
        w = flow.zeros(16, 12, placement=flow.placement("cpu", [0, 1]), sbp=S0, requires_grad=True)
        torch.manual_seed(9)
        getattr(nn.init, name)(w, *args)
        return torch.from_numpy(w.detach().numpy())

    for got in simulate(2, on_ranks):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


IN_ANOTHER_ORDER: list[Callable[[Any], Any]] = [
    lambda w: w.mT, lambda w: w.transpose(0, 1), lambda w: w.mT * 2, lambda w: w.permute(2, 0, 1),
    lambda w: w.mT.mT, lambda w: w.movedim(0, -1),
]  # fmt: skip


@pytest.mark.parametrize("entry", [broadcast, partial_sum, S0, S1], ids=str)
@pytest.mark.parametrize("number", range(len(IN_ANOTHER_ORDER)))
def test_what_lies_in_another_order_is_filled_as_one_device_does(number: int, entry: Sbp) -> None:
    seen = IN_ANOTHER_ORDER[number]

    def on_ranks() -> tuple[Any, Any]:
        target = seen(
            torch.zeros(5, 4, 7)
            .to_global(placement=Placement("cpu", [0, 1]), sbp=broadcast)
            .to_global(sbp=entry)
        )
        torch.manual_seed(4)
        return target.stride(), [
            torch.from_numpy(fill(target).numpy().copy())
            for fill in (Tensor.normal_, Tensor.uniform_)
        ]

    want = seen(torch.zeros(5, 4, 7))
    torch.manual_seed(4)
    values = [want.normal_().clone(), want.uniform_().clone()]
    for strides, got in simulate(2, on_ranks):
        assert strides == want.stride()
        assert all(torch.equal(g, w) for g, w in zip(got, values, strict=True))


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (5, 3, 3), (1, 3), (3, 1)], ids=str)
def test_ranks_agree_on_the_order_where_some_part_cannot_tell(shape: tuple[int, ...]) -> None:
    def on_ranks(entry: Sbp) -> Any:
        target = (
            torch.zeros(shape)
            .to_global(placement=Placement("cpu", [0, 1]), sbp=broadcast)
            .to_global(sbp=entry)
            .transpose(0, 1)
        )
        torch.manual_seed(4)
        return (
            target.stride(),
            target.normal_().tolist(),
            target.as_strided((2, 2), (1, 1)).tolist(),
        )

    want = torch.zeros(shape).transpose(0, 1)
    torch.manual_seed(4)
    want.normal_()
    for entry in (S0, S1):
        for strides, values, windows in simulate(2, on_ranks, entry):
            assert strides == want.stride()
            assert torch.equal(torch.tensor(values), want)
            assert torch.equal(torch.tensor(windows), want.as_strided((2, 2), (1, 1)))


def test_in_place_checks() -> None:
    w = flow.ones(4, placement=Placement("cpu", [0]), sbp=broadcast, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        w.normal_()
    with pytest.raises(InplaceError, match="to_global"):
        torch.zeros(4).bernoulli_(w.detach())


# ------------------------------------------------------------------------------------------ streams


def drawn_at(*coordinate: int) -> Tensor:
    return run(torch.rand, (8,), {}, coordinate)  # type: ignore[no-any-return]


def test_streams() -> None:
    torch.manual_seed(5)
    mersenne = torch.get_rng_state()[24:]
    first, elsewhere, second = drawn_at(0), drawn_at(1), drawn_at(0)
    assert torch.equal(torch.get_rng_state()[24:], mersenne), "plain draws would see it"
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    torch.rand(3)  # a plain draw on this rank alone
    assert torch.equal(drawn_at(0), first)
    torch.manual_seed(5)
    assert not torch.equal(drawn_at(1), first)
    assert torch.equal(drawn_at(1), elsewhere)
    torch.manual_seed(5)
    advance_key()
    advance_key()
    assert torch.equal(drawn_at(0), second)
    torch.manual_seed(6)
    assert not torch.equal(drawn_at(0), first)
    own = [torch.Generator().manual_seed(5) for _ in range(16)]
    assert (
        len(
            {
                tuple(run(torch.rand, (2,), {"generator": g}, (i // 4, i % 4)).tolist())
                for i, g in enumerate(own)
            }
        )
        == 16
    )


def test_streams_are_saved_and_restored_with_the_generator() -> None:
    torch.manual_seed(5)
    drawn_at(0)
    state = torch.get_rng_state()
    after = drawn_at(0)
    with torch.random.fork_rng(devices=[]):
        forked = drawn_at(0)
    assert torch.equal(drawn_at(0), forked)
    torch.set_rng_state(state)
    assert torch.equal(drawn_at(0), after)


def test_streams_survive_errors() -> None:
    def fail() -> None:
        raise ValueError("no")

    torch.manual_seed(5)
    with pytest.raises(ValueError, match="no"):
        run(fail, (), {}, (0,))
    torch.manual_seed(5)
    advance_key()
    want = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), want)


def test_streams_of_a_given_generator() -> None:
    own = torch.Generator().manual_seed(5)
    before = torch.get_rng_state()
    a = run(torch.rand, (8,), {"generator": own}, (0,))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(
        run(torch.rand, (8,), {"generator": torch.Generator().manual_seed(5)}, (0,)), a
    )
    assert not torch.equal(run(torch.rand, (8,), {"generator": own}, (0,)), a)


def test_checkpointed_dropout_draws_the_same_mask_again() -> None:
    torch.manual_seed(5)
    x = torch.ones(100, requires_grad=True)
    seen: list[Tensor] = []

    def block(v: Tensor) -> Tensor:
        out: Tensor = run(F.dropout, (v, 0.5), {}, (0,))
        seen.append(out.detach())
        return out * v

    torch.manual_seed(5)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    after = drawn_at(0)
    torch.manual_seed(5)
    advance_key()
    assert torch.equal(drawn_at(0), after), "the recomputation moved the key"


def test_replicas_agree_and_split_ranks_do_not() -> None:
    def on_ranks() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        x = flow.full((30, 8), 0.5, placement=LINE, sbp=broadcast)
        y = flow.full((30, 8), 0.5, placement=LINE, sbp=S0)
        return torch.bernoulli(x).to_local(), torch.bernoulli(y).to_local()

    first, again = simulate(3, on_ranks), simulate(3, on_ranks)
    assert all(
        torch.equal(a, b)
        for pair in zip(first, again, strict=True)
        for a, b in zip(*pair, strict=True)
    ), "not reproducible from the seed"
    same, parts = zip(*first, strict=True)
    assert all(torch.equal(s, same[0]) for s in same)
    assert not torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[1], parts[2])


def test_multinomial_by_rows() -> None:
    def on_ranks() -> Tensor:
        torch.manual_seed(3)
        weights = flow.eye(6, placement=LINE, sbp=S0)
        drawn = torch.multinomial(weights, 4, replacement=True)
        assert tuple(drawn.sbp) == (S0,)
        return torch.from_numpy(drawn.numpy())

    for got in simulate(3, on_ranks):
        assert torch.equal(got, torch.arange(6)[:, None].expand(6, 4))


def test_normal_of_global_tensors() -> None:
    def on_ranks() -> list[Tensor]:
        torch.manual_seed(3)
        mean, std = (
            flow.arange(20.0, placement=LINE, sbp=S0),
            flow.full((20,), 0.5, placement=LINE, sbp=S0),
        )
        drawn = torch.normal(mean, std), torch.normal(mean, 2.0), torch.normal(1.0, std)
        into = [flow.zeros(20, placement=LINE, sbp=S0) for _ in range(2)]
        torch.normal(0.5, 2.0, (20,), out=into[0])
        torch.normal(mean, std, out=into[1])
        return [torch.from_numpy(t.numpy()) for t in (*drawn, *into)]

    torch.manual_seed(3)
    mean, std = torch.arange(20.0), torch.full((20,), 0.5)
    want = [
        torch.normal(mean, std),
        torch.normal(mean, 2.0),
        torch.normal(1.0, std),
        torch.normal(0.5, 2.0, (20,)),
        torch.normal(mean, std),
    ]
    for got in simulate(3, on_ranks):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def test_the_rest_of_torch_random_is_there() -> None:
    assert flow.random.fork_rng is torch.random.fork_rng
    assert flow.random.manual_seed is torch.random.manual_seed


# ------------------------------------------------------------------------------------- accelerators


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cuda device")
def test_cuda_equals_one_device() -> None:
    line = Placement("cuda", [0, 1, 2])
    for fill in (RandomFill("normal_"), RandomFill("uniform_"), RandomFill("bernoulli_", (0.3,))):
        torch.manual_seed(7)
        want = fill(torch.empty(70, 33, device="cuda"), None).cpu()
        state = torch.cuda.get_rng_state()
        for layout in ((broadcast,), (S0,), (S1,), (partial_sum,)):
            spec = Spec.make((70, 33), torch.float32, line, layout)
            assert torch.equal(assembled(spec, 3, partial(fill_local, spec, fill)), want)
            assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cuda device")
def test_cuda_streams() -> None:
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(5)
    state = torch.cuda.get_rng_state()
    a, b = run(F.dropout, (x, 0.5), {}, (0,)), run(F.dropout, (x, 0.5), {}, (0,))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert not torch.equal(a, b)
    torch.manual_seed(5)
    torch.rand(3, device="cuda")
    assert torch.equal(run(F.dropout, (x, 0.5), {}, (0,)), a)
    assert not torch.equal(run(F.dropout, (x, 0.5), {}, (1,)), a)
    own = torch.Generator("cuda").manual_seed(5)
    c = run(torch.rand, (8,), {"generator": own, "device": "cuda"}, (0,))
    assert not torch.equal(run(torch.rand, (8,), {"generator": own, "device": "cuda"}, (0,)), c)


def seed_agreed_without_device() -> bool:
    """Draw for rank 0 in a world whose rank 1 lacks the device, and has no generator for it."""
    agreement = world().state(draws.SeedAgreement)
    device, agreement.done = draws._device, False
    try:
        if flow.env.get_rank() == 1:
            draws._device = lambda spec: None
        x = flow.rand(3, placement=flow.placement("cpu", [0]), sbp=flow.sbp.broadcast)
    finally:
        draws._device = device
    assert x.shape == (3,)
    return bool(agreement.done)


def test_a_rank_without_the_device_agrees_on_the_seed() -> None:
    assert run_on(2, seed_agreed_without_device) == [True, True]


def von_mises() -> list[Any]:
    where, found = flow.placement.all("cpu"), []
    loc, concentration = torch.zeros(5), torch.arange(1.0, 6)
    for sbp in (flow.sbp.broadcast, flow.sbp.split(0)):
        given = [
            t.to_global(where, flow.sbp.broadcast).to_global(sbp=sbp)  # type: ignore[attr-defined]
            for t in (loc, concentration)
        ]
        torch.manual_seed(3)
        found.append(torch.distributions.VonMises(*given).sample(torch.Size((3,))).tolist())
    return found


def test_a_sampler_that_begins_with_unwritten_memory_gives_the_numbers_of_one_device() -> None:
    torch.manual_seed(3)
    want = torch.distributions.VonMises(torch.zeros(5), torch.arange(1.0, 6)).sample((3,)).tolist()
    assert run_on(2, von_mises) == [[want, want]] * 2
