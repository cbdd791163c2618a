"""What notes of rare words add to a step, and ELECTRA's step beside its generator and discriminator apart.

4 layers × 768, 12 heads, full rows of 512 tokens, forward + backward + AdamW, as rounds in random order:

notes      a masked-LM step that reads and takes notes ÷ the same step without; one rare word in 125 tokens, one in
           five sentences of 25, each read and noted, the dictionary's update included. Bound 1.05.
electra    ELECTRA's step ÷ (a masked-LM step of the generator + a replaced-token step of the discriminator), each a
           model of its own with its own optimizer; sampling is in ELECTRA's step alone. Bound 1.05.

    python benchmarks/notes.py                        # 100 rounds of 8 rows: hours on 2 cores
    python benchmarks/notes.py --rows 1 --rounds 10   # a first look, about 3 minutes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from measure import median_interval, time_rounds, verdict
from torch import nn

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.batches.rare_words import RareWords
from megatron_ddrp.model import build_model
from megatron_ddrp.model.electra import generator_config
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.heads import MaskedLMHead, ReplacedTokenHead
from megatron_ddrp.model.stages import NUM_ELECTRA_SUMS, RTD, Draws, StageState
from megatron_ddrp.objectives.draws import sample_keys
from megatron_ddrp.objectives.notes import NoteDictionary

SEQ, SEED, NUM_WORDS, TOKENS_A_WORD = 512, 1234, 20_000, 125
BOUND = 1.05
ELECTRA = ObjectiveConfig(objective="electra")


def make_batch(rows: int) -> Batch:
    """Full rows of random tokens, 15 % of them predicted, two-piece rare words at random places."""
    rng = np.random.default_rng(SEED)
    ids = rng.integers(1000, 30522, (rows, SEQ))
    labels = np.where(rng.random((rows, SEQ)) < 0.15, ids, IGNORED_LABEL)
    notes = np.zeros_like(ids)
    for row in range(rows):
        for place in rng.choice(SEQ // 2 - 1, SEQ // TOKENS_A_WORD, replace=False) * 2 + 1:
            notes[row, place] = rng.integers(1, NUM_WORDS)
            notes[row, place + 1] = -notes[row, place]
    ones, zeros = np.ones_like(ids), np.zeros_like(ids)
    positions = np.broadcast_to(np.arange(SEQ), ids.shape).copy()
    sequences = np.broadcast_to(np.arange(rows)[:, None], ids.shape).copy()
    return Batch(ids, labels, ones, positions, zeros, sequences, notes)


class Alone(nn.Module):
    """One half of ELECTRA: an encoder of its own with a head, its embeddings as wide as the discriminator's."""

    def __init__(self, config: ModelConfig, generates: bool) -> None:
        super().__init__()
        self.tokens = Embeddings(config)
        own = generator_config(config, ELECTRA) if generates else config
        whole = build_model(own)
        self.embeddings = Embeddings(own, shared=self.tokens) if generates else self.tokens
        self.layers = whole.layers
        self.head = MaskedLMHead(own, self.tokens.token) if generates else ReplacedTokenHead(own)
        self.place = 0 if generates else RTD

    def forward(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        state = StageState.unpack(self.embeddings(tensors))
        sums = state.losses if self.place == 0 else state.losses.new_zeros(NUM_ELECTRA_SUMS)
        packed = state._replace(losses=sums).pack()
        for layer in self.layers:
            packed = layer(packed)
        return self.head(packed)[self.place]


def stepper(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def note_arms(config: ModelConfig, arrays: Batch, device: torch.device) -> dict[str, Callable[[], None]]:
    objective = ObjectiveConfig(objective="mlm", notes=True)
    model = build_model(config, objective=objective).to(device)
    hashes = np.arange(NUM_WORDS, dtype=np.uint64)
    words = RareWords(hashes, np.full(NUM_WORDS, 100), np.arange(NUM_WORDS), np.arange(1, NUM_WORDS + 1))
    notes = NoteDictionary(words, config.hidden_size, objective)
    notes.met[:] = True
    draws = Draws.none(len(arrays.input_ids), config.num_layers, device)

    def batch() -> Batch:
        return arrays.map(lambda array: torch.from_numpy(array).to(device))

    def with_notes() -> torch.Tensor:
        inputs, found = notes.inputs(arrays)
        sums, taken = model(batch(), draws, inputs.to(device)).sums
        notes.update(np.stack([found.words, found.sequence_ids, found.position_ids], axis=1), taken.cpu())
        return sums[0] / 600

    def plain() -> torch.Tensor:
        return model(batch(), draws).sums[0] / 600

    return {"plain": stepper(model, plain), "A/A": stepper(model, plain), "notes": stepper(model, with_notes)}


def electra_arms(config: ModelConfig, arrays: Batch, device: torch.device) -> dict[str, Callable[[], None]]:
    batch = arrays.map(lambda array: torch.from_numpy(array).to(device))
    none = Draws.none(len(arrays.input_ids), config.num_layers, device)
    draws = Draws(
        none.token_mask, none.heads, sample_keys(arrays.sequence_ids, arrays.position_ids, SEED, 1).to(device)
    )
    weights = torch.zeros(NUM_ELECTRA_SUMS, device=device)
    weights[0], weights[RTD] = 1 / 600, 50 / 4096
    whole = build_model(config, objective=ELECTRA).to(device)
    generator, discriminator = (Alone(config, generates).to(device) for generates in (True, False))
    ids = (batch.input_ids, batch.segment_ids, batch.document_ids, batch.position_ids)
    masked = (*ids, batch.labels, none.token_mask, none.heads)
    targets = (torch.rand(batch.labels.shape, device=device) < 0.12).long()
    judged = (*ids, targets, none.token_mask, none.heads)
    return {
        "generator": stepper(generator, lambda: generator(masked) / 600),
        "discriminator": stepper(discriminator, lambda: discriminator(judged) * 50 / 4096),
        "electra": stepper(whole, lambda: (whole(batch, draws).sums * weights).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows of 512 tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1], help="(default: %(default)s)")
    parser.add_argument("--parts", nargs="+", default=["notes", "electra"], choices=("notes", "electra"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rows} x {SEQ} tokens")
    arrays = make_batch(arguments.rows)
    for dropout in arguments.dropout:
        torch.manual_seed(SEED)
        config = ModelConfig(
            num_layers=4, position_encoding="absolute", hidden_dropout=dropout, attention_dropout=dropout
        )
        if "notes" in arguments.parts:
            seconds = time_rounds(note_arms(config, arrays, device), arguments.rounds, warm_up=1)
            print(f"dropout {dropout}, plain step {np.median(seconds['plain']):.2f} s; ratios [95 %]:")
            print(f"  A/A      {median_interval(seconds['A/A'] / seconds['plain'])}")
            ratio = median_interval(seconds["notes"] / seconds["plain"])
            print(f"  notes    {ratio}   {verdict(ratio, BOUND)}", flush=True)
        if "electra" in arguments.parts:
            seconds = time_rounds(electra_arms(config, arrays, device), arguments.rounds, warm_up=1)
            apart = seconds["generator"] + seconds["discriminator"]
            print(f"dropout {dropout}, generator + discriminator {np.median(apart):.2f} s; ratio [95 %]:")
            ratio = median_interval(seconds["electra"] / apart)
            print(f"  electra  {ratio}   {verdict(ratio, BOUND)}", flush=True)


if __name__ == "__main__":
    main()
