"""Preprocessing: text files → Megatron indexed datasets, by one reader, many tokenizing processes and one writer.

The main process cuts the input into chunks of whole records and writes their tokens in the order of the input; worker
processes parse, split into sentences and tokenize (progress.py). So the output's bytes depend neither on the number of
workers nor on time. The dataset appears whole or not at all. All documents are stored, however short, without special
tokens ([CLS] and [SEP] are added to samples).
"""

from __future__ import annotations

import importlib.metadata
import operator
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

import megatron_ddrp
from megatron_ddrp.data.dataset.indexed_dataset import (
    PATH,
    TokenizerFlags,
    UnfinishedDatasets,
    finish_left,
    job_of,
    refuse_existing,
    relative_path,
    tokenizer_entry,
)
from megatron_ddrp.data.preprocess.documents import (
    Partition,
    iter_chunks,
    name_faults,
    own_bytes,
    own_files,
    partition_entry,
)
from megatron_ddrp.data.preprocess.inputs import BLOCK_BYTES, InputFile, OpenInput, find_inputs
from megatron_ddrp.data.preprocess.records import Chunk, Fault, parse_chunk
from megatron_ddrp.data.progress import map_in_order, progress, track
from megatron_ddrp.data.tokenizers.tokenizer import Span, Tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import unknown_share, warn_of_unknown, warn_of_vocabulary
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, need_packages, refusals_as_user_errors

TERMINATED = 143


def exit_on_sigterm() -> None:
    """Turn SIGTERM into `SystemExit`, so that it acts like Ctrl-C: `with` blocks end and keep or remove their work."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))


@dataclass(frozen=True)
class PreprocessConfig:
    """Settings of `megatron-ddrp preprocess`."""

    input: tuple[str, ...]
    """Files, folders and patterns of documents (see inputs.py and documents.py); `-` is standard input."""
    output_prefix: str
    """PREFIX of the dataset names PREFIX_KEY_document, or PREFIX_KEY_sentence with `split_sentences`."""
    tokenizer_type: str
    """One of tokenizer.TOKENIZER_TYPES."""
    vocab_file: str | None = None
    """Path of vocab.txt, for the WordPiece types."""
    tokenizer_model: str | None = None
    """Path of a SentencePiece .model or of a Hugging Face folder."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the JSON lines; each gives one dataset."""
    workers: int = 1
    """Number of tokenizing processes."""
    split_sentences: bool = False
    """True for one sequence per sentence, False for one per document."""
    append_eod: bool = False
    """True to end each document with [SEP]."""
    on_error: str = "stop"
    """Reaction to an unreadable record: `stop`, or `skip` and count it."""
    overwrite: bool = False
    """Replace existing datasets."""
    partition: Partition | None = None
    """Part of the input to take, whose number goes into the datasets' names; None for all of it."""

    def __post_init__(self) -> None:
        if len(set(self.json_keys)) < len(self.json_keys):
            raise UserError(f"--json-keys {' '.join(self.json_keys)}: a key is given twice", WRONG_ARGUMENTS)
        for key in self.json_keys:
            if os.sep in key:
                reason = f"expected a key without {os.sep}, because the dataset is named PREFIX_KEY_document"
                raise UserError(f"--json-keys {key}: {reason}; rename the key in the files", WRONG_ARGUMENTS)

    @property
    def vocabularies(self) -> list[str]:
        """Files of the tokenizer, which may lie beside the text."""
        return [path for path in (self.vocab_file, self.tokenizer_model) if path]

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of the datasets, one per key."""
        level = "sentence" if self.split_sentences else "document"
        return [f"{self._own_prefix}_{key}_{level}" for key in self.json_keys]

    @property
    def unfinished_folder(self) -> str:
        """Folder in which the datasets grow."""
        return f"{self._own_prefix}.unfinished"

    @property
    def _own_prefix(self) -> str:
        return self.output_prefix + (self.partition.suffix if self.partition else "")


class KeyCounts(NamedTuple):
    """Counts of one dataset, or of a chunk's part of it."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    """Number of tokens that are the unknown piece."""
    empty_documents: int = 0
    """Documents skipped because they have no tokens."""
    dropped_characters: int = 0
    """Number of characters that the tokenizer left out; see `Tokenizer.count_dropped`."""


class TokenizedDocuments(NamedTuple):
    """Documents of a chunk for one JSON key, without empty ones."""

    ids: bytes
    """Token ids end to end, as the dataset stores them."""
    sizes: np.ndarray
    """int32, tokens of each sequence `[sequences]`."""
    documents: np.ndarray
    """int32, sequences of each document `[documents]`."""
    counts: KeyCounts


class TokenizedChunk(NamedTuple):
    """Result of a worker for one chunk."""

    by_key: list[TokenizedDocuments]
    faults: list[Fault]
    file: int
    """Number of its file among the inputs."""
    read: int
    """Bytes read of that file, as stored on the disk."""
    text_bytes: int
    """Uncompressed bytes of the records."""


class ChunkTokenizer:
    """Tokenizer of chunks; each process has its own."""

    def __init__(self, config: PreprocessConfig):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        self._config = config
        flags = TokenizerFlags.of(config)
        self.tokenizer, self.path = flags.build(), str(flags.path)
        self.splitter_name: str | None = None
        self._split: Splitter | None = None
        if config.split_sentences:
            self.splitter_name, self._split = sentence_splitter()

    def __call__(self, chunk: Chunk) -> TokenizedChunk:
        keys = self._config.json_keys
        texts, faults = parse_chunk(chunk, keys)
        by_key = [self._tokenize([text[k] for text in texts]) for k in range(len(keys))]
        return TokenizedChunk(by_key, faults, chunk.file, chunk.read, chunk.text_bytes)

    def _tokenize(self, texts: list[str]) -> TokenizedDocuments:
        dtype = self.tokenizer.dtype
        end = self.tokenizer.pack([self.tokenizer.sep_id] * self._config.append_eod)
        all_ids: list[bytes] = []
        sequences: list[int] = []
        for document in self._packed(texts):
            if kept := [ids for ids in document if ids]:
                kept[-1] += end
                all_ids += kept
                sequences.append(len(kept))
        sizes = np.array([len(ids) // dtype.itemsize for ids in all_ids], np.int32)
        tokens = b"".join(all_ids)
        unknown = self.tokenizer.count_unknown(np.frombuffer(tokens, dtype))
        empty = len(texts) - len(sequences)
        dropped = self.tokenizer.count_dropped(texts)
        counts = KeyCounts(len(sequences), len(sizes), int(sizes.sum()), unknown, empty, dropped)
        return TokenizedDocuments(tokens, sizes, np.array(sequences, np.int32), counts)

    def _packed(self, texts: list[str]) -> Iterator[list[bytes]]:
        """Yield the sequences of each text, packed as by `Tokenizer.encode_packed`; their ids are the whole text's."""
        if self._split is None:
            yield from ([ids] for ids in self.tokenizer.encode_packed(texts))
            return
        for text in texts:
            sentences = cut_sentences(*self.tokenizer.encode_with_spans(text), self._split(text))
            yield [self.tokenizer.pack(ids) for ids in sentences]


Splitter = Callable[[str], list[int]]
"""Text → the first character of each sentence."""


def sentence_splitter() -> tuple[str, Splitter]:
    """Return (name of the parameters, splitter) of NLTK's Punkt (Kiss and Strunk, 2006).

    NLTK is imported only for `--split-sentences`. Punkt uses its trained English parameters if they are installed
    (`punkt_tab`), otherwise its untrained defaults; nothing is downloaded. The boundaries are NLTK's own, found in the
    text before any lower-casing. Raises `UserError` if NLTK is not installed.
    """
    need_packages("--split-sentences", "nltk")
    from nltk.tokenize import punkt

    try:
        name, splitter = "punkt-english", punkt.PunktTokenizer("english")
    except (LookupError, AttributeError):  # AttributeError: NLTK before 3.8.2 has no PunktTokenizer
        name, splitter = "punkt-untrained", punkt.PunktSentenceTokenizer()
    return name, lambda text: [begin for begin, _ in splitter.span_tokenize(text)]


def cut_sentences(ids: Sequence[int], spans: Sequence[Span], begins: Sequence[int]) -> list[Sequence[int]]:
    """Cut the ids of a text into those of its sentences, which begin at the characters `begins`; some may be empty.

    A piece belongs to the sentence of its last character, so the blank before a word stays with the word; a piece
    without characters belongs to the piece behind it (`Tokenizer.encode_with_spans`).
    """
    lasts = np.array([end if end > begin else np.iinfo(np.int64).max for begin, end in spans], np.int64)  # [pieces]
    lasts = np.minimum.accumulate(lasts[::-1])[::-1]
    cuts = [0, *np.searchsorted(lasts, begins[1:], side="right").tolist(), len(ids)]
    return [ids[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]


FILES, CHUNKS = 4, 8
"""Number of files that are read, evenly spread over the input, and of chunks of a megabyte of each."""
SHOWN = 32
"""Number of pieces of the first document that are shown."""
CHUNK_BYTES = BLOCK_BYTES


@dataclass
class PreprocessResult:
    """Counts of the written data, in total."""

    prefixes: list[str]
    by_key: list[KeyCounts]
    """Counts of each dataset."""
    skipped: int = 0
    """Number of unreadable records."""
    first_skipped: str = ""
    """Place of the first of them, and the reason."""
    text_bytes: int = 0
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Entries of the manifest about the files that were read."""
    seconds: float = field(default=0.0, compare=False)

    def add(self, chunk: TokenizedChunk, faults: Sequence[str]) -> None:
        """Add the counts of a chunk and its faults (`name_faults`)."""
        both = zip(self.by_key, (documents.counts for documents in chunk.by_key), strict=True)
        self.by_key = [KeyCounts(*map(operator.add, counts, more)) for counts, more in both]
        self.skipped += len(faults)
        self.first_skipped = self.first_skipped or next(iter(faults), "")
        self.text_bytes += chunk.text_bytes

    def total(self, name: str) -> int:
        """Return one of the counts, summed over all datasets."""
        return sum(getattr(counts, name) for counts in self.by_key)

    def summary(self) -> str:
        """Return one line: documents, tokens, unknown pieces, speed, files."""
        speed = self.text_bytes / 1e6 / max(self.seconds, 1e-9)
        files = ", ".join(f"{prefix}.{{bin,idx,json}}" for prefix in self.prefixes)
        empty, tokens = self.total("empty_documents"), self.total("tokens")
        left_out = f", {empty:,} empty documents left out" if empty else ""
        if self.skipped:
            left_out += f", {self.skipped:,} unreadable records skipped (first: {self.first_skipped})"
        unknown = unknown_share(self.total("unknown_tokens"), tokens, self.total("dropped_characters"))
        return (
            f"{self.total('documents'):,} documents, {tokens:,} tokens{left_out}, {unknown}, {speed:.1f} MB/s → {files}"
        )

    def warn(self) -> None:
        """Print one warning per dataset with many unknown pieces or dropped characters."""
        for prefix, counts in zip(self.prefixes, self.by_key, strict=True):
            if warning := warn_of_unknown(prefix, counts.unknown_tokens, counts.tokens, counts.dropped_characters):
                print(warning, file=sys.stderr)


@dataclass
class Estimate(PreprocessResult):
    """Counts of the text that was read, and the size of the whole input; `seconds` are those of one process."""

    files: int = 0
    """Number of input files."""
    total_bytes: int = 0
    """Bytes of the input files, as they lie on the disk."""
    read_files: int = 0
    read_bytes: int = 0
    """Bytes that were read of these files, as they lie on the disk."""
    beginning: str = ""
    """First pieces of the first document."""
    token_bytes: int = 0
    """Bytes of a token in the dataset."""

    @property
    def factor(self) -> float:
        """Size of the whole input in units of the bytes read."""
        return self.total_bytes / max(1, self.read_bytes)


def estimate(config: PreprocessConfig) -> Estimate:
    """Estimate what `preprocess` will write: tokenize the beginnings of some input files, and write nothing.

    Raises `UserError` for what `preprocess` would refuse, as far as it is read, and for standard input and pipes.
    """
    files = find_inputs(config.input, leave_out=config.vocabularies)
    for file in files:
        if file.is_stream:
            raise UserError(f"--dry-run: {file.path} can be read only once; give a file", WRONG_ARGUMENTS)
    if not config.overwrite:
        refuse_existing(config.prefixes)
    files = files if config.partition is None else own_files(files, config.partition)
    tokenize = ChunkTokenizer(config)
    found = Estimate(
        config.prefixes, [KeyCounts()] * len(config.json_keys), token_bytes=tokenize.tokenizer.dtype.itemsize
    )
    found.files, found.read_files, found.total_bytes = len(files), min(FILES, len(files)), own_bytes(files) or 0
    for number in track(range(found.read_files), "file", "reading"):
        file = files[number * len(files) // found.read_files]
        is_packed = bool(file.packing) or file.is_table
        with OpenInput(file) as opened:
            for chunk in islice(iter_chunks(opened, config.json_keys, BLOCK_BYTES), CHUNKS):
                began = time.monotonic()
                done = tokenize(chunk)
                found.seconds += time.monotonic() - began
                found.add(done, name_faults(file, done.faults, config.on_error))
                found.read_bytes += done.read if is_packed else done.text_bytes  # not what is only read ahead
                found.beginning = found.beginning or _beginning(done.by_key[0], tokenize.tokenizer)
    _warn_of_vocabulary(tokenize.tokenizer)
    return found


def _warn_of_vocabulary(tokenizer: Tokenizer) -> None:
    for warning in warn_of_vocabulary(tokenizer):
        print(warning, file=sys.stderr)


def _beginning(documents: TokenizedDocuments, tokenizer: Tokenizer) -> str:
    """Return the first pieces of the first document; empty if there is none."""
    ids = np.frombuffer(documents.ids, tokenizer.dtype)
    size = int(documents.sizes[: documents.documents[0]].sum()) if len(documents.documents) else 0
    more = [f"… ({size:,} tokens)"] * (size > SHOWN)
    return " ".join([tokenizer.pieces[i] for i in ids[: min(size, SHOWN)].tolist()] + more)


def preprocess(config: PreprocessConfig) -> PreprocessResult:
    """Write one dataset per JSON key, which gets its name when it is complete.

    Warnings about a vocabulary that does not fit go to standard error. Raises `UserError` for inputs, tokenizers and
    outputs that cannot be used.
    """
    files = find_inputs(config.input, leave_out=config.vocabularies)
    tokenize = ChunkTokenizer(config)
    rules: dict[str, Any] = {  # that turn text into ids
        "tokenizer": tokenizer_entry(tokenize.tokenizer),
        "append_eod": config.append_eod,
        "sentence_splitter": tokenize.splitter_name,
        "version": megatron_ddrp.__version__,
    }
    if config.partition is not None:
        files, rules["partition"] = own_files(files, config.partition), partition_entry(config.partition, files)
    _warn_of_vocabulary(tokenize.tokenizer)
    folder = config.unfinished_folder
    job = job_of("preprocess", [rules, config.json_keys], [file.path for file in files])
    is_left = finish_left(folder, config.prefixes, job)  # the same command makes it again, as after any other kill
    with UnfinishedDatasets(folder, config.prefixes, tokenize.tokenizer.dtype, job) as output:
        if not config.overwrite and not is_left:
            refuse_existing(config.prefixes)
        hint = "make room or choose another --output-prefix, and run the same command again"
        with refusals_as_user_errors(folder, hint):
            started = time.monotonic()
            result = _tokenize(config, files, tokenize, output)
            output.publish([rules | _manifest(config, k, result, tokenize) for k in range(len(config.prefixes))])
            result.seconds = time.monotonic() - started
    result.warn()
    return result


def _tokenize(
    config: PreprocessConfig, files: Sequence[InputFile], tokenize: ChunkTokenizer, output: UnfinishedDatasets
) -> PreprocessResult:
    """Append the tokens of the files to the datasets. Raises `UserError` if there are none."""
    result = PreprocessResult(config.prefixes, [KeyCounts()] * len(config.json_keys))

    def chunks() -> Iterator[Chunk]:
        for number, file in enumerate(files):
            with OpenInput(file) as opened:
                for chunk in iter_chunks(opened, config.json_keys, CHUNK_BYTES):
                    yield chunk._replace(file=number)
                result.inputs.append(opened.manifest_entry())

    with progress("B", own_bytes(files), scale=True) as bar:
        for chunk in map_in_order(ChunkTokenizer, config, tokenize, chunks(), config.workers):
            result.add(chunk, name_faults(files[chunk.file], chunk.faults, config.on_error))
            for k, documents in enumerate(chunk.by_key):
                output.append(k, documents.ids, documents.sizes, documents.documents)
            bar.update(chunk.read)
    for key, counts in zip(config.json_keys, result.by_key, strict=True):
        if config.partition is None and counts.tokens == 0:  # a part may be empty: all of them together may not
            left_out = f"{counts.empty_documents} empty documents, {result.skipped} records skipped"
            if result.skipped:
                left_out += f", the first because of {result.first_skipped}"
            where = f"{', '.join(config.input)} (key {key!r}; {left_out})"
            raise UserError(f"no text to tokenize in {where}; nothing written, give files with text")
    return result


def _manifest(config: PreprocessConfig, k: int, result: PreprocessResult, tokenize: ChunkTokenizer) -> dict[str, Any]:
    """Return the rest of PREFIX.json, a function of the input's bytes and the flags: equal runs give equal files."""
    tokenizer, counts = tokenize.tokenizer, result.by_key[k]._asdict()
    if not tokenizer.drops_text:
        del counts["dropped_characters"]
    return {
        **counts,
        "skipped": result.skipped,
        "dtype": tokenizer.dtype.name,
        "tokenizer_library": f"{tokenizer.library} {importlib.metadata.version(tokenizer.library)}",
        PATH: relative_path(tokenize.path, config.prefixes[k]),
        "json_key": config.json_keys[k],
        "inputs": result.inputs,
    }
