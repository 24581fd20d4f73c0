"""Tests that ranks of one node find each other by their job's name, whatever other jobs run there
or left files behind."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from globaltensor.distributed import file_rendezvous as room
from globaltensor.distributed.cluster_env import Detected
from globaltensor.errors import WorldError

LONG = timedelta(seconds=60)


class _Never(dict[str, int]):
    def get(self, key: str, default: int = -1) -> int:  # type: ignore[override]
        return -1


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(room.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(room, "_TAKE_SECONDS", 0.3)
    monkeypatch.setattr(
        room, "_met", _Never()
    )  # threads share the count of meetings and processes do not: use one number for all
    yield
    assert not list(tmp_path.iterdir()), "whoever makes the file removes it"


def place(rank: int, size: int = 2, job: str = "job") -> Detected:
    return Detected("Open MPI", rank, size, rank, size, 1, "127.0.0.1", 0, job)


def together(jobs: dict[str, int], timeout: timedelta = LONG) -> list[tuple[str, str]]:
    """Run all ranks of these jobs at once, each in a thread. Return what each rank read of the
    value that rank 0 of its job wrote."""

    kept = []  # rank 0's store is the server: keep it until all ranks have read

    def rank(place: Detected) -> tuple[str, str]:
        store = room.rendezvous(place, timeout)
        kept.append(store)
        if place.rank == 0:
            store.set("job", place.job)
        return place.job, store.get("job").decode()

    places = [place(each, size, job) for job, size in jobs.items() for each in range(size)]
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(rank, places))


def test_many_jobs_at_once_do_not_meet_each_other() -> None:
    jobs = {f"prterun-host-{number}@1": 2 + number % 2 for number in range(3)}
    assert all(job == read for job, read in together(jobs))


def test_what_a_dead_job_has_left_misleads_nobody() -> None:
    room._path("job", 0).write_text("1")
    assert together({"job": 3}) == [("job", "job")] * 3


def test_a_job_of_the_same_name_is_told() -> None:
    path = room._path("job", 0)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(
            WorldError,
            match=r"another Open MPI job of the same name, 'job', is starting .* set MASTER_PORT",
        ):
            together({"job": 1})
    path.unlink()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(
        WorldError, match=r"rank 1 of 2 has not connected within 0.2 s .* set MASTER_PORT"
    ):
        room.rendezvous(place(0), timedelta(seconds=0.2))


def test_rank_0_that_does_not_come_is_told() -> None:
    with pytest.raises(
        WorldError, match=r"rank 1 of 2: rank 0 has not written its port to .* within 0.2 s"
    ):
        room.rendezvous(place(1), timedelta(seconds=0.2))


def test_each_meeting_is_one_of_its_own() -> None:
    paths = {room._path("job", number) for number in range(3)} | {room._path("other", 0)}
    assert len(paths) == 4


def test_a_file_that_is_no_file_of_ours(tmp_path: Path) -> None:
    path = room._path("job", 0)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        WorldError, match=r"cannot be opened .*symbolic links.*: remove it, or set MASTER_PORT"
    ):
        together({"job": 1})
    path.unlink()


def test_a_file_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    path = room._path("job", 0)
    path.write_text("1")
    here = room.os.getuid()
    monkeypatch.setattr(room, "_path", lambda job, number: path)
    monkeypatch.setattr(room.os, "getuid", lambda: here + 1)
    with pytest.raises(WorldError, match="belongs to another user: remove it, or set MASTER_PORT"):
        together({"job": 1})
    path.unlink()


def test_of_two_that_find_an_old_file_one_gets_its_place(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    path.write_text("1")
    with (tmp_path / "a").open("w") as a, (tmp_path / "b").open("w") as b:
        fcntl.flock(a, fcntl.LOCK_EX)
        fcntl.flock(b, fcntl.LOCK_EX)
        assert room._link_or_rename(a.name, path)
        assert not room._link_or_rename(b.name, path)
    path.unlink()
    (tmp_path / "b").unlink()
