"""Kinds of tasks by name."""

from __future__ import annotations

from megatron_ddrp.tasks.finetune.kinds.contract import Kind
from megatron_ddrp.tasks.finetune.kinds.qa import QuestionAnswering
from megatron_ddrp.tasks.finetune.kinds.sequences import Classification, MultiLabel, Regression
from megatron_ddrp.tasks.finetune.kinds.tokens import Tokens

KINDS: dict[str, Kind] = {
    "classification": Classification(),
    "multi-label": MultiLabel(),
    "regression": Regression(),
    "tokens": Tokens(),
    "qa": QuestionAnswering(),
}
