"""Models of `--load`: every checkpoint of a run, the newest one, or a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from megatron_ddrp.checkpoint.other_folders import look_inside
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.conversion.foreign_config import model_type
from megatron_ddrp.conversion.huggingface_folder import load_hugging_face, read_model_config
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.encoder import load_encoder, with_random_weights
from megatron_ddrp.encoders.huggingface import longest_sequence
from megatron_ddrp.encoders.masked_lm import load_masked_lm, piece_logits
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_object
from megatron_ddrp.model import Encoder, build_model


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
        _print_if_any(encoder.warning)
        if refusal is not None:
            print(f"{self.path}: read by transformers, without f(H) ({refusal})", file=sys.stderr)
        module: Any = encoder.fresh(self.random_seed or 0, torch.device("cpu")).eval()
        model = module.model
        position_encoding = model.config.position_encoding if isinstance(model, Encoder) else None
        return Loaded(model, encoder.tokenizer, encoder.max_length, position_encoding)

    def load_masked_lm(self) -> Loaded:
        """Load any masked LM as `PieceLogits`."""
        encoder = load_masked_lm(self.path, random_init=self.random_seed is not None)
        _print_if_any(encoder.warning)
        model = piece_logits(encoder, self.random_seed or 0, torch.device("cpu"))
        position_encoding = getattr(model.model.config, "position_encoding", None)
        return Loaded(model, encoder.tokenizer, encoder.max_length, position_encoding)


def _print_if_any(warning: str) -> None:
    if warning:
        print(warning, file=sys.stderr)


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
