"""Fine-tuned model of a task's best run, kept as a Hugging Face folder.

config.json has the key "finetuned" with the facts that `megatron-ddrp finetune predict` needs: the task, its columns,
the length of a row, and the run. For each encoder, task and data of a task the disk has the model of the best run so
far: the run with the highest score; among equal scores, the run whose name comes first.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_ddrp.conversion.export_sums import CARD
from megatron_ddrp.conversion.families import FINE_TUNED
from megatron_ddrp.conversion.finetuned import TaskHead, write_finetuned
from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE
from megatron_ddrp.conversion.model_code import write_model_code
from megatron_ddrp.conversion.output_folder import whole_folder
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.encoders.encoder import Encoder, TrainedEncoder
from megatron_ddrp.encoders.huggingface import FamilyModel, HuggingFaceEncoder
from megatron_ddrp.foreign import read_object
from megatron_ddrp.tasks.finetune.heads import DROPOUT, PROBLEM_TYPES
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.model_card import finetuned_card
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Task, TaskData
from megatron_ddrp.tasks.jobs.store import one_at_a_time

if TYPE_CHECKING:
    from megatron_ddrp.tasks.finetune.sweep import Sweep

FINETUNED = "finetuned"
"""Key in config.json of the facts about task and run."""
TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model")


def model_name(task: Task, encoder: Encoder) -> str:
    """Return the name of the best model of an encoder on a task, and of the lock of its folders."""
    return f"{task.name}-{encoder.fingerprint[:8]}"


def model_folder(output: Path, task: Task, encoder: Encoder, data: str) -> Path:
    """Return the folder of the best model of an encoder on a task with the fingerprint `data`.

    The first data of a task get OUT/models/NAME, other data OUT/models/NAME-DATA.
    """
    plain = output / "models" / model_name(task, encoder)
    own = plain.with_name(f"{plain.name}-{data[:8]}")
    found = (folder for folder in (plain, own) if (facts := kept(folder)) and facts["data"] == data)
    return next(found, own if plain.exists() else plain)


def keep_if_best(sweep: Sweep, run: Run, model: nn.Module, row: dict[str, Any]) -> None:
    """Write a run's model unless there is a better one for the same data. A lock makes other processes wait.

    A model that diverged is not written.
    """
    if not all(weight.isfinite().all() for weight in model.parameters()):
        return
    encoder, data = sweep.encoders[run.encoder], sweep.data[run.task]
    output = sweep.options.output_dir
    with one_at_a_time(output, model_name(data.task, encoder)):
        folder = model_folder(output, data.task, encoder, run.data)
        folder.parent.mkdir(parents=True, exist_ok=True)
        facts = finetuned_facts(encoder, data, run, row)
        before = kept(folder)
        if before and _rank(before) >= _rank(facts):
            return
        head = write_model(encoder, model, data.task, facts, folder)
        write_text(folder / CARD, finetuned_card(folder, encoder, data.task, head, run, row))


def kept(folder: Path) -> dict[str, Any] | None:
    """Return the facts about task and run in a fine-tuned folder's config.json; None for any other folder."""
    path = folder / "config.json"
    facts = read_object(path).get(FINETUNED) if path.is_file() else None
    return facts if isinstance(facts, dict) and {"task", "data", "score", "run"} <= facts.keys() else None


def finetuned_facts(encoder: Encoder, data: TaskData, run: Run, row: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about task and run for config.json."""
    return {
        "task": data.task.facts,
        "columns": list(data.columns) if data.columns else None,
        "max_seq_length": run.max_seq_length,
        "pair_separators": encoder.pair_separators,
        "data": run.data,
        "run": run.name,
        "score": row["score"],
    }


def _rank(facts: dict[str, Any]) -> tuple[float, list[int]]:
    return facts["score"], [-ord(letter) for letter in facts["run"]]


def write_model(encoder: Encoder, model: nn.Module, task: Task, facts: dict[str, Any], folder: Path) -> str | None:
    """Write a fine-tuned model as a Hugging Face folder, and return the kind of its head, a key of `FINE_TUNED`.

    If our head is on an encoder of transformers, only the encoder is written: no class of its family has our head. The
    kind is None then. A failure leaves no partial folder.
    """
    kind = KINDS[task.kind].head
    if isinstance(model, FamilyModel):
        _write_family_model(encoder, model.model, kind, facts, folder)
        return kind
    if isinstance(model.encoder, HuggingFaceEncoder):
        _write_family_model(encoder, model.encoder.model, None, facts, folder)
        return None
    assert isinstance(model.encoder, TrainedEncoder)
    layers: dict[str, Any] = {"classifier" if kind != "qa" else "qa_outputs": model.output}
    if kind == "sequence":
        layers["pooler.dense"] = model.pooler
    weights = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.named_parameters()}
    head = TaskHead(kind, weights, task.labels, PROBLEM_TYPES.get(task.kind), DROPOUT)
    write_finetuned(model.encoder.model, encoder.tokenizer, head, folder, {FINETUNED: facts})
    return kind


def _write_family_model(encoder: Encoder, model: Any, head: str | None, facts: dict[str, Any], folder: Path) -> None:
    setattr(model.config, FINETUNED, facts)
    states = {name: tensor.to("cpu", torch.float32) for name, tensor in model.state_dict().items()}
    with whole_folder(folder) as new:
        for pattern in TOKENIZER_FILES:
            for path in encoder.folder.glob(pattern):
                shutil.copy(path, new / path.name)
        if model.config.model_type == OWN_MODEL_TYPE:
            write_model_code(new, model.config.position_encoding)
            classes = {"AutoConfig": "configuration_ddrp.DdrpConfig", "AutoModel": "modeling_ddrp.DdrpModel"}
            if head:
                classes[f"AutoModelFor{FINE_TUNED[head]}"] = f"modeling_ddrp.DdrpFor{FINE_TUNED[head]}"
            model.config.auto_map = classes
        model.save_pretrained(new, state_dict=states)
