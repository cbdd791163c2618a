"""The contract of a kind of task, windows over long texts, and files of predictions.

A kind is a subclass of `Kind`, one line in `config/registry.py`, and a test with its slow twin. It imports torch only
in the methods that compute with it, because command lines read the facts.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from megatron_ddrp.conversion.model_code import HeadForm, Labels
from megatron_ddrp.data.tokenizers.tokenizer import Span, Tokenizer
from megatron_ddrp.encoders.rows import Encoded
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.foreign import parse_json
from megatron_ddrp.tasks.finetune.metrics import Metric, drawn_rows, metrics_of_plugins
from megatron_ddrp.tasks.finetune.table_files import Columns, Example, Task, conll_text

if TYPE_CHECKING:
    from torch import Tensor


ZERO_WIDTH_JOINER = "\u200d"


def _characters(*ranges: str) -> frozenset[str]:
    """Return the characters of some ranges, each given by its first and last character."""
    return frozenset(chr(code) for ends in ranges for code in range(ord(ends[0]), ord(ends[1]) + 1))


_JOINING = _characters(
    *("\u200c\u200d", "\u1160\u11ff", "\ud7b0\ud7fb", "\uff9e\uff9f", "\U0001f3fb\U0001f3ff", "\U000e0020\U000e007f")
)
"""Characters other than marks that belong to the one before: joiners, Jamo, voicing, skin tones, tags of flags."""
_PREPENDED = _characters(
    *("\u0600\u0605", "\u06dd\u06dd", "\u070f\u070f", "\u0890\u0891", "\u08e2\u08e2", "\U000110bd\U000110bd"),
    "\U000110cd\U000110cd",
)
"""Format characters that belong to the one behind, such as Arabic's number sign."""


class Window(NamedTuple):
    """Words of a sentence that share a row. Every word of the sentence is labelled in exactly one window."""

    begin: int
    """First word of the row."""
    end: int
    """End of the row's words, exclusive."""
    own_begin: int
    """First word that is labelled in this window; words before it are context."""
    own_end: int
    """End of the words that are labelled in this window, exclusive."""


def pieces_of_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Join the words by blanks, tokenize the text, and return the pieces of each word.

    A piece for the blank before a word belongs to the word. A word without a piece, such as one of control characters,
    becomes [UNK].
    """
    lengths = np.array([len(word) + 1 for word in words])
    begins = np.cumsum(lengths) - lengths - 1  # character of the blank before each word, -1 for the first word
    ids, spans = tokenizer.encode_with_spans(" ".join(words))
    owners = np.searchsorted(begins, [begin for begin, _ in spans], side="right") - 1  # [pieces]
    pieces: list[list[int]] = [[] for _ in words]
    for piece, word in zip(ids, owners.tolist(), strict=True):
        pieces[word].append(piece)
    return [own or [tokenizer.unk_id] for own in pieces]


def windows_of(lengths: Sequence[int], room: int, overlap: int) -> list[Window]:
    """Cover the words by windows of at most `room` pieces; neighbours share words of at most `overlap` pieces.

    `lengths` has the number of pieces per word; a word of more than `room` pieces counts as `room`. The first half of
    the shared words is labelled in the earlier window, the second half in the later one, so that words have context on
    both sides. Without words there is no window.
    """
    sizes = np.minimum(np.asarray(lengths, dtype=np.int64), room)
    ends = np.cumsum([0, *sizes])  # number of pieces before each word
    windows: list[Window] = []
    begin = own_begin = 0
    while own_begin < len(sizes):
        end = int(np.searchsorted(ends, ends[begin] + room, side="right")) - 1  # of the words that fit
        if end == len(sizes):
            windows.append(Window(begin, end, own_begin, end))
            break
        budget = min(overlap, room - int(sizes[end]))
        shared = max(begin + 1, int(np.searchsorted(ends, ends[end] - budget)))  # windows advance
        own_end = (shared + end + 1) // 2
        windows.append(Window(begin, end, own_begin, own_end))
        begin, own_begin = shared, own_end
    return windows


def context_windows(pieces: int, room: int, overlap: int) -> list[Span]:
    """Return (first piece, end) of windows of at most `room` pieces; neighbours share `overlap` pieces.

    The end is exclusive. A context without pieces has one empty window. `overlap` must be less than `room`.
    """
    begins = range(0, max(1, pieces - overlap), room - overlap)
    return [(begin, min(begin + room, pieces)) for begin in begins]


def pieces_of_answer(spans: np.ndarray, begin: int, end: int) -> Span | None:
    """Return the first and the last piece, both inclusive, of characters `begin` to `end` (exclusive).

    `spans`, `[pieces, 2]`, comes from `Tokenizer.encode_with_spans`. Return None if no piece has one of the characters.
    """
    inside = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > begin))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def text_of_pieces(context: str, spans: np.ndarray, first: int, last: int) -> str:
    """Return the text from a row's piece `first` to `last`, with whole characters as readers see them.

    Some tokenizers drop marks, or compose them with the letter before, so that they belong to no piece. The text keeps
    them, by the rules of extended grapheme clusters (Unicode Standard Annex 29), up to the neighbouring pieces.
    """
    begin, end = int(spans[first, 0]), int(spans[last, 1])
    before = spans[:first, 1]
    after = spans[last + 1 :, 0]
    lowest = before[before <= begin].max(initial=0)
    highest = after[after >= end].min(initial=len(context))
    while end < highest and (unicodedata.category(context[end])[0] == "M" or context[end] in _JOINING):
        end += 1
    if end == highest < len(context) and context[end - 1] == ZERO_WIDTH_JOINER:  # the pieces separate the cluster
        end -= 1
    while begin > lowest and context[begin - 1] in _PREPENDED:
        begin -= 1
    return context[begin:end].strip()


PREDICTION = "prediction"
"""Name of the column of predictions."""
_BREAKS = re.compile(r"[\t\r\n]")

CellText = Callable[[Any, str], str]
"""Function from a label or prediction and the file's ending to the text of its cell, `Kind.cell_text`."""


class RowFile(ABC):
    """Base class of the writers of rows with their predictions to a stream of bytes."""

    def __init__(self, stream: IO[bytes], ending: str, columns: Columns, cell_text: CellText):
        self.stream, self.ending, self.columns, self.cell_text = stream, ending, columns, cell_text
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


class JsonLinesFile(RowFile):
    """Writer of one JSON object per row."""

    def text(self, cells: dict[str, Any], prediction: Any) -> str:
        told = {name: None if _is_missing(value) else value for name, value in cells.items()} | {PREDICTION: prediction}
        try:
            return json.dumps(told, ensure_ascii=False, default=str, allow_nan=False) + "\n"
        except ValueError:
            raise ValueError("a number of a cell is nan or infinite, which JSON cannot hold; write .csv") from None


class TableFile(RowFile):
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
        """Return a cell as text, empty without a value; the kind of the task writes labels and predictions."""
        if column == PREDICTION or (column == self.columns.label and not _is_missing(value)):
            return self.cell_text(value, self.ending)
        return "" if _is_missing(value) else as_text(value)

    def _line(self, cells: list[str]) -> str:
        if self.ending == ".tsv":
            kept = [_BREAKS.sub(" ", cell) for cell in cells]
            self.changed += sum(cell != before for cell, before in zip(kept, cells, strict=True))
            return "\t".join(kept) + "\n"
        text = io.StringIO()
        csv.writer(text, lineterminator="\r\n").writerow(cells)  # the csv module quotes the characters of this
        return text.getvalue().removesuffix("\r\n") + "\n"


class ConllFile(RowFile):
    """Writer of one token and its tag per line, `_` for no prediction."""

    def text(self, cells: dict[str, Any], prediction: list[str | None]) -> str:
        return conll_text(cells[self.columns.text], [tag or "_" for tag in prediction])


class SquadFile(RowFile):
    """Writer of one JSON object from the id of each question to its answer; without ids, from its number."""

    def __init__(self, stream: IO[bytes], ending: str, columns: Columns, cell_text: CellText):
        super().__init__(stream, ending, columns, cell_text)
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


OUTPUT_FILES: dict[str, type[RowFile]] = {".jsonl": JsonLinesFile, ".csv": TableFile, ".tsv": TableFile}
"""Ending → writer, for every kind of task."""


def _is_missing(value: Any) -> bool:
    """Return whether a cell has no value: null, or the nan of a Parquet file."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_text(value: Any) -> str:
    """Return a cell as text: numbers, lists and objects as JSON; decimals, times and bytes of Parquet by `str`."""
    is_json = value is None or isinstance(value, (bool, int, float, list, dict))
    return json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)


UNDEFINED = "nan"
"""Text of a row without a prediction in a file of predictions."""


class Kind(ABC):
    """Base class of a kind of task. Instances hold no state.

    It has the metrics and the head, converts files to rows, and defines the loss, the predictions and their files.
    """

    name: ClassVar[str]
    """Name on the command line and in files."""
    own_metrics: ClassVar[Mapping[str, Metric]]
    """Metrics by name; the first is the default. Plug-ins may add others."""
    head: ClassVar[HeadForm]
    """Form of the layers on top of the encoder."""
    problem_type: ClassVar[str | None] = None
    """Value of `problem_type` in a Hugging Face configuration."""
    usual_columns: ClassVar[Columns]
    """Default columns of the files."""
    text_columns: ClassVar[tuple[str, ...]] = ()
    """Further usual names of the column of texts, most usual first."""
    label_columns: ClassVar[tuple[str, ...]] = ()
    """Further usual names of the column of labels, most usual first."""
    pair_columns: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Usual column of texts → columns of the second text, the first that the file has; none if it has none."""
    output_files: ClassVar[Mapping[str, type[RowFile]]] = MappingProxyType({})
    """Further endings of files of predictions → their writers."""
    predicts_numbers: ClassVar[bool] = False
    """True if the outputs are numbers on the labels' scale, which a run may take out (`TuningRun.scales_labels`)."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """All metrics by name, those of plug-ins last. Raises `UserError` if a plug-in takes a name of the kind."""
        added = metrics_of_plugins(self.name)
        if taken := added.keys() & self.own_metrics.keys():
            raise UserError(f"METRICS names {min(taken)!r}, which --kind {self.name} has: choose another name")
        return {**self.own_metrics, **added}

    def is_likely(self, columns: Sequence[str], cells: Callable[[], Sequence[Any]]) -> bool:
        """Return whether a file with these columns is of this kind.

        `cells` reads the labels of the first rows; none without a column of labels.
        """
        labels = {self.usual_columns.label, *self.label_columns}
        return (self.usual_columns.pair or self.usual_columns.text) in columns and not labels.isdisjoint(columns)

    def check_metric(self, name: str, labels: Sequence[str] = ()) -> None:
        """Raise `UserError` if the kind does not have the metric, or has it only for other labels."""
        if name not in self.metrics:
            raise UserError(f"--metric {name}: --kind {self.name} has {', '.join(self.metrics)}", WRONG_ARGUMENTS)

    def check_labels(self, task: Task, is_guessed: bool) -> None:
        """Raise ValueError with the reason for labels of a training file that make no task.

        `is_guessed` is True if the command line does not name the kind.
        """
        return None

    def remarks(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield warnings about the labels of development files, by the names of the files.

        Raises ValueError with the reason for labels of the validation file that the metric is not defined for.
        """
        return iter(())

    def undefined(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield a warning for each file on whose labels even predictions without a fault have no score.

        It is for kinds whose predictions have the form of the answers.
        """
        for file, rows in labels.items():
            answers = self.answers(task, rows)
            if self.score(task.metric, answers, answers) is None:
                yield (
                    f"{file}: WARNING, no model scores above 0 by {task.metric} on its labels: they are all alike, or "
                    "none is positive"
                )

    def scheme(self, task: Task) -> str:
        """Return the name of the rules by which the metric reads the labels; empty without such rules."""
        return ""

    def score_name(self, task: Task) -> str:
        """Return the name of the metric as tables show it."""
        return task.metric

    def hub_labels(self, task: Task) -> Labels:
        """Return the labels for a Hugging Face configuration; a regression has one, named after the task."""
        return Labels(task.labels or (task.name,), self.problem_type)

    @abstractmethod
    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the texts of a row of a file. Raises ValueError with the reason if a cell holds no text."""

    @abstractmethod
    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the names of the labels in a cell of the label column; nothing for numbers and answers.

        Raises ValueError with the reason for a cell that no task of this kind can have.
        """

    @abstractmethod
    def label(self, cell: Any, task: Task) -> Any:
        """Return the label of a cell in the form that `encode` takes. Raises ValueError with the reason otherwise."""

    def check(self, texts: Sequence[str], cell: Any) -> None:
        """Raise ValueError with the reason if the texts of a row do not match the cell of its label."""
        return None

    def unlabelled(self, task: Task) -> Any:
        """Return the placeholder label of a row without one."""
        return math.nan

    @abstractmethod
    def answers(self, task: Task, labels: Sequence[Any]) -> Any:
        """Return the labels of some rows, as `label` returns them, in the form that the metric takes."""

    @abstractmethod
    def as_values(self, task: Task, predictions: Any) -> Iterable[Any]:
        """Yield the prediction of each example as a JSON value, or its label; None if it is undefined."""

    @abstractmethod
    def read(self, task: Task, labels: Sequence[Any], predictions: Sequence[Any]) -> tuple[Any, Any]:
        """Return (answers, predictions) from the values that `as_values` yields. Raises ValueError for other values."""

    def text_of(self, value: Any) -> str:
        """Return a value of `as_values` as text without tabs and line breaks, for a file of predictions."""
        return UNDEFINED if value is None else json.dumps(value, ensure_ascii=False)

    def value_of(self, task: Task, text: str) -> Any:
        """Return the value that `text_of` wrote. Raises ValueError for any other text."""
        return None if text == UNDEFINED else parse_json(text)

    def cell_text(self, value: Any, ending: str) -> str:
        """Return a label or prediction in the form that a table has in a file with this ending.

        Raises ValueError with the reason if the file cannot hold it.
        """
        return as_text(value)

    def constant(self, task: Task, answers: Any, label: int) -> Any:
        """Return predictions of one label, by its number, for every row of `answers`; None for kinds without them."""
        return None

    def baseline(self, task: Task, counts: Mapping[str, int], answers: Any) -> float | None:
        """Return the score of always predicting the most frequent label of the training rows.

        `counts` has the number of training rows per label. Return None for kinds without such a prediction.
        """
        guess = self.constant(task, answers, task.most_frequent(counts)) if task.labels else None
        return None if guess is None else self.metrics[task.metric].counted(answers, guess)

    def constant_guess(self, task: Task, answers: Any) -> float | None:
        """Return the score of the most frequent answer for all rows, of runs that did not record their `baseline`.

        For numbers it is 0, which the undefined correlation with a constant counts as. None for kinds without one, and
        for the metric of a plug-in.
        """
        return 0.0 if self.predicts_numbers and task.metric in self.own_metrics else None

    def num_outputs(self, task: Task) -> int:
        """Return the width of the head's last layer: one per label, 2 for an answer's first and last piece."""
        return len(self.hub_labels(task).names) or 2

    @abstractmethod
    def encode(self, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, max_length: int) -> Encoded:
        """Return the rows of the examples, in the tokenizer's form, each of at most `max_length` pieces in all."""

    def targets(self, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
        """Return the targets of some rows in the form that `loss_sum` takes."""
        return np.asarray(encoded.targets[rows])

    def size(self, encoded: Encoded, rows: np.ndarray) -> int:
        """Return the number of targets of some rows; it divides the loss of a batch."""
        return len(rows)

    @abstractmethod
    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, summed over its targets."""

    def blank(self, encoded: Encoded) -> np.ndarray:
        """Return zeros in the shape of all outcomes, float64 `[outcomes, …]`; by default there is one per target."""
        return np.zeros(encoded.targets.shape)

    @abstractmethod
    def outcomes(self, outputs: Tensor, encoded: Encoded, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return the indices and the values of a batch's outcomes; a value is nan if its outputs are not finite."""

    @abstractmethod
    def predictions(self, task: Task, encoded: Encoded, outcomes: np.ndarray) -> Any:
        """Return all outcomes in the form that the metric takes, the form of `Encoded.answers`."""

    def score(self, metric: str, answers: Any, predictions: Any) -> float | None:
        """Return the score of the predictions; None if it is undefined."""
        return self.metrics[metric].value(answers, predictions)

    def resampled_scores(self, task: Task, answers: Any, predictions: Any) -> np.ndarray:
        """Return the task's metric on every bootstrap sample of its rows, `[samples]`."""
        return self.metrics[task.metric].samples(drawn_rows(task.name, len(answers)), answers, predictions)

    def beside(self, task: Task) -> tuple[str, ...]:
        """Return the names of metrics that are reported in addition to the task's own."""
        return ()
