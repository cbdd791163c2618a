"""A whole model put together from the loop twins of tests/reference.

`twin_sums` reads the parameters of a `Bert` but calls none of its code: every number comes out of a loop.
"""

import importlib
import importlib.util

import torch

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from tests.reference import attention, deberta, losses, mth, positions, tupe

EPS = 1e-12
WITH_LINES = ("absolute", "ddrp", "bert-r", "deberta", "tupe-a", "tupe-r")
"""Encodings that `twin_scores` has lines for."""


def layer_parameters(layer):
    """The parameters of an `EncoderLayer`, those that it has, under the twin's names."""
    modules = {
        "query": layer.attention.query,
        "key": layer.attention.key,
        "value": layer.attention.value,
        "attention_output": layer.attention.output,
        "attention_norm": layer.attention_norm,
        "ffn_in": layer.feed_forward.input,
        "ffn_gate": layer.feed_forward.gate,
        "ffn_out": layer.feed_forward.output,
        "ffn_norm": layer.feed_forward_norm,
    }
    parameters = {
        f"{name}.{part}": getattr(module, part, None) for name, module in modules.items() for part in ("weight", "bias")
    }
    return {name: parameter for name, parameter in parameters.items() if parameter is not None}


def norm_of(model):
    """The twin of the norm that a model has everywhere."""
    return attention.rms_norm if model.config.norm == "rmsnorm" else attention.layer_norm


def tupe_parameters(table):
    """A `TupeA` or `TupeR` under the twin's names."""
    modules = {"norm": table.norm, "query": table.query, "key": table.key}
    parts = {f"{name}.{part}": getattr(module, part) for name, module in modules.items() for part in ("weight", "bias")}
    bias = {"buckets": table.relative} if hasattr(table, "relative") else {}
    return {"table": table.table, **parts, **bias}


def deberta_parameters(table, projections):
    """A `Deberta` and a layer's `RelativeProjections` under the twin's names."""
    parts = {"key.weight": projections.key.weight, "query.weight": projections.query.weight}
    return {"table": table.relative, **parts, "query.bias": projections.query.bias}


def encoding_module(name):
    """The module with an encoding's `twin`: tests/reference/NAME.py, or its one test file, test_NAME.py beside this."""
    slug = name.replace("-", "_")
    for place in (f"tests.reference.{slug}", f"tests.unit.model.test_{slug}"):
        if importlib.util.find_spec(place) is not None:
            return importlib.import_module(place)
    return None


def twin_scores(name, table, projections, place, maps=()):
    """The twin of one encoding as a function of query and key `[heads, S, d]`.

    table: the `PositionEncoding` in use; projections: the layer's part of it; place: the S position numbers; maps: the
    layer's linear maps of queries and keys, which a twin takes where the layer's part uses them.
    An encoding without a line here has a module of its own, whose `twin` takes these.
    """
    if name == "absolute":
        return positions.absolute_scores
    if name == "ddrp":
        return lambda query, key: positions.ddrp_scores(query, key, table.direction, table.distance, place)
    if name == "bert-r":
        return lambda query, key: positions.bert_r_scores(query, key, table.relative, place)
    if name == "deberta":
        params = deberta_parameters(table, projections)
        return lambda query, key: deberta.deberta_scores(query, key, params, place)
    if name not in WITH_LINES:
        own = (table, projections, place)
        own += tuple(maps) if projections.uses_maps else ()
        return encoding_module(name).twin(*own)
    params, distance = tupe_parameters(table), getattr(table, "largest_distance", tupe.MAX_DISTANCE)
    return lambda query, key: tupe.tupe_scores(query, key, params, place, distance)


def twin_encode(model, batch, row, compared=False):
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
    hidden = norm(torch.stack(rows), embeddings.norm.weight, embeddings.norm.bias, EPS)
    if config.embedding_size is not None:
        hidden = attention.linear(hidden, embeddings.projection.weight, embeddings.projection.bias)
    logits = []
    for number, layer in enumerate(model.layers):
        before = hidden

        def scores(query, key, number=number, layer=layer):
            found = layer_scores(model, layer, place)(query, key)
            others = compared_scores(model.config.position_encoding) if compared else None
            logits.append(found if others is None else others(query, key))
            return attention.within_window(found, config.window(number))

        order = config.layernorm_position
        hidden = attention.bert_layer(
            hidden, layer_parameters(layer), scores, document_ids, config.num_attention_heads, EPS, order, norm=norm
        )
    return before, hidden, logits


def layer_scores(model, layer, place):
    """`twin_scores` of one layer of a model."""
    table = model.embeddings.position if layer.position is None else layer.position
    maps = layer.attention.query, layer.attention.key
    return twin_scores(model.config.position_encoding, table, layer.layer_position, place, maps)


def compared_scores(name):
    """The twin of the logits that HCD compares, where they are others: `compared` of the encoding's module, or None."""
    return getattr(encoding_module(name), "compared", None)


def twin_last_norm(model, hidden):
    """The norm that ends a pre-norm model."""
    if model.config.layernorm_position == "post":
        return hidden
    return norm_of(model)(hidden, model.head.final_norm.weight, model.head.final_norm.bias, EPS)


def twin_hidden(model, batch, row):
    """The last hidden states `[S, D]` of one row."""
    return twin_last_norm(model, twin_encode(model, batch, row)[1])


def predicted_places(labels):
    return [place for place, label in enumerate(labels.tolist()) if label != IGNORED_LABEL]


def twin_decode(model, batch, row, before):
    """DeBERTa's decoder at the predicted places of one row: `[num_predicted, D]`."""
    place, layer = batch.position_ids[row].tolist(), model.layers[-1]
    decoded = deberta.enhanced_mask_decoder(
        before,
        model.mask_decoder.absolute.weight,
        layer_parameters(layer),
        lambda query, key: attention.within_window(
            layer_scores(model, layer, place)(query, key), model.config.window(len(model.layers) - 1)
        ),
        batch.document_ids[row].tolist(),
        place,
        predicted_places(batch.labels[row]),
        model.config.num_attention_heads,
        EPS,
        model.config.layernorm_position,
    )
    return twin_last_norm(model, decoded)


def twin_lm(model, predicted_hidden, labels):
    """Return (sum of −log p, number of right guesses) over the predicted tokens of one row.

    predicted_hidden `[num_predicted, D]`, labels `[S]`.
    """
    head, wanted = model.head, predicted_places(labels)
    if not wanted:
        return torch.zeros(2, dtype=torch.float64).unbind()
    inner = attention.gelu(attention.linear(predicted_hidden, head.dense.weight, head.dense.bias))
    inner = norm_of(model)(inner, head.norm.weight, head.norm.bias, EPS)
    vocab = model.config.vocab_size
    logits = attention.linear(inner, model.embeddings.token.weight[:vocab], head.decoder.bias[:vocab])
    right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, labels[wanted], strict=True))
    return losses.masked_lm(logits, labels[wanted]), torch.tensor(right, dtype=torch.float64)


def twin_sums(model, batch, draws):
    """`[4]`: the sums of the LM, TCD and HCD terms over the documents of a batch, and of the right guesses."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
    windows = [model.config.window(number) for number in range(len(model.layers))]
    for row in range(len(batch.input_ids)):
        before, hidden, logits = twin_encode(model, batch, row, compared=True)
        hidden, wanted = twin_last_norm(model, hidden), predicted_places(batch.labels[row])
        predicted = hidden[wanted]
        if wanted and model.mask_decoder is not None:
            predicted = twin_decode(model, batch, row, before)
        loss, right = twin_lm(model, predicted, batch.labels[row])
        sums[0], sums[3] = sums[0] + loss, sums[3] + right
        for number in range(1, int(batch.document_ids[row].max()) + 1):
            valid = (batch.document_ids[row] == number).tolist()
            if sum(valid) < 2:
                continue
            if draws.token_mask.shape[-1]:
                chosen = draws.token_mask[row, number - 1].nonzero().flatten().tolist()
                sums[1] = sums[1] + mth.tcd(hidden, chosen)
            if draws.heads.shape[1]:
                sums[2] = sums[2] + mth.hcd(logits, draws.heads.tolist(), valid, windows)
    return torch.stack(sums)
