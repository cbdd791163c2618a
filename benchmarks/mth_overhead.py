"""What TCD and HCD cost beside plain masked LM (the paper: 4 % sampled, 30 % for all tokens and heads).

Two measurements in one process, 4 layers × 768, 12 heads, 8 full rows of 512 tokens, forward + backward + AdamW:

whole    whole training steps with the terms ÷ steps without, as pairs; honest, but single steps of several seconds
         spread by tens of per cent on shared cores, so hundreds of pairs are needed to see 1 %;
added    the work a term adds, timed where it is added (the attention of one layer with and without HCD's heads, TCD on
         the last hidden states), × layers ÷ the step's time. Far shorter pairs see the same 1 %.

    python benchmarks/mth_overhead.py                     # both, 100 pairs of whole steps: over an hour on 2 cores
    python benchmarks/mth_overhead.py --whole-pairs 0     # added only, about 4 minutes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from measure import Interval, median_interval, time_rounds, verdict

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, encoding_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model import Bert, build_model
from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.backends import BACKENDS, resolve_backend
from megatron_ddrp.model.similarity import token_cosine
from megatron_ddrp.model.stages import Draws
from megatron_ddrp.objectives.draws import draw

ROWS, SEQ = 8, 512
SEED = 1234
BOUNDS = {("absolute", "tcd"): 1.01, ("absolute", "hcd"): 1.01, ("ddrp", "tcd"): 1.01, ("ddrp", "hcd"): 1.02}
TERMS = {
    "base": ObjectiveConfig(objective="mlm"),
    "A/A": ObjectiveConfig(objective="mlm"),
    "tcd": ObjectiveConfig(objective="mlm", tcd_weight=1.0, tcd_tokens=0),
    "hcd": ObjectiveConfig(objective="mlm", hcd_weight=0.01, hcd_heads=2),
}


def make_batch(config: ModelConfig, device: torch.device) -> tuple[Batch, Batch]:
    """(numpy, torch) full rows of random tokens, 15 % of them predicted."""
    rng = np.random.default_rng(SEED)
    ids = rng.integers(1000, config.vocab_size, (ROWS, SEQ))
    labels = np.where(rng.random((ROWS, SEQ)) < 0.15, ids, IGNORED_LABEL)
    ones, zeros = np.ones_like(ids), np.zeros_like(ids)
    positions = np.broadcast_to(np.arange(SEQ), ids.shape).copy()
    sequences = np.broadcast_to(np.arange(ROWS)[:, None], ids.shape).copy()
    arrays = Batch(ids, labels, ones, positions, zeros, sequences)
    return arrays, arrays.map(lambda array: torch.from_numpy(array).to(device))


def step_function(
    model: Bert, optimizer: torch.optim.Optimizer, batches: tuple[Batch, Batch], objective: ObjectiveConfig
) -> Callable[[], None]:
    """One whole training step under an objective, draws included."""
    arrays, batch = batches
    device = batch.input_ids.device
    predicted = int((arrays.labels != IGNORED_LABEL).sum())
    counts = torch.tensor([predicted, ROWS, ROWS], device=device)
    weights = torch.tensor(objective.weights, device=device) / counts
    step = iter(range(10**9))

    def run() -> None:
        draws = draw(
            arrays.document_ids, arrays.sequence_ids, arrays.position_ids, objective, model.config, SEED, next(step)
        )
        on_device = Draws(draws.token_mask.to(device), draws.heads.to(device))
        (model(batch, on_device) * weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def added_work(model: Bert, batch: Batch, dropout: float) -> dict[str, Callable[[], None]]:
    """One layer's attention without and with HCD's two heads, and TCD over all tokens: forward and backward."""
    config = model.config
    device = batch.input_ids.device
    encoding = encoding_class(config.position_encoding)(config).to(device)
    backend, _ = resolve_backend(config.attention_backend, device, encoding.in_logits, dropout)
    attend = BACKENDS[backend]
    shape = (ROWS, SEQ, config.num_attention_heads, config.head_dim)
    query, key, value = (torch.randn(shape, device=device).transpose(1, 2).requires_grad_() for _ in range(3))
    hidden = torch.randn(ROWS, SEQ, config.hidden_size, device=device, requires_grad=True)
    gradient = torch.randn(ROWS, config.num_attention_heads, SEQ, config.head_dim, device=device)

    def attention(heads: list[int]) -> Callable[[], None]:
        chosen = torch.tensor(heads, dtype=torch.long, device=device)

        def run() -> None:
            terms = encoding.terms(config, encoding(batch.position_ids))
            context, cosine = attend(Attending(query, key, value, terms, batch.document_ids, chosen, dropout))
            loss = (context * gradient).sum()
            (loss if cosine is None else loss + 0.01 * cosine.mean()).backward()

        return run

    def tcd() -> None:
        token_cosine(hidden, batch.document_ids.unsqueeze(1)).mean().backward()

    return {
        "attention": attention([]),
        "attention again": attention([]),
        "attention + hcd": attention([3, 8]),
        "tcd": tcd,
    }


def report(label: str, ratio: Interval, bound: float | None) -> None:
    print(f"  {label:<34} {ratio}   {verdict(ratio, bound) if bound else ''}", flush=True)


def measure_encoding(encoding: str, dropout: float, arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    config = ModelConfig(
        num_layers=4, position_encoding=encoding, hidden_dropout=dropout, attention_dropout=dropout, vocab_size=30522
    )
    model = build_model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batches = make_batch(config, device)
    steps = {name: step_function(model, optimizer, batches, objective) for name, objective in TERMS.items()}

    parts = time_rounds(added_work(model, batches[1], dropout), arguments.added_pairs)
    base = time_rounds({"base": steps["base"]}, arguments.base_steps)["base"]
    step_seconds = float(np.median(base))
    print(f"{encoding}, dropout {dropout}, step {step_seconds:.2f} s; ratios to plain masked LM [95 %]:")
    attention = parts["attention"]
    for label, extra, bound in (
        ("added: A/A", (parts["attention again"] - attention) * config.num_layers, None),
        ("added: tcd over all tokens", parts["tcd"], BOUNDS[encoding, "tcd"]),
        (
            "added: hcd, 2 heads a layer",
            (parts["attention + hcd"] - attention) * config.num_layers,
            BOUNDS[encoding, "hcd"],
        ),
    ):
        report(label, median_interval(1 + extra / step_seconds), bound)
    if arguments.whole_pairs:
        whole = time_rounds(steps, arguments.whole_pairs, warm_up=1)
        for name in ("A/A", "tcd", "hcd"):
            report(f"whole: {name}", median_interval(whole[name] / whole["base"]), BOUNDS.get((encoding, name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole-pairs", type=int, default=100, help="pairs of whole steps (default: %(default)s)")
    parser.add_argument("--added-pairs", type=int, default=100, help="pairs of the added work (default: %(default)s)")
    parser.add_argument("--base-steps", type=int, default=9, help="steps timed for the base (default: %(default)s)")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1], help="(default: %(default)s)")
    parser.add_argument("--encodings", nargs="+", default=["absolute", "ddrp"], help="(default: %(default)s)")
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {ROWS} x {SEQ} tokens, 4 layers x 768, 12 heads"
    )
    for dropout in arguments.dropout:
        for encoding in arguments.encodings:
            measure_encoding(encoding, dropout, arguments)


if __name__ == "__main__":
    main()
