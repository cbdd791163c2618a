"""The ways in which a file is damaged. Each takes the file and a seeded generator, and returns what it did in words."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

Harm = Callable[[Path, random.Random], str]

JUNK = 64
"""Most bytes that are appended, and the length of the block that becomes zeros."""


def flip_bit(path: Path, generator: random.Random) -> str:
    """Flip one bit anywhere."""
    data = bytearray(path.read_bytes())
    place, bit = generator.randrange(len(data)), generator.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place}"


def flip_header_bit(path: Path, generator: random.Random) -> str:
    """Flip one bit of a .safetensors file's header, where names, shapes and places stand."""
    data = bytearray(path.read_bytes())
    place, bit = generator.randrange(8 + int.from_bytes(data[:8], "little")), generator.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place}"


def truncate(path: Path, generator: random.Random) -> str:
    """Cut the file off anywhere before its end."""
    data = path.read_bytes()
    size = generator.randrange(1, len(data))
    path.write_bytes(data[:size])
    return f"{size} of {len(data)} bytes left"


def cut_row(path: Path, generator: random.Random) -> str:
    """Cut the file off within a line, not between two, where nothing would show it."""
    data = path.read_bytes()
    ends = [place for place, byte in enumerate(data) if byte == ord("\n")]
    size = generator.choice([size for size in range(1, len(data)) if not {size - 1, size} & {*ends}])
    path.write_bytes(data[:size])
    return f"{size} of {len(data)} bytes left"


def zero_block(path: Path, generator: random.Random) -> str:
    """Overwrite a block with zeros; the block holds at least one byte that is none."""
    data = bytearray(path.read_bytes())
    place = generator.choice([i for i, byte in enumerate(data) if byte])
    end = min(len(data), place + JUNK)
    data[place:end] = bytes(end - place)
    path.write_bytes(data)
    return f"zeros from byte {place} to {end}"


def empty(path: Path, generator: random.Random) -> str:
    """Leave a file of no bytes."""
    path.write_bytes(b"")
    return "0 bytes"


def delete(path: Path, generator: random.Random) -> str:
    """Remove the file."""
    path.unlink()
    return "deleted"


def append_junk(path: Path, generator: random.Random) -> str:
    """Append random bytes that are not white space."""
    junk = bytes(generator.randrange(0x21, 0x100) for _ in range(generator.randint(1, JUNK)))
    path.write_bytes(path.read_bytes() + junk)
    return f"{len(junk)} bytes appended"


def put_folder(path: Path, generator: random.Random) -> str:
    """Replace the file by a folder of its name."""
    path.unlink()
    path.mkdir()
    return "a folder"


def break_utf8(path: Path, generator: random.Random) -> str:
    """Insert a byte that no UTF-8 text holds."""
    data = path.read_bytes()
    place = generator.randint(0, len(data))
    path.write_bytes(data[:place] + b"\xff" + data[place:])
    return f"byte 0xff at {place}"


def swap(other: Path) -> Harm:
    """Return the damage that puts `other`, a whole file of the same kind, in a file's place."""

    def put_other(path: Path, generator: random.Random) -> str:
        shutil.copyfile(other, path)
        return f"replaced by another {other.name}"

    return put_other


def blank(path: Path, generator: random.Random) -> str:
    """Leave white space alone."""
    path.write_bytes(b" \n" * generator.randint(1, 4))
    return "white space"


def unknown_name(path: Path, generator: random.Random) -> str:
    """Leave a name that nothing has."""
    name = generator.choice(["iter_9999999", "iter_0000003", "iter_4", "latest", "step 4", "../run/iter_0000004/x"])
    path.write_text(name + "\n", encoding="utf-8")
    return repr(name)


def wrong_type(path: Path, generator: random.Random) -> str:
    """Replace one value of a JSON file by one of another type."""

    def harm(holder: Any, key: Any) -> str:
        old = holder[key]
        others = [None, 7, "text", [], [1, 2], {}, {"a": 1}, True]
        holder[key] = generator.choice([value for value in others if type(value) is not type(old)])
        return f"{key!r}: {old!r:.40} became {holder[key]!r}"

    return _edit_json(path, generator, harm, lambda holder, key: True)


def drop_key(path: Path, generator: random.Random) -> str:
    """Remove one key of a JSON file."""

    def harm(holder: Any, key: Any) -> str:
        del holder[key]
        return f"{key!r} missing"

    return _edit_json(path, generator, harm, lambda holder, key: isinstance(holder, dict))


def edit_number(path: Path, generator: random.Random) -> str:
    """Change one number of a JSON file."""

    def harm(holder: Any, key: Any) -> str:
        old = holder[key]
        holder[key] = generator.choice([old + 1, old * 10 + 1, -old - 1])
        return f"{key!r}: {old!r} became {holder[key]!r}"

    return _edit_json(path, generator, harm, lambda holder, key: type(holder[key]) in (int, float))


def wrong_row(path: Path, generator: random.Random) -> str:
    """Spoil one row of metrics.jsonl: its iteration is missing or no number, or it is no row at all."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = generator.randrange(len(lines))
    row = json.loads(lines[number])
    without = {name: value for name, value in row.items() if name != "iteration"}
    spoiled = generator.choice([without, row | {"iteration": "three"}, row | {"iteration": [1]}, [row], 7, None, "row"])
    lines[number] = json.dumps(spoiled)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"line {number + 1} became {lines[number]:.60}"


def edit_sizes(*names: str) -> Harm:
    """Return the damage that changes one of the numbers of these names in a JSON file."""

    def edit(path: Path, generator: random.Random) -> str:
        value = json.loads(path.read_text(encoding="utf-8"))
        key = generator.choice([name for name in names if name in value])
        old, value[key] = value[key], generator.choice([value[key] + 1, 10**9, -1, 0])
        path.write_text(json.dumps(value, indent=2), encoding="utf-8")
        return f"{key!r}: {old!r} became {value[key]!r}"

    return edit


def _edit_json(
    path: Path,
    generator: random.Random,
    harm: Callable[[Any, Any], str],
    fits: Callable[[Any, Any], bool],
) -> str:
    """Do `harm(holder, key)` to one place of a JSON or YAML file, or of one line if the file has one value per line."""
    text = path.read_text(encoding="utf-8")
    per_line = path.suffix == ".jsonl"
    read, write = (yaml.safe_load, yaml.safe_dump) if path.suffix == ".yaml" else (json.loads, _indented)
    values = [json.loads(line) for line in text.splitlines()] if per_line else [read(text)]
    number = generator.randrange(len(values))
    value = values[number]
    places = [(holder, key) for holder, key in _places(value) if fits(holder, key)]
    done = harm(*generator.choice(places))
    lines = [json.dumps(value) for value in values] if per_line else [write(value)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"line {number + 1}: {done}" if per_line else done


def _indented(value: Any) -> str:
    return json.dumps(value, indent=2)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (holder, key) of a JSON value, at any depth."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


BYTES: dict[str, Harm] = {
    "flipped bit": flip_bit,
    "truncated": truncate,
    "zeroed block": zero_block,
    "empty": empty,
    "deleted": delete,
    "junk appended": append_junk,
    "a folder instead": put_folder,
}
"""What happens to any file."""
STRUCTURE = {name: harm for name, harm in BYTES.items() if name not in ("flipped bit", "zeroed block")}
"""What changes a file's size: to be seen without a sum."""
TEXT: dict[str, Harm] = {"not UTF-8": break_utf8}
JSON: dict[str, Harm] = {"wrong type": wrong_type, "key missing": drop_key, "edited number": edit_number}
SWAPPED = "another of its kind"
FIXED = ("empty", "deleted", "a folder instead", SWAPPED)
"""What has no seed: one case per file and reader."""
