"""Ids, roles and rows are those of AutoTokenizer, in a folder whose files contradict each other, and in its exports."""

import json
import sys

import pytest

from megatron_ddrp.commands import preprocess
from megatron_ddrp.conversion.tokenizer_files import find_tokenizer, refuse_other_ids, write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer, load_tokenizer
from megatron_ddrp.errors import UserError
from tests.unit.conversion.test_tokenizer_kinds import (
    BERT,
    FAIRSEQ,
    bert_vocabulary,
    byte_level,
    settings,
    unigram,
)

TEXTS = [
    *(
        "Red  cats sing",
        " F\u00fcr schon,\u4e2d\u6587 sch\u00f6n",
        "f\u00fcr\tRED \uff32\uff45\uff44 red3 12",
        "xbluesx blues BLUES.",
    ),
    "fu\u0308r schon fur",
]
PAIR = ("red cats", "Fur sing schon")


def change(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def make(folder, family, **values):
    """Write a family's folder with tokenizer.json and the settings `values`."""
    model_type, kind, maker, specials = {
        "bert": ("bert", "BertTokenizer", None, BERT),
        "electra": ("electra", "ElectraTokenizer", None, BERT),
        "roberta": ("roberta", "RobertaTokenizer", byte_level, FAIRSEQ),
        "xlm-roberta": ("xlm-roberta", "XLMRobertaTokenizer", unigram, FAIRSEQ),
        "camembert": ("camembert", "CamembertTokenizer", unigram, FAIRSEQ),
        "deberta": ("deberta", "DebertaTokenizer", byte_level, BERT),
        "deberta-v2": ("deberta-v2", "DebertaV2Tokenizer", unigram, BERT),
        "modernbert": ("modernbert", "PreTrainedTokenizerFast", byte_level, BERT),
        "megatron_ddrp": ("megatron_ddrp", "PreTrainedTokenizerFast", unigram, FAIRSEQ),
    }[family]
    if maker:
        maker(folder, specials, template=True)
        settings(folder, specials)
    else:
        from transformers import BertTokenizer

        bert_vocabulary(folder, {})
        BertTokenizer.from_pretrained(folder).save_pretrained(folder)
        (folder / "vocab.txt").unlink()
    change(folder, "config.json", model_type=model_type)
    change(folder, "tokenizer_config.json", **{"tokenizer_class": kind} | values)


def theirs(folder, *sides):
    """Ids and segments of a row by AutoTokenizer, without truncation."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(folder)(*sides)
    return found["input_ids"], found.get("token_type_ids", [0] * len(found["input_ids"]))


def assert_equal(folder, tmp_path, num_segments=2):
    """Ours has the rows of AutoTokenizer, and gives them to a run and its export."""
    from transformers import AutoTokenizer

    ours, auto = find_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert [ours.encode(text) for text in TEXTS] == auto(TEXTS, add_special_tokens=False)["input_ids"]
    ours.save(tmp_path / "run")
    copy = load_tokenizer(tmp_path / "run")
    copy.settle_rows(num_segments)
    for number, tokenizer in enumerate((ours, copy)):
        out = tmp_path / f"out{number}"
        out.mkdir()
        (out / "config.json").write_text((folder / "config.json").read_text())
        write_tokenizer(tokenizer, out, 64, num_segments)
        for sides in ((TEXTS[0],), *((text,) for text in PAIR), PAIR):
            row, segments, _ = ours.rows.row([ours.encode(side) for side in sides])
            assert (row, segments) == theirs(folder, *sides) == theirs(out, *sides)
    again = find_tokenizer(tmp_path / "out0")
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    return ours


@pytest.mark.parametrize(
    "family",
    ["bert", "electra", "roberta", "xlm-roberta", "camembert", "deberta", "deberta-v2", "modernbert", "megatron_ddrp"],
)
def test_rows_of_every_family_are_those_of_auto_tokenizer(tmp_path, offline, family):
    (tmp_path / "in").mkdir()
    make(tmp_path / "in", family)
    assert_equal(tmp_path / "in", tmp_path)


LOWER, NFKC = {"type": "Lowercase"}, {"type": "NFKC"}
DIGITS = {"type": "Digits", "individual_digits": True}
FLAGS = {
    "content": "blues",
    "single_word": True,
    "lstrip": True,
    "rstrip": False,
    "normalized": False,
    "special": False,
}
CUT = {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}}


def added(folder, **flags):
    """Put the token "blues" into tokenizer.json and, with other `flags`, into tokenizer_config.json."""
    layout = json.loads((folder / "tokenizer.json").read_text())
    number = 1 + max(*(token["id"] for token in layout["added_tokens"]), len(layout["model"]["vocab"]) - 1)
    change(folder, "tokenizer.json", added_tokens=[*layout["added_tokens"], {"id": number, **FLAGS}])
    change(folder, "tokenizer_config.json", added_tokens_decoder={str(number): FLAGS | flags})


@pytest.mark.parametrize(
    ("family", "values", "rules"),
    [
        *(("roberta", {"add_prefix_space": value}, {}) for value in (True, False)),
        *(("deberta", {"add_prefix_space": value}, {}) for value in (True, False)),
        ("xlm-roberta", {"add_prefix_space": False}, {}),
        ("deberta-v2", {"do_lower_case": True}, {}),
        ("deberta-v2", {"split_by_punct": True}, {}),
        *(("bert", values, {}) for values in ({"do_lower_case": False}, {"strip_accents": False})),
        ("bert", {"tokenize_chinese_chars": False}, {}),
        *((family, {}, {"normalizer": LOWER}) for family in ("bert", "roberta", "deberta", "camembert")),
        *((family, {}, {"normalizer": NFKC}) for family in ("bert", "roberta", "deberta", "camembert")),
        *((family, {}, {"normalizer": {"type": "StripAccents"}}) for family in ("bert", "xlm-roberta", "modernbert")),
        *((family, {}, {"pre_tokenizer": DIGITS}) for family in ("bert", "roberta", "xlm-roberta", "modernbert")),
        *((family, {}, {"pre_tokenizer": {"type": "Whitespace"}}) for family in ("bert", "roberta", "deberta-v2")),
        *((family, {}, CUT) for family in ("bert", "roberta", "modernbert")),
        ("roberta", {"trim_offsets": False, "padding_side": "left", "model_max_length": 5}, {}),
        ("roberta", {"sep_token": "<s>"}, {}),
        ("modernbert", {"sep_token": "[CLS]"}, {}),
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
    folder.mkdir()
    make(folder, family, **values)
    if "added" in rules:
        added(folder, **rules["added"])
    else:
        change(folder, "tokenizer.json", **rules)
    ours = assert_equal(folder, tmp_path)
    if ours.fingerprint == build_tokenizer("HuggingFace", tokenizer_model=folder).fingerprint:
        refuse_other_ids(str(folder))
        return
    with pytest.raises(UserError, match="gives AutoTokenizer other ids or special pieces than its tokenizer.json"):
        refuse_other_ids(str(folder))


def test_preprocess_refuses_a_folder_with_other_ids_than_auto_tokenizer(tmp_path, offline):
    from transformers import AutoTokenizer

    (tmp_path / "text.jsonl").write_text('{"text": "red cats"}\n')
    make(tmp_path, "roberta", add_prefix_space=True)
    words = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "data")]
    words += ["--tokenizer-type", "HuggingFace", "--tokenizer-model"]
    with pytest.raises(UserError, match="its tokenizer_config.json gives AutoTokenizer other ids"):
        preprocess.main([*words, str(tmp_path)])
    assert not [*tmp_path.glob("data*")]
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    preprocess.main([*words, str(tmp_path / "saved")])


@pytest.mark.parametrize(
    ("family", "values"),
    [("roberta", {"add_prefix_space": True}), ("deberta-v2", {}), ("bert", {"do_lower_case": False}), ("bert", {})],
)
def test_without_transformers_a_class_with_rules_of_its_own_is_refused(tmp_path, offline, monkeypatch, family, values):
    make(tmp_path, family, **values)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="from which transformers must make the tokenizer") as refused:
        find_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_without_transformers_a_tokenizer_without_a_class_is_read(tmp_path, offline, monkeypatch):
    make(tmp_path, "modernbert", add_prefix_space=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert find_tokenizer(tmp_path).tokenizer_type == "HuggingFace"
