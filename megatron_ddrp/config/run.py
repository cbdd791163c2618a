"""The configuration of a run: all concerns in one dataclass, checks across concerns, and files that hold its settings.

A run writes its resolved configuration as config.json, and `--config` reads one. `idle_settings` finds the settings
without effect, and `changed_settings` compares a stored configuration with the run's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ddrp.config.model import STARTS, VOCABULARY_MULTIPLE, ModelConfig
from megatron_ddrp.config.objective import CheckpointConfig, DataConfig, LoggingConfig, ObjectiveConfig
from megatron_ddrp.config.reading import Place, flag, load_plugins, load_values, options_of, read_settings, refuse
from megatron_ddrp.config.registry import ENCODINGS, OBJECTIVES, OPTIMIZERS, PLUGINS
from megatron_ddrp.config.training import (
    LengthPhase,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    parse_phases,
    phase_at,
)
from megatron_ddrp.config.translation import HINTS
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import hints_of, misfit, parse_json, show


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
        name, stage = self.optimizer.optimizer, self.parallel.zero_stage
        allowed = self.optimizer.chosen.zero_stages if name in OPTIMIZERS else (stage,)  # else: a plug-in not loaded
        if stage not in allowed:
            refuse(
                f"--optimizer {name} with --zero-stage {stage}: it needs whole parameters, and ZeRO cuts them into "
                f"flat parts; use --zero-stage {' or '.join(map(str, allowed))}"
            )
        new_head, steps = self.training.new_head_iters or 0, self.training.train_iters
        if new_head and (self.checkpoint.load is None or new_head > steps):
            refuse(
                f"--new-head-iters {new_head}: it needs the encoder of --load, and at most the steps of --train-iters "
                f"{steps}: give 0 to a run from random weights"
            )
        self._check_schedules()
        if self.parallel.cuda_graphs == "on" and self.graphs_fault is not None:
            refuse(
                f"--cuda-graphs on with {self.graphs_fault}: no graph holds such layers; use --cuda-graphs auto or off"
            )
        if self.parallel.sequence_parallel and not self.model.embedding_norm:
            refuse("--sequence-parallel cuts rows at the norm of the embeddings: leave --no-embedding-norm out")
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
        steps, head = self.training.train_iters, self.training.new_head_iters
        after = f" after --new-head-iters {head}" if head else ""
        ends = [phase.last_step(steps) for phase in self.phases[:-1]]
        for word, begin, end in zip(self.training.seq_length_phases, [0, *ends], ends, strict=False):
            if begin >= end:
                refuse(
                    f"--seq-length-phases {word} has no step: it begins after step {begin} and ends with step {end} of "
                    f"--train-iters {steps}; give a larger END, or leave the phase out"
                )
        if self.objective.causal_share and not self.objective.causal_steps(steps):
            refuse(
                f"--objective-phases {self.objective.objective_phases} of --train-iters {steps} has no step: give a "
                "larger END, or leave it out"
            )
        steps, optimizer = self.schedule
        warmup, decay = optimizer.warmup_steps(steps), optimizer.lr_wsd_decay_iters or 0
        if optimizer.lr_warmup_iters is not None and warmup > steps:
            refuse(f"--lr-warmup-iters {warmup} of {steps} steps{after}: the peak is never reached, so give fewer")
        end = optimizer.decay_steps(steps)
        if optimizer.lr_decay_iters is not None and warmup >= end:
            refuse(
                f"--lr-decay-iters {self.optimizer.lr_decay_iters}: the warm-up alone has {warmup} steps{after}, so "
                "give more than those"
            )
        if decay and warmup + decay > end:
            limit = "train" if optimizer.lr_decay_iters is None else "lr-decay"
            refuse(
                f"--lr-wsd-decay-iters {decay} and {warmup} steps of warm-up are more than --{limit}-iters {end}"
                f"{after}: give fewer; for a branch from step N, --train-iters is N + the decay"
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

    @property
    def graphs_fault(self) -> str | None:
        """Setting whose layers no CUDA graph can hold, as on a command line; None if there is none."""
        parallel, objective = self.parallel, self.objective
        tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        # Settings of a run with a plug-in load without the plug-in.
        made = objective.chosen(objective) if objective.objective in OBJECTIVES else None
        settings = {
            f"--tensor-model-parallel-size {tensor}": tensor > 1,
            f"--pipeline-model-parallel-size {stages}": stages > 1,
            "--checkpoint-activations": parallel.checkpoint_activations,
            f"--objective {objective.objective}": made is not None and made.looks_inside,
            # Stages 2 and 3 reduce gradients in the order in which they come, which a replay changes. Last, because
            # memory.py asks for other stages.
            f"--zero-stage {parallel.zero_stage}": parallel.zero_stage > 1,
        }
        return next((setting for setting, is_given in settings.items() if is_given), None)

    @property
    def phases(self) -> tuple[LengthPhase, ...]:
        """Parts of the run by row length; one part without `--seq-length-phases`."""
        return parse_phases(self.training.seq_length_phases, self.model.seq_length)

    @property
    def last_phase(self) -> LengthPhase:
        """Phase of the run's last step."""
        steps = self.training.train_iters
        return phase_at(self.phases, steps - 1, steps)

    @property
    def schedule(self) -> tuple[int, OptimizerConfig]:
        """Steps of the learning rate's schedule, which begins after `--new-head-iters`, and its settings from there."""
        before, optimizer = self.training.new_head_iters or 0, self.optimizer
        if before and optimizer.lr_decay_iters is not None:
            optimizer = dataclasses.replace(optimizer, lr_decay_iters=max(1, optimizer.lr_decay_iters - before))
        return self.training.train_iters - before, optimizer

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
        if misfit(values, Mapping[str, dict]):
            raise UserError(f"the configuration is not an object with the sections {', '.join(concerns())}")
        _refuse_unknown("section", values, concerns())
        for concern, section in concerns().items():
            given = dict(setting for setting in values.get(concern, {}).items() if setting not in FORMER)
            hints = hints_of(section)
            _refuse_unknown(f"{concern} setting", given, hints)
            unset = {field.name for field in dataclasses.fields(section) if field.default is None}
            for name, value in given.items():
                words = [value] if isinstance(value, str) and "tuple" in str(hints[name]) else value
                if reason := misfit(words, (hints[name], None) if name in unset else hints[name]):
                    wrong = f"setting {name} is {show(value)}: a wrong type, {reason}"
                    raise UserError(f"the configuration's {concern} {wrong}")
            sections[concern] = section(**given)
        return cls(**sections)


def concerns() -> dict[str, Any]:
    """Return name of each section of `Config` → its dataclass, in the order of `--help`."""
    return {f.name: f.default_factory for f in dataclasses.fields(Config)}


FORMER = (("generator_embeddings", "shared"),)
"""Settings that earlier versions stored with the one value that is left."""


def _refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UserError(f"the configuration holds the unknown {what} {unknown[0]!r}: another version wrote it")


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


WITHOUT_TABLE = ("absolute", "rope", "alibi", "nope")
"""Encodings without learned parameters of their own, which `--relative-table` would share or repeat."""


def idle_settings(config: Config) -> dict[str, str]:
    """Return name of each setting without effect → the reason, as "without --notes".

    Classes of plug-ins may read every setting, so these count as read.
    """
    model, objective = config.model, config.objective
    encoding, words = model.position_encoding, f"with --position-encoding {model.position_encoding}"
    foreign = ENCODINGS.get(encoding) in (None, *PLUGINS)  # unknown here, or a plug-in's
    own_objective = OBJECTIVES.get(objective.objective) not in PLUGINS
    under = f"with --objective {objective.objective}"
    conditions: tuple[tuple[bool, str, tuple[str, ...]], ...] = (
        (model.local_attention is None, "without --local-attention", ("global_every", "local_rope_theta")),
        (encoding != "rope" and not foreign, words, ("rope_theta", "local_rope_theta")),
        (encoding != "ddrp" and not foreign, words, ("direction_init",)),
        (encoding in WITHOUT_TABLE and not foreign, words, ("relative_table",)),
        (own_objective and not objective.generates, under, ("rtd_weight", "generator_size")),
        (objective.objective == "rtd", under, ("generator_size",)),
        (own_objective and not objective.tcd_weight, "without TCD (--tcd-weight 0)", ("tcd_tokens", "tcd_squared")),
        (own_objective and not objective.hcd_weight, "without HCD (--hcd-weight 0)", ("hcd_heads",)),
        (
            not objective.notes,
            "without --notes",
            (
                *("notes_min_count", "notes_max_count", "notes_window", "notes_decay", "notes_mix", "notes_dtype"),
                "index_cache_dir",
            ),
        ),
        (config.optimizer.lr_decay_style == "constant", "with --lr-decay-style constant", ("min_lr",)),
        (not config.logging.validates, "without validation", ("other_data_path", "log_similarity", "eval_mask_prob")),
        (not config.checkpoint.keep_last, "without --keep-last", ("milestone_interval",)),
        (not config.logging.profile, "without --profile", ("profile_step_start", "profile_step_end")),
    )
    return {name: reason for idle, reason, names in reversed(conditions) if idle for name in names}


NOT_OF_THE_RESULT = {
    *("num_threads", "distributed_timeout_minutes", "max_skipped_steps", "index_cache_dir", "attention_backend"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "zero_stage"),
    *("bf16", "fp16", "compile", "cuda_graphs", "decided_by_deepspeed_config"),
}
"""Settings of the machine, and of layout and precision, which a resumed run reports in a line of their own."""


PLACES = {
    *("data_path", "train_data_path", "valid_data_path", "other_data_path", "vocab_file", "tokenizer_model"),
    *("deepspeed_config", "index_cache_dir", "tensorboard_dir"),
}
"""Settings that name files or folders, which may lie elsewhere on another host. A run's own folder is one for all."""


def settings_of_all_ranks(config: Config) -> dict[str, str]:
    """Return flag → value of the settings that all ranks must share; of files and folders, whether they are given."""
    settings = {name: value for concern in config.to_dict().values() for name, value in concern.items()}
    for own in ("num_threads", "exit_duration_in_mins"):  # the ranks stop by the first of their limits
        del settings[own]
    given = {name: "not given" if settings[name] is None else "given" for name in PLACES}
    return {flag(name): _setting_text(value) for name, value in (settings | given).items()}


def changed_settings(before: dict[str, dict[str, Any]], config: Config) -> list[str]:
    """Return `--lr: 0.001 → 0.002` for each changed setting that affects the result.

    `before` is `to_dict` of the checkpoint's configuration; settings that an older version lacks are skipped. Two ways
    to write one setting are no difference.
    """
    lines, of_model = [], changed_model(Config.from_dict(before), config)
    for concern, settings in config.to_dict().items():
        if concern in ("checkpoint", "logging"):
            continue
        theirs = before.get(concern, {})
        for name, value in settings.items():
            if name in theirs and name not in NOT_OF_THE_RESULT and (concern != "model" or name in of_model):
                old, new = _setting_text(theirs[name]), _setting_text(value)
                lines += [f"{flag(name)}: {old} → {new}"] * (old != new)
    return lines


def _setting_text(value: Any) -> str:
    """Return a setting as on a command line, the same text for a list from JSON and a tuple."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


CHANGEABLE = {"hidden_dropout", "attention_dropout", "attention_backend", "compile"}
"""Settings of the model that a resumed run may change: they do not affect the shapes or meaning of its weights."""


def changed_model(theirs: Config, ours: Config) -> list[str]:
    """Return the names of the model's settings that were changed and have another effect on trained weights.

    `--ffn-hidden-size 3072` at a hidden size of 768 is the default written out, `--rope-theta` has no effect under
    other encodings, and `STARTS` none after the start.
    """
    old, new = theirs.to_dict()["model"], ours.to_dict()["model"]
    old_effects, new_effects = _effects(theirs), _effects(ours)
    return [name for name in new if old[name] != new[name] and old_effects[name] != new_effects[name]]


def _effects(config: Config) -> dict[str, Any]:
    """Return the model's settings with defaults in place of None, and None in place of what has no effect."""
    model, idle = config.model, idle_settings(config)
    effects: dict[str, Any] = config.to_dict()["model"] | {"ffn_hidden_size": model.ffn_size}
    if model.deberta_emd is None and model.position_encoding in ENCODINGS:
        effects["deberta_emd"] = model.encoding.decodes_absolute
    if not any(phase.rope_theta for phase in config.phases):  # which a default would follow
        effects["local_rope_theta"] = model.local_rope_theta or model.rope_theta
    return effects | dict.fromkeys({*STARTS, *idle} & effects.keys())


PLUGIN_KEY = "plugin"
"""Key with the files of `--plugin`."""
OF_THE_RUN = ("save", "load", "tensorboard_dir")
"""Settings of a run's config.json that belong to that run: another one has folders of its own."""
OPTIONS = "objective_options"
"""Setting whose meaning depends on the objective; a run stores the numbers that its objective declares."""

WARMUP_STEPS, WARMUP_SHARE = "lr_warmup_iters", "lr_warmup_fraction"
_INSTEAD = {
    **{WARMUP_STEPS: (WARMUP_SHARE,), WARMUP_SHARE: (WARMUP_STEPS,), "bf16": ("fp16",), "fp16": ("bf16",)},
    **{"data_path": ("train_data_path", "valid_data_path"), "train_data_path": ("data_path", "split")},
    **{"vocab_file": ("tokenizer_model",), "tokenizer_model": ("vocab_file",)},
}
"""Flag → settings of a file that it excludes. The steps of the warm-up win where a run stores both lengths."""
_OF_WSD = ("lr_wsd_decay_iters", "lr_wsd_decay_style")
_BELONGINGS = {"objective": (OPTIONS,), "optimizer": ("optimizer_options",), "lr_decay_style": _OF_WSD}
"""Flag → settings of a file that go with the file's value of it."""


def read_config(path: str) -> tuple[dict[str, Any], str]:
    """Return setting → checked value of a file, after loading its plug-ins, and a line for the user, if any.

    The file is flat YAML, YAML nested by concern, or the config.json that a run wrote. Raises `UserError` for what
    cannot be read, by file and key.
    """
    place = Place(f"--config {path}")
    content = _load(Path(path), place)
    if isinstance(content, Mapping) and PLUGIN_KEY in content:
        load_plugins(content[PLUGIN_KEY], place.at(PLUGIN_KEY), Path(path), _is_of_a_run(content))
        content = {key: value for key, value in content.items() if key != PLUGIN_KEY}
    if not isinstance(content, Mapping) or not any(isinstance(value, Mapping) for value in content.values()):
        values = read_settings(options_of(*concerns().values()), content, place, HINTS)
        _refuse_two_warmups(values, place)
        return values, ""
    is_of_a_run = _is_of_a_run(content)
    values = {}
    for concern, given in content.items():
        if concern not in concerns():
            raise place.error(f"unknown section {concern!r}; expected {', '.join(concerns())}")
        options, given = options_of(concerns()[concern]), given or {}
        if is_of_a_run and isinstance(given, Mapping):  # it stores settings without a flag too
            without_flag = {f.name for f in dataclasses.fields(concerns()[concern])} - set(options)
            given = {name: each for name, each in given.items() if name not in without_flag and each is not None}
        values |= read_settings(options, given, place.at(concern), HINTS)
    if not is_of_a_run:
        _refuse_two_warmups(values, place)
        return values, ""
    if WARMUP_STEPS in values:
        values.pop(WARMUP_SHARE, None)  # stored beside the steps, without effect
    values = drop_derived(values)  # with the run's folders, without which some settings do not stand
    left_out = [flag(name) for name in OF_THE_RUN if values.pop(name, None) is not None]
    return values, f"--config {path}: {', '.join(left_out)} of that run not taken; give your own" if left_out else ""


def _load(path: Path, place: Place) -> Any:
    """Return the content of a file; JSON by its name, since YAML reads 1e-06 as text."""
    if path.suffix == ".json":
        return load_values(path, place, parse_json)
    content = load_values(path, place)
    if content is None and not path.stat().st_size:  # cut off; comments alone are a choice
        raise place.error("empty; write settings, or leave --config out")
    return {} if content is None else content


def _is_of_a_run(content: Mapping[str, Any]) -> bool:
    """Return whether a run wrote the settings: it stores the size of the vocabulary, which no flag sets."""
    model = content.get("model")
    return isinstance(model, Mapping) and "vocab_size" in model


def _refuse_two_warmups(values: Mapping[str, Any], place: Place) -> None:
    """Refuse a file with both lengths of the warm-up, as on the command line."""
    if WARMUP_SHARE in values and values.get(WARMUP_STEPS) is not None:
        raise place.error(f"{WARMUP_STEPS} and {WARMUP_SHARE} exclude each other: give one of them")


def drop_derived(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide all of `values`: those that follow from the others go.

    A run stores every setting resolved. Defaults that follow from another setting, such as the weights of the
    objective, must follow again where a flag changes that one. A fixed default stays, as if it had been given: nothing
    that decides after `--config` may replace it.
    """
    whole, left, options = config_of(values), dict(values), options_of(*concerns().values())
    for name in (name for name in values if options[name].default is None or name == OPTIONS):
        rest = {other: value for other, value in left.items() if other != name}
        with contextlib.suppress(UserError):  # the others do not stand without it
            left = rest if config_of(rest) == whole else left
    return left


def under_flags(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file and of the flags.

    Flags win, also over settings of the file that they exclude, such as the other length of the warm-up. What belongs
    to another value in the file, such as the options of another objective, is left out.
    """
    excluded = [others for name, others in _INSTEAD.items() if given.get(name) is not None and given[name] is not False]
    excluded += [
        o for name, o in _BELONGINGS.items() if name in values and given.get(name, values[name]) != values[name]
    ]
    left_out = set().union(*excluded)
    return {name: value for name, value in values.items() if name not in left_out} | dict(given)


def config_of(values: Mapping[str, Any]) -> Config:
    """Return the configuration with these settings, by name; the others have their defaults."""
    return Config(
        **{
            concern: section(**{f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values})
            for concern, section in concerns().items()
        }
    )
