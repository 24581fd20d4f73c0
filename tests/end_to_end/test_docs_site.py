"""Tests of the site of the documents: its reference has every public name, errors link to their
section, and the strict build works without a network."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import import_script

import globaltensor as flow
from globaltensor.errors import CompileWarning, FallbackWarning, GlobalTensorError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return import_script("docs/site/reference.py")  # type: ignore[no-any-return]


def test_every_public_name_has_an_entry(reference: ModuleType) -> None:
    missing = reference.missing()
    assert not missing, f"give these a section in PAGES of docs/site/reference.py: {missing}"
    public = reference.public_names()
    assert {"parallelize", "nn.Graph", "comm.all_reduce", "errors.SbpError"} <= set(public)
    assert not {"nn.Linear", "matmul", "Any", "comm.torch"} & set(public)
    text = "\n".join(reference.pages().values())
    for name in public:
        name = reference.ALIASES.get(name, name)
        assert f"#flow.{name} " in text or f'id="flow.{name}"' in text, name


def test_no_entry_is_of_a_name_that_is_gone(reference: ModuleType) -> None:
    for page in reference.PAGES.values():
        for _, names in page.sections:
            for name in names.split():
                assert reference._value(name.removesuffix(".*")) is not None
    assert set(reference.ALIASES) <= set(reference.public_names())


def test_an_entry_has_signature_text_and_example(reference: ModuleType) -> None:
    page = reference.pages()["reference/moving.md"]
    entry = page[page.index("### `flow.local_map`") :].partition("\n### ")[0]
    assert "    in_sbp: Any = None,\n    *,\n    placement: Placement | None = None,\n" in entry
    assert "Turn a function of local tensors into a function of global tensors." in entry
    assert "```pycon\n>>> import torch\n" in entry
    assert "noqa" not in entry
    assert "Raises [`SbpError`](errors.md#flow.errors.SbpError) if the number" in entry


@pytest.mark.parametrize(
    "error",
    [
        value
        for value in vars(flow.errors).values()
        if isinstance(value, type)
        and issubclass(value, (GlobalTensorError, CompileWarning, FallbackWarning))
    ],
)
def test_an_error_links_to_its_section(error: type[Exception]) -> None:
    assert f"See also docs/errors.md#{error.__name__.lower()}." in (inspect.getdoc(error) or "")
    assert f"\n## {error.__name__}\n" in (ROOT / "docs/errors.md").read_text()


@pytest.mark.extended
def test_the_strict_build_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(
        build,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    elsewhere = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>"
    )
    for name, text in pages.items():
        assert not elsewhere.search(text), name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", style.read_text()), style
    assert (site / "search/search_index.json").stat().st_size > 1e5
    # A link to a page outside of docs/, and GitHub's anchor of a heading with a sign.
    assert 'href="../benchmarks/results/index.html"' in pages["coming_from/ddp.html"]
    assert 'id="fully-sharded-fsdp-zero-3-split-the-parameters-too"' in pages["parallel.html"]
    assert 'href="reference/index.html"' in pages["index.html"]


def test_the_pictures_of_global_tensors_are_those_that_the_page_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To renew them, run the page's program in docs/images."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/concepts/global_tensors.md").read_text()
    program = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec("\n".join(program), {"__name__": "__main__"})
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert sorted(drawn) == sorted(re.findall(r"\(\.\./images/(.*?)\)", page))
    for name, picture in drawn.items():
        assert (ROOT / "docs/images" / name).read_text() == picture, name
