"""Flags of `pretrain_bert.py` inside a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterable
from typing import Any

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config, DataConfig, concerns
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.tasks.compare.reading import Section

Flags = tuple[tuple[str, tuple[str, ...]], ...]
"""(name without dashes, words after it) pairs."""

TOKENIZERS: tuple[str, ...] = DataConfig.__dataclass_fields__["tokenizer_type"].metadata["choices"]

DECIDED = {
    "position-encoding": "models",
    "objective": "models",
    "train-iters": "budget",
    "seed": "seeds",
    "save": "--output-dir",
    "load": "--output-dir",
    "save-interval": "checkpoints",
    "keep-last": "checkpoints",
    "exit-interval": "budget",
    "exit-duration-in-mins": "budget",
    "data-path": "corpus",
    "train-data-path": "corpus",
    "valid-data-path": "corpus",
    "vocab-file": "corpus",
    "tokenizer-type": "corpus",
}
"""Flags that a plan may not hold, and the key that decides them."""


def check_flags(section: Section, key: str) -> Flags:
    """The flags under a key of `section`, each known and of a value that `pretrain_bert.py` takes."""
    known = [
        f.name.replace("_", "-") for s in concerns().values() for f in dataclasses.fields(s) if "help" in f.metadata
    ]
    here = section.section(key, known + [name.replace("-", "_") for name in known if "-" in name])
    flags: list[tuple[str, tuple[str, ...]]] = []
    for name in known:
        spelled = name if name in here else name.replace("-", "_")
        if spelled not in here:
            continue
        if name in DECIDED:
            raise here.error(spelled, f"not here: {DECIDED[name]} decides it")
        value = here.take(spelled, lambda value: value)
        if isinstance(value, bool):
            flags.append((name if value else f"no-{name}", ()))
        else:
            flags.append((name, tuple(map(str, value)) if isinstance(value, list) else (str(value),)))
    return tuple(flags)


def parse_config(flags: Flags, blame: str) -> Config:
    """The configuration that flags make. Raises `UserError`, its line begun by `blame`, for a value that is refused."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse_arguments(words(flags)).config
    except UserError as error:
        raise UserError(f"{blame}: {error}", WRONG_ARGUMENTS) from None
    except SystemExit:
        line = said.getvalue().strip().removeprefix("pretrain_bert.py: error: ")
        raise UserError(f"{blame}: {line}", WRONG_ARGUMENTS) from None


def merged(*flags: tuple[str, tuple[str, ...]]) -> Flags:
    """Each flag once: a later value takes the place of an earlier one."""
    last = {name.removeprefix("no-"): (name, values) for name, values in flags}
    return tuple(last.values())


def words(flags: Iterable[tuple[str, tuple[Any, ...]]]) -> list[str]:
    """As one types them."""
    return [word for name, values in flags for word in (f"--{name}", *map(str, values))]
