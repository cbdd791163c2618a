"""A page as blocks, written as Markdown with figures beside it and as one HTML file that holds everything."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.tasks.markdown import code, escape, header, row

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
    """A paragraph; *stars* emphasise, `backticks` mark code, and everything else is shown as it stands."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of paragraphs, each marked up as `Text` is."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Cells shown as they stand; `wordy` columns hold sentences. Tables of the paper's numbers look different."""

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
    """Return the page as Markdown; figures are links relative to `folder`."""
    return "\n\n".join(_markdown(block, folder) for block in blocks) + "\n"


def _markdown(block: Block, folder: Path) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {escape(block.text)}"
    if isinstance(block, Text):
        return _escaped(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {_escaped(item)}" for item in block.items)
    if isinstance(block, Figure):
        caption = _escaped(block.caption)
        return f"![{caption}]({block.path.relative_to(folder).as_posix()})\n\n{caption}"
    if isinstance(block, Code):
        return "\n".join([f"{_escaped(block.summary)}:", "", *code(block.lines)])
    emphasis = "*" if block.is_paper else ""
    lines = header([escape(name) for name in block.header], left=(0, *block.wordy))
    for cells in block.rows:
        lines.append(row(f"{emphasis}{escape(cell)}{emphasis}" if cell else "" for cell in cells))
    return "\n".join([_escaped(block.caption), "", *lines])


_MARKUP = re.compile(r"(`[^`]+`)|(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])")
"""Code, or the inside of an emphasis."""


def _escaped(text: str) -> str:
    """Return a marked-up paragraph as Markdown."""
    done, at = "", 0
    for found in _MARKUP.finditer(text):
        done += escape(text[at : found.start()]) + (found[1] or f"*{escape(found[2])}*")
        at = found.end()
    return done + escape(text[at:])


def to_html(blocks: Sequence[Block]) -> str:
    """Return the page as one HTML file: styles and figures inside, nothing fetched, no script."""
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
    def cells(kind: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{kind}{' class=words' * (number in block.wordy)}>{html.escape(text, quote=False)}</{kind}>"
            for number, text in enumerate(texts)
        )

    rows = "".join(f"<tr>{cells('td', texts)}</tr>\n" for texts in block.rows)
    return (
        f"<figure><figcaption>{_inline(block.caption)}</figcaption>"
        f'<div class="scroll" tabindex="0"><table{" class=paper" * block.is_paper}>'
        f"<thead><tr>{cells('th', block.header)}</tr></thead>\n<tbody>{rows}</tbody></table></div></figure>"
    )


def _inline(text: str) -> str:
    """Return a marked-up paragraph as HTML."""

    def tagged(found: re.Match[str]) -> str:
        return f"<code>{found[1][1:-1]}</code>" if found[1] else f"<em>{found[2]}</em>"

    return _MARKUP.sub(tagged, html.escape(text, quote=False))
