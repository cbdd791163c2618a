"""Import of a Hugging Face folder of any family: settings, weights and tokenizer as ours, without running code.

Hidden states and logits equal those of transformers. Poolers and classifiers are left out; if the folder lacks the head
that its objective trains, the model gets a new one. `import_folder` writes the model as a folder for `--load` in
pre-training. The name of a model on the Hugging Face hub, such as `FacebookAI/roberta-base`, stands for its downloaded
folder.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig, save_config
from megatron_ddrp.conversion.families import Family, family_of
from megatron_ddrp.conversion.families.contract import CARD, read_config_file, refuse_output, whole_folder
from megatron_ddrp.conversion.model_card import model_flags, objective_flags
from megatron_ddrp.conversion.origin import Origin, describe, read_modules, stated_license
from megatron_ddrp.conversion.tokenizer_files import Transfer, find_tokenizer, plan_transfer
from megatron_ddrp.conversion.weight_files import (
    BY_PIECE,
    EMBEDDING_DIFFERENCE,
    INDEX,
    PICKLED_WEIGHTS,
    SAFE_WEIGHTS,
    SEGMENT_EMBEDDING,
    TOKEN_EMBEDDING,
    Weights,
    fill,
    read_weights,
    refuse_homeless,
    refuse_sizes,
    rename,
)
from megatron_ddrp.data.dataset.indexed_dataset import TokenizerFlags
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model import Encoder, build_model, on_meta_device

SEED = 1234
"""Seed of the weights that a folder lacks, and of the rows that pad the vocabulary."""

PADDED_ROWS = 255
"""Most rows that a model may embed beyond its tokenizer's pieces: tables are often padded to a multiple."""


@dataclass(frozen=True)
class ReadFolder:
    """The model of a Hugging Face folder as one of ours, and an account of the folder's tensors."""

    source: Path
    family: Family
    config: ModelConfig
    objective: ObjectiveConfig
    model: Encoder
    weights: Weights
    embedded_pieces: int
    """Rows of the folder's word embedding; those beyond the tokenizer's vocabulary are left out."""
    tokenizer: Tokenizer | None
    transfer: Transfer | None
    """Origin of each row of the vocabulary, if the model was given another one."""
    padding_id: int | None
    """Id that must be the tokenizer's padding, by `Family.padding_id`."""
    head_settings: dict[str, Any]
    """Settings of heads that fine-tuning adds, by `Family.head_settings`."""
    warning: str
    """Line about a tokenizer that may not be the model's, by `check_rows`; often empty."""


def read_folder(source: Path, generator: Path | None = None, tokenizer: Tokenizer | None = None) -> ReadFolder:
    """Read a folder of a family in the registry; for an ELECTRA, optionally also the folder of its generator.

    With a `tokenizer`, the model gets its vocabulary instead of the folder's (`tokenizer_files.py`).

    Raise `UserError` if its family is not in the registry, or if a weight is missing or does not fit.
    """
    config, objective, family, weights, values = _settings_and_weights(source)
    if generator is not None:
        other_config, _, _, other, _ = _settings_and_weights(generator)
        objective = generator_objective(objective, config, other_config)
        join_generator(weights, other, dict(on_meta_device(config, objective).named_parameters()))
    own, rows = find_tokenizer(source), len(weights.ours[TOKEN_EMBEDDING])
    if own:
        family.check_tokenizer(source / "config.json", values, own)
    pieces = own.vocab_size if own else rows
    warning, transfer = check_rows(source, pieces, rows), None
    if tokenizer is not None:
        transfer = plan_transfer(require_own(own, source), tokenizer)
        weights.ours.update({n: transfer.rows(t) for n, t in weights.ours.items() if n.endswith(BY_PIECE)})
        pieces = rows = tokenizer.vocab_size
    config = replace(config, vocab_size=pieces)
    torch.manual_seed(SEED)
    model = build_model(config, objective=objective)
    fill(model, weights, pieces, source)
    kept = (family.padding_id(values), family.head_settings(source / "config.json", values), warning)
    return ReadFolder(source, family, config, objective, model, weights, rows, tokenizer or own, transfer, *kept)


def _settings_and_weights(source: Path) -> tuple[ModelConfig, ObjectiveConfig, Family, Weights, dict[str, Any]]:
    """Return a folder's model, objective, family, weights under our names, and completed config.json.

    Every size is compared with the weights before a tensor of that size is allocated.
    """
    path = source / "config.json"
    family, values, config = _settings(source)
    tensors = read_weights(source)
    refuse_sizes(config, tensors, source)
    objective = family.objective(path, values, tensors)
    shapes = on_meta_device(config, objective)
    wanted = dict(shapes.named_parameters()) | checkpoint.persistent_buffers(shapes)
    weights = rename(family.from_folder(tensors, values), family.our_name, wanted, source)
    _refuse_other_tables(config, weights, source)
    refuse_homeless(weights.encoder, weights.left_out, family.prefix, source)
    return config, objective, family, weights, values


def _settings(source: Path) -> tuple[Family, dict[str, Any], ModelConfig]:
    """Return a folder's family, its completed config.json, and our configuration of its model."""
    path, values = source / "config.json", read_config_file(source)
    family = family_of(path, values)
    values = family.complete(path, values)
    return family, values, family.model_config(path, values)


def read_model_config(folder: Path) -> ModelConfig:
    """Return the configuration of a folder's model without reading its weights.

    Raise `UserError` if its family is not in the registry, or for a setting that we do not support.
    """
    return _settings(folder)[2]


def load_hugging_face(folder: Path) -> tuple[Encoder, Tokenizer, ModelConfig]:
    """Return (model on the CPU in fp32 and eval mode, tokenizer, configuration) of a folder.

    Print the warning of `check_rows`. Raise `UserError` as `read_folder` does, and if the folder has no tokenizer.
    """
    read = read_folder(folder)
    if read.warning:
        print(read.warning, file=sys.stderr)
    return read.model.eval(), require_own(read.tokenizer, folder), read.config


def require_own(tokenizer: Tokenizer | None, folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder. Raises `UserError` if it has none."""
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer: copy the model's vocab.txt or tokenizer.json there")
    return tokenizer


def check_rows(folder: Path, pieces: int, rows: int, is_run: bool = False) -> str:
    """Return a warning if a model has over `PADDED_ROWS` rows without a piece, or more than with one; else nothing.

    Some models on the hub have up to `PADDED_ROWS` spare rows. Raise `UserError` if the tokenizer has more pieces than
    the model has rows, or, in a run of ours, which has no spare rows, another number.
    """
    found = f"{folder}: its tokenizer has {pieces} pieces but its model embeds {rows}"
    if pieces > rows or (is_run and pieces != rows):
        raise UserError(f"{found}; put the vocabulary of the model's training into the folder")
    if rows - pieces <= min(PADDED_ROWS, pieces):
        return ""
    return f"warning: {found}: is it the tokenizer of the model's training? The other rows are not used"


def _refuse_other_tables(config: ModelConfig, weights: Weights, source: Path) -> None:
    """Raise `UserError` if the embeddings of words or segments do not match config.json."""
    words, segments = (weights.ours.get(name, ()) for name in (TOKEN_EMBEDDING, SEGMENT_EMBEDDING))
    if not len(words):
        raise UserError(f"{source}: no word embedding among its weights; give a folder with a whole encoder")
    if len(words) != config.vocab_size:
        raise UserError(
            f"{source}: config.json says {config.vocab_size} pieces and the weights embed {len(words)}: they do not "
            "match; copy or export the folder again"
        )
    if len(segments) != config.num_segments:
        raise UserError(
            f"{source}: config.json says type_vocab_size {config.num_segments}, and the weights embed {len(segments)} "
            "segments: they do not match; copy the folder again"
        )


ADVICE = "leave --generator out to draw a new one"
COMPARED = ("num_layers", "hidden_size", "num_attention_heads", "ffn_size", "seq_length", "layernorm_epsilon")
PROJECTION = "generator.embeddings.projection."


def generator_objective(objective: ObjectiveConfig, config: ModelConfig, generator: ModelConfig) -> ObjectiveConfig:
    """Return the discriminator's objective with a generator of the folder's sizes; `config` is the discriminator's.

    Raise `UserError` if the objective trains no generator, or none of these sizes beside this discriminator.
    """
    share = round(min(1.0, generator.num_attention_heads / config.num_attention_heads), 4)
    for candidate in (objective, replace(objective, generator_size=share)):
        expected = candidate.generator_config(config)
        if expected is None:
            raise UserError(
                "--generator needs a discriminator's folder as --from-hf, but that folder holds a masked LM: give the "
                "discriminator's folder, or leave --generator out",
                WRONG_ARGUMENTS,
            )
        wrong = [name for name in COMPARED if getattr(generator, name) != getattr(expected, name)]
        if not wrong:
            return candidate
    there, here = getattr(generator, wrong[0]), getattr(expected, wrong[0])
    raise UserError(f"--generator: its {wrong[0]} is {there}, but this discriminator needs {here}; {ADVICE}")


def join_generator(weights: Weights, other: Weights, wanted: Collection[str]) -> None:
    """Add a generator's weights to its discriminator's; `wanted` are the names of both together.

    Shared weights must be equal, except token embeddings if their difference is a weight. Raise `UserError` otherwise.
    """
    for name, tensor in other.ours.items():
        if f"generator.{name}" in wanted:
            weights.ours[f"generator.{name}"] = tensor
        elif name == TOKEN_EMBEDDING and EMBEDDING_DIFFERENCE in wanted and tensor.shape == weights.ours[name].shape:
            weights.ours.update({EMBEDDING_DIFFERENCE: weights.ours[name] - tensor, name: tensor})
        elif not torch.equal(tensor, weights.ours[name]):
            raise UserError(
                f"--generator: {name} differs from the discriminator's, but both must share embeddings; {ADVICE}"
            )
    if PROJECTION + "weight" in wanted and PROJECTION + "weight" not in weights.ours:  # both widths are equal
        width = len(weights.ours["generator.layers.0.attention.query.weight"])
        weights.ours[PROJECTION + "weight"] = torch.eye(width)
        weights.ours[PROJECTION + "bias"] = torch.zeros(width)


NO_TOKENIZER = (
    "none: the folder has no vocab.txt or tokenizer.json; give the model's own to megatron-ddrp pretrain (to write it: "
    "AutoTokenizer.from_pretrained(HF_DIR).save_pretrained(HF_DIR))"
)


def flags_of(tokenizer: Tokenizer, folder: Path) -> TokenizerFlags:
    """Return the flags that name the tokenizer which `Tokenizer.save` wrote into a folder."""
    kind = tokenizer.tokenizer_type
    return TokenizerFlags(kind).with_path(str(folder if kind == "HuggingFace" else folder / tokenizer.file_name))


@dataclass(frozen=True)
class Import(ReadFolder):
    """A folder that was read and written as a checkpoint."""

    output: Path
    origin: Origin
    generator: Path | None

    def summary(self) -> str:
        """Return a few lines about weights loaded, left out and initialised, and the commands to continue with."""
        model, tokenizer, loaded = self.config, self.tokenizer, self.weights.ours.values()
        groups = Counter(name.rpartition(".")[0] or name for name in self.weights.left_out)
        left_out = [f"{group} ({count})" for group, count in groups.items()]
        if self.embedded_pieces > model.vocab_size:
            left_out.append(f"{self.embedded_pieces - model.vocab_size} rows beyond the tokenizer's vocabulary")
        padding = f"; its padding must have the id {self.padding_id}" if self.padding_id is not None else ""
        flags = flags_of(tokenizer, self.output / checkpoint.TOKENIZER).words() if tokenizer else []
        preprocessing = ["megatron-ddrp", "preprocess", "--input", "FILE", "--output-prefix", "corpus", *flags]
        planning = ["megatron-ddrp", "plan", "--load", str(self.source), "--data-path", "corpus_text_document"]
        planning += ["--generator", str(self.generator)] if self.generator else []
        planning += flags if self.transfer else []
        lines = {
            "loaded": f"{self.source}: {model.position_encoding} positions, {model.num_layers} layers x "
            f"{model.hidden_size}, {sum(t.numel() for t in loaded):,} parameters in {len(loaded)} tensors",
            "left out": ", ".join(left_out) or "nothing",
            "initialised": "; ".join(self.weights.initialised) or "nothing",
            "tokenizer": f"{tokenizer.tokenizer_type}, {tokenizer.vocab_size:,} pieces"
            if tokenizer
            else NO_TOKENIZER + padding,
            **({"vocabulary": self.transfer.summary()} if self.transfer else {}),
            **({"sentences": f"{describe(self.origin.modules)}; exports have it again"} if self.origin.modules else {}),
            "wrote": f"{self.output}: weights without optimizer state",
            "flags": shlex.join([*objective_flags(self.objective), *model_flags(model)]),
            **({"next": shlex.join(preprocessing), "then": shlex.join(planning)} if flags else {}),
        }
        return "\n".join(f"{label + ':':<13}{line}" for label, line in lines.items())


def import_folder(
    source: Path,
    output: Path,
    overwrite: bool = False,
    generator: Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> Import:
    """Write the model of a Hugging Face folder as a checkpoint folder with one checkpoint, iteration 0.

    Hugging Face folders have no optimizer state, so the checkpoint holds weights only. For an ELECTRA discriminator
    `source`, `generator` is the folder of its generator; without it a new one is drawn. Both may be names on the hub.
    With a `tokenizer`, the model gets its vocabulary instead of its own.

    `output` is written whole or not at all. Raise `UserError` if the model's family is not in the registry, if a weight
    is missing or does not fit, or if `output` exists and may not be replaced.
    """
    refuse = partial(refuse_output, output, overwrite, is_untrained, "an untrained import")
    refuse()
    local = local_folder(source)
    read = read_folder(local, None if generator is None else local_folder(generator), tokenizer)
    modules, without = read_modules(local)
    read.weights.left_out.extend(without)
    name = source.resolve().name if local == source else str(source)
    origin = Origin(name, stated_license(local), read.weights.has_head, modules)
    with whole_folder(output, refuse) as folder:
        tensors = dict(read.model.named_parameters()) | checkpoint.persistent_buffers(read.model)
        weights = {name: tensor.detach() for name, tensor in tensors.items()}
        facts = {
            checkpoint.HEAD_SETTINGS: read.head_settings,
            checkpoint.NEW_HEAD: not origin.has_head,
            checkpoint.ORIGIN: asdict(origin),
        }
        write_untrained(weights, Config(model=read.config, objective=read.objective), folder, read.tokenizer, facts)
    return Import(**vars(read), output=output, origin=origin, generator=generator)


def write_untrained(
    weights: Mapping[str, Any], config: Config, folder: Path, tokenizer: Tokenizer | None, facts: Mapping[str, Any]
) -> None:
    """Write a whole folder for `--load` with one checkpoint, of weights only; `facts` are further keys of its state."""
    path = checkpoint.save_weights_only(weights, config, folder, facts)
    save_config(config, folder)
    if tokenizer:
        tokenizer.save(folder / checkpoint.TOKENIZER)
    checkpoint.mark_latest(folder, path.name)


def is_untrained(folder: Path) -> bool:
    """Return whether a folder holds an import, or a mean of models, and nothing from training."""
    try:
        found = checkpoint.all_checkpoints(folder)
        return bool(found) and all(checkpoint.read_state(path).get(checkpoint.WEIGHTS_ONLY) for path in found)
    except UserError:
        return False


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Pattern of a name on the hub: one or two parts, and not a path such as ./x, /x or a/b/c."""
SETTINGS = ("*.json", "*.txt", "*.model", CARD)
"""Files of settings and tokenizers, and the card. Code is never downloaded."""


def local_folder(given: Path) -> Path:
    """Return `given` if it is a folder, else a downloaded copy of the hub's model with that name.

    Prefers safetensors to a pickle. Raise `UserError` with the command that downloads the folder if the download fails.
    """
    if given.exists() or not HUB_NAME.fullmatch(str(given)):
        return given
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        folder = Path(snapshot_download(str(given), allow_patterns=[*SETTINGS, *_files(SAFE_WEIGHTS)]))
        if not any((folder / name).is_file() for name in (SAFE_WEIGHTS, SAFE_WEIGHTS + INDEX)):
            folder = Path(snapshot_download(str(given), allow_patterns=[*SETTINGS, *_files(PICKLED_WEIGHTS)]))
    except Exception as error:  # errors of the hub's library and of the network libraries below it
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise UserError(
            f"there is no folder {given}, and no model of that name can be downloaded from the hub ({reason}): run "
            f"`hf download {given} --local-dir DIR` on a machine with a network, then give DIR"
        ) from None
    return folder


def _files(name: str) -> tuple[str, str]:
    """Return the patterns of the file `name` and of its shards, as transformers names them."""
    return name, "-*.".join(name.rsplit(".", 1))
