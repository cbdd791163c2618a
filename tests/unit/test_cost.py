"""The estimated step: plain arithmetic, and what must make it longer or shorter."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ddrp.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megatron_ddrp.run.cost import LAUNCHES, StepEstimate, estimate_step, mfu, micro_batch_seconds, why_not
from megatron_ddrp.run.devices import DEVICES, LAUNCH_SECONDS
from megatron_ddrp.run.flops import flop_per_token
from megatron_ddrp.run.host_cost import PLAIN_LAYER_SECONDS, REST

H100, V100 = DEVICES["h100"], DEVICES["v100"]
PARAMETERS = 110_000_000
BASE = Config(
    model=ModelConfig(),
    training=TrainingConfig(micro_batch_size=32, global_batch_size=4096, fp16=True),
    parallel=ParallelConfig(zero_stage=1, cuda_graphs="auto"),
)
WITHOUT_GRAPHS = BASE.replace(parallel={"cuda_graphs": "off"})


def step(world_size: int = 64, config: Config = BASE, **changes: dict[str, object]) -> StepEstimate:
    return estimate_step(config.replace(**changes), PARAMETERS, world_size, H100)


def test_products_bound_the_time_from_below() -> None:
    tokens = 32 * 512
    least = flop_per_token(BASE).linear * tokens / (H100.half * 1e12)
    assert least < micro_batch_seconds(BASE, H100) < 4 * least, "50 ms were measured, 3.9 times as long"


def test_small_micro_batches_are_bound_by_their_launches() -> None:
    fast = dataclasses.replace(H100, half=1e9, bandwidth=1e9)
    assert micro_batch_seconds(BASE, fast) == pytest.approx(12 * LAUNCHES * LAUNCH_SECONDS)


def test_products_of_few_tiles_leave_multiprocessors_idle() -> None:
    """4 rows of base are 16 x 6 tiles for 132 multiprocessors, 32 rows are enough."""
    rows = {
        number: micro_batch_seconds(BASE.replace(training={"micro_batch_size": number}), H100) for number in (4, 32)
    }
    assert rows[4] > 1.1 * rows[32] / 8


def test_more_work_takes_longer() -> None:
    plain = step().seconds
    for more in ({"num_layers": 24}, {"seq_length": 1024}, {"vocab_size": 250_000}):
        assert step(model=more).seconds > plain
    assert step(training={"global_batch_size": 8192}).compute == pytest.approx(2 * step().compute)
    assert step(parallel={"checkpoint_activations": True}).device == pytest.approx(4 / 3 * step().device)
    assert estimate_step(BASE, PARAMETERS, 64, V100).seconds > plain


def test_each_axis_brings_its_communication() -> None:
    alone = step(1)
    assert (alone.tensor, alone.pipeline, alone.data) == (0, 0, 0)
    assert step(64).data > 0
    tensor = step(64, parallel={"tensor_model_parallel_size": 2})
    assert tensor.tensor > 0 and tensor.pipeline == 0
    pipeline = step(64, parallel={"pipeline_model_parallel_size": 2})
    assert pipeline.pipeline > 0 and pipeline.tensor == 0
    assert step(64, parallel={"zero_stage": 3}).data > step(64).data


def test_more_ranks_are_faster_but_less_efficient() -> None:
    few, many = step(8), step(64)
    assert many.seconds < few.seconds
    assert mfu(BASE, many.seconds, 64, H100) <= mfu(BASE, few.seconds, 8, H100) < 1


def test_gradients_between_hosts_take_the_hosts_link() -> None:
    """Two bytes per gradient and per weight; 7/8 and 15/16 of them travel."""
    slow = dataclasses.replace(H100, inside=5.0, between=1.0)
    two_steps = BASE.replace(training={"micro_batch_size": 1, "global_batch_size": 16}, model={"seq_length": 8})
    estimate = estimate_step(two_steps, PARAMETERS, 8, slow)
    inside, across = estimate.data, estimate_step(two_steps, PARAMETERS, 16, slow).data
    hidden = max(estimate.device, estimate.host) * 2 / 3
    assert inside == pytest.approx(2 * 7 / 8 * 2 * PARAMETERS / 5e9 - hidden)
    assert across == pytest.approx(2 * 15 / 16 * 2 * PARAMETERS / 1e9 - hidden)


@pytest.mark.parametrize(("stage", "reduced", "gathered"), [(1, 1, 1), (2, 3, 1), (3, 3, 6)])
def test_zero_2_reduces_and_zero_3_gathers_twice_for_every_micro_batch(stage: int, reduced: int, gathered: int) -> None:
    """Three micro-batches on 8 ranks; two bytes per gradient and per weight, 7/8 of which travel."""
    slow = dataclasses.replace(H100, inside=5.0)
    three = {"micro_batch_size": 1, "global_batch_size": 24}
    config = BASE.replace(training=three, parallel={"zero_stage": stage}, model={"seq_length": 8})
    estimate = estimate_step(config, PARAMETERS, 8, slow)
    hidden = max(estimate.device, estimate.host) * 2 / 3
    assert estimate.data == pytest.approx((reduced + gathered) * 7 / 8 * 2 * PARAMETERS / 5e9 - hidden)


@pytest.mark.parametrize(
    ("layout", "share"),
    [({"pipeline_model_parallel_size": 2}, 3 / 4 / 2), ({"zero_stage": 0}, 7 / 8)],  # 2 stages x 4 ranks, 1 x 8
)
def test_pipelines_and_zero_0_reduce_gradients_after_the_backward_pass(layout: dict[str, int], share: float) -> None:
    """Four bytes per gradient and per weight travel in far less time than a backward pass takes, and yet both count."""
    config = BASE.replace(training={"fp16": False})
    one_way = 4 * PARAMETERS / (H100.inside * 1e9)
    assert step(8, config).data == pytest.approx(7 / 8 * one_way)  # the weights
    assert step(8, config, parallel=layout).data == pytest.approx(2 * share * one_way)


def test_tensor_parallel_ranks_on_several_hosts_share_the_slower_link() -> None:
    def seconds(tensor: int) -> float:
        parallel = {"tensor_model_parallel_size": tensor}
        config = BASE.replace(model={"num_attention_heads": 16, "hidden_size": 1024}, parallel=parallel)
        return estimate_step(config, PARAMETERS, 16, V100).tensor

    per_rank = (7 / 8) / (15 / 16)  # of a ring; half as many data-parallel ranks take twice the micro-batches
    assert seconds(8) / seconds(16) == pytest.approx(per_rank * V100.between / V100.inside / 2)


def test_the_longer_of_device_and_host_counts() -> None:
    bf16 = BASE.replace(training={"fp16": False, "bf16": True})
    graphs, launches = (step(1, bf16, parallel={"cuda_graphs": setting}) for setting in ("auto", "off"))
    assert graphs.device == launches.device and graphs.host < launches.device < launches.host
    for estimate in (graphs, launches):
        micro_batches = bf16.training.global_batch_size / bf16.training.micro_batch_size
        assert estimate.compute == pytest.approx(micro_batches * max(estimate.device, estimate.host))


def test_the_host_takes_longer_for_more_layers_compiled_regions_and_recomputation() -> None:
    def host(**changes: dict[str, object]) -> float:
        return step(1, WITHOUT_GRAPHS, **changes).host

    rest = REST * PLAIN_LAYER_SECONDS
    assert host(model={"num_layers": 24}) - rest == pytest.approx(2 * (host() - rest))
    assert host(model={"compile": "on"}) > host(model={"compile": "off"})
    assert host(parallel={"checkpoint_activations": True}) - rest == pytest.approx(4 / 3 * (host() - rest))
    # no graph holds recomputed layers
    again = {"checkpoint_activations": True, "cuda_graphs": "auto"}
    assert host(parallel=again) == host(parallel={"checkpoint_activations": True})
    in_torch = estimate_step(WITHOUT_GRAPHS, PARAMETERS, 1, V100).host  # HCD too
    assert in_torch > host(model={"compile": "off"})


def test_a_device_without_bf16_is_left_out() -> None:
    bf16 = BASE.replace(training={"fp16": False, "bf16": True})
    assert why_not(bf16, V100) and not why_not(bf16, H100) and not why_not(BASE, V100)


def test_fp32_runs_take_tf32_where_there_is_some() -> None:
    assert H100.products("fp32") == H100.half / 2 and V100.products("fp32") == V100.single
    fp32 = BASE.replace(training={"fp16": False})
    assert micro_batch_seconds(fp32, H100) > 1.5 * micro_batch_seconds(BASE, H100)
    assert 0 < mfu(fp32, estimate_step(fp32, PARAMETERS, 8, V100).seconds, 8, V100) < 1
