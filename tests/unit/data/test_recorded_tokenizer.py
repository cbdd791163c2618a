"""The tokenizer's flags from a manifest, and the hint where a dataset is not there."""

import shutil

import pytest

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.dataset.indexed_dataset import (
    PATH,
    TokenizerFlags,
    complete,
    recorded_flags,
    relative_path,
)
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import UserError
from tests.datasets import write_dataset


def made_with(prefix, kind, path):
    manifest = {"tokenizer": {"type": kind, "fingerprint": "f"}, PATH: relative_path(path, prefix)}
    return write_dataset(prefix, [[[1]]], manifest=manifest).prefix


def test_flags_that_are_not_given_come_from_the_first_manifest_that_has_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "a.model").touch()
    plain = write_dataset(tmp_path / "data" / "plain", [[[1]]]).prefix
    pieces = made_with(tmp_path / "data" / "pieces", "SentencePiece", tmp_path / "a.model")
    nothing = TokenizerFlags()
    assert complete(nothing, [plain, pieces]) == ("SentencePiece", None, "a.model")
    assert complete(nothing, [plain]) == ("BertWordPieceLowerCase", None, None)
    assert complete(TokenizerFlags(vocab_file="v.txt"), [plain]) == ("BertWordPieceLowerCase", "v.txt", None)
    assert complete(TokenizerFlags(tokenizer_model="b.model"), [pieces]) == ("SentencePiece", None, "b.model")
    other = TokenizerFlags("BertWordPieceCase", "v.txt")
    assert complete(other, [pieces]) == other, "what the flags say is checked against the dataset later"
    for given in (
        TokenizerFlags(vocab_file="v.txt"),
        TokenizerFlags(vocab_file=""),
        TokenizerFlags(tokenizer_model=""),
    ):
        chosen = complete(given, [pieces])
        assert chosen == given._replace(tokenizer_type="SentencePiece"), "no vocabulary that is given is ignored"
        with pytest.raises(UserError, match=r"--tokenizer-type SentencePiece needs --tokenizer-model \(a local path\)"):
            build_tokenizer(*chosen)
    assert complete(nothing, [pieces]).words() == [
        "--tokenizer-type",
        "SentencePiece",
        "--tokenizer-model",
        "a.model",
    ]


def test_a_tree_can_be_moved_and_a_lost_vocabulary_is_named(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "data").mkdir(parents=True)
    (old / "vocab.txt").touch()
    made_with(old / "data" / "a", "BertWordPieceCase", old / "vocab.txt")
    old.rename(new)
    assert complete(TokenizerFlags(), [new / "data" / "a"]).vocab_file == str(new / "vocab.txt")
    (new / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"data/a was made with .*vocab\.txt, which is not there any more"):
        complete(TokenizerFlags(), [new / "data" / "a"])
    assert recorded_flags(new / "data" / "a").path == str(new / "vocab.txt")
    shutil.rmtree(new)
    assert recorded_flags(new / "data" / "a") == TokenizerFlags()


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("wiki_txt_document", "did you mean {0}/wiki_text_document?"),
        ("wiki", "did you mean {0}/wiki_text_document or {0}/wiki_title_document?"),
        ("wiki.bin", "did you mean {0}/wiki_text_document or {0}/wiki_title_document?"),
        ("novels", "the folder has {0}/books_text_document, {0}/wiki_text_document, {0}/wiki_title_document"),
        ("news_text_document", r"its preprocessing has not ended ({0}/news.unfinished): run the same command again"),
        ("none/wiki", "there is no folder {0}/none"),
    ],
)
def test_a_missing_dataset_comes_with_the_ones_that_are_there(tmp_path, typed, hint):
    for name in ("wiki_text", "wiki_title", "books_text"):
        write_dataset(tmp_path / f"{name}_document", [[[1]]])
    (tmp_path / "news.unfinished").mkdir()
    with pytest.raises(UserError) as error:
        IndexedDataset(tmp_path / typed)
    assert f".idx: No such file or directory; {hint.format(tmp_path)}" in str(error.value)


def test_a_wrong_prefix_is_reported_before_a_missing_vocabulary(tmp_path):
    (tmp_path / "corpus_text_document.idx").touch()
    with pytest.raises(UserError, match=r"corpus\.idx: No such file.*did you mean .*corpus_text_document\?"):
        complete(TokenizerFlags(), [tmp_path / "corpus"])


@pytest.mark.parametrize("shape", ["links", "chain", "folder", "store", "another"])
def test_a_dataset_behind_links_finds_its_vocabulary(tmp_path, shape):
    data, other = tmp_path / "data", tmp_path / "runs" / "deep"
    data.mkdir()
    other.mkdir(parents=True)
    (data / "vocab.txt").touch()
    made_with(data / "a", "BertWordPieceCase", data / "vocab.txt")
    expected = data / "vocab.txt"
    files = [f"a{ending}" for ending in (".bin", ".idx", ".json")]
    if shape == "folder":
        (other / "linked").symlink_to(data)
        prefix = other / "linked" / "a"
    elif shape == "store":  # the files themselves lie elsewhere, under other names, and links take their place
        for file in files:
            (data / file).rename(other / f"blob-{file}")
            (data / file).symlink_to(other / f"blob-{file}")
        prefix = data / "a"
    else:
        for file in files:
            source = data / file
            if shape == "chain":
                (tmp_path / "runs" / file).symlink_to(f"../data/{file}")
                source = tmp_path / "runs" / file
            (other / file).symlink_to(source)
        prefix = other / "a"
    if shape == "another":  # a vocabulary of that name beside the links is another one
        (other / "vocab.txt").touch()
    assert complete(TokenizerFlags(), [prefix]).vocab_file == str(expected)
    shutil.rmtree(data)
    if shape == "links":
        with pytest.raises(UserError, match=r"runs/deep/a\.idx: No such file"):
            complete(TokenizerFlags(), [prefix])


def test_a_vocabulary_that_is_a_link_keeps_the_settings_beside_it(tmp_path):
    """As in the cache of the hub, where the files of a model are links to blobs of other names."""
    for folder in ("blobs", "model", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blobs" / "1a2b").touch()
    (tmp_path / "model" / "tokenizer.json").symlink_to("../blobs/1a2b")
    (tmp_path / "again").symlink_to("model")
    for path in (tmp_path / "model" / "tokenizer.json", tmp_path / "again" / "tokenizer.json"):
        prefix = made_with(tmp_path / "out" / "a", "HuggingFace", path)
        assert recorded_flags(prefix).path == str(tmp_path / "model" / "tokenizer.json")
