"""Text → Megatron indexed dataset (PREFIX_text_document.bin, .idx and .json).

Each document becomes one sequence of token ids, without [CLS] and [SEP]: the sample builder adds them. The .json holds
the numbers of documents and tokens, the tokenizer and the input files. The dataset appears when it is complete;
a killed command leaves nothing that counts. On several machines, or where hours of work must not be lost, each command
takes a part of the input with --partition, and `megatron-ddrp dataset merge` joins the parts into the files that one
command would have written.

    megatron-ddrp preprocess --input wiki.jsonl --output-prefix data/wiki --vocab-file vocab.txt --workers 8
    megatron-ddrp preprocess --input shards/ --output-prefix data/all --vocab-file vocab.txt --dry-run
    megatron-ddrp preprocess --input shards/ 'more/*.txt.gz' --output-prefix data/all --vocab-file vocab.txt
    zcat dump.jsonl.gz | megatron-ddrp preprocess --input - --output-prefix data/dump --vocab-file vocab.txt
    megatron-ddrp preprocess --partition 3/16 --input shards/ --output-prefix data/all --vocab-file vocab.txt
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.commands import PROGRAM
from megatron_ddrp.commands.options import GivenTokenizer, TextInput, training_command
from megatron_ddrp.config.reading import Section, flag_words, option
from megatron_ddrp.data.dataset.indexed_dataset import entry, read_manifest
from megatron_ddrp.data.preprocess.documents import Partition, parse_partition
from megatron_ddrp.data.preprocess.pipeline import (
    PreprocessConfig,
    PreprocessResult,
    estimate,
    exit_on_sigterm,
    preprocess,
)
from megatron_ddrp.data.tokenizers.tokenizer import TOKENIZER_TYPES
from megatron_ddrp.data.tokenizers.vocabulary import unknown_share
from megatron_ddrp.run.log import duration


@dataclass(frozen=True)
class NewTokenizer(GivenTokenizer):
    """tokenizer (local files only)"""

    tokenizer_type: str = option(TOKENIZER_TYPES[0], "kind of vocabulary", choices=TOKENIZER_TYPES)


@dataclass(frozen=True)
class PreprocessOutput(Section):
    """output"""

    output_prefix: str = option(MISSING, "path and beginning of the files' names", metavar="PREFIX")
    split_sentences: bool = option(False, "one sequence per sentence, by NLTK's Punkt; writes PREFIX_text_sentence")
    append_eod: bool = option(False, "end each document with [SEP]; training leaves it out")
    overwrite: bool = option(False, "replace a dataset that exists")


@dataclass(frozen=True)
class PreprocessWork(Section):
    """speed"""

    partition: Partition | None = option(
        None,
        "take part I of N of the input (I from 1 to N), by bytes over all files, and write "
        "PREFIX_partI-of-N_text_document. A document belongs to the part in which it begins; a packed or .parquet file "
        "belongs to one part as a whole, so give at least N of them",
        metavar="I/N",
        word=parse_partition,
    )
    workers: int = option(1, "tokenizing processes; the output does not depend on it", within="[1, 4096]")
    dry_run: bool = option(
        False,
        "tokenize a few megabytes, print the estimated tokens, bytes and time of the whole input; write nothing",
    )


def print_estimate(config: PreprocessConfig) -> None:
    """Tokenize some of the input, and print the estimated size of the whole dataset."""
    found = estimate(config)
    about = "about " if found.read_bytes < found.total_bytes else ""
    read = f"{found.read_bytes / 1e6:,.1f} MB from {found.read_files}" if about else "all"
    print(f"input: {found.files:,} file{'s' * (found.files != 1)}, {found.total_bytes / 1e6:,.1f} MB; read: {read}")
    if found.beginning:
        print(f"first document: {found.beginning}")
    if found.skipped:
        print(f"{found.skipped:,} unreadable records in it, to be skipped (first: {found.first_skipped})")
    for prefix, counts in zip(config.prefixes, found.by_key, strict=True):
        documents, tokens = (round(found.factor * count) for count in (counts.documents, counts.tokens))
        print(
            f"{prefix}.{{bin,idx,json}}: {about}{documents:,} documents, {tokens:,} tokens, "
            f"{found.token_bytes * tokens / 1e6:,.1f} MB; "
            f"{unknown_share(counts.unknown_tokens, counts.tokens, counts.dropped_characters)}"
        )
    seconds = found.factor * found.seconds / config.workers
    print(f"time: about {duration(seconds)} with --workers {config.workers}; nothing written")
    found.warn()


SECTIONS = (TextInput, NewTokenizer, PreprocessOutput, PreprocessWork)


def main(words: Sequence[str] | None = None) -> PreprocessResult | None:
    """Write the datasets; return None after --dry-run."""
    options = vars(parse_sections(ArgumentParser(description=__doc__), SECTIONS, words, plugins=False))
    dry_run = options.pop("dry_run")
    config = PreprocessConfig(**options)
    if config.tokenizer_type == "HuggingFace":
        from megatron_ddrp.conversion.tokenizer_files import refuse_other_ids

        refuse_other_ids(config.tokenizer_model)
    if dry_run:
        print_estimate(config)
        return None
    exit_on_sigterm()  # so that unfinished files are removed
    result = preprocess(config)
    print(result.summary())
    if config.partition is None and words is None:
        prefix, counts = result.prefixes[0], result.by_key[0]
        print(f"next: {training_command(prefix, counts.tokens, counts.documents)}")
        pieces = entry(read_manifest(prefix), "tokenizer")["vocab_size"]
        plan = flag_words({"tokens": counts.tokens, "vocab_size": pieces, "data_path": prefix, "hours": 24}.items())
        print(f"or for your device and hours: {PROGRAM} plan {shlex.join(plan)}")
        print(f"both begin a new model; to continue an encoder, take the lines that {PROGRAM} convert --from-hf prints")
    return result
