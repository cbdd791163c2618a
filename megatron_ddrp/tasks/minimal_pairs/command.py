"""Score encoders on minimal pairs, such as BLiMP, without fine-tuning.

A minimal pair is a good and a bad sentence that differ slightly, such as "The cats sleep." and "The cats sleeps.". The
command masks the pieces of a sentence in turn and adds up their log-probabilities; a pair is right if the good sentence
has the higher sum. A paradigm is a set of pairs of one kind. OUT/scores.jsonl has one line per encoder and paradigm; a
restarted command does only the missing ones, and several commands may share one OUT. OUT/table.md and OUT/results.json
have accuracies, standard errors and paired differences; OUT/heatmap.png shows all paradigms.

  plan alone     megatron-ddrp minimal-pairs --data-dir blimp --load runs/ddrp --output-dir OUT --dry-run
  first look     … --max-pairs 100
  compare        … --load runs/bert runs/ddrp
  baseline       … --load runs/ddrp --random-init --seeds 5 --output-dir RANDOM
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.config.reading import COUNT, Section, option, refuse
from megatron_ddrp.tasks.jobs import WorkerOptions
from megatron_ddrp.tasks.minimal_pairs.pairs import SCORES


def main(arguments: Sequence[str] | None = None) -> None:
    """Check the inputs, do the missing jobs, and report."""
    options = parse_arguments(arguments)
    from megatron_ddrp.tasks.minimal_pairs.scoring import run_here  # here, because it imports torch

    run_here(options)


@dataclass(frozen=True)
class PairOptions(Section):
    """pairs and encoders"""

    data_dir: Path = option(
        MISSING,
        "folder with .jsonl files, directly or in its folder data/, whose lines have sentence_good and sentence_bad",
        metavar="DIR",
    )
    load: tuple[Path, ...] = option(
        MISSING,
        "training checkpoint (megatron-ddrp pretrain --save) or Hugging Face masked LM; give several to compare them",
        nargs="+",
        metavar="DIR",
    )
    output_dir: Path = option(MISSING, "folder for scores.jsonl, results.json and the tables", metavar="OUT")
    random_init: bool = option(False, "baseline: the same architecture and tokenizer with new random weights")
    seeds: int = option(1, "with --random-init: draw the weights N times, with seeds 1 to N", within=COUNT)
    max_pairs: int | None = option(None, "score only N pairs per paradigm, always the same ones", within=COUNT)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds > 1 and not self.random_init:
            refuse(f"--seeds {self.seeds} draws random weights: it needs --random-init")


@dataclass(frozen=True)
class ScoreOptions(Section):
    """score"""

    score: str = option("l2r", "; ".join(f"{name}: {text}" for name, text in SCORES.items()), choices=tuple(SCORES))


@dataclass(frozen=True)
class PairWorkerOptions(WorkerOptions):
    """machine"""

    workers: int | None = option(
        None, "processes that share the work (default: one per GPU, else one per core, at most 8)", within=COUNT
    )
    tokens_per_batch: int | None = option(
        None,
        "pieces per forward pass; halve it if memory runs out (default: 4096 on CPUs, 131072 on GPUs)",
        within=COUNT,
    )


SECTIONS = (PairOptions, ScoreOptions, PairWorkerOptions)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = ArgumentParser(description=__doc__)
    return parse_sections(parser, SECTIONS, arguments)
