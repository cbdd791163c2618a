"""state.json of a checkpoint, and the sum that shows whether it is unchanged.

The sum (`crc32`) covers the other keys, written as JSON with sorted keys and without spaces. So a state that passes
was written by `write_state`, and its keys need no other check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.config import Config
from megatron_ddrp.config.registry import NotRegistered
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.sealed import check_object, seal_object
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json

STATE = "state.json"
WEIGHTS_ONLY = "weights_only"
"""Key of an imported checkpoint: it has no optimizer state, and training starts at iteration 0."""
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Fields of fp16's dynamic loss scaler that a checkpoint keeps."""
STARTED_FROM = "started_from"
"""Key of the checkpoint that training began from, null for random weights."""
HEAD_SETTINGS = "head_settings"
"""Key of the settings, in an imported folder, of heads that fine-tuning adds."""


def read_state(path: Path) -> dict[str, Any]:
    """Read state.json of one checkpoint: counts, config, layout, files and their sums, without the state's own sum.

    Raise `UserError` if the file cannot be read, its sum is missing or differs, or another version wrote its
    configuration; raise `NotRegistered` if it names an objective that no plug-in has registered.
    """
    file = path / STATE
    if not file.is_file():
        raise UserError(f"{STATE} is missing")
    try:
        state = parse_json(file.read_bytes(), lenient=True)
        if not isinstance(state, dict):
            raise ValueError("expected an object")
        state = check_object(state, needs_sum=True)
        Config.from_dict(state["config"])
    except OSError as error:
        raise UserError(f"{STATE} cannot be read: {error.strerror}") from None
    except NotRegistered as error:
        raise NotRegistered(f"{path}: {error}", error.exit_code) from None
    except (ValueError, UserError) as error:
        raise UserError(f"{STATE} is damaged ({error})") from None
    number = re.fullmatch(r"iter_(\d+)", path.name)
    if number and int(number[1]) != state["iteration"]:
        raise UserError(f"{STATE} is damaged (iteration is {state['iteration']} in a folder named {path.name})")
    return state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write state.json of one checkpoint with its own sum."""
    write_text(path / STATE, json.dumps(seal_object(state), indent=2) + "\n")
