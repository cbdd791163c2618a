"""AutoTokenizer gives the ids of training; an imported encoder with another vocabulary has the old pieces' rows."""

import json
import unicodedata

import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, processors

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.conversion.from_huggingface import import_folder, load_hugging_face
from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.conversion.tokenizer_files import plan_transfer, unigram_tokenizer, write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import train_byte_bpe
from tests.refusals import refused
from tests.unit.conversion import conftest
from tests.unit.conversion.conftest import BERT_SPECIALS, padded_pair_batch, wordpiece, write_checkpoint
from tests.unit.conversion.tokenizers_of_families import assert_written, sentencepiece_model, small_byte_level
from tests.unit.data.tokenizer_folders import ADDED, ALPHABET, built, byte_bpe, numbered, plain_bpe, unigram

TEXTS = [
    *("   spaces  at both ends ", "\rline\nbreaks \r\n", "", "green-blue 3.14 \U0001f600\U0001f600 runs"),
    *("The cats, singing  birds\tand Caté.", "RED\u00a0dog's [bird] \u4e2d\u6587 \ufb01sh\u200b x\u0301"),
]


@pytest.fixture(params=["bert", "megatron_ddrp"])
def folder(request, tmp_path, offline):
    """A folder of a plain BERT, or of a model that transformers does not know."""
    folder = tmp_path / "hf"
    folder.mkdir()
    auto_map = {"AutoConfig": "modeling_ddrp.DdrpConfig"} if request.param != "bert" else {}
    conftest.change_json(folder / "config.json", model_type=request.param, auto_map=auto_map)
    return folder


def test_a_trained_byte_bpe_leaves_as_roberta_has_it(tmp_path, offline):
    from transformers import AutoTokenizer

    (tmp_path / "trained.json").write_bytes(train_byte_bpe(TEXTS * 3, 300, lower=False)[0])
    tokenizer = build_tokenizer("HuggingFace", tokenizer_model=tmp_path / "trained.json")
    run = write_checkpoint(tmp_path / "run", tokenizer, position_encoding="absolute", num_segments=1)
    export_checkpoint(run, tmp_path / "hf", family_name="roberta")
    layout = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    assert [layout[part]["type"] for part in ("model", "pre_tokenizer", "decoder")] == ["BPE", "ByteLevel", "ByteLevel"]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        assert loaded(text)["input_ids"] == [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
        assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (tmp_path / "trained.json").read_bytes()
    masked = loaded(f"red {loaded.mask_token} dog")
    expected = [*tokenizer.encode("red"), tokenizer.mask_id, *tokenizer.encode(" dog")]
    assert masked["input_ids"][1:-1] == expected and "token_type_ids" not in masked


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_wordpiece(tmp_path, tokenizer, folder, kind):
    tokenizer = build_tokenizer(kind, tmp_path / "vocab.txt")
    line = assert_written(tokenizer, folder, TEXTS)
    assert line.startswith(kind) and "tokenizer.json" in line
    assert (folder / "vocab.txt").read_bytes() == (tmp_path / "vocab.txt").read_bytes()


OWN_SPECIALS = {"pad_id": 0, "pad_piece": "[PAD]", "unk_id": 1, "unk_piece": "[UNK]", "bos_id": -1, "eos_id": -1}
OWN_SPECIALS |= {"control_symbols": ["[CLS]", "[SEP]", "[MASK]"]}
MODELS = {
    "trained by us": OWN_SPECIALS | {"normalization_rule_name": "nmt_nfkc_cf"},
    "specials appended": {},
    "bytes": {"byte_fallback": True, "vocab_size": 330},
    "plain": {"normalization_rule_name": "identity", "add_dummy_prefix": False},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_sentencepiece_unigram(tmp_path, folder, options):
    assert_written(sentencepiece_model(tmp_path, **options), folder, TEXTS)


def test_sentencepiece_parts_after_a_mask_are_those_inside_a_text(tmp_path, folder):
    """Japanese has no spaces: a "▁" after a mask would be a piece that training never saw there."""
    from transformers import AutoTokenizer

    tokenizer = sentencepiece_model(tmp_path, **OWN_SPECIALS)
    write_tokenizer(tokenizer, folder, 24)
    loaded = AutoTokenizer.from_pretrained(folder)
    for text in ("red [MASK] dog", "[MASK]s", "[MASK] runs", "sing[MASK][MASK]ing ", " [MASK] [MASK] of"):
        ids = tokenizer.encode_with_masks(text)
        assert loaded(text)["input_ids"] == [tokenizer.cls_id, *ids, tokenizer.sep_id]
        spaces = "".join(tokenizer.pieces[i] for i in ids).replace("▁", " ")
        assert spaces.strip() == text.strip().replace(" [MASK]", "[MASK]")  # a masked word's own space is masked too


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"])
def test_text_whose_marks_are_apart_has_the_ids_of_the_library(tmp_path, rule):
    """macOS writes Korean syllables as parts, and letters apart from their accents."""
    text = "\ud55c\uad6d\uc5b4 red \u1ec7\u0151 d\u00f3g \ufb01sh"
    text += " \u1ecc\u0300r\u1ecd\u0300 G\u0303 \uff83\uff9e\uff70\uff80 \ufdf2\u064f 1\uff5e2 \u0130"
    joined = unicodedata.normalize("NFKC", text)
    needed = "".join(dict.fromkeys((text + joined + joined.lower()).replace(" ", "")))
    tokenizer = sentencepiece_model(tmp_path, normalization_rule_name=rule, required_chars=needed)
    exported = unigram_tokenizer((tmp_path / "pieces.model").read_bytes(), tokenizer.pieces, tokenizer.unk_id)
    for form in ("NFC", "NFD"):
        changed = unicodedata.normalize(form, text)
        assert exported.encode(changed, add_special_tokens=False).ids == tokenizer.encode(changed)
    assert rule == "identity" or tokenizer.unk_id not in tokenizer.encode(changed)


def test_merges_left_out_at_random_are_not_exported(tmp_path, folder):
    """transformers would leave them out too, though nothing else in this file needs a change."""
    made = models.BPE(numbered(*ADDED, "a", "b", "ab"), [("a", "b")], dropout=0.9, unk_token="<u>"), None
    write_tokenizer(built(tmp_path / "in", made), folder, 24)
    exported = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    assert {tuple(exported.encode("ab" * 5).ids) for _ in range(20)} == {(0, 7, 7, 7, 7, 7, 1)}


def test_other_sentencepiece_models_are_named(tmp_path):
    line = write_tokenizer(sentencepiece_model(tmp_path, model_type="bpe"), tmp_path / "hf", 24)
    assert "AutoTokenizer fails or cuts texts otherwise" in line
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["tokenizer.model"]


def test_hugging_face_keeps_its_rules_and_gains_our_specials(tmp_path, tokenizer, folder):
    """A copied tokenizer with truncation, padding and another template of its own."""
    source = tmp_path / "source"
    write_tokenizer(tokenizer, source, 24)
    rust = RustTokenizer.from_file(str(source / "tokenizer.json"))
    rust.enable_truncation(3)
    rust.enable_padding(length=9)
    rust.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    rust.save(str(source / "tokenizer.json"))
    assert_written(build_tokenizer("HuggingFace", tokenizer_model=source), folder, TEXTS)


def made_of(old, new):
    """New piece → the old pieces whose mean it is."""
    parts = plan_transfer(old, new).parts
    return {piece: [old.pieces[i] for i in parts[number]] for number, piece in enumerate(new.pieces)}


def test_pieces_are_kept_spelled_or_the_mean_of_all_and_rows_those_of_the_loops(tmp_path):
    letters = [*"abcd", *(f"##{letter}" for letter in "abcd")]
    old = wordpiece(tmp_path / "old.txt", [*BERT_SPECIALS, *letters, "ab", "##ab", "##abc"])
    spelled = {
        **{"[CLS]": ["[CLS]"], "[unused]": [], "ab": ["ab"], "##ab": ["##ab"]},
        **{"abc": ["ab", "##c"], "##dabc": ["##d", "##abc"], "cab": ["c", "##ab"]},  # inside words, the longest first
        **{"##xa": [], "☃": []} | {piece: [piece] for piece in ("[MASK]", "[PAD]", "[SEP]", "[UNK]")},
    }
    new = wordpiece(tmp_path / "new.txt", list(spelled))
    transfer = plan_transfer(old, new)
    assert made_of(old, new) == spelled
    told = "13 pieces instead of 16: 7 kept, 3 the mean of the old pieces that spell them, 3 the mean of all"
    assert (transfer.kept, transfer.spelled, transfer.summary()) == (7, 3, told)
    table = torch.randn(len(old.pieces) + 4, 6, dtype=torch.float64)  # the model embeds four rows more
    rows, numbers = [], table.tolist()
    for names in spelled.values():
        names = names or [name for name in old.pieces if name not in BERT_SPECIALS]
        columns = zip(*(numbers[old.pieces.index(name)] for name in names), strict=True)
        rows.append([sum(column) / len(names) for column in columns])
    expected = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(transfer.rows(table), expected)
    torch.testing.assert_close(transfer.rows(table[:, 0].float()), expected[:, 0].float())


def test_what_a_tokenizer_removes_from_text_does_not_count(tmp_path):
    """An uncased vocabulary spells `Ab` and `é` by what it makes of them."""
    old = wordpiece(tmp_path / "old.txt", [*BERT_SPECIALS, "ab", "e", "##e"], "BertWordPieceLowerCase")
    new = wordpiece(tmp_path / "new.txt", [*BERT_SPECIALS, "Ab", "é", "##é"])
    assert list(made_of(old, new).items())[5:] == [("Ab", ["ab"]), ("é", ["e"]), ("##é", ["e"])]
    old = built(tmp_path / "old", plain_bpe("ab"))
    made = made_of(old, wordpiece(tmp_path / "new.txt", [*BERT_SPECIALS, "ab", "az"]))
    assert (made["ab"], made["az"]) == (["a", "b"], []), "a piece of which it drops a part is the mean of all"


def test_kinds_are_compared_by_text_and_begin_of_words(tmp_path):
    small_byte_level(tmp_path)
    of_bytes = build_tokenizer("HuggingFace", tokenizer_model=tmp_path)
    sentences = sentencepiece_model(tmp_path)
    old = wordpiece(tmp_path / "old.txt", [*BERT_SPECIALS, *"abcd", "##a", "##b", "##c", "##ab", "red", "##red"])
    found = made_of(old, of_bytes)
    expected = {"\u0120a": ["a"], "a": ["##a"], "ab": ["##ab"], "d": ["d"], "[MASK]": ["[MASK]"]}
    assert {piece: found[piece] for piece in expected} == expected
    assert found["\u0120"] == []  # a space alone
    begins = {piece: made_of(old, sentences)[piece] for piece in sentences.pieces if piece.strip("\u2581") == "red"}
    assert begins and begins == {piece: [("" if piece[0] == "\u2581" else "##") + "red"] for piece in begins}
    back = made_of(of_bytes, wordpiece(tmp_path / "new.txt", [*BERT_SPECIALS, "a", "##a", "##ab", "aab", "##d", "z"]))
    assert list(back.values())[5:] == [["\u0120a"], ["a"], ["ab"], ["\u0120a", "ab"], ["d"], []]


LONE = [*",.中国", "a", "b", "##a", "##b", "##,", "##.", "##中", "##国", "##中国", "a,", "##b,"]
"""Pieces as in bert-base-chinese: those behind `##b` are in no text, because BERT splits it at such characters."""


def of_words(folder, pieces):
    """A vocabulary whose words begin with ▁."""
    decoder = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return built(folder, unigram(pieces, 4), change=lambda layout: layout.update(decoder=decoder))


@pytest.mark.parametrize("kind", ["BertWordPieceCase", "BertWordPieceLowerCase", "HuggingFace"])
def test_a_piece_that_no_text_gives_spells_nothing(tmp_path, kind):
    old = wordpiece(tmp_path / "old.txt", [*BERT_SPECIALS, *LONE], kind.replace("HuggingFace", "BertWordPieceCase"))
    if kind == "HuggingFace":
        write_tokenizer(old, tmp_path / "old", 512)
        old = build_tokenizer(kind, tokenizer_model=tmp_path / "old")
    expected = {
        **{"\u2581,": [","], ",": [","], "\u2581中": ["中"], "中": ["中"], "b": ["##b"], "\u2581a": ["a"]},
        **{"中国": ["中", "国"], "\u2581中国": ["中", "国"], "b中": ["##b", "中"]},
        **{",b": [",", "b"], "b,": ["##b", ","], "\u2581a,": ["a", ","], "☃": [], "b☃": [], "b,☃": []},
    }
    new = of_words(tmp_path / "new", list(expected))
    found = made_of(old, new)
    assert {piece: found[piece] for piece in expected} == expected
    assert plan_transfer(old, new).kept == len(BERT_SPECIALS) + 6


def test_a_punctuation_mark_or_ideograph_is_the_old_one_inside_words(tmp_path):
    pieces = [f"{mark}{text}" for mark in ("\u2581", "") for text in (*",中a", "中国")]
    old = of_words(tmp_path / "old", [*pieces, "\u2581."])
    found = made_of(old, wordpiece(tmp_path / "new.txt", [*BERT_SPECIALS, *LONE]))
    assert (found[","], found["中"], found["."]) == ([","], ["中"], ["\u2581."])
    assert (found["a"], found["##a"]) == (["\u2581a"], ["a"])
    assert all(parts == [piece] for piece, parts in made_of(old, old).items())


@pytest.mark.parametrize("kind", ["BertWordPieceCase", "BertWordPieceLowerCase"])
def test_equal_vocabularies_keep_every_row(tmp_path, kind):
    old = wordpiece(tmp_path / "old.txt", [*BERT_SPECIALS, *LONE, "[unused1]", "..."])
    new = wordpiece(tmp_path / "new.txt", old.pieces[::-1], kind)
    assert all(parts == [piece] for piece, parts in made_of(old, new).items())


def test_the_first_of_two_pieces_with_one_text_counts(tmp_path):
    """A word after a space and one after a line break."""
    space, line_break, tab = (f"{mark}ab" for mark in "\u0120\u010a\u0109")
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made = byte_bpe([*ALPHABET, space, line_break, tab])
    old = built(tmp_path / "old", made, change=lambda layout: layout.update(decoder=decoder))
    new = wordpiece(tmp_path / "new.txt", [*BERT_SPECIALS, "ab", "##ab"])
    assert list(made_of(old, new).items())[5:] == [("ab", [space]), ("##ab", ["a", "b"])]
    assert made_of(old, old)[tab] == [space]


def test_a_byte_is_not_the_letter_that_it_stands_for(tmp_path):
    """SentencePiece's `<0x61>` is used only for characters without a piece."""
    old = sentencepiece_model(tmp_path, byte_fallback=True, vocab_size=330)
    new = wordpiece(tmp_path / "new.txt", [*BERT_SPECIALS, "a", "##a", "##sa", "\u2603"])
    found = made_of(old, new)
    assert found["##a"] == ["a"] and "<0x61>" not in [*found["a"], *found["##sa"]]
    assert found["\u2603"][-3:] == ["<0xE2>", "<0x98>", "<0x83>"]
    assert made_of(new, old)["<0x61>"] == [] and made_of(old, old)["<0x61>"] == ["<0x61>"]


@torch.no_grad()
@pytest.mark.parametrize("objective", ["mlm", "electra", "rtd"])
def test_an_encoder_whose_vocabulary_is_renumbered_computes_the_same(tmp_path, tokenizer, offline, objective):
    run = write_checkpoint(tmp_path / "run", tokenizer, objective=objective, position_encoding="absolute")
    export_checkpoint(run, tmp_path / "hf")
    order = torch.randperm(tokenizer.vocab_size, generator=torch.Generator().manual_seed(2))
    pieces = [tokenizer.pieces[i] for i in order]
    new = wordpiece(tmp_path / "new.txt", pieces, tokenizer.tokenizer_type)
    imported = import_folder(tmp_path / "hf", tmp_path / "start", tokenizer=new)
    assert "vocabulary:  20 pieces instead of 20: 20 kept, 0 the mean" in imported.summary()
    model, saved, _ = load_model(tmp_path / "start")
    assert saved.fingerprint == new.fingerprint
    expected, _, _ = load_hugging_face(tmp_path / "hf")
    ids, segments, mask = padded_pair_batch(tokenizer.vocab_size)
    renumbered = torch.argsort(order)[ids] * mask
    compute = conftest.ours if objective == "mlm" else conftest.encoded
    theirs, mine = compute(expected, ids, segments, mask), compute(model, renumbered, segments, mask)
    if objective == "mlm":
        torch.testing.assert_close(mine[1], theirs[1][:, :, order])
    else:
        assert torch.equal(theirs[mask.bool()], mine[mask.bool()])


def test_the_command_gives_a_model_new_words(tmp_path, export_of, offline, convert):
    new = tmp_path / "new.txt"
    wordpiece(new, [*BERT_SPECIALS, *conftest.WORDS, "cats", "##dog"])
    done = convert("--from-hf", export_of("absolute"), "--output", tmp_path / "start", "--vocab-file", new)
    assert done.returncode == 0, done.stderr
    told = ("tokenizer:   BertWordPieceLowerCase, 22 pieces", "vocabulary:  22 pieces instead of 20: ")
    for words in (*told, f"--vocab-file {tmp_path / 'start' / 'tokenizer' / 'vocab.txt'}"):
        assert words in done.stdout
    _, saved, config = load_model(tmp_path / "start")
    assert config.model.vocab_size == 22 and saved.pieces[-2:] == ["cats", "##dog"]


def test_a_folder_without_its_own_vocabulary_is_refused(tmp_path, tokenizer, export_of, offline):
    export_of("absolute")
    for name in ("vocab.txt", "tokenizer.json", "export_sums.json"):
        (tmp_path / "hf" / name).unlink()
    words = "has no tokenizer: copy the model's vocab.txt or tokenizer.json there"
    refused(words, import_folder, tmp_path / "hf", tmp_path / "start", tokenizer=tokenizer)
    assert not (tmp_path / "start").exists()
