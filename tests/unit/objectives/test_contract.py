"""Tests of what objectives draw and read: samples of TCD and HCD, ELECTRA's Gumbel sampling, and notes."""

import numpy as np
import pytest
import torch

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.word_counts import RareWords
from megatron_ddrp.model.heads import gumbel_argmax
from megatron_ddrp.model.stages import blend, window_means
from megatron_ddrp.objectives import contract
from megatron_ddrp.objectives.contract import losses_of, make_objective, sample_heads, sample_keys, sample_tokens
from megatron_ddrp.objectives.electra import NoteDictionary, window_places
from megatron_ddrp.objectives.masked import MaskedLM
from tests.reference import objectives as loops
from tests.unit.model.tiny import own_draws, packed_batch, tiny_batch, tiny_model

SEQ = 16
WORDS = RareWords(np.arange(4, dtype=np.uint64), np.full(4, 100), np.arange(4), np.arange(1, 5))
WIDTH = 12


def rows(lengths, first_id=0, seq=SEQ):
    """(valid, sequence_ids, position_ids) of one document a row."""
    place = np.tile(np.arange(seq), (len(lengths), 1))
    valid = place < np.asarray(lengths)[:, None]
    ids = np.arange(first_id, first_id + len(lengths))[:, None]
    return valid, ids * valid, place * valid


def test_tokens_are_drawn_without_replacement_never_from_padding_and_every_one_and_pair_is_equally_likely():
    lengths = np.arange(SEQ + 1)
    valid, *places = rows(lengths)
    for count in (2, 5, 50):
        mask = sample_tokens(valid, *places, count, 1, 1)
        assert mask.dtype == np.int64 and set(np.unique(mask)) <= {0, 1}
        assert np.array_equal(mask.sum(-1), np.minimum(lengths, count)) and not mask[~valid].any()
    valid, *places = rows([16, 3, 0])
    assert np.array_equal(sample_tokens(valid, *places, 0, 1, 1), valid), "all"
    num_rows, length, count = 20_000, 8, 3
    mask = sample_tokens(*rows([length] * num_rows), count, 1, 1)[:, :length]
    expected, sigma = count / length, (3 / 8 * 5 / 8 / num_rows) ** 0.5
    assert np.abs(mask.mean(0) - expected).max() < 5 * sigma
    pairs = mask.T @ mask / num_rows
    expected = count * (count - 1) / (length * (length - 1))
    off_diagonal = pairs[~np.eye(length, dtype=bool)]
    assert np.abs(off_diagonal - expected).max() < 5 * (expected * (1 - expected) / num_rows) ** 0.5


def test_tokens_depend_on_seed_step_and_sequence_but_not_on_row_order_or_padding():
    batch = rows([16, 9, 12, 3], first_id=40)
    mask = sample_tokens(*batch, 5, 1, 7)
    order = [2, 0, 3, 1]
    assert np.array_equal(sample_tokens(*(x[order] for x in batch), 5, 1, 7), mask[order])
    for row, length in enumerate((16, 9, 12, 3)):
        alone = sample_tokens(*(x[row : row + 1, :length] for x in batch), 5, 1, 7)
        assert np.array_equal(alone[0], mask[row, :length])
    wider = rows([16, 9, 12, 3], first_id=40, seq=30)
    assert np.array_equal(sample_tokens(*wider, 5, 1, 7)[:, :SEQ], mask)
    batch = rows([16] * 8)
    mask = sample_tokens(*batch, 5, 1, 7)
    assert np.array_equal(sample_tokens(*batch, 5, 1, 7), mask)
    for other in ((2, 7), (1, 8)):
        assert (sample_tokens(*batch, 5, *other) != mask).any(-1).sum() >= 7
    assert len({row.tobytes() for row in mask}) >= 7


def test_heads_are_sorted_distinct_and_in_range_or_all_and_every_pair_is_equally_likely():
    for step in range(50):
        heads = sample_heads(6, 5, 3, 1, step)
        assert heads.shape == (6, 3) and heads.dtype == np.int64
        assert (np.diff(heads, axis=-1) > 0).all() and heads.min() >= 0 and heads.max() < 5
    assert np.array_equal(sample_heads(2, 4, 0, 1, 1), [[0, 1, 2, 3]] * 2)
    layers, steps, num_heads = 10, 1000, 5
    heads = np.concatenate([sample_heads(layers, num_heads, 2, 1, step) for step in range(steps)])
    counts = np.zeros((num_heads, num_heads))
    np.add.at(counts, (heads[:, 0], heads[:, 1]), 1)
    shares = counts[np.triu_indices(num_heads, 1)] / (layers * steps)
    assert np.abs(shares - 0.1).max() < 5 * (0.1 * 0.9 / (layers * steps)) ** 0.5


def test_heads_differ_by_seed_step_and_layer_and_repeat():
    heads = sample_heads(12, 12, 2, 1, 7)
    assert np.array_equal(sample_heads(12, 12, 2, 1, 7), heads)
    for other in ((1, 8), (2, 7)):
        assert not np.array_equal(sample_heads(12, 12, 2, *other), heads)
    assert len({tuple(row) for row in heads}) > 6
    # A layer's draw does not depend on how many layers there are: a pipeline stage may draw its own.
    assert np.array_equal(sample_heads(5, 12, 2, 1, 7), heads[:5])


def test_a_draw_is_as_the_settings_say_and_empty_where_its_weight_is_zero():
    valid, sequence_ids, position_ids = rows([16, 4])
    nothing = np.zeros_like(position_ids)
    batch = Batch(nothing, nothing, valid.astype(np.int64), position_ids, nothing, sequence_ids)
    for name, changes, *widths in (
        ("mth", {}, SEQ, 2),
        ("mlm", {}, 0, 0),
        ("mth", {"tcd_weight": 0.0}, 0, 2),
        ("mth", {"hcd_weight": 0.0}, SEQ, 0),
        ("mlm", {"hcd_weight": 0.1, "hcd_heads": 0}, 0, 12),
        ("mth", {"tcd_tokens": 7, "hcd_heads": 3}, SEQ, 3),
    ):
        draws = make_objective(ObjectiveConfig(name, **changes)).draw(batch, ModelConfig(), seed=1, step=3)
        assert (draws.token_mask.shape, draws.heads.shape) == ((2, 1, widths[0]), (12, widths[1])), changes
        assert draws.token_mask.dtype == draws.heads.dtype == torch.long
    assert draws.token_mask.sum(-1).tolist() == [[7], [4]], "all of a text of fewer tokens"


def keys_of(count, step=1, seed=1234):
    sequence, position = np.divmod(np.arange(count), 512)
    return sample_keys(sequence, position, seed, step)


def test_samples_follow_the_softmax_also_of_a_large_vocabulary_and_keys_are_independent():
    probabilities = torch.tensor([0.6, 0.2, 0.1, 0.06, 0.03, 0.008, 0.002])
    draws = 200_000
    _, sampled = gumbel_argmax(probabilities.log().expand(draws, -1), keys_of(draws))
    counts = torch.bincount(sampled, minlength=7)
    deviation = (counts - draws * probabilities) / (draws * probabilities * (1 - probabilities)).sqrt()
    assert deviation.abs().max() < 4, deviation
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
    for other in ({"step": 2}, {"seed": 5}):
        assert not torch.equal(gumbel_argmax(logits, keys_of(40, **other))[1], sampled)
    logits = torch.zeros(1000, 12, requires_grad=True)
    scores, sampled = gumbel_argmax(torch.where(torch.arange(12) < 10, logits, float("-inf")), keys_of(1000))
    assert not scores.requires_grad and scores.isfinite().all()
    assert set(sampled.tolist()) == set(range(10)), "a piece of the padding"


def test_an_objective_is_of_the_class_that_its_name_has_now(monkeypatch):
    """A plug-in may change between two runs of a process."""
    for own in (MaskedLM, contract.CausalLM):
        monkeypatch.setattr(contract, "objective_class", {"mlm": own}.get)
        assert type(make_objective(ObjectiveConfig(objective="mlm"))) is own


def test_each_rate_has_its_own_count():
    totals = dict.fromkeys(("lm_loss", "tcd_loss", "hcd_loss", "rtd_loss"), 0.0) | {"sequences": 3, "predicted": 20}
    totals |= {"lm_correct": 7, "generator_correct": 5, "tokens": 80, "rtd_correct": 60, "replaced": 16}
    electra = {"generator_accuracy": 5 / 20, "rtd_accuracy": 60 / 80, "rtd_recall": 4 / 16, "replaced_share": 16 / 80}
    for name, expected in (("mlm", {"lm_accuracy": 7 / 20}), ("electra", electra)):
        row = losses_of(totals | {"replaced_found": 4}, make_objective(ObjectiveConfig(name)))
        assert row | expected == row


def dictionary(width=WIDTH, **changes):
    return NoteDictionary(WORDS, width, ObjectiveConfig(notes=True, notes_window=2, **changes))


def noted_batch():
    """Rows of 7, 6 and 4 tokens with words 1 (two pieces), 2 and 3; a piece of the second word 1 is to be predicted."""
    note_ids = torch.tensor([[0, 1, -1, 2, 0, 1, -1], [0, 3, 0, 2, -2, 0, 0], [0, 0, 1, 0, 0, 0, 0]])
    return tiny_batch(lengths=(7, 6, 4))._replace(note_ids=note_ids)


def model_for(objective, **changes):
    return tiny_model(objective=ObjectiveConfig(objective=objective, notes=True, notes_mix=0.5), **changes)


def run(model, batch, notes):
    inputs, occurrences = notes.inputs(batch.map(torch.Tensor.numpy))
    return *model(batch, own_draws(model, batch), inputs), occurrences


def filled(seed=3, **changes):
    notes = dictionary(**changes)
    notes.notes.copy_(torch.randn(notes.notes.shape, generator=torch.Generator().manual_seed(seed)))
    notes.met[:] = torch.tensor([True, True, False, True])
    return notes


def test_notes_are_the_means_of_the_loops_and_no_gradient_enters_one():
    hidden = torch.randn(9, 5, dtype=torch.float64)
    spans = [(0, 0), (4, 5), (8, 8), (2, 2)]
    ends = np.array([[max(0, first - 3), min(9, last + 4)] for first, last in spans])
    windows = torch.from_numpy(window_places(ends))
    expected = torch.stack([loops.note(hidden, first, last, 3) for first, last in spans])
    torch.testing.assert_close(window_means(hidden.unsqueeze(0), windows), expected)
    none = torch.from_numpy(window_places(ends[:0]))
    assert window_means(hidden.unsqueeze(0), none).shape == (0, 5)
    hidden = torch.randn(1, 4, 3, requires_grad=True)
    blend(hidden, torch.tensor([1, 2]), torch.randn(2, 3), 0.25).sum().backward()
    assert hidden.grad[0].tolist() == [[1.0] * 3, [0.75] * 3, [0.75] * 3, [1.0] * 3]
    assert not window_means(hidden, torch.tensor([[0, 1]])).requires_grad


@pytest.mark.parametrize("objective", ["mlm", "mth", "electra"])
def test_the_model_takes_the_notes_of_its_last_hidden_states(objective):
    model, batch = model_for(objective, layernorm_position="pre"), noted_batch()
    states = []
    model.head.final_norm.register_forward_hook(lambda module, entered, left: states.append(left.detach()))
    _, taken, occurrences = run(model, batch, dictionary())
    spans = [(0, 1, 2), (0, 3, 3), (0, 5, 6), (1, 1, 1), (1, 3, 4), (2, 2, 2)]  # row, first, last
    hidden = next(state for state in states if state.shape == (3, 7, WIDTH))
    expected = [loops.note(hidden[row, : (7, 6, 4)[row]], first, last, 2) for row, first, last in spans]
    torch.testing.assert_close(taken.double(), torch.stack(expected), rtol=1e-6, atol=1e-6)
    assert occurrences.words.tolist() == [1, 2, 1, 3, 2, 1] and not taken.requires_grad


def test_the_update_is_that_of_the_loops_in_any_order():
    generator = torch.Generator().manual_seed(0)
    ours, other, twin = dictionary(width=5, notes_decay=0.3), dictionary(width=5, notes_decay=0.3), {}
    for _ in range(3):
        words = [1, 3, 1, 1, 4, 3]
        vectors = torch.randn(6, 5, generator=generator)
        names = np.array([[word, sequence, 0] for sequence, word in enumerate(words)])
        twin = loops.update(twin, list(zip(words, vectors.double(), strict=True)), 0.3)
        order = torch.randperm(6, generator=generator)
        ours.update(names[order.numpy()], vectors[order])
        other.update(names, vectors)
        assert torch.equal(ours.notes, other.notes)
    for word in (1, 3, 4):
        torch.testing.assert_close(ours.notes[word - 1].double(), twin[word], rtol=1e-6, atol=1e-7)
    assert ours.met.tolist() == [True, False, True, True] and not ours.notes[1].any()


def test_a_note_of_an_overflow_does_not_enter_and_16_bits_hold_one_to_their_precision():
    notes = dictionary(width=2)
    notes.update(np.array([[1, 0, 0], [2, 0, 1]]), torch.tensor([[1.0, 2.0], [float("inf"), 0.0]]))
    assert notes.met.tolist() == [True, False, False, False]
    notes.update(np.zeros((0, 3), np.int64), torch.zeros(0, 2))
    assert notes.notes.isfinite().all()
    for dtype, precision in (("fp16", 2e-3), ("bf16", 2e-2)):
        notes, vector = dictionary(width=5, notes_dtype=dtype), torch.randn(1, 5)
        notes.update(np.array([[2, 0, 0]]), vector)
        assert notes.notes.element_size() == 2 and notes.size_bytes == 4 * 5 * 2
        torch.testing.assert_close(notes.notes[1].float(), vector[0], rtol=precision, atol=precision)


@pytest.mark.parametrize("objective", ["mlm", "electra"])
@pytest.mark.parametrize("encoding", ["absolute", "ddrp"])
def test_the_input_is_that_of_the_loops(encoding, objective):
    """Before the LayerNorm, which ELECTRA's generator enters first, at the width of the discriminator."""
    model, batch, notes = model_for(objective, position_encoding=encoding), noted_batch(), filled()
    embeddings = model.embeddings
    entered = []
    embeddings.norm.register_forward_hook(lambda module, tensors, left: entered.append(tensors[0].detach()))
    run(model, batch, notes)
    assert len(entered) == 1 + (objective == "electra")
    embedded = embeddings.token(batch.input_ids) + embeddings.segment(batch.segment_ids)
    if encoding == "absolute":
        embedded = embedded + embeddings.absolute(batch.position_ids)
    twin = {word: notes.notes[word - 1].double() for word in (1, 2, 4)}
    for row, marks in enumerate(batch.note_ids.tolist()):
        words, occurrence = [], None
        for place, mark in enumerate(marks):
            occurrence = (mark, place) if mark > 0 else occurrence
            words.append(occurrence if mark else None)
        masked = (batch.labels[row] != IGNORED_LABEL).tolist()
        expected = loops.mixed_input(embedded[row], words, masked, twin, 0.5)
        torch.testing.assert_close(entered[0][row], expected)
    changed = (entered[0] != embedded).any(-1)
    assert changed[0].tolist() == [False, True, True, True, False, False, False], "the last word is to be predicted"
    assert not changed[1, 1], "word 3 has no note yet"


@pytest.mark.parametrize("objective", ["mlm", "mth", "electra"])
def test_a_row_of_several_documents_gives_the_sums_and_notes_of_one_each(objective):
    model, batch, notes = model_for(objective, seq_length=16), noted_batch(), filled()
    packed = packed_batch(batch, [[2, 0], [1]])
    ours, theirs = run(model, packed, notes), run(model, batch, notes)
    torch.testing.assert_close(ours[0], theirs[0])
    by_name = [
        {(s, p): vector for s, p, vector in zip(o.sequence_ids.tolist(), o.position_ids.tolist(), taken, strict=True)}
        for _, taken, o in (ours, theirs)
    ]
    torch.testing.assert_close(*by_name)
    assert len(by_name[0]) == 6
