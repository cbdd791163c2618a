"""Rare words: counted as words over whole corpora, cached once, found in a batch as written and nowhere else."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ddrp.data import atomic
from megatron_ddrp.data.batches import word_counts
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.word_counts import WordFinder, count_rare_words, find_occurrences, open_rare_words
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset
from tests.unit.data.damage import damaged

CLS, SEP, PAD, UNK = 2, 3, 0, 1
A, B, C = 5, 6, 7  # start a word
X, Y = 8, 9  # continue one
STARTS = np.array([True] * 8 + [False] * 2)
FINDER = WordFinder(SimpleNamespace(word_starts=STARTS, word_ends=np.zeros(10, bool), special_ids=np.arange(5)))


def write(folder, documents, name="d"):
    """One dataset; a document is a list of sequences."""
    return write_dataset(folder / name, documents)


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
    parts = [(write(tmp_path, documents[:40], "one"), (3, 40)), (write(tmp_path, documents[40:], "two"), (0, 15))]
    expected = words_by_loop([s for d in documents[3:55] for s in d])
    told = []
    assert counted(count_rare_words(parts, FINDER, (1, 10**9), told.append)) == dict(expected)
    assert sum(told) == sum(len(s) for d in documents[3:55] for s in d)
    monkeypatch.setattr(word_counts, "_CHUNK_TOKENS", 50)
    monkeypatch.setattr(word_counts, "_MERGE_WORDS", 7)
    rare = {word: count for word, count in expected.items() if 2 <= count <= 9}
    assert len(rare) > 5 and any(len(word) > 2 for word in rare)
    assert counted(count_rare_words(parts, FINDER, (2, 9))) == rare


def test_an_id_outside_the_vocabulary_is_refused_by_the_name_of_its_dataset(tmp_path):
    parts = [(write(tmp_path, [[[A, X]]], "one"), (0, 1)), (write(tmp_path, [[[A], [10]]], "two"), (0, 1))]
    with pytest.raises(UserError, match="two: token ids from 5 to 10, but the vocabulary has 10 pieces"):
        count_rare_words(parts, FINDER, (1, 9))


def test_words_are_numbered_in_a_row_and_neither_pieces_nor_halves_are(tmp_path):
    words = count_rare_words([(write(tmp_path, [[[A, B, X, C, X, Y]]]), (0, 1))], FINDER, (1, 1))
    number = {tuple(words.word(i)): i for i in (1, 2, 3)}
    a, bx, cxy = number[(A,)], number[(B, X)], number[(C, X, Y)]
    rows = np.array(
        [
            [CLS, A, B, X, B, X, C, X, Y, SEP],
            [CLS, X, A, B, C, X, UNK, Y, SEP, PAD],  # B, and C X before [UNK], are other words
            [CLS, Y, A, X, A, A, A, C, X, SEP],
            [CLS, C, X, Y, A, A, A, B, X, SEP],  # goes on in the next row: perhaps B X X
        ]
    )
    numbers = FINDER.number(words, rows, np.array([True, True, True, False]))
    assert numbers.tolist() == [
        [0, a, bx, -bx, bx, -bx, cxy, -cxy, -cxy, 0],
        [0, 0, a, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, a, a, a, 0, 0, 0],
        [0, cxy, -cxy, -cxy, a, a, a, 0, 0, 0],
    ]


def batch_of(note_ids, document_ids, labels=None):
    note_ids, document_ids = np.array(note_ids), np.array(document_ids)
    labels = np.full_like(note_ids, IGNORED_LABEL) if labels is None else np.array(labels)
    positions = np.zeros_like(note_ids)
    for row, documents in enumerate(document_ids):
        for column in range(1, len(documents)):
            if documents[column] == documents[column - 1] != 0:
                positions[row, column] = positions[row, column - 1] + 1
    sequences = document_ids + 100 * np.arange(len(note_ids))[:, None]
    return Batch(note_ids * 0, labels, document_ids, positions, note_ids * 0, sequences, note_ids)


def test_windows_end_with_their_document_and_row():
    notes = [[0, 3, -3, 0, 0, 0, 1, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0, 3, -3]]
    documents = [[1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 10]
    found = find_occurrences(batch_of(notes, documents), window=3)
    assert found.words.tolist() == [3, 1, 2, 3]
    assert found.windows.tolist() == [[0, 5], [5, 8], [10, 14], [15, 20]]
    assert found.position_ids.tolist() == [1, 1, 0, 8]
    assert found.sequence_ids.tolist() == [1, 2, 101, 101]
    assert find_occurrences(batch_of(notes, documents), window=0).windows.tolist() == [
        [1, 3],
        [6, 7],
        [10, 11],
        [18, 20],
    ]


def test_a_word_with_a_piece_to_predict_is_not_read_but_its_neighbour_is():
    notes, documents = [[3, -3, 3, -3, 0, 2, 4, -4]], [[1] * 8]
    labels = [[IGNORED_LABEL, 7, *[IGNORED_LABEL] * 2, 7, 7, *[IGNORED_LABEL] * 2]]
    found = find_occurrences(batch_of(notes, documents, labels), window=1)
    assert found.words.tolist() == [3, 3, 2, 4], "masked words are still taken notes of"
    assert found.read_places.tolist() == [2, 3, 6, 7]
    assert found.read_words.tolist() == [3, 3, 4, 4]


def test_a_batch_without_rare_words():
    found = find_occurrences(batch_of([[0, 0]], [[1, 0]]), window=2)
    assert found.windows.shape == (0, 2) and not len(found.read_places)


@pytest.fixture
def corpus(tiny_corpus):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    dataset = IndexedDataset(tiny_corpus.prefix)
    return [(dataset, (0, dataset.num_documents))], tokenizer


def test_counts_are_kept_under_their_fingerprint(corpus, tmp_path, monkeypatch):
    parts, tokenizer = corpus
    words, first = open_rare_words(parts, tokenizer, (3, 9), tmp_path)
    assert "counted into" in first
    assert len(words) > 20 and set(words.counts.tolist()) <= set(range(3, 10))
    other, _ = open_rare_words([(parts[0][0], (0, 300))], tokenizer, (3, 9), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and len(other) != len(words)
    monkeypatch.setattr(word_counts, "count_rare_words", None)  # from here on nothing may be counted
    again, line = open_rare_words(parts, tokenizer, (3, 9), tmp_path)
    assert np.array_equal(again.hashes, words.hashes) and np.array_equal(again.pieces, words.pieces)
    assert str(tmp_path) in line
    with pytest.raises(TypeError):
        open_rare_words(parts, tokenizer, (3, 10), tmp_path)


def test_a_damaged_cache_is_counted_again_with_a_notice(corpus, tmp_path, capsys):
    words, _ = open_rare_words(*corpus, (3, 9), tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    open_rare_words(*corpus, (3, 10), tmp_path)
    (other,) = set(tmp_path.iterdir()) - {path}
    harms = (damaged(whole, seed) for seed in range(60))
    for content in (b"", b"PK", bytes(len(whole)), whole[:-4], whole + b"\0" * 4, other.read_bytes(), *harms):
        path.write_bytes(content)
        capsys.readouterr()
        again, line = open_rare_words(*corpus, (3, 9), tmp_path)
        assert f"{path}: damaged, or from an earlier version; the words are counted again" in capsys.readouterr().err
        assert np.array_equal(again.hashes, words.hashes) and np.array_equal(again.pieces, words.pieces)
        assert path.read_bytes() == whole and f"counted into {path}" in line


def test_read_only_data_are_counted_at_every_start(corpus, tiny_corpus, monkeypatch):
    def refuse_writing(*_):
        raise OSError(30, "Read-only file system")

    folder = Path(tiny_corpus.prefix).parent
    before = sorted(folder.iterdir())
    monkeypatch.setattr(atomic, "_new_file", refuse_writing)
    words, line = open_rare_words(*corpus, (3, 8))
    assert len(words) and sorted(folder.iterdir()) == before and "\n" not in line
    assert f"at every start, as {folder} cannot be written (Read-only file system); --index-cache-dir DIR" in line


def test_a_file_that_another_node_takes_away_is_left_to_it(corpus, tmp_path, monkeypatch):
    """Let another writer remove the open file, as happens on file systems whose locks hold on one node only."""
    monkeypatch.setattr(atomic, "take_lock", lambda *_: True)
    sync, others = atomic.sync, iter([True])

    def sync_beside_another(stream):
        for _ in others:
            assert "counted into" in open_rare_words(*corpus, (3, 9), tmp_path)[1]
        sync(stream)

    monkeypatch.setattr(atomic, "sync", sync_beside_another)
    monkeypatch.setattr(word_counts, "_one_at_a_time", lambda _: nullcontext())
    _, line = open_rare_words(*corpus, (3, 9), tmp_path)
    (path,) = tmp_path.iterdir()
    assert line.endswith(f"counted into {path}")
    assert path.stat().st_mode == Path(f"{corpus[0][0][0].prefix}.idx").stat().st_mode
    monkeypatch.setattr(word_counts, "count_rare_words", None)
    assert open_rare_words(*corpus, (3, 9), tmp_path)[1].endswith(f"as counted in {path}")


def test_no_word_in_the_bounds_is_an_error(corpus, tmp_path):
    with pytest.raises(UserError, match="--notes-min-count 1000000 and --notes-max-count 2000000: .* wider"):
        open_rare_words(*corpus, (1000000, 2000000), tmp_path)


def test_a_folder_that_cannot_be_written(corpus, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="--index-cache-dir"):
        open_rare_words(*corpus, (3, 9), blocked)
