"""Text files → Megatron indexed datasets: one reader, many tokenizing processes, one writer.

The main process reads chunks of raw records and writes their tokens in the order of the input; worker processes parse
and tokenize. So the output's bytes depend on neither the number of workers nor on time. Documents are stored without
special tokens ([CLS] and [SEP] are the sample builder's), every one of them, however short.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import megatron_ddrp
from megatron_ddrp.data.documents import STANDARD_INPUT, Chunk, check_inputs, iter_chunks, parse_chunk, reading_progress
from megatron_ddrp.data.indexed_dataset import IndexedDatasetWriter, dataset_path, token_dtype
from megatron_ddrp.data.sentences import Splitter, sentence_splitter
from megatron_ddrp.data.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

CHUNKS_AHEAD = 4  # per worker: enough to keep it busy, few enough to bound memory


@dataclass(frozen=True)
class PreprocessConfig:
    """What `tools/preprocess_data.py` is asked to do."""

    input: tuple[str, ...]
    """Files of documents (see documents.py); `-` is standard input."""
    output_prefix: str
    """Datasets are named PREFIX_KEY_document, or PREFIX_KEY_sentence with `split_sentences`."""
    tokenizer_type: str
    """One of tokenizer.TOKENIZER_TYPES."""
    vocab_file: str | None = None
    """vocab.txt of the WordPiece types."""
    tokenizer_model: str | None = None
    """SentencePiece .model, or Hugging Face folder."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the JSON lines to take; each makes a dataset."""
    workers: int = 1
    """Tokenizing processes."""
    split_sentences: bool = False
    """One sequence a sentence instead of one a document."""
    append_eod: bool = False
    """End each document with [SEP]."""
    on_error: str = "stop"
    """`stop` at a record that cannot be read, or `skip` and count it."""
    overwrite: bool = False
    """Replace existing datasets."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"--workers {self.workers}: expected at least 1", WRONG_ARGUMENTS)
        if self.on_error not in ("stop", "skip"):
            raise UserError(f"--on-error {self.on_error}: expected stop or skip", WRONG_ARGUMENTS)
        if len(set(self.json_keys)) < len(self.json_keys):
            raise UserError(f"--json-keys {' '.join(self.json_keys)}: a key is given twice", WRONG_ARGUMENTS)

    def dataset_prefix(self, key: str) -> str:
        """The prefix of the dataset of one JSON key."""
        return f"{self.output_prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"


class TokenizedDocuments(NamedTuple):
    """Documents of a chunk under one JSON key, without those that have no tokens."""

    tokens: np.ndarray
    """`[sum(sizes)]` of the dataset's type."""
    sizes: list[int]
    """Tokens of each sequence `[sum(sequences)]`."""
    sequences: list[int]
    """Sequences of each document `[documents]`."""
    empty: int
    """Documents left out because they have no tokens."""


class TokenizedChunk(NamedTuple):
    """A worker's answer to a chunk."""

    by_key: list[TokenizedDocuments]
    skipped: list[str]
    read: int
    """Bytes of the input file, as it lies on the disk."""
    text_bytes: int
    """Bytes of the records, unpacked."""


class ChunkTokenizer:
    """Tokenizes chunks; each process has its own."""

    def __init__(self, config: PreprocessConfig):
        self._config = config
        self.tokenizer = build_tokenizer(config.tokenizer_type, config.vocab_file, config.tokenizer_model)
        self.dtype = np.dtype(token_dtype(self.tokenizer.vocab_size))
        self.splitter_name: str | None = None
        self._split: Splitter = lambda text: [text]
        if config.split_sentences:
            self.splitter_name, self._split = sentence_splitter()

    def __call__(self, chunk: Chunk) -> TokenizedChunk:
        texts, skipped = parse_chunk(chunk, self._config.json_keys, self._config.on_error)
        by_key = [self._tokenize([text[k] for text in texts]) for k in range(len(self._config.json_keys))]
        return TokenizedChunk(by_key, skipped, chunk.read, sum(len(data) for _, data in chunk.records))

    def _tokenize(self, texts: list[str]) -> TokenizedDocuments:
        documents = [self._split(text) for text in texts]
        encoded = iter(self.tokenizer.encode_batch([sequence for document in documents for sequence in document]))
        tokens = array("H" if self.dtype == np.uint16 else "i")
        sizes: list[int] = []
        sequences: list[int] = []
        for document in documents:
            kept = [ids for _ in document if (ids := next(encoded))]
            if not kept:
                continue
            if self._config.append_eod:
                kept[-1] = [*kept[-1], self.tokenizer.sep_id]
            sequences.append(len(kept))
            for ids in kept:
                sizes.append(len(ids))
                tokens.extend(ids)
        flat = np.frombuffer(tokens, dtype=self.dtype) if tokens else np.empty(0, self.dtype)  # [sum(sizes)]
        return TokenizedDocuments(flat, sizes, sequences, len(texts) - len(sequences))


@dataclass
class PreprocessResult:
    """What was written."""

    prefixes: list[str] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    skipped: int = 0
    first_skipped: str = ""
    text_bytes: int = 0
    seconds: float = 0.0

    def summary(self) -> str:
        """One line: documents, tokens, speed, files."""
        speed = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        files = ", ".join(f"{prefix}.{{bin,idx,json}}" for prefix in self.prefixes)
        left_out = f", {self.empty:,} empty documents left out" if self.empty else ""
        if self.skipped:
            left_out += f", {self.skipped:,} unreadable records skipped (first: {self.first_skipped})"
        return f"{self.documents:,} documents, {self.tokens:,} tokens{left_out}, {speed:.1f} MB/s → {files}"


def preprocess(config: PreprocessConfig) -> PreprocessResult:
    """Write one dataset for each JSON key. Raises `UserError`, leaving nothing behind, when that is not possible."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    check_inputs(config.input)
    prefixes = [config.dataset_prefix(key) for key in config.json_keys]
    if not config.overwrite:
        _refuse_existing(prefixes)
    tokenize = ChunkTokenizer(config)
    result = PreprocessResult(prefixes)
    started = time.monotonic()
    with ExitStack() as stack:
        progress = stack.enter_context(reading_progress(config.input))
        writers = [stack.enter_context(IndexedDatasetWriter(prefix, tokenize.dtype)) for prefix in prefixes]
        empty = [0] * len(writers)
        for chunk in _tokenized_chunks(config, tokenize):
            for k, documents in enumerate(chunk.by_key):
                writers[k].append_documents(documents.tokens, documents.sizes, documents.sequences)
                empty[k] += documents.empty
            result.skipped += len(chunk.skipped)
            result.first_skipped = result.first_skipped or next(iter(chunk.skipped), "")
            result.text_bytes += chunk.text_bytes
            progress.update(chunk.read)
        for k, writer in enumerate(writers):
            if writer.num_tokens == 0:
                left_out = f"{empty[k]} empty documents, {result.skipped} records skipped"
                where = f"{', '.join(config.input)} (key {config.json_keys[k]!r}; {left_out})"
                raise UserError(f"no text to tokenize in {where}; nothing written, give files that hold some")
        for k, writer in enumerate(writers):
            writer.finalize(_manifest(config, tokenize, writer, config.json_keys[k], empty[k], result))
            result.documents += writer.num_documents
            result.tokens += writer.num_tokens
            result.empty += empty[k]
    result.seconds = time.monotonic() - started
    return result


def _refuse_existing(prefixes: list[str]) -> None:
    for prefix in prefixes:
        for suffix in (".bin", ".idx", ".json"):
            if dataset_path(prefix, suffix).exists():
                hint = "give --overwrite to replace it, or another --output-prefix"
                raise UserError(f"{dataset_path(prefix, suffix)}: exists already; {hint}")


def _manifest(
    config: PreprocessConfig,
    tokenize: ChunkTokenizer,
    writer: IndexedDatasetWriter,
    key: str,
    empty: int,
    result: PreprocessResult,
) -> dict[str, Any]:
    """What PREFIX.json says; a function of the input's bytes and the flags, so that equal runs give equal files."""
    return {
        "documents": writer.num_documents,
        "sequences": writer.num_sequences,
        "tokens": writer.num_tokens,
        "empty_documents": empty,
        "skipped": result.skipped,
        "dtype": writer.dtype.name,
        "tokenizer": describe_tokenizer(tokenize.tokenizer),
        "json_key": key,
        "append_eod": config.append_eod,
        "sentence_splitter": tokenize.splitter_name,
        "inputs": [_describe_input(path) for path in config.input],
        "version": megatron_ddrp.__version__,
    }


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest's entry that ties a dataset to its tokenizer."""
    return {
        "type": tokenizer.tokenizer_type,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
    }


def _describe_input(path: str) -> dict[str, Any]:
    if path == STANDARD_INPUT:
        return {"name": path, "bytes": None}
    return {"name": os.path.basename(path), "bytes": os.path.getsize(path)}


def _tokenized_chunks(config: PreprocessConfig, tokenize: ChunkTokenizer) -> Iterator[TokenizedChunk]:
    """Every chunk of the input, tokenized, in order; at most a few chunks per worker are in memory at once."""
    chunks = iter_chunks(config.input)
    if config.workers == 1:
        yield from map(tokenize, chunks)
        return
    context = multiprocessing.get_context("spawn")  # safe beside threads, and the same on every platform
    pool = ProcessPoolExecutor(config.workers, context, _start_worker)
    pending: deque[Future[TokenizedChunk]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_tokenize_in_worker, config, chunk))
            if len(pending) >= CHUNKS_AHEAD * config.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process died, likely for want of memory; try fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A main process that was killed cannot stop its workers: they see it end, and go."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@functools.lru_cache(maxsize=1)
def _worker_tokenizer(config: PreprocessConfig) -> ChunkTokenizer:
    return ChunkTokenizer(config)


def _tokenize_in_worker(config: PreprocessConfig, chunk: Chunk) -> TokenizedChunk:
    return _worker_tokenizer(config)(chunk)
