"""Tests of every example in the reference document on global tensors, with the import changed, on 2
and 4 real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.pool import run_on

import globaltensor as flow

DEVICE = "cuda" if flow.cuda.is_available() and flow.cuda.device_count() >= 4 else "cpu"


def construct() -> Any:
    """Construct Global Tensor."""
    # Place a global tensor on the devices of rank(process) 0 and 1
    placement = flow.placement(type=DEVICE, ranks=[0, 1])
    # Each rank's local data is a part data as a result of spliting global data on dim 0
    sbp = flow.sbp.split(dim=0)
    # Create a global tensor by randn
    x = flow.randn(4, 5, placement=placement, sbp=sbp)
    assert x.shape == flow.Size([4, 5])
    assert x.is_global
    assert x.placement == placement
    assert x.sbp == (sbp,)
    return tuple(x.to_local().shape), x.to_local().cpu().numpy(), x.numpy()


def convert() -> Any:
    """Convert Local Tensor to Global Tensor: nodes 0 and 1 run the same code."""
    x = flow.full((2, 5), float(flow.env.get_rank()))
    placement = flow.placement(DEVICE, [0, 1])
    sbp = flow.sbp.split(0)
    x_global = x.to_global(placement=placement, sbp=sbp)
    assert x_global.shape == (4, 5)
    return x_global.numpy().tolist()


def redistribute() -> Any:
    """Redistribute Global Tensor to another placement and another sbp. In a world without ranks 2
    and 3, the target is the same pair in reverse order."""
    other = [2, 3] if flow.env.get_world_size() == 4 else [1, 0]
    x = flow.tensor(
        [1.0, 2.0], placement=flow.placement(DEVICE, ranks=[0, 1]), sbp=flow.sbp.split(0)
    )
    y = x.to_global(placement=flow.placement(DEVICE, ranks=other), sbp=flow.sbp.broadcast)
    assert y.placement == flow.placement(DEVICE, ranks=other)
    assert y.sbp == (flow.sbp.broadcast,)
    assert x.sbp == (flow.sbp.split(0),), "the tensor redistributed stays as it was"
    return y.numpy().tolist(), y.to_local().tolist(), flow.env.get_rank() in other


def redistribute_beyond_the_world() -> Any:
    """Run the same example on fewer processes than it names."""
    x = flow.tensor(
        [1.0, 2.0], placement=flow.placement(DEVICE, ranks=[0, 1]), sbp=flow.sbp.split(0)
    )
    with pytest.raises(
        RuntimeError, match=r"names rank 2, 3, but this world has 2 ranks \(0 to 1\)"
    ):
        x.to_global(placement=flow.placement(DEVICE, ranks=[2, 3]), sbp=flow.sbp.broadcast)
    return x.tolist()


def add() -> Any:
    """Add two tensors with different layouts."""
    x = flow.randn(4, 4, placement=flow.placement(DEVICE, ranks=[0, 1]), sbp=flow.sbp.split(0))
    y = flow.randn(4, 4, placement=flow.placement(DEVICE, ranks=[0, 1]), sbp=flow.sbp.split(1))
    with flow.boxing_log() as log:
        z = x + y
    assert z.is_global
    assert z.placement == x.placement
    assert z.sbp in {x.sbp, y.sbp}
    assert len(log) == 1, "one of the two is redistributed"
    assert x.sbp == (flow.sbp.split(0),)
    assert y.sbp == (flow.sbp.split(1),)
    assert (z.numpy() == x.numpy() + y.numpy()).all()
    return z.tolist()


def local() -> Any:
    """Get Local Tensor from Global Tensor."""
    x = flow.randn(4, 5, placement=flow.placement(DEVICE, [0, 1]), sbp=flow.sbp.split(0))
    y = x.to_local()
    assert not y.is_global
    assert isinstance(y, flow.Tensor)
    assert type(y) == flow.Tensor  # noqa: E721 - flow.Tensor is torch's class
    assert y.dtype == flow.float32
    if flow.env.get_rank() < 2:
        assert y.device.type == DEVICE
        assert (y.cpu().numpy() == x.numpy()[2 * flow.env.get_rank() :][:2]).all()
    else:
        x.numpy()  # values are read by all ranks
        assert y.numel() == 0
    return tuple(y.shape)


def environment() -> Any:
    return (
        flow.env.get_rank(),
        flow.env.get_world_size(),
        flow.env.get_local_rank(),
        flow.env.get_node_size(),
    )


@pytest.fixture(params=[2, 4])
def on(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], list[Any]]:
    return lambda fn: run_on(request.param, fn)


def test_construct(on: Any) -> None:
    found = on(construct)
    whole = flow.cat([flow.from_numpy(part) for _, part, _ in found[:2]])
    assert [shape for shape, _, _ in found] == [(2, 5), (2, 5), (0,), (0,)][: len(found)]
    assert all((flow.from_numpy(value) == whole).all() for _, _, value in found)


def test_convert(on: Any) -> None:
    found = on(convert)
    assert found == [[[0.0] * 5, [0.0] * 5, [1.0] * 5, [1.0] * 5]] * len(found)


def test_redistribute(on: Any) -> None:
    for value, part, inside in on(redistribute):
        assert value == [1.0, 2.0]
        assert part == ([1.0, 2.0] if inside else [])


def test_redistribute_beyond_the_world() -> None:
    assert run_on(2, redistribute_beyond_the_world) == [[1.0, 2.0]] * 2


def test_add(on: Any) -> None:
    found = on(add)
    assert all(value == found[0] for value in found)


def test_local(on: Any) -> None:
    found = on(local)
    assert found == [(2, 5), (2, 5), (0,), (0,)][: len(found)]


def test_environment(on: Any) -> None:
    found = on(environment)
    n = len(found)
    assert found == [(rank, n, rank, 1) for rank in range(n)]
