"""The command line of `pretrain_bert.py`, derived from the dataclasses of `megatron_ddrp.config`.

Order of precedence: defaults, then `--config FILE.yaml`, then flags. The YAML is flat: its keys are the flags' names.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_ddrp.cli import ArgumentParser, add_plugin_flag
from megatron_ddrp.config import Config, concerns, flag
from megatron_ddrp.config.option import check_range
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

DESCRIPTION = """\
Pre-train a BERT-class encoder. Start it with `deepspeed pretrain_bert.py …` (one or many ranks), `torchrun` or plain
`python` (one rank). The defaults are the base model and hyper-parameters of "Better Pre-Training by Reducing
Representation Confusion" (appendix A)."""

EPILOG = """\
example:
  deepspeed pretrain_bert.py --data-path corpus_text_document --vocab-file vocab.txt --save run --load run \\
      --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --global-batch-size 64 \\
      --train-iters 5000 --lr 1e-3

The same command with --load run goes on where it stopped. --dry-run shows what a run would be and touches nothing."""


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
    values = from_file | given
    sections = {
        concern: section(**{f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values})
        for concern, section in concerns().items()
    }
    return Arguments(Config(**sections), dry_run, **assumed)


def build_parser() -> ArgumentParser:
    """Return the parser: one argument group per dataclass, one flag per field made by `option`."""
    parser = ArgumentParser(
        prog="pretrain_bert.py",
        usage="deepspeed pretrain_bert.py --data-path P --vocab-file FILE [flags]",
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
    for section in concerns().values():
        group = parser.add_argument_group(section.__doc__)
        hints = typing.get_type_hints(section)
        for f in dataclasses.fields(section):
            if "help" in f.metadata:
                _add_flag(group, f, _plain_type(hints[f.name]))
    return parser


def _add_flag(group: Any, f: dataclasses.Field, kind: type) -> None:
    text = f.metadata["help"]
    if kind is bool:  # --no-… too, since flags win over --config
        group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, help=text)
        return
    if f.default is not None and "default" not in text:
        text += f" (default: {f.default})"
    metavar = f.metadata.get("metavar") or (None if "choices" in f.metadata else "N" if kind is int else "X")
    group.add_argument(
        flag(f.name),
        type=kind,
        choices=f.metadata.get("choices"),
        nargs=f.metadata.get("nargs"),
        metavar=metavar,
        help=text.replace("%", "%%"),
    )


def _plain_type(hint: Any) -> type:
    """Turn `int | None` into `int`, and `tuple[str, ...]`, a flag of several words, into `str`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return _plain_type(next(member for member in typing.get_args(hint) if member is not type(None)))
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


def read_yaml(path: str) -> dict[str, Any]:
    """Settings from a flat YAML file, keys with dashes or underscores, values checked as the flags' are."""
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"--config {path}: cannot be read: {reason}", exit_code=WRONG_ARGUMENTS) from error
    if not isinstance(loaded, dict):
        raise UserError(
            f"--config {path}: expected lines like `num-layers: 12`, got a {type(loaded).__name__}", WRONG_ARGUMENTS
        )
    fields = {
        f.name: (f, _plain_type(typing.get_type_hints(section)[f.name]))
        for section in concerns().values()
        for f in dataclasses.fields(section)
        if "help" in f.metadata
    }
    values = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
            raise UserError(f"--config {path}: unknown setting {key!r}{hint}", exit_code=WRONG_ARGUMENTS)
        values[name] = _checked(path, str(key), value, *fields[name])
    return values


def _checked(path: str, key: str, value: Any, f: dataclasses.Field, kind: type) -> Any:
    """A YAML value as its flag would have it; `1e-4`, which YAML reads as text, counts as a number."""
    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    expected = tuple(f.metadata.get("choices", ())) or kinds.get(kind)
    try:
        if value is None and f.default is None:
            return None
        if isinstance(value, list) and "nargs" in f.metadata:
            return tuple(_checked(path, key, word, f, kind) for word in value)
        if kind is bool and not isinstance(value, bool) or isinstance(value, (bool, list, dict)) and kind is not bool:
            raise ValueError
        converted = value if kind is bool else kind(value)
        if kind is int and converted != float(value):
            raise ValueError
        if "choices" in f.metadata and converted not in f.metadata["choices"]:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"--config {path}: {key}: got {value!r}, expected {expected}", exit_code=WRONG_ARGUMENTS
        ) from None
    return converted
