"""Precision, recall and F1 of whole entities in tag sequences, equal to those of the `seqeval` package.

A predicted entity is correct if its type, first word and last word are all correct (CoNLL-2003, Tjong Kim Sang and
De Meulder, arXiv:cs/0306050). Counts are summed over all sentences and types (micro average). Precision, recall and
F1 = 2·correct / (gold + predicted) are None (undefined) if their denominator is 0; seqeval gives 0 there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"
PREFIXES = ("B", "I", "E", "S")
"""Prefixes of tags: begin, inside, end (last word) and single (only word). IOB2 has the first two, IOBES all."""

Entity = tuple[str, int, int]
"""Type, first word and end (exclusive)."""


class EntityScores(NamedTuple):
    """Numbers of entities over all sentences."""

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
    """Count the entities of all sentences, given the tags of each. `entities_of` explains `strict`."""
    counts = [0, 0, 0]
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        expected, found = set(entities_of(gold_tags, strict)), set(entities_of(predicted_tags, strict))
        counts = [a + len(b) for a, b in zip(counts, (expected, found, expected & found), strict=True)]
    return EntityScores(*counts)


def entities_of(tags: Sequence[str], strict: bool = False) -> list[Entity]:
    """Return the entities of a sentence in order.

    By default the rules are the lenient ones of seqeval and conlleval: every tag other than O belongs to an entity, and
    an entity begins at B, at S, after E or S, after O, and at a change of type. `strict` applies the rules of IOB2: an
    entity is a B and the I of the same type that follow it; other tags count as O.
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
    """Return whether a tag belongs to the entity of the tag before it."""
    if OUTSIDE in (before, tag) or entity_type(before) != entity_type(tag):
        return False
    if strict:
        return _prefix(tag) == "I"
    return _prefix(before) in "BI" and _prefix(tag) in "IE"
