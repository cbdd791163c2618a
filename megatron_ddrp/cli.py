"""The argument parser of every command: underscores count as dashes; wrong arguments are one `UserError`.

Recipes for Megatron and DeepSpeed mix `--deepspeed_config` and `--vocab-file`; both spellings work here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

from megatron_ddrp.config import flag
from megatron_ddrp.config.reading import Option, options_of
from megatron_ddrp.config.registry import TABLES, load_plugin
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, nearest

Section = TypeVar("Section")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of `--help` that keeps the description's line breaks and shows informative defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or isinstance(action.default, bool) or action.default == argparse.SUPPRESS
        if silent or not action.option_strings or "default" in (action.help or ""):
            return action.help
        return f"{action.help or ''} (default: %(default)s)".lstrip()


class ArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises `UserError`, knows no abbreviations, and reads `--a_b` as `--a-b`."""

    hints: Mapping[str, str] = MappingProxyType({})
    """Name of a flag of other programs, with dashes → what to do instead."""

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("prog", os.path.basename(sys.argv[0]))
        kwargs.setdefault("formatter_class", HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._given: list[str] = []
        """Words of the command line before `--`."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        words = [self._spelling(word) for word in words[:end]] + words[end:]
        self._given = words[:end]
        if "--plugin" in self._option_string_actions:  # plug-ins add choices to other flags
            scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            scout.add_argument("--plugin", action="extend", nargs="*", type=Path, default=[])
            for path in scout.parse_known_args(words)[0].plugin:
                load_plugin(path)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse([(words, self.hint_for(words)) for words in flags_of(unknown)])
        return parsed

    def hint_for(self, words: str) -> str:
        """Return the remedy for an unknown flag, with or without its values; "" if no known flag is similar."""
        name = words.partition(" ")[0].partition("=")[0]
        if words.lower() in ("true", "false"):
            return "a switch takes no value: --x turns it on, --no-x off"
        if hint := self.hints.get(name[2:].replace("_", "-")):
            return hint
        known = [*self._option_string_actions, *(f"--{other}" for other in self.hints)]
        close = nearest(name.replace("_", "-"), known)
        return " ".join(filter(None, (close and f"did you mean {close}?", self.hints.get(close[2:]))))

    def refuse(self, unknown: Sequence[tuple[str, str]]) -> NoReturn:
        """End the command with one line about its unknown arguments, each with its hint."""
        if len(unknown) == 1:
            listed = "; ".join(filter(None, unknown[0]))
        else:
            listed = ", ".join(words + (f" ({hint})" if hint else "") for words, hint in unknown)
        self.error(f"unrecognized arguments: {listed}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            close = nearest(str(value), list(map(str, action.choices or ())))
            hint = self.hints.get(f"{action.dest}={value}") or (f"did you mean {close}?" if close else "")
            error.message += f"; {hint}" if hint else ""
            raise

    def error(self, message: str) -> NoReturn:
        may_be_brought = tuple(f"argument {table.flag}:" for table in TABLES.values())
        if "invalid choice" in message and message.startswith(may_be_brought):
            message += ", or a name that --plugin FILE.py adds"
        if "required" in message:  # a misspelt flag leaves its right spelling missing
            message += "".join(f"; {': '.join(filter(None, unknown))}" for unknown in self._unknown_flags())
        raise UserError(f"{' '.join(message.split())} (see {self.prog} --help)", WRONG_ARGUMENTS)

    def _unknown_flags(self) -> list[tuple[str, str]]:
        """Return a statement and a hint, maybe "", for each unknown flag of the command line."""
        flags = (word.partition("=")[0] for word in self._given if word.startswith("--"))
        unknown = (name for name in flags if name not in self._option_string_actions)
        return [(f"{name} is unknown", self.hint_for(name)) for name in unknown]

    def _spelling(self, word: str) -> str:
        """Return the registered spelling of a flag given with `-` or `_`; return other words unchanged."""
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        known = self._option_string_actions
        for candidate in (name, "--" + name[2:].replace("_", "-"), "--" + name[2:].replace("-", "_")):
            if candidate in known:
                return candidate + equals + value
        return word


def flags_of(words: Sequence[str]) -> list[str]:
    """Return each flag joined with the values that follow it; a value without a flag stands alone."""
    flags: list[str] = []
    for word in words:
        if flags and flags[-1].startswith("--") and not word.startswith("--"):
            flags[-1] += f" {word}"
        else:
            flags.append(word)
    return flags


PLUGIN_HELP = (
    "Python file with encodings, objectives, maskings, optimizers, schedules, callbacks, metrics or kinds of tasks of "
    "your own (such as OPTIMIZERS = {name: class}; docs/plugins.md); its code is run"
)


def add_plugin_flag(parser: Any) -> None:
    """Add `--plugin` to a parser or a group of its arguments; `parse_args` loads the files."""
    parser.add_argument(
        "--plugin", action="extend", nargs="+", metavar="FILE.py", default=argparse.SUPPRESS, help=PLUGIN_HELP
    )


def add_flags(parser: argparse.ArgumentParser, *sections: Any) -> None:
    """Add a group per dataclass, named by its docstring, with a flag for each of its options.

    The namespace has no entry for a flag that is not given.
    """
    for section in sections:
        group = parser.add_argument_group(section.__doc__)
        for name, option in options_of(section).items():
            _add_flag(group, name, option)


def _add_flag(group: Any, name: str, option: Option) -> None:
    rules, text, kind = option.rules, option.rules["help"], _plain_type(option.hint)
    if kind is bool:  # --no-… too, since flags win over --config
        group.add_argument(flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    required = option.default is dataclasses.MISSING
    if not required and option.default not in (None, ()) and "default" not in text:
        shown = option.default if isinstance(option.default, tuple) else (option.default,)
        text += f" (default: {' '.join(map(str, shown))})"
    metavar = None if "choices" in rules else "N" if kind is int else "X"
    is_flag = not rules.get("positional")
    group.add_argument(
        flag(name) if is_flag else name,
        type=rules.get("word", partial(_word, kind) if kind in (str, Path) else kind),
        **({"required": required} if is_flag else {}),
        default=argparse.SUPPRESS,
        choices=rules.get("choices"),
        nargs=rules.get("nargs"),
        metavar=rules.get("metavar", metavar),
        help=text.replace("%", "%%"),
    )


def _word(kind: type, text: str) -> Any:
    """Return a word of the command line as text or a path, which cannot be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected some text")
    return kind(text)


def given_options(section: type[Section], parsed: argparse.Namespace) -> Section:
    """Return a dataclass from the given flags; the other fields have their defaults. Lists become tuples."""
    given = {name: getattr(parsed, name) for name in options_of(section) if hasattr(parsed, name)}
    return section(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def parse_sections(
    parser: ArgumentParser, sections: Sequence[Any], arguments: Sequence[str] | None, plugins: bool = True
) -> argparse.Namespace:
    """Return the options of a command line with the flags of some dataclasses and, with `plugins`, `--plugin`.

    If a dataclass refuses a value, the command ends as for a wrong argument.
    """
    add_flags(parser, *sections)
    if plugins:
        add_plugin_flag(parser)
    return _check_sections(parser, sections, parser.parse_args(arguments))


class Subcommand(NamedTuple):
    """One of the commands that a command has."""

    summary: str
    description: str
    sections: tuple[Any, ...]
    """Dataclasses of its options."""


def parse_subcommand(
    description: str, subcommands: Mapping[str, Subcommand], arguments: Sequence[str] | None, plugins: bool = True
) -> argparse.Namespace:
    """Return the options of the subcommand that a command line begins with, and its name as `command`."""
    parser = ArgumentParser(description=description)
    names = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, subcommand in subcommands.items():
        parsers[name] = names.add_parser(name, help=subcommand.summary, description=subcommand.description)
        add_flags(parsers[name], *subcommand.sections)
        if plugins:
            add_plugin_flag(parsers[name])
    given = parser.parse_args(arguments)
    options = _check_sections(parsers[given.command], subcommands[given.command].sections, given)
    options.command = given.command
    return options


def _check_sections(parser: ArgumentParser, sections: Sequence[Any], given: argparse.Namespace) -> argparse.Namespace:
    """Return the options of all sections with their defaults."""
    options = argparse.Namespace()
    try:
        for section in sections:
            vars(options).update(vars(given_options(section, given)))
    except UserError as error:
        parser.error(str(error))
    return options


def _plain_type(hint: Any) -> type:
    """Return the type of one word of a flag: `int | None` → `int`, `tuple[str, ...]` → `str`."""
    if isinstance(hint, types.UnionType):
        return _plain_type(next(member for member in typing.get_args(hint) if member is not type(None)))
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
