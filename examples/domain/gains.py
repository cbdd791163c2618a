"""Print what each way to continue an encoder gains on each file, from the output folder of `megatron-ddrp finetune`.

    python examples/domain/gains.py scores minilm mlm detour vocabulary

The first name is the unchanged encoder, each other one a way to continue it, with runs NAME-1, NAME-2, … The pair of a
seed is the run that was pre-trained with it and the unchanged encoder, both fine-tuned with this seed. So the pairs are
independent, and Student's 95 % interval of their mean covers pre-training and fine-tuning; fewer than three seeds have
none. The 95 % interval over items is a bootstrap of the same mean over the rows of the file, with these encoders.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_ddrp.tasks.finetune.command import OWN_TASKS
from megatron_ddrp.tasks.finetune.runs import Cell, Items
from megatron_ddrp.tasks.statistics import student_interval


def main() -> None:
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    folder, unchanged, *ways = sys.argv[1:]
    lines = Path(folder, "runs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) | {"folder": folder} for line in lines]
    runs = {(Path(row["load"]).name, row["seed"]): row for row in rows}
    items = Items(OWN_TASKS)
    head = ("way", "file", "unchanged", "gain", "95 % over seeds", "95 % over items", "seeds")
    print("| " + " | ".join(head) + " |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for way in ways:
        seeds = sorted(seed for name, seed in runs if name == unchanged and (f"{way}-{seed}", seed) in runs)
        if not seeds:
            raise SystemExit(
                f"error: {folder} has no pair of {way}-N and {unchanged}, both with the fine-tuning seed N"
            )
        ours = by_file(runs[f"{way}-{seed}", seed] for seed in seeds)
        theirs = by_file(runs[unchanged, seed] for seed in seeds)
        for name in ours:
            gains = [100 * (new - old) for new, old in zip(ours[name].scores, theirs[name].scores, strict=True)]
            over_seeds = shown(*student_interval(gains)) if len(gains) > 2 else "exploratory"
            over_items = items.of_difference(list(zip(ours[name].rows, theirs[name].rows, strict=True)))
            resampled = shown(*(100 * end for end in over_items)) if over_items else "predictions are missing"
            level, gain = f"{100 * fmean(theirs[name].scores):.1f}", f"{fmean(gains):+.1f}"
            print("| " + " | ".join((way, name, level, gain, over_seeds, resampled, str(len(seeds)))) + " |")


def by_file(rows: Iterable[dict[str, Any]]) -> dict[str, Cell]:
    """Return file → results of some runs on it, the validation file first."""
    cell = Cell("domain", list(rows))
    return {"valid": cell, **cell.others}


def shown(low: float, high: float) -> str:
    return f"{low:+.1f} to {high:+.1f}"


if __name__ == "__main__":
    main()
