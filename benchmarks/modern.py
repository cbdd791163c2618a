"""Training steps of the modern backbone beside transformers' ModernBERT: same weights, same documents, fp32.

4 layers × 768, 12 heads, GEGLU of 1152, pre-norm, no biases, rope with two bases, two of three layers local (128),
vocabulary 30,522, no dropout; forward + backward + AdamW. A global batch has documents of a dataset's lengths. Theirs
pads each to the shape's length and attends by sdpa, once as it is by default and once with `sparse_prediction`, which
computes logits at the masked tokens alone, as ours does. Ours packs. As many rows of each arm as `--shape` says are
timed, interleaved; the figure is the ratio of non-padding tokens per second with a bootstrap 95 % interval. Each arm
runs in a process of its own, theirs as its users run it, ours as training keeps memory. Nothing is timed before both
sides have given the same loss over a few documents.

    python benchmarks/modern.py --lengths wiki0_text_document --pairs 7
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import (
    HEADS,
    HIDDEN,
    LAYERS,
    SEED,
    VOCABULARY,
    Step,
    make_rows,
    on_device,
    our_step,
    step_apart,
    training_step,
)
from measure import DEVICE, benchmark_parser, median_interval, time_rounds
from step import document_lengths, evenly, pack
from torch import Tensor

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import Draws

BOUND = 2.0
SPARSE = "theirs, sparse prediction"
OBJECTIVE = ObjectiveConfig("mlm")


def modern_config(seq: int) -> ModelConfig:
    """Return the shape of our model."""
    return ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=seq,
        vocab_size=VOCABULARY,
        ffn="geglu",
        ffn_hidden_size=1152,
        bias=False,
        num_segments=0,
        layernorm_position="pre",
        first_norm=False,
        layernorm_epsilon=1e-5,
        position_encoding="rope",
        rope_theta=160_000.0,
        local_rope_theta=10_000.0,
        local_attention=128,
        global_every=3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def numbered_tokenizer() -> Tokenizer:
    """Return a tokenizer of as many pieces as the models embed; an export takes its special ids from one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.txt"
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        path.write_text("\n".join([*special, *(f"w{number}" for number in range(VOCABULARY - len(special)))]))
        return build_tokenizer("BertWordPieceLowerCase", path)


def their_model(config: ModelConfig, is_sparse: bool) -> Any:
    """Return a ModernBertForMaskedLM with the weights of our model, as an export would write them."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(SEED)
    family, head, tokenizer = FAMILIES["modernbert"], "masked-lm", numbered_tokenizer()
    assert family.refusal(config, head) is None
    padded = ("embeddings.token.weight", "head.decoder.bias")
    ours = build_model(config, objective=OBJECTIVE).state_dict()
    ours.pop("head.decoder.weight")  # tied
    weights = {family.their_name(n, head): w[:VOCABULARY] if n in padded else w for n, w in ours.items()}
    settings = family.folder_settings(config, head, tokenizer) | {"sparse_prediction": is_sparse}
    theirs = ModernBertForMaskedLM._from_config(ModernBertConfig(**settings), attn_implementation="sdpa")
    report = theirs.load_state_dict(family.to_folder(weights, config, tokenizer), strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (["decoder.weight"], []), report
    return theirs.to(DEVICE).train()


def their_loss(model: Any, arrays: Batch) -> Tensor:
    batch = on_device(arrays)
    return model(batch.input_ids, attention_mask=(batch.document_ids > 0).long(), labels=batch.labels).loss


def their_step(config: ModelConfig, arrays: Batch, is_sparse: bool) -> Step:
    """Return one training step of theirs."""
    model = their_model(config, is_sparse)
    return training_step(model, lambda: their_loss(model, arrays))


@torch.no_grad()
def check_losses(config: ModelConfig, arrays: Batch) -> None:
    """Print both sides' losses over the same documents, theirs padded and ours packed. Raises where they differ."""
    torch.manual_seed(SEED)
    packed = on_device(pack(arrays, config.seq_length))
    ours = build_model(config, objective=OBJECTIVE).to(DEVICE)
    sums = ours(packed, Draws.none(len(packed.input_ids), LAYERS, DEVICE)).sums
    losses = float(sums[0] / (packed.labels >= 0).sum()), float(their_loss(their_model(config, False), arrays))
    print(f"  masked-LM loss over the same documents: ours {losses[0]:.6f}, theirs {losses[1]:.6f}", flush=True)
    if abs(losses[0] - losses[1]) > 1e-4:
        raise RuntimeError("the two models compute different losses: there is nothing to compare")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", default="8x512", help="rows x tokens")
    parser.add_argument("--pairs", type=int, default=7, help="rounds")
    parser.add_argument("--lengths", metavar="P", required=True, help="take the documents' lengths from this dataset")
    parser.add_argument("--global-batch", type=int, default=1024, help="documents that ours packs")
    arguments = parser.parse_args()
    rows, seq = (int(part) for part in arguments.shape.split("x"))
    print(f"torch {torch.__version__}, {DEVICE.type}, {torch.get_num_threads()} threads; {rows} x {seq} tokens")
    config = modern_config(seq)
    documents = make_rows(document_lengths(arguments.lengths, arguments.global_batch, seq), seq)
    padded, packed = evenly(documents, rows), evenly(pack(documents, seq), rows)
    check_losses(config, evenly(documents, 4))
    sides = {"ours": packed, "theirs": padded, SPARSE: padded}
    tokens = {name: int((side.document_ids > 0).sum()) for name, side in sides.items()}
    arms = {"ours": step_apart(True, our_step, config, OBJECTIVE, packed)}
    arms |= {name: step_apart(False, their_step, config, padded, name == SPARSE) for name in ("theirs", SPARSE)}
    costs = {name: seconds / tokens[name] for name, seconds in time_rounds(arms, arguments.pairs).items()}
    for name, cost in costs.items():
        share = tokens[name] / (rows * seq)
        print(f"  {name}: {1 / np.median(cost):.0f} non-padding tokens per second, rows {share:.1%} full")
        if name != "ours":
            speed_up = median_interval(cost / costs["ours"])
            state = "met" if speed_up.low >= BOUND else "missed" if speed_up.high < BOUND else "not resolved"
            print(f"    ours is faster by {speed_up}   {state} (bound {BOUND})")


if __name__ == "__main__":
    main()
