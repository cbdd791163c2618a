"""The command line of `megatron-ddrp pretrain`, derived from the dataclasses of `megatron_ddrp.config`.

Order of precedence: defaults, then `--config FILE`, then flags; `--deepspeed_config` decides what neither gives.
Flags of Megatron-LM's scripts are read as `config/translation.py` says.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ddrp.cli import ArgumentParser, add_flags, add_plugin_flag, flags_of, given_options
from megatron_ddrp.config import Config, OptimizerConfig, concerns, flag
from megatron_ddrp.config.reading import COUNT, POSITIVE, Section, flag_words, option, options_of, refuse
from megatron_ddrp.config.run import WARMUP_SHARE, WARMUP_STEPS, config_of, idle_settings, read_config, under_flags
from megatron_ddrp.config.translation import (
    HINTS,
    Found,
    check_against,
    decisions,
    differing_defaults,
    global_batch_of,
    load_file,
    translate,
)
from megatron_ddrp.run.launch import launched_world_size

DESCRIPTION = """\
Pre-train a BERT-class encoder. `megatron-ddrp pretrain …` is one process; `deepspeed --module megatron_ddrp pretrain …`
uses every GPU of this machine, or of the machines in a --hostfile. In a checkout `deepspeed pretrain_bert.py …` does
the same. The defaults are the base model and hyper-parameters of "Better Pre-Training by Reducing Representation
Confusion" (appendix A)."""

EPILOG = """\
example:
  megatron-ddrp pretrain --data-path corpus_text_document --save run --load run \\
      --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --global-batch-size 64 \\
      --train-iters 5000 --lr 1e-3

The same command with --load run resumes where it stopped. --dry-run prints what a run would do and writes nothing.
Flags of Megatron-LM's BERT scripts are understood too: docs/foreign-files.md."""


@dataclasses.dataclass(frozen=True)
class Invocation(Section):
    """Run"""

    config: str | None = option(
        None, "YAML with flag names as keys, or the config.json of a run; flags win", metavar="FILE"
    )
    dry_run: bool = option(
        False, "print the resolved configuration, parameters, memory by ZeRO stage and steps; write nothing"
    )
    world_size: int | None = option(
        None,
        "with --dry-run: assume N ranks (default: the number from the launcher or WORLD_SIZE, else 1)",
        within="[1, 1000000]",
    )
    vocab_size: int | None = option(
        None, "with --dry-run and without data: assume a vocabulary of N pieces (default: 30522)", within=COUNT
    )
    device_memory: float | None = option(
        None,
        "with --dry-run: refuse a layout in which a rank needs more than this many GiB",
        within=POSITIVE,
        metavar="GIB",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("world_size", "device_memory"):
            if getattr(self, name) is not None and not self.dry_run:
                refuse(f"{flag(name)} needs --dry-run: a run takes its ranks from the launcher")
        if self.vocab_size is not None and not self.dry_run:
            refuse("--vocab-size needs --dry-run: the tokenizer's file decides it in a run, so leave it out")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line."""

    config: Config
    dry_run: bool
    world_size: int | None
    """Number of ranks that a dry run assumes; None = the number that the launcher announced."""
    device_memory: float | None
    """Memory in GiB of a device, which a dry run must not exceed."""
    remarks: tuple[str, ...]
    """Lines for the user about translated flags, settings that a file decided, and settings without effect."""


class Settings(dict[str, Any]):
    """Given settings by name; `settings[name]` is the default for a setting that was not given."""

    def __missing__(self, name: str) -> Any:
        return options_of(*concerns().values())[name].default


def parse_arguments(words: Sequence[str] | None = None) -> Arguments:
    """Parse a command line (default: this process's). Raises `UserError` for wrong arguments."""
    words = sys.argv[1:] if words is None else words
    scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scout.add_argument("--config", nargs="?")
    file = scout.parse_known_args(words)[0].config  # read before the flags, which may have names from its plug-ins
    from_file, remark = read_config(file) if file else ({}, "")
    typed = CommandLine(words)
    settings = Settings(under_flags(from_file, typed.given))
    decided = decide_by_deepspeed(settings, typed.invocation.world_size or launched_world_size())
    settings = Settings(under_flags(settings, typed.settle(settings)))
    config, run = config_of(settings), typed.invocation
    if run.vocab_size is not None:
        if config.data.names_data or config.data.vocab_file or config.data.tokenizer_model:
            refuse("--vocab-size beside data or a vocabulary: these decide it, so leave it out, or leave them out")
        config = config.with_vocabulary(run.vocab_size)
    remarks = (remark, *remarks_on(typed.taken, settings, config), decided)
    remarks += (idle_remark(settings, config), warmup_remark(*config.schedule))
    return Arguments(config, run.dry_run, run.world_size, run.device_memory, tuple(filter(None, remarks)))


class CommandLine:
    """Flags of a command line: ours, and those of Megatron-LM, some of which mean what other settings decide."""

    def __init__(self, words: Sequence[str]) -> None:
        """Read the words. Raises `UserError` for a wrong value; `settle` also refuses unknown flags."""
        self._parser = build_parser()
        left, found = translate(words)
        parsed, unknown = self._parser.parse_known_args(left)
        self._refused = [(typed, self._parser.hint_for(typed)) for typed in flags_of(unknown)]
        if (file := getattr(parsed, "deepspeed", None)) is not None:
            self._refused.append((f"--deepspeed {file}", "it takes no value; give --deepspeed_config FILE"))
        self.invocation = given_options(Invocation, parsed)
        names = options_of(*concerns().values())
        self.given = {name: value for name, value in vars(parsed).items() if name in names}
        """Given settings, by name."""
        self.taken: dict[Found, Sequence[str]] = {}
        """Flag of Megatron-LM's → our words for it."""
        self._asking = [each for each in found if each.asks]
        for each in found:
            if not each.asks:
                self._add(each, each.ours({}))

    def settle(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given settings, with those of the flags whose meaning depends on `settings`.

        Raises `UserError` for every flag that is unknown, or refused beside these settings.
        """
        for found in self._asking:
            try:
                self.taken[found] = found.ours(settings)
            except ValueError as error:
                self._refused.append((found.typed, str(error)))
        if self._refused:
            self._parser.refuse(self._refused)
        for found in self._asking:
            self._add(found, self.taken[found])
        if {WARMUP_STEPS, WARMUP_SHARE} <= self.given.keys():
            self._parser.error("--lr-warmup-iters and --lr-warmup-fraction exclude each other: give one of them")
        return self.given

    def _add(self, found: Found, ours: Sequence[str]) -> None:
        """Add the settings that a flag of Megatron-LM's stands for; refuse a contradiction."""
        self.taken[found] = ours
        for name, value in vars(self._parser.parse_args(ours)).items() if ours else ():
            if self.given.setdefault(name, value) != value:
                self._parser.error(
                    f"{found.typed} is {flag(name)} {value} here, but {flag(name)} is {self.given[name]}: give one of "
                    "them"
                )


def decide_by_deepspeed(settings: Settings, world_size: int | None) -> str:
    """Add the settings that a `--deepspeed_config` file decides; return a line that lists them.

    `world_size` is the number of ranks; None if it is unknown. Raises `UserError` if the file contradicts a given
    setting.
    """
    path = settings.get("deepspeed_config")
    if not path:
        return ""
    content = load_file(path)
    decided = decisions(path, content, options_of(*concerns().values()))
    check_against(path, decided, settings)
    new = {name: decision.value for name, decision in decided.items() if name not in settings}
    settings.update(new)
    new |= {name: decision.value for name, decision in global_batch_of(path, content, settings, world_size).items()}
    settings.update(new)
    if not new:
        return ""
    settings["decided_by_deepspeed_config"] = tuple(new)
    return f"decided by --deepspeed-config {path}: " + ", ".join(f"{flag(name)} {value}" for name, value in new.items())


def remarks_on(taken: Mapping[Found, Sequence[str]], settings: Settings, config: Config) -> list[str]:
    """Return lines about Megatron-LM's flags: those without effect, renamed ones, and defaults that differ."""
    without = [found.typed for found, ours in taken.items() if not ours]
    renamed = [f"{found.typed} as {' '.join(ours)}" for found, ours in taken.items() if ours]
    if not taken:
        return []
    resolved = {name: value for concern in config.to_dict().values() for name, value in concern.items()}
    return [
        f"taken from Megatron-LM and without effect here: {', '.join(without)}" if without else "",
        f"taken from Megatron-LM: {', '.join(renamed)}" if renamed else "",
        differing_defaults(settings, resolved),
    ]


def idle_remark(settings: Settings, config: Config) -> str:
    """Return a line about given settings that differ from their defaults and have no effect; empty without one."""
    options = options_of(*concerns().values())
    idle = [
        f"{' '.join(flag_words([(name, settings[name])]))} ({reason})"
        for name, reason in idle_settings(config).items()
        if name in settings and settings[name] not in (None, options[name].default)
    ]
    return f"without effect: {', '.join(idle)}" if idle else ""


def warmup_remark(steps: int, optimizer: OptimizerConfig) -> str:
    """Return a line about a warm-up that outlasts a run of so many steps; empty without one.

    `Config` refuses it if it is given in steps; as a share of `--lr-decay-iters` it may be the start of a longer run.
    """
    warmup = optimizer.warmup_steps(steps)
    if warmup <= steps:
        return ""
    return (
        f"--lr-warmup-fraction {optimizer.lr_warmup_fraction} of --lr-decay-iters {optimizer.lr_decay_iters} is "
        f"{warmup} steps, more than --train-iters {steps}: the peak of the learning rate is never reached"
    )


def build_parser() -> ArgumentParser:
    """Return the parser: one argument group per dataclass, one flag per field made by `option`."""
    parser = ArgumentParser(
        usage="megatron-ddrp pretrain --data-path P [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    parser.hints = HINTS
    for name in ("--local-rank", "--deepspeed"):  # the launchers' own; DeepSpeed is always on
        parser.add_argument(name, nargs="?", help=argparse.SUPPRESS)
    add_flags(parser, Invocation, *concerns().values())
    add_plugin_flag(parser)
    return parser
