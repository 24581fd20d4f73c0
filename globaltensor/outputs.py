"""Whether a file can be written, learnt before the work whose result goes into it."""

from __future__ import annotations

import os

__all__ = ["check_writable"]


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises the OSError that opening it for writing would. Leaves what is there as it is, and nothing where nothing was."""
    real = os.path.realpath(path)  # where a link leads nowhere, the file is made at its end
    try:
        open(real, "x").close()
    except FileExistsError:
        open(real, "a").close()
    else:
        os.unlink(real)
