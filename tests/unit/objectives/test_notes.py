"""Taking Notes on the Fly against its loops: notes, update, mixed input; what is read, when, and by whom."""

import numpy as np
import pytest
import torch

from megatron_ddrp.config import ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.word_counts import RareWords
from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import blend, window_means
from megatron_ddrp.objectives.electra import NoteDictionary, window_places
from tests.reference import notes as loops
from tests.unit.model.test_electra import with_keys
from tests.unit.model.tiny import packed_batch, some_draws, tiny_batch, tiny_config

WORDS = RareWords(np.arange(4, dtype=np.uint64), np.full(4, 100), np.arange(4), np.arange(1, 5))
WIDTH = 12


def dictionary(width=WIDTH, **changes):
    return NoteDictionary(WORDS, width, ObjectiveConfig(notes=True, notes_window=2, **changes))


def noted_batch(predicted=2, seed=0):
    """Rows of 7, 6 and 4 tokens with words 1 (two pieces), 2 and 3; a piece of the second word 1 is to be predicted."""
    batch = tiny_batch(lengths=(7, 6, 4), predicted=predicted, seed=seed)
    note_ids = torch.tensor([[0, 1, -1, 2, 0, 1, -1], [0, 3, 0, 2, -2, 0, 0], [0, 0, 1, 0, 0, 0, 0]])
    return batch._replace(note_ids=note_ids)


def arrays(batch):
    return batch.map(lambda tensor: tensor.numpy())


def model_for(objective="mlm", seed=0, share=0.5, **changes):
    torch.manual_seed(seed)
    config = tiny_config(**changes)
    return build_model(config, objective=ObjectiveConfig(objective=objective, notes=True, notes_mix=share)).double()


def run(model, batch, notes, objective="mlm"):
    draws = some_draws(batch) if objective != "mlm" else some_draws(batch, heads=((), ()), tokens=0)
    if objective == "electra":
        draws = with_keys(batch, draws)
    inputs, occurrences = notes.inputs(arrays(batch))
    return *model(batch, draws, inputs), occurrences


def filled(seed=3, **changes):
    notes = dictionary(**changes)
    notes.notes.copy_(torch.randn(notes.notes.shape, generator=torch.Generator().manual_seed(seed)))
    notes.met[:] = torch.tensor([True, True, False, True])
    return notes


def test_notes_are_the_means_of_the_loops():
    hidden = torch.randn(9, 5, dtype=torch.float64)
    spans = [(0, 0), (4, 5), (8, 8), (2, 2)]
    ends = np.array([[max(0, first - 3), min(9, last + 4)] for first, last in spans])
    windows = torch.from_numpy(window_places(ends))
    expected = torch.stack([loops.note(hidden, first, last, 3) for first, last in spans])
    torch.testing.assert_close(window_means(hidden.unsqueeze(0), windows), expected)
    none = torch.from_numpy(window_places(ends[:0]))
    assert window_means(hidden.unsqueeze(0), none).shape == (0, 5)


@pytest.mark.parametrize("objective", ["mlm", "mth", "electra"])
def test_the_model_takes_the_notes_of_its_last_hidden_states(objective):
    model, batch = model_for(objective, layernorm_position="pre"), noted_batch()
    states = []
    model.head.final_norm.register_forward_hook(lambda module, entered, left: states.append(left.detach()))
    _, taken, occurrences = run(model, batch, dictionary(), objective)
    spans = [(0, 1, 2), (0, 3, 3), (0, 5, 6), (1, 1, 1), (1, 3, 4), (2, 2, 2)]  # row, first, last
    lengths = (7, 6, 4)
    hidden = next(state for state in states if state.shape == (3, 7, WIDTH))
    expected = [loops.note(hidden[row, : lengths[row]], first, last, 2) for row, first, last in spans]
    torch.testing.assert_close(taken.double(), torch.stack(expected), rtol=1e-6, atol=1e-6)
    assert occurrences.words.tolist() == [1, 2, 1, 3, 2, 1]
    assert not taken.requires_grad


def test_the_update_is_that_of_the_loops_in_any_order():
    generator = torch.Generator().manual_seed(0)
    ours, twin = dictionary(width=5, notes_decay=0.3), {}
    for _ in range(3):
        words = [1, 3, 1, 1, 4, 3]
        vectors = torch.randn(6, 5, generator=generator)
        names = np.array([[word, sequence, 0] for sequence, word in enumerate(words)])
        twin = loops.update(twin, list(zip(words, vectors.double(), strict=True)), 0.3)
        order = torch.randperm(6, generator=generator)
        ours.update(names[order.numpy()], vectors[order])
    for word in (1, 3, 4):
        torch.testing.assert_close(ours.notes[word - 1].double(), twin[word], rtol=1e-6, atol=1e-7)
    assert ours.met.tolist() == [True, False, True, True] and not ours.notes[1].any()


def test_a_first_note_enters_unblended_and_the_order_changes_no_bit():
    vectors = torch.randn(40, 5)
    names = np.array([[1, sequence, position] for sequence in range(8) for position in range(5)])
    one, other = dictionary(width=5), dictionary(width=5)
    one.update(names, vectors)
    order = torch.randperm(40)
    other.update(names[order.numpy()], vectors[order])
    assert torch.equal(one.notes, other.notes)
    torch.testing.assert_close(one.notes[0], vectors.mean(0))


def test_notes_of_an_overflow_are_left_out():
    notes = dictionary(width=2)
    notes.update(np.array([[1, 0, 0], [2, 0, 1]]), torch.tensor([[1.0, 2.0], [float("inf"), 0.0]]))
    assert notes.met.tolist() == [True, False, False, False]
    notes.update(np.zeros((0, 3), np.int64), torch.zeros(0, 2))
    assert notes.notes.isfinite().all()


@pytest.mark.parametrize("objective", ["mlm", "electra"])
@pytest.mark.parametrize("encoding", ["absolute", "ddrp"])
def test_the_input_is_that_of_the_loops(encoding, objective):
    """Before the LayerNorm, which ELECTRA's generator enters first, at the width of the discriminator."""
    model, batch, notes = model_for(objective, position_encoding=encoding), noted_batch(), filled()
    embeddings = model.embeddings
    entered = []
    embeddings.norm.register_forward_hook(lambda module, tensors, left: entered.append(tensors[0].detach()))
    run(model, batch, notes, objective)
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
def test_a_masked_words_note_is_never_read(objective):
    model, batch = model_for(objective), noted_batch()
    labels = batch.labels.clone()
    labels[0, 2] = labels[2, 2] = 4  # now every occurrence of word 1 has a piece to predict
    batch = batch._replace(labels=labels)
    one, other = filled(), filled()
    other.notes[0] += 100.0
    torch.testing.assert_close(
        run(model, batch, one, objective)[0], run(model, batch, other, objective)[0], rtol=0, atol=0
    )
    other.notes[1] += 1.0
    assert not torch.equal(run(model, batch, one, objective)[0], run(model, batch, other, objective)[0])


@pytest.mark.parametrize("objective", ["mlm", "mth", "electra"])
def test_lambda_0_is_plain_training_to_the_bit(objective):
    batch = noted_batch()
    with_notes, plain = model_for(objective, share=0.0), model_for(objective, share=0.0)
    sums, _, _ = run(with_notes, batch, filled(), objective)
    draws = some_draws(batch) if objective != "mlm" else some_draws(batch, heads=((), ()), tokens=0)
    expected = plain(batch, with_keys(batch, draws) if objective == "electra" else draws).sums
    assert torch.equal(sums, expected)
    sums.sum().backward()
    expected.sum().backward()
    for (name, ours), theirs in zip(with_notes.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_no_gradient_enters_a_note():
    hidden = torch.randn(1, 4, 3, requires_grad=True)
    vectors = torch.randn(2, 3)
    blended = blend(hidden, torch.tensor([1, 2]), vectors, 0.25)
    blended.sum().backward()
    assert hidden.grad[0].tolist() == [[1.0] * 3, [0.75] * 3, [0.75] * 3, [1.0] * 3]
    assert not window_means(hidden, torch.tensor([[0, 1]])).requires_grad


@pytest.mark.parametrize("objective", ["mlm", "mth", "electra"])
def test_a_row_of_several_documents_gives_the_sums_and_notes_of_one_each(objective):
    model, batch, notes = model_for(objective, seq_length=16), noted_batch(), filled()
    packed = packed_batch(batch, [[2, 0], [1]])
    ours, theirs = run(model, packed, notes, objective), run(model, batch, notes, objective)
    torch.testing.assert_close(ours[0], theirs[0])
    by_name = [
        {(s, p): vector for s, p, vector in zip(o.sequence_ids.tolist(), o.position_ids.tolist(), taken, strict=True)}
        for _, taken, o in (ours, theirs)
    ]
    assert by_name[0].keys() == by_name[1].keys() and len(by_name[0]) == 6
    for name, vector in by_name[1].items():
        torch.testing.assert_close(by_name[0][name], vector)


def test_sixteen_bits_hold_the_notes_to_their_precision():
    for dtype, precision in (("fp16", 2e-3), ("bf16", 2e-2)):
        notes = dictionary(width=5, notes_dtype=dtype)
        vector = torch.randn(1, 5)
        notes.update(np.array([[2, 0, 0]]), vector)
        assert notes.notes.element_size() == 2 and notes.size_bytes == 4 * 5 * 2
        torch.testing.assert_close(notes.notes[1].float(), vector[0], rtol=precision, atol=precision)
