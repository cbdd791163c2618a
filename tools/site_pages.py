"""Pages and links of the documentation site, as a hook of mkdocs (mkdocs.yml names it).

A page links to files relative to itself, as GitHub wants it. On the site README.md is the front page, a link to another
page leads to that page, and a link to any other file leads to a copy of the file: the site needs no repository. The
pages that `megatron-ddrp compare` makes from the rows in docs/ladder are made in build/ and stand in lab/ on the site.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File of the repository outside docs/ → its page on the site."""

COMPARISONS = {"ladder": ["rows"], "fast": ["fast", "novels"], "plateau": ["plateau"], "depth": ["depth"]}
"""Folder of build/ with a page of `megatron-ddrp compare` → files of docs/ladder with its rows."""

LINK = re.compile(r"""(?:(?<=\]\()|(?<=\bsrc=")|(?<=\bhref="))(?P<target>[^()\s"#]*)(?P<anchor>#[^()\s"]*)?(?=[)"])""")
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|^(?: {4}|\t).*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE)

log = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/, the pages and tables of comparisons, and the files that pages link to."""
    from mkdocs.structure.files import File

    compared = [made for name, rows in COMPARISONS.items() for made in compared_files(name, rows)]
    for source in dict.fromkeys([*PAGES, *compared, *linked_files()]):
        files.append(File.generated(config, page_of(source), content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def compared_files(name: str, rows: list[str]) -> list[str]:
    """Return the page of a comparison and its tables, made anew if the rows or the package have changed since."""
    folder = ROOT / "build" / name
    page, sources = folder / "page.html", [ROOT / "docs" / "ladder" / f"{file}.jsonl" for file in rows]
    package = (file for file in (ROOT / "megatron_ddrp").rglob("*.*") if file.suffix != ".pyc")
    if not page.exists() or page.stat().st_mtime < max(file.stat().st_mtime for file in [*sources, *package]):
        from megatron_ddrp.lab.compare.command import main

        main([*map(str, sources), "--output-dir", str(folder)])
    return [str(file.relative_to(ROOT)) for file in [page, *sorted(folder.glob("tables/*.csv"))]]


def linked_files() -> list[str]:
    """Return the files outside docs/ that a page links to and that are no pages."""
    sources = [*PAGES, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    texts = {source: CODE.sub("", (ROOT / source).read_text(encoding="utf-8")) for source in sources}
    paths = {repository_path(link["target"], source) for source, text in texts.items() for link in LINK.finditer(text)}
    return sorted(
        path for path in paths if path and path not in PAGES and path[:5] != "docs/" and (ROOT / path).is_file()
    )


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with the links of the site."""
    sources = {page: source for source, page in PAGES.items()}
    own = page.file.src_uri
    return with_site_links(markdown, sources.get(own, f"docs/{own}"))


def with_site_links(markdown: str, source: str) -> str:
    """Return the text of the file `source` (from the root) with links for the site; code keeps its words."""
    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [_relinked(markdown[end : code.start()], source), code[0]]
        end = code.end()
    return "".join([*parts, _relinked(markdown[end:], source)])


def _relinked(text: str, source: str) -> str:
    return LINK.sub(lambda link: site_link(link["target"], source) + (link["anchor"] or ""), text)


def site_link(target: str, source: str) -> str:
    """Return where a link of the file `source` to `target` leads on the site; a warning if there is no such file."""
    path = repository_path(target, source)
    if path is None:
        return target
    if not (ROOT / path).is_file():
        log.warning("%s links to %s, which is no file", source, target)
    return posixpath.relpath(page_of(path), posixpath.dirname(page_of(source)))


def page_of(path: str) -> str:
    """Return the page or file of the site that a file of the repository becomes."""
    return PAGES.get(path, re.sub("^build/", "lab/", path.removeprefix("docs/")))


def repository_path(target: str, source: str) -> str | None:
    """Return the path from the root that a link means; None for an anchor in the page and for other sites."""
    if not target or re.match(r"[a-z]+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
