"""Every link between the documents leads somewhere on the site, whose anchors are GitHub's."""

import os
import time
from pathlib import Path

import pytest

from megatron_ddrp.lab.compare import command
from tools import site_pages
from tools.site_pages import ROOT, compared_files, with_site_links


def test_a_link_leads_to_the_page_or_to_a_copy_of_the_file_and_to_no_file_it_is_a_warning(caplog) -> None:
    """A warning fails the build. Code and HTML keep their words and links."""
    for source, link, expected in (
        ("README.md", "docs/data.md#data", "data.md#data"),
        ("README.md", "LICENSE", "LICENSE"),
        ("docs/data.md", "../README.md#two-commands", "index.md#two-commands"),
        ("docs/data.md", "figures/electra_wiki.png", "figures/electra_wiki.png"),
        ("docs/deep/page.md", "../data.md", "../data.md"),
        ("docs/lab/page.md", "../../build/ladder/page.html", "ladder/page.html"),
        ("docs/data.md", "#data", "#data"),
        ("docs/data.md", "https://arxiv.org/abs/1810.04805", "https://arxiv.org/abs/1810.04805"),
    ):
        assert with_site_links(f"see [it]({link})", source) == f"see [it]({expected})"
    text = "`[a](../LICENSE)`\n\n```\n[b](../LICENSE)\n```\n\n    [c](../LICENSE)\n"
    assert with_site_links(text, "docs/data.md") == text
    figure = with_site_links('<img src="docs/figures/electra_wiki.png">', "README.md")
    assert figure == '<img src="figures/electra_wiki.png">'
    caplog.clear()
    with_site_links("[a](../data.md) [b](../../build/ladder/tables/none.csv)", "docs/lab/results-tables.md")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "none.csv, which is no file" in record.getMessage()


def test_a_comparison_is_made_again_if_its_rows_or_the_package_have_changed(tmp_path, monkeypatch) -> None:
    made, now = [], time.time()
    names = ("docs/ladder/one.jsonl", "megatron_ddrp/one.py", "megatron_ddrp/one.pyc")
    rows, module, compiled = (tmp_path / name for name in names)

    def compare(words: list[str]) -> None:
        made.append(words)
        for file in ("page.html", "tables/b.csv", "tables/a.csv", "tables/a.tex"):
            touch(tmp_path / "build" / "name" / file, now)

    def touch(file: Path, when: float) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (when, when))

    monkeypatch.setattr(site_pages, "ROOT", tmp_path)
    monkeypatch.setattr(command, "main", compare)
    for changed, times in ((None, 1), (None, 1), (rows, 2), (module, 3), (compiled, 3)):
        for file in (rows, module, compiled):
            touch(file, now + (60 if file == changed else -60))
        files = compared_files("name", ["one"])
        assert len(made) == times, changed
    assert files == [f"build/name/{file}" for file in ("page.html", "tables/a.csv", "tables/b.csv")]
    assert made[0] == [str(rows), "--output-dir", str(tmp_path / "build" / "name")]


def test_the_site_has_the_pages_the_comparisons_and_the_files_that_pages_link_to(monkeypatch) -> None:
    """`make docs` builds the site, where a link to anything else is an error."""
    structure = pytest.importorskip("mkdocs.structure.files", reason="`make setup` brings mkdocs")
    monkeypatch.setattr(structure.File, "generated", lambda config, uri, content: (uri, content))
    monkeypatch.setattr(site_pages, "compared_files", lambda name, rows: [f"docs/ladder/{rows[0]}.jsonl"])
    made = dict(site_pages.on_files([], None))
    for uri, file in (("index.md", "README.md"), ("examples/compare/ladder.yaml",) * 2, ("LICENSE",) * 2):
        assert made[uri] == (ROOT / file).read_text(encoding="utf-8")
    assert "ladder/fast.jsonl" in made and not [uri for uri in made if uri.startswith("docs/")]
