"""Jobs of the job-function view on simulated devices. Threads of this process run the work that a
session runs in its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import globaltensor.v0 as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.distributed.world import world
from globaltensor.v0.recording.signature import array_of
from globaltensor.v0.session.device_layout import Layout
from globaltensor.v0.session.engine import Engine


class Played:
    """The results of some calls. ``results``: each call's result, as its caller gets it.
    ``variables``: the values afterwards, by name, with the states of optimizers."""

    def __init__(self, results: list[Any], variables: dict[str, np.ndarray[Any, Any]]) -> None:
        self.results, self.variables = results, variables


def play(
    devices: int,
    calls: Sequence[tuple[Any, ...]],
    start: dict[str, Any] | None = None,
    more: Sequence[Any] = (),
) -> Played:
    """Make these calls, each (job, arguments...), on this number of simulated devices. Variables
    named in ``start`` begin with those values."""
    layout = Layout(1, devices, "gpu", "cpu")
    jobs = {job.name: job for job, *_ in [*calls, *((job,) for job in more)]}
    records = {name: job.recorded(layout) for name, job in jobs.items()}

    def rank() -> Played:
        first = world().rank == 0
        engine = Engine(list(records.values()), layout, 0)
        if start:
            engine.load(
                list(start), {name: np.asarray(v) for name, v in start.items()} if first else None
            )
        results = []
        for job, *args in calls:
            given = zip(job.signature.placeholders(), job.signature.given(args, {}), strict=True)
            arrays = [
                array_of(job.name, name, leaf, value, devices) for (name, leaf), value in given
            ]
            pieces = engine.run(job.name, arrays if first else None)
            results.append(
                job.signature.handed(
                    records[job.name].results, pieces, records[job.name].mirrored_of
                )
                if first
                else None
            )
        return Played(results, engine.fetch(engine.names()))

    found: Played = simulate(devices, rank)[0]
    return found


def drawn(*shape: int, seed: int = 0) -> Any:
    """Return normal float32 numbers, the same for the same shape and seed."""
    return np.random.RandomState(seed + sum(shape)).randn(*shape).astype(np.float32)


def same(got: Any, want: Any, tolerance: float = 1e-6) -> None:
    """Assert that arrays have one shape and, up to the tolerance, the same values."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(1.0, np.abs(want).max()), np.abs(
        got - want
    ).max()


def constant(rate: float) -> Any:
    """Return a constant learning rate."""
    return flow.optimizer.PiecewiseConstantScheduler([], [rate])
