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

Whole steps spread by several per cent on shared cores, and what differs between encodings is one layer's attention and,
once a pass, the encoding itself. `--added N` times these N times interleaved, forward and backward, takes plain BERT's
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
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from arms import (
    DEVICE,
    LAYERS,
    added_parts,
    make_rows,
    mask_decoder,
    our_step,
    sampled_tcd,
    step_apart,
    transformers_step,
)
from measure import median_interval, time_rounds, verdict

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.packing import join_samples, pack_rows
from megatron_ddrp.data.batches.samples import SampleIndex
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset

BASE = "absolute mlm"
WITH_DECODER = "deberta mlm, mask decoder on"
BOUNDS = {
    512: {"ddrp mlm": 1.06, "bert-r mlm": 1.06, "tupe-a mlm": 1.08, "tupe-r mlm": 1.08, "deberta mlm": 1.15},
    128: {"ddrp mlm": 1.04, "bert-r mlm": 1.04, "tupe-a mlm": 1.08, "tupe-r mlm": 1.08, "deberta mlm": 1.15},
}


def pack(samples: Batch, seq: int) -> Batch:
    """The same documents, several in a row."""
    lengths = samples.document_ids.sum(-1)
    rows = pack_rows(lengths, seq)
    order = np.concatenate([np.asarray(row) for row in rows])
    documents = np.array([len(row) for row in rows])
    return join_samples(samples.map(lambda array: array[order]), documents, seq, pad_id=0)


def document_lengths(prefix: str, count: int, seq: int) -> np.ndarray:
    """Lengths of `count` sequences of a dataset, evenly spaced over it."""
    dataset = IndexedDataset(prefix)
    samples = SampleIndex(dataset, (0, dataset.num_documents), seq)
    return samples.lengths(np.linspace(0, len(samples) - 1, count).astype(np.int64))


def evenly(batch: Batch, rows: int) -> Batch:
    """Some rows of a batch: the middle one of each of as many equal parts."""
    return batch.map(lambda array: array[(2 * np.arange(rows) + 1) * len(array) // (2 * rows)])


def compare_encodings(rows: int, seq: int, dropout: float, arguments: argparse.Namespace) -> None:
    arrays = make_rows(np.full(rows, seq), seq)
    arms = {BASE: our_step("absolute", "mlm", arrays, dropout), "A/A": our_step("absolute", "mlm", arrays, dropout)}
    for encoding in arguments.encodings:
        for objective in arguments.objectives:
            arms.setdefault(f"{encoding} {objective}", our_step(encoding, objective, arrays, dropout))
    if "deberta" in arguments.encodings:
        arms[WITH_DECODER] = our_step("deberta", "mlm", arrays, dropout, emd=True)
    seconds = time_rounds(arms, arguments.pairs, warm_up=1)
    print(
        f"{rows} x {seq} tokens, dropout {dropout}: plain BERT {np.median(seconds[BASE]):.3f} s a step; ratios [95 %]:"
    )
    for name, values in seconds.items():
        if name == BASE:
            continue
        ratio = median_interval(values / seconds[BASE])
        bound = BOUNDS.get(seq, {}).get(name)
        print(f"  {name:<30} {ratio}   {verdict(ratio, bound) if bound else ''}")
    for encoding in arguments.encodings:
        if {f"{encoding} mlm", f"{encoding} mth"} <= seconds.keys():
            ratio = median_interval(seconds[f"{encoding} mth"] / seconds[f"{encoding} mlm"])
            print(f"  {encoding + ': mth / mlm':<30} {ratio}   {verdict(ratio, 1.02)}")


def compare_added(rows: int, seq: int, dropout: float, arguments: argparse.Namespace) -> None:
    arrays = make_rows(np.full(rows, seq), seq)
    arms = {"A/A": added_parts("absolute", arrays, dropout)["absolute"], "tcd": sampled_tcd(arrays)}
    for encoding in dict.fromkeys(["absolute", *arguments.encodings]):
        arms |= added_parts(encoding, arrays, dropout)
    if "deberta" in arguments.encodings:
        arms["mask decoder"] = mask_decoder(arrays, dropout)
    whole = {BASE: our_step("absolute", "mlm", arrays, dropout)}
    rounds = -(-arguments.added // arguments.base_steps)  # before each whole step: what both are is of the same minute
    timed = []
    for number in range(arguments.base_steps):
        timed.append(time_rounds(arms, rounds, warm_up=1 + (number == 0)))
        timed[-1][BASE] = np.repeat(time_rounds(whole, 1, warm_up=int(number == 0))[BASE], rounds)
    parts = {name: np.concatenate([some[name] for some in timed]) for name in timed[0]}
    step = parts[BASE]
    base = f"plain BERT {step.min():.2f} to {step.max():.2f} s a step"
    print(f"{rows} x {seq} tokens, dropout {dropout}: {base}; 1 + added work ÷ step [95 %]:")
    plain = parts["absolute"]
    print(f"  {'A/A':<30} {median_interval(1 + LAYERS * (parts['A/A'] - plain) / step)}")
    for encoding in arguments.encodings:
        attention, once = parts[encoding], parts.get(f"{encoding} once", np.zeros_like(step))
        extra = LAYERS * (attention - plain) + once
        if encoding != "absolute":
            ratio, bound = median_interval(1 + extra / step), BOUNDS.get(seq, {}).get(f"{encoding} mlm")
            print(f"  {encoding:<30} {ratio}   {verdict(ratio, bound) if bound else ''}")
        if encoding == "deberta":
            print(f"  {WITH_DECODER:<30} {median_interval(1 + (extra + parts['mask decoder']) / step)}")
        mth = LAYERS * (parts[f"{encoding} hcd"] - attention) + parts["tcd"]
        ratio = median_interval(1 + mth / (step + extra))
        print(f"  {encoding + ': mth / mlm':<30} {ratio}   {verdict(ratio, 1.02)}", flush=True)


def compare_memory(rows: int, seq: int, dropout: float, arguments: argparse.Namespace) -> None:
    """Peak memory of two steps, each arm in a process of its own.

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
    """Bytes at the highest point of two steps: of the device on a GPU, of this process on a CPU."""
    run = our_step(encoding, objective, make_rows(np.full(rows, seq), seq), dropout)
    for _ in range(2):
        run()
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare_transformers(rows: int, seq: int, dropout: float, arguments: argparse.Namespace) -> None:
    ours = theirs = make_rows(np.full(rows, seq), seq)
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
            "ours": step_apart(True, our_step, encoding, "mlm", ours, dropout),
        }
        seconds = time_rounds(arms, arguments.pairs)
        ratio = median_interval(fewer_rows * seconds["theirs"] / seconds["ours"])
        state = "met" if ratio.low >= bound else "missed" if ratio.high < bound else "not resolved"
        print(f"  {kind:<10} {ratio}   {state} (bound {bound})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8x512", help="rows x tokens (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=100, help="rounds (default: %(default)s)")
    parser.add_argument("--added", type=int, default=0, metavar="N", help="time the differing work N times instead")
    parser.add_argument("--base-steps", type=int, default=7, help="whole steps among --added (default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="compare peak memory instead")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1], help="(default: %(default)s)")
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), choices=ENCODINGS)
    parser.add_argument("--objectives", nargs="+", default=["mlm", "mth"], choices=["mlm", "mth"])
    parser.add_argument("--against", choices=["encodings", "transformers"], default="encodings")
    parser.add_argument("--lengths", metavar="P", help="take the documents' lengths from this dataset")
    parser.add_argument("--global-batch", type=int, default=1024, help="behind --lengths (default: %(default)s)")
    arguments = parser.parse_args()
    rows, seq = (int(part) for part in arguments.shape.split("x"))
    print(f"torch {torch.__version__}, {DEVICE.type}, {torch.get_num_threads()} threads")
    for dropout in arguments.dropout:
        compare = compare_encodings
        if arguments.against == "transformers":
            compare = compare_transformers
        elif arguments.memory or arguments.added:
            compare = compare_memory if arguments.memory else compare_added
        compare(rows, seq, dropout, arguments)


if __name__ == "__main__":
    main()
