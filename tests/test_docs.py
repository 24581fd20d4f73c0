"""The examples in README.md and docs/ run as they stand, in a world of one: the python blocks of a page in their order, as one program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```(?:text)?\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[int, str, str | None]]:
    """(number of lines before it, code, the block right below it: what it prints) of each python block."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield text[: match.start(1)].count("\n"), match[1], match[2]


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=lambda page: page.name)
def test_the_examples_run_and_print_what_they_are_said_to(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for before, code, printed in blocks(page):
        capsys.readouterr()
        exec(compile("\n" * before + code, str(page), "exec"), names)
        if printed is not None:
            assert capsys.readouterr().out.replace(f"{page.parent}/", "").strip() == printed.strip(), f"{page.name}, below line {before}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
