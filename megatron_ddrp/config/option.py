"""What every concern's dataclass is made of: a field that is a flag, its range, and a refusal that names it."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any, NamedTuple

from megatron_ddrp.errors import UserError

COUNT = "[1, 2147483648)"
"""Range of sizes and numbers of steps. Products of two of them stay exact in 64 bits."""


class Number(NamedTuple):
    """A number that an objective declares for `--objective-options`."""

    default: float
    within: str
    """Its range, as for `option`."""


def option(default: Any, help: str, **metadata: Any) -> Any:
    """Return a dataclass field that is also a command-line flag.

    `choices`, `nargs` and `metavar` go to argparse. `within` is the range of a number, such as "[0, 1)" or "(0, inf)";
    every number has one, and no range holds inf or nan. `distinct` refuses a list with equal values, and `read`
    replaces the reading of a value from YAML (`reading.py`); what has a `read` also checks its own range.
    """
    return field(default=default, metadata={"help": help, **metadata})


def flag(field_name: str) -> str:
    """Return the flag of a field: `num_layers` → `--num-layers`."""
    return "--" + field_name.replace("_", "-")


def refuse(message: str) -> None:
    """Stop on an impossible setting: a wrong argument, exit code 2."""
    raise UserError(message, exit_code=2)


def check_ranges(section: Any) -> None:
    """Refuse the first number of a concern's dataclass that lies outside of its option's range."""
    for f in fields(section):
        value = getattr(section, f.name)
        if "within" in f.metadata and "read" not in f.metadata and value is not None:
            for number in value if isinstance(value, (list, tuple)) else (value,):
                check_range(f.name, number, f.metadata["within"])


def check_range(name: str, value: Any, within: str) -> None:
    """Refuse a value that is no finite number in the range `within`, written as in `option`."""
    if reason := refused_range(value, within):
        refuse(f"{flag(name)} is {value}: {reason}")


def refused_range(value: Any, within: str) -> str | None:
    """Return the sentence that says which range a value lies outside of, None where it lies inside."""
    low, high = (float(bound) for bound in within[1:-1].split(","))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    above = is_number and (value >= low if within[0] == "[" else value > low)
    below = is_number and (value <= high if within[-1] == "]" else value < high)
    return None if above and below else f"it must {_describe(within, low, high)}"


def _describe(within: str, low: float, high: float) -> str:
    """Return a range in words: `lie in [0, 1)`, `be at least 1`, `be above 0 and finite`."""
    if within == COUNT:
        return "be at least 1 and below 2^31"
    if math.isfinite(high):
        return f"lie in {within}"
    return f"be {'at least' if within[0] == '[' else 'above'} {low:g} and finite"
