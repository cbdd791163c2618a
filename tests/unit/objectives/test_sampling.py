"""What TCD and HCD look at: uniform, without replacement, and a pure function of seed, step and identity."""

import numpy as np
import pytest
import torch

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.objectives.contract import make_objective, sample_heads, sample_tokens

SEQ = 16


def rows(lengths, first_id=0, seq=SEQ):
    """(valid, sequence_ids, position_ids) of one document a row."""
    place = np.tile(np.arange(seq), (len(lengths), 1))
    valid = place < np.asarray(lengths)[:, None]
    ids = np.arange(first_id, first_id + len(lengths))[:, None]
    return valid, ids * valid, place * valid


def test_tokens_are_drawn_without_replacement_and_never_from_padding():
    lengths = np.arange(SEQ + 1)
    document_ids, sequence_ids, position_ids = rows(lengths)
    for count in (2, 5, 50):
        mask = sample_tokens(document_ids > 0, sequence_ids, position_ids, count, 1, 1)
        assert mask.dtype == np.int64 and set(np.unique(mask)) <= {0, 1}
        assert np.array_equal(mask.sum(-1), np.minimum(lengths, count))
        assert not mask[document_ids == 0].any()


def test_zero_means_all_valid_tokens():
    document_ids, sequence_ids, position_ids = rows([16, 3, 0])
    assert np.array_equal(sample_tokens(document_ids > 0, sequence_ids, position_ids, 0, 1, 1), document_ids)


def test_every_token_and_every_pair_is_equally_likely():
    num_rows, length, count = 20_000, 8, 3
    mask = sample_tokens(*rows([length] * num_rows), count, 1, 1)[:, :length]
    expected, sigma = count / length, (3 / 8 * 5 / 8 / num_rows) ** 0.5
    assert np.abs(mask.mean(0) - expected).max() < 5 * sigma
    pairs = mask.T @ mask / num_rows
    expected = count * (count - 1) / (length * (length - 1))
    off_diagonal = pairs[~np.eye(length, dtype=bool)]
    assert np.abs(off_diagonal - expected).max() < 5 * (expected * (1 - expected) / num_rows) ** 0.5


def test_tokens_do_not_depend_on_batch_row_order_or_padding():
    batch = rows([16, 9, 12, 3], first_id=40)
    mask = sample_tokens(*batch, 5, 1, 7)
    order = [2, 0, 3, 1]
    assert np.array_equal(sample_tokens(*(x[order] for x in batch), 5, 1, 7), mask[order])
    for row, length in enumerate((16, 9, 12, 3)):
        alone = sample_tokens(*(x[row : row + 1, :length] for x in batch), 5, 1, 7)
        assert np.array_equal(alone[0], mask[row, :length])
    wider = rows([16, 9, 12, 3], first_id=40, seq=30)
    assert np.array_equal(sample_tokens(*wider, 5, 1, 7)[:, :SEQ], mask)


def test_tokens_differ_by_seed_step_and_sequence():
    batch = rows([16] * 8)
    mask = sample_tokens(*batch, 5, 1, 7)
    assert np.array_equal(sample_tokens(*batch, 5, 1, 7), mask)
    for other in ((2, 7), (1, 8)):
        assert (sample_tokens(*batch, 5, *other) != mask).any(-1).sum() >= 7
    assert len({row.tobytes() for row in mask}) >= 7


def test_heads_are_sorted_distinct_and_in_range():
    for step in range(50):
        heads = sample_heads(6, 5, 3, 1, step)
        assert heads.shape == (6, 3) and heads.dtype == np.int64
        assert (np.diff(heads, axis=-1) > 0).all() and heads.min() >= 0 and heads.max() < 5


def test_zero_means_all_heads():
    assert np.array_equal(sample_heads(2, 4, 0, 1, 1), [[0, 1, 2, 3]] * 2)


def test_every_pair_of_heads_is_equally_likely():
    layers, steps, num_heads = 10, 1000, 5
    heads = np.concatenate([sample_heads(layers, num_heads, 2, 1, step) for step in range(steps)])
    counts = np.zeros((num_heads, num_heads))
    np.add.at(counts, (heads[:, 0], heads[:, 1]), 1)
    shares = counts[np.triu_indices(num_heads, 1)] / (layers * steps)
    assert np.abs(shares - 0.1).max() < 5 * (0.1 * 0.9 / (layers * steps)) ** 0.5


def test_heads_differ_by_seed_step_and_layer_and_repeat():
    heads = sample_heads(12, 12, 2, 1, 7)
    assert np.array_equal(sample_heads(12, 12, 2, 1, 7), heads)
    assert not np.array_equal(sample_heads(12, 12, 2, 1, 8), heads)
    assert not np.array_equal(sample_heads(12, 12, 2, 2, 7), heads)
    assert len({tuple(row) for row in heads}) > 6
    # A layer's draw does not depend on how many layers there are: a pipeline stage may draw its own.
    assert np.array_equal(sample_heads(5, 12, 2, 1, 7), heads[:5])


def test_torch_and_numpy_generators_play_no_part():
    batch = rows([16] * 4)
    results = []
    for seed in (0, 1):
        np.random.seed(seed)
        torch.manual_seed(seed)
        results.append((sample_tokens(*batch, 5, 1, 7), sample_heads(12, 12, 2, 1, 7)))
    assert all(np.array_equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize(
    "changes, widths",
    [
        ({"objective": "mth"}, (SEQ, 2)),
        ({"objective": "mlm"}, (0, 0)),
        ({"objective": "mth", "tcd_weight": 0.0}, (0, 2)),
        ({"objective": "mth", "hcd_weight": 0.0}, (SEQ, 0)),
        ({"objective": "mlm", "hcd_weight": 0.1, "hcd_heads": 0}, (0, 12)),
    ],
)
def test_a_draw_is_empty_where_its_weight_is_zero(changes, widths):
    valid, sequence_ids, position_ids = rows([16, 4])
    nothing = np.zeros_like(position_ids)
    batch = Batch(nothing, nothing, valid.astype(np.int64), position_ids, nothing, sequence_ids)
    draws = make_objective(ObjectiveConfig(**changes)).draw(batch, ModelConfig(), seed=1, step=3)
    assert draws.token_mask.shape == (2, 1, widths[0]) and draws.heads.shape == (12, widths[1])
    assert draws.token_mask.dtype == draws.heads.dtype == torch.long


def test_a_draw_has_as_many_tokens_and_heads_as_the_settings_say():
    valid, sequence_ids, position_ids = rows([16, 16])
    nothing = np.zeros_like(position_ids)
    batch = Batch(nothing, nothing, valid.astype(np.int64), position_ids, nothing, sequence_ids)
    objective = make_objective(ObjectiveConfig(objective="mth", tcd_tokens=7, hcd_heads=3))
    draws = objective.draw(batch, ModelConfig(), seed=1, step=3)
    assert draws.token_mask.sum(-1).tolist() == [[7], [7]] and draws.heads.shape == (12, 3)
