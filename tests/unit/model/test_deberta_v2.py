"""DeBERTa's attention as of version 2: buckets by exact fractions and by transformers, whole encoders by transformers.

The tests over the registry compare logits, losses and gradients with the twin, packed and not, and over ranks.
"""

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model, count_parameters, on_meta_device
from megatron_ddrp.model.attention import cpu
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.positions.tables import DebertaV2, bucket
from tests.reference.deberta_v2 import buckets, row
from tests.unit.model.tiny import tiny_config, tiny_model

PARAMETERS = {"relative": [8, 12], "norm.weight": [12], "norm.bias": [12]}
"""Position parameters of a tiny model → shape."""

RELEASED = [(256, 512), (128, 512), (32, 128), (256, 1024), (64, 512)]


def test_the_twins_buckets_by_hand():
    """Half of 8 buckets is exact; (|x| / 4)^3 in powers of 31 / 4 says which of the wide ones a distance has."""
    assert buckets(8, 32) == [0, 1, 2, 3, 4, *[5] * 3, *[6] * 8, *[7] * 16]
    assert [row(x, 8, buckets(8, 32)) for x in (-100, -31, -5, 0, 4, 5, 31, 100)] == [1, 1, 3, 8, 12, 13, 15, 15]
    released = buckets(256, 512)
    assert released[:132] == list(range(132)) and released[132] == 131 and released.index(255) == 506


@pytest.mark.parametrize("number, longest", [*RELEASED, (8, 7), (8, 32), (2, 9), (4, 5), (6, 4), (12, 7)])
def test_buckets_equal_the_twin_and_larger_distances_have_the_last(number, longest):
    offset = torch.arange(-longest - 50, longest + 51)
    table = buckets(number, longest)
    assert (bucket(offset, number, longest) + number).tolist() == [row(x, number, table) for x in offset.tolist()]


@pytest.mark.parametrize("number, longest", RELEASED)
def test_buckets_are_those_of_transformers_within_the_longest_row(number, longest):
    modeling = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    offset = torch.arange(1 - longest, longest)
    theirs = modeling.make_log_bucket_position(offset, number, longest)
    assert bucket(offset, number, longest).tolist() == theirs.long().tolist()


@pytest.mark.parametrize("length", [1, 3, 7, 12])
def test_a_row_reads_no_more_of_the_table_than_its_offsets_need(length):
    config = tiny_config(position_encoding="deberta-v2", relative_distance=8, seq_length=7)
    encoding = DebertaV2(config)
    states, table_row = encoding(torch.zeros(1, length, dtype=torch.long))
    needed = encoding.norm(encoding.relative)[bucket(torch.arange(1 - length, length), 8, 7) + 8]
    assert torch.equal(states[table_row], needed)
    assert states.shape == (int(table_row.max()) + 1, 12) and table_row.min() == 0


NAMES = {
    "embeddings.token.weight": "embeddings.word_embeddings.weight",
    "embeddings.norm": "embeddings.LayerNorm",
    "embeddings.position.relative": "encoder.rel_embeddings.weight",
    "embeddings.position.norm": "encoder.LayerNorm",
    "layers.": "encoder.layer.",
    "attention.query": "attention.self.query_proj",
    "attention.key": "attention.self.key_proj",
    "attention.value": "attention.self.value_proj",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.input": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
"""Part of our names → part of transformers' names."""


def test_hidden_states_are_those_of_transformers():
    """In float64, with random weights, merged buckets and a padded row."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "vocab_size": 128}
    theirs = transformers.DebertaV2Model(
        transformers.DebertaV2Config(
            **sizes, num_hidden_layers=2, intermediate_size=10, max_position_embeddings=64, position_buckets=16,
            relative_attention=True, max_relative_positions=-1, norm_rel_ebd="layer_norm", share_att_key=True,
            pos_att_type="p2c|c2p", position_biased_input=False, type_vocab_size=0, layer_norm_eps=1e-7,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
        )
    ).double().eval()  # fmt: skip
    torch.manual_seed(0)
    ours = tiny_model(
        position_encoding="deberta-v2", relative_distance=16, seq_length=64, layernorm_epsilon=1e-7, vocab_size=128
    )
    with torch.no_grad():
        ours.embeddings.segment.weight.zero_()
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        if not name.startswith(("head.", "embeddings.segment")):
            for mine, other in NAMES.items():
                name = name.replace(mine, other)
            parameter.data.copy_(state.pop(name))
    assert not state, list(state)
    length = 40  # more than 3 · 8
    ids, mask = torch.randint(1, 128, (2, length)), torch.ones(2, length, dtype=torch.long)
    mask[1, 31:] = 0
    expected = theirs(ids, attention_mask=mask).last_hidden_state
    got = ours.encode(ids, torch.zeros_like(ids), mask, torch.arange(length) * mask)
    difference = (got - expected)[mask.bool()].abs().max()
    assert difference < 1e-7, difference


DISTANCES = torch.arange(-99, 100).abs()


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "row", [bucket(torch.arange(-99, 100), 16, 100) + 15, DISTANCES.clamp(max=30), 30 - DISTANCES.clamp(max=30)]
)
def test_tiles_and_runs_of_keys_that_read_some_buckets_alone_equal_the_whole(row, window, monkeypatch):
    monkeypatch.setattr(cpu, "RUN_OF_KEYS", 16)
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", 1)
    torch.manual_seed(0)
    tables = [torch.randn(2, 31, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    vectors = [torch.randn(2, 2, 100, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    terms = PositionTerms(0.3, *tables, lowest=-99, highest=99, table_row=row)
    ids = (torch.arange(100) < torch.tensor([[100], [71]])).long()
    attending = Attending(*vectors, terms, ids, torch.tensor([0, 1]), window=window)
    weight, inputs = torch.randn(2, 2, 100, 4) * ids[:, None, :, None], [*vectors, *tables]
    found = []
    for backend in ("eager", "blocked"):
        context, cosine = BACKENDS[backend](attending)
        found.append([context * ids[:, None, :, None], *torch.autograd.grad((context * weight).sum() + cosine, inputs)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_parameters_of_the_base_model_and_the_default_number_of_buckets():
    """The table and one LayerNorm; per layer 12 times as many."""
    counts = [
        count_parameters(on_meta_device(ModelConfig(position_encoding="deberta-v2", relative_table=table)))[1]
        for table in ("shared", "per-layer")
    ]
    assert counts == [(512 + 2) * 768, 12 * (512 + 2) * 768]
    config = ModelConfig(position_encoding="deberta-v2")
    assert config.relative_distance == 256 and config.deberta_emd is None
    assert build_model(tiny_config(position_encoding="deberta-v2")).mask_decoder is None


@pytest.mark.parametrize("number", [1, 3, 255])
def test_an_odd_number_of_buckets_is_refused(number):
    with pytest.raises(UserError, match=f"^--position-encoding deberta-v2: .*got --relative-distance {number}: choose"):
        parse_arguments(["--position-encoding", "deberta-v2", "--relative-distance", str(number)])
