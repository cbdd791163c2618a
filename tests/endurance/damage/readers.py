"""The commands that read the sample's files, as a user types them in its folder, and what each of them gives."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.pages.markdown import FORMATS
from tests.integration.conftest import TINY, command_line

CLOCK = ("tokens_per_second", "step_time", "peak_memory_gib", "seconds", "crc32")
"""What two equal runs have different: times, memory, and the sum of a row that holds one."""
DATASET, STEPS, SAVED = "data/corpus_text_document", 6, 4
RUN = TINY | {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "notes": True,
    "notes_min_count": 4,
    "notes_max_count": 30,
    "train_iters": STEPS,
    "eval_interval": 2,
    "eval_iters": 2,
    "save_interval": 2,
    "data_path": DATASET,
    "vocab_file": "vocab.txt",
    "save": "run",
}
"""Flags of the run whose folder is damaged: dropout, validation and notes, so that every kind of file is there."""
ONE_TASK = ("--tasks", "CoLA", "--data-dir", "glue_data", "--batch-size", "8", "--lr", "1e-2")
QUICK = (*ONE_TASK, "--epochs", "1", "--seeds", "1", "--max-train-examples", "16", "--output-dir", "out")
SWEEP = (*ONE_TASK, "--load", "bert", "--epochs", "2", "--seeds", "3", "--output-dir", "glue")
FEW = ("--sentences", "16", "--split", "0,1,0", "--data-path", DATASET, "--output", "out.json")
FINETUNE = ("-m", "megatron_ddrp", "finetune", "--task-file", "tone/tone.yaml", "--batch-size", "8", "--lr", "1e-2")
FINETUNE += ("--epochs", "1", "--seeds", "1", "--workers", "1", "--output-dir", "out")
PREPROCESS = ("--vocab-file", "vocab.txt", "--output-prefix", "again")


class Reader(NamedTuple):
    """One command and where its result lies."""

    name: str
    words: tuple[str, ...]
    """A script of the repository or `-m` and a module, then the arguments. {home} is the sample's own folder."""
    results: tuple[str, ...]
    """Patterns of the files that it writes; its standard output counts as well where this is empty."""

    @property
    def takes_run(self) -> bool:
        """Whether it reads the training run's folder, where an older checkpoint may serve."""
        return "run" in self.words

    @property
    def checks(self) -> bool:
        """Whether it is there to find damage: silence about it is wrong even if nothing else is."""
        return self.name == "dataset verify"


def _analysis(name: str, command: str, folder: str) -> Reader:
    words = ("tools/analyze.py", command, "--load", folder, *FEW)
    return Reader(name, words, ("out.json",))


def _glue(name: str, folder: str) -> Reader:
    return Reader(name, ("-m", "tasks.glue", "--load", folder, *QUICK), ("out/**/*",))


def _import(name: str, folder: str) -> Reader:
    return Reader(name, ("tools/convert_checkpoint.py", "--from-hf", folder, "--output", "out"), ("out/**/*",))


def _predict(name: str, folder: str) -> Reader:
    files = ("--input", "tone/new.jsonl", "--output", "labelled.jsonl")
    return Reader(name, ("-m", "megatron_ddrp", "finetune", "predict", "--load", folder, *files), ("labelled.jsonl",))


def _preprocess(name: str, inputs: str, *tokenizer: str) -> Reader:
    words = ("tools/preprocess_data.py", "--input", *inputs.split(), *tokenizer, "--output-prefix", "out/all")
    return Reader(name, words, ("out/all*.bin", "out/all*.idx"))


_PACKED = " ".join(f"packed/texts.jsonl.{suffix}" for suffix in ("gz", "xz", "zst", "bz2"))
_RESUME = ("pretrain_bert.py", *command_line(RUN), "--load", "run")
READERS = {
    reader.name: reader
    for reader in (
        Reader("training", _RESUME, ("run/metrics.jsonl", f"run/iter_{STEPS:07d}/*", "run/tokenizer/*", "run/latest")),
        Reader(
            "training --verify-data",
            (*_RESUME, "--verify-data"),
            ("run/metrics.jsonl", f"run/iter_{STEPS:07d}/*.safetensors"),
        ),
        Reader("convert --load", ("tools/convert_checkpoint.py", "--load", "run", "--output", "out"), ("out/**/*",)),
        _import("convert --from-hf", "bert"),
        _import("convert --from-hf, our export", "plain"),
        _glue("glue --load", "run"),
        _glue("glue --load, our export", "export"),
        _glue("glue --load, a BERT", "bert"),
        Reader("glue, resumed", ("-m", "tasks.glue", *SWEEP), ("glue/table.*",)),
        Reader("glue --report", ("-m", "tasks.glue", "--report", "glue", "--output-dir", "out"), ("out/table.*",)),
        _analysis("analyze attention-maps", "attention-maps", "run"),
        _analysis("analyze self-similarity", "self-similarity", "run"),
        _analysis("analyze, our export", "attention-maps", "export"),
        _analysis("analyze, a BERT", "self-similarity", "bert"),
        Reader(
            "analyze notes",
            ("tools/analyze.py", "notes", "--load", "run", "--data-path", DATASET, "--output", "out.json"),
            ("out.json",),
        ),
        Reader(
            "report",
            ("tools/training_report.py", "--load", "run", "--data-path", DATASET)
            + ("--scores-dir", "glue", "--output-dir", "out"),
            ("out/report.md",),
        ),
        Reader("dataset inspect", ("tools/dataset.py", "inspect", DATASET, "--vocab-file", "vocab.txt"), ()),
        Reader("dataset verify", ("tools/dataset.py", "verify", DATASET, "--vocab-file", "vocab.txt"), ()),
        Reader(
            "dataset merge",
            ("tools/dataset.py", "merge", "--output-prefix", "out/all", "data/other_text_document", DATASET),
            ("out/all.bin", "out/all.idx"),
        ),
        _preprocess("preprocess", "texts.jsonl", *PREPROCESS[:2]),
        _preprocess("preprocess, packed", _PACKED, *PREPROCESS[:2]),
        _preprocess(
            "preprocess, HuggingFace", "texts.jsonl", "--tokenizer-type", "HuggingFace", "--tokenizer-model", "hf"
        ),
        _preprocess(
            "preprocess, SentencePiece",
            "texts.jsonl",
            *("--tokenizer-type", "SentencePiece", "--tokenizer-model", "sp.model"),
        ),
        Reader("finetune", (*FINETUNE, "--load", "bert", "--no-keep-models"), ("out/table.json", "out/runs.jsonl")),
        _predict("predict", "kept"),
        _predict("predict, a BERT", "kept_bert"),
        _glue("glue --load, a kept model", "kept"),
        Reader(
            "minimal-pairs, resumed",
            ("-m", "megatron_ddrp", "minimal-pairs", "--data-dir", "pairs", "--load", "bert", "--workers", "1")
            + ("--output-dir", "scores"),
            ("scores/results.json", "scores/table.md"),
        ),
        Reader(
            "compare --page-only",
            ("-m", "megatron_ddrp", "compare", "plan.yaml", "--output-dir", "compare", "--page-only"),
            ("compare/results.json", "compare/page.md", "compare/rows.jsonl"),
        ),
        Reader(
            "compare, rows",
            ("-m", "megatron_ddrp", "compare", "rows/rows.jsonl", "--output-dir", "out"),
            ("out/results.json", "out/page.md"),
        ),
    )
}


def result_of(reader: Reader, folder: Path, stdout: str) -> dict[str, Any]:
    """Return what a reader left in `folder`: by file, the rows of JSON lines without the clock, else a hash."""
    if not reader.results:
        return {"standard output": stdout.splitlines()}
    files = sorted({path for pattern in reader.results for path in folder.glob(pattern) if path.is_file()})
    left_out = (*FORMATS, ".lock")
    return {str(path.relative_to(folder)): _content(path) for path in files if path.suffix not in left_out}


def _content(path: Path) -> Any:
    if path.suffix != ".jsonl":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return sorted(map(_without_clock, path.read_text(encoding="utf-8", errors="replace").splitlines()))


def _without_clock(line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        return line
    return json.dumps({k: v for k, v in row.items() if k not in CLOCK}) if isinstance(row, dict) else line
