"""Early signs of when a run leaves the plateau (docs/lab/plateau.md), by rank correlations over seeds.

    python benchmarks/onset_signs.py --data-path P --vocab-file vocab.txt --output DIR [--encoding ddrp] [--seeds 1 2 …]

Trains one run per seed, with the settings of examples/compare/plateau.yaml, until it has left the plateau for 0.3
million tokens, or for 8.4 million tokens. The signs are the training loss, f(S) and the spread of attention logits on
64 validation sentences, and the gradient norm of the position tables. The spread is the standard deviation over the
keys of a query, the mean over queries, heads and layers. A sign at n tokens is its mean over the 0.2 million tokens
before. Its rank correlation with the onset has a p-value from permutations. Each run is kept in DIR/ENCODING-SEED;
finished ones are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import benchmark_parser
from scipy.stats import spearmanr
from torch import nn

from megatron_ddrp import pretrain
from megatron_ddrp.checkpoint.folder import holds_run
from megatron_ddrp.config import Config
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.lab.analysis.figures import layer_logits, similarity_sums
from megatron_ddrp.lab.analysis.session import Sentences, validation_rows
from megatron_ddrp.lab.compare.plan import read_plans
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.attention.logits import allowed_pairs
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.callbacks import Callback, StopTraining
from megatron_ddrp.run.metrics import WINDOW, Point, curve_of, onset, read_rows, stored_level

PLAN, *_ = read_plans(Path(__file__).resolve().parents[1] / "examples" / "compare" / "plateau.yaml")
SETTINGS: dict[str, Any] = dict(PLAN.flags)
SETTINGS |= {"objective": "mlm", "bf16": False, "train_iters": 4096, "log_interval": 20}
SETTINGS |= {"eval_interval": 4096, "eval_iters": 1, "save_interval": 4096}
AFTERWARDS = 300_000
"""Tokens for which a run continues after its onset, since it may fall back onto the plateau."""
SIGNS = ("lm_loss", "f_s", "logit_spread", "position_gradient")
AT = (500_000, 1_000_000, 1_500_000)
"""Tokens at which the signs are read."""
SENTENCES = 64
PERMUTATIONS = 20_000


class Signs(Callback):
    """Adds the signs to every logged row; stops the run after its onset."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.curve: list[Point] = []
        self.norms: dict[str, float] = {}

    def on_start(self, config: Config, iteration: int, model: nn.Module) -> None:
        assert isinstance(model, Encoder) and config.checkpoint.save
        self.model, self.level = model, stored_level(Path(config.checkpoint.save))
        for name, weight in model.named_parameters():
            if name.startswith(("embeddings.position", "embeddings.absolute")):
                weight.register_hook(lambda gradient, name=name: self.norms.update({name: float(gradient.norm())}))

    def columns(self) -> Mapping[str, float]:
        self.model.eval()
        spread, f_s = logit_spread(self.model, self.batch), similarity_sums(self.model, self.batch)[0] / SENTENCES
        self.model.train()
        gradient = float(np.hypot.reduce(list(self.norms.values())))
        return {"f_s": float(f_s), "logit_spread": spread, "position_gradient": gradient}

    def on_step(self, row: Mapping[str, Any]) -> None:
        self.curve += curve_of([row])
        left = onset(self.curve, self.level or 0.0)
        if left and self.curve[-1][0] > left + AFTERWARDS:
            raise StopTraining


def logit_spread(model: Encoder, batch: Batch) -> float:
    """Return the standard deviation of a query's logits over its keys, the mean over queries, heads and layers."""
    by_layer = []
    for logits, window in layer_logits(model, batch):
        logits = logits.masked_fill(~allowed_pairs(batch.document_ids, window), torch.nan)  # [batch, heads, seq, seq]
        deviations = logits - logits.nanmean(-1, keepdim=True)  # all NaN for a query that is padding
        by_layer.append(deviations.square().nanmean(-1).sqrt().nanmean())
    return float(torch.stack(by_layer).mean())


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data-path", required=True, help="as of pretrain_bert.py")
    parser.add_argument("--vocab-file", required=True, help="as of pretrain_bert.py")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the runs")
    parser.add_argument("--encoding", default="ddrp", help="position encoding")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1, 9)), help="one run per seed")
    arguments = parser.parse_args()
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=arguments.vocab_file)
    length = SETTINGS["seq_length"]
    drawn = validation_rows([arguments.data_path], "969,30,1", tokenizer, length, SENTENCES, 1)
    (arrays,) = Sentences(drawn, tokenizer, length).batches(SENTENCES)
    batch = arrays.map(torch.from_numpy)
    found = []
    for seed in arguments.seeds:
        folder = arguments.output / f"{arguments.encoding}-{seed}"
        if not holds_run(folder):  # it saves at its end
            data = {"data_path": arguments.data_path, "vocab_file": arguments.vocab_file}
            places = {"position_encoding": arguments.encoding, "seed": seed, "save": folder, "load": folder}
            pretrain(**SETTINGS, **data, **places, callbacks=[Signs(batch)])
        rows = [row for row in read_rows(folder) if "f_s" in row]
        left = onset(curve_of(rows), stored_level(folder) or 0.0) or rows[-1]["consumed_tokens"]
        values = {(sign, at): _mean(rows, sign, at) for at in AT for sign in SIGNS}
        found.append((left, values))
        print(f"{arguments.encoding}, seed {seed}: onset {left / 1e6:.2f} million", flush=True)
    table = [
        [f"{at / 1e6:g} million", sign, *rank_correlation([(values[sign, at], left) for left, values in found])]
        for at in AT
        for sign in SIGNS
    ]
    print(Table(["tokens", "sign", "rank correlation with the onset", "p"], table, wordy=(0, 1)))


def _mean(rows: list[dict[str, Any]], sign: str, at: int) -> float:
    return float(np.mean([row[sign] for row in rows if at - WINDOW < row["consumed_tokens"] <= at]))


def rank_correlation(pairs: list[tuple[float, float]]) -> tuple[str, str]:
    """Return the rank correlation of a sign with the onset, and its p-value over permutations."""
    signs, onsets = np.array(pairs).T
    rho = spearmanr(signs, onsets).statistic
    random = np.random.default_rng(0)
    others = np.array([spearmanr(random.permutation(signs), onsets).statistic for _ in range(PERMUTATIONS)])
    return f"{rho:+.2f}", f"{np.mean(np.abs(others) >= abs(rho) - 1e-9):.3f}"


if __name__ == "__main__":
    main()
