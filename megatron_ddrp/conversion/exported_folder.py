"""Check of an exported folder: transformers loads it, and it computes the training model's hidden states.

Sums of the files of this project's exports: a folder that was damaged after its export is refused.

Folders of other programs have no sums, and transformers ignores ours.

Output folder of a conversion: written whole or not at all, and never over other work.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from megatron_ddrp.config.registry import ENCODINGS, PLUGINS
from megatron_ddrp.data.atomic import atomic_folder
from megatron_ddrp.data.sealed import file_facts, file_fault
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, need_packages, refusals_as_user_errors
from megatron_ddrp.foreign import quiet_transformers, read_object
from megatron_ddrp.model import Encoder

TOLERANCE = 1e-4
"""Largest allowed difference of a hidden state, relative to the largest one; fp32 rounding gives about 1e-6."""
LONGEST = 128
"""Largest number of compared tokens per row."""


Scores = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""Function from last hidden states `[batch, seq, hidden]` to a head's scores, by transformers' names of outputs."""


def check_export(folder: Path, class_name: str, model: Encoder, tokenizer: Tokenizer, scores: Scores) -> str:
    """Load the class `class_name` from a written folder, compare it with the model, and return a line for the user.

    Scores of tokens are compared outside the padding. Raise `UserError` if the folder cannot be loaded or computes
    something else. Without transformers, raise it for a plug-in's encoding; other folders are then not checked, since
    the tests load every built-in encoding.
    """
    config = model.config
    try:
        need_packages("the check of the export of a plug-in's encoding", "transformers")
    except UserError:
        if ENCODINGS[config.position_encoding] in PLUGINS:
            raise
        return "not checked: transformers is not installed"
    seq, place = min(config.seq_length, LONGEST), torch.arange(min(config.seq_length, LONGEST))
    mask = (place < torch.tensor([[seq], [seq // 2 + 1]])).long()  # two rows, one of them padded
    pad, ids = tokenizer.pad_id, place * torch.tensor([[1], [2]]) % config.vocab_size
    ids = torch.where(ids == pad, (pad + 1) % config.vocab_size, ids)  # RoBERTa counts positions over non-padding ids
    ids, segments = torch.where(mask > 0, ids, pad), (place >= seq // 3).long() * mask
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs |= {"token_type_ids": segments} if config.num_segments > 1 else {}
    try:
        with torch.no_grad(), quiet_transformers():
            loaded, report = exported_class(folder, class_name).from_pretrained(folder, output_loading_info=True)
            output = loaded.eval()(**inputs, output_hidden_states=True)
    except Exception as error:  # a plug-in's code may raise any error
        raise UserError(f"the exported model cannot be loaded: {type(error).__name__}: {error}") from error
    has_head = any(name.endswith("logits") for name in output)  # else the encoder's class ignores the head's weights
    if strange := sorted({*report["missing_keys"], *(report["unexpected_keys"] if has_head else ())}):
        raise UserError(f"the exported model does not fit its weights: {strange[0]} and {len(strange) - 1} more")
    valid = mask.bool()
    with torch.no_grad():
        hidden = model.encode(ids, segments, mask, place * mask)
        gaps = {"hidden states": _gap(output.hidden_states[-1][valid], hidden[valid])}
        for name, expected in scores(hidden).items() if has_head else ():
            compared = valid if expected.shape[:2] == valid.shape else ...  # everything, if there is one score per row
            gaps[name.replace("_", " ")] = _gap(output[name][compared], expected[compared])
    for what, gap in gaps.items():
        if not gap <= TOLERANCE:
            raise UserError(
                f"the exported model's {what} differ from the checkpoint's by {gap:.1e} of the largest: an encoding "
                "may depend only on its settings, its weights and the positions"
            )
    found = " and ".join(f"its {what} differ by {gap:.1e}" for what, gap in gaps.items())
    return f"loaded by {class_name}; {found} of the largest"


def _gap(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Return the largest difference, relative to the largest of our values."""
    return (theirs - ours).abs().max() / ours.abs().max()


def exported_class(folder: Path, class_name: str) -> Any:
    """Return a class from a folder's own code if it has any, else from transformers."""
    code = folder / "modeling_ddrp.py"
    if not code.exists():
        return getattr(importlib.import_module("transformers"), class_name)
    # A package whose modules are the folder's files, so that they can import one another relatively.
    spec = spec_from_file_location(f"exported_{uuid.uuid4().hex}", code, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None, code
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return getattr(module, class_name)


SUMS = "export_sums.json"
CARD = "README.md"
"""The model card, which people edit."""


def write_sums(folder: Path) -> None:
    """Write size and CRC-32 of every file of a complete export that we read: all but its model code and its card."""
    read = [path for path in sorted(folder.iterdir()) if path.suffix != ".py" and path.name != CARD]
    files = {path.name: file_facts(path) for path in read}
    (folder / SUMS).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def check_sums(folder: Path, only: str | None = None) -> None:
    """Raise `UserError` if an export, or its file `only`, has changed since it was written.

    Folders without sums are accepted.
    """
    if not (folder / SUMS).exists():
        return
    files = read_object(folder / SUMS).get("files")
    if not isinstance(files, dict) or not files or not all(map(_are_facts, files.values())):
        raise UserError(f"{folder / SUMS}: it holds no sums; export the checkpoint again")
    for name, written in files.items():
        if only in (None, name) and (reason := file_fault(folder / name, written)):
            raise UserError(
                f"{folder}: {reason}: damaged or changed since its export; export the checkpoint again, or delete "
                f"{SUMS} if you changed the folder yourself"
            )


def _are_facts(written: object) -> bool:
    return isinstance(written, dict) and {"bytes": int, "crc32": str} == {k: type(v) for k, v in written.items()}


def refuse_output(output: Path, overwrite: bool, replaceable: Callable[[Path], bool], kind: str) -> None:
    """Raise `UserError` before any work if `output` must not be replaced; an empty folder may be used.

    `replaceable` returns whether `--overwrite` may replace a folder; `kind` describes such folders in words.
    """
    if Path.cwd().is_relative_to(output.resolve()):
        raise UserError(
            f"--output {output} is or holds the current folder, which cannot be replaced: give the name of a new one",
            WRONG_ARGUMENTS,
        )
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UserError(f"--output {output} exists: choose another name, or give --overwrite", WRONG_ARGUMENTS)
    if not replaceable(output):
        raise UserError(
            f"--output {output} is not {kind}, and --overwrite replaces nothing else: choose another name",
            WRONG_ARGUMENTS,
        )


@contextmanager
def whole_folder(output: Path, check: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Provide a new folder of weights to write into, as `atomic_folder` does; its `check` runs before the renaming."""
    try:
        with refusals_as_user_errors(output), atomic_folder(output, check) as folder:
            yield folder
    except Exception as error:  # tokenizers raises no class of its own for a full disk
        if isinstance(error, UserError) or not (isinstance(error, SafetensorError) or "os error" in str(error)):
            raise
        raise UserError(f"--output {output}: cannot be written: {error}") from None
