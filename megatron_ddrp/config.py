"""Every setting of a run: one frozen dataclass a concern, from which command line, help and YAML are derived.

A field made by `option(...)` is a flag; its dataclass names the section of `--help` it stands in. Impossible pairs are
refused in `__post_init__` of the dataclass that owns them, or in `Config` where two concerns meet.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import UserError

VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this in every layout; the padding is never predicted and cut at export."""

POSITION_ENCODINGS = ("absolute", "bert-r", "tupe-a", "tupe-r", "deberta", "ddrp")
OBJECTIVES = ("mlm", "mth", "electra")


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is also a command-line flag; `choices` and `metavar` go to argparse."""
    return field(default=default, metadata={"help": help, **metadata})


def refuse(message: str) -> None:
    """Stop on an impossible setting: a wrong argument, exit code 2."""
    raise UserError(message, exit_code=2)


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    num_layers: int = option(12, "Transformer layers")
    hidden_size: int = option(768, "width of the hidden states")
    num_attention_heads: int = option(12, "attention heads a layer; must divide the hidden size")
    ffn_hidden_size: int | None = option(None, "width inside the feed-forward block (default: 4 x hidden size)")
    seq_length: int = option(512, "longest sequence in tokens, [CLS] and [SEP] included")
    hidden_dropout: float = option(0.1, "dropout on embeddings and on each block's output")
    attention_dropout: float = option(0.1, "dropout on attention probabilities")
    layernorm_position: str = option("post", "LayerNorm after each block (BERT) or before it", choices=("post", "pre"))
    layernorm_epsilon: float = option(1e-12, "added to the variance in every LayerNorm")
    init_method_std: float = option(0.02, "standard deviation of the normal initialisation")
    position_encoding: str = option(
        "ddrp",
        "how positions enter the model: absolute as in BERT, bert-r relative embeddings in the keys, tupe-a and tupe-r "
        "untied positions (TUPE), deberta disentangled attention, ddrp the paper's",
        choices=POSITION_ENCODINGS,
    )
    relative_distance: int = option(64, "r_s: relative distances from here on share one embedding")
    relative_table: str = option(
        "shared", "one relative table for all layers, or one a layer", choices=("shared", "per-layer")
    )
    deberta_emd: bool | None = option(
        None, "enhanced mask decoder: absolute positions join just before the head (default: on for deberta)"
    )
    attention_backend: str = option(
        "auto",
        "auto says at start what it chose; eager is the reference, blocked for CPUs, sdpa torch's fused attention, "
        "triton and flex for A100 and newer",
        choices=("auto", "eager", "blocked", "sdpa", "triton", "flex"),
    )
    vocab_size: int = 30522
    """Pieces of the tokenizer; the model rounds it up to `padded_vocab_size`."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "relative_distance"):
            if getattr(self, name) < 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if self.ffn_hidden_size is not None and self.ffn_hidden_size < 1:
            refuse(f"--ffn-hidden-size is {self.ffn_hidden_size}: it must be at least 1")
        if self.seq_length < 3:
            refuse(f"--seq-length is {self.seq_length}: it must hold [CLS], one token and [SEP], so at least 3")
        if self.hidden_size % self.num_attention_heads:
            refuse(
                f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                f"{self.num_attention_heads}: choose a hidden size that is a multiple of the heads"
            )
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: it must lie in [0, 1)")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True)
class ObjectiveConfig:
    """Objective"""

    objective: str = option(
        "mth",
        "mlm: masked LM; mth: masked LM + TCD + HCD (the paper's); electra: a generator's masked LM + replaced-token "
        "detection by the model proper",
        choices=OBJECTIVES,
    )
    tcd_weight: float | None = option(None, "alpha_1 of eq. 19 (default: 1.0 under mth, else 0)")
    hcd_weight: float | None = option(None, "alpha_2 of eq. 19 (default: 0.01 under mth, else 0)")
    tcd_tokens: int = option(50, "n': tokens that TCD samples a sequence; 0 = all of them, in closed form")
    hcd_heads: int = option(2, "m': heads that HCD samples a layer and step; 0 = all of them, in closed form")
    mask_prob: float = option(0.15, "share of the tokens of a sequence that is predicted")
    masking: str = option(
        "whole-word",
        "what is masked together: whole words, single tokens, or n-grams of up to three words, p(n) falling as 1/n",
        choices=("whole-word", "token", "ngram"),
    )
    rtd_weight: float = option(50.0, "factor of replaced-token detection in ELECTRA's loss")
    generator_size: float = option(1 / 3, "ELECTRA's generator: its share of the heads, rounded, and so of the width")
    notes: bool = option(False, "Taking Notes on the Fly: blend notes of past contexts into the input at rare words")
    notes_min_count: int = option(100, "a word that the training text holds at least this often can be rare")
    notes_max_count: int = option(500, "a word that it holds at most this often can be rare")
    notes_window: int = option(16, "k: tokens either side of a rare word whose states make its note")
    notes_decay: float = option(0.1, "gamma: share of the new note when a word is met again")
    notes_mix: float = option(0.5, "lambda: share of the note in the input; 0 is plain training")
    notes_dtype: str = option("fp32", "type of the dictionary's rows in host memory", choices=("fp32", "bf16", "fp16"))

    def __post_init__(self) -> None:
        default_tcd, default_hcd = (1.0, 0.01) if self.objective == "mth" else (0.0, 0.0)
        object.__setattr__(self, "tcd_weight", default_tcd if self.tcd_weight is None else self.tcd_weight)
        object.__setattr__(self, "hcd_weight", default_hcd if self.hcd_weight is None else self.hcd_weight)
        for name in ("tcd_tokens", "hcd_heads"):
            if getattr(self, name) < 0 or getattr(self, name) == 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: a cosine needs two; give 2 or more, or 0 for all")
        if not 0 < self.mask_prob < 1:
            refuse(f"--mask-prob is {self.mask_prob}: it must lie between 0 and 1")
        if not 0 < self.generator_size <= 1:
            refuse(f"--generator-size is {self.generator_size}: it must lie in (0, 1], the whole being the model's own")
        if not 1 <= self.notes_min_count <= self.notes_max_count:
            refuse(
                f"--notes-min-count {self.notes_min_count} and --notes-max-count {self.notes_max_count}: the one must "
                "be 1 or more, and the second no smaller"
            )
        for name in ("notes_decay", "notes_mix"):
            if not 0 <= getattr(self, name) <= 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: it must lie in [0, 1]")
        if self.notes_window < 0:
            refuse(f"--notes-window is {self.notes_window}: give tokens either side of the word, 0 or more")

    @property
    def generates(self) -> bool:
        """Whether a generator replaces tokens and the model proper detects them (ELECTRA)."""
        return self.objective == "electra"

    def generator_heads(self, num_attention_heads: int) -> int:
        """Heads of ELECTRA's generator: its share of the model's, rounded, halves to even, and at least one."""
        return max(1, round(num_attention_heads * self.generator_size))

    @property
    def mask_shares(self) -> dict[str, float]:
        """What becomes of the selected pieces: BERT's 80 % [MASK], 10 % random, 10 % kept; ELECTRA's 85, 0 and 15."""
        mask, random = (0.85, 0.0) if self.generates else (0.8, 0.1)
        return {"mask_share": mask, "random_share": random}

    @property
    def notes_share(self) -> float:
        """λ where notes are taken, else 0."""
        return self.notes_mix if self.notes else 0.0

    @property
    def weights(self) -> tuple[float, ...]:
        """Factors of the LM, TCD and HCD terms in the loss (eq. 19); under ELECTRA also that of RTD."""
        factors = (1.0, self.tcd_weight or 0.0, self.hcd_weight or 0.0)
        return (*factors, self.rtd_weight) if self.generates else factors


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    data_path: tuple[str, ...] | None = option(
        None,
        "prefix of the .bin/.idx pair that tools/preprocess_data.py wrote; several are blended: all with a WEIGHT in "
        "front (any number above 0), or none, which is all of them as one corpus",
        nargs="+",
        metavar="[WEIGHT] P",
    )
    train_data_path: tuple[str, ...] | None = option(
        None, "the same for training alone, instead of --data-path and --split", nargs="+", metavar="[WEIGHT] P"
    )
    valid_data_path: tuple[str, ...] | None = option(
        None, "the same for validation, beside --train-data-path", nargs="+", metavar="[WEIGHT] P"
    )
    vocab_file: str | None = option(None, "WordPiece vocabulary, one piece a line", metavar="FILE")
    tokenizer_type: str = option(
        "BertWordPieceLowerCase",
        "the tokenizer the data were made with",
        choices=("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePiece", "HuggingFace"),
    )
    tokenizer_model: str | None = option(None, "SentencePiece model or Hugging Face folder", metavar="FILE")
    split: str | None = option(
        None, "shares of the documents of --data-path for training, validation and test (default: 949,50,1)"
    )
    index_cache_dir: str | None = option(
        None,
        "folder for the sample indices (default: beside the data; in memory where that is read-only)",
        metavar="DIR",
    )
    packing: bool = option(
        False, "lay several documents into one row, each attending to itself alone: same losses, less padding"
    )

    def __post_init__(self) -> None:
        for name in ("data_path", "train_data_path", "valid_data_path"):
            words = getattr(self, name)
            if words is not None:  # one prefix may come as a string, lists from JSON and YAML
                object.__setattr__(self, name, (words,) if isinstance(words, str) else tuple(map(str, words)))
        separate = self.train_data_path is not None or self.valid_data_path is not None
        for name in ("data_path", "split"):
            if separate and getattr(self, name) is not None:
                given = flag("valid_data_path" if self.train_data_path is None else "train_data_path")
                refuse(
                    f"{given} and {flag(name)} exclude each other: give --data-path, which --split divides, or "
                    "--train-data-path and --valid-data-path, which are taken whole"
                )
        if not separate and self.split is None:
            object.__setattr__(self, "split", "949,50,1")


@dataclass(frozen=True)
class TrainingConfig:
    """Training"""

    micro_batch_size: int = option(8, "sequences a rank processes at once")
    global_batch_size: int = option(256, "sequences an optimizer step covers, over all ranks")
    train_iters: int = option(1_000_000, "optimizer steps of the whole run")
    seed: int = option(1234, "decides initialisation, order, masks, samples and dropout")
    bf16: bool = option(False, "train in bfloat16 with fp32 master weights")
    fp16: bool = option(False, "train in float16 with dynamic loss scaling")
    num_threads: int | None = option(None, "CPU threads a rank (default: torch's own choice)")
    max_skipped_steps: int = option(
        10, "stop after so many steps in a row whose loss or gradients were not finite; each of them changes nothing"
    )

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "global_batch_size", "train_iters", "max_skipped_steps"):
            if getattr(self, name) < 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if self.num_threads is not None and self.num_threads < 1:
            refuse(f"--num-threads is {self.num_threads}: it must be at least 1")
        if self.bf16 and self.fp16:
            refuse("--bf16 and --fp16 exclude each other: give one of them")

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer"""

    lr: float = option(1e-4, "peak learning rate")
    min_lr: float = option(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = option(
        "linear",
        "shape of the decay after the warm-up; wsd holds the peak and decays over the last tenth",
        choices=("linear", "cosine", "constant", "inverse-square-root", "wsd"),
    )
    lr_warmup_fraction: float = option(0.01, "share of --train-iters over which the rate rises linearly")
    weight_decay: float = option(0.01, "decoupled decay; not on biases and LayerNorms")
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.999, "decay of the second moment")
    adam_eps: float = option(1e-6, "added to the root of the second moment")
    clip_grad: float = option(1.0, "largest global gradient norm; 0 = no clipping")

    def __post_init__(self) -> None:
        if not 0 <= self.lr_warmup_fraction <= 1:
            refuse(f"--lr-warmup-fraction is {self.lr_warmup_fraction}: it must lie in [0, 1]")
        if self.min_lr > self.lr:
            refuse(f"--min-lr {self.min_lr} is above --lr {self.lr}: the decay goes down to it")


@dataclass(frozen=True)
class ParallelConfig:
    """Scale"""

    tensor_model_parallel_size: int = option(
        1, "ranks that share every layer, by attention heads, feed-forward width and vocabulary"
    )
    pipeline_model_parallel_size: int = option(1, "ranks that share the layers, each holding some of them whole")
    zero_stage: int = option(1, "what ZeRO shards: 1 optimizer, 2 + gradients, 3 + parameters", choices=(0, 1, 2, 3))
    deepspeed_config: str | None = option(
        None, "JSON whose settings are laid over the ones derived from the flags", metavar="FILE"
    )
    checkpoint_activations: bool = option(
        False, "recompute each layer in the backward pass: less memory, a third slower"
    )
    distributed_timeout_minutes: float = option(10.0, "how long a rank waits for the others before it gives up")

    def __post_init__(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if getattr(self, name) < 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if self.pipeline_model_parallel_size > 1 and self.zero_stage > 1:
            refuse(
                f"--pipeline-model-parallel-size {self.pipeline_model_parallel_size} with --zero-stage "
                f"{self.zero_stage}: DeepSpeed's pipelines go with --zero-stage 0 or 1"
            )

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that hold the same weights, of so many in all; refuses what does not divide."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if world_size % (tensor * pipeline):
            refuse(
                f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} = "
                f"{tensor * pipeline} does not divide the number of ranks, {world_size}: start a multiple of it, or "
                "choose sizes whose product divides them"
            )
        return world_size // (tensor * pipeline)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints"""

    save: str | None = option(
        None, "folder for checkpoints, metrics.jsonl, config.json and the tokenizer", metavar="DIR"
    )
    load: str | None = option(
        None, "folder to resume from; without a checkpoint in it the run starts afresh", metavar="DIR"
    )
    save_interval: int = option(10_000, "steps between checkpoints; one is always written at the end")
    keep_last: int = option(0, "how many checkpoints to keep; 0 = all")
    milestone_interval: int | None = option(None, "checkpoints of steps that this divides are kept for ever")
    exit_interval: int | None = option(None, "save and exit 0 at the first step that this divides")
    exit_duration_in_mins: float | None = option(
        None, "save and exit 75 at the first step after so many minutes; the same command goes on"
    )

    def __post_init__(self) -> None:
        for name in ("save_interval", "exit_interval", "milestone_interval"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                refuse(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if self.exit_duration_in_mins is not None and not self.exit_duration_in_mins > 0:
            refuse(f"--exit-duration-in-mins is {self.exit_duration_in_mins}: it must be above 0")
        if self.keep_last < 0:
            refuse(f"--keep-last is {self.keep_last}: give how many to keep, or 0 for all")


@dataclass(frozen=True)
class LoggingConfig:
    """Logging"""

    log_interval: int = option(100, "steps between rows of metrics.jsonl and progress lines")
    eval_interval: int = option(1000, "steps between validations on the held-out split; 0 = never")
    eval_iters: int = option(10, "global batches a validation covers")
    tensorboard_dir: str | None = option(None, "also write the metrics for TensorBoard", metavar="DIR")
    log_similarity: bool = option(
        False, "at each validation also f(S) and f(H) (eq. 15, 16): how alike the tokens are, and the heads of a layer"
    )
    wandb_project: str | None = option(None, "also send the metrics to this Weights & Biases project", metavar="NAME")

    def __post_init__(self) -> None:
        if self.log_interval < 1:
            refuse(f"--log-interval is {self.log_interval}: it must be at least 1")


@dataclass(frozen=True)
class Config:
    """All concerns of a run. `Config()` is the paper's base model and hyper-parameters (appendix A)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if self.training.precision != "fp32" and self.parallel.zero_stage == 0:
            refuse(
                f"--{self.training.precision} with --zero-stage 0 trains wrongly (DeepSpeed keeps no fp32 master "
                "weights there): use --zero-stage 1 or higher"
            )
        self._check_layout()
        if self.logging.log_similarity and self.model.num_attention_heads < 2:
            refuse("--log-similarity with --num-attention-heads 1: f(H) compares heads, so give 2 or more")
        if self.objective.hcd_heads > self.model.num_attention_heads and self.objective.hcd_weight:
            refuse(
                f"--hcd-heads {self.objective.hcd_heads} of --num-attention-heads {self.model.num_attention_heads}: "
                "give at most the heads there are, or 0 for all"
            )
        if self.objective.hcd_weight and self.model.num_attention_heads < 2:
            refuse("--num-attention-heads is 1: HCD compares heads, so give 2 or more, or --hcd-weight 0")

    def _check_layout(self) -> None:
        """Refuse to cut what does not divide."""
        tensor, pipeline = self.parallel.tensor_model_parallel_size, self.parallel.pipeline_model_parallel_size
        model = self.model
        generator_heads = (self.objective.generator_heads(model.num_attention_heads),) * self.objective.generates
        for what, size in (
            ("--num-attention-heads", model.num_attention_heads),
            *(("the heads of --objective electra's generator (--generator-size),", heads) for heads in generator_heads),
            ("--ffn-hidden-size", model.ffn_size),
            (f"the vocabulary, padded to a multiple of {VOCABULARY_MULTIPLE},", model.padded_vocab_size),
        ):
            if size % tensor:
                refuse(f"--tensor-model-parallel-size {tensor} does not divide {what} {size}: choose one that does")
        if pipeline > model.num_layers:
            refuse(
                f"--pipeline-model-parallel-size {pipeline} is more than --num-layers {model.num_layers}: each stage "
                "holds at least one layer"
            )

    def replace(self, **changes: dict[str, Any]) -> Config:
        """A copy with some fields of some concerns changed: `config.replace(model={"vocab_size": 100})`."""
        return dataclasses.replace(
            self, **{concern: dataclasses.replace(getattr(self, concern), **new) for concern, new in changes.items()}
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, dict[str, Any]]) -> Config:
        """The inverse of `to_dict`; keys of another version of the project are refused by name."""
        sections = {}
        for concern, section in concerns().items():
            given = values.get(concern, {})
            known = {f.name for f in dataclasses.fields(section)}
            unknown = sorted(set(given) - known)
            if unknown:
                raise UserError(
                    f"config.json holds the unknown {concern} setting {unknown[0]!r}: another version wrote it"
                )
            sections[concern] = section(**given)
        return cls(**sections)


def concerns() -> dict[str, Any]:
    """Name of each section of `Config` → its dataclass, in the order of `--help`."""
    return {f.name: f.default_factory for f in dataclasses.fields(Config)}


def flag(field_name: str) -> str:
    """`num_layers` → `--num-layers`."""
    return "--" + field_name.replace("_", "-")


def save_config(config: Config, folder: Path) -> None:
    """Write DIR/config.json, the resolved configuration."""
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / "config.json")


def load_config(folder: Path) -> Config:
    """Read DIR/config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path} not found: expected a folder that pretrain_bert.py --save wrote")
    return Config.from_dict(json.loads(path.read_text(encoding="utf-8")))
