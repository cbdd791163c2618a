"""No positions: order changes nothing, and an absolute embedding beside it makes a BERT."""

import pytest
import torch

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.errors import UserError
from tests.reference.positions import absolute_scores
from tests.unit.model.tiny import encode, tiny_batch, tiny_model

PARAMETERS: dict[str, list[int]] = {}
"""Position parameters of a tiny model → shape."""


def twin(_encoding, _layer_part, _positions):
    """BERT's logits of content alone."""
    return absolute_scores


def test_a_document_in_any_order_has_the_same_states():
    model, batch = tiny_model(position_encoding="nope"), tiny_batch(lengths=(7, 4))
    order = torch.tensor([3, 0, 2, 1, 6, 4, 5])  # of both rows, padding stays where it is
    permuted = batch._replace(input_ids=batch.input_ids[:, order], segment_ids=batch.segment_ids[:, order])
    states = encode(model, batch)[:, order]
    torch.testing.assert_close(encode(model, permuted), states, rtol=0, atol=1e-12)
    assert not [name for name in model.state_dict() if "position" in name]


def test_with_an_absolute_embedding_it_is_bert():
    model, bert = (
        tiny_model(position_encoding="nope", absolute_embedding=True),
        tiny_model(position_encoding="absolute"),
    )
    bert.load_state_dict(model.state_dict())
    assert torch.equal(encode(model, tiny_batch()), encode(bert, tiny_batch()))


def test_a_distance_is_refused():
    with pytest.raises(UserError, match="^--relative-distance 8 with --position-encoding nope, .*: leave the distance"):
        ModelConfig(position_encoding="nope", relative_distance=8)
