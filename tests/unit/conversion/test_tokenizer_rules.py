"""Ids, roles and rows are AutoTokenizer's for every kind, also where a folder's files disagree, and in its exports."""

import json
import shutil
import sys

import pytest

from megatron_ddrp.commands import preprocess
from megatron_ddrp.conversion.tokenizer_files import find_tokenizer, refuse_other_ids, write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer, load_tokenizer
from tests.refusals import refused, wrong_arguments
from tests.sentencepiece_models import train_model
from tests.unit.conversion import tokenizers_of_families as families
from tests.unit.conversion.conftest import change_json
from tests.unit.conversion.tokenizers_of_families import BERT, FAIRSEQ, ROLES, bert_vocabulary, byte_level, unigram


def split_layout(folder, first=""):
    """Replace tokenizer.json by vocab.json and merges.txt."""
    layout = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(layout["vocab"]))
    (folder / "merges.txt").write_text(first + "".join(f"{a} {b}\n" for a, b in layout["merges"]))


@pytest.mark.parametrize("make", [byte_level, unigram])
@pytest.mark.parametrize("specials", [FAIRSEQ, BERT], ids=["fairseq", "bert"])
@pytest.mark.parametrize("beside", ["settings", "template", "both"])
def test_tokenizer_json_alone_is_enough(tmp_path, offline, make, specials, beside):
    make(tmp_path, specials, template=beside != "settings")
    if beside != "template":
        families.settings(tmp_path, specials)
    tokenizer = find_tokenizer(tmp_path)
    found = [tokenizer.pieces[getattr(tokenizer, f"{role}_id")] for role in ROLES]
    assert found == [specials[i] for i in (0, 2, 1, 4, 3)]
    if beside != "settings":
        (tmp_path / "out").mkdir()
        change_json(tmp_path / "out" / "config.json", model_type="xlm-roberta" if make is unigram else "roberta")
        write_tokenizer(tokenizer, tmp_path / "out", 24, num_segments=1)
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
        assert find_tokenizer(tmp_path / "out").fingerprint == tokenizer.fingerprint, "data of the source still serve"


def test_the_pieces_around_a_text_decide_between_names(tmp_path):
    """A vocabulary with both sets of names and no settings beside it."""
    unigram(tmp_path, [*FAIRSEQ[:3], *BERT[3:], *BERT[:1], *BERT[2:3]], template=True)
    tokenizer = build_tokenizer("HuggingFace", tokenizer_model=tmp_path)
    assert [tokenizer.pieces[i] for i in (tokenizer.cls_id, tokenizer.sep_id)] == ["<s>", "</s>"]


OWN_NAMES = {"pad_id": 0, "pad_piece": "[PAD]", "bos_id": 1, "bos_piece": "[CLS]"}
OWN_NAMES |= {"eos_id": 2, "eos_piece": "[SEP]", "unk_id": 3, "unk_piece": "[UNK]"}


@pytest.mark.parametrize(
    ("family", "options", "offset"), [("xlm-roberta", {}, 1), ("camembert", {}, 4), ("deberta-v2", OWN_NAMES, 0)]
)
def test_a_sentencepiece_model_alone_is_converted(tmp_path, offline, family, options, offset):
    """fairseq puts its own pieces first, so that ids are not those of the .model."""
    ours, folder, text = families.sentencepiece_model(tmp_path, **options), tmp_path / "source", "red cats sing"
    folder.mkdir()
    shutil.move(tmp_path / "pieces.model", folder / ("sentencepiece.bpe.model" if offset else "spm.model"))
    change_json(folder / "config.json", model_type=family)
    assert assert_equal(folder, tmp_path).encode(text) == [i + offset for i in ours.encode(text)]


def test_an_exports_sentencepiece_model_is_preferred_if_it_is_the_same_and_damage_told(tmp_path, offline):
    ours = families.sentencepiece_model(tmp_path)
    write_tokenizer(ours, tmp_path / "hf", 24)
    assert find_tokenizer(tmp_path / "hf").fingerprint == ours.fingerprint
    unigram(tmp_path / "hf", FAIRSEQ, template=True)
    assert find_tokenizer(tmp_path / "hf").tokenizer_type == "HuggingFace"
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"nothing of use")
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    refused("sentencepiece.bpe.model, from which .*save_pretrained", find_tokenizer, tmp_path)


def test_special_pieces_of_a_vocab_txt_stay_special(tmp_path, offline):
    """AraBERT and others mark links and names of users by pieces of their own."""
    transformers = pytest.importorskip("transformers")
    pieces = {piece: i for i, piece in enumerate([*BERT, "[URL]", "[USER]", "cats", "sing", "[", "]"])}
    theirs = transformers.BertTokenizer(vocab=pieces)
    theirs.add_special_tokens({"additional_special_tokens": ["[URL]", "[USER]"]})
    theirs.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    change_json(tmp_path / "config.json", model_type="bert")
    tokenizer = find_tokenizer(tmp_path)
    assert {pieces["[URL]"], pieces["[USER]"]} <= {*tokenizer.special_ids.tolist()}
    (tmp_path / "out").mkdir()
    change_json(tmp_path / "out" / "config.json", model_type="bert")
    write_tokenizer(tokenizer, tmp_path / "out", 24)
    again, text = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), "[USER] sing [URL] cats"
    assert again(text)["input_ids"] == theirs(text)["input_ids"]


def test_a_vocab_txt_beside_another_tokenizer_json_is_not_read(tmp_path, offline):
    """Somebody has put a tokenizer of their own into a copy of a BERT folder whose settings name no class."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate([*BERT, "Cats", "sing"])})
    theirs.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in [*BERT, "cats", "sing", "red"]))
    change_json(tmp_path / "config.json", model_type="bert")
    assert find_tokenizer(tmp_path).pieces == [*BERT, "Cats", "sing"]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "BertWordPieceLowerCase"),
        ({"do_lower_case": False, "tokenizer_class": "ElectraTokenizerFast"}, "BertWordPieceCase"),
        ({"strip_accents": False, "tokenizer_class": "BertTokenizer"}, "HuggingFace"),
        ({"strip_accents": True, "do_lower_case": False}, "HuggingFace"),
        ({"tokenize_chinese_chars": False, "tokenizer_class": "DistilBertTokenizer"}, "HuggingFace"),
        ({"tokenizer_class": "BertTokenizer"}, "HuggingFace, with more pieces"),
        ({"tokenizer_class": "ElectraTokenizer"}, "HuggingFace, with more pieces of an older layout"),
    ],
)
def test_a_vocabulary_alone_follows_the_settings_beside_it(tmp_path, offline, settings, kind):
    from transformers import AutoTokenizer

    bert_vocabulary(tmp_path, settings)
    kind, _, more = kind.partition(", ")
    if more:
        (tmp_path / "added_tokens.json").write_text('{"covid": 15}')
    if more == "with more pieces":
        AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
        (tmp_path / "added_tokens.json").unlink()
        assert (tmp_path / "tokenizer.json").is_file()
    ours, theirs = find_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("F\u00fcr sch\u00f6ne \u4e2d\u6587", "f\u00fcr covid \u6587\u4e2d Schon"):
        assert (ours.tokenizer_type, ours.encode(text)) == (kind, theirs.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("lower", "settings"),
    [(True, {"do_lower_case": False}), (False, {}), (True, {"tokenize_chinese_chars": False, "strip_accents": False})],
)
def test_the_settings_decide_against_tokenizer_json(tmp_path, offline, lower, settings):
    from transformers import AutoTokenizer

    bert_vocabulary(tmp_path, {"do_lower_case": lower})
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    bert_vocabulary(tmp_path, settings)
    assert (tmp_path / "tokenizer.json").is_file()
    for _ in ("with vocab.txt", "without"):
        theirs, text = AutoTokenizer.from_pretrained(tmp_path), "F\u00fcr schon \u4e2d\u6587"
        assert find_tokenizer(tmp_path).encode(text) == theirs.encode(text, add_special_tokens=False)
        (tmp_path / "vocab.txt").unlink(missing_ok=True)


def test_a_vocabulary_of_another_tokenizer_is_refused(tmp_path):
    japanese = {"tokenizer_class": "BertJapaneseTokenizer"}
    for values, config, reason in (
        (japanese, {}, "'BertJapaneseTokenizer', expected BertTokenizer or"),
        ({}, {"tokenizer_class": "RoFormerTokenizer"}, "'RoFormerTokenizer', expected BertTokenizer or"),
        ({"word_tokenizer_type": "mecab"}, japanese, "word_tokenizer_type is 'mecab', expected basic or"),
    ):
        bert_vocabulary(tmp_path, values, config)
        refused(reason, find_tokenizer, tmp_path)


def test_a_model_with_marks_after_words_is_not_exported_as_one_with_marks_before(tmp_path, offline):
    model = train_model(tmp_path / "m.model", treat_whitespace_as_suffix=True)
    ours = build_tokenizer("SentencePiece", tokenizer_model=model)
    (tmp_path / "out").mkdir()
    assert "transformers has no equal of this model" in write_tokenizer(ours, tmp_path / "out", 24)
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert find_tokenizer(tmp_path / "out").fingerprint == ours.fingerprint


def test_a_byte_order_mark_in_a_vocabulary_for_transformers_is_refused(tmp_path, offline):
    byte_level(tmp_path, FAIRSEQ, template=False)
    split_layout(tmp_path, "#version: 0.2\n")
    change_json(tmp_path / "config.json", model_type="roberta")
    plain = find_tokenizer(tmp_path)
    assert plain.pieces[plain.cls_id] == "<s>"
    for path in (tmp_path / "vocab.json", tmp_path / "merges.txt"):
        content = path.read_bytes()
        for mark in (b"\xef\xbb\xbf", b"\xff\xfe"):
            path.write_bytes(mark + content)
            refused(rf"{path.name}: begins with a byte order mark.*save the file as UTF-8", find_tokenizer, tmp_path)
        path.write_bytes(content)


def test_roles_that_share_a_piece_are_refused_in_folders_too(tmp_path, offline):
    """They are refused whether tokenizer.json is there or transformers makes it."""
    byte_level(tmp_path, FAIRSEQ, template=True)
    families.settings(tmp_path, FAIRSEQ)
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class="RobertaTokenizer", mask_token="</s>")
    change_json(tmp_path / "config.json", model_type="roberta")
    for change in (lambda folder: None, split_layout):
        change(tmp_path)
        error = wrong_arguments(r"'</s>' is \[SEP\] and \[MASK\]", find_tokenizer, tmp_path)
        assert str(error).startswith(str(tmp_path))


TEXTS = ["Red  cats sing", " F\u00fcr schon,\u4e2d\u6587 sch\u00f6n", "f\u00fcr\tRED \uff32\uff45\uff44 red3 12"]
TEXTS += ["xbluesx blues BLUES.", "fu\u0308r schon fur", "  the cats\n\nsing ", "red cats", "Fur sing schon"]


def assert_equal(folder, tmp_path):
    """Ours has the rows of AutoTokenizer, and gives them to a run and its export."""
    from transformers import AutoTokenizer

    ours, auto = find_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert [ours.encode(text) for text in TEXTS] == auto(TEXTS, add_special_tokens=False)["input_ids"]
    ours.save(tmp_path / "run")
    copy = load_tokenizer(tmp_path / "run")
    copy.settle_rows(2)
    for number, tokenizer in enumerate((ours, copy)):
        (out := tmp_path / f"out{number}").mkdir()
        shutil.copy(folder / "config.json", out)
        families.assert_written(tokenizer, out, TEXTS, auto)
    again = find_tokenizer(tmp_path / "out0")
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    return ours


@pytest.mark.parametrize("family", families.MAKERS)
def test_rows_of_every_family_are_those_of_auto_tokenizer(tmp_path, offline, family):
    families.make(tmp_path / "in", family)
    assert_equal(tmp_path / "in", tmp_path)


DIGITS = {"type": "Digits", "individual_digits": True}
FLAGS = {"content": "blues", "single_word": True, "lstrip": True}
FLAGS |= {"rstrip": False, "normalized": False, "special": False}
CUT = {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}}


def added(folder, **flags):
    """Put the token "blues" into tokenizer.json and, with other `flags`, into tokenizer_config.json."""
    layout = json.loads((folder / "tokenizer.json").read_text())
    number = 1 + max(*(token["id"] for token in layout["added_tokens"]), len(layout["model"]["vocab"]) - 1)
    change_json(folder / "tokenizer.json", added_tokens=[*layout["added_tokens"], {"id": number, **FLAGS}])
    change_json(folder / "tokenizer_config.json", added_tokens_decoder={str(number): FLAGS | flags})


@pytest.mark.parametrize(
    ("family", "values", "rules"),
    [
        *(("roberta", {"add_prefix_space": value}, {}) for value in (True, False)),
        ("xlm-roberta", {"add_prefix_space": False}, {}),
        ("deberta-v2", {"do_lower_case": True}, {}),
        *(("bert", values, {}) for values in ({"do_lower_case": False}, {"strip_accents": False})),
        *((name, {}, {"normalizer": {"type": "Lowercase"}}) for name in ("bert", "roberta", "deberta", "camembert")),
        *((family, {}, {"pre_tokenizer": DIGITS}) for family in ("bert", "roberta", "xlm-roberta", "modernbert")),
        *((family, {}, CUT) for family in ("bert", "roberta", "modernbert")),
        ("roberta", {"trim_offsets": False, "padding_side": "left", "model_max_length": 5}, {}),
        ("roberta", {"sep_token": "<s>"}, {}),
        ("modernbert", {"model_input_names": ["input_ids", "attention_mask"]}, {}),
        ("bert", {"tokenizer_class": "DistilBertTokenizer"}, {}),
        *(("bert", {}, {"added": {flag: not FLAGS[flag]}}) for flag in ("single_word", "normalized", "lstrip")),
        ("roberta", {}, {"added": {"rstrip": True, "single_word": False}}),
        ("xlm-roberta", {"tokenizer_class": "NllbTokenizer"}, {}),
        ("bert", {"tokenizer_class": "RobertaTokenizer"}, {}),
        ("roberta", {"cls_token": "<cls>"}, {}),
        ("roberta", {"split_special_tokens": True}, {}),
    ],
)  # fmt: skip
def test_a_contradiction_is_decided_as_auto_tokenizer_does(tmp_path, offline, family, values, rules):
    folder = tmp_path / "in"
    families.make(folder, family, **values)
    if "added" in rules:
        added(folder, **rules["added"])
    else:
        change_json(folder / "tokenizer.json", **rules)
    ours, words = assert_equal(folder, tmp_path), "gives AutoTokenizer other ids or special pieces than its tokenizer.j"
    if ours.fingerprint == build_tokenizer("HuggingFace", tokenizer_model=folder).fingerprint:
        refuse_other_ids(str(folder))
    else:
        refused(words, refuse_other_ids, str(folder))


def test_preprocess_refuses_a_folder_with_other_ids_than_auto_tokenizer(tmp_path, offline):
    (tmp_path / "text.jsonl").write_text('{"text": "red cats"}\n')
    families.make(tmp_path, "roberta", add_prefix_space=True)
    words = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "data")]
    words += ["--tokenizer-type", "HuggingFace", "--tokenizer-model", str(tmp_path)]
    refused("its tokenizer_config.json gives AutoTokenizer other ids", preprocess.main, words)
    assert not [*tmp_path.glob("data*")]


def test_without_transformers_only_a_tokenizer_without_a_class_is_read(tmp_path, offline, monkeypatch):
    spaced, cased = {"add_prefix_space": True}, {"do_lower_case": False}
    folders = {"roberta": spaced, "deberta-v2": {}, "bert": cased, "bert uncased": {}, "modernbert": spaced}
    for name, values in folders.items():
        families.make(tmp_path / name, name.split()[0], **values)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert find_tokenizer(tmp_path / "modernbert").tokenizer_type == "HuggingFace"
    for name in folders.keys() - {"modernbert"}:
        refused("from which transformers must make the tokenizer", find_tokenizer, tmp_path / name)
