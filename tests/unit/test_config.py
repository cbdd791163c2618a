"""Settings: the paper's defaults, refusals in one line, round trips through JSON, and what a run may resume from."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.checkpoint import TOKENIZER
from megatron_ddrp.config import ENCODINGS, STARTS, ModelConfig, ObjectiveConfig, encoding_class, flag
from megatron_ddrp.config.run import Config, changed_settings, load_config, save_config
from megatron_ddrp.engine.checkpoint import changed_tokenizer, check_architecture
from megatron_ddrp.model import on_meta_device
from megatron_ddrp.objectives.contract import make_objective
from tests.refusals import refused, wrong_arguments
from tests.unit.tasks.conftest import tokenizer_of

PIECES = ["[unused0]", "the", "cat", "dog"]
OF_TENSOR, OF_PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


def test_defaults_are_the_papers_base_model():
    config = Config()
    model, objective, optimizer, training = config.model, config.objective, config.optimizer, config.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_size) == (12, 768, 12, 3072)
    assert (model.head_dim, model.seq_length, model.relative_distance) == (64, 512, 64)
    assert (model.hidden_dropout, model.attention_dropout, model.layernorm_position) == (0.1, 0.1, "post")
    assert model.position_encoding == "ddrp" and model.relative_table == "shared"
    assert (objective.objective, objective.tcd_weight, objective.hcd_weight) == ("mth", 1.0, 0.01)
    assert (objective.tcd_tokens, objective.hcd_heads, objective.mask_prob) == (50, 2, 0.15)
    assert (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (1e-4, 0.9, 0.999, 1e-6)
    assert (optimizer.weight_decay, optimizer.lr_decay_style) == (0.01, "linear")
    assert (training.global_batch_size, training.train_iters) == (256, 1_000_000)


def test_defaults_follow_the_objective_the_encoding_and_the_vocabulary_unless_given():
    for settings, weights in (
        ({"objective": "mlm"}, (1.0, 0.0, 0.0)),
        ({"objective": "mth"}, (1.0, 1.0, 0.01)),
        ({"objective": "mlm", "tcd_weight": 0.5}, (1.0, 0.5, 0.0)),
        ({"objective": "mth", "hcd_weight": 0.0}, (1.0, 1.0, 0.0)),
        ({"objective": "electra"}, (1.0, 0.0, 0.0, 50.0)),
    ):
        assert tuple(term.weight for term in make_objective(ObjectiveConfig(**settings)).terms) == weights
    for vocab, padded in ((1, 128), (128, 128), (129, 256), (30522, 30592)):
        assert ModelConfig(vocab_size=vocab).padded_vocab_size == padded
    for encoding, given, distance in (("ddrp", None, 64), ("tupe-r", None, 128), ("tupe-r", 64, 64)):
        given = {"relative_distance": given} if given else {}
        assert ModelConfig(position_encoding=encoding, **given).relative_distance == distance
    for encoding, same in (("absolute", True), ("ddrp", False)):  # the absolute embedding is said in one way
        plain = ModelConfig(position_encoding=encoding)
        assert ModelConfig(position_encoding=encoding, absolute_embedding=same) == plain
    assert ModelConfig(absolute_embedding=True).absolute_embedding is True
    assert [name for name in ENCODINGS if not ModelConfig(position_encoding=name).key_bias] == ["deberta"]


def test_what_an_encoding_cannot_serve_is_refused_by_its_reason(monkeypatch):
    monkeypatch.setattr(encoding_class("bert-r"), "relative_distance", None)
    assert ModelConfig(position_encoding="bert-r").relative_distance is None
    line = r"^--relative-distance 8 with --position-encoding bert-r, .*: leave the dist"
    refused(line, ModelConfig, position_encoding="bert-r", relative_distance=8)
    monkeypatch.setattr(encoding_class("bert-r"), "refusal", lambda sizes: f"heads are {sizes.head_dim} wide")
    wrong_arguments(r"^--position-encoding bert-r: heads are 64 wide$", ModelConfig, position_encoding="bert-r")


def test_settings_that_an_older_version_did_not_know_get_their_defaults():
    values = Config().to_dict()
    del values["model"]["relative_table"], values["logging"], values["parallel"]["cuda_graphs"]
    values["objective"]["generator_embeddings"] = "shared"  # the only layout that is left
    assert Config.from_dict(values) == Config() and Config().parallel.cuda_graphs == "auto"
    values["objective"]["generator_embeddings"] = "own"
    refused("unknown objective setting 'generator_embeddings': another version wrote it", Config.from_dict, values)


OUT_OF_RANGE = {
    "model": {"num_layers": 0, "relative_distance": 0, "ffn_hidden_size": 0, "hidden_dropout": 1.0},
    "objective": {"mask_prob": 0.0, "eval_mask_prob": 1.0},
    "training": {"micro_batch_size": 0, "train_iters": 0, "num_threads": 0},
    "optimizer": {"lr_warmup_fraction": 1.5, "adam_beta2": 1.0},
    "checkpoint": {"save_interval": 0, "exit_interval": 0},
    "logging": {"log_interval": 0},
    "parallel": {"tensor_model_parallel_size": 0},
}
"""Concern → settings, each with a number just outside its range."""


def test_a_number_outside_its_range_is_refused():
    for concern, settings in OUT_OF_RANGE.items():
        for name, value in settings.items():
            wrong_arguments(f"^{flag(name)} is {value}: it must", Config().replace, **{concern: {name: value}})


REFUSED = [
    ("model", {"position_encoding": "absolute", "absolute_embedding": False}, "--no-absolute-embedding"),
    ("model", {"seq_length": 2}, "--seq-length is 2: it must be at least 3 and below 2^31"),
    ("model", {"hidden_size": 100}, "--hidden-size 100 is not divisible by --num-attention-heads 12"),
    ("objective", {"tcd_tokens": 1}, "--tcd-tokens is 1: a cosine needs two"),
    ("objective", {"hcd_heads": 1}, "--hcd-heads is 1: "),
    ("objective", {"hcd_heads": 13}, "--hcd-heads 13 of --num-attention-heads 12"),
    ("objective", {"objective_phases": "0.7"}, "--objective-phases 0.7: expected clm:END with END in (0, 1], such as"),
    ("objective", {"objective_phases": "mlm:0.7"}, "--objective-phases mlm:0.7: expected clm:END"),
    ("objective", {"objective_phases": "clm:1.1"}, "--objective-phases clm:1.1: expected clm:END"),
    ("objective", {"objective_phases": "clm:0.0000001"}, "clm:0.0000001 of --train-iters 1000000 has no step: give a"),
    ("objective", {"objective_phases": "clm:0.7", "notes": True}, "-phases clm:0.7 with --notes: notes hold"),
    ("objective", {"objective_phases": "clm:0.7", "objective": "rtd"}, "clm:0.7 with --objective rtd: the model"),
    *(("training", {"num_threads": n}, f"--num-threads is {n}: it must") for n in ("many", True, math.inf)),
    ("training", {"bf16": True, "fp16": True}, "exclude each other"),
    ("optimizer", {"min_lr": 1.0}, "--min-lr 1.0 is above --lr"),
    ("optimizer", {"lr": float("nan")}, "--lr is nan: it must be at least 0 and at most 1e+12"),
    ("parallel", {"tensor_model_parallel_size": 8}, "-model-parallel-size 8 does not divide --num-attention-heads 12"),
    ("parallel", {"pipeline_model_parallel_size": 13}, "-model-parallel-size 13 is more than --num-layers 12"),
    ("parallel", {"pipeline_model_parallel_size": 2, "zero_stage": 2}, "--zero-stage 0 or 1"),
    ("objective", {"notes_min_count": 9, "notes_max_count": 8}, "--notes-min-count 9 is above --notes-max-count 8"),
    ("training", {"seed": 2**70}, f"--seed is {2**70}: it must be at least 0 and below 2^63"),
]


@pytest.mark.parametrize("concern, changes, message", REFUSED, ids=[f"{c}-{n}" for _, c, n in REFUSED])
def test_impossible_settings_are_refused_in_one_line(concern, changes, message):
    wrong_arguments(re.escape(message), Config().replace, **{concern: changes})


def test_pairs_of_concerns_are_refused():
    cut = OF_TENSOR | {"sequence_parallel": True}
    whole = "^--sequence-parallel cuts rows at the norm of the embeddings: leave --no-embedding-norm out$"
    refused(whole, Config().replace, model={"embedding_norm": False}, parallel=cut)
    odd = {"ffn_hidden_size": 5}
    refused("--tensor-model-parallel-size 2.* --ffn-hidden-size 5", Config().replace, model=odd, parallel=OF_TENSOR)
    geglu = {"hidden_size": 96, "num_attention_heads": 6, "ffn": "geglu", "ffn_hidden_size": 384}
    generator = {"objective": {"objective": "electra", "generator_size": 0.5}, "model": geglu}
    of_generator = r"-model-parallel-size 3.* feed-forward width of --objective electra's generator .*, 128"
    refused(of_generator, Config().replace, **generator, parallel={"tensor_model_parallel_size": 3})
    refused("--fp16 with --zero-stage 0", Config().replace, training={"fp16": True}, parallel={"zero_stage": 0})
    refused("--profile writes into the --save folder: give --save DIR", Config().replace, logging={"profile": True})
    Config().replace(training={"bf16": True}, parallel={"zero_stage": 0})
    # One head has no pair: the mean over pairs would be 0/0.
    one = {"num_attention_heads": 1}
    refused("--num-attention-heads is 1", Config().replace, model=one, objective={"hcd_heads": 0})
    similarity = {"objective": {"objective": "mlm"}, "logging": {"log_similarity": True}}
    refused("f.H. compares heads", Config().replace, model=one, **similarity)
    Config().replace(model=one, objective={"hcd_weight": 0.0})
    Config().replace(model=one, objective={"objective": "mlm", "hcd_weight": None})


def test_changed_settings_are_lines_with_the_flags_names():
    before = changed().to_dict()
    changes = {"optimizer": {"lr": 2e-3, "weight_decay": 0.0}, "data": {"data_path": ("0.3", "A", "0.7", "B")}}
    without_result = {"checkpoint": {"save": "other", "keep_last": 1}, "logging": {"log_interval": 7}}
    now = changed().replace(training={"bf16": False, "num_threads": 3}, **changes, **without_result)
    lines = ["--data-path: none → 0.3 A 0.7 B", "--lr: 0.0001 → 0.002", "--weight-decay: 0.01 → 0.0"]
    assert changed_settings(before, now) == lines
    assert changed_settings(json.loads(json.dumps(now.to_dict())), now) == []
    del before["optimizer"]["lr"], before["data"]
    assert changed_settings(before, now) == lines[2:]
    with_graphs = Config().replace(parallel={"cuda_graphs": "on"})
    assert Config.from_dict(with_graphs.to_dict()) == with_graphs
    assert changed_settings(Config().to_dict(), with_graphs) == []


def changed():
    model = {"num_layers": 3, "position_encoding": "absolute", "vocab_size": 777, "ffn_hidden_size": 99}
    others = {"training": {"bf16": True}, "checkpoint": {"save": "run", "exit_interval": 5}}
    return Config().replace(model=model, objective={"objective": "mlm", "hcd_weight": 0.25}, **others)


@pytest.mark.parametrize("config", [Config(), changed()], ids=["default", "changed"])
def test_round_trips_and_a_missing_or_foreign_config_json_is_refused_by_name(config, tmp_path):
    refused("config.json not found", load_config, tmp_path)
    values = config.to_dict()
    assert Config.from_dict(values) == Config.from_dict(json.loads(json.dumps(values))) == config
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    values["model"]["rotary_base"] = 10000
    refused("'rotary_base'", Config.from_dict, values)


WITHOUT_GRAPHS = [
    ({"parallel": OF_TENSOR}, "--tensor-model-parallel-size 2"),
    ({"parallel": OF_PIPELINE}, "--pipeline-model-parallel-size 2"),
    ({"parallel": {"zero_stage": 2}}, "--zero-stage 2"),
    ({"parallel": {"zero_stage": 3}}, "--zero-stage 3"),
    ({"parallel": {"checkpoint_activations": True}}, "--checkpoint-activations"),
    ({"objective": {"objective": "head-disagreement"}}, "--objective head-disagreement"),
]


@pytest.mark.parametrize("changes, words", WITHOUT_GRAPHS, ids=str)
def test_cuda_graphs_are_refused_where_no_graph_holds_a_layer(changes, words):
    config = Config().replace(**changes)
    assert config.graphs_fault == words and Config().graphs_fault is None
    config.replace(parallel={"cuda_graphs": "auto"})
    line = f"^--cuda-graphs on with {words}: .*; use --cuda-graphs auto or off$"
    wrong_arguments(line, config.replace, parallel={"cuda_graphs": "on"})


def test_a_layout_divides_the_ranks_and_the_vocabulary_where_it_is_known():
    sizes = OF_TENSOR | {"pipeline_model_parallel_size": 3}
    parallel = Config().replace(parallel=sizes, model={"num_layers": 3}).parallel
    assert parallel.data_parallel_size(24) == 4
    refused("size 3 = 6 does not divide the number of ranks, 8", parallel.data_parallel_size, 8)
    config = Config().replace(parallel={"tensor_model_parallel_size": 3})
    assert config.with_vocabulary(300).model.padded_vocab_size == 384
    error = refused("the vocabulary, padded to a multiple of 128, 30592: choose one", config.with_vocabulary, 30522)
    assert error.exit_code == 2 and Config().with_vocabulary(30522) == Config()


ROPE = {"position_encoding": "rope", "relative_distance": None}
LOCAL = {"local_attention": 128}
OTHER_START = {"init_method_std": 0.5, "attention_init": "offsets", "direction_init": "free"}
PHASES = {"training": {"seq_length_phases": ("128:0.5:500",)}}


def pair(common: dict[str, Any], change: dict[str, Any], **others: Any) -> tuple[Config, Config]:
    """Return a stored configuration and one with a changed model."""
    stored = Config().replace(model=common, **others)
    return Config.from_dict(json.loads(json.dumps(stored.to_dict()))), stored.replace(model=change)


DEBERTA = {"position_encoding": "deberta"}
SAME = [
    ({}, {"ffn_hidden_size": 3072}),
    ({}, {"deberta_emd": False}),
    (DEBERTA | {"key_bias": None}, {"key_bias": False}),
    ({}, {"rope_theta": 20_000.0, "local_rope_theta": 5.0}),
    ({}, {"global_every": 2}),
    (ROPE, {"local_rope_theta": 5.0}),
    (ROPE | LOCAL, {"local_rope_theta": 10_000.0}),
    ({"position_encoding": "absolute"}, {"attention_init": "offsets"}),
    *(({}, {name: value}) for name, value in OTHER_START.items() if name != "attention_init"),
]
OTHER = [
    ({}, {"ffn_hidden_size": 1024}, {}, "--ffn-hidden-size is not given there and 1024 here"),
    ({}, {"deberta_emd": True}, {}, "--deberta-emd is not given there and True here"),
    (DEBERTA | {"key_bias": None}, {"key_bias": True}, {}, "--key-bias is False there and True here"),
    (ROPE, {"rope_theta": 2e4}, {}, "--rope-theta is 10000.0 there and 20000.0 here"),
    (LOCAL, {"global_every": 2}, {}, "--global-every is 3 there and 2 here"),
    (ROPE | LOCAL, {"local_rope_theta": 5.0}, {}, "--local-rope-theta is not given there and 5.0 here"),
    (ROPE | LOCAL, {"local_rope_theta": 1e4}, PHASES, "--local-rope-theta is not given there and 10000.0 here"),
]
OF_ANY_LENGTH = [ROPE, {"position_encoding": "ddrp"}, DEBERTA | {"deberta_emd": False}]
OF_A_LENGTH = [{"position_encoding": name} for name in ("deberta", "deberta-v2", "absolute", "tupe-r")]
OF_A_LENGTH += [ROPE | {"absolute_embedding": True}, {"position_encoding": "ddrp", "deberta_emd": True}]
RUN = Path("run/iter_1")


@pytest.mark.parametrize(("common", "change"), SAME)
def test_a_default_written_out_or_another_start_is_the_same_architecture(common, change):
    for stored, config in (pair(common, change), pair(common, change)[::-1]):
        check_architecture(RUN, stored, config)
        assert changed_settings(stored.to_dict(), config) == []


@pytest.mark.parametrize(("common", "change", "others", "words"), OTHER)
def test_another_architecture_is_refused(common, change, others, words):
    error = refused("a checkpoint of another architecture: ", check_architecture, RUN, *pair(common, change, **others))
    assert words in str(error)


@pytest.mark.parametrize("common", [*OF_ANY_LENGTH, *OF_A_LENGTH])
def test_rows_of_another_length_need_a_model_without_a_table_of_places(common: dict[str, Any]) -> None:
    for length in (64, 2048):
        stored, config = pair(common, {"seq_length": length})
        assert changed_settings(stored.to_dict(), config) == [f"--seq-length: 512 → {length}"]
        if common in OF_ANY_LENGTH:
            check_architecture(RUN, stored, config)
        else:
            hint = "this model depends on it: for shorter rows give --seq-length 512 --seq-length-phases 64:1"
            line = f"--seq-length is 512 there and {length} here"
            assert (hint in str(refused(line, check_architecture, RUN, stored, config))) == (length < 512)


def test_an_encoding_that_serves_any_length_has_no_weight_of_a_length() -> None:
    for name in sorted(ENCODINGS):
        model = ModelConfig(position_encoding=name, deberta_emd=False, num_layers=1)
        models = (on_meta_device(dataclasses.replace(model, seq_length=length)) for length in (8, 9))
        short, long = ([parameter.shape for parameter in model.parameters()] for model in models)
        assert not encoding_class(name).any_length or short == long, name


def test_a_new_base_may_follow_the_one_that_the_checkpoint_was_trained_with() -> None:
    stored = Config().replace(model=ROPE | {"seq_length": 128}, training={"train_iters": 100})
    longer = {"seq_length": 512, "rope_theta": 5e5}
    config = stored.replace(model=longer, training={"seq_length_phases": ("128:0.4:10000",)})
    check_architecture(Path("run/iter_40"), stored, config, 40)
    line = "--rope-theta is 10000.0 there and 500000.0 here"
    refused(line, check_architecture, Path("run/iter_41"), stored, config, 41)
    refused(line, check_architecture, Path("run/iter_40"), stored, stored.replace(model=longer), 40)
    stored = Config().replace(model=ROPE | LOCAL)
    check_architecture(RUN, stored, stored.replace(**PHASES))


OTHER_PIECES = [
    ([*PIECES[:2], "dog", "cat"], "2 of its pieces differ, such as 7, 'cat' there and 'dog' here"),
    ([*PIECES, "bird"], "1 of its pieces differ, such as 9, 'no piece' there and 'bird' here"),
    (PIECES[:3], "1 of its pieces differ, such as 8, 'dog' there and 'no piece' here"),
]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A folder of weights with their tokenizer."""
    tokenizer_of(tmp_path, PIECES).save(tmp_path / "start" / TOKENIZER)
    return tmp_path / "start" / "iter_0000000"


def test_a_run_begins_from_weights_of_its_own_pieces_and_roles_alone(start: Path, tmp_path: Path) -> None:
    ours = tokenizer_of(tmp_path, PIECES)
    assert changed_tokenizer(tmp_path / "without" / "iter_0000000", ours) == changed_tokenizer(start, ours) == []
    (rules,) = changed_tokenizer(start, tokenizer_of(tmp_path, PIECES, "BertWordPieceCase"))
    assert "(BertWordPieceLowerCase → BertWordPieceCase)" in rules
    (named,) = changed_tokenizer(start, tokenizer_of(tmp_path, ["law", *PIECES[1:]]))
    assert "(names for 1 of [unused…])" in named
    ours.mask_id, ours.fingerprint = 5, "another"
    refused("the role mask has another id", changed_tokenizer, start, ours)


@pytest.mark.parametrize(("pieces", "words"), OTHER_PIECES)
def test_weights_of_other_pieces_are_refused(pieces: list[str], words: str, start: Path, tmp_path: Path) -> None:
    error = refused(re.escape(words), changed_tokenizer, start, tokenizer_of(tmp_path, pieces))
    assert f"--vocab-file {start.parent / TOKENIZER / 'vocab.txt'}" in str(error)


def test_every_setting_of_the_start_is_known_as_one() -> None:
    assert OTHER_START.keys() == {*STARTS}
    assert [field.name for field in dataclasses.fields(ModelConfig) if "init" in field.name] == [*STARTS]
