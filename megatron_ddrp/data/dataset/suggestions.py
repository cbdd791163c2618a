"""Suggestions for a missing dataset: the names that the user may have meant."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

SHOWN = 5
"""Names in a message."""


def suggest(index: Path) -> str:
    """Return a hint about a missing `PREFIX.idx`: similar names in its folder, else all names there."""
    folder, name = index.parent, index.name.removesuffix(".idx")
    if not folder.is_dir():
        return f"there is no folder {folder}; check --data-path"
    unfinished = [path for path in sorted(folder.glob("*.unfinished")) if f"{name}_".startswith(f"{path.stem}_")]
    if unfinished:
        return f"its preprocessing has not ended ({unfinished[0]}): run the same command again, which resumes"
    there = sorted(path.stem for path in folder.glob("*.idx"))
    longer = [other for other in there if other.startswith(f"{name}_")]
    similar = longer or difflib.get_close_matches(name, there, n=1, cutoff=0.85)
    if similar:
        return f"did you mean {' or '.join(_prefixes(folder, similar))}?"
    if there:
        return f"the folder has {', '.join(_prefixes(folder, there))}"
    return "expected PREFIX.bin and PREFIX.idx as megatron-ddrp preprocess writes them; check --data-path"


def _prefixes(folder: Path, names: list[str]) -> list[str]:
    shown = [os.fspath(folder / name) for name in names[:SHOWN]]
    return shown if len(names) <= SHOWN else [*shown, f"{len(names) - SHOWN} more"]
