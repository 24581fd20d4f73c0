"""The program behind ``warm_python()``, which copies it to the folder of the server's socket.

It runs as ``python -IS``, so it starts in milliseconds.
"""

from __future__ import annotations

import marshal
import os
import signal
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket

SOCKET = os.path.join(os.path.dirname(__file__), "socket")
FORWARDED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGCONT")


def known(arguments: list[str]) -> bool:
    """Return True if the server knows these options of Python: -u, -B, -W, -c, -m or a script."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "-W":
            next(rest, None)
        elif argument not in ("-u", "-B"):
            return argument in ("-c", "-m") or not argument.startswith("-")
    return False


def main() -> None:
    if not known(sys.argv[1:]):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    server = socket(AF_UNIX)
    server.connect(SOCKET)
    # A signal that comes before the program runs is sent on too.
    for name in FORWARDED:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
    files = [0, 1, 2]
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if number > 2 and os.get_inheritable(number):
                files.append(number)
        except OSError:  # the descriptor of the listing
            pass
    inherited = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}  # Python ignores these
    ignored = [int(n) for n in inherited if signal.getsignal(n) is signal.SIG_IGN]
    request = marshal.dumps(
        (sys.argv[1:], os.getcwd(), dict(os.environb), files, ignored, os.getpid())
    )
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    server.sendmsg([len(request).to_bytes(8, sys.byteorder)], [(SOL_SOCKET, SCM_RIGHTS, rights)])
    server.sendall(request)
    # The server has these now: a reader of a pipe must see its end when the program ends.
    for number in files:
        os.close(number)
    answer = server.recv(8)
    code = int.from_bytes(answer, sys.byteorder, signed=True) if answer else -signal.SIGKILL
    if code < 0:  # the program was ended by a signal
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
