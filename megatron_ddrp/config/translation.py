"""Read a command line that was written for Megatron-LM: take its flags out, and say which words of ours stand for them.

`megatron_flags.py` has the tables. A flag that means something else here is refused, never read in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_ddrp.config import huggingface_flags
from megatron_ddrp.config.deepspeed_values import load_file
from megatron_ddrp.config.megatron_flags import (
    ASKS_SETTINGS,
    BY_VALUE,
    FP16_FILE,
    REFUSED,
    RENAMED,
    THEIR_DEFAULTS,
    WITHOUT_EFFECT,
)
from megatron_ddrp.config.option import flag

Rule = Callable[[str, Mapping[str, Any]], str]
"""A flag's value and all settings by name → our words; "" without effect. Raises `ValueError` with a reason."""


class Found(NamedTuple):
    """A flag of Megatron-LM's on a command line."""

    name: str
    """Its name in the tables, without what follows it there."""
    typed: str
    """It and its values, as they were typed."""
    value: str


class Translated(NamedTuple):
    """A command line translated into our flags."""

    words: list[str]
    """The words that were not taken out, refused flags among them."""
    renamed: list[tuple[Found, list[str]]]
    """Flags with the words of ours that stand for them."""
    without_effect: list[str]
    """Flags as they were typed that change no number here."""
    asking: list[Found]
    """Flags whose meaning depends on other settings: see `settle`."""


def _bare(name: str) -> str:
    return name.rstrip("=*")


def _tables() -> dict[str, str]:
    """Return name → kind of every flag of the tables: "" takes no value, "=" one, "=*" any number."""
    groups = [name for names in WITHOUT_EFFECT.values() for name in names.split()]
    names = (*groups, *RENAMED, *BY_VALUE, *ASKS_SETTINGS, *REFUSED)
    return {_bare(name): name[len(_bare(name)) :] for name in names}


KINDS = _tables()
"""Name of each flag of Megatron-LM's that we know → how many values follow it."""

NO_EFFECT = {_bare(name) for names in WITHOUT_EFFECT.values() for name in names.split()}


def translate(words: Sequence[str]) -> Translated:
    """Take Megatron-LM's flags out of a command line; `_` counts as `-`. Words after `--` stay as they are."""
    left, renamed, without_effect, asking = list[str](), [], [], []
    position = 0
    while position < len(words) and words[position] != "--":
        begin, position = position, position + 1
        name, _, value = words[begin].partition("=")
        key = name[2:].replace("_", "-") if name.startswith("--") else ""
        if "=" not in words[begin]:
            position += _count_values(words[position:], KINDS.get(key, ""))
            value = " ".join(words[begin + 1 : position])
        found = Found(key, " ".join(words[begin:position]), value)
        ours = _static(found)
        if key in {_bare(name) for name in ASKS_SETTINGS}:
            asking.append(found)
        elif ours is None:
            left += words[begin:position]
        elif ours:
            renamed.append((found, ours))
        else:
            without_effect.append(found.typed)
    return Translated([*left, *words[position:]], renamed, without_effect, asking)


def _count_values(words: Sequence[str], kind: str) -> int:
    """Return how many of the words that follow a flag are its values."""
    until = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    return {"": 0, "=": min(1, until)}.get(kind, until)


def _static(found: Found) -> list[str] | None:
    """Return our words for a flag, none for one without effect, None for one that is ours or refused."""
    if found.name not in KINDS or (KINDS[found.name] == "=" and not found.value):
        return None
    if found.name in NO_EFFECT:
        return []
    name = found.name + KINDS[found.name]
    if name in BY_VALUE:
        return next((ours.split() for value, ours in BY_VALUE[name].words.items() if _same(value, found.value)), None)
    if name not in RENAMED:
        return None
    return [word.replace("{}", found.value) for word in RENAMED[name].split()]  # a value may hold spaces


def _same(value: str, other: str) -> bool:
    """Return whether two words are equal, or are equal numbers."""
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other


def settle(
    asking: Iterable[Found], settings: Mapping[str, Any]
) -> tuple[list[tuple[Found, str]], list[tuple[str, str]]]:
    """Return the flags that other settings decide with our words, and those refused with the reason.

    `settings` are the given ones by name, with the command line's; defaults are not among them.
    """
    taken, refused = [], []
    for found in asking:
        try:
            taken.append((found, RULES[found.name](found.value, settings)))
        except ValueError as error:
            refused.append((found.typed, str(error)))
    return taken, refused


def _whole(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("expected a whole number")
    return int(value)


def _position_rows(value: str, settings: Mapping[str, Any]) -> str:
    """Rows of the table of absolute positions, of which training reads the first `--seq-length`."""
    rows, length = _whole(value), settings.get("seq_length")
    if length is None:
        return f"--seq-length {rows}"
    if rows < length:
        raise ValueError(f"it is below --seq-length {length}: leave it out, every position has its row")
    return ""


def _head_channels(value: str, settings: Mapping[str, Any]) -> str:
    channels, width, heads = _whole(value), settings["hidden_size"], settings["num_attention_heads"]
    if heads and channels != width / heads:  # no heads are refused by their own flag
        raise ValueError(f"a head has --hidden-size / --num-attention-heads = {width / heads:g} channels: leave it out")
    return ""


def _fp32_sums(value: str, settings: Mapping[str, Any]) -> str:
    """Gradients of bf16 runs add up in fp32 here, except in offloaded pipelines (`engine/deepspeed_file.py`)."""
    if settings.get("fp16"):
        raise ValueError("under --fp16 gradients add up in fp16: use --bf16, whose gradients add up in fp32")
    if settings.get("pipeline_model_parallel_size", 1) > 1 and settings.get("offload_optimizer", "none") != "none":
        raise ValueError(
            "an offloaded pipeline adds up gradients in the run's precision: leave --offload-optimizer out"
        )
    path = settings.get("deepspeed_config")
    types = load_file(path).get("data_types") if path else None
    if isinstance(types, dict) and types.get("grad_accum_dtype", "fp32") not in ("fp32", "auto", None):
        raise ValueError(f"data_types.grad_accum_dtype is {types['grad_accum_dtype']!r} in {path}: leave it out there")
    return ""


def _steps_of(ours: str, whole: Callable[[float], int]) -> Rule:
    """Return the rule of a number of samples, which is one of steps here."""

    def rule(value: str, settings: Mapping[str, Any]) -> str:
        return f"{ours} {whole(_whole(value) / max(1, settings['global_batch_size']))}"

    return rule


def _loss_scale(name: str, usual: int | None) -> Rule:
    """Return the rule of a number of fp16's loss scaling, which DeepSpeed's file has; others do not read it."""

    def rule(value: str, settings: Mapping[str, Any]) -> str:
        if settings.get("fp16") and (usual is None or not _same(value, str(usual))):
            raise ValueError(f"set fp16.{name} in --deepspeed-config" + (f"; it is {usual} here" if usual else ""))
        return ""

    return rule


RULES: dict[str, Rule] = {
    "max-position-embeddings": _position_rows,
    "kv-channels": _head_channels,
    "accumulate-allreduce-grads-in-fp32": _fp32_sums,
    "fp32-allreduce": _fp32_sums,
    "train-samples": _steps_of("--train-iters", math.floor),
    "lr-decay-samples": _steps_of("--lr-decay-iters", round),
    "lr-warmup-samples": _steps_of("--lr-warmup-iters", round),
    **{_bare(name): _loss_scale(*place) for name, place in FP16_FILE.items()},
}
"""Name → rule, for each of `ASKS_SETTINGS`."""


def _hints() -> dict[str, str]:
    """Return name → the remedy for every foreign flag, for where it is not taken: refused values, YAML, plans."""
    asking = {_bare(name): "set it in fp16 of --deepspeed-config" for name in FP16_FILE} | {
        "max-position-embeddings": "use --seq-length",
        "train-samples": "use --train-iters",
        "lr-decay-samples": "use --lr-decay-iters",
        "lr-warmup-samples": "use --lr-warmup-iters",
    }
    nothing = "it is Megatron-LM's and without effect here: leave it out"
    return (
        huggingface_flags.HINTS
        | huggingface_flags.LAUNCHERS
        | dict.fromkeys((*NO_EFFECT, *(_bare(name) for name in ASKS_SETTINGS)), nothing)
        | {_bare(name): f"use {words.replace(' {}', '')}" for name, words in RENAMED.items()}
        | {_bare(name): by_value.otherwise for name, by_value in BY_VALUE.items() if by_value.otherwise}
        | {_bare(name): reason for name, reason in REFUSED.items()}
        | asking
    )


HINTS = _hints()
"""Name of a flag of Megatron-LM's or Hugging Face's, with dashes → what to do instead."""


def differing_defaults(settings: Iterable[str], ours: Mapping[str, Any]) -> str:
    """Return one line: our defaults that are not Megatron-LM's for BERT. `settings` were given, `ours` is resolved."""
    given = set(settings) | ({"lr_warmup_fraction"} if "lr_warmup_iters" in settings else set())
    given |= {"lr_wsd_decay_style"} if ours["lr_decay_style"] != "wsd" else set()
    theirs = {name: value for name, value in THEIR_DEFAULTS.items() if name not in given}
    lines = (f"{flag(name)} {ours[name]} (there {value})" for name, value in theirs.items())
    return "defaults here that are not Megatron-LM's: " + ", ".join(lines) if theirs else ""
