"""Training of WordPiece (vocab.txt), SentencePiece unigram (.model) and byte-level BPE (tokenizer.json) vocabularies.

It also has the warnings about unfit vocabularies.

The same text and flags always give the same vocabulary.
"""

from __future__ import annotations

import functools
import io
import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from megatron_ddrp.data.tokenizers.libraries import LONGEST_WORD, WORDS, read_model
from megatron_ddrp.data.tokenizers.tokenizer import NONE, SPECIAL_PIECES, Tokenizer, usual_rows
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

MOST_UNKNOWN = 0.01
"""Share of unknown pieces in a text above which a warning is given."""
MOST_IMPOSSIBLE = 0.01
"""Share of impossible pieces in a vocabulary above which a warning is given; bert-base-uncased has none."""

MOST_STRIPPED = 0.01
"""Share of a text's letters that may lose a mark of their script before a warning is given."""
STRIPPED_BY_CUSTOM = ("LATIN", "GREEK", "CYRILLIC", "HEBREW", "ARABIC")
"""Scripts, by the first word of their letters' names, that are often written without accents or vowel points."""


def unknown_share(unknown: int, tokens: int, dropped: int = 0) -> str:
    """Return the share of unknown pieces among the tokens of a text, and the number of its dropped characters."""
    share = f"{unknown / max(1, tokens):.2%} unknown pieces"
    return f"{share}, {dropped:,} characters dropped" if dropped else share


def warn_of_unknown(prefix: str, unknown: int, tokens: int, dropped: int = 0) -> str | None:
    """Return a warning if too much of a dataset's text is unknown pieces or dropped characters, otherwise None."""
    if unknown + dropped <= MOST_UNKNOWN * tokens:
        return None
    found = f"{unknown:,} of {tokens:,} tokens ({unknown / max(1, tokens):.1%}) are unknown pieces"
    if dropped:
        found = f"{dropped:,} characters are dropped beside {tokens:,} tokens"
    return (
        f"warning: {prefix}: {found}: the vocabulary does not fit the text; check its language, case and tokenizer "
        "type, or train one on this text"
    )


def warn_of_vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Return what a user must know about a vocabulary wherever it is loaded."""
    lines = []
    if tokenizer.drops_text:
        lines.append(
            "warning: this vocabulary has neither an unknown piece nor pieces for all bytes: characters that it lacks "
            "are dropped from every text without a trace; preprocess counts them"
        )
    if others := [role for role in tokenizer.roles_of("unk") if role != "[UNK]"]:
        piece = tokenizer.pieces[tokenizer.unk_id]
        lines.append(f"{piece!r} is [UNK] and {' and '.join(others)}; the pieces spell all bytes, so no text gives it")
    return [*lines, *filter(None, [warn_of_impossible(tokenizer)])]


def warn_of_impossible(tokenizer: Tokenizer) -> str | None:
    """Return a warning if too many pieces of a vocabulary can never occur, otherwise None."""
    impossible = tokenizer.count_impossible()
    if impossible <= MOST_IMPOSSIBLE * tokenizer.vocab_size:
        return None
    return (
        f"warning: {impossible:,} of {tokenizer.vocab_size:,} pieces can never occur: they have capitals or accents, "
        f"which {tokenizer.tokenizer_type} removes from text; did you mean BertWordPieceCase, or, in a Hugging Face "
        'folder, "do_lower_case": false in tokenizer_config.json?'
    )


def warn_of_unmarked_words(tokenizer: Tokenizer) -> str | None:
    """Return a warning if a vocabulary marks neither where words begin nor where they end, otherwise None."""
    if tokenizer.word_side != NONE:
        return None
    return (
        "warning: this vocabulary marks neither begins nor ends of words, so every piece counts as a word: --masking "
        "whole-word masks single pieces, ngram neighbouring pieces, --notes are of pieces, and --score l2r and "
        "whole-word equal pll"
    )


def warn_of_stripped(share: float) -> str | None:
    """Return a warning if too large a share of a text's letters loses a mark (`count_stripped`), otherwise None."""
    if share <= MOST_STRIPPED:
        return None
    return (
        f"warning: {share:.1%} of the letters lose a mark that spells another letter or vowel, as in Thai, Hindi or "
        "Japanese, because lower-case WordPiece strips accents: use --cased, or --type sentencepiece"
    )


def count_stripped(word: str) -> tuple[int, int]:
    """Return the number of a word's letters, and the number of those that lose a mark when accents are stripped.

    Letters of the scripts in `STRIPPED_BY_CUSTOM` count only for the first number.
    """
    if word.isascii():
        return sum(map(str.isalpha, word)), 0
    letters = stripped = 0
    loses = False  # whether a mark here belongs to a letter that has lost none yet
    for kind in map(_kind, unicodedata.normalize("NFD", word)):
        if kind == "mark":
            stripped, loses = stripped + loses, False
        elif kind != "spacing mark":
            letters, loses = letters + (kind != "other"), kind == "letter"
    return letters, stripped


@functools.cache
def _kind(character: str) -> str:
    """Return the kind of a character for `count_stripped`."""
    category, name = unicodedata.category(character), unicodedata.name(character, "")
    if category.startswith("L"):
        return "customary" if name.startswith(STRIPPED_BY_CUSTOM) else "letter"
    return {"Mn": "mark", "Mc": "spacing mark"}.get(category, "other")


NO_TEXT = "no text to learn a vocabulary from, give files that hold some"
SPECIALS = [SPECIAL_PIECES[role][0] for role in ("pad", "unk", "cls", "sep", "mask")]
"""First pieces of every vocabulary, in the order of their ids."""

ALPHABET_SIZE = 1000
"""Number of characters that an alphabet may have even if fewer cover the text, as in BERT's trainer."""
ALPHABET_COVERAGE = 0.9995
"""Share of the text's characters that an alphabet covers if it fits into half of the vocabulary."""
SENTENCE_BYTES = 1 << 16  # the SentencePiece trainer skips longer lines, so they are cut
RESERVED = "\u2585"  # the SentencePiece trainer's own character: it skips every line that holds it
SENTENCEPIECE_THREADS = 4  # fixed, because sums over threads depend on their number


class Alphabet(NamedTuple):
    """Characters of a WordPiece vocabulary."""

    pieces: list[str]
    """One-character pieces: `x`, then `##x` of those that occur inside words, both in order of their characters."""
    characters: int
    """Number of characters."""
    of: int
    """Number of characters of the text."""
    coverage: float
    """Share of the text, in characters, that the alphabet covers."""
    stripped: float = 0.0
    """Share of the text's letters that lose a mark with the accents; see `count_stripped`."""
    long_words: int = 0
    """Number of words of more than `LONGEST_WORD` characters, which are left out."""

    def summary(self) -> str:
        """Return a line about the characters left out; empty if there are none."""
        if self.characters == self.of:
            return ""
        share = min(self.coverage, 0.9999)  # never rounded to all of the text
        return f"alphabet: {self.characters:,} of {self.of:,} characters, {share:.2%} of the text; others become [UNK]"

    def left_out(self) -> str:
        """Return a line about the words left out; empty if there are none."""
        count = f"{self.long_words:,} word{'s' * (self.long_words > 1)} of more than {LONGEST_WORD} characters left out"
        return f"{count}: WordPiece makes such words [UNK]" if self.long_words else ""


def train_wordpiece(texts: Iterable[str], vocab_size: int, lower: bool = True) -> tuple[list[str], Alphabet]:
    """Learn a WordPiece vocabulary; return its pieces and its alphabet.

    The pieces are the special ones, the alphabet, then merges by frequency. There are at most `vocab_size` pieces,
    fewer only if no more pairs of pieces occur twice in the text. Raises `UserError` if there is no text or
    `vocab_size` is too small for the alphabet.

    The Rust WordPiece trainer numbers its alphabet in the order of a hash table and breaks ties between merges by these
    numbers, so two runs would differ. So words are counted first and the alphabet is given in a fixed order.
    """
    words, stripped, long_words = _count_words(texts, lower)
    if not words:
        longer = f": all its words have more than {LONGEST_WORD} characters; try --type sentencepiece"
        raise UserError(f"{NO_TEXT}{longer if long_words else ''}")
    alphabet = _alphabet(words, vocab_size)._replace(stripped=stripped, long_words=long_words)
    fixed = SPECIALS + alphabet.pieces
    backend = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    letters = [piece for piece in fixed if len(piece) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=fixed,  # in this order, and before any other
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    backend.train_from_iterator(_repeated(words), trainer)
    ids = backend.get_vocab()
    return sorted(ids, key=ids.__getitem__), alphabet


def train_sentencepiece(texts: Iterable[str], vocab_size: int, lower: bool = True) -> tuple[bytes, int, str]:
    """Learn a SentencePiece unigram model, special pieces first.

    Return the bytes of its .model file, its number of pieces, at most `vocab_size`, and a line about characters left
    out, empty if there are none. Raises `UserError` if there is no text or `vocab_size` is too small.
    """
    import sentencepiece

    reserved: Counter[str] = Counter()
    lines = _lines(texts, reserved)
    first = next(lines, None)
    if first is None:
        raise UserError(NO_TEXT)

    stopped: list[BaseException] = []

    def sentences() -> Iterator[str]:
        yield first
        try:
            yield from lines
        except BaseException as error:  # the trainer would turn it into its own error
            stopped.append(error)
            raise

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            normalization_rule_name="nmt_nfkc_cf" if lower else "nmt_nfkc",
            max_sentence_length=SENTENCE_BYTES + 4,
            num_threads=SENTENCEPIECE_THREADS,
            pad_id=0,
            pad_piece="[PAD]",
            unk_id=1,
            unk_piece="[UNK]",
            bos_id=-1,
            eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            minloglevel=2,
        )
    except RuntimeError as error:
        if stopped:
            raise stopped[0] from stopped[0].__cause__
        if "all_chars_count" in str(error):  # normalization leaves nothing of the text
            raise UserError(NO_TEXT) from None
        reason = str(error).rpartition("] ")[2].partition(" Increase ")[0] or str(error)
        raise UserError(f"--vocab-size {vocab_size}: {reason} Give another --vocab-size.", WRONG_ARGUMENTS) from None
    size = read_model(model.getvalue(), "the new model").GetPieceSize()
    held = f"{reserved.total():,} characters {RESERVED} (U+2585) left out"
    return model.getvalue(), size, f"{held}: SentencePiece reserves them, they become [UNK]" if reserved else ""


def train_byte_bpe(texts: Iterable[str], vocab_size: int, lower: bool = True) -> tuple[bytes, int, str]:
    """Learn a byte-level BPE vocabulary of the kind that RoBERTa and ModernBERT have.

    Its pieces are the special ones, the 256 bytes, then merges by frequency; so no text is unknown. A mask takes the
    space before it, as the word does that it stands for. Return the bytes of its tokenizer.json, its number of pieces,
    at most `vocab_size`, and an empty note. Raises `UserError` if there is no text or `vocab_size` is too small.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < (least := len(SPECIALS) + len(alphabet)):
        parts = f"{len(SPECIALS)} special pieces and {len(alphabet)} bytes need at least {least}"
        raise UserError(f"--vocab-size {vocab_size} is too small: {parts}", WRONG_ARGUMENTS)
    kept = filter(str.strip, texts)
    if (first := next(kept, None)) is None:
        raise UserError(NO_TEXT)
    backend = RustTokenizer(models.BPE())
    if lower:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(p, special=True, normalized=False, lstrip=p == SPECIALS[-1]) for p in SPECIALS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(itertools.chain([first], kept), trainer)
    backend.post_processor = usual_rows(SPECIALS.index("[CLS]"), SPECIALS.index("[SEP]")).processor(SPECIALS)
    return backend.to_str(pretty=True).encode(), backend.get_vocab_size(), ""


def _count_words(texts: Iterable[str], lower: bool) -> tuple[Counter[str], float, int]:
    """Return the counts of words after BERT's normalization and splitting.

    Also return the share of letters that lose a mark, and the number of words that are left out because they have more
    than `LONGEST_WORD` characters. Each distinct word is normalized once.
    """
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(WORDS.findall(text))
    normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
    splitter = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    letters = stripped = long_words = 0
    for word, count in raw.items():
        in_word, lost = count_stripped(word) if lower else (0, 0)
        letters, stripped = letters + count * in_word, stripped + count * lost
        for part, _ in splitter.pre_tokenize_str(normalizer.normalize_str(word)):
            if len(part) > LONGEST_WORD:
                long_words += count
            else:
                words[part] += count
    return words, stripped / max(1, letters), long_words


def _alphabet(words: Counter[str], vocab_size: int) -> Alphabet:
    """Return the most frequent characters.

    They are those that cover `ALPHABET_COVERAGE` of the text, and more of them up to `ALPHABET_SIZE` characters and a
    quarter of the vocabulary. A script of several thousand characters, such as Chinese, gets half of the vocabulary.
    """
    characters: Counter[str] = Counter()
    inside: set[str] = set()
    for word, count in words.items():
        for character in word:
            characters[character] += count
        inside.update(word[1:])
    ranked = sorted(characters, key=lambda character: (-characters[character], character))
    needed = ALPHABET_COVERAGE * characters.total()
    chosen: list[str] = []
    covered = pieces = 0
    for character in ranked:
        cost = 1 + (character in inside)
        is_large = len(chosen) >= ALPHABET_SIZE
        if covered >= needed and (is_large or pieces + cost > vocab_size // 4):
            break
        if is_large and pieces + cost > vocab_size // 2:
            break
        chosen.append(character)
        covered += characters[character]
        pieces += cost
    if vocab_size < len(SPECIALS) + pieces:
        least = (
            f"{len(SPECIALS)} special pieces and the text's alphabet of {pieces} need at least {len(SPECIALS) + pieces}"
        )
        raise UserError(f"--vocab-size {vocab_size} is too small: {least}", WRONG_ARGUMENTS)
    first = sorted(chosen)
    shown = first + [f"##{character}" for character in first if character in inside]
    return Alphabet(shown, len(chosen), len(characters), covered / characters.total())


def _repeated(words: Counter[str], batch: int = 10_000) -> Iterator[str]:
    """Yield text with each word repeated by its count, in parts of bounded size."""
    for word, count in words.items():
        for start in range(0, count, batch):
            yield f"{word} " * min(batch, count - start)


def _lines(texts: Iterable[str], reserved: Counter[str]) -> Iterator[str]:
    """Yield the lines of the texts that are not blank; very long ones are cut between characters.

    A reserved character becomes a space, and is counted in `reserved`.
    """
    width = SENTENCE_BYTES // 4  # a character has at most four bytes
    for text in texts:
        if RESERVED in text:
            reserved[RESERVED] += text.count(RESERVED)
            text = text.replace(RESERVED, " ")
        for line in text.splitlines():
            if line.strip():
                yield from (line[start : start + width] for start in range(0, len(line), width))
