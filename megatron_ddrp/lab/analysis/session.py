"""Common parts of the analyses of checkpoints: checked flags, models loaded one by one, progress bar, output files."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ddrp.checkpoint import STATE, read_config
from megatron_ddrp.config import Config
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.blend import read_blend
from megatron_ddrp.data.progress import progress
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, need_packages
from megatron_ddrp.lab.analysis.models import Loaded, Snapshot, beside_random_weights, find_snapshots
from megatron_ddrp.lab.analysis.sentences import SentenceBatches, Sentences, TextSentences, draw_texts
from megatron_ddrp.model.gpus import named_device


@dataclass(frozen=True)
class View:
    """One model on the device, and the sentences to run through it."""

    snapshot: Snapshot
    model: Any
    """`Encoder`, or the encoder of transformers that the session's `load` returned."""
    position_encoding: str | None
    sentences: SentenceBatches
    device: torch.device
    batch_size: int
    advance: Callable[[int], object]
    """Function that moves the progress bar by a number of sentences."""

    def batches(self) -> Iterator[Batch]:
        """Yield the sentences as batches on the device; move the progress bar after each batch."""
        for arrays in self.sentences.batches(self.batch_size):
            yield arrays.map(lambda array: torch.from_numpy(array).to(self.device))
            self.advance(len(arrays.input_ids))

    def facts(self) -> dict[str, Any]:
        """Return the model's own fields of its row in the JSON."""
        return {
            "run": self.snapshot.run,
            "checkpoint": str(self.snapshot.path),
            "iteration": self.snapshot.iteration,
            "consumed_tokens": self.snapshot.consumed_tokens,
            "position_encoding": self.position_encoding,
            "sentences": len(self.sentences),
            "max_length": self.sentences.max_length,
        }


class Session:
    """One run of an analysis. Raises `UserError` for invalid flags before anything is computed.

    `load` reads a model. The analysis calls `View.batches` `passes` times per model.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        every_checkpoint: bool,
        load: Callable[[Snapshot], Loaded] = Snapshot.load,
        passes: int = 1,
    ) -> None:
        self.arguments, self.load, self.passes = arguments, load, passes
        self.output = Output(arguments.output)
        self.prefixes = _prefixes(arguments.data_path) if arguments.data_path else ()
        self.device = named_device(arguments.device, f"--device {arguments.device}")
        self.snapshots = find_snapshots(arguments.load, every_checkpoint)
        if getattr(arguments, "random_init", False):
            self.snapshots = beside_random_weights(self.snapshots, arguments.seed)
        paths = [snapshot.path for snapshot in self.snapshots]
        configs = [read_config(path) for path in paths if (path / STATE).is_file()]
        first = configs[0] if configs else Config()
        self.split = arguments.split or first.data.split or "0,1,0"  # 0,1,0 if the run had separate validation data
        self.seq_length = _common_length(self.snapshots, arguments.max_length)
        text = getattr(arguments, "text", None)
        self.texts = None if text is None else draw_texts(text, arguments.sentences, arguments.seed)

    def views(self) -> Iterator[View]:
        """Yield one view per model; load each model only when its turn comes."""
        total = len(self.snapshots)
        with progress("sentence") as bar:
            for number, snapshot in enumerate(self.snapshots):
                loaded = self.load(snapshot)
                sentences = self._sentences(loaded)
                bar.total = bar.n + (total - number) * len(sentences) * self.passes
                name = f"{snapshot.run} {snapshot.path.name}" if total > 1 else snapshot.run
                bar.set_description(name, refresh=False)
                model, batch_size = loaded.model.to(self.device), self.arguments.batch_size
                yield View(snapshot, model, loaded.position_encoding, sentences, self.device, batch_size, bar.update)

    def _sentences(self, loaded: Loaded) -> SentenceBatches:
        seq_length = self.seq_length or loaded.seq_length
        max_length = min(self.arguments.max_length or seq_length, seq_length, loaded.seq_length)
        if self.texts is not None:
            return TextSentences(self.texts, loaded.tokenizer, max_length)
        count, seed = self.arguments.sentences, self.arguments.seed
        return Sentences(self.prefixes, self.split, loaded.tokenizer, seq_length, max_length, count, seed)

    def write(self, result: dict[str, Any], draw: Callable[[Path], None]) -> None:
        """Write the JSON with the settings of the run, and the figure if `--output` is one; print their names."""
        if self.texts is None:
            source: dict[str, Any] = {"data_path": list(self.prefixes), "split": self.split}
        else:
            source = {"text": self.arguments.text}
        about = {"analysis": self.arguments.command, **source, "seed": self.arguments.seed}
        self.output.write(about | result, draw)


def _common_length(snapshots: Sequence[Snapshot], max_length: int | None) -> int | None:
    """Return the longest sequence that every model has positions for, in tokens; None if no configuration says it.

    Print a line if one model shortens the sentences of the others.
    """
    lengths = {snapshot: length for snapshot in snapshots if (length := snapshot.seq_length()) is not None}
    if not lengths:
        return None
    shortest = min(lengths, key=lambda snapshot: lengths[snapshot])
    least = lengths[shortest]
    if least < min(max(lengths.values()), max_length or math.inf):
        print(
            f"{shortest.run} takes at most {least} tokens: the sentences of all models are cut to {least}", flush=True
        )
    return least


class Output:
    """Files of `--output`: JSON, and a figure (.png, .pdf and .svg) if the name ends in .png.

    Raises `UserError` for another ending, and for a figure if matplotlib is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix not in (".png", ".json"):
            raise UserError(f"--output {path}: expected a name that ends in .png or .json", WRONG_ARGUMENTS)
        self.draws = path.suffix == ".png"
        if self.draws:
            need_packages(f"--output {path}: a figure, unlike .json,", "matplotlib")

    def write(self, result: dict[str, Any], draw: Callable[[Path], None]) -> None:
        """Write the JSON, and the figure if `--output` is one; print their names. Raises `UserError` for nan."""
        written = self.path.with_suffix(".json")
        try:
            text = json.dumps(result, indent=1, allow_nan=False)
        except ValueError:
            reason = "some numbers are not finite: use a checkpoint that has not diverged"
            raise UserError(f"{written}: not written, {reason}") from None
        write_text(written, text + "\n")
        if self.draws:
            draw(self.path)
        print(f"{self.path}, .pdf, .svg and {written} written" if self.draws else f"{written} written")


def _prefixes(data_path: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes of `--data-path`. Raises `UserError` for weights."""
    blend = read_blend(data_path, "--data-path")
    if blend.weights is not None:
        raise UserError("--data-path has weights: an analysis takes prefixes only; leave them out", WRONG_ARGUMENTS)
    return tuple(blend.prefixes)
