"""A model, its steps, batch and rate for a text, a device and some hours, with the commands to run: a first guess.

Five shapes of 2 to 12 layers, and with --max-layers 24 a sixth, get the steps that fit into the hours, at most 40
epochs. The suggested shape is the smallest one that ties with the best by a published law for repeated text; no loss is
predicted (docs/plan.md).
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
from dataclasses import MISSING, dataclass

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.commands.options import SHAPES, Plan
from megatron_ddrp.config.reading import Section, option, refuse
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

    tokens: float = option(
        MISSING, "different tokens of the text, such as 50M or 2B", within="[1, 1e15]", word=read_number, metavar="N"
    )
    vocab_size: int = option(30522, "pieces of the vocabulary", within="[100, 10000000]")
    data_path: str = option("corpus_text_document", "dataset that the printed commands name", metavar="P")


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
    max_layers: int = option(12, "most layers; 24 for BERT's large shape", choices=tuple(s.num_layers for s in SHAPES))


SECTIONS = (Text, PlanMachine, PlanSizes)


def main(words: Sequence[str] | None = None) -> Plan:
    options = parse_sections(ArgumentParser(description=__doc__), SECTIONS, words, plugins=False)
    from megatron_ddrp.commands.planning import make_plan

    return make_plan(options)
