"""Files that the library writes: one that is replaced stays whole until the new one is, and what
cannot be written is known before the work for it is done."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["Replacement", "check_writable", "replacing", "write_text"]

Path = str | os.PathLike[str]

#: What creating a file in a folder raises where opening an old one there for writing says the same,
#: or may do nevertheless.
_NO_FOLDER = (PermissionError, FileNotFoundError, NotADirectoryError)


class Replacement:
    """A file that is written beside another, to take its place when it is complete. Either of the
    two is there whole at each moment, whatever ends the process.

    Links are followed, and the old file's permissions stay. What is no file (a pipe, a device) is
    written in place, and so is a file in a folder where none may be made.
    """

    def __init__(self, path: Path) -> None:
        old = _regular(path)
        self._path = os.path.realpath(
            path
        )  # where a link leads nowhere, the file is made at its end
        self._name: str | None = None  # in the folder, once it has one
        self._folder: int | None = None
        if old is not None and not stat.S_ISREG(old.st_mode):
            self.file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by commit or abandon
            return
        if old is not None:
            os.close(
                os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            )  # what may not be written must not be replaced
        try:
            self._folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_CLOEXEC)
            self.file = os.fdopen(self._created(), "wb")
        except _NO_FOLDER:
            self._close_folder()
            self.file = open(path, "wb")  # noqa: SIM115 - as above
            return
        except BaseException:
            self._close_folder()
            raise
        if old is not None:
            _as_before(self.file.fileno(), self._path, old)

    def _created(self) -> int:
        """Open a new file. Where the system can, it has no name until it is complete: then nothing
        is left of it when the process is killed."""
        nameless = getattr(os, "O_TMPFILE", 0)
        if nameless and os.path.isdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # file systems that have no such files raise several
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
        """Put the file in its place, on the disk. Raises OSError, and leaves the old one, where
        that fails."""
        try:
            self.file.flush()
            if self._folder is not None:
                os.fsync(self.file.fileno())
                if self._name is None:
                    name = (
                        _fresh_name()
                    )  # (with a folder named, Python lets the system follow the link in /proc)
                    os.link(
                        f"/proc/self/fd/{self.file.fileno()}",
                        name,
                        src_dir_fd=self._folder,
                        dst_dir_fd=self._folder,
                    )
                    self._name = name
                os.replace(self._name, self._path, src_dir_fd=self._folder)
                self._name = None
                with contextlib.suppress(OSError):  # not every file system can do it to a folder
                    os.fsync(self._folder)
            self.file.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave the old file, and nothing of the new one."""
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


def _regular(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _fresh_name() -> str:
    return f".globaltensor-{secrets.token_hex(8)}"


def _as_before(file: int, path: str, old: os.stat_result) -> None:
    """Give a new file the owner and the permissions of the one that it will replace, as far as this
    process may."""
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(OSError):
            os.fchown(file, old.st_uid, old.st_gid)
    with contextlib.suppress(OSError):
        for name in os.listxattr(path):  # access lists too
            os.setxattr(file, name, os.getxattr(path, name))
    os.fchmod(file, stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the place of ``path`` when the block ends; an error
    leaves that as it was."""
    new = Replacement(path)
    try:
        yield new.file
    except BaseException:
        new.abandon()
        raise
    new.commit()


def write_text(path: Path, text: str) -> None:
    """Write a whole file, which replaces the one that is there."""
    with replacing(path) as file:
        file.write(text.encode())


def check_writable(path: Path) -> None:
    """Raises the OSError that opening it for writing would. Leaves what is there as it is, and
    nothing where nothing was."""
    real = os.path.realpath(path)  # where a link leads nowhere, the file is made at its end
    try:
        open(real, "x").close()
    except FileExistsError:
        open(real, "a").close()
    else:
        os.unlink(real)
