"""Which files are damaged, how, and by which commands they are then read: the plan of all cases.

Left out is what no reader can tell, for lack of a sum: another value in a valid file that somebody else wrote (a weight
or a setting of a foreign Hugging Face folder), another number in a row of metrics.jsonl and rows missing at its end, an
older name in `latest` (which is how one goes back), and ids in a .bin for readers that are not asked to sum it up.
Kinds that say that their format has no sum are damaged in every way; another result counts as undetectable there.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.endurance.damage.harm import (
    BYTES,
    FIXED,
    JSON,
    STRUCTURE,
    SWAPPED,
    TEXT,
    Harm,
    blank,
    cut_row,
    drop_key,
    edit_sizes,
    flip_header_bit,
    swap,
    unknown_name,
    wrong_row,
    wrong_type,
    zero_block,
)
from tests.endurance.damage.readers import SAVED

ANY_JSON = BYTES | TEXT | JSON
ANY_YAML = BYTES | TEXT | {"wrong type": wrong_type, "key missing": drop_key}
VALID_OR_NOT = STRUCTURE | TEXT | {"zeroed block": zero_block}
"""Damage that a reader can tell without knowing what stood there."""
NEWEST = f"run/iter_{SAVED:07d}"
RUN_READERS = (
    "training",
    "convert --load",
    "glue --load",
    "analyze attention-maps",
    "analyze self-similarity",
    "analyze notes",
)
KEPT_READERS = (("kept", ("predict", "glue --load, a kept model")), ("kept_bert", ("predict, a BERT",)))
TEXT_ROWS = VALID_OR_NOT | {"truncated": cut_row, "wrong type": wrong_type, "key missing": drop_key}
EXPORT_READERS = ("glue --load, our export", "analyze, our export")
BERT_READERS = ("convert --from-hf", "glue --load, a BERT", "analyze, a BERT")
DATA_CHECKS = ("training --verify-data", "dataset verify")
DATA_READERS = ("dataset inspect", "dataset merge", "analyze attention-maps", "report")


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
    ("checkpoint: weights", "weights-*", RUN_READERS),
    ("checkpoint: optimizer", "optimizer-*", ("training", "convert --load")),
    ("checkpoint: notes", "beside-*", ("training", "convert --load", "analyze notes")),
)
KINDS = (
    Kind("dataset: .bin", "data/corpus*.bin", BYTES, DATA_CHECKS, other="data/other_text_document.bin"),
    Kind("dataset: .bin", "data/corpus*.bin", STRUCTURE, DATA_READERS, other="data/other_text_document.bin"),
    Kind("dataset: .idx", "data/corpus*.idx", BYTES, DATA_CHECKS + DATA_READERS, other="data/other_text_document.idx"),
    Kind(
        "dataset: manifest",
        "data/corpus*.json",
        ANY_JSON,
        (*DATA_CHECKS, *DATA_READERS[:3]),
        ("manifest", "SHA-256"),
        other="data/other_text_document.json",
        loses=True,
    ),
    Kind("cache: rare words", "data/corpus*.npz", BYTES, ("training",), other="data/other*.npz"),
    *(
        Kind(label, f"{NEWEST}/{files}", BYTES, readers, (Path(NEWEST).name,), other=f"run/iter_0000002/{files}")
        for label, files, readers in SAVED_FILES
    ),
    Kind(
        "checkpoint: state.json",
        f"{NEWEST}/state.json",
        ANY_JSON,
        RUN_READERS,
        (Path(NEWEST).name,),
        other="run/iter_0000002/state.json",
    ),
    Kind(
        "run: latest",
        "run/latest",
        BYTES | TEXT | {"blank": blank, "unknown name": unknown_name},
        RUN_READERS,
        (Path(NEWEST).name,),
    ),
    Kind("run: config.json", "run/config.json", ANY_JSON, ("training", "convert --load", "glue --load")),
    Kind(
        "run: tokenizer",
        "run/tokenizer/*",
        BYTES | TEXT,
        (*RUN_READERS[:4], "analyze notes"),
        ("tokenizer",),
    ),
    Kind(
        "run: metrics.jsonl",
        "run/metrics.jsonl",
        VALID_OR_NOT | {"truncated": cut_row, "wrong type": wrong_row},
        ("training", "report"),
        loses=True,
    ),
    Kind(
        "GLUE: runs.jsonl",
        "glue/runs.jsonl",
        ANY_JSON,
        ("glue, resumed", "glue --report"),
        loses=True,
    ),
    Kind(
        "GLUE: table.md",
        "glue/table.md",
        TEXT | {name: STRUCTURE[name] for name in ("deleted", "empty", "a folder instead")},
        ("report",),
    ),
    Kind("our export: weights", "export/*.safetensors", BYTES, EXPORT_READERS, other="other_export/*.safetensors"),
    Kind("our export: weights", "plain/*.safetensors", BYTES, ("convert --from-hf, our export",)),
    Kind("our export: config.json", "export/config.json", ANY_JSON, EXPORT_READERS),
    Kind("our export: config.json", "plain/config.json", ANY_JSON, ("convert --from-hf, our export",)),
    Kind("our export: tokenizer", "export/[stv]*[!s]", BYTES | TEXT, EXPORT_READERS, ("tokenizer",)),
    Kind("our export: tokenizer", "plain/[stv]*[!s]", BYTES | TEXT, ("convert --from-hf, our export",), ("tokenizer",)),
    Kind("our export: sums", "export/export_sums.json", ANY_JSON, EXPORT_READERS),
    Kind("our export: model code", "export/*.py", BYTES, EXPORT_READERS),
    Kind(
        "foreign BERT: weights",
        "bert/model.safetensors",
        STRUCTURE | {"flipped bit": flip_header_bit},
        BERT_READERS,
        other="plain/model.safetensors",
    ),
    Kind(
        "foreign BERT: config.json",
        "bert/config.json",
        VALID_OR_NOT
        | {
            "wrong type": wrong_type,
            "key missing": drop_key,
            "edited number": edit_sizes("hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size"),
        },
        BERT_READERS,
        other="plain/config.json",
    ),
    Kind("foreign BERT: tokenizer", "bert/vocab.txt", VALID_OR_NOT, BERT_READERS, ("tokenizer", "pieces"), loses=True),
    Kind(
        "foreign BERT: tokenizer",
        "bert/tokenizer_config.json",
        VALID_OR_NOT | {"wrong type": wrong_type},
        BERT_READERS,
    ),
    Kind(
        "vocabulary",
        "vocab.txt",
        BYTES | TEXT,
        ("training", "dataset inspect", "dataset verify"),
        ("tokenizer",),
        other="bert/tokenizer_config.json",
    ),
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
        return path, swap(generator.choice(others))(path, generator)


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
