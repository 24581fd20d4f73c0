"""Tests of global tensors in files: distributed checkpoints written from one layout and read into
another, and the files that torch.load accepts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from support.bodies import Bodies, values
from support.everywhere import full
from support.pool import run_on
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import globaltensor as flow
from globaltensor.errors import SbpError
from globaltensor.sharding.spec import StorageSpec

B, P, S = flow.sbp.broadcast, flow.sbp.partial_sum, flow.sbp.split
BODIES = Bodies()
on = BODIES.on


def spread(t: torch.Tensor, sbp: Any, placement: Any = None) -> Any:
    where = placement or flow.placement.all("cpu")
    return t.clone().to_global(where, [B] * where.axes).to_global(sbp=sbp).detach()


def whole(x: Any) -> torch.Tensor:
    """Return the full tensor on every rank of the world, including ranks outside the placement."""
    return x.detach().to_global(flow.placement.all("cpu"), B).to_local() if x.is_global else x


# --------------------------------------------------------------------------- torch.save, torch.load


@on(2, real=False)
def test_weights_only() -> None:
    line = flow.placement.all("cpu")
    with_unit = spread(values(2, 3, 4), S(1)).flatten(1)
    spec = with_unit._spec
    assert spec.layout[0].unit == 4
    split, shown = spec.replace(shape=(4,), layout=[S(0)]), spec.replace(shape=(4,), layout=[B])
    kept = flow.GlobalTensor.wrap(
        spread(values(4), S(0)).to_local(), StorageSpec.of(split, shown, [0])
    )
    model = nn.Linear(4, 3).to_global(line, S(0))
    buffer = io.BytesIO()
    torch.save(
        {
            "units": with_unit,
            "kept": kept,
            "partial": spread(values(3), P),
            "model": model.state_dict(),
            "w": model.weight,
        },
        buffer,
    )
    for options in ({}, {"map_location": "cpu"}, {"weights_only": False}):
        buffer.seek(0)
        got = torch.load(buffer, **options)
        assert got["units"]._spec is spec
        assert got["kept"]._spec is kept._spec
        assert isinstance(got["w"], nn.Parameter)
        assert torch.equal(got["model"]["weight"], model.weight)
        assert torch.equal(full(got["units"]), values(2, 3, 4).flatten(1))
        torch.testing.assert_close(full(got["partial"]), values(3))


# -------------------------------------------------------------------------- distributed checkpoints


SHAPES = ((5, 3), (1, 2), (0, 3))


def any_layout(folder: str, shape: tuple[int, int]) -> None:
    n = flow.env.get_world_size()
    line, half = flow.placement.all("cpu"), flow.placement("cpu", list(range(n // 2, n)))
    grid = flow.placement("cpu", torch.arange(n).reshape(2, -1).tolist())
    ways = [
        (line, [S(0)]),
        (line, [S(1)]),
        (line, [B]),
        (grid, [S(0), S(0)]),
        (grid, [S(1), B]),
        (grid, [S(0), S(1)]),
        (half, [S(0)]),
        (half, [B]),
    ]
    path = f"{folder}/{shape}"
    source = {
        str(i): spread(values(*shape, seed=i), sbp, where) for i, (where, sbp) in enumerate(ways)
    }
    units = values(2, 3, 4, seed=9)
    dcp.save(
        {
            **source,
            "plain": values(*shape, seed=8),
            "units": spread(units, S(1)).flatten(1),
            "number": spread(values(seed=7), B),
        },
        checkpoint_id=path,
    )
    for turn in (0, 3, 5):
        targets: dict[str, Any] = {}
        for i in range(len(ways)):
            where, sbp = ways[(i + turn) % len(ways)]
            targets[str(i)] = spread(torch.zeros(shape, dtype=torch.float64), sbp, where)
        targets["plain"] = spread(
            torch.zeros(shape, dtype=torch.float64), ways[turn][1], ways[turn][0]
        )
        targets["units"], targets["number"] = (
            spread(torch.zeros(2, 12).double(), S(1)),
            torch.zeros((), dtype=torch.float64),
        )
        dcp.load(targets, checkpoint_id=path)
        for i in range(len(ways)):
            assert torch.equal(whole(targets[str(i)]), values(*shape, seed=i)), (shape, turn, i)
        assert torch.equal(whole(targets["plain"]), values(*shape, seed=8))
        assert torch.equal(whole(targets["units"]), units.flatten(1))
        assert torch.equal(targets["number"], values(seed=7))
    plain = {str(i): torch.zeros(shape, dtype=torch.float64) for i in range(len(ways))}
    dcp.load(plain, checkpoint_id=path)
    assert all(torch.equal(plain[str(i)], values(*shape, seed=i)) for i in range(len(ways)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sweep(2)
def test_any_layout_into_any_other(tmp_path: Path, shape: tuple[int, int]) -> None:
    run_on(4, any_layout, str(tmp_path), shape)


def network(layout: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model if layout is None else model.to_global(flow.placement.all("cpu"), layout)


def trained(model: Any, optimizer: Any) -> None:
    for i in range(2):
        optimizer.zero_grad()
        x = values(8, 5, seed=i)
        model(spread(x, B) if model[1].weight.is_global else x).square().mean().backward()
        optimizer.step()


TRAINED: dict[str, Any] = {
    "whole": B,
    "columns": {"1.weight": S(1), "*": B},
    "pairs": {"1.*": S(0), "3.weight": S(1), "*": B},
    "local": None,
}


def training_goes_on(folder: str, before: str, after: str, options: dict[str, Any]) -> None:
    path = f"{folder}/dcp"
    model, other = network(TRAINED[before], 0), network(TRAINED[after], 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    second = torch.optim.AdamW(other.parameters(), lr=0.05, **options)
    trained(model, optimizer)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    found = get_state_dict(other, second)
    dcp.load({"model": found[0], "optimizer": found[1]}, checkpoint_id=path)
    set_state_dict(other, second, model_state_dict=found[0], optim_state_dict=found[1])
    trained(model, optimizer)
    trained(other, second)
    for (name, p), q in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(
            whole(p), whole(q), msg=lambda text, name=name: f"{name}: {text}"
        )
    if flow.env.get_rank() == 0:
        dcp_to_torch_save(path, f"{folder}/one.pt")
        assert torch.load(f"{folder}/one.pt")["model"]["1.weight"].shape == (7, 5)


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True, "amsgrad": True}], ids=["fused", "foreach"]
)
@pytest.mark.parametrize(
    ("before", "after"),
    [("pairs", "local"), ("whole", "columns"), ("columns", "pairs"), ("local", "whole")],
)
@pytest.mark.sweep(3)
def test_training_goes_on_in_another_layout(
    tmp_path: Path, before: str, after: str, options: dict[str, Any]
) -> None:
    run_on(2, training_goes_on, str(tmp_path), before, after, options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sweep(3)
def test_one_process_reads_what_ranks_wrote(tmp_path: Path, shape: tuple[int, int]) -> None:
    run_on(2, any_layout, str(tmp_path), shape)
    found = {str(i): torch.zeros(shape, dtype=torch.float64) for i in range(8)}
    dcp.load(found, checkpoint_id=str(tmp_path / str(shape)), no_dist=True)
    assert all(torch.equal(t, values(*shape, seed=int(i))) for i, t in found.items())


def whole_states() -> None:
    for layout in (B, {"1.weight": S(1), "*": B}, {"1.*": S(0), "3.weight": S(1), "*": B}):
        model, want, first = network(layout, 0), network(None, 0), flow.env.get_rank() == 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        trained(model, optimizer)
        trained(want, torch.optim.AdamW(want.parameters(), lr=0.05))
        states, of_optimizer = get_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )
        assert not any(
            t.is_global for kept in of_optimizer["state"].values() for t in kept.values()
        )
        for name, t in want.state_dict().items():
            assert not states[name].is_global
            torch.testing.assert_close(states[name], t)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        of_first = get_model_state_dict(model, options=options)
        assert set(of_first) == (set(states) if first else set())
        other = network({"*.weight": S(0), "*": B}, 1)
        set_model_state_dict(
            other,
            of_first,
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        for name, t in other.state_dict().items():
            torch.testing.assert_close(whole(t), states[name])


def test_a_whole_state_is_made_of_ordinary_tensors() -> None:
    run_on(2, whole_states)


def saved_while_training_goes_on(folder: str) -> None:
    model = network({"1.weight": S(0), "3.weight": S(1), "*": B}, 0)
    state = model.state_dict()
    before = {name: whole(t).clone() for name, t in state.items()}
    saving = dcp.async_save(state, checkpoint_id=folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    saving.result()
    found = network(B, 1).state_dict()
    dcp.load(found, checkpoint_id=folder)
    for name, t in found.items():
        torch.testing.assert_close(whole(t), before[name])


def test_async_save_copies_the_parts(tmp_path: Path) -> None:
    run_on(2, saved_while_training_goes_on, str(tmp_path / "state"))


def saved_without_a_name_on_one_rank(folder: str) -> None:
    state = {"w": spread(values(4), S(0)), "b": spread(values(3), B)}
    if flow.env.get_rank() == 1:
        del state["w"]
    with pytest.raises(CheckpointException, match=r"ranks \[0\] save shards of w, and ranks \[1\]"):
        dcp.save(state, checkpoint_id=folder)


def test_a_name_that_one_rank_lacks_is_told(tmp_path: Path) -> None:
    run_on(2, saved_without_a_name_on_one_rank, str(tmp_path / "state"))


@on(2, real=False)
def test_partial_is_refused() -> None:
    with pytest.raises(SbpError, match="put x"):
        spread(values(3), P).__create_write_items__("x", None)
