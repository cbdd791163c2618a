"""Text files → Megatron indexed datasets: one reader, many tokenizing processes, one writer.

The main process cuts the input into chunks of whole records and writes their tokens in the order of the input; worker
processes parse and tokenize (workers.py). So the output's bytes depend on neither the number of workers nor on time.
Every few seconds what is written is made safe (unfinished.py), and a run that was killed goes on from there. Documents
are stored without special tokens ([CLS] and [SEP] are the sample builder's), every one of them, however short.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import megatron_ddrp
from megatron_ddrp.data.dataset.dataset_index import dataset_path
from megatron_ddrp.data.preprocess.documents import FaultCounter, iter_chunks
from megatron_ddrp.data.preprocess.inputs import (
    BLOCK_BYTES,
    InputFile,
    OpenInput,
    find_inputs,
    is_stream,
    reading_progress,
)
from megatron_ddrp.data.preprocess.records import Chunk
from megatron_ddrp.data.preprocess.unfinished import UnfinishedDatasets
from megatron_ddrp.data.preprocess.workers import map_in_order
from megatron_ddrp.data.tokenizers.chunks import ChunkTokenizer, PreprocessConfig, TokenizedChunk
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.data.tokenizers.vocabulary_fit import describe_unknown, warn_of_impossible, warn_of_unknown
from megatron_ddrp.errors import UserError

CHUNK_BYTES = BLOCK_BYTES
TEXT_RULES = 2
"""Goes up when a file gives other texts than before, so that no run resumes what an earlier version began."""
CHECKPOINT_SECONDS = 15.0
"""A killed run loses at most this much work."""


@dataclass
class KeyCounts:
    """What one dataset holds."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    empty_documents: int = 0


@dataclass
class PreprocessResult:
    """What was written, in all or up to a checkpoint."""

    prefixes: list[str]
    by_key: list[KeyCounts]
    skipped: int = 0
    first_skipped: str = ""
    chunks: int = 0
    """Chunks of the input done."""
    file: int = 0
    """Number of the input file that the next chunk may continue."""
    line: int = 0
    """Lines of that file done."""
    text_bytes: int = 0
    """Of this run, not of the one that it continues."""
    seconds: float = field(default=0.0, compare=False)

    @property
    def documents(self) -> int:
        """Documents in all datasets."""
        return sum(counts.documents for counts in self.by_key)

    @property
    def tokens(self) -> int:
        """Tokens in all datasets."""
        return sum(counts.tokens for counts in self.by_key)

    def summary(self) -> str:
        """Return one line: documents, tokens, unknown pieces, speed, files."""
        speed = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        files = ", ".join(f"{prefix}.{{bin,idx,json}}" for prefix in self.prefixes)
        empty = sum(counts.empty_documents for counts in self.by_key)
        left_out = f", {empty:,} empty documents left out" if empty else ""
        if self.skipped:
            left_out += f", {self.skipped:,} unreadable records skipped (first: {self.first_skipped})"
        unknown = describe_unknown(sum(counts.unknown_tokens for counts in self.by_key), self.tokens)
        return f"{self.documents:,} documents, {self.tokens:,} tokens{left_out}, {unknown}, {speed:.1f} MB/s → {files}"

    def warnings(self) -> Iterator[str]:
        """Yield a line for each dataset with many unknown pieces."""
        for prefix, counts in zip(self.prefixes, self.by_key, strict=True):
            if warning := warn_of_unknown(prefix, counts.unknown_tokens, counts.tokens):
                yield warning


def preprocess(config: PreprocessConfig) -> PreprocessResult:
    """Write one dataset for each JSON key; what an interrupted run of the same command has done is not done again.

    No dataset appears under its name before it is complete. Signs of a vocabulary that does not fit are written to
    standard error. Raises `UserError` when it is not possible.
    """
    local = [path for path in (config.vocab_file, config.tokenizer_model) if path]
    files = find_inputs(config.input, leave_out=local)
    existing = _existing(config.prefixes) if not config.overwrite else None
    if existing and not os.path.exists(config.unfinished_folder):
        raise UserError(existing)
    tokenize = ChunkTokenizer(config)
    if warning := warn_of_impossible(tokenize.tokenizer):
        print(warning, file=sys.stderr)
    job = _job(config, files, tokenize)
    folder = config.unfinished_folder
    with UnfinishedDatasets(folder, config.prefixes, tokenize.tokenizer.dtype, job) as output:
        if existing and not output.published:
            output.discard()
            raise UserError(existing)
        if output.state and output.state["skipped"] and config.on_error == "stop":
            raise UserError(f"{folder}: this run has skipped records; go on with --on-error skip, or remove the folder")
        if output.discarded:
            print(f"{folder}: damaged, or left by another command, input or version; starting afresh", file=sys.stderr)
        run = _Run(config, files, tokenize, output)
        try:
            result = run.to_the_end()
            for warning in result.warnings():
                print(warning, file=sys.stderr)
            return result
        except OSError as error:
            where = error.filename or folder
            hint = "make room or choose another --output-prefix"
            raise UserError(f"{where}: {error.strerror}; {hint}, and run the same command again") from None
        except (KeyboardInterrupt, SystemExit):
            with uninterrupted():
                kept = run.keep()
            if kept:
                done = f"{run.result.documents:,} documents are kept in {folder}"
                print(f"stopped; {done}; the same command goes on from there", file=sys.stderr)
            raise
        finally:
            if output.state is None and not output.published:
                output.discard()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait for the end of the block, so that what it writes is whole."""
    if threading.current_thread() is not threading.main_thread():  # which alone has signal handlers
        yield
        return
    waiting: list[int] = []
    handlers = {
        number: signal.signal(number, lambda received, _: waiting.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for received in waiting:
            signal.raise_signal(received)


class _Run:
    """One run from where the last one stopped."""

    def __init__(
        self, config: PreprocessConfig, files: list[InputFile], tokenize: ChunkTokenizer, output: UnfinishedDatasets
    ):
        self._config, self._files, self._tokenize, self._output = config, files, tokenize, output
        self._resumable = not any(is_stream(file.path) for file in files)
        self._described: list[dict[str, Any]] = []
        self.result = PreprocessResult(config.prefixes, [KeyCounts() for _ in config.json_keys])
        if output.state is not None:
            counts = [KeyCounts(**counts) for counts in output.state["by_key"]]
            self.result = PreprocessResult(**{**output.state, "by_key": counts, "text_bytes": 0})

    def to_the_end(self) -> PreprocessResult:
        """Tokenize what is left, and publish."""
        started = saved = time.monotonic()
        if not self._output.published:
            with reading_progress([file.path for file in self._files]) as progress:
                for number, chunk in self._tokenized():
                    with uninterrupted():
                        self._add(number, chunk)
                        if self._resumable and time.monotonic() - saved > CHECKPOINT_SECONDS:
                            self.keep()
                            saved = time.monotonic()
                    progress.update(chunk.read)
            self._refuse_empty()
        self._output.publish([self._manifest(k) for k in range(len(self._config.json_keys))])
        self.result.seconds = time.monotonic() - started
        return self.result

    def keep(self) -> bool:
        """Make the work done so far safe to resume; return False where there is none, or where a stream is read."""
        sensible = self._resumable and self.result.chunks > 0 and not self._output.published
        if sensible:
            self._output.checkpoint(asdict(self.result))
        return sensible

    def _tokenized(self) -> Iterator[tuple[int, TokenizedChunk]]:
        """The chunks that are not done yet, tokenized, each with the number of its file."""
        done = self.result.chunks
        numbers: list[int] = []

        def chunks() -> Iterator[Chunk]:
            seen = 0
            for number, file in enumerate(self._files):
                with OpenInput(file) as opened:
                    for chunk in iter_chunks(opened, self._config.json_keys, CHUNK_BYTES):
                        seen += 1
                        if seen > done:
                            numbers.append(number)
                            yield chunk
                    self._described.append(opened.describe())

        results = map_in_order(ChunkTokenizer, self._config, self._tokenize, chunks(), self._config.workers)
        for place, chunk in enumerate(results):
            yield numbers[place], chunk

    def _add(self, number: int, chunk: TokenizedChunk) -> None:
        result = self.result
        counter = FaultCounter(self._config.on_error, result.line if number == result.file else 0)
        reasons = counter.add(self._files[number].path, chunk.faults, chunk.lines)
        for k, documents in enumerate(chunk.by_key):
            self._output.append(k, documents.ids, documents.sizes, documents.documents)
            counts = result.by_key[k]
            counts.documents += len(documents.documents)
            counts.sequences += len(documents.sizes)
            counts.tokens += len(documents.ids) // self._tokenize.tokenizer.dtype.itemsize
            counts.unknown_tokens += documents.unknown
            counts.empty_documents += documents.empty
        result.skipped += len(reasons)
        result.first_skipped = result.first_skipped or next(iter(reasons), "")
        result.text_bytes += chunk.text_bytes
        result.chunks += 1
        result.file, result.line = number, counter.line

    def _refuse_empty(self) -> None:
        for key, counts in zip(self._config.json_keys, self.result.by_key, strict=True):
            if counts.tokens == 0:
                self._output.discard()
                left_out = f"{counts.empty_documents} empty documents, {self.result.skipped} records skipped"
                where = f"{', '.join(self._config.input)} (key {key!r}; {left_out})"
                raise UserError(f"no text to tokenize in {where}; nothing written, give files that hold some")

    def _manifest(self, k: int) -> dict[str, Any]:
        """What PREFIX.json says; a function of the input's bytes and the flags, so that equal runs give equal files."""
        tokenizer = self._tokenize.tokenizer
        return {
            **asdict(self.result.by_key[k]),
            "skipped": self.result.skipped,
            "dtype": tokenizer.dtype.name,
            "tokenizer": describe_tokenizer(tokenizer),
            "tokenizer_library": f"{tokenizer.library} {importlib.metadata.version(tokenizer.library)}",
            "json_key": self._config.json_keys[k],
            "append_eod": self._config.append_eod,
            "sentence_splitter": self._tokenize.splitter_name,
            "inputs": self._described,
            "version": megatron_ddrp.__version__,
        }


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest's entry that ties a dataset to its tokenizer."""
    return {
        "type": tokenizer.tokenizer_type,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }


def _existing(prefixes: list[str]) -> str | None:
    """The complaint about a dataset that is there already."""
    for prefix in prefixes:
        for suffix in (".bin", ".idx", ".json"):
            if dataset_path(prefix, suffix).exists():
                hint = "give --overwrite to replace it, or another --output-prefix"
                return f"{dataset_path(prefix, suffix)}: exists already; {hint}"
    return None


def _job(config: PreprocessConfig, files: list[InputFile], tokenize: ChunkTokenizer) -> dict[str, Any]:
    """Return all that decides the output's bytes; standard input and pipes are never the same again."""
    inputs: list[Any] = []
    for file in files:
        if is_stream(file.path):
            inputs.append([file.path, os.getpid(), time.time()])
        else:
            status = os.stat(file.path)
            inputs.append([os.path.realpath(file.path), file.name, status.st_size, status.st_mtime_ns])
    return {
        "inputs": inputs,
        "tokenizer": describe_tokenizer(tokenize.tokenizer),
        "json_keys": config.json_keys,
        "append_eod": config.append_eod,
        "sentence_splitter": tokenize.splitter_name,
        "chunk_bytes": CHUNK_BYTES,
        "text_rules": TEXT_RULES,
        "version": megatron_ddrp.__version__,
    }
