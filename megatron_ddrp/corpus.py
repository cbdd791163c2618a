"""Corpus and loaders for a configuration: the one module that connects configuration and data package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from megatron_ddrp.config import Config
from megatron_ddrp.config.registry import MASKINGS
from megatron_ddrp.config.training import phase_at
from megatron_ddrp.data.batches.loader import (
    ROW_MULTIPLE,
    VALIDATION_SEED,
    BatchLoader,
    Blend,
    BlendWords,
    SampleReader,
    Share,
    read_blend,
    validation_text,
    whole_weights,
)
from megatron_ddrp.data.batches.masking import Masker, predict_next, predicted_pieces
from megatron_ddrp.data.batches.samples import NoSample, SampleIndex, dropped_text, sample_totals, split_documents
from megatron_ddrp.data.batches.word_counts import (
    LEVEL_ROW,
    RareWords,
    WordFinder,
    open_rare_words,
    overlap_remarks,
    shared_remarks,
    split_remark,
    split_shift,
    unigram_loss,
)
from megatron_ddrp.data.dataset.dataset_index import dataset_path
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, TokenizerFlags, complete, recorded_sum
from megatron_ddrp.data.dataset.verification import check_sums, open_dataset
from megatron_ddrp.data.progress import reading_progress
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import warn_of_unmarked_words, warn_of_vocabulary
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

SPLITS = {"train": "training", "valid": "validation", "other": "other-text", "test": "test"}
"""Split → its name in messages."""

MANY_EPOCHS = 100
"""Epochs above which a run says that it repeats its text. BERT read its own 40 times (Devlin et al. 2019, A.2)."""


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and its documents, by split."""

    tokenizer: Tokenizer
    config: Config
    """Configuration of the run, with the tokenizer of the datasets where the flags leave it out."""
    sources: dict[str, IndexedDataset]
    """Datasets by prefix, each opened once."""
    remarks: tuple[str, ...]
    """Lines for the user about opening the data."""
    keep_counts: bool = True
    """True if the word counts of `--notes` are kept on disk."""

    @classmethod
    def open(cls, config: Config, keep_counts: bool = True) -> Corpus:
        """Open the datasets and the tokenizer that the flags name, and check that they belong together.

        With `keep_counts` the counts of rare words are kept on disk under `--notes`; without it nothing is written.
        """
        data, objective, lengths = config.data, config.objective, [phase.seq_length for phase in config.phases]
        if data.data_path is data.train_data_path is data.valid_data_path is None:
            raise UserError(
                "--data-path is missing: give the prefix that megatron-ddrp preprocess wrote", WRONG_ARGUMENTS
            )
        prefixes = dataset_prefixes(config)
        config = with_tokenizer(config, prefixes)
        tokenizer = tokenizer_flags(config).build()
        words = objective.notes or MASKINGS.find(objective.masking).keeps_words
        sources, remarks = {}, warn_of_vocabulary(tokenizer)
        remarks += filter(None, [warn_of_unmarked_words(tokenizer)] if words else [])
        for prefix in prefixes:
            sources[prefix] = open_dataset(prefix, tokenizer)
            for length in lengths:
                sample_totals(sources[prefix], length)
        return cls(tokenizer, config, sources, tuple(dict.fromkeys(remarks)), keep_counts)

    def samples(self, split: str, seq_length: int | None = None) -> Blend:
        """Return the samples of `train`, `valid`, `other` or `test`; only `--data-path` has a test split.

        `seq_length` is the row length of a phase, by default the last step's; another one costs a look at all
        documents.
        """
        prefixes, weights = blend_words(self.config, split)
        seq_length = seq_length or self.config.last_phase.seq_length
        try:
            parts = [SampleIndex(self.sources[each], self._documents(each, split), seq_length) for each in prefixes]
        except NoSample as error:
            raise UserError(f"the {SPLITS[split]} split is empty: {error}; {self._remedy(split)}") from None
        return Blend(parts, weights)

    def _remedy(self, split: str) -> str:
        """Return what to do about a split without a sample."""
        remedies = ["preprocess more text"]
        if split == "other":
            remedies.append("leave --other-data-path out")
        elif self.config.data.split is not None:
            remedies.append(f"give it a larger share by --split (now {self.config.data.split})")
        if split == "valid":
            remedies.append("train without validation by --eval-interval 0")
        return ", or ".join(remedies)

    def _documents(self, prefix: str, split: str) -> tuple[int, int]:
        """Return the range of a dataset's documents that belong to a split."""
        num_documents = self.sources[prefix].num_documents
        if self.config.data.split is None or split == "other":
            return 0, num_documents
        return split_documents(num_documents, self.config.data.split)[split]

    @cached_property
    def contents(self) -> dict[str, str]:
        """Prefix of each dataset → its size and, if it has a manifest, the start of its SHA-256 there."""
        found = {}
        for prefix, dataset in self.sources.items():
            digest = recorded_sum(dataset.manifest, ".bin")
            size = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens"
            found[prefix] = f"{size}, SHA-256 {digest:.12}" if isinstance(digest, str) else size
        return found

    @property
    def description(self) -> dict[str, str]:
        """Name → tokenizer, and datasets of each split: what ranks must share, wherever their copies of it lie."""
        found = {"the tokenizer": self.tokenizer.fingerprint}
        for split in splits_of(self.config):
            prefixes, weights = blend_words(self.config, split)
            shares = [f"{count} x " for count in whole_weights(weights)] if weights else [""] * len(prefixes)
            texts = [self.sources[prefix].description for prefix in prefixes]
            found[f"the {SPLITS[split]} data"] = "; ".join(map("".join, zip(shares, texts, strict=True)))
        return found

    def changes(self, before: Mapping[str, str]) -> list[str]:
        """Return a line for each dataset whose content differs from that of `contents` of an earlier run.

        Where only one of the two has a manifest, the sizes decide.
        """
        return [
            f"data {prefix}: another content than at the checkpoint ({before[prefix]} → {content}), so samples may "
            "repeat, and validation text may have been trained on"
            for prefix, content in self.contents.items()
            if not (was := before.get(prefix, content)).startswith(content) and not content.startswith(was)
        ]

    def split_remarks(self) -> list[str]:
        """Return a line for each dataset whose validation text is also trained on, or by `--split` of another kind.

        This reads some samples of each; separate validation data are meant to be of another kind.
        """
        divided, training = self._divided, self._sources("train")
        lines = [line for parts in divided if (line := split_remark(*parts))]
        lines += overlap_remarks(training) if divided else []
        apart = [split for split in validated_splits(self.config) if split == "other" or not divided]
        return lines + shared_remarks(training, [source for split in apart for source in self._sources(split)])

    @property
    def validation_gap(self) -> float | None:
        """Largest `split_shift` of a dataset that `--split` divides; None if none is measured."""
        return max((shift for *_, shift in self._divided if shift is not None), default=None)

    def _sources(self, split: str) -> list[IndexedDataset]:
        """Return the datasets of a split, each once."""
        return [self.sources[prefix] for prefix in dict.fromkeys(blend_words(self.config, split).prefixes)]

    @cached_property
    def _divided(self) -> list[tuple[SampleIndex, SampleIndex, float | None]]:
        """Training part, validation part and `split_shift` of each dataset that `--split` divides; measured once.

        Empty if the run does not validate.
        """
        if self.config.data.data_path is None or not self.config.logging.validates:
            return []
        pairs = zip(self.samples("train").parts, self.samples("valid").parts, strict=True)
        return [(training, validation, split_shift(training, validation)) for training, validation in pairs]

    def loader(self, split: str, rank: int, world_size: int, rows_for: str = "cpu") -> BatchLoader:
        """Return the masked micro-batches of a split for one data-parallel rank; `rows_for` is in `ROW_MULTIPLE`.

        `--mask-prob`, the two kinds of phases and `--seed` apply only to the training split; the others are masked at
        `--eval-mask-prob`, in rows as long as those of the last step, by `VALIDATION_SEED`.
        """
        training, objective, tokenizer = self.config.training, self.config.objective, self.tokenizer
        seed = training.seed if split == "train" else VALIDATION_SEED
        masking = MASKINGS.find(objective.masking)()
        masker = Masker(tokenizer, objective.eval_mask_prob, seed, masking, **objective.mask_shares)
        mark = partial(WordFinder(tokenizer).number, self.rare_words[0]) if objective.notes else None
        last = self.config.last_phase
        phases = self.config.phases if split == "train" else (last,)
        readers = {
            length: SampleReader(self.samples(split, length), tokenizer, masker, length, mark, ROW_MULTIPLE[rows_for])
            for length in (phase.seq_length for phase in phases)
        }

        def reader_at(steps_done: int) -> SampleReader:
            reader = readers[phase_at(phases, steps_done, training.train_iters).seq_length]
            if split != "train":
                return reader
            if steps_done < objective.causal_steps(training.train_iters):
                return reader.masked_by(predict_next)
            return reader.masked_by(masker.at_rate(objective.mask_rates.at(steps_done, training.train_iters)))

        share = Share(training.global_batch_size, training.micro_batch_size, rank, world_size)
        return BatchLoader(readers[last.seq_length], share, seed, self.config.data.packing, reader_at)

    @cached_property
    def rare_words(self) -> tuple[RareWords, str]:
        """Rare words of the training text, for `--notes`, and a line about them; counted on first use."""
        prefixes, _ = blend_words(self.config, "train")
        parts = [(self.sources[prefix], self._documents(prefix, "train")) for prefix in prefixes]
        objective = self.config.objective
        bounds = (objective.notes_min_count, objective.notes_max_count)
        return open_rare_words(parts, self.tokenizer, bounds, self.config.data.index_cache_dir, self.keep_counts)

    @cached_property
    def unigram_loss(self) -> float:
        """Unigram level of the training text in nats (`run/metrics.py`)."""
        never_predicted = np.flatnonzero(~predicted_pieces(self.tokenizer))
        return unigram_loss(self.samples("train", LEVEL_ROW), never_predicted, LEVEL_ROW)

    def epochs(self, consumed: int) -> list[float]:
        """Return the epochs of each corpus of a blend in `consumed` samples; one number without weights.

        Each length phase has samples of its own length.
        """
        training, totals, begin = self.config.training, np.zeros(1), 0
        for phase in self.config.phases:
            samples = self.samples("train", phase.seq_length)
            end = min(consumed, phase.last_step(training.train_iters) * training.global_batch_size)
            totals = totals + (samples.count_visits(end) - samples.count_visits(begin)) / samples.sizes
            begin = end
        return totals.tolist()

    def summary(self, samples: Blend, consumed: int) -> str:
        """Return lines about the documents, sequences and epochs of a run over `consumed` samples, and its validation.

        A blend adds one line per corpus, and length phases one line per phase.
        """
        documents, epochs = sum(part.num_documents for part in samples.parts), self.epochs(consumed)
        line = f"{documents:,} documents, {len(samples):,} training sequences"
        lines = [f"{line}, blended:" if samples.counts else f"{line}, {epochs[0]:,.2f} epochs"]
        for part, count, of_part in zip(samples.parts, samples.counts or (), epochs, strict=False):
            lines.append(
                f"  {count / sum(samples.counts or ()):7.2%} {part.prefix}: {part.num_documents:,} documents, "
                f"{len(part):,} sequences, {of_part:,.2f} epochs"
            )
        ends = [(p.seq_length, p.last_step(self.config.training.train_iters)) for p in self.config.phases[:-1]]
        lines += [f"  rows of {length} tokens up to step {end:,}" for length, end in ends]
        if max(epochs) > MANY_EPOCHS:
            lines.append(f"  text is read more than {MANY_EPOCHS} times: lower --train-iters, or give more text")
        held_out = {split: self.samples(split) for split in validated_splits(self.config)}
        if dropped := dropped_text([*samples.parts, *(part for blend in held_out.values() for part in blend.parts)]):
            lines.append(f"  {dropped} and are not read")
        most, size = self.config.logging.eval_iters, self.config.training.global_batch_size
        lines += [f"  {SPLITS[split]}: {validation_text(most, blend, size)}" for split, blend in held_out.items()]
        return "\n".join(lines)


def tokenizer_flags(config: Config) -> TokenizerFlags:
    """Return the flags that name the tokenizer."""
    return TokenizerFlags.of(config.data)


def with_tokenizer(config: Config, prefixes: Sequence[str]) -> Config:
    """Return `config` with the flags of the tokenizer completed from the manifests of the datasets."""
    return config.replace(data=complete(tokenizer_flags(config), prefixes)._asdict())


def validated_splits(config: Config) -> list[str]:
    """Return the splits that validations read: `valid`, and `other` with `--other-data-path`; none without them."""
    other = ["other"] * (config.data.other_data_path is not None)
    return ["valid", *other] if config.logging.validates else []


def splits_of(config: Config) -> list[str]:
    """Return those of `train`, `valid` and `other` whose data the flags name and a run opens."""
    named = [split for split in ("train", "valid") if getattr(config.data, f"{split}_data_path") is not None]
    return (named if config.data.data_path is None else ["train", "valid"]) + validated_splits(config)[1:]


def dataset_prefixes(config: Config) -> list[str]:
    """Return the prefix of every dataset that a run opens, each once."""
    blends = [blend_words(config, split) for split in splits_of(config)]
    return list(dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes))


def verify_data(config: Config) -> tuple[str, ...]:
    """Compare every dataset with its manifest's SHA-256 under `--verify-data`; return a line for the log.

    Raises `UserError` for the first file that differs.
    """
    if not config.data.verify_data:
        return ()
    prefixes = dataset_prefixes(config)
    paths = [dataset_path(prefix, suffix) for prefix in prefixes for suffix in (".bin", ".idx")]
    with reading_progress([path for path in paths if path.is_file()], "verifying the data") as progress:
        for prefix in prefixes:
            check_sums(prefix, progress.update)
    return (f"data verified: {', '.join(prefixes)} as in the manifest{'s' * (len(prefixes) > 1)}",)


def blend_words(config: Config, split: str) -> BlendWords:
    """Return the datasets of a split and their weights."""
    if config.data.data_path is not None and split != "other":
        return read_blend(config.data.data_path, "--data-path")
    words = getattr(config.data, f"{split}_data_path", None)
    if words is None:
        instead = "; give it, or --eval-interval 0 to do without validation" if split == "valid" else ""
        raise UserError(f"--{split}-data-path is missing beside the other{instead}", WRONG_ARGUMENTS)
    return read_blend(words, f"--{split}-data-path")
