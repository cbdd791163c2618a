"""Settings of the output: checkpoints and logs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ddrp.config.option import COUNT, Section, option


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
        100, "steps between rows of metrics.jsonl and progress lines; losses are means over them", within=COUNT
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
        within="(0, inf)",
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
