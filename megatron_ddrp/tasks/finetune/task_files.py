"""Files of a user's own tasks: rows to train on, and rows that a kept model labels.

Each file to train on is read twice: first to check it before training starts, then to make the model's rows. Only
lengths and labels stay in memory, a few bytes per row. A file that has changed in between is refused. `megatron-ddrp
finetune predict` labels a file in constant memory.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import shlex
import sys
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import combinations, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_ddrp.config import registry
from megatron_ddrp.conversion.families.contract import read_config_file
from megatron_ddrp.conversion.model_code import PIECES
from megatron_ddrp.data.atomic import atomic_file
from megatron_ddrp.data.preprocess.documents import sequences_within, words_of
from megatron_ddrp.data.preprocess.inputs import InputFile
from megatron_ddrp.data.progress import progress
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.encoder import LoadedEncoder
from megatron_ddrp.encoders.huggingface import FamilyModel, Filled, load_tokenizer, load_with_head, num_segments
from megatron_ddrp.encoders.onnx_graph import OnnxModel
from megatron_ddrp.encoders.rows import Encoded, chunks, cut_warning, dev_order
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, shown_names
from megatron_ddrp.pages.markdown import Table, percent
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import OUTPUT_FILES, PREDICTION, Kind, RowFile, as_text
from megatron_ddrp.tasks.finetune.options import TaskFiles
from megatron_ddrp.tasks.finetune.runs import RUNS
from megatron_ddrp.tasks.finetune.table_files import (
    Columns,
    Example,
    Examples,
    FileRow,
    KnownFile,
    Task,
    TaskData,
    at,
    columns_of,
    read_rows,
)
from megatron_ddrp.tasks.finetune.training import (
    DEV_BATCH_SIZE,
    FINETUNED,
    batch_of,
    better_run,
    compute_outcomes,
    model_folder,
    model_name,
    read_facts,
)
from megatron_ddrp.tasks.finetune.workers import Sweep
from megatron_ddrp.tasks.jobs import one_at_a_time
from megatron_ddrp.tasks.statistics import format_interval, percentile_interval, table_of

_LOOKED_AT = 1000
"""Number of rows that decide the kind of a task without --kind."""
SHOWN_LABELS = 10
MOST_GROUPS = 20
"""Largest number of groups of a test file."""
FEWEST_WORDS = 8
"""Smallest number of words of a text that is looked for in the text of pre-training: shorter ones recur by chance."""
_NUMBER = re.compile(r"[+-]?(\d+\.?|\d*\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"', re.DOTALL)
"""Text as a program quotes it: in quotation marks, with doubled ones inside."""


def read_task(files: TaskFiles) -> TaskData:
    """Read and check the files of a task. Test files without the column of labels are to be predicted, not scored.

    Raises:
        UserError: a file, a column or a label is missing or wrong; the message names file and line.
    """
    files.require()
    assert files.train is not None and files.valid is not None
    _refuse_pipes(files.train, files.valid, *files.tests.values())
    known = columns_of(str(files.train))
    kind = KINDS[files.kind] if files.kind else _likely_kind(files, known)
    columns = _columns(files, known, kind)
    train = _Reading(files.train, kind, columns)
    task = Task(files.task_name, files.metric or next(iter(kind.metrics)), kind.name, _sort_labels(train.counts))
    with at(files.train):
        kind.check_labels(task, is_guessed=files.kind is None)
    kind.check_metric(task.metric, task.labels)
    dev = {"valid": _Reading(files.valid, kind, columns, task)}
    unlabelled, to_predict = [], {}
    for name, path in files.tests.items():
        if columns.label in (found := columns_of(str(path))):
            dev[name] = _Reading(path, kind, columns, task, files.test_groups)
        else:
            to_predict[name] = KnownFile.of(path)
            count = count_unlabelled(to_predict[name], kind, columns)
            missing = f"no column {columns.label!r}, it has {shown_names(found)}"
            unlabelled.append(f"{name}: {count:,} rows without labels, to be predicted ({missing})")
    baseline = kind.baseline(task, train.counts, kind.answers(task, dev["valid"].labels))
    told_anew = [scheme for scheme in [kind.scheme(task)] if scheme not in ("", "IOB2")]  # earlier versions knew one
    code: list[Any] = [*registry.KINDS.code(kind.name), *registry.METRICS.code(task.metric)]
    code += files.test_facts(to_predict)
    digest = hashlib.sha256(json.dumps([task.facts, list(columns), *told_anew, *code]).encode())
    for reading in (train, *dev.values()):
        digest.update(reading.file.digest)
    with at(files.valid):
        remarks = list(kind.remarks(task, {name: reading.labels for name, reading in dev.items()}))
    return TaskData(
        task,
        train.examples(task),
        {file: examples for name, reading in dev.items() for file, examples in reading.by_group(name, task).items()},
        digest.hexdigest(),
        (*_facts(task, columns, train, dev, baseline), *_hints(files, kind, train, dev), *remarks, *unlabelled),
        columns,
        baseline,
        to_predict,
    )


def _refuse_pipes(*paths: Path) -> None:
    for path in paths:
        if InputFile(str(path), path.name).is_stream:
            raise UserError(f"{path}: a pipe, but its rows are read several times; write it to the disk first")


@dataclass
class _Reading:
    """Counts, lengths and labels of a checked file."""

    path: Path
    kind: Kind
    columns: Columns
    task: Task | None = None
    """Task whose labels the file must have; None for the training file, which defines them."""
    group: str | None = None
    """Column whose values part the rows into groups."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of rows per label, or of words per tag."""
    labels: list[Any] = field(default_factory=list)
    """Labels of the rows; empty for the training file."""
    quoted: int = 0
    """Number of rows of a .tsv with a text in quotation marks that doubles the marks inside."""

    def __post_init__(self) -> None:
        self.file = KnownFile.of(self.path)
        self.lengths, self.hashes = array("q"), array("q")
        self.groups: dict[str, list[int]] = {}
        is_tsv = InputFile(str(self.path), str(self.path)).ending == ".tsv"
        for row in self._rows():
            cell = row.cells[self.columns.label]
            with at(row.where):
                texts = self.kind.texts(row.cells, self.columns)
                names = self.kind.label_names(cell)
                self.kind.check(texts, cell)
                if self.task is not None:
                    self.labels.append(self.kind.label(cell, self.task))
            self.counts.update(names)
            self.quoted += is_tsv and any(map(_QUOTED.fullmatch, texts))
            if self.group:
                self.groups.setdefault(" ".join(as_text(row.cells[self.group]).split()), []).append(len(self.lengths))
            self.lengths.append(sum(map(len, texts)))
            self.hashes.append(hash(tuple(" ".join(text.casefold().split()) for text in texts)))
        if len(self.groups) > MOST_GROUPS:
            raise UserError(
                f"{self.path}: column {self.group!r} has {len(self.groups):,} values, expected at most {MOST_GROUPS} "
                "for --test-groups",
                WRONG_ARGUMENTS,
            )

    def _rows(self) -> Iterator[FileRow]:
        return self.file.rows([name for name in (*self.columns, self.group) if name])

    def texts(self) -> Iterator[tuple[str, ...]]:
        """Yield the texts of each row; the words of a sentence are one text."""
        for row in self._rows():
            texts = self.kind.texts(row.cells, self.columns)
            yield (" ".join(texts),) if self.kind.head is PIECES else texts

    def by_group(self, name: str, task: Task) -> dict[str, Examples]:
        """Return the file's examples under its name, and those of each group under NAME/VALUE."""
        whole = self.examples(task)
        return {name: whole, **{f"{name}/{value}": whole.only(np.array(rows)) for value, rows in self.groups.items()}}

    def examples(self, task: Task) -> Examples:
        """Return the rows as examples of the task."""

        def read() -> Iterable[Example]:
            for row in self._rows():
                cell = row.cells[self.columns.label]
                yield Example(self.kind.texts(row.cells, self.columns), self.kind.label(cell, task))

        return Examples(read, np.frombuffer(self.lengths, np.int64))


def _usual_labels() -> list[str]:
    """Return the usual names of the column of labels, of all kinds."""
    return list(
        dict.fromkeys(name for kind in KINDS.values() for name in (kind.usual_columns.label, *kind.label_columns))
    )


def _likely_kind(files: TaskFiles, known: Sequence[str]) -> Kind:
    """Guess the kind from the columns and from the labels of the first rows."""
    label = files.label_column or next((name for name in _usual_labels() if name in known), None)

    @functools.cache
    def cells() -> list[Any]:
        if label is None or label not in known:  # finding the columns then raises an error that names the flag
            return []
        return [row.cells.get(label) for row in itertools.islice(read_rows(str(files.train), None), _LOOKED_AT)]

    return next(kind for kind in reversed([*KINDS.values()]) if kind.is_likely(known, cells))


def _columns(files: TaskFiles, known: Sequence[str], kind: Kind) -> Columns:
    """Return the columns to read: those named by flags, else usual ones that the file has."""

    def find(given: str | None, usual: Sequence[str], flag: str) -> str:
        if given is not None:
            return given  # if the file lacks it, reading raises an error with the file's columns
        for name in usual:
            if name in known:
                return name
        raise UserError(
            f"{files.train}: its columns are {shown_names(known)}, and none of them has a usual name "
            f"({', '.join(dict.fromkeys(usual))}); name the column to read by {flag}",
            WRONG_ARGUMENTS,
        )

    texts = [name for own in (kind, *KINDS.values()) for name in (own.usual_columns.text, *own.text_columns)]
    text = find(files.text_column, texts, "--text-column")
    labels = [kind.usual_columns.label, *kind.label_columns, *_usual_labels()]
    label = find(files.label_column, labels, "--label-column")
    pair = files.text_pair_column or kind.usual_columns.pair
    if pair is None and files.text_column is None:
        pair = next((name for name in kind.pair_columns.get(text, ()) if name in known), None)
    columns = Columns(text, pair, label)
    columns.check_distinct()
    return columns


def _sort_labels(counts: Counter[str]) -> tuple[str, ...]:
    """Return the labels sorted by name, or by number if all of them are numbers, such as 10, +1 or 1.0."""
    is_number = all(_NUMBER.fullmatch(name) for name in counts)
    return tuple(sorted(counts, key=lambda name: (Decimal(name if is_number else 0), name)))


def _facts(
    task: Task, columns: Columns, train: _Reading, dev: dict[str, _Reading], baseline: float | None
) -> Iterator[str]:
    """Yield sentences about the data for the plan."""
    read = " + ".join(filter(None, (columns.text, columns.pair)))
    kind = KINDS[task.kind]
    scheme = f" ({kind.scheme(task)})" if kind.scheme(task) else ""
    yield f"{task.kind}, {kind.score_name(task)}{scheme}; text from {read}, label from {columns.label}"
    for name, reading in {"train": train, **dev}.items():
        if task.labels:
            few = ", ".join(f"{label} {reading.counts[label]:,}" for label in task.labels[:SHOWN_LABELS])
            more = len(task.labels) - SHOWN_LABELS
            yield f"{name}: {few}" + (f" and {more} more labels" if more > 0 else "")
    alike: dict[str, list[str]] = {}
    for label in task.labels:
        alike.setdefault(unicodedata.normalize("NFC", label).strip(), []).append(label)
    for same in alike.values():
        if len(same) > 1:
            told = ", ".join(map(ascii, same))
            yield f"WARNING, labels that differ only in blanks or Unicode form are different classes: {told}"
    if baseline is not None:
        yield f"score of always the most frequent label: {100 * baseline:.2f}"


def _hints(files: TaskFiles, kind: Kind, train: _Reading, dev: dict[str, _Reading]) -> Iterator[str]:
    """Yield warnings about files that are as another program writes them, or are there twice."""
    readings = {"train": train, **dev}
    for (same, other), (name, reading) in combinations(readings.items(), 2):
        if reading.file.digest == other.file.digest:
            yield f"{name}: WARNING, the same file as {same}; its score says nothing about new rows"
        elif count := np.isin(reading.hashes, other.hashes).sum():
            yield f"{name}: WARNING, {count:,} of {len(reading.hashes):,} rows have texts that stand in {same} too"
    if files.pretraining_text:
        yield from _in_pretraining(files.pretraining_text, readings)
    for name, reading in readings.items():
        del reading.hashes[:]  # training needs the memory
        if reading.quoted:
            yield (
                f"{name}: WARNING, {reading.quoted:,} rows have texts in quotation marks with doubled marks inside; in "
                ".tsv they are text; save the file as .csv if a program has added them"
            )
    if files.kind is None and kind.predicts_numbers and all(float(label).is_integer() for label in dev["valid"].labels):
        yield f"valid: all labels are whole numbers; if they are classes, name another --kind than {kind.name}"


def _in_pretraining(names: Sequence[str], readings: Mapping[str, _Reading]) -> Iterator[str]:
    """Yield per file the number of rows with a text of `FEWEST_WORDS` words or more that stands in a document."""
    rows = {name: [set(map(words_of, texts)) for texts in reading.texts()] for name, reading in readings.items()}
    found = sequences_within(names, set().union(*itertools.chain(*rows.values())), FEWEST_WORDS)
    for name, of_file in rows.items():
        count = sum(not found.isdisjoint(texts) for texts in of_file)
        told = f"{name}: {count:,} of {len(of_file):,} rows have a text of {FEWEST_WORDS} words or more that stands in"
        yield f"{told} the pre-training text"


def text_columns(columns: Columns) -> list[str]:
    """Return the columns that a row without a label must have."""
    return [name for name in (columns.text, columns.pair) if name]


def texts_to_predict(row: FileRow, kind: Kind, columns: Columns) -> tuple[str, ...]:
    """Return the texts of a row.

    Raises:
        UserError: a cell holds no text, or the row has a column of predictions already.
    """
    with at(row.where):
        texts = kind.texts(row.cells, columns)
    if PREDICTION in row.cells:
        raise UserError(f"{row.where}: there is a column {PREDICTION!r} already; rename it")
    return texts


def count_unlabelled(file: KnownFile, kind: Kind, columns: Columns) -> int:
    """Read a file that is to be predicted and return its number of rows.

    Raises:
        UserError: a row cannot be predicted; the message names file and line.
    """
    count = 0
    for row in file.rows(text_columns(columns)):
        texts_to_predict(row, kind, columns)
        count += 1
    return count


_TOGETHER = 2048
"""Number of rows in memory at a time."""
NOT_KEPT = "its runs diverged, or used --no-keep-models (to repeat them, delete their lines in runs.jsonl)"
_SHOWN_MODELS = 10
"""Largest number of model folders in a message."""

TextColumns = tuple[str | None, str | None]
"""Columns of the text and of the second text of a pair; None for the column of training."""


class FineTuned(NamedTuple):
    """A fine-tuned model and its settings for reading a file."""

    model: Any
    """Module of transformers with its head, or an `OnnxModel`."""
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

    def _outputs(self, encoded: Encoded, rows: np.ndarray) -> torch.Tensor:
        return self.model(batch_of(encoded, rows, self.device))

    @torch.inference_mode()
    def predictions(self, encoded: Encoded) -> Any:
        """Return the predictions of some rows in the form that the task's metric takes."""
        kind = KINDS[self.task.kind]
        outcomes, _ = compute_outcomes(kind, encoded, dev_order(encoded, DEV_BATCH_SIZE), self._outputs)
        return kind.predictions(self.task, encoded, outcomes)

    def predict(self, encoded: Encoded) -> list[Any]:
        """Return the predictions of some rows as JSON values."""
        return list(KINDS[self.task.kind].as_values(self.task, self.predictions(encoded)))


def _models_near(folder: Path) -> list[Path]:
    """Return the kept models in OUT/models/ if `folder` is OUT, OUT/models or a name in these; none of GLUE."""
    places = dict.fromkeys((folder / "models", folder, folder.parent, folder.parent / "models"))
    folders = (path for place in places for path in sorted(place.glob("*")))
    found = (path for path in folders if (facts := read_facts(path)) and facts["columns"] is not None)
    return list(islice(found, _SHOWN_MODELS))


def load_finetuned(path: Path, device: torch.device, texts: TextColumns = (None, None)) -> FineTuned:
    """Load a folder that `megatron-ddrp finetune` wrote, or a graph of it; `texts` replaces the columns of training.

    Raises:
        UserError: `megatron-ddrp finetune` did not write the folder.
    """
    is_graph = path.suffix == ".onnx" and path.is_file()
    folder = path.parent.parent if is_graph else path
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
    if is_graph:
        device, model, weights, longest = torch.device("cpu"), OnnxModel(path), Filled(), facts["max_seq_length"]
    else:
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
    module = model if is_graph else FamilyModel(model).to(device).eval()
    return FineTuned(module, tokenizer, task, columns, facts["max_seq_length"], device)


def evaluate_file(
    models: Sequence[Path], source: Path, device: torch.device, texts: TextColumns, group: str | None = None
) -> Table:
    """Return the scores of fine-tuned models on a labelled file and on its groups, by the values of a column.

    Models after the first are compared with it on the same rows. Raises `UserError` for an invalid row, for a model of
    another kind or metric, and as `load_finetuned` does.
    """
    _refuse_pipes(source)
    lines: list[dict[str, str]] = []
    first: dict[str, tuple[Task, float, np.ndarray]] = {}
    for path in models:
        model = load_finetuned(path, device, texts)
        task, kind = model.task, KINDS[model.task.kind]
        reading = _Reading(source, kind, model.columns, task, group)
        for name, examples in reading.by_group(source.name, task).items():
            encoded = kind.encode(task, examples, model.tokenizer, model.max_length)
            predictions = model.predictions(encoded)
            score = kind.score(task.metric, encoded.answers, predictions)
            value = kind.metrics[task.metric].undefined if score is None else score
            asked, one, of_one = first.get(name, (task, value, np.empty(0)))
            if (asked.kind, asked.metric) != (task.kind, task.metric):
                raise UserError(
                    f"--load {path}: its task is {task.kind} by {task.metric}, that of {models[0]} {asked.kind} by "
                    f"{asked.metric}; evaluate them one by one"
                )
            samples = kind.resampled_scores(asked, encoded.answers, predictions)
            first.setdefault(name, (task, value, samples))
            line = {"rows": name, "number": f"{len(examples):,}", "model": str(path)}
            line |= {kind.score_name(task): percent(value) + " (undefined)" * (score is None)}
            line |= {"95 % over items": " to ".join(map(percent, percentile_interval(samples)))}
            if path != models[0]:
                line |= {"minus the first": f"{100 * (value - one):+.2f}"}
                line |= {"95 % of the difference": format_interval("score", percentile_interval(samples - of_one))}
            lines.append(
                line | {name: percent(kind.score(name, encoded.answers, predictions)) for name in kind.beside(task)}
            )
    return table_of(sorted(lines, key=lambda line: [*first].index(line["rows"])), wordy=("model",))


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
    wanted, is_stream = text_columns(model.columns), InputFile(str(source), source.name).is_stream
    file = None if is_stream else KnownFile.of(source)
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
                with at(row.where):
                    writer.write(row.cells, prediction)
            count += len(some)
            bar.update(len(some))
        writer.finish()
    if told := cut_warning(cut, count, model.max_length):
        print(f"{source}: {told}", file=sys.stderr)
    if lacking:
        print(f"{output}: rows without a prediction, since outputs are not finite: {lacking:,}", file=sys.stderr)
    if writer.changed:
        print(f"{output}: cells whose tabs and line breaks became blanks: {writer.changed:,}", file=sys.stderr)
    return count


def _writer(output: Path, kinds: Iterable[Kind]) -> type[RowFile]:
    """Return the writer of an ending that one of the kinds has. Raises `UserError` for another ending."""
    writers = OUTPUT_FILES | {ending: writer for kind in kinds for ending, writer in kind.output_files.items()}
    if output.suffix not in writers:
        raise UserError(f"--output {output}: expected a name that ends in {', '.join(writers)}", WRONG_ARGUMENTS)
    return writers[output.suffix]


def use_models(sweep: Sweep) -> list[str]:
    """Predict the test files without labels; return lines that name the kept models and the predictions.

    Other commands with the same output folder wait meanwhile.
    """
    lines = []
    for encoder in sweep.encoders.values() if sweep.speaks else ():
        for data in sweep.data.values():
            with one_at_a_time(sweep.options.output_dir, model_name(data.task, encoder)):
                lines += _use_model(sweep, data, encoder)
    return lines


def _use_model(sweep: Sweep, data: TaskData, encoder: LoadedEncoder) -> list[str]:
    """Predict a task's test file with the best model of an encoder; return lines that name model and predictions."""
    name, output = data.task.name, sweep.options.output_dir
    folder = model_folder(output, data.task, encoder, data.fingerprint)
    plain = folder.with_name(model_name(data.task, encoder))
    damaged = f"{plain} is damaged" if plain.exists() and read_facts(plain) is None else ""
    keeps = name in sweep.options.suite.kept
    if not keeps or read_facts(folder) is None:
        why = f"; {damaged or NOT_KEPT}" if keeps else ""
        why += "".join(f"; {file.path} is not predicted" for file in data.unlabelled.values())
        return [f"{name}: no model of {encoder.name} was kept{why}"]
    use = f"megatron-ddrp finetune predict --load {shlex.quote(str(folder))} --input FILE --output LABELLED"
    told = damaged or f"{plain} keeps that of other files or settings" if plain.exists() and folder != plain else ""
    if better := better_run(sweep.store, encoder, data, folder):
        told = f"of those kept; the better run {better} kept none: to repeat it, delete its line in {RUNS}"
    other = f" ({told})" if told else ""
    lines = [f"{name}: the best model of {encoder.name} is in {folder}{other}; to use it: {use}"]
    for test, file in data.unlabelled.items():
        file.check()
        predicted = output / "predictions" / f"{folder.name}-{test}.jsonl"
        predict_file(folder, file.path, predicted, sweep.device)
        lines.append(f"{name}: predictions for {file.path} are in {predicted}")
    return lines
