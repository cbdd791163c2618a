"""The page of flags names every flag of `megatron-ddrp pretrain`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from megatron_ddrp.arguments import build_parser

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_every_flag_stands_on_the_page() -> None:
    named = {name.replace("_", "-") for name in re.findall(r"--[a-z][a-z0-9_-]*", PAGE.read_text(encoding="utf-8"))}
    shown = [action for action in build_parser()._actions if action.help is not argparse.SUPPRESS]
    assert len(shown) > 60
    assert [action.option_strings for action in shown if not named & set(action.option_strings)] == []
