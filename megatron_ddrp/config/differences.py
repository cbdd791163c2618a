"""Settings without effect, and differences between a stored configuration and the run's.

Two ways to write one setting are no difference.
"""

from __future__ import annotations

from typing import Any

from megatron_ddrp.config.model import STARTS
from megatron_ddrp.config.option import flag
from megatron_ddrp.config.registry import ENCODINGS, OBJECTIVES, PLUGINS, encoding_class
from megatron_ddrp.config.run import Config

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
    *("data_path", "train_data_path", "valid_data_path", "vocab_file", "tokenizer_model", "deepspeed_config"),
    *("index_cache_dir", "tensorboard_dir"),
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

    `before` is `to_dict` of the checkpoint's configuration; settings that an older version lacks are skipped.
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
        effects["deberta_emd"] = encoding_class(model.position_encoding).decodes_absolute
    if not any(phase.rope_theta for phase in config.phases):  # which a default would follow
        effects["local_rope_theta"] = model.local_rope_theta or model.rope_theta
    return effects | dict.fromkeys({*STARTS, *idle} & effects.keys())
