"""Commands that install optional packages, for error messages.

An extra of this library names them (``[project.optional-dependencies]`` of pyproject.toml).
"""

from __future__ import annotations

__all__ = ["install_extra"]


def install_extra(extra: str) -> str:
    """Return how to install an extra of this library, which is on no package index.

    >>> install_extra("auto")
    "pip install '.[auto]' in a checkout of globaltensor, or pip install 'WHEEL[auto]' for its wheel"
    """  # noqa: E501
    return (
        f"pip install '.[{extra}]' in a checkout of globaltensor, or pip install 'WHEEL[{extra}]' "
        f"for its wheel"
    )
