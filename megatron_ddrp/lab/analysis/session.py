"""Models and sentences of an analysis, and the frame that all analyses share.

The frame has checked flags, models loaded one by one, a progress bar and output files.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ddrp.checkpoint import (
    STATE,
    choose_checkpoint,
    holds_run,
    is_checkpoint,
    read_config,
    read_model,
    read_state,
    whole_checkpoints,
)
from megatron_ddrp.checkpoint.folder import look_inside
from megatron_ddrp.config import Config
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.families.contract import model_type
from megatron_ddrp.conversion.from_huggingface import load_hugging_face, read_model_config
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import Blend, BlendWords, read_blend
from megatron_ddrp.data.batches.samples import NUM_SPECIAL_TOKENS, NoSample, SampleIndex, split_documents
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.verification import check_ids, check_tokenizer
from megatron_ddrp.data.preprocess.documents import iter_documents
from megatron_ddrp.data.progress import progress
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.encoder import load_encoder, with_random_weights
from megatron_ddrp.encoders.huggingface import longest_sequence
from megatron_ddrp.encoders.masked_lm import load_masked_lm, piece_logits
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, need_packages
from megatron_ddrp.foreign import read_object
from megatron_ddrp.model import Encoder, build_model
from megatron_ddrp.model.fused import named_device
from megatron_ddrp.pages.plotting import save_figure


@dataclass(frozen=True)
class Loaded:
    """A model in memory, in fp32 and eval mode on the CPU."""

    model: Any
    """`Encoder`, or from `load_any` an encoder of transformers."""
    tokenizer: Tokenizer
    seq_length: int
    """Longest sequence that the model has positions for, in tokens."""
    position_encoding: str | None
    """None for an encoder that transformers runs."""


@dataclass(frozen=True)
class Snapshot:
    """One model on disk."""

    run: str
    """Name of the `--load` folder in figures and printed lines."""
    path: Path
    iteration: int | None = None
    """Number of training steps; None if unknown, as for a Hugging Face folder."""
    consumed_tokens: int | None = None

    random_seed: int | None = None
    """Seed of random weights that replace the stored ones, or None."""

    def seq_length(self) -> int | None:
        """Return the longest sequence that the model has positions for, in tokens, without reading its weights.

        None if its configuration cannot be read; loading the model then tells the reason.
        """
        if (self.path / STATE).is_file():
            return read_config(self.path).model.seq_length
        try:
            return read_model_config(self.path).seq_length
        except UserError:  # `load_any` leaves such a folder to transformers
            return longest_sequence(self.path)

    def load(self) -> Loaded:
        """Load a checkpoint or a folder of a supported family, with random weights if `random_seed` is set.

        Raises `UserError` for another family.
        """
        if (self.path / STATE).is_file():
            model, tokenizer, config = read_model(self.path)
            sizes = config.model
        else:
            model, tokenizer, sizes = load_hugging_face(self.path)
        if self.random_seed is not None:
            torch.manual_seed(self.random_seed)
            model = build_model(sizes).eval()
        return Loaded(model, tokenizer, sizes.seq_length, sizes.position_encoding)

    def load_any(self) -> Loaded:
        """Load the model with this project's code, or else with transformers.

        Raises `UserError` if neither can read the folder.
        """
        if self.random_seed is None and (self.path / STATE).is_file():
            return self.load()
        refusal = None
        if self.random_seed is None and str(read_object(self.path / "config.json").get("model_type")) in FAMILIES:
            try:
                return self.load()
            except UserError as error:
                refusal = error
        encoder = load_encoder(self.path, random_init=self.random_seed is not None)
        if encoder.warning:
            print(encoder.warning, file=sys.stderr)
        if refusal is not None:
            print(f"{self.path}: read by transformers, without f(H) ({refusal})", file=sys.stderr)
        module: Any = encoder.fresh(self.random_seed or 0, torch.device("cpu")).eval()
        model = module.model
        position_encoding = model.config.position_encoding if isinstance(model, Encoder) else None
        return Loaded(model, encoder.tokenizer, encoder.max_length, position_encoding)

    def load_masked_lm(self) -> Loaded:
        """Load any masked LM as `PieceLogits`."""
        encoder = load_masked_lm(self.path, random_init=self.random_seed is not None)
        if encoder.warning:
            print(encoder.warning, file=sys.stderr)
        model = piece_logits(encoder, self.random_seed or 0, torch.device("cpu"))
        position_encoding = getattr(model.model.config, "position_encoding", None)
        return Loaded(model, encoder.tokenizer, encoder.max_length, position_encoding)


def find_snapshots(folders: Sequence[Path], every: bool) -> list[Snapshot]:
    """Return the models of `--load` folders: with `every` all checkpoints, oldest first, otherwise the newest.

    Checksums verify the weights; damaged checkpoints are skipped and named on standard error. A folder's name is the
    last part of its path, or the whole path if two folders would have the same name. Raises `UserError` for a folder
    without an intact model.
    """
    folder_names = [folder.resolve().name for folder in folders]
    return [
        snapshot
        for folder, name in zip(folders, folder_names, strict=True)
        for snapshot in _of_folder(folder, name if folder_names.count(name) == 1 else str(folder), every)
    ]


def beside_random_weights(snapshots: Sequence[Snapshot], seed: int) -> list[Snapshot]:
    """Return the models and, after the last one of each run, that model with random weights."""
    last = {snapshot.run: snapshot for snapshot in snapshots}
    found: list[Snapshot] = []
    for snapshot in snapshots:
        found.append(snapshot)
        if snapshot is last[snapshot.run]:
            found.append(Snapshot(with_random_weights(snapshot.run), snapshot.path, random_seed=seed))
    return found


def _of_folder(folder: Path, run: str, every: bool) -> list[Snapshot]:
    if not is_checkpoint(folder) and not holds_run(folder):
        config = folder / "config.json"
        if config.is_file() and "checkpoint" not in (values := read_object(config)) and model_type(config, values):
            return [Snapshot(run, folder)]
        wrote = "expected a folder that megatron-ddrp pretrain --save or megatron-ddrp convert wrote"
        raise UserError(
            f"--load {folder}: neither checkpoints nor a Hugging Face folder; {look_inside(folder) or wrote}"
        )
    all_of_them = every and not is_checkpoint(folder)
    paths = list(whole_checkpoints(folder)) if all_of_them else [choose_checkpoint(folder)]
    states = [(path, read_state(path)) for path in reversed(paths)]
    return [Snapshot(run, path, state["iteration"], state.get("consumed_tokens")) for path, state in states]


class Sentences:
    """Sentences as rows of tokens, the longest first, so that a lack of memory shows early.

    A sentence is a sequence `[CLS] tokens [SEP]`, cut to `max_length` tokens. The seed alone decides which sentences
    are drawn, so that every checkpoint and every run sees the same ones.
    """

    def __init__(self, rows: Sequence[Sequence[int] | NDArray], tokenizer: Tokenizer, max_length: int) -> None:
        """Keep the ids of each sentence, `rows`, without special tokens; batches cut them to `max_length` with them.

        Rows without a token are skipped.
        """
        rows = [row for row in rows if len(row)]
        lengths = np.minimum([len(row) + NUM_SPECIAL_TOKENS for row in rows], max_length)
        order = np.argsort(-lengths, kind="stable")
        self.tokenizer, self.max_length = tokenizer, max_length
        self.rows = [rows[number] for number in order]
        self.lengths = lengths[order]
        """Tokens per sentence including [CLS] and [SEP], `[sentences]`."""

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.lengths)

    def keep_longest(self) -> None:
        """Drop the sentences that are shorter than the longest."""
        self.lengths = self.lengths[self.lengths == self.lengths[0]]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield numpy batches `[sentences, seq]`, cut to their longest row, without masks and labels."""
        for begin in range(0, len(self), batch_size):
            lengths = self.lengths[begin : begin + batch_size]
            document_ids = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)  # [sentences, seq]
            input_ids = np.full(document_ids.shape, self.tokenizer.pad_id, np.int64)
            input_ids[:, 0] = self.tokenizer.cls_id
            input_ids[np.arange(len(lengths)), lengths - 1] = self.tokenizer.sep_id
            for row, length, ids in zip(input_ids, lengths, self.rows[begin : begin + len(lengths)], strict=True):
                row[1 : length - 1] = ids[: length - NUM_SPECIAL_TOKENS]
            yield Batch.of_texts(input_ids, document_ids)


def validation_rows(
    prefixes: Sequence[str], split: str, tokenizer: Tokenizer, seq_length: int, count: int, seed: int
) -> list[NDArray]:
    """Return the ids of up to `count` sequences of the validation split of some datasets, drawn without replacement.

    `seq_length` is the one of training, so that sequences begin at the same tokens. Raises `UserError` if a dataset was
    made with another tokenizer, or its validation split is empty, or a sequence has an id outside the vocabulary.
    """
    parts = []
    for prefix in prefixes:
        check_tokenizer(prefix, tokenizer)
        dataset = IndexedDataset(prefix)
        documents = split_documents(dataset.num_documents, split)["valid"]
        try:
            parts.append(SampleIndex(dataset, documents, seq_length))
        except NoSample as error:
            remedy = f"give it a larger share by --split (now {split})"
            raise UserError(f"the validation split is empty: {error}; {remedy}") from None
    samples = Blend(parts)
    _, indices = samples.visits(np.arange(min(count, len(samples))), seed)
    rows = list(samples.tokens(indices))
    for index, ids in zip(indices.tolist(), rows, strict=True):
        check_ids(samples.source(index), ids, tokenizer.vocab_size)
    return rows


def draw_texts(name: str, count: int, seed: int) -> list[str]:
    """Draw up to `count` texts of a file, folder or pattern that megatron-ddrp preprocess reads, each equally likely.

    Keep at most `count` texts in memory (algorithm R: Vitter, ACM TOMS 11, 1985). Raises `UserError` for a source with
    fewer than two texts.
    """
    drawn: list[str] = []
    draw = random.Random(seed)
    for number, (text,) in enumerate(iter_documents([name])):
        place = number if number < count else draw.randrange(number + 1)
        if place < count:
            drawn[place : place + 1] = [text]
    if len(drawn) < min(2, count):
        held = "one text" if drawn else "no text"
        raise UserError(f"--text {name} holds {held}: give two or more (a blank line ends a text of a .txt)")
    return drawn


@dataclass(frozen=True)
class View:
    """One model on the device, and the sentences to run through it."""

    snapshot: Snapshot
    model: Any
    """`Encoder`, or the encoder of transformers that the session's `load` returned."""
    position_encoding: str | None
    sentences: Sentences
    device: torch.device
    batch_size: int
    advance: Callable[[int], object]
    """Function that moves the progress bar by a number of sentences."""

    def batches(self) -> Iterator[Batch]:
        """Yield the sentences as batches on the device; move the progress bar after each batch."""
        for arrays in self.sentences.batches(self.batch_size):
            yield arrays.map(lambda array: torch.from_numpy(array).to(self.device))
            self.advance(len(arrays.input_ids))

    def facts(self) -> dict[str, Any]:
        """Return the model's own fields of its row in the JSON."""
        return {
            "run": self.snapshot.run,
            "checkpoint": str(self.snapshot.path),
            "iteration": self.snapshot.iteration,
            "consumed_tokens": self.snapshot.consumed_tokens,
            "position_encoding": self.position_encoding,
            "sentences": len(self.sentences),
            "max_length": self.sentences.max_length,
        }


class Session:
    """One run of an analysis. Raises `UserError` for invalid flags before anything is computed.

    `load` reads a model. The analysis calls `View.batches` `passes` times per model.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        every_checkpoint: bool,
        load: Callable[[Snapshot], Loaded] = Snapshot.load,
        passes: int = 1,
    ) -> None:
        self.arguments, self.load, self.passes = arguments, load, passes
        self.output = AnalysisFiles(arguments.output)
        blend = read_blend(arguments.data_path, "--data-path") if arguments.data_path else BlendWords((), None)
        if blend.weights is not None:
            raise UserError("--data-path has weights: an analysis takes prefixes only; leave them out", WRONG_ARGUMENTS)
        self.prefixes = blend.prefixes
        self.device = named_device(arguments.device, f"--device {arguments.device}")
        self.snapshots = find_snapshots(arguments.load, every_checkpoint)
        if getattr(arguments, "random_init", False):
            self.snapshots = beside_random_weights(self.snapshots, arguments.seed)
        paths = [snapshot.path for snapshot in self.snapshots]
        configs = [read_config(path) for path in paths if (path / STATE).is_file()]
        first = configs[0] if configs else Config()
        self.split = arguments.split or first.data.split or "0,1,0"  # 0,1,0 if the run had separate validation data
        self.seq_length = _common_length(self.snapshots, arguments.max_length)
        text = getattr(arguments, "text", None)
        self.texts = None if text is None else draw_texts(text, arguments.sentences, arguments.seed)

    def views(self) -> Iterator[View]:
        """Yield one view per model; load each model only when its turn comes."""
        total = len(self.snapshots)
        with progress("sentence") as bar:
            for number, snapshot in enumerate(self.snapshots):
                loaded = self.load(snapshot)
                sentences = self._sentences(loaded)
                bar.total = bar.n + (total - number) * len(sentences) * self.passes
                name = f"{snapshot.run} {snapshot.path.name}" if total > 1 else snapshot.run
                bar.set_description(name, refresh=False)
                model, batch_size = loaded.model.to(self.device), self.arguments.batch_size
                yield View(snapshot, model, loaded.position_encoding, sentences, self.device, batch_size, bar.update)

    def _sentences(self, loaded: Loaded) -> Sentences:
        seq_length = self.seq_length or loaded.seq_length
        max_length = min(self.arguments.max_length or seq_length, seq_length, loaded.seq_length)
        if self.texts is not None:
            rows: Sequence[Any] = loaded.tokenizer.encode_batch(self.texts)
        else:
            drawn = self.arguments.sentences, self.arguments.seed
            rows = validation_rows(self.prefixes, self.split, loaded.tokenizer, seq_length, *drawn)
        return Sentences(rows, loaded.tokenizer, max_length)

    def write(self, result: dict[str, Any], draw: Callable[[], Any]) -> None:
        """Write the JSON with the settings of the run, and the figure if `--output` is one; print their names."""
        if self.texts is None:
            source: dict[str, Any] = {"data_path": list(self.prefixes), "split": self.split}
        else:
            source = {"text": self.arguments.text}
        about = {"analysis": self.arguments.command, **source, "seed": self.arguments.seed}
        self.output.write(about | result, draw)


def _common_length(snapshots: Sequence[Snapshot], max_length: int | None) -> int | None:
    """Return the longest sequence that every model has positions for, in tokens; None if no configuration says it.

    Print a line if one model shortens the sentences of the others.
    """
    lengths = {snapshot: length for snapshot in snapshots if (length := snapshot.seq_length()) is not None}
    if not lengths:
        return None
    shortest = min(lengths, key=lambda snapshot: lengths[snapshot])
    least = lengths[shortest]
    if least < min(max(lengths.values()), max_length or math.inf):
        print(
            f"{shortest.run} takes at most {least} tokens: the sentences of all models are cut to {least}", flush=True
        )
    return least


class AnalysisFiles:
    """Files of `--output`: JSON, and a figure (.png, .pdf and .svg) if the name ends in .png.

    Raises `UserError` for another ending, and for a figure if matplotlib is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix not in (".png", ".json"):
            raise UserError(f"--output {path}: expected a name that ends in .png or .json", WRONG_ARGUMENTS)
        self.draws = path.suffix == ".png"
        if self.draws:
            need_packages(f"--output {path}: a figure, unlike .json,", "matplotlib")

    def write(self, result: dict[str, Any], draw: Callable[[], Any]) -> None:
        """Write the JSON, and the figure if `--output` is one; print their names. Raises `UserError` for nan."""
        written = self.path.with_suffix(".json")
        try:
            text = json.dumps(result, indent=1, allow_nan=False)
        except ValueError:
            reason = "some numbers are not finite: use a checkpoint that has not diverged"
            raise UserError(f"{written}: not written, {reason}") from None
        write_text(written, text + "\n")
        if self.draws:
            save_figure(draw(), self.path)
        print(f"{self.path}, .pdf, .svg and {written} written" if self.draws else f"{written} written")
