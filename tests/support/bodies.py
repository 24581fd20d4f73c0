"""Test bodies that several ranks run. Each runs on simulated ranks, and all bodies of a file run
once more on real processes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from globaltensor.distributed.simulate import simulate

Body = Callable[[], None]


class Bodies:
    """The test bodies of one file."""

    def __init__(self) -> None:
        self.real: list[Body] = []

    def on(self, n: int = 2, real: bool = True) -> Callable[[Body], Body]:
        """Return a decorator for a function that each of ``n`` simulated ranks runs. A function for
        two ranks also runs on real processes, unless ``real`` is false."""

        def test(body: Body) -> Body:
            if real and n == 2:
                self.real.append(body)

            @functools.wraps(body)
            def run() -> None:
                simulate(n, body, timeout=20.0)

            return run

        return test

    def run(self, part: int = 0, parts: int = 1) -> None:
        """Run the bodies on one of two real processes, or every ``parts``-th of them."""
        for body in self.real[part::parts]:
            try:
                torch.manual_seed(0)
                body()
            except BaseException as error:
                raise AssertionError(f"in {body.__name__}") from error


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, the same on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
