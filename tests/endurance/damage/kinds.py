"""Which files are damaged, how, and by which commands they are then read: the plan of all cases.

Each harm takes the file and a seeded generator, and returns what it did in words. Left out is what no reader can tell,
for lack of a sum: another value in a valid file that somebody else wrote (a weight or a setting of a foreign Hugging
Face folder), another number in a row of metrics.jsonl and rows missing at its end, an older name in `latest` (which is
how one goes back), and ids in a .bin for readers that are not asked to sum it up. Kinds that say that their format has
no sum are damaged in every way; another result counts as undetectable there."""

import json
import random
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.endurance.damage.readers import SAVED

Harm = Callable[[Path, random.Random], str]

JUNK = 64
"""Most bytes that are appended, and the length of the block that becomes zeros."""


def flip_bit(path: Path, generator: random.Random, header: int = 0) -> str:
    """Flip one bit anywhere, or in the header of so many bytes."""
    data = bytearray(path.read_bytes())
    place, bit = generator.randrange(header or len(data)), generator.randrange(8)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {place}"


def flip_header_bit(path: Path, generator: random.Random) -> str:
    """Flip one bit of a .safetensors file's header, where names, shapes and places stand."""
    return flip_bit(path, generator, 8 + int.from_bytes(path.read_bytes()[:8], "little"))


def truncate(path: Path, generator: random.Random, sizes: Sequence[int] = ()) -> str:
    """Cut the file off anywhere before its end, or at one of some sizes."""
    data = path.read_bytes()
    size = generator.choice(sizes) if sizes else generator.randrange(1, len(data))
    path.write_bytes(data[:size])
    return f"{size} of {len(data)} bytes left"


def cut_row(path: Path, generator: random.Random) -> str:
    """Cut the file off within a line, not between two, where nothing would show it."""
    data = path.read_bytes()
    ends = {place for place, byte in enumerate(data) if byte == ord("\n")}
    return truncate(path, generator, [size for size in range(1, len(data)) if not {size - 1, size} & ends])


def zero_block(path: Path, generator: random.Random) -> str:
    """Overwrite a block with zeros; the block holds at least one byte that is none."""
    data = bytearray(path.read_bytes())
    place = generator.choice([i for i, byte in enumerate(data) if byte])
    end = min(len(data), place + JUNK)
    data[place:end] = bytes(end - place)
    path.write_bytes(data)
    return f"zeros from byte {place} to {end}"


def empty(path: Path, generator: random.Random) -> str:
    path.write_bytes(b"")
    return "0 bytes"


def delete(path: Path, generator: random.Random) -> str:
    path.unlink()
    return "deleted"


def append_junk(path: Path, generator: random.Random) -> str:
    """Append random bytes that are not white space."""
    junk = bytes(generator.randrange(0x21, 0x100) for _ in range(generator.randint(1, JUNK)))
    path.write_bytes(path.read_bytes() + junk)
    return f"{len(junk)} bytes appended"


def put_folder(path: Path, generator: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def break_utf8(path: Path, generator: random.Random) -> str:
    """Insert a byte that no UTF-8 text holds."""
    data = path.read_bytes()
    place = generator.randint(0, len(data))
    path.write_bytes(data[:place] + b"\xff" + data[place:])
    return f"byte 0xff at {place}"


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

    def value(old: Any) -> Any:
        others = [None, 7, "text", [], [1, 2], {}, {"a": 1}, True]
        return generator.choice([other for other in others if type(other) is not type(old)])

    return _edit_json(path, generator, lambda holder, key: True, value)


def drop_key(path: Path, generator: random.Random) -> str:
    """Remove one key of a JSON file."""
    return _edit_json(path, generator, lambda holder, key: isinstance(holder, dict))


def edit_number(path: Path, generator: random.Random) -> str:
    """Change one number of a JSON file."""

    def value(old: Any) -> Any:
        return generator.choice([old + 1, old * 10 + 1, -old - 1])

    return _edit_json(path, generator, lambda holder, key: type(holder[key]) in (int, float), value)


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
    path: Path, generator: random.Random, fits: Callable[[Any, Any], bool], new: Callable[[Any], Any] | None = None
) -> str:
    """Make the value at one (holder, key) that fits another one, or remove it: in a JSON or YAML file, or in one line
    if the file has one value per line."""
    text = path.read_text(encoding="utf-8")
    per_line = path.suffix == ".jsonl"
    read, write = yaml.safe_load, yaml.safe_dump
    if path.suffix != ".yaml":
        read, write = json.loads, partial(json.dumps, indent=None if per_line else 2)
    values = list(map(read, text.splitlines() if per_line else [text]))
    number = generator.randrange(len(values))
    holder, key = generator.choice([place for place in _places(values[number]) if fits(*place)])
    if new:
        old, holder[key] = holder[key], new(holder[key])
        done = f"{key!r}: {old!r:.40} became {holder[key]!r}"
    else:
        del holder[key]
        done = f"{key!r} missing"
    path.write_text("".join(f"{write(value)}\n" for value in values), encoding="utf-8")
    return f"line {number + 1}: {done}" if per_line else done


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (holder, key) of a JSON value, at any depth."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


BYTES: dict[str, Harm] = {"flipped bit": flip_bit, "truncated": truncate, "zeroed block": zero_block, "empty": empty}
BYTES |= {"deleted": delete, "junk appended": append_junk, "a folder instead": put_folder}
"""Harms to the bytes of any file, by name."""
STRUCTURE = {name: harm for name, harm in BYTES.items() if name not in ("flipped bit", "zeroed block")}
"""Harms that change a file's size, which a reader sees without a sum."""
TEXT: dict[str, Harm] = {"not UTF-8": break_utf8}
JSON: dict[str, Harm] = {"wrong type": wrong_type, "key missing": drop_key, "edited number": edit_number}
SWAPPED = "another of its kind"
FIXED = ("empty", "deleted", "a folder instead", SWAPPED)
"""Harms that draw nothing, so that each file and reader has one case of them."""


ANY_JSON = BYTES | TEXT | JSON
ANY_YAML = BYTES | TEXT | {"wrong type": wrong_type, "key missing": drop_key}
VALID_OR_NOT = STRUCTURE | TEXT | {"zeroed block": zero_block}
"""Damage that a reader can tell without knowing what stood there."""
NEWEST = f"run/iter_{SAVED:07d}"
RUN_READERS = ("training", "convert --load", "glue --load", "analyze attention-maps", "analyze self-similarity")
RUN_READERS += ("analyze notes",)
KEPT_READERS = (("kept", ("predict", "glue --load, a kept model")), ("kept_bert", ("predict, a BERT",)))
TEXT_ROWS = VALID_OR_NOT | {"truncated": cut_row, "wrong type": wrong_type, "key missing": drop_key}
METRICS = VALID_OR_NOT | {"truncated": cut_row, "wrong type": wrong_row}
EXPORT_READERS = ("glue --load, our export", "analyze, our export")
HEADER, TYPE = STRUCTURE | {"flipped bit": flip_header_bit}, {"wrong type": wrong_type}
OF_VOCABULARY = ("training", "dataset inspect", "dataset verify")
BERT_READERS = ("convert --from-hf", "glue --load, a BERT", "analyze, a BERT")
DATA_CHECKS = ("training --verify-data", "dataset verify")
DATA_READERS = ("dataset inspect", "dataset merge", "analyze attention-maps", "report")
DATA_BEFORE_REPORT = (*DATA_CHECKS, *DATA_READERS[:3])
SIZES = ("hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size")
SAVE, OTHER, OLDER = f"iter_{SAVED:07d}", "data/other_text_document", "run/iter_0000002"
BERT_JSON = VALID_OR_NOT | {"wrong type": wrong_type, "key missing": drop_key, "edited number": edit_sizes(*SIZES)}
TABLE = TEXT | {name: STRUCTURE[name] for name in ("deleted", "empty", "a folder instead")}


class Kind(NamedTuple):
    """Files that are damaged alike and read alike."""

    label: str
    """Row of the table."""
    files: str
    """Pattern in the sample's folder; each case takes one of them."""
    harms: dict[str, Harm]
    readers: tuple[str, ...]
    names: tuple[str, ...] = ()
    """A line of output tells of the damage if it holds one of these words, or the file's own name."""
    other: str | None = None
    """A healthy file or folder of the sample to be put in its place."""
    loses: bool = False
    """Whether a reader that tells of the damage may go on with what is left."""
    has_sum: bool = True
    """True if the format has a sum, or the reader writes one. Without a sum, other valid content is not noticed."""


SAVED_FILES = (
    ("checkpoint: weights", "weights-*", BYTES, RUN_READERS),
    ("checkpoint: optimizer", "optimizer-*", BYTES, ("training", "convert --load")),
    ("checkpoint: notes", "beside-*", BYTES, ("training", "convert --load", "analyze notes")),
    ("checkpoint: state.json", "state.json", ANY_JSON, RUN_READERS),
)
KINDS = (
    Kind("dataset: .bin", "data/corpus*.bin", BYTES, DATA_CHECKS, other=f"{OTHER}.bin"),
    Kind("dataset: .bin", "data/corpus*.bin", STRUCTURE, DATA_READERS, other=f"{OTHER}.bin"),
    Kind("dataset: .idx", "data/corpus*.idx", BYTES, DATA_CHECKS + DATA_READERS, other=f"{OTHER}.idx"),
    Kind(
        *("dataset: manifest", "data/corpus*.json", ANY_JSON, DATA_BEFORE_REPORT, ("manifest", "SHA-256")),
        *(f"{OTHER}.json", True),
    ),
    Kind("cache: rare words", "data/corpus*.npz", BYTES, ("training",), other="data/other*.npz"),
    *(
        Kind(label, f"{NEWEST}/{files}", harms, readers, (SAVE,), other=f"{OLDER}/{files}")
        for label, files, harms, readers in SAVED_FILES
    ),
    Kind(
        "run: latest", "run/latest", BYTES | TEXT | {"blank": blank, "unknown name": unknown_name}, RUN_READERS, (SAVE,)
    ),
    Kind("run: config.json", "run/config.json", ANY_JSON, ("training", "convert --load", "glue --load")),
    Kind("run: tokenizer", "run/tokenizer/*", BYTES | TEXT, (*RUN_READERS[:4], "analyze notes"), ("tokenizer",)),
    Kind("run: metrics.jsonl", "run/metrics.jsonl", METRICS, ("training", "report"), loses=True),
    Kind("GLUE: runs.jsonl", "glue/runs.jsonl", ANY_JSON, ("glue, resumed", "glue --report"), loses=True),
    Kind("GLUE: table.md", "glue/table.md", TABLE, ("report",)),
    Kind("our export: weights", "export/*.safetensors", BYTES, EXPORT_READERS, other="other_export/*.safetensors"),
    Kind("our export: weights", "plain/*.safetensors", BYTES, ("convert --from-hf, our export",)),
    Kind("our export: config.json", "export/config.json", ANY_JSON, EXPORT_READERS),
    Kind("our export: config.json", "plain/config.json", ANY_JSON, ("convert --from-hf, our export",)),
    Kind("our export: tokenizer", "export/[stv]*[!s]", BYTES | TEXT, EXPORT_READERS, ("tokenizer",)),
    Kind("our export: tokenizer", "plain/[stv]*[!s]", BYTES | TEXT, ("convert --from-hf, our export",), ("tokenizer",)),
    Kind("our export: sums", "export/export_sums.json", ANY_JSON, EXPORT_READERS),
    Kind("our export: model code", "export/*.py", BYTES, EXPORT_READERS),
    Kind("foreign BERT: weights", "bert/model.safetensors", HEADER, BERT_READERS, other="plain/model.safetensors"),
    Kind("foreign BERT: config.json", "bert/config.json", BERT_JSON, BERT_READERS, other="plain/config.json"),
    Kind("foreign BERT: tokenizer", "bert/vocab.txt", VALID_OR_NOT, BERT_READERS, ("tokenizer", "pieces"), loses=True),
    Kind("foreign BERT: tokenizer", "bert/tokenizer_config.json", VALID_OR_NOT | TYPE, BERT_READERS),
    Kind("vocabulary", "vocab.txt", BYTES | TEXT, OF_VOCABULARY, ("tokenizer",), other="bert/tokenizer_config.json"),
    *(
        kind
        for folder, readers in KEPT_READERS
        for kind in (
            Kind("kept model: weights", f"{folder}/*.safetensors", BYTES, readers, other="plain/*.safetensors"),
            Kind("kept model: config.json", f"{folder}/config.json", ANY_JSON, readers),
            Kind("kept model: tokenizer", f"{folder}/[stv]*[!s]", BYTES | TEXT, readers, ("tokenizer",)),
            Kind("kept model: sums", f"{folder}/export_sums.json", ANY_JSON, readers),
        )
    ),
    Kind("task: YAML", "tone/tone.yaml", ANY_YAML, ("finetune",), ("tone.yaml",), has_sum=False),
    Kind("task: rows", "tone/[tv]*.jsonl", TEXT_ROWS, ("finetune",), has_sum=False),
    Kind("task: rows", "tone/new.jsonl", TEXT_ROWS, ("predict",), has_sum=False),
    Kind("minimal pairs: scores.jsonl", "scores/scores.jsonl", ANY_JSON, ("minimal-pairs, resumed",)),
    Kind("minimal pairs: pairs", "pairs/*.jsonl", TEXT_ROWS, ("minimal-pairs, resumed",), has_sum=False),
    Kind("compare: jobs.jsonl", "compare/jobs.jsonl", ANY_JSON, ("compare --page-only",), loses=True),
    Kind("compare: plan", "plan.yaml", ANY_YAML, ("compare --page-only",), has_sum=False),
    Kind("compare: rows.jsonl", "rows/rows.jsonl", ANY_JSON, ("compare, rows",)),
    Kind("compare: samples", "rows/items/*.npz", BYTES, ("compare, rows",), other="rows/items/*.npz", loses=True),
    Kind("text", "texts.jsonl", TEXT_ROWS, ("preprocess",), other="packed/texts.jsonl.gz", has_sum=False),
    *(
        Kind("packed text", f"packed/*.{suffix}", BYTES, ("preprocess, packed",), other="sp.model")
        for suffix in ("gz", "xz", "zst", "bz2")
    ),
    Kind("tokenizer.json", "hf/tokenizer.json", ANY_JSON, ("preprocess, HuggingFace",), ("hf",), has_sum=False),
    Kind("SentencePiece model", "sp.model", BYTES, ("preprocess, SentencePiece",), other="vocab.txt", has_sum=False),
)


class Case(NamedTuple):
    """One damaged file, read by one command."""

    kind: Kind
    harm: str
    reader: str
    number: int

    @property
    def name(self) -> str:
        """The case's name; with the sample it decides every byte of the damage."""
        file = self.kind.files.rpartition("/")[2]
        return f"{self.kind.label}, {file} | {self.harm} | {self.reader} | {self.number}"

    def damage(self, folder: Path, sample: Path) -> tuple[Path, str]:
        """Damage a file in `folder`, a copy of `sample`; returns it and what was done."""
        generator = random.Random(zlib.crc32(self.name.encode()))
        path = generator.choice(sorted(folder.glob(self.kind.files)))
        if self.harm != SWAPPED:
            return path, self.kind.harms[self.harm](path, generator)
        own = path.relative_to(folder)
        others = [other for other in sorted(sample.glob(self.kind.other or "")) if other.relative_to(sample) != own]
        other = generator.choice(others)
        shutil.copyfile(other, path)
        return path, f"replaced by another {other.name}"


def all_cases(repeats: int) -> list[Case]:
    """Return every damage of every kind before every reader, `repeats` times where chance has a part in it."""
    cases = []
    for kind in KINDS:
        for harm in (*kind.harms, *((SWAPPED,) if kind.other else ())):
            times = 1 if harm in FIXED else repeats
            cases += [Case(kind, harm, reader, number) for reader in kind.readers for number in range(times)]
    assert len({case.name for case in cases}) == len(cases)
    return cases


def some_cases(cases: Sequence[Case], count: int, seed: int) -> list[Case]:
    """Return `count` of the cases drawn by chance, as many of each row of the table as of any other."""
    generator = random.Random(seed)
    by_label: dict[str, list[Case]] = {}
    for case in generator.sample(cases, len(cases)):
        by_label.setdefault(case.kind.label, []).append(case)
    rounds = [row[number] for number in range(len(cases)) for row in by_label.values() if number < len(row)]
    return rounds[:count]
