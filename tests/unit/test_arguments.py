"""The command line: derived from the settings, YAML below flags, underscores welcome, one line for a mistake."""

import dataclasses
import json
import re

import pytest

from megatron_ddrp.arguments import build_parser, parse_arguments
from megatron_ddrp.config import ENCODINGS, Config, concerns, flag, save_config
from tests.refusals import refused, wrong_arguments


def test_no_flag_gives_the_defaults_and_usage_leaves_out_what_the_manifest_says():
    arguments = parse_arguments([])
    assert arguments.config == Config() and not arguments.dry_run
    parser = build_parser()
    assert "--data-path P [flags]" in parser.usage
    assert not any("--vocab-file" in text for text in (parser.usage, parser.epilog))


def test_every_setting_is_a_flag_in_the_section_of_its_concern():
    groups = {group.title: group._group_actions for group in build_parser()._action_groups}
    for section in concerns().values():
        got = [action.option_strings[0] for action in groups[section.__doc__]]
        assert got == [flag(f.name) for f in dataclasses.fields(section) if "help" in f.metadata]
    flags = {name for action in build_parser()._actions for name in action.option_strings if name[:5] != "--no-"}
    own = {"-h", "--help", "--config", "--dry-run", "--world-size", "--vocab-size", "--device-memory", "--plugin"}
    own |= {"--local-rank", "--deepspeed"}
    settings = {flag(f.name) for s in concerns().values() for f in dataclasses.fields(s) if "help" in f.metadata}
    assert flags == own | settings and "--vocab-size" not in settings


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


def test_the_launchers_own_flags_are_accepted(tmp_path):
    path = deepspeed_file(tmp_path)
    arguments = parse_arguments(["--local_rank=1", "--deepspeed", "--deepspeed_config", path, "--dry_run"])
    assert arguments.config.parallel.deepspeed_config == path and arguments.dry_run
    assert arguments.remarks == ()


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


def test_a_yaml_of_comments_changes_nothing_and_an_empty_one_is_refused(tmp_path):
    assert parse_arguments(["--config", yaml_file(tmp_path, "# nothing yet\n")]).config == Config()
    line = "--config .*: empty; write settings, or leave --config out"
    refused(line, parse_arguments, ["--config", yaml_file(tmp_path, "")])
    missing = ["--config", str(tmp_path / "nowhere.yaml")]
    refused("nowhere.yaml: cannot be read: No such file", parse_arguments, missing)


MISTAKES = {
    "run.yaml": [
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
        ("lr: .nan", "run.yaml: lr: got nan: it must be at least 0 and at most 1e+12"),
    ],
    "config.json": [
        ('{"model": {"num_layer": 3}}', "model: unknown setting 'num_layer'; did you mean num_layers?"),
        ('{"modell": {"num_layers": 3}}', "unknown section 'modell'; expected model, objective, data"),
        ('{"model": {"num_layers": "x"}}', "model.num_layers: got 'x', expected a whole number"),
        ('{"model": 3, "data": {}}', "model: expected settings such as `num_layers: …`, got a int"),
        ('{"model": ', "cannot be read: Expecting value"),
        ("[1]", "expected settings such as `num_layers: …`, got a list"),
    ],
}


@pytest.mark.parametrize(("name", "text", "message"), [(name, *row) for name, rows in MISTAKES.items() for row in rows])
def test_mistakes_in_a_file_are_refused_in_one_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    wrong_arguments(re.escape(message), parse_arguments, ["--config", str(tmp_path / name)])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--num-layers", "three"], "--num-layers: invalid int value: 'three'"),
        (["--attention-backend", "flex"], "invalid choice: 'flex'"),
        (["--position-encoding", "rotary"], "invalid choice: 'rotary'"),
        (["--num-layer", "3"], "did you mean --num-layers?"),
        (["--padded-vocab-size", "3"], "unrecognized arguments: --padded-vocab-size"),
        (["--lr"], "--lr: expected one argument"),
        (["--data-path"], "--data-path: expected at least one argument"),
        (["stray"], "unrecognized arguments: stray"),
        (["--lr-warmup-iters", "0", "--lr-warmup-fraction", "0.1"], "exclude each other: give one of them"),
    ],
)
def test_mistakes_in_flags_are_one_line_and_exit_code_2(words, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/pretrain_bert.py"])
    error = wrong_arguments(re.escape(message), parse_arguments, words)
    assert str(error).endswith("(see pretrain_bert.py --help)")


def deepspeed_file(tmp_path, **content):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_a_deepspeed_file_decides_what_no_flag_does(tmp_path):
    adam = {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-8, "weight_decay": 0.1, "adam_w_mode": True}
    path = deepspeed_file(
        tmp_path,
        train_batch_size=64,
        train_micro_batch_size_per_gpu=4,
        gradient_clipping=0.5,
        bf16={"enabled": True},
        fp16={"enabled": "auto", "loss_scale": 0},
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        optimizer={"type": "Adam", "params": adam},
    )
    arguments = parse_arguments(["--deepspeed_config", path, "--seed", "5"])
    names = ("global_batch_size", "micro_batch_size", "clip_grad", "bf16", "zero_stage", "offload_optimizer", "lr")
    names += ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "optimizer")
    assert arguments.config == Config().replace(
        training={"global_batch_size": 64, "micro_batch_size": 4, "bf16": True, "seed": 5},
        optimizer={
            **{"lr": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-8},
            **{"weight_decay": 0.1, "clip_grad": 0.5},
        },
        parallel={
            **{"zero_stage": 2, "offload_optimizer": "cpu", "deepspeed_config": path},
            "decided_by_deepspeed_config": names,
        },
    )
    assert arguments.remarks == (
        f"decided by --deepspeed-config {path}: --global-batch-size 64, --micro-batch-size 4, --clip-grad 0.5, "
        "--bf16 True, --zero-stage 2, --offload-optimizer cpu, --lr 0.0003, --adam-beta1 0.8, --adam-beta2 0.95, "
        "--adam-eps 1e-08, --weight-decay 0.1, --optimizer adamw",
    )
    assert Config.from_dict(json.loads(json.dumps(arguments.config.to_dict()))) == arguments.config


def test_a_flag_or_yaml_that_agrees_decides(tmp_path):
    path = deepspeed_file(tmp_path, zero_optimization={"stage": 2}, bf16={"enabled": "auto"}, gradient_clipping=1)
    words = ["--deepspeed_config", path, "--zero-stage", "2", "--config", yaml_file(tmp_path, "clip-grad: 1.0")]
    arguments = parse_arguments(words)
    assert arguments.remarks == () and arguments.config.parallel.decided_by_deepspeed_config == ()


def test_accumulation_steps_are_a_global_batch_of_all_ranks(tmp_path):
    path = deepspeed_file(tmp_path, gradient_accumulation_steps=3, train_micro_batch_size_per_gpu=4)
    words = ["--deepspeed_config", path, "--dry-run", "--world-size", "8", "--tensor-model-parallel-size", "2"]
    assert parse_arguments(words).config.training.global_batch_size == 3 * 4 * 4
    assert parse_arguments([*words, "--global-batch-size", "96"]).config.training.global_batch_size == 96


def test_accumulation_steps_do_not_count_the_tasks_of_a_job_beside_which_a_process_trains_alone(tmp_path, monkeypatch):
    """`complete_environment` gives a run in the shell of `salloc -n 4` one rank."""
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    path = deepspeed_file(tmp_path, gradient_accumulation_steps=3, train_micro_batch_size_per_gpu=4)
    assert parse_arguments(["--deepspeed_config", path]).config.training.global_batch_size == 3 * 4
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert parse_arguments(["--deepspeed_config", path]).config.training.global_batch_size == 3 * 4 * 4


ADAMW = {"type": "AdamW"}


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (
            {"zero_optimization": {"stage": 2}},
            *(
                ["--zero-stage", "1"],
                "zero_optimization.stage is 2 but the flags say 1: set it by --zero-stage and leave",
            ),
        ),
        ({"optimizer": ADAMW | {"params": {"lr": 1}}}, ["--lr", "2"], "optimizer.params.lr is 1.0 but the flags"),
        ({"fp16": {"enabled": True}}, ["--bf16"], "fp16.enabled is True but the flags say '--bf16'"),
        ({"bf16": {"enabled": False}}, ["--bf16"], "bf16.enabled is False but the flags say True: set it by --bf16 "),
        (
            {"train_batch_size": 64},
            *(
                ["--global-batch-size", "8"],
                "train_batch_size is 64 but the flags say 8: set it by --global-batch-size",
            ),
        ),
        ({"optimizer": ADAMW}, ["--optimizer", "muon"], "optimizer.type is 'adamw' but the flags say 'muon'"),
        ({"optimizer": {"type": "Lamb"}}, [], "optimizer is 'Lamb': expected AdamW; leave it out and give --lr"),
        (
            {"optimizer": ADAMW | {"params": {"adam_w_mode": False}}},
            *([], "optimizer.params.adam_w_mode is False: our AdamW has no such setting"),
        ),
        (
            {"optimizer": ADAMW | {"params": {"betas": [0.9]}}},
            *([], "optimizer.params.betas is [0.9]: our AdamW has no such setting"),
        ),
        ({"zero_optimization": {"stage": 7}}, [], "zero_optimization.stage: got 7, expected one of 0, 1, 2, 3"),
    ],
)
def test_a_deepspeed_file_may_not_contradict_a_flag(tmp_path, content, words, message):
    path = deepspeed_file(tmp_path, **content)
    error = refused(re.escape(message), parse_arguments, ["--deepspeed_config", path, *words])
    assert str(error).startswith(f"--deepspeed-config {path}: ")


def test_a_runs_own_file_is_a_config(tmp_path):
    words = "--num-layers 3 --objective electra --save old --load old --adam-eps 1e-8 --position-encoding absolute"
    config = parse_arguments(words.split()).config.replace(model={"vocab_size": 999})
    save_config(config, tmp_path)
    arguments = parse_arguments(["--config", str(tmp_path / "config.json"), "--save", "new"])
    same = config.replace(model={"vocab_size": 30522}, checkpoint={"save": "new", "load": None})
    assert arguments.config == same
    assert arguments.remarks == (
        f"--config {tmp_path / 'config.json'}: --save, --load of that run not taken; give your own",
    )


@pytest.mark.parametrize("options", [[], ["--objective-options", "weight=2", "margin=0.25"]], ids=["declared", "given"])
def test_a_runs_options_are_those_of_its_own_objective(options, tmp_path):
    of_the_run = ["--objective", "token-contrast", *options]
    save_config(parse_arguments(of_the_run).config.replace(model={"vocab_size": 999}), tmp_path)
    words = ["--config", str(tmp_path / "config.json")]
    assert parse_arguments(words).config == parse_arguments(of_the_run).config
    for other in (["--objective", "mlm"], ["--objective", "head-disagreement", "--objective-options", "value=2"]):
        assert parse_arguments([*words, *other]).config == parse_arguments(other).config
    lower = ["--objective-options", "weight=0.5"]
    assert parse_arguments([*words, *lower]).config == parse_arguments([*of_the_run[:2], *lower]).config


def test_options_in_a_file_fit_the_objective_of_a_flag(tmp_path):
    path = yaml_file(tmp_path, "objective-options: [weight=2]\n")
    objective = parse_arguments(["--config", path, "--objective", "token-contrast"]).config.objective
    assert objective.objective_options == ("weight=2.0", "margin=0.5")


def test_a_runs_own_file_decides_its_defaults_too(tmp_path):
    save_config(Config().replace(model={"vocab_size": 999}), tmp_path)
    words = ["--config", str(tmp_path / "config.json")]
    path = deepspeed_file(tmp_path, optimizer={"type": "AdamW", "params": {"lr": 3e-3}})
    line = r"optimizer\.params\.lr is 0\.003 but the flags say 0\.0001"
    refused(line, parse_arguments, [*words, "--deepspeed_config", path])
    path = deepspeed_file(tmp_path, gradient_accumulation_steps=7)
    batch = parse_arguments([*words, "--deepspeed_config", path]).config.training.global_batch_size
    assert batch == Config().training.global_batch_size
    length = parse_arguments([*words, "--max-position-embeddings", "1024"]).config.model.seq_length
    assert length == Config().model.seq_length
    save_config(Config().replace(model={"vocab_size": 999}), tmp_path)
    other = ["--objective", "mlm", "--position-encoding", "absolute"]
    assert parse_arguments([*words, *other]).config == parse_arguments(other).config


def test_a_share_of_warm_up_wins_over_the_steps_of_a_file(tmp_path):
    path = yaml_file(tmp_path, "lr-warmup-iters: 7\ntrain-iters: 100\n")
    optimizer = parse_arguments(["--config", path, "--lr-warmup-fraction", "0.5"]).config.optimizer
    assert optimizer.warmup_steps(100) == 50
    assert parse_arguments(["--config", path]).config.optimizer.warmup_steps(100) == 7


@pytest.mark.parametrize(
    "words", [["--lr-warmup-iters", "3"], ["--lr-warmup-samples", "30", "--global-batch-size", "10"]]
)
def test_steps_of_warm_up_win_over_the_share_of_a_file(words, tmp_path):
    path = yaml_file(tmp_path, "lr-warmup-fraction: 0.5\ntrain-iters: 100\n")
    optimizer = parse_arguments(["--config", path, *words]).config.optimizer
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction) == (3, Config().optimizer.lr_warmup_fraction)
    assert parse_arguments(["--config", path]).config.optimizer.warmup_steps(100) == 50


@pytest.mark.parametrize("form", ["{}\n{}\n", "optimizer:\n  {}\n  {}\n"])
def test_a_file_has_one_warm_up(form, tmp_path):
    share = "lr_warmup_fraction: 0.05"
    path = yaml_file(tmp_path, form.format(share, "lr-warmup-iters: 0"))
    line = f"--config {path}: lr_warmup_iters and lr_warmup_fraction exclude each other: give one of them"
    assert str(wrong_arguments("--config", parse_arguments, ["--config", path])) == line
    path = yaml_file(tmp_path, form.format(share, "lr-warmup-iters: null"))
    assert parse_arguments(["--config", path]).config.optimizer.lr_warmup_fraction == 0.05


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_a_runs_own_file_may_have_both_warm_ups(share, tmp_path):
    config = Config().replace(model={"vocab_size": 999}, optimizer={"lr_warmup_iters": 3, "lr_warmup_fraction": share})
    save_config(config, tmp_path)
    words = ["--config", str(tmp_path / "config.json")]
    optimizer = parse_arguments(words).config.optimizer
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction) == (3, 0.01)
    optimizer = parse_arguments([*words, "--lr-warmup-fraction", "0.2"]).config.optimizer
    assert (optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction) == (None, 0.2)


def test_yaml_may_be_nested_by_concern(tmp_path):
    text = "model:\n  num-layers: 3\ncheckpoint: {save: mine}\ndata:\n"
    arguments = parse_arguments(["--config", yaml_file(tmp_path, text)])
    assert arguments.config == Config().replace(model={"num_layers": 3}, checkpoint={"save": "mine"})
    assert arguments.remarks == ()
