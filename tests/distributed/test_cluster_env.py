"""Tests of the environment variables that each way to start ranks sets, as recorded from it, and of
the values detected from them."""

from __future__ import annotations

import pytest

from globaltensor.distributed.cluster_env import Detected, detect
from globaltensor.distributed.launcher.options import job_of, parser
from globaltensor.errors import WorldError

KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "PYTHONUNBUFFERED": "1",
    "HOSTNAME": "job-worker-1",
}
TRAINER = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
OPERATOR = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
OPERATOR_ELASTIC = {
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "1:4",
    "PET_MAX_RESTARTS": "10",
}
TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3",
    "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
RAY = {
    "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "40123", "RANK": "5", "LOCAL_RANK": "1",
    "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1",
    "ACCELERATE_TORCH_DEVICE": "cuda:1", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "RAY_JOB_ID": "01000000",
}  # fmt: skip
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "prterun-host-1050@1", "PMIX_RANK": "1",
    "PMIX_HOSTNAME": "host", "PRTE_LAUNCHED": "1",
    "OMPI_UNIVERSE_SIZE": "2",
}  # fmt: skip
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1733885952.0;tcp://10.1.0.5,172.17.0.1:41587",
    "OMPI_MCA_ess_base_jobid": "1733885953", "PMIX_RANK": "3",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1", "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "n[03-04]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, Detected("torchrun", 3, 4, 1, 2, 2, "10.0.0.1", 29500)),
        (RAY, Detected("torchrun", 5, 8, 1, 4, 2, "10.0.0.7", 40123)),
        (KUBERNETES | OPERATOR, Detected("Kubernetes", 2, 3, 0, 1, 3, "job-master-0", 23456)),
        (KUBERNETES | TRAINER, Detected("Kubernetes", 2, 4, 0, 1, 4, "job-node-0-0.job", 29400)),
        (
            KUBERNETES | TRAINER | OPERATOR | TORCHRUN,
            Detected("torchrun", 3, 4, 1, 2, 2, "10.0.0.1", 29500),
        ),
        (
            KUBERNETES | OPEN_MPI_5 | {"MASTER_PORT": "9"},
            Detected("Open MPI", 1, 2, 1, 2, 1, "127.0.0.1", 9),
        ),
        (OPEN_MPI_4 | {"MASTER_PORT": "9"}, Detected("Open MPI", 3, 4, 1, 2, 2, "10.1.0.5", 9)),
        (
            MPICH | {"MASTER_PORT": "9"},
            Detected("Hydra (MPICH, Intel MPI)", 1, 2, 1, 2, 1, "127.0.0.1", 9),
        ),
        (SRUN | {"MASTER_PORT": "9"}, Detected("Slurm", 6, 8, 2, 4, 2, "n03", 9)),
        (SRUN | TORCHRUN, Detected("torchrun", 3, 4, 1, 2, 2, "10.0.0.1", 29500)),
    ],
    ids=[
        "torchrun",
        "ray",
        "operator",
        "trainer",
        "torchrun in a pod",
        "mpirun in a pod",
        "open mpi 4",
        "mpich",
        "srun",
        "the launcher under srun",
    ],
)
def test_recorded_variables(variables: dict[str, str], expected: Detected) -> None:
    assert detect(variables) == expected


def test_a_pod_that_is_one_of_none() -> None:
    assert detect(KUBERNETES) is None
    assert detect(KUBERNETES | TRAINER | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}) is None
    assert detect(TRAINER) is None, (
        "these are options of launchers: outside a pod they are anybody's"
    )


def test_ranks_by_hand_in_one_pod() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert detect(KUBERNETES | by_hand) == Detected("torchrun", 1, 2, 1, 2, 1, "127.0.0.1", 1)


def test_pods_that_need_a_launcher() -> None:
    with pytest.raises(
        WorldError,
        match=r"8 processes in each pod .*: start it with `globaltensor launch script.py`",
    ):
        detect(KUBERNETES | TRAINER | {"PET_NPROC_PER_NODE": "8"})


def test_the_launcher_reads_what_kubernetes_jobs_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (KUBERNETES | TRAINER | {"PET_NPROC_PER_NODE": "2"}).items():
        monkeypatch.setenv(name, value)
    job = job_of(parser().parse_args([__file__]))
    assert (
        job.nnodes,
        job.node_rank,
        job.nproc_per_node,
        job.addr,
        job.port,
        job.rdzv_backend,
    ) == ((4, 4), 2, 2, "job-node-0-0.job", 29400, "static")
    for name, value in OPERATOR_ELASTIC.items():
        monkeypatch.setenv(name, value)
    job = job_of(parser().parse_args([__file__]))
    assert (job.nnodes, job.rdzv_backend, job.rdzv_endpoint, job.max_restarts) == (
        (1, 4),
        "c10d",
        "job-worker-0:23456",
        10,
    )
