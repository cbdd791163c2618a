"""Settings of the objective, and of the files that a run reads and writes: data, checkpoints and logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.config.model import ModelConfig
from megatron_ddrp.config.reading import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    Number,
    Section,
    as_tuple,
    as_words,
    flag,
    option,
    own_numbers,
    refuse,
)
from megatron_ddrp.config.registry import MASKINGS, OBJECTIVES
from megatron_ddrp.config.training import MaskRates, read_rates


@dataclass(frozen=True)
class ObjectiveConfig(Section):
    """Objective"""

    objective: str = option(
        "mth",
        "mlm: masked LM; mth: masked LM + TCD + HCD, the paper's; electra: a generator's masked LM + replaced-token "
        "detection by the model itself; token-contrast: masked LM + SimCTG's contrast of tokens; rtd: DeBERTaV3's "
        "replaced-token detection, whose gradient does not reach the generator's embedding; head-disagreement: masked "
        "LM + the disagreement of all heads of a layer",
        choices=OBJECTIVES,
    )
    objective_options: tuple[str, ...] = option(
        (),
        "the objective's own numbers, such as margin=0.5 (default: those that the objective declares)",
        nargs="+",
        metavar="NAME=NUMBER",
    )
    objective_phases: str | None = option(
        None,
        "another objective first: with clm:0.7 the first 70 % of the steps train causal language modelling, where each "
        "token attends to itself and those before it and predicts the next one, without TCD and HCD, and the rest "
        "--objective (arXiv:2507.00994, arXiv:2605.12438); clm:1 trains by clm alone. Validation always measures "
        "--objective (default: one phase)",
        metavar="NAME:END",
    )
    tcd_weight: float | None = option(
        None,
        "factor of TCD, the mean cosine between token representations, in the loss; alpha_1 in the paper's total loss "
        "L = L_MLM + alpha_1 L_TCD + alpha_2 L_HCD (eq. 19) (default: 1.0 under mth, else 0)",
        within=NOT_NEGATIVE,
    )
    hcd_weight: float | None = option(
        None,
        "factor of HCD, the mean cosine between the attention logits of heads, in the loss; alpha_2 in the paper "
        "(default: 0.01 under mth, else 0)",
        within=NOT_NEGATIVE,
    )
    tcd_tokens: int = option(
        50,
        "tokens that TCD samples per sequence (n' in the paper); 0 = all tokens, in closed form",
        within="[0, 2147483648)",
    )
    tcd_squared: bool = option(
        False,
        "TCD is the mean squared cosine, which two opposite poles of tokens do not lower, as they do the mean cosine "
        "(ours)",
    )
    hcd_heads: int = option(
        2,
        "heads that HCD samples per layer and step (m' in the paper); 0 = all heads, in closed form",
        within="[0, 2147483648)",
    )
    mask_prob: str | float = option(
        0.15,
        "share of the tokens of a sequence that training predicts; START:END changes the share in equal steps over "
        "--train-iters: 0.3:0.15 gained 0.46 points of GLUE over a constant 0.15 at the base size (arXiv:2305.15096; "
        "GPT-BERT, arXiv:2410.24159), ModernBERT keeps 0.3 (arXiv:2412.13663)",
        within="(0, 1)",
        read=read_rates,
        metavar="X[:Y]",
    )
    eval_mask_prob: float = option(
        0.15,
        "the same for validation, independent of --mask-prob, so that runs with different rates can be compared",
        within="(0, 1)",
    )
    masking: str = option(
        "whole-word",
        "unit of masking: whole words, single tokens, or n-grams of up to three words with p(n) proportional to 1/n",
        choices=MASKINGS,
    )
    rtd_weight: float | None = option(
        None, "factor of replaced-token detection in the loss (default: 50; under rtd 10)", within=NOT_NEGATIVE
    )
    generator_size: float = option(
        1 / 3,
        "heads of ELECTRA's generator as a share of the model's heads, rounded; its width follows (default: a third)",
        within="(0, 1]",
    )
    notes: bool = option(
        False, "Taking Notes on the Fly (arXiv:2008.01466): blend notes of past contexts into the input at rare words"
    )
    notes_min_count: int = option(100, "fewest occurrences of a rare word in the training text", within=COUNT)
    notes_max_count: int = option(500, "most occurrences of a rare word in the training text", within=COUNT)
    notes_window: int = option(
        16,
        "tokens on either side of a rare word whose hidden states make its note (k in the paper)",
        within="[0, 2147483648)",
    )
    notes_decay: float = option(
        0.1, "share of the new note when a word occurs again (gamma in the paper)", within="[0, 1]"
    )
    notes_mix: float = option(
        0.5, "share of the note in the input (lambda in the paper); 0 = plain training", within="[0, 1]"
    )
    notes_dtype: str = option("fp32", "type of the dictionary's rows in host memory", choices=("fp32", "bf16", "fp16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mask_prob", self.mask_rates.written)  # equal rates are stored alike
        object.__setattr__(self, "objective_options", as_tuple(self.objective_options))
        chosen = self.chosen
        for name in ("tcd_weight", "hcd_weight", "rtd_weight"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(chosen, name))
        numbers = self.numbers(chosen.options)  # stored with the defaults, so that a changed default shows
        object.__setattr__(self, "objective_options", as_words(numbers))
        self._check_phases()
        for name in ("tcd_tokens", "hcd_heads"):
            if getattr(self, name) == 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: a cosine needs two; give 2 or more, or 0 for all")
        if self.notes_min_count > self.notes_max_count:
            refuse(
                f"--notes-min-count {self.notes_min_count} is above --notes-max-count {self.notes_max_count}: give a "
                "smaller one, or a larger --notes-max-count"
            )

    def _check_phases(self) -> None:
        """Refuse what no causal phase can precede."""
        given = f"--objective-phases {self.objective_phases}"
        if self.causal_share and self.generates:
            refuse(
                f"{given} with --objective {self.objective}: the model that is trained has no head that predicts "
                "pieces, only its generator has; use another objective"
            )
        if self.causal_share and self.notes:
            refuse(f"{given} with --notes: notes hold words to the right, which clm must not see; leave one out")

    @property
    def causal_share(self) -> float:
        """Share of all steps after which the causal phase ends; 0 without one. Raises `UserError`."""
        if self.objective_phases is None:
            return 0.0
        name, _, end = self.objective_phases.partition(":")
        try:
            share = float(end)
        except ValueError:
            share = 0.0
        if name != "clm" or not 0 < share <= 1:
            refuse(
                f"--objective-phases {self.objective_phases}: expected clm:END with END in (0, 1], such as clm:0.7 for "
                "the first 70 % of the steps"
            )
        return share

    def causal_steps(self, total_steps: int) -> int:
        """Return the number of steps of the causal phase in a run of `total_steps`."""
        return round(self.causal_share * total_steps)

    @property
    def chosen(self) -> Any:
        """Class of the objective, an `Objective`. Raises `NotRegistered` for an unknown name."""
        return OBJECTIVES.find(self.objective)

    @property
    def mask_rates(self) -> MaskRates:
        """Masking rate of training at every step."""
        return MaskRates.parse(self.mask_prob)

    @property
    def generates(self) -> bool:
        """True if a generator replaces tokens and the model itself detects them (ELECTRA)."""
        return bool(self.chosen.generates)

    def generator_config(self, model: ModelConfig) -> ModelConfig | None:
        """Return the sizes of the generator trained beside a model; None without one."""
        return self.chosen(self).generator_config(model)

    @property
    def mask_shares(self) -> dict[str, float]:
        """Shares of the selected pieces that become [MASK] and a random piece, as arguments of a `Masker`."""
        return {"mask_share": self.chosen.mask_share, "random_share": self.chosen.random_share}

    def numbers(self, declared: Mapping[str, Number]) -> dict[str, float]:
        """Return the numbers that an objective declares, with `--objective-options` in place of their defaults."""
        return own_numbers(f"--objective {self.objective}", "objective_options", self.objective_options, declared)

    @property
    def notes_share(self) -> float:
        """Share λ of the note in the input; 0 without `--notes`."""
        return self.notes_mix if self.notes else 0.0


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
    other_data_path: tuple[str, ...] | None = option(
        None,
        "the same for text of another kind, whose losses (other_lm_loss, …) each validation logs beside its own",
        nargs="+",
        metavar="[WEIGHT] P",
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
        for name in ("data_path", "train_data_path", "valid_data_path", "other_data_path"):
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

    @property
    def folders(self) -> tuple[Path | None, Path | None]:
        """Paths of `save` and `load`."""
        return Path(self.save) if self.save else None, Path(self.load) if self.load else None


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
