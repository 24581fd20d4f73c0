"""Tests that code for one device works on global tensors: in-place detach, replaced data, ``out=``,
and results that are the argument itself."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bodies import Bodies, values
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor._ops.methods import gather_global_value
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import GlobalTensorError, InplaceError, KernelError, SbpError

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
BODIES = Bodies()
on = BODIES.on


#: Each part has every fifth body. All bodies also run on simulated ranks.
PARTS_ON_PROCESSES = 5


def on_processes(part: int) -> None:
    BODIES.run(part, PARTS_ON_PROCESSES)


@pytest.mark.parametrize("part", range(PARTS_ON_PROCESSES))
@pytest.mark.sweep(PARTS_ON_PROCESSES)
def test_on_processes(part: int) -> None:
    run_on(2, on_processes, part)


def everywhere() -> Any:
    return flow.placement.all("cpu")


def laid_out(value: Tensor, sbp: Any) -> Any:
    """Return a leaf with this sbp."""
    return value.to_global(everywhere(), B).to_global(sbp=sbp).detach().clone()  # type: ignore[attr-defined]


def same(got: Any, want: Tensor) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(
        gather_global_value(got) if got.is_global else got.detach(),
        want.detach(),
        rtol=1e-12,
        atol=1e-13,
    )


# ------------------------------------------------------------------------------------------ detach_


def model() -> nn.Module:
    parts = [nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)]
    net = nn.Sequential(*parts).double()
    for i, p in enumerate(net.parameters()):
        p.data = values(*p.shape, seed=i)
    return net


@on()
def test_gradients_with_a_graph_are_set_to_zero() -> None:
    """``zero_grad(set_to_none=False)`` after ``create_graph=True`` detaches gradients in place,
    which is forbidden for views."""

    # PyTorch warns of the cycle between parameters and gradients, which this test needs. The ranks
    # may be threads, among which catch_warnings would be a race.
    warnings.filterwarnings("ignore", message="Using backward")

    def trained(net: nn.Module, foreach: bool, penalty: bool) -> list[Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=foreach)
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            assert all(
                p.grad is None or (p.grad.grad_fn is None and not p.grad.any())
                for p in net.parameters()
            )
            net(values(5, 4, seed=step)).square().sum().backward(create_graph=True)
            if penalty:
                sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None).mul(
                    1e-3
                ).backward()  # type: ignore[union-attr]
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for penalty in (False, True):
        want = trained(model(), False, penalty)
        for plan in ("data", "fsdp", "tensor"):
            for foreach in (False, True):
                for got, expected in zip(
                    trained(flow.parallelize(model(), everywhere(), plan), foreach, penalty),
                    want,
                    strict=True,
                ):
                    same(got, expected)


@on()
def test_what_is_computed_is_detached_in_place() -> None:
    ways: list[Callable[[Any], Any]] = [
        lambda g: g * 2, lambda g: g.t(), lambda g: (g * 2).view(12), lambda g: g.to_global(sbp=B),
        lambda g: g.to_global(sbp=P), lambda g: g[0], lambda g: g,
        lambda g: (torch.ones(2, 3, requires_grad=True) * 2).to_global(everywhere(), S(0)),  # type: ignore[attr-defined]
    ]  # fmt: skip
    for way in ways:
        x = laid_out(values(4, 3), S(0)).requires_grad_()
        y = way(x)
        value = gather_global_value(y.detach())
        assert y.detach_() is y
        assert not y.requires_grad
        assert y.grad_fn is None
        assert y.is_leaf
        same(y, value)
    x = laid_out(values(4, 3), S(0)).requires_grad_()
    base = x * 2
    row = base[0]
    row.detach_()  # this view had to move data
    base.mul_(3)
    same(row, values(4, 3)[0] * 6)
    assert not row.requires_grad
    assert base.requires_grad
    row.zero_()
    assert not base[0].any()


# ----------------------------------------------------------------------------------- .data and set_


@on()
def test_data_takes_the_value_of_a_plain_tensor() -> None:
    for sbp in (B, S(0), S(1), P):
        for shape in ((4, 3), (5, 3), (1, 7), (2, 3, 4), (3,), ()):
            x = laid_out(values(4, 3), sbp)
            value = values(*shape, seed=1)
            x.data = value
            kept = sbp if not sbp.is_split or sbp.dim < value.dim() else B
            assert (x.sbp, x.placement) == ((kept,), everywhere())
            same(x, value)
            same(x * 2, value * 2)
            if kept is not B:  # only this rank's shard of the plain tensor would change
                x.add_(1)
                assert torch.equal(value, values(*shape, seed=1))


@on()
def test_a_parameter_stays_one_when_it_takes_plain_data() -> None:
    for sbp in (B, S(0), S(1)):
        for shape, dtype in (
            ((4, 3), torch.float64),
            ((6, 3), torch.float64),
            ((4, 3), torch.float32),
        ):
            ours, alone = nn.Parameter(laid_out(values(4, 3), sbp)), nn.Parameter(values(4, 3))
            optimizers = [torch.optim.SGD([p], lr=0.1) for p in (ours, alone)]
            for p in (ours, alone):
                (p * p).sum().backward()
                if shape != (4, 3):
                    p.grad = None
                p.data = values(*shape, seed=1).to(dtype)
                assert p.requires_grad
            for p, optimizer in zip((ours, alone), optimizers, strict=True):
                if dtype is torch.float32:
                    p.grad = None
                (p * p * p).sum().backward()
                optimizer.step()
            assert ours.dtype is alone.dtype
            same(ours, alone)


@on()
def test_a_module_is_cast_and_loaded_by_its_data() -> None:
    net = flow.parallelize(model(), everywhere(), "fsdp")
    for p, q in zip(net.parameters(), model().parameters(), strict=True):
        before = p.sbp  # type: ignore[attr-defined]
        p.data = q.data * 2
        assert p.sbp == before  # type: ignore[attr-defined]
        same(p, q * 2)
    with pytest.raises(SbpError, match="must be a tensor, not float"):
        next(net.parameters()).data = 3.0  # type: ignore[assignment]


@on()
def test_set_takes_a_plain_tensor() -> None:
    for sbp in (B, S(0), P):
        x = laid_out(values(4, 3), sbp)
        for shape in ((4, 3), (2, 5)):
            assert x.set_(values(*shape, seed=1)) is x
            assert x.sbp == (sbp,)
            same(x, values(*shape, seed=1))
        with pytest.raises(RuntimeError, match="Could not set tensor of type"):
            x.set_(torch.zeros(3))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        nn.Parameter(x).set_(values(4, 3))
    with pytest.raises(InplaceError, match="a storage is the memory of one rank's local tensor"):
        x.set_(torch.zeros(3).untyped_storage())


def resized(kind: str) -> list[list[float]]:
    """Resize the vocabulary of a transformers model after its layout was chosen."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {
        "vocab_size": 20,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    gpt: Any = GPT2Config(
        vocab_size=20,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=32,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
    )
    alone: Any = (
        GPT2LMHeadModel(gpt)
        if kind == "gpt"
        else LlamaForCausalLM(LlamaConfig(**small, tie_word_embeddings=kind == "tied"))
    )
    alone = alone.double()
    ids = torch.arange(10).view(2, 5) * 2 + 4
    found = []
    for plan in ("data", "fsdp", "tensor"):
        ours = flow.parallelize(copy.deepcopy(alone), everywhere(), plan)
        rows = []
        for net in (ours, copy.deepcopy(alone)):
            torch.manual_seed(1)
            net.resize_token_embeddings(25, mean_resizing=False)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = net(ids, labels=ids).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
            rows.append([loss.item(), net.get_input_embeddings().weight.square().sum().item()])
        assert ours.get_input_embeddings().weight.shape == (25, 16)
        assert rows[0] == pytest.approx(rows[1], rel=1e-5), (
            kind,
            plan,
        )  # transformers computes the loss in float32
        found += rows
    return found


@pytest.mark.parametrize("kind", ["tied", "untied", "gpt"])
@pytest.mark.sweep(3)
def test_embeddings_are_resized(kind: str) -> None:
    first, other = run_on(2, resized, kind)
    assert first == other


# --------------------------------------------------------------------------------------------- out=


#: Functions that accept ``out=``, and the dtype of each result.
RESULTS: dict[str, tuple[Callable[..., Any], tuple[torch.dtype, ...]]] = {
    "add": (lambda x, **out: torch.add(x, 1, **out), (torch.float64,)),
    "cast": (lambda x, **out: torch.add(x, 1, **out), (torch.complex128,)),
    "product": (lambda x, **out: torch.mm(x, x.t(), **out), (torch.float64,)),
    "sum": (lambda x, **out: torch.sum(x, 1, **out), (torch.float64,)),
    "joined": (lambda x, **out: torch.cat([x, x], 1, **out), (torch.float64,)),
    "largest": (lambda x, **out: torch.max(x, 0, **out), (torch.float64, torch.int64)),
    "sorted": (lambda x, **out: torch.sort(x, 1, **out), (torch.float64, torch.int64)),
    "factors": (lambda x, **out: torch.linalg.qr(x, **out), (torch.float64, torch.float64)),
}


@on()
def test_results_go_into_plain_and_global_tensors() -> None:
    for function, dtypes in RESULTS.values():
        want = function(values(4, 3))
        wanted = want if isinstance(want, tuple) else (want,)
        for sbp in (B, S(0), P):
            x = laid_out(values(4, 3), sbp)
            for shaped in (False, True):
                plain = [
                    torch.empty(w.shape if shaped else 0, dtype=d)
                    for w, d in zip(wanted, dtypes, strict=True)
                ]
                there = [
                    laid_out(torch.zeros(w.shape if shaped else 0, dtype=d), S(0))
                    for w, d in zip(wanted, dtypes, strict=True)
                ]
                for targets in (plain, there, [*plain[:1], *there[1:]]):
                    got = function(x, out=tuple(targets) if len(targets) > 1 else targets[0])
                    assert all(
                        g is t
                        for g, t in zip(got if len(targets) > 1 else [got], targets, strict=True)
                    )
                    for t, w in zip(targets, wanted, strict=True):
                        same(t, w.to(t.dtype))
                assert [t.sbp for t in there] == [(S(0),)] * len(there)
    rows = torch.zeros(8, 3, dtype=torch.float64)
    torch.mul(laid_out(values(4, 3), S(0)), 2, out=rows[::2])
    same(rows[::2], values(4, 3) * 2)
    assert not rows[1::2].any()
    torch.add(rows[::2], laid_out(values(4, 3), S(1)), out=rows[::2])
    same(rows[::2], values(4, 3) * 3)
    kept = laid_out(torch.empty(0, 2), S(1))
    same(torch.sum(laid_out(values(4, 3).float(), S(0)), 1, out=kept), values(4, 3).float().sum(1))
    assert kept.sbp == (B,), "a split of a dim that is gone"


@on()
def test_out_that_does_not_fit_is_refused_as_on_one_device() -> None:
    whole = torch.empty(4, 3, dtype=torch.int64)
    for x in (values(4, 3), laid_out(values(4, 3), S(0))):
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type Long"):
            torch.add(x, 1.5, out=whole)
        with pytest.raises(
            RuntimeError, match="Expected out tensor to have dtype double, but got float instead"
        ):
            torch.mm(x, x.t(), out=torch.empty(4, 4))
        with pytest.raises(TypeError, match="must be Tensor, not list"):
            torch.add(x, 1, out=[torch.empty(4, 3)])  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="expected tuple of 2 elements but got 1"):
            torch.max(x, 1, out=(torch.empty(0),))  # type: ignore[call-overload]
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            torch.add(x.clone().requires_grad_(), 1, out=torch.empty(4, 3))
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            torch.add(x, 1, out=torch.empty(4, 3, dtype=torch.float64, requires_grad=True))
        assert torch.argmax(
            x.clone().requires_grad_(), 1, out=torch.empty(0, dtype=torch.int64)
        ).shape == (4,)
    with pytest.raises(InplaceError, match=r"out= has shape \[2\]"):
        torch.add(laid_out(values(4, 3), S(0)), 1, out=laid_out(values(2), S(0)))


#: Functions whose dtype that of ``out`` decides, where no dtype is passed.
COMPUTED_IN_OUT: dict[str, Callable[..., Tensor]] = {
    "sum": lambda x, out: torch.sum(x, 0, out=out),
    "product": lambda x, out: torch.prod(x, 1, out=out),
    "sums so far": lambda x, out: torch.cumsum(x, 0, out=out),
    "products so far": lambda x, out: torch.cumprod(x, 1, out=out),
    "mean": lambda x, out: torch.mean(x, 0, out=out),
    "steps": lambda x, out: torch.linspace(0, 1, 7, out=out),
    "steps of powers": lambda x, out: torch.logspace(0, 1, 7, out=out),
}


@on()
def test_the_dtype_of_out_decides_how_a_sum_is_computed() -> None:
    """A sum into whole numbers is one of whole numbers, and steps into float64 have its digits."""
    for name, function in COMPUTED_IN_OUT.items():
        for dtype in (torch.float64, torch.float32, torch.int64):
            if name == "mean" and dtype is torch.int64:
                continue
            want = function(values(4, 3) * 3, torch.empty(0, dtype=dtype))
            for sbp in (B, S(0), S(1), P):
                x = laid_out(values(4, 3) * 3, sbp)
                for out in (
                    torch.empty(0, dtype=dtype),
                    laid_out(
                        torch.zeros(want.shape, dtype=dtype),
                        B if sbp == S(1) and want.dim() < 2 else sbp,
                    ),
                ):
                    if not out.is_global and name.startswith("steps"):  # type: ignore[attr-defined]
                        continue
                    assert function(x, out) is out
                    got = gather_global_value(out) if out.is_global else out  # type: ignore[attr-defined]
                    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
                    if dtype is torch.float64:
                        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.cumsum(
            laid_out(values(4, 3), S(0)).requires_grad_(), 0, out=torch.empty(0, dtype=torch.int64)
        )


#: Functions whose kernels refuse an ``out`` of float32 for float64, which meta kernels accept.
STRICT: dict[str, Callable[..., Any]] = {
    "sort": lambda x, out: torch.sort(x, 0, out=(out, torch.empty(0, dtype=torch.int64))),
    "mode": lambda x, out: torch.mode(x, 0, out=(out, torch.empty(0, dtype=torch.int64))),
    "kthvalue": lambda x, out: torch.kthvalue(x, 1, 0, out=(out, torch.empty(0).long())),
    "index_select": lambda x, out: torch.index_select(x, 0, torch.tensor([0]), out=out),
    "take": lambda x, out: torch.take(x, torch.tensor([0]), out=out),
    "any": lambda x, out: torch.any(x > 0, 1, out=out),
    "clamp": lambda x, out: torch.clamp(x, 0, 1, out=out),
    "softmax": lambda x, out: torch.softmax(x, 0, out=out),
    "tril": lambda x, out: torch.tril(x, out=out),
    "bucketize": lambda x, out: torch.bucketize(x, torch.tensor([0.0]).double(), out=out),
    "nonzero": lambda x, out: torch.nonzero(x > 0, out=out),
    "masked_select": lambda x, out: torch.masked_select(x, x > 0, out=out),
}


@on()
def test_an_out_of_another_dtype_is_refused_in_torchs_words() -> None:
    for name, function in STRICT.items():
        with pytest.raises(Exception) as alone:
            function(values(4, 3), torch.empty(0))
        for sbp in (B, S(0), S(1), P):
            for out in (torch.empty(0), laid_out(torch.empty(0), B)):
                with pytest.raises(type(alone.value)) as error:
                    pytest.fail(f"{name} gave {function(laid_out(values(4, 3), sbp), out)}")
                assert str(alone.value).splitlines()[0] in str(error.value)


class Sorted(flow.nn.Graph):
    """A graph that sorts into a buffer of another dtype."""

    def build(self, x: Tensor) -> Tensor:
        return torch.sort(x, 0, out=(torch.empty(0), torch.empty(0).long()))[0]


@on()
def test_a_graph_refuses_an_out_of_another_dtype() -> None:
    for sbp in (B, S(0)):
        with pytest.raises(RuntimeError, match="Expected out tensor to have dtype double"):
            Sorted()(laid_out(values(4, 3), sbp))


def resized_with_a_warning() -> None:
    for x in (values(4, 3), laid_out(values(4, 3), S(0))):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert torch.add(x, 1, out=torch.empty(2, dtype=torch.float64)).shape == (4, 3)
        assert any(
            "An output with one or more elements was resized" in str(w.message) for w in seen
        )


def test_an_out_that_is_resized_warns_as_on_one_device() -> None:
    """This test runs on processes: warning filters are per process, and simulated ranks share one
    process."""
    run_on(2, resized_with_a_warning)


class Chunked(torch.autograd.Function):
    """A mean of log-sum-exps that computes the logits in chunks, in one buffer."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        buffer = torch.empty(2, len(weight), dtype=hidden.dtype)
        grads, total = torch.zeros_like(hidden), hidden.new_zeros(())
        for i in range(0, len(hidden), 2):
            logits = torch.mm(hidden[i : i + 2], weight.t(), out=buffer[: min(2, len(hidden) - i)])
            torch.exp(logits, out=logits)
            sums = torch.sum(logits, 1, keepdim=True, out=torch.empty(0, dtype=hidden.dtype))
            total += sums.log().sum() / len(hidden)
            grads[i : i + 2] = logits.div_(sums) @ weight / len(hidden)
        ctx.save_for_backward(grads)
        return total

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        return ctx.saved_tensors[0] * grad[0], None


@on()
def test_buffers_of_custom_functions() -> None:
    weight = values(7, 3, seed=1)
    x = values(5, 3).requires_grad_()
    want = (x @ weight.t()).logsumexp(1).mean()
    want.backward()
    for sbp in (B, S(0), S(1), P):
        for w in (weight, laid_out(weight, S(0)), laid_out(weight, B)):
            ours = laid_out(values(5, 3), sbp).requires_grad_()
            got: Any = Chunked.apply(ours, w)
            got.backward()
            torch.testing.assert_close(gather_global_value(got) if got.is_global else got, want)
            same(ours.grad, x.grad)  # type: ignore[arg-type]


def orthogonal(x: Any) -> Any:
    """Run Newton-Schulz steps towards the nearest orthogonal matrix, with separate buffers."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.div(x.norm().clamp_min(1e-7))
    shape = (x.size(-2), x.size(-2))
    squares, mixed, result = (
        torch.empty(s, dtype=x.dtype, device=x.device) for s in (shape, shape, tuple(x.shape))
    )
    for _ in range(5):
        torch.mm(x, x.mT, out=squares)
        torch.addmm(squares, squares, squares, beta=b, alpha=c, out=mixed)
        torch.addmm(x, mixed, x, beta=a, out=result)
        x, result = result, x if not x.is_global else torch.empty_like(result)
    return x


@on()
def test_steps_in_buffers() -> None:
    want = orthogonal(values(4, 6))
    for sbp in (B, S(0), S(1), P):
        same(orthogonal(laid_out(values(4, 6), sbp)), want)


class Buffered(flow.nn.Graph):
    """A graph whose step writes into a plain buffer."""

    def build(self, x: Tensor) -> Tensor:
        return torch.add(x, 1, out=torch.empty(4, 3, dtype=torch.float64)) * x


@on()
def test_a_graph_with_a_plain_buffer() -> None:
    for sbp in (B, S(0), P):
        graph = Buffered()
        for seed in range(2):
            same(
                graph(laid_out(values(4, 3, seed=seed), sbp)),
                (values(4, 3, seed=seed) + 1) * values(4, 3, seed=seed),
            )


# ------------------------------------------------------------------------------- views and operands


@on()
def test_a_view_in_the_same_dtype_has_no_gradient() -> None:
    for sbp in (B, S(0), S(1), P):
        for wrap in (lambda t: t, lambda t: t * 2):
            alone, x = (
                wrap(t.requires_grad_()) for t in (values(4, 3), laid_out(values(4, 3), sbp))
            )
            views = [t.view(torch.float64) for t in (alone, x)]
            assert [v.requires_grad for v in views] == [False, False]
            assert [v.grad_fn for v in views] == [None, None]
            same(views[1], views[0])
            views[1].add_(1)
            same(x.detach(), alone + 1)


@on()
def test_the_only_part_of_a_leaf_is_no_leaf() -> None:
    """A hook on the part is not one on the leaf."""
    for sbp in (B, S(0), S(1), P):
        for cut in (
            lambda t: t.chunk(1)[0],
            lambda t: t.split(4)[0],
            lambda t: t.tensor_split(1)[0],
            lambda t: t.vsplit([])[0],
        ):
            x = laid_out(values(4, 3), sbp).requires_grad_()
            part = cut(x)
            assert not part.is_leaf
            assert part.grad_fn is not None
            part.register_hook(lambda grad: grad * 10)
            ((part * 2).sum() + x.sum()).backward()
            same(x.grad, torch.full((4, 3), 21.0, dtype=torch.float64))


@on()
def test_what_is_resampled_to_its_own_size_is_a_copy() -> None:
    for shape in ((1, 2, 4), (1, 2, 4, 6)):
        for sbp in (B, S(1), S(2), S(-1), P):
            x = laid_out(values(*shape), sbp)
            y = nn.functional.interpolate(x, scale_factor=1.0)
            y.add_(1)
            same(x, values(*shape))
            same(y, values(*shape) + 1)
            with torch.inference_mode():
                assert nn.functional.interpolate(x, scale_factor=1.0).is_inference()


@on()
def test_a_view_made_without_gradients_is_not_written_with_them() -> None:
    for sbp, take in ((S(0), lambda t: t[1]), (S(1), lambda t: t.view(12)), (B, lambda t: t[1])):
        for scale in (1, 2):
            x = laid_out(values(4, 3), sbp).requires_grad_()
            base = x * scale if scale > 1 else x
            with torch.no_grad():
                view = take(base)
                alias = take(base.detach())
            with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
                view.mul_(3)
            same(view, take(values(4, 3)) * scale)
            alias.mul_(3)
            with torch.no_grad():
                view.add_(1)
            same(take(base.detach()), take(values(4, 3)) * scale * 3 + 1)


@on()
def test_gradients_are_assigned_as_on_one_device() -> None:
    for sbp in (B, S(0), S(1), P):
        x = laid_out(values(4, 3), sbp).requires_grad_()
        for wrong, words in (
            (laid_out(values(3, 4), sbp), "attempting to assign a gradient of size"),
            (laid_out(values(4, 3), sbp).float(), "attempting to assign a gradient"),
        ):
            with pytest.raises(RuntimeError, match=words):
                x.grad = wrong
            assert x.grad is None
        if "grad_dtype" in dir(torch.Tensor):  # torch 2.11 has no such attribute
            x.grad_dtype = torch.float32
            assert x.grad_dtype is torch.float32
            x.grad = laid_out(values(4, 3), sbp).float()
            same(x.grad, values(4, 3).float())


# --------------------------------------------------------------------------------- sparse gradients


class Bags(nn.EmbeddingBag):
    def __init__(self, rows: int, width: int, **options: Any) -> None:
        super().__init__(rows, width, mode="sum", **options)


def gathered(table: nn.Module, ids: Tensor) -> Tensor:
    return torch.gather(table.weight, 0, ids, sparse_grad=table.sparse)  # type: ignore[arg-type, call-overload]


#: Each part has every seventh case.
PARTS_OF_SPARSE = 7


def sparse_gradients(part: int) -> None:
    """Check that the values are those of one device. So are the steps of optimizers that accept
    both kinds of gradients."""
    optimizers: list[Any] = [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ]
    ids = torch.tensor([[0, 1, 2], [2, 4, 4]])
    kinds: list[Any] = [
        (nn.Embedding, lambda m, i: m(i)), (Bags, lambda m, i: m(i)), (nn.Embedding, gathered),
        (lambda *args, **options: nn.Embedding(*args, scale_grad_by_freq=True, **options), lambda m,
            i: m(i)),
        (lambda *args, **options: nn.Embedding(*args, padding_idx=2, **options), lambda m, i: m(i)),
    ]  # fmt: skip
    cases = itertools.product(kinds, optimizers, (B, S(0), S(1), P), (None, B, S(0)))
    for (make, look), optimizer, sbp, id_sbp in itertools.islice(
        cases, part, None, PARTS_OF_SPARSE
    ):
        tables = [make(5, 3, sparse=sparse) for sparse in (True, False)]
        for table in tables:
            table.weight.data = values(5, 3).float()
        table, alone = tables[0].to_global(everywhere(), sbp), tables[1]
        stepped = [optimizer(t.parameters()) for t in (table, alone)]
        for _ in range(2):
            for t, o, i in zip(
                (table, alone),
                stepped,
                (ids if id_sbp is None else laid_out(ids, id_sbp), ids),
                strict=True,
            ):
                o.zero_grad()
                look(t, i).square().sum().backward()
                o.step()
        torch.testing.assert_close(gather_global_value(table.weight.grad), alone.weight.grad)
        torch.testing.assert_close(
            gather_global_value(table.weight.detach()), alone.weight.detach()
        )
    plain = nn.Embedding.from_pretrained(values(5, 3).float(), freeze=False, sparse=True)
    plain(laid_out(ids, S(0))).sum().backward()
    assert plain.weight.grad is not None
    assert plain.weight.grad.sum() == 18


@on()
def test_gradients_that_would_be_sparse_are_dense() -> None:
    sparse_gradients(0)


@pytest.mark.extended
@pytest.mark.parametrize("part", range(1, PARTS_OF_SPARSE))
@pytest.mark.parametrize("run", [simulate, run_on])
def test_more_gradients_that_would_be_sparse_are_dense(
    run: Callable[..., list[Any]], part: int
) -> None:
    run(2, sparse_gradients, part)


@on()
def test_an_optimizer_of_sparse_gradients_is_refused() -> None:
    for sbp in (B, S(0)):
        table: Any = nn.Embedding(5, 3, sparse=True).to_global(everywhere(), sbp)  # type: ignore[operator]
        optimizer = torch.optim.SparseAdam([nn.Parameter(torch.zeros(2)), table.weight])
        table(torch.tensor([0, 1])).sum().backward()
        with pytest.raises(
            GlobalTensorError, match=r"SparseAdam got a global parameter.*torch.optim.Adam"
        ):
            optimizer.step()
    alone = nn.Embedding(5, 3, sparse=True)
    before = alone.weight.detach().clone()
    alone(torch.tensor([0, 1])).to_global(everywhere(), B).sum().backward()
    # torch warns if this setting is not explicit
    with torch.sparse.check_sparse_tensor_invariants(False):
        torch.optim.SparseAdam(alone.parameters()).step()
    assert alone.weight.grad is not None
    assert alone.weight.grad.is_sparse
    assert (alone.weight.detach() != before).any(1).tolist() == [True, True, False, False, False]


# --------------------------------------------------------------------------------------- torch.func


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


@on()
def test_transforms_name_the_way_that_works() -> None:
    """A torch.func transform that involves a global tensor raises an error on all ranks. The error
    names `local_map` and comes before any data is sent."""
    func, row, rows = torch.func, values(3), values(4, 3)
    for sbp in (B, S(0), S(1), P):
        g = laid_out(rows, sbp)
        leaf = laid_out(rows, sbp).requires_grad_()
        weights = {
            name: laid_out(q.detach(), S(0))
            for name, q in nn.Linear(3, 2).double().named_parameters()
        }
        layer: Any = nn.Linear(3, 2).double().to_global(everywhere(), B)  # type: ignore[operator]
        programs: list[Callable[[], Any]] = [
            lambda g=g: func.grad(lambda x: x.to_global(sbp=B).square().sum())(g),
            lambda g=g: func.grad(lambda x: (x @ x.t()).square().sum())(g),
            lambda g=g: func.grad_and_value(lambda x: x.square().sum())(g),
            lambda g=g: func.vjp(lambda x: x * x, g),
            lambda g=g: func.vmap(lambda x: x.square().sum())(g),
            lambda g=g: func.vmap(lambda x: x.square().sum(), in_dims=1)(g),
            lambda g=g: func.jacrev(lambda x: x.square().sum(1))(g),
            lambda g=g: func.grad(lambda v: (g * v).sum())(row),
            lambda g=g: func.grad(lambda v: (g @ v).square().sum())(row),
            lambda g=g: func.jacrev(lambda v: g @ v)(row),
            lambda g=g: func.vmap(lambda v: (g * v).sum())(rows),
            lambda g=g: func.vmap(lambda v: g @ v)(rows),
            lambda g=g: func.grad(lambda v: v.to_global(everywhere(), S(0)).square().sum())(row),
            lambda leaf=leaf: func.grad(
                lambda v: (leaf.to_global(sbp=S(1 if leaf.sbp == (S(0),) else 0)) * v).sum()
            )(row),
            lambda g=g, layer=layer, w=weights: func.grad(
                lambda p: func.functional_call(layer, p, (g,)).square().sum()
            )(w),
            lambda leaf=leaf: func.grad(lambda v: v.sum() * Doubled.apply(leaf).sum())(row),
        ]
        for i, program in enumerate(programs):
            with pytest.raises(KernelError, match=r"globaltensor\.local_map"):
                pytest.fail(f"program {i} with {sbp} gave {program()}")
        same(
            func.functional_call(layer, weights, (g,)),
            nn.functional.linear(
                rows, gather_global_value(weights["weight"]), gather_global_value(weights["bias"])
            ),
        )
        parts = flow.local_map(
            func.vmap(func.grad(lambda x: x.square().sum())), out_sbp=S(0), in_sbp=S(0)
        )
        same(parts(g), rows * 2)


# ------------------------------------------------------------------------------------------ type_as


@on()
def test_a_plain_tensor_takes_the_type_of_a_global_one() -> None:
    """The plain tensor becomes global, as in OneFlow. Its shape is that of one device."""
    for sbp in (B, S(0), S(1), P):
        g = laid_out(values(4, 3), sbp)
        for shape in ((4, 3), (5, 2), (3,), ()):
            plain = values(*shape, seed=1).float().requires_grad_()
            x: Any = plain.type_as(g)
            assert x.placement == g.placement
            assert x.sbp == (sbp if not sbp.is_split or sbp.dim < len(shape) else B,)
            assert x.dtype is torch.float64
            same(x, plain.double())
            (x * 3).sum().backward()
            torch.testing.assert_close(plain.grad, torch.full(shape, 3.0))
        assert not torch.ones(2).to(g).is_global  # type: ignore[attr-defined]
        assert torch.ones(2).to(g).dtype is torch.float64
        assert torch.ones(2).type_as(other=g).is_global  # type: ignore[call-arg, attr-defined]
        assert g.type_as(torch.ones(2)).sbp == (sbp,)


# ----------------------------------------------------------------- functions with a body in Python


@on()
def test_checks_and_symbolic_numbers_take_global_tensors() -> None:
    for sbp in (B, S(0), P):
        g = laid_out(values(4), sbp)
        total = float(g.sum())
        torch._assert(g.sum() == total, "no")
        with pytest.raises(AssertionError, match=r"^no$"):
            torch._assert(g.sum() > total, "no")
        assert torch.sym_int(g[0] * 0 + 3.5) == 3
        assert torch.sym_float(g[1]) == float(g[1])
        assert torch.sym_not(g[0] * 0) is True


@on()
def test_negative_indices_are_filled_from_the_end() -> None:
    for sbp in (B, S(0), S(1), P):
        for rows in (4, 3, 1):
            x = values(rows, 3)
            for dim, index in ((0, [-1, 0]), (1, [-3, -1]), (-1, [1])):
                at = torch.tensor(index)
                same(laid_out(x, sbp).index_fill(dim, at, 1.5), x.index_fill(dim, at, 1.5))
                if sbp is not P:
                    got = laid_out(x, sbp).index_fill_(dim, at, 1.5)
                    same(got, x.clone().index_fill_(dim, at, 1.5))


@on()
def test_diagonals_by_einsum_are_views() -> None:
    for sbp in (B, S(0), S(1), P):
        for equation, shape in (
            ("ii->i", (3, 3)),
            ("iij->ij", (4, 4, 3)),
            ("aa->a", (1, 1)),
            ("iji->ji", (3, 2, 3)),
            ("iii->i", (3, 3, 3)),
            ("...ii->...i", (2, 3, 3)),
        ):
            x = values(*shape)
            g = laid_out(x, sbp)
            same(torch.einsum(equation, g), torch.einsum(equation, x))
            same(torch.einsum(equation, [g]), torch.einsum(equation, [x]))
            torch.einsum(equation, g).mul_(3)
            torch.einsum(equation, x).mul_(3)
            same(g, x)
        x = values(3, 3)
        same(torch.einsum("ii", laid_out(x, sbp)), torch.einsum("ii", x))
        same(torch.einsum("ii,i->i", laid_out(x, sbp), laid_out(x[0], B)), x.diagonal() * x[0])
        for equation, shape in (("ii->i", (3, 4)), ("iji->ij", (3, 3, 4))):
            with pytest.raises(RuntimeError, match="subscript"):
                torch.einsum(equation, laid_out(values(*shape), sbp))
