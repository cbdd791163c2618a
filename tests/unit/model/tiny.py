"""Tiny models, batches and draws, what tests ask of them, and a whole model put together from the loop twins.

`twin_sums` reads the parameters of a `Bert` but calls none of its code: every number comes out of a loop of
tests/reference.
"""

from functools import partial

import torch

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model import build_model
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.model.stages import Draws, layout_of
from tests.reference import attention, objectives, positions

TINY = {
    **{"num_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "ffn_hidden_size": 10},
    **{"seq_length": 7, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    **{"init_method_std": 0.4, "relative_distance": 4, "vocab_size": 11},
}


def tiny_config(**changes):
    """2 layers of 3 heads 4 wide; initialised so widely that every term of the logits matters."""
    settings = TINY | changes
    if encoding_class(settings.get("position_encoding", "ddrp")).relative_distance is None:
        del settings["relative_distance"]
    return ModelConfig(**settings)


def tiny_model(seed=0, objective=None, **changes):
    """A float64 model whose biases and LayerNorms are random too, so that no term hides behind a zero or a one."""
    torch.manual_seed(seed)
    model = build_model(tiny_config(**changes), objective=objective).double()
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


def packed_batch(batch, rows):
    """The documents of a batch with one a row, laid end to end: `rows` lists which go into each row."""
    lengths = (batch.document_ids > 0).sum(1).tolist()
    longest = max(sum(lengths[document] for document in row) for row in rows)

    def lay(field, padding):
        packed = torch.full((len(rows), longest), padding)
        for number, row in enumerate(rows):
            tokens = torch.cat([field[document, : lengths[document]] for document in row])
            packed[number, : len(tokens)] = tokens
        return packed

    filled = {name: field for name, field in batch._asdict().items() if field is not None}
    fields = {name: lay(field, IGNORED_LABEL if name == "labels" else 0) for name, field in filled.items()}
    numbers = [[number + 1 for number, d in enumerate(row) for _ in range(lengths[d])] for row in rows]
    return Batch(**fields | {"document_ids": torch.tensor([row + [0] * (longest - len(row)) for row in numbers])})


def some_draws(batch, heads=((0, 2), (1, 2)), tokens=3):
    """The first `tokens` valid tokens of each document, and these heads of each layer."""
    numbers = torch.arange(1, max(1, int(batch.document_ids.max())) + 1)
    token_mask = (batch.document_ids.unsqueeze(1) == numbers.unsqueeze(-1)).long()  # [batch, documents, seq]
    token_mask = token_mask * (batch.position_ids < tokens).long().unsqueeze(1)
    return Draws(token_mask, torch.tensor(heads, dtype=torch.long))


def own_draws(model, batch, step=1):
    """Return what the objective of a model draws for a batch."""
    return model.head.objective.draw(batch.map(torch.Tensor.numpy), model.config, 1234, step)


def named_sums(model, batch, draws=None):
    """Return the sums that a model gives, by name; left out, the draws are its own."""
    sums = model(batch, draws or own_draws(model, batch)).sums
    return dict(zip(model.head.objective.sum_names, sums, strict=True))


def encode(model, batch):
    """The last hidden states `[batch, seq, D]`."""
    return model.encode(batch.input_ids, batch.segment_ids, batch.document_ids, batch.position_ids)


def gradients(model, sums, weights=(0.7, 1.3, 0.9), retain_graph=True):
    """Gradient of the weighted sum of the first terms by parameter name; zeros where one does not take part."""
    parameters = dict(model.named_parameters())
    total = (sums[: len(weights)] * torch.tensor(weights[: len(sums)], dtype=sums.dtype)).sum()
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": retain_graph}
    values = torch.autograd.grad(total, list(parameters.values()), **options)
    return dict(zip(parameters, values, strict=True))


EPS = 1e-12
assert_same_gradients = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def layer_parameters(layer):
    """The parameters of an `EncoderLayer`, those that it has, under the twin's names."""
    modules = {
        **{"query": layer.attention.query, "key": layer.attention.key, "value": layer.attention.value},
        **{"attention_output": layer.attention.output, "attention_norm": layer.attention_norm},
        **{"ffn_in": layer.feed_forward.input, "ffn_gate": layer.feed_forward.gate},
        **{"ffn_out": layer.feed_forward.output, "ffn_norm": layer.feed_forward_norm},
    }
    named = {f"{name}.{part}": getattr(modules[name], part, None) for name in modules for part in ("weight", "bias")}
    return {name: parameter for name, parameter in named.items() if parameter is not None}


def activation_of(model):
    return attention.silu if model.config.ffn == "swiglu" else attention.gelu


def norm_of(model):
    """The twin of the norm that a model has everywhere."""
    return attention.rms_norm if model.config.norm == "rmsnorm" else attention.layer_norm


def twin_encode(model, batch, row, compared=False, causal=False):
    """H[L−1] and H[L] `[S, D]`, both before a pre-norm model's last norm, and the L logits `[heads, S, S]` of a row,
    with `compared` those that HCD compares."""
    config, embeddings = model.config, model.embeddings
    place, document_ids = batch.position_ids[row].tolist(), batch.document_ids[row].tolist()
    rows = []
    tokens, segments = batch.input_ids[row].tolist(), batch.segment_ids[row].tolist()
    for token, segment, position in zip(tokens, segments, place, strict=True):
        vector = embeddings.token.weight[token]
        if config.num_segments:
            vector = vector + embeddings.segment.weight[segment if config.num_segments == 2 else 0]
        rows.append(vector if embeddings.absolute is None else vector + embeddings.absolute.weight[position])
    norm = norm_of(model)
    hidden = torch.stack(rows)
    if config.embedding_norm:
        hidden = norm(hidden, embeddings.norm.weight, embeddings.norm.bias, EPS)
    if config.embedding_size is not None:
        hidden = attention.linear(hidden, embeddings.projection.weight, embeddings.projection.bias)
    logits = []
    for number, layer in enumerate(model.layers):
        before = hidden

        def scores(query, key, number=number, layer=layer):
            found = layer_scores(model, layer, place, query, key)
            others = positions.COMPARED.get(model.config.position_encoding) if compared else None
            logits.append(found if others is None else others(query, key))
            return attention.within_window(found, config.window(number), causal)

        order = config.layernorm_position
        own = {"norm": norm, "activation": activation_of(model)}
        hidden = attention.bert_layer(
            hidden, layer_parameters(layer), scores, document_ids, config.num_attention_heads, EPS, order, **own
        )
    return before, hidden, logits


def layer_scores(model, layer, place, query, key):
    """The twin of one layer's logits: query, key `[heads, S, d]` to `[heads, S, S]`; place: the S position numbers."""
    table = model.embeddings.position if layer.position is None else layer.position
    part, attention_part = layer.layer_position, layer.attention
    maps = (attention_part.query, attention_part.key) if part.uses_maps else ()
    return positions.TWINS[model.config.position_encoding](query, key, table, part, place, *maps)


def twin_last_norm(model, hidden):
    """The norm that ends a pre-norm model."""
    if model.config.layernorm_position == "post":
        return hidden
    return norm_of(model)(hidden, model.head.final_norm.weight, model.head.final_norm.bias, EPS)


def predicted_places(labels):
    return [place for place, label in enumerate(labels.tolist()) if label != IGNORED_LABEL]


def twin_decode(model, batch, row, before, causal=False):
    """DeBERTa's decoder at the predicted places of one row: `[num_predicted, D]`."""
    place, layer, config = batch.position_ids[row].tolist(), model.layers[-1], model.config

    def scores(query, key):
        found = layer_scores(model, layer, place, query, key)
        return attention.within_window(found, config.window(len(model.layers) - 1), causal)

    decoded = positions.enhanced_mask_decoder(
        *(before, model.mask_decoder.absolute.weight, layer_parameters(layer), scores),
        *(batch.document_ids[row].tolist(), place, predicted_places(batch.labels[row])),
        *(config.num_attention_heads, EPS, config.layernorm_position),
    )
    return twin_last_norm(model, decoded)


def twin_lm(model, predicted_hidden, labels):
    """Return (sum of −log p, number of right guesses) over the predicted tokens of one row.

    predicted_hidden `[num_predicted, D]`, labels `[S]`.
    """
    head, wanted = model.head, predicted_places(labels)
    if not wanted:
        return torch.zeros(2, dtype=torch.float64).unbind()
    inner = activation_of(model)(attention.linear(predicted_hidden, head.dense.weight, head.dense.bias))
    inner = norm_of(model)(inner, head.norm.weight, head.norm.bias, EPS)
    vocab = model.config.vocab_size
    logits = attention.linear(inner, model.embeddings.token.weight[:vocab], head.decoder.bias[:vocab])
    right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, labels[wanted], strict=True))
    return objectives.masked_lm(logits, labels[wanted]), torch.tensor(right, dtype=torch.float64)


def twin_sums(model, batch, draws, causal=False):
    """`[4]`: the sums of the LM, TCD and HCD terms over the documents of a batch, and of the right guesses."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
    windows = [model.config.window(number) for number in range(len(model.layers))]
    for row in range(len(batch.input_ids)):
        before, hidden, logits = twin_encode(model, batch, row, compared=True, causal=causal)
        hidden, wanted = twin_last_norm(model, hidden), predicted_places(batch.labels[row])
        predicted = hidden[wanted]
        if wanted and model.mask_decoder is not None:
            predicted = twin_decode(model, batch, row, before, causal)
        loss, right = twin_lm(model, predicted, batch.labels[row])
        sums[0], sums[3] = sums[0] + loss, sums[3] + right
        for number in range(1, int(batch.document_ids[row].max()) + 1):
            valid = (batch.document_ids[row] == number).tolist()
            if sum(valid) < 2:
                continue
            if draws.token_mask.shape[-1]:
                chosen = draws.token_mask[row, number - 1].nonzero().flatten().tolist()
                sums[1] = sums[1] + objectives.tcd(hidden, chosen)
            if draws.heads.shape[1]:
                sums[2] = sums[2] + objectives.hcd(logits, draws.heads.tolist(), valid, windows)
    return torch.stack(sums)


def assert_equals_twin(model, batch, draws, causal=False):
    """Hold a model's sums and gradients, with every backend, against those of its twin, and return the twin's sums."""
    expected = twin_sums(model, batch, draws, causal)[[0, 3] if causal else slice(None)]
    expected_gradients = gradients(model, expected)
    for backend in BACKENDS:
        for layer in model.layers:
            layer.attention.backend = backend
        sums = model(batch, draws, None, layout_of(batch, causal)).sums
        torch.testing.assert_close(sums, expected, rtol=1e-10, atol=1e-10, msg=partial("{}: {}".format, backend))
        assert_same_gradients(gradients(model, sums), expected_gradients)
    return expected
