"""Published recipes of encoders, and what `megatron-ddrp plan` says about the same GPUs, hours and text."""

from __future__ import annotations

from typing import NamedTuple

import measure  # noqa: F401  (puts the repository on the import path)

from megatron_ddrp.cli import ArgumentParser, parse_sections
from megatron_ddrp.commands.plan import SECTIONS
from megatron_ddrp.commands.planning import candidate
from megatron_ddrp.commands.speed import ListedDevice
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.sizing import SHAPES, Shape, best_shape


class Recipe(NamedTuple):
    """A published run."""

    source: str
    shape: Shape
    device: str
    """The GPU, or the one nearest to it in the table of devices."""
    gpus: str
    ranks: int
    hours: float
    different: float
    """Different tokens of its text."""
    seen: float | None
    """Tokens that it saw; None if the source does not give them."""
    length: int = 128


BASE, LARGE = Shape(12, 768, 12), Shape(24, 1024, 16)
RECIPES = (
    Recipe("ELECTRA-small, 2003.10555", Shape(12, 256, 4), "v100", "1 V100", 1, 96, 3.3e9, 1e6 * 128 * 128),
    Recipe("cramming, 2212.14034", BASE, "rtx-3090", "1 A6000 or 2080 Ti", 1, 24, 3.3e9, None),
    Recipe("academic budget, 2104.07705", LARGE, "v100", "8 Titan V, 12 GB", 8, 24, 3.3e9, None),
    Recipe("BERT-base of MosaicBERT, 2312.17482", BASE, "a100", "8 A100", 8, 11.5, 156e9, 7e4 * 4096 * 128),
    Recipe("RoBERTa-large, 1907.11692", LARGE, "v100", "1,024 V100", 1024, 24, 3.9e9, 1e5 * 8192 * 512, 512),
    Recipe("ModernBERT-base, 2412.13663", Shape(22, 768, 12), "h100", "8 H100", 8, 194, 2e12, 2e12, 512),
)
"""Published runs with arXiv's numbers. ModernBERT's rows had 1,024 tokens, two of three layers with local attention;
rows of 512 cost about as much."""


def recipes() -> str:
    """Return the table of the published recipes beside their plans."""
    rows = []
    for one in RECIPES:
        words = ["--tokens", f"{one.different:.0f}", "--device", one.device, "--world-size", f"{one.ranks}"]
        words += ["--hours", f"{one.hours:g}", "--seq-length", f"{one.length}", "--max-layers", "24"]
        options = parse_sections(ArgumentParser(), SECTIONS, words, plugins=False)
        device = ListedDevice(one.device, one.ranks)
        same = candidate(one.shape, options, device)
        assert same is not None
        tokens = same.settings["global_batch_size"] * one.length
        hours = None if one.seen is None else one.seen * same.step.seconds / tokens / 3600
        ladder = [found for shape in SHAPES if (found := candidate(shape, options, device))]
        best = best_shape({found.shape: found.seen for found in ladder}, one.different)
        chosen = next(found for found in ladder if found.shape == best)
        rows.append(
            [
                *(one.source, str(one.shape), one.gpus, f"{one.hours:g}", billions(one.seen)),
                *(one.device.upper(), "–" if hours is None else f"{hours:.3g}", billions(same.seen), str(best)),
                f"{chosen.seen / one.different:.2g}",
            ]
        )
    head = ["recipe", "shape", "GPUs", "hours", "billion tokens", "plan's GPU", "hours for the same tokens"]
    head += ["billion tokens of this shape", "suggested", "its epochs"]
    return str(Table(head, rows, wordy=(0, 1, 2, 5, 8)))


def billions(tokens: float | None) -> str:
    return "–" if tokens is None else f"{tokens / 1e9:,.3g}" if tokens < 1e12 else f"{tokens / 1e9:,.0f}"
