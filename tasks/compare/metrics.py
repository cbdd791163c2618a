"""What a course wrote about itself: metrics.jsonl of its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ddrp.log import METRICS

Row = dict[str, Any]


def read_rows(folder: Path) -> list[Row]:
    """Its rows, also while it is being written; none where there is no file yet."""
    try:
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # the half-written last line
            break
    return rows
