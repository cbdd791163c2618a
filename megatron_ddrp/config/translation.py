"""Settings in other programs' words: the file of `--deepspeed_config`, and Megatron-LM's flags on a command line.

A key of DeepSpeed's file decides a setting of ours where neither a flag nor `--config` does. Keys that a run cannot use
are refused; checks that need DeepSpeed are in the engine.

The tables of flags hold those of Megatron-LM's BERT scripts with our words, and hints for other habits. What the flags
of Megatron-LM (2019 to 2026) and of Megatron-DeepSpeed do was read in their `arguments.py`; docs/foreign-files.md has
the tables. A flag that is in none of them is refused, never read in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_ddrp.config.reading import Option, Place, flag, load_values, read_value
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, nearest
from megatron_ddrp.foreign import parse_json

SETTINGS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "optimizer.params.lr": "lr",
    "optimizer.params.betas[1]": "adam_beta1",
    "optimizer.params.betas[2]": "adam_beta2",
    "optimizer.params.eps": "adam_eps",
    "optimizer.params.weight_decay": "weight_decay",
}
"""Dotted key of DeepSpeed's → the setting of ours that says the same."""

FLAGS = {key: flag(name) for key, name in SETTINGS.items()} | {
    "gradient_accumulation_steps": "--global-batch-size and --micro-batch-size",
    "scheduler": "--lr-decay-style",
}
"""Dotted key → the flags that say the same: a file may repeat their value but not contradict it."""

_NAMES = """
    activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger communication_data_type compile
    csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc
    dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor hybrid_engine log_level managed_gradient_accumulation
    memory_breakdown optimizer pipeline prescale_gradients scheduler seq_parallel_communication_data_type
    steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization"""
TOP_LEVEL = _NAMES.split()
"""Keys that DeepSpeed looks up, without those that it refuses itself and `bfloat16`, which our `bf16` would hide."""

_OWN_LOADER = "our loader and model would ignore it; leave it out, and see --seq-length-phases"
NEEDS_CPU_ADAM = "it needs DeepSpeed's own Adam, and ours is torch's; leave it out"
_OLD_NAME = 'an old name, which would be in force unseen: give {"device": "cpu"} to'
_OWN_ADAM = "our AdamW has no such setting; leave it out"
SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer.params.torch_adam": ((True, False), _OWN_ADAM),
    "optimizer.params.adam_w_mode": ((True,), _OWN_ADAM),
    "optimizer.params.bias_correction": ((True,), _OWN_ADAM),
    "optimizer.params.amsgrad": ((False,), _OWN_ADAM),
    "gradient_allreduce_op": (
        ("mean",),
        "our losses count on the mean over ranks; without it gradients grow with the number of ranks; leave it out",
    ),
    "managed_gradient_accumulation": (
        (True,),
        "the optimizer would step after every micro-batch instead of every --global-batch-size; leave it out",
    ),
    "tensor_parallel.autotp_size": ((0, 1), "it cannot cut our layers; use --tensor-model-parallel-size"),
    "data_efficiency.enabled": ((False,), _OWN_LOADER),
    "data_efficiency.data_routing.random_ltd.enabled": ((False,), _OWN_LOADER),
    "bf16.check_grad_overflow": ((True,), "a step that is not finite would make the weights NaN; leave it out"),
    "fp16.auto_cast": ((False,), "our model takes its inputs as they are; leave it out"),
    "torch_autocast.enabled": ((False,), "our backward passes multiply in the weights' type; use --bf16"),
    "bf16.bf16_master_weights_and_grads": ((False,), NEEDS_CPU_ADAM),
    "bf16.bf16_optimizer_states": ((False,), NEEDS_CPU_ADAM),
    "fp16.fp16_master_weights_and_grads": ((False,), NEEDS_CPU_ADAM),
    "zero_optimization.offload_optimizer.ratio": ((1,), NEEDS_CPU_ADAM),
    "zero_optimization.offload_optimizer.super_offload": ((False,), NEEDS_CPU_ADAM),
    "zero_optimization.cpu_offload": ((False,), f"{_OLD_NAME} offload_optimizer"),
    "zero_optimization.cpu_offload_param": ((False,), f"{_OLD_NAME} offload_param"),
    "zero_optimization.cpu_offload_use_pin_memory": ((False,), "an old name: give pin_memory in offload_optimizer"),
    "zero_optimization.compute_grad_norm": ((True,), "the norm tells steps to skip and is logged; leave it out"),
    "autotuning.enabled": ((False,), "the run would end after a few steps; leave it out"),
    "hybrid_engine.enabled": ((False,), "it generates text, which an encoder does not; leave it out"),
    "expert_parallel.enabled": ((False,), "our models have no experts; leave it out"),
    "compile.deepcompile": ((False,), "our model is not compiled, so it would do nothing; leave it out"),
    "zero_force_ds_cpu_optimizer": ((False,), "torch's fused AdamW steps offloaded optimizer state; leave it out"),
}
"""Dotted key → values with which a run works and does what the flags say, and the reason against all others."""


class Decision(NamedTuple):
    """A setting's value, and the key of the file that has it."""

    value: Any
    key: str


def load_file(path: str) -> dict[str, Any]:
    """Return the JSON object of a file. Raises `UserError` without one, and for a key that no run can use."""
    loaded = load_values(Path(path), Place(f"--deepspeed-config {path}"), parse_json)
    if not isinstance(loaded, dict):
        refuse_file(path, "expected a JSON object")
    check_names(path, loaded, TOP_LEVEL)
    if "optimizer" in loaded:
        section = loaded["optimizer"]
        kind = section.get("type") if isinstance(section, dict) else section
        if not isinstance(kind, str) or kind.lower() not in ("adam", "adamw"):
            refuse_file(path, f"optimizer is {kind!r}: expected AdamW; leave it out and give --lr and its kin")
    for key, value in flatten_keys(loaded).items():
        unlisted = ((), _OWN_ADAM) if key.startswith("optimizer.params") and key not in SETTINGS else ((value,), "")
        allowed, reason = SUPPORTED.get(key, unlisted)
        if value not in allowed:
            refuse_file(path, f"{key} is {value!r}: {reason}")
    return loaded


def check_names(path: str, given: Iterable[str], known: Iterable[str], prefix: str = "") -> None:
    """Refuse the first name that DeepSpeed does not know, with the nearest one that it does."""
    names = list(known)
    for name in given:
        if name not in names:
            close = nearest(name, names)
            hint = f"; did you mean {prefix}{close}?" if close else f"; it knows {', '.join(sorted(names))}"
            refuse_file(path, f"DeepSpeed has no setting {prefix}{name}{hint}")


def decisions(path: str, content: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Decision]:
    """Return setting → decision of a file's content; "auto" decides nothing.

    Raises `UserError` for a value of a wrong type.
    """
    place, flat = Place(f"--deepspeed-config {path}"), flatten_keys(content)
    found = {}
    for key, name in SETTINGS.items():
        if key in flat and not (name == "offload_optimizer" and flat[key] == "nvme"):  # which has no flag
            found[name] = Decision(read_value(flat[key], options[name], place.at(key)), key)
    if "optimizer" in content:
        found["optimizer"] = Decision("adamw", "optimizer.type")
    return found


def global_batch_of(
    path: str, content: Mapping[str, Any], settings: Mapping[str, Any], world_size: int | None
) -> dict[str, Decision]:
    """Return the global batch size that the file's `gradient_accumulation_steps` give on `world_size` ranks.

    Return nothing if the steps are absent, or if `settings` (by name, resolved) holds a global batch size. Raises
    `UserError` if the size is needed and the number of ranks is unknown.
    """
    steps = content.get("gradient_accumulation_steps", "auto")
    if not isinstance(steps, int) or "global_batch_size" in settings:
        return {}
    if world_size is None:
        refuse_file(path, "gradient_accumulation_steps depend on the number of ranks: set train_batch_size as well")
    model_ranks = settings["tensor_model_parallel_size"] * settings["pipeline_model_parallel_size"]
    size = settings["micro_batch_size"] * steps * max(1, world_size // model_ranks)  # the layout is checked later
    return {"global_batch_size": Decision(size, "gradient_accumulation_steps")}


def check_against(path: str, decided: Mapping[str, Decision], given: Mapping[str, Any]) -> None:
    """Refuse a file that contradicts a setting of `given`."""
    for name, (value, key) in decided.items():
        if name in given and given[name] != value:
            refuse_contradiction(path, key, value, given[name], flag(name))
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if name in decided and decided[name].value and given.get(other):
            refuse_contradiction(path, decided[name].key, True, flag(other), flag(name))


def refuse_contradiction(path: str, key: str, value: Any, given: Any, flags: str) -> NoReturn:
    """Refuse a key of a file whose value contradicts the flags."""
    refuse_file(path, f"{key} is {value!r} but the flags say {given!r}: set it by {flags} and leave it out of the file")


def refuse_file(path: str, reason: str) -> NoReturn:
    """Raise the `UserError` that names the file."""
    raise UserError(f"--deepspeed-config {path}: {reason}", WRONG_ARGUMENTS)


def flatten_keys(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value for every setting of a file; items of `betas` are numbered from 1."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found |= flatten_keys(value, f"{prefix}{key}.")
        elif key == "betas" and isinstance(value, list) and len(value) == 2:
            found |= {f"{prefix}{key}[{number}]": item for number, item in enumerate(value, 1)}
        elif value != "auto":
            found[prefix + key] = value
    return found


WITHOUT_EFFECT = {
    "the loader reads in its own way": "num-workers= mmap-warmup",
    "`--attention-backend` and `--compile` choose the kernels, and none changes a formula": """
        no-masked-softmax-fusion no-bias-gelu-fusion no-bias-dropout-fusion no-persist-layer-norm
        no-gradient-accumulation-fusion use-flash-attn transformer-impl= use-mcore-models use-legacy-models""",
    "softmax and loss are computed in fp32 in every precision": "attention-softmax-in-fp32 fp16-lm-cross-entropy",
    "the division by the layer's number was taken back in the softmax": """
        no-query-key-layer-scaling apply-query-key-layer-scaling""",
    "DeepSpeed shards the optimizer and communicates": """
        use-distributed-optimizer overlap-grad-reduce overlap-param-gather distributed-backend= DDP-impl=
        no-async-tensor-model-parallel-allreduce num-layers-per-virtual-pipeline-stage=""",
    "it moves memory; `--checkpoint-activations` is the switch here": """
        recompute-method= recompute-num-layers= recompute-activations checkpoint-num-layers=
        distribute-checkpointed-activations deepspeed-activation-checkpointing partition-activations
        contigious-checkpointing checkpoint-in-cpu synchronize-each-layer""",
    "metrics.jsonl has fixed columns, and TensorBoard has the same": """
        log-params-norm log-num-zeros-in-grad log-throughput timing-log-level= tensorboard-log-interval=
        tensorboard-queue-size= log-timers-to-tensorboard log-batch-size-to-tensorboard
        log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-optimizer-states-to-tensorboard""",
    "wandb reads `WANDB_NAME`, `WANDB_DIR` and `WANDB_ENTITY`": "wandb-exp-name= wandb-save-dir= wandb-entity=",
    "checkpoints have one format, every layout reads it, and nothing random is stored": """
        ckpt-format= use-dist-ckpt async-save no-load-rng no-save-rng""",
    "each rank draws all weights and keeps its part": "use-cpu-initialization",
    "a signal saves and stops every run": "exit-signal-handler",
    "the flags of a resumed run decide its schedule": "override-opt-param-scheduler override-lr-scheduler",
    "the vocabulary is padded to a multiple of 128, and the padding is never predicted": """
        make-vocab-size-divisible-by=""",
    "it is for GPT, also in Megatron-LM": "reset-position-ids reset-attention-mask eod-mask-loss",
}
"""Reason → flags that change no number of a run here, whatever their value. Here and in the tables below, names have
dashes alone, and a flag followed by `=` takes a value."""

RENAMED = {
    "batch-size=": "--micro-batch-size {}",
    "model-parallel-size=": "--tensor-model-parallel-size {}",
    "no-pipeline-parallel": "--pipeline-model-parallel-size 1",
    "norm-epsilon=": "--layernorm-epsilon {}",
    "apply-residual-connection-post-layernorm": "--layernorm-position post",
    "bert-no-binary-head": "--num-segments 0",
    "warmup=": "--lr-warmup-fraction {}",
    "data-cache-path=": "--index-cache-dir {}",
    "cpu-optimizer": "--offload-optimizer cpu",
}
"""Flag → ours, with `{}` for its value."""


class ByValue(NamedTuple):
    """A flag that is taken at some values alone."""

    words: dict[str, str]
    """Value → our words; "" where every run here does just that. Numbers are compared as numbers."""
    otherwise: str | None
    """Why other values are refused; None for a flag of ours, which knows other values itself."""


_ENCODINGS = {"learned_absolute": "absolute", "rope": "rope", "none": "nope"}
BY_VALUE = {
    "data-impl=": ByValue(
        {"mmap": "", "infer": ""}, "only the memory-mapped format is read; preprocess the text again"
    ),
    "dataloader-type=": ByValue({"single": "", "cyclic": ""}, "every epoch is shuffled anew; leave it out"),
    "recompute-granularity=": ByValue({"full": "--checkpoint-activations", "selective": ""}, "expected one of these"),
    "normalization=": ByValue(
        {name: f"--norm {name.lower()}" for name in ("LayerNorm", "layernorm", "RMSNorm", "rmsnorm")},
        "use --norm layernorm or --norm rmsnorm",
    ),
    "position-embedding-type=": ByValue(
        {theirs: f"--position-encoding {ours}" for theirs, ours in _ENCODINGS.items()},
        "use --position-encoding; t5 is the nearest to Megatron-LM's relative",
    ),
    "vocab-extra-ids=": ByValue({"0": ""}, "no piece is added to the tokenizer's; add them to its file"),
    "short-seq-prob=": ByValue({"0": ""}, "no sequence is cut short at random; see --seq-length-phases"),
    "optimizer=": ByValue({"adam": "--optimizer adamw"}, None),
    "attention-backend=": ByValue(
        dict.fromkeys(("flash", "fused", "unfused", "local"), "--attention-backend auto"), None
    ),
    "tokenizer-type=": ByValue(
        dict.fromkeys(("HFTokenizer", "HuggingFaceTokenizer"), "--tokenizer-type HuggingFace"), None
    ),
    "lr-decay-style=": ByValue({"WSD": "--lr-decay-style wsd"}, None),
}

THEIR_DEFAULTS = {
    "position_encoding": "absolute",
    "objective": "mlm, and next-sentence prediction unless --bert-no-binary-head",
    "masking": "ngram",
    "layernorm_position": "pre",
    "layernorm_epsilon": 1e-5,
    "adam_eps": 1e-8,
    "split": "969,30,1",
    "eval_iters": 100,
    "lr_warmup_fraction": 0.0,
    "lr_wsd_decay_style": "exponential, under WSD",
    "global_batch_size": "micro-batch x data-parallel ranks",
}
"""Setting → Megatron-LM's default for BERT, where ours is another."""

_SAME = """
    learning-rate=lr output-dir=save max-steps=train-iters per-device-train-batch-size=micro-batch-size
    per-gpu-train-batch-size=micro-batch-size warmup-steps=lr-warmup-iters num-warmup-steps=lr-warmup-iters
    warmup-ratio=lr-warmup-fraction lr-scheduler-type=lr-decay-style optim=optimizer adam-epsilon=adam-eps
    max-grad-norm=clip-grad logging-steps=log-interval logging-dir=tensorboard-dir save-steps=save-interval
    save-strategy=save-interval save-total-limit=keep-last eval-steps=eval-interval eval-strategy=eval-interval
    evaluation-strategy=eval-interval do-eval=eval-interval resume-from-checkpoint=load
    gradient-checkpointing=checkpoint-activations ddp-timeout=distributed-timeout-minutes mlm-probability=mask-prob
    max-seq-length=seq-length max-length=seq-length num-hidden-layers=num-layers intermediate-size=ffn-hidden-size
    hidden-act=ffn hidden-dropout-prob=hidden-dropout attention-probs-dropout-prob=attention-dropout
    initializer-range=init-method-std layer-norm-eps=layernorm-epsilon type-vocab-size=num-segments
    train-samples=train-iters lr-decay-samples=lr-decay-iters lr-warmup-samples=lr-warmup-iters"""
_DATASET = "make a dataset with megatron-ddrp preprocess, then give"
REMEDIES = {theirs: f"use --{ours}" for theirs, ours in (pair.split("=") for pair in _SAME.split())} | {
    "num-train-epochs": "use --train-iters, the optimizer steps; --dry-run says how many epochs they are",
    "per-device-eval-batch-size": "use --micro-batch-size, which validation shares",
    "train-batch-size": "use --global-batch-size, the sequences of a step over all ranks",
    "rampup-batch-size": "the batch size is constant: give --global-batch-size alone",
    "gradient-accumulation-steps": "use --global-batch-size: --micro-batch-size x data-parallel ranks x these steps",
    "report-to": "use --tensorboard-dir or --wandb-project",
    "run-name": "set WANDB_NAME, with --wandb-project",
    "max-eval-samples": "use --eval-iters, in global batches",
    "overwrite-output-dir": "leave it out; --load with the same folder resumes, and no run overwrites another's",
    "do-train": "leave it out; training is all this command does",
    "torch-compile": "use --compile on",
    "dataloader-num-workers": "leave it out; the loader decides",
    "push-to-hub": "export with megatron-ddrp convert first",
    "model-name-or-path": "import the folder with megatron-ddrp convert --from-hf, then give --load",
    "finetune": "to begin from weights alone, export them and import them: megatron-ddrp convert",
    "config-name": "give --num-layers, --hidden-size and their kin, or --config FILE",
    "tokenizer-name": "use --tokenizer-type HuggingFace --tokenizer-model FOLDER",
    **dict.fromkeys(("train-file", "dataset-name"), f"{_DATASET} --data-path"),
    "validation-file": f"{_DATASET} --valid-data-path",
    "validation-split-percentage": "use --split, such as 95,5,0",
    "fp32": "leave it out; fp32 is the default",
    "num-gpus": "give it to the launcher: deepspeed --num_gpus N --module megatron_ddrp pretrain …",
    "nproc-per-node": "give it to the launcher: torchrun --nproc-per-node N -m megatron_ddrp pretrain …",
}
"""Flag of Hugging Face's Trainer, examples and config.json, or of a launcher → what to do here."""


Rule = Callable[[str, Mapping[str, Any]], str]
"""A flag's value and all settings by name → our words; "" without effect. Raises `ValueError` with a reason."""


class Found(NamedTuple):
    """A flag of Megatron-LM's on a command line."""

    typed: str
    """It and its value, as they were typed."""
    value: str
    meaning: str | Rule

    @property
    def asks(self) -> bool:
        """True if its meaning depends on other settings."""
        return not isinstance(self.meaning, str)

    def ours(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the words of ours that stand for it; raise `ValueError` with the reason if it is refused.

        `settings` are the given ones by name, with the command line's; defaults are not among them.
        """
        if isinstance(self.meaning, str):
            return [word.replace("{}", self.value) for word in self.meaning.split()]  # a value may hold spaces
        return self.meaning(self.value, settings).split()


def translate(words: Sequence[str]) -> tuple[list[str], list[Found]]:
    """Take Megatron-LM's flags out of a command line; `_` counts as `-`. Words after `--` stay as they are."""
    left, taken = list[str](), list[Found]()
    position = 0
    while position < len(words) and words[position] != "--":
        begin, position = position, position + 1
        first, equals, value = words[begin].partition("=")
        takes_value, meaning = KNOWN.get(first[2:].replace("_", "-") if first[:2] == "--" else "", (False, None))
        if takes_value and not equals and position < len(words) and not words[position].startswith("--"):
            value, position = words[position], position + 1
        if isinstance(meaning, ByValue):
            meaning = next((ours for usual, ours in meaning.words.items() if _same(usual, value)), None)
        if meaning is None or (takes_value and not value):
            left += words[begin:position]
        else:
            taken.append(Found(" ".join(words[begin:position]), value, meaning))
    return [*left, *words[position:]], taken


def _same(value: str, other: str) -> bool:
    """Return whether two words are equal, or are equal numbers."""
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other


def _whole(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("expected a whole number")
    return int(value)


def _position_rows(value: str, settings: Mapping[str, Any]) -> str:
    """Rows of the table of absolute positions, of which training reads the first `--seq-length`."""
    rows, length = _whole(value), settings.get("seq_length")
    if length is None:
        return f"--seq-length {rows}"
    if rows < length:
        raise ValueError(f"it is below --seq-length {length}: leave it out, every position has its row")
    return ""


def _head_channels(value: str, settings: Mapping[str, Any]) -> str:
    channels, width, heads = _whole(value), settings["hidden_size"], settings["num_attention_heads"]
    if heads and channels != width / heads:  # no heads are refused by their own flag
        raise ValueError(f"a head has --hidden-size / --num-attention-heads = {width / heads:g} channels: leave it out")
    return ""


def _fp32_sums(value: str, settings: Mapping[str, Any]) -> str:
    """Gradients of bf16 runs add up in fp32 here, except in offloaded pipelines (`engine/layout.py`)."""
    if settings.get("fp16"):
        raise ValueError("under --fp16 gradients add up in fp16: use --bf16, whose gradients add up in fp32")
    if settings.get("pipeline_model_parallel_size", 1) > 1 and settings.get("offload_optimizer", "none") != "none":
        raise ValueError(
            "an offloaded pipeline adds up gradients in the run's precision: leave --offload-optimizer out"
        )
    path = settings.get("deepspeed_config")
    types = load_file(path).get("data_types") if path else None
    if isinstance(types, dict) and types.get("grad_accum_dtype", "fp32") not in ("fp32", "auto", None):
        raise ValueError(f"data_types.grad_accum_dtype is {types['grad_accum_dtype']!r} in {path}: leave it out there")
    return ""


def _steps(ours: str, whole: Callable[[float], int], value: str, settings: Mapping[str, Any]) -> str:
    """Return a number of samples as steps."""
    return f"{ours} {whole(_whole(value) / max(1, settings['global_batch_size']))}"


def _loss_scale(name: str, usual: int | None, value: str, settings: Mapping[str, Any]) -> str:
    """Refuse a number of loss scaling under fp16: DeepSpeed's file has it. Other precisions do not read it."""
    if settings.get("fp16") and (usual is None or not _same(value, str(usual))):
        raise ValueError(f"set fp16.{name} in --deepspeed-config" + (f"; it is {usual} here" if usual else ""))
    return ""


RULES: dict[str, Rule] = {
    "max-position-embeddings=": _position_rows,
    "kv-channels=": _head_channels,
    "accumulate-allreduce-grads-in-fp32": _fp32_sums,
    "fp32-allreduce": _fp32_sums,
    "train-samples=": partial(_steps, "--train-iters", math.floor),
    "lr-decay-samples=": partial(_steps, "--lr-decay-iters", round),
    "lr-warmup-samples=": partial(_steps, "--lr-warmup-iters", round),
    "loss-scale=": partial(_loss_scale, "loss_scale", None),
    "initial-loss-scale=": partial(_loss_scale, "initial_scale_power", 2**16),
    "min-loss-scale=": partial(_loss_scale, "min_loss_scale", 1),
    "loss-scale-window=": partial(_loss_scale, "loss_scale_window", 1000),
    "hysteresis=": partial(_loss_scale, "hysteresis", 2),
}
"""Flag → the rule that other settings decide."""

_MEANINGS: dict[str, str | ByValue | Rule] = {name: "" for names in WITHOUT_EFFECT.values() for name in names.split()}
_MEANINGS |= {**RENAMED, **BY_VALUE, **RULES}
KNOWN = {name.rstrip("="): (name.endswith("="), meaning) for name, meaning in _MEANINGS.items()}
"""Name of each flag of Megatron-LM's that we know → whether it takes a value, and its meaning."""

HINTS = dict.fromkeys(KNOWN, "it is Megatron-LM's and without effect here: leave it out")
HINTS |= {name.rstrip("="): f"use {words.removesuffix(' {}')}" for name, words in RENAMED.items()}
HINTS |= {name.rstrip("="): rule.otherwise for name, rule in BY_VALUE.items() if rule.otherwise} | REMEDIES
HINTS |= {"vocab-size": "the tokenizer's file decides it: leave it out"}
HINTS |= {"objective=clm": "clm comes before another objective, or takes all steps by --objective-phases clm:1"}
"""Name of a foreign flag, with dashes → what to do where it is not taken: other values, YAML, plans.

Also FLAG=VALUE of a choice that is no choice there.
"""


def differing_defaults(settings: Iterable[str], ours: Mapping[str, Any]) -> str:
    """Return one line: our defaults that are not Megatron-LM's for BERT. `settings` were given, `ours` is resolved."""
    given = set(settings) | ({"lr_warmup_fraction"} if "lr_warmup_iters" in settings else set())
    given |= {"lr_wsd_decay_style"} if ours["lr_decay_style"] != "wsd" else set()
    theirs = {name: value for name, value in THEIR_DEFAULTS.items() if name not in given}
    lines = (f"{flag(name)} {ours[name]} (there {value})" for name, value in theirs.items())
    return "defaults here that are not Megatron-LM's: " + ", ".join(lines) if theirs else ""
