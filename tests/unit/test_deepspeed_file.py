"""The file of `--deepspeed_config`: what DeepSpeed does not know, or we cannot use, is refused in one line."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp import memory
from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config, ParallelConfig
from megatron_ddrp.config.translation import TOP_LEVEL
from megatron_ddrp.engine import layout as deepspeed_file
from megatron_ddrp.engine.build import deepspeed_settings
from megatron_ddrp.engine.layout import (
    LOWEST_DEEPSPEED,
    Setup,
    import_quietly,
    offload_device,
    read_settings,
    refuse_old_deepspeed,
)
from megatron_ddrp.errors import UserError


def read(folder: Path, text: str, zero_stage: int = 1, device_type: str = "cpu") -> dict[str, Any]:
    path = folder / "deepspeed.json"
    path.write_text(text, encoding="utf-8")
    return read_settings(ParallelConfig(deepspeed_config=str(path), zero_stage=zero_stage), device_type)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"zero_optimisation": {"stage": 2}}', "no setting zero_optimisation; did you mean zero_optimization?"),
        (
            '{"zero_optimization": {"offload_optimiser": {"device": "cpu"}}}',
            "zero_optimization.offload_optimiser; did you mean zero_optimization.offload_optimizer?",
        ),
        (
            '{"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}',
            "offload_optimizer.devise; did you mean zero_optimization.offload_optimizer.device?",
        ),
        (
            '{"zero_optimization": {"stage3_prefetch_bucketsize": 1}}',
            "did you mean zero_optimization.stage3_prefetch_bucket_size?",
        ),
        ('{"bf16": {"enable": true}}', "no setting bf16.enable; did you mean bf16.enabled?"),
        ('{"fp16": {"initial_scale": 8}}', "did you mean fp16.initial_scale_power?"),
        ('{"bfloat16": {"enabled": true}}', "did you mean bf16?"),
        ('{"activation_checkpointing": {"profiles": true}}', "did you mean activation_checkpointing.profile?"),
        ('{"tensorboard": {"output_dir": "x"}}', "did you mean tensorboard.output_path?"),
        ('{"pipeline": {"partitions": "uniform"}}', "did you mean pipeline.partition?"),
        ('{"zzz": 1}', "no setting zzz; it knows activation_checkpointing, "),
        ('{"zero_optimization": {"reduce_bucket_size": "many"}}', "zero_optimization.reduce_bucket_size is 'many'"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "disk"}}}', "offload_optimizer.device is 'disk'"),
        ('{"zero_optimization": 3}', "zero_optimization is 3: expected a JSON object"),
        ('{"fp16": {"auto_cast": true}}', "fp16.auto_cast is True: our model takes its inputs as"),
        ('{"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}', "torch_autocast.enabled is True: "),
        ('{"autotuning": {"enabled": true}}', "autotuning.enabled is True: the run would end after a few steps"),
        ('{"hybrid_engine": {"enabled": true}}', "hybrid_engine.enabled is True: it generates text"),
        ('{"expert_parallel": {"enabled": true}}', "expert_parallel.enabled is True: our models have no experts"),
        ('{"compile": {"deepcompile": true}}', "compile.deepcompile is True: our model is not compiled"),
        ('{"zero_force_ds_cpu_optimizer": true}', "torch's fused AdamW"),
        ('{"gradient_allreduce_op": "sum"}', "gradient_allreduce_op is 'sum': our losses count on the mean"),
        ('{"managed_gradient_accumulation": false}', "gradient_accumulation is False: the optimizer would step"),
        ('{"data_efficiency": {"enabled": true}}', "data_efficiency.enabled is True: our loader and model"),
        (
            '{"data_efficiency": {"data_routing": {"random_ltd": {"enabled": true}}}}',
            "data_efficiency.data_routing.random_ltd.enabled is True: our loader and model would ignore it",
        ),
        ('{"bf16": {"check_grad_overflow": false}}', "bf16.check_grad_overflow is False: a step that is not finite"),
        (
            '{"tensor_parallel": {"autotp_size": 2}}',
            "tensor_parallel.autotp_size is 2: it cannot cut our layers",
        ),
        (
            '{"bf16": {"bf16_master_weights_and_grads": true}}',
            "bf16.bf16_master_weights_and_grads is True: it needs",
        ),
        ('{"bf16": {"bf16_optimizer_states": true}}', "bf16.bf16_optimizer_states is True: it needs DeepSpeed's own"),
        (
            '{"fp16": {"fp16_master_weights_and_grads": true}}',
            "fp16.fp16_master_weights_and_grads is True: it needs",
        ),
        (
            '{"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}',
            "ratio is 0.5: it needs",
        ),
        (
            '{"zero_optimization": {"compute_grad_norm": false}}',
            "compute_grad_norm is False: the norm tells",
        ),
        ('{"zero_optimization": {"cpu_offload": true}}', 'give {"device": "cpu"} to offload_optimizer'),
        ('{"zero_optimization": {"stage": 3, "cpu_offload_param": true}}', 'give {"device": "cpu"} to offload_param'),
        ('{"zero_optimization": {"cpu_offload_use_pin_memory": true}}', "give pin_memory in offload_optimizer"),
        ('{"zero_optimization": {"offload_param": {"device": "cpu"}}}', "offload_param needs --zero-stage 3"),
        (
            '{"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": true}}}',
            "super_offload is True: it needs",
        ),
        ('{"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}', "zero_optimization.zenflow: it needs DeepSpeed's"),
        ("[" * 100_000, "cannot be read"),
        ("[1]", "expected a JSON object"),
    ],
)
def test_what_deepspeed_does_not_know_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    assert words in str(error.value) and error.value.exit_code == 2
    assert str(error.value).startswith(f"--deepspeed-config {tmp_path / 'deepspeed.json'}: ")


def test_predivided_gradients_are_refused_at_zero_3_alone(tmp_path: Path) -> None:
    text = '{"gradient_predivide_factor": 2.0}'
    assert read(tmp_path, text, zero_stage=2) == {"gradient_predivide_factor": 2.0}
    with pytest.raises(UserError, match="gradient_predivide_factor does not work with --zero-stage 3"):
        read(tmp_path, text, zero_stage=3)


def test_quantized_communication_needs_a_gpu(tmp_path: Path) -> None:
    text = '{"zero_optimization": {"stage": 3, "zero_quantized_weights": true, "zero_quantized_gradients": false}}'
    assert read(tmp_path, text, 3, "cuda")["zero_optimization"]["zero_quantized_weights"] is True
    with pytest.raises(UserError, match="zero_quantized_weights is True: its kernels need a GPU"):
        read(tmp_path, text, 3, "cpu")


def test_a_fault_of_a_whole_section_is_one_short_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, '{"fp16": {"enabled": true, "min_loss_scale": 0}}')
    line = "fp16: fp16.min_loss_scale must be > 0 when dynamic loss scaling is enabled (loss_scale=0); change it"
    assert str(error.value).startswith(f"--deepspeed-config {tmp_path / 'deepspeed.json'}: {line}")


@pytest.mark.parametrize("given", [{}, {"stage": "auto"}, {"stage": 2}])
def test_a_section_is_checked_at_the_stage_of_the_run(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_quietly()
    from deepspeed.runtime.zero import config

    seen: list[int] = []
    monkeypatch.setattr(config, "DeepSpeedZeroConfig", lambda **values: seen.append(values["stage"]))
    read(tmp_path, json.dumps({"zero_optimization": given}), zero_stage=2)
    assert seen == [2]


@pytest.mark.parametrize("version", ["0.17.6", "0.19.7+cu128", "0.9.10"])
def test_an_older_deepspeed_is_refused_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_file, "deepspeed_version", lambda: version)
    with pytest.raises(UserError, match=f"DeepSpeed {re.escape(version)} .*: pip install 'deepspeed>=0.19.8'") as error:
        refuse_old_deepspeed()
    assert error.value.exit_code == 2


@pytest.mark.parametrize("version", ["0.19.8", "0.19.10", "0.20.0.dev1", "1.0"])
def test_a_newer_deepspeed_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_file, "deepspeed_version", lambda: version)
    refuse_old_deepspeed()


def test_the_lowest_deepspeed_is_that_of_the_package() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"deepspeed>={LOWEST_DEEPSPEED}"' in text


def test_offload_wants_a_stage_that_shards(tmp_path: Path) -> None:
    text = '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}'
    assert [offload_device(read(tmp_path, text, stage)["zero_optimization"]) for stage in (1, 2, 3)] == ["cpu"] * 3
    with pytest.raises(UserError, match="offload_optimizer needs --zero-stage 1 or 2 or 3, not 0"):
        read(tmp_path, text, 0)


def test_what_deepspeed_knows_is_taken(tmp_path: Path) -> None:
    settings = {
        "zero_optimization": {"stage": "auto", "stage3_param_persistence_threshold": 7, "overlap_comm": False},
        "fp16": {"initial_scale_power": 8, "auto_cast": False},
        "wall_clock_breakdown": True,
        "gradient_allreduce_op": "mean",
        "managed_gradient_accumulation": True,
        "data_efficiency": {"enabled": False, "seed": 7},
        "train_batch_size": "auto",
        "activation_checkpointing": {"profile": True},
        "flops_profiler": {"enabled": True, "profile_step": 3},
        "csv_monitor": {"enabled": True, "output_path": "x"},
        "bf16": "auto",
    }
    assert read(tmp_path, json.dumps(settings)) == settings
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
    assert Asked.names - set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) - {"bfloat16"} == set(TOP_LEVEL)


def test_numbers_that_are_said_to_be_deepspeeds_defaults_are_those() -> None:
    import_quietly()
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero, fp16 = DeepSpeedZeroConfig(), DeepSpeedFP16Config(enabled=True)
    assert (zero.param_persistence_threshold, zero.prefetch_bucket_size) == (memory.PERSISTENT, memory.PREFETCHED)
    usual = {
        "--initial-loss-scale": 2**fp16.initial_scale_power,
        "--min-loss-scale": fp16.min_loss_scale,
        "--loss-scale-window": fp16.loss_scale_window,
        "--hysteresis": fp16.hysteresis,
    }
    for name, number in usual.items():
        assert parse_arguments(["--fp16", name, str(number)]).config.training.fp16
        for other in (number + 1, number * 2):
            with pytest.raises(UserError, match=f"{name} {other}; set fp16"):
                parse_arguments(["--fp16", name, str(other)])


def settings_of(config: Config, num_micro_batches: int, data_size: int, parameters: int, device: str) -> dict[str, Any]:
    """Return DeepSpeed's settings of a run on so many data-parallel ranks."""
    batch = {"global_batch_size": config.training.micro_batch_size * num_micro_batches * data_size}
    world_size = data_size * config.parallel.pipeline_model_parallel_size
    return deepspeed_settings(Setup.planned(config.replace(training=batch), world_size, device), parameters)


def test_the_flag_offloads_as_the_file_does_and_wins(tmp_path: Path) -> None:
    config = Config().replace(parallel={"offload_optimizer": "cpu"})
    assert offload_device(settings_of(config, 1, 1, 1000, "cpu")["zero_optimization"]) == "cpu"
    path = tmp_path / "deepspeed.json"
    path.write_text('{"zero_optimization": {"offload_optimizer": {"device": "none"}}}', encoding="utf-8")
    config = config.replace(parallel={"deepspeed_config": str(path)})
    with pytest.raises(UserError, match="offload_optimizer.device is 'none' but the flags say 'cpu': .*--offload-opti"):
        settings_of(config, 1, 1, 1000, "cpu")
    with pytest.raises(UserError, match="--offload-optimizer cpu with --zero-stage 0"):
        Config().replace(parallel={"offload_optimizer": "cpu", "zero_stage": 0})


def test_gpus_overlap_and_cpus_and_pipelines_do_not() -> None:
    base, parts = Config(), Config().replace(parallel={"pipeline_model_parallel_size": 2})
    of_gpu, of_cpu, of_pipeline = (
        settings_of(config, 8, 4, 110_000_001, device)["zero_optimization"]
        for config, device in ((base, "cuda"), (base, "cpu"), (parts, "cuda"))
    )
    assert (of_gpu["overlap_comm"], of_gpu["reduce_bucket_size"]) == (True, 32_000_000)
    assert (of_cpu["overlap_comm"], of_cpu["reduce_bucket_size"]) == (False, 110_000_002)
    assert (of_pipeline["overlap_comm"], of_pipeline["reduce_bucket_size"]) == (False, 110_000_002)
    small = settings_of(base, 8, 4, 20_000_000, "cuda")["zero_optimization"]
    assert small["reduce_bucket_size"] == 20_000_000
    alone = settings_of(base, 8, 1, 110_000_001, "cuda")["zero_optimization"]
    assert (alone["overlap_comm"], alone["reduce_bucket_size"]) == (False, 32_000_000)
    at_stage_3 = settings_of(base.replace(parallel={"zero_stage": 3}), 8, 1, 1000, "cuda")
    assert at_stage_3["zero_optimization"]["overlap_comm"]


@pytest.mark.parametrize(
    ("settings", "from_file", "on_device"),
    [
        ({"zero_stage": 1}, {}, True),
        ({"zero_stage": 2}, {}, True),
        ({"zero_stage": 3}, {}, False),
        ({"zero_stage": 1, "offload_optimizer": "cpu"}, {}, False),
        ({"zero_stage": 1}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, False),
        ({"zero_stage": 1, "pipeline_model_parallel_size": 2}, {}, False),
        ({"zero_stage": 1}, {"bf16": {"check_grad_overflow": True}}, False),
        ({"zero_stage": 1}, {"gradient_clipping": 0.3}, True),
    ],
)
def test_bf16_is_checked_and_clipped_on_the_device_where_it_can_be(
    settings: dict[str, Any], from_file: dict[str, Any], on_device: bool, tmp_path: Path
) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(from_file), encoding="utf-8")
    parallel = {**settings, "deepspeed_config": str(path)}
    config = Config().replace(training={"bf16": True}, optimizer={"clip_grad": 0.3}, parallel=parallel)
    made = settings_of(config, 8, 4, 1000, "cuda")
    assert made["bf16"].get("check_grad_overflow", True) != on_device
    assert made["gradient_clipping"] == (0.0 if on_device else 0.3)


def test_a_file_may_switch_the_throughput_timer_and_overlapping_on(tmp_path: Path) -> None:
    assert settings_of(Config(), 1, 1, 1000, "cuda")["timers"] == {"throughput": {"enabled": False}}
    path = tmp_path / "deepspeed.json"
    path.write_text('{"timers": {"throughput": {"enabled": true}}, "zero_optimization": {"overlap_comm": true}}')
    config = Config().replace(parallel={"deepspeed_config": str(path), "zero_stage": 1})
    made = settings_of(config, 1, 1, 1000, "cuda")
    assert made["timers"]["throughput"]["enabled"] and made["zero_optimization"]["overlap_comm"]


def test_an_offloaded_pipeline_adds_up_in_bf16(tmp_path: Path) -> None:
    parts = Config().replace(training={"bf16": True}, parallel={"pipeline_model_parallel_size": 2})
    assert settings_of(parts, 1, 1, 1000, "cpu")["data_types"] == {"grad_accum_dtype": "fp32"}
    offloaded = parts.replace(parallel={"offload_optimizer": "cpu"})
    assert "data_types" not in settings_of(offloaded, 1, 1, 1000, "cpu")
    path = tmp_path / "deepspeed.json"
    path.write_text('{"data_types": {"grad_accum_dtype": "fp32"}}', encoding="utf-8")
    with pytest.raises(UserError, match="an offloaded pipeline would lose gradients in fp32; leave it out"):
        settings_of(offloaded.replace(parallel={"deepspeed_config": str(path)}), 1, 1, 1000, "cpu")
