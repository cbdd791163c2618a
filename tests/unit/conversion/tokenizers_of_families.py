"""Tokenizers of the families, trained on a line of text, in folders as their authors publish them."""

import json

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron_ddrp.conversion.tokenizer_files import write_tokenizer
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from tests.sentencepiece_models import train_model
from tests.unit.conversion.conftest import change_json

TEXT = "red green blue cats and dogs, singing the red birds; runs at both ends"
ROLES = ("cls", "sep", "pad", "mask", "unk")
FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
BERT = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
GERMAN = ["f\u00fcr", "fur", "sch\u00f6n", "schon", "##e", "\u4e2d", "\u6587", "##\u6587", "F\u00fcr", "Fur"]


def byte_level(folder, specials, template, texts=None, prefix=False):
    """RoBERTa's kind, and with BERT's names of the special pieces ModernBERT's."""
    tokenizer = RustTokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(prefix), decoders.ByteLevel()
    options = {"special_tokens": specials, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=320, show_progress=False, **options)
    tokenizer.train_from_iterator(texts or [TEXT] * 3, trainer)
    cls, sep = ((piece, tokenizer.token_to_id(piece)) for piece in (specials[0], specials[2]))
    if template:
        tokenizer.post_processor = processors.RobertaProcessing(sep, cls)
    tokenizer.save(str(folder / "tokenizer.json"))


def unigram(folder, specials, template, texts=None):
    """XLM-R's kind, and with BERT's names of the special pieces DeBERTa-v3's."""
    tokenizer = RustTokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    options = {"special_tokens": specials, "unk_token": specials[3]}
    trainer = trainers.UnigramTrainer(vocab_size=60, show_progress=False, **options)
    tokenizer.train_from_iterator(texts or [TEXT, *TEXT.split()], trainer)
    cls, sep = specials[0], specials[2]
    if template:
        single, pair = f"{cls} $A {sep}", f"{cls} $A {sep} {sep} $B {sep}"
        ends = [(piece, tokenizer.token_to_id(piece)) for piece in (cls, sep)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))


def settings(folder, specials):
    names = {f"{role}_token": specials[(0, 2, 1, 4, 3)[i]] for i, role in enumerate(ROLES)}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def small_byte_level(folder):
    """DeBERTa's kind, as tokenizer.json."""
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *"abcd", "\u0120", "ab", "\u0120a"]
    merges = [("a", "b"), ("\u0120", "a")]
    tokenizer = RustTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def sentencepiece_model(tmp_path, **options):
    text = "red green blue cat dog bird runs sings singing the of and spaces at both ends a \ufb01sh"
    words = text.split()
    lines = [" ".join(words[i:] + words[:i]) for i in range(len(words))]
    return build_tokenizer("SentencePiece", tokenizer_model=train_model(tmp_path / "pieces.model", lines, **options))


def bert_vocabulary(folder, settings, config=None):
    """A BERT folder with vocab.txt, its settings, and no tokenizer.json."""
    (folder / "vocab.txt").write_text("\n".join([*BERT, *GERMAN]) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"} | (config or {})))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


MAKERS = {
    "bert": ("BertTokenizer", None, BERT),
    "electra": ("ElectraTokenizer", None, BERT),
    "roberta": ("RobertaTokenizer", byte_level, FAIRSEQ),
    "xlm-roberta": ("XLMRobertaTokenizer", unigram, FAIRSEQ),
    "camembert": ("CamembertTokenizer", unigram, FAIRSEQ),
    "deberta": ("DebertaTokenizer", byte_level, BERT),
    "deberta-v2": ("DebertaV2Tokenizer", unigram, BERT),
    "modernbert": ("PreTrainedTokenizerFast", byte_level, BERT),
    "megatron_ddrp": ("PreTrainedTokenizerFast", unigram, FAIRSEQ),
}
"""Family → class of its tokenizer, how to write it, and the names of its special pieces."""


def make(folder, family, **values):
    """Write a family's folder with tokenizer.json and the settings `values`."""
    kind, maker, specials = MAKERS[family]
    folder.mkdir(exist_ok=True)
    if maker:
        maker(folder, specials, template=True)
        settings(folder, specials)
    else:
        from transformers import BertTokenizer

        bert_vocabulary(folder, {})
        BertTokenizer.from_pretrained(folder).save_pretrained(folder)
        (folder / "vocab.txt").unlink()
    change_json(folder / "config.json", model_type=family)
    change_json(folder / "tokenizer_config.json", **{"tokenizer_class": kind} | values)


def assert_written(tokenizer, folder, texts, *originals):
    """Write a tokenizer into a folder: AutoTokenizer there, and the originals, have its rows; return the written line.

    The last two texts are a pair too.
    """
    from transformers import AutoTokenizer

    line = write_tokenizer(tokenizer, folder, 64)
    loaded = AutoTokenizer.from_pretrained(folder)
    for sides in (*((text,) for text in texts), texts[-2:]):
        row, segments, _ = tokenizer.rows.row([tokenizer.encode(side) for side in sides])
        for theirs in (loaded, *originals):
            found = theirs(*sides)
            assert (found["input_ids"], found.get("token_type_ids", [0] * len(row))) == (row, segments), sides
    roles = [f"{role}_token_id" for role in ROLES]
    assert [getattr(loaded, role) for role in roles] == [getattr(tokenizer, f"{role}_id") for role in ROLES]
    assert tokenizer.mask_id in loaded(f"a {loaded.mask_token} a")["input_ids"]
    assert (len(loaded), loaded.model_max_length) == (tokenizer.vocab_size, 64)
    return line
