"""Tables of the page. Each has a name, under which `--tables` writes it into a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from megatron_ddrp.config import flag_words
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS
from megatron_ddrp.tasks.ladder.claims import Judged, check_claims, judge
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.measures import GLUE, INSIDE, LOSS, MINIMAL_PAIRS, SCORED
from megatron_ddrp.tasks.ladder.numbers import shown, shown_average, shown_gain, shown_spread, shown_tokens
from megatron_ddrp.tasks.ladder.rows import Run
from megatron_ddrp.tasks.statistics import NOT_VISIBLE, seeds_needed, spread

_GAIN = (
    "Mean gain of the first model over the second, paired by seed (Student's 95 % interval), number n of common seeds"
)
CAPTIONS = {
    "claims": "Validation masked-LM loss. {gain} A gain is a loss lower by so many nats. The paper prints no loss; "
    "its column has the difference of its GLUE averages in points.",
    "claims-glue": "GLUE average: {average}. {gain} All differences are in points.",
    "claims-minimal-pairs": "Minimal pairs. {gain} A gain is in points. The paper has no minimal pairs; its column "
    "has the difference of its GLUE averages in points.",
    "claims-inside": "Inside the models. {gain} Gains of f(S), f(H) and the first component are decreases. Triangle "
    "shares are in points. Left from right is the accuracy of the linear probe on shuffled text, where only positions "
    "can tell.",
    "models": "Validation masked-LM loss of every model against its reference. {gain}",
}


def claims_table(name: str, judged: Sequence[Judged], ladder: Ladder) -> Table:
    """Return the table `name` of claims with their gains on every rung and their verdicts."""
    is_papers, is_ladder = name != "models", not ladder.is_one_budget
    rows = []
    for item in judged:
        cells = []
        for rung in ladder.rungs:
            gain = shown_gain(item.claim.measure, item.gains[rung]) if rung in item.gains else ""
            cells.append(f"{gain}: {item.verdicts[rung]}" if gain and is_ladder else gain)
        rows.append(
            [item.claim.text, *([item.claim.paper] * is_papers), *cells, *([_slope(item)] * is_ladder), item.verdict]
        )
    header = ["claim" if is_papers else "models"]
    if is_papers:
        header.append("the paper, GLUE" if name in ("claims", "claims-minimal-pairs") else "the paper")
    header += _headers(ladder, "gain")
    header += ["change per factor of four", "over the ladder"] if is_ladder else ["verdict"]
    gain = f"{_GAIN}{', and the verdict on the rung' * is_ladder}. Positive gains support the claim."
    average = shown_average(ladder.averaged) if ladder.averaged else ""
    return Table(header, rows, CAPTIONS[name].format(gain=gain, average=average), wordy=(0, len(header) - 1))


def _headers(ladder: Ladder, alone: str) -> list[str]:
    """Return the headers of the rungs' columns; `alone` for a single one."""
    return [alone] if ladder.is_one_budget else [f"{shown_tokens(rung)} tokens" for rung in ladder.rungs]


def _slope(item: Judged) -> str:
    trend, measure = item.trend, item.claim.measure
    if trend and trend.turns:
        return "no line"
    if trend is None:
        return ""
    return f"{shown(measure, trend.slope, '+')} ± {shown(measure, trend.slope_half_width)}"


def seeds_table(judged: Sequence[Judged], ladder: Ladder) -> Table:
    """Return the table of the seeds that each claim not told apart would need, per rung."""
    rows = []
    for item in judged:
        cells = [_needed(item, rung) for rung in ladder.rungs]
        if any(cells):
            rows.append([item.claim.text, item.claim.measure, *cells])
    caption = (
        "Smallest number of seeds n with t(0.975, n − 1)·s/√n < |mean gain|, if the mean and the standard deviation s "
        "over the seeds stay as they are, for gains whose interval contains 0; in brackets the seeds that there are. "
        "With few seeds s is uncertain, and so is n."
    )
    return Table(["claim", "measure", *_headers(ladder, "seeds needed")], rows, caption, wordy=(0, 1))


def _needed(item: Judged, rung: int) -> str:
    gain = item.gains.get(rung)
    if gain is None or item.verdicts[rung] != NOT_VISIBLE or gain.deviation is None:
        return ""
    count = seeds_needed(gain.mean, gain.deviation)
    side = "" if gain.mean >= 0 else ", against the claim"
    needed = "no number" if gain.mean == 0 else "over 100,000" if count is None else f"{count:,}"
    return f"{needed} ({len(gain.values)}){side}"


def runs_table(ladder: Ladder) -> Table:
    """Return the table of the rungs: their models, seeds and cost."""
    rows = []
    for rung in ladder.rungs:
        runs = [run for run in ladder.runs if run.rung == rung]
        seeds = [len(ladder.on(rung, arm)) for arm in ladder.arms_on(rung)]
        consumed = max(run.tokens for run in runs)
        steps = {run.facts.steps for run in runs if run.facts.steps and not run.arm.half}
        parameters = [run.facts.parameters for run in runs if run.facts.parameters]
        rows.append(
            [
                runs[0].facts.budget,
                f"{consumed:,}",
                ", ".join(f"{count:,}" for count in sorted(steps)),
                str(len(seeds)),
                _range(seeds),
                str(len(runs)),
                _range(parameters),
                duration(sum(run.facts.seconds for run in runs)),
            ]
        )
    header = ["rung", "tokens consumed", "steps", "models", "seeds per model", "runs", "parameters", "time of the runs"]
    return Table(header, rows)


def _range(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest number, once if they are equal."""
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)})) if numbers else ""


def score_tables(ladder: Ladder, is_inside: bool) -> list[Table]:
    """Return one table per rung of all arms and measures: those of the inside, or all others."""
    measures = [name for name in ladder.measures if (name in INSIDE) == is_inside]
    tables = []
    for rung in ladder.rungs:
        rows = []
        for arm in ladder.arms_on(rung):
            cells = [shown_spread(measure, spread(ladder.of(measure, arm, rung))) for measure in measures]
            if any(cells):
                rows.append([arm.label, *cells, str(len(ladder.on(rung, arm)))])
        caption = "Mean ± standard deviation over the seeds."
        if not ladder.is_one_budget:
            caption = f"{shown_tokens(rung)} tokens: m{caption[1:]}"
        if GLUE in measures and not set(ladder.averaged).issuperset({*measures} & {*PAPER_TASKS}):
            caption += f" GLUE average: {shown_average(ladder.averaged)}."
        if rows:
            tables.append(Table(["model", *measures, "seeds"], rows, caption))
    return tables


def check_tables(checks: Mapping[str, Ladder]) -> list[Table]:
    """Return one table per check and rung: its arms side by side, with differences to its baseline."""
    tables = []
    for name, check in checks.items():
        gains = {item.claim.first: item.gains for item in judge(check, check_claims(check))}
        measures = [measure for measure in check.measures if measure not in INSIDE]
        for rung in check.rungs:
            rows = []
            for arm in sorted(check.arms_on(rung), key=lambda arm: arm != check.baseline):
                cells = [shown_spread(measure, spread(check.of(measure, arm, rung))) for measure in measures]
                gain = gains.get(arm, {}).get(rung)
                rows.append([arm.label, *cells, shown_gain(LOSS, gain) if gain else "", str(len(check.on(rung, arm)))])
            base = check.baseline.label
            caption = (
                f"Check of {name}, {shown_tokens(rung)} tokens: mean ± standard deviation over the seeds, and the gain "
                f"over {base} in nats of validation loss (Student's 95 % interval)."
            )
            header = ["model", *measures, f"gain over {base}", "seeds"]
            tables.append(Table(header, rows, caption))
    return tables


def flag_tables(runs: Sequence[Run]) -> list[Table]:
    """Return one table per pair of values of a common flag: the losses of runs that differ in nothing else."""
    rows: dict[tuple[str, str], list[list[str]]] = {}
    scored = sorted((run for run in runs if LOSS in run.values), key=lambda run: (run.rung, run.arm.label, run.seed))
    for first, second in combinations(scored, 2):
        if (first.arm, first.rung, first.seed) != (second.arm, second.rung, second.seed):
            continue
        own, others = _typed(first) - _typed(second), _typed(second) - _typed(first)
        if len(own) != 1 or len(others) != 1:
            continue
        losses = {own.pop(): first.values[LOSS], others.pop(): second.values[LOSS]}
        (flag, loss), (other, other_loss) = sorted(losses.items())
        cells = [shown(LOSS, loss), shown(LOSS, other_loss), shown(LOSS, other_loss - loss, "+")]
        rows.setdefault((flag, other), []).append([first.arm.label, shown_tokens(first.rung), str(first.seed), *cells])
    return [
        Table(
            ["model", "tokens", "seed", flag, other, "difference"],
            found,
            f"Runs of one model and seed that differ only in `{flag}` and `{other}`: {LOSS}.",
        )
        for (flag, other), found in rows.items()
    ]


def _typed(run: Run) -> set[str]:
    """Return the common flags of a run, each as on a command line."""
    return {" ".join(flag_words([item])) for item in run.facts.common.items()}


def of_measure(judged: Sequence[Judged], name: str) -> list[Judged]:
    """Return the claims of the table `name`."""
    scored = {"claims": LOSS, "claims-glue": GLUE, "claims-minimal-pairs": MINIMAL_PAIRS}
    if name in scored:
        return [item for item in judged if item.claim.measure == scored[name]]
    return [item for item in judged if item.claim.measure not in SCORED]
