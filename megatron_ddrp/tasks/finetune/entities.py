"""Precision, recall and F1 of whole entities in tag sequences, equal to those of the `seqeval` package.

An entity counts where type, first and last word are all right (CoNLL-2003, Tjong Kim Sang and De Meulder, cs/0306050).
Counts are summed over all sentences and types (micro average). F1 = 2·correct / (gold + predicted) is None, undefined,
where neither side has an entity; precision and recall are None where their denominator is 0. seqeval gives 0 in these
places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"
PREFIXES = ("B", "I", "E", "S")
"""Begin, inside, end (last word) and single (only word); IOB2 has the first two, IOBES all."""

Entity = tuple[str, int, int]
"""Type, first word and the word behind the last one."""


class EntityScores(NamedTuple):
    """Counts of entities over all sentences."""

    gold: int
    predicted: int
    correct: int

    @property
    def precision(self) -> float | None:
        """Share of the predicted entities that are correct."""
        return self.correct / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        """Share of the gold entities that were found."""
        return self.correct / self.gold if self.gold else None

    @property
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall."""
        both = self.gold + self.predicted
        return 2 * self.correct / both if both else None


def score_entities(
    gold: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]], strict: bool = False
) -> EntityScores:
    """Count the entities of all sentences, given the tags of each; `strict` as in `entities_of`."""
    counts = [0, 0, 0]
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        expected, found = set(entities_of(gold_tags, strict)), set(entities_of(predicted_tags, strict))
        counts = [a + len(b) for a, b in zip(counts, (expected, found, expected & found), strict=True)]
    return EntityScores(*counts)


def entities_of(tags: Sequence[str], strict: bool = False) -> list[Entity]:
    """Return the entities of a sentence in order.

    The lenient rules of seqeval's default and of conlleval: every tag other than O belongs to an entity. One begins at
    B, at S, behind E or S, and wherever the type changes or O was before. The strict rules of IOB2: an entity is a B
    and the I of the same type that follow it; other I count as O.
    """
    found: list[Entity] = []
    begin, before = 0, OUTSIDE
    for position, tag in enumerate([*tags, OUTSIDE]):
        if _continues(before, tag, strict):
            before = tag
            continue
        if before != OUTSIDE:
            found.append((entity_type(before), begin, position))
        starts = tag != OUTSIDE and not (strict and _prefix(tag) != "B")
        begin, before = position, tag if starts else OUTSIDE
    return found


def check_tags(tags: Iterable[str]) -> None:
    """Raise `ValueError` with the reason for a tag that names no entity type, such as a part of speech."""
    for tag in tags:
        if tag != OUTSIDE and not (_prefix(tag) in PREFIXES and tag[1:2] == "-" and tag[2:]):
            raise ValueError(
                f"tag {tag!r}, expected O, or B- or I- and a type, such as B-PER (also E- and S-); for tags of single "
                "words use --metric accuracy or macro-f1"
            )


def entity_type(tag: str) -> str:
    """Return the type in a tag: PER of B-PER."""
    return tag[2:]


def _prefix(tag: str) -> str:
    return tag[:1]


def _continues(before: str, tag: str, strict: bool) -> bool:
    """Tell whether a tag belongs to the entity of the tag before it."""
    if OUTSIDE in (before, tag) or entity_type(before) != entity_type(tag):
        return False
    if strict:
        return _prefix(tag) == "I"
    return _prefix(before) in "BI" and _prefix(tag) in "IE"
