"""Run a body in which ranks diverge, and return the text of its error."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from globaltensor.distributed.world import world
from globaltensor.errors import DivergenceError


def refused(
    body: Callable[[], object],
    *patterns: str,
    errors: tuple[type[Exception], ...] = (DivergenceError,),
) -> str:
    """Return the text of the error, then reset the world so that it can go on."""
    with pytest.raises(errors) as found:
        body()
    world().forget()
    world().comm(tuple(range(world().size))).barrier()
    text = str(found.value)
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in\n{text}"
    return text
