"""Pages and links of the documentation site, as a hook of mkdocs (mkdocs.yml names it).

A page links to files as GitHub wants it: relative to itself, or, in README.md, which PyPI shows too, by the address of
the repository. On the site README.md is the front page, a link to another page leads to that page, and a link to any
other file leads to the file in the repository.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File of the repository outside docs/ → its page on the site."""

LINK = re.compile(r"""(?:(?<=\]\()|(?<=\bsrc=")|(?<=\bhref="))(?P<target>[^()\s"#]*)(?P<anchor>#[^()\s"]*)?(?=[)"])""")
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|^(?: {4}|\t).*?$|`[^`\n]+`", re.DOTALL | re.MULTILINE)

log = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with the links of the site."""
    sources = {page: source for source, page in PAGES.items()}
    own = page.file.src_uri
    return with_site_links(markdown, sources.get(own, f"docs/{own}"), config.repo_url)


def with_site_links(markdown: str, source: str, repository: str) -> str:
    """Return the text of the file `source` (from the root) with links for the site; code keeps its words."""
    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [_relinked(markdown[end : code.start()], source, repository), code[0]]
        end = code.end()
    return "".join([*parts, _relinked(markdown[end:], source, repository)])


def _relinked(text: str, source: str, repository: str) -> str:
    return LINK.sub(lambda link: site_link(link["target"], source, repository) + (link["anchor"] or ""), text)


def site_link(target: str, source: str, repository: str) -> str:
    """Return where a link of the file `source` to `target` leads on the site; a warning if the file does not exist."""
    path = repository_path(target, source, repository)
    if path is None:
        return target
    if not (ROOT / path).exists():
        log.warning("%s links to %s, which does not exist", source, target)
    is_folder = (ROOT / path).is_dir()
    if path in PAGES or (path.startswith("docs/") and not is_folder):
        return posixpath.relpath(page_of(path), posixpath.dirname(page_of(source)))
    return f"{repository}/{'tree' if is_folder else 'blob'}/{BRANCH}/{path}"


def page_of(path: str) -> str:
    """Return the page or file of the site that a file of the repository becomes."""
    return PAGES.get(path, path.removeprefix("docs/"))


def repository_path(target: str, source: str, repository: str) -> str | None:
    """Return the path from the root that a link means; None for an anchor in the page and for other sites."""
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/")
    for address in (f"{repository}/blob/{BRANCH}/", f"{repository}/tree/{BRANCH}/", f"{raw}/{BRANCH}/"):
        if target.startswith(address):
            return target.removeprefix(address)
    if not target or re.match(r"[a-z]+:", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
