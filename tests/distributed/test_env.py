"""Tests of how a process finds its rank: pure detection from environment variables, and the answers
of flow.env."""

from __future__ import annotations

import pytest
from support.pool import run_on

import globaltensor as flow
from globaltensor.distributed.cluster_env import Detected, Environment, detect, first_host
from globaltensor.errors import WorldError

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


def test_nothing_there_is_a_world_of_one() -> None:
    assert detect({}) is None
    assert detect({"RANK": "0"}) is None, "RANK alone is anybody's variable"
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None, "a batch script is no rank"


def test_the_order_is_the_documented_one() -> None:
    assert [kind.name for kind in Environment.known] == [
        "Kubernetes",
        "torchrun",
        "Open MPI",
        "Hydra (MPICH, Intel MPI)",
        "Slurm",
    ]
    both = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        **MASTER,
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
    }
    assert detect(both) == Detected("torchrun", 1, 2, 1, 2, 1, "10.0.0.1", 1234)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MASTER},
            Detected("torchrun", 5, 8, 1, 4, 2, "10.0.0.1", 1234)),
        ({"RANK": "5", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", **MASTER},
            Detected("torchrun", 5, 8, 1, 4, 2, "10.0.0.1", 1234)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1234"},
            Detected("torchrun", 1, 2, 1, 2, 1, "127.0.0.1", 1234)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", **MASTER},
            Detected("Open MPI", 3, 4, 1, 2, 2, "10.0.0.1", 1234),
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4",
                "MASTER_PORT": "9"},
            Detected("Hydra (MPICH, Intel MPI)", 3, 4, 3, 4, 1, "127.0.0.1", 9),
        ),
        (
            {
                "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
                "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NUM_NODES": "3",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[007-008,20]",
                "MASTER_PORT": "9",
            },
            Detected("Slurm", 4, 5, 0, 1, 3, "gpu007", 9),
        ),
    ],
    ids=lambda value: value.source if isinstance(value, Detected) else "",
)  # fmt: skip
def test_each_way_to_start(variables: dict[str, str], expected: Detected) -> None:
    assert detect(variables) == expected


def started(rank: int, job: str, nodes: int = 1, **more: str) -> Detected:
    names = {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(2 // nodes),
        "PMIX_NAMESPACE": job,
        **more,
    }
    found = detect({"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", **names})
    assert found is not None
    return found


def test_ranks_of_one_node_meet_by_the_name_of_their_job() -> None:
    assert (started(1, "job-1").port, started(1, "job-1").job) == (0, "job-1")
    assert (
        started(1, "job-1", MASTER_PORT="9").port,
        started(1, "job-1", MASTER_PORT="9").job,
    ) == (9, "")


def test_the_port_of_several_nodes_follows_from_the_job_and_is_alike_on_all_ranks() -> None:
    def port(rank: int, job: str) -> int:
        return started(rank, job, 2, OMPI_COMM_WORLD_LOCAL_RANK="0", MASTER_ADDR="10.0.0.1").port

    assert port(0, "job-1") == port(1, "job-1") != port(0, "job-2")
    assert 61440 <= port(0, "job-1") < 1 << 16


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2", **MASTER}, "RANK is 'one', not an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MASTER}, "rank 2 of 2: it must be from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"},
            "set MASTER_ADDR",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "a port is from 0 to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", **MASTER}, "local rank 3 of 2"),
    ],
)
def test_what_makes_no_sense_is_told(variables: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        detect(variables)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[03,7]x,m", "n03x"), ("", "")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def answers() -> tuple[int, int, int, int, list[int]]:
    env = flow.env
    return (
        env.get_rank(),
        env.get_world_size(),
        env.get_local_rank(),
        env.get_node_size(),
        env.all_device_placement("cpu").ranks.tolist(),
    )


def test_env_in_a_world_of_one() -> None:
    assert answers() == (0, 1, 0, 1, [0])


def test_env_on_two_ranks() -> None:
    assert run_on(2, answers) == [(0, 2, 0, 1, [0, 1]), (1, 2, 1, 1, [0, 1])]
