"""A page as blocks, written as Markdown with figures beside it and as one HTML file that holds everything."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --muted: #57606a; --page: #ffffff; --soft: #f3f5f7;
  --line: #d0d7de; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --muted: #9aa5b1; --page: #12161b; --soft: #1c232b; --line: #3a444f; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem clamp(0.8rem, 3vw, 2rem) 4rem; color: var(--text);
  background: var(--page); font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { margin-top: 2.4rem; border-bottom: 1px solid var(--line); }
p, li, figcaption, img { max-width: 46rem; } figcaption { color: var(--muted); font-size: 0.9rem; }
code { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 0.4rem 0 1.4rem; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid var(--line); }
th { background: var(--soft); text-align: right; vertical-align: bottom; }
td { text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
th:first-child { background: var(--soft); } td.words, th.words { text-align: left; white-space: normal;
  min-width: 9rem; }
table.paper td, table.paper th { color: var(--muted); font-style: italic; }
figure { margin: 1.2rem 0; } img { display: block; width: 100%; height: auto; background: #ffffff;
  border-radius: 6px; padding: 4px; }
pre { background: var(--soft); padding: 0.8rem; overflow-x: auto; font-size: 0.82rem; border-radius: 6px; }
details { margin: 1rem 0; } summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Heading:
    """A section's title; level 1 is the page's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; *stars* emphasise."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells as text; `wordy` columns hold sentences. Tables of the paper's numbers look different."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    is_paper: bool = False
    wordy: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """A PNG below the page's folder."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Code:
    """Lines as they are, folded away."""

    summary: str
    lines: Sequence[str]


Block = Heading | Text | Bullets | Table | Figure | Code


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The page as Markdown; figures are links relative to `folder`."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Bullets):
        return "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Figure):
        return f"![{block.caption}]({block.path.relative_to(folder).as_posix()})\n\n{block.caption}"
    if isinstance(block, Code):
        return "\n".join([f"{block.summary}:", "", "```", *block.lines, "```"])
    lines = [block.header, ["---"] + ["---" if n in block.wordy else "---:" for n in range(1, len(block.header))]]
    emphasis = "*" if block.is_paper else ""
    lines += [[f"{emphasis}{_cell(cell)}{emphasis}" if cell else "" for cell in row] for row in block.rows]
    return "\n".join([block.caption, "", *("| " + " | ".join(line) + " |" for line in lines)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def to_html(blocks: Sequence[Block]) -> str:
    """The page as one HTML file: styles and figures inside, nothing fetched, no script."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Comparison")
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Figure):
        data = base64.b64encode(block.path.read_bytes()).decode()
        alt = html.escape(block.caption, quote=True)
        return (
            f'<figure><img src="data:image/png;base64,{data}" alt="{alt}">'
            f"<figcaption>{_inline(block.caption)}</figcaption></figure>"
        )
    if isinstance(block, Code):
        text = html.escape("\n".join(block.lines))
        return f"<details><summary>{_inline(block.summary)}</summary><pre>{text}</pre></details>"
    return _html_table(block)


def _html_table(block: Table) -> str:
    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=words' * (number in block.wordy)}>{_inline(cell)}</{kind}>"
            for number, cell in enumerate(row)
        )

    rows = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in block.rows)
    return (
        f"<figure><figcaption>{_inline(block.caption)}</figcaption>"
        f'<div class="scroll" tabindex="0"><table{" class=paper" * block.is_paper}>'
        f"<thead><tr>{cells('th', block.header)}</tr></thead>\n<tbody>{rows}</tbody></table></div></figure>"
    )


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])", r"<em>\1</em>", escaped)
