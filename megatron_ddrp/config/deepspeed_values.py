"""Settings that a file of `--deepspeed_config` decides where neither a flag nor `--config` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_ddrp.config.option import flag
from megatron_ddrp.config.reading import Option, Place, read_value
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.foreign import parse_json

SETTINGS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "optimizer.params.lr": "lr",
    "optimizer.params.betas[1]": "adam_beta1",
    "optimizer.params.betas[2]": "adam_beta2",
    "optimizer.params.eps": "adam_eps",
    "optimizer.params.weight_decay": "weight_decay",
}
"""Dotted key of DeepSpeed's → the setting of ours that says the same."""

_ADAM_SWITCHES = {"torch_adam": (True, False), "adam_w_mode": (True,), "bias_correction": (True,), "amsgrad": (False,)}
"""Other parameters of DeepSpeed's Adam → values that leave the update what ours is."""


class Decision(NamedTuple):
    """A setting's value, and the key of the file that has it."""

    value: Any
    key: str


def load_file(path: str) -> dict[str, Any]:
    """Return the JSON object of a file. Raises `UserError` where there is none."""
    try:
        loaded = parse_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        refuse_file(path, f"cannot be read: {error.strerror if isinstance(error, OSError) else error}")
    if not isinstance(loaded, dict):
        refuse_file(path, "expected a JSON object")
    return loaded


def decisions(path: str, content: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Decision]:
    """Return setting → decision of a file's content; "auto" decides nothing.

    Raises `UserError` for a value of a wrong type, and for an optimizer that is not AdamW.
    """
    place, flat = Place(f"--deepspeed-config {path}"), flattened(content)
    found = {}
    for key, name in SETTINGS.items():
        if key in flat and not (name == "offload_optimizer" and flat[key] == "nvme"):  # which has no flag
            found[name] = Decision(read_value(flat[key], options[name], place.at(key)), key)
    if "optimizer" in content:
        _check_adam(path, content["optimizer"])
        found["optimizer"] = Decision("adamw", "optimizer.type")
    return found


def global_batch_of(
    path: str, content: Mapping[str, Any], settings: Mapping[str, Any], world_size: int | None
) -> dict[str, Decision]:
    """Return the global batch size as the file's `gradient_accumulation_steps` has it on `world_size` ranks.

    Nothing where the steps are absent, or `settings` (by name, resolved) holds a global batch size. Raises `UserError`
    where it is needed and the number of ranks is not known.
    """
    steps = content.get("gradient_accumulation_steps", "auto")
    if not isinstance(steps, int) or "global_batch_size" in settings:
        return {}
    if world_size is None:
        refuse_file(path, "gradient_accumulation_steps depend on the number of ranks: set train_batch_size as well")
    ranks = world_size // (settings["tensor_model_parallel_size"] * settings["pipeline_model_parallel_size"])
    size = settings["micro_batch_size"] * steps * ranks
    return {"global_batch_size": Decision(size, "gradient_accumulation_steps")}


def check_against(path: str, decided: Mapping[str, Decision], given: Mapping[str, Any]) -> None:
    """Refuse a file that contradicts a setting of `given`."""
    for name, (value, key) in decided.items():
        if name in given and given[name] != value:
            refuse_contradiction(path, key, value, given[name], flag(name))
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if name in decided and decided[name].value and given.get(other):
            refuse_contradiction(path, decided[name].key, True, flag(other), flag(name))


def refuse_contradiction(path: str, key: str, value: Any, given: Any, flags: str) -> NoReturn:
    """Refuse a key of a file whose value is not what the flags say."""
    refuse_file(path, f"{key} is {value!r} but the flags say {given!r}: set it by {flags} and leave it out of the file")


def refuse_file(path: str, reason: str) -> NoReturn:
    """Raise the `UserError` that names the file."""
    raise UserError(f"--deepspeed-config {path}: {reason}", WRONG_ARGUMENTS)


def flattened(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value of what a file sets; items of `betas` are numbered from 1."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found |= flattened(value, f"{prefix}{key}.")
        elif key == "betas" and isinstance(value, list) and len(value) == 2:
            found |= {f"{prefix}{key}[{number}]": item for number, item in enumerate(value, 1)}
        elif value != "auto":
            found[prefix + key] = value
    return found


def _check_adam(path: str, section: Any) -> None:
    """Refuse the section of an optimizer that is not AdamW, or has what ours has not."""
    kind = section.get("type") if isinstance(section, dict) else section
    if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
        refuse_file(path, f"optimizer is {kind!r}: expected AdamW; leave it out and give --lr and its kin")
    params = section.get("params", {})
    for name, value in params.items() if isinstance(params, dict) else (("params", params),):
        if name not in ("lr", "betas", "eps", "weight_decay") and value not in _ADAM_SWITCHES.get(name, ()):
            refuse_file(path, f"optimizer.params.{name} is {value!r}: our AdamW has no such setting; leave it out")
