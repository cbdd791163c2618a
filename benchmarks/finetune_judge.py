"""Score an encoder on STS-B by `transformers`' Trainer: an outside judge of `megatron-ddrp finetune`.

The settings are ours (appendix B of the paper): AdamW with eps 1e-6 and weight decay 0.01, linear warm-up over a tenth
of the steps and linear decay to 0, clipping at 1, fp32, squared error. The pooler is drawn anew, as ours is; rows,
tokenizer, batching and dropout are the Trainer's. Needs `pip install accelerate` and a folder that
`AutoModelForSequenceClassification` loads, of BERT's layout.

    python benchmarks/finetune_judge.py --load HF_DIR --data-dir glue --output judge.json

The file has one development score (Pearson's r) per seed and is written after every seed; seeds that it already has
are not run again.
"""

from __future__ import annotations

import json
import math
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from measure import benchmark_parser

from megatron_ddrp.tasks.finetune.metrics import PEARSON
from megatron_ddrp.tasks.glue import TASKS, Example, read_task

SETTINGS = ("load", "batch_size", "lr", "epochs", "max_seq_length")
"""Flags that a score depends on; the file keeps them."""


def encode(tokenizer: Any, examples: list[Example], max_length: int) -> list[dict[str, Any]]:
    """Return the Trainer's rows: piece ids, segment ids, mask and the label, not yet padded."""
    texts = zip(*(example.texts for example in examples), strict=True)
    fields = tokenizer(*map(list, texts), truncation=True, max_length=max_length)
    return [
        {**{name: values[row] for name, values in fields.items()}, "labels": example.label}
        for row, example in enumerate(examples)
    ]


def train_and_score(options: Namespace, seed: int) -> float | None:
    """Fine-tune from the folder's weights and return Pearson's r on the development file."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    data = read_task(TASKS["STS-B"], options.data_dir)
    tokenizer = AutoTokenizer.from_pretrained(options.load)
    train, dev = (encode(tokenizer, rows, options.max_seq_length) for rows in (list(data.train), list(data.dev["dev"])))
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(options.load, num_labels=1)
    pooler = model.base_model.pooler.dense
    pooler.weight.data.normal_(std=model.config.initializer_range)
    pooler.bias.data.zero_()
    steps = options.epochs * math.ceil(len(train) / options.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=64,
            learning_rate=options.lr,
            num_train_epochs=options.epochs,
            warmup_steps=math.ceil(0.1 * steps),
            weight_decay=0.01,
            adam_epsilon=1e-6,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            seed=seed,
        )
        trainer = Trainer(model, settings, DataCollatorWithPadding(tokenizer), train_dataset=train)  # type: ignore[arg-type]
        trainer.train()
        predicted: Any = trainer.predict(dev).predictions  # type: ignore[arg-type]  # [rows, 1]
    labels = np.array([example.label for example in data.dev["dev"]])
    return PEARSON.value(labels, predicted[:, 0])


def main() -> None:
    """Run the seeds that the output lacks."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--load", required=True, help="Hugging Face folder of a BERT")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder that holds STS-B's as the GLUE release")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the scores")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1")
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step")
    parser.add_argument("--lr", type=float, default=5e-5, help="peak learning rate")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training rows")
    parser.add_argument("--max-seq-length", type=int, default=128, help="pieces of a pair with its special tokens")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in SETTINGS}
    found = json.loads(options.output.read_text()) if options.output.exists() else {"settings": settings, "pearson": {}}
    if found["settings"] != settings:
        parser.error(f"{options.output} holds scores of other settings: {found['settings']}; name another file")
    for seed in range(1, options.seeds + 1):
        if str(seed) not in found["pearson"]:
            found["pearson"][str(seed)] = train_and_score(options, seed)
            options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
