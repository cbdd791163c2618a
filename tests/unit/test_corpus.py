"""From the data flags to batches: blends, separate validation data, and the same samples in every layout."""

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_ddrp.config import Config
from megatron_ddrp.config.registry import MASKINGS
from megatron_ddrp.corpus import MANY_EPOCHS, Corpus
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.loader import VALIDATION_SEED
from megatron_ddrp.data.dataset.merging import shuffle
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from tests.conftest import TinyCorpus, write_vocabulary
from tests.datasets import wordpiece_job
from tests.refusals import refused, wrong_arguments
from tests.unit.data.tokenizer_folders import NAMES, byte_bpe
from tests.unit.data.tokenizer_folders import write as write_tokenizer_folder


@pytest.fixture(scope="module")
def parts(tiny_corpus: TinyCorpus, tmp_path_factory) -> dict[str, str]:
    """The tiny corpus in three unequal parts `a`, `b`, `c`, `all` of it in one, and `short`, too short for a sample."""
    folder = tmp_path_factory.mktemp("parts")
    lines = tiny_corpus.text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    texts = {"a": lines[:350], "b": lines[350:420], "c": lines[420:], "all": lines, "short": ['{"text": "a b c"}\n']}
    return {name: dataset(folder, name, text, tiny_corpus.vocab_file) for name, text in texts.items()}


def dataset(folder: Path, name: str, lines: list[str], vocab_file: Path) -> str:
    """Preprocess JSON lines; the prefix of what comes out."""
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    job = wordpiece_job(vocab_file, folder / name, folder / f"{name}.jsonl")
    return str(preprocess(job).prefixes[0])


@pytest.fixture
def make_config(tiny_corpus):
    def make(data_path=None, *, data=(), micro=4, seq_length=48, **training) -> Config:
        training = {"micro_batch_size": micro, "global_batch_size": 32, "train_iters": 50} | training
        data = {"vocab_file": str(tiny_corpus.vocab_file), "split": None, "data_path": data_path} | dict(data)
        return Config().replace(data=data, training=training, model={"seq_length": seq_length})

    return make


@pytest.fixture
def opened(make_config):
    return lambda *given, **settings: Corpus.open(make_config(*given, **settings))


def rows_of(config, consumed, split="train", world=1, rows_for="cpu"):
    """Sorted (position, ids, labels) of the documents of a step, over all ranks."""
    rows = []
    for rank in range(world):
        for batch in Corpus.open(config).loader(split, rank, world, rows_for).step(consumed):
            for row in range(len(batch.input_ids)):
                for number in range(1, batch.document_ids[row].max() + 1):
                    own = batch.document_ids[row] == number
                    fields = batch.sequence_ids[row, own][0], batch.input_ids[row, own], batch.labels[row, own]
                    rows.append((int(fields[0]), tuple(fields[1].tolist()), tuple(fields[2].tolist())))
    return sorted(rows)


@pytest.mark.parametrize("consumed", [0, 96, 3232])
def test_a_blend_gives_the_same_samples_and_masks_in_every_layout(parts, make_config, consumed):
    blend = ("0.5", parts["a"], "0.2", parts["b"], "0.3", parts["c"])
    expected = rows_of(make_config(blend, micro=32), consumed)
    assert [row[0] for row in expected] == list(range(consumed, consumed + 32))
    for world, micro, packing in ((1, 8, False), (2, 16, False), (4, 2, False), (2, 4, True)):
        config = make_config(blend, data={"packing": packing}, micro=micro)
        assert rows_of(config, consumed, world=world) == expected


@pytest.mark.parametrize(("rows_for", "lengths"), [("cuda", {32, 48, 64, 80, 96, 100}), ("cuda graphs", {64, 100})])
def test_rows_are_cut_to_few_lengths_on_gpus_and_to_fewer_under_graphs(rows_for, lengths, tiny_corpus, make_config):
    config = make_config(str(tiny_corpus.prefix), seq_length=100)
    loader = Corpus.open(config).loader("train", 0, 1, rows_for)
    assert {batch.input_ids.shape[1] for step in range(4) for batch in loader.step(step * 32)} == lengths
    assert rows_of(config, 32, rows_for=rows_for) == rows_of(config, 32)


def test_each_corpus_of_a_blend_is_split_on_its_own(parts, opened):
    corpus = opened(("1", parts["a"], "1", parts["b"]), data={"split": "80,20"})
    documents = {split: [part.num_documents for part in corpus.samples(split).parts] for split in ("train", "valid")}
    assert documents == {"train": [280, 56], "valid": [70, 14]}


@pytest.mark.parametrize("masking", ["whole-word", "token", "ngram"])
def test_masking_flag(parts, make_config, masking):
    loader = Corpus.open(make_config(parts["a"]).replace(objective={"masking": masking})).loader("train", 0, 1)
    assert loader.reader.masker.masking.__class__ is MASKINGS.find(masking)
    assert sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in loader.step(0)) > 32


@pytest.mark.parametrize("objective", ["mlm", "electra"])
def test_validation_is_masked_at_its_own_rate(tiny_corpus, make_config, objective):
    def rows(split, **rates):
        config = make_config(str(tiny_corpus.prefix), data={"split": "80,20"})
        return rows_of(config.replace(objective={"objective": objective} | rates), 0, split)

    assert rows("valid", mask_prob=0.4) == rows("valid", mask_prob=0.15) == rows("valid", eval_mask_prob=0.15)
    assert rows("train", mask_prob=0.4) != rows("train", mask_prob=0.15) == rows("train", eval_mask_prob=0.4)
    low, high = ([label for row in rows("valid", eval_mask_prob=rate) for label in row[2]] for rate in (0.15, 0.4))
    assert len(high) - high.count(IGNORED_LABEL) > 2 * (len(low) - low.count(IGNORED_LABEL))


@pytest.mark.parametrize(("objective", "shares"), [("electra", (0.85, 0.15, 0.0)), ("mlm", (0.8, 0.1, 0.1))])
def test_selected_pieces_are_masked_by_the_objectives_shares(tiny_corpus, make_config, objective, shares):
    config = make_config(str(tiny_corpus.prefix), data={"split": "90,10"}, global_batch_size=512)
    corpus = Corpus.open(config.replace(objective={"objective": objective}))
    pieces = [(b.input_ids[b.labels != -100], b.labels[b.labels != -100]) for b in corpus.loader("train", 0, 1).step(0)]
    ids, labels = np.concatenate(pieces, axis=1)
    is_mask, is_kept = ids == corpus.tokenizer.mask_id, ids == labels
    found = is_mask.mean(), is_kept.mean(), (~is_mask & ~is_kept).mean()
    assert len(ids) > 2000 and found == pytest.approx(shares, abs=0.03) and (found[2] == 0) == (shares[2] == 0)


def test_every_seed_validates_on_the_same_predictions(parts, make_config):
    """`beyond.md`, 9: a fixed seed, so that a spread over seeds is the models' own."""

    def rows(split, seed):
        blend = ("2", parts["a"], "1", parts["c"])
        return rows_of(make_config(blend, data={"split": "60,20,20"}, seed=seed), 0, split)

    assert rows("valid", 1) == rows("valid", 2) == rows("valid", VALIDATION_SEED)
    assert rows("test", 1) == rows("test", 2) and rows("train", 1) != rows("train", 2)


def test_summary_says_how_much_is_validated(parts, tiny_corpus, opened):
    for batch, line in (
        (8, "80 of 290 sequences, the same ones each time"),  # 10 global batches
        (64, "256 of 290 sequences, the same ones each time"),
        (512, "one global batch of 512 from 290 sequences, so some are read more than once"),
    ):
        corpus = opened(str(tiny_corpus.prefix), data={"split": "80,20"}, global_batch_size=batch)
        summary = corpus.summary(corpus.samples("train"), 100)
        assert f"  validation: {line}" in summary
        quiet = Corpus.open(corpus.config.replace(logging={"eval_iters": 0}))
        assert quiet.summary(quiet.samples("train"), 100) == summary.rpartition("\n")[0]
    blend = ("0.1", parts["a"], "0.9", parts["b"])  # whose weights read some more than once
    corpus = opened(blend, data={"split": "80,20"}, global_batch_size=16)
    line = corpus.summary(corpus.samples("train"), 100).splitlines()[-1]
    samples, loader, read = corpus.samples("valid"), corpus.loader("valid", 0, 1), []
    for consumed in range(0, len(samples) // 16 * 16, 16):
        for batch in loader.step(consumed):
            texts = np.where(batch.labels == IGNORED_LABEL, batch.input_ids, batch.labels)
            read += [tuple(row[valid]) for row, valid in zip(texts, batch.document_ids > 0, strict=True)]
    assert len(read) == len(samples) // 16 * 16 > (different := len(set(read)))
    assert line.startswith(f"  validation: {len(read)} rows of {different} of {len(samples)} sequences, as the weights")


@pytest.mark.parametrize(
    ("blended", "length_and_rate"), [(False, {3: (16, 0.325), 4: (24, 0.3)}), (True, {0: (16, 0.4), 7: (48, 0.225)})]
)
def test_every_step_is_that_of_a_run_of_its_phase_and_rate(parts, make_config, blended, length_and_rate):
    paths = ("2", parts["a"], "1", parts["c"]) if blended else (parts["a"],)
    changing = make_config(paths, train_iters=8, seq_length_phases=("16:0.5", "24:0.75"))
    changing = changing.replace(objective={"mask_prob": "0.4:0.2"})
    packed = changing.replace(data={"packing": True})
    for step, (length, rate) in length_and_rate.items():
        constant = make_config(paths, seq_length=length).replace(objective={"mask_prob": rate})
        expected = rows_of(constant, step * 32)
        assert max(len(ids) for _, ids, _ in expected) == length
        assert rows_of(changing, step * 32) == rows_of(packed, step * 32, world=2) == expected
        batches = Corpus.open(packed).loader("train", 0, 1).step(step * 32)
        assert all(batch.input_ids.shape[1] <= length for batch in batches)
    assert rows_of(changing, 0, "valid") == rows_of(make_config(paths), 0, "valid")
    short = make_config(paths, train_iters=8, seq_length_phases=("16:1",))
    assert rows_of(short, 0, "valid") == rows_of(make_config(paths, seq_length=16), 0, "valid")


def test_a_causal_phase_reads_the_samples_of_a_run_without_one_and_masks_none(tiny_corpus, make_config):
    plain = make_config(str(tiny_corpus.prefix), train_iters=4)
    phased = plain.replace(objective={"objective_phases": "clm:0.5", "mask_prob": "0.4:0.2"})
    causal, masked = (Corpus.open(config).loader("train", 0, 1) for config in (phased, plain))
    mask_id = masked.reader.tokenizer.mask_id
    for step in range(4):
        for ours, theirs in zip(causal.step(step * 32), masked.step(step * 32), strict=True):
            assert np.array_equal(ours.sequence_ids, theirs.sequence_ids)
            assert (mask_id in ours.input_ids) == (step >= 2)
            follows = ours.labels[:, :-1] != IGNORED_LABEL
            if step < 2:
                assert np.array_equal(follows, ours.document_ids[:, 1:] > 0)
                assert np.array_equal(ours.labels[:, :-1][follows], ours.input_ids[:, 1:][follows])
    whole = plain.replace(objective={"objective_phases": "clm:1"})
    assert rows_of(whole, 0, "valid") == rows_of(plain, 0, "valid") and rows_of(whole, 96) != rows_of(plain, 96)


def test_a_step_keeps_its_rate_where_the_batch_size_was_changed(tiny_corpus, make_config):
    config = make_config(str(tiny_corpus.prefix), train_iters=8).replace(objective={"mask_prob": "0.4:0.2"})
    loader = Corpus.open(config).loader("train", 0, 1)
    (first, *_), (second, *_) = loader.step(64, steps_done=0), loader.step(64, steps_done=7)
    assert (first.labels != IGNORED_LABEL).sum() > 1.4 * (second.labels != IGNORED_LABEL).sum()


def test_epochs_add_up_over_phases(parts, opened):
    blend = ("2", parts["a"], "1", parts["c"])
    short, long = (opened(blend, seq_length=length, train_iters=8).epochs(8 * 32) for length in (16, 48))
    phased = opened(blend, train_iters=8, seq_length_phases=("16:0.5",))
    halves = [(one + other) / 2 for one, other in zip(short, long, strict=True)]
    assert phased.epochs(8 * 32) == pytest.approx(halves, rel=0.02) and len(halves) == 2
    *_, phase, validation = phased.summary(phased.samples("train"), 8 * 32).splitlines()
    assert phase == "  rows of 16 tokens up to step 4" and validation.startswith("  validation: ")


def test_separate_training_and_validation_data_are_taken_whole(parts, opened):
    data = {"train_data_path": (parts["a"], parts["b"]), "valid_data_path": ("1", parts["c"], "2", parts["a"])}
    corpus = opened(data=data)
    assert [part.num_documents for part in corpus.samples("train").parts] == [350, 70]
    valid = corpus.samples("valid")
    assert [part.prefix for part in valid.parts] == [parts["c"], parts["a"]] and valid.counts == [1, 2]
    assert set(corpus.sources) == {parts[name] for name in "abc"}, "each is opened once"
    assert rows_of(corpus.config, 0, "valid", world=2) == rows_of(corpus.config, 0, "valid")


def test_exclusive_flags_and_a_prefix_as_a_string(make_config):
    for name in ("train-data-path", "valid-data-path"):
        for other, value in (("data-path", ("B",)), ("split", "9,1")):
            data = {name.replace("-", "_"): ("A",), other.replace("-", "_"): value}
            wrong_arguments(f"--{name} and --{other} exclude each other", make_config, data=data)
    config, separate = make_config("A"), make_config(data={"train_data_path": ["0.5", "A", "0.5", "B"]})
    assert config.data.data_path == ("A",) and config.data.split == "949,50,1"
    for each in (config, separate):
        assert Config.from_dict(json.loads(json.dumps(each.to_dict()))) == each


def test_other_data_are_taken_whole_and_opened_only_by_a_run_that_validates(parts, opened):
    corpus = opened(parts["a"], data={"other_data_path": ("1", parts["b"], "1", parts["a"])})
    assert [part.num_documents for part in corpus.samples("other").parts] == [70, 350]
    assert corpus.samples("valid").parts[0].num_documents == 18, "a twentieth of 350"
    assert corpus.summary(corpus.samples("train"), 32).splitlines()[-1].startswith("  other-text: ")
    assert [*corpus.description][1:] == ["the training data", "the validation data", "the other-text data"]
    [line] = corpus.split_remarks()
    assert line.startswith(f"{parts['a']}: both training and validation data")
    short = opened(parts["a"], data={"other_data_path": parts["short"]})
    told = str(refused("split is empty", short.loader, "other", 0, 1))
    assert told.startswith("the other-text split is empty") and told.endswith(", or leave --other-data-path out")
    idle = corpus.config.replace(data={"other_data_path": parts["b"]}, logging={"eval_interval": 0})
    assert set(Corpus.open(idle).sources) == {parts["a"]}


def test_what_is_missing_or_empty_is_named_with_what_to_do(parts, opened):
    refused("--data-path is missing", opened)
    refused("--data-path is empty", opened, ())
    short, nothing = parts["short"], f"{parts['a']}: no sample in documents [350, 350) of 350"
    remedy = "larger share by --split (now 1,0,0), or train without validation by --eval-interval 0"
    few = "fewer than 8 tokens"
    for data, split, *words in (
        ({"train_data_path": parts["a"]}, "valid", "--valid-data-path is missing", "--eval-interval 0"),
        ({"valid_data_path": parts["a"]}, "train", "--train-data-path is missing"),
        ({"data_path": ("1", parts["a"], "1", short)}, "train", "", "short_text_document: no sample in doc", few),
        ({"data_path": parts["a"]}, "valid", f"the validation split is empty: {nothing}", remedy),
        ({"data_path": short}, "train", "the training split is empty: ", "1 of these 1 documents have fewer"),
        ({"train_data_path": parts["a"], "valid_data_path": short}, "valid", "the validation split is empty: "),
    ):
        data |= {"split": "1,0,0"} if "data_path" in data else {}
        told = str(refused("", opened(data=data).loader, split, 0, 1))
        assert told.startswith(words[0]) and all(word in told for word in words)
    assert "--split" not in told, "two flags name the data"


def test_documents_too_short_to_be_read_are_said(parts, tiny_corpus, opened, tmp_path):
    lines = tiny_corpus.text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    mixed = dataset(tmp_path, "mixed", [*lines[:9], '{"text": "a b c"}\n'], tiny_corpus.vocab_file)
    said = "  1 of these 80 documents have fewer than 8 tokens and are not read\n"  # 10 and 70
    for train, valid, is_said in ((mixed, parts["b"], 1), (parts["b"], mixed, 1), (parts["a"], parts["b"], 0)):
        corpus = opened(data={"train_data_path": train, "valid_data_path": valid})
        summary = corpus.summary(corpus.samples("train"), 32)
        assert summary.count(said) == summary.count("not read") == is_said


SAME = "the same data as {}, so the"
PARTLY = "1 of its {} input files ({}) is also in {}, so the validation loss is partly"
WAYS = [(shutil.copyfile, (".bin", ".idx", ".json")), (shutil.copyfile, (".bin", ".idx")), (os.link, (".bin", ".idx"))]


@pytest.mark.parametrize(("copy", "suffixes"), WAYS)
def test_validation_data_that_are_a_copy_of_training_data_are_said(parts, opened, tmp_path, copy, suffixes):
    copied = tmp_path / "other"
    for suffix in suffixes:
        copy(parts["b"] + suffix, f"{copied}{suffix}")
    train, valid = ("2", parts["a"], "1", parts["b"]), ("1", parts["c"], "2", str(copied))
    [line] = opened(data={"train_data_path": train, "valid_data_path": valid}).split_remarks()
    assert line.startswith(f"{copied}: {SAME.format(parts['b'])}")


def test_datasets_of_the_same_text_are_said_and_no_others(parts, tiny_corpus, opened, tmp_path):
    def made(name, *inputs, key="text", **options):
        job = wordpiece_job(tiny_corpus.vocab_file, tmp_path / name, *inputs, json_keys=(key,), **options)
        return str(preprocess(job).prefixes[0])

    a, b = (Path(parts[name]).with_name(f"{name}.jsonl") for name in "ab")
    renamed, keys, empty = (tmp_path / f"{name}.jsonl" for name in ("renamed", "keys", "empty"))
    shutil.copyfile(b, renamed)
    keys.write_text(a.read_text().replace('"text"', '"title": "the cat", "text"'))
    empty.touch()
    for valid, train, said in (
        (made("again", renamed), parts["b"], SAME.format(parts["b"])),
        (made("eod", renamed, append_eod=True), parts["b"], PARTLY.format(1, "renamed.jsonl", parts["b"])),
        (made("two", a, renamed), parts["b"], PARTLY.format(2, "renamed.jsonl", parts["b"])),
        (parts["b"], parts["b"], f"{parts['b']}: both training and validation data"),
        (parts["b"], parts["a"], ""),
        (made("titles", keys, key="title"), made("keys", keys), ""),
        (made("c", a, empty), made("d", b, empty), ""),
    ):
        data = {"train_data_path": (parts["c"], train), "valid_data_path": (valid,)}
        remarks = opened(data=data).split_remarks()
        assert len(remarks) == bool(said) and all(said in line for line in remarks), said
    data = {"train_data_path": ("2", parts["a"], "1", parts["b"]), "valid_data_path": (parts["c"], parts["b"])}
    [line] = opened(data=data).split_remarks()
    assert line.startswith(f"{parts['b']}: both training and validation data")


def test_datasets_of_one_split_that_share_text_are_said(parts, opened, tmp_path):
    def remarks(*names):
        return [line for line in opened(names, data={"split": "80,20"}).split_remarks() if "another kind" not in line]

    mixed = shuffle(tmp_path / "mixed", parts["b"], 1).prefix
    [line] = remarks(parts["a"], parts["b"], mixed)
    assert line.startswith(f"{parts['b']}: 1 of its 1 input files (b.jsonl) is also in {mixed}, and --split divides")
    for suffix in (".bin", ".idx", ".json"):
        shutil.copyfile(parts["b"] + suffix, tmp_path / f"copy{suffix}")
    assert remarks(parts["a"], parts["b"], str(tmp_path / "copy")) == []  # split at the same documents


def test_every_corpus_is_of_the_one_tokenizer_which_the_manifest_may_name(parts, tiny_corpus, make_config, tmp_path):
    corpus = Corpus.open(Config().replace(data={"data_path": parts["a"]}))
    assert corpus.tokenizer.fingerprint == Corpus.open(make_config(parts["a"])).tokenizer.fingerprint
    resolved = corpus.config.data
    assert (resolved.tokenizer_type, resolved.vocab_file) == ("BertWordPieceLowerCase", str(tiny_corpus.vocab_file))
    other = Config().replace(data={"data_path": parts["a"], "tokenizer_type": "BertWordPieceCase"})
    refused("the dataset was made by tokenizer BertWordPieceLowerCase .*BertWordPieceCase", Corpus.open, other)
    other = write_vocabulary(["another vocabulary"], tmp_path / "other.txt")
    foreign = dataset(tmp_path, "foreign", ['{"text": "another"}\n'] * 9, other)
    config = make_config(("1", parts["a"], "1", foreign))
    refused("foreign_text_document.json: the dataset was made by tokenizer", Corpus.open, config)


def test_remarks_on_the_vocabulary_are_kept_and_those_on_words_where_words_are_read(parts, make_config, monkeypatch):
    """tests/unit/data/test_special_roles.py has the remarks."""
    monkeypatch.setattr("megatron_ddrp.corpus.warn_of_vocabulary", lambda tokenizer: ["on pieces"])
    monkeypatch.setattr("megatron_ddrp.corpus.warn_of_unmarked_words", lambda tokenizer: "on words")
    for objective, remarks in (
        ({}, ("on pieces", "on words")),
        ({"masking": "token"}, ("on pieces",)),
        ({"masking": "token", "notes": True}, ("on pieces", "on words")),
    ):
        assert Corpus.open(make_config(parts["a"]).replace(objective=objective)).remarks == remarks


def test_a_dataset_of_a_tokenizer_whose_roles_share_a_piece_is_refused(tmp_path):
    """The dataset may be of a version that did not look; its tokenizer's fingerprint does not know the roles."""
    made = write_tokenizer_folder(tmp_path / "tokenizer", byte_bpe())
    (tmp_path / "in.jsonl").write_text('{"text": "some text of bytes"}\n' * 20, encoding="utf-8")
    flags = {"tokenizer_type": "HuggingFace", "tokenizer_model": str(made)}
    [prefix] = preprocess(PreprocessConfig((str(tmp_path / "in.jsonl"),), str(tmp_path / "o"), **flags)).prefixes
    config = Config().replace(data={"data_path": prefix, "split": "1,1"}, model={"seq_length": 48})
    assert not Corpus.open(config).remarks
    write_tokenizer_folder(made, byte_bpe(), NAMES | {"mask": "<c>"})
    wrong_arguments(r"'<c>' is \[CLS\] and", Corpus.open, config)


def test_word_counts_are_kept_where_asked_for_and_not_at_all_by_a_dry_run(parts, make_config, tmp_path):
    config = make_config(parts["a"], data={"index_cache_dir": str(tmp_path / "counts")})
    config = config.replace(objective={"notes": True, "notes_min_count": 2})
    before = sorted(Path(parts["a"]).parent.iterdir())
    first = Corpus.open(config, keep_counts=False).rare_words[0]
    assert not (tmp_path / "counts").exists()
    assert np.array_equal(Corpus.open(config).rare_words[0].hashes, first.hashes)
    assert [path.name.split(".")[0] for path in (tmp_path / "counts").iterdir()] == ["a_text_document"]
    assert sorted(Path(parts["a"]).parent.iterdir()) == before


def test_description_names_every_weighted_corpus_and_text_read_too_often(parts, opened):
    corpus = opened(("3", parts["a"], "1", parts["b"]))
    *lines, _ = corpus.summary(corpus.samples("train"), 1600).splitlines()
    assert len(lines) == 3 and "blended" in lines[0]
    assert "75.00% " + parts["a"] in lines[1] and "25.00% " + parts["b"] in lines[2]
    samples = len(corpus.samples("train").parts[1])
    assert lines[2].endswith(f"{samples:,} sequences, {400 / samples:.2f} epochs")
    corpus = opened((parts["a"],), train_iters=10_000)
    samples = corpus.samples("train")
    assert f"more than {MANY_EPOCHS}" not in corpus.summary(samples, MANY_EPOCHS * len(samples))
    assert f"read more than {MANY_EPOCHS} times" in corpus.summary(samples, MANY_EPOCHS * len(samples) + 1)


def test_other_text_and_another_tokenizer_are_other_contents_for_ranks_too(parts, tiny_corpus, opened, tmp_path):
    first = opened((parts["a"],))
    assert first.changes(first.contents) == []
    shuffled = shuffle(parts["a"] + "-shuffled", parts["a"], 1).prefix
    [line] = opened((shuffled,)).changes({shuffled: first.contents[parts["a"]]})
    assert f"data {shuffled}: another content than at the checkpoint (" in line
    words = tiny_corpus.vocab_file.read_text(encoding="utf-8").splitlines()
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n", encoding="utf-8")
    plain = dataset(tmp_path, "plain", ['{"text": "one two"}\n'] * 40, tiny_corpus.vocab_file)
    Path(f"{plain}.json").unlink()  # which names its vocabulary
    ours = opened((plain,)).description
    for change, names in (
        ({"vocab_file": str(tmp_path / "vocab.txt")}, ["the tokenizer"]),
        ({"data_path": (parts["b"],)}, ["the training data", "the validation data"]),
    ):
        theirs = opened((plain,), data=change).description
        assert [name for name in ours if ours[name] != theirs[name]] == names


def test_the_unigram_level_counts_unknown_words_and_is_one_for_all_row_lengths(tiny_corpus, parts, opened, tmp_path):
    """Half of the words are unknown, and [UNK] is predicted; the blend has documents longer than some rows."""
    lines = [json.dumps({"text": "the \u4e2d " * 20}) + "\n"] * 40
    unknown = dataset(tmp_path, "unknown", lines, tiny_corpus.vocab_file)

    def level(*words: str, **settings) -> float:
        return opened(words, data={"split": "9,1"}, **settings).unigram_loss

    assert level(unknown) == pytest.approx(math.log(2), abs=1e-6)
    for words in ([parts["all"]], ["3", parts["a"], "1", unknown]):
        assert len({level(*words, seq_length=length) for length in (12, 48, 512)}) == 1
        assert level(*words, seq_length_phases=("16:0.5",)) == level(*words)
