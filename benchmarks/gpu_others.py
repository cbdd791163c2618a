"""Models of other libraries for the GPU report: transformers' BERT and DeBERTa, also with the kernels of others.

They train as `transformers.Trainer` trains under `--bf16`: fp32 weights, autocast, torch's fused AdamW.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from gpu_device import DTYPES, precision
from gpu_groups import Bench, Work
from gpu_training import SEED, Arm, open_loader
from measure import DEVICE
from torch import nn

DISENTANGLED: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
"""DeBERTa-v3's published settings."""

NEEDED = {
    "bert, flash_attention_2": "flash_attn",
    "flashdeberta": "flashdeberta",
    "disentangled-flash": "disentangled_flash",
}
"""Model → the Python package that it needs beside transformers."""

MODELS = {"absolute": ("bert, sdpa", "bert, flash_attention_2"), "deberta": ("deberta-v2", *list(NEEDED)[1:])}
"""Our encoding → the models that are like it."""


def build(name: str, bench: Bench, length: int) -> nn.Module:
    """Return a freshly initialised masked LM. Raises `ImportError` where its package is not installed."""
    package = NEEDED.get(name, "transformers")
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed")
    import transformers

    sizes = bench.sizes
    shape: dict[str, Any] = {
        "vocab_size": sizes.vocabulary,
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "intermediate_size": 4 * sizes.hidden,
        "max_position_embeddings": length,
    }
    torch.manual_seed(SEED)
    kind, _, attention = name.partition(", ")
    if kind == "bert":
        return transformers.BertForMaskedLM._from_config(
            transformers.BertConfig(**shape), attn_implementation=attention
        )
    config = transformers.DebertaV2Config(**shape, **DISENTANGLED)
    if kind == "flashdeberta":
        from flashdeberta import FlashDebertaV2ForMaskedLM

        return FlashDebertaV2ForMaskedLM(config)
    model = transformers.DebertaV2ForMaskedLM(config)
    if kind == "disentangled-flash":
        from disentangled_flash import optimize_deberta_training

        return optimize_deberta_training(model)
    return model


class Foreign:
    """Another library's model in training on the rows that ours train on."""

    def __init__(self, name: str, bench: Bench, length: int, tokens: int) -> None:
        _, loader = open_loader(Arm(name, length).config(bench, tokens))
        self.batches = [batch.map(torch.from_numpy).map(lambda x: x.to(DEVICE)) for batch in loader.step(0)]
        self.done: list[Work] = []
        self.model = build(name, bench, length).to(DEVICE).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=precision() == "fp16")

    def step(self) -> None:
        """Make one optimizer step over all micro-batches."""
        for batch in self.batches:
            mask = (batch.document_ids > 0).long()
            with torch.autocast(DEVICE.type, DTYPES[precision()]):
                loss = self.model(batch.input_ids, attention_mask=mask, labels=batch.labels).loss
            self.scaler.scale(loss / len(self.batches)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        shapes = [tuple(batch.input_ids.shape) for batch in self.batches]
        self.done.append(Work(sum(rows * length for rows, length in shapes), shapes))

    def mfu(self, work: Work, seconds: float) -> float | None:
        """Return None: the FLOP of other libraries' models are not counted here."""
        return None

    def close(self) -> None:
        """Let go of the model."""
        del self.model, self.optimizer, self.batches
