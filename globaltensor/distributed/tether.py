"""The first thing a launched rank runs: ties its life to the launcher's, then becomes the command.

Run as a bare script (``python -I -S tether.py <launcher's pid> command...``), so that it starts in milliseconds: it imports nothing of this package.
Not a ``preexec_fn``: that runs Python between fork and exec, which may deadlock in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> None:
    """Ask the kernel for SIGKILL when the launcher dies, however it dies; then exec. Exit code 127: the command cannot be run."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the kernel knew
            sys.exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
