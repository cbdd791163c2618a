"""Whole entities in tag sequences, found as the `seqeval` package does.

A predicted entity is correct if its type, first word and last word are all correct (CoNLL-2003, Tjong Kim Sang and
De Meulder, arXiv:cs/0306050). The metric F1 = 2·correct / (gold + predicted) sums over all sentences and types (micro
average).

The rules are regular expressions over the prefixes of a group, which is neighbouring tags of one type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.tasks.finetune.metrics import Metric, Terms, share

OUTSIDE = "O"
STRICT = "seqeval-strict"
LENIENT = re.compile("[BI]I*E?|[ES]")
"""Entity of seqeval's default mode and of conlleval. Every tag other than O belongs to one; B and S always begin one, E
and S always end one."""
PREFIXES = tuple("BIESLU")
"""Begin, inside, end (last word) and single (only word), the last two also named last and unit."""


class Scheme(NamedTuple):
    """Way to write entities as tags that has strict rules. Tags that belong to no entity count as O."""

    prefixes: str
    needed: str
    """Prefixes without which there is no entity of several words."""
    single: str
    """Prefix that may be the only one."""
    entity: re.Pattern[str]
    alike: tuple[str, str] = ("", "(?!)")
    """Name and groups of another scheme with the same prefixes."""

    @property
    def entities(self) -> str:
        """Groups of whole entities."""
        return f"(?:{self.entity.pattern})+"


SCHEMES = {
    "IOB2": Scheme("BI", "B", "", re.compile("BI*"), ("IOB1", "I.*")),
    "IOE2": Scheme("IE", "E", "", re.compile("I*E"), ("IOE1", ".*I")),
    "IOBES": Scheme("BIES", "BE", "S", re.compile("BI*E|S")),
    "BILOU": Scheme("BILU", "BL", "U", re.compile("BI*L|U")),
}

Entity = tuple[str, int, int]
"""Type, first word and end (exclusive)."""


def count_entities(
    gold: Iterable[Sequence[str]],
    predicted: Iterable[Sequence[str]],
    strict: bool = False,
    tags: Iterable[str] | None = None,
) -> list[tuple[int, int, int]]:
    """Return the numbers of gold, predicted and correct entities of each sentence, given its tags.

    `rules` explains `strict`. It finds the scheme from all `tags` of the task, by default from those of the sentences.
    """
    pairs = list(zip(gold, predicted, strict=True))
    entity = rules({tag for pair in pairs for side in pair for tag in side} if tags is None else tags, strict)
    found = []
    for pair in pairs:
        expected, told = (set(entities_of(side, entity)) for side in pair)
        found.append((len(expected), len(told), len(expected & told)))
    return found


def entities_of(tags: Sequence[str], entity: re.Pattern[str] = LENIENT) -> list[Entity]:
    """Return the entities of a sentence in order. `entity`, from `rules`, matches the prefixes of one."""
    return [
        (kind, begin + match.start(), begin + match.end())
        for kind, begin, prefixes in _groups(tags)
        for match in entity.finditer(prefixes)
    ]


def prefix_groups(sentences: Iterable[Sequence[str]]) -> list[str]:
    """Return the prefixes of each group of all sentences."""
    return [prefixes for tags in sentences for _, _, prefixes in _groups(tags)]


def _groups(tags: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Yield type, first word and prefixes of each group."""
    begin = 0
    for kind, group in groupby(tags, lambda tag: tag[2:]):
        prefixes = "".join(tag[0] for tag in group)
        if kind:
            yield kind, begin, prefixes
        begin += len(prefixes)


def rules(tags: Iterable[str], strict: bool) -> re.Pattern[str]:
    """Return the rules for a task with these tags: the lenient ones, or the strict ones of the scheme of the tags.

    Raises `ValueError` with the reason for a tag that names no entity, and for tags without such rules.
    """
    if strict:
        return SCHEMES[scheme_of(tags)].entity
    if not _prefixes(tags).isdisjoint("LU"):
        raise ValueError(f"tags of BILOU have only strict rules; use --metric {STRICT}")
    return LENIENT


def scheme_of(tags: Iterable[str]) -> str:
    """Return the scheme of some tags, found from their prefixes as in seqeval. Raises `ValueError` if there is none."""
    found = _prefixes(tags)
    for name, scheme in SCHEMES.items():
        if found <= set(scheme.single) or set(scheme.needed) <= found <= set(scheme.prefixes):
            return name
    known = ", ".join(f"{name} ({_dashed(scheme.prefixes)})" for name, scheme in SCHEMES.items())
    raise ValueError(f"tags with {_dashed(sorted(found))} have no strict rules, expected {known}; use --metric seqeval")


def _prefixes(tags: Iterable[str]) -> set[str]:
    """Return the prefixes of the tags other than O. Raises `ValueError` for a tag without a prefix and a type."""
    named = [tag for tag in tags if tag != OUTSIDE]
    for tag in named:
        if not (tag[:1] in PREFIXES and tag[1:2] == "-" and tag[2:]):
            raise ValueError(
                f"tag {tag!r}, expected O, or B- or I- and a type, such as B-PER (also E- and S-, or L- and U-); for "
                "tags of single words use --metric accuracy or macro-f1"
            )
    return {tag[0] for tag in named}


def _dashed(prefixes: Iterable[str]) -> str:
    return " ".join(f"{prefix}-" for prefix in prefixes)


def _entity_terms(gold: Any, predicted: Any, strict: bool) -> Terms:
    """Return numerator and denominator of the entities' F1 per sentence of `Tags`."""
    found = count_entities(gold.by_sentence(), predicted.by_sentence(), strict, gold.labels)
    expected, told, correct = np.array(found, float).T
    return 2 * correct, expected + told


SEQEVAL, SEQEVAL_STRICT = (Metric(partial(_entity_terms, strict=strict), share) for strict in (False, True))
