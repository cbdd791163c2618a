"""Steps for the benchmarks to time: whole ones, ours and transformers', and the work in which encodings differ.

4 layers × 768, 12 heads, vocabulary 30,522, rows of random tokens.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from measure import DEVICE
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, encoding_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model import build_model
from megatron_ddrp.model.attention.backends import backend_function, resolve_backend
from megatron_ddrp.model.attention.logits import Attending, Demand
from megatron_ddrp.model.bert import run_stages
from megatron_ddrp.model.embeddings import token_cosine
from megatron_ddrp.model.heads import DecodingStage
from megatron_ddrp.model.stages import Draws, Inputs, layout_of
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.run.loop import keep_freed_memory

SEED, VOCABULARY, LAYERS, HIDDEN, HEADS = 1234, 30522, 4, 768, 12
Step = Callable[[], None]

_BOTH: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
_V3 = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0}
DISENTANGLED = {"deberta": _BOTH | {"max_relative_positions": 64}, "deberta-v2": _BOTH | _V3}
"""Settings of transformers' DeBERTa by kind; those of version 2 are DeBERTa-v3's published ones."""


def model_config(encoding: str, seq: int, dropout: float, emd: bool = False) -> ModelConfig:
    """Return the shape of our model in every benchmark."""
    return ModelConfig(
        num_layers=LAYERS,
        seq_length=seq,
        position_encoding=encoding,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        deberta_emd=emd,
    )


def make_rows(lengths: np.ndarray, seq: int) -> Batch:
    """Return rows of random tokens of these lengths, padded to `seq`, 15 % of the tokens predicted (numpy)."""
    rng = np.random.default_rng(SEED)
    place = np.arange(seq)
    valid = place < lengths[:, None]  # [rows, seq]
    ids = rng.integers(1000, VOCABULARY, valid.shape) * valid
    labels = np.where(valid & (rng.random(valid.shape) < 0.15), ids, IGNORED_LABEL)
    number = np.arange(len(lengths))[:, None]
    return Batch(ids, labels, valid.astype(np.int64), place * valid, np.zeros_like(ids), number * valid)


def full_rows(rows: int, seq: int) -> Batch:
    """Return rows of random tokens without padding (numpy)."""
    return make_rows(np.full(rows, seq), seq)


def on_device(arrays: Batch) -> Batch:
    """Return a batch of numpy arrays as tensors on the device."""
    return arrays.map(lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE))


def training_step(model: nn.Module, *losses: Callable[[], Tensor]) -> Step:
    """Return a step: forward and backward of the mean of the losses, one after the other, and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run() -> None:
        for loss in losses:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
                value = loss() / len(losses)
            value.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def new_draws(arrays: Batch, settings: ObjectiveConfig, config: ModelConfig) -> Callable[[], Draws]:
    """Return a function that draws TCD's tokens and HCD's heads anew for each step."""
    steps = iter(range(10**9))
    objective = make_objective(settings)

    def next_draws() -> Draws:
        drawn = objective.draw(arrays, config, SEED, next(steps))
        return Draws(drawn.token_mask.to(DEVICE), drawn.heads.to(DEVICE))

    return next_draws


def our_step(config: ModelConfig, settings: ObjectiveConfig, arrays: Batch, dtype: torch.dtype = torch.float32) -> Step:
    """Return one training step of our model with weights of this type."""
    torch.manual_seed(SEED)
    model, objective = build_model(config, objective=settings).to(DEVICE, dtype), make_objective(settings)
    batch, draws = on_device(arrays), new_draws(arrays, settings, config)
    shares = {term.name: term.weight / objective.counts[term.per](arrays) for term in objective.terms}
    weights = torch.tensor([shares.get(name, 0.0) for name in objective.sum_names], device=DEVICE)
    return training_step(model, lambda: (model(batch, draws()).sums * weights).sum())


def transformers_model(kind: str, length: int, **settings: Any) -> Any:
    """Return a masked LM of transformers in training on rows of `length` tokens: "bert", "deberta" or "deberta-v2"."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(SEED)
    shape = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    shape |= {"vocab_size": VOCABULARY, "max_position_embeddings": length} | settings
    shape["intermediate_size"] = 4 * shape["hidden_size"]
    config = AutoConfig.for_model(kind, **shape, **DISENTANGLED.get(kind, {}))
    return AutoModelForMaskedLM.from_config(config).to(DEVICE).train()


def transformers_loss(model: Any, batch: Batch) -> Tensor:
    """Return the loss of a model of transformers on a batch of tensors."""
    mask = (batch.document_ids > 0).long()
    return model(batch.input_ids, attention_mask=mask, labels=batch.labels).loss


def transformers_step(kind: str, arrays: Batch, dropout: float) -> Step:
    """Return one training step of a masked LM of transformers."""
    probabilities = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model, batch = transformers_model(kind, arrays.input_ids.shape[1], **probabilities), on_device(arrays)
    return training_step(model, lambda: transformers_loss(model, batch))


def step_apart(keeps_memory: bool, make: Callable[..., Step], *arguments: object) -> Step:
    """Return the step that `make(*arguments)` returns, run in a process of its own that keeps freed memory or not."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=_serve, args=(there, keeps_memory, make, arguments), daemon=True).start()

    def run() -> None:
        here.send(None)
        here.recv()

    return run


def _serve(asked: Connection, keeps_memory: bool, make: Callable[..., Step], arguments: tuple[object, ...]) -> None:
    if keeps_memory:
        keep_freed_memory()
    run = make(*arguments)
    with suppress(EOFError):  # nobody asks any more
        while True:
            asked.recv()
            run()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            asked.send(None)


def added_parts(config: ModelConfig, arrays: Batch) -> dict[str, Step]:
    """Return forward and backward of one layer's attention, without and with HCD, and of the encoding once per pass.

    Their names are `ENCODING`, `ENCODING hcd` and, where the encoding acts in the logits, `ENCODING once`.
    """
    encoding, dropout = config.position_encoding, config.attention_dropout
    module = encoding_class(encoding)(config).to(DEVICE)
    layer_part = module.layer_part(config).to(DEVICE)
    batch, layout = on_device(arrays), layout_of(arrays)
    demand = Demand(DEVICE, torch.get_default_dtype(), dropout, HIDDEN // HEADS)
    name, _ = resolve_backend("auto", demand, module.in_logits, layout.full)
    shape = (*batch.document_ids.shape, HEADS, HIDDEN // HEADS)
    query, key, value, gradient = (torch.randn(shape, device=DEVICE).transpose(1, 2) for _ in range(4))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    counted = torch.ones(len(query), int(arrays.document_ids.max()), device=DEVICE)
    tensors = tuple(x.detach().requires_grad_(x.requires_grad) for x in module(batch.position_ids))
    maps = [nn.Linear(HIDDEN, HIDDEN, device=DEVICE) for _ in range(2)]
    parameters = [p for part in (layer_part, *maps) for p in part.parameters()]

    def attention(heads: list[int]) -> Step:
        chosen = torch.tensor(heads, dtype=torch.long, device=DEVICE)

        def run() -> None:
            terms = module.terms(config, layer_part.of_layer(tensors, *maps))
            asking, asked = (layer_part.rotate(x, batch.position_ids) for x in (query, key))
            attending = Attending(asking, asked, value, terms, batch.document_ids, chosen, dropout, counted, layout)
            context, cosine = backend_function(name)(attending)
            loss = (context * gradient).sum()
            (loss if cosine is None else loss + 0.01 * cosine / counted.numel()).backward()
            for tensor in (*inputs, *tensors, *parameters):
                tensor.grad = None

        return run

    def once() -> None:
        if outputs := [x for x in module(batch.position_ids) if x.requires_grad]:
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    parts = {encoding: attention([]), f"{encoding} hcd": attention([3, 8])}
    return parts | ({f"{encoding} once": once} if module.in_logits else {})


def tcd(settings: ObjectiveConfig, arrays: Batch) -> Step:
    """Return forward and backward of TCD from the last hidden states."""
    draws = new_draws(arrays, settings, ModelConfig())
    hidden = torch.randn(*arrays.document_ids.shape, HIDDEN, device=DEVICE, requires_grad=True)

    def run() -> None:
        token_cosine(hidden, draws().token_mask).sum().backward()
        hidden.grad = None

    return run


def mask_decoder(config: ModelConfig, arrays: Batch) -> Step:
    """Return forward and backward of DeBERTa's enhanced mask decoder, between the last layer and the head."""
    model = build_model(config).to(DEVICE)
    *first, decoding = model.stages()
    assert isinstance(decoding, DecodingStage)
    batch = on_device(arrays)
    with torch.no_grad():
        state = run_stages(first, Inputs.of(batch, Draws.none(len(batch.input_ids), LAYERS, DEVICE)))
    hidden = state.hidden.requires_grad_()
    position = tuple(x.requires_grad_(x.is_floating_point()) for x in state.position)

    def run() -> None:
        decoding.decoder(state, decoding.last_layer).sum().backward()
        for tensor in (hidden, *position, *model.parameters()):
            tensor.grad = None

    return run
