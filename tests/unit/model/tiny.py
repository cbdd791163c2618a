"""Tiny models and batches, and a whole model put together from the loop twins of tests/reference.

`twin_sums` reads the parameters of a `Bert` but calls none of its code: every number comes out of a loop.
"""

import torch

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.data.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model import build_model
from megatron_ddrp.objectives.mth import Draws
from tests.reference import attention, losses, mth, positions

TINY = {
    "num_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "ffn_hidden_size": 10,
    "seq_length": 7,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.4,
    "relative_distance": 4,
    "vocab_size": 11,
}


def tiny_config(**changes):
    """2 layers of 3 heads 4 wide; initialised so widely that every term of the logits matters."""
    return ModelConfig(**(TINY | changes))


def tiny_model(seed=0, **changes):
    """A float64 model whose biases and LayerNorms are random too, so that no term hides behind a zero or a one."""
    torch.manual_seed(seed)
    model = build_model(tiny_config(**changes)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def tiny_batch(lengths=(7, 4, 2), seq=7, vocab=11, seed=0, predicted=2):
    """One document a row; the last `predicted` tokens of each row are to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), seq)
    place = torch.arange(seq).expand(shape)
    document_ids = (place < torch.tensor(lengths)[:, None]).long()
    input_ids = torch.randint(1, vocab, shape, generator=generator) * document_ids
    wanted = (place >= torch.tensor(lengths)[:, None] - predicted) & (document_ids > 0)
    labels = torch.randint(1, vocab, shape, generator=generator).where(wanted, torch.tensor(IGNORED_LABEL))
    segment_ids = (place % 2) * document_ids
    sequence_ids = torch.arange(len(lengths))[:, None].expand(shape) * document_ids
    return Batch(input_ids, labels, document_ids, place * document_ids, segment_ids, sequence_ids)


def layer_parameters(layer):
    """The parameters of an `EncoderLayer` under the twin's names."""
    modules = {
        "query": layer.attention.query,
        "key": layer.attention.key,
        "value": layer.attention.value,
        "attention_output": layer.attention.output,
        "attention_norm": layer.attention_norm,
        "ffn_in": layer.feed_forward.input,
        "ffn_out": layer.feed_forward.output,
        "ffn_norm": layer.feed_forward_norm,
    }
    return {f"{name}.{part}": getattr(module, part) for name, module in modules.items() for part in ("weight", "bias")}


def twin_encode(model, batch, row):
    """Last hidden states `[S, D]` and the L logits `[heads, S, S]` of one row of a batch."""
    config, embeddings = model.config, model.embeddings
    place, document_ids = batch.position_ids[row].tolist(), batch.document_ids[row].tolist()
    rows = []
    tokens, segments = batch.input_ids[row].tolist(), batch.segment_ids[row].tolist()
    for token, segment, position in zip(tokens, segments, place, strict=True):
        vector = embeddings.token.weight[token] + embeddings.segment.weight[segment]
        rows.append(vector if embeddings.absolute is None else vector + embeddings.absolute.weight[position])
    hidden = attention.layer_norm(torch.stack(rows), embeddings.norm.weight, embeddings.norm.bias, 1e-12)
    logits = []
    for layer in model.layers:
        table = embeddings.position if layer.position is None else layer.position

        def scores(query, key, table=table):
            if config.position_encoding == "absolute":
                logits.append(positions.absolute_scores(query, key))
            else:
                logits.append(positions.ddrp_scores(query, key, table.direction, table.distance, place))
            return logits[-1]

        order = config.layernorm_position
        hidden = attention.bert_layer(
            hidden, layer_parameters(layer), scores, document_ids, config.num_attention_heads, 1e-12, order
        )
    if config.layernorm_position == "pre":
        norm = model.head.final_norm
        hidden = attention.layer_norm(hidden, norm.weight, norm.bias, 1e-12)
    return hidden, logits


def twin_lm(model, hidden, labels):
    """Sum of −log p over the predicted tokens of one row."""
    wanted = [place for place, label in enumerate(labels.tolist()) if label != IGNORED_LABEL]
    if not wanted:
        return torch.zeros((), dtype=torch.float64)
    head = model.head
    inner = attention.gelu(attention.linear(hidden[wanted], head.dense.weight, head.dense.bias))
    inner = attention.layer_norm(inner, head.norm.weight, head.norm.bias, 1e-12)
    vocab = model.config.vocab_size
    logits = attention.linear(inner, model.embeddings.token.weight[:vocab], head.decoder.bias[:vocab])
    return losses.masked_lm(logits, labels[wanted])


def twin_sums(model, batch, draws):
    """`[3]`: the sums of the LM, TCD and HCD terms over the rows of a batch."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    for row in range(len(batch.input_ids)):
        hidden, logits = twin_encode(model, batch, row)
        sums[0] = sums[0] + twin_lm(model, hidden, batch.labels[row])
        valid = (batch.document_ids[row] > 0).tolist()
        if sum(valid) < 2:
            continue
        if draws.token_mask.shape[1]:
            sums[1] = sums[1] + mth.tcd(hidden, draws.token_mask[row].nonzero().flatten().tolist())
        if draws.heads.shape[1]:
            sums[2] = sums[2] + mth.hcd(logits, draws.heads.tolist(), valid)
    return torch.stack(sums)


def some_draws(batch, heads=((0, 2), (1, 2)), tokens=3):
    """The first `tokens` valid tokens of each row, and these heads of each layer."""
    token_mask = (batch.document_ids > 0).long()
    token_mask[:, tokens:] = 0
    return Draws(token_mask, torch.tensor(heads, dtype=torch.long))
