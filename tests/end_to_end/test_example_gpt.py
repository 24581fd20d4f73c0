"""Tests of examples/train_gpt.py. Every mode gives the losses of one device, and a checkpoint of
one mode resumes in any other.

Run as a script (by a launcher), this file is the program of each rank. It runs the modes one after
the other, so that processes start once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import PYTHONPATH, import_script
from support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
MODES = ["data", "tensor", "sequence", "fsdp", "hybrid"]
STAGES = ["pipeline", "pipeline --graph"]
GRAPHS = [f"{mode} --graph" for mode in MODES]
# Five snippets over two ranks: the split is uneven on purpose.
SMALL = [
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "4",
    "--context",
    "16",
    "--batch",
    "5",
    "--log-every",
    "1",
    "--sample",
    "12",
    "--dtype",
    "float64",
]


def example() -> Any:
    """Return the example as a module."""
    return import_script("examples/train_gpt.py")


def trained(main: Any, *arguments: str) -> dict[str, Any]:
    """Run the example once, and return its losses and the text that the model writes."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = main(arguments)
    return {"losses": losses, "text": printed.getvalue().partition("--- the model writes\n")[2]}


def fresh_and_resumed(
    main: Any, mode: str, options: Sequence[str], checkpoint: Path, other: Path
) -> dict[str, Any]:
    """Run three steps and save. Then resume from the other checkpoint, made in another mode, up to
    step five."""
    return {
        "fresh": trained(
            main,
            "--parallel",
            *mode.split(),
            *options,
            "--steps",
            "3",
            "--checkpoint",
            str(checkpoint),
        ),
        "resumed": trained(
            main,
            "--parallel",
            *mode.split(),
            *options,
            "--steps",
            "5",
            "--checkpoint",
            str(other),
            "--resume",
        )
        if other.exists()
        else None,
    }


def on_ranks(directory: Path, modes: Sequence[str], options: Sequence[str]) -> None:
    """Run the modes on this rank. Each mode resumes from a copy, because a run ends by saving under
    the name that it resumed from."""
    import globaltensor as flow

    warnings.simplefilter("error")  # for example the warning of a function without a rule
    main = example().main
    for mode in modes:
        found = fresh_and_resumed(
            main, mode, options, directory / f"{mode}.pt", directory / f"for-{mode}.pt"
        )
        if flow.env.get_rank() == 0:
            (directory / f"{mode}.json").write_text(json.dumps(found))


def launch(nproc: int, seconds: float, *arguments: str) -> None:
    """Run this file on several processes. No process is left behind in any case."""
    command = [
        warm_python(),
        "-m",
        "globaltensor.distributed.launch",
        "--nproc_per_node",
        str(nproc),
        __file__,
        *arguments,
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
    }
    ranks = subprocess.Popen(
        command,
        env=environment,
        cwd=arguments[0],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = ranks.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait(10)
    assert ranks.returncode == 0, printed[-4000:]


def compare(
    directory: Path,
    nproc: int,
    modes: Sequence[str],
    options: Sequence[str] = SMALL,
    seconds: float = 100.0,
) -> None:
    """Compare every mode on ``nproc`` processes with single mode in this process."""
    main = example().main
    want = fresh_and_resumed(main, "single", options, directory / "single.pt", Path("none"))
    saved = (directory / "single.pt").read_bytes()
    for mode in [*modes, "single"]:
        (directory / f"for-{mode}.pt").write_bytes(saved)
    want["resumed"] = trained(
        main,
        *options,
        "--parallel",
        "single",
        "--steps",
        "5",
        "--checkpoint",
        str(directory / "for-single.pt"),
        "--resume",
    )
    launch(nproc, seconds, str(directory), ",".join(modes), *options)
    for mode in modes:
        found = json.loads((directory / f"{mode}.json").read_text())
        found["resumed by single"] = trained(
            main,
            *options,
            "--parallel",
            "single",
            "--steps",
            "5",
            "--checkpoint",
            str(directory / f"{mode}.pt"),
            "--resume",
        )
        for what, got in found.items():
            expected = want["fresh" if what == "fresh" else "resumed"]
            assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9), f"{mode}, {what}"
            assert got["text"] == expected["text"], f"{mode}, {what}"


def test_modes_equal_single(tmp_path: Path) -> None:
    compare(tmp_path, 2, ["data", "tensor", "auto --graph"], seconds=240.0)


@pytest.mark.extended
def test_every_mode_equals_single(tmp_path: Path) -> None:
    compare(tmp_path, 2, [*MODES, *STAGES, "data --graph", "auto", "auto --graph"], seconds=240.0)


@pytest.mark.slow
def test_a_plan_from_a_file_equals_single(tmp_path: Path) -> None:
    """The plan comes from the file alone: no search here would choose two stages and three
    micro-batches."""
    from globaltensor.auto.inter_op.search import SearchSpace, search_pipelines
    from globaltensor.auto.intra_op.search_options import Options
    from globaltensor.auto.ir.trace import calls_of_model
    from globaltensor.cluster import Cluster

    with torch.device("meta"):
        model = example().GPT(2, 32, 4, 16).double()

    def calls(rows: int) -> Any:
        return calls_of_model(model, (torch.empty(rows, 16, dtype=torch.long, device="meta"),))

    space = SearchSpace(stages=[2], micro_batches=[3], meshes=[(1,)], schedules=("zb-h1",))
    plan = search_pipelines(calls, 6, Cluster.preset("cpu").with_size(2), 2, Options(), space)
    assert len(plan.choices["stages"]) == 2
    plan.save(tmp_path / "plan.json")
    compare(
        tmp_path,
        2,
        ["auto --plan plan.json", "auto --graph --plan plan.json"],
        [{"5": "6"}.get(word, word) for word in SMALL],
    )


@pytest.mark.slow
def test_every_graph_equals_single(tmp_path: Path) -> None:
    compare(tmp_path, 2, GRAPHS)
    compare(
        tmp_path,
        2,
        ["data --graph --micro-batches 2", "pipeline --graph --micro-batches 3"],
        [{"5": "6"}.get(word, word) for word in SMALL],
    )


@pytest.mark.slow
def test_every_mode_equals_single_on_four_ranks(tmp_path: Path) -> None:
    compare(tmp_path, 4, MODES, seconds=250.0)


@pytest.mark.slow
def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    """Three heads are split over two ranks: a rank holds complete heads, two or one."""
    uneven = [{"32": "24", "4": "3"}.get(word, word) for word in SMALL]
    compare(tmp_path, 2, MODES, uneven)


@pytest.mark.slow
def test_the_loss_falls(tmp_path: Path) -> None:
    losses = example().main(
        [
            "--parallel",
            "single",
            "--steps",
            "60",
            "--batch",
            "8",
            "--context",
            "64",
            "--width",
            "64",
            "--layers",
            "2",
            "--sample",
            "0",
        ]
    )
    assert losses[0] > 3.5
    assert losses[-1] < 3.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs --checkpoint"),
        (["--width", "30"], "must be a multiple of --heads"),
        (
            ["--log-every", "0", "--tensor-size", "0"],
            "--tensor-size, --log-every must be at least 1",
        ),
        (["--temperature", "-1"], "--temperature and --sample must be at least 0"),
    ],
)
def test_options_that_make_no_sense(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example().main(arguments)
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    def resumed(path: Path, *options: str) -> None:
        example().main(
            [
                *SMALL,
                *options,
                "--parallel",
                "single",
                "--steps",
                "1",
                "--checkpoint",
                str(path),
                "--resume",
            ]
        )

    nothing, garbage, other, cut = (
        tmp_path / name for name in ("nothing", "garbage", "other", "cut")
    )
    with pytest.raises(SystemExit, match="nothing cannot be read: No such file"):
        resumed(nothing)
    garbage.write_text("garbage")
    torch.save({"step": 1}, other)
    cut.write_bytes(other.read_bytes()[:300])
    for path in (garbage, other, cut):
        with pytest.raises(SystemExit, match=f"{path.name} is no checkpoint of this program"):
            resumed(path)
    torch.save({"step": 1, "optimizer": {}, "model": {}}, other)
    with pytest.raises(
        SystemExit,
        match=r"other is of another model, see --layers, --width and --context: .*Missing key",
    ):
        resumed(other)


def test_stages_that_lack_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    program = example()
    monkeypatch.setattr(program.flow.env, "get_world_size", lambda: 3)
    with pytest.raises(SystemExit, match="3 processes need a layer each, but --layers is 2"):
        program.main([*SMALL, "--parallel", "pipeline"])


def test_a_grid_that_does_not_fit() -> None:
    with pytest.raises(SystemExit, match="--tensor-size 2 does not divide the 1 processes"):
        example().main(["--parallel", "hybrid", *SMALL])


if __name__ == "__main__":
    on_ranks(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
