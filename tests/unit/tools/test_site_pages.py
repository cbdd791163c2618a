"""Every link between the documents leads somewhere, on GitHub and on the site."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tools.site_pages import CODE, LINK, ROOT, repository_path, with_site_links

DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
)
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#{1,6} +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, source: str) -> list[str]:
    """Return the links of a document that lead to no file, or to no heading of it."""
    broken = []
    for link in LINK.finditer(CODE.sub("", text)):
        path = repository_path(link["target"], source) if link["target"] else source
        if path is None:
            continue
        anchor = (link["anchor"] or "#")[1:]
        file = ROOT / path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(link[0])
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert broken_links(document.read_text(encoding="utf-8"), str(document.relative_to(ROOT))) == []


def test_a_broken_link_is_found() -> None:
    text = (
        "[a](data.md) [b](data.md#no-such) [c](none.md) [d](#data) [e](../README.md) `[f](none.md)` [g](https://x.y/z)"
    )
    assert broken_links(text, "docs/data.md") == ["data.md#no-such", "none.md"]


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "docs/data.md#data", "data.md#data"),
        ("README.md", "CONTRIBUTING.md", "contributing.md"),
        ("README.md", "LICENSE", "LICENSE"),
        ("docs/data.md", "../README.md#two-commands", "index.md#two-commands"),
        ("docs/data.md", "figures/electra_wiki.png", "figures/electra_wiki.png"),
        ("docs/data.md", "../examples/quickstart.sh", "examples/quickstart.sh"),
        ("docs/deep/page.md", "../data.md", "../data.md"),
        ("docs/data.md", "#data", "#data"),
        ("docs/data.md", "https://arxiv.org/abs/1810.04805", "https://arxiv.org/abs/1810.04805"),
    ],
)
def test_a_link_leads_to_the_page_or_to_a_copy_of_the_file(source: str, link: str, expected: str) -> None:
    assert with_site_links(f"see [it]({link})", source) == f"see [it]({expected})"


def test_code_and_html_keep_their_words_and_links() -> None:
    text = "`[a](../LICENSE)`\n\n```\n[b](../LICENSE)\n```\n\n    [c](../LICENSE)\n"
    assert with_site_links(text, "docs/data.md") == text
    assert with_site_links('<img src="docs/figures/electra_wiki.png">', "README.md") == (
        '<img src="figures/electra_wiki.png">'
    )


def test_every_page_stands_in_the_navigation_once() -> None:
    named = re.findall(r"- [^:\n]+: (\S+\.md)$", SETTINGS, re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted([*pages, "index.md", "contributing.md", "changelog.md"])


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed; `make setup` brings it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="data.html"' in front and (tmp_path / "figures" / "electra_wiki.png").exists()
    assert (tmp_path / "examples" / "compare" / "ladder.yaml").read_text() == (
        ROOT / "examples" / "compare" / "ladder.yaml"
    ).read_text()
    assert "pre-wrap" in (tmp_path / "site.css").read_text() and 'href="site.css"' in front  # lines of code wrap
