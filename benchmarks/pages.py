"""Tables in the documents that scripts write: each stands between `<!-- NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"


def written_table(document: str, name: str) -> str:
    """Return the table that stands between a document's markers."""
    begin, end = _markers(name)
    return (DOCS / document).read_text(encoding="utf-8").split(begin)[1].split(end)[0]


def write_table(document: str, name: str, table: str) -> None:
    """Put a table between a document's markers."""
    begin, end = _markers(name)
    path = DOCS / document
    before, rest = path.read_text(encoding="utf-8").split(begin)
    path.write_text(f"{before}{begin}{table}{end}{rest.split(end)[1]}", encoding="utf-8")
