"""Measures of a run and their statistics: names and units, intervals over seeds and items, judgements, figures."""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.errors import need_packages
from megatron_ddrp.pages import plotting
from megatron_ddrp.pages.markdown import Table

TRAINING_LOSS = "training masked-LM loss"
LOSS, STEP_SECONDS, TOKENS = "validation masked-LM loss", "seconds of a step", "tokens"
LIKE_LOSS, OTHER_LOSS = "masked-LM loss on like text", "masked-LM loss on other text"
LOSSES = (LIKE_LOSS, OTHER_LOSS, LOSS)
"""Losses on text of the training text's kind, on text of another kind, and on validation text of an unknown kind."""
TOKEN_SIMILARITY, HEAD_SIMILARITY, TRIANGLE, GLUE = "f(S)", "f(H)", "triangle share", "GLUE average"
FIRST_COMPONENT = "first component"
MINIMAL_PAIRS = "minimal pairs"
SPACE = {
    "cosine between sentences": "cosine_between",
    "cosine within, mean removed": "centred_cosine_within",
    "IsoScore": "isoscore",
    "effective rank": "effective_rank",
    FIRST_COMPONENT: "first_component",
    "kurtosis on the first component": "first_component_kurtosis",
}
"""Measure of the last layer → key in the JSON of `megatron-ddrp analyze space`."""
PROBE, SHUFFLED, RANDOM, COSINE = (
    "direction probe",
    "direction probe, shuffled",
    "direction probe, shuffled, random weights",
    "direction cosine",
)
"""Measures of direction: a linear probe of left and right on text, on shuffled text, where only positions can tell, on
shuffled text with random weights, and the cosine of the table's rows for offsets +k and −k."""
DIRECTION = {PROBE: (0, "probe"), SHUFFLED: (0, "shuffled"), RANDOM: (1, "shuffled"), COSINE: (0, "near")}
"""Measure → place among the models in the JSON of `megatron-ddrp analyze direction --random-init`, and key."""
INSIDE = (TOKEN_SIMILARITY, HEAD_SIMILARITY, TRIANGLE, *SPACE, *DIRECTION)
"""Measures of the tables about the inside of the models; all others are scores."""
NO_MEASURES = (TOKENS, STEP_SECONDS)
"""Values that stand in no table. Runs share the machine, so their steps are no measure of cost."""
SMALLER_IS_BETTER = (*LOSSES, TOKEN_SIMILARITY, HEAD_SIMILARITY, FIRST_COMPONENT)
_SHOWN = {
    **dict.fromkeys((*LOSSES, TRAINING_LOSS, TOKEN_SIMILARITY, HEAD_SIMILARITY, *SPACE), (1, 4)),
    **dict.fromkeys(DIRECTION, (1, 3)),
    "effective rank": (1, 1),
    TRIANGLE: (100, 1),
}
"""Measure → factor and digits; other measures are shares in points."""


Interval = tuple[float, float]
"""Lower and upper end."""


def format_value(measure: str, value: float, sign: str = "") -> str:
    """Return a value of a measure; with `sign` "+" a difference."""
    factor, digits = _SHOWN.get(measure, (100, 2))
    return f"{factor * value:{sign}.{digits}f}"


def factor_of(measure: str) -> float:
    """Return the factor with which a measure is shown."""
    return _SHOWN.get(measure, (100, 2))[0]


def unit_of(measure: str) -> str:
    """Return the unit of a gain in brackets, with a space before it; empty for one without a unit."""
    units = dict.fromkeys((*LOSSES, TRAINING_LOSS), " [nats]")
    return units.get(measure, " [points]" if factor_of(measure) == 100 else "")


def format_interval(measure: str, interval: Interval | None) -> str:
    """Return both ends of an interval of a difference; nothing without an interval."""
    return " to ".join(format_value(measure, end, "+") for end in interval or ())


EQUAL_SEEDS = "equal seeds: no spread"
"""Remark on a difference without an interval."""

BETTER, WORSE, NOT_TOLD_APART, EXPLORATORY = "better", "worse", "not told apart", "exploratory"
FALSE_DISCOVERIES = 0.05
"""Expected share of false ones among the words "better" and "worse" of a table, at most."""
FEWEST_SEEDS = 3
"""Number of seeds from which on a difference is judged: a deviation of two seeds is itself a guess."""

SMALLEST_SHARE = 1e-9
"""Means, deviations and slopes below this share of the values behind them are rounding errors and count as 0."""

BOOTSTRAP_SAMPLES = 2000
"""Number of samples of every bootstrap. The seed is fixed, so that a page can be reproduced."""
BOOTSTRAP_SEED = 1234

BySeed = Mapping[int, float]
"""Seed → value of one arm."""


def student_interval(values: Sequence[float]) -> Interval:
    """Return Student's 95 % interval of the mean of two or more values. Raises `UserError` without scipy."""
    need_packages("a 95 % interval", "scipy")
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def seeds_needed(mean: float, deviation: float, most: int = 100_000) -> int | None:
    """Return the smallest number of seeds n whose 95 % Student interval would exclude 0.

    n is the first with t(0.975, n − 1)·s/√n < |mean|, if the mean and the standard deviation s stay as they are. None
    for a mean of 0, or if more than `most` seeds were needed.
    """
    from scipy.stats import t

    def excludes(count: int) -> bool:
        return float(t.ppf(0.975, count - 1)) * deviation / math.sqrt(count) < abs(mean)

    if mean == 0 or not excludes(most):
        return None
    return bisect.bisect_left(range(most + 1), True, lo=2, key=excludes)  # the half-width falls as n grows


@dataclass(frozen=True)
class Difference:
    """Difference of two arms, paired by seed or by test item: one value per common seed, paradigm or pair."""

    values: tuple[float, ...]
    size: float = 0.0
    """Largest absolute value of the two arms, whose rounding the differences have."""
    seeds: tuple[int, ...] = ()
    """Seed of each value, if it is known."""

    @property
    def by_seed(self) -> dict[int, float]:
        """Seed → difference."""
        return dict(zip(self.seeds, self.values, strict=True))

    @property
    def _rounding(self) -> float:
        return SMALLEST_SHARE * max(self.size, *map(abs, self.values))

    @property
    def mean(self) -> float:
        """Mean over the seeds; 0 if it is a rounding error."""
        mean = statistics.fmean(self.values)
        return 0.0 if abs(mean) <= self._rounding else mean

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n − 1), 0 if it is a rounding error; None for one seed."""
        if len(self.values) < 2:
            return None
        deviation = statistics.stdev(self.values)
        return 0.0 if deviation <= self._rounding else deviation

    @property
    def interval(self) -> Interval | None:
        """Student's 95 % interval of the mean; None for one seed, and for equal differences that are not 0."""
        if self.deviation:
            return student_interval(self.values)
        return (0.0, 0.0) if self.deviation == 0 == self.mean else None

    @property
    def p_value(self) -> float | None:
        """Two-sided p value of Student's paired test; None without an interval."""
        from scipy.stats import t

        if not self.deviation:
            return 1.0 if self.interval else None
        count = len(self.values)
        return float(2 * t.sf(abs(self.mean) * math.sqrt(count) / self.deviation, count - 1))


def pair_by_seed(first: BySeed, second: BySeed, relative: bool = False) -> Difference | None:
    """Return `first` − `second` at every common seed; None without one. With `relative`, divide by `second`."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    units = {seed: second[seed] if relative else 1.0 for seed in seeds}
    size = max(abs(arm[seed] / units[seed]) for arm in (first, second) for seed in seeds)
    return Difference(tuple((first[seed] - second[seed]) / units[seed] for seed in seeds), size, tuple(seeds))


class Gain(NamedTuple):
    """Gain of one arm over another, judged with the other gains of its table."""

    first: Any
    """Name of an encoder, or arm of a comparison."""
    second: Any
    measure: str
    seeds: Difference
    """Gains paired by seed, with Student's 95 % interval; a single one if the arms have no seeds."""
    items: Interval | None
    """95 % interval of the mean gain for other test items; None if nothing is stored per item."""
    word: str = ""
    """"better", "worse", "not told apart" or "exploratory"; empty without a p value."""
    tasks: Sequence[str] = ()
    """Tasks whose mean is the measure."""
    text: str = ""
    """Claim that the gain is about."""
    paper: str = ""
    """Statement of the paper about it; empty without one."""
    budget: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the numbers of the gain."""
        return {
            "first": self.first,
            "second": self.second,
            "by_seed": self.seeds.by_seed,
            "n": len(self.seeds.values),
            "mean": self.seeds.mean,
            "deviation": self.seeds.deviation,
            "over_seeds": self.seeds.interval,
            "over_items": self.items,
            "p": self.seeds.p_value,
            "judgement": self.word or None,
        }


class Outcome(NamedTuple):
    """Outcome of a test of two arms: seeds of the arm that has fewer, p value, and the sign of the difference."""

    seeds: int
    p_value: float | None
    side: float


def verdicts(tests: Sequence[Outcome], words: tuple[str, str] = (BETTER, WORSE)) -> list[str]:
    """Return the word of each test of one table: the first of `words` for a positive side, or the second.

    Fewer than `FEWEST_SEEDS` seeds are `EXPLORATORY`, whatever their p value; no p value has no word. The other tests
    are judged together by `benjamini_hochberg`, and those that do not pass are `NOT_TOLD_APART`.
    """
    judged = [test.p_value for test in tests if test.seeds >= FEWEST_SEEDS and test.p_value is not None]
    passed = iter(benjamini_hochberg(judged))

    def word(test: Outcome) -> str:
        if test.seeds < FEWEST_SEEDS:
            return EXPLORATORY
        if test.p_value is None:
            return ""
        return words[test.side < 0] if next(passed) else NOT_TOLD_APART

    return [word(test) for test in tests]


def judge(gains: Sequence[Gain]) -> list[Gain]:
    """Return the gains of one table with their words. Positive gains are better.

    The words hold for the table as a whole, see `verdicts`; intervals do not.
    """
    tests = [Outcome(len(gain.seeds.values), gain.seeds.p_value, gain.seeds.mean) for gain in gains]
    return [gain._replace(word=word) for gain, word in zip(gains, verdicts(tests), strict=True)]


def table_of(rows: Sequence[Mapping[str, str]], caption: str = "", wordy: Sequence[str] = ()) -> Table:
    """Return a table of rows, column → cell, without the columns that have no cell; those of `wordy` hold sentences."""
    header = [name for name in dict.fromkeys(itertools.chain(*rows)) if any(row.get(name) for row in rows)]
    cells = [[row.get(name, "") for name in header] for row in rows]
    return Table(header, cells, caption, wordy=[place for place, name in enumerate(header) if name in wordy])


def gain_table(gains: Sequence[Gain]) -> Table:
    """Return the table of the gains of encoders over each other."""
    rows = []
    for gain in gains:
        count = len(gain.seeds.values)
        row = {
            "encoder": gain.first,
            "minus": gain.second,
            "tasks": str(len(gain.tasks) or ""),
            "file": gain.text,
            "seeds": str(count) if count > 1 else "",
            "difference": format_value(gain.measure, gain.seeds.mean, "+"),
            "95 % over seeds": format_interval(gain.measure, gain.seeds.interval) or EQUAL_SEEDS * (count > 1),
            "95 % over items": format_interval(gain.measure, gain.items),
            "the encoder is": gain.word,
        }
        rows.append(row)
    return table_of(rows, wordy=("minus", "the encoder is"))


def benjamini_hochberg(p_values: Sequence[float]) -> list[bool]:
    """Return which of m hypotheses are rejected so that at most a share r of the rejected ones is expected to be true.

    r is `FALSE_DISCOVERIES`. Rejected are the k smallest p values, where k is the largest number whose k-th smallest
    value is at most k·r/m (Benjamini and Hochberg, Controlling the false discovery rate, 1995).
    """
    ordered = sorted(p_values)
    passed = [p_value for k, p_value in enumerate(ordered, 1) if p_value <= k * FALSE_DISCOVERIES / len(ordered)]
    return [p_value <= max(passed, default=-1.0) for p_value in p_values]


def percentile_interval(samples: np.ndarray) -> Interval:
    """Return the 2.5 % and 97.5 % quantiles of bootstrap samples `[samples]`."""
    low, high = np.quantile(samples, (0.025, 0.975))
    return float(low), float(high)


Times = Sequence[tuple[float, bool]]
"""Time of each run, and whether it left the plateau then; if not, it is only known that it did not leave before."""


def _censored(times: Times) -> Any:
    from scipy.stats import CensoredData

    return CensoredData([time for time, left in times if left], right=[time for time, left in times if not left])


def share_resting(times: Times) -> list[tuple[float, float]]:
    """Return points (time, share of the runs on the plateau after it), from (0, 1) on.

    The estimate is Kaplan and Meier's (Nonparametric estimation from incomplete observations, 1958).
    """
    from scipy.stats import ecdf

    curve = ecdf(_censored(times)).sf
    return [(0.0, 1.0), *zip(curve.quantiles.tolist(), curve.probabilities.tolist(), strict=True)]


def format_median(times: Times, digits: int) -> str:
    """Return the time at which half of the runs have left, or "> last" if fewer left; "" without runs."""
    curve = share_resting(times) if times else []
    reached = [time for time, share in curve if share < 0.5 + 1e-9]  # 0.5 may be off by rounding
    return f"{reached[0]:,.{digits}f}" if reached else f"> {curve[-1][0]:,.{digits}f}" if curve else ""


def log_rank(first: Times, second: Times) -> Outcome:
    """Return the log-rank test of two arms, positive if the first leaves sooner; no p value if no run left.

    It takes all runs as independent (Mantel, Evaluation of survival data, 1966).
    """
    from scipy.stats import logrank

    with np.errstate(invalid="ignore"):  # 0/0 if no run left
        found = logrank(_censored(first), _censored(second))
    p_value = None if math.isnan(found.pvalue) else float(found.pvalue)
    return Outcome(min(len(first), len(second)), p_value, float(found.statistic))


CURVES = "learning_curves.png"

_CHECKPOINT = re.compile(r"(?P<run>.*?)/*iter_(?P<step>\d+)")


class Score(NamedTuple):
    """Score as a fraction, with the ends of its error bar."""

    value: float
    low: float
    high: float


Curves = dict[str, list[tuple[int, Score]]]
"""Run → pairs (step, score), sorted by step."""


def curves_of(scores: Mapping[str, Score]) -> Curves:
    """Return the curves of all runs with at least two scored checkpoints. `scores` maps encoders to scores.

    The names of the encoders of `--load run/iter_*` are their folders, which give run and step.
    """
    curves: Curves = {}
    for name, score in scores.items():
        if found := _CHECKPOINT.fullmatch(name):
            curves.setdefault(found["run"] or ".", []).append((int(found["step"]), score))
    return {run: sorted(curve) for run, curve in curves.items() if len(curve) > 1}


def draw_learning_curves(scored: Iterable[tuple[str, Mapping[str, Score]]], error: str) -> Any:
    """Return a figure with one panel per (title, score by encoder) over training steps.

    `error` names the bands, from `low` to `high`. None without two checkpoints of one run.
    """
    drawn = [(title, curves) for title, scores in scored if (curves := curves_of(scores))]
    runs = list(dict.fromkeys(run for _, curves in drawn for run in curves))
    styles = [plotting.run_style(number) for number in range(len(runs))]
    panels = []
    for title, curves in drawn:
        points = {run: [(step, *np.multiply(score, 100)) for step, score in curve] for run, curve in curves.items()}
        lines = [plotting.Line(curve, styles[runs.index(run)]) for run, curve in points.items()]
        panels.append(plotting.Panel(lines, title, "training step", "score × 100"))
    legend = dict(zip(plotting.short_names(runs), styles, strict=True))
    return plotting.draw_curves(panels, legend=legend | {error: plotting.BAND}) if panels else None


ROW, COLUMN = 0.24, 0.46
"""Height of a row and width of a column of a heat map in inches."""
MOST_WITH_NUMBERS = 24
"""Largest number of columns at which the cells show their numbers."""


Rows = Mapping[str, Sequence[float]]
"""Name of a row → its values, one per column."""


def draw_heat(tables: Mapping[str, Rows], columns: Sequence[str], after: int, label: str, reach: float = 0.0) -> Any:
    """Return a figure of percentages as coloured cells with numbers, one panel per title and table.

    A cell of nan stays empty. White is 50 %, chance; the colours end at 50 ± `reach`, by default the largest distance
    of a value. A line follows the first `after` columns. `label` is that of the colours.
    """
    values = np.concatenate([list(table.values()) for table in tables.values()])  # [all rows, columns]
    reach = reach or max(1.0, float(np.nanmax(np.abs(values - 50))))
    heights = [len(table) for table in tables.values()]
    names, heads = (0.08 * max(map(len, texts)) for texts in ([row for t in tables.values() for row in t], columns))
    size = (names + COLUMN * len(columns) + 2, heads + max(1.6, ROW * sum(heights)) + 0.4 * len(tables) + 0.6)
    grid = {"squeeze": False, "height_ratios": heights, "sharex": True, "figsize": size}
    figure, axes = plotting.figure_tools().subplots(len(tables), 1, **grid)
    for axis, (title, table) in zip(axes[:, 0], tables.items(), strict=True):
        cells = np.array(list(table.values()))  # [rows, columns]
        image = axis.imshow(cells, cmap="RdBu", vmin=50 - reach, vmax=50 + reach, aspect="auto")
        for (row, column), value in np.ndenumerate(cells):
            if len(columns) <= MOST_WITH_NUMBERS and not math.isnan(value):
                color = "white" if abs(value - 50) > 0.65 * reach else "black"
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", color=color, fontsize=7)
        axis.axvline(after - 0.5, color="black", linewidth=1.2)
        axis.set_yticks(range(len(table)), list(table), fontsize=8)
        axis.set_ylabel(title, fontsize=plotting.SMALL)
        axis.yaxis.set_label_position("right")
        axis.tick_params(length=0, labelbottom=False)
    axes[0, 0].set_xticks(range(len(columns)), columns, rotation=90, fontsize=8)
    axes[0, 0].tick_params(labeltop=True)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02, aspect=40)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure
