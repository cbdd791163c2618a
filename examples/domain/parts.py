"""Print what each part of continued pre-training changes, from the output folder of parts.sh.

    python examples/domain/parts.py parts

A row is a measure with a part and without it: the means over the seeds, and Student's 95 % interval of the mean
difference, paired by seed; fewer than three seeds have none. Losses are masked-LM losses on validation text, in nats.
*Kept* is the correlation of the cosines of all pairs among 120 sentences before and after: 1 if the encoder finds the
same sentences alike as before.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np

from megatron_ddrp import load_encoder
from megatron_ddrp.tasks.statistics import student_interval

HEADER = "| measure | with | without | difference | 95 % over seeds |\n| --- | ---: | ---: | ---: | ---: |"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
    ends = {path.parent.name.rsplit("-", 1)[1]: path.read_text() for path in folder.glob("head-25-*/exit_code")}
    seeds = sorted(seed for seed, end in ends.items() if end.strip() == "0")
    if not seeds:
        raise SystemExit(f"error: {folder} has no seed whose runs are all done; run parts.sh first")
    with (folder / "test-films.csv").open(encoding="utf-8", newline="") as file:
        texts = [row["text"] for row in itertools.islice(csv.DictReader(file), 120)]

    def loss(name: str) -> Callable[[str], float]:
        return lambda seed: last_loss(folder / f"{name}-{seed}" / "metrics.jsonl")

    def kept(name: str) -> Callable[[str], float]:
        return lambda seed: float(np.corrcoef(before, cosines(folder / f"{name}-{seed}", texts))[0, 1])

    before = cosines(folder / "minilm", texts)
    measures = {
        "loss of the decay, beside the constant rate": (loss("decay"), loss("constant")),
        "loss of the mean, beside the constant rate": (lambda seed: mean_loss(folder, seed), loss("constant")),
        "loss of the mean, beside the decay": (lambda seed: mean_loss(folder, seed), loss("decay")),
        "loss after a causal phase, beside masked LM alone": (loss("detour"), loss("mlm")),
        "loss after 25 steps of the head, beside none": (loss("head-25"), loss("head-0")),
        "kept after 25 steps of the head, beside none": (kept("head-25"), kept("head-0")),
    }
    print(HEADER)
    for name, (measure, of_other) in measures.items():
        ours, theirs = [measure(seed) for seed in seeds], [of_other(seed) for seed in seeds]
        gains = [one - other for one, other in zip(ours, theirs, strict=True)]
        interval = "{:+.3f} to {:+.3f}".format(*student_interval(gains)) if len(seeds) > 2 else "exploratory"
        print(f"| {name} | {fmean(ours):.3f} | {fmean(theirs):.3f} | {fmean(gains):+.3f} | {interval} |")


def last_loss(metrics: Path) -> float:
    """Return the loss of the last validation of a run."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return float([row["valid_lm_loss"] for row in rows if "valid_lm_loss" in row][-1])


def mean_loss(folder: Path, seed: str) -> float:
    """Return the loss that `megatron-ddrp merge` printed of the mean."""
    printed = (folder / f"mean-{seed}.log").read_text(encoding="utf-8")
    return float(re.findall(r"^mean → .*validation mlm ([\d.]+)", printed, re.MULTILINE)[-1])


def cosines(folder: Path, texts: list[str]) -> np.ndarray:
    """Return the cosines of all pairs of the texts' mean vectors."""
    vectors = load_encoder(folder).pool(texts, max_length=64, progress=False)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors @ vectors.T)[np.triu_indices(len(texts), 1)]


if __name__ == "__main__":
    main()
