"""The command line: derived from the settings, YAML below flags, underscores welcome, one line for a mistake;
settings that change by step, and settings without effect, which are named."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_ddrp.arguments import build_parser, parse_arguments
from megatron_ddrp.checkpoint import read_config, write_state
from megatron_ddrp.config import ENCODINGS, Config, changed_settings, concerns, flag, save_config
from megatron_ddrp.config.run import changed_model
from megatron_ddrp.config.training import MaskRates, parse_phases, phase_at
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.parallel.process_group import Ranks
from tests.refusals import refused, wrong_arguments

BASE = "--data-path x --train-iters 10"


def test_no_flag_gives_the_defaults_and_usage_leaves_out_what_the_manifest_says():
    arguments, parser = parse_arguments([]), build_parser()
    assert arguments.config == Config() and not arguments.dry_run
    assert "--data-path P [flags]" in parser.usage and "--vocab-file" not in parser.usage + parser.epilog


def test_every_setting_is_a_flag_in_the_section_of_its_concern():
    groups = {group.title: group._group_actions for group in build_parser()._action_groups}
    for section in concerns().values():
        fields = [f for f in dataclasses.fields(section) if f.name not in ("vocab_size", "decided_by_deepspeed_config")]
        got = [action.option_strings[0] for action in groups[section.__doc__]]
        assert got == [flag(f.name) for f in fields] and all(len(f.metadata["help"]) > 10 for f in fields)
        assert "\n" not in section.__doc__
        assert all(f.default in (None, *f.metadata.get("choices", [f.default])) for f in fields)
    flags = {name for action in build_parser()._actions for name in action.option_strings if name[:5] != "--no-"}
    own = {"-h", "--help", "--config", "--dry-run", "--world-size", "--vocab-size", "--device-memory", "--plugin"}
    own |= {"--local-rank", "--deepspeed"}
    settings = {flag(f.name) for s in concerns().values() for f in dataclasses.fields(s) if "help" in f.metadata}
    assert flags == own | settings and "--vocab-size" not in settings


def test_help_names_choices_defaults_and_sections(capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    pieces = ("{" + ",".join(ENCODINGS) + "}", "(default: 512)", "Objective:", "Checkpoints:", "--dry-run", "example:")
    assert end.value.code == 0 and [piece for piece in pieces if piece not in text] == []
    assert "==SUPPRESS==" not in text and "--local-rank" not in text


def test_blends_are_flags_of_several_words(tmp_path):
    words = ["--train-data-path", "0.3", "A", "0.7", "B", "--valid-data-path", "C", "--masking", "ngram"]
    config = parse_arguments(words).config
    assert config.data.train_data_path == ("0.3", "A", "0.7", "B") and config.data.valid_data_path == ("C",)
    assert config.data.split is None and config.objective.masking == "ngram"
    for text, paths in (("[0.3, A, 0.7, B]", ("0.3", "A", "0.7", "B")), ("A", ("A",))):
        assert with_yaml(tmp_path, f"data-path: {text}").data.data_path == paths


def test_underscores_count_as_dashes_and_the_launchers_own_flags_are_accepted(tmp_path):
    assert parse_arguments(["--num_layers", "3"]).config.model.num_layers == 3
    path = deepspeed_file(tmp_path)
    arguments = parse_arguments(["--local_rank=1", "--deepspeed", "--deepspeed_config", path, "--dry_run"])
    assert arguments.config.parallel.deepspeed_config == path and arguments.dry_run and arguments.remarks == ()


def yaml_file(tmp_path, text, name="run.yaml"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return str(tmp_path / name)


def with_yaml(tmp_path, text, *words):
    """Return the settings of a file and of flags."""
    return parse_arguments(["--config", yaml_file(tmp_path, text), *words]).config


def deepspeed_file(tmp_path, content=()):
    return yaml_file(tmp_path, json.dumps(dict(content)), "deepspeed.json")


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    text = "num-layers: 3\nhidden_size: 96\nlr: 2e-3\nbf16: true\nffn-hidden-size: null\nsave: 7\n"
    config = parse_arguments(["--hidden-size", "48", "--config", yaml_file(tmp_path, text)]).config
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (3, 48, 2e-3)
    assert config.training.bf16 and config.model.ffn_hidden_size is None and config.checkpoint.save == "7"
    assert config.model.num_attention_heads == 12 and isinstance(config.optimizer.lr, float)
    assert with_yaml(tmp_path, "seed: 5", "--seed", "1234").training.seed == 1234, "a flag that states the default"
    config = with_yaml(tmp_path, "packing: true\nbf16: true\n", "--no-packing", "--no_bf16")
    assert not config.data.packing and not config.training.bf16


def test_a_yaml_of_comments_changes_nothing_and_an_empty_one_is_refused(tmp_path):
    for nothing in ("# nothing yet\n", "model: {}\ndata:\n"):
        assert with_yaml(tmp_path, nothing) == Config()
    refused("--config .*: empty; write settings, or leave --config out", with_yaml, tmp_path, "")
    refused("nowhere.yaml: cannot be read: No such file", parse_arguments, ["--config", f"{tmp_path}/nowhere.yaml"])


MISTAKES = {
    "run.yaml": [
        ("num-layer: 3", "unknown setting 'num-layer'; did you mean num-layers?"),
        ("vocab-size: 3", "unknown setting 'vocab-size'"),
        ("num-layers: 2.5", "num-layers: got 2.5, expected a whole number"),
        ("position-encoding: rotary", "position-encoding: got 'rotary', expected one of absolute, "),
        ("- a list", "got a list"),
        ("a: b: c", "cannot be read"),
        ("num-layers: 0", "run.yaml: num-layers: got 0: it must lie in [1, 10000]"),
        ("num-layers: .inf", "num-layers: got inf, expected a whole number"),
    ],
    "config.json": [
        ('{"model": {"num_layer": 3}}', "model: unknown setting 'num_layer'; did you mean num_layers?"),
        ('{"modell": {"num_layers": 3}}', "unknown section 'modell'; expected model, objective, data"),
        ('{"model": 3, "data": {}}', "model: expected settings such as `num_layers: …`, got a int"),
        ('{"model": ', "cannot be read: Expecting value"),
    ],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_file_are_refused_in_one_line(tmp_path, name):
    for text, message in MISTAKES[name]:
        wrong_arguments(re.escape(message), parse_arguments, ["--config", yaml_file(tmp_path, text, name)])


MISTAKEN_FLAGS = {
    "--attention-backend flex": "invalid choice: 'flex'",
    "--padded-vocab-size 3": "unrecognized arguments: --padded-vocab-size",
    "--lr-warmup-iters 0 --lr-warmup-fraction 0.1": "exclude each other: give one of them",
}


@pytest.mark.parametrize("words", MISTAKEN_FLAGS)
def test_mistakes_in_flags_are_one_line_and_exit_code_2(words, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/pretrain_bert.py"])
    error = wrong_arguments(re.escape(MISTAKEN_FLAGS[words]), parse_arguments, words.split())
    assert str(error).endswith("(see pretrain_bert.py --help)")


def test_a_deepspeed_file_decides_what_no_flag_does(tmp_path):
    adam = {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-8, "weight_decay": 0.1, "adam_w_mode": True}
    content = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}
    content |= {"bf16": {"enabled": True}, "fp16": {"enabled": "auto", "loss_scale": 0}}
    content |= {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    path = deepspeed_file(tmp_path, content | {"optimizer": {"type": "Adam", "params": adam}})
    arguments = parse_arguments(["--deepspeed_config", path, "--seed", "5"])
    names = ("global_batch_size", "micro_batch_size", "clip_grad", "bf16", "zero_stage", "offload_optimizer", "lr")
    names += ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "optimizer")
    adamw = {"lr": 3e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-8, "weight_decay": 0.1, "clip_grad": 0.5}
    zero = {"zero_stage": 2, "offload_optimizer": "cpu", "deepspeed_config": path, "decided_by_deepspeed_config": names}
    training = {"global_batch_size": 64, "micro_batch_size": 4, "bf16": True, "seed": 5}
    assert arguments.config == Config().replace(training=training, optimizer=adamw, parallel=zero)
    assert arguments.remarks == (
        f"decided by --deepspeed-config {path}: --global-batch-size 64, --micro-batch-size 4, --clip-grad 0.5, "
        "--bf16 True, --zero-stage 2, --offload-optimizer cpu, --lr 0.0003, --adam-beta1 0.8, --adam-beta2 0.95, "
        "--adam-eps 1e-08, --weight-decay 0.1, --optimizer adamw",
    )
    assert Config.from_dict(json.loads(json.dumps(arguments.config.to_dict()))) == arguments.config


def test_a_flag_or_yaml_that_agrees_decides(tmp_path):
    content = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_clipping": 1}
    path = deepspeed_file(tmp_path, content)
    words = ["--deepspeed_config", path, "--zero-stage", "2", "--config", yaml_file(tmp_path, "clip-grad: 1.0")]
    arguments = parse_arguments(words)
    assert arguments.remarks == () and arguments.config.parallel.decided_by_deepspeed_config == ()


def test_accumulation_steps_are_a_global_batch_of_all_ranks_but_not_of_a_job_beside_them(tmp_path, monkeypatch):
    """`complete_environment` gives a run in the shell of `salloc -n 4` one rank."""

    def batch(*words):
        return parse_arguments(["--deepspeed_config", path, *words]).config.training.global_batch_size

    path = deepspeed_file(tmp_path, {"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 4})
    words = ["--dry-run", "--world-size", "8", "--tensor-model-parallel-size", "2"]
    assert (batch(*words), batch(*words, "--global-batch-size", "96")) == (3 * 4 * 4, 96)
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert batch() == 3 * 4
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert batch() == 3 * 4 * 4


ADAMW = '{"optimizer": {"type": "AdamW", "params": {%s}}}'
SAYS, OURS = "but the flags say", "our AdamW has no such setting"
CONTRADICTIONS = [
    ('{"zero_optimization": {"stage": 2}}', "--zero-stage 1", f".stage is 2 {SAYS} 1: set it by --zero-stage and"),
    ('{"fp16": {"enabled": true}}', "--bf16", f".enabled is True {SAYS} '--bf16'"),
    ('{"bf16": {"enabled": false}}', "--bf16", f".enabled is False {SAYS} True: set it by --bf16 "),
    (ADAMW % "", "--optimizer muon", f".type is 'adamw' {SAYS} 'muon'"),
    ('{"optimizer": {"type": "Lamb"}}', "", " is 'Lamb': expected AdamW; leave it out and give --lr"),
    (ADAMW % '"betas": [0.9]', "", f".params.betas is [0.9]: {OURS}"),
    ('{"zero_optimization": {"stage": 7}}', "", ".stage: got 7, expected one of 0, 1, 2, 3"),
]


@pytest.mark.parametrize(("text", "words", "message"), CONTRADICTIONS)
def test_a_deepspeed_file_may_not_contradict_a_flag(tmp_path, text, words, message):
    content = json.loads(text)
    path = deepspeed_file(tmp_path, content)
    line = f"^{re.escape(f'--deepspeed-config {path}: {next(iter(content))}{message}')}"
    refused(line, parse_arguments, ["--deepspeed_config", path, *words.split()])


def test_a_runs_own_file_is_a_config(tmp_path):
    words = "--num-layers 3 --objective electra --save old --load old --adam-eps 1e-8 --position-encoding absolute"
    config = parse_arguments(words.split()).config.replace(model={"vocab_size": 999})
    save_config(config, tmp_path)
    path = str(tmp_path / "config.json")
    arguments = parse_arguments(["--config", path, "--save", "new"])
    assert arguments.config == config.replace(model={"vocab_size": 30522}, checkpoint={"save": "new", "load": None})
    assert arguments.remarks == (f"--config {path}: --save, --load of that run not taken; give your own",)
    changes = {"checkpoint": {"save": "old", "load": "import"}, "training": {"new_head_iters": 200}}
    save_config(Config().replace(**changes, logging={"profile": True}), tmp_path)
    config = parse_arguments(["--config", path, "--load", "import", "--save", "new"]).config
    assert config.training.new_head_iters == 200 and config.logging.profile


def test_flags_win_over_settings_of_a_file_that_they_exclude_and_over_what_belongs_to_others(tmp_path):
    wsd = "lr-decay-style: wsd\nlr-wsd-decay-iters: 100\nlr-wsd-decay-style: minus_sqrt\n"
    for content, words in (
        ("data-path: A\nsplit: '90,10,0'\n", "--train-data-path X --valid-data-path Y"),
        ("train-data-path: A\nvalid-data-path: B\n", "--data-path X"),
        ("fp16: true\n", "--bf16"),
        ("bf16: true\n", "--fp16"),
        (wsd, "--lr-decay-style cosine"),
        ("vocab-file: v.txt\n", "--tokenizer-type HuggingFace --tokenizer-model X"),
        ("tokenizer-type: HuggingFace\ntokenizer-model: X\n", "--tokenizer-type BertWordPieceCase --vocab-file v.txt"),
        ("optimizer: muon\noptimizer-options: [scale=0.2]\nzero-stage: 0\n", "--optimizer adamw --zero-stage 1"),
    ):
        assert with_yaml(tmp_path, content, *words.split()) == parse_arguments(words.split()).config
    assert with_yaml(tmp_path, "fp16: true\n", "--no-bf16").training.fp16
    assert with_yaml(tmp_path, wsd, "--lr-decay-style", "wsd", "--lr", "1e-3").optimizer.lr_wsd_decay_iters == 100


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
    config = with_yaml(tmp_path, "objective-options: [weight=2]\n", "--objective", "token-contrast")
    assert config.objective.objective_options == ("weight=2.0", "margin=0.5")


def test_a_runs_own_file_decides_its_defaults_too(tmp_path):
    save_config(Config().replace(model={"vocab_size": 999}), tmp_path)
    words = ["--config", str(tmp_path / "config.json")]
    path = deepspeed_file(tmp_path, {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}})
    line = r"optimizer\.params\.lr is 0\.003 but the flags say 0\.0001"
    refused(line, parse_arguments, [*words, "--deepspeed_config", path])
    path = deepspeed_file(tmp_path, {"gradient_accumulation_steps": 7})
    of_file = parse_arguments([*words, "--deepspeed_config", path]).config
    assert of_file.training.global_batch_size == Config().training.global_batch_size
    longer = parse_arguments([*words, "--max-position-embeddings", "1024"]).config
    assert longer.model.seq_length == Config().model.seq_length
    other = ["--objective", "mlm", "--position-encoding", "absolute"]
    assert parse_arguments([*words, *other]).config == parse_arguments(other).config


def warm_up(path, *words):
    """Return the steps of a file's warm-up, if given, its share, and what it comes to in 100 steps."""
    optimizer = parse_arguments(["--config", str(path), *words]).config.optimizer
    return optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction, optimizer.warmup_steps(100)


def test_a_warm_up_of_flags_wins_over_that_of_a_file_in_the_other_unit(tmp_path):
    path, share = yaml_file(tmp_path, "lr-warmup-iters: 7\ntrain-iters: 100\n"), Config().optimizer.lr_warmup_fraction
    assert warm_up(path) == (7, share, 7) and warm_up(path, "--lr-warmup-fraction", "0.5") == (None, 0.5, 50)
    path = yaml_file(tmp_path, "lr-warmup-fraction: 0.5\ntrain-iters: 100\n")
    assert warm_up(path) == (None, 0.5, 50)
    for words in ("--lr-warmup-iters 3", "--lr-warmup-samples 30 --global-batch-size 10"):
        assert warm_up(path, *words.split()) == (3, share, 3)


def test_a_file_has_one_warm_up_and_a_runs_own_may_have_both(tmp_path):
    for form in ("{}\n{}\n", "optimizer:\n  {}\n  {}\n"):
        path = yaml_file(tmp_path, form.format("lr_warmup_fraction: 0.05", "lr-warmup-iters: 0"))
        line = f"--config {path}: lr_warmup_iters and lr_warmup_fraction exclude each other: give one of them"
        assert str(wrong_arguments("--config", parse_arguments, ["--config", path])) == line
        path = yaml_file(tmp_path, form.format("lr_warmup_fraction: 0.05", "lr-warmup-iters: null"))
        assert warm_up(path) == (None, 0.05, 5)
    for share in (0.01, 0.05):
        optimizer = {"lr_warmup_iters": 3, "lr_warmup_fraction": share}
        save_config(Config().replace(model={"vocab_size": 999}, optimizer=optimizer), tmp_path)
        assert warm_up(tmp_path / "config.json") == (3, 0.01, 3)
        assert warm_up(tmp_path / "config.json", "--lr-warmup-fraction", "0.2") == (None, 0.2, 20)


def test_a_rate_goes_from_its_start_by_equal_steps_and_one_stays_to_the_last_bit() -> None:
    rates = MaskRates.parse("0.3:0.15")
    assert [rates.at(done, 3) for done in range(4)] == pytest.approx([0.3, 0.25, 0.2, 0.15])
    assert rates.at(9, 3) == rates.end and rates.mean == pytest.approx(0.225)
    for rate in (0.15, 0.1 + 0.2):
        assert {MaskRates.parse(rate).at(done, 7) for done in range(8)} == {rate}
    before, after = Config().to_dict(), Config().replace(objective={"mask_prob": "0.3:0.15"})
    assert changed_settings(before, after) == ["--mask-prob: 0.15 → 0.3:0.15"]


def by_flag_and_by_yaml(folder: Path, words: list[str], line: str) -> Iterator[Config]:
    """Yield the settings of flags and those of a line in a file, which come back from JSON."""
    for given in (words, ["--config", yaml_file(folder, line)]):
        config = parse_arguments([*given, "--train-iters", "10"]).config
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        yield config


def test_rates_are_stored_in_one_way_and_what_is_none_is_refused(tmp_path: Path) -> None:
    for value, stored in ((0.4, 0.4), ("0.4", 0.4), ("0.3:0.15", "0.3:0.15"), ("0.20:.2", 0.2)):
        for config in by_flag_and_by_yaml(tmp_path, ["--mask-prob", str(value)], f"mask-prob: {value}"):
            assert config.objective.mask_prob == stored
    for value in ("0.3:1.5", "0:0.1", "0.3:", "many", "0.1:0.2:0.3", True, None, [0.3]):
        wrong_arguments("--mask-prob is ", Config().replace, objective={"mask_prob": value})


def test_each_step_has_its_phase_and_one_may_be_the_whole_run() -> None:
    phases = parse_phases(("128:0.7", "256:0.9"), 512)
    lengths = [phase_at(phases, done, 10).seq_length for done in range(11)]
    assert lengths == [128] * 7 + [256] * 2 + [512] * 2
    assert [phase_at(phases, done, 1).seq_length for done in (0, 1)] == [128, 512]
    assert phase_at(parse_phases((), 512), 0, 10).seq_length == 512
    config = Config().replace(training={"seq_length_phases": ("128:1",), "train_iters": 7})
    assert [phase_at(config.phases, done, 7).seq_length for done in range(7)] == [128] * 7
    assert config.mean_seq_length == 128 and config.model.seq_length == 512


def test_a_causal_phase_comes_from_the_command_line_and_from_yaml_and_ends_at_its_share(tmp_path: Path) -> None:
    for config in by_flag_and_by_yaml(tmp_path, ["--objective-phases", "clm:0.7"], "objective-phases: clm:0.7"):
        setup = Setup(config, Ranks(0, 1, torch.device("cpu")))
        assert [setup.at(step).causal for step in range(1, 11)] == [True] * 7 + [False] * 3
        assert [setup.at(step).objective.labels["clm_loss"] for step in (1, 7)] == ["clm", "clm"]
        assert setup.at(8) is setup and "clm_loss" not in setup.objective.labels
    assert changed_settings(Config().to_dict(), config)[0] == "--objective-phases: none → clm:0.7"
    line = "invalid choice: 'clm'.*; clm comes before another .* by --objective-phases clm:1"
    refused(line, parse_arguments, ["--objective", "clm"])


def test_theta_switches_with_the_phase_also_in_a_checkpoint(tmp_path: Path) -> None:
    training = {"seq_length_phases": ("16:0.5:10000", "32:0.75"), "train_iters": 8}
    rope = {"position_encoding": "rope", "relative_distance": None, "seq_length": 64, "rope_theta": 160_000.0}
    config = Config().replace(model=rope, training=training)
    assert [config.rope_theta_at(done) for done in range(8)] == [10_000.0] * 4 + [160_000.0] * 4
    assert config.mean_seq_length == 16 / 2 + 32 / 4 + 64 / 4
    for iteration, theta in ((0, 10_000.0), (4, 10_000.0), (5, 160_000.0)):
        write_state(tmp_path, {"iteration": iteration, "config": config.to_dict()})
        assert read_config(tmp_path).model.rope_theta == theta


def test_phases_come_from_the_command_line_and_from_yaml_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    for words, message in {
        "128": "expected LENGTH:END",
        "128:x": "expected LENGTH:END",
        "128:0.9:1:1": "expected LENGTH:END",
        "2:0.9": r"it must be at least 3 and below 2\^31",
        "128:1.1": "it must lie in",
        "128:1 256:1": "growing ends, at most 1",
        "128:0.9:0.5": "it must be at least 1",
        "512:0.9": "of growing lengths below --seq-length 512",
        "128:0.9 256:0.7": "growing ends",
        "128:0.9:10000": "--position-encoding ddrp, which has none",
        "128:0.1": "128:0.1 has no step: it begins after step 0 and ends with step 0 of --train-iters 4; give",
        "128:0.5 256:0.6": "256:0.6 has no step: it begins after step 2 and ends with step 2 of --train-iters 4",
    }.items():
        training = {"seq_length_phases": tuple(words.split()), "train_iters": 4}
        wrong_arguments(f"^--seq-length-phases.*{message}", Config().replace, training=training)
    flags, line = ["--seq-length-phases", "128:0.7", "256:0.9"], 'seq-length-phases: ["128:0.7", "256:0.9"]'
    for config in by_flag_and_by_yaml(tmp_path, flags, line):
        assert config.training.seq_length_phases == ("128:0.7", "256:0.9")
    refused("quote it in YAML", with_yaml, tmp_path, "seq-length-phases: 128:0.9\n")  # a time to YAML


def remarks(words: str) -> tuple[str, ...]:
    return parse_arguments(f"{BASE} {words}".split()).remarks


WITH_EFFECT = (
    "--local-attention 64 --global-every 2",
    "--position-encoding rope --rope-theta 5000",
    "--direction-init free --relative-table per-layer",
    "--objective electra --generator-size 0.5 --rtd-weight 10",
    "--tcd-tokens 20 --hcd-heads 4",
    "--objective mlm --tcd-weight 0.5 --tcd-tokens 20",
    "--notes --notes-window 8",
    "--profile --save out --profile-step-start 3",
    "--global-every 3 --rope-theta 10000 --objective mlm --tcd-tokens 50",  # the defaults
    "--lr-decay-iters 1000 --lr-warmup-fraction 0.01",
)


def test_a_setting_without_effect_is_named_and_one_that_acts_or_is_the_default_is_not():
    for words, remark in {
        "--global-every 2": "--global-every 2 (without --local-attention)",
        "--rope-theta 5000": "--rope-theta 5000.0 (with --position-encoding ddrp)",
        "--position-encoding t5 --direction-init free": "--direction-init free (with --position-encoding t5)",
        "--position-encoding rope --relative-table per-layer": "per-layer (with --position-encoding rope)",
        "--generator-size 0.5": "--generator-size 0.5 (with --objective mth)",
        "--objective rtd --generator-size 0.5": "--generator-size 0.5 (with --objective rtd)",
        "--objective mlm --tcd-tokens 20": "--tcd-tokens 20 (without TCD (--tcd-weight 0))",
        "--hcd-weight 0 --hcd-heads 4": "--hcd-heads 4 (without HCD (--hcd-weight 0))",
        "--notes-window 8": "--notes-window 8 (without --notes)",
        "--lr-decay-style constant --min-lr 1e-5": "--min-lr 1e-05 (with --lr-decay-style constant)",
        "--eval-interval 0 --other-data-path P": "--other-data-path P (without validation)",
        "--eval-iters 0 --eval-mask-prob 0.3": "--eval-mask-prob 0.3 (without validation)",
        "--milestone-interval 5": "--milestone-interval 5 (without --keep-last)",
        "--profile-step-start 3": "--profile-step-start 3 (without --profile)",
    }.items():
        (line,) = remarks(words)
        assert line.startswith("without effect: ") and line.endswith(remark)
    assert {words: remarks(words) for words in WITH_EFFECT} == dict.fromkeys(WITH_EFFECT, ())


def test_a_warm_up_that_outlasts_the_run_is_named_and_a_setting_without_effect_is_no_change_of_the_model():
    (line,) = remarks("--lr-decay-iters 2000 --lr-warmup-fraction 0.01")
    steps = "--lr-warmup-fraction 0.01 of --lr-decay-iters 2000 is 20 steps, more than --train-iters 10"
    assert line == f"{steps}: the peak of the learning rate is never reached"
    for encoding, changed in (("t5", []), ("rope", ["rope_theta"])):
        words = [*BASE.split(), "--position-encoding", encoding]
        first, second = (parse_arguments(words + more).config for more in ([], ["--rope-theta", "500"]))
        assert changed_model(first, second) == changed
