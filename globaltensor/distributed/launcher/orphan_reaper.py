"""A script that kills the processes that ranks have started, if the launcher is killed.

The ranks themselves die with the launcher by their tether (parent_death_signal.py). The processes
that they have started do not.

It runs as a bare script (``python -I -S distributed/launcher/orphan_reaper.py``) in its own
session, so that killing the launcher's whole group spares it. From the launcher it reads lines with
process groups to hold (``+1234``) and to release (``-1234``). At the end of input, for whatever
reason, it kills the groups that it still holds.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Hold process groups until the launcher is gone, then kill them."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    held: set[int] = set()
    for line in sys.stdin:
        held.symmetric_difference_update({abs(int(line))})
    for group in held:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
