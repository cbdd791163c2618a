"""Sums of the files of this project's exports: a folder that was damaged after its export is refused.

Folders of other programs have no sums, and transformers ignores ours.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_ddrp.data.sealed import file_facts, file_fault
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_object

SUMS = "export_sums.json"
CARD = "README.md"
"""The model card, which people edit."""


def write_sums(folder: Path) -> None:
    """Write size and CRC-32 of every file of a complete export that we read: all but its model code and its card."""
    read = [path for path in sorted(folder.iterdir()) if path.suffix != ".py" and path.name != CARD]
    files = {path.name: file_facts(path) for path in read}
    (folder / SUMS).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def check_sums(folder: Path) -> None:
    """Raise `UserError` if an export has changed since it was written. Folders without sums are accepted."""
    if not (folder / SUMS).exists():
        return
    files = read_object(folder / SUMS).get("files")
    if not isinstance(files, dict) or not files or not all(map(_are_facts, files.values())):
        raise UserError(f"{folder / SUMS}: it holds no sums; export the checkpoint again")
    for name, written in files.items():
        if reason := file_fault(folder / name, written):
            raise UserError(
                f"{folder}: {reason}: damaged or changed since its export; export the checkpoint again, or delete "
                f"{SUMS} if you changed the folder yourself"
            )


def _are_facts(written: object) -> bool:
    return isinstance(written, dict) and {"bytes": int, "crc32": str} == {k: type(v) for k, v in written.items()}
