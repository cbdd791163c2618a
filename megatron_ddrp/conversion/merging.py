"""The weighted mean of several models of one architecture and vocabulary, as a folder of their kind.

    mean = Σ wᵢ·xᵢ / Σ wᵢ        in float64, rounded once to fp32

The mean of weights along a run is an old estimate of its end (Polyak and Juditsky 1992; for networks Izmailov et al.,
arXiv:1803.05407); of several fine-tuned models it is a "model soup" (Wortsman et al., arXiv:2203.05482). Tensors are
read, averaged and written one by one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config, changed_model, flag
from megatron_ddrp.config.run import CHANGEABLE
from megatron_ddrp.conversion.families.contract import (
    CARD,
    NO_SETTINGS,
    SUMS,
    read_config_file,
    refuse_output,
    whole_folder,
    write_sums,
)
from megatron_ddrp.conversion.from_huggingface import is_untrained, write_untrained
from megatron_ddrp.conversion.model_card import loading_lines, longest_row, render_card
from megatron_ddrp.conversion.to_huggingface import is_hugging_face
from megatron_ddrp.conversion.tokenizer_files import find_tokenizer
from megatron_ddrp.conversion.weight_files import INDEX, SAFE_WEIGHTS, shards_of
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.pages.markdown import Table

ADVICE = "give models of one kind, architecture and vocabulary"
OF_ONE_FOLDER = {*NO_SETTINGS, "objective"}
"""Keys of config.json in which the folders may differ: of no effect, or about the training of one."""
NOT_KEPT = ("torch_dtype", "dtype", "finetuned")
"""Keys of config.json that are wrong for the mean, which is in fp32 and has no score."""
COPIED = (".json", ".txt", ".model", ".py")
"""Endings of the files of settings, tokenizer and model code that an export keeps."""
MODULE_FOLDERS = "[0-9]*_*"
"""Pattern of the folders of modules behind the encoder, as sentence-transformers names them: 1_Pooling."""


@dataclass(frozen=True)
class Source:
    """One of the merged models."""

    path: Path
    """The checkpoint DIR/iter_N, or the Hugging Face folder."""
    weight: float
    run: Config | None
    """Configuration of the run that wrote the checkpoint; None for a Hugging Face folder."""
    values: dict[str, Any]
    """Content of a Hugging Face folder's config.json."""
    stored: checkpoint.StoredTensors
    tokenizer: Tokenizer | None

    @classmethod
    def open(cls, load: Path, weight: float) -> Source:
        """Open the newest checkpoint of a run, one checkpoint, or a Hugging Face folder. Raise `UserError` if damaged.

        A checkpoint's files, and those of an export, are compared with their sums.
        """
        if checkpoint.is_checkpoint(load) or checkpoint.holds_run(load):
            path = checkpoint.choose_checkpoint(load)
            tokenizer = load_tokenizer(path.resolve().parent / checkpoint.TOKENIZER)
            return cls(path, weight, checkpoint.read_config(path), {}, checkpoint.StoredTensors(path), tokenizer)
        values, weights, index = read_config_file(load), load / SAFE_WEIGHTS, load / (SAFE_WEIGHTS + INDEX)
        if not (weights.is_file() or index.is_file()):
            raise UserError(f"{load}: it has no {SAFE_WEIGHTS}; save the model in that format, and merge it then")
        files = [weights] if weights.is_file() else [*shards_of(index)]
        names = [str(file.relative_to(load)) for file in files]
        if modules := [path for end in ("safetensors", "bin") for path in load.glob(f"{MODULE_FOLDERS}/*.{end}")]:
            raise UserError(f"{load}: {modules[0].parent.name} has weights of its own, which are not merged: remove it")
        return cls(load, weight, None, values, checkpoint.StoredTensors(load, files=names), find_tokenizer(load))

    @property
    def name(self) -> str:
        """Name without the path above: `run/iter_0001000`, or that of the folder."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if self.run else path.name

    def difference(self, first: Source) -> str:
        """Return the noun for what this model has other than `first`, with the settings; "" if they can be merged."""
        if (self.run is None) != (first.run is None):
            return "kind of folder"
        if self.run and first.run:
            changed = [flag(name) for name in changed_model(self.run, first.run) if name not in CHANGEABLE]
        else:
            keys = sorted((first.values.keys() | self.values.keys()) - OF_ONE_FOLDER)
            changed = [key for key in keys if first.values.get(key) != self.values.get(key)]
        if changed:
            return f"architecture ({', '.join(changed)})"
        one, other = (each.tokenizer.fingerprint if each.tokenizer else None for each in (first, self))
        return "vocabulary" if one != other else ""


class Mean(Mapping[str, Tensor]):
    """Mean of some models: tensors by name, each computed when it is read, and none kept."""

    def __init__(self, loads: Sequence[Path], weights: Sequence[float]) -> None:
        """Open the models. Raise `UserError` unless they are of one kind, architecture and vocabulary."""
        self.sources = [Source.open(load, weight) for load, weight in zip(loads, weights, strict=True)]
        first = self.sources[0]
        for source in self.sources[1:]:
            if difference := source.difference(first):
                raise UserError(f"--load {source.path}: another {difference} than {first.path}; {ADVICE}")
            source.stored.check(first.stored.names, {name: first.stored.shape(name) for name in first.stored.names})
        total = sum(weights)
        self.shares = [(source.name, source.weight / total) for source in self.sources]
        """Name of each model, and its share of the mean; the shares add up to 1."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.sources[0].stored.names))

    def __len__(self) -> int:
        return len(self.sources[0].stored.names)

    def __getitem__(self, name: str) -> Tensor:
        """Return a mean in fp32. Raise `UserError` for a number that is not finite and for unequal whole numbers."""
        first = self.sources[0].stored[name]
        total = torch.zeros(first.shape, dtype=torch.float64)
        for source in self.sources:
            tensor = source.stored[name]
            if not first.is_floating_point() and not torch.equal(tensor, first):
                raise UserError(f"{source.path}: {name} holds other whole numbers, which have no mean; {ADVICE}")
            if not torch.isfinite(tensor).all():
                raise UserError(f"{source.path}: {name} contains a value that is not a finite number; leave it out")
            total += tensor.double() * source.weight
        return (total / sum(source.weight for source in self.sources)).float() if first.is_floating_point() else first

    def write(self, output: Path, overwrite: bool = False) -> None:
        """Write a folder for `--load`, with weights only, or a Hugging Face folder, whole or not at all.

        Settings and tokenizer are those of the first model. Raise `UserError` if `output` exists and may not be
        replaced, or if a weight has no mean.
        """
        first = self.sources[0]
        with whole_folder(output, partial(refuse_existing, output, overwrite)) as folder:
            if first.run:
                state = checkpoint.read_state(first.path)
                kept = state.keys() & {checkpoint.HEAD_SETTINGS, checkpoint.NEW_HEAD, checkpoint.ORIGIN}
                facts = {key: state[key] for key in sorted(kept)} | {checkpoint.MERGED: self.shares}
                length = longest_row(first.run, state)  # as of the run: an export says it
                phases = (f"{length}:1",) if length < first.run.model.seq_length else ()
                config = first.run.replace(training={"seq_length_phases": phases})
                write_untrained(self, config, folder, first.tokenizer, facts)
            else:
                self._write_export(first.path, first.values, folder, output.resolve().name)

    def _write_export(self, source: Path, values: dict[str, Any], folder: Path, name: str) -> None:
        shutil.copytree(source, folder, ignore=_left_out, dirs_exist_ok=True)
        kept = {key: value for key, value in values.items() if key not in NOT_KEPT}
        (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        checkpoint.save_weights(self, folder)
        _, _, head = str(values.get("architectures", [""])[0]).partition("For")
        usage = loading_lines(name, f"AutoModelFor{head}" if head else "AutoModel", "auto_map" in values)
        metadata = {"library_name": "transformers", "tags": ["megatron-ddrp", "merge"]}
        shares = Table(["model", "share"], [[model, f"{share:.4g}"] for model, share in self.shares])
        card = render_card("merged_card.md.jinja", name, metadata, usage, "auto_map" in values, shares=shares)
        write_text(folder / CARD, card)
        write_sums(folder)


def _left_out(_folder: str, names: list[str]) -> list[str]:
    """Return the names in a folder that its mean does not get as they are."""
    kept = (name for name in names if name.endswith(COPIED) or fnmatch(name, MODULE_FOLDERS))
    return [*set(names).difference(name for name in kept if not name.endswith((INDEX, SUMS)))]


def refuse_existing(output: Path, overwrite: bool) -> None:
    """Raise `UserError` if the output exists and is not a folder that `--overwrite` may replace."""
    kind = "an untrained checkpoint or a Hugging Face folder"
    refuse_output(output, overwrite, lambda folder: is_untrained(folder) or is_hugging_face(folder), kind)
