"""Tables that scripts write into the documents: each stands between `<!-- NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

from pathlib import Path

from megatron_ddrp.pages.markdown import read_block, replace_blocks

DOCS = Path(__file__).resolve().parents[1] / "docs"


def written_table(document: str, name: str) -> str:
    """Return the table that stands between a document's markers."""
    return read_block((DOCS / document).read_text(encoding="utf-8"), name)


def write_table(document: str, name: str, table: str) -> None:
    """Put a table between a document's markers."""
    path = DOCS / document
    path.write_text(replace_blocks(path.read_text(encoding="utf-8"), name, table), encoding="utf-8")
