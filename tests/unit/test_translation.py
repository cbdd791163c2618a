"""Scripts of Megatron-LM and files of DeepSpeed: what is taken, under which of our names, and what is refused."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp import memory
from megatron_ddrp.arguments import Arguments, build_parser, parse_arguments
from megatron_ddrp.config import Config, ParallelConfig, translation
from megatron_ddrp.config.reading import Place
from megatron_ddrp.config.translation import BY_VALUE, KNOWN, REMEDIES, RENAMED, RULES, SUPPORTED, translate
from megatron_ddrp.engine import layout as deepspeed_file
from megatron_ddrp.engine.build import deepspeed_settings
from megatron_ddrp.engine.layout import LOWEST_DEEPSPEED, Setup, import_quietly, offload_device, read_settings
from megatron_ddrp.lab.compare.plan import make_config, read_flags
from tests.refusals import refused, wrong_arguments

SCRIPT = """
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096 --kv-channels 64 --seq-length 512
--max-position-embeddings 512 --attention-backend flash --init-method-std 0.02 --hidden-dropout 0.1
--attention-dropout 0.1 --normalization LayerNorm --norm-epsilon 1e-5 --position-embedding-type learned_absolute
--micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 --lr 0.0001 --lr-decay-iters 990000
--lr-decay-style linear --min-lr 1.0e-5 --lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0
--optimizer adam --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8 --seed 1234 --bf16
--attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 65536
--no-query-key-layer-scaling --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --distributed-backend nccl
--distributed-timeout-minutes 60 --DDP-impl local --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --use-flash-attn --transformer-impl local --no-masked-softmax-fusion
--no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce --data-path 0.3 wiki 0.7 books
--vocab-file vocab.txt --tokenizer-type BertWordPieceLowerCase --vocab-extra-ids 0
--make-vocab-size-divisible-by 128 --split 949,50,1 --data-impl mmap --mmap-warmup --num-workers 2
--dataloader-type single --data-cache-path cache --short-seq-prob 0.1 --mask-prob 0.15 --eod-mask-loss
--bert-no-binary-head --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save run
--load run --ckpt-format torch_dist --tensorboard-dir tb --log-params-norm --log-num-zeros-in-grad
--log-timers-to-tensorboard --wandb-exp-name base --exit-duration-in-mins 230
"""
"""The example of the 340M model (examples/bert/train_bert_340m_distributed.sh, several years' versions) with what its
users add: 79 flags."""


def refusal(words: str) -> str:
    return str(wrong_arguments(".", parse_arguments, shlex.split(words)))


def read(words: str) -> Arguments:
    return parse_arguments(shlex.split(words))


def test_a_script_of_79_flags_is_refused_for_one_of_them_with_the_reason() -> None:
    flags = re.findall(r"--[\w-]+", SCRIPT)
    assert len(flags) == len(set(flags)) == 79
    error = refusal(SCRIPT)
    refused = re.findall(r"--[\w-]+", error.partition(";")[0])
    assert refused == ["--short-seq-prob"] and "no sequence is cut short at random" in error
    arguments = read(SCRIPT.replace("--short-seq-prob 0.1", ""))
    without, renamed, defaults, idle = arguments.remarks
    assert without.startswith("taken from Megatron-LM and without effect here: --attention-softmax-in-fp32, --no-query")
    assert all(words in without for words in ("--DDP-impl local", "--max-position-embeddings 512", "--kv-channels 64"))
    assert renamed == (
        "taken from Megatron-LM: --attention-backend flash as --attention-backend auto, --normalization LayerNorm as "
        "--norm layernorm, --norm-epsilon 1e-5 as --layernorm-epsilon 1e-5, --position-embedding-type learned_absolute "
        "as --position-encoding absolute, --optimizer adam as --optimizer adamw, --recompute-granularity full as "
        "--checkpoint-activations, --data-cache-path cache as --index-cache-dir cache, --bert-no-binary-head as "
        "--num-segments 0"
    )
    assert defaults == (
        "defaults here that are not Megatron-LM's: --objective mth (there mlm, and next-sentence prediction unless "
        "--bert-no-binary-head), --masking whole-word (there ngram), --layernorm-position post (there pre)"
    )
    assert idle == "without effect: --index-cache-dir cache (without --notes)"
    model, config = arguments.config.model, arguments.config
    assert (model.position_encoding, model.num_segments, model.layernorm_epsilon) == ("absolute", 0, 1e-5)
    assert config.parallel.checkpoint_activations and config.data.data_path == ("0.3", "wiki", "0.7", "books")
    assert config.optimizer.lr_decay_iters == 990_000 and config.optimizer.warmup_steps(1_000_000) == 9_900


def test_our_own_flags_and_words_after_two_dashes_say_nothing_more() -> None:
    assert read("--lr-warmup-iters 5 --train-iters 10 --log-interval 1 --adam-beta1 0.9").remarks == ()
    text = build_parser().format_help()
    assert "--num-workers" not in text and "docs/foreign-files.md" in text
    left, taken = translate(["--num-workers=3", "--mmap_warmup", "a", "--", "--num-workers", "4"])
    assert left == ["a", "--", "--num-workers", "4"]
    assert [(found.typed, found.ours({})) for found in taken] == [("--num-workers=3", []), ("--mmap_warmup", [])]


def test_a_number_of_samples_becomes_steps() -> None:
    arguments = read("--global-batch-size 256 --train-samples 25700 --lr-decay-samples 25600 --lr-warmup-samples 1000")
    optimizer = arguments.config.optimizer
    assert (arguments.config.training.train_iters, optimizer.lr_decay_iters, optimizer.lr_warmup_iters) == (100, 100, 4)
    assert arguments.remarks[0] == (
        "taken from Megatron-LM: --train-samples 25700 as --train-iters 100, --lr-decay-samples 25600 as "
        "--lr-decay-iters 100, --lr-warmup-samples 1000 as --lr-warmup-iters 4"
    )


REACHED = [
    ("--batch-size 3", "training", "micro_batch_size", 3),
    ("--apply-residual-connection-post-layernorm", "model", "layernorm_position", "post"),
    ("--warmup .5", "optimizer", "lr_warmup_fraction", 0.5),
    ("--max-position-embeddings 64", "model", "seq_length", 64),
    ("--cpu_optimizer", "parallel", "offload_optimizer", "cpu"),
    ("--no-pipeline-parallel", "parallel", "pipeline_model_parallel_size", 1),
    ("--position-embedding-type rope", "model", "position_encoding", "rope"),
    ("--position-embedding-type none", "model", "position_encoding", "nope"),
    ("--norm-epsilon=1e-5", "model", "layernorm_epsilon", 1e-5),
    ("--tokenizer-type HFTokenizer", "data", "tokenizer_type", "HuggingFace"),
]


@pytest.mark.parametrize(("words", "section", "setting", "value"), REACHED)
def test_a_renamed_flag_reaches_its_field(words: str, section: str, setting: str, value: object) -> None:
    arguments = read(words)
    assert getattr(getattr(arguments.config, section), setting) == value
    assert arguments.remarks[0].startswith(f"taken from Megatron-LM: {words} as --")


@pytest.mark.parametrize("name", sorted(RENAMED) + sorted(BY_VALUE))
def test_every_translation_is_a_command_line_of_ours(name: str) -> None:
    values = list(BY_VALUE[name].words.values()) if name in BY_VALUE else [RENAMED[name].replace("{}", "1")]
    for words in values:
        build_parser().parse_args(words.split())


SUMS = "--accumulate-allreduce-grads-in-fp32"
MEAN_SOMETHING_ELSE = [
    ("--num-attention-heads 0 --kv-channels 64", "--num-attention-heads is 0: "),  # by which a foreign flag divides
    ("--global-batch-size 0 --train-samples 9", "--global-batch-size is 0: "),
    ("--data-impl cached", "--data-impl cached; only the memory-mapped format is read"),
    ("--vocab-extra-ids 100", "no piece is added to the tokenizer's"),
    ("--max-position-embeddings 64 --seq-length 128", "--max-position-embeddings 64; it is below --seq-length 128"),
    ("--kv-channels 32", "a head has --hidden-size / --num-attention-heads = 64 channels"),
    (f"--fp16 {SUMS}", "under --fp16 gradients add up in fp16"),
    (f"--bf16 {SUMS} --cpu-optimizer --pipeline-model-parallel-size 2", "an offloaded pipeline"),
    ("--fp16 --loss-scale 1024", "set fp16.loss_scale in --deepspeed-config"),
    ("--fp16 --hysteresis 3", "set fp16.hysteresis in --deepspeed-config; it is 2 here"),
    ("--train-samples many", "--train-samples many; expected a whole number"),
    ("--micro-batch-size 2 --batch-size 4", "--batch-size 4 is --micro-batch-size 4 here, but --micro-batch-size is 2"),
    ("--train-iters 5 --train-samples 2560", "--train-samples 2560 is --train-iters 10 here, but --train-iters is 5"),
    ("--num-workers", "unrecognized arguments: --num-workers; "),
    ("--tensor-model-parallel 8", "did you mean --tensor-model-parallel-size?"),
    ("--lerning-rate 8", "; did you mean --learning-rate? use --lr "),
    ("--num_gpus 2", "give it to the launcher: deepspeed --num_gpus N"),
    ("--finetune --no-load-optim", "--finetune (to begin from weights alone"),
    ("--swiglu", "unrecognized arguments: --swiglu (see"),
    ("--optimizer sgd", "invalid choice: 'sgd'"),
    ("--fp16 True", "unrecognized arguments: True; a switch takes no value"),
    ("--deepspeed ds.json", "it takes no value; give --deepspeed_config FILE"),
]


@pytest.mark.parametrize(("words", "message"), MEAN_SOMETHING_ELSE)
def test_what_means_something_else_is_refused(words: str, message: str) -> None:
    assert message in refusal(words)


def test_all_refused_flags_are_in_one_error() -> None:
    assert refusal("--rampup-batch-size 16 8 300 --kv-channels 3 --swiglu --learning-rate 1 --numlayers 3").startswith(
        "unrecognized arguments: --rampup-batch-size 16 8 300 (the batch size is constant: "
        "give --global-batch-size alone), --swiglu, --learning-rate 1 (use --lr), "
        "--numlayers 3 (did you mean --num-layers?), --kv-channels 3 (a head has"
    )


def test_scaling_and_wsd_are_megatrons_only_under_fp16_and_with_their_style() -> None:
    words = "--bf16 --initial-loss-scale 4096 --min-loss-scale 2 --hysteresis 5 --loss-scale 7 --loss-scale-window 3"
    assert read(words).config.training == Config().replace(training={"bf16": True}).training
    remark = "--lr-wsd-decay-style linear (there exponential, under WSD)"
    words = "--num-workers 2 --train-iters 100 --lr-wsd-decay-iters 10 --lr-decay-style WSD"
    assert remark in read(words).remarks[-1]
    for others in (f"{words} --lr-wsd-decay-style linear", "--num-workers 2"):
        assert "wsd" not in read(others).remarks[-1]


def test_the_tables_hold_each_flag_once_and_none_of_ours() -> None:
    own = {name[2:] for action in build_parser()._actions for name in action.option_strings}
    read_by_value = {name.rstrip("=") for name, by_value in BY_VALUE.items() if by_value.otherwise is None}
    assert set(KNOWN) & own == read_by_value and not set(REMEDIES) & own
    assert set(REMEDIES) & set(KNOWN) == {"train-samples", "lr-decay-samples", "lr-warmup-samples"}
    names = [*" ".join(translation.WITHOUT_EFFECT.values()).split(), *RENAMED, *BY_VALUE, *RULES]
    assert len({name.rstrip("=") for name in names}) == len(names) == len(KNOWN)
    ours = {name: value for concern in Config().to_dict().values() for name, value in concern.items()}
    assert all(ours[name] != theirs for name, theirs in translation.THEIR_DEFAULTS.items())


@pytest.mark.parametrize("name", sorted(set(REMEDIES) - set(KNOWN)))
def test_habits_from_elsewhere_get_the_flag_of_ours(name: str) -> None:
    typed = f"--{name.replace('-', '_')} 1"
    assert f"{typed}; {REMEDIES[name]}" in refusal(typed)
    own = {flag for action in build_parser()._actions for flag in action.option_strings} | {"--from-hf"}
    theirs = {"--num_gpus", "--module", "--nproc-per-node"}  # the launchers'
    assert set(re.findall(r"--[a-z][\w-]*", REMEDIES[name])) <= own | theirs


def test_yaml_gets_the_same_hints_and_a_renamed_flag_wins_over_it_as_ours_do(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, hint in (
        ("num-workers: 2", "unknown setting 'num-workers'; it is Megatron-LM's and without effect here: leave it out"),
        ("learning_rate: 1", "unknown setting 'learning_rate'; use --lr"),
        ("train-samples: 1", "unknown setting 'train-samples'; use --train-iters"),
    ):
        path.write_text(text, encoding="utf-8")
        refused(re.escape(hint), read, f"--config {path}")
    hint = "plan.yaml: unknown setting 'learning_rate'; use --lr"
    refused(hint, read_flags, {"learning_rate": 1}, Place("plan.yaml"))
    path.write_text("train-iters: 7\nmicro-batch-size: 7\nglobal-batch-size: 14\n", encoding="utf-8")
    training = read(f"--config {path} --train-samples 42 --batch-size 2").config.training
    assert (training.train_iters, training.micro_batch_size, training.global_batch_size) == (3, 2, 14)
    arguments = parse_arguments(["--data-cache-path", "my cache/of indices"])
    assert arguments.config.data.index_cache_dir == "my cache/of indices"


def test_a_deepspeed_file_contradicts_sums_in_fp32_and_decides_a_plan_as_a_run(tmp_path: Path) -> None:
    path = written(tmp_path, '{"data_types": {"grad_accum_dtype": "bf16"}}')
    words, settings = f"--bf16 {SUMS} --deepspeed_config {path}", {"deepspeed_config": path}
    assert "data_types.grad_accum_dtype is 'bf16'" in refusal(words)
    written(tmp_path, '{"data_types": {"grad_accum_dtype": "fp32"}}')
    assert read(words).config.training.bf16
    written(tmp_path, '{"train_batch_size": 64}')
    assert make_config(settings, "plan").training.global_batch_size == 64
    written(tmp_path, '{"gradient_accumulation_steps": 2}')
    refused("plan: --deepspeed-config .* depend on the number of ranks", make_config, settings, "plan")


def written(folder: Path, text: str) -> str:
    (folder / "deepspeed.json").write_text(text, encoding="utf-8")
    return str(folder / "deepspeed.json")


def read_file(folder: Path, text: str, zero_stage: int = 1, device_type: str = "cpu") -> dict[str, Any]:
    return read_settings(ParallelConfig(deepspeed_config=written(folder, text), zero_stage=zero_stage), device_type)


ZERO = '{"zero_optimization": {%s}}'
OFFLOAD = ZERO % '"offload_optimizer": {"device": "cpu"}'
WHOLE = "json: fp16: fp16.min_loss_scale must be > 0 when dynamic loss scaling is enabled (loss_scale=0); change it"
UNKNOWN = [
    ('{"zero_optimisation": {"stage": 2}}', "no setting zero_optimisation; did you mean zero_optimization?"),
    (ZERO % '"offload_optimizer": {"devise": "cpu"}', "did you mean zero_optimization.offload_optimizer.device?"),
    (ZERO % '"stage3_prefetch_bucketsize": 1', "did you mean zero_optimization.stage3_prefetch_bucket_size?"),
    ('{"bf16": {"enable": true}}', "no setting bf16.enable; did you mean bf16.enabled?"),
    ('{"fp16": {"initial_scale": 8}}', "did you mean fp16.initial_scale_power?"),
    ('{"activation_checkpointing": {"profiles": true}}', "did you mean activation_checkpointing.profile?"),
    ('{"tensorboard": {"output_dir": "x"}}', "did you mean tensorboard.output_path?"),
    ('{"pipeline": {"partitions": "uniform"}}', "did you mean pipeline.partition?"),
    ('{"zzz": 1}', "no setting zzz; it knows activation_checkpointing, "),
    (ZERO % '"reduce_bucket_size": "many"', "zero_optimization.reduce_bucket_size is 'many'"),
    ('{"zero_optimization": 3}', "zero_optimization is 3: expected a JSON object"),
    (ZERO % '"offload_param": {"device": "cpu"}', "offload_param needs --zero-stage 3"),
    (ZERO % '"zenflow": {"topk_ratio": 0.1}', "zero_optimization.zenflow: it needs DeepSpeed's"),
    ('{"fp16": {"enabled": true, "min_loss_scale": 0}}', WHOLE),
    ("[" * 100_000, "cannot be read"),
    ("[1]", "expected a JSON object"),
]


@pytest.mark.parametrize(("text", "words"), UNKNOWN)
def test_what_deepspeed_does_not_know_is_refused(text: str, words: str, tmp_path: Path) -> None:
    error = wrong_arguments(re.escape(words), read_file, tmp_path, text)
    assert str(error).startswith(f"--deepspeed-config {tmp_path / 'deepspeed.json'}: ")


SWITCHED_ON = """optimizer.params.amsgrad data_efficiency.enabled data_efficiency.data_routing.random_ltd.enabled
fp16.auto_cast torch_autocast.enabled bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
fp16.fp16_master_weights_and_grads zero_optimization.offload_optimizer.super_offload zero_optimization.cpu_offload
zero_optimization.cpu_offload_param zero_optimization.cpu_offload_use_pin_memory autotuning.enabled
hybrid_engine.enabled expert_parallel.enabled compile.deepcompile zero_force_ds_cpu_optimizer"""
SWITCHED_OFF = """optimizer.params.adam_w_mode optimizer.params.bias_correction managed_gradient_accumulation
bf16.check_grad_overflow zero_optimization.compute_grad_norm"""
NO_RUN_WORKS_WITH = {
    **dict.fromkeys(SWITCHED_ON.split(), True),
    **dict.fromkeys(SWITCHED_OFF.split(), False),
    **{"optimizer.params.torch_adam": "often", "gradient_allreduce_op": "sum"},
    **{"tensor_parallel.autotp_size": 2, "zero_optimization.offload_optimizer.ratio": 0.5},
}


def test_values_with_which_no_run_works_are_refused_with_their_reasons(tmp_path: Path) -> None:
    assert NO_RUN_WORKS_WITH.keys() == SUPPORTED.keys()
    for key, value in NO_RUN_WORKS_WITH.items():
        content = value
        for name in reversed(key.split(".")):
            content = {name: content}
        if "optimizer" in content:
            content["optimizer"]["type"] = "AdamW"
        words = f"--deepspeed-config {tmp_path / 'deepspeed.json'}: {key} is {value!r}: {SUPPORTED[key][1]}"
        wrong_arguments(re.escape(words), read_file, tmp_path, json.dumps(content))


PREDIVIDED = "gradient_predivide_factor and prescale_gradients need"
QUANTIZED = '"stage": 3, "zero_quantized_weights": true, "zero_quantized_gradients": false'
DEPENDS = [
    ('{"gradient_predivide_factor": 2.0}', (1,), (2,), PREDIVIDED),
    ('{"prescale_gradients": true}', (1,), (3,), f"{PREDIVIDED} --zero-stage 0"),
    (ZERO % QUANTIZED, (3, "cuda"), (3, "cpu"), "zero_quantized_weights is True: its kernels need a GPU"),
    (OFFLOAD, (1,), (0,), "offload_optimizer needs --zero-stage 1 or 2 or 3, not 0"),
]
"""Text of a file, the stage and the device that it fits and those that it does not, and the reason."""


@pytest.mark.parametrize(("text", "fits", "misfits", "reason"), DEPENDS)
def test_settings_that_depend_on_the_stage_or_the_device(text, fits, misfits, reason, tmp_path):
    assert read_file(tmp_path, text, *fits) == json.loads(text)
    refused(reason, read_file, tmp_path, text, *misfits)


@pytest.mark.parametrize("given", [{}, {"stage": "auto"}, {"stage": 2}])
def test_a_section_is_checked_at_the_stage_of_the_run(given, tmp_path, monkeypatch):
    import_quietly()
    from deepspeed.runtime.zero import config

    seen: list[int] = []
    monkeypatch.setattr(config, "DeepSpeedZeroConfig", lambda **values: seen.append(values["stage"]))
    read_file(tmp_path, json.dumps({"zero_optimization": given}), zero_stage=2)
    assert seen == [2]


def test_an_older_deepspeed_is_refused_in_one_line_and_a_newer_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.17.6", "0.19.7+cu128", "0.9.10", "0.19.8", "0.19.10", "0.20.0.dev1", "1.0"):
        monkeypatch.setattr(deepspeed_file, "deepspeed_version", lambda version=version: version)
        if version in ("0.17.6", "0.19.7+cu128", "0.9.10"):
            line = f"DeepSpeed {re.escape(version)} .*: pip install 'deepspeed>=0.19.8'"
            wrong_arguments(line, deepspeed_file.refuse_old_deepspeed)
        else:
            deepspeed_file.refuse_old_deepspeed()
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"deepspeed>={LOWEST_DEEPSPEED}"' in text


def test_what_deepspeed_knows_is_taken(tmp_path: Path) -> None:
    text = """{"zero_optimization": {"stage": "auto", "stage3_param_persistence_threshold": 7, "overlap_comm": false},
        "fp16": {"initial_scale_power": 8, "auto_cast": false}, "bf16": "auto", "wall_clock_breakdown": true,
        "gradient_allreduce_op": "mean", "managed_gradient_accumulation": true, "train_batch_size": "auto",
        "data_efficiency": {"enabled": false, "seed": 7}, "activation_checkpointing": {"profile": true},
        "flops_profiler": {"enabled": true, "profile_step": 3}, "csv_monitor": {"enabled": true, "output_path": "x"}}"""
    assert read_file(tmp_path, text) == json.loads(text)
    assert read_settings(ParallelConfig(), "cpu") == {}


class Asked(dict):
    """Notes the keys that it is asked for."""

    names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Asked:
        return self


def test_every_key_that_deepspeed_asks_for_is_known_here() -> None:
    import_quietly()
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig

    asked = Asked(train_batch_size=8)
    assert copy.copy(asked) is asked
    DeepSpeedConfig(asked)
    assert len(Asked.names) > 40
    assert Asked.names - set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) - {"bfloat16"} == set(translation.TOP_LEVEL)


def test_numbers_that_are_said_to_be_deepspeeds_defaults_are_those() -> None:
    import_quietly()
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero, fp16 = DeepSpeedZeroConfig(), DeepSpeedFP16Config(enabled=True)
    assert (zero.param_persistence_threshold, zero.prefetch_bucket_size) == (memory.PERSISTENT, memory.PREFETCHED)
    usual = {"--initial-loss-scale": 2**fp16.initial_scale_power, "--min-loss-scale": fp16.min_loss_scale}
    usual |= {"--loss-scale-window": fp16.loss_scale_window, "--hysteresis": fp16.hysteresis}
    for name, number in usual.items():
        assert parse_arguments(["--fp16", name, str(number)]).config.training.fp16
        for other in (number + 1, number * 2):
            refused(f"{name} {other}; set fp16", parse_arguments, ["--fp16", name, str(other)])


def settings_of(config: Config, micro_batches=1, data_size=1, parameters=1000, device="cpu") -> dict[str, Any]:
    """Return DeepSpeed's settings of a run on so many data-parallel ranks."""
    batch = {"global_batch_size": config.training.micro_batch_size * micro_batches * data_size}
    world_size = data_size * config.parallel.pipeline_model_parallel_size
    return deepspeed_settings(Setup.planned(config.replace(training=batch), world_size, device), parameters)


def test_the_flag_offloads_as_the_file_does_and_wins(tmp_path: Path) -> None:
    found = [read_file(tmp_path, OFFLOAD, stage) for stage in (1, 2, 3)]
    config = Config().replace(parallel={"offload_optimizer": "cpu"})
    found.append(settings_of(config))
    assert [offload_device(settings["zero_optimization"]) for settings in found] == ["cpu"] * 4
    path = written(tmp_path, ZERO % '"offload_optimizer": {"device": "none"}')
    line = "offload_optimizer.device is 'none' but the flags say 'cpu': .*--offload-opti"
    refused(line, settings_of, config.replace(parallel={"deepspeed_config": path}))
    without_zero = {"offload_optimizer": "cpu", "zero_stage": 0}
    refused("--offload-optimizer cpu with --zero-stage 0", Config().replace, parallel=without_zero)


def test_gpus_overlap_and_graphs_cpus_and_pipelines_do_not(tmp_path: Path) -> None:
    for parallel, data_size, parameters, device, overlap, bucket in (
        ({"cuda_graphs": "off"}, 4, 110_000_001, "cuda", True, 32_000_000),
        ({}, 4, 110_000_001, "cuda", False, 32_000_000),
        ({"zero_stage": 2}, 4, 110_000_001, "cuda", True, 32_000_000),
        ({}, 4, 110_000_001, "cpu", False, 110_000_002),
        ({"pipeline_model_parallel_size": 2}, 4, 110_000_001, "cuda", False, 110_000_002),
        ({"cuda_graphs": "off"}, 4, 20_000_000, "cuda", True, 20_000_000),
        ({}, 1, 110_000_001, "cuda", False, 32_000_000),
        ({"zero_stage": 3}, 1, 1000, "cuda", True, None),
    ):
        made = settings_of(Config().replace(parallel=parallel), 8, data_size, parameters, device)["zero_optimization"]
        assert made["overlap_comm"] == overlap and bucket in (made["reduce_bucket_size"], None)
    file = written(tmp_path, '{"zero_optimization": {"overlap_comm": true}}')
    config = Config().replace(parallel={"deepspeed_config": file})
    refused(
        "overlap_comm beside CUDA graphs .*; give --cuda-graphs off, or leave it out$",
        settings_of,
        config,
        8,
        4,
        device="cuda",
    )


OF_BF16 = [
    ({"zero_stage": 1}, {}, True),
    ({"zero_stage": 2}, {}, True),
    ({"zero_stage": 3}, {}, False),
    ({"zero_stage": 1, "offload_optimizer": "cpu"}, {}, False),
    ({"zero_stage": 1}, json.loads(OFFLOAD), False),
    ({"zero_stage": 1, "pipeline_model_parallel_size": 2}, {}, False),
    ({"zero_stage": 1}, {"bf16": {"check_grad_overflow": True}}, False),
    ({"zero_stage": 1}, {"gradient_clipping": 0.3}, True),
]


@pytest.mark.parametrize(("settings", "from_file", "on_device"), OF_BF16)
def test_bf16_is_checked_and_clipped_on_the_device_where_it_can_be(settings, from_file, on_device, tmp_path):
    parallel = {**settings, "deepspeed_config": written(tmp_path, json.dumps(from_file))}
    config = Config().replace(training={"bf16": True}, optimizer={"clip_grad": 0.3}, parallel=parallel)
    made = settings_of(config, 8, 4, device="cuda")
    assert made["bf16"].get("check_grad_overflow", True) != on_device
    assert made["gradient_clipping"] == (0.0 if on_device else 0.3)


def test_a_file_may_switch_the_timer_and_overlapping_on_but_an_offloaded_pipeline_adds_up_in_bf16(tmp_path) -> None:
    assert settings_of(Config(), device="cuda")["timers"] == {"throughput": {"enabled": False}}
    text = '{"timers": {"throughput": {"enabled": true}}, "zero_optimization": {"overlap_comm": true}}'
    config = Config().replace(parallel={"deepspeed_config": written(tmp_path, text), "zero_stage": 1})
    made = settings_of(config, device="cuda")
    assert made["timers"]["throughput"]["enabled"] and made["zero_optimization"]["overlap_comm"]
    parts = Config().replace(training={"bf16": True}, parallel={"pipeline_model_parallel_size": 2})
    assert settings_of(parts)["data_types"] == {"grad_accum_dtype": "fp32"}
    offloaded = parts.replace(parallel={"offload_optimizer": "cpu"})
    assert "data_types" not in settings_of(offloaded)
    by_file = {"deepspeed_config": written(tmp_path, '{"data_types": {"grad_accum_dtype": "fp32"}}')}
    line = "an offloaded pipeline would lose gradients in fp32; leave it out"
    refused(line, settings_of, offloaded.replace(parallel=by_file))
