"""`megatron-ddrp finetune predict`: label a file with a fine-tuned model, in constant memory."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_ddrp.conversion.families.contract import read_config_file
from megatron_ddrp.data.atomic import atomic_file
from megatron_ddrp.data.preprocess.inputs import is_stream
from megatron_ddrp.data.progress import progress
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.encoder import Encoder
from megatron_ddrp.encoders.huggingface import FamilyModel, load_tokenizer, load_with_head, num_segments
from megatron_ddrp.encoders.rows import Encoded, chunks, cut_warning, dev_order, pad_batch
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import OUTPUT_FILES, Kind, RowFile
from megatron_ddrp.tasks.finetune.runs import RUNS
from megatron_ddrp.tasks.finetune.table_files import Columns, Example, KnownFile, Task, TaskData, at_row, read_rows
from megatron_ddrp.tasks.finetune.task_files import count_unlabelled, text_columns, texts_to_predict
from megatron_ddrp.tasks.finetune.training import FINETUNED, better_run, model_folder, model_name, read_facts
from megatron_ddrp.tasks.finetune.workers import Sweep
from megatron_ddrp.tasks.jobs import Store, one_at_a_time

_TOGETHER = 2048
"""Number of rows in memory at a time."""
_BATCH = 64
NOT_KEPT = "its runs diverged, or used --no-keep-models (to repeat them, delete their lines in runs.jsonl)"
_SHOWN_MODELS = 10
"""Largest number of model folders in a message."""

TextColumns = tuple[str | None, str | None]
"""Columns of the text and of the second text of a pair; None for the column of training."""


class FineTuned(NamedTuple):
    """A fine-tuned model and its settings for reading a file."""

    model: nn.Module
    tokenizer: Tokenizer
    task: Task
    columns: Columns
    max_length: int
    device: torch.device

    def encode(self, texts: list[tuple[str, ...]]) -> Encoded:
        """Return the rows of some texts."""
        kind = KINDS[self.task.kind]
        examples = [Example(text, kind.unlabelled(self.task)) for text in texts]
        return kind.encode(self.task, examples, self.tokenizer, self.max_length)

    @torch.inference_mode()
    def predict(self, encoded: Encoded) -> list[Any]:
        """Return the predictions of some rows as JSON values."""
        kind = KINDS[self.task.kind]
        outcomes = kind.blank(encoded)
        for rows in dev_order(encoded, _BATCH):
            batch = pad_batch(encoded, rows).map(lambda field: torch.from_numpy(field).to(self.device))
            places, values = kind.outcomes(self.model(batch), encoded, rows)
            outcomes[places] = values.cpu().numpy()
        return list(kind.as_values(self.task, kind.predictions(self.task, encoded, outcomes)))


def _models_near(folder: Path) -> list[Path]:
    """Return the kept models in OUT/models/ if `folder` is OUT, OUT/models or a name in these; none of GLUE."""
    places = dict.fromkeys((folder / "models", folder, folder.parent, folder.parent / "models"))
    folders = (path for place in places for path in sorted(place.glob("*")))
    found = (path for path in folders if (facts := read_facts(path)) and facts["columns"] is not None)
    return list(islice(found, _SHOWN_MODELS))


def load_finetuned(folder: Path, device: torch.device, texts: TextColumns = (None, None)) -> FineTuned:
    """Load a folder that `megatron-ddrp finetune` wrote; `texts` replaces the columns of training.

    Raises:
        UserError: `megatron-ddrp finetune` did not write the folder.
    """
    config = read_config_file(folder) if (folder / "config.json").is_file() else {}
    facts = read_facts(folder)
    if facts is None or facts["columns"] is None:
        got = "not a model that finetune kept" if folder.exists() else "no such folder"
        if facts is None and FINETUNED in config:
            got = f"{FINETUNED!r} in its config.json is damaged"
        found = _models_near(folder)
        there = f"expected one of {', '.join(map(str, found))}" if found else "expected a folder OUT/models/TASK-…"
        raise UserError(f"--load {folder}: {got}; {there}")
    trained = Columns(*facts["columns"])
    if texts[1] and trained.pair is None:
        raise UserError(
            f"--text-pair-column {texts[1]}: {folder} was trained on single texts; leave the flag out", WRONG_ARGUMENTS
        )
    columns = Columns(texts[0] or trained.text, texts[1] or trained.pair, trained.label)
    columns.check_distinct()
    task = Task.of(facts["task"])
    model, weights, longest = load_with_head(folder, config.get("model_type", ""), KINDS[task.kind].head)
    if weights.missing:
        raise UserError(
            f"--load {folder}: it lacks the weight {min(weights.missing)}; fine-tune again, or copy it again"
        )
    if model.config.num_labels != KINDS[task.kind].num_outputs(task) or facts["max_seq_length"] > longest:
        raise UserError(
            f"--load {folder}: its config.json has other labels or fewer positions than its task; fine-tune again, or "
            "copy it again"
        )
    tokenizer = load_tokenizer(folder, num_segments(model.config))
    between = len(tokenizer.rows.pair) - len(tokenizer.rows.single) - 1
    if columns.pair and facts.get("pair_separators", between) != between:
        raise UserError(
            f"--load {folder}: an earlier version trained it on pairs with {facts['pair_separators']!r:.60} separators "
            f"between the texts, and its tokenizer writes {between}; fine-tune again"
        )
    return FineTuned(
        FamilyModel(model).to(device).eval(),
        tokenizer,
        task,
        columns,
        facts["max_seq_length"],
        device,
    )


def predict_file(
    folder: Path, source: Path, output: Path, device: torch.device, texts: TextColumns = (None, None)
) -> int:
    """Write the rows of `source` with their predictions to `output`; return the number of rows.

    Raises:
        UserError: the folder has no fine-tuned model, or a row of the file is invalid.
    """
    _writer(output, KINDS.values())  # an ending that no kind has is refused before the model is loaded
    model = load_finetuned(folder, device, texts)
    kind = KINDS[model.task.kind]
    make_writer = _writer(output, [kind])
    wanted, file = text_columns(model.columns), None if is_stream(str(source)) else KnownFile.of(source)
    rows = file.rows(wanted) if file else read_rows(str(source), wanted)
    count = cut = lacking = 0
    expected = count_unlabelled(file, kind, model.columns) if file else None
    with atomic_file(output) as stream, progress(" rows", expected, f"predicting {source.name}") as bar:
        writer = make_writer(stream, output.suffix, model.columns, kind.cell_text)
        for some in chunks(rows, _TOGETHER):
            read = [texts_to_predict(row, kind, model.columns) for row in some]
            encoded = model.encode(read)
            cut += encoded.cut
            predictions = model.predict(encoded)
            lacking += sum(told is None or (isinstance(told, list) and None in told) for told in predictions)
            for row, prediction in zip(some, predictions, strict=True):
                with at_row(row):
                    writer.write(row.cells, prediction)
            count += len(some)
            bar.update(len(some))
        writer.finish()
    if told := cut_warning(cut, count, model.max_length):
        print(f"{source}: {told}", file=sys.stderr)
    if lacking:
        print(
            f"{output}: rows without a prediction, because the model's outputs are not finite: {lacking:,}",
            file=sys.stderr,
        )
    if writer.changed:
        print(f"{output}: cells whose tabs and line breaks became blanks: {writer.changed:,}", file=sys.stderr)
    return count


def _writer(output: Path, kinds: Iterable[Kind]) -> type[RowFile]:
    """Return the writer of an ending that one of the kinds has. Raises `UserError` for another ending."""
    writers = OUTPUT_FILES | {ending: writer for kind in kinds for ending, writer in kind.output_files.items()}
    if output.suffix not in writers:
        raise UserError(f"--output {output}: expected a name that ends in {', '.join(writers)}", WRONG_ARGUMENTS)
    return writers[output.suffix]


def use_models(sweep: Sweep, store: Store) -> list[str]:
    """Predict the test files without labels; return lines that name the kept models and the predictions.

    Other commands with the same output folder wait meanwhile.
    """
    lines = []
    for encoder in sweep.encoders.values() if sweep.speaks else ():
        for data in sweep.data.values():
            with one_at_a_time(sweep.options.output_dir, model_name(data.task, encoder)):
                lines += _use_model(sweep, store, data, encoder)
    return lines


def _use_model(sweep: Sweep, store: Store, data: TaskData, encoder: Encoder) -> list[str]:
    """Predict a task's test file with the best model of an encoder; return lines that name model and predictions."""
    name, output = data.task.name, sweep.options.output_dir
    folder = model_folder(output, data.task, encoder, data.fingerprint)
    plain = folder.with_name(model_name(data.task, encoder))
    damaged = f"{plain} is damaged" if plain.exists() and read_facts(plain) is None else ""
    keeps = sweep.options.suite.keeps_model(name)
    if not keeps or read_facts(folder) is None:
        why = f"; {damaged or NOT_KEPT}" if keeps else ""
        if data.unlabelled:
            why += f"; {data.unlabelled.path} is not predicted"
        return [f"{name}: no model of {encoder.name} was kept{why}"]
    use = f"megatron-ddrp finetune predict --load {shlex.quote(str(folder))} --input FILE --output LABELLED"
    told = damaged or f"{plain} keeps that of other files or settings" if plain.exists() and folder != plain else ""
    if better := better_run(store, encoder, data, folder):
        told = f"of those kept; the better run {better} kept none: to repeat it, delete its line in {RUNS}"
    other = f" ({told})" if told else ""
    lines = [f"{name}: the best model of {encoder.name} is in {folder}{other}; to use it: {use}"]
    if data.unlabelled:
        data.unlabelled.check()
        predicted = output / "predictions" / f"{folder.name}-test.jsonl"
        predict_file(folder, data.unlabelled.path, predicted, sweep.device)
        lines.append(f"{name}: predictions for {data.unlabelled.path} are in {predicted}")
    return lines
