"""The configuration of a run: all concerns in one dataclass, checks across concerns, and config.json."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ddrp.config.data import CheckpointConfig, DataConfig, LoggingConfig
from megatron_ddrp.config.model import VOCABULARY_MULTIPLE, ModelConfig
from megatron_ddrp.config.objective import ObjectiveConfig
from megatron_ddrp.config.option import refuse
from megatron_ddrp.config.registry import OBJECTIVES, OPTIMIZERS, objective_class
from megatron_ddrp.config.schedules import LengthPhase, parse_phases, phase_at
from megatron_ddrp.config.training import OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json


def with_generator_embeddings(objective: dict[str, Any]) -> dict[str, Any]:
    """Return a stored objective's settings with the source of ELECTRA's generator embeddings.

    Before the setting existed, the generator had its own.
    """
    return {"generator_embeddings": "own", **objective} if objective.get("objective") == "electra" else objective


@dataclass(frozen=True)
class Config:
    """Configuration of a run, by concern. `Config()` is the paper's base model and hyper-parameters (appendix A)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if self.training.fp16 and self.parallel.zero_stage == 0:
            refuse(
                "--fp16 with --zero-stage 0 trains wrongly (DeepSpeed keeps no fp32 master weights there): use "
                "--zero-stage 1 or higher, or --bf16"
            )
        self._check_layout()
        self._check_optimizer()
        self._check_schedules()
        if self.parallel.cuda_graphs == "on" and self.graphs_fault is not None:
            refuse(
                f"--cuda-graphs on with {self.graphs_fault}: no graph holds such layers; use --cuda-graphs auto or off"
            )
        if self.logging.profile and self.checkpoint.save is None:
            refuse("--profile writes into the --save folder: give --save DIR")
        if self.logging.log_similarity and self.model.num_attention_heads < 2:
            refuse("--log-similarity with --num-attention-heads 1: f(H) compares heads, so give 2 or more")
        if self.objective.notes and self.model.embedding_width != self.model.hidden_size:
            refuse(
                f"--notes with --embedding-size {self.model.embedding_size}: notes join the embeddings and are as "
                "wide as the hidden states, so leave --embedding-size out"
            )
        if self.objective.hcd_heads > self.model.num_attention_heads and self.objective.hcd_weight:
            refuse(
                f"--hcd-heads {self.objective.hcd_heads} of --num-attention-heads {self.model.num_attention_heads}: "
                "give at most the number of heads, or 0 for all"
            )
        if self.objective.hcd_weight and self.model.num_attention_heads < 2:
            refuse("--num-attention-heads is 1: HCD compares heads, so give 2 or more, or --hcd-weight 0")

    def _check_schedules(self) -> None:
        """Refuse a rotary base for an encoding without one, idle phases, and a decay that begins during the warm-up."""
        if any(phase.rope_theta for phase in self.phases) and self.model.position_encoding != "rope":
            refuse(
                f"--seq-length-phases {' '.join(self.training.seq_length_phases)} sets --rope-theta with "
                f"--position-encoding {self.model.position_encoding}, which has none: give LENGTH:END"
            )
        steps, optimizer = self.training.train_iters, self.optimizer
        ends = [phase.last_step(steps) for phase in self.phases[:-1]]
        for word, begin, end in zip(self.training.seq_length_phases, [0, *ends], ends, strict=False):
            if begin >= end:
                refuse(
                    f"--seq-length-phases {word} has no step: it begins after step {begin} and ends with step {end} of "
                    f"--train-iters {steps}; give a larger END, or leave the phase out"
                )
        warmup, decay = optimizer.warmup_steps(steps), optimizer.lr_wsd_decay_iters or 0
        if optimizer.lr_warmup_iters is not None and warmup > steps:
            refuse(f"--lr-warmup-iters {warmup} of --train-iters {steps}: the peak is never reached, so give fewer")
        end = optimizer.decay_steps(steps)
        if optimizer.lr_decay_iters is not None and warmup >= end:
            refuse(f"--lr-decay-iters {end}: the warm-up alone has {warmup} steps, so give more than those")
        if decay and warmup + decay > end:
            limit = "train" if optimizer.lr_decay_iters is None else "lr-decay"
            refuse(
                f"--lr-wsd-decay-iters {decay} and {warmup} steps of warm-up are more than --{limit}-iters {end}: give "
                "fewer; for a branch from step N, --train-iters is N + the decay"
            )

    def _check_layout(self) -> None:
        """Refuse a layout whose sizes do not divide the model."""
        model, pipeline = self.model, self.parallel.pipeline_model_parallel_size
        generator = self.objective.generator_config(model)
        self._check_cut("--num-attention-heads", model.num_attention_heads)
        self._check_cut("--ffn-hidden-size", model.ffn_size)
        if generator is not None:
            of_generator = f"of --objective {self.objective.objective}'s generator (--generator-size),"
            self._check_cut(f"the heads {of_generator}", generator.num_attention_heads)
            self._check_cut(f"the feed-forward width {of_generator}", generator.ffn_size)
        if pipeline > model.num_layers:
            refuse(
                f"--pipeline-model-parallel-size {pipeline} is more than --num-layers {model.num_layers}: each stage "
                "holds at least one layer"
            )

    def _check_cut(self, what: str, size: int) -> None:
        """Refuse a size of the model that tensor parallelism cannot cut into equal parts."""
        tensor = self.parallel.tensor_model_parallel_size
        if size % tensor:
            refuse(f"--tensor-model-parallel-size {tensor} does not divide {what} {size}: choose one that does")

    def with_vocabulary(self, vocab_size: int) -> Config:
        """Return the configuration with a tokenizer's vocabulary. Raises `UserError` if the layout does not divide it.

        The default vocabulary is not checked, because a command line is read before its tokenizer.
        """
        config = self.replace(model={"vocab_size": vocab_size})
        padded = config.model.padded_vocab_size
        self._check_cut(f"the vocabulary, padded to a multiple of {VOCABULARY_MULTIPLE},", padded)
        return config

    def _check_optimizer(self) -> None:
        name, stage = self.optimizer.optimizer, self.parallel.zero_stage
        if name not in OPTIMIZERS:  # settings of a run with a plug-in load without the plug-in
            return
        chosen = OPTIMIZERS.find(name)
        if stage not in chosen.zero_stages:
            refuse(
                f"--optimizer {name} with --zero-stage {stage}: it needs whole parameters, and ZeRO cuts them into "
                f"flat parts; use --zero-stage {' or '.join(map(str, chosen.zero_stages))}"
            )

    @property
    def graphs_fault(self) -> str | None:
        """Setting whose layers no CUDA graph can hold, as on a command line; None if there is none."""
        parallel, objective = self.parallel, self.objective
        tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        # Settings of a run with a plug-in load without the plug-in.
        made = objective_class(objective.objective)(objective) if objective.objective in OBJECTIVES else None
        settings = {
            f"--tensor-model-parallel-size {tensor}": tensor > 1,
            f"--pipeline-model-parallel-size {stages}": stages > 1,
            "--checkpoint-activations": parallel.checkpoint_activations,
            f"--objective {objective.objective}": made is not None and made.looks_inside,
            "--zero-stage 3": parallel.zero_stage == 3,  # last: memory.py asks for the other stages
        }
        return next((setting for setting, is_given in settings.items() if is_given), None)

    @property
    def phases(self) -> tuple[LengthPhase, ...]:
        """Parts of the run by row length; one part without `--seq-length-phases`."""
        return parse_phases(self.training.seq_length_phases, self.model.seq_length)

    @property
    def mean_seq_length(self) -> float:
        """Mean row length over all steps of the run."""
        begins = [0.0, *(phase.share for phase in self.phases)]
        return sum((phase.share - begin) * phase.seq_length for phase, begin in zip(self.phases, begins, strict=False))

    def of_phase(self, phase: LengthPhase) -> Config:
        """Return the configuration of a run that consists of this phase only."""
        theta = phase.rope_theta or self.model.rope_theta
        model = {"seq_length": phase.seq_length, "rope_theta": theta}
        return self.replace(model=model, training={"seq_length_phases": ()})

    def rope_theta_at(self, steps_done: int) -> float:
        """Return the base of the rotary wavelengths in the step that follows `steps_done` steps."""
        return phase_at(self.phases, steps_done, self.training.train_iters).rope_theta or self.model.rope_theta

    def replace(self, **changes: dict[str, Any]) -> Config:
        """Return a copy with some fields of some concerns changed: `config.replace(model={"vocab_size": 100})`."""
        return dataclasses.replace(
            self, **{concern: dataclasses.replace(getattr(self, concern), **new) for concern, new in changes.items()}
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, dict[str, Any]]) -> Config:
        """Return the configuration that `to_dict` wrote. Missing settings get their defaults.

        Raises `UserError` for an unknown section or setting, by name, and for a value of a wrong type.
        """
        sections = {}
        if not isinstance(values, dict) or not all(isinstance(given, dict) for given in values.values()):
            raise UserError(f"the configuration is not an object with the sections {', '.join(concerns())}")
        _refuse_unknown("section", values, concerns())
        for concern, section in concerns().items():
            given = values.get(concern, {})
            given = with_generator_embeddings(given) if concern == "objective" else given
            hints = typing.get_type_hints(section)
            _refuse_unknown(f"{concern} setting", given, hints)
            unset = {field.name for field in dataclasses.fields(section) if field.default is None}
            for name, value in given.items():
                if not _fits(value, hints[name]) and not (value is None and name in unset):
                    raise UserError(f"the configuration's {concern} setting {name} is {value!r:.40}: a wrong type")
            sections[concern] = section(**given)
        return cls(**sections)


def concerns() -> dict[str, Any]:
    """Return name of each section of `Config` → its dataclass, in the order of `--help`."""
    return {f.name: f.default_factory for f in dataclasses.fields(Config)}


def _refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UserError(f"the configuration holds the unknown {what} {unknown[0]!r}: another version wrote it")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON has a setting's type; whole numbers count as floats, lists as tuples."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in options and type(value) is int:
        return True
    if any(typing.get_origin(option) is tuple for option in options):
        items = value if isinstance(value, (list, tuple)) else [value]
        return type(None) in options if value is None else all(isinstance(item, str) for item in items)
    return type(value) in options


def save_config(config: Config, folder: Path) -> None:
    """Write the resolved configuration to DIR/config.json."""
    write_text(folder / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")


def load_config(folder: Path) -> Config:
    """Return the configuration in DIR/config.json. Raises `UserError` if the file is missing or damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path} not found: expected a folder that megatron-ddrp pretrain --save wrote")
    try:
        return Config.from_dict(parse_json(path.read_bytes()))
    except (ValueError, UserError) as error:
        raise UserError(f"{path}: {error}") from None
