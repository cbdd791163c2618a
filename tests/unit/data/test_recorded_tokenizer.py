"""The tokenizer's flags from a manifest, and the hint where a dataset is not there."""

import shutil

import pytest

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.dataset.recorded_tokenizer import PATH, TokenizerFlags, completed, recorded_flags, relative_path
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
    assert completed(nothing, [plain, pieces]) == ("SentencePiece", None, "a.model")
    assert completed(nothing, [plain]) == ("BertWordPieceLowerCase", None, None)
    assert completed(TokenizerFlags(vocab_file="v.txt"), [plain]) == ("BertWordPieceLowerCase", "v.txt", None)
    assert completed(TokenizerFlags(tokenizer_model="b.model"), [pieces]) == ("SentencePiece", None, "b.model")
    other = TokenizerFlags("BertWordPieceCase", "v.txt")
    assert completed(other, [pieces]) == other, "what the flags say is checked against the dataset later"
    for given in (
        TokenizerFlags(vocab_file="v.txt"),
        TokenizerFlags(vocab_file=""),
        TokenizerFlags(tokenizer_model=""),
    ):
        chosen = completed(given, [pieces])
        assert chosen == given._replace(tokenizer_type="SentencePiece"), "no vocabulary that is given is ignored"
        with pytest.raises(UserError, match=r"--tokenizer-type SentencePiece needs --tokenizer-model \(a local path\)"):
            build_tokenizer(*chosen)
    assert completed(nothing, [pieces]).words() == ["--tokenizer-type", "SentencePiece", "--tokenizer-model", "a.model"]


def test_a_tree_can_be_moved_and_a_lost_vocabulary_is_named(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "data").mkdir(parents=True)
    (old / "vocab.txt").touch()
    made_with(old / "data" / "a", "BertWordPieceCase", old / "vocab.txt")
    old.rename(new)
    assert completed(TokenizerFlags(), [new / "data" / "a"]).vocab_file == str(new / "vocab.txt")
    (new / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"data/a was made with .*vocab\.txt, which is not there any more"):
        completed(TokenizerFlags(), [new / "data" / "a"])
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
        completed(TokenizerFlags(), [tmp_path / "corpus"])
