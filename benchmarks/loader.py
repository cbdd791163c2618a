"""Speed of the loader on one core, in masked micro-batches, and of building an index of very many documents.

    python benchmarks/loader.py --data-path P --vocab-file vocab.txt                                     # WordPiece
    python benchmarks/loader.py --data-path P --tokenizer-type SentencePiece --tokenizer-model spm.model
    python benchmarks/loader.py --index-documents 1e7 1e8        # an index in memory of log-normal document lengths

A step is what one rank makes: shuffle, read, mask, pack or pad, all fields of the batch, in one thread and without
torch. Tokens are those that are not padding; predicted ones are the masked 15 %. A figure is the median over the rounds
with a bootstrap 95 % interval; the rounds of all arms are interleaved. The bound is 1 million tokens per second. Flags
that this script does not have are those of pretrain_bert.py.
"""

from __future__ import annotations

import resource
import time

import numpy as np
from measure import benchmark_parser, median_interval, time_rounds

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config.registry import MASKINGS
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.loader import BatchLoader
from megatron_ddrp.data.batches.samples import SampleIndex, sample_totals
from megatron_ddrp.data.dataset.dataset_index import DatasetIndex, index_faults

BOUND = 1e6
SEQ_LENGTH = 512
"""Tokens of a sequence of the index."""
STEPS = 4
"""Global batches per round."""


def count_tokens(loader: BatchLoader) -> tuple[int, int]:
    """Return (tokens, predicted tokens) of the steps of a round."""
    batches = [batch for step in range(STEPS) for batch in loader.step(step * loader.global_batch_size)]
    tokens = sum(int((batch.document_ids > 0).sum()) for batch in batches)
    return tokens, sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)


def compare_loaders(words: list[str], rounds: int) -> None:
    """Print tokens per second of each masking, packed and one document per row, for flags of pretrain_bert.py."""
    sizes = ["--global-batch-size", "256", "--micro-batch-size", "32"]
    config = parse_arguments([*sizes, "--split", "1,0,0", *words]).config
    loaders = {}
    for masking in MASKINGS:
        for packing in (False, True):
            changed = config.replace(data={"packing": packing}, objective={"masking": masking})
            name = f"{masking}, {'packed' if packing else 'one document a row'}"
            corpus = Corpus.open(changed)
            loaders[name] = corpus.loader("train", 0, 1)

    def arm(loader: BatchLoader):
        return lambda: [loader.step(step * loader.global_batch_size) for step in range(STEPS)]

    seconds = time_rounds({name: arm(loader) for name, loader in loaders.items()}, rounds)
    rows = f"{corpus.tokenizer.tokenizer_type}, rows of {config.model.seq_length}"
    print(f"{rows}, one thread; million tokens a second [95 %]:")
    slowest = np.inf
    for name, loader in loaders.items():
        tokens, predicted = count_tokens(loader)
        rate = median_interval(tokens / seconds[name] / 1e6)
        slowest = min(slowest, rate.low)
        print(f"  {name:<32} {rate}   predicted: {rate.median * predicted / tokens:.2f}")
    print(f"{'met' if slowest * 1e6 >= BOUND else 'missed'} (bound {BOUND / 1e6} million tokens a second)")


class SyntheticIndex(DatasetIndex):
    """Index of one-sequence documents of so many uint16 tokens, int32 `[documents]`, in memory."""

    def __init__(self, sizes: np.ndarray):
        self.prefix, self.dtype, self.num_documents = "synthetic", np.dtype(np.uint16), len(sizes)
        self.sizes = sizes
        self.sample_totals: dict[int, np.ndarray] = {}
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
    start = time.perf_counter()
    totals = sample_totals(dataset, seq_length)  # type: ignore[arg-type]
    built = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    index = SampleIndex(dataset, (0, num_documents), seq_length)  # type: ignore[arg-type]
    chosen = random.integers(0, len(index), 256)
    start = time.perf_counter()
    for _ in range(20):
        index.lengths(chosen)
    found = (time.perf_counter() - start) / 20
    print(
        f"{num_documents:,} documents, {len(index):,} samples: built in {built:.2f} s, {totals.nbytes / 2**20:.1f} MiB "
        f"kept, {peak:.0f} MiB more at the peak; 256 samples found in {found * 1e3:.2f} ms"
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="rounds")
    parser.add_argument("--index-documents", type=float, nargs="+", default=[], metavar="N", help="build such an index")
    arguments, words = parser.parse_known_args()
    for count in arguments.index_documents:
        time_index(int(count), SEQ_LENGTH)
    if words:
        compare_loaders(words, arguments.rounds)


if __name__ == "__main__":
    main()
