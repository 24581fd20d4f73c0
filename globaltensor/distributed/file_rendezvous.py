"""Rendezvous of one node's ranks by their job's name: a store at a free port, named in a file.

Rank 0 serves the store and writes the port to the file. ``world.meeting`` calls this module.

A port computed from the name alone would be equal on all ranks too, but two jobs on one machine
could get the same port.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..errors import WorldError
from .cluster_env import Detected

__all__ = ["rendezvous"]

_LOOK_SECONDS = 0.01
# Rank 0 tries so long to replace an old file. Other ranks of its job lock that file for a moment
# when they look at it.
_TAKE_SECONDS = 5.0

# Name of a job -> number of this process's last rendezvous under it, from 0. Each rendezvous uses a
# file of its own.
_met: dict[str, int] = {}


def rendezvous(place: Detected, timeout: timedelta) -> Store:
    """Return a store for this job's ranks, which rank 0 serves.

    Rank 0 returns once all ranks are connected, and another rank once it is connected to rank 0.
    Raise WorldError if a rank has not come within ``timeout``. On rank 0, raise it too if another
    job of that name is starting.
    """
    number = _met[place.job] = _met.get(place.job, -1) + 1
    path = _path(place.job, number)
    if place.rank == 0:
        store = _store(place, 0, timeout)
        with _published_port(store.port, path, place):
            _wait_for_all(store, place, path, timeout)
        return PrefixStore("default_pg", store)
    store = _store(place, _read(path, place, timeout), timeout)
    store.set(f"rank {place.rank} is here", "")
    return PrefixStore("default_pg", store)


def _store(place: Detected, port: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(place.addr, port, place.world_size, place.rank == 0, timeout, False)
    except (DistStoreError, DistNetworkError) as error:
        problem = (
            f"rank {place.rank} of {place.world_size} (started by {place.source}) could not "
            f"join the other ranks at {place.addr}:{port}: {error}"
        )
        raise WorldError(
            f"{problem}; are all ranks on this machine and in one network namespace? Else set "
            f"MASTER_ADDR and MASTER_PORT on all ranks"
        ) from error


def _path(job: str, number: int) -> Path:
    name = hashlib.sha256(f"{job} {number}".encode()).hexdigest()[:20]
    return Path(tempfile.gettempdir()) / f"globaltensor_{os.getuid()}_{name}"


@contextlib.contextmanager
def _published_port(port: int, path: Path, place: Detected) -> Iterator[None]:
    """Publish the port in the file at ``path`` while the block runs.

    The file appears complete and locked, and is valid only while rank 0 holds the lock. So a file
    left by a job that died misleads no rank.
    """
    import fcntl  # not on every system, and only these ranks need it

    file, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, str(port).encode())
        deadline = time.monotonic() + _TAKE_SECONDS
        while not _link_or_rename(name, path):
            if time.monotonic() > deadline:
                problem = (
                    f"another {place.source} job of the same name, {place.job!r}, is starting on "
                    f"this machine ({path} is locked)"
                )
                raise WorldError(
                    f"{problem}: set MASTER_PORT to a free port on all ranks of this job"
                )
            time.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:
            os.unlink(path)
    finally:
        os.close(file)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _link_or_rename(name: str, path: Path) -> bool:
    """Link or rename the file ``name`` to ``path``, unless a file there is locked.

    Return True on success.
    """
    import fcntl  # as above

    with contextlib.suppress(FileExistsError):
        os.link(name, path)
        return True
    try:
        old = _open_own_file(path)
    except FileNotFoundError:
        return False
    try:
        # The lock is shared, like that of ranks that look: the file must not seem locked to them.
        fcntl.flock(old, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(old), path.stat()):
            return False
        os.replace(name, path)
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(old)
    return True


def _read(path: Path, place: Detected, timeout: timedelta) -> int:
    """Return the port that rank 0 has written.

    Raise WorldError if it has not done so within ``timeout``.
    """
    import fcntl  # as above

    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            file = _open_own_file(path)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the lock succeeds: an old file
            except BlockingIOError:
                return int(os.read(file, 100))
            finally:
                os.close(file)
        time.sleep(_LOOK_SECONDS)
    problem = (
        f"rank {place.rank} of {place.world_size}: rank 0 has not written its port to {path} "
        f"within {timeout.total_seconds():g} s"
    )
    raise WorldError(f"{problem}; {_advice(path)}")


def _wait_for_all(store: TCPStore, place: Detected, path: Path, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    for rank in range(1, place.world_size):
        try:
            store.wait(
                [f"rank {rank} is here"], timedelta(seconds=max(0.001, deadline - time.monotonic()))
            )
        except (DistStoreError, DistNetworkError) as error:
            problem = (
                f"rank {rank} of {place.world_size} has not connected within "
                f"{timeout.total_seconds():g} s to the port in {path}"
            )
            raise WorldError(f"{problem}; {_advice(path)}") from error


def _open_own_file(path: Path) -> int:
    """Open the file for reading. Raise FileNotFoundError, or WorldError if the file is not ours."""
    mend = "remove it, or set MASTER_PORT to a free port on all ranks"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WorldError(
            f"ranks of one node meet through {path}, which cannot be opened ({error.strerror}): "
            f"{mend}"
        ) from error
    if os.fstat(file).st_uid != os.getuid():
        os.close(file)
        raise WorldError(
            f"ranks of one node meet through {path}, which belongs to another user: {mend}"
        )
    return file


def _advice(path: Path) -> str:
    return (
        f"are all ranks started, and do they share {path.parent}? Else set MASTER_PORT to a "
        f"free port on all ranks"
    )
