"""What works on one device works on global tensors: detaching in place, exchanging what a tensor holds, ``out=``, results that are the argument itself."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bodies import Bodies, values
from support.pool import run_on
from torch import Tensor, nn

import globaltensor as flow
from globaltensor.errors import InplaceError, SbpError
from globaltensor.tensor import full

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
BODIES = Bodies()
on = BODIES.on


def on_processes() -> None:
    BODIES.run()


def test_on_processes() -> None:
    run_on(2, on_processes)


def everywhere() -> Any:
    return flow.placement.all("cpu")


def laid_out(value: Tensor, sbp: Any) -> Any:
    """A leaf that lies so."""
    return value.to_global(everywhere(), B).to_global(sbp=sbp).detach().clone()  # type: ignore[attr-defined]


def same(got: Any, want: Tensor) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(full(got) if got.is_global else got.detach(), want.detach(), rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------------------------------------------------------- detach_


def model() -> nn.Module:
    parts = [nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)]
    net = nn.Sequential(*parts).double()
    for i, p in enumerate(net.parameters()):
        p.data = values(*p.shape, seed=i)
    return net


@on()
def test_gradients_with_a_graph_are_set_to_zero() -> None:
    """``zero_grad(set_to_none=False)`` after ``create_graph=True`` detaches gradients in place, which is forbidden of views."""

    def trained(net: nn.Module, foreach: bool, penalty: bool) -> list[Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=foreach)
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            assert all(p.grad is None or (p.grad.grad_fn is None and not p.grad.any()) for p in net.parameters())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the cycle between parameters and gradients, which the test wants
                net(values(5, 4, seed=step)).square().sum().backward(create_graph=True)
            if penalty:
                sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None).mul(1e-3).backward()  # type: ignore[union-attr]
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    for penalty in (False, True):
        want = trained(model(), False, penalty)
        for plan in ("data", "fsdp", "tensor"):
            for foreach in (False, True):
                for got, expected in zip(trained(flow.parallelize(model(), everywhere(), plan), foreach, penalty), want, strict=True):
                    same(got, expected)


@on()
def test_what_is_computed_is_detached_in_place() -> None:
    ways: list[Callable[[Any], Any]] = [
        lambda g: g * 2, lambda g: g.t(), lambda g: (g * 2).view(12), lambda g: g.to_global(sbp=B), lambda g: g.to_global(sbp=P), lambda g: g[0], lambda g: g,
        lambda g: (torch.ones(2, 3, requires_grad=True) * 2).to_global(everywhere(), S(0)),  # type: ignore[attr-defined]
    ]  # fmt: skip
    for way in ways:
        x = laid_out(values(4, 3), S(0)).requires_grad_()
        y = way(x)
        value = full(y.detach())
        assert y.detach_() is y
        assert not y.requires_grad
        assert y.grad_fn is None
        assert y.is_leaf
        same(y, value)
    x = laid_out(values(4, 3), S(0)).requires_grad_()
    base = x * 2
    row = base[0]
    row.detach_()  # a view that had to move data
    base.mul_(3)
    same(row, values(4, 3)[0] * 6)
    assert not row.requires_grad
    assert base.requires_grad
    row.zero_()
    assert not base[0].any()


# ---------------------------------------------------------------------------------------------------------------- .data and set_


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
            if kept is not B:  # only this rank's part of the plain tensor would change
                x.add_(1)
                assert torch.equal(value, values(*shape, seed=1))


@on()
def test_a_parameter_stays_one_when_it_takes_plain_data() -> None:
    for sbp in (B, S(0), S(1)):
        for shape, dtype in (((4, 3), torch.float64), ((6, 3), torch.float64), ((4, 3), torch.float32)):
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
    with pytest.raises(InplaceError, match="a storage is the memory of one rank's part"):
        x.set_(torch.zeros(3).untyped_storage())


def resized(kind: str) -> list[list[float]]:
    """A model of transformers gets a larger vocabulary after it was laid out."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 32}
    gpt: Any = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    alone: Any = GPT2LMHeadModel(gpt) if kind == "gpt" else LlamaForCausalLM(LlamaConfig(**small, tie_word_embeddings=kind == "tied"))
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
        assert rows[0] == pytest.approx(rows[1], rel=1e-5), (kind, plan)  # transformers computes the loss of logits in float32
        found += rows
    return found


@pytest.mark.parametrize("kind", ["tied", "untied", "gpt"])
def test_embeddings_are_resized(kind: str) -> None:
    first, other = run_on(2, resized, kind)
    assert first == other
