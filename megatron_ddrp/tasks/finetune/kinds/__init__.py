"""Kinds of tasks by name."""

from __future__ import annotations

from megatron_ddrp.tasks.finetune.kinds.contract import Kind
from megatron_ddrp.tasks.finetune.kinds.multi_label import MultiLabel
from megatron_ddrp.tasks.finetune.kinds.qa import QuestionAnswering
from megatron_ddrp.tasks.finetune.kinds.regression import Regression
from megatron_ddrp.tasks.finetune.kinds.sequences import Classification
from megatron_ddrp.tasks.finetune.kinds.tokens import Tokens

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Classification(),
        MultiLabel(),
        Regression(),
        Tokens(),
        QuestionAnswering(),
    )
}
"""Kinds by name. The last one that is likely for a file is its kind, if the command line does not name one."""
