"""What the analyses of checkpoints share: flags checked, models loaded one after the other, progress, and the JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_ddrp.analysis import figures
from megatron_ddrp.analysis.models import Snapshot, find_all
from megatron_ddrp.analysis.sentences import Sentences
from megatron_ddrp.checkpoint import STATE, read_config
from megatron_ddrp.config import Config
from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.data.batches.blend import read_blend
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model import Encoder

SHORTEST = 3
"""[CLS], one token, [SEP]."""
DEFAULT_SPLIT = Config().data.split or ""


@dataclass(frozen=True)
class Viewed:
    """A model ready to be looked at, and the sentences to show it."""

    snapshot: Snapshot
    model: Encoder
    config: Config
    sentences: Sentences


class Session:
    """One run of an analysis. Raises `UserError` for flags that cannot be followed, before anything is computed."""

    def __init__(self, arguments: argparse.Namespace, every_checkpoint: bool) -> None:
        self.arguments = arguments
        self.output: Path = arguments.output
        if self.output.suffix not in (".png", ".json"):
            raise UserError(f"--output {self.output}: expected a name that ends in .png or .json", WRONG_ARGUMENTS)
        if self.draws:
            figures.pyplot()
        for name, least in (("sentences", 1), ("batch_size", 1), ("max_length", SHORTEST)):
            value = getattr(arguments, name)
            if value is not None and value < least:
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} is {value}: it must be at least {least}", WRONG_ARGUMENTS)
        blend = read_blend(arguments.data_path, "--data-path")
        if blend.weights is not None:
            raise UserError("--data-path with weights: an analysis takes prefixes alone, all as one", WRONG_ARGUMENTS)
        self.prefixes = blend.prefixes
        self.device = find_device(arguments.device)
        self.snapshots, self.notes = find_all(arguments.load, every_checkpoint)
        configs = stored_configs(self.snapshots)
        self.split = arguments.split or (own_split(configs[0]) if configs else DEFAULT_SPLIT)
        self.seq_length = min((config.model.seq_length for config in configs), default=None)

    @property
    def draws(self) -> bool:
        """Whether a figure is wanted beside the JSON."""
        return self.output.suffix == ".png"

    def views(self) -> Iterator[tuple[Viewed, Callable[[int], object]]]:
        """Each model on the device with its sentences, and what is to hear of every batch done."""
        for note in self.notes:
            print(note, file=sys.stderr)
        arguments, total = self.arguments, len(self.snapshots)
        seldom: dict[str, Any] = {} if sys.stderr.isatty() else {"delay": 10, "mininterval": 10}
        with tqdm(unit="sentence", dynamic_ncols=True, leave=False, file=sys.stderr, **seldom) as bar:
            for number, snapshot in enumerate(self.snapshots):
                model, tokenizer, config = snapshot.load()
                seq_length = self.seq_length or config.model.seq_length
                max_length = min(arguments.max_length or seq_length, seq_length)
                sentences = Sentences(
                    self.prefixes, self.split, tokenizer, seq_length, max_length, arguments.sentences, arguments.seed
                )
                bar.total = bar.n + (total - number) * len(sentences)
                bar.set_description(
                    f"{snapshot.run} {snapshot.path.name}" if total > 1 else snapshot.run, refresh=False
                )
                yield Viewed(snapshot, model.to(self.device), config, sentences), bar.update

    def write(self, result: dict[str, Any], draw: Callable[[Path], None]) -> None:
        """Write the JSON, and the figure where one is wanted; say so."""
        about = {
            "analysis": self.arguments.command,
            "data_path": list(self.prefixes),
            "split": self.split,
            "seed": self.arguments.seed,
        }
        with AtomicFile(self.output.with_suffix(".json")) as stream:
            stream.write((json.dumps(about | result, indent=1) + "\n").encode())
        if self.draws:
            draw(self.output)
        written = [str(self.output)] + ([str(self.output.with_suffix(".json"))] if self.draws else [])
        print(f"{' and '.join(written)} written")


def describe(viewed: Viewed) -> dict[str, Any]:
    """Which model a row of the JSON is about."""
    model, snapshot = viewed.config.model, viewed.snapshot
    return {
        "run": snapshot.run,
        "checkpoint": str(snapshot.path),
        "iteration": snapshot.iteration,
        "consumed_tokens": snapshot.consumed_tokens,
        "position_encoding": model.position_encoding,
        "sentences": len(viewed.sentences),
        "max_length": viewed.sentences.max_length,
    }


def own_split(config: Config) -> str:
    """The split a run was trained with; where it named its validation data, all of it."""
    return config.data.split or "0,1,0"


def find_device(name: str | None) -> torch.device:
    """`--device`, by default a GPU where there is one. Raises `UserError` for one that is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        allowed = "expected cpu, or cuda where torch sees a GPU"
        raise UserError(f"--device {name}: {reason}; {allowed}", WRONG_ARGUMENTS) from None
    return device


def stored_configs(snapshots: Sequence[Snapshot]) -> list[Config]:
    """Return the configurations of those that are checkpoints of ours."""
    return [read_config(snapshot.path) for snapshot in snapshots if (snapshot.path / STATE).is_file()]
