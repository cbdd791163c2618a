"""README.md of a kept model: a model card with its base model, task and score, without any folder's path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from megatron_ddrp.checkpoint import is_checkpoint
from megatron_ddrp.conversion.families import FINE_TUNED
from megatron_ddrp.encoders.encoder import Encoder
from megatron_ddrp.pages.machine import versions
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.pages.rendering import render
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Task

PIPELINES = {"sequence": "text-classification", "tokens": "token-classification", "qa": "question-answering"}
"""Head of a kind of task → the hub's name of what it does."""


def finetuned_card(folder: Path, encoder: Encoder, task: Task, head: str | None, run: Run, row: dict[str, Any]) -> str:
    """Return the card of the model in `folder`, which `run` gave, with its line of runs.jsonl `row`.

    `head` is a key of `FINE_TUNED`, None for a folder that holds the encoder alone.
    """
    trust = (folder / "modeling_ddrp.py").exists()
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": PIPELINES[head] if head else "feature-extraction",
        "tags": ["megatron-ddrp", task.kind],
        "metrics": [task.metric],
    }
    baseline = row.get("baseline")
    metric = task.score_name if "facts" in row else task.metric  # GLUE's rows have no facts
    facts = {
        "base model": base_name(encoder.folder),
        "task": f"{task.name}, {task.kind}",
        "labels": ", ".join(task.labels) or "none",
        f"score ({metric})": f"{row['score']:.4f} on {row['dev_examples']:,} development examples",
        **({} if baseline is None else {"score of always the most frequent label": f"{baseline:.4f}"}),
        "batch size, learning rate, epochs": f"{run.batch_size}, {run.lr:g}, {run.epochs}",
        "seed": str(run.seed),
        "longest row": f"{run.max_seq_length} pieces",
    }
    return render(
        "finetuned_card.md.jinja",
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).strip(),
        name=folder.name,
        base=base_name(encoder.folder),
        task=task.name,
        facts=Table(["setting", "value"], list(facts.items()), wordy=(1,)),
        usage=_usage(folder.name, head, trust),
        trust=trust,
        versions=Table(["package", "version"], list(versions().items()), wordy=(1,)),
    )


def base_name(folder: Path) -> str:
    """Return the name of an encoder's folder; of one checkpoint, that of its run as well."""
    place = folder.resolve()
    return f"{place.parent.name}/{place.name}" if is_checkpoint(place) else place.name


def _usage(name: str, head: str | None, trust: bool) -> list[str]:
    auto = f"AutoModelFor{FINE_TUNED[head]}" if head else "AutoModel"
    place = json.dumps(f"USER/{name}", ensure_ascii=False) + (", trust_remote_code=True" if trust else "")
    return [
        f"from transformers import {auto}, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({place})",
        f"model = {auto}.from_pretrained({place})",
    ]
