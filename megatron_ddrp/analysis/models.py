"""The models to look at: every checkpoint of a run, or a Hugging Face folder, by the same `--load`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.checkpoint import (
    STATE,
    choose_checkpoint,
    holds_run,
    is_checkpoint,
    read_model,
    read_state,
    whole_checkpoints,
)
from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.json_files import read_object
from megatron_ddrp.model import Encoder


@dataclass(frozen=True)
class Snapshot:
    """One model on disk."""

    run: str
    """Name of its `--load` folder in figures and lines."""
    path: Path
    iteration: int | None = None
    """Steps it was trained for; None where nothing says so, as in a Hugging Face folder."""
    consumed_tokens: int | None = None

    def load(self) -> tuple[Encoder, Tokenizer, Config]:
        """Return the model on the CPU in fp32 and eval mode, its tokenizer, and its configuration."""
        if (self.path / STATE).is_file():
            return read_model(self.path)
        from megatron_ddrp.conversion.huggingface_folder import load_hugging_face

        model, tokenizer, sizes = load_hugging_face(self.path)
        return model, tokenizer, Config(model=sizes)


def find_snapshots(folders: Sequence[Path], every: bool) -> list[Snapshot]:
    """Return the models of `--load` folders, each folder's oldest first: all of its checkpoints, or the newest alone.

    Weights are checked by their sums, and damaged checkpoints are named on standard error. A folder's name is the last
    part of its path, or the whole path where two folders would have the same name. Raises `UserError` for a folder
    without a whole model.
    """
    names = [folder.resolve().name for folder in folders]
    return [
        snapshot
        for folder, name in zip(folders, names, strict=True)
        for snapshot in _of_folder(folder, name if names.count(name) == 1 else str(folder), every)
    ]


def _of_folder(folder: Path, run: str, every: bool) -> list[Snapshot]:
    if not is_checkpoint(folder) and not holds_run(folder):
        config = folder / "config.json"
        if config.is_file() and "model_type" in read_object(config):
            return [Snapshot(run, folder)]
        raise UserError(
            f"--load {folder}: neither checkpoints nor a Hugging Face folder; expected a folder that "
            "pretrain_bert.py --save or tools/convert_checkpoint.py wrote"
        )
    all_of_them = every and not is_checkpoint(folder)
    paths = list(whole_checkpoints(folder)) if all_of_them else [choose_checkpoint(folder)]
    states = [(path, read_state(path)) for path in reversed(paths)]
    return [Snapshot(run, path, state["iteration"], state.get("consumed_tokens")) for path, state in states]
