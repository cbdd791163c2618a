"""Impossible numbers and texts for every option of every command, made from the commands' dataclasses of options.

A number outside its declared range is refused before any file is opened: the files that the command lines name do not
exist, and the error is about the option. No case ends in anything but one line.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_ddrp.cli import ArgumentParser, _plain_type, parse_sections, parse_subcommand
from megatron_ddrp.commands import COMMANDS
from megatron_ddrp.commands.pretrain import read_arguments
from megatron_ddrp.config import flag
from megatron_ddrp.config.reading import Option, Place, options_of, read_value
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.lab.compare import plan
from megatron_ddrp.tasks.finetune.command import Prediction, parse_prediction
from megatron_ddrp.tasks.finetune.options import TaskFiles, read_task_file

NUMBERS = ("0", "-1", "nan", "inf", "1e308", "1" + "0" * 30, "9" * 5000, "", "text", "½")
TEXTS = ("", " ", "\t", "x" * 5000)
YAML_VALUES = (
    *(
        "true",
        "''",
        "' '",
        "[]",
        "[a, b]",
        "[[a]]",
        "{a: b}",
        "{}",
        "!!set {a}",
        "!!binary aGk=",
        "&a [*a]",
        "*nowhere",
    ),
    *("!!python/object/apply:os.system [x]", r'"\0"', r'"a\0b"', r'"\ud800"', "9" * 5000, "\0", "a: b: c"),
)
"""Values that no path, name, kind, metric or column of a task can have."""
YAML_FILES = (
    *(
        "[]",
        "5",
        "text",
        "2020-01-01",
        "[a]: b",
        "? {a: b}\n: c",
        "1: a",
        "null: a",
        "train: a\ntrain: b",
        "- train: a",
    ),
    *(
        "\0",
        "\t",
        "---\na: b\n---\nc: d",
        "'': a",
        "<<: 5",
        "<<: {train: []}",
        "x" * 5000 + ": a",
        "? |\n  a\n  b\n: c",
    ),
    *(r'"\0": c', "!!set {a}", "train: a\n<<: {train: b}\nTRAIN: c", "Train: a", "train.x: a", "&a {train: *a}"),
)
"""Task files whose whole or whose keys are wrong."""
PLAN_SECTIONS = (plan.Budget, plan.CorpusPlan, plan.Analyses)
SHAPES = {"pretrain": read_arguments, "finetune predict": parse_prediction}
"""Command → its reader of words, where it is not that of its dataclasses alone."""


class Parsed(NamedTuple):
    """A command or subcommand, its options, and what reads its words."""

    name: str
    options: dict[str, Option]
    read: Callable[[Sequence[str]], Any]

    def with_required(self, but: str) -> list[str]:
        """Return words for the options that a command line must have, all of them names of nothing."""
        words = ["--text=nothing"] if self.name == "analyze space" and but != "data_path" else []
        for name, option in self.options.items():
            if option.default is MISSING and name != but:
                value = "100" if _plain_type(option.hint) in (int, float) else "no-such-thing"
                words += [value] if option.rules.get("positional") else [flag(name), value]
        return words


def commands() -> Iterator[Parsed]:
    for name, command in COMMANDS.items():
        module = importlib.import_module(command.module)
        for sub, found in getattr(module, "SUBCOMMANDS", {}).items():
            read = partial(_of_subcommand, module.SUBCOMMANDS, sub)
            yield Parsed(f"{name} {sub}", options_of(*found.sections), read)
        if sections := getattr(module, "SECTIONS", ()):
            read = SHAPES.get(name) or getattr(module, "parse_arguments", None) or partial(_of_sections, sections)
            yield Parsed(name, options_of(*sections), read)
    yield Parsed("finetune predict", options_of(Prediction), parse_prediction)


def _of_sections(sections: Sequence[Any], words: Sequence[str]) -> Any:
    return parse_sections(ArgumentParser(prog="command"), sections, words)


def _of_subcommand(subcommands: Any, name: str, words: Sequence[str]) -> Any:
    return parse_subcommand("Commands.", subcommands, [name, *words])


def is_within(text: str, kind: type, within: str) -> bool:
    """Return whether a text is a number of a range, read without the product's code."""
    try:
        value = kind(text)
    except ValueError:
        return False
    low, high = (float(bound) for bound in within[1:-1].split(","))
    above = value > low or (within[0] == "[" and value == low)
    return math.isfinite(value) and above and (value < high or (within[-1] == "]" and value == high))


def ending(command: Parsed, words: list[str]) -> UserError | None:
    """Return the refusal of a command line, or None; fail for any other error."""
    try:
        command.read(words)
    except UserError as error:
        assert "\n" not in str(error) and error.exit_code == WRONG_ARGUMENTS, (words, error)
        return error
    return None


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_every_impossible_number_is_refused_by_its_option(command: Parsed, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    for name, option in command.options.items():
        kind, within = _plain_type(option.hint), option.rules.get("within")
        if kind not in (int, float) or within is None:
            continue
        for text in NUMBERS:
            words = [*command.with_required(name), f"{flag(name)}={text}"]
            try:
                refused = ending(command, words)
            except BaseException as error:
                wrong.append(f"{flag(name)} {text[:40]!r}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if not is_within(text, kind, within) and (refused is None or flag(name) not in str(refused)):
                wrong.append(f"{flag(name)} {text[:40]!r} is outside {within}: {refused}")
    assert wrong == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_no_text_for_an_option_ends_in_a_traceback(command: Parsed, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    for name, option in command.options.items():
        if _plain_type(option.hint) in (int, float, bool):
            continue
        for text in TEXTS:
            given = [text] if option.rules.get("positional") else [f"{flag(name)}={text}"]
            try:
                refused = ending(command, [*command.with_required(name), *given])
            except BaseException as error:
                wrong.append(f"{flag(name)} {text[:40]!r}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if refused is None and not text.strip():
                wrong.append(f"{flag(name)} {text!r} is taken")
    assert wrong == []


def test_every_number_has_a_finite_range() -> None:
    wrong = []
    for sections in ([*command.options.items()] for command in commands()):
        wrong += [name for name, option in sections if not _is_bounded(option)]
    wrong += [name for name, option in options_of(*PLAN_SECTIONS).items() if not _is_bounded(option)]
    assert wrong == []


def _is_bounded(option: Option) -> bool:
    if _plain_type(option.hint) not in (int, float) or "choices" in option.rules:
        return True
    return math.isfinite(float(option.rules["within"][1:-1].split(",")[1]))


@pytest.mark.parametrize("section", PLAN_SECTIONS, ids=lambda section: section.__name__)
def test_every_impossible_number_of_a_plan_is_refused(section: Any) -> None:
    for name, option in options_of(section).items():
        kind = _plain_type(option.hint)
        for text in NUMBERS if kind in (int, float) else ():
            value = int(text) if text.strip("-").isascii() and text.strip("-").isdigit() and len(text) < 300 else text
            if not is_within(text, kind, option.rules["within"]):
                with pytest.raises(UserError, match=rf"plan\.yaml: {name}"):
                    read_value(value, option, Place("plan.yaml", name))


@pytest.mark.parametrize("name", options_of(TaskFiles))
def test_every_impossible_value_of_a_task_file_is_refused(name: str, tmp_path: Path) -> None:
    taken = [value for value in YAML_VALUES if not is_refused_task_file(tmp_path, f"{name}: {value}\n")]
    assert taken == []


def test_every_task_file_with_wrong_keys_is_refused(tmp_path: Path) -> None:
    assert [text for text in YAML_FILES if not is_refused_task_file(tmp_path, text)] == []


def is_refused_task_file(folder: Path, text: str) -> bool:
    """Return whether a task file is refused in one line that names it; any other error fails."""
    path = folder / "task.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        read_task_file(path)
    except UserError as error:
        return "\n" not in str(error) and str(path) in str(error) and error.exit_code == WRONG_ARGUMENTS
    return False
