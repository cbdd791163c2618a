"""A model, its steps, batch and rate for a text, a device and some hours, with the commands to run: a first guess.

With --load, an encoder to continue instead of a new model: whether it fits, batch, steps, rate, row length, memory and
time, and the commands to the end: import, preprocess, continue, export, and judge beside the unchanged one if --train
and --valid name a task. --run runs them one after the other; after a stop, the same command skips the finished ones
and resumes.

    megatron-ddrp plan --load THEIRS --input field.jsonl --train train.csv --valid valid.csv --hours 8 --run
    megatron-ddrp plan --load THEIRS --tokens 50M --device rtx-3060

Without --load, a new model: five shapes of 2 to 12 layers, and with --max-layers 24 a sixth, get the steps that fit
into the hours, at most 40 epochs. The suggested shape is the smallest one that ties with the best by a published law
for repeated text; no loss is predicted (docs/plan.md).
A device of the list is estimated by published peaks. Without --device, this machine's GPU or CPU is measured: three
steps per shape, a minute or two in all.

    megatron-ddrp plan --tokens 50M --vocab-size 32000 --device rtx-3060 --hours 24
    megatron-ddrp plan --tokens 2B --device h100 --world-size 8 --hours 48 --max-layers 24
    megatron-ddrp plan --tokens 17M --vocab-size 8000 --hours 2 --data-path corpus_text_document

megatron-ddrp preprocess prints the tokens of a dataset. English text has about one per 4 bytes: 77 MB are about 19M.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.commands.convert import OtherVocabulary
from megatron_ddrp.commands.options import SHAPES, Plan
from megatron_ddrp.config.reading import Section, flag, option, refuse
from megatron_ddrp.data.dataset.indexed_dataset import TokenizerFlags
from megatron_ddrp.data.preprocess.inputs import INPUT_HELP
from megatron_ddrp.run.devices import LISTED

UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def read_number(text: str) -> float:
    """Return 50M, or 50,000,000, as a number."""
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", text):
        text = text.replace(",", "")
    try:
        return float(text[:-1]) * UNITS[text[-1].upper()] if text[-1:].upper() in UNITS else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number such as 50M or 2B") from None


@dataclass(frozen=True)
class Text(Section):
    """text"""

    tokens: float | None = option(
        None,
        "different tokens of the text, as 50M or 2B (default with --load: of --data-path, or of a part of --input)",
        within="[1, 1e15]",
        word=read_number,
        metavar="N",
    )
    vocab_size: int | None = option(
        None, "pieces of a new model's vocabulary (default: those of --data-path, else 30522)", within="[100, 10000000]"
    )
    data_path: str | None = option(
        None, "dataset of the commands (default: corpus_text_document; with --load the one that they make)", metavar="P"
    )


@dataclass(frozen=True)
class PlanMachine(Section):
    """machine"""

    device: str | None = option(
        None, "a device that need not be here (default: this machine's GPU or CPU, measured)", choices=LISTED
    )
    world_size: int = option(1, "with --device: number of GPUs", within="[1, 1000000]")
    hours: float = option(24.0, "longest time of the run", within="(0, 1000000]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_size > 1 and self.device is None:
            refuse("--world-size needs --device: only one process of this machine is measured")


@dataclass(frozen=True)
class PlanSizes(Section):
    """model"""

    seq_length: int = option(128, "tokens per row", within="[3, 65536]")
    max_layers: int = option(
        12, "most layers of a new model; 24 for BERT's large shape", choices=tuple(s.num_layers for s in SHAPES)
    )


@dataclass(frozen=True)
class Continuing(OtherVocabulary):
    """continuing an encoder, with its own vocabulary or another one"""

    load: Path | None = option(None, "a Hugging Face folder, or a name on the hub, to continue", metavar="DIR")
    generator: Path | None = option(None, "the generator of an ELECTRA discriminator (default: new)", metavar="HF_DIR")
    input: tuple[str, ...] | None = option(None, INPUT_HELP, nargs="+", metavar="FILE")
    train: Path | None = option(None, "training rows of a task, for finetune", metavar="F")
    valid: Path | None = option(None, "validation rows of the task", metavar="F")
    output_dir: Path | None = option(None, "folder of all that the commands write (default: road)", metavar="OUT")
    run: bool = option(False, "run the commands on this machine, without those that an earlier --run has finished")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("generator", "input", "train", "valid", "output_dir", "run", *TokenizerFlags._fields):
            if getattr(self, name) and self.load is None:
                refuse(f"{flag(name)} needs --load: give the encoder to continue, or leave it out")
        if (self.train is None) != (self.valid is None):
            refuse("--train and --valid belong together: give both files of the task, or neither")


SECTIONS = (Text, PlanMachine, PlanSizes, Continuing)


def main(words: Sequence[str] | None = None) -> Plan:
    options = parse_sections(ArgumentParser(description=__doc__), SECTIONS, words, plugins=False)
    if options.load is None:
        if options.tokens is None:
            refuse("--tokens is needed: megatron-ddrp preprocess prints those of a text")
        options.data_path = options.data_path or "corpus_text_document"
        from megatron_ddrp.commands.planning import make_plan

        return make_plan(options)
    for section, name in ((Text, "vocab_size"), (PlanSizes, "max_layers")):
        if getattr(options, name) != getattr(section, name):
            refuse(f"{flag(name)} is for a new model, and --load names a trained one: leave one of them out")
    if not options.input and not options.data_path and (options.run or not options.tokens):
        refuse("--load needs a text: give --input FILE, or --data-path of a dataset with the encoder's vocabulary")
    if options.input and options.data_path:
        refuse("--input and --data-path exclude each other: give the text, or the dataset that is made of it")
    if options.run and options.device:
        refuse("--run is for this machine: leave --device out, or run the printed commands there")
    from megatron_ddrp.commands.continuing import continue_encoder

    options.output_dir = options.output_dir or Path("road")
    return continue_encoder(options)
