"""Token classification: one label per word of a sentence, as in named-entity recognition.

A word's first piece has its label, its other pieces have none (Devlin et al., arXiv:1810.04805, section 5.3). A
sentence that is too long for a row becomes several overlapping rows (`windows.windows_of`): no word is dropped.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_ddrp.conversion.task_heads import PIECES, HeadForm
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.rows import Encoded, RowWriter
from megatron_ddrp.tasks.finetune.entities import (
    SCHEMES,
    SEQEVAL,
    SEQEVAL_STRICT,
    STRICT,
    prefix_groups,
    rules,
    scheme_of,
)
from megatron_ddrp.tasks.finetune.kinds.contract import UNDEFINED, Kind
from megatron_ddrp.tasks.finetune.kinds.sequences import class_number, label_name
from megatron_ddrp.tasks.finetune.metrics import Metric, Terms, by_number, macro_f1, right, share
from megatron_ddrp.tasks.finetune.output_files import ConllFile
from megatron_ddrp.tasks.finetune.task import Columns, Example, Task
from megatron_ddrp.tasks.finetune.windows import pieces_of_words, windows_of

if TYPE_CHECKING:
    from torch import Tensor

OVERLAP = 4
"""Divisor of a row's pieces that gives the overlap of neighbouring rows of one sentence."""
SHOWN_TAGS = 10
"""Largest number of tags in a warning."""


@dataclass(frozen=True)
class Tags:
    """Tags of all sentences. The length is the number of sentences."""

    classes: np.ndarray
    """Class number of each word, sentence after sentence, float64 `[words]`; nan if undefined."""
    ends: np.ndarray
    """End of each sentence in `classes`, exclusive, int64 `[sentences]`."""
    labels: tuple[str, ...]
    """Names of the classes."""

    def __len__(self) -> int:
        return len(self.ends)

    def by_sentence(self) -> Iterator[list[str | None]]:
        """Yield the names of the tags of each sentence; None for a word without a prediction, or without a label."""
        begin = 0
        for end in self.ends.tolist():
            classes = self.classes[begin:end].tolist()
            yield [None if math.isnan(number) else self.labels[int(number)] for number in classes]
            begin = end


def _of_words(gold: Tags, predicted: Tags, terms: Callable[[np.ndarray, np.ndarray], Terms]) -> Terms:
    """Return the terms of the words, summed per sentence."""

    def of_sentences(values: np.ndarray) -> np.ndarray:
        sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
        return np.diff(sums[[0, *gold.ends]], axis=0)

    first, second = terms(gold.classes, predicted.classes)
    return of_sentences(first), of_sentences(second)


class Tokens(Kind):
    """Kind that predicts one of several labels for each word.

    An example's texts are the words; its label is their class numbers.
    """

    name = "tokens"
    own_metrics: ClassVar[Mapping[str, Metric]] = {
        "seqeval": SEQEVAL,
        STRICT: SEQEVAL_STRICT,
        "accuracy": Metric(partial(_of_words, terms=right), share),
        "macro-f1": Metric(partial(_of_words, terms=by_number), macro_f1),
    }
    head: ClassVar[HeadForm] = PIECES
    usual_columns: ClassVar[Columns] = Columns("tokens", None, "tags")
    label_columns = ("ner_tags",)
    output_files = {".conll": ConllFile}

    def check_labels(self, task: Task, is_guessed: bool) -> None:
        """Raise ValueError for tags without the rules that the metric needs."""
        if task.metric.startswith("seqeval"):
            rules(task.labels, task.metric == STRICT)

    def scheme(self, task: Task) -> str:
        """Return the scheme of the tags under the strict metric."""
        return scheme_of(task.labels) if task.metric == STRICT else ""

    def remarks(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield a warning for each file without any entity, or with tags that the strict rules count as O.

        Raises ValueError for validation tags of IOB1 or IOE1, whose prefixes are those of IOB2 or IOE2.
        """
        yield from self.undefined(task, labels)
        if not (name := self.scheme(task)):
            return
        other, alike = SCHEMES[name].alike
        for file, rows in labels.items():
            groups = prefix_groups([task.labels[int(number)] for number in row] for row in rows)
            broken = [prefixes for prefixes in groups if not re.fullmatch(SCHEMES[name].entities, prefixes)]
            if file == "valid" and groups and all(re.fullmatch(alike, prefixes) for prefixes in groups):
                raise ValueError(
                    f"its tags are of {other}, for which --metric {STRICT} is not defined; use --metric seqeval, or "
                    f"write them as {name}"
                )
            if broken:
                shown = " ".join(f"{prefix}-" for prefix in broken[0][:SHOWN_TAGS])
                yield (
                    f"{file}: WARNING, {len(broken):,} of {len(groups):,} groups of neighbouring tags of one type "
                    f"break the rules of {name}, such as {shown}; their tags outside whole entities count as O"
                )

    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the words."""
        if columns.pair is not None:
            raise ValueError(f"--text-pair-column {columns.pair}: words have no second text; leave the flag out")
        words = cells[columns.text]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{columns.text} is {repr(words)[:80]}, expected a list of words")
        if not words or "" in words:
            raise ValueError(f"{columns.text} is empty or holds an empty word, expected a list of words")
        return tuple(words)

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the tags of the words."""
        if not isinstance(cell, list):
            raise ValueError(f"label is {repr(cell)[:80]}, expected a list with the tag of each word")
        return tuple(label_name(name) for name in cell)

    def label(self, cell: Any, task: Task) -> list[float]:
        """Return the class number of each word."""
        return [float(class_number(name, task)) for name in self.label_names(cell)]

    def check(self, texts: Sequence[str], cell: Any) -> None:
        """Raise ValueError for a row with different numbers of tags and words."""
        if len(texts) != len(cell):
            raise ValueError(f"{len(cell)} tags for {len(texts)} words, expected one for each")

    def answers(self, task: Task, labels: Sequence[Sequence[float]]) -> Tags:
        """Return the tags of the sentences."""
        classes = np.concatenate([np.asarray(row, dtype=np.float64) for row in labels])
        return Tags(classes, np.cumsum([len(row) for row in labels]), task.labels)

    def as_values(self, task: Task, predictions: Tags) -> Iterable[Any]:
        """Yield the tags of each sentence; None for a word without a prediction."""
        return predictions.by_sentence()

    def read(self, task: Task, labels: Sequence[Any], predictions: Sequence[Any]) -> tuple[Tags, Tags]:
        """Return (labels, predictions)."""
        numbers: dict[str | None, float] = {UNDEFINED: math.nan, None: math.nan}  # earlier versions wrote the first
        numbers |= {label: float(number) for number, label in enumerate(task.labels)}
        for names in (*labels, *predictions):
            if not isinstance(names, list) or not all(
                isinstance(name, str | None) and name in numbers for name in names
            ):
                raise ValueError(f"{names!r:.80} is no list of labels")
        answers, predicted = (
            self.answers(task, [[numbers[name] for name in names] for names in side]) for side in (labels, predictions)
        )
        if not np.array_equal(answers.ends, predicted.ends):
            raise ValueError("a row has different numbers of predictions and labels")
        return answers, predicted

    def constant(self, task: Task, answers: Tags, label: int) -> Tags:
        """Return the tag for every word."""
        return replace(answers, classes=np.full(len(answers.classes), float(label)))

    def encode(self, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, max_length: int) -> Encoded:
        """Return rows of whole words. Targets are class numbers `[all pieces]`, 0 for an unknown label."""
        writer, targets = RowWriter(tokenizer.pad_id), array("i")
        classes, ends = array("d"), array("q")
        room = max_length - tokenizer.rows.num_specials(1)
        for example in examples:
            words = [own[:room] for own in pieces_of_words(tokenizer, example.texts)]
            labels = np.broadcast_to(np.asarray(example.label, dtype=np.float64), len(words))
            firsts = np.nan_to_num(labels).astype(np.int64).tolist()
            for window in windows_of([len(own) for own in words], room, room // OVERLAP):
                text, marks = [], []
                for number in range(window.begin, window.end):
                    is_labelled = window.own_begin <= number < window.own_end
                    text += words[number]
                    marks += [firsts[number] if is_labelled else IGNORED_LABEL]
                    marks += [IGNORED_LABEL] * (len(words[number]) - 1)
                row, segments, (begin,) = tokenizer.rows.row([text])
                writer.add(row, segments)
                after = len(row) - begin - len(text)
                targets.extend([*[IGNORED_LABEL] * begin, *marks, *[IGNORED_LABEL] * after])
            classes.extend(labels.tolist())
            ends.append(len(classes))
        gold = Tags(np.array(classes), np.array(ends), task.labels)
        return writer.rows(np.array(targets), gold)

    def targets(self, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
        """Return class numbers `[batch, longest row]`, IGNORED_LABEL on pieces without a label and on padding."""
        lengths = encoded.lengths[rows]
        padded = np.full((len(rows), lengths.max()), IGNORED_LABEL, dtype=np.int64)
        padded[_is_piece(lengths)] = encoded.targets[encoded.places(rows)]
        return padded

    def size(self, encoded: Encoded, rows: np.ndarray) -> int:
        """Return the number of labelled words."""
        return int(np.count_nonzero(encoded.targets[encoded.places(rows)] != IGNORED_LABEL))

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy, summed over the labelled words."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")

    def outcomes(self, outputs: Tensor, encoded: Encoded, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return the most probable class of every piece of the rows; nan if an output of the piece is not finite."""
        import torch

        valid = torch.from_numpy(_is_piece(encoded.lengths[rows])).to(outputs.device)
        of_pieces = outputs[valid]  # [pieces of the rows, labels]
        is_finite = of_pieces.isfinite().all(dim=-1)
        return encoded.places(rows), of_pieces.argmax(dim=-1).float().masked_fill(~is_finite, math.nan)

    def predictions(self, task: Task, encoded: Encoded, outcomes: np.ndarray) -> Tags:
        """Return the outcomes of each word's first piece."""
        return Tags(outcomes[encoded.targets != IGNORED_LABEL], encoded.answers.ends, task.labels)

    def beside(self, task: Task) -> tuple[str, ...]:
        """Return the name of the words' accuracy, unless it is the task's metric."""
        return () if task.metric == "accuracy" else ("accuracy",)


def _is_piece(lengths: np.ndarray) -> np.ndarray:
    """Return `[batch, longest row]`, True on the pieces of each row and False on padding."""
    return np.arange(lengths.max()) < lengths[:, None]
