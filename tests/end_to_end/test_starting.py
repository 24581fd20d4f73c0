"""Tests that the commands in docs/starting.md run as written, where their requirements are
installed."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
from support.program import run

PAGE = (Path(__file__).parents[2] / "docs" / "starting.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
FILES = {
    name: text
    for text, name in re.findall(r"^```py\n(# (\w+\.py)\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}
BIN = Path(sys.executable).parent


def test_the_page_has_its_examples() -> None:
    assert set(FILES) == {"first.py", "spawned.py"}
    assert len(COMMANDS) == 8


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.sub(r"\W+", "-", command)[:40])
@pytest.mark.sweep(8)
def test_a_command(command: str, tmp_path: Path) -> None:
    program = next(word for word in command.replace("(", "").split() if "=" not in word)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    if shutil.which(program, path=path) is None:
        pytest.skip(f"{program} is not installed here")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("29500", port))
    variables = {"PATH": path, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    code, said = run(["sh", "-c", command.replace("29500", port)], folder=tmp_path, **variables)
    assert code == 0, said
    n = 1 if command == "python first.py" else 2
    for rank in range(n):
        assert f"rank {rank} of {n} holds {8 // n} of 8, which sum to 8" in said, said
