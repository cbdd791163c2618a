"""Parts of one partitioned run (`preprocess --partition I/N`): known by their manifests, complete, and in order.

A merge of all parts gives the bytes of one run over the whole input. So a missing, repeated or foreign part is an
error, and so are parts between which an input file changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ddrp.data.dataset.manifest import entry
from megatron_ddrp.errors import UserError

SAME = ("json_key", "append_eod", "sentence_splitter")
"""Manifest entries on which all parts must agree, beside the tokenizer."""

Manifest = Mapping[str, Any]


def order_of_parts(prefixes: Sequence[str], manifests: Sequence[Manifest | None]) -> list[int] | None:
    """Return the numbers of the datasets in the order of their parts; None where none is a part.

    Raises `UserError` for datasets of which only some are parts, for parts of different runs, and for a part that is
    missing or there twice.
    """
    parts = [entry(manifest, "partition") for manifest in manifests]
    if not any(parts):
        return None
    first = next(number for number, part in enumerate(parts) if part)
    for number in range(len(parts)):
        if reason := _foreign(*((prefixes[k], parts[k], manifests[k] or {}) for k in (first, number))):
            raise UserError(reason)
    _refuse_incomplete(prefixes, parts)
    return sorted(range(len(prefixes)), key=lambda number: parts[number]["part"])


def _foreign(first: tuple[str, Manifest, Manifest], other: tuple[str, Manifest, Manifest]) -> str:
    """Return why two (prefix, entry `partition`, manifest) are not parts of one run; empty where they are."""
    (prefix, part, manifest), (other_prefix, other_part, other_manifest) = first, other
    is_part = f"{prefix} is part {part['part']} of {part['of']}, but {other_prefix}"
    if not other_part:
        return f"{is_part} is not a part of such a run; merge the parts first, then their result with this dataset"
    if part["of"] != other_part["of"]:
        return f"{is_part} part {other_part['part']} of {other_part['of']}; give the parts of one run"
    again = "preprocess one of them again"
    if part["inputs"] != other_part["inputs"]:
        return f"{prefix} and {other_prefix} were made from different input files, by their names or sizes; {again}"
    for key in SAME:
        if (value := manifest.get(key)) != (other_value := other_manifest.get(key)):
            return f"{prefix} was made with {key} {value}, but {other_prefix} with {other_value}; {again}"
    return ""


def _refuse_incomplete(prefixes: Sequence[str], parts: Sequence[Manifest]) -> None:
    of = parts[0]["of"]
    counts = Counter(part["part"] for part in parts)
    for number, count in sorted(counts.items()):
        if count > 1:
            twice = " and ".join(prefix for prefix, part in zip(prefixes, parts, strict=True) if part["part"] == number)
            raise UserError(f"part {number} of {of} is given {count} times, as {twice}; give it once")
    missing = [number for number in range(1, of + 1) if number not in counts]
    if missing:
        which = f"part {missing[0]} of {of} is" if len(missing) == 1 else f"parts {_few(missing)} of {of} are"
        again = f"megatron-ddrp preprocess … --partition {missing[0]}/{of}"
        raise UserError(f"{which} missing among the {len(parts)} given; add what exists, or make it: {again}")


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


def joined_inputs(manifests: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Return the input files of all parts, in order, each once.

    A file that several parts have read carries their `ranges`, each with its SHA-256, instead of one SHA-256. Raises
    `UserError` where the ranges of a file do not meet: it changed between two parts.
    """
    joined: list[dict[str, Any]] = []
    for file in (file for manifest in manifests for file in manifest.get("inputs") or []):
        if "begin" not in file:
            joined.append(file)
            continue
        if file["begin"] == 0:
            joined.append({"name": file["name"], "bytes": file["bytes"], "ranges": []})
        ranges = joined[-1].get("ranges") if joined and joined[-1]["name"] == file["name"] else None
        if ranges is None or file["begin"] != (ranges[-1]["end"] if ranges else 0):
            raise _changed(file["name"])
        ranges.append({key: file[key] for key in ("begin", "end", "sha256")})
    for file in joined:
        if "ranges" in file and file["ranges"][-1]["end"] != file["bytes"]:
            raise _changed(file["name"])
    return joined


def _changed(name: str) -> UserError:
    return UserError(f"{name} changed between the parts: their ranges do not meet; preprocess all parts again")
