"""From the data flags to loaders: the one place where a configuration meets the data package."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ddrp.config import Config
from megatron_ddrp.data.indexed_dataset import IndexedDataset
from megatron_ddrp.data.loader import BatchLoader
from megatron_ddrp.data.masking import WholeWordMasker
from megatron_ddrp.data.samples import SampleIndex, check_tokenizer, split_documents
from megatron_ddrp.data.tokenizer import Tokenizer, build_tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the documents it cut up, by split."""

    tokenizer: Tokenizer
    dataset: IndexedDataset
    config: Config

    @classmethod
    def open(cls, config: Config) -> Corpus:
        """Open what `--data-path` and the tokenizer flags name, and check that they belong together."""
        if config.data.data_path is None:
            raise UserError(
                "--data-path is missing: give the prefix that tools/preprocess_data.py wrote", WRONG_ARGUMENTS
            )
        tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.vocab_file, config.data.tokenizer_model)
        check_tokenizer(config.data.data_path, tokenizer)
        dataset = IndexedDataset(config.data.data_path)
        if dataset.manifest is None:
            check_ids(dataset, tokenizer.vocab_size)
        return cls(tokenizer, dataset, config)

    def samples(self, split: str) -> SampleIndex:
        """The sequences of `train`, `valid` or `test`."""
        ranges = split_documents(self.dataset.num_documents, self.config.data.split)
        return SampleIndex(self.dataset, ranges[split], self.config.model.seq_length)

    def loader(self, split: str, rank: int, world_size: int) -> BatchLoader:
        """Masked micro-batches of a split for one data-parallel rank."""
        training, tokenizer = self.config.training, self.tokenizer
        masker = WholeWordMasker(
            tokenizer.word_starts,
            tokenizer.special_ids,
            tokenizer.mask_id,
            tokenizer.vocab_size,
            self.config.objective.mask_prob,
            training.seed,
            unk_id=tokenizer.unk_id,
        )
        return BatchLoader(
            self.samples(split),
            masker,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            pad_id=tokenizer.pad_id,
            seq_length=self.config.model.seq_length,
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size,
            rank=rank,
            world_size=world_size,
            seed=training.seed,
            packing=self.config.data.packing,
        )


def check_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Refuse a dataset that holds ids outside the vocabulary, before a run rather than in its midst.

    Only needed where no manifest ties the dataset to its tokenizer, such as beside Megatron's own files.
    """
    lowest, highest = dataset.id_range()
    if lowest < 0 or highest >= vocab_size:
        raise UserError(
            f"{dataset.prefix}: token ids from {lowest} to {highest}, but the vocabulary has {vocab_size} pieces; give "
            "the vocabulary that the dataset was preprocessed with, or preprocess again"
        )
