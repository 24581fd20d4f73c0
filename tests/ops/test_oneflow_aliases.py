"""Tests of OneFlow's other spellings: older forms of placements, functions next to the methods,
pytrees and the global mode, files written and read by one rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.simulate import simulate
from globaltensor.errors import (
    LocalTensorError,
    PlacementError,
    RenamedError,
    SbpError,
    ShapeError,
    WorldError,
)
from globaltensor.utils import global_view

B, S, P = flow.sbp.broadcast, flow.sbp.split, flow.sbp.partial_sum


# --------------------------------------------------------------------------------------- placements


def test_placements_by_node() -> None:
    with pytest.warns(DeprecationWarning, match="name the ranks"):
        assert flow.placement("cpu", {0: range(4)}, (2, 2)) == flow.placement(
            "cpu", [[0, 1], [2, 3]]
        )
    with pytest.warns(DeprecationWarning, match="name the ranks"):
        assert flow.placement(device_type="cpu", device_ids={0: 1}) == flow.placement("cpu", 1)
    with pytest.warns(DeprecationWarning, match="placement.type now"):
        assert flow.placement("cuda", [0]).device_type == "cuda"
    with pytest.warns(DeprecationWarning, match="ranks.shape now"):
        assert flow.placement("cuda", [[0, 1]]).hierarchy == (1, 2)


def test_devices_of_later_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow.env, "get_world_size", lambda: 8)
    monkeypatch.setattr(flow.env, "get_node_size", lambda: 2)
    with pytest.warns(DeprecationWarning, match="name the ranks"):
        assert flow.placement("cpu", {1: [0, 3], 0: [1]}) == flow.placement("cpu", [1, 4, 7])


@pytest.mark.parametrize(
    ("ranks", "hierarchy", "says"),
    [
        ({0: [0, 1, 2]}, (2, 2), r"hierarchy \(2, 2\) has 4 places for 3 devices"),
        ({0: [0.5]}, None, "numbered from 0"),
        ({-1: [0]}, None, "numbered from 0"),
        ({0: [0, 0]}, None, "duplicate rank 0"),
        ([0, 1], (2,), "belongs to ranks given by node"),
        ({}, None, "numbered from 0"),
    ],
)
def test_placements_that_cannot_be(ranks: Any, hierarchy: Any, says: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(PlacementError, match=says):
            flow.placement("cpu", ranks, hierarchy)


# ------------------------------------------------------------------------- functions and attributes


def _functions() -> None:
    place = flow.placement("cpu", [0, 1])
    x = torch.arange(4.0)
    g = flow.local_to_global(x, place, S(0), check_meta=False)
    assert g.shape == (8,)
    assert flow.global_to_global(g, sbp=B).sbp == (B,)
    assert flow.global_to_global(g, place, P, grad_sbp=B).sbp == (P,)
    with pytest.raises(SbpError, match="global already"):
        flow.local_to_global(g, place, B)
    with pytest.raises(SbpError, match="local_to_global makes it global"):
        flow.global_to_global(x, place, B)
    assert not g.is_lazy
    assert not x.is_lazy
    g.check_meta_consistency()
    for t in (x, g):
        for old, new in (("is_consistent", "is_global"), ("to_consistent", "to_global")):
            assert not hasattr(t, old)
            with pytest.raises(RenamedError, match=rf"\.{old} is \.{new} now"):
                getattr(t, old)
    odd = flow.Spec.make((4,) if flow.env.get_rank() == 0 else (6,), torch.float32, place, [S(0)])
    with pytest.raises(
        ShapeError, match=r"rank 0 has float32\[4\] S\(0\)(.|\n)*rank 1 has float32\[6\] S\(0\)"
    ):
        flow.GlobalTensor.wrap(
            torch.ones(odd.local_shape(flow.env.get_rank())), odd
        ).check_meta_consistency()
    with pytest.raises(LocalTensorError):
        _ = x.sbp


def test_functions_and_attributes() -> None:
    simulate(2, _functions)


# ------------------------------------------------------------------------- pytrees, the global mode


def _nests() -> None:
    rank = flow.env.get_rank()
    first, both = flow.placement("cpu", [0]), flow.placement("cpu", [0, 1])
    nest = {
        "a": torch.ones(2, 3),
        "b": (torch.zeros(2, dtype=torch.int64), None, [torch.full((1,), 7.0, requires_grad=True)]),
    }
    got = global_view.to_global(nest if rank == 0 else None, first, B)
    assert got["a"].shape == (2, 3)
    assert got["b"][0].dtype is torch.int64
    assert got["b"][1] is None
    assert got["b"][2][0].item() == 7.0
    assert got["b"][2][0].requires_grad
    with pytest.raises(SbpError, match=r"to_global of None: .*global_view\.to_global"):
        flow.to_global(None, first, B)
    split = global_view.to_global(nest, both, lambda obj, t: S(0) if t is obj["a"] else B)
    assert split["a"].shape == (4, 3)
    assert split["b"][0].sbp == (B,)
    back = global_view.to_local(split, copy=True)
    assert torch.equal(back["a"], nest["a"])
    assert not back["a"].is_global
    with pytest.warns(UserWarning, match="a str is no tensor"):
        assert global_view.to_global([torch.ones(1), "text"], both, B)[1] == "text"
    assert (
        global_view.to_global([torch.ones(1), "text"], both, B, warn_on_non_tensor_leaf=False)[1]
        == "text"
    )


@pytest.mark.filterwarnings("error")
def test_nests() -> None:
    run_on(2, _nests)


def _mode() -> None:
    place = flow.placement("cpu", [0, 1])
    assert not global_view.current_global_mode().is_enabled
    with global_view.global_mode(True, place, S(0)) as mode:
        assert (mode.is_enabled, mode.placement, mode.sbp) == (True, place, (S(0),))
        x = flow.ones(4, 2)
        assert x.sbp == (S(0),)
        assert flow.arange(4, device="cpu").is_global
        assert flow.zeros(4, placement=place, sbp=B).sbp == (B,)
        assert not torch.ones(2).is_global
        assert x.to(x.device) is x
        with global_view.global_mode(False):
            assert not flow.ones(2).is_global
        assert flow.randn(4).is_global
    assert not flow.ones(2).is_global
    with (
        pytest.raises(SbpError, match="needs placement and sbp"),
        global_view.global_mode(True, place),
    ):
        pass


def test_global_mode() -> None:
    simulate(2, _mode)


# -------------------------------------------------------------------------------------------- files


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)
        self.tied = self.inner.weight


def _files(folder: Path) -> None:
    rank, both, second = (
        flow.env.get_rank(),
        flow.placement("cpu", [0, 1]),
        flow.placement("cpu", [1]),
    )
    torch.manual_seed(0)
    plain = Net()
    net = Net()
    net.load_state_dict(plain.state_dict())
    net.to_global(both, lambda path, t: S(0) if t.dim() else B)
    part = torch.arange(3.0).to_global(placement=both, sbp=P) * 2
    alone = flow.full((2,), 5.0, placement=second, sbp=B)
    path = folder / "whole.pt"
    flow.save(
        {"net": net.state_dict(), "sum": part, "alone": alone, "step": 3, "plain": torch.ones(1)},
        path,
        global_dst_rank=1,
    )
    found = torch.load(path)
    assert not any(getattr(t, "is_global", False) for t in found["net"].values())
    for name, value in plain.state_dict().items():
        assert torch.equal(found["net"][name], value), name
    assert torch.equal(found["sum"], torch.arange(3.0) * 4)
    assert torch.equal(found["alone"], torch.full((2,), 5.0))
    assert found["step"] == 3
    read = flow.load(path if rank == 1 else folder / "nobody reads this", global_src_rank=1)
    assert read["net"]["inner.weight"].placement is second
    assert read["step"] == 3
    other = Net()
    other.to_global(both, lambda path, t: S(t.dim() - 1) if t.dim() else B)
    other.load_state_dict(read["net"])
    assert torch.equal(
        torch.from_numpy(other.inner.weight.detach().numpy()), plain.inner.weight.detach()
    )
    assert flow.load(path, both, global_src_rank=0)["sum"].sbp == (B,)
    flow.save(net, folder / "module.pt", global_dst_rank=0)
    module = torch.load(folder / "module.pt", weights_only=False)
    assert module.tied is module.inner.weight
    assert isinstance(module.tied, nn.Parameter)
    assert torch.equal(module.tied, plain.tied)
    flow.save(net.state_dict(), folder / f"parts.{rank}.pt")
    assert flow.load(folder / f"parts.{rank}.pt")["inner.weight"].sbp == (S(0),)
    with pytest.raises(WorldError, match=r"rank 0 could not read the file: FileNotFoundError"):
        flow.load(folder / "missing.pt", global_src_rank=0)
    with pytest.raises(WorldError, match="rank 1 could not write the file"):
        flow.save(part, folder / "missing" / "x.pt", global_dst_rank=1)
    with pytest.raises(
        WorldError, match="global_dst_rank=2: it must be a rank of this world, 0 to 1"
    ):
        flow.save(part, path, global_dst_rank=2)


def test_files_of_whole_values(tmp_path: Path) -> None:
    run_on(2, _files, tmp_path)


def test_products_as_libraries_call_them() -> None:
    """opt_einsum finds this package by the module of a tensor's class, and calls its functions with
    NumPy's signatures."""

    def on_ranks() -> None:
        line = flow.placement("cpu", [0, 1])
        a, b = torch.arange(24.0).view(2, 3, 4), torch.arange(20.0).view(4, 5)
        for sbp in (flow.sbp.broadcast, flow.sbp.split(0), flow.sbp.split(1)):
            x, y = (t.to_global(line, flow.sbp.broadcast).to_global(sbp=sbp) for t in (a, b))  # type: ignore[attr-defined]
            assert type(x).__module__.partition(".")[0] == flow.__name__
            assert (
                flow.tensordot(x, y, axes=((2,), (0,))).tolist()
                == torch.tensordot(a, b, dims=1).tolist()
                == flow.tensordot(x, y, 1).tolist()
            )
            assert flow.transpose(x, (2, 0, 1)).tolist() == a.permute(2, 0, 1).tolist()
            assert (
                flow.transpose(x, 0, 2).tolist()
                == flow.transpose(x).tolist()
                == flow.transpose(x, dim0=0, dim1=2).tolist()
                == a.permute(2, 1, 0).tolist()
            )

    simulate(2, on_ranks)
