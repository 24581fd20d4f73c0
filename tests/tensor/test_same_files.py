"""Tests of saving and loading where the ranks' arguments differ, or where one rank saves alone."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.pool import run_on
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import globaltensor as flow
from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError, PartError, WorldError

B, S = flow.sbp.broadcast, flow.sbp.split


def rows() -> Any:
    return (
        torch.arange(12.0)
        .view(4, 3)
        .to_global(flow.placement.all("cpu"), B)  # type: ignore[attr-defined]
        .to_global(sbp=S(0))
    )


def refused(body: Any, pattern: str) -> str:
    with pytest.raises(DivergenceError) as found:
        body()
    assert re.search(pattern, str(found.value)), str(found.value)
    return str(found.value)


def other_objects(folder: str) -> list[str]:
    rank, said, path = flow.env.get_rank(), [], f"{folder}/file.pt"
    a, b = rows(), rows() + 1

    def save(obj: Any, rank_that_writes: int = 0) -> Any:
        return lambda: flow.save(obj, path, global_dst_rank=rank_that_writes)

    start = r"^test_same_files.py:\d+: .*\nsave: the ranks pass "
    said.append(
        refused(
            save({"x": a, "y": b} if rank == 0 else {"y": b, "x": a}),
            start + r"objects with other global tensors, or with the same in another order. They "
            r"differ from tensor 0 on:\n  rank 0: \['x'\]: .*\n  rank 1: \['y'\]: ",
        )
    )
    said.append(
        refused(
            save({"m": [a, b]} if rank == 0 else {"m": [a, a]}),
            r"tensor 1 on:\n  rank 0: \['m'\]\[1\]: f32\[4, 3\] S\(0\)\n"
            r"  rank 1: \['m'\]\[0\]: f32\[4, 3\] S\(0\), the same as tensor 0",
        )
    )
    said.append(
        refused(
            save({"x": a, "best": b} if rank == 0 else {"x": a}),
            r"rank 0: \['best'\]: .*\n  rank 1: no further tensor",
        )
    )
    said.append(refused(save(a, rank), start + r"different global_dst_rank: 0 on rank 0, 1 on"))
    assert not Path(path).exists()
    save({"x": a, "y": [b, "text", torch.ones(2)]})()
    world().comm((0, 1)).barrier()
    assert torch.load(path)["x"].tolist() == torch.arange(12.0).view(4, 3).tolist()
    assert torch.load(path)["y"][0].sum() == 78.0
    said.append(
        refused(
            lambda: flow.load(path, global_src_rank=rank),
            r"^test_same_files.py:\d+: .*\nload: the ranks pass different global_src_rank: 0 on",
        )
    )
    assert flow.load(path, global_src_rank=1)["x"].sum().item() == 66.0
    return said


def test_ranks_that_save_other_objects_are_told(tmp_path: Path) -> None:
    said = run_on(2, other_objects, str(tmp_path))
    assert said[0] == said[1]


def alone(folder: str) -> None:
    rank = flow.env.get_rank()
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 1.0)
    flow.parallelize(model, flow.placement.all("cpu"), "fsdp")
    state = model.state_dict()
    if rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's: it saves in a single process
            with pytest.raises(CheckpointException, match=r"PartError.* 8 of the 16 elements of"):
                dcp.save(state, checkpoint_id=f"{folder}/alone", no_dist=True)
    dcp.save(state, checkpoint_id=f"{folder}/all")
    for p in model.parameters():
        p.detach().zero_()
    dcp.load(state, checkpoint_id=f"{folder}/all")
    assert model.weight.sum().item() == 16.0
    # a checkpoint without the shards of rank 1, as an older version wrote it
    metadata = dcp.FileSystemReader(f"{folder}/all").read_metadata()
    del metadata.state_dict_metadata["weight"].chunks[1]  # type: ignore[union-attr]
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata)
    with pytest.raises(PartError, match=r"checkpoint.load: the checkpoint holds 8 of the 16"):
        planner.create_local_plan()


def test_a_checkpoint_without_some_shards_is_refused(tmp_path: Path) -> None:
    run_on(2, alone, str(tmp_path))


def one_path_for_two_shards(folder: str) -> tuple[str, str]:
    """Save without ``global_dst_rank``. Rank 0 has written when rank 1 does."""
    rank, path, x = flow.env.get_rank(), f"{folder}/shards.pt", rows()
    flow.save({"x": x}, f"{folder}/{rank}.pt")
    flow.save({"x": x}, f"{folder}/{rank}.pt")  # a rank may replace its own file
    flow.save({"x": x.to_global(sbp=B)}, f"{folder}/replicated.pt")  # all ranks may read this file
    said = ""
    for turn in range(2):
        if turn == rank:
            try:
                flow.save({"x": x}, path)
            except WorldError as error:
                said = str(error)
        torch.distributed.barrier()
    own = torch.load(path) if rank == 0 else torch.load(f"{folder}/1.pt")
    assert torch.equal(own["x"].to_local(), x.to_local())
    return said, path


def test_a_rank_does_not_replace_the_shards_of_another(tmp_path: Path) -> None:
    (first, path), (second, _) = run_on(2, one_path_for_two_shards, str(tmp_path))
    assert first == ""
    assert re.match(
        r"test_same_files.py:\d+: flow.save\(\{.x.: x\}, path\)\nsave: rank 1 would replace what "
        rf"rank 0 has written to '{path}': .*Name the files by rank.*global_dst_rank=0",
        second,
    )
