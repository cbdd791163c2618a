"""Protocols of datasets, exported folders, kept models and single files."""

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_ddrp.commands import train_tokenizer
from megatron_ddrp.conversion import to_huggingface
from megatron_ddrp.conversion.families.contract import CARD, check_sums
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.merging import merge, shuffle
from megatron_ddrp.data.dataset.verification import check_sums as check_dataset
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.command import main as finetune
from megatron_ddrp.tasks.finetune.training import read_facts
from megatron_ddrp.tasks.jobs import Store
from tests.crash.protocol import Protocol, quietly
from tests.crash.sample import files_in

TOKEN = re.compile(r"\.[0-9a-f]{16}\.")
ENDINGS = (".bin", ".idx", ".json")


class Preprocess(Protocol):
    """Datasets of two keys: each whole or not at all, and the same command ends with the same bytes."""

    name = "preprocess"
    prefixes: tuple[str, ...] = ("p_text_document", "p_title_document")
    overwrites = False

    @property
    def folder(self) -> Path:
        """The folder of the datasets, which nothing else is in."""
        return self.root / "data"

    def command(self) -> None:
        """Run the command."""
        self._preprocess("a", self.overwrites)

    def _preprocess(self, text: str, overwrite: bool) -> None:
        self.sample.preprocess(self.folder / "p", text, ("text", "title"), overwrite)

    def update(self) -> None:
        self.command()
        self.report("datasets")

    def files(self) -> dict[str, bytes]:
        paths = [self.folder / f"{prefix}{ending}" for prefix in self.prefixes for ending in ENDINGS]
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        now = self.files()
        for prefix in self.prefixes:
            own, *known = (self._of(files, prefix) for files in (now, self.before, self.after))
            if own and own not in known and not quietly(lambda prefix=prefix: self._read(prefix)).refusal:
                yield f"a mixed dataset is read silently: {sorted(own)}"
        if reported and now != self.after:
            yield f"reported datasets are lost: there are {sorted(now)}"
        if deep:
            yield from self._faults_of_the_same_command(now == self.after)

    @staticmethod
    def _of(files: dict[str, bytes], prefix: str) -> dict[str, bytes]:
        return {name: content for name, content in files.items() if name.startswith(prefix)}

    def _read(self, prefix: str) -> None:
        IndexedDataset(str(self.folder / prefix)).check()
        check_dataset(str(self.folder / prefix))

    def _faults_of_the_same_command(self, is_done: bool) -> Iterator[str]:
        left = list(self.folder.glob("*.unfinished/complete"))
        refusal = quietly(self.command).refusal
        if refusal and (left or not is_done or "exists already" not in refusal):
            yield f"the same command is refused: {refusal}"
        elif not self.is_same(is_done):
            yield "the same command ends with other bytes"
        if not refusal and (others := sorted({path.name for path in self.folder.iterdir()} - {*self.files()})):
            yield f"the same command leaves {others}"

    def is_same(self, was_done: bool) -> bool:
        """Return whether the datasets are those of an undisturbed command."""
        return self.files() == self.after


class PreprocessAgain(Preprocess):
    """Preprocessing over the datasets of another text."""

    name, overwrites = "preprocess --overwrite", True

    def prepare(self) -> None:
        self._preprocess("b", overwrite=False)


class Merge(Preprocess):
    """A dataset of two."""

    name, prefixes = "merge", ("both",)

    def command(self) -> None:
        inputs = [str(self.sample.folder / "data" / f"{name}_text_document") for name in "ab"]
        merge(self.folder / "both", inputs)


class Shuffle(Preprocess):
    """A dataset in another order, under another name."""

    name, prefixes = "shuffle", ("mixed",)

    def command(self) -> None:
        shuffle(self.folder / "mixed", str(self.sample.folder / "data" / "a_text_document"), 3)


class ShuffleInPlace(Preprocess):
    """A dataset in another order, under its own name."""

    name, prefixes = "shuffle in place", ("p_text_document",)

    def prepare(self) -> None:
        self.sample.preprocess(self.folder / "p")

    def command(self) -> None:
        prefix = str(self.folder / "p_text_document")
        shuffle(prefix, prefix, 3, overwrite=True)

    def is_same(self, was_done: bool) -> bool:
        return was_done or super().is_same(False)  # what is shuffled already is shuffled once more


class Export(Protocol):
    """An exported folder: the old one or the new one, and nothing else under its name."""

    name = "convert --load"

    @property
    def output(self) -> Path:
        """The exported folder."""
        return self.root / "out"

    def update(self) -> None:
        to_huggingface.export_checkpoint(self.sample.run, self.output, overwrite=True)
        self.report("folder")

    def files(self) -> dict[str, bytes]:
        return files_in(self.output)

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        now = self.files()
        if now not in (self.before, self.after):
            wrong = sorted(name for name in now.keys() | self.after.keys() if now.get(name) != self.after.get(name))
            is_refused = quietly(lambda: check_sums(self.output)).refusal
            state = "lost its name" if not now else f"is half-written, {'refused' if is_refused else 'read silently'}"
            yield f"the folder {state}: {wrong}"
        if reported and now != self.after:
            yield f"the reported folder is lost: there are {sorted(now)}"
        if not deep:
            return
        if refusal := quietly(self.update).refusal:
            yield f"the same command is refused: {refusal}"
        elif self.files() != self.after:
            yield "the same command ends with other bytes"
        elif left := sorted(path.name for path in self.root.iterdir() if path != self.output):
            yield f"the same command leaves {[TOKEN.sub('.TOKEN.', name) for name in left]}"


class ExportAgain(Export):
    """An export over an older one."""

    name = "convert --load --overwrite"

    def prepare(self) -> None:
        to_huggingface.export_checkpoint(self.sample.older, self.output)


class Vocabulary(Protocol):
    """One file over another, as every small output."""

    name = "train-tokenizer --overwrite"

    def prepare(self) -> None:
        (self.root / "vocab.txt").write_text("old\n", encoding="utf-8")

    def update(self) -> None:
        words = ["--input", self.sample.folder / "a.jsonl", "--vocab-size", "150", "--overwrite"]
        train_tokenizer.main([*map(str, words), "--output", str(self.root / "vocab.txt")])
        self.report("vocabulary")

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.root.glob("[!.]*")}

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        now = self.files()
        if now not in (self.before, self.after) or reported and now != self.after:
            yield "the file is half-written, or lost after its report"
        if deep:
            quietly(self.update)
            if files_in(self.root) != self.after:
                yield "the same command ends with other files"


class Finetune(Protocol):
    """One run of fine-tuning: predictions, the kept model with its card, the row of runs.jsonl."""

    name, again_every = "finetune", 20

    @property
    def output(self) -> Path:
        """The output folder."""
        return self.root / "out"

    def update(self) -> None:
        words = ["--task-file", self.sample.folder / "tone.yaml", "--load", self.sample.run, "--workers", "1"]
        words += ["--batch-size", "8", "--lr", "1e-2", "--epochs", "1", "--seeds", "1", "--output-dir", self.output]
        if finetune([*map(str, words)]):
            raise UserError("finetune failed")
        self.report("run")

    def files(self) -> dict[str, bytes]:
        return files_in(self.output / "models") if self.output.exists() else {}

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        yield from self._faults_of_rows(reported)
        yield from self._faults_of_models()
        if deep:
            if refusal := quietly(self.update).refusal:
                yield f"the same command is refused: {refusal}"
            elif self.files().keys() != self.after.keys():
                yield f"the same command ends with the models' files {sorted(self.files())}"

    def _faults_of_rows(self, reported: tuple[str, ...]) -> Iterator[str]:
        damage: list[str] = []
        rows = Store(self.output / "runs.jsonl", lambda row: str(row["seed"]), "a run", on_damage=damage.append).rows
        if reported and not rows:
            yield f"a reported run is lost; damaged lines: {damage}"
        for row in rows:
            path = self.output / row["predictions"]
            predicted = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            if [line.split("\t")[:2] for line in predicted[1:]] != [["valid", str(number)] for number in range(4)]:
                yield f"the predictions of a finished run are lost: {predicted}"
        if rows and self.files().keys() < self.after.keys():
            yield f"the kept model of a finished run has only {sorted(self.files())}"

    def _faults_of_models(self) -> Iterator[str]:
        for folder in (self.output / "models").glob("[!.]*"):
            names = {path.name for path in folder.iterdir()}
            refusal = quietly(lambda folder=folder: check_sums(folder)).refusal
            whole = {name.split("/")[1] for name in self.after} - {CARD}
            if not whole <= names or refusal or read_facts(folder) is None:
                yield f"a kept model is half-written: {sorted(names)}, {refusal}"


OUTPUTS: tuple[type[Protocol], ...] = (
    Preprocess,
    PreprocessAgain,
    Merge,
    Shuffle,
    ShuffleInPlace,
    Export,
    ExportAgain,
    Vocabulary,
    Finetune,
)
