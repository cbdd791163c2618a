"""The models to look at: every checkpoint of a run, or a Hugging Face folder, by the same `--load`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ddrp.checkpoint import STATE, checkpoints, fault, load_model, none_complete, read_state
from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizer import Tokenizer
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
        """The model on the CPU in fp32 and eval mode, its tokenizer, and its configuration."""
        if (self.path / STATE).is_file():
            return load_model(self.path)
        from megatron_ddrp.conversion.from_export import load_hugging_face

        model, tokenizer, sizes = load_hugging_face(self.path)
        return model, tokenizer, Config(model=sizes)


def find_snapshots(folder: Path, every: bool) -> tuple[list[Snapshot], list[str]]:
    """The models of a `--load` folder, oldest first: all of them or the newest; and why others were passed over.

    Raises `UserError` where there is none.
    """
    if (folder / STATE).is_file():
        return [_snapshot(_name(folder), folder)], []
    found = checkpoints(folder)
    if not found:
        if _is_hugging_face(folder):
            return [Snapshot(_name(folder), folder)], []
        raise UserError(
            f"--load {folder}: neither checkpoints nor a Hugging Face folder; expected a folder that "
            "pretrain_bert.py --save or tools/convert_checkpoint.py wrote"
        )
    faults = {path: fault(path) for path in (found if every else found[:1])}
    if not every and faults[found[0]]:
        faults = {path: fault(path) for path in found}
    whole = [path for path in faults if faults[path] is None]
    if not whole:
        raise none_complete(folder, [f"{path.name}: {reason}" for path, reason in faults.items()])
    passed = [f"passed over {path}: {reason}" for path, reason in faults.items() if reason]
    return [_snapshot(_name(folder), path) for path in sorted(whole if every else whole[:1])], passed


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
