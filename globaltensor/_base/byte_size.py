"""Numbers of bytes as text for people."""

from __future__ import annotations

__all__ = ["show_bytes"]


def show_bytes(n: int) -> str:
    """Return a number of bytes as text.

    >>> show_bytes(512), show_bytes(16 << 20)
    ('512 B', '16.0 MiB')
    """
    size, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
