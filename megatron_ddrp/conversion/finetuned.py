"""Export of a fine-tuned model as a Hugging Face folder that `AutoModelFor…` loads, with equal scores.

The encoder is exported as its masked LM's family if that family's classes in transformers compute our heads, as those
of BERT, RoBERTa's relatives and DeBERTa do. ELECTRA pools with a GELU, and ModernBERT adds a dense layer and a norm
before every classifier, so these are exported as our own family, with our model code.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp import checkpoint
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.export_check import check_export
from megatron_ddrp.conversion.export_sums import write_sums
from megatron_ddrp.conversion.families import FAMILIES, FINE_TUNED, Family, leaving_family
from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE
from megatron_ddrp.conversion.output_folder import whole_folder
from megatron_ddrp.conversion.to_huggingface import renamed
from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder

DEBERTAS = ("deberta", "deberta-v2")
ROBERTA_NAMES = {"pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
SEQUENCE_NAMES: dict[str, dict[str, str]] = {
    "bert": {"pooler.dense": "bert.pooler.dense"},
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ROBERTA_NAMES),
    **dict.fromkeys((*DEBERTAS, OWN_MODEL_TYPE), {}),
}
"""`model_type` of each family whose heads compute ours → names of a sequence head's pooler and classifier that differ
from ours. All these families use our names for the heads of tokens and answers."""

ENCODER_PARTS = ("embeddings.", "layers.", "head.final_norm.")
"""Prefixes of the names of our weights that affect hidden states."""


@dataclass(frozen=True)
class TaskHead:
    """A head trained by fine-tuning, and its settings in config.json."""

    kind: str
    """Key of `FINE_TUNED`: "sequence", "tokens" or "qa"."""
    weights: Mapping[str, Tensor]
    """Name → tensor. A sequence head has `pooler.dense.weight` `[hidden, hidden]` and `classifier.weight` `[labels,
    hidden]`, a token head the latter only, an answer head `qa_outputs.weight` `[2, hidden]`; each weight has a
    `.bias`."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the classifier's order; empty for a regression and for answers."""
    problem_type: str | None = None
    """Loss of a sequence head in transformers: single_label_classification, multi_label_classification, regression."""
    dropout: float = 0.1
    """Dropout before the classifier, for further training of the folder."""

    def scores(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return the scores of last hidden states `[batch, seq, hidden]`, under transformers' names.

        `logits` are `[batch, labels]`, or `[batch, seq, labels]` for tokens; answers have `start_logits` and
        `end_logits`, `[batch, seq]`.
        """
        if self.kind == "qa":
            start, end = self._linear("qa_outputs", hidden).unbind(-1)
            return {"start_logits": start, "end_logits": end}
        if self.kind == "sequence":
            hidden = torch.tanh(self._linear("pooler.dense", hidden[:, 0]))  # [batch, hidden]
        return {"logits": self._linear("classifier", hidden)}

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def settings(self, family: Family) -> dict[str, Any]:
        """Return the keys of config.json that describe the head in a family."""
        settings: dict[str, Any] = {"classifier_dropout": self.dropout}
        if family.model_type in DEBERTAS:
            settings = {"cls_dropout": self.dropout, "pooler_hidden_act": "tanh"}
        if self.kind != "qa":
            names = self.labels or [f"LABEL_{i}" for i in range(len(self.weights["classifier.bias"]))]
            settings["id2label"] = {str(i): name for i, name in enumerate(names)}
            settings["label2id"] = {name: i for i, name in enumerate(names)}
        if self.problem_type is not None:
            settings["problem_type"] = self.problem_type
        return settings


def write_finetuned(
    model: Encoder, tokenizer: Tokenizer, head: TaskHead, output: Path, more_settings: Mapping[str, Any] | None = None
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
    head = replace(head, weights={name: tensor.detach().cpu().float() for name, tensor in head.weights.items()})
    model_config = replace(model.config, deberta_emd=False)  # the mask decoder belongs to the masked-LM head
    family = _family(model_config, tokenizer)
    class_end = FINE_TUNED[head.kind]
    class_name = f"{family.class_name}For{class_end}"
    weights = _weights(model, family, head, tokenizer)
    if strange := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
        raise UserError(f"{output} is not written: {strange[0]} is not finite because training diverged; lower --lr")
    with whole_folder(output) as folder:
        checkpoint.save_weights(weights, folder)
        settings = {
            **family.folder_settings(model_config, "masked-lm", tokenizer),
            "architectures": [class_name],
            **head.settings(family),
            **(more_settings or {}),
        }
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        family.write_code(folder, model_config)
        write_tokenizer(tokenizer, folder, model_config.seq_length, model_config.num_segments)
        check_export(folder, class_name, model, tokenizer, head.scores)
        write_sums(folder)
    trust = ", trust_remote_code=True" if family.has_code else ""
    return f'AutoModelFor{class_end}.from_pretrained("{output}"{trust})'


def _family(config: ModelConfig, tokenizer: Tokenizer) -> Family:
    """Return the family of the export: the masked LM's family if it computes our heads, else our own."""
    family = leaving_family(config, "masked-lm", tokenizer)
    return family if family.model_type in SEQUENCE_NAMES else FAMILIES[OWN_MODEL_TYPE]


def _weights(model: Encoder, family: Family, head: TaskHead, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Return the encoder's and the head's tensors under the family's names."""
    tensors = dict(model.named_parameters()) | checkpoint.persistent_buffers(model)
    encoder = {name: tensor for name, tensor in tensors.items() if name.startswith(ENCODER_PARTS)}
    weights = renamed(encoder, family, "masked-lm", model.config.vocab_size)
    theirs = SEQUENCE_NAMES[family.model_type] if head.kind == "sequence" else {}
    for name, tensor in head.weights.items():
        module, _, kind = name.rpartition(".")
        weights[f"{theirs.get(module, module)}.{kind}"] = tensor.contiguous()
    return family.to_folder(weights, model.config, tokenizer)
