"""Exports for transformers with equal outputs: a training checkpoint, or an encoder with a fine-tuned head."""

from __future__ import annotations

import copy
import json
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ddrp import checkpoint
from megatron_ddrp.config import ENCODINGS, Config, ModelConfig, objective_class
from megatron_ddrp.conversion.families import FAMILIES, Family, leaving_family
from megatron_ddrp.conversion.families.contract import (
    BARE,
    CARD,
    OWN_MODEL_TYPE,
    Scores,
    check_export,
    refuse_output,
    whole_folder,
    write_sums,
)
from megatron_ddrp.conversion.heads_ddrp import Pooler, TaskHead
from megatron_ddrp.conversion.model_card import Described, Publishing, longest_row, write_card
from megatron_ddrp.conversion.model_code import HeadForm, Labels
from megatron_ddrp.conversion.origin import Origin, own_modules, write_modules
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_object
from megatron_ddrp.model import ENCODER_PARTS, Encoder


@dataclass(frozen=True)
class Export:
    """Source, contents and summary lines of an export."""

    source: Path
    output: Path
    config: ModelConfig
    """Configuration of the model, with `deberta_emd` resolved."""
    weights: dict[str, Tensor]
    head: str
    """Key of `HEADS`."""
    family: Family
    left_out: tuple[str, ...]
    """Prefixes of the names of weights that were left out."""
    tokenizer_line: str
    sentences_line: str
    check_line: str

    def summary(self) -> str:
        """Return a few lines about weights loaded, exported, left out and initialised, and about the other files."""
        model, family, loader = self.config, self.family, self.family.classes(self.head)[1]
        groups = Counter(_group(name) for name in self.weights)
        names = ", ".join(f"{group} ({count})" for group, count in groups.items())
        table = "" if model.position_encoding == "absolute" else f", {model.relative_table} table"
        decoder = "; the mask decoder is in the masked-LM model alone" if model.deberta_emd else ""
        padding = model.padded_vocab_size - model.vocab_size
        upload = shlex.join(["hf", "upload", "USER/NAME", str(self.output)])
        kind = "with its own modeling_ddrp.py" if family.has_code else f"a plain {family.class_name}"
        lines = {
            "loaded": f"{self.source}: {model.position_encoding} positions{table}, "
            f"{model.layernorm_position}-LayerNorm, {model.num_layers} layers x {model.hidden_size}, "
            f"{model.vocab_size:,} pieces",
            "exported": f"{_count(self.weights):,} parameters, fp32; tensors: {names}{decoder}",
            "left out": f"{padding} rows of vocabulary padding; optimizer state"
            + "".join(f"; the {name.rstrip('.')}" for name in self.left_out),
            "initialised": "nothing; a classification head is drawn anew when one is loaded",
            "tokenizer": self.tokenizer_line,
            "sentences": f"{self.sentences_line} (modules.json, for sentence-transformers and servers)",
            "checked": self.check_line,
            "wrote": f'{self.output}, {kind}: {loader}.from_pretrained("{self.output}"{family.trust})',
            "publish": f"complete {self.output / CARD}, then {upload}",
        }
        return "\n".join(f"{label + ':':<13}{line}" for label, line in lines.items())


def export_checkpoint(
    load: Path,
    output: Path,
    overwrite: bool = False,
    family_name: str | None = None,
    publishing: Publishing | None = None,
) -> Export:
    """Write the newest checkpoint of `load` (or the one it names) as the Hugging Face folder `output`.

    If transformers has an equal model, the export uses it (families/). Any other model is exported with its own model
    code (model_code.py), under the names of training. The vocabulary's padding is cut, a generator and the notes of
    rare words are left out, and the output matrix, which is the token embedding, is written once. A sentence encoder
    that came without a head leaves without one, under the names of a bare encoder.

    `family_name` is a key of `FAMILIES`; by default the model and its tokenizer decide. `publishing` goes into the
    model card. `output` is written whole or not at all. Raise `UserError` if there is no checkpoint, if its encoding
    cannot be exported, if the model does not belong to the family, or if `output` exists and may not be replaced.
    """
    refuse = partial(refuse_output, output, overwrite, is_hugging_face, "a Hugging Face folder")
    refuse()
    source = checkpoint.choose_checkpoint(load)
    state = checkpoint.read_state(source)
    run = Config.from_dict(state["config"])  # as given: the card repeats its command
    encoding = run.model.position_encoding
    if encoding not in ENCODINGS:
        raise UserError(
            f"{source} has {encoding!r} positions, which are unknown: expected one of {', '.join(ENCODINGS)}, or a "
            "name from --plugin FILE.py"
        )
    model, tokenizer, whole = checkpoint.read_model(source)
    objective = objective_class(whole.objective.objective)
    origin = Origin(**state.get(checkpoint.ORIGIN, {}))
    head = BARE if origin.is_bare else objective.exported
    model.merge_embeddings()
    config = replace(whole.model, deberta_emd=model.mask_decoder is not None and head != BARE)
    family = leaving_family(config, head, tokenizer, family_name)
    tensors = dict(model.named_parameters()) | checkpoint.persistent_buffers(model)
    left_out = tuple(start for start in objective.left_out if any(name.startswith(start) for name in tensors))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    if head == BARE:
        kept = {name: tensor for name, tensor in kept.items() if name.startswith(ENCODER_PARTS)}
        left_out += ("head, which the folder of its origin lacks too",)
    weights = family.to_folder(rename_tensors(kept, family, head, config.vocab_size), config, tokenizer)
    if head == BARE:
        weights = {name.removeprefix(family.prefix): tensor for name, tensor in weights.items()}
    with whole_folder(output, refuse) as folder:
        checkpoint.save_weights(weights, folder)
        of_heads = state.get(checkpoint.HEAD_SETTINGS, {})
        settings = {
            **family.folder_settings(config, head, tokenizer),
            **{key: of_heads[key] for key in family.head_keys if key in of_heads},
        }
        if family.has_code:
            settings["objective"] = asdict(whole.objective)
            # under ELECTRA the mask decoder is the generator's, which stays here
            settings["deberta_emd"] = whole.model.decodes_masks and head != BARE
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        family.write_code(folder, config)
        tokenizer_line = write_tokenizer(tokenizer, folder, config.seq_length, config.num_segments)
        longest = config.seq_length if origin.name else longest_row(run, state)
        sentences_line = write_modules(origin.modules or own_modules(config.hidden_size, longest), folder)
        check_line = check_export(folder, settings["architectures"][0], model, tokenizer, _scores(model))
        name, count = output.resolve().name, _count(weights)
        described = Described(name, source, run, tokenizer, family, head, count, origin, sentences_line)
        write_card(folder, described, publishing or Publishing())
        write_sums(folder)
    told = (left_out, tokenizer_line, sentences_line, check_line)
    return Export(source, output, config, weights, head, family, *told)


def _count(weights: Mapping[str, Tensor]) -> int:
    """Return the number of parameters."""
    return sum(tensor.numel() for tensor in weights.values())


def rename_tensors(tensors: Mapping[str, Tensor], family: Family, head: str, vocab_size: int) -> dict[str, Tensor]:
    """Return our tensors under a family's names, without the vocabulary's padding; `head` is a key of `HEADS`."""
    padded = ("embeddings.token.weight", "head.decoder.bias")
    return {
        family.their_name(name, head): tensor.detach()[:vocab_size] if name in padded else tensor.detach()
        for name, tensor in tensors.items()
    }


def _scores(model: Encoder) -> Scores:
    """Return the function of the model's head; with a mask decoder, which needs more inputs, it returns no scores."""
    head: Any = model.head

    def scores(hidden: Tensor) -> dict[str, Tensor]:
        if model.mask_decoder is not None:
            return {}
        logits = head.logits(hidden)  # [batch, seq, padded vocab], or [batch, seq] of a discriminator
        return {"logits": logits if logits.dim() == 2 else logits[..., : model.config.vocab_size]}

    return scores


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder has a config.json of a model of transformers."""
    try:
        return "model_type" in read_object(folder / "config.json")
    except UserError:
        return False


def _group(name: str) -> str:
    """Return the part of the model that a weight of the folder belongs to, for the summary."""
    if name.startswith(("head.output", "discriminator_predictions.", "mask_predictions.")):
        return "replaced-token head"
    if name.startswith(("head.", "cls.", "lm_head.", "lm_predictions.", "decoder.", "generator_")):
        return "head"
    if "embeddings." in name:
        return "embeddings"
    if name.startswith("mask_decoder."):
        return "mask decoder"
    return "final LayerNorm" if "final_norm" in name else "layers"


class TunedHead(NamedTuple):
    """A trained head, and what config.json says about it."""

    head: TaskHead
    form: HeadForm
    labels: Labels

    def scores(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return the scores of last hidden states `[batch, seq, hidden]`, under transformers' names.

        `logits` are `[batch, labels]`, or `[batch, seq, labels]` for tokens; answers have `start_logits` and
        `end_logits`, `[batch, seq]`.
        """
        outputs = self.head(hidden)
        if self.labels.names:
            return {"logits": outputs}
        return dict(zip(("start_logits", "end_logits"), outputs.unbind(-1), strict=True))

    def settings(self, family: Family) -> dict[str, Any]:
        """Return the keys of config.json that describe the head in a family."""
        names, dropout = self.labels.names, self.head.dropout.p
        settings: dict[str, Any] = {"classifier_dropout": dropout}
        if "cls_dropout" in family.head_keys:  # the DeBERTas
            settings = {"cls_dropout": dropout, "pooler_hidden_act": "tanh"}
        if names:
            settings["id2label"] = {str(i): name for i, name in enumerate(names)}
            settings["label2id"] = {name: i for i, name in enumerate(names)}
        if self.labels.problem_type is not None:
            settings["problem_type"] = self.labels.problem_type
        return settings


def write_finetuned(
    model: Encoder, tokenizer: Tokenizer, tuned: TunedHead, output: Path, more_settings: Mapping[str, Any] | None = None
) -> str:
    """Write a fine-tuned model with its head and tokenizer as a Hugging Face folder; return the line that loads it.

    `model` comes from `checkpoint.read_model`, with fine-tuned weights, on any device and in any precision. It stays
    unchanged; the folder is fp32. `more_settings` are further keys of config.json.

    The encoder is exported as its masked LM's family if that family's classes in transformers compute our heads, as
    those of BERT, RoBERTa's relatives and DeBERTa do. ELECTRA pools with a GELU, and ModernBERT adds a dense layer and
    a norm before every classifier, so these are exported as our own family, with our model code.

    `output` is written whole or not at all, and replaces a folder of that name. Before that, transformers loads it and
    its hidden states and scores are compared with the model's. Raise `UserError` if they differ, if a weight is not
    finite, or if the folder cannot be written.
    """
    model = copy.deepcopy(model).cpu().float().eval()
    model.merge_embeddings()
    tuned = tuned._replace(head=copy.deepcopy(tuned.head).cpu().float().eval())
    model_config = replace(model.config, deberta_emd=False)  # the mask decoder belongs to the masked-LM head
    family = leaving_family(model_config, "masked-lm", tokenizer)
    if family.task_head is None:  # its classes compute other heads
        family = FAMILIES[OWN_MODEL_TYPE]
    class_name = f"{family.class_name}For{tuned.form.name}"
    weights = _weights(model, family, tuned.head, tokenizer)
    if strange := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise UserError(f"{output} is not written: {strange[0]} is not finite because training diverged; lower --lr")
    with whole_folder(output) as folder:
        checkpoint.save_weights(weights, folder)
        settings = {
            **family.folder_settings(model_config, "masked-lm", tokenizer),
            "architectures": [class_name],
            **tuned.settings(family),
            **(more_settings or {}),
        }
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        family.write_code(folder, model_config)
        write_tokenizer(tokenizer, folder, model_config.seq_length, model_config.num_segments)
        check_export(folder, class_name, model, tokenizer, tuned.scores)
        write_sums(folder)
    return f'AutoModelFor{tuned.form.name}.from_pretrained("{output}"{family.trust})'


def _weights(model: Encoder, family: Family, head: TaskHead, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Return the encoder's and the head's tensors under the family's names."""
    tensors = dict(model.named_parameters()) | checkpoint.persistent_buffers(model)
    encoder = {name: tensor for name, tensor in tensors.items() if name.startswith(ENCODER_PARTS)}
    weights = rename_tensors(encoder, family, "masked-lm", model.config.vocab_size)
    theirs = family.task_head if family.task_head and isinstance(head.pooler, Pooler) else {}
    for name, tensor in head.state_dict().items():
        module, _, kind = name.rpartition(".")
        weights[f"{theirs.get(module, module)}.{kind}"] = tensor
    return family.to_folder(weights, model.config, tokenizer)
