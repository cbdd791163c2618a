"""The quickstart's own task: balanced, without giveaways, from different documents, the same every time."""

import random
from collections import Counter

from tools.swap_words import main, make_task, sentences, swap

NOUNS = ["parser", "table", "reader", "socket", "thread", "buffer", "module", "client", "server", "window"]
VERBS = ["returns", "opens", "closes", "copies", "checks", "joins", "splits", "sorts"]


def corpus(documents=80):
    rng = random.Random(0)
    return [
        " ".join(
            f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} a {rng.choice(NOUNS)} number {document}x "
            f"before the {rng.choice(NOUNS)}, {rng.choice(VERBS)} Python."
            for _ in range(6)
        )
        for document in range(documents)
    ]


def test_sentences_are_whole_prose_of_6_to_30_words():
    text = "Too short. This one has as many words as are needed.\n" + (
        "Many "
        + "words " * 40
        + "end.\nCode = x[1] + y[2] is not a sentence of prose.\nThis line has no full stop in it"
    )
    assert sentences(text) == ["This one has as many words as are needed."]


def test_a_swap_moves_two_inner_words_and_nothing_else():
    sentence = "Opens the file, reads every Line and closes it quietly."
    for seed in range(50):
        changed = swap(sentence, random.Random(seed))
        old, new = sentence.split(), changed.split()
        moved = [index for index in range(len(old)) if old[index] != new[index]]
        assert len(moved) == 2
        assert old[moved[0]] == new[moved[1]] and old[moved[1]] == new[moved[0]]
        assert not {0, 2, 5, len(old) - 1} & set(moved)  # first, with a comma, with a capital, last


def test_equal_words_are_not_swapped():
    assert swap("Very much much much much much.", random.Random(0)) is None


def test_every_sentence_comes_once_as_it_is_and_once_changed_in_one_of_the_files():
    train, dev = make_task(corpus(), train=100, dev=30, seed=1)
    assert len(train) == 100
    assert len(dev) == 30
    for rows in (train, dev):
        assert Counter(label for _, label in rows) == {"real": len(rows) // 2, "swapped": len(rows) // 2}
    forms = [
        Counter((" ".join(sorted(s.split())), label) for s, label in rows) for rows in (train, dev)
    ]  # words, label
    for counts, rows in zip(forms, (train, dev), strict=True):
        bags = {words for words, _ in counts}
        assert set(counts.values()) == {1} and len(bags) == len(rows) // 2
        assert counts.keys() == {(words, label) for words in bags for label in ("real", "swapped")}
    assert not {words for words, _ in forms[0]} & {words for words, _ in forms[1]}


def test_training_and_development_documents_differ():
    train, dev = make_task(corpus(), train=1000, dev=40, seed=1)
    documents = [
        {word for sentence, _ in rows for word in sentence.split() if word.endswith("x")} for rows in (train, dev)
    ]
    assert documents[0] and documents[1]
    assert not documents[0] & documents[1]


def test_real_sentences_are_real_and_changed_ones_are_not():
    real = {sentence for text in corpus() for sentence in sentences(text)}
    train, dev = make_task(corpus(), train=100, dev=30, seed=1)
    assert all((sentence in real) == (label == "real") for sentence, label in train + dev)


def test_the_seed_decides_everything():
    assert make_task(corpus(), 100, 30, 1) == make_task(corpus(), 100, 30, 1)
    assert make_task(corpus(), 100, 30, 1) != make_task(corpus(), 100, 30, 2)


def test_the_files_are_a_task_of_named_labels(tmp_path, monkeypatch):
    from megatron_ddrp.tasks.finetune.options import TaskFiles
    from megatron_ddrp.tasks.finetune.task_files import read_task

    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(corpus()))
    out = tmp_path / "word-order"
    sizes = ["--train-rows", "100", "--dev-rows", "20"]
    monkeypatch.setattr("sys.argv", ["swap_words.py", "--input", str(path), "--output-dir", str(out), *sizes])
    main()
    data = read_task(TaskFiles(train=out / "train.csv", valid=out / "valid.csv"))
    assert (data.task.name, data.task.metric, data.task.labels) == ("word-order", "accuracy", ("real", "swapped"))
    assert data.baseline == 0.5
    real = {sentence for text in corpus() for sentence in sentences(text)}
    for examples, count in ((data.train, 100), (data.dev["valid"], 20)):
        assert len(examples) == count
        assert all((example.texts[0] in real) == (example.label == 0) for example in examples)
