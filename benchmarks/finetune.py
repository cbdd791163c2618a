"""One fine-tuning step of ours beside `transformers`' Trainer: the same BERT, the same batches, the same padding.

Both get `BertModel`s of one size under a head, 32 rows of lengths like MRPC's padded to the longest of their batch,
AdamW with clipping at 1 and a linear schedule, fp32, dropout 0.1. A step is forward, backward, clipping, optimizer and
schedule: ours is `FineTuning.step`, the Trainer's is its `training_step` and the calls that its own loop makes after
it, without its logging. Each side pads the rows itself. Every round runs each arm once in random order. Needs
`pip install accelerate`, as the Trainer does.

    python benchmarks/finetune.py --pairs 60
    python benchmarks/finetune.py --pairs 60 --layers 4 --hidden 256

The last line gives ours ÷ Trainer, the median of the rounds' ratios with a bootstrap 95 % interval; the A/A row repeats
ours.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import DEVICE, benchmark_parser, print_ratio, time_rounds

from megatron_ddrp.conversion.model_code import SEQUENCE
from megatron_ddrp.encoders.huggingface import HuggingFaceEncoder
from megatron_ddrp.encoders.rows import Encoded, RowWriter
from megatron_ddrp.tasks.finetune.runs import TuningRun
from megatron_ddrp.tasks.finetune.training import FineTuning, TaskModel
from megatron_ddrp.tasks.glue import TASKS

BATCH, VOCABULARY, BOUND = 32, 8192, 1.0


def make_rows(batches: int) -> Encoded:
    """Return rows of random pieces; lengths spread like MRPC's (about 53 pieces, 20 to 90)."""
    rng = np.random.default_rng(0)
    lengths = rng.normal(53, 14, batches * BATCH).clip(20, 90).astype(int)
    pieces = [[2, *rng.integers(5, VOCABULARY, length - 2).tolist(), 3] for length in lengths]
    writer = RowWriter(pad_id=0)
    for row in pieces:
        writer.add(row, [int(place >= len(row) // 2) for place in range(len(row))])
    return writer.rows(rng.integers(0, 2, len(pieces)))


def make_config(layers: int, hidden: int) -> Any:
    """Return the configuration of a BERT of transformers."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )


def ours(config: Any, rows: Encoded, order: list[np.ndarray]) -> Callable[[], None]:
    """Return our step on the next batch of `order`."""
    from transformers import BertModel

    run = TuningRun("MRPC", BATCH, 3e-5, 1000, 1, 128, encoder="", data="", micro_batch_size=BATCH)
    encoder = HuggingFaceEncoder(BertModel(config, add_pooling_layer=False))
    task = TASKS["MRPC"]
    model = TaskModel(encoder, config.hidden_size, SEQUENCE, len(task.labels)).to(DEVICE)
    tuning = FineTuning(run, task, model, rows)
    return cycle(tuning.step, order)


def theirs(config: Any, rows: Encoded, order: list[np.ndarray], folder: str) -> Callable[[], None]:
    """Return the Trainer's step on the next batch of `order`: what its inner loop does, without its logging."""
    from transformers import (
        BertForSequenceClassification,
        BertTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    vocabulary = Path(folder) / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) + "\n")
    collate = DataCollatorWithPadding(BertTokenizer(str(vocabulary)))
    settings = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, learning_rate=3e-5, max_grad_norm=1.0, report_to=[], seed=1
    )
    trainer: Any = Trainer(BertForSequenceClassification(config), settings)
    trainer.create_optimizer_and_scheduler(num_training_steps=1000 * len(order))
    trainer.current_gradient_accumulation_steps = 1  # its loop sets this
    model = trainer.accelerator.prepare(trainer.model)
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)

    def step(numbers: np.ndarray) -> None:
        examples = [
            {
                "input_ids": rows.pieces[rows.places(numbers[at : at + 1])].tolist(),
                "token_type_ids": rows.segments[rows.places(np.array([n]))].tolist(),
                "label": int(rows.targets[n]),
            }
            for at, n in enumerate(numbers)
        ]
        trainer.training_step(model, dict(collate(examples)))
        trainer.accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()

    return cycle(step, order)


def cycle(step: Callable[[np.ndarray], None], order: list[np.ndarray]) -> Callable[[], None]:
    """Return a function that steps on the next batch, again on the first after the last."""
    batches = itertools.cycle(order)
    return lambda: step(next(batches))


def main() -> None:
    """Time both and print the ratio."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=60, help="rounds")
    parser.add_argument("--layers", type=int, default=2, help="layers of the BERT")
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 64")
    options = parser.parse_args()
    rows = make_rows(8)
    # Rows of similar length together, as our loop and the Trainer's group_by_length both give them.
    by_length = np.argsort([len(row) for row in rows.pieces], kind="stable")
    order = [by_length[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    config = make_config(options.layers, options.hidden)
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            "ours": ours(config, rows, order),
            "ours again": ours(config, rows, order),
            "Trainer": theirs(config, rows, order, folder),
        }
        seconds = time_rounds(arms, options.pairs, warm_up=len(order))
    print(f"{options.layers} layers x {options.hidden}, batches of {BATCH} rows, {DEVICE.type}, {options.pairs} rounds")
    for name, values in seconds.items():
        print(f"{name:12} {1e3 * np.median(values):8.1f} ms")
    print_ratio("A/A", seconds["ours again"] / seconds["ours"])
    print_ratio("ours / Trainer", seconds["ours"] / seconds["Trainer"], BOUND)


if __name__ == "__main__":
    main()
