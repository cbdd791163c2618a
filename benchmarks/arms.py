"""What `step.py` times: whole training steps, ours and transformers', and the work in which encodings differ.

4 layers × 768, 12 heads, vocabulary 30,522, rows of random tokens.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np
import torch

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, encoding_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model import build_model
from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.backends import backend_function, resolve_backend
from megatron_ddrp.model.bert import first_tensors
from megatron_ddrp.model.heads import DecodingStage
from megatron_ddrp.model.similarity import token_cosine
from megatron_ddrp.model.stages import Draws
from megatron_ddrp.objectives.draws import draw
from megatron_ddrp.run.host_memory import keep_freed_memory

SEED, VOCABULARY, LAYERS, HIDDEN, HEADS = 1234, 30522, 4, 768, 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Step = Callable[[], None]


def make_rows(lengths: np.ndarray, seq: int) -> Batch:
    """Rows of random tokens of these lengths, padded to `seq`, 15 % of the tokens predicted."""
    rng = np.random.default_rng(SEED)
    place = np.arange(seq)
    valid = place < lengths[:, None]  # [rows, seq]
    ids = rng.integers(1000, VOCABULARY, valid.shape) * valid
    labels = np.where(valid & (rng.random(valid.shape) < 0.15), ids, IGNORED_LABEL)
    number = np.arange(len(lengths))[:, None]
    return Batch(ids, labels, valid.astype(np.int64), place * valid, np.zeros_like(ids), number * valid)


def on_device(arrays: Batch) -> Batch:
    return arrays.map(lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE))


def our_step(encoding: str, objective: str, arrays: Batch, dropout: float, emd: bool = False) -> Step:
    """One training step of our model."""
    torch.manual_seed(SEED)
    config = ModelConfig(
        num_layers=LAYERS,
        seq_length=arrays.input_ids.shape[1],
        position_encoding=encoding,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        deberta_emd=emd,
    )
    settings = ObjectiveConfig(objective=objective)
    model = build_model(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = on_device(arrays)
    sequences = len(np.unique(arrays.sequence_ids[arrays.document_ids > 0]))
    counts = torch.tensor([int((arrays.labels != IGNORED_LABEL).sum()), sequences, sequences], device=DEVICE)
    weights = torch.tensor(settings.weights, device=DEVICE) / counts
    numbers = iter(range(10**9))

    def run() -> None:
        drawn = draw(
            arrays.document_ids, arrays.sequence_ids, arrays.position_ids, settings, config, SEED, next(numbers)
        )
        draws = Draws(drawn.token_mask.to(DEVICE), drawn.heads.to(DEVICE))
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = (model(batch, draws).sums * weights).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def transformers_step(kind: str, arrays: Batch, dropout: float) -> Step:
    """One training step of BertForMaskedLM or DebertaForMaskedLM."""
    from transformers import BertConfig, BertForMaskedLM, DebertaConfig, DebertaForMaskedLM

    torch.manual_seed(SEED)
    common = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * HIDDEN,
        "max_position_embeddings": arrays.input_ids.shape[1],
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    if kind == "bert":
        model = BertForMaskedLM(BertConfig(**common))
    else:
        disentangled = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 64}
        model = DebertaForMaskedLM(DebertaConfig(**common, **disentangled, position_biased_input=False))
    model = model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch = on_device(arrays)

    def run() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = model(batch.input_ids, attention_mask=(batch.document_ids > 0).long(), labels=batch.labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def step_apart(keeps_memory: bool, make: Callable[..., Step], *arguments: object) -> Step:
    """The step that `make(*arguments)` gives, in a process of its own, which keeps freed memory or not."""
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


def added_parts(encoding: str, arrays: Batch, dropout: float) -> dict[str, Step]:
    """Forward and backward of one layer's attention without and with HCD, and of the encoding once a pass."""
    config = ModelConfig(position_encoding=encoding, seq_length=arrays.input_ids.shape[1], attention_dropout=dropout)
    module = encoding_class(encoding)(config).to(DEVICE)
    layer_part = module.layer_part(config).to(DEVICE)
    name, _ = resolve_backend("auto", DEVICE, module.in_logits, dropout)
    document_ids = torch.from_numpy(arrays.document_ids).to(DEVICE)
    position_ids = torch.from_numpy(arrays.position_ids).to(DEVICE)
    shape = (*document_ids.shape, HEADS, HIDDEN // HEADS)
    query, key, value, gradient = (torch.randn(shape, device=DEVICE).transpose(1, 2) for _ in range(4))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    tensors = tuple(x.detach().requires_grad_() for x in module(position_ids))

    def attention(heads: list[int]) -> Step:
        chosen = torch.tensor(heads, dtype=torch.long, device=DEVICE)

        def run() -> None:
            terms = module.terms(config, layer_part(tensors))
            context, cosine = backend_function(name)(Attending(*inputs, terms, document_ids, chosen, dropout))
            loss = (context * gradient).sum()
            (loss if cosine is None else loss + 0.01 * cosine.mean()).backward()
            for tensor in (*inputs, *tensors):
                tensor.grad = None

        return run

    def once() -> None:
        outputs = [x for x in module(position_ids) if x.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    parts = {f"{encoding}": attention([]), f"{encoding} hcd": attention([3, 8])}
    return parts | ({f"{encoding} once": once} if module.in_logits else {})


def sampled_tcd(arrays: Batch) -> Step:
    """Forward and backward of TCD over 50 tokens a sequence, from the last hidden states."""
    document_ids = torch.from_numpy(arrays.document_ids).to(DEVICE)
    hidden = torch.randn(*document_ids.shape, HIDDEN, device=DEVICE, requires_grad=True)
    settings, config = ObjectiveConfig(objective="mth"), ModelConfig()
    numbers = iter(range(10**9))

    def run() -> None:
        drawn = draw(
            arrays.document_ids, arrays.sequence_ids, arrays.position_ids, settings, config, SEED, next(numbers)
        )
        token_cosine(hidden, drawn.token_mask.to(DEVICE)).sum().backward()
        hidden.grad = None

    return run


def mask_decoder(arrays: Batch, dropout: float) -> Step:
    """Forward and backward of DeBERTa's enhanced mask decoder: what it adds between the last layer and the head."""
    dropouts = {"hidden_dropout": dropout, "attention_dropout": dropout}
    seq = arrays.input_ids.shape[1]
    model = build_model(ModelConfig(num_layers=LAYERS, seq_length=seq, position_encoding="deberta", **dropouts))
    *first, decoding = model.to(DEVICE).stages()
    assert isinstance(decoding, DecodingStage)
    batch = on_device(arrays)
    tensors = first_tensors(batch, Draws.none(len(batch.input_ids), LAYERS, DEVICE))
    with torch.no_grad():
        for stage in first:
            tensors = stage(tensors)
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in tensors)

    def run() -> None:
        decoding.decoder(inputs, decoding.last_layer).sum().backward()
        for tensor in (*inputs, *model.parameters()):
            tensor.grad = None

    return run
