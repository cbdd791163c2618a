"""Description of a user's own task by flags, or by a YAML file with the same names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ddrp.config import registry
from megatron_ddrp.config.option import option, refuse
from megatron_ddrp.config.reading import Place, load_yaml, read_section
from megatron_ddrp.tasks.finetune.kinds import KINDS


@dataclass(frozen=True)
class TaskFiles:
    """task"""

    train: Path | None = option(None, "training rows: .jsonl, .csv, .tsv, .parquet, .conll, SQuAD's .json", metavar="F")
    valid: Path | None = option(None, "validation rows, which give the score and select the grid point", metavar="F")
    test: Path | None = option(
        None, "further rows: with labels they are scored too, without labels the best run predicts them", metavar="F"
    )
    kind: str | None = option(
        None, "kind of prediction (default: guessed from columns and labels)", choices=registry.KINDS
    )
    metric: str | None = option(
        None,
        "; ".join(f"{name}: {', '.join(kind.metrics)}" for name, kind in KINDS.items())
        + " (default: the kind's first)",
        metavar="M",
    )
    text_column: str | None = option(None, "column of the text (default: text, sentence, sentence1, …)", metavar="C")
    text_pair_column: str | None = option(None, "column of the second text of a pair", metavar="C")
    label_column: str | None = option(None, "column of the label (default: label, labels, score, …)", metavar="C")
    name: str | None = option(
        None,
        "name of the task in tables and folders (default: from the training file's name; its folder's for train.csv)",
        metavar="NAME",
    )

    @property
    def called(self) -> str:
        """Name of the task, usable as a file name."""
        train = self.train or Path("task")
        stem = re.sub(r"[-_]?train$", "", train.name.partition(".")[0])
        words = self.name or (train.resolve().parent.name if not stem or stem.startswith("train") else stem)
        return re.sub(r"[^\w.-]+", "-", words).strip("-.") or "task"

    def require(self) -> None:
        """Raise `UserError` for a task without a training or a validation file."""
        if self.train is None or self.valid is None:
            refuse(f"--{'train' if self.train is None else 'valid'} is needed, or a --task-file that names it")


def read_task_file(path: Path) -> TaskFiles:
    """Return the task of a YAML file. Its keys are the names of the flags; its paths are relative to the file.

    Raises:
        UserError: one line with the file, the key and the allowed values.
    """
    place = Place(str(path))
    if not path.is_file():
        raise place.error("no such file; expected YAML with keys such as train, valid, kind, text-column, label-column")
    files = read_section(TaskFiles, load_yaml(path, place), place)
    found = {name: getattr(files, name) for name in ("train", "valid", "test")}
    moved = {name: path.parent / file for name, file in found.items() if file is not None}
    return replace(files, name=files.name or path.stem, **moved)
