"""Settings of the files that a run reads and writes: data, checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ddrp.config.option import COUNT, POSITIVE, Section, flag, option, refuse


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
        "folder for the counts of --notes (default: beside the data, or in memory if that folder is read-only)",
        metavar="DIR",
    )
    verify_data: bool = option(
        False,
        "before the first step, read every dataset in full and compare its files with the SHA-256 in its manifest",
    )
    packing: bool = option(
        False, "put several documents into one row, each attending only to itself: same losses, less padding"
    )

    @property
    def names_data(self) -> bool:
        """True if a dataset is named."""
        return any(path is not None for path in (self.data_path, self.train_data_path, self.valid_data_path))

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


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """Checkpoints"""

    save: str | None = option(
        None, "folder for checkpoints, metrics.jsonl, config.json and the tokenizer", metavar="DIR"
    )
    load: str | None = option(
        None,
        "folder to resume from; if it has no checkpoint, the run starts afresh. DIR/iter_N with another --save starts "
        "a branch from that checkpoint",
        metavar="DIR",
    )
    save_interval: int = option(10_000, "steps between checkpoints; one is always written at the end", within=COUNT)
    keep_last: int = option(0, "number of checkpoints to keep; 0 = all", within="[0, 2147483648)")
    milestone_interval: int | None = option(
        None, "always keep the checkpoints of steps that are multiples of this", within=COUNT
    )
    exit_interval: int | None = option(
        None, "save and exit 0 at the first step that is a multiple of this", within=COUNT
    )
    exit_duration_in_mins: float | None = option(
        None,
        "save and exit 75 at the first step after this many minutes; the same command resumes",
        within="(0, 1000000]",
    )


@dataclass(frozen=True)
class LoggingConfig(Section):
    """Logging"""

    log_interval: int = option(
        100,
        "steps between rows of metrics.jsonl, whose losses are means over them; the terminal shows each row, and the "
        "numbers so far after 10 seconds without a line",
        within=COUNT,
    )
    eval_interval: int = option(
        1000, "steps between validations on the held-out split; 0 = never", within="[0, 2147483648)"
    )
    eval_iters: int = option(10, "global batches per validation", within="[0, 2147483648)")
    tensorboard_dir: str | None = option(None, "also write the metrics for TensorBoard", metavar="DIR")
    log_similarity: bool = option(
        False,
        "log at each validation the mean cosine between token representations, f(S), and between the heads of a layer, "
        "f(H) (eq. 15 and 16 of the paper)",
    )
    peak_tflops: float | None = option(
        None,
        "dense peak of a device in TFLOP/s, in the run's precision, to compute MFU, the share of the peak that is used "
        "(default: the maker's figure for known GPUs; otherwise no MFU is shown)",
        within=POSITIVE,
    )
    profile: bool = option(
        False,
        "write which operations some steps spend their time on: a table and a trace in profile/ of the --save folder",
    )
    profile_step_start: int | None = option(
        None, "the profile begins after this step (default: after 10 steps of this run)", within="[0, 2147483648)"
    )
    profile_step_end: int | None = option(
        None, "last step of the profile (default: the second after its begin)", within=COUNT
    )
    wandb_project: str | None = option(None, "also send the metrics to this Weights & Biases project", metavar="NAME")

    @property
    def validates(self) -> bool:
        """True if the run reads validation text."""
        return self.eval_interval > 0 and self.eval_iters > 0
