"""``flow.train``: the older interface of checkpoints, which user code calls.

It is built on ``flow.checkpoint``.
"""

from __future__ import annotations

from pathlib import Path

from . import checkpoint
from .errors import SessionError
from .session.session import session

__all__ = ["CheckPoint", "SimpleCheckPointManager"]


class CheckPoint:
    """The older interface to save and load variables.

    Use ``flow.checkpoint.save``, ``flow.checkpoint.get`` and ``flow.load_variables`` instead.
    """

    def init(self) -> None:
        """Start the session; variables have the values of their initializers."""
        session().start()

    def save(self, path: str) -> None:
        """Call ``checkpoint.save(path)``."""
        checkpoint.save(path)

    def load(self, path: str) -> None:
        """Call ``load_variables(checkpoint.get(path))``."""
        checkpoint.load_variables(checkpoint.get(path))


class SimpleCheckPointManager:
    """A folder of numbered snapshots: ``<prefix>1``, ``<prefix>2`` ..."""

    def __init__(self, root_path: str, prefix: str = "snapshot_") -> None:
        self.root, self.prefix = Path(root_path), prefix

    def list_checkpoints(self) -> list[str]:
        """Return the names of the complete snapshots, oldest first."""
        snapshots = [
            p
            for p in self.root.glob(f"{self.prefix}*")
            if (p / checkpoint.DONE).exists() and p.name[len(self.prefix) :].isdecimal()
        ]
        return [p.name for p in sorted(snapshots, key=lambda p: int(p.name[len(self.prefix) :]))]

    def latest_checkpoint(self) -> str | None:
        """Return the name of the newest snapshot, or None if there is none."""
        found = self.list_checkpoints()
        return found[-1] if found else None

    def initialize_or_restore(self) -> None:
        """Load the newest snapshot. If there is none, start with the initializers' values."""
        latest = self.latest_checkpoint()
        if latest is None:
            session().start()
        else:
            checkpoint.load_variables(checkpoint.get(str(self.root / latest)))

    def next_path(self) -> str:
        """Return the path of the next snapshot."""
        found = self.latest_checkpoint()
        return str(self.root / f"{self.prefix}{int(found[len(self.prefix) :]) + 1 if found else 1}")

    def save(self) -> None:
        """Write the next snapshot. Raise SessionError if the root is no folder."""
        if self.root.exists() and not self.root.is_dir():
            raise SessionError(f"SimpleCheckPointManager: {self.root} is no folder")
        checkpoint.save(self.next_path())
