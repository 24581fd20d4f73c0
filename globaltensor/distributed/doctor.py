"""Checks of this machine and this environment, for ``globaltensor doctor``.

Each check is a function that returns a `Finding`: a description, a status and a remedy.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from .._base.byte_size import show_bytes
from .._base.cpu_cores import usable_cores
from .._base.error_line import in_one_line
from .._base.extras import install_extra
from ..errors import WorldError
from .cluster_env import detect
from .network import VARIABLE as GLOO_INTERFACE
from .network import addresses_of, gloo_address, own_address
from .rdma import devices as rdma_devices

__all__ = ["Finding", "as_data", "examine"]

Status = Literal["ok", "warn", "FAIL"]

RANKS_SECONDS: Final = 60.0  # the limit for two ranks to start, to talk and to end
_ENDING_SECONDS: Final = 6.0  # of these, for the ranks to end
_CORE: Final = ("torch", "numpy", "tqdm", "cloudpickle")
# Extras for work on this library itself.
_FOR_REPOSITORY: Final = ("dev", "docs")
_MIN_TORCH: Final = (2, 11)
_MIN_SHARED: Final = 1 << 30
_MIN_FILES: Final = 4096
_FILES: Final = 65536  # the limit of open files that the check advises
_SHARED: Final = Path("/dev/shm")
_SLOW_CLOCKS: Final = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
_TIME_ERROR: Final = 5  # the answer of adjtimex if no server sets the clock, from sys/timex.h


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check.

    ``status`` is ``ok``, ``warn`` (jobs run, but are slower or may fail) or ``FAIL`` (jobs do not
    run). ``what`` describes what the check has found, and ``mend`` is the remedy, each in one line.
    ``values`` has what was found as data, with sizes in bytes and times in seconds.

    >>> print(Finding("limits", "warn", "nofile 256", "ulimit -n 65536"))
    warn limits: nofile 256 (ulimit -n 65536)
    """

    name: str
    status: Status
    what: str
    mend: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status:4} {self.name}: {self.what}" + (f" ({self.mend})" * bool(self.mend))


def examine(ranks: bool = True) -> Iterator[Finding]:
    """Run the checks, and yield the finding of each as soon as it has run.

    With ``ranks`` the last check starts two processes, which communicate over gloo. They end within
    a minute. No other check starts a process.
    """
    for check in (*_CHECKS, *([_two_ranks] if ranks else [])):
        name = check.__name__.strip("_")
        try:
            yield check(name)
        except Exception as error:  # a check that fails is a finding too
            yield Finding(name, "FAIL", f"the check failed with {in_one_line(error)}")


def as_data(findings: list[Finding]) -> dict[str, Any]:
    """Return findings as data for JSON: the worst status, and a dict for each finding.

    >>> as_data([Finding("python", "ok", "3.11.7")])["status"]
    'ok'
    """
    each = [{**asdict(f), "status": f.status.lower()} for f in findings]
    found = {f.status for f in findings}
    worst = next((status for status in ("FAIL", "warn") if status in found), "ok")
    return {"status": worst.lower(), "checks": each}


# ------------------------------------------------------------------------------------- the software


def _python(name: str) -> Finding:
    text = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    values = {"version": platform.python_version(), "executable": sys.executable}
    return Finding(name, "ok", text, "", {**values, "system": platform.platform()})


def _torch(name: str) -> Finding:
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    values = {"version": torch.__version__, "cuda": torch.version.cuda}
    found = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if found < _MIN_TORCH:
        oldest = ".".join(map(str, _MIN_TORCH))
        mend = f"pip install 'torch>={oldest}'"
        return Finding(name, "FAIL", f"{torch.__version__} is older than {oldest}", mend, values)
    return Finding(name, "ok", f"{torch.__version__}, {built}", "", values)


def _globaltensor(name: str) -> Finding:
    folder = str(Path(__file__).parents[1])
    missing = [package for package in _CORE if importlib.util.find_spec(package) is None]
    values: dict[str, Any] = {"folder": folder, "missing": missing, "version": None}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        values["version"] = importlib.metadata.version("globaltensor")
    if missing:
        mend = f"pip install {' '.join(missing)}"
        return Finding(name, "FAIL", f"{', '.join(missing)} not installed", mend, values)
    if values["version"] is None:
        mend = "pip install -e . in the checkout installs its command and what it needs"
        return Finding(name, "warn", f"imported from {folder}, not installed", mend, values)
    return Finding(name, "ok", f"{values['version']} in {folder}", "", values)


def _extras(name: str) -> Finding:
    """Report for each extra that users need whether its packages are installed."""
    needs: dict[str, list[str]] = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("globaltensor") or []:
            package = re.match(r"[\w.-]+", line)
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
            if not package or not extra or extra[1] in _FOR_REPOSITORY:
                continue
            if package[0] != "globaltensor":
                needs.setdefault(extra[1], []).append(package[0])
    absent = {e: [p for p in packages if not _is_installed(p)] for e, packages in needs.items()}
    installed = [extra for extra, missing in absent.items() if not missing]
    partly = [f"{extra} lacks {', '.join(m)}" for extra, m in absent.items() if m]
    values = {"installed": installed, "missing": {extra: m for extra, m in absent.items() if m}}
    text = "; ".join(
        [", ".join(installed) + " installed" if installed else "none installed", *partly]
    )
    mend = f"optional: {install_extra('NAME')}" if partly else ""
    return Finding(name, "ok", text, mend, values)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _backends(name: str) -> Finding:
    usable = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available(),
        "mpi": importlib.util.find_spec("mpi4py") is not None,
    }
    backends = [backend for backend, available in usable.items() if available]
    values = {"backends": backends}
    if not usable["gloo"]:
        mend = "install a torch with gloo: pip install torch"
        return Finding(name, "FAIL", "this torch has no gloo", mend, values)
    if torch.cuda.is_available() and not usable["nccl"]:
        mend = "install a torch that is built with NCCL, see pytorch.org"
        return Finding(name, "warn", "GPUs, but no nccl: they talk over gloo", mend, values)
    return Finding(name, "ok", ", ".join(backends), "", values)


def _world(name: str) -> Finding:
    """Report the rank and world that this process's variables describe."""
    try:
        place = detect(os.environ)
    except WorldError as error:
        return Finding(name, "FAIL", str(error).splitlines()[0])
    if place is None:
        return Finding(name, "ok", "a world of one: no launcher has started this process")
    text = f"rank {place.rank} of {place.world_size} at {place.meeting}, by {place.source}"
    values = {"rank": place.rank, "world_size": place.world_size, "source": place.source}
    return Finding(name, "ok", text, "", values)


# -------------------------------------------------------------------------------------- the machine


def _cores(name: str) -> Finding:
    cores, quota, threads = usable_cores(), _cpu_quota(), torch.get_num_threads()
    values = {"cores": cores, "quota": quota, "threads": threads}
    text = f"{cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)} in torch"
    if quota is not None and quota < cores and threads > max(1, quota):
        mend = f"OMP_NUM_THREADS={max(1, int(quota))}"
        return Finding(name, "warn", f"{text}, but a limit of {quota:g} cores", mend, values)
    return Finding(name, "ok", text, "", values)


def _cpu_quota() -> float | None:
    """Return how many cores the control group of this process may use, or None for no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    return None


def _memory(name: str) -> Finding:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return Finding(name, "ok", "this system does not report its memory")
    sizes = {key: int(n) << 10 for key, n in re.findall(r"(\w+): +(\d+) kB", text)}
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    values: dict[str, Any] = {"total": total, "available": free, "limit": None}
    with contextlib.suppress(OSError, ValueError):
        values["limit"] = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max": no limit
    limit = values["limit"]
    what = f"{show_bytes(total)}, {show_bytes(free)} of it available"
    what += f", {show_bytes(limit)} allowed here" if limit and limit < total else ""
    return Finding(name, "ok", what, "", values)


def _shared_memory(name: str) -> Finding:
    """Report the size of /dev/shm, through which data loaders and NCCL pass tensors."""
    if not _SHARED.is_dir():
        return Finding(name, "ok", "this system has no /dev/shm")
    sizes = os.statvfs(_SHARED)
    total, free = sizes.f_frsize * sizes.f_blocks, sizes.f_frsize * sizes.f_bavail
    values = {"total": total, "available": free}
    what = f"/dev/shm has {show_bytes(total)}, {show_bytes(free)} of it available"
    mend = "in a container: docker run --shm-size 8g or --ipc host; in a pod: mount a tmpfs there"
    if not os.access(_SHARED, os.W_OK):
        return Finding(name, "FAIL", "/dev/shm is not writable", "chmod 1777 /dev/shm", values)
    if not free:
        mend = "delete files that ended programs have left there, or enlarge it"
        return Finding(name, "FAIL", f"{what}: full", mend, values)
    small = free < _MIN_SHARED
    return Finding(name, "warn" if small else "ok", what, mend if small else "", values)


def _limits(name: str) -> Finding:
    """Report the limits of locked memory and of open files, and how to raise low ones."""
    try:
        import resource
    except ImportError:
        return Finding(name, "ok", "this system has no such limits")
    locked, max_locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    locked_text = "unlimited" if locked == unlimited else show_bytes(locked)
    files_text = "unlimited" if files == unlimited else str(files)
    values = {
        "memlock": None if locked == unlimited else locked,
        "nofile": None if files == unlimited else files,
    }
    what = f"memlock {locked_text}, nofile {files_text}"
    mends = []
    if locked != unlimited and rdma_devices():
        raised = "ulimit -l unlimited"
        if max_locked != unlimited:
            raised = _raise_hard_limit("memlock", max_locked, "unlimited", "-1")
        mends.append(f"RDMA locks its buffers: {raised}")
    if files != unlimited and files < _MIN_FILES:
        raised = f"ulimit -n {_FILES if max_files == unlimited else min(_FILES, max_files)}"
        if max_files != unlimited and max_files < _MIN_FILES:
            raised = _raise_hard_limit("nofile", max_files, f"{_FILES}", f"{_FILES}")
        mends.append(f"many ranks and loaders open many files: {raised}")
    return Finding(name, "warn" if mends else "ok", what, "; ".join(mends), values)


def _raise_hard_limit(name: str, limit: int, value: str, docker_value: str) -> str:
    """Return how an administrator raises a hard limit, which ``ulimit`` cannot pass."""
    return (
        f"the hard limit is {limit}, so an administrator raises it, by a line "
        f"'* - {name} {value}' in /etc/security/limits.conf, Limit{name.upper()}= of the service, "
        f"or docker run --ulimit {name}={docker_value}"
    )


def _network(name: str) -> Finding:
    """Report the network interfaces, and the one whose address gloo publishes."""
    addresses = addresses_of()
    chosen = os.environ.get(GLOO_INTERFACE, "")
    on_one_host, between_hosts = gloo_address(1), gloo_address(2)
    values = {
        "interfaces": addresses,
        "gloo": on_one_host[0],
        "gloo_between_hosts": between_hosts[0],
    }
    shown = ", ".join(f"{n} {a[0]}" for n, a in addresses.items() if a) or "no interface"
    missing = [n for n in chosen.split(",") if n and n not in dict(_interfaces())]
    if missing:
        mend = f"set it to one of {', '.join(n for n, _ in _interfaces())}, or unset it"
        what = f"{GLOO_INTERFACE} names {', '.join(missing)}, which this host does not have"
        return Finding(name, "FAIL", what, mend, values)
    what = f"{shown}; gloo uses {on_one_host[0] or on_one_host[1]}" + (
        f", and {between_hosts[0] or between_hosts[1]} between hosts"
        if between_hosts != on_one_host
        else ""
    )
    if addresses and not on_one_host[0]:
        mend = f"correct /etc/hosts, or set {GLOO_INTERFACE}"
        what += f": no interface has {on_one_host[1]}, to which {socket.gethostname()} resolves"
        return Finding(name, "warn", what, mend, values)
    return Finding(name, "ok", what, "", values)


def _interfaces() -> list[tuple[str, int]]:
    return [(name, index) for index, name in socket.if_nameindex()]


def _gpus(name: str) -> Finding:
    """Report the GPUs that torch sees, and check a sum that each computes."""
    count = torch.cuda.device_count()
    nodes = sorted(Path("/dev").glob("nvidia[0-9]*"))
    values: dict[str, Any] = {"gpus": [], "device_files": len(nodes)}
    if not count:
        if not nodes or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            return Finding(name, "ok", "none", "", values)
        what = f"{len(nodes)} in /dev, but torch {torch.__version__} sees none"
        mend = "see torch.cuda.init() for the reason, often an old driver or CUDA_VISIBLE_DEVICES"
        if torch.version.cuda is None:
            mend = "this torch is built for CPUs: install one built for CUDA, see pytorch.org"
        return Finding(name, "warn", what, mend, values)
    for i in range(count):
        found = torch.cuda.get_device_properties(i)
        values["gpus"].append({"name": found.name, "memory": found.total_memory})
    for i in range(count):
        if torch.ones(8, device=f"cuda:{i}").sum().item() != 8:
            return Finding(name, "FAIL", f"cuda:{i} computes a wrong sum", "replace it", values)
    shown = [f"{g['name']} ({show_bytes(g['memory'])})" for g in values["gpus"]]
    return Finding(name, "ok", f"{count}: {', '.join(shown)}", "", values)


def _clocks(name: str) -> Finding:
    """Report the clock of measurements, and whether a time server sets the time of day."""
    resolution, source = time.get_clock_info("perf_counter").resolution, ""
    with contextlib.suppress(OSError):
        path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        source = path.read_text().strip()
    values = {"source": source, "resolution": resolution, "synchronized": _synchronized()}
    what = f"{source or 'perf_counter'}, resolution {resolution * 1e9:.3g} ns"
    agreed = values["synchronized"]
    if agreed is not None:
        need = ", no time server (which only the logs of several hosts need)"
        what += ", set by a time server" if agreed else need
    if time.gmtime().tm_year < 2024:
        what, mend = f"{what}; it shows {time.strftime('%Y-%m-%d')}", "set the time of day"
        return Finding(name, "FAIL", what, mend, values)
    if source in _SLOW_CLOCKS:
        mend = "slow to read, so short measurements are coarse: boot with clocksource=tsc"
        return Finding(name, "warn", what, mend, values)
    return Finding(name, "ok", what, "", values)


def _synchronized() -> bool | None:
    """Return True if a time server sets the clock, and None if this system does not report it."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        answer = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
        return None if answer < 0 else answer != _TIME_ERROR
    return None


# ---------------------------------------------------------------------------------------- two ranks


def _two_ranks(name: str) -> Finding:
    """Start two ranks, check that they exchange a number over gloo, and end them."""
    from .run.spawn import run

    place = None
    with contextlib.suppress(WorldError):  # another check reports it
        place = detect(os.environ)
    if place is not None and place.world_size > 1:
        what = f"not tried: this process is rank {place.rank} of {place.world_size}"
        return Finding(name, "ok", what)
    began, output = time.monotonic(), io.StringIO()
    limit = RANKS_SECONDS - _ENDING_SECONDS
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            answers = run(exchange, nprocs=2, backend="gloo", timeout=limit, start_timeout=limit)
    except Exception as error:
        mend = "globaltensor launch -n 2 SCRIPT shows the ranks' own output"
        if own_address("localhost"):
            mend = "localhost does not lead to the loopback interface: correct /etc/hosts"
        return Finding(name, "FAIL", f"two processes over gloo: {in_one_line(error)}", mend)
    took = time.monotonic() - began
    values = {"seconds": took, "exchange_seconds": max(seconds for _, seconds in answers)}
    if [numbers for numbers, _ in answers] != [[1, 2], [1, 2]]:
        return Finding(
            name, "FAIL", f"sent 1 and 2, received {[n for n, _ in answers]}", "", values
        )
    what = (
        f"two processes started in {took:.1f} s and exchanged a number over gloo in "
        f"{values['exchange_seconds'] * 1e3:.2g} ms"
    )
    return Finding(name, "ok", what, "", values)


def exchange() -> tuple[list[int], float]:
    """Exchange a number with the other ranks, and return (all numbers, seconds it took)."""
    from .world import world

    this_world = world()
    everyone = this_world.comm(tuple(range(this_world.size)))
    everyone.all_gather_object(0, "doctor")  # the first one connects
    began = time.perf_counter()
    numbers: list[int] = everyone.all_gather_object(this_world.rank + 1, "doctor")
    return numbers, time.perf_counter() - began


_CHECKS: Final[tuple[Callable[[str], Finding], ...]] = (
    _python, _torch, _globaltensor, _extras, _backends, _world, _cores, _memory, _shared_memory,
    _limits, _network, _gpus, _clocks,
)  # fmt: skip
