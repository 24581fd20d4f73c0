"""The first code that a launched rank runs: tie its life to the launcher's, then exec the command.

It runs as a bare script (``python -I -S distributed/launcher/parent_death_signal.py <launcher's
pid> command...``). So it starts in milliseconds, as it imports nothing of this package. A
``preexec_fn`` would run Python between fork and exec, which may deadlock in a process with threads.
"""

import contextlib
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def tie(launcher: int) -> None:
    """Ask the kernel for SIGKILL when the launcher (this process's parent) dies, however it dies.

    Also make this process lead a process group, so that the whole group can be ended.
    """
    with contextlib.suppress(OSError):  # already the leader of a group
        os.setpgid(0, 0)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # the launcher died before the request
            os._exit(128 + signal.SIGKILL)


def become(command: list[str]) -> None:
    """Replace this process by the command. Exit with code 127 if it cannot be run."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


if __name__ == "__main__":
    tie(int(sys.argv[1]))
    become(sys.argv[2:])
