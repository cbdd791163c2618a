"""The work of preprocessing on one chunk of the input: parse, split into sentences, tokenize.

Sentences of a text by NLTK's Punkt (Kiss and Strunk, 2006). NLTK is imported only for `--split-sentences`.

Punkt uses its trained English parameters if they are installed (`punkt_tab`), otherwise its untrained defaults; nothing
is downloaded. The boundaries are NLTK's own, found in the text before any lower-casing.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_ddrp.data.preprocess.partition import Partition
from megatron_ddrp.data.preprocess.records import Chunk, Fault, parse_chunk
from megatron_ddrp.data.tokenizers.tokenizer import Span, build_tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, need_packages


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
        if self.workers < 1:
            raise UserError(f"--workers {self.workers}: expected at least 1", WRONG_ARGUMENTS)
        if self.on_error not in ("stop", "skip"):
            raise UserError(f"--on-error {self.on_error}: expected stop or skip", WRONG_ARGUMENTS)
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

    def plus(self, more: KeyCounts) -> KeyCounts:
        """Return the sums of both."""
        return KeyCounts(*map(operator.add, self, more))


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
        self.tokenizer = build_tokenizer(config.tokenizer_type, config.vocab_file, config.tokenizer_model)
        is_wordpiece = config.tokenizer_type.startswith("BertWordPiece")
        self.path = str(config.vocab_file if is_wordpiece else config.tokenizer_model)
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
        counts = KeyCounts(
            len(sequences),
            len(sizes),
            int(sizes.sum()),
            self.tokenizer.count_unknown(np.frombuffer(tokens, dtype)),
            len(texts) - len(sequences),
            self.tokenizer.count_dropped(texts),
        )
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
    """Return (name of the parameters, splitter). Raises `UserError` if NLTK is not installed."""
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
