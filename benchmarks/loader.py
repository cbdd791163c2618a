"""How fast the loader makes masked micro-batches on one core, and how fast an index of very many documents is built.

    python benchmarks/loader.py --data-path P --vocab-file vocab.txt                                     # WordPiece
    python benchmarks/loader.py --data-path P --tokenizer-type SentencePiece --tokenizer-model spm.model
    python benchmarks/loader.py --index-documents 1e7 1e8        # an index in memory of log-normal document lengths

A step is what one rank makes: shuffle, read, mask, pack or pad, all fields of the batch, in one thread and without
torch. Tokens are those that are not padding; predicted ones are the masked 15 %. A figure is the median over the rounds
with a bootstrap 95 % interval; the rounds of all arms are interleaved. The bound is 1 million tokens a second.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from measure import median_interval, time_rounds

from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.loader import BatchLoader
from megatron_ddrp.data.batches.masking import MASKINGS
from megatron_ddrp.data.batches.samples import SampleIndex, sample_totals
from megatron_ddrp.data.dataset.dataset_index import DatasetIndex
from megatron_ddrp.data.dataset.index_faults import index_faults

BOUND = 1e6
STEPS = 4
"""Global batches a round."""


def count_tokens(loader: BatchLoader) -> tuple[int, int]:
    """(tokens, predicted tokens) of the steps of a round."""
    batches = [batch for step in range(STEPS) for batch in loader.step(step * loader.global_batch_size)]
    tokens = sum(int((batch.document_ids > 0).sum()) for batch in batches)
    return tokens, sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)


def compare_loaders(arguments: argparse.Namespace) -> None:
    """Print tokens a second of each masking, packed and one document a row."""
    data = {
        "data_path": arguments.data_path,
        "tokenizer_type": arguments.tokenizer_type,
        "vocab_file": arguments.vocab_file,
        "tokenizer_model": arguments.tokenizer_model,
        "split": "1,0,0",
    }
    config = Config().replace(
        data=data,
        model={"seq_length": arguments.seq_length},
        training={"global_batch_size": arguments.global_batch_size, "micro_batch_size": arguments.micro_batch_size},
    )
    loaders = {}
    for masking in MASKINGS:
        for packing in (False, True):
            changed = config.replace(data={"packing": packing}, objective={"masking": masking})
            name = f"{masking}, {'packed' if packing else 'one document a row'}"
            loaders[name] = Corpus.open(changed, keep_indices=False).loader("train", 0, 1)

    def arm(loader: BatchLoader):
        return lambda: [loader.step(step * loader.global_batch_size) for step in range(STEPS)]

    seconds = time_rounds({name: arm(loader) for name, loader in loaders.items()}, arguments.rounds)
    print(f"{arguments.tokenizer_type}, rows of {arguments.seq_length}, one thread; million tokens a second [95 %]:")
    slowest = np.inf
    for name, loader in loaders.items():
        tokens, predicted = count_tokens(loader)
        rate = median_interval(tokens / seconds[name] / 1e6)
        slowest = min(slowest, rate.low)
        print(f"  {name:<32} {rate}   predicted: {rate.median * predicted / tokens:.2f}")
    print(f"{'met' if slowest * 1e6 >= BOUND else 'missed'} (bound {BOUND / 1e6} million tokens a second)")


class SyntheticIndex(DatasetIndex):
    """The index of one-sequence documents of so many uint16 tokens, int32 `[documents]`, in memory."""

    def __init__(self, sizes: np.ndarray):
        self.prefix, self.dtype, self.num_documents = "synthetic", np.dtype(np.uint16), len(sizes)
        self.sizes = sizes
        self.document_indices = np.arange(len(sizes) + 1)
        self.pointers = np.zeros(len(sizes), np.int64)  # bytes
        self.pointers[1:] = sizes[:-1]
        self.pointers *= self.dtype.itemsize
        np.cumsum(self.pointers, out=self.pointers)  # in place: a copy would hide the peak that is measured

    def check(self) -> None:
        assert not list(index_faults(self))


def time_index(num_documents: int, seq_length: int) -> None:
    """Print seconds and memory of the sample index of so many documents."""
    random, chunk = np.random.default_rng(0), 10**6
    sizes = np.empty(num_documents, np.int32)
    for begin in range(0, num_documents, chunk):
        sizes[begin : begin + chunk] = random.lognormal(5.3, 1.1, len(sizes[begin : begin + chunk]))
    dataset = SyntheticIndex(sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    totals = sample_totals(dataset, seq_length)  # type: ignore[arg-type]
    built = time.perf_counter() - begin
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    index = SampleIndex(dataset, (0, num_documents), seq_length, totals)  # type: ignore[arg-type]
    chosen = random.integers(0, len(index), 256)
    begin = time.perf_counter()
    for _ in range(20):
        index.lengths(chosen)
    found = (time.perf_counter() - begin) / 20
    print(
        f"{num_documents:,} documents, {len(index):,} samples: built in {built:.2f} s, {totals.nbytes / 2**20:.1f} MiB "
        f"kept, {peak:.0f} MiB more at the peak; 256 samples found in {found * 1e3:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", nargs="+", metavar="[WEIGHT] P", help="as of pretrain_bert.py")
    parser.add_argument("--tokenizer-type", default="BertWordPieceLowerCase", help="(default: %(default)s)")
    parser.add_argument("--vocab-file", metavar="FILE")
    parser.add_argument("--tokenizer-model", metavar="FILE")
    parser.add_argument("--seq-length", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--global-batch-size", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--index-documents", type=float, nargs="+", default=[], metavar="N")
    arguments = parser.parse_args()
    for count in arguments.index_documents:
        time_index(int(count), arguments.seq_length)
    if arguments.data_path:
        compare_loaders(arguments)


if __name__ == "__main__":
    main()
