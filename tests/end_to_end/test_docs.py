"""Tests that the examples in README.md and docs/ run as written, in a world of one and on two
processes. The Python blocks of a page run in order, as one program."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked import forked

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n```(?:text)?\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


def blocks(page: Path) -> Iterator[tuple[int, str, str | None]]:
    """Yield (number of lines before it, code, expected output) for each Python block. The expected
    output is the text block directly below, or None."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield text[: match.start(1)].count("\n"), match[1], match[2]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http", "mailto")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(target)
    assert not wrong, f"{name_of(page)} links to {wrong}"


WITH_CODE = [page for page in PAGES if any(blocks(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
@pytest.mark.sweep(2)
def test_the_examples_run_and_print_what_they_are_said_to(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for before, code, printed in blocks(page):
        capsys.readouterr()
        exec(compile("\n" * before + code, str(page), "exec"), names)
        if printed is not None:
            assert (
                capsys.readouterr().out.replace(f"{page.parent}/", "").strip() == printed.strip()
            ), f"{page.name}, below line {before}"


#: Pages whose program writes a file with Python's own functions and reads it again. In a shared
#: folder one rank could read a file that another rank has only half written.
FOLDER_OF_A_RANK = {"pipeline.md"}


def run_page(page: Path, folder: Path) -> None:
    """Run the page on one rank. The output depends on the number of ranks, so it is compared only
    in a world of one."""
    if page.name in FOLDER_OF_A_RANK:
        folder = folder / os.environ["RANK"]
        folder.mkdir()
    os.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    for before, code, _ in blocks(page):
        linecache.cache[str(page)] = (
            0,
            None,
            page.read_text().splitlines(keepends=True),
            str(page),
        )
        exec(compile("\n" * before + code, str(page), "exec"), names)


#: Pages whose programs start the processes of a job themselves, so no launcher starts them.
NOT_ON_RANKS = {"v0.md"}


@pytest.mark.parametrize(
    "page",
    [page for page in WITH_CODE if page.name not in NOT_ON_RANKS],
    ids=name_of,
)
@pytest.mark.sweep(4)
def test_the_examples_run_on_two_processes(page: Path, tmp_path: Path) -> None:
    codes, said = forked(2, run_page, page, tmp_path)
    assert codes == [0, 0], "\n".join(text[-3000:] for text in said)
