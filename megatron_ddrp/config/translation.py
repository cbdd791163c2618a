"""Read a command line that was written for Megatron-LM: take its flags out, and say which words of ours stand for them.

`foreign_flags.py` has the tables. A flag that is in none of them is refused, never read in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from megatron_ddrp.config.deepspeed_values import load_file
from megatron_ddrp.config.foreign_flags import BY_VALUE, REMEDIES, RENAMED, THEIR_DEFAULTS, WITHOUT_EFFECT, ByValue
from megatron_ddrp.config.option import flag

Rule = Callable[[str, Mapping[str, Any]], str]
"""A flag's value and all settings by name → our words; "" without effect. Raises `ValueError` with a reason."""


class Found(NamedTuple):
    """A flag of Megatron-LM's on a command line."""

    typed: str
    """It and its value, as they were typed."""
    value: str
    meaning: str | Rule

    @property
    def asks(self) -> bool:
        """True if its meaning depends on other settings."""
        return not isinstance(self.meaning, str)

    def ours(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the words of ours that stand for it; raise `ValueError` with the reason if it is refused.

        `settings` are the given ones by name, with the command line's; defaults are not among them.
        """
        if isinstance(self.meaning, str):
            return [word.replace("{}", self.value) for word in self.meaning.split()]  # a value may hold spaces
        return self.meaning(self.value, settings).split()


def translate(words: Sequence[str]) -> tuple[list[str], list[Found]]:
    """Take Megatron-LM's flags out of a command line; `_` counts as `-`. Words after `--` stay as they are."""
    left, taken = list[str](), list[Found]()
    position = 0
    while position < len(words) and words[position] != "--":
        begin, position = position, position + 1
        first, equals, value = words[begin].partition("=")
        takes_value, meaning = KNOWN.get(first[2:].replace("_", "-") if first[:2] == "--" else "", (False, None))
        if takes_value and not equals and position < len(words) and not words[position].startswith("--"):
            value, position = words[position], position + 1
        if isinstance(meaning, ByValue):
            meaning = next((ours for usual, ours in meaning.words.items() if _same(usual, value)), None)
        if meaning is None or (takes_value and not value):
            left += words[begin:position]
        else:
            taken.append(Found(" ".join(words[begin:position]), value, meaning))
    return [*left, *words[position:]], taken


def _same(value: str, other: str) -> bool:
    """Return whether two words are equal, or are equal numbers."""
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other


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


def _steps(ours: str, whole: Callable[[float], int], value: str, settings: Mapping[str, Any]) -> str:
    """Return a number of samples as steps."""
    return f"{ours} {whole(_whole(value) / max(1, settings['global_batch_size']))}"


def _loss_scale(name: str, usual: int | None, value: str, settings: Mapping[str, Any]) -> str:
    """Refuse a number of loss scaling under fp16: DeepSpeed's file has it. Other precisions do not read it."""
    if settings.get("fp16") and (usual is None or not _same(value, str(usual))):
        raise ValueError(f"set fp16.{name} in --deepspeed-config" + (f"; it is {usual} here" if usual else ""))
    return ""


RULES: dict[str, Rule] = {
    "max-position-embeddings=": _position_rows,
    "kv-channels=": _head_channels,
    "accumulate-allreduce-grads-in-fp32": _fp32_sums,
    "fp32-allreduce": _fp32_sums,
    "train-samples=": partial(_steps, "--train-iters", math.floor),
    "lr-decay-samples=": partial(_steps, "--lr-decay-iters", round),
    "lr-warmup-samples=": partial(_steps, "--lr-warmup-iters", round),
    "loss-scale=": partial(_loss_scale, "loss_scale", None),
    "initial-loss-scale=": partial(_loss_scale, "initial_scale_power", 2**16),
    "min-loss-scale=": partial(_loss_scale, "min_loss_scale", 1),
    "loss-scale-window=": partial(_loss_scale, "loss_scale_window", 1000),
    "hysteresis=": partial(_loss_scale, "hysteresis", 2),
}
"""Flag → the rule that other settings decide."""

_MEANINGS: dict[str, str | ByValue | Rule] = {name: "" for names in WITHOUT_EFFECT.values() for name in names.split()}
_MEANINGS |= {**RENAMED, **BY_VALUE, **RULES}
KNOWN = {name.rstrip("="): (name.endswith("="), meaning) for name, meaning in _MEANINGS.items()}
"""Name of each flag of Megatron-LM's that we know → whether it takes a value, and its meaning."""

HINTS = dict.fromkeys(KNOWN, "it is Megatron-LM's and without effect here: leave it out")
HINTS |= {name.rstrip("="): f"use {words.removesuffix(' {}')}" for name, words in RENAMED.items()}
HINTS |= {name.rstrip("="): rule.otherwise for name, rule in BY_VALUE.items() if rule.otherwise} | REMEDIES
"""Name of a foreign flag, with dashes → what to do where it is not taken: other values, YAML, plans."""


def differing_defaults(settings: Iterable[str], ours: Mapping[str, Any]) -> str:
    """Return one line: our defaults that are not Megatron-LM's for BERT. `settings` were given, `ours` is resolved."""
    given = set(settings) | ({"lr_warmup_fraction"} if "lr_warmup_iters" in settings else set())
    given |= {"lr_wsd_decay_style"} if ours["lr_decay_style"] != "wsd" else set()
    theirs = {name: value for name, value in THEIR_DEFAULTS.items() if name not in given}
    lines = (f"{flag(name)} {ours[name]} (there {value})" for name, value in theirs.items())
    return "defaults here that are not Megatron-LM's: " + ", ".join(lines) if theirs else ""
