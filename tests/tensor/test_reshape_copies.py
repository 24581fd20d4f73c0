"""Tests of functions that copy what they cannot view: reshape, flatten, ravel, contiguous. Whether
a result shares memory follows from the strides of one device, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


def like_shape(x: Any, *shape: int) -> Any:
    other = torch.empty(shape)
    return other.to_global(x.placement, B) if x.is_global else other  # type: ignore[attr-defined]


#: The shape of a base, and a function of it. Some results are views on one device, others copies.
CALLS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "t reshape": ((4, 3), lambda x: x.t().reshape(12)),
    "t torch.reshape": ((4, 3), lambda x: torch.reshape(input=x.t(), shape=(2, 6))),
    "t reshape_as": ((4, 3), lambda x: x.t().reshape_as(like_shape(x, 12))),
    "t flatten": ((4, 3), lambda x: x.t().flatten()),
    "t ravel": ((4, 3), lambda x: x.t().ravel()),
    "t contiguous": ((4, 3), lambda x: x.t().contiguous()),
    "t to": ((4, 3), lambda x: x.t().to(torch.float64)),
    "t resolve_conj": ((4, 3), lambda x: x.t().resolve_conj()),
    "t unflatten": ((4, 3), lambda x: x.t().unflatten(1, (2, 2))),
    "columns reshape": ((4, 3), lambda x: x[:, :2].reshape(8)),
    "columns flatten": ((4, 3), lambda x: x[:, 1:].flatten()),
    "columns contiguous": ((4, 3), lambda x: x[:, :2].contiguous()),
    "rows reshape": ((4, 3), lambda x: x[1:3].reshape(6)),
    "rows contiguous": ((4, 3), lambda x: x[1:3].contiguous()),
    "every other row": ((4, 3), lambda x: x[::2].reshape(6)),
    "every other ravel": ((6,), lambda x: x[::2].ravel()),
    "every other reshape": ((6, 1), lambda x: x[::2].reshape(3)),
    "permute reshape": ((2, 4, 3), lambda x: x.permute(1, 0, 2).reshape(4, 6)),
    "permute contiguous": ((2, 4, 3), lambda x: x.permute(1, 0, 2).contiguous()),
    "permute detach": ((2, 4, 3), lambda x: x.permute(1, 0, 2).detach().reshape(4, 6)),
    "permute twice": ((2, 4, 3), lambda x: x.permute(1, 0, 2).permute(1, 0, 2).reshape(8, 3)),
    "heads": ((2, 2, 3, 2), lambda x: x.transpose(1, 2).reshape(2, 3, 4)),
    "swapaxes flatten": ((4, 2, 3), lambda x: x.swapaxes(0, 1).flatten(0, 1)),
    "movedim reshape": ((2, 2, 2), lambda x: x.movedim(0, 2).reshape(4, 2)),
    "mT reshape": ((2, 4, 3), lambda x: x.mT.reshape(2, 12)),
    "chunk of t": ((4, 4), lambda x: x.t().chunk(2)[1].reshape(8)),
    "chunk contiguous": ((4, 4), lambda x: x.chunk(2, 1)[1].contiguous()),
    "tensor_split": ((4, 4), lambda x: x.tensor_split(2, 1)[0].flatten()),
    "expand reshape": ((4, 1), lambda x: x.expand(4, 3).reshape(12)),
    "joined": ((4, 2, 3), lambda x: x.reshape(8, 3)),
    "flat": ((4, 3), lambda x: x.reshape(12)),
}


def layouts(dims: int) -> list[Any]:
    return [B, P, *map(S, range(dims))]


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def read(x: Any) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy()) if x.is_global else x.detach()


def written(call: Callable[[Any], Any], x: Any) -> list[list[Any]]:
    """Return the base and the result after a write into the result, and after one into the base."""
    out = call(x)
    out.mul_(3)
    first = [read(x).tolist(), read(out).tolist()]
    x.add_(1)
    return [*first, read(x).tolist(), read(out).tolist()]


def wrong_calls(size: int) -> list[tuple[str, str]]:
    """Return the calls and layouts whose values differ from those of one device."""
    wrong, placement = [], flow.placement("cpu", list(range(size)))
    for name, (shape, call) in CALLS.items():
        want = written(call, numbers(shape))
        for sbp in layouts(len(shape)):
            x = numbers(shape).to_global(placement, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
            if written(call, x) != want:
                wrong.append((name, repr(sbp)))
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.sweep(3)
def test_a_copy_is_independent_and_a_view_is_not(size: int) -> None:
    assert not any(simulate(size, lambda: wrong_calls(size)))


def test_on_real_processes() -> None:
    assert run_on(2, wrong_calls, 2, timeout=120) == [[], []]


#: Each part has every fifth call.
PARTS = 5


def wrong_in_graphs(part: int) -> list[tuple[str, str]]:
    """Return the calls and layouts whose values in a graph differ from those of one device."""
    wrong, placement = [], flow.placement("cpu", [0, 1])
    for name, (shape, call) in list(CALLS.items())[part::PARTS]:

        def write(x: Any, call: Callable[[Any], Any] = call) -> tuple[Any, Any]:
            base = x * 1
            out = call(base)
            out.mul_(3)
            return base, out

        class Written(flow.nn.Graph):
            def build(self, x: Any, write: Any = write) -> tuple[Any, Any]:
                return write(x)  # type: ignore[no-any-return]

        want = [t.tolist() for t in write(numbers(shape))]
        for sbp in layouts(len(shape)):
            x = numbers(shape).to_global(placement, B).to_global(sbp=sbp)  # type: ignore[attr-defined]
            if [read(t).tolist() for t in Written()(x)] != want:
                wrong.append((name, repr(sbp)))
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sweep(PARTS)
def test_in_a_graph(part: int) -> None:
    assert simulate(2, wrong_in_graphs, part) == [[], []]


#: Steps of a chain; a step that one device refuses is left out.
STEPS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.transpose(0, -1),
    "permute": lambda x: x.permute(1, 0, *range(2, x.dim())),
    "columns": lambda x: x[..., 1:],
    "first column": lambda x: x[..., :1],
    "rows": lambda x: x[1:],
    "steps": lambda x: x[::2],
    "row": lambda x: x[0],
    "chunk": lambda x: x.chunk(2, -1)[0],
    "flatten": lambda x: x.flatten(),
    "flatten first": lambda x: x.flatten(0, 1),
    "reshape": lambda x: x.reshape(2, -1),
    "reshape 3": lambda x: x.reshape(-1, 3),
    "reshape 4": lambda x: x.reshape(2, -1, 2),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(0, (2, -1)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.squeeze(),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "mul": lambda x: x.mul_(3),
    "zero": lambda x: x.zero_(),
    "set": lambda x: x.__setitem__(..., 7.0),
    "copy": lambda x: x.copy_(x * 2 + 1),
}


def possible(shape: tuple[int, ...], chain: list[str]) -> list[str]:
    """Return the steps of a chain that one device accepts."""
    x, accepted = numbers(shape), []
    for name in chain:
        try:
            x = STEPS[name](x)
        except (RuntimeError, IndexError, ValueError):
            continue
        accepted.append(name)
    return accepted


def after_writes(x: Any, chain: list[str], write: str) -> list[Any]:
    """Return all tensors of a chain after writes into the last one and into the base."""
    tensors = [x]
    for name in chain:
        tensors.append(STEPS[name](tensors[-1]))
    WRITES[write](tensors[-1])
    x.add_(1)
    return [read(t).tolist() for t in tensors]


def check_chains(shape: tuple[int, ...], chain: list[str], write: str, data: Any) -> None:
    sbp, chain = data.draw(st.sampled_from(layouts(len(shape)))), possible(shape, chain)
    want = after_writes(numbers(shape), chain, write)

    def on_ranks() -> None:
        x = numbers(shape).to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=sbp)  # type: ignore[attr-defined]
        assert after_writes(x, chain, write) == want, (sbp, chain)

    simulate(2, on_ranks)


chains = given(
    shape=st.sampled_from([(4, 3), (2, 4, 3), (4, 2, 2), (2, 2, 3, 2), (6,), (3, 5)]),
    chain=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    write=st.sampled_from(sorted(WRITES)),
    data=st.data(),
)


@pytest.mark.long
@chains
@settings(max_examples=35, deadline=None)
def test_chains(shape: Any, chain: Any, write: Any, data: Any) -> None:
    check_chains(shape, chain, write, data)


@pytest.mark.extended
@chains
@settings(max_examples=150, deadline=None)
def test_many_chains(shape: Any, chain: Any, write: Any, data: Any) -> None:
    check_chains(shape, chain, write, data)
