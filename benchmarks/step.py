"""Whole training steps of every encoding and objective beside plain BERT, and beside `transformers` on the same batch.

4 layers × 768, 12 heads, vocabulary 30,522; forward + backward + AdamW. Every round runs all arms once in random order;
an arm's ratio is the median over the rounds of its time ÷ that of plain BERT (absolute positions, masked LM, the
fastest attention torch offers) in the same round, with a bootstrap 95 % interval. The A/A row repeats plain BERT.

    python benchmarks/step.py --shape 8x512 --pairs 100            # encodings under masked LM and MTH
    python benchmarks/step.py --shape 32x128 --pairs 100
    python benchmarks/step.py --shape 8x512 --added 100            # the same from the work that differs, in minutes
    python benchmarks/step.py --shape 8x512 --memory               # peak memory of MTH beside masked LM
    python benchmarks/step.py --shape 8x512 --against transformers # BertForMaskedLM and DebertaForMaskedLM
    python benchmarks/step.py --shape 8x512 --against transformers --lengths DATASET_PREFIX   # real document lengths

Whole steps spread by several per cent on shared cores. Encodings differ only in the attention of a layer and, once per
pass, in the encoding itself. `--added N` times these N times interleaved, forward and backward, takes plain BERT's
away, multiplies by the layers and divides by the whole step that follows its share of the rounds: step ratio = 1 +
added ÷ step. (The update of a few more parameters is left out; it is below 0.1 %.) DeBERTa stands there without and
with its enhanced mask decoder, which is timed by itself.

With `--lengths` both sides see the same global batch of documents (`--global-batch`), transformers in rows padded to
the shape's length, ours packed. As many rows of each side as `--shape` says are timed; a row of ours holds more tokens.
Beside transformers each side is a process of its own, theirs as its users run it, ours as training keeps memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource

import numpy as np
import torch
from arms import (
    LAYERS,
    Step,
    added_parts,
    full_rows,
    make_rows,
    mask_decoder,
    model_config,
    our_step,
    step_apart,
    tcd,
    transformers_step,
)
from measure import DEVICE, benchmark_parser, median_interval, print_ratio, time_rounds

from megatron_ddrp.config import ENCODINGS, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.samples import SampleIndex, join_samples, pack_rows
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset

BASE = "absolute mlm"
WITH_DECODER = "deberta mlm, mask decoder on"
SLOWER = {"bert-r": 1.06, "tupe-a": 1.08, "tupe-r": 1.08, "deberta": 1.15, "ddrp": 1.06}
BOUNDS = {512: SLOWER, 128: SLOWER | {"bert-r": 1.04, "ddrp": 1.04}}
"""Tokens per row → encoding → bound of its masked-LM step ÷ plain BERT's."""
MTH_BOUND = 1.02


def arm(encoding: str, objective: str, arrays: Batch, dropout: float, emd: bool = False) -> Step:
    """Return one training step of our model by the names of its encoding and objective."""
    config = model_config(encoding, arrays.input_ids.shape[1], dropout, emd)
    return our_step(config, ObjectiveConfig(objective=objective), arrays)


def pack(samples: Batch, seq: int) -> Batch:
    """Return the same documents, several per row."""
    lengths = samples.document_ids.sum(-1)
    rows = pack_rows(lengths, seq)
    order = np.concatenate([np.asarray(row) for row in rows])
    documents = np.array([len(row) for row in rows])
    return join_samples(samples.map(lambda array: array[order]), documents, seq, pad_id=0)


def document_lengths(prefix: str, count: int, seq: int) -> np.ndarray:
    """Return the lengths of `count` sequences of a dataset, evenly spaced over it."""
    dataset = IndexedDataset(prefix)
    samples = SampleIndex(dataset, (0, dataset.num_documents), seq)
    return samples.lengths(np.linspace(0, len(samples) - 1, count).astype(np.int64))


def evenly(batch: Batch, rows: int) -> Batch:
    """Return some rows of a batch: the middle one of each of as many equal parts."""
    return batch.map(lambda array: array[(2 * np.arange(rows) + 1) * len(array) // (2 * rows)])


def compare_encodings(rows: int, seq: int, dropout: float, arguments: argparse.Namespace) -> None:
    arrays = full_rows(rows, seq)
    arms = {name: arm("absolute", "mlm", arrays, dropout) for name in (BASE, "A/A")}
    for encoding in arguments.encodings:
        for objective in arguments.objectives:
            arms.setdefault(f"{encoding} {objective}", arm(encoding, objective, arrays, dropout))
    if "deberta" in arguments.encodings:
        arms[WITH_DECODER] = arm("deberta", "mlm", arrays, dropout, emd=True)
    seconds = time_rounds(arms, arguments.pairs, warm_up=1)
    base = seconds.pop(BASE)
    print(f"{rows} x {seq} tokens, dropout {dropout}: plain BERT {np.median(base):.3f} s a step; ratios [95 %]:")
    bounds = {f"{encoding} mlm": bound for encoding, bound in BOUNDS.get(seq, {}).items()}
    for name, values in seconds.items():
        print_ratio(name, values / base, bounds.get(name))
    seconds[BASE] = base
    for encoding in arguments.encodings:
        if {f"{encoding} mlm", f"{encoding} mth"} <= seconds.keys():
            print_ratio(f"{encoding}: mth / mlm", seconds[f"{encoding} mth"] / seconds[f"{encoding} mlm"], MTH_BOUND)


def time_added(arrays: Batch, dropout: float, arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return seconds `[rounds]` of each part that differs, and of the whole step that followed a part's rounds."""
    seq = arrays.input_ids.shape[1]
    arms = {"tcd": tcd(ObjectiveConfig(objective="mth"), arrays)}
    for encoding in dict.fromkeys(["absolute", *arguments.encodings]):
        arms |= added_parts(model_config(encoding, seq, dropout), arrays)
    arms["A/A"] = added_parts(model_config("absolute", seq, dropout), arrays)["absolute"]
    if "deberta" in arguments.encodings:
        arms["mask decoder"] = mask_decoder(model_config("deberta", seq, dropout, emd=True), arrays)
    whole = {BASE: arm("absolute", "mlm", arrays, dropout)}
    rounds = -(-arguments.added // arguments.base_steps)  # before each whole step: what both are is of the same minute
    timed = []
    for number in range(arguments.base_steps):
        timed.append(time_rounds(arms, rounds, warm_up=1 + (number == 0)))
        timed[-1][BASE] = np.repeat(time_rounds(whole, 1, warm_up=int(number == 0))[BASE], rounds)
    return {name: np.concatenate([some[name] for some in timed]) for name in timed[0]}


def compare_added(rows: int, seq: int, dropout: float, arguments: argparse.Namespace) -> None:
    parts = time_added(full_rows(rows, seq), dropout, arguments)
    step, plain = parts[BASE], parts["absolute"]
    base = f"plain BERT {step.min():.2f} to {step.max():.2f} s a step"
    print(f"{rows} x {seq} tokens, dropout {dropout}: {base}; 1 + added work ÷ step [95 %]:")
    print_ratio("A/A", 1 + LAYERS * (parts["A/A"] - plain) / step)
    for encoding in arguments.encodings:
        attention, once = parts[encoding], parts.get(f"{encoding} once", np.zeros_like(step))
        extra = LAYERS * (attention - plain) + once
        if encoding != "absolute":
            print_ratio(encoding, 1 + extra / step, BOUNDS.get(seq, {}).get(encoding))
        if encoding == "deberta":
            print_ratio(WITH_DECODER, 1 + (extra + parts["mask decoder"]) / step)
        mth = LAYERS * (parts[f"{encoding} hcd"] - attention) + parts["tcd"]
        print_ratio(f"{encoding}: mth / mlm", 1 + mth / (step + extra), MTH_BOUND)


def compare_memory(rows: int, seq: int, dropout: float, arguments: argparse.Namespace) -> None:
    """Print the peak memory of two steps, each arm in a process of its own.

    On a CPU glibc is told to map every tensor apart and to give it back when it is freed, so that the process's peak is
    what its tensors hold at their most. In a heap they leave gaps, some per cent more or fewer from run to run.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**17)
    context = multiprocessing.get_context("spawn")
    print(f"{rows} x {seq} tokens, dropout {dropout}: peak memory of a process, MTH ÷ masked LM")
    for encoding in arguments.encodings:
        peaks = []
        for objective in ("mlm", "mth"):
            with context.Pool(1) as pool:
                peaks.append(pool.apply(peak_memory, (encoding, objective, rows, seq, dropout)))
        print(f"  {encoding:<12} {peaks[1] / peaks[0]:.4f}   ({peaks[0] / 2**20:.0f} MiB, bound 1.02)", flush=True)


def peak_memory(encoding: str, objective: str, rows: int, seq: int, dropout: float) -> int:
    """Return the bytes at the highest point of two steps: of the device on a GPU, of this process on a CPU."""
    run = arm(encoding, objective, full_rows(rows, seq), dropout)
    for _ in range(2):
        run()
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare_transformers(rows: int, seq: int, dropout: float, arguments: argparse.Namespace) -> None:
    ours = theirs = full_rows(rows, seq)
    fewer_rows = 1.0
    print(f"{rows} x {seq} tokens, dropout {dropout}; speed-up in non-padding tokens a second [95 %]:")
    if arguments.lengths:
        documents = make_rows(document_lengths(arguments.lengths, arguments.global_batch, seq), seq)
        packed = pack(documents, seq)
        fewer_rows = len(documents.input_ids) / len(packed.input_ids)
        theirs, ours = evenly(documents, rows), evenly(packed, rows)
        for name, whole, timed in (("theirs", documents, theirs), ("ours", packed, ours)):
            shares = [(side.document_ids > 0).mean() for side in (whole, timed)]
            print(f"  {name}: {len(whole.input_ids)} rows, {shares[0]:.1%} full; those timed {shares[1]:.1%}")
    bound = 2.5 if arguments.lengths else 1.7
    kinds = {"absolute": "bert", "deberta": "deberta"}
    for encoding in (name for name in arguments.encodings if name in kinds):
        kind = kinds[encoding]
        arms = {
            "theirs": step_apart(False, transformers_step, kind, theirs, dropout),
            "ours": step_apart(True, arm, encoding, "mlm", ours, dropout),
        }
        seconds = time_rounds(arms, arguments.pairs)
        ratio = median_interval(fewer_rows * seconds["theirs"] / seconds["ours"])
        state = "met" if ratio.low >= bound else "missed" if ratio.high < bound else "not resolved"
        print(f"  {kind:<10} {ratio}   {state} (bound {bound})", flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", default="8x512", help="rows x tokens")
    parser.add_argument("--pairs", type=int, default=100, help="rounds")
    parser.add_argument("--added", type=int, default=0, metavar="N", help="time the differing work N times instead")
    parser.add_argument("--base-steps", type=int, default=7, help="whole steps among --added")
    parser.add_argument("--memory", action="store_true", help="compare peak memory instead")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1], help="probabilities")
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), choices=ENCODINGS)
    parser.add_argument("--objectives", nargs="+", default=["mlm", "mth"], choices=["mlm", "mth"])
    parser.add_argument("--against", choices=["encodings", "transformers"], default="encodings")
    parser.add_argument("--lengths", metavar="P", help="take the documents' lengths from this dataset")
    parser.add_argument("--global-batch", type=int, default=1024, help="behind --lengths")
    arguments = parser.parse_args()
    rows, seq = (int(part) for part in arguments.shape.split("x"))
    print(f"torch {torch.__version__}, {DEVICE.type}, {torch.get_num_threads()} threads")
    compare = compare_encodings
    if arguments.against == "transformers":
        compare = compare_transformers
    elif arguments.memory or arguments.added:
        compare = compare_memory if arguments.memory else compare_added
    for dropout in arguments.dropout:
        compare(rows, seq, dropout, arguments)


if __name__ == "__main__":
    main()
