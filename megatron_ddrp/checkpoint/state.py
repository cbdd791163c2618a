"""state.json of a checkpoint: its allowed contents, and the sum that shows whether it is unchanged.

The sum (`crc32`) covers the other keys, written as JSON with sorted keys and without spaces. A state of an older
version has no sum and is read without that check; its keys and types are checked too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.config import Config
from megatron_ddrp.config.registry import NotRegistered
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.sealed import SUM, check_object, seal_object
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json

STATE = "state.json"
WEIGHTS_ONLY = "weights_only"
"""Key of an imported checkpoint: it has no optimizer state, and training starts at iteration 0."""
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Fields of fp16's dynamic loss scaler that a checkpoint keeps."""

_COUNTS = ("iteration", "consumed_samples", "consumed_tokens")
SINCE_LOGGED = "since_logged"
"""Key of the sums and counts since the last row of metrics.jsonl. Older versions did not write it."""
STARTED_FROM = "started_from"
"""Key of the checkpoint that training began from, null for random weights. Older versions did not write it."""
DATASETS = "datasets"
"""Key of the datasets' contents by prefix. Older versions did not write it."""
HEAD_SETTINGS = "head_settings"
"""Key of the settings, in an imported folder, of heads that fine-tuning adds. Older versions did not write it."""
_OF_TRAINING = (*_COUNTS, "optimizer_step", "loss_scaler", "layout", "files", "config")
_OF_IMPORTS = (*_COUNTS, "files", "config")
_OF_OLDER_VERSIONS = ("iteration", "config")
_LAYOUT_SIZES = ("ranks", "tensor", "pipeline")
_FILE_NAME = re.compile(r"model\.safetensors|(weights|optimizer|beside)-\d+-of-\d+\.safetensors")


def read_state(path: Path) -> dict[str, Any]:
    """Read state.json of one checkpoint: counts, config, layout, files and their sums, without the state's own sum.

    Raise `UserError` if the file cannot be read, its sum differs, or a key is missing, unknown or of a wrong type;
    raise `NotRegistered` if it names an objective that no plug-in has registered.
    """
    file = path / STATE
    if not file.is_file():
        raise UserError(f"{STATE} is missing")
    try:
        return _checked(parse_json(file.read_bytes(), lenient=True), path.name)
    except OSError as error:
        raise UserError(f"{STATE} cannot be read: {error.strerror}") from None
    except NotRegistered as error:
        raise NotRegistered(f"{path}: {error}", error.exit_code) from None
    except (ValueError, UserError) as error:
        raise UserError(f"{STATE} is damaged ({error})") from None


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write state.json of one checkpoint with its own sum."""
    write_text(path / STATE, json.dumps(seal_object(state), indent=2) + "\n")


def _checked(state: Any, folder: str) -> dict[str, Any]:
    """Return the state without its sum. Raise `ValueError` or `UserError` with the fault."""
    if not isinstance(state, dict):
        raise ValueError("expected an object")
    state = check_object(state)
    needed: tuple[str, ...] = _OF_OLDER_VERSIONS
    if "files" in state:
        needed = _OF_IMPORTS if state.get(WEIGHTS_ONLY) is True else _OF_TRAINING
    for key in needed:
        if key not in state:
            raise ValueError(f"{key} is missing")
    for key, value in state.items():
        if key not in _CHECKS:
            raise ValueError(f"{key!r} is unknown")
        try:
            _CHECKS[key](value)
        except ValueError as error:
            raise ValueError(f"{key}: expected {error}") from None
    number = re.fullmatch(r"iter_(\d+)", folder)
    if number and int(number[1]) != state["iteration"]:
        raise ValueError(f"iteration is {state['iteration']} in a folder named {folder}")
    return state


def _require(holds: object, expected: str) -> None:
    if not holds:
        raise ValueError(expected)


def _check_count(value: Any) -> None:
    _require(type(value) is int and value >= 0, "a whole number")


def _check_flag(value: Any) -> None:
    _require(type(value) is bool, "true or false")


def _check_totals(value: Any) -> None:
    _require(isinstance(value, dict), "an object with numbers by name")
    _require(all(type(x) in (int, float) and math.isfinite(x) for x in value.values()), "finite numbers")


def _check_name(value: Any) -> None:
    _require(value is None or isinstance(value, str), "null, or a text")


def _check_names(value: Any) -> None:
    _require(isinstance(value, dict) and all(isinstance(text, str) for text in value.values()), "texts by name")


def _check_settings(value: Any) -> None:
    _require(isinstance(value, dict), "an object with settings by name")


def _check_scaler(value: Any) -> None:
    if value is None:
        return
    keys_fit = isinstance(value, dict) and set(value) == set(SCALER_FIELDS)
    _require(keys_fit, f"null, or an object with {', '.join(SCALER_FIELDS)}")
    _require(all(type(number) in (int, float) for number in value.values()), "numbers")


def _check_layout(value: Any) -> None:
    sizes = ", ".join(_LAYOUT_SIZES)
    keys_fit = isinstance(value, dict) and set(value) == {*_LAYOUT_SIZES, "zero_stage", "precision"}
    _require(keys_fit, f"an object with {sizes}, zero_stage and precision")
    whole = all(type(value[name]) is int and value[name] > 0 for name in _LAYOUT_SIZES)
    _require(whole, f"whole numbers above 0 for {sizes}")
    known = value["zero_stage"] in (0, 1, 2, 3) and value["precision"] in ("fp32", "fp16", "bf16")
    _require(known, "zero_stage 0 to 3 and precision fp32, fp16 or bf16")


def _check_files(value: Any) -> None:
    _require(isinstance(value, dict) and value, "an object with the size and sum of each file")
    for name, facts in value.items():
        _require(_FILE_NAME.fullmatch(name), f"names of checkpoint files instead of {name!r}")
        _require(isinstance(facts, dict) and set(facts) == {"bytes", SUM}, f"bytes and {SUM} of {name}")
        _check_count(facts["bytes"])
        is_sum = isinstance(facts[SUM], str) and re.fullmatch(r"[0-9a-f]{8}", facts[SUM])
        _require(is_sum, f"eight hexadecimal digits as the {SUM} of {name}")


def _check_config(value: Any) -> None:
    Config.from_dict(value)


_CHECKS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys((*_COUNTS, "optimizer_step"), _check_count),
    SINCE_LOGGED: _check_totals,
    STARTED_FROM: _check_name,
    DATASETS: _check_names,
    HEAD_SETTINGS: _check_settings,
    WEIGHTS_ONLY: _check_flag,
    "loss_scaler": _check_scaler,
    "layout": _check_layout,
    "files": _check_files,
    "config": _check_config,
}
"""Key of a state → its check, which raises `ValueError` with the expected contents."""
