"""Learned vocabularies: size, special pieces, determinism; and a tokenizer's flags from a dataset's manifest."""

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megatron_ddrp.commands import preprocess, train_tokenizer
from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.dataset.indexed_dataset import PATH, TokenizerFlags, complete, recorded_flags, relative_path
from megatron_ddrp.data.tokenizers import vocabulary
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import SPECIALS, train_byte_bpe, train_sentencepiece, train_wordpiece
from tests.datasets import write_dataset
from tests.refusals import refused, wrong_arguments
from tests.unit.conversion.conftest import wordpiece

TOOL = Path(__file__).parents[3] / "tools" / "train_tokenizer.py"


@pytest.fixture(scope="module")
def corpus():
    """Texts over 400 made-up words, some with accents and capitals."""
    noise = random.Random(1)
    syllables = ["ba", "Do", "ki", "lé", "mu", "ra", "st", "en", "ing", "or"]
    words = ["".join(noise.choices(syllables, k=noise.randint(1, 4))) for _ in range(400)]
    return [" ".join(noise.choices(words, k=40)) + "." for _ in range(200)]


@pytest.fixture
def run(run_tool):
    """Run the command with words, in this process."""
    return partial(run_tool, train_tokenizer)


def test_wordpiece_has_the_size_the_specials_no_duplicates_and_covers_every_word(corpus, tmp_path):
    pieces, alphabet = train_wordpiece(corpus, 150)
    assert len(pieces) == len(set(pieces)) == 150 and pieces[:5] == SPECIALS
    assert not any(piece != piece.lower() or "é" in piece for piece in pieces[5:])
    assert (alphabet.characters, alphabet.coverage, alphabet.summary()) == (alphabet.of, 1.0, "")
    cased, _ = train_wordpiece(corpus, 150, lower=False)
    assert any("D" in piece for piece in cased) and any("é" in piece for piece in cased)
    tokenizer = wordpiece(tmp_path / "vocab.txt", pieces, "BertWordPieceLowerCase")
    ids = [i for text in corpus for i in tokenizer.encode(text)]
    assert tokenizer.unk_id not in ids and len(ids) < sum(map(len, corpus)) / 2
    rare = list(map(chr, range(0x4E00, 0x4E08)))
    assert not set(rare) & set(train_wordpiece([*corpus * 3, "".join(rare)], 80)[0]), "rare characters give way"
    assert set(rare) <= set(train_wordpiece([*corpus * 3, "".join(rare)], 400)[0])
    assert train_wordpiece(["aa ab"], 1000)[0] == [*SPECIALS, "a", "b", "##a", "##b"], "and pairs that come once"
    assert "aa" in train_wordpiece(["aa ab aa"], 1000)[0]


def chinese(texts=400, characters=3000):
    """Texts over many ideographs, the first of them frequent."""
    noise = random.Random(1)
    weights = [1 / (rank + 20) for rank in range(characters)]
    return ["".join(map(chr, noise.choices(range(0x4E00, 0x4E00 + characters), weights, k=400))) for _ in range(texts)]


def test_a_script_of_many_characters_has_them_in_its_alphabet():
    """BERT's trainer keeps 1,000 characters, a fifth of all characters of Chinese text would be unknown."""
    pieces, alphabet = train_wordpiece(chinese(), 21_128)
    assert alphabet.characters > 2900 and alphabet.coverage >= 0.9995 and len(pieces) == 5 + alphabet.characters
    assert alphabet.summary().startswith(f"alphabet: {alphabet.characters:,} of {alphabet.of:,} characters, 99.9")
    assert train_wordpiece(chinese(), 1500)[1].characters == 1000, "as many as ever, in a small vocabulary"


def test_the_command_says_what_it_leaves_out_and_how_much_its_alphabet_covers(run, tmp_path):
    (tmp_path / "in.txt").write_text("\n\n".join(chinese()))
    flags = ("--input", tmp_path / "in.txt", "--output", tmp_path / "v.txt", "--overwrite", "--vocab-size")
    done = run(*flags, 4000)
    assert done.stdout.startswith("2,005 pieces (4,000 were asked for) → ")
    assert "\nalphabet: 2,000 of 3,000 characters, 9" in done.stdout
    (tmp_path / "in.txt").write_text("red green red")
    assert run(*flags, 4000).stdout.splitlines()[0].count("pieces (the text gives no more; 4,000 were asked for)") == 1
    (tmp_path / "in.txt").write_text(f"red {'green' * 40}\n\nred \u2585\u2585 blue", encoding="utf-8")
    assert "\n1 word of more than 100 characters left out: " in run(*flags, 60).stdout
    assert "\n2 characters \u2585 (U+2585) left out: " in run(*flags, 60, "--type", "sentencepiece").stdout
    (tmp_path / "in.txt").write_text("\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48 red\n\nred blue\n\ngreen")
    warning = "warning: 11.8% of the letters lose a mark that spells another letter or vowel, as in Thai, Hindi or"
    told = run(*flags, 60)
    assert told.returncode == 0 and told.stderr.startswith(warning) and told.stderr.count("\n") == 1
    assert run(*flags, 60, "--cased").stderr == run(*flags, 60, "--type", "sentencepiece").stderr == ""


def test_letters_and_those_that_lose_a_mark_are_counted():
    expected = {
        "red7": (3, 0),
        "\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48": (2, 2),  # Thai, two marks on each letter
        "\u0939\u093f\u0928\u094d\u0926\u0940": (3, 1),  # Hindi: of the signs only the virama takes no space
        "\u0939\u094b\u0902": (1, 1),  # a mark behind a sign that takes space
        "\u304c\u304b": (2, 1),  # Japanese: ga becomes ka
        "\ud55c\uad6d": (6, 0),  # Korean syllables fall into parts, all of which stay
        "Vi\u1ec7t\u0451\u03ac": (6, 0),  # accents of Latin, Cyrillic and Greek
        "\u05e9\u05c1\u05b8\u0645\u064f\u062d": (3, 0),  # points of Hebrew and Arabic
        "\u4e2d\u6587": (2, 0),
    }
    assert {word: vocabulary.count_stripped(word) for word in expected} == expected


def test_sentencepiece_has_berts_ids_for_the_specials(corpus, tmp_path):
    model, size, note = train_sentencepiece(corpus, 120)
    (tmp_path / "a.model").write_bytes(model)
    tokenizer = build_tokenizer("SentencePiece", tokenizer_model=tmp_path / "a.model")
    assert tokenizer.pieces[:5] == SPECIALS and tokenizer.vocab_size == size == 120 and note == ""
    ids = tokenizer.encode("[CLS] Badoki [MASK]")
    assert not {tokenizer.cls_id, tokenizer.mask_id} & set(ids)
    assert tokenizer.encode("BADOKI") == tokenizer.encode("badoki")


INSERTED = ["\u2585", "\u2581", "\u2028", "\0", "\t", "[CLS]", "<unk>", "quick brown lazy fox " * 3200]


@pytest.mark.parametrize("inserted", INSERTED, ids=lambda text: ascii(text[:6]))
def test_sentencepiece_learns_from_every_line(inserted):
    """Its trainer skips lines with U+2585 and lines of many bytes without a word."""
    line = f"la{inserted}zy {inserted}fox{inserted}"
    model, _, note = train_sentencepiece(["quick brown", line] * 4, 80)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    letters = {letter for i in range(processor.GetPieceSize()) for letter in processor.IdToPiece(i)[-9:]}
    assert set("quickbrownlazyfox") <= letters
    count = line.count("\u2585") * 4
    assert note.startswith(f"{count} characters \u2585 (U+2585) left out") if count else note == ""


def test_byte_bpe_is_the_librarys_with_berts_ids_for_the_specials(corpus, tmp_path):
    content, size, note = train_byte_bpe(iter(["", *corpus]), 300, lower=False)
    (tmp_path / "tokenizer.json").write_bytes(content)
    tokenizer = build_tokenizer("HuggingFace", tokenizer_model=tmp_path)
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator(corpus, 300, special_tokens=SPECIALS, show_progress=False)
    assert tokenizer.pieces == sorted(theirs.get_vocab(), key=theirs.get_vocab().get) and size == 300 and note == ""
    assert tokenizer.pieces[:5] == SPECIALS and not tokenizer.drops_text
    for text in (*corpus[:20], "Ünknown 中文 \u200b\t\n  [MASK] \x00"):
        ids = tokenizer.encode(text)
        assert "[MASK]" in text or ids == theirs.encode(text).ids
        assert tokenizer.decode(ids) == text and not {*range(5)} & {*ids}
    masked = tokenizer.encode_with_masks("ba [MASK] ki")
    assert masked == [*tokenizer.encode("ba"), tokenizer.mask_id, *tokenizer.encode(" ki")], "the space is the mask's"
    (tmp_path / "tokenizer.json").write_bytes(train_byte_bpe(corpus, 300)[0])
    folded = build_tokenizer("HuggingFace", tokenizer_model=tmp_path)
    assert folded.encode("BaDo LÉ") == folded.encode("bado lé") and folded.encode("lé") != folded.encode("le")


LONG = {
    "a": "a" * 101,
    "accent": "B" * 300 + "é",
    "thai": "\u0e17\u0e35" * 101,  # Thai has no spaces between words
    "dna": "".join(random.Random(0).choices("acgt", k=5000)),  # of much longer ones a trainer finds no end
}


@pytest.mark.parametrize("lower", [True, False], ids=["lower", "cased"])
@pytest.mark.parametrize("word", LONG.values(), ids=LONG)
def test_wordpiece_does_not_learn_from_words_that_tokenization_makes_unknown(corpus, word, lower):
    pieces, alphabet = train_wordpiece([*corpus, f"{word} Do {word}"], 300, lower)
    same, without = train_wordpiece([*corpus, "Do"], 300, lower)
    assert pieces == same and alphabet.pieces == without.pieces
    assert (alphabet.long_words, without.long_words, without.left_out()) == (2, 0, "")
    words = "2 words of more than 100 characters left out: WordPiece makes such words [UNK]"
    assert alphabet.left_out().startswith(words)


def test_wordpiece_learns_from_words_that_tokenization_divides(tmp_path):
    """Marks that are stripped do not count, and punctuation marks and ideographs are words of their own."""
    for word in ("a" * 100, "e\u0301" * 100, "ab." * 90, "\u4e2d" * 200, "a-" * 500):
        pieces, alphabet = train_wordpiece([word] * 3, 100)
        tokenizer = wordpiece(tmp_path / "vocab.txt", pieces, "BertWordPieceLowerCase")
        assert alphabet.long_words == 0 and tokenizer.unk_id not in tokenizer.encode(word), ascii(word[:3])


def test_mistakes_are_told(corpus):
    for train in (train_wordpiece, train_sentencepiece):
        for nothing in (" \n ", "\u200b\u200b", "\x01\x02 \x7f"):
            refused("no text to learn", train, ["", nothing], 100)
        wrong_arguments("--vocab-size 8", train, corpus, 8)
    only_long = "no text .* all its words have more than 100 characters; try --type sentence"
    refused(only_long, train_wordpiece, ["a" * 101], 100)
    refused("no text to learn", train_byte_bpe, ["", " \n "], 300)
    words = "--vocab-size 260 is too small: 5 special pieces and 256 bytes need at least 261"
    wrong_arguments(words, train_byte_bpe, corpus, 260)


@pytest.mark.parametrize(("kind", "size"), [("wordpiece", 200), ("byte-bpe", 300)])
def test_command_is_deterministic_and_replaces_nothing_unasked(run, corpus, tmp_path, kind, size):
    """Another process too, because the order of the trainer's hash tables differs from one to the next."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus))
    output = tmp_path / "vocab.txt"
    flags = ("--input", tmp_path / "in.jsonl", "--vocab_size", size, "--output", output, "--type", kind)
    done = run(*flags)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(f"{size} pieces → {output}\n")
    first = output.read_bytes()
    again = run(*flags)
    assert again.returncode == 1 and "exists already; give --overwrite" in again.stderr
    subprocess.run([sys.executable, str(TOOL), *map(str, flags), "--overwrite"], check=True, timeout=60)
    assert output.read_bytes() == first


def test_the_vocabulary_to_replace_is_no_text(run, corpus, tmp_path):
    for number, text in enumerate(corpus):
        (tmp_path / f"{number}.txt").write_text(text)
    flags = ("--input", tmp_path, "--vocab-size", 200, "--output", tmp_path / "vocab.txt", "--overwrite")
    first, again = ((run(*flags).stdout, (tmp_path / "vocab.txt").read_bytes()) for _ in range(2))
    assert first == again


KINDS = {"": "BertWordPieceLowerCase", "--cased": "BertWordPieceCase", "--type sentencepiece": "SentencePiece"}
KINDS["--type byte-bpe --vocab-size 300"] = "HuggingFace"


@pytest.mark.parametrize(("flags", "kind"), KINDS.items(), ids=KINDS)
def test_the_command_that_it_prints_makes_a_dataset_without_a_warning(run, run_tool, corpus, tmp_path, flags, kind):
    (tmp_path / "in put.jsonl").write_text("".join(json.dumps({"body": text.title()}) + "\n" for text in corpus))
    words = ("--input", tmp_path / "in put.jsonl", "--json-keys", "body", "--vocab-size", 120, "--on-error", "skip")
    done = run(*words, "--output", tmp_path / "v.txt", *flags.split())
    assert done.returncode == 0, done.stderr
    program, *command = shlex.split(done.stdout.split("next: ")[1])
    assert program == "megatron-ddrp" and "--workers" in command and command[command.index("--on-error") + 1] == "skip"
    assert command[command.index("--tokenizer-type") + 1] == kind
    made = run_tool(preprocess, *command[1:])
    assert (made.returncode, made.stderr) == (0, "") and (tmp_path / "corpus_body_document.idx").exists()


@pytest.mark.parametrize(("kind", "size"), [("wordpiece", 80), ("sentencepiece", 60), ("byte-bpe", 261)])
def test_command_stops_at_a_bad_line_or_skips_it(run, corpus, tmp_path, kind, size):
    lines = [json.dumps({"text": text}) for text in corpus[:20]] + ["{bad"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    flags = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "a.model", "--type", kind, "--vocab-size", size)
    stopped = run(*flags)
    assert stopped.returncode == 1 and "in.jsonl:21: not JSON" in stopped.stderr and stopped.stderr.count("\n") == 1
    assert not list(tmp_path.glob("a.model*"))
    skipped = run(*flags, "--on-error", "skip")
    assert skipped.returncode == 0, skipped.stderr
    assert "1 unreadable records skipped" in skipped.stdout and (tmp_path / "a.model").exists()
    (tmp_path / "in.jsonl").write_text("{bad\n[]\n")
    told = run(*flags, "--on-error", "skip", "--overwrite").stderr
    assert "2 records skipped, the first because of " in told and "in.jsonl:1: not JSON (" in told


def made_with(prefix, kind, path):
    manifest = {"tokenizer": {"type": kind, "fingerprint": "f"}, PATH: relative_path(path, prefix)}
    return write_dataset(prefix, [[[1]]], manifest=manifest).prefix


def test_flags_that_are_not_given_come_from_the_first_manifest_that_has_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "a.model").touch()
    plain = write_dataset(tmp_path / "data" / "plain", [[[1]]]).prefix
    pieces = made_with(tmp_path / "data" / "pieces", "SentencePiece", tmp_path / "a.model")
    nothing, other = TokenizerFlags(), TokenizerFlags("BertWordPieceCase", "v.txt")
    assert complete(nothing, [plain, pieces]) == ("SentencePiece", None, "a.model")
    assert complete(nothing, [plain]) == ("BertWordPieceLowerCase", None, None)
    assert complete(TokenizerFlags(vocab_file="v.txt"), [plain]) == ("BertWordPieceLowerCase", "v.txt", None)
    assert complete(TokenizerFlags(tokenizer_model="b.model"), [pieces]) == ("SentencePiece", None, "b.model")
    assert complete(other, [pieces]) == other, "what the flags say is checked against the dataset later"
    for flags in ({"vocab_file": "v.txt"}, {"vocab_file": ""}, {"tokenizer_model": ""}):
        chosen = complete(TokenizerFlags(**flags), [pieces])
        assert chosen == TokenizerFlags("SentencePiece", **flags), "no vocabulary that is given is ignored"
        refused(r"--tokenizer-type SentencePiece needs --tokenizer-model \(a local path\)", build_tokenizer, *chosen)
    assert complete(nothing, [pieces]).words() == ["--tokenizer-type", "SentencePiece", "--tokenizer-model", "a.model"]


def test_a_tree_can_be_moved_and_a_lost_vocabulary_is_named(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "data").mkdir(parents=True)
    (old / "vocab.txt").touch()
    made_with(old / "data" / "a", "BertWordPieceCase", old / "vocab.txt")
    old.rename(new)
    assert complete(TokenizerFlags(), [new / "data" / "a"]).vocab_file == str(new / "vocab.txt")
    (new / "vocab.txt").unlink()
    said = r"data/a was made with .*vocab\.txt, which is not there any more"
    refused(said, complete, TokenizerFlags(), [new / "data" / "a"])
    assert recorded_flags(new / "data" / "a").path == str(new / "vocab.txt")
    shutil.rmtree(new)
    assert recorded_flags(new / "data" / "a") == TokenizerFlags()


def test_a_missing_dataset_comes_with_the_ones_that_are_there(tmp_path):
    for name in ("wiki_text", "wiki_title", "books_text"):
        write_dataset(tmp_path / f"{name}_document", [[[1]]])
    (tmp_path / "news.unfinished").mkdir()
    for typed, hint in {
        "wiki_txt_document": "did you mean {0}/wiki_text_document?",
        "wiki.bin": "did you mean {0}/wiki_text_document or {0}/wiki_title_document?",
        "novels": "the folder has {0}/books_text_document, {0}/wiki_text_document, {0}/wiki_title_document",
        "news_text_document": "its preprocessing has not ended ({0}/news.unfinished): run the same command again",
        "none/wiki": "there is no folder {0}/none",
    }.items():
        said = re.escape(f".idx: No such file or directory; {hint.format(tmp_path)}")
        refused(said, IndexedDataset, tmp_path / typed)
        refused(said, complete, TokenizerFlags(), [tmp_path / typed])  # before a missing vocabulary


@pytest.mark.parametrize("shape", ["chain", "folder", "store"])
def test_a_dataset_behind_links_finds_its_vocabulary(tmp_path, shape):
    data, runs, other = tmp_path / "data", tmp_path / "runs", tmp_path / "runs" / "deep"
    data.mkdir()
    other.mkdir(parents=True)
    (data / "vocab.txt").touch()
    made_with(data / "a", "BertWordPieceCase", data / "vocab.txt")
    prefix = {"folder": other / "linked" / "a", "store": data / "a"}.get(shape, other / "a")
    if shape == "folder":
        (other / "linked").symlink_to(data)
    for file in () if shape == "folder" else ("a.bin", "a.idx", "a.json"):
        if shape == "store":  # the files themselves lie elsewhere, under other names, and links take their place
            (data / file).rename(other / f"blob-{file}")
            (data / file).symlink_to(other / f"blob-{file}")
        else:
            (runs / file).symlink_to(f"../data/{file}")
            (other / file).symlink_to(runs / file)
    if shape == "chain":  # a vocabulary of that name beside the links is another one
        (other / "vocab.txt").touch()
    assert complete(TokenizerFlags(), [prefix]).vocab_file == str(data / "vocab.txt")


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
