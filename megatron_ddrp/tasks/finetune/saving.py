"""Fine-tuned model of a task's best run, kept as a Hugging Face folder.

config.json has the key "finetuned" with the facts that `megatron-ddrp finetune predict` needs: the task, its columns,
the length of a row, and the run. For each encoder, task and data of a task the disk has the model of the best run so
far: the run with the highest score; among equal scores, the run whose name comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ddrp.checkpoint import is_checkpoint
from megatron_ddrp.conversion.exported_folder import CARD, check_sums, whole_folder, write_sums
from megatron_ddrp.conversion.finetuned import TunedHead, write_finetuned
from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE
from megatron_ddrp.conversion.model_card import loading_lines, render_card
from megatron_ddrp.conversion.model_code import write_model_code
from megatron_ddrp.conversion.task_heads import HeadForm
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.conversion.training_record import facts_table
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.encoders.encoder import Encoder, TrainedEncoder
from megatron_ddrp.encoders.huggingface import FamilyModel, HuggingFaceEncoder, num_segments
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_object
from megatron_ddrp.tasks.finetune.heads import TaskModel
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Columns, Task, TaskData
from megatron_ddrp.tasks.jobs.store import one_at_a_time

FINETUNED = "finetuned"
"""Key in config.json of the facts about task and run."""
SHORTEST_ROW = 4
"""Number of special pieces of a pair."""


def model_name(task: Task, encoder: Encoder) -> str:
    """Return the name of the best model of an encoder on a task, and of the lock of its folders."""
    return f"{task.name}-{encoder.fingerprint[:8]}"


def model_folder(output: Path, task: Task, encoder: Encoder, data: str) -> Path:
    """Return the folder of the best model of an encoder on a task with the fingerprint `data`.

    The first data of a task get OUT/models/NAME, other data OUT/models/NAME-DATA.
    """
    plain = output / "models" / model_name(task, encoder)
    own = plain.with_name(f"{plain.name}-{data[:8]}")
    found = (folder for folder in (plain, own) if (facts := read_facts(folder)) and facts["data"] == data)
    return next(found, own if plain.exists() else plain)


def keep_if_best(
    output: Path, encoder: Encoder, data: TaskData, run: Run, model: nn.Module, row: dict[str, Any]
) -> None:
    """Write a run's model into OUT = `output` unless there is a better one for the same data. A lock makes others wait.

    A model that diverged is not written.
    """
    if not all(weight.isfinite().all() for weight in model.parameters()):
        return
    with one_at_a_time(output, model_name(data.task, encoder)):
        folder = model_folder(output, data.task, encoder, run.data)
        folder.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "task": data.task.facts,
            "columns": list(data.columns) if data.columns else None,
            "max_seq_length": run.max_seq_length,
            "data": run.data,
            "run": run.name,
            "score": row["score"],
        }
        before = read_facts(folder)
        is_whole = (folder / CARD).is_file()  # the last file of a kept model: the run of a killed command comes again
        if before and (_rank(before), is_whole) >= (_rank(facts), True):
            return
        form = write_model(encoder, model, data.task, facts, folder)
        write_text(folder / CARD, finetuned_card(folder, encoder, data.task, form, run, row))


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts about task and run in a fine-tuned folder's config.json.

    None for any other folder, also for one whose config.json is damaged.
    """
    path = folder / "config.json"
    try:
        check_sums(folder, path.name)
        facts = read_object(path).get(FINETUNED) if path.is_file() else None
    except UserError:
        return None
    return facts if _are_facts(facts) else None


def _are_facts(facts: Any) -> bool:
    """Return whether a value has the form of `finetuned_facts`."""
    try:
        task, columns = Task.of(facts["task"]), Columns(*facts["columns"] or ("", None, ""))
        names = [facts["run"], facts["data"], task.name, task.metric, *task.labels, columns.text, columns.label]
        names += [] if columns.pair is None else [columns.pair]
        return (
            isinstance(facts["task"]["labels"], list)
            and isinstance(facts["columns"], list | None)
            and task.kind in KINDS
            and all(isinstance(name, str) for name in names)
            and type(facts["max_seq_length"]) is int
            and facts["max_seq_length"] >= SHORTEST_ROW
            and type(facts["score"]) in (int, float)
        )
    except (KeyError, TypeError):
        return False


def better_run(rows: Iterable[dict[str, Any]], encoder: Encoder, data: TaskData, folder: Path) -> str | None:
    """Return the name of the best of `rows` on a task if the model in `folder` is not its own; None otherwise.

    A run with --no-keep-models keeps none, and a kept model may have been deleted.
    """
    wanted, facts = (encoder.fingerprint, data.task.name, data.fingerprint), read_facts(folder)
    own = [row for row in rows if (row["encoder"], row["task"], row["data"]) == wanted]
    best = max(own, key=lambda row: row["score"], default=None)
    return Run.of_row(best).name if best and (facts is None or best["score"] > facts["score"]) else None


def _rank(facts: dict[str, Any]) -> tuple[float, list[int]]:
    return facts["score"], [-ord(letter) for letter in facts["run"]]


def write_model(encoder: Encoder, model: nn.Module, task: Task, facts: dict[str, Any], folder: Path) -> HeadForm | None:
    """Write a fine-tuned model as a Hugging Face folder, and return the form of the head that it has there.

    If our head is on an encoder of transformers, only the encoder is written: no class of its family has our head. The
    form is None then. A failure leaves no partial folder.
    """
    kind = KINDS[task.kind]
    if isinstance(model, FamilyModel):
        _write_family_model(encoder, model.model, kind.head, facts, folder)
        return kind.head
    assert isinstance(model, TaskModel)
    if isinstance(model.encoder, HuggingFaceEncoder):
        _write_family_model(encoder, model.encoder.model, None, facts, folder)
        return None
    assert isinstance(model.encoder, TrainedEncoder)
    tuned = TunedHead(model.head, kind.head, kind.hub_labels(task))
    write_finetuned(model.encoder.model, encoder.tokenizer, tuned, folder, {FINETUNED: facts})
    return kind.head


def _write_family_model(
    encoder: Encoder, model: Any, form: HeadForm | None, facts: dict[str, Any], folder: Path
) -> None:
    setattr(model.config, FINETUNED, facts)
    states = {name: tensor.to("cpu", torch.float32) for name, tensor in model.state_dict().items()}
    with whole_folder(folder) as new:
        write_tokenizer(encoder.tokenizer, new, encoder.max_length, num_segments(model.config))
        if model.config.model_type == OWN_MODEL_TYPE:
            write_model_code(new, model.config.position_encoding)
            classes = {"AutoConfig": "configuration_ddrp.DdrpConfig", "AutoModel": "modeling_ddrp.DdrpModel"}
            if form:
                classes[f"AutoModelFor{form.name}"] = f"modeling_ddrp.DdrpFor{form.name}"
            model.config.auto_map = classes
        model.save_pretrained(new, state_dict=states)
        write_sums(new)


def finetuned_card(
    folder: Path, encoder: Encoder, task: Task, form: HeadForm | None, run: Run, row: dict[str, Any]
) -> str:
    """Return the card of the model in `folder`, which `run` gave, with its line of runs.jsonl `row`.

    `form` is that of the folder's head, None for a folder that holds the encoder alone.
    """
    has_code = (folder / "modeling_ddrp.py").exists()
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": form.pipeline if form else "feature-extraction",
        "tags": ["megatron-ddrp", task.kind],
        "metrics": [task.metric],
    }
    baseline = row.get("baseline")
    metric = KINDS[task.kind].score_name(task) if "facts" in row else task.metric  # GLUE's rows have no facts
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
    return render_card(
        "finetuned_card.md.jinja",
        folder.name,
        metadata,
        loading_lines(folder.name, f"AutoModelFor{form.name}" if form else "AutoModel", has_code),
        has_code,
        base=base_name(encoder.folder),
        task=task.name,
        facts=facts_table(facts),
    )


def base_name(folder: Path) -> str:
    """Return the name of an encoder's folder; of one checkpoint, that of its run as well."""
    place = folder.resolve()
    return f"{place.parent.name}/{place.name}" if is_checkpoint(place) else place.name
