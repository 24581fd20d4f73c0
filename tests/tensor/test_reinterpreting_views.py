"""Tests of writes through views that read a tensor as another dtype, and of refused writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.simulate import simulate

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum
LAYOUTS = [B, P, S(0), S(1)]

WRITES: dict[str, Callable[[Any], Any]] = {
    "there and back": lambda x: x.view(torch.int64).view(torch.float64).mul_(3),
    "as integers": lambda x: x.view(torch.int64).zero_(),
    "as narrow integers": lambda x: x.view(torch.int32).fill_(0),
    "a row of a narrow view": lambda x: x.view(torch.float32)[1].zero_(),
    "transposed": lambda x: x.t().view(torch.int64).t()[0].zero_(),
    "as complex": lambda x: torch.view_as_complex(x).mul_(1j),
    "as complex dtype": lambda x: x.view(torch.complex128).mul_(1j),
    "as complex and back": lambda x: torch.view_as_real(torch.view_as_complex(x))[..., 0].mul_(2),
    "real": lambda x: torch.view_as_complex(x).real.mul_(3),
    "imag": lambda x: torch.view_as_complex(x).imag.add_(3),
    "out": lambda x: torch.add(torch.view_as_complex(x.clone()), 1j, out=torch.view_as_complex(x)),
    "item": lambda x: torch.view_as_complex(x).__setitem__(0, 5),
}


def numbers() -> torch.Tensor:
    return torch.arange(1.0, 9, dtype=torch.float64).view(4, 2)


def read(x: Any) -> list[Any]:
    return (x.detach().numpy() if x.is_global else x.detach()).tolist()  # type: ignore[no-any-return]


def gradient(x: Any, write: Callable[[Any], Any]) -> list[Any] | None:
    """Return the gradient through a write, or None if the write is not differentiable."""
    leaf = x.requires_grad_()
    base = leaf * 1
    try:
        write(base)
        (base * base).sum().backward()
    except RuntimeError:
        return None
    return read(leaf.grad)


def wrong_writes() -> list[tuple[str, str]]:
    """Return the writes and layouts whose values or gradients differ from those of one device."""
    wrong = []
    for name, write in WRITES.items():
        for sbp in LAYOUTS:
            plain = numbers()
            x: Any = plain.to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=sbp)  # type: ignore[attr-defined]
            leaf = x.clone()
            write(plain), write(x)
            if read(x) != read(plain):
                wrong.append((name, repr(sbp)))
            want = gradient(numbers(), write)
            if want is not None and gradient(leaf, write) != want:
                wrong.append((f"gradient of {name}", repr(sbp)))
    return wrong


def test_writes_through_another_dtype() -> None:
    assert simulate(2, wrong_writes) == [[], []]


def test_writes_through_another_dtype_on_real_processes() -> None:
    assert run_on(2, wrong_writes, timeout=120) == [[], []]


def test_a_write_into_a_real_view_shows_in_other_views() -> None:
    def on_ranks() -> None:
        plain = torch.view_as_complex(numbers())
        x: Any = plain.to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
        first = x[0]
        first.mul_(1)
        x.real.mul_(3)
        assert complex(first) == 3 + 2j

    simulate(2, on_ranks)


def changed_by_refused_write() -> list[Any]:
    """Return the views of a chunk before and after a write that torch refuses."""
    leaf = torch.arange(1.0, 7).to_global(flow.placement("cpu", [0, 1]), B).to_global(sbp=S(0))  # type: ignore[attr-defined]
    x = leaf.clone().requires_grad_() * 1
    views = [x.chunk(2)[0]]
    views += [views[0].reshape(3)]
    views += [views[1].reshape(3), views[0][:1]]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        views[2].zero_()
    return [read(v) for v in (x, *views)]


def test_a_refused_write_changes_nothing() -> None:
    row = [1.0, 2.0, 3.0]
    assert (
        run_on(2, changed_by_refused_write) == [[[*row, 4.0, 5.0, 6.0], row, row, row, [1.0]]] * 2
    )
