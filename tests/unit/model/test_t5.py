"""T5's relative bias: the twin's buckets judged by hand and by T5, ours by both; each row moves its own pairs.

The tests over the registry compare logits, losses and gradients with the twin, packed and not, and under tensor
parallelism with one process.
"""

import pytest
import torch

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.model.attention.logits import attention_logits
from megatron_ddrp.model.positions.biases import T5
from tests.reference.t5 import bucket, t5_scores
from tests.unit.model.tiny import tiny_config

HEADS = 3


def encoding(largest=128):
    torch.manual_seed(0)
    config = tiny_config(position_encoding="t5", relative_distance=largest)
    return T5(config).double(), config


def bias(own, config, length):
    """The bias alone, `[heads, s, s]`: the logits of vectors of zeros."""
    zeros = torch.zeros(1, HEADS, length, 4, dtype=torch.float64)
    return attention_logits(zeros, zeros, own.terms(config, own(torch.arange(length)[None])))[0]


def test_the_twins_buckets_by_hand():
    begins = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert [next(a for a in range(200) if bucket(-a, 128) == row) for row in range(16)] == begins
    assert [bucket(offset, 128) for offset in (0, 1, -1, 8, 127, 128, -500, 500)] == [0, 17, 1, 24, 31, 31, 15, 31]
    query = torch.tensor([[[2.0], [3.0]]], dtype=torch.float64)
    table = torch.arange(32, dtype=torch.float64)[:, None]
    assert t5_scores(query, query, table, [0, 9], 128).tolist() == [[[4.0, 6.0 + 24], [6.0 + 8, 9.0]]]


def test_the_twins_buckets_are_t5s():
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    theirs = modeling.T5Attention._relative_position_bucket(torch.arange(-600, 601), True, 32, 128)
    assert [bucket(offset, 128) for offset in range(-600, 601)] == theirs.tolist()


@pytest.mark.parametrize("largest", [1, 5, 8, 9, 20, 32, 64, 128, 300, 512])
def test_every_pair_reads_the_row_of_the_twins_bucket(largest):
    own, config = encoding(largest)
    length = largest + 50
    got = bias(own, config, length)
    for offset in range(1 - length, length):
        expected = own.relative[bucket(offset, largest)]
        assert torch.equal(got.diagonal(offset, 1, 2), expected[:, None].expand(-1, length - abs(offset))), offset


def test_the_bias_is_that_of_t5_to_the_last_bit():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    sizes = transformers.T5Config(d_model=12, num_heads=HEADS, d_kv=4)
    theirs = modeling.T5Attention(sizes, has_relative_attention_bias=True)
    own, config = encoding()
    theirs.relative_attention_bias.weight.data = own.relative.data
    assert torch.equal(bias(own, config, 300), theirs.compute_bias(300, 300)[0])


def test_each_row_moves_exactly_its_own_pairs():
    own, config = encoding()
    length = 100  # far enough for every bucket
    before = bias(own, config, length)
    place = torch.arange(length)
    buckets = torch.tensor([[bucket(j - i, 128) for j in range(length)] for i in range(length)])
    for row in range(32):
        with torch.no_grad():
            kept = own.relative[row].clone()
            own.relative[row, 1] += 1.0
            moved = bias(own, config, length) != before
            own.relative[row] = kept
        assert torch.equal(moved[1], buckets == row) and not moved[[0, 2]].any()
        assert (buckets == row).any() == (row != 16)
    assert (buckets[place, place] == 0).all()


def test_the_table_of_the_base_model_has_32_numbers_per_head():
    """Per layer 12 times as many; nothing else belongs to the positions."""
    counts = [
        count_parameters(on_meta_device(ModelConfig(position_encoding="t5", relative_table=table)))[1]
        for table in ("shared", "per-layer")
    ]
    assert counts == [32 * 12, 12 * 32 * 12]
    assert ModelConfig(position_encoding="t5").relative_distance == 128
