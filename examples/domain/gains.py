"""Print what each way to continue an encoder gains on each file, from the output folder of `megatron-ddrp finetune`.

    python examples/domain/gains.py scores minilm mlm detour vocabulary

The first name is the unchanged encoder, each other one a way to continue it, with runs NAME-1, NAME-2, … The pair of a
seed is the run that was pre-trained with it and the unchanged encoder, both fine-tuned with this seed. So the pairs are
independent, and Student's 95 % interval of their mean covers pre-training and fine-tuning; fewer than three seeds have
none. The 95 % interval over items is a bootstrap of the same mean over the rows of the file, with these encoders.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from megatron_ddrp.tasks.finetune.runs import TuningRun, predictions_file

SAMPLES = 2000

Rows = dict[str, np.ndarray]
"""File → predictions and labels, `[2, rows]`."""


def read_predictions(folder: Path, row: dict[str, Any]) -> Rows:
    """Return the predictions of a run."""
    found = defaultdict(list)
    with predictions_file(folder, TuningRun.of_row(row)).open(encoding="utf-8", newline="") as file:
        for each in csv.DictReader(file, delimiter="\t"):
            found[each["file"]].append((float(each["prediction"]), float(each["label"])))
    return {name: np.array(values).T for name, values in found.items()}


def correlations(values: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Return Pearson's correlations in percent on samples `[samples, rows]` of the rows of `values` `[2, rows]`."""
    predictions, labels = (each[items] - each[items].mean(1, keepdims=True) for each in values)  # [samples, rows] each
    return 100 * (predictions * labels).sum(1) / np.sqrt((predictions**2).sum(1) * (labels**2).sum(1))


def main() -> None:
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    folder, unchanged, *ways = sys.argv[1:]
    rows = [json.loads(line) for line in Path(folder, "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    runs = {(Path(row["load"]).name, row["seed"]): read_predictions(Path(folder), row) for row in rows}
    seeds = sorted(seed for name, seed in runs if name == unchanged)
    head = ("way", "file", "unchanged", "gain", "95 % over seeds", "95 % over items", "seeds")
    print("| " + " | ".join(head) + " |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for way in ways:
        pairs = [
            (runs[f"{way}-{seed}", seed], runs[unchanged, seed]) for seed in seeds if (f"{way}-{seed}", seed) in runs
        ]
        if not pairs:
            raise SystemExit(
                f"error: {folder} has no pair of {way}-N and {unchanged}, both with the fine-tuning seed N"
            )
        for name in pairs[0][0]:
            count = pairs[0][0][name].shape[1]
            drawn = np.random.default_rng(0).integers(count, size=(SAMPLES, count))
            items = np.concatenate([np.arange(count)[None], drawn])  # the rows themselves first
            scores = np.array([[correlations(each[name], items) for each in pair] for pair in pairs])
            gains = scores[:, 0] - scores[:, 1]  # [pairs, 1 + samples]
            gain, level = gains[:, 0].mean(), scores[:, 1, 0].mean()
            over_seeds = "exploratory"
            if len(pairs) > 2:
                half = stats.t.ppf(0.975, len(pairs) - 1) * gains[:, 0].std(ddof=1) / len(pairs) ** 0.5
                over_seeds = f"{gain - half:+.1f} to {gain + half:+.1f}"
            low, high = np.percentile(gains[:, 1:].mean(0), (2.5, 97.5))
            cells = (way, name, f"{level:.1f}", f"{gain:+.1f}", over_seeds, f"{low:+.1f} to {high:+.1f}", len(pairs))
            print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
