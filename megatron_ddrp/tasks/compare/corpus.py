"""Data of all runs: existing indexed datasets, or the jobs that build one from texts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.data.batches.blend import read_blend
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.compare.jobs import Job
from megatron_ddrp.tasks.compare.plan import CorpusPlan, Plan
from megatron_ddrp.tasks.jobs.store import digest

_END = 1 << 20
"""Number of bytes at each end of a file that enter its fingerprint."""


@dataclass(frozen=True)
class CorpusFiles:
    """Data files of a training command."""

    data_path: tuple[str, ...]
    vocab_file: str
    tokenizer_type: str
    key: str
    """Hash that changes with the data."""
    jobs: tuple[Job, ...]
    """Jobs that build the files; none for existing datasets."""


def open_corpus(plan: Plan, folder: Path) -> CorpusFiles:
    """Return the files of a plan's corpus. Raises `UserError` for a missing input."""
    corpus = plan.corpus
    if corpus.data_path:
        assert corpus.vocab_file is not None
        facts = [fingerprint(plan, "vocab_file", corpus.vocab_file)]
        prefixes = read_blend(corpus.data_path, "corpus.data_path").prefixes
        for word in corpus.data_path:
            ends = (".bin", ".idx") if word in prefixes else ()
            facts += [fingerprint(plan, "data_path", word + end) for end in ends] or [float(word)]
        return CorpusFiles(corpus.data_path, corpus.vocab_file, corpus.tokenizer_type, digest(facts), ())
    inputs = [fingerprint(plan, "input", name) for name in corpus.input]
    vocabulary = fingerprint(plan, "vocab_file", corpus.vocab_file) if corpus.vocab_file else corpus.vocab_size
    key = digest([inputs, vocabulary, corpus.tokenizer_type, *(["shuffled"] * corpus.shuffle)])
    return _build(corpus, folder / "corpus" / key, key)


def _build(corpus: CorpusPlan, folder: Path, key: str) -> CorpusFiles:
    jobs: list[Job] = []
    vocab_file = corpus.vocab_file
    if vocab_file is None:
        vocab_file = str(folder / "vocab.txt")
        case = ("--cased",) if corpus.tokenizer_type == "BertWordPieceCase" else ()
        command = (
            *("megatron-ddrp", "train-tokenizer", "--input", *corpus.input),
            *("--vocab-size", str(corpus.vocab_size), "--output", vocab_file, "--overwrite", *case),
        )
        title = f"vocabulary of {corpus.vocab_size:,} pieces"
        jobs.append(Job("vocabulary", f"vocabulary-{key}", title, command, Path(vocab_file)))
    prefix = folder / "corpus"
    command = (
        *("megatron-ddrp", "preprocess", "--input", *corpus.input, "--output-prefix", str(prefix)),
        *("--vocab-file", vocab_file, "--tokenizer-type", corpus.tokenizer_type),
        *("--workers", str(corpus.workers), "--overwrite"),
    )
    title = f"dataset of {len(corpus.input)} text{'s' * (len(corpus.input) > 1)}"
    data_path = f"{prefix}_text_document"
    jobs.append(
        Job("dataset", f"dataset-{key}", title, command, Path(f"{data_path}.idx"), tuple(job.name for job in jobs))
    )
    if corpus.shuffle:
        made, data_path = data_path, str(folder / "shuffled_text_document")
        command = ("megatron-ddrp", "dataset", "shuffle", made, "--output-prefix", data_path, "--overwrite")
        output = Path(f"{data_path}.idx")
        jobs.append(Job("dataset", f"shuffled-{key}", "with its documents shuffled", command, output, (jobs[-1].name,)))
    return CorpusFiles((data_path,), vocab_file, corpus.tokenizer_type, key, tuple(jobs))


def fingerprint(plan: Plan, key: str, name: str) -> Any:
    """Return the size and a hash of both ends of a file, or of all files in a folder."""
    path = Path(name)
    if path.is_dir():
        return [fingerprint(plan, key, str(inner)) for inner in sorted(path.rglob("*")) if inner.is_file()]
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            total = hashlib.sha256(stream.read(_END))
            stream.seek(max(0, size - _END))
            total.update(stream.read())
    except OSError as error:
        where, flag = _PLACES[key]
        raise UserError(f"{plan.file}: {where}: {name}: {error.strerror}; give {flag}", 2) from None
    return [size, total.hexdigest()[:16]]


_PLACES = {
    "input": ("corpus.input", "--input FILE…"),
    "data_path": ("corpus.data_path", "--data-path PREFIX…"),
    "vocab_file": ("corpus.vocab_file", "--vocab-file FILE"),
    "glue": ("glue", "--glue-dir DIR, or --no-glue"),
    "tasks": ("tasks", "existing files, or --no-tasks"),
}
"""Purpose of a file → key in the plan, and the flag that replaces it."""
