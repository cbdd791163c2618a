"""docs/foreign-files.md holds the tables of flags as the program reads them. `python -m tests.unit.test_megatron_page`
prints them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ddrp.arguments import build_parser, parse_arguments
from megatron_ddrp.config import flag
from megatron_ddrp.config.translation import (
    BY_VALUE,
    REMEDIES,
    RENAMED,
    RULES,
    SETTINGS,
    THEIR_DEFAULTS,
    WITHOUT_EFFECT,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "foreign-files.md"


def shown(names: str) -> str:
    """Return flags as they stand in a cell."""
    return " ".join(f"`--{name.rstrip('=')}`" for name in names.split())


def table(head: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join([f"| {head} |", "| --- | --- |", *(f"| {left} | {right} |" for left, right in rows)])


def by_value_rows() -> list[tuple[str, str]]:
    rows = []
    for name, by_value in BY_VALUE.items():
        words = [f"`{value}`" + (f" as `{ours}`" if ours else "") for value, ours in by_value.words.items()]
        rows.append(
            (shown(name), "; ".join([", ".join(words), f"else: {by_value.otherwise or 'as for our own flag'}"]))
        )
    return rows


def tables() -> list[str]:
    """Return the page's tables, in its order."""
    return [
        table("why it changes no number here | flags", [(why, shown(names)) for why, names in WITHOUT_EFFECT.items()]),
        table("flag | read as", [(shown(name), f"`{ours.replace('{}', 'X')}`") for name, ours in RENAMED.items()]),
        table("flag | taken at these values", by_value_rows()),
        table(
            "default here | Megatron-LM's", [(f"`{flag(name)}`", str(value)) for name, value in THEIR_DEFAULTS.items()]
        ),
        table("DeepSpeed | flag", [(f"`{key}`", f"`{flag(name)}`") for key, name in SETTINGS.items()]),
        table("flag | here", [(shown(name), hint) for name, hint in REMEDIES.items()]),
    ]


@pytest.mark.parametrize("number", range(6))
def test_the_page_holds_the_tables_of_the_program(number: int) -> None:
    assert tables()[number] in PAGE.read_text(encoding="utf-8"), "print it: python -m tests.unit.test_megatron_page"


def test_the_page_names_every_flag_that_asks_for_other_settings() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`--{name.rstrip('=')}`" in text for name in RULES)


def test_the_command_for_megatrons_model_leaves_no_default_that_differs() -> None:
    command = re.search(r"```bash\n(megatron-ddrp pretrain .*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert command, "no command on the page"
    words = command[1].replace("\\\n", " ").split()[2:]
    remarks = parse_arguments(words).remarks
    assert len(remarks) == 1 and "--bert-no-binary-head as --num-segments 0" in remarks[0]


def test_names_on_the_page_are_flags_of_ours_or_of_the_tables() -> None:
    own = {name for action in build_parser()._actions for name in action.option_strings}
    theirs = {name.rstrip("=") for text in (*WITHOUT_EFFECT.values(), *RENAMED, *BY_VALUE) for name in text.split()}
    known = (
        own | {f"--{name.rstrip('=')}" for name in (*theirs, *REMEDIES, *RULES)} | {"--from-hf", "--deepspeed_config"}
    )
    assert set(re.findall(r"(?<![\w`-])`(--[A-Za-z][\w-]*)", PAGE.read_text(encoding="utf-8"))) <= known


if __name__ == "__main__":
    print("\n\n".join(tables()))
