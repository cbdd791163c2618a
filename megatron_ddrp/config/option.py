"""What every concern's dataclass is made of: a field that is a flag, and a refusal that names it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from megatron_ddrp.errors import UserError


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is also a command-line flag; `choices` and `metavar` go to argparse."""
    return field(default=default, metadata={"help": help, **metadata})


def flag(field_name: str) -> str:
    """`num_layers` → `--num-layers`."""
    return "--" + field_name.replace("_", "-")


def refuse(message: str) -> None:
    """Stop on an impossible setting: a wrong argument, exit code 2."""
    raise UserError(message, exit_code=2)
