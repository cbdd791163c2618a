"""Cost of TCD and HCD beside plain masked LM (the paper: 4 % sampled, 30 % for all tokens and heads).

Two measurements in one process, 4 layers × 768, 12 heads, 8 full rows of 512 tokens, forward + backward + AdamW:

whole    whole training steps with the terms ÷ steps without, as pairs; but single steps of several seconds spread by
         tens of per cent on shared cores, so hundreds of pairs are needed to see 1 %;
added    the work a term adds, timed where it is added (the attention of one layer with and without HCD's heads, TCD on
         the last hidden states), × layers ÷ the step's time. Far shorter pairs see the same 1 %.

    python benchmarks/mth_overhead.py                     # both, 100 pairs of whole steps: over an hour on 2 cores
    python benchmarks/mth_overhead.py --whole-pairs 0     # added only, about 4 minutes
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from arms import LAYERS, added_parts, full_rows, model_config, our_step, tcd
from measure import benchmark_parser, print_ratio, time_rounds

from megatron_ddrp.config import ObjectiveConfig

ROWS, SEQ = 8, 512
TCD_BOUND, HCD_BOUNDS = 1.01, {"absolute": 1.01, "ddrp": 1.02}
TERMS = {
    "base": ObjectiveConfig(objective="mlm"),
    "A/A": ObjectiveConfig(objective="mlm"),
    "tcd": ObjectiveConfig(objective="mlm", tcd_weight=1.0, tcd_tokens=0),
    "hcd": ObjectiveConfig(objective="mlm", hcd_weight=0.01, hcd_heads=2),
}


def measure_encoding(encoding: str, dropout: float, arguments: argparse.Namespace) -> None:
    """Print what TCD over all tokens and HCD with two heads a layer add to an encoding's step."""
    config, arrays = model_config(encoding, SEQ, dropout), full_rows(ROWS, SEQ)
    steps = {name: our_step(config, settings, arrays) for name, settings in TERMS.items()}
    arms = added_parts(config, arrays) | {
        "A/A": added_parts(config, arrays)[encoding],
        "tcd": tcd(TERMS["tcd"], arrays),
    }
    parts = time_rounds(arms, arguments.added_pairs)
    step = float(np.median(time_rounds({"base": steps["base"]}, arguments.base_steps)["base"]))
    print(f"{encoding}, dropout {dropout}, step {step:.2f} s; ratios to plain masked LM [95 %]:")
    bounds = {"tcd": TCD_BOUND, "hcd": HCD_BOUNDS.get(encoding)}
    attention = parts[encoding]
    print_ratio("added: A/A", 1 + LAYERS * (parts["A/A"] - attention) / step)
    print_ratio("added: tcd over all tokens", 1 + parts["tcd"] / step, bounds["tcd"])
    print_ratio(
        "added: hcd, 2 heads a layer", 1 + LAYERS * (parts[f"{encoding} hcd"] - attention) / step, bounds["hcd"]
    )
    if arguments.whole_pairs:
        whole = time_rounds(steps, arguments.whole_pairs, warm_up=1)
        for name in ("A/A", "tcd", "hcd"):
            print_ratio(f"whole: {name}", whole[name] / whole["base"], bounds.get(name))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--whole-pairs", type=int, default=100, help="pairs of whole steps")
    parser.add_argument("--added-pairs", type=int, default=100, help="pairs of the added work")
    parser.add_argument("--base-steps", type=int, default=9, help="steps timed for the base")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1], help="probabilities")
    parser.add_argument("--encodings", nargs="+", default=["absolute", "ddrp"], help="position encodings")
    arguments = parser.parse_args()
    shape = f"{ROWS} x {SEQ} tokens, {LAYERS} layers x 768, 12 heads"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {shape}")
    for dropout in arguments.dropout:
        for encoding in arguments.encodings:
            measure_encoding(encoding, dropout, arguments)


if __name__ == "__main__":
    main()
