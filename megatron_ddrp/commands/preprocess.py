"""Text → Megatron indexed dataset (PREFIX_text_document.bin, .idx and .json).

Each document becomes one sequence of token ids, without [CLS] and [SEP]: the sample builder adds them. The .json holds
the numbers of documents and tokens, the tokenizer and the input files. The dataset appears when it is complete. The
same command resumes a run that was killed. On several machines, each takes a part of the input with --partition, and
`megatron-ddrp dataset merge` joins the parts into the files that one run would have written.

    megatron-ddrp preprocess --input wiki.jsonl --output-prefix data/wiki --vocab-file vocab.txt --workers 8
    megatron-ddrp preprocess --input shards/ 'more/*.txt.gz' --output-prefix data/all --vocab-file vocab.txt
    zcat dump.jsonl.gz | megatron-ddrp preprocess --input - --output-prefix data/dump --vocab-file vocab.txt
    megatron-ddrp preprocess --partition 3/16 --input shards/ --output-prefix data/all --vocab-file vocab.txt
"""

from __future__ import annotations

from typing import Any

from megatron_ddrp.cli import ArgumentParser
from megatron_ddrp.data.dataset.recorded_tokenizer import training_command
from megatron_ddrp.data.preprocess.flags import add_input, add_tokenizer
from megatron_ddrp.data.preprocess.partition import parse_partition
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.data.preprocess.signals import exit_on_sigterm


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
    output.add_argument("--append-eod", action="store_true", help="end each document with [SEP]")
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
    return parser


def main() -> None:
    flags = vars(build_parser().parse_args())
    arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in flags.items()}
    config = PreprocessConfig(**arguments)
    exit_on_sigterm()  # so that what is done is kept
    result = preprocess(config)
    print(result.summary())
    if config.partition is None:
        print(f"next: {training_command(result.prefixes[0])}")
