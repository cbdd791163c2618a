"""Text files → Megatron indexed datasets: one reader, many tokenizing processes, one writer.

The main process cuts the input into chunks of whole records and writes their tokens in the order of the input; worker
processes parse and tokenize (progress.py). So the output's bytes depend neither on the number of workers nor on time.
The dataset appears whole or not at all (unfinished.py). All documents are stored, however short, without special tokens
([CLS] and [SEP] are added to samples).
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import megatron_ddrp
from megatron_ddrp.data.dataset.manifest import PATH, refuse_existing, relative_path, tokenizer_entry
from megatron_ddrp.data.dataset.unfinished import UnfinishedDatasets, finish_left, job_of
from megatron_ddrp.data.preprocess.documents import iter_chunks, name_faults
from megatron_ddrp.data.preprocess.inputs import BLOCK_BYTES, InputFile, OpenInput, find_inputs
from megatron_ddrp.data.preprocess.partition import own_bytes, own_files, partition_entry
from megatron_ddrp.data.preprocess.records import Chunk
from megatron_ddrp.data.progress import map_in_order, progress
from megatron_ddrp.data.tokenizers.chunks import ChunkTokenizer, KeyCounts, PreprocessConfig, TokenizedChunk
from megatron_ddrp.data.tokenizers.vocabulary_fit import (
    unknown_share,
    warn_of_impossible,
    warn_of_unknown,
    warn_of_vocabulary,
)
from megatron_ddrp.errors import UserError, refusals_as_user_errors

CHUNK_BYTES = BLOCK_BYTES


@dataclass
class PreprocessResult:
    """Counts of the written data, in total."""

    prefixes: list[str]
    by_key: list[KeyCounts]
    skipped: int = 0
    first_skipped: str = ""
    text_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)

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

    def warnings(self) -> Iterator[str]:
        """Yield one warning per dataset with many unknown pieces or dropped characters."""
        for prefix, counts in zip(self.prefixes, self.by_key, strict=True):
            if warning := warn_of_unknown(prefix, counts.unknown_tokens, counts.tokens, counts.dropped_characters):
                yield warning


def preprocess(config: PreprocessConfig) -> PreprocessResult:
    """Write one dataset per JSON key, which gets its name when it is complete.

    Warnings about a vocabulary that does not fit go to standard error. Raises `UserError` for inputs, tokenizers and
    outputs that cannot be used.
    """
    files = find_inputs(config.input, leave_out=config.vocabularies)
    tokenize = ChunkTokenizer(config)
    rules = _rules(config, tokenize)
    if config.partition is not None:
        own = own_files(files, config.partition)
        rules["partition"] = partition_entry(config.partition, files)
        files = own
    for warning in filter(None, [*warn_of_vocabulary(tokenize.tokenizer), warn_of_impossible(tokenize.tokenizer)]):
        print(warning, file=sys.stderr)
    folder = config.unfinished_folder
    job = job_of("preprocess", [rules, config.json_keys], [file.path for file in files])
    is_left = finish_left(folder, config.prefixes, job)  # the same command makes it again, as after any other kill
    with UnfinishedDatasets(folder, config.prefixes, tokenize.tokenizer.dtype, job) as output:
        if not config.overwrite and not is_left:
            refuse_existing(config.prefixes)
        hint = "make room or choose another --output-prefix, and run the same command again"
        with refusals_as_user_errors(folder, hint):
            result = _Run(config, files, tokenize, output, rules).to_the_end()
    for warning in result.warnings():
        print(warning, file=sys.stderr)
    return result


class _Run:
    """A preprocessing run."""

    def __init__(
        self,
        config: PreprocessConfig,
        files: list[InputFile],
        tokenize: ChunkTokenizer,
        output: UnfinishedDatasets,
        rules: dict[str, Any],
    ):
        self._config, self._files, self._tokenize, self._output, self._rules = config, files, tokenize, output, rules
        self._inputs: list[dict[str, Any]] = []  # the manifest's entries
        self.result = PreprocessResult(config.prefixes, [KeyCounts() for _ in config.json_keys])

    def to_the_end(self) -> PreprocessResult:
        """Tokenize the input and publish the datasets."""
        started = time.monotonic()
        with progress("B", own_bytes(self._files), scale=True) as bar:
            for chunk in map_in_order(
                ChunkTokenizer, self._config, self._tokenize, self._chunks(), self._config.workers
            ):
                self._add(chunk)
                bar.update(chunk.read)
        if self._config.partition is None:  # a part may be empty: the merge of all parts is complete then
            self._refuse_empty()
        self._output.publish([self._manifest(k) for k in range(len(self._config.json_keys))])
        self.result.seconds = time.monotonic() - started
        return self.result

    def _chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of all files."""
        for number, file in enumerate(self._files):
            with OpenInput(file) as opened:
                for chunk in iter_chunks(opened, self._config.json_keys, CHUNK_BYTES):
                    yield chunk._replace(file=number)
                self._inputs.append(opened.manifest_entry())

    def _add(self, chunk: TokenizedChunk) -> None:
        result = self.result
        reasons = name_faults(self._files[chunk.file], chunk.faults, self._config.on_error)
        for k, documents in enumerate(chunk.by_key):
            self._output.append(k, documents.ids, documents.sizes, documents.documents)
            result.by_key[k] = result.by_key[k].plus(documents.counts)
        result.skipped += len(reasons)
        result.first_skipped = result.first_skipped or next(iter(reasons), "")
        result.text_bytes += chunk.text_bytes

    def _refuse_empty(self) -> None:
        for key, counts in zip(self._config.json_keys, self.result.by_key, strict=True):
            if counts.tokens == 0:
                left_out = f"{counts.empty_documents} empty documents, {self.result.skipped} records skipped"
                if self.result.skipped:
                    left_out += f", the first because of {self.result.first_skipped}"
                where = f"{', '.join(self._config.input)} (key {key!r}; {left_out})"
                raise UserError(f"no text to tokenize in {where}; nothing written, give files with text")

    def _manifest(self, k: int) -> dict[str, Any]:
        """Return PREFIX.json, a function of the input's bytes and the flags: equal runs give equal files."""
        tokenizer, counts = self._tokenize.tokenizer, self.result.by_key[k]._asdict()
        if not tokenizer.drops_text:
            del counts["dropped_characters"]
        return {
            **self._rules,
            **counts,
            "skipped": self.result.skipped,
            "dtype": tokenizer.dtype.name,
            "tokenizer_library": f"{tokenizer.library} {importlib.metadata.version(tokenizer.library)}",
            PATH: relative_path(self._tokenize.path, self._config.prefixes[k]),
            "json_key": self._config.json_keys[k],
            "inputs": self._inputs,
        }


def _rules(config: PreprocessConfig, tokenize: ChunkTokenizer) -> dict[str, Any]:
    """Return the settings that turn text into ids, for the manifest."""
    return {
        "tokenizer": tokenizer_entry(tokenize.tokenizer),
        "append_eod": config.append_eod,
        "sentence_splitter": tokenize.splitter_name,
        "version": megatron_ddrp.__version__,
    }
