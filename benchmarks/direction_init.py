"""Compare starts of DDRP's `D` by their loss, and by how well the encoding tells left from right.

    python benchmarks/direction_init.py --data-path P --vocab-file vocab.txt --output DIR [--seeds 1234 1235 1236]

An arm is a choice of `--direction-init`, or `bert-r`, whose rows are free. Runs with the same seed see the same data
with the same masks, so arms are compared seed by seed. The cosine is the one between the table rows T^q[+k] and T^q[−k]
at the end of the run, averaged over k = 1 … 8 and over all k: near 1, the encoding is blind to direction. Each run is
kept in DIR/ARM-SEED; the same command resumes a stopped one and skips finished ones.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from measure import benchmark_parser

from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.lab.analysis.similarity import near_and_far, table_cosines
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.metrics import read_rows

SCRIPT = Path(__file__).resolve().parents[1] / "pretrain_bert.py"
FLAGS = """
    --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64 --packing --objective mlm
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 32 --global-batch-size 32 --train-iters 800
    --lr 2e-3 --lr-warmup-fraction 0.1 --log-interval 50 --eval-interval 100000 --eval-iters 40
    --save-interval 100000 --num-threads 1"""
"""Flags of pretrain_bert.py that all runs share."""
ARMS = {name: ["--direction-init", name] for name in ("spread", "ones", "free", "embedding")}
ARMS["bert-r"] = ["--position-encoding", "bert-r"]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data-path", required=True, help="as of pretrain_bert.py")
    parser.add_argument("--vocab-file", required=True, help="as of pretrain_bert.py")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the runs")
    parser.add_argument("--seeds", nargs="+", default=["1234", "1235", "1236"], help="one run of each arm per seed")
    arguments = parser.parse_args()
    data = ["--data-path", arguments.data_path, "--vocab-file", arguments.vocab_file]
    rows = []
    for arm, own in ARMS.items():
        losses, found = [], []
        for seed in arguments.seeds:
            folder = arguments.output / f"{arm}-{seed}"
            words = [*data, *FLAGS.split(), *own, "--save", folder, "--load", folder, "--seed", seed]
            subprocess.run([sys.executable, SCRIPT, *words], check=True, stdout=subprocess.DEVNULL)
            losses.append([row["valid_lm_loss"] for row in read_rows(folder) if "valid_lm_loss" in row][-1])
            model, _, _ = load_model(folder)
            found.append(near_and_far(table_cosines(model)))
        near, far = (statistics.fmean(part) for part in zip(*found, strict=True))
        by_seed = ", ".join(f"{loss:.3f}" for loss in losses)
        rows.append([arm, by_seed, f"{statistics.fmean(losses):.3f}", f"{near:.2f}", f"{far:.2f}"])
        print(*rows[-1], flush=True)
    header = ["start of D", "validation loss by seed", "mean", "cosine, k ≤ 8", "cosine, all k"]
    print(Table(header, rows, wordy=(1,)))


if __name__ == "__main__":
    main()
