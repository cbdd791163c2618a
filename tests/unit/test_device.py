"""Lines that a run prints about its device."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp import train
from megatron_ddrp.config import Config
from megatron_ddrp.data.batches.loader import ROW_MULTIPLE
from megatron_ddrp.engine.build import check_device, choices, missing_graphs, other_choices, rows_for, unused_devices
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import graphs
from megatron_ddrp.parallel.process_group import Ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("devices", "ranks", "says"), [(8, 1, True), (8, 8, False), (1, 1, False), (0, 1, False)])
def test_one_process_beside_several_gpus_is_told_how_to_use_them(
    devices: int, ranks: int, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    lines = unused_devices(ranks)
    assert bool(lines) is says
    assert not lines or lines[0].startswith("1 of 8 GPUs used; to use all: deepspeed --module megatron_ddrp pretrain")


def test_replays_need_a_cpu_or_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config().replace(training={"replay_interval": 100}, model={"attention_backend": "sdpa", "compile": "off"})
    check_device(config, CPU)
    monkeypatch.setattr(graphs, "is_nvidia", lambda device: device.type == "cuda")
    check_device(config, GPU)
    with pytest.raises(UserError, match=r"^--replay-interval 100: on GPUs .* \(--cuda-graphs off\); leave it out$"):
        check_device(config.replace(parallel={"cuda_graphs": "off"}), GPU)
    check_device(Config().replace(parallel={"cuda_graphs": "off"}), CPU)


def test_cuda_graphs_need_a_gpu() -> None:
    config = Config()
    for setting in ("off", "auto"):
        asked = config.replace(parallel={"cuda_graphs": setting})
        check_device(asked, CPU)
        assert missing_graphs(asked, CPU) == () and rows_for(asked, CPU) == "cpu"
        assert "graphs" not in choices(asked, CPU)
    with pytest.raises(
        UserError, match="^--cuda-graphs on: CUDA graphs need an NVIDIA GPU, got cpu; use --cuda-graphs off$"
    ) as refusal:
        check_device(config.replace(parallel={"cuda_graphs": "on"}), CPU)
    assert refusal.value.exit_code == 2


def test_a_rank_whose_device_chooses_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow, slower = "triton attention, bf16", "sdpa attention, bf16", "eager attention, bf16"
    assert other_choices([fast, fast]) == []
    assert other_choices([fast, slower, *[slow] * 3, fast, slow]) == [f"rank 1: {slower}", f"ranks 2–4, 6: {slow}"]

    monkeypatch.setattr(train, "gather_objects", lambda own: [own, slow])
    corpus = SimpleNamespace(summary=lambda *_: "text")
    loader = SimpleNamespace(samples=8, num_micro_batches=1)
    lines = train.introduction(Setup(Config(), Ranks(0, 2, CPU)), corpus, loader, (10, 1)).splitlines()  # type: ignore[arg-type]
    assert lines[0].endswith(choices(Config(), CPU)) and lines[1] == f"rank 1: {slow}"


def test_rows_under_graphs_have_few_lengths() -> None:
    config, off = Config(), Config().replace(parallel={"cuda_graphs": "off"})
    assert missing_graphs(config, GPU) == () and ROW_MULTIPLE[rows_for(config, GPU)] == 64
    assert missing_graphs(off, GPU) == () and ROW_MULTIPLE[rows_for(off, GPU)] == 16
    assert ROW_MULTIPLE[rows_for(config, CPU)] == 8
    cut = config.replace(parallel={"zero_stage": 3})
    assert ROW_MULTIPLE[rows_for(cut, GPU)] == 16
    assert missing_graphs(cut, GPU) == ("--cuda-graphs auto: off, no graph holds the layers of --zero-stage 3",)
    assert missing_graphs(cut.replace(parallel={"cuda_graphs": "off"}), GPU) == ()
