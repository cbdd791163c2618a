"""Protocols of datasets, exported folders, kept models and single files."""

from collections.abc import Iterator, Mapping

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
from tests.crash.recording import tree_of
from tests.crash.sample import files_in


class Output(Protocol):
    """Files of a command: old or new as a whole, and the same command ends with the same bytes and nothing else."""

    overwrites = False
    """A command that overwrites is never refused; any other may be, once its output is there."""
    is_repeatable = True
    """True if the command gives the same bytes where its output is there already."""

    def files(self) -> dict[str, bytes]:
        paths = files_in(self.root).items()
        return {path: content for path, content in paths if "/." not in f"/{path}" and ".unfinished/" not in path}

    def mixtures(self, now: Mapping[str, bytes]) -> Iterator[str]:
        """Yield a fault for each output that is neither old nor new and may be taken for whole; a subclass knows."""
        raise NotImplementedError

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        now = self.files()
        yield from self.mixtures(now)
        if reported and now != self.after:
            yield f"the reported output is lost: there are {sorted(now)}"
        if deep:
            yield from self._faults_of_the_same_command(now == self.after)

    def _faults_of_the_same_command(self, is_done: bool) -> Iterator[str]:
        is_left = any(self.root.rglob("*.unfinished/complete"))
        refusal = quietly(self.command).refusal
        if refusal and (self.overwrites or is_left or not is_done or "exists already" not in refusal):
            yield f"the same command is refused: {refusal}"
        elif self.files() != self.after and (self.is_repeatable or not is_done):
            yield "the same command ends with other bytes"
        if not refusal and (others := [path for path in tree_of(self.root) if not self._is_expected(path)]):
            yield f"the same command leaves {sorted(others)}"

    def _is_expected(self, path: str) -> bool:
        """Return whether the path is that of a new file or of a folder above one."""
        return not path or any(f"{file}/".startswith(f"{path}/") for file in self.after)


class Preprocess(Output):
    """Datasets of two keys: each whole or not at all, and the same command ends with the same bytes."""

    name, place = "preprocess", "data"
    prefixes: tuple[str, ...] = ("p_text_document", "p_title_document")

    def command(self) -> None:
        self._preprocess("a", self.overwrites)

    def _preprocess(self, text: str, overwrite: bool) -> None:
        self.sample.preprocess(self.output / "p", text, ("text", "title"), overwrite)

    def mixtures(self, now: Mapping[str, bytes]) -> Iterator[str]:
        for prefix in self.prefixes:
            own, *known = (self._of(files, prefix) for files in (now, self.before, self.after))
            if own and own not in known and not quietly(lambda prefix=prefix: self._read(prefix)).refusal:
                yield f"a mixed dataset is read silently: {sorted(own)}"

    def _of(self, files: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
        return {path: content for path, content in files.items() if path.startswith(f"{self.place}/{prefix}")}

    def _read(self, prefix: str) -> None:
        IndexedDataset(str(self.output / prefix)).check()
        check_dataset(str(self.output / prefix))


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
        merge(self.output / "both", inputs)


class Shuffle(Preprocess):
    """A dataset in another order, under another name."""

    name, prefixes = "shuffle", ("mixed",)

    def command(self) -> None:
        shuffle(self.output / "mixed", str(self.sample.folder / "data" / "a_text_document"), 3)


class ShuffleInPlace(Preprocess):
    """A dataset in another order, under its own name: what is shuffled already is shuffled once more."""

    name, prefixes = "shuffle in place", ("p_text_document",)
    overwrites, is_repeatable = True, False

    def prepare(self) -> None:
        self.sample.preprocess(self.output / "p")

    def command(self) -> None:
        prefix = str(self.output / "p_text_document")
        shuffle(prefix, prefix, 3, overwrite=True)


class Export(Output):
    """An exported folder: the old one or the new one, and nothing else under its name."""

    name, place, overwrites = "convert --load", "out", True

    def command(self) -> None:
        to_huggingface.export_checkpoint(self.sample.run, self.output, overwrite=True)

    def mixtures(self, now: Mapping[str, bytes]) -> Iterator[str]:
        if now not in (self.before, self.after):
            wrong = sorted(name for name in now.keys() | self.after.keys() if now.get(name) != self.after.get(name))
            is_refused = quietly(lambda: check_sums(self.output)).refusal
            state = "lost its name" if not now else f"is half-written, {'refused' if is_refused else 'read silently'}"
            yield f"the output {state}: {wrong}"


class ExportAgain(Export):
    """An export over an older one."""

    name = "convert --load --overwrite"

    def prepare(self) -> None:
        to_huggingface.export_checkpoint(self.sample.older, self.output)


class Vocabulary(Export):
    """One file over another, as every small output."""

    name, place = "train-tokenizer --overwrite", "vocab.txt"

    def prepare(self) -> None:
        self.output.write_text("old\n", encoding="utf-8")

    def command(self) -> None:
        words = ["--input", self.sample.folder / "a.jsonl", "--vocab-size", "150", "--overwrite"]
        train_tokenizer.main([*map(str, words), "--output", str(self.output)])


class Finetune(Protocol):
    """One run of fine-tuning: predictions, the kept model with its card, the row of runs.jsonl."""

    name, place, again_every = "finetune", "out", 20

    def command(self) -> None:
        words = ["--task-file", self.sample.folder / "tone.yaml", "--load", self.sample.run, "--workers", "1"]
        words += ["--batch-size", "8", "--lr", "1e-2", "--epochs", "1", "--seeds", "1", "--output-dir", self.output]
        if finetune([*map(str, words)]):
            raise UserError("finetune failed")

    def files(self) -> dict[str, bytes]:
        return files_in(self.output / "models")

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterator[str]:
        yield from self._faults_of_rows(reported)
        yield from self._faults_of_models()
        if deep:
            if refusal := quietly(self.command).refusal:
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
