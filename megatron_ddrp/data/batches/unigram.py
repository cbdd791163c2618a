"""Frequencies of pieces: the unigram level of a text, and whether the validation text is of the same kind as the rest.

The unigram level is the loss of a model that knows these frequencies and nothing else (`run/plateau.py`). `--split`
divides documents in order, so the validation text may be of another kind than the training text, or a part of it.
The shift of a text is how much worse, in nats per piece, the training text's piece frequencies predict it than its own
do: an estimate of the Kullback-Leibler divergence of the two unigram distributions. Stretches of the training text, as
long as the validation text, show which shift is usual: 0.01 for articles of an encyclopedia, 0.1 for a few novels.
Novels after an encyclopedia have 0.5.
"""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ddrp.data.batches.blend import Blend
from megatron_ddrp.data.batches.samples import SampleIndex
from megatron_ddrp.data.dataset.dataset_index import dataset_path
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.manifest import entry

MOST_TOKENS = 2_000_000
"""Number of tokens from which the unigram level is counted; it is lower by vocabulary / 4 M nats than that of all."""
LEVEL_ROW = 128
"""Row length of the samples that are counted, whatever `--seq-length` is: the level is one of the text."""
SAMPLES = 256
"""Number of samples read for each frequency; with 128 tokens each, the shift is known to about 0.02 nats."""
STRETCHES = 5
"""Number of stretches of the training text whose shift is measured."""
MIN_DOCUMENTS = 20
"""Fewest validation documents that can be of another kind: fewer than these differ by their topics."""
MIN_SHIFT, MIN_RATIO = 0.2, 2.0
"""Smallest shift that gives a line, in nats per piece and in units of the usual one."""
NAMED_INPUTS = 3
"""Number of input files that the line about shared ones names."""

Inputs = dict[tuple[str, Any], str]
"""SHA-256 and JSON key of input files → their names."""


def unigram_loss(samples: Blend, never_predicted: ArrayLike, seq_length: int) -> float:
    """Return the entropy in nats of the pieces of some samples, read in the shares in which training reads its corpora.

    The ids in `never_predicted` do not count. No sample is longer than `seq_length`. The samples are the same for every
    `--seed`, and are as many as have `MOST_TOKENS` tokens.
    """
    read: list[NDArray[Any]] = []
    step = max(1, MOST_TOKENS // seq_length)
    while sum(map(len, read)) < MOST_TOKENS and len(read) * step < len(samples):
        places = np.arange(len(read) * step, min((len(read) + 1) * step, len(samples)))
        read.append(np.concatenate(samples.tokens(samples.visits(places, 0)[1])))
    pieces, counts = np.unique(np.concatenate(read)[:MOST_TOKENS], return_counts=True)
    return entropy(counts[~np.isin(pieces, never_predicted)])


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy in nats of pieces that occur so often, `[pieces]`."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def split_remark(training: SampleIndex, validation: SampleIndex) -> str | None:
    """Return a line for the user if the validation part of a dataset is of another kind than its training part."""
    if min(len(training), validation.num_documents - validation.num_dropped_documents) < MIN_DOCUMENTS:
        return None
    shift = shift_of(validation, 0, len(validation), training)
    if shift < MIN_SHIFT or shift < MIN_RATIO * (usual := usual_shift(training, len(validation))):
        return None
    return (
        f"{training.prefix}: the validation text is of another kind than the training text (its piece frequencies are "
        f"off by {shift:.2f} nats per piece; {max(usual, 0):.2f} is usual within the training text), as --split "
        "divides documents in order: shuffle them by megatron-ddrp dataset shuffle, or blend one dataset per kind"
    )


def shared_remarks(training: Sequence[IndexedDataset], validation: Sequence[IndexedDataset]) -> list[str]:
    """Return a line for the user for each validation dataset that is trained on, under whatever name, or in part."""
    lines = []
    for dataset in dict.fromkeys(validation):
        for other in training:
            if told := _shared(other, dataset):
                lines.append(f"{dataset.prefix}: {told}: give other validation data, or --data-path with --split")
                break
    return lines


def _shared(training: IndexedDataset, validation: IndexedDataset) -> str:
    """Return what two datasets have in common; empty if it is nothing."""
    if training.prefix == validation.prefix:
        return "both training and validation data, so the validation loss is that of text trained on"
    if _is_copy(training, validation):
        return f"the same data as {training.prefix}, so the validation loss is that of text trained on"
    if common := _in_common(_inputs(validation), _inputs(training), training.prefix):
        return f"{common}, so the validation loss is partly that of text trained on"
    return ""


def overlap_remarks(datasets: Sequence[IndexedDataset]) -> list[str]:
    """Return a line for each two datasets of one split that have input files in common.

    Copies are no fault: the split divides them at the same documents.
    """
    inputs = {each.prefix: _inputs(each) for each in datasets}
    return [
        f"{one.prefix}: {common}, and --split divides each on its own, so the validation text of one is partly trained "
        "on in the other: give each file to one dataset alone"
        for one, other in combinations(datasets, 2)
        if (common := _in_common(inputs[one.prefix], inputs[other.prefix], other.prefix)) and not _is_copy(one, other)
    ]


def _in_common(inputs: Inputs, others: Inputs, prefix: str) -> str:
    """Return how many input files are also among the `others` of the dataset `prefix`, in words; empty if none is."""
    both = [name for text, name in inputs.items() if text in others]
    some = ", ".join(both[:NAMED_INPUTS]) + ", …" * (len(both) > NAMED_INPUTS)
    verb = "are" if len(both) > 1 else "is"
    return f"{len(both)} of its {len(inputs)} input files ({some}) {verb} also in {prefix}" if both else ""


def _is_copy(one: IndexedDataset, other: IndexedDataset) -> bool:
    """Return whether two datasets have equal tokens: by the SHA-256 in both manifests, else by comparing the files."""
    files = [(dataset_path(one.prefix, suffix), dataset_path(other.prefix, suffix)) for suffix in (".idx", ".bin")]
    if any(first.samefile(second) for first, second in files):
        return True
    sums = [entry(entry(dataset.manifest, "files"), "bin").get("sha256") for dataset in (one, other)]
    if None not in sums:
        return sums[0] == sums[1]
    return all(filecmp.cmp(first, second, shallow=False) for first, second in files)


def _inputs(dataset: IndexedDataset) -> Inputs:
    """Return the input files of a dataset that hold text, by the manifest."""
    manifest = dataset.manifest or {}
    return {
        (file["sha256"], manifest.get("json_key")): file.get("name", "")
        for file in manifest.get("inputs") or ()
        if file.get("bytes") and isinstance(file.get("sha256"), str)
    }


def usual_shift(training: SampleIndex, length: int) -> float:
    """Return the median shift of stretches of the training text, each of `length` samples if there are enough."""
    length = min(length, len(training) // STRETCHES)
    begins = np.linspace(0, len(training) - length, STRETCHES).astype(int).tolist()
    return float(np.median([shift_of(training, begin, begin + length, training) for begin in begins]))


def shift_of(text: SampleIndex, begin: int, end: int, training: SampleIndex) -> float:
    """Return the shift of the samples `[begin, end)` of `text` from those of `training`, in nats per piece.

    If `text` is `training` itself, from those outside `[begin, end)`.
    """
    places = _spread(begin, end, 2 * SAMPLES)
    others = _spread(0, len(training), SAMPLES)
    if text is training:
        others = others[(others < begin) | (others >= end)]
    read = text.tokens(places[1::2]), text.tokens(places[::2]), training.tokens(others)
    return unigram_shift(*map(np.concatenate, read))


def unigram_shift(predicted: NDArray[np.int64], own: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Return how much worse piece frequencies of `other` predict `predicted` than those of `own` do, in nats per piece.

    All are ids of pieces, `[n]` each. A frequency is a count plus one. The longer of `own` and `other` is thinned
    first, so that both know equally many pieces.
    """
    shorter = min(len(own), len(other))
    own, other = (ids[_spread(0, len(ids), shorter)] for ids in (own, other))
    # Numbered anew, because an id of a damaged file may be anything.
    pieces, numbers = np.unique(np.concatenate([predicted, own, other]), return_inverse=True)
    predicted, own, other = np.split(numbers, [len(predicted), len(predicted) + shorter])
    own_counts, other_counts = (np.bincount(ids, minlength=len(pieces)) for ids in (own, other))  # [pieces] each
    return float(np.log((own_counts + 1) / (other_counts + 1))[predicted].mean())


def _spread(begin: int, end: int, count: int) -> NDArray[np.int64]:
    """Return at most `count` integers in `[begin, end)`, evenly spread."""
    return begin + np.arange(min(count, end - begin)) * (end - begin) // min(count, end - begin)
