"""Text → Megatron indexed dataset (PREFIX_text_document.bin, .idx and .json).

Each document becomes one sequence of token ids, without [CLS] and [SEP]: the sample builder adds them. The .json holds
the numbers of documents and tokens, the tokenizer and the input files. The dataset appears when it is complete. The
same command resumes a run that was killed. On several machines, each takes a part of the input with --partition, and
`megatron-ddrp dataset merge` joins the parts into the files that one run would have written.

    megatron-ddrp preprocess --input wiki.jsonl --output-prefix data/wiki --vocab-file vocab.txt --workers 8
    megatron-ddrp preprocess --input shards/ --output-prefix data/all --vocab-file vocab.txt --dry-run
    megatron-ddrp preprocess --input shards/ 'more/*.txt.gz' --output-prefix data/all --vocab-file vocab.txt
    zcat dump.jsonl.gz | megatron-ddrp preprocess --input - --output-prefix data/dump --vocab-file vocab.txt
    megatron-ddrp preprocess --partition 3/16 --input shards/ --output-prefix data/all --vocab-file vocab.txt
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.data.dataset.recorded_tokenizer import training_command
from megatron_ddrp.data.preprocess.estimate import estimate
from megatron_ddrp.data.preprocess.flags import add_input, add_tokenizer
from megatron_ddrp.data.preprocess.partition import parse_partition
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.data.preprocess.signals import exit_on_sigterm
from megatron_ddrp.data.tokenizers.vocabulary_fit import unknown_share
from megatron_ddrp.run.log import duration


def build_parser() -> ArgumentParser:
    """Return the parser of the command's flags, grouped by concern."""
    parser = ArgumentParser(description=__doc__)
    add_input(parser, "to take, one dataset each: PREFIX_KEY_document")
    add_tokenizer(parser, "tokenizer (local files only)", "BertWordPieceLowerCase", "kind of vocabulary")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="path and beginning of the files' names"
    )
    output.add_argument(
        "--split-sentences",
        action="store_true",
        help="one sequence per sentence, by NLTK's Punkt; writes PREFIX_text_sentence",
    )
    output.add_argument(
        "--append-eod", action="store_true", help="end each document with [SEP]; training leaves it out"
    )
    output.add_argument("--overwrite", action="store_true", help="replace a dataset that exists")
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--partition",
        type=parse_partition,
        metavar="I/N",
        help="take part I of N of the input (I from 1 to N), by bytes over all files, and write "
        "PREFIX_partI-of-N_text_document. A document belongs to the part in which it begins; a packed or .parquet file "
        "belongs to one part as a whole, so give at least N of them",
    )
    speed.add_argument(
        "--workers", type=int, default=1, metavar="N", help="tokenizing processes; the output does not depend on it"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tokenize a few megabytes, print what the whole input will come to in tokens, bytes and time, and write "
        "nothing",
    )
    return parser


def print_estimate(config: PreprocessConfig) -> None:
    """Tokenize some of the input, and print what the whole of it comes to."""
    found = estimate(config)
    about = "about " if found.read_bytes < found.total_bytes else ""
    read = f"{found.read_bytes / 1e6:,.1f} MB from {found.read_files}" if about else "all"
    print(f"input: {found.files:,} file{'s' * (found.files != 1)}, {found.total_bytes / 1e6:,.1f} MB; read: {read}")
    if found.beginning:
        print(f"first document: {found.beginning}")
    if found.skipped:
        print(f"{len(found.skipped):,} unreadable records in it, to be skipped (first: {found.skipped[0]})")
    for prefix, counts in zip(config.prefixes, found.by_key, strict=True):
        documents, tokens = (round(found.factor * count) for count in (counts.documents, counts.tokens))
        print(
            f"{prefix}.{{bin,idx,json}}: {about}{documents:,} documents, {tokens:,} tokens, "
            f"{found.token_bytes * tokens / 1e6:,.1f} MB; "
            f"{unknown_share(counts.unknown_tokens, counts.tokens, counts.dropped_characters)}"
        )
    seconds = found.factor * found.seconds / config.workers
    print(f"time: about {duration(seconds)} with --workers {config.workers}; nothing written")
    for warning in found.warnings:
        print(warning, file=sys.stderr)


def main() -> None:
    flags = vars(build_parser().parse_args())
    dry_run = flags.pop("dry_run")
    arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in flags.items()}
    config = PreprocessConfig(**arguments)
    if dry_run:
        print_estimate(config)
        return
    exit_on_sigterm()  # so that what is done is kept
    result = preprocess(config)
    print(result.summary())
    if config.partition is None:
        print(f"next: {training_command(result.prefixes[0])}")
