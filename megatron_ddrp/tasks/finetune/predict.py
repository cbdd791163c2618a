"""`megatron-ddrp finetune predict`: label a file with a fine-tuned model, in constant memory."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from megatron_ddrp.conversion.foreign_config import read_config_file
from megatron_ddrp.data.atomic import AtomicFile
from megatron_ddrp.data.preprocess.inputs import is_stream
from megatron_ddrp.data.progress import progress
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.huggingface import FamilyModel, load_tokenizer, load_with_head
from megatron_ddrp.encoders.rows import Encoded, chunks, dev_order, pad_batch, told_cut
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.tasks.finetune.conll import conll_text
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.known_files import KnownFile
from megatron_ddrp.tasks.finetune.saving import kept
from megatron_ddrp.tasks.finetune.table_files import blamed_on, read_rows
from megatron_ddrp.tasks.finetune.task import Columns, Example, Task
from megatron_ddrp.tasks.finetune.unlabelled import PREDICTION, count_unlabelled, text_columns, texts_to_predict

OUTPUTS = (".jsonl", ".csv", ".tsv")
OUTPUTS_OF_KIND = {"tokens": (".conll",), "qa": (".json",)}
"""Kind → further endings of its output: CoNLL's two columns; SQuAD's one object from question ids to answers."""
_TOGETHER = 2048
"""Number of rows in memory at a time."""
_BATCH = 64
_SHOWN_MODELS = 10
"""Largest number of model folders in a message."""
_BREAKS = re.compile(r"[\t\r\n]")


TextColumns = tuple[str | None, str | None]
"""Columns of the text and of the second text of a pair; None for the column of training."""


class FineTuned(NamedTuple):
    """A fine-tuned model and its settings for reading a file."""

    model: nn.Module
    tokenizer: Tokenizer
    task: Task
    columns: Columns
    max_length: int
    pair_separators: int
    device: torch.device

    def encode(self, texts: list[tuple[str, ...]]) -> Encoded:
        """Return the rows of some texts."""
        kind = KINDS[self.task.kind]
        examples = [Example(text, kind.unlabelled(self.task, text)) for text in texts]
        return kind.encode(self.task, examples, self.tokenizer, self.max_length, self.pair_separators)

    @torch.inference_mode()
    def predict(self, encoded: Encoded) -> list[Any]:
        """Return the predictions of some rows as JSON values."""
        kind = KINDS[self.task.kind]
        outcomes = kind.blank(encoded)
        for rows in dev_order(encoded, _BATCH):
            batch = pad_batch(encoded, rows).map(lambda field: torch.from_numpy(field).to(self.device))
            places, values = kind.outcomes(self.model(batch), encoded, rows)
            outcomes[places] = values.cpu().numpy()
        return list(kind.told(self.task, kind.predictions(self.task, encoded, outcomes)))


def _readable(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a kept model that can label files; None for any other folder, such as a model of GLUE."""
    facts = kept(folder)
    return facts if facts and facts.get("columns") is not None else None


def _models_near(folder: Path) -> list[Path]:
    """Return the kept models in OUT/models/ if `folder` is OUT, OUT/models or a name in one of the two."""
    places = dict.fromkeys((folder / "models", folder, folder.parent, folder.parent / "models"))
    found = (path for place in places for path in sorted(place.glob("*")) if _readable(path))
    return list(islice(found, _SHOWN_MODELS))


def load_finetuned(folder: Path, device: torch.device, texts: TextColumns = (None, None)) -> FineTuned:
    """Load a folder that `megatron-ddrp finetune` wrote; `texts` replaces the columns of training.

    Raises:
        UserError: `megatron-ddrp finetune` did not write the folder.
    """
    facts = _readable(folder)
    if facts is None:
        got = "not a model that finetune kept" if folder.exists() else "no such folder"
        found = _models_near(folder)
        there = f"expected one of {', '.join(map(str, found))}" if found else "expected a folder OUT/models/TASK-…"
        raise UserError(f"--load {folder}: {got}; {there}")
    config = read_config_file(folder)
    trained = Columns(*facts["columns"])
    columns = Columns(texts[0] or trained.text, texts[1] or trained.pair, trained.label)
    columns.check_distinct()
    task = Task.of(facts["task"])
    model, weights = load_with_head(folder, config["model_type"], KINDS[task.kind].head)
    if weights.missing:
        raise UserError(
            f"--load {folder}: it lacks the weight {min(weights.missing)}; fine-tune again, or copy it again"
        )
    return FineTuned(
        FamilyModel(model).to(device).eval(),
        load_tokenizer(folder),
        task,
        columns,
        facts["max_seq_length"],
        facts["pair_separators"],
        device,
    )


def predict_file(
    folder: Path, source: Path, output: Path, device: torch.device, texts: TextColumns = (None, None)
) -> int:
    """Write the rows of `source` with their predictions to `output`; return the number of rows.

    Raises:
        UserError: the folder has no fine-tuned model, or a row of the file is invalid.
    """
    _check_ending(output, OUTPUTS_OF_KIND)
    model = load_finetuned(folder, device, texts)
    _check_ending(output, (model.task.kind,))
    kind = KINDS[model.task.kind]
    wanted, file = text_columns(model.columns), None if is_stream(str(source)) else KnownFile.of(source)
    rows = file.rows(wanted) if file else read_rows(str(source), wanted)
    count = cut = lacking = 0
    expected = count_unlabelled(file, kind, model.columns) if file else None
    with AtomicFile(output) as stream, progress(" rows", expected, f"predicting {source.name}") as bar:
        writer = _WRITERS.get(output.suffix, _Table)(stream.stream, output.suffix, model.columns, model.task.kind)
        for some in chunks(rows, _TOGETHER):
            read = [texts_to_predict(row, kind, model.columns) for row in some]
            encoded = model.encode(read)
            cut += encoded.cut
            predictions = model.predict(encoded)
            lacking += sum(told is None or (isinstance(told, list) and None in told) for told in predictions)
            for row, prediction in zip(some, predictions, strict=True):
                with blamed_on(row):
                    writer.write(row.cells, prediction)
            count += len(some)
            bar.update(len(some))
        writer.finish()
    if told := told_cut(cut, count, model.max_length):
        print(f"{source}: {told}", file=sys.stderr)
    if lacking:
        print(
            f"{output}: rows without a prediction, because the model's outputs are not finite: {lacking:,}",
            file=sys.stderr,
        )
    if writer.changed:
        print(f"{output}: cells whose tabs and line breaks became blanks: {writer.changed:,}", file=sys.stderr)
    return count


def _check_ending(output: Path, kinds: Iterable[str]) -> None:
    endings = (*OUTPUTS, *(ending for kind in kinds for ending in OUTPUTS_OF_KIND.get(kind, ())))
    if output.suffix not in endings:
        raise UserError(f"--output {output}: expected a name that ends in {', '.join(endings)}", WRONG_ARGUMENTS)


class _Writer(ABC):
    """Base class of the writers of rows with their predictions to a stream of bytes."""

    def __init__(self, stream: IO[bytes], ending: str, columns: Columns, kind: str):
        self.stream, self.ending, self.columns, self.kind = stream, ending, columns, kind
        self.count = 0
        self.changed = 0
        """Number of cells whose tabs and line breaks became blanks."""

    def write(self, cells: dict[str, Any], prediction: Any) -> None:
        """Write a row. Raises ValueError with the reason if the format cannot hold it."""
        self.stream.write(self.text(cells, prediction).encode())
        self.count += 1

    @abstractmethod
    def text(self, cells: dict[str, Any], prediction: Any) -> str:
        """Return one row as text. Raises ValueError with the reason if the format cannot hold it."""

    def finish(self) -> None:
        """Write the end of the file after the last row."""
        return None


class _JsonLines(_Writer):
    """Writer of one JSON object per row."""

    def text(self, cells: dict[str, Any], prediction: Any) -> str:
        return _text(cells | {PREDICTION: prediction}) + "\n"


class _Table(_Writer):
    """Writer of comma- or tab-separated rows below a header; the first row determines the columns."""

    header: list[str] | None = None

    def text(self, cells: dict[str, Any], prediction: Any) -> str:
        told = cells | {PREDICTION: prediction}
        first = ""
        if self.header is None:
            self.header = list(told)
            first = self._line(self.header)
        if more := [column for column in told if column not in self.header]:
            raise ValueError(f"column {more[0]!r} is not in the first row; write .jsonl")
        return first + self._line([self._cell(column, told.get(column, "")) for column in self.header])

    def _cell(self, column: str, value: Any) -> str:
        """Return a cell as text; several labels in the form that training reads, with `|` between them."""
        if self.kind != "multi-label" or column not in (PREDICTION, self.columns.label) or not isinstance(value, list):
            return _text(value)
        if parted := [label for label in value if "|" in _text(label)]:
            raise ValueError(f"label {parted[0]!r} has a |, which separates labels in {self.ending}; write .jsonl")
        return "|".join(map(_text, value))

    def _line(self, cells: list[str]) -> str:
        if self.ending == ".tsv":
            kept = [_BREAKS.sub(" ", cell) for cell in cells]
            self.changed += sum(cell != before for cell, before in zip(kept, cells, strict=True))
            return "\t".join(kept) + "\n"
        text = io.StringIO()
        csv.writer(text, lineterminator="\r\n").writerow(cells)  # the csv module quotes the characters of this
        return text.getvalue().removesuffix("\r\n") + "\n"


class _Conll(_Writer):
    """Writer of one token and its tag per line, `_` for no prediction."""

    def text(self, cells: dict[str, Any], prediction: list[str | None]) -> str:
        return conll_text(cells[self.columns.text], [tag or "_" for tag in prediction])


class _Squad(_Writer):
    """Writer of one JSON object from the id of each question to its answer; without ids, from its number."""

    def __init__(self, stream: IO[bytes], ending: str, columns: Columns, kind: str):
        super().__init__(stream, ending, columns, kind)
        self._seen: set[str] = set()

    def text(self, cells: dict[str, Any], prediction: str | None) -> str:
        name = str(cells.get("id", self.count))
        if name in self._seen:
            raise ValueError(
                f"an earlier question has the id {name!r} too, which .json cannot hold; write .jsonl or .csv"
            )
        self._seen.add(name)
        before = ",\n" if self.count else "{"
        return before + json.dumps({name: prediction or ""}, ensure_ascii=False)[1:-1]

    def finish(self) -> None:
        self.stream.write(b"}\n")


_WRITERS: dict[str, type[_Writer]] = {".jsonl": _JsonLines, ".conll": _Conll, ".json": _Squad}
"""Ending → writer; other endings are tables."""


def _text(value: Any) -> str:
    """Return a cell as text, JSON unless it is a string; times and bytes of a Parquet file become strings."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
