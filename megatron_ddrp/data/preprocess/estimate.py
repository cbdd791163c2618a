"""Estimate of what preprocessing will write: the beginnings of some input files are tokenized; nothing is written."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from megatron_ddrp.data.dataset.manifest import refuse_existing
from megatron_ddrp.data.preprocess.documents import iter_chunks, name_faults
from megatron_ddrp.data.preprocess.inputs import BLOCK_BYTES, InputFile, OpenInput, find_inputs, is_stream
from megatron_ddrp.data.preprocess.partition import own_bytes, own_files
from megatron_ddrp.data.progress import track
from megatron_ddrp.data.tokenizers.chunks import ChunkTokenizer, KeyCounts, PreprocessConfig, TokenizedDocuments
from megatron_ddrp.data.tokenizers.vocabulary_fit import warn_of_impossible, warn_of_unknown, warn_of_vocabulary
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

FILES, CHUNKS = 4, 8
"""Number of files that are read, evenly spread over the input, and of chunks of a megabyte of each."""
SHOWN = 32
"""Number of pieces of the first document that are shown."""


@dataclass
class Estimate:
    """Counts of the text that was read, and the size of the whole input."""

    files: int
    """Number of input files."""
    total_bytes: int
    """Bytes of the input files, as they lie on the disk."""
    by_key: list[KeyCounts]
    """Counts of the text read, one per JSON key."""
    read_files: int = 0
    read_bytes: int = 0
    """Bytes that were read of these files, as they lie on the disk."""
    skipped: list[str] = field(default_factory=list)
    """Unreadable records, each with its place and the reason."""
    beginning: str = ""
    """First pieces of the first document."""
    token_bytes: int = 0
    """Bytes of a token in the dataset."""
    seconds: float = 0.0
    """Seconds in which one process tokenized this text."""
    warnings: list[str] = field(default_factory=list)

    @property
    def factor(self) -> float:
        """Size of the whole input in units of the bytes read."""
        return self.total_bytes / max(1, self.read_bytes)


def estimate(config: PreprocessConfig) -> Estimate:
    """Tokenize the beginnings of some input files.

    Raises `UserError` for what `preprocess` would refuse, as far as it is read, and for standard input and pipes.
    """
    files = find_inputs(config.input, leave_out=config.vocabularies)
    for file in files:
        if is_stream(file.path):
            raise UserError(f"--dry-run: {file.path} can be read only once; give a file", WRONG_ARGUMENTS)
    if not config.overwrite:
        refuse_existing(config.prefixes)
    files = files if config.partition is None else own_files(files, config.partition)
    tokenize = ChunkTokenizer(config)
    found = Estimate(len(files), own_bytes(files) or 0, [KeyCounts() for _ in config.json_keys])
    found.token_bytes = tokenize.tokenizer.dtype.itemsize
    count = min(FILES, len(files))
    for number in track(range(count), "file", "reading"):
        _read(files[number * len(files) // count], tokenize, config, found)
    lines = [*warn_of_vocabulary(tokenize.tokenizer), warn_of_impossible(tokenize.tokenizer)]
    for prefix, counts in zip(config.prefixes, found.by_key, strict=True):
        lines.append(warn_of_unknown(prefix, counts.unknown_tokens, counts.tokens, counts.dropped_characters))
    found.warnings = [line for line in lines if line]
    return found


def _read(file: InputFile, tokenize: ChunkTokenizer, config: PreprocessConfig, found: Estimate) -> None:
    """Add the first chunks of a file."""
    found.read_files += 1
    is_packed = bool(file.packing) or file.is_table
    with OpenInput(file) as opened:
        for chunk in islice(iter_chunks(opened, config.json_keys, BLOCK_BYTES), CHUNKS):
            began = time.monotonic()
            done = tokenize(chunk)
            found.seconds += time.monotonic() - began
            found.skipped += name_faults(file, done.faults, config.on_error)
            found.read_bytes += done.read if is_packed else done.text_bytes  # not what is only read ahead
            found.by_key = [counts.plus(new.counts) for counts, new in zip(found.by_key, done.by_key, strict=True)]
            found.beginning = found.beginning or _beginning(done.by_key[0], tokenize)


def _beginning(documents: TokenizedDocuments, tokenize: ChunkTokenizer) -> str:
    """Return the first pieces of the first document; empty if there is none."""
    tokenizer = tokenize.tokenizer
    ids = np.frombuffer(documents.ids, tokenizer.dtype)
    size = int(documents.sizes[: documents.documents[0]].sum()) if len(documents.documents) else 0
    more = [f"… ({size:,} tokens)"] * (size > SHOWN)
    return " ".join([tokenizer.pieces[i] for i in ids[: min(size, SHOWN)].tolist()] + more)
