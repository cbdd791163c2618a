"""The command line: derived from the settings, YAML below flags, underscores welcome, one line for a mistake."""

import dataclasses

import pytest

from megatron_ddrp.arguments import build_parser, parse_arguments
from megatron_ddrp.config import ENCODINGS, Config, concerns, flag
from megatron_ddrp.errors import UserError


def test_no_flag_gives_the_defaults():
    arguments = parse_arguments([])
    assert arguments.config == Config() and not arguments.dry_run


def test_every_setting_is_a_flag_in_the_section_of_its_concern():
    groups = {group.title: group._group_actions for group in build_parser()._action_groups}
    for section in concerns().values():
        got = [action.option_strings[0] for action in groups[section.__doc__]]
        assert got == [flag(f.name) for f in dataclasses.fields(section) if "help" in f.metadata]
    flags = {name for action in build_parser()._actions for name in action.option_strings if name[:5] != "--no-"}
    own = {"-h", "--help", "--config", "--dry-run", "--world-size", "--device-memory", "--plugin"}
    own |= {"--local-rank", "--deepspeed"}
    settings = {flag(f.name) for s in concerns().values() for f in dataclasses.fields(s) if "help" in f.metadata}
    assert flags == own | settings and "--vocab-size" not in flags


def test_help_names_choices_defaults_and_sections(capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    encodings = "{" + ",".join(ENCODINGS) + "}"
    for piece in (encodings, "(default: 512)", "Objective:", "Checkpoints:", "--dry-run", "example:"):
        assert piece in text
    assert "==SUPPRESS==" not in text and "--local-rank" not in text


def test_flags_reach_their_fields_with_their_types():
    words = (
        "--num-layers 3 --lr 2e-3 --bf16 --position-encoding absolute --save out --hcd-weight 0 --ffn-hidden-size 64"
    )
    config = parse_arguments(words.split()).config
    assert config == Config().replace(
        model={"num_layers": 3, "position_encoding": "absolute", "ffn_hidden_size": 64},
        optimizer={"lr": 2e-3},
        training={"bf16": True},
        objective={"hcd_weight": 0.0},
        checkpoint={"save": "out"},
    )
    assert isinstance(config.optimizer.lr, float) and isinstance(config.model.num_layers, int)


def test_blends_are_flags_of_several_words(tmp_path):
    words = ["--train-data-path", "0.3", "A", "0.7", "B", "--valid-data-path", "C", "--masking", "ngram"]
    config = parse_arguments(words).config
    assert config.data.train_data_path == ("0.3", "A", "0.7", "B") and config.data.valid_data_path == ("C",)
    assert config.data.split is None and config.objective.masking == "ngram"
    as_list = yaml_file(tmp_path, "data-path: [0.3, A, 0.7, B]")
    assert parse_arguments(["--config", as_list]).config.data.data_path == ("0.3", "A", "0.7", "B")
    assert parse_arguments(["--config", yaml_file(tmp_path, "data-path: A")]).config.data.data_path == ("A",)


@pytest.mark.parametrize("words", [["--num_layers", "3"], ["--num_layers=3"], ["--num-layers=3"]], ids=str)
def test_underscores_count_as_dashes(words):
    assert parse_arguments(words).config.model.num_layers == 3


def test_the_launchers_own_flags_are_accepted():
    words = ["--local_rank=1", "--deepspeed", "--deepspeed_config", "ds.json", "--dry_run"]
    arguments = parse_arguments(words)
    assert arguments.config.parallel.deepspeed_config == "ds.json" and arguments.dry_run


def yaml_file(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    path = yaml_file(tmp_path, "num-layers: 3\nhidden_size: 96\nlr: 2e-3\nbf16: true\nffn-hidden-size: null\nsave: 7\n")
    config = parse_arguments(["--hidden-size", "48", "--config", path]).config
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (3, 48, 2e-3)
    assert config.training.bf16 and config.model.ffn_hidden_size is None and config.checkpoint.save == "7"
    assert config.model.num_attention_heads == 12
    assert isinstance(config.optimizer.lr, float)


def test_a_flag_that_states_the_default_still_wins_over_yaml(tmp_path):
    assert parse_arguments(["--config", yaml_file(tmp_path, "seed: 5"), "--seed", "1234"]).config.training.seed == 1234
    switched_on = yaml_file(tmp_path, "packing: true\nbf16: true\n")
    config = parse_arguments(["--config", switched_on, "--no-packing", "--no_bf16"]).config
    assert not config.data.packing and not config.training.bf16


def test_an_empty_yaml_changes_nothing(tmp_path):
    assert parse_arguments(["--config", yaml_file(tmp_path, "# nothing yet\n")]).config == Config()


@pytest.mark.parametrize(
    "text, message",
    [
        ("num-layer: 3", "unknown setting 'num-layer'; did you mean num-layers?"),
        ("vocab-size: 3", "unknown setting 'vocab-size'"),
        ("num-layers: three", "num-layers: got 'three', expected a whole number"),
        ("num-layers: 2.5", "num-layers: got 2.5, expected a whole number"),
        ("num-layers: true", "num-layers: got True, expected a whole number"),
        ("num-layers: [1, 2]", "num-layers: got [1, 2], expected a whole number"),
        ("num-layers: null", "num-layers: got None, expected a whole number"),
        ("lr: fast", "lr: got 'fast', expected a number"),
        ("bf16: 1", "bf16: got 1, expected true or false"),
        ("attention-backend: flex", "got 'flex', expected one of auto, eager, blocked, sdpa, triton"),
        ("position-encoding: rotary", "position-encoding: got 'rotary', expected one of absolute, "),
        ("- a list", "got a list"),
        ("a: b: c", "cannot be read"),
        ("num-layers: 0", "run.yaml: num-layers: got 0: it must lie in [1, 10000]"),
        ("num-layers: .inf", "num-layers: got inf, expected a whole number"),
        ("lr: .nan", "run.yaml: lr: got nan: it must be at least 0 and finite"),
    ],
)
def test_mistakes_in_yaml_are_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(UserError) as refusal:
        parse_arguments(["--config", yaml_file(tmp_path, text)])
    assert message in str(refusal.value) and "\n" not in str(refusal.value) and refusal.value.exit_code == 2


def test_a_missing_yaml_is_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere.yaml: cannot be read: No such file"):
        parse_arguments(["--config", str(tmp_path / "nowhere.yaml")])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--num-layers", "three"], "--num-layers: invalid int value: 'three'"),
        (["--attention-backend", "flex"], "invalid choice: 'flex'"),
        (["--position-encoding", "rotary"], "invalid choice: 'rotary'"),
        (["--num-layer", "3"], "did you mean --num-layers?"),
        (["--vocab-size", "3"], "unrecognized arguments: --vocab-size"),
        (["--lr"], "--lr: expected one argument"),
        (["--data-path"], "--data-path: expected at least one argument"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_mistakes_in_flags_end_in_one_line_and_exit_code_2(words, message, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/pretrain_bert.py"])
    with pytest.raises(SystemExit) as end:
        parse_arguments(words)
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.out == ""
    assert (
        message in captured.err
        and captured.err.count("\n") == 1
        and captured.err.startswith("pretrain_bert.py: error:")
    )


def test_a_refused_combination_names_the_flags():
    with pytest.raises(UserError, match="--hidden-size 100 is not divisible by --num-attention-heads 12"):
        parse_arguments(["--hidden-size", "100"])
