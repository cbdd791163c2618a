"""Export of a fine-tuned model as a Hugging Face folder that `AutoModelFor…` loads, with equal scores.

The encoder is exported as its masked LM's family if that family's classes in transformers compute our heads, as those
of BERT, RoBERTa's relatives and DeBERTa do. ELECTRA pools with a GELU, and ModernBERT adds a dense layer and a norm
before every classifier, so these are exported as our own family, with our model code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ddrp import checkpoint
from megatron_ddrp.conversion.exported_folder import check_export, whole_folder, write_sums
from megatron_ddrp.conversion.families import FAMILIES, Family, leaving_family
from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE
from megatron_ddrp.conversion.heads_ddrp import Pooler, TaskHead
from megatron_ddrp.conversion.task_heads import HeadForm, Labels
from megatron_ddrp.conversion.to_huggingface import rename_tensors
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder

ENCODER_PARTS = ("embeddings.", "layers.", "head.final_norm.")
"""Prefixes of the names of our weights that affect hidden states."""


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
    """Write a fine-tuned model with its head and tokenizer as the folder `output`; return the line that loads it.

    `model` comes from `checkpoint.read_model`, with fine-tuned weights, on any device and in any precision. It stays
    unchanged; the folder is fp32. `more_settings` are further keys of config.json.

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
    trust = ", trust_remote_code=True" if family.has_code else ""
    return f'AutoModelFor{tuned.form.name}.from_pretrained("{output}"{trust})'


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
