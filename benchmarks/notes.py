"""Cost of notes of rare words in a step, and of ELECTRA's step beside its generator and discriminator apart.

4 layers × 768, 12 heads, full rows of 512 tokens, forward + backward + AdamW, as rounds in random order:

notes      a masked-LM step that reads and takes notes ÷ the same step without; one rare word in 125 tokens, one in
           five sentences of 25, each read and noted, the dictionary's update included. Bound 1.05.
electra    ELECTRA's step ÷ (a masked-LM step of the generator + a replaced-token step of the discriminator), each a
           model of its own with its own optimizer; sampling is in ELECTRA's step alone. Bound 1.05.

    python benchmarks/notes.py                        # 100 rounds of 8 rows: hours on 2 cores
    python benchmarks/notes.py --rows 1 --rounds 10   # a first look, about 3 minutes
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from arms import Step, full_rows, model_config, on_device, training_step
from measure import DEVICE, benchmark_parser, print_ratio, time_rounds
from torch import nn

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.word_counts import RareWords
from megatron_ddrp.model import build_model
from megatron_ddrp.model.bert import SampleKeys, generator_config, run_stages
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.heads import MaskedLMHead, ReplacedTokenHead, rtd_sums
from megatron_ddrp.model.stages import Draws, Inputs, NoteInputs
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.objectives.electra import NoteDictionary

SEQ, SEED, NUM_WORDS, TOKENS_A_WORD = 512, 1234, 20_000, 125
BOUND = 1.05
ELECTRA = ObjectiveConfig(objective="electra")


def make_batch(rows: int) -> Batch:
    """Return full rows of random tokens with two-piece rare words at random places (numpy)."""
    rng = np.random.default_rng(SEED)
    notes = np.zeros((rows, SEQ), np.int64)
    for row in range(rows):
        for place in rng.choice(SEQ // 2 - 1, SEQ // TOKENS_A_WORD, replace=False) * 2 + 1:
            notes[row, place] = rng.integers(1, NUM_WORDS)
            notes[row, place + 1] = -notes[row, place]
    return full_rows(rows, SEQ)._replace(note_ids=notes)


class Alone(nn.Module):
    """One half of ELECTRA: an encoder of its own with a head, its embeddings as wide as the discriminator's."""

    def __init__(self, config: ModelConfig, generates: bool) -> None:
        super().__init__()
        self.tokens, objective = Embeddings(config), make_objective(ObjectiveConfig(objective="mlm"))
        own = generator_config(config, ELECTRA) if generates else config
        self.embeddings = Embeddings(own, shared=self.tokens) if generates else self.tokens
        self.layers = build_model(own).layers
        self.head: Any = ReplacedTokenHead(own, objective)
        if generates:
            self.head = MaskedLMHead(own, self.tokens.token, objective)

    def forward(self, inputs: Inputs) -> torch.Tensor:
        state = run_stages((self.embeddings, *self.layers), inputs)
        if isinstance(self.head, MaskedLMHead):
            return self.head(state).sums[0]
        return rtd_sums(self.head.logits(state.hidden), inputs.batch.labels)[0]


def note_arms(config: ModelConfig, arrays: Batch) -> dict[str, Step]:
    """Return a masked-LM step twice, and one that reads and takes notes."""
    objective = ObjectiveConfig(objective="mlm", notes=True)
    model = build_model(config, objective=objective).to(DEVICE)
    hashes = np.arange(NUM_WORDS, dtype=np.uint64)
    words = RareWords(hashes, np.full(NUM_WORDS, 100), np.arange(NUM_WORDS), np.arange(1, NUM_WORDS + 1))
    notes = NoteDictionary(words, config.hidden_size, objective)
    notes.met[:] = True
    draws = Draws.none(len(arrays.input_ids), config.num_layers, DEVICE)

    def with_notes() -> torch.Tensor:
        inputs, found = notes.inputs(arrays)
        sums, taken = model(on_device(arrays), draws, NoteInputs(*(x.to(DEVICE) for x in inputs)))
        notes.update(np.stack([found.words, found.sequence_ids, found.position_ids], axis=1), taken.cpu())
        return sums[0] / 600

    def plain() -> torch.Tensor:
        return model(on_device(arrays), draws).sums[0] / 600

    losses = {"plain": plain, "A/A": plain, "notes": with_notes}
    return {name: training_step(model, loss) for name, loss in losses.items()}


def electra_arms(config: ModelConfig, arrays: Batch) -> dict[str, Step]:
    """Return ELECTRA's step, and those of its generator and discriminator as models of their own."""
    batch = on_device(arrays)
    objective = make_objective(ELECTRA)
    none = Draws.none(len(arrays.input_ids), config.num_layers, DEVICE)
    drawn = objective.draw_own(arrays, SEED, 1)
    draws = none._replace(own=SampleKeys(drawn.keys.to(DEVICE)))
    divisors = {"lm_loss": 1 / 600, "rtd_loss": 50 / 4096}
    weights = torch.tensor([divisors.get(name, 0.0) for name in objective.sum_names], device=DEVICE)
    whole = build_model(config, objective=ELECTRA).to(DEVICE)
    generator, discriminator = (Alone(config, generates).to(DEVICE) for generates in (True, False))
    targets = (torch.rand(batch.labels.shape, device=DEVICE) < 0.12).long()
    masked, judged = Inputs.of(batch, none), Inputs.of(batch._replace(labels=targets), none)
    return {
        "generator": training_step(generator, lambda: generator(masked) / 600),
        "discriminator": training_step(discriminator, lambda: discriminator(judged) * 50 / 4096),
        "electra": training_step(whole, lambda: (whole(batch, draws).sums * weights).sum()),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8, help="rows of 512 tokens")
    parser.add_argument("--rounds", type=int, default=100, help="rounds")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1], help="probabilities")
    parser.add_argument("--parts", nargs="+", default=["notes", "electra"], choices=("notes", "electra"), help="parts")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rows} x {SEQ} tokens")
    arrays = make_batch(arguments.rows)
    for dropout in arguments.dropout:
        torch.manual_seed(SEED)
        config = model_config("absolute", SEQ, dropout)
        if "notes" in arguments.parts:
            seconds = time_rounds(note_arms(config, arrays), arguments.rounds, warm_up=1)
            print(f"dropout {dropout}, plain step {np.median(seconds['plain']):.2f} s; ratios [95 %]:")
            print_ratio("A/A", seconds["A/A"] / seconds["plain"])
            print_ratio("notes", seconds["notes"] / seconds["plain"], BOUND)
        if "electra" in arguments.parts:
            seconds = time_rounds(electra_arms(config, arrays), arguments.rounds, warm_up=1)
            apart = seconds["generator"] + seconds["discriminator"]
            print(f"dropout {dropout}, generator + discriminator {np.median(apart):.2f} s; ratio [95 %]:")
            print_ratio("electra", seconds["electra"] / apart, BOUND)


if __name__ == "__main__":
    main()
