"""A stranger reads the rows of docs/ladder: every result in the prose of the pages below follows from them.

A comment beside a number, a marker, says how to compute it; nothing here is imported from the package:

    ends 1.24 nats lower <!-- gain novels rows: bert-r over absolute @ 16.8M -->

`STATISTIC MEASURE FILE: MODEL [over MODEL] [@ BUDGET] [seeds N,N…]`, several of them with ` / ` between. The numbers
since the marker before, in one paragraph, entry or cell, are those of the marker in their order, rounded to the digits
that are printed. The budget is the planned number of tokens; without one, all runs of the model count. A model may end
in `, half the budget`, or in `, in fp32`, for its runs in this precision.

| measure | of a run |
| --- | --- |
| novels | validation loss, nearly all of it on novels; in depth and recipe on text like the rest |
| like | training loss over the last tenth of the tokens, weighted by tokens: on text like the rest |
| below, unigram | nats that it lies below the unigram level; this level |
| onset, tokens, predictions | millions: the end of the plateau, tokens read, masked places predicted |
| steps, seconds | steps of the run; seconds of all of them, by the median of a step |
| onset-steps, -predictions, -seconds | the same until the end of the plateau |
| pairs, first | percent: minimal pairs that are right; variance on the first component |
| rank, f(S) | effective rank; mean cosine of hidden states |
| kurtosis | of the tokens, on the first component |

| statistic | numbers |
| --- | --- |
| mean, range, each | of the runs: the mean; the least and the most; one number per seed |
| seeds, left | number of runs, or of pairs of runs; of runs that left the plateau |
| gain, interval, test | of differences paired by budget and seed, positive where the first model is better (pairs, |
| | first, rank and f(S): higher): mean; Student's 95 % interval; p-value |
| higher, lower, extremes | number of positive, of negative differences; the least and the most of them |
| logrank | p-value of the times on the plateau, where runs that never left are censored |
| claim | gain and interval by `like`, seeds, gain by `novels`; and a word of judgement for each text: |
| | Benjamini-Hochberg at 5 % over the page's claims with three or more seeds; *exploratory* with fewer |

The marker `archive` says that the number stands in docs/lab/measurements.md, in a section that says "No row is stored".
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = dict.fromkeys(("lab/results.md", "lab/plateau.md", "lab/plateau-arms.md", "laptop.md"), "")
PAGES |= {"lab/results-tables.md": "## What the tables show"}
"""Page → heading where its results begin; empty for a page that is checked as a whole."""
Row = dict[str, Any]
ROWS: dict[str, list[Row]] = {
    name: [json.loads(line) for line in (DOCS / f"ladder/{name}.jsonl").read_text().splitlines()]
    for name in ("rows", "fast", "plateau", "novels", "depth", "recipe", "times")
}
MARKER = re.compile(r"<!-- (?!compare|end of)(.+?) -->", re.DOTALL)
VALUE = re.compile(r"(\w+) (\S+) (\w+): (.+?)(?: over (.+?))?(?: @ ([\d.]+)M)?(?: seeds ([\d,]+))?")
NUMBER = re.compile(r"(?<![\d.])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?")
WORD = re.compile(r"\b(?:better|worse|not told apart|exploratory)\b")
NO_RESULT = [
    r"<!-- compare.*?<!-- end of compare.*?-->",  # generated, and tested byte for byte
    r"```.*?```|^    .*?$|`(?:[^`\n]|\n(?!\s*\n))*`",  # code and formulas
    r"!\[[^]]*\]|\]\([^)]*\)|https?:\S+|arXiv:[\d.]+",  # links
    r"\b[A-Za-z]+-?\d\w*\b|α[₁₂] = [\d.]+",  # names such as AVX512_BF16, and the paper's weights
    r"\b\d+ layers\b|\b(?:x|width) \d+|\b(?:\d+ )?rows of \d+|\b\d+ rows per step",  # sizes
    r"\b[Ss]eeds? \d{4}(?:(?:,| and| to) \d{4})*",
    r"\b(?:4\.2, )?(?:3\.1|4\.2|6\.3|16\.8|67)(?: and (?:16\.8|67))?\s+(?:M|million)\s+tokens\b",  # budgets
    r"\bfrom 40 to 25 %|\bmasks 15 %|\binstead of 16\b|\b8 rows of 128 per step",  # the fast recipe
    r"\bAlgorithm 1\b",  # of the paper
    r"\b200,000 tokens|\bat most 2 million tokens|\b1 nat\b",  # the onset
    r"\b95 %|\b5 %(?= over)",  # levels of confidence
    r"(?<=\| )\+\d\.\d\d(?= \|)",  # the paper's gains, in a column of their own
    r"^\|[^|\n]*\(published\) \|.*?$",  # BLiMP, arXiv:1912.00582
]
"""What states no result: generated tables, code, links, names, sizes, seeds, budgets and published numbers."""


def curve(row: Row) -> np.ndarray:
    """Return the tokens, and the training losses there."""
    return np.array(row["curves"]["training masked-LM loss"], float).T


def like(row: Row) -> float:
    tokens, losses = curve(row)
    last = tokens > 0.9 * tokens[-1]
    return float(np.average(losses[last], weights=np.diff(tokens, prepend=0)[last]))


def onset(row: Row) -> float | None:
    """Return the tokens from which the mean loss of the last 200,000 tokens stays 1 nat below the level, if any."""
    tokens, losses = curve(row)
    weights, found = np.diff(tokens, prepend=0), None
    for end in tokens:
        recent = (tokens > end - 200_000) & (tokens <= end)
        if np.average(losses[recent], weights=weights[recent]) > row["unigram_loss"] - 1:
            found = None
        elif found is None:
            found = float(end)
    return found


def predictions(row: Row, share: float = 1) -> float:
    """Return the masked places of the first `share` of a run, in which the mask rate falls linearly."""
    settings = {**row["common"], **row["flags"]}
    rates = [float(rate) for rate in str(settings.get("mask_prob", 0.15)).split(":")]
    return row["tokens"] * share * (rates[0] - share * (rates[0] - rates[-1]) / 2)


def until_onset(row: Row) -> float:
    """Return the share of a run that it rested on the plateau; nan if it never left."""
    return (onset(row) or np.nan) / row["tokens"]


def mask_rate(row: Row) -> float:
    return predictions(row) / row["tokens"]


def seconds(row: Row) -> float:
    return row["steps"] * row["values"]["seconds of a step"]


MEASURES = {
    "novels": lambda row: row["values"]["validation masked-LM loss"],
    "like": like,
    "below": lambda row: row["unigram_loss"] - like(row),
    "unigram": lambda row: row["unigram_loss"],
    "onset": lambda row: until_onset(row) * row["tokens"] / 1e6,
    "onset-steps": lambda row: until_onset(row) * row["steps"],
    "onset-predictions": lambda row: predictions(row, until_onset(row)) / 1e6,
    "onset-seconds": lambda row: until_onset(row) * seconds(row),
    "tokens": lambda row: row["tokens"] / 1e6,
    "predictions": lambda row: predictions(row) / 1e6,
    "steps": lambda row: row["steps"],
    "seconds": seconds,
    "pairs": lambda row: 100 * row["values"]["minimal pairs"],
    "first": lambda row: 100 * row["values"]["first component"],
    "rank": lambda row: row["values"]["effective rank"],
    "f(S)": lambda row: row["values"]["f(S)"],
    "kurtosis": lambda row: row["values"]["kurtosis on the first component"],
}


def select(file: str, model: str, budget: str | None, seeds: str | None) -> list[Row]:
    """Return the runs of a model, one per budget and seed: that of a check only where there is no other."""
    label, half = re.subn(", half the budget$", "", model)
    label, exact = re.subn(", in fp32$", "", label)
    found = [row for row in ROWS[file] if row["model"] == label and row["half"] == bool(half)]
    found = [row for row in found if not exact or not row["common"]["bf16"]]
    found = [row for row in found if not budget or abs(row["planned_tokens"] / 1e6 / float(budget) - 1) < 0.01]
    found = [row for row in found if not seeds or str(row["seed"]) in seeds.split(",")]
    assert found, f"no row: {file}: {model} @ {budget}"
    one = {(row["planned_tokens"], row["seed"]): row for row in sorted(found, key=lambda row: not row["check"])}
    return [one[key] for key in sorted(one)]


def paired(measure: str, first: list[Row], second: list[Row]) -> np.ndarray:
    """Return by how much the first is better, by budget and seed. Training losses compare at one mask rate only."""
    assert measure != "like" or len({mask_rate(row) for row in [*first, *second]}) == 1, "other mask rates"
    of = MEASURES[measure]
    one, other = ({(row["planned_tokens"], row["seed"]): of(row) for row in rows} for rows in (first, second))
    sign = 1 if measure in ("pairs", "first", "rank", "f(S)") else -1
    return sign * np.array([one[key] - other[key] for key in sorted(one.keys() & other.keys())])


def censored(rows: list[Row]) -> stats.CensoredData:
    ends = {row["run"]: onset(row) for row in rows}
    never = [row["tokens"] for row in rows if not ends[row["run"]]]
    return stats.CensoredData(uncensored=[end for end in ends.values() if end], right=never)


def of_runs(statistic: str, values: np.ndarray) -> list[float]:
    """Return a statistic of one model's runs. A run that never left has no onset: nan, which no printed number is."""
    found = {"mean": [values.mean()], "range": [np.fmin.reduce(values), np.fmax.reduce(values)], "each": list(values)}
    return (found | {"seeds": [len(values)], "left": [np.isfinite(values).sum()]})[statistic]


def of_pairs(statistic: str, measure: str, first: list[Row], second: list[Row]) -> list[float]:
    if statistic == "logrank":
        return [stats.logrank(censored(first), censored(second)).pvalue]
    gains = paired(measure, first, second)
    test = stats.ttest_1samp(gains, 0)
    if statistic == "claim":
        return [gains.mean(), *test.confidence_interval(), len(gains), paired("novels", first, second).mean()]
    found = {"seeds": [len(gains)], "gain": [gains.mean()], "interval": [*test.confidence_interval()]}
    found |= {"higher": [(gains > 0).sum()], "lower": [(gains < 0).sum()], "extremes": [gains.min(), gains.max()]}
    return (found | {"test": [test.pvalue]})[statistic]


def runs_of(value: str) -> tuple[str, str, list[Row], list[Row]]:
    """Return (statistic, measure, runs of the first model, of the second) that a value of a marker names."""
    parts = VALUE.fullmatch(value)
    assert parts, f"not a value of a marker: {value}"
    statistic, measure, file, first, second, budget, seeds = parts.groups()
    return statistic, measure, select(file, first, budget, seeds), select(file, second, budget, seeds) if second else []


def numbers(value: str) -> list[float]:
    statistic, measure, first, second = runs_of(value)
    if second:
        return of_pairs(statistic, measure, first, second)
    return of_runs(statistic, np.array([MEASURES[measure](row) for row in first]))


def values_of(marker: str) -> list[str]:
    return " ".join(marker.split()).split(" / ") if marker else []


def judgements(text: str) -> dict[str, list[str]]:
    """Return the two words of each claim of a page: by the text like the training text, and by novels."""
    claims = [value for marker in MARKER.findall(text) for value in values_of(marker) if value.startswith("claim")]
    words: dict[str, list[str]] = {claim: [] for claim in claims}
    for measure in ("like", "novels"):
        gains = {claim: paired(measure, *runs_of(claim)[2:]) for claim in words}
        many = [claim for claim, gain in gains.items() if len(gain) > 2]
        adjusted = stats.false_discovery_control([stats.ttest_1samp(gains[claim], 0).pvalue for claim in many])
        sure = {claim for claim, p in zip(many, adjusted, strict=True) if p <= 0.05}
        for claim, gain in gains.items():
            word = ("better" if gain.mean() > 0 else "worse") if claim in sure else "not told apart"
            words[claim].append(word if claim in many else "exploratory")
    return words


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield (text, its marker) in order, without what states no result; "" for the end of a paragraph or cell."""
    for pattern in NO_RESULT:
        kept = rf"(<!-- (?!compare).+? -->)|{pattern}"
        text = re.sub(kept, lambda found: found[1] or "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. |#|\|)|\|", text):
        *marked, rest = MARKER.split(block)
        yield from zip(marked[::2], marked[1::2], strict=True)
        yield rest, ""


def in_archive(words: str) -> bool:
    """Return whether docs/lab/measurements.md has a number, with its unit, where it says that no row is stored."""
    sections = (DOCS / "lab/measurements.md").read_text(encoding="utf-8").split("\n## ")
    archived = " ".join(" ".join(section for section in sections if "No row is stored" in section).split())
    return bool(re.search(rf"(?<![\d.]){re.escape(words)}(?!\d)", archived))


def wrong(text: str) -> list[str]:
    """Return the numbers and words of a page that do not follow from the rows, with what does."""
    judged = judgements(text)
    begins = re.findall(r"^ *<!-- (?!compare|end of).*", text, re.MULTILINE)
    found = [f"GitHub ends the paragraph before a line that begins with a comment: {line}" for line in begins]
    for piece, marker in pieces(text):
        printed, here = NUMBER.findall(piece), f"{' '.join(piece.split())[-90:]} <!-- {marker} -->"
        if marker == "archive":
            counted = re.findall(NUMBER.pattern + r"(?: million)?(?: [a-z]+)?", " ".join(piece.split()))
            found += [f"{here}: not archived: {words}" for words in counted if not in_archive(words)]
            continue
        expected = [number for value in values_of(marker) for number in numbers(value)]
        decimals = [len(number.partition(".")[2]) for number in printed]
        shown = [f"{number:.{places}f}" for number, places in zip(expected, decimals, strict=False)]
        plain = [number.replace(",", "").replace("−", "-").lstrip("+") for number in printed]
        if plain != shown or len(expected) != len(printed):
            found.append(f"{here}: the rows give {[round(float(number), 4) for number in expected]}")
        words = [word for value in values_of(marker) for word in judged.get(value, [])]
        if words and WORD.findall(piece) != words:
            found.append(f"{here}: the rows give {words}")
    return found


@pytest.mark.parametrize(("page", "begin"), PAGES.items(), ids=PAGES)
def test_every_result_of_the_prose_follows_from_the_rows(page: str, begin: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert "\n".join(wrong(text[text.index(begin) :])) == ""


GAIN = "<!-- gain novels rows: bert-r over absolute @ 16.8M -->"
CLAIM = "<!-- claim like rows: bert-r over absolute @ 4.19M -->"
RIGHT = (
    f"ends 1.24 lower {GAIN}, with 2 layers",
    f"+0.327 [+0.188, +0.466], 8, better; +0.281 better {CLAIM}",
    "65.05 <!-- archive -->",
)
WRONG = (
    f"ends 1.25 lower {GAIN}",
    f"ends 1.24 and 1.3 lower {GAIN}",
    f"ends 1.24 lower\n{GAIN}",
    "ends 1.24 lower <!-- gain novels rows: absolute over bert-r @ 16.8M -->",
    "ends lower by 1.24, after `--seq-length 128`",
    "- 2 left of 10 <!-- left onset rows: ddrp @ 4.19M / seeds onset rows: ddrp @ 4.19M -->",
    f"+0.327 [+0.188, +0.466], 8, better; +0.281 worse {CLAIM}",
    "65.06 <!-- archive -->",
    "116 hours <!-- archive -->",
)


def test_a_wrong_number_a_wrong_word_and_a_number_without_a_marker_are_found() -> None:
    assert {text: len(wrong(text)) for text in RIGHT} == dict.fromkeys(RIGHT, 0)
    assert {text: len(wrong(text)) for text in WRONG} == dict.fromkeys(WRONG, 1)
