"""A run resumes only from a checkpoint of its own architecture, in whichever way the settings are written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.checkpoint import TOKENIZER
from megatron_ddrp.config import ENCODINGS, STARTS, Config, ModelConfig, changed_settings, encoding_class
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.engine.checkpoint import changed_tokenizer, check_architecture
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import on_meta_device

ROPE = {"position_encoding": "rope", "relative_distance": None}
LOCAL = {"local_attention": 128}
OTHER_START = {"init_method_std": 0.5, "attention_init": "offsets", "direction_init": "free"}
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
        ({"position_encoding": "deberta", "key_bias": None}, {"key_bias": False}),
        ({}, {"rope_theta": 20_000.0, "local_rope_theta": 5.0}),
        ({}, {"global_every": 2}),
        (ROPE, {"local_rope_theta": 5.0}),
        (ROPE | LOCAL, {"local_rope_theta": 10_000.0}),
        ({"position_encoding": "absolute"}, {"attention_init": "offsets"}),
        *(({}, {name: value}) for name, value in OTHER_START.items() if name != "attention_init"),
    ],
)
def test_a_default_written_out_or_another_start_is_the_same_architecture(
    common: dict[str, Any], change: dict[str, Any]
) -> None:
    for stored, config in (pair(common, change), pair(common, change)[::-1]):
        check_architecture(Path("run/iter_1"), stored, config)
        assert changed_settings(stored.to_dict(), config) == []


@pytest.mark.parametrize(
    ("common", "change", "others", "words"),
    [
        ({}, {"ffn_hidden_size": 1024}, {}, "--ffn-hidden-size is not given there and 1024 here"),
        ({}, {"deberta_emd": True}, {}, "--deberta-emd is not given there and True here"),
        (
            {"position_encoding": "deberta", "key_bias": None},
            {"key_bias": True},
            {},
            "--key-bias is False there and True here",
        ),
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


@pytest.mark.parametrize(
    ("common", "served"),
    [
        (ROPE, True),
        ({"position_encoding": "ddrp"}, True),
        ({"position_encoding": "deberta", "deberta_emd": False}, True),
        ({"position_encoding": "deberta"}, False),
        ({"position_encoding": "deberta-v2"}, False),
        ({"position_encoding": "absolute"}, False),
        ({"position_encoding": "tupe-r"}, False),
        (ROPE | {"absolute_embedding": True}, False),
        ({"position_encoding": "ddrp", "deberta_emd": True}, False),
    ],
)
def test_rows_of_another_length_need_a_model_without_a_table_of_places(common: dict[str, Any], served: bool) -> None:
    for length in (64, 2048):
        stored, config = pair(common, {"seq_length": length})
        assert changed_settings(stored.to_dict(), config) == [f"--seq-length: 512 → {length}"]
        if served:
            check_architecture(Path("run/iter_1"), stored, config)
        else:
            hint = "this model depends on it: for shorter rows give --seq-length 512 --seq-length-phases 64:1"
            with pytest.raises(UserError, match=f"--seq-length is 512 there and {length} here") as refused:
                check_architecture(Path("run/iter_1"), stored, config)
            assert (hint in str(refused.value)) == (length < 512)


def test_an_encoding_that_serves_any_length_has_no_weight_of_a_length() -> None:
    for name in sorted(ENCODINGS):
        configs = [
            ModelConfig(position_encoding=name, deberta_emd=False, seq_length=length, num_layers=1) for length in (8, 9)
        ]
        shapes = [[p.shape for p in on_meta_device(config).parameters()] for config in configs]
        assert not encoding_class(name).any_length or shapes[0] == shapes[1], name


def test_a_new_base_may_follow_the_one_that_the_checkpoint_was_trained_with() -> None:
    stored = Config().replace(model=ROPE | {"seq_length": 128}, training={"train_iters": 100})
    longer = {"seq_length": 512, "rope_theta": 5e5}
    config = stored.replace(model=longer, training={"seq_length_phases": ("128:0.4:10000",)})
    check_architecture(Path("run/iter_40"), stored, config, 40)
    with pytest.raises(UserError, match="--rope-theta is 10000.0 there and 500000.0 here"):
        check_architecture(Path("run/iter_41"), stored, config, 41)
    with pytest.raises(UserError, match="--rope-theta is 10000.0 there and 500000.0 here"):
        check_architecture(Path("run/iter_40"), stored, stored.replace(model=longer), 40)


def test_length_phases_with_their_own_theta_may_begin_at_a_resume() -> None:
    stored = Config().replace(model=ROPE | LOCAL)
    check_architecture(Path("run/iter_1"), stored, stored.replace(**PHASES))


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "the", "cat", "dog"]


def tokenizer(folder: Path, pieces: list[str], kind: str = "BertWordPieceLowerCase") -> Any:
    """Return the tokenizer of a vocabulary."""
    path = folder / f"{len(list(folder.iterdir()))}.txt"
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return build_tokenizer(kind, vocab_file=path)


def test_a_run_begins_from_weights_of_its_own_pieces_alone(tmp_path: Path) -> None:
    checkpoint = tmp_path / "start" / "iter_0000000"
    assert changed_tokenizer(checkpoint, tokenizer(tmp_path, PIECES)) == [], "a folder without a tokenizer"
    tokenizer(tmp_path, PIECES).save(tmp_path / "start" / TOKENIZER)
    assert changed_tokenizer(checkpoint, tokenizer(tmp_path, PIECES)) == []
    (rules,) = changed_tokenizer(checkpoint, tokenizer(tmp_path, PIECES, "BertWordPieceCase"))
    assert "(BertWordPieceLowerCase → BertWordPieceCase)" in rules
    (named,) = changed_tokenizer(checkpoint, tokenizer(tmp_path, [*PIECES[:5], "law", *PIECES[6:]]))
    assert "(names for 1 of [unused…])" in named


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([*PIECES[:7], "dog", "cat"], "2 of its pieces differ, such as 7, 'cat' there and 'dog' here"),
        ([*PIECES, "bird"], "1 of its pieces differ, such as 9, 'no piece' there and 'bird' here"),
        (PIECES[:8], "1 of its pieces differ, such as 8, 'dog' there and 'no piece' here"),
    ],
)
def test_weights_of_other_pieces_are_refused(pieces: list[str], words: str, tmp_path: Path) -> None:
    tokenizer(tmp_path, PIECES).save(tmp_path / "start" / TOKENIZER)
    with pytest.raises(UserError) as refused:
        changed_tokenizer(tmp_path / "start" / "iter_0000000", tokenizer(tmp_path, pieces))
    vocabulary = tmp_path / "start" / TOKENIZER / "vocab.txt"
    assert words in str(refused.value) and f"--vocab-file {vocabulary}" in str(refused.value)


def test_a_role_on_another_piece_is_refused(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, PIECES)
    ours.save(tmp_path / "start" / TOKENIZER)
    ours.mask_id, ours.fingerprint = 5, "another"
    with pytest.raises(UserError, match="the role mask has another id"):
        changed_tokenizer(tmp_path / "start" / "iter_0000000", ours)


def test_every_setting_of_the_start_is_known_as_one() -> None:
    assert OTHER_START.keys() == {*STARTS}
    assert [field.name for field in dataclasses.fields(ModelConfig) if "init" in field.name] == [*STARTS]
