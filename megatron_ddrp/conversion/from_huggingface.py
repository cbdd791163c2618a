"""Hugging Face folder of a BERT or DeBERTa (v1 layout) → a folder that `pretrain_bert.py --load` goes on from.

Hidden states and logits are those of transformers. Such folders have no optimizer state: the checkpoint holds weights
alone, at iteration 0. Poolers and classifiers are left out; a folder without masked-LM head gets a new one. DeBERTa's
enhanced mask decoder is no part of such folders and stays off.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig, flag, save_config
from megatron_ddrp.conversion.foreign_config import one_of, refuse_code
from megatron_ddrp.conversion.huggingface_layouts import read_layout
from megatron_ddrp.conversion.huggingface_weights import (
    SEGMENT_EMBEDDING,
    TOKEN_EMBEDDING,
    Weights,
    fill,
    read_weights,
    refuse_sizes,
    rename,
)
from megatron_ddrp.conversion.output_folder import refuse_output, whole_folder
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.json_files import read_object
from megatron_ddrp.model import Encoder, build_model, on_meta_device

SEED = 1234
"""Of what a folder lacks, and of the rows that pad the vocabulary."""

PADDED_ROWS = 255
"""Rows that a model may embed beyond its tokenizer's pieces: tables are often padded to a multiple."""

NO_TOKENIZER = (
    "none, for lack of vocab.txt and tokenizer.json: give the model's own to pretrain_bert.py (transformers writes it: "
    "AutoTokenizer.from_pretrained(HF_DIR).save_pretrained(HF_DIR))"
)


@dataclass(frozen=True)
class ReadFolder:
    """The model of a Hugging Face folder as one of ours, and what became of the folder's tensors."""

    source: Path
    config: ModelConfig
    model: Encoder
    weights: Weights
    embedded_pieces: int
    """Rows of the folder's word embedding; those beyond the tokenizer's vocabulary are left out."""
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class Import(ReadFolder):
    """A folder that was read and written as a checkpoint."""

    output: Path

    @property
    def warning(self) -> str | None:
        """One sentence where the tokenizer is hardly the model's own, else None."""
        spare = self.embedded_pieces - self.config.vocab_size
        if self.tokenizer is None or spare <= PADDED_ROWS:
            return None
        return (
            f"{self.source}: its model embeds {self.embedded_pieces:,} pieces and its tokenizer has only "
            f"{self.config.vocab_size:,}: is it the tokenizer that the model was trained with? The other {spare:,} "
            "rows are left out"
        )

    def summary(self) -> str:
        """Return a few lines: what was loaded, left out and initialised, and the flags to resume with."""
        model, tokenizer, loaded = self.config, self.tokenizer, self.weights.ours.values()
        groups = Counter(name.rpartition(".")[0] or name for name in self.weights.left_out)
        left_out = [f"{group} ({count})" for group, count in groups.items()]
        if self.embedded_pieces > model.vocab_size:
            left_out.append(f"{self.embedded_pieces - model.vocab_size} rows beyond the tokenizer's vocabulary")
        command = ["deepspeed", "pretrain_bert.py", "--data-path", "P", "--load", str(self.output), "--save", "DIR"]
        command += [*self._tokenizer_flags(), *model_flags(model)]
        lines = {
            "loaded": f"{self.source}: {model.position_encoding} positions, {model.num_layers} layers x "
            f"{model.hidden_size}, {sum(t.numel() for t in loaded):,} parameters in {len(loaded)} tensors",
            "left out": ", ".join(left_out) or "nothing",
            "initialised": "; ".join(self.weights.initialised) or "nothing",
            "tokenizer": f"{tokenizer.tokenizer_type}, {tokenizer.vocab_size:,} pieces" if tokenizer else NO_TOKENIZER,
            "wrote": f"{self.output}: weights without optimizer state",
            "go on": shlex.join(command),
        }
        return "\n".join(f"{label + ':':<13}{line}" for label, line in lines.items())

    def _tokenizer_flags(self) -> list[str]:
        if self.tokenizer is None:
            return []
        flags = ["--tokenizer-type", self.tokenizer.tokenizer_type]
        if self.tokenizer.tokenizer_type == "HuggingFace":
            return [*flags, "--tokenizer-model", str(self.source)]  # its settings beside it name the special pieces
        return [*flags, "--vocab-file", str(self.output / checkpoint.TOKENIZER / self.tokenizer.file_name)]


def read_folder(source: Path) -> ReadFolder:
    """Read a folder of a BERT or a DeBERTa v1. Raises `UserError` as `import_folder` does."""
    # Every size is held against the weights before anything of that size is allocated.
    (config, num_segments), tensors = read_layout(source), read_weights(source)
    refuse_sizes(config, tensors, source)
    wanted = dict(on_meta_device(config).named_parameters())
    weights = rename(tensors, config.num_attention_heads, wanted, source)
    if TOKEN_EMBEDDING not in weights.ours:
        raise UserError(f"{source}: no word embedding among its weights; give a folder with a whole encoder")
    segments = len(weights.ours.get(SEGMENT_EMBEDDING, ()))
    if segments != num_segments:
        raise UserError(
            f"{source}: config.json says type_vocab_size {num_segments}, and the weights embed {segments} "
            "segments: they do not match; copy the folder again"
        )
    tokenizer, rows = find_tokenizer(source), len(weights.ours[TOKEN_EMBEDDING])
    pieces = tokenizer.vocab_size if tokenizer else rows
    if pieces > rows:
        raise UserError(f"{source}: its tokenizer has {pieces} pieces and its model embeds {rows}: they do not match")
    if not pieces:
        raise UserError(f"{source}: its word embedding has no rows; copy the folder again")
    config = dataclasses.replace(config, vocab_size=pieces)
    torch.manual_seed(SEED)
    model = build_model(config)
    fill(model, weights, pieces, source)
    return ReadFolder(source, config, model, weights, rows, tokenizer)


def import_folder(source: Path, output: Path, overwrite: bool = False) -> Import:
    """Write the model of a Hugging Face folder as a checkpoint folder with one checkpoint, iteration 0.

    `output` appears whole or not at all. Raises `UserError` where the model is neither BERT nor DeBERTa v1, where a
    weight is missing or does not fit, or where `output` exists and may not be replaced.
    """
    refuse_output(output, overwrite, _is_import, "import that nothing was trained from")
    read = read_folder(source)
    with whole_folder(output) as folder:
        whole = Config(model=read.config, objective=ObjectiveConfig("mlm"))
        path = checkpoint.save_weights_only({n: p.detach() for n, p in read.model.named_parameters()}, whole, folder)
        save_config(whole, folder)
        if read.tokenizer:
            read.tokenizer.save(folder / checkpoint.TOKENIZER)
        checkpoint.mark_latest(folder, path.name)
    return Import(**vars(read), output=output)


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return a folder's tokenizer: from vocab.txt if BERT's usual rules apply, else from tokenizer.json, else None."""
    vocab, settings = folder / "vocab.txt", tokenizer_settings(folder)
    lower = settings["do_lower_case"]
    usual = settings.get("strip_accents") in (None, lower) and settings.get("tokenize_chinese_chars", True)
    has_rules = (folder / "tokenizer.json").is_file()
    if vocab.is_file() and (usual or not has_rules):
        return build_tokenizer("BertWordPieceLowerCase" if lower else "BertWordPieceCase", vocab_file=vocab)
    return build_tokenizer("HuggingFace", tokenizer_model=folder) if has_rules else None


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with `do_lower_case`, which is true by default.

    Raises `UserError` where it cannot be read, or where the tokenizer is another's code.
    """
    path = folder / "tokenizer_config.json"
    settings = {"do_lower_case": True} | (read_object(path) if path.is_file() else {})
    refuse_code(path, settings)
    one_of(path, settings, "do_lower_case", (True, False))
    return settings


def model_flags(config: ModelConfig) -> list[str]:
    """Return the flags by which `pretrain_bert.py` builds this model: those that differ from their defaults."""
    flags, default = [], ModelConfig(position_encoding=config.position_encoding)
    for f in dataclasses.fields(ModelConfig):
        value = getattr(config, f.name)
        usual = f.default if f.name == "position_encoding" else getattr(default, f.name)
        if "help" not in f.metadata or value == usual:
            continue
        if isinstance(value, bool):
            flags.append(flag(f.name) if value else flag("no_" + f.name))
        else:
            flags += [flag(f.name), str(value)]
    return flags


def _is_import(folder: Path) -> bool:
    """Return whether a folder holds an import and nothing that training added."""
    try:
        newest = checkpoint.newest(folder)
        return newest is not None and bool(checkpoint.read_state(newest).get(checkpoint.WEIGHTS_ONLY))
    except UserError:
        return False
