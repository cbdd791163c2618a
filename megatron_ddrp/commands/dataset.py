"""Look into indexed datasets (PREFIX.bin and .idx, ours or Megatron-LM's), check them, join them, and shuffle them.

    megatron-ddrp dataset inspect data/wiki_text_document --vocab-file vocab.txt
    megatron-ddrp dataset verify data/wiki_text_document --vocab-file vocab.txt
    megatron-ddrp dataset merge --output-prefix data/all data/wiki_text_document data/books_text_document
    megatron-ddrp dataset shuffle --output-prefix data/mixed data/all

`megatron-ddrp dataset COMMAND --help` explains a command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path

from megatron_ddrp.cli import Subcommand, parse_subcommand
from megatron_ddrp.commands.options import GivenTokenizer, training_command
from megatron_ddrp.config.reading import SEED, Section, option, refuse
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.dataset.dataset_index import dataset_path, file_size
from megatron_ddrp.data.dataset.indexed_dataset import (
    IndexedDataset,
    TokenizerFlags,
    complete,
    entry,
    read_manifest,
    recorded_flags,
)
from megatron_ddrp.data.dataset.merging import merge, shuffle
from megatron_ddrp.data.dataset.verification import DatasetSummary, check_tokenizer, first_documents, summarize, verify
from megatron_ddrp.data.preprocess.pipeline import exit_on_sigterm
from megatron_ddrp.data.progress import reading_progress
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import FAILURE, UserError

INSPECT = """Show a dataset: counts, lengths of its documents, and its first documents as text.

    megatron-ddrp dataset inspect data/wiki_text_document
    megatron-ddrp dataset inspect data/wiki_text_document --vocab-file vocab.txt --documents 10
    megatron-ddrp dataset inspect data/wiki_text_document --output lengths.png
"""
VERIFY = """Check a dataset and print one line per fault with its place; exit code 1 if there is any.

Checked are the header, every sequence's and document's place, the size of the .bin, every id against the vocabulary (of
the tokenizer given, else as the manifest says), and against the manifest: counts, tokenizer, SHA-256 of both files.

    megatron-ddrp dataset verify data/wiki_text_document
    megatron-ddrp dataset verify data/wiki_text_document --vocab-file vocab.txt --tokenizer-type BertWordPieceCase
"""
MERGE = """Join datasets: the documents of the inputs one after another, as one dataset.

The inputs may differ in type (uint16 and int32 give int32), and are refused if their manifests name different
tokenizers. The output appears under its name when it is complete. Its manifest adds theirs up; it has none where an
input has none. Parts that `preprocess --partition` wrote may come in any order; they give the files of one run over the
whole input, and a missing, repeated or foreign part is an error.

    megatron-ddrp dataset merge --output-prefix data/all data/wiki_text_document data/books_text_document
    megatron-ddrp dataset merge --output-prefix data/all shards/*.idx
    megatron-ddrp dataset merge --output-prefix data/wiki_text_document data/wiki_part*_text_document.idx
"""
SHUFFLE = """Write the documents of a dataset in a random order, so that --split gives training and validation the same.

A run's --split divides documents in order: after articles and then novels, validation would be novels alone. Documents
stay whole, and their order is a function of --seed and of their number. The output appears under its name when it is
complete; with --overwrite it may have the name of the input. The documents are read in their new order, so data that
are larger than the memory should lie on an SSD.

    megatron-ddrp dataset shuffle --output-prefix data/mixed data/all
"""


@dataclass(frozen=True)
class Dataset(Section):
    """dataset"""

    prefix: str = option(MISSING, "prefix of the dataset; P.bin and P.idx name it too", metavar="P", positional=True)


@dataclass(frozen=True)
class Shown(Section):
    """contents"""

    documents: int = option(3, "documents to show", within="[0, 2147483648)")
    tokens: int = option(64, "tokens to show of each", within="[0, 2147483648)")
    output: Path | None = option(
        None, "also write the counts, .json, or draw the lengths, .png (with .pdf and .svg)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None and self.output.suffix not in (".json", ".png"):
            refuse(f"--output {self.output}: expected a name that ends in .json or .png")


@dataclass(frozen=True)
class Datasets(Section):
    """datasets"""

    input: tuple[str, ...] = option(
        MISSING, "prefix of a dataset; IN.bin and IN.idx name it too", nargs="+", metavar="IN", positional=True
    )


@dataclass(frozen=True)
class Order(Section):
    """order"""

    seed: int = option(1234, "number that decides the order", within=SEED)


@dataclass(frozen=True)
class OutputDataset(Section):
    """output"""

    output_prefix: str = option(MISSING, "path and name of the result, without .bin", metavar="P")
    overwrite: bool = option(False, "replace a dataset that exists")


SUBCOMMANDS = {
    "inspect": Subcommand("counts, lengths, first documents", INSPECT, (Dataset, GivenTokenizer, Shown)),
    "verify": Subcommand("say exactly what is wrong where", VERIFY, (Dataset, GivenTokenizer)),
    "merge": Subcommand("several datasets → one", MERGE, (Datasets, OutputDataset)),
    "shuffle": Subcommand("documents in a random order", SHUFFLE, (Dataset, Order, OutputDataset)),
}


def given_tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    """Return the tokenizer that the flags name, or None where they name none."""
    flags = TokenizerFlags.of(arguments)
    if flags == TokenizerFlags():
        return None
    with contextlib.suppress(UserError):  # verify says it better
        flags = complete(flags, [arguments.prefix])
    return flags.build()


def recorded_tokenizer(dataset: IndexedDataset) -> Tokenizer | None:
    """Return the tokenizer that the manifest names, or None where its vocabulary is not there any more, or changed."""
    flags = recorded_flags(dataset.prefix)
    with contextlib.suppress(UserError):
        tokenizer = flags.build()
        if entry(dataset.manifest, "tokenizer").get("fingerprint") == tokenizer.fingerprint:
            return tokenizer
    return None


def run_inspect(arguments: argparse.Namespace) -> None:
    """Print the contents of a dataset."""
    output = arguments.output
    dataset, tokenizer = IndexedDataset(arguments.prefix), given_tokenizer(arguments)
    if tokenizer is not None:
        check_tokenizer(dataset.prefix, tokenizer)
    else:
        tokenizer = recorded_tokenizer(dataset)
    summary = summarize(dataset)
    print(dataset.prefix)
    for line in summary.lines():
        print(line)
    for document, size, text in first_documents(dataset, arguments.documents, arguments.tokens, tokenizer):
        print(f"\ndocument {document}, {size:,} tokens: {text}")
    print(f"\ntrain on it: {training_command(dataset.prefix, dataset.num_tokens, dataset.num_documents)}")
    if output is None:
        return
    if output.suffix == ".json":
        write_text(output, json.dumps(asdict(summary), indent=2) + "\n")
    else:
        draw_lengths(summary, Path(dataset.prefix).name, output)
    print(f"\n{output}{' with .pdf and .svg' * (output.suffix == '.png')} written")


def draw_lengths(summary: DatasetSummary, title: str, path: Path) -> None:
    """Draw the histogram of document lengths."""
    from megatron_ddrp.pages.plotting import COLORS, figure_tools, save_figure, thousands, wrap_title

    plt = figure_tools()
    figure, axes = plt.subplots(figsize=(8, 4.4))
    names = [f"{low:,}" if low == high else f"{low:,}–{high:,}" for low, high, _ in summary.histogram]
    bars = axes.bar(names, [count for _, _, count in summary.histogram], color=COLORS[0])
    axes.bar_label(bars, fmt="{:,.0f}", fontsize="small")
    axes.margins(y=0.12)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.yaxis.set_major_formatter(lambda value, _: thousands(value))
    axes.set(title=wrap_title(title, 8), xlabel="tokens per document", ylabel="documents")
    save_figure(figure, path)


def run_verify(arguments: argparse.Namespace) -> int:
    """Print the faults of a dataset; return 1 if there are any."""
    prefix = os.fspath(dataset_path(arguments.prefix, ""))
    file_size(dataset_path(prefix, ".idx"))
    tokenizer = given_tokenizer(arguments)
    bin_path = dataset_path(prefix, ".bin")
    findings = 0
    with reading_progress([os.fspath(bin_path)] if bin_path.is_file() else []) as progress:
        for finding in verify(prefix, tokenizer, progress.update):
            findings += 1
            (progress.write if sys.stderr.isatty() else print)(finding)
    if findings:
        print(f"{prefix}: {findings} finding{'s' if findings > 1 else ''}")
        return FAILURE
    manifest, dataset = read_manifest(prefix) or {}, IndexedDataset(prefix)
    pieces = tokenizer.vocab_size if tokenizer else (manifest.get("tokenizer") or {}).get("vocab_size")
    vocabulary = "vocabulary unknown, no id negative" if pieces is None else f"ids below {pieces:,}"
    hashes = "SHA-256 as in the manifest" if manifest.get("files") else "no SHA-256 recorded"
    counts = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens as {dataset.dtype.name}"
    print(f"{prefix}: sound; {counts}, {vocabulary}, {hashes}")
    return 0


def run_merge(arguments: argparse.Namespace) -> None:
    """Join datasets and print the counts of the result."""
    exit_on_sigterm()  # so that unfinished files are removed
    paths = [dataset_path(prefix, ".bin") for prefix in arguments.input]
    with reading_progress([os.fspath(path) for path in paths]) as progress:
        merged = merge(arguments.output_prefix, arguments.input, arguments.overwrite, progress.update)
    counts = f"{merged.num_documents:,} documents, {merged.num_tokens:,} tokens as {merged.dtype.name}"
    manifest = ", without a manifest, as an input has none" if merged.manifest is None else ""
    print(f"{len(paths)} datasets, {counts}{manifest} → {merged.prefix}.{{bin,idx}}")


def run_shuffle(arguments: argparse.Namespace) -> None:
    """Shuffle a dataset and print the counts of the result."""
    exit_on_sigterm()  # so that unfinished files are removed
    path = dataset_path(arguments.prefix, ".bin")
    passes = 1 if read_manifest(arguments.prefix) is None else 2  # the first one for its SHA-256
    with reading_progress([os.fspath(path)] * passes) as progress:
        output = arguments.output_prefix, arguments.prefix, arguments.seed, arguments.overwrite
        shuffled = shuffle(*output, progress.update)
    print(f"{shuffled.num_documents:,} documents, shuffled by seed {arguments.seed} → {shuffled.prefix}.{{bin,idx}}")


def main(words: Sequence[str] | None = None) -> int | None:
    arguments = parse_subcommand(str(__doc__), SUBCOMMANDS, words, plugins=False)
    commands = {"inspect": run_inspect, "verify": run_verify, "merge": run_merge, "shuffle": run_shuffle}
    return commands[arguments.command](arguments)
