"""Settings of the data: datasets, their tokenizer and their split."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ddrp.config.option import flag, option, refuse


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    data_path: tuple[str, ...] | None = option(
        None,
        "prefix of the .bin/.idx pair that megatron-ddrp preprocess wrote; several prefixes are blended, each after "
        "its WEIGHT (any number above 0), or without weights as one corpus",
        nargs="+",
        metavar="[WEIGHT] P",
    )
    train_data_path: tuple[str, ...] | None = option(
        None, "the same for training only, instead of --data-path and --split", nargs="+", metavar="[WEIGHT] P"
    )
    valid_data_path: tuple[str, ...] | None = option(
        None, "the same for validation, with --train-data-path", nargs="+", metavar="[WEIGHT] P"
    )
    vocab_file: str | None = option(
        None, "WordPiece vocabulary, one piece per line (default: where the manifest of the data says)", metavar="FILE"
    )
    tokenizer_type: str | None = option(
        None,
        "the tokenizer the data were made with (default: as the manifest of the data says, else "
        "BertWordPieceLowerCase)",
        choices=("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePiece", "HuggingFace"),
    )
    tokenizer_model: str | None = option(
        None, "SentencePiece model or Hugging Face folder (default: as --vocab-file)", metavar="FILE"
    )
    split: str | None = option(
        None, "shares of the documents of --data-path for training, validation and test (default: 949,50,1)"
    )
    index_cache_dir: str | None = option(
        None,
        "folder for the sample indices and the counts of --notes (default: beside the data, or in memory if that "
        "folder is read-only)",
        metavar="DIR",
    )
    verify_data: bool = option(
        False,
        "before the first step, read every dataset in full and compare its files with the SHA-256 in its manifest",
    )
    packing: bool = option(
        False, "put several documents into one row, each attending only to itself: same losses, less padding"
    )

    def __post_init__(self) -> None:
        for name in ("data_path", "train_data_path", "valid_data_path"):
            words = getattr(self, name)
            if words is not None:  # a string for one prefix, a list from JSON and YAML
                object.__setattr__(self, name, (words,) if isinstance(words, str) else tuple(map(str, words)))
        separate = self.train_data_path is not None or self.valid_data_path is not None
        for name in ("data_path", "split"):
            if separate and getattr(self, name) is not None:
                given = flag("valid_data_path" if self.train_data_path is None else "train_data_path")
                refuse(
                    f"{given} and {flag(name)} exclude each other: give --data-path, which --split divides, or "
                    "--train-data-path and --valid-data-path, which are used in full"
                )
        if not separate and self.split is None:
            object.__setattr__(self, "split", "949,50,1")
