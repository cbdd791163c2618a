"""A run resumes only from a checkpoint of its own architecture, in whichever way the settings are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.config import Config, changed_settings
from megatron_ddrp.engine.compatibility import check_architecture
from megatron_ddrp.errors import UserError

ROPE = {"position_encoding": "rope", "relative_distance": None}
LOCAL = {"local_attention": 128}
PHASES = {"training": {"seq_length_phases": ("128:0.5:500",)}}


def pair(common: dict[str, Any], change: dict[str, Any], **others: Any) -> tuple[Config, Config]:
    """Return a stored configuration and one with a changed model."""
    stored = Config().replace(model=common, **others)
    return Config.from_dict(json.loads(json.dumps(stored.to_dict()))), stored.replace(model=change)


@pytest.mark.parametrize(
    ("common", "change"),
    [
        ({}, {"ffn_hidden_size": 3072}),
        ({"ffn": "geglu"}, {"ffn_hidden_size": 2048}),
        ({}, {"deberta_emd": False}),
        ({"position_encoding": "deberta"}, {"deberta_emd": True}),
        ({}, {"rope_theta": 20_000.0, "local_rope_theta": 5.0}),
        ({}, {"global_every": 2}),
        (ROPE, {"local_rope_theta": 5.0}),
        (ROPE | LOCAL, {"local_rope_theta": 10_000.0}),
    ],
)
def test_a_default_written_out_is_the_same_architecture(common: dict[str, Any], change: dict[str, Any]) -> None:
    for stored, config in (pair(common, change), pair(common, change)[::-1]):
        check_architecture(Path("run/iter_1"), stored, config)
        assert changed_settings(stored.to_dict(), config) == []


@pytest.mark.parametrize(
    ("common", "change", "others", "words"),
    [
        ({}, {"ffn_hidden_size": 1024}, {}, "--ffn-hidden-size is not given there and 1024 here"),
        ({}, {"deberta_emd": True}, {}, "--deberta-emd is not given there and True here"),
        (ROPE, {"rope_theta": 2e4}, {}, "--rope-theta is 10000.0 there and 20000.0 here"),
        (LOCAL, {"global_every": 2}, {}, "--global-every is 3 there and 2 here"),
        (ROPE | LOCAL, {"local_rope_theta": 5.0}, {}, "--local-rope-theta is not given there and 5.0 here"),
        (ROPE | LOCAL, {"local_rope_theta": 1e4}, PHASES, "--local-rope-theta is not given there and 10000.0 here"),
    ],
)
def test_another_architecture_is_refused(
    common: dict[str, Any], change: dict[str, Any], others: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match="a checkpoint of another architecture: ") as refused:
        check_architecture(Path("run/iter_1"), *pair(common, change, **others))
    assert words in str(refused.value)


def test_length_phases_with_their_own_theta_may_begin_at_a_resume() -> None:
    stored = Config().replace(model=ROPE | LOCAL)
    check_architecture(Path("run/iter_1"), stored, stored.replace(**PHASES))
