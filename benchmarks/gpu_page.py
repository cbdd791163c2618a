"""The GPU report as one Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("", str),
    "value": ("", str),
    "length": ("length", str),
    "rows": ("rows", str),
    "part": ("part", str),
    "micro_batch": ("micro-batch", str),
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "ms": ("ms", "{:.2f}".format),
    "host_ms": ("host ms", "{:.2f}".format),
    "kernel_ms": ("kernel ms", "{:.2f}".format),
    "busy": ("busy", "{:.0%}".format),
    "tflops": ("TFLOP/s", "{:.1f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "peak_gib": ("peak GiB", "{:.2f}".format),
    "compile_seconds": ("first steps, s", "{:.1f}".format),
    "waits": ("waits of a step", str),
    "verdict": ("verdict", str),
    "note": ("note", str),
}
"""Key of a row → its column's heading and the text of a value, in the order of a table."""

ABOUT = {
    "lengths": (
        "tokens/s counts tokens without padding. `full` rows hold one text and no padding. `padded` rows hold one "
        "text each, of log-normal length (mean 367 tokens), cut to the longest of the micro-batch. `packed` rows hold "
        "several."
    ),
    "encodings": "The objectives of one encoding share a micro-batch size and are timed in turns.",
    "graphs": (
        "host ms is the time until the last launch of a step, kernel ms the sum of its kernels, busy their share of "
        "ms. First steps are those that compile and capture, beyond the time of later ones. The JSON has the gradient "
        "norms of all steps."
    ),
    "kernels": (
        "Forward and backward pass of one layer's attention, dropout 0.1. TFLOP/s of a call are those of plain "
        "attention in its time; those of a kernel are of its own products."
    ),
    "others": (
        "transformers' models train under autocast with fp32 weights and torch's fused AdamW, as its Trainer does, and "
        "their head computes logits of every token. flashdeberta's attention has no dropout."
    ),
}
"""Name of a section → a sentence above its table."""


def page(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    steps = report["sizes"]["micro_batches"]
    lines = [
        "# GPU report",
        "",
        f"Begun at {report['date']} by commit {report['commit']}; {report['minutes']:.1f} minutes so far. A time is "
        f"the median over {report['sizes']['rounds']} rounds with the arms of a group in turns. ms is per micro-batch, "
        f"with {steps} micro-batches per optimizer step. Peak memory is that of an arm's first step, without the "
        "other arms.",
    ]
    for section in report["sections"]:
        lines += ["", f"## {section['title']}", ""]
        if section["name"] in ABOUT:
            lines += [ABOUT[section["name"]], ""]
        is_of_tests = any("selected" in row for row in section["rows"])
        lines += tests_table(section["rows"]) if is_of_tests else table(section["rows"])
        lines += ["", f"{section['seconds']:.0f} s. {section['fault'] or ''}".strip()]
    return "\n".join(lines) + "\n"


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a Markdown table with the columns that any row fills."""
    keys = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    if not keys:
        return ["No rows."]
    lines = [_line([COLUMNS[key][0] for key in keys]), _line(["---"] * len(keys))]
    return lines + [_line(["–" if row.get(key) is None else COLUMNS[key][1](row[key]) for key in keys]) for row in rows]


def tests_table(rows: list[Row]) -> list[str]:
    """Return a line of counts, a line for each failed test, and a line for each reason to skip."""
    tests = [row for row in rows if "test" in row]
    outcomes = Counter(row["outcome"] for row in tests)
    outcomes["left out for time"] = sum(row.get("selected", 0) for row in rows) - len({row["test"] for row in tests})
    lines = [", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()) if count > 0) + "."]
    lines += [f"- failed: `{row['test']}`: {row['note']}" for row in tests if row["outcome"] == "failed"]
    skipped = Counter(row["note"] for row in tests if row["outcome"] == "skipped")
    return lines + [f"- skipped {count}: {note}" for note, count in skipped.items()]


def row_line(row: Row) -> str:
    """Return a row as a line for the terminal."""
    if "selected" in row:
        return f"{row['selected']} tests"
    if "test" in row:
        return f"{row['outcome']} {row['test'].rpartition('/')[2]} {row.get('note', '')}".rstrip()
    return "  ".join(
        f"{heading} {text(row[key])}".strip() for key, (heading, text) in COLUMNS.items() if _has(row, key)
    )


def _has(row: Row, key: str) -> bool:
    return row.get(key) is not None


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
