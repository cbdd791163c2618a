"""The command line of `pretrain_bert.py`, derived from the dataclasses of `megatron_ddrp.config`.

Order of precedence: defaults, then `--config FILE.yaml`, then flags. The YAML is flat: its keys are the flags' names.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ddrp.cli import ArgumentParser, add_flags, add_plugin_flag
from megatron_ddrp.config import Config, concerns, flag
from megatron_ddrp.config.option import check_range
from megatron_ddrp.config.reading import Place, load_yaml, options_of, read_settings

DESCRIPTION = """\
Pre-train a BERT-class encoder. `megatron-ddrp pretrain …` is one process; `deepspeed --module megatron_ddrp pretrain …`
uses every GPU of this machine, or of the machines in a --hostfile. In a checkout `deepspeed pretrain_bert.py …` does
the same. The defaults are the base model and hyper-parameters of "Better Pre-Training by Reducing Representation
Confusion" (appendix A)."""

EPILOG = """\
example:
  megatron-ddrp pretrain --data-path corpus_text_document --vocab-file vocab.txt --save run --load run \\
      --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --global-batch-size 64 \\
      --train-iters 5000 --lr 1e-3

The same command with --load run resumes where it stopped. --dry-run shows what a run would be and touches nothing."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line."""

    config: Config
    dry_run: bool
    world_size: int | None = None
    """Number of ranks that a dry run assumes; None = as many as a launcher announced."""
    device_memory: float | None = None
    """GiB of a device that a dry run must fit into."""


def parse_arguments(words: Sequence[str] | None = None) -> Arguments:
    """Parse a command line (default: this process's). Wrong arguments end the process with one line and exit code 2."""
    parser = build_parser()
    given = vars(parser.parse_args(words))
    from_file = read_yaml(given.pop("config")) if "config" in given else {}
    dry_run = given.pop("dry_run", False)
    assumed = {name: given.pop(name) for name in ("world_size", "device_memory") if name in given}
    for name, value in assumed.items():
        if not dry_run:
            parser.error(f"{flag(name)} goes with --dry-run: a run takes its ranks from the launcher")
        check_range(name, value, "[1, 1000000]" if name == "world_size" else "(0, inf)")
    for done_with in ("local_rank", "deepspeed", "plugin"):
        given.pop(done_with, None)
    return Arguments(config_of(from_file | given), dry_run, **assumed)


def build_parser() -> ArgumentParser:
    """Return the parser: one argument group per dataclass, one flag per field made by `option`."""
    parser = ArgumentParser(
        usage="megatron-ddrp pretrain --data-path P --vocab-file FILE [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    run = parser.add_argument_group("Run")
    run.add_argument("--config", metavar="FILE", help="YAML with flag names as keys; flags win")
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, parameters, memory by ZeRO stage and steps; touch nothing",
    )
    run.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="with --dry-run: as if N ranks were started (default: as many as the launcher or WORLD_SIZE says, else 1)",
    )
    run.add_argument(
        "--device-memory",
        type=float,
        metavar="GIB",
        help="with --dry-run: refuse a layout of which a rank needs more than so many GiB",
    )
    add_plugin_flag(run)
    for name in ("--local-rank", "--deepspeed"):  # the launchers' own; DeepSpeed is always on
        parser.add_argument(name, nargs="?", help=argparse.SUPPRESS)
    add_flags(parser, *concerns().values())
    return parser


def read_yaml(path: str) -> dict[str, Any]:
    """Read settings from a flat YAML file, keys with dashes or underscores, values checked as the flags' are."""
    place = Place(f"--config {path}")
    return read_settings(options_of(*concerns().values()), load_yaml(Path(path), place) or {}, place)


def config_of(values: Mapping[str, Any]) -> Config:
    """Return the configuration with these settings, by name; the others have their defaults."""
    return Config(
        **{
            concern: section(**{f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values})
            for concern, section in concerns().items()
        }
    )
