"""Ends what ranks have started when the launcher is killed. The ranks themselves die with it by
their tether; what they have started does not.

Run as a bare script (``python -I -S distributed/launcher/orphan_reaper.py``), in a session of its
own: what kills the launcher's whole group leaves it. It reads from the launcher, in lines, process
groups to hold (``+1234``) and to let go (``-1234``), and at the end of input, however it comes,
kills those it still holds.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Hold groups until the launcher is gone."""
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
