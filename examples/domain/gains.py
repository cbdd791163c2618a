"""Print what each way to continue an encoder gains on each file, from the runs of `megatron-ddrp finetune`.

    python examples/domain/gains.py scores/runs.jsonl minilm mlm detour vocabulary

The first name is the unchanged encoder, each other one a way to continue it, with runs NAME-1, NAME-2, … The pair of a
seed is the run that was pre-trained with it and the unchanged encoder, both fine-tuned with this seed. So the pairs are
independent, and Student's 95 % interval of their mean covers pre-training and fine-tuning. Fewer than three seeds have
no interval. The table of finetune has the intervals over items.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats


def scores(row: dict) -> dict[str, float]:
    """Return the scores of a run in percent, of the validation file and of each test file."""
    return {file: 100 * score for file, score in {"valid": row["score"], **row["other_scores"]}.items()}


def main() -> None:
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    file, unchanged, *ways = sys.argv[1:]
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    runs = {(Path(row["load"]).name, row["seed"]): scores(row) for row in rows}
    seeds = sorted(seed for name, seed in runs if name == unchanged)
    print("| way | file | unchanged | gain | 95 % over seeds | seeds |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for way in ways:
        pairs = [
            (runs[f"{way}-{seed}", seed], runs[unchanged, seed]) for seed in seeds if (f"{way}-{seed}", seed) in runs
        ]
        if not pairs:
            raise SystemExit(f"error: {file} has no pair of {way}-N and {unchanged}, both with the fine-tuning seed N")
        for name in pairs[0][0]:
            gains = np.array([ours[name] - theirs[name] for ours, theirs in pairs])
            mean, level, interval = gains.mean(), np.mean([theirs[name] for _, theirs in pairs]), "exploratory"
            if len(gains) > 2:
                half = stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5
                interval = f"{mean - half:+.1f} to {mean + half:+.1f}"
            print(f"| {way} | {name} | {level:.1f} | {mean:+.1f} | {interval} | {len(gains)} |")


if __name__ == "__main__":
    main()
