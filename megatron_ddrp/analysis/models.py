"""The models to look at: every checkpoint of a run, or a Hugging Face folder, by the same `--load`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.checkpoint import (
    MODEL,
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
    """What legends call the folder it came from."""
    path: Path
    iteration: int | None = None
    """Steps it was trained for; None where nothing says so, as in a Hugging Face folder."""
    consumed_tokens: int | None = None

    def load(self) -> tuple[Encoder, Tokenizer, Config]:
        """Return the model on the CPU in fp32 and eval mode, its tokenizer, and its configuration."""
        if (self.path / STATE).is_file():
            return read_model(self.path)
        from megatron_ddrp.conversion.from_export import load_hugging_face

        model, tokenizer, sizes = load_hugging_face(self.path)
        return model, tokenizer, Config(model=sizes)


def find_snapshots(folder: Path, every: bool) -> tuple[list[Snapshot], list[str]]:
    """Return the models of a `--load` folder, oldest first, all of them or the newest; and why others are left out.

    Weights are checked by their sums. Raises `UserError` where there is none that is whole.
    """
    if not is_checkpoint(folder) and not holds_run(folder):
        if _is_hugging_face(folder):
            return [Snapshot(_name(folder), folder)], []
        raise UserError(
            f"--load {folder}: neither checkpoints nor a Hugging Face folder; expected a folder that "
            "pretrain_bert.py --save or tools/convert_checkpoint.py wrote"
        )
    notes: list[str] = []
    if every and not is_checkpoint(folder):
        whole = list(whole_checkpoints(folder, (MODEL,), notes.append))
    else:
        whole = [choose_checkpoint(folder, (MODEL,), notes.append)]
    return [_snapshot(_name(folder), path) for path in reversed(whole)], notes


def find_all(folders: Sequence[Path], every: bool) -> tuple[list[Snapshot], list[str]]:
    """The models of several folders, whose names are told apart: the last part of the path where that is enough."""
    snapshots, notes = [], []
    names = [_name(folder) for folder in folders]
    for folder, name in zip(folders, names, strict=True):
        found, passed = find_snapshots(folder, every)
        own = name if names.count(name) == 1 else str(folder)
        snapshots += [Snapshot(own, s.path, s.iteration, s.consumed_tokens) for s in found]
        notes += passed
    return snapshots, notes


def _snapshot(run: str, path: Path) -> Snapshot:
    state = read_state(path)
    return Snapshot(run, path, state["iteration"], state.get("consumed_tokens"))


def _name(folder: Path) -> str:
    return folder.resolve().name


def _is_hugging_face(folder: Path) -> bool:
    path = folder / "config.json"
    return path.is_file() and "model_type" in read_object(path)
