"""Rare words, the unigram level and the shift to another kind of text, as slow loops count and measure them."""

import math
import os
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data import atomic
from megatron_ddrp.data.batches import word_counts
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.loader import Blend
from megatron_ddrp.data.batches.samples import SampleIndex
from megatron_ddrp.data.batches.word_counts import WordFinder, count_rare_words, find_occurrences, open_rare_words
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from tests.datasets import write_dataset
from tests.refusals import refused

CLS, SEP, PAD, UNK = 2, 3, 0, 1
A, B, C = 5, 6, 7  # start a word
X, Y = 8, 9  # continue one
STARTS = np.array([True] * 8 + [False] * 2)
FINDER = WordFinder(SimpleNamespace(word_starts=STARTS, word_ends=np.zeros(10, bool), special_ids=np.arange(5)))


def counted(words):
    return {tuple(words.word(i + 1)): int(words.counts[i]) for i in range(len(words))}


def words_by_loop(sequences):
    """Count words one token at a time."""
    found = Counter()
    for ids in sequences:
        word = None
        for piece in [*ids, UNK]:
            if piece < 5 or STARTS[piece]:
                if word:
                    found[tuple(word)] += 1
                word = [piece] if piece >= 5 else None
            elif word:
                word.append(piece)
    return found


def test_counts_are_those_of_a_loop_in_every_chunk_and_part(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    pieces = [UNK, A, A, A, B, C, X, X, Y]
    documents = [[rng.choice(pieces, rng.integers(1, 30)) for _ in range(rng.integers(1, 4))] for _ in range(60)]
    one, two = write_dataset(tmp_path / "one", documents[:40]), write_dataset(tmp_path / "two", documents[40:])
    parts, sequences, told = [(one, (3, 40)), (two, (0, 15))], sum(documents[3:55], []), []
    expected = words_by_loop(sequences)
    assert counted(count_rare_words(parts, FINDER, (1, 10**9), told.append)) == dict(expected)
    assert sum(told) == sum(map(len, sequences))
    monkeypatch.setattr(word_counts, "_CHUNK_TOKENS", 50)
    monkeypatch.setattr(word_counts, "_MERGE_WORDS", 7)
    rare = {word: count for word, count in expected.items() if 2 <= count <= 9}
    assert len(rare) > 5 and any(len(word) > 2 for word in rare)
    assert counted(count_rare_words(parts, FINDER, (2, 9))) == rare
    foreign = [(one, (0, 1)), (write_dataset(tmp_path / "foreign", [[[A], [10]]]), (0, 1))]
    words = "foreign: token ids from 5 to 10, but the vocabulary has 10 pieces"
    refused(words, count_rare_words, foreign, FINDER, (1, 9))


def test_words_are_numbered_in_a_row_and_neither_pieces_nor_halves_are(tmp_path):
    words = count_rare_words([(write_dataset(tmp_path / "d", [[[A, B, X, C, X, Y]]]), (0, 1))], FINDER, (1, 1))
    number = {tuple(words.word(i)): i for i in (1, 2, 3)}
    a, bx, cxy = number[(A,)], number[(B, X)], number[(C, X, Y)]
    expected = {
        (CLS, A, B, X, B, X, C, X, Y, SEP): [0, a, bx, -bx, bx, -bx, cxy, -cxy, -cxy, 0],
        # B, and C X before [UNK], are other words.
        (CLS, X, A, B, C, X, UNK, Y, SEP, PAD): [0, 0, a, 0, 0, 0, 0, 0, 0, 0],
        (CLS, Y, A, X, A, A, A, C, X, SEP): [0, 0, 0, 0, a, a, a, 0, 0, 0],
        # Goes on in the next row: perhaps B X X.
        (CLS, C, X, Y, A, A, A, B, X, SEP): [0, cxy, -cxy, -cxy, a, a, a, 0, 0, 0],
    }
    numbers = FINDER.number(words, np.array([*expected]), np.array([True, True, True, False]))
    assert numbers.tolist() == [*expected.values()]


def batch_of(note_ids, document_ids, labels=None):
    positions = [[row[:column].count(number) for column, number in enumerate(row)] for row in document_ids]
    note_ids, document_ids = np.array(note_ids), np.array(document_ids)
    positions = np.where(document_ids > 0, positions, 0)
    labels = np.full_like(note_ids, IGNORED_LABEL) if labels is None else np.array(labels)
    sequences = document_ids + 100 * np.arange(len(note_ids))[:, None]
    return Batch(note_ids * 0, labels, document_ids, positions, note_ids * 0, sequences, note_ids)


def test_windows_end_with_their_document_and_row():
    notes = [[0, 3, -3, 0, 0, 0, 1, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0, 3, -3]]
    documents = [[1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 10]
    found = find_occurrences(batch_of(notes, documents), window=3)
    assert found.words.tolist() == [3, 1, 2, 3] and found.windows.tolist() == [[0, 5], [5, 8], [10, 14], [15, 20]]
    assert found.position_ids.tolist() == [1, 1, 0, 8] and found.sequence_ids.tolist() == [1, 2, 101, 101]
    alone = find_occurrences(batch_of(notes, documents), window=0)
    assert alone.windows.tolist() == [[1, 3], [6, 7], [10, 11], [18, 20]]
    found = find_occurrences(batch_of([[0, 0]], [[1, 0]]), window=2)
    assert found.windows.shape == (0, 2) and not len(found.read_places)


def test_a_word_with_a_piece_to_predict_is_not_read_but_its_neighbour_is():
    labels = np.full((1, 8), IGNORED_LABEL)
    labels[0, [1, 4, 5]] = 7
    found = find_occurrences(batch_of([[3, -3, 3, -3, 0, 2, 4, -4]], [[1] * 8], labels), window=1)
    assert found.words.tolist() == [3, 3, 2, 4], "masked words are still taken notes of"
    assert (found.read_places.tolist(), found.read_words.tolist()) == ([2, 3, 6, 7], [3, 3, 4, 4])


@pytest.fixture
def corpus(tiny_corpus):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    dataset = IndexedDataset(tiny_corpus.prefix)
    return [(dataset, (0, dataset.num_documents))], tokenizer


def same_words(one, other):
    return np.array_equal(one.hashes, other.hashes) and np.array_equal(one.pieces, other.pieces)


def test_counts_are_kept_under_their_fingerprint(corpus, tmp_path, monkeypatch):
    parts, tokenizer = corpus
    words, first = open_rare_words(parts, tokenizer, (3, 9), tmp_path)
    assert "counted into" in first and len(words) > 20 and set(words.counts.tolist()) <= set(range(3, 10))
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode == Path(f"{parts[0][0].prefix}.idx").stat().st_mode
    other, _ = open_rare_words([(parts[0][0], (0, 300))], tokenizer, (3, 9), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and len(other) != len(words)
    monkeypatch.setattr(word_counts, "count_rare_words", None)  # from here on nothing may be counted
    again, line = open_rare_words(parts, tokenizer, (3, 9), tmp_path)
    assert same_words(again, words) and str(tmp_path) in line
    with pytest.raises(TypeError):
        open_rare_words(parts, tokenizer, (3, 10), tmp_path)


def test_a_damaged_cache_is_counted_again_with_a_notice(corpus, tmp_path, capsys):
    words, _ = open_rare_words(*corpus, (3, 9), tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    open_rare_words(*corpus, (3, 10), tmp_path)
    (other,) = set(tmp_path.iterdir()) - {path}
    contents = [b"", b"PK", bytes(len(whole)), whole[:-4], whole + b"\0" * 4, other.read_bytes()]
    places = range(0, len(whole), len(whole) // 15)
    contents += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in places]
    for content in contents:
        path.write_bytes(content)
        capsys.readouterr()
        again, line = open_rare_words(*corpus, (3, 9), tmp_path)
        assert f"{path}: damaged, or from an earlier version; the words are counted again" in capsys.readouterr().err
        assert same_words(again, words) and path.read_bytes() == whole and f"counted into {path}" in line


def test_read_only_data_are_counted_at_every_start(corpus, tiny_corpus, monkeypatch):
    folder = Path(tiny_corpus.prefix).parent
    before = sorted(folder.iterdir())
    monkeypatch.setattr(atomic, "_new_file", Mock(side_effect=OSError(30, "Read-only file system")))
    words, line = open_rare_words(*corpus, (3, 8))
    assert len(words) and sorted(folder.iterdir()) == before and "\n" not in line
    assert f"at every start, as {folder} cannot be written (Read-only file system); --index-cache-dir DIR" in line


def test_a_file_that_another_node_takes_away_is_left_to_it(corpus, tmp_path, monkeypatch):
    """This happens where locks of a file system hold on one node only: the other node writes the same content."""

    def take_away(temporary, _):
        temporary.unlink()
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "replace", take_away)
    words, line = open_rare_words(*corpus, (3, 9), tmp_path)
    assert len(words) and f"counted into {tmp_path}" in line and not list(tmp_path.iterdir())


def test_no_word_in_the_bounds_and_a_folder_that_cannot_be_written(corpus, tmp_path):
    line = "--notes-min-count 1000000 and --notes-max-count 2000000: .* wider"
    refused(line, open_rare_words, *corpus, (1000000, 2000000), tmp_path)
    (tmp_path / "file").touch()
    refused("--index-cache-dir", open_rare_words, *corpus, (3, 9), tmp_path / "file")


WORDS = 50
MANY, FEW = [2, 3, 4, 7, 8, 0, 5, 5], [5, 6, 1, 1, 9, 9, 9, 9]
SPECIAL = np.array([0, 1, 7])


def entropy(pieces):
    counts = Counter(pieces)
    return -sum(count / len(pieces) * math.log(count / len(pieces)) for count in counts.values())


@pytest.mark.parametrize(("weights", "copies"), [((1, 3), (1, 3)), (None, (9, 3))])
def test_the_unigram_level_is_the_entropy_of_what_training_reads_without_special_pieces(weights, copies, tmp_path):
    datasets = write_dataset(tmp_path / "many", [[MANY]] * 9), write_dataset(tmp_path / "few", [[FEW]] * 3)
    parts = [SampleIndex(one, (0, one.num_documents), 10) for one in datasets]
    samples = Blend(parts, weights and [Fraction(weight) for weight in weights])
    expected = entropy([piece for piece in MANY * copies[0] + FEW * copies[1] if piece not in SPECIAL])
    assert word_counts.unigram_loss(samples, SPECIAL, 10) == pytest.approx(expected, abs=1e-9)


def test_the_level_is_that_of_all_text_and_of_as_many_tokens_whatever_their_rows(tmp_path, monkeypatch):
    dataset = text(tmp_path, "words", (90, None), length=15)
    pieces = np.concatenate(list(dataset)).tolist()
    samples = {row: Blend([SampleIndex(dataset, (0, 90), row)]) for row in (17, 64, 128, 2048)}
    for most in (len(pieces), len(pieces) - 1, 400):
        monkeypatch.setattr(word_counts, "MOST_TOKENS", most)
        levels = {word_counts.unigram_loss(of_rows, [], row) for row, of_rows in samples.items()}
        assert len(levels) == 1 and (levels.pop() == pytest.approx(entropy(pieces), abs=0.01)) == (most > 400)


def slow_shift(predicted, own, other):
    """Subtract two cross-entropies of `predicted`, each under the add-one frequencies of one text."""
    pieces = set(predicted) | set(own) | set(other)

    def cross_entropy(known):
        counts = Counter(known)
        return -sum(math.log((counts[p] + 1) / (len(known) + len(pieces))) for p in predicted) / len(predicted)

    return cross_entropy(other) - cross_entropy(own)


def zipf(seed, count, order=None):
    """`count` ids with frequencies 1 / rank; `order` gives the ranks to other ids."""
    shares = 1 / np.arange(1, WORDS + 1)
    ids = np.random.default_rng(seed).choice(WORDS, count, p=shares / shares.sum())
    return ids if order is None else order[ids]


OTHER = np.random.default_rng(0).permutation(WORDS)
"""Another kind of text: the same ids with other frequencies."""


def text(folder, name, *kinds, length=40):
    """A dataset of documents; each kind is (number of documents, order of the ids)."""
    numbered = [(number, k, order) for k, (count, order) in enumerate(kinds) for number in range(count)]
    return write_dataset(folder / name, [[zipf([number, k], length, order)] for number, k, order in numbered])


def halves(dataset, first):
    """The samples of the first documents, and those of the others."""
    bounds = (0, first), (first, dataset.num_documents)
    return [SampleIndex(dataset, part, seq_length=22) for part in bounds]


def test_the_shift_is_that_of_a_slow_loop_and_ids_of_a_damaged_file_cost_no_memory():
    shift = word_counts.unigram_shift
    own, other, predicted, third = zipf(1, 300), zipf(2, 300, OTHER), zipf(3, 200), zipf(2, 300)
    expected = slow_shift(predicted.tolist(), own.tolist(), other.tolist())
    # Longer ones are thinned to one of each three.
    for left, right in ((own, other), (own, np.repeat(other, 3)), (np.repeat(own, 3), other)):
        assert shift(predicted, left, right) == pytest.approx(expected, rel=1e-12)
    assert shift(predicted, other, own) == pytest.approx(-expected, rel=1e-12)
    own, third, predicted = (ids.astype(np.int32) for ids in (own, third, predicted))
    sound = shift(predicted, own, third)
    predicted[7], own[5] = -3, 2**31 - 1
    assert shift(predicted, own, third) == pytest.approx(sound, abs=0.05)


def remark(training, validation):
    return word_counts.split_remark(training, validation, word_counts.split_shift(training, validation))


def shift_of(training, validation):
    return word_counts.shift_of(validation, 0, len(validation), training)


def test_another_kind_of_text_is_told_with_both_shifts(tmp_path):
    training, validation = halves(text(tmp_path, "two", (400, None), (40, OTHER)), 400)
    line = remark(training, validation) or ""
    shift, usual = shift_of(training, validation), word_counts.usual_shift(training, len(validation))
    assert shift > 0.5 > 0.05 > usual
    assert line.startswith(f"{tmp_path}/two: the validation text is of another kind than the training text")
    assert f"off by {shift:.2f} nats per piece; {max(usual, 0):.2f} is usual" in line and "\n" not in line


def test_text_of_one_kind_or_that_changes_as_much_and_little_text_are_not_told(tmp_path):
    assert remark(*halves(text(tmp_path, "one", (440, None)), 400)) is None
    generator = np.random.default_rng(1)
    kinds = [(40, generator.permutation(WORDS)) for _ in range(11)]  # as novels: each its own
    parts = halves(text(tmp_path, "many", *kinds), 400)
    assert shift_of(*parts) > 0.2 and remark(*parts) is None
    assert remark(*halves(text(tmp_path, "tiny", (9, None), (40, OTHER)), 9)) is None
    for documents, told in ((19, False), (20, True)):
        dataset = text(tmp_path, "few", (400, None), (documents, OTHER))
        assert bool(remark(*halves(dataset, 400))) == told, "a few documents are not judged"
        short = text(tmp_path, "short", (400, None), (documents - 1, OTHER), (30, None))
        cut = [[short.get(i)[: 40 if i < 399 + documents else 4]] for i in range(len(short))]
        cut = write_dataset(tmp_path / "cut", cut)
        assert remark(*halves(cut, 400)) is None, "documents under 8 tokens do not count"


def test_a_corpus_tells_it_for_each_dataset_that_split_divides(prose_then_code, tiny_corpus):
    gaps, tiny = [], str(tiny_corpus.prefix)

    def remarks(logging=None, **data):
        corpus = Corpus.open(Config().replace(data=data, model={"seq_length": 48}, logging=logging or {}))
        gaps.append(corpus.validation_gap)
        return corpus.split_remarks()

    line, _ = remarks(data_path=("1", tiny, "3", prose_then_code))
    assert line.startswith(f"{prose_then_code}: the validation text") and f"off by {gaps[0]:.2f} nats" in line
    for logging in ({"eval_interval": 0}, {"eval_iters": 0}):
        assert remarks(logging, data_path=(prose_then_code,)) == []
    remarks(train_data_path=(tiny,), valid_data_path=(prose_then_code,), split=None)
    assert gaps[1:] == [None] * 3
