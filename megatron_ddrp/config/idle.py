"""Settings that have no effect beside the others of a configuration, each with the reason."""

from __future__ import annotations

from megatron_ddrp.config.registry import ENCODINGS, OBJECTIVES, PLUGINS
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
        (own_objective and not objective.tcd_weight, "without TCD (--tcd-weight 0)", ("tcd_tokens",)),
        (own_objective and not objective.hcd_weight, "without HCD (--hcd-weight 0)", ("hcd_heads",)),
        (
            not objective.notes,
            "without --notes",
            ("notes_min_count", "notes_max_count", "notes_window", "notes_decay", "notes_mix", "notes_dtype"),
        ),
        (not config.logging.profile, "without --profile", ("profile_step_start", "profile_step_end")),
    )
    return {name: reason for idle, reason, names in reversed(conditions) if idle for name in names}
