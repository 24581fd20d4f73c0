"""Files that the library writes: atomic replacement, and an early check that a path is writable.

A file that is replaced stays complete until the new one is. All functions that save files call
these.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["Replacement", "check_writable", "replacing", "write_text"]

Path = str | os.PathLike[str]

#: Errors of creating a file in a folder where opening the old file for writing either raises the
#: same error, or may work nevertheless.
_NO_FOLDER = (PermissionError, FileNotFoundError, NotADirectoryError)


class Replacement:
    """A file that is written next to another one, and replaces it when it is complete.

    At each moment either the old or the new file is there in full, whatever ends the process. Links
    are followed, and the old file's permissions stay. A path that is no regular file (a pipe, a
    device) is written in place. So is a file in a folder where no file may be created.
    """

    def __init__(self, path: Path) -> None:
        old = _stat_regular_file(path)
        # A dangling link: the file is created at the link's target.
        self._path = os.path.realpath(path)
        self._name: str | None = None  # in the folder, once it has one
        self._folder: int | None = None
        if old is not None and not stat.S_ISREG(old.st_mode):
            self.file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by commit or abandon
            return
        if old is not None:
            # A file that may not be written must not be replaced.
            os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        try:
            self._folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_CLOEXEC)
            self.file = os.fdopen(self._create_file(), "wb")
        except _NO_FOLDER:
            self._close_folder()
            self.file = open(path, "wb")  # noqa: SIM115 - as above
            return
        except BaseException:
            self._close_folder()
            raise
        if old is not None:
            _copy_owner_and_mode(self.file.fileno(), self._path, old)

    def _create_file(self) -> int:
        """Open a new file.

        Where the system can do it, the file has no name until it is complete. Then nothing is left
        of it when the process is killed.
        """
        nameless = getattr(os, "O_TMPFILE", 0)
        if nameless and os.path.isdir("/proc/self/fd"):
            # file systems without nameless files raise several errors
            with contextlib.suppress(OSError):
                return os.open(
                    os.path.dirname(self._path), nameless | os.O_WRONLY | os.O_CLOEXEC, 0o666
                )
        name = _fresh_name()
        made = os.open(
            name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=self._folder
        )
        self._name = name
        return made

    def commit(self) -> None:
        """Write the file to disk and move it to its place.

        Raises OSError where that fails. The old file is left then.
        """
        try:
            self.file.flush()
            if self._folder is not None:
                os.fsync(self.file.fileno())
                if self._name is None:
                    # Since a folder is passed, Python lets the system follow the link in /proc.
                    name = _fresh_name()
                    os.link(
                        f"/proc/self/fd/{self.file.fileno()}",
                        name,
                        src_dir_fd=self._folder,
                        dst_dir_fd=self._folder,
                    )
                    self._name = name
                os.replace(self._name, self._path, src_dir_fd=self._folder)
                self._name = None
                with contextlib.suppress(OSError):  # not every file system can sync a folder
                    os.fsync(self._folder)
            self.file.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Keep the old file and remove the new one."""
        with contextlib.suppress(OSError):
            self.file.close()
        if self._name is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
            self._name = None
        self._close_folder()

    def _close_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def _stat_regular_file(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _fresh_name() -> str:
    return f".globaltensor-{secrets.token_hex(8)}"


def _copy_owner_and_mode(file: int, path: str, old: os.stat_result) -> None:
    """Copy the old file's owner and permissions to its replacement, as far as this process may."""
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(OSError):
            os.fchown(file, old.st_uid, old.st_gid)
    with contextlib.suppress(OSError):
        for name in os.listxattr(path):  # access lists too
            os.setxattr(file, name, os.getxattr(path, name))
    os.fchmod(file, stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces ``path`` when the block ends.

    If the block raises an error, ``path`` is left unchanged.
    """
    new = Replacement(path)
    try:
        yield new.file
    except BaseException:
        new.abandon()
        raise
    new.commit()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a file, and replace the file that is there atomically."""
    with replacing(path) as file:
        file.write(text.encode())


def check_writable(path: Path) -> None:
    """Raise the OSError that opening ``path`` for writing would raise.

    An existing file is left unchanged, and no new file is left behind.
    """
    real = os.path.realpath(path)  # a dangling link: the file is created at the link's target
    try:
        open(real, "x").close()
    except FileExistsError:
        open(real, "a").close()
    else:
        os.unlink(real)
