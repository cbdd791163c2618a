"""A tiny BERT of transformers with random weights over a given vocabulary, and one run of fine-tuning it."""

import json

import pytest
import torch

from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import TuningRun
from megatron_ddrp.tasks.finetune.table_files import Example, read_rows
from megatron_ddrp.tasks.finetune.training import build_model, finetune

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_bert(folder, words, hidden=32, max_length=64):
    """Write a BERT of one layer that knows `words` and 64 positions; return its folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL) + len(words),
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=max_length,
        initializer_range=0.1,
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words]) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder


def read_examples(path, task, labelled=True):
    """Read a file by the usual columns of the task's kind, every row checked."""
    kind = KINDS[task.kind]
    examples = []
    for row in read_rows(str(path)):
        texts = kind.texts(row.cells, kind.usual_columns)
        label = kind.label(row.cells[kind.usual_columns.label], task) if labelled else float("nan")
        if labelled:
            kind.check(texts, row.cells[kind.usual_columns.label])
        examples.append(Example(texts, label))
    return examples


def fine_tune(task, encoder, train, dev, max_length, epochs, head="common", micro=16):
    """Do one run at batch 16 and a rate of 1e-2; return its result and the encoded development rows."""
    kind = KINDS[task.kind]
    encoded = [kind.encode(task, rows, encoder.tokenizer, max_length) for rows in (train, dev)]
    run = TuningRun(
        task.name, 16, 1e-2, epochs, 1, max_length, encoder="e", data="d", micro_batch_size=micro, head=head
    )
    model = build_model(encoder, task, run, torch.device("cpu"))
    return finetune(run, task, model, encoded[0], {"dev": encoded[1]}), encoded[1]
