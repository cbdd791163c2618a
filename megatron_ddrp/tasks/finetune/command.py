"""`megatron-ddrp finetune`: fine-tune encoders on your own tasks, or label a file with a fine-tuned model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_ddrp.run.launch import first_rank_speaks
from megatron_ddrp.tasks.finetune.arguments import Prediction, parse_arguments, parse_prediction
from megatron_ddrp.tasks.finetune.running import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune, report or predict. Return 1 if --report leaves damaged runs out."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["predict"]:
        return predict(parse_prediction(words[1:]))
    with first_rank_speaks():
        options = parse_arguments(words)
    return run(options)


def predict(wanted: Prediction) -> int:
    """Label a file with a fine-tuned model."""
    from megatron_ddrp.tasks.finetune.predict import predict_file  # here, because it imports torch
    from megatron_ddrp.tasks.jobs.workers import device_of

    columns = wanted.text_column, wanted.text_pair_column
    count = predict_file(wanted.load, wanted.input, wanted.output, device_of(0), columns)
    print(f"{count:,} rows written to {wanted.output}")
    return 0


SECTIONS: tuple[type, ...] = ()
