"""Plain sentences about the verdicts, for the head of the page."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.pages.markdown import marked
from megatron_ddrp.tasks.ladder.claims import Judged
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.measures import GLUE, LOSS, MINIMAL_PAIRS, SCORED
from megatron_ddrp.tasks.ladder.minimal_pairs import pair_scores
from megatron_ddrp.tasks.ladder.numbers import shown, shown_average, shown_tokens
from megatron_ddrp.tasks.ladder.verdicts import (
    DEFINITIONS,
    NO_INTERVAL,
    NOT_TOLD,
)

_MEASURES = {
    LOSS: "validation loss (nats)",
    GLUE: "the GLUE average ({average}; points)",
    MINIMAL_PAIRS: "minimal pairs (points)",
}
ON_THE_HIGHEST = " on the highest rung that has an interval"
_UNDECIDED = (NOT_TOLD, NO_INTERVAL)


def summary(ladder: Ladder, judged: Sequence[Judged]) -> str:
    """Return the known facts as Markdown: a line per measure, the best minimal pairs, and the number of intervals."""
    average = shown_average(ladder.averaged) if ladder.averaged else ""
    names = {measure: name.format(average=average) for measure, name in _MEASURES.items()}
    lines = [_line(f"By {name}", [i for i in judged if i.claim.measure == m]) for m, name in names.items()]
    lines.append(_line("Inside the models", [item for item in judged if item.claim.measure not in SCORED]))
    lines.append(_best_pairs(ladder))
    found = [marked(line) for line in lines if line]
    if not judged:
        found.append("No claim of the paper compares two models of these rows.")
    if intervals := sum(gain.interval is not None for item in judged for gain in item.gains.values()):
        found.append(
            f"In brackets stands the mean gain{'' if ladder.is_one_budget else ON_THE_HIGHEST}; a gain is positive "
            f"where the claim holds. There are {intervals} intervals of differences. By chance alone about one in "
            f"twenty of them, here {0.05 * intervals:.1f}, would exclude 0."
        )
    return "\n\n".join(found)


def _line(title: str, judged: Sequence[Judged]) -> str:
    """Return the claims of a measure, grouped by verdict, with the gain on the highest rung with an interval."""
    if not judged:
        return ""
    sentences = []
    for kind in DEFINITIONS:
        verdicts = dict.fromkeys(item.verdict for item in judged if item.kind == kind)
        for verdict in verdicts:
            texts = [f"{item.claim.text} ({_last(item)})" for item in judged if item.verdict == verdict]
            if kind in _UNDECIDED and judged[0].claim.measure != LOSS and len(texts) > 1:
                texts = [f"{len(texts)} claims"]  # a list of them would hide the others
            sentences.append(f"*{verdict[0].upper()}{verdict[1:]}*: {'; '.join(texts)}.")
    return f"{title}. {' '.join(sentences)}"


def _last(item: Judged) -> str:
    rung, gain = item.last
    mean = shown(item.claim.measure, gain.mean, "+")
    return mean if item.ladder.is_one_budget else f"{mean} at {shown_tokens(rung)}"


def _best_pairs(ladder: Ladder) -> str:
    """Return a sentence about the arm with the most minimal pairs right on the highest rung that has them."""
    scores = [score for score in pair_scores(ladder) if score.errors_above_chance is not None]
    if not scores:
        return ""
    last = max(score.rung for score in scores)
    best = max((score for score in scores if score.rung == last), key=lambda score: score.accuracy.mean)
    errors = best.errors_above_chance or 0.0
    side = "below" if errors < 0 else "above"
    where = "" if ladder.is_one_budget else f"At {shown_tokens(last)} tokens "
    return (
        f"{where}{best.arm.label} has the most minimal pairs right: "
        f"{shown(MINIMAL_PAIRS, best.accuracy.mean)} %, {abs(errors):.1f} standard errors {side} chance."
    )
