"""AutoTokenizer gives the ids of training, with [CLS] and [SEP] around them."""

import io
import json
import unicodedata

import pytest

from megatron_ddrp.conversion.tokenizer_files import unigram_tokenizer, write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer

TEXTS = [
    "The cats, singing  birds\tand Caté.",
    "RED\u00a0dog's [bird] \u4e2d\u6587 \ufb01sh\u200b x\u0301",
    "   spaces  at both ends ",
    "\rline\nbreaks \r\n",
    "",
    "green-blue 3.14 \U0001f600\U0001f600 runs",
]


def assert_equal_ids(tokenizer, folder):
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        encoded = loaded(text)
        assert encoded["input_ids"] == [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id], text
    pair = loaded(TEXTS[0], TEXTS[1])
    first, second = len(tokenizer.encode(TEXTS[0])) + 2, len(tokenizer.encode(TEXTS[1])) + 1
    assert pair["token_type_ids"] == [0] * first + [1] * second
    roles = ("cls", "sep", "pad", "mask", "unk")
    assert [getattr(loaded, f"{role}_token_id") for role in roles] == [getattr(tokenizer, f"{r}_id") for r in roles]
    assert loaded(f"{loaded.mask_token} dog")["input_ids"][1] == tokenizer.mask_id
    assert len(loaded) == tokenizer.vocab_size
    assert loaded.model_max_length == 24


def write_config(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(params=["bert", "megatron_ddrp"])
def folder(request, tmp_path, offline):
    """A folder of a plain BERT, or of a model that transformers does not know."""
    folder = tmp_path / "hf"
    folder.mkdir()
    auto_map = {"AutoConfig": "modeling_ddrp.DdrpConfig"} if request.param != "bert" else {}
    write_config(folder, model_type=request.param, auto_map=auto_map)
    return folder


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_wordpiece(tmp_path, tokenizer, folder, kind):
    tokenizer = build_tokenizer(kind, tmp_path / "vocab.txt")
    line = write_tokenizer(tokenizer, folder, 24)
    assert line.startswith(kind) and "tokenizer.json" in line
    assert (folder / "vocab.txt").read_bytes() == (tmp_path / "vocab.txt").read_bytes()
    assert_equal_ids(tokenizer, folder)


def sentencepiece_model(tmp_path, **options):
    import sentencepiece

    options = {"vocab_size": 60, **options}
    stream = io.BytesIO()
    text = "red green blue cat dog bird runs sings singing the of and spaces at both ends a \ufb01sh"
    words = text.split()
    lines = [" ".join(words[i:] + words[:i]) for i in range(len(words))]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=stream,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path = tmp_path / "pieces.model"
    path.write_bytes(stream.getvalue())
    return build_tokenizer("SentencePiece", tokenizer_model=path)


OWN_SPECIALS = {"pad_id": 0, "pad_piece": "[PAD]", "unk_id": 1, "unk_piece": "[UNK]", "bos_id": -1, "eos_id": -1}


@pytest.mark.parametrize(
    "options",
    [
        {**OWN_SPECIALS, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"], "normalization_rule_name": "nmt_nfkc_cf"},
        {},
        {"byte_fallback": True, "vocab_size": 330},
        {"normalization_rule_name": "identity", "add_dummy_prefix": False},
    ],
    ids=["trained by us", "specials appended", "bytes", "plain"],
)
def test_sentencepiece_unigram(tmp_path, folder, options):
    tokenizer = sentencepiece_model(tmp_path, **options)
    write_tokenizer(tokenizer, folder, 24)
    assert_equal_ids(tokenizer, folder)


@pytest.mark.parametrize(
    "text", ["red [MASK] dog", "[MASK]s", "[MASK] runs", "sing[MASK][MASK]ing ", " [MASK] [MASK] of"]
)
def test_sentencepiece_parts_after_a_mask_are_those_inside_a_text(tmp_path, folder, text):
    """Japanese has no spaces: a "▁" after a mask would be a piece that training never saw there."""
    from transformers import AutoTokenizer

    tokenizer = sentencepiece_model(tmp_path, **OWN_SPECIALS, control_symbols=["[CLS]", "[SEP]", "[MASK]"])
    write_tokenizer(tokenizer, folder, 24)
    ids = tokenizer.encode_with_masks(text)
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == [tokenizer.cls_id, *ids, tokenizer.sep_id]
    spaces = "".join(tokenizer.pieces[i] for i in ids).replace("▁", " ")
    assert spaces.strip() == text.strip().replace(" [MASK]", "[MASK]")  # a masked word's own space is masked with it


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"])
def test_text_whose_marks_are_apart_has_the_ids_of_the_library(tmp_path, rule):
    """macOS writes Korean syllables as parts, and letters apart from their accents."""
    text = "\ud55c\uad6d\uc5b4 red \u1ec7\u0151 d\u00f3g \ufb01sh"
    tokenizer = sentencepiece_model(tmp_path, normalization_rule_name=rule, required_chars=text.replace(" ", ""))
    exported = unigram_tokenizer((tmp_path / "pieces.model").read_bytes(), tokenizer.pieces, tokenizer.unk_id)
    for form in ("NFC", "NFD"):
        changed = unicodedata.normalize(form, text)
        assert exported.encode(changed, add_special_tokens=False).ids == tokenizer.encode(changed)
    assert rule == "identity" or tokenizer.unk_id not in tokenizer.encode(changed)


def test_merges_left_out_at_random_are_not_exported(tmp_path, folder):
    """transformers would leave them out too, though nothing else in this file needs a change."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import models, processors

    specials = ["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]"]
    vocabulary = {piece: i for i, piece in enumerate([*specials, "a", "b", "ab"])}
    rust = RustTokenizer(models.BPE(vocabulary, [("a", "b")], dropout=0.9, unk_token="[UNK]"))
    rust.add_special_tokens(specials)
    rust.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    rust.save(str(tmp_path / "tokenizer.json"))
    write_tokenizer(build_tokenizer("HuggingFace", tokenizer_model=tmp_path), folder, 24)
    exported = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    assert {tuple(exported.encode("ab" * 5).ids) for _ in range(20)} == {(0, 7, 7, 7, 7, 7, 1)}


def test_other_sentencepiece_models_are_named(tmp_path):
    tokenizer = sentencepiece_model(tmp_path, model_type="bpe")
    line = write_tokenizer(tokenizer, tmp_path / "hf", 24)
    assert "AutoTokenizer cannot load it" in line
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["tokenizer.model"]


def test_hugging_face_keeps_its_rules_and_gains_our_specials(tmp_path, tokenizer, folder):
    """A copied tokenizer with truncation, padding and another template of its own."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import processors

    source = tmp_path / "source"
    write_tokenizer(tokenizer, source, 24)
    rust = RustTokenizer.from_file(str(source / "tokenizer.json"))
    rust.enable_truncation(3)
    rust.enable_padding(length=9)
    rust.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    rust.save(str(source / "tokenizer.json"))
    copied = build_tokenizer("HuggingFace", tokenizer_model=source)
    write_tokenizer(copied, folder, 24)
    assert_equal_ids(copied, folder)
