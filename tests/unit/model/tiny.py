"""Tiny models, batches and draws, and what tests ask of them."""

import torch

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import Draws

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

    fields = {
        name: lay(field, IGNORED_LABEL if name == "labels" else 0)
        for name, field in batch._asdict().items()
        if field is not None
    }
    numbers = [[number + 1 for number, d in enumerate(row) for _ in range(lengths[d])] for row in rows]
    fields["document_ids"] = torch.tensor([row + [0] * (longest - len(row)) for row in numbers])
    return Batch(**fields)


def some_draws(batch, heads=((0, 2), (1, 2)), tokens=3):
    """The first `tokens` valid tokens of each document, and these heads of each layer."""
    numbers = torch.arange(1, max(1, int(batch.document_ids.max())) + 1)
    token_mask = (batch.document_ids.unsqueeze(1) == numbers.unsqueeze(-1)).long()  # [batch, documents, seq]
    token_mask = token_mask * (batch.position_ids < tokens).long().unsqueeze(1)
    return Draws(token_mask, torch.tensor(heads, dtype=torch.long))


def named_sums(model, batch, draws, notes=None):
    """The sums that a model gives, by name."""
    return dict(zip(model.head.objective.sum_names, model(batch, draws, notes).sums, strict=True))


def encode(model, batch):
    """The last hidden states `[batch, seq, D]`."""
    return model.encode(batch.input_ids, batch.segment_ids, batch.document_ids, batch.position_ids)


def gradients(model, sums, weights=(0.7, 1.3, 0.9)):
    """Gradient of the weighted sum of the first terms by parameter name; zeros where one does not take part."""
    parameters = dict(model.named_parameters())
    total = (sums[: len(weights)] * torch.tensor(weights, dtype=sums.dtype)).sum()
    values = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, values, strict=True))
