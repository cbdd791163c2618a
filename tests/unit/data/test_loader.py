"""The same rows with the same masks in every layout and after every resume; cutting; prefetching; clear refusals."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.loader import Blend, SampleReader, Share, iterate
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.errors import UserError
from tests.datasets import FAKE_VOCAB, FakeSamples, fake_loader, fake_tokenizer

PAD, UNK, CLS, SEP, MASK = SPECIAL = range(5)
SEQ = 60


def fake_samples(num_samples=50):
    """Samples of lengths that repeat, so that sorting meets ties."""
    rng = np.random.default_rng(0)
    return FakeSamples(rng.integers(1, SEQ - 1, num_samples), rng)


def make_loader(samples=None, *, micro=2, world=1, rank=0, global_batch=16, seed=7):
    return fake_loader(samples or fake_samples(), Share(global_batch, micro, rank, world), SEQ, seed=seed)


def rows_of(batches):
    """Sorted (sequence id, valid input ids, valid labels) of all rows."""
    rows = []
    for batch in batches:
        for row in range(len(batch.input_ids)):
            n = int(batch.document_ids[row].sum())
            assert np.all(batch.input_ids[row, n:] == PAD) and np.all(batch.labels[row, n:] == IGNORED_LABEL)
            fields = batch.sequence_ids[row, 0], tuple(batch.input_ids[row, :n]), tuple(batch.labels[row, :n])
            rows.append(fields)
    return sorted(rows)


def test_every_layout_gives_the_same_rows():
    for consumed in (0, 48):  # the second global batch spans two epochs
        expected = rows_of(make_loader(micro=16).step(consumed))
        assert [row[0] for row in expected] == list(range(consumed, consumed + 16))
        for world in (1, 2, 4):
            for micro in (1, 2, 4):
                ranks = [make_loader(micro=micro, world=world, rank=rank).step(consumed) for rank in range(world)]
                assert all(len(batches) == 16 // (micro * world) for batches in ranks)
                assert rows_of(sum(ranks, [])) == expected


def test_ranks_hold_rows_of_similar_length_at_the_same_time():
    ranks = [make_loader(world=2, rank=rank).step(0) for rank in range(2)]
    longest = [[batch.document_ids.sum(axis=1).max() for batch in batches] for batches in ranks]
    shortest = [[batch.document_ids.sum(axis=1).min() for batch in batches] for batches in ranks]
    for step in range(3):
        assert max(row[step] for row in longest) <= min(row[step + 1] for row in shortest)


def test_the_fields_of_a_batch():
    samples = fake_samples()
    by_ids = {tuple(ids): index for index, ids in enumerate(samples.ids)}
    for batch in make_loader(samples, micro=4).step(32):
        fields = batch.arrays()
        assert all(field.dtype == np.int64 and field.shape == batch.input_ids.shape for field in fields)
        assert all(field.flags.c_contiguous for field in fields)
        originals = np.where(batch.labels == IGNORED_LABEL, batch.input_ids, batch.labels)
        for row in range(4):
            n = int(batch.document_ids[row].sum())
            assert originals[row, 0] == CLS and originals[row, n - 1] == SEP
            assert tuple(originals[row, 1 : n - 1]) in by_ids
            assert batch.document_ids[row].tolist() == [1] * n + [0] * (batch.input_ids.shape[1] - n)
            assert batch.position_ids[row, :n].tolist() == list(range(n))
            assert not batch.position_ids[row, n:].any() and not batch.sequence_ids[row, n:].any()
            assert np.unique(batch.sequence_ids[row, :n]).size == 1
            assert (batch.labels[row] != IGNORED_LABEL).sum() >= 1
        assert not batch.segment_ids.any()


def test_the_text_of_a_full_row_may_continue_behind_it():
    """A full row may end inside its text where rare words are marked; a shorter row holds the end of its text."""
    seen = []

    def mark(ids, ends_here):
        seen.append((ids, ends_here.tolist()))
        return np.zeros_like(ids)

    lengths = np.array([SEQ, SEQ - 1, 9])
    samples = FakeSamples(lengths - 2, np.random.default_rng(0))
    tokenizer = fake_tokenizer(np.ones(FAKE_VOCAB, bool))
    reader = SampleReader(Blend([samples]), tokenizer, Masker(tokenizer), SEQ, mark)
    batch = reader.read(np.arange(3), np.zeros(3, int), np.arange(3), lengths)
    ((ids, ends_here),) = seen
    assert ends_here == [False, True, True] and batch.note_ids.shape == (3, SEQ)
    assert (ids != MASK).all() and (batch.input_ids == MASK).any()  # read before they are masked


def test_rows_are_cut_to_their_longest():
    cut = make_loader().step(0)
    widths = [batch.input_ids.shape[1] for batch in cut]
    for batch, width in zip(cut, widths, strict=True):
        longest = batch.document_ids.sum(axis=1).max()
        assert width == min(SEQ, -(-longest // 8) * 8)
    assert len(set(widths)) > 1


def test_each_epoch_holds_each_sample_once_in_its_own_order():
    samples = fake_samples(48)
    by_ids = {tuple(ids): index for index, ids in enumerate(samples.ids)}
    orders = []
    for epoch in range(2):
        order = []
        for step in range(3):
            for _, inputs, labels in rows_of(make_loader(samples).step(48 * epoch + 16 * step)):
                originals = [i if label == IGNORED_LABEL else label for i, label in zip(inputs, labels, strict=True)]
                order.append(by_ids[tuple(originals[1:-1])])
        assert sorted(order) == list(range(48))
        orders.append(order)
    assert orders[0] != orders[1]


def test_masks_change_with_the_epoch_and_stay_in_every_evaluation():
    def originals(rows):
        """Sample → labels, by the ids before masking."""
        return {tuple(np.where(np.array(labels) == IGNORED_LABEL, ids, labels)): labels for _, ids, labels in rows}

    samples = fake_samples(16)
    first, second = (rows_of(make_loader(samples).step(consumed)) for consumed in (0, 16))
    assert originals(first).keys() == originals(second).keys() and len(originals(first)) == 16
    assert sum(originals(first)[ids] != labels for ids, labels in originals(second).items()) > 8
    assert rows_of(make_loader(samples).step(0)) == first


def test_seed_decides_the_order():
    first, second = (rows_of(make_loader(seed=seed).step(0)) for seed in (1, 2))
    assert [len(row[1]) for row in first] != [len(row[1]) for row in second]


def test_resuming_midway_equals_going_on():
    uninterrupted = list(iterate(make_loader(), 0, 8))
    resumed = list(iterate(make_loader(), 5 * 16, 3))
    for expected, batches in zip(uninterrupted[5:], resumed, strict=True):
        for one, other in zip(expected, batches, strict=True):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(one.arrays(), other.arrays(), strict=True))


@pytest.mark.parametrize(
    ("global_batch", "nearest"), [(20, "16 or 24"), (3, "nearest: 8"), (0, "nearest: 8"), (-4, "nearest: 8")]
)
def test_refuses_a_global_batch_that_does_not_divide(global_batch, nearest):
    with pytest.raises(UserError, match=nearest) as error:
        make_loader(world=4, global_batch=global_batch)
    assert error.value.exit_code == 2 and f"--global-batch-size is {global_batch}:" in str(error.value)


@pytest.mark.parametrize("wrong", [FAKE_VOCAB, -1])
def test_refuses_ids_outside_the_vocabulary(wrong):
    samples = fake_samples(16)
    samples.ids[3][0] = wrong
    with pytest.raises(UserError, match=f"corpus: token ids .*{wrong}.*, but the vocabulary has 300 pieces") as error:
        make_loader(samples).step(0)
    assert error.value.exit_code == 1


def test_the_error_names_the_corpus_of_the_id():
    """The row of a batch and the number of its sample point to different corpora."""
    corpora = [fake_samples(16), fake_samples(16), fake_samples(16)]
    for number, corpus in enumerate(corpora):
        corpus.prefix = f"corpus{number}"
    corpora[1].ids[3][0] = FAKE_VOCAB
    blend, tokenizer = Blend(corpora), fake_tokenizer(np.ones(FAKE_VOCAB, bool))
    indices = np.array([40, 19, 0])
    with pytest.raises(UserError, match=f"^corpus1: token ids from . to {FAKE_VOCAB},"):
        reader = SampleReader(blend, tokenizer, Masker(tokenizer), SEQ)
        reader.read(np.arange(3), np.zeros(3, int), indices, blend.lengths(indices))


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batch-loader")]


class CountingLoader:
    """Stands for a loader: notes which steps were asked for, and fails at one of them."""

    global_batch_size = 16

    def __init__(self, fails_at=None):
        self.asked = []
        self.fails_at = fails_at

    def step(self, consumed_samples, steps_done):
        self.asked.append(consumed_samples)
        if consumed_samples == self.fails_at:
            raise UserError("corpus: unreadable")
        return [consumed_samples]


def test_iterate_yields_every_step_in_order():
    assert list(iterate(CountingLoader(), 32, 5)) == [[32], [48], [64], [80], [96]]
    assert list(iterate(CountingLoader(), 32, 1)) == [[32]]
    assert list(iterate(CountingLoader(), 32, 0)) == []
    assert not worker_threads()


def test_iterate_raises_the_thread_s_error_at_its_step():
    seen = []
    with pytest.raises(UserError, match="corpus: unreadable"):
        for batches in iterate(CountingLoader(fails_at=32), 0, 9):
            seen.append(batches)
    assert seen == [[0], [16]]
    assert not worker_threads()


def test_iterate_stays_two_steps_ahead_and_closes_when_the_consumer_stops():
    loader = CountingLoader()
    stream = iterate(loader, 0, 1000)
    assert next(stream) == [0]
    stream.close()
    assert set(loader.asked) <= {0, 16, 32} and loader.asked[0] == 0
    assert not worker_threads()


def test_the_data_path_does_not_import_torch():
    program = "import sys, megatron_ddrp.data.batches.loader; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
