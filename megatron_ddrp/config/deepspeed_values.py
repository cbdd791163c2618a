"""Keys of a `--deepspeed_config` file: those that decide settings of ours, and those that a run cannot use.

A key decides a setting where neither a flag nor `--config` does. Checks that need DeepSpeed are in the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_ddrp.config.option import flag
from megatron_ddrp.config.reading import Option, Place, load_values, read_value
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
