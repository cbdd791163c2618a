"""Gumbel sampling: the right distribution, a pure function of its keys; detection against its loops; its rates."""

import numpy as np
import torch

from megatron_ddrp.config import ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.heads import gumbel_argmax, replace_tokens, rtd_sums, rtd_targets
from megatron_ddrp.objectives.contract import losses_of, make_objective, sample_keys
from tests.reference.electra import replaced_token_detection


def keys_of(count, step=1, seed=1234):
    sequence, position = np.divmod(np.arange(count), 512)
    return sample_keys(sequence, position, seed, step)


def test_samples_follow_the_softmax():
    probabilities = torch.tensor([0.6, 0.2, 0.1, 0.06, 0.03, 0.008, 0.002])
    draws = 200_000
    _, sampled = gumbel_argmax(probabilities.log().expand(draws, -1), keys_of(draws))
    counts = torch.bincount(sampled, minlength=7)
    deviation = (counts - draws * probabilities) / (draws * probabilities * (1 - probabilities)).sqrt()
    assert deviation.abs().max() < 4, deviation


def test_every_piece_of_a_large_vocabulary_is_as_likely_and_keys_are_independent():
    draws, pieces = 100_000, 500
    _, sampled = gumbel_argmax(torch.zeros(draws, pieces), keys_of(draws))
    counts = torch.bincount(sampled, minlength=pieces).double()
    mean = draws / pieces
    chi_square = ((counts - mean) ** 2 / mean).sum() / (pieces - 1)
    assert 0.8 < chi_square < 1.2  # 6 standard deviations
    repeats = (sampled[1:] == sampled[:-1]).float().mean()
    assert abs(repeats - 1 / pieces) < 5 * (1 / pieces / draws) ** 0.5


def test_noise_belongs_to_the_key_and_the_piece_not_to_the_row_or_the_chunk():
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0))
    keys = keys_of(40)
    scores, sampled = gumbel_argmax(logits, keys)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    again = gumbel_argmax(logits[order], keys[order])
    assert torch.equal(again[0], scores[order]) and torch.equal(again[1], sampled[order])
    halves = [gumbel_argmax(logits[:, :1000], keys), gumbel_argmax(logits[:, 1000:], keys, first_piece=1000)]
    second = halves[1][0] > halves[0][0]
    assert torch.equal(torch.where(second, halves[1][1] + 1000, halves[0][1]), sampled)
    assert 0 < second.sum() < 40
    assert not torch.equal(gumbel_argmax(logits, keys_of(40, step=2))[1], sampled)
    assert not torch.equal(gumbel_argmax(logits, keys_of(40, seed=5))[1], sampled)


def test_no_gradient_and_no_piece_of_the_padding():
    logits = torch.zeros(1000, 12, requires_grad=True)
    scores, sampled = gumbel_argmax(torch.where(torch.arange(12) < 10, logits, float("-inf")), keys_of(1000))
    assert not scores.requires_grad and set(sampled.tolist()) == set(range(10))
    assert scores.isfinite().all()


def test_rtd_follows_the_loops():
    generator = torch.Generator().manual_seed(0)
    originals = torch.randint(0, 4, (3, 9), generator=generator)
    valid = torch.arange(9) < torch.tensor([9, 5, 2])[:, None]
    places = torch.tensor([0, 3, 4, 10, 13, 18])
    seen = replace_tokens(originals, places, torch.randint(0, 4, (6,), generator=generator))
    logits = torch.randn(3, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    expected = replaced_token_detection(logits, seen.tolist(), originals.tolist(), valid.tolist())
    targets = rtd_targets(seen, originals, valid.long())
    assert (targets == IGNORED_LABEL).sum() == 11 and (targets == 1).sum() < 6, "no draw met its original"
    ours = rtd_sums(logits, targets)
    torch.testing.assert_close(ours[0], expected[0])
    assert [int(count) for count in ours[1:]] == list(expected[1:])
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours[0], expected[0])))


def test_the_generator_sees_masks_and_originals_but_no_random_pieces():
    """The released code's shares, beside BERT's: 85 % of the selected pieces become [MASK], the rest stays."""
    shares = {name: ObjectiveConfig(objective=name).mask_shares for name in ("electra", "mlm")}
    assert shares["electra"] == {"mask_share": 0.85, "random_share": 0.0}
    assert shares["mlm"] == {"mask_share": 0.8, "random_share": 0.1}


def test_each_rate_is_divided_by_its_own_count():
    objective = make_objective(ObjectiveConfig(objective="electra"))
    totals = dict.fromkeys(("lm_loss", "tcd_loss", "hcd_loss", "rtd_loss"), 0.0) | {"sequences": 3}
    totals |= {"predicted": 20, "generator_correct": 5, "tokens": 80, "rtd_correct": 60, "replaced": 16}
    row = losses_of(totals | {"replaced_found": 4}, objective)
    assert (row["generator_accuracy"], row["rtd_accuracy"]) == (5 / 20, 60 / 80)
    assert (row["rtd_recall"], row["replaced_share"]) == (4 / 16, 16 / 80)
