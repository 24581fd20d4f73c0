"""Tests of the choice of a backend, and of the registration of this library's backend in torch."""

from __future__ import annotations

import builtins
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch
from support.mpi import environment, needs_mpi
from support.program import run
from support.warm_python import warm_python

import globaltensor as flow
from globaltensor.distributed.backends.select import (
    VARIABLE,
    backend_names,
    missing_requirement,
    register_backend,
    select_backend,
)
from globaltensor.distributed.cluster_env import Detected, detect
from globaltensor.errors import WorldError

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "a",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def place(variables: dict[str, str]) -> Detected | None:
    return detect(variables)


def installed(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: (
            (object() if there else None) if name == "mpi4py" else find(name, *rest)
        ),
    )


@pytest.mark.parametrize(
    ("variables", "want"),
    [(MPIRUN, "mpi"), (HYDRA, "mpi"), (SLURM, "gloo"), (TORCHRUN, "gloo"), ({}, "gloo")],
    ids=str,
)
def test_auto_is_mpi_where_an_mpi_launcher_started_the_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], want: str
) -> None:
    installed(monkeypatch, True)
    assert (
        select_backend("auto", place(variables)) == select_backend(None, place(variables)) == want
    )
    installed(monkeypatch, False)
    assert select_backend("auto", place(variables)) == "gloo"


def test_auto_is_mpi_where_slurm_told_pmix_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    monkeypatch.setenv("PMIX_RANK", "0")
    assert select_backend("auto", place(SLURM)) == "mpi"


def test_auto_is_nccl_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert select_backend("auto", place(MPIRUN)) == "cpu:gloo,cuda:nccl"
    assert select_backend("mpi", place(MPIRUN)) == "mpi"


def test_the_variable_says_which_and_what_is_asked_for_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "MPI")
    assert select_backend() == "mpi"
    assert select_backend("gloo", place(MPIRUN)) == "gloo"


def test_an_unknown_backend_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        WorldError, match=r"there is no backend 'glue': use auto, or one of .*gloo.*mpi"
    ):
        select_backend("cpu:gloo,cuda:glue")
    with pytest.raises(WorldError, match="'glue'"):
        flow.run(pow, 2, 3, backend="glue")
    monkeypatch.setenv(VARIABLE, "glue")
    with pytest.raises(WorldError, match=f"'glue' .set by the environment variable {VARIABLE}"):
        select_backend()


def test_names() -> None:
    assert backend_names("cpu:gloo,cuda:NCCL") == {"gloo", "nccl"}
    assert backend_names("mpi") == {"mpi"}


def test_other_backends_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # importing it would fail
    register_backend("gloo")
    register_backend("cpu:gloo,cuda:nccl")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_what_nccl_lacks_is_told() -> None:
    assert missing_requirement("gloo") == missing_requirement("mpi") == ""
    program = "import globaltensor.distributed as d; d.init_process_group('nccl')"
    code, out = run([sys.executable, "-c", program])
    assert code == 1
    assert "NCCL needs CUDA devices" in out
    assert "use gloo or mpi" in out


def test_mpi_serves_all_devices_of_a_group() -> None:
    with pytest.raises(
        WorldError,
        match=(
            r'backend "cpu:mpi,cuda:nccl": mpi serves the tensors of every device of a group; '
            r"name it alone"
        ),
    ):
        register_backend("cpu:mpi,cuda:nccl")


def test_without_mpi4py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from globaltensor.distributed.backends.mpi.library import library

    library.cache_clear()
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        WorldError,
        match=(
            r"the backend mpi needs mpi4py, which is not installed: pip install mpi4py, .*"
            r"pip install '\.\[mpi\]' in a checkout of globaltensor"
        ),
    ):
        register_backend("mpi")


@needs_mpi
def test_without_an_mpi_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from globaltensor.distributed.backends.mpi.library import library

    library.cache_clear()
    load = builtins.__import__

    def no_library(name: str, *rest: Any) -> Any:
        if name == "mpi4py" and "MPI" in (rest[2] or ()):
            raise RuntimeError("cannot load MPI library")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_library)
    with pytest.raises(
        WorldError,
        match=r"finds no MPI library \(cannot load MPI library\): .*pip install '\.\[mpi\]' in a "
        "checkout of globaltensor",
    ):
        register_backend("mpi")


RESERVED = """
import torch.distributed as dist
from globaltensor.distributed.backends.select import register_backend

register_backend("mpi")
register_backend("mpi")
for name in ("mpi", "MPI", dist.Backend.MPI):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "mpi", dist.get_backend()
    assert str(dist.get_backend_config()) == "cpu:mpi,cuda:mpi", dist.get_backend_config()
    dist.destroy_process_group()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "undefined", "the default is torch's own no more"
dist.destroy_process_group()
"""


@needs_mpi
def test_torch_knows_it_by_its_name() -> None:
    done = subprocess.run(
        [warm_python(), "-W", "error", "-c", RESERVED],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


NO_MPIRUN = """
import sys, torch.distributed as dist
from globaltensor.distributed.backends.select import register_backend

register_backend("mpi")
dist.init_process_group("mpi", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
"""  # noqa: E501


@needs_mpi
@pytest.mark.extended
def test_ranks_that_mpi_does_not_know_of_are_told(tmp_path: Any) -> None:
    command = [sys.executable, "-c", NO_MPIRUN, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env=environment(), stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            said = rank.communicate(timeout=120)[1]
            assert rank.returncode == 1
            assert (
                "MPI was started with 1 process(es), not with these 2; start the ranks together: "
                "mpirun -n 4 python script.py" in said
            )
    finally:
        for rank in ranks:
            rank.kill()
