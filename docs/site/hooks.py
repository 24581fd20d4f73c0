"""Hooks of mkdocs, which add pages from outside of docs/ and rewrite the links to them.

README.md is the home page. Pages of other folders (CONTRIBUTING.md, benchmarks/results/README.md)
have the same path in the site as in the repository. The hooks rewrite links between docs/ and the
rest of the repository, so that a link that works on GitHub also works in the site. `reference.py`
makes the API reference.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: Pages of the navigation from outside of docs/: address in the site -> path in the repository.
#: `on_files` also adds the files that pages link to.
OUTSIDE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "benchmarks/results/README.md": "benchmarks/results/README.md",
}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))|(?<=src=\")([^\"]+)(?=\")|(?<=href=\")([^\"]+)(?=\")")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, the files that they link to, and the API reference."""
    sys.path.insert(0, str(Path(__file__).parent))
    import reference

    for uri, source in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    for uri, text in reference.pages().items():
        files.append(File.generated(config, uri, content=text))
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for target in _targets(page.content_string):
            path = _in_repository(page.src_uri, target)
            if path is None or not (ROOT / path).is_file():
                continue
            if files.get_file_from_path(_in_site(path)) is None:
                found = File.generated(
                    config,
                    _in_site(path),
                    abs_src_path=str(ROOT / path),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
                files.append(found)
                if found.is_documentation_page():
                    waiting.append(found)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links between docs/ and the rest of the repository."""
    uri = page.file.src_uri
    parts = _FENCE.split(markdown)
    for i in range(0, len(parts), 2):
        parts[i] = _LINK.sub(lambda m: _relinked(uri, m[0]), parts[i])
    return "".join(parts)


def _targets(markdown: str) -> list[str]:
    return [m[0] for i in _FENCE.split(markdown)[::2] for m in _LINK.finditer(i)]


def _in_repository(uri: str, target: str) -> str | None:
    """Return the path in the repository of a link's target, or None if it has no such path."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:|/", path):
        return None
    page = OUTSIDE.get(uri) or (f"docs/{uri}" if (DOCS / uri).exists() else uri)
    found = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    return found if os.path.exists(ROOT / found) else None


def _in_site(path: str) -> str:
    """Return the address in the site of a path of the repository.

    The address of a folder is that of its first page.
    """
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        path = min(str(page.relative_to(ROOT)) for page in (ROOT / path).glob("*.md"))
    return path.removeprefix("docs/")


def _relinked(uri: str, target: str) -> str:
    path = _in_repository(uri, target)
    if path is None:
        return target
    anchor = target.partition("#")[2]
    found = posixpath.relpath(_in_site(path), posixpath.dirname(uri) or ".")
    return f"{found}#{anchor}" if anchor else found
