"""Compare starts of DDRP's `D` by their loss, and by how well the encoding tells left from right.

    python benchmarks/direction_init.py --data-path P --vocab-file vocab.txt --output DIR [--seeds 1234 1235 1236]
    python benchmarks/direction_init.py … --arms spread ones bert-r -- --train-iters 2000    # some arms, other flags

An arm is a name in `--direction-init`, one of the starts in EXTRA, or `bert-r`, whose rows are free. Runs with the same
seed see the same data with the same masks, so arms are compared seed by seed. The cosine is the one between the table
rows T^q[+k] and T^q[−k] at the end of the run, averaged over k = 1 … 8 and over all k: near 1, the encoding is blind to
direction. Each run is kept in DIR/ARM-SEED; the same command resumes a stopped one and skips finished ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.model.positions import ddrp
from megatron_ddrp.train import train

FLAGS = """
    --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64 --packing --objective mlm
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 32 --global-batch-size 32 --train-iters 800
    --lr 2e-3 --lr-warmup-fraction 0.1 --log-interval 50 --eval-interval 100000 --eval-iters 40
    --save-interval 100000 --num-threads 1"""
"""Flags of pretrain_bert.py that all runs share."""
NEAR = 8
"""Distances of the first cosine."""


LEFT = 2
"""Row of `D` for keys to the left."""


def halves(noise: torch.Tensor, std: float) -> torch.Tensor:
    """Return +1, but −1 to the left in half of the dimensions: one half starts even in i − j, the other half odd."""
    rows = torch.ones_like(noise)
    rows[LEFT, noise.shape[-1] // 2 :] = -1
    return rows + std * noise


EXTRA = {
    "spread-0.1": lambda noise, std: 1 + 0.1 * noise,
    "spread-0.25": lambda noise, std: 1 + 0.25 * noise,
    "halves": halves,
}
"""Starts that were tried and are no choice of `--direction-init`."""

ddrp.DIRECTION_INITS |= EXTRA
ARMS = (*ddrp.DIRECTION_INITS, "bert-r")


def train_arm(arm: str, words: list[str]) -> int:
    """Train one arm in this process; returns its exit code."""
    config = parse_arguments(words).config
    changed = {"position_encoding": arm} if arm in ENCODINGS else {"direction_init": arm}
    return train(config.replace(model=changed))


def cosines(folder: Path) -> tuple[float, float]:
    """Return the mean cosine of T^q[+k] and T^q[−k] over k = 1 … `NEAR`, and over all k, of a run's last checkpoint."""
    model, _, config = load_model(folder)
    encoding = model.embeddings.position
    tensors = encoding(torch.arange(config.model.seq_length)[None])
    terms = encoding.terms(config.model, tensors)
    reach = min(-terms.lowest, terms.highest)
    table = terms.query_table[0]  # [num_relative, head_dim]
    steps = torch.arange(1, reach + 1)
    similar = torch.cosine_similarity(table[steps - terms.lowest], table[-steps - terms.lowest], dim=-1)
    return similar[:NEAR].mean().item(), similar.mean().item()


def measure(folder: Path) -> dict[str, Any]:
    """Return the last validation loss and the cosines of a finished run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    near, far = cosines(folder)
    return {"loss": [row["valid_lm_loss"] for row in rows if "valid_lm_loss" in row][-1], "near": near, "all": far}


def print_table(found: dict[str, list[dict[str, Any]]]) -> None:
    """Print one row per arm: losses, their difference to `ones` seed by seed, and the cosines."""
    print("| start of `D` | validation loss by seed | mean | minus `ones`, by seed | cosine, k ≤ 8 | cosine, all k |")
    print("| --- | --- | ---: | --- | ---: | ---: |")
    for arm, runs in sorted(found.items(), key=lambda item: statistics.fmean(run["loss"] for run in item[1])):
        losses = [run["loss"] for run in runs]
        pairs = zip(losses, found.get("ones", []), strict=False)
        less = ", ".join(f"{loss - one['loss']:+.3f}" for loss, one in pairs)
        near, far = (statistics.fmean(run[which] for run in runs) for which in ("near", "all"))
        by_seed = ", ".join(f"{loss:.3f}" for loss in losses)
        print(f"| {arm} | {by_seed} | {statistics.fmean(losses):.3f} | {less} | {near:.2f} | {far:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1234, 1235, 1236])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--train", choices=ARMS, help=argparse.SUPPRESS)  # one arm, in a process of its own
    parser.add_argument("flags", nargs="*", help="further flags of pretrain_bert.py, after --")
    arguments = parser.parse_args()
    if arguments.train:
        sys.exit(train_arm(arguments.train, arguments.flags))
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for arm in arguments.arms:
            folder = arguments.output / f"{arm}-{seed}"
            data = ["--data-path", arguments.data_path, "--vocab-file", arguments.vocab_file]
            place = ["--save", str(folder), "--load", str(folder), "--seed", str(seed)]
            own = ["--data-path", arguments.data_path, "--vocab-file", arguments.vocab_file, "--output", "unused"]
            words = [*data, *FLAGS.split(), *place, *arguments.flags]
            subprocess.run([sys.executable, __file__, *own, "--train", arm, "--", *words], check=True)
            found.setdefault(arm, []).append(measure(folder))
            print(f"{arm}, seed {seed}: {found[arm][-1]}", flush=True)
    print_table(found)


if __name__ == "__main__":
    main()
